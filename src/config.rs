//! Settings: what was typed, checked and turned into what may be used.
//!
//! `read`, `source`, `target` and `route` turn the tables of a file into the types here, `secret` fetches what the file
//! only names, `dsn` and `tls` read what is said about TLS, `relations` compares values with each other, `fixed` and `changes` with the
//! settings of a gateway that runs. Only this module reads the file, the environment and files with
//! secrets.
//!
//! Invariant: a [`Config`] exists only if no error was found in the whole file, and relations between values
//! hold. (Whether the stores' URLs lead anywhere shows when connecting.) A secret is in no message and no `Debug` output.

mod changes;
mod dsn;
mod effect;
mod files;
mod fixed;
mod keys;
mod load;
mod read;
mod relations;
mod route;
mod secret;
mod source;
mod target;
#[cfg(test)]
mod tests;
mod tls;

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use rustls::ClientConfig;

pub use self::changes::Changes;
pub use self::files::{Files, Look, Looks};
pub use self::keys::Keys;
pub use self::load::{Checked, Loaded, check, own_schemes, report};
pub use self::route::{Route, TypePattern};
pub use self::target::{Http, Payload, Target, TargetKind};
pub use crate::guard::Guard;
use crate::json::{Found, Pointer, Pointers, Slot};
pub use crate::provider::Ack;
use crate::provider::jwt::KeySet;
use crate::provider::pin::Pinned;
use crate::provider::{Key, PublicKey, Scheme};
use crate::tls::{Authorities, Identity};

/// The complete default, with every key, its unit and its meaning.
pub const DEFAULT_FILE: &str = include_str!("../config/hapax.toml");

/// Everything that the program may be told, checked. Fields mirror `config/hapax.toml`.
#[derive(Debug)]
pub struct Config {
    /// `[server]`
    pub server: Server,
    /// `[admin]`
    pub admin: Admin,
    /// `[log]`
    pub log: Log,
    /// `[postgres]`
    pub postgres: Postgres,
    /// `[fast_tier]`
    pub fast_tier: FastTier,
    /// `[in_flight]`
    pub in_flight: InFlight,
    /// `[keys]`
    pub keys: Keys,
    /// `[retention]`
    pub retention: Retention,
    /// `[work]`
    pub work: Work,
    /// `[target.NAME]`
    pub targets: BTreeMap<String, Arc<Target>>,
    /// `[source.NAME]`
    pub sources: BTreeMap<String, Arc<Source>>,
}

/// `[server]`: the listener for providers, and its limits.
#[derive(Debug, Clone)]
pub struct Server {
    /// `listen = "0.0.0.0:8080"`
    pub listen: SocketAddr,
    /// `public_url = "https://hooks.example.com"`: what providers were given, without the path; for schemes that
    /// sign the URL. No trailing slash.
    pub public_url: Option<String>,
    /// `threads = 1`: 1 runs everything on one thread, which is cheapest per request.
    pub threads: usize,
    /// `connections_max = 10000`: beyond it, accepting waits.
    pub connections_max: usize,
    /// `requests_max = 4096`: requests being worked on; beyond it, 503.
    pub requests_max: usize,
    /// `head_max = "64KiB"`: request line and headers.
    pub head_max: usize,
    /// `buffered_max = "256MiB"`: body bytes being read or worked on at once; beyond it, 503.
    pub buffered_max: usize,
    /// `body_max = "1MiB"`: default for sources whose preset names none.
    pub body_max: usize,
    /// `head_timeout = "10s"`: from the first byte of a head to its last.
    pub head_timeout: Duration,
    /// `body_timeout = "3s"`: from the head to the last byte of the body.
    pub body_timeout: Duration,
    /// `idle_timeout = "75s"`: between requests on one connection.
    pub idle_timeout: Duration,
    /// `deadline = "5s"`: from the head to the answer.
    pub deadline: Duration,
    /// `drain = "10s"`: how long a stopping gateway goes on serving, and then finishing.
    pub drain: Duration,
    /// `retry_after = "5s"`: what a 503 or 409 asks for.
    pub retry_after: Duration,
    /// `reload_check = "5s"`: how often the files are looked at; none with `"off"`.
    pub reload_check: Option<Duration>,
}

