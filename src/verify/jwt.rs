//! Checking a signed token, and that it is about this request.
//!
//! Invariant: nothing that a token says counts before its signature was found right, but for the algorithm and the
//! key's name, which choose only among those that scheme and source list. Tokens are read strictly: three parts in
//! canonical base64url, a JSON object without a key that stands there twice, no extension that has to be understood. A
//! laxer reader would see another token than this one.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jiff::Timestamp;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use serde_json::Value;

use super::content::{Inputs, url_text};
use super::{Hashed, Match, check_age, said_hash, stamp, timestamp};
use crate::config::{Source, Tolerance};
use crate::error::Code;
use crate::parts::{Fault, Parts};
use crate::provider::jwt::{Alg, JwtRule};
use crate::provider::place::Place;
use crate::provider::signature::Stamp;
use crate::provider::token_key::TokenKey;
use crate::provider::{FetchedKeys, Key};
use crate::verify::chain;

/// Largest token. What it stands in has a limit of its own, and a header's is lower.
const TOKEN_MAX: usize = 256 << 10;
/// Largest signature: RSA with 8192 bits.
const SIGNATURE_MAX: usize = 1024;

/// Checks the token; gives the index of the secret that matched, or 0 for the set that was fetched.
pub(super) fn check(
    source: &Source,
    rule: &JwtRule,
    parts: &Parts<'_>,
    fetched: &FetchedKeys,
    now: Timestamp,
) -> Result<usize, Code> {
    let keys = if source.keys.is_empty() { fetched.set() } else { &source.keys };
    if keys.is_empty() {
        return wanted(source, rule, parts, now).and(Err(Code::SignatureMismatch));
    }
    let text = text(parts)?;
    let token = Token::parse(&text, rule)?;
    let stamp = read_stamp(source, parts)?;
    let key = check_signature(source, &token, keys, parts, stamp, now)?;
    check_meaning(source, &token, parts, stamp, now)?;
    Ok(key)
}

/// The key that a token names, of those that the provider publishes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WantedKey {
    id: Option<String>,
    alg: Alg,
}

impl WantedKey {
    /// Whether one of the keys can be the one.
    pub(crate) fn is_in(&self, keys: &Key) -> bool {
        keys.as_tokens().iter().any(|key| key.may_be(self.id.as_deref()) && key.fits(self.alg))
    }
}

/// The key that the token names. Nobody vouches for it yet, and no key is needed to refuse what would be refused with one.
pub(super) fn wanted(
    source: &Source,
    rule: &JwtRule,
    parts: &Parts<'_>,
    now: Timestamp,
) -> Result<WantedKey, Code> {
    let text = text(parts)?;
    let token = Token::parse(&text, rule)?;
    if source.key_set().is_some() && token.alg.hmac().is_some() {
        return Err(Code::SignedOtherwise);
    }
    let stamp = read_stamp(source, parts)?;
    token.signature()?;
    token.contents(inputs(source, parts))?;
    check_meaning(source, &token, parts, stamp, now)?;
    Ok(WantedKey { id: token.key_id().map(str::to_owned), alg: token.alg })
}

fn read_stamp(source: &Source, parts: &Parts<'_>) -> Result<Option<Stamp>, Code> {
    let scheme = source.scheme.as_ref();
    let time = match &scheme.ts {
        Some(ts) => timestamp(ts, &scheme.sig, parts, &[])?,
        None => None,
    };
    stamp(scheme, time.as_deref())
}

/// What something else than claims is put together from, where that is signed.
fn inputs<'p, 'a>(source: &'p Source, parts: &'p Parts<'a>) -> Inputs<'p, 'a> {
    Inputs { parts, time: None, id: None, secret: None, time_header: source.scheme.time_header() }
}

