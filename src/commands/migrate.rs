//! `hapax migrate`: applies what is missing.

use std::path::Path;

use super::{Exit, load, runtime, say};
use crate::{config, db};

/// Applies missing migrations and says which.
///
/// # Errors
/// Exit code 64 for the settings, 69 for Postgres.
pub fn run(path: &Path) -> Result<(), Exit> {
    let config = load(path)?;
    let applied = runtime(1)?.block_on(apply(&config.postgres))?;
    if applied.is_empty() {
        return say("nothing to apply: the schema is up to date");
    }
    applied.iter().try_for_each(|name| say(format!("applied {name}")))
}

/// Applies missing migrations; returns their names.
///
/// # Errors
/// What Postgres says of the first that failed; those before it stay applied.
pub async fn apply(settings: &config::Postgres) -> Result<Vec<String>, Exit> {
    let mut client = db::connect(settings).await?;
    Ok(db::migrate(&mut client).await?)
}
