//! `hapax storm`: what it sends, what it measures, and a proof that can fail.

use std::net::SocketAddr;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStderr, Command};
use tokio::time::timeout;

use crate::harness::gateway::{Gateway, Start};
use crate::harness::play::hapax;
use crate::harness::receiver::Receiver;
use crate::harness::scene::{PATIENT, SECRET, Scene};

const LIMIT: Duration = Duration::from_secs(120);
const EFFECTS: &str = "select event_id, count(*) from fx.effect group by 1";
/// What it says once everything was let go.
const OVER: &str = "the schedule is over";
/// What it says before it reads the database.
const PAUSED: &str = "the load is over";

/// A run that has begun.
struct Storm {
    child: Child,
    errors: Lines<BufReader<ChildStderr>>,
}

/// What came of it.
#[derive(Debug)]
struct Run {
    code: Option<i32>,
    /// Standard output, as JSON.
    report: Value,
    errors: String,
}

impl Storm {
    /// Against a source of a gateway, with the rest of the arguments in one text.
    fn start(gateway: &Gateway, source: &str, arguments: &str) -> Result<Self> {
        Self::spawn(gateway, gateway.listen()?, source, arguments, &[])
    }

    fn with_effects(gateway: &Gateway, source: &str, arguments: &str) -> Result<Self> {
        Self::spawn(gateway, gateway.listen()?, source, arguments, &["--effects", EFFECTS])
    }

    fn spawn(
        gateway: &Gateway,
        to: SocketAddr,
        source: &str,
        arguments: &str,
        more: &[&str],
    ) -> Result<Self> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hapax"));
        command.args(["storm", "--json", "-", "--source", source, "--config"]).arg(gateway.config());
        command
            .arg("--to")
            .arg(format!("http://{to}/in/{source}"))
            .args(arguments.split_whitespace())
            .args(more);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn()?;
        let errors = BufReader::new(child.stderr.take().context("no stderr")?).lines();
        Ok(Self { child, errors })
    }

    /// Waits until it says that.
    async fn says(&mut self, wanted: &str) -> Result<()> {
        let mut said = Vec::new();
        while let Some(line) = timeout(LIMIT, self.errors.next_line()).await?? {
            if line.contains(wanted) {
                return Ok(());
            }
            said.push(line);
        }
        anyhow::bail!("it never said {wanted:?}: {said:?}")
    }

    async fn go_on(&mut self) -> Result<()> {
        let mut input = self.child.stdin.take().context("no stdin")?;
        Ok(input.write_all(b"\n").await?)
    }

    async fn end(mut self) -> Result<Run> {
        let mut output = String::new();
        let mut stdout = self.child.stdout.take().context("no stdout")?;
        timeout(LIMIT, stdout.read_to_string(&mut output)).await??;
        let mut errors = String::new();
        while let Some(line) = self.errors.next_line().await? {
            errors += &line;
            errors.push('\n');
        }
        let code = timeout(LIMIT, self.child.wait()).await??.code();
        let report = serde_json::from_str(&output).unwrap_or_default();
        Ok(Run { code, report, errors })
    }
}

impl Run {
    fn number(&self, pointer: &str) -> u64 {
        self.report.pointer(pointer).and_then(Value::as_u64).unwrap_or_default()
    }

    fn at(&self, pointer: &str) -> &Value {
        self.report.pointer(pointer).unwrap_or(&Value::Null)
    }

    /// It proved what it should, and its sums are right.
    fn assert_proved(&self) -> Result<()> {
        ensure!(self.code == Some(0), "exit {:?}: {}\n{:#}", self.code, self.errors, self.report);
        ensure!(*self.at("/proof/holds") == true, "{:#}", self.report);
        self.assert_sums()
    }

