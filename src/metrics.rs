//! Every metric, its unit and its closed set of labels. Never a label value that a sender can invent.

mod loops;
mod retention;
mod work;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

pub use self::work::WorkMetrics;
use crate::claim::Tier;
use crate::db::Trouble;
use crate::tasks::LoopState;
pub use retention::Retention;

/// What went wrong with Redis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RedisTrouble {
    /// No answer in time.
    Timeout,
    /// The connection broke or cannot be made.
    Connection,
    /// Out of memory under `noeviction`.
    Full,
    /// A replica, or a slot that moved.
    ReadOnly,
    /// Loading, or without its primary.
    NotReady,
    /// No right, or a wrong password.
    Denied,
    /// An answer that makes no sense.
    Nonsense,
}

impl RedisTrouble {
    /// As it stands in metrics and logs.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Timeout => "timeout",
            Self::Connection => "connection",
            Self::Full => "full",
            Self::ReadOnly => "read_only",
            Self::NotReady => "not_ready",
            Self::Denied => "denied",
            Self::Nonsense => "nonsense",
        }
    }
}

/// A label value out of a closed set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Word(pub &'static str);

impl EncodeLabelValue for Word {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), std::fmt::Error> {
        EncodeLabelValue::encode(&self.0, encoder)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    source: Arc<str>,
    outcome: Word,
    code: Word,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TierLabels {
    tier: Word,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TroubleLabels {
    trouble: Word,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReloadLabels {
    result: Word,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StageLabels {
    stage: Word,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct GuardLabels {
    guard: Word,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FetchLabels {
    purpose: Word,
    result: Word,
}

/// The stages whose time is measured.
#[derive(Debug)]
struct Stages {
    verify: Histogram,
    claim: Histogram,
    record: Histogram,
    total: Histogram,
}

/// The tiers that catch duplicates.
#[derive(Debug)]
struct Tiers {
    memory: Counter,
    flight: Counter,
    redis: Counter,
    postgres: Counter,
}

/// What became of changed settings.
#[derive(Debug)]
struct Reloads {
    ok: Counter,
    refused: Counter,
    failed: Gauge,
    last_success: Gauge<f64, AtomicU64>,
}

/// All metrics of a process.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    duplicates: Tiers,
    stage_seconds: Stages,
    batch_events: Histogram,
    batch_seconds: Histogram,
    batch_failures: Family<TroubleLabels, Counter>,
    redis_failures: Family<TroubleLabels, Counter>,
    key_fetches: Family<FetchLabels, Counter>,
    markers_dropped: Counter,
    breaker_openings: Counter,
    signatures_reused: Family<GuardLabels, Counter>,
    /// Of queues and workers.
    pub work: WorkMetrics,
    redis_in_use: Gauge,
    /// Connections from providers that are open.
    pub connections: Gauge,
    /// Requests that are being worked on.
    pub requests_in_flight: Gauge,
    /// Log lines that were left out because nobody read them.
    pub log_lines_dropped: Counter,
    reloads: Reloads,
    /// What deletes.
    pub retention: Retention,
    heartbeat_age_seconds: Gauge<f64, AtomicU64>,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Tiers {
    fn registered(registry: &mut Registry) -> Self {
        let family = Family::<TierLabels, Counter>::default();
        let of = |tier: Tier| family.get_or_create(&TierLabels { tier: Word(tier.as_str()) }).clone();
        let tiers = Self {
            memory: of(Tier::Memory),
            flight: of(Tier::Flight),
            redis: of(Tier::Redis),
            postgres: of(Tier::Postgres),
        };
        let help = "Deliveries of events that were done, by the tier that caught them";
        registry.register("duplicates", help, family);
        tiers
    }
}

impl Stages {
    fn registered(registry: &mut Registry) -> Self {
        let make: fn() -> Histogram = || histogram(0.000_01);
        let family = Family::<StageLabels, Histogram, _>::new_with_constructor(make);
        let of = |stage| family.get_or_create(&StageLabels { stage: Word(stage) }).clone();
        let stages =
            Self { verify: of("verify"), claim: of("claim"), record: of("record"), total: of("total") };
        registry.register_with_unit("stage", "Time spent in stages of the path", Unit::Seconds, family);
        stages
    }
}

impl Reloads {
    fn registered(registry: &mut Registry) -> Self {
        let family = Family::<ReloadLabels, Counter>::default();
        let of = |result| family.get_or_create(&ReloadLabels { result: Word(result) }).clone();
        let (failed, last_success) = (Gauge::default(), Gauge::default());
        let reloads = Self { ok: of("ok"), refused: of("refused"), failed, last_success };
        registry.register("config_reloads", "Times that changed settings were taken up or refused", family);
        let help = "1 while the settings in use are not those of the file, which was refused";
        registry.register("config_reload_failed", help, reloads.failed.clone());
        registry.register_with_unit(
            "config_last_success_timestamp",
            "When the settings in use were taken up, in seconds since 1970",
            Unit::Seconds,
            reloads.last_success.clone(),
        );
        reloads
    }
}

fn histogram(start: f64) -> Histogram {
    Histogram::new(exponential_buckets(start, 2.0, 16))
}

impl Metrics {
    /// Registers everything.
    #[must_use]
    pub fn new() -> Self {
        let mut registry = Registry::with_prefix("hapax");
        // Looked up once: they are used for every request.
        let duplicates = Tiers::registered(&mut registry);
        let stage_seconds = Stages::registered(&mut registry);
        let reloads = Reloads::registered(&mut registry);
        let work = WorkMetrics::registered(&mut registry);
        let retention = Retention::registered(&mut registry);
        let metrics = Self {
            registry,
            requests: Family::default(),
            duplicates,
            stage_seconds,
            batch_events: histogram(1.0),
            batch_seconds: histogram(0.000_1),
            batch_failures: Family::default(),
            redis_failures: Family::default(),
            key_fetches: Family::default(),
            markers_dropped: Counter::default(),
            breaker_openings: Counter::default(),
            signatures_reused: Family::default(),
            work,
            redis_in_use: Gauge::default(),
            connections: Gauge::default(),
            requests_in_flight: Gauge::default(),
            log_lines_dropped: Counter::default(),
            reloads,
            retention,
            heartbeat_age_seconds: Gauge::default(),
        };
        metrics.registered()
    }

    fn registered(mut self) -> Self {
        let r = &mut self.registry;
        r.register("requests", "Requests answered, by source, outcome and error code", self.requests.clone());
        r.register("batch_events", "Events in one commit", self.batch_events.clone());
        r.register_with_unit(
            "batch",
            "Time from sending a batch to its confirmed commit",
            Unit::Seconds,
            self.batch_seconds.clone(),
        );
        r.register(
            "batch_failures",
            "Batches that did not commit, by what went wrong",
            self.batch_failures.clone(),
        );
        r.register(
            "redis_failures",
            "Redis commands that failed, by what went wrong",
            self.redis_failures.clone(),
        );
        r.register(
            "key_fetches",
            "Fetches of keys that providers publish, and visits that confirm, by what became of them",
            self.key_fetches.clone(),
        );
        r.register("markers_dropped", "Done markers that were not written", self.markers_dropped.clone());
        r.register(
            "breaker_openings",
            "Times that Redis was taken out of the path",
            self.breaker_openings.clone(),
        );
        r.register(
            "signatures_reused",
            "Events whose signed bytes came before under another id, by what their source does then",
            self.signatures_reused.clone(),
        );
        r.register("redis_in_use", "1 while Redis is in the path", self.redis_in_use.clone());
        r.register("connections", "Open connections from providers", self.connections.clone());
        r.register("requests_in_flight", "Requests being worked on", self.requests_in_flight.clone());
        r.register(
            "log_lines_dropped",
            "Log lines left out because their reader is slow",
            self.log_lines_dropped.clone(),
        );
        let age = self.heartbeat_age_seconds.clone();
        r.register_with_unit(
            "heartbeat_age",
            "Age of the last heartbeat; -1 before the first",
            Unit::Seconds,
            age,
        );
        self
    }

    /// One request is answered.
    pub fn answered(&self, source: &Arc<str>, outcome: &'static str, code: &'static str) {
        let labels = RequestLabels { source: Arc::clone(source), outcome: Word(outcome), code: Word(code) };
        self.requests.get_or_create(&labels).inc();
    }

    /// A duplicate was caught.
    pub fn duplicate(&self, tier: Tier) {
        let counter = match tier {
            Tier::Memory => &self.duplicates.memory,
            Tier::Flight => &self.duplicates.flight,
            Tier::Redis => &self.duplicates.redis,
            Tier::Postgres => &self.duplicates.postgres,
        };
        counter.inc();
    }

    /// Signature and id took this long.
    pub fn verified(&self, took: Duration) {
        self.stage_seconds.verify.observe(took.as_secs_f64());
    }

    /// The claim took this long, waiting included.
    pub fn claimed(&self, took: Duration) {
        self.stage_seconds.claim.observe(took.as_secs_f64());
    }

    /// It took this long until the commit was confirmed, or was not to be.
    pub fn recorded(&self, took: Duration) {
        self.stage_seconds.record.observe(took.as_secs_f64());
    }

    /// From the head to the answer.
    pub fn finished(&self, took: Duration) {
        self.stage_seconds.total.observe(took.as_secs_f64());
    }

    /// Signed bytes came again under another id.
    pub fn signature_reused(&self, guard: &'static str) {
        self.signatures_reused.get_or_create(&GuardLabels { guard: Word(guard) }).inc();
    }

    /// A batch is committed.
    pub fn batch_committed(&self, events: usize, took: Duration) {
        #[expect(clippy::cast_precision_loss, reason = "a batch holds at most some thousand events")]
        self.batch_events.observe(events as f64);
        self.batch_seconds.observe(took.as_secs_f64());
    }

    /// A batch did not commit.
    pub fn batch_failed(&self, trouble: Trouble) {
        let word = match trouble {
            Trouble::Lost => "lost",
            Trouble::Retry => "retry",
            Trouble::Locked => "locked",
            Trouble::Cancelled => "cancelled",
            Trouble::Resources => "resources",
            Trouble::Statement => "statement",
        };
        self.batch_failures.get_or_create(&TroubleLabels { trouble: Word(word) }).inc();
    }

    /// A Redis command failed.
    pub fn redis_failed(&self, trouble: RedisTrouble) {
        self.redis_failures.get_or_create(&TroubleLabels { trouble: Word(trouble.as_str()) }).inc();
    }

    /// A provider's URL was fetched, or was not.
    pub fn fetched(&self, purpose: &'static str, result: &'static str) {
        let labels = FetchLabels { purpose: Word(purpose), result: Word(result) };
        self.key_fetches.get_or_create(&labels).inc();
    }

    /// Done markers were not written.
    pub fn marker_dropped(&self, markers: usize) {
        self.markers_dropped.inc_by(markers as u64);
    }

    /// Redis was taken out of the path.
    pub fn breaker_opened(&self) {
        self.breaker_openings.inc();
        self.redis_in_use.set(0);
    }

    /// Redis is in the path.
    pub fn breaker_closed(&self) {
        self.redis_in_use.set(1);
    }

    /// These settings are in use from `now` on: those of the start.
    pub fn settings_in_use(&self, now: jiff::Timestamp) {
        self.reloads.failed.set(0);
        self.reloads.last_success.set(now.as_duration().as_secs_f64());
    }

    /// Changed settings are in use from `now` on.
    pub fn settings_taken_up(&self, now: jiff::Timestamp) {
        self.reloads.ok.inc();
        self.settings_in_use(now);
    }

    /// Changed settings are refused; those of before stay in use.
    pub fn settings_refused(&self) {
        self.reloads.refused.inc();
        self.reloads.failed.set(1);
    }

    /// The text that a scraper reads; `heartbeat_age` and the loops' `states` are as of now.
    ///
    /// # Errors
    /// Those of formatting.
    pub fn render(
        &self,
        heartbeat_age: Option<Duration>,
        states: &[LoopState],
    ) -> Result<String, std::fmt::Error> {
        self.heartbeat_age_seconds.set(heartbeat_age.map_or(-1.0, |age| age.as_secs_f64()));
        let mut text = String::new();
        encode_registry(&mut text, &self.registry)?;
        encode_registry(&mut text, &loops::registry(states))?;
        encode_eof(&mut text)?;
        Ok(text)
    }
}
