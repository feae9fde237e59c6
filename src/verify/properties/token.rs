//! Tokens that hold claims: whatever is altered in them or in what they are about, they are refused.

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use super::alter::{Touch, low_bits};
use super::made::{Sent, jose};
use super::seal::{Pair, Seal};
use super::{received, touches};
use crate::config::Source;
use crate::error::Code;
use crate::fixture::{NOW, now, scheme};
use crate::provider::jwt::Alg;
use crate::provider::signature::{Hash, TagEncoding};
use crate::verify::verify;

/// Where the token stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    Header,
    Query,
    Member,
    Body,
}

#[derive(Debug, Clone)]
struct Plan {
    alg: Alg,
    at: At,
    /// How the token says what the body hashes to, where it is not in it.
    said: TagEncoding,
    body: Vec<u8>,
}

impl Plan {
    fn bound(&self) -> bool {
        matches!(self.at, At::Header | At::Query)
    }

    fn toml(&self) -> String {
        let from = match self.at {
            At::Header => "\"header:x-token\", prefix = \"Bearer \"",
            At::Query => "\"query:token\"",
            At::Member => "\"json:/token\"",
            At::Body => "\"body\"",
        };
        let encoding = TagEncoding::CHOICES.iter().find(|(_, known)| *known == self.said).unwrap().0;
        let said = format!("body_hash = {{ from = \"claim:/hash\", encoding = {encoding:?} }}\n");
        format!(
            "kind = \"jwt\"\nsig = {{ from = {from} }}\nid = \"claim:/jti\"\n{}\
             require = {{ \"claim:/iss\" = \"us\" }}\njwt = {{ algs = [{:?}, \"HS256\"], need = [\"exp\"] }}",
            if self.bound() { &said } else { "" },
            self.alg.name(),
        )
    }

    fn claims(&self) -> String {
        let hash = self.said.encode(Hash::Sha256.digest([self.body.as_slice()]).as_ref());
        serde_json::json!({ "iss": "us", "jti": "t-1", "exp": NOW + 60, "hash": hash }).to_string()
    }

    fn sent(&self, token: &str) -> Sent {
        let mut sent = Sent {
            method: http::Method::POST,
            target: "/p".to_owned(),
            headers: Vec::new(),
            body: self.body.clone(),
        };
        match self.at {
            At::Header => sent.headers.push(("x-token".to_owned(), format!("Bearer {token}").into())),
            At::Query => sent.target = format!("/p?token={token}"),
            At::Member => sent.body = format!("{{\"token\":{token:?}}}").into(),
            At::Body => sent.body = token.into(),
        }
        sent
    }

    fn altered(&self, pairs: &[Pair; 2], touch: Touch) -> Vec<Sent> {
        let token = signed(&jose(self.alg.name()), &self.claims(), |input| pairs[0].sign(input));
        let mut all: Vec<Sent> =
            tokens(self, &token, pairs, touch).into_iter().map(|text| self.sent(&text)).collect();
        let right = self.sent(&token);
        if self.bound() {
            let at = touch.at % self.body.len();
            let mut flipped = self.body.clone();
            flipped[at] ^= touch.flip;
            let longer = [&self.body[..], b" "].concat();
            all.extend([flipped, longer, Vec::new()].map(|body| Sent { body, ..right.clone() }));
        }
        let mut twice = right.clone();
        match self.at {
            At::Header => twice.headers.push(twice.headers[0].clone()),
            At::Query => twice.target = format!("{}&token={token}", twice.target),
            At::Member => twice.body = format!("{{\"token\":{token:?},\"token\":{token:?}}}").into(),
            At::Body => twice.body.extend_from_slice(&right.body),
        }
        all.push(twice);
        all
    }
}

fn signed(header: &str, claims: &str, sign: impl Fn(&[u8]) -> Vec<u8>) -> String {
    let input = format!("{header}.{}", URL_SAFE_NO_PAD.encode(claims));
    format!("{input}.{}", URL_SAFE_NO_PAD.encode(sign(input.as_bytes())))
}

