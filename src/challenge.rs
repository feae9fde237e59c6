//! Handshakes that a provider expects answered: from the request and the settings alone, never from a store.
//!
//! Invariant: what is answered here is never an event, and what is a handshake, or a GET or HEAD, never becomes one,
//! whatever is wrong with it. An answer repeats tokens of a narrow shape only, and what it has signed for a sender
//! cannot be passed off as something that the provider signed.

use std::borrow::Cow;

use bytes::Bytes;
use http::{HeaderMap, Method, StatusCode};
use subtle::ConstantTimeEq;

use crate::body::Received;
use crate::config::Source;
use crate::error::Code;
use crate::parts::{Fault, Parts};
use crate::provider::Key;
use crate::provider::handshake::{Handshake, ReplyPiece, Require, When, is_word};
use crate::provider::place::Place;
use crate::verify::{Verified, tag};

/// Longest token that is repeated, in bytes.
const TOKEN_MAX: usize = 256;
/// Longest token that is signed, in bytes.
const SIGNED_TOKEN_MAX: usize = 128;

/// What a handshake is answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// The status.
    pub status: StatusCode,
    /// All headers, the content type too.
    pub headers: HeaderMap,
    /// The body.
    pub body: Bytes,
}

/// The answer to a GET or HEAD, which no provider signs.
///
/// # Errors
/// It is no handshake, or one with something wrong in it: it is refused, since it is no event either.
pub fn unsigned(received: &Received) -> Result<Option<Reply>, Code> {
    if received.head.method == Method::POST {
        return Ok(None);
    }
    match answer(received, received.source.keys.first())? {
        Some(reply) => Ok(Some(reply)),
        None => Err(Code::HandshakeMalformed),
    }
}

/// The answer to a handshake that came like an event, with a right signature; none if it is an event.
///
/// # Errors
/// It is a handshake with something wrong in it.
pub fn signed(verified: &Verified) -> Result<Option<Reply>, Code> {
    let received = verified.request();
    let handshakes = &received.source.scheme.handshakes;
    if handshakes.list.is_empty() {
        return Ok(None);
    }
    if handshakes.signs_bare_tokens && could_be_signed_here(&received.body) {
        return Err(Code::HandshakeRefused);
    }
    answer(received, received.source.keys.get(verified.key()))
}

/// The sender may have got the signature of such a body as the answer to a handshake.
fn could_be_signed_here(body: &[u8]) -> bool {
    body.len() <= SIGNED_TOKEN_MAX && body.iter().copied().all(is_word)
}

fn answer(received: &Received, key: Option<&Key>) -> Result<Option<Reply>, Code> {
    let source = received.source.as_ref();
    let handshakes = &source.scheme.handshakes;
    let parts = Parts::of(received, &handshakes.pointers);
    for handshake in handshakes.list.iter().filter(|handshake| handshake.method == received.head.method) {
        if triggered(handshake.when.as_ref(), &parts)? {
            permitted(handshake.require.as_ref(), source, &parts)?;
            return reply(handshake, key, &parts).map(Some);
        }
    }
    Ok(None)
}

fn triggered(when: Option<&When>, parts: &Parts<'_>) -> Result<bool, Code> {
    let Some(When { place, equals }) = when else { return Ok(true) };
    match (parts.read(place), equals) {
        (Ok(Some(text)), Some(wanted)) => Ok(text == wanted.as_str()),
        (Ok(found), None) => Ok(found.is_some()),
        (Err(Fault::Twice), _) | (Err(Fault::Invalid), None) => Err(Code::HandshakeMalformed),
        (Ok(None) | Err(_), _) => Ok(false),
    }
}

fn permitted(require: Option<&Require>, source: &Source, parts: &Parts<'_>) -> Result<(), Code> {
    let Some(Require { place, secret }) = require else { return Ok(()) };
    let Ok(Some(given)) = parts.read(place) else { return Err(Code::HandshakeRefused) };
    let wanted = source.handshake_secrets.get(secret).and_then(Key::as_token);
    match wanted.map(|wanted| bool::from(wanted.ct_eq(given.as_bytes()))) {
        Some(true) => Ok(()),
        Some(false) | None => Err(Code::HandshakeRefused),
    }
}

