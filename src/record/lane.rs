//! The group commit of one effect: what arrives while a commit is under way is the next batch.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::sync::{Mutex, mpsc};
use tokio::time::sleep_until;
use tracing::warn;

use super::batch::{ATTEMPTS_MAX, Claimed, Delivery, Job, Mode, Outcome, Pauses, Shared, Writer, Written};
use crate::config;
use crate::db::Trouble;
use crate::metrics::Metrics;
use crate::tasks::Beat;

/// A source whose effect failed so recently starts in subtransactions.
const CAREFUL_FOR: Duration = Duration::from_secs(5);
/// How long one batch of effects should take; larger ones are cut.
const BATCH_TIME: Duration = Duration::from_millis(250);
/// A batch in which somebody else's row was locked is written again, waiting this long for each.
const LOCK_GLANCE: Duration = Duration::from_millis(10);
/// After a batch that took too long, each event is tried with this part of `statement_timeout`, so that there is an
/// answer for the others before their `record_timeout`.
const GLANCE_PART: u32 = 4;

/// Batches in a row that may fail as a whole before the lane rests.
const FRUITLESS_MAX: u32 = 3;
/// How long it rests then, growing.
const REST: std::ops::RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_millis(100);
/// Batches under way at once, where they need not run one after the other.
const OVERLAP: usize = 2;
/// Events that are worth a commit of their own while another one is under way; fewer where a commit takes no more.
const WORTH_A_COMMIT: usize = 16;

pub(super) struct Lane {
    beat: Beat,
    /// Taken from the queue, or given back by a batch, for the next one.
    backlog: VecDeque<Job>,
    writer: Arc<Writer>,
    metrics: Arc<Metrics>,
    events_max: usize,
    bytes_max: usize,
    lock_timeout: Duration,
    statement_timeout: Duration,
    /// Events that fit into `BATCH_TIME`, as measured.
    events_cap: usize,
    careful_until: HashMap<Arc<str>, Instant>,
    /// What the batches under way claim for their requests. Another item of such a request would wait for the first one's
    /// effect as if somebody else were writing it, and be answered so.
    claiming: HashSet<Claimed>,
    /// Batches in a row of which nothing was committed, since every effect failed.
    fruitless: u32,
    /// No batch before this; such batches cost as much as others.
    rest_until: Instant,
}

impl Lane {
    pub(super) fn new(
        writer: Arc<Writer>,
        settings: &config::Postgres,
        metrics: Arc<Metrics>,
        beat: Beat,
    ) -> Self {
        let events_max = if writer.is_batched() { settings.batch_events } else { 1 };
        let events_cap = if writer.has_effect() { events_max.min(4) } else { events_max };
        Self {
            beat,
            backlog: VecDeque::new(),
            writer,
            metrics,
            events_max,
            bytes_max: settings.batch_bytes,
            lock_timeout: settings.lock_timeout,
            statement_timeout: settings.statement_timeout,
            events_cap,
            careful_until: HashMap::new(),
            claiming: HashSet::new(),
            fruitless: 0,
            rest_until: Instant::now(),
        }
    }

    /// Runs until the queue is closed and everything in it is answered.
    ///
    /// Dropping it loses no committed event: those in its hands are answered as not recorded, those in the queue stay there.
    pub(super) async fn run(mut self, queue: Arc<Mutex<mpsc::Receiver<Job>>>) {
        let mut queue = queue.lock().await;
        self.beat.alive();
        self.writer.warm_up().await;
        let mut under_way = FuturesUnordered::new();
        let mut arrived = Vec::new();
        let mut open = true;
        while open || !under_way.is_empty() || !self.backlog.is_empty() {
            self.beat.alive();
            // One time for both decisions: a rest that ended between them would leave nobody to wake the lane.
            let now = Instant::now();
            while self.is_worth_a_commit(under_way.len(), now) {
                let Some(commit) = self.form(now) else { break };
                under_way.push(commit.run());
            }
            let room = self.events_max.saturating_sub(self.backlog.len());
            let idle = under_way.is_empty();
            let resting = !self.backlog.is_empty() && self.rest_until > now;
            tokio::select! {
                () = sleep_until(self.rest_until.into()), if resting => {}
                Some(ended) = under_way.next() => self.take_back(ended),
                count = received(&self.beat, idle, queue.recv_many(&mut arrived, room)), if open && room > 0 => {
                    open = count > 0;
                    if idle {
                        // Deliveries that are ready to be queued get their turn first; costs nothing when there are none.
                        tokio::task::yield_now().await;
                        while let Ok(job) = queue.try_recv() {
                            arrived.push(job);
                        }
                    }
                    self.backlog.extend(arrived.drain(..));
                }
                // Nothing is left to wait for.
                else => {}
            }
        }
    }