/// Other tokens than this one.
fn tokens(plan: &Plan, token: &str, pairs: &[Pair; 2], touch: Touch) -> Vec<String> {
    let (alg, claims) = (plan.alg.name(), plan.claims());
    let (input, signature) = token.rsplit_once('.').unwrap();
    let (header, middle) = input.split_once('.').unwrap();
    let mut texts = Vec::new();
    for at in (0..16).map(|step| touch.at.wrapping_add(step * 31) % token.len()) {
        let (before, rest) = token.split_at(at);
        let chars = [touch.char, '=', '-', '_', 'A', '.'];
        texts.extend(chars.map(|char| format!("{before}{char}{}", &rest[1..])));
        texts.extend([format!("{before}{}", &rest[1..]), format!("{before}{}{rest}", touch.char)]);
    }
    let mut bytes = URL_SAFE_NO_PAD.decode(signature).unwrap();
    let at = touch.at % bytes.len();
    bytes[at] ^= touch.flip;
    texts.push(format!("{input}.{}", URL_SAFE_NO_PAD.encode(&bytes)));
    texts.extend([
        format!("{token}="),
        format!("{token}."),
        format!(".{token}"),
        format!("{token}.{signature}"),
    ]);
    texts.extend([
        format!("{input}."),
        input.to_owned(),
        format!("{header}..{signature}"),
        format!(".{middle}.{signature}"),
    ]);
    texts.extend(low_bits(signature).map(|other| format!("{input}.{other}")));
    texts.extend(low_bits(middle).map(|other| format!("{header}.{other}.{signature}")));
    texts.extend(low_bits(header).map(|other| format!("{other}.{middle}.{signature}")));
    // Signed by somebody else, or by what everybody knows.
    texts.push(signed(header, &claims, |input| pairs[1].sign(input)));
    texts.push(signed(&jose("none"), &claims, |_| Vec::new()));
    texts.push(signed(&jose("none"), &claims, |input| pairs[0].sign(input)));
    if plan.alg.hmac().is_none() {
        let known = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, pairs[0].text.as_bytes());
        texts
            .push(signed(&jose("HS256"), &claims, |input| ring::hmac::sign(&known, input).as_ref().to_vec()));
    }
    // Rightly signed, and not what the scheme wants.
    let header = |more: &str| URL_SAFE_NO_PAD.encode(format!("{{\"alg\":{alg:?}{more}}}"));
    let wrong_claims = [
        claims.replace("\"us\"", "\"them\""),
        claims.replace("\"exp\"", "\"xep\""),
        claims.replacen('{', "{\"iss\":\"us\",", 1),
    ];
    texts.extend(wrong_claims.map(|claims| signed(&header(""), &claims, |input| pairs[0].sign(input))));
    for more in [",\"crit\":[]", ",\"b64\":false", ",\"alg\":\"none\"", ",\"kid\":1"] {
        texts.push(signed(&header(more), &claims, |input| pairs[0].sign(input)));
    }
    texts.retain(|text| text != token);
    texts
}

fn hold(alg: Alg, cases: u32) {
    let pairs = Seal::Jwt(alg).pairs();
    let places = proptest::sample::select(vec![At::Header, At::Query, At::Member, At::Body]);
    let encodings: Vec<_> = TagEncoding::CHOICES.iter().map(|(_, encoding)| *encoding).collect();
    let bodies = proptest::collection::vec(any::<u8>(), 1..60);
    let plans = (places, proptest::sample::select(encodings), bodies)
        .prop_map(move |(at, said, body)| Plan { alg, at, said, body });
    let mut runner = TestRunner::new(super::config(cases));
    let result = runner.run(&(plans, touches()), |(plan, touch)| {
        let scheme = scheme(&plan.toml());
        let source = Source::new("test", Arc::clone(&scheme), vec![scheme.key(&pairs[0].text).unwrap()]);
        let source = Arc::new(source);
        let verdict = |sent: &Sent| match received(&source, sent) {
            Some(received) => verify(received, now()).map(drop),
            None => Err(Code::Internal),
        };
        let token = signed(&jose(alg.name()), &plan.claims(), |input| pairs[0].sign(input));
        prop_assert_eq!(verdict(&plan.sent(&token)), Ok(()));
        for sent in plan.altered(&pairs, touch) {
            prop_assert!(verdict(&sent).is_err(), "{}\n{:?}", plan.toml(), sent);
        }
        Ok(())
    });
    if let Err(error) = result {
        panic!("{alg:?}: {error}");
    }
}

/// ES512 has a test of its own; its arithmetic is slow where nothing is optimised.
#[test]
fn tokens_accept_nothing_that_was_altered() {
    for alg in [Alg::Hs256, Alg::Hs384, Alg::Hs512] {
        hold(alg, 24);
    }
    for alg in [Alg::Rs256, Alg::Rs384, Alg::Rs512, Alg::Es256, Alg::Es384, Alg::EdDsa] {
        hold(alg, 8);
    }
}
