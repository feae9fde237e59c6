//! One event in both tiers.

use anyhow::{Context as _, Result};
use hapax::identify::EventKey;
use serde_json::{Value, json};

use super::made::{Made, Said, ago, hapax, make, settings};
use crate::harness::play::ready;
use crate::harness::scene::{Scene, deliver, event};
use crate::harness::wait::eventually;
use crate::harness::{gateway::Start, load::LIMIT};

async fn show(settings: &str, id: &str, more: &[&str]) -> Result<Said> {
    hapax(settings, &[&["show", "--source", "plain", "--id", id], more].concat()).await
}

async fn redis(settings: &str) -> Result<Value> {
    let said = show(settings, "a", &["--json"]).await?;
    assert_eq!(said.code, Some(0), "{}", said.err);
    said.json()?.get("redis").cloned().context("no word of redis")
}

#[tokio::test]
async fn the_marker_is_told_with_what_it_means() -> Result<()> {
    let scene = Scene::new().await?;
    let settings = settings(&scene);
    make(&scene.database().await?, &[ago(1, "plain", "a", "done")]).await?;
    let key = scene.redis_key("plain", "a");
    let none = redis(&settings).await?;
    assert_eq!((&none[0]["marker"], &none[0]["key"]), (&json!("none"), &json!(key)));

    let mut client = scene.redis().await?;
    let database = scene.database().await?;
    let generation: Vec<u8> = database.query_one("select hapax.generation()", &[]).await?.get(0);
    let generation = hapax::generation::Generation::from_bytes(&generation).context("generation")?.text();
    for (value, ttl, wanted) in [
        ("L AAAAAAAAAAAAAAAA".to_owned(), Some(60_000), "lease"),
        (format!("D {generation} AAAAAAAA"), Some(60_000), "done"),
        (format!("D {generation} AAAAAAAA"), None, "done"),
        ("D AAAAAAAA AAAAAAAA".to_owned(), Some(60_000), "other_generation"),
        ("something\u{1b}".to_owned(), Some(60_000), "unknown"),
    ] {
        let mut set = redis::cmd("SET");
        set.arg(&key).arg(&value);
        if let Some(ttl) = ttl {
            set.arg("PX").arg(ttl);
        }
        set.exec_async(&mut client).await?;
        let told = redis(&settings).await?;
        assert_eq!((&told[0]["marker"], &told[0]["value"]), (&json!(wanted), &json!(value)));
        match ttl {
            Some(ttl) => {
                assert!(told[0]["left_ms"].as_i64().is_some_and(|left| left > 0 && left <= ttl), "{told}");
            }
            None => assert_eq!(told[0]["left_ms"], Value::Null),
        }
        let text = show(&settings, "a", &[]).await?.out;
        let means = told[0]["means"].as_str().context("means")?;
        assert!(text.contains(&format!("redis       {means}")) && !text.contains('\u{1b}'), "{text}");
    }
    redis::cmd("DEL").arg(&key).exec_async(&mut client).await?;
    redis::cmd("LPUSH").arg(&key).arg("x").exec_async(&mut client).await?;
    assert_eq!(redis(&settings).await?[0]["marker"], "unknown");

    // The other key that an event may have there.
    redis::cmd("DEL").arg(&key).exec_async(&mut client).await?;
    let guarded = EventKey::of("plain", "-", "a").guarded();
    let prefix = &scene.stores.redis_prefix;
    let guarded = format!("{prefix}{}", hapax_text(&guarded.0));
    redis::cmd("SET").arg(&guarded).arg(format!("D {generation} AAAAAAAA")).exec_async(&mut client).await?;
    let told = redis(&settings).await?;
    assert_eq!(
        (&told[0]["marker"], &told[1]["marker"], &told[1]["key"]),
        (&json!("none"), &json!("done"), &json!(guarded))
    );
    Ok(())
}

fn hapax_text(key: &[u8]) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(key)
}

#[tokio::test]
async fn the_marker_of_a_gateway_is_understood() -> Result<()> {
    let scene = Scene::new().await?;
    let settings = scene.settings(&[], "");
    let gateway = Start::new(&settings).start().await?;
    ready(&gateway).await?;
    assert_eq!(deliver(gateway.listen()?, "plain", &event("a", "")).await?.outcome, "accepted");
    eventually(LIMIT, async || {
        let told = redis(&settings).await.ok()?;
        (told[0]["marker"] == "done").then_some(())
    })
    .await?;
    let said = show(&settings, "a", &["--raw"]).await?;
    assert_eq!(said.out.as_bytes(), &event("a", "")[..]);
    Ok(())
}

