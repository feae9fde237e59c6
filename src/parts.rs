//! Reading the named places of a request.
//!
//! Invariant: a place that stands in the request twice is [`Fault::Twice`], never silently the first or the last:
//! whoever reads it next might take the other one. Verification and identification read through the same code.

use std::borrow::Cow;
use std::cell::OnceCell;

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use http::header::HeaderMap;
use http::{HeaderName, Method};
use ring::digest;
use serde_json::value::RawValue;

use crate::body::Received;
use crate::json::{self, Found, Pointers, Scan, Slot};
use crate::multipart::{self, Fields, Malformed};
use crate::provider::Scheme;
use crate::provider::jwt::TokenPlace;
use crate::provider::place::{Inner, Place, TokenPart};

/// Why a place gives no text although something stands there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// It stands there twice.
    Twice,
    /// It is no text that can be kept.
    Invalid,
    /// It is sought in JSON, and there is none.
    NotJson,
}

/// The parts of a request that can be signed or hold an id.
pub(crate) struct Parts<'a> {
    pub(crate) method: &'a Method,
    pub(crate) headers: &'a HeaderMap,
    /// Path and query exactly as received.
    pub(crate) path: &'a str,
    pub(crate) public_url: Option<&'a str>,
    pub(crate) body: &'a [u8],
    pointers: &'a Pointers,
    scan: OnceCell<Scan<'a>>,
    sha256: OnceCell<[u8; 32]>,
    multipart: OnceCell<Result<Fields<'a>, Malformed>>,
    /// Where the token stands that claims are read from.
    token: Option<&'a TokenPlace>,
}

impl<'a> Parts<'a> {
    /// `pointers` are those that the places which will be read were parsed with.
    pub(crate) fn of(received: &'a Received, pointers: &'a Pointers) -> Self {
        let path = received.head.uri.path_and_query().map_or("/", http::uri::PathAndQuery::as_str);
        let url = received.source.public_url.as_deref();
        Self::new((&received.head.method, url, path), &received.head.headers, &received.body, pointers)
            .with_token_of(&received.source.scheme)
    }

    /// The parts of one item of a batch: its own bytes are the body.
    pub(crate) fn item(received: &'a Received, item: &'a [u8], pointers: &'a Pointers) -> Self {
        let url = received.source.public_url.as_deref();
        Self::new((&received.head.method, url, "/"), &received.head.headers, item, pointers)
    }

    /// The parts of a request that is still being made: method, public URL and path; headers; body.
    pub(crate) fn new(
        (method, public_url, path): (&'a Method, Option<&'a str>, &'a str),
        headers: &'a HeaderMap,
        body: &'a [u8],
        pointers: &'a Pointers,
    ) -> Self {
        let (scan, sha256, multipart) = (OnceCell::new(), OnceCell::new(), OnceCell::new());
        Self { method, headers, path, public_url, body, pointers, scan, sha256, multipart, token: None }
    }

    /// Claims are read from the token of a request of this scheme.
    pub(crate) fn with_token_of(self, scheme: &'a Scheme) -> Self {
        Self { token: scheme.token_place(), ..self }
    }

    /// The text at a place; `None` if nothing stands there, or JSON's null.
    pub(crate) fn read(&self, place: &Place) -> Result<Option<Cow<'a, str>>, Fault> {
        match place {
            Place::Header(name) => self.header(name),
            Place::Json { slot, .. } => as_text(self.json(*slot)?),
            Place::Form(field) => self.form(field),
            Place::FormJson { field, pointers, slot, .. } => self.form_json(field, pointers, *slot),
            Place::Query(name) => {
                let query = self.path.split_once('?').map_or("", |(_, query)| query);
                pair(query.as_bytes(), name)
            }
            Place::HeaderJson { header, inner } => self.header_json(header, inner),
            Place::Token { part, steps } => match self.token_value(*part, steps)? {
                Some(raw) => {
                    Ok(json::text(&raw).or(Err(Fault::Invalid))?.map(|text| text.into_owned().into()))
                }
                None => Ok(None),
            },
            Place::Body => {
                std::str::from_utf8(self.body).map(|text| Some(text.into())).or(Err(Fault::Invalid))
            }
            Place::BodySha256 => Ok(Some(Cow::Owned(hex::encode(self.body_sha256())))),
        }
    }