/// The token as it stands in the request.
pub(crate) fn text<'a>(parts: &Parts<'a>) -> Result<Cow<'a, str>, Code> {
    match parts.token() {
        Ok(Some(text)) if text.len() > TOKEN_MAX => Err(Code::SignatureMalformed),
        Ok(Some(text)) if !text.is_empty() => Ok(text),
        Ok(_) | Err(Fault::NotJson) => Err(Code::SignatureMissing),
        Err(Fault::Invalid) => Err(Code::SignatureMalformed),
        Err(Fault::Twice) => Err(Code::HeaderRepeated),
    }
}

/// A token that was read and not yet found right.
pub(crate) struct Token<'t> {
    rule: &'t JwtRule,
    /// Its header, as it is signed.
    head: &'t str,
    /// Header, dot and claims, as they are signed.
    input: &'t str,
    header: Object,
    /// None where something else of the request is signed in their place.
    pub(crate) claims: Object,
    signature: &'t str,
    pub(crate) alg: Alg,
}

impl<'t> Token<'t> {
    /// Reads a token as the rule wants it.
    ///
    /// # Errors
    /// It is no token, or signed in a way that the rule does not take.
    pub(crate) fn parse(text: &'t str, rule: &'t JwtRule) -> Result<Self, Code> {
        let (input, signature) = text.rsplit_once('.').ok_or(Code::SignatureMalformed)?;
        let (head, middle) = input.split_once('.').ok_or(Code::SignatureMalformed)?;
        if middle.contains('.') {
            return Err(Code::SignatureMalformed);
        }
        let header = object(head)?;
        let alg = header.text("alg").and_then(Alg::named).filter(|alg| rule.algs.contains(alg));
        let alg = alg.ok_or(Code::SignedOtherwise)?;
        // What has to be understood and is not (RFC 7515, 4.1.11), and a payload that is not encoded (RFC 7797).
        if header.0.contains_key("crit") || header.0.contains_key("b64") {
            return Err(Code::SignedOtherwise);
        }
        if header.0.get("kid").is_some_and(|id| !id.is_string()) {
            return Err(Code::SignatureMalformed);
        }
        let claims = match (rule.sign.is_empty(), middle.is_empty()) {
            (true, false) => object(middle)?,
            (false, true) => Object::default(),
            _ => return Err(Code::SignatureMalformed),
        };
        Ok(Self { rule, head, input, header, claims, signature, alg })
    }

    /// The name of the key.
    pub(crate) fn key_id(&self) -> Option<&str> {
        self.header.text("kid")
    }

    /// What is signed, in the forms that there are of it.
    fn contents(&self, inputs: Inputs<'_, '_>) -> Result<Vec<Vec<u8>>, Code> {
        if self.rule.sign.is_empty() {
            return Ok(vec![self.input.as_bytes().to_vec()]);
        }
        let mut found = Vec::new();
        let mut missing = Code::SignedPartMissing;
        for sign in &self.rule.sign {
            match inputs.content(sign) {
                Ok(content) => found.push(detached(self.head, &content)),
                Err(code) => missing = code,
            }
        }
        if found.is_empty() { Err(missing) } else { Ok(found) }
    }

    fn signature(&self) -> Result<Vec<u8>, Code> {
        if self.signature.is_empty() || self.signature.len() > 2 * SIGNATURE_MAX {
            return Err(Code::SignatureMalformed);
        }
        URL_SAFE_NO_PAD.decode(self.signature).or(Err(Code::SignatureMalformed))
    }

    /// The certificates in the header, the leaf's first.
    fn certificates(&self) -> Option<Vec<&str>> {
        self.header.0.get("x5c")?.as_array()?.iter().map(Value::as_str).collect()
    }
}

