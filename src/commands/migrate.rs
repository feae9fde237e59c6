//! `hapax migrate`: applies what is missing, and stores by which rules the sources make their events' keys.

use std::path::Path;

use super::{Exit, connect, load_with_warnings, runtime, say};
use crate::config::{self, Config};
use crate::db;
use crate::db::key_rule::{self, KeyRule};

/// Applies missing migrations and says which; then stores key rules: of sources that have none stored, and of those
/// named in `accept` also if another one is stored.
///
/// # Errors
/// Exit code 64 for the settings and for a name that is no source, 69 for Postgres and for a changed key rule that is not
/// accepted.
pub fn run(path: &Path, accept: &[String]) -> Result<(), Exit> {
    let config = load_with_warnings(path)?.config;
    if let Some(name) = accept.iter().find(|name| !config.sources.contains_key(*name)) {
        let known: Vec<&str> = config.sources.keys().map(String::as_str).collect();
        return Err(Exit::settings(format!("no source {name:?}; there are: {}", known.join(", "))));
    }
    runtime(1)?.block_on(migrate(&config, accept))
}

async fn migrate(config: &Config, accept: &[String]) -> Result<(), Exit> {
    let applied = apply(&config.postgres).await?;
    if applied.is_empty() {
        say("nothing to apply: the schema is up to date")?;
    }
    applied.iter().try_for_each(|name| say(format!("applied {name}")))?;
    let client = connect(&config.postgres).await?;
    let rules = KeyRule::of_all(config);
    for rule in rules.iter().filter(|rule| accept.contains(&rule.source)) {
        let replaced = key_rule::replace(&client, std::slice::from_ref(rule)).await;
        let said = match replaced.map_err(|error| Exit::unavailable(db::describe(&error)))? {
            0 => "the key rule is the stored one",
            _ => "accepted the key rule",
        };
        say(format!("source {}: {said}: {}", rule.source, rule.text))?;
    }
    for rule in db::store_key_rules(&client, &rules).await.map_err(Exit::unavailable)? {
        say(format!("source {}: stored the key rule: {}", rule.source, rule.text))?;
    }
    Ok(())
}

/// Applies missing migrations; returns their names.
///
/// # Errors
/// What Postgres says of the first that failed; those before it stay applied.
pub async fn apply(settings: &config::Postgres) -> Result<Vec<String>, Exit> {
    let mut client = connect(settings).await?;
    Ok(db::migrate(&mut client).await?)
}
