//! One batch, one transaction, one round trip.

use std::sync::Arc;
use std::time::{Duration, Instant};

use deadpool_postgres::{Object, Pool, PoolError};
use futures_util::join;
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Row, Statement};
use tracing::warn;

use super::guarded::{self, Guards};
use super::{RecordError, Recorded};
use crate::config::{self, Effect, Source};
use crate::db::{self, Trouble};
use crate::error::{Code, Dependency};
use crate::generation::Generation;
use crate::identify::{Digest, Event};

/// Attempts at one event whose effect meets deadlocks or serialization failures.
pub(super) const ATTEMPTS_MAX: u32 = 5;
/// Pauses between attempts while Postgres is away.
const PAUSE: std::ops::RangeInclusive<Duration> = Duration::from_millis(10)..=Duration::from_millis(500);

/// Growing pauses with jitter.
pub(super) struct Pauses(Duration);

impl Default for Pauses {
    fn default() -> Self {
        Self(*PAUSE.start())
    }
}

impl Pauses {
    pub(super) async fn next(&mut self) {
        tokio::time::sleep(self.0.mul_f64(0.5 + rand::random::<f64>() / 2.0)).await;
        self.0 = (self.0 * 2).min(*PAUSE.end());
    }
}

/// What a waiting delivery gets.
pub(super) type Reply = Result<Recorded, RecordError>;

/// What a delivery gets from the batch that it shared.
pub(super) enum Shared {
    Reply(Reply),
    /// To be written by itself: its row is locked, or its batch cannot be written, and nobody knows because of whom.
    Alone,
}

/// One event on its way into Postgres.
#[derive(Debug, Clone)]
pub(super) struct Delivery {
    pub(super) source: Arc<Source>,
    pub(super) event: Arc<Event>,
    /// Random, and the same over all attempts: tells our own earlier commit from somebody else's.
    pub(super) token: i64,
    pub(super) deadline: Instant,
}

impl Delivery {
    /// What its effect locks, as the source declares it.
    fn lock(&self) -> Option<String> {
        self.source.lock.as_ref()?.value(&self.event.body)
    }
}

/// A delivery in a lane's queue, and who waits for it.
pub(super) struct Job {
    pub(super) delivery: Delivery,
    pub(super) attempts: u32,
    /// Its source's effect failed a short while ago.
    pub(super) careful: bool,
    reply: oneshot::Sender<Shared>,
    _bytes: OwnedSemaphorePermit,
}

impl Job {
    pub(super) fn new(delivery: &Delivery, bytes: OwnedSemaphorePermit) -> (Self, oneshot::Receiver<Shared>) {
        let (reply, receiver) = oneshot::channel();
        let job = Self { delivery: delivery.clone(), attempts: 0, careful: false, reply, _bytes: bytes };
        (job, receiver)
    }

    pub(super) fn bytes(&self) -> usize {
        self.delivery.event.body.len() + self.delivery.event.headers.len()
    }

    /// Nobody waits for it any more: its delivery has been answered 503.
    pub(super) fn is_abandoned(&self, now: Instant) -> bool {
        self.reply.is_closed() || self.delivery.deadline <= now
    }

    pub(super) fn answer(self, reply: Shared) {
        // A receiver that is gone has been answered already.
        drop(self.reply.send(reply));
    }
}

/// What became of one event of a batch whose commit is confirmed.
#[derive(Debug)]
pub(super) enum Outcome {
    /// What is signed may be another event's, where that is only reported.
    Accepted {
        repeated: bool,
    },
    /// What is signed is another event's.
    Repeated,
    /// With what the effect said, unless an earlier attempt of ours has committed it.
    Rejected {
        message: Option<String>,
    },
    Known(Digest),
    Failed {
        sqlstate: String,
        message: String,
    },
    Locked,
    NotTried,
}

