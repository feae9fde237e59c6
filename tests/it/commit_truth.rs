//! With a synchronous standby, a 2xx says that the event is on the standby too: nothing is answered 2xx while a commit
//! waits for it, whatever an effect or a time-out does, and once it is back everything is there once.

use anyhow::{Context as _, Result, ensure};
use hapax::dev::{Postgres, PostgresOptions};
use rustix::process::{Pid, Signal, kill_process};
use tokio_postgres::Client as Database;

use crate::harness::gateway::Gateway;
use crate::harness::load::{LIMIT, burst};
use crate::harness::scene::{Answer, Scene, deliver, event};
use crate::harness::stores::{self, connect, private_postgres};
use crate::harness::wait::eventually;

/// Events give up their wait soon, commits do not, and no statement may take as long as an event may wait.
pub(crate) const HASTY: [&str; 7] = [
    "fast_tier.memory_ttl = \"1ms\"",
    "in_flight.wait = \"200ms\"",
    "postgres.lock_timeout = \"50ms\"",
    "postgres.statement_timeout = \"300ms\"",
    "postgres.record_timeout = \"1s\"",
    "postgres.commit_timeout = \"60s\"",
    "postgres.connections = 16",
];

/// Postgres without any fast tier.
const ALONE: [&str; 5] = [
    "fast_tier.kind = \"off\"",
    "fast_tier.url =",
    "fast_tier.prefix =",
    "fast_tier.timeout =",
    "fast_tier.memory_ttl =",
];

/// A primary that this test alone uses.
pub(crate) struct Primary {
    postgres: Postgres,
    pub(crate) scene: Scene,
    /// Does not wait for standbys itself.
    operator: Database,
}

impl Primary {
    pub(crate) async fn start() -> Result<Self> {
        let postgres = private_postgres(PostgresOptions::default()).await?;
        let mut scene = Scene::on(&postgres, stores::redis().url()).await?;
        scene.stores.redis_prefix = format!("{}:", postgres.address());
        let operator = scene.database().await?;
        operator.batch_execute("set synchronous_commit = local").await?;
        Ok(Self { postgres, scene, operator })
    }

    /// From now on commits wait for these; for nobody if empty.
    pub(crate) async fn wait_for_standbys(&self, names: &str) -> Result<()> {
        self.operator
            .batch_execute(&format!("alter system set synchronous_standby_names = '{names}'"))
            .await?;
        self.operator.batch_execute("select pg_reload_conf()").await?;
        if names.is_empty() {
            let none = async || self.waiting().await.ok()?.is_empty().then_some(());
            return eventually(LIMIT, none).await.context("commits still wait");
        }
        // Commits go by what the checkpointer says, which reads the settings in its own time: a commit of our own tells.
        let waits = async || {
            let fresh = self.scene.database().await.ok()?;
            tokio::select! {
                _ = fresh.batch_execute("select pg_logical_emit_message(true, 'test', '')") => None,
                seen = self.until_waiting(1) => seen.ok(),
            }
        };
        let ours = eventually(LIMIT, waits).await.context("commits do not wait")?;
        self.expose(&ours).await
    }

    /// The sessions whose commits wait for a standby.
    async fn waiting(&self) -> Result<Vec<i32>> {
        let query = "select pid from pg_stat_activity where wait_event = 'SyncRep'";
        Ok(self.operator.query(query, &[]).await?.iter().map(|row| row.get(0)).collect())
    }

    pub(crate) async fn until_waiting(&self, commits: usize) -> Result<Vec<i32>> {
        let enough = async || self.waiting().await.ok().filter(|waiting| waiting.len() >= commits);
        eventually(LIMIT, enough).await.context("no commit waits")
    }

    /// Ends these sessions. What they were committing becomes visible, and no standby has it.
    async fn expose(&self, sessions: &[i32]) -> Result<()> {
        let end = "select pg_terminate_backend(pid, 60000) from unnest($1::int[]) as pid";
        self.operator.execute(end, &[&sessions]).await?;
        Ok(())
    }

    pub(crate) async fn visible(&self) -> Result<i64> {
        Ok(self.operator.query_one("select count(*) from hapax.ledger", &[]).await?.get(0))
    }
}

fn assert_not_promised(answer: &Answer, why: &str) {
    assert!(matches!(answer.status, 409 | 503) && answer.retry_after >= Some(1), "{why}: {answer:?}");
}

async fn send(gateway: &Gateway, id: &str, more: &str) -> Result<Answer> {
    deliver(gateway.listen()?, "stripe", &event(id, more)).await
}

