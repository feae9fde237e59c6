//! The fast tier: recognises events that are done, and lets concurrent deliveries wait for each other.
//!
//! Invariant: it never refuses an event. Its strongest word is "done in this generation", which is written only
//! after a commit; anything else (a lease of somebody else, a marker of another history, a value that nobody
//! understands, no answer) sends the delivery to Postgres. Never here: Postgres, a delete that is not fenced.

mod desk;
mod marker;
mod redis;

pub(crate) use self::redis::redis_key;

use std::sync::Arc;
use std::time::{Duration, Instant};

use quick_cache::sync::Cache;

use crate::config::{self, FastTierKind};
use crate::error::Code;
use crate::generation::{Generation, Heartbeat};
use crate::identify::{Digest, EventKey};
use crate::metrics::Metrics;
use crate::tasks::Tasks;
pub use desk::{Desk, Seen, Stands};
pub use marker::ShortDigest;

/// What the fast tier says of an event.
#[derive(Debug)]
pub enum Claim {
    /// Committed in the current generation, with this body digest.
    Done(ShortDigest),
    /// Ours to record; others wait until it is settled, released or expired.
    Held(Lease),
    /// Nobody's as far as is known; record it.
    Unclaimed,
    /// Another delivery of the event is being recorded, or was when its process died.
    Foreign,
}

/// A claim that is ours; to be settled or released.
#[derive(Debug, Clone)]
pub struct Lease {
    /// `L <token>`
    marker: Arc<str>,
}

impl Lease {
    fn random() -> Self {
        Self { marker: marker::lease(rand::random()).into() }
    }
}

/// Which tier caught a duplicate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tier {
    /// This process' memory.
    Memory,
    /// Another delivery in this process.
    Flight,
    /// Redis.
    Redis,
    /// Postgres.
    Postgres,
}

impl Tier {
    /// As it stands in metrics and logs.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Flight => "flight",
            Self::Redis => "redis",
            Self::Postgres => "postgres",
        }
    }
}

/// How long an event may be known as done without asking Postgres.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lifetime {
    /// As the settings say: nothing is left to do of it.
    Settled,
    /// At most [`OPEN_TTL`]: should what is left fail for good, a redelivery has to reach Postgres, even if nobody can
    /// take the marker back then.
    Open,
}

/// The longest that a marker of an event lives of which something is left to do.
pub const OPEN_TTL: Duration = Duration::from_secs(60);

impl Lifetime {
    fn within(self, ttl: Duration) -> Duration {
        match self {
            Self::Settled => ttl,
            Self::Open => ttl.min(OPEN_TTL),
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Remembered {
    digest: ShortDigest,
    generation: Generation,
    until: Instant,
}

/// The fast tier of a process: its own memory and, in front of Postgres, Redis.
pub struct FastTier {
    memory: Option<Arc<Cache<EventKey, Remembered>>>,
    memory_ttl: Duration,
    redis: Option<redis::RedisTier>,
    refuse_without_redis: bool,
    heartbeat: Arc<Heartbeat>,
}

impl std::fmt::Debug for FastTier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FastTier").field("redis", &self.redis.is_some()).finish_non_exhaustive()
    }
}

impl FastTier {
    /// Starts the tier; connects in the background.
    ///
    /// # Errors
    /// What is wrong with the Redis URL.
    pub fn start(
        settings: &config::FastTier,
        heartbeat: Arc<Heartbeat>,
        metrics: &Arc<Metrics>,
        tasks: &Tasks,
    ) -> anyhow::Result<Self> {
        let redis = match &settings.kind {
            FastTierKind::Redis(redis) => {
                Some(redis::RedisTier::start(redis, settings.ttl, Arc::clone(metrics), tasks)?)
            }
            FastTierKind::Memory | FastTierKind::Off => None,
        };
        let remembers = !matches!(settings.kind, FastTierKind::Off);
        let memory = remembers.then(|| Arc::new(Cache::new(settings.memory_events)));
        Ok(Self::of(settings, memory, redis, heartbeat))
    }

