//! `hapax.record` as a statement: what it is given, and what its answer means.
//!
//! Invariant: an answer in words that are not known here is an error, never a guess.

use std::time::Duration;

use deadpool_postgres::Object;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Row, Statement};

use super::batch::{BatchError, Delivery, Mode, Outcome, Writer, Written, failed};
use super::{Standing, guarded};
use crate::config::Source;
use crate::db::Trouble;
use crate::effect;
use crate::generation::Generation;
use crate::identify::{Digest, Event};

pub(super) const RECORD: &str = include_str!("../../sql/queries/record.sql");

/// One column for each property of the events, and how they are to be recorded.
pub(super) struct Arguments<'a> {
    keys: Vec<&'a [u8]>,
    tokens: Vec<i64>,
    digests: Vec<&'a [u8]>,
    sources: Vec<&'a str>,
    scopes: Vec<&'a str>,
    ids: Vec<&'a str>,
    types: Vec<Option<&'a str>>,
    times: Vec<Option<jiff::Timestamp>>,
    headers: Vec<&'a str>,
    bodies: Vec<&'a [u8]>,
    items: Vec<Option<i32>>,
    unidentified: Vec<bool>,
    locks: Vec<Option<String>>,
    careful: &'a [bool],
    effect: Option<&'a str>,
    group: Option<&'a str>,
    one_by_one: bool,
    lock_timeout: String,
    commit_mode: &'a str,
    effect_budget_ms: i64,
    effect_follows: bool,
    todo: Todo,
    parks: Vec<Option<i32>>,
    faults: Vec<Option<&'a str>>,
}

/// What is left to do of accepted events, one of each for each job.
#[derive(Default)]
pub(crate) struct Todo {
    /// The place of its event, from 1.
    at: Vec<i32>,
    queues: Vec<String>,
    attempts: Vec<i32>,
}

impl Todo {
    /// Of events of these sources and types, in order; nothing is left to do of `None`.
    pub(crate) fn of<'a>(events: impl Iterator<Item = Option<(&'a Source, Option<&'a str>)>>) -> Self {
        let mut todo = Self::default();
        for (event, at) in events.zip(1..) {
            let Some((source, event_type)) = event else { continue };
            for job in source.jobs(event_type) {
                todo.at.push(at);
                todo.queues.push(job.queue);
                todo.attempts.push(attempts(job.attempts_max));
            }
        }
        todo
    }

    pub(crate) fn parameters(&self) -> [&(dyn ToSql + Sync); 3] {
        [&self.at, &self.queues, &self.attempts]
    }
}

impl<'a> Arguments<'a> {
    pub(super) fn of(
        writer: &'a Writer,
        deliveries: &'a [&'a Delivery],
        careful: &'a [bool],
        mode: Mode,
    ) -> Self {
        let events = || deliveries.iter().map(|delivery| &*delivery.event);
        Self {
            keys: events().map(|event| event.key.0.as_slice()).collect(),
            tokens: deliveries.iter().map(|delivery| delivery.token).collect(),
            digests: events().map(|event| event.digest.0.as_slice()).collect(),
            sources: deliveries.iter().map(|delivery| &*delivery.source.name).collect(),
            scopes: events().map(|event| &*event.scope).collect(),
            ids: events().map(|event| event.id.as_str()).collect(),
            types: events().map(|event| event.event_type.as_deref()).collect(),
            times: events().map(|event| event.provider_time).collect(),
            headers: events().map(|event| &*event.headers).collect(),
            bodies: events().map(|event| event.body.as_ref()).collect(),
            items: events().map(item_of).collect(),
            unidentified: events().map(|event| !event.identified).collect(),
            locks: deliveries.iter().map(|delivery| delivery.lock()).collect(),
            careful,
            effect: writer.function.as_deref(),
            group: writer.group.as_deref(),
            one_by_one: mode.one_by_one,
            lock_timeout: format!("{}ms", mode.lock_timeout.as_millis()),
            commit_mode: writer.commit_mode,
            effect_budget_ms: i64::try_from(mode.statement_timeout.as_millis() / 2).unwrap_or(i64::MAX),
            effect_follows: false,
            todo: Todo::of(deliveries.iter().map(|delivery| delivery.routed())),
            parks: deliveries.iter().map(|delivery| delivery.parks()).collect(),
            faults: deliveries.iter().map(|delivery| delivery.fault.as_deref()).collect(),
        }
    }

    /// The caller runs the effect itself, after this statement and before the commit.
    pub(super) fn effect_follows(self) -> Self {
        Self { effect_follows: true, ..self }
    }

    pub(super) fn parameters(&self) -> [&(dyn ToSql + Sync); 26] {
        let [job_at, job_queues, job_attempts] = self.todo.parameters();
        [
            &self.keys,
            &self.tokens,
            &self.digests,
            &self.sources,
            &self.scopes,
            &self.ids,
            &self.types,
            &self.times,
            &self.headers,
            &self.bodies,
            &self.items,
            &self.unidentified,
            &self.locks,
            &self.careful,
            &self.effect,
            &self.group,
            &self.one_by_one,
            &self.lock_timeout,
            &self.commit_mode,
            &self.effect_budget_ms,
            &self.effect_follows,
            job_at,
            job_queues,
            job_attempts,
            &self.parks,
            &self.faults,
        ]
    }
}

/// How often something may be tried, as Postgres counts.
pub(super) fn attempts(count: u32) -> i32 {
    count.try_into().unwrap_or(i32::MAX)
}

