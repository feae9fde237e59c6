//! Redis: one multiplexed connection that all deliveries share, a breaker that takes it out of the path when it
//! fails, and a task that brings it back.
//!
//! Nothing on the path of a request connects, retries or waits for longer than one command's time-out.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use deadpool_redis::{Connection, Manager, Pool, Runtime};
use redis::aio::MultiplexedConnection;
use redis::{
    AsyncConnectionConfig, Client, ClientTlsConfig, ConnectionInfo, ErrorKind, IntoConnectionInfo as _,
    RedisError, TlsCertificates, Value,
};
use tokio::sync::{Notify, mpsc};
use tokio::time::timeout;
use tracing::{info, warn};

use super::Lifetime;
use crate::identify::EventKey;
use crate::metrics::{Metrics, RedisTrouble};
use crate::tasks::{Beat, Tasks};
use crate::{config, tls};

const TOO_LATE: &str = "no answer within fast_tier.timeout";
/// Ends a done marker.
const FORGET: &str = include_str!("forget.lua");
/// Markers in one write.
const SETTLE_BATCH: usize = 256;
/// Markers that may wait to be written; beyond it they are left out, which costs a question to Postgres each.
const SETTLE_QUEUE: usize = 65_536;
/// For connecting and for the probe.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Pauses between attempts to bring Redis back.
const PAUSE: std::ops::RangeInclusive<Duration> = Duration::from_millis(50)..=Duration::from_secs(5);

/// The answer to a claim.
#[derive(Debug)]
pub(super) enum Found {
    /// Nothing stood there; our lease does now.
    Set,
    /// This stood there and still does.
    Value(Vec<u8>),
    /// Nothing that says anything: a key of another Redis type, or a lease that has just run out.
    Nothing,
}

/// Redis is out of the path, or did not answer as it should.
#[derive(Debug)]
pub(super) struct Away;

/// What the server can do, found out when connecting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Abilities {
    /// `SET … NX GET` (Redis 7).
    nx_get: bool,
    /// `EVAL`.
    scripts: bool,
}

impl Abilities {
    /// What the server cannot do and what that costs; empty if nothing is missing.
    fn lacks(self) -> &'static str {
        match (self.nx_get, self.scripts) {
            (true, true) => "",
            (false, true) => "; it refuses SET with NX and GET (older than 7.0): two commands for each claim",
            (true, false) => "; it refuses EVAL: a failed claim is not released but runs out after the lease",
            (false, false) => {
                "; it refuses SET with NX and GET, and EVAL: two commands for each claim, none is released"
            }
        }
    }
}

/// A connection that is in use. The pooled object is kept, since giving it back would close nothing.
struct Live {
    pooled: Connection,
    abilities: Abilities,
    /// Tells it from its successors: a command that was sent on it may fail long after it was replaced.
    number: u64,
}

/// What one command uses.
struct Used {
    connection: MultiplexedConnection,
    abilities: Abilities,
    number: u64,
}

/// What of the settings may change while the connection stays.
#[derive(Debug, Clone, Copy)]
struct Tuning {
    lease_ms: u64,
    ttl_ms: u64,
    timeout: Duration,
    breaker_failures: u32,
}

impl Tuning {
    fn of(settings: &config::Redis, ttl: Duration) -> Self {
        let config::Redis { lease, timeout, breaker_failures, .. } = *settings;
        Self { lease_ms: millis(lease), ttl_ms: millis(ttl), timeout, breaker_failures }
    }
}

/// A done marker on its way, or the end of one, and how it is to be written.
struct Settled {
    key: String,
    /// And for how many milliseconds; none: what stands there is to go.
    marker: Option<(String, u64)>,
    tuning: Tuning,
}

/// Redis as some settings use it; those of before and after a reload share one link.
pub(super) struct RedisTier {
    link: Arc<Link>,
    tuning: Tuning,
}

/// The connection and what keeps it.
struct Link {
    pool: Pool,
    prefix: String,
    live: Mutex<Option<Live>>,
    /// Made so far.
    connections: AtomicU64,
    failures: AtomicU32,
    broken: Notify,
    markers: mpsc::Sender<Settled>,
    release: redis::Script,
    metrics: Arc<Metrics>,
}

