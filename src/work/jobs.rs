//! Jobs in Postgres: taken, held and ended, each in a small transaction of its own.
//!
//! Invariant: what is taken is committed before anybody works on it, and a result counts only while the token of its
//! taking is in the row. Never here: a transaction that is open while somebody works.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use deadpool_postgres::{Object, Pool};
use futures_util::join;
use jiff::Timestamp;
use tokio::time::timeout;
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};

use crate::db::{self, Trouble};
use crate::generation::Generation;
use crate::identify::{Digest, EventKey};

/// How long the answer to a statement may take; nothing here waits for anybody's work.
const STATEMENT: Duration = Duration::from_secs(10);

/// Why a statement did not do its work. What it was sent may still be committed after `Trouble::Lost`.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{cause}")]
pub(crate) struct JobsError {
    pub(crate) trouble: Trouble,
    pub(crate) cause: String,
}

/// What names an attempt.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Attempt {
    pub(crate) key: EventKey,
    pub(crate) queue: Arc<str>,
    /// Of the taking; another one has another.
    pub(crate) token: String,
}

/// An event that was taken, to be worked on.
#[derive(Debug)]
pub(crate) struct Task {
    pub(crate) attempt: Attempt,
    pub(crate) source: String,
    pub(crate) scope: String,
    pub(crate) event_id: String,
    pub(crate) event_type: Option<String>,
    pub(crate) item: Option<i32>,
    pub(crate) digest: [u8; 32],
    /// Gone if retention was shorter than all attempts took.
    pub(crate) content: Option<Body>,
    pub(crate) received_at: Timestamp,
    pub(crate) provider_time: Option<Timestamp>,
    /// From 1.
    pub(crate) number: i32,
    pub(crate) replay: i32,
}

impl Task {
    /// Of its body.
    pub(crate) fn bytes(&self) -> usize {
        self.content.as_ref().map_or(0, |content| content.bytes.len())
    }
}

#[derive(Debug)]
pub(crate) struct Body {
    pub(crate) bytes: Bytes,
    pub(crate) headers: String,
}

/// What a look at a queue brought.
#[derive(Debug)]
pub(crate) struct Taken {
    pub(crate) tasks: Vec<Task>,
    /// Events that are dead now, since nobody came back with them.
    pub(crate) buried: Vec<EventKey>,
    /// When the first of what was found came due.
    pub(crate) first_due: Option<Timestamp>,
    /// The database's clock.
    pub(crate) now: Timestamp,
}

/// How an attempt ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    Done,
    /// To be tried again, unless it was the last attempt.
    Failed,
    /// The same again cannot succeed.
    Hopeless,
    /// Not tried; does not count.
    Back,
}

impl Ending {
    fn letter(self) -> &'static str {
        match self {
            Self::Done => "d",
            Self::Failed => "f",
            Self::Hopeless => "x",
            Self::Back => "b",
        }
    }
}

/// An attempt and how it ended.
#[derive(Debug, Clone)]
pub(crate) struct Ended {
    pub(crate) attempt: Attempt,
    pub(crate) source: Arc<str>,
    pub(crate) result: Ending,
    pub(crate) error: Option<String>,
    /// Until it may be taken again.
    pub(crate) delay: Duration,
}

/// What became of the event of an attempt that ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// Somebody else is changing the event just now: nothing was ended, to be said again.
    Busy,
    /// The token was not in the row any more: somebody else has it.
    Lost,
    /// The event is not settled by this.
    Open,
    /// Nothing is left to do of it.
    Settled(Digest),
    /// It is dead.
    Dead,
}

/// The fates of attempts, in order, and the history in which they are so.
pub(crate) type Fates = (Vec<Fate>, Option<Generation>);

/// What a look at the clock and the index says of a queue.
#[derive(Debug)]
pub(crate) struct Seen {
    pub(crate) queue: String,
    pub(crate) first_due: Option<Timestamp>,
    pub(crate) waiting: i64,
    pub(crate) now: Timestamp,
}

