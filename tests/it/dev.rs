//! The promise of the private servers: they come up, they can be broken in every way that a test needs, and nothing of
//! them is left.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result};
use hapax::dev::{
    Folder, FolderOptions, Postgres, PostgresOptions, Redis, RedisOptions, Stores, StoresOptions,
};
use serde_json::{Value, json};

use crate::harness::stores::{connect, connect_redis, private_postgres, private_redis};
use crate::harness::wait::{eventually, has_ended};

const LIMIT: Duration = Duration::from_secs(30);
const QUIET: Duration = Duration::from_millis(200);
const HOLD: &str = "HAPAX_TEST_HOLD_STORES";

async fn setting(postgres: &Postgres, name: &str) -> Result<String> {
    let client = connect(&postgres.url("postgres")).await?;
    Ok(client.query_one("select current_setting($1)", &[&name]).await?.get(0))
}

#[tokio::test]
async fn commits_are_durable_unless_asked_otherwise() -> Result<()> {
    let postgres = private_postgres(PostgresOptions::default()).await?;
    for name in ["fsync", "synchronous_commit", "full_page_writes"] {
        assert_eq!(setting(&postgres, name).await?, "on", "{name}");
    }
    assert_eq!(setting(&postgres, "listen_addresses").await?, "127.0.0.1");
    assert_eq!(setting(&postgres, "max_connections").await?, "200");
    let settings = vec![("max_connections".into(), "33".into()), ("wal_level".into(), "logical".into())];
    let other = private_postgres(PostgresOptions { settings, ..PostgresOptions::default() }).await?;
    assert_eq!(setting(&other, "max_connections").await?, "33");
    assert_eq!(setting(&other, "wal_level").await?, "logical");
    assert_ne!(postgres.address(), other.address());
    Ok(())
}

#[tokio::test]
async fn nothing_is_left_after_the_drop() -> Result<()> {
    let stores = tokio::task::spawn_blocking(|| Stores::start(&StoresOptions::default())).await??;
    stores.postgres.create_database("orders")?;
    let client = connect(&stores.postgres.url("orders")).await?;
    assert_eq!(client.query_one("select 1", &[]).await?.get::<_, i32>(0), 1);
    ping(&stores.redis).await?;
    let pids = [stores.postgres.pid().context("up")?, stores.redis.pid().context("up")?];
    let folder = stores.folder().path().to_owned();
    assert!(stores.logs().iter().all(|log| log.starts_with(&folder) && log.is_file()));
    tokio::task::spawn_blocking(|| drop(stores)).await?;
    assert!(pids.into_iter().all(has_ended));
    assert!(!folder.exists());
    Ok(())
}

#[tokio::test]
async fn a_folder_that_is_kept_stays() -> Result<()> {
    let parent = reachable_folder()?;
    let folder = FolderOptions { parent: Some(parent.path().to_owned()), keep: true };
    let folder = Folder::create(&folder)?;
    let redis = Redis::start(&folder, "redis", &RedisOptions::default())?;
    let (pid, log) = (redis.pid().context("up")?, redis.log().to_owned());
    drop((redis, folder));
    assert!(has_ended(pid) && log.is_file());
    Ok(())
}

/// A temporary folder that the servers' user may pass through.
fn reachable_folder() -> Result<tempfile::TempDir> {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir()?;
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o711))?;
    Ok(folder)
}

#[tokio::test]
async fn a_killed_postgres_comes_back_with_what_was_committed() -> Result<()> {
    let mut postgres = private_postgres(PostgresOptions::default()).await?;
    let client = connect(&postgres.url("postgres")).await?;
    client.batch_execute("create table t as select 7 as x").await?;
    client.batch_execute("begin; insert into t values (8)").await?;
    let (address, pid) = (postgres.address(), postgres.pid().context("up")?);
    postgres.kill()?;
    assert!(postgres.pid().is_none() && has_ended(pid));
    assert!(client.query_one("select 1", &[]).await.is_err());
    postgres.restart()?;
    assert_eq!(postgres.address(), address);
    let client = connect(&postgres.url("postgres")).await?;
    assert_eq!(client.query_one("select sum(x) from t", &[]).await?.get::<_, i64>(0), 7);
    // A second life of the same server, without a crash.
    postgres.restart()?;
    assert_ne!(postgres.pid(), Some(pid));
    setting(&postgres, "port").await?;
    Ok(())
}

