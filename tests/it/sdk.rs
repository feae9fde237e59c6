//! What providers' own libraries sign, the gateway takes; with one byte changed, it does not.

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};
use serde::Deserialize;

use crate::harness::client::{Answer, Client};
use crate::harness::gateway::Start;
use crate::harness::scene::Scene;

const PUBLIC_URL: &str = "https://hooks.example.com";

/// A source, and a request to it.
#[derive(Debug, Deserialize)]
struct Signed {
    name: String,
    preset: String,
    secrets: Vec<String>,
    query: String,
    headers: Vec<(String, String)>,
    body: String,
    /// The body with one byte changed, where the provider signs the body.
    altered: Option<String>,
}

/// Runs the libraries. They are there once `make setup-test` has run; without them nothing is tested, so that is an
/// error.
fn signed() -> Result<Vec<Signed>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let python = root.join("target/sdk/bin/python");
    ensure!(python.exists(), "no {}: run `make setup-test`", python.display());
    let output = Command::new(python).arg(root.join("tests/sdk/sign.py")).arg(PUBLIC_URL).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(serde_json::from_slice(&output.stdout)?)
}

fn sources(signed: &[Signed]) -> Result<String> {
    let mut text = String::new();
    for Signed { name, preset, secrets, .. } in signed {
        let secrets = serde_json::to_string(secrets)?;
        writeln!(text, "[source.{name}]\nprovider = \"{preset}\"\nsecrets = {secrets}\neffect = \"none\"")?;
    }
    Ok(text)
}

impl Signed {
    async fn send(&self, client: &mut Client, headers: &[(String, String)], body: &str) -> Result<Answer> {
        let headers: Vec<(&str, &str)> = headers.iter().map(|(name, value)| (&**name, &**value)).collect();
        client.post(&format!("/in/{}{}", self.name, self.query), &headers, body.to_owned()).await
    }

    /// The headers with one byte of a signature changed, for each of them that is one.
    fn forged(&self) -> Vec<Vec<(String, String)>> {
        let signs = |name: &str| {
            let name = name.to_ascii_lowercase();
            name.contains("signature")
                && !["version", "algorithm", "timestamp", "nonce"].iter().any(|no| name.ends_with(no))
        };
        let mut forged = Vec::new();
        for (name, value) in self.headers.iter().filter(|(name, _)| signs(name)) {
            let (left, right) = value.split_at(value.len() / 2);
            // In the middle of the value stands no label and no padding.
            let other = if right.starts_with('1') { "2" } else { "1" };
            let value = [left, other, right.get(1..).unwrap_or_default()].concat();
            let mut headers = self.headers.clone();
            headers.retain(|(known, _)| known != name);
            headers.push((name.clone(), value));
            forged.push(headers);
        }
        forged
    }
}

fn outcome(answer: &Answer) -> (u16, &str) {
    (answer.status.as_u16(), answer.header("hapax-outcome").unwrap_or_default())
}

#[tokio::test]
async fn what_providers_libraries_sign_is_taken_and_nothing_else() -> Result<()> {
    let signed = signed()?;
    ensure!(signed.len() >= 26, "only {} requests", signed.len());
    let scene = Scene::new().await?;
    let overrides = [
        "server.public_url = \"https://hooks.example.com\"",
        "server.deadline = \"2s\"",
        "server.body_timeout = \"1s\"",
        "in_flight.wait = \"500ms\"",
        "postgres.record_timeout = \"1200ms\"",
        "postgres.statement_timeout = \"800ms\"",
    ];
    let gateway = Start::new(scene.settings(&overrides, &sources(&signed)?)).start().await?;
    let mut client = gateway.client()?;
    for request in &signed {
        let name = &request.name;
        for headers in request.forged() {
            let answer = request.send(&mut client, &headers, &request.body).await?;
            assert_eq!(outcome(&answer), (401, "refused"), "{name}: {headers:?}");
        }
        if let Some(altered) = &request.altered {
            let answer = request.send(&mut client, &request.headers, altered).await?;
            assert_eq!(outcome(&answer), (401, "refused"), "{name}: {altered}");
        }
        let answer = request.send(&mut client, &request.headers, &request.body).await?;
        assert_eq!(outcome(&answer).1, "accepted", "{name}: {answer:?}");
        ensure!(answer.status.is_success());
    }
    let kept: i64 = scene.database().await?.query_one("select count(*) from hapax.events", &[]).await?.get(0);
    let lists = signed.iter().filter(|request| {
        request.name.starts_with("line") || request.name == "sendgrid" || request.name == "adyen"
    });
    assert_eq!(
        usize::try_from(kept)?,
        signed.len() + lists.count(),
        "one row for each event, two for a list"
    );
    Ok(())
}
