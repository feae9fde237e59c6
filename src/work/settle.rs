//! Says how attempts ended, many in one transaction, until Postgres has heard it.
//!
//! Invariant: a result waits as long as Postgres is away, and never becomes another one for that: our own store's trouble is
//! nobody's failure.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::{Mutex, mpsc};
use tracing::warn;

use super::Shared;
use super::jobs::{Ended, Fate};
use crate::claim::Lifetime;
use crate::db::Trouble;
use crate::generation::Generation;
use crate::guard::Guard;
use crate::identify::EventKey;
use crate::tasks::Beat;

/// Results in one transaction.
const BATCH: usize = 256;
/// Pauses while Postgres does not take them.
const PAUSE: std::ops::RangeInclusive<Duration> = Duration::from_millis(20)..=Duration::from_secs(2);
/// Before results are told again whose events somebody else was changing.
const BUSY_PAUSE: Duration = Duration::from_millis(20);
/// Failures after which a result that Postgres refuses by itself is given up.
const HOPELESS_AFTER: u32 = 10;

/// Results that were not told yet; what is in hand outlives a loop that failed.
pub(super) type Results = Arc<Mutex<(mpsc::UnboundedReceiver<Ended>, Vec<Ended>)>>;

/// Runs until the process stops and all that was received is told.
pub(super) async fn run(shared: Arc<Shared>, results: Results, beat: Beat) {
    let mut results = results.lock().await;
    let (waiting, batch) = &mut *results;
    loop {
        beat.alive();
        let careful = !batch.is_empty();
        if batch.is_empty() {
            if beat.waiting(waiting.recv_many(batch, BATCH)).await == 0 {
                return;
            }
        } else {
            // Nobody waits for those whose events are busy.
            let more = std::iter::from_fn(|| waiting.try_recv().ok());
            batch.extend(more.take(BATCH));
        }
        tell(&shared, batch, careful, &beat).await;
        if !batch.is_empty() {
            tokio::time::sleep(BUSY_PAUSE).await;
        }
    }
}

/// Tells all; those stay whose events are busy. `careful`: some were before.
async fn tell(shared: &Shared, batch: &mut Vec<Ended>, careful: bool, beat: &Beat) {
    let mut pause = *PAUSE.start();
    let mut failures: u32 = 0;
    // All together; one by one after a failure that may be because of one of them.
    let mut together = batch.len();
    let mut careful = careful;
    // From the front; those after them are busy.
    let mut untold = batch.len();
    while untold > 0 {
        let part = batch.get(..together.min(untold)).unwrap_or_default();
        let error = match shared.jobs.finish(part, careful).await {
            Ok((fates, generation)) => {
                let told = fates.len();
                let ended: Vec<Ended> = batch.drain(..told).collect();
                untold -= told;
                for (ended, fate) in ended.into_iter().zip(fates) {
                    match fate {
                        Fate::Busy => batch.push(ended),
                        told => {
                            shared.untold.fetch_sub(1, Ordering::Relaxed);
                            shared.note(&ended, told, generation);
                        }
                    }
                }
                continue;
            }
            Err(error) => error,
        };
        failures += 1;
        if failures.is_power_of_two() {
            warn!(cause = error.cause, results = untold, failures, "results of attempts cannot be told yet");
        }
        if error.trouble == Trouble::Locked {
            // A job is locked by hand: the others do not wait for it. If it is the table, all wait.
            careful = true;
        } else if !error.trouble.may_pass() {
            if together == 1 && failures > HOPELESS_AFTER && error.trouble == Trouble::Statement {
                // Its lease runs out, and it is tried again.
                for ended in batch.drain(..1) {
                    shared.held.remove(&ended.attempt);
                }
                shared.untold.fetch_sub(1, Ordering::Relaxed);
                untold -= 1;
                failures = 0;
            } else if let (1, Some(untold)) = (together, batch.get_mut(..untold)) {
                // The others do not wait for it.
                untold.rotate_left(1);
            }
            together = 1;
        }
        beat.alive();
        tokio::time::sleep(pause.mul_f64(0.5 + rand::random::<f64>() / 2.0)).await;
        pause = (pause * 2).min(*PAUSE.end());
    }
}

impl Shared {
    /// Takes note of what Postgres says of an attempt that ended.
    pub(super) fn note(&self, ended: &Ended, fate: Fate, generation: Option<Generation>) {
        let Ended { attempt, source, .. } = ended;
        if fate != Fate::Busy {
            self.held.remove(attempt);
        }
        match fate {
            Fate::Lost => self.metrics.work.lease_lost(&attempt.queue),
            Fate::Open | Fate::Busy => {}
            Fate::Settled(digest) => {
                // Where signed bytes are watched, only a request can say under what it is remembered.
                let config = self.config.borrow();
                let plain = config.sources.get(&**source).is_some_and(|source| source.guard == Guard::Off);
                if let (true, Some(generation)) = (plain, generation) {
                    self.tier.load().settle(&attempt.key, digest, generation, Lifetime::Settled);
                }
            }
            Fate::Dead => self.buried(&attempt.queue, &[attempt.key], ended.error.as_deref()),
        }
    }

    /// Events died: a redelivery has to reach Postgres.
    pub(super) fn buried(&self, queue: &Arc<str>, keys: &[EventKey], cause: Option<&str>) {
        if keys.is_empty() {
            return;
        }
        self.metrics.work.died(queue, keys.len());
        for key in keys {
            let tier = self.tier.load();
            tier.forget(key);
            tier.forget(&key.guarded());
            let cause = cause.unwrap_or("taken too often, and its worker never came back");
            warn!(queue = &**queue, event.key = hex::encode(key.0), cause, "an event is dead");
        }
    }
}
