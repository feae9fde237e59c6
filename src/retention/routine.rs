//! The passes that a gateway runs by itself, and what it tells of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tracing::{debug, error, info, warn};

use super::{Clock, Counts, Ended, Limits, Mode, Progress, run_once};
use crate::config::Config;
use crate::db;
use crate::metrics::Metrics;
use crate::tasks::Beat;

/// Runs passes for ever, each `retention.every` after the last one began. Settings of `"off"` end the one that is under way.
/// Dropping it is safe at any point.
pub async fn run(
    mut current: watch::Receiver<Arc<Config>>,
    ready: Arc<AtomicBool>,
    metrics: Arc<Metrics>,
    beat: Beat,
) {
    let mut clock = Clock::default();
    let mut failures: u32 = 0;
    loop {
        beat.alive();
        beat.waiting(until_its_turn(&mut current)).await;
        if !ready.load(Ordering::Relaxed) {
            continue;
        }
        let config = Arc::clone(&current.borrow());
        let (started, mut counts) = (Instant::now(), Counts::default());
        let ended = tokio::select! {
            ended = pass(&config, &mut clock, &mut counts, (&metrics, &beat)) => ended,
            () = switched_off(&mut current) => {
                info!("retention: switched off, the pass ends here");
                continue;
            }
        };
        match ended {
            Err(Failure::Postgres(cause)) => {
                failures += 1;
                // One line for each power of two, so that an outage does not fill the log.
                if failures.is_power_of_two() {
                    warn!(cause, failures, "retention: a pass failed; the next one goes on");
                }
            }
            Ok(()) => {
                failures = 0;
                tell(&counts, started.elapsed(), &metrics);
            }
            Err(Failure::Stopped(cause)) => {
                metrics.retention.stopped();
                error!(cause, "retention: stopped, nothing is deleted");
            }
            Err(Failure::Held) => debug!("retention: another gateway is at it"),
        }
    }
}

/// Not all gateways at once, and soon after a change of the settings says so.
async fn until_its_turn(current: &mut watch::Receiver<Arc<Config>>) {
    let (began, part) = (tokio::time::Instant::now(), 0.5 + rand::random::<f64>() / 2.0);
    loop {
        let every = current.borrow_and_update().retention.every;
        let turn = async {
            match every {
                Some(every) => tokio::time::sleep_until(began + every.mul_f64(part)).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = turn => return,
            Ok(()) = current.changed() => {}
        }
    }
}

/// Completes when the settings want no passes any more.
async fn switched_off(current: &mut watch::Receiver<Arc<Config>>) {
    if current.wait_for(|config| config.retention.every.is_none()).await.is_err() {
        // The process is about to end.
        std::future::pending::<()>().await;
    }
}

/// Why a pass came to no end, and what is told of it.
enum Failure {
    Stopped(String),
    Held,
    Postgres(String),
}

async fn pass(
    config: &Config,
    clock: &mut Clock,
    counts: &mut Counts,
    (metrics, beat): (&Metrics, &Beat),
) -> Result<(), Failure> {
    let connected = db::connect(&config.postgres).await;
    let mut session = connected.map_err(|error| Failure::Postgres(format!("{error:#}")))?;
    let limits = Limits { retention: config.retention.clone(), mode: Mode::Routine };
    let mut told = Counts::default();
    let mut tell = |counts: &Counts, _: Progress| {
        beat.alive();
        metrics.retention.deleted(&told, counts);
        told.clone_from(counts);
    };
    let ended = run_once(&mut session, &limits, clock, counts, &mut tell).await;
    metrics.retention.deleted(&told, counts);
    ended.map_err(|ended| match ended {
        Ended::Stopped(stop) => Failure::Stopped(stop.to_string()),
        Ended::Held => Failure::Held,
        Ended::Failed(_) | Ended::Silent(_) | Ended::NoAnswer => Failure::Postgres(ended.to_string()),
    })
}

fn tell(counts: &Counts, took: Duration, metrics: &Metrics) {
    metrics.retention.passed(counts, took, jiff::Timestamp::now());
    let Counts { events, jobs, bodies_moved, .. } = *counts;
    let (dropped, busy) = (counts.days_dropped.join(", "), counts.days_busy.join(", "));
    let duration_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
    info!(events, jobs, bodies_moved, dropped, busy, duration_ms, "retention: a pass is done");
}
