//! Handshakes as data: which request is one, what must be right about it, and what it is answered.
//!
//! Invariant: a handshake can be told from an event by its method and one exact trigger, an answer repeats nothing of
//! a request but named tokens, and no answer is a type that a browser would run.

use http::header::{CONTENT_TYPE, X_CONTENT_TYPE_OPTIONS};
use http::{HeaderName, HeaderValue, Method, StatusCode};

use crate::json::Pointers;
use crate::provider::Kind;
use crate::provider::place::Place;
use crate::provider::signature::{Algorithm, TagEncoding};
use crate::provider::template::{Piece, Template};
use crate::settings::Table;

/// The names that may stand in the braces of an answer, for messages.
const NAMES: &str =
    "{query:NAME}, {header:NAME}, {json:/POINTER}, {hmac-hex:…} and {hmac-base64:…} around one of them";

/// All handshakes of a scheme.
#[derive(Debug, Default)]
pub(crate) struct Handshakes {
    /// Pointers of everything that they read.
    pub(crate) pointers: Pointers,
    /// The first that is triggered counts.
    pub(crate) list: Vec<Handshake>,
    /// A handshake has the sender's token signed, and the scheme signs bodies with nothing around them that a token
    /// cannot hold: a body that could be a token must then not be taken for signed.
    pub(crate) signs_bare_tokens: bool,
}

/// One handshake.
#[derive(Debug)]
pub(crate) struct Handshake {
    /// POST: signed like every event. GET and HEAD: not signed.
    pub(crate) method: Method,
    /// What tells it from other requests of that method; none: every one is it.
    pub(crate) when: Option<When>,
    /// What its sender must know.
    pub(crate) require: Option<Require>,
    /// The answer.
    pub(crate) reply: ReplyRule,
}

/// The place is there, and holds the text if one is given.
#[derive(Debug)]
pub(crate) struct When {
    pub(crate) place: Place,
    pub(crate) equals: Option<String>,
}

/// The place holds the source's secret of that name.
#[derive(Debug)]
pub(crate) struct Require {
    pub(crate) place: Place,
    pub(crate) secret: String,
}

/// How the answer is made.
#[derive(Debug)]
pub(crate) struct ReplyRule {
    pub(crate) status: StatusCode,
    /// The body is JSON: what is put into it is escaped as its strings need it.
    pub(crate) json: bool,
    /// All of them, the content type too.
    pub(crate) headers: Vec<(HeaderName, HeaderValue)>,
    pub(crate) body: Vec<ReplyPiece>,
}

/// One part of an answer's body.
#[derive(Debug)]
pub(crate) enum ReplyPiece {
    /// These characters.
    Literal(String),
    /// The token at a place.
    Token(Place),
    /// The source's signature of the token at a place.
    Hmac(TagEncoding, Place),
}

impl Handshakes {
    /// Reads the tables `handshake`.
    pub(crate) fn read(table: &mut Table, kind: Option<&Kind>) -> Self {
        let mut handshakes = Self::default();
        for table in table.table_list("handshake") {
            handshakes.list.extend(Handshake::read(table, &mut handshakes.pointers));
        }
        let hmac = |handshake: &Handshake| {
            handshake.reply.body.iter().any(|piece| matches!(piece, ReplyPiece::Hmac(..)))
        };
        if handshakes.list.iter().any(hmac) {
            match kind {
                Some(Kind::Signed { algorithm: Algorithm::Hmac(_), sign }) => {
                    let bare = |sign: &Template| signs_bare_tokens(table, sign);
                    handshakes.signs_bare_tokens = sign.iter().any(bare);
                }
                Some(_) => {
                    table.error(
                        "handshake",
                        "{hmac-…} in an answer needs kind = \"hmac\": nothing else signs for us",
                    );
                }
                None => {}
            }
        }
        handshakes
    }

    /// The source's secrets that they ask for.
    pub(crate) fn secrets(&self) -> impl Iterator<Item = &str> {
        self.list.iter().filter_map(|handshake| Some(handshake.require.as_ref()?.secret.as_str()))
    }

    /// Whether there is one of that method.
    pub(crate) fn answers(&self, method: &Method) -> bool {
        self.list.iter().any(|handshake| handshake.method == *method)
    }
}

/// The sender chooses the token and gets its signature, so that nothing the scheme signs may look like a token.
fn signs_bare_tokens(table: &Table, sign: &Template) -> bool {
    let apart = |piece: &Piece| matches!(piece, Piece::Literal(text) if !text.bytes().all(is_word));
    if sign.has(apart) {
        return false;
    }
    if !sign.has(|piece| matches!(piece, Piece::Body)) {
        table.error(
            "handshake",
            "{hmac-…} would sign whatever this scheme signs: sign needs {body}, or text with a character other than \
             letters, digits, _ and -",
        );
    }
    true
}