/// `[admin]`: the listener for operators.
#[derive(Debug, Clone)]
pub struct Admin {
    /// `listen = "127.0.0.1:9090"`
    pub listen: SocketAddr,
}

/// `[log]`
#[derive(Debug, Clone)]
pub struct Log {
    /// `level = "info"`: error, warn, info or debug.
    pub level: String,
    /// `requests = "all"`: one line for each request, or `"failed"`: only for those not answered 2xx.
    pub requests: RequestLog,
}

/// Which requests get a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestLog {
    /// Every one.
    All,
    /// Those not answered 2xx.
    Failed,
}

/// Text that is never printed.
#[derive(Clone)]
pub struct Secret(pub String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// `[postgres]`
#[derive(Debug, Clone)]
pub struct Postgres {
    /// `url = { env = "DATABASE_URL" }`, without what it says about TLS.
    pub url: Secret,
    /// `sslmode`, `sslrootcert`, `sslcert` and `sslkey` of the URL, and `tls_unverified = false`.
    pub tls: PostgresTls,
    /// The same as it was typed.
    pub tls_text: TlsText,
    /// `transaction_pooler = false`: a proxy such as pgbouncer gives each transaction another session.
    pub transaction_pooler: bool,
    /// `connections = 8`: for recording, over all sources. Unless written, it grows with the effects.
    pub connections: usize,
    /// `connect_timeout = "2s"`
    pub connect_timeout: Duration,
    /// `lock_timeout = "250ms"`: how long a batch waits for a ledger row that somebody else is writing.
    pub lock_timeout: Duration,
    /// `statement_timeout = "2s"`
    pub statement_timeout: Duration,
    /// `commit_timeout = "10s"`: after it a silent connection is closed. A commit is never cancelled.
    pub commit_timeout: Duration,
    /// `record_timeout = "3s"`: how long an event may wait for its commit.
    pub record_timeout: Duration,
    /// `synchronous_commit = "on"`
    pub synchronous_commit: SynchronousCommit,
    /// `batch_events = 128`: most events in one commit.
    pub batch_events: usize,
    /// `batch_bytes = "4MiB"`: most body bytes in one commit.
    pub batch_bytes: usize,
    /// `queue_events = 10000`: most events waiting for a commit, per effect; beyond it, 503.
    pub queue_events: usize,
    /// `queue_bytes = "256MiB"`: most body bytes waiting for a commit, over all effects; beyond it, 503.
    pub queue_bytes: usize,
    /// `heartbeat = "1s"`: how often the generation is read.
    pub heartbeat: Duration,
    /// `generation_age_max = "3s"`: markers count only while the last heartbeat is younger.
    pub generation_age_max: Duration,
}

/// A hash of what was said about TLS and of the files that it names: equal if nothing changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TlsText([u8; 32]);

/// Whether connections to Postgres are encrypted.
#[derive(Clone)]
pub enum PostgresTls {
    /// They are not.
    Never,
    /// If the server offers it; nothing is checked.
    IfOffered(ClientConfig),
    /// Otherwise there is no connection.
    Always(ClientConfig),
}

impl fmt::Debug for PostgresTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Never => "Never",
            Self::IfOffered(_) => "IfOffered(…)",
            Self::Always(_) => "Always(…)",
        })
    }
}

/// `synchronous_commit` of hapax' transactions; `off` is not offered, since a 2xx is a promise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SynchronousCommit {
    /// `"on"`
    On,
    /// `"remote_apply"`
    RemoteApply,
    /// `"remote_write"`
    RemoteWrite,
    /// `"local"`
    Local,
}

impl SynchronousCommit {
    /// The value as Postgres spells it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::On => "on",
            Self::RemoteApply => "remote_apply",
            Self::RemoteWrite => "remote_write",
            Self::Local => "local",
        }
    }
}

