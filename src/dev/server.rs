//! A server process: started on a free port, asked until it answers, stopped, killed, paused, started again.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::system::{children_of, has_ended, is_stopped};
use super::{DevError, Folder};

/// Below the range that systems take the local ports of outgoing connections from (32768 and up on Linux, 49152 and up
/// elsewhere). In that range another connection can take the port while the server is down, and a client that keeps
/// trying a port without a listener can even connect to itself.
const PORTS: std::ops::Range<u16> = 15_000..32_000;
/// Between the check that a port is free and the server's own bind, another process can take it.
const PORT_TRIES: u32 = 5;
/// A Postgres that was killed replays its log first.
const START_LIMIT: Duration = Duration::from_secs(60);
/// Postgres writes a checkpoint before it ends.
const STOP_LIMIT: Duration = Duration::from_secs(30);
/// After SIGKILL only the kernel has work left.
const KILL_LIMIT: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(5);
const LOG_TAIL_LINES: usize = 20;

/// How a kind of server is started and asked.
#[derive(Debug)]
pub(super) struct Recipe {
    pub(super) program: PathBuf,
    pub(super) arguments: Vec<OsString>,
    pub(super) port_flag: &'static str,
    /// Its own folder.
    pub(super) home: PathBuf,
    /// Whether the server on the port takes requests.
    pub(super) answers: fn(SocketAddr) -> bool,
}

/// A server of a [`Recipe`], up or down.
#[derive(Debug)]
pub(super) struct Server {
    recipe: Recipe,
    folder: Folder,
    log: PathBuf,
    port: u16,
    child: Option<Child>,
}

impl Server {
    /// Starts on a free port and waits for the first answer.
    pub(super) fn start(folder: &Folder, recipe: Recipe) -> Result<Self, DevError> {
        let log = recipe.home.join("log");
        let mut server = Self { recipe, folder: folder.clone(), log, port: 0, child: None };
        let mut tries = 0;
        loop {
            tries += 1;
            server.port = free_port();
            match server.launch() {
                Err(DevError::Ended { log, .. }) if tries < PORT_TRIES && log.contains("already in use") => {}
                other => return other.map(|()| server),
            }
        }
    }

