//! `hapax ready`: asks a running gateway whether it is ready, for health checks where there is no other client.

use std::path::Path;
use std::time::Duration;

use super::client::{Connection, Target, reachable};
use super::{Exit, load, runtime, say};

/// For the whole question.
const LIMIT: Duration = Duration::from_secs(2);

/// Asks `/ready` on the settings' admin address.
///
/// # Errors
/// Exit code 64 for the settings, 69 if there is no answer, 1 if it is not ready.
pub fn run(path: &Path) -> Result<(), Exit> {
    let config = load(path)?;
    let listen = reachable(config.admin.listen);
    let target = Target::parse(&format!("http://{listen}/ready")).map_err(Exit::software)?;
    let asked = runtime(1)?.block_on(async { tokio::time::timeout(LIMIT, ask(&target)).await });
    let asked = asked.unwrap_or_else(|_elapsed| Err(anyhow::anyhow!("no answer within {LIMIT:?}")));
    let status = asked.map_err(|error| Exit::unavailable(format!("{listen}: {error:#}")))?;
    match status {
        200 => say("ready"),
        other => Err(Exit::failed(format!("not ready (status {other}); {listen}/ready says why"))),
    }
}

async fn ask(target: &Target) -> anyhow::Result<u16> {
    Ok(Connection::open(target).await?.get().await?.status)
}
