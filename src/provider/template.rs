//! The template of the bytes that a provider signs: `"{ts}.{body}"`.

use crate::json::Pointers;
use crate::provider::place::Place;

/// The names that may stand in braces, for messages.
const NAMES: &str = "{body}, {ts}, {id}, {url}, {method}, {header:NAME}, {query:NAME}, {form:FIELD}, \
                     {json:/POINTER}, {formjson:FIELD#/POINTER} and {lower:…} around one of the last five";

/// One part of the signed bytes.
#[derive(Debug)]
pub(crate) enum Piece {
    /// These characters.
    Literal(String),
    /// The raw body.
    Body,
    /// The timestamp's received characters.
    Timestamp,
    /// The id's received characters.
    Id,
    /// The public URL with path and query as received.
    Url,
    /// The method.
    Method,
    /// The text at a place.
    Text(Place),
    /// The text at a place, in lower case.
    Lower(Place),
}

/// The parts of the signed bytes, in order.
#[derive(Debug)]
pub(crate) struct Template {
    /// As it was written.
    pub(crate) text: String,
    /// At least one of them is not literal.
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
        while let Some((literal, tail)) = rest.split_once('{') {
            push_literal(&mut pieces, literal)?;
            let (name, after) =
                tail.split_once('}').ok_or_else(|| format!("\"{{{tail}\" has no closing brace"))?;
            pieces.push(piece(name, pointers)?);
            rest = after;
        }
        push_literal(&mut pieces, rest)?;
        if pieces.iter().all(|piece| matches!(piece, Piece::Literal(_) | Piece::Method)) {
            return Err(format!("{text:?} signs nothing of the request: use {NAMES}"));
        }
        Ok(Self { text: text.to_owned(), pieces })
    }

    /// Whether a piece of the given kind is in it.
    pub(crate) fn has(&self, kind: fn(&Piece) -> bool) -> bool {
        self.pieces.iter().any(kind)
    }

    /// The places that are read.
    pub(crate) fn places(&self) -> impl Iterator<Item = &Place> {
        self.pieces.iter().filter_map(|piece| match piece {
            Piece::Text(place) | Piece::Lower(place) => Some(place),
            _ => None,
        })
    }
}

fn push_literal(pieces: &mut Vec<Piece>, text: &str) -> Result<(), String> {
    if text.contains('}') {
        return Err(format!("{text:?} has a closing brace without an opening one"));
    }
    if !text.is_empty() {
        pieces.push(Piece::Literal(text.to_owned()));
    }
    Ok(())
}

fn piece(name: &str, pointers: &mut Pointers) -> Result<Piece, String> {
    match name {
        "body" => Ok(Piece::Body),
        "ts" => Ok(Piece::Timestamp),
        "id" => Ok(Piece::Id),
        "url" => Ok(Piece::Url),
        "method" => Ok(Piece::Method),
        _ => match name.strip_prefix("lower:") {
            Some(inner) => place(inner, name, pointers).map(Piece::Lower),
            None => place(name, name, pointers).map(Piece::Text),
        },
    }
}

fn place(text: &str, whole: &str, pointers: &mut Pointers) -> Result<Place, String> {
    if !text.contains(':') || text.starts_with("body:") {
        return Err(format!("{{{whole}}} is not known: use {NAMES}"));
    }
    Place::parse(text, pointers)
}
