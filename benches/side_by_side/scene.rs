//! The stores of a run, what is in them, and the server that is being measured.

use std::fs::File;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use hapax::dev::{FolderOptions, Stores, StoresOptions};
use tokio_postgres::{Client, NoTls};

use super::naive;
use super::payload::{SECRET, SOURCE};
use super::plan::Server;
use super::receiver::{self, Work};
use super::role::Role;

/// Database of the gateway and of `pg-batch`.
pub(crate) const HAPAX: &str = "hapax";
/// Database of the naive receivers.
const NAIVE: &str = "naive";
/// The effect of the gateway's source.
pub(crate) const EFFECT: &str = "fx.apply";
const START_LIMIT: Duration = Duration::from_secs(20);
const POLL: Duration = Duration::from_millis(5);

/// The business table. Nothing in it is unique, so that a doubled effect is seen.
const BUSINESS: &str = "
    create schema fx;
    create table fx.payment (
        event_id text not null, event_type text, applied_at timestamptz not null default now()
    );";
const BUSINESS_EFFECT: &str = "
    create function fx.apply(e hapax.event) returns void language sql volatile as
    $$ insert into fx.payment (event_id, event_type) values (e.event_id, e.event_type) $$;";
const NAIVE_LEDGER: &str = "
    create schema naive;
    create table naive.event (
        event_id text primary key, received_at timestamptz not null default now(), body bytea not null
    );
    do $$
    begin
        alter table naive.event alter column body set compression lz4;
    exception when feature_not_supported then null;
    end
    $$;";

/// Private stores with one database for each kind of receiver.
pub(crate) struct Scene {
    pub(crate) stores: Stores,
    pub(crate) hapax: Client,
    naive: Client,
    redis: redis::aio::MultiplexedConnection,
    /// In the pool of every receiver that stores.
    connections: usize,
}

/// What the stores have counted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Counters {
    pub(crate) transactions: u64,
    pub(crate) wal_bytes: u64,
    pub(crate) redis_commands: u64,
}

/// What is in the business table.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Effects {
    pub(crate) rows: u64,
    pub(crate) events: u64,
}

impl Scene {
    pub(crate) async fn start(parent: Option<PathBuf>, connections: usize) -> Result<Self> {
        let folder = FolderOptions { parent, keep: false };
        let stores = Stores::start(&StoresOptions { folder, ..StoresOptions::default() })?;
        for database in [HAPAX, NAIVE] {
            stores.postgres.create_database(database)?;
        }
        let mut hapax = connect(&stores.postgres.url(HAPAX)).await?;
        hapax::db::migrate(&mut hapax).await?;
        hapax.batch_execute(BUSINESS).await?;
        hapax.batch_execute(BUSINESS_EFFECT).await?;
        let naive = connect(&stores.postgres.url(NAIVE)).await?;
        naive.batch_execute(BUSINESS).await?;
        naive.batch_execute(NAIVE_LEDGER).await?;
        let redis = redis::Client::open(stores.redis.url())?;
        let redis = redis.get_multiplexed_async_connection().await?;
        Ok(Self { stores, hapax, naive, redis, connections })
    }

    /// Empties everything, and leaves no work behind that the next run would pay for.
    pub(crate) async fn reset(&mut self) -> Result<()> {
        self.hapax.batch_execute("truncate hapax.ledger, hapax.body, fx.payment").await?;
        self.naive.batch_execute("truncate naive.event, fx.payment").await?;
        redis::cmd("FLUSHALL").query_async::<()>(&mut self.redis).await?;
        Ok(self.hapax.batch_execute("checkpoint").await?)
    }

    pub(crate) async fn counters(&mut self) -> Result<Counters> {
        let row = self.hapax.query_one(COUNTERS, &[]).await?;
        let count = |column| row.try_get::<_, i64>(column).map(|count| u64::try_from(count).unwrap_or(0));
        let info: String = redis::cmd("INFO").arg("stats").query_async(&mut self.redis).await?;
        let mut lines = info.lines();
        let commands = lines.find_map(|line| line.strip_prefix("total_commands_processed:"));
        Ok(Counters {
            transactions: count(0)?,
            wal_bytes: count(1)?,
            redis_commands: commands.context("Redis counts no commands")?.trim().parse()?,
        })
    }

