//! Where in a request a text stands, as the settings name it: `header:X-Id`, `headerjson:X-Signature#/kid`,
//! `json:/id`, `form:id`, `formjson:payload#/id`, `query:id`, `body:sha256`; in a token `claim:/jti`,
//! `jose:/kid`.

use std::fmt;

use http::HeaderName;

use crate::json::{Found, Pointer, Pointers, Slot};

/// The forms that a place can have, for messages.
pub(super) const FORMS: &str = "\"header:NAME\", \"headerjson:NAME#/POINTER\", \"json:/POINTER\", \"form:FIELD\", \
                     \"formjson:FIELD#/POINTER\", \"query:NAME\", \"claim:/POINTER\", \"jose:/POINTER\" or \
                     \"body:sha256\"";

/// One place in a request.
#[derive(Debug)]
pub(crate) enum Place {
    /// A header.
    Header(HeaderName),
    /// A value in the JSON body.
    Json {
        /// Where.
        pointer: Pointer,
        /// Its slot in the [`Pointers`] that the place was parsed with.
        slot: Slot,
    },
    /// A field of a form body.
    Form(String),
    /// A value in the JSON that a field of a form body holds.
    FormJson {
        /// The field.
        field: String,
        /// Where in it.
        pointer: Pointer,
        /// That one pointer, compiled.
        pointers: Pointers,
        /// Its slot.
        slot: Slot,
    },
    /// A parameter of the URL.
    Query(String),
    /// A value in the JSON that a header holds in base64.
    HeaderJson {
        /// The header.
        header: HeaderName,
        /// Where in it.
        inner: Inner,
    },
    /// A value in the token of a scheme of kind `jwt`.
    Token {
        /// In which part of it.
        part: TokenPart,
        /// Where in it. After the first, in the text that stands there, which is JSON itself.
        steps: Vec<Inner>,
    },
    /// The whole body as text; only a token can be that.
    Body,
    /// SHA-256 of the raw body, in hex.
    BodySha256,
}

/// Which part of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TokenPart {
    /// Its header (JOSE).
    Header,
    /// Its claims.
    Claims,
}

/// A pointer into JSON that stands somewhere inside of the request.
#[derive(Debug)]
pub(crate) struct Inner {
    pointer: Pointer,
    pointers: Pointers,
    slot: Slot,
}

impl Inner {
    fn parse(text: &str) -> Result<Self, String> {
        let mut pointers = Pointers::default();
        let pointer = Pointer::parse(text)?;
        let slot = pointers.add(&pointer)?;
        Ok(Self { pointer, pointers, slot })
    }

    /// What stands there; `None` if the bytes are no JSON.
    pub(crate) fn find<'a>(&self, json: &'a [u8]) -> Option<Found<'a>> {
        self.pointers.scan(json).get(self.slot)
    }
}

impl Place {
    /// Parses a place; pointers into the body are added to `pointers`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn parse(text: &str, pointers: &mut Pointers) -> Result<Self, String> {
        let (kind, rest) =
            text.split_once(':').ok_or_else(|| format!("{text:?} names no place: give {FORMS}"))?;
        match kind {
            "header" => header(rest).map(Self::Header),
            "json" => {
                let pointer = Pointer::parse(rest)?;
                let slot = pointers.add(&pointer)?;
                Ok(Self::Json { pointer, slot })
            }
            "form" => name(rest, text).map(Self::Form),
            "formjson" => form_json(rest, text),
            "query" => name(rest, text).map(Self::Query),
            "headerjson" => header_json(rest, text),
            "claim" => token(TokenPart::Claims, rest),
            "jose" => token(TokenPart::Header, rest),
            "body" if rest == "sha256" => Ok(Self::BodySha256),
            _ => Err(format!("{text:?} names no place: give {FORMS}")),
        }
    }

    /// The header, if the place is one.
    pub(crate) fn header(&self) -> Option<&HeaderName> {
        match self {
            Self::Header(name) => Some(name),
            _ => None,
        }
    }

    /// The header that the place is, or is in.
    pub(crate) fn header_around(&self) -> Option<&HeaderName> {
        match self {
            Self::Header(name) | Self::HeaderJson { header: name, .. } => Some(name),
            _ => None,
        }
    }

    /// The name of the claim that the place is, if it is a whole one.
    pub(crate) fn claim_name(&self) -> Option<String> {
        let Self::Token { part: TokenPart::Claims, steps } = self else { return None };
        match steps.as_slice() {
            [one] => one.pointer.only_key().map(str::to_owned),
            _ => None,
        }
    }

    /// Whether the place is in a token.
    pub(crate) fn in_token(&self) -> bool {
        matches!(self, Self::Token { .. })
    }

    /// Whether both are the same place, whatever they were parsed with.
    pub(crate) fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Header(a), Self::Header(b)) => a == b,
            (Self::Json { pointer: a, .. }, Self::Json { pointer: b, .. }) => a == b,
            (Self::Form(a), Self::Form(b)) | (Self::Query(a), Self::Query(b)) => a == b,
            (Self::FormJson { field: a, pointer: x, .. }, Self::FormJson { field: b, pointer: y, .. }) => {
                (a, x) == (b, y)
            }
            (Self::HeaderJson { header: a, inner: x }, Self::HeaderJson { header: b, inner: y }) => {
                (a, &x.pointer) == (b, &y.pointer)
            }
            (Self::BodySha256, Self::BodySha256) | (Self::Body, Self::Body) => true,
            _ => false,
        }
    }

    /// Whether the place can be in one item of a list.
    pub(crate) fn in_item(&self) -> bool {
        matches!(self, Self::Json { .. } | Self::BodySha256)
    }

    /// Whether the place is in the body.
    pub(crate) fn in_body(&self) -> bool {
        matches!(self, Self::Json { .. } | Self::Form(_) | Self::FormJson { .. } | Self::BodySha256)
            || matches!(self, Self::Body)
    }
}

