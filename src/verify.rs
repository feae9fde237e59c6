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

use std::borrow::Cow;

use http::HeaderMap;
use jiff::Timestamp;
use ring::hmac;
use subtle::{Choice, ConditionallySelectable, ConstantTimeEq};

use crate::body::Received;
use crate::config::{Source, Tolerance};
use crate::error::Code;
use crate::guard::{Guard, SignedBytes};
use crate::parts::{self, Fault, Parts};
use crate::provider::place::Place;
use crate::provider::public_key::PublicKey;
use crate::provider::signature::{
    Algorithm, Hash, Labels, SaidHash, SigRule, Stamp, Tag, TagEncoding, TsFrom, TsRule, Unit,
};
use crate::provider::template::Template;
use crate::provider::{Every, FetchedKeys, Key, Kind, Scheme};
use content::Inputs;
pub(crate) use jwt::WantedKey;
pub(crate) use pointed::{Wanted, wanted};
use pointed::{check_said, pinned, used_algorithm};

/// Most signatures that one request may offer. A rotation needs two or three; each costs a comparison.
const CANDIDATES_MAX: usize = 32;
/// Most of those made with a private key, which cost a hundred times as much.
const PUBLIC_CANDIDATES_MAX: usize = 8;

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

/// What the body hashes to, as far as the request says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hashed {
    /// The scheme has no such thing.
    NotSaid,
    /// The request does not say it.
    Absent,
    /// It says it, and it is so.
    Right,
}

/// Whether the request says what the pieces hash to; an error if it says something else.
fn said_hash(rule: Option<&SaidHash>, parts: &Parts<'_>, pieces: &[&[u8]]) -> Result<Hashed, ()> {
    let Some(rule) = rule else { return Ok(Hashed::NotSaid) };
    let Some(text) = parts.read(&rule.from).or(Err(()))? else { return Ok(Hashed::Absent) };
    let said = rule.encoding.decode(&text, rule.hash);
    let is = rule.hash.digest(pieces.iter().copied());
    let right = said.is_some_and(|said| said.as_bytes().ct_eq(is.as_ref()).into());
    if right { Ok(Hashed::Right) } else { Err(()) }
}

/// The name that the request has for the key.
fn key_id<'a>(scheme: &Scheme, parts: &Parts<'a>) -> Result<Option<Cow<'a, str>>, Code> {
    let Some(place) = &scheme.key_id else { return Ok(None) };
    parts.read(place).map_err(|fault| match fault {
        Fault::Twice => Code::HeaderRepeated,
        Fault::Invalid | Fault::NotJson => Code::SignatureMalformed,
    })
}

/// What was signed, in one of the forms that there are of it, and how.
struct Signed<'t, 'p> {
    algorithm: Algorithm,
    sign: &'t [Template],
    inputs: Inputs<'t, 'p>,
    body_hash: Hashed,
    key_id: Option<Cow<'t, str>>,
}

impl Signed<'_, '_> {
    /// The bytes of that form, without the secret: a new secret makes no other bytes.
    fn bytes(&self, form: usize) -> Result<SignedBytes, Code> {
        let sign = self.sign.get(form).ok_or(Code::Internal)?;
        let content = (Inputs { secret: Some(&[]), ..self.inputs }).content(sign)?;
        Ok(SignedBytes::of(content.iter().map(AsRef::as_ref)))
    }

