//! The statement for batches in which signed bytes have to be watched.
//!
//! Invariant: what is signed is claimed in the transaction of the event that brings it, so that neither a crash nor two
//! gateways at once leave room for a second event under the same signature.

use std::sync::LazyLock;

use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};

use super::batch::{Delivery, Outcome};
use super::statement;

/// Takes three parameters more than the plain one.
const RECORD: &str = include_str!("../../sql/queries/record_guarded.sql");

/// What those parameters are, one of each for each event.
pub(super) struct Guards<'d> {
    keys: Vec<Option<&'d [u8]>>,
    owners: Vec<Option<&'d [u8]>>,
    refuse: Vec<bool>,
}

impl<'d> Guards<'d> {
    /// `None` if there is nothing to watch.
    pub(super) fn of(deliveries: &[&'d Delivery]) -> Option<Self> {
        let guards = || deliveries.iter().map(|delivery| delivery.event.guard.as_ref());
        guards().any(|guard| guard.is_some()).then(|| Self {
            keys: guards().map(|guard| Some(guard?.key.as_slice())).collect(),
            owners: guards().map(|guard| Some(guard?.owner.as_slice())).collect(),
            refuse: guards().map(|guard| guard.is_some_and(|guard| guard.refuse)).collect(),
        })
    }

    pub(super) fn parameters(&self) -> [&(dyn ToSql + Sync); 3] {
        [&self.keys, &self.owners, &self.refuse]
    }
}

/// The statement, and the types of all its parameters.
pub(super) fn form(guards: Option<&Guards<'_>>) -> (&'static str, &'static [Type]) {
    match guards {
        None => (statement::RECORD, &statement::TYPES),
        Some(_) => (RECORD, &TYPES),
    }
}

static TYPES: LazyLock<Vec<Type>> = LazyLock::new(|| {
    let more = [Type::BYTEA_ARRAY, Type::BYTEA_ARRAY, Type::BOOL_ARRAY];
    statement::TYPES.iter().cloned().chain(more).collect()
});

/// Marks what is accepted although its signed bytes belong to another event; only this statement says it.
pub(super) fn mark<'o>(
    row: &Row,
    outcomes: impl Iterator<Item = &'o mut Outcome>,
) -> Result<(), tokio_postgres::Error> {
    const COLUMN: &str = "repeated";
    if !row.columns().iter().any(|column| column.name() == COLUMN) {
        return Ok(());
    }
    let flags: Vec<bool> = row.try_get(COLUMN)?;
    for (outcome, flag) in outcomes.zip(flags) {
        if let Outcome::Accepted { repeated } = outcome {
            *repeated = flag;
        }
    }
    Ok(())
}
