//! How many deliveries a second.

use std::time::{Duration, Instant};

/// A bucket of permissions that fills by a rate; of at most a tenth of a second's, so that there are no bursts.
#[derive(Debug)]
pub(super) struct Pace {
    per_second: Option<f64>,
    have: f64,
    at: Instant,
}

impl Pace {
    pub(super) fn new(now: Instant) -> Self {
        Self { per_second: None, have: 0.0, at: now }
    }

    /// `None`: as many as there are.
    pub(super) fn set(&mut self, per_second: Option<f64>) {
        self.per_second = per_second;
    }

    /// How many may begin now.
    pub(super) fn room(&mut self, now: Instant) -> usize {
        let Some(rate) = self.per_second else { return usize::MAX };
        let filled = now.saturating_duration_since(self.at).as_secs_f64() * rate;
        self.at = now;
        self.have = (self.have + filled).min((rate / 10.0).max(1.0));
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "small and not below zero"
        )]
        let room = self.have as usize;
        room
    }

    pub(super) fn spend(&mut self, begun: usize) {
        if self.per_second.is_some() {
            #[expect(clippy::cast_precision_loss, reason = "a small number")]
            let begun = begun as f64;
            self.have -= begun;
        }
    }

    /// When the next may begin, if none may now.
    pub(super) fn next_at(&self) -> Option<Instant> {
        let rate = self.per_second.filter(|rate| *rate > 0.0)?;
        let missing = (1.0 - self.have).max(0.0);
        Some(self.at + Duration::from_secs_f64((missing / rate).min(3600.0)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_begin_in_a_second_than_the_rate_allows() {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        assert_eq!(pace.room(start), usize::MAX);
        pace.set(Some(50.0));
        let mut begun = 0;
        for ms in 0..1_000 {
            let room = pace.room(start + Duration::from_millis(ms));
            pace.spend(room);
            begun += room;
        }
        assert!((48..=51).contains(&begun), "{begun}");
        assert!(pace.room(start + Duration::from_secs(100)) <= 5, "no burst after a rest");
    }

    #[test]
    fn a_slow_rate_says_when_the_next_may_begin() {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        pace.set(Some(0.5));
        assert_eq!(pace.room(start), 0);
        assert_eq!(pace.next_at(), Some(start + Duration::from_secs(2)));
        assert_eq!(pace.room(start + Duration::from_secs(2)), 1);
    }
}
