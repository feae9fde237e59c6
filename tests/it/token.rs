//! A signed token is for one request: its body, its URL, its time, and the source that it is meant for.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use bytes::Bytes;
use hapax::provider::Scheme;
use hapax::sign::{Draft, sign_for};
use http::Method;

use crate::harness::client::Client;
use crate::harness::scene::{SECRET, Scene};

const URL: &str = "https://hooks.example.com";

/// The headers of a delivery whose token says what `aud` is.
fn headers(body: &Bytes, path: &str, id: &str, aud: &str, ago: i64) -> Result<Vec<(String, String)>> {
    let scheme = Scheme::preset("messagebird").context("preset")?;
    let key = scheme.key(SECRET).map_err(anyhow::Error::msg)?;
    let now = jiff::Timestamp::from_second(jiff::Timestamp::now().as_second() - ago)?;
    let draft = Draft { method: &Method::POST, public_url: Some(URL), path, body, id: Some(id), now };
    let claims = BTreeMap::from([("aud".to_owned(), aud.to_owned())]);
    let signed = sign_for(&scheme, &key, &draft, &claims).map_err(anyhow::Error::msg)?;
    let text = |value: &http::HeaderValue| value.to_str().map(str::to_owned);
    signed.headers.iter().map(|(name, value)| Ok((name.to_string(), text(value)?))).collect()
}

async fn post(
    client: &mut Client,
    path: &str,
    headers: &[(String, String)],
    body: &Bytes,
) -> Result<(u16, String)> {
    let headers: Vec<(&str, &str)> =
        headers.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    let answer = client.post(path, &headers, body.clone()).await?;
    Ok((answer.status.as_u16(), answer.header("hapax-outcome").unwrap_or_default().to_owned()))
}

#[tokio::test]
async fn a_token_lets_its_own_request_in_and_no_other() -> Result<()> {
    let scene = Scene::new().await?;
    let (secrets, url) =
        (format!("source.bird.secrets = [\"{SECRET}\"]"), format!("source.bird.public_url = \"{URL}\""));
    let gateway = scene
        .gateway(&[
            "source.bird.provider = \"messagebird\"",
            &secrets,
            &url,
            "source.bird.claims = { aud = \"me\" }",
            "source.bird.effect = \"fx.apply\"",
        ])
        .await?;
    let mut client = gateway.client()?;
    let (path, body) = ("/in/bird?a=1", Bytes::from_static(b"{\"id\":\"m1\"}"));
    let right = headers(&body, path, "t-1", "me", 0)?;
    let (other_body, other_path) = (Bytes::from_static(b"{\"id\":\"m2\"}"), "/in/bird?a=2");
    let refused = [
        (headers(&body, path, "t-2", "them", 0)?, path, &body),
        (headers(&body, path, "t-3", "me", 3_600)?, path, &body),
        (headers(&body, path, "t-4", "me", -3_600)?, path, &body),
        (right.clone(), path, &other_body),
        (right.clone(), other_path, &body),
        ([right.clone(), right.clone()].concat(), path, &body),
        (Vec::new(), path, &body),
    ];
    for (headers, path, body) in &refused {
        assert_eq!(post(&mut client, path, headers, body).await?, (401, "refused".to_owned()), "{headers:?}");
    }
    let found = scene.found().await?;
    assert!(found.rows.is_empty() && scene.markers().await?.is_empty(), "{found:?}");
    for outcome in ["accepted", "duplicate"] {
        assert_eq!(post(&mut client, path, &right, &body).await?, (200, outcome.to_owned()));
    }
    scene.assert_once(&["t-1".to_owned()]).await?;
    Ok(())
}