/// Delivers until it is answered 2xx.
async fn redelivered(gateway: &Gateway, id: &str) -> Result<Answer> {
    let again = async || send(gateway, id, "").await.ok().filter(Answer::is_success);
    eventually(LIMIT, again).await.with_context(|| format!("{id} is not taken"))
}

#[tokio::test]
async fn nothing_is_promised_while_its_commit_waits() -> Result<()> {
    let primary = Primary::start().await?;
    let gateway = primary.scene.gateway(&HASTY).await?;
    assert_eq!(redelivered(&gateway, "before").await?.outcome, "accepted");
    primary.wait_for_standbys("nosuch").await?;

    assert_not_promised(&send(&gateway, "evt_1", "").await?, "its commit waits");
    let committing = primary.until_waiting(1).await?;
    assert_not_promised(&send(&gateway, "evt_1", "").await?, "another delivery's commit waits");
    assert_eq!(primary.visible().await?, 1);

    // Visible, and on no standby: whoever reads it has to wait for the standby too.
    primary.expose(&committing).await?;
    let seen = async || (primary.visible().await.ok()? == 2).then_some(());
    eventually(LIMIT, seen).await?;
    primary.expose(&primary.waiting().await?).await?;
    assert_not_promised(&send(&gateway, "evt_1", "").await?, "what it read is on no standby");
    primary.until_waiting(1).await?;

    primary.wait_for_standbys("").await?;
    assert_eq!(redelivered(&gateway, "evt_1").await?.outcome, "duplicate");
    primary.scene.assert_once(&["before".to_owned(), "evt_1".to_owned()]).await?;
    Ok(())
}

/// Who only found the event's row locked promises nothing, so nothing has to be on the standby for that answer.
#[tokio::test]
async fn what_promises_nothing_waits_for_no_standby() -> Result<()> {
    let primary = Primary::start().await?;
    let alone = [&HASTY[..], &ALONE].concat();
    let (first, second) = (primary.scene.gateway(&alone).await?, primary.scene.gateway(&alone).await?);
    primary.wait_for_standbys("nosuch").await?;
    assert_not_promised(&send(&first, "evt_1", "").await?, "its commit waits");
    primary.until_waiting(1).await?;
    let answer = send(&second, "evt_1", "").await?;
    assert_eq!((answer.status, answer.outcome.as_str()), (409, "in_flight"), "{answer:?}");
    assert_eq!(primary.waiting().await?.len(), 1);

    primary.wait_for_standbys("").await?;
    assert_eq!(redelivered(&second, "evt_1").await?.outcome, "duplicate");
    primary.scene.assert_once(&["evt_1".to_owned()]).await?;
    Ok(())
}

/// Postgres then says that the commit is done, and warns that it may be on no standby.
#[tokio::test]
async fn a_wait_that_is_cancelled_is_no_promise() -> Result<()> {
    let primary = Primary::start().await?;
    let gateway = primary.scene.gateway(&HASTY).await?;
    primary.wait_for_standbys("nosuch").await?;
    let (to, body) = (gateway.listen()?, event("evt_1", ""));
    let delivery = tokio::spawn(async move { deliver(to, "stripe", &body).await });
    let committing = primary.until_waiting(1).await?;
    let cancel = "select pg_cancel_backend(pid) from unnest($1::int[]) as pid";
    primary.operator.execute(cancel, &[&committing]).await?;
    assert_not_promised(&delivery.await??, "its commit's wait was cancelled");
    let seen = async || (primary.visible().await.ok()? == 1).then_some(());
    eventually(LIMIT, seen).await?;
    primary.wait_for_standbys("").await?;
    assert_eq!(redelivered(&gateway, "evt_1").await?.outcome, "duplicate");
    primary.scene.assert_once(&["evt_1".to_owned()]).await?;
    Ok(())
}

/// In three ways, each in a lane of its own.
const HURRIED: &str = "
    create function fx.for_the_session(e hapax.event) returns void language plpgsql as $$
    begin set synchronous_commit = off; perform fx.apply(e); end $$;
    create function fx.for_the_transaction(e hapax.event) returns void language plpgsql as $$
    begin perform fx.apply(e); set local synchronous_commit = off; end $$;
    create function fx.by_a_trigger(e hapax.event) returns void language plpgsql as $$
    begin perform fx.apply(e); insert into fx.late values (e.event_id); end $$;
    create table fx.late (event_id text);
    create function fx.hurry() returns trigger language plpgsql as $$
    begin set synchronous_commit = off; return null; end $$;
    create constraint trigger hurry after insert on fx.late
    deferrable initially deferred for each row execute function fx.hurry();
";

