//! The queue of one target: takes what is due, has it delivered, within the target's limits.
//!
//! Invariant: no delivery begins without room in this gateway's share of the target's concurrency, a permission of its
//! rate, and a lease that lasts. Nothing here waits for another target.

use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use rand::Rng as _;
use tokio::sync::{Notify, mpsc};
use tokio::time::sleep_until;
use tracing::warn;

use super::backoff::backoff;
use super::breaker::Breaker;
use super::jobs::{Ended, Ending, JobsError, Task};
use super::load::Load;
use super::pace::Pace;
use super::place::Place;
use super::{Shared, TargetInUse};
use crate::config::Retry;
use crate::outbox::{Fault, Message, Target, Undelivered, message_id};
use crate::tasks::Beat;

/// How long a share of a target's concurrency is this gateway's without asking again. When a gateway dies, the others wait
/// that long for its share.
const SHARE_FOR: Duration = Duration::from_secs(10);
/// How often it is asked for.
const SHARE_EVERY: Duration = Duration::from_secs(3);
/// Of so many that wait the longest, one tries a target that failed.
const TRIED_AMONG: i32 = 1_000;
/// While results wait to be told.
const FULL_PAUSE: Duration = Duration::from_millis(5);
/// After a statement of ours that failed.
const OWN_TROUBLE: Duration = Duration::from_secs(1);

/// What one delivery came to. Postgres hears of it even if the loop that began it has failed.
struct Delivered {
    shared: Arc<Shared>,
    retry: Retry,
    /// Not told yet.
    untold: Option<(Task, Result<(), Undelivered>)>,
}

/// Its loop's successor does not know of this one.
impl Drop for Delivered {
    fn drop(&mut self) {
        if let Some((task, result)) = self.untold.take() {
            self.shared.delivered(task, result, self.retry);
        }
    }
}

pub(super) struct Deliveries {
    shared: Arc<Shared>,
    target: TargetInUse,
    queue: Arc<str>,
    bell: Arc<Notify>,
    /// Taken, and not begun.
    ahead: VecDeque<Task>,
    under_way: usize,
    ended: (mpsc::UnboundedSender<Delivered>, mpsc::UnboundedReceiver<Delivered>),
    share: Share,
    breaker: Breaker,
    pace: Pace,
    load: Load,
    place: Place,
    /// There may be something to take.
    rung: bool,
    /// Nothing is taken before.
    rest_until: Instant,
    failures: u32,
}

/// This gateway's part of what the target allows to all.
struct Share {
    slots: usize,
    /// By the clock of this process, since before it was asked for.
    until: Instant,
    ask_at: Instant,
}

impl Deliveries {
    pub(super) fn new(shared: Arc<Shared>, target: TargetInUse, queue: Arc<str>, bell: Arc<Notify>) -> Self {
        let now = Instant::now();
        let breaker = Breaker::new(target.load().config.breaker_failures);
        Self {
            shared,
            target,
            queue,
            bell,
            ahead: VecDeque::new(),
            under_way: 0,
            ended: mpsc::unbounded_channel(),
            share: Share { slots: 0, until: now, ask_at: now },
            breaker,
            pace: Pace::new(now),
            load: Load::new(now),
            place: Place::default(),
            rung: false,
            rest_until: now,
            failures: 0,
        }
    }

