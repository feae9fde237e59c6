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

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use jiff::Timestamp;
use ring::digest::{Context, SHA256};

use crate::body::Received;
use crate::config::{OnMismatch, Source};
use crate::error::Code;
use crate::guard::{Watch, watch};
use crate::json::{Found, Slot};
use crate::parts::{self, Fault, NoList, Parts};
use crate::provider::place::Rule;
use crate::provider::signature::Unit;
use crate::provider::{BatchRules, DigestRule, EventRules};
use crate::verify::Verified;

/// Longest event type that is kept; a longer one is none.
const TYPE_MAX: usize = 255;
/// The last second of the year 9999.
const TIME_MAX: i64 = 253_402_300_799;
/// Written as the length of a part that is not there.
const ABSENT: u64 = u64::MAX;

/// Length-prefixed SHA-256 prefix over (source, scope, event id); the same in both tiers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EventKey(pub [u8; 16]);

impl EventKey {
    /// What it stands under in the fast tier where what is signed is watched.
    #[must_use]
    pub fn guarded(&self) -> Self {
        Self::of_parts(&[b"guarded", &self.0])
    }

    /// The key of an id. Lengths stand before the parts, so that no two triples hash the same bytes.
    #[must_use]
    pub fn of(source: &str, scope: &str, id: &str) -> Self {
        Self::of_parts(&[source.as_bytes(), scope.as_bytes(), id.as_bytes()])
    }

    /// The key of an id together with a body, where a reused id means another event.
    #[must_use]
    pub fn of_body(source: &str, scope: &str, id: &str, digest: Digest) -> Self {
        Self::of_parts(&[source.as_bytes(), scope.as_bytes(), id.as_bytes(), &digest.0])
    }

    fn of_parts(parts: &[&[u8]]) -> Self {
        let mut context = Context::new(&SHA256);
        for part in parts {
            context.update(&length(part.len()));
            context.update(part);
        }
        let mut key = [0; 16];
        key.iter_mut().zip(context.finish().as_ref()).for_each(|(key, byte)| *key = *byte);
        Self(key)
    }
}

fn length(length: usize) -> [u8; 8] {
    u64::try_from(length).unwrap_or(ABSENT).to_le_bytes()
}

/// SHA-256 of what the source's digest rule names; by default of the raw body without the values that change between
/// attempts.
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
    pub headers: Arc<str>,
    /// Its place in a batch, from 0.
    pub item: Option<u32>,
    /// What is signed, if that is watched.
    pub guard: Option<Box<Watch>>,
    /// Whether it has an id of its own. An item of a batch without one is recorded, and no effect is called for it.
    pub identified: bool,
}

impl Event {
    /// Its key in the fast tier. Another one while signed bytes are watched, so that no marker of the time before or
    /// after is taken for one that vouches for them.
    #[must_use]
    pub fn tier_key(&self) -> EventKey {
        match self.guard {
            None => self.key,
            Some(_) => self.key.guarded(),
        }
    }

    /// What has to be the same in another delivery for it to be answered without Postgres.
    #[must_use]
    pub fn stamp(&self) -> Digest {
        self.guard.as_ref().map_or(self.digest, |guard| guard.stamp(self.digest))
    }
}

/// What a request brings.
#[derive(Debug)]
pub enum Content {
    /// One event.
    Event(Event),
    /// The items of a batch, in their order; maybe none. Equal events stand there once.
    Batch(Vec<Event>),
}

impl Content {
    fn events(&mut self) -> &mut [Event] {
        match self {
            Self::Event(event) => std::slice::from_mut(event),
            Self::Batch(events) => events,
        }
    }

    /// The event of a request that is no batch.
    #[must_use]
    pub fn into_event(self) -> Option<Event> {
        match self {
            Self::Event(event) => Some(event),
            Self::Batch(_) => None,
        }
    }
}

/// A verified request and the event in it. Only [`identify`] makes one.
#[derive(Debug)]
pub struct Identified {
    source: Arc<Source>,
    content: Content,
}

impl Identified {
    /// The source, and what it sent.
    #[must_use]
    pub fn into_parts(self) -> (Arc<Source>, Content) {
        (self.source, self.content)
    }
}

