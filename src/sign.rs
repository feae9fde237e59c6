//! Signing a request as a provider would: the inverse of `verify`, for `hapax send` and for tests.
//!
//! Invariant: what this makes, `verify` accepts and `identify` names as promised, since both read the scheme through
//! the same code.

use bytes::Bytes;
use http::header::HeaderMap;
use http::{HeaderName, HeaderValue, Method};
use jiff::Timestamp;

use crate::identify::event_id;
use crate::parts::Parts;
use crate::provider::place::Place;
use crate::provider::signature::TsFrom;
use crate::provider::template::{Piece, Template};
use crate::provider::{Key, Kind, Scheme};
use crate::verify::{signed_content, tag};

/// A request that is to be signed.
#[derive(Debug, Clone, Copy)]
pub struct Draft<'a> {
    /// Usually POST.
    pub method: &'a Method,
    /// The base of the URL as the provider knows it; needed only where the scheme signs it.
    pub public_url: Option<&'a str>,
    /// Path and query.
    pub path: &'a str,
    /// The raw body.
    pub body: &'a Bytes,
    /// The id, for schemes that have it in a header; a fresh one if not given. Elsewhere the body has it.
    pub id: Option<&'a str>,
    /// The time of signing.
    pub now: Timestamp,
}

/// What makes a draft a delivery of the provider's.
#[derive(Debug, Clone)]
pub struct Signed {
    /// To be added to the request.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// The id that the event will have; `None` if the scheme's requests have no identity.
    pub id: Option<String>,
}

/// Signs a draft.
///
/// # Errors
/// What is missing, in words for the person who wants to send.
pub fn sign(scheme: &Scheme, key: &Key, draft: &Draft<'_>) -> Result<Signed, String> {
    let mut headers = HeaderMap::new();
    add_id(scheme, draft, &mut headers)?;
    let time = add_time(scheme, draft, &mut headers)?;
    add_signed_headers(scheme, &mut headers)?;
    add_signature(scheme, key, draft, time.as_deref(), &mut headers)?;
    let id = resulting_id(scheme, draft, &headers)?;
    let headers = headers.iter().map(|(name, value)| (name.clone(), value.clone())).collect();
    Ok(Signed { headers, id })
}

/// A fresh id in the form of a UUID.
#[must_use]
pub fn fresh_id() -> String {
    let digits = hex::encode(rand::random::<[u8; 16]>());
    let cut = |from: usize, to: usize| digits.get(from..to).unwrap_or_default();
    format!("{}-{}-{}-{}-{}", cut(0, 8), cut(8, 12), cut(12, 16), cut(16, 20), cut(20, 32))
}

fn add(headers: &mut HeaderMap, name: &HeaderName, text: &str) -> Result<(), String> {
    let value = HeaderValue::from_str(text).ok();
    let value = value.ok_or_else(|| format!("{text:?} cannot stand in the header {name}"))?;
    headers.insert(name, value);
    Ok(())
}

fn add_id(scheme: &Scheme, draft: &Draft<'_>, headers: &mut HeaderMap) -> Result<(), String> {
    let Some(rule) = scheme.event.ids.first() else { return Ok(()) };
    let mut given = draft.id;
    for name in rule.places.iter().filter_map(Place::header) {
        match given.take() {
            Some(id) => add(headers, name, id)?,
            None => add(headers, name, &fresh_id())?,
        }
    }
    Ok(())
}

/// The timestamp's text; where it stands in the body, that is the one that is signed.
fn add_time(scheme: &Scheme, draft: &Draft<'_>, headers: &mut HeaderMap) -> Result<Option<String>, String> {
    let Some(rule) = &scheme.ts else { return Ok(None) };
    let text = rule.unit.print(draft.now);
    match &rule.from {
        TsFrom::Label(_) => Ok(Some(text)),
        TsFrom::Places(places) => match places.first() {
            Some(Place::Header(name)) => {
                add(headers, name, &text)?;
                Ok(Some(text))
            }
            Some(place) => {
                let found = parts(scheme, draft, headers).read(place).ok().flatten();
                match found {
                    None if !rule.optional => {
                        Err("the timestamp of this scheme stands in the body: put it there".to_owned())
                    }
                    found => Ok(found.map(std::borrow::Cow::into_owned)),
                }
            }
            None => Ok(None),
        },
    }
}

