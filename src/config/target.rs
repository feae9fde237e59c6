//! `[target.NAME]`: where events are delivered.
//!
//! Invariant: what can hold a secret (the URL, values of headers, signing secrets) is in no message and no `Debug` output.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderName, HeaderValue};

use super::read::count;
use super::secret::{Secrets, origin};
use super::source::check_name;
use super::{Retry, Secret};
use crate::outbox::{Endpoint, is_public};
use crate::provider::Key;
use crate::settings::Table;

/// Most secrets of one target: each adds a signature to every delivery.
const SECRETS_MAX: usize = 16;

/// Most headers of one target.
const HEADERS_MAX: usize = 64;

/// Of one delivery.
const TIMEOUT: RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(300);

/// Of a wait before the next try.
const RETRY: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_secs(7 * 86_400);

/// Headers that say how a message is sent, or what it is: ours alone.
const RESERVED: [&str; 11] = [
    "idempotency-key",
    "content-length",
    "content-type",
    "transfer-encoding",
    "host",
    "connection",
    "te",
    "trailer",
    "upgrade",
    "expect",
    "keep-alive",
];

/// Beginnings of names of such headers.
const RESERVED_STARTS: [&str; 3] = ["webhook-", "hapax-", "proxy-"];

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

/// A target that was read, with what is compared later.
pub(super) struct Reading {
    pub(super) table: Table,
    pub(super) target: Target,
}

/// Reads all targets of the file.
pub(super) fn read_all(root: &mut Table, secrets: &Secrets<'_>) -> Vec<Reading> {
    let read = |(name, table): (String, Table)| read(&name, table, secrets);
    root.tables("target").into_iter().map(read).collect()
}

fn read(name: &str, mut table: Table, secrets: &Secrets<'_>) -> Reading {
    const KIND: &str = "kind";
    check_name(&table, name, "target");
    if table.choice(KIND, &[("http", ())]).is_none() {
        table.missing(KIND, "missing: give \"http\", which delivers by POST");
    }
    let default = Target::http(name, "");
    let target = Target {
        kind: TargetKind::Http(http(&mut table, secrets)),
        timeout: table.duration_within("timeout", TIMEOUT).unwrap_or(default.timeout),
        concurrency: count(&mut table, "concurrency", 1..=10_000, default.concurrency),
        rate: rate(&mut table),
        attempts_max: attempts_max(&mut table, default.attempts_max),
        retry: retry(&mut table, default.retry),
        breaker_failures: small(&mut table, "breaker_failures", default.breaker_failures),
        ..default
    };
    Reading { table, target }
}

fn rate(table: &mut Table) -> Option<u32> {
    table.count_or("rate", "off", 1..=1_000_000).flatten().and_then(|rate| u32::try_from(rate).ok())
}

/// `attempts_max`
pub(super) fn attempts_max(table: &mut Table, default: u32) -> u32 {
    small(table, "attempts_max", default)
}

fn small(table: &mut Table, key: &'static str, default: u32) -> u32 {
    table.count(key, 1..=1_000).and_then(|number| u32::try_from(number).ok()).unwrap_or(default)
}

/// `retry_base`, `retry_max`
pub(super) fn retry(table: &mut Table, default: Retry) -> Retry {
    Retry {
        base: table.duration_within("retry_base", RETRY).unwrap_or(default.base),
        max: table.duration_within("retry_max", RETRY).unwrap_or(default.max),
    }
}

fn http(table: &mut Table, secrets: &Secrets<'_>) -> Http {
    let allow_private = table.flag("allow_private").unwrap_or(false);
    Http {
        url: url(table, secrets, allow_private),
        secrets: signing_secrets(table, secrets),
        payload: table
            .choice("payload", &[("raw", Payload::Raw), ("envelope", Payload::Envelope)])
            .unwrap_or(Payload::Raw),
        headers: headers(table, secrets),
        allow_private,
    }
}

