//! Making a token as its issuer would, where both sides know the secret.
//!
//! Invariant: every claim that the scheme reads or asks for is in it, and nothing else.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::{Map, Value};

use super::{Draft, PRIVATE_KEY, fresh_id};
use crate::provider::jwt::{Alg, JwtRule};
use crate::provider::place::Place;
use crate::provider::signature::{SaidHash, TsRule};
use crate::provider::{Key, Scheme};

/// How long such a token is good, in seconds.
const LIFETIME: i64 = 60;

/// The text of a token with these claims.
pub(super) fn token(rule: &JwtRule, key: &Key, claims: Map<String, Value>) -> Result<String, String> {
    let signs = |alg: &&Alg| alg.hmac().is_some();
    let alg = rule.algs.iter().find(signs).filter(|_| rule.sign.is_empty());
    let alg = *alg.ok_or(PRIVATE_KEY)?;
    let header = encoded(&serde_json::json!({ "alg": alg.name(), "typ": "JWT" }));
    let input = format!("{header}.{}", encoded(&Value::Object(claims)));
    let mut tags = key.as_tokens().iter().filter_map(|key| key.sign(alg, input.as_bytes()));
    let tag = tags.next().ok_or("the key was not made for this scheme")?;
    Ok(format!("{}{input}.{}", rule.token.prefix(), URL_SAFE_NO_PAD.encode(tag)))
}

fn encoded(value: &Value) -> String {
    URL_SAFE_NO_PAD.encode(value.to_string())
}

/// The claims of a token for the draft; `wanted` are the source's own, by name.
pub(super) fn claims(
    scheme: &Scheme,
    rule: &JwtRule,
    draft: &Draft<'_>,
    wanted: &BTreeMap<String, String>,
) -> Result<Map<String, Value>, String> {
    let mut claims: Map<_, _> =
        wanted.iter().map(|(name, text)| (name.clone(), text.as_str().into())).collect();
    let now = draft.now.as_second();
    for name in &rule.need {
        let value = match name.as_str() {
            "exp" => (now + LIFETIME).into(),
            "iat" | "nbf" => now.into(),
            _ => fresh_id().into(),
        };
        claims.insert(name.clone(), value);
    }
    for (place, text) in &scheme.require {
        put(&mut claims, place, text.as_str().into());
    }
    for place in scheme.event.ids.first().iter().flat_map(|rule| &rule.places) {
        put(&mut claims, place, draft.id.map_or_else(fresh_id, str::to_owned).into());
    }
    for place in scheme.ts.as_ref().map_or(&[] as &[Place], TsRule::places) {
        let text = scheme.ts.as_ref().map_or_else(String::new, |ts| ts.unit.print(draft.now));
        put(&mut claims, place, text.parse::<i64>().map_or_else(|_| text.into(), Value::from));
    }
    if let Some(hash) = scheme.body_hash.as_ref().filter(|_| !draft.body.is_empty()) {
        put_hash(&mut claims, hash, &[draft.body]);
    }
    if let Some(hash) = &scheme.url_hash {
        let base = draft.public_url.ok_or("this scheme signs the URL: give the public URL")?;
        put_hash(&mut claims, hash, &[base.as_bytes(), draft.path.as_bytes()]);
    }
    Ok(claims)
}

fn put_hash(claims: &mut Map<String, Value>, rule: &SaidHash, pieces: &[&[u8]]) {
    let digest = rule.hash.digest(pieces.iter().copied());
    put(claims, &rule.from, rule.encoding.encode(digest.as_ref()).into());
}

fn put(claims: &mut Map<String, Value>, place: &Place, value: Value) {
    if let Some(name) = place.claim_name() {
        claims.insert(name, value);
    }
}