fn reply(handshake: &Handshake, key: Option<&Key>, parts: &Parts<'_>) -> Result<Reply, Code> {
    let rule = &handshake.reply;
    let mut body = String::new();
    for piece in &rule.body {
        match piece {
            ReplyPiece::Literal(text) => body.push_str(text),
            ReplyPiece::Token(place) => {
                let token = token(place, parts, TOKEN_MAX, |byte| byte.is_ascii_graphic())?;
                body.push_str(&if rule.json { escaped(&token) } else { token });
            }
            ReplyPiece::Hmac(encoding, place) => {
                let token = token(place, parts, SIGNED_TOKEN_MAX, is_word)?;
                let key = key.and_then(Key::as_hmac).ok_or(Code::HandshakeRefused)?;
                body.push_str(&encoding.encode(tag(key, &[token.as_bytes().into()]).as_ref()));
            }
        }
    }
    Ok(Reply { status: rule.status, headers: rule.headers.iter().cloned().collect(), body: body.into() })
}

fn token<'a>(
    place: &Place,
    parts: &Parts<'a>,
    max: usize,
    fits: impl Fn(u8) -> bool,
) -> Result<Cow<'a, str>, Code> {
    match parts.read(place) {
        Ok(Some(text)) if !text.is_empty() && text.len() <= max && text.bytes().all(fits) => Ok(text),
        Ok(_) | Err(_) => Err(Code::HandshakeMalformed),
    }
}

