//! What cannot change while the gateway runs: sockets, connections, and limits that are counted over all requests.
//!
//! Invariant: settings in which such a value is another one are refused whole, with all of these values named at once; so
//! a running gateway never has some of the file's values and not others.

use std::fmt::Display;
use std::time::Duration;

use super::read::Draft;
use super::{Admin, Config, FastTier, FastTierKind, Postgres, Redis, Secret, Server, TlsText, Work};
use crate::settings::{Severity, Table, show_duration, show_size};

/// Reports every value that would need a restart. `running` are the settings in use.
pub(super) fn check(draft: &Draft, running: &Config) {
    let (tables, config) = (&draft.tables, &draft.config);
    server(&tables.server, &running.server, &config.server);
    let Admin { listen } = config.admin;
    same(&tables.admin, "listen", running.admin.listen, listen);
    postgres(&tables.postgres, &running.postgres, &config.postgres);
    fast_tier(&tables.fast_tier, &running.fast_tier, &config.fast_tier);
    let Work { connections, lease: _, poll: _ } = config.work;
    same(&tables.work, "connections", running.work.connections, connections);
}

// The patterns name every key, so that a new one does not go unnoticed here.

fn server(table: &Table, running: &Server, now: &Server) {
    #[rustfmt::skip]
    let Server {
        listen, threads, connections_max, requests_max, head_max, buffered_max, head_timeout, idle_timeout,
        public_url: _, body_max: _, body_timeout: _, deadline: _, drain: _, retry_after: _, reload_check: _,
    } = *now;
    same(table, "listen", running.listen, listen);
    same(table, "threads", running.threads, threads);
    same(table, "connections_max", running.connections_max, connections_max);
    same(table, "requests_max", running.requests_max, requests_max);
    same_size(table, "head_max", running.head_max, head_max);
    same_size(table, "buffered_max", running.buffered_max, buffered_max);
    same_time(table, "head_timeout", running.head_timeout, head_timeout);
    same_time(table, "idle_timeout", running.idle_timeout, idle_timeout);
}

fn postgres(table: &Table, running: &Postgres, now: &Postgres) {
    #[rustfmt::skip]
    let Postgres {
        ref url, tls: _, tls_text, transaction_pooler, connections, connect_timeout, queue_bytes, heartbeat, generation_age_max,
        lock_timeout: _, statement_timeout: _, commit_timeout: _, record_timeout: _, synchronous_commit: _,
        batch_events: _, batch_bytes: _, queue_events: _,
    } = *now;
    same_url(table, &running.url, url);
    same_tls(table, running.tls_text, tls_text);
    same(table, "transaction_pooler", running.transaction_pooler, transaction_pooler);
    same_time(table, "connect_timeout", running.connect_timeout, connect_timeout);
    same_size(table, "queue_bytes", running.queue_bytes, queue_bytes);
    same_time(table, "heartbeat", running.heartbeat, heartbeat);
    same_time(table, "generation_age_max", running.generation_age_max, generation_age_max);
    if connections < running.connections && !table.failed("connections") {
        let running = running.connections;
        let message = format!(
            "{connections} is below the {running} that this gateway runs with: only a higher number needs no restart"
        );
        table.report_at(&table.place("connections"), Severity::Error, message);
    }
}

fn fast_tier(table: &Table, running: &FastTier, now: &FastTier) {
    let FastTier { kind, ttl: _, memory_events, memory_ttl: _ } = now;
    same(table, "memory_events", running.memory_events, *memory_events);
    match (&running.kind, kind) {
        (FastTierKind::Redis(running), FastTierKind::Redis(now)) => {
            let Redis {
                url,
                tls: _,
                tls_text,
                prefix,
                lease: _,
                timeout: _,
                breaker_failures: _,
                on_failure: _,
            } = now;
            same_url(table, &running.url, url);
            same_tls(table, running.tls_text, *tls_text);
            same_shown(table, "prefix", &running.prefix, prefix, |prefix| format!("{prefix:?}"));
        }
        _ => same(table, "kind", kind_name(&running.kind), kind_name(kind)),
    }
}

fn kind_name(kind: &FastTierKind) -> &'static str {
    match kind {
        FastTierKind::Redis(_) => "\"redis\"",
        FastTierKind::Memory => "\"memory\"",
        FastTierKind::Off => "\"off\"",
    }
}

fn same<T: Copy + PartialEq + Display>(table: &Table, key: &str, running: T, now: T) {
    same_shown(table, key, running, now, |value| value.to_string());
}

fn same_time(table: &Table, key: &str, running: Duration, now: Duration) {
    same_shown(table, key, running, now, show_duration);
}

fn same_size(table: &Table, key: &str, running: usize, now: usize) {
    same_shown(table, key, running, now, show_size);
}

fn same_shown<T: Copy + PartialEq>(table: &Table, key: &str, running: T, now: T, show: impl Fn(T) -> String) {
    if running != now && !table.failed(key) {
        let (now, running) = (show(now), show(running));
        refuse(table, key, &format!("{now} is not the {running} that this gateway runs with: it"));
    }
}

/// Not shown: it holds a password.
fn same_url(table: &Table, Secret(running): &Secret, Secret(now): &Secret) {
    if running != now && !table.failed("url") {
        refuse(table, "url", "is not the URL that this gateway runs with: it");
    }
}

/// Words and files: connections that are open would go on with the old ones.
fn same_tls(table: &Table, running: TlsText, now: TlsText) {
    if running != now && !table.failed("url") {
        refuse(
            table,
            "url",
            "what it says about TLS, or a file for that, is not what this gateway runs with: it",
        );
    }
}

