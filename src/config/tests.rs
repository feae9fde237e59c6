//! Every rule with a file that breaks it and the nearest one that does not.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::load::Parsing;
use super::source::{Providers, Quirk, Traits};
use super::*;
use crate::provider::{Binds, Facts};
use crate::settings::{File, Problem};

const CANARY: &str = "canary-secret-55d1";

/// What every file needs, as dotted keys, so that a case can replace any line.
const BASE: [(&str, &str); 5] = [
    ("postgres.url", "\"postgres://h/d\""),
    ("fast_tier.url", "\"redis://h\""),
    ("fast_tier.prefix", "\"t:\""),
    ("source.a.provider", "\"stripe\""),
    ("source.a.secrets", "\"whsec_c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0\""),
];

fn file_with(case: &str) -> String {
    let written = |key: &str| case.lines().any(|line| line.split(" = ").next() == Some(key));
    let base = BASE.iter().filter(|(key, _)| !written(key));
    base.map(|(key, value)| format!("{key} = {value}\n")).chain([case.to_owned()]).collect()
}

/// Any scheme will do here; what settings must know of it comes from [`Traits`].
fn scheme() -> Option<Arc<Scheme>> {
    let (_, empty) = File::parse("scheme", "");
    Scheme::preset("stripe").or_else(|| Scheme::read("stripe", empty).map(Arc::new))
}

fn quiet() -> Traits {
    Traits {
        name: "stripe".to_owned(),
        facts: Facts { id_signed: true, ..Facts::default() },
        ..Traits::default()
    }
}

fn env(name: &str) -> Option<String> {
    match name {
        "DATABASE_URL" => Some("postgres://u:pw@h/d".to_owned()),
        "REDIS_URL" => Some("redis://h\n".to_owned()),
        "STRIPE_SECRET" => Some(format!("{CANARY}\n")),
        "ORDERS_SECRET" => Some("whsec_c2VjcmV0LXNlY3JldC1zZWNyZXQ=".to_owned()),
        "EMPTY" => Some("\n".to_owned()),
        _ => None,
    }
}

fn parse_text(text: &str, traits: &Traits) -> (Result<Loaded, Vec<Problem>>, File) {
    let preset = |name: &str| if name == "stripe" { scheme() } else { None };
    let traits = |_: &Scheme| traits.clone();
    let providers = Providers { preset: &preset, names: &["stripe", "github"], traits: &traits };
    Parsing::new(&env, &providers).parse("t.toml", text)
}

fn parse(case: &str, traits: &Traits) -> Result<Loaded, Vec<Problem>> {
    parse_text(&file_with(case), traits).0
}

fn load(case: &str) -> Config {
    parse(case, &quiet()).map_err(|problems| report(&problems)).unwrap().config
}

fn said(case: &str, traits: &Traits) -> String {
    match parse(case, traits) {
        Ok(loaded) => report(&loaded.warnings),
        Err(problems) => report(&problems),
    }
}

fn refuses_with(traits: &Traits, cases: &[(&str, &[&str])]) {
    for (case, expected) in cases {
        let said = said(case, traits);
        assert!(parse(case, traits).is_err(), "{case}: not refused: {said}");
        assert_eq!(said.lines().count(), 1, "{case}: {said}");
        for part in *expected {
            assert!(said.contains(part), "{case}: no {part:?} in {said}");
        }
    }
}

fn refuses(cases: &[(&str, &[&str])]) {
    refuses_with(&quiet(), cases);
}

fn warns_with(traits: &Traits, cases: &[(&str, &[&str])]) {
    for (case, expected) in cases {
        let said = said(case, traits);
        assert!(parse(case, traits).is_ok(), "{case}: refused: {said}");
        assert_eq!(said.lines().count(), 1, "{case}: {said}");
        for part in expected.iter().chain(&["warning: "]) {
            assert!(said.contains(part), "{case}: no {part:?} in {said}");
        }
    }
}

fn takes_with(traits: &Traits, cases: &[&str]) {
    for case in cases {
        assert_eq!(said(case, traits), "", "{case}");
    }
}

fn takes(cases: &[&str]) {
    takes_with(&quiet(), cases);
}

#[test]
fn missing_values_are_named_with_what_to_give() {
    let (result, _) = parse_text("", &quiet());
    let said = report(&result.unwrap_err());
    for expected in [
        "t.toml:1: error: postgres.url: missing: give { env = \"DATABASE_URL\" }",
        "t.toml:1: error: fast_tier.url: missing: give { env = \"REDIS_URL\" }",
        "or kind = \"memory\" or \"off\"",
        "t.toml:1: error: fast_tier.prefix: missing, and without it deployments would share keys",
        "t.toml:1: warning: source: there is no [source.NAME]: every request will be answered 404",
    ] {
        assert!(said.contains(expected), "no {expected:?} in {said}");
    }
    assert_eq!(said.lines().count(), 4, "{said}");
}

#[test]
fn values_out_of_range_are_refused() {
    refuses(&[
        ("server.threads = 0", &["server.threads", "1 to 64"]),
        ("server.threads = 65", &["65", "1 to 64"]),
        ("server.listen = \"localhost:80\"", &["server.listen", "localhost:80", "0.0.0.0:8080"]),
        ("server.listen = \":80\"", &["server.listen"]),
        ("server.head_max = \"8191B\"", &["server.head_max", "8191B", "8KiB"]),
        ("server.deadline = 5", &["server.deadline", "a bare number", "\"10s\""]),
        ("server.idle_timeout = \"2h\"", &["server.idle_timeout", "2h", "1h"]),
        ("server.body_max = 1048576", &["server.body_max", "\"1MiB\""]),
        ("server.retry_after = \"1500ms\"", &["server.retry_after", "whole seconds"]),
        ("server.retry_after = \"500ms\"", &["server.retry_after", "whole seconds"]),
        ("log.level = \"trace\"", &["log.level", "\"debug\""]),
        ("log.requests = \"none\"", &["log.requests", "\"failed\""]),
        ("postgres.synchronous_commit = \"off\"", &["postgres.synchronous_commit", "loses"]),
        ("postgres.url = { env = \"EMPTY\" }", &["postgres.url", "\"EMPTY\" is empty"]),
        (
            "postgres.url = { env = \"REDIS_URL\" }",
            &["postgres.url", "\"REDIS_URL\" does not hold a URL like"],
        ),
        ("fast_tier.url = { env = \"DATABASE_URL\" }", &["fast_tier.url", "\"DATABASE_URL\" does not hold"]),
        ("fast_tier.kind = \"keydb\"", &["fast_tier.kind", "\"memory\""]),
        ("fast_tier.memory_ttl = \"6s\"", &["fast_tier.memory_ttl", "6s", "5s"]),
        ("retention.ledger = \"3651d\"", &["retention.ledger", "3651d", "3650d"]),
        ("in_flight.waiters_max = 0", &["in_flight.waiters_max"]),
        ("targets = []", &["targets", "unknown key"]),
        ("retention.duty = 0", &["retention.duty", "0 is out of range: give a number from 0.001 to 1"]),
        ("retention.duty = 1.5", &["retention.duty", "1.5 is out of range"]),
        ("retention.share_max = \"half\"", &["retention.share_max", "a number from 0 to 1"]),
        ("retention.batch_rows = 99", &["retention.batch_rows", "100 to 100000"]),
        ("retention.every = \"8d\"", &["retention.every", "8d"]),
        ("retention.bdy = \"1d\"", &["retention.bdy", "\"body\""]),
        ("server.lissten = \"1\"", &["server.lissten", "\"listen\""]),
    ]);
    takes(&[
        "server.threads = 64",
        "server.listen = \"[::]:8080\"",
        "server.head_max = \"8KiB\"",
        "server.retry_after = \"1s\"",
        "postgres.synchronous_commit = \"remote_apply\"",
        "postgres.url = \"host=h dbname=d\"",
        "postgres.url = { env = \"DATABASE_URL\" }",
        "fast_tier.url = { env = \"REDIS_URL\" }",
    ]);
    let Postgres { url, .. } = load("postgres.url = { env = \"DATABASE_URL\" }").postgres;
    assert_eq!(url.0, "postgres://u:pw@h/d");
}

