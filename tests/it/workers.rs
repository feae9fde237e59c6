//! Workers whose process, database or neighbours misbehave: no result overwrites another, none is lost, and nobody waits
//! for somebody else's lock.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use hapax::effect::Effects;
use rustix::process::Signal;

use super::harness::gateway::Gateway;
use super::harness::library::Library;
use super::harness::load::{burst, metric, until_metric};
use super::harness::play::Numbers;
use super::harness::proxy::{Mode, Proxy};
use super::harness::receiver::Receiver;
use super::harness::scene::{Scene, deliver, event};
use super::harness::stores::postgres;
use super::harness::wait::eventually;
use super::outbox::{LONG, gateway, until_status};
use super::parking::assert_scattered;

/// Jobs by event id: state, attempts, whether somebody holds it.
async fn jobs(scene: &Scene) -> Result<Vec<(String, String, i32, bool)>> {
    let query = "select l.event_id, j.state::text, j.attempts, j.token is not null \
                 from hapax.job j join hapax.ledger l using (key) order by l.event_id";
    let rows = scene.database().await?.query(query, &[]).await?;
    Ok(rows.iter().map(|row| (row.get(0), row.get(1), row.get(2), row.get(3))).collect())
}

fn job(id: &str, state: &str, attempts: i32) -> (String, String, i32, bool) {
    (id.to_owned(), state.to_owned(), attempts, false)
}

async fn send(gateway: &Gateway, ids: &[&str]) -> Result<()> {
    for id in ids {
        let answer = deliver(gateway.listen()?, "plain", &event(id, "")).await?;
        anyhow::ensure!(answer.status == 200, "{answer:?}");
    }
    Ok(())
}

#[tokio::test]
async fn a_gateway_that_stood_still_past_its_lease_does_not_overwrite_its_successor() -> Result<()> {
    let scene = Scene::new().await?;
    let receiver =
        Receiver::answering(|_, before| (200, if before == 0 { LONG } else { Duration::ZERO })).await?;
    let short = ["work.lease = \"1s\"", "target.orders.timeout = \"900ms\""];
    let mut first = gateway(&scene, &[("orders", &receiver)], &short).await?;
    send(&first, &["evt_1"]).await?;
    receiver.until(1).await?;
    first.signal(Signal::STOP)?;
    let second = gateway(&scene, &[("orders", &receiver)], &short).await?;
    until_status(&scene, "evt_1", "done").await?;
    first.signal(Signal::CONT)?;
    until_metric(&first, "hapax_leases_lost_total", "", |lost| lost > 0).await?;
    let [(_, state, attempts, held)] = &jobs(&scene).await?[..] else { panic!("one job") };
    assert_eq!((state.as_str(), held), ("done", &false));
    // More than two where the machine is slower than such a short lease.
    assert!(*attempts >= 2, "{attempts}");
    assert_eq!(metric(&second, "hapax_attempts_total", "result=\"done\"").await?, 1);
    Ok(())
}

#[tokio::test]
async fn what_came_while_nobody_listened_is_found_when_the_listener_is_back() -> Result<()> {
    let (scene, receiver) = (Scene::new().await?, Receiver::start().await?);
    // No look would find it in time.
    let gateway = gateway(&scene, &[("orders", &receiver)], &["work.poll = \"1m\""]).await?;
    send(&gateway, &["evt_1"]).await?;
    until_status(&scene, "evt_1", "done").await?;
    let database = scene.database().await?;
    let listener = async || -> Option<i32> {
        let query =
            "select pid from pg_stat_activity where datname = current_database() and query ilike 'listen%'";
        Some(database.query_opt(query, &[]).await.ok()??.get(0))
    };
    for round in 1..=3 {
        let pid = eventually(LONG, &listener).await?;
        // Ended, and an event is armed, before it can be back: nobody tells of it.
        let arm = "with ended as materialized (select pg_terminate_backend($1)), event as (
                       update hapax.ledger set status = 'open', settled_at = null where (select count(*) from ended) = 1)
                   update hapax.job set state = 'pending', settled_at = null, due_at = clock_timestamp()";
        database.execute(arm, &[&pid]).await?;
        receiver.until(round + 1).await?;
        until_status(&scene, "evt_1", "done").await?;
        let again = async || listener().await.filter(|other| *other != pid);
        eventually(LONG, again).await.context("nobody listens")?;
    }
    // One listens, however often it was ended.
    let tries =
        "select count(*) from pg_stat_activity where datname = current_database() and query ilike 'listen%'";
    assert_eq!(database.query_one(tries, &[]).await?.get::<_, i64>(0), 1);
    Ok(())
}

