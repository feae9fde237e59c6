//! The effects of parked events: tried again, each in a transaction that also ends its attempt.
//!
//! Invariant: the job's row is locked, with the token of the attempt, before the effect runs, and until the commit; so an
//! attempt whose lease ran out commits nothing, and no effect is committed twice. What goes wrong before an effect began, a lock
//! that somebody else has above all, is told apart from what may be because of it.

use std::sync::Arc;
use std::time::Duration;

use deadpool_postgres::{Object, Pool};
use futures_util::join;
use tokio::time::timeout;
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};

use super::batch::{BatchError, Unclean, Writer, failed};
use super::single::{Applied, apply};
use super::statement::{Todo, begin};
use crate::config::{self, Source};
use crate::db::Trouble;
use crate::effect::{Effect, Effects, Event, Fault, FaultKind, UnknownEffects, Verdict};
use crate::generation::Generation;
use crate::work::jobs::{Fate, Task, fates};

const LOCK: &str = include_str!("../../sql/queries/lock_parked.sql");
const RUN: &str = include_str!("../../sql/queries/run_parked.sql");
const BEGIN: &str = include_str!("../../sql/queries/begin_parked.sql");
const END: &str = include_str!("../../sql/queries/end_parked.sql");

const GROUP: &str = "select pg_advisory_xact_lock(hashtextextended($1, 0)) where $1 is not null";

/// How an attempt at an effect ended.
#[derive(Debug)]
pub(crate) struct Retried {
    /// What became of the event; `None` if the attempt is not ended yet.
    pub(crate) fate: Option<Fate>,
    /// As a metric's label.
    pub(crate) word: &'static str,
    /// Why it failed, or why the event is refused for good.
    pub(crate) cause: Option<String>,
}

/// Why attempts were not ended here. What was sent may still be committed after `Trouble::Lost`.
#[derive(Debug)]
pub(crate) struct Unended {
    pub(crate) trouble: Trouble,
    pub(crate) cause: String,
    /// An effect may have begun; if not, none had a part in it.
    pub(crate) begun: bool,
}

/// How attempts ended, in order, and the history in which they did.
pub(crate) type Tried = (Vec<Retried>, Option<Generation>);

/// Runs the parked effects of one source.
pub(crate) struct Parked {
    writer: Writer,
    statement_timeout: Duration,
}

impl Parked {
    pub(crate) fn new(
        pool: Pool,
        settings: &config::Postgres,
        source: &Source,
        effects: &Effects,
    ) -> Result<Self, UnknownEffects> {
        let writer = Writer::new(pool, settings, &source.effect, effects, None)?;
        Ok(Self { writer, statement_timeout: settings.statement_timeout })
    }

    /// Whether several can share a transaction.
    pub(crate) fn is_batched(&self) -> bool {
        self.writer.rust.is_none() && self.writer.is_batched()
    }

    /// Tries the effects of these events, in this order, and commits; `delays` are until the next attempts.
    ///
    /// Dropping it may leave the outcome unknown; the tokens decide.
    pub(crate) async fn run(
        &self,
        source: &Source,
        tasks: &[Task],
        delays: &[Duration],
    ) -> Result<Tried, Unended> {
        let mut begun = false;
        let tried = match (&self.writer.rust, tasks) {
            (None, _) => self.run_function(source, tasks, delays, &mut begun).await,
            (Some(effect), [task]) => {
                let tried = self.run_rust(effect, source, task, &mut begun).await;
                tried.map(|(retried, generation)| (vec![retried], generation))
            }
            (Some(_), _) => Err(unknown("a Rust effect has one event in a transaction")),
        };
        tried.map_err(|BatchError { trouble, cause }| Unended { trouble, cause, begun })
    }

    async fn run_function(
        &self,
        source: &Source,
        tasks: &[Task],
        delays: &[Duration],
        begun: &mut bool,
    ) -> Result<Tried, BatchError> {
        let client = self.writer.connection().await?;
        let attempt = self.transact(client.get()?, source, tasks, delays, begun);
        let answer = timeout(self.writer.commit_timeout, attempt).await;
        let row = client.committed(answer)?;
        read(&row, tasks.len()).map_err(|error| failed(&error))?.ok_or_else(|| unknown("hapax.run_parked"))
    }