#[test]
fn redis_keys_go_with_redis() {
    for key in ["url", "prefix"] {
        let (result, _) =
            parse_text("[postgres]\nurl = \"postgres://h\"\n[fast_tier]\nkind = \"redis\"\n", &quiet());
        assert!(report(&result.unwrap_err()).contains(&format!("t.toml:3: error: fast_tier.{key}: missing")));
    }
    let without_redis = |tier: &str| {
        let source = "source.a = { provider = \"stripe\", secrets = \"s\" }";
        let text = format!("{source}\n[postgres]\nurl = \"postgres://h\"\n[fast_tier]\n{tier}");
        match parse_text(&text, &quiet()).0 {
            Ok(loaded) => report(&loaded.warnings),
            Err(problems) => report(&problems),
        }
    };
    for tier in ["kind = \"memory\"", "kind = \"off\"", "kind = \"memory\"\nttl = \"1h\"\nmemory_events = 5"]
    {
        assert_eq!(without_redis(tier), "");
    }
    let keys = [
        "url = \"redis://h\"",
        "prefix = \"p:\"",
        "lease = \"10s\"",
        "timeout = \"50ms\"",
        "breaker_failures = 5",
        "on_failure = \"postgres\"",
        "memory_ttl = \"5s\"",
    ];
    for key in keys {
        let said = without_redis(&format!("kind = \"memory\"\n{key}"));
        assert!(said.contains("t.toml:6: error: fast_tier."), "{said}");
        assert!(said.contains("belongs to kind = \"redis\", but kind is \"memory\": remove it"), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
    let said = without_redis("kind = \"off\"\nttl = \"1h\"");
    assert!(said.contains("t.toml:6: warning: fast_tier.ttl: has no effect"), "{said}");
    let said = without_redis("kind = \"off\"\nleese = \"1h\"");
    assert!(said.contains("did you mean \"lease\"?"), "{said}");
}

#[test]
fn memory_alone_remembers_for_ttl() {
    let text = "postgres.url = \"postgres://h\"\nfast_tier = { kind = \"memory\", ttl = \"1h\" }";
    let (result, _) = parse_text(text, &quiet());
    let tier = result.unwrap().config.fast_tier;
    assert!(matches!(tier.kind, FastTierKind::Memory));
    assert_eq!((tier.ttl, tier.memory_ttl), (Duration::from_secs(3600), Duration::from_secs(3600)));
}

#[test]
fn prefixes_name_one_deployment() {
    let long = format!("fast_tier.prefix = \"{}:\"", "x".repeat(64));
    refuses(&[
        ("fast_tier.prefix = \"\"", &["fast_tier.prefix", "0 bytes", "1 to 64"]),
        (long.as_str(), &["fast_tier.prefix", "65 bytes"]),
        ("fast_tier.prefix = \"a b:\"", &["fast_tier.prefix", "whitespace"]),
        ("fast_tier.prefix = \"a\\u0000:\"", &["fast_tier.prefix", "control"]),
        ("fast_tier.prefix = \"{a}:\"", &["fast_tier.prefix", "one slot"]),
    ]);
    warns_with(&quiet(), &[("fast_tier.prefix = \"prod\"", &["fast_tier.prefix", "better \"prod:\""])]);
    takes(&["fast_tier.prefix = \"prod:\"", "fast_tier.prefix = \"a-\""]);
}

#[test]
fn times_that_do_not_fit_into_each_other_are_refused() {
    refuses(&[
        (
            "server.deadline = \"4s\"",
            &[
                "t.toml:6: error: server.deadline",
                "in_flight.wait (1s, the default) + postgres.record_timeout (3s, the default) = 4s must be below \
             server.deadline (4s)",
            ],
        ),
        (
            "in_flight.wait = \"2s\"",
            &["t.toml:6: error: in_flight.wait", "= 5s", "server.deadline (5s, the default)"],
        ),
        (
            "fast_tier.lease = \"5s\"",
            &["server.deadline (5s, the default) must be below fast_tier.lease (5s)"],
        ),
        ("fast_tier.timeout = \"5s\"", &["fast_tier.timeout (5s) must be below server.deadline (5s"]),
        ("server.body_timeout = \"5s\"", &["server.body_timeout (5s) must be below server.deadline"]),
        (
            "server.drain = \"4999ms\"",
            &["server.deadline (5s, the default) must be at most server.drain (4999ms)"],
        ),
        (
            "postgres.lock_timeout = \"2s\"",
            &["postgres.lock_timeout (2s) must be below postgres.statement_timeout"],
        ),
        (
            "postgres.statement_timeout = \"3s\"",
            &["postgres.statement_timeout (3s) must be below postgres.record_t"],
        ),
        ("postgres.commit_timeout = \"2s\"", &["must be below postgres.commit_timeout (2s)"]),
        (
            "postgres.generation_age_max = \"1999ms\"\npostgres.connect_timeout = \"1s\"",
            &[
                "2 × postgres.heartbeat (1s, the default) = 2s must be at most postgres.generation_age_max (1999ms)",
            ],
        ),
        (
            "fast_tier.ttl = \"36d\"",
            &["fast_tier.ttl (36d) must be at most retention.ledger (35d, the default)"],
        ),
        (
            "fast_tier.ttl = \"4s\"",
            &["fast_tier.memory_ttl (5s, the default) must be at most fast_tier.ttl (4s)"],
        ),
        ("retention.body = \"36d\"", &["retention.body (36d) must be at most retention.ledger"]),
        ("retention.jobs = \"36d\"", &["retention.jobs (36d) must be at most retention.ledger"]),
        (
            "retention.dead = \"34d\"",
            &["retention.ledger (35d, the default) must be at most retention.dead (34d)"],
        ),
        (
            "source.a.deadline = \"4s\"",
            &["error: source.a.deadline", "= 4s must be below source.a.deadline (4s)"],
        ),
        (
            "source.a.deadline = \"10s\"\nfast_tier.lease = \"11s\"\nserver.drain = \"9s\"",
            &["source.a.deadline (10s) must be at most server.drain (9s)"],
        ),
        (
            "source.a.deadline = \"10s\"",
            &["source.a.deadline (10s) must be below fast_tier.lease (10s, the default)"],
        ),
    ]);
}

#[test]
fn times_that_just_fit_into_each_other_are_taken() {
    takes(&[
        "server.deadline = \"4001ms\"",
        "in_flight.wait = \"1999ms\"",
        "fast_tier.lease = \"5001ms\"",
        "fast_tier.timeout = \"4999ms\"",
        "server.body_timeout = \"4999ms\"",
        "server.drain = \"5s\"",
        "postgres.lock_timeout = \"1999ms\"",
        "postgres.statement_timeout = \"2999ms\"",
        "postgres.commit_timeout = \"2001ms\"",
        "postgres.generation_age_max = \"2s\"",
        "fast_tier.ttl = \"35d\"",
        "fast_tier.ttl = \"5s\"",
        "retention.body = \"35d\"",
        "retention.jobs = \"35d\"",
        "retention.dead = \"35d\"",
        // What is not written gives way.
        "retention.ledger = \"100d\"",
        "retention.every = \"off\"",
        "retention.duty = 1",
        "retention.share_max = 0.25",
        "source.a.deadline = \"9999ms\"",
    ]);
    warns_with(
        &quiet(),
        &[
            (
                "postgres.connect_timeout = \"4s\"",
                &["postgres.connect_timeout (4s) must be at most postgres.generation"],
            ),
            (
                "postgres.queue_events = 127",
                &["postgres.queue_events (127) is below postgres.batch_events (128)"],
            ),
            (
                "postgres.queue_bytes = \"3MiB\"",
                &["postgres.queue_bytes (3MiB) is below postgres.batch_bytes (4MiB)"],
            ),
        ],
    );
    takes(&[
        "postgres.queue_events = 128",
        "postgres.queue_bytes = \"4MiB\"",
        "postgres.connect_timeout = \"3s\"",
    ]);
}

#[test]
fn a_refused_value_takes_part_in_no_relation() {
    refuses(&[("server.deadline = 5\nfast_tier.lease = \"4s\"", &["server.deadline: found a bare number"])]);
}

#[test]
fn listeners_do_not_collide() {
    let same = "server.listen = \"127.0.0.1:9000\"\nadmin.listen = \"127.0.0.1:9000\"";
    refuses(&[
        (same, &["t.toml:7: error: admin.listen", "127.0.0.1:9000"]),
        ("server.listen = \"0.0.0.0:9090\"", &["t.toml:6: error: server.listen", "127.0.0.1:9090"]),
        ("admin.listen = \"[::]:8080\"", &["admin.listen", "[::]:8080", "0.0.0.0:8080"]),
    ]);
    takes(&[
        "server.listen = \"127.0.0.2:9090\"",
        "server.listen = \"127.0.0.1:0\"\nadmin.listen = \"127.0.0.1:0\"",
        "admin.listen = \"0.0.0.0:8081\"",
    ]);
}

#[test]
fn public_urls_are_what_providers_were_given() {
    refuses(&[
        ("server.public_url = \"hooks.example.com\"", &["server.public_url", "http:// or https://"]),
        ("server.public_url = \"ftp://h\"", &["http:// or https://"]),
        ("server.public_url = \"https://\"", &["ends in a slash"]),
        ("server.public_url = \"https:///x\"", &["is not a URL"]),
        ("server.public_url = \"https://a b\"", &["is not a URL"]),
        ("server.public_url = \"https://:80\"", &["has no host"]),
        ("server.public_url = \"https://h:99999\"", &["server.public_url", "port"]),
        ("server.public_url = \"https://h:0\"", &["port"]),
        ("server.public_url = \"https://h:\"", &["port"]),
        ("server.public_url = \"https://h/\"", &["ends in a slash"]),
        ("server.public_url = \"https://h?x=1\"", &["query or fragment"]),
        ("server.public_url = \"https://h#x\"", &["query or fragment"]),
        ("server.public_url = \"https://u:pw@h\"", &["user name or password"]),
        ("source.a.public_url = \"https://h/\"", &["source.a.public_url", "ends in a slash"]),
    ]);
    takes(&[
        "server.public_url = \"https://h\"",
        "server.public_url = \"http://h:8080/base\"",
        "server.public_url = \"https://[::1]:8080\"",
    ]);
    assert!(!said("server.public_url = \"https://u:pw@h\"", &quiet()).contains("pw@"));
    let two = "server.public_url = \"https://h\"\nsource.a.public_url = \"https://own\"";
    assert_eq!(load(two).sources["a"].public_url.as_deref(), Some("https://own"));
    assert_eq!(
        load("server.public_url = \"https://h\"").sources["a"].public_url.as_deref(),
        Some("https://h")
    );
}

#[test]
fn a_source_has_a_plain_name_a_known_provider_and_a_secret() {
    let long = format!("source.{} = {{ provider = \"stripe\", secrets = \"s\" }}", "x".repeat(64));
    refuses(&[
        (
            "source.A = { provider = \"stripe\", secrets = \"s\" }",
            &["source.A", "cannot be the name of a source"],
        ),
        ("source._a = { provider = \"stripe\", secrets = \"s\" }", &["source._a", "starting with"]),
        ("source.\"a/b\" = { provider = \"stripe\", secrets = \"s\" }", &["source.\"a/b\""]),
        ("source.\"\" = { provider = \"stripe\", secrets = \"s\" }", &["source.\"\""]),
        (long.as_str(), &["1 to 63"]),
        ("source.b = { secrets = \"s\" }", &["source.b.provider", "missing"]),
        ("source.b = 1", &["source.b: found a bare number, expected a table"]),
        ("source.a.provider = \"strip\"", &["source.a.provider", "did you mean \"stripe\"?"]),
        ("source.a.provider = \"zzz\"", &["source.a.provider", "\"zzz\"", "[scheme.NAME]"]),
        ("source.a.secrets = []", &["source.a.secrets: no secret", "anybody could send"]),
        ("source.b = { provider = \"stripe\" }", &["source.b.secrets: no secret"]),
        ("source.a.secrets = \"\"", &["source.a.secrets", "empty"]),
        ("source.a.secrets = \" \"", &["source.a.secrets", "whitespace"]),
        ("source.a.secrets = { env = \"UNSET\" }", &["source.a.secrets", "\"UNSET\" is not set"]),
        ("source.a.secrets = { env = \"EMPTY\" }", &["source.a.secrets", "\"EMPTY\" is empty"]),
        ("source.a.secrets = [{ env = \"STRIPE_SECRET\" }, \"\"]", &["source.a.secrets[1]", "empty"]),
        ("source.a.secrets = { file = \"/absent/secret\" }", &["\"/absent/secret\" cannot be read"]),
        ("source.a.targets = [\"x\"]", &["source.a.targets[0].name: there is no target"]),
    ]);
    takes(&["source.0-b_c = { provider = \"stripe\", secrets = \"s\" }"]);
    let seventeen = format!("source.a.secrets = [{}]", "\"s\",".repeat(17));
    refuses(&[(seventeen.as_str(), &["17 secrets", "16"])]);
    takes(&[format!("source.a.secrets = [{}]", "\"s\",".repeat(16)).as_str()]);
    let three = "source.a.secrets = [{ env = \"STRIPE_SECRET\" }, \"a\", \"b\"]";
    assert_eq!(load(three).sources["a"].keys.len(), 3);
}

#[test]
fn effects_are_functions_by_full_name() {
    let long = format!("source.a.effect = \"s.{}\"", "f".repeat(64));
    let group = "source.a.effect = \"s.f\"\nsource.a.effect_group";
    let (none, empty) = (format!("{group} = \"none\""), format!("{group} = \"\""));
    refuses(&[
        ("source.a.effect = \"apply\"", &["source.a.effect", "names no schema", "\"schema.function\""]),
        ("source.a.effect = \"Billing.apply\"", &["source.a.effect", "double quotes"]),
        ("source.a.effect = \"a.b.c\"", &["source.a.effect"]),
        ("source.a.effect = \"a.b()\"", &["source.a.effect"]),
        ("source.a.effect = \"a.b; drop table x\"", &["source.a.effect"]),
        ("source.a.effect = \"a.\"", &["source.a.effect"]),
        ("source.a.effect = \".b\"", &["source.a.effect"]),
        ("source.a.effect = \"1a.b\"", &["source.a.effect"]),
        ("source.a.effect = ''", &["source.a.effect"]),
        ("source.a.effect = '\"a.b'", &["source.a.effect"]),
        ("source.a.effect = '\"\".b'", &["source.a.effect"]),
        ("source.a.effect = '\"a\"b\".c'", &["source.a.effect"]),
        ("source.a.effect = \"\\\"a\\u0000\\\".b\"", &["source.a.effect"]),
        (long.as_str(), &["63 bytes"]),
        ("source.a.effect_group = \"g\"", &["source.a.effect_group", "has none"]),
        (none.as_str(), &["source.a.effect_group", "\"none\""]),
        (empty.as_str(), &["source.a.effect_group"]),
    ]);
    for effect in ["billing.apply_payment", "_a._1", "\"My\".\"Fn\"", "\"a.b\".\"c\"\"d\"", "a.\"é\""] {
        let config = load(&format!("source.a.effect = '{effect}'"));
        let (name, group) = (effect.to_owned(), Some(effect.to_owned()));
        assert_eq!(config.sources["a"].effect, Effect::Function { name, group, batched: true });
    }
    let config = load("source.a.effect = \"none\"");
    assert_eq!(config.sources["a"].effect, Effect::None);
    let of = |text: &str| match &load(text).sources["a"].effect {
        Effect::Function { group, .. } | Effect::Rust { group, .. } => group.clone(),
        Effect::None | Effect::Pull => panic!("no effect"),
    };
    assert_eq!(of(&format!("{group} = \"g\"")).as_deref(), Some("g"));
    assert_eq!(of(&format!("{group} = \"g\"\nsource.a.effect_parallel = true")), None);
    warns_with(&quiet(), &[("source.a.effect_parallel = true", &["has no effect without an effect"])]);
    takes(&["source.a.effect = \"s.f\"\nsource.a.effect_parallel = true"]);
}

#[test]
fn what_becomes_of_a_failed_event() {
    let of = |case: &str, traits: &Traits| {
        let config = parse(case, traits).map_err(|problems| report(&problems)).unwrap().config;
        let source = &config.sources["a"];
        (source.effect.clone(), source.on_error, source.attempts_max, source.retry)
    };
    let retry = |base, max| Retry { base: Duration::from_secs(base), max: Duration::from_secs(max) };
    let once = Traits { facts: Facts { retries: false, ..quiet().facts }, ..quiet() };
    assert_eq!(of("", &quiet()), (Effect::None, OnError::Retry, 20, retry(1, 3600)));
    assert_eq!(of("", &once), (Effect::None, OnError::Park, 20, retry(1, 3600)));
    assert_eq!(of("source.a.effect = \"s.f\"\nsource.a.on_error = \"retry\"", &once).1, OnError::Retry);
    let park = "source.a.effect = \"s.f\"\nsource.a.on_error = \"park\"\nsource.a.attempts_max = 7\n\
                source.a.retry_base = \"2s\"\nsource.a.retry_max = \"2s\"";
    let (_, on_error, attempts_max, waits) = of(park, &quiet());
    assert_eq!((on_error, attempts_max, waits), (OnError::Park, 7, retry(2, 2)));
    let pull = "source.a.effect = \"pull\"\nsource.a.attempts_max";
    assert_eq!(of("source.a.effect = \"pull\"", &quiet()), (Effect::Pull, OnError::Retry, 5, retry(1, 3600)));
    assert_eq!(of(&format!("{pull} = 6"), &quiet()).2, 6);
    let grouped = "source.a.effect = \"pull\"\nsource.a.effect_group = \"g\"";
    refuses(&[
        (&format!("{pull} = 0"), &["source.a.attempts_max", "1 to 1000"]),
        (
            &park.replace("retry_max = \"2s\"", "retry_max = \"1s\""),
            &["retry_base (2s) must be at most", "(1s)"],
        ),
        ("source.a.effect = \"s.f\"\nsource.a.on_error = \"stop\"", &["source.a.on_error", "\"park\""]),
        (grouped, &["source.a.effect_group", "has none"]),
    ]);
    let failing = "does nothing without an effect and on_error = \"park\"";
    warns_with(
        &quiet(),
        &[
            ("source.a.on_error = \"park\"", &["source.a.on_error: does nothing without an effect"]),
            ("source.a.attempts_max = 7", &["source.a.attempts_max", failing, "\"pull\""]),
            ("source.a.retry_base = \"2s\"", &["source.a.retry_base", failing]),
            ("source.a.effect = \"s.f\"\nsource.a.retry_max = \"2h\"", &["source.a.retry_max", failing]),
            ("source.a.effect = \"pull\"\nsource.a.retry_max = \"2h\"", &["source.a.retry_max", failing]),
            (
                "source.a.effect = \"pull\"\nsource.a.on_error = \"retry\"",
                &["source.a.on_error: does nothing"],
            ),
        ],
    );
}

#[test]
fn work_is_bounded() {
    refuses(&[
        ("work.connections = 0", &["work.connections", "1 to 100"]),
        ("work.connections = 101", &["work.connections", "1 to 100"]),
        ("work.lease = \"999ms\"", &["work.lease", "from 1s to 1h"]),
        ("work.lease = \"61m\"", &["work.lease", "from 1s to 1h"]),
        ("work.poll = \"99ms\"", &["work.poll", "from 100ms to 1m"]),
        ("work.poll = \"61s\"", &["work.poll", "from 100ms to 1m"]),
        ("work.polls = \"1s\"", &["work.polls", "did you mean \"poll\"?"]),
    ]);
    takes(&["work.connections = 100\nwork.lease = \"1h\"\nwork.poll = \"1m\""]);
}

#[test]
fn effects_in_rust_are_named_apart_and_have_no_batches() {
    let long = format!("source.a.effect = \"rust:{}\"", "f".repeat(64));
    refuses(&[
        ("source.a.effect = \"rust:\"", &["source.a.effect", "names no Rust effect", "a-z"]),
        ("source.a.effect = \"rust:a.b\"", &["source.a.effect", "names no Rust effect"]),
        ("source.a.effect = \"rust:A\"", &["source.a.effect", "names no Rust effect"]),
        (long.as_str(), &["1 to 63"]),
        (
            "source.a.effect = \"rust:f\"\nsource.a.lock = \"/a\"",
            &["source.a.lock", "has no batches", "effect_parallel"],
        ),
        (
            "source.a.effect = \"rust:f\"\nsource.a.effect_batch = true",
            &["source.a.effect_batch", "remove it"],
        ),
    ]);
    let of = |more: &str| {
        let config = load(&format!("source.a.effect = \"rust:apply-1_b\"\n{more}"));
        config.sources["a"].effect.clone()
    };
    let rust =
        |group: Option<&str>| Effect::Rust { name: "apply-1_b".to_owned(), group: group.map(str::to_owned) };
    assert_eq!(of(""), rust(Some("rust:apply-1_b")));
    assert_eq!(of("source.a.effect_batch = false"), rust(Some("rust:apply-1_b")));
    assert_eq!(of("source.a.effect_group = \"g\""), rust(Some("g")));
    assert_eq!(of("source.a.effect_parallel = true"), rust(None));
}

#[test]
fn one_group_runs_in_one_way() {
    let two = |group: &str| {
        format!(
            "source.a.effect = \"s.f\"\nsource.a.effect_parallel = true\n\
             source.b = {{ provider = \"stripe\", secrets = \"s\", effect = \"s.{group}\" }}"
        )
    };
    refuses(&[(&two("f"), &["source.b.effect_parallel", "true in source a", "effect group \"s.f\""])]);
    takes(&[&two("g")]);
}

#[test]
fn slow_effects_leave_connections_to_others() {
    let sources = |count: usize| -> String {
        let source = |index| {
            format!(
                "source.s{index} = {{ provider = \"stripe\", secrets = \"s\", effect = \"s.f{index}\" }}\n"
            )
        };
        (0..count).map(source).collect()
    };
    // Source a, without an effect, counts too.
    let three = format!("{}postgres.connections = 9", sources(3));
    let four = format!("{}postgres.connections = 9", sources(4));
    takes(&[three.as_str(), sources(30).as_str()]);
    refuses(&[(&four, &["postgres.connections is 9, and the effects can hold 11"])]);
    assert_eq!(load(&three).postgres.connections, 9);
    assert_eq!(load(&sources(2)).postgres.connections, 8);
    assert_eq!(load(&sources(30)).postgres.connections, 63);
}

#[test]
fn headers_with_secrets_are_never_kept() {
    let traits = Traits { secret_headers: vec!["Stripe-Signature".to_owned()], ..quiet() };
    let cases = [
        "Authorization",
        "cookie",
        "Proxy-Authorization",
        "set-cookie",
        "X-Gitlab-Token",
        "x-telegram-bot-api-secret-token",
        "stripe-signature",
    ];
    for name in cases {
        let case = format!("source.a.headers = [\n  \"content-type\",\n  \"{name}\",\n]");
        let lower = name.to_ascii_lowercase();
        refuses_with(
            &traits,
            &[(&case, &["t.toml:8: error: source.a.headers[1]", &lower, "must not be stored"])],
        );
    }
    refuses(&[
        ("source.a.headers = [\"a b\"]", &["source.a.headers[0]", "cannot be the name"]),
        ("source.a.headers = [1]", &["source.a.headers[0]", "expected a string"]),
    ]);
    let many: Vec<String> = (0..65).map(|index| format!("\"x-{index}\"")).collect();
    refuses(&[(&format!("source.a.headers = [{}]", many.join(",")), &["65 headers", "64"])]);
    warns_with(
        &quiet(),
        &[
            ("source.a.headers = [\"x-api-key\"]", &["x-api-key may carry a secret"]),
            ("source.a.headers = [\"etag\", \"ETag\"]", &["source.a.headers[1]", "stands there twice"]),
        ],
    );
    let config = load("source.a.headers = [\"Content-Type\", \"X-GitHub-Event\", \"content-type\"]");
    assert_eq!(config.sources["a"].headers, ["content-type", "x-github-event"]);
}

#[test]
fn the_rest_of_a_source() {
    refuses(&[
        ("source.a.id_max = 0", &["source.a.id_max", "1 to 2048"]),
        ("source.a.id_max = 2049", &["source.a.id_max", "1 to 2048"]),
        ("source.a.tolerance = \"none\"", &["source.a.tolerance", "\"off\""]),
        ("source.a.tolerance = 300", &["source.a.tolerance", "\"5m\""]),
        ("source.a.scope = \"\"", &["source.a.scope", "1 to 255"]),
        ("source.a.scope = \"a\\nb\"", &["source.a.scope", "control"]),
        ("source.a.ack = { status = 302 }", &["source.a.ack.status", "302", "200 to 299"]),
        ("source.a.ack = { status = 204, body = \"x\" }", &["source.a.ack.body", "204"]),
        ("source.a.ack = { type = \"text\" }", &["source.a.ack.type", "\"text\""]),
        ("source.a.ack = { stats = 200 }", &["source.a.ack.stats", "\"status\""]),
        ("source.a.ack = 200", &["source.a.ack: found a bare number, expected a table"]),
        ("source.a.body_max = \"257MiB\"", &["source.a.body_max", "257MiB"]),
        (
            "source.a.body_max = \"4MiB\"\npostgres.queue_bytes = \"3MiB\"\npostgres.batch_bytes = \"1MiB\"",
            &["source.a.body_max: body_max is 4MiB, and postgres.queue_bytes 3MiB"],
        ),
    ]);
    takes(&["source.a.id_max = 2048", "source.a.ack = { status = 204 }"]);
    let source = &load("source.a.ack = { status = 202, body = \"<ok/>\", type = \"text/xml\" }").sources["a"];
    assert_eq!((source.ack.status.as_u16(), &source.ack.body[..]), (202, &b"<ok/>"[..]));
    assert_eq!(source.ack.content_type.as_ref().unwrap(), "text/xml");
    assert_eq!(load("source.a.tolerance = \"off\"").sources["a"].tolerance, Some(Tolerance::Off));
    let within = Some(Tolerance::Within(Duration::from_secs(60)));
    assert_eq!(load("source.a.tolerance = \"1m\"").sources["a"].tolerance, within);
}

#[test]
fn what_is_known_of_a_providers_times_is_held_against_the_settings() {
    let seconds = Duration::from_secs;
    let facts = |facts: Facts| Traits { facts: Facts { id_signed: true, ..facts }, ..quiet() };
    let patience = facts(Facts { answer_deadline: Some(Duration::from_millis(5_500)), ..Facts::default() });
    refuses_with(
        &patience,
        &[(
            "server.deadline = \"5s\"",
            &[
                "error: source.a.deadline: the deadline is 5s, and stripe waits 5500ms",
                "more than 500ms longer",
                "below 5s",
                "in_flight.wait (1s, the default)",
            ],
        )],
    );
    takes_with(&patience, &["", "source.a.deadline = \"4999ms\"", "server.deadline = \"4999ms\""]);

    let windows = Facts { retry_window: Some(seconds(3 * 86_400)), ..Facts::default() };
    let windows = facts(Facts { resend_window: Some(seconds(30 * 86_400)), ..windows });
    let ledger = |text: &str| format!("retention = {{ ledger = \"{text}\", body = \"1d\" }}");
    let said = said(&ledger("71h"), &windows);
    assert!(
        said.contains("error: source.a.provider: retention.ledger is 71h, and stripe retries for 3d"),
        "{said}"
    );
    warns_with(&windows, &[(&ledger("3d"), &["retention.ledger is 3d", "resent by hand for 30d"])]);
    takes_with(&windows, &[&ledger("30d")]);
}

/// A provider that retries for three days.
fn clocked(tolerance: u64, timestamp_per_attempt: Option<bool>) -> Traits {
    let window = Some(Duration::from_secs(3 * 86_400));
    let facts = Facts { id_signed: true, retry_window: window, timestamp_per_attempt, ..Facts::default() };
    let tolerance = (tolerance > 0).then(|| Duration::from_secs(tolerance));
    Traits { name: "stripe".to_owned(), facts, tolerance, ..Traits::default() }
}

#[test]
fn a_tolerance_that_may_refuse_retries_is_told() {
    warns_with(
        &clocked(300, Some(false)),
        &[("", &["source.a.tolerance: is 5m", "retries for 3d", "keep the first"])],
    );
    warns_with(&clocked(300, None), &[("", &["nobody knows", "\"off\""])]);
    warns_with(&clocked(0, None), &[("source.a.tolerance = \"5m\"", &["is 5m", "nobody knows"])]);
    takes_with(&clocked(300, None), &["source.a.tolerance = \"off\""]);
    takes_with(&clocked(300, Some(true)), &["", "source.a.tolerance = \"1m\""]);
    takes_with(&clocked(0, Some(false)), &[""]);
}

#[test]
fn a_guard_is_for_signed_requests_with_ids_that_are_not_signed() {
    let of = |guard: Guard, quirks: &[Quirk], id_signed: bool| {
        let facts = Facts { id_signed, ..Facts::default() };
        Traits { facts, guard, quirks: quirks.to_vec(), ..quiet() }
    };
    let guard = |word: &str| format!("source.a.guard = \"{word}\"");
    let open = of(Guard::Off, &[Quirk::Guardable], false);
    // What `check` says of a source whose id is not signed, and what it may do about it.
    warns_with(
        &open,
        &[("", &["does not cover the event id", "guard = \"refuse\" refuses it", "hapax.guard"])],
    );
    let loose = Traits { facts: Facts { binds: Binds::Fields, ..Facts::default() }, ..open.clone() };
    warns_with(&loose, &[("", &["another event under its signature", "a few fields only"])]);
    for word in ["report", "refuse"] {
        takes_with(&open, &[&guard(word)]);
        let config = parse(&guard(word), &open).unwrap().config;
        assert_eq!(config.sources["a"].guard.as_str(), word);
    }
    refuses_with(&of(Guard::Off, &[], true), &[(&guard("refuse"), &["source.a.guard", "signs nothing"])]);
    let nameless = of(Guard::Off, &[Quirk::Guardable, Quirk::NeverDedupes], true);
    assert!(said(&guard("report"), &nameless).contains("have no ids"));
    warns_with(
        &of(Guard::Off, &[Quirk::Guardable], true),
        &[(&guard("refuse"), &["has no effect", "id is signed"])],
    );
    // Where the signature covers no part of the event, there is no way around it.
    let always = of(Guard::Refuse, &[Quirk::Guardable], false);
    takes_with(&always, &["", &guard("report")]);
    assert_eq!(parse("", &always).unwrap().config.sources["a"].guard, Guard::Refuse);
    refuses_with(&always, &[(&guard("off"), &["source.a.guard", "covers no part of the event"])]);
    refuses(&[("source.a.guard = \"on\"", &["\"off\", \"report\", \"refuse\""])]);
}

#[test]
fn what_is_known_of_a_providers_requests_is_held_against_the_settings() {
    let facts = |facts: Facts| Traits { facts: Facts { id_signed: true, ..facts }, ..quiet() };
    let large = facts(Facts { body_max: Some(2 << 20), ..Facts::default() });
    warns_with(&large, &[("source.a.body_max = \"1MiB\"", &["body_max is 1MiB", "up to 2MiB", "413"])]);
    takes_with(&large, &["", "source.a.body_max = \"2MiB\""]);
    let config = parse("", &large).unwrap().config;
    assert_eq!(config.sources["a"].body_max, 2 << 20);

    let unsigned = Traits { facts: Facts::default(), ..quiet() };
    warns_with(&unsigned, &[("", &["source.a.provider", "does not cover the event id"])]);
    let nameless = Traits { quirks: vec![Quirk::NeverDedupes], ..unsigned };
    warns_with(&nameless, &[("", &["source.a.provider", "no duplicate is recognised"])]);
    takes(&["source.a.on_mismatch = \"refuse\""]);
    // Nothing is said of retries that would be refused, since nothing is.
    let facts = clocked(0, None).facts;
    let timeless = Traits { quirks: vec![Quirk::Timeless], facts, ..quiet() };
    warns_with(&timeless, &[("source.a.tolerance = \"1m\"", &["source.a.tolerance", "no timestamp"])]);
    let signs_url = Traits { quirks: vec![Quirk::SignsUrl], ..quiet() };
    refuses_with(&signs_url, &[("", &["source.a.public_url: missing here and in [server]"])]);
    takes_with(&signs_url, &["server.public_url = \"https://h\"", "source.a.public_url = \"https://h\""]);
    let underscore = Traits { headers: vec!["x_signature".to_owned(), "x-b".to_owned()], ..quiet() };
    warns_with(&underscore, &[("", &["source.a.provider", "\"x_signature\"", "underscore"])]);
}

#[test]
fn ten_mistakes_are_reported_at_once_in_the_order_of_their_lines() {
    let text = format!(
        r#"[server]
listen = "nowhere"
threads = 0
deadline = 5
[postgres]
url = {{ env = "UNSET" }}
lock_timeout = "9s"
[fast_tier]
url = "redis://h"
prefix = "a b"
onfailure = "refuse"
[source.a]
provider = "stripee"
secrets = ["{CANARY}", ""]
effect = "{CANARY}pull"
headers = ["cookie"]
[source.B]
provider = "stripe"
secrets = []
"#
    );
    let (result, _) = parse_text(&text, &quiet());
    let problems = result.unwrap_err();
    let found: Vec<_> = problems.iter().map(|problem| (problem.line, problem.key.as_str())).collect();
    let expected = [
        (2, "server.listen"),
        (3, "server.threads"),
        (4, "server.deadline"),
        (6, "postgres.url"),
        (7, "postgres.lock_timeout"),
        (7, "postgres.lock_timeout"),
        (10, "fast_tier.prefix"),
        (11, "fast_tier.onfailure"),
        (13, "source.a.provider"),
        (14, "source.a.secrets[1]"),
        (15, "source.a.effect"),
        (16, "source.a.headers[0]"),
        (17, "source.B"),
        (19, "source.B.secrets"),
    ];
    assert_eq!(found, expected, "{}", report(&problems));
}

#[test]
fn a_syntax_error_hides_no_other_mistake() {
    for broken in
        ["listen = ", "listen = \"0.0.0.0:80", "listen = 1.2.3.4:80", "= 3", "listen = \"0.0.0.0:80\" 5"]
    {
        let text = format!(
            "[server]\n{broken}\nthreads = 0\n{}",
            "[postgres]\nurl = \"postgres://h\"\n[fast_tier]\nkind = \"off\"\n"
        );
        let (result, _) = parse_text(&text, &quiet());
        let problems = result.unwrap_err();
        let found: Vec<_> = problems.iter().map(|problem| (problem.line, problem.key.as_str())).collect();
        assert_eq!(found, [(2, "(syntax)"), (3, "server.threads")], "{broken}: {}", report(&problems));
    }
}

#[test]
fn what_a_syntax_error_hides_is_not_called_missing() {
    let (result, _) = parse_text("[server]\nlisten\n[postgres]\nurl = \"postgres://h\"\n", &quiet());
    let said = report(&result.unwrap_err());
    assert!(said.starts_with("t.toml:2: error: (syntax): "), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
}

#[test]
fn secrets_are_in_no_message_and_no_debug_output() {
    let case = format!(
        "postgres.url = \"postgres://u:{CANARY}@h/d\"\nfast_tier.url = \"redis://:{CANARY}@h\"\n\
         source.a.secrets = [\"{CANARY}\", {{ env = \"STRIPE_SECRET\" }}]"
    );
    let config = load(&case);
    assert!(config.postgres.url.0.contains(CANARY));
    assert!(!format!("{config:?}").contains(CANARY));
    for case in [
        format!("postgres.url = \"{CANARY}\"\nfast_tier.url = \"{CANARY}\""),
        format!("source.a.secrets = [[\"{CANARY}\"], {{ {CANARY} = \"{CANARY}\" }}, \"{CANARY} \"]"),
        format!("source.a.secrets = \"{CANARY}\"\nserver.threads = 0"),
        format!("source.a.secrets = \"{CANARY}"),
        format!("source.a.secrets = {CANARY}"),
        format!("source.a.secrets = \"{CANARY}\" {CANARY}"),
    ] {
        let problems = parse(&case, &quiet()).unwrap_err();
        assert!(!format!("{problems:?}").contains(CANARY), "{}", report(&problems));
        assert!(!report(&problems).is_empty());
    }
}

#[test]
fn a_file_that_cannot_be_read_is_one_problem() {
    let folder = std::env::temp_dir().join(format!("hapax-config-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let binary = folder.join("binary.toml");
    std::fs::write(&binary, b"[server]\n\n\xff\xfe").unwrap();
    let large = folder.join("large.toml");
    std::fs::write(&large, "#".repeat((4 << 20) + 1)).unwrap();
    for (path, expected) in [
        (&folder.join("absent.toml"), ":1: error: (file): cannot be read: "),
        (&folder, ":1: error: (file): cannot be read: "),
        (&binary, ":3: error: (file): is not UTF-8 text"),
        (&large, ":1: error: (file): is larger than 4194304 bytes"),
    ] {
        let checked = check(path);
        assert!(!checked.usable);
        assert_eq!(checked.report.lines().count(), 1, "{}", checked.report);
        let expected = format!("{}{expected}", path.display());
        assert!(checked.report.starts_with(&expected), "{}", checked.report);
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn check_says_whether_a_file_can_be_used() {
    let folder = std::env::temp_dir().join(format!("hapax-check-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("hapax.toml");
    std::fs::write(folder.join("pg"), "postgres://h/d\n").unwrap();
    let text = "[postgres]\nurl = { file = \"pg\" }\n[fast_tier]\nkind = \"memory\"\n";
    std::fs::write(&path, text).unwrap();
    let checked = check(&path);
    assert!(checked.usable, "{}", checked.report);
    assert!(checked.report.contains(":1: warning: source: there is no [source.NAME]"), "{}", checked.report);
    assert_eq!(Config::load(&path).unwrap().config.postgres.url.0, "postgres://h/d");
    std::fs::write(&path, format!("{text}ttl = 1\n")).unwrap();
    let checked = check(&path);
    assert!(!checked.usable);
    assert!(checked.report.contains("hapax.toml:5: error: fast_tier.ttl: "), "{}", checked.report);
    std::fs::remove_dir_all(&folder).unwrap();
}

/// The default file with the settings that are commented out in it, but for those of TLS to Redis, which belong to
/// another URL.
fn full_default() -> String {
    let setting = |line: &str| match line.strip_prefix('#').filter(|rest| !rest.starts_with("tls_")) {
        Some(rest) if rest.starts_with(|char: char| char == '[' || char.is_ascii_lowercase()) => {
            rest.to_owned()
        }
        _ => line.to_owned(),
    };
    let text: Vec<String> = DEFAULT_FILE.lines().map(setting).collect();
    text.join("\n").replace("{ file = \"/run/secrets/stripe_old\" }", "\"old\"")
}

#[test]
fn the_default_file_shows_the_defaults() {
    let (result, _) = parse_text(DEFAULT_FILE, &quiet());
    let shown = result.map_err(|problems| report(&problems)).unwrap();
    let required =
        "postgres.url = \"postgres://h\"\nfast_tier = { url = \"redis://h\", prefix = \"hapax:\" }";
    let (result, _) = parse_text(required, &quiet());
    let minimal = result.map_err(|problems| report(&problems)).unwrap();
    assert_eq!(format!("{:#?}", shown.config), format!("{:#?}", minimal.config));
    assert_eq!(report(&shown.warnings).replace(":1:", ""), report(&minimal.warnings).replace(":1:", ""));
}

#[test]
fn the_default_file_shows_the_defaults_of_a_source() {
    let text = full_default().replace("effect_group = ", "#").replace("#\"billing\"", "");
    let (result, _) = parse_text(&text, &quiet());
    let loaded = result.map_err(|problems| report(&problems)).unwrap();
    let shown = &loaded.config.sources["stripe"];
    let minimal = load("");
    let minimal = &minimal.sources["a"];
    let debug = |source: &Source| {
        let parts = (&source.scope, &source.effect);
        let more = (source.on_mismatch, source.id_max, source.body_max, source.deadline);
        let ack = (source.ack.status, &source.ack.body, &source.ack.content_type, source.ack.reject);
        format!("{parts:?} {more:?} {ack:?}")
    };
    assert_eq!(debug(shown), debug(minimal));
    assert_eq!(shown.tolerance, Some(Tolerance::Within(Duration::from_secs(300))));
    assert_eq!(shown.keys.len(), 2);
}

#[test]
fn the_default_file_has_every_key() {
    let text = full_default().replace("effect = \"none\"", "effect = \"s.f\"");
    let (result, file) = parse_text(&text, &quiet());
    result.map_err(|problems| report(&problems)).unwrap();
    let item = |path: &String| path.replace("[0]", "");
    let mut missing: BTreeSet<String> = file.asked().iter().map(item).collect();
    let mut path = String::new();
    for line in text.replace("\n#tls_", "\ntls_").lines().filter(|line| !line.starts_with('#')) {
        if let Some(table) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            path = table.to_owned();
            missing.remove(table.split('.').next().unwrap_or(table));
        } else if let Some((key, value)) = line.split_once(" = ") {
            missing.remove(&format!("{path}.{key}"));
            let inline = value.trim_matches(['{', '}', '[', ']', ' ']).split(", ");
            for (key_inside, _) in inline.filter_map(|part| part.split_once(" = ")) {
                missing.remove(&format!("{path}.{key}.{key_inside}"));
            }
        }
    }
    assert_eq!(missing, BTreeSet::from(["scheme".to_owned()]), "keys that the file does not show");
}

#[test]
fn claims_are_asked_for_where_a_preset_asks() {
    let said = |more: &str| {
        let key = r#"{\"kty\":\"EC\",\"crv\":\"P-256\",\"x\":\"BxMVvsIV2Tgr123M0k8OSGJvk-8TNPii0sbPWPqP8Nw\",\"y\":\"_TiEPUCxglpopRtl6pD82YneeY7BlQnaxwiB04tF3EM\"}"#;
        with_presets(&format!("source.a.secrets = \"{key}\"\n{more}"))
    };
    let ask = "[scheme.t]\nkind = \"jwt\"\nsig = { from = \"header:x\" }\nid = \"claim:/jti\"\n\
               jwt = { algs = [\"ES256\"], ask = { aud = \"/aud\" } }";
    let own = |claims: &str| said(&format!("source.a.provider = \"t\"\n{claims}\n{ask}"));
    assert!(own("").contains("source.a.claims: \"aud\" is missing"), "{}", own(""));
    assert!(!own("source.a.claims = { aud = \"me\", sub = \"x\" }").contains("error"));
    assert!(own("source.a.claims = { aud = 7 }").contains("claims.aud: found a bare number"));
    let told = with_presets("source.a.claims = { aud = \"me\" }\nsource.a.provider = \"github\"");
    assert!(told.contains("source.a.claims: this provider's requests hold no signed token"), "{told}");
}

#[test]
fn the_embedded_file_is_read_like_any_other() {
    let loaded = Config::parse("config/hapax.toml", DEFAULT_FILE, &env).unwrap();
    assert!(loaded.config.sources.is_empty());
    assert!(Config::load(Path::new("/absent")).is_err());
}

/// With the presets as they are embedded.
fn with_presets(case: &str) -> String {
    match Config::parse("t.toml", &file_with(case), &env) {
        Ok(loaded) => report(&loaded.warnings),
        Err(problems) => report(&problems),
    }
}

#[test]
fn presets_are_held_against_the_settings() {
    let provider = |name: &str| format!("source.a.provider = \"{name}\"");
    assert_eq!(with_presets(&provider("stripe")), "");
    for (case, expected) in [
        (provider("stripes"), "did you mean \"stripe\"?"),
        (
            provider("github"),
            "warning: source.a.provider: this provider's signature does not cover the event id",
        ),
        (
            provider("slack") + "\nserver.deadline = \"5s\"",
            "error: source.a.deadline: the deadline is 5s, and slack waits 3s for an answer",
        ),
        (
            provider("linear") + "\nsource.a.deadline = \"5s\"",
            "warning: source.a.deadline: the deadline is 5s, and linear waits 5s",
        ),
        (provider("meta"), "warning: source.a.handshake_secrets: verify_token is missing"),
        (
            provider("airwallex") + "\nretention.ledger = \"2d\"\nretention.body = \"1d\"",
            "error: source.a.provider: retention.ledger is 2d, and airwallex retries for 3d",
        ),
        (
            provider("workos") + "\nretention.ledger = \"2d\"\nretention.body = \"1d\"",
            "warning: source.a.provider: retention.ledger is 2d, and workos retries for 3d",
        ),
        (provider("stripe") + "\nretention.ledger = \"29d\"", "can be resent by hand for 30d"),
        (provider("stripe") + "\nretention.ledger = \"2d\"", "stripe retries for 3d"),
        (
            provider("stripe") + "\nsource.a.headers = [\"Stripe-Signature\"]",
            "stripe-signature carries this provider",
        ),
        (provider("github") + "\nsource.a.tolerance = \"1m\"", "warning: source.a.tolerance: has no effect"),
        (
            provider("standard-webhooks") + "\nsource.a.secrets = \"whsec_\"",
            "source.a.secrets: the literal secret",
        ),
        (provider("standard-webhooks") + "\nsource.a.secrets = \"whsec_%\"", "is not base64"),
    ] {
        let said = with_presets(&case);
        assert!(said.contains(expected), "{case}: no {expected:?} in {said}");
    }
}

#[test]
fn a_handshakes_secret_is_asked_for_by_name() {
    let scheme = "\n[scheme.own]\nkind = \"hmac\"\nsign = \"{body}\"\nsig = { from = \"header:x-sig\" }\n\
                  id = \"json:/id\"\n[[scheme.own.handshake]]\nwhen = { method = \"GET\" }\n\
                  require = { query = \"t\", secret = \"verify_token\" }\nreply = { status = 200 }";
    let own = |more: &str| with_presets(&format!("source.a.provider = \"own\"\n{more}{scheme}"));
    let (right, wrong) = ("{ verify_token = \"canary\" }", "{ verify_tokn = \"canary\" }");
    assert_eq!(own(&format!("source.a.handshake_secrets = {right}")), "");
    for (given, expected) in [
        ("", "warning: source.a.handshake_secrets: verify_token is missing: without it"),
        (
            &*format!("source.a.handshake_secrets = {wrong}"),
            "error: source.a.handshake_secrets.verify_tokn: no handshake",
        ),
        ("source.a.handshake_secrets = { verify_token = \"\" }", "verify_token: the literal secret is empty"),
        ("source.a.handshake_secrets = { verify_token = 7 }", "verify_token: found a bare number"),
        ("source.a.handshake_secrets = \"canary\"", "expected a table"),
    ] {
        let said = own(given);
        assert!(said.contains(expected), "{given}: {said}");
        assert!(!said.contains("canary"), "{said}");
    }
    let said = with_presets(&format!("source.a.handshake_secrets = {right}"));
    assert!(said.contains("no handshake asks for it; this provider's ask for none"), "{said}");
}

#[test]
fn a_handshake_that_is_answered_with_the_url_needs_one() {
    let scheme = "\n[scheme.own]\nkind = \"hmac\"\nsign = \"{body}\"\nsig = { from = \"header:x-sig\" }\n\
                  id = \"json:/id\"\n[[scheme.own.handshake]]\nwhen = { method = \"GET\", query = \"c\" }\n\
                  reply = { body = \"{sha256-hex:query:c + endpoint}\" }";
    let own = |more: &str| with_presets(&format!("source.a.provider = \"own\"\n{more}{scheme}"));
    assert_eq!(own("source.a.public_url = \"https://hooks.example.com\""), "");
    let said = own("");
    assert!(said.contains("warning: source.a.public_url: missing here and in [server]"), "{said}");
}

#[test]
fn only_what_is_handed_over_can_be_left_out() {
    let without =
        |provider: &str| with_presets(&format!("source.a.provider = \"{provider}\"\nsource.a.secrets = []"));
    for provider in ["asana", "notion"] {
        assert!(!without(provider).contains("error"), "{}", without(provider));
    }
    assert!(without("stripe").contains("error: source.a.secrets: no secret"), "{}", without("stripe"));
}

#[test]
fn slack_can_be_answered_in_time() {
    let deadline = |provider: &str| {
        let text = file_with(&format!("source.a.provider = \"{provider}\""));
        Config::parse("t.toml", &text, &env).unwrap().config.sources["a"].deadline
    };
    assert_eq!(deadline("slack"), Duration::from_millis(2_400));
    assert_eq!(deadline("stripe"), Duration::from_secs(5));
    let times = "server.deadline = \"2s\"\nserver.body_timeout = \"1s\"\nin_flight.wait = \"500ms\"\n\
                 postgres.record_timeout = \"1200ms\"\npostgres.statement_timeout = \"800ms\"\n";
    assert_eq!(with_presets(&format!("{times}source.a.provider = \"slack\"")), "");
}

#[test]
fn a_scheme_of_the_file_comes_before_a_preset() {
    let scheme = "\n[scheme.stripe]\nkind = \"hmac\"\nsign = \"{body}\"\nsig = { from = \"header:x_sig\" }\n\
                  id = \"json:/id\"\nid_signed = true\n";
    let said = with_presets(&format!("source.a.headers = [\"X_Sig\"]{scheme}"));
    assert!(said.contains("warning: source.a.provider: the scheme reads header \"x_sig\""), "{said}");
    assert!(said.contains("error: source.a.headers[0]: x_sig carries this provider's signature"), "{said}");
    let said =
        with_presets(&format!("source.a.provider = \"own\"{}", scheme.replace("stripe", "own") + "zz = 1"));
    assert!(said.contains("error: scheme.own.zz: unknown key"), "{said}");
    assert!(!said.contains("neither a preset nor"), "{said}");
}
