//! `hapax serve`: a gateway until a signal comes. The entry for programs with effects of their own.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::{Exit, Signals, hangups, load_with_warnings, migrate, raise_open_files, runtime};
use crate::config::Loaded;
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
    let loaded = load_with_warnings(path)?;
    let config = &loaded.config;
    effects
        .check(config)
        .map_err(|unknown| Exit::settings(format!("{}: error: {unknown}", path.display())))?;
    raise_open_files(config.server.connections_max + config.postgres.connections);
    let metrics = Arc::new(Metrics::new());
    let log = Log::start(metrics.log_lines_dropped.clone())?;
    log.install(&config.log.level);
    let runtime = runtime(config.server.threads)?;
    let served = runtime.block_on(serve_until_stopped((path, loaded), migrate, effects, metrics, &log));
    log.flush(LAST_WORDS);
    // A file that cannot be read to its end holds up nobody.
    runtime.shutdown_timeout(LAST_WORDS);
    served
}

/// What a process that has stopped may still take.
const LAST_WORDS: Duration = Duration::from_secs(1);

async fn serve_until_stopped(
    (path, loaded): (&Path, Loaded),
    migrate: bool,
    effects: &Effects,
    metrics: Arc<Metrics>,
    log: &Log,
) -> Result<(), Exit> {
    // Before anything that takes time, so that an early signal is kept and not the end.
    let hangups = hangups()?;
    let Loaded { config, files, .. } = loaded;
    if migrate {
        migrate::apply(&config.postgres).await?;
    }
    let running = serve::start(Arc::new(config), effects, metrics, log.clone()).await?;
    running.follow(path.to_owned(), files, hangups);
    let mut stop = Signals::listen()?;
    tokio::select! {
        () = stop.next() => {}
        () = running.broken() => return Err(Exit::software("a background loop fails again and again; see the log")),
    }
    let drain = running.drain();
    tokio::select! {
        () = running.stop(drain) => Ok(()),
        () = stop.next() => Err(Exit::software("stopped at once by a second signal")),
    }
}
