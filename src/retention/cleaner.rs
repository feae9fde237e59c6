//! One batch after the other: who may clean, for how long a batch may take, and the rest after it.
//!
//! Invariant: each batch is a transaction of its own with short time-outs, begun only while nobody else cleans and the clock
//! has not jumped. Dropping it at any point is safe: what is not committed is there again, and the place is left to the next
//! within [`HOLD`].

use std::time::{Duration, Instant};

use tokio::time::{sleep, timeout};
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};

use super::guards::{Clock, Stop};
use super::{Counts, Ended, Limits, Mode, Progress};
use crate::db::{self, Session, Trouble};

/// How long nobody else cleans after a cleaner's last word.
pub const HOLD: Duration = Duration::from_secs(10);
/// A cleaner that rests for long says again that it is there.
const HOLD_AGAIN: Duration = Duration::from_secs(4);
/// The longest rest after one batch.
const REST_MAX: Duration = Duration::from_secs(60);
/// For a lock, in Postgres. Rows that are locked are not waited for at all.
const LOCK_TIMEOUT: Duration = Duration::from_millis(100);
/// For a batch's statement.
pub(super) const STATEMENT_TIMEOUT: Duration = Duration::from_secs(5);
/// For a question outside of a batch: some hundred pages of each table on a slow disk.
const ASK_TIMEOUT: Duration = Duration::from_secs(15);
/// For all of a batch, on this side: longer than anything in it may take, so a connection that is silent is dead.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);
/// Blocks of a heap in one batch: 2 MiB.
const BLOCKS: i32 = 256;

pub(super) type Parameter<'a> = (&'a (dyn ToSql + Sync), Type);

/// Who cleans, in one pass.
pub(super) struct Cleaner<'a> {
    pub(super) session: &'a mut Session,
    pub(super) limits: &'a Limits,
    pub(super) counts: &'a mut Counts,
    pub(super) tell: &'a mut (dyn FnMut(&Counts, Progress) + Send + Sync),
    pub(super) clock: &'a mut Clock,
    worker: String,
}

/// A walk over the heap of a table.
pub(super) struct Walk {
    step: &'static str,
    statement: &'static str,
    ages: [Duration; 2],
    from: i64,
    count: Count,
}

/// Adds what a batch did.
type Count = fn(&mut Counts, &Row) -> Result<(), Ended>;

impl Walk {
    /// From the beginning. The statement takes place, blocks, rows, two ages in seconds, and whether nothing is to be deleted.
    pub(super) fn new(
        step: &'static str,
        statement: &'static str,
        ages: [Duration; 2],
        count: Count,
    ) -> Self {
        Self { step, statement, ages, from: 0, count }
    }

    pub(super) fn from(self, from: i64) -> Self {
        Self { from, ..self }
    }
}

impl<'a> Cleaner<'a> {
    pub(super) fn new(
        session: &'a mut Session,
        limits: &'a Limits,
        clock: &'a mut Clock,
        counts: &'a mut Counts,
        tell: &'a mut (dyn FnMut(&Counts, Progress) + Send + Sync),
    ) -> Self {
        let worker = format!("{:032x}", rand::random::<u128>());
        Self { session, limits, counts, tell, clock, worker }
    }

    pub(super) fn dry(&self) -> bool {
        self.limits.mode == Mode::Look
    }

