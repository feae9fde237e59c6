//! `hapax handshake`: windows in which a provider may hand over the secret that it signs with.
//!
//! Invariant: a secret is told once, and by `show` alone.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{Exit, complain, connect, load, runtime, say};
use crate::config::Config;
use crate::db::handshake::{self, Shown};
use crate::db::{self, Session};
use crate::settings::parse_duration;

/// Longest window, as the table has it too.
const LONGEST: Duration = Duration::from_secs(86_400);

/// What to do, and with which settings.
#[derive(Debug, clap::Args)]
pub struct Options {
    #[command(subcommand)]
    command: Command,
    /// The settings, as TOML.
    #[arg(long, env = "HAPAX_CONFIG", value_name = "FILE", global = true)]
    config: Option<PathBuf>,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Take the first secret that the source's provider hands over from now on.
    Open {
        /// The source.
        source: String,
        /// For how long, 1s to 24h.
        #[arg(long = "for", value_name = "TIME", default_value = "10m", value_parser = length)]
        length: Duration,
    },
    /// Take none any more.
    Close {
        /// The source.
        source: String,
    },
    /// Print the secret that was taken; once.
    Show {
        /// The source.
        source: String,
    },
    /// Forget the secrets that were taken, after they stand in the settings.
    Forget {
        /// The source.
        source: String,
    },
    /// List all windows and what became of them.
    List,
}

fn length(text: &str) -> Result<Duration, String> {
    match parse_duration(text) {
        Some(length) if (Duration::from_secs(1)..=LONGEST).contains(&length) => Ok(length),
        _ => Err("give 1s to 24h, e.g. 10m".to_owned()),
    }
}

/// Runs it.
///
/// # Errors
/// Exit code 64 for the settings and for a source that takes no secrets, 69 for Postgres, 1 if there is nothing to
/// show, close or forget.
pub fn run(options: &Options) -> Result<(), Exit> {
    let path =
        options.config.as_deref().ok_or_else(|| Exit::settings("give --config FILE, or set HAPAX_CONFIG"))?;
    let config = load(path)?;
    if let Some(source) = options.command.source() {
        check(&config, source)?;
    }
    runtime(1)?.block_on(run_online(&options.command, &config, path))
}

impl Command {
    fn source(&self) -> Option<&str> {
        match self {
            Self::Open { source, .. }
            | Self::Close { source }
            | Self::Show { source }
            | Self::Forget { source } => Some(source),
            Self::List => None,
        }
    }
}

fn check(config: &Config, name: &str) -> Result<(), Exit> {
    let takes: Vec<&str> = config
        .sources
        .iter()
        .filter_map(|(name, source)| source.scheme.hands_over().then_some(name.as_str()))
        .collect();
    if takes.contains(&name) {
        return Ok(());
    }
    let why = match config.sources.get(name) {
        Some(source) => {
            format!("{} hands over no secret: give source {name} its secrets", source.scheme.name)
        }
        None => format!("no source {name:?}"),
    };
    let others = if takes.is_empty() { "none".to_owned() } else { takes.join(", ") };
    Err(Exit::settings(format!("{why}; sources whose provider hands one over: {others}")))
}

async fn run_online(command: &Command, config: &Config, path: &Path) -> Result<(), Exit> {
    let client = connect(&config.postgres).await?;
    db::check_migrations(&client).await.map_err(Exit::unavailable)?;
    match command {
        Command::Open { source, length } => open(&client, config, path, source, *length).await,
        Command::Close { source } => close(&client, source).await,
        Command::Show { source } => show(&client, source).await,
        Command::Forget { source } => forget(&client, source).await,
        Command::List => list(&client).await,
    }
}

fn said(error: &tokio_postgres::Error) -> Exit {
    Exit::unavailable(db::describe(error))
}

async fn open(
    client: &Session,
    config: &Config,
    path: &Path,
    source: &str,
    length: Duration,
) -> Result<(), Exit> {
    let opened = handshake::open(client, source, length).await.map_err(|error| said(&error))?;
    let Some(until) = opened else {
        let most = handshake::SECRETS_MAX;
        return Err(Exit::failed(format!(
            "source {source} has {most} secrets that were handed over, which is the limit: move them to the settings, then \
             `hapax handshake forget {source}`"
        )));
    };
    // A gateway that has not noticed would refuse the handshake, and with it the provider's subscription.
    tokio::time::sleep(config.postgres.heartbeat * 2).await;
    say(format!(
        "source {source}: open until {until}; the first secret that is handed over by then is kept.\n\
         Make the webhook at the provider now. Then: hapax handshake show {source} --config {}",
        path.display()
    ))
}

async fn close(client: &Session, source: &str) -> Result<(), Exit> {
    if handshake::close(client, source).await.map_err(|error| said(&error))? {
        say(format!("source {source}: closed"))
    } else {
        Err(Exit::failed(format!("source {source}: no window is open")))
    }
}

/// Told before it is marked: a secret that nobody got to see would be lost.
async fn show(client: &Session, source: &str) -> Result<(), Exit> {
    client.batch_execute("begin").await.map_err(|error| said(&error))?;
    let shown = handshake::show(client, source).await.map_err(|error| said(&error))?;
    if shown.is_empty() {
        return Err(Exit::failed(format!(
            "source {source}: there is no secret that was not shown yet (a secret is shown once; `hapax handshake list` \
             says what there is)"
        )));
    }
    for Shown { secret, taken_at } in &shown {
        complain(&format!("source {source}: the secret that was taken at {taken_at}; it is not shown again"));
        say(&secret.0)?;
    }
    client.batch_execute("commit").await.map_err(|error| said(&error))
}

async fn forget(client: &Session, source: &str) -> Result<(), Exit> {
    let forgotten = handshake::forget(client, source).await.map_err(|error| said(&error))?;
    match (forgotten.unshown, forgotten.secrets) {
        (0, secrets) => say(format!("source {source}: {secrets} secrets forgotten")),
        (unshown, _) => Err(Exit::failed(format!(
            "source {source}: {unshown} secrets were never shown and would be lost: `hapax handshake show {source}` first"
        ))),
    }
}

async fn list(client: &Session) -> Result<(), Exit> {
    let windows = handshake::list(client).await.map_err(|error| said(&error))?;
    windows
        .iter()
        .try_for_each(|[source, opened_at, state]| say(format!("{source:<24} {opened_at}  {state}")))
}
