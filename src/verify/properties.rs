//! What holds of every kind, over schemes and requests that are put together at random.
//!
//! No altered byte of what a scheme signs is accepted, and no signature that is written in another way or decodes to
//! other bytes, but for the case of hex digits; and nothing that can be sent makes the program panic.

mod alter;
mod made;
mod noise;
mod plan;
mod seal;
mod token;
mod unsigned;

use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use self::alter::{Signed, Touch};
use self::made::{Sent, URL};
use self::plan::{Plan, plans};
use self::seal::{Pair, Seal};
use super::verify_with;
use crate::body::Received;
use crate::config::Source;
use crate::error::Code;
use crate::fixture::{now, scheme};
use crate::provider::FetchedKeys;
use crate::provider::jwt::Alg;
use crate::provider::signature::{Hash, TagEncoding};

/// A source of the plan's provider, and the keys that were fetched for it.
fn source(plan: &Plan, pair: &Pair) -> (Source, FetchedKeys) {
    let scheme = scheme(&plan.toml());
    let certified = plan.seal.is_certified();
    let fetched = if certified { scheme.local_keys(&pair.text).unwrap() } else { Vec::new() };
    let keys = if certified { Vec::new() } else { vec![scheme.key(&pair.text).unwrap()] };
    let mut source = Source::new("test", Arc::clone(&scheme), keys);
    source.public_url = Some(URL.to_owned());
    let fetched = if certified { FetchedKeys::Certified(fetched.into()) } else { FetchedKeys::None };
    (source, fetched)
}

/// `None` if HTTP itself has no such request.
fn received(source: &Arc<Source>, sent: &Sent) -> Option<Received> {
    let mut request = http::Request::builder().method(sent.method.clone()).uri(&sent.target);
    for (name, value) in &sent.headers {
        request = request.header(name, value.as_slice());
    }
    let head = request.body(()).ok()?.into_parts().0;
    Some(Received { source: Arc::clone(source), head, body: sent.body.clone().into() })
}

fn touches() -> impl Strategy<Value = Touch> {
    (any::<usize>(), 1_u8.., "[a-zA-Z0-9]").prop_map(|(at, flip, char)| Touch {
        at,
        flip,
        char: char.chars().next().unwrap(),
    })
}

/// Words, and a text that may hold anything but what stands for bytes that are no text.
fn texts() -> impl Strategy<Value = (Vec<String>, String)> {
    let free = any::<String>().prop_map(|text| text.replace(char::REPLACEMENT_CHARACTER, ""));
    (proptest::collection::vec("[a-zA-Z0-9]{1,12}", 1..5), free)
}

/// Signs a request of the plan, and holds every alteration of it against the source.
fn check(
    plan: &Plan,
    pairs: &[Pair; 2],
    (words, free): &(Vec<String>, String),
    touch: Touch,
) -> Result<(), TestCaseError> {
    let (source, fetched) = source(plan, &pairs[0]);
    let source = Arc::new(source);
    let values = plan.values(words, free);
    let content = plan.content(&values, &pairs[0].text);
    let signature = pairs[0].sign(&plan.input(&content));
    let signed = Signed { plan, values: &values, signature };
    let verdict = |sent: &Sent| match received(&source, sent) {
        Some(received) => verify_with(received, &fetched, now()).map(drop),
        None => Err(Code::Internal),
    };
    let sent = signed.sent();
    prop_assert_eq!(verdict(&listed(plan, &sent, &sent)), Ok(()), "{}\n{:?}", plan.toml(), sent);
    if plan.encoding == TagEncoding::Hex && !matches!(plan.seal, Seal::Jwt(_)) {
        let upper = plan.sig_text(&plan.written(&signed.signature).to_uppercase(), &values.time);
        let upper = plan.sent(&values, &upper);
        prop_assert_eq!(verdict(&listed(plan, &sent, &upper)), Ok(()));
    }
    for (name, altered) in signed.altered(touch, &pairs[1], &content) {
        let altered = listed(plan, &sent, &altered);
        prop_assert!(verdict(&altered).is_err(), "{}\n{}\n{:?}", name, plan.toml(), altered);
    }
    Ok(())
}

/// Where items are signed one by one, the request with a good item before this one.
fn listed(plan: &Plan, good: &Sent, sent: &Sent) -> Sent {
    if !plan.every {
        return sent.clone();
    }
    let body = [b"{\"items\":[", good.body.as_slice(), b",", &sent.body, b"]}"].concat();
    Sent { body, ..sent.clone() }
}

