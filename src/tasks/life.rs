//! What is known of one loop: whether it is alive, and how often it failed in a row. Time is an argument.

use std::fmt::Display;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::task::AbortHandle;
use tokio_util::sync::CancellationToken;

use super::{Age, HEALTHY_AFTER};

/// How a loop says that it is alive; clones say it for the same loop.
///
/// A loop that says nothing is taken for stuck: its age grows, and its failures are never forgiven.
#[derive(Debug, Clone)]
pub struct Beat {
    life: Arc<Life>,
    cancel: CancellationToken,
    stopping: CancellationToken,
}

impl Beat {
    pub(super) fn new(life: Arc<Life>, cancel: CancellationToken, stopping: CancellationToken) -> Self {
        Self { life, cancel, stopping }
    }

    /// The loop got this far: to be said in each of its turns.
    pub fn alive(&self) {
        self.life.pulse().beat = Some(Instant::now());
    }

    /// Waits for something that may stay away for as long as it likes (a message, the next turn); meanwhile the loop counts as
    /// alive. Not for what should answer: a store, a lock, work that was begun.
    ///
    /// Dropping it is as safe as dropping `event`.
    pub async fn waiting<F: Future>(&self, event: F) -> F::Output {
        let _waiting = Waiting::begin(&self.life);
        event.await
    }

    /// Completes when the loop is to end: it is cancelled, or the process stops.
    pub async fn cancelled(&self) {
        tokio::select! {
            () = self.cancel.cancelled() => {}
            () = self.stopping.cancelled() => {}
        }
    }

    /// Whether the loop is to end.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.cancel.is_cancelled() || self.stopping.is_cancelled()
    }
}

/// Ends with the wait, also if that is dropped in a `select!` or by a panic.
struct Waiting<'a>(&'a Life);

impl<'a> Waiting<'a> {
    fn begin(life: &'a Life) -> Self {
        life.pulse().waits += 1;
        Self(life)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut pulse = self.0.pulse();
        pulse.waits = pulse.waits.saturating_sub(1);
        pulse.beat = Some(Instant::now());
    }
}

/// What a loop can end with.
pub trait Ended {
    /// Why it failed, if it did.
    ///
    /// # Errors
    /// The cause.
    fn ended(self) -> Result<(), String>;
}

impl Ended for () {
    fn ended(self) -> Result<(), String> {
        Ok(())
    }
}

impl<T, E: Display> Ended for Result<T, E> {
    fn ended(self) -> Result<(), String> {
        self.map(drop).map_err(|error| format!("{error:#}"))
    }
}

/// A loop over all its lives.
#[derive(Debug)]
pub(super) struct Life {
    pub(super) name: Arc<str>,
    pulse: Mutex<Pulse>,
}

#[derive(Debug, Default)]
struct Pulse {
    /// When this life began; none between two.
    began: Option<Instant>,
    /// When it last said that it is alive.
    beat: Option<Instant>,
    /// Waits that it is in.
    waits: usize,
    /// Since the last life that was healthy.
    failures: u32,
    abort: Option<AbortHandle>,
}

impl Life {
    pub(super) fn new(name: Arc<str>) -> Self {
        Self { name, pulse: Mutex::default() }
    }

    /// A life begins.
    pub(super) fn begin(&self, abort: AbortHandle, now: Instant) {
        let mut pulse = self.pulse();
        pulse.began = Some(now);
        pulse.abort = Some(abort);
    }

    /// A life has failed; returns how many in a row have.
    pub(super) fn fail(&self, now: Instant) -> u32 {
        let mut pulse = self.pulse();
        pulse.failures = pulse.failures_in_a_row(now) + 1;
        pulse.began = None;
        pulse.abort = None;
        pulse.failures
    }

    pub(super) fn failures_in_a_row(&self, now: Instant) -> u32 {
        self.pulse().failures_in_a_row(now)
    }

    pub(super) fn age(&self, now: Instant) -> Age {
        let pulse = self.pulse();
        match pulse.beat {
            _ if pulse.waits > 0 => Age::Since(Duration::ZERO),
            Some(beat) => Age::Since(now.saturating_duration_since(beat)),
            None => Age::Never,
        }
    }

    /// Ends this life, if there is one.
    pub(super) fn abort(&self) -> bool {
        let pulse = self.pulse();
        pulse.abort.as_ref().map(AbortHandle::abort).is_some()
    }

    fn pulse(&self) -> MutexGuard<'_, Pulse> {
        self.pulse.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pulse {
    /// None, once this life is healthy.
    fn failures_in_a_row(&self, now: Instant) -> u32 {
        let Some(began) = self.began else { return self.failures };
        let spoke = if self.waits > 0 { Some(now) } else { self.beat };
        let healthy = spoke.is_some_and(|at| at.saturating_duration_since(began) >= HEALTHY_AFTER);
        if healthy { 0 } else { self.failures }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lives that begin and end at the given seconds, each with the second at which it last spoke.
    fn failures(lives: &[(u64, Option<u64>, u64)], asked: u64) -> u32 {
        let start = Instant::now();
        let at = |second| start + Duration::from_secs(second);
        let life = Life::new("loop".into());
        for &(began, spoke, failed) in lives {
            life.pulse().began = Some(at(began));
            life.pulse().beat = spoke.map(at);
            if failed < asked {
                life.fail(at(failed));
            }
        }
        life.failures_in_a_row(at(asked))
    }

    #[test]
    fn only_a_life_that_is_alive_at_an_age_forgives() {
        let long = HEALTHY_AFTER.as_secs();
        for (lives, asked, wanted) in [
            (&[(0, Some(0), 1), (2, Some(2), 3)][..], 4, 2),
            // Healthy when it failed.
            (&[(0, Some(0), 1), (2, Some(2 + long), 3 + long)], 4 + long, 1),
            // Stuck, so not healthy.
            (&[(0, Some(0), 1), (2, Some(3), 3 + long)], 4 + long, 2),
            (&[(0, None, long), (long + 1, None, 9 * long)], 3 * long, 1),
            // Lives still, and is healthy since it last spoke.
            (&[(0, Some(0), 1), (2, Some(1 + long), 9 * long)], 2 + long, 1),
            (&[(0, Some(0), 1), (2, Some(2 + long), 9 * long)], 2 + long, 0),
        ] {
            assert_eq!(failures(lives, asked), wanted, "{lives:?} at {asked}");
        }
    }
}
