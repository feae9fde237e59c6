//! What deliveries cost: commits in Postgres and commands in Redis, counted by the servers themselves.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context as _, Result};
use hapax::dev::{Postgres, PostgresOptions, RedisOptions};
use redis::aio::MultiplexedConnection;

use crate::harness::client::Client;
use crate::harness::gateway::Gateway;
use crate::harness::load::{LIMIT, metric, until_metric, until_redis_in_use};
use crate::harness::proxy::{BATCH, Direction, Proxy, Verdict, count_of};
use crate::harness::scene::{Scene, deliver, deliver_on, event};
use crate::harness::stores::{self, connect, private_postgres, private_redis};
use crate::harness::wait::eventually;

/// Committed transactions, once all sessions of the database have ended: a session reports its counts at the latest
/// then.
async fn committed(postgres: &Postgres, scene: &Scene) -> Result<i64> {
    let watcher = connect(&postgres.url("postgres")).await?;
    let query = "select xact_commit from pg_stat_database d where datname = $1 \
                 and not exists (select from pg_stat_activity a where a.datid = d.datid)";
    let ended = async || {
        let row = watcher.query_opt(query, &[&scene.stores.database]).await.ok()??;
        Some(row.get(0))
    };
    eventually(LIMIT, ended).await.context("sessions go on")
}

/// Sends `each` new events by each of `senders`, all at the same time.
async fn send(to: SocketAddr, source: &'static str, senders: usize, each: usize) -> Result<()> {
    let senders = (0..senders).map(|sender| {
        tokio::spawn(async move {
            let mut client = Client::new(to);
            for number in 0..each {
                let id = format!("{source}_{sender}_{number}");
                let answer = deliver_on(&mut client, source, &event(&id, "")).await?;
                assert_eq!(answer.outcome, "accepted");
            }
            anyhow::Ok(())
        })
    });
    for sender in senders.collect::<Vec<_>>() {
        sender.await??;
    }
    Ok(())
}

#[tokio::test]
async fn many_senders_share_commits() -> Result<()> {
    const SENDERS: usize = 64;
    const EACH: usize = 60;
    let settings = vec![("autovacuum".to_owned(), "off".to_owned())];
    let postgres = private_postgres(PostgresOptions { settings, ..Default::default() }).await?;
    let mut scene = Scene::on(&postgres, stores::redis().url()).await?;
    scene.stores.redis_prefix = format!("{}:", postgres.address());
    for source in ["plain", "stripe"] {
        let before = committed(&postgres, &scene).await?;
        let mut gateway = scene.gateway(&[]).await?;
        send(gateway.listen()?, source, SENDERS, EACH).await?;
        gateway.sigkill()?;
        // Everything counts: start-up, heartbeats, the first small batches.
        let commits = committed(&postgres, &scene).await? - before;
        let events = i64::try_from(SENDERS * EACH)?;
        assert!(commits * 8 <= events, "{commits} commits for {events} events of {source}");
    }
    Ok(())
}

#[tokio::test]
async fn an_event_that_comes_alone_is_committed_alone_and_at_once() -> Result<()> {
    let mut scene = Scene::new().await?;
    let commits = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&commits);
    let hook = move |way: Direction, bytes: &[u8]| {
        if way == Direction::ToServer {
            count.fetch_add(count_of(BATCH, bytes), Ordering::SeqCst);
        }
        Verdict::Forward
    };
    let proxy = Proxy::start_with(stores::postgres().address(), Box::new(hook))?;
    scene.stores.postgres_url = stores::postgres().url_at(proxy.address(), &scene.stores.database);
    let gateway = scene.gateway(&[]).await?;
    // The second is sent after the answer to the first: a gateway that waited for company would wait in vain.
    for number in 1..=20 {
        for (source, nth) in [("plain", 0), ("stripe", 1)] {
            let body = event(&format!("evt_{number}"), "");
            assert_eq!(deliver(gateway.listen()?, source, &body).await?.outcome, "accepted");
            assert_eq!(commits.load(Ordering::SeqCst), 2 * number - 1 + nth);
        }
    }
    assert_eq!(metric(&gateway, "hapax_batch_events_sum", "").await?, 40);
    Ok(())
}

