//! The machine and the settings that the numbers belong to, and whether they can be trusted.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::{Resource, getrlimit};
use serde::Serialize;

use super::numbers::{Spread, micros, per};
use super::scene::Scene;

const APPENDS: usize = 200;
/// For every connection one end, and room for the rest.
const FILES_BESIDE_CONNECTIONS: u64 = 256;
/// File systems that lose everything with the power: what a commit costs there says nothing.
const IN_MEMORY: [&str; 2] = ["tmpfs", "ramfs"];

/// What is told with the numbers.
#[derive(Debug, Serialize)]
pub(crate) struct Machine {
    date: String,
    cpu: String,
    cores: usize,
    kernel: String,
    build: &'static str,
    postgres: String,
    redis: String,
    /// Settings that decide what a commit promises and costs.
    settings: Vec<(String, String)>,
    file_system: String,
    fdatasync_us: Spread,
    open_files_limit: Option<u64>,
}

/// Refuses a place for the data in which a commit is no promise.
pub(crate) fn check_folder(folder: &Path) -> Result<()> {
    let (kind, mount) = file_system(folder)?;
    if IN_MEMORY.contains(&kind.as_str()) {
        bail!("{} is on {kind} ({mount}): give a folder on a disk with --dir", folder.display());
    }
    Ok(())
}

pub(crate) fn check_open_files(connections: usize) -> Result<()> {
    let needed = connections as u64 + FILES_BESIDE_CONNECTIONS;
    let limit = getrlimit(Resource::Nofile).current;
    ensure!(
        limit.is_none_or(|limit| limit >= needed),
        "the limit of open files is {limit:?}, {needed} are needed: raise it with ulimit -n"
    );
    Ok(())
}

impl Machine {
    pub(crate) async fn look(scene: &Scene) -> Result<Self> {
        let folder = scene.stores.postgres.data();
        let (kind, mount) = file_system(folder)?;
        let settings = settings(scene).await?;
        for name in ["fsync", "synchronous_commit"] {
            let on = settings.iter().any(|(setting, value)| setting == name && value == "on");
            ensure!(on, "{name} is not on");
        }
        let version = scene.hapax.query_one("select version()", &[]).await?.try_get(0)?;
        Ok(Self {
            date: jiff::Timestamp::now().to_string(),
            cpu: cpu()?,
            cores: std::thread::available_parallelism()?.get(),
            kernel: std::fs::read_to_string("/proc/sys/kernel/osrelease")?.trim().to_owned(),
            build: if cfg!(debug_assertions) { "debug" } else { "release" },
            postgres: version,
            redis: redis_version(),
            settings,
            file_system: format!("{kind} ({mount})"),
            fdatasync_us: fdatasync(folder)?,
            open_files_limit: getrlimit(Resource::Nofile).current,
        })
    }

    /// For people.
    pub(crate) fn text(&self) -> String {
        let settings = self.settings.iter().map(|(name, value)| format!("{name} {value}"));
        let lines = [
            format!("machine      {}, {} cores, Linux {}", self.cpu, self.cores, self.kernel),
            format!("build        {}, {}", self.build, self.date),
            format!("postgres     {}", self.postgres),
            format!("             {}", settings.collect::<Vec<_>>().join(", ")),
            format!("redis        {}, no persistence", self.redis),
            format!(
                "file system  {}, fdatasync of a small append {:.0} us (median of {APPENDS}; {:.0} to {:.0})",
                self.file_system, self.fdatasync_us.median, self.fdatasync_us.min, self.fdatasync_us.max
            ),
            format!("open files   at most {}", self.open_files_limit.unwrap_or(u64::MAX)),
        ];
        lines.join("\n")
    }
}

async fn settings(scene: &Scene) -> Result<Vec<(String, String)>> {
    const NAMES: &[&str] = &[
        "fsync",
        "synchronous_commit",
        "full_page_writes",
        "wal_sync_method",
        "shared_buffers",
        "max_wal_size",
        "wal_compression",
    ];
    let query = "select name, current_setting(name) from unnest($1::text[]) as name";
    let rows = scene.hapax.query(query, &[&NAMES]).await?;
    rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect()
}

/// Kind and mount point of the file system that holds a path.
fn file_system(path: &Path) -> Result<(String, String)> {
    let path = path.canonicalize().with_context(|| path.display().to_string())?;
    let mounts = std::fs::read_to_string("/proc/self/mounts")?;
    let mounts = mounts.lines().filter_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (point, kind) = (fields.next()?, fields.next()?);
        path.starts_with(point).then(|| (kind.to_owned(), point.to_owned()))
    });
    // Of two mounts on one point the later hides the earlier.
    mounts.max_by_key(|(_, point)| point.len()).context("no file system")
}

/// The time of one durable write, in microseconds.
fn fdatasync(folder: &Path) -> Result<Spread> {
    let path = folder.join("fdatasync.probe");
    let mut file = OpenOptions::new().create_new(true).append(true).open(&path)?;
    let mut times = Vec::with_capacity(APPENDS);
    for _ in 0..APPENDS {
        file.write_all(&[0; 512])?;
        let started = Instant::now();
        file.sync_data()?;
        times.push(per(micros(started.elapsed()), 1));
    }
    std::fs::remove_file(&path)?;
    Spread::of(times).context("no times")
}

fn cpu() -> Result<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo")?;
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    let model = lines.find(|(name, _)| name.trim() == "model name").map(|(_, model)| model.trim());
    Ok(model.unwrap_or("unknown processor").to_owned())
}

fn redis_version() -> String {
    let output = Command::new("redis-server").arg("--version").output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    text.split_whitespace().find_map(|word| word.strip_prefix("v=")).unwrap_or("unknown version").to_owned()
}
