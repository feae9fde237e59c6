//! `on_error = "park"`: a failed effect is recorded, answered 2xx, and tried again until it is done or dead.

use std::time::Duration;

use anyhow::Result;

use super::harness::gateway::Gateway;
use super::harness::library::{Book, Library};
use super::harness::load::burst;
use super::harness::receiver::Receiver;
use super::harness::scene::{Answer, Scene, deliver, event};
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
