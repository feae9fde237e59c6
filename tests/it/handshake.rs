//! Handshakes are answered as the provider expects, without a store, and never become events.

use anyhow::{Context as _, Result};
use bytes::Bytes;
use hapax::dev::PostgresOptions;
use http::Method;

use crate::harness::client::{Answer, Client};
use crate::harness::gateway::Gateway;
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

/// How a handshake comes.
#[derive(Clone, Copy)]
enum Come {
    /// By a method, to a path, with headers, with nothing signed.
    Unsigned(&'static str, &'static str, &'static [(&'static str, &'static str)], &'static str),
    /// As a POST that is signed with the source's secret, with more headers.
    Signed(&'static str, &'static [(&'static str, &'static str)], &'static str),
}

use Come::{Signed, Unsigned};

/// Status, content type, one more header, body.
type Wanted = (u16, Option<&'static str>, Option<(&'static str, &'static str)>, &'static str);

const JSON: Option<&str> = Some("application/json");
const TEXT: Option<&str> = Some("text/plain");
const HANDED: &str = "b537207f20cbfa02357cf448134da559e8bd39d61597dcd5631b8012eae53e81";

const HANDSHAKES: &[(Come, Wanted)] = &[
    (
        Signed(
            "twitch",
            &[("Twitch-Eventsub-Message-Type", "webhook_callback_verification")],
            r#"{"challenge":"pogchamp-kappa-360noscope-vod"}"#,
        ),
        (200, TEXT, None, "pogchamp-kappa-360noscope-vod"),
    ),
    (
        Signed("xero", &[], r#"{"events":[],"firstEventSequence":0,"lastEventSequence":0,"entropy":"S0m3"}"#),
        (200, None, None, ""),
    ),
    (
        Unsigned(
            "POST",
            "/in/xero",
            &[("x-xero-signature", "W07VK5tT0JUhD9Ps7uBfNsSi8v+niV/jRtZxzpYPxhg=")],
            r#"{"events":[]}"#,
        ),
        (401, None, None, ""),
    ),
    (
        Unsigned(
            "POST",
            "/in/microsoft-graph?validationToken=Validation%3a+Testing+client%2F1+a%2Bb",
            &[("Content-Type", "text/plain; charset=utf-8")],
            "",
        ),
        (200, TEXT, Some(("x-content-type-options", "nosniff")), "Validation: Testing client/1 a+b"),
    ),
    (
        Unsigned(
            "POST",
            "/in/woocommerce",
            &[("Content-Type", "application/x-www-form-urlencoded")],
            "webhook_id=142",
        ),
        (200, None, None, ""),
    ),
    (
        Unsigned(
            "POST",
            "/in/monday",
            &[],
            r#"{"challenge":"3eZbrw1aBm2rZgRNFdxV2595E9CY3gmdALWMmHkvFXO7tYXAYM8P"}"#,
        ),
        (200, JSON, None, r#"{"challenge":"3eZbrw1aBm2rZgRNFdxV2595E9CY3gmdALWMmHkvFXO7tYXAYM8P"}"#),
    ),
    (
        Unsigned(
            "POST",
            "/in/smartsheet",
            &[("Smartsheet-Hook-Challenge", "d78dd1d3-01ce-4481-81de-92b4f3aa5ab1")],
            r#"{"challenge":"d78dd1d3-01ce-4481-81de-92b4f3aa5ab1","webhookId":7}"#,
        ),
        (200, None, Some(("smartsheet-hook-response", "d78dd1d3-01ce-4481-81de-92b4f3aa5ab1")), ""),
    ),
    (Unsigned("HEAD", "/in/intercom", &[], ""), (200, None, None, "")),
    (Unsigned("HEAD", "/in/trello", &[], ""), (200, None, None, "")),
    (Unsigned("HEAD", "/in/mandrill", &[], ""), (200, None, None, "")),
    (
        Unsigned("GET", "/in/okta", &[("X-Okta-Verification-Challenge", "a-b_c1")], ""),
        (200, JSON, None, r#"{"verification":"a-b_c1"}"#),
    ),
    (
        Unsigned("GET", "/in/dropbox?challenge=abc123", &[], ""),
        (200, TEXT, Some(("x-content-type-options", "nosniff")), "abc123"),
    ),
    // HMAC-SHA1 under the SHA-1 of the secret, computed by another program.
    (
        Unsigned("GET", "/in/braintree?bt_challenge=20f9f8ed05f77439fe955c977e4c8a53", &[], ""),
        (200, TEXT, None, BRAINTREE),
    ),
    // SHA-256 of the code, "a verification token" and https://hooks.example.com/in/ebay, computed by another program.
    (
        Unsigned(
            "GET",
            "/in/ebay?challenge_code=a8628072-3d33-45ee-9004-bee86830a22d",
            &[("X-Forwarded-Host", "evil.example")],
            "",
        ),
        (200, JSON, None, EBAY),
    ),
    (
        Unsigned(
            "POST",
            "/in/azure-event-grid?token=whsec_a+secret+for+tests+only",
            &[("aeg-event-type", "SubscriptionValidation")],
            r#"[{"id":"1","topic":"t","data":{"validationCode":"512d38b6-c7b8-40c8-89fe-f46f9e9622b6"}}]"#,
        ),
        (200, JSON, None, r#"{"validationResponse":"512d38b6-c7b8-40c8-89fe-f46f9e9622b6"}"#),
    ),
    (
        Unsigned(
            "POST",
            "/in/azure-event-grid?token=other",
            &[("aeg-event-type", "SubscriptionValidation")],
            r#"[{"id":"1","data":{"validationCode":"512d38b6"}}]"#,
        ),
        (401, Some("application/problem+json"), None, UNAUTHORIZED),
    ),
    (
        Unsigned(
            "OPTIONS",
            "/in/azure-cloudevents",
            &[("WebHook-Request-Origin", "eventgrid.azure.net")],
            "",
        ),
        (200, None, Some(("webhook-allowed-origin", "eventgrid.azure.net")), ""),
    ),
    (Signed("asana", &[], r#"{"events":[]}"#), (200, None, None, "")),
    // Nobody opened a window, and without Postgres nobody can say so.
    (
        Unsigned("POST", "/in/asana", &[("X-Hook-Secret", HANDED)], ""),
        (503, Some("application/problem+json"), Some(("retry-after", "5")), ""),
    ),
    // Not a word of it comes back.
    (
        Unsigned("POST", "/in/microsoft-graph?validationToken=%3Cscript%3Ealert(1)%3C%2Fscript%3E", &[], ""),
        (422, Some("application/problem+json"), None, ""),
    ),
    (
        Unsigned("GET", "/in/dropbox?challenge=%3Cimg+src%3Dx%3E", &[], ""),
        (422, Some("application/problem+json"), None, ""),
    ),
    (
        Unsigned("GET", "/in/okta", &[("X-Okta-Verification-Challenge", "<b>")], ""),
        (422, Some("application/problem+json"), None, ""),
    ),
    (
        Unsigned("OPTIONS", "/in/azure-cloudevents", &[("Origin", "https://evil.example")], ""),
        (422, Some("application/problem+json"), None, ""),
    ),
    (
        Unsigned("GET", "/in/ebay?challenge_code=a%0d%0ab", &[], ""),
        (422, Some("application/problem+json"), None, ""),
    ),
    (
        Unsigned("GET", "/in/braintree?bt_challenge=PG5vdGlmaWNhdGlvbj48a2luZD5", &[], ""),
        (422, Some("application/problem+json"), None, ""),
    ),
    (
        Unsigned("POST", "/in/monday", &[], r#"{"challenge":"a","challenge":"b"}"#),
        (401, Some("application/problem+json"), None, UNAUTHORIZED),
    ),
    // An event beside the trigger is an event, and nobody signed it.
    (
        Unsigned("POST", "/in/woocommerce", &[], "webhook_id=142&id=1"),
        (401, Some("application/problem+json"), None, UNAUTHORIZED),
    ),
    (
        Unsigned(
            "POST",
            "/in/microsoft-graph?validationToken=a",
            &[],
            r#"{"value":[{"id":"1","clientState":"x"}]}"#,
        ),
        (401, Some("application/problem+json"), None, UNAUTHORIZED),
    ),
    (
        Unsigned("POST", "/in/monday", &[], r#"{"challenge":"a","event":{"triggerUuid":"1"}}"#),
        (401, Some("application/problem+json"), None, UNAUTHORIZED),
    ),
];

const UNAUTHORIZED: &str =
    r#"{"type":"about:blank","title":"Unauthorized","status":401,"code":"unauthorized"}"#;
const BRAINTREE: &str = "a_public_key|8da086ad2123d0a9b2b095d23ab56f1a228a8a02";
const EBAY: &str =
    r#"{"challengeResponse":"e7c6376937366d0ad933b7d3813eae2fa93d68eb8ed578859fce62aaac83d4c3"}"#;

fn all_overrides() -> Vec<String> {
    let presets = [
        "twitch",
        "xero",
        "microsoft-graph",
        "woocommerce",
        "smartsheet",
        "intercom",
        "mandrill",
        "okta",
        "braintree",
        "asana",
        "azure-event-grid",
        "azure-cloudevents",
        "monday",
        "ebay",
    ];
    let source = |name: &str| {
        let secret = if name == "ebay" { PUBLIC_KEY } else { SECRET };
        [format!("source.{name}.provider = \"{name}\""), format!("source.{name}.secrets = \"{secret}\"")]
    };
    let more = [
        "source.braintree.handshake_secrets = { public_key = \"a_public_key\" }",
        "source.ebay.handshake_secrets = { verification_token = \"a verification token\" }",
    ];
    let all = presets.into_iter().flat_map(source).chain(more.map(str::to_owned));
    overrides().into_iter().chain(all).collect()
}

/// Of nobody: the base point of P-256 (SEC 2), whose private key is 1.
const PUBLIC_KEY: &str = "MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEaxfR8uEsQkf4vOblY6RA8ncDfYEt6zOg9KE5RdiYwpZP40Li/hp/m47n60p8D54WK84zV2sxXs7LtkBoN79R9Q==";

/// A gateway with a source for each handshake.
async fn gateway_of_all(scene: &Scene) -> Result<Gateway> {
    let overrides = all_overrides();
    let overrides: Vec<&str> = overrides.iter().map(String::as_str).collect();
    scene.gateway(&overrides).await
}

async fn come(client: &mut Client, come: Come) -> Result<Answer> {
    match come {
        Unsigned(method, path, headers, body) => {
            client
                .send(
                    Method::from_bytes(method.as_bytes())?,
                    path,
                    headers,
                    Bytes::from_static(body.as_bytes()),
                )
                .await
        }
        Signed(source, more, body) => {
            let body = Bytes::from_static(body.as_bytes());
            let signed = signed_as(source, SECRET, &body, Some("m1"))?;
            let texts = signed.iter().filter_map(|(name, value)| Some((name.as_str(), value.to_str().ok()?)));
            let headers: Vec<(&str, &str)> = texts.chain(more.iter().copied()).collect();
            client.post(&format!("/in/{source}"), &headers, body.clone()).await
        }
    }
}

fn assert_answer(answer: &Answer, wanted: Wanted, which: &str) {
    let (status, content_type, header, body) = wanted;
    let found = (answer.status.as_u16(), answer.header("content-type"));
    assert_eq!(found, (status, content_type), "{which}: {answer:?}");
    if let Some((name, value)) = header {
        assert_eq!(answer.header(name), Some(value), "{which}");
    }
    let text = std::str::from_utf8(&answer.body).unwrap_or("not text");
    if status < 400 || !body.is_empty() {
        assert_eq!(text, body, "{which}");
        let outcome = if status < 400 { "handshake" } else { "refused" };
        assert_eq!(answer.header("hapax-outcome"), Some(outcome), "{which}");
    } else {
        assert!(!text.contains("script") && !text.contains("img"), "{which}: {text}");
    }
}

#[tokio::test]
async fn every_handshake_is_answered_exactly_with_both_stores_down() -> Result<()> {
    let mut postgres = private_postgres(PostgresOptions::default()).await?;
    let scene = Scene::on(&postgres, "redis://127.0.0.1:1".to_owned()).await?;
    postgres.stop()?;
    let gateway = gateway_of_all(&scene).await?;
    let mut client = gateway.client()?;
    for (index, (which, wanted)) in HANDSHAKES.iter().enumerate() {
        // Providers repeat them: every hour, every 72 hours, every hundred events.
        for _ in 0..2 {
            assert_answer(&come(&mut client, *which).await?, *wanted, &index.to_string());
        }
    }
    Ok(())
}

#[tokio::test]
async fn handshakes_store_nothing_and_swallow_no_event() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = gateway_of_all(&scene).await?;
    let mut client = gateway.client()?;
    for (which, _) in HANDSHAKES {
        come(&mut client, *which).await?;
    }
    let found = scene.found().await?;
    assert!(found.rows.is_empty() && found.effects.is_empty(), "{found:?}");

    // A trigger in the URL or in a header makes no handshake of an event.
    let state = format!(r#"{{"value":[{{"id":"n1","clientState":"{SECRET}"}}]}}"#);
    let answer = client.post("/in/microsoft-graph?validationToken=a", &[], state).await?;
    assert_eq!(shown(&answer), (202, "accepted", ""));
    let events = [
        (Signed("woocommerce", &[], r#"{"id":1,"webhook_id":142}"#), "m1"),
        (Signed("asana", &[("X-Hook-Secret", HANDED)], r#"{"events":[{"action":"changed"}]}"#), ""),
        (
            Signed(
                "smartsheet",
                &[("Smartsheet-Hook-Challenge", "c")],
                r#"{"challenge":"c","webhookId":7,"nonce":"s1"}"#,
            ),
            "s1",
        ),
        (
            Signed(
                "xero",
                &[],
                r#"{"events":[{}],"firstEventSequence":1,"lastEventSequence":1,"entropy":"x"}"#,
            ),
            "1:1:x",
        ),
    ];
    for (event, id) in events {
        let answer = come(&mut client, event).await?;
        assert_eq!(shown(&answer), (200, "accepted", ""), "{id}");
        assert!(id.is_empty() || scene.found().await?.rows.contains_key(id), "{id}");
    }
    assert_eq!(scene.found().await?.rows.len(), 5);
    Ok(())
}
