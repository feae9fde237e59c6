//! Delivery by POST.
//!
//! Invariant: one time-out covers all of a delivery; nothing is followed, taken from the environment, or kept of an answer
//! but its status and `Retry-After`. A 2xx is believed as soon as its head is here: what becomes of the rest of the answer
//! changes nothing, since a delivery that is done must not be done again.

use std::error::Error;
use std::fmt;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use async_trait::async_trait;
use bytes::Bytes;
use http::header::RETRY_AFTER;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::{self, Client};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use jiff::Timestamp;
use jiff::fmt::rfc2822;
use rustls::ClientConfig;
use tokio::time::{Instant, timeout, timeout_at};

use super::connector::{Connector, Served, Unconnected};
use super::request::{Maker, Outgoing};
use super::{Endpoint, Fault, Message, Target, Undelivered};
use crate::config::{self, Http};
use crate::settings::show_duration;
use crate::tls::{self, Authorities, Check};

/// Bytes of an answer's head that are read.
const HEAD_MAX: usize = 16 << 10;

/// Bytes of an answer's body that are read, so that its connection can be used again.
const BODY_MAX: usize = 64 << 10;

/// How long that is tried: a new connection costs less than a longer wait.
const BODY_WAIT: Duration = Duration::from_secs(1);

/// How long a connection is kept for the next delivery. Most servers close theirs after a minute or more.
const IDLE: Duration = Duration::from_secs(30);

/// Most connections that are kept for one target.
const IDLE_MAX: usize = 64;

/// Longest wait that a target can ask for; whoever waits caps it lower.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(365 * 86_400);

/// A target that takes POST requests.
pub(super) struct HttpTarget {
    name: String,
    endpoint: Endpoint,
    maker: Maker,
    limit: Duration,
    pooled: Client<Connector, Full<Bytes>>,
    /// For a second try, which must not meet another connection that was closed meanwhile.
    fresh: Client<Connector, Full<Bytes>>,
}

impl fmt::Debug for HttpTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HttpTarget({:?})", self.name)
    }
}

impl HttpTarget {
    /// Trusts whom this machine trusts.
    pub(super) fn new(config: &config::Target, http: &Http) -> anyhow::Result<Self> {
        let named = || format!("target {}", config.name);
        let endpoint = Endpoint::parse(&http.url.0);
        let endpoint = endpoint.map_err(|problem| anyhow!("its URL {problem}")).with_context(named)?;
        let tls = endpoint.tls().map(|_| {
            let trusted = Authorities::of_system();
            trusted
                .and_then(|authorities| tls::client(Check::Full(authorities), None))
                .map_err(anyhow::Error::msg)
        });
        Ok(Self::with(config, http, endpoint, tls.transpose().with_context(named)?))
    }

    pub(super) fn with(
        config: &config::Target,
        http: &Http,
        endpoint: Endpoint,
        tls: Option<ClientConfig>,
    ) -> Self {
        let connector = Connector::new(endpoint.clone(), tls, http.allow_private, config.timeout);
        let client = |idle| {
            let mut builder = Client::builder(TokioExecutor::new());
            builder.pool_timer(TokioTimer::new()).pool_idle_timeout(IDLE).pool_max_idle_per_host(idle);
            builder.http1_max_buf_size(HEAD_MAX).build(connector.clone())
        };
        let maker =
            Maker { payload: http.payload, keys: http.secrets.clone(), headers: http.headers.clone() };
        Self {
            name: config.name.to_string(),
            endpoint,
            maker,
            limit: config.timeout,
            pooled: client(config.concurrency.min(IDLE_MAX)),
            fresh: client(0),
        }
    }

    /// The head of the answer. A target may close a connection just as it is used again; as long as it has answered
    /// nothing, that is tried once more, which the id makes safe.
    async fn send(&self, outgoing: &Outgoing) -> Result<Response<Incoming>, Undelivered> {
        let first = self.pooled.request(self.request(outgoing)).await;
        let answer = match first {
            Err(error) if was_idle(&error) => self.fresh.request(self.request(outgoing)).await,
            answer => answer,
        };
        let answer = answer.map_err(|error| undelivered(&error))?;
        if let Some(served) = answer.extensions().get::<Served>() {
            served.note();
        }
        Ok(answer)
    }

