//! Values compared with each other and with what is known of the providers.
//!
//! Invariant: a relation is judged only if each of its values is what was meant (its key was not refused before), and
//! each complaint says the values, whether they are defaults, and what would happen.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use super::read::{Draft, connections_needed};
use super::source::{Quirk, Reading, Traits};
use super::target;
use super::{FastTierKind, Guard, Retry, Tolerance};
use crate::provider::Binds;
use crate::settings::{Severity, Table, show_duration, show_size};

/// What an answer needs to travel back to the provider before its deadline.
pub(super) const ANSWER_MARGIN: Duration = Duration::from_millis(500);

/// Checks everything that can be checked before anything runs.
pub(super) fn check(draft: &Draft, targets: &[target::Reading], sources: &[Reading]) {
    listeners(draft);
    server(draft);
    postgres(draft);
    queue(draft);
    fast_tier(draft);
    retention(draft);
    connections(draft, sources);
    parallel_groups(sources);
    for target in targets {
        deliveries(draft, target, sources);
    }
    for source in sources {
        source_times(draft, source);
        waits(&source.table, source.draft.failing.retry);
        source_sizes(draft, source);
        if let Some(traits) = &source.traits {
            provider_patience(draft, source, traits);
            provider_windows(draft, source, traits);
            provider_clock(source, traits);
            provider_form(source, traits);
            fetches(draft, source, traits);
        }
    }
}

/// A duration that takes part in a relation.
#[derive(Clone, Copy)]
struct Part<'a> {
    table: &'a Table,
    key: &'a str,
    value: Duration,
    times: u32,
}

impl<'a> Part<'a> {
    fn new(table: &'a Table, key: &'a str, value: Duration) -> Self {
        Self { table, key, value, times: 1 }
    }

    /// Twice the setting.
    fn twice(self) -> Self {
        Self { times: 2, ..self }
    }

    fn total(&self) -> Duration {
        self.value * self.times
    }

    fn written(&self) -> bool {
        self.table.has(self.key)
    }

    fn show(&self) -> String {
        let default = if self.written() { "" } else { ", the default" };
        let times = if self.times == 1 { String::new() } else { format!("{} × ", self.times) };
        format!("{times}{}.{} ({}{default})", self.table.path(), self.key, show_duration(self.value))
    }
}

/// How the sum of some parts must stand to another.
#[derive(Clone, Copy)]
enum Order {
    Below,
    AtMost,
}

/// `lesser` (summed) must stand in `order` to `greater`, or else `consequence`.
fn require(severity: Severity, lesser: &[Part<'_>], order: Order, greater: Part<'_>, consequence: &str) {
    let total: Duration = lesser.iter().map(Part::total).sum();
    let (holds, wanted) = match order {
        Order::Below => (total < greater.total(), "must be below"),
        Order::AtMost => (total <= greater.total(), "must be at most"),
    };
    let mut parts = lesser.iter().chain([&greater]);
    if holds || parts.any(|part| part.table.failed(part.key)) {
        return;
    }
    let sum = match lesser {
        [Part { times: 1, .. }] => String::new(),
        _ => format!(" = {}", show_duration(total)),
    };
    let terms: Vec<String> = lesser.iter().map(Part::show).collect();
    let message = format!("{}{sum} {wanted} {}: {consequence}", terms.join(" + "), greater.show());
    // A written value is what the user can go to; the one that is to be greater comes first in that.
    let place = [&greater].into_iter().chain(lesser).find(|part| part.written()).unwrap_or(&greater);
    tell(place.table, severity, place.key, message);
}

/// Not through [`Table::error`]: a value in a broken relation is still what was meant, and its other relations are
/// judged too.
fn tell(table: &Table, severity: Severity, key: &str, message: String) {
    table.report_at(&table.place(key), severity, message);
}

fn listeners(draft: &Draft) {
    let (server, admin) = (draft.config.server.listen, draft.config.admin.listen);
    let tables = &draft.tables;
    if tables.server.failed("listen") || tables.admin.failed("listen") || !collide(server, admin) {
        return;
    }
    let message = format!(
        "admin.listen ({admin}) and server.listen ({server}) need the same port of the same address: \
         one of them could not start"
    );
    let table = if tables.admin.has("listen") { &tables.admin } else { &tables.server };
    tell(table, Severity::Error, "listen", message);
}

/// An unspecified address takes the port on all of them; port 0 is any that is free.
fn collide(a: SocketAddr, b: SocketAddr) -> bool {
    let overlap = a.ip() == b.ip() || a.ip().is_unspecified() || b.ip().is_unspecified();
    overlap && a.port() == b.port() && a.port() != 0
}

/// The settings of the times that every request spends.
struct Times<'a> {
    wait: Part<'a>,
    record: Part<'a>,
    body: Part<'a>,
    drain: Part<'a>,
}