/// So many cases. A case that fails is told in full, so nothing is written beside the code.
fn config(cases: u32) -> Config {
    Config { cases, failure_persistence: None, ..Config::default() }
}

/// So many plans of that kind.
fn hold(seal: Seal, every: bool, cases: u32) {
    let pairs = seal.pairs();
    let mut runner = TestRunner::new(config(cases));
    let inputs = (plans(seal, every), texts(), touches());
    let result = runner.run(&inputs, |(plan, texts, touch)| check(&plan, &pairs, &texts, touch));
    if let Err(error) = result {
        panic!("{seal:?}: {error}");
    }
}

const HASHES: [Hash; 3] = [Hash::Sha1, Hash::Sha256, Hash::Sha512];

#[test]
fn hmac_accepts_nothing_that_was_altered() {
    for hash in HASHES {
        hold(Seal::Hmac(hash), false, 60);
    }
}

#[test]
fn hash_accepts_nothing_that_was_altered() {
    for hash in HASHES {
        hold(Seal::Hash(hash), false, 40);
    }
}

#[test]
fn ed25519_accepts_nothing_that_was_altered() {
    hold(Seal::Ed25519, false, 40);
}

#[test]
fn ecdsa_accepts_nothing_that_was_altered() {
    hold(Seal::Ecdsa(Hash::Sha256), false, 40);
    // Not by ring, and slow where nothing is optimised.
    hold(Seal::Ecdsa(Hash::Sha1), false, 3);
}

/// No RSA with SHA-1, which nothing here can sign; it differs in nothing but its name.
#[test]
fn rsa_accepts_nothing_that_was_altered() {
    hold(Seal::Rsa(Hash::Sha256), false, 30);
    hold(Seal::Rsa(Hash::Sha512), false, 10);
}

#[test]
fn keys_out_of_certificates_accept_nothing_that_was_altered() {
    hold(Seal::CertEcdsa, false, 20);
    hold(Seal::CertRsa, false, 20);
}

#[test]
fn tokens_over_parts_of_a_request_accept_nothing_that_was_altered() {
    for alg in [Alg::Hs256, Alg::Hs384, Alg::Hs512] {
        hold(Seal::Jwt(alg), false, 30);
    }
    for alg in [Alg::Rs256, Alg::Rs384, Alg::Rs512, Alg::Es256, Alg::EdDsa] {
        hold(Seal::Jwt(alg), false, 8);
    }
}

#[test]
fn items_that_are_signed_one_by_one_accept_nothing_that_was_altered() {
    for seal in [Seal::Hmac(Hash::Sha256), Seal::Hash(Hash::Sha512), Seal::Ed25519, Seal::Ecdsa(Hash::Sha256)]
    {
        hold(seal, true, 20);
    }
    hold(Seal::Rsa(Hash::Sha256), true, 10);
}

/// ECDSA itself has it so: whoever sees `(r, s)` can say `(r, -s)`, which is a signature of the same bytes and of
/// nothing else. Providers make both, so neither can be refused; see `config/SCHEMES.md`.
#[test]
fn the_twin_of_an_ecdsa_signature_is_as_right_and_of_the_same_bytes_only() {
    for seal in [Seal::Ecdsa(Hash::Sha256), Seal::Ecdsa(Hash::Sha1)] {
        let scheme = scheme(&format!(
            "{}\nsign = \"{{body}}\"\nsig = {{ from = \"header:x-sig\" }}\nid = []",
            seal.toml()
        ));
        let [own, _] = seal.pairs();
        let source = Arc::new(Source::new("test", Arc::clone(&scheme), vec![scheme.key(&own.text).unwrap()]));
        let (r, s) = p256::ecdsa::Signature::from_der(&own.sign(b"x")).unwrap().split_scalars();
        let twin = p256::ecdsa::Signature::from_scalars(r.to_bytes(), (-*s).to_bytes()).unwrap();
        let header = hex::encode(twin.to_der().as_bytes()).into_bytes();
        let verdict = |body: &[u8]| {
            let headers = vec![("x-sig".to_owned(), header.clone())];
            let sent =
                Sent { method: http::Method::POST, target: "/".to_owned(), headers, body: body.to_vec() };
            verify_with(received(&source, &sent).unwrap(), &FetchedKeys::None, now()).map(drop)
        };
        assert_eq!((verdict(b"x"), verdict(b"y")), (Ok(()), Err(Code::SignatureMismatch)));
    }
}