    /// Runs until it is cancelled: takes no more then, gives back what it has not begun, and waits for what it has.
    pub(super) async fn run(mut self, beat: Beat) {
        while !beat.is_cancelled() {
            beat.alive();
            let asked = Instant::now();
            if self.share.ask_at <= asked {
                self.renew_share(asked).await;
            }
            // That may have taken longer than a lease or a share lasts.
            let now = Instant::now();
            self.begin(now);
            if self.wants_more(now) {
                self.take(now).await;
                continue;
            }
            let wake_at = self.wake_at(now);
            let bell = Arc::clone(&self.bell);
            tokio::select! {
                () = beat.cancelled() => {}
                Some(delivered) = self.ended.1.recv() => self.end(delivered),
                () = bell.notified() => self.rung = true,
                () = sleep_until(wake_at.into()) => {}
            }
            while let Ok(delivered) = self.ended.1.try_recv() {
                self.end(delivered);
            }
        }
        self.give_back();
        while self.under_way > 0 {
            let Some(delivered) = self.ended.1.recv().await else { return };
            beat.alive();
            self.end(delivered);
        }
        // Others need not wait until it runs out.
        let (jobs, worker) = (&self.shared.jobs, &self.shared.worker);
        drop(jobs.share(&self.queue, worker, 0, 0, SHARE_FOR).await);
    }

    /// Says how much is under way, and hears how much may be. Without an answer the share ends by itself.
    async fn renew_share(&mut self, now: Instant) {
        let config = Arc::clone(&self.target.load().config);
        self.breaker.set_threshold(config.breaker_failures);
        self.share.ask_at = now + SHARE_EVERY;
        let (jobs, worker) = (&self.shared.jobs, &self.shared.worker);
        match jobs.share(&self.queue, worker, self.under_way, config.concurrency, SHARE_FOR).await {
            Ok(slots) => {
                self.share.slots = slots;
                // A little less than Postgres counts.
                self.share.until = now + SHARE_FOR.mul_f64(0.9);
                if slots == 0 {
                    // Others have it all until they ask again.
                    self.share.ask_at = now + SHARE_EVERY / 6;
                }
                #[expect(clippy::cast_precision_loss, reason = "small numbers")]
                let part = slots as f64 / config.concurrency as f64;
                self.pace.set(config.rate.map(|rate| f64::from(rate) * part));
            }
            Err(error) => {
                // What was granted is not known; no less than what was under way.
                self.share.slots = self.share.slots.min(self.under_way);
                self.own_trouble(&error, now);
            }
        }
    }

    /// How many may be under way, whatever the rate.
    fn limit(&mut self, now: Instant) -> usize {
        let share = if now < self.share.until { self.share.slots } else { 0 };
        self.breaker.limit(now).min(share)
    }

    /// Begins what was taken, as far as there is room.
    fn begin(&mut self, now: Instant) {
        let room = self.limit(now).saturating_sub(self.under_way);
        let room = room.min(self.pace.room(now)).min(self.shared.room_for_results());
        let mut begun = 0;
        while begun < room {
            let Some(task) = self.ahead.pop_front() else { break };
            // Whoever has it now, or will, delivers it.
            if !self.shared.held.may_begin(&task.attempt, now, self.shared.lease()) {
                self.shared.held.remove(&task.attempt);
                self.shared.metrics.work.lease_lost(&self.queue);
                continue;
            }
            begun += 1;
            self.deliver(task);
        }
        self.pace.spend(begun);
        if self.breaker.is_open() && self.under_way == 0 {
            self.give_back_beyond(1);
        }
    }

    fn deliver(&mut self, task: Task) {
        self.under_way += 1;
        self.shared.metrics.work.under_way(&self.queue, self.under_way);
        let (target, ended) = (self.target.load_full(), self.ended.0.clone());
        let shared = Arc::clone(&self.shared);
        drop(self.shared.tasks.spawn(async move {
            let started = Instant::now();
            let limit = target.config.timeout + Duration::from_secs(1);
            let result = attempt(&*target.target, &target.config.name, &task, limit).await;
            shared.metrics.work.delivered(started.elapsed());
            let retry = target.config.retry;
            drop(ended.send(Delivered { shared, retry, untold: Some((task, result)) }));
        }));
    }

