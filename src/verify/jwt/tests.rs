//! Tokens that are right, and each way in which one can be wrong.

use std::sync::Arc;

use p521::ecdsa::signature::RandomizedSigner as _;
use p521::elliptic_curve::rand_core::{self, CryptoRng, RngCore};
use proptest::prelude::{any, prop_assert, prop_assume, proptest};
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair as _};
use serde_json::json;

use super::*;
use crate::config::Source;
use crate::fixture::{NOW, now, received, scheme};
use crate::provider::Scheme;
use crate::verify::{Wanted, verify, verify_with, wanted as wanted_of};

/// `{}`, signed with a key that nobody has any more.
const RSA_TOKEN: &str = "eyJhbGciOiJSUzI1NiJ9.e30.R1yqSSrOLftPYzAEcCxelYaGu1NiN2hYDUwjm7y3oOe4quNDiHocrydDy1OzisPlVTAzLhjARCP\
    NIZeDAlVZQQ60L5Q77UlqO-M1fZH6Q8lIQdOPO_M0yP9OG0CTEsGs9K2uYcnEDM4McHFCvu7R-\
    Y7TSsMqI043A3vfxGzForJRU3BaStxbCjdMrKtRkTpIbghTFfewVGuv070Bqhi1UD1Q3pAXK0-\
    bMK_OHPL3afyLu1L9QBaT1CIaQ0ayIBLhvYM2uEXFg0P50b_htquGvcifNG2fuXQTMvQOdi1_LNJIiKrzKIGCR-\
    l7q45AVbPZc5Ff6vO7BbM70y4k2pV2AA";
const RSA_PEM: &str = "-----BEGIN PUBLIC KEY-----\n\
    MIIBIjANBgkqhkiG9w0BAQEFAAOCAQ8AMIIBCgKCAQEAtTNmrS2ga7/Kiqkox7+B\n\
    XHh8uiLN1DbOsI18uqnOBbtRib+2UD0Iyb+XI52rOwzMakjiDFN46qrWDr+gjX/b\n\
    DlS6edDfEwU8z/NPTdGSa8z/lt+kGHdIjVukW/4Bo347Vo17HJdYNKAo8bOulB+e\n\
    6drRhG+tR1FB35xwged1WgWG5TVl1UrtY0CMp5hLi3PFokS6Lxx6YdQ8v3ku7XJG\n\
    SrXdL4f8zyGbJk3pG9JH/zEkS9p/BR98inEGvHX74D1rpLeqKT3PlWPdGZDg1rro\n\
    +QLxCDBx1ZCVFs9YRBI/BKMB8NAfHfm5MMIOC0OkCy3j/qnOQvJNcQsdl3z762b/\n\
    +QIDAQAB\n\
    -----END PUBLIC KEY-----\n";
const SECRET: &str = "a-shared-secret";
const BODY: &[u8] = b"{\"id\":\"e1\"}";
/// SHA-256 of the body, of nothing, and of the URL.
const HASHED: &str = r#"
    kind = "jwt"
    sig = { from = "header:x-token", prefix = "Bearer " }
    body_hash = { from = "claim:/body" }
    url_hash = { from = "claim:/url" }
    require = { "claim:/iss" = "us" }
    id = "claim:/jti"
    jwt = { algs = ["HS256"], need = ["exp"], leeway = "2s" }
"#;

fn b64(bytes: impl AsRef<[u8]>) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

fn plain(algs: &str) -> Arc<Scheme> {
    let toml = "kind = \"jwt\"\nsig = { from = \"header:x-token\", prefix = \"Bearer \" }\nid = []\n";
    scheme(&format!("{toml}jwt = {{ algs = {algs} }}"))
}

/// A token in which header and claims are these bytes.
fn hs(header: &str, claims: &str, secret: &[u8]) -> String {
    let input = format!("{}.{}", b64(header), b64(claims));
    let key = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, secret);
    format!("{input}.{}", b64(ring::hmac::sign(&key, input.as_bytes())))
}

fn hs256(claims: &Value) -> String {
    hs("{\"alg\":\"HS256\"}", &claims.to_string(), SECRET.as_bytes())
}

fn verdict(scheme: &Arc<Scheme>, secrets: &[&str], token: &str) -> Result<(), Code> {
    verdict_of(crate::fixture::source(scheme, secrets), token, BODY)
}