#[tokio::test]
async fn while_our_postgres_is_away_nothing_counts_against_a_target() -> Result<()> {
    let mut scene = Scene::new().await?;
    let proxy = Proxy::start(postgres().address())?;
    let direct = scene.stores.postgres_url.clone();
    let by_proxy = direct.replace(&postgres().address().to_string(), &proxy.address().to_string());
    anyhow::ensure!(by_proxy != direct, "{direct}");
    let receiver = Receiver::start().await?;
    receiver.hold();
    scene.stores.postgres_url.clone_from(&by_proxy);
    let few = ["target.orders.breaker_failures = 1", "postgres.connect_timeout = \"500ms\""];
    let gateway = gateway(&scene, &[("orders", &receiver)], &few).await?;
    scene.stores.postgres_url = direct;
    let ids = ["evt_1", "evt_2", "evt_3", "evt_4", "evt_5"];
    send(&gateway, &ids).await?;
    receiver.until(ids.len()).await?;
    proxy.set(Mode::Refuse);
    proxy.cut();
    receiver.go_on();
    gateway.log(|line| line["message"] == "results of attempts cannot be told yet").await?;
    assert_eq!(metric(&gateway, "hapax_target_breaker_open", "").await?, 0);
    proxy.set(Mode::Pass);
    for id in ids {
        until_status(&scene, id, "done").await?;
    }
    assert_eq!(jobs(&scene).await?, ids.map(|id| job(id, "done", 1)));
    assert_eq!(receiver.log().len(), ids.len(), "each was sent once");
    assert_eq!(metric(&gateway, "hapax_target_breaker_open", "").await?, 0);
    assert_eq!(metric(&gateway, "hapax_attempts_total", "result=\"done\"").await?, 5);
    assert_eq!(metric(&gateway, "hapax_attempts_total", "").await?, 5, "no attempt ended otherwise");
    Ok(())
}

#[tokio::test]
async fn jobs_of_a_target_that_was_removed_wait_for_it() -> Result<()> {
    let (scene, receiver) = (Scene::new().await?, Receiver::start().await?);
    receiver.refuse(true);
    let by_signal = ["server.reload_check = \"off\""];
    let mut gateway = gateway(&scene, &[("orders", &receiver)], &by_signal).await?;
    send(&gateway, &["evt_1"]).await?;
    receiver.until(1).await?;
    let with = fs::read_to_string(gateway.config())?;
    let without: Vec<&str> = with.lines().filter(|line| !line.contains("orders")).collect();
    let reloads = async |gateway: &mut Gateway, text: &str, count: i64| {
        fs::write(gateway.config(), text)?;
        gateway.signal(Signal::HUP)?;
        until_metric(gateway, "hapax_config_reloads_total", "result=\"ok\"", |seen| seen == count).await
    };
    let before = metric(&gateway, "hapax_config_reloads_total", "result=\"ok\"").await?;
    reloads(&mut gateway, &without.join("\n"), before + 1).await?;
    // Nobody delivers it, and what is new is not for that target.
    let idle = async || {
        let held = jobs(&scene).await.ok()?.iter().any(|(.., held)| *held);
        (!held).then_some(())
    };
    eventually(LONG, idle).await?;
    send(&gateway, &["evt_2"]).await?;
    until_status(&scene, "evt_2", "done").await?;
    let states: Vec<String> = jobs(&scene).await?.into_iter().map(|(_, state, ..)| state).collect();
    assert_eq!(states, ["pending"]);
    receiver.refuse(false);
    reloads(&mut gateway, &with, before + 2).await?;
    until_status(&scene, "evt_1", "done").await?;
    assert_eq!(receiver.taken().len(), 1);
    Ok(())
}

#[tokio::test]
async fn no_more_are_sent_in_a_second_than_the_rate_allows() -> Result<()> {
    let (scene, receiver) = (Scene::new().await?, Receiver::start().await?);
    let gateway = gateway(&scene, &[("orders", &receiver)], &["target.orders.rate = 10"]).await?;
    let started = Instant::now();
    let bodies = (0..15).map(|at| event(&format!("evt_{at}"), "")).collect();
    burst(gateway.listen()?, "plain", bodies).await?;
    let log = receiver.until(15).await?;
    let last = log.iter().map(|delivery| delivery.at).max().context("deliveries")?;
    // One may have been saved up.
    assert!(last - started >= Duration::from_millis(1_300), "15 at 10 a second in {:?}", last - started);
    assert_eq!(receiver.taken().values().sum::<usize>(), 15);
    Ok(())
}