/// Header, dot, and the content in base64url.
fn detached(head: &str, content: &[Cow<'_, [u8]>]) -> Vec<u8> {
    format!("{head}.{}", URL_SAFE_NO_PAD.encode(content.concat())).into_bytes()
}

fn check_signature(
    source: &Source,
    token: &Token<'_>,
    keys: &[Key],
    parts: &Parts<'_>,
    stamp: Option<Stamp>,
    now: Timestamp,
) -> Result<usize, Code> {
    let signature = token.signature()?;
    let contents = token.contents(inputs(source, parts))?;
    let mut matched = Match::default();
    for (index, key) in (0..).zip(keys) {
        for key in key.as_tokens().iter().filter(|key| key.may_be(token.key_id()) && key.fits(token.alg)) {
            let leaf = leaf(token, key, stamp, now)?;
            let key = leaf.as_ref().unwrap_or(key);
            for content in &contents {
                matched.add(index, 0, key.verifies(token.alg, content, &signature));
            }
        }
    }
    matched.key()
}

/// The key of the token's own certificate, where that is what signs.
fn leaf(
    token: &Token<'_>,
    root: &TokenKey,
    stamp: Option<Stamp>,
    now: Timestamp,
) -> Result<Option<TokenKey>, Code> {
    let (Some(rule), Some(root)) = (token.rule.chain, root.root()) else { return Ok(None) };
    let certificates = token.certificates().ok_or(Code::SignedPartMissing)?;
    // Certificates expire, and what they signed before stays signed.
    let time = stamp.and_then(|stamp| Timestamp::from_millisecond(stamp.millis).ok()).unwrap_or(now);
    Ok(Some(chain::leaf_key(rule, root, &certificates, time).unwrap_or_else(TokenKey::none)))
}

/// Everything but the signature.
fn check_meaning(
    source: &Source,
    token: &Token<'_>,
    parts: &Parts<'_>,
    stamp: Option<Stamp>,
    now: Timestamp,
) -> Result<(), Code> {
    check_said(source, parts)?;
    check_claims(source, token, parts)?;
    check_clock(source, token, now)?;
    check_age(source, stamp, now)
}

/// The hashes of body and URL, and other places whose text is fixed.
fn check_said(source: &Source, parts: &Parts<'_>) -> Result<(), Code> {
    let scheme = source.scheme.as_ref();
    let empty = parts.body.is_empty();
    match said_hash(scheme.body_hash.as_ref(), parts, &[parts.body]) {
        Ok(Hashed::Absent) if !empty => return Err(Code::BodyNotSigned),
        // There was a body, and it was taken away.
        Ok(Hashed::Right) if empty => return Err(Code::BodyHashMismatch),
        Ok(_) => {}
        Err(()) => return Err(Code::BodyHashMismatch),
    }
    if let Some(rule) = &scheme.url_hash {
        let url = url_text(parts)?;
        if said_hash(Some(rule), parts, &[url.as_bytes()]) != Ok(Hashed::Right) {
            return Err(Code::UrlHashMismatch);
        }
    }
    Ok(())
}

/// Claims that have to be there, and those that have to say something.
fn check_claims(source: &Source, token: &Token<'_>, parts: &Parts<'_>) -> Result<(), Code> {
    for (place, wanted) in &source.scheme.require {
        let (said, otherwise) = match place {
            Place::Token { part, steps } => {
                let raw = parts.token_value(*part, steps).or(Err(Code::ClaimMismatch))?;
                let value = raw.and_then(|raw| serde_json::from_str::<Value>(&raw).ok());
                (value.is_some_and(|value| says(&value, wanted)), Code::ClaimMismatch)
            }
            place => {
                (parts.read(place).is_ok_and(|text| text.as_deref() == Some(wanted)), Code::SignedOtherwise)
            }
        };
        if !said {
            return Err(otherwise);
        }
    }
    let has = |name: &String| token.claims.0.get(name).is_some_and(|value| !value.is_null());
    let wrong = unlike(source, token.rule, &token.claims).next().is_some();
    if wrong || !token.rule.need.iter().all(has) { Err(Code::ClaimMismatch) } else { Ok(()) }
}

/// Claims that do not say what the source wants.
pub(crate) fn unlike<'s>(
    source: &'s Source,
    rule: &JwtRule,
    claims: &Object,
) -> impl Iterator<Item = &'s str> {
    let unlike = |(name, wanted): &(&'s String, &String)| {
        let asked = rule.ask.iter().find(|ask| ask.name == **name);
        let value = match asked {
            Some(ask) => ask.pointers.iter().find_map(|pointer| claims.at(pointer)),
            None => claims.at(name),
        };
        !value.is_some_and(|value| says(value, wanted))
    };
    source.claims.iter().filter(unlike).map(|(name, _)| name.as_str())
}