/// The characters of a token that is signed in an answer.
pub(crate) fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-'
}

impl Handshake {
    fn read(mut table: Table, pointers: &mut Pointers) -> Option<Self> {
        let when = table.table_or_empty("when");
        let (method, when) = read_when(when, pointers)?;
        let require = table.table("require").and_then(|require| read_require(require, pointers));
        let wrong = table.has("require") && require.is_none();
        if !table.has("reply") {
            table.error("", "reply is missing: say what is answered, e.g. reply = { status = 200 }");
        }
        let reply = table.table("reply").and_then(|reply| ReplyRule::read(reply, &method, pointers));
        table.finish();
        if wrong { None } else { Some(Self { method, when, require, reply: reply? }) }
    }
}

fn read_when(mut table: Table, pointers: &mut Pointers) -> Option<(Method, Option<When>)> {
    let methods = [("POST", 0), ("GET", 1), ("HEAD", 2)];
    let method = match table.choice("method", &methods) {
        Some(1) => Method::GET,
        Some(2) => Method::HEAD,
        _ => Method::POST,
    };
    let place = one_place(&mut table, &["json", "header", "query"], pointers);
    let equals = table.text("equals");
    if place.is_none() && equals.is_some() {
        table.error("equals", "needs json, header or query: the place whose text is compared");
    }
    if place.is_none() && method == Method::POST {
        table.error(
            "",
            "every event would be this handshake: name json, header or query, or a method other than POST",
        );
    }
    if method != Method::POST && place.as_ref().is_some_and(Place::in_body) {
        table.error("json", format!("a {method} has no body: name header or query"));
    }
    table.finish();
    if place.is_none() && method == Method::POST {
        return None;
    }
    Some((method, place.map(|place| When { place, equals })))
}

fn read_require(mut table: Table, pointers: &mut Pointers) -> Option<Require> {
    let place = one_place(&mut table, &["header", "query"], pointers);
    let secret = table.text("secret");
    if place.is_none() || secret.is_none() {
        table.error(
            "",
            "name header or query, and secret: which of the source's handshake_secrets stands there",
        );
    }
    table.finish();
    Some(Require { place: place?, secret: secret? })
}