    fn end(&mut self, mut delivered: Delivered) {
        let Some((task, result)) = delivered.untold.take() else { return };
        let now = Instant::now();
        self.under_way = self.under_way.saturating_sub(1);
        self.shared.metrics.work.under_way(&self.queue, self.under_way);
        self.load.ended(now);
        match &result {
            Err(Undelivered { fault: Fault::Ours | Fault::Event, .. }) => {}
            Err(error) if error.fault == Fault::Target => self.count_failure(now, error.is_answer()),
            // Whoever refuses an event is there.
            Ok(()) | Err(_) => self.breaker.succeeded(),
        }
        self.shared.metrics.work.breaker(&self.queue, self.breaker.is_open());
        self.shared.delivered(task, result, self.target.load().config.retry);
    }

    fn count_failure(&mut self, now: Instant, answered: bool) {
        if self.breaker.failed(now, answered, rand::random()) {
            warn!(queue = &*self.queue, "a target fails again and again: it is left alone for a while");
            self.give_back();
        }
    }

    fn ahead_max(&self) -> usize {
        if self.breaker.is_open() { 0 } else { self.load.ahead_max() }
    }

    /// Taken together, since each taking is a transaction: not before half of what may be ahead is used up.
    fn wants_more(&mut self, now: Instant) -> bool {
        if !self.rung || now < self.rest_until {
            return false;
        }
        let (limit, ahead) = (self.limit(now), self.ahead_max());
        let have = self.under_way + self.ahead.len();
        limit > 0 && have < limit + ahead.div_ceil(2)
    }

    async fn take(&mut self, now: Instant) {
        let wanted = (self.limit(now) + self.ahead_max()).saturating_sub(self.under_way + self.ahead.len());
        let wanted = match self.target.load().config.rate {
            // No more than the rate lets begin while a lease is young.
            Some(rate) => wanted.min(usize::try_from(rate).unwrap_or(usize::MAX).max(1)),
            None => wanted,
        };
        let wanted = wanted.min(self.load.room());
        // What tries a target that failed is one that has failed the least itself: the first may be what always fails.
        let among = self.breaker.is_open().then_some(TRIED_AMONG);
        let (lease, since) = (self.shared.lease(), self.place.begin(now));
        match self.shared.jobs.take(&self.queue, wanted, lease, since, among).await {
            Ok(taken) => {
                self.failures = 0;
                let full = taken.tasks.len() >= wanted;
                let more = match among {
                    None => self.place.found(taken.first_due, full, taken.now, Instant::now()),
                    Some(_) => full,
                };
                self.shared.buried(&self.queue, &taken.buried, None);
                // Those that were buried stood before others.
                self.rung = more || !taken.buried.is_empty();
                self.load.took(taken.tasks.iter().map(Task::bytes));
                for task in taken.tasks {
                    self.shared.held.add(task.attempt.clone(), now);
                    self.ahead.push_back(task);
                }
            }
            Err(error) => self.own_trouble(&error, now),
        }
    }

    /// Ours and not the target's: nothing is counted.
    fn own_trouble(&mut self, error: &JobsError, now: Instant) {
        self.failures += 1;
        if self.failures.is_power_of_two() {
            let (cause, failures) = (&error.cause, self.failures);
            warn!(queue = &*self.queue, cause, failures, "events for a target cannot be taken");
        }
        self.rest_until = now + OWN_TROUBLE.mul_f64(0.5 + rand::random::<f64>());
    }

    fn wake_at(&mut self, now: Instant) -> Instant {
        let mut wake_at = self.share.ask_at;
        let opens = self.breaker.opens_at();
        let paced = self.pace.next_at().filter(|_| !self.ahead.is_empty());
        let rested = (self.rung && self.rest_until > now).then_some(self.rest_until);
        let told = (self.shared.room_for_results() == 0).then_some(now + FULL_PAUSE);
        for at in [opens, paced, rested, told].into_iter().flatten() {
            wake_at = wake_at.min(at);
        }
        // Never a busy loop, whatever the clocks say.
        wake_at.max(now + Duration::from_millis(1))
    }

    fn give_back(&mut self) {
        self.give_back_beyond(0);
    }

