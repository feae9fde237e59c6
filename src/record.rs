//! The Postgres transaction: ledger, effect and body in one commit, shared by the events that arrive together.
//!
//! Invariant: a [`Recorded`] exists only for an event whose commit the server has confirmed, now or earlier.
//! Never here: Redis, a network call inside the transaction, a commit that is cancelled.
//!
//! Each effect has a lane of its own, so that a slow effect delays nobody else's. A lane commits one batch at a
//! time; what arrives meanwhile is the next batch. Nothing waits for a batch to fill.

mod batch;
mod guarded;
mod lane;
mod parked;
mod single;
mod statement;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::{Duration, Instant};

use deadpool_postgres::Pool;
use tokio::sync::{Mutex, Semaphore, mpsc};
use tokio::time::timeout_at;

use crate::body::{byte_budget, permits};
use crate::config::{self, Effect, Source};
use crate::effect::{Effects, UnknownEffects};
use crate::error::{Code, Dependency};
use crate::generation::Generation;
use crate::identify::{Digest, Event};
use crate::metrics::Metrics;
use crate::tasks::Tasks;
pub(crate) use parked::{Parked, Retried, Unended};
pub use statement::TYPES as RECORD_TYPES;

use batch::{ATTEMPTS_MAX, Delivery, Job, Mode, Outcome, Pauses, Reply, Shared, Writer};

/// An event that Postgres has committed. Only this module makes one.
#[derive(Debug, Clone, Copy)]
pub struct Recorded {
    verdict: Verdict,
    standing: Standing,
    generation: Generation,
    repeated: bool,
}

/// What is left to do of a committed event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// Nothing: a redelivery changes nothing.
    Settled,
    /// Something is under way or waits for its turn. Should it fail in the end, a redelivery has a part to play.
    Open,
    /// Its effect failed and is to be tried again, or it is dead: a redelivery must reach Postgres.
    Failed,
    /// It was failed or dead, and this redelivery has armed it again.
    Rearmed,
}

impl Standing {
    fn read(status: &str) -> Option<Self> {
        Some(match status {
            "done" | "rejected" | "unidentified" => Self::Settled,
            "open" => Self::Open,
            "failed" | "dead" => Self::Failed,
            "rearmed" => Self::Rearmed,
            _ => return None,
        })
    }
}

/// What Postgres knows of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// New, committed with its effect by this delivery.
    Accepted,
    /// New, and its effect refused it for good; committed as such.
    Rejected,
    /// New, and its effect failed; committed to be tried again.
    Parked,
    /// Committed earlier, with the given body digest.
    Known(Digest),
}

impl Recorded {
    /// New, rejected or known.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        self.verdict
    }

    /// What is left to do of it.
    #[must_use]
    pub fn standing(&self) -> Standing {
        self.standing
    }

    /// Whether it is new, and what is signed came before under another id.
    #[must_use]
    pub fn is_repeated(&self) -> bool {
        self.repeated
    }

    /// The history in which it is committed.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.generation
    }
}

/// Why an event is not recorded. Nothing of it stays behind, except after `CommitUnknown` and `RecordTimeout`,
/// where the unique key decides when it is sent again.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{code:?}: {cause}")]
pub struct RecordError {
    /// What happened.
    pub code: Code,
    /// Who is at fault.
    pub dependency: Dependency,
    /// For the log.
    pub cause: String,
}

impl RecordError {
    fn new(code: Code, dependency: Dependency, cause: impl Into<String>) -> Self {
        Self { code, dependency, cause: cause.into() }
    }
}

/// How to record an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// With the others.
    Batched,
    /// By itself, because somebody else may be writing it: does not hold up a batch while it waits for the row.
    Alone,
}

/// The settings that a lane keeps for its life; under others there is another lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct LaneSettings {
    lock_timeout: Duration,
    statement_timeout: Duration,
    commit_timeout: Duration,
    synchronous_commit: config::SynchronousCommit,
    batch_events: usize,
    batch_bytes: usize,
    queue_events: usize,
}

impl LaneSettings {
    fn of(settings: &config::Postgres) -> Self {
        // Every key by name, so that a new one that lanes keep is not forgotten here.
        #[rustfmt::skip]
        let config::Postgres {
            lock_timeout, statement_timeout, commit_timeout, synchronous_commit, batch_events, batch_bytes,
            queue_events, url: _, tls: _, tls_text: _, transaction_pooler: _, connections: _, connect_timeout: _, record_timeout: _,
            queue_bytes: _, heartbeat: _, generation_age_max: _,
        } = *settings;
        Self {
            lock_timeout,
            statement_timeout,
            commit_timeout,
            synchronous_commit,
            batch_events,
            batch_bytes,
            queue_events,
        }
    }
}

/// Ends when nobody holds it and its queue is empty.
struct Lane {
    queue: mpsc::Sender<Job>,
    writer: Arc<Writer>,
    /// One event at a time is recorded alone, so that a lane holds two connections at most.
    alone: Semaphore,
}