#[tokio::test]
async fn a_target_that_asks_for_a_pause_is_given_it() -> Result<()> {
    let scene = Scene::new().await?;
    let receiver =
        Receiver::answering(|_, before| (if before == 0 { 429 } else { 200 }, Duration::ZERO)).await?;
    let gateway = gateway(&scene, &[("orders", &receiver)], &[]).await?;
    send(&gateway, &["evt_1"]).await?;
    until_status(&scene, "evt_1", "done").await?;
    let [first, second] = &receiver.log()[..] else { panic!("{:?}", receiver.log()) };
    assert!(second.at - first.at >= Duration::from_secs(1), "{:?}", second.at - first.at);
    Ok(())
}

#[tokio::test]
async fn a_stop_hands_back_what_was_not_begun_and_tells_what_was() -> Result<()> {
    let (scene, receiver) = (Scene::new().await?, Receiver::start().await?);
    receiver.hold();
    // What the rate does not allow yet is taken, and waits.
    let slow = ["target.orders.rate = 3", "work.lease = \"1h\"", "server.drain = \"5s\""];
    let mut gateway = gateway(&scene, &[("orders", &receiver)], &slow).await?;
    send(&gateway, &["evt_0", "evt_1", "evt_2", "evt_3", "evt_4", "evt_5", "evt_6", "evt_7"]).await?;
    receiver.until(1).await?;
    gateway.sigterm()?;
    receiver.go_on();
    assert_eq!(gateway.wait(LONG).await?.code(), Some(0), "{:#?}", gateway.lines());
    let sent: Vec<String> = receiver.log().iter().map(|delivery| delivery.event_id().to_owned()).collect();
    let jobs = jobs(&scene).await?;
    for (id, state, attempts, held) in &jobs {
        let begun = sent.contains(id);
        assert_eq!((state.as_str(), *attempts), if begun { ("done", 1) } else { ("pending", 0) }, "{id}");
        assert!(!held, "{id}");
    }
    let shares = "select coalesce(sum(slots), 0) from hapax.share";
    let shares: i64 = scene.database().await?.query_one(shares, &[]).await?.get(0);
    assert_eq!(shares, 0, "nobody waits for the share of a gateway that has ended");
    Ok(())
}

#[tokio::test]
async fn a_result_of_an_event_that_is_locked_holds_up_no_other() -> Result<()> {
    let (scene, receiver) = (Scene::new().await?, Receiver::start().await?);
    receiver.hold();
    let gateway = gateway(&scene, &[("orders", &receiver)], &[]).await?;
    send(&gateway, &["evt_1", "evt_2"]).await?;
    receiver.until(2).await?;
    // As a worker of the user's own does, in a transaction that takes long.
    let locker = scene.database().await?;
    locker.batch_execute("begin; select from hapax.ledger where event_id = 'evt_1' for update").await?;
    receiver.go_on();
    until_status(&scene, "evt_2", "done").await?;
    send(&gateway, &["evt_3"]).await?;
    until_status(&scene, "evt_3", "done").await?;
    locker.batch_execute("rollback").await?;
    until_status(&scene, "evt_1", "done").await?;
    assert_eq!(jobs(&scene).await?, ["evt_1", "evt_2", "evt_3"].map(|id| job(id, "done", 1)));
    assert_eq!(receiver.log().len(), 3, "each was sent once");
    Ok(())
}

#[tokio::test]
async fn a_job_that_is_locked_keeps_no_other_from_being_held() -> Result<()> {
    let (scene, receiver) = (Scene::new().await?, Receiver::start().await?);
    receiver.hold();
    let gateway = gateway(&scene, &[("orders", &receiver)], &["work.lease = \"1h\""]).await?;
    send(&gateway, &["evt_1", "evt_2", "evt_3"]).await?;
    receiver.until(3).await?;
    let (database, locker) = (scene.database().await?, scene.database().await?);
    // As an effect that runs for long does.
    let of = "(select key from hapax.ledger where event_id = 'evt_1')";
    locker.batch_execute(&format!("begin; select from hapax.job where key = {of} for update")).await?;
    let again = "select hapax.hold(array_agg(j.key order by l.event_id), array_agg(j.queue order by l.event_id),
                    array_agg(case l.event_id when 'evt_3' then gen_random_uuid() else j.token end order by l.event_id),
                    interval '2 hours')
                from hapax.job j join hapax.ledger l using (key)";
    let held: Vec<Option<bool>> = database.query_one(again, &[]).await?.get(0);
    assert_eq!(held, [None, Some(true), Some(false)]);
    let later = "select count(*) from hapax.job where due_at > now() + interval '90 minutes'";
    assert_eq!(database.query_one(later, &[]).await?.get::<_, i64>(0), 1);
    receiver.go_on();
    Ok(())
}

