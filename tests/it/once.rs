//! Deliveries that come at the same time lead to one committed effect.

use std::collections::BTreeMap;

use anyhow::Result;

use crate::harness::scene::{Scene, deliver, event};

#[tokio::test]
async fn ten_deliveries_at_once_are_one_effect() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&[]).await?;
    let body = event("evt_1", "");
    let mut deliveries = Vec::new();
    for _ in 0..10 {
        let (to, body) = (gateway.listen()?, body.clone());
        deliveries.push(tokio::spawn(async move { deliver(to, "stripe", &body).await }));
    }
    let mut outcomes: BTreeMap<String, u32> = BTreeMap::new();
    for delivery in deliveries {
        let answer = delivery.await??;
        assert!(answer.is_success(), "{answer:?}");
        *outcomes.entry(answer.outcome).or_default() += 1;
    }
    assert_eq!(outcomes, BTreeMap::from([("accepted".to_owned(), 1), ("duplicate".to_owned(), 9)]));
    scene.assert_once([&"evt_1".to_owned()]).await?;
    Ok(())
}
