//! A client that goes away: before its request is whole nothing has happened, afterwards everything does.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result};
use futures_util::future::try_join_all;

use crate::harness::client::{Client, Raw};
use crate::harness::play::{
    Hold, LIMIT, Numbers, head, metric, outcome, patient, post, ready, request, settled, signature,
};
use crate::harness::scene::{Found, Scene, event};
use crate::harness::wait::eventually;

#[tokio::test]
async fn a_client_that_leaves_does_not_cancel_the_work() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&patient(&[])).await?;
    ready(&gateway).await?;
    let hold = Hold::new(&scene).await?;
    let body = event("evt_1", r#""do":"wait""#);
    // The first leads the flight, the second follows; both leave.
    let mut clients = Vec::new();
    for _ in 0..2 {
        let mut client = Raw::connect(gateway.listen()?).await?;
        client.write(&request("stripe", &body).0).await?;
        clients.push(client);
    }
    hold.waiting(1).await?;
    metric(&gateway, "hapax_requests_in_flight", &[], 2).await?;
    for client in clients {
        client.reset()?;
    }
    metric(&gateway, "hapax_connections", &[], 0).await?;
    assert_eq!(scene.found().await?, Found::default(), "it still waits");
    hold.release().await?;
    settled(&scene, 1).await?;
    scene.assert_once([&"evt_1".to_owned()]).await?;
    let again = post(&mut gateway.client()?, "stripe", &body).await?;
    assert_eq!((again.status.as_u16(), outcome(&again)), (200, "duplicate"));
    scene.assert_once([&"evt_1".to_owned()]).await?;
    Ok(())
}

#[tokio::test]
async fn a_client_that_leaves_within_the_body_leaves_no_trace() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&[]).await?;
    ready(&gateway).await?;
    let body = event("evt_1", "");
    let (whole, at) = request("stripe", &body);
    let chunked = head("/in/stripe", &[&signature(&body), "Transfer-Encoding: chunked"]);
    let chunk = format!("\r\n{:x}\r\n", body.len());
    // All but the last byte; all but the last chunk.
    let chunked = [&chunked, chunk.as_bytes(), &body, b"\r\n"].concat();
    for (part, gently) in
        [(&whole[..=at], true), (&whole[..whole.len() - 1], false), (&chunked, true), (&chunked, false)]
    {
        let mut client = Raw::connect(gateway.listen()?).await?;
        client.write(part).await?;
        metric(&gateway, "hapax_requests_in_flight", &[], 1).await?;
        if gently {
            client.finish().await?;
            // Half-closed is as good as gone: the body cannot get whole any more.
            client.read_to_end().await?;
        } else {
            client.reset()?;
        }
        metric(&gateway, "hapax_requests_in_flight", &[], 0).await?;
    }
    assert_eq!(scene.found().await?, Found::default());
    assert!(scene.markers().await?.is_empty());
    assert_eq!(outcome(&post(&mut gateway.client()?, "stripe", &body).await?), "accepted");
    Ok(())
}

/// Where the n-th client of many leaves: all over the request, and some after its end.
fn cut(n: usize, length: usize) -> usize {
    // A fixed sequence without a pattern.
    let mixed = (n as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33;
    usize::try_from(mixed).unwrap_or_default() % (length + length / 4)
}

#[tokio::test]
async fn hundreds_of_clients_that_leave_break_nothing_for_the_others() -> Result<()> {
    const GONE: usize = 300;
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&[]).await?;
    ready(&gateway).await?;
    let mut whole = BTreeSet::new();
    for n in 0..GONE {
        let id = format!("gone_{n}");
        let (bytes, _) = request("stripe", &event(&id, ""));
        let at = cut(n, bytes.len()).min(bytes.len());
        let mut client = Raw::connect(gateway.listen()?).await?;
        client.write(bytes.get(..at).context("a cut within the request")?).await?;
        if at == bytes.len() {
            whole.insert(id);
        }
        if n % 2 == 0 {
            client.reset()?;
        }
    }
    assert!((20..200).contains(&whole.len()), "{} were sent to their end", whole.len());
    metric(&gateway, "hapax_connections", &[], 0).await?;

    let mut clients: Vec<Client> = (0..10).map(|_| gateway.client()).collect::<Result<_>>()?;
    let mut ids = Vec::new();
    for round in 0..20 {
        let bodies: Vec<_> = (0..10).map(|n| format!("evt_{round}_{n}")).collect();
        let posts = clients
            .iter_mut()
            .zip(&bodies)
            .map(async |(client, id)| post(client, "stripe", &event(id, "")).await);
        for answer in try_join_all(posts).await? {
            assert_eq!((answer.status.as_u16(), outcome(&answer)), (200, "accepted"));
        }
        ids.extend(bodies);
    }
    // Whoever comes again is told what became of his own event.
    let idle = async || {
        let numbers = Numbers::of(&gateway).await.ok()?;
        (numbers.sum("hapax_requests_in_flight", &[]) == 0).then_some(())
    };
    eventually(LIMIT, idle).await?;
    let before = scene.found().await?;
    for n in 0..GONE {
        let id = format!("gone_{n}");
        let answer = post(&mut clients[n % 10], "stripe", &event(&id, "")).await?;
        assert_eq!(answer.status, 200, "{id}");
        match outcome(&answer) {
            "accepted" => assert!(!before.rows.contains_key(&id), "{id} was there already"),
            "duplicate" => assert!(whole.contains(&id), "{id} was taken from a part of it"),
            other => panic!("{id}: {other}"),
        }
        ids.push(id);
    }
    let found = scene.assert_once(&ids).await?;
    assert_eq!(found.rows.len(), GONE + 200);
    let trouble = Numbers::of(&gateway).await?;
    for name in ["hapax_batch_failures_total", "hapax_redis_failures_total", "hapax_breaker_openings_total"] {
        assert_eq!(trouble.sum(name, &[]), 0, "{name}");
    }
    Ok(())
}
