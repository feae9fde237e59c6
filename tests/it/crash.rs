//! A gateway that is killed loses nothing that it answered, and doubles nothing that is sent again.

use std::cell::RefCell;
use std::collections::{BTreeSet, VecDeque};
use std::rc::Rc;

use anyhow::{Context as _, Result};
use bytes::Bytes;
use rustix::process::Signal;
use tokio::task::LocalSet;

use crate::harness::client::Raw;
use crate::harness::gateway::Gateway;
use crate::harness::play::{Hold, LIMIT, answer, patient, post, ready, request};
use crate::harness::proxy::{Mode, Proxy};
use crate::harness::scene::{Scene, event};
use crate::harness::stores::postgres;
use crate::harness::wait::eventually;

const KILLS: usize = 50;
const IN_FLIGHT: usize = 32;
const SENDERS: usize = 48;

/// What the sender's side knows: it redelivers until it is answered 2xx, as providers do.
#[derive(Debug, Default)]
struct Provider {
    next: usize,
    unanswered: VecDeque<String>,
    answered: BTreeSet<String>,
    /// Written and not yet answered, now.
    in_flight: usize,
    /// Answers since the last start of the gateway.
    answers: usize,
    refused: usize,
    redelivered: usize,
}

type Shared = Rc<RefCell<Provider>>;

impl Provider {
    /// What was not taken before comes first.
    fn pick(&mut self, new: bool) -> Option<String> {
        if let Some(id) = self.unanswered.pop_front() {
            self.redelivered += 1;
            return Some(id);
        }
        new.then(|| {
            self.next += 1;
            format!("evt_{}", self.next)
        })
    }
}

/// Sends one event after the other until the connection ends or there is nothing to send.
async fn send(to: std::net::SocketAddr, provider: Shared, more: &'static str, new: bool) {
    let Ok(mut connection) = Raw::connect(to).await else { return };
    loop {
        let Some(id) = provider.borrow_mut().pick(new) else { return };
        let (bytes, _) = request("stripe", &event(&id, more));
        if connection.write(&bytes).await.is_err() {
            provider.borrow_mut().unanswered.push_back(id);
            return;
        }
        provider.borrow_mut().in_flight += 1;
        let answered = answer(&mut connection).await;
        let mut provider = provider.borrow_mut();
        match answered {
            Ok((status, text)) => {
                provider.in_flight -= 1;
                provider.answers += 1;
                if status.is_success() {
                    provider.answered.insert(id);
                } else {
                    assert!(text.contains("retry-after:"), "{text}");
                    provider.refused += 1;
                    provider.unanswered.push_back(id);
                }
            }
            // Stays counted as in flight: it was, when the gateway died.
            Err(_) => return provider.unanswered.push_back(id),
        }
    }
}

fn run_senders(gateway: &Gateway, provider: &Shared, more: &'static str, new: bool) -> Result<LocalSet> {
    let senders = LocalSet::new();
    let to = gateway.listen()?;
    for _ in 0..SENDERS {
        senders.spawn_local(send(to, Rc::clone(provider), more, new));
    }
    Ok(senders)
}

/// Sends until enough was answered and enough is in flight, then kills; returns how many requests got no answer.
async fn kill_under_load(gateway: &mut Gateway, provider: &Shared, answers: usize) -> Result<usize> {
    let senders = run_senders(gateway, provider, "", true)?;
    let loaded = || {
        let provider = provider.borrow();
        std::future::ready((provider.answers >= answers && provider.in_flight >= IN_FLIGHT).then_some(()))
    };
    senders.run_until(eventually(LIMIT, loaded)).await.context("no load")?;
    gateway.sigkill()?;
    senders.await;
    Ok(std::mem::take(&mut provider.borrow_mut().in_flight))
}