    fn assert_sums(&self) -> Result<()> {
        let of = |name: &str| self.number(&format!("/{name}"));
        ensure!(
            of("sent") > 0 && of("sent") == of("answered") + of("failed") + of("disconnected"),
            "{:#}",
            self.report
        );
        let sum = |name: &str| -> u64 {
            self.at(&format!("/{name}"))
                .as_object()
                .into_iter()
                .flatten()
                .filter_map(|(_, count)| count.as_u64())
                .sum()
        };
        ensure!(sum("status") == of("answered") && sum("outcomes") == of("answered"), "{:#}", self.report);
        ensure!(sum("failures") == of("failed"), "{:#}", self.report);
        Ok(())
    }

    fn breaks(&self, id: &str, rule: &str) -> Result<()> {
        ensure!(self.code == Some(1), "exit {:?}: {}", self.code, self.errors);
        ensure!(*self.at("/proof/holds") == false, "{:#}", self.report);
        let wanted = format!("{id}: {rule}");
        ensure!(self.errors.contains(&wanted), "{wanted:?} is not in {}", self.errors);
        ensure!(self.number("/proof/breaches") == 1, "{:#}", self.report);
        Ok(())
    }
}

async fn run(gateway: &Gateway, source: &str, arguments: &str) -> Result<Run> {
    Storm::with_effects(gateway, source, arguments)?.end().await
}

#[tokio::test]
async fn every_event_of_a_plain_load_is_proved() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&[]).await?;
    let picture = tempfile::NamedTempFile::new()?;
    let arguments =
        format!("--rate 200 --warm-up 500ms --duration 1s --body 2KiB --svg {}", picture.path().display());
    let run = run(&gateway, "stripe", &arguments).await?;
    run.assert_proved()?;
    assert_eq!((run.number("/sent"), run.number("/status/200"), run.number("/proof/rows")), (300, 300, 300));
    assert_eq!((run.number("/proof/effects"), run.number("/measured/requests")), (300, 200));
    let over_time = run.report["measured"]["over_time"].as_array().context("no points")?;
    assert_eq!(over_time.iter().filter_map(|point| point["answers"].as_u64()).sum::<u64>(), 300);
    assert!(
        scene.found().await?.rows.keys().all(|id| id.contains(run.report["id_prefix"].as_str().unwrap()))
    );
    let picture = std::fs::read_to_string(picture.path())?;
    assert!(!picture.contains("NaN") && !picture.contains("inf"), "{picture}");
    assert_eq!((picture.matches("<polyline").count(), picture.matches("</svg>").count()), (4, 1));
    Ok(())
}

#[tokio::test]
async fn a_ramp_and_copies_come_out_even() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&[]).await?;
    let run = run(&gateway, "stripe", "--ramp 50..350 --duration 1s --duplicates 3").await?;
    run.assert_proved()?;
    assert_eq!((run.number("/sent"), run.number("/proof/events")), (198, 66));
    // One that came while another was being written may be told to come again.
    assert!(
        run.number("/outcomes/accepted") == 66 && run.number("/outcomes/duplicate") > 0,
        "{:#}",
        run.report
    );
    Ok(())
}

#[tokio::test]
async fn copies_at_one_instant_and_one_hot_event_take_effect_once() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&[]).await?;
    let at_once = run(&gateway, "stripe", "--rate 200 --duration 1s --parallel 5").await?;
    at_once.assert_proved()?;
    assert_eq!((at_once.number("/proof/events"), at_once.number("/outcomes/accepted")), (40, 40));
    let hot = run(&gateway, "stripe", "--rate 200 --duration 1s --hot").await?;
    hot.assert_proved()?;
    assert_eq!((hot.number("/sent"), hot.number("/proof/rows"), hot.number("/proof/effects")), (200, 1, 1));
    Ok(())
}

