//! Work after the commit while somebody else holds locks: what is locked waits, and nothing else does.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use http::HeaderMap;
use tokio_postgres::Client as Database;

use super::harness::gateway::{Gateway, Start};
use super::harness::load::{metric, until_metric};
use super::harness::receiver::Receiver;
use super::harness::scene::{Scene, deliver, event};
use super::harness::wait::eventually;

const LONG: Duration = Duration::from_secs(60);

/// Leases that run out soon.
const SHORT: [&str; 2] = ["work.lease = \"2s\"", "target.orders.timeout = \"1900ms\""];

/// A receiver that answers `evt_1` after a second.
async fn slow() -> Result<Receiver> {
    let answers = |headers: &HeaderMap, _: usize| {
        let first = headers.get("hapax-event-id").is_some_and(|id| id == "evt_1");
        (200, if first { Duration::from_secs(1) } else { Duration::ZERO })
    };
    Receiver::answering(answers).await
}

/// A gateway whose source `plain` delivers to `receiver`.
async fn gateway(scene: &Scene, receiver: &Receiver, more: &[&str]) -> Result<Gateway> {
    let target = receiver.target("orders");
    let keys = ["source.plain.targets = [\"orders\"]", "work.poll = \"100ms\""];
    let keys: Vec<&str> = target.iter().map(String::as_str).chain(keys).chain(more.iter().copied()).collect();
    Start::new(scene.settings(&keys, "")).start().await
}

/// Waits until the statement finds a row.
async fn until(database: &Database, statement: &str) -> Result<()> {
    let found = async || (!database.query(statement, &[]).await.ok()?.is_empty()).then_some(());
    eventually(LONG, found).await.with_context(|| statement.to_owned())
}

fn of(id: &str, what: &str) -> String {
    format!("select from hapax.job j join hapax.ledger l using (key) where l.event_id = '{id}' and {what}")
}

#[tokio::test]
async fn a_job_that_somebody_locked_delays_no_other_result() -> Result<()> {
    let (scene, receiver) = (Scene::new().await?, slow().await?);
    let gateway = gateway(&scene, &receiver, &SHORT).await?;
    deliver(gateway.listen()?, "plain", &event("evt_1", "")).await?;
    receiver.until(1).await?;
    let (database, other) = (scene.database().await?, scene.database().await?);
    other.batch_execute(&format!("begin; {} for update of j", of("evt_1", "true"))).await?;
    // Its delivery ends among others.
    let mut at = 2;
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(4) {
        deliver(gateway.listen()?, "plain", &event(&format!("evt_{at}"), "")).await?;
        receiver.until(at).await?;
        at += 1;
    }
    let waiting = "select from hapax.events where status = 'open' having count(*) = 1";
    let begun = Instant::now();
    until(&database, waiting).await?;
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    other.batch_execute("commit").await?;
    until(&database, "select from hapax.events where event_id = 'evt_1' and status = 'done'").await?;
    Ok(())
}

#[tokio::test]
async fn what_is_spent_and_locked_does_not_stand_in_the_way() -> Result<()> {
    let scene = Scene::new().await?;
    let fails = |headers: &HeaderMap, _: usize| {
        let first = headers.get("hapax-event-id").is_some_and(|id| id == "evt_1");
        (if first { 422 } else { 200 }, Duration::ZERO)
    };
    let receiver = Receiver::answering(fails).await?;
    let more = ["target.orders.concurrency = 1", "target.orders.retry_base = \"1h\""];
    let gateway = gateway(&scene, &receiver, &more).await?;
    deliver(gateway.listen()?, "plain", &event("evt_1", "")).await?;
    let (database, other) = (scene.database().await?, scene.database().await?);
    until(&database, &of("evt_1", "j.error is not null and j.token is null")).await?;
    other.batch_execute("begin; select from hapax.ledger where event_id = 'evt_1' for update").await?;
    let spent = "update hapax.job set attempts = attempts_max, due_at = clock_timestamp() - interval '1 s'";
    database.batch_execute(spent).await?;
    deliver(gateway.listen()?, "plain", &event("evt_2", "")).await?;
    until(&database, "select from hapax.events where event_id = 'evt_2' and status = 'done'").await?;
    other.batch_execute("commit").await?;
    until(&database, "select from hapax.events where event_id = 'evt_1' and status = 'dead'").await?;
    Ok(())
}

