//! What is told: on standard output for people, in the target directory for programs.

use std::io::Write as _;
use std::path::Path;

use anyhow::{Context as _, Result};
use serde_json::{Map, Value, json};

use super::machine::Machine;
use super::measure::{Run, Timing};
use super::plan::Case;
use super::ratios::{self, Ratio};
use super::{plot, table};

/// Writes a line to standard output.
pub(crate) fn say(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    Ok(writeln!(out, "{text}").and_then(|()| out.flush())?)
}

/// Writes a line to standard error.
pub(crate) fn complain(text: &str) {
    // Whoever closed standard error does not want to know.
    writeln!(std::io::stderr().lock(), "{text}").ok();
}

/// Says what one run gave.
pub(crate) fn progress(run: &Run) -> Result<()> {
    let failed = run.load.statuses.iter().filter(|(status, _)| !(200..300).contains(*status));
    let failed: u64 = failed.map(|(_, count)| count).sum();
    let failed = if failed == 0 { String::new() } else { format!("  {failed} answers were not 2xx") };
    say(&format!(
        "  {:<20} {:<18} {:>8.0}/s  p50 {:>6} us  p99 {:>7} us{failed}",
        run.workload,
        run.server.name(),
        run.requests_per_second,
        run.load.p50_us,
        run.load.p99_us
    ))
}

/// Prints the tables, writes `side_by_side.json` and `side_by_side.svg`.
pub(crate) fn write(machine: &Machine, timing: &Timing, cases: &[Case], runs: &[Run]) -> Result<()> {
    let ratios = ratios::all(runs);
    if timing.smoke {
        say("every part works; so short a run says nothing about speed")?;
    } else {
        say(&table::servers(cases, runs))?;
        say(&table::ratios(&ratios))?;
    }
    let folder = target_folder()?;
    let json = folder.join("side_by_side.json");
    std::fs::write(&json, format!("{:#}\n", document(machine, timing, &ratios, runs)))?;
    let svg = folder.join("side_by_side.svg");
    std::fs::write(&svg, plot::svg(cases, runs))?;
    say(&format!("\nwritten: {}, {}", json.display(), svg.display()))
}

fn document(machine: &Machine, timing: &Timing, ratios: &[Ratio], runs: &[Run]) -> Value {
    let medians: Map<String, Value> =
        ratios.iter().map(|ratio| (ratio.name.to_owned(), json!(ratio.spread.median))).collect();
    json!({
        "ratios": medians,
        "spread": ratios,
        "machine": machine,
        "rounds": timing.rounds,
        "seconds": timing.run.as_secs_f64(),
        "warm_up_seconds": timing.warm_up.as_secs_f64(),
        "runs": runs,
    })
}

/// Cargo's target directory.
fn target_folder() -> Result<&'static Path> {
    Path::new(env!("CARGO_TARGET_TMPDIR")).parent().context("cargo's folder for temporary files is the root")
}