/// `[fast_tier]`
#[derive(Debug, Clone)]
pub struct FastTier {
    /// `kind = "redis" | "memory" | "off"`; `redis` unless written; with its connection.
    pub kind: FastTierKind,
    /// `ttl = "24h"`: how long a done event is remembered.
    pub ttl: Duration,
    /// `memory_events = 100000`: events remembered in this process (in front of Redis, or alone with `memory`).
    pub memory_events: usize,
    /// `memory_ttl = "5s"`: how long, in front of Redis. With `kind = "memory"` it is `ttl`.
    pub memory_ttl: Duration,
}

/// What the fast tier is made of.
#[derive(Debug, Clone)]
pub enum FastTierKind {
    /// Redis.
    Redis(Redis),
    /// This process' memory.
    Memory,
    /// Nothing: Postgres decides alone.
    Off,
}

/// The Redis part of `[fast_tier]`.
#[derive(Debug, Clone)]
pub struct Redis {
    /// `url = { env = "REDIS_URL" }`
    pub url: Secret,
    /// With a URL that begins with `rediss://`.
    pub tls: Option<RedisTls>,
    /// The same as it was typed.
    pub tls_text: TlsText,
    /// `prefix = "hapax:"`: names this deployment; no two deployments may share one.
    pub prefix: String,
    /// `lease = "10s"`
    pub lease: Duration,
    /// `timeout = "50ms"`: for one command.
    pub timeout: Duration,
    /// `breaker_failures = 5`: failures in a row that take the tier out.
    pub breaker_failures: u32,
    /// `on_failure = "postgres" | "refuse"`
    pub on_failure: OnTierFailure,
}

/// TLS to Redis. The server's certificate is checked in full, always.
#[derive(Debug, Clone)]
pub struct RedisTls {
    /// `tls_ca = "file"`, or those of the system.
    pub authorities: Authorities,
    /// `tls_cert = "file"`, `tls_key = "file"`
    pub identity: Option<Identity>,
}

/// What to do while the fast tier is away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnTierFailure {
    /// Go on with Postgres alone.
    Postgres,
    /// Answer 503.
    Refuse,
}

/// `[in_flight]`
#[derive(Debug, Clone)]
pub struct InFlight {
    /// `wait = "1s"`: how long a delivery waits for the same event's other delivery.
    pub wait: Duration,
    /// `waiters_max = 1000`: deliveries of one event that may wait in one process; beyond it, 503.
    pub waiters_max: usize,
}

/// `[retention]`
#[derive(Debug, Clone)]
pub struct Retention {
    /// `ledger = "35d"`: how long an id is remembered in Postgres.
    pub ledger: Duration,
    /// `body = "7d"`: how long a body is kept.
    pub body: Duration,
    /// `dead = "90d"`: how long an event is kept that died.
    pub dead: Duration,
    /// `jobs = "1d"`: how long a job is kept that ended well.
    pub jobs: Duration,
    /// `every = "10m"`: from pass to pass; none by themselves with `"off"`.
    pub every: Option<Duration>,
    /// `duty = 0.1`: the share of the time that batches may take.
    pub duty: f64,
    /// `batch_rows = 2000`: most rows in one transaction.
    pub batch_rows: usize,
    /// `share_max = 0.5`: the share of a table that may go at once.
    pub share_max: f64,
}

/// `[work]`: what is done with events after they are recorded.
#[derive(Debug, Clone)]
pub struct Work {
    /// `connections = 4`: to Postgres, for workers.
    pub connections: usize,
    /// `lease = "30s"`: how long a worker that fell silent keeps an event.
    pub lease: Duration,
    /// `poll = "1s"`: how often queues are looked at without being told.
    pub poll: Duration,
}

/// How long is waited before the next try: anything from nothing to `base`, doubled with each try, up to `max`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retry {
    /// `retry_base`
    pub base: Duration,
    /// `retry_max`
    pub max: Duration,
}