fn verdict_of(mut source: Source, token: &str, body: &[u8]) -> Result<(), Code> {
    source.public_url = Some("https://h".to_owned());
    verify(received(source, "/p?q=1", &[("x-token", token.as_bytes())], body.to_vec()), now()).map(drop)
}

struct Ec(EcdsaKeyPair);

impl Ec {
    fn new() -> Self {
        let random = SystemRandom::new();
        let document = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &random).unwrap();
        Self(EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, document.as_ref(), &random).unwrap())
    }

    fn jwk(&self, more: &Value) -> String {
        let point = self.0.public_key().as_ref();
        let mut key = json!({ "kty": "EC", "crv": "P-256", "x": b64(&point[1..33]), "y": b64(&point[33..]) });
        let more = more.as_object().unwrap().clone();
        key.as_object_mut().unwrap().extend(more);
        key.to_string()
    }

    fn token(&self, header: &Value) -> String {
        let input = format!("{}.{}", b64(header.to_string()), b64("{}"));
        let signature = self.0.sign(&SystemRandom::new(), input.as_bytes()).unwrap();
        format!("{input}.{}", b64(signature))
    }
}

/// No more than a test needs: a nonce that is not zero.
struct Counting(u8);

impl RngCore for Counting {
    fn next_u32(&mut self) -> u32 {
        7
    }

    fn next_u64(&mut self) -> u64 {
        7
    }

    fn fill_bytes(&mut self, bytes: &mut [u8]) {
        for byte in bytes {
            self.0 = self.0.wrapping_add(1);
            *byte = self.0;
        }
    }

    fn try_fill_bytes(&mut self, bytes: &mut [u8]) -> Result<(), rand_core::Error> {
        self.fill_bytes(bytes);
        Ok(())
    }
}

impl CryptoRng for Counting {}

#[test]
fn each_kind_of_key_verifies_its_own_tokens_and_no_others() {
    let all = plain("[\"HS256\", \"RS256\", \"ES256\", \"ES512\", \"EdDSA\"]");
    let ec = Ec::new();
    let (ec_key, ec_token) = (ec.jwk(&json!({})), ec.token(&json!({ "alg": "ES256" })));
    let input = |alg: &str| format!("{}.{}", b64(json!({ "alg": alg }).to_string()), b64("{}"));
    let document = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).unwrap();
    let pair = Ed25519KeyPair::from_pkcs8(document.as_ref()).unwrap();
    let edwards_key = json!({ "kty": "OKP", "crv": "Ed25519", "x": b64(pair.public_key()) }).to_string();
    let edwards_token = format!("{}.{}", input("EdDSA"), b64(pair.sign(input("EdDSA").as_bytes())));
    let secret = p521::ecdsa::SigningKey::from_slice(&[1; 66]).unwrap();
    let point = p521::ecdsa::VerifyingKey::from(&secret).to_encoded_point(false);
    let (x, y) = (b64(point.x().unwrap()), b64(point.y().unwrap()));
    let large_key = json!({ "kty": "EC", "crv": "P-521", "x": x, "y": y }).to_string();
    let signature: p521::ecdsa::Signature = secret.sign_with_rng(&mut Counting(0), input("ES512").as_bytes());
    let large_token = format!("{}.{}", input("ES512"), b64(signature.to_bytes()));
    let keys = [SECRET, &ec_key, RSA_PEM, &edwards_key, &large_key];
    let tokens = [hs256(&json!({})), ec_token, RSA_TOKEN.to_owned(), edwards_token, large_token];
    for (at, key) in keys.iter().enumerate() {
        for (of, token) in tokens.iter().enumerate() {
            let wanted = if at == of { Ok(()) } else { Err(Code::SignatureMismatch) };
            assert_eq!(verdict(&all, &[key], token), wanted, "key {at}, token {of}");
        }
    }
    for token in &tokens {
        assert_eq!(verdict(&all, &keys, token), Ok(()), "any of several");
        let only = plain("[\"HS384\"]");
        assert_eq!(verdict(&only, &[SECRET], token), Err(Code::SignedOtherwise), "not listed");
    }
}

