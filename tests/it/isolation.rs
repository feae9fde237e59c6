//! A source whose effect is slow, stuck or failing takes nothing from the sources beside it.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;

use crate::harness::client::Client;
use crate::harness::gateway::Start;
use crate::harness::load::{burst, until_metric};
use crate::harness::scene::{Answer, PATIENT, SECRET, Scene, deliver, deliver_on, event};

#[tokio::test]
async fn a_held_effect_holds_its_own_source_only() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&PATIENT).await?;
    let holder = scene.hold().await?;
    let to = gateway.listen()?;
    // More than one, so that its queue is not empty either.
    let bodies = (0..20).map(|number| event(&format!("held_{number}"), "\"do\":\"wait\"")).collect();
    let held = tokio::spawn(async move { burst(to, "stripe", bodies).await });
    scene.waiting(1).await?;
    for source in ["other", "plain"] {
        let bodies = (0..100).map(|number| event(&format!("{source}_{number}"), "")).collect();
        for answer in burst(to, source, bodies).await? {
            assert_eq!(answer.outcome, "accepted", "{source}");
        }
    }
    assert!(!held.is_finished());
    drop(holder);
    for answer in held.await?? {
        assert_eq!(answer.outcome, "accepted");
    }
    Ok(())
}

#[tokio::test]
async fn an_effect_that_always_fails_fails_alone() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&[]).await?;
    let (to, stop) = (gateway.listen()?, Arc::<AtomicBool>::default());
    let failing = (0..8).map(|sender| {
        let stop = Arc::clone(&stop);
        tokio::spawn(async move {
            let (mut client, mut failed) = (Client::new(to), 0);
            while !stop.load(Ordering::Relaxed) {
                let body = event(&format!("failing_{sender}_{failed}"), "\"do\":\"raise\"");
                let answer = deliver_on(&mut client, "stripe", &body).await?;
                assert_eq!((answer.status, answer.outcome.as_str()), (503, "unavailable"));
                failed += 1;
            }
            anyhow::Ok(failed)
        })
    });
    let failing: Vec<_> = failing.collect();
    for source in ["other", "plain"] {
        for round in 0..10 {
            let bodies = (0..20).map(|number| event(&format!("{source}_{round}_{number}"), "")).collect();
            for answer in burst(to, source, bodies).await? {
                assert_eq!(answer.outcome, "accepted", "{source}");
            }
        }
    }
    stop.store(true, Ordering::Relaxed);
    for sender in failing {
        assert!(sender.await?? > 0);
    }
    assert!(scene.found().await?.rows.keys().all(|id| !id.starts_with("failing")));
    Ok(())
}

#[tokio::test]
async fn thirty_held_effects_leave_a_connection_for_the_others() -> Result<()> {
    const GROUPS: usize = 30;
    let scene = Scene::new().await?;
    let (mut functions, mut sources) = (String::new(), String::new());
    for number in 0..GROUPS {
        writeln!(
            functions,
            "create function fx.held_{number}(e hapax.event) returns void language plpgsql as $$ begin perform fx.apply(e); end $$;"
        )?;
        writeln!(
            sources,
            "[source.held_{number}]\nprovider = \"stripe\"\nsecrets = [\"{SECRET}\"]\neffect = \"fx.held_{number}\""
        )?;
    }
    scene.database().await?.batch_execute(&functions).await?;
    let settings = scene.settings(&PATIENT, &sources);
    let gateway = Start::new(settings).start().await?;
    let holder = scene.hold().await?;
    let to = gateway.listen()?;
    let held = (0..GROUPS).map(|number| {
        let body = event(&format!("held_{number}"), "\"do\":\"wait\"");
        tokio::spawn(async move { deliver(to, &format!("held_{number}"), &body).await })
    });
    let held: Vec<_> = held.collect();
    scene.waiting(GROUPS).await?;
    for source in ["plain", "other", "stripe"] {
        let bodies = (0..20).map(|number| event(&format!("{source}_{number}"), "")).collect();
        for answer in burst(to, source, bodies).await? {
            assert_eq!(answer.outcome, "accepted", "{source}");
        }
    }
    drop(holder);
    // Their time may have run out meanwhile; what they were promised is kept.
    let mut promised = Vec::new();
    for (number, delivery) in held.into_iter().enumerate() {
        if delivery.await??.is_success() {
            promised.push(format!("held_{number}"));
        }
    }
    scene.assert_once(&promised).await?;
    Ok(())
}

/// One batch of an effect runs at a time over all gateways. Who waits for longer than a statement may take is not at
/// fault, and waits again.
#[tokio::test]
async fn who_waits_for_another_gateways_effect_is_not_refused() -> Result<()> {
    let scene = Scene::new().await?;
    let slow = scene.gateway(&PATIENT).await?;
    let short = "postgres.statement_timeout = \"400ms\"";
    let other = scene.gateway(&[&PATIENT[1..], &[short]].concat()).await?;
    let holder = scene.hold().await?;
    let to = slow.listen()?;
    let first = tokio::spawn(async move { deliver(to, "stripe", &event("first", "\"do\":\"wait\"")).await });
    scene.waiting(1).await?;
    let to = other.listen()?;
    let second = tokio::spawn(async move { deliver(to, "stripe", &event("second", "")).await });
    until_metric(&other, "hapax_batch_failures_total", "", |failures| failures >= 2).await?;
    drop(holder);
    assert_eq!(first.await??.outcome, "accepted");
    assert_eq!(second.await??.outcome, "accepted");
    Ok(())
}

/// Whoever is too many for one event is told to come again, and nobody else waits for it.
#[tokio::test]
async fn no_more_deliveries_wait_for_one_event_than_may() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&[&PATIENT[..], &["in_flight.waiters_max = 3"]].concat()).await?;
    let (to, hold) = (gateway.listen()?, scene.hold().await?);
    let bodies = vec![event("evt_1", "\"do\":\"wait\""); 20];
    let all = tokio::spawn(async move { burst(to, "stripe", bodies).await });
    scene.waiting(1).await?;
    until_metric(&gateway, "hapax_requests_total", "outcome=\"unavailable\"", |refused| refused == 16)
        .await?;
    assert_eq!(deliver(to, "plain", &event("evt_2", "")).await?.outcome, "accepted");
    hold.batch_execute("select pg_advisory_unlock(7)").await?;
    let answers = all.await??;
    let count = |status, outcome: &str| {
        let of = |answer: &&Answer| (answer.status, answer.outcome.as_str()) == (status, outcome);
        answers.iter().filter(of).count()
    };
    assert_eq!((count(200, "accepted"), count(200, "duplicate"), count(503, "unavailable")), (1, 3, 16));
    assert!(answers.iter().all(|answer| answer.status == 200 || answer.retry_after.is_some()));
    scene.assert_once(&["evt_1".to_owned()]).await?;
    Ok(())
}