/// Other headers that are signed (a nonce, say) get random text.
fn add_signed_headers(scheme: &Scheme, headers: &mut HeaderMap) -> Result<(), String> {
    let Kind::Hmac { sign, .. } = &scheme.kind else { return Ok(()) };
    for name in sign.places().filter_map(Place::header) {
        if !headers.contains_key(name) {
            add(headers, name, &fresh_id())?;
        }
    }
    Ok(())
}

fn add_signature(
    scheme: &Scheme,
    key: &Key,
    draft: &Draft<'_>,
    time: Option<&str>,
    headers: &mut HeaderMap,
) -> Result<(), String> {
    let Some(Place::Header(name)) = scheme.sig.from.first() else {
        return Err("the signature of this scheme stands in the body: sign it there yourself".to_owned());
    };
    let value = match &scheme.kind {
        Kind::Hmac { sign, .. } => hmac_text(scheme, sign, key, draft, time, headers)?,
        Kind::Token => token_text(key)?,
    };
    let Some(labels) = &scheme.sig.labels else { return add(headers, name, &value) };
    let label = labels.names.first().map_or("", String::as_str);
    let signature = format!("{label}{}{value}", labels.assign);
    let text = match (scheme.ts.as_ref().map(|rule| &rule.from), time, &scheme.sig.split) {
        (Some(TsFrom::Label(label)), Some(time), Some(split)) => {
            format!("{label}{}{time}{split}{signature}", labels.assign)
        }
        _ => signature,
    };
    add(headers, name, &text)
}

fn hmac_text(
    scheme: &Scheme,
    sign: &Template,
    key: &Key,
    draft: &Draft<'_>,
    time: Option<&str>,
    headers: &HeaderMap,
) -> Result<String, String> {
    let key = key.as_hmac().ok_or("the key was not made for this scheme")?;
    if draft.public_url.is_none() && sign.has(|piece| matches!(piece, Piece::Url)) {
        return Err("this scheme signs the URL: give the public URL".to_owned());
    }
    let parts = parts(scheme, draft, headers);
    let id_header = scheme.event.ids.first().and_then(|rule| rule.header());
    let id = id_header.and_then(|name| headers.get(name)).and_then(|value| value.to_str().ok());
    let content = signed_content(sign, &parts, time, id)
        .map_err(|code| format!("a part that this scheme signs is not in the request ({})", code.as_str()))?;
    Ok(scheme.sig.encoding.encode(tag(key, &content).as_ref()))
}

fn token_text(key: &Key) -> Result<String, String> {
    let bytes = key.as_token().ok_or("the key was not made for this scheme")?;
    String::from_utf8(bytes.to_vec()).or(Err("the token is not text".to_owned()))
}

fn parts<'a>(scheme: &'a Scheme, draft: &Draft<'a>, headers: &'a HeaderMap) -> Parts<'a> {
    Parts::new((draft.method, draft.public_url, draft.path), headers, draft.body, &scheme.signed)
}

fn resulting_id(scheme: &Scheme, draft: &Draft<'_>, headers: &HeaderMap) -> Result<Option<String>, String> {
    let target = (draft.method, draft.public_url, draft.path);
    let parts = Parts::new(target, headers, draft.body, &scheme.event.pointers);
    let signed = scheme.signs_id().then_some(0);
    event_id(&scheme.event, signed, &parts, usize::MAX).map_err(|code| {
        let rules: Vec<&str> = scheme.id_rules().collect();
        format!("the body gives no id ({}): it should stand at {}", code.as_str(), rules.join(" or "))
    })
}