#[tokio::test]
async fn without_redis_the_rest_is_told() -> Result<()> {
    let mut scene = Scene::new().await?;
    make(&scene.database().await?, &[ago(1, "plain", "a", "done")]).await?;
    scene.stores.redis_url = "redis://127.0.0.1:1".to_owned();
    let away = settings(&scene);
    assert!(redis(&away).await?["error"].is_string());
    let said = show(&away, "a", &[]).await?;
    assert_eq!(said.code, Some(0));
    assert!(
        said.out.contains("redis       cannot be reached: ") && said.out.contains("status      done"),
        "{}",
        said.out
    );
    let off = scene.settings(
        &["fast_tier.kind = \"off\"", "fast_tier.url =", "fast_tier.prefix =", "fast_tier.timeout ="],
        "",
    );
    let said = show(&off, "a", &[]).await?;
    assert!(said.out.contains("redis       not used by these settings"), "{}{}", said.out, said.err);
    Ok(())
}

#[tokio::test]
async fn all_of_an_event_is_told() -> Result<()> {
    let scene = Scene::new().await?;
    let settings = settings(&scene);
    let database = scene.database().await?;
    let jobs = &["target:crm held", "target:orders dead"][..];
    make(
        &database,
        &[Made {
            jobs, body: "{\"a\":\n\"é\"}", kind: Some("t"), replay: 2, ..ago(1, "plain", "a", "dead")
        }],
    )
    .await?;
    make(&database, &[Made { body: "a\u{1b}[2J", ..ago(1, "plain", "odd", "done") }]).await?;
    make(&database, &[Made { has_body: false, ..ago(1, "plain", "bodiless", "done") }]).await?;
    make(&database, &[Made { scope: "eu", ..ago(1, "plain", "scoped", "done") }]).await?;
    let other = "insert into hapax.mismatch (key, digest) select key, sha256('x') from hapax.ledger where event_id = 'a'";
    database.execute(other, &[]).await?;

    let told = show(&settings, "a", &["--json", "--body"]).await?.json()?;
    assert_eq!(told["key"], hex::encode(EventKey::of("plain", "-", "a").0));
    for (pointer, wanted) in [
        ("/source", json!("plain")),
        ("/scope", json!("-")),
        ("/status", json!("dead")),
        ("/event_type", json!("t")),
        ("/replay", json!(2)),
        ("/attempts", json!(9)),
        ("/jobs/0/queue", json!("target:crm")),
        ("/jobs/0/state", json!("pending")),
        ("/jobs/0/replay", json!(2)),
        ("/jobs/1/state", json!("dead")),
        ("/jobs/1/attempts_max", json!(9)),
        ("/jobs/1/error", json!("P0001 no")),
        ("/jobs/1/held_until", Value::Null),
        ("/body/body_bytes", json!(11)),
        ("/body/headers/x-kept", json!("yes")),
        ("/body/text", json!("{\"a\":\n\"é\"}")),
    ] {
        assert_eq!(told.pointer(pointer), Some(&wanted), "{pointer}: {told:#}");
    }
    assert!(told["jobs"][0]["held_until"].is_string());
    assert!(told["body"]["place"].as_str().is_some_and(|place| place.starts_with("hapax.body_")), "{told:#}");
    assert_eq!(told["other_bodies"].as_array().map(Vec::len), Some(1));

    let said = show(&settings, "a", &["--body"]).await?.out;
    for wanted in [
        "event       a\n",
        "job         target:crm: pending, 3 of 9 attempts, replay 2, a worker has it until 2",
        "job         target:orders: dead, 9 of 9 attempts, replay 2, since 2",
        "; last error: P0001 no\n",
        "body        11 bytes in hapax.body_",
        "as text:\n{\"a\":\n\"é\"}\n",
    ] {
        assert!(said.contains(wanted), "{wanted:?}: {said}");
    }
    assert_eq!(show(&settings, "a", &["--raw"]).await?.out, "{\"a\":\n\"é\"}");
    let odd = show(&settings, "odd", &["--body"]).await?.out;
    assert!(odd.contains("in base64:\nYRtbMko=\n"), "{odd}");
    let bodiless = show(&settings, "bodiless", &[]).await?.out;
    assert!(bodiless.contains("body        not kept any more (retention.body = 7d)"), "{bodiless}");
    assert_eq!(show(&settings, "bodiless", &["--raw"]).await?.code, Some(1));
    // Its scope is not that of the settings.
    assert_eq!(show(&settings, "scoped", &["--json"]).await?.json()?["scope"], "eu");
    assert_eq!(show(&settings, "scoped", &["--scope", "us"]).await?.code, Some(1));

    database
        .batch_execute("insert into hapax.body_kept select received_at, key, body, headers from hapax.body")
        .await?;
    assert_eq!(show(&settings, "a", &["--json"]).await?.json()?["body"]["place"], "hapax.body_kept");
    Ok(())
}
