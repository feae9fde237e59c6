//! One batch, one transaction, one round trip.

use std::sync::Arc;
use std::time::{Duration, Instant};

use deadpool_postgres::{Object, Pool, PoolError};
use futures_util::join;
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::time::error::Elapsed;
use tokio::time::timeout;
use tokio_postgres::Statement;
use tokio_postgres::types::Type;
use tracing::warn;

use super::guarded::{self, Guards};
use super::statement::{Arguments, attempts, begin, call, written};
use super::{RecordError, Recorded, Standing, single};
use crate::config::{self, Effect, Source};
use crate::db::{self, Trouble};
use crate::effect::{self, Effects, UnknownEffects};
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
    /// How its effect failed already, where it is to be parked for that.
    pub(super) fault: Option<Arc<str>>,
}

/// The signed bytes of a request and whose they are to be: the same for all items of a request.
pub(super) type Claimed = ([u8; 16], [u8; 16]);

impl Delivery {
    /// What its transaction claims for the whole request, if that is watched.
    pub(super) fn claimed(&self) -> Option<Claimed> {
        self.event.guard.as_ref().map(|guard| (guard.key, guard.owner))
    }

    /// What decides about the work that it leaves; who has no id of its own leaves none.
    pub(super) fn routed(&self) -> Option<(&Source, Option<&str>)> {
        self.event.identified.then(|| (&*self.source, self.event.event_type.as_deref()))
    }

    /// Whether anything is left to do once it is committed.
    pub(super) fn leaves_work(&self) -> bool {
        self.routed().is_some_and(|(source, event_type)| source.jobs(event_type).next().is_some())
    }

    /// How often its effect may be tried in all, if it is parked when it fails.
    pub(super) fn parks(&self) -> Option<i32> {
        self.source.parks().map(attempts)
    }

    /// What its effect locks, as the source declares it.
    pub(super) fn lock(&self) -> Option<String> {
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
    /// Committed, and its effect failed: to be tried again. With what it said, unless that was an earlier attempt of ours.
    Parked {
        cause: Option<String>,
    },
    Known {
        digest: Digest,
        standing: Standing,
    },
    Failed {
        cause: String,
        /// After a serialization failure or a deadlock, where the same again may succeed.
        transient: bool,
    },
    Locked,
    NotTried,
}

impl Outcome {
    /// An event that its effect refused is answered like any other; only the log says why.
    pub(super) fn report(&self, delivery: &Delivery) {
        let (source, id) = (&*delivery.source.name, delivery.event.id.escape_debug());
        match self {
            Self::Rejected { message: Some(message) } => {
                warn!(source, event.id = %id, cause = message, "an effect refused an event for good");
            }
            Self::Parked { cause: Some(cause) } => {
                warn!(source, event.id = %id, cause, "an effect failed; its event is parked, to be tried again");
            }
            _ => {}
        }
    }

    /// The effect met a serialization failure or a deadlock: the same again may succeed.
    pub(super) fn is_transient(&self) -> bool {
        matches!(self, Self::Failed { transient: true, .. })
    }
}

/// A batch whose commit is confirmed: one outcome per job, in order.
pub(super) struct Written {
    pub(super) generation: Generation,
    pub(super) outcomes: Vec<Outcome>,
}

/// A batch of which nothing is known to be committed.
#[derive(Debug)]
pub(crate) struct BatchError {
    pub(crate) trouble: Trouble,
    pub(crate) cause: String,
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
    /// A SQL function, called within the statement.
    pub(super) function: Option<String>,
    /// Or an effect in this process, run between the statement and the commit.
    pub(super) rust: Option<Arc<dyn effect::Effect>>,
    pub(super) group: Option<String>,
    batched: bool,
    pub(super) commit_timeout: Duration,
    pub(super) commit_mode: &'static str,
    /// Whether a transaction-pooling proxy stands between.
    pooler: bool,
    /// The `statement_timeout` that sessions of the pool begin with, and come back to after each batch.
    session_timeout: Option<Duration>,
}

impl Writer {
    pub(super) fn new(
        pool: Pool,
        settings: &config::Postgres,
        effect: &Effect,
        effects: &Effects,
        session_timeout: Option<Duration>,
    ) -> Result<Self, UnknownEffects> {
        let (function, rust, group, batched) = match effect {
            Effect::None | Effect::Pull => (None, None, None, true),
            Effect::Function { name, group, batched } => (Some(name.clone()), None, group.clone(), *batched),
            Effect::Rust { name, group } => (None, Some(effects.get(name)?), group.clone(), false),
        };
        Ok(Self {
            pool,
            function,
            rust,
            group,
            batched,
            commit_timeout: settings.commit_timeout,
            commit_mode: settings.synchronous_commit.as_str(),
            pooler: settings.transaction_pooler,
            session_timeout,
        })
    }

