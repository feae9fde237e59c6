//! `[target.NAME]`: where events are delivered.
//!
//! Invariant: what can hold a secret (the URL, values of headers, signing secrets) is in no message and no `Debug` output.

use std::sync::Arc;
use std::time::Duration;

use http::{HeaderName, HeaderValue};

use super::{Retry, Secret};
use crate::provider::Key;

/// `[target.NAME]`: one receiver of events.
#[derive(Debug, Clone)]
pub struct Target {
    /// Its name in jobs and metrics.
    pub name: Arc<str>,
    /// `kind = "http"`, with what belongs to it.
    pub kind: TargetKind,
    /// `timeout = "10s"`: for one delivery, from connecting to the end of the answer.
    pub timeout: Duration,
    /// `concurrency = 16`: deliveries at once, over all gateways.
    pub concurrency: usize,
    /// `rate = "off"`: most deliveries in a second, over all gateways.
    pub rate: Option<u32>,
    /// `attempts_max = 20`: tries at one event before it is dead.
    pub attempts_max: u32,
    /// `retry_base = "5s"`, `retry_max = "1h"`
    pub retry: Retry,
    /// `breaker_failures = 10`: failures of the target in a row that stop deliveries to it for a while.
    pub breaker_failures: u32,
}

/// How a target is reached.
#[derive(Debug, Clone)]
pub enum TargetKind {
    /// By POST.
    Http(Http),
}

/// What goes with `kind = "http"`.
#[derive(Debug, Clone)]
pub struct Http {
    /// `url = { env = "ORDERS_URL" }`: its path may hold a secret.
    pub url: Secret,
    /// `secrets = [...]`: each makes a signature of its own; none, and nothing is signed.
    pub secrets: Vec<Key>,
    /// `payload = "raw" | "envelope"`
    pub payload: Payload,
    /// `headers = {}`: sent with each delivery. The values are marked as sensitive.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// `allow_private = false`: whether addresses of this machine and of private networks may be connected to.
    pub allow_private: bool,
}

/// What is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Payload {
    /// The body as it was received.
    Raw,
    /// A JSON document with what is known of the event, and the body in it.
    Envelope,
}

impl Target {
    /// A target with nothing but a name and a URL; everything else is what the settings default to.
    #[must_use]
    pub fn http(name: &str, url: &str) -> Self {
        let http = Http {
            url: Secret(url.to_owned()),
            secrets: Vec::new(),
            payload: Payload::Raw,
            headers: Vec::new(),
            allow_private: false,
        };
        Self {
            name: name.into(),
            kind: TargetKind::Http(http),
            timeout: Duration::from_secs(10),
            concurrency: 16,
            rate: None,
            attempts_max: 20,
            retry: Retry { base: Duration::from_secs(5), max: Duration::from_secs(3600) },
            breaker_failures: 10,
        }
    }
}
