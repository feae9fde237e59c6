//! Why a private server could not be started, in words that say what to do.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Why a private server is not there.
#[derive(Debug, thiserror::Error)]
pub enum DevError {
    /// The programs of a server are not on this machine.
    #[error(
        "no {program} found (looked in {looked_in}); install it (Debian, Ubuntu: `apt-get install postgresql \
         redis-server`; Homebrew: `brew install postgresql redis`) or name its place"
    )]
    Missing {
        /// The program that was sought.
        program: &'static str,
        /// The places, for the reader.
        looked_in: String,
    },
    /// A folder or file of the run could not be made or read.
    #[error("cannot {action} {}: {source}", path.display())]
    File {
        /// The verb.
        action: &'static str,
        /// The path.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// Running as root, and the unprivileged user cannot get to the folder.
    #[error(
        "the user {user:?}, as whom the servers run, may not pass through {}; set TMPDIR to a folder that everybody \
         may pass through, such as /tmp",
        path.display()
    )]
    Unreachable {
        /// The first folder on the way that is closed.
        path: PathBuf,
        /// The user.
        user: String,
    },
    /// Running as root on a machine without an unprivileged user.
    #[error(
        "Postgres refuses to run as root, and /etc/passwd has neither a user `postgres` nor `nobody` to run it as"
    )]
    NoUser,
    /// A program could not be started at all.
    #[error("cannot run {}: {source}", program.display())]
    Spawn {
        /// The program.
        program: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// A program ended when it should not have.
    #[error("{what} ended with {status}; the end of its log:\n{log}")]
    Ended {
        /// The program.
        what: String,
        /// Its exit status.
        status: String,
        /// The last lines that it wrote.
        log: String,
    },
    /// A server does not do what was asked in time.
    #[error("{what} {action} within {limit:?}; the end of its log:\n{log}")]
    Slow {
        /// The server.
        what: String,
        /// What it did not do.
        action: &'static str,
        /// The time that it had.
        limit: Duration,
        /// The last lines that it wrote.
        log: String,
    },
}

impl DevError {
    /// A [`DevError::File`] from the system's answer, to be used with `map_err`.
    pub(super) fn file(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { action, path, source }
    }

    /// A [`DevError::Spawn`] from the system's answer, to be used with `map_err`.
    pub(super) fn spawn(program: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let program = program.into();
        move |source| Self::Spawn { program, source }
    }
}
