//! Secrets that providers hand over in a handshake, before anybody could verify them: the one place where bytes that
//! nobody vouches for reach a store.
//!
//! Invariant: that is so only while an operator holds a window open and nothing was taken in it; Postgres decides, by its
//! own clock; what was taken is used once its commit is confirmed, and is never replaced. A source whose provider hands
//! nothing over never comes here. No other secret is in Postgres, and none is logged.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use anyhow::Context as _;
use arc_swap::ArcSwap;
use tracing::{info, warn};

use crate::config::{self, Config, Secret, Source};
use crate::db;
use crate::db::handshake::{self, Taking, Window};
use crate::error::{Code, Dependency, Stage};
use crate::respond::Failure;
use crate::tasks::{Beat, Tasks};

/// What the database has of handed-over secrets, as last read, and the way to add one.
#[derive(Debug)]
pub struct Handovers {
    /// Those in use.
    settings: ArcSwap<config::Postgres>,
    known: Mutex<Known>,
    /// One at a time: who waits finds the window spent and asks nobody.
    taking: tokio::sync::Mutex<()>,
    reading: AtomicBool,
}

#[derive(Debug, Default)]
struct Known {
    sources: HashMap<String, State>,
    /// Sources were read, at some time.
    read: bool,
    /// When the last reading was asked for, unless a later one failed.
    fresh: Option<Instant>,
    /// When Postgres last said what became of a secret: what was asked for before does not know that.
    taken: Option<Instant>,
}

#[derive(Debug, Default)]
struct State {
    secrets: Vec<Secret>,
    window: Option<Taken>,
}

/// Of an open window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Taken {
    Nothing,
    One,
}

impl Handovers {
    /// Nothing is read yet.
    pub(crate) fn new(settings: &config::Postgres) -> Arc<Self> {
        Arc::new(Self {
            settings: ArcSwap::from_pointee(settings.clone()),
            known: Mutex::default(),
            taking: tokio::sync::Mutex::default(),
            reading: AtomicBool::new(false),
        })
    }

    /// Goes by these settings from now on, and begins to read, once, if there is a source whose provider hands secrets over.
    pub(crate) fn follow(self: &Arc<Self>, config: &Config, tasks: &Tasks) {
        self.settings.store(Arc::new(config.postgres.clone()));
        let wanted = config.sources.values().any(|source| source.scheme.hands_over());
        if wanted && !self.reading.swap(true, Ordering::Relaxed) {
            let handovers = Arc::clone(self);
            tasks.spawn_loop("handovers", move |beat| follow(Arc::clone(&handovers), beat));
        }
    }

    /// The source with the secrets that were handed over beside its own.
    pub(crate) fn equip(&self, source: Arc<Source>) -> Arc<Source> {
        if !source.scheme.hands_over() {
            return source;
        }
        let known = self.known();
        let secrets = known.sources.get(&*source.name).map_or(&[] as &[Secret], |state| &state.secrets);
        if secrets.is_empty() {
            return source;
        }
        let mut equipped = source.as_ref().clone();
        equipped.keys.extend(secrets.iter().filter_map(|secret| source.scheme.key(&secret.0).ok()));
        Arc::new(equipped)
    }

    /// Why a request is refused whose signature is not right: perhaps it is, and its secret was not read yet.
    pub(crate) fn refusal(&self, source: &Source, code: Code) -> Failure {
        let known = !source.scheme.hands_over() || self.known().read;
        if known || code != Code::SignatureMismatch {
            return Failure::new(Stage::Verify, code);
        }
        away(Stage::Verify, "the secrets that were handed over have not been read yet")
    }

    /// Keeps a secret, if a window is open for it; confirmed by Postgres. Bounded by `record_timeout`.
    ///
    /// Dropping it stores the secret or not. If it is stored, it is read again soon, and a repeated handshake finds it known.
    ///
    /// # Errors
    /// It is not kept: nobody waits for it, or Postgres cannot say.
    pub(crate) async fn take(&self, source: &Source, secret: &Secret) -> Result<(), Failure> {
        let settings = self.settings.load_full();
        let took =
            tokio::time::timeout(settings.record_timeout, self.take_one(&settings, source, secret)).await;
        took.unwrap_or_else(|_elapsed| Err(away(Stage::Challenge, "Postgres did not answer in time")))
    }

    async fn take_one(
        &self,
        settings: &config::Postgres,
        source: &Source,
        secret: &Secret,
    ) -> Result<(), Failure> {
        let _one = self.taking.lock().await;
        match self.window(&source.name)? {
            Some(Taken::Nothing) => {}
            Some(Taken::One) => return Err(refused(source, Taking::Spent)),
            None => return Err(refused(source, Taking::Closed)),
        }
        let failed = |error: anyhow::Error| away(Stage::Challenge, &format!("{error:#}"));
        let client = db::connect(settings).await.map_err(failed)?;
        let taking = handshake::take(&client, &source.name, secret, settings.synchronous_commit).await;
        let taking = taking.map_err(|error| away(Stage::Challenge, &db::describe(&error)))?;
        self.learn(&source.name, secret, taking);
        match taking {
            Taking::Taken | Taking::Known => {
                info!(source = &*source.name, "a secret was handed over and is kept");
                Ok(())
            }
            Taking::Spent | Taking::Closed => Err(refused(source, taking)),
        }
    }

