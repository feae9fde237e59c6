//! Taking up changed settings while the gateway runs: at SIGHUP, and when a file that they come from has changed.
//!
//! Invariant: settings are taken up whole or refused whole. All that can fail (reading, checking, asking the database about
//! new effects and key rules) comes before the one step that replaces them, which cannot. Never here: a value of the
//! settings in a message, beside what `config` says of a mistake.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::signal::unix::Signal;
use tokio::sync::{Mutex, watch};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{sleep, timeout};
use tracing::{error, info, warn};

use crate::config::{Changes, Config, Files, Loaded, Look, Looks};
use crate::db::Unready;
use crate::effect::Effects;
use crate::ingest::Gateway;
use crate::log::Log;
use crate::metrics::Metrics;
use crate::serve::{needs, take_up_schema};
use crate::settings::{Problem, Severity};
use crate::tasks::Beat;

/// For reading all files: longer than any disk takes. A pipe or a dead network disk must not end all later reloads.
const READ_TIMEOUT: Duration = Duration::from_secs(10);

/// The parts of a running gateway that take up settings; clones share them.
#[derive(Debug, Clone)]
pub struct Live {
    /// The settings in use.
    pub current: watch::Sender<Arc<Config>>,
    /// Serves by them.
    pub gateway: Arc<Gateway>,
    /// What the program has for `effect = "rust:NAME"`.
    pub effects: Effects,
    /// Tells what became of changes.
    pub metrics: Arc<Metrics>,
    /// Has a level.
    pub log: Log,
    /// Whether the process is about to stop.
    pub draining: Arc<AtomicBool>,
}

/// Follows the files of a running gateway.
#[derive(Debug)]
pub struct Reload {
    live: Live,
    path: PathBuf,
    /// At what was read last, whether it was taken up or refused.
    looks: Looks,
    /// A look that is not back yet, so that a dead disk holds one thread and not more and more of them.
    looking: Option<JoinHandle<Files>>,
    /// Why the database did not let what was read be taken up. It may change its mind, so it is asked again.
    waits: Option<String>,
}

/// Why changed settings are not taken up.
#[derive(Debug)]
enum Refusal {
    /// Of what the files say; the same files will be refused again.
    Files(Vec<Problem>),
    /// The files could not be read in time. Not tried again by itself: each try may cost a thread that never ends.
    Unreadable,
    /// Of what this program or this machine lacks.
    Lacking(String),
    /// Of what the database says, or does not say; that can change.
    Database(String),
}

/// Runs for ever. Dropping it between two reloads or within one is safe: settings are replaced in one step. What was read
/// by then, and signals, are kept for the next life.
pub async fn run(kept: Arc<Mutex<(Reload, Signal)>>, beat: Beat) {
    let mut kept = kept.lock().await;
    let (reload, signal) = &mut *kept;
    loop {
        beat.alive();
        let pause = reload.live.current.borrow().server.reload_check;
        tokio::select! {
            Some(()) = beat.waiting(signal.recv()) => reload.reload(true).await,
            () = pause_for(pause) => reload.look().await,
        }
    }
}

impl Reload {
    /// `files` are what the settings in use were read from.
    #[must_use]
    pub fn new(live: Live, path: PathBuf, files: Files) -> Self {
        Self { live, path, looks: Looks::after(files), looking: None, waits: None }
    }

    /// Looks whether the files have changed; what waits for the database is tried again even if not.
    async fn look(&mut self) {
        if self.live.draining.load(Ordering::Relaxed) {
            return;
        }
        let looks = &self.looks;
        let looking = self.looking.get_or_insert_with(|| {
            let read = looks.read().clone();
            spawn_blocking(move || read.look_again())
        });
        let Ok(looked) = timeout(READ_TIMEOUT, looking).await else { return };
        self.looking = None;
        let Ok(now) = looked else { return };
        match self.looks.judge(now) {
            Look::Changed => self.reload(true).await,
            Look::Same if self.waits.is_some() => self.reload(false).await,
            Look::Same | Look::Unsettled => {}
        }
    }

