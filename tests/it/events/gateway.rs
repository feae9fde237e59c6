//! The way back through a gateway and its workers.

use std::collections::BTreeSet;

use anyhow::Result;

use super::made::{hapax, stands};
use crate::harness::gateway::Start;
use crate::harness::load::LIMIT;
use crate::harness::receiver::Receiver;
use crate::harness::scene::{Scene, deliver, event};
use crate::harness::wait::eventually;

async fn until(scene: &Scene, id: &str, start: &str) -> Result<()> {
    let database = scene.database().await?;
    let stood = async || stands(&database, id).await.ok()?.starts_with(start).then_some(());
    eventually(LIMIT, stood).await
}

#[tokio::test]
async fn what_was_done_is_done_again_by_the_workers() -> Result<()> {
    let scene = Scene::new().await?;
    let receiver = Receiver::start().await?;
    let mut keys = receiver.target("orders");
    keys.extend(["source.stripe.targets = [\"orders\"]".to_owned(), "work.poll = \"100ms\"".to_owned()]);
    let settings = scene.settings(&keys.iter().map(String::as_str).collect::<Vec<_>>(), "");
    let gateway = Start::new(&settings).start().await?;
    let body = event("evt_1", "");
    assert_eq!(deliver(gateway.listen()?, "stripe", &body).await?.outcome, "accepted");
    receiver.until(1).await?;
    until(&scene, "evt_1", "done 0").await?;

    let choice = ["--source", "stripe", "--id", "evt_1"];
    let said = hapax(&settings, &[&["replay"], &choice[..]].concat()).await?;
    assert_eq!((said.code, said.out.as_str()), (Some(0), "1 of 1 events replayed\n"), "{}", said.err);
    receiver.until(2).await?;
    until(&scene, "evt_1", "done 1").await?;
    assert_eq!(scene.found().await?.effects.get("evt_1"), Some(&2));

    // To the target alone: the effect does not run.
    let said = hapax(&settings, &[&["replay", "--target", "orders"], &choice[..]].concat()).await?;
    assert_eq!(said.code, Some(0), "{}", said.err);
    let deliveries = receiver.until(3).await?;
    until(&scene, "evt_1", "done 2").await?;
    assert_eq!(scene.found().await?.effects.get("evt_1"), Some(&2));

    // Whoever gets them can tell them from each other.
    let replays: Vec<&str> = deliveries.iter().map(|delivery| delivery.header("hapax-replay")).collect();
    assert_eq!(replays, ["0", "1", "2"]);
    let ids: BTreeSet<&str> = deliveries.iter().map(|delivery| delivery.header("idempotency-key")).collect();
    assert_eq!(ids.len(), 3, "{ids:?}");
    assert!(deliveries.iter().all(|delivery| delivery.body == body));
    assert_eq!(deliver(gateway.listen()?, "stripe", &body).await?.outcome, "duplicate");
    Ok(())
}

#[tokio::test]
async fn what_is_dead_gets_its_turn_when_its_cause_is_gone() -> Result<()> {
    let scene = Scene::new().await?;
    let park = ["source.stripe.on_error = \"park\"", "source.stripe.retry_base = \"10ms\""];
    let more = ["source.stripe.attempts_max = 2", "work.poll = \"100ms\""];
    let settings = scene.settings(&[park, more].concat(), "");
    let gateway = Start::new(&settings).start().await?;
    for id in ["evt_1", "evt_2"] {
        let body = event(id, r#""do":"raise""#);
        assert_eq!(deliver(gateway.listen()?, "stripe", &body).await?.outcome, "parked");
        until(&scene, id, "dead 0").await?;
    }
    let said = hapax(&settings, &["discard", "--status", "dead", "--id", "evt_2"]).await?;
    assert_eq!((said.code, said.out.as_str()), (Some(0), "1 of 1 events discarded\n"), "{}", said.err);
    let fix = "create or replace function fx.apply(e hapax.event) returns void language sql as
               $$ insert into fx.effect (source, event_id) values (e.source, e.event_id) $$";
    scene.database().await?.batch_execute(fix).await?;
    let said = hapax(&settings, &["retry", "--status", "dead"]).await?;
    assert_eq!((said.code, said.out.as_str()), (Some(0), "1 of 1 events given their turn\n"), "{}", said.err);
    until(&scene, "evt_1", "done 0").await?;
    let found = scene.found().await?;
    assert_eq!((found.effects.get("evt_1"), found.effects.get("evt_2")), (Some(&1), None));
    // Given up is settled: what comes again is a duplicate.
    let again = deliver(gateway.listen()?, "stripe", &event("evt_2", r#""do":"raise""#)).await?;
    assert_eq!((again.outcome.as_str(), again.rearmed), ("duplicate", false));
    until(&scene, "evt_2", "rejected 0").await
}
