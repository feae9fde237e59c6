//! The queue of one source's parked events: their effects are tried again, a few in each transaction.
//!
//! Invariant: an attempt counts unless it is known that the effect had no part in its end; so an event that ends its
//! connection each time runs out of attempts like any other. Each attempt that was taken ends, whatever becomes of the loop: what
//! nobody works on any more would be held on to for ever.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tokio::time::sleep;
use tracing::warn;

use super::backoff::backoff;
use super::jobs::{Ended, Ending, Fate, Task};
use super::place::Place;
use super::{Shared, SourceInUse, SourceNow};
use crate::config::Source;
use crate::db::Trouble;
use crate::generation::Generation;
use crate::record::{Retried, Unended};
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
            let taken = match self.shared.jobs.take(&self.queue, count, lease, place.begin(now), None).await {
                Ok(taken) => taken,
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
            failures = 0;
            let tasks = taken.tasks;
            let more = place.found(taken.first_due, tasks.len() >= count, taken.now, Instant::now());
            self.shared.buried(&self.queue, &taken.buried, None);
            // Others may have come meanwhile.
            rung = more || !tasks.is_empty();
            for task in &tasks {
                self.shared.held.add(task.attempt.clone(), now);
            }
            if !tasks.is_empty() && !self.try_all(tasks).await {
                sleep(OWN_TROUBLE).await;
            }
        }
    }

    /// Together; each by itself if that fails, since one of them may be why. False if no effect could begin.
    async fn try_all(&self, mut tasks: Vec<Task>) -> bool {
        let in_use = self.source.load_full();
        tasks.sort_by_cached_key(|task| lock(&in_use.source, task));
        let mut together = tasks.len();
        let mut hand = InHand { parking: self, tasks, tried: 0 };
        while !hand.tasks.is_empty() {
            match hand.try_first(together).await {
                // None of them is why.
                Err(error) if !error.begun => {
                    let (cause, events) = (&error.cause, hand.tasks.len());
                    warn!(queue = &*self.queue, cause, events, "effects of parked events could not begin");
                    hand.end_first(events, Ending::Back, &error);
                    return false;
                }
                Err(error) if together == 1 => hand.end_first(1, counted(error.trouble), &error),
                // Those that failed together are still in hand.
                Ok(()) | Err(_) => {}
            }
            together = 1;
        }
        true
    }

    /// Of an event whose transaction was committed, or whose effect failed.
    fn tried(&self, in_use: &SourceNow, task: &Task, retried: Retried, generation: Option<Generation>) {
        let Retried { fate, word, cause } = retried;
        self.shared.metrics.work.attempted(&self.queue, word);
        if let Some(cause) = &cause {
            let (source, id) = (&*in_use.source.name, task.event_id.escape_debug());
            warn!(source, event.id = %id, attempt = task.number, result = word, cause, "a parked effect was tried");
        }
        match (fate, word) {
            // Locked, or somebody else's by now: the token says which, once that can be seen.
            (Some(Fate::Lost | Fate::Busy), "not_tried") => {
                let delay = Duration::ZERO;
                self.shared.end(Ended { delay, ..self.ended(task, Ending::Back, cause) });
            }
            (Some(fate), _) => self.shared.note(&self.ended(task, Ending::Failed, cause), fate, generation),
            (None, "gone") => self.shared.end(self.ended(task, Ending::Hopeless, cause)),
            (None, _) => self.shared.end(self.ended(task, Ending::Failed, cause)),
        }
    }

    fn ended(&self, task: &Task, result: Ending, error: Option<String>) -> Ended {
        let source = Arc::clone(&self.source.load().source);
        let delay = backoff(source.retry, task.number, rand::random());
        Ended { attempt: task.attempt.clone(), source: Arc::clone(&source.name), result, error, delay }
    }
}

/// What was taken and has not ended.
struct InHand<'a> {
    parking: &'a Parking,
    tasks: Vec<Task>,
    /// So many of the first are being tried.
    tried: usize,
}

impl InHand<'_> {
    /// Tries the first of them in one transaction. If that fails, they stay.
    async fn try_first(&mut self, count: usize) -> Result<(), Unended> {
        let parking = self.parking;
        let in_use = parking.source.load_full();
        // Slow effects leave connections to the deliveries.
        let _permit = parking.shared.effects_at_once.acquire().await;
        self.tried = count;
        let tasks = self.tasks.get(..count).unwrap_or_default();
        let retry = in_use.source.retry;
        let delays: Vec<Duration> =
            tasks.iter().map(|task| backoff(retry, task.number, rand::random())).collect();
        let ran = in_use.parked.run(&in_use.source, tasks, &delays).await;
        self.tried = 0;
        let (retried, generation) = ran?;
        for retried in retried {
            parking.tried(&in_use, &self.tasks.remove(0), retried, generation);
        }
        Ok(())
    }

    /// Of events whose transaction failed.
    fn end_first(&mut self, count: usize, ending: Ending, error: &Unended) {
        let Parking { shared, source, queue, .. } = self.parking;
        let in_use = source.load_full();
        for task in self.tasks.drain(..count) {
            let (source, id) = (&*in_use.source.name, task.event_id.escape_debug());
            if error.begun {
                let cause = &error.cause;
                warn!(source, event.id = %id, attempt = task.number, cause, "the transaction of a parked effect failed");
            }
            shared.metrics.work.attempted(queue, if ending == Ending::Back { "ours" } else { "failed" });
            shared.end(self.parking.ended(&task, ending, Some(error.cause.clone())));
        }
    }
}

/// The loop failed. Whose effect it was trying may be why.
impl Drop for InHand<'_> {
    fn drop(&mut self) {
        for (at, task) in std::mem::take(&mut self.tasks).iter().enumerate() {
            let ending = if at < self.tried { Ending::Failed } else { Ending::Back };
            let cause = "the gateway's loop failed meanwhile".to_owned();
            self.parking.shared.end(self.parking.ended(task, ending, Some(cause)));
        }
    }
}

/// What an attempt comes to whose transaction failed once effects had begun.
fn counted(trouble: Trouble) -> Ending {
    match trouble {
        Trouble::Retry | Trouble::Resources | Trouble::Locked => Ending::Back,
        // Whoever ends the connection may be the effect. If it was committed all the same, the token says so.
        Trouble::Lost | Trouble::Cancelled | Trouble::Statement => Ending::Failed,
    }
}

/// Batches of all gateways lock their business rows in one order.
fn lock(source: &Source, task: &Task) -> Option<String> {
    source.lock.as_ref()?.value(&task.content.as_ref()?.bytes)
}
