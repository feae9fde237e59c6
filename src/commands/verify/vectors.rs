//! Files of test vectors, run through the stages that every request goes through.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::super::{Exit, say};
use super::read;
use crate::body::Received;
use crate::challenge::{self, Reply, Unsigned};
use crate::config::{self, Source, Tolerance};
use crate::error::Code;
use crate::identify::{Content, Event, Identified, identify};
use crate::keyring::confirm_url;
use crate::provider::{Key, Scheme};
use crate::verify::{Verified, verify};

/// Where a vector without a URL was sent.
const URL: &str = "https://hooks.example.com/in/test";

/// Schemes by name, as far as they are known.
type Schemes<'a> = &'a dyn Fn(&str) -> Option<Arc<Scheme>>;

#[derive(Debug, Deserialize)]
struct File {
    /// Each read by itself, so that one that cannot be does not hide the others.
    vectors: Vec<Value>,
}

#[derive(Debug, Deserialize)]
struct Vector {
    name: String,
    scheme: String,
    #[serde(default)]
    verify_with: VerifyWith,
    method: String,
    url: Option<String>,
    #[serde(default)]
    headers: Headers,
    body: Option<String>,
    body_base64: Option<String>,
    body_repeat: Option<Repeat>,
    secret: Option<String>,
    secrets: Option<Vec<String>>,
    public_key: Option<String>,
    /// A public key as JSON, or a set of them.
    jwk: Option<Value>,
    /// What the provider calls the key.
    key_id: Option<String>,
    /// What claims of a token have to say.
    #[serde(default)]
    claims: BTreeMap<String, String>,
    webhook_id: Option<String>,
    /// In place of the one that would be fetched.
    certificate_pem: Option<String>,
    now: Option<i64>,
    tolerance: Option<u64>,
    expected: Expected,
    event_id: Option<String>,
    event_ids: Option<Vec<Option<String>>>,
    handshake_reply: Option<WantedReply>,
    /// Secrets of handshakes stand under their own names.
    #[serde(flatten)]
    more: Map<String, Value>,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum VerifyWith {
    #[default]
    Declarative,
    Special,
    Handshake,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Headers {
    Named(BTreeMap<String, String>),
    Listed(Vec<(String, String)>),
}

impl Default for Headers {
    fn default() -> Self {
        Self::Listed(Vec::new())
    }
}

#[derive(Debug, Deserialize)]
struct Repeat {
    text: String,
    count: usize,
}

#[derive(Debug, Deserialize)]
struct WantedReply {
    status: u16,
    content_type: Option<String>,
    #[serde(default)]
    headers: BTreeMap<String, String>,
    body: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
enum Expected {
    Accept,
    Reject,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Got {
    Accept,
    Reject,
    Unsupported,
}

/// What is printed of a vector.
#[derive(Debug, Serialize)]
struct Judged {
    name: String,
    expected: Expected,
    got: Got,
    reason: String,
    event_ids: Vec<Option<String>>,
    event_ids_match: Option<bool>,
    reply_match: Option<bool>,
}

#[derive(Debug, Default, Serialize)]
struct Counts {
    total: usize,
    agree: usize,
    disagree: usize,
    unsupported: usize,
}

/// What became of a vector's request.
struct Outcome {
    got: Got,
    reason: String,
    ids: Vec<Option<String>>,
    reply: Option<Reply>,
}

impl Outcome {
    fn without_event(got: Got, reason: impl Into<String>) -> Self {
        Self { got, reason: reason.into(), ids: Vec::new(), reply: None }
    }

    fn reject(reason: impl Into<String>) -> Self {
        Self::without_event(Got::Reject, reason)
    }
}

/// Runs the vectors of a file.
///
/// # Errors
/// 64 if it cannot be read, 1 if a vector does not agree.
pub(super) fn run(path: &Path, config: Option<&Path>, strict: bool) -> Result<(), Exit> {
    let file = parse(&read(path)?).map_err(|error| Exit::settings(format!("{}: {error}", path.display())))?;
    let own = match config {
        Some(path) => {
            config::own_schemes(path).map_err(|problems| Exit::settings(config::report(&problems)))?
        }
        None => BTreeMap::new(),
    };
    let schemes = |name: &str| own.get(name).cloned().or_else(|| Scheme::preset(name));
    let mut counts = Counts::default();
    for vector in &file.vectors {
        let judged = judge_value(vector, &schemes);
        counts.add(&judged);
        say(serde_json::to_string(&judged).map_err(Exit::software)?)?;
    }
    say(serde_json::to_string(&counts).map_err(Exit::software)?)?;
    if counts.disagree > 0 {
        return Err(Exit::failed(format!("{} of {} vectors do not agree", counts.disagree, counts.total)));
    }
    if strict && counts.unsupported > 0 {
        let told =
            format!("{} of {} vectors are of schemes that are not known", counts.unsupported, counts.total);
        return Err(Exit::failed(told));
    }
    Ok(())
}

fn parse(text: &[u8]) -> Result<File, String> {
    serde_json::from_slice(text).map_err(|error| format!("no file of vectors: {error}"))
}

impl Counts {
    fn add(&mut self, judged: &Judged) {
        self.total += 1;
        match judged.agrees() {
            None => self.unsupported += 1,
            Some(true) => self.agree += 1,
            Some(false) => self.disagree += 1,
        }
    }
}

impl Judged {
    /// None: the scheme is not known.
    fn agrees(&self) -> Option<bool> {
        let verdict = match (self.expected, self.got) {
            (_, Got::Unsupported) => return None,
            (Expected::Accept, got) => got == Got::Accept,
            (Expected::Reject, got) => got == Got::Reject,
        };
        Some(verdict && self.event_ids_match != Some(false) && self.reply_match != Some(false))
    }
}

/// A vector that cannot be read is none that agrees.
fn judge_value(value: &Value, schemes: Schemes<'_>) -> Judged {
    match Vector::deserialize(value) {
        Ok(vector) => judge(&vector, schemes),
        Err(error) => Judged {
            name: value.get("name").and_then(Value::as_str).unwrap_or("no name").to_owned(),
            expected: Expected::Accept,
            got: Got::Reject,
            reason: format!("the vector cannot be read: {error}"),
            event_ids: Vec::new(),
            event_ids_match: None,
            reply_match: None,
        },
    }
}

fn judge(vector: &Vector, schemes: Schemes<'_>) -> Judged {
    let outcome = outcome(vector, schemes);
    let known = outcome.got != Got::Unsupported;
    let reply_match = vector
        .handshake_reply
        .as_ref()
        .map(|wanted| outcome.reply.as_ref().is_some_and(|reply| wanted.is(reply)));
    Judged {
        name: vector.name.clone(),
        expected: vector.expected,
        got: outcome.got,
        reason: outcome.reason,
        event_ids_match: known.then(|| vector.wanted_ids() == outcome.ids),
        event_ids: outcome.ids,
        reply_match: reply_match.filter(|_| known),
    }
}

fn outcome(vector: &Vector, schemes: Schemes<'_>) -> Outcome {
    let unsupported = |reason: String| Outcome::without_event(Got::Unsupported, reason);
    let Some(scheme) = schemes(&vector.scheme) else {
        return unsupported(format!("no scheme {:?}", vector.scheme));
    };
    let Some(method) = Method::from_bytes(vector.method.as_bytes()).ok() else {
        return Outcome::reject(format!("no method {:?}", vector.method));
    };
    let asks = scheme.answers(&method) || scheme.pointing.confirm.is_some();
    if vector.verify_with == VerifyWith::Handshake && !asks {
        return unsupported(format!("{:?} has no handshake by {method}", vector.scheme));
    }
    match vector.received(&scheme, method) {
        Ok((received, now)) => answer(vector, received, now),
        Err(problem) => Outcome::reject(problem),
    }
}

/// The stages of the path that need no store, in its order. A window counts as open, with no secret taken in it.
fn answer(vector: &Vector, received: Received, now: Timestamp) -> Outcome {
    let post = received.head.method == Method::POST;
    if !post && !received.source.scheme.answers(&received.head.method) {
        return event(vector, received, now);
    }
    let unsigned = match challenge::unsigned(&received, now) {
        Ok(found) => found.map(|found| match found {
            Unsigned::Answer(reply) => reply,
            Unsigned::Handover(handover) => handover.reply,
        }),
        Err(code) => return Outcome::reject(code.as_str()),
    };
    match unsigned {
        Some(reply) if vector.verify_with == VerifyWith::Handshake || !post => {
            Outcome { reply: Some(reply), ..Outcome::without_event(Got::Accept, "handshake") }
        }
        // What is asked is whether it is signed, and this is not; it is answered all the same.
        Some(reply) => Outcome { reply: Some(reply), ..event(vector, received, now) },
        None => event(vector, received, now),
    }
}

fn event(vector: &Vector, received: Received, now: Timestamp) -> Outcome {
    let refused = |code: Code| Outcome::reject(code.as_str());
    let source = Arc::clone(&received.source);
    let verified = match verify(received, now) {
        Ok(verified) => verified,
        Err(code) => return refused(code),
    };
    let reply = match challenge::signed(&verified) {
        Ok(None) => confirmed(&verified),
        Ok(reply) => reply,
        Err(code) => return refused(code),
    };
    if reply.is_none() && vector.verify_with == VerifyWith::Handshake {
        return Outcome::reject("an event, and no handshake");
    }
    let reason = if reply.is_some() { "handshake" } else { "verified" };
    let (ids, reason) = match ids(verified) {
        Ok(ids) => (ids, reason.to_owned()),
        Err(code) => (Vec::new(), format!("{reason}; {}", code.as_str())),
    };
    let reply = Some(reply.unwrap_or_else(|| acknowledgement(&source)));
    Outcome { got: Got::Accept, reason, ids, reply }
}

/// What names the events of a request; nothing where the source's requests have no identity.
fn ids(verified: Verified) -> Result<Vec<Option<String>>, Code> {
    let never = verified.request().source.scheme.never_dedupes();
    let named = |event: Event| event.identified.then_some(event.id);
    Ok(match Identified::into_parts(identify(verified)?).1 {
        Content::Event(_) if never => Vec::new(),
        Content::Event(event) => vec![Some(event.id)],
        Content::Batch(events) => events.into_iter().map(named).collect(),
    })
}

/// What is answered once the page is visited at which a request asks to confirm; none if it asks no such thing.
fn confirmed(verified: &Verified) -> Option<Reply> {
    matches!(confirm_url(verified.request()), Ok(Some(_))).then(Reply::ok)
}

/// What an event is answered.
fn acknowledgement(source: &Source) -> Reply {
    let mut headers = HeaderMap::new();
    headers.extend(source.ack.content_type.clone().map(|value| (CONTENT_TYPE, value)));
    Reply { status: source.ack.status, headers, body: source.ack.body.clone() }
}

impl Vector {
    /// A list; an item without an id is null in it.
    fn wanted_ids(&self) -> Vec<Option<String>> {
        match (&self.event_ids, &self.event_id) {
            (Some(ids), _) => ids.clone(),
            (None, Some(id)) => vec![Some(id.clone())],
            (None, None) => Vec::new(),
        }
    }

    /// The request as the gateway would receive it, and the time to check against.
    fn received(&self, scheme: &Arc<Scheme>, method: Method) -> Result<(Received, Timestamp), String> {
        let url = self.url();
        let path_at = url.match_indices('/').nth(2).map_or(url.len(), |(at, _)| at);
        let (base, path) = url.split_at(path_at);
        let mut source = self.source(scheme)?;
        source.public_url = Some(base.to_owned());
        let path = if path.is_empty() { "/" } else { path };
        let mut request = http::Request::builder().method(method).uri(path);
        for (name, value) in self.header_pairs() {
            let name: HeaderName =
                name.parse().map_err(|_bad| format!("no header can be called {name:?}"))?;
            let value = HeaderValue::from_bytes(value.as_bytes());
            request =
                request.header(name.clone(), value.map_err(|_bad| format!("{name} cannot hold its value"))?);
        }
        let head = request.body(()).map_err(|error| format!("{url:?}: {error}"))?.into_parts().0;
        let now = Timestamp::from_second(self.now.unwrap_or(0)).map_err(|error| format!("now: {error}"))?;
        Ok((Received { source: Arc::new(source), head, body: self.body()? }, now))
    }

    /// Where it was sent: to the endpoint, where one is named, with the query that the URL has.
    fn url(&self) -> Cow<'_, str> {
        let url = self.url.as_deref().unwrap_or(URL);
        match (self.more.get("endpoint").and_then(Value::as_str), url.split_once('?')) {
            (Some(endpoint), Some((_, query))) => format!("{endpoint}?{query}").into(),
            (Some(endpoint), None) => endpoint.into(),
            (None, _) => url.into(),
        }
    }

    fn source(&self, scheme: &Arc<Scheme>) -> Result<Source, String> {
        let jwk = self.jwk.as_ref().map(|key| key.as_str().map_or_else(|| key.to_string(), str::to_owned));
        // PayPal's signature holds the id of the webhook, which is a setting like a secret.
        let given = [&self.secret, &self.public_key, &jwk, &self.webhook_id];
        let one = given.into_iter().find_map(Option::as_ref);
        let secrets: Vec<&String> = match &self.secrets {
            Some(list) => list.iter().collect(),
            None => one.into_iter().collect(),
        };
        let key = |secret: &String| {
            let key = scheme.key(secret)?;
            Ok::<_, String>(self.key_id.as_ref().map_or(key.clone(), |id| key.named(id)))
        };
        let keys = secrets.into_iter().map(key).collect::<Result<_, _>>()?;
        let mut source = Source::new("test", Arc::clone(scheme), keys);
        source.claims.clone_from(&self.claims);
        if let Some(pem) = self.certificate_pem.as_ref().filter(|_| scheme.has_certificates()) {
            source.certificates = scheme.local_keys(pem)?;
        }
        source.tolerance = Some(self.tolerance(scheme));
        for name in scheme.handshake_secrets() {
            let keys = [name, "verification_token", "public_key_id"];
            let given = keys.into_iter().find_map(|key| self.more.get(key)?.as_str());
            source.handshake_secrets.extend(given.map(|text| (name.to_owned(), Key::token(text.as_bytes()))));
        }
        Ok(source)
    }

    /// Without a time, nothing is held against the clock; without a tolerance, only when a token ends.
    fn tolerance(&self, scheme: &Scheme) -> Tolerance {
        match (self.tolerance, self.now) {
            (Some(seconds @ 1..), Some(_)) => Tolerance::Within(Duration::from_secs(seconds)),
            (_, Some(_)) if scheme.has_token() => Tolerance::Within(Duration::MAX),
            _ => Tolerance::Off,
        }
    }

    fn header_pairs(&self) -> Vec<(&str, &str)> {
        match &self.headers {
            Headers::Named(map) => map.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect(),
            Headers::Listed(list) => {
                list.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect()
            }
        }
    }

    fn body(&self) -> Result<Bytes, String> {
        if let Some(Repeat { text, count }) = &self.body_repeat {
            return Ok(text.repeat(*count).into());
        }
        match &self.body_base64 {
            Some(encoded) => {
                let body = STANDARD.decode(encoded);
                Ok(body.map_err(|error| format!("body_base64: {error}"))?.into())
            }
            None => Ok(self.body.clone().unwrap_or_default().into()),
        }
    }
}

impl WantedReply {
    fn is(&self, reply: &Reply) -> bool {
        let header = |name: &str| reply.headers.get(name).and_then(|value| value.to_str().ok());
        let essence = |text: &str| text.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
        let wanted_type = self.content_type.as_deref().map(essence);
        let body = self.body.as_deref().unwrap_or_default();
        self.status == reply.status.as_u16()
            && (wanted_type.is_none() || wanted_type == header(CONTENT_TYPE.as_str()).map(essence))
            && self.headers.iter().all(|(name, value)| header(name) == Some(value))
            && (body.as_bytes() == reply.body || is_same_json(body.as_bytes(), &reply.body))
    }
}

/// Whether both are JSON and say the same: spaces are nobody's concern.
fn is_same_json(one: &[u8], other: &[u8]) -> bool {
    let read = |text| serde_json::from_slice::<Value>(text).ok();
    read(one).is_some_and(|one| Some(one) == read(other))
}

#[cfg(test)]
mod tests {
    use super::*;

    const VECTORS: &[u8] = include_bytes!("../../../tests/data/vectors.json");
    /// Made for what those do not try.
    const MORE: &[u8] = include_bytes!("../../../tests/data/more_vectors.json");

    fn preset(name: &str) -> Option<Arc<Scheme>> {
        Scheme::preset(name)
    }

    /// What may be the reason of a refusal of that class.
    fn reasons(class: &str) -> &'static [Code] {
        match class {
            "signature mismatch" | "token mismatch" | "no matching public key" => {
                &[Code::SignatureMismatch, Code::SignatureMalformed]
            }
            "json body without bodySHA256" => &[Code::BodyNotSigned],
            "body hash mismatch" => &[Code::BodyHashMismatch],
            "no signature" | "missing token" => &[Code::SignatureMissing],
            "no timestamp" => &[Code::TimestampMissing],
            "timestamp" => &[Code::TimestampMalformed],
            "timestamp too old" | "token expired" => &[Code::TimestampStale],
            "timestamp too new" | "token not yet valid" => &[Code::TimestampFuture],
            "missing id" => &[Code::SignedPartMissing],
            "cert url host" => &[Code::KeyUrlRefused],
            "url hash mismatch" => &[Code::UrlHashMismatch],
            "algorithm" | "signature version" => &[Code::SignedOtherwise],
            "payload hash presence" => &[Code::BodyNotSigned, Code::BodyHashMismatch],
            other => panic!("no codes for {other:?}"),
        }
    }

    #[test]
    fn every_vector_of_a_known_scheme_agrees_and_for_the_right_reason() {
        let mut counts = Counts::default();
        let files = [VECTORS, MORE].map(|text| parse(text).unwrap().vectors);
        for value in files.iter().flatten() {
            let vector = Vector::deserialize(value).unwrap();
            let judged = judge(&vector, &preset);
            counts.add(&judged);
            assert_ne!(judged.agrees(), Some(false), "{judged:?}");
            // Nothing is verified with a secret that is none.
            let keyed = vector.secret.as_deref() != Some("");
            let class = vector.more.get("reject_class").and_then(Value::as_str);
            if let (Got::Reject, true, Some(class)) = (judged.got, keyed, class) {
                let reasons = reasons(class);
                assert!(reasons.iter().any(|code| code.as_str() == judged.reason), "{judged:?}");
            }
        }
        assert_eq!(counts.total, files.iter().map(Vec::len).sum::<usize>());
        assert_eq!(counts.agree, counts.total, "{counts:?}");
    }

    fn changed(name: &str, change: impl FnOnce(&mut Map<String, Value>)) -> Judged {
        let mut file: Value = serde_json::from_slice(VECTORS).unwrap();
        let vectors = file["vectors"].as_array_mut().unwrap();
        let vector = vectors.iter_mut().find(|vector| vector["name"] == name).unwrap();
        change(vector.as_object_mut().unwrap());
        judge_value(vector, &preset)
    }

    #[test]
    fn a_wrong_verdict_id_or_answer_does_not_agree() {
        let name = "slack-url-verification";
        assert_eq!(changed(name, |_| {}).agrees(), Some(true));
        let judged = changed(name, |vector| vector["handshake_reply"]["body"] = "x".into());
        assert_eq!((judged.agrees(), judged.reply_match), (Some(false), Some(false)));
        let judged = changed(name, |vector| vector["handshake_reply"]["content_type"] = "text/html".into());
        assert_eq!((judged.agrees(), judged.reply_match), (Some(false), Some(false)));
        let judged = changed(name, |vector| drop(vector.insert("event_id".into(), "e".into())));
        assert_eq!((judged.agrees(), judged.event_ids_match), (Some(false), Some(false)));
        let judged = changed(name, |vector| drop(vector.insert("secret".into(), "e".into())));
        assert_eq!((judged.agrees(), judged.got), (Some(false), Got::Reject));
        let judged = changed(name, |vector| drop(vector.insert("scheme".into(), "nobody".into())));
        assert_eq!((judged.agrees(), judged.got), (None, Got::Unsupported));
        let judged =
            changed(name, |vector| drop(vector.insert("headers".into(), serde_json::json!([["a\nb", "c"]]))));
        assert_eq!((judged.agrees(), judged.got), (Some(false), Got::Reject));
        let judged = changed(name, |vector| drop(vector.insert("now".into(), "soon".into())));
        assert_eq!((judged.name.as_str(), judged.agrees()), (name, Some(false)));
        assert!(judged.reason.contains("cannot be read"), "{judged:?}");
    }

    #[test]
    fn json_answers_may_be_spaced_otherwise() {
        let spaced = |vector: &mut Map<String, Value>| {
            let body = vector["handshake_reply"]["body"].as_str().unwrap().replace(':', ": ");
            vector["handshake_reply"]["body"] = body.into();
        };
        assert_eq!(changed("monday-challenge", spaced).agrees(), Some(true));
        let other = |vector: &mut Map<String, Value>| {
            vector["handshake_reply"]["body"] = "{\"challenge\":\"\"}".into();
        };
        assert_eq!(changed("monday-challenge", other).agrees(), Some(false));
    }
}