    /// An idle lane commits whatever there is; a second commit beside another one has to be worth it.
    fn is_worth_a_commit(&self, under_way: usize, now: Instant) -> bool {
        if self.rest_until > now {
            return false;
        }
        let overlap = if self.writer.runs_in_order() { 1 } else { OVERLAP };
        match under_way {
            0 => !self.backlog.is_empty(),
            _ => under_way < overlap && self.backlog.len() >= WORTH_A_COMMIT.min(self.events_max),
        }
    }

    /// Takes what is there, up to the caps. Keys are sorted and unique within a batch; what comes twice (the same
    /// id with two bodies) waits for the next. `None` if nobody waits for what is there, or all of it has to wait.
    fn form(&mut self, now: Instant) -> Option<Commit> {
        let (mut batch, mut later, mut keys, mut bytes) = (Vec::new(), VecDeque::new(), HashSet::new(), 0);
        while let Some(mut job) = self.backlog.pop_front() {
            if job.is_abandoned(now) {
                continue;
            }
            let room =
                batch.is_empty() || (batch.len() < self.events_cap && bytes + job.bytes() <= self.bytes_max);
            let fits = room && job.delivery.claimed().is_none_or(|claimed| !self.claiming.contains(&claimed));
            if fits && keys.insert(job.delivery.event.key) {
                bytes += job.bytes();
                job.careful = self.is_careful(&job, now);
                batch.push(job);
            } else {
                later.push_back(job);
            }
        }
        self.backlog = later;
        if batch.is_empty() {
            return None;
        }
        batch.sort_unstable_by_key(|job| job.delivery.event.key);
        let claims: Vec<Claimed> = batch.iter().filter_map(|job| job.delivery.claimed()).collect();
        self.claiming.extend(&claims);
        Some(Commit {
            batch,
            claims,
            writer: Arc::clone(&self.writer),
            metrics: Arc::clone(&self.metrics),
            lock_timeout: self.lock_timeout,
            statement_timeout: self.statement_timeout,
        })
    }

    fn is_careful(&self, job: &Job, now: Instant) -> bool {
        self.careful_until.get(&job.delivery.source.name).is_some_and(|until| now < *until)
    }

    /// Halves or doubles its way to the number of effects that fit into `BATCH_TIME`.
    fn measure(&mut self, events: usize, took: Duration) {
        self.metrics.batch_committed(events, took);
        if !self.writer.has_effect() {
            return;
        }
        if took > BATCH_TIME {
            let fitting = BATCH_TIME.as_secs_f64() / took.as_secs_f64();
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                clippy::cast_precision_loss,
                reason = "a fraction of a small count"
            )]
            let fitting = (events as f64 * fitting) as usize;
            self.events_cap = fitting.max(1);
        } else if events >= self.events_cap {
            self.events_cap = (self.events_cap * 2).min(self.events_max);
        }
    }

    /// An effect that always fails is tried less and less often, in larger batches, so that it leaves the machine to the
    /// others. Its events are answered a little later for that.
    fn rest(&mut self, outcomes: &[Outcome]) {
        let fruitless =
            outcomes.iter().all(|outcome| matches!(outcome, Outcome::Failed { .. } | Outcome::Parked { .. }));
        self.fruitless = if fruitless { self.fruitless + 1 } else { 0 };
        if self.fruitless > FRUITLESS_MAX {
            let doublings = (self.fruitless - FRUITLESS_MAX).min(10);
            self.rest_until = Instant::now() + (REST.start().saturating_mul(1 << doublings)).min(*REST.end());
        }
    }

    fn take_back(&mut self, ended: Ended) {
        let Ended { batch, claims, written, took } = ended;
        self.claiming.retain(|claimed| !claims.contains(claimed));
        let Some(written) = written else { return };
        self.measure(batch.len(), took);
        self.rest(&written.outcomes);
        let careful_until = Instant::now() + CAREFUL_FOR;
        for (mut job, outcome) in batch.into_iter().zip(written.outcomes) {
            if matches!(outcome, Outcome::Failed { .. } | Outcome::Parked { .. } | Outcome::Rejected { .. }) {
                self.careful_until.insert(Arc::clone(&job.delivery.source.name), careful_until);
            }
            outcome.report(&job.delivery);
            if outcome.is_transient() {
                job.attempts += 1;
            }
            if matches!(outcome, Outcome::NotTried) || (outcome.is_transient() && job.attempts < ATTEMPTS_MAX)
            {
                self.backlog.push_back(job);
            } else {
                let shared = match outcome {
                    // Out of the batch, which must not wait for its row.
                    Outcome::Locked => Shared::Alone,
                    outcome => Shared::Reply(outcome.into_reply(&job.delivery, written.generation)),
                };
                job.answer(shared);
            }
        }
    }
}