/// Commands that Redis ran so far, without the ones that ask for this.
async fn commands(redis: &mut MultiplexedConnection) -> Result<u64> {
    let text: String = redis::cmd("INFO").arg("commandstats").query_async(redis).await?;
    let mut total = 0;
    for line in text.lines().filter(|line| line.starts_with("cmdstat_") && !line.starts_with("cmdstat_info"))
    {
        let calls = line.split_once("calls=").and_then(|(_, rest)| rest.split(',').next());
        total += calls.context("calls")?.parse::<u64>()?;
    }
    Ok(total)
}

/// Waits until Redis has run so many commands more; not one too many.
async fn until_commands(redis: &mut MultiplexedConnection, wanted: u64) -> Result<()> {
    let reached = async || (commands(&mut redis.clone()).await.ok()? >= wanted).then_some(());
    eventually(LIMIT, reached).await.context("too few commands")?;
    assert_eq!(commands(redis).await?, wanted);
    Ok(())
}

async fn ready(gateway: &Gateway) -> Result<()> {
    until_redis_in_use(gateway, true).await?;
    until_metric(gateway, "hapax_heartbeat_age_seconds", "", |age| age >= 0).await
}

#[tokio::test]
async fn commands_to_redis_for_each_delivery() -> Result<()> {
    const EVENTS: u64 = 20;
    let server = private_redis(RedisOptions::default()).await?;
    let mut scene = Scene::new().await?;
    scene.stores.redis_url = server.url();
    let mut gateway = scene.gateway(&[]).await?;
    ready(&gateway).await?;
    let mut redis = scene.redis().await?;
    let deliver_all = async |gateway: &Gateway, outcome: &str| -> Result<()> {
        let mut client = gateway.client()?;
        for number in 0..EVENTS {
            let answer = deliver_on(&mut client, "stripe", &event(&format!("evt_{number}"), "")).await?;
            assert_eq!(answer.outcome, outcome);
        }
        Ok(())
    };
    let caught_by = async |gateway: &Gateway, tier: &str| -> Result<i64> {
        metric(gateway, "hapax_duplicates_total", &format!("tier=\"{tier}\"")).await
    };
    let duplicates = i64::try_from(EVENTS)?;

    // New: a claim and a marker each.
    let start = commands(&mut redis).await?;
    deliver_all(&gateway, "accepted").await?;
    until_commands(&mut redis, start + 2 * EVENTS).await?;

    // Remembered by the process: nothing.
    deliver_all(&gateway, "duplicate").await?;
    assert_eq!(commands(&mut redis).await?, start + 2 * EVENTS);
    assert_eq!(caught_by(&gateway, "memory").await?, duplicates);

    // Known to Redis: the claim tells, once; then the process remembers.
    gateway.restart().await?;
    ready(&gateway).await?;
    let start = commands(&mut redis).await?;
    deliver_all(&gateway, "duplicate").await?;
    deliver_all(&gateway, "duplicate").await?;
    assert_eq!(commands(&mut redis).await?, start + EVENTS);
    assert_eq!(caught_by(&gateway, "redis").await?, duplicates);

    // Known to Postgres only: its marker is written again.
    gateway.restart().await?;
    ready(&gateway).await?;
    redis::cmd("FLUSHALL").exec_async(&mut redis).await?;
    let start = commands(&mut redis).await?;
    deliver_all(&gateway, "duplicate").await?;
    until_commands(&mut redis, start + 2 * EVENTS).await?;
    assert_eq!(caught_by(&gateway, "postgres").await?, duplicates);
    let markers = scene.markers().await?;
    assert_eq!(markers.len() as u64, EVENTS);
    assert!(markers.values().all(|value| value.as_ref().is_some_and(|value| value.starts_with("D "))));
    Ok(())
}
