//! The gateways: processes that are killed and started again, all the time.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::harness::gateway::{Gateway, Start};
use crate::harness::play::Numbers;

/// Where those that run listen.
pub(crate) type Addresses = Arc<Mutex<Vec<Option<SocketAddr>>>>;

/// What was seen of all processes that ran.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) kills: usize,
    /// Just before each kill, in order: the memory in use, in KiB.
    pub(crate) memory: Vec<u64>,
    /// Counters, summed over all processes.
    pub(crate) counters: BTreeMap<String, f64>,
}

pub(crate) struct Gateways {
    pub(crate) addresses: Addresses,
    stop: CancellationToken,
    killer: JoinHandle<Result<(Vec<Gateway>, Seen)>>,
}

impl Gateways {
    /// Starts so many; kills one of them each time that `every` is over, on the whole.
    pub(crate) async fn start(settings: &str, count: usize, every: Duration, seed: u64) -> Result<Self> {
        let mut gateways = Vec::new();
        for _ in 0..count {
            gateways.push(Start::new(settings).start().await?);
        }
        let listening = gateways.iter().map(|gateway| gateway.listen().ok()).collect();
        let addresses: Addresses = Arc::new(Mutex::new(listening));
        let stop = CancellationToken::new();
        let killer = tokio::spawn(kill(gateways, Arc::clone(&addresses), every, seed, stop.clone()));
        Ok(Self { addresses, stop, killer })
    }

    /// No more are killed. They run on until they are dropped.
    pub(crate) async fn leave_alone(self) -> Result<(Vec<Gateway>, Seen)> {
        self.stop.cancel();
        self.killer.await?
    }

    pub(crate) fn check(&self) -> bool {
        !self.killer.is_finished()
    }
}

async fn kill(
    mut gateways: Vec<Gateway>,
    addresses: Addresses,
    every: Duration,
    seed: u64,
    stop: CancellationToken,
) -> Result<(Vec<Gateway>, Seen)> {
    let (mut luck, mut of_all) = (StdRng::seed_from_u64(seed), Seen::default());
    let set = |at: usize, address| {
        if let Some(known) = addresses.lock().unwrap_or_else(PoisonError::into_inner).get_mut(at) {
            *known = address;
        }
    };
    loop {
        tokio::select! {
            () = stop.cancelled() => return Ok((gateways, of_all)),
            () = tokio::time::sleep(every.mul_f64(luck.random_range(0.5..1.5))) => {}
        }
        let at = luck.random_range(0..gateways.len());
        let gateway = gateways.get_mut(at).context("a gateway")?;
        look(gateway, &mut of_all).await?;
        set(at, None);
        gateway.sigkill()?;
        of_all.kills += 1;
        gateway.restart().await?;
        set(at, Some(gateway.listen()?));
    }
}

/// Takes down what a gateway says of itself.
pub(crate) async fn look(gateway: &Gateway, seen: &mut Seen) -> Result<()> {
    let Numbers(text) = Numbers::of(gateway).await?;
    for line in text.lines() {
        let Some((sample, value)) = line.rsplit_once(' ') else { continue };
        let wanted = ["hapax_attempts_total", "hapax_leases_lost_total", "hapax_loop_failures_total"];
        if wanted.iter().any(|name| sample.starts_with(name)) {
            *seen.counters.entry(sample.to_owned()).or_default() += value.parse::<f64>()?;
        }
    }
    let config = gateway.config();
    let status = status_of(&config.display().to_string()).context("no such process")?;
    let memory = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.strip_suffix("kB"));
    seen.memory.push(memory.context("VmRSS")?.trim().parse()?);
    Ok(())
}

/// What `/proc` says of the process that has this on its command line.
fn status_of(argument: &str) -> Option<String> {
    let mut processes = std::fs::read_dir("/proc").ok()?.flatten();
    processes.find_map(|process| {
        let line = std::fs::read(process.path().join("cmdline")).ok()?;
        let is_it = line.split(|byte| *byte == 0).any(|part| part == argument.as_bytes());
        is_it.then(|| std::fs::read_to_string(process.path().join("status")).ok())?
    })
}
