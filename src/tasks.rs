//! The tasks of a gateway: work that a stop waits for, and loops that are started again when they fail.
//!
//! A loop is given as a factory, since a future that panicked cannot be polled again. What must outlive one of its lives (a
//! receiver, a listener, what was read) is held by the factory and not by the future, or else it is lost with the life:
//!
//! ```
//! # use std::sync::Arc;
//! # use hapax::tasks::{Beat, Tasks};
//! # use tokio::sync::{Mutex, mpsc};
//! # struct Order;
//! # async fn deliver(_order: Order) -> anyhow::Result<()> { Ok(()) }
//! async fn work(queue: Arc<Mutex<mpsc::Receiver<Order>>>, beat: Beat) -> anyhow::Result<()> {
//!     let mut queue = queue.lock().await;
//!     loop {
//!         tokio::select! {
//!             // Idle is not stuck.
//!             order = beat.waiting(queue.recv()) => match order {
//!                 Some(order) => deliver(order).await?,
//!                 None => return Ok(()),
//!             },
//!             () = beat.cancelled() => return Ok(()),
//!         }
//!         // At least once in each turn.
//!         beat.alive();
//!     }
//! }
//!
//! # fn start(tasks: &Tasks, cancel: &tokio_util::sync::CancellationToken) {
//! let (orders, queue) = mpsc::channel(100);
//! let queue = Arc::new(Mutex::new(queue));
//! // The name is a label of metrics: from the program or the settings, never from a sender.
//! tasks.spawn_until("target:orders", cancel, move |beat| work(Arc::clone(&queue), beat));
//! # drop(orders);
//! # }
//! ```
//!
//! | a loop that | is started by | a stop |
//! |---|---|---|
//! | lives as long as the process | [`Tasks::spawn_loop`] | ends it wherever it waits |
//! | ends by itself when nobody needs it | [`Tasks::spawn_while_needed`] | ends it wherever it waits |
//! | ends when it is cancelled, as at a reload | [`Tasks::spawn_until`] | cancels it, and waits for it |
//!
//! A life has failed if it panics, is aborted, ends before it may, or ends with an error. Invariant: a loop that failed is
//! started again, after a pause that grows ([`Backoff`]); each failure is counted (`hapax_loop_failures_total`) and what it
//! says is logged. [`UNREADY_AFTER`] failures in a row make the gateway not ready, until a life has been healthy, which is to be
//! alive after [`HEALTHY_AFTER`]; [`BROKEN_AFTER`] stop the process, since half a gateway that looks alive is worse than a restart.
//!
//! Never here: what a loop does.

mod life;

use std::collections::BTreeMap;
use std::future::Future;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::error;

use life::Life;
pub use life::{Beat, Ended};

/// Failures in a row after which the gateway is not ready.
pub const UNREADY_AFTER: u32 = 3;
/// Failures in a row after which the process stops. With the pauses between them, a loop that fails at once gets there in
/// about a minute.
pub const BROKEN_AFTER: u32 = 10;
/// A life that is alive at this age forgives the failures before it.
pub const HEALTHY_AFTER: Duration = Duration::from_secs(30);
/// The pauses before a loop is started again: doubled with each failure in a row, then cut by up to a half, so that loops that failed
/// together do not start together.
const PAUSE: RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(20);

/// How long to wait before a loop that failed so often in a row is started again.
pub type Backoff = fn(in_a_row: u32) -> Duration;

fn backoff(in_a_row: u32) -> Duration {
    let doublings = in_a_row.saturating_sub(1).min(16);
    let pause = PAUSE.start().saturating_mul(1 << doublings).min(*PAUSE.end());
    pause.mul_f64(0.5 + rand::random::<f64>() / 2.0)
}

/// Handle to this process' tasks; clones share them.
#[derive(Debug, Clone)]
pub struct Tasks {
    /// Work that a stop waits for.
    tracked: TaskTracker,
    /// The process is about to stop: loops may end.
    stopping: CancellationToken,
    /// Ends the background loops.
    stop: CancellationToken,
    /// Raised when a background loop cannot be kept running: the process cannot do its work any more.
    broken: CancellationToken,
    loops: Arc<Mutex<Loops>>,
    backoff: Backoff,
}

#[derive(Debug, Default)]
struct Loops {
    /// Those that are kept running; several can have one name (a lane of before a reload, and its successor).
    running: Vec<Arc<Life>>,
    /// By name, of ended ones too: a counter never falls.
    failures: BTreeMap<Arc<str>, u64>,
}

