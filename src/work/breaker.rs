//! When a target is left alone, and how it is taken up again.
//!
//! Pure: time is an argument. Only failures of the target come here; never those of one event, and never our own store's.

use std::time::{Duration, Instant};

/// How long a target is left alone at first, and at most.
const PAUSE: std::ops::RangeInclusive<Duration> = Duration::from_millis(500)..=Duration::from_secs(10);

/// After enough failures in a row a target is left alone for a while; then one delivery tries it. If that is taken, the
/// number of deliveries at once grows from there, by one with each success, so that all that waited does not come at once.
#[derive(Debug)]
pub(super) struct Breaker {
    threshold: u32,
    failures: u32,
    pause: Duration,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// As many at once as this.
    Closed {
        ramp: usize,
    },
    Open {
        until: Instant,
    },
    /// One delivery tries.
    Trying,
}

impl Breaker {
    pub(super) fn new(threshold: u32) -> Self {
        Self { threshold, failures: 0, pause: *PAUSE.start(), state: State::Closed { ramp: usize::MAX } }
    }

    pub(super) fn set_threshold(&mut self, threshold: u32) {
        self.threshold = threshold;
    }

    /// How many deliveries may be under way.
    pub(super) fn limit(&mut self, now: Instant) -> usize {
        if let State::Open { until } = self.state
            && until <= now
        {
            self.state = State::Trying;
        }
        match self.state {
            State::Closed { ramp } => ramp,
            State::Open { .. } => 0,
            State::Trying => 1,
        }
    }

    /// When it has to be looked at again, if nothing else happens.
    pub(super) fn opens_at(&self) -> Option<Instant> {
        match self.state {
            State::Open { until } => Some(until),
            State::Closed { .. } | State::Trying => None,
        }
    }

    pub(super) fn is_open(&self) -> bool {
        !matches!(self.state, State::Closed { .. })
    }

    pub(super) fn succeeded(&mut self) {
        match &mut self.state {
            State::Closed { ramp } => *ramp = ramp.saturating_add(1),
            // Of a delivery that began before.
            State::Open { .. } => return,
            State::Trying => self.state = State::Closed { ramp: 2 },
        }
        self.failures = 0;
        self.pause = *PAUSE.start();
    }

    /// `luck` from 0 to 1 shortens the pause by up to a half, so that gateways do not try together. Returns whether the
    /// target is left alone from now on.
    pub(super) fn failed(&mut self, now: Instant, luck: f64) -> bool {
        match self.state {
            State::Closed { .. } => {
                self.failures += 1;
                if self.failures < self.threshold {
                    return false;
                }
            }
            State::Open { .. } => return false,
            State::Trying => {}
        }
        let opened = matches!(self.state, State::Closed { .. });
        self.state = State::Open { until: now + self.pause.mul_f64(1.0 - luck.clamp(0.0, 1.0) / 2.0) };
        self.pause = (self.pause * 2).min(*PAUSE.end());
        opened
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(breaker: &mut Breaker, now: Instant) -> Instant {
        breaker.limit(now);
        for _ in 0..1_000 {
            breaker.failed(now, 0.0);
            if let Some(until) = breaker.opens_at() {
                return until;
            }
        }
        panic!("never opened");
    }

    #[test]
    fn it_opens_after_failures_in_a_row_only() {
        let (mut breaker, now) = (Breaker::new(3), Instant::now());
        for _ in 0..10 {
            assert!(!breaker.failed(now, 0.0));
            assert!(!breaker.failed(now, 0.0));
            breaker.succeeded();
        }
        assert_eq!(breaker.limit(now), usize::MAX);
        assert!(!breaker.failed(now, 0.0) && !breaker.failed(now, 0.0) && breaker.failed(now, 0.0));
        assert_eq!(breaker.limit(now), 0);
    }

    #[test]
    fn one_delivery_tries_and_the_others_follow_slowly() {
        let (mut breaker, now) = (Breaker::new(1), Instant::now());
        let until = opened(&mut breaker, now);
        assert_eq!(breaker.limit(now + Duration::from_millis(499)), 0);
        assert_eq!(breaker.limit(until), 1);
        breaker.succeeded();
        assert_eq!(breaker.limit(until), 2);
        breaker.succeeded();
        breaker.succeeded();
        assert_eq!(breaker.limit(until), 4);
    }

    #[test]
    fn pauses_grow_while_tries_fail_and_start_anew_after_one_that_does_not() {
        let (mut breaker, mut now) = (Breaker::new(1), Instant::now());
        let mut pauses = Vec::new();
        for _ in 0..9 {
            let until = opened(&mut breaker, now);
            pauses.push((until - now).as_millis());
            now = until;
        }
        assert_eq!(pauses, [500, 1000, 2000, 4000, 8000, 10000, 10000, 10000, 10000]);
        breaker.limit(now);
        breaker.succeeded();
        assert_eq!((opened(&mut breaker, now) - now).as_millis(), 500);
    }

    #[test]
    fn what_began_before_it_opened_changes_nothing() {
        let (mut breaker, now) = (Breaker::new(1), Instant::now());
        let until = opened(&mut breaker, now);
        breaker.succeeded();
        assert!(!breaker.failed(now, 0.0));
        assert_eq!(breaker.opens_at(), Some(until));
    }

    #[test]
    fn luck_shortens_the_pause_by_half_at_most() {
        let (mut breaker, now) = (Breaker::new(1), Instant::now());
        breaker.failed(now, 1.0);
        assert_eq!(breaker.opens_at(), Some(now + Duration::from_millis(250)));
    }
}
