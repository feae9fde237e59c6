//! What this machine has: the servers' programs, a user to run them as, and its processes.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::process::{Pid, geteuid, test_kill_process};

use super::DevError;

/// Folders of builds and packages that are not in the search path, after the versioned ones of Debian.
const POSTGRES_PLACES: [&str; 4] = [
    "/usr/local/pgsql/bin",
    "/opt/homebrew/opt/postgresql/bin",
    "/usr/local/opt/postgresql/bin",
    "/usr/pgsql/bin",
];
const DEBIAN_VERSIONS: &str = "/usr/lib/postgresql";
const REDIS_PLACES: [&str; 4] = [
    "/usr/bin/redis-server",
    "/usr/local/bin/redis-server",
    "/opt/homebrew/bin/redis-server",
    "redis-server",
];

/// The folder of Postgres' server programs.
pub(super) fn find_postgres(given: Option<&Path>) -> Result<PathBuf, DevError> {
    let places = match given {
        Some(given) => vec![given.to_owned()],
        None => postgres_places(),
    };
    places
        .iter()
        .find(|place| place.join("initdb").is_file() && place.join("postgres").is_file())
        .cloned()
        .ok_or_else(|| DevError::Missing {
            program: "PostgreSQL server (initdb, postgres)",
            looked_in: list(&places),
        })
}

/// The Redis server program.
pub(super) fn find_redis(given: Option<&Path>) -> Result<PathBuf, DevError> {
    let places: Vec<PathBuf> = match given {
        Some(given) => vec![given.to_owned()],
        None => REDIS_PLACES.iter().map(PathBuf::from).collect(),
    };
    places
        .iter()
        .find(|place| run(place, "--version").is_some())
        .cloned()
        .ok_or_else(|| DevError::Missing { program: "redis-server", looked_in: list(&places) })
}

/// In order of preference: the newest version of Debian's layout, what `pg_config` says, the search path, the rest.
fn postgres_places() -> Vec<PathBuf> {
    let mut places = debian_versions();
    places.extend(run(Path::new("pg_config"), "--bindir").map(PathBuf::from));
    places.extend(in_search_path("initdb"));
    places.extend(POSTGRES_PLACES.iter().map(PathBuf::from));
    places
}

fn debian_versions() -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(DEBIAN_VERSIONS) else { return Vec::new() };
    let mut versions: Vec<u32> =
        entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect();
    versions.sort_unstable_by(|a, b| b.cmp(a));
    versions.iter().map(|version| Path::new(DEBIAN_VERSIONS).join(version.to_string()).join("bin")).collect()
}

/// The folder in which a shell finds the program.
fn in_search_path(program: &str) -> Option<PathBuf> {
    let output =
        Command::new("sh").args(["-c", "command -v \"$0\"", program]).stdin(Stdio::null()).output().ok()?;
    let path = PathBuf::from(String::from_utf8(output.stdout).ok()?.trim());
    let path = std::fs::canonicalize(path).ok()?;
    path.parent().map(Path::to_owned)
}

/// What the program prints, if it is there and succeeds.
fn run(program: &Path, argument: &str) -> Option<String> {
    let output =
        Command::new(program).arg(argument).stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    if !output.status.success() {
        return None;
    }
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}

fn list(places: &[PathBuf]) -> String {
    if places.is_empty() {
        return "the search path".to_owned();
    }
    places.iter().map(|place| place.display().to_string()).collect::<Vec<_>>().join(", ")
}

/// A user of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Account {
    pub(super) name: String,
    pub(super) uid: u32,
    pub(super) gid: u32,
}

impl Account {
    /// The user that servers must run as: none in particular, unless this process is root.
    pub(super) fn for_servers() -> Result<Option<Self>, DevError> {
        if !geteuid().is_root() {
            return Ok(None);
        }
        let passwd = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
        Self::unprivileged(&passwd).map(Some).ok_or(DevError::NoUser)
    }

    fn unprivileged(passwd: &str) -> Option<Self> {
        ["postgres", "nobody"]
            .iter()
            .find_map(|name| passwd.lines().filter_map(Self::parse).find(|account| account.name == *name))
    }

    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.split(':');
        let name = fields.next()?.to_owned();
        let uid = fields.nth(1)?.parse().ok()?;
        let gid = fields.next()?.parse().ok()?;
        Some(Self { name, uid, gid })
    }

    /// Refuses a folder that this user cannot get to.
    pub(super) fn check_way_to(&self, folder: &Path) -> Result<(), DevError> {
        for place in folder.ancestors() {
            let found = std::fs::metadata(place).map_err(DevError::file("look at", place))?;
            let open = match () {
                () if found.uid() == self.uid => found.mode() & 0o100 != 0,
                () if found.gid() == self.gid => found.mode() & 0o010 != 0,
                () => found.mode() & 0o001 != 0,
            };
            if !open {
                return Err(DevError::Unreachable { path: place.to_owned(), user: self.name.clone() });
            }
        }
        Ok(())
    }
}

