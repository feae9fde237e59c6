//! The attempts that this process has, and until when it may believe so.
//!
//! Invariant: an attempt is begun only while its lease surely lasts, by the time at which it was asked for on this
//! process' own clock; a process that was stopped and goes on drops what it held.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::jobs::Attempt;

/// Handle to the attempts of this process.
#[derive(Debug, Default)]
pub(super) struct Held(Mutex<HashMap<Attempt, Instant>>);

impl Held {
    /// It was asked for at `asked`, and granted.
    pub(super) fn add(&self, attempt: Attempt, asked: Instant) {
        self.lock().insert(attempt, asked);
    }

    pub(super) fn remove(&self, attempt: &Attempt) {
        self.lock().remove(attempt);
    }

    /// Whether it can be begun at `now`, with time left to be held on.
    pub(super) fn may_begin(&self, attempt: &Attempt, now: Instant, lease: Duration) -> bool {
        self.lock().get(attempt).is_some_and(|asked| now.saturating_duration_since(*asked) < lease / 2)
    }

    pub(super) fn any_of(&self, queue: &str) -> bool {
        self.lock().keys().any(|attempt| *attempt.queue == *queue)
    }

    /// Those that were asked for longer ago than that.
    pub(super) fn older_than(&self, age: Duration, now: Instant) -> Vec<Attempt> {
        let held = self.lock();
        let old = held.iter().filter(|(_, asked)| now.saturating_duration_since(**asked) >= age);
        old.map(|(attempt, _)| attempt.clone()).collect()
    }

    /// What came of asking again at `asked`: held for longer, or not ours any more.
    pub(super) fn renewed(&self, attempt: &Attempt, mine: bool, asked: Instant) {
        let mut held = self.lock();
        if !mine {
            held.remove(attempt);
        } else if let Some(since) = held.get_mut(attempt) {
            *since = asked;
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Attempt, Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identify::EventKey;

    const LEASE: Duration = Duration::from_secs(30);

    fn attempt(token: &str) -> Attempt {
        Attempt { key: EventKey([1; 16]), queue: "target:t".into(), token: token.to_owned() }
    }

    #[test]
    fn an_attempt_is_begun_in_the_first_half_of_its_lease_only() {
        let (held, asked) = (Held::default(), Instant::now());
        held.add(attempt("a"), asked);
        assert!(held.may_begin(&attempt("a"), asked, LEASE));
        assert!(!held.may_begin(&attempt("a"), asked + LEASE / 2, LEASE));
        assert!(!held.may_begin(&attempt("b"), asked, LEASE));
        held.renewed(&attempt("a"), true, asked + LEASE / 2);
        assert!(held.may_begin(&attempt("a"), asked + LEASE / 2, LEASE));
        held.renewed(&attempt("a"), false, asked + LEASE / 2);
        assert!(!held.may_begin(&attempt("a"), asked + LEASE / 2, LEASE));
    }

    #[test]
    fn those_that_need_to_be_asked_for_again_are_found() {
        let (held, asked) = (Held::default(), Instant::now());
        held.add(attempt("a"), asked);
        held.add(attempt("b"), asked + LEASE / 3);
        assert_eq!(held.older_than(LEASE / 3, asked + LEASE / 3), [attempt("a")]);
        held.remove(&attempt("a"));
        assert_eq!(held.older_than(LEASE / 3, asked + LEASE / 3), []);
    }
}
