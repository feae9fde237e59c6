//! `on_error = "park"`: a failed effect is recorded, answered 2xx, and tried again until it is done or dead.

use std::time::Duration;

use anyhow::Result;
use hapax::effect::Effects;
use tokio_postgres::Client as Database;

use super::harness::gateway::Gateway;
use super::harness::library::{Book, Library};
use super::harness::load::burst;
use super::harness::play::Numbers;
use super::harness::receiver::Receiver;
use super::harness::scene::{Answer, PATIENT, Scene, deliver, event};
use super::harness::wait::eventually;

const LONG: Duration = Duration::from_secs(60);

/// Parks, and tries again at once.
const PARK: [&str; 3] =
    ["source.stripe.on_error = \"park\"", "source.stripe.retry_base = \"20ms\"", "work.poll = \"100ms\""];

/// Makes the effect do its work whatever the body says.
const FIX: &str = "create or replace function fx.apply(e hapax.event) returns void language sql as \
                   $$ insert into fx.effect (source, event_id) values (e.source, e.event_id) $$";

async fn gateway(scene: &Scene, more: &[&str]) -> Result<Gateway> {
    scene.gateway(&[&PARK[..], more].concat()).await
}

/// Waits until the event has that status; returns its attempts.
async fn until_status(scene: &Scene, id: &str, status: &str) -> Result<i32> {
    let database = scene.database().await?;
    let has = async || {
        let query = "select status, attempts from hapax.events where event_id = $1";
        let row = database.query_opt(query, &[&id]).await.ok()??;
        (row.get::<_, &str>(0) == status).then(|| row.get(1))
    };
    eventually(LONG, has).await
}

fn is(answer: &Answer, outcome: &str) -> bool {
    answer.status == 200 && answer.outcome == outcome
}

#[tokio::test]
async fn a_failed_effect_is_parked_and_tried_again_until_it_is_done() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = gateway(&scene, &[]).await?;
    let body = event("evt_1", r#""do":"raise""#);
    let answer = deliver(gateway.listen()?, "stripe", &body).await?;
    assert!(is(&answer, "parked"), "{answer:?}");
    let healthy = deliver(gateway.listen()?, "stripe", &event("evt_2", "")).await?;
    assert!(is(&healthy, "accepted"), "{healthy:?}");
    let found = scene.found().await?;
    assert_eq!((found.rows.get("evt_1"), found.effects.get("evt_1")), (Some(&1), None));
    scene.database().await?.batch_execute(FIX).await?;
    until_status(&scene, "evt_1", "done").await?;
    let again = deliver(gateway.listen()?, "stripe", &body).await?;
    assert!(is(&again, "duplicate"), "{again:?}");
    assert_eq!(scene.found().await?.effects.get("evt_1"), Some(&1));
    Ok(())
}

#[tokio::test]
async fn parked_events_have_no_marker_and_their_redelivery_is_a_duplicate() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = gateway(&scene, &["source.stripe.retry_base = \"1h\""]).await?;
    let body = event("evt_1", r#""do":"raise""#);
    assert!(is(&deliver(gateway.listen()?, "stripe", &body).await?, "parked"));
    eventually(LONG, async || scene.markers().await.ok()?.is_empty().then_some(())).await?;
    let again = deliver(gateway.listen()?, "stripe", &body).await?;
    assert!(is(&again, "duplicate") && again.rearmed, "{again:?}");
    Ok(())
}

#[tokio::test]
async fn after_its_last_attempt_it_is_dead_and_a_redelivery_arms_it_again() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = gateway(&scene, &["source.stripe.attempts_max = 3"]).await?;
    let body = event("evt_1", r#""do":"raise""#);
    assert!(is(&deliver(gateway.listen()?, "stripe", &body).await?, "parked"));
    assert_eq!(until_status(&scene, "evt_1", "dead").await?, 3);
    scene.database().await?.batch_execute(FIX).await?;
    let again = deliver(gateway.listen()?, "stripe", &body).await?;
    assert!(is(&again, "duplicate") && again.rearmed, "{again:?}");
    until_status(&scene, "evt_1", "done").await?;
    assert_eq!(scene.found().await?.effects.get("evt_1"), Some(&1));
    Ok(())
}

