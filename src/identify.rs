//! Event keys and body digest.

use std::sync::Arc;

use bytes::Bytes;

use crate::config::Source;
use crate::error::Code;
use crate::verify::Verified;

/// Length-prefixed SHA-256 prefix over (source, scope, event id); the same in both tiers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EventKey(pub [u8; 16]);

/// SHA-256 of what the source's digest rule names; the raw body by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Digest(pub [u8; 32]);

/// One event, ready to be claimed and recorded.
#[derive(Debug, Clone)]
pub struct Event {
    /// Key in both tiers.
    pub key: EventKey,
    /// Body digest.
    pub digest: Digest,
    /// `-` unless the source has a scope.
    pub scope: Arc<str>,
    /// The readable id.
    pub id: String,
    /// The provider's name for what happened.
    pub event_type: Option<String>,
    /// The provider's time of the event (not of the delivery).
    pub provider_time: Option<jiff::Timestamp>,
    /// The whole request body, or the item's own bytes in a batch.
    pub body: Bytes,
    /// Allow-listed headers as a JSON object of strings.
    pub headers: String,
}

/// A verified request and the event in it. Only [`identify`] makes one.
#[derive(Debug)]
pub struct Identified {
    source: Arc<Source>,
    event: Event,
}

impl Identified {
    /// The source and the event.
    #[must_use]
    pub fn into_parts(self) -> (Arc<Source>, Event) {
        (self.source, self.event)
    }
}

/// Finds the event's id and computes key and digest.
///
/// # Errors
/// One of the `Id*` codes or `BodyNotJson`.
pub fn identify(verified: Verified) -> Result<Identified, Code> {
    let _ = verified;
    Err(Code::IdMissing)
}