    /// Which key made one of the signatures, and over which form. Every key is tried on every one, so that the time
    /// taken does not tell which one matched.
    fn check(&self, keys: &[Key], rule: &SigRule, candidates: &[&str]) -> Result<(usize, usize), Code> {
        match self.algorithm {
            Algorithm::Hmac(hash) => {
                let tags = decode(rule, hash, candidates)?;
                self.matching(keys, |key, content, matched| {
                    let Some(expected) = key.as_hmac().map(|key| tag(key, content)) else { return };
                    matched.add_tags(expected.as_ref(), &tags);
                })
            }
            Algorithm::Hash(hash) => {
                let tags = decode(rule, hash, candidates)?;
                self.matching(keys, |_, content, matched| {
                    matched.add_tags(hash.digest(content.iter().map(AsRef::as_ref)).as_ref(), &tags);
                })
            }
            Algorithm::Ed25519 | Algorithm::EcdsaP256(_) | Algorithm::RsaPkcs1(_) => {
                let signatures = decode_any(rule, candidates)?;
                self.matching(keys, |key, content, matched| {
                    let id = self.key_id.as_deref();
                    let Some(key) = key.as_public().filter(|key| key.may_be(id)) else { return };
                    let content = content.concat();
                    let verifies = |text: &Vec<u8>| key.verifies(self.algorithm, &content, text);
                    matched.add(u8::from(signatures.iter().any(verifies)).into());
                })
            }
        }
    }

    /// As [`Self::check`], with keys out of certificates. The source's keys are then texts that are part of what is signed;
    /// which of them was is returned.
    fn check_certified(
        &self,
        secrets: &[Key],
        public: &[PublicKey],
        rule: &SigRule,
        candidates: &[&str],
    ) -> Result<(usize, usize), Code> {
        let signatures = decode_any(rule, candidates)?;
        if public.is_empty() {
            return Err(Code::KeyUnfit);
        }
        // Where no secret is signed, one that nobody looks at stands for all.
        let nothing = [Key::token(&[])];
        let secrets = if secrets.is_empty() { &nothing } else { secrets };
        self.matching(secrets, |_, content, matched| {
            let content = content.concat();
            let verifies = |key: &PublicKey, text: &Vec<u8>| key.verifies(self.algorithm, &content, text);
            let right = public.iter().any(|key| signatures.iter().any(|text| verifies(key, text)));
            matched.add(u8::from(right).into());
        })
    }

    /// The key for which some form matches; a form of which a part is missing is passed over.
    fn matching(
        &self,
        keys: &[Key],
        compare: impl Fn(&Key, &[Cow<'_, [u8]>], &mut Matching<'_>),
    ) -> Result<(usize, usize), Code> {
        let mut matched = Match::default();
        let mut nothing = None;
        for (form, sign) in (0..).zip(self.sign) {
            if self.body_hash == Hashed::Absent && !sign.has_body() {
                nothing = Some(Code::BodyNotSigned);
                continue;
            }
            for (index, key) in (0..).zip(keys) {
                let secret = key.as_token();
                match (Inputs { secret, ..self.inputs }).content(sign) {
                    Ok(content) => {
                        compare(key, &content, &mut Matching { matched: &mut matched, index, form });
                    }
                    Err(code) => {
                        nothing = Some(code);
                        break;
                    }
                }
            }
        }
        match (matched.key(), nothing) {
            // No form could be put together at all.
            (Err(_), Some(code)) if matched.compared == 0 => Err(code),
            (key, _) => Ok((key?, usize::try_from(matched.form).or(Err(Code::Internal))?)),
        }
    }
}

/// The candidates that can be signatures of this hash. One that cannot is skipped: a provider that rolls its scheme
/// sends old and new ones side by side.
fn decode(rule: &SigRule, hash: Hash, candidates: &[&str]) -> Result<Vec<Tag>, Code> {
    let tags: Vec<Tag> = candidates.iter().filter_map(|text| rule.encoding.decode(text, hash)).collect();
    if tags.is_empty() { Err(Code::SignatureMalformed) } else { Ok(tags) }
}

/// The signatures that were made with a private key; what is no such thing is skipped.
fn decode_any(rule: &SigRule, candidates: &[&str]) -> Result<Vec<Vec<u8>>, Code> {
    if candidates.len() > PUBLIC_CANDIDATES_MAX {
        return Err(Code::SignatureMalformed);
    }
    let found: Vec<_> = candidates.iter().filter_map(|text| rule.encoding.decode_any(text)).collect();
    if found.is_empty() { Err(Code::SignatureMalformed) } else { Ok(found) }
}

/// Which key matched, found without a branch on what matched.
#[derive(Default)]
struct Match {
    right: u8,
    key: u64,
    /// Which form of what is signed.
    form: u64,
    compared: usize,
}

impl Match {
    fn add(&mut self, key: u64, form: u64, equal: Choice) {
        self.key.conditional_assign(&key, equal);
        self.form.conditional_assign(&form, equal);
        self.right |= equal.unwrap_u8();
        self.compared += 1;
    }

