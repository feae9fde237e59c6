//! A private Postgres server.

use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::server::{Recipe, Server};
use super::system::find_postgres;
use super::{DevError, Folder};

const USER: &str = "hapax";
/// Version 3.0 of the wire protocol.
const PROTOCOL: u32 = 196_608;

/// The settings of every private server. What a commit promises is what is under test, so nothing here weakens it.
const SETTINGS: [(&str, &str); 6] = [
    ("listen_addresses", "127.0.0.1"),
    ("unix_socket_directories", ""),
    ("max_connections", "200"),
    ("fsync", "on"),
    ("synchronous_commit", "on"),
    ("log_line_prefix", "%m [%p] "),
];

/// How a private Postgres is started.
#[derive(Debug, Clone, Default)]
pub struct PostgresOptions {
    /// The folder of the server programs, if it is not to be sought.
    pub bin: Option<PathBuf>,
    /// More settings, name and value; they override the ones given here (but for `cluster_name`).
    pub settings: Vec<(String, String)>,
}

/// A private Postgres server. Dropping it stops it.
#[derive(Debug)]
pub struct Postgres {
    server: Server,
    folder: Folder,
    bin: PathBuf,
    data: PathBuf,
}

impl Postgres {
    /// Starts one in a new folder `name` within `folder`, and waits until it takes connections. Its data folder is a
    /// copy of one that is made once per `folder`.
    ///
    /// # Errors
    ///
    /// If there is no Postgres on this machine, or it does not come up.
    pub fn start(folder: &Folder, name: &str, options: &PostgresOptions) -> Result<Self, DevError> {
        let bin = find_postgres(options.bin.as_deref())?;
        let template = template(folder, &bin)?;
        Self::start_from(folder, name, options, &template)
    }

    /// Like [`Self::start`], but the data folder is made for this server alone, which saves the copy.
    pub(super) fn start_single(
        folder: &Folder,
        name: &str,
        options: &PostgresOptions,
    ) -> Result<Self, DevError> {
        let bin = find_postgres(options.bin.as_deref())?;
        Self::start_on(folder, name, options, |home, data| initdb(folder, &bin, home, data))
    }

    /// Starts one on a copy of another data folder, which no server may be using: a restored snapshot.
    ///
    /// # Errors
    ///
    /// As for [`Self::start`], or if the copy cannot be made.
    pub fn start_from(
        folder: &Folder,
        name: &str,
        options: &PostgresOptions,
        data: &Path,
    ) -> Result<Self, DevError> {
        Self::start_on(folder, name, options, |home, copy| {
            run(folder.command(Path::new("cp"), home).arg("-Rp").arg(data).arg(copy))
        })
    }

    /// Starts a streaming standby of this server. (`select pg_promote()` makes it a primary.)
    ///
    /// # Errors
    ///
    /// As for [`Self::start`], or if the base backup fails.
    pub fn start_standby(&self, name: &str, options: &PostgresOptions) -> Result<Self, DevError> {
        Self::start_on(&self.folder, name, options, |home, data| {
            let mut backup = self.client("pg_basebackup", home);
            run(backup.args(["--write-recovery-conf", "--checkpoint=fast", "--no-sync", "-D"]).arg(data))
        })
    }

    /// Starts one on what `fill` puts into its data folder.
    fn start_on(
        folder: &Folder,
        name: &str,
        options: &PostgresOptions,
        fill: impl FnOnce(&Path, &Path) -> Result<(), DevError>,
    ) -> Result<Self, DevError> {
        let bin = find_postgres(options.bin.as_deref())?;
        let home = folder.make_home(name)?;
        let data = home.join("data");
        fill(&home, &data)?;
        let arguments = arguments(folder, &data, &options.settings);
        let recipe = Recipe { program: bin.join("postgres"), arguments, port_flag: "-p", home, answers };
        Ok(Self { server: Server::start(folder, recipe)?, folder: folder.clone(), bin, data })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.server.address()
    }

    /// The URL of one of its databases, with user (a superuser) and password.
    #[must_use]
    pub fn url(&self, database: &str) -> String {
        self.url_at(self.address(), database)
    }

    /// The URL for clients that go through another address, such as a proxy.
    #[must_use]
    pub fn url_at(&self, address: SocketAddr, database: &str) -> String {
        format!("postgres://{USER}:{}@{address}/{database}", self.folder.password())
    }

    /// Makes an empty database.
    ///
    /// # Errors
    ///
    /// If `createdb` says so, for instance because it exists.
    pub fn create_database(&self, database: &str) -> Result<(), DevError> {
        let mut command = self.client("createdb", self.folder.path());
        command.args(["--maintenance-db", "postgres", "--", database]);
        run(&mut command)
    }

    /// One of Postgres' own client programs, told where this server is.
    fn client(&self, program: &str, home: &Path) -> Command {
        let address = self.address();
        let mut command = self.folder.command(&self.bin.join(program), home);
        command.args(["--host", &address.ip().to_string(), "--port", &address.port().to_string()]);
        // Not among the arguments, which every user of the machine can read.
        command
            .env("PGPASSWORD", self.folder.password())
            .env("PGSSLMODE", "disable")
            .args(["--username", USER]);
        command
    }