#[tokio::test]
async fn other_bodies_under_one_id_are_told_apart() -> Result<()> {
    let scene = Scene::new().await?;
    for policy in ["report", "refuse", "accept"] {
        // Stripe's own preset does not allow the latter: its bodies change.
        let scheme = "[scheme.steady]\nkind = \"hmac\"\nsign = \"{body}\"\nsig = { from = \"header:x-sig\" }\n\
                      id = \"json:/id\"\nvolatile = []\nsample = '{ \"id\": \"e_{id}\" }'\n";
        let source = format!(
            "[source.{policy}]\nprovider = \"steady\"\nsecrets = [\"{SECRET}\"]\neffect = \"fx.apply\"\non_mismatch = \"{policy}\"\n"
        );
        let gateway = Start::new(scene.settings(&[], &format!("{scheme}{source}"))).start().await?;
        let run = run(&gateway, policy, "--rate 300 --duration 1s --duplicates 3 --mismatch 30").await?;
        run.assert_proved()?;
        assert_eq!(run.number("/proof/events"), 100);
        // Where another body is another event, there is no mismatch, and more rows than ids.
        let is_other = policy == "accept";
        assert_eq!(run.number("/outcomes/mismatch") == 0, is_other, "{policy}: {:#}", run.report);
        assert_eq!(run.number("/proof/rows") > 100, is_other, "{policy}: {:#}", run.report);
        assert_eq!(run.number("/status/422") > 0, policy == "refuse", "{:#}", run.report);
    }
    Ok(())
}

#[tokio::test]
async fn each_event_of_a_batch_is_proved() -> Result<()> {
    let scene = Scene::new().await?;
    let source = format!(
        "[source.debit]\nprovider = \"gocardless\"\nsecrets = [\"{SECRET}\"]\neffect = \"fx.apply\"\n"
    );
    let gateway = Start::new(scene.settings(&[], &source)).start().await?;
    let run = run(&gateway, "debit", "--rate 50 --duration 1s --batch 7 --duplicates 2").await?;
    run.assert_proved()?;
    assert_eq!((run.number("/sent"), run.number("/proof/events"), run.number("/proof/rows")), (50, 175, 175));
    Ok(())
}

#[tokio::test]
async fn clients_that_go_away_lose_nothing() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&[]).await?;
    let arguments = "--rate 400 --duration 1s --duplicates 2 --disconnect 40 --connections 8";
    let run = run(&gateway, "stripe", arguments).await?;
    run.assert_proved()?;
    assert!(run.number("/disconnected") > 50 && run.number("/answered") > 50, "{:#}", run.report);
    let (safe, rows) = (run.number("/proof/safe"), run.number("/proof/rows"));
    assert!(safe <= rows && rows <= 200, "{:#}", run.report);
    Ok(())
}

#[tokio::test]
async fn events_with_targets_and_parked_ones_are_judged_by_what_was_promised() -> Result<()> {
    let scene = Scene::new().await?;
    // It takes nothing: events stay open after their effect.
    let receiver = Receiver::answering(|_, _| (503, Duration::ZERO)).await?;
    let mut overrides = receiver.target("orders");
    overrides.push("source.stripe.targets = [\"orders\"]".to_owned());
    overrides.push("source.other.on_error = \"park\"".to_owned());
    let gateway = scene.gateway(&overrides.iter().map(String::as_str).collect::<Vec<_>>()).await?;
    let targets = run(&gateway, "stripe", "--rate 200 --duration 1s --duplicates 2").await?;
    targets.assert_proved()?;
    assert_eq!((targets.number("/proof/rows"), targets.number("/proof/effects")), (100, 100));
    assert_eq!(targets.number("/proof/done"), 0);
    scene.database().await?.batch_execute("alter table fx.effect add check (false) not valid").await?;
    let parked = run(&gateway, "other", "--rate 100 --duration 1s").await?;
    parked.assert_proved()?;
    assert_eq!((parked.number("/outcomes/parked"), parked.number("/proof/safe")), (100, 100));
    assert_eq!((parked.number("/proof/done"), parked.number("/proof/effects")), (0, 0));
    Ok(())
}

