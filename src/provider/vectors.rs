//! Published and constructed deliveries of many providers, run through `verify` and `identify`.

use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use serde_json::Value;

use crate::body::Received;
use crate::config::{Source, Tolerance};
use crate::error::Code;
use crate::identify::identify;
use crate::provider::Scheme;
use crate::settings::File;
use crate::verify::verify;

const VECTORS: &str = include_str!("../../tests/data/vectors.json");
const SCHEMES: &str = include_str!("../../tests/data/schemes.toml");

/// Declarative schemes that need more than the grammar has: batches, other kinds, other pieces.
const NOT_YET: &[&str] = &[
    "chargebee",
    "discord-events",
    "discord-interactions",
    "easypost",
    "gocardless",
    "hubspot-v1",
    "hubspot-v2",
    "hubspot-v3",
    "line",
    "mandrill",
    "microsoft-graph",
    "plivo-v2",
    "postmark",
    "sendgrid",
    "standard-webhooks-ed25519",
    "twilio-form",
    "wise",
];

fn schemes() -> Vec<Arc<Scheme>> {
    let (file, mut root) = File::parse("schemes.toml", SCHEMES);
    let mut schemes: Vec<_> = root
        .tables("scheme")
        .into_iter()
        .filter_map(|(name, table)| Scheme::read(&name, table).map(Arc::new))
        .collect();
    root.finish();
    assert_eq!(file.take_problems(), []);
    schemes.extend(Scheme::preset_names().iter().filter_map(|name| Scheme::preset(name)));
    schemes
}

fn text<'v>(vector: &'v Value, key: &str) -> Option<&'v str> {
    vector[key].as_str()
}

fn body(vector: &Value) -> Vec<u8> {
    if let Some(repeat) = vector.get("body_repeat") {
        let count = usize::try_from(repeat["count"].as_u64().unwrap()).unwrap();
        return text(repeat, "text").unwrap().repeat(count).into_bytes();
    }
    match text(vector, "body_base64") {
        Some(encoded) => STANDARD.decode(encoded).unwrap(),
        None => text(vector, "body").unwrap().as_bytes().to_vec(),
    }
}

fn header_pairs(vector: &Value) -> Vec<(String, String)> {
    let own = |value: &Value| value.as_str().unwrap().to_owned();
    match &vector["headers"] {
        Value::Object(map) => map.iter().map(|(name, value)| (name.clone(), own(value))).collect(),
        Value::Array(list) => list.iter().map(|pair| (own(&pair[0]), own(&pair[1]))).collect(),
        other => panic!("headers: {other}"),
    }
}

fn source(vector: &Value, scheme: &Arc<Scheme>) -> Source {
    let secrets: Vec<&str> = match vector["secrets"].as_array() {
        Some(list) => list.iter().filter_map(Value::as_str).collect(),
        None => text(vector, "secret").into_iter().collect(),
    };
    let keys = secrets.iter().map(|secret| scheme.key(secret).unwrap()).collect();
    let mut source = Source::new("test", Arc::clone(scheme), keys);
    source.tolerance = match vector["tolerance"].as_u64() {
        Some(seconds) if seconds > 0 && vector["now"].is_number() => {
            Some(Tolerance::Within(std::time::Duration::from_secs(seconds)))
        }
        _ => Some(Tolerance::Off),
    };
    source
}

fn received(vector: &Value, mut source: Source) -> Received {
    let url = text(vector, "url").unwrap_or("https://hooks.example.com/in/test");
    let path_at = url.match_indices('/').nth(2).map_or(url.len(), |(at, _)| at);
    let (base, path) = url.split_at(path_at);
    source.public_url = Some(base.to_owned());
    let mut request = http::Request::builder().method(text(vector, "method").unwrap()).uri(path);
    for (name, value) in header_pairs(vector) {
        request = request.header(name, value);
    }
    let head = request.body(()).unwrap().into_parts().0;
    Received { source: Arc::new(source), head, body: body(vector).into() }
}

fn expected_codes(class: &str) -> &'static [Code] {
    match class {
        "signature mismatch" | "token mismatch" => &[Code::SignatureMismatch, Code::SignatureMalformed],
        "no signature" | "missing token" => &[Code::SignatureMissing],
        "no timestamp" => &[Code::TimestampMissing],
        "timestamp" => &[Code::TimestampMalformed],
        "timestamp too old" => &[Code::TimestampStale],
        "timestamp too new" => &[Code::TimestampFuture],
        "missing id" => &[Code::SignedPartMissing],
        other => panic!("no codes for {other:?}"),
    }
}

fn run(vector: &Value, scheme: &Arc<Scheme>) -> Result<(), String> {
    let now = Timestamp::from_second(vector["now"].as_i64().unwrap_or(1_700_000_000)).unwrap();
    let verified = verify(received(vector, source(vector, scheme)), now);
    match (text(vector, "expected").unwrap(), verified) {
        ("accept", Ok(verified)) => {
            let id = identify(verified).map(|identified| identified.into_parts().1.id);
            match (text(vector, "event_id"), id) {
                (Some(wanted), Ok(id)) if wanted == id => Ok(()),
                (None, Err(_)) => Ok(()),
                (None, Ok(_)) if scheme.never_dedupes() => Ok(()),
                (wanted, id) => Err(format!("id {id:?}, wanted {wanted:?}")),
            }
        }
        ("reject", Err(code)) if expected_codes(text(vector, "reject_class").unwrap()).contains(&code) => {
            Ok(())
        }
        (wanted, verified) => {
            Err(format!("{:?}, wanted {wanted} {}", verified.err(), vector["reject_class"]))
        }
    }
}

#[test]
fn every_vector_of_an_hmac_or_token_scheme_gives_its_verdict_and_id() {
    let schemes = schemes();
    let file: Value = serde_json::from_str(VECTORS).unwrap();
    let mut failures = Vec::new();
    let mut count = 0;
    for vector in file["vectors"].as_array().unwrap() {
        let name = text(vector, "scheme").unwrap();
        if text(vector, "verify_with") != Some("declarative") || NOT_YET.contains(&name) {
            continue;
        }
        count += 1;
        let scheme =
            schemes.iter().find(|scheme| scheme.name == name).unwrap_or_else(|| panic!("no scheme {name}"));
        if let Err(failure) = run(vector, scheme) {
            failures.push(format!("{}: {failure}", vector["name"]));
        }
    }
    assert!(failures.is_empty(), "{} of {count}:\n{}", failures.len(), failures.join("\n"));
    assert!(count > 150, "only {count} vectors were run");
}
