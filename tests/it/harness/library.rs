//! A gateway that this process itself runs, from the library, with effects of its own.

use std::fs::File;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use hapax::config::{self, Config};
use hapax::effect::Effects;
use hapax::log::Log;
use hapax::metrics::Metrics;
use hapax::serve::{self, Running};
use serde_json::Value;

use super::stores;
use super::wait::eventually;

/// Ends with the test's runtime.
#[derive(Debug)]
pub(crate) struct Library {
    running: Running,
    log: PathBuf,
}

impl Library {
    /// Starts it on these settings.
    pub(crate) async fn start(settings: &str, effects: &Effects) -> Result<Self> {
        let parsed = Config::parse("hapax.toml", settings, &|_| None);
        let config = parsed.map_err(|problems| anyhow::anyhow!(config::report(&problems)))?.config;
        let log = tempfile::Builder::new().suffix(".log").tempfile_in(stores::folder().path())?;
        let (_, log) = log.keep()?;
        let metrics = Arc::new(Metrics::new());
        let lines = Log::start_in(File::create(&log)?, metrics.log_lines_dropped.clone())?;
        let running = serve::start(&config, effects, metrics, lines).await?;
        Ok(Self { running, log })
    }

    pub(crate) fn listen(&self) -> SocketAddr {
        self.running.listen
    }

    /// Waits for the cause of an event's failure, in the log.
    pub(crate) async fn cause(&self, id: &str) -> Result<String> {
        let cause = |line: Value| {
            let of = |name: &str| line.get(name)?.as_str().map(str::to_owned);
            if of("event.id").as_deref() == Some(id) { of("error.cause") } else { None }
        };
        let find = || {
            let text = std::fs::read_to_string(&self.log).ok()?;
            text.lines().filter_map(|line| serde_json::from_str(line).ok()).find_map(cause)
        };
        let found = eventually(Duration::from_secs(30), || std::future::ready(find())).await;
        found.with_context(|| format!("no cause for {id}"))
    }
}