/// Its place in a batch, as Postgres counts.
pub(super) fn item_of(event: &Event) -> Option<i32> {
    event.item.and_then(|item| item.try_into().ok())
}

/// Sends the batch when first polled. Where it is a transaction by itself, `Ok` means that it is committed: the driver ends the
/// rows when the server is ready for the next statement, which it says after the commit.
pub(super) async fn call(
    client: &Object,
    statement: Option<&Statement>,
    (text, types): (&str, &[Type]),
    parameters: &[&(dyn ToSql + Sync)],
) -> Result<Row, tokio_postgres::Error> {
    if let Some(statement) = statement {
        return client.query_one(statement, parameters).await;
    }
    let parameters: Vec<_> = parameters.iter().copied().zip(types.iter().cloned()).collect();
    client.query_typed_one(text, &parameters).await
}

/// Time-outs are set inside the transaction, since a transaction-pooling proxy drops session settings. What an effect
/// of an earlier batch may have left in the session is undone first. A backend whose gateway is gone looks at its socket
/// once a second, so that an effect that will not end ends with it.
pub(super) fn begin(statement_timeout: Duration) -> String {
    let ms = statement_timeout.as_millis();
    format!(
        "begin isolation level read committed, read write; reset session authorization; reset all; \
         select pg_advisory_unlock_all(); set local client_connection_check_interval = '1s'; \
         set local statement_timeout = '{ms}ms'; set local idle_in_transaction_session_timeout = '{ms}ms'"
    )
}

/// Of the parameters of `sql/queries/record.sql`, in order.
pub static TYPES: [Type; 26] = [
    Type::BYTEA_ARRAY,
    Type::INT8_ARRAY,
    Type::BYTEA_ARRAY,
    Type::TEXT_ARRAY,
    Type::TEXT_ARRAY,
    Type::TEXT_ARRAY,
    Type::TEXT_ARRAY,
    Type::TIMESTAMPTZ_ARRAY,
    Type::TEXT_ARRAY,
    Type::BYTEA_ARRAY,
    Type::INT4_ARRAY,
    Type::BOOL_ARRAY,
    Type::TEXT_ARRAY,
    Type::BOOL_ARRAY,
    Type::TEXT,
    Type::TEXT,
    Type::BOOL,
    Type::TEXT,
    Type::TEXT,
    Type::INT8,
    Type::BOOL,
    Type::INT4_ARRAY,
    Type::TEXT_ARRAY,
    Type::INT4_ARRAY,
    Type::INT4_ARRAY,
    Type::TEXT_ARRAY,
];

pub(super) fn written(row: &Row, expected: usize) -> Result<Written, BatchError> {
    match read(row).map_err(|error| failed(&error))? {
        Some(written) if written.outcomes.len() == expected => Ok(written),
        _ => Err(unknown("hapax.record")),
    }
}

/// The generation that `hapax.close` returns.
pub(super) fn closed_in(row: &Row) -> Result<Generation, BatchError> {
    let bytes = row.try_get("generation").map_err(|error| failed(&error))?;
    Generation::from_bytes(bytes).ok_or_else(|| unknown("hapax.close"))
}

/// Committed, but in words of another version; nobody may guess what they mean.
fn unknown(function: &str) -> BatchError {
    let cause = format!("{function} answered in a form that this version does not know");
    BatchError { trouble: Trouble::Statement, cause }
}

fn read(row: &Row) -> Result<Option<Written>, tokio_postgres::Error> {
    let generation = Generation::from_bytes(row.try_get("generation")?);
    let letters: &str = row.try_get("outcomes")?;
    let digests: Vec<Option<&[u8]>> = row.try_get("row_digests")?;
    let statuses: Vec<Option<&str>> = row.try_get("row_statuses")?;
    let sqlstates: Vec<Option<&str>> = row.try_get("sqlstates")?;
    let messages: Vec<Option<&str>> = row.try_get("messages")?;
    let rows = letters.chars().zip(digests).zip(statuses).zip(sqlstates.into_iter().zip(messages));
    let outcomes = rows.map(|(((letter, digest), status), raised)| match (letter, digest, status, raised) {
        ('r', _, _, (_, message)) => Some(Outcome::Rejected { message: message.map(str::to_owned) }),
        ('o', _, Some("rejected"), _) => Some(Outcome::Rejected { message: None }),
        ('o', _, Some("failed"), _) => Some(Outcome::Parked { cause: None }),
        ('a' | 'o', ..) => Some(Outcome::Accepted { repeated: false }),
        ('p', _, _, (sqlstate, Some(message))) => {
            let cause = sqlstate.map_or_else(|| message.to_owned(), |state| effect::raised(state, message));
            Some(Outcome::Parked { cause: Some(cause) })
        }
        ('g', ..) => Some(Outcome::Repeated),
        ('d', Some(digest), Some(status), _) => {
            let digest = Digest(digest.try_into().ok()?);
            Some(Outcome::Known { digest, standing: Standing::read(status)? })
        }
        ('f', _, _, (Some(sqlstate), Some(message))) => {
            let transient = sqlstate == "40001" || sqlstate == "40P01";
            Some(Outcome::Failed { cause: effect::raised(sqlstate, message), transient })
        }
        ('l', ..) => Some(Outcome::Locked),
        ('n', ..) => Some(Outcome::NotTried),
        _ => None,
    });
    let mut outcomes: Option<Vec<Outcome>> = outcomes.collect();
    guarded::mark(row, outcomes.iter_mut().flatten())?;
    Ok(generation.zip(outcomes).map(|(generation, outcomes)| Written { generation, outcomes }))
}
