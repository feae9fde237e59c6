//! What is delivered to targets after the commit: at least once, never again once it is done, within the limits.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Result;
use http::HeaderMap;

use super::harness::gateway::{Gateway, Start};
use super::harness::load::burst;
use super::harness::receiver::Receiver;
use super::harness::scene::{Scene, deliver, event};
use super::harness::wait::eventually;

pub(crate) const LONG: Duration = Duration::from_secs(60);

/// A gateway whose source `plain` delivers to `targets`.
pub(crate) async fn gateway(scene: &Scene, targets: &[(&str, &Receiver)], more: &[&str]) -> Result<Gateway> {
    let names: Vec<String> = targets.iter().map(|(name, _)| format!("\"{name}\"")).collect();
    let mut keys: Vec<String> = targets.iter().flat_map(|(name, receiver)| receiver.target(name)).collect();
    keys.push(format!("source.plain.targets = [{}]", names.join(", ")));
    keys.push("work.poll = \"100ms\"".to_owned());
    keys.extend(more.iter().map(|line| (*line).to_owned()));
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    Start::new(scene.settings(&keys, "")).start().await
}

/// Waits until the event has that status.
pub(crate) async fn until_status(scene: &Scene, id: &str, status: &str) -> Result<()> {
    let database = scene.database().await?;
    let has = async || {
        let row = database
            .query_opt("select status from hapax.events where event_id = $1", &[&id])
            .await
            .ok()??;
        (row.get::<_, &str>(0) == status).then_some(())
    };
    eventually(LONG, has).await
}

#[tokio::test]
async fn an_event_is_delivered_once_and_is_done_then() -> Result<()> {
    let (scene, receiver) = (Scene::new().await?, Receiver::start().await?);
    let gateway = gateway(&scene, &[("orders", &receiver)], &[]).await?;
    for _ in 0..3 {
        let answer = deliver(gateway.listen()?, "plain", &event("evt_1", "")).await?;
        assert_eq!(answer.status, 200);
    }
    until_status(&scene, "evt_1", "done").await?;
    let [delivery] = &receiver.log()[..] else { panic!("{:?}", receiver.log()) };
    assert_eq!((delivery.event_id(), &delivery.body), ("evt_1", &event("evt_1", "")));
    assert_eq!(delivery.header("idempotency-key"), delivery.header("webhook-id"));
    let database = scene.database().await?;
    let row = database.query_one("select state::text, attempts, token is null from hapax.job", &[]).await?;
    assert_eq!((row.get::<_, &str>(0), row.get::<_, i32>(1), row.get::<_, bool>(2)), ("done", 1, true));
    Ok(())
}

#[tokio::test]
async fn what_fails_is_tried_again_until_it_is_taken() -> Result<()> {
    let scene = Scene::new().await?;
    let receiver =
        Receiver::answering(|_, before| (if before < 3 { 500 } else { 200 }, Duration::ZERO)).await?;
    let gateway = gateway(&scene, &[("orders", &receiver)], &[]).await?;
    deliver(gateway.listen()?, "plain", &event("evt_1", "")).await?;
    until_status(&scene, "evt_1", "done").await?;
    let log = receiver.log();
    let attempts: Vec<&str> = log.iter().map(|delivery| delivery.header("hapax-attempt")).collect();
    assert_eq!(attempts, ["1", "2", "3", "4"]);
    let ids: std::collections::BTreeSet<&str> =
        log.iter().map(|delivery| delivery.header("webhook-id")).collect();
    assert_eq!(ids.len(), 1, "one id over all attempts");
    Ok(())
}

#[tokio::test]
async fn after_its_last_attempt_an_event_is_dead_and_a_redelivery_arms_it_again() -> Result<()> {
    let scene = Scene::new().await?;
    let broken = Arc::new(AtomicBool::new(true));
    let answers = Arc::clone(&broken);
    let answers =
        move |_: &HeaderMap, _| (if answers.load(Ordering::SeqCst) { 422 } else { 200 }, Duration::ZERO);
    let receiver = Receiver::answering(answers).await?;
    let gateway = gateway(&scene, &[("orders", &receiver)], &["target.orders.attempts_max = 3"]).await?;
    deliver(gateway.listen()?, "plain", &event("evt_1", "")).await?;
    until_status(&scene, "evt_1", "dead").await?;
    assert_eq!(receiver.log().len(), 3);
    broken.store(false, Ordering::SeqCst);
    let gone = async || scene.markers().await.ok()?.is_empty().then_some(());
    eventually(LONG, gone).await?;
    let answer = eventually(LONG, async || {
        // What this process remembers is taken back too.
        let answer = deliver(gateway.listen().ok()?, "plain", &event("evt_1", "")).await.ok()?;
        answer.rearmed.then_some(answer)
    });
    let answer = answer.await?;
    assert_eq!((answer.status, answer.outcome.as_str()), (200, "duplicate"));
    until_status(&scene, "evt_1", "done").await?;
    let answer = deliver(gateway.listen()?, "plain", &event("evt_1", "")).await?;
    assert_eq!((answer.status, answer.rearmed), (200, false), "of a done one it is a no-op");
    assert_eq!(receiver.taken(), BTreeMap::from([("evt_1".to_owned(), 1)]));
    Ok(())
}

