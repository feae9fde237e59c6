//! Arithmetic on what was counted.

use std::time::Duration;

/// `total / count`; 0 of nothing.
#[expect(clippy::cast_precision_loss, reason = "counts and microseconds of one run are far below 2^52")]
pub(crate) fn per(total: u64, count: u64) -> f64 {
    if count == 0 { 0.0 } else { total as f64 / count as f64 }
}

/// Per second.
pub(crate) fn rate(count: u64, time: Duration) -> f64 {
    per(count, 1) / time.as_secs_f64().max(1e-9)
}

pub(crate) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// The middle value, the smallest and the largest.
#[derive(Debug, Clone, Copy, serde::Serialize)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

impl Spread {
    /// Of no values, none.
    pub(crate) fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let upper = *values.get(values.len() / 2)?;
        let lower = *values.get((values.len() - 1) / 2)?;
        Some(Self { median: f64::midpoint(lower, upper), min: *values.first()?, max: *values.last()? })
    }
}