    fn of(
        settings: &config::FastTier,
        memory: Option<Arc<Cache<EventKey, Remembered>>>,
        redis: Option<redis::RedisTier>,
        heartbeat: Arc<Heartbeat>,
    ) -> Self {
        let refuse_without_redis = match &settings.kind {
            FastTierKind::Redis(redis) => redis.on_failure == config::OnTierFailure::Refuse,
            FastTierKind::Memory | FastTierKind::Off => false,
        };
        Self { memory, memory_ttl: settings.memory_ttl, redis, refuse_without_redis, heartbeat }
    }

    /// The same memory and the same connection under other settings of the same kind; what is remembered already stays for
    /// as long as it was to.
    #[must_use]
    pub fn tuned(&self, settings: &config::FastTier) -> Self {
        let redis = match (&self.redis, &settings.kind) {
            (Some(tier), FastTierKind::Redis(redis)) => Some(tier.tuned(redis, settings.ttl)),
            _ => None,
        };
        Self::of(settings, self.memory.clone(), redis, Arc::clone(&self.heartbeat))
    }

    /// Whether this process remembers the event as done; the digest is that of the committed body.
    #[must_use]
    pub fn recall(&self, key: &EventKey, now: Instant) -> Option<ShortDigest> {
        let remembered = self.memory.as_ref()?.get(key)?;
        let counts = now < remembered.until && self.heartbeat.current(now) == Some(remembered.generation);
        counts.then_some(remembered.digest)
    }

    /// Which of these events are done, and which tier knows; claims nothing.
    ///
    /// # Errors
    /// `FastTierRefused` if the tier is away and the settings say not to go on without it.
    pub async fn recognise(&self, keys: &[EventKey]) -> Result<Vec<Option<(ShortDigest, Tier)>>, Code> {
        let now = Instant::now();
        let mut done: Vec<_> =
            keys.iter().map(|key| self.recall(key, now).map(|digest| (digest, Tier::Memory))).collect();
        let Some(redis) = &self.redis else { return Ok(done) };
        let asked: Vec<EventKey> =
            keys.iter().zip(&done).filter(|(_, done)| done.is_none()).map(|(key, _)| *key).collect();
        let values = match redis.read_all(&asked).await {
            Ok(values) => values,
            Err(redis::Away) if self.refuse_without_redis => return Err(Code::FastTierRefused),
            Err(redis::Away) => return Ok(done),
        };
        let unknown = done.iter_mut().filter(|done| done.is_none());
        for ((done, key), value) in unknown.zip(asked).zip(values) {
            if let Some(marker::Marker::Done { generation, digest }) = value.as_deref().map(marker::read)
                && self.heartbeat.current(now) == Some(generation)
            {
                self.remember(key, digest, generation, now);
                *done = Some((digest, Tier::Redis));
            }
        }
        Ok(done)
    }

    /// Claims the event; while somebody else holds it, waits for at most `wait`.
    ///
    /// Dropping the future may leave a lease behind, which makes others wait until it expires.
    ///
    /// # Errors
    /// `FastTierRefused` if the tier is away and the settings say not to go on without it.
    pub async fn claim(&self, key: &EventKey, wait: Duration) -> Result<Claim, Code> {
        let Some(redis) = &self.redis else { return Ok(Claim::Unclaimed) };
        let give_up = Instant::now() + wait;
        let lease = Lease::random();
        let mut pause = Duration::from_millis(5);
        loop {
            let claim = match redis.claim(key, &lease.marker).await {
                Ok(found) => self.judge(key, found, &lease),
                Err(redis::Away) if self.refuse_without_redis => return Err(Code::FastTierRefused),
                Err(redis::Away) => Claim::Unclaimed,
            };
            let now = Instant::now();
            if !matches!(claim, Claim::Foreign) || now >= give_up {
                return Ok(claim);
            }
            tokio::time::sleep(pause.min(give_up - now)).await;
            pause = (pause * 2).min(Duration::from_millis(100));
        }
    }

