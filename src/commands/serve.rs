//! `hapax serve`: a gateway until a signal comes. The entry for programs with effects of their own.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::{Exit, Signals, load, migrate, raise_open_files, runtime};
use crate::config::Config;
use crate::effect::Effects;
use crate::log::Log;
use crate::metrics::Metrics;
use crate::serve;

/// Reads the settings and serves until SIGTERM or SIGINT; a second one ends it at once. With `migrate`, missing
/// migrations are applied first.
///
/// It makes its own runtime, so it is not to be called within one.
///
/// # Errors
/// 64 for the settings, also if they name an effect that is not in `effects`; 69 if a store is not as it must be; 70 if
/// the program cannot go on.
pub fn run(path: &Path, migrate: bool, effects: &Effects) -> Result<(), Exit> {
    let config = load(path)?;
    effects
        .check(&config)
        .map_err(|unknown| Exit::settings(format!("{}: error: {unknown}", path.display())))?;
    raise_open_files(config.server.connections_max + config.postgres.connections);
    let metrics = Arc::new(Metrics::new());
    let log = Log::start(metrics.log_lines_dropped.clone())?;
    log.install(&config.log.level);
    let serving = serve_until_stopped(&config, migrate, effects, metrics, &log);
    let served = runtime(config.server.threads)?.block_on(serving);
    log.flush(Duration::from_secs(1));
    served
}

async fn serve_until_stopped(
    config: &Config,
    migrate: bool,
    effects: &Effects,
    metrics: Arc<Metrics>,
    log: &Log,
) -> Result<(), Exit> {
    if migrate {
        migrate::apply(&config.postgres).await?;
    }
    let running = serve::start(config, effects, metrics, log.clone()).await?;
    let mut stop = Signals::listen()?;
    tokio::select! {
        () = stop.next() => {}
        () = running.broken() => return Err(Exit::software("a background loop ended; see the log")),
    }
    tokio::select! {
        () = running.stop(config.server.drain) => Ok(()),
        () = stop.next() => Err(Exit::software("stopped at once by a second signal")),
    }
}