/// What an effect raised, for the log. Messages about data ("invalid input syntax for type integer: …") quote the body,
/// which must not be there.
pub(super) fn tell(sqlstate: &str, message: &str) -> String {
    match sqlstate.get(..2) {
        Some("22") => {
            format!("a data exception in the effect; its text may quote the body (SQLSTATE {sqlstate})")
        }
        _ => format!("{message} (SQLSTATE {sqlstate})"),
    }
}

impl Outcome {
    /// An event that its effect refused is answered like any other; only the log says why.
    pub(super) fn report(&self, delivery: &Delivery) {
        if let Self::Rejected { message: Some(message) } = self {
            let (source, id) = (&*delivery.source.name, delivery.event.id.escape_debug());
            warn!(source, event.id = %id, cause = message, "an effect refused an event for good");
        }
    }

    /// The effect met a serialization failure or a deadlock: the same again may succeed.
    pub(super) fn is_transient(&self) -> bool {
        matches!(self, Self::Failed { sqlstate, .. } if sqlstate == "40001" || sqlstate == "40P01")
    }
}

/// A batch whose commit is confirmed: one outcome per job, in order.
pub(super) struct Written {
    pub(super) generation: Generation,
    pub(super) outcomes: Vec<Outcome>,
}

/// A batch of which nothing is known to be committed.
#[derive(Debug)]
pub(super) struct BatchError {
    pub(super) trouble: Trouble,
    pub(super) cause: String,
}

impl BatchError {
    /// As seen by each event of the batch.
    pub(super) fn for_event(&self) -> RecordError {
        let code = match self.trouble {
            Trouble::Lost => Code::CommitUnknown,
            Trouble::Cancelled => Code::RecordTimeout,
            // Locked: not the event's row, which has an outcome of its own, but a whole table.
            Trouble::Locked | Trouble::Retry | Trouble::Resources | Trouble::Statement => {
                Code::PostgresUnavailable
            }
        };
        RecordError::new(code, Dependency::Postgres, self.cause.clone())
    }
}

/// How a batch is to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Mode {
    /// Each event in a subtransaction of its own, so that a culprit fails alone.
    pub(super) one_by_one: bool,
    /// How long to wait for a ledger row that somebody else is writing.
    pub(super) lock_timeout: Duration,
    /// How long the whole may take. Effects that are tried one by one start in its first half only, so that the
    /// time-out meets one that is slow itself.
    pub(super) statement_timeout: Duration,
}

/// Writes batches for one effect.
pub(super) struct Writer {
    pool: Pool,
    effect: Option<String>,
    group: Option<String>,
    batched: bool,
    commit_timeout: Duration,
    commit_mode: &'static str,
    /// Whether a transaction-pooling proxy stands between.
    pooler: bool,
}

const RECORD: &str = include_str!("../../sql/queries/record.sql");

impl Writer {
    pub(super) fn new(pool: Pool, settings: &config::Postgres, effect: &Effect) -> Self {
        let (effect, group, batched) = match effect {
            Effect::None => (None, None, true),
            Effect::Function { name, group, batched } => (Some(name.clone()), group.clone(), *batched),
        };
        Self {
            pool,
            effect,
            group,
            batched,
            commit_timeout: settings.commit_timeout,
            commit_mode: settings.synchronous_commit.as_str(),
            pooler: settings.transaction_pooler,
        }
    }

    /// Opens a connection and prepares the statement, so that the first event does not wait for it. Fails silently:
    /// whoever needs a connection later will say what is wrong.
    pub(super) async fn warm_up(&self) {
        if let Ok(client) = self.pool.get().await {
            drop(self.prepare(&client, (RECORD, &TYPES)).await);
        }
    }

    /// The statement by its name on the server; none where the next session may not know the name.
    async fn prepare(
        &self,
        client: &Object,
        (text, types): (&str, &[Type]),
    ) -> Result<Option<Statement>, tokio_postgres::Error> {
        if self.pooler {
            return Ok(None);
        }
        client.prepare_typed_cached(text, types).await.map(Some)
    }

    /// Whether its batches take the effect group's lock, so that two at once would only wait for each other.
    pub(super) fn runs_in_order(&self) -> bool {
        self.group.is_some()
    }

