//! Handshakes that a provider expects answered: from the request and the settings alone, never from a store.
//!
//! Invariant: what is answered here is never an event, and what is a handshake, or a GET, HEAD or OPTIONS, never becomes
//! one, whatever is wrong with it. An answer repeats tokens of a narrow shape only, and what it has signed for a sender
//! cannot be passed off as something that the provider signed.

mod answer;

use bytes::Bytes;
use http::{HeaderMap, Method, StatusCode};
use jiff::Timestamp;
use subtle::ConstantTimeEq as _;

use crate::body::Received;
use crate::config::{Secret, Source};
use crate::error::Code;
use crate::json::Found;
use crate::parts::{Fault, Parts};
use crate::provider::Key;
use crate::provider::handshake::reply::Shape;
use crate::provider::handshake::{Handshake, Holds, Require, When};
use crate::provider::place::Place;
use crate::provider::template::Template;
use crate::verify::content::Inputs;
use crate::verify::{self, Verified};

use answer::{Answer, configured, token};

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

impl Reply {
    /// 200, and nothing else.
    pub(crate) fn ok() -> Self {
        Self { status: StatusCode::OK, headers: HeaderMap::new(), body: Bytes::new() }
    }
}

/// A handshake that nobody signed, or that is signed with what it brings.
#[derive(Debug)]
pub enum Unsigned {
    /// To be answered so.
    Answer(Reply),
    /// It hands over a secret that the source does not have yet.
    Handover(Handover),
}

/// A secret that somebody hands over. Nobody has vouched for it.
#[derive(Debug)]
pub struct Handover {
    /// What is to be kept.
    pub secret: Secret,
    /// The answer once it is kept, and not before.
    pub reply: Reply,
}

/// The handshake in a request that no secret of the source has signed; none if it may be an event, which a POST with a
/// signature, or with anything else in its body, always may.
///
/// # Errors
/// It is no handshake, or one with something wrong in it, and it is no event either.
pub fn unsigned(received: &Received, now: Timestamp) -> Result<Option<Unsigned>, Code> {
    if received.head.method == Method::POST {
        return unsigned_post(received, now);
    }
    match answer(received, received.source.keys.first())? {
        Some(reply) => Ok(Some(Unsigned::Answer(reply))),
        None => Err(Code::HandshakeMalformed),
    }
}

fn unsigned_post(received: &Received, now: Timestamp) -> Result<Option<Unsigned>, Code> {
    let source = received.source.as_ref();
    let handshakes = &source.scheme.handshakes;
    let parts = Parts::of(received, &handshakes.pointers);
    for handshake in handshakes.list.iter().filter(|handshake| handshake.unsigned.is_some()) {
        if !triggered(handshake, &parts)? {
            continue;
        }
        if let Some(place) = &handshake.take {
            return take(place, handshake, received, &parts, now);
        }
        if verify::has_signature(received) {
            continue;
        }
        permitted(handshake.require.as_ref(), source, &parts)?;
        let reply =
            Answer { rule: &handshake.reply, key: source.keys.first(), parts: &parts, source }.reply()?;
        return Ok(Some(Unsigned::Answer(reply)));
    }
    Ok(None)
}

/// A signature beside the secret has to be made with it; else it may be by a secret that the source has.
fn take(
    place: &Place,
    handshake: &Handshake,
    received: &Received,
    parts: &Parts<'_>,
    now: Timestamp,
) -> Result<Option<Unsigned>, Code> {
    let source = received.source.as_ref();
    let secret = token(place, parts, Shape::SECRET)?;
    let key = source.scheme.key(&secret).or(Err(Code::HandshakeMalformed))?;
    if verify::has_signature(received) && !verify::is_signed_with(received, &key, now) {
        return Ok(None);
    }
    let reply = Answer { rule: &handshake.reply, key: None, parts, source }.reply()?;
    // The provider repeats a handshake whose answer was lost.
    if source.keys.iter().any(|known| known.is(&key)) {
        return Ok(Some(Unsigned::Answer(reply)));
    }
    Ok(Some(Unsigned::Handover(Handover { secret: Secret(secret.into_owned()), reply })))
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
    if handshakes.signs.iter().any(|shape| could_be_signed_here(received, *shape)) {
        return Err(Code::HandshakeRefused);
    }
    answer(received, received.source.keys.get(verified.key()))
}

