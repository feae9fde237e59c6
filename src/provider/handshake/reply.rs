//! What a handshake is answered, as data.
//!
//! Invariant: a body is text/plain or JSON and never sniffed; what of the request goes into an answer is a token, and a
//! token has a shape that is no markup and no header line.

use http::header::{CONTENT_TYPE, X_CONTENT_TYPE_OPTIONS};
use http::{HeaderName, HeaderValue, Method, StatusCode};

use crate::json::Pointers;
use crate::provider::place::Place;
use crate::provider::signature::TagEncoding;
use crate::settings::Table;

/// The names that may stand in the braces of an answer, for messages.
pub(in crate::provider) const NAMES: &str = "{query:NAME}, {header:NAME}, {json:/POINTER}, {hmac-hex:…} and {hmac-base64:…} around one of \
                     them, {sha256-hex:…} around several with \" + \" between them, of which config:NAME (the \
                     source's handshake_secrets.NAME) and endpoint (its own URL) may be some, and {config:NAME}";
/// Longest token that is repeated, in bytes.
const TOKEN_MAX: usize = 256;
/// Longest token that is signed, in bytes.
const SIGNED_TOKEN_MAX: usize = 128;

/// How the answer is made.
#[derive(Debug)]
pub(crate) struct ReplyRule {
    pub(crate) status: StatusCode,
    /// The body is JSON: what is put into it is escaped as its strings need it.
    pub(crate) json: bool,
    /// All of them, the content type too.
    pub(crate) headers: Vec<(HeaderName, Vec<ReplyPiece>)>,
    pub(crate) body: Vec<ReplyPiece>,
    /// What the tokens look like.
    pub(crate) token: Shape,
    /// The scheme says it, so that it is this provider's and no default.
    pub(super) token_written: bool,
}

/// One part of an answer.
#[derive(Debug)]
pub(crate) enum ReplyPiece {
    /// These characters.
    Literal(String),
    /// The token at a place.
    Token(Place),
    /// The source's signature of the token at a place.
    Hmac(TagEncoding, Place),
    /// SHA-256 of the parts, one after the other, in hex.
    Sha256(Vec<HashPart>),
    /// What the settings have under that name in `handshake_secrets`: for something that is no secret.
    Config(String),
}

/// A part of what is hashed.
#[derive(Debug)]
pub(crate) enum HashPart {
    /// The token at a place.
    Token(Place),
    /// What the settings have under that name in `handshake_secrets`.
    Config(String),
    /// The URL that the provider was given, without a query; never what the request says of it.
    Endpoint,
}

/// What a token looks like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    chars: Chars,
    min: usize,
    max: usize,
}

/// The characters of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Chars {
    /// Lower-case hex digits.
    Hex,
    /// Letters, digits, `_` and `-`.
    Word,
    /// Printable ASCII but for the space and what has a meaning in markup or quotes.
    Plain,
    /// Those and the space.
    Text,
    /// Printable ASCII but for the space.
    Graphic,
}

impl Chars {
    const CHOICES: &[(&str, Self)] = &[
        ("plain", Self::Plain),
        ("word", Self::Word),
        ("hex", Self::Hex),
        ("text", Self::Text),
        ("graphic", Self::Graphic),
    ];

    fn have(self, byte: u8) -> bool {
        match self {
            Self::Hex => matches!(byte, b'0'..=b'9' | b'a'..=b'f'),
            Self::Word => is_word(byte),
            Self::Plain => is_plain(byte),
            Self::Text => is_plain(byte) || byte == b' ',
            Self::Graphic => byte.is_ascii_graphic(),
        }
    }
}

fn is_plain(byte: u8) -> bool {
    byte.is_ascii_graphic() && !matches!(byte, b'<' | b'>' | b'&' | b'"' | b'\'' | b'`' | b'\\')
}

/// The characters of a token that is signed in an answer.
pub(crate) fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-'
}

impl Shape {
    /// Of a token that is repeated.
    const PLAIN: Self = Self { chars: Chars::Plain, min: 1, max: TOKEN_MAX };
    /// Of a token that is signed: nothing of JSON or a form that says something consists of such characters only.
    const SIGNED: Self = Self { chars: Chars::Word, min: 1, max: SIGNED_TOKEN_MAX };
    /// Of a secret that is handed over: long enough that nobody guesses it.
    pub(crate) const SECRET: Self = Self { chars: Chars::Graphic, min: 16, max: TOKEN_MAX };

