//! The load generator: closed loop, one thread, requests made ready beforehand.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use hdrhistogram::Histogram;
use mio::{Events, Poll, Token};
use serde::{Deserialize, Serialize};

use super::connection::Connection;
use super::numbers::micros;
use super::plan::Mix;
use super::processes;
use super::traffic::Traffic;

/// A server that is silent for so long is broken.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// What to send, how, for how long.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Spec {
    pub(crate) to: SocketAddr,
    pub(crate) mix: Mix,
    pub(crate) connections: usize,
    pub(crate) body_bytes: usize,
    /// Different in each run, so that ids are.
    pub(crate) run: u64,
    /// Events to sign; when they are used up, the run ends early.
    pub(crate) events: usize,
    pub(crate) warm_up: Duration,
    pub(crate) time: Duration,
}

/// What came of it.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Report {
    /// The time after the warm-up.
    pub(crate) time: Duration,
    /// Answers in that time.
    pub(crate) answered: u64,
    pub(crate) p50_us: u64,
    pub(crate) p99_us: u64,
    pub(crate) max_us: u64,
    /// All answers, warm-up included, by status.
    pub(crate) statuses: BTreeMap<u16, u64>,
    /// Different events that were sent.
    pub(crate) events_sent: u64,
    /// Those of them that were answered 2xx.
    pub(crate) events_safe: u64,
    /// What this process used from the first request to the last answer.
    pub(crate) cpu_us: u64,
}

impl Report {
    /// All answers, warm-up included.
    pub(crate) fn total(&self) -> u64 {
        self.statuses.values().sum()
    }
}

/// Runs the load to its end.
pub(crate) fn run(spec: &Spec) -> Result<Report> {
    let traffic = Traffic::sign(spec.mix, spec.run, spec.events, spec.body_bytes);
    let mut poll = Poll::new()?;
    let open = |token| Connection::open(spec.to, poll.registry(), Token(token), traffic.template());
    let connections = (0..spec.connections).map(open).collect::<Result<Vec<_>>>()?;
    let cpu_before = processes::own_cpu()?;
    let mut report = Run::new(spec, traffic)?.drive(&mut poll, connections)?;
    report.cpu_us = micros(processes::own_cpu()?.saturating_sub(cpu_before));
    Ok(report)
}

struct Run {
    traffic: Traffic,
    latencies: Histogram<u32>,
    seen: Vec<Seen>,
    statuses: BTreeMap<u16, u64>,
    answered: u64,
    measured_from: Instant,
    until: Instant,
    under_way: usize,
}

/// What is known of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Seen {
    No,
    Sent,
    Safe,
}

impl Run {
    fn new(spec: &Spec, traffic: Traffic) -> Result<Self> {
        let measured_from = Instant::now() + spec.warm_up;
        Ok(Self {
            traffic,
            latencies: Histogram::new(3)?,
            seen: vec![Seen::No; spec.events],
            statuses: BTreeMap::new(),
            answered: 0,
            measured_from,
            until: measured_from + spec.time,
            under_way: 0,
        })
    }

    fn drive(mut self, poll: &mut Poll, mut connections: Vec<Connection>) -> Result<Report> {
        for connection in &mut connections {
            self.send(connection, Instant::now())?;
        }
        let mut events = Events::with_capacity(connections.len());
        while self.under_way > 0 {
            poll.poll(&mut events, Some(SILENCE_MAX))?;
            if events.is_empty() {
                bail!("no answer within {SILENCE_MAX:?}");
            }
            for event in &events {
                let connection = connections.get_mut(event.token().0).context("an unknown connection")?;
                if let Some(status) = connection.advance()? {
                    self.answer(connection, status)?;
                }
            }
        }
        Ok(self.report())
    }

    fn send(&mut self, connection: &mut Connection, now: Instant) -> Result<()> {
        let Some(event) = self.traffic.next(&mut connection.request) else {
            self.until = self.until.min(now);
            return Ok(());
        };
        if let Some(seen @ Seen::No) = self.seen.get_mut(event) {
            *seen = Seen::Sent;
        }
        self.under_way += 1;
        connection.send(event, now)
    }

    fn answer(&mut self, connection: &mut Connection, status: u16) -> Result<()> {
        let now = Instant::now();
        self.under_way -= 1;
        *self.statuses.entry(status).or_default() += 1;
        if let Some(seen) = self.seen.get_mut(connection.event).filter(|_| (200..300).contains(&status)) {
            *seen = Seen::Safe;
        }
        if now >= self.until {
            return Ok(());
        }
        if now >= self.measured_from {
            self.answered += 1;
            self.latencies.record(micros(now - connection.started))?;
        }
        self.send(connection, now)
    }

    fn report(self) -> Report {
        let count = |wanted: &[Seen]| self.seen.iter().filter(|seen| wanted.contains(seen)).count() as u64;
        Report {
            time: self.until.saturating_duration_since(self.measured_from),
            answered: self.answered,
            p50_us: self.latencies.value_at_quantile(0.5),
            p99_us: self.latencies.value_at_quantile(0.99),
            max_us: self.latencies.max(),
            events_sent: count(&[Seen::Sent, Seen::Safe]),
            events_safe: count(&[Seen::Safe]),
            statuses: self.statuses,
            cpu_us: 0,
        }
    }
}