/// The sender may have got the signature of what was signed, as far as a sender can choose it, as the answer to a
/// handshake.
fn could_be_signed_here(received: &Received, shape: Shape) -> bool {
    let scheme = received.source.scheme.as_ref();
    let parts = Parts::of(received, &scheme.signed);
    // Time and id are left out: what remains has to be no part of a token.
    let inputs = Inputs { parts: &parts, time: Some(""), id: Some(""), secret: None, time_header: None };
    let could = |sign: &Template| match inputs.content(sign) {
        Ok(content) if content.iter().map(|piece| piece.len()).sum::<usize>() > shape.max() => false,
        Ok(content) => shape.could_hold(&content.concat()),
        // This is not the form that was signed.
        Err(_) => false,
    };
    scheme.templates().iter().any(could)
}

fn answer(received: &Received, key: Option<&Key>) -> Result<Option<Reply>, Code> {
    let source = received.source.as_ref();
    let handshakes = &source.scheme.handshakes;
    let parts = Parts::of(received, &handshakes.pointers);
    for handshake in handshakes.list.iter().filter(|handshake| handshake.method == received.head.method) {
        if triggered(handshake, &parts)? {
            permitted(handshake.require.as_ref(), source, &parts)?;
            return Answer { rule: &handshake.reply, key, parts: &parts, source }.reply().map(Some);
        }
    }
    Ok(None)
}

/// An event keeps being one whatever stands in its URL and headers, so the body is looked at first.
fn triggered(handshake: &Handshake, parts: &Parts<'_>) -> Result<bool, Code> {
    if handshake.unsigned.as_ref().is_some_and(|whole| !whole.is(parts.body)) {
        return Ok(false);
    }
    let Some(When { place, holds }) = &handshake.when else { return Ok(true) };
    if let (Holds::EmptyList, Place::Json { slot, .. }) = (holds, place) {
        return match parts.json(*slot) {
            Ok(Found::Value(list)) => Ok(is_empty_list(list)),
            Ok(Found::Twice) => Err(Code::HandshakeMalformed),
            Ok(_) | Err(_) => Ok(false),
        };
    }
    match (parts.read(place), holds) {
        (Ok(Some(text)), Holds::Text(wanted)) => Ok(text == wanted.as_str()),
        (Ok(found), Holds::Any) => Ok(found.is_some()),
        (Err(Fault::Twice), _) | (Err(Fault::Invalid), Holds::Any) => Err(Code::HandshakeMalformed),
        (Ok(_) | Err(_), _) => Ok(false),
    }
}

fn is_empty_list(raw: &str) -> bool {
    let inner = raw.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    inner.is_some_and(|inner| inner.trim_ascii().is_empty())
}