#[tokio::test]
async fn jobs_of_events_that_were_deleted_by_hand_are_given_up() -> Result<()> {
    let scene = Scene::new().await?;
    let receiver =
        Receiver::answering(|_, before| (if before < 4 { 422 } else { 200 }, Duration::ZERO)).await?;
    let more = ["target.orders.concurrency = 1", "target.orders.retry_base = \"1h\""];
    let gateway = gateway(&scene, &receiver, &more).await?;
    let database = scene.database().await?;
    for id in ["evt_1", "evt_2", "evt_3", "evt_4"] {
        deliver(gateway.listen()?, "plain", &event(id, "")).await?;
        until(&database, &of(id, "j.error is not null and j.token is null")).await?;
    }
    let gone = "begin; delete from hapax.ledger; \
                update hapax.job set due_at = clock_timestamp() - interval '1 s', attempts = attempts_max; commit";
    database.batch_execute(gone).await?;
    deliver(gateway.listen()?, "plain", &event("evt_5", "")).await?;
    until(&database, "select from hapax.events where event_id = 'evt_5' and status = 'done'").await?;
    until(&database, "select from hapax.job where state = 'discarded' having count(*) = 4").await?;
    Ok(())
}

#[tokio::test]
async fn defaults_of_the_role_do_not_matter() -> Result<()> {
    let scene = Scene::new().await?;
    let receiver =
        Receiver::answering(|_, before| (if before < 1 { 422 } else { 200 }, Duration::ZERO)).await?;
    let (database, name) = (scene.database().await?, &scene.stores.database);
    for setting in [
        "default_transaction_isolation = 'serializable'",
        "statement_timeout = '5s'",
        "lock_timeout = '1s'",
        "search_path = ''",
        "timezone = 'Asia/Kolkata'",
        "datestyle = 'SQL, DMY'",
        "intervalstyle = 'sql_standard'",
        "bytea_output = 'escape'",
    ] {
        database.batch_execute(&format!("alter database \"{name}\" set {setting}")).await?;
    }
    let gateway = gateway(&scene, &receiver, &["target.orders.attempts_max = 1"]).await?;
    assert_eq!(deliver(gateway.listen()?, "plain", &event("evt_1", "")).await?.status, 200);
    until(&database, "select from hapax.events where event_id = 'evt_1' and status = 'dead'").await?;
    let other = scene.database().await?;
    other.execute("select hapax.make_body_partitions(12)", &[]).await?;
    let days = "select pg_get_expr(relpartbound, oid) from pg_class where relname like 'body\\_2%' and relkind = 'r'";
    other.batch_execute("set timezone = 'UTC'; set datestyle = 'ISO'").await?;
    let days: Vec<String> = other.query(days, &[]).await?.iter().map(|row| row.get(0)).collect();
    assert!(days.len() >= 13 && days.iter().all(|day| day.matches("00:00:00+00").count() == 2), "{days:?}");
    for command in [&["events", "retry", "--all"][..], &["retain", "--once"]] {
        let mut program = std::process::Command::new(env!("CARGO_BIN_EXE_hapax"));
        let output = program.args(command).arg("--config").arg(gateway.config()).output()?;
        assert_eq!(output.status.code(), Some(0), "{command:?}: {output:?}");
    }
    until(&database, "select from hapax.events where event_id = 'evt_1' and status = 'done'").await?;
    Ok(())
}

#[tokio::test]
async fn a_target_that_is_taken_out_and_put_back_keeps_its_bound() -> Result<()> {
    let (scene, receiver) = (Scene::new().await?, slow_all().await?);
    let target = receiver.target("orders");
    let of = |with: bool| {
        let mut keys =
            vec!["server.reload_check = \"off\"", "work.poll = \"100ms\"", "target.orders.concurrency = 1"];
        keys.extend(target.iter().map(String::as_str));
        keys.push("source.plain.targets = [\"orders\"]");
        if !with {
            keys = vec!["server.reload_check = \"off\"", "work.poll = \"100ms\""];
        }
        scene.settings(&keys, "")
    };
    let mut gateway = Start::new(of(true)).start().await?;
    deliver(gateway.listen()?, "plain", &event("evt_1", "")).await?;
    deliver(gateway.listen()?, "plain", &event("evt_2", "")).await?;
    receiver.until(1).await?;
    for with in [false, true] {
        let label = "result=\"ok\"";
        let before = metric(&gateway, "hapax_config_reloads_total", label).await?;
        std::fs::write(gateway.config(), of(with))?;
        gateway.signal(rustix::process::Signal::HUP)?;
        until_metric(&gateway, "hapax_config_reloads_total", label, |count| count > before).await?;
    }
    receiver.until(2).await?;
    until(&scene.database().await?, "select from hapax.events where status = 'done' having count(*) = 2")
        .await?;
    assert_eq!(receiver.peak(), 1);
    Ok(())
}

