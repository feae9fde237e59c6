//! Deliveries that come at the same time, or again, lead to one committed effect, and each answer says what happened.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use bytes::Bytes;
use futures_util::future::try_join_all;
use hapax::dev::{PostgresOptions, RedisOptions};
use serde_json::Value;

use crate::harness::client::{Answer, Client};
use crate::harness::gateway::Gateway;
use crate::harness::play::{Hold, LIMIT, Numbers, code, metric, outcome, patient, post, ready, settled};
use crate::harness::scene::{Scene, event, signed_as};
use crate::harness::stores::{private_postgres, private_redis};
use crate::harness::wait::eventually;

/// Delivers each of `rounds` events over all clients at the same time; at least one answer of each is a success.
async fn storm(clients: &mut [Client], rounds: usize) -> Result<BTreeMap<String, usize>> {
    let mut outcomes = BTreeMap::new();
    for round in 0..rounds {
        let body = event(&format!("evt_{round}"), "");
        let answers = try_join_all(clients.iter_mut().map(|client| post(client, "stripe", &body))).await?;
        let of = |wanted: &str| answers.iter().filter(|answer| outcome(answer) == wanted).count();
        assert_eq!(of("accepted"), 1, "round {round}: {answers:?}");
        for answer in &answers {
            let waits = answer.status == 409 && answer.header("retry-after").is_some();
            assert!(answer.status == 200 || waits, "round {round}: {answer:?}");
            *outcomes.entry(outcome(answer).to_owned()).or_default() += 1;
        }
    }
    Ok(outcomes)
}

fn clients(gateway: &Gateway, count: usize) -> Result<Vec<Client>> {
    (0..count).map(|_| gateway.client()).collect()
}

fn ids(rounds: usize) -> Vec<String> {
    (0..rounds).map(|round| format!("evt_{round}")).collect()
}

#[tokio::test]
async fn ten_deliveries_at_once_are_one_effect() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&[]).await?;
    let outcomes = storm(&mut clients(&gateway, 10)?, 500).await?;
    // In one process nobody has to be sent away.
    assert_eq!(outcomes, BTreeMap::from([("accepted".to_owned(), 500), ("duplicate".to_owned(), 4500)]));
    let found = scene.assert_once(&ids(500)).await?;
    assert_eq!((found.rows.len(), found.effects.len()), (500, 500));
    Ok(())
}

#[tokio::test]
async fn ten_deliveries_at_once_to_two_processes_are_one_effect() -> Result<()> {
    let scene = Scene::new().await?;
    let (one, two) = (scene.gateway(&[]).await?, scene.gateway(&[]).await?);
    let mut clients: Vec<Client> = clients(&one, 5)?.into_iter().chain(clients(&two, 5)?).collect();
    let outcomes = storm(&mut clients, 500).await?;
    assert_eq!(outcomes.get("accepted"), Some(&500), "{outcomes:?}");
    let found = scene.assert_once(&ids(500)).await?;
    assert_eq!((found.rows.len(), found.effects.len()), (500, 500));
    Ok(())
}

/// What the sender sees of an answer, without how it came about.
fn seen(answer: &Answer) -> (u16, &Bytes, Option<&str>) {
    (answer.status.as_u16(), &answer.body, answer.header("content-type"))
}