#[tokio::test]
async fn a_stall_shows_in_the_latency_of_all_that_was_due_meanwhile() -> Result<()> {
    let scene = Scene::new().await?;
    let database = scene.database().await?;
    let stalling = "create function fx.stalling(e hapax.event) returns void language plpgsql as $$ begin
        perform pg_advisory_xact_lock_shared(7);
        insert into fx.effect (source, event_id) values (e.source, e.event_id); end $$";
    database.batch_execute(stalling).await?;
    let overrides: Vec<&str> =
        PATIENT.into_iter().chain(["source.stripe.effect = \"fx.stalling\""]).collect();
    let gateway = scene.gateway(&overrides).await?;
    let holder = scene.hold().await?;
    // Two connections: a tool that waits for answers would have measured two slow requests.
    let mut storm = Storm::with_effects(&gateway, "stripe", "--rate 100 --duration 2s --connections 2")?;
    storm.says(OVER).await?;
    drop(holder);
    let run = storm.end().await?;
    run.assert_proved()?;
    assert_eq!(run.number("/measured/requests"), 200);
    // What was due in the first half waited for the second half at least.
    assert!(run.number("/measured/latency_us/p50") >= 990_000, "{:#}", run.report);
    assert!(run.number("/measured/latency_us/p90") >= 1_790_000, "{:#}", run.report);
    // All but those that had a connection, and those that were due at the very end.
    assert!(run.number("/measured/late") >= 190, "{:#}", run.report);
    Ok(())
}

#[tokio::test]
async fn what_is_not_taken_is_sent_again_as_its_provider_would() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&[]).await?;
    let arguments = "--rate 200 --duration 1s --retries-of svix --compress 1000000 --drop-answers 50";
    let lost = run(&gateway, "stripe", arguments).await?;
    lost.assert_proved()?;
    assert_eq!((lost.number("/proof/events"), lost.number("/proof/safe")), (200, 200));
    assert_eq!(lost.number("/sent"), 200 + lost.number("/retries"));
    assert!(lost.number("/retries") > 100 && lost.number("/answers_dropped") >= lost.number("/retries"));
    assert_eq!(lost.number("/outcomes/duplicate"), lost.number("/retries"));
    // Eight attempts at an effect that fails each time, and then no more.
    let database = scene.database().await?;
    database.batch_execute("alter table fx.effect add check (false) not valid").await?;
    let failing = "--rate 20 --duration 1s --retries-of svix --compress 1000000";
    let failed = run(&gateway, "stripe", failing).await?;
    failed.assert_proved()?;
    assert_eq!(
        (failed.number("/sent"), failed.number("/given_up"), failed.number("/status/503")),
        (160, 20, 160)
    );
    assert_eq!((failed.number("/proof/rows"), failed.number("/proof/unsafe_without_row")), (0, 20));
    Ok(())
}

#[tokio::test]
async fn the_knee_is_where_the_gateway_begins_to_refuse() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&[]).await?;
    // No latency is that short: the first step is bad already.
    let none = run(&gateway, "stripe", "--find-knee --rate 50 --duration 500ms --p99-max 0s").await?;
    none.assert_proved()?;
    assert!(
        none.report["knee"]["rate"].is_null() && none.report["knee"]["limit"].is_string(),
        "{:#}",
        none.report
    );
    // A signal ends the search; what was sent is proved.
    let arguments =
        "--find-knee --rate 50 --step 1 --duration 300ms --p99-max 60s --late-max 100 --connections 256";
    let mut search = Storm::with_effects(&gateway, "stripe", arguments)?;
    search.says("50/s: good").await?;
    let pid = search
        .child
        .id()
        .and_then(|pid| rustix::process::Pid::from_raw(pid.cast_signed()))
        .context("no pid")?;
    rustix::process::kill_process(pid, rustix::process::Signal::INT)?;
    let found = search.end().await?;
    found.assert_proved()?;
    assert_eq!(found.report["interrupted"], true);
    assert!(found.report["knee"]["rate"].as_f64() >= Some(50.0), "{:#}", found.report);
    Ok(())
}