#[tokio::test]
async fn an_effect_that_does_not_wait_changes_nothing() -> Result<()> {
    let primary = Primary::start().await?;
    primary.operator.batch_execute(HURRIED).await?;
    let effects = [
        "source.stripe.effect = \"fx.for_the_session\"",
        "source.other.effect = \"fx.for_the_transaction\"",
        "source.plain.effect = \"fx.by_a_trigger\"",
    ];
    let gateway = primary.scene.gateway(&[&HASTY, &effects[..]].concat()).await?;
    primary.wait_for_standbys("nosuch").await?;
    let to = gateway.listen()?;
    let sources = ["stripe", "other", "plain"];
    let bodies = sources.map(|source| event(source, ""));
    let [one, two, three] = &bodies;
    let answers = tokio::try_join!(
        deliver(to, "stripe", one),
        deliver(to, "other", two),
        deliver(to, "plain", three),
    )?;
    for answer in [answers.0, answers.1, answers.2] {
        assert_not_promised(&answer, "its effect turned synchronous_commit off");
    }
    primary.until_waiting(3).await?;
    assert_eq!(primary.visible().await?, 0);
    primary.wait_for_standbys("").await?;
    for (source, body) in sources.into_iter().zip(&bodies) {
        let again = async || deliver(to, source, body).await.ok().filter(Answer::is_success);
        assert_eq!(eventually(LIMIT, again).await?.outcome, "duplicate");
    }
    primary.scene.assert_once(&sources.map(str::to_owned)).await?;
    Ok(())
}

/// Their digests do not fit into one packet to the client, which therefore has them before the commit.
#[tokio::test]
async fn many_duplicates_in_one_batch_wait_for_the_standby() -> Result<()> {
    const EVENTS: usize = 400;
    let primary = Primary::start().await?;
    let alone = [&HASTY[..], &ALONE, &["postgres.batch_events = 512"]].concat();
    let gateway = primary.scene.gateway(&alone).await?;
    let bodies = || (0..EVENTS).map(|number| event(&format!("evt_{number}"), "")).collect::<Vec<_>>();
    let to = gateway.listen()?;
    let all = async |outcome: &str| {
        let answers = burst(to, "plain", bodies()).await.ok()?;
        answers.iter().all(|answer| answer.outcome == outcome).then_some(())
    };
    eventually(LIMIT, async || {
        burst(to, "plain", bodies()).await.ok()?.iter().all(Answer::is_success).then_some(())
    })
    .await?;
    primary.wait_for_standbys("nosuch").await?;
    for answer in burst(to, "plain", bodies()).await? {
        assert_not_promised(&answer, "a duplicate");
    }
    // The first to come, and the many that came meanwhile; or all of them at once.
    primary.until_waiting(1).await?;
    primary.wait_for_standbys("").await?;
    eventually(LIMIT, async || all("duplicate").await).await?;
    assert_eq!(primary.visible().await?, i64::try_from(EVENTS)?);
    Ok(())
}

#[tokio::test]
async fn what_was_promised_is_on_the_standby() -> Result<()> {
    let mut primary = Primary::start().await?;
    let name = format!("standby-of-{}", primary.postgres.address().port());
    let standby = primary.postgres.start_standby(&name, &PostgresOptions::default())?;
    let receiver = Receiver::of(&standby).await?;
    let gateway = primary.scene.gateway(&HASTY).await?;

    receiver.signal(Signal::STOP)?;
    primary.wait_for_standbys("*").await?;
    assert_not_promised(&send(&gateway, "evt_1", "").await?, "the standby sleeps");
    primary.until_waiting(1).await?;
    receiver.signal(Signal::CONT)?;
    assert_eq!(redelivered(&gateway, "evt_1").await?.outcome, "duplicate");
    let mut promised = vec!["evt_1".to_owned()];
    for number in 2..40 {
        let id = format!("evt_{number}");
        let answer = send(&gateway, &id, "").await?;
        ensure!(answer.is_success(), "{id}: {answer:?}");
        promised.push(id);
    }
    primary.postgres.kill()?;
    connect(&standby.url("postgres")).await?.query_one("select pg_promote()", &[]).await?;
    primary.scene.stores.postgres_url = standby.url(&primary.scene.stores.database);
    assert_eq!(primary.scene.assert_once(&promised).await?.rows.len(), promised.len());
    Ok(())
}

/// The process by which a standby gets what it replays.
struct Receiver(Pid);

impl Receiver {
    async fn of(standby: &Postgres) -> Result<Self> {
        let client = connect(&standby.url("postgres")).await?;
        let query = "select pid from pg_stat_wal_receiver where status = 'streaming'";
        let row = eventually(LIMIT, async || client.query_opt(query, &[]).await.ok()?).await?;
        Ok(Self(Pid::from_raw(row.get(0)).context("a process id")?))
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill_process(self.0, signal)?)
    }
}