/// As the settings write it.
impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Header(name) => write!(f, "header:{name}"),
            Self::Json { pointer, .. } => write!(f, "json:{pointer}"),
            Self::Form(field) => write!(f, "form:{field}"),
            Self::FormJson { field, pointer, .. } => write!(f, "formjson:{field}#{pointer}"),
            Self::Query(name) => write!(f, "query:{name}"),
            Self::HeaderJson { header, inner } => write!(f, "headerjson:{header}#{}", inner.pointer),
            Self::Token { part, steps } => {
                f.write_str(if *part == TokenPart::Claims { "claim:" } else { "jose:" })?;
                let texts: Vec<String> = steps.iter().map(|step| step.pointer.to_string()).collect();
                f.write_str(&texts.join("#"))
            }
            Self::Body => f.write_str("body"),
            Self::BodySha256 => f.write_str("body:sha256"),
        }
    }
}

fn header(text: &str) -> Result<HeaderName, String> {
    text.parse().ok().ok_or_else(|| format!("{text:?} is no header name"))
}

fn name(text: &str, whole: &str) -> Result<String, String> {
    if text.is_empty() { Err(format!("{whole:?} lacks a name after the colon")) } else { Ok(text.to_owned()) }
}

fn form_json(rest: &str, whole: &str) -> Result<Place, String> {
    let (field, pointer) = rest
        .split_once('#')
        .ok_or_else(|| format!("{whole:?} lacks \"#\": write \"formjson:FIELD#/POINTER\""))?;
    let mut pointers = Pointers::default();
    let pointer = Pointer::parse(pointer)?;
    let slot = pointers.add(&pointer)?;
    Ok(Place::FormJson { field: name(field, whole)?, pointer, pointers, slot })
}

fn header_json(rest: &str, whole: &str) -> Result<Place, String> {
    let (name, pointer) = rest
        .split_once('#')
        .ok_or_else(|| format!("{whole:?} lacks \"#\": write \"headerjson:NAME#/POINTER\""))?;
    Ok(Place::HeaderJson { header: header(name)?, inner: Inner::parse(pointer)? })
}

/// `#` stands between a pointer and one into the JSON that is the text there.
fn token(part: TokenPart, rest: &str) -> Result<Place, String> {
    if rest.is_empty() {
        return Err("the whole token is no text: give a pointer into it, e.g. \"claim:/jti\"".to_owned());
    }
    Ok(Place::Token { part, steps: rest.split('#').map(Inner::parse).collect::<Result<_, _>>()? })
}

/// A rule that gives one text: the texts of all its places, joined with `:`.
#[derive(Debug)]
pub(crate) struct Rule {
    /// As it was written.
    pub(crate) text: String,
    /// At least one.
    pub(crate) places: Vec<Place>,
}

impl Rule {
    /// Parses `A + B`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn parse(text: &str, pointers: &mut Pointers) -> Result<Self, String> {
        let places: Result<_, _> =
            text.split(" + ").map(|part| Place::parse(part.trim(), pointers)).collect();
        Ok(Self { text: text.to_owned(), places: places? })
    }

    /// The header, if the rule is nothing but one.
    pub(crate) fn header(&self) -> Option<&HeaderName> {
        match self.places.as_slice() {
            [place] => place.header(),
            _ => None,
        }
    }
}
