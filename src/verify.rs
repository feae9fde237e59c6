//! Signature and timestamp check.
//!
//! Invariant: a [`Verified`] exists only for a request that somebody signed who knows one of the source's secrets.
//! The check is over the raw bytes, compares decoded signatures in constant time, reads no clock, does no I/O and
//! has no way to panic. What decides (algorithm, labels, places) is the scheme's; nothing in the request chooses.

mod chain;
pub(crate) mod content;
pub(crate) mod jwt;
mod pointed;
#[cfg(test)]
mod properties;
mod signed;

use std::borrow::Cow;

use http::HeaderMap;
use jiff::Timestamp;

use crate::body::Received;
use crate::config::{Source, Tolerance};
use crate::error::Code;
use crate::guard::{Guard, SignedBytes};
use crate::parts::{self, Fault, Parts};
use crate::provider::place::Place;
use crate::provider::signature::{Labels, SigRule, Stamp, TsFrom, TsRule, Unit};
use crate::provider::{Every, FetchedKeys, Key, Kind, Scheme};
use content::Inputs;
pub(crate) use jwt::WantedKey;
pub(crate) use pointed::{Wanted, wanted};
use pointed::{check_said, pinned, used_algorithm};
pub(crate) use signed::tag;
use signed::{Hashed, Match, Signed, check_token, credentials, decode_any, key_id, said_hash};

/// Most signatures that one request may offer. A rotation needs two or three; each costs a comparison.
const CANDIDATES_MAX: usize = 32;

/// A request whose signature is right. Only [`verify`] makes one.
#[derive(Debug)]
pub struct Verified {
    received: Received,
    key: usize,
    signed_id: Option<usize>,
    signed_bytes: Option<SignedBytes>,
}

impl Verified {
    /// The request.
    #[must_use]
    pub fn request(&self) -> &Received {
        &self.received
    }

    /// Which of the source's secrets matched.
    #[must_use]
    pub fn key(&self) -> usize {
        self.key
    }

    /// The request, and the one id rule whose header was signed if the scheme signs the id: no other header may name
    /// the event; and what was signed, if the source watches that.
    pub(crate) fn into_parts(self) -> (Received, Option<usize>, Option<SignedBytes>) {
        (self.received, self.signed_id, self.signed_bytes)
    }
}

/// Checks signature and timestamp. `now` is the time to check against.
///
/// # Errors
/// The reason, for log and metric only; the sender is told nothing but "refused".
pub fn verify(received: Received, now: Timestamp) -> Result<Verified, Code> {
    verify_with(received, &FetchedKeys::None, now)
}

/// As [`verify`], with the keys that were fetched for the request, if the source has none of its own.
///
/// # Errors
/// The reason.
pub fn verify_with(received: Received, fetched: &FetchedKeys, now: Timestamp) -> Result<Verified, Code> {
    let Checked { key, signed_id, signed_bytes } = check(&received, fetched, now)?;
    Ok(Verified { received, key, signed_id, signed_bytes })
}

/// Whether the request offers a signature, right or wrong.
pub(crate) fn has_signature(received: &Received) -> bool {
    let scheme = received.source.scheme.as_ref();
    let texts = signature_texts(&scheme.sig, &Parts::of(received, &scheme.signed));
    texts.map_or(true, |texts| !texts.is_empty())
}

/// Whether the request is signed with that key, whatever the source's own are.
pub(crate) fn is_signed_with(received: &Received, key: &Key, now: Timestamp) -> bool {
    let source = Source { keys: vec![key.clone()], ..received.source.as_ref().clone() };
    let scheme = source.scheme.as_ref();
    refuse_repeated(scheme, &received.head.headers).is_ok()
        && check_parts(&source, &Parts::of(received, &scheme.signed), &FetchedKeys::None, now).is_ok()
}

/// A request, or an item of one, that is signed.
struct Checked {
    /// The secret that matched.
    key: usize,
    /// The id rule whose header was signed.
    signed_id: Option<usize>,
    /// What was signed, if the source watches that.
    signed_bytes: Option<SignedBytes>,
}

fn check(received: &Received, fetched: &FetchedKeys, now: Timestamp) -> Result<Checked, Code> {
    let source = received.source.as_ref();
    let scheme = source.scheme.as_ref();
    refuse_repeated(scheme, &received.head.headers)?;
    match &scheme.every {
        None => check_parts(source, &Parts::of(received, &scheme.signed), fetched, now),
        Some(every) => check_every(source, every, received, now),
    }
}

/// Each item by itself, so that none comes in beside one that is signed.
fn check_every(source: &Source, every: &Every, received: &Received, now: Timestamp) -> Result<Checked, Code> {
    let items = parts::list(&received.body, &every.pointers, every.items).or(Err(Code::SignatureMissing))?;
    if items.len() > source.batch_items_max {
        return Err(Code::BatchTooLarge);
    }
    let mut first = None;
    for item in items {
        let parts = Parts::item(received, item.get().as_bytes(), &source.scheme.signed);
        let checked = check_parts(source, &parts, &FetchedKeys::None, now)?;
        first.get_or_insert(checked);
    }
    first.ok_or(Code::SignatureMissing)
}

