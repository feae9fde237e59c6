//! When each request is due: worked out from its number alone, so that nothing that happens can move it.

use std::time::Duration;

/// How the rate goes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pace {
    /// Per second, during the warm-up and at the beginning.
    pub(super) from: f64,
    /// Per second, at the end.
    pub(super) to: f64,
    pub(super) warm_up: Duration,
    pub(super) duration: Duration,
}

impl Pace {
    /// As many as that per second, all the time.
    pub(super) fn constant(rate: f64, warm_up: Duration, duration: Duration) -> Self {
        Self { from: rate, to: rate, warm_up, duration }
    }

    /// How many requests there are.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "rates and times are positive"
    )]
    pub(super) fn requests(&self) -> u64 {
        let warm = self.from * self.warm_up.as_secs_f64();
        let measured = f64::midpoint(self.from, self.to) * self.duration.as_secs_f64();
        (warm + measured).round() as u64
    }

    /// When the request of that number is due, from the start.
    #[expect(clippy::cast_precision_loss, reason = "no run has 2^52 requests")]
    pub(super) fn at(&self, request: u64) -> Duration {
        let number = request as f64;
        let warm = self.from * self.warm_up.as_secs_f64();
        let seconds = if number < warm {
            number / self.from
        } else {
            self.warm_up.as_secs_f64() + self.ramp(number - warm)
        };
        Duration::from_secs_f64(seconds)
    }

    /// When so many were due since the warm-up: `number = from t + growth t² / 2`, solved for `t` in the form that does
    /// not divide by a growth of zero.
    fn ramp(&self, number: f64) -> f64 {
        let growth = (self.to - self.from) / self.duration.as_secs_f64();
        let root = (self.from * self.from + 2.0 * growth * number).max(0.0).sqrt();
        let divisor = self.from + root;
        if divisor > 0.0 { 2.0 * number / divisor } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_constant_rate_is_even() {
        let pace = Pace::constant(100.0, SECOND, 2 * SECOND);
        assert_eq!(pace.requests(), 300);
        assert_eq!(pace.at(0), Duration::ZERO);
        assert_eq!(pace.at(50), SECOND / 2);
        assert_eq!(pace.at(250), Duration::from_millis(2500));
    }

    #[test]
    #[expect(clippy::cast_precision_loss, reason = "small numbers")]
    fn a_ramp_begins_at_one_rate_and_ends_at_the_other() {
        for (from, to) in [(0.0, 100.0), (100.0, 300.0), (300.0, 100.0)] {
            let pace = Pace { from, to, warm_up: SECOND, duration: 10 * SECOND };
            let warm = from;
            assert!((pace.requests() as f64 - warm - (from + to) * 5.0).abs() < 1.0);
            let times: Vec<f64> =
                (0..pace.requests()).map(|request| pace.at(request).as_secs_f64()).collect();
            assert!(times.is_sorted() && times.last().is_some_and(|last| *last < 11.0), "{from} {to}");
            let within = |a: f64, b: f64| times.iter().filter(|at| (a..b).contains(*at)).count() as f64;
            assert!((within(1.0, 2.0) - (from + (to - from) * 0.05)).abs() <= 2.0, "{from} {to}");
            assert!((within(10.0, 11.0) - (from + (to - from) * 0.95)).abs() <= 2.0, "{from} {to}");
        }
    }
}
