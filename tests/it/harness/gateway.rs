//! The real gateway, as a process: started on a config, killed, asked to end, started again.

use std::io::{BufRead as _, BufReader, Read};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::client::Client;
use super::stores;
use super::wait::eventually;

const START_LIMIT: Duration = Duration::from_secs(30);
const LINE_LIMIT: Duration = Duration::from_secs(30);

/// How a gateway is started.
#[derive(Debug, Clone)]
pub(crate) struct Start {
    program: PathBuf,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
    config: String,
}

impl Start {
    /// `hapax serve` on this config. Its listeners should be on port 0.
    pub(crate) fn new(config: impl Into<String>) -> Self {
        let program = env!("CARGO_BIN_EXE_hapax").into();
        let arguments = vec!["serve".into(), "--config".into()];
        Self { program, arguments, environment: Vec::new(), config: config.into() }
    }

    /// Sets a variable in its environment: a secret, a failpoint.
    pub(crate) fn env(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.into(), value.into()));
        self
    }

    pub(crate) async fn start(self) -> Result<Gateway> {
        // The guard of the servers' folder ends what carries the tag on its command line, so that no gateway is left
        // when the test process is killed.
        let tag = format!("{}-", stores::folder().tag());
        let folder = tempfile::Builder::new().prefix(&tag).tempdir_in(stores::folder().path())?;
        let config = folder.path().join("hapax.toml");
        std::fs::write(&config, &self.config)?;
        let process = Process::spawn(&self, &config)?;
        let mut gateway = Gateway { start: self, folder, process };
        gateway.process.wait_for_listeners().await?;
        Ok(gateway)
    }
}

/// A running gateway. Dropping it kills it.
#[derive(Debug)]
pub(crate) struct Gateway {
    start: Start,
    folder: tempfile::TempDir,
    process: Process,
}

impl Gateway {
    /// Where webhooks go.
    pub(crate) fn listen(&self) -> Result<SocketAddr> {
        self.process.listen.context("not listening")
    }

    /// Where operators ask.
    pub(crate) fn admin(&self) -> Result<SocketAddr> {
        self.process.admin.context("no admin listener")
    }

    /// A client of the webhook listener.
    pub(crate) fn client(&self) -> Result<Client> {
        Ok(Client::new(self.listen()?))
    }

    /// The config file, to be rewritten before a reload.
    pub(crate) fn config(&self) -> PathBuf {
        self.folder.path().join("hapax.toml")
    }

    /// Everything that it wrote so far, both outputs.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.process.lines.all()
    }

    /// Waits for a log line, as JSON, that is as wanted.
    pub(crate) async fn log(&self, wanted: impl Fn(&Value) -> bool) -> Result<Value> {
        let find = || self.lines().iter().filter_map(|line| serde_json::from_str(line).ok()).find(&wanted);
        let line = eventually(LINE_LIMIT, || std::future::ready(find())).await;
        line.with_context(|| format!("no such line:\n{}", self.lines().join("\n")))
    }

    /// Sends a signal.
    pub(crate) fn signal(&mut self, signal: Signal) -> Result<()> {
        self.process.signal(signal)
    }

    /// Ends it as a crash would, and waits.
    pub(crate) fn sigkill(&mut self) -> Result<()> {
        self.process.kill()
    }

    /// Asks it to end; see [`Self::wait`].
    pub(crate) fn sigterm(&mut self) -> Result<()> {
        self.process.signal(Signal::TERM)
    }

    /// Waits for its end.
    pub(crate) async fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        self.process.wait(limit).await
    }

    /// Kills it if it runs, and starts it again on what is in the config file now.
    pub(crate) async fn restart(&mut self) -> Result<()> {
        self.sigkill()?;
        self.process = Process::spawn(&self.start, &self.config())?;
        self.process.wait_for_listeners().await
    }
}

#[derive(Debug)]
struct Process {
    child: Child,
    lines: Lines,
    /// End with the process' output.
    readers: Vec<JoinHandle<()>>,
    listen: Option<SocketAddr>,
    admin: Option<SocketAddr>,
}

