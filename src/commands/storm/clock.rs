//! What makes requests due: one thread that sleeps until the next one and lets it go, whatever became of the others.
//!
//! A thread of its own, since a runtime's timer is coarse (a millisecond) and late when its thread is busy with answers.
//! Invariant: each delivery that is open is in exactly one place: not due yet, ready, or with a lane. When none is open,
//! the lanes end.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;

use super::mix::Mix;
use super::pace::Pace;
use super::tally::LATE_AFTER;

/// One attempt at a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Delivery {
    pub(super) due: Instant,
    pub(super) request: u64,
    /// From 0.
    pub(super) attempt: usize,
}

/// How well the clock itself kept the schedule.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Slip {
    /// Requests that it let go late.
    pub(super) requests: u64,
    pub(super) max: Duration,
}

/// A stage's schedule, and what is ready to be sent.
#[derive(Debug)]
pub(super) struct Clock {
    pace: Pace,
    mix: Mix,
    requests: u64,
    began: Instant,
    /// One permit for each delivery that is ready.
    ready: Semaphore,
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    /// Requests that were let go, and how many of them lanes have.
    released: u64,
    taken: u64,
    /// Attempts after the first: ready, and due later.
    again: VecDeque<Delivery>,
    later: BinaryHeap<Reverse<Delivery>>,
    open: u64,
    stopped: bool,
    slip: Slip,
}