    /// The folder of the server programs, for the tools beside them.
    #[must_use]
    pub fn bin(&self) -> &Path {
        &self.bin
    }

    /// Its data folder.
    #[must_use]
    pub fn data(&self) -> &Path {
        &self.data
    }

    /// Its log.
    #[must_use]
    pub fn log(&self) -> &Path {
        self.server.log()
    }

    /// The process id of the postmaster, unless it is down.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.server.pid()
    }

    /// Stops it (a fast shutdown: sessions are ended, what is committed is written out).
    ///
    /// # Errors
    ///
    /// If it does not end, even after SIGKILL.
    pub fn stop(&mut self) -> Result<(), DevError> {
        self.server.stop()
    }

    /// Kills the postmaster and all sessions by SIGKILL, and waits until the port is free: nothing commits any more
    /// once this returns.
    ///
    /// # Errors
    ///
    /// If they do not end in time.
    pub fn kill(&mut self) -> Result<(), DevError> {
        self.server.kill()
    }

    /// Stops the postmaster and all sessions in their tracks (SIGSTOP): connections stay open, nothing answers.
    pub fn pause(&mut self) {
        self.server.pause();
    }

    /// The end of a [`Self::pause`].
    pub fn resume(&mut self) {
        self.server.resume();
    }

    /// Stops it if it is up, and starts it on the same port and data.
    ///
    /// # Errors
    ///
    /// If it does not end or does not come up.
    pub fn restart(&mut self) -> Result<(), DevError> {
        self.server.restart()
    }
}

/// The data folder that the others are copied from: `initdb` takes a second or two, a copy a fraction of it.
fn template(folder: &Folder, bin: &Path) -> Result<PathBuf, DevError> {
    let mut made = folder.template();
    if let Some(template) = made.as_ref() {
        return Ok(template.clone());
    }
    let home = folder.make_home("postgres-template")?;
    let template = home.join("data");
    initdb(folder, bin, &home, &template)?;
    *made = Some(template.clone());
    Ok(template)
}

fn initdb(folder: &Folder, bin: &Path, home: &Path, data: &Path) -> Result<(), DevError> {
    // With the tag in its name, so that the guard finds an `initdb` that is at work.
    let password_file = home.join(format!("{}.password", folder.tag()));
    write_password(folder, &password_file)?;
    let mut initdb = folder.command(&bin.join("initdb"), home);
    initdb.args(["--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-sync", "--username", USER]);
    run(initdb.arg("--pwfile").arg(&password_file).arg("-D").arg(data))?;
    std::fs::remove_file(&password_file).map_err(DevError::file("remove", password_file))
}

fn write_password(folder: &Folder, path: &Path) -> Result<(), DevError> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .and_then(|mut file| file.write_all(folder.password().as_bytes()))
        .map_err(DevError::file("write", path))?;
    folder.give(path)
}

fn arguments(folder: &Folder, data: &Path, settings: &[(String, String)]) -> Vec<OsString> {
    let given = settings.iter().map(|(name, value)| (name.as_str(), value.as_str()));
    // The cluster's name stands in the title of every session's process, where the guard looks for it.
    let all = SETTINGS.into_iter().chain(given).chain([("cluster_name", folder.tag())]);
    let mut arguments = vec!["-D".into(), data.as_os_str().to_owned()];
    for (name, value) in all {
        arguments.extend(["-c".into(), format!("{name}={value}").into()]);
    }
    arguments
}

fn run(command: &mut Command) -> Result<(), DevError> {
    let output = command.output().map_err(DevError::spawn(command.get_program()))?;
    if output.status.success() {
        return Ok(());
    }
    Err(DevError::Ended {
        what: command.get_program().to_string_lossy().into_owned(),
        status: output.status.to_string(),
        log: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}

/// Whether it asks for a password, which it does only once it takes sessions; before, it answers with an error.
fn answers(address: SocketAddr) -> bool {
    first_byte(address).is_ok_and(|byte| byte == b'R')
}

fn first_byte(address: SocketAddr) -> std::io::Result<u8> {
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(1))?;
    stream.set_read_timeout(Some(Duration::from_secs(1)))?;
    stream.write_all(&startup_message())?;
    let mut answer = [0; 1];
    stream.read_exact(&mut answer)?;
    Ok(answer[0])
}

fn startup_message() -> Vec<u8> {
    let parameters = format!("user\0{USER}\0database\0postgres\0\0");
    let length = u32::try_from(4 + 4 + parameters.len()).unwrap_or(u32::MAX);
    [&length.to_be_bytes()[..], &PROTOCOL.to_be_bytes()[..], parameters.as_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_startup_message_names_its_own_length() {
        let message = startup_message();
        assert_eq!(u32::from_be_bytes(message[..4].try_into().unwrap()) as usize, message.len());
    }
}
