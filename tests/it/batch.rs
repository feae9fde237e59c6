//! A request that brings several events: each is an event of its own, and the answer is the worst of theirs.

use anyhow::{Context as _, Result};
use bytes::Bytes;

use crate::harness::client::{Answer, Client};
use crate::harness::play::{code, outcome, ready};
use crate::harness::scene::{SECRET, Scene, signed_as};

/// A source of LINE's whose items' effects do what they say.
const SOURCE: [&str; 3] = [
    "source.line.provider = \"line\"",
    "source.line.secrets = [\"whsec_a secret for tests only\"]",
    "source.line.effect = \"fx.apply\"",
];

fn item(id: &str, more: &str) -> String {
    format!(r#"{{"webhookEventId":{id},"type":"message","timestamp":1700000000000{more}}}"#)
}

fn batch(items: &[String]) -> Bytes {
    // Line ends and spaces between items, as some providers send and sign them.
    format!("{{\"destination\":\"x\",\"events\": [ {} ]\r\n}}\r\n", items.join(",\r\n")).into()
}

async fn send(client: &mut Client, source: &str, body: &Bytes) -> Result<Answer> {
    let headers = signed_as("line", SECRET, body, None)?;
    let headers: Vec<_> =
        headers.iter().filter_map(|(name, value)| Some((name.as_str(), value.to_str().ok()?))).collect();
    client.post(&format!("/in/{source}"), &headers, body.clone()).await
}

fn told(answer: &Answer) -> (u16, &str, &str) {
    (answer.status.as_u16(), outcome(answer), answer.header("hapax-items").unwrap_or_default())
}

#[tokio::test]
async fn each_item_is_an_event_of_its_own() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&SOURCE).await?;
    ready(&gateway).await?;
    let mut client = gateway.client()?;
    let one = batch(&[item("\"a\"", "")]);
    assert_eq!(told(&send(&mut client, "line", &one).await?), (200, "accepted", "1 accepted"));
    // Numbers and strings; one that is known already, in a request that is another.
    let three = batch(&[item("\"b\"", ""), item("\"a\"", ""), item("7", "")]);
    assert_eq!(told(&send(&mut client, "line", &three).await?), (200, "accepted", "2 accepted, 1 duplicate"));
    assert_eq!(told(&send(&mut client, "line", &three).await?), (200, "duplicate", "3 duplicate"));
    // The same item twice is one; the same id with another body is seen.
    let twice = batch(&[item("\"c\"", ""), item("\"c\"", ""), item("\"b\"", r#","x":1"#)]);
    assert_eq!(told(&send(&mut client, "line", &twice).await?), (200, "accepted", "1 accepted, 1 mismatch"));
    let both = batch(&[item("\"d\"", ""), item("\"d\"", r#","x":1"#)]);
    assert_eq!(told(&send(&mut client, "line", &both).await?), (200, "accepted", "1 accepted, 1 mismatch"));
    let found = scene.assert_once(["a", "b", "c", "d", "7"].map(String::from).iter()).await?;
    assert_eq!(found.rows.len(), 5);
    // Each has its own bytes, exactly.
    let query = "select convert_from(b.body, 'UTF8') from hapax.ledger join hapax.body b using (received_at, key) \
                 where event_id = '7'";
    let body: String = scene.database().await?.query_one(query, &[]).await?.get(0);
    assert_eq!(body, item("7", ""));
    Ok(())
}

/// A retry that is grouped in another way, and after Redis was flushed and the memory is gone.
#[tokio::test]
async fn what_is_known_is_known_in_every_tier() -> Result<()> {
    let scene = Scene::new().await?;
    let mut gateway = scene.gateway(&SOURCE).await?;
    ready(&gateway).await?;
    let items: Vec<String> = (0..20).map(|at| item(&format!("\"e{at}\""), "")).collect();
    assert_eq!(told(&send(&mut gateway.client()?, "line", &batch(&items)).await?).2, "20 accepted");
    gateway.restart().await?;
    ready(&gateway).await?;
    let mut client = gateway.client()?;
    let mut regrouped = items[5..].to_vec();
    regrouped.push(item("\"new\"", ""));
    assert_eq!(told(&send(&mut client, "line", &batch(&regrouped)).await?).2, "1 accepted, 15 duplicate");
    redis::cmd("FLUSHDB").exec_async(&mut scene.redis().await?).await.ok();
    gateway.restart().await?;
    ready(&gateway).await?;
    assert_eq!(told(&send(&mut gateway.client()?, "line", &batch(&items)).await?).2, "20 duplicate");
    assert_eq!(scene.found().await?.effects.len(), 21);
    Ok(())
}

#[tokio::test]
async fn the_answer_is_the_worst_of_the_items_and_the_good_ones_stay() -> Result<()> {
    let scene = Scene::new().await?;
    let strict = [
        "source.strict.provider = \"line\"",
        "source.strict.secrets = [\"whsec_a secret for tests only\"]",
        "source.strict.on_mismatch = \"refuse\"",
    ];
    let gateway = scene.gateway(&[SOURCE, strict].concat()).await?;
    let mut client = gateway.client()?;
    let known = item("\"known\"", "");
    send(&mut client, "line", &batch(std::slice::from_ref(&known))).await?;
    // One poisoned item and one that is known, among many.
    let mut items: Vec<String> = (0..200).map(|at| item(&format!("\"i{at}\""), "")).collect();
    items.insert(70, item("\"poison\"", r#","do":"raise""#));
    items.insert(90, item("\"never\"", r#","do":"reject""#));
    items.insert(130, known);
    let answer = send(&mut client, "line", &batch(&items)).await?;
    let counts = "200 accepted, 1 duplicate, 1 rejected, 1 unavailable";
    assert_eq!(told(&answer), (503, "unavailable", counts));
    assert_eq!(code(&answer), "effect_failed");
    assert!(answer.header("retry-after").context("no Retry-After")?.parse::<u64>()? >= 1);
    // The retry brings only what is missing.
    items[70] = item("\"poison\"", "");
    let answer = send(&mut client, "line", &batch(&items)).await?;
    assert_eq!(told(&answer), (200, "accepted", "1 accepted, 202 duplicate"));
    assert_eq!(scene.found().await?.effects.len(), 202);
    // 422 is worse than success, and better than 503.
    assert_eq!(told(&send(&mut client, "strict", &batch(&[item("\"m\"", "")])).await?).0, 200);
    let answer =
        send(&mut client, "strict", &batch(&[item("\"m\"", r#","x":1"#), item("\"n\"", "")])).await?;
    assert_eq!(told(&answer), (422, "mismatch", "1 accepted, 1 mismatch"));
    Ok(())
}

#[tokio::test]
async fn items_without_an_id_are_kept_and_fail_nobody() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&[&SOURCE[..], &["source.line.batch_items_max = 8"]].concat()).await?;
    let mut client = gateway.client()?;
    let odd = [
        item("null", ""),
        item("{}", ""),
        item("\"\"", ""),
        r#"{"webhookEventId":"x","webhookEventId":"y"}"#.to_owned(),
        "[]".to_owned(),
        "\"x\"".to_owned(),
    ];
    let mut items = odd.to_vec();
    items.insert(3, item("\"good\"", ""));
    let answer = send(&mut client, "line", &batch(&items)).await?;
    assert_eq!(told(&answer), (200, "accepted", "1 accepted, 6 unidentified"));
    let database = scene.database().await?;
    let count = "select count(*) from hapax.events where status = 'unidentified'";
    assert_eq!(database.query_one(count, &[]).await?.get::<_, i64>(0), 6);
    let bodies = "select count(*) from hapax.ledger join hapax.body using (received_at, key)";
    assert_eq!(database.query_one(bodies, &[]).await?.get::<_, i64>(0), 7);
    assert_eq!(scene.found().await?.effects.len(), 1, "no effect without an id");

    let empty = send(&mut client, "line", &batch(&[])).await?;
    assert_eq!(told(&empty), (200, "empty", ""));
    for (body, wanted) in [
        (r#"{"destination":"x"}"#, "batch_missing"),
        (r#"{"events":null}"#, "batch_missing"),
        (r#"{"events":{}}"#, "batch_missing"),
        (r#"{"events":[],"events":[]}"#, "id_ambiguous"),
        (r#"{"events":["#, "body_not_json"),
        ("[]", "batch_missing"),
    ] {
        let answer = send(&mut client, "line", &Bytes::from_static(body.as_bytes())).await?;
        assert_eq!((answer.status.as_u16(), code(&answer).as_str()), (422, wanted), "{body}");
    }
    let many: Vec<String> = (0..9).map(|at| item(&at.to_string(), "")).collect();
    let answer = send(&mut client, "line", &batch(&many)).await?;
    assert_eq!((answer.status.as_u16(), code(&answer).as_str()), (422, "batch_too_large"));
    assert_eq!(scene.found().await?.effects.len(), 1, "nothing of what is refused");
    Ok(())
}

/// With `accept`, a reused id with another body is another event.
#[tokio::test]
async fn a_reused_id_can_be_another_event() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&[&SOURCE[..], &["source.line.on_mismatch = \"accept\""]].concat()).await?;
    let mut client = gateway.client()?;
    let (one, two) = (item("\"a\"", ""), item("\"a\"", r#","x":1"#));
    let sent = batch(&[one.clone(), two.clone()]);
    assert_eq!(told(&send(&mut client, "line", &sent).await?).2, "2 accepted");
    assert_eq!(told(&send(&mut client, "line", &sent).await?).2, "2 duplicate");
    assert_eq!(scene.found().await?.effects["a"], 2);
    Ok(())
}
