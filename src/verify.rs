//! Signature and timestamp check.
//!
//! Invariant: a [`Verified`] exists only for a request that somebody signed who knows one of the source's secrets.
//! The check is over the raw bytes, compares decoded signatures in constant time, reads no clock, does no I/O and
//! has no way to panic. What decides (algorithm, labels, places) is the scheme's; nothing in the request chooses.

use std::borrow::Cow;

use http::HeaderMap;
use jiff::Timestamp;
use ring::hmac;
use subtle::{Choice, ConstantTimeEq};

use crate::body::Received;
use crate::config::{Source, Tolerance};
use crate::error::Code;
use crate::parts::{Fault, Parts};
use crate::provider::place::Place;
use crate::provider::signature::{Hash, Labels, SigRule, Stamp, Tag, TsFrom, TsRule, Unit};
use crate::provider::template::{Piece, Template};
use crate::provider::{Key, Kind, Scheme};

/// Most signatures that one request may offer. A rotation needs two or three; each costs a comparison.
const CANDIDATES_MAX: usize = 32;

/// A request whose signature is right. Only [`verify`] makes one.
#[derive(Debug)]
pub struct Verified {
    received: Received,
    signed_id: Option<usize>,
}

impl Verified {
    /// The request.
    #[must_use]
    pub fn request(&self) -> &Received {
        &self.received
    }

    /// The one id rule whose header was signed, if the scheme signs the id: no other may name the event.
    pub(crate) fn signed_id(&self) -> Option<usize> {
        self.signed_id
    }
}

/// Checks signature and timestamp. `now` is the time to check against.
///
/// # Errors
/// The reason, for log and metric only; the sender is told nothing but "refused".
pub fn verify(received: Received, now: Timestamp) -> Result<Verified, Code> {
    let signed_id = check(&received, now)?;
    Ok(Verified { received, signed_id })
}

fn check(received: &Received, now: Timestamp) -> Result<Option<usize>, Code> {
    let source = received.source.as_ref();
    let scheme = source.scheme.as_ref();
    refuse_repeated(scheme, &received.head.headers)?;
    let parts = Parts::of(received, &scheme.signed);
    let texts = signature_texts(&scheme.sig, &parts)?;
    let candidates = candidates(&scheme.sig, &texts)?;
    let time = match &scheme.ts {
        Some(rule) => timestamp(rule, &scheme.sig, &parts, &texts)?,
        None => None,
    };
    let stamp = stamp(scheme, time.as_deref())?;
    let id = if scheme.signs_id() { Some(signed_id(scheme, &parts)?) } else { None };
    match &scheme.kind {
        Kind::Hmac { hash, sign } => {
            let tags = decode(&scheme.sig, *hash, &candidates)?;
            let id_text = id.as_ref().map(|(_, text)| text.as_ref());
            let content = signed_content(sign, &parts, time.as_deref(), id_text)?;
            check_tags(&source.keys, &content, &tags)?;
        }
        Kind::Token => check_token(&source.keys, &candidates)?,
    }
    check_age(source, stamp, now)?;
    Ok(id.as_ref().map(|(rule, _)| *rule))
}

/// Of two headers with one name, this check and whoever reads the request next might each take another.
fn refuse_repeated(scheme: &Scheme, headers: &HeaderMap) -> Result<(), Code> {
    let repeated = |name| headers.get_all(name).iter().nth(1).is_some();
    if scheme.once.iter().any(repeated) { Err(Code::HeaderRepeated) } else { Ok(()) }
}

fn signature_texts<'a>(rule: &SigRule, parts: &Parts<'a>) -> Result<Vec<Cow<'a, str>>, Code> {
    let mut texts = Vec::with_capacity(rule.from.len());
    for place in &rule.from {
        match place {
            Place::Header(name) => {
                for value in parts.header_values(name) {
                    texts.push(Cow::Borrowed(value.or(Err(Code::SignatureMalformed))?));
                }
            }
            _ => match parts.read(place) {
                Ok(text) => texts.extend(text),
                Err(Fault::NotJson) => {}
                Err(Fault::Invalid) => return Err(Code::SignatureMalformed),
                Err(Fault::Twice) => return Err(Code::HeaderRepeated),
            },
        }
    }
    Ok(texts)
}