    /// Opens a connection and prepares the statement, so that the first event does not wait for it. Fails silently:
    /// whoever needs a connection later will say what is wrong.
    pub(super) async fn warm_up(&self) {
        if let Ok(client) = self.pool.get().await {
            drop(self.prepare(&client, guarded::form(None)).await);
        }
    }

    /// The statement by its name on the server; none where the next session may not know the name.
    pub(super) async fn prepare(
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
        self.function.is_some() || self.rust.is_some()
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
        let Some(effect) = &self.rust else { return self.write_together(deliveries, careful, mode).await };
        let written = single::write(self, &**effect, deliveries, mode).await?;
        match (deliveries, written.outcomes.as_slice()) {
            // Nothing of the attempt stays; the event is recorded by itself, with what went wrong.
            ([delivery], [Outcome::Failed { cause, .. }]) if delivery.parks().is_some() => {
                let delivery = Delivery { fault: Some(cause.as_str().into()), ..(*delivery).clone() };
                self.write_together(&[&delivery], &[false], mode).await
            }
            _ => Ok(written),
        }
    }

    async fn write_together(
        &self,
        deliveries: &[&Delivery],
        careful: &[bool],
        mode: Mode,
    ) -> Result<Written, BatchError> {
        let client = self.connection().await?;
        let attempt = self.transact(&client, deliveries, careful, mode);
        let answer = timeout(self.commit_timeout, attempt).await;
        client.committed(answer)
    }

    /// Until it is given back, the connection belongs to one attempt alone: whatever ends the attempt early takes the
    /// connection out of the pool with it.
    pub(super) async fn connection(&self) -> Result<Unclean, BatchError> {
        let client = self.pool.get().await.map_err(|error| no_connection(&error))?;
        Ok(Unclean(Some(client)))
    }

    /// One round trip, so that a dying gateway leaves no open transaction behind: the batch by itself, which is committed when
    /// the server is ready for the next statement; or, where the session is not known to be as it should, BEGIN, the batch
    /// and COMMIT together.
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
        let form = guarded::form(guards.as_ref());
        let statement = self.prepare(client, form).await.map_err(|error| failed(&error))?;
        let arguments = Arguments::of(self, deliveries, careful, mode);
        let parameters: Vec<_> =
            arguments.parameters().into_iter().chain(guards.iter().flat_map(Guards::parameters)).collect();
        if self.session_timeout == Some(mode.statement_timeout) {
            let row = call(client, statement.as_ref(), form, &parameters).await;
            return written(&row.map_err(|error| failed(&error))?, deliveries.len());
        }
        let start = begin(mode.statement_timeout);
        let (begun, row, committed) = join!(
            client.batch_execute(&start),
            call(client, statement.as_ref(), form, &parameters),
            client.batch_execute("commit"),
        );
        // The cause of a failed batch is in the middle; COMMIT of a failed transaction is a silent ROLLBACK.
        let row = row.map_err(|error| failed(&error))?;
        begun.map_err(|error| failed(&error))?;
        committed.map_err(|error| failed(&error))?;
        written(&row, deliveries.len())
    }
}

pub(super) fn failed(error: &tokio_postgres::Error) -> BatchError {
    BatchError { trouble: Trouble::of(error), cause: db::describe(error) }
}

fn no_connection(error: &PoolError) -> BatchError {
    let cause = db::describe_pool(error);
    BatchError { trouble: Trouble::Resources, cause }
}

/// A connection that leaves the pool when dropped, unless it was found clean.
pub(super) struct Unclean(Option<Object>);

impl Unclean {
    /// What a commit's answer, or its absence, means for the connection.
    pub(super) fn committed<T>(
        self,
        answer: Result<Result<T, BatchError>, Elapsed>,
    ) -> Result<T, BatchError> {
        match answer {
            Ok(Ok(written)) => {
                self.give_back();
                Ok(written)
            }
            Ok(Err(error)) => Err(error),
            Err(_elapsed) => {
                self.outlast();
                let cause = "no answer within commit_timeout".to_owned();
                Err(BatchError { trouble: Trouble::Lost, cause })
            }
        }
    }

    pub(super) fn get(&self) -> Result<&Object, BatchError> {
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
    pub(super) fn give_back(mut self) {
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