impl<'a> Times<'a> {
    fn of(draft: &'a Draft) -> Self {
        let (config, tables) = (&draft.config, &draft.tables);
        Self {
            wait: Part::new(&tables.in_flight, "wait", config.in_flight.wait),
            record: Part::new(&tables.postgres, "record_timeout", config.postgres.record_timeout),
            body: Part::new(&tables.server, "body_timeout", config.server.body_timeout),
            drain: Part::new(&tables.server, "drain", config.server.drain),
        }
    }
}

fn server(draft: &Draft) {
    let deadline = Part::new(&draft.tables.server, "deadline", draft.config.server.deadline);
    deadline_fits(draft, deadline);
}

fn source_times(draft: &Draft, source: &Reading) {
    if source.table.has("deadline") {
        deadline_fits(draft, Part::new(&source.table, "deadline", source.draft.deadline));
    }
}

/// All that a request may spend time on must end before its deadline, and all that outlives it must be longer.
fn deadline_fits(draft: &Draft, deadline: Part<'_>) {
    let Times { wait, record, body, drain } = Times::of(draft);
    let error = Severity::Error;
    let consequence = "a delivery that waits for another one's commit and then has to write by itself would be \
                       answered 503 while its event may still commit";
    require(error, &[wait, record], Order::Below, deadline, consequence);
    let consequence = "a slow body would be answered 503 instead of 408, and nothing left of the deadline";
    require(error, &[body], Order::Below, deadline, consequence);
    let consequence = "a stopping gateway would cut requests that are still within their deadline";
    require(error, &[deadline], Order::AtMost, drain, consequence);
    if let FastTierKind::Redis(redis) = &draft.config.fast_tier.kind {
        let table = &draft.tables.fast_tier;
        let consequence = "the claim would end while its request is still at work, and a second delivery would \
                           work on the same event";
        require(error, &[deadline], Order::Below, Part::new(table, "lease", redis.lease), consequence);
        let consequence =
            "a slow Redis would use up the time of the request, and Postgres would not be asked";
        require(error, &[Part::new(table, "timeout", redis.timeout)], Order::Below, deadline, consequence);
    }
}

fn postgres(draft: &Draft) {
    let (table, postgres) = (&draft.tables.postgres, &draft.config.postgres);
    let part = |key, value| Part::new(table, key, value);
    let lock = part("lock_timeout", postgres.lock_timeout);
    let statement = part("statement_timeout", postgres.statement_timeout);
    let record = part("record_timeout", postgres.record_timeout);
    let commit = part("commit_timeout", postgres.commit_timeout);
    let age_max = part("generation_age_max", postgres.generation_age_max);
    let heartbeat = part("heartbeat", postgres.heartbeat);
    let connect = part("connect_timeout", postgres.connect_timeout);
    let error = Severity::Error;
    let consequence = "a batch that waits for a row lock would be ended by the statement's time-out instead, and \
                       all of its events with it";
    require(error, &[lock], Order::Below, statement, consequence);
    let consequence = "one wait for a row lock would use up the time that an event may wait for its commit";
    require(error, &[lock], Order::Below, record, consequence);
    let consequence =
        "an event would be given up while its statement still runs, with no time for a second try";
    require(error, &[statement], Order::Below, record, consequence);
    let consequence = "connections would be closed within statements that are still allowed to run, which leaves \
                       commits unknown";
    require(error, &[statement], Order::Below, commit, consequence);
    let consequence =
        "one late heartbeat would make all markers count for nothing, and every duplicate ask Postgres";
    require(error, &[heartbeat.twice()], Order::AtMost, age_max, consequence);
    let consequence = "a heartbeat that has to connect anew may outlast the age up to which markers count; \
                       duplicates then ask Postgres for a while";
    require(Severity::Warning, &[connect], Order::AtMost, age_max, consequence);
}