impl Process {
    fn spawn(start: &Start, config: &Path) -> Result<Self> {
        let mut child = Command::new(&start.program)
            .args(&start.arguments)
            .arg(config)
            .envs(start.environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot run {}", start.program.display()))?;
        let lines = Lines::default();
        let readers = vec![
            lines.collect(child.stdout.take().context("standard output")?),
            lines.collect(child.stderr.take().context("standard error")?),
        ];
        Ok(Self { child, lines, readers, listen: None, admin: None })
    }

    async fn wait_for_listeners(&mut self) -> Result<()> {
        let ready = eventually(START_LIMIT, || {
            let found = self.lines.listeners().map(Ok);
            // Looked at only when the line is not there, so that a line before the end is not missed.
            let ended =
                || self.child.try_wait().ok().flatten().map(|status| Err(anyhow!("ended with {status}")));
            std::future::ready(found.or_else(ended))
        });
        let ready = ready.await.and_then(|found| found);
        if ready.is_err() && self.child.try_wait()?.is_some() {
            // All of what it said, not what has been read so far.
            for reader in self.readers.drain(..) {
                reader.join().ok();
            }
        }
        (self.listen, self.admin) =
            ready.with_context(|| format!("not up:\n{}", self.lines.all().join("\n")))?;
        Ok(())
    }

    fn signal(&mut self, signal: Signal) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            bail!("it has ended already, with {status}");
        }
        Ok(kill_process(Pid::from_child(&self.child), signal)?)
    }

    fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    async fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        let status = eventually(limit, || std::future::ready(self.child.try_wait().ok().flatten())).await;
        status.with_context(|| format!("it does not end:\n{}", self.lines.all().join("\n")))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill().ok();
    }
}

type Listeners = (Option<SocketAddr>, Option<SocketAddr>);

#[derive(Debug, Clone, Default)]
struct Lines(Arc<Mutex<Vec<String>>>);

impl Lines {
    /// Reads to the end on a thread, so that the process never waits for its output to be read.
    fn collect(&self, from: impl Read + Send + 'static) -> JoinHandle<()> {
        let lines = self.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(from).split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line).into_owned();
                lines.0.lock().unwrap_or_else(PoisonError::into_inner).push(line);
            }
        })
    }

    fn all(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn listeners(&self) -> Option<Listeners> {
        let lines = self.all();
        let line = lines.iter().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let line =
            line.into_iter().find(|line| line.get("message").is_some_and(|text| text == "listening"))?;
        let address = |name| line.get(name)?.as_str()?.parse().ok();
        Some((address("listen"), address("admin")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A shell script in the gateway's place: its config is the script.
    async fn script(text: &str) -> Result<Gateway> {
        Start { program: "sh".into(), arguments: Vec::new(), ..Start::new(text) }
            .env("ADMIN", "127.0.0.1:2")
            .start()
            .await
    }

    const LISTENING: &str = r#"
        echo "starting" >&2
        echo "{\"level\":\"INFO\",\"message\":\"listening\",\"listen\":\"127.0.0.1:1\",\"admin\":\"$ADMIN\"}"
    "#;

    #[tokio::test]
    async fn the_ports_come_from_the_first_line_and_a_signal_ends_it() -> Result<()> {
        let mut gateway =
            script(&format!("{LISTENING} trap 'exit 7' TERM; while :; do sleep 0.01; done")).await?;
        assert_eq!(gateway.listen()?, "127.0.0.1:1".parse()?);
        assert_eq!(gateway.admin()?, "127.0.0.1:2".parse()?);
        assert!(gateway.client().is_ok());
        assert_eq!(gateway.log(|line| line["level"] == "INFO").await?["message"], "listening");
        eventually(LINE_LIMIT, || {
            std::future::ready(gateway.lines().contains(&"starting".into()).then_some(()))
        })
        .await?;
        gateway.sigterm()?;
        assert_eq!(gateway.wait(LINE_LIMIT).await?.code(), Some(7));
        assert!(gateway.signal(Signal::HUP).is_err());
        gateway.restart().await?;
        gateway.sigkill()?;
        assert_eq!(gateway.wait(LINE_LIMIT).await?.code(), None);
        Ok(())
    }

    #[tokio::test]
    async fn a_gateway_that_does_not_come_up_says_why() -> Result<()> {
        let error = script("echo 'no such key' >&2; exit 64").await.unwrap_err();
        let error = format!("{error:#}");
        assert!(error.contains("64"), "{error}");
        Ok(())
    }
}
