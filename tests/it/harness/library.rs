//! A gateway that this process itself runs, from the library, and an effect in Rust.

use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result};
use hapax::config::{self, Config, Loaded};
use hapax::effect::{Effect, EffectError, Effects, Event, Handle, async_trait};
use hapax::log::Log;
use hapax::metrics::Metrics;
use hapax::serve::{self, Running};
use hapax::tasks::Tasks;
use http::StatusCode;
use serde::Deserialize;
use serde_json::Value;
use tokio::signal::unix::{SignalKind, signal};

use super::client::Client;
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
        Self::start_with(config, effects).await
    }

    async fn start_with(config: Config, effects: &Effects) -> Result<Self> {
        let log = tempfile::Builder::new().suffix(".log").tempfile_in(stores::folder().path())?;
        let (_, log) = log.keep()?;
        let metrics = Arc::new(Metrics::new());
        let lines = Log::start_in(File::create(&log)?, metrics.log_lines_dropped.clone())?;
        let running = serve::start(Arc::new(config), effects, metrics, lines).await?;
        Ok(Self { running, log })
    }

    /// Starts it on the settings of a file, and takes up what changes there.
    pub(crate) async fn follow(file: &Path, effects: &Effects) -> Result<Self> {
        let Loaded { config, files, .. } =
            Config::load(file).map_err(|problems| anyhow::anyhow!(config::report(&problems)))?;
        let started = Self::start_with(config, effects).await?;
        // Not the one that all gateways of a test run would share with its terminal.
        started.running.follow(file.to_owned(), files, signal(SignalKind::user_defined1())?);
        Ok(started)
    }

    pub(crate) fn listen(&self) -> SocketAddr {
        self.running.listen
    }

    /// What its listener for operators answers.
    pub(crate) async fn ask(&self, path: &str) -> Result<(StatusCode, String)> {
        let answer = Client::new(self.running.admin).get(path).await?;
        Ok((answer.status, String::from_utf8(answer.body.into())?))
    }

    /// Its loops.
    pub(crate) fn tasks(&self) -> &Tasks {
        self.running.tasks()
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

/// What the bodies of these tests ask for.
#[derive(Deserialize)]
struct Wish<'a> {
    #[serde(rename = "do", default)]
    what: &'a str,
    #[serde(default)]
    sql: String,
}

/// An effect that writes a row into `fx.effect` for each time that it runs, and then does what the body says.
#[derive(Debug, Clone, Default)]
pub(crate) struct Book(Arc<AtomicUsize>);

impl Book {
    /// How often it was called.
    pub(crate) fn calls(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }

    /// As `rust:book`.
    pub(crate) fn registered(&self) -> Effects {
        Effects::default().with("book", self.clone())
    }
}

#[async_trait]
impl Effect for Book {
    async fn apply(&self, event: &Event<'_>, handle: &mut Handle<'_>) -> Result<(), EffectError> {
        let nth = self.0.fetch_add(1, Ordering::SeqCst);
        let Wish { what, sql } = event.json()?;
        let book = "insert into fx.effect (source, event_id) values ($1, $2)";
        handle.execute(book, &[&event.source, &event.event_id]).await?;
        match what {
            "fail" => return Err(EffectError::fail("the effect fails")),
            "reject" => return Err(EffectError::reject("never")),
            "say" => return Err(EffectError::fail(sql)),
            "say_and_reject" if nth == 0 => return Err(EffectError::fail(sql)),
            "say_and_reject" => return Err(EffectError::reject(sql)),
            "reject_after" => {
                handle.execute(&sql, &[]).await.map_err(|_error| EffectError::reject("after an error"))?;
            }
            "run" => drop(handle.execute(&sql, &[]).await?),
            "unlimited" => {
                handle.execute("set local statement_timeout = 0", &[]).await?;
                handle.execute(&sql, &[]).await?;
            }
            "swallow" => drop(handle.execute(&sql, &[]).await),
            "once" if nth == 0 => drop(handle.execute(&sql, &[]).await?),
            "twice" if nth < 2 => return Err(EffectError::fail("the effect fails")),
            "wait" => drop(handle.query("select pg_advisory_xact_lock_shared(7)", &[]).await?),
            "drop" => {
                let statement = handle.execute("select pg_advisory_xact_lock_shared(7)", &[]);
                tokio::select! { biased; _ = statement => {}, () = tokio::task::yield_now() => {} }
            }
            "panic" => assert!(!sql.is_empty(), "as the body asked for"),
            "never" => std::future::pending().await,
            "none" => drop(handle.query_one("select 1 where false", &[]).await),
            _ => {}
        }
        Ok(())
    }
}
