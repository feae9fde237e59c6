//! Processor time of processes, from `/proc`.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};

/// Ticks of `/proc/<pid>/stat` per second: the same on every architecture that Linux runs on today.
const TICKS_PER_SECOND: u64 = 100;
/// Where user and system time of the process, then of its children that have ended, stand after the name.
const TIMES: std::ops::Range<usize> = 11..15;
const PARENT: usize = 1;

/// The fields of `/proc/<pid>/stat` after the name, which may itself hold blanks.
fn fields(pid: &str) -> Result<Vec<String>> {
    let path = Path::new("/proc").join(pid).join("stat");
    let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let after_name = text.rsplit_once(')').map(|(_, rest)| rest).context("a process without a name")?;
    Ok(after_name.split_whitespace().map(str::to_owned).collect())
}

fn time(fields: &[String]) -> Duration {
    let ticks = fields.get(TIMES).unwrap_or_default().iter().filter_map(|field| field.parse::<u64>().ok());
    Duration::from_millis(ticks.sum::<u64>() * 1000 / TICKS_PER_SECOND)
}

/// Of this process.
pub(crate) fn own_cpu() -> Result<Duration> {
    Ok(time(&fields("self")?))
}

/// Of a process and its children, those that have ended included.
pub(crate) fn cpu(pid: u32) -> Result<Duration> {
    let pid = pid.to_string();
    let mut total = time(&fields(&pid)?);
    for entry in std::fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(name) = name.to_str().filter(|name| name.bytes().all(|byte| byte.is_ascii_digit())) else {
            continue;
        };
        // One that has ended meanwhile is counted by its parent.
        let Ok(child) = fields(name) else { continue };
        if child.get(PARENT) == Some(&pid) {
            total += time(&child);
        }
    }
    Ok(total)
}
