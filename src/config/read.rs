//! The tables that exist once, each with its defaults and ranges.
//!
//! Invariant: a value that was refused leaves its default in the draft and its key marked as failed in the table, so
//! that reading and comparing go on without a second complaint about the same mistake.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::time::Duration;

use super::keys::Keys;
use super::secret::Secrets;
use super::source::{Defaults, Reading};
use super::{
    Admin, Config, Effect, FastTier, FastTierKind, InFlight, Log, OnTierFailure, Postgres, Redis, RequestLog,
    Retention, Secret, Server, SynchronousCommit, Work,
};
use crate::settings::Table;

/// Of anything on the path of a request. Postgres takes its time-outs as 32-bit milliseconds (24 days); nobody
/// waits an hour for a webhook's answer.
pub(super) const TIMEOUT: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_secs(3600);

/// Of what is kept: a second to ten years.
const HORIZON: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(3650 * 86_400);

/// From one pass of retention to the next.
const PASSES: RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(7 * 86_400);

/// Of one body. Postgres takes no value over 1 GiB, and a body is held in memory while it is worked on.
pub(super) const BODY: RangeInclusive<usize> = 1..=256 << 20;

/// What an effect can hold at once: a connection for each batch under way (two where they may overlap), and one for an
/// event that is recorded alone.
fn connections_of(effect: &Effect) -> usize {
    match effect {
        Effect::Function { group: Some(_), .. } | Effect::Rust { group: Some(_), .. } => 2,
        Effect::Function { group: None, .. }
        | Effect::Rust { group: None, .. }
        | Effect::None
        | Effect::Pull => 3,
    }
}

/// Keys of `[fast_tier]` that mean something with Redis only.
const REDIS_KEYS: [&str; 10] = [
    "url",
    "tls_ca",
    "tls_cert",
    "tls_key",
    "prefix",
    "lease",
    "timeout",
    "breaker_failures",
    "on_failure",
    "memory_ttl",
];

/// Keys of `[fast_tier]` that mean something with any tier at all.
const MEMORY_KEYS: [&str; 2] = ["ttl", "memory_events"];

/// The tables that were read, kept for what is compared later.
pub(super) struct Tables {
    pub(super) server: Table,
    pub(super) admin: Table,
    pub(super) log: Table,
    pub(super) postgres: Table,
    pub(super) fast_tier: Table,
    pub(super) in_flight: Table,
    pub(super) keys: Table,
    pub(super) retention: Table,
    pub(super) work: Table,
}

/// Settings before they are compared, without sources.
pub(super) struct Draft {
    pub(super) config: Config,
    pub(super) tables: Tables,
}

impl Draft {
    pub(super) fn read(root: &mut Table, secrets: &Secrets<'_>) -> Self {
        let mut tables = Tables {
            server: root.table_or_empty("server"),
            admin: root.table_or_empty("admin"),
            log: root.table_or_empty("log"),
            postgres: root.table_or_empty("postgres"),
            fast_tier: root.table_or_empty("fast_tier"),
            in_flight: root.table_or_empty("in_flight"),
            keys: root.table_or_empty("keys"),
            retention: root.table_or_empty("retention"),
            work: root.table_or_empty("work"),
        };
        let config = Config {
            server: server(&mut tables.server),
            admin: Admin { listen: address(&mut tables.admin, ([127, 0, 0, 1], 9090).into()) },
            log: log(&mut tables.log),
            postgres: postgres(&mut tables.postgres, secrets),
            fast_tier: fast_tier(&mut tables.fast_tier, secrets),
            in_flight: in_flight(&mut tables.in_flight),
            keys: Keys::read(&mut tables.keys, secrets),
            retention: retention(&mut tables.retention),
            work: work(&mut tables.work),
            targets: BTreeMap::new(),
            sources: BTreeMap::new(),
        };
        Self { config, tables }
    }

