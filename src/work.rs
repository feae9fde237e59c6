//! What is left to do after the commit: deliveries to targets, and the effects of parked events.
//!
//! Each queue (`target:NAME`, `effect:SOURCE`) has a loop of its own, so that none delays another. A loop takes jobs for
//! the time of a lease, commits that, has them done, and says how they ended; a result counts only while the token of its
//! taking is still in the row. Leases are held on while work goes on, and run out when a process dies: what it had comes
//! due again by itself. `pull:SOURCE` is for workers of the user's own; here it is only looked at.
//!
//! Invariant: no transaction is open while a target works; an attempt counts from its taking; only a target's own failures
//! count against it.

mod backoff;
mod breaker;
mod delivery;
mod held;
pub(crate) mod jobs;
mod load;
mod pace;
mod parking;
mod patience;
mod place;
mod settle;
mod wake;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use deadpool_postgres::Pool;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::claim::FastTier;
use crate::config::{self, Config, Effect, Source};
use crate::effect::Effects;
use crate::metrics::Metrics;
use crate::outbox;
use crate::record::Parked;
use crate::tasks::{Beat, Tasks};
use delivery::Deliveries;
use held::Held;
use jobs::{Ended, Jobs};
use parking::Parking;
use patience::Patience;
use wake::Bells;

/// Part of a lease after which an attempt that goes on is held for longer.
const HOLD_AFTER: u32 = 3;
/// How often it is looked for those.
const HOLD_EVERY: Duration = Duration::from_millis(500);
/// Results that wait to be told, beyond which no delivery begins.
const UNTOLD_MAX: usize = 1024;
/// While a stop waits for Postgres to hear the last results.
const FLUSH_PAUSE: Duration = Duration::from_millis(10);

/// What all loops share.
struct Shared {
    jobs: Jobs,
    /// Names this process among those that share a target.
    worker: String,
    held: Held,
    bells: Bells,
    results: mpsc::UnboundedSender<Ended>,
    /// Results that Postgres has not heard of.
    untold: AtomicUsize,
    tier: ArcSwap<FastTier>,
    /// Transactions of effects at once.
    effects_at_once: Semaphore,
    /// The settings in use.
    config: watch::Receiver<Arc<Config>>,
    running: Mutex<BTreeMap<Arc<str>, Running>>,
    turns: Mutex<BTreeMap<Arc<str>, Turn>>,
    metrics: Arc<Metrics>,
    tasks: Tasks,
}

/// A target under the settings in use.
struct TargetNow {
    config: Arc<config::Target>,
    target: Arc<dyn outbox::Target>,
}

/// A source with an effect under the settings in use.
struct SourceNow {
    source: Arc<Source>,
    parked: Parked,
}

/// Held by the loop that delivers to a target.
type Turn = Arc<tokio::sync::Mutex<()>>;
type TargetInUse = Arc<ArcSwap<TargetNow>>;
type SourceInUse = Arc<ArcSwap<SourceNow>>;

/// What a queue's loop needs, under some settings.
enum Now {
    Target(Arc<TargetNow>),
    Source(Arc<SourceNow>),
    /// Nothing is done here.
    Pulled,
}

/// A queue that has a loop.
enum Running {
    Target(TargetInUse, CancellationToken),
    Source(SourceInUse, CancellationToken),
    Pulled,
}

/// Everything that new settings need, made before they are taken up.
pub struct Prepared {
    queues: BTreeMap<Arc<str>, Now>,
    tier: Arc<FastTier>,
}

impl std::fmt::Debug for Prepared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.queues.keys()).finish()
    }
}

/// The names of the queues that somebody takes from under these settings.
#[must_use]
pub fn queues_of(config: &Config) -> BTreeSet<String> {
    let targets = config.targets.keys().map(|name| format!("target:{name}"));
    let sources = config.sources.iter().filter_map(|(name, source)| match source.effect {
        Effect::None => None,
        Effect::Pull => Some(format!("pull:{name}")),
        Effect::Function { .. } | Effect::Rust { .. } => Some(format!("effect:{name}")),
    });
    targets.chain(sources).collect()
}

/// The workers of a gateway.
#[derive(Clone)]
pub struct Workers {
    shared: Arc<Shared>,
    pool: Pool,
    effects: Effects,
}

impl std::fmt::Debug for Workers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Workers").field("queues", &self.shared.queues()).finish_non_exhaustive()
    }
}

