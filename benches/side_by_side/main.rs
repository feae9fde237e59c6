//! What hapax costs beside what else could be run: one interleaved run on private stores, of servers that do less
//! (the ceilings), of receivers with one transaction per request, and of the gateway itself.
//!
//! Every server, and the load generator, is a process of its own: this program, started again in another role, or
//! the `hapax` program. After each run the effects in the database are counted; the bench fails if one is missing
//! or doubled.

mod batches;
mod connection;
mod load;
mod machine;
mod measure;
mod naive;
mod numbers;
mod payload;
mod plan;
mod plot;
mod processes;
mod ratios;
mod receiver;
mod report;
mod role;
mod scene;
mod table;
mod traffic;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Parser;

use crate::measure::{StoresWanted, Timing};
use crate::plan::{Extent, Wanted};
use crate::role::Role;

/// Measures hapax side by side with what else could be run.
#[derive(Debug, Parser)]
#[expect(clippy::struct_excessive_bools, reason = "the flags of a command line")]
struct Arguments {
    /// The cases that the ratios are made of; within ten minutes. The default under `cargo bench`.
    #[arg(long, conflicts_with_all = ["quick", "all"])]
    core: bool,
    /// A few seconds, to see that everything works; the numbers mean nothing. The default under `cargo test`.
    #[arg(long, conflicts_with = "all")]
    quick: bool,
    /// The core, and larger bodies.
    #[arg(long)]
    all: bool,
    /// Rounds; each runs every case once.
    #[arg(long)]
    rounds: Option<u32>,
    /// Seconds of each run, after its warm-up.
    #[arg(long)]
    seconds: Option<f64>,
    /// Only workloads whose name contains this.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Only these servers, divided by commas; a ratio needs both of its own.
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    servers: Vec<String>,
    /// Where the stores' folder is made; must not be on tmpfs. Default: the system's place for temporary files.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Connections to Postgres in the pool of every receiver; the default is the gateway's.
    #[arg(long, default_value_t = 8, value_name = "COUNT")]
    connections: usize,
    /// Given by cargo.
    #[arg(long, hide = true)]
    bench: bool,
    /// Given by this program to itself.
    #[arg(long, hide = true, value_name = "JSON")]
    role: Option<String>,
}

impl Arguments {
    fn extent(&self) -> Extent {
        match (self.all, self.quick || !(self.core || self.bench)) {
            (true, _) => Extent::All,
            (false, true) => Extent::Quick,
            (false, false) => Extent::Core,
        }
    }

    fn timing(&self, extent: Extent) -> Result<Timing> {
        let (rounds, seconds, warm_up) = match extent {
            Extent::Quick => (1, 0.2, 0.1),
            Extent::Core | Extent::All => (5, 1.5, 0.4),
        };
        let run = Duration::try_from_secs_f64(self.seconds.unwrap_or(seconds)).context("--seconds")?;
        let rounds = self.rounds.unwrap_or(rounds).max(1);
        let smoke = extent == Extent::Quick;
        Ok(Timing { rounds, run, warm_up: Duration::try_from_secs_f64(warm_up)?, smoke })
    }
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report::complain(&format!("side_by_side: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    // One thread for every role: cheapest per request, and what the gateway does.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    if let Some(role) = &arguments.role {
        return runtime.block_on(Role::parse(role)?.play());
    }
    let extent = arguments.extent();
    let timing = arguments.timing(extent)?;
    let wanted = Wanted { only: arguments.only.as_deref(), servers: &arguments.servers };
    let cases = plan::cases(extent, wanted);
    let stores = StoresWanted { folder: arguments.dir.clone(), connections: arguments.connections };
    runtime.block_on(measure::all(&cases, &timing, stores))
}
