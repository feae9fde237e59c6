//! Pull by SQL: any number of workers, each of whom may fall silent at any moment, and one committed effect.

mod sql;
mod worker;
mod workers;

use std::time::Duration;

use anyhow::{Context as _, Result};
use tokio_postgres::{Client as Database, Row};

use super::harness::gateway::{Gateway, Start};
use super::harness::play::is_ready;
use super::harness::scene::Scene;
use super::harness::wait::eventually;

const LONG: Duration = Duration::from_secs(60);

/// A gateway without a fast tier, whose source `plain` is pulled.
async fn gateway(scene: &Scene, more: &[&str]) -> Result<Gateway> {
    let tier = ["fast_tier.kind = \"off\"", "fast_tier.url =", "fast_tier.prefix =", "fast_tier.timeout ="];
    let keys = [&tier[..], &["source.plain.effect = \"pull\"", "work.poll = \"100ms\""], more].concat();
    let gateway = Start::new(scene.settings(&keys, "")).start().await?;
    is_ready(&gateway, http::StatusCode::OK).await?;
    Ok(gateway)
}

/// Roles belong to all databases of a server.
fn role_name(scene: &Scene) -> String {
    format!("worker_of_{}", scene.stores.database.replace('-', "_"))
}

/// A role with the rights that are documented, under a name of this scene's own, and the documented table.
async fn role(scene: &Scene) -> Result<String> {
    let name = role_name(scene);
    let sql = worker::blocks("sql")?.first().context("no rights")?.replace("billing", &name);
    let database = scene.database().await?;
    database.batch_execute(&sql).await?;
    database
        .batch_execute(&format!("grant usage on schema fx to {name}; grant insert on fx.effect to {name}"))
        .await?;
    Ok(name)
}

/// The URL with which that role connects.
async fn role_url(scene: &Scene) -> Result<String> {
    let name = role(scene).await?;
    let (_, after) = scene.stores.postgres_url.split_once('@').context("a URL with a user")?;
    let password = "change%20me";
    Ok(format!("postgres://{name}:{password}@{after}"))
}

/// What `hapax.take` gave, as far as it has to be said again.
struct Held {
    key: Vec<u8>,
    token: String,
    attempt: i32,
    id: String,
}

async fn take(database: &Database, n: i32) -> Result<Vec<Held>> {
    let query = "select key, token::text, attempt, event_id from hapax.take('plain', $1, '1 minute')";
    let held = |row: Row| Held { key: row.get(0), token: row.get(1), attempt: row.get(2), id: row.get(3) };
    Ok(database.query(query, &[&n]).await?.into_iter().map(held).collect())
}

/// Takes the one event that is due.
async fn take_one(database: &Database) -> Result<Held> {
    take(database, 1).await?.pop().context("nothing is due")
}

impl Held {
    async fn done(&self, database: &Database) -> Result<(), tokio_postgres::Error> {
        let query = "select hapax.done($1, $2::text::uuid)";
        database.execute(query, &[&self.key, &self.token]).await.map(drop)
    }

    async fn fail(&self, database: &Database, retry_in: Option<&str>) -> Result<(), tokio_postgres::Error> {
        let query = "select hapax.fail($1, $2::text::uuid, 'it fails', $3::text::interval)";
        database.execute(query, &[&self.key, &self.token, &retry_in]).await.map(drop)
    }

    async fn extend(&self, database: &Database, lease: &str) -> Result<(), tokio_postgres::Error> {
        let query = "select hapax.extend($1, $2::text::uuid, $3::text::interval)";
        database.execute(query, &[&self.key, &self.token, &lease]).await.map(drop)
    }
}

/// The SQLSTATE and the message that were raised.
fn raised<T>(result: Result<T, tokio_postgres::Error>) -> (String, String) {
    let error = result.err().expect("it was raised");
    let error = error.as_db_error().expect("an error of the server");
    (error.code().code().to_owned(), error.message().to_owned())
}

/// The event's status and attempts.
async fn status(scene: &Scene, id: &str) -> Result<(String, i32)> {
    let query = "select status, attempts from hapax.events where event_id = $1";
    let row = scene.database().await?.query_one(query, &[&id]).await?;
    Ok((row.get(0), row.get(1)))
}

async fn until_status(scene: &Scene, id: &str, wanted: &str) -> Result<()> {
    let has = async || (status(scene, id).await.ok()?.0 == wanted).then_some(());
    eventually(LONG, has).await.with_context(|| format!("{id} does not become {wanted}"))
}
