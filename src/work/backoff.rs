//! How long what failed waits for its next try.

use std::time::Duration;

use crate::config::Retry;

/// Between nothing and `base`, doubled with each attempt and at most `max`: what failed together does not come back
/// together.
pub(super) fn backoff(retry: Retry, attempt: i32, luck: f64) -> Duration {
    let doublings = u32::try_from(attempt).unwrap_or(1).saturating_sub(1).min(30);
    retry.base.saturating_mul(1 << doublings).min(retry.max).mul_f64(luck.clamp(0.0, 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_their_most_and_luck_is_full() {
        let retry = Retry { base: Duration::from_secs(5), max: Duration::from_secs(3600) };
        let most: Vec<u64> = (1..=12).map(|attempt| backoff(retry, attempt, 1.0).as_secs()).collect();
        assert_eq!(most, [5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560, 3600, 3600]);
        assert_eq!(backoff(retry, 12, 0.0), Duration::ZERO);
        assert_eq!(backoff(retry, i32::MAX, 0.5), Duration::from_secs(1800));
    }
}