#[test]
fn a_public_key_is_never_a_shared_secret() {
    let rs = plain("[\"RS256\", \"HS256\"]");
    for secret in [RSA_PEM, RSA_PEM.trim_end()] {
        let token = hs("{\"alg\":\"HS256\"}", "{}", secret.as_bytes());
        assert_eq!(verdict(&rs, &[RSA_PEM], &token), Err(Code::SignatureMismatch));
    }
    let bare: String = RSA_PEM.lines().filter(|line| !line.starts_with('-')).collect();
    for secret in [bare.as_str(), RSA_PEM] {
        assert_eq!(verdict(&rs, &[secret], RSA_TOKEN), Ok(()));
        let token = hs("{\"alg\":\"HS256\"}", "{}", secret.as_bytes());
        assert_eq!(verdict(&rs, &[secret], &token), Err(Code::SignatureMismatch));
    }
    assert!(rs.key("{\"kty\":\"RSA\"").unwrap_err().contains("cannot be read"));
    let hs_only = plain("[\"HS256\"]");
    assert!(hs_only.key(RSA_PEM).unwrap_err().contains("no key for HS256"));
    assert!(hs_only.key(&Ec::new().jwk(&json!({}))).unwrap_err().contains("no key for HS256"));
    assert!(hs_only.key("").is_err() && plain("[\"ES256\"]").key(SECRET).is_err());
}

/// A scheme whose sources fetch their keys.
fn fetching(more: &str) -> Arc<Scheme> {
    scheme(&format!(
        "kind = \"jwt\"\nsig = {{ from = \"header:x-token\", prefix = \"Bearer \" }}\nid = []\n\
         jwks = {{ url = \"https://auth.example.com/jwks\" }}\n{more}"
    ))
}

#[test]
fn a_set_that_is_published_verifies_with_its_public_keys_only() {
    let scheme = fetching("jwt = { algs = [\"ES256\", \"HS256\"] }");
    let (own, other) = (Ec::new(), Ec::new());
    let secret = json!({ "kty": "oct", "k": b64(SECRET), "alg": "HS256" }).to_string();
    let set = format!("{{\"keys\":[{secret},{{\"kid\":7}},null,{}]}}", own.jwk(&json!({ "kid": "a" })));
    let fetched = FetchedKeys::Set(FetchedKeys::read_set(set.as_bytes()).unwrap());
    let verdict = |keys: Vec<Key>, token: &str| {
        let source = Source::new("s", Arc::clone(&scheme), keys);
        let request = received(source, "/", &[("x-token", token.as_bytes())], BODY.to_vec());
        verify_with(request, &fetched, now()).map(|verified| verified.key())
    };
    let token = |key: &Ec, id: &str| key.token(&json!({ "alg": "ES256", "kid": id }));
    let mismatch = Err(Code::SignatureMismatch);
    assert_eq!(verdict(Vec::new(), &token(&own, "a")), Ok(0));
    assert_eq!(verdict(Vec::new(), &token(&other, "a")), mismatch);
    assert_eq!(verdict(Vec::new(), &token(&own, "b")), mismatch);
    assert_eq!(verdict(Vec::new(), &hs256(&json!({}))), mismatch, "everybody can read that secret");
    // A source's own keys win.
    let own_key = || vec![scheme.key(&other.jwk(&json!({ "kid": "b" }))).unwrap()];
    assert_eq!(verdict(own_key(), &token(&own, "a")), mismatch);
    assert_eq!(verdict(own_key(), &token(&other, "b")), Ok(0));
    for (text, told) in [
        (secret.as_str(), "no public key"),
        ("{\"keys\":[]}", "no public key"),
        ("{\"keys\":7}", "cannot be read"),
        ("{\"keys\":[7]}", "a member is missing"),
        ("<html>", "no key set"),
        (RSA_PEM, "no key set"),
        ("", "no key set"),
        (&own.jwk(&json!({ "use": "enc" })), "not for signatures"),
        (&own.jwk(&json!({ "d": "AA" })), "private"),
        (&format!("{{\"keys\":[{}]}}", vec![own.jwk(&json!({})); 65].join(",")), "64 are the limit"),
    ] {
        let message = FetchedKeys::read_set(text.as_bytes()).unwrap_err();
        assert!(message.contains(told), "{text:.60}: {message}");
    }
    assert!(FetchedKeys::read_set(b"{\"keys\":[\xff]}").is_err());
}

