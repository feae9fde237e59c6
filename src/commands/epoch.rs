//! `hapax epoch`: which history of the database counts, and the switch that begins a new one by hand.

use std::path::Path;

use anyhow::Context as _;

use super::{Exit, connect, load, runtime, say};
use crate::config::Config;
use crate::db;
use crate::generation::Generation;

/// Says what the generation is and what it is made of; with `new`, begins another one first.
///
/// # Errors
/// Exit code 64 for the settings, 69 for Postgres.
pub fn run(path: &Path, new: bool) -> Result<(), Exit> {
    let config = load(path)?;
    runtime(1)?.block_on(show(&config, new))
}

async fn show(config: &Config, new: bool) -> Result<(), Exit> {
    let client = connect(&config.postgres).await?;
    db::check_migrations(&client).await.map_err(Exit::unavailable)?;
    if new {
        renew(&client).await?;
    }
    for (name, value) in parts(&client).await? {
        say(format!("{name:<12}{value}"))?;
    }
    if new {
        say(format!(
            "A new epoch has begun. All markers and what gateways remember count for nothing as soon as each has \
             noticed: within postgres.heartbeat ({:?}), at the latest after postgres.generation_age_max ({:?}). \
             Until their markers are written anew, Postgres answers the duplicates. No event is lost or taken twice.",
            config.postgres.heartbeat, config.postgres.generation_age_max
        ))?;
    }
    Ok(())
}

/// One statement, which commits by itself.
async fn renew(client: &db::Session) -> anyhow::Result<()> {
    let renewed = client.execute("update hapax.installation set epoch = gen_random_uuid()", &[]).await;
    let rows = renewed.map_err(|error| anyhow::anyhow!(db::describe(&error)))?;
    anyhow::ensure!(
        rows == 1,
        "hapax.installation has {rows} rows instead of one: insert it with default values"
    );
    Ok(())
}

async fn parts(client: &db::Session) -> anyhow::Result<[(&'static str, String); 6]> {
    let row = client
        .query_one(include_str!("../../sql/queries/generation_parts.sql"), &[])
        .await
        .map_err(|error| anyhow::anyhow!(db::describe(&error)))?;
    let generation = Generation::from_bytes(row.try_get("generation")?)
        .context("hapax.generation() returned something of another length: run `hapax migrate`")?;
    let part = |name: &str| -> anyhow::Result<String> {
        let value: Option<String> = row.try_get(name)?;
        Ok(value.unwrap_or_else(|| "may not be read, so it is left out".to_owned()))
    };
    Ok([
        ("generation", generation.text()),
        ("epoch", part("epoch")?),
        ("system", part("system")?),
        ("timeline", part("timeline")?),
        ("started", part("started")?),
        ("ledger", part("ledger")?),
    ])
}