    /// All of it leaves together. The locks are a statement of their own, so that waiting for them takes nothing from the
    /// effects' time; its answer is the sign that effects begin.
    async fn transact(
        &self,
        client: &Object,
        source: &Source,
        tasks: &[Task],
        delays: &[Duration],
        begun: &mut bool,
    ) -> Result<Row, BatchError> {
        let keys: Vec<&[u8]> = tasks.iter().map(|task| task.attempt.key.0.as_slice()).collect();
        let queues: Vec<&str> = tasks.iter().map(|task| &*task.attempt.queue).collect();
        let tokens: Vec<&str> = tasks.iter().map(|task| task.attempt.token.as_str()).collect();
        let delays: Vec<i64> = delays.iter().map(|delay| millis(*delay)).collect();
        let todo = Todo::of(tasks.iter().map(|task| Some((source, task.event_type.as_deref()))));
        let [job_at, job_queues, job_attempts] = todo.parameters();
        let budget = millis(self.statement_timeout / 2);
        let attempts: [(&(dyn ToSql + Sync), Type); 4] = [
            (&keys, Type::BYTEA_ARRAY),
            (&queues, Type::TEXT_ARRAY),
            (&tokens, Type::TEXT_ARRAY),
            (&self.writer.group, Type::TEXT),
        ];
        let parameters: [(&(dyn ToSql + Sync), Type); 11] = [
            (&keys, Type::BYTEA_ARRAY),
            (&queues, Type::TEXT_ARRAY),
            (&tokens, Type::TEXT_ARRAY),
            (&delays, Type::INT8_ARRAY),
            (&self.writer.function, Type::TEXT),
            (&self.writer.group, Type::TEXT),
            (&budget, Type::INT8),
            (&self.writer.commit_mode, Type::TEXT),
            (job_at, Type::INT4_ARRAY),
            (job_queues, Type::TEXT_ARRAY),
            (job_attempts, Type::INT4_ARRAY),
        ];
        let start = begin(self.statement_timeout);
        let lock = async {
            let locked = client.query_typed(LOCK, &attempts).await;
            *begun = locked.is_ok();
            locked
        };
        let (opened, locked, row, committed) = join!(
            client.batch_execute(&start),
            lock,
            client.query_typed_one(RUN, &parameters),
            client.batch_execute("commit"),
        );
        // After that, the others only say that the transaction has failed.
        locked.map_err(|error| failed(&error))?;
        let row = row.map_err(|error| failed(&error))?;
        opened.map_err(|error| failed(&error))?;
        committed.map_err(|error| failed(&error))?;
        Ok(row)
    }

    async fn run_rust(
        &self,
        effect: &Arc<dyn Effect>,
        source: &Source,
        task: &Task,
        begun: &mut bool,
    ) -> Result<(Retried, Option<Generation>), BatchError> {
        let still_open = |word, cause| Ok((Retried { fate: None, word, cause: Some(cause) }, None));
        let Some(event) = event_of(task) else { return still_open("gone", "its body is gone".to_owned()) };
        let client = self.writer.connection().await?;
        let transaction = timeout(self.writer.commit_timeout, self.open(client.get()?, task)).await;
        let Some(transaction) = transaction.unwrap_or_else(|_elapsed| Err(silent()))? else {
            return Ok((Retried { fate: Some(Fate::Lost), word: "lost", cause: None }, None));
        };
        *begun = true;
        let applied = apply(&**effect, &event, client.get()?, self.statement_timeout).await;
        let (result, cause) = match applied {
            Applied::Ended(Verdict::Done) => ("d", None),
            Applied::Ended(Verdict::Rejected(cause)) => ("r", Some(cause)),
            Applied::Ended(Verdict::Failed { cause, .. }) => {
                super::single::roll_back(&self.writer, client).await;
                return still_open("failed", cause);
            }
            Applied::Dropped(cause) => return still_open("failed", cause),
            Applied::Ended(Verdict::Lost(cause)) => {
                return Err(BatchError { trouble: Trouble::Lost, cause });
            }
        };
        self.close(client, source, task, &transaction, (result, cause)).await
    }

    /// BEGIN, the lock on the job, and a place to go back to.
    async fn open(&self, client: &Object, task: &Task) -> Result<Option<String>, BatchError> {
        let (key, attempt) = (task.attempt.key.0.as_slice(), &task.attempt);
        let parameters: [(&(dyn ToSql + Sync), Type); 3] =
            [(&key, Type::BYTEA), (&&*attempt.queue, Type::TEXT), (&attempt.token, Type::TEXT)];
        let start = begin(self.statement_timeout);
        let lock = self.writer.group.as_ref().map(|group| format!("hapax effect group {group}"));
        let grouped: [(&(dyn ToSql + Sync), Type); 1] = [(&lock, Type::TEXT)];
        let (begun, row, grouped, saved) = join!(
            client.batch_execute(&start),
            client.query_typed_one(BEGIN, &parameters),
            client.query_typed(GROUP, &grouped),
            client.batch_execute("savepoint hapax_effect"),
        );
        let row = row.map_err(|error| failed(&error))?;
        begun.map_err(|error| failed(&error))?;
        grouped.map_err(|error| failed(&error))?;
        saved.map_err(|error| failed(&error))?;
        row.try_get("transaction").map_err(|error| failed(&error))
    }