/// How the loops of one name are, for metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoopState {
    /// Its label.
    pub name: Arc<str>,
    /// Since the process started.
    pub failures: u64,
    /// Only of loops that are kept running.
    pub age: Option<Age>,
}

/// How long ago a loop said that it is alive; of several, the one that is silent for longest. It orders by that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Age {
    /// It waits for work, or spoke this long ago.
    Since(Duration),
    /// It has not said so yet.
    Never,
}

/// When a loop may end without having failed.
#[derive(Debug, Clone)]
enum Until {
    Stop,
    Unneeded,
    Cancelled(CancellationToken),
}

impl Default for Tasks {
    fn default() -> Self {
        Self::with_backoff(backoff)
    }
}

impl Tasks {
    /// Loops that fail are started again after other pauses than usual.
    #[must_use]
    pub fn with_backoff(backoff: Backoff) -> Self {
        Self {
            tracked: TaskTracker::new(),
            stopping: CancellationToken::new(),
            stop: CancellationToken::new(),
            broken: CancellationToken::new(),
            loops: Arc::default(),
            backoff,
        }
    }

    /// Runs work that nobody may cancel, and that a stop waits for.
    pub fn spawn<F>(&self, work: F) -> JoinHandle<F::Output>
    where
        F: Future<Output: Send + 'static> + Send + 'static,
    {
        self.tracked.spawn(work)
    }

    /// Runs a loop that must live as long as the process: to end is to fail.
    pub fn spawn_loop<M, F>(&self, name: impl Into<Arc<str>>, make: M)
    where
        M: Fn(Beat) -> F + Send + Sync + 'static,
        F: Future<Output: Ended> + Send + 'static,
    {
        drop(tokio::spawn(self.supervise(name.into(), Until::Stop, make)));
    }

    /// Runs a loop that ends when nobody needs it any more.
    pub fn spawn_while_needed<M, F>(&self, name: impl Into<Arc<str>>, make: M)
    where
        M: Fn(Beat) -> F + Send + Sync + 'static,
        F: Future<Output: Ended> + Send + 'static,
    {
        drop(tokio::spawn(self.supervise(name.into(), Until::Unneeded, make)));
    }

    /// Runs a loop that ends soon after it is cancelled, by `cancel` or because the process stops ([`Beat::cancelled`]), and
    /// never before. A stop waits for it, at most as long as for other work. Completes when it has ended; dropping the handle changes
    /// nothing.
    pub fn spawn_until<M, F>(
        &self,
        name: impl Into<Arc<str>>,
        cancel: &CancellationToken,
        make: M,
    ) -> JoinHandle<()>
    where
        M: Fn(Beat) -> F + Send + Sync + 'static,
        F: Future<Output: Ended> + Send + 'static,
    {
        self.tracked.spawn(self.supervise(name.into(), Until::Cancelled(cancel.clone()), make))
    }

    /// Lets the loop live, again and again. It is known from the call on.
    fn supervise<M, F>(
        &self,
        name: Arc<str>,
        until: Until,
        make: M,
    ) -> impl Future<Output = ()> + Send + use<M, F>
    where
        M: Fn(Beat) -> F + Send + Sync + 'static,
        F: Future<Output: Ended> + Send + 'static,
    {
        let (tasks, make) = (self.clone(), Arc::new(make));
        let cancel = match &until {
            Until::Cancelled(cancel) => cancel.clone(),
            Until::Stop | Until::Unneeded => CancellationToken::new(),
        };
        let life = Arc::new(Life::new(name));
        tasks.lock().add(&life);
        let beat = Beat::new(Arc::clone(&life), cancel, self.stopping.clone());
        async move {
            tokio::select! {
                () = tasks.stop.cancelled() => { life.abort(); }
                () = tasks.live_on(&life, &until, &beat, &make) => {}
            }
            tasks.lock().running.retain(|other| !Arc::ptr_eq(other, &life));
        }
    }