#[tokio::test]
async fn a_row_that_is_gone_breaks_the_proof() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&[]).await?;
    let mut storm = Storm::with_effects(&gateway, "plain", "--rate 100 --duration 1s --pause-before-proof")?;
    storm.says(PAUSED).await?;
    let database = scene.database().await?;
    let deleted = "delete from hapax.ledger where event_id = (select max(event_id) from hapax.ledger) returning event_id";
    let id: String = database.query_one(deleted, &[]).await?.get(0);
    // Without an effect, `done` has none; this is about rows alone.
    database.batch_execute("insert into fx.effect select source, event_id from hapax.ledger").await?;
    storm.go_on().await?;
    storm.end().await?.breaks(&id, "it was answered 2xx and the ledger has no row of it")
}

#[tokio::test]
async fn a_doubled_effect_breaks_the_proof() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&[]).await?;
    let mut storm = Storm::with_effects(&gateway, "stripe", "--rate 100 --duration 1s --pause-before-proof")?;
    storm.says(PAUSED).await?;
    let doubled = "insert into fx.effect (source, event_id) select source, min(event_id) from fx.effect \
                   group by source returning event_id";
    let id: String = scene.database().await?.query_one(doubled, &[]).await?.get(0);
    storm.go_on().await?;
    storm.end().await?.breaks(&id, "it took effect more than once")
}

/// Everything else that a ledger can have wrong, one at a time.
#[tokio::test]
async fn any_other_change_breaks_the_proof_too() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&[]).await?;
    let one = "(select min(event_id) from hapax.ledger)";
    let copy = "insert into hapax.ledger (received_at, settled_at, token, status, key, digest, source, scope, event_id)
                select received_at, settled_at, token, status, decode(md5(event_id || 'x'), 'hex'), digest, source, scope";
    let cases = [
        (
            format!("update hapax.ledger set digest = sha256('x') where event_id = {one} returning event_id"),
            "the ledger has a row whose id and digest are of no body that was sent",
        ),
        (
            format!("{copy}, event_id from hapax.ledger where event_id = {one} returning event_id"),
            "the ledger has more than one row of the event",
        ),
        (
            format!("{copy}, event_id || '0' from hapax.ledger where event_id = {one} returning event_id"),
            "the ledger has a row whose id and digest are of no body that was sent",
        ),
        (
            // Of this run by its prefix, and past its last event.
            format!(
                "{copy}, overlay(event_id placing '999999999' from length(event_id) - 8) from hapax.ledger \
                 where event_id = {one} returning event_id"
            ),
            "the ledger has a row of an event that was not sent",
        ),
        (
            "delete from fx.effect where event_id = (select min(event_id) from fx.effect) returning event_id"
                .to_owned(),
            "it is done and took no effect",
        ),
        (
            format!("update hapax.ledger set status = 'rejected' where event_id = {one} returning event_id"),
            "it took effect and is not done",
        ),
    ];
    for (change, rule) in cases {
        let mut storm =
            Storm::with_effects(&gateway, "stripe", "--rate 30 --duration 1s --pause-before-proof")?;
        storm.says(PAUSED).await?;
        let database = scene.database().await?;
        let id: String = database.query_one(&change, &[]).await.context(rule)?.get(0);
        storm.go_on().await?;
        let run = storm.end().await?;
        ensure!(run.code == Some(1), "{rule}: {:?} {}", run.code, run.errors);
        ensure!(run.errors.contains(&format!("{id}: {rule}")), "{id}: {rule}: {}", run.errors);
        database.batch_execute("delete from hapax.ledger; delete from fx.effect").await?;
    }
    Ok(())
}

