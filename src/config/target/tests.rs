//! Each mistake in a target, or in naming one, and what is said of it.

use super::*;
use crate::config::{Config, Route, TypePattern, report};

const CANARY: &str = "canary-7f3a";

const SECRET: &str = "whsec_c2VjcmV0LXNlY3JldC1zZWNyZXQ=";

/// A sound file; a case can replace any of these lines.
const BASE: [(&str, &str); 9] = [
    ("postgres.url", "\"postgres://h/d\""),
    ("fast_tier.kind", "\"memory\""),
    ("source.a.provider", "\"truelayer\""),
    ("source.a.targets", "\"orders\""),
    ("target.orders.kind", "\"http\""),
    ("target.orders.url", "\"https://example.com/hooks\""),
    ("target.orders.secrets", "{ env = \"SECRET\" }"),
    ("target.orders.timeout", "\"10s\""),
    ("target.orders.rate", "\"off\""),
];

fn env(name: &str) -> Option<String> {
    match name {
        "SECRET" => Some(SECRET.to_owned()),
        "URL" => Some(format!("http://10.0.0.1/{CANARY}")),
        "BAD_URL" => Some(format!("https://u:{CANARY}@example.com/")),
        "TOKEN" => Some(format!("Bearer {CANARY}")),
        "SHORT" => Some("whsec_c2hvcnQtMTUtYnl0ZXM=".to_owned()),
        "CANARY" => Some(format!("whsec_{CANARY}!")),
        "NEWLINE" => Some(format!("{CANARY}\nx-more: 1")),
        _ => None,
    }
}

fn parse(case: &str) -> Result<(Config, String), String> {
    let written = |key: &str| case.lines().any(|line| line.split(" = ").next() == Some(key));
    let base = BASE.iter().filter(|(key, _)| !written(key));
    let text: String =
        base.map(|(key, value)| format!("{key} = {value}\n")).chain([case.to_owned()]).collect();
    match Config::parse("t.toml", &text, &env) {
        Ok(loaded) => Ok((loaded.config, report(&loaded.warnings))),
        Err(problems) => Err(report(&problems)),
    }
}

fn load(case: &str) -> Config {
    parse(case).unwrap().0
}

fn http_of(case: &str) -> Http {
    let TargetKind::Http(http) = load(case).targets["orders"].kind.clone();
    http
}

/// One complaint, with these parts.
fn refuses(cases: &[(&str, &[&str])]) {
    for (case, expected) in cases {
        let said = parse(case).map(|(_, warnings)| warnings).unwrap_err();
        assert_eq!(said.lines().count(), 1, "{case}: {said}");
        for part in expected.iter().chain(&["error: "]) {
            assert!(said.contains(part), "{case}: no {part:?} in {said}");
        }
        assert!(!said.contains(CANARY), "{said}");
    }
}

fn warns(cases: &[(&str, &[&str])]) {
    for (case, expected) in cases {
        let said = parse(case).unwrap().1;
        assert_eq!(said.lines().count(), 1, "{case}: {said}");
        for part in expected.iter().chain(&["warning: "]) {
            assert!(said.contains(part), "{case}: no {part:?} in {said}");
        }
        assert!(!said.contains(CANARY), "{said}");
    }
}

#[test]
fn a_target_has_defaults() {
    let (config, said) = parse("").unwrap();
    assert_eq!(said, "");
    let target = &config.targets["orders"];
    let mut wanted = Target::http("orders", "https://example.com/hooks");
    let TargetKind::Http(http) = &mut wanted.kind;
    http.secrets = vec![Key::webhooks(SECRET).unwrap()];
    assert_eq!(format!("{target:?}"), format!("{wanted:?}"));
    let route = Route { target: "orders".into(), types: Vec::new(), attempts_max: 20 };
    assert_eq!(config.sources["a"].targets, [route]);
}

#[test]
fn every_value_of_a_target_is_taken() {
    let case = "target.orders = { kind = \"http\", url = { env = \"URL\" }, secrets = [{ env = \"SECRET\" }], payload = \
                \"envelope\", timeout = \"20s\", concurrency = 3, rate = 100, attempts_max = 4, retry_base = \"1s\", \
                retry_max = \"2s\", breaker_failures = 5, allow_private = true, \
                headers = { X-Team = \"a\", authorization = { env = \"TOKEN\" } } }";
    let text = format!(
        "postgres.url = \"postgres://h/d\"\nfast_tier.kind = \"memory\"\n\
         source.a = {{ provider = \"truelayer\", targets = [\"orders\"] }}\n{case}"
    );
    let loaded = Config::parse("t.toml", &text, &env).map_err(|problems| report(&problems)).unwrap();
    assert_eq!(report(&loaded.warnings), "");
    let target = &loaded.config.targets["orders"];
    let seconds = Duration::from_secs;
    assert_eq!((target.timeout, target.concurrency, target.rate), (seconds(20), 3, Some(100)));
    assert_eq!((target.attempts_max, target.breaker_failures), (4, 5));
    assert_eq!(target.retry, Retry { base: seconds(1), max: seconds(2) });
    let TargetKind::Http(http) = &target.kind;
    assert_eq!((http.payload, http.allow_private, http.secrets.len()), (Payload::Envelope, true, 1));
    assert!(http.url.0.ends_with(CANARY));
    let value =
        |name: &str| http.headers.iter().find(|(is, _)| is == name).map(|(_, value)| value.as_bytes());
    assert_eq!(value("x-team"), Some(&b"a"[..]));
    assert_eq!(value("authorization"), Some(format!("Bearer {CANARY}").as_bytes()));
    assert!(!format!("{:?}", loaded.config).contains(CANARY));
}