#[tokio::test]
async fn a_duplicate_is_answered_like_the_first_whoever_recognises_it() -> Result<()> {
    const CUSTOM: &str =
        "source.other.ack = { status = 202, body = \"{\\\"ok\\\":true}\", type = \"application/json\" }";
    let mut scene = Scene::new().await?;
    let redis = private_redis(RedisOptions::default()).await?;
    scene.stores.redis_url = redis.url();
    let (one, two) = (scene.gateway(&[CUSTOM]).await?, scene.gateway(&[CUSTOM]).await?);
    ready(&one).await?;
    ready(&two).await?;
    for source in ["stripe", "other"] {
        let body = event("evt_1", "");
        let first = post(&mut one.client()?, source, &body).await?;
        assert_eq!(outcome(&first), "accepted");
        let wanted = if source == "other" { 202 } else { 200 };
        assert_eq!(first.status, wanted);
        settled(&scene, 1).await?;
        let from_memory = post(&mut one.client()?, source, &body).await?;
        let from_redis = post(&mut two.client()?, source, &body).await?;
        redis::cmd("FLUSHALL").exec_async(&mut scene.redis().await?).await?;
        let three = scene.gateway(&[CUSTOM]).await?;
        ready(&three).await?;
        let from_postgres = post(&mut three.client()?, source, &body).await?;
        for again in [&from_memory, &from_redis, &from_postgres] {
            assert_eq!((outcome(again), seen(again)), ("duplicate", seen(&first)));
        }
        assert_eq!(three_tiers(&three).await?, [0, 0, 1]);
        redis::cmd("FLUSHALL").exec_async(&mut scene.redis().await?).await?;
    }
    assert_eq!(three_tiers(&one).await?, [2, 0, 0]);
    assert_eq!(three_tiers(&two).await?, [0, 2, 0]);
    Ok(())
}

async fn three_tiers(gateway: &Gateway) -> Result<[u64; 3]> {
    let numbers = Numbers::of(gateway).await?;
    let of = |tier: &str| numbers.sum("hapax_duplicates_total", &[&format!("tier=\"{tier}\"")]);
    Ok([of("memory"), of("redis"), of("postgres")])
}