/// As it stands inside a JSON string.
fn escaped(text: &str) -> Cow<'static, str> {
    let quoted = serde_json::Value::from(text).to_string();
    Cow::Owned(quoted.get(1..quoted.len() - 1).unwrap_or_default().to_owned())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use crate::fixture::{now, received, scheme, source};
    use crate::verify::verify;

    use super::*;

    const BASE: &str =
        "kind = \"hmac\"\nsign = \"SIGN\"\nsig = { from = \"header:X-Sig\" }\nid = \"json:/id\"\n";
    const URL_VALIDATION: &str = r#"
        [[handshake]]
        when = { json = "/type", equals = "check" }
        reply = { type = "application/json", body = '{"plain":"{json:/token}","tag":"{hmac-hex:json:/token}"}' }
        [[handshake]]
        when = { json = "/type", equals = "echo" }
        reply = { body = "{json:/token}" }
    "#;
    const SUBSCRIPTION: &str = r#"
        [[handshake]]
        when = { method = "GET", query = "mode", equals = "subscribe" }
        require = { query = "verify", secret = "verify_token" }
        reply = { body = "{query:challenge}" }
    "#;

    fn request(sign: &str, handshakes: &str, path: &str, body: &str) -> Received {
        let scheme = scheme(&(BASE.replace("SIGN", sign) + handshakes));
        let mut source = source(&scheme, &["old", "k"]);
        source.handshake_secrets.insert("verify_token".to_owned(), Key::token(b"let me in"));
        let content = sign.replace("{body}", body);
        let key = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, b"k");
        let sig = hex::encode(ring::hmac::sign(&key, content.as_bytes()));
        received(source, path, &[("x-sig", sig.as_bytes())], body.to_owned())
    }

    fn get(handshakes: &str, query: &str) -> Result<String, Code> {
        let mut received = request("{body}", handshakes, &format!("/in/test?{query}"), "");
        received.head.method = Method::GET;
        unsigned(&received).map(|reply| String::from_utf8(reply.unwrap().body.to_vec()).unwrap())
    }

    fn post(sign: &str, body: &str) -> Result<Option<Reply>, Code> {
        let request = request(sign, URL_VALIDATION, "/in/test", body);
        assert_eq!(unsigned(&request), Ok(None));
        signed(&verify(request, now()).unwrap())
    }

    fn text(reply: Result<Option<Reply>, Code>) -> Result<Option<String>, Code> {
        reply.map(|reply| reply.map(|reply| String::from_utf8(reply.body.to_vec()).unwrap()))
    }

    #[test]
    fn a_token_is_repeated_to_who_knows_the_secret() {
        let refused = Err(Code::HandshakeRefused);
        let malformed = Err(Code::HandshakeMalformed);
        let long = "x".repeat(TOKEN_MAX + 1);
        for (query, wanted) in [
            ("mode=subscribe&verify=let+me+in&challenge=1158201444", Ok("1158201444".to_owned())),
            ("mode=subscribe&verify=let%20me%20in&challenge=%3Cb%3E", Ok("<b>".to_owned())),
            ("mode=subscribe&verify=let+me+i&challenge=1", refused.clone()),
            ("mode=subscribe&challenge=1", refused.clone()),
            ("mode=subscribe&verify=let+me+in&verify=x&challenge=1", refused),
            ("mode=subscribe&verify=let+me+in", malformed.clone()),
            ("mode=subscribe&verify=let+me+in&challenge=", malformed.clone()),
            ("mode=subscribe&verify=let+me+in&challenge=a&challenge=b", malformed.clone()),
            ("mode=subscribe&verify=let+me+in&challenge=a%0d%0ab", malformed.clone()),
            ("mode=subscribe&verify=let+me+in&challenge=%C3%A9", malformed.clone()),
            (&format!("mode=subscribe&verify=let+me+in&challenge={long}"), malformed.clone()),
            ("mode=subscribe&mode=x&verify=let+me+in&challenge=1", malformed.clone()),
            ("mode=unsubscribe&verify=let+me+in&challenge=1", malformed.clone()),
            ("", malformed),
        ] {
            assert_eq!(get(SUBSCRIPTION, query), wanted, "{query}");
        }
    }

    #[test]
    fn without_the_secret_in_the_settings_nobody_is_answered() {
        let mut received = request("{body}", SUBSCRIPTION, "/in/test?mode=subscribe&verify=&challenge=1", "");
        received.head.method = Method::GET;
        Arc::get_mut(&mut received.source).unwrap().handshake_secrets.clear();
        assert_eq!(unsigned(&received), Err(Code::HandshakeRefused));
    }

    #[test]
    fn plain_text_is_never_sniffed() {
        let mut received =
            request("{body}", SUBSCRIPTION, "/in/test?mode=subscribe&verify=let+me+in&challenge=1", "");
        received.head.method = Method::GET;
        let reply = unsigned(&received).unwrap().unwrap();
        assert_eq!(reply.headers["content-type"], "text/plain");
        assert_eq!(reply.headers["x-content-type-options"], "nosniff");
    }

    #[test]
    fn a_signed_handshake_is_answered_and_an_event_is_none() {
        let tag = |token: &str| {
            let key = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, b"k");
            hex::encode(ring::hmac::sign(&key, token.as_bytes()))
        };
        let answer = format!("{{\"plain\":\"abc_1-2\",\"tag\":\"{}\"}}", tag("abc_1-2"));
        let malformed = Err(Code::HandshakeMalformed);
        for (body, wanted) in [
            (r#"{"type":"check","token":"abc_1-2"}"#, Ok(Some(answer))),
            (r#"{"type":"echo","token":"a\"b\\"}"#, Ok(Some("a\"b\\".to_owned()))),
            (r#"{"type":"check","token":"v0:1:{}"}"#, malformed.clone()),
            (r#"{"type":"check","token":""}"#, malformed.clone()),
            (r#"{"type":"check","token":["a"]}"#, malformed.clone()),
            (r#"{"type":"check"}"#, malformed.clone()),
            (r#"{"type":"check","token":"a","token":"b"}"#, malformed.clone()),
            (r#"{"type":"check","type":"other","token":"a"}"#, malformed),
            (r#"{"type":"other","token":"a"}"#, Ok(None)),
            (r#"{"type":7,"token":"a"}"#, Ok(None)),
            (r#"{"id":"e1"}"#, Ok(None)),
            ("payload=1", Ok(None)),
        ] {
            assert_eq!(text(post("v0:{body}", body)), wanted, "{body}");
        }
        let long = "a".repeat(SIGNED_TOKEN_MAX + 1);
        let body = format!(r#"{{"type":"check","token":"{long}"}}"#);
        assert_eq!(post("v0:{body}", &body), Err(Code::HandshakeMalformed));
    }

    #[test]
    fn what_stands_in_json_is_escaped() {
        let handshake = "[[handshake]]\nwhen = { method = \"GET\", query = \"c\" }\n\
                         reply = { type = \"application/json\", body = '{\"c\":\"{query:c}\"}' }";
        assert_eq!(get(handshake, "c=a%22,%22b%5C").unwrap(), r#"{"c":"a\",\"b\\"}"#);
    }

    #[test]
    fn a_body_that_an_answer_could_have_signed_is_refused() {
        for (sign, body, wanted) in [
            ("{body}", "abc", Err(Code::HandshakeRefused)),
            ("{body}", "", Err(Code::HandshakeRefused)),
            ("{body}", "[1]", Ok(None)),
            ("v0:{body}", "abc", Ok(None)),
        ] {
            assert_eq!(post(sign, body), wanted, "{sign} {body}");
        }
    }
}