/// Finds the id of the event, or of each item of a batch, and computes keys and digests.
///
/// # Errors
/// One of the `Id*` or `Batch*` codes, or `BodyNotJson`.
pub fn identify(verified: Verified) -> Result<Identified, Code> {
    let (received, signed_id, signed_bytes) = verified.into_parts();
    let source = Arc::clone(&received.source);
    let mut content = match &source.scheme.batch {
        None => Content::Event(single(&source, signed_id, &received)?),
        Some(batch) => Content::Batch(items(&source, batch, &received)?),
    };
    if let Some(signed) = signed_bytes {
        watch(&source.name, source.guard, signed, content.events());
    }
    Ok(Identified { source, content })
}

fn single(source: &Source, signed_id: Option<usize>, received: &Received) -> Result<Event, Code> {
    let rules = &source.scheme.event;
    let parts = Parts::of(received, &rules.pointers);
    let id = event_id(rules, signed_id, &parts, source.id_max)?.unwrap_or_else(random_id);
    let body = received.body.clone();
    Ok(event(
        source,
        rules,
        &parts,
        Named { id, identified: true, item: None },
        body,
        kept_headers(received).into(),
    ))
}

/// Each item is an event with its own bytes, which are those that it has in the body.
fn items(source: &Source, batch: &BatchRules, received: &Received) -> Result<Vec<Event>, Code> {
    let list = parts::list(&received.body, &batch.pointers, batch.items).map_err(|none| match none {
        NoList::NotJson => Code::BodyNotJson,
        NoList::Twice => Code::IdAmbiguous,
        NoList::Missing => Code::BatchMissing,
    })?;
    if list.len() > source.batch_items_max {
        return Err(Code::BatchTooLarge);
    }
    let headers: Arc<str> = kept_headers(received).into();
    let mut events: Vec<Event> = Vec::with_capacity(list.len());
    let mut seen = HashSet::with_capacity(list.len());
    for (raw, item) in list.into_iter().zip(0..) {
        let span = span_in(&received.body, raw.get()).ok_or(Code::BodyNotJson)?;
        let body = received.body.slice(span);
        let parts = Parts::item(received, &body, &batch.item.pointers);
        let id = event_id(&batch.item, None, &parts, source.id_max).ok().flatten();
        let named = Named { identified: id.is_some(), id: id.unwrap_or_else(random_id), item: Some(item) };
        let event = event(source, &batch.item, &parts, named, body.clone(), Arc::clone(&headers));
        if seen.insert((event.key, event.digest)) {
            events.push(event);
        }
    }
    Ok(events)
}

/// What an event is called, and where it stands.
struct Named {
    id: String,
    identified: bool,
    item: Option<u32>,
}

fn event(
    source: &Source,
    rules: &EventRules,
    parts: &Parts<'_>,
    named: Named,
    body: Bytes,
    headers: Arc<str>,
) -> Event {
    let Named { id, identified, item } = named;
    let digest = body_digest(rules, parts);
    let key = match source.on_mismatch {
        // Another body is another event.
        OnMismatch::Accept if identified => EventKey::of_body(&source.name, &source.scope, &id, digest),
        _ => EventKey::of(&source.name, &source.scope, &id),
    };
    Event {
        key,
        digest,
        scope: Arc::clone(&source.scope),
        id,
        event_type: lenient(&rules.types, parts).filter(|text| text.len() <= TYPE_MAX),
        provider_time: lenient(&rules.times, parts).and_then(|text| time(&text)),
        headers,
        body,
        item,
        guard: None,
        identified,
    }
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
    // Years that no event is from, and that Postgres may not know.
    Timestamp::from_millisecond(stamp.millis).ok().filter(|time| (0..=TIME_MAX).contains(&time.as_second()))
}

/// Of what the rule names; of the raw body where a part is not clear.
fn body_digest(rules: &EventRules, parts: &Parts<'_>) -> Digest {
    let digest = match &rules.digest {
        DigestRule::Without(slots) => digest_without(slots, parts),
        DigestRule::Parts(slots) => digest_of(slots, parts),
    };
    digest.or_else(|| digest_of_fields(parts)).unwrap_or_else(|| Digest(parts.body_sha256()))
}

/// Of a form in parts: each attempt has another boundary between them.
fn digest_of_fields(parts: &Parts<'_>) -> Option<Digest> {
    let mut context = Context::new(&SHA256);
    for (name, value) in parts.fields()? {
        for piece in [name.as_bytes(), value] {
            context.update(&length(piece.len()));
            context.update(piece);
        }
    }
    Some(Digest(parts::array(&context.finish())))
}

