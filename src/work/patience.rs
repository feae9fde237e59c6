//! How a loop goes on while our own store is away: it says so now and then, and tries again with growing pauses. That is no
//! failure of the loop.

use std::fmt::Display;
use std::time::Duration;

use tracing::{info, warn};

use crate::tasks::Beat;

/// Pauses while Postgres is away.
const PAUSE: std::ops::RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct Patience {
    what: &'static str,
    failures: u32,
}

impl Patience {
    /// `what` is what the log says.
    pub(super) fn with(what: &'static str) -> Self {
        Self { what, failures: 0 }
    }

    pub(super) fn succeeded(&mut self) {
        if std::mem::take(&mut self.failures) > 1 {
            info!("no longer: {}", self.what);
        }
    }

    /// Waits after a failure.
    pub(super) async fn after<T>(&mut self, result: Result<T, impl Display>, beat: &Beat) -> Option<T> {
        let error = match result {
            Ok(value) => {
                self.succeeded();
                return Some(value);
            }
            Err(error) => error,
        };
        self.failures += 1;
        // One line for each power of two, so that an outage does not fill the log.
        if self.failures.is_power_of_two() {
            warn!(cause = %error, failures = self.failures, "{}", self.what);
        }
        let pause = PAUSE.start().saturating_mul(1 << self.failures.min(10)).min(*PAUSE.end());
        tokio::time::sleep(pause.mul_f64(0.5 + rand::random::<f64>() / 2.0)).await;
        beat.alive();
        None
    }
}
