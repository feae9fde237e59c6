//! The folder of one run, and the guard that clears it away.

use std::os::unix::fs::{DirBuilderExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::DevError;
use super::system::Account;

/// Where the folder of a run goes, and whether it stays.
#[derive(Debug, Clone, Default)]
pub struct FolderOptions {
    /// The folder to make it in; without one, the system's place for temporary files.
    pub parent: Option<PathBuf>,
    /// Leave the folder (data, logs) behind at the end.
    pub keep: bool,
}

/// The folder of one run: data, logs and nothing that is needed later.
///
/// A clone is the same folder. When the last clone is gone (every server holds one), or when this process ends in
/// whatever way, a guard process stops the servers that are left and removes the folder.
///
/// The guard is a shell that waits for the end of its standard input, which the kernel closes with this process. The
/// parent-death signal of Linux would be less: it follows the *thread* that made the child, is lost when the child
/// changes its user, does not reach a server's own children, and leaves the folder.
#[derive(Debug, Clone)]
pub struct Folder(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    tag: String,
    password: String,
    account: Option<Account>,
    guard: Child,
    template: Mutex<Option<PathBuf>>,
}

impl Folder {
    /// Makes a new folder with a random name, and its guard.
    ///
    /// # Errors
    ///
    /// If the folder cannot be made, or the servers' user could not reach it.
    pub fn create(options: &FolderOptions) -> Result<Self, DevError> {
        let account = Account::for_servers()?;
        let parent = options.parent.clone().unwrap_or_else(std::env::temp_dir);
        let parent = std::fs::canonicalize(&parent).map_err(DevError::file("find", parent))?;
        if let Some(account) = &account {
            account.check_way_to(&parent)?;
        }
        let path = parent.join(format!("hapax-dev-{}", random_name()));
        // Others may pass through to the parts that are theirs when there is another user, but not look around.
        let mode = if account.is_some() { 0o711 } else { 0o700 };
        make(&path, mode)?;
        let tag = format!("hapax-{}", random_name());
        let guard = spawn_guard(&path, &tag, options.keep).inspect_err(|_| {
            std::fs::remove_dir_all(&path).ok();
        })?;
        let password = random_name() + &random_name();
        Ok(Self(Arc::new(Inner { path, tag, password, account, guard, template: Mutex::new(None) })))
    }

    /// Its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// The word that the guard knows its processes by: it ends every one that carries it on its command line.
    #[must_use]
    pub fn tag(&self) -> &str {
        &self.0.tag
    }

    /// The password of the Postgres servers in this folder.
    pub(super) fn password(&self) -> &str {
        &self.0.password
    }

    /// The user that the servers run as, if it is not the one of this process.
    pub(super) fn account(&self) -> Option<&Account> {
        self.0.account.as_ref()
    }

    /// The Postgres data folder that all others of this folder are copied from, once it is made.
    pub(super) fn template(&self) -> MutexGuard<'_, Option<PathBuf>> {
        self.0.template.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a folder inside that only the servers' user can enter (and root).
    pub(super) fn make_home(&self, name: &str) -> Result<PathBuf, DevError> {
        let home = self.0.path.join(name);
        make(&home, 0o700)?;
        self.give(&home)?;
        Ok(home)
    }

    /// Makes the servers' user the owner of a file.
    pub(super) fn give(&self, path: &Path) -> Result<(), DevError> {
        let Some(account) = self.account() else { return Ok(()) };
        chown(path, Some(account.uid), Some(account.gid)).map_err(DevError::file("change the owner of", path))
    }

    /// A command that runs as the servers' user, in a process group of its own (so that Ctrl-C in a terminal reaches
    /// only this process, which then ends the servers in its own order).
    pub(super) fn command(&self, program: &Path, home: &Path) -> Command {
        let mut command = Command::new(program);
        command.current_dir(home).env("LC_ALL", "C").stdin(Stdio::null()).process_group(0);
        if let Some(account) = self.account() {
            command.uid(account.uid).gid(account.gid);
        }
        command
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        drop(self.guard.stdin.take());
        self.guard.wait().ok();
    }
}

fn make(path: &Path, mode: u32) -> Result<(), DevError> {
    std::fs::DirBuilder::new().mode(mode).create(path).map_err(DevError::file("make the folder", path))
}

fn write(path: &Path, text: &str) -> Result<(), DevError> {
    std::fs::write(path, text).map_err(DevError::file("write", path))
}

fn spawn_guard(folder: &Path, tag: &str, keep: bool) -> Result<Child, DevError> {
    // Read from a file, so that the tag is not on the command line of the guard itself.
    write(&folder.join("tag"), &format!("{tag}\n"))?;
    let script = folder.join("guard.sh");
    write(&script, include_str!("guard.sh"))?;
    Command::new("sh")
        .arg(script)
        .arg(folder)
        .arg(if keep { "keep" } else { "remove" })
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .map_err(DevError::spawn("sh"))
}

fn random_name() -> String {
    format!("{:016x}", rand::random::<u64>())
}
