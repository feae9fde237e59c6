//! Providers that send their events until each is answered 2xx.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use anyhow::Result;
use rand::Rng as _;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::gateways::Addresses;
use crate::harness::client::Client;
use crate::harness::scene::{deliver_on, event};

const SENDERS: usize = 24;
const PAUSE: Duration = Duration::from_millis(50);

/// An event to be sent: where to, its id, and more of its body.
#[derive(Debug, Clone)]
pub(crate) struct Sending {
    pub(crate) source: &'static str,
    pub(crate) id: String,
    pub(crate) more: &'static str,
}

/// Events as they are sent; how many were answered, and how many deliveries that took.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sent {
    pub(crate) accepted: Arc<AtomicUsize>,
    pub(crate) deliveries: Arc<AtomicUsize>,
}

/// Sends all, in order on the whole.
pub(crate) async fn send(events: Arc<Vec<Sending>>, to: Addresses, sent: Sent) -> Result<()> {
    let next = Arc::<AtomicUsize>::default();
    let mut senders = JoinSet::new();
    for _ in 0..SENDERS {
        let (events, to, next, sent) =
            (Arc::clone(&events), Arc::clone(&to), Arc::clone(&next), sent.clone());
        senders.spawn(async move {
            let mut client = None;
            while let Some(sending) = events.get(next.fetch_add(1, Ordering::Relaxed)) {
                until_accepted(sending, &to, &sent, &mut client).await?;
            }
            anyhow::Ok(())
        });
    }
    while let Some(ended) = senders.join_next().await {
        ended??;
    }
    Ok(())
}

/// Goes on with a few others until it is told to stop; how many.
///
/// A target that answers nothing but 500 is left alone, so that poison by itself would die slowly.
pub(crate) async fn trickle(to: Addresses, sent: Sent, stop: CancellationToken) -> Result<usize> {
    let (mut count, mut client) = (0, None);
    while !stop.is_cancelled() {
        let sending = Sending { source: "plain", id: format!("evt_late_{count}"), more: "" };
        until_accepted(&sending, &to, &sent, &mut client).await?;
        count += 1;
        tokio::time::sleep(PAUSE / 5).await;
    }
    Ok(count)
}

async fn until_accepted(
    sending: &Sending,
    to: &Addresses,
    sent: &Sent,
    client: &mut Option<Client>,
) -> Result<()> {
    let body = event(&sending.id, sending.more);
    loop {
        let address = {
            let addresses = to.lock().unwrap_or_else(PoisonError::into_inner);
            let at = rand::rng().random_range(0..addresses.len());
            addresses.get(at).copied().flatten()
        };
        let connection = match (client.as_mut(), address) {
            (Some(client), _) => client,
            (None, Some(address)) => client.insert(Client::new(address)),
            (None, None) => {
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        sent.deliveries.fetch_add(1, Ordering::Relaxed);
        match deliver_on(connection, sending.source, &body).await {
            Ok(answer) if answer.is_success() => {
                sent.accepted.fetch_add(1, Ordering::Relaxed);
                return Ok(());
            }
            Ok(answer) => anyhow::ensure!(answer.status != 401, "{answer:?}"),
            Err(_) => *client = None,
        }
        tokio::time::sleep(PAUSE).await;
    }
}
