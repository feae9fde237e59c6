//! What the stages saw of one request, in words.
//!
//! Invariant: nothing here decides; the verdict is the stages' own. Neither a secret nor a signature that would be right
//! is ever told: whoever holds a request could then sign others.

use std::borrow::Cow;
use std::sync::Arc;

use bytes::Bytes;
use http::Method;
use jiff::Timestamp;

use super::hints::hints;
use super::request::Raw;
use super::token;
use crate::body::Received;
use crate::challenge::{self, Reply, Unsigned};
use crate::claim::redis_key;
use crate::config::{FastTier, FastTierKind, Source, Tolerance};
use crate::error::Code;
use crate::identify::{Content, Event, Identified, identify};
use crate::keyring::confirm_url;
use crate::parts::Parts;
use crate::provider::place::Place;
use crate::provider::signature::{TsFrom, Unit};
use crate::provider::template::{Piece, Template};
use crate::provider::{Kind, Scheme};
use crate::settings::show_duration;
use crate::verify::content::Inputs;
use crate::verify::{self, Verified};

/// Most bytes of what was signed that are shown.
const SHOWN_MAX: usize = 200;
/// Most characters of any other text of the request that are shown.
const TEXT_MAX: usize = 80;

/// The verdict, and how it came about.
#[derive(Debug)]
pub(super) struct Told {
    pub(super) accepted: bool,
    pub(super) lines: Vec<String>,
}

impl Told {
    pub(super) fn line(&mut self, label: &str, text: impl AsRef<str>) {
        self.lines.push(format!("{label:<11} {}", text.as_ref()));
    }
}

/// What the request would come to at the source.
enum Verdict {
    Handshake(Reply),
    /// A secret comes with it, which is taken only while a window is open.
    Handover(Reply),
    Events(Content),
    Refused(Code),
}

/// Tells what becomes of the request, and why.
pub(super) fn explain(source: &Arc<Source>, raw: &Raw<'_>, now: Timestamp, tier: &FastTier) -> Told {
    let received = received(source, raw);
    let (key, verdict) = verdict(&received, now);
    let key = key.or_else(|| key_beside_the_clock(&received, &verdict, now));
    let mut told = Told { accepted: !matches!(verdict, Verdict::Refused(_)), lines: Vec::new() };
    match &verdict {
        Verdict::Handshake(reply) => told.line("accepted", format!("a handshake, answered {}", reply.status)),
        Verdict::Handover(reply) => {
            let text = "a handshake that hands over a secret: while `hapax handshake open` holds a window open it is";
            told.line("accepted", format!("{text} answered {}, else 401", reply.status));
        }
        Verdict::Events(Content::Event(_)) => told.line("accepted", "an event"),
        Verdict::Events(Content::Batch(events)) => {
            told.line("accepted", format!("a batch of {} events", events.len()));
        }
        Verdict::Refused(code) => told.line("refused", format!("{}: {}", code.as_str(), code.meaning())),
    }
    told.line("source", format!("{}, provider {}", source.name, source.scheme.name));
    tell_request(&mut told, &received);
    if received.head.method == Method::POST {
        tell_signature(&mut told, &received, now);
        tell_secrets(&mut told, source, key, &verdict);
    }
    if let (true, Ok(Some(url))) = (told.accepted, confirm_url(&received)) {
        told.line(
            "note",
            format!("no event: the gateway visits {url} to confirm, and answers 200 if that is"),
        );
    }
    match &verdict {
        Verdict::Handshake(reply) | Verdict::Handover(reply) => told.line("answer", shown(&reply.body)),
        Verdict::Events(Content::Event(event)) => tell_event(&mut told, event, tier),
        Verdict::Events(Content::Batch(events)) => {
            for event in events {
                told.line("item", event.item.unwrap_or_default().to_string());
                tell_event(&mut told, event, tier);
            }
        }
        Verdict::Refused(code) => {
            for hint in raw.notes.iter().cloned().chain(hints(&received, *code, now)) {
                told.line("hint", hint);
            }
        }
    }
    told
}

