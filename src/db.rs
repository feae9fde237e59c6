//! Connections to Postgres, migrations, the generation heartbeat, and what an error means.
//!
//! Statements here have no names on the server, since a pooler may stand between that gives each one another session.
//! No query here knows an event.

pub mod handshake;
pub mod key_rule;
mod servers;

use std::convert::Infallible;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use deadpool_postgres::{
    Hook, HookError, Manager, ManagerConfig, Pool, PoolBuilder, PoolError, RecyclingMethod, Runtime, Timeouts,
};
use tokio::sync::mpsc;
use tokio_postgres::Client;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::Type;
use tokio_util::task::AbortOnDropHandle;
use tracing::{info, warn};

use crate::generation::{Generation, Heartbeat};
use crate::tasks::Beat;
use crate::{config, tls};
use key_rule::{Changes, KeyRule};
pub use servers::Servers;

/// Numbered, forward only: name and text. The first line of each says `-- expand` or `-- contract`.
pub const MIGRATIONS: &[(i32, &str, &str)] = &[
    (1, "ledger", include_str!("../sql/migrations/0001_ledger.sql")),
    (2, "key_rule", include_str!("../sql/migrations/0002_key_rule.sql")),
    (3, "handshake", include_str!("../sql/migrations/0003_handshake.sql")),
    (4, "guard", include_str!("../sql/migrations/0004_guard.sql")),
    (5, "work", include_str!("../sql/migrations/0005_work.sql")),
    (6, "retention", include_str!("../sql/migrations/0006_retention.sql")),
    (7, "replay", include_str!("../sql/migrations/0007_replay.sql")),
    (8, "parked_locks", include_str!("../sql/migrations/0008_parked_locks.sql")),
    (9, "session", include_str!("../sql/migrations/0009_session.sql")),
    (10, "retain_hold", include_str!("../sql/migrations/0010_retain_hold.sql")),
];

/// What an error from Postgres means for the work that met it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trouble {
    /// The connection is gone or useless. Whether a commit that was on its way happened is unknown.
    Lost,
    /// Nothing was committed; the same again may succeed (serialization failure, deadlock).
    Retry,
    /// A row was locked for longer than `lock_timeout`.
    Locked,
    /// `statement_timeout`, or somebody cancelled.
    Cancelled,
    /// The server lacks something: connections, disk, memory.
    Resources,
    /// The statement itself failed: an effect, a constraint, a missing table.
    Statement,
}

impl Trouble {
    /// Decides by SQLSTATE, never by the text of a message.
    #[must_use]
    pub fn of(error: &tokio_postgres::Error) -> Self {
        match error.code() {
            Some(code) => Self::of_code(code),
            // No SQLSTATE: the error was made on this side.
            None if error.is_closed() || !is_local(error) => Self::Lost,
            None => Self::Statement,
        }
    }

    /// Whether the same again may succeed later, as far as the trouble tells.
    #[must_use]
    pub fn may_pass(self) -> bool {
        match self {
            Self::Lost | Self::Retry | Self::Resources => true,
            Self::Locked | Self::Cancelled | Self::Statement => false,
        }
    }

    fn of_code(code: &SqlState) -> Self {
        match code.code() {
            "40001" | "40P01" => Self::Retry,
            // Completion unknown, a read-only server, what a standby says to functions that need a primary, a
            // server that goes away.
            "40003" | "25006" | "55000" | "57P01" | "57P02" | "57P03" | "57P04" | "57P05" => Self::Lost,
            "55P03" => Self::Locked,
            "57014" => Self::Cancelled,
            other if other.starts_with("08") => Self::Lost,
            other if other.starts_with("53") || other.starts_with("58") => Self::Resources,
            _ => Self::Statement,
        }
    }
}

/// Errors of this side that say nothing about the connection: a column that does not fit. (A parameter that cannot be
/// encoded has an I/O error as its cause and counts as a lost connection, which is the safe side.)
fn is_local(error: &tokio_postgres::Error) -> bool {
    use std::error::Error as _;
    let source = error.source();
    source.is_some_and(|source| !source.is::<std::io::Error>())
}

