//! The rate that the gateway can keep: steps upwards until one is bad, then a longer look at half of the last good one.

use serde::Serialize;

use super::pace::Pace;
use super::stage::{Measured, Stages};
use super::{Exit, Options, complain};

/// Beyond this there is no step.
const RATE_MAX: f64 = 1_000_000.0;

/// What was found.
#[derive(Debug, Serialize)]
pub(super) struct Knee {
    /// The last step that was good; `None`: not even the first was.
    pub(super) rate: Option<f64>,
    /// Why the next one was not.
    pub(super) limit: Option<String>,
    /// The rate that was measured at the end, half of the knee.
    pub(super) measured_rate: Option<f64>,
    pub(super) steps: Vec<Step>,
}

/// A step.
#[derive(Debug, Serialize)]
pub(super) struct Step {
    pub(super) rate: f64,
    pub(super) p99_us: u64,
    pub(super) errors: u64,
    pub(super) late: u64,
    pub(super) good: bool,
}

/// Finds it. The last stage is the one at half of it.
///
/// # Errors
/// Those of the stages.
pub(super) async fn find(stages: &mut Stages, options: &Options) -> Result<Knee, Exit> {
    let mut knee = Knee { rate: None, limit: None, measured_rate: None, steps: Vec::new() };
    let pace = |rate| Pace::constant(rate, options.warm_up, options.duration);
    let mut rate = f64::from(options.rate);
    while rate <= RATE_MAX && !stages.stopped() {
        let measured = stages.run(pace(rate)).await?;
        let limit = limit(measured, options);
        let p99_us = measured.latency.value_at_quantile(0.99);
        let (errors, late) = (measured.counts.failed + measured.counts.refused(), measured.late);
        let verdict = limit.as_deref().unwrap_or("good");
        complain(&format!("{rate:.0}/s: {verdict}; p99 {:.1} ms", us_to_ms(p99_us)));
        knee.steps.push(Step { rate, p99_us, errors, late, good: limit.is_none() });
        if stages.stopped() {
            break;
        }
        if limit.is_some() {
            knee.limit = limit;
            break;
        }
        knee.rate = Some(rate);
        rate *= 1.0 + f64::from(options.step) / 100.0;
    }
    if let Some(half) = knee.rate.map(|rate| rate / 2.0).filter(|_| !stages.stopped()) {
        stages.run(pace(half)).await?;
        knee.measured_rate = Some(half);
    }
    Ok(knee)
}

/// What is bad about a step.
fn limit(measured: &Measured, options: &Options) -> Option<String> {
    let counts = &measured.counts;
    let p99 = measured.latency.value_at_quantile(0.99);
    let p99_max = super::tally::micros(options.p99_max);
    if counts.failed > 0 {
        Some(format!("{} requests without an answer", counts.failed))
    } else if counts.refused() > 0 {
        Some(format!("{} answers other than 2xx", counts.refused()))
    } else if p99 > p99_max {
        Some(format!("p99 is {:.1} ms, above {:.1} ms", us_to_ms(p99), us_to_ms(p99_max)))
    } else if measured.late * 10_000 > counts.sent * u64::from(options.late_max) {
        Some(format!(
            "the schedule was not kept: {} of {} requests began late, {} of them because this tool was",
            measured.late,
            counts.sent,
            measured.slip.requests.min(measured.late)
        ))
    } else {
        None
    }
}

#[expect(clippy::cast_precision_loss, reason = "no latency has 2^52 microseconds")]
pub(super) fn us_to_ms(us: u64) -> f64 {
    us as f64 / 1e3
}