    /// Asks outside of any batch: without the place, and without a rest.
    pub(super) async fn ask(
        &mut self,
        statement: &str,
        parameters: &[Parameter<'_>],
    ) -> Result<Vec<Row>, Ended> {
        self.transaction(statement, parameters, ASK_TIMEOUT, false).await
    }

    /// Runs a statement with one row as its answer in a transaction of its own, and rests.
    pub(super) async fn batch(
        &mut self,
        statement: &str,
        parameters: &[Parameter<'_>],
        statement_timeout: Duration,
    ) -> Result<Row, Ended> {
        let started = Instant::now();
        let rows = self.transaction(statement, parameters, statement_timeout, true).await?;
        self.rest(started.elapsed()).await?;
        rows.into_iter().next().ok_or(Ended::NoAnswer)
    }

    async fn transaction(
        &mut self,
        statement: &str,
        parameters: &[Parameter<'_>],
        statement_timeout: Duration,
        holds: bool,
    ) -> Result<Vec<Row>, Ended> {
        let work = self.transact(statement, parameters, statement_timeout, holds);
        let done = timeout(ANSWER_TIMEOUT, work).await.map_err(|_elapsed| Ended::Silent(ANSWER_TIMEOUT))?;
        if done.is_err() {
            timeout(ANSWER_TIMEOUT, self.session.batch_execute("rollback")).await.ok();
        }
        done
    }

    /// Losing a deletion costs nothing, so nobody waits for the log.
    async fn transact(
        &mut self,
        statement: &str,
        parameters: &[Parameter<'_>],
        statement_timeout: Duration,
        holds: bool,
    ) -> Result<Vec<Row>, Ended> {
        let begin = format!(
            "begin isolation level read committed, read write; set local lock_timeout = {}; set local statement_timeout = {}; \
             set local synchronous_commit = off",
            LOCK_TIMEOUT.as_millis(),
            statement_timeout.as_millis()
        );
        self.session.batch_execute(&begin).await?;
        if holds {
            self.hold().await?;
        }
        let rows = self.session.query_typed(statement, parameters).await?;
        self.session.batch_execute("commit").await?;
        Ok(rows)
    }

    /// Says that this one cleans, and reads the clock.
    async fn hold(&mut self) -> Result<(), Ended> {
        let statement = if self.dry() {
            "select true as held, extract(epoch from clock_timestamp())::float8 as at"
        } else {
            "select held, at from hapax.retain_hold($1::text::uuid, make_interval(secs => $2))"
        };
        let hold = HOLD.as_secs_f64();
        let parameters: [Parameter<'_>; 2] = [(&self.worker, Type::TEXT), (&hold, Type::FLOAT8)];
        let parameters: &[Parameter<'_>] = if self.dry() { &[] } else { &parameters };
        let row = self.session.query_typed_one(statement, parameters).await?;
        if !row.try_get::<_, bool>("held")? {
            return Err(Ended::Held);
        }
        self.read_clock(row.try_get("at")?)
    }

    pub(super) fn read_clock(&mut self, at: f64) -> Result<(), Ended> {
        match self.clock.read(at, Instant::now()) {
            Err(stop) if self.limits.mode != (Mode::Ordered { force: true }) => Err(Ended::Stopped(stop)),
            Err(_) | Ok(()) => Ok(()),
        }
    }

    /// So long that batches take at most their share of the time.
    async fn rest(&mut self, took: Duration) -> Result<(), Ended> {
        let share = 1.0 / self.limits.retention.duty - 1.0;
        let mut left = Duration::try_from_secs_f64(took.as_secs_f64() * share)
            .map_or(REST_MAX, |rest| rest.min(REST_MAX));
        loop {
            let nap = left.min(HOLD_AGAIN);
            sleep(nap).await;
            left = left.saturating_sub(nap);
            if left.is_zero() {
                return Ok(());
            }
            timeout(ANSWER_TIMEOUT, self.hold())
                .await
                .map_err(|_elapsed| Ended::Silent(ANSWER_TIMEOUT))??;
        }
    }

    /// Goes over a heap to its end. A batch that takes too long is tried again with less.
    pub(super) async fn walk(&mut self, walk: &Walk) -> Result<(), Ended> {
        let [age, other] = walk.ages.map(|age| age.as_secs_f64());
        let dry = self.dry();
        let (mut from, mut blocks) = (walk.from, BLOCKS);
        let mut rows = i32::try_from(self.limits.retention.batch_rows).unwrap_or(i32::MAX);
        loop {
            let parameters: [Parameter<'_>; 6] = [
                (&from, Type::INT8),
                (&blocks, Type::INT4),
                (&rows, Type::INT4),
                (&age, Type::FLOAT8),
                (&other, Type::FLOAT8),
                (&dry, Type::BOOL),
            ];
            let row = match self.batch(walk.statement, &parameters, STATEMENT_TIMEOUT).await {
                Err(ended) if ended.trouble() == Some(Trouble::Cancelled) && (blocks > 1 || rows > 1) => {
                    (blocks, rows) = ((blocks / 8).max(1), (rows / 8).max(1));
                    continue;
                }
                row => row?,
            };
            (walk.count)(self.counts, &row)?;
            let (next, of): (i64, i64) = (row.try_get("next_block")?, row.try_get("blocks_in_all")?);
            self.tell(walk.step, next, of);
            if next >= of {
                return Ok(());
            }
            from = next;
        }
    }

    pub(super) fn tell(&mut self, step: &'static str, at: i64, of: i64) {
        let (at, of) = (u64::try_from(at).unwrap_or(0), u64::try_from(of).unwrap_or(0));
        (self.tell)(self.counts, Progress { step, at: at.min(of), of });
    }

    pub(super) fn warn(&mut self, stop: &Stop) {
        self.counts.warnings.push(stop.to_string());
    }

    /// Leaves the place to the next. If that fails, the place is free after [`HOLD`].
    pub(super) async fn release(&mut self) {
        let release = "select hapax.retain_release($1::text::uuid)";
        if !self.dry() {
            let worker = self.worker.clone();
            self.ask(release, &[(&worker, Type::TEXT)]).await.ok();
        }
    }
}

impl Ended {
    /// What the error from Postgres means, if it was one.
    pub(super) fn trouble(&self) -> Option<Trouble> {
        match self {
            Self::Failed(error) => Some(db::Trouble::of(error)),
            Self::Stopped(_) | Self::Held | Self::Silent(_) | Self::NoAnswer => None,
        }
    }
}