/// The signatures offered, still encoded: at least one, at most [`CANDIDATES_MAX`].
fn candidates<'t>(rule: &'t SigRule, texts: &'t [Cow<'_, str>]) -> Result<Vec<&'t str>, Code> {
    let mut found = Vec::new();
    for item in texts.iter().flat_map(|text| rule.items(text)) {
        let value = match &rule.labels {
            None => Some(item),
            Some(labels) => labelled(labels, item, |label| labels.names.iter().any(|name| name == label)),
        };
        if found.len() == CANDIDATES_MAX && value.is_some() {
            return Err(Code::SignatureMalformed);
        }
        found.extend(value);
    }
    if found.is_empty() { Err(Code::SignatureMissing) } else { Ok(found) }
}

fn labelled<'t>(labels: &Labels, item: &'t str, wanted: impl Fn(&str) -> bool) -> Option<&'t str> {
    let (label, value) = item.split_once(labels.assign.as_str())?;
    wanted(label.trim()).then(|| value.trim())
}

/// The timestamp's received characters; `None` only if it may be missing.
fn timestamp<'t>(
    rule: &TsRule,
    sig: &'t SigRule,
    parts: &Parts<'t>,
    texts: &'t [Cow<'_, str>],
) -> Result<Option<Cow<'t, str>>, Code> {
    let text = match &rule.from {
        TsFrom::Places(places) => first_text(places, parts)?,
        TsFrom::Label(label) => timestamp_item(label, sig, texts)?.map(Cow::Borrowed),
    };
    match text {
        None if !rule.optional => Err(Code::TimestampMissing),
        text => Ok(text),
    }
}

fn first_text<'a>(places: &[Place], parts: &Parts<'a>) -> Result<Option<Cow<'a, str>>, Code> {
    for place in places {
        match parts.read(place) {
            Ok(Some(text)) if !text.is_empty() => return Ok(Some(text)),
            Ok(_) | Err(Fault::NotJson) => {}
            Err(Fault::Invalid) => return Err(Code::TimestampMalformed),
            Err(Fault::Twice) => return Err(Code::HeaderRepeated),
        }
    }
    Ok(None)
}

/// `t=123=junk` and a second `t=` are refused: a laxer reader would take another time than this one.
fn timestamp_item<'t>(
    label: &str,
    sig: &'t SigRule,
    texts: &'t [Cow<'_, str>],
) -> Result<Option<&'t str>, Code> {
    let Some(labels) = &sig.labels else { return Ok(None) };
    let items = texts.iter().flat_map(|text| sig.items(text));
    let mut times = items.filter_map(|item| labelled(labels, item, |name| name == label));
    let time = times.next();
    if times.next().is_some() || time.is_some_and(|time| time.contains(&labels.assign)) {
        return Err(Code::TimestampMalformed);
    }
    Ok(time.filter(|time| !time.is_empty()))
}

fn stamp(scheme: &Scheme, time: Option<&str>) -> Result<Option<Stamp>, Code> {
    match (&scheme.ts, time) {
        (Some(rule), Some(text)) if rule.unit != Unit::Opaque => {
            rule.unit.parse(text).map(Some).ok_or(Code::TimestampMalformed)
        }
        _ => Ok(None),
    }
}

/// The first id header that is there, and its rule. The scheme's reader has seen to it that each rule is a header.
fn signed_id<'a>(scheme: &Scheme, parts: &Parts<'a>) -> Result<(usize, Cow<'a, str>), Code> {
    for (index, rule) in scheme.event.ids.iter().enumerate() {
        let Some(place) = rule.places.first() else { continue };
        match parts.read(place) {
            Ok(Some(text)) if !text.is_empty() => return Ok((index, text)),
            Ok(_) => {}
            Err(Fault::Twice) => return Err(Code::HeaderRepeated),
            Err(_) => return Err(Code::SignedPartMissing),
        }
    }
    Err(Code::SignedPartMissing)
}