pub(super) fn received(source: &Arc<Source>, raw: &Raw<'_>) -> Received {
    Received { source: Arc::clone(source), head: raw.head.clone(), body: Bytes::copy_from_slice(raw.body) }
}

/// The stages of the path that need no store, in its order; and which secret matched.
fn verdict(received: &Received, now: Timestamp) -> (Option<usize>, Verdict) {
    let method = &received.head.method;
    if *method != Method::POST && !received.source.scheme.answers(method) {
        return (None, Verdict::Refused(Code::MethodNotAllowed));
    }
    match challenge::unsigned(received, now) {
        Ok(None) => {}
        Ok(Some(Unsigned::Answer(reply))) => return (None, Verdict::Handshake(reply)),
        Ok(Some(Unsigned::Handover(handover))) => return (None, Verdict::Handover(handover.reply)),
        Err(code) => return (None, Verdict::Refused(code)),
    }
    match verify::verify(again(received), now) {
        Ok(verified) => (Some(verified.key()), verified_verdict(verified)),
        Err(code) => (None, Verdict::Refused(code)),
    }
}

/// Which secret matched, where only the time was wrong.
fn key_beside_the_clock(received: &Received, verdict: &Verdict, now: Timestamp) -> Option<usize> {
    match verdict {
        Verdict::Refused(Code::TimestampStale | Code::TimestampFuture) => {
            let mut timeless = received.source.as_ref().clone();
            timeless.tolerance = Some(Tolerance::Off);
            let timeless = Received { source: Arc::new(timeless), ..again(received) };
            verify::verify(timeless, now).ok().map(|verified| verified.key())
        }
        _ => None,
    }
}

fn verified_verdict(verified: Verified) -> Verdict {
    match challenge::signed(&verified) {
        Ok(Some(reply)) => Verdict::Handshake(reply),
        Ok(None) => match identify(verified) {
            Ok(identified) => Verdict::Events(Identified::into_parts(identified).1),
            Err(code) => Verdict::Refused(code),
        },
        Err(code) => Verdict::Refused(code),
    }
}

/// The same request once more: a stage takes it for itself.
pub(super) fn again(received: &Received) -> Received {
    Received {
        source: Arc::clone(&received.source),
        head: received.head.clone(),
        body: received.body.clone(),
    }
}

fn tell_request(told: &mut Told, received: &Received) {
    let path = received.head.uri.path_and_query().map_or("/", http::uri::PathAndQuery::as_str);
    let (method, length) = (&received.head.method, received.body.len());
    let source = &received.source;
    told.line("request", format!("{method} {}, body of {length} bytes", target(&source.scheme, path)));
    if received.head.uri.path() != format!("/in/{}", source.name) {
        told.line(
            "note",
            format!("the path is not /in/{}: the gateway would not take it for this source", source.name),
        );
    }
    if source.scheme.signs_url() {
        let base = source.public_url.as_deref().unwrap_or("(no public_url)");
        told.line("signed url", format!("{base}{path}"));
    }
    if length > source.body_max {
        told.line(
            "note",
            format!("the body is larger than body_max, {} bytes: it would be answered 413", source.body_max),
        );
    }
}

/// Path and query; the query only where it can hold no secret.
fn target(scheme: &Scheme, path: &str) -> String {
    let secret = scheme.kind.sends_pass() || scheme.handshake_secrets().next().is_some();
    match path.split_once('?') {
        Some((path, query)) if secret => format!("{}?({} bytes, not shown)", capped(path), query.len()),
        _ => capped(path),
    }
}