    /// What stands in a slot of the JSON body.
    pub(crate) fn json(&self, slot: Slot) -> Result<Found<'a>, Fault> {
        let scan = self.scan.get_or_init(|| self.pointers.scan(self.body));
        scan.get(slot).ok_or(Fault::NotJson)
    }

    /// SHA-256 of the raw body.
    pub(crate) fn body_sha256(&self) -> [u8; 32] {
        *self.sha256.get_or_init(|| sha256(self.body))
    }

    /// The token as it stands in the request, without what may stand before it.
    pub(crate) fn token(&self) -> Result<Option<Cow<'a, str>>, Fault> {
        let Some(rule) = self.token else { return Ok(None) };
        let whole = (self.method, self.public_url, self.path);
        let text = Self::new(whole, self.headers, self.body, &rule.pointers).read(&rule.place)?;
        Ok(text.map(|text| rule.bare(text)))
    }

    /// The JSON source text of what stands at a place of the token; `None` if nothing does.
    pub(crate) fn token_value(&self, part: TokenPart, steps: &[Inner]) -> Result<Option<String>, Fault> {
        let Some(token) = self.token()? else { return Ok(None) };
        let segment = match part {
            TokenPart::Header => token.split('.').next(),
            TokenPart::Claims => token.split('.').nth(1),
        };
        let segment = segment.ok_or(Fault::Invalid)?;
        let mut json = URL_SAFE_NO_PAD.decode(segment).or(Err(Fault::Invalid))?;
        let Some((last, before)) = steps.split_last() else { return Ok(None) };
        for step in before {
            let Some(raw) = found_raw(step, &json)? else { return Ok(None) };
            let Some(text) = json::text(&raw).or(Err(Fault::Invalid))? else { return Ok(None) };
            json = text.into_owned().into_bytes();
        }
        found_raw(last, &json)
    }

    fn header_json(&self, name: &HeaderName, inner: &Inner) -> Result<Option<Cow<'a, str>>, Fault> {
        let Some(text) = self.header(name)? else { return Ok(None) };
        let json = STANDARD.decode(text.as_bytes()).or(Err(Fault::NotJson))?;
        let found = inner.find(&json).ok_or(Fault::NotJson)?;
        Ok(as_text(found)?.map(|text| Cow::Owned(text.into_owned())))
    }

    fn header(&self, name: &HeaderName) -> Result<Option<Cow<'a, str>>, Fault> {
        let mut values = self.headers.get_all(name).iter();
        let Some(value) = values.next() else { return Ok(None) };
        if values.next().is_some() {
            return Err(Fault::Twice);
        }
        text(value).map(|text| Some(Cow::Borrowed(text)))
    }

    /// All values of a header.
    pub(crate) fn header_values(&self, name: &HeaderName) -> impl Iterator<Item = Result<&'a str, Fault>> {
        self.headers.get_all(name).iter().map(text)
    }

    /// A body that starts like JSON is never read as a form: text inside its strings could pose as a field, and the
    /// content type is no help, since it is not signed.
    fn form(&self, field: &str) -> Result<Option<Cow<'a, str>>, Fault> {
        if multipart::is_multipart(self.body) {
            return self.part(field);
        }
        if self.is_form() { pair(self.body, field) } else { Ok(None) }
    }

    fn is_form(&self) -> bool {
        !matches!(self.body.trim_ascii_start().first(), Some(b'{' | b'['))
            && !multipart::is_multipart(self.body)
    }

    /// The fields of a form in parts; none if it is none that can be read.
    pub(crate) fn fields(&self) -> Option<&Fields<'a>> {
        self.multipart.get_or_init(|| multipart::fields(self.body)).as_ref().ok()
    }

    fn part(&self, field: &str) -> Result<Option<Cow<'a, str>>, Fault> {
        let fields = self.fields().ok_or(Fault::Invalid)?;
        let mut values = fields.iter().filter(|(name, _)| *name == field).map(|(_, value)| *value);
        match (values.next(), values.next()) {
            (Some(_), Some(_)) => Err(Fault::Twice),
            (Some(value), None) => {
                str::from_utf8(value).map(|text| Some(text.into())).or(Err(Fault::Invalid))
            }
            (None, _) => Ok(None),
        }
    }

    /// All fields of a body that is a form in URL encoding; none if it is none.
    pub(crate) fn form_pairs(&self) -> Option<form_urlencoded::Parse<'a>> {
        self.is_form().then(|| form_urlencoded::parse(self.body))
    }

    fn form_json(&self, field: &str, pointers: &Pointers, slot: Slot) -> Result<Option<Cow<'a, str>>, Fault> {
        let Some(value) = self.form(field)? else { return Ok(None) };
        let found = pointers.scan(value.as_bytes()).get(slot).ok_or(Fault::NotJson)?;
        Ok(as_text(found)?.map(|text| Cow::Owned(text.into_owned())))
    }
}

