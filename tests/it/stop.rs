//! Starting and stopping: what a gateway does without its stores, with wrong ones, and when it is asked to end.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Output;
use std::time::Duration;

use anyhow::{Context as _, Result};
use http::StatusCode;
use serde_json::{Value, json};

use crate::harness::client::Raw;
use crate::harness::gateway::{Gateway, Start};
use crate::harness::play::{
    LIMIT, answer, code, exchange, hapax, is_ready, outcome, patient, post, ready, request,
};
use crate::harness::proxy::{Mode, Proxy};
use crate::harness::scene::{Scene, deliver, event};
use crate::harness::stores::{fresh, postgres};
use crate::harness::wait::eventually;

/// Everything that can take time takes little.
const BRISK: [&str; 8] = [
    "server.deadline = \"1500ms\"",
    "server.drain = \"1500ms\"",
    "server.body_timeout = \"1s\"",
    "in_flight.wait = \"100ms\"",
    "postgres.record_timeout = \"1200ms\"",
    "postgres.statement_timeout = \"1s\"",
    "postgres.connect_timeout = \"500ms\"",
    "postgres.heartbeat = \"200ms\"",
];

/// Sends events until nobody listens any more; the ids of those that were answered 2xx.
async fn send_until_gone(to: std::net::SocketAddr, name: usize) -> Result<Vec<String>> {
    let mut taken = Vec::new();
    for n in 0.. {
        let id = format!("evt_{name}_{n}");
        let Ok(mut connection) = Raw::connect(to).await else { break };
        let body = event(&id, r#""do":"sleep","seconds":0.02"#);
        if connection.write(&request("stripe", &body).0).await.is_err() {
            break;
        }
        // The listener may end before it has seen this connection; then there is no answer, and no work either.
        let Ok((status, text)) = answer(&mut connection).await else { break };
        assert_eq!(status, 200, "{text}");
        taken.push(id);
    }
    Ok(taken)
}

#[tokio::test]
async fn a_stop_under_load_loses_nothing() -> Result<()> {
    let scene = Scene::new().await?;
    let mut gateway = scene.gateway(&BRISK).await?;
    ready(&gateway).await?;
    let to = gateway.listen()?;
    let senders: Vec<_> = (0..6).map(|name| tokio::spawn(send_until_gone(to, name))).collect();
    let under_load = async || {
        let found = scene.found().await.ok()?;
        (found.effects.len() >= 12).then_some(())
    };
    eventually(LIMIT, under_load).await?;
    gateway.sigterm()?;
    is_ready(&gateway, StatusCode::SERVICE_UNAVAILABLE).await?;
    // Out of rotation, and still at work for whoever does not know yet.
    let late = post(&mut gateway.client()?, "stripe", &event("evt_late", "")).await?;
    assert_eq!(
        (late.status.as_u16(), outcome(&late), late.header("connection")),
        (200, "accepted", Some("close"))
    );
    assert_eq!(gateway.wait(LIMIT).await?.code(), Some(0), "{:#?}", gateway.lines());

    let mut taken = BTreeSet::from(["evt_late".to_owned()]);
    for sender in senders {
        taken.extend(sender.await??);
    }
    let accepted = || {
        let lines = gateway.lines();
        let lines = lines.iter().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let ids = lines.filter(|line| line["outcome"] == "accepted");
        ids.filter_map(|line| Some(line["event.id"].as_str()?.to_owned())).collect::<BTreeSet<_>>()
    };
    eventually(LIMIT, || std::future::ready((accepted().len() >= taken.len()).then_some(()))).await?;
    assert_eq!(accepted(), taken, "what was worked on was answered");
    let found = scene.assert_once(&taken).await?;
    assert_eq!(found.rows.len(), taken.len());
    let is_told = |text: &str| gateway.lines().iter().any(|line| line.contains(text));
    assert!(is_told("\"stopped\"") && !is_told("did not end"), "{:#?}", gateway.lines());
    Ok(())
}

#[tokio::test]
async fn a_second_signal_ends_it_at_once() -> Result<()> {
    let scene = Scene::new().await?;
    let mut gateway = scene.gateway(&patient(&[])).await?;
    ready(&gateway).await?;
    gateway.sigterm()?;
    is_ready(&gateway, StatusCode::SERVICE_UNAVAILABLE).await?;
    gateway.sigterm()?;
    // After the drain it would be 0.
    assert_eq!(gateway.wait(LIMIT).await?.code(), Some(70));
    Ok(())
}

#[tokio::test]
async fn without_postgres_it_starts_and_becomes_ready_by_itself() -> Result<()> {
    let scene = Scene::new().await?;
    let proxy = Proxy::start(postgres().address())?;
    proxy.set(Mode::Refuse);
    let url = format!("postgres.url = \"{}\"", postgres().url_at(proxy.address(), &scene.stores.database));
    let gateway = scene.gateway(&[&BRISK[..], &[&url]].concat()).await?;
    is_ready(&gateway, StatusCode::SERVICE_UNAVAILABLE).await?;
    assert_eq!(crate::harness::client::Client::new(gateway.admin()?).get("/live").await?.status, 200);
    let body = event("evt_1", "");
    let refused = post(&mut gateway.client()?, "stripe", &body).await?;
    assert_eq!((refused.status.as_u16(), outcome(&refused)), (503, "unavailable"), "{}", code(&refused));
    assert!(refused.header("retry-after").is_some());

    proxy.set(Mode::Pass);
    is_ready(&gateway, StatusCode::OK).await?;
    let taken = deliver(gateway.listen()?, "stripe", &body).await?;
    assert!(taken.is_success(), "{taken:?}");
    scene.assert_once([&"evt_1".to_owned()]).await?;
    Ok(())
}

/// Why a gateway with these settings does not start, with its exit code.
async fn refusal(settings: String) -> Result<String> {
    match Start::new(settings).start().await {
        Ok(gateway) => anyhow::bail!("it started: {:#?}", gateway.lines()),
        Err(error) => Ok(format!("{error:#}")),
    }
}

#[tokio::test]
async fn an_unmigrated_database_is_refused_with_the_cure() -> Result<()> {
    let scene = Scene { stores: fresh().await? };
    let refused = refusal(scene.settings(&[], "")).await?;
    assert!(refused.contains("exit status: 69") && refused.contains("hapax migrate"), "{refused}");
    Ok(())
}

#[tokio::test]
async fn an_effect_that_cannot_be_called_once_is_refused_by_name() -> Result<()> {
    let scene = Scene::new().await?;
    let functions = "
        create function fx.stable(e hapax.event) returns void language sql stable as $$ select null::void $$;
        create function fx.several(e hapax.event) returns setof void language sql as $$ select null::void $$;
        create function fx.text(e text) returns void language sql as $$ select null::void $$;
        create procedure fx.proc(e hapax.event) language plpgsql as $$ begin end $$;";
    scene.database().await?.batch_execute(functions).await?;
    for (effect, why) in [
        ("fx.missing", "no such function"),
        ("fx.text", "no such function"),
        ("none_such.apply", "none_such"),
        ("fx.stable", "VOLATILE"),
        ("fx.several", "returns a set"),
        ("fx.proc", "procedure"),
    ] {
        let refused = refusal(scene.settings(&[&format!("source.stripe.effect = \"{effect}\"")], "")).await?;
        for part in ["exit status: 69", effect, why] {
            assert!(refused.contains(part), "{part}: {refused}");
        }
    }
    Ok(())
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn ended(output: &Output) -> (Option<i32>, String, String) {
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

fn write(folder: &tempfile::TempDir, settings: &str) -> Result<String> {
    let path = folder.path().join("hapax.toml");
    std::fs::write(&path, settings)?;
    Ok(path.to_str().context("a path that is text")?.to_owned())
}

#[tokio::test]
async fn check_tells_all_mistakes_at_once() -> Result<()> {
    let scene = Scene::new().await?;
    let folder = tempfile::tempdir()?;
    let path = write(&folder, &scene.settings(&[], ""))?;
    for arguments in [&["check", "--config", &path][..], &["check", "--online", "--config", &path]] {
        let (code, out, err) = ended(&hapax(arguments).await?);
        assert_eq!(code, Some(0), "{out}{err}");
        assert!(out.contains("ok, 3 sources"), "{out}");
    }
    let mistakes = [
        "server.deadline = 5",
        "server.drain = \"1 fortnight\"",
        "server.body_maxx = \"1MiB\"",
        "postgres.connections = 0",
        "source.stripe.provider = \"strype\"",
        "source.other.secrets = [\"\"]",
    ];
    let path = write(&folder, &scene.settings(&mistakes, ""))?;
    let (code, out, err) = ended(&hapax(&["check", "--config", &path]).await?);
    assert_eq!((code, &out[..]), (Some(64), ""), "{err}");
    for mistake in mistakes {
        let key = mistake.split_once(" =").context("a key")?.0;
        assert!(err.lines().any(|line| line.starts_with(&path) && line.contains(key)), "{key}: {err}");
    }
    let nowhere = folder.path().join("none.toml");
    let (code, ..) = ended(&hapax(&["check", "--config", nowhere.to_str().context("text")?]).await?);
    assert_eq!(code, Some(64));
    Ok(())
}

#[tokio::test]
async fn check_online_tells_of_every_store() -> Result<()> {
    let scene = Scene::new().await?;
    let folder = tempfile::tempdir()?;
    let away = ["postgres.url = \"postgres://x@127.0.0.1:1/x\"", "fast_tier.url = \"redis://127.0.0.1:1/0\""];
    let path = write(&folder, &scene.settings(&away, ""))?;
    let (code, out, err) = ended(&hapax(&["check", "--online", "--config", &path]).await?);
    assert_eq!((code, &out[..]), (Some(69), ""), "{err}");
    assert!(err.contains("cannot connect to Postgres: ") && err.contains("postgres.url"), "{err}");
    assert!(err.lines().any(|line| line.starts_with("redis: ")), "{err}");
    Ok(())
}

#[tokio::test]
async fn warnings_bury_no_answer() -> Result<()> {
    let scene = Scene::new().await?;
    let folder = tempfile::tempdir()?;
    let warned = "[source.hub]\nprovider = \"github\"\nsecrets = \"s3cret-of-hub\"\n";
    let path = write(&folder, &scene.settings(&[], warned))?;
    let (code, _, err) = ended(&hapax(&["check", "--config", &path]).await?);
    assert!(code == Some(0) && err.contains("warning: source.hub"), "{code:?} {err}");
    let (code, _, err) = ended(&hapax(&["send", "--dry-run", "--config", &path, "--source", "hub"]).await?);
    assert_eq!((code, &err[..]), (Some(0), ""));
    Ok(())
}

#[tokio::test]
async fn send_takes_headers_that_signing_does_not_make() -> Result<()> {
    let scene = Scene::new().await?;
    let folder = tempfile::tempdir()?;
    let path = write(&folder, &scene.settings(&[], ""))?;
    let send = ["send", "--dry-run", "--config", &path, "--source", "stripe", "--header"];
    let (code, out, err) = ended(&hapax(&[&send[..], &["X-Event: issues"]].concat()).await?);
    assert_eq!(code, Some(0), "{err}");
    for line in ["x-event: issues\r\n", "content-type: application/json\r\n"] {
        assert_eq!(out.matches(line).count(), 1, "{out}");
    }
    let (_, out, _) = ended(&hapax(&[&send[..], &["Content-Type: text/plain"]].concat()).await?);
    assert!(out.contains("content-type: text/plain") && !out.contains("json\r\n"), "{out}");
    let (code, _, err) = ended(&hapax(&[&send[..], &["issues"]].concat()).await?);
    assert!(code == Some(2) && err.contains("give NAME: VALUE"), "{code:?} {err}");
    Ok(())
}

#[tokio::test]
async fn migrate_may_run_twice_and_at_the_same_time() -> Result<()> {
    let scene = Scene { stores: fresh().await? };
    let folder = tempfile::tempdir()?;
    let only_record = ["source.stripe.effect = \"none\"", "source.other.effect = \"none\""];
    let settings = scene.settings(&only_record, "");
    let path = write(&folder, &settings)?;
    let arguments = ["migrate", "--config", &path];
    let (one, two) = tokio::try_join!(hapax(&arguments), hapax(&arguments))?;
    let (one, two) = (ended(&one), ended(&two));
    assert_eq!((one.0, two.0), (Some(0), Some(0)), "{one:?} {two:?}");
    let again = ended(&hapax(&arguments).await?);
    assert_eq!(
        (again.0, again.1.trim()),
        (Some(0), "nothing to apply: the schema is up to date"),
        "{again:?}"
    );
    let gateway = Start::new(settings).start().await?;
    let answer = post(&mut gateway.client()?, "stripe", &event("evt_1", "")).await?;
    assert_eq!(outcome(&answer), "accepted");
    Ok(())
}

fn path_of(gateway: &Gateway) -> Result<String> {
    Ok(gateway.config().to_str().context("a path that is text")?.to_owned())
}

#[tokio::test]
async fn what_send_prints_is_what_the_gateway_takes() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&[]).await?;
    let (config, url) = (path_of(&gateway)?, format!("http://{}/in/stripe", gateway.listen()?));
    let arguments = ["send", "--config", &config, "--source", "stripe", "--url", &url];
    let printed = hapax(&[&arguments[..], &["--dry-run"]].concat()).await?;
    assert_eq!(printed.status.code(), Some(0), "{}", text(&printed.stderr));
    assert_eq!(scene.found().await?.rows.len(), 0, "a dry run sends nothing");
    for wanted in ["accepted", "duplicate"] {
        let (status, text) = exchange(gateway.listen()?, &printed.stdout).await?;
        assert_eq!(status, 200, "{text}");
        assert!(text.contains(&format!("hapax-outcome: {wanted}\r\n")), "{text}");
    }
    let (code, out, err) = ended(&hapax(&[&arguments[..], &["-n", "20", "--parallel", "4"]].concat()).await?);
    assert_eq!(code, Some(0), "{err}");
    let report: Value = serde_json::from_str(out.lines().last().context("no report")?)?;
    assert_eq!(report["outcomes"], json!({"accepted": 1, "duplicate": 19}), "{out}");
    assert_eq!(scene.found().await?.rows.len(), 2);
    let nowhere =
        ["send", "--config", &config, "--source", "stripe", "--url", &url.replace("/in/stripe", "/in/none")];
    assert_eq!(ended(&hapax(&nowhere).await?).0, Some(1), "an answer that is not 2xx");
    Ok(())
}

/// Command lines of all processes that name the folder.
fn processes_in(folder: &Path) -> Vec<String> {
    let folder = folder.to_string_lossy().into_owned();
    let processes = std::fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok);
    let lines = processes.filter_map(|process| std::fs::read(process.path().join("cmdline")).ok());
    lines.map(|line| text(&line)).filter(|line| line.contains(&folder)).collect()
}