fn other_body(id: &str) -> Bytes {
    format!(r#"{{"id":"{id}","object":"event","type":"test.happened","data":{{"other":1}}}}"#).into()
}

#[tokio::test]
async fn a_reused_id_is_seen_in_every_tier() -> Result<()> {
    const REFUSE: &str = "source.plain.on_mismatch = \"refuse\"";
    let scene = Scene::new().await?;
    let (one, two) = (scene.gateway(&[REFUSE]).await?, scene.gateway(&[REFUSE]).await?);
    ready(&one).await?;
    ready(&two).await?;
    for source in ["stripe", "plain"] {
        let (body, other) = (event("evt_1", ""), other_body("evt_1"));
        assert_eq!(outcome(&post(&mut one.client()?, source, &body).await?), "accepted");
        settled(&scene, if source == "stripe" { 1 } else { 2 }).await?;
        let three = scene.gateway(&[REFUSE, "fast_tier.prefix = \"elsewhere:\""]).await?;
        ready(&three).await?;
        for (gateway, tier) in [(&one, "memory"), (&two, "redis"), (&three, "postgres")] {
            let answer = post(&mut gateway.client()?, source, &other).await?;
            assert_eq!(outcome(&answer), "mismatch", "{tier}");
            if source == "stripe" {
                assert_eq!(answer.status, 200, "{tier}");
            } else {
                assert_eq!((answer.status.as_u16(), code(&answer).as_str()), (422, "mismatch"), "{tier}");
            }
            let labels = [&format!("source=\"{source}\"")[..], "outcome=\"mismatch\""];
            assert_eq!(Numbers::of(gateway).await?.sum("hapax_requests_total", &labels), 1, "{tier}");
            let again = post(&mut gateway.client()?, source, &body).await?;
            assert_eq!(outcome(&again), "duplicate", "{tier}: the first body stays the event's");
        }
    }
    let found = scene.found().await?;
    assert_eq!(
        (found.rows["evt_1"], found.effects["evt_1"]),
        (2, 1),
        "one row each, and one of them has an effect"
    );
    Ok(())
}

#[tokio::test]
async fn another_body_never_joins_a_flight() -> Result<()> {
    let scene = Scene::new().await?;
    let settings = patient(&["in_flight.wait = \"50ms\"", "postgres.lock_timeout = \"100ms\""]);
    let gateway = scene.gateway(&settings).await?;
    ready(&gateway).await?;
    let hold = Hold::new(&scene).await?;
    // What changes between two attempts of one event makes no other body of it.
    let first = event("evt_1", r#""do":"wait","pending_webhooks":1"#);
    let again = event("evt_1", r#""do":"wait","pending_webhooks":0"#);
    let flight = [&first, &again, &first].map(|body| {
        let (client, body) = (gateway.client(), body.clone());
        tokio::spawn(async move { post(&mut client?, "stripe", &body).await })
    });
    hold.waiting(1).await?;
    metric(&gateway, "hapax_requests_in_flight", &[], 3).await?;
    let answer = post(&mut gateway.client()?, "stripe", &other_body("evt_1")).await?;
    assert_eq!((answer.status.as_u16(), outcome(&answer)), (409, "in_flight"));
    assert!(answer.header("retry-after").context("no Retry-After")?.parse::<u64>()? >= 1);
    hold.release().await?;
    let mut outcomes = Vec::new();
    for delivery in flight {
        let answer = delivery.await??;
        assert_eq!(answer.status, 200);
        outcomes.push(outcome(&answer).to_owned());
    }
    outcomes.sort();
    assert_eq!(outcomes, ["accepted", "duplicate", "duplicate"]);
    let answer = post(&mut gateway.client()?, "stripe", &other_body("evt_1")).await?;
    assert_eq!((answer.status.as_u16(), outcome(&answer)), (200, "mismatch"));
    scene.assert_once([&"evt_1".to_owned()]).await?;
    Ok(())
}

#[tokio::test]
async fn what_makes_two_events_two() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&[]).await?;
    let mut client = gateway.client()?;
    let long = "x".repeat(300);
    for (source, id) in [
        ("stripe", "evt_1"),
        ("other", "evt_1"),
        ("stripe", "EVT_1"),
        ("stripe", "evt_1 "),
        ("stripe", &format!("{long}a")),
        ("stripe", &format!("{long}b")),
        ("stripe", &long),
    ] {
        let answer = post(&mut client, source, &event(id, "")).await?;
        assert_eq!((answer.status.as_u16(), outcome(&answer)), (200, "accepted"), "{source} {id:?}");
    }
    let database = scene.database().await?;
    let count: i64 = database.query_one("select count(*) from fx.effect", &[]).await?.get(0);
    assert_eq!(count, 7);
    // A number and a string of the same text are one id, here with another body.
    let number = Bytes::from_static(br#"{"id":9007199254918487,"type":"t","data":{}}"#);
    let string = Bytes::from_static(br#"{"id":"9007199254918487","type":"t","data":{}}"#);
    let neighbour = Bytes::from_static(br#"{"id":9007199254918488,"type":"t","data":{}}"#);
    for (body, wanted) in [(number, "accepted"), (string, "mismatch"), (neighbour, "accepted")] {
        assert_eq!(outcome(&post(&mut client, "plain", &body).await?), wanted);
    }
    Ok(())
}

#[tokio::test]
async fn an_id_in_a_header_is_the_events_id() -> Result<()> {
    let scene = Scene::new().await?;
    let github = [
        "source.github.provider = \"github\"",
        "source.github.secrets = [\"a secret of GitHub's\"]",
        "source.github.effect = \"fx.apply\"",
    ];
    let gateway = scene.gateway(&github).await?;
    let mut client = gateway.client()?;
    let body = Bytes::from_static(br#"{"zen":"\u00e9 \ud83d\ude80"}"#);
    for (id, wanted) in
        [("guid-1", "accepted"), ("guid-1", "duplicate"), ("guid-2", "accepted"), ("guid-2", "duplicate")]
    {
        let headers = signed_as("github", "a secret of GitHub's", &body, Some(id))?;
        let headers: Vec<(&str, &str)> =
            headers.iter().filter_map(|(name, value)| Some((name.as_str(), value.to_str().ok()?))).collect();
        let answer = client.post("/in/github", &headers, body.clone()).await?;
        assert_eq!((answer.status.as_u16(), outcome(&answer)), (200, wanted), "{id}");
    }
    let found = scene.assert_once([&"guid-1".to_owned(), &"guid-2".to_owned()]).await?;
    assert_eq!(found.rows.len(), 2);
    Ok(())
}

#[tokio::test]
async fn what_is_no_id_is_refused_by_name() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&[]).await?;
    let mut client = gateway.client()?;
    let deep = format!(r#"{{"x":{}{},"id":null}}"#, "[".repeat(50_000), "]".repeat(50_000));
    for (body, wanted) in [
        (format!(r#"{{"id":"{}"}}"#, "x".repeat(513)), "id_too_long"),
        (r#"{"id":null}"#.to_owned(), "id_missing"),
        (r#"{"id":""}"#.to_owned(), "id_missing"),
        (r#"{"type":"t"}"#.to_owned(), "id_missing"),
        (r#"{"id":"a","id":"b"}"#.to_owned(), "id_ambiguous"),
        (r#"{"id":"a","x":1,"id":"a"}"#.to_owned(), "id_ambiguous"),
        (r#"{"id":1.5}"#.to_owned(), "id_invalid"),
        (r#"{"id":["a"]}"#.to_owned(), "id_invalid"),
        (r#"{"id":"a\u0000b"}"#.to_owned(), "id_invalid"),
        ("null".to_owned(), "id_missing"),
        ("[]".to_owned(), "id_missing"),
        (r#""x""#.to_owned(), "id_missing"),
        (deep, "id_missing"),
        (String::new(), "body_not_json"),
        ("id=a".to_owned(), "body_not_json"),
        (r#"{"id":"a""#.to_owned(), "body_not_json"),
    ] {
        let answer = post(&mut client, "stripe", &body.clone().into()).await?;
        assert_eq!((answer.status.as_u16(), code(&answer).as_str()), (422, wanted), "{body:.60}");
        assert_eq!(
            (outcome(&answer), answer.header("content-type")),
            ("refused", Some("application/problem+json"))
        );
    }
    for invalid in [&b"\xff\xfe\x00\x80"[..], b"{\"id\":\"\xff\"}"] {
        let answer = post(&mut client, "stripe", &Bytes::from_static(invalid)).await?;
        assert_eq!(answer.status, 422, "{answer:?}");
    }
    assert_eq!(scene.found().await?, crate::harness::scene::Found::default());
    assert!(scene.markers().await?.is_empty());
    // The id is found before and after what no parser could keep on its stack.
    let deep = format!("{}{}", "[".repeat(50_000), "]".repeat(50_000));
    for body in [format!(r#"{{"x":{deep},"id":"after"}}"#), format!(r#"{{"id":"before","x":{deep}}}"#)] {
        assert_eq!(outcome(&post(&mut client, "plain", &body.into()).await?), "accepted");
    }
    Ok(())
}

#[tokio::test]
async fn after_a_restart_of_postgres_old_markers_are_worth_a_question() -> Result<()> {
    let mut postgres = private_postgres(PostgresOptions::default()).await?;
    let redis = private_redis(RedisOptions::default()).await?;
    let scene = Scene::on(&postgres, redis.url()).await?;
    let (one, two) = (scene.gateway(&[]).await?, scene.gateway(&[]).await?);
    ready(&one).await?;
    ready(&two).await?;
    let body = event("evt_1", "");
    assert_eq!(outcome(&post(&mut one.client()?, "stripe", &body).await?), "accepted");
    settled(&scene, 1).await?;
    let before = scene.markers().await?;
    let restarted = tokio::task::spawn_blocking(move || postgres.restart().map(|()| postgres));
    let _postgres = restarted.await??;
    for gateway in [&one, &two] {
        let told =
            |line: &Value| line["message"].as_str().is_some_and(|text| text.contains("another generation"));
        gateway.log(told).await?;
    }
    // Neither the memory of the first nor the marker in Redis answers; Postgres does, and the marker is new.
    let again = post(&mut one.client()?, "stripe", &body).await?;
    assert_eq!((again.status.as_u16(), outcome(&again)), (200, "duplicate"));
    assert_eq!(three_tiers(&one).await?, [0, 0, 1]);
    let renewed = async || (scene.markers().await.ok()? != before).then_some(());
    eventually(LIMIT, renewed).await?;
    assert_eq!(outcome(&post(&mut two.client()?, "stripe", &body).await?), "duplicate");
    assert_eq!(three_tiers(&two).await?, [0, 1, 0]);
    scene.assert_once([&"evt_1".to_owned()]).await?;
    Ok(())
}
