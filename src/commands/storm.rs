//! `hapax storm`: load that does not wait for answers, and a proof at its end.
//!
//! Invariants: the schedule is made before the first request and no answer moves it, so a gateway that stalls shows it in
//! the latency of everything that was due meanwhile; and exit code 0 says that the ledger was read after the load and
//! agrees with every answer. What is kept of an event is a few bits: its id is a number behind the run's prefix, and its
//! bodies can be made again.

mod clock;
mod fates;
mod knee;
mod lane;
mod machine;
mod mix;
mod pace;
mod plan;
mod plot;
mod proof;
mod recipe;
mod report;
mod stage;
mod tally;

use std::io::BufRead as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use super::client::Connection;
use super::{Exit, Signals, complain, load, runtime, say};
use crate::config::Config;
use crate::settings::{parse_duration, parse_size};
use machine::Usage;
use plan::Plan;
use proof::Ledger;
use report::Report;
use stage::Stages;

/// Stands for standard output.
const STDOUT: &str = "-";

/// What to send, how fast, how oddly, and what to prove of it.
#[derive(Debug, clap::Args)]
#[expect(clippy::struct_excessive_bools, reason = "flags of a command line")]
pub struct Options {
    /// The settings of the gateway: they give the provider, the secret and the database.
    #[arg(long, env = "HAPAX_CONFIG", value_name = "FILE")]
    config: PathBuf,
    /// The source that the events are for.
    #[arg(long, value_name = "NAME")]
    source: String,
    /// Where to send; default: the source's path on the settings' listen address.
    #[arg(long, value_name = "URL")]
    to: Option<String>,
    /// Requests per second; with --find-knee those of the first step.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    rate: u32,
    /// Let the rate grow evenly from one to the other over the duration.
    #[arg(long, value_name = "FROM..TO", value_parser = plan::ramp, conflicts_with_all = ["rate", "find_knee"])]
    ramp: Option<(u32, u32)>,
    /// Raise the rate in steps until the gateway cannot keep it, each step for --duration; then measure at half of it.
    #[arg(long)]
    find_knee: bool,
    /// With --find-knee: the 99th percentile that is still good.
    #[arg(long, value_name = "TIME", default_value = "100ms", value_parser = time, requires = "find_knee")]
    p99_max: Duration,
    /// With --find-knee: the share of requests that may begin late.
    #[arg(long, value_name = "PERCENT", default_value = "1", value_parser = plan::percent, requires = "find_knee")]
    late_max: u32,
    /// With --find-knee: how much faster each step is.
    #[arg(long, value_name = "PERCENT", default_value_t = 25, requires = "find_knee",
          value_parser = clap::value_parser!(u32).range(1..=400))]
    step: u32,
    /// For how long.
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = time)]
    duration: Duration,
    /// Before that, for how long to send without measuring.
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = time)]
    warm_up: Duration,
    /// Most connections at once.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    connections: u32,
    /// Threads that send.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    threads: u32,
    /// How long to wait for an answer.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = time)]
    timeout: Duration,
    /// Send each event so many times, among others.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    duplicates: u32,
    /// Each time, send the event so many times at the same instant.
    #[arg(long, value_name = "K", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    parallel: u32,
    /// Send one event and no other.
    #[arg(long, conflicts_with = "duplicates")]
    hot: bool,
    /// Give this share of the requests another body under the same id.
    #[arg(long, value_name = "PERCENT", default_value = "0", value_parser = plan::percent)]
    mismatch: u32,
    /// Events in one request, for providers that send batches.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    batch: Option<u32>,
    /// Pad each event to this size, with its unit: 4KiB.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    body: Option<usize>,
    /// Go away in this share of the requests: of them, half before the body is complete, half before the answer.
    #[arg(long, value_name = "PERCENT", default_value = "0", value_parser = plan::percent)]
    disconnect: u32,
    /// Send what is not answered 2xx again, after the pauses of this preset.
    #[arg(long, value_name = "PRESET")]
    retries_of: Option<String>,
    /// With --retries-of: how many times shorter the pauses are.
    #[arg(long, value_name = "TIMES", default_value_t = 1000, requires = "retries_of",
          value_parser = clap::value_parser!(u32).range(1..))]
    compress: u32,
    /// With --retries-of: take this share of the answers for lost, so that the provider sends again.
    #[arg(long, value_name = "PERCENT", default_value = "0", value_parser = plan::percent, requires = "retries_of")]
    drop_answers: u32,
    /// A query that gives each event's id and how often it took effect:
    /// `select event_id, count(*) from billing.payment group by 1`.
    #[arg(long, value_name = "SQL", conflicts_with = "no_proof")]
    effects: Option<String>,
    /// Do not read the database: there is then no proof.
    #[arg(long)]
    no_proof: bool,
    /// Wait for a line on standard input before the database is read, so that you can try the proof: delete a row, double
    /// an effect, and see it fail.
    #[arg(long, conflicts_with = "no_proof")]
    pause_before_proof: bool,
    /// The result as JSON; `-` for standard output, where it then stands alone.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Latency over time and by percentile, as a picture.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