/// Kills while all senders wait for one effect; its transaction goes on without its gateway.
async fn kill_while_held(scene: &Scene, gateway: &mut Gateway, provider: &Shared) -> Result<usize> {
    let hold = Hold::new(scene).await?;
    let senders = run_senders(gateway, provider, r#""do":"wait""#, true)?;
    let all_wait = async {
        let sent = || std::future::ready((provider.borrow().in_flight == SENDERS).then_some(()));
        eventually(LIMIT, sent).await.context("not all are sent")?;
        hold.waiting(1).await
    };
    senders.run_until(all_wait).await?;
    gateway.sigkill()?;
    senders.await;
    hold.release().await?;
    Ok(std::mem::take(&mut provider.borrow_mut().in_flight))
}

#[tokio::test]
async fn fifty_kills_under_load_lose_and_double_nothing() -> Result<()> {
    let scene = Scene::new().await?;
    let settings = patient(&["in_flight.wait = \"20ms\"", "log.requests = \"failed\""]);
    let mut gateway = scene.gateway(&settings).await?;
    let provider = Shared::default();
    let (mut kills, mut lost) = (0, Vec::new());
    // A kill at which too many answers were on their way already does not count.
    for attempt in 0..KILLS * 4 {
        let in_flight = if attempt % 10 == 9 {
            kill_while_held(&scene, &mut gateway, &provider).await?
        } else {
            kill_under_load(&mut gateway, &provider, attempt * 7 % 60).await?
        };
        if in_flight >= IN_FLIGHT {
            kills += 1;
            lost.push(in_flight);
        }
        gateway.restart().await?;
        provider.borrow_mut().answers = 0;
        if kills == KILLS {
            break;
        }
    }
    assert_eq!(kills, KILLS, "{lost:?}");
    let drained = async || -> Option<()> {
        run_senders(&gateway, &provider, "", false).ok()?.await;
        provider.borrow().unanswered.is_empty().then_some(())
    };
    eventually(LIMIT, drained).await.context("something is never taken")?;

    let provider = provider.take();
    let found = scene.assert_once(&provider.answered).await?;
    assert_eq!(provider.answered.len(), provider.next, "all events were taken in the end");
    assert_eq!(found.rows.len(), provider.next, "nobody else's event is there");
    println!(
        "{kills} kills with {} requests in flight ({} to {} each): {} events, {} redeliveries, {} answers to wait; \
         {} effects",
        lost.iter().sum::<usize>(),
        lost.iter().min().context("no kill")?,
        lost.iter().max().context("no kill")?,
        provider.next,
        provider.redelivered,
        provider.refused,
        found.effects.len(),
    );
    Ok(())
}

#[tokio::test]
async fn events_of_a_killed_gateway_are_taken_by_another_while_its_leases_stand() -> Result<()> {
    let scene = Scene::new().await?;
    let proxy = Proxy::start(postgres().address())?;
    let behind = postgres().url_at(proxy.address(), &scene.stores.database);
    let behind = format!("postgres.url = \"{behind}\"");
    let mut doomed = scene.gateway(&patient(&[&behind])).await?;
    let other = scene.gateway(&patient(&["in_flight.wait = \"50ms\""])).await?;
    ready(&doomed).await?;
    ready(&other).await?;

    // Claimed in Redis, on the way to Postgres, never there.
    proxy.set(Mode::Blackhole);
    let bodies: Vec<Bytes> = (0..IN_FLIGHT).map(|n| event(&format!("evt_{n}"), "")).collect();
    let mut connections = Vec::new();
    for body in &bodies {
        let mut connection = Raw::connect(doomed.listen()?).await?;
        connection.write(&request("stripe", body).0).await?;
        connections.push(connection);
    }
    let leased = async || {
        let markers = scene.markers().await.ok()?;
        let leases = markers.values().flatten().filter(|value| value.starts_with("L ")).count();
        (leases == IN_FLIGHT).then_some(())
    };
    eventually(LIMIT, leased).await.context("not all are claimed")?;
    assert!(connections.iter().all(|connection| !connection.has_come()), "nothing is answered yet");
    doomed.signal(Signal::KILL)?;
    doomed.wait(LIMIT).await?;
    eventually(LIMIT, leased).await.context("the leases are gone with their gateway")?;

    let mut client = other.client()?;
    for body in &bodies {
        let answer = post(&mut client, "stripe", body).await?;
        assert_eq!((answer.status.as_u16(), answer.header("hapax-outcome")), (200, Some("accepted")));
    }
    let found = scene.assert_once(&(0..IN_FLIGHT).map(|n| format!("evt_{n}")).collect::<Vec<_>>()).await?;
    assert_eq!(found.rows.len(), IN_FLIGHT);
    Ok(())
}