impl RedisTier {
    pub(super) fn start(
        settings: &config::Redis,
        ttl: Duration,
        metrics: Arc<Metrics>,
        tasks: &Tasks,
    ) -> anyhow::Result<Self> {
        let pool = pool(settings)?;
        let (markers, waiting) = mpsc::channel(SETTLE_QUEUE);
        let link = Arc::new(Link {
            pool,
            prefix: settings.prefix.clone(),
            live: Mutex::new(None),
            connections: AtomicU64::new(0),
            failures: AtomicU32::new(0),
            broken: Notify::new(),
            markers,
            release: redis::Script::new(include_str!("release.lua")),
            metrics,
        });
        let kept = Arc::clone(&link);
        tasks.spawn_loop("redis_connection", move |beat| Arc::clone(&kept).keep_connected(beat));
        let (kept, waiting) = (Arc::clone(&link), Arc::new(tokio::sync::Mutex::new(waiting)));
        tasks.spawn_loop("redis_markers", move |beat| {
            Arc::clone(&kept).write_markers(Arc::clone(&waiting), beat)
        });
        Ok(Self { link, tuning: Tuning::of(settings, ttl) })
    }

    /// The same connection under other settings.
    pub(super) fn tuned(&self, settings: &config::Redis, ttl: Duration) -> Self {
        Self { link: Arc::clone(&self.link), tuning: Tuning::of(settings, ttl) }
    }

    fn key(&self, key: &EventKey) -> String {
        redis_key(&self.link.prefix, key)
    }

    fn count_failure(&self, number: u64, trouble: RedisTrouble, cause: &str) {
        self.link.count_failure(number, trouble, cause, self.tuning.breaker_failures);
    }

    /// One command, `SET key lease NX GET PX`.
    pub(super) async fn claim(&self, key: &EventKey, lease: &str) -> Result<Found, Away> {
        let Used { mut connection, abilities, number } = self.link.live().ok_or(Away)?;
        let key = self.key(key);
        let asked = timeout(self.tuning.timeout, async {
            if abilities.nx_get {
                let mut command = redis::cmd("SET");
                command.arg(&key).arg(lease).arg("NX").arg("GET").arg("PX").arg(self.tuning.lease_ms);
                command.query_async::<Value>(&mut connection).await.map(|old| (Value::Nil, old))
            } else {
                let mut pair = redis::pipe();
                pair.cmd("SET").arg(&key).arg(lease).arg("NX").arg("PX").arg(self.tuning.lease_ms);
                pair.cmd("GET").arg(&key);
                pair.query_async::<(Value, Value)>(&mut connection).await
            }
        });
        let found = match asked.await {
            Ok(Ok((Value::Okay, _))) if !abilities.nx_get => Ok(Found::Set),
            Ok(Ok((_, Value::BulkString(value)))) => Ok(Found::Value(value)),
            Ok(Ok((_, Value::Nil))) if abilities.nx_get => Ok(Found::Set),
            // The other's lease ran out between our two commands: nobody holds it.
            Ok(Ok((_, Value::Nil))) => Ok(Found::Nothing),
            Ok(Ok(_)) => Err((RedisTrouble::Nonsense, "an answer of an unexpected type")),
            Ok(Err(error)) if error.code() == Some("WRONGTYPE") => Ok(Found::Nothing),
            Ok(Err(error)) => Err((classify(&error), "an error reply or a broken connection")),
            Err(_elapsed) => Err((RedisTrouble::Timeout, TOO_LATE)),
        };
        match found {
            Ok(found) => {
                self.link.failures.store(0, Ordering::Relaxed);
                Ok(found)
            }
            Err((trouble, cause)) => {
                self.count_failure(number, trouble, cause);
                Err(Away)
            }
        }
    }

    /// What stands at each of the keys; one command.
    pub(super) async fn read_all(&self, keys: &[EventKey]) -> Result<Vec<Option<Vec<u8>>>, Away> {
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let Used { mut connection, number, .. } = self.link.live().ok_or(Away)?;
        let mut command = redis::cmd("MGET");
        command.arg(keys.iter().map(|key| self.key(key)).collect::<Vec<_>>());
        // Not a string: MGET gives nothing for a key of another type.
        match timeout(self.tuning.timeout, command.query_async::<Vec<Option<Vec<u8>>>>(&mut connection)).await
        {
            Ok(Ok(values)) => {
                self.link.failures.store(0, Ordering::Relaxed);
                Ok(values)
            }
            Ok(Err(error)) => {
                self.count_failure(number, classify(&error), error.category());
                Err(Away)
            }
            Err(_elapsed) => {
                self.count_failure(number, RedisTrouble::Timeout, TOO_LATE);
                Err(Away)
            }
        }
    }