    /// What sources take from the server's settings.
    pub(super) fn source_defaults(&self) -> Defaults<'_> {
        Defaults { server: &self.config.server, deadline_written: self.tables.server.has("deadline") }
    }

    /// Unless the number of connections was written, it grows with the effects; in a running gateway it never falls.
    pub(super) fn fit_connections(&mut self, sources: &[Reading], running: Option<&Config>) {
        if !self.tables.postgres.has("connections") {
            let needed = connections_needed(sources);
            let held = running.map_or(0, |running| running.postgres.connections);
            self.config.postgres.connections = self.config.postgres.connections.max(needed).max(held);
        }
    }

    /// Reports the keys that nobody asked for.
    pub(super) fn finish(self) -> Config {
        let Tables { server, admin, log, postgres, fast_tier, in_flight, keys, retention, work } =
            self.tables;
        for table in [server, admin, log, postgres, fast_tier, in_flight, keys, retention, work] {
            table.finish();
        }
        self.config
    }
}

/// What all effects can hold at once; sources without an effect are one.
pub(super) fn connections_needed(sources: &[Reading]) -> usize {
    let effects: BTreeSet<Effect> = sources.iter().map(|source| source.draft.effect()).collect();
    effects.iter().map(connections_of).sum()
}

fn server(table: &mut Table) -> Server {
    Server {
        listen: address(table, ([0, 0, 0, 0], 8080).into()),
        public_url: public_url(table),
        threads: count(table, "threads", 1..=64, 1),
        connections_max: count(table, "connections_max", 1..=1_000_000, 10_000),
        requests_max: count(table, "requests_max", 1..=1_000_000, 4_096),
        // The HTTP library takes no smaller buffer than 8 KiB.
        head_max: size(table, "head_max", 8 << 10..=1 << 20, 64 << 10),
        buffered_max: size(table, "buffered_max", 1..=64 << 30, 256 << 20),
        body_max: size(table, "body_max", BODY, 1 << 20),
        head_timeout: timeout(table, "head_timeout", 10_000),
        body_timeout: timeout(table, "body_timeout", 3_000),
        idle_timeout: timeout(table, "idle_timeout", 75_000),
        deadline: timeout(table, "deadline", 5_000),
        drain: timeout(table, "drain", 10_000),
        retry_after: retry_after(table),
        reload_check: table
            .duration_or("reload_check", "off", TIMEOUT)
            .unwrap_or(Some(Duration::from_secs(5))),
    }
}

/// The header that carries it takes whole seconds.
fn retry_after(table: &mut Table) -> Duration {
    const KEY: &str = "retry_after";
    let default = Duration::from_secs(5);
    let Some(value) = table.duration_within(KEY, Duration::from_millis(1)..=*TIMEOUT.end()) else {
        return default;
    };
    if value.subsec_nanos() != 0 {
        table
            .error(KEY, "the answer can only ask for whole seconds: give \"1s\" or more, without a fraction");
    }
    value
}

fn log(table: &mut Table) -> Log {
    const LEVELS: [(&str, &str); 4] =
        [("error", "error"), ("warn", "warn"), ("info", "info"), ("debug", "debug")];
    const REQUESTS: [(&str, RequestLog); 2] = [("all", RequestLog::All), ("failed", RequestLog::Failed)];
    Log {
        level: table.choice("level", &LEVELS).unwrap_or("info").to_owned(),
        requests: table.choice("requests", &REQUESTS).unwrap_or(RequestLog::All),
    }
}