#[tokio::test]
async fn a_copy_of_the_data_is_a_server_of_its_own() -> Result<()> {
    let mut postgres = private_postgres(PostgresOptions::default()).await?;
    connect(&postgres.url("postgres")).await?.batch_execute("create table t as select 7 as x").await?;
    postgres.stop()?;
    let folder = crate::harness::stores::folder();
    let copy = Postgres::start_from(folder, "restored", &PostgresOptions::default(), postgres.data())?;
    let client = connect(&copy.url("postgres")).await?;
    assert_eq!(client.query_one("select x from t", &[]).await?.get::<_, i32>(0), 7);
    Ok(())
}

#[tokio::test]
async fn a_standby_follows_and_can_be_promoted() -> Result<()> {
    let primary = private_postgres(PostgresOptions::default()).await?;
    let standby = primary.start_standby("standby", &PostgresOptions::default())?;
    connect(&primary.url("postgres")).await?.batch_execute("create table t as select 7 as x").await?;
    let client = connect(&standby.url("postgres")).await?;
    let follow = async || client.query_one("select x from t", &[]).await.ok();
    assert_eq!(eventually(LIMIT, follow).await?.get::<_, i32>(0), 7);
    assert!(client.batch_execute("insert into t values (8)").await.is_err());
    client.query_one("select pg_promote()", &[]).await?;
    client.batch_execute("insert into t values (8)").await?;
    Ok(())
}

#[tokio::test]
async fn a_paused_postgres_answers_after_the_pause() -> Result<()> {
    let mut postgres = private_postgres(PostgresOptions::default()).await?;
    let client = connect(&postgres.url("postgres")).await?;
    client.query_one("select 1", &[]).await?;
    postgres.pause();
    let statement = "select 1";
    let answer = client.query_one(statement, &[]);
    tokio::pin!(answer);
    assert!(tokio::time::timeout(QUIET, &mut answer).await.is_err());
    postgres.resume();
    assert_eq!(tokio::time::timeout(LIMIT, answer).await??.get::<_, i32>(0), 1);
    // A pause does not stand in the way of the end.
    postgres.pause();
    postgres.stop()?;
    Ok(())
}

async fn ping(redis: &Redis) -> Result<()> {
    let mut connection = connect_redis(&redis.url()).await?;
    Ok(redis::cmd("PING").exec_async(&mut connection).await?)
}

#[tokio::test]
async fn a_redis_can_be_killed_paused_and_restarted() -> Result<()> {
    let arguments = vec!["--maxmemory".into(), "64mb".into()];
    let mut redis = private_redis(RedisOptions { arguments, ..RedisOptions::default() }).await?;
    let mut connection = connect_redis(&redis.url()).await?;
    let seen: Vec<String> =
        redis::cmd("CONFIG").arg("GET").arg("maxmemory").query_async(&mut connection).await?;
    assert_eq!(seen, ["maxmemory", "67108864"]);
    redis::cmd("SET").arg("x").arg("1").exec_async(&mut connection).await?;

    redis.pause();
    assert!(tokio::time::timeout(QUIET, ping(&redis)).await.is_err());
    redis.resume();
    ping(&redis).await?;

    redis.kill()?;
    assert!(ping(&redis).await.is_err());
    redis.restart()?;
    let mut connection = connect_redis(&redis.url()).await?;
    let kept: Option<String> = redis::cmd("GET").arg("x").query_async(&mut connection).await?;
    assert_eq!(kept, None);
    Ok(())
}

#[tokio::test]
async fn a_server_that_cannot_start_says_why() {
    let settings = vec![("shared_buffers".into(), "a lot".into())];
    let error =
        private_postgres(PostgresOptions { settings, ..PostgresOptions::default() }).await.unwrap_err();
    assert!(error.to_string().contains("shared_buffers"), "{error}");
}

