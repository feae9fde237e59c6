//! The template of the bytes that a provider signs: `"{ts}.{body}"`.

use http::HeaderName;

use crate::json::Pointers;
use crate::provider::place::Place;

/// The names that may stand in braces, for messages.
pub(super) const NAMES: &str = "{body}, {body_escaped}, {ts}, {id}, {method}, {path}, {path_escaped}, {path_slash}, {url}, {url_base}, {url_with_port}, \
                     {url_without_port}, {url_unescaped}, {form_sorted}, {crc32}, {secret}, {listed:header:NAME}, \
                     {header:NAME}, {query:NAME}, {form:FIELD}, {json:/POINTER}, {formjson:FIELD#/POINTER}, \
                     {claim:/POINTER}, {jose:/POINTER} and {lower:…}, {line:…} or {lines:…} around one of the last seven";

/// Makes a piece.
type Alone = fn() -> Piece;
/// Makes a piece of what stands after the word.
type OfPlace = fn(Place) -> Piece;

/// Pieces that are one word.
pub(super) const WORDS: &[(&str, Alone)] = &[
    ("body", || Piece::Body),
    ("body_escaped", || Piece::BodyEscaped),
    ("ts", || Piece::Timestamp),
    ("id", || Piece::Id),
    ("method", || Piece::Method),
    ("path", || Piece::Path),
    ("path_escaped", || Piece::PathEscaped),
    ("path_slash", || Piece::PathSlash),
    ("url", || Piece::Url(UrlForm::Whole)),
    ("url_base", || Piece::Url(UrlForm::Base)),
    ("url_with_port", || Piece::Url(UrlForm::WithPort)),
    ("url_without_port", || Piece::Url(UrlForm::WithoutPort)),
    ("url_unescaped", || Piece::Url(UrlForm::Unescaped)),
    ("form_sorted", || Piece::FormSorted),
    ("crc32", || Piece::Crc32),
    ("secret", || Piece::Secret),
];
/// Words before a place.
pub(super) const AROUND: &[(&str, OfPlace)] =
    &[("lower", Piece::Lower), ("line", Piece::Line), ("lines", Piece::Lines)];
/// The word before a header that lists headers.
pub(super) const LISTED: &str = "listed";

/// One part of the signed bytes.
#[derive(Debug)]
pub(crate) enum Piece {
    /// These characters.
    Literal(String),
    /// The raw body.
    Body,
    /// The body as a text in which everything but printable ASCII is escaped.
    BodyEscaped,
    /// The timestamp's received characters.
    Timestamp,
    /// The id's received characters.
    Id,
    /// The method.
    Method,
    /// Path and query as received.
    Path,
    /// Path and query, the query escaped as one value, and what that gives escaped as a URL.
    PathEscaped,
    /// The path without the query, with a slash put to its end, or taken from it.
    PathSlash,
    /// The public URL.
    Url(UrlForm),
    /// Names and values of a form body's fields, sorted, each pair once, with nothing between.
    FormSorted,
    /// CRC-32 of the raw body, as a decimal number.
    Crc32,
    /// The secret itself.
    Secret,
    /// `name:value` of each header that the named header lists, joined with `;`.
    Listed(HeaderName),
    /// `Name: value` and a line break for each header that the text at a place lists.
    Lines(Place),
    /// The text at a place.
    Text(Place),
    /// The text at a place, in lower case.
    Lower(Place),
    /// The text at a place, which must be one line.
    Line(Place),
    /// In brackets: left out as a whole where one of its places is not there.
    Optional(Vec<Piece>),
}

/// The forms of the public URL with path and query as received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum UrlForm {
    /// As it is.
    Whole,
    /// Without the query; a path of `/` alone counts as none.
    Base,
    /// With its scheme's port, unless it has one; an apostrophe in the query is `%27`.
    WithPort,
    /// Without a port; an apostrophe in the query is `%27`.
    WithoutPort,
    /// With the escapes decoded of characters that a URL may hold as they are.
    Unescaped,
}

/// The parts of the signed bytes, in order.
#[derive(Debug)]
pub(crate) struct Template {
    /// As it was written.
    pub(crate) text: String,
    /// At least one of them is of the request.
    pub(crate) pieces: Vec<Piece>,
}