fn tell_signature(told: &mut Told, received: &Received, now: Timestamp) {
    let scheme = received.source.scheme.as_ref();
    let parts = Parts::of(received, &scheme.signed);
    for place in &scheme.sig.from {
        told.line("signature", found(place, &parts, scheme));
    }
    let texts = verify::signature_texts(&scheme.sig, &parts).unwrap_or_default();
    let candidates = verify::candidates(&scheme.sig, &texts).unwrap_or_default();
    if let Kind::Signed { algorithm, .. } = &scheme.kind {
        for candidate in &candidates {
            let fits = scheme.sig.encoding.fits(candidate, *algorithm);
            let unfit = if fits { "" } else { ": cannot be a signature of this scheme, skipped" };
            told.line("candidate", format!("{}{unfit}", capped(candidate)));
        }
    }
    if let Some(rule) = scheme.jwt() {
        token::tell(told, &received.source, rule, &parts, now);
    }
    let time = tell_time(told, received, &parts, &texts, now);
    let id = scheme.signs_id().then(|| verify::signed_id(scheme, &parts).ok()).flatten();
    if let Some(rule) = &scheme.pointing.cert {
        let url = parts.read(&rule.from).ok().flatten();
        let text = url.map_or("not there".to_owned(), |url| match rule.pins.check(&url) {
            Ok(_pinned) => capped(&url),
            Err(why) => format!("{}: {why}", capped(&url)),
        });
        told.line("certificate", format!("{}: {text}", rule.from));
    }
    for sign in scheme.templates() {
        let id = id.as_ref().map(|(_, text)| text.as_ref());
        let (time, time_header) = (time.as_deref(), scheme.time_header());
        tell_content(told, sign, Inputs { parts: &parts, time, id, secret: None, time_header });
    }
}

/// What stands at a place of the signature. A token is a secret: only its length is told.
fn found(place: &Place, parts: &Parts<'_>, scheme: &Scheme) -> String {
    let token = scheme.kind.sends_pass();
    let shape = |text: &str| if token { format!("{} bytes, not shown", text.len()) } else { capped(text) };
    let texts: Vec<String> = match place {
        Place::Header(name) => {
            let values = parts.header_values(name);
            values.map(|value| value.map_or_else(|_fault| "not UTF-8".to_owned(), shape)).collect()
        }
        _ => match parts.read(place) {
            Ok(text) => text.iter().map(|text| shape(text)).collect(),
            Err(fault) => return format!("{place}: {fault:?}"),
        },
    };
    match texts.as_slice() {
        [] => format!("{place}: not there"),
        [one] => format!("{place}: {one}"),
        many if scheme.sig.repeat => format!("{place}: {} times: {}", many.len(), many.join(" | ")),
        many => format!("{place}: {} times, and only one is allowed", many.len()),
    }
}

fn tell_time<'t>(
    told: &mut Told,
    received: &'t Received,
    parts: &'t Parts<'_>,
    texts: &'t [Cow<'_, str>],
    now: Timestamp,
) -> Option<Cow<'t, str>> {
    let rule = received.source.scheme.ts.as_ref()?;
    let from = match &rule.from {
        TsFrom::Label(label) => format!("{label:?} beside the signature"),
        TsFrom::Places(places) => places.iter().map(ToString::to_string).collect::<Vec<_>>().join(" or "),
    };
    let time = match verify::timestamp(rule, &received.source.scheme.sig, parts, texts) {
        Ok(Some(time)) => time,
        Ok(None) => {
            told.line("timestamp", format!("{from}: not there, and it need not be"));
            return None;
        }
        Err(code) => {
            told.line("timestamp", format!("{from}: {}", code.meaning()));
            return None;
        }
    };
    let tolerance = match received.source.tolerance.unwrap_or(rule.tolerance) {
        Tolerance::Off => "not checked against the clock".to_owned(),
        Tolerance::Within(limit) => format!("tolerance {}", show_duration(limit)),
    };
    let stamp = rule.unit.parse(&time).map(|stamp| Timestamp::from_millisecond(stamp.millis));
    let read = match stamp {
        Some(Err(_)) => format!("thousands of years ahead of the clock {now:.0}; {tolerance}"),
        Some(Ok(stamp)) => format!("{stamp}, {} the clock {now:.0}; {tolerance}", distance(stamp, now)),
        None if rule.unit == Unit::Opaque => "not to be read".to_owned(),
        None => "not a timestamp of this scheme".to_owned(),
    };
    told.line("timestamp", format!("{from}: {} = {read}", capped(&time)));
    Some(time)
}