fn time(text: &str) -> Result<Duration, String> {
    parse_duration(text).ok_or_else(|| "give a number with its unit: 500ms, 10s, 5m".to_owned())
}

fn size(text: &str) -> Result<usize, String> {
    parse_size(text).ok_or_else(|| "give a number with its unit: 512B, 4KiB, 1MiB".to_owned())
}

/// Runs the load and proves what came of it.
///
/// # Errors
/// 64 for settings and arguments, 69 if the gateway or the database is away, 1 if the proof does not hold.
pub fn run(options: &Options) -> Result<(), Exit> {
    match try_run(options) {
        Ok(told) => told.map_or(Ok(()), Err),
        Err(exit) => {
            if options.json.as_deref().is_some_and(|path| path == Path::new(STDOUT)) {
                say(json!({ "error": { "code": exit.code, "message": exit.message } }))?;
            }
            Err(exit)
        }
    }
}

/// Why the command ends without success, where that was told in its result already.
type Told = Option<Exit>;

fn try_run(options: &Options) -> Result<Told, Exit> {
    for path in
        [&options.json, &options.svg].into_iter().flatten().filter(|path| path.as_path() != Path::new(STDOUT))
    {
        // Before the load, not after it.
        let opened = std::fs::OpenOptions::new().create(true).append(true).open(path);
        opened.map_err(|error| Exit::settings(format!("cannot write {}: {error}", path.display())))?;
    }
    let config = load(&options.config)?;
    let plan = Arc::new(Plan::of(options, &config)?);
    machine::allow_open_files(plan.connections)?;
    let threads = usize::try_from(options.threads).unwrap_or(1);
    runtime(threads)?.block_on(storm(options, &config, &plan))
}

async fn storm(options: &Options, config: &Config, plan: &Arc<Plan>) -> Result<Told, Exit> {
    reach(plan).await?;
    let ledger = if options.no_proof {
        None
    } else {
        Some(Ledger::open(config, plan, options.effects.as_deref()).await?)
    };
    let usage = Usage::begin();
    let mut stages = Stages::new(plan, Signals::listen()?);
    let knee = if options.find_knee {
        Some(knee::find(&mut stages, options).await?)
    } else {
        stages.run(plan::pace(options)).await?;
        None
    };
    let usage = usage.end(options.threads);
    if options.pause_before_proof {
        pause().await?;
    }
    let proved = match ledger {
        Some(ledger) => ledger.prove(plan, stages.fates()).await.map(Some),
        None => Ok(None),
    };
    // What was measured is worth telling, whatever became of the proof.
    let (proof, away) = match proved {
        Ok(proof) => (proof, None),
        Err(exit) => (None, Some(exit)),
    };
    let report = Report { plan, stages: &stages, knee, usage, proof };
    report.write(options)?;
    Ok(away.or_else(|| report.verdict().err()))
}

/// A gateway that is not there is said before the load, not by a million failures.
async fn reach(plan: &Plan) -> Result<(), Exit> {
    let target = plan.recipe.target();
    match Connection::open(target).await {
        Ok(_) => Ok(()),
        Err(error) => Err(Exit::unavailable(format!(
            "cannot connect to {}: {error:#}; is the gateway running? --to URL says where it is",
            target.authority()
        ))),
    }
}

async fn pause() -> Result<(), Exit> {
    complain("the load is over: the proof begins with a line on standard input");
    let read = || std::io::stdin().lock().read_line(&mut String::new());
    let read = tokio::task::spawn_blocking(read).await.map_err(Exit::software)?;
    read.map(drop).map_err(Exit::software)
}