    fn key(&self) -> Result<usize, Code> {
        if self.right == 0 {
            return Err(Code::SignatureMismatch);
        }
        usize::try_from(self.key).or(Err(Code::Internal))
    }
}

/// The match of one key.
struct Matching<'m> {
    matched: &'m mut Match,
    index: u64,
    form: u64,
}

impl Matching<'_> {
    fn add(&mut self, equal: Choice) {
        self.matched.add(self.index, self.form, equal);
    }

    fn add_tags(&mut self, expected: &[u8], tags: &[Tag]) {
        for tag in tags {
            self.add(expected.ct_eq(tag.as_bytes()));
        }
    }
}

/// The signature of the content.
pub(crate) fn tag(key: &hmac::Key, content: &[Cow<'_, [u8]>]) -> hmac::Tag {
    let mut signer = hmac::Context::with_key(key);
    for piece in content {
        signer.update(piece);
    }
    signer.sign()
}

fn check_token<'c>(keys: &[Key], given: impl Iterator<Item = &'c [u8]>) -> Result<usize, Code> {
    let given: Vec<_> = given.collect();
    let mut matched = Match::default();
    for (index, key) in (0..).zip(keys).filter_map(|(index, key)| Some((index, key.as_token()?))) {
        for given in &given {
            matched.add(index, 0, key.ct_eq(given));
        }
    }
    matched.key()
}

