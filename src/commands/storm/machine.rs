//! What this tool takes of the machine: open files beforehand, processor time afterwards.

use std::time::{Duration, Instant};

use rustix::process::{Resource, getrlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

use super::Exit;

/// Open files beside the connections: those of the runtime, the database, the result.
const OPEN_FILES_BESIDE: u64 = 32;
/// A share of the sending threads' time beyond which the tool itself is what is measured.
const BUSY_SHARE: f64 = 0.9;

/// Raises the limit on open files as far as it goes.
///
/// # Errors
/// It is too low for so many connections.
pub(super) fn allow_open_files(connections: u64) -> Result<(), Exit> {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // Where it may not be raised, what follows says so.
    setrlimit(Resource::Nofile, limit).unwrap_or_default();
    let wanted = connections + OPEN_FILES_BESIDE;
    match getrlimit(Resource::Nofile).current.filter(|current| *current < wanted) {
        Some(current) => Err(Exit::settings(format!(
            "{current} open files are allowed, and {connections} connections may need {wanted}: raise the limit \
             (ulimit -n), or lower --connections"
        ))),
        None => Ok(()),
    }
}

/// Processor time and time, from when the load began.
#[derive(Debug, Clone, Copy)]
pub(super) struct Usage {
    at: Instant,
    cpu: Duration,
}

/// What the tool used.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Used {
    pub(super) cpu_ms: u128,
    /// Of one processor.
    pub(super) cpu_share: f64,
    /// Whether its sending threads had next to no time left: then it is the tool that was measured.
    pub(super) was_busy: bool,
}

impl Usage {
    pub(super) fn begin() -> Self {
        Self { at: Instant::now(), cpu: own_cpu() }
    }

    pub(super) fn end(self, threads: u32) -> Used {
        let cpu = own_cpu().saturating_sub(self.cpu);
        let cpu_share = cpu.as_secs_f64() / self.at.elapsed().as_secs_f64().max(1e-9);
        Used { cpu_ms: cpu.as_millis(), cpu_share, was_busy: cpu_share > BUSY_SHARE * f64::from(threads) }
    }
}

fn own_cpu() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap_or_default()
}
