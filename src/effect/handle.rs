//! The transaction as an effect sees it.
//!
//! Invariant: whatever goes wrong in it is remembered, so that an effect that goes on as if nothing had happened fails
//! its event all the same. Never here: a way to the connection itself, several statements in one text.

use std::future::Future;

use tokio_postgres::error::Severity;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Error, Row};

use super::{EffectError, raised, statement};
use crate::db::Trouble;

/// What makes an event `rejected`.
const REJECTED: &str = "HX001";

/// The transaction of one event. It can be asked and written to; it is begun and ended by the gateway.
///
/// Each call takes one statement, which must not begin, end or divide a transaction, and waits for its answer. An error
/// from any of them fails the event, whatever the effect makes of it. So does dropping a call before its answer.
pub struct Handle<'a> {
    client: &'a Client,
    fault: Option<Fault>,
    unanswered: bool,
}

impl std::fmt::Debug for Handle<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handle").field("fault", &self.fault).finish_non_exhaustive()
    }
}

/// The first thing that went wrong in a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) kind: FaultKind,
    /// For the log.
    pub(crate) cause: String,
}

/// What a fault means for the event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FaultKind {
    /// The session has ended.
    Lost,
    /// A deadlock or a serialization failure: the same again may succeed.
    Transient,
    /// SQLSTATE `HX001`.
    Rejection,
    /// A statement failed because of what it says or of what is in the tables.
    Statement,
    /// Anything else: a lock, a time-out, a refused statement.
    Other,
}

impl Fault {
    /// A function can raise any SQLSTATE, also those that speak of the server; only the severity tells whether the session
    /// ended.
    pub(crate) fn of(error: &Error) -> Self {
        let Some(db) = error.as_db_error() else {
            let kind = if error.is_closed() { FaultKind::Lost } else { FaultKind::Other };
            return Self { kind, cause: crate::db::describe(error) };
        };
        let kind = match (db.parsed_severity(), db.code().code(), Trouble::of(error)) {
            (Some(Severity::Fatal | Severity::Panic), ..) => FaultKind::Lost,
            (_, REJECTED, _) => FaultKind::Rejection,
            (.., Trouble::Retry) => FaultKind::Transient,
            (.., Trouble::Statement) => FaultKind::Statement,
            (.., Trouble::Lost | Trouble::Locked | Trouble::Cancelled | Trouble::Resources) => {
                FaultKind::Other
            }
        };
        Self { kind, cause: raised(db.code().code(), db.message()) }
    }

    fn other(cause: impl Into<String>) -> Self {
        Self { kind: FaultKind::Other, cause: cause.into() }
    }
}

impl<'a> Handle<'a> {
    pub(crate) fn new(client: &'a Client) -> Self {
        Self { client, fault: None, unanswered: false }
    }

    /// Runs a statement; returns how many rows it inserted, updated, deleted or selected.
    ///
    /// # Errors
    /// What Postgres or the driver says, or why the statement is refused.
    pub async fn execute(
        &mut self,
        statement: &str,
        parameters: &[&(dyn ToSql + Sync)],
    ) -> Result<u64, EffectError> {
        self.ask(statement, self.client.execute(statement, parameters)).await
    }

    /// Runs a statement; returns all of its rows.
    ///
    /// # Errors
    /// As [`Self::execute`].
    pub async fn query(
        &mut self,
        statement: &str,
        parameters: &[&(dyn ToSql + Sync)],
    ) -> Result<Vec<Row>, EffectError> {
        self.ask(statement, self.client.query(statement, parameters)).await
    }

    /// Runs a statement that has exactly one row.
    ///
    /// # Errors
    /// As [`Self::execute`]; also if there are none or more.
    pub async fn query_one(
        &mut self,
        statement: &str,
        parameters: &[&(dyn ToSql + Sync)],
    ) -> Result<Row, EffectError> {
        self.ask(statement, self.client.query_one(statement, parameters)).await
    }

    /// Runs a statement that has one row or none.
    ///
    /// # Errors
    /// As [`Self::execute`]; also if there are more.
    pub async fn query_opt(
        &mut self,
        statement: &str,
        parameters: &[&(dyn ToSql + Sync)],
    ) -> Result<Option<Row>, EffectError> {
        self.ask(statement, self.client.query_opt(statement, parameters)).await
    }

    async fn ask<T>(
        &mut self,
        statement: &str,
        answer: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, EffectError> {
        self.admit(statement)?;
        self.unanswered = true;
        let answer = answer.await;
        self.unanswered = false;
        answer.map_err(|error| {
            self.note(Fault::of(&error));
            EffectError::from(error)
        })
    }

    /// Whether the statement may be sent: nothing went wrong before, and it leaves the transaction alone.
    fn admit(&mut self, statement: &str) -> Result<(), EffectError> {
        if let Some(fault) = self.fault() {
            return Err(EffectError::fail(format!("the transaction has failed already: {}", fault.cause)));
        }
        let Some(problem) = statement::problem(statement) else { return Ok(()) };
        self.note(Fault::other(problem.clone()));
        Err(EffectError::fail(problem))
    }

    /// The first fault is the cause; later ones follow from it.
    fn note(&mut self, fault: Fault) {
        self.fault.get_or_insert(fault);
    }

    /// The first thing that went wrong, if anything did.
    pub(crate) fn fault(&mut self) -> Option<Fault> {
        if self.unanswered {
            // Its answer may be an error that nobody will ever see.
            self.note(Fault::other("the effect dropped a statement before its answer"));
        }
        self.fault.clone()
    }

    /// Runs deferred constraints and triggers, so that an error of theirs is one of the effect.
    pub(crate) async fn run_deferred(&mut self) -> Result<(), EffectError> {
        self.execute("set constraints all immediate", &[]).await.map(drop)
    }
}
