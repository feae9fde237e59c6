//! The questions to Postgres. Each is one statement, without a name, so that a pooler may stand between.

use jiff::Timestamp;
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};

use super::Exit;
use crate::db::{self, Session};
use crate::identify::EventKey;

const COLUMNS: &str = include_str!("../../../sql/queries/events_columns.sql");
const CHOSEN: &str = include_str!("../../../sql/queries/events_chosen.sql");
const PAGE: &str = include_str!("../../../sql/queries/events_page.sql");

/// What was chosen, as the database is asked for it.
#[derive(Debug, Clone)]
pub(super) struct Filter {
    pub(super) source: Option<String>,
    pub(super) scope: Option<String>,
    pub(super) keys: Option<Vec<Vec<u8>>>,
    pub(super) ids: Option<Vec<String>>,
    pub(super) statuses: Option<Vec<&'static str>>,
    pub(super) event_type: Option<String>,
    pub(super) since: Option<Timestamp>,
    pub(super) until: Option<Timestamp>,
    /// The database's clock when it was asked first.
    pub(super) now: Timestamp,
    pub(super) mismatched: bool,
    pub(super) queue: Option<String>,
    pub(super) replays_max: Option<i32>,
}

/// An event of the ledger.
#[derive(Debug, Clone)]
pub(super) struct Event {
    pub(super) key: EventKey,
    pub(super) source: String,
    pub(super) scope: String,
    pub(super) id: String,
    pub(super) kind: Option<String>,
    pub(super) status: String,
    pub(super) digest: Vec<u8>,
    pub(super) received_at: Timestamp,
    pub(super) settled_at: Option<Timestamp>,
    pub(super) attempts: i32,
    pub(super) replay: i32,
    pub(super) mismatches: i64,
    pub(super) mismatch_at: Option<Timestamp>,
}

/// A stretch of time of which a page is asked for, and where it goes on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stretch {
    pub(super) since: Option<Timestamp>,
    pub(super) before: Option<Timestamp>,
    pub(super) after: Option<(Timestamp, EventKey)>,
    pub(super) newest_first: bool,
}

/// What is left or was left to do for an event.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) queue: String,
    pub(super) state: String,
    pub(super) attempts: i32,
    pub(super) attempts_max: i32,
    pub(super) replay: i32,
    pub(super) due_at: Timestamp,
    pub(super) settled_at: Option<Timestamp>,
    pub(super) error: Option<String>,
    pub(super) held: bool,
}

/// A body that is kept.
#[derive(Debug)]
pub(super) struct Body {
    pub(super) place: String,
    pub(super) headers: String,
    pub(super) item: Option<i32>,
    pub(super) provider_time: Option<Timestamp>,
    pub(super) bytes: Vec<u8>,
}

/// What there is to do for events that are replayed, by their places.
#[derive(Debug, Default)]
pub(super) struct Work {
    /// Of each event: whether its source has an effect.
    pub(super) acts: Vec<bool>,
    pub(super) at: Vec<i32>,
    pub(super) queues: Vec<String>,
    pub(super) attempts: Vec<i32>,
}

/// The ledger of a database.
pub(super) struct Ledger<'a> {
    client: &'a Session,
}

type Parameters<'a> = Vec<(&'a (dyn ToSql + Sync), Type)>;

fn said(error: &tokio_postgres::Error) -> Exit {
    Exit::unavailable(format!("Postgres: {}", db::describe(error)))
}

impl<'a> Ledger<'a> {
    pub(super) fn new(client: &'a Session) -> Self {
        Self { client }
    }

    /// The database's clock.
    pub(super) async fn now(&self) -> Result<Timestamp, Exit> {
        self.one("select clock_timestamp()", &[]).await
    }

    /// The generation, as its bytes.
    pub(super) async fn generation(&self) -> Result<Vec<u8>, Exit> {
        self.one("select hapax.generation()", &[]).await
    }

    pub(super) async fn knows_source(&self, source: &str) -> Result<bool, Exit> {
        self.knows(Some(source), None).await
    }

    pub(super) async fn knows_queue(&self, queue: &str) -> Result<bool, Exit> {
        self.knows(None, Some(queue)).await
    }

    async fn knows(&self, source: Option<&str>, queue: Option<&str>) -> Result<bool, Exit> {
        let statement = include_str!("../../../sql/queries/is_known.sql");
        self.one(statement, &[(&source, Type::TEXT), (&queue, Type::TEXT)]).await
    }