#[tokio::test]
async fn an_effect_that_ends_its_connection_each_time_runs_out_of_attempts() -> Result<()> {
    let scene = Scene::new().await?;
    let kill = "create or replace function fx.apply(e hapax.event) returns void language plpgsql as $$ begin \
                if hapax.json(e)->>'do' = 'raise' and e.attempt > 1 then perform pg_terminate_backend(pg_backend_pid()); end if; \
                if hapax.json(e)->>'do' = 'raise' then raise exception 'first'; end if; \
                insert into fx.effect (source, event_id) values (e.source, e.event_id); end $$";
    scene.database().await?.batch_execute(kill).await?;
    let gateway = gateway(&scene, &["source.stripe.attempts_max = 4"]).await?;
    assert!(is(&deliver(gateway.listen()?, "stripe", &event("evt_1", r#""do":"raise""#)).await?, "parked"));
    assert_eq!(until_status(&scene, "evt_1", "dead").await?, 4);
    assert!(is(&deliver(gateway.listen()?, "stripe", &event("evt_2", "")).await?, "accepted"));
    Ok(())
}

#[tokio::test]
async fn a_parked_event_can_be_refused_for_good() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = gateway(&scene, &[]).await?;
    let body = event("evt_1", r#""do":"raise""#);
    assert!(is(&deliver(gateway.listen()?, "stripe", &body).await?, "parked"));
    let refuse = "create or replace function fx.apply(e hapax.event) returns void language plpgsql as \
                  $$ begin raise exception 'never' using errcode = 'HX001'; end $$";
    scene.database().await?.batch_execute(refuse).await?;
    until_status(&scene, "evt_1", "rejected").await?;
    let again = deliver(gateway.listen()?, "stripe", &body).await?;
    assert!(is(&again, "duplicate") && !again.rearmed, "{again:?}");
    Ok(())
}

#[tokio::test]
async fn targets_get_an_event_once_its_effect_is_done_and_never_one_that_is_refused() -> Result<()> {
    let (scene, receiver) = (Scene::new().await?, Receiver::start().await?);
    let target = receiver.target("orders");
    let mut keys: Vec<&str> = target.iter().map(String::as_str).collect();
    keys.push("source.stripe.targets = [\"orders\"]");
    let gateway = gateway(&scene, &keys).await?;
    let bodies = ["evt_1", "evt_2", "evt_3"].into_iter().zip(["", r#""do":"raise""#, r#""do":"reject""#]);
    for (id, more) in bodies {
        assert_eq!(deliver(gateway.listen()?, "stripe", &event(id, more)).await?.status, 200);
    }
    until_status(&scene, "evt_1", "done").await?;
    let before: Vec<String> = receiver.log().iter().map(|delivery| delivery.event_id().to_owned()).collect();
    assert_eq!(before, ["evt_1"]);
    scene.database().await?.batch_execute(FIX).await?;
    until_status(&scene, "evt_2", "done").await?;
    assert_eq!(receiver.taken().into_keys().collect::<Vec<_>>(), ["evt_1", "evt_2"]);
    until_status(&scene, "evt_3", "rejected").await?;
    Ok(())
}

#[tokio::test]
async fn many_parked_events_are_each_done_once_by_two_gateways() -> Result<()> {
    let scene = Scene::new().await?;
    let (one, two) = (gateway(&scene, &[]).await?, gateway(&scene, &[]).await?);
    let body =
        |at: usize| event(&format!("evt_{at}"), if at.is_multiple_of(3) { "" } else { r#""do":"raise""# });
    for (at, gateway) in [&one, &two].into_iter().enumerate() {
        let answers =
            burst(gateway.listen()?, "stripe", (0..150).map(|n| body(at * 150 + n)).collect()).await?;
        assert!(answers.iter().all(Answer::is_success));
    }
    scene.database().await?.batch_execute(FIX).await?;
    let all = async || {
        let found = scene.found().await.ok()?;
        (found.effects.len() == 300).then_some(found)
    };
    let found = eventually(LONG, all).await?;
    assert!(found.effects.values().all(|times| *times == 1));
    Ok(())
}

#[tokio::test]
async fn a_rust_effect_is_parked_too() -> Result<()> {
    let (scene, book) = (Scene::new().await?, Book::default());
    let keys = [
        "source.stripe.effect = \"rust:book\"",
        "source.stripe.on_error = \"park\"",
        "source.stripe.attempts_max = 4",
        "source.stripe.retry_base = \"20ms\"",
        "work.poll = \"100ms\"",
    ];
    let gateway = Library::start(&scene.settings(&keys, ""), &book.registered()).await?;
    let answer = deliver(gateway.listen(), "stripe", &event("evt_1", r#""do":"fail""#)).await?;
    assert!(is(&answer, "parked"), "{answer:?}");
    assert_eq!(until_status(&scene, "evt_1", "dead").await?, 4);
    assert_eq!((book.calls(), scene.found().await?.effects.get("evt_1")), (4, None));
    let once = r#""do":"once","sql":"select 1/0""#;
    let other = Book::default();
    let gateway = Library::start(&scene.settings(&keys, ""), &other.registered()).await?;
    let answer = deliver(gateway.listen(), "stripe", &event("evt_2", once)).await?;
    assert!(is(&answer, "parked"), "{answer:?}");
    until_status(&scene, "evt_2", "done").await?;
    assert_eq!(scene.found().await?.effects.get("evt_2"), Some(&1));
    Ok(())
}

/// A delivery of a failed event under another body is a mismatch: nothing is armed, and no lease stays behind to be waited for.
#[tokio::test]
async fn a_mismatch_of_a_failed_event_leaves_no_lease() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway =
        gateway(&scene, &["source.stripe.retry_base = \"1h\"", "fast_tier.lease = \"10m\""]).await?;
    assert!(is(&deliver(gateway.listen()?, "stripe", &event("evt_1", r#""do":"raise""#)).await?, "parked"));
    let other = deliver(gateway.listen()?, "stripe", &event("evt_1", r#""do":"raise","n":2"#)).await?;
    assert!(is(&other, "mismatch") && !other.rearmed, "{other:?}");
    assert_eq!(scene.markers().await?.len(), 0, "the answer comes after the release");
    Ok(())
}

/// What ends a done marker ends no lease: that belongs to a delivery under way.
#[tokio::test]
async fn ending_a_marker_ends_nobodys_lease() -> Result<()> {
    let (scene, script) = (Scene::new().await?, include_str!("../../src/claim/forget.lua"));
    let mut redis = scene.redis().await?;
    for (value, gone) in [("L abc", 0), ("D abcdefgh AAAAAAAA", 1), ("else", 0)] {
        let key = scene.redis_key("stripe", value);
        redis::cmd("SET").arg(&key).arg(value).query_async::<()>(&mut redis).await?;
        let deleted: i64 = redis::cmd("EVAL").arg(script).arg(1).arg(&key).query_async(&mut redis).await?;
        assert_eq!(deleted, gone, "{value}");
    }
    let key = scene.redis_key("stripe", "list");
    redis::cmd("LPUSH").arg(&key).arg("x").query_async::<()>(&mut redis).await?;
    let deleted: i64 = redis::cmd("EVAL").arg(script).arg(1).arg(&key).query_async(&mut redis).await?;
    assert_eq!(deleted, 0);
    Ok(())
}

/// Fails twice, since the second try comes within a second, each time after it has written; from then on it works. What it
/// writes says when its statement began.
const THIRD: &str = "create or replace function fx.apply(e hapax.event) returns void language plpgsql as $$ begin \
                     insert into fx.effect (source, event_id, at) values (e.source, e.event_id, statement_timestamp()); \
                     if e.attempt < 3 then raise exception 'not yet'; end if; end $$";
/// Fails once; from then on it works as soon as advisory lock 7 is free.
const WAITS: &str = "create or replace function fx.apply(e hapax.event) returns void language plpgsql as $$ begin \
                     if e.attempt = 1 then raise exception 'first'; end if; perform pg_advisory_xact_lock_shared(7); \
                     insert into fx.effect (source, event_id) values (e.source, e.event_id); end $$";
/// The third turn comes only when the test says so and is the last one, and nothing is waited for for long.
const LATER: [&str; 4] = [
    "source.stripe.retry_base = \"1h\"",
    "source.stripe.attempts_max = 3",
    "postgres.statement_timeout = \"400ms\"",
    "postgres.lock_timeout = \"100ms\"",
];

/// Waits until so many events have failed twice, and nobody has them.
async fn until_failed_twice(database: &Database, events: i64) -> Result<()> {
    let failed = async || {
        let failed = "select from hapax.job where attempts = 2 and token is null having count(*) = $1";
        database.query_opt(failed, &[&events]).await.ok()?.map(drop)
    };
    eventually(LONG, failed).await
}

/// The turn of all that waits is now.
async fn now(database: &Database) -> Result<()> {
    let due = "update hapax.job set due_at = clock_timestamp() where settled_at is null and token is null";
    Ok(database.batch_execute(due).await?)
}

/// Lets the turn come again and again until that many attempts ended so.
async fn until_tried(
    database: &Database,
    metrics: impl AsyncFn() -> Result<Numbers>,
    result: &str,
    times: u64,
) -> Result<()> {
    let tried = async || {
        now(database).await.ok()?;
        let ended = metrics().await.ok()?.sum("hapax_attempts_total", &[result]);
        (ended >= times).then_some(())
    };
    eventually(LONG, tried).await
}

/// Lets the turn come again and again until the event is done; returns its attempts.
async fn until_done(scene: &Scene, database: &Database, id: &str) -> Result<i32> {
    let is_done = async || {
        now(database).await.ok()?;
        let query = "select from hapax.events where event_id = $1 and status = 'done'";
        database.query_opt(query, &[&id]).await.ok()?.map(drop)
    };
    eventually(LONG, is_done).await?;
    until_status(scene, id, "done").await
}

/// Nobody's effect is at fault if others of its group are slow: no attempt is used up, and no time of the effects.
#[tokio::test]
async fn an_effect_group_that_is_busy_counts_no_attempt() -> Result<()> {
    let scene = Scene::new().await?;
    let (database, other) = (scene.database().await?, scene.database().await?);
    database.batch_execute(THIRD).await?;
    let gateway = gateway(&scene, &LATER).await?;
    for id in ["evt_1", "evt_2"] {
        assert!(is(&deliver(gateway.listen()?, "stripe", &event(id, "")).await?, "parked"));
    }
    until_failed_twice(&database, 2).await?;
    let group = "begin; select pg_advisory_xact_lock(hashtextextended('hapax effect group fx.apply', 0))";
    other.batch_execute(group).await?;
    until_tried(&database, async || Numbers::of(&gateway).await, "result=\"ours\"", 6).await?;
    // Given up while somebody waits for it.
    let waits = async || {
        now(&database).await.ok()?;
        let waits = "select from pg_locks where locktype = 'advisory' and not granted and \
                     database = (select oid from pg_database where datname = current_database())";
        database.query_opt(waits, &[]).await.ok()?.map(drop)
    };
    eventually(LONG, waits).await?;
    let released = other.query_one("select clock_timestamp()::text", &[]).await?.get::<_, String>(0);
    other.batch_execute("commit").await?;
    for id in ["evt_1", "evt_2"] {
        assert_eq!(until_done(&scene, &database, id).await?, 3, "{id}");
    }
    assert_eq!(scene.found().await?.effects.values().copied().collect::<Vec<_>>(), [1, 1]);
    let late = "select count(*) from fx.effect where at >= $1::text::timestamptz";
    let late: i64 = database.query_one(late, &[&released]).await?.get(0);
    assert_eq!(late, 2, "the wait is no part of the statement of the effects");
    Ok(())
}

#[tokio::test]
async fn a_parked_event_that_somebody_locked_counts_no_attempt_and_delays_no_other() -> Result<()> {
    let scene = Scene::new().await?;
    let (database, other) = (scene.database().await?, scene.database().await?);
    database.batch_execute(THIRD).await?;
    let gateway = gateway(&scene, &LATER).await?;
    for id in ["evt_1", "evt_2"] {
        assert!(is(&deliver(gateway.listen()?, "stripe", &event(id, "")).await?, "parked"));
    }
    until_failed_twice(&database, 2).await?;
    other.batch_execute("begin; select from hapax.ledger where event_id = 'evt_1' for update").await?;
    until_tried(&database, async || Numbers::of(&gateway).await, "result=\"not_tried\"", 1).await?;
    assert_eq!(until_done(&scene, &database, "evt_2").await?, 3);
    other.batch_execute("commit").await?;
    // By itself: it was not tried.
    assert_eq!(until_status(&scene, "evt_1", "done").await?, 3);
    assert_eq!(scene.found().await?.effects.values().copied().collect::<Vec<_>>(), [1, 1]);
    Ok(())
}

#[tokio::test]
async fn locks_of_others_count_no_attempt_at_a_rust_effect() -> Result<()> {
    let group = "begin; select pg_advisory_xact_lock(hashtextextended('hapax effect group rust:book', 0))";
    let row = "begin; select from hapax.ledger for update";
    // What is said of a row that is locked has to wait for it.
    for (lock, times) in [(group, 4), (row, 1)] {
        let (scene, book) = (Scene::new().await?, Book::default());
        let (database, other) = (scene.database().await?, scene.database().await?);
        let keys = [&PARK[..], &LATER, &["source.stripe.effect = \"rust:book\""]].concat();
        let gateway = Library::start(&scene.settings(&keys, ""), &book.registered()).await?;
        let body = event("evt_1", r#""do":"twice""#);
        assert!(is(&deliver(gateway.listen(), "stripe", &body).await?, "parked"));
        until_failed_twice(&database, 1).await?;
        other.batch_execute(lock).await?;
        let metrics = async || Ok(Numbers(gateway.ask("/metrics").await?.1));
        until_tried(&database, metrics, "result=\"ours\"", times).await?;
        other.batch_execute("commit").await?;
        assert_eq!(until_done(&scene, &database, "evt_1").await?, 3, "{lock}");
        assert_eq!((book.calls(), scene.found().await?.effects.get("evt_1")), (3, Some(&1)), "{lock}");
    }
    Ok(())
}

#[tokio::test]
async fn a_stale_attempt_runs_no_effect() -> Result<()> {
    let scene = Scene::new().await?;
    let mut gateway = gateway(&scene, &["source.stripe.retry_base = \"1h\""]).await?;
    assert!(is(&deliver(gateway.listen()?, "stripe", &event("evt_1", r#""do":"raise""#)).await?, "parked"));
    let database = scene.database().await?;
    until_failed_twice(&database, 1).await?;
    gateway.sigkill()?;
    database.batch_execute(FIX).await?;
    let take = async || -> Result<(Vec<u8>, String)> {
        database.batch_execute("update hapax.job set due_at = clock_timestamp()").await?;
        let take = "select (t.task).key, (t.task).token::text \
                    from hapax.take_from('effect:stripe', 1, '1 minute', '-infinity') t";
        let row = database.query_one(take, &[]).await?;
        Ok((row.get(0), row.get(1)))
    };
    let (key, stale) = take().await?;
    let (_, mine) = take().await?;
    let holds = async |token: &str| -> Result<(bool, bool)> {
        let begin = "select hapax.begin_parked($1, 'effect:stripe', $2::text::uuid) is not null, \
                     cardinality(hapax.lock_parked(array[$1], '{effect:stripe}', array[$2::text::uuid], null)) = 1";
        let row = database.query_one(begin, &[&key, &token]).await?;
        Ok((row.get(0), row.get(1)))
    };
    assert_eq!((holds(&stale).await?, holds(&mine).await?), ((false, false), (true, true)));
    let run = async |token: &str| -> Result<(String, Vec<bool>, i64)> {
        let run = "select outcomes, mine from hapax.run_parked(array[$1::bytea], '{effect:stripe}', \
                   array[$2::text::uuid], '{0}', 'fx.apply', null, '1 minute', 'on', '{}', '{}', '{}')";
        let row = database.query_one(run, &[&key, &token]).await?;
        let effects = database.query_one("select count(*) from fx.effect", &[]).await?;
        Ok((row.get(0), row.get(1), effects.get(0)))
    };
    assert_eq!(run(&stale).await?, ("b".to_owned(), vec![false], 0));
    assert_eq!(run(&mine).await?, ("d".to_owned(), vec![true], 1));
    for token in [&stale, &mine] {
        assert_eq!(run(token).await?, ("b".to_owned(), vec![false], 1));
    }
    assert_eq!(until_status(&scene, "evt_1", "done").await?, 4);
    Ok(())
}

/// Its job is locked, so nobody can hold on to it, and nobody can take it.
#[tokio::test]
async fn an_effect_that_outlasts_its_lease_is_nobody_elses() -> Result<()> {
    let scene = Scene::new().await?;
    let (database, hold) = (scene.database().await?, scene.hold().await?);
    database.batch_execute(WAITS).await?;
    let keys = [&PATIENT[..], &["work.lease = \"1s\""]].concat();
    let (one, _two) = (gateway(&scene, &keys).await?, gateway(&scene, &keys).await?);
    assert!(is(&deliver(one.listen()?, "stripe", &event("evt_1", "")).await?, "parked"));
    let first = scene.waiting(1).await?;
    let past = async || {
        let past = "select from hapax.job where due_at < clock_timestamp() - interval '2 seconds'";
        database.query_opt(past, &[]).await.ok()?.map(drop)
    };
    eventually(LONG, past).await?;
    assert_eq!(scene.waiting(1).await?, first);
    hold.batch_execute("select pg_advisory_unlock(7)").await?;
    assert_eq!(until_status(&scene, "evt_1", "done").await?, 2);
    assert_eq!(scene.found().await?.effects.get("evt_1"), Some(&1));
    Ok(())
}

/// Nobody would work on it, and its lease would be held on to for as long as the process lives.
#[tokio::test]
async fn what_a_loop_had_in_hand_when_it_failed_is_tried_again() -> Result<()> {
    let scene = Scene::new().await?;
    let (database, hold) = (scene.database().await?, scene.hold().await?);
    database.batch_execute(WAITS).await?;
    let keys = [&PATIENT[..], &PARK, &["work.lease = \"1h\""]].concat();
    let gateway = Library::start(&scene.settings(&keys, ""), &Effects::default()).await?;
    assert!(is(&deliver(gateway.listen(), "stripe", &event("evt_1", "")).await?, "parked"));
    let first = scene.waiting(1).await?;
    assert_eq!(gateway.tasks().fail("effect:stripe"), 1);
    let again = async || scene.waiting(1).await.ok().filter(|waiting| *waiting != first).map(drop);
    eventually(LONG, again).await?;
    hold.batch_execute("select pg_advisory_unlock(7)").await?;
    assert_eq!(until_status(&scene, "evt_1", "done").await?, 3, "that it was being tried counts");
    assert_eq!(scene.found().await?.effects.get("evt_1"), Some(&1));
    Ok(())
}

/// What failed together does not come back together.
#[tokio::test]
async fn parked_events_wait_for_different_times() -> Result<()> {
    for (effect, what) in [("fx.apply", "raise"), ("rust:book", "fail")] {
        let (scene, book) = (Scene::new().await?, Book::default());
        let database = scene.database().await?;
        let effect = format!("source.stripe.effect = \"{effect}\"");
        let hour = ["source.stripe.retry_base = \"1h\"", "source.stripe.retry_max = \"1h\"", &effect];
        let keys = [&PATIENT[..], &PARK, &hour].concat();
        let gateway = Library::start(&scene.settings(&keys, ""), &book.registered()).await?;
        let bodies = (0..40).map(|at| event(&format!("evt_{at}"), &format!("\"do\":\"{what}\""))).collect();
        let answers = burst(gateway.listen(), "stripe", bodies).await?;
        assert!(answers.iter().all(|answer| is(answer, "parked")), "{answers:?}");
        // The first time they come back within a second.
        for attempts in [2, 3] {
            assert_scattered(&database, attempts).await?;
            now(&database).await?;
        }
    }
    Ok(())
}

/// 40 jobs that wait for between nothing and an hour once that many attempts have failed: neither half of it is (all but)
/// empty, which by chance alone would be seen once in ten million times.
pub(crate) async fn assert_scattered(database: &Database, attempts: i32) -> Result<()> {
    let failed = async || {
        let failed = "select count(*), count(*) filter (where due_at < clock_timestamp() + interval '30 minutes') \
                      from hapax.job where attempts = $1 and token is null and state::text = 'pending'";
        let row = database.query_one(failed, &[&attempts]).await.ok()?;
        (row.get::<_, i64>(0) == 40).then(|| row.get::<_, i64>(1))
    };
    let soon = eventually(LONG, failed).await?;
    assert!((5..=35).contains(&soon), "{soon} of 40 come back within half of the longest pause");
    Ok(())
}