    /// The attempt's end and COMMIT leave together. What a refused effect did is undone first.
    async fn close(
        &self,
        client: Unclean,
        source: &Source,
        task: &Task,
        transaction: &str,
        (result, cause): (&'static str, Option<String>),
    ) -> Result<(Retried, Option<Generation>), BatchError> {
        let attempt = self.speak_last(client.get()?, source, task, transaction, (result, cause.as_deref()));
        let answer = timeout(self.writer.commit_timeout, attempt).await;
        let Some((fate, generation)) = client.committed(answer)? else {
            let cause = Some("a constraint failed at the end of the transaction".to_owned());
            return Ok((Retried { fate: None, word: "failed", cause }, None));
        };
        let word = if result == "d" { "done" } else { "rejected" };
        Ok((Retried { fate: Some(fate), word, cause }, generation))
    }

    /// `None` if the transaction turned out to have failed.
    async fn speak_last(
        &self,
        client: &Object,
        source: &Source,
        task: &Task,
        transaction: &str,
        (result, cause): (&str, Option<&str>),
    ) -> Result<Option<(Fate, Option<Generation>)>, BatchError> {
        let before = match result {
            "r" => "rollback to savepoint hapax_effect; reset session authorization",
            _ => "reset session authorization",
        };
        let (key, attempt) = (task.attempt.key.0.as_slice(), &task.attempt);
        let todo = Todo::of(std::iter::once(Some((source, task.event_type.as_deref()))));
        let [_, job_queues, job_attempts] = todo.parameters();
        let parameters: [(&(dyn ToSql + Sync), Type); 9] = [
            (&transaction, Type::TEXT),
            (&self.writer.commit_mode, Type::TEXT),
            (&key, Type::BYTEA),
            (&&*attempt.queue, Type::TEXT),
            (&attempt.token, Type::TEXT),
            (&result, Type::TEXT),
            (&cause, Type::TEXT),
            (job_queues, Type::TEXT_ARRAY),
            (job_attempts, Type::INT4_ARRAY),
        ];
        let (ready, row, committed) = join!(
            client.batch_execute(before),
            client.query_typed_one(END, &parameters),
            client.batch_execute("commit"),
        );
        let row = match row {
            Ok(row) => row,
            Err(error) if Fault::of(&error).kind == FaultKind::Lost || error.as_db_error().is_none() => {
                return Err(BatchError { trouble: Trouble::Lost, cause: Fault::of(&error).cause });
            }
            // COMMIT of a failed transaction is a silent ROLLBACK.
            Err(_) => return committed.map(|()| None).map_err(|error| failed(&error)),
        };
        ready.map_err(|error| failed(&error))?;
        committed.map_err(|error| failed(&error))?;
        let read = fates(&row, 1).map_err(|error| failed(&error))?;
        let one = read.and_then(|(fates, generation)| Some((fates.into_iter().next()?, generation)));
        one.map(Some).ok_or_else(|| unknown("hapax.end_parked"))
    }
}

fn read(row: &Row, expected: usize) -> Result<Option<Tried>, tokio_postgres::Error> {
    let letters: &str = row.try_get("outcomes")?;
    let messages: Vec<Option<String>> = row.try_get("messages")?;
    let Some((fates, generation)) = fates(row, expected)? else { return Ok(None) };
    let words = letters.chars().map(|letter| match letter {
        'd' => Some("done"),
        'r' => Some("rejected"),
        'f' => Some("failed"),
        'x' => Some("gone"),
        'b' => Some("not_tried"),
        _ => None,
    });
    let retried = fates.into_iter().zip(words).zip(messages);
    let retried = retried.map(|((fate, word), cause)| Some(Retried { fate: Some(fate), word: word?, cause }));
    Ok(retried.collect::<Option<Vec<_>>>().map(|retried| (retried, generation)))
}

fn event_of(task: &Task) -> Option<Event<'_>> {
    let content = task.content.as_ref()?;
    Some(Event {
        source: &task.source,
        scope: &task.scope,
        event_id: &task.event_id,
        event_type: task.event_type.as_deref(),
        key: &task.attempt.key.0,
        item: task.item,
        digest: &task.digest,
        body: &content.bytes,
        headers: &content.headers,
        received_at: task.received_at,
        provider_time: task.provider_time,
        attempt: task.number,
        replay: task.replay,
    })
}

fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

fn silent() -> BatchError {
    BatchError { trouble: Trouble::Lost, cause: "no answer within commit_timeout".to_owned() }
}

fn unknown(what: &str) -> BatchError {
    let cause = format!("{what} answered in a form that this version does not know");
    BatchError { trouble: Trouble::Statement, cause }
}
