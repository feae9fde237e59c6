//! Handshakes are answered as the provider expects, without a store, and never become events.

use anyhow::{Context as _, Result};
use bytes::Bytes;
use hapax::dev::PostgresOptions;
use http::Method;

use crate::harness::client::{Answer, Client};
use crate::harness::scene::{SECRET, Scene, signed_as};
use crate::harness::stores::private_postgres;

/// Times that fit into Slack's three seconds, and a source for each provider of a handshake.
fn overrides() -> Vec<String> {
    let times = [
        "server.deadline = \"2s\"",
        "server.body_timeout = \"1s\"",
        "in_flight.wait = \"500ms\"",
        "postgres.record_timeout = \"1200ms\"",
        "postgres.statement_timeout = \"800ms\"",
        "server.public_url = \"https://hooks.example.com\"",
        "source.meta.handshake_secrets = { verify_token = \"let me in\" }",
    ];
    let source = |name: &str| {
        [format!("source.{name}.provider = \"{name}\""), format!("source.{name}.secrets = \"{SECRET}\"")]
    };
    let sources =
        ["slack", "zoom", "meta", "twitter", "dropbox", "trello", "github"].into_iter().flat_map(source);
    times.into_iter().map(str::to_owned).chain(sources).collect()
}

async fn post(client: &mut Client, source: &str, secret: &str, body: &'static str) -> Result<Answer> {
    let body = Bytes::from_static(body.as_bytes());
    let signed = signed_as(source, secret, &body, None)?;
    let headers: Vec<(&str, &str)> =
        signed.iter().filter_map(|(name, value)| Some((name.as_str(), value.to_str().ok()?))).collect();
    client.post(&format!("/in/{source}"), &headers, body.clone()).await
}

fn shown(answer: &Answer) -> (u16, &str, &str) {
    let body = std::str::from_utf8(&answer.body).unwrap_or("not text");
    (answer.status.as_u16(), answer.header("hapax-outcome").unwrap_or_default(), body)
}

#[tokio::test]
async fn handshakes_are_answered_with_both_stores_down() -> Result<()> {
    let mut postgres = private_postgres(PostgresOptions::default()).await?;
    let scene = Scene::on(&postgres, "redis://127.0.0.1:1".to_owned()).await?;
    let overrides = overrides();
    let gateway = scene.gateway(&overrides.iter().map(String::as_str).collect::<Vec<_>>()).await?;
    postgres.stop()?;
    let mut client = gateway.client()?;

    let slack =
        r#"{"type":"url_verification","event_id":"Ev1","token":"t","challenge":"3eZbrw1aBm2rZgRNFdxV"}"#;
    let answer = post(&mut client, "slack", SECRET, slack).await?;
    assert_eq!(shown(&answer), (200, "handshake", "3eZbrw1aBm2rZgRNFdxV"));
    assert_eq!(answer.header("content-type"), Some("text/plain"));
    assert_eq!(answer.header("x-content-type-options"), Some("nosniff"));
    let answer = post(&mut client, "slack", "another", slack).await?;
    assert_eq!((answer.status.as_u16(), answer.header("hapax-outcome")), (401, Some("refused")));
    let answer =
        post(&mut client, "slack", SECRET, r#"{"type":"url_verification","event_id":"Ev1"}"#).await?;
    assert_eq!((answer.status.as_u16(), answer.header("hapax-outcome")), (422, Some("refused")));

    let zoom = r#"{"event":"endpoint.url_validation","event_ts":1,"payload":{"plainToken":"qgg8vlvZRS6UYooatFL8Aw"}}"#;
    let answer = post(&mut client, "zoom", SECRET, zoom).await?;
    assert_eq!(answer.header("content-type"), Some("application/json"));
    let reply: serde_json::Value = serde_json::from_slice(&answer.body)?;
    assert_eq!(reply["plainToken"], "qgg8vlvZRS6UYooatFL8Aw");
    assert_eq!(reply["encryptedToken"].as_str().context("token")?.len(), 64);

    for (path, wanted) in [
        (
            "/in/meta?hub.mode=subscribe&hub.verify_token=let+me+in&hub.challenge=115",
            (200, "handshake", Some("115")),
        ),
        ("/in/meta?hub.mode=subscribe&hub.verify_token=x&hub.challenge=115", (401, "refused", None)),
        ("/in/meta?hub.mode=subscribe&hub.verify_token=let+me+in", (422, "refused", None)),
        ("/in/meta", (422, "refused", None)),
        ("/in/dropbox?challenge=abc", (200, "handshake", Some("abc"))),
        ("/in/twitter?crc_token=%7B%22id%22%3A1%7D", (422, "refused", None)),
        ("/in/stripe?challenge=abc", (405, "refused", None)),
        ("/in/nobody?challenge=abc", (404, "refused", None)),
    ] {
        let answer = client.get(path).await?;
        let (status, outcome, body) = shown(&answer);
        assert_eq!((status, outcome), (wanted.0, wanted.1), "{path}");
        assert!(wanted.2.is_none_or(|wanted| wanted == body), "{path}: {body}");
        assert!(status < 400 || !body.contains("115") && !body.contains("abc"), "{path}: {body}");
    }

    // What the hourly check has had signed is no event's signature.
    let answer = client.get("/in/twitter?crc_token=word").await?;
    let reply: serde_json::Value = serde_json::from_slice(&answer.body)?;
    let signature = reply["response_token"].as_str().context("token")?;
    let headers = [("x-twitter-webhooks-signature", signature)];
    let answer = client.post("/in/twitter", &headers, Bytes::from_static(b"word")).await?;
    assert_eq!(answer.status.as_u16(), 401);
    Ok(())
}

#[tokio::test]
async fn other_methods_are_told_which_are_taken() -> Result<()> {
    let scene = Scene::new().await?;
    let overrides = overrides();
    let gateway = scene.gateway(&overrides.iter().map(String::as_str).collect::<Vec<_>>()).await?;
    let mut client = gateway.client()?;
    for (source, allowed) in [("github", "POST"), ("meta", "POST, GET"), ("trello", "POST, HEAD")] {
        let answer = client.send(Method::PUT, &format!("/in/{source}"), &[], Bytes::new()).await?;
        assert_eq!((answer.status.as_u16(), answer.header("allow")), (405, Some(allowed)), "{source}");
    }
    let answer = client.send(Method::HEAD, "/in/trello", &[], Bytes::new()).await?;
    assert_eq!(shown(&answer), (200, "handshake", ""));
    let found = scene.found().await?;
    assert!(found.rows.is_empty() && found.effects.is_empty(), "{found:?}");
    Ok(())
}
