//! Event keys and body digest.
//!
//! Invariant: two events never share a key because of a rule that did not fit. An id is taken from the first rule
//! that yields one, whole and unchanged, or the request is refused by name; there is no made-up id for a source whose
//! events have ids. Rules:
//!
//! - Strings and whole numbers are ids; the number `123` and the string `"123"` are the same id. Numbers keep their
//!   source text. A fraction, an exponent, minus zero, objects, lists and truth values are refused.
//! - Missing, null, empty, and an id made only of zeros and hyphens (placeholders of "nothing") do not yield.
//! - An id that stands there twice, holds NUL or is not UTF-8, or is longer than the source allows, is refused.

use std::sync::Arc;

use bytes::Bytes;
use jiff::Timestamp;
use ring::digest::{Context, SHA256};

use crate::body::Received;
use crate::config::Source;
use crate::error::Code;
use crate::json::Found;
use crate::parts::{self, Fault, Parts};
use crate::provider::EventRules;
use crate::provider::place::Rule;
use crate::provider::signature::Unit;
use crate::verify::Verified;

/// Longest event type that is kept; a longer one is none.
const TYPE_MAX: usize = 255;
/// Written as the length of a part that is not there.
const ABSENT: u64 = u64::MAX;

/// Length-prefixed SHA-256 prefix over (source, scope, event id); the same in both tiers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EventKey(pub [u8; 16]);

impl EventKey {
    /// The key of an id. Lengths stand before the parts, so that no two triples hash the same bytes.
    #[must_use]
    pub fn of(source: &str, scope: &str, id: &str) -> Self {
        let mut context = Context::new(&SHA256);
        for part in [source, scope, id] {
            context.update(&length(part.len()));
            context.update(part.as_bytes());
        }
        let hash = parts::array(&context.finish());
        Self(hash.first_chunk().copied().unwrap_or_default())
    }
}

fn length(length: usize) -> [u8; 8] {
    u64::try_from(length).unwrap_or(ABSENT).to_le_bytes()
}

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
    pub provider_time: Option<Timestamp>,
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
    let received = verified.request();
    let source = Arc::clone(&received.source);
    let rules = &source.scheme.event;
    let parts = Parts::of(received, &rules.pointers);
    let id = match event_id(rules, verified.signed_id(), &parts, source.id_max)? {
        Some(id) => id,
        None => random_id(),
    };
    let event = Event {
        key: EventKey::of(&source.name, &source.scope, &id),
        digest: body_digest(rules, &parts),
        scope: Arc::clone(&source.scope),
        id,
        event_type: lenient(&rules.types, &parts).filter(|text| text.len() <= TYPE_MAX),
        provider_time: lenient(&rules.times, &parts).and_then(|text| time(&text)),
        body: received.body.clone(),
        headers: kept_headers(received),
    };
    Ok(Identified { source, event })
}

/// The id that the rules give; `None` if the source's requests have no identity. `signed` is the only rule that
/// counts where the scheme signs the id: a header that nobody signed must not name the event in its stead.
pub(crate) fn event_id(
    rules: &EventRules,
    signed: Option<usize>,
    parts: &Parts<'_>,
    id_max: usize,
) -> Result<Option<String>, Code> {
    if rules.ids.is_empty() {
        return Ok(None);
    }
    let mut nothing = Code::IdMissing;
    for (index, rule) in rules.ids.iter().enumerate() {
        if signed.is_some_and(|signed| signed != index) {
            continue;
        }
        match rule_text(rule, parts) {
            Ok(Some(id)) if id.len() > id_max => return Err(Code::IdTooLong),
            Ok(Some(id)) => return Ok(Some(id)),
            Ok(None) => {}
            Err(Fault::NotJson) => nothing = Code::BodyNotJson,
            Err(Fault::Invalid) => return Err(Code::IdInvalid),
            Err(Fault::Twice) => return Err(Code::IdAmbiguous),
        }
    }
    Err(nothing)
}

fn rule_text(rule: &Rule, parts: &Parts<'_>) -> Result<Option<String>, Fault> {
    let mut joined = String::new();
    let mut placeholder = true;
    for (index, place) in rule.places.iter().enumerate() {
        let Some(text) = parts.read(place)?.filter(|text| !text.is_empty()) else { return Ok(None) };
        if text.contains('\0') {
            return Err(Fault::Invalid);
        }
        placeholder &= text.bytes().all(|byte| matches!(byte, b'0' | b'-'));
        if index > 0 {
            joined.push(':');
        }
        joined.push_str(&text);
    }
    Ok(Some(joined).filter(|_| !placeholder))
}

/// One per request, so that nothing ever takes two of them for the same event.
fn random_id() -> String {
    format!("unidentified:{}", hex::encode(rand::random::<[u8; 16]>()))
}

/// What describes an event may be missing or odd; only what names it may not.
fn lenient(rules: &[Rule], parts: &Parts<'_>) -> Option<String> {
    rules.iter().find_map(|rule| rule_text(rule, parts).ok().flatten())
}

fn time(text: &str) -> Option<Timestamp> {
    let stamp = Unit::SecondsOrMillis.parse(text).or_else(|| Unit::Rfc3339.parse(text))?;
    Timestamp::from_millisecond(stamp.millis).ok()
}

/// The parts' source text with lengths before them; the raw body where a part is not clear.
fn body_digest(rules: &EventRules, parts: &Parts<'_>) -> Digest {
    named_digest(rules, parts).unwrap_or_else(|| Digest(parts.body_sha256()))
}

fn named_digest(rules: &EventRules, parts: &Parts<'_>) -> Option<Digest> {
    let mut context = Context::new(&SHA256);
    let mut any = false;
    for slot in &rules.digest {
        match parts.json(*slot).ok()? {
            Found::Value(raw) => {
                any = true;
                context.update(&length(raw.len()));
                context.update(raw.as_bytes());
            }
            Found::Absent => context.update(&ABSENT.to_le_bytes()),
            Found::Twice | Found::Broken => return None,
        }
    }
    any.then(|| Digest(parts::array(&context.finish())))
}

fn kept_headers(received: &Received) -> String {
    let mut object = String::from("{");
    for name in &received.source.headers {
        let mut values =
            received.head.headers.get_all(name).iter().map(|value| String::from_utf8_lossy(value.as_bytes()));
        let Some(mut value) = values.next() else { continue };
        for more in values {
            value.to_mut().push_str(", ");
            value.to_mut().push_str(&more);
        }
        if object.len() > 1 {
            object.push(',');
        }
        object.push_str(&format!("{}:{}", quoted(name.as_str()), quoted(&value)));
    }
    object.push('}');
    object
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