    /// Whether several events may share a transaction.
    pub(super) fn is_batched(&self) -> bool {
        self.batched
    }

    pub(super) fn has_effect(&self) -> bool {
        self.effect.is_some()
    }

    /// Writes and commits; `Ok` means that the server confirmed the commit of a transaction that ran to its end.
    ///
    /// Not to be cancelled while work is under way unless the outcome may stay unknown: the connection is then
    /// dropped, never reused.
    pub(super) async fn write(
        &self,
        deliveries: &[&Delivery],
        careful: &[bool],
        mode: Mode,
    ) -> Result<Written, BatchError> {
        let client = self.pool.get().await.map_err(|error| no_connection(&error))?;
        // From here until the answer is in, the connection belongs to this attempt alone: whatever ends the
        // attempt early takes the connection out of the pool with it.
        let client = Unclean(Some(client));
        let attempt = self.transact(&client, deliveries, careful, mode);
        match tokio::time::timeout(self.commit_timeout, attempt).await {
            Ok(Ok(written)) => {
                client.give_back();
                Ok(written)
            }
            Ok(Err(error)) => Err(error),
            Err(_elapsed) => {
                client.outlast();
                Err(BatchError {
                    trouble: Trouble::Lost,
                    cause: "no answer within commit_timeout".to_owned(),
                })
            }
        }
    }

    /// BEGIN, the batch and COMMIT leave together, so that a dying gateway leaves no open transaction behind.
    async fn transact(
        &self,
        client: &Unclean,
        deliveries: &[&Delivery],
        careful: &[bool],
        mode: Mode,
    ) -> Result<Written, BatchError> {
        let client = client.get()?;
        // Before the three below: they have to leave in this order, each when it is first polled.
        let guards = Guards::of(deliveries);
        let (text, signature) = match &guards {
            None => (RECORD, TYPES.to_vec()),
            Some(_) => (guarded::RECORD, guarded::types()),
        };
        let statement = self.prepare(client, (text, &signature)).await.map_err(|error| failed(&error))?;
        let events = || deliveries.iter().map(|delivery| &delivery.event);
        let headers: Vec<&str> = events().map(|event| &*event.headers).collect();
        let keys: Vec<&[u8]> = events().map(|event| event.key.0.as_slice()).collect();
        let tokens: Vec<i64> = deliveries.iter().map(|delivery| delivery.token).collect();
        let digests: Vec<&[u8]> = events().map(|event| event.digest.0.as_slice()).collect();
        let sources: Vec<&str> = deliveries.iter().map(|delivery| &*delivery.source.name).collect();
        let scopes: Vec<&str> = events().map(|event| &*event.scope).collect();
        let ids: Vec<&str> = events().map(|event| event.id.as_str()).collect();
        let types: Vec<Option<&str>> = events().map(|event| event.event_type.as_deref()).collect();
        let times: Vec<Option<jiff::Timestamp>> = events().map(|event| event.provider_time).collect();
        let bodies: Vec<&[u8]> = events().map(|event| event.body.as_ref()).collect();
        let items: Vec<Option<i32>> =
            events().map(|event| event.item.and_then(|item| item.try_into().ok())).collect();
        let unidentified: Vec<bool> = events().map(|event| !event.identified).collect();
        let locks: Vec<Option<String>> = deliveries.iter().map(|delivery| delivery.lock()).collect();
        let lock_timeout = format!("{}ms", mode.lock_timeout.as_millis());
        let effect_budget_ms = i64::try_from(mode.statement_timeout.as_millis() / 2).unwrap_or(i64::MAX);
        let start = begin(mode.statement_timeout);
        let careful: &[bool] = careful;
        let mut parameters: Vec<&(dyn ToSql + Sync)> = vec![
            &keys,
            &tokens,
            &digests,
            &sources,
            &scopes,
            &ids,
            &types,
            &times,
            &headers,
            &bodies,
            &items,
            &unidentified,
            &locks,
            &careful,
            &self.effect,
            &self.group,
            &mode.one_by_one,
            &lock_timeout,
            &self.commit_mode,
            &effect_budget_ms,
        ];
        parameters.extend(guards.iter().flat_map(Guards::parameters));
        let (begun, row, committed) = join!(
            client.batch_execute(&start),
            call(client, statement.as_ref(), (text, &signature), &parameters),
            client.batch_execute("commit"),
        );
        // The cause of a failed batch is in the middle; COMMIT of a failed transaction is a silent ROLLBACK.
        let row = row.map_err(|error| failed(&error))?;
        begun.map_err(|error| failed(&error))?;
        committed.map_err(|error| failed(&error))?;
        written(&row, deliveries.len())
    }
}