#[test]
fn what_needs_no_key_is_looked_at_before_one_is_fetched() {
    let scheme = fetching(
        "require = { \"jose:/jku\" = \"https://auth.example.com/jwks\", \"claim:/iss\" = \"us\" }\n\
         body_hash = { from = \"claim:/body\" }\njwt = { algs = [\"ES256\", \"HS256\"], need = [\"exp\"] }",
    );
    let hash = hex::encode(ring::digest::digest(&ring::digest::SHA256, BODY));
    let jku = "https://auth.example.com/jwks";
    let asked = |header: &Value, claims: &Value, signature: &str| {
        let token = format!("{}.{}.{signature}", b64(header.to_string()), b64(claims.to_string()));
        let source = Source::new("s", Arc::clone(&scheme), Vec::new());
        let request = || received(source.clone(), "/", &[("x-token", token.as_bytes())], BODY.to_vec());
        let asked = wanted_of(&request(), now()).map(|wanted| wanted != Wanted::Nothing);
        if let Err(code) = asked {
            assert_eq!(
                verify(request(), now()).map(drop),
                Err(code),
                "the gateway's and the command's are one"
            );
        }
        asked
    };
    let header = json!({ "alg": "ES256", "kid": "a", "jku": jku });
    let claims = json!({ "iss": "us", "body": hash, "exp": NOW + 60 });
    assert_eq!(asked(&header, &claims, "AAAA"), Ok(true));
    let with = |value: &Value, name: &str, new: Value| {
        let mut value = value.clone();
        value[name] = new;
        value
    };
    for (header, claims, signature, wanted) in [
        (with(&header, "alg", json!("RS256")), claims.clone(), "AAAA", Code::SignedOtherwise),
        (with(&header, "alg", json!("none")), claims.clone(), "AAAA", Code::SignedOtherwise),
        // A set that everybody can read has no key for it.
        (with(&header, "alg", json!("HS256")), claims.clone(), "AAAA", Code::SignedOtherwise),
        (with(&header, "kid", json!(7)), claims.clone(), "AAAA", Code::SignatureMalformed),
        (
            with(&header, "jku", json!("https://evil.example/jwks")),
            claims.clone(),
            "AAAA",
            Code::ClaimMismatch,
        ),
        (header.clone(), claims.clone(), "AAA=", Code::SignatureMalformed),
        (header.clone(), claims.clone(), "", Code::SignatureMalformed),
        (header.clone(), with(&claims, "iss", json!("them")), "AAAA", Code::ClaimMismatch),
        (header.clone(), with(&claims, "exp", json!(NOW - 60)), "AAAA", Code::TimestampStale),
        (header.clone(), with(&claims, "body", json!("00")), "AAAA", Code::BodyHashMismatch),
    ] {
        assert_eq!(asked(&header, &claims, signature), Err(wanted), "{header} {claims}");
    }
}

#[test]
fn a_key_is_tried_where_its_name_and_its_use_fit() {
    let es = plain("[\"ES256\"]");
    let ec = Ec::new();
    let token = |id: &str| ec.token(&json!({ "alg": "ES256", "kid": id }));
    let wrong = Err(Code::SignatureMismatch);
    for (more, token, wanted) in [
        (json!({ "kid": "a" }), token("a"), Ok(())),
        (json!({ "kid": "a" }), token("b"), wrong),
        (json!({ "kid": "a" }), ec.token(&json!({ "alg": "ES256" })), Ok(())),
        (json!({}), token("b"), Ok(())),
        (json!({ "alg": "ES256", "use": "sig", "key_ops": ["verify"] }), token("b"), Ok(())),
        (
            json!({ "kid": "a" }),
            ec.token(&json!({ "alg": "ES256", "kid": 7 })),
            Err(Code::SignatureMalformed),
        ),
    ] {
        assert_eq!(verdict(&es, &[&ec.jwk(&more)], &token), wanted, "{more}");
    }
    for (more, told) in [
        (json!({ "use": "enc" }), "not for signatures"),
        (json!({ "key_ops": ["sign"] }), "not for signatures"),
        (json!({ "alg": "RS256" }), "no key for ES256"),
        (json!({ "alg": "ES257" }), "ES257"),
        (json!({ "d": "AA" }), "private"),
        (json!({ "expired_at": 1 }), "expired"),
        (json!({ "x": "AA" }), "no point"),
        (json!({ "x": "*" }), "not base64url"),
        (json!({ "crv": "P-257" }), "kind"),
    ] {
        let message = es.key(&ec.jwk(&more)).unwrap_err();
        assert!(message.contains(told), "{more}: {message}");
    }
    let (other, own) = (Ec::new().jwk(&json!({ "kid": "b" })), ec.jwk(&json!({ "kid": "a" })));
    let set = format!("{{\"keys\":[{other},{{\"kty\":\"what\"}},{own}]}}");
    assert_eq!(verdict(&es, &[&set], &token("a")), Ok(()));
    assert_eq!(verdict(&es, &[&set], &token("b")), wrong);
    assert!(es.key("{\"keys\":[]}").is_err());
}

