//! What is told about a request: one line, no secret, nothing that a sender could forge or multiply.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result};
use bytes::Bytes;
use serde_json::Value;

use crate::harness::client::Raw;
use crate::harness::gateway::Gateway;
use crate::harness::play::{
    Hold, LIMIT, Numbers, answer, head, metric, patient, post, ready, request, stripe_signature,
};
use crate::harness::scene::{Scene, event, signed_as};
use crate::harness::wait::eventually;

/// The lines about requests, once there are so many.
async fn request_lines(gateway: &Gateway, wanted: usize) -> Result<Vec<Value>> {
    let all = || {
        let lines = gateway.lines();
        let lines = lines.iter().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let lines: Vec<Value> = lines.filter(|line| line["message"] == "request").collect();
        std::future::ready((lines.len() >= wanted).then_some(lines))
    };
    let lines = eventually(LIMIT, all)
        .await
        .with_context(|| format!("not {wanted} lines: {:#?}", gateway.lines()))?;
    assert_eq!(lines.len(), wanted, "{lines:#?}");
    Ok(lines)
}

#[tokio::test]
async fn every_request_has_one_line_that_says_what_became_of_it() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&patient(&[])).await?;
    ready(&gateway).await?;
    let mut client = gateway.client()?;
    let body = event("evt_1", "");
    post(&mut client, "stripe", &body).await?;
    post(&mut client, "stripe", &body).await?;
    post(&mut client, "stripe", &event("evt_2", r#""do":"raise""#)).await?;
    client.post("/in/stripe", &[], body.clone()).await?;
    client.post("/in/none", &[], body.clone()).await?;
    post(&mut client, "stripe", &Bytes::from_static(b"{}")).await?;
    let lines = request_lines(&gateway, 6).await?;
    let told = |line: &Value| {
        ["source", "outcome", "error.code", "error.stage", "error.dependency", "event.id", "tier"]
            .map(|name| line[name].as_str().unwrap_or("-").to_owned())
            .join(" ")
    };
    assert_eq!(
        lines.iter().map(told).collect::<Vec<_>>(),
        [
            "stripe accepted - - - evt_1 -",
            "stripe duplicate - - - evt_1 memory",
            "stripe unavailable effect_failed record effect evt_2 -",
            "stripe refused signature_missing verify none - -",
            "none refused unknown_source accept none - -",
            "stripe refused id_missing identify none - -",
        ]
    );
    let statuses: Vec<_> = lines.iter().filter_map(|line| line["http.status"].as_u64()).collect();
    assert_eq!(statuses, [200, 200, 503, 401, 404, 422]);
    assert_eq!(lines[0]["event.digest"], lines[1]["event.digest"]);
    assert_eq!(lines[0]["event.digest"].as_str().map(str::len), Some(12));
    assert_eq!(lines[0]["body_bytes"], body.len());
    assert!(lines[0]["record_ms"].as_f64() > Some(0.0), "{}", lines[0]);
    assert!(lines[2]["error.cause"].as_str().is_some_and(|cause| cause.contains("the effect fails")));
    for line in &lines {
        for name in ["verify_ms", "claim_ms", "record_ms", "duration_ms"] {
            assert!(line[name].is_number(), "{name}: {line}");
        }
    }
    let ids: BTreeSet<_> = lines.iter().filter_map(|line| line["request.id"].as_str()).collect();
    assert_eq!(ids.len(), 6, "each request has an id of its own");
    Ok(())
}

#[tokio::test]
async fn a_client_that_leaves_is_told_about_too() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&patient(&[])).await?;
    ready(&gateway).await?;
    let (bytes, at) = request("stripe", &event("evt_1", r#""do":"wait""#));
    let mut early = Raw::connect(gateway.listen()?).await?;
    early.write(&bytes[..at + 5]).await?;
    metric(&gateway, "hapax_requests_in_flight", &[], 1).await?;
    early.reset()?;
    let line = &request_lines(&gateway, 1).await?[0];
    assert_eq!(
        (line["outcome"].as_str(), line["error.code"].as_str()),
        (Some("refused"), Some("body_incomplete"))
    );

    let hold = Hold::new(&scene).await?;
    let mut late = Raw::connect(gateway.listen()?).await?;
    late.write(&bytes).await?;
    hold.waiting(1).await?;
    late.reset()?;
    metric(&gateway, "hapax_connections", &[], 0).await?;
    hold.release().await?;
    let line = &request_lines(&gateway, 2).await?[1];
    assert_eq!((line["outcome"].as_str(), line["event.id"].as_str()), (Some("accepted"), Some("evt_1")));
    metric(&gateway, "hapax_requests_total", &["outcome=\"accepted\""], 1).await
}

/// Looks for the text in every column of every table and view of the database but one.
async fn columns_with(scene: &Scene, text: &str) -> Result<Vec<String>> {
    let database = scene.database().await?;
    let columns = database
        .query(
            "select format('%I.%I', n.nspname, c.relname), quote_ident(a.attname), a.atttypid = 'bytea'::regtype
             from pg_class c join pg_attribute a on a.attrelid = c.oid join pg_namespace n on n.oid = c.relnamespace
             where c.relkind in ('r', 'p', 'v') and a.attnum > 0 and n.nspname in ('hapax', 'fx')
               and not c.relispartition",
            &[],
        )
        .await?;
    let mut found = Vec::new();
    for row in columns {
        let (table, column, raw): (&str, &str, bool) = (row.get(0), row.get(1), row.get(2));
        let bytes = if raw { column.to_owned() } else { format!("convert_to({column}::text, 'UTF8')") };
        let query = format!("select exists (select from {table} where position($1::bytea in {bytes}) > 0)");
        if database.query_one(&query, &[&text.as_bytes()]).await?.get(0) {
            found.push(format!("{table}.{column}"));
        }
    }
    Ok(found)
}

#[tokio::test]
async fn no_secret_is_told_to_anybody() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene
        .gateway(&[
            "source.gitlab.provider = \"gitlab-token\"",
            "source.gitlab.secrets = [\"CANARY-token\"]",
            "source.stripe.secrets = [\"whsec_CANARY-secret\"]",
            "log.level = \"debug\"",
        ])
        .await?;
    ready(&gateway).await?;
    let mut client = gateway.client()?;
    let body = event("evt_1", r#""x":"CANARY-body""#);
    let good = stripe_signature("whsec_CANARY-secret", &body, 0);
    let signature = good.split_once("v1=").context("a signature")?.1;
    let headers = [
        ("stripe-signature", &good[..]),
        ("authorization", "Bearer CANARY-bearer"),
        ("cookie", "session=CANARY-cookie"),
        ("x-gitlab-token", "CANARY-foreign"),
    ];
    let accepted = client.post("/in/stripe?key=CANARY-query", &headers, body.clone()).await?;
    assert_eq!(accepted.status, 200);
    let wrong = [("stripe-signature", "t=1,v1=CANARY-signature"), headers[1], headers[2], headers[3]];
    for (path, status) in
        [("/in/stripe?key=CANARY-query", 401), ("/in/CANARY-path", 404), ("/CANARY-path/x", 404)]
    {
        assert_eq!(client.post(path, &wrong, body.clone()).await?.status, status);
    }
    // An effect that fails, a body that is none, a token that is right and one that is wrong.
    let failing = event("evt_2", r#""do":"raise","x":"CANARY-body""#);
    let unreadable = event("evt_3", r#""do":"sleep","seconds":"CANARY-body""#);
    for body in [failing, unreadable] {
        let signature = stripe_signature("whsec_CANARY-secret", &body, 0);
        assert_eq!(client.post("/in/stripe", &[("stripe-signature", &signature)], body).await?.status, 503);
    }
    let token = [("x-gitlab-token", "CANARY-token"), ("idempotency-key", "delivery-1")];
    assert_eq!(client.post("/in/gitlab", &token, "CANARY-body").await?.status, 200);
    assert_eq!(client.post("/in/gitlab", &[("x-gitlab-token", "CANARY-toke")], "x").await?.status, 401);
    let mut broken = Raw::connect(gateway.listen()?).await?;
    broken.write(b"POST /in/stripe HTTP/1.1\r\nAuthorization CANARY-bearer\r\n\r\n").await?;
    broken.read_to_end().await?;
    request_lines(&gateway, 8).await?;

    let Numbers(metrics) = Numbers::of(&gateway).await?;
    let lines = gateway.lines().join("\n");
    for told in [&lines, &metrics] {
        assert!(!told.contains("CANARY") && !told.contains(signature), "{told}");
    }
    // The accepted bodies are kept where bodies are kept, and nothing else is kept anywhere.
    assert_eq!(columns_with(&scene, "CANARY-body").await?, ["hapax.body.body"]);
    for canary in ["-bearer", "-cookie", "-foreign", "-token", "-secret", "-query", "-path", "-signature"] {
        assert_eq!(columns_with(&scene, &format!("CANARY{canary}")).await?, [""; 0], "{canary}");
    }
    assert_eq!(columns_with(&scene, signature).await?, [""; 0]);
    for (key, value) in scene.markers().await? {
        assert!(!format!("{key} {value:?}").contains("CANARY"), "{key}");
    }
    Ok(())
}

#[tokio::test]
async fn what_a_sender_writes_forges_no_line_and_makes_no_metric() -> Result<()> {
    let scene = Scene::new().await?;
    let github = [
        "source.github.provider = \"github\"",
        "source.github.secrets = [\"a secret of GitHub's\"]",
        "source.stripe.id_max = 2048",
    ];
    let gateway = scene.gateway(&github).await?;
    ready(&gateway).await?;
    let mut client = gateway.client()?;
    let forged = r#"evt\r\n{\"message\":\"request\",\"outcome\":\"forged\"}\u001b[2J\u202e\u2028"#;
    let long = "x".repeat(2000);
    for id in [forged, &long] {
        assert_eq!(post(&mut client, "stripe", &event(id, "")).await?.status, 200);
    }
    assert_eq!(post(&mut client, "stripe", &event(&"x".repeat(100_000), "")).await?.status, 422);
    for id in ["\u{202e}txe", "a\tb"] {
        let body = Bytes::from_static(b"{}");
        let headers = signed_as("github", "a secret of GitHub's", &body, None)?;
        let mut lines = vec![format!("X-GitHub-Delivery: {id}"), "Content-Length: 2".to_owned()];
        for (name, value) in headers.iter().filter(|(name, _)| *name != "x-github-delivery") {
            lines.push(format!("{name}: {}", value.to_str()?));
        }
        let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
        let mut raw = Raw::connect(gateway.listen()?).await?;
        raw.write(&[&head("/in/github", &lines), &b"\r\n"[..], &body].concat()).await?;
        let (status, text) = answer(&mut raw).await?;
        assert!(status == 200 || status == 422, "{text}");
    }
    let invented: Vec<String> = (0..50).map(|n| format!("/in/invented{n}")).collect();
    for path in &invented {
        let headers = [("stripe-signature", "t=1,v1=00"), ("x-github-event", "invented-event")];
        assert_eq!(client.post(path, &headers, "{}").await?.status, 404);
    }

    let lines = request_lines(&gateway, 55).await?;
    assert!(lines.iter().all(|line| line["outcome"] != "forged"));
    for line in gateway.lines() {
        assert!(line.chars().all(|char| (' '..='~').contains(&char)), "{line:?}");
        assert!(line.len() < 1500, "{line}");
    }
    let wanted: String = serde_json::from_str(&format!("\"{forged}\""))?;
    assert_eq!(lines[0]["event.id"].as_str(), Some(&wanted[..]), "it is told, escaped");
    let Numbers(metrics) = Numbers::of(&gateway).await?;
    for invented in ["invented", "evt", "xxx", "forged", "txe"] {
        assert!(!metrics.contains(invented), "{invented}");
    }
    // Every label value is a word of ours or the name of a source.
    let sources: BTreeSet<&str> =
        metrics.lines().filter_map(|line| Some(line.split_once("source=\"")?.1.split_once('"')?.0)).collect();
    assert_eq!(sources, ["github", "none", "stripe"].into());
    Ok(())
}