    /// What was taken ahead and is not to be begun now; the attempt does not count.
    fn give_back_beyond(&mut self, kept: usize) {
        for task in self.ahead.drain(kept.min(self.ahead.len())..) {
            let delay = Duration::from_millis(rand::rng().random_range(0..1_000));
            self.shared.end(ended_as(task, Ending::Back, None, delay));
        }
    }
}

/// However the loop ends, what it took and did not begin is soon another's.
impl Drop for Deliveries {
    fn drop(&mut self) {
        self.give_back();
    }
}

impl Shared {
    /// A delivery ended.
    fn delivered(&self, task: Task, result: Result<(), Undelivered>, retry: Retry) {
        let (ending, error, delay) = verdict(&task, result, retry);
        let word = error.as_ref().map_or("done", |error| error.word);
        self.metrics.work.attempted(&task.attempt.queue, word);
        self.end(ended_as(task, ending, error, delay));
    }
}

/// Delivers an event. Whatever panics on the way, or never ends, has failed like others.
async fn attempt(target: &dyn Target, name: &str, task: &Task, limit: Duration) -> Result<(), Undelivered> {
    let delivery = async {
        let message = message(task, name).ok_or_else(gone)?;
        target.deliver(&message).await
    };
    match tokio::time::timeout(limit, AssertUnwindSafe(delivery).catch_unwind()).await {
        Ok(Ok(delivered)) => delivered,
        Ok(Err(_panic)) => Err(panicked()),
        Err(_elapsed) => Err(silent()),
    }
}

fn ended_as(task: Task, result: Ending, error: Option<Undelivered>, delay: Duration) -> Ended {
    let source = task.source.as_str().into();
    Ended { source, attempt: task.attempt, result, error: error.map(|error| error.cause), delay }
}

/// What a delivery means for its event.
fn verdict(
    task: &Task,
    result: Result<(), Undelivered>,
    retry: Retry,
) -> (Ending, Option<Undelivered>, Duration) {
    match result {
        Ok(()) => (Ending::Done, None, Duration::ZERO),
        Err(undelivered) => judge(task, undelivered, retry),
    }
}

fn judge(task: &Task, undelivered: Undelivered, retry: Retry) -> (Ending, Option<Undelivered>, Duration) {
    let ending = match undelivered.fault {
        Fault::Target | Fault::Message | Fault::Event => Ending::Failed,
        Fault::Ours if task.content.is_none() => Ending::Hopeless,
        Fault::Ours => Ending::Back,
    };
    let asked = undelivered.retry_after.unwrap_or_default().min(retry.max);
    let delay = asked + backoff(retry, task.number, rand::random());
    (ending, Some(undelivered), delay)
}

fn message(task: &Task, target: &str) -> Option<Message> {
    let content = task.content.as_ref()?;
    let replay = u32::try_from(task.replay).unwrap_or(0);
    Some(Message {
        id: message_id(&task.attempt.key.0, target, replay),
        source: task.source.as_str().into(),
        scope: task.scope.clone(),
        event_id: task.event_id.clone(),
        event_type: task.event_type.clone(),
        key: task.attempt.key.0,
        item: task.item,
        digest: task.digest,
        body: content.bytes.clone(),
        headers: content.headers.clone(),
        received_at: task.received_at,
        provider_time: task.provider_time,
        attempt: u32::try_from(task.number).unwrap_or(1),
        replay,
    })
}

/// The target's own time-out should have ended it.
fn silent() -> Undelivered {
    Undelivered {
        fault: Fault::Target,
        cause: "no answer in time".to_owned(),
        retry_after: None,
        word: "timeout",
    }
}

fn gone() -> Undelivered {
    ours(Fault::Ours, "its body is gone: retention.body is shorter than its attempts took")
}

fn panicked() -> Undelivered {
    ours(Fault::Event, "the delivery panicked; standard error has its message")
}

fn ours(fault: Fault, cause: &str) -> Undelivered {
    Undelivered { fault, cause: cause.to_owned(), retry_after: None, word: "ours" }
}

#[cfg(test)]
mod tests;