#[test]
fn tokens_are_read_strictly() {
    let scheme = plain("[\"HS256\"]");
    let good = hs256(&json!({}));
    let made = |header: &str, claims: &str| hs(header, claims, SECRET.as_bytes());
    let (input, tag) = good.rsplit_once('.').unwrap();
    let none = format!("{}.{}.", b64("{\"alg\":\"none\"}"), b64("{}"));
    let padded = format!("{}=.{}.{tag}", b64("{\"alg\":\"HS256\"}"), b64("{}"));
    let (malformed, otherwise) = (Err(Code::SignatureMalformed), Err(Code::SignedOtherwise));
    for (token, wanted) in [
        (good.clone(), Ok(())),
        (format!("Bearer {good}"), Ok(())),
        (format!("bearer {good}"), Ok(())),
        (format!("Basic {good}"), malformed),
        (none, otherwise),
        (made("{\"alg\":\"NONE\"}", "{}"), otherwise),
        (made("{\"alg\":\"hs256\"}", "{}"), otherwise),
        (made("{\"alg\":null}", "{}"), otherwise),
        (made("{}", "{}"), otherwise),
        (made("{\"alg\":\"HS256\",\"alg\":\"HS256\"}", "{}"), malformed),
        (made("{\"alg\":\"HS256\",\"x\":1,\"x\":1}", "{}"), malformed),
        (made("{\"alg\":\"HS256\"}", "{\"a\":1,\"a\":1}"), malformed),
        (made("{\"alg\":\"HS256\",\"crit\":[\"x\"]}", "{}"), otherwise),
        (made("{\"alg\":\"HS256\",\"b64\":true}", "{}"), otherwise),
        (made("[\"HS256\"]", "{}"), malformed),
        (made("{\"alg\":\"HS256\"} x", "{}"), malformed),
        (made("{\"alg\":\"HS256\"}", "[]"), malformed),
        (made("{\"alg\":\"HS256\"}", "7"), malformed),
        (padded, malformed),
        (format!("{good}="), malformed),
        (format!("{input}."), malformed),
        (format!("{input}.{tag}.{tag}"), malformed),
        (input.to_owned(), malformed),
        (format!("{}..{tag}", b64("{\"alg\":\"HS256\"}")), malformed),
        (String::new(), Err(Code::SignatureMissing)),
        ("x".repeat(TOKEN_MAX + 1), malformed),
        (made("{\"alg\":\"HS256\"}", &format!("{{\"a\":{}", "[".repeat(4_000))), malformed),
    ] {
        assert_eq!(verdict(&scheme, &[SECRET], &token), wanted, "{token:.80}");
    }
    // The last character has bits that decide nothing.
    let last: Vec<u8> = (b'A'..=b'Z').chain(b'a'..=b'z').chain(b'0'..=b'9').chain(*b"-_").collect();
    let at = last.iter().position(|one| *one == *tag.as_bytes().last().unwrap()).unwrap();
    let other = format!("{}{}", &good[..good.len() - 1], char::from(last[at ^ 1]));
    assert_eq!(verdict(&scheme, &[SECRET], &other), malformed);
}

/// Claims that are right for the request of the tests.
fn claims() -> Value {
    let hash = |bytes: &[u8]| hex::encode(ring::digest::digest(&ring::digest::SHA256, bytes));
    json!({ "iss": "us", "jti": "t1", "exp": NOW + 60, "body": hash(BODY), "url": hash(b"https://h/p?q=1") })
}