impl Workers {
    /// Starts the loops that all queues need; those of queues follow with [`Self::take_up`].
    #[must_use]
    pub fn start(
        pool: Pool,
        config: watch::Receiver<Arc<Config>>,
        tier: Arc<FastTier>,
        effects: &Effects,
        metrics: Arc<Metrics>,
        tasks: &Tasks,
    ) -> Self {
        let (results, told) = mpsc::unbounded_channel();
        let connections = config.borrow().work.connections;
        let shared = Arc::new(Shared {
            jobs: Jobs::new(pool.clone()),
            worker: worker_id(rand::random()),
            held: Held::default(),
            bells: Bells::default(),
            results,
            untold: AtomicUsize::default(),
            tier: ArcSwap::new(tier),
            effects_at_once: Semaphore::new(connections.div_ceil(2)),
            config,
            running: Mutex::default(),
            turns: Mutex::default(),
            metrics,
            tasks: tasks.clone(),
        });
        let told = Arc::new(tokio::sync::Mutex::new((told, Vec::new())));
        let of = |shared: &Arc<Shared>| Arc::clone(shared);
        let all = of(&shared);
        tasks.spawn_loop("results", move |beat| settle::run(of(&all), Arc::clone(&told), beat));
        let all = of(&shared);
        tasks.spawn_loop("leases", move |beat| hold(of(&all), beat));
        let all = of(&shared);
        tasks.spawn_loop("queues", move |beat| wake::look(of(&all), beat));
        let all = of(&shared);
        tasks.spawn_loop("notifications_out", move |beat| wake::tell(of(&all), beat));
        if !shared.config.borrow().postgres.transaction_pooler {
            // Behind one, a session that listens is soon another's.
            let all = of(&shared);
            tasks.spawn_loop("notifications_in", move |beat| wake::listen(of(&all), beat));
        }
        Self { shared, pool, effects: effects.clone() }
    }

    /// Makes what the queues of these settings need; changes nothing.
    ///
    /// # Errors
    /// A target that cannot be made, an effect that this program does not have.
    pub fn prepare(&self, config: &Config, tier: FastTier) -> anyhow::Result<Prepared> {
        let mut queues: BTreeMap<Arc<str>, Now> = BTreeMap::new();
        for (name, target) in &config.targets {
            let now = TargetNow { config: Arc::clone(target), target: outbox::connect(target)? };
            queues.insert(format!("target:{name}").into(), Now::Target(Arc::new(now)));
        }
        for (name, source) in &config.sources {
            match source.effect {
                Effect::None => {}
                Effect::Pull => {
                    queues.insert(format!("pull:{name}").into(), Now::Pulled);
                }
                // Also where it is not to be parked now: it may have been before, or be replayed.
                Effect::Function { .. } | Effect::Rust { .. } => {
                    let parked = Parked::new(self.pool.clone(), &config.postgres, source, &self.effects)?;
                    let now = SourceNow { source: Arc::clone(source), parked };
                    queues.insert(format!("effect:{name}").into(), Now::Source(Arc::new(now)));
                }
            }
        }
        Ok(Prepared { queues, tier: Arc::new(tier) })
    }

    /// From now on works by these settings: loops of queues that are new begin, of those that are gone end, and the others
    /// go on with what is prepared.
    pub fn take_up(&self, prepared: Prepared) {
        self.shared.tier.store(prepared.tier);
        let mut running = self.shared.running();
        running.retain(|queue, running| {
            let stays = prepared.queues.contains_key(queue);
            if let (false, Running::Target(_, cancel) | Running::Source(_, cancel)) = (stays, &*running) {
                cancel.cancel();
            }
            if !stays {
                self.shared.metrics.work.gone(queue);
            }
            stays
        });
        for (queue, now) in prepared.queues {
            match (running.get(&queue), now) {
                (Some(Running::Target(in_use, _)), Now::Target(now)) => in_use.store(now),
                (Some(Running::Source(in_use, _)), Now::Source(now)) => in_use.store(now),
                (_, now) => {
                    let begun = self.begin(&queue, now);
                    running.insert(queue, begun);
                }
            }
        }
    }