    /// How many events were chosen, and when the oldest was received.
    pub(super) async fn count(&self, filter: &Filter) -> Result<(u64, Option<Timestamp>), Exit> {
        let statement = format!("select count(*), min(l.received_at)\n{CHOSEN}");
        let bounds = Bounds::of(filter, filter.since, filter.until);
        let parameters = chosen(filter, &bounds);
        let row = self.client.query_typed_one(&statement, &parameters);
        let row = row.await.map_err(|error| said(&error))?;
        let count: i64 = row.try_get(0).map_err(|error| said(&error))?;
        Ok((u64::try_from(count).unwrap_or(0), row.try_get(1).map_err(|error| said(&error))?))
    }

    /// The first events of a stretch.
    pub(super) async fn page(
        &self,
        filter: &Filter,
        stretch: Stretch,
        limit: i64,
    ) -> Result<Vec<Event>, Exit> {
        let Stretch { since, before, after, newest_first } = stretch;
        let statement = format!("{COLUMNS}{CHOSEN}{PAGE}");
        let (after_at, after_key) = (after.map(|(at, _)| at), after.map(|(_, key)| key.0.to_vec()));
        let bounds = Bounds::of(filter, since, before);
        let mut parameters = chosen(filter, &bounds);
        parameters.extend([
            (&newest_first as &(dyn ToSql + Sync), Type::BOOL),
            (&after_at, Type::TIMESTAMPTZ),
            (&after_key, Type::BYTEA),
            (&limit, Type::INT8),
        ]);
        let rows = self.client.query_typed(&statement, &parameters).await.map_err(|error| said(&error))?;
        rows.iter().map(event).collect::<Result<_, _>>().map_err(|error| said(&error))
    }

    /// The event's jobs.
    pub(super) async fn jobs(&self, event: &Event) -> Result<Vec<Job>, Exit> {
        let key: &[u8] = &event.key.0;
        let statement = include_str!("../../../sql/queries/event_jobs.sql");
        let rows =
            self.client.query_typed(statement, &[(&key, Type::BYTEA)]).await.map_err(|error| said(&error))?;
        rows.iter().map(job).collect::<Result<_, _>>().map_err(|error| said(&error))
    }

    /// The event's body, if it is kept.
    pub(super) async fn body(&self, event: &Event) -> Result<Option<Body>, Exit> {
        let key: &[u8] = &event.key.0;
        let statement = include_str!("../../../sql/queries/event_body.sql");
        let parameters: Parameters<'_> = vec![(&key, Type::BYTEA), (&event.received_at, Type::TIMESTAMPTZ)];
        let row = self.client.query_typed_opt(statement, &parameters).await.map_err(|error| said(&error))?;
        row.as_ref().map(body).transpose().map_err(|error| said(&error))
    }

    /// The digests of other bodies that came under the event's id, and when each came first.
    pub(super) async fn mismatches(&self, event: &Event) -> Result<Vec<(Vec<u8>, Timestamp)>, Exit> {
        let key: &[u8] = &event.key.0;
        let statement = include_str!("../../../sql/queries/event_mismatches.sql");
        let rows =
            self.client.query_typed(statement, &[(&key, Type::BYTEA)]).await.map_err(|error| said(&error))?;
        let mismatch = |row: &Row| Ok((row.try_get("digest")?, row.try_get("seen_at")?));
        rows.iter().map(mismatch).collect::<Result<_, _>>().map_err(|error| said(&error))
    }