#[tokio::test]
async fn a_failing_target_delays_no_other_and_is_left_alone() -> Result<()> {
    let scene = Scene::new().await?;
    let (down, up) = (Receiver::answering(|_, _| (503, Duration::ZERO)).await?, Receiver::start().await?);
    let gateway =
        gateway(&scene, &[("down", &down), ("up", &up)], &["target.down.breaker_failures = 5"]).await?;
    let bodies = (0..200).map(|at| event(&format!("evt_{at}"), "")).collect();
    burst(gateway.listen()?, "plain", bodies).await?;
    eventually(LONG, async || (up.taken().len() == 200).then_some(())).await?;
    let asked = down.log().len();
    assert!(asked < 200, "{asked} requests to a target that is down");
    Ok(())
}

#[tokio::test]
async fn deliveries_at_once_stay_within_the_bound_over_all_gateways() -> Result<()> {
    let scene = Scene::new().await?;
    let receiver = Receiver::answering(|_, _| (200, Duration::from_millis(5))).await?;
    let bound = ["target.orders.concurrency = 5"];
    let one = gateway(&scene, &[("orders", &receiver)], &bound).await?;
    let two = gateway(&scene, &[("orders", &receiver)], &bound).await?;
    for (at, gateway) in [&one, &two].into_iter().enumerate() {
        let bodies = (0..300).map(|event_at| event(&format!("evt_{at}_{event_at}"), "")).collect();
        burst(gateway.listen()?, "plain", bodies).await?;
    }
    eventually(LONG, async || (receiver.taken().len() == 600).then_some(())).await?;
    assert!(receiver.peak() <= 5, "{} at once", receiver.peak());
    assert!(receiver.taken().values().all(|times| *times == 1));
    Ok(())
}

#[tokio::test]
async fn what_a_killed_gateway_had_is_delivered_by_another() -> Result<()> {
    let scene = Scene::new().await?;
    let held = Arc::new(AtomicBool::new(true));
    let answers = Arc::clone(&held);
    let receiver = Receiver::answering(move |_, _| {
        let pause = if answers.load(Ordering::SeqCst) { LONG } else { Duration::ZERO };
        (200, pause)
    })
    .await?;
    let alone = ["fast_tier.kind = \"off\"", "fast_tier.url =", "fast_tier.prefix =", "fast_tier.timeout ="];
    let mut first = gateway(&scene, &[("orders", &receiver)], &alone).await?;
    deliver(first.listen()?, "plain", &event("evt_1", "")).await?;
    receiver.until(1).await?;
    first.sigkill()?;
    held.store(false, Ordering::SeqCst);
    // Its lease and its share run out.
    let late = "update hapax.job set due_at = now(); update hapax.share set until = now()";
    scene.database().await?.batch_execute(late).await?;
    let _second = gateway(&scene, &[("orders", &receiver)], &alone).await?;
    until_status(&scene, "evt_1", "done").await?;
    let log = receiver.log();
    let attempt = log.last().and_then(|delivery| delivery.header("hapax-attempt").parse().ok());
    // More than that where the machine is slower than such a short lease.
    assert!(attempt >= Some(2), "{attempt:?}");
    Ok(())
}

#[tokio::test]
async fn work_that_nobody_takes_is_told() -> Result<()> {
    let (scene, receiver) = (Scene::new().await?, Receiver::answering(|_, _| (500, Duration::ZERO)).await?);
    let with = gateway(&scene, &[("orders", &receiver)], &[]).await?;
    deliver(with.listen()?, "plain", &event("evt_1", "")).await?;
    receiver.until(1).await?;
    let check = |settings: &str| {
        let file = tempfile::NamedTempFile::new()?;
        std::fs::write(file.path(), settings)?;
        let mut program = std::process::Command::new(env!("CARGO_BIN_EXE_hapax"));
        let output = program.args(["check", "--online", "--config"]).arg(file.path()).output()?;
        anyhow::Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let without = scene.settings(&[], "");
    let told = check(&without)?;
    assert!(told.contains("events wait in queue target:orders, and no target"), "{told}");
    let named = std::fs::read_to_string(with.config())?;
    let told = check(&named)?;
    assert!(!told.contains("events wait"), "{told}");
    Ok(())
}

/// Events that a target always fails on open its breaker, and stand first when it is tried: the others get their turn.
#[tokio::test]
async fn events_that_always_fail_do_not_stand_in_the_way_of_others() -> Result<()> {
    let scene = Scene::new().await?;
    let receiver = Receiver::answering(|headers, _| {
        let poison = headers.get("hapax-event-id").is_some_and(|id| id.as_bytes().starts_with(b"poison"));
        (if poison { 500 } else { 200 }, Duration::ZERO)
    })
    .await?;
    let settings = ["target.orders.breaker_failures = 3", "target.orders.retry_base = \"5s\""];
    let gateway = gateway(&scene, &[("orders", &receiver)], &settings).await?;
    let bodies = |name: &str, count: usize| {
        let name = name.to_owned();
        (0..count).map(move |at| event(&format!("{name}_{at}"), "")).collect::<Vec<_>>()
    };
    // No delivery begins before all are there, in this order.
    let locker = scene.database().await?;
    locker.batch_execute("begin; lock table hapax.share in access exclusive mode").await?;
    for bodies in [bodies("poison", 30), bodies("good", 60)] {
        let answers = burst(gateway.listen()?, "plain", bodies).await?;
        assert!(answers.iter().all(super::harness::scene::Answer::is_success));
    }
    locker.batch_execute("rollback").await?;
    eventually(LONG, async || (receiver.taken().len() == 60).then_some(())).await?;
    Ok(())
}