    /// Queues a done marker.
    pub(super) fn settle(&self, key: &EventKey, marker: String, lifetime: Lifetime) {
        let ttl_ms = millis(lifetime.within(Duration::from_millis(self.tuning.ttl_ms)));
        self.queue(key, Some((marker, ttl_ms)));
    }

    /// Queues the end of whatever marker there is, behind those that are on their way.
    pub(super) fn forget(&self, key: &EventKey) {
        self.queue(key, None);
    }

    fn queue(&self, key: &EventKey, marker: Option<(String, u64)>) {
        let settled = Settled { key: self.key(key), marker, tuning: self.tuning };
        if self.link.markers.try_send(settled).is_err() {
            self.link.metrics.marker_dropped(1);
        }
    }

    /// Deletes our own lease and nobody else's.
    pub(super) async fn release(&self, key: &EventKey, lease: &str) {
        let Some(Used { mut connection, abilities: Abilities { scripts: true, .. }, number }) =
            self.link.live()
        else {
            return;
        };
        let mut call = self.link.release.prepare_invoke();
        call.key(self.key(key)).arg(lease);
        match timeout(self.tuning.timeout, call.invoke_async::<i64>(&mut connection)).await {
            Ok(Ok(_deleted)) => {}
            Ok(Err(error)) => self.count_failure(number, classify(&error), error.category()),
            Err(_elapsed) => self.count_failure(number, RedisTrouble::Timeout, TOO_LATE),
        }
    }
}

impl Link {
    fn live(&self) -> Option<Used> {
        let live = self.live.lock().unwrap_or_else(PoisonError::into_inner);
        live.as_ref().map(|live| Used {
            connection: live.pooled.as_ref().clone(),
            abilities: live.abilities,
            number: live.number,
        })
    }

    /// Enough failures in a row, or one that this connection cannot recover from, open the breaker.
    fn count_failure(&self, number: u64, trouble: RedisTrouble, cause: &str, breaker_failures: u32) {
        self.metrics.redis_failed(trouble);
        let mut live = self.live.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(failed) = live.take_if(|live| live.number == number) else { return };
        let failures = self.failures.fetch_add(1, Ordering::Relaxed) + 1;
        let hopeless = matches!(trouble, RedisTrouble::Connection | RedisTrouble::ReadOnly);
        if !hopeless && failures < breaker_failures {
            *live = Some(failed);
            return;
        }
        drop(live);
        // The connection may be sound and the server not, or the other way round; a new one tells.
        drop(Connection::take(failed.pooled));
        warn!(trouble = trouble.as_str(), cause, failures, "redis is taken out: Postgres decides alone");
        self.metrics.breaker_opened();
        self.broken.notify_one();
    }

    /// Connects, and connects anew whenever the breaker has opened. A connection that is in use stays in use if this is
    /// dropped.
    async fn keep_connected(self: Arc<Self>, beat: Beat) {
        loop {
            beat.alive();
            // Looked at each time: the life of before may have ended between being told and connecting.
            if self.live().is_none() {
                self.reconnect(&beat).await;
            }
            beat.waiting(self.broken.notified()).await;
        }
    }

    async fn reconnect(&self, beat: &Beat) {
        let number = self.connections.fetch_add(1, Ordering::Relaxed);
        let mut pause = *PAUSE.start();
        let mut attempts: u32 = 0;
        loop {
            beat.alive();
            match connect(&self.pool, &self.prefix).await {
                Ok((pooled, abilities)) => {
                    info!(attempts, "redis is in use{}", abilities.lacks());
                    self.failures.store(0, Ordering::Relaxed);
                    let live = Live { pooled, abilities, number };
                    *self.live.lock().unwrap_or_else(PoisonError::into_inner) = Some(live);
                    self.metrics.breaker_closed();
                    return;
                }
                Err(cause) => {
                    attempts += 1;
                    if attempts.is_power_of_two() {
                        warn!(cause, attempts, "redis cannot be used yet");
                    }
                }
            }
            beat.waiting(tokio::time::sleep(pause.mul_f64(0.5 + rand::random::<f64>() / 2.0))).await;
            pause = (pause * 2).min(*PAUSE.end());
        }
    }