/// Sends the batch when first polled.
async fn call(
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
fn begin(statement_timeout: Duration) -> String {
    let ms = statement_timeout.as_millis();
    format!(
        "begin isolation level read committed, read write; reset session authorization; reset all; \
         select pg_advisory_unlock_all(); set local client_connection_check_interval = '1s'; \
         set local statement_timeout = '{ms}ms'; set local idle_in_transaction_session_timeout = '{ms}ms'"
    )
}

pub(super) const TYPES: [Type; 20] = [
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
];

fn written(row: &Row, expected: usize) -> Result<Written, BatchError> {
    match read(row).map_err(|error| failed(&error))? {
        Some(written) if written.outcomes.len() == expected => Ok(written),
        // Committed, but in words of another version; nobody may guess what they mean.
        _ => Err(BatchError {
            trouble: Trouble::Statement,
            cause: "hapax.record answered in a form that this version does not know".to_owned(),
        }),
    }
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
        ('a' | 'o', ..) => Some(Outcome::Accepted { repeated: false }),
        ('g', ..) => Some(Outcome::Repeated),
        ('d', Some(digest), ..) => digest.try_into().ok().map(|digest| Outcome::Known(Digest(digest))),
        ('f', _, _, (Some(sqlstate), Some(message))) => {
            Some(Outcome::Failed { sqlstate: sqlstate.to_owned(), message: message.to_owned() })
        }
        ('l', ..) => Some(Outcome::Locked),
        ('n', ..) => Some(Outcome::NotTried),
        _ => None,
    });
    let mut outcomes: Option<Vec<Outcome>> = outcomes.collect();
    guarded::mark(row, outcomes.iter_mut().flatten())?;
    Ok(generation.zip(outcomes).map(|(generation, outcomes)| Written { generation, outcomes }))
}

fn failed(error: &tokio_postgres::Error) -> BatchError {
    BatchError { trouble: Trouble::of(error), cause: db::describe(error) }
}

fn no_connection(error: &PoolError) -> BatchError {
    let cause = match error {
        PoolError::Backend(error) => db::describe(error),
        other => other.to_string(),
    };
    BatchError { trouble: Trouble::Resources, cause }
}

/// A connection that leaves the pool when dropped, unless it was found clean.
struct Unclean(Option<Object>);

impl Unclean {
    fn get(&self) -> Result<&Object, BatchError> {
        self.0.as_ref().ok_or_else(|| BatchError {
            trouble: Trouble::Resources,
            cause: "connection already given back".to_owned(),
        })
    }

    /// Nobody waits for the answer any more, but the backend is still at work, and closing the socket would not end a
    /// commit that waits for a standby. The connection keeps its place in the pool until the server has answered, so
    /// that there are never more backends than connections. A dead server is noticed by keepalive.
    fn outlast(mut self) {
        if let Some(client) = self.0.take() {
            drop(tokio::spawn(async move {
                drop(client.batch_execute("").await);
                drop(Object::take(client));
            }));
        }
    }

    /// The last answer is in and no transaction is open.
    fn give_back(mut self) {
        drop(self.0.take());
    }
}

impl Drop for Unclean {
    fn drop(&mut self) {
        if let Some(client) = self.0.take() {
            drop(Object::take(client));
        }
    }
}