#[test]
fn values_out_of_range_are_refused() {
    refuses(&[
        ("target.orders.kind = \"kafka\"", &["target.orders.kind", "\"http\""]),
        ("target.orders.payload = \"json\"", &["target.orders.payload", "\"envelope\""]),
        ("target.orders.timeout = \"99ms\"", &["target.orders.timeout", "from 100ms to 5m"]),
        ("target.orders.timeout = \"301s\"", &["target.orders.timeout", "from 100ms to 5m"]),
        ("target.orders.concurrency = 0", &["target.orders.concurrency", "1 to 10000"]),
        ("target.orders.concurrency = 10001", &["target.orders.concurrency", "1 to 10000"]),
        ("target.orders.rate = 0", &["target.orders.rate", "1 to 1000000"]),
        ("target.orders.rate = \"none\"", &["target.orders.rate", "or \"off\""]),
        ("target.orders.attempts_max = 1001", &["target.orders.attempts_max", "1 to 1000"]),
        ("target.orders.breaker_failures = 0", &["target.orders.breaker_failures", "1 to 1000"]),
        ("target.orders.retry_base = \"8d\"", &["target.orders.retry_base", "from 1ms to 7d"]),
        (
            "target.orders.retry_base = \"2h\"",
            &["retry_base (2h) must be at most", "retry_max (1h, the default)"],
        ),
        ("target.orders.allow_private = 1", &["target.orders.allow_private", "true or false"]),
        ("target.orders.concurency = 1", &["did you mean \"concurrency\"?"]),
        (
            "target.orders.timeout = \"30s\"",
            &["target.orders.timeout (30s) must be below work.lease (30s, the default)"],
        ),
        (
            "work.lease = \"10s\"",
            &["error: work.lease", "target.orders.timeout (10s) must be below", "deliver"],
        ),
    ]);
    let said = parse("target.O = { kind = \"http\", url = \"https://a.example/\" }").unwrap_err();
    assert!(said.contains("target.O: \"O\" cannot be the name of a target: give 1 to 63"), "{said}");
    let said = parse("target.b.timeout = \"1s\"").unwrap_err();
    for wanted in ["target.b.kind: missing: give \"http\"", "target.b.url: missing: give \"https://"] {
        assert!(said.contains(wanted), "{said}");
    }
}

#[test]
fn a_url_leads_to_the_internet_by_tls_unless_it_is_said_otherwise() {
    refuses(&[
        ("target.orders.url = { env = \"UNSET\" }", &["target.orders.url", "\"UNSET\" is not set"]),
        (
            "target.orders.url = { env = \"BAD_URL\" }",
            &["variable \"BAD_URL\" has a user name", "authorization"],
        ),
        ("target.orders.url = \"canary-7f3a\"", &["target.orders.url: the URL does not start with http"]),
        (
            "target.orders.url = \"ftp://canary-7f3a/\"",
            &["target.orders.url: the URL does not start with http"],
        ),
        ("target.orders.url = { env = \"URL\" }", &["target.orders.url", "allow_private = true"]),
        ("target.orders.url = \"https://127.0.0.1/\"", &["allow_private = true"]),
        ("target.orders.url = \"https://[::ffff:10.0.0.1]/\"", &["allow_private = true"]),
        ("target.orders.url = \"https://169.254.169.254/latest\"", &["allow_private = true"]),
        ("target.orders.url = \"https://2130706433/\"", &["neither a name nor an address"]),
    ]);
    warns(&[
        ("target.orders.url = \"http://canary-7f3a.example/\"", &["target.orders.url: begins with http://"]),
        ("target.orders.url = \"http://1.1.1.1/\"", &["target.orders.url: begins with http://"]),
    ]);
    for url in ["http://10.0.0.1/", "http://orders.internal/", "https://[::1]:8443/"] {
        let case = format!("target.orders.url = \"{url}\"\ntarget.orders.allow_private = true");
        assert_eq!(parse(&case).unwrap().1, "", "{url}");
        assert_eq!(http_of(&case).url.0, url);
    }
}