/// The place that one of the keys names, each of which is a form of places.
fn one_place(table: &mut Table, keys: &[&'static str], pointers: &mut Pointers) -> Option<Place> {
    let mut found = None;
    for key in keys {
        let Some(text) = table.text(key) else { continue };
        if found.is_some() {
            table.error(key, "is one place too many: name one");
        }
        match Place::parse(&format!("{key}:{text}"), pointers) {
            Ok(place) => found = Some(place),
            Err(message) => table.error(key, message),
        }
    }
    found
}

impl ReplyRule {
    fn read(mut table: Table, method: &Method, pointers: &mut Pointers) -> Option<Self> {
        let status = table.count("status", 200..=299).unwrap_or(200);
        let status = u16::try_from(status).ok().and_then(|status| StatusCode::from_u16(status).ok());
        let json = table.choice("type", &[("text/plain", false), ("application/json", true)]);
        let mut headers = Vec::new();
        let body = table.text("body").unwrap_or_default();
        if !body.is_empty() {
            // Without it, a browser might run as HTML what somebody put into a link.
            headers.push((X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")));
            let content_type = if json == Some(true) { "application/json" } else { "text/plain" };
            headers.push((CONTENT_TYPE, HeaderValue::from_static(content_type)));
        }
        for (name, text) in table.named_texts("headers") {
            match (name.to_ascii_lowercase().parse::<HeaderName>(), HeaderValue::from_str(&text.value)) {
                (Ok(name), Ok(_)) if name == CONTENT_TYPE => {
                    table.error_at("headers", &text.place, "the content type is given by type");
                }
                (Ok(name), Ok(value)) => {
                    headers.retain(|(known, _)| *known != name);
                    headers.push((name, value));
                }
                _ => table.error_at("headers", &text.place, "this cannot be a header"),
            }
        }
        let body = match reply_pieces(&body, method, pointers) {
            Ok(pieces) => pieces,
            Err(message) => {
                table.error("body", message);
                return None;
            }
        };
        table.finish();
        Some(Self { status: status?, json: json.unwrap_or(false), headers, body })
    }
}

/// A brace opens a name only before a small letter, so that JSON can be written as it is.
fn reply_pieces(text: &str, method: &Method, pointers: &mut Pointers) -> Result<Vec<ReplyPiece>, String> {
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
        pieces.push(reply_piece(name, method, pointers)?);
        rest = after;
    }
    literal.push_str(rest);
    if !literal.is_empty() {
        pieces.push(ReplyPiece::Literal(literal));
    }
    Ok(pieces)
}

fn reply_piece(name: &str, method: &Method, pointers: &mut Pointers) -> Result<ReplyPiece, String> {
    let (encoding, source) = match name.split_once(':') {
        Some(("hmac-hex", source)) => (Some(TagEncoding::Hex), source),
        Some(("hmac-base64", source)) => (Some(TagEncoding::Base64), source),
        _ => (None, name),
    };
    match source.split_once(':') {
        Some(("json", _)) if *method != Method::POST => {
            return Err(format!("{{{name}}}: a {method} has no body"));
        }
        Some(("query" | "header" | "json", _)) => {}
        _ => return Err(format!("{{{name}}} is not known: use {NAMES}")),
    }
    let place = Place::parse(source, pointers)?;
    Ok(match encoding {
        Some(encoding) => ReplyPiece::Hmac(encoding, place),
        None => ReplyPiece::Token(place),
    })
}

#[cfg(test)]
mod tests {
    use crate::fixture::read_scheme;

    const GOOD: &str = r#"
        kind = "hmac"
        sign = "v0:{body}"
        sig = { from = "header:X-Sig" }
        id = []
        [[handshake]]
        when = { method = "GET", query = "mode", equals = "on" }
        require = { query = "token", secret = "verify_token" }
        reply = { status = 200, type = "application/json", headers = { X-A = "b" }, body = '{"r":"{hmac-hex:query:c}"}' }
    "#;

    /// The messages about a scheme, one to a line.
    fn messages(toml: &str) -> String {
        let (_, problems) = read_scheme(toml);
        problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn mistakes_are_named_where_they_are() {
        assert_eq!(messages(GOOD), "");
        for (good, bad, wanted) in [
            (
                "method = \"GET\", query = \"mode\", equals = \"on\"",
                "",
                "every event would be this handshake",
            ),
            ("method = \"GET\", query = \"mode\", ", "", "equals: needs json, header or query"),
            ("method = \"GET\"", "method = \"PUT\"", "\"POST\", \"GET\", \"HEAD\""),
            ("query = \"mode\"", "json = \"/mode\"", "a GET has no body"),
            ("query = \"mode\"", "query = \"mode\", header = \"x\"", "one place too many"),
            ("query = \"mode\"", "qery = \"mode\"", "did you mean \"query\"?"),
            ("query = \"token\", ", "", "name header or query, and secret"),
            (", secret = \"verify_token\"", "", "name header or query, and secret"),
            ("reply = {", "replies = {", "reply is missing"),
            ("status = 200", "status = 302", "out of range"),
            ("application/json", "text/html", "\"text/plain\", \"application/json\""),
            ("X-A = \"b\"", "\"X A\" = \"b\"", "cannot be a header"),
            ("X-A = \"b\"", "Content-Type = \"b/c\"", "given by type"),
            ("X-A = \"b\"", "X-A = 1", "expected a string"),
            ("{hmac-hex:query:c}", "{hmac-md5:query:c}", "is not known"),
            ("{hmac-hex:query:c}", "{hmac-hex:json:/c}", "a GET has no body"),
            ("{hmac-hex:query:c}", "{query:}", "lacks a name"),
            ("{hmac-hex:query:c}\"}", "{query:c", "no closing brace"),
            (
                "kind = \"hmac\"\n        sign = \"v0:{body}\"",
                "kind = \"token\"",
                "nothing else signs for us",
            ),
            ("\"v0:{body}\"", "\"{json:/a}\"", "would sign whatever this scheme signs"),
        ] {
            assert!(GOOD.contains(good), "{good}");
            let found = messages(&GOOD.replace(good, bad));
            assert!(found.contains(wanted), "{bad}\n{found}");
        }
    }

    #[test]
    fn whether_a_body_could_be_a_token_is_worked_out() {
        for (sign, bare) in [("v0:{body}", false), ("{body}", true), ("v0-{body}", true), ("{body}.", false)]
        {
            let (scheme, problems) = read_scheme(&GOOD.replace("v0:{body}", sign));
            assert_eq!(problems, []);
            assert_eq!(scheme.unwrap().handshakes.signs_bare_tokens, bare, "{sign}");
        }
    }
}
