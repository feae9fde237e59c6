//! Deleting what is older than its horizon, beside the traffic and slower than it.
//!
//! Invariant: nothing goes inside the dedupe horizon, and no event that has work left; both by the database's clock. A pass
//! never holds up the path: small transactions with short time-outs, no wait for a row, and rests between them. What is deleted
//! can be deleted again: nothing waits for the log, and a pass that ends anywhere is gone on with by the next one.
//!
//! [`run_once`] is a pass, [`run`] the loop. Never here: a horizon that this machine's clock says.

mod cleaner;
mod days;
mod guards;
mod routine;

use std::time::Duration;

use serde::Serialize;
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use crate::config;
use crate::db::{self, Session};
use cleaner::{Cleaner, Parameter, STATEMENT_TIMEOUT, Walk};
use days::count;

pub use cleaner::HOLD;
pub use guards::{BEHIND_MAX, Clock, JUMP_MIN, JUMP_SHARE, SHARE_ROWS_MIN, Stop};
pub use routine::run;

/// A walk over the ledger's whole heap begins when this share of its horizon has gone by since the last one began: reading it all
/// every few minutes would push everything else out of the memory.
const WALKS_PER_HORIZON: u32 = 100;
/// How long a share of a worker that is gone stays.
const SHARE_AGE: Duration = Duration::from_secs(86_400);

/// By whose order a pass runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Its time has come.
    Routine,
    /// An operator's: confirms what stopped the passes before. It walks the heaps from the beginning.
    Ordered {
        /// Even though the clock is behind the newest rows.
        force: bool,
    },
    /// To see what would go. Nothing is written.
    Look,
}

/// What a pass goes by.
#[derive(Debug, Clone)]
pub struct Limits {
    /// `[retention]`
    pub retention: config::Retention,
    /// By whose order.
    pub mode: Mode,
}

/// What a pass did, or in [`Mode::Look`] would do.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Ledger rows.
    pub events: u64,
    /// Jobs, with their events or by themselves.
    pub jobs: u64,
    /// Signed bytes that must not come again.
    pub guards: u64,
    /// Ids that came again with another body.
    pub mismatches: u64,
    /// Bodies that had been kept.
    pub kept_bodies: u64,
    /// Bodies that had found no day of their own.
    pub stray_bodies: u64,
    /// Shares of workers that are gone.
    pub shares: u64,
    /// Bodies that were moved aside, to be kept.
    pub bodies_moved: u64,
    /// Partitions of bodies.
    pub days_dropped: Vec<String>,
    /// Those whose turn it was and that somebody was using; they stay until the next pass.
    pub days_busy: Vec<String>,
    /// What would have stopped a pass that nobody ordered.
    pub warnings: Vec<String>,
}

impl Counts {
    /// Rows that were deleted, by kind.
    #[must_use]
    pub fn rows(&self) -> [(&'static str, u64); 7] {
        [
            ("events", self.events),
            ("jobs", self.jobs),
            ("guards", self.guards),
            ("mismatches", self.mismatches),
            ("kept_bodies", self.kept_bodies),
            ("stray_bodies", self.stray_bodies),
            ("shares", self.shares),
        ]
    }
}

/// How far a pass is.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    /// What it is at.
    pub step: &'static str,
    /// Where in it.
    pub at: u64,
    /// Of how much.
    pub of: u64,
}

/// Why a pass came to no end.
#[derive(Debug, thiserror::Error)]
pub enum Ended {
    /// It might have deleted what it should not.
    #[error("{0}")]
    Stopped(#[from] Stop),
    /// One at a time, over all gateways.
    #[error("another cleaner is at work")]
    Held,
    /// What Postgres says.
    #[error("{}", db::describe(.0))]
    Failed(#[from] tokio_postgres::Error),
    /// The connection is of no use any more.
    #[error("Postgres did not answer within {0:?}")]
    Silent(Duration),
    /// Of a table that has one row always.
    #[error(
        "Postgres answered without a row: hapax.retention has to have one; insert it with default values"
    )]
    NoAnswer,
}

/// Runs a pass to its end. `counts` is right at any time, `tell` is called after each batch.
///
/// Dropping it is safe at any point; the session is of no use then.
///
/// # Errors
/// Why it came to no end; what it did until then stays done.
pub async fn run_once(
    session: &mut Session,
    limits: &Limits,
    clock: &mut Clock,
    counts: &mut Counts,
    tell: &mut (dyn FnMut(&Counts, Progress) + Send + Sync),
) -> Result<(), Ended> {
    let mut cleaner = Cleaner::new(session, limits, clock, counts, tell);
    let ended = cleaner.pass().await;
    if let Err(Ended::Stopped(stop @ Stop::Jumped { .. })) = &ended
        && limits.mode == Mode::Routine
    {
        // The next reading will find nothing strange; so everybody is told, for as long as nobody has confirmed it.
        let stopped = stop.to_string();
        cleaner.ask("select hapax.retain_stop($1)", &[(&stopped, Type::TEXT)]).await?;
    }
    if !matches!(ended, Err(Ended::Held)) {
        cleaner.release().await;
    }
    ended
}

/// Where the walk over the ledger goes on, if it is its turn.
type Place = Option<i64>;

