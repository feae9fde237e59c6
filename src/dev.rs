//! Private Postgres and Redis servers, started from the machine's own binaries, for `hapax dev`, the tests and the
//! benches.
//!
//! Everything of one run lives in one [`Folder`] in the system's place for temporary files. Servers listen on
//! 127.0.0.1, on free ports, and run as an unprivileged user when this process is root (Postgres refuses root).
//!
//! Invariant: no server outlives the process that started it, and no folder either unless it is to be kept. A guard
//! process sees to that even after SIGKILL; see [`Folder`].
//!
//! Never on the path of a request: nothing that serves webhooks uses this module.

mod error;
mod folder;
mod postgres;
mod redis;
mod server;
mod system;

use std::path::PathBuf;

pub use error::DevError;
pub use folder::{Folder, FolderOptions};
pub use postgres::{Postgres, PostgresOptions};
pub use redis::{Redis, RedisOptions};

/// What [`Stores::start`] should start, and where.
#[derive(Debug, Clone, Default)]
pub struct StoresOptions {
    /// Where the folder goes, and whether it stays.
    pub folder: FolderOptions,
    /// The Postgres server.
    pub postgres: PostgresOptions,
    /// The Redis server.
    pub redis: RedisOptions,
}

/// One Postgres and one Redis in a folder of their own; dropping it stops both and removes the folder.
#[derive(Debug)]
pub struct Stores {
    /// The Postgres server.
    pub postgres: Postgres,
    /// The Redis server.
    pub redis: Redis,
    folder: Folder,
}

impl Stores {
    /// Starts both servers and waits until they answer.
    ///
    /// # Errors
    ///
    /// If a program is missing, the folder cannot be made, or a server does not come up.
    pub fn start(options: &StoresOptions) -> Result<Self, DevError> {
        let folder = Folder::create(&options.folder)?;
        let redis = Redis::start(&folder, "redis", &options.redis)?;
        let postgres = Postgres::start_single(&folder, "postgres", &options.postgres)?;
        Ok(Self { postgres, redis, folder })
    }

    /// The folder of this run.
    #[must_use]
    pub fn folder(&self) -> &Folder {
        &self.folder
    }

    /// Where the logs of the two servers are.
    #[must_use]
    pub fn logs(&self) -> [PathBuf; 2] {
        [self.postgres.log().to_owned(), self.redis.log().to_owned()]
    }
}