/// `[source.NAME]`: one endpoint, `POST /in/NAME`.
#[derive(Debug, Clone)]
pub struct Source {
    /// Its name in the path, the ledger and the metrics.
    pub name: Arc<str>,
    /// `provider = "stripe"`: the scheme.
    pub scheme: Arc<Scheme>,
    /// `secrets = [...]`, decoded; any may match.
    pub keys: Vec<Key>,
    /// `certificates = "file.pem"`: keys of a provider that points to certificates; if there are any, none is fetched.
    pub certificates: Vec<PublicKey>,
    /// `jwks = "https://…"`: where the keys of tokens are published; the scheme's, or the source's own. `None` where they are
    /// not fetched.
    pub(crate) jwks: Option<Pinned>,
    /// `senders = ["arn:…"]`: by whose order the provider may have signed, where it signs for anybody. `None`: by anybody's.
    pub senders: Option<Vec<String>>,
    /// `handshake_secrets = { verify_token = … }`: what a handshake's sender must know, by the scheme's names.
    pub handshake_secrets: BTreeMap<String, Key>,
    /// `claims = { aud = "…" }`: what claims of the token must say; those that the scheme asks for, and any others.
    pub claims: BTreeMap<String, String>,
    /// What providers were given as the base of the URL; the server's unless the source has its own.
    pub public_url: Option<String>,
    /// `scope = "-"`: the literal part of the key.
    pub scope: Arc<str>,
    /// `lock = "/json/pointer"`: effects of one batch run in the order of that value, so that batches of all gateways lock
    /// their rows in one order.
    pub lock: Option<LockRule>,
    /// `effect = "schema.function" | "rust:NAME" | "pull" | "none"`
    pub effect: Effect,
    /// `on_error = "retry" | "park"`: when the effect fails.
    pub on_error: OnError,
    /// `attempts_max = 20`, or 5 with `effect = "pull"`: tries at a parked or pulled event before it is dead.
    pub attempts_max: u32,
    /// `retry_base = "1s"`, `retry_max = "1h"`: of parked events.
    pub retry: Retry,
    /// `targets = ["orders"]`: where its events are delivered, each target once.
    pub targets: Vec<Route>,
    /// `guard = "off" | "report" | "refuse"`: signed bytes that come again under another id.
    pub guard: Guard,
    /// `batch_items_max = 1000`: most events in one request of a provider that sends batches.
    pub batch_items_max: usize,
    /// `on_mismatch = "report" | "refuse" | "accept"`
    pub on_mismatch: OnMismatch,
    /// `tolerance = "5m"`: overrides the scheme's; `"off"` checks no clock.
    pub tolerance: Option<Tolerance>,
    /// `id_max = 512`: longest id in bytes.
    pub id_max: usize,
    /// `body_max`: the source's own, else the preset's, else the server's.
    pub body_max: usize,
    /// `deadline`: the source's own, else the server's.
    pub deadline: Duration,
    /// `headers = ["..."]`: kept with the event, lower case; never one that carries a secret.
    pub headers: Vec<http::HeaderName>,
    /// `ack = { status = 200, body = "", type = "text/plain", reject = 401, … }`; what it leaves out is the scheme's.
    pub ack: Ack,
}

impl Source {
    /// A source with nothing but a name, a scheme and keys; everything else is what the settings default to.
    #[must_use]
    pub fn new(name: &str, scheme: Arc<Scheme>, keys: Vec<Key>) -> Self {
        let (ack, guard) = (scheme.ack.clone(), scheme.guard);
        let on_error = OnError::of(scheme.facts.retries);
        let jwks = scheme.key_set().and_then(KeySet::url).filter(|_| keys.is_empty()).cloned();
        Self {
            guard,
            name: name.into(),
            scheme,
            keys,
            certificates: Vec::new(),
            jwks,
            senders: None,
            handshake_secrets: BTreeMap::new(),
            claims: BTreeMap::new(),
            public_url: None,
            scope: "-".into(),
            effect: Effect::None,
            on_error,
            attempts_max: 20,
            retry: Retry { base: Duration::from_secs(1), max: Duration::from_secs(3600) },
            targets: Vec::new(),
            lock: None,
            on_mismatch: OnMismatch::Report,
            batch_items_max: 1_000,
            tolerance: None,
            id_max: 512,
            body_max: 1 << 20,
            deadline: Duration::from_secs(5),
            headers: Vec::new(),
            ack,
        }
    }