#[tokio::test]
async fn what_cannot_be_done_is_said_before_anything_is_sent() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&[]).await?;
    let to = gateway.listen()?;
    let cases = [
        ("stripe", "--retries-of github", 64, "it is of: bigcommerce"),
        ("stripe", "--retries-of strip", 64, "did you mean \"stripe\"?"),
        ("stripe", "--mismatch 5", 64, "--duplicates"),
        ("stripe", "--batch 5", 64, "brings one event"),
        ("stripe", "--body 5B", 64, "bytes already"),
        ("nobody", "", 64, "there are: other, plain, stripe"),
        ("stripe", "--rate 0", 2, "--rate"),
        ("stripe", "--ramp 5", 2, "FROM..TO"),
        ("stripe", "--disconnect 101", 2, "from 0 to 100"),
        ("stripe", "--duration 0s", 64, "--duration"),
    ];
    for (source, arguments, code, wanted) in cases {
        let run = Storm::start(&gateway, source, arguments)?.end().await?;
        assert!(
            run.code == Some(code) && run.errors.contains(wanted),
            "{arguments}: {:?} {}",
            run.code,
            run.errors
        );
    }
    let nowhere = Storm::start(&gateway, "stripe", "--svg /nowhere/at/all.svg")?.end().await?;
    assert!(nowhere.code == Some(64) && nowhere.errors.contains("cannot write"), "{}", nowhere.errors);
    let few = format!(
        "ulimit -n 100 && exec {} storm --config {} --source stripe --to http://{to}/ --connections 99",
        env!("CARGO_BIN_EXE_hapax"),
        gateway.config().display()
    );
    let few = Command::new("sh").args(["-c", &few]).output().await?;
    let said = String::from_utf8_lossy(&few.stderr).into_owned();
    assert!(few.status.code() == Some(64) && said.contains("100 open files are allowed"), "{said}");
    let wrong = Storm::spawn(&gateway, to, "stripe", "", &["--effects", "select nothing from nowhere"])?
        .end()
        .await?;
    assert!(
        wrong.code == Some(64) && wrong.errors.contains("--effects"),
        "{:?} {}",
        wrong.code,
        wrong.errors
    );
    assert_eq!(scene.found().await?.rows.len(), 0);
    Ok(())
}

#[tokio::test]
async fn without_a_gateway_or_a_database_there_is_no_proof() -> Result<()> {
    let scene = Scene::new().await?;
    let mut gateway = scene.gateway(&[]).await?;
    let to = gateway.listen()?;
    // The settings that the tool reads name a database that is not there; those of the gateway were read before.
    let text = std::fs::read_to_string(gateway.config())?;
    let moved = text.replace(&scene.stores.database, "no_such_database");
    ensure!(moved != text, "{text}");
    let other = tempfile::NamedTempFile::new()?;
    std::fs::write(other.path(), moved)?;
    let path = other.path().display().to_string();
    let url = format!("http://{to}/in/stripe");
    let arguments =
        ["storm", "--config", &path, "--source", "stripe", "--to", &url, "--rate", "50", "--duration", "1s"];
    let away = hapax(&arguments).await?;
    let said = String::from_utf8_lossy(&away.stderr).into_owned();
    assert!(away.status.code() == Some(69) && said.contains("--no-proof"), "{said}");
    assert_eq!(scene.found().await?.rows.len(), 0);
    let without = hapax(&[&arguments[..], &["--no-proof"]].concat()).await?;
    let table = String::from_utf8_lossy(&without.stdout).into_owned();
    assert!(without.status.success() && table.contains("proof        none"), "{table}");
    assert_eq!(scene.found().await?.rows.len(), 50);
    gateway.sigkill()?;
    let gone = Storm::spawn(&gateway, to, "stripe", "", &[])?.end().await?;
    assert!(
        gone.code == Some(69) && gone.errors.contains("is the gateway running?"),
        "{:?} {}",
        gone.code,
        gone.errors
    );
    Ok(())
}