fn permitted(require: Option<&Require>, source: &Source, parts: &Parts<'_>) -> Result<(), Code> {
    let Some(Require { place, secret }) = require else { return Ok(()) };
    let Ok(Some(given)) = parts.read(place) else { return Err(Code::HandshakeRefused) };
    match configured(secret, source).map(|wanted| bool::from(wanted.ct_eq(given.as_bytes()))) {
        Ok(true) => Ok(()),
        Ok(false) | Err(_) => Err(Code::HandshakeRefused),
    }
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
        token = { chars = "graphic" }
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
        text(unsigned_reply(&received)).map(Option::unwrap)
    }

    fn unsigned_reply(received: &Received) -> Result<Option<Reply>, Code> {
        unsigned(received, now()).map(|found| match found {
            Some(Unsigned::Answer(reply)) => Some(reply),
            Some(Unsigned::Handover(_)) => panic!("a secret"),
            None => None,
        })
    }

    fn post(sign: &str, body: &str) -> Result<Option<Reply>, Code> {
        let request = request(sign, URL_VALIDATION, "/in/test", body);
        assert_eq!(unsigned_reply(&request), Ok(None));
        signed(&verify(request, now()).unwrap())
    }

    fn text(reply: Result<Option<Reply>, Code>) -> Result<Option<String>, Code> {
        reply.map(|reply| reply.map(|reply| String::from_utf8(reply.body.to_vec()).unwrap()))
    }

    #[test]
    fn a_token_is_repeated_to_who_knows_the_secret() {
        let refused = Err(Code::HandshakeRefused);
        let malformed = Err(Code::HandshakeMalformed);
        let long = "x".repeat(257);
        for (query, wanted) in [
            ("mode=subscribe&verify=let+me+in&challenge=1158201444", Ok("1158201444".to_owned())),
            ("mode=subscribe&verify=let%20me%20in&challenge=%3Cb%3E", malformed.clone()),
            ("mode=subscribe&verify=let%20me%20in&challenge=a%2Fb+%3D", malformed.clone()),
            ("mode=subscribe&verify=let%20me%20in&challenge=a%2Fb%3D", Ok("a/b=".to_owned())),
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
        assert_eq!(unsigned_reply(&received), Err(Code::HandshakeRefused));
    }

    #[test]
    fn plain_text_is_never_sniffed() {
        let mut received =
            request("{body}", SUBSCRIPTION, "/in/test?mode=subscribe&verify=let+me+in&challenge=1", "");
        received.head.method = Method::GET;
        let reply = unsigned_reply(&received).unwrap().unwrap();
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
        let long = "a".repeat(129);
        let body = format!(r#"{{"type":"check","token":"{long}"}}"#);
        assert_eq!(post("v0:{body}", &body), Err(Code::HandshakeMalformed));
    }

    #[test]
    fn what_stands_in_json_is_escaped() {
        let handshake = "[[handshake]]\nwhen = { method = \"GET\", query = \"c\" }\n\
                         token = { chars = \"graphic\" }\nreply = { type = \"application/json\", body = '{\"c\":\"{query:c}\"}' }";
        assert_eq!(get(handshake, "c=a%22,%22b%5C").unwrap(), r#"{"c":"a\",\"b\\"}"#);
    }

    #[test]
    fn a_body_that_an_answer_could_have_signed_is_refused() {
        for (sign, body, wanted) in [
            ("{body}", "abc", Err(Code::HandshakeRefused)),
            ("{body}", "", Err(Code::HandshakeRefused)),
            ("v0-{body}", "abc", Err(Code::HandshakeRefused)),
            ("{body}", "[1]", Ok(None)),
            ("v0:{body}", "abc", Ok(None)),
        ] {
            assert_eq!(post(sign, body), wanted, "{sign} {body}");
        }
    }

    /// What an unsigned POST, to a scheme with the secret "k", is taken for.
    fn posted(
        handshake: &str,
        path: &str,
        headers: &[(&str, &[u8])],
        body: &str,
    ) -> Result<Option<Unsigned>, Code> {
        let scheme = scheme(&(BASE.replace("SIGN", "{body}") + handshake));
        unsigned(&received(source(&scheme, &["k"]), path, headers, body.to_owned()), now())
    }

    fn answered(found: Result<Option<Unsigned>, Code>) -> Result<Option<String>, Code> {
        found.map(|found| match found {
            Some(Unsigned::Answer(reply)) => Some(String::from_utf8(reply.body.to_vec()).unwrap()),
            Some(Unsigned::Handover(_)) => panic!("a secret"),
            None => None,
        })
    }

    const BY_QUERY: &str = "[[handshake]]\nwhen = { query = \"t\" }\nunsigned = []\ntoken = { chars = \"text\" }\n\
                            reply = { body = \"{query:t}\" }";
    const BY_JSON: &str = "[[handshake]]\nwhen = { json = \"/challenge\" }\nunsigned = [\"challenge\"]\n\
                           reply = { type = \"application/json\", body = '{\"challenge\":\"{json:/challenge}\"}' }";

    #[test]
    fn an_unsigned_post_is_a_handshake_only_if_it_can_be_nothing_else() {
        let malformed = Err(Code::HandshakeMalformed);
        let signature: &[(&str, &[u8])] = &[("x-sig", b"00")];
        let long = format!("/in/x?t={}", "x".repeat(257));
        for (path, headers, body, wanted) in [
            (
                "/in/x?t=Validation%3a+a+b",
                &[] as &[(&str, &[u8])],
                "",
                Ok(Some("Validation: a b".to_owned())),
            ),
            ("/in/x?t=a", &[], "{}", Ok(Some("a".to_owned()))),
            ("/in/x?t=a", &[], "{\"value\":[]}", Ok(None)),
            ("/in/x?t=a", &[], "value=1", Ok(None)),
            ("/in/x?t=a", signature, "", Ok(None)),
            ("/in/x?t=a&t=b", &[], "{\"value\":[]}", Ok(None)),
            ("/in/x?u=a", &[], "", Ok(None)),
            ("/in/x?t=a&t=b", &[], "", malformed.clone()),
            ("/in/x?t=", &[], "", malformed.clone()),
            ("/in/x?t=%3Cscript%3E", &[], "", malformed.clone()),
            ("/in/x?t=a%00", &[], "", malformed.clone()),
            ("/in/x?t=a%0d%0aSet-Cookie%3a+b", &[], "", malformed.clone()),
            ("/in/x?t=%C3%A9", &[], "", malformed.clone()),
            ("/in/x?t=%FF", &[], "", malformed.clone()),
            (long.as_str(), &[], "", malformed.clone()),
        ] {
            assert_eq!(answered(posted(BY_QUERY, path, headers, body)), wanted, "{path} {body}");
        }
        for (body, wanted) in [
            ("{\"challenge\":\"abc\"}", Ok(Some("{\"challenge\":\"abc\"}".to_owned()))),
            ("{\"challenge\":\"abc\",\"event\":{}}", Ok(None)),
            ("{\"event\":{\"challenge\":\"abc\"}}", Ok(None)),
            ("{\"challenge\":\"abc\",\"challenge\":\"abc\"}", Ok(None)),
            ("{\"challenge\":null}", Ok(None)),
            ("{\"challenge\":[\"abc\"]}", malformed.clone()),
            ("{\"challenge\":\"a\\\",\\\"b\\\":\\\"c\"}", malformed.clone()),
            ("{\"challenge\":\"\"}", malformed),
        ] {
            assert_eq!(answered(posted(BY_JSON, "/in/x", &[], body)), wanted, "{body}");
        }
    }

    const HANDED: &str = "[[handshake]]\nwhen = { header = \"x-secret\" }\nunsigned = []\n\
                          take = { header = \"x-secret\" }\ntoken = { chars = \"graphic\" }\n\
                          reply = { status = 200, headers = { x-secret = \"{header:x-secret}\" } }";

    #[test]
    fn a_secret_is_handed_over_with_no_signature_or_with_its_own() {
        const SECRET: &str = "fedcba9876543210";
        let sign = |key: &str, body: &str| {
            let key = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, key.as_bytes());
            hex::encode(ring::hmac::sign(&key, body.as_bytes()))
        };
        let post = |secret: &str, signature: Option<String>, body: &str| {
            let mut headers = vec![("x-secret", secret.as_bytes())];
            headers.extend(signature.as_ref().map(|text| ("x-sig", text.as_bytes())));
            posted(HANDED, "/in/x", &headers, body)
        };
        for signature in [None, Some(sign(SECRET, ""))] {
            let found = post(SECRET, signature, "").unwrap().unwrap();
            let Unsigned::Handover(Handover { secret, reply }) = found else { panic!("{found:?}") };
            assert_eq!((secret.0.as_str(), reply.body.len()), (SECRET, 0));
            assert_eq!(reply.headers["x-secret"], SECRET);
        }
        assert!(post(SECRET, Some(sign("other", "")), "").unwrap().is_none(), "it may be an event");
        assert!(post(SECRET, None, "{\"events\":[1]}").unwrap().is_none(), "it is no handshake");
        for unfit in ["short", &"x".repeat(257), "fedcba9876 543210", "fedcba98765432\u{e9}"] {
            assert_eq!(post(unfit, None, "").unwrap_err(), Code::HandshakeMalformed, "{unfit}");
        }
        // The source has it already.
        let scheme = scheme(&(BASE.replace("SIGN", "{body}") + HANDED));
        let known = received(source(&scheme, &["k", SECRET]), "/", &[("x-secret", SECRET.as_bytes())], "");
        assert!(matches!(unsigned(&known, now()), Ok(Some(Unsigned::Answer(_)))));
    }

    #[test]
    fn a_list_without_items_is_a_trigger() {
        let handshake = "[[handshake]]\nwhen = { json = \"/events\", empty = true }\nreply = {}";
        for (body, wanted) in [
            ("{\"events\":[ ]}", Ok(true)),
            ("{\"events\":[1]}", Ok(false)),
            ("{\"events\":\"[]\"}", Ok(false)),
            ("{\"events\":null}", Ok(false)),
            ("{}", Ok(false)),
            ("{\"events\":[],\"events\":[1]}", Err(Code::HandshakeMalformed)),
        ] {
            let verified = verify(request("v0:{body}", handshake, "/in/test", body), now()).unwrap();
            assert_eq!(signed(&verified).map(|reply| reply.is_some()), wanted, "{body}");
        }
    }

    #[test]
    fn a_challenge_is_hashed_with_a_secret_and_the_url_that_the_provider_was_given() {
        let handshake = "[[handshake]]\nwhen = { method = \"GET\", query = \"c\" }\n\
                         reply = { body = \"{sha256-hex:query:c + config:token + endpoint}\" }";
        let get = |public_url: Option<&str>, token: Option<&str>| {
            let scheme = scheme(&(BASE.replace("SIGN", "{body}") + handshake));
            let mut source = source(&scheme, &["k"]);
            source.public_url = public_url.map(str::to_owned);
            source
                .handshake_secrets
                .extend(token.map(|text| ("token".to_owned(), Key::token(text.as_bytes()))));
            let mut received = received(source, "/in/x?c=abc", &[("host", b"evil.example")], "");
            received.head.method = Method::GET;
            answered(unsigned(&received, now()))
        };
        let wanted = hex::encode(crate::parts::sha256(b"abcsecrethttps://hooks.example.com/in/x"));
        assert_eq!(get(Some("https://hooks.example.com"), Some("secret")), Ok(Some(wanted)));
        assert_eq!(get(None, Some("secret")), Err(Code::HandshakeRefused));
        assert_eq!(get(Some("https://hooks.example.com"), None), Err(Code::HandshakeRefused));
    }

    #[test]
    fn a_form_field_that_an_answer_could_have_signed_is_refused() {
        let scheme = crate::provider::Scheme::preset("braintree").unwrap();
        let sign = |payload: &str| {
            let key = ring::digest::digest(&ring::digest::SHA1_FOR_LEGACY_USE_ONLY, b"private");
            let key = ring::hmac::Key::new(ring::hmac::HMAC_SHA1_FOR_LEGACY_USE_ONLY, key.as_ref());
            hex::encode(ring::hmac::sign(&key, payload.as_bytes()))
        };
        let keyed = || {
            let mut source = source(&scheme, &["private"]);
            source.handshake_secrets.insert("public_key".to_owned(), Key::token(b"public"));
            source
        };
        let challenge = "20f9f8ed05f77439fe955c977e4c8a53";
        for (text, wanted) in [
            (challenge, Ok(Some(format!("public|{}", sign(challenge))))),
            (&challenge[..19], Err(Code::HandshakeMalformed)),
            ("20F9F8ED05F77439FE955C977E4C8A53", Err(Code::HandshakeMalformed)),
            ("PG5vdGlmaWNhdGlvbj48a2luZD5", Err(Code::HandshakeMalformed)),
        ] {
            let mut get = received(keyed(), &format!("/in/x?bt_challenge={text}"), &[], "");
            get.head.method = Method::GET;
            assert_eq!(answered(unsigned(&get, now())), wanted, "{text}");
        }
        for (payload, wanted) in [(challenge, Err(Code::HandshakeRefused)), ("PG5vdGlmaWNhdGlvbj4=", Ok(()))]
        {
            let body = format!("bt_signature=public%7C{}&bt_payload={payload}", sign(payload));
            let verified = verify(received(keyed(), "/in/x", &[], body), now()).unwrap();
            assert_eq!(signed(&verified).map(drop), wanted, "{payload}");
        }
    }
}