/// Of the raw body with some values cut out of it; none if there is nothing to cut out.
fn digest_without(slots: &[Slot], parts: &Parts<'_>) -> Option<Digest> {
    let mut cuts = Vec::with_capacity(slots.len());
    for slot in slots {
        match parts.json(*slot).ok()? {
            Found::Value(raw) => cuts.push(span_in(parts.body, raw)?),
            Found::Absent => {}
            Found::Twice | Found::Broken => return None,
        }
    }
    if cuts.is_empty() {
        return None;
    }
    cuts.sort_unstable_by_key(|cut| cut.start);
    let mut context = Context::new(&SHA256);
    let mut from = 0;
    for cut in cuts {
        // A value inside one that is already cut out adds nothing.
        context.update(parts.body.get(from..cut.start).unwrap_or_default());
        from = from.max(cut.end);
    }
    context.update(parts.body.get(from..)?);
    Some(Digest(parts::array(&context.finish())))
}

/// Where a value that was found in the body stands in it.
fn span_in(body: &[u8], value: &str) -> Option<Range<usize>> {
    let start = value.as_ptr().addr().checked_sub(body.as_ptr().addr())?;
    let span = start..start.checked_add(value.len())?;
    (body.get(span.clone())? == value.as_bytes()).then_some(span)
}

/// Of the values' source text, with lengths before them; none if there is no such value.
fn digest_of(slots: &[Slot], parts: &Parts<'_>) -> Option<Digest> {
    let mut context = Context::new(&SHA256);
    let mut any = false;
    for slot in slots {
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
        object.push_str(&quoted(name.as_str()));
        object.push(':');
        object.push_str(&quoted(&value));
    }
    object.push('}');
    object
}