/// Why a body does not give the list that it should hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoList {
    /// The body is not JSON.
    NotJson,
    /// The list stands there twice.
    Twice,
    /// Something else stands there, or nothing.
    Missing,
}

/// The items of a list in a JSON body, each in its own bytes.
pub(crate) fn list<'a>(body: &'a [u8], pointers: &Pointers, slot: Slot) -> Result<Vec<&'a RawValue>, NoList> {
    match pointers.scan(body).get(slot) {
        None => Err(NoList::NotJson),
        Some(Found::Twice) => Err(NoList::Twice),
        Some(Found::Absent | Found::Broken) => Err(NoList::Missing),
        Some(Found::Value(list)) => serde_json::from_str(list).or(Err(NoList::Missing)),
    }
}

fn found_raw(inner: &Inner, json: &[u8]) -> Result<Option<String>, Fault> {
    match inner.find(json).ok_or(Fault::NotJson)? {
        Found::Absent => Ok(None),
        Found::Value(raw) => Ok(Some(raw.to_owned())),
        Found::Twice => Err(Fault::Twice),
        Found::Broken => Err(Fault::Invalid),
    }
}

fn text(value: &http::HeaderValue) -> Result<&str, Fault> {
    std::str::from_utf8(value.as_bytes()).or(Err(Fault::Invalid))
}

fn as_text(found: Found<'_>) -> Result<Option<Cow<'_, str>>, Fault> {
    match found {
        Found::Absent => Ok(None),
        Found::Value(raw) => json::text(raw).or(Err(Fault::Invalid)),
        Found::Twice => Err(Fault::Twice),
        Found::Broken => Err(Fault::Invalid),
    }
}

/// The one value of a name in `a=1&b=2`. The decoder puts U+FFFD where bytes are not UTF-8, so that two different
/// values could become one: a value that holds it is refused.
fn pair<'a>(pairs: &'a [u8], wanted: &str) -> Result<Option<Cow<'a, str>>, Fault> {
    let mut values = form_urlencoded::parse(pairs).filter(|(name, _)| name == wanted).map(|(_, value)| value);
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        return Err(Fault::Twice);
    }
    if value.contains(char::REPLACEMENT_CHARACTER) { Err(Fault::Invalid) } else { Ok(Some(value)) }
}

/// SHA-256 as an array.
pub(crate) fn sha256(bytes: &[u8]) -> [u8; 32] {
    array(&digest::digest(&digest::SHA256, bytes))
}

/// The bytes of a finished SHA-256.
pub(crate) fn array(digest: &digest::Digest) -> [u8; 32] {
    digest.as_ref().first_chunk().copied().unwrap_or_default()
}