    fn judge(&self, key: &EventKey, found: redis::Found, lease: &Lease) -> Claim {
        let value = match found {
            redis::Found::Set => return Claim::Held(lease.clone()),
            redis::Found::Nothing => return Claim::Unclaimed,
            redis::Found::Value(value) => value,
        };
        // A reply that was lost and asked for again by the client library.
        if lease.marker.as_bytes() == value {
            return Claim::Held(lease.clone());
        }
        let now = Instant::now();
        match marker::read(&value) {
            marker::Marker::Lease => Claim::Foreign,
            marker::Marker::Done { generation, digest }
                if self.heartbeat.current(now) == Some(generation) =>
            {
                self.remember(*key, digest, generation, now);
                Claim::Done(digest)
            }
            marker::Marker::Done { .. } | marker::Marker::Unknown => Claim::Unclaimed,
        }
    }

    /// Notes that the event is committed. The answer does not wait for it, and nothing depends on it: what is lost
    /// costs the next delivery a question to Postgres.
    ///
    /// The marker replaces whatever stands there. That is safe, since it states a fact: a lease that it replaces
    /// belongs to a delivery that will find the row in Postgres, and a marker of a later generation that it might
    /// replace costs one question more.
    pub fn settle(&self, key: &EventKey, stamp: Digest, generation: Generation, lifetime: Lifetime) {
        let digest = ShortDigest::of(stamp);
        if let (Some(memory), now) = (&self.memory, Instant::now()) {
            let until = now + lifetime.within(self.memory_ttl);
            memory.insert(*key, Remembered { digest, generation, until });
        }
        if let Some(redis) = &self.redis {
            redis.settle(key, marker::done(generation, digest), lifetime);
        }
    }

    /// Takes back what was said of an event: its next delivery reaches Postgres. Not waited for, like a marker; what other
    /// processes remember ends with `memory_ttl`.
    pub fn forget(&self, key: &EventKey) {
        if let Some(memory) = &self.memory {
            memory.remove(key);
        }
        if let Some(redis) = &self.redis {
            redis.forget(key);
        }
    }

    /// For the next delivery to this process: no longer than Redis knows it, which is not asked how long that is.
    fn remember(&self, key: EventKey, digest: ShortDigest, generation: Generation, now: Instant) {
        if let Some(memory) = &self.memory {
            let until = now + Lifetime::Open.within(self.memory_ttl);
            memory.insert(key, Remembered { digest, generation, until });
        }
    }

    /// Gives a claim back, so that the next delivery need not wait; at most one command's time-out long.
    pub async fn release(&self, key: &EventKey, lease: Lease) {
        if let Some(redis) = &self.redis {
            redis.release(key, &lease.marker).await;
        }
    }
}

/// Whether the tier's URL can be read.
///
/// # Errors
/// What is wrong with it.
pub fn check_url(settings: &config::FastTier) -> Result<(), String> {
    match &settings.kind {
        FastTierKind::Redis(redis) => redis::check_url(redis),
        FastTierKind::Memory | FastTierKind::Off => Ok(()),
    }
}

/// Connects once and tries what the tier needs; says what was found.
///
/// # Errors
/// Why the tier cannot be used.
pub async fn check(settings: &config::FastTier) -> Result<String, String> {
    match &settings.kind {
        FastTierKind::Redis(redis) => redis::check(redis).await,
        FastTierKind::Memory => Ok("not used (fast_tier.kind = \"memory\")".to_owned()),
        FastTierKind::Off => Ok("not used (fast_tier.kind = \"off\")".to_owned()),
    }
}

/// What stands in Redis for a key, and for how many milliseconds; none without Redis or without a value. Connects
/// anew: for tools, not for the path.
///
/// # Errors
/// Why Redis cannot be asked.
pub async fn read_marker(
    settings: &config::FastTier,
    key: &EventKey,
) -> Result<Option<(String, i64)>, String> {
    match &settings.kind {
        FastTierKind::Redis(redis) => redis::read(redis, key).await,
        FastTierKind::Memory | FastTierKind::Off => Ok(None),
    }
}
