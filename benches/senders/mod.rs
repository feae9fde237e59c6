//! Senders of new events in a closed loop, for the benches that compare loads on the gateway alone.

use std::io::Write as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use tokio::task::JoinSet;

use crate::harness::client::Client;
use crate::harness::scene::deliver_on;

/// Senders that send new events to a source until they are dropped or finished.
pub(crate) struct Senders {
    answered: Arc<AtomicU64>,
    accepted: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    tasks: JoinSet<Result<()>>,
}

/// Deliveries so far.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Counts {
    pub(crate) answered: u64,
    /// Those of them that were answered 2xx.
    pub(crate) accepted: u64,
}

impl Senders {
    /// Starts so many; `body` makes an event of the numbers of sender and event, and each must be answered with one of
    /// `statuses`.
    pub(crate) fn start(
        to: SocketAddr,
        source: &'static str,
        count: usize,
        statuses: &'static [u16],
        body: impl Fn(usize, u64) -> Bytes + Clone + Send + 'static,
    ) -> Self {
        let (answered, accepted) = (Arc::<AtomicU64>::default(), Arc::<AtomicU64>::default());
        let (stop, mut tasks) = (Arc::<AtomicBool>::default(), JoinSet::new());
        for sender in 0..count {
            let (answered, accepted) = (Arc::clone(&answered), Arc::clone(&accepted));
            let (stop, body) = (Arc::clone(&stop), body.clone());
            tasks.spawn(async move {
                let mut client = Client::new(to);
                for number in 0_u64.. {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let answer = deliver_on(&mut client, source, &body(sender, number)).await?;
                    ensure!(statuses.contains(&answer.status), "{source}: {answer:?}");
                    answered.fetch_add(1, Ordering::Relaxed);
                    accepted.fetch_add(u64::from(answer.is_success()), Ordering::Relaxed);
                }
                Ok(())
            });
        }
        Self { answered, accepted, stop, tasks }
    }

    pub(crate) fn counts(&self) -> Counts {
        Counts {
            answered: self.answered.load(Ordering::Relaxed),
            accepted: self.accepted.load(Ordering::Relaxed),
        }
    }

    /// Whether all are still sending.
    pub(crate) fn check(&mut self) -> Result<()> {
        self.tasks.try_join_next().map_or(Ok(()), |ended| ended?)
    }

    /// Lets each end its delivery.
    pub(crate) async fn finish(mut self) -> Result<Counts> {
        self.stop.store(true, Ordering::Relaxed);
        while let Some(ended) = self.tasks.join_next().await {
            ended??;
        }
        Ok(self.counts())
    }
}

/// Answers 2xx per second of all senders together, after a warm-up of a quarter of the time.
pub(crate) async fn rate(senders: &mut [Senders], time: Duration) -> Result<f64> {
    let accepted = |senders: &[Senders]| senders.iter().map(|senders| senders.counts().accepted).sum::<u64>();
    tokio::time::sleep(time / 4).await;
    let (before, started) = (accepted(senders), Instant::now());
    tokio::time::sleep(time).await;
    let events = u32::try_from(accepted(senders) - before)?;
    let rate = f64::from(events) / started.elapsed().as_secs_f64();
    senders.iter_mut().try_for_each(Senders::check)?;
    Ok(rate)
}

/// Sorts them; the one in the middle.
pub(crate) fn median(numbers: &mut [f64]) -> Result<f64> {
    numbers.sort_by(f64::total_cmp);
    let middle = |at: usize| numbers.get(at).copied().context("no rounds");
    // Of an even number of rounds, the two in the middle.
    let (low, high) = (numbers.len().saturating_sub(1) / 2, numbers.len() / 2);
    Ok(f64::midpoint(middle(low)?, middle(high)?))
}

pub(crate) fn say(text: &str) -> Result<()> {
    Ok(writeln!(std::io::stdout(), "{text}")?)
}