/// The signed bytes, as the slices that they are made of: a large body is never copied.
pub(crate) fn signed_content<'t>(
    sign: &'t Template,
    parts: &Parts<'t>,
    time: Option<&'t str>,
    id: Option<&'t str>,
) -> Result<Vec<Cow<'t, [u8]>>, Code> {
    let mut content = Vec::with_capacity(sign.pieces.len() + 1);
    for piece in &sign.pieces {
        let bytes = match piece {
            Piece::Literal(text) => Cow::Borrowed(text.as_bytes()),
            Piece::Body => Cow::Borrowed(parts.body),
            Piece::Timestamp => Cow::Borrowed(time.ok_or(Code::TimestampMissing)?.as_bytes()),
            Piece::Id => Cow::Borrowed(id.ok_or(Code::SignedPartMissing)?.as_bytes()),
            Piece::Method => Cow::Borrowed(parts.method.as_str().as_bytes()),
            Piece::Url => {
                let base = parts.public_url.ok_or(Code::SignedPartMissing)?;
                content.push(Cow::Borrowed(base.as_bytes()));
                Cow::Borrowed(parts.path.as_bytes())
            }
            Piece::Text(place) => bytes(signed_text(parts, place)?),
            Piece::Lower(place) => Cow::Owned(signed_text(parts, place)?.to_lowercase().into_bytes()),
        };
        content.push(bytes);
    }
    Ok(content)
}

fn signed_text<'a>(parts: &Parts<'a>, place: &Place) -> Result<Cow<'a, str>, Code> {
    match parts.read(place) {
        Ok(Some(text)) => Ok(text),
        Err(Fault::Twice) => Err(Code::HeaderRepeated),
        Ok(None) | Err(_) => Err(Code::SignedPartMissing),
    }
}

fn bytes(text: Cow<'_, str>) -> Cow<'_, [u8]> {
    match text {
        Cow::Borrowed(text) => Cow::Borrowed(text.as_bytes()),
        Cow::Owned(text) => Cow::Owned(text.into_bytes()),
    }
}

/// The candidates that can be signatures of this hash. One that cannot is skipped: a provider that rolls its scheme
/// sends old and new ones side by side.
fn decode(rule: &SigRule, hash: Hash, candidates: &[&str]) -> Result<Vec<Tag>, Code> {
    let tags: Vec<Tag> = candidates.iter().filter_map(|text| rule.encoding.decode(text, hash)).collect();
    if tags.is_empty() { Err(Code::SignatureMalformed) } else { Ok(tags) }
}

/// Every key is tried on every candidate, so that the time taken does not tell which one matched.
fn check_tags(keys: &[Key], content: &[Cow<'_, [u8]>], tags: &[Tag]) -> Result<(), Code> {
    let mut right = Choice::from(0);
    for key in keys.iter().filter_map(Key::as_hmac) {
        let expected = tag(key, content);
        for tag in tags {
            right |= expected.as_ref().ct_eq(tag.as_bytes());
        }
    }
    if bool::from(right) { Ok(()) } else { Err(Code::SignatureMismatch) }
}

/// The signature of the content.
pub(crate) fn tag(key: &hmac::Key, content: &[Cow<'_, [u8]>]) -> hmac::Tag {
    let mut context = hmac::Context::with_key(key);
    content.iter().for_each(|piece| context.update(piece));
    context.sign()
}

fn check_token(keys: &[Key], candidates: &[&str]) -> Result<(), Code> {
    let mut right = Choice::from(0);
    for key in keys.iter().filter_map(Key::as_token) {
        for candidate in candidates {
            right |= key.ct_eq(candidate.as_bytes());
        }
    }
    if bool::from(right) { Ok(()) } else { Err(Code::SignatureMismatch) }
}

/// Both ways, inclusive. The last check: a stale time that is reported belongs to a real signature, so it means a
/// replay or a wrong clock and no noise.
fn check_age(source: &Source, stamp: Option<Stamp>, now: Timestamp) -> Result<(), Code> {
    let tolerance = source.tolerance.unwrap_or_else(|| source.scheme.tolerance());
    let (Some(stamp), Tolerance::Within(limit)) = (stamp, tolerance) else { return Ok(()) };
    let now = if stamp.whole_seconds { now.as_second().saturating_mul(1_000) } else { now.as_millisecond() };
    if u128::from(now.abs_diff(stamp.millis)) <= limit.as_millis() {
        Ok(())
    } else if stamp.millis < now {
        Err(Code::TimestampStale)
    } else {
        Err(Code::TimestampFuture)
    }
}