    /// What is left to do of an event of this type, once it is recorded.
    pub fn jobs(&self, event_type: Option<&str>) -> impl Iterator<Item = JobRule> {
        let pulled = (self.effect == Effect::Pull)
            .then(|| JobRule { queue: format!("pull:{}", self.name), attempts_max: self.attempts_max });
        let routes = self.targets.iter().filter(move |route| route.takes(event_type));
        let delivered = routes.map(|route| JobRule {
            queue: format!("target:{}", route.target),
            attempts_max: route.attempts_max,
        });
        pulled.into_iter().chain(delivered)
    }

    /// How often the effect of an event may be tried in all, if the event is parked when its effect fails.
    #[must_use]
    pub fn parks(&self) -> Option<u32> {
        let has_effect = matches!(self.effect, Effect::Function { .. } | Effect::Rust { .. });
        (has_effect && self.on_error == OnError::Park).then_some(self.attempts_max)
    }

    /// Where the keys of its tokens are fetched, if it has none of its own.
    pub(crate) fn key_set(&self) -> Option<&Pinned> {
        self.jwks.as_ref().filter(|_| self.keys.is_empty())
    }

    /// Whether keys of its requests are fetched.
    #[must_use]
    pub fn fetches_keys(&self) -> bool {
        self.key_set().is_some() || (self.scheme.has_certificates() && self.certificates.is_empty())
    }
}

/// A job that an event leaves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobRule {
    /// `target:NAME`, or `pull:SOURCE`.
    pub queue: String,
    /// Tries before it is dead.
    pub attempts_max: u32,
}

/// A value of the body (in a batch: of the item) that stands for the rows which an effect locks.
#[derive(Debug, Clone)]
pub struct LockRule {
    pointers: Arc<Pointers>,
    slot: Slot,
}

impl LockRule {
    /// Reads a JSON pointer.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut pointers = Pointers::default();
        let slot = Pointer::parse(text).and_then(|pointer| pointers.add(&pointer))?;
        Ok(Self { pointers: Arc::new(pointers), slot })
    }

    /// The value's source text, if it is there and clear.
    #[must_use]
    pub fn value(&self, body: &[u8]) -> Option<String> {
        match self.pointers.scan(body).get(self.slot)? {
            Found::Value(raw) => Some(raw.to_owned()),
            Found::Absent | Found::Twice | Found::Broken => None,
        }
    }
}

/// The business effect of a source. Sources with equal effects share their batches.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Effect {
    /// Only the ledger.
    None,
    /// Whoever asks the database for it.
    Pull,
    /// A function that is called with a `hapax.event`.
    Function {
        /// `schema.function`
        name: String,
        /// `effect_group`, by default the function's name: batches of one group run one after the other, over all
        /// gateways, since they may lock the same rows. None with `effect_parallel` or `lock`.
        group: Option<String>,
        /// `effect_batch = true`: several events share a transaction.
        batched: bool,
    },
    /// An effect that this program has registered; each event has a transaction of its own.
    Rust {
        /// What stands after `rust:`.
        name: String,
        /// As of a function.
        group: Option<String>,
    },
}

/// What to do when an effect fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnError {
    /// Record nothing and answer 503, so that the provider sends the event again.
    Retry,
    /// Record the event as failed and answer 2xx; workers try the effect again.
    Park,
}

impl OnError {
    /// The default for a provider that retries, or does not.
    const fn of(retries: bool) -> Self {
        if retries { Self::Retry } else { Self::Park }
    }
}

/// What to do when an id comes again with another body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnMismatch {
    /// It is another event: the body is part of the key.
    Accept,
    /// Answer as a duplicate; count and log it.
    Report,
    /// 422.
    Refuse,
}

/// How far a signed timestamp may be from the clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tolerance {
    /// No check.
    Off,
    /// Both ways, inclusive.
    Within(Duration),
}