#[tokio::test]
async fn one_event_can_be_seen_end_to_end_and_leaves_nothing_behind() -> Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir()?;
    // The private Postgres runs as another user when the tests run as root.
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o711))?;
    let dir = folder.path().to_str().context("a path that is text")?;
    let (code, out, err) = ended(&hapax(&["dev", "--once", "--dir", dir]).await?);
    assert_eq!(code, Some(0), "{out}{err}");
    let seen: Value = serde_json::from_str(out.lines().last().context("no line")?)?;
    let ttl_ms = seen["ttl_ms"].as_i64().context("a time to live")?;
    let marker = seen["redis"].as_str().context("a marker")?;
    assert!((1..=86_400_000).contains(&ttl_ms) && marker.starts_with("D "), "{seen}");
    assert_eq!(
        seen,
        json!({
            "sent": 10, "status": {"200": 10}, "outcomes": {"accepted": 1, "duplicate": 9},
            "ledger_rows": 1, "effects": 1, "redis": marker, "ttl_ms": ttl_ms,
        })
    );
    assert_eq!(std::fs::read_dir(folder.path())?.count(), 0, "files are left");
    let gone = || std::future::ready(processes_in(folder.path()).is_empty().then_some(()));
    let left = eventually(Duration::from_secs(10), gone).await;
    left.with_context(|| format!("processes are left: {:#?}", processes_in(folder.path())))
}
