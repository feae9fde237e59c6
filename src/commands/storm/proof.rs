//! The proof: the ledger, and the effects if a query gives them, against what was sent and what was answered.
//!
//! Everything is read in one snapshot, page by page; what is in flight meanwhile is either in all of it or in none.
//! Rules, for each event of the run:
//!
//! - answered 2xx: exactly one row, with the digest of a body that was sent;
//! - a row: it was sent, and its digest is that of a body that was sent;
//! - never two rows;
//! - `done`: exactly one effect; otherwise none (until its targets have it, one that is open may have taken effect).
//!
//! Where another body under the same id is another event (`on_mismatch = "accept"`), each body is an event of its own.

use std::sync::Mutex;

use jiff::Timestamp;
use serde::Serialize;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Row, Transaction};

use super::Exit;
use super::fates::{Fate, Fates, Mark};
use super::lane::lock;
use super::plan::Plan;
use super::stage::bar;
use crate::commands::connect;
use crate::config::{self, Config};
use crate::db;
use crate::identify::Event;

const ROWS: &str = include_str!("../../../sql/queries/storm_rows.sql");
/// Rows that are read at once.
const PAGE: &str = "fetch forward 5000 from storm";
/// Breaches that are told; the others are counted.
const BREACHES_TOLD: usize = 20;

/// The database, asked before the load whether it can be read afterwards.
pub(super) struct Ledger<'c> {
    postgres: &'c config::Postgres,
    effects: Option<String>,
    /// The database's clock before the first request.
    since: Timestamp,
}

/// What was found.
#[derive(Debug, Default, Serialize)]
pub(super) struct Proof {
    pub(super) holds: bool,
    /// Events that were sent.
    pub(super) events: u64,
    /// Those of them that were answered 2xx at least once.
    pub(super) safe: u64,
    /// The others, by whether the ledger has them: both are right.
    pub(super) unsafe_with_row: u64,
    pub(super) unsafe_without_row: u64,
    pub(super) rows: u64,
    pub(super) done: u64,
    /// `None`: they were not asked for.
    pub(super) effects: Option<u64>,
    pub(super) breaches: u64,
    /// The first of them.
    pub(super) told: Vec<Breach>,
}

/// A rule that an event breaks.
#[derive(Debug, Serialize)]
pub(super) struct Breach {
    pub(super) id: String,
    pub(super) rule: &'static str,
}

fn said(error: &tokio_postgres::Error) -> Exit {
    Exit::unavailable(format!("the proof cannot be made: Postgres: {}", db::describe(error)))
}

fn no_proof(Exit { code, message }: Exit) -> Exit {
    Exit {
        code,
        message: format!("{message}\nwithout the database there is no proof; --no-proof does without"),
    }
}

impl<'c> Ledger<'c> {
    pub(super) async fn open(config: &'c Config, plan: &Plan, effects: Option<&str>) -> Result<Self, Exit> {
        let mut session = connect(&config.postgres).await.map_err(no_proof)?;
        db::check_migrations(&session).await.map_err(|error| no_proof(Exit::unavailable(error)))?;
        let effects = effects.map(|query| {
            let query = query.trim().trim_end_matches(';');
            format!(
                "select e.id::text as event_id, e.times::int8 as times from ({query}\n) as e (id, times) \
                 where position($1 in e.id::text) > 0"
            )
        });
        if let Some(query) = &effects {
            // A query that is wrong is said before the load, not after.
            let transaction = session.transaction().await.map_err(|error| said(&error))?;
            let prefix = plan.recipe.prefix();
            open_cursor(&transaction, query, &[(&prefix, Type::TEXT)])
                .await
                .map_err(|error| Exit::settings(format!("--effects: {}", db::describe(&error))))?;
        }
        let now = session.query_typed_one("select clock_timestamp()", &[]).await;
        let since = now.and_then(|row| row.try_get(0)).map_err(|error| said(&error))?;
        Ok(Self { postgres: &config.postgres, effects, since })
    }