fn queue(draft: &Draft) {
    let (table, postgres) = (&draft.tables.postgres, &draft.config.postgres);
    let sound = |keys: [&str; 2]| keys.iter().all(|key| !table.failed(key));
    if sound(["queue_events", "batch_events"]) && postgres.queue_events < postgres.batch_events {
        let message = format!(
            "postgres.queue_events ({}) is below postgres.batch_events ({}): batches never get full, and senders \
             are answered 503 early",
            postgres.queue_events, postgres.batch_events
        );
        tell(table, Severity::Warning, "queue_events", message);
    }
    if sound(["queue_bytes", "batch_bytes"]) && postgres.queue_bytes < postgres.batch_bytes {
        let message = format!(
            "postgres.queue_bytes ({}) is below postgres.batch_bytes ({}): batches never get full, and senders \
             are answered 503 early",
            show_size(postgres.queue_bytes),
            show_size(postgres.batch_bytes)
        );
        tell(table, Severity::Warning, "queue_bytes", message);
    }
}

fn fast_tier(draft: &Draft) {
    let (table, tier) = (&draft.tables.fast_tier, &draft.config.fast_tier);
    let ttl = Part::new(table, "ttl", tier.ttl);
    let ledger = Part::new(&draft.tables.retention, "ledger", draft.config.retention.ledger);
    if !matches!(tier.kind, FastTierKind::Off) {
        let consequence = "the fast tier would call an event a duplicate that Postgres has forgotten";
        require(Severity::Error, &[ttl], Order::AtMost, ledger, consequence);
    }
    if let FastTierKind::Redis(_) = tier.kind {
        let memory_ttl = Part::new(table, "memory_ttl", tier.memory_ttl);
        let consequence = "this process would remember an event for longer than Redis";
        require(Severity::Error, &[memory_ttl], Order::AtMost, ttl, consequence);
    }
}

fn retention(draft: &Draft) {
    let (table, retention) = (&draft.tables.retention, &draft.config.retention);
    let body = Part::new(table, "body", retention.body);
    let ledger = Part::new(table, "ledger", retention.ledger);
    let consequence = "bodies would be kept whose events are forgotten, and could be found under no id";
    require(Severity::Error, &[body], Order::AtMost, ledger, consequence);
    let jobs = Part::new(table, "jobs", retention.jobs);
    let consequence = "jobs go with their events at the latest";
    require(Severity::Error, &[jobs], Order::AtMost, ledger, consequence);
    let dead = Part::new(table, "dead", retention.dead);
    let consequence = "an event that died would be forgotten, and taken anew, before one that is done";
    require(Severity::Error, &[ledger], Order::AtMost, dead, consequence);
}

fn connections(draft: &Draft, sources: &[Reading]) {
    const KEY: &str = "connections";
    let (table, connections) = (&draft.tables.postgres, draft.config.postgres.connections);
    let needed = connections_needed(sources);
    if connections >= needed
        || table.failed(KEY)
        || sources.iter().any(|source| source.table.failed("effect"))
    {
        return;
    }
    let message = format!(
        "postgres.connections is {connections}, and the effects can hold {needed} (two each, three with \
         effect_parallel or effect = \"none\"): slow effects would hold all connections, and other sources wait"
    );
    tell(table, Severity::Error, KEY, message);
}

/// A group is one queue with one way of running.
fn parallel_groups(sources: &[Reading]) {
    let mut groups = BTreeMap::new();
    for source in sources {
        let (name, draft) = (&source.draft.name, &source.draft);
        let (first, parallel) =
            *groups.entry(draft.effect_group.as_str()).or_insert((name, draft.effect_parallel));
        if parallel != draft.effect_parallel && draft.effect.is_some() {
            let message = format!(
                "effect_parallel is {} here and {parallel} in source {first}, but both are in effect group {:?}: \
                 batches of one group either overlap or do not",
                draft.effect_parallel, draft.effect_group
            );
            tell(&source.table, Severity::Error, "effect_parallel", message);
        }
    }
}

