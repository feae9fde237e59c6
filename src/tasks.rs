//! The tasks of a gateway: counted, so that stopping can wait for them, and never silently dead.

use std::future::Future;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::error;

/// Handle to this process' tasks; clones share them.
#[derive(Debug, Clone, Default)]
pub struct Tasks {
    /// Work that a stop waits for.
    tracked: TaskTracker,
    /// The process is about to stop: loops may end.
    stopping: CancellationToken,
    /// Ends the background loops.
    stop: CancellationToken,
    /// Raised when a background loop ended by itself: the process cannot do its work any more.
    broken: CancellationToken,
}

impl Tasks {
    /// Runs work that nobody may cancel, and that a stop waits for.
    pub fn spawn<F>(&self, work: F) -> JoinHandle<F::Output>
    where
        F: Future<Output: Send + 'static> + Send + 'static,
    {
        self.tracked.spawn(work)
    }

    /// Runs a loop that must live as long as the process. If it ends or panics, the process stops: half a gateway
    /// that looks alive is worse than a restart.
    pub fn spawn_loop<F>(&self, name: &'static str, work: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.supervise(name, false, work);
    }

    /// Runs a loop that ends when nobody needs it any more. If it panics, the process stops.
    pub fn spawn_while_needed<F>(&self, name: &'static str, work: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.supervise(name, true, work);
    }

    fn supervise<F>(&self, name: &'static str, may_end: bool, work: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let (stop, stopping, broken) = (self.stop.clone(), self.stopping.clone(), self.broken.clone());
        let work = tokio::spawn(work);
        drop(tokio::spawn(async move {
            let abort = work.abort_handle();
            tokio::select! {
                () = stop.cancelled() => abort.abort(),
                ended = work => if ended.is_err() || !(may_end || stopping.is_cancelled()) {
                    error!(task = name, error = ?ended.err(), "a background loop ended; the process stops");
                    broken.cancel();
                }
            }
        }));
    }

    /// Runs a listener: work that a stop waits for, and that ends by itself then. If it panics, the process stops.
    pub fn spawn_listener<F>(&self, name: &'static str, work: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let broken = self.broken.clone();
        drop(self.tracked.spawn(async move {
            if let Err(panic) = tokio::spawn(work).await {
                error!(task = name, error = %panic, "a listener ended; the process stops");
                broken.cancel();
            }
        }));
    }

    /// Completes when a background loop has ended by itself.
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
}
