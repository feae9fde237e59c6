//! Who is told that there is something to do: the loops of this process at once, those of others by a notification.
//!
//! Invariant: a notification only makes things quick. What is due is found by looking, which never stops, whatever became
//! of a notification or of who listens.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tokio::time::sleep;

use super::Shared;
use super::jobs::JobsError;
use super::patience::Patience;
use super::place::Place;
use crate::db;
use crate::tasks::Beat;

/// The channel on which gateways, and whoever pulls events, are told the names of queues.
const CHANNEL: &str = "hapax_work";
/// Others are told this often at most.
const TELL_EVERY: Duration = Duration::from_millis(50);
/// Jobs of a queue that are counted at most, when the whole is looked at.
const COUNT_MAX: i64 = 10_000;
/// Dead jobs that are buried in one look.
const SWEEP: i32 = 200;

/// One bell for each queue, for as long as the process lives.
#[derive(Debug, Default)]
pub(super) struct Bells {
    of_queues: Mutex<HashMap<Arc<str>, Arc<Notify>>>,
    /// Queues of which others are to be told.
    untold: Mutex<BTreeSet<String>>,
    tell: Notify,
    /// Something may have been missed.
    look: Notify,
}

impl Bells {
    pub(super) fn of(&self, queue: &Arc<str>) -> Arc<Notify> {
        Arc::clone(lock(&self.of_queues).entry(Arc::clone(queue)).or_default())
    }

    /// Wakes this process' loop.
    pub(super) fn ring(&self, queue: &str) {
        let bell = lock(&self.of_queues).get(queue).cloned();
        if let Some(bell) = bell {
            bell.notify_one();
        }
    }

    /// Wakes this process' loop, and soon those of others.
    pub(super) fn announce(&self, queue: String) {
        self.ring(&queue);
        if lock(&self.untold).insert(queue) {
            self.tell.notify_one();
        }
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Tells others what was announced. After the commit and outside of it: a NOTIFY in the transaction serialises all commits.
pub(super) async fn tell(shared: Arc<Shared>, beat: Beat) {
    let mut patience = Patience::with("others cannot be told of new work");
    loop {
        beat.alive();
        beat.waiting(shared.bells.tell.notified()).await;
        let queues: Vec<String> = std::mem::take(&mut *lock(&shared.bells.untold)).into_iter().collect();
        // What is not told is found by looking.
        patience.after(shared.jobs.notify(&queues).await, &beat).await;
        sleep(TELL_EVERY).await;
    }
}

/// Hears what others announce.
pub(super) async fn listen(shared: Arc<Shared>, beat: Beat) {
    let mut patience = Patience::with("others cannot be heard");
    loop {
        beat.alive();
        let settings = shared.config.borrow().postgres.clone();
        let ended = match db::listen(&settings, CHANNEL).await {
            Ok((_session, mut heard)) => {
                patience.succeeded();
                // What was said before is lost.
                shared.bells.look.notify_one();
                while let Some(queue) = beat.waiting(heard.recv()).await {
                    beat.alive();
                    shared.bells.ring(&queue);
                }
                anyhow::anyhow!("the connection has ended")
            }
            Err(error) => error,
        };
        patience.after(Err::<(), _>(ended), &beat).await;
    }
}

/// Looks at all queues, again and again; also for whoever scrapes metrics.
pub(super) async fn look(shared: Arc<Shared>, beat: Beat) {
    let mut patience = Patience::with("queues cannot be looked at");
    let mut places: HashMap<Arc<str>, Place> = HashMap::new();
    loop {
        beat.alive();
        let queues = shared.queues();
        if !queues.is_empty() {
            places.retain(|queue, _| queues.contains(queue));
            patience.after(look_once(&shared, &queues, &mut places).await, &beat).await;
        }
        let poll = shared.config.borrow().work.poll;
        tokio::select! {
            () = beat.waiting(sleep(poll)) => {}
            () = shared.bells.look.notified() => {}
        }
    }
}

async fn look_once(
    shared: &Shared,
    queues: &[Arc<str>],
    places: &mut HashMap<Arc<str>, Place>,
) -> Result<(), JobsError> {
    let now = Instant::now();
    let since: Vec<_> =
        queues.iter().map(|queue| places.entry(Arc::clone(queue)).or_default().begin(now)).collect();
    let whole = since.iter().any(Option::is_none);
    let seen = shared.jobs.look(queues, &since, if whole { COUNT_MAX } else { 0 }).await?;
    for seen in &seen {
        let Some(queue) = queues.iter().find(|queue| ***queue == *seen.queue) else { continue };
        if let Some(place) = places.get_mut(queue) {
            place.found(seen.first_due, false, seen.now, Instant::now());
        }
        let lag = seen.first_due.map_or(Duration::ZERO, |due| seen.now.duration_since(due).unsigned_abs());
        shared.metrics.work.looked(queue, whole.then_some(seen.waiting), lag);
        if seen.first_due.is_some() {
            shared.bells.ring(queue);
        }
    }
    if whole {
        // Among what is due and was not taken may be what nobody may take any more.
        for seen in seen.iter().filter(|seen| seen.first_due.is_some()) {
            let buried = shared.jobs.sweep(&seen.queue, SWEEP).await?;
            shared.buried(&seen.queue.as_str().into(), &buried, None);
        }
    }
    Ok(())
}