impl Lane {
    fn start(
        shared: &Shareable,
        settings: &config::Postgres,
        effect: &Effect,
    ) -> Result<Self, UnknownEffects> {
        let (queue, incoming) = mpsc::channel(settings.queue_events);
        let writer =
            Writer::new(shared.pool.clone(), settings, effect, &shared.effects, shared.session_timeout)?;
        let writer = Arc::new(writer);
        // Outside of the loop's lives, so that the events that wait in it outlast a failure.
        let incoming = Arc::new(Mutex::new(incoming));
        let parts = (Arc::clone(&writer), settings.clone(), Arc::clone(&shared.metrics));
        shared.tasks.spawn_while_needed(loop_name(effect), move |beat| {
            let (writer, settings, metrics) = &parts;
            let lane = lane::Lane::new(Arc::clone(writer), settings, Arc::clone(metrics), beat);
            lane.run(Arc::clone(&incoming))
        });
        Ok(Self { queue, writer, alone: Semaphore::new(1) })
    }
}

/// The loop of an effect's lane, in metrics.
fn loop_name(effect: &Effect) -> String {
    match effect {
        Effect::None => "lane:none".to_owned(),
        Effect::Pull => "lane:pull".to_owned(),
        Effect::Function { name, .. } => format!("lane:{name}"),
        Effect::Rust { name, .. } => format!("lane:rust:{name}"),
    }
}

/// Takes events and gives back what Postgres says of them, under some settings. Recorders of before and after a reload
/// share the lanes that are the same under both.
pub struct Recorder {
    lanes: HashMap<Effect, Arc<Lane>>,
    lane_settings: LaneSettings,
    record_timeout: Duration,
    mode_alone: Mode,
    shared: Shareable,
}

/// What lives as long as the process.
#[derive(Clone)]
struct Shareable {
    pool: Pool,
    /// What the pool's sessions begin with; none where they are not told.
    session_timeout: Option<Duration>,
    effects: Effects,
    queue_bytes: Arc<Semaphore>,
    metrics: Arc<Metrics>,
    tasks: Tasks,
}

impl std::fmt::Debug for Recorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recorder").field("lanes", &self.lanes.keys()).finish_non_exhaustive()
    }
}

