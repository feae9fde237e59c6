//! The queue of one source's parked events: their effects are tried again, a few in each transaction.
//!
//! Invariant: an attempt counts unless it is known that the effect had no part in its end; so an event that ends its
//! connection each time runs out of attempts like any other.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tokio::time::sleep;
use tracing::warn;

use super::backoff::backoff;
use super::jobs::{Attempt, Ended, Ending, Task};
use super::place::Place;
use super::{Shared, SourceInUse};
use crate::config::Source;
use crate::db::Trouble;
use crate::record::{BatchError, Retried};
use crate::tasks::Beat;

/// Events in one transaction, where they can share one.
const BATCH: usize = 16;
/// After a statement of ours that failed.
const OWN_TROUBLE: Duration = Duration::from_secs(1);

pub(super) struct Parking {
    pub(super) shared: Arc<Shared>,
    pub(super) source: SourceInUse,
    pub(super) queue: Arc<str>,
    pub(super) bell: Arc<Notify>,
}

impl Parking {
    /// Runs until it is cancelled; an attempt under way is ended first.
    pub(super) async fn run(self, beat: Beat) {
        let (mut place, mut failures): (Place, u32) = Default::default();
        let mut rung = false;
        while !beat.is_cancelled() {
            beat.alive();
            if !rung {
                tokio::select! {
                    () = beat.cancelled() => break,
                    () = beat.waiting(self.bell.notified()) => {}
                }
            }
            let (now, lease) = (Instant::now(), self.shared.lease());
            let count = if self.source.load().parked.is_batched() { BATCH } else { 1 };
            let (tasks, more) =
                match self.shared.jobs.take(&self.queue, count, lease, place.begin(now), None).await {
                    Ok(taken) => {
                        failures = 0;
                        let full = taken.tasks.len() >= count;
                        let more = place.found(taken.first_due, full, taken.now, Instant::now());
                        self.shared.buried(&self.queue, &taken.buried, None);
                        (taken.tasks, more)
                    }
                    Err(error) => {
                        failures += 1;
                        if failures.is_power_of_two() {
                            let cause = error.cause;
                            warn!(queue = &*self.queue, cause, failures, "parked events cannot be taken");
                        }
                        sleep(OWN_TROUBLE).await;
                        continue;
                    }
                };
            // Others may have come meanwhile.
            rung = more || !tasks.is_empty();
            for task in &tasks {
                self.shared.held.add(task.attempt.clone(), now);
            }
            if !tasks.is_empty() {
                self.try_all(tasks).await;
            }
        }
    }

    /// Together; each by itself if that fails, since one of them may be why.
    async fn try_all(&self, mut tasks: Vec<Task>) {
        let in_use = self.source.load_full();
        let source = &*in_use.source;
        tasks.sort_by_cached_key(|task| lock(source, task));
        let Err(error) = self.try_some(&tasks).await else { return };
        if let [task] = tasks.as_slice() {
            return self.end(task, Some(error));
        }
        for task in &tasks {
            if let Err(error) = self.try_some(std::slice::from_ref(task)).await {
                self.end(task, Some(error));
            }
        }
    }

    async fn try_some(&self, tasks: &[Task]) -> Result<(), BatchError> {
        let in_use = self.source.load_full();
        let retry = in_use.source.retry;
        let delays: Vec<Duration> =
            tasks.iter().map(|task| backoff(retry, task.number, rand::random())).collect();
        // Slow effects leave connections to the deliveries.
        let _permit = self.shared.effects_at_once.acquire().await;
        let (retried, generation) = in_use.parked.run(&in_use.source, tasks, &delays).await?;
        for (task, Retried { fate, word, cause }) in tasks.iter().zip(retried) {
            self.shared.metrics.work.attempted(&self.queue, word);
            if let Some(cause) = &cause {
                let (source, id) = (&*in_use.source.name, task.event_id.escape_debug());
                warn!(source, event.id = %id, attempt = task.number, result = word, cause, "a parked effect was tried");
            }
            let ending = if word == "gone" { Ending::Hopeless } else { Ending::Failed };
            let ended = self.ended(&task.attempt, ending, cause, backoff(retry, task.number, rand::random()));
            match fate {
                Some(fate) => self.shared.note(&ended, fate, generation),
                None => self.shared.end(ended),
            }
        }
        Ok(())
    }

    /// Of one event whose transaction failed.
    fn end(&self, task: &Task, error: Option<BatchError>) {
        let in_use = self.source.load_full();
        let trouble = error.as_ref().map(|error| error.trouble);
        let ending = match trouble {
            Some(Trouble::Retry | Trouble::Resources | Trouble::Locked) => Ending::Back,
            // Whoever ends the connection may be the effect. If it was committed all the same, the token says so.
            Some(Trouble::Lost | Trouble::Cancelled | Trouble::Statement) | None => Ending::Failed,
        };
        let cause = error.map(|error| error.cause);
        let (source, id) = (&*in_use.source.name, task.event_id.escape_debug());
        warn!(source, event.id = %id, attempt = task.number, cause, "the transaction of a parked effect failed");
        self.shared
            .metrics
            .work
            .attempted(&self.queue, if ending == Ending::Back { "ours" } else { "failed" });
        let delay = backoff(in_use.source.retry, task.number, rand::random());
        self.shared.end(self.ended(&task.attempt, ending, cause, delay));
    }

    fn ended(&self, attempt: &Attempt, result: Ending, error: Option<String>, delay: Duration) -> Ended {
        let source = Arc::clone(&self.source.load().source.name);
        Ended { attempt: attempt.clone(), source, result, error, delay }
    }
}

/// Batches of all gateways lock their business rows in one order.
fn lock(source: &Source, task: &Task) -> Option<String> {
    source.lock.as_ref()?.value(&task.content.as_ref()?.bytes)
}