/// `name:password` of `Basic …`; `None` if it is something else.
fn credentials(text: &str) -> Option<Vec<u8>> {
    let (scheme, given) = text.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    TagEncoding::Base64.decode_any(given.trim_start())
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
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use crate::fixture::{NOW, now, received, scheme, source};

    use super::*;

    const STRIPE_LIKE: &str = r#"
        kind = "hmac"
        sign = "{ts}.{body}"
        sig = { from = "header:X-Sig", split = ",", assign = "=", label = "v1" }
        ts = { from = "sig:t", tolerance = 300 }
        id = "json:/id"
    "#;
    const PLAIN: &str = r#"
        kind = "hmac"
        sign = "{body}"
        sig = { from = "header:X-Sig", assign = "=", label = "sha256" }
        id = "header:X-Id"
    "#;
    const TWO_FAMILIES: &str = r#"
        kind = "hmac"
        sign = "{id}.{ts}.{body}"
        sig = { from = ["header:a-sig", "header:b-sig"] }
        ts = { from = ["header:a-ts", "header:b-ts"], tolerance = "5m" }
        id = ["header:a-id", "header:b-id"]
    "#;
    const BODY: &[u8] = br#"{"id":"e1"}"#;

    /// Template, body, signed content, verdict.
    type Row = (&'static str, &'static [u8], &'static str, Result<(), Code>);

    fn mac(algorithm: hmac::Algorithm, secret: &str, content: &[u8]) -> String {
        hex::encode(hmac::sign(&hmac::Key::new(algorithm, secret.as_bytes()), content))
    }

    fn sha256(secret: &str, content: &[u8]) -> String {
        mac(hmac::HMAC_SHA256, secret, content)
    }

    /// The `v1` of the body at a time.
    fn at(time: &str) -> String {
        sha256("k", &[time.as_bytes(), b".", BODY].concat())
    }

    fn verdict(toml: &str, secrets: &[&str], headers: &[(&str, &[u8])], body: &[u8]) -> Result<(), Code> {
        let source = source(&scheme(toml), secrets);
        verify(received(source, "/in/test", headers, body.to_vec()), now()).map(drop)
    }

    fn stripe(header: &str) -> Result<(), Code> {
        verdict(STRIPE_LIKE, &["k"], &[("x-sig", header.as_bytes())], BODY)
    }

    #[test]
    fn a_label_is_left_out_only_where_the_scheme_says_so() {
        let right = self::sha256("k", BODY);
        let accepts = |label: &str, text: &str| {
            let toml = PLAIN.replace("label = \"sha256\"", &format!("label = {label}"));
            verdict(&toml, &["k"], &[("x-sig", text.as_bytes())], BODY).is_ok()
        };
        for (label, bare, sha256, other) in [
            ("\"sha256\"", false, true, false),
            ("[\"sha256\", \"\"]", true, true, false),
            ("\"\"", true, false, false),
            ("\"*\"", false, true, true),
        ] {
            let found = ["", "sha256=", "sha1="].map(|prefix| accepts(label, &format!("{prefix}{right}")));
            assert_eq!(found, [bare, sha256, other], "{label}");
        }
    }

    #[test]
    fn labelled_items_are_read_strictly() {
        let right = at(&NOW.to_string());
        let upper = right.to_uppercase();
        let many = format!("t={NOW},{}v1={right}", format!("v1={right},").repeat(CANDIDATES_MAX));
        let table = [
            (format!("t={NOW},v1={right}"), Ok(())),
            (format!("t={NOW}, v1={right}"), Ok(())),
            (format!("v1={right},t={NOW}"), Ok(())),
            (format!("t={NOW},v1={upper}"), Ok(())),
            (format!("t={NOW},v0=00,v1=zz,v1=,v1={right},junk,,"), Ok(())),
            (format!("t={NOW}=junk,v1={right}"), Err(Code::TimestampMalformed)),
            (format!("t={NOW},t={NOW},v1={right}"), Err(Code::TimestampMalformed)),
            (format!("t={NOW},t=1,v1={right}"), Err(Code::TimestampMalformed)),
            (format!("t=+{NOW},v1={right}"), Err(Code::TimestampMalformed)),
            (format!("t=-{NOW},v1={right}"), Err(Code::TimestampMalformed)),
            (format!("t=0x10,v1={right}"), Err(Code::TimestampMalformed)),
            (format!("t=99999999999999999999,v1={right}"), Err(Code::TimestampMalformed)),
            (format!("t=9223372036854775807,v1={right}"), Err(Code::TimestampMalformed)),
            (format!("t=,v1={right}"), Err(Code::TimestampMissing)),
            (format!("v1={right}"), Err(Code::TimestampMissing)),
            (format!("T={NOW},v1={right}"), Err(Code::TimestampMissing)),
            (format!("t={NOW},v0={right}"), Err(Code::SignatureMissing)),
            (format!("t={NOW}"), Err(Code::SignatureMissing)),
            (String::new(), Err(Code::SignatureMissing)),
            (format!("t={NOW},v1=zz"), Err(Code::SignatureMalformed)),
            (format!("t={NOW},v1="), Err(Code::SignatureMalformed)),
            (format!("t={NOW},v1={right}00"), Err(Code::SignatureMalformed)),
            (format!("t={NOW},v1={}", &right[2..]), Err(Code::SignatureMalformed)),
            (many, Err(Code::SignatureMalformed)),
            (format!("t={NOW},v1={}", "00".repeat(32)), Err(Code::SignatureMismatch)),
            (format!("t=0{NOW},v1={right}"), Err(Code::SignatureMismatch)),
        ];
        for (header, wanted) in table {
            assert_eq!(stripe(&header), wanted, "{header}");
        }
    }

    #[test]
    fn an_opaque_timestamp_is_signed_and_not_read() {
        let toml = STRIPE_LIKE.replace("tolerance = 300", "unit = \"opaque\"");
        for (time, wanted) in [("when", Ok(())), ("a=b", Err(Code::TimestampMalformed))] {
            let header = format!("t={time},v1={}", at(time));
            assert_eq!(verdict(&toml, &["k"], &[("x-sig", header.as_bytes())], BODY), wanted, "{time}");
        }
    }

    #[test]
    fn the_algorithm_is_never_taken_from_the_request() {
        let right = sha256("k", BODY);
        let sha1 = mac(hmac::HMAC_SHA1_FOR_LEGACY_USE_ONLY, "k", BODY);
        let table = [
            (format!("sha256={right}"), Ok(())),
            (format!("sha256={}", right.to_uppercase()), Ok(())),
            (format!("SHA256={right}"), Err(Code::SignatureMissing)),
            (right.clone(), Err(Code::SignatureMissing)),
            (format!("sha1={sha1}"), Err(Code::SignatureMissing)),
            (format!("sha256={sha1}"), Err(Code::SignatureMalformed)),
            ("bogus=aa".to_owned(), Err(Code::SignatureMissing)),
            ("sha256".to_owned(), Err(Code::SignatureMissing)),
            ("=".to_owned(), Err(Code::SignatureMissing)),
            ("sha256=".to_owned(), Err(Code::SignatureMalformed)),
            ("sha256=zz".to_owned(), Err(Code::SignatureMalformed)),
            (format!("sha256={}", "a".repeat(60_000)), Err(Code::SignatureMalformed)),
        ];
        for (header, wanted) in table {
            assert_eq!(verdict(PLAIN, &["k"], &[("x-sig", header.as_bytes())], BODY), wanted, "{header}");
        }
        let other = [("x-hub-signature", right.as_bytes())];
        assert_eq!(verdict(PLAIN, &["k"], &other, BODY), Err(Code::SignatureMissing));
        assert_eq!(verdict(PLAIN, &["k"], &[("x-sig", b"sha256=\xff")], BODY), Err(Code::SignatureMalformed));
    }

    #[test]
    fn the_signature_is_over_the_raw_bytes() {
        for body in [
            "{\"id\":\"e\u{1F680}\u{e9}\"}".as_bytes(),
            b"text=caf\xe9&x=1",
            b"[{\"id\":1},\r\n{\"id\":2}]\r\n",
            b"a=*&b=~&c=+&d=%20",
            b"\xff\xfe\x00\x80",
            b"",
        ] {
            let header = format!("sha256={}", sha256("k", body));
            assert_eq!(verdict(PLAIN, &["k"], &[("x-sig", header.as_bytes())], body), Ok(()));
            let longer = [body, b"\n"].concat();
            let wanted = Err(Code::SignatureMismatch);
            assert_eq!(verdict(PLAIN, &["k"], &[("x-sig", header.as_bytes())], &longer), wanted);
        }
    }

    #[test]
    fn any_secret_of_the_source_may_match() {
        for (secret, wanted) in [("a", Ok(())), ("b", Ok(())), ("c", Err(Code::SignatureMismatch))] {
            let header = format!("sha256={}", sha256(secret, BODY));
            assert_eq!(verdict(PLAIN, &["a", "b"], &[("x-sig", header.as_bytes())], BODY), wanted);
        }
        let header = format!("sha256={}", sha256("", BODY));
        let wanted = Err(Code::SignatureMismatch);
        assert_eq!(verdict(PLAIN, &[], &[("x-sig", header.as_bytes())], BODY), wanted, "no secret at all");
    }

    #[test]
    fn a_header_that_decides_about_trust_must_not_be_repeated() {
        let time = NOW.to_string();
        let sig = sha256("k", &[b"i.", time.as_bytes(), b".", BODY].concat());
        let right: Vec<(&str, &[u8])> =
            vec![("a-id", b"i"), ("a-ts", time.as_bytes()), ("a-sig", sig.as_bytes())];
        assert_eq!(verdict(TWO_FAMILIES, &["k"], &right, BODY), Ok(()));
        for again in 0..3 {
            for value in [right[again].1, b"x"] {
                let mut headers = right.clone();
                headers.push((right[again].0, value));
                assert_eq!(verdict(TWO_FAMILIES, &["k"], &headers, BODY), Err(Code::HeaderRepeated));
                headers.swap(again, 3);
                assert_eq!(verdict(TWO_FAMILIES, &["k"], &headers, BODY), Err(Code::HeaderRepeated));
            }
        }
        let other_family = [&right[..], &[("b-id", b"x"), ("b-id", b"y")]].concat();
        assert_eq!(verdict(TWO_FAMILIES, &["k"], &other_family, BODY), Err(Code::HeaderRepeated));
        let repeatable = PLAIN.replace("label = \"sha256\"", "label = \"sha256\", repeat = true");
        let good = format!("sha256={}", sha256("k", BODY));
        let bad = format!("sha256={}", sha256("x", BODY));
        let headers = [("x-sig", bad.as_bytes()), ("x-sig", good.as_bytes())];
        assert_eq!(verdict(&repeatable, &["k"], &headers, BODY), Ok(()));
        assert_eq!(verdict(PLAIN, &["k"], &headers, BODY), Err(Code::HeaderRepeated));
    }

    #[test]
    fn the_window_is_inclusive_both_ways_and_the_source_overrides_it() {
        let within = |seconds| Some(Tolerance::Within(Duration::from_secs(seconds)));
        let table = [
            (-300, None, Ok(())),
            (-301, None, Err(Code::TimestampStale)),
            (300, None, Ok(())),
            (301, None, Err(Code::TimestampFuture)),
            (2, None, Ok(())),
            (-11, within(10), Err(Code::TimestampStale)),
            (-1000, within(1000), Ok(())),
            (-1_000_000, Some(Tolerance::Off), Ok(())),
        ];
        for (offset, tolerance, wanted) in table {
            let time = (NOW + offset).to_string();
            let header = format!("t={time},v1={}", at(&time));
            let mut source = source(&scheme(STRIPE_LIKE), &["k"]);
            source.tolerance = tolerance;
            // Half a second past the second that the sender could write must not count against it.
            let clock = Timestamp::from_millisecond(NOW * 1000 + 500).unwrap();
            let request = received(source, "/", &[("x-sig", header.as_bytes())], BODY);
            assert_eq!(verify(request, clock).map(drop), wanted, "{offset} {tolerance:?}");
        }
        let stale = format!("t=1,v1={}", "00".repeat(32));
        assert_eq!(stripe(&stale), Err(Code::SignatureMismatch), "stale is said of real signatures only");
    }

    #[test]
    fn units_are_read_strictly() {
        let seconds = |count: i64| Some(Stamp { millis: count * 1000, whole_seconds: true });
        let millis = |count| Some(Stamp { millis: count, whole_seconds: false });
        let table = [
            (Unit::Seconds, "1700000000", seconds(1_700_000_000)),
            (Unit::Seconds, "1700000000 ", None),
            (Unit::Seconds, "1.7e9", None),
            (Unit::Seconds, "", None),
            (Unit::Seconds, "\u{0661}", None),
            (Unit::Millis, "1700000000000", millis(1_700_000_000_000)),
            (Unit::SecondsOrMillis, "100000000000", seconds(100_000_000_000)),
            (Unit::SecondsOrMillis, "100000000001", millis(100_000_000_001)),
            (Unit::Rfc3339, "2023-11-14T22:13:20Z", millis(1_700_000_000_000)),
            (Unit::Rfc3339, "2023-11-14T22:13:20.5+00:00", millis(1_700_000_000_500)),
            (Unit::Rfc3339, "2023-11-14", None),
            (Unit::Rfc3339, "1700000000", None),
            (Unit::Opaque, "1700000000", None),
        ];
        for (unit, text, wanted) in table {
            assert_eq!(unit.parse(text), wanted, "{unit:?} {text}");
        }
    }

    #[test]
    fn only_the_id_that_was_signed_can_name_the_event() {
        let time = NOW.to_string();
        let sig = sha256("k", &[b"0.", time.as_bytes(), b".", BODY].concat());
        let headers: [(&str, &[u8]); 4] =
            [("a-id", b"0"), ("b-id", b"mine"), ("a-ts", time.as_bytes()), ("b-sig", sig.as_bytes())];
        let request = received(source(&scheme(TWO_FAMILIES), &["k"]), "/", &headers, BODY);
        let verified = verify(request, now()).unwrap();
        assert_eq!(crate::identify::identify(verified).map(drop), Err(Code::IdMissing));
        let none: [(&str, &[u8]); 2] = [("a-ts", time.as_bytes()), ("a-sig", sig.as_bytes())];
        assert_eq!(verdict(TWO_FAMILIES, &["k"], &none, BODY), Err(Code::SignedPartMissing));
    }

    #[test]
    fn the_url_is_the_public_one_with_path_and_query_as_received() {
        let toml = r#"
            kind = "hmac"
            sign = "{method}{url}{body}"
            sig = { from = "header:X-Sig" }
            id = "json:/id"
        "#;
        let path = "/in/a%2Fb?x=%27&y=1+2";
        let sig = sha256("k", &[b"POSThttps://hooks.example.com", path.as_bytes(), BODY].concat());
        let headers: [(&str, &[u8]); 3] =
            [("x-sig", sig.as_bytes()), ("host", b"evil.test"), ("x-forwarded-host", b"evil.test")];
        let mut own = source(&scheme(toml), &["k"]);
        assert!(own.scheme.signs_url());
        own.public_url = Some("https://hooks.example.com".to_owned());
        assert!(verify(received(own, path, &headers, BODY), now()).is_ok());
        let without = received(source(&scheme(toml), &["k"]), path, &headers, BODY);
        assert_eq!(verify(without, now()).map(drop), Err(Code::SignedPartMissing));
    }

    #[test]
    fn signed_parts_can_stand_in_query_form_and_json() {
        let toml = |sign: &str| {
            format!(
                "kind = \"hmac\"\nsign = \"{sign}\"\nsig = {{ from = \"header:X-Sig\" }}\nid = \"body:sha256\""
            )
        };
        let json = br#"{"a":{"b":"B\u0041"},"n":9007199254918489}"#;
        let table: [Row; 11] = [
            ("{query:q}", b"", "X y", Ok(())),
            ("{lower:query:q}", b"", "x y", Ok(())),
            ("{json:/a/b}-{json:/n}", json, "BA-9007199254918489", Ok(())),
            ("{form:f}", b"f=%41+b&g=1", "A b", Ok(())),
            ("{formjson:f#/x}", b"f=%7B%22x%22%3A7%7D", "7", Ok(())),
            ("{query:none}", b"", "", Err(Code::SignedPartMissing)),
            ("{json:/none}", json, "", Err(Code::SignedPartMissing)),
            ("{json:/a}", b"no json", "", Err(Code::SignedPartMissing)),
            ("{json:/a}", br#"{"a":"1","a":"1"}"#, "1", Err(Code::HeaderRepeated)),
            ("{form:f}", b"f=1&f=1", "1", Err(Code::HeaderRepeated)),
            ("{form:f}", br#"{"x":"&f=1&"}"#, "1", Err(Code::SignedPartMissing)),
        ];
        for (sign, body, content, wanted) in table {
            let sig = sha256("k", content.as_bytes());
            let source = source(&scheme(&toml(sign)), &["k"]);
            let request = received(source, "/p?q=X%20y", &[("x-sig", sig.as_bytes())], body);
            assert_eq!(verify(request, now()).map(drop), wanted, "{sign}");
        }
    }

    #[test]
    fn a_token_is_compared_whole() {
        let toml = "kind = \"token\"\nsig = { from = \"header:Authorization\" }\nid = \"json:/id\"";
        let table: [(&[u8], Result<(), Code>); 5] = [
            (b"Bearer abc", Ok(())),
            (b"Bearer ab", Err(Code::SignatureMismatch)),
            (b"Bearer abcd", Err(Code::SignatureMismatch)),
            (b"bearer abc", Err(Code::SignatureMismatch)),
            (b"", Err(Code::SignatureMissing)),
        ];
        for (value, wanted) in table {
            assert_eq!(verdict(toml, &["other", "Bearer abc"], &[("authorization", value)], BODY), wanted);
        }
        let twice: [(&str, &[u8]); 2] = [("authorization", b"Bearer abc"), ("authorization", b"x")];
        assert_eq!(verdict(toml, &["Bearer abc"], &twice, BODY), Err(Code::HeaderRepeated));
        assert_eq!(verdict(toml, &["Bearer abc"], &[], BODY), Err(Code::SignatureMissing));
    }

    #[test]
    fn base64_signatures_have_one_spelling() {
        let encoded = |encoding: &str| {
            format!(
                "kind = \"hmac\"\nsign = \"{{body}}\"\nsig = {{ from = \"header:X-Sig\", encoding = \"{encoding}\" }}\nid = \"json:/id\""
            )
        };
        let tag = hex::decode(sha256("k", b"x")).unwrap();
        let standard = crate::provider::signature::TagEncoding::Base64.encode(&tag);
        let url = crate::provider::signature::TagEncoding::Base64Url.encode(&tag);
        assert_eq!(verdict(&encoded("base64"), &["k"], &[("x-sig", standard.as_bytes())], b"x"), Ok(()));
        assert_eq!(verdict(&encoded("base64url"), &["k"], &[("x-sig", url.as_bytes())], b"x"), Ok(()));
        let unpadded = standard.trim_end_matches('=');
        let next = |text: &str| {
            let mut bytes = text.as_bytes().to_vec();
            *bytes.last_mut().unwrap() += 1;
            String::from_utf8(bytes).unwrap()
        };
        let padded = format!("{url}=");
        let headers = [("x-sig", padded.as_bytes())];
        assert_eq!(verdict(&encoded("base64url-padded"), &["k"], &headers, b"x"), Ok(()));
        for (encoding, wrong) in [
            ("base64", unpadded.to_owned()),
            ("base64", next(unpadded) + "="),
            ("base64url", next(&url)),
            ("base64url", padded.clone()),
            ("base64url-padded", url.clone()),
            ("base64url-padded", next(&url) + "="),
        ] {
            let headers = [("x-sig", wrong.as_bytes())];
            assert_eq!(
                verdict(&encoded(encoding), &["k"], &headers, b"x"),
                Err(Code::SignatureMalformed),
                "{wrong}"
            );
        }
    }

    #[test]
    fn a_wrong_key_kind_never_matches() {
        let token = scheme("kind = \"token\"\nsig = { from = \"header:X\" }\nid = []");
        let mut mixed = source(&scheme(PLAIN), &[]);
        mixed.keys = vec![token.key("k").unwrap()];
        let header = format!("sha256={}", sha256("k", BODY));
        let request = received(mixed, "/", &[("x-sig", header.as_bytes())], BODY);
        assert_eq!(verify(request, now()).map(drop), Err(Code::SignatureMismatch));
        assert_eq!(Arc::strong_count(&token), 1);
    }
}
