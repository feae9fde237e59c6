//! A private Redis server.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::server::{Recipe, Server};
use super::system::find_redis;
use super::{DevError, Folder};

/// How a private Redis is started.
#[derive(Debug, Clone, Default)]
pub struct RedisOptions {
    /// The program, if it is not to be sought.
    pub program: Option<PathBuf>,
    /// More arguments; they come last and so override the ones given here.
    pub arguments: Vec<String>,
}

/// A private Redis server, which keeps nothing: no snapshots, no append-only file. Dropping it stops it.
#[derive(Debug)]
pub struct Redis {
    server: Server,
}

impl Redis {
    /// Starts one in a new folder `name` within `folder`, and waits until it answers.
    ///
    /// # Errors
    ///
    /// If there is no Redis on this machine, or it does not come up.
    pub fn start(folder: &Folder, name: &str, options: &RedisOptions) -> Result<Self, DevError> {
        let program = find_redis(options.program.as_deref())?;
        let home = folder.make_home(name)?;
        let mut arguments: Vec<OsString> = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
            .iter()
            .chain(&["--daemonize", "no", "--proc-title-template"])
            .map(OsString::from)
            .collect();
        arguments.push(format!("redis-server:{{port}}:{}", folder.tag()).into());
        arguments.extend(["--dir".into(), home.clone().into_os_string()]);
        arguments.extend(options.arguments.iter().map(OsString::from));
        let recipe = Recipe { program, arguments, port_flag: "--port", home, answers };
        Ok(Self { server: Server::start(folder, recipe)? })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.server.address()
    }

    /// Its URL.
    #[must_use]
    pub fn url(&self) -> String {
        self.url_at(self.address())
    }

    /// The URL for clients that go through another address, such as a proxy.
    #[must_use]
    pub fn url_at(&self, address: SocketAddr) -> String {
        format!("redis://{address}/")
    }

    /// Its log.
    #[must_use]
    pub fn log(&self) -> &Path {
        self.server.log()
    }

    /// Its process id, unless it is down.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.server.pid()
    }

    /// Stops it.
    ///
    /// # Errors
    ///
    /// If it does not end, even after SIGKILL.
    pub fn stop(&mut self) -> Result<(), DevError> {
        self.server.stop()
    }

    /// Kills it by SIGKILL and waits until its port is free.
    ///
    /// # Errors
    ///
    /// If it does not end in time.
    pub fn kill(&mut self) -> Result<(), DevError> {
        self.server.kill()
    }

    /// Stops it in its tracks (SIGSTOP): connections stay open, nothing answers.
    pub fn pause(&mut self) {
        self.server.pause();
    }

    /// The end of a [`Self::pause`].
    pub fn resume(&mut self) {
        self.server.resume();
    }

    /// Stops it if it is up, and starts it on the same port, empty.
    ///
    /// # Errors
    ///
    /// If it does not end or does not come up.
    pub fn restart(&mut self) -> Result<(), DevError> {
        self.server.restart()
    }
}

/// Whether it says that it is ready; while it loads, it says that instead.
pub(super) fn answers(address: SocketAddr) -> bool {
    ping(address).is_ok_and(|answer| answer == *b"+PONG")
}

fn ping(address: SocketAddr) -> std::io::Result<[u8; 5]> {
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(1))?;
    stream.set_read_timeout(Some(Duration::from_secs(1)))?;
    stream.write_all(b"PING\r\n")?;
    let mut answer = [0; 5];
    stream.read_exact(&mut answer)?;
    Ok(answer)
}