impl Cleaner<'_> {
    async fn pass(&mut self) -> Result<(), Ended> {
        let place = self.look().await?;
        self.drop_days().await?;
        self.delete_stray_bodies().await?;
        for state in ["done", "discarded"] {
            self.delete_jobs(state).await?;
        }
        let config::Retention { ledger, dead, body, .. } = self.limits.retention;
        if let Some(from) = place {
            self.walk(&Walk::new("events", EVENTS, [ledger, dead], add_events).from(from)).await?;
            self.walk(&Walk::new("guards", GUARDS, [ledger, dead], add_guards)).await?;
            self.walk(&Walk::new("mismatches", MISMATCHES, [ledger, dead], add_mismatches)).await?;
        }
        self.walk(&Walk::new("kept bodies", KEPT, [body, body], add_kept)).await?;
        self.delete_shares().await?;
        if matches!(self.limits.mode, Mode::Ordered { .. }) {
            self.ask("select hapax.retain_stop(null)", &[]).await?;
        }
        Ok(())
    }

    /// Whether anything may be deleted at all.
    async fn look(&mut self) -> Result<Place, Ended> {
        let config::Retention { ledger, dead, body, jobs, share_max, .. } = self.limits.retention;
        let mode = self.limits.mode;
        let forced = mode == (Mode::Ordered { force: true });
        let walk_every = (ledger / WALKS_PER_HORIZON).as_secs_f64();
        let statement = "select * from hapax.retain_state(make_interval(secs => $1))";
        let state = self.batch(statement, &[(&walk_every, Type::FLOAT8)], STATEMENT_TIMEOUT).await?;
        let at: f64 = state.try_get("at")?;
        let judge = |stop: Result<(), Stop>| if forced { Ok(()) } else { stop };
        judge(guards::behind("bodies", at, state.try_get("newest")?))?;
        if let (Mode::Routine, Some(stopped)) = (mode, state.try_get("stopped")?) {
            return Err(Stop::Before(stopped).into());
        }
        let ages = [ledger, dead, body, jobs].map(|age| age.as_secs_f64());
        let ages: Vec<Parameter<'_>> = ages.iter().map(|age| (age as _, Type::FLOAT8)).collect();
        for row in self.ask(SAMPLE, &ages).await? {
            let kind: &str = row.try_get("kind")?;
            if kind != "jobs" {
                judge(guards::behind(kind, at, row.try_get("newest")?))?;
            }
            match guards::share(kind, row.try_get("rows_in_all")?, row.try_get("rows_past")?, share_max) {
                Err(stop) if mode == Mode::Routine => return Err(stop.into()),
                Err(stop) => self.warn(&stop),
                Ok(()) => {}
            }
        }
        let place = if mode == Mode::Routine { state.try_get("walk_block")? } else { 0 };
        Ok((mode != Mode::Routine || state.try_get("walk_due")?).then_some(place))
    }

    async fn delete_jobs(&mut self, state: &str) -> Result<(), Ended> {
        let statement =
            "select next_since, more, gone from hapax.retain_jobs($1, $2, $3, make_interval(secs => $4), $5)";
        let (rows, dry, age) = (self.rows(), self.dry(), self.limits.retention.jobs.as_secs_f64());
        let mut since = jiff::Timestamp::UNIX_EPOCH;
        loop {
            let parameters: [Parameter<'_>; 5] = [
                (&state, Type::TEXT),
                (&since, Type::TIMESTAMPTZ),
                (&rows, Type::INT4),
                (&age, Type::FLOAT8),
                (&dry, Type::BOOL),
            ];
            let row = self.batch(statement, &parameters, STATEMENT_TIMEOUT).await?;
            self.counts.jobs += count(&row, "gone")?;
            self.tell("jobs", 0, 0);
            if !row.try_get::<_, bool>("more")? {
                return Ok(());
            }
            since = row.try_get("next_since")?;
        }
    }

    async fn delete_shares(&mut self) -> Result<(), Ended> {
        let statement = "select gone from hapax.retain_shares(make_interval(secs => $1), $2)";
        let (age, dry) = (SHARE_AGE.as_secs_f64(), self.dry());
        let row =
            self.batch(statement, &[(&age, Type::FLOAT8), (&dry, Type::BOOL)], STATEMENT_TIMEOUT).await?;
        self.counts.shares += count(&row, "gone")?;
        Ok(())
    }
}

const EVENTS: &str =
    "select * from hapax.retain_events($1, $2, $3, make_interval(secs => $4), make_interval(secs => $5), $6)";
const GUARDS: &str = "select * from hapax.retain_rows('guards', $1, $2, $3, make_interval(secs => $4), $6)";
const MISMATCHES: &str =
    "select * from hapax.retain_rows('mismatches', $1, $2, $3, make_interval(secs => $4), $6)";
const KEPT: &str = "select * from hapax.retain_kept($1, $2, $3, make_interval(secs => $4), $6)";
const SAMPLE: &str = "select * from hapax.retain_sample(make_interval(secs => $1), make_interval(secs => $2), \
                      make_interval(secs => $3), make_interval(secs => $4))";

fn add_events(counts: &mut Counts, row: &Row) -> Result<(), Ended> {
    counts.events += count(row, "events")?;
    counts.jobs += count(row, "jobs")?;
    counts.kept_bodies += count(row, "bodies_kept")?;
    counts.mismatches += count(row, "mismatches")?;
    Ok(())
}

fn add_guards(counts: &mut Counts, row: &Row) -> Result<(), Ended> {
    counts.guards += count(row, "gone")?;
    Ok(())
}

fn add_mismatches(counts: &mut Counts, row: &Row) -> Result<(), Ended> {
    counts.mismatches += count(row, "gone")?;
    Ok(())
}

fn add_kept(counts: &mut Counts, row: &Row) -> Result<(), Ended> {
    counts.kept_bodies += count(row, "gone")?;
    Ok(())
}