    /// The source's open window, as last read.
    fn window(&self, source: &str) -> Result<Option<Taken>, Failure> {
        let known = self.known();
        let age_max = self.settings.load().generation_age_max;
        if known.fresh.is_none_or(|asked| asked.elapsed() > age_max) {
            return Err(away(Stage::Challenge, "Postgres cannot be asked whether a window is open"));
        }
        Ok(known.sources.get(source).and_then(|state| state.window))
    }

    /// What Postgres said of the source: what was asked for before is out of date.
    fn learn(&self, source: &str, secret: &Secret, taking: Taking) {
        let mut known = self.known();
        known.taken = Some(Instant::now());
        let state = known.sources.entry(source.to_owned()).or_default();
        match taking {
            Taking::Taken => state.window = Some(Taken::One),
            Taking::Known => {}
            Taking::Spent => return state.window = Some(Taken::One),
            Taking::Closed => return state.window = None,
        }
        state.secrets.push(secret.clone());
    }

    fn note(&self, windows: Vec<Window>, asked: Instant) {
        let mut known = self.known();
        if known.taken.is_some_and(|taken| taken >= asked) {
            return;
        }
        let mut sources: HashMap<String, State> = HashMap::new();
        for Window { source, secret, open } in windows {
            let state = sources.entry(source).or_default();
            if open {
                state.window = Some(if secret.is_some() { Taken::One } else { Taken::Nothing });
            }
            state.secrets.extend(secret);
        }
        for (source, _) in sources.iter().filter(|(_, state)| state.window == Some(Taken::Nothing)) {
            if known.sources.get(source).is_none_or(|before| before.window != Some(Taken::Nothing)) {
                info!(source, "a window is open for a secret that is handed over");
            }
        }
        known.sources = sources;
        known.read = true;
        known.fresh = Some(asked);
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn away(stage: Stage, cause: &str) -> Failure {
    Failure {
        dependency: Dependency::Postgres,
        cause: Some(cause.to_owned()),
        ..Failure::new(stage, Code::PostgresUnavailable)
    }
}

fn refused(source: &Source, taking: Taking) -> Failure {
    let cause = match taking {
        Taking::Spent => {
            warn!(
                source = &*source.name,
                "another secret was handed over in a window that has taken one; refused"
            );
            "the open window has taken another secret"
        }
        _ => "no window is open",
    };
    Failure { cause: Some(cause.to_owned()), ..Failure::new(Stage::Challenge, Code::HandshakeUnexpected) }
}

/// Reads for ever, on a connection of its own. Writes nothing; dropping it at any point is safe.
async fn follow(handovers: Arc<Handovers>, beat: Beat) {
    let mut failures: u32 = 0;
    loop {
        beat.alive();
        let Err(error) = read_on(&handovers, &mut failures, &beat).await;
        handovers.known().fresh = None;
        failures += 1;
        if failures.is_power_of_two() {
            warn!(error = format!("{error:#}"), failures, "secrets that were handed over cannot be read");
        }
        let pause = handovers.settings.load().heartbeat;
        beat.waiting(tokio::time::sleep(pause)).await;
    }
}

async fn read_on(handovers: &Handovers, failures: &mut u32, beat: &Beat) -> anyhow::Result<Infallible> {
    let settings = handovers.settings.load_full();
    let client = db::connect(&settings).await?;
    loop {
        let asked = Instant::now();
        let read = tokio::time::timeout(settings.generation_age_max, handshake::read(&client)).await;
        let windows = read.context("no answer")?.map_err(|error| anyhow::anyhow!(db::describe(&error)))?;
        handovers.note(windows, asked);
        *failures = 0;
        beat.waiting(tokio::time::sleep(settings.heartbeat)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::SynchronousCommit;

    /// Or else a secret would be acknowledged before the standby has it, although a reload asked for that.
    #[test]
    fn a_secret_is_kept_as_the_settings_in_use_say() {
        let with = |mode: &str| {
            let text = format!(
                "fast_tier.kind = \"memory\"\npostgres.url = \"postgres://h/d\"\npostgres.synchronous_commit = {mode:?}\n"
            );
            Config::parse("t.toml", &text, &|_| None).unwrap().config
        };
        let handovers = Handovers::new(&with("local").postgres);
        handovers.follow(&with("remote_apply"), &Tasks::default());
        assert_eq!(handovers.settings.load().synchronous_commit, SynchronousCommit::RemoteApply);
    }
}
