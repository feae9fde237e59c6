//! How many events are taken in one statement, and ahead of their delivery.
//!
//! Their bodies come with them. More than the connection brings within the statement's time would be taken without anybody
//! ever having them, again and again, until they ran out of attempts.

use std::time::{Duration, Instant};

/// Most events that are taken ahead of their delivery.
const AHEAD_MAX: usize = 256;
/// Bytes of bodies that are taken at once, if the next ones are like those of before.
const BYTES: usize = 8 << 20;
/// Most events at once, however small.
const EVENTS_MAX: usize = 512;
/// Before any was seen: the largest that gateways take as they come.
const FIRST: usize = 1 << 20;

#[derive(Debug)]
pub(super) struct Load {
    /// Bytes of a body.
    mean: usize,
    /// Deliveries that ended in the second that began then, and in the one before: how fast this goes.
    second: Instant,
    ended: usize,
    before: usize,
}

impl Load {
    pub(super) fn new(now: Instant) -> Self {
        Self { mean: FIRST, second: now, ended: 0, before: 0 }
    }

    /// A delivery ended.
    pub(super) fn ended(&mut self, now: Instant) {
        if now.saturating_duration_since(self.second) >= Duration::from_secs(1) {
            (self.second, self.before, self.ended) = (now, self.ended, 0);
        }
        self.ended += 1;
    }

    /// Events that are worth being taken ahead: as many as are delivered in a tenth of a second.
    pub(super) fn ahead_max(&self) -> usize {
        (self.before.max(self.ended) / 10).min(AHEAD_MAX)
    }

    /// How many to take.
    pub(super) fn room(&self) -> usize {
        BYTES.checked_div(self.mean).unwrap_or(EVENTS_MAX).clamp(1, EVENTS_MAX)
    }

    /// What was taken.
    pub(super) fn took(&mut self, bodies: impl Iterator<Item = usize>) {
        let (bytes, events) =
            bodies.fold((0_usize, 0_usize), |(bytes, events), body| (bytes + body, events + 1));
        self.mean = bytes.checked_div(events).unwrap_or(self.mean);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_bodies_are_taken_a_few_at_a_time_and_small_ones_together() {
        let mut load = Load::new(Instant::now());
        assert_eq!(load.room(), 8);
        load.took([100, 300].into_iter());
        assert_eq!(load.room(), EVENTS_MAX);
        load.took([64 << 20].into_iter());
        assert_eq!(load.room(), 1);
        load.took(std::iter::empty());
        assert_eq!(load.room(), 1, "nothing was seen");
        load.took(std::iter::once(0));
        assert_eq!(load.room(), EVENTS_MAX);
    }
}