fn quoted(text: &str) -> String {
    // Strings are always written.
    serde_json::to_string(text).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use crate::fixture::{now, received, scheme, source};
    use crate::verify::verify;

    use super::*;

    /// A request that passes verification by a token, so that only identification is at stake.
    fn event_of(rules: &str, headers: &[(&str, &[u8])], body: &[u8]) -> Result<Event, Code> {
        let toml = format!("kind = \"token\"\nsig = {{ from = \"header:X-Token\" }}\n{rules}");
        let mut source = source(&scheme(&toml), &["t"]);
        source.headers = vec!["x-kept".parse().unwrap(), "x-other".parse().unwrap()];
        let mut headers = headers.to_vec();
        headers.push(("x-token", b"t"));
        let verified = verify(received(source, "/p?q=Q", &headers, body.to_vec()), now()).unwrap();
        identify(verified).map(|identified| identified.into_parts().1.into_event().unwrap())
    }

    fn id(rules: &str, headers: &[(&str, &[u8])], body: impl AsRef<[u8]>) -> Result<String, Code> {
        event_of(rules, headers, body.as_ref()).map(|event| event.id)
    }

    fn json_id(body: impl AsRef<[u8]>) -> Result<String, Code> {
        id("id = \"json:/id\"", &[], body)
    }

    #[test]
    fn strings_and_whole_numbers_are_ids_and_keep_their_text() {
        for (value, wanted) in [
            ("\"evt_1\"", "evt_1"),
            ("123", "123"),
            ("\"123\"", "123"),
            ("-7", "-7"),
            ("9007199254918487", "9007199254918487"),
            ("9007199254918488", "9007199254918488"),
            ("98765432109876543210", "98765432109876543210"),
            ("9876543210987654321098765432109876543210", "9876543210987654321098765432109876543210"),
            (r#""a\u0062\n""#, "ab\n"),
            (r#""\\u0000""#, "\\u0000"),
            ("\"\u{1F680}\"", "\u{1F680}"),
        ] {
            assert_eq!(json_id(format!("{{\"id\":{value}}}")).as_deref(), Ok(wanted));
        }
    }

    #[test]
    fn what_cannot_be_an_id_is_refused_by_name() {
        let table: [(&[u8], Code); 25] = [
            (b"{\"id\":1e3}", Code::IdInvalid),
            (b"{\"id\":1.0}", Code::IdInvalid),
            (b"{\"id\":-0}", Code::IdInvalid),
            (b"{\"id\":true}", Code::IdInvalid),
            (b"{\"id\":{}}", Code::IdInvalid),
            (b"{\"id\":[\"a\"]}", Code::IdInvalid),
            (b"{\"id\":\"a\\u0000\"}", Code::IdInvalid),
            (b"{\"id\":\"\\ud800\"}", Code::IdInvalid),
            (b"{\"id\":\"\xff\"}", Code::IdInvalid),
            (b"{\"id\":\"a\",\"id\":\"a\"}", Code::IdAmbiguous),
            (b"{\"id\":\"a\",\"x\":[[{}]],\"i\\u0064\":null}", Code::IdAmbiguous),
            (b"{\"id\":null}", Code::IdMissing),
            (b"{\"id\":\"\"}", Code::IdMissing),
            (b"{}", Code::IdMissing),
            (b"null", Code::IdMissing),
            (b"[]", Code::IdMissing),
            (b"\"x\"", Code::IdMissing),
            (b"{\"id\":0}", Code::IdMissing),
            (b"{\"id\":\"0000000000000000000000000000000000000000\"}", Code::IdMissing),
            (b"{\"id\":\"00000000-0000-0000-0000-000000000000\"}", Code::IdMissing),
            (b"", Code::BodyNotJson),
            (b"{\"id\":\"a\"", Code::BodyNotJson),
            (b"{\"id\":\"a\"}}", Code::BodyNotJson),
            (b"id=a", Code::BodyNotJson),
            (b"\xff\xfe\x00\x80", Code::BodyNotJson),
        ];
        for (body, wanted) in table {
            assert_eq!(json_id(body), Err(wanted), "{}", String::from_utf8_lossy(body));
        }
    }

    #[test]
    fn faults_beside_the_id_do_not_matter() {
        for beside in ["\"\\ud800\"", "\"\\u0000\"", "1e999", "{\"id\":1,\"id\":2}"] {
            assert_eq!(json_id(format!("{{\"x\":{beside},\"id\":\"a\"}}")).as_deref(), Ok("a"));
            assert_eq!(json_id(format!("{{\"id\":\"a\",\"x\":{beside}}}")).as_deref(), Ok("a"));
        }
        assert_eq!(json_id(b"{\"x\":\"\xff\",\"id\":\"a\"}").as_deref(), Ok("a"));
        assert_eq!(json_id(b"{\"\xff\":1,\"id\":\"a\"}").as_deref(), Ok("a"));
        let rules =
            "id = \"json:/id\"\ntype = \"json:/type\"\nevent_time = \"json:/at\"\ndigest = [\"json:/data\"]";
        let event =
            event_of(rules, &[], b"{\"type\":\"\xff\",\"at\":{},\"data\":\"\xff\",\"id\":\"a\"}").unwrap();
        assert_eq!((event.id.as_str(), event.event_type, event.provider_time), ("a", None, None));
        let deep = format!("{{\"x\":{}{},\"id\":\"a\"}}", "[".repeat(50_000), "]".repeat(50_000));
        assert_eq!(json_id(deep).as_deref(), Ok("a"));
    }

    #[test]
    fn over_long_ids_are_refused_and_never_cut() {
        let long = "a".repeat(512);
        assert_eq!(json_id(format!("{{\"id\":\"{long}\"}}")), Ok(long.clone()));
        assert_eq!(json_id(format!("{{\"id\":\"{long}a\"}}")), Err(Code::IdTooLong));
        assert_ne!(EventKey::of("s", "-", &(long.clone() + "a")), EventKey::of("s", "-", &(long + "b")));
    }

    #[test]
    fn the_first_rule_that_yields_wins() {
        let rules =
            "id = [\"json:/a\", \"json:/b + json:/c\", \"header:X-Id\", \"query:none\", \"body:sha256\"]";
        let header: [(&str, &[u8]); 1] = [("x-id", b"h")];
        let hash = hex::encode(parts::sha256(b"{}"));
        for (headers, body, wanted) in [
            (&header[..], r#"{"a":"A","b":1,"c":2}"#, "A"),
            (&header, r#"{"a":null,"b":1,"c":"0"}"#, "1:0"),
            (&header, r#"{"a":"","b":1}"#, "h"),
            (&header, r#"{"b":0,"c":0}"#, "h"),
            (&header, "not json", "h"),
            (&[], "{}", &hash),
        ] {
            assert_eq!(id(rules, headers, body).as_deref(), Ok(wanted), "{body}");
        }
        assert_eq!(
            id(rules, &header, r#"{"a":1.5}"#),
            Err(Code::IdInvalid),
            "no falling through over a fault"
        );
        assert_eq!(id("id = [\"json:/a\", \"header:X-Id\"]", &[], "x"), Err(Code::BodyNotJson));
        assert_eq!(id("id = \"query:q\"", &[], ""), Ok("Q".to_owned()));
    }

    #[test]
    fn header_ids_stand_once_and_are_text() {
        let rule = "id = \"header:X-Id\"";
        assert_eq!(id(rule, &[("x-id", b"a"), ("x-id", b"a")], ""), Err(Code::IdAmbiguous));
        assert_eq!(id(rule, &[("x-id", b"a"), ("x-id", b"b")], ""), Err(Code::IdAmbiguous));
        assert_eq!(id(rule, &[("x-id", b"\xff")], ""), Err(Code::IdInvalid));
        assert_eq!(id(rule, &[("x-id", b"")], ""), Err(Code::IdMissing));
        assert_eq!(id(rule, &[], ""), Err(Code::IdMissing));
        assert_eq!(id(rule, &[("x-id", "\u{e9}".as_bytes())], "").as_deref(), Ok("\u{e9}"));
    }

    #[test]
    fn form_ids_are_decoded_and_stand_once() {
        let rules = "id = [\"json:/event_id\", \"form:trigger\", \"formjson:payload#/id\"]";
        for (body, wanted) in [
            ("trigger=a%2Fb+c&x=1", Ok("a/b c")),
            ("payload=%7B%22id%22%3A12%7D", Ok("12")),
            ("trigger=a&trigger=a", Err(Code::IdAmbiguous)),
            ("trigger=%FF", Err(Code::IdInvalid)),
            ("trigger=%00", Err(Code::IdInvalid)),
            ("trigger=", Err(Code::BodyNotJson)),
            ("payload=x", Err(Code::BodyNotJson)),
            (r#"{"text":"&trigger=mine&"}"#, Err(Code::IdMissing)),
            (" [\"&trigger=mine&\"]", Err(Code::IdMissing)),
        ] {
            assert_eq!(id(rules, &[], body), wanted.map(str::to_owned), "{body}");
        }
    }

    #[test]
    fn sources_without_identity_get_a_new_key_each_time() {
        let one = event_of("id = []", &[], b"{}").unwrap();
        let two = event_of("id = []", &[], b"{}").unwrap();
        assert!(one.id.starts_with("unidentified:") && one.id.len() == 45);
        assert_ne!(one.key, two.key);
        assert_eq!(one.digest, two.digest);
    }

    #[test]
    fn a_form_in_parts_is_the_same_whatever_stands_between_them() {
        let form = |boundary: &str, a: &str, b: &str| {
            let part = |name: &str, value: &str| {
                let head = format!("Content-Disposition: form-data; name=\"{name}\"");
                format!("--{boundary}\r\n{head}\r\n\r\n{value}\r\n")
            };
            let body = part("id", "1") + &part("a", a) + &part("b", b) + &format!("--{boundary}--\r\n");
            event_of("id = \"form:id\"", &[], body.as_bytes())
        };
        let one = form("x", "1", "2").unwrap();
        assert_eq!(one.id, "1");
        assert_eq!(one.digest, form("other", "1", "2").unwrap().digest);
        for (a, b) in [("1", "3"), ("", "12"), ("12", "")] {
            assert_ne!(one.digest, form("x", a, b).unwrap().digest, "{a} {b}");
        }
        let twice = form("x", "1\r\n--x\r\nContent-Disposition: form-data; name=\"id\"\r\n\r\n2", "");
        assert_eq!(twice.map(drop), Err(Code::IdAmbiguous));
    }

    #[test]
    fn keys_are_scoped_and_parts_cannot_run_into_each_other() {
        let key = EventKey::of("source", "-", "id");
        assert_eq!(key, EventKey::of("source", "-", "id"));
        for other in
            [("sourc", "e-", "id"), ("source", "-i", "d"), ("other", "-", "id"), ("source", "x", "id")]
        {
            assert_ne!(key, EventKey::of(other.0, other.1, other.2));
        }
        // Pinned: rows and markers that exist already hold keys made this way.
        assert_eq!(hex::encode(EventKey::of("stripe", "-", "evt_1").0), "b9069f2ea5dbd8130cb960dd99717db2");
    }

    #[test]
    fn values_that_change_between_attempts_are_left_out_of_the_digest() {
        let rules = "id = \"json:/id\"\nvolatile = [\"/pending\", \"/try\", \"/try/n\"]";
        let digest = |body: &str| event_of(rules, &[], body.as_bytes()).unwrap().digest;
        let base = digest(r#"{"id":1,"pending":2,"a":"x","try":{"n":1}}"#);
        assert_eq!(base, digest(r#"{"id":1,"pending":10,"a":"x","try":{"n":2}}"#));
        assert_ne!(base, digest(r#"{"id":1,"pending":2,"a":"y","try":{"n":1}}"#));
        assert_ne!(base, digest(r#"{"id":1,"a":"x","try":{"n":1}}"#));
        assert_ne!(base, digest(r#"{"id":1,"pending":2,"a":"x","try":{"n":1},"more":1}"#));
        for whole in [r#"{"id":1,"a":"x"}"#, r#"{"id":1,"pending":1,"pending":2}"#] {
            assert_eq!(digest(whole), Digest(parts::sha256(whole.as_bytes())));
        }
    }

    #[test]
    fn the_digest_covers_the_raw_body_or_the_named_parts() {
        let digest = |rules: &str, body: &str| event_of(rules, &[], body.as_bytes()).unwrap().digest;
        let raw = "id = \"json:/id\"";
        assert_eq!(digest(raw, r#"{"id":1}"#), Digest(parts::sha256(br#"{"id":1}"#)));
        assert_ne!(digest(raw, r#"{"id":1}"#), digest(raw, r#"{"id": 1}"#));
        let named = "id = \"json:/id\"\ndigest = [\"json:/a\", \"json:/b\"]";
        let base = digest(named, r#"{"id":1,"a":"x","b":[1,2],"volatile":1}"#);
        assert_eq!(base, digest(named, r#"{"b":[1,2],"volatile":2,"id":1,"a":"x"}"#));
        for other in [
            r#"{"id":1,"a":"x","b":[1, 2]}"#,
            r#"{"id":1,"a":"x"}"#,
            r#"{"id":1,"a":"y","b":[1,2]}"#,
            r#"{"id":1,"b":"x","a":[1,2]}"#,
        ] {
            assert_ne!(base, digest(named, other), "{other}");
        }
        let one = |key: &str| digest(named, &format!("{{\"id\":1,\"{key}\":\"x\"}}"));
        assert_ne!(one("a"), one("b"), "which part is missing counts");
        for unclear in [r#"{"id":1,"a":1,"a":2}"#, r#"{"id":1}"#] {
            assert_eq!(digest(named, unclear), Digest(parts::sha256(unclear.as_bytes())));
        }
    }

    #[test]
    fn type_and_time_are_lenient() {
        let rules = "id = \"json:/id\"\ntype = [\"json:/type\", \"header:X-Type\"]\nevent_time = [\"json:/at\", \"json:/t\"]";
        let of = |rest: &str| {
            let event =
                event_of(rules, &[("x-type", b"h")], format!("{{\"id\":1,{rest}}}").as_bytes()).unwrap();
            (event.event_type.unwrap_or_default(), event.provider_time.map(Timestamp::as_millisecond))
        };
        assert_eq!(of(r#""type":"a.b","at":1700000000"#), ("a.b".to_owned(), Some(1_700_000_000_000)));
        assert_eq!(of(r#""type":5,"at":"1700000000123""#), ("5".to_owned(), Some(1_700_000_000_123)));
        assert_eq!(of(r#""type":{},"at":"2023-11-14T22:13:20Z""#), ("h".to_owned(), Some(1_700_000_000_000)));
        assert_eq!(of(r#""type":"a","type":"b","at":99999999999999999"#), ("h".to_owned(), None));
        assert_eq!(of(r#""at":"soon""#), ("h".to_owned(), None));
        assert_eq!(of(&format!("\"type\":\"{}\"", "x".repeat(256))), (String::new(), None));
    }

    #[test]
    fn kept_headers_are_a_json_object_of_those_that_are_there() {
        let headers =
            |headers: &[(&str, &[u8])]| event_of("id = []", headers, b"").unwrap().headers.to_string();
        assert_eq!(headers(&[("x-secret", b"s")]), "{}");
        assert_eq!(headers(&[("X-Kept", b"a\"\\b"), ("x-secret", b"s")]), r#"{"x-kept":"a\"\\b"}"#);
        assert_eq!(
            headers(&[("x-other", b"\xff"), ("x-kept", b"1"), ("x-kept", b"2")]),
            "{\"x-kept\":\"1, 2\",\"x-other\":\"\u{fffd}\"}"
        );
    }
}
