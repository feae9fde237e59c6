//! `hapax events`: what is in the ledger, and the way back: a turn now, once more, given up.
//!
//! Postgres decides by its own functions (`hapax.retry`, `hapax.replay`, `hapax.discard`) what may be done with an event;
//! the settings say what there is to do for one that is replayed. Invariant: an event is changed in one statement with its
//! jobs, and its done marker is gone before and after, so that what its provider sends again is seen.

mod change;
mod choice;
mod ledger;
mod list;
mod show;
mod tally;
mod text;
mod walk;

use std::path::{Path, PathBuf};

use serde_json::json;

use super::{Exit, connect, load, runtime, say};
use crate::db;
use change::Verb;
use ledger::Ledger;

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
    /// List events, newest first.
    List(list::Arguments),
    /// Show all that is known of one event, in Postgres and in Redis.
    Show(show::Arguments),
    /// Give dead and failed events, and those that wait for a later attempt, their turn now.
    Retry(change::Retry),
    /// Do again what is done, rejected or dead, under a fresh replay number.
    Replay(change::Replay),
    /// Give up what is left to do.
    Discard(change::Discard),
}

impl Command {
    fn wants_json(&self) -> bool {
        match self {
            Self::List(arguments) => arguments.json,
            Self::Show(arguments) => arguments.json,
            Self::Retry(arguments) => arguments.how.json,
            Self::Replay(arguments) => arguments.how.json,
            Self::Discard(arguments) => arguments.how.json,
        }
    }
}

/// Why the command ends without success, where that was told in its result already.
type Told = Option<Exit>;

/// Runs it.
///
/// # Errors
/// Exit code 64 for settings and arguments, 69 for Postgres, 1 if something that was chosen could not be done or shown.
pub fn run(options: &Options) -> Result<(), Exit> {
    let Options { command, config } = options;
    let path = config.as_deref().ok_or_else(|| Exit::settings("give --config FILE, or set HAPAX_CONFIG"));
    match path.and_then(|path| runtime(1)?.block_on(run_online(command, path))) {
        Ok(told) => told.map_or(Ok(()), Err),
        Err(exit) => {
            if command.wants_json() {
                say(json!({ "error": { "code": exit.code, "message": exit.message } }))?;
            }
            Err(exit)
        }
    }
}

async fn run_online(command: &Command, path: &Path) -> Result<Told, Exit> {
    let config = load(path)?;
    let client = connect(&config.postgres).await?;
    db::check_migrations(&client).await.map_err(Exit::unavailable)?;
    let ledger = Ledger::new(&client);
    match command {
        Command::List(arguments) => list::run(&config, &ledger, arguments).await.map(|()| None),
        Command::Show(arguments) => show::run(&config, &ledger, arguments).await.map(|()| None),
        Command::Retry(arguments) => change::run(&config, &ledger, Verb::Retry, &arguments.how).await,
        Command::Replay(arguments) => change::run(&config, &ledger, Verb::Replay, &arguments.how).await,
        Command::Discard(change::Discard { how, force }) => {
            change::run(&config, &ledger, Verb::Discard { force: *force }, how).await
        }
    }
}