    /// Writes done markers, as many together as are waiting. Dropping it loses those that it is writing, which costs a
    /// question to Postgres each.
    async fn write_markers(
        self: Arc<Self>,
        waiting: Arc<tokio::sync::Mutex<mpsc::Receiver<Settled>>>,
        beat: Beat,
    ) {
        let mut waiting = waiting.lock().await;
        let mut batch = Vec::with_capacity(SETTLE_BATCH);
        while beat.waiting(waiting.recv_many(&mut batch, SETTLE_BATCH)).await > 0 {
            let Some(Used { mut connection, abilities, number }) = self.live() else {
                self.metrics.marker_dropped(batch.len());
                batch.clear();
                continue;
            };
            // Those of a batch are of the same settings, unless a reload has just been; then any of them will do.
            let Some(Tuning { timeout: limit, breaker_failures, .. }) = batch.last().map(|last| last.tuning)
            else {
                continue;
            };
            let mut pipe = redis::pipe();
            for Settled { key, marker, .. } in &batch {
                match marker {
                    Some((marker, ttl_ms)) => pipe.cmd("SET").arg(key).arg(marker).arg("PX").arg(*ttl_ms),
                    // Where it is refused, as a release is, what stands there runs out.
                    None if !abilities.scripts => continue,
                    None => pipe.cmd("EVAL").arg(FORGET).arg(1).arg(key),
                };
                pipe.ignore();
            }
            match timeout(limit, pipe.query_async::<()>(&mut connection)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    self.metrics.marker_dropped(batch.len());
                    self.count_failure(number, classify(&error), error.category(), breaker_failures);
                }
                Err(_elapsed) => {
                    self.metrics.marker_dropped(batch.len());
                    self.count_failure(number, RedisTrouble::Timeout, TOO_LATE, breaker_failures);
                }
            }
            batch.clear();
        }
    }
}

/// The key of an event in Redis.
pub(crate) fn redis_key(prefix: &str, key: &EventKey) -> String {
    let mut text = String::with_capacity(prefix.len() + 22);
    text.push_str(prefix);
    URL_SAFE_NO_PAD.encode_string(key.0, &mut text);
    text
}

/// A connection outside of the path.
pub(super) async fn connect_once(settings: &config::Redis) -> Result<Connection, String> {
    let pool = pool(settings).map_err(|error| error.to_string())?;
    connect(&pool, &settings.prefix).await.map(|(connection, _)| connection)
}

/// What stands there, and for how many milliseconds.
pub(super) async fn read(settings: &config::Redis, key: &EventKey) -> Result<Option<(String, i64)>, String> {
    let pool = pool(settings).map_err(|error| error.to_string())?;
    let (mut pooled, _) = connect(&pool, &settings.prefix).await?;
    let key = redis_key(&settings.prefix, key);
    let mut both = redis::pipe();
    both.cmd("GET").arg(&key).cmd("PTTL").arg(&key);
    let read = timeout(CONNECT_TIMEOUT, both.query_async::<(Option<String>, i64)>(&mut pooled)).await;
    let read = read.map_err(|_elapsed| format!("no answer within {CONNECT_TIMEOUT:?}"))?;
    let (value, ttl_ms) = read.map_err(|error| error.to_string())?;
    Ok(value.map(|value| (value, ttl_ms)))
}

/// Reads the URL and connects to nothing.
pub(super) fn check_url(settings: &config::Redis) -> Result<(), String> {
    pool(settings).map(drop).map_err(|error| error.to_string())
}

fn pool(settings: &config::Redis) -> anyhow::Result<Pool> {
    let connecting = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(CONNECT_TIMEOUT))
        // Each command has a time-out of its own, which can become longer than the one of the day of connecting.
        .set_response_timeout(None);
    let manager = server(settings).and_then(|server| Manager::new_with_config(server, connecting));
    let manager = manager.map_err(|error| {
        anyhow::anyhow!("fast_tier.url: {}: give redis://user:password@host:port/database", error.category())
    })?;
    let pool = Pool::builder(manager)
        .max_size(2)
        .runtime(Runtime::Tokio1)
        .create_timeout(Some(CONNECT_TIMEOUT))
        .recycle_timeout(Some(CONNECT_TIMEOUT));
    Ok(pool.build()?)
}

/// What the URL says, with the certificates that it cannot say.
fn server(settings: &config::Redis) -> Result<ConnectionInfo, RedisError> {
    let url = settings.url.0.as_str();
    let Some(config::RedisTls { authorities, identity }) = &settings.tls else {
        return url.into_connection_info();
    };
    tls::use_ring();
    let client_tls = identity.as_ref().map(|identity| ClientTlsConfig {
        client_cert: identity.chain.clone().into_bytes(),
        client_key: identity.key.clone().into_bytes(),
    });
    let certificates = TlsCertificates { client_tls, root_cert: Some(authorities.to_pem()) };
    Ok(Client::build_with_tls(url, certificates)?.get_connection_info().clone())
}

