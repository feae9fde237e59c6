//! Senders that go on and on while a test does something to the stores, and the gateway's own numbers.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use bytes::Bytes;
use tokio::task::JoinHandle;

use super::client::Client;
use super::gateway::Gateway;
use super::scene::{Answer, deliver, deliver_on, event};
use super::wait::eventually;

/// Longer than anything that is waited for may take on a busy machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// One delivery and its answer.
#[derive(Debug)]
pub(crate) struct Sent {
    pub(crate) id: String,
    pub(crate) answer: Answer,
    pub(crate) took: Duration,
}

/// Pairs of senders. Both of a pair send the same events one after the other, so that each event comes twice: at the
/// same time, or some time later.
pub(crate) struct Load {
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicUsize>,
    senders: Vec<JoinHandle<Result<Vec<Sent>>>>,
}

impl Load {
    pub(crate) fn start(to: SocketAddr, source: &'static str, pairs: usize) -> Self {
        let (stop, answered) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
        let senders = (0..2 * pairs).map(|sender| {
            let (stop, answered) = (Arc::clone(&stop), Arc::clone(&answered));
            tokio::spawn(async move {
                let (mut client, mut sent) = (Client::new(to), Vec::new());
                while !stop.load(Ordering::Relaxed) {
                    let id = format!("evt_{}_{}", sender / 2, sent.len());
                    let started = Instant::now();
                    let answer = deliver_on(&mut client, source, &event(&id, "")).await?;
                    sent.push(Sent { id, answer, took: started.elapsed() });
                    answered.fetch_add(1, Ordering::Relaxed);
                }
                Ok(sent)
            })
        });
        let senders = senders.collect();
        Self { stop, answered, senders }
    }

    /// Waits until so many more deliveries are answered.
    pub(crate) async fn go_on(&self, deliveries: usize) -> Result<()> {
        let enough = self.answered.load(Ordering::Relaxed) + deliveries;
        let reached = || std::future::ready((self.answered.load(Ordering::Relaxed) >= enough).then_some(()));
        eventually(LIMIT, reached).await.context("the senders do not get on")
    }

    /// Lets each sender end its delivery; returns all of them.
    pub(crate) async fn finish(self) -> Result<Vec<Sent>> {
        self.stop.store(true, Ordering::Relaxed);
        let mut all = Vec::new();
        for sender in self.senders {
            all.extend(sender.await??);
        }
        Ok(all)
    }
}

/// The ids that were answered 2xx at least once.
pub(crate) fn acknowledged(sent: &[Sent]) -> BTreeSet<String> {
    sent.iter().filter(|sent| sent.answer.is_success()).map(|sent| sent.id.clone()).collect()
}

/// Delivers all at the same time, each on a connection of its own; the answers are in order.
pub(crate) async fn burst(to: SocketAddr, source: &str, bodies: Vec<Bytes>) -> Result<Vec<Answer>> {
    let mut deliveries = Vec::new();
    for body in bodies {
        let source = source.to_owned();
        deliveries.push(tokio::spawn(async move { deliver(to, &source, &body).await }));
    }
    let mut answers = Vec::new();
    for delivery in deliveries {
        answers.push(delivery.await??);
    }
    Ok(answers)
}

/// A metric's value without its fraction, summed over its samples with this label (`trouble="timeout"`; empty for all).
pub(crate) async fn metric(gateway: &Gateway, name: &str, label: &str) -> Result<i64> {
    let answer = Client::new(gateway.admin()?).get("/metrics").await?;
    let text = std::str::from_utf8(&answer.body)?;
    let samples = text.lines().filter_map(|line| line.rsplit_once(' '));
    let of_it = samples.filter(|(sample, _)| {
        let (found, labels) = sample.split_once('{').unwrap_or((sample, ""));
        found == name && labels.contains(label)
    });
    let whole = |value: &str| value.split(['.', 'e']).next().and_then(|whole| whole.parse::<i64>().ok());
    of_it.map(|(_, value)| whole(value).with_context(|| value.to_owned())).sum()
}

/// Waits until a metric is as wanted.
pub(crate) async fn until_metric(
    gateway: &Gateway,
    name: &str,
    label: &str,
    wanted: impl Fn(i64) -> bool,
) -> Result<()> {
    let probe = async || metric(gateway, name, label).await.ok().filter(|value| wanted(*value)).map(drop);
    eventually(LIMIT, probe).await.with_context(|| format!("{name}{{{label}}} stays as it is"))
}

/// Waits until Redis is in the path, or out of it.
pub(crate) async fn until_redis_in_use(gateway: &Gateway, in_use: bool) -> Result<()> {
    until_metric(gateway, "hapax_redis_in_use", "", |value| (value == 1) == in_use).await
}
