//! What is sent for a message: body, headers, signature (Standard Webhooks).
//!
//! Invariant: the signature covers the id, the time and every byte of the body that is sent. Text that a sender chose
//! stands in a header only if the header gives it back unchanged. Never here: the clock, a connection.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::header::{CONTENT_TYPE, USER_AGENT};
use http::{HeaderMap, HeaderName, HeaderValue};
use jiff::Timestamp;
use ring::hmac;
use serde::Serialize;
use serde_json::value::RawValue;

use super::{Fault, Message, Undelivered};
use crate::config::Payload;
use crate::provider::Key;

/// Longest text of a sender that stands in a header; servers take about 8 KiB of headers in all.
const TEXT_MAX: usize = 2048;

const JSON: HeaderValue = HeaderValue::from_static("application/json");
const OCTETS: HeaderValue = HeaderValue::from_static("application/octet-stream");
const AGENT: HeaderValue = HeaderValue::from_static(concat!("hapax/", env!("CARGO_PKG_VERSION")));

/// What goes out.
#[derive(Debug, Clone)]
pub(super) struct Outgoing {
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
}

/// How messages to one target are made.
#[derive(Debug)]
pub(super) struct Maker {
    pub(super) payload: Payload,
    pub(super) keys: Vec<Key>,
    pub(super) headers: Vec<(HeaderName, HeaderValue)>,
}

impl Maker {
    /// The request for a message that is sent at this moment.
    pub(super) fn make(&self, message: &Message, now: Timestamp) -> Result<Outgoing, Undelivered> {
        let (body, content_type) = match self.payload {
            Payload::Raw => (message.body.clone(), content_type(message)),
            Payload::Envelope => (envelope(message)?, JSON),
        };
        let mut headers = HeaderMap::with_capacity(16);
        headers.insert(USER_AGENT, AGENT);
        for (name, value) in &self.headers {
            headers.insert(name, value.clone());
        }
        // Ours come last, so that none can be replaced.
        headers.insert(CONTENT_TYPE, content_type);
        describe(&mut headers, message);
        let id = header(&message.id).ok_or_else(|| unmade("the id of the message cannot be a header"))?;
        headers.insert("idempotency-key", id.clone());
        headers.insert("webhook-id", id);
        headers.insert("webhook-timestamp", now.as_second().into());
        if let Some(signatures) = self.sign(&message.id, now.as_second(), &body) {
            headers.insert("webhook-signature", signatures);
        }
        Ok(Outgoing { headers, body })
    }

    /// One for each secret, so that the receiver may know either while one is replaced.
    fn sign(&self, id: &str, second: i64, body: &[u8]) -> Option<HeaderValue> {
        let sign = |key: &hmac::Key| {
            let mut context = hmac::Context::with_key(key);
            context.update(format!("{id}.{second}.").as_bytes());
            context.update(body);
            format!("v1,{}", STANDARD.encode(context.sign()))
        };
        let signatures: Vec<String> = self.keys.iter().filter_map(Key::as_hmac).map(sign).collect();
        HeaderValue::from_str(&signatures.join(" ")).ok().filter(|_| !signatures.is_empty())
    }
}

fn describe(headers: &mut HeaderMap, message: &Message) {
    let event_type = message.event_type.as_deref();
    let texts = [
        ("hapax-source", Some(&*message.source)),
        ("hapax-event-id", Some(&*message.event_id)),
        ("hapax-event-type", event_type),
    ];
    for (name, text) in texts {
        if let Some(value) = text.and_then(header) {
            headers.insert(name, value);
        }
    }
    headers.insert("hapax-attempt", message.attempt.into());
    headers.insert("hapax-replay", message.replay.into());
}

/// Text as it is, if a reader of headers finds it so: visible ASCII, no space at an end, since that is cut.
fn header(text: &str) -> Option<HeaderValue> {
    let visible = text.bytes().all(|byte| (b' '..=b'~').contains(&byte));
    let fits = visible && text.trim() == text && (1..=TEXT_MAX).contains(&text.len());
    if fits { HeaderValue::from_str(text).ok() } else { None }
}

/// The sender's, if it was kept; else by what the body is. An item of a batch is JSON, whatever its batch came in.
fn content_type(message: &Message) -> HeaderValue {
    let kept = || {
        let headers: serde_json::Map<_, _> = serde_json::from_str(&message.headers).ok()?;
        header(headers.get(CONTENT_TYPE.as_str())?.as_str()?)
    };
    let kept = if message.item.is_none() { kept() } else { None };
    kept.unwrap_or_else(|| {
        let first = message.body.iter().find(|byte| !byte.is_ascii_whitespace());
        let structured = matches!(first, Some(b'{' | b'['));
        if structured && json(&message.body).is_some() { JSON } else { OCTETS }
    })
}

/// The source text of the one JSON document that the body is, if it is one.
fn json(body: &[u8]) -> Option<&RawValue> {
    serde_json::from_slice(body).ok()
}

#[derive(Serialize)]
struct Envelope<'a> {
    id: &'a str,
    source: &'a str,
    scope: &'a str,
    event_id: &'a str,
    event_type: Option<&'a str>,
    received_at: String,
    provider_time: Option<String>,
    attempt: u32,
    replay: u32,
    item: Option<i32>,
    headers: &'a RawValue,
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    data_base64: Option<String>,
}

/// Parsing and writing the body anew would round its numbers and merge its keys, so its source text is what is sent.
fn envelope(message: &Message) -> Result<Bytes, Undelivered> {
    let data = json(&message.body);
    let envelope = Envelope {
        id: &message.id,
        source: &message.source,
        scope: &message.scope,
        event_id: &message.event_id,
        event_type: message.event_type.as_deref(),
        received_at: message.received_at.to_string(),
        provider_time: message.provider_time.map(|time| time.to_string()),
        attempt: message.attempt,
        replay: message.replay,
        item: message.item,
        headers: json(message.headers.as_bytes()).ok_or_else(|| unmade("the kept headers are no JSON"))?,
        data,
        data_base64: data.is_none().then(|| STANDARD.encode(&message.body)),
    };
    let text = serde_json::to_vec(&envelope).map_err(|error| unmade(&format!("no envelope: {error}")))?;
    Ok(text.into())
}

/// Not to be tried for ever: it would end like this each time.
fn unmade(cause: &str) -> Undelivered {
    Undelivered { fault: Fault::Event, cause: cause.to_owned(), retry_after: None, word: "ours" }
}

#[cfg(test)]
mod tests;