#[tokio::test]
async fn jobs_that_ran_out_of_attempts_hide_no_others() -> Result<()> {
    let (scene, receiver) = (Scene::new().await?, Receiver::start().await?);
    receiver.hold();
    let mut gateway = gateway(&scene, &[("orders", &receiver)], &[]).await?;
    send(&gateway, &["evt_1", "evt_2", "evt_3"]).await?;
    gateway.sigkill()?;
    let database = scene.database().await?;
    let ripe = "update hapax.job j set token = null, due_at = now() - interval '1 hour', \
                attempts = case l.event_id when 'evt_3' then 0 else attempts_max end \
                from hapax.ledger l where l.key = j.key";
    database.execute(ripe, &[]).await?;
    let take = "select (t.task).token is null, (t.task).attempt, t.was_due is null \
                from hapax.take_from('target:orders', 10, interval '1 minute', '-infinity') t order by 1 desc";
    let rows = database.query(take, &[]).await?;
    let taken: Vec<(bool, Option<i32>, bool)> =
        rows.iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect();
    assert_eq!(taken, [(true, None, false), (true, None, false), (false, Some(1), false)]);
    let states: Vec<String> = jobs(&scene).await?.into_iter().map(|(_, state, ..)| state).collect();
    assert_eq!(states, ["dead", "dead", "pending"]);
    Ok(())
}

/// A result that the loop of a target has not taken up when it fails: what was delivered is told, and not sent again.
#[tokio::test]
async fn what_was_delivered_is_told_although_its_loop_failed() -> Result<()> {
    let (scene, receiver) = (Scene::new().await?, Receiver::start().await?);
    receiver.hold();
    let mut keys = receiver.target("orders");
    keys.push("source.plain.targets = [\"orders\"]".to_owned());
    keys.push("work.lease = \"1h\"".to_owned());
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let gateway = Library::start(&scene.settings(&keys, ""), &Effects::default()).await?;
    assert_eq!(deliver(gateway.listen(), "plain", &event("evt_1", "")).await?.status, 200);
    receiver.until(1).await?;
    // The loop asks for its share, and waits.
    let (database, locker) = (scene.database().await?, scene.database().await?);
    locker.batch_execute("begin; lock table hapax.share in access exclusive mode").await?;
    let waits = async || {
        let waits = "select from pg_locks where not granted and relation = 'hapax.share'::regclass";
        database.query_opt(waits, &[]).await.ok()?.map(drop)
    };
    eventually(LONG, waits).await?;
    receiver.go_on();
    let ended = async || {
        let metrics = Numbers(gateway.ask("/metrics").await.ok()?.1);
        (metrics.sum("hapax_delivery_seconds_count", &[]) == 1).then_some(())
    };
    eventually(LONG, ended).await?;
    assert_eq!(gateway.tasks().fail("target:orders"), 1);
    until_status(&scene, "evt_1", "done").await?;
    locker.batch_execute("rollback").await?;
    assert_eq!(jobs(&scene).await?, [job("evt_1", "done", 1)]);
    assert_eq!(receiver.log().len(), 1);
    Ok(())
}

#[tokio::test]
async fn events_that_a_target_failed_wait_for_different_times() -> Result<()> {
    let scene = Scene::new().await?;
    let receiver = Receiver::answering(|_, _| (500, Duration::ZERO)).await?;
    let more = [
        "target.orders.retry_base = \"1h\"",
        "target.orders.retry_max = \"1h\"",
        "target.orders.breaker_failures = 1000",
    ];
    let gateway = gateway(&scene, &[("orders", &receiver)], &more).await?;
    let bodies = (0..40).map(|at| event(&format!("evt_{at}"), "")).collect();
    burst(gateway.listen()?, "plain", bodies).await?;
    assert_scattered(&scene.database().await?, 1).await
}