/// Said of a prepared statement that is there already, or is not.
const NAMES: [SqlState; 2] = [SqlState::DUPLICATE_PSTATEMENT, SqlState::INVALID_SQL_STATEMENT_NAME];

/// What an error says, for logs: the server's message, or the driver's with its cause; of TLS also what to do.
#[must_use]
pub fn describe(error: &tokio_postgres::Error) -> String {
    use std::error::Error as _;
    let told = "sslrootcert=FILE in postgres.url";
    match (error.as_db_error(), error.source()) {
        // Our statements have names that are unique within a session; on another's they are not.
        (Some(db), _) if NAMES.contains(db.code()) => {
            format!("{} (SQLSTATE {}): {POOLER}", db.message(), db.code().code())
        }
        (Some(db), _) => format!("{} (SQLSTATE {})", db.message(), db.code().code()),
        (None, Some(source)) => {
            match tls::explain(error, told, "sslcert=FILE and sslkey=FILE in postgres.url") {
                Some(advice) => format!("{error}: {advice}"),
                // The driver's own text: the server said that it has no TLS, before any handshake.
                None if is_local(error) && error.to_string().contains("TLS handshake") => {
                    format!(
                        "{error}: {source}: set ssl = on there (sslmode=disable in postgres.url does without)"
                    )
                }
                None => format!("{error}: {source}"),
            }
        }
        (None, None) => error.to_string(),
    }
}

/// Why the pool gave no connection.
#[must_use]
pub fn describe_pool(error: &PoolError) -> String {
    match error {
        PoolError::Backend(error) => not_connected(error),
        other => other.to_string(),
    }
}

/// Why there is no connection.
fn not_connected(error: &tokio_postgres::Error) -> String {
    let refused = [Some(&SqlState::PROTOCOL_VIOLATION), Some(&SqlState::FEATURE_NOT_SUPPORTED)];
    let advice = if refused.contains(&error.code()) { format!(": {POOLER}") } else { String::new() };
    format!("{}{advice}", describe(error))
}

/// A pool as recording uses it. Making it connects to nothing.
///
/// # Errors
/// What is wrong with the DSN.
pub fn pool(settings: &config::Postgres) -> anyhow::Result<Pool> {
    pool_when(settings, Arc::new(AtomicBool::new(true)))
}

/// As [`pool`], but it gives no connection before `ready` is set: a database that nobody has looked at may have the
/// events under other keys.
///
/// # Errors
/// What is wrong with the DSN.
pub fn pool_when(settings: &config::Postgres, ready: Arc<AtomicBool>) -> anyhow::Result<Pool> {
    let servers = Servers::parse(settings)?;
    // A pooler hands sessions round, and may refuse to be told how one is to begin.
    if settings.transaction_pooler {
        return Ok(pool_of(servers, settings, settings.connections, ready).build()?);
    }
    let statement_timeout = settings.statement_timeout;
    let servers = servers.beginning_with(&session_options(statement_timeout));
    let began = Hook::async_fn(move |client: &mut deadpool_postgres::ClientWrapper, _| {
        Box::pin(async move {
            let found = client.query_typed_one(STATEMENT_TIMEOUT, &[]).await.map_err(HookError::Backend)?;
            let found: i64 = found.try_get(0).map_err(HookError::Backend)?;
            let is_so = u128::try_from(found).is_ok_and(|found| found == statement_timeout.as_millis());
            is_so
                .then_some(())
                .ok_or_else(|| HookError::message(format!("its sessions begin otherwise: {POOLER}")))
        })
    });
    Ok(pool_of(servers, settings, settings.connections, ready).post_create(began).build()?)
}

/// As [`pool_when`], as workers use it.
///
/// # Errors
/// What is wrong with the DSN.
pub fn work_pool(config: &config::Config, ready: Arc<AtomicBool>) -> anyhow::Result<Pool> {
    Ok(pool_of(Servers::parse(&config.postgres)?, &config.postgres, config.work.connections, ready)
        .build()?)
}