/// A lane that has nothing under way is idle while it waits for events; another one waits for Postgres.
async fn received<T>(beat: &Beat, idle: bool, events: impl Future<Output = T>) -> T {
    if idle { beat.waiting(events).await } else { events.await }
}

/// One batch on its way.
struct Commit {
    batch: Vec<Job>,
    claims: Vec<Claimed>,
    writer: Arc<Writer>,
    metrics: Arc<Metrics>,
    lock_timeout: Duration,
    statement_timeout: Duration,
}

/// A batch that is through; nothing is written if all of it was answered otherwise.
struct Ended {
    batch: Vec<Job>,
    claims: Vec<Claimed>,
    written: Option<Written>,
    took: Duration,
}

impl Commit {
    /// Writes the batch until its commit is confirmed, or nobody waits for it any more.
    async fn run(mut self) -> Ended {
        let Self { lock_timeout, statement_timeout, .. } = self;
        let mut mode = Mode { one_by_one: false, lock_timeout, statement_timeout };
        let mut pauses = Pauses::default();
        let (mut failures, mut lost): (u32, u32) = (0, 0);
        loop {
            let now = Instant::now();
            self.batch.retain(|job| !job.is_abandoned(now));
            if self.batch.is_empty() {
                return self.ended(None, Duration::ZERO);
            }
            let careful: Vec<bool> = self.batch.iter().map(|job| job.careful).collect();
            let deliveries: Vec<&Delivery> = self.batch.iter().map(|job| &job.delivery).collect();
            let error = match self.writer.write(&deliveries, &careful, mode).await {
                Ok(written) => {
                    return self.ended(Some(written), now.elapsed());
                }
                Err(error) => error,
            };
            self.metrics.batch_failed(error.trouble);
            let next = self.next_mode(mode, error.trouble);
            lost += u32::from(error.trouble == Trouble::Lost);
            let useless = !error.trouble.may_pass() && next == mode;
            if self.batch.len() > 1 && (useless || lost > 1) {
                // One of them may be why (it ends its backend, or cannot even be sent): each by itself.
                warn!(
                    cause = error.cause,
                    events = self.batch.len(),
                    "a batch cannot be written; its events go alone"
                );
                self.batch.drain(..).for_each(|job| job.answer(Shared::Alone));
            } else if error.trouble.may_pass() {
                failures += 1;
                // One line for each power of two, so that an outage does not fill the log.
                if failures.is_power_of_two() {
                    let events = self.batch.len();
                    warn!(cause = error.cause, events, failures, "a batch is written again");
                }
                pauses.next().await;
            } else if useless {
                let refused = |job: Job| job.answer(Shared::Reply(Err(error.for_event())));
                self.batch.drain(..).for_each(refused);
            }
            mode = next;
        }
    }

    fn ended(self, written: Option<Written>, took: Duration) -> Ended {
        Ended { batch: self.batch, claims: self.claims, written, took }
    }

    /// Each event by itself, whatever the trouble: an effect can raise any SQLSTATE, also those that speak of the
    /// server, and must fail alone.
    fn next_mode(&self, mode: Mode, trouble: Trouble) -> Mode {
        let mode = Mode { one_by_one: true, ..mode };
        match trouble {
            // The lost backend may still commit: the same insert waits for it.
            Trouble::Lost => Mode { lock_timeout: self.statement_timeout, ..mode },
            Trouble::Locked => Mode { lock_timeout: LOCK_GLANCE, ..mode },
            Trouble::Cancelled => {
                let statement_timeout = self.statement_timeout / GLANCE_PART;
                Mode { statement_timeout, lock_timeout: LOCK_GLANCE, ..mode }
            }
            Trouble::Retry | Trouble::Resources | Trouble::Statement => mode,
        }
    }
}
