//! What several tests do with a scene: hold effects back, read metrics, write requests byte by byte, run commands.

use std::net::SocketAddr;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use http::StatusCode;
use serde_json::Value;
use tokio_postgres::Client as Database;

use super::client::{Answer, Client, Raw};
use super::gateway::Gateway;
use super::scene::{SECRET, Scene};
use super::wait::eventually;

/// Longer than anything here takes on a slow machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);

/// Settings under which an effect may be held back for a while.
pub(crate) const PATIENT: [&str; 6] = [
    "server.deadline = \"18s\"",
    "server.drain = \"18s\"",
    "postgres.record_timeout = \"15s\"",
    "postgres.statement_timeout = \"14s\"",
    "postgres.commit_timeout = \"20s\"",
    "fast_tier.lease = \"60s\"",
];

/// [`PATIENT`] and more.
pub(crate) fn patient<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&PATIENT, more].concat()
}

/// Holds back all effects that say `"do":"wait"`, until released.
pub(crate) struct Hold(Database);

impl Hold {
    pub(crate) async fn new(scene: &Scene) -> Result<Self> {
        let database = scene.database().await?;
        database.execute("select pg_advisory_lock(7)", &[]).await?;
        Ok(Self(database))
    }

    /// Waits until that many effects wait, each in a transaction of its own.
    pub(crate) async fn waiting(&self, wanted: i64) -> Result<()> {
        let query = "select count(*) from pg_locks where locktype = 'advisory' and not granted and objid = 7 \
                     and database = (select oid from pg_database where datname = current_database())";
        let count = async || -> Option<()> {
            let waiting: i64 = self.0.query_one(query, &[]).await.ok()?.get(0);
            (waiting >= wanted).then_some(())
        };
        eventually(LIMIT, count).await.context("no effect waits")
    }

    pub(crate) async fn release(self) -> Result<()> {
        self.0.execute("select pg_advisory_unlock(7)", &[]).await?;
        Ok(())
    }
}

/// What `/metrics` said.
#[derive(Debug)]
pub(crate) struct Numbers(pub(crate) String);

impl Numbers {
    pub(crate) async fn of(gateway: &Gateway) -> Result<Self> {
        let answer = Client::new(gateway.admin()?).get("/metrics").await?;
        Ok(Self(String::from_utf8(answer.body.into())?))
    }

    /// The sum of all whole samples of a name whose labels contain all of `labels` (`tier="redis"`).
    pub(crate) fn sum(&self, name: &str, labels: &[&str]) -> u64 {
        let sample = |line: &str| {
            let (sample, value) = line.rsplit_once(' ')?;
            let (found, with) = sample.split_once('{').unwrap_or((sample, ""));
            let wanted = found == name && labels.iter().all(|label| with.contains(label));
            if wanted { value.parse::<u64>().ok() } else { None }
        };
        self.0.lines().filter_map(sample).sum()
    }
}

/// Waits until a metric has a value.
pub(crate) async fn metric(gateway: &Gateway, name: &str, labels: &[&str], wanted: u64) -> Result<()> {
    let is = async || -> Option<()> {
        let sum = Numbers::of(gateway).await.ok()?.sum(name, labels);
        (sum == wanted).then_some(())
    };
    eventually(LIMIT, is).await.with_context(|| format!("{name} {labels:?} is not {wanted}"))
}

/// Waits until the gateway is ready and has both of its stores.
pub(crate) async fn ready(gateway: &Gateway) -> Result<()> {
    is_ready(gateway, StatusCode::OK).await?;
    metric(gateway, "hapax_redis_in_use", &[], 1).await
}

/// Waits until `/ready` answers with this status.
pub(crate) async fn is_ready(gateway: &Gateway, wanted: StatusCode) -> Result<()> {
    let admin = gateway.admin()?;
    let is = async || {
        let answer = Client::new(admin).get("/ready").await.ok()?;
        (answer.status == wanted).then_some(())
    };
    eventually(LIMIT, is).await.with_context(|| format!("/ready is not {wanted}"))
}