#[test]
fn what_a_token_says_has_to_be_so() {
    let scheme = scheme(HASHED);
    assert!(scheme.signs_url() && scheme.facts.id_signed && scheme.has_time());
    let (claim, stale, future) = (Code::ClaimMismatch, Code::TimestampStale, Code::TimestampFuture);
    for (name, value, wanted) in [
        ("x", json!(1), Ok(())),
        ("iss", json!(["them", "us"]), Ok(())),
        ("iss", json!("them"), Err(claim)),
        ("iss", json!(["them"]), Err(claim)),
        ("iss", json!(null), Err(claim)),
        ("body", json!(null), Err(Code::BodyNotSigned)),
        ("body", json!("00".repeat(32)), Err(Code::BodyHashMismatch)),
        ("body", json!(["00".repeat(32)]), Err(Code::BodyHashMismatch)),
        ("url", json!(null), Err(Code::UrlHashMismatch)),
        ("url", json!("00".repeat(32)), Err(Code::UrlHashMismatch)),
        // The clock's second is good until exp + leeway, exclusive, and from nbf - leeway, inclusive.
        ("exp", json!(NOW), Ok(())),
        ("exp", json!(NOW - 1), Ok(())),
        ("exp", json!(NOW - 2), Err(stale)),
        ("exp", json!(-1), Err(stale)),
        ("exp", json!(1.7e9), Ok(())),
        ("exp", json!(null), Err(claim)),
        ("exp", json!("1700000060"), Err(Code::TimestampMalformed)),
        ("exp", json!(1e300), Err(Code::TimestampMalformed)),
        ("nbf", json!(NOW + 2), Ok(())),
        ("nbf", json!(NOW + 3), Err(future)),
        ("nbf", json!({}), Err(Code::TimestampMalformed)),
    ] {
        let mut claims = claims();
        claims[name] = value.clone();
        if name == "exp" && value.is_null() {
            claims.as_object_mut().unwrap().remove("exp");
        }
        assert_eq!(verdict(&scheme, &[SECRET], &hs256(&claims)), wanted, "{name} = {value}");
    }
    let unsigned = hs("{\"alg\":\"HS256\"}", "{\"iss\":\"them\"}", b"other");
    assert_eq!(
        verdict(&scheme, &[SECRET], &unsigned),
        Err(Code::SignatureMismatch),
        "said of real ones only"
    );
}

#[test]
fn a_body_that_was_taken_away_is_missed() {
    let source = || crate::fixture::source(&scheme(HASHED), &[SECRET]);
    let mut claims = claims();
    assert_eq!(verdict_of(source(), &hs256(&claims), b""), Err(Code::BodyHashMismatch));
    claims["body"] = json!(hex::encode(ring::digest::digest(&ring::digest::SHA256, b"")));
    assert_eq!(verdict_of(source(), &hs256(&claims), b""), Err(Code::BodyHashMismatch), "of nothing");
    claims.as_object_mut().unwrap().remove("body");
    assert_eq!(verdict_of(source(), &hs256(&claims), b""), Ok(()));
}

#[test]
fn a_source_says_what_else_has_to_be_so() {
    let toml = "kind = \"jwt\"\nsig = { from = \"header:x-token\" }\nid = []\n[jwt]\nalgs = [\"HS256\"]\n\
                ask = { app = \"/data/app | /summary/app\" }";
    let scheme = scheme(toml);
    assert_eq!(scheme.asked_claims().collect::<Vec<_>>(), ["app"]);
    for (name, wanted, claims, verdict) in [
        ("app", "a", json!({ "data": { "app": "a" } }), Ok(())),
        ("app", "a", json!({ "summary": { "app": "a" } }), Ok(())),
        ("app", "a", json!({ "data": { "app": "b" }, "summary": { "app": "a" } }), Err(Code::ClaimMismatch)),
        ("app", "a", json!({ "app": "a" }), Err(Code::ClaimMismatch)),
        ("aud", "a", json!({ "aud": ["b", "a"] }), Ok(())),
        ("aud", "a", json!({}), Err(Code::ClaimMismatch)),
        ("/data/n", "7", json!({ "data": { "n": 7 } }), Ok(())),
        ("/data/n", "true", json!({ "data": { "n": true } }), Ok(())),
    ] {
        let mut source = crate::fixture::source(&scheme, &[SECRET]);
        source.claims = [(name.to_owned(), wanted.to_owned())].into();
        assert_eq!(verdict_of(source, &hs256(&claims), BODY), verdict, "{name} {claims}");
    }
}

#[test]
fn the_clock_can_be_left_out() {
    let mut source = crate::fixture::source(&scheme(HASHED), &[SECRET]);
    source.tolerance = Some(Tolerance::Off);
    let mut claims = claims();
    claims["exp"] = json!(1);
    assert_eq!(verdict_of(source, &hs256(&claims), BODY), Ok(()));
}

