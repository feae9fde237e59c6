//! Tables for people.

use std::fmt::Write as _;

use super::measure::Run;
use super::numbers::Spread;
use super::plan::{Case, Server};
use super::ratios::{Ratio, Reached};

/// One table per workload, one line per server; medians over the rounds.
pub(crate) fn servers(cases: &[Case], runs: &[Run]) -> String {
    let mut text = String::new();
    for case in cases {
        let workload = &case.workload;
        let name = format!(
            "{} ({} connections, {} KiB)",
            workload.name,
            workload.connections,
            workload.body_bytes >> 10
        );
        let row = format!(
            "\n{name:<36}{:>8} {:>17} {:>8} {:>8} | {:>7} {:>7} {:>6} {:>6} | {:>6} {:>7} {:>6}",
            "req/s", "(min-max)", "p50 us", "p99 us", "server", "pg", "redis", "load", "tx", "WAL B", "redis"
        );
        text.push_str(&row);
        for server in &case.servers {
            text.push_str(&line(*server, workload.name, runs).unwrap_or_default());
        }
        text.push('\n');
    }
    text
}

fn line(server: Server, workload: &str, runs: &[Run]) -> Option<String> {
    let spread = |value: fn(&Run) -> f64| {
        let runs = runs.iter().filter(|run| run.server == server && run.workload == workload);
        Spread::of(runs.map(value))
    };
    let median = |value| spread(value).map(|spread| spread.median);
    let rate = spread(|run| run.requests_per_second)?;
    let range = format!("({:.0}-{:.0})", rate.min, rate.max);
    Some(format!(
        "\n  {:<34}{:>8.0} {range:>17} {:>8.0} {:>8.0} | {:>7.1} {:>7.1} {:>6.1} {:>6.1} | {:>6.3} {:>7.0} {:>6.2}",
        server.name(),
        rate.median,
        median(|run| super::numbers::per(run.load.p50_us, 1))?,
        median(|run| super::numbers::per(run.load.p99_us, 1))?,
        median(|run| run.cpu.server)?,
        median(|run| run.cpu.postgres)?,
        median(|run| run.cpu.redis)?,
        median(|run| run.cpu.load)?,
        median(|run| run.transactions_per_request)?,
        median(|run| run.wal_bytes_per_request)?,
        median(|run| run.redis_commands_per_request)?,
    ))
}

/// The ratios and what they should be.
pub(crate) fn ratios(ratios: &[Ratio]) -> String {
    let mut text = format!(
        "{:<24} {:<18} {:>7} {:>17} {:>7} {:>7}",
        "ratio", "against", "median", "(min-max)", "must", "goal"
    );
    for ratio in ratios {
        let range = format!("({:.2}-{:.2})", ratio.spread.min, ratio.spread.max);
        let reached = match ratio.reached {
            Reached::Missed => "missed",
            Reached::Must => "must reached",
            Reached::Goal => "goal reached",
        };
        // Writing to a string cannot fail.
        write!(
            text,
            "\n{:<24} {:<18} {:>7.2} {range:>17} {:>7.2} {:>7.2}  {reached}",
            ratio.name,
            ratio.against.name(),
            ratio.spread.median,
            ratio.must,
            ratio.goal
        )
        .unwrap_or_default();
    }
    text
}
