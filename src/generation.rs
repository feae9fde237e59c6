//! Which history of the database we are talking about.
//!
//! A marker in the fast tier says "done" for one history only. After a failover or a restore the generation is
//! another one, so markers of events that the database no longer has answer nothing.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

/// Names one history of one database; equal values mean the same history.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Generation([u8; 6]);

impl Generation {
    /// From the bytes that `hapax.generation()` returns.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    /// Eight characters, as they stand in markers.
    #[must_use]
    pub fn text(self) -> String {
        URL_SAFE_NO_PAD.encode(self.0)
    }
}

/// The generation that the last heartbeat read, and when.
#[derive(Debug)]
pub struct Heartbeat {
    age_max: Duration,
    last: Mutex<Option<(Generation, Instant)>>,
}

impl Heartbeat {
    /// Nothing is known yet; what is learned counts for `age_max`.
    #[must_use]
    pub fn new(age_max: Duration) -> Self {
        Self { age_max, last: Mutex::new(None) }
    }

    /// Notes what a heartbeat read. `sent` is when it was asked for, not when the answer came. Returns whether
    /// the generation differs from the last one known.
    pub fn note(&self, generation: Generation, sent: Instant) -> bool {
        let mut last = self.last.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let changed = last.is_some_and(|(before, _)| before != generation);
        *last = Some((generation, sent));
        changed
    }

    /// The generation whose markers count at `now`; none if the last heartbeat is too old.
    #[must_use]
    pub fn current(&self, now: Instant) -> Option<Generation> {
        let last = *self.last.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        last.filter(|(_, at)| now.saturating_duration_since(*at) <= self.age_max)
            .map(|(generation, _)| generation)
    }

    /// How old the last heartbeat is; none before the first.
    #[must_use]
    pub fn age(&self, now: Instant) -> Option<Duration> {
        let last = *self.last.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        last.map(|(_, at)| now.saturating_duration_since(at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_generation_counts_until_its_heartbeat_is_too_old() {
        let heartbeat = Heartbeat::new(Duration::from_secs(3));
        let sent = Instant::now();
        let one = Generation([1; 6]);
        assert_eq!(heartbeat.current(sent), None);
        assert!(!heartbeat.note(one, sent));
        assert_eq!(heartbeat.current(sent + Duration::from_secs(3)), Some(one));
        assert_eq!(heartbeat.current(sent + Duration::from_millis(3001)), None);
        assert!(heartbeat.note(Generation([2; 6]), sent));
    }
}