fn postgres(table: &mut Table, secrets: &Secrets<'_>) -> Postgres {
    let url = url(table, secrets, "DATABASE_URL", is_postgres_url, "\"postgres://user@host/database\"");
    let (url, tls, tls_text) = super::tls::postgres(table, secrets, &url);
    Postgres {
        url,
        tls,
        tls_text,
        transaction_pooler: table.flag("transaction_pooler").unwrap_or(false),
        connections: count(table, "connections", 1..=1_000, 8),
        connect_timeout: timeout(table, "connect_timeout", 2_000),
        lock_timeout: timeout(table, "lock_timeout", 250),
        statement_timeout: timeout(table, "statement_timeout", 2_000),
        commit_timeout: timeout(table, "commit_timeout", 10_000),
        record_timeout: timeout(table, "record_timeout", 3_000),
        synchronous_commit: synchronous_commit(table),
        batch_events: count(table, "batch_events", 1..=10_000, 128),
        // One message to Postgres holds 1 GiB; bodies travel with the rest of the batch.
        batch_bytes: size(table, "batch_bytes", 1..=512 << 20, 4 << 20),
        queue_events: count(table, "queue_events", 1..=10_000_000, 10_000),
        queue_bytes: size(table, "queue_bytes", 1..=64 << 30, 256 << 20),
        heartbeat: timeout(table, "heartbeat", 1_000),
        generation_age_max: timeout(table, "generation_age_max", 3_000),
    }
}

/// `off` is not offered, and the message says why.
fn synchronous_commit(table: &mut Table) -> SynchronousCommit {
    const KEY: &str = "synchronous_commit";
    let choices = [
        ("on", Some(SynchronousCommit::On)),
        ("remote_apply", Some(SynchronousCommit::RemoteApply)),
        ("remote_write", Some(SynchronousCommit::RemoteWrite)),
        ("local", Some(SynchronousCommit::Local)),
        ("off", None),
    ];
    let choice = table.choice(KEY, &choices);
    if choice == Some(None) {
        let message = "\"off\" answers 2xx before the commit is on disk, so that a crash loses what was \
                       acknowledged: give \"on\", \"remote_apply\", \"remote_write\" or \"local\"";
        table.error(KEY, message);
    }
    choice.flatten().unwrap_or(SynchronousCommit::On)
}

fn fast_tier(table: &mut Table, secrets: &Secrets<'_>) -> FastTier {
    #[derive(Clone, Copy, PartialEq)]
    enum Kind {
        Redis,
        Memory,
        Off,
    }
    let kinds = [("redis", Kind::Redis), ("memory", Kind::Memory), ("off", Kind::Off)];
    let kind = table.choice("kind", &kinds);
    let unknown_kind = table.failed("kind");
    let kind = kind.unwrap_or(Kind::Redis);
    let ttl = table.duration_within("ttl", HORIZON).unwrap_or(Duration::from_secs(86_400));
    let memory_events = count(table, "memory_events", 1..=10_000_000, 100_000);
    // Every key is asked for, whatever the kind, so that a misspelt one is found.
    let (redis, memory_ttl) = redis(table, secrets, kind == Kind::Redis && !unknown_kind);
    if kind != Kind::Redis {
        let name = if kind == Kind::Memory { "memory" } else { "off" };
        refuse_redis_keys(table, name);
    }
    if kind == Kind::Off {
        for key in MEMORY_KEYS.into_iter().filter(|key| table.has(key)) {
            table.warning(key, "has no effect with kind = \"off\"");
        }
    }
    let (kind, memory_ttl) = match kind {
        Kind::Redis => (FastTierKind::Redis(redis), memory_ttl),
        Kind::Memory => (FastTierKind::Memory, ttl),
        Kind::Off => (FastTierKind::Off, memory_ttl),
    };
    FastTier { kind, ttl, memory_events, memory_ttl }
}

fn refuse_redis_keys(table: &Table, kind: &str) {
    for key in REDIS_KEYS.into_iter().filter(|key| table.has(key)) {
        let hint = match key {
            "memory_ttl" => "; with kind = \"memory\", ttl says how long an event is remembered",
            _ => "",
        };
        let message = format!("belongs to kind = \"redis\", but kind is {kind:?}: remove it{hint}");
        table.error(key, message);
    }
}