    /// Sessions report what they did when they end.
    pub(crate) async fn wait_for_sessions_to_end(&self) -> Result<()> {
        let since = Instant::now();
        while self.hapax.query_one(SESSIONS, &[]).await?.try_get::<_, i64>(0)? > 0 {
            anyhow::ensure!(since.elapsed() < START_LIMIT, "sessions of a server that is gone do not end");
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    }

    pub(crate) async fn effects(&self, server: Server) -> Result<Effects> {
        let client = match server {
            Server::NaivePlain | Server::NaivePlainRedis | Server::Naive | Server::NaiveRedis => &self.naive,
            _ => &self.hapax,
        };
        let row = client.query_one("select count(*), count(distinct event_id) from fx.payment", &[]).await?;
        let count = |column| row.try_get::<_, i64>(column).map(|count| u64::try_from(count).unwrap_or(0));
        Ok(Effects { rows: count(0)?, events: count(1)? })
    }

    pub(crate) fn tag(&self) -> &str {
        self.stores.folder().tag()
    }

    /// Starts the server, and waits until it can be connected to. `pg-batch` is none.
    pub(crate) fn serve(&self, server: Server) -> Result<Option<Running>> {
        let listen = free_address()?;
        let naive = |redis, pipelined| {
            let postgres = self.stores.postgres.url(NAIVE);
            Work::Record(naive::Spec { postgres, redis, connections: self.connections, pipelined })
        };
        let work = match server {
            Server::PgBatch => return Ok(None),
            Server::HapaxRedis | Server::HapaxMemory | Server::HapaxOff | Server::HapaxLogAll => {
                let command = self.hapax_command(server, listen)?;
                return Running::start(command, self.log(), listen).map(Some);
            }
            Server::Hyper => Work::Nothing,
            Server::HyperHmac => Work::Verify,
            Server::HyperHmacId => Work::Identify,
            Server::NaivePlain => naive(None, false),
            Server::NaivePlainRedis => naive(Some(self.stores.redis.url()), false),
            Server::Naive => naive(None, true),
            Server::NaiveRedis => naive(Some(self.stores.redis.url()), true),
        };
        let role = Role::Receiver(receiver::Spec { listen, work });
        Running::start(role.command(self.tag())?, self.log(), listen).map(Some)
    }

    fn log(&self) -> PathBuf {
        self.stores.folder().path().join("server.log")
    }

    fn hapax_command(&self, server: Server, listen: SocketAddr) -> Result<Command> {
        // The tag in its name is how the folder's guard finds a gateway that was left behind.
        let settings = self.stores.folder().path().join(format!("{}.toml", self.tag()));
        std::fs::write(&settings, self.settings(server, listen))?;
        let mut command = Command::new(env!("CARGO_BIN_EXE_hapax"));
        command.arg("serve").arg("--config").arg(settings);
        Ok(command)
    }

    fn settings(&self, server: Server, listen: SocketAddr) -> String {
        let requests = if server == Server::HapaxLogAll { "all" } else { "failed" };
        let (postgres, redis) = (self.stores.postgres.url(HAPAX), self.stores.redis.url());
        let connections = self.connections;
        let fast_tier = match server {
            Server::HapaxMemory => r#"kind = "memory""#.to_owned(),
            Server::HapaxOff => r#"kind = "off""#.to_owned(),
            _ => format!("kind = \"redis\"\nurl = \"{redis}\"\nprefix = \"bench:\""),
        };
        format!(
            r#"[server]
listen = "{listen}"
[admin]
listen = "127.0.0.1:0"
[log]
requests = "{requests}"
[postgres]
url = "{postgres}"
connections = {connections}
[fast_tier]
{fast_tier}
[source.{SOURCE}]
provider = "stripe"
secrets = ["{SECRET}"]
effect = "{EFFECT}"
effect_parallel = true
"#
        )
    }
}

const COUNTERS: &str = "
    select sum(xact_commit + xact_rollback)::bigint, (pg_current_wal_insert_lsn() - '0/0')::bigint
    from pg_stat_database where datname in ('hapax', 'naive')";
const SESSIONS: &str = "
    select count(*) from pg_stat_activity where backend_type = 'client backend' and application_name <> 'bench'";

async fn connect(url: &str) -> Result<Client> {
    let mut config: tokio_postgres::Config = url.parse()?;
    config.application_name("bench");
    let (client, connection) = config.connect(NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

fn free_address() -> Result<SocketAddr> {
    Ok(std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?)
}

/// The server that is being measured. Dropping it kills it.
pub(crate) struct Running {
    child: Child,
    log: PathBuf,
    pub(crate) listen: SocketAddr,
}

impl Running {
    fn start(mut command: Command, log: PathBuf, listen: SocketAddr) -> Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&log)?);
        let mut running = Self { child: command.spawn()?, log, listen };
        let since = Instant::now();
        while TcpStream::connect(listen).is_err() {
            if let Some(status) = running.child.try_wait()? {
                bail!("a server ended with {status}: {}", running.complaints());
            }
            anyhow::ensure!(
                since.elapsed() < START_LIMIT,
                "a server does not listen: {}",
                running.complaints()
            );
            std::thread::sleep(POLL);
        }
        Ok(running)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it wrote to its standard error.
    pub(crate) fn complaints(&self) -> String {
        read(&self.log)
    }
}

fn read(path: &Path) -> String {
    let text = std::fs::read(path).unwrap_or_default();
    String::from_utf8_lossy(text.get(..4096).unwrap_or(&text)).into_owned()
}

impl Drop for Running {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}