/// What an error says; of TLS also what to do.
fn describe(error: &RedisError) -> String {
    if error.is_timeout() {
        // A server that does not speak TLS may take a handshake for the start of a long command.
        return format!(
            "no answer within {CONNECT_TIMEOUT:?} (with rediss://, give the port that speaks TLS)"
        );
    }
    let advice = tls::explain(error, "fast_tier.tls_ca", "fast_tier.tls_cert and fast_tier.tls_key");
    advice.unwrap_or_else(|| error.to_string())
}

/// Connects and tries every command that is needed, writes included: a full Redis answers PING.
async fn connect(pool: &Pool, prefix: &str) -> Result<(Connection, Abilities), String> {
    let mut pooled = pool.get().await.map_err(|error| match error {
        deadpool_redis::PoolError::Backend(error) => describe(&error),
        other => other.to_string(),
    })?;
    let probed = timeout(CONNECT_TIMEOUT, probe(&mut pooled, prefix)).await;
    let cause = match probed {
        Ok(Ok(abilities)) => return Ok((pooled, abilities)),
        Ok(Err(error)) => format!("{}: {}", classify(&error).as_str(), describe(&error)),
        Err(_elapsed) => "no answer to the probe".to_owned(),
    };
    drop(Connection::take(pooled));
    Err(cause)
}

async fn probe(connection: &mut Connection, prefix: &str) -> Result<Abilities, RedisError> {
    let key = format!("{prefix}probe");
    let mut set = redis::cmd("SET");
    set.arg(&key).arg("1").arg("PX").arg(1000);
    set.query_async::<()>(connection).await?;
    // A server that is older refuses the combination as a syntax error.
    let nx_get = set.arg("NX").arg("GET").query_async::<Value>(connection).await.is_ok();
    let mut eval = redis::cmd("EVAL");
    let scripts = eval.arg("return 1").arg(0).query_async::<i64>(connection).await.is_ok();
    Ok(Abilities { nx_get, scripts })
}

/// Connects once; says what the server can do.
pub(super) async fn check(settings: &config::Redis) -> Result<String, String> {
    let pool = pool(settings).map_err(|error| error.to_string())?;
    let (mut pooled, abilities) = connect(&pool, &settings.prefix).await?;
    let mut found = format!("ok{}", abilities.lacks());
    let mut asked = redis::cmd("CONFIG");
    asked.arg("GET").arg("maxmemory-policy");
    let policy = timeout(CONNECT_TIMEOUT, asked.query_async::<Vec<String>>(&mut pooled)).await;
    let policy = policy.ok().and_then(Result::ok).and_then(|pair| pair.into_iter().nth(1));
    match policy.as_deref() {
        Some("noeviction" | "volatile-ttl") => {}
        Some(policy) => {
            found.push_str("; maxmemory-policy is ");
            found.push_str(policy);
            found.push_str(", which may evict markers early and costs a question to Postgres each: use volatile-ttl or noeviction");
        }
        None => found.push_str("; its maxmemory-policy may not be read"),
    }
    Ok(found)
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// By kind and code, never by the text of a message; of a pipeline by its first failure.
fn classify(error: &RedisError) -> RedisTrouble {
    match error.kind() {
        ErrorKind::Io if error.is_timeout() => return RedisTrouble::Timeout,
        ErrorKind::Io => return RedisTrouble::Connection,
        ErrorKind::AuthenticationFailed => return RedisTrouble::Denied,
        _ => {}
    }
    let in_pipeline = error.clone().into_server_errors();
    let first = in_pipeline.as_ref().and_then(|errors| errors.first());
    let (code, detail) = match first {
        Some((_, error)) => (Some(error.code()), error.details()),
        None => (error.code(), error.detail()),
    };
    match code {
        Some("READONLY" | "MOVED") => RedisTrouble::ReadOnly,
        Some("LOADING" | "MASTERDOWN" | "CLUSTERDOWN") => RedisTrouble::NotReady,
        Some("NOPERM" | "NOAUTH" | "WRONGPASS") => RedisTrouble::Denied,
        Some("OOM") => RedisTrouble::Full,
        // Before version 7 a script wraps the server's error in its own.
        _ if detail.is_some_and(|detail| detail.contains("READONLY")) => RedisTrouble::ReadOnly,
        _ => RedisTrouble::Nonsense,
    }
}
