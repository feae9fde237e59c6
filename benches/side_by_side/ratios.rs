//! The ratios that hapax is held to. Each is computed within a round, of runs that lie seconds apart, since the rates
//! of a machine drift by more than what is to be seen.

use serde::Serialize;

use super::measure::Run;
use super::numbers::{Spread, per};
use super::plan::{HOT, IDLE, NEW, NEW_256, Server, TEN_TIMES};

/// What is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Measure {
    Rate,
    P50,
    P99,
    Cpu,
}

impl Measure {
    fn of(self, run: &Run) -> f64 {
        match self {
            Self::Rate => run.requests_per_second,
            Self::P50 => per(run.load.p50_us, 1),
            Self::P99 => per(run.load.p99_us, 1),
            Self::Cpu => run.cpu.receiver(),
        }
    }

    const fn more_is_better(self) -> bool {
        matches!(self, Self::Rate)
    }
}

/// A ratio to be reached.
struct Wanted {
    name: &'static str,
    workload: &'static str,
    measure: Measure,
    /// The best of them, by median, is what hapax is held against.
    against: &'static [Server],
    must: f64,
    goal: f64,
}

const NAIVE: &[Server] = &[Server::Naive, Server::NaiveRedis];
const PLAIN: &[Server] = &[Server::NaivePlain, Server::NaivePlainRedis];
const CEILING: &[Server] = &[Server::HyperHmacId];
const HAPAX: Server = Server::HapaxRedis;

const fn wanted(
    name: &'static str,
    workload: &'static str,
    measure: Measure,
    against: &'static [Server],
    (must, goal): (f64, f64),
) -> Wanted {
    Wanted { name, workload, measure, against, must, goal }
}

const WANTED: [Wanted; 14] = [
    wanted("hot_vs_hyper_hmac", HOT, Measure::Rate, CEILING, (0.80, 0.90)),
    wanted("dup10_vs_hyper_hmac", TEN_TIMES, Measure::Rate, CEILING, (0.50, 0.65)),
    wanted("dup10_vs_naive", TEN_TIMES, Measure::Rate, NAIVE, (5.0, 8.0)),
    wanted("new_vs_naive", NEW, Measure::Rate, NAIVE, (4.5, 6.0)),
    wanted("new256_vs_naive", NEW_256, Measure::Rate, NAIVE, (6.0, 8.0)),
    wanted("new_vs_pg_batch", NEW, Measure::Rate, &[Server::PgBatch], (0.5, 0.7)),
    wanted("p99_new_vs_naive", NEW, Measure::P99, NAIVE, (1.0 / 3.0, 1.0 / 4.0)),
    wanted("cpu_new_vs_naive", NEW, Measure::Cpu, NAIVE, (1.0 / 5.0, 1.0 / 7.0)),
    wanted("idle_latency_vs_naive", IDLE, Measure::P50, NAIVE, (1.3, 1.0)),
    wanted("dup10_vs_plain", TEN_TIMES, Measure::Rate, PLAIN, (5.0, 8.0)),
    wanted("new_vs_plain", NEW, Measure::Rate, PLAIN, (4.5, 6.0)),
    wanted("new256_vs_plain", NEW_256, Measure::Rate, PLAIN, (6.0, 8.0)),
    wanted("p99_new_vs_plain", NEW, Measure::P99, PLAIN, (1.0 / 3.0, 1.0 / 4.0)),
    wanted("cpu_new_vs_plain", NEW, Measure::Cpu, PLAIN, (1.0 / 5.0, 1.0 / 7.0)),
];

/// A ratio as measured.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Ratio {
    pub(crate) name: &'static str,
    pub(crate) against: Server,
    #[serde(flatten)]
    pub(crate) spread: Spread,
    pub(crate) must: f64,
    pub(crate) goal: f64,
    pub(crate) reached: Reached,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Reached {
    Missed,
    Must,
    Goal,
}

/// Those that the runs suffice for.
pub(crate) fn all(runs: &[Run]) -> Vec<Ratio> {
    WANTED.iter().filter_map(|wanted| ratio(wanted, runs)).collect()
}

fn ratio(wanted: &Wanted, runs: &[Run]) -> Option<Ratio> {
    let of = |server: Server| {
        let runs = runs.iter().filter(move |run| run.workload == wanted.workload && run.server == server);
        runs.map(|run| (run.round, wanted.measure.of(run)))
    };
    let medians = wanted
        .against
        .iter()
        .filter_map(|&server| Some((server, Spread::of(of(server).map(|(_, value)| value))?.median)));
    let sign = if wanted.measure.more_is_better() { 1.0 } else { -1.0 };
    let (against, _) = medians.max_by(|(_, one), (_, other)| (sign * one).total_cmp(&(sign * other)))?;
    let spread = Spread::of(of(HAPAX).filter_map(|(round, value)| {
        let (_, other) = of(against).find(|(other, _)| *other == round)?;
        Some(value / other)
    }))?;
    let attains = |target: f64| sign * spread.median >= sign * target;
    let reached = match (attains(wanted.must), attains(wanted.goal)) {
        (_, true) => Reached::Goal,
        (true, false) => Reached::Must,
        (false, false) => Reached::Missed,
    };
    Some(Ratio { name: wanted.name, against, spread, must: wanted.must, goal: wanted.goal, reached })
}
