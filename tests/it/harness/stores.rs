//! Postgres and Redis for the tests: one of each for all tests of the process, with a database and a key prefix for
//! each test; and private ones for tests that kill or stop them.
//!
//! Nobody drops a static, so it is the folder's guard that ends the servers and removes the folder when the process
//! ends.

use std::future::Future;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context as _, Result};
use hapax::dev::{DevError, Folder, FolderOptions, Postgres, PostgresOptions, Redis, RedisOptions};
use tokio::sync::OnceCell;
use tokio_postgres::NoTls;

static FOLDER: OnceLock<Folder> = OnceLock::new();
static POSTGRES: OnceLock<Postgres> = OnceLock::new();
static REDIS: OnceLock<Redis> = OnceLock::new();
static COUNT: AtomicU32 = AtomicU32::new(1);

/// The folder of this test process.
pub(crate) fn folder() -> &'static Folder {
    FOLDER.get_or_init(|| Folder::create(&FolderOptions::default()).expect("a folder for the servers"))
}

/// The Postgres that all tests share. Not to be stopped.
pub(crate) fn postgres() -> &'static Postgres {
    POSTGRES.get_or_init(|| {
        Postgres::start(folder(), "shared-postgres", &PostgresOptions::default()).expect("a Postgres server")
    })
}

/// The Redis that all tests share. Not to be stopped or flushed.
pub(crate) fn redis() -> &'static Redis {
    REDIS.get_or_init(|| {
        Redis::start(folder(), "shared-redis", &RedisOptions::default()).expect("a Redis server")
    })
}

/// A Postgres of the test's own, to be killed, paused and restarted.
pub(crate) async fn private_postgres(options: PostgresOptions) -> Result<Postgres> {
    let start = move || Postgres::start(folder(), &unique("postgres"), &options);
    blocking(start).await
}

/// A Redis of the test's own, to be killed, paused, flushed and restarted.
pub(crate) async fn private_redis(options: RedisOptions) -> Result<Redis> {
    let start = move || Redis::start(folder(), &unique("redis"), &options);
    blocking(start).await
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, DevError> + Send + 'static,
) -> Result<T> {
    Ok(tokio::task::spawn_blocking(work).await??)
}

/// A test's own part of the shared servers.
#[derive(Debug)]
pub(crate) struct Fresh {
    pub(crate) database: String,
    pub(crate) postgres_url: String,
    pub(crate) redis_url: String,
    /// What all Redis keys of the test start with.
    pub(crate) redis_prefix: String,
}

/// A new, empty database and an unused key prefix.
pub(crate) async fn fresh() -> Result<Fresh> {
    fresh_from("template1").await
}

async fn fresh_from(template: &str) -> Result<Fresh> {
    let (postgres, redis) = tokio::task::spawn_blocking(|| (postgres(), redis())).await?;
    let database = unique("test");
    create_database(&database, template).await?;
    let redis_prefix = format!("{database}:");
    let postgres_url = postgres.url(&database);
    Ok(Fresh { database, postgres_url, redis_url: redis.url(), redis_prefix })
}

/// A database that is made once, by migrations, and copied for each test.
///
/// ```ignore
/// static MIGRATED: Template = Template::new("migrated");
/// let stores = MIGRATED.fresh(async |url| migrate(&url).await).await?;
/// ```
#[derive(Debug)]
pub(crate) struct Template {
    name: &'static str,
    made: OnceCell<()>,
}

impl Template {
    pub(crate) const fn new(name: &'static str) -> Self {
        Self { name, made: OnceCell::const_new() }
    }

    /// A copy of the template, which `migrate` fills if this is the first call. It must close its connections: a
    /// database in use cannot be copied.
    pub(crate) async fn fresh<Fut: Future<Output = Result<()>>>(
        &self,
        migrate: impl FnOnce(String) -> Fut,
    ) -> Result<Fresh> {
        self.made.get_or_try_init(|| self.make(migrate)).await?;
        fresh_from(self.name).await
    }

    async fn make<Fut: Future<Output = Result<()>>>(
        &self,
        migrate: impl FnOnce(String) -> Fut,
    ) -> Result<()> {
        let postgres = tokio::task::spawn_blocking(postgres).await?;
        create_database(self.name, "template1").await?;
        migrate(postgres.url(self.name)).await
    }
}

async fn create_database(name: &str, template: &str) -> Result<()> {
    let client = connect(&postgres().url("postgres")).await?;
    let statement = format!("create database \"{name}\" template \"{template}\"");
    client.batch_execute(&statement).await.with_context(|| statement)
}

/// A connection to Postgres, driven by a task that ends with the client.
pub(crate) async fn connect(url: &str) -> Result<tokio_postgres::Client> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

/// A connection to Redis.
pub(crate) async fn connect_redis(url: &str) -> Result<redis::aio::MultiplexedConnection> {
    Ok(redis::Client::open(url)?.get_multiplexed_async_connection().await?)
}

fn unique(kind: &str) -> String {
    format!("{kind}-{}", COUNT.fetch_add(1, Ordering::Relaxed))
}

#[tokio::test]
async fn each_test_has_a_database_and_a_prefix_of_its_own() -> Result<()> {
    let (one, other) = (fresh().await?, fresh().await?);
    assert_ne!(one.redis_prefix, other.redis_prefix);
    connect(&one.postgres_url).await?.batch_execute("create table here (x int)").await?;
    let seen = connect(&other.postgres_url).await?.query_one("select to_regclass('here')::text", &[]).await?;
    assert_eq!(seen.get::<_, Option<&str>>(0), None);

    let mut redis = connect_redis(&one.redis_url).await?;
    redis::cmd("SET").arg(format!("{}x", one.redis_prefix)).arg("1").exec_async(&mut redis).await?;
    let seen: Option<String> =
        redis::cmd("GET").arg(format!("{}x", other.redis_prefix)).query_async(&mut redis).await?;
    assert_eq!(seen, None);
    Ok(())
}

#[tokio::test]
async fn a_template_is_made_once_and_copied() -> Result<()> {
    static TEMPLATE: Template = Template::new("template-under-test");
    let migrate = async |url: String| {
        connect(&url).await?.batch_execute("create table migrated as select 7 as x").await?;
        Ok(())
    };
    let (one, other) = tokio::try_join!(TEMPLATE.fresh(migrate), TEMPLATE.fresh(migrate))?;
    assert_ne!(one.database, other.database);
    for copy in [one, other] {
        let row = connect(&copy.postgres_url).await?.query_one("select x from migrated", &[]).await?;
        assert_eq!(row.get::<_, i32>(0), 7);
    }
    Ok(())
}
