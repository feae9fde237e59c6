//! One event with a Rust effect, one transaction: the event's row, the effect, the commit.
//!
//! Invariant: after an effect, COMMIT is sent only together with our own last words, which fail unless the transaction is
//! the one that wrote the event's row. Until then nothing can be committed, so a connection may be dropped at any point.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use deadpool_postgres::Object;
use futures_util::{FutureExt as _, join};
use jiff::Timestamp;
use tokio::time::timeout;
use tokio_postgres::types::{ToSql, Type};

use super::batch::{BatchError, Delivery, Mode, Outcome, Unclean, Writer, Written, failed};
use super::guarded::{self, Guards};
use super::statement::{Arguments, begin, call, closed_in, item_of, written};
use crate::db::Trouble;
use crate::effect::{Effect, Event, Fault, FaultKind, Handle, Verdict};

const CLOSE: &str = include_str!("../../sql/queries/close.sql");
/// What an effect wrote is undone by going back to here; the event's row stays.
const SAVEPOINT: &str = "savepoint hapax_effect";

/// A lock of the session is the only thing that an effect can leave behind then.
const ROLL_BACK: &str = "rollback; select pg_advisory_unlock_all()";

/// A transaction in which the event was recorded.
struct Opened {
    written: Written,
    /// The event is new, so its effect is to run.
    is_new: bool,
    /// Its signed bytes belong to another event, and that is to be reported.
    repeated: bool,
    received_at: Timestamp,
    /// Names the transaction.
    transaction: Option<String>,
}

impl Opened {
    fn ended(&self, outcome: Outcome) -> Written {
        Written { generation: self.written.generation, outcomes: vec![outcome] }
    }
}

/// Records the event, runs its effect if it is new, and commits.
///
/// Dropping it ends the connection: nothing is committed, or, once the commit was sent, nobody knows.
pub(super) async fn write(
    writer: &Writer,
    effect: &dyn Effect,
    deliveries: &[&Delivery],
    mode: Mode,
) -> Result<Written, BatchError> {
    let [delivery] = deliveries else {
        let cause = "a Rust effect has one event in a transaction".to_owned();
        return Err(BatchError { trouble: Trouble::Statement, cause });
    };
    // Always in a subtransaction, so that a locked row is an outcome and not an error.
    let mode = Mode { one_by_one: true, ..mode };
    let client = writer.connection().await?;
    let opened = timeout(writer.commit_timeout, open(writer, client.get()?, delivery, mode)).await;
    let opened = opened.unwrap_or_else(|_elapsed| Err(lost("no answer within commit_timeout")))?;
    if !opened.is_new {
        let commit = commit(client.get()?, opened.written);
        let answer = timeout(writer.commit_timeout, commit).await;
        return client.committed(answer);
    }
    let event = event_of(delivery, opened.received_at);
    let outcome = match apply(effect, &event, client.get()?, mode.statement_timeout).await {
        Applied::Dropped(cause) => Outcome::Failed { cause, transient: false },
        Applied::Ended(Verdict::Lost(cause)) => return Err(lost(&cause)),
        Applied::Ended(Verdict::Failed { cause, transient }) => {
            roll_back(writer, client).await;
            Outcome::Failed { cause, transient }
        }
        Applied::Ended(Verdict::Done) => return close(writer, client, delivery, &opened, None).await,
        Applied::Ended(Verdict::Rejected(cause)) => {
            return close(writer, client, delivery, &opened, Some(cause)).await;
        }
    };
    Ok(opened.ended(outcome))
}

/// BEGIN, the event's row and body, and a place to go back to; all in one round trip.
async fn open(
    writer: &Writer,
    client: &Object,
    delivery: &Delivery,
    mode: Mode,
) -> Result<Opened, BatchError> {
    let deliveries = [delivery];
    let guards = Guards::of(&deliveries);
    let form = guarded::form(guards.as_ref());
    let statement = writer.prepare(client, form).await.map_err(|error| failed(&error))?;
    let arguments = Arguments::of(writer, &deliveries, &[false], mode);
    let identified = delivery.event.identified;
    // Whoever has no id of its own is given to no effect.
    let arguments = if identified { arguments.effect_follows() } else { arguments };
    let parameters: Vec<_> =
        arguments.parameters().into_iter().chain(guards.iter().flat_map(Guards::parameters)).collect();
    let start = begin(mode.statement_timeout);
    let (begun, row, saved) = join!(
        client.batch_execute(&start),
        call(client, statement.as_ref(), form, &parameters),
        client.batch_execute(SAVEPOINT),
    );
    let row = row.map_err(|error| failed(&error))?;
    begun.map_err(|error| failed(&error))?;
    saved.map_err(|error| failed(&error))?;
    let accepted = row.try_get::<_, &str>("outcomes").map_err(|error| failed(&error))? == "a";
    let written = written(&row, 1)?;
    Ok(Opened {
        repeated: matches!(written.outcomes.as_slice(), [Outcome::Accepted { repeated: true }]),
        written,
        is_new: accepted && identified,
        received_at: row.try_get("received_at").map_err(|error| failed(&error))?,
        transaction: row.try_get("transaction").map_err(|error| failed(&error))?,
    })
}