    /// Reads the files and takes up what they say, or says why not: always if that is `news`, else only if the reason is
    /// another one.
    async fn reload(&mut self, news: bool) {
        if self.live.draining.load(Ordering::Relaxed) {
            info!("stopping: changed settings are not taken up any more");
            return;
        }
        let waited = self.waits.take();
        match self.try_reload().await {
            Ok(changes) => {
                self.live.metrics.settings_taken_up(jiff::Timestamp::now());
                tell(&changes);
            }
            Err(refusal) => {
                let told_already = match &refusal {
                    Refusal::Database(reason) => {
                        self.waits = Some(reason.clone());
                        !news && waited.as_ref() == Some(reason)
                    }
                    Refusal::Files(_) | Refusal::Lacking(_) | Refusal::Unreadable => false,
                };
                if !told_already {
                    self.live.metrics.settings_refused();
                    refusal.tell();
                }
            }
        }
    }

    async fn try_reload(&mut self) -> Result<Changes, Refusal> {
        let before = Arc::clone(&self.live.current.borrow());
        let (path, running) = (self.path.clone(), Arc::clone(&before));
        let reading = spawn_blocking(move || running.load_again(&path));
        let Ok(Ok((loaded, files))) = timeout(READ_TIMEOUT, reading).await else {
            return Err(Refusal::Unreadable);
        };
        self.looks = Looks::after(files);
        let Loaded { config, warnings, .. } = loaded.map_err(Refusal::Files)?;
        let effects = self.live.effects.check(&config);
        effects.map_err(|unknown| Refusal::Lacking(unknown.to_string()))?;
        ask_database(&before, &config).await.map_err(Refusal::Database)?;
        warnings.iter().for_each(tell_problem);
        let changes = Changes::between(&before, &config);
        let taken_up = self.live.take_up(Arc::new(config));
        taken_up.map_err(|lacking| Refusal::Lacking(format!("{lacking:#}")))?;
        Ok(changes)
    }
}

async fn pause_for(pause: Option<Duration>) {
    match pause {
        Some(pause) => sleep(pause).await,
        None => std::future::pending().await,
    }
}

impl Live {
    /// The one step; nothing in it waits, and only its beginning can fail.
    fn take_up(&self, config: Arc<Config>) -> anyhow::Result<()> {
        self.gateway.take_up(&config)?;
        self.log.set_level(&config.log.level);
        self.current.send_replace(config);
        Ok(())
    }
}

/// New effects must be there to be called, and new key rules must be the stored ones, or become that. What needs neither
/// (another secret, another limit) is taken up without the database, which may be away just then.
async fn ask_database(before: &Config, now: &Config) -> Result<(), String> {
    let needed = needs(now);
    let new = needed.beyond(&needs(before));
    if new.is_empty() {
        return Ok(());
    }
    take_up_schema(&now.postgres, &needed).await.map_err(|wrong| match wrong {
        Unready::Unreachable(_) => format!("{wrong}, and it must be asked about {}", new.join(", ")),
        wrong => wrong.to_string(),
    })
}

fn tell(changes: &Changes) {
    let Changes { added, removed, changed, targets, tables } = changes;
    info!(
        sources_added = added.join(", "),
        sources_removed = removed.join(", "),
        sources_changed = changed.join(", "),
        targets_changed = targets.join(", "),
        tables_changed = tables.join(", "),
        "the settings are taken up"
    );
}

impl Refusal {
    fn tell(&self) {
        const REFUSED: &str = "the changed settings are refused; those of before stay in use";
        match self {
            Self::Files(problems) => {
                problems.iter().for_each(tell_problem);
                let mistakes = problems.iter().filter(|problem| problem.severity == Severity::Error).count();
                error!(mistakes, "{REFUSED}");
            }
            Self::Unreadable => {
                error!(cause = format!("the files cannot be read within {READ_TIMEOUT:?}"), "{REFUSED}");
            }
            Self::Lacking(cause) | Self::Database(cause) => error!(cause, "{REFUSED}"),
        }
    }
}

fn tell_problem(problem: &Problem) {
    let Problem { file, line, key, message: cause, severity } = problem;
    let file = &**file;
    match severity {
        Severity::Error => error!(file, line, key, cause, "a mistake in the changed settings"),
        Severity::Warning => warn!(file, line, key, cause, "about the changed settings"),
    }
}