/// Whether the value is that, or a list with that in it, as `aud` can be (RFC 7519, 4.1.3).
pub(crate) fn says(value: &Value, wanted: &str) -> bool {
    match value {
        Value::String(text) => text == wanted,
        Value::Number(number) => number.to_string() == wanted,
        Value::Bool(truth) => wanted == if *truth { "true" } else { "false" },
        Value::Array(list) => list.iter().any(|item| item.as_str() == Some(wanted)),
        Value::Null | Value::Object(_) => false,
    }
}

/// `exp` is the first moment at which the token is no good, `nbf` the first at which it is (RFC 7519, 4.1.4 and 4.1.5).
fn check_clock(source: &Source, token: &Token<'_>, now: Timestamp) -> Result<(), Code> {
    let (exp, nbf) = (token.claims.seconds("exp")?, token.claims.seconds("nbf")?);
    if source.tolerance == Some(Tolerance::Off) {
        return Ok(());
    }
    let leeway = i64::try_from(token.rule.leeway.as_secs()).unwrap_or(0);
    let now = now.as_second();
    if exp.is_some_and(|exp| exp.saturating_add(leeway) <= now) {
        return Err(Code::TimestampStale);
    }
    if nbf.is_some_and(|nbf| nbf.saturating_sub(leeway) > now) {
        return Err(Code::TimestampFuture);
    }
    Ok(())
}

/// A JSON object in which no key stands twice.
#[derive(Debug, Default)]
pub(crate) struct Object(pub(crate) BTreeMap<String, Value>);

impl Object {
    fn text(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.as_str()
    }

    /// What stands at a pointer, or under a name.
    fn at(&self, place: &str) -> Option<&Value> {
        let Some(pointer) = place.strip_prefix('/') else { return self.0.get(place) };
        let (first, rest) = pointer.split_at(pointer.find('/').unwrap_or(pointer.len()));
        self.0.get(&first.replace("~1", "/").replace("~0", "~"))?.pointer(rest)
    }

    /// A `NumericDate`, without its fraction.
    pub(crate) fn seconds(&self, key: &str) -> Result<Option<i64>, Code> {
        match self.0.get(key) {
            None => Ok(None),
            Some(value) => {
                let seconds = value.as_i64().or_else(|| whole(value.as_f64()?));
                seconds.map(Some).ok_or(Code::TimestampMalformed)
            }
        }
    }
}

/// The whole part of a number that a clock could show.
fn whole(number: f64) -> Option<i64> {
    let text = format!("{:.0}", number.floor());
    text.parse().ok()
}

/// An object in base64url.
fn object(segment: &str) -> Result<Object, Code> {
    let json = URL_SAFE_NO_PAD.decode(segment).or(Err(Code::SignatureMalformed))?;
    let mut document = serde_json::Deserializer::from_slice(&json);
    let object = document.deserialize_map(ObjectVisitor).and_then(|object| document.end().map(|()| object));
    object.or(Err(Code::SignatureMalformed))
}

struct ObjectVisitor;

impl<'de> Visitor<'de> for ObjectVisitor {
    type Value = Object;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Object, M::Error> {
        let mut object = Object::default();
        while let Some((key, value)) = map.next_entry::<String, Value>()? {
            if object.0.insert(key, value).is_some() {
                return Err(M::Error::custom("a key stands there twice"));
            }
        }
        Ok(object)
    }
}

#[cfg(test)]
mod tests;