fn pool_of(
    servers: Servers,
    settings: &config::Postgres,
    connections: usize,
    ready: Arc<AtomicBool>,
) -> PoolBuilder {
    let limit = servers.limit();
    let manager_config = ManagerConfig { recycling_method: RecyclingMethod::Fast };
    let manager = Manager::from_connect(tokio_postgres::Config::new(), servers, manager_config);
    let timeouts =
        Timeouts { wait: Some(settings.record_timeout), create: Some(limit), recycle: Some(limit) };
    let builder = Pool::builder(manager).max_size(connections).runtime(Runtime::Tokio1);
    let gate = Hook::sync_fn(move |_, _| {
        let ready = ready.load(Ordering::Relaxed);
        ready.then_some(()).ok_or_else(|| HookError::message("the database is not ready; the log says why"))
    });
    builder.timeouts(timeouts).post_create(gate)
}

/// What a statement finds that is a transaction by itself. A backend whose gateway is gone looks at its socket once a second
/// while an effect is at work, so that one that will not end ends with it. One that got a batch without its end waits for that in
/// an open transaction, which no time-out ends: keepalive finds within 20 s that nobody is there any more.
fn session_options(statement_timeout: Duration) -> String {
    format!(
        "{ISOLATION} -c client_connection_check_interval=1s -c tcp_keepalives_idle=10 -c tcp_keepalives_interval=5 \
         -c tcp_keepalives_count=2 -c statement_timeout={}ms",
        statement_timeout.as_millis()
    )
}

const ISOLATION: &str = "-c default_transaction_isolation=read\\ committed";
/// In milliseconds. A proxy may have kept to itself how the session was to begin.
const STATEMENT_TIMEOUT: &str =
    "select (extract(epoch from current_setting('statement_timeout')::interval) * 1000)::bigint";
/// What to do then.
const POOLER: &str = "if a proxy stands between, say postgres.transaction_pooler = true";

/// A connection outside of the pool, for heartbeat, migrations, readiness. Dropping it closes the connection, even if
/// an answer is still to come.
#[derive(Debug)]
pub struct Session {
    client: Client,
    _connection: AbortOnDropHandle<()>,
}