/// The statements, on connections of their own.
#[derive(Debug, Clone)]
pub(crate) struct Jobs {
    pool: Pool,
}

type Parameter<'a> = (&'a (dyn ToSql + Sync), Type);

impl Jobs {
    pub(crate) fn new(pool: Pool) -> Self {
        Self { pool }
    }

    pub(crate) async fn take(
        &self,
        queue: &Arc<str>,
        count: usize,
        lease: Duration,
        since: Option<Timestamp>,
        among: Option<i32>,
    ) -> Result<Taken, JobsError> {
        let (count, lease) = (i32::try_from(count).unwrap_or(i32::MAX), millis(lease));
        let text = include_str!("../../sql/queries/take.sql");
        let rows = self
            .transact(
                text,
                &[
                    (&&**queue, Type::TEXT),
                    (&count, Type::INT4),
                    (&lease, Type::INT8),
                    (&since, Type::TIMESTAMPTZ),
                    (&among, Type::INT4),
                ],
            )
            .await?;
        taken(queue, &rows).map_err(|error| failed(&error))
    }

    /// Ends attempts; what became of each one's event, in order, and the history in which that is so.
    /// With `careful`, no lock of a job is waited for.
    pub(crate) async fn finish(&self, ended: &[Ended], careful: bool) -> Result<Fates, JobsError> {
        let keys: Vec<&[u8]> = ended.iter().map(|ended| ended.attempt.key.0.as_slice()).collect();
        let queues: Vec<&str> = ended.iter().map(|ended| &*ended.attempt.queue).collect();
        let tokens: Vec<&str> = ended.iter().map(|ended| ended.attempt.token.as_str()).collect();
        let results: Vec<&str> = ended.iter().map(|ended| ended.result.letter()).collect();
        // Postgres takes no NUL in a text.
        let errors: Vec<Option<String>> =
            ended.iter().map(|ended| ended.error.as_ref().map(|error| error.replace('\0', " "))).collect();
        let delays: Vec<i64> = ended.iter().map(|ended| millis(ended.delay)).collect();
        let text = include_str!("../../sql/queries/finish.sql");
        let rows = self
            .transact(
                text,
                &[
                    (&keys, Type::BYTEA_ARRAY),
                    (&queues, Type::TEXT_ARRAY),
                    (&tokens, Type::TEXT_ARRAY),
                    (&results, Type::TEXT_ARRAY),
                    (&errors, Type::TEXT_ARRAY),
                    (&delays, Type::INT8_ARRAY),
                    (&careful, Type::BOOL),
                ],
            )
            .await?;
        let row = rows.first().ok_or_else(|| unknown("hapax.finish"))?;
        let fates = fates(row, ended.len()).map_err(|error| failed(&error))?;
        fates.ok_or_else(|| unknown("hapax.finish"))
    }

    /// Holds attempts for longer; whether each is still ours, or nothing of one that is locked just now.
    pub(crate) async fn hold(
        &self,
        attempts: &[Attempt],
        lease: Duration,
    ) -> Result<Vec<Option<bool>>, JobsError> {
        let keys: Vec<&[u8]> = attempts.iter().map(|attempt| attempt.key.0.as_slice()).collect();
        let queues: Vec<&str> = attempts.iter().map(|attempt| &*attempt.queue).collect();
        let tokens: Vec<&str> = attempts.iter().map(|attempt| attempt.token.as_str()).collect();
        let lease = millis(lease);
        let text = include_str!("../../sql/queries/hold.sql");
        let rows = self
            .transact(
                text,
                &[
                    (&keys, Type::BYTEA_ARRAY),
                    (&queues, Type::TEXT_ARRAY),
                    (&tokens, Type::TEXT_ARRAY),
                    (&lease, Type::INT8),
                ],
            )
            .await?;
        let row = rows.first().ok_or_else(|| unknown("hapax.hold"))?;
        row.try_get("mine").map_err(|error| failed(&error))
    }