impl Recorder {
    /// Starts a lane for every effect that the sources name.
    ///
    /// # Errors
    /// A source names a Rust effect that is not in `effects`.
    pub fn start<'a>(
        pool: &Pool,
        settings: &config::Postgres,
        sources: impl Iterator<Item = &'a Source>,
        effects: &Effects,
        metrics: &Arc<Metrics>,
        tasks: &Tasks,
    ) -> Result<Self, UnknownEffects> {
        let queue_bytes = byte_budget(settings.queue_bytes);
        let (pool, metrics, tasks) = (pool.clone(), Arc::clone(metrics), tasks.clone());
        let session_timeout = (!settings.transaction_pooler).then_some(settings.statement_timeout);
        let effects = effects.clone();
        let shared = Shareable { pool, session_timeout, effects, queue_bytes, metrics, tasks };
        Self::with(shared, settings, sources, None)
    }

    /// The same pool under other settings of the same database. Lanes that stay the same are taken over with their queues; the
    /// others end when the requests that use them have.
    ///
    /// # Errors
    /// A source names a Rust effect that this program does not have.
    pub fn tuned<'a>(
        &self,
        settings: &config::Postgres,
        sources: impl Iterator<Item = &'a Source>,
    ) -> Result<Self, UnknownEffects> {
        let tuned = Self::with(self.shared.clone(), settings, sources, Some(self))?;
        let pool = &self.shared.pool;
        // Never smaller: what the pool lends at that moment would be counted wrongly when it comes back.
        if settings.connections > pool.status().max_size {
            pool.resize(settings.connections);
        }
        Ok(tuned)
    }

    fn with<'a>(
        shared: Shareable,
        settings: &config::Postgres,
        sources: impl Iterator<Item = &'a Source>,
        before: Option<&Self>,
    ) -> Result<Self, UnknownEffects> {
        let lane_settings = LaneSettings::of(settings);
        let kept = before.filter(|before| before.lane_settings == lane_settings);
        let mut lanes = HashMap::new();
        for source in sources {
            let Entry::Vacant(place) = lanes.entry(source.effect.clone()) else { continue };
            let lane = match kept.and_then(|before| before.lanes.get(place.key())) {
                Some(lane) => Arc::clone(lane),
                None => Arc::new(Lane::start(&shared, settings, place.key())?),
            };
            place.insert(lane);
        }
        let LaneSettings { lock_timeout, statement_timeout, .. } = lane_settings;
        let mode_alone = Mode { one_by_one: true, lock_timeout, statement_timeout };
        Ok(Self { lanes, lane_settings, record_timeout: settings.record_timeout, mode_alone, shared })
    }

    /// Records one event, and returns when its commit is confirmed or `deadline` has come.
    ///
    /// Dropping the returned future is safe and loses the answer only: the event may still be committed.
    ///
    /// # Errors
    /// Why it is not recorded, or not known to be.
    pub async fn record(
        &self,
        source: &Arc<Source>,
        event: &Arc<Event>,
        deadline: Instant,
        how: How,
    ) -> Result<Recorded, RecordError> {
        let Some(lane) = self.lanes.get(&source.effect) else {
            return Err(RecordError::new(Code::Internal, Dependency::None, "source without a lane"));
        };
        let deadline = deadline.min(Instant::now() + self.record_timeout);
        let (source, event) = (Arc::clone(source), Arc::clone(event));
        let delivery = Delivery { source, event, token: rand::random(), deadline, fault: None };
        if how == How::Batched {
            match self.record_batched(lane, &delivery).await? {
                Shared::Reply(reply) => return reply,
                Shared::Alone => {}
            }
        }
        self.record_alone(lane, &delivery).await
    }

    async fn record_batched(&self, lane: &Lane, delivery: &Delivery) -> Result<Shared, RecordError> {
        let permits = permits(delivery.event.body.len());
        let bytes = Arc::clone(&self.shared.queue_bytes)
            .try_acquire_many_owned(permits)
            .map_err(|_full| overloaded("queue_bytes is reached"))?;
        let (job, reply) = Job::new(delivery, bytes);
        lane.queue.try_send(job).map_err(|_full| overloaded("queue_events is reached"))?;
        match timeout_at(delivery.deadline.into(), reply).await {
            Ok(Ok(shared)) => Ok(shared),
            Ok(Err(_lost)) => Err(lost()),
            Err(_elapsed) => Err(timed_out()),
        }
    }

    /// Tries until the deadline, like a lane; the last error says more than that it has come.
    async fn record_alone(&self, lane: &Lane, delivery: &Delivery) -> Reply {
        let mut last = timed_out();
        let attempts = async {
            let mut pauses = Pauses::default();
            for attempt in 1.. {
                // For one attempt only: an event that cannot be written must not keep the others waiting.
                let permit = lane.alone.acquire().await.map_err(|error| overloaded(&error.to_string()))?;
                last = match self.attempt_alone(lane, delivery).await {
                    Attempt::Final(reply) => return reply,
                    Attempt::Again(error) if attempt < ATTEMPTS_MAX || error.code != Code::EffectFailed => {
                        error
                    }
                    Attempt::Again(error) => return Err(error),
                };
                drop(permit);
                pauses.next().await;
            }
            Err(timed_out())
        };
        match timeout_at(delivery.deadline.into(), attempts).await {
            Ok(reply) => reply,
            Err(_elapsed) => Err(last),
        }
    }

    async fn attempt_alone(&self, lane: &Lane, delivery: &Delivery) -> Attempt {
        let written = match lane.writer.write(&[delivery], &[true], self.mode_alone).await {
            Ok(written) => written,
            Err(error) if error.trouble.may_pass() => return Attempt::Again(error.for_event()),
            Err(error) => return Attempt::Final(Err(error.for_event())),
        };
        let Some(outcome) = written.outcomes.into_iter().next() else {
            return Attempt::Final(Err(RecordError::new(Code::Internal, Dependency::Postgres, "no outcome")));
        };
        outcome.report(delivery);
        let transient = outcome.is_transient();
        match outcome.into_reply(delivery, written.generation) {
            Err(error) if transient => Attempt::Again(error),
            reply => Attempt::Final(reply),
        }
    }
}

/// What came of one attempt at an event.
enum Attempt {
    Final(Reply),
    Again(RecordError),
}

impl Outcome {
    fn into_reply(self, delivery: &Delivery, generation: Generation) -> Reply {
        let recorded = |verdict, standing| Ok(Recorded { verdict, standing, generation, repeated: false });
        match self {
            Self::Accepted { repeated } => {
                let standing = if delivery.leaves_work() { Standing::Open } else { Standing::Settled };
                Ok(Recorded { verdict: Verdict::Accepted, standing, generation, repeated })
            }
            Self::Repeated => Err(RecordError::new(
                Code::SignatureReused,
                Dependency::None,
                "what is signed belongs to another event",
            )),
            Self::Rejected { .. } => recorded(Verdict::Rejected, Standing::Settled),
            Self::Parked { .. } => recorded(Verdict::Parked, Standing::Failed),
            Self::Known { digest, standing } => recorded(Verdict::Known(digest), standing),
            Self::Failed { cause, .. } => {
                Err(RecordError::new(Code::EffectFailed, Dependency::Effect, cause))
            }
            Self::Locked => Err(RecordError::new(
                Code::InFlight,
                Dependency::None,
                "another transaction is writing this event",
            )),
            Self::NotTried => Err(RecordError::new(
                Code::RecordTimeout,
                Dependency::Effect,
                "the effects of its batch are slow",
            )),
        }
    }
}

fn overloaded(cause: &str) -> RecordError {
    RecordError::new(Code::Overloaded, Dependency::Postgres, cause)
}

fn timed_out() -> RecordError {
    RecordError::new(Code::RecordTimeout, Dependency::Postgres, "no confirmed commit in time")
}

/// Its commit may have been under way.
fn lost() -> RecordError {
    let cause = "its lane failed or was stopped with the event in hand; whether it is recorded is not known";
    RecordError::new(Code::RecordTimeout, Dependency::None, cause)
}
