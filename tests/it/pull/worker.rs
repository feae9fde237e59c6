//! The workers of `sql/PULL.md`, as they stand there: the one in Python as processes that are stopped and killed.

use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};

use crate::harness::load::LIMIT;
use crate::harness::scene::Scene;
use crate::harness::stores;
use crate::harness::wait::eventually;

/// The work of the tests: a row in `fx.effect`, and what the body's `do` member says. `kill` and `raise` only happen to a
/// worker that is not `GOOD`. One with a `SEED` kills itself soon after its first event, wherever it is by then.
const WORK: &str = r#"
import json, os, random, signal, threading

lives = []
if "SEED" in os.environ:
    life = random.Random(os.environ["SEED"]).uniform(0, 0.2)
    lives.append(threading.Timer(life, os.kill, [os.getpid(), signal.SIGKILL]))

def work(db, event):
    if lives:
        lives.pop().start()
    do = json.loads(event.body).get("do")
    db.execute("insert into fx.effect (source, event_id) values (%s, %s)", [event.source, event.event_id])
    if do == "wait":
        db.execute("select pg_advisory_xact_lock_shared(7)")
    if "GOOD" not in os.environ:
        if do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if do == "raise":
            raise ValueError("this work fails\0")
"#;

/// The code blocks of `sql/PULL.md` in this language, in order.
pub(super) fn blocks(language: &str) -> Result<Vec<String>> {
    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("sql/PULL.md"))?;
    let mut blocks = Vec::new();
    let mut rest = text.as_str();
    while let Some((_, begun)) = rest.split_once(&format!("\n```{language}\n")) {
        let (block, after) = begun.split_once("\n```\n").context("a block that does not end")?;
        blocks.push(format!("{block}\n"));
        rest = after;
    }
    Ok(blocks)
}

/// The folder with a worker, and how it connects.
pub(super) struct Workplace {
    folder: Arc<tempfile::TempDir>,
    url: String,
}

impl Workplace {
    /// With the tests' own work.
    pub(super) fn new(url: &str) -> Result<Self> {
        Self::with(url, WORK)
    }

    /// With the work that is documented.
    pub(super) fn documented(url: &str) -> Result<Self> {
        let blocks = blocks("python")?;
        Self::with(url, blocks.first().context("no work")?)
    }

    fn with(url: &str, work: &str) -> Result<Self> {
        // What carries the tag on its command line is ended with the test process.
        let tag = format!("{}-", stores::folder().tag());
        let folder = tempfile::Builder::new().prefix(&tag).tempdir_in(stores::folder().path())?;
        let [_, worker] = &blocks("python")?[..] else { anyhow::bail!("not one work and one worker") };
        std::fs::write(folder.path().join("work.py"), work)?;
        std::fs::write(folder.path().join("worker.py"), worker)?;
        Ok(Self { folder: Arc::new(folder), url: url.to_owned() })
    }

    pub(super) fn start(&self, environment: &[(&str, &str)]) -> Result<Worker> {
        let python = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/sdk/bin/python");
        ensure!(python.exists(), "no {}: run `make setup-test`", python.display());
        let said = tempfile::Builder::new().prefix("said-").tempfile_in(self.folder.path())?;
        let (file, path) = said.keep()?;
        let child = Command::new(python)
            .arg(self.folder.path().join("worker.py"))
            .arg("plain")
            .env("DATABASE_URL", &self.url)
            .envs(environment.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(file)
            .spawn()?;
        Ok(Worker { child, said: path, _folder: Arc::clone(&self.folder) })
    }
}

/// A worker's process. Dropping it kills it.
pub(super) struct Worker {
    child: Child,
    said: PathBuf,
    _folder: Arc<tempfile::TempDir>,
}

impl Worker {
    pub(super) fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill_process(Pid::from_child(&self.child), signal)?)
    }

    pub(super) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(super) fn has_ended(&mut self) -> bool {
        self.child.try_wait().is_ok_and(|status| status.is_some())
    }

    pub(super) fn said(&self) -> String {
        std::fs::read_to_string(&self.said).unwrap_or_default()
    }

    /// Waits until it has said that.
    pub(super) async fn until_said(&self, words: &str) -> Result<()> {
        let found = async || self.said().contains(words).then_some(());
        eventually(LIMIT, found).await.with_context(|| format!("not said: {words}\n{}", self.said()))
    }

    pub(super) async fn ended(&mut self) -> Result<ExitStatus> {
        let ended = eventually(LIMIT, || std::future::ready(self.child.try_wait().ok().flatten())).await;
        ended.with_context(|| format!("it does not end:\n{}", self.said()))
    }

    /// Waits until it is killed, by itself or somebody else.
    pub(super) async fn killed(mut self) -> Result<()> {
        let status = self.ended().await?;
        ensure!(status.signal() == Some(Signal::KILL.as_raw()), "{status}:\n{}", self.said());
        Ok(())
    }

    pub(super) fn sigkill(mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Ends the leases of all that is held, and lets all that waits come due.
pub(super) async fn expire(scene: &Scene) -> Result<u64> {
    let query = "update hapax.job set due_at = clock_timestamp() - interval '1 second' \
                 where state = 'pending' and due_at > clock_timestamp()";
    Ok(scene.database().await?.execute(query, &[]).await?)
}