impl Deref for Session {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl DerefMut for Session {
    fn deref_mut(&mut self) -> &mut Client {
        &mut self.client
    }
}

/// Connects outside of the pool.
///
/// # Errors
/// Why no server could be connected to; of the last one tried.
pub async fn connect(settings: &config::Postgres) -> anyhow::Result<Session> {
    let mut servers = Servers::parse(settings)?;
    if !settings.transaction_pooler {
        // A proxy that refuses this would refuse those that record.
        servers = servers.beginning_with(ISOLATION);
    }
    let connected = servers.connect().await;
    let (client, connection) = connected.map_err(|error| anyhow::anyhow!(not_connected(&error)))?;
    Ok(Session { client, _connection: AbortOnDropHandle::new(connection) })
}

/// Connects outside of the pool and listens on a channel; what is said there comes out of the receiver, until the
/// connection ends.
///
/// # Errors
/// Why no server could be connected to, or did not let us listen.
pub async fn listen(
    settings: &config::Postgres,
    channel: &str,
) -> anyhow::Result<(Session, mpsc::UnboundedReceiver<String>)> {
    let (heard, said) = mpsc::unbounded_channel();
    let connected = Servers::parse(settings)?.connect_hearing(Some(heard)).await;
    let (client, connection) = connected.map_err(|error| anyhow::anyhow!(describe(&error)))?;
    let session = Session { client, _connection: AbortOnDropHandle::new(connection) };
    let listen = format!("listen {channel}");
    let listening = session.batch_execute(&listen);
    let listening = tokio::time::timeout(settings.connect_timeout, listening).await?;
    listening.map_err(|error| anyhow::anyhow!(describe(&error)))?;
    Ok((session, said))
}

/// Applies what is missing, each migration in a transaction of its own, one gateway at a time. Returns the names
/// of those applied.
///
/// # Errors
/// The migration that failed; those before it stay applied.
pub async fn migrate(client: &mut Client) -> anyhow::Result<Vec<String>> {
    let encoding = client.query_typed_one("select current_setting('server_encoding')", &[]).await?;
    check_encoding(encoding.get(0)).map_err(anyhow::Error::msg)?;
    apply_missing(client).await.map_err(|error| {
        let hint = match error.code() {
            Some(&SqlState::INSUFFICIENT_PRIVILEGE) => {
                ": the role that migrates needs create on the database, and has to own schema hapax if it is there"
            }
            _ => "",
        };
        anyhow::anyhow!("the migrations cannot be applied: {}{hint}", describe(&error))
    })
}

async fn apply_missing(client: &mut Client) -> Result<Vec<String>, tokio_postgres::Error> {
    // The text is one transaction. IF NOT EXISTS alone does not keep two of them apart.
    client
        .batch_execute(
            "select pg_advisory_xact_lock(hashtextextended('hapax migrate', 0));
             create schema if not exists hapax;
             create table if not exists hapax.migration (
                 number integer primary key, name text not null, applied_at timestamptz not null default now())",
        )
        .await?;
    let mut applied = Vec::new();
    for (number, name, text) in MIGRATIONS {
        let transaction = client.transaction().await?;
        // Serialises migrators; released with the transaction.
        transaction.batch_execute("lock table hapax.migration in exclusive mode").await?;
        let known =
            transaction.query_opt("select name from hapax.migration where number = $1", &[number]).await?;
        if known.is_some() {
            continue;
        }
        transaction.batch_execute(text).await?;
        transaction
            .execute("insert into hapax.migration (number, name) values ($1, $2)", &[number, name])
            .await?;
        transaction.commit().await?;
        applied.push(format!("{number:04}_{name}"));
    }
    Ok(applied)
}

/// Whether the schema is the one that this program was built for, and the effects can be called.
#[derive(Debug, thiserror::Error)]
pub enum Unready {
    /// Postgres cannot be asked.
    #[error("Postgres cannot be reached: {0}")]
    Unreachable(String),
    /// Postgres answers, and does not let us work.
    #[error("Postgres: {0}")]
    Refused(String),
    /// Migrations are missing.
    #[error("the database lacks migration {0}: run `hapax migrate`")]
    NotMigrated(String),
    /// A newer program was here.
    #[error("the database has migration {0}, which this version of hapax does not know: use a newer one")]
    TooNew(i32),
    /// An effect cannot be called.
    #[error("effect {name}: {problem}")]
    Effect {
        /// `schema.function`
        name: String,
        /// What is wrong and what would be right.
        problem: String,
    },
    /// Events would get other keys than they had.
    #[error("{0}")]
    KeyRules(Changes),
}

impl Unready {
    /// A question failed: because of the connection, or because the server says so.
    fn asking(error: &tokio_postgres::Error) -> Self {
        match Trouble::of(error) {
            Trouble::Lost | Trouble::Resources | Trouble::Cancelled => Self::Unreachable(describe(error)),
            Trouble::Retry | Trouble::Locked | Trouble::Statement => Self::Refused(describe(error)),
        }
    }
}

/// What settings need of the database, beside the schema.
#[derive(Debug, Clone)]
pub struct Needs {
    /// The effect functions, each once.
    pub effects: Vec<String>,
    /// The key rules of all sources.
    pub key_rules: Vec<KeyRule>,
}

impl Needs {
    /// What is needed here and was not in `before`, in words.
    #[must_use]
    pub fn beyond(&self, before: &Self) -> Vec<String> {
        let effects = self.effects.iter().filter(|effect| !before.effects.contains(effect));
        let rules = self.key_rules.iter().filter(|rule| !before.key_rules.contains(rule));
        let rules = rules.map(|rule| format!("the key rule of source {}", rule.source));
        effects.map(|effect| format!("effect {effect}")).chain(rules).collect()
    }
}

/// Checks the schema's version, every effect function and every source's key rule. Writes nothing. Returns the
/// rules of sources that have none stored.
///
/// # Errors
/// The first thing that is not as it must be.
pub async fn check_schema(client: &Client, needs: &Needs) -> Result<Vec<KeyRule>, Unready> {
    check_migrations(client).await?;
    check_rights(client).await?;
    for name in &needs.effects {
        check_effect(client, name).await?;
    }
    check_key_rules(client, &needs.key_rules).await
}

/// As [`check_schema`]; then stores the rules of sources that have none stored.
///
/// # Errors
/// The first thing that is not as it must be.
pub async fn take_up(client: &Client, needs: &Needs) -> Result<(), Unready> {
    check_schema(client, needs).await?;
    store_key_rules(client, &needs.key_rules).await.map(drop)
}

/// Stores the rules of sources that have none stored, unless another source's rule changed; returns them.
///
/// # Errors
/// The changes.
pub async fn store_key_rules(client: &Client, rules: &[KeyRule]) -> Result<Vec<KeyRule>, Unready> {
    let new = check_key_rules(client, rules).await?;
    if !new.is_empty() {
        key_rule::store_new(client, &new).await.map_err(|error| Unready::asking(&error))?;
        // Another gateway may have been faster, with another rule.
        check_key_rules(client, &new).await?;
    }
    Ok(new)
}

async fn check_key_rules(client: &Client, rules: &[KeyRule]) -> Result<Vec<KeyRule>, Unready> {
    let compared = key_rule::compare(client, rules).await.map_err(|error| Unready::asking(&error))?;
    compared.unchanged().map_err(Unready::KeyRules)
}

/// Whether the schema is the one that this program was built for.
///
/// # Errors
/// What is missing, or too new.
pub async fn check_migrations(client: &Client) -> Result<(), Unready> {
    let asked = |error| Unready::asking(&error);
    let exists = "select to_regnamespace('hapax') is not null as schema, current_setting('server_encoding') as encoding";
    let row = client.query_typed_one(exists, &[]).await.map_err(asked)?;
    check_encoding(row.get("encoding")).map_err(Unready::Refused)?;
    let (mut highest, mut usable) = (0, false);
    if row.get("schema") {
        let usage = "select has_schema_privilege('hapax', 'usage')";
        if !client.query_typed_one(usage, &[]).await.map_err(asked)?.get::<_, bool>(0) {
            return Err(Unready::Refused("this role lacks usage on schema hapax: grant it".to_owned()));
        }
        let table = "select to_regclass('hapax.migration') is not null";
        usable = client.query_typed_one(table, &[]).await.map_err(asked)?.get(0);
    }
    if usable {
        let newest = "select coalesce(max(number), 0) from hapax.migration";
        highest = client.query_typed_one(newest, &[]).await.map_err(asked)?.get(0);
    }
    if let Some((number, name, _)) = MIGRATIONS.iter().find(|(number, ..)| *number > highest) {
        return Err(Unready::NotMigrated(format!("{number:04}_{name}")));
    }
    match MIGRATIONS.last() {
        Some((newest, ..)) if highest > *newest => Err(Unready::TooNew(highest)),
        _ => Ok(()),
    }
}

/// Ids and error messages are text of any language.
fn check_encoding(encoding: &str) -> Result<(), String> {
    match encoding {
        "UTF8" => Ok(()),
        other => Err(format!("the database's encoding is {other}: make one with encoding 'UTF8'")),
    }
}

async fn check_rights(client: &Client) -> Result<(), Unready> {
    let asked = |error| Unready::asking(&error);
    let row = client
        .query_typed_one(include_str!("../sql/queries/lacking_rights.sql"), &[])
        .await
        .map_err(asked)?;
    match row.get::<_, &str>("lacking") {
        "" => {}
        lacking => return Err(Unready::Refused(format!("this role lacks {lacking}: grant that"))),
    }
    // Raises what keeps it from being read.
    client.query_typed_one("select hapax.generation()", &[]).await.map_err(asked)?;
    Ok(())
}

/// The parts of the generation that this role or server may not read. Markers then tell fewer histories apart.
///
/// # Errors
/// Those of asking.
pub async fn unreadable_parts(client: &Client) -> Result<Vec<&'static str>, tokio_postgres::Error> {
    let parts = [
        ("the system identifier (pg_control_system)", "(pg_control_system()).system_identifier"),
        ("the timeline (pg_walfile_name)", "substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8)"),
    ];
    let mut unreadable = Vec::new();
    for (name, expression) in parts {
        let read =
            client.query_typed_one("select hapax.readable($1) is null", &[(&expression, Type::TEXT)]).await?;
        if read.get(0) {
            unreadable.push(name);
        }
    }
    Ok(unreadable)
}