/// The processes whose parent is the given one.
pub(super) fn children_of(parent: Pid) -> Vec<Pid> {
    processes()
        .iter()
        .filter(|process| process.parent == parent.as_raw_pid())
        .filter_map(Process::pid)
        .collect()
}

/// Whether a process has ended. One that ended and that nobody has collected yet (in a container, nobody may ever)
/// counts as ended.
pub(super) fn has_ended(pid: Pid) -> bool {
    if test_kill_process(pid).is_err() {
        return true;
    }
    Process::find(pid).is_some_and(|process| matches!(process.state, 'Z' | 'X'))
}

/// Whether SIGSTOP has reached a process. Where there is no `/proc`, there is no telling, and it is taken for granted.
pub(super) fn is_stopped(pid: Pid) -> bool {
    Process::find(pid).is_none_or(|process| matches!(process.state, 'T' | 'Z' | 'X'))
}

struct Process {
    id: i32,
    parent: i32,
    /// As in `/proc`: `R` running, `T` stopped, `Z` ended, …
    state: char,
}

impl Process {
    fn find(pid: Pid) -> Option<Self> {
        Self::from_stat(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
    }

    /// From a line of `/proc/<pid>/stat`. The second field is the name in parentheses, which may hold anything.
    fn from_stat(line: &str) -> Option<Self> {
        let (before, after) = line.rsplit_once(')')?;
        let id = before.split(' ').next()?.parse().ok()?;
        let mut fields = after.split_ascii_whitespace();
        let state = fields.next()?.chars().next()?;
        let parent = fields.next()?.parse().ok()?;
        Some(Self { id, parent, state })
    }

    /// From a line of `ps -o pid= -o ppid=`, where there is no `/proc`.
    fn from_ps(line: &str) -> Option<Self> {
        let mut fields = line.split_ascii_whitespace();
        Some(Self { id: fields.next()?.parse().ok()?, parent: fields.next()?.parse().ok()?, state: '?' })
    }

    fn pid(&self) -> Option<Pid> {
        Pid::from_raw(self.id)
    }
}

fn processes() -> Vec<Process> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return processes_by_ps() };
    entries
        .filter_map(|entry| std::fs::read_to_string(entry.ok()?.path().join("stat")).ok())
        .filter_map(|stat| Process::from_stat(&stat))
        .collect()
}

fn processes_by_ps() -> Vec<Process> {
    let output = Command::new("ps").args(["-ax", "-o", "pid=", "-o", "ppid="]).stdin(Stdio::null()).output();
    let Ok(output) = output else { return Vec::new() };
    String::from_utf8_lossy(&output.stdout).lines().filter_map(Process::from_ps).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_user_postgres_comes_before_nobody() {
        let passwd = "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65533:nobody:/:/bin/false\n";
        let nobody = Account { name: "nobody".into(), uid: 65534, gid: 65533 };
        assert_eq!(Account::unprivileged(passwd), Some(nobody));
        let passwd = format!("{passwd}broken line\npostgres:x:101:104:,,,:/var/lib/postgresql:/bin/bash\n");
        let postgres = Account { name: "postgres".into(), uid: 101, gid: 104 };
        assert_eq!(Account::unprivileged(&passwd), Some(postgres));
        assert_eq!(Account::unprivileged("root:x:0:0::/root:/bin/sh"), None);
    }

    #[test]
    fn a_name_with_parentheses_does_not_hide_the_parent() {
        let process = Process::from_stat("42 (a) Z 7 (b) Z 17 42 42 0").unwrap();
        assert_eq!((process.id, process.parent, process.state), (42, 17, 'Z'));
    }

    #[test]
    fn a_missing_program_is_named_with_what_to_install() {
        let error = find_postgres(Some(Path::new("/nonexistent"))).unwrap_err().to_string();
        assert!(error.contains("/nonexistent") && error.contains("apt-get install postgresql"), "{error}");
        let error = find_redis(Some(Path::new("/nonexistent"))).unwrap_err().to_string();
        assert!(error.contains("redis-server"), "{error}");
    }
}