    fn begin(&self, queue: &Arc<str>, now: Now) -> Running {
        let (cancel, tasks) = (CancellationToken::new(), &self.shared.tasks);
        let (shared, bell, name) = (Arc::clone(&self.shared), self.shared.bells.of(queue), Arc::clone(queue));
        match now {
            Now::Pulled => Running::Pulled,
            Now::Target(now) => {
                let in_use: TargetInUse = Arc::new(ArcSwap::new(now));
                let (target, turn) = (Arc::clone(&in_use), self.shared.turn(queue));
                drop(tasks.spawn_until(Arc::clone(queue), &cancel, move |beat| {
                    let (shared, queue) = (Arc::clone(&shared), Arc::clone(&name));
                    let deliveries =
                        Deliveries::new(Arc::clone(&shared), Arc::clone(&target), queue, Arc::clone(&bell));
                    let (name, turn) = (Arc::clone(&name), Arc::clone(&turn));
                    async move {
                        tokio::select! {
                            () = beat.cancelled() => return,
                            turn = beat.waiting(turn.lock_owned()) => {
                                deliveries.run(beat.clone()).await;
                                drop(turn);
                            }
                        }
                        shared.flush(&name, &beat).await;
                    }
                }));
                Running::Target(in_use, cancel)
            }
            Now::Source(now) => {
                let in_use: SourceInUse = Arc::new(ArcSwap::new(now));
                let source = Arc::clone(&in_use);
                drop(tasks.spawn_until(Arc::clone(queue), &cancel, move |beat| {
                    let (shared, queue) = (Arc::clone(&shared), Arc::clone(&name));
                    let (source, bell) = (Arc::clone(&source), Arc::clone(&bell));
                    async move {
                        let parking =
                            Parking { shared: Arc::clone(&shared), source, queue: Arc::clone(&queue), bell };
                        parking.run(beat.clone()).await;
                        shared.flush(&queue, &beat).await;
                    }
                }));
                Running::Source(in_use, cancel)
            }
        }
    }

    /// An event was committed that leaves work, or was armed again.
    pub fn announce(&self, source: &Source, event_type: Option<&str>) {
        for job in source.jobs(event_type) {
            self.shared.bells.announce(job.queue);
        }
    }

    /// A parked event's turn is now.
    pub fn announce_parked(&self, source: &Source) {
        self.shared.bells.announce(format!("effect:{}", source.name));
    }
}

impl Shared {
    fn lease(&self) -> Duration {
        self.config.borrow().work.lease
    }

    /// Of the settings in use.
    fn queues(&self) -> Vec<Arc<str>> {
        self.running().keys().cloned().collect()
    }

    fn running(&self) -> MutexGuard<'_, BTreeMap<Arc<str>, Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A target that was taken out of the settings and is put back waits for what is still under way: its bound holds for
    /// both together, and each counts its own only.
    fn turn(&self, queue: &Arc<str>) -> Turn {
        let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(turns.entry(Arc::clone(queue)).or_default())
    }

    /// An attempt ended; Postgres hears of it as soon as it can.
    fn end(&self, ended: Ended) {
        self.untold.fetch_add(1, Ordering::Relaxed);
        // The receiver lives as long as the process; without it the lease runs out.
        drop(self.results.send(ended));
    }

    /// How many deliveries may begin, for their results to be told soon: what was delivered and not told when this process
    /// dies is delivered again.
    fn room_for_results(&self) -> usize {
        UNTOLD_MAX.saturating_sub(self.untold.load(Ordering::Relaxed))
    }

    /// Waits until Postgres has heard of all attempts of the queue. Whoever stops the process bounds it.
    async fn flush(&self, queue: &str, beat: &Beat) {
        while self.held.any_of(queue) {
            beat.alive();
            tokio::time::sleep(FLUSH_PAUSE).await;
        }
    }
}

/// Holds on to what takes long.
async fn hold(shared: Arc<Shared>, beat: Beat) {
    let mut patience = Patience::with("what takes long cannot be held on to");
    loop {
        beat.alive();
        let (lease, asked) = (shared.lease(), Instant::now());
        let old = shared.held.older_than(lease / HOLD_AFTER, asked);
        if !old.is_empty() {
            let held = patience.after(shared.jobs.hold(&old, lease).await, &beat).await;
            for (attempt, mine) in old.iter().zip(held.into_iter().flatten()) {
                // Of one that is locked just now, the next time says more.
                if let Some(mine) = mine {
                    shared.held.renewed(attempt, mine, asked);
                }
            }
        }
        tokio::time::sleep(HOLD_EVERY.min(lease / HOLD_AFTER / 2)).await;
    }
}

/// A random UUID (RFC 9562, version 4).
fn worker_id(random: u128) -> String {
    let bits = (random & !(0xf << 76) & !(0x3 << 62)) | (0x4 << 76) | (0x2 << 62);
    let hex = format!("{bits:032x}");
    let mut text = String::with_capacity(36);
    for (at, char) in hex.char_indices() {
        if [8, 12, 16, 20].contains(&at) {
            text.push('-');
        }
        text.push(char);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_is_named_by_a_uuid() {
        assert_eq!(worker_id(0), "00000000-0000-4000-8000-000000000000");
        assert_eq!(worker_id(u128::MAX), "ffffffff-ffff-4fff-bfff-ffffffffffff");
    }
}
