//! What a signed token says, as far as it decides: which claim is missing or wrong.
//!
//! Invariant: neither the token nor the text of a claim is told. Whoever has a token is let in until it ends, and some hold
//! keys to more.

use jiff::Timestamp;
use serde_json::Value;

use super::explain::{Told, capped};
use crate::config::Source;
use crate::parts::Parts;
use crate::provider::jwt::JwtRule;
use crate::provider::place::Place;
use crate::verify::jwt::{Object, Token, says, text, unlike};

/// Tells of the token in the request.
pub(super) fn tell(told: &mut Told, source: &Source, rule: &JwtRule, parts: &Parts<'_>, now: Timestamp) {
    let read = text(parts).and_then(|text| {
        let token = Token::parse(&text, rule)?;
        Ok((token.alg, token.key_id().map(str::to_owned), token.claims))
    });
    let (alg, id, claims) = match read {
        Ok(read) => read,
        Err(code) => return told.line("token", code.meaning()),
    };
    let key = id.as_deref().map_or("names no key".to_owned(), |id| format!("names the key {:?}", capped(id)));
    told.line("token", format!("{}, {key}", alg.name()));
    tell_keys(told, source, id.as_deref());
    tell_times(told, rule, &claims, now);
    tell_required(told, source, parts);
    for name in rule.need.iter().filter(|name| claims.0.get(*name).is_none_or(Value::is_null)) {
        told.line("claim", format!("{name} is missing, and has to be there"));
    }
    for name in unlike(source, rule, &claims) {
        told.line("claim", format!("{name} is not what the source's claims want"));
    }
}

fn tell_keys(told: &mut Told, source: &Source, id: Option<&str>) {
    for (index, key) in source.keys.iter().enumerate() {
        let keys = key.as_tokens();
        if !keys.is_empty() && !keys.iter().any(|key| key.may_be(id)) {
            let names: Vec<String> =
                keys.iter().filter_map(|key| key.id()).map(|id| format!("{id:?}")).collect();
            told.line("key", format!("secret {index} has only {}, so it is not tried", names.join(", ")));
        }
    }
}

fn tell_times(told: &mut Told, rule: &JwtRule, claims: &Object, now: Timestamp) {
    for (name, before, after) in [("exp", "ends", "ended"), ("nbf", "begins", "began")] {
        let said = match claims.seconds(name) {
            Ok(None) => continue,
            Ok(Some(seconds)) => match seconds.saturating_sub(now.as_second()) {
                ahead @ 0.. => format!("{before} {ahead} s after the clock {now:.0}"),
                behind => format!("{after} {} s before the clock {now:.0}", behind.unsigned_abs()),
            },
            Err(code) => code.meaning().to_owned(),
        };
        told.line("claim", format!("{name}: {said}; leeway {} s", rule.leeway.as_secs()));
    }
}

fn tell_required(told: &mut Told, source: &Source, parts: &Parts<'_>) {
    for (place, wanted) in &source.scheme.require {
        let Place::Token { part, steps } = place else { continue };
        let value =
            parts.token_value(*part, steps).map(|raw| raw.and_then(|raw| serde_json::from_str(&raw).ok()));
        let is = match value {
            Ok(Some(value)) if says(&value, wanted) => "it is",
            Ok(Some(_)) => "it says something else",
            Ok(None) => "it is missing",
            Err(_) => "it cannot be read, or stands there twice",
        };
        told.line("claim", format!("{place} has to be {wanted:?}: {is}"));
    }
}