fn deliveries(draft: &Draft, reading: &target::Reading, sources: &[Reading]) {
    let (table, target) = (&reading.table, &reading.target);
    waits(table, target.retry);
    let timeout = Part::new(table, "timeout", target.timeout);
    let lease = Part::new(&draft.tables.work, "lease", draft.config.work.lease);
    let consequence =
        "a slow delivery would still be under way when another worker takes its event and delivers it, too";
    require(Severity::Error, &[timeout], Order::Below, lease, consequence);
    let named = |source: &Reading| source.draft.routes.iter().any(|route| route.target == target.name);
    if !sources.iter().any(named) && !sources.iter().any(|source| source.table.failed("targets")) {
        let message = "no source has it among its targets: nothing is delivered there".to_owned();
        tell(table, Severity::Warning, "", message);
    }
}

fn waits(table: &Table, retry: Retry) {
    let (base, max) = (Part::new(table, "retry_base", retry.base), Part::new(table, "retry_max", retry.max));
    let consequence = "no wait would ever grow";
    require(Severity::Error, &[base], Order::AtMost, max, consequence);
}

fn source_sizes(draft: &Draft, source: &Reading) {
    let (server, postgres) = (&draft.config.server, &draft.config.postgres);
    let body_max = source.draft.body_max;
    if source.table.failed("body_max") || draft.tables.server.failed("body_max") {
        return;
    }
    let budgets = [
        ("server.buffered_max", server.buffered_max, draft.tables.server.failed("buffered_max")),
        ("postgres.queue_bytes", postgres.queue_bytes, draft.tables.postgres.failed("queue_bytes")),
    ];
    for (name, budget, failed) in budgets {
        if body_max > budget && !failed {
            let message = format!(
                "body_max is {}, and {name} {}: a body of that size would be answered 503 for ever",
                show_size(body_max),
                show_size(budget)
            );
            tell(&source.table, Severity::Error, "body_max", message);
        }
    }
}

/// A number that nobody has checked refuses nothing.
fn severity(traits: &Traits, fact: &str) -> Severity {
    let unchecked = traits.facts.unchecked.iter().any(|name| name == fact);
    if unchecked { Severity::Warning } else { Severity::Error }
}

/// An answer that comes after the provider gave up makes it send again.
fn provider_patience(draft: &Draft, source: &Reading, traits: &Traits) {
    let (facts, provider) = (&traits.facts, &traits.name);
    let deadline_failed = source.table.failed("deadline") || draft.tables.server.failed("deadline");
    let deadline = source.draft.deadline;
    if let Some(patience) = facts.answer_deadline
        && deadline + ANSWER_MARGIN >= patience
        && !deadline_failed
    {
        let Times { wait, record, .. } = Times::of(draft);
        let message = format!(
            "the deadline is {}, and {provider} waits {} for an answer, which must be more than {} longer: it would \
             give up and send again while the event commits. Set this source's deadline below {}, and {} + {} \
             below that",
            show_duration(deadline),
            show_duration(patience),
            show_duration(ANSWER_MARGIN),
            show_duration(patience.saturating_sub(ANSWER_MARGIN)),
            wait.show(),
            record.show(),
        );
        tell(&source.table, severity(traits, "answer_deadline"), "deadline", message);
    }
}

/// A key that Postgres has forgotten is a new one.
fn provider_windows(draft: &Draft, source: &Reading, traits: &Traits) {
    if draft.tables.retention.failed("ledger") {
        return;
    }
    let (facts, provider, ledger) = (&traits.facts, &traits.name, draft.config.retention.ledger);
    let shown = show_duration(ledger);
    if let Some(window) = facts.retry_window.filter(|window| ledger < *window) {
        let message = format!(
            "retention.ledger is {shown}, and {provider} retries for {}: its last retries would take effect again",
            show_duration(window)
        );
        tell(&source.table, severity(traits, "retry_window"), "provider", message);
    }
    if let Some(window) = facts.resend_window.filter(|window| ledger < *window) {
        let message = format!(
            "retention.ledger is {shown}, and events of {provider} can be resent by hand for {}: what is resent \
             after {shown} takes effect again",
            show_duration(window)
        );
        tell(&source.table, Severity::Warning, "provider", message);
    }
}