fn distance(stamp: Timestamp, now: Timestamp) -> String {
    let seconds = now.as_second() - stamp.as_second();
    if seconds < 0 { format!("{} s ahead of", -seconds) } else { format!("{seconds} s behind") }
}

fn tell_content(told: &mut Told, sign: &Template, inputs: Inputs<'_, '_>) {
    let text = sign.text.escape_debug();
    let Inputs { parts, time, id, .. } = inputs;
    // In place of the secret, which is not told.
    if let Ok(content) = (Inputs { secret: Some(b"{secret}"), ..inputs }).content(sign) {
        let content = content.concat();
        told.line("signed", format!("{text} = {} bytes: {}", content.len(), shown(&content)));
        return;
    }
    told.line("signed", format!("{text}, of which something is missing:"));
    for piece in &sign.pieces {
        let missing = match piece {
            Piece::Timestamp if time.is_none() => "the timestamp".to_owned(),
            Piece::Id if id.is_none() => "the id".to_owned(),
            Piece::Url(_) if parts.public_url.is_none() => "public_url in the settings".to_owned(),
            Piece::FormSorted if parts.form_pairs().is_none() => "a form in the body".to_owned(),
            piece => match piece.place().map(|place| (place, parts.read(place))) {
                None | Some((_, Ok(Some(_)))) => continue,
                Some((place, Ok(None))) => place.to_string(),
                Some((place, Err(fault))) => format!("{place}: {fault:?}"),
            },
        };
        told.line("missing", missing);
    }
}

fn tell_secrets(told: &mut Told, source: &Source, key: Option<usize>, verdict: &Verdict) {
    let tried = match (key, verdict) {
        (Some(_), _) => true,
        (None, Verdict::Refused(code)) => *code == Code::SignatureMismatch,
        (None, _) => false,
    };
    if let Some(url) = &source.jwks {
        told.line("keys", format!("published at {url}; they stand in the place of a secret"));
    }
    if key.is_none() && is_signed(source, verdict) {
        return told.line("secret", "one of them matches");
    }
    for index in 0..source.keys.len() {
        let matches = match (tried, key) {
            (false, _) => "not tried",
            (true, Some(key)) if key == index => "matches",
            (true, _) => "does not match",
        };
        told.line("secret", format!("{index} {matches}"));
    }
}

/// What a token says is looked at only after its signature was found right.
fn is_signed(source: &Source, verdict: &Verdict) -> bool {
    let after = [Code::ClaimMismatch, Code::BodyHashMismatch, Code::UrlHashMismatch, Code::BodyNotSigned];
    let tried = source.scheme.has_token() && !source.keys.is_empty();
    tried && matches!(verdict, Verdict::Refused(code) if after.contains(code))
}

fn tell_event(told: &mut Told, event: &Event, tier: &FastTier) {
    told.line("event id", capped(&event.id));
    told.line("event type", event.event_type.as_deref().map_or("-".to_owned(), capped));
    told.line("key", hex::encode(event.key.0));
    told.line("digest", hex::encode(event.digest.0));
    if let FastTierKind::Redis(redis) = &tier.kind {
        told.line("redis key", redis_key(&redis.prefix, &event.key));
    }
}

/// Bytes of the request, so that a terminal shows them and does nothing else.
fn shown(bytes: &[u8]) -> String {
    let head = bytes.get(..bytes.len().min(SHOWN_MAX)).unwrap_or_default();
    let more = if head.len() < bytes.len() { "…" } else { "" };
    format!("\"{}\"{more}", head.escape_ascii())
}

/// A text of the request, so that a terminal shows it and does nothing else.
pub(super) fn capped(text: &str) -> String {
    let head: String = text.chars().take(TEXT_MAX).collect();
    let more = if head.len() < text.len() { "…" } else { "" };
    format!("{}{more}", head.escape_debug())
}