fn check_parts(
    source: &Source,
    parts: &Parts<'_>,
    fetched: &FetchedKeys,
    now: Timestamp,
) -> Result<Checked, Code> {
    let scheme = source.scheme.as_ref();
    if let Kind::Jwt(rule) = &scheme.kind {
        let key = jwt::check(source, rule, parts, fetched, now)?;
        return Ok(Checked { key, signed_id: None, signed_bytes: None });
    }
    let texts = signature_texts(&scheme.sig, parts)?;
    let candidates = candidates(&scheme.sig, &texts)?;
    check_said(source, parts)?;
    pinned(scheme, parts)?;
    let time = match &scheme.ts {
        Some(rule) => timestamp(rule, &scheme.sig, parts, &texts)?,
        None => None,
    };
    let stamp = stamp(scheme, time.as_deref())?;
    let id = if scheme.signs_id() { Some(signed_id(scheme, parts)?) } else { None };
    let mut signed_bytes = None;
    let key = match &scheme.kind {
        Kind::Signed { algorithm, sign } => {
            let algorithm = used_algorithm(scheme, *algorithm, parts)?;
            let id = id.as_ref().map(|(_, text)| text.as_ref());
            let time_header = scheme.time_header();
            let inputs = Inputs { parts, time: time.as_deref(), id, secret: None, time_header };
            let body_hash = said_hash(scheme.body_hash.as_ref(), parts, &[parts.body]);
            let body_hash = body_hash.or(Err(Code::BodyHashMismatch))?;
            let key_id = key_id(scheme, parts)?;
            let signed = Signed { algorithm, sign, inputs, body_hash, key_id };
            let (key, form) = if scheme.pointing.cert.is_some() {
                let own = source.certificates.as_slice();
                let public = if own.is_empty() { fetched.certified() } else { own };
                signed.check_certified(&source.keys, public, &scheme.sig, &candidates)?
            } else {
                signed.check(&source.keys, &scheme.sig, &candidates)?
            };
            if source.guard != Guard::Off {
                signed_bytes = Some(signed.bytes(form)?);
            }
            key
        }
        // Checked above, in another order.
        Kind::Jwt(_) => return Err(Code::Internal),
        Kind::Token => check_token(&source.keys, candidates.iter().map(|text| text.as_bytes()))?,
        Kind::Basic => {
            let given: Vec<_> = candidates.iter().filter_map(|text| credentials(text)).collect();
            check_token(&source.keys, given.iter().map(Vec::as_slice))?
        }
    };
    check_age(source, stamp, now)?;
    Ok(Checked { key, signed_id: id.as_ref().map(|(rule, _)| *rule), signed_bytes })
}

/// Of two headers with one name, this check and whoever reads the request next might each take another.
fn refuse_repeated(scheme: &Scheme, headers: &HeaderMap) -> Result<(), Code> {
    let repeated = |name| headers.get_all(name).iter().nth(1).is_some();
    if scheme.once.iter().any(repeated) { Err(Code::HeaderRepeated) } else { Ok(()) }
}

/// All texts at the places of the signature.
pub(crate) fn signature_texts<'a>(rule: &SigRule, parts: &Parts<'a>) -> Result<Vec<Cow<'a, str>>, Code> {
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
pub(crate) fn candidates<'t>(rule: &'t SigRule, texts: &'t [Cow<'_, str>]) -> Result<Vec<&'t str>, Code> {
    let mut found = Vec::new();
    for item in texts.iter().flat_map(|text| rule.items(text)) {
        let value = match &rule.labels {
            None => Some(item),
            Some(labels) => labelled(labels, item, |label| labels.have(label)),
        };
        if found.len() == CANDIDATES_MAX && value.is_some() {
            return Err(Code::SignatureMalformed);
        }
        found.extend(value);
    }
    if found.is_empty() { Err(Code::SignatureMissing) } else { Ok(found) }
}

fn labelled<'t>(labels: &Labels, item: &'t str, wanted: impl Fn(&str) -> bool) -> Option<&'t str> {
    let (label, value) = item.split_once(labels.assign.as_str()).unwrap_or(("", item));
    wanted(label.trim()).then(|| value.trim())
}

/// The timestamp's received characters; `None` only if it may be missing.
pub(crate) fn timestamp<'t>(
    rule: &TsRule,
    sig: &'t SigRule,
    parts: &'t Parts<'_>,
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
pub(crate) fn signed_id<'a>(scheme: &Scheme, parts: &Parts<'a>) -> Result<(usize, Cow<'a, str>), Code> {
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

#[cfg(test)]
mod tests;