async fn check_effect(client: &Client, name: &str) -> Result<(), Unready> {
    let refuse = |problem: &str| Err(Unready::Effect { name: name.to_owned(), problem: problem.to_owned() });
    let found = client
        .query_typed_opt(
            include_str!("../sql/queries/effect_function.sql"),
            &[(&format!("{name}(hapax.event)"), Type::TEXT)],
        )
        .await;
    let row = match found {
        Ok(Some(row)) => row,
        Ok(None) => {
            return refuse(&format!(
                "no such function: create function {name}(e hapax.event) returns void, or fix the name"
            ));
        }
        Err(error) if error.as_db_error().is_some() => return refuse(&describe(&error)),
        Err(error) => return Err(Unready::asking(&error)),
    };
    if row.get::<_, bool>("returns_set") {
        return refuse("it returns a set; an effect returns void");
    }
    if !row.get::<_, bool>("is_function") {
        return refuse("it is not a plain function (an aggregate, a window function or a procedure)");
    }
    if !row.get::<_, bool>("is_volatile") {
        return refuse("it is not VOLATILE, so Postgres may leave calls out; declare it VOLATILE");
    }
    if !row.get::<_, bool>("returns_void") {
        return refuse("it does not return void: what it returns would be thrown away");
    }
    if !row.get::<_, bool>("may_execute") {
        return refuse("this role may not execute it: grant execute on the function");
    }
    Ok(())
}