    /// Reads what there is, and holds it against what was sent.
    ///
    /// # Errors
    /// The database cannot be read, exit code 69. That the proof does not hold is no error.
    pub(super) async fn prove(&self, plan: &Plan, fates: &Mutex<Fates>) -> Result<Proof, Exit> {
        let mut reading = Reading { plan, proof: Proof::default(), unit: None };
        // The load is over: nobody else wants it.
        let mut fates = std::mem::take(&mut *lock(fates));
        // A connection of its own: the load may have taken hours, and the database may have gone and come back.
        let mut session = connect(self.postgres).await?;
        let snapshot = session.build_transaction().read_only(true);
        let snapshot = snapshot.isolation_level(tokio_postgres::IsolationLevel::RepeatableRead).start();
        let snapshot = snapshot.await.map_err(|error| said(&error))?;
        // However large the ledger is, and however long its pages take here.
        let patient = "set local statement_timeout = 0; set local idle_in_transaction_session_timeout = 0";
        snapshot.batch_execute(patient).await.map_err(|error| said(&error))?;
        let (source, prefix) = (&*plan.recipe.source().name, plan.recipe.prefix());
        let parameters: [(&(dyn ToSql + Sync), Type); 3] =
            [(&self.since, Type::TIMESTAMPTZ), (&source, Type::TEXT), (&prefix, Type::TEXT)];
        open_cursor(&snapshot, ROWS, &parameters).await.map_err(|error| said(&error))?;
        let bar = bar("proof", fates.len());
        read_cursor(&snapshot, |row| {
            bar.inc(1);
            reading.row(&mut fates, row)
        })
        .await?;
        bar.finish_and_clear();
        if let Some(query) = &self.effects {
            reading.proof.effects = Some(0);
            let opened = open_cursor(&snapshot, query, &[(&prefix, Type::TEXT)]).await;
            opened.map_err(|error| said(&error))?;
            read_cursor(&snapshot, |row| reading.effect(&mut fates, row)).await?;
        }
        for (event, fate) in fates.iter() {
            reading.judge(event, fate)?;
        }
        reading.proof.holds = reading.proof.breaches == 0;
        Ok(reading.proof)
    }
}

/// One cursor at a time.
async fn open_cursor(
    transaction: &Transaction<'_>,
    query: &str,
    parameters: &[(&(dyn ToSql + Sync), Type)],
) -> Result<(), tokio_postgres::Error> {
    transaction
        .query_typed(&format!("declare storm no scroll cursor for {query}"), parameters)
        .await
        .map(drop)
}

async fn read_cursor(
    transaction: &Transaction<'_>,
    mut take: impl FnMut(&Row) -> Result<(), Exit>,
) -> Result<(), Exit> {
    loop {
        let rows = transaction.query_typed(PAGE, &[]).await.map_err(|error| said(&error))?;
        if rows.is_empty() {
            let closed = transaction.query_typed("close storm", &[]).await;
            return closed.map(drop).map_err(|error| said(&error));
        }
        rows.iter().try_for_each(&mut take)?;
    }
}

struct Reading<'a> {
    plan: &'a Plan,
    proof: Proof,
    /// The unit that was asked for last, with what its two bodies hold: rows of one batch stand together.
    unit: Option<(u64, [Vec<Event>; 2])>,
}