/// The keys that go with Redis. Where it is not `used`, what is missing is no mistake.
fn redis(table: &mut Table, secrets: &Secrets<'_>, used: bool) -> (Redis, Duration) {
    const ON_FAILURE: [(&str, OnTierFailure); 2] =
        [("postgres", OnTierFailure::Postgres), ("refuse", OnTierFailure::Refuse)];
    let url = if used {
        url(
            table,
            secrets,
            "REDIS_URL",
            is_redis_url,
            "\"redis://host:6379/0\", or kind = \"memory\" or \"off\"",
        )
    } else {
        // Only looked at, so that a misspelt key is told what it might have been.
        let _unused = table.secret("url");
        Secret(String::new())
    };
    let (tls, tls_text) = super::tls::redis(table, secrets, &url);
    let redis = Redis {
        url,
        tls,
        tls_text,
        prefix: prefix(table, used),
        lease: timeout(table, "lease", 10_000),
        timeout: timeout(table, "timeout", 50),
        breaker_failures: u32::try_from(count(table, "breaker_failures", 1..=1_000, 5)).unwrap_or(5),
        on_failure: table.choice("on_failure", &ON_FAILURE).unwrap_or(OnTierFailure::Postgres),
    };
    // A marker in Redis can be deleted by another process; what is remembered here cannot, so it is kept briefly.
    let memory_ttl = table.duration_within("memory_ttl", Duration::from_millis(1)..=Duration::from_secs(5));
    (redis, memory_ttl.unwrap_or(Duration::from_secs(5)))
}

/// Two deployments that share a Redis and a prefix would take each other's events for their own.
fn prefix(table: &mut Table, used: bool) -> String {
    const KEY: &str = "prefix";
    const WANTED: &str = "give a name of this deployment, for instance \"hapax:prod:\"";
    let Some(prefix) = table.text(KEY) else {
        if used {
            table.missing(KEY, format!("missing, and without it deployments would share keys: {WANTED}"));
        }
        return String::new();
    };
    let unfit = |char: char| char.is_whitespace() || char.is_control();
    if prefix.is_empty() || prefix.len() > 64 {
        table.error(KEY, format!("has {} bytes, and 1 to 64 are allowed: {WANTED}", prefix.len()));
    } else if prefix.contains(unfit) {
        table.error(KEY, format!("{prefix:?} has whitespace or control characters: {WANTED}"));
    } else if prefix.contains(['{', '}']) {
        let why = "has { or }, which would send all keys to one slot of a cluster";
        table.error(KEY, format!("{prefix:?} {why}: {WANTED}"));
    } else if prefix.ends_with(char::is_alphanumeric) {
        let why = "does not end in a separator, so that it may be the start of another deployment's prefix";
        table.warning(KEY, format!("{prefix:?} {why}: better {:?}", format!("{prefix}:")));
    }
    prefix
}

fn in_flight(table: &mut Table) -> InFlight {
    InFlight {
        wait: timeout(table, "wait", 1_000),
        waiters_max: count(table, "waiters_max", 1..=1_000_000, 1_000),
    }
}

fn retention(table: &mut Table) -> Retention {
    let days = |days: u64| Duration::from_secs(days * 86_400);
    let ledger = table.duration_within("ledger", HORIZON).unwrap_or(days(35));
    Retention {
        ledger,
        body: table.duration_within("body", HORIZON).unwrap_or(days(7)),
        // What nobody wrote gives way to the ledger's horizon.
        dead: table.duration_within("dead", HORIZON).unwrap_or(days(90).max(ledger)),
        jobs: table.duration_within("jobs", HORIZON).unwrap_or(days(1).min(ledger)),
        every: table.duration_or("every", "off", PASSES).unwrap_or(Some(Duration::from_secs(600))),
        duty: table.fraction("duty", 0.001..=1.0).unwrap_or(0.1),
        batch_rows: count(table, "batch_rows", 100..=100_000, 2_000),
        share_max: table.fraction("share_max", 0.0..=1.0).unwrap_or(0.5),
    }
}

