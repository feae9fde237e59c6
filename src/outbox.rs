//! Delivery of one event to one target.
//!
//! Invariant: a delivery is done only if the target said so by a 2xx. What is said of a failure names no host, port, path
//! or word of the target's answer, and no part of the event. Never here: queues, leases, when to try again.

mod address;
mod connector;
mod endpoint;
mod http;
mod request;

use std::fmt::{self, Debug};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bytes::Bytes;
use jiff::Timestamp;
use ring::digest::{Context, SHA256};
use thiserror::Error;

pub(crate) use self::address::is_public;
pub(crate) use self::endpoint::Endpoint;
use self::http::HttpTarget;
use crate::config;

/// Bytes of a hash that make an id: as many as of a key.
const ID_BYTES: usize = 16;

/// One event for one target.
#[derive(Clone)]
pub struct Message {
    /// Stable for event, target and replay number: sent as `webhook-id` and `Idempotency-Key`. See [`message_id`].
    pub id: String,
    /// The name of its source.
    pub source: Arc<str>,
    /// Part of its identity.
    pub scope: String,
    /// As the provider named it.
    pub event_id: String,
    /// What kind of event it is, if the provider says it.
    pub event_type: Option<String>,
    /// Of source, scope and event id.
    pub key: [u8; 16],
    /// Its place in a batch.
    pub item: Option<i32>,
    /// Of the body, or of what of it does not change between attempts.
    pub digest: [u8; 32],
    /// As received; of a batch, the item's own bytes.
    pub body: Bytes,
    /// The headers that the source's `headers` list names, as a JSON object of strings.
    pub headers: String,
    /// When it came, by the database's clock.
    pub received_at: Timestamp,
    /// When it happened, if the provider says it.
    pub provider_time: Option<Timestamp>,
    /// Which try this is, from 1.
    pub attempt: u32,
    /// How often an operator had it delivered anew.
    pub replay: u32,
}

/// Without the body and the headers, which must not get into a log.
impl Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Message")
            .field("id", &self.id)
            .field("source", &self.source)
            .field("event_id", &self.event_id)
            .field("attempt", &self.attempt)
            .field("replay", &self.replay)
            .finish_non_exhaustive()
    }
}

/// Whose fault it is that a delivery failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The target is down, slow, overloaded or set up wrongly. Counts for its breaker.
    Target,
    /// It refused this event and would take others.
    Message,
    /// No request can be made of this event, or that panics: most likely the same again would. Says nothing of the target.
    Event,
    /// Something here: no socket left, a body that cannot be had. Says nothing of the target or the event.
    Ours,
}

/// Why an event was not delivered. The text is for the operator.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{cause}")]
pub struct Undelivered {
    /// Whose fault it is.
    pub fault: Fault,
    /// What happened.
    pub cause: String,
    /// How long the target asks to be left alone. Nobody has capped it.
    pub retry_after: Option<Duration>,
    /// The same as a metric's label: one of [`WORDS`].
    pub word: &'static str,
}

impl Undelivered {
    /// Whether the target is there and said so itself.
    #[must_use]
    pub fn is_answer(&self) -> bool {
        self.word.starts_with("status_")
    }
}

/// All labels of failures.
pub const WORDS: [&str; 12] = [
    "timeout",
    "connect",
    "resolve",
    "address",
    "tls",
    "lost",
    "protocol",
    "status_1xx",
    "status_3xx",
    "status_4xx",
    "status_5xx",
    "ours",
];

/// Where events are delivered.
#[async_trait]
pub trait Target: Send + Sync + Debug {
    /// Delivers one event, within the target's time-out. Dropping it leaves unknown whether the target has the event.
    ///
    /// # Errors
    /// Why it was not delivered, or why nobody knows.
    async fn deliver(&self, message: &Message) -> Result<(), Undelivered>;
}

/// The id of an event at a target, the same for all tries. A replay is meant to take effect again, so it has another.
#[must_use]
pub fn message_id(key: &[u8; 16], target: &str, replay: u32) -> String {
    let mut context = Context::new(&SHA256);
    for part in [key.as_slice(), target.as_bytes(), &replay.to_be_bytes()] {
        context.update(&u64::try_from(part.len()).unwrap_or(u64::MAX).to_be_bytes());
        context.update(part);
    }
    let digest = context.finish();
    let prefix = digest.as_ref().get(..ID_BYTES).unwrap_or_default();
    format!("msg_{}", URL_SAFE_NO_PAD.encode(prefix))
}

/// Makes what delivers to a target. No connection is opened yet.
///
/// # Errors
/// What of the settings, or of this machine, does not allow it.
pub fn connect(config: &config::Target) -> anyhow::Result<Arc<dyn Target>> {
    let config::TargetKind::Http(http) = &config.kind;
    Ok(Arc::new(HttpTarget::new(config, http)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_of_event_target_and_replay() {
        let id = message_id(&[7; 16], "orders", 0);
        assert_eq!(id, message_id(&[7; 16], "orders", 0));
        assert_eq!(id.len(), "msg_".len() + 22);
        assert!(id.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte)), "{id}");
        for other in [
            message_id(&[8; 16], "orders", 0),
            message_id(&[7; 16], "order", 0),
            message_id(&[7; 16], "orders", 1),
        ] {
            assert_ne!(id, other);
        }
    }
}