    async fn live_on<M, F>(&self, life: &Life, until: &Until, beat: &Beat, make: &Arc<M>)
    where
        M: Fn(Beat) -> F + Send + Sync + 'static,
        F: Future<Output: Ended> + Send + 'static,
    {
        loop {
            let (make, its_beat) = (Arc::clone(make), beat.clone());
            // Called within the task, so that a factory that panics is a loop that does.
            let work = tokio::spawn(async move { make(its_beat).await.ended() });
            life.begin(work.abort_handle(), Instant::now());
            let cause = match work.await {
                Ok(Ok(())) if self.may_end(until) => return,
                Ok(Ok(())) => "it ended".to_owned(),
                Ok(Err(cause)) => cause,
                Err(panic) => panic.to_string(),
            };
            let in_a_row = life.fail(Instant::now());
            let pause = (self.backoff)(in_a_row);
            self.tell(life, in_a_row, &cause, pause);
            if in_a_row >= BROKEN_AFTER {
                return self.broken.cancel();
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = cancelled(until, &self.stopping) => return,
            }
        }
    }

    fn may_end(&self, until: &Until) -> bool {
        match until {
            Until::Unneeded => true,
            Until::Stop => self.stopping.is_cancelled(),
            Until::Cancelled(cancel) => cancel.is_cancelled() || self.stopping.is_cancelled(),
        }
    }

    /// Counts a failure. One line for each power of two, so that a loop that cannot live does not fill the log.
    fn tell(&self, life: &Life, in_a_row: u32, cause: &str, pause: Duration) {
        let mut loops = self.lock();
        let failures = loops.failures.entry(Arc::clone(&life.name)).or_default();
        *failures += 1;
        let failures = *failures;
        drop(loops);
        let task = &*life.name;
        if in_a_row >= BROKEN_AFTER {
            error!(
                task,
                cause, failures, in_a_row, "a background loop fails again and again; the process stops"
            );
        } else if in_a_row.is_power_of_two() {
            let restart_ms = u64::try_from(pause.as_millis()).unwrap_or(u64::MAX);
            error!(
                task,
                cause, failures, in_a_row, restart_ms, "a background loop failed; it is started again"
            );
        }
    }

    /// How the loops are at `now`, by name.
    #[must_use]
    pub fn loops(&self, now: Instant) -> Vec<LoopState> {
        let loops = self.lock();
        let state = |(name, failures): (&Arc<str>, &u64)| {
            let named = loops.running.iter().filter(|life| life.name == *name);
            LoopState {
                name: Arc::clone(name),
                failures: *failures,
                age: named.map(|life| life.age(now)).max(),
            }
        };
        loops.failures.iter().map(state).collect()
    }

    /// The loops that failed [`UNREADY_AFTER`] times in a row or more and were not healthy since, with how often.
    #[must_use]
    pub fn failing(&self, now: Instant) -> Vec<(Arc<str>, u32)> {
        let failures = |life: &Arc<Life>| (Arc::clone(&life.name), life.failures_in_a_row(now));
        self.lock().running.iter().map(failures).filter(|(_, failures)| *failures >= UNREADY_AFTER).collect()
    }

    /// Ends the loops of this name as if they had panicked, to try what becomes of that; says how many there were. One
    /// that is just between two lives is none.
    #[must_use]
    pub fn fail(&self, name: &str) -> usize {
        let loops = self.lock();
        loops.running.iter().filter(|life| *life.name == *name && life.abort()).count()
    }

    /// Completes when a background loop cannot be kept running.
    pub async fn broken(&self) {
        self.broken.cancelled().await;
    }

    /// From here on, loops that have nothing more to do may end.
    pub fn begin_stop(&self) {
        self.stopping.cancel();
    }

    /// Waits for the tracked work, at most `limit`, then ends the loops. Returns whether all work ended.
    pub async fn finish(&self, limit: Duration) -> bool {
        self.tracked.close();
        let finished = tokio::time::timeout(limit, self.tracked.wait()).await.is_ok();
        self.stop.cancel();
        finished
    }

    fn lock(&self) -> MutexGuard<'_, Loops> {
        self.loops.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Loops {
    fn add(&mut self, life: &Arc<Life>) {
        self.running.push(Arc::clone(life));
        // From the beginning, so that an alarm on the increase sees the first failure.
        self.failures.entry(Arc::clone(&life.name)).or_default();
    }
}

/// A loop that is cancelled is not started again.
async fn cancelled(until: &Until, stopping: &CancellationToken) {
    match until {
        Until::Stop | Until::Unneeded => std::future::pending().await,
        Until::Cancelled(cancel) => {
            tokio::select! { () = cancel.cancelled() => {}, () = stopping.cancelled() => {} }
        }
    }
}

#[cfg(test)]
mod tests;