    /// Reads the table under the key: `{ chars = "hex", min = 20, max = 32 }`.
    pub(super) fn read(table: &mut Table, key: &'static str) -> Option<Self> {
        let mut table = table.table(key)?;
        let chars = table.choice("chars", Chars::CHOICES).unwrap_or(Chars::Plain);
        let mut length =
            |key| table.count(key, 1..=TOKEN_MAX as u64).and_then(|count| usize::try_from(count).ok());
        let (min, max) = (length("min").unwrap_or(1), length("max").unwrap_or(TOKEN_MAX));
        if min > max {
            table.error("min", format!("is more than max, which is {max}"));
        }
        table.finish();
        Some(Self { chars, min, max })
    }

    /// The longest, in bytes.
    pub(crate) fn max(self) -> usize {
        self.max
    }

    /// Whether the text is such a token.
    pub(crate) fn fits(self, text: &[u8]) -> bool {
        (self.min..=self.max).contains(&text.len()) && self.could_hold(text)
    }

    /// Whether the text could be a piece of one.
    pub(crate) fn could_hold(self, text: &[u8]) -> bool {
        text.len() <= self.max && text.iter().all(|byte| self.chars.have(*byte))
    }
}

impl ReplyRule {
    pub(super) fn read(
        mut table: Table,
        method: &Method,
        token: Option<Shape>,
        pointers: &mut Pointers,
    ) -> Option<Self> {
        let status = table.count("status", 200..=299).unwrap_or(200);
        let status = u16::try_from(status).ok().and_then(|status| StatusCode::from_u16(status).ok());
        let json =
            table.choice("type", &[("text/plain", false), ("application/json", true)]).unwrap_or(false);
        let body = table.text("body").unwrap_or_default();
        let headers = read_headers(&mut table, method, (!body.is_empty()).then_some(json), pointers);
        let body = match pieces(&body, method, pointers) {
            Ok(pieces) => pieces,
            Err(message) => {
                table.error("body", message);
                return None;
            }
        };
        let mut rule = Self {
            status: status?,
            json,
            headers,
            body,
            token: Shape::PLAIN,
            token_written: token.is_some(),
        };
        rule.token = token.unwrap_or(if rule.signs() { Shape::SIGNED } else { Shape::PLAIN });
        if rule.signs()
            && !(rule.token.max <= SIGNED_TOKEN_MAX && matches!(rule.token.chars, Chars::Hex | Chars::Word))
        {
            let message = format!(
                "a token that is signed has chars \"word\" or \"hex\", and max = {SIGNED_TOKEN_MAX} at most"
            );
            table.error("body", message);
        }
        table.finish();
        Some(rule)
    }

    fn pieces(&self) -> impl Iterator<Item = &ReplyPiece> {
        self.body.iter().chain(self.headers.iter().flat_map(|(_, pieces)| pieces))
    }

    /// Whether it has the source sign a token.
    pub(super) fn signs(&self) -> bool {
        self.pieces().any(|piece| matches!(piece, ReplyPiece::Hmac(..)))
    }

    /// Whether it depends on the public URL.
    pub(super) fn needs_url(&self) -> bool {
        self.hash_parts().any(|part| matches!(part, HashPart::Endpoint))
    }

    fn hash_parts(&self) -> impl Iterator<Item = &HashPart> {
        let hashed = self.pieces().filter_map(|piece| match piece {
            ReplyPiece::Sha256(parts) => Some(parts),
            _ => None,
        });
        hashed.flatten()
    }

    /// Names of secrets that are hashed.
    pub(super) fn hashed(&self) -> impl Iterator<Item = &str> {
        self.hash_parts().filter_map(|part| match part {
            HashPart::Config(name) => Some(name.as_str()),
            HashPart::Token(_) | HashPart::Endpoint => None,
        })
    }

    /// Names of secrets that are told as they are.
    pub(super) fn shown(&self) -> impl Iterator<Item = &str> {
        self.pieces().filter_map(|piece| match piece {
            ReplyPiece::Config(name) => Some(name.as_str()),
            _ => None,
        })
    }
}