#[test]
fn a_claim_can_name_the_event_and_hold_json_itself() {
    let toml = "kind = \"jwt\"\nsig = { from = \"body\" }\nid = \"claim:/data#/inner#/id\"\n\
                jwt = { algs = [\"HS256\"] }";
    let scheme = scheme(toml);
    let inner = json!({ "id": "e7" }).to_string();
    let token = hs256(&json!({ "data": json!({ "inner": inner }).to_string() }));
    let request = received(crate::fixture::source(&scheme, &[SECRET]), "/", &[], token);
    let event = crate::identify::identify(verify(request, now()).unwrap()).unwrap().into_parts().1;
    assert_eq!(event.into_event().unwrap().id, "e7");
    assert!(scheme.facts.id_signed);
}

#[test]
fn something_else_can_be_signed_in_the_place_of_claims() {
    let toml = r#"
        kind = "jwt"
        sign = ["{method} {path}\n{lines:jose:/heads}{body}", "{method} {path_slash}\n{lines:jose:/heads}{body}"]
        sig = { from = "header:x-token" }
        ts = { from = "header:x-time", unit = "rfc3339" }
        id = []
        jwt = { algs = ["HS256"] }
    "#;
    let scheme = scheme(toml);
    assert!(scheme.signs_time());
    let token = |list: &str, content: &str| {
        let head = b64(json!({ "alg": "HS256", "heads": list }).to_string());
        let key = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, SECRET.as_bytes());
        let tag = ring::hmac::sign(&key, format!("{head}.{}", b64(content)).as_bytes());
        format!("{head}..{}", b64(tag))
    };
    let time = "2023-11-14T22:13:20Z";
    let content = |path: &str| format!("POST {path}\nX-Time: {time}\n{{}}");
    for (list, content, path, wanted) in [
        ("X-Time", content("/p"), "/p", Ok(())),
        ("X-Time", content("/p/"), "/p", Ok(())),
        ("X-Time", content("/p"), "/p/", Ok(())),
        ("X-Time", content("/q"), "/p", Err(Code::SignatureMismatch)),
        ("", "POST /p\n{}".to_owned(), "/p", Err(Code::SignedPartMissing)),
        ("X-Other", content("/p"), "/p", Err(Code::SignedPartMissing)),
    ] {
        let token = token(list, &content);
        let headers: [(&str, &[u8]); 2] = [("x-token", token.as_bytes()), ("x-time", time.as_bytes())];
        let request = received(crate::fixture::source(&scheme, &[SECRET]), path, &headers, "{}");
        assert_eq!(verify(request, now()).map(drop), wanted, "{list} {content} {path}");
    }
}

proptest! {
    #[test]
    fn an_alteredwards_token_is_refused(at: proptest::sample::Index, byte in 0x21_u8..0x7f) {
        let token = hs256(&claims());
        let mut altered = token.clone().into_bytes();
        let at = at.index(altered.len());
        prop_assume!(altered[at] != byte);
        altered[at] = byte;
        let altered = String::from_utf8(altered).unwrap();
        prop_assert!(verdict(&scheme(HASHED), &[SECRET], &altered).is_err());
    }

    #[test]
    fn no_text_makes_it_panic_or_passes(text in "[ -~]{0,60}", head in "[ -~]{0,60}", claims in "[ -~]{0,60}") {
        let scheme = plain("[\"HS256\", \"RS256\", \"ES256\", \"ES512\", \"EdDSA\"]");
        let ec = Ec::new().jwk(&json!({}));
        let made = format!("{}.{}.{}", b64(head), b64(claims), b64(&text));
        for token in [text, made] {
            prop_assert!(verdict(&scheme, &[SECRET, RSA_PEM, &ec], &token).is_err());
        }
    }

    #[test]
    fn signed_bytes_of_any_form_make_no_panic(head in any::<Vec<u8>>(), claims in any::<Vec<u8>>()) {
        let input = format!("{}.{}", b64(head), b64(claims));
        let key = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, SECRET.as_bytes());
        let token = format!("{input}.{}", b64(ring::hmac::sign(&key, input.as_bytes())));
        prop_assert!(verdict(&scheme(HASHED), &[SECRET], &token).is_err());
    }
}