    fn request(&self, outgoing: &Outgoing) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::new(outgoing.body.clone()));
        *request.method_mut() = http::Method::POST;
        *request.uri_mut() = self.endpoint.uri().clone();
        *request.headers_mut() = outgoing.headers.clone();
        request
    }
}

#[async_trait]
impl Target for HttpTarget {
    async fn deliver(&self, message: &Message) -> Result<(), Undelivered> {
        let outgoing = self.maker.make(message, Timestamp::now())?;
        let end = Instant::now() + self.limit;
        let answer = timeout_at(end, self.send(&outgoing)).await.unwrap_or_else(|_elapsed| {
            Err(of_target("timeout", format!("no answer within {}", show_duration(self.limit))))
        })?;
        let verdict = judge(answer.status(), answer.headers(), Timestamp::now());
        let wait = end.saturating_duration_since(Instant::now()).min(BODY_WAIT);
        // Whether the connection can be used again is all that depends on it.
        timeout(wait, discard(answer.into_body())).await.ok();
        verdict
    }
}

/// Reads a body to its end, or until it is too much.
async fn discard(mut body: Incoming) {
    let mut read = 0;
    while let Some(Ok(frame)) = body.frame().await {
        read += frame.data_ref().map_or(0, Bytes::len);
        if read > BODY_MAX {
            return;
        }
    }
}

/// What an answer means.
fn judge(status: StatusCode, headers: &HeaderMap, now: Timestamp) -> Result<(), Undelivered> {
    let answered = format!("answered {}", status.as_u16());
    let failed = |fault, word, cause| Err(Undelivered { fault, cause, retry_after: None, word });
    match status.as_u16() {
        200..=299 => Ok(()),
        408 | 429 | 500..=599 => {
            let word = if status.is_server_error() { "status_5xx" } else { "status_4xx" };
            let retry_after = retry_after(headers, now);
            Err(Undelivered { fault: Fault::Target, cause: answered, retry_after, word })
        }
        300..=399 => {
            let cause = format!("{answered}, and redirects are not followed: give the URL that it leads to");
            failed(Fault::Target, "status_3xx", cause)
        }
        // Of the URL or of who we are, not of this event.
        401 | 403 | 404 | 410 => failed(Fault::Target, "status_4xx", answered),
        400..=499 => failed(Fault::Message, "status_4xx", answered),
        100..=199 => failed(Fault::Target, "status_1xx", answered),
        _ => failed(Fault::Target, "protocol", answered),
    }
}

/// Seconds, or a date (RFC 9110, 10.2.3); nothing if it is neither.
fn retry_after(headers: &HeaderMap, now: Timestamp) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    let wait = if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        Duration::from_secs(text.parse().unwrap_or(u64::MAX))
    } else {
        let then = rfc2822::DateTimeParser::new().parse_timestamp(text).ok()?;
        Duration::try_from(then.duration_since(now)).unwrap_or_default()
    };
    Some(wait.min(RETRY_AFTER_MAX))
}

/// Whether a connection ended that had been idle, before a byte of an answer.
fn was_idle(error: &legacy::Error) -> bool {
    let mut extensions = http::Extensions::new();
    if let Some(connection) = error.connect_info() {
        connection.get_extras(&mut extensions);
    }
    let reused = extensions.get::<Served>().is_some_and(Served::before);
    reused && find::<hyper::Error>(error).is_some_and(|error| !error.is_parse())
}

fn undelivered(error: &legacy::Error) -> Undelivered {
    if let Some(unconnected) = find::<Unconnected>(error) {
        return unconnected.into();
    }
    match find::<hyper::Error>(error) {
        Some(error) if error.is_parse_too_large() => {
            of_target("protocol", format!("the head of its answer has more than {HEAD_MAX} bytes"))
        }
        Some(error) if error.is_parse() => of_target("protocol", "its answer is no HTTP".to_owned()),
        _ => of_target("lost", "the connection ended before an answer".to_owned()),
    }
}

/// The first of that kind in the chain of causes.
fn find<'a, T: Error + 'static>(error: &'a (dyn Error + 'static)) -> Option<&'a T> {
    error.downcast_ref().or_else(|| find(error.source()?))
}

fn of_target(word: &'static str, cause: String) -> Undelivered {
    Undelivered { fault: Fault::Target, cause, retry_after: None, word }
}

#[cfg(test)]
mod tests;