/// Waits until all events of the scene are settled in Redis: that many, and no lease.
pub(crate) async fn settled(scene: &Scene, wanted: usize) -> Result<()> {
    let are = async || {
        let markers = scene.markers().await.ok()?;
        let done = markers.values().flatten().filter(|value| value.starts_with("D ")).count();
        (done == wanted && markers.len() == wanted).then_some(())
    };
    eventually(LIMIT, are).await.with_context(|| format!("there are not {wanted} done markers"))
}

/// Stripe's header for any body, also one without an id, as of `ago` seconds before now.
pub(crate) fn stripe_signature(secret: &str, body: &[u8], ago: i64) -> String {
    let ts = jiff::Timestamp::now().as_second() - ago;
    let key = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, secret.as_bytes());
    let tag = ring::hmac::sign(&key, &[format!("{ts}.").as_bytes(), body].concat());
    format!("t={ts},v1={}", hex::encode(tag))
}

/// Signs and posts a body on a kept connection; the whole answer.
pub(crate) async fn post(client: &mut Client, source: &str, body: &Bytes) -> Result<Answer> {
    let signature = stripe_signature(SECRET, body, 0);
    client.post(&format!("/in/{source}"), &[("stripe-signature", &signature)], body.clone()).await
}

/// `Hapax-Outcome`.
pub(crate) fn outcome(answer: &Answer) -> &str {
    answer.header("hapax-outcome").unwrap_or_default()
}

/// The `code` of a problem document.
pub(crate) fn code(answer: &Answer) -> String {
    let problem: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
    problem.get("code").and_then(Value::as_str).unwrap_or_default().to_owned()
}

/// The head of a POST up to and without the empty line, with these header lines.
pub(crate) fn head(path: &str, lines: &[&str]) -> Vec<u8> {
    let mut head = format!("POST {path} HTTP/1.1\r\nHost: hapax.test\r\n");
    for line in lines {
        head.push_str(line);
        head.push_str("\r\n");
    }
    head.into_bytes()
}

/// The signature of a body as a header line.
pub(crate) fn signature(body: &[u8]) -> String {
    format!("Stripe-Signature: {}", stripe_signature(SECRET, body, 0))
}

/// A whole signed request as bytes, and where its body begins.
pub(crate) fn request(source: &str, body: &[u8]) -> (Vec<u8>, usize) {
    let length = format!("Content-Length: {}", body.len());
    let mut bytes = head(&format!("/in/{source}"), &[&signature(body), &length]);
    bytes.extend_from_slice(b"\r\n");
    let at = bytes.len();
    bytes.extend_from_slice(body);
    (bytes, at)
}

/// The next answer on a raw connection, to the end of its body.
pub(crate) async fn answer(connection: &mut Raw) -> Result<(StatusCode, String)> {
    let mut bytes = Vec::new();
    loop {
        let more = connection.read().await?;
        if more.is_empty() {
            bail!("closed after {:?}", String::from_utf8_lossy(&bytes));
        }
        bytes.extend(more);
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        let length = head.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().ok())?
        });
        if body.len() >= length.unwrap_or(0) {
            return Ok((status(&text)?, text));
        }
    }
}

/// The status of an answer as text.
pub(crate) fn status(answer: &str) -> Result<StatusCode> {
    let status = answer.split(' ').nth(1).with_context(|| format!("no answer: {answer:?}"))?;
    Ok(status.parse()?)
}

/// Writes bytes on a new connection and returns the first answer.
pub(crate) async fn exchange(to: SocketAddr, bytes: &[u8]) -> Result<(StatusCode, String)> {
    let mut connection = Raw::connect(to).await?;
    connection.write(bytes).await?;
    answer(&mut connection).await
}

/// Runs `hapax` to its end.
pub(crate) async fn hapax(arguments: &[&str]) -> Result<Output> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hapax"));
    command.args(arguments).stdin(Stdio::null());
    Ok(tokio::task::spawn_blocking(move || command.output()).await??)
}
