//! Runs everything in turn, round after round, and counts the effects after each run.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde::Serialize;

use super::machine::{self, Machine};
use super::numbers::{micros, per, rate};
use super::plan::{Case, Mix, Server, Workload};
use super::role::Role;
use super::scene::{Running, Scene};
use super::{batches, load, processes, report};

/// How often and how long.
#[derive(Debug, Clone)]
pub(crate) struct Timing {
    pub(crate) rounds: u32,
    pub(crate) run: Duration,
    pub(crate) warm_up: Duration,
    /// Only to see that every part works.
    pub(crate) smoke: bool,
}

/// Where the stores are, and how many connections to Postgres each receiver has.
#[derive(Debug, Clone)]
pub(crate) struct StoresWanted {
    pub(crate) folder: Option<PathBuf>,
    pub(crate) connections: usize,
}

/// One server under one workload, once. All but rate and latency include the warm-up.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Run {
    pub(crate) round: u32,
    pub(crate) workload: &'static str,
    pub(crate) server: Server,
    pub(crate) requests_per_second: f64,
    pub(crate) load: load::Report,
    pub(crate) cpu: Cpu,
    pub(crate) transactions_per_request: f64,
    pub(crate) wal_bytes_per_request: f64,
    pub(crate) redis_commands_per_request: f64,
    pub(crate) effects: Option<u64>,
}

/// Processor time per request in microseconds, by process.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Cpu {
    pub(crate) server: f64,
    pub(crate) postgres: f64,
    pub(crate) redis: f64,
    pub(crate) load: f64,
}

impl Cpu {
    /// Of everything that a receiver needs: the load generator is no part of it.
    pub(crate) fn receiver(self) -> f64 {
        self.server + self.postgres + self.redis
    }
}

/// Measures all cases and reports them.
pub(crate) async fn all(cases: &[Case], timing: &Timing, stores: StoresWanted) -> Result<()> {
    ensure!(!cases.is_empty(), "no such workload");
    machine::check_folder(&stores.folder.clone().unwrap_or_else(std::env::temp_dir))?;
    machine::check_open_files(cases.iter().map(|case| case.workload.connections).max().unwrap_or(0))?;
    let mut scene = Scene::start(stores.folder, stores.connections).await?;
    let machine = Machine::look(&scene).await?;
    report::say(&machine.text())?;
    let mut runs = Vec::new();
    for round in 1..=timing.rounds {
        report::say(&format!("round {round} of {}", timing.rounds))?;
        for case in cases {
            for server in order(&case.servers, round) {
                let number = runs.len() as u64;
                let run = one(&mut scene, timing, &case.workload, server, (round, number)).await?;
                report::progress(&run)?;
                runs.push(run);
            }
        }
    }
    report::write(&machine, timing, cases, &runs)
}

/// Every other round backwards, so that nobody always follows the same neighbour.
fn order(servers: &[Server], round: u32) -> Vec<Server> {
    let mut servers = servers.to_vec();
    if round.is_multiple_of(2) {
        servers.reverse();
    }
    servers
}

async fn one(
    scene: &mut Scene,
    timing: &Timing,
    workload: &Workload,
    server: Server,
    (round, number): (u32, u64),
) -> Result<Run> {
    scene.reset().await?;
    let before = scene.counters().await?;
    let running = scene.serve(server)?;
    let cpu_before = CpuTimes::take(scene, running.as_ref())?;
    let role = role(scene, timing, workload, server, (running.as_ref(), number))?;
    let load = role
        .run_for_report(scene.tag())
        .with_context(|| format!("{} under {}", server.name(), workload.name))?;
    let cpu = CpuTimes::take(scene, running.as_ref())?.since(cpu_before);
    let complaints = running.as_ref().map(Running::complaints).unwrap_or_default();
    drop(running);
    scene.wait_for_sessions_to_end().await?;
    let after = scene.counters().await?;
    let effects = check_effects(scene, server, &load)
        .await
        .with_context(|| format!("{} under {}; {complaints}", server.name(), workload.name))?;
    let total = load.total();
    Ok(Run {
        round,
        workload: workload.name,
        server,
        requests_per_second: rate(load.answered, load.time),
        cpu: cpu.per_request(&load, server),
        transactions_per_request: per(after.transactions.saturating_sub(before.transactions), total),
        wal_bytes_per_request: per(after.wal_bytes.saturating_sub(before.wal_bytes), total),
        redis_commands_per_request: per(after.redis_commands - before.redis_commands, total),
        load,
        effects,
    })
}

fn role(
    scene: &Scene,
    timing: &Timing,
    workload: &Workload,
    server: Server,
    (running, run): (Option<&Running>, u64),
) -> Result<Role> {
    let &Workload { mix, connections, body_bytes, .. } = workload;
    let (warm_up, time) = (timing.warm_up, timing.run);
    let Some(running) = running else {
        let postgres = scene.stores.postgres.url(super::scene::HAPAX);
        return Ok(Role::Batches(batches::Spec { postgres, body_bytes, run, warm_up, time }));
    };
    let requests = usize::try_from((warm_up + time).as_millis())? * server.rate_max() / 1000;
    let events = match mix {
        // The wire alone limits large bodies.
        Mix::New => requests / (body_bytes >> 13).max(1),
        Mix::TenTimes | Mix::Mismatch => requests / 5,
        Mix::Hot => 1,
    };
    let to = running.listen;
    Ok(Role::Load(load::Spec { to, mix, connections, body_bytes, run, events, warm_up, time }))
}

/// The promise: everything that was answered 2xx took effect, once.
async fn check_effects(scene: &Scene, server: Server, load: &load::Report) -> Result<Option<u64>> {
    if !server.stores() {
        return Ok(None);
    }
    let effects = scene.effects(server).await?;
    let (safe, sent) = (load.events_safe, load.events_sent);
    ensure!(
        effects.rows == safe && effects.events == safe,
        "{safe} of {sent} events were answered 2xx, but {} took effect, in {} rows; answers {:?}",
        effects.events,
        effects.rows,
        load.statuses
    );
    Ok(Some(effects.rows))
}

#[derive(Debug, Clone, Copy)]
struct CpuTimes {
    server: Duration,
    postgres: Duration,
    redis: Duration,
}

impl CpuTimes {
    fn take(scene: &Scene, running: Option<&Running>) -> Result<Self> {
        let of = |pid: Option<u32>| pid.map_or(Ok(Duration::ZERO), processes::cpu);
        Ok(Self {
            server: of(running.map(Running::pid))?,
            postgres: of(scene.stores.postgres.pid())?,
            redis: of(scene.stores.redis.pid())?,
        })
    }

    fn since(self, before: Self) -> Self {
        Self {
            server: self.server.saturating_sub(before.server),
            postgres: self.postgres.saturating_sub(before.postgres),
            redis: self.redis.saturating_sub(before.redis),
        }
    }

    /// `pg-batch` is a client only; its own time is that of the server.
    fn per_request(self, load: &load::Report, server: Server) -> Cpu {
        let share = |time: Duration| per(micros(time), load.total());
        let own = per(load.cpu_us, load.total());
        let (server, load) = if server == Server::PgBatch { (own, 0.0) } else { (share(self.server), own) };
        Cpu { server, postgres: share(self.postgres), redis: share(self.redis), load }
    }
}