#[test]
fn secrets_sign_or_are_refused() {
    refuses(&[
        ("target.orders.secrets = { env = \"UNSET\" }", &["target.orders.secrets", "\"UNSET\" is not set"]),
        (
            "target.orders.secrets = [{ env = \"SHORT\" }]",
            &["target.orders.secrets[0]", "has 14 bytes, decoded", "16 to 512"],
        ),
        ("target.orders.secrets = [{ env = \"CANARY\" }]", &["cannot sign: the secret is not base64"]),
        ("target.orders.secrets = \"whsec_\"", &["cannot sign", "empty after \"whsec_\""]),
    ]);
    let many = format!("target.orders.secrets = [{}]", format!("\"{SECRET}\",").repeat(17));
    refuses(&[(&many, &["17 secrets, and 16 are the limit"])]);
    warns(&[("target.orders.secrets = []", &["target.orders.secrets: none, so that nothing is signed"])]);
    let two = format!("target.orders.secrets = [\"{SECRET}\", \"{}\"]", SECRET.trim_start_matches("whsec_"));
    let keys = http_of(&two).secrets;
    let preset = crate::provider::Scheme::preset("standard-webhooks").unwrap().key(SECRET).unwrap();
    assert!(keys.len() == 2 && keys.iter().all(|key| key.is_same(&preset)), "read as the preset reads it");
}

#[test]
fn headers_that_are_ours_are_refused() {
    for name in [
        "webhook-id",
        "Webhook-Foo",
        " WEBHOOK-SIGNATURE",
        "hapax-source",
        "Idempotency-Key",
        "content-length ",
        "Content-Type",
        "transfer-encoding",
        "Host",
        "connection",
        "TE",
        "trailer",
        "upgrade",
        "expect",
        "keep-alive",
        "Proxy-Authorization",
        "\\tproxy-connection",
    ] {
        let case = format!("target.orders.headers = {{ \"{name}\" = \"{CANARY}\" }}");
        refuses(&[(&case, &["target.orders.headers", "is set by hapax: remove it"])]);
    }
    refuses(&[
        ("target.orders.headers = { \"x y\" = \"a\" }", &["\"x y\" cannot be the name of a header"]),
        ("target.orders.headers = { \" x\" = \"a\" }", &["\" x\" cannot be the name of a header"]),
        ("target.orders.headers = { x = \"a\", X = \"b\" }", &["stands there twice"]),
        ("target.orders.headers = { x = { env = \"NEWLINE\" } }", &["headers.x", "visible ASCII"]),
        ("target.orders.headers = { x = \"é\" }", &["headers.x: the literal secret cannot be the value"]),
        ("target.orders.headers = { x = 7 }", &["headers.x", "no secret"]),
    ]);
    assert!(load("target.orders.headers = { user-agent = \"mine\" }").targets.contains_key("orders"));
}

#[test]
fn sources_name_targets_that_are_there() {
    refuses(&[
        (
            "source.a.targets = [\"ordres\"]",
            &["source.a.targets[0].name", "no target \"ordres\"; did you mean \"orders\"?"],
        ),
        ("source.a.targets = [\"orders\", \"x\"]", &["source.a.targets[1].name", "add [target.x]"]),
        (
            "source.a.targets = [\"orders\", { name = \"orders\", types = [\"a\"] }]",
            &["targets[1].name", "twice"],
        ),
        ("source.a.targets = [{ types = [\"a\"] }]", &["source.a.targets[0].name: missing: give the NAME"]),
        ("source.a.targets = [{ name = \"orders\", types = [] }]", &["targets[0].types: is empty"]),
        (
            "source.a.targets = [{ name = \"orders\", types = [\"a*b\"] }]",
            &["targets[0].types[0]: \"a*b\" has a *"],
        ),
        ("source.a.targets = [{ name = \"orders\", type = [\"a\"] }]", &["did you mean \"types\"?"]),
        (
            "source.a.targets = [7]",
            &["source.a.targets[0]: found a bare number, expected a string or a table"],
        ),
        ("source.a.targets = 7", &["source.a.targets: found a bare number, expected a list"]),
    ]);
    warns(&[("source.a.targets = []", &["target.orders: no source has it among its targets"])]);
    let config = load(
        "source.a.targets = [{ name = \"orders\", types = [\"invoice.*\", \"customer.created\"] }]\n\
         target.orders.attempts_max = 7",
    );
    let types = ["invoice.*", "customer.created"].map(|text| TypePattern::parse(text).unwrap()).to_vec();
    assert_eq!(config.sources["a"].targets, [Route { target: "orders".into(), types, attempts_max: 7 }]);
}

#[test]
fn what_a_syntax_error_may_hide_is_not_called_missing() {
    let said = parse("source.b = { provider = \"truelayer\", targets = [\"x\"] }\n[target.x\n").unwrap_err();
    assert!(!said.contains("no target") && said.contains("syntax"), "{said}");
}