/// A receiver that answers after three seconds.
async fn slow_all() -> Result<Receiver> {
    Receiver::answering(|_, _| (200, Duration::from_secs(3))).await
}

#[tokio::test]
async fn replays_that_are_refused_and_functions_that_are_gone() -> Result<()> {
    let (scene, receiver) = (Scene::new().await?, Receiver::start().await?);
    let more = [
        "source.stripe.targets = [\"orders\"]",
        "source.stripe.on_error = \"park\"",
        "source.stripe.retry_base = \"50ms\"",
    ];
    let gateway = gateway(&scene, &receiver, &more).await?;
    let database = scene.database().await?;
    let run = |arguments: &[&str]| {
        let mut program = std::process::Command::new(env!("CARGO_BIN_EXE_hapax"));
        let output = program.args(arguments).arg("--config").arg(gateway.config()).output()?;
        anyhow::Ok((output.status.code(), format!("{output:?}")))
    };
    for id in ["evt_1", "evt_2"] {
        assert_eq!(deliver(gateway.listen()?, "stripe", &event(id, "")).await?.status, 200);
        until(&database, &format!("select from hapax.events where event_id = '{id}' and status = 'done'"))
            .await?;
    }
    assert_eq!(receiver.log().len(), 2);
    let refuse = "create or replace function fx.apply(e hapax.event) returns void language plpgsql as $$ begin \
                  raise exception 'no' using errcode = 'HX001'; end $$";
    database.batch_execute(refuse).await?;
    let ran = run(&["events", "replay", "--source", "stripe", "--id", "evt_1"])?;
    assert_eq!(ran.0, Some(0), "{ran:?}");
    until(&database, "select from hapax.events where event_id = 'evt_1' and status = 'rejected'").await?;
    let again = deliver(gateway.listen()?, "stripe", &event("evt_1", "")).await?;
    assert_eq!((again.status, again.outcome.as_str()), (200, "duplicate"));
    database.batch_execute("alter function fx.apply(hapax.event) rename to applied").await?;
    let ran = run(&["events", "replay", "--source", "stripe", "--id", "evt_2"])?;
    assert_eq!(ran.0, Some(0), "{ran:?}");
    until(&database, "select from hapax.events where event_id = 'evt_2' and status = 'failed'").await?;
    let work = "create function fx.apply(e hapax.event) returns void language sql as $$ select $$";
    database.batch_execute(work).await?;
    until(&database, "select from hapax.events where event_id = 'evt_2' and status = 'done' and replay = 1")
        .await?;
    eventually(LONG, async || (receiver.log().len() == 3).then_some(())).await?;
    let ids: std::collections::BTreeSet<String> =
        receiver.log().iter().map(|delivery| delivery.header("webhook-id").to_owned()).collect();
    assert_eq!(ids.len(), 3);
    Ok(())
}