/// Not a test by itself: what [`no_server_outlives_a_killed_owner`] runs as a process of its own.
#[test]
fn holds_stores_until_its_input_ends() -> Result<()> {
    if std::env::var_os(HOLD).is_none() {
        return Ok(());
    }
    let mut stores = Stores::start(&StoresOptions::default())?;
    let held = json!({
        "postgres": stores.postgres.pid(),
        "redis": stores.redis.pid(),
        "url": stores.postgres.url("postgres"),
    });
    println!("held {held}");
    std::io::stdin().lines().next();
    stores.redis.stop()?;
    Ok(())
}

fn spawn_holder(folder: &Path) -> Result<Child> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--exact", "dev::holds_stores_until_its_input_ends", "--nocapture"]);
    command.env(HOLD, "1").env("TMPDIR", folder).stdin(Stdio::piped()).stdout(Stdio::piped());
    Ok(command.spawn()?)
}

/// What the holder says once its stores are up.
fn held(holder: &mut Child) -> Result<Value> {
    let output = BufReader::new(holder.stdout.take().context("standard output")?);
    let lines = output.lines().map_while(Result::ok);
    let held = lines.into_iter().find_map(|line| Some(line.split_once("held ")?.1.to_owned()));
    Ok(serde_json::from_str(&held.context("the holder did not start its stores")?)?)
}

/// The processes that Postgres counts as its own, apart from the postmaster.
async fn backends(url: &str) -> Result<Vec<u32>> {
    let rows = connect(url).await?.query("select pid from pg_stat_activity", &[]).await?;
    rows.iter().map(|row| Ok(u32::try_from(row.get::<_, i32>(0))?)).collect()
}

#[tokio::test]
async fn no_server_outlives_a_killed_owner() -> Result<()> {
    let parent = reachable_folder()?;
    let mut holder = spawn_holder(parent.path())?;
    let held = held(&mut holder)?;
    let url = held["url"].as_str().context("url")?;
    // A session that is busy at the time, so that it does not notice the end of the postmaster by itself.
    let busy = connect(url).await?;
    let busy =
        tokio::spawn(
            async move { busy.batch_execute("select sum(x) from generate_series(1, 1e12) x").await },
        );
    let mut pids = backends(url).await?;
    pids.push(u32::try_from(held["postgres"].as_u64().context("postgres")?)?);
    pids.push(u32::try_from(held["redis"].as_u64().context("redis")?)?);
    assert!(!is_empty(parent.path()) && pids.len() > 5 && !pids.iter().any(|pid| has_ended(*pid)));

    holder.kill()?;
    holder.wait()?;
    let gone = || (pids.iter().all(|pid| has_ended(*pid)) && is_empty(parent.path())).then_some(());
    eventually(LIMIT, || std::future::ready(gone())).await?;
    assert!(busy.await?.is_err());
    Ok(())
}

#[tokio::test]
async fn no_initdb_outlives_a_killed_owner() -> Result<()> {
    let parent = reachable_folder()?;
    let mut holder = spawn_holder(parent.path())?;
    // Made by initdb early on, long before it is done.
    eventually(LIMIT, || std::future::ready(find(parent.path(), "PG_VERSION").then_some(()))).await?;
    holder.kill()?;
    holder.wait()?;
    eventually(LIMIT, || std::future::ready(is_empty(parent.path()).then_some(()))).await
}

#[test]
fn whatever_carries_the_tag_ends_with_the_folder() -> Result<()> {
    let folder = Folder::create(&FolderOptions::default())?;
    let mut sleeper =
        Command::new("sh").args(["-c", "read -r _", folder.tag()]).stdin(Stdio::piped()).spawn()?;
    drop(folder);
    assert!(sleeper.try_wait()?.is_some());
    Ok(())
}

fn is_empty(folder: &Path) -> bool {
    std::fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_none())
}

/// Whether there is a file of this name anywhere below the folder, as far as one can see.
fn find(folder: &Path, name: &str) -> bool {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.into_iter().any(|entry| entry.file_name() == name || find(&entry.path(), name))
}