/// Reads the generation for ever, on a connection of its own. Returns only with the task's cancellation.
///
/// Writes nothing; dropping it at any point is safe.
pub async fn heartbeat_loop(settings: config::Postgres, heartbeat: Arc<Heartbeat>, beat: Beat) {
    let mut failures: u32 = 0;
    loop {
        beat.alive();
        let Err(error) = heartbeat_session(&settings, &heartbeat, &mut failures, &beat).await;
        failures += 1;
        // One line for each power of two, so that an outage does not fill the log.
        if failures.is_power_of_two() {
            warn!(error = format!("{error:#}"), failures, "heartbeat: the generation cannot be read");
        }
        beat.waiting(tokio::time::sleep(settings.heartbeat)).await;
    }
}

async fn heartbeat_session(
    settings: &config::Postgres,
    heartbeat: &Heartbeat,
    failures: &mut u32,
    beat: &Beat,
) -> anyhow::Result<Infallible> {
    let client = connect(settings).await?;
    loop {
        let sent = Instant::now();
        let row = tokio::time::timeout(
            settings.generation_age_max,
            client.query_typed_one("select hapax.generation()", &[]),
        )
        .await??;
        let bytes: &[u8] = row.try_get(0)?;
        let Some(generation) = Generation::from_bytes(bytes) else {
            anyhow::bail!("hapax.generation() returned {} bytes: run `hapax migrate`", bytes.len());
        };
        if std::mem::take(failures) > 0 {
            info!("heartbeat: the generation can be read again");
        }
        if heartbeat.note(generation, sent) {
            warn!(generation = %generation.text(), "the database has another generation: older markers no longer count");
        }
        beat.waiting(tokio::time::sleep(settings.heartbeat)).await;
    }
}

/// Makes the day partitions of today and seven days ahead; returns how many were missing. Does not wait for locks
/// longer than 100 ms.
///
/// # Errors
/// Those of connecting, and what Postgres says.
pub async fn make_body_partitions(settings: &config::Postgres) -> anyhow::Result<i32> {
    let client = connect(settings).await?;
    let made = client.query_typed_one("select hapax.make_body_partitions(7)", &[]);
    let row = tokio::time::timeout(settings.connect_timeout, made).await??;
    Ok(row.try_get(0)?)
}