/// An attempt that another has taken over: whatever it says comes to nothing, while the other is at work and afterwards.
#[tokio::test]
async fn a_result_of_before_says_nothing_of_the_attempt_after_it() -> Result<()> {
    let (scene, receiver) = (Scene::new().await?, Receiver::start().await?);
    receiver.hold();
    let mut gateway = gateway(&scene, &receiver, &[]).await?;
    deliver(gateway.listen()?, "plain", &event("evt_1", "")).await?;
    receiver.until(1).await?;
    gateway.sigkill()?;
    let database = scene.database().await?;
    let take = async || -> Result<(Vec<u8>, String)> {
        database.batch_execute("update hapax.job set due_at = clock_timestamp()").await?;
        let take = "select (t.task).key, (t.task).token::text \
                    from hapax.take_from('target:orders', 1, '1 minute', '-infinity') t";
        let row = database.query_one(take, &[]).await?;
        Ok((row.get(0), row.get(1)))
    };
    let (key, stale) = take().await?;
    let (_, mine) = take().await?;
    let finish = async |token: &str, letter: &str, careful: bool| -> Result<bool> {
        let finish = "select f.mine[1] from hapax.finish(array[$1::bytea], '{target:orders}', array[$2::text::uuid], \
                      array[$3::text], '{null}', '{0}', $4) f";
        Ok(database.query_one(finish, &[&key, &token, &letter, &careful]).await?.get(0))
    };
    let stands = async || -> Result<String> {
        let job = "select concat_ws(' ', l.status, j.state, j.token, j.attempts, j.due_at, j.error, j.settled_at) \
                   from hapax.job j join hapax.ledger l using (key)";
        Ok(database.query_one(job, &[]).await?.get(0))
    };
    let held = stands().await?;
    assert!(held.contains(&mine) && held.starts_with("open pending"), "{held}");
    let says_nothing = async |stands_at: &str| -> Result<()> {
        for (letter, careful) in
            ["d", "f", "x", "b", "r"].map(|letter| [(letter, false), (letter, true)]).concat()
        {
            assert!(!finish(&stale, letter, careful).await?, "{letter}");
            assert_eq!(stands().await?, stands_at, "{letter}");
        }
        Ok(())
    };
    says_nothing(&held).await?;
    assert!(finish(&mine, "d", false).await?);
    let done = stands().await?;
    assert!(done.starts_with("done done"), "{done}");
    says_nothing(&done).await
}

/// A result that cannot be told yet is held on to, lease after lease.
#[tokio::test]
async fn what_takes_longer_than_its_lease_is_held_on_to() -> Result<()> {
    let (scene, receiver) = (Scene::new().await?, Receiver::start().await?);
    receiver.hold();
    let short = ["work.lease = \"3s\"", "target.orders.timeout = \"2900ms\""];
    let one = gateway(&scene, &receiver, &short).await?;
    deliver(one.listen()?, "plain", &event("evt_1", "")).await?;
    receiver.until(1).await?;
    let (database, other) = (scene.database().await?, scene.database().await?);
    other.batch_execute("begin; select from hapax.ledger where event_id = 'evt_1' for update").await?;
    let _two = gateway(&scene, &receiver, &short).await?;
    receiver.go_on();
    until(&database, "select from hapax.job where received_at < clock_timestamp() - interval '8 seconds'")
        .await?;
    let held = "select from hapax.job where attempts = 1 and token is not null";
    assert_eq!((receiver.log().len(), database.query(held, &[]).await?.len()), (1, 1));
    other.batch_execute("rollback").await?;
    until(&database, "select from hapax.job where state = 'done' and attempts = 1").await?;
    assert_eq!(receiver.log().len(), 1);
    Ok(())
}

#[tokio::test]
async fn what_nobody_takes_is_told_by_how_long_it_waits() -> Result<()> {
    let (scene, receiver) = (Scene::new().await?, Receiver::start().await?);
    let (database, locker) = (scene.database().await?, scene.database().await?);
    // Without a share no delivery begins.
    locker.batch_execute("begin; lock table hapax.share in access exclusive mode").await?;
    let gateway = gateway(&scene, &receiver, &[]).await?;
    for id in ["evt_1", "evt_2", "evt_3"] {
        deliver(gateway.listen()?, "plain", &event(id, "")).await?;
    }
    database.batch_execute("update hapax.job set due_at = clock_timestamp() - interval '10 minutes'").await?;
    let queue = "queue=\"target:orders\"";
    until_metric(&gateway, "hapax_queue_lag_seconds", queue, |lag| lag >= 600).await?;
    until_metric(&gateway, "hapax_jobs_waiting", queue, |waiting| waiting == 3).await?;
    locker.batch_execute("rollback").await?;
    receiver.until(3).await?;
    until_metric(&gateway, "hapax_queue_lag_seconds", queue, |lag| lag == 0).await?;
    until_metric(&gateway, "hapax_jobs_waiting", queue, |waiting| waiting == 0).await
}