    pub(super) fn address(&self) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, self.port))
    }

    pub(super) fn log(&self) -> &Path {
        &self.log
    }

    pub(super) fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// Asks it to end (SIGINT: at once, but cleanly) and waits; kills it if that takes too long.
    pub(super) fn stop(&mut self) -> Result<(), DevError> {
        let Some(pid) = self.running() else { return Ok(()) };
        kill_process(pid, Signal::INT).ok();
        self.resume();
        if self.wait_for_end(STOP_LIMIT) { self.wait_for_port() } else { self.kill() }
    }

    /// Kills it and its children, all at once, and waits until the port is free.
    pub(super) fn kill(&mut self) -> Result<(), DevError> {
        let Some(pid) = self.running() else { return Ok(()) };
        // Stopped first, so that it sees none of its children die.
        let children = freeze(pid);
        kill_process(pid, Signal::KILL).ok();
        for child in &children {
            kill_process(*child, Signal::KILL).ok();
        }
        let ended =
            self.wait_for_end(KILL_LIMIT) && poll(KILL_LIMIT, || children.iter().all(|pid| has_ended(*pid)));
        if ended { self.wait_for_port() } else { Err(self.slow("did not end after SIGKILL", KILL_LIMIT)) }
    }

    /// Stops it and its children in their tracks: connections stay open, nothing answers.
    pub(super) fn pause(&mut self) {
        let Some(pid) = self.running() else { return };
        for child in freeze(pid) {
            kill_process(child, Signal::STOP).ok();
        }
    }

    /// The end of a pause.
    pub(super) fn resume(&mut self) {
        let Some(pid) = self.running() else { return };
        for child in children_of(pid) {
            kill_process(child, Signal::CONT).ok();
        }
        kill_process(pid, Signal::CONT).ok();
    }

    /// Stops it if it runs, and starts it on the same port with the same data.
    pub(super) fn restart(&mut self) -> Result<(), DevError> {
        self.stop()?;
        self.launch()
    }

    fn launch(&mut self) -> Result<(), DevError> {
        let mut command = self.folder.command(&self.recipe.program, &self.recipe.home);
        command.args(&self.recipe.arguments).arg(self.recipe.port_flag).arg(self.port.to_string());
        command.stdout(self.open_log()?).stderr(self.open_log()?);
        let child = command.spawn().map_err(DevError::spawn(&self.recipe.program))?;
        self.child = Some(child);
        self.wait_for_answer()
    }

    fn open_log(&self) -> Result<File, DevError> {
        OpenOptions::new()
            .create(true)
            .append(true)
            .open(&self.log)
            .map_err(DevError::file("open", &self.log))
    }

    fn wait_for_answer(&mut self) -> Result<(), DevError> {
        let mut ended = None;
        let up = poll(START_LIMIT, || {
            // First, since another server could have taken the port and answer instead.
            ended = self.exit_status();
            ended.is_some() || (self.recipe.answers)(self.address())
        });
        match ended {
            Some(status) => Err(DevError::Ended { what: self.what(), status, log: tail(&self.log) }),
            None if up => Ok(()),
            None => {
                let error = self.slow("did not answer", START_LIMIT);
                self.kill()?;
                Err(error)
            }
        }
    }

    fn wait_for_end(&mut self, limit: Duration) -> bool {
        poll(limit, || self.running().is_none())
    }

    fn wait_for_port(&self) -> Result<(), DevError> {
        let free = poll(KILL_LIMIT, || is_free(self.port));
        if free { Ok(()) } else { Err(self.slow("did not give its port back", KILL_LIMIT)) }
    }

    /// Its process id, which is certain to be its own: the child is not collected yet.
    fn running(&mut self) -> Option<Pid> {
        self.exit_status();
        self.child.as_ref().map(Pid::from_child)
    }

    /// Forgets the child if it has ended.
    fn exit_status(&mut self) -> Option<String> {
        let status = match self.child.as_mut()?.try_wait() {
            Ok(None) => return None,
            Ok(Some(status)) => status.to_string(),
            Err(error) => error.to_string(),
        };
        self.child = None;
        Some(status)
    }

    fn what(&self) -> String {
        self.recipe.program.display().to_string()
    }

    fn slow(&self, action: &'static str, limit: Duration) -> DevError {
        DevError::Slow { what: self.what(), action, limit, log: tail(&self.log) }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // What this leaves, the folder's guard ends.
        self.stop().ok();
    }
}

/// Stops a process, and lists its children once it can make no more.
fn freeze(pid: Pid) -> Vec<Pid> {
    kill_process(pid, Signal::STOP).ok();
    poll(KILL_LIMIT, || is_stopped(pid));
    children_of(pid)
}

fn poll(limit: Duration, mut done: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while !done() {
        if start.elapsed() > limit {
            return false;
        }
        std::thread::sleep(POLL);
    }
    true
}

/// A port that is free now. The range is searched from a random place, so that test runs side by side seldom meet.
fn free_port() -> u16 {
    let first = rand::random_range(PORTS);
    (first..PORTS.end).chain(PORTS.start..first).find(|port| is_free(*port)).unwrap_or(first)
}

fn is_free(port: u16) -> bool {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok()
}

fn tail(log: &Path) -> String {
    let text = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    lines.get(lines.len().saturating_sub(LOG_TAIL_LINES)..).unwrap_or_default().join("\n")
}

#[cfg(test)]
mod tests {
    use super::super::{FolderOptions, redis};
    use super::*;

    fn script(folder: &Folder, name: &str, text: &str) -> Recipe {
        Recipe {
            program: "sh".into(),
            arguments: ["-c", text, folder.tag()].map(OsString::from).into(),
            port_flag: "--port",
            home: folder.make_home(name).unwrap(),
            answers: redis::answers,
        }
    }

    #[test]
    fn a_port_that_was_taken_meanwhile_is_not_the_end() {
        let folder = Folder::create(&FolderOptions::default()).unwrap();
        let once = "[ -e tried ] && exec redis-server \"$@\" --save ''; touch tried; echo Address already in use; exit 1";
        let server = Server::start(&folder, script(&folder, "once", once)).unwrap();
        assert!(redis::answers(server.address()));
        assert!(server.log().with_file_name("tried").exists());
    }

    #[test]
    fn a_program_that_ends_is_not_waited_for() {
        let folder = Folder::create(&FolderOptions::default()).unwrap();
        let error =
            Server::start(&folder, script(&folder, "broken", "echo out of luck; exit 3")).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("out of luck") && error.contains('3'), "{error}");
    }
}
