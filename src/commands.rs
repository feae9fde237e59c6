//! The commands that are more than a call, one file each, and what they share.

pub mod check;
pub mod client;
pub mod dev;
pub mod epoch;
pub mod events;
pub mod handshake;
pub mod migrate;
pub mod providers;
pub mod ready;
pub mod retain;
pub mod send;
pub mod serve;
pub mod storm;
pub mod verify;

use std::fmt::Display;
use std::io::Write as _;
use std::path::Path;

use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::config::{self, Config, Loaded};
use crate::db::Session;
use crate::provider::Scheme;
use crate::settings::nearest;
use crate::{claim, db};

/// Why a command ends without success, and the exit code that says so.
#[derive(Debug)]
pub struct Exit {
    /// 64 settings, 69 a store is away or wrong, 70 a fault of the program or the machine, 1 what was asked for
    /// does not hold.
    pub code: u8,
    /// What to tell the operator.
    pub message: String,
}

impl Exit {
    /// The settings cannot be used.
    pub fn settings(message: impl Into<String>) -> Self {
        Self { code: 64, message: message.into() }
    }

    /// A store cannot be reached, or is not as it must be.
    pub fn unavailable(message: impl Display) -> Self {
        Self { code: 69, message: message.to_string() }
    }

    /// This program or the machine failed.
    pub fn software(message: impl Display) -> Self {
        Self { code: 70, message: message.to_string() }
    }

    /// What was asked for does not hold.
    pub fn failed(message: impl Display) -> Self {
        Self { code: 1, message: message.to_string() }
    }
}

impl From<anyhow::Error> for Exit {
    fn from(error: anyhow::Error) -> Self {
        Self::unavailable(format!("{error:#}"))
    }
}

impl From<std::io::Error> for Exit {
    fn from(error: std::io::Error) -> Self {
        Self::software(error)
    }
}

/// Writes to standard error.
pub fn complain(message: &str) {
    // Nobody reads: there is nobody to tell.
    drop(writeln!(std::io::stderr(), "{}", message.trim_end()));
}

/// Writes a line to standard output.
///
/// # Errors
/// Those of writing; a reader that is gone is none.
pub fn say(line: impl Display) -> Result<(), Exit> {
    let mut out = std::io::stdout();
    match writeln!(out, "{line}").and_then(|()| out.flush()) {
        // Whoever read it has seen enough.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        written => written.map_err(Exit::software),
    }
}

/// Reads the settings for a command that asks for something else: their warnings would bury its answer, and `check`,
/// `migrate` and `serve` tell them.
///
/// # Errors
/// Every mistake in them, exit code 64.
pub fn load(path: &Path) -> Result<Config, Exit> {
    load_silently(path).map(|loaded| loaded.config)
}

/// Reads the settings and tells which files they come from; warnings go to standard error.
///
/// # Errors
/// Every mistake in them, exit code 64.
pub fn load_with_warnings(path: &Path) -> Result<Loaded, Exit> {
    let loaded = load_silently(path)?;
    if !loaded.warnings.is_empty() {
        complain(&config::report(&loaded.warnings));
    }
    Ok(loaded)
}

fn load_silently(path: &Path) -> Result<Loaded, Exit> {
    let loaded = Config::load(path).map_err(|problems| Exit::settings(config::report(&problems)))?;
    check_urls(path, &loaded.config)?;
    Ok(loaded)
}

/// A connection to Postgres.
///
/// # Errors
/// Why there is none, exit code 69.
pub async fn connect(config: &config::Postgres) -> Result<Session, Exit> {
    let connected = db::connect(config).await;
    connected.map_err(|error| {
        Exit::unavailable(format!(
            "cannot connect to Postgres: {error:#}; postgres.url says where to and as whom"
        ))
    })
}

/// No preset has that name.
fn no_provider(name: &str) -> Exit {
    let names = Scheme::preset_names();
    let hint = match nearest(name, names.iter().copied()) {
        Some(near) => format!("did you mean {near:?}? "),
        None => String::new(),
    };
    Exit::settings(format!("no provider {name:?}; {hint}`hapax providers` lists them"))
}

/// Whether the stores' URLs can be read; only the drivers know.
fn check_urls(path: &Path, config: &Config) -> Result<(), Exit> {
    let postgres = db::Servers::parse(&config.postgres).map_err(|error| format!("postgres.url: {error:#}"));
    let redis = claim::check_url(&config.fast_tier);
    let wrong: Vec<String> = [postgres.map(drop), redis].into_iter().filter_map(Result::err).collect();
    if wrong.is_empty() {
        return Ok(());
    }
    let lines: Vec<String> =
        wrong.iter().map(|wrong| format!("{}: error: {wrong}", path.display())).collect();
    Err(Exit::settings(lines.join("\n")))
}

/// Open files beside connections from providers and to Postgres: Redis, operators, logs.
const OPEN_FILES_BESIDE: usize = 128;

/// Allows this process as many open files as it may have; warns if that is too few for the settings.
pub fn raise_open_files(connections: usize) {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // Where it may not be raised, the warning says what follows.
    setrlimit(Resource::Nofile, limit).unwrap_or_default();
    let wanted = u64::try_from(connections + OPEN_FILES_BESIDE).unwrap_or(u64::MAX);
    if let Some(current) = getrlimit(Resource::Nofile).current.filter(|current| *current < wanted) {
        complain(&format!(
            "warning: {current} open files are allowed, and server.connections_max with all else may need {wanted}: \
             raise the limit (ulimit -n), or lower server.connections_max"
        ));
    }
}

/// One thread costs least per request; more only if asked for.
///
/// # Errors
/// Those of the operating system.
pub fn runtime(threads: usize) -> Result<Runtime, Exit> {
    let mut builder = if threads == 1 { Builder::new_current_thread() } else { Builder::new_multi_thread() };
    if threads > 1 {
        builder.worker_threads(threads);
    }
    builder.enable_all().build().map_err(Exit::software)
}

/// SIGHUP. From now on it does not end the process.
///
/// # Errors
/// Those of the operating system.
pub fn hangups() -> Result<Signal, Exit> {
    Ok(signal(SignalKind::hangup())?)
}

/// SIGTERM and SIGINT.
#[derive(Debug)]
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// From now on these signals do not end the process by themselves.
    ///
    /// # Errors
    /// Those of the operating system.
    pub fn listen() -> Result<Self, Exit> {
        let terminate = signal(SignalKind::terminate())?;
        let interrupt = signal(SignalKind::interrupt())?;
        Ok(Self { terminate, interrupt })
    }

    /// Completes with the next of them.
    pub async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