    /// How many of `total` deliveries at once are this worker's for a while.
    pub(crate) async fn share(
        &self,
        queue: &str,
        worker: &str,
        under_way: usize,
        total: usize,
        hold: Duration,
    ) -> Result<usize, JobsError> {
        let count = |number: usize| i32::try_from(number).unwrap_or(i32::MAX);
        let (under_way, total, hold) = (count(under_way), count(total), millis(hold));
        let text = include_str!("../../sql/queries/share.sql");
        let rows = self
            .transact(
                text,
                &[
                    (&queue, Type::TEXT),
                    (&worker, Type::TEXT),
                    (&under_way, Type::INT4),
                    (&total, Type::INT4),
                    (&hold, Type::INT8),
                ],
            )
            .await?;
        let row = rows.first().ok_or_else(|| unknown("hapax.share_of"))?;
        let granted: i32 = row.try_get("granted").map_err(|error| failed(&error))?;
        Ok(usize::try_from(granted).unwrap_or(0))
    }

    /// What is due in each of the queues; counts at most `count_max`.
    pub(crate) async fn look(
        &self,
        queues: &[Arc<str>],
        since: &[Option<Timestamp>],
        count_max: i64,
    ) -> Result<Vec<Seen>, JobsError> {
        let queues: Vec<&str> = queues.iter().map(AsRef::as_ref).collect();
        let text = include_str!("../../sql/queries/look.sql");
        let parameters: [Parameter<'_>; 3] =
            [(&queues, Type::TEXT_ARRAY), (&since, Type::TIMESTAMPTZ_ARRAY), (&count_max, Type::INT8)];
        let client = self.connection().await?;
        // By itself: it writes nothing, and an idle gateway asks for nothing else.
        let Ok(rows) = timeout(STATEMENT, client.query_typed(text, &parameters)).await else {
            drop(Object::take(client));
            return Err(silent());
        };
        let rows = rows.map_err(|error| failed(&error))?;
        let seen = rows.iter().map(|row| {
            Ok(Seen {
                queue: row.try_get("queue")?,
                first_due: row.try_get("first_at")?,
                waiting: row.try_get("waiting")?,
                now: row.try_get("now")?,
            })
        });
        seen.collect::<Result<_, _>>().map_err(|error| failed(&error))
    }

    /// Buries what was taken too often and never came back; at most `count`.
    pub(crate) async fn sweep(&self, queue: &str, count: i32) -> Result<Vec<EventKey>, JobsError> {
        let text = include_str!("../../sql/queries/sweep.sql");
        let rows = self.transact(text, &[(&queue, Type::TEXT), (&count, Type::INT4)]).await?;
        rows.iter().map(key).collect::<Result<_, _>>().map_err(|error| failed(&error))
    }

    /// Tells whoever listens that there is something in these queues.
    pub(crate) async fn notify(&self, queues: &[String]) -> Result<(), JobsError> {
        let text = include_str!("../../sql/queries/notify.sql");
        self.transact(text, &[(&queues, Type::TEXT_ARRAY)]).await.map(drop)
    }

    async fn connection(&self) -> Result<Object, JobsError> {
        self.pool
            .get()
            .await
            .map_err(|error| JobsError { trouble: Trouble::Resources, cause: db::describe_pool(&error) })
    }

    /// BEGIN, the statement and COMMIT leave together. Rows are given back only once the commit is confirmed: what is
    /// worked on without it would be worked on twice.
    async fn transact(&self, text: &str, parameters: &[Parameter<'_>]) -> Result<Vec<Row>, JobsError> {
        let client = self.connection().await?;
        let ms = STATEMENT.as_millis();
        let begin = format!(
            "begin isolation level read committed, read write; set local statement_timeout = '{ms}ms'; \
             set local jit = off; \
             set local lock_timeout = '2s'; set local idle_in_transaction_session_timeout = '{ms}ms'"
        );
        let sent = async {
            join!(
                client.batch_execute(&begin),
                client.query_typed(text, parameters),
                client.batch_execute("commit")
            )
        };
        let Ok((opened, rows, committed)) = timeout(STATEMENT * 2, sent).await else {
            drop(Object::take(client));
            return Err(silent());
        };
        match rows.and_then(|rows| opened.and(committed).map(|()| rows)) {
            Ok(rows) => Ok(rows),
            Err(error) => {
                // COMMIT of a failed transaction has rolled it back; a connection that failed otherwise is gone.
                if Trouble::of(&error) == Trouble::Lost {
                    drop(Object::take(client));
                }
                Err(failed(&error))
            }
        }
    }
}

fn silent() -> JobsError {
    JobsError { trouble: Trouble::Lost, cause: "no answer in time".to_owned() }
}

fn failed(error: &tokio_postgres::Error) -> JobsError {
    JobsError { trouble: Trouble::of(error), cause: db::describe(error) }
}

fn unknown(function: &str) -> JobsError {
    let cause = format!("{function} answered in a form that this version does not know");
    JobsError { trouble: Trouble::Statement, cause }
}

fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

fn key(row: &Row) -> Result<EventKey, tokio_postgres::Error> {
    let bytes: &[u8] = row.try_get("key")?;
    Ok(EventKey(bytes.try_into().unwrap_or_default()))
}

fn taken(queue: &Arc<str>, rows: &[Row]) -> Result<Taken, tokio_postgres::Error> {
    let mut taken =
        Taken { tasks: Vec::new(), buried: Vec::new(), first_due: None, now: Timestamp::UNIX_EPOCH };
    for row in rows {
        taken.now = row.try_get("now")?;
        if row.try_get::<_, Option<&[u8]>>("key")?.is_none() {
            continue;
        }
        taken.first_due = taken.first_due.or(row.try_get("was_due")?);
        match row.try_get::<_, Option<String>>("token")? {
            None => taken.buried.push(key(row)?),
            Some(secret) => {
                let attempt = Attempt { key: key(row)?, queue: Arc::clone(queue), token: secret };
                taken.tasks.push(task(row, attempt)?);
            }
        }
    }
    Ok(taken)
}

fn task(row: &Row, attempt: Attempt) -> Result<Task, tokio_postgres::Error> {
    let digest: &[u8] = row.try_get("digest")?;
    let body: Option<Vec<u8>> = row.try_get("body")?;
    let headers: Option<String> = row.try_get("headers")?;
    Ok(Task {
        attempt,
        source: row.try_get("source")?,
        scope: row.try_get("scope")?,
        event_id: row.try_get("event_id")?,
        event_type: row.try_get("event_type")?,
        item: row.try_get("item")?,
        digest: digest.try_into().unwrap_or([0; 32]),
        content: body.zip(headers).map(|(bytes, headers)| Body { bytes: bytes.into(), headers }),
        received_at: row.try_get("received_at")?,
        provider_time: row.try_get("provider_time")?,
        number: row.try_get("attempt")?,
        replay: row.try_get("replay")?,
    })
}

/// The fates of attempts out of a row with `mine`, `events`, `digests` and `generation`. `None`: in words of another
/// version.
pub(crate) fn fates(row: &Row, expected: usize) -> Result<Option<Fates>, tokio_postgres::Error> {
    let mine: Vec<Option<bool>> = row.try_get("mine")?;
    let events: Vec<Option<&str>> = row.try_get("events")?;
    let digests: Vec<Option<&[u8]>> = row.try_get("digests")?;
    let generation = Generation::from_bytes(row.try_get("generation")?);
    if [mine.len(), events.len(), digests.len()] != [expected; 3] {
        return Ok(None);
    }
    let fates = mine.into_iter().zip(events).zip(digests).map(|((mine, event), digest)| {
        Some(match (mine, event, digest) {
            (None, ..) => Fate::Busy,
            (Some(false), ..) => Fate::Lost,
            (Some(true), None, _) => Fate::Open,
            (Some(true), Some("dead"), _) => Fate::Dead,
            (Some(true), Some("done" | "rejected"), Some(digest)) => {
                Fate::Settled(Digest(digest.try_into().ok()?))
            }
            _ => return None,
        })
    });
    Ok(fates.collect::<Option<Vec<_>>>().map(|fates| (fates, generation)))
}
