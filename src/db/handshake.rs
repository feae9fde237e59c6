//! Windows in which providers hand over secrets, as the database knows them.
//!
//! Invariant: a secret is stored only by `hapax.take_handshake`, which looks at the window by the database's clock and
//! stores in one transaction; nothing replaces a secret. Each call is one statement, which commits by itself: dropping it
//! half-way leaves all of it done, or nothing.

use std::time::Duration;

use tokio_postgres::types::Type;
use tokio_postgres::{Client, Error, Row};

use crate::config::{Secret, SynchronousCommit};

/// Most secrets of one source: each costs a computation per request, also for senders that know none of them.
pub const SECRETS_MAX: i64 = 8;

/// A window that is open, or that a secret was taken in.
#[derive(Debug, Clone)]
pub struct Window {
    /// The source.
    pub source: String,
    /// What was taken in it.
    pub secret: Option<Secret>,
    /// By the database's clock.
    pub open: bool,
}

/// What became of a secret that was handed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Taking {
    /// It is stored now.
    Taken,
    /// It was stored before.
    Known,
    /// The window has taken another one.
    Spent,
    /// No window is open.
    Closed,
}

/// A secret that was never shown before.
#[derive(Debug)]
pub struct Shown {
    /// The secret.
    pub secret: Secret,
    /// When it was taken.
    pub taken_at: String,
}

/// What forgetting came to.
#[derive(Debug, PartialEq, Eq)]
pub struct Forgotten {
    /// Secrets that are gone.
    pub secrets: i64,
    /// Secrets that nobody has seen yet; if there are any, nothing was forgotten.
    pub unshown: i64,
}

/// All windows that are open or have taken a secret.
///
/// # Errors
/// What Postgres says.
pub async fn read(client: &Client) -> Result<Vec<Window>, Error> {
    let rows = client.query_typed(include_str!("../../sql/queries/handshakes.sql"), &[]).await?;
    let window = |row: &Row| {
        let secret: Option<String> = row.try_get("secret")?;
        Ok(Window { source: row.try_get("source")?, secret: secret.map(Secret), open: row.try_get("open")? })
    };
    rows.iter().map(window).collect()
}

/// Stores a secret if the source's window lets it. The answer is that of a commit that is confirmed.
///
/// # Errors
/// What Postgres says; then it may be stored or not.
pub async fn take(
    client: &Client,
    source: &str,
    secret: &Secret,
    durability: SynchronousCommit,
) -> Result<Taking, Error> {
    let parameters =
        [(&source as _, Type::TEXT), (&secret.0 as _, Type::TEXT), (&durability.as_str() as _, Type::TEXT)];
    let row =
        client.query_typed_one(include_str!("../../sql/queries/take_handshake.sql"), &parameters).await?;
    Ok(match row.try_get(0)? {
        "taken" => Taking::Taken,
        "known" => Taking::Known,
        "spent" => Taking::Spent,
        _ => Taking::Closed,
    })
}

/// Opens a window, in place of one that is open; returns when it ends. `None`: too many secrets are stored.
///
/// # Errors
/// What Postgres says.
pub async fn open(client: &Client, source: &str, length: Duration) -> Result<Option<String>, Error> {
    let seconds = length.as_secs_f64();
    let parameters =
        [(&source as _, Type::TEXT), (&seconds as _, Type::FLOAT8), (&SECRETS_MAX as _, Type::INT8)];
    let row =
        client.query_typed_opt(include_str!("../../sql/queries/open_handshake.sql"), &parameters).await?;
    row.map(|row| row.try_get("open_until")).transpose()
}

/// Closes the source's window; returns whether one was open.
///
/// # Errors
/// What Postgres says.
pub async fn close(client: &Client, source: &str) -> Result<bool, Error> {
    let statement = include_str!("../../sql/queries/close_handshake.sql");
    Ok(client.execute_typed(statement, &[(&source, Type::TEXT)]).await? > 0)
}

/// The source's secrets that were never shown; they are marked as shown.
///
/// # Errors
/// What Postgres says.
pub async fn show(client: &Client, source: &str) -> Result<Vec<Shown>, Error> {
    let statement = include_str!("../../sql/queries/show_handshake.sql");
    let rows = client.query_typed(statement, &[(&source, Type::TEXT)]).await?;
    let shown =
        |row: &Row| Ok(Shown { secret: Secret(row.try_get("secret")?), taken_at: row.try_get("taken_at")? });
    rows.iter().map(shown).collect()
}

/// Forgets the source's windows and secrets, unless one of them was never shown.
///
/// # Errors
/// What Postgres says.
pub async fn forget(client: &Client, source: &str) -> Result<Forgotten, Error> {
    let statement = include_str!("../../sql/queries/forget_handshake.sql");
    let row = client.query_typed_one(statement, &[(&source, Type::TEXT)]).await?;
    Ok(Forgotten { secrets: row.try_get("forgotten")?, unshown: row.try_get("unshown")? })
}

/// All windows, each with its source, when it was opened and what became of it.
///
/// # Errors
/// What Postgres says.
pub async fn list(client: &Client) -> Result<Vec<[String; 3]>, Error> {
    let rows = client.query_typed(include_str!("../../sql/queries/list_handshakes.sql"), &[]).await?;
    let line = |row: &Row| Ok([row.try_get("source")?, row.try_get("opened_at")?, row.try_get("state")?]);
    rows.iter().map(line).collect()
}