/// A timestamp that is not renewed is as old as the event when a retry comes.
fn provider_clock(source: &Reading, traits: &Traits) {
    let (table, facts) = (&source.table, &traits.facts);
    let tolerance = match source.draft.tolerance {
        Some(Tolerance::Within(within)) => Some(within),
        Some(Tolerance::Off) => None,
        None => traits.tolerance,
    };
    let (Some(tolerance), Some(window)) = (tolerance, facts.retry_window) else { return };
    if traits.has(Quirk::Timeless) {
        return;
    }
    let what = match facts.timestamp_per_attempt {
        Some(true) => return,
        Some(false) => "keep the first attempt's timestamp",
        None => "may keep the first attempt's timestamp (nobody knows)",
    };
    if tolerance < window && !table.failed("tolerance") {
        let message = format!(
            "is {}, and {} retries for {}: retries {what}, and would be refused as stale. Set it to \"off\"; a replay of a \
             recorded event is a duplicate in any case",
            show_duration(tolerance),
            traits.name,
            show_duration(window)
        );
        tell(table, Severity::Warning, "tolerance", message);
    }
}

/// A request that waits for its key has nothing else done meanwhile.
fn fetches(draft: &Draft, source: &Reading, traits: &Traits) {
    if !source.draft.fetches(traits) {
        return;
    }
    let timeout = Part::new(&draft.tables.keys, "fetch_timeout", draft.config.keys.fetch_timeout);
    let table = if source.table.has("deadline") { &source.table } else { &draft.tables.server };
    let deadline = Part::new(table, "deadline", source.draft.deadline);
    let consequence = "a request whose key is slow to fetch would have no time left for its event";
    require(Severity::Error, &[timeout], Order::Below, deadline, consequence);
}

fn provider_form(source: &Reading, traits: &Traits) {
    let (table, draft) = (&source.table, &source.draft);
    if let Some(largest) = traits.facts.body_max.filter(|largest| draft.body_max < *largest)
        && !table.failed("body_max")
    {
        let message = format!(
            "body_max is {}, and this provider sends up to {}: larger events are answered 413 and lost",
            show_size(draft.body_max),
            show_size(largest)
        );
        tell(table, Severity::Warning, "body_max", message);
    }
    if traits.has(Quirk::Timeless) && table.has("tolerance") {
        let message = "has no effect: this provider's requests have no timestamp that could be checked";
        tell(table, Severity::Warning, "tolerance", message.to_owned());
    }
    provider_requests(source, traits);
}

/// What the provider's requests do not allow, whatever the settings.
fn provider_requests(source: &Reading, traits: &Traits) {
    let (table, draft) = (&source.table, &source.draft);
    if traits.has(Quirk::NeverDedupes) {
        let message =
            "requests of this provider have no id: each is a new event, and no duplicate is recognised";
        tell(table, Severity::Warning, "provider", message.to_owned());
    } else if !traits.facts.id_signed && draft.guard == Guard::Off && !table.failed("guard") {
        let hint = if traits.has(Quirk::Guardable) {
            ". guard = \"report\" tells of it, guard = \"refuse\" refuses it, for as long as the rows of hapax.guard are kept"
        } else {
            ""
        };
        let what = match traits.facts.binds {
            Binds::Fields => {
                "can send another event under its signature, which covers a few fields only, and it takes effect"
            }
            Binds::Body | Binds::Nothing => {
                "can send its body again under a new id, and it takes effect again"
            }
        };
        let message = format!(
            "this provider's signature does not cover the event id: who captures one request {what}{hint}"
        );
        tell(table, Severity::Warning, "provider", message);
    }
    if traits.has(Quirk::SignsUrl) && draft.public_url.is_none() && !table.failed("public_url") {
        let message = "missing here and in [server], and this provider signs the URL that it was given: without it no \
                       signature matches";
        tell(table, Severity::Error, "public_url", message.to_owned());
    }
    if traits.has(Quirk::AnswersUrl) && draft.public_url.is_none() && !table.failed("public_url") {
        let message = "missing here and in [server], and this provider's handshake is answered with the URL that it was \
                       given: without it, the handshake is refused";
        tell(table, Severity::Warning, "public_url", message.to_owned());
    }
    let headers: BTreeSet<_> = traits.headers.iter().filter(|header| header.contains('_')).collect();
    for header in headers {
        let message = format!(
            "the scheme reads header {header:?}, and some proxies drop headers with an underscore: check that yours \
             passes it on"
        );
        tell(table, Severity::Warning, "provider", message);
    }
}
