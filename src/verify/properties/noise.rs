//! Whatever is sent, it is refused in good order.

use std::sync::{Arc, LazyLock};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use proptest::prelude::*;
use proptest::sample::Index;

use super::made::Sent;
use super::plan::plans;
use super::seal::Seal;
use super::{config, received};
use crate::config::Source;
use crate::fixture::now;
use crate::guard::Guard;
use crate::provider::jwt::Alg;
use crate::provider::signature::Hash;
use crate::provider::{FetchedKeys, Scheme};
use crate::verify::{has_signature, verify_with, wanted};

/// A source for each preset, and the keys that were fetched for it.
static SOURCES: LazyLock<Vec<(Arc<Source>, FetchedKeys)>> = LazyLock::new(|| {
    let seals = [
        Seal::Ed25519,
        Seal::Ecdsa(Hash::Sha256),
        Seal::Rsa(Hash::Sha256),
        Seal::Jwt(Alg::Es384),
        Seal::CertEcdsa,
    ];
    let mut secrets: Vec<String> = seals
        .map(|seal| {
            let [own, _] = seal.pairs();
            own.text
        })
        .into();
    secrets.extend(
        ["whsec_aGFwYXgtdGVzdC1zZWNyZXQtb2YtMzItYnl0ZXMh", "00ff00ff00ff00ff", "name:password"]
            .map(str::to_owned),
    );
    secrets.push(p521_key());
    let [certified, _] = Seal::CertRsa.pairs();
    let source = |name: &&str| {
        let scheme = Scheme::preset(name).unwrap();
        let key = secrets.iter().find_map(|secret| scheme.key(secret).ok());
        let fetched = if scheme.has_certificates() {
            FetchedKeys::Certified(scheme.local_keys(&certified.text).unwrap().into())
        } else {
            FetchedKeys::None
        };
        let mut source =
            Source::new("test", scheme, vec![key.unwrap_or_else(|| panic!("no key for {name}"))]);
        source.public_url = Some("https://h:8".to_owned());
        source.guard = Guard::Report;
        (Arc::new(source), fetched)
    };
    Scheme::preset_names().iter().map(source).collect()
});

fn p521_key() -> String {
    let key = p521::ecdsa::SigningKey::from_slice(&[1; 66]).unwrap();
    let point = p521::ecdsa::VerifyingKey::from(&key).to_encoded_point(false);
    let [x, y] = [point.x(), point.y()].map(|of| URL_SAFE_NO_PAD.encode(of.unwrap()));
    serde_json::json!({ "kty": "EC", "crv": "P-521", "x": x, "y": y }).to_string()
}

fn value() -> impl Strategy<Value = Vec<u8>> {
    let any_bytes = proptest::collection::vec(any::<u8>(), 0..40);
    let high = proptest::collection::vec(0x80_u8.., 0..40);
    let large =
        proptest::sample::select(vec!["a0", "AAAA", "t=1,v1=", "{\"a\":", "[", "e30.", ".", ",", "=", "%F0"])
            .prop_map(|text| text.repeat((64 << 10) / text.len()).into_bytes());
    let shaped = proptest::sample::select(vec![
        "",
        " ",
        "=",
        ",",
        "v1=",
        "t=,v1=",
        "t=1700000000,v1=00",
        "t=99999999999999999999",
        "Basic ",
        "Basic =",
        "Bearer ",
        "Bearer ..",
        "e30.e30.",
        "eyJhbGciOiJIUzI1NiJ9.e30.AA",
        "eyJhbGciOiJFUzI1NiIsIng1YyI6WyIiXX0.e30.AA",
        "bnVsbA==",
        "1700000000",
        "-1",
        "2023-11-14T22:13:20Z",
        "9999-12-31T23:59:59Z",
        "https://x/",
        "AA==",
        "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=",
    ]);
    prop_oneof![any_bytes, high, large, shaped.prop_map(|text| text.as_bytes().to_vec())]
}

/// Scraps of JSON, forms and nothing at all.
fn body() -> impl Strategy<Value = Vec<u8>> {
    let scraps = proptest::sample::select(vec![
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "\"a\":",
        "null",
        "1e999",
        "\"\\ud800\"",
        "\"\\u0000\"",
        "a=1&",
        "a=%ff&",
        "\\",
        "\u{1f600}",
        "{\"items\":[",
        "{\"value\":[{}]}",
        "{\"notificationItems\":[{\"NotificationRequestItem\":{}}]}",
        "[[{\"a\":[]}]]",
    ]);
    let scraps = proptest::collection::vec(scraps, 0..12).prop_map(|scraps| scraps.concat().into_bytes());
    prop_oneof![value(), scraps]
}

fn sent_to(scheme: &Scheme, headers: &[(Index, Vec<u8>, bool)], query: &str, body: &[u8]) -> Sent {
    let known = scheme.headers();
    let mut sent = Sent {
        method: http::Method::POST,
        target: format!("/in/x?{query}"),
        headers: Vec::new(),
        body: body.to_vec(),
    };
    for (which, value, twice) in headers {
        let name = if known.is_empty() { "x-any".to_owned() } else { which.get(&known).to_string() };
        // What HTTP does not carry never comes here.
        let value: Vec<u8> = value.iter().copied().filter(|byte| *byte >= 0x20 && *byte != 0x7f).collect();
        sent.headers.push((name.clone(), value.clone()));
        sent.headers.extend(twice.then_some((name, value)));
    }
    sent
}

fn refused(source: &Arc<Source>, fetched: &FetchedKeys, sent: &Sent) -> bool {
    let Some(request) = received(source, sent) else { return true };
    drop(wanted(&request, now()));
    has_signature(&request);
    verify_with(request, fetched, now()).is_err()
}

type Noise = (Vec<(Index, Vec<u8>, bool)>, String, Vec<u8>);

fn noise() -> impl Strategy<Value = Noise> {
    let headers = proptest::collection::vec((any::<Index>(), value(), proptest::bool::weighted(0.1)), 0..8);
    (headers, "([a-zA-Z0-9_]{0,6}=?(%[0-9A-F]{2}|[-!$'()*+,./:;=?@_~a-z0-9]){0,6}&?){0,6}", body())
}

proptest! {
    #![proptest_config(config(200))]

    #[test]
    fn no_preset_takes_noise_or_panics(which: Index, (headers, query, body) in noise()) {
        let (source, fetched) = which.get(&SOURCES);
        let sent = sent_to(&source.scheme, &headers, &query, &body);
        prop_assert!(refused(source, fetched, &sent), "{} {:?}", source.scheme.name, sent);
    }

    #[test]
    fn no_scheme_of_the_grammar_takes_noise_or_panics(
        plan in plans(Seal::Hmac(Hash::Sha256), false),
        item in plans(Seal::Hmac(Hash::Sha256), true),
        (headers, query, body) in noise(),
    ) {
        for plan in [plan, item] {
            let [own, _] = plan.seal.pairs();
            let (source, fetched) = super::source(&plan, &own);
            let source = Arc::new(source);
            // Its places are called so.
            let query = query.replace("a=", "q0=").replace("b=", "q9=");
            let sent = sent_to(&source.scheme, &headers, &query, &body);
            prop_assert!(refused(&source, &fetched, &sent), "{} {:?}", plan.toml(), sent);
        }
    }
}
