//! The `hapax` program: its commands and its exit codes.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use hapax::commands::{self, Exit};
use hapax::effect::Effects;

/// A webhook dedupe gateway: every delivery verified, every event committed once.
#[derive(Debug, Parser)]
#[command(version, about)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Args)]
struct ConfigFile {
    /// The settings, as TOML.
    #[arg(long, env = "HAPAX_CONFIG", value_name = "FILE")]
    config: PathBuf,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Receive webhooks.
    Serve {
        #[command(flatten)]
        file: ConfigFile,
        /// Apply missing migrations first.
        #[arg(long)]
        migrate: bool,
    },
    /// Check the settings and report every mistake; exit code 64 if there is one.
    Check {
        #[command(flatten)]
        file: ConfigFile,
        /// Also ask Postgres and Redis whether they are as they must be.
        #[arg(long)]
        online: bool,
    },
    /// Apply missing migrations, and store the key rules of new sources.
    Migrate {
        #[command(flatten)]
        file: ConfigFile,
        /// Go on with another key rule: events that this source had before will be new if they come again.
        #[arg(long, value_name = "SOURCE")]
        accept_key_change: Vec<String>,
    },
    /// Show which history of the database counts, and what it is told by.
    Epoch {
        #[command(flatten)]
        file: ConfigFile,
        /// Begin a new one, so that no marker of before counts; Postgres then answers every duplicate once.
        #[arg(long)]
        new: bool,
    },
    /// List events, show one in both tiers, and send them their way again.
    Events(commands::events::Options),
    /// Let a provider hand over the secret that it signs with.
    Handshake(commands::handshake::Options),
    /// Ask a running gateway whether it is ready; exit code 0 if it is.
    Ready {
        #[command(flatten)]
        file: ConfigFile,
    },
    /// Delete what is older than its horizon, once; a gateway does so by itself.
    Retain(commands::retain::Options),
    /// Private Postgres and Redis, a demo source and the gateway, until Ctrl-C.
    Dev(commands::dev::Options),
    /// Sign an event and send it.
    Send(commands::send::Options),
    /// Send a load that does not wait for answers, and prove what came of it.
    Storm(Box<commands::storm::Options>),
    /// List the presets, or show one with what is known of the provider.
    Providers(commands::providers::Options),
    /// Tell why a request is accepted or refused, or run a file of test vectors.
    Verify(commands::verify::Options),
}

fn main() -> ExitCode {
    let done = match Arguments::parse().command {
        // Rust effects are part of programs that are built on the library.
        Command::Serve { file, migrate } => commands::serve::run(&file.config, migrate, &Effects::default()),
        Command::Check { file, online } => commands::check::run(&file.config, online),
        Command::Migrate { file, accept_key_change } => {
            commands::migrate::run(&file.config, &accept_key_change)
        }
        Command::Epoch { file, new } => commands::epoch::run(&file.config, new),
        Command::Events(options) => commands::events::run(&options),
        Command::Handshake(options) => commands::handshake::run(&options),
        Command::Ready { file } => commands::ready::run(&file.config),
        Command::Retain(options) => commands::retain::run(&options),
        Command::Dev(options) => commands::dev::run(&options),
        Command::Send(options) => commands::send::run(&options),
        Command::Storm(options) => commands::storm::run(&options),
        Command::Providers(options) => commands::providers::run(&options),
        Command::Verify(options) => commands::verify::run(&options),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(Exit { code, message }) => {
            commands::complain(&message);
            ExitCode::from(code)
        }
    }
}