    /// Gives events their turn now; says of each what came of it.
    pub(super) async fn retry(
        &self,
        keys: &[Vec<u8>],
        queue: Option<&str>,
        Writing { only_look, commit_mode }: Writing,
    ) -> Result<Vec<String>, tokio_postgres::Error> {
        let statement = include_str!("../../../sql/queries/retry_events.sql");
        let parameters: Parameters<'_> = vec![
            (&keys, Type::BYTEA_ARRAY),
            (&queue, Type::TEXT),
            (&only_look, Type::BOOL),
            (&commit_mode, Type::TEXT),
        ];
        self.client.query_typed_one(statement, &parameters).await?.try_get("outcomes")
    }

    /// Puts events back to open; says of each what came of it.
    pub(super) async fn replay(
        &self,
        keys: &[Vec<u8>],
        work: &Work,
        partly: bool,
        Writing { only_look, commit_mode }: Writing,
    ) -> Result<Vec<String>, tokio_postgres::Error> {
        let statement = include_str!("../../../sql/queries/replay_events.sql");
        let parameters: Parameters<'_> = vec![
            (&keys, Type::BYTEA_ARRAY),
            (&work.acts, Type::BOOL_ARRAY),
            (&work.at, Type::INT4_ARRAY),
            (&work.queues, Type::TEXT_ARRAY),
            (&work.attempts, Type::INT4_ARRAY),
            (&partly, Type::BOOL),
            (&only_look, Type::BOOL),
            (&commit_mode, Type::TEXT),
        ];
        self.client.query_typed_one(statement, &parameters).await?.try_get("outcomes")
    }

    /// Gives up what is left to do; says of each event what came of it.
    pub(super) async fn discard(
        &self,
        keys: &[Vec<u8>],
        acts: &[bool],
        (queue, force): (Option<&str>, bool),
        Writing { only_look, commit_mode }: Writing,
    ) -> Result<Vec<String>, tokio_postgres::Error> {
        let statement = include_str!("../../../sql/queries/discard_events.sql");
        let parameters: Parameters<'_> = vec![
            (&keys, Type::BYTEA_ARRAY),
            (&acts, Type::BOOL_ARRAY),
            (&queue, Type::TEXT),
            (&force, Type::BOOL),
            (&only_look, Type::BOOL),
            (&commit_mode, Type::TEXT),
        ];
        self.client.query_typed_one(statement, &parameters).await?.try_get("outcomes")
    }

    async fn one<T>(&self, statement: &str, parameters: &[(&(dyn ToSql + Sync), Type)]) -> Result<T, Exit>
    where
        T: for<'r> tokio_postgres::types::FromSql<'r>,
    {
        let row = self.client.query_typed_one(statement, parameters).await.map_err(|error| said(&error))?;
        row.try_get(0).map_err(|error| said(&error))
    }
}

/// How a change is made.
#[derive(Debug, Clone, Copy)]
pub(super) struct Writing {
    /// Not at all.
    pub(super) only_look: bool,
    /// `postgres.synchronous_commit`.
    pub(super) commit_mode: &'static str,
}

/// What [`chosen`] asks for beside what stands in the filter.
struct Bounds {
    since: Option<Timestamp>,
    before: Option<Timestamp>,
    no_done: bool,
}

impl Bounds {
    fn of(filter: &Filter, since: Option<Timestamp>, before: Option<Timestamp>) -> Self {
        let no_done = filter.statuses.as_ref().is_some_and(|statuses| !statuses.contains(&"done"));
        Self { since, before, no_done }
    }
}

/// The parameters of `sql/queries/events_chosen.sql`.
fn chosen<'a>(filter: &'a Filter, bounds: &'a Bounds) -> Parameters<'a> {
    vec![
        (&filter.source, Type::TEXT),
        (&filter.scope, Type::TEXT),
        (&filter.keys, Type::BYTEA_ARRAY),
        (&filter.ids, Type::TEXT_ARRAY),
        (&filter.statuses, Type::TEXT_ARRAY),
        (&bounds.no_done, Type::BOOL),
        (&filter.event_type, Type::TEXT),
        (&bounds.since, Type::TIMESTAMPTZ),
        (&bounds.before, Type::TIMESTAMPTZ),
        (&filter.mismatched, Type::BOOL),
        (&filter.queue, Type::TEXT),
        (&filter.replays_max, Type::INT4),
    ]
}

fn event(row: &Row) -> Result<Event, tokio_postgres::Error> {
    let key: Vec<u8> = row.try_get("key")?;
    Ok(Event {
        // Of another length there is none: the table checks it.
        key: EventKey(key.try_into().unwrap_or_default()),
        source: row.try_get("source")?,
        scope: row.try_get("scope")?,
        id: row.try_get("event_id")?,
        kind: row.try_get("event_type")?,
        status: row.try_get("status")?,
        digest: row.try_get("digest")?,
        received_at: row.try_get("received_at")?,
        settled_at: row.try_get("settled_at")?,
        attempts: row.try_get("attempts")?,
        replay: row.try_get("replay")?,
        mismatches: row.try_get("mismatches")?,
        mismatch_at: row.try_get("mismatch_at")?,
    })
}

fn job(row: &Row) -> Result<Job, tokio_postgres::Error> {
    Ok(Job {
        queue: row.try_get("queue")?,
        state: row.try_get("state")?,
        attempts: row.try_get("attempts")?,
        attempts_max: row.try_get("attempts_max")?,
        replay: row.try_get("replay")?,
        due_at: row.try_get("due_at")?,
        settled_at: row.try_get("settled_at")?,
        error: row.try_get("error")?,
        held: row.try_get("held")?,
    })
}

fn body(row: &Row) -> Result<Body, tokio_postgres::Error> {
    Ok(Body {
        place: row.try_get("place")?,
        headers: row.try_get("headers")?,
        item: row.try_get("item")?,
        provider_time: row.try_get("provider_time")?,
        bytes: row.try_get("body")?,
    })
}