/// No key counts as failed: the value is what was meant, and its relations are judged too.
fn refuse(table: &Table, key: &str, what: &str) {
    let message = format!("{what} cannot change without a restart");
    table.report_at(&table.place(key), Severity::Error, message);
}

#[cfg(test)]
mod tests {
    use super::super::load::Parsing;
    use super::super::source::Providers;
    use super::super::{Changes, report};
    use super::*;

    const BASE: [(&str, &str); 3] = [
        ("postgres.url", "\"postgres://h/d\""),
        ("fast_tier.url", "\"redis://h\""),
        ("fast_tier.prefix", "\"t:\""),
    ];

    fn file_with(case: &str) -> String {
        let written = |key: &str| case.lines().any(|line| line.split(" = ").next() == Some(key));
        let base = BASE.iter().filter(|(key, _)| !written(key));
        base.map(|(key, value)| format!("{key} = {value}\n")).chain([case.to_owned()]).collect()
    }

    /// What is said of a file while a gateway runs on another one.
    fn said(running: &str, now: &str) -> Result<Config, String> {
        let env = |_: &str| None;
        let first = Config::parse("t.toml", &file_with(running), &env);
        let running = first.map_err(|problems| report(&problems)).unwrap().config;
        let providers = Providers::embedded();
        let parsing = Parsing::new(&env, &providers).beside(&running);
        let loaded = parsing.parse("t.toml", &file_with(now)).0;
        loaded.map(|loaded| loaded.config).map_err(|problems| report(&problems))
    }

    #[test]
    fn each_value_that_needs_a_restart_is_refused_by_name() {
        for (key, now) in [
            ("server.listen", "\"0.0.0.0:1\""),
            ("server.threads", "2"),
            ("server.connections_max", "9"),
            ("server.requests_max", "9"),
            ("server.head_max", "\"32KiB\""),
            ("server.buffered_max", "\"512MiB\""),
            ("server.head_timeout", "\"11s\""),
            ("server.idle_timeout", "\"74s\""),
            ("admin.listen", "\"127.0.0.1:1\""),
            ("postgres.url", "\"postgres://canary@h/d\""),
            ("postgres.url", "\"postgres://h/d?sslmode=disable\""),
            ("postgres.transaction_pooler", "true"),
            ("postgres.connections", "7"),
            ("postgres.connect_timeout", "\"1s\""),
            ("postgres.queue_bytes", "\"1GiB\""),
            ("postgres.heartbeat", "\"1100ms\""),
            ("postgres.generation_age_max", "\"4s\""),
            ("fast_tier.url", "\"redis://:canary@h\""),
            ("fast_tier.prefix", "\"u:\""),
            ("fast_tier.memory_events", "9"),
            ("work.connections", "5"),
        ] {
            let said = said("", &format!("{key} = {now}\n")).unwrap_err();
            let line = said.lines().find(|line| line.contains(&format!("error: {key}: ")));
            assert!(line.is_some_and(|line| line.contains("restart")), "{key}: {said}");
            assert!(!said.contains("canary"), "{said}");
        }
        let kind = said("", "fast_tier.kind = \"memory\"\nfast_tier.url = 1\nfast_tier.prefix = 1\n");
        assert!(kind.unwrap_err().contains("fast_tier.kind: \"memory\" is not the \"redis\" that"));
    }

    #[test]
    fn all_else_may_change() {
        let now = "server.public_url = \"https://h\"\nserver.body_max = \"2MiB\"\nserver.body_timeout = \"2s\"\n\
                   server.deadline = \"6s\"\nserver.drain = \"11s\"\nserver.retry_after = \"6s\"\n\
                   server.reload_check = \"off\"\nlog.level = \"debug\"\nlog.requests = \"failed\"\n\
                   postgres.connections = 9\npostgres.lock_timeout = \"200ms\"\npostgres.statement_timeout = \"1s\"\n\
                   postgres.commit_timeout = \"11s\"\npostgres.record_timeout = \"2s\"\npostgres.batch_events = 9\n\
                   postgres.synchronous_commit = \"remote_apply\"\npostgres.batch_bytes = \"5MiB\"\n\
                   postgres.queue_events = 9000\nfast_tier.lease = \"11s\"\nfast_tier.ttl = \"23h\"\n\
                   fast_tier.timeout = \"51ms\"\nfast_tier.breaker_failures = 6\nfast_tier.on_failure = \"refuse\"\n\
                   fast_tier.memory_ttl = \"4s\"\nin_flight.wait = \"900ms\"\nin_flight.waiters_max = 9\n\
                   retention.ledger = \"36d\"\nretention.body = \"6d\"\n\
                   work.lease = \"31s\"\nwork.poll = \"2s\"\n";
        let before = said("", "").unwrap();
        let changed = Changes::between(&before, &said("", now).unwrap()).tables;
        assert_eq!(changed, ["server", "log", "postgres", "fast_tier", "in_flight", "retention", "work"]);
    }

    #[test]
    fn connections_that_nobody_wrote_grow_with_the_effects_and_never_fall() {
        let source =
            |n| format!("source.s{n} = {{ provider = \"stripe\", secrets = \"x\", effect = \"s.f{n}\" }}\n");
        let sources = (0..6).map(source).collect::<Vec<_>>().concat();
        assert_eq!(said("", &sources).unwrap().postgres.connections, 12);
        assert_eq!(said(&sources, "").unwrap().postgres.connections, 12);
        assert_eq!(said("postgres.connections = 20", &sources).unwrap().postgres.connections, 20);
    }
}