fn work(table: &mut Table) -> Work {
    let (second, minute) = (Duration::from_secs(1), Duration::from_secs(60));
    Work {
        connections: count(table, "connections", 1..=100, 4),
        lease: table.duration_within("lease", second..=60 * minute).unwrap_or(30 * second),
        poll: table.duration_within("poll", Duration::from_millis(100)..=minute).unwrap_or(second),
    }
}

/// A whole number, or its default.
pub(super) fn count(
    table: &mut Table,
    key: &'static str,
    range: RangeInclusive<u64>,
    default: usize,
) -> usize {
    table.count(key, range).and_then(|number| usize::try_from(number).ok()).unwrap_or(default)
}

fn size(table: &mut Table, key: &'static str, range: RangeInclusive<usize>, default: usize) -> usize {
    table.size_within(key, range).unwrap_or(default)
}

fn timeout(table: &mut Table, key: &'static str, default_millis: u64) -> Duration {
    table.duration_within(key, TIMEOUT).unwrap_or(Duration::from_millis(default_millis))
}

fn address(table: &mut Table, default: SocketAddr) -> SocketAddr {
    const KEY: &str = "listen";
    let Some(text) = table.text(KEY) else { return default };
    text.parse().unwrap_or_else(|_| {
        let wanted = "give an IP address and a port: \"0.0.0.0:8080\", \"127.0.0.1:8080\" or \"[::]:8080\"";
        table.error(KEY, format!("{text:?} cannot be listened on: {wanted}"));
        default
    })
}

/// A secret that is a URL of a store. Its parts are checked by whoever connects; here only its kind, since the
/// commonest mistake is the wrong variable.
fn url(
    table: &mut Table,
    secrets: &Secrets<'_>,
    variable: &str,
    fits: fn(&str) -> bool,
    example: &str,
) -> Secret {
    const KEY: &str = "url";
    let Some(source) = table.secret(KEY) else {
        table.missing(
            KEY,
            format!("missing: give {{ env = {variable:?} }}, {{ file = \"path\" }} or {example}"),
        );
        return Secret(String::new());
    };
    let Some(text) = secrets.fetch(table, KEY, &table.place(KEY), &source) else {
        return Secret(String::new());
    };
    if !fits(&text) {
        let origin = super::secret::origin(&source);
        table.error(KEY, format!("{origin} does not hold a URL like {example}"));
    }
    Secret(text)
}

/// Postgres also takes `host=… dbname=…`.
fn is_postgres_url(text: &str) -> bool {
    text.starts_with("postgres://") || text.starts_with("postgresql://") || text.contains("host=")
}

fn is_redis_url(text: &str) -> bool {
    ["redis://", "rediss://", "redis+unix://", "unix://"].iter().any(|scheme| text.starts_with(scheme))
}

/// The base of the URL that providers were given. Its value is not quoted: it might hold a password.
pub(super) fn public_url(table: &mut Table) -> Option<String> {
    const KEY: &str = "public_url";
    let text = table.text(KEY)?;
    let Some(problem) = public_url_problem(&text) else { return Some(text) };
    table
        .error(KEY, format!("{problem}: give what providers were given, like \"https://hooks.example.com\""));
    None
}

fn public_url_problem(text: &str) -> Option<&'static str> {
    if text.contains(['?', '#']) {
        return Some("has a query or fragment");
    }
    if text.ends_with('/') {
        return Some("ends in a slash");
    }
    let Ok(url) = text.parse::<http::Uri>() else { return Some("is not a URL") };
    if !matches!(url.scheme_str(), Some("http" | "https")) {
        return Some("does not start with http:// or https://");
    }
    let Some(authority) = url.authority() else { return Some("has no host") };
    if authority.host().is_empty() {
        return Some("has no host");
    }
    if authority.as_str().contains('@') {
        return Some("has a user name or password, which no provider signs");
    }
    let after_host = authority.as_str().strip_prefix(authority.host()).unwrap_or_default();
    if !after_host.is_empty() && authority.port_u16().is_none_or(|port| port == 0) {
        return Some("has a port that is none");
    }
    None
}