/// The content type, of a body that is JSON or not, and what the scheme says.
fn read_headers(
    table: &mut Table,
    method: &Method,
    json: Option<bool>,
    pointers: &mut Pointers,
) -> Vec<(HeaderName, Vec<ReplyPiece>)> {
    let fixed = |text: &str| vec![ReplyPiece::Literal(text.to_owned())];
    let mut headers = Vec::new();
    if let Some(json) = json {
        // Without it, a browser might run as HTML what somebody put into a link.
        headers.push((X_CONTENT_TYPE_OPTIONS, fixed("nosniff")));
        headers.push((CONTENT_TYPE, fixed(if json { "application/json" } else { "text/plain" })));
    }
    for (name, text) in table.named_texts("headers") {
        match (name.to_ascii_lowercase().parse::<HeaderName>(), HeaderValue::from_str(&text.value)) {
            (Ok(name), Ok(_)) if name == CONTENT_TYPE => {
                table.error_at("headers", &text.place, "the content type is given by type");
            }
            (Ok(name), Ok(_)) => match pieces(&text.value, method, pointers) {
                Ok(pieces) => {
                    headers.retain(|(known, _)| *known != name);
                    headers.push((name, pieces));
                }
                Err(message) => table.error_at("headers", &text.place, message),
            },
            _ => table.error_at("headers", &text.place, "this cannot be a header"),
        }
    }
    headers
}

/// A brace opens a name only before a small letter, so that JSON can be written as it is.
fn pieces(text: &str, method: &Method, pointers: &mut Pointers) -> Result<Vec<ReplyPiece>, String> {
    let mut pieces = Vec::new();
    let mut literal = String::new();
    let mut rest = text;
    while let Some((before, tail)) = rest.split_once('{') {
        literal.push_str(before);
        if !tail.starts_with(|char: char| char.is_ascii_lowercase()) {
            literal.push('{');
            rest = tail;
            continue;
        }
        let (name, after) =
            tail.split_once('}').ok_or_else(|| format!("\"{{{tail}\" has no closing brace"))?;
        if !literal.is_empty() {
            pieces.push(ReplyPiece::Literal(std::mem::take(&mut literal)));
        }
        pieces.push(piece(name, method, pointers)?);
        rest = after;
    }
    literal.push_str(rest);
    if !literal.is_empty() {
        pieces.push(ReplyPiece::Literal(literal));
    }
    Ok(pieces)
}

fn piece(name: &str, method: &Method, pointers: &mut Pointers) -> Result<ReplyPiece, String> {
    let (encoding, source) = match name.split_once(':') {
        Some(("hmac-hex", source)) => (TagEncoding::Hex, source),
        Some(("hmac-base64", source)) => (TagEncoding::Base64, source),
        Some(("sha256-hex", parts)) => {
            let part = |part: &str| hash_part(part.trim(), name, method, pointers);
            return Ok(ReplyPiece::Sha256(parts.split(" + ").map(part).collect::<Result<_, _>>()?));
        }
        Some(("config", config)) if !config.is_empty() => return Ok(ReplyPiece::Config(config.to_owned())),
        _ => return token_place(name, name, method, pointers).map(ReplyPiece::Token),
    };
    Ok(ReplyPiece::Hmac(encoding, token_place(source, name, method, pointers)?))
}

fn hash_part(part: &str, whole: &str, method: &Method, pointers: &mut Pointers) -> Result<HashPart, String> {
    match part.split_once(':') {
        None if part == "endpoint" => Ok(HashPart::Endpoint),
        Some(("config", name)) if !name.is_empty() => Ok(HashPart::Config(name.to_owned())),
        _ => token_place(part, whole, method, pointers).map(HashPart::Token),
    }
}

fn token_place(source: &str, whole: &str, method: &Method, pointers: &mut Pointers) -> Result<Place, String> {
    match source.split_once(':') {
        Some(("json", _)) if *method != Method::POST => Err(format!("{{{whole}}}: a {method} has no body")),
        Some(("query" | "header" | "json", _)) => Place::parse(source, pointers),
        _ => Err(format!("{{{whole}}} is not known: use {NAMES}")),
    }
}
