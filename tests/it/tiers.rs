//! The same promises with the other fast tiers: the process' memory alone, and none.

use anyhow::Result;

use crate::harness::gateway::Gateway;
use crate::harness::load::{Load, acknowledged, metric};
use crate::harness::scene::{Scene, deliver, event};

/// Settings without Redis.
fn tier(kind: &str) -> Vec<String> {
    let none = ["url", "prefix", "timeout"].map(|key| format!("fast_tier.{key} = "));
    [format!("fast_tier.kind = \"{kind}\"")].into_iter().chain(none).collect()
}

async fn gateway(scene: &Scene, kind: &str) -> Result<Gateway> {
    let settings = tier(kind);
    scene.gateway(&settings.iter().map(String::as_str).collect::<Vec<_>>()).await
}

#[tokio::test]
async fn duplicates_are_found_and_failures_can_be_sent_again() -> Result<()> {
    for (kind, tier) in [("memory", "memory"), ("off", "postgres")] {
        let scene = Scene::new().await?;
        let mut gateway = gateway(&scene, kind).await?;
        crate::harness::load::until_metric(&gateway, "hapax_heartbeat_age_seconds", "", |age| age >= 0)
            .await?;
        let body = event("evt_1", "");
        let failed = deliver(gateway.listen()?, "stripe", &event("evt_1", "\"do\":\"raise\"")).await?;
        assert_eq!(failed.status, 503, "{kind}");
        for outcome in ["accepted", "duplicate", "duplicate"] {
            assert_eq!(deliver(gateway.listen()?, "stripe", &body).await?.outcome, outcome, "{kind}");
        }
        let caught = metric(&gateway, "hapax_duplicates_total", &format!("tier=\"{tier}\"")).await?;
        assert_eq!(caught, 2, "{kind}");
        // Another process remembers nothing; Postgres does.
        gateway.restart().await?;
        assert_eq!(deliver(gateway.listen()?, "stripe", &body).await?.outcome, "duplicate", "{kind}");

        let load = Load::start(gateway.listen()?, "stripe", 8);
        load.go_on(400).await?;
        let sent = load.finish().await?;
        assert!(sent.iter().all(|sent| sent.answer.is_success()), "{sent:?}");
        scene.assert_once(&acknowledged(&sent)).await?;
    }
    Ok(())
}

#[tokio::test]
async fn two_gateways_with_postgres_alone_give_one_effect() -> Result<()> {
    for kind in ["memory", "off"] {
        let scene = Scene::new().await?;
        let gateways = [gateway(&scene, kind).await?, gateway(&scene, kind).await?];
        let mut ids = Vec::new();
        for round in 0..100 {
            let id = format!("evt_{round}");
            let mut deliveries = Vec::new();
            for number in 0..10 {
                let (to, body) = (gateways[number % 2].listen()?, event(&id, ""));
                deliveries.push(tokio::spawn(async move { deliver(to, "stripe", &body).await }));
            }
            let mut accepted = 0;
            for delivery in deliveries {
                let answer = delivery.await??;
                assert!(answer.is_success(), "{kind}: {answer:?}");
                accepted += usize::from(answer.outcome == "accepted");
            }
            assert_eq!(accepted, 1, "{kind} {id}");
            ids.push(id);
        }
        scene.assert_once(&ids).await?;
    }
    Ok(())
}