/// A name is looked up and checked when it is connected to; an address can be checked here.
fn url(table: &mut Table, secrets: &Secrets<'_>, allow_private: bool) -> Secret {
    const KEY: &str = "url";
    let nothing = Secret(String::new());
    let Some(source) = table.secret(KEY) else {
        let wanted = "give \"https://example.com/hooks\", { env = \"NAME\" } or { file = \"path\" }";
        table.missing(KEY, format!("missing: {wanted}"));
        return nothing;
    };
    let Some(text) = secrets.fetch(table, KEY, &table.place(KEY), &source) else { return nothing };
    let endpoint = match Endpoint::parse(&text) {
        Ok(endpoint) => endpoint,
        Err(problem) => {
            let origin = if matches!(source, crate::settings::SecretSource::Literal(_)) {
                "the URL".to_owned()
            } else {
                origin(&source)
            };
            table.error(KEY, format!("{origin} {problem}: give one like \"https://example.com/hooks\""));
            return nothing;
        }
    };
    if endpoint.address().is_some_and(|address| !is_public(address)) {
        if !allow_private && !table.failed("allow_private") {
            let message = "leads to this machine, a private network, or nowhere: give allow_private = true if that is \
                           where events are to go";
            table.error(KEY, message);
        }
    } else if endpoint.tls().is_none() && !allow_private {
        let message = "begins with http://, so that whoever stands between can read and change every event: give an \
                       https:// one";
        table.warning(KEY, message);
    }
    Secret(text)
}

fn signing_secrets(table: &mut Table, secrets: &Secrets<'_>) -> Vec<Key> {
    const KEY: &str = "secrets";
    let found = table.secrets(KEY).unwrap_or_default();
    if found.is_empty() && !table.failed(KEY) {
        let message = "none, so that nothing is signed, and the target cannot tell our deliveries from anybody's: give \
                       { env = \"NAME\" } or { file = \"path\" } with \"whsec_\" and 24 to 64 random bytes in base64";
        table.warning(KEY, message);
    }
    if found.len() > SECRETS_MAX {
        table
            .error(KEY, format!("{} secrets, and {SECRETS_MAX} are the limit: remove old ones", found.len()));
    }
    let mut keys = Vec::with_capacity(found.len());
    for secret in found {
        let Some(text) = secrets.fetch(table, KEY, &secret.place, &secret.value) else { continue };
        match Key::webhooks(&text) {
            Ok(key) => keys.push(key),
            Err(problem) => {
                let wanted = "give \"whsec_\" and base64, as Standard Webhooks have it";
                let origin = origin(&secret.value);
                table.error_at(KEY, &secret.place, format!("{origin} cannot sign: {problem}; {wanted}"));
            }
        }
    }
    keys
}

fn headers(table: &mut Table, secrets: &Secrets<'_>) -> Vec<(HeaderName, HeaderValue)> {
    const KEY: &str = "headers";
    let written = table.named_secrets(KEY);
    if written.len() > HEADERS_MAX {
        table.error(KEY, format!("{} headers, and {HEADERS_MAX} are the limit", written.len()));
    }
    let mut seen = BTreeSet::new();
    let mut headers = Vec::with_capacity(written.len());
    for (text, secret) in written {
        let plain = text.trim().to_ascii_lowercase();
        let name = match text.parse::<HeaderName>() {
            _ if is_reserved(&plain) => Err(format!("{plain} is set by hapax: remove it")),
            Err(_) => Err(format!("{text:?} cannot be the name of a header")),
            Ok(_) if !seen.insert(plain) => Err("stands there twice, in other letters".to_owned()),
            Ok(name) => Ok(name),
        };
        let name = match name {
            Ok(name) => name,
            Err(problem) => {
                table.error_at(KEY, &secret.place, problem);
                continue;
            }
        };
        let Some(value) = secrets.fetch(table, KEY, &secret.place, &secret.value) else { continue };
        let visible = value.bytes().all(|byte| (b' '..=b'~').contains(&byte));
        if let Some(mut value) = HeaderValue::from_str(&value).ok().filter(|_| visible) {
            value.set_sensitive(true);
            headers.push((name, value));
        } else {
            let origin = origin(&secret.value);
            let message = format!("{origin} cannot be the value of a header: give visible ASCII characters");
            table.error_at(KEY, &secret.place, message);
        }
    }
    headers
}

fn is_reserved(name: &str) -> bool {
    RESERVED.contains(&name) || RESERVED_STARTS.iter().any(|start| name.starts_with(start))
}

#[cfg(test)]
mod tests;
