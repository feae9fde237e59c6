//! `hapax check`: every mistake in the settings at once, and with `--online` whether stores and key sets are as they must be.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use tokio_postgres::Client;

use super::{Exit, connect, load_with_warnings, runtime, say};
use crate::config::{Config, Effect};
use crate::keyring::{Keyring, Trouble};
use crate::provider::pin::Pinned;
use crate::tasks::Tasks;
use crate::{claim, db, serve, work};

/// Checks the settings; with `online` also the stores, and the key sets that will be fetched.
///
/// # Errors
/// Exit code 64 for mistakes in the settings, 69 for a store or a key set that is away or wrong.
pub fn run(path: &Path, online: bool) -> Result<(), Exit> {
    let config = load_with_warnings(path)?.config;
    tell_rust_effects(&config)?;
    tell_keys(&config)?;
    if online {
        runtime(1)?.block_on(check_stores(&config))?;
    }
    say(format!("{}: ok, {} sources", path.display(), config.sources.len()))
}

/// They are in the program that will serve; this one cannot look.
fn tell_rust_effects(config: &Config) -> Result<(), Exit> {
    for source in config.sources.values() {
        if let Effect::Rust { name, .. } = &source.effect {
            say(format!(
                "source {}: not checked here: whether the program that serves has registered effect \"rust:{name}\"",
                source.name
            ))?;
        }
    }
    Ok(())
}

/// Where keys come from that are in no settings.
fn tell_keys(config: &Config) -> Result<(), Exit> {
    for source in config.sources.values().filter(|source| source.fetches_keys()) {
        let told = match source.key_set() {
            Some(url) => format!("keys are fetched from {url}"),
            None => "certificates are fetched as requests name them, from where its provider pins".to_owned(),
        };
        say(format!("source {}: {told}", source.name))?;
    }
    Ok(())
}

/// Each is looked at, whatever the other one says.
async fn check_stores(config: &Config) -> Result<(), Exit> {
    let found = [check_postgres(config).await, check_keys(config).await, check_redis(config).await];
    let wrong: Vec<String> = found.into_iter().filter_map(Result::err).map(|exit| exit.message).collect();
    if wrong.is_empty() { Ok(()) } else { Err(Exit::unavailable(wrong.join("\n"))) }
}

async fn check_postgres(config: &Config) -> Result<(), Exit> {
    let client = connect(&config.postgres).await?;
    // Sessions that record begin otherwise than this one, which a proxy may not let them.
    let recording = db::pool(&config.postgres)?.get().await;
    drop(recording.map_err(|error| Exit::unavailable(format!("Postgres: {}", db::describe_pool(&error))))?);
    let limit = config.postgres.connect_timeout;
    let looked = tokio::time::timeout(limit, db::check_schema(&client, &serve::needs(config))).await;
    let looked =
        looked.map_err(|_elapsed| Exit::unavailable(format!("Postgres: no answer within {limit:?}")))?;
    let new = looked.map_err(Exit::unavailable)?;
    say("postgres: ok, schema, effects and key rules are as this version needs them")?;
    for rule in new {
        say(format!("postgres: source {} is new; its key rule will be `{}`", rule.source, rule.text))?;
    }
    let unreadable =
        db::unreadable_parts(&client).await.map_err(|error| Exit::unavailable(db::describe(&error)))?;
    for part in unreadable {
        say(format!(
            "postgres: {part} may not be read, so a failover or a restored copy may go unnoticed until a restart"
        ))?;
    }
    tell_orphans(config, &client).await
}

/// Work that waits for what the settings do not name.
async fn tell_orphans(config: &Config, client: &Client) -> Result<(), Exit> {
    let rows = client.query_typed(include_str!("../../sql/queries/queues.sql"), &[]).await;
    let rows = rows.map_err(|error| Exit::unavailable(db::describe(&error)))?;
    let known = work::queues_of(config);
    for queue in rows.iter().map(|row| row.get::<_, &str>("queue")).filter(|queue| !known.contains(*queue)) {
        say(format!(
            "postgres: events wait in queue {queue}, and no target or effect of these settings takes them: add it again, or \
             give them up with `hapax events discard --status open`, its source or --target, and --dry-run first"
        ))?;
    }
    Ok(())
}

async fn check_keys(config: &Config) -> Result<(), Exit> {
    let keyring = Keyring::start(config, Arc::default(), Tasks::default())?;
    if let Some(authorities) = keyring.authorities() {
        say(format!("keys: {authorities} authorities are trusted for what is fetched"))?;
    }
    let sets: BTreeSet<&Pinned> = config.sources.values().filter_map(|source| source.key_set()).collect();
    for url in sets {
        match keyring.count_set(url).await {
            Ok(count) => say(format!("keys: {url} has {count}"))?,
            Err(Trouble { cause, .. }) => return Err(Exit::unavailable(format!("keys: {url}: {cause}"))),
        }
    }
    Ok(())
}

async fn check_redis(config: &Config) -> Result<(), Exit> {
    match claim::check(&config.fast_tier).await {
        Ok(found) => say(format!("redis: {found}")),
        Err(cause) => Err(Exit::unavailable(format!("redis: {cause}"))),
    }
}