impl Reading<'_> {
    fn breach(&mut self, id: impl Into<String>, rule: &'static str) {
        self.proof.breaches += 1;
        if self.proof.told.len() < BREACHES_TOLD {
            self.proof.told.push(Breach { id: id.into(), rule });
        }
    }

    fn row(&mut self, fates: &mut Fates, row: &Row) -> Result<(), Exit> {
        let get = |name| row.try_get::<_, &str>(name).map_err(|error| said(&error));
        let (id, status) = (get("event_id")?, get("status")?);
        let digest: &[u8] = row.try_get("digest").map_err(|error| said(&error))?;
        self.proof.rows += 1;
        self.proof.done += u64::from(status == "done");
        let number = self.plan.recipe.number(id);
        let Some((event, fate)) = number.and_then(|event| Some((event, fates.get_mut(event)?))) else {
            self.breach(id, "the ledger has a row of an event that was not sent");
            return Ok(());
        };
        let fits = |expected: &Event| expected.id == id && expected.digest.0 == *digest;
        let bodies = self.bodies(event / self.plan.recipe.batch())?;
        let known = |variant: &usize| bodies.get(*variant).is_some_and(|events| events.iter().any(fits));
        // Where both bodies have one digest, it is that of the one that was sent.
        let of = [0, 1].into_iter().filter(known).max_by_key(|variant| fate.has(Mark::Sent(*variant)));
        let Some(variant) = of else {
            fate.add(Mark::Strange);
            self.breach(id, "the ledger has a row whose id and digest are of no body that was sent");
            return Ok(());
        };
        let is_second = fate.has(Mark::Row(variant))
            || fate.has(Mark::Strange)
            || (!self.plan.is_other_event && fate.count(Mark::Row) > 0);
        fate.add(Mark::Row(variant));
        match status {
            "done" => fate.add(Mark::Done(variant)),
            "open" | "dead" if self.plan.has_targets => fate.add(Mark::Busy),
            _ => {}
        }
        if is_second {
            self.breach(id, "the ledger has more than one row of the event");
        }
        Ok(())
    }

    fn bodies(&mut self, unit: u64) -> Result<&[Vec<Event>; 2], Exit> {
        if self.unit.as_ref().is_none_or(|(last, _)| *last != unit) {
            let recipe = &self.plan.recipe;
            self.unit = Some((unit, [recipe.expect(unit, 0)?, recipe.expect(unit, 1)?]));
        }
        let (_, bodies) = self.unit.as_ref().ok_or_else(|| Exit::software("no bodies"))?;
        Ok(bodies)
    }

    fn effect(&mut self, fates: &mut Fates, row: &Row) -> Result<(), Exit> {
        let id: &str = row.try_get("event_id").map_err(|error| said(&error))?;
        let times: Option<i64> = row.try_get("times").map_err(|error| said(&error))?;
        let times = u64::try_from(times.unwrap_or(0)).unwrap_or(0);
        if let Some(effects) = &mut self.proof.effects {
            *effects += times;
        }
        let Some(fate) = self.plan.recipe.number(id).and_then(|event| fates.get_mut(event)) else {
            self.breach(id, "an event took effect that was not sent");
            return Ok(());
        };
        for _ in 0..times.min(3) {
            match (fate.has(Mark::Effect), fate.has(Mark::Effects)) {
                (false, _) => fate.add(Mark::Effect),
                (true, false) => fate.add(Mark::Effects),
                (true, true) => {
                    self.breach(id, "it took effect more than twice");
                    break;
                }
            }
        }
        Ok(())
    }

    /// What can be said of an event only after all of it was read.
    fn judge(&mut self, event: u64, fate: Fate) -> Result<(), Exit> {
        let rows = fate.count(Mark::Row) + u32::from(fate.has(Mark::Strange));
        let (sent, safe) = (fate.count(Mark::Sent), fate.count(Mark::Safe));
        self.proof.events += u64::from(sent > 0);
        self.proof.safe += u64::from(safe > 0);
        if sent > 0 && safe == 0 {
            *(if rows > 0 { &mut self.proof.unsafe_with_row } else { &mut self.proof.unsafe_without_row }) +=
                1;
        }
        let broken = [self.broken_rows(fate, rows), self.broken_effects(fate)];
        for rule in broken.into_iter().flatten() {
            let id = self.id(event)?;
            self.breach(id, rule);
        }
        Ok(())
    }

    fn broken_rows(&self, fate: Fate, rows: u32) -> Option<&'static str> {
        let of_each = |variant: usize| fate.has(Mark::Safe(variant)) && !fate.has(Mark::Row(variant));
        let lacks = if self.plan.is_other_event {
            of_each(0) || of_each(1)
        } else {
            fate.count(Mark::Safe) > 0 && rows == 0
        };
        let unsent = |variant: usize| fate.has(Mark::Row(variant)) && !fate.has(Mark::Sent(variant));
        if lacks {
            Some("it was answered 2xx and the ledger has no row of it")
        } else if unsent(0) || unsent(1) {
            Some("the ledger has a row with a body that was not sent whole")
        } else {
            None
        }
    }

    fn broken_effects(&self, fate: Fate) -> Option<&'static str> {
        self.proof.effects?;
        let effects = u32::from(fate.has(Mark::Effect)) + u32::from(fate.has(Mark::Effects));
        let done = fate.count(Mark::Done);
        if effects < done {
            Some("it is done and took no effect")
        } else if effects > done + u32::from(fate.has(Mark::Busy)) {
            Some(if done > 0 { "it took effect more than once" } else { "it took effect and is not done" })
        } else {
            None
        }
    }

    fn id(&mut self, event: u64) -> Result<String, Exit> {
        let recipe = &self.plan.recipe;
        let events = recipe.expect(event / recipe.batch(), 0)?;
        let named = events.into_iter().find(|expected| recipe.number(&expected.id) == Some(event));
        Ok(named.map_or_else(|| event.to_string(), |named| named.id))
    }
}