impl Clock {
    /// Begins now.
    pub(super) fn new(pace: Pace, mix: Mix, requests: u64) -> Self {
        let queue = Mutex::new(Queue { open: requests, ..Queue::default() });
        let (ready, changed) = (Semaphore::new(0), Condvar::new());
        Self { pace, mix, requests, began: Instant::now(), ready, queue, changed }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn due(&self, request: u64) -> Instant {
        self.began + self.pace.at(self.mix.instant(request))
    }

    /// Whether it was due after the warm-up.
    pub(super) fn is_measured(&self, due: Instant) -> bool {
        due.duration_since(self.began) >= self.pace.warm_up
    }

    /// Lets go what is due, until nothing is open. `over` is called once, when all requests were let go, with how many
    /// are not answered.
    pub(super) fn keep_time(&self, over: impl FnOnce(u64)) {
        let (mut queue, mut over) = (self.queue(), Some(over));
        while queue.open > 0 {
            let now = Instant::now();
            self.ready.add_permits(self.release(&mut queue, now));
            if queue.released == self.requests
                && let Some(over) = over.take()
            {
                over(queue.open);
            }
            let next = (queue.released < self.requests).then(|| self.due(queue.released));
            let again = queue.later.peek().map(|Reverse(delivery)| delivery.due);
            queue = match next.into_iter().chain(again).min() {
                Some(due) => {
                    let wait = due.saturating_duration_since(Instant::now());
                    self.changed.wait_timeout(queue, wait).unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    fn release(&self, queue: &mut Queue, now: Instant) -> usize {
        let mut ready = 0;
        while queue.released < self.requests && self.due(queue.released) <= now {
            let slip = now - self.due(queue.released);
            queue.slip.requests += u64::from(slip > LATE_AFTER);
            queue.slip.max = queue.slip.max.max(slip);
            queue.released += 1;
            ready += 1;
        }
        while let Some(Reverse(delivery)) = queue.later.peek().copied().filter(|later| later.0.due <= now) {
            queue.later.pop();
            queue.again.push_back(delivery);
            ready += 1;
        }
        ready
    }

    /// The next delivery that is due; `None`: there will be none any more.
    ///
    /// Dropping the future takes nothing.
    pub(super) async fn next(&self) -> Option<Delivery> {
        loop {
            self.ready.acquire().await.ok()?.forget();
            let mut queue = self.queue();
            if let Some(again) = queue.again.pop_front() {
                return Some(again);
            }
            if queue.taken < queue.released {
                let request = queue.taken;
                queue.taken += 1;
                return Some(Delivery { due: self.due(request), request, attempt: 0 });
            }
            // What it stood for was dropped when the load was stopped.
        }
    }

    /// A delivery ended; if there is a pause, it is sent again after that. Tells whether it will be.
    pub(super) fn finish(&self, delivery: Delivery, pause: Option<Duration>) -> bool {
        let mut queue = self.queue();
        let again = pause.filter(|_| !queue.stopped);
        match again {
            Some(pause) => {
                let Delivery { request, attempt, .. } = delivery;
                let due = Instant::now() + pause;
                queue.later.push(Reverse(Delivery { due, request, attempt: attempt + 1 }));
            }
            None => queue.open = queue.open.saturating_sub(1),
        }
        self.tell(&queue);
        again.is_some()
    }

    /// Sends nothing any more; what is under way goes on to its end.
    pub(super) fn stop(&self) {
        let mut queue = self.queue();
        let (again, later) = (queue.again.len(), queue.later.len());
        let waiting = u64::try_from(again + later).unwrap_or(u64::MAX);
        queue.open = queue.open.saturating_sub(self.requests - queue.taken + waiting);
        (queue.released, queue.taken) = (self.requests, self.requests);
        queue.again.clear();
        queue.later.clear();
        queue.stopped = true;
        self.tell(&queue);
    }

    /// Waits for nothing any more.
    pub(super) fn abandon(&self) {
        let mut queue = self.queue();
        queue.open = 0;
        self.tell(&queue);
    }

    fn tell(&self, queue: &Queue) {
        if queue.open == 0 {
            self.ready.close();
        }
        self.changed.notify_all();
    }

    pub(super) fn slip(&self) -> Slip {
        self.queue().slip
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clock(requests: u64) -> Clock {
        let mix =
            Mix { seed: 1, copies: 1, parallel: 1, hot: false, mismatch: 0, disconnect: 0, drop_answers: 0 };
        let second = Duration::from_secs(1);
        Clock::new(Pace::constant(1000.0, second / 1000, second), mix, requests)
    }

    #[test]
    fn requests_are_due_by_number_and_come_again_after_their_pause() {
        let clock = clock(3);
        let told = std::thread::scope(|scope| {
            let keeper = scope.spawn(|| {
                let mut told = None;
                clock.keep_time(|open| told = Some(open));
                told
            });
            let lane = scope.spawn(|| {
                let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
                runtime.block_on(async {
                    for request in 0..3 {
                        let delivery = clock.next().await.unwrap();
                        let due = clock.began + Duration::from_millis(request);
                        assert_eq!(delivery, Delivery { due, request, attempt: 0 });
                        assert_eq!(clock.is_measured(due), request > 0);
                        let pause = (request == 1).then(|| Duration::from_millis(20));
                        let before = Instant::now();
                        assert_eq!(clock.finish(delivery, pause), request == 1);
                        if let Some(pause) = pause {
                            let again = clock.queue().later.peek().unwrap().0;
                            assert!(again.due >= before + pause && again.attempt == 1 && again.request == 1);
                        }
                    }
                    let again = clock.next().await.unwrap();
                    assert!(again.due <= Instant::now() && (again.request, again.attempt) == (1, 1));
                    clock.finish(again, None);
                    assert_eq!(clock.next().await, None);
                });
            });
            lane.join().unwrap();
            keeper.join().unwrap()
        });
        assert!(told.is_some_and(|open| (1..=3).contains(&open)));
    }

    #[tokio::test]
    async fn what_is_stopped_ends_with_what_is_under_way() {
        let clock = clock(1000);
        clock.queue().released = 3;
        clock.ready.add_permits(3);
        let under_way = clock.next().await.unwrap();
        clock.stop();
        assert_eq!(clock.queue().open, 1);
        assert!(!clock.finish(under_way, Some(Duration::ZERO)));
        assert_eq!(clock.next().await, None);
        clock.keep_time(|_| {});
    }
}