impl Template {
    /// Parses a template; pointers into the body are added to `pointers`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn parse(text: &str, pointers: &mut Pointers) -> Result<Self, String> {
        let mut pieces = Vec::new();
        let mut rest = text;
        while let Some((before, tail)) = rest.split_once('[') {
            parse_pieces(before, &mut pieces, pointers)?;
            let (inner, after) =
                tail.split_once(']').ok_or_else(|| format!("\"[{tail}\" has no closing bracket"))?;
            pieces.push(optional(inner, pointers)?);
            rest = after;
        }
        parse_pieces(rest, &mut pieces, pointers)?;
        let template = Self { text: text.to_owned(), pieces };
        if !template.has(|piece| !matches!(piece, Piece::Literal(_) | Piece::Method | Piece::Secret)) {
            return Err(format!("{text:?} signs nothing of the request: use {NAMES}"));
        }
        Ok(template)
    }

    /// Whether a piece of the given kind is in it.
    pub(crate) fn has(&self, kind: fn(&Piece) -> bool) -> bool {
        self.all().any(kind)
    }

    /// Whether the whole body is in it, in one form or another. A checksum is none: a body can be made to fit it.
    pub(crate) fn has_body(&self) -> bool {
        self.has(|piece| matches!(piece, Piece::Body | Piece::BodyEscaped | Piece::FormSorted))
    }

    /// Whether the URL with its query is in it.
    pub(crate) fn has_url(&self) -> bool {
        self.has(|piece| matches!(piece, Piece::Path | Piece::PathEscaped | Piece::Url(_)))
            && !self.has(|piece| matches!(piece, Piece::Url(UrlForm::Base)))
    }

    /// The places that are read.
    pub(crate) fn places(&self) -> impl Iterator<Item = &Place> {
        self.all().filter_map(Piece::place)
    }

    /// The headers that are read.
    pub(crate) fn headers(&self) -> impl Iterator<Item = &HeaderName> {
        self.places().filter_map(Place::header).chain(self.lists())
    }

    /// The headers that list others.
    pub(crate) fn lists(&self) -> impl Iterator<Item = &HeaderName> {
        self.all().filter_map(|piece| match piece {
            Piece::Listed(name) => Some(name),
            _ => None,
        })
    }

    /// All pieces, those in brackets too.
    fn all(&self) -> impl Iterator<Item = &Piece> {
        self.pieces.iter().flat_map(|piece| match piece {
            Piece::Optional(inner) => inner.iter(),
            piece => std::slice::from_ref(piece).iter(),
        })
    }
}

impl Piece {
    /// The place that it is the text of.
    pub(crate) fn place(&self) -> Option<&Place> {
        match self {
            Self::Text(place) | Self::Lower(place) | Self::Line(place) | Self::Lines(place) => Some(place),
            _ => None,
        }
    }
}

/// Brackets are not nested: what is left out is left out with everything around it.
fn optional(text: &str, pointers: &mut Pointers) -> Result<Piece, String> {
    if text.contains('[') {
        return Err(format!("\"[{text}]\" has a bracket inside: they cannot be nested"));
    }
    let mut inner = Vec::new();
    parse_pieces(text, &mut inner, pointers)?;
    if inner.iter().all(|piece| piece.place().is_none()) {
        return Err(format!("\"[{text}]\" names no place, so it would never be left out: drop the brackets"));
    }
    let always = |piece: &Piece| !matches!(piece, Piece::Literal(_)) && piece.place().is_none();
    if inner.iter().any(always) {
        return Err(format!(
            "\"[{text}]\" would leave out what is always there, so that it would not always be signed: \
             put it outside the brackets"
        ));
    }
    Ok(Piece::Optional(inner))
}

fn parse_pieces(text: &str, pieces: &mut Vec<Piece>, pointers: &mut Pointers) -> Result<(), String> {
    let mut rest = text;
    while let Some((literal, tail)) = rest.split_once('{') {
        push_literal(pieces, literal)?;
        let (name, after) =
            tail.split_once('}').ok_or_else(|| format!("\"{{{tail}\" has no closing brace"))?;
        pieces.push(piece(name, pointers)?);
        rest = after;
    }
    push_literal(pieces, rest)
}

fn push_literal(pieces: &mut Vec<Piece>, text: &str) -> Result<(), String> {
    if text.contains(['}', ']']) {
        return Err(format!("{text:?} has a closing brace or bracket without an opening one"));
    }
    if !text.is_empty() {
        pieces.push(Piece::Literal(text.to_owned()));
    }
    Ok(())
}

fn piece(name: &str, pointers: &mut Pointers) -> Result<Piece, String> {
    match WORDS.iter().find(|(word, _)| *word == name) {
        Some((_, piece)) => Ok(piece()),
        None => place_piece(name, pointers),
    }
}

fn place_piece(name: &str, pointers: &mut Pointers) -> Result<Piece, String> {
    let Some((first, inner)) = name.split_once(':') else {
        return place(name, name, pointers).map(Piece::Text);
    };
    if let Some((_, piece)) = AROUND.iter().find(|(word, _)| *word == first) {
        return place(inner, name, pointers).map(piece);
    }
    if first != LISTED {
        return place(name, name, pointers).map(Piece::Text);
    }
    match place(inner, name, pointers)? {
        Place::Header(header) => Ok(Piece::Listed(header)),
        _ => Err(format!("{{{name}}} must be a header that lists headers: {{listed:header:NAME}}")),
    }
}

fn place(text: &str, whole: &str, pointers: &mut Pointers) -> Result<Place, String> {
    if !text.contains(':') || text.starts_with("body:") {
        return Err(format!("{{{whole}}} is not known: use {NAMES}"));
    }
    Place::parse(text, pointers)
}