/// Of an event that gets no effect; the recording statement has had the last words.
async fn commit(client: &Object, written: Written) -> Result<Written, BatchError> {
    client.batch_execute("commit").await.map_err(|error| failed(&error))?;
    Ok(written)
}

fn event_of(delivery: &Delivery, received_at: Timestamp) -> Event<'_> {
    let event = &*delivery.event;
    Event {
        source: &delivery.source.name,
        scope: &event.scope,
        event_id: &event.id,
        event_type: event.event_type.as_deref(),
        key: &event.key.0,
        item: item_of(event),
        digest: &event.digest.0,
        body: &event.body,
        headers: &event.headers,
        received_at,
        provider_time: event.provider_time,
        attempt: 1,
        replay: 0,
    }
}

/// How an effect ended.
pub(super) enum Applied {
    Ended(Verdict),
    /// In the middle of something: nobody knows what its connection is about to say.
    Dropped(String),
}

/// Runs the effect, for at most `limit`, and then what it left to the end of the transaction.
pub(super) async fn apply(
    effect: &dyn Effect,
    event: &Event<'_>,
    client: &Object,
    limit: Duration,
) -> Applied {
    let mut handle = Handle::new(client);
    let work = async {
        effect.apply(event, &mut handle).await?;
        if handle.fault().is_none() { handle.run_deferred().await } else { Ok(()) }
    };
    match timeout(limit, AssertUnwindSafe(work).catch_unwind()).await {
        Ok(Ok(answer)) => Applied::Ended(Verdict::of(handle.fault(), answer)),
        // Its message may quote the body.
        Ok(Err(_panic)) => Applied::Dropped("the effect panicked; standard error has its message".to_owned()),
        Err(_elapsed) => {
            Applied::Dropped(format!("the effect did not end within {limit:?} (postgres.statement_timeout)"))
        }
    }
}

/// Our last words and COMMIT leave together. With `rejected`, all that the effect did is undone first.
async fn close(
    writer: &Writer,
    client: Unclean,
    delivery: &Delivery,
    opened: &Opened,
    rejected: Option<String>,
) -> Result<Written, BatchError> {
    let attempt = speak_last(writer, client.get()?, delivery, opened, rejected);
    let answer = timeout(writer.commit_timeout, attempt).await;
    client.committed(answer)
}

async fn speak_last(
    writer: &Writer,
    client: &Object,
    delivery: &Delivery,
    opened: &Opened,
    rejected: Option<String>,
) -> Result<Written, BatchError> {
    let key = rejected.is_some().then_some(delivery.event.key.0.as_slice());
    // Not as whoever the effect has become.
    let before = match rejected {
        Some(_) => "rollback to savepoint hapax_effect; reset session authorization",
        None => "reset session authorization",
    };
    let parameters: [(&(dyn ToSql + Sync), Type); 3] =
        [(&opened.transaction, Type::TEXT), (&writer.commit_mode, Type::TEXT), (&key, Type::BYTEA)];
    let (ready, row, committed) = join!(
        client.batch_execute(before),
        client.query_typed_one(CLOSE, &parameters),
        client.batch_execute("commit"),
    );
    let row = match row {
        Ok(row) => row,
        Err(error) => {
            // COMMIT of a failed transaction is a silent ROLLBACK; without the server's word nobody knows.
            let Fault { kind, cause } = Fault::of(&error);
            if kind == FaultKind::Lost || error.as_db_error().is_none() {
                return Err(lost(&cause));
            }
            committed.map_err(|error| failed(&error))?;
            return Ok(opened.ended(Outcome::Failed { cause, transient: kind == FaultKind::Transient }));
        }
    };
    ready.map_err(|error| failed(&error))?;
    committed.map_err(|error| failed(&error))?;
    let outcome = match rejected {
        Some(cause) => Outcome::Rejected { message: Some(cause) },
        None => Outcome::Accepted { repeated: opened.repeated },
    };
    Ok(Written { generation: closed_in(&row)?, outcomes: vec![outcome] })
}

/// A connection that does not roll back is dropped, which does the same.
pub(super) async fn roll_back(writer: &Writer, client: Unclean) {
    let Ok(object) = client.get() else { return };
    if let Ok(Ok(())) = timeout(writer.commit_timeout, object.batch_execute(ROLL_BACK)).await {
        client.give_back();
    }
}

fn lost(cause: &str) -> BatchError {
    BatchError { trouble: Trouble::Lost, cause: cause.to_owned() }
}
