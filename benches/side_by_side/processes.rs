//! Processor time of processes, from `/proc`.

use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};

/// Ticks of `/proc/<pid>/stat` per second: the same on every architecture that Linux runs on today.
const TICKS_PER_SECOND: u64 = 100;
/// Where user and system time stand after the name: of the process, and of its children that have ended.
const OWN_TIMES: Range<usize> = 11..13;
const ENDED_CHILDREN_TIMES: Range<usize> = 13..15;
const PARENT: usize = 1;

/// The fields of `/proc/<pid>/stat` after the name, which may itself hold blanks.
fn fields(pid: &str) -> Result<Vec<String>> {
    let path = Path::new("/proc").join(pid).join("stat");
    let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let after_name = text.rsplit_once(')').map(|(_, rest)| rest).context("a process without a name")?;
    Ok(after_name.split_whitespace().map(str::to_owned).collect())
}

fn ticks(fields: &[String], range: Range<usize>) -> Duration {
    let ticks = fields.get(range).unwrap_or_default().iter().filter_map(|field| field.parse::<u64>().ok());
    Duration::from_millis(ticks.sum::<u64>() * 1000 / TICKS_PER_SECOND)
}

/// Of all threads, to the nanosecond: ticks are cut off, which for many processes that have just started is much.
fn scheduled(pid: &str) -> Option<Duration> {
    let threads = std::fs::read_dir(Path::new("/proc").join(pid).join("task")).ok()?;
    let time = |thread: std::io::Result<std::fs::DirEntry>| {
        let text = std::fs::read_to_string(thread.ok()?.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse().ok().map(Duration::from_nanos)
    };
    threads.map(time).sum()
}

fn time(pid: &str, fields: &[String]) -> Duration {
    // Not every kernel counts nanoseconds.
    let own = scheduled(pid).unwrap_or_else(|| ticks(fields, OWN_TIMES));
    own + ticks(fields, ENDED_CHILDREN_TIMES)
}

/// Of this process.
pub(crate) fn own_cpu() -> Result<Duration> {
    Ok(time("self", &fields("self")?))
}

/// Of a process and its children, those that have ended included.
pub(crate) fn cpu(pid: u32) -> Result<Duration> {
    let pid = pid.to_string();
    let mut total = time(&pid, &fields(&pid)?);
    for entry in std::fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(name) = name.to_str().filter(|name| name.bytes().all(|byte| byte.is_ascii_digit())) else {
            continue;
        };
        // One that has ended meanwhile is counted by its parent.
        let Ok(child) = fields(name) else { continue };
        if child.get(PARENT) == Some(&pid) {
            total += time(name, &child);
        }
    }
    Ok(total)
}
