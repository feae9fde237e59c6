//! Whatever happens to Redis, or stands in it, changes latency only: no delivery is refused, none is lost, none takes
//! effect twice, and Redis is used again as soon as it can be.

use anyhow::{Context as _, Result};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hapax::dev::{Redis, RedisOptions};
use redis::aio::MultiplexedConnection;

use crate::harness::gateway::Gateway;
use crate::harness::load::{LIMIT, Load, acknowledged, metric, until_metric, until_redis_in_use};
use crate::harness::proxy::{Mode, Proxy};
use crate::harness::scene::{Scene, deliver, event};
use crate::harness::stores::{connect_redis, private_redis};
use crate::harness::wait::eventually;

const PAIRS: usize = 8;

/// A gateway under load, and a Redis that only it uses.
struct Outage {
    scene: Scene,
    redis: Redis,
    gateway: Gateway,
    load: Load,
}

impl Outage {
    async fn start() -> Result<Self> {
        let redis = private_redis(RedisOptions::default()).await?;
        let url = redis.url();
        Self::start_at(redis, url).await
    }

    async fn start_at(redis: Redis, url: String) -> Result<Self> {
        let mut scene = Scene::new().await?;
        scene.stores.redis_url = url;
        // Nearly no memory in the process, so that the second delivery asks Redis.
        let gateway = scene.gateway(&["fast_tier.memory_ttl = \"1ms\""]).await?;
        until_redis_in_use(&gateway, true).await?;
        let load = Load::start(gateway.listen()?, "stripe", PAIRS);
        load.go_on(200).await?;
        Ok(Self { scene, redis, gateway, load })
    }

    async fn command(&self, name: &str, arguments: &[&str]) -> Result<()> {
        let mut redis = connect_redis(&self.redis.url()).await?;
        Ok(redis::cmd(name).arg(arguments).exec_async(&mut redis).await?)
    }

    /// Redis is seen to be away, and the load goes on.
    async fn bear(&self) -> Result<()> {
        until_redis_in_use(&self.gateway, false).await?;
        self.load.go_on(200).await
    }

    /// Redis comes back by itself, and nothing went wrong.
    async fn recover(self) -> Result<()> {
        until_redis_in_use(&self.gateway, true).await?;
        deliver(self.gateway.listen()?, "stripe", &event("after", "")).await?;
        until_done(&self.scene, "after").await?;
        self.load.go_on(100).await?;
        let sent = self.load.finish().await?;
        for sent in &sent {
            let outcome = sent.answer.outcome.as_str();
            assert!(sent.answer.is_success() && ["accepted", "duplicate"].contains(&outcome), "{sent:?}");
        }
        self.scene.assert_once(&acknowledged(&sent)).await?;
        Ok(())
    }
}

async fn value(redis: &mut MultiplexedConnection, key: &str) -> Result<Option<String>> {
    Ok(redis::cmd("GET").arg(key).query_async(redis).await?)
}

/// Waits until the event's key holds a done marker that will run out.
async fn until_done(scene: &Scene, id: &str) -> Result<()> {
    let key = scene.redis_key("stripe", id);
    let done = async || {
        let mut redis = scene.redis().await.ok()?;
        let value = value(&mut redis, &key).await.ok()??;
        let ttl: i64 = redis::cmd("PTTL").arg(&key).query_async(&mut redis).await.ok()?;
        (value.starts_with("D ") && ttl > 0).then_some(())
    };
    eventually(LIMIT, done).await.with_context(|| format!("no done marker for {id}"))
}

#[tokio::test]
async fn killed() -> Result<()> {
    let mut outage = Outage::start().await?;
    outage.redis.kill()?;
    outage.bear().await?;
    outage.redis.restart()?;
    outage.recover().await
}

#[tokio::test]
async fn restarted_empty() -> Result<()> {
    let mut outage = Outage::start().await?;
    outage.redis.restart()?;
    outage.load.go_on(200).await?;
    outage.recover().await
}

#[tokio::test]
async fn stopped_and_only_the_first_deliveries_pay_for_it() -> Result<()> {
    let mut outage = Outage::start().await?;
    outage.redis.pause();
    outage.bear().await?;
    let paid = metric(&outage.gateway, "hapax_redis_failures_total", "trouble=\"timeout\"").await?;
    // The failures that open the breaker, what was on its way then, and the writer of the markers.
    let bound = 5 + 2 * PAIRS + 1;
    assert!(paid >= 5 && usize::try_from(paid)? <= bound, "{paid} commands waited for their time-out");
    outage.redis.resume();
    outage.recover().await
}

#[tokio::test]
async fn flushed() -> Result<()> {
    let outage = Outage::start().await?;
    for _ in 0..20 {
        outage.command("FLUSHALL", &[]).await?;
        outage.load.go_on(20).await?;
    }
    assert!(metric(&outage.gateway, "hapax_breaker_openings_total", "").await? == 0);
    outage.recover().await
}

#[tokio::test]
async fn full() -> Result<()> {
    let outage = Outage::start().await?;
    outage.command("CONFIG", &["SET", "maxmemory-policy", "noeviction"]).await?;
    outage.command("CONFIG", &["SET", "maxmemory", "1"]).await?;
    outage.bear().await?;
    assert!(metric(&outage.gateway, "hapax_redis_failures_total", "trouble=\"full\"").await? >= 5);
    outage.command("CONFIG", &["SET", "maxmemory", "0"]).await?;
    outage.recover().await
}

#[tokio::test]
async fn a_replica_until_it_is_a_primary_again() -> Result<()> {
    let primary = private_redis(RedisOptions::default()).await?;
    let outage = Outage::start().await?;
    let (host, port) = (primary.address().ip().to_string(), primary.address().port().to_string());
    outage.command("REPLICAOF", &[&host, &port]).await?;
    outage.bear().await?;
    assert!(metric(&outage.gateway, "hapax_redis_failures_total", "trouble=\"read_only\"").await? >= 1);
    outage.command("REPLICAOF", &["NO", "ONE"]).await?;
    outage.recover().await
}

#[tokio::test]
async fn connections_cut_again_and_again() -> Result<()> {
    let redis = private_redis(RedisOptions::default()).await?;
    let proxy = Proxy::start(redis.address())?;
    let url = redis.url_at(proxy.address());
    let outage = Outage::start_at(redis, url).await?;
    for cut in 1..=5 {
        proxy.cut();
        until_metric(&outage.gateway, "hapax_breaker_openings_total", "", |seen| seen >= cut).await?;
        outage.load.go_on(20).await?;
        until_redis_in_use(&outage.gateway, true).await?;
    }
    outage.recover().await
}

#[tokio::test]
async fn a_connection_that_lost_its_bytes_is_replaced_once() -> Result<()> {
    let redis = private_redis(RedisOptions::default()).await?;
    let proxy = Proxy::start(redis.address())?;
    let url = redis.url_at(proxy.address());
    let outage = Outage::start_at(redis, url).await?;
    proxy.set(Mode::Blackhole);
    until_metric(&outage.gateway, "hapax_redis_failures_total", "", |seen| seen >= 1).await?;
    proxy.set(Mode::Pass);
    until_metric(&outage.gateway, "hapax_breaker_openings_total", "", |seen| seen >= 1).await?;
    until_redis_in_use(&outage.gateway, true).await?;
    outage.load.go_on(200).await?;
    // What was sent on the old connection fails later, and is not held against the new one.
    let openings = metric(&outage.gateway, "hapax_breaker_openings_total", "").await?;
    assert_eq!(openings, 1);
    outage.recover().await
}

#[tokio::test]
async fn stalled_on_the_way() -> Result<()> {
    let redis = private_redis(RedisOptions::default()).await?;
    let proxy = Proxy::start(redis.address())?;
    let url = redis.url_at(proxy.address());
    let outage = Outage::start_at(redis, url).await?;
    proxy.set(Mode::Stall);
    outage.bear().await?;
    proxy.set(Mode::Pass);
    outage.recover().await
}

#[tokio::test]
async fn who_wants_no_delivery_without_redis_gets_none() -> Result<()> {
    let mut redis = private_redis(RedisOptions::default()).await?;
    let mut scene = Scene::new().await?;
    scene.stores.redis_url = redis.url();
    let gateway = scene.gateway(&["fast_tier.on_failure = \"refuse\""]).await?;
    until_redis_in_use(&gateway, true).await?;
    redis.kill()?;
    let refused = deliver(gateway.listen()?, "stripe", &event("evt_1", "")).await?;
    assert_eq!((refused.status, refused.outcome.as_str()), (503, "unavailable"));
    assert!(refused.retry_after >= Some(1), "{refused:?}");
    assert!(scene.found().await?.rows.is_empty());
    redis.restart()?;
    until_redis_in_use(&gateway, true).await?;
    let accepted = deliver(gateway.listen()?, "stripe", &event("evt_1", "")).await?;
    assert_eq!(accepted.outcome, "accepted");
    Ok(())
}

#[tokio::test]
async fn what_stands_in_the_way_is_written_over() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&["in_flight.wait = \"20ms\""]).await?;
    until_redis_in_use(&gateway, true).await?;
    let mut redis = scene.redis().await?;
    let found: [&[&str]; 9] = [
        // Left behind by somebody who died between two commands.
        &["SET", "L foreign"],
        &["SET", "L "],
        &["RPUSH", "x"],
        &["HSET", "x", "y"],
        &["SET", ""],
        &["SET", "nonsense"],
        &["SET", "D"],
        &["SET", "D x y"],
        // Committed in another history of the database.
        &["SET", "D AAAAAAAA AAAAAAAA"],
    ];
    for (number, words) in found.iter().enumerate() {
        let id = format!("evt_{number}");
        let key = scene.redis_key("stripe", &id);
        redis::cmd(words[0]).arg(&key).arg(&words[1..]).exec_async(&mut redis).await?;
        let answer = deliver(gateway.listen()?, "stripe", &event(&id, "")).await?;
        assert_eq!((answer.status, answer.outcome.as_str()), (200, "accepted"), "{words:?}");
        until_done(&scene, &id).await?;
        let again = deliver(gateway.listen()?, "stripe", &event(&id, "")).await?;
        assert_eq!(again.outcome, "duplicate", "{words:?}");
        scene.assert_once([&id]).await?;
    }
    Ok(())
}

/// The marker that a gateway would write for this body now: the generation is that of an event that is delivered for
/// it, the digest is made here.
async fn marker_of(scene: &Scene, gateway: &Gateway, body: &[u8]) -> Result<String> {
    until_metric(gateway, "hapax_heartbeat_age_seconds", "", |age| age >= 0).await?;
    deliver(gateway.listen()?, "stripe", &event("any", "")).await?;
    until_done(scene, "any").await?;
    let marker = value(&mut scene.redis().await?, &scene.redis_key("stripe", "any")).await?;
    let marker = marker.context("a marker")?;
    let (generation, _) = marker.rsplit_once(' ').context("three words")?;
    let digest = ring::digest::digest(&ring::digest::SHA256, body);
    let short = URL_SAFE_NO_PAD.encode(digest.as_ref().get(..6).context("six bytes")?);
    Ok(format!("{generation} {short}"))
}

/// What Redis is trusted for: only a gateway writes such a marker, and only after a commit in this very history.
#[tokio::test]
async fn a_marker_of_the_current_history_is_believed() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&[]).await?;
    until_redis_in_use(&gateway, true).await?;
    let marker = marker_of(&scene, &gateway, &event("evt_1", "")).await?;
    let mut redis = scene.redis().await?;
    redis::cmd("SET").arg(scene.redis_key("stripe", "evt_1")).arg(marker).exec_async(&mut redis).await?;
    let answer = deliver(gateway.listen()?, "stripe", &event("evt_1", "")).await?;
    assert_eq!((answer.status, answer.outcome.as_str()), (200, "duplicate"));
    assert_eq!(scene.found().await?.rows.len(), 1);
    Ok(())
}

/// Time enough for the test to end a lease.
const LONG_WAIT: [&str; 4] = [
    "in_flight.wait = \"15s\"",
    "server.deadline = \"19s\"",
    "server.drain = \"20s\"",
    "fast_tier.lease = \"60s\"",
];

#[tokio::test]
async fn who_meets_a_lease_waits_for_its_end() -> Result<()> {
    let redis = private_redis(RedisOptions::default()).await?;
    let mut scene = Scene::new().await?;
    scene.stores.redis_url = redis.url();
    let gateway = scene.gateway(&LONG_WAIT).await?;
    until_redis_in_use(&gateway, true).await?;
    let marker = marker_of(&scene, &gateway, &event("settled", "")).await?;
    let mut redis = scene.redis().await?;
    for (id, outcome) in [("settled", "duplicate"), ("released", "accepted"), ("expired", "accepted")] {
        let (key, body) = (scene.redis_key("stripe", id), event(id, ""));
        redis::cmd("SET").arg(&key).arg("L foreign").exec_async(&mut redis).await?;
        let claims = calls(&mut redis, "set").await?;
        let to = gateway.listen()?;
        let delivery = tokio::spawn(async move { deliver(to, "stripe", &body).await });
        // The gateway has seen the lease, and asks again.
        let asked = async || (calls(&mut redis.clone(), "set").await.ok()? >= claims + 2).then_some(());
        eventually(LIMIT, asked).await?;
        assert!(!delivery.is_finished());
        match id {
            "settled" => redis::cmd("SET").arg(&key).arg(&marker).exec_async(&mut redis).await?,
            "released" => redis::cmd("DEL").arg(&key).exec_async(&mut redis).await?,
            _ => redis::cmd("PEXPIRE").arg(&key).arg(1).exec_async(&mut redis).await?,
        }
        assert_eq!(delivery.await??.outcome, outcome, "{id}");
    }
    assert_eq!(scene.found().await?.effects.len(), 3);
    Ok(())
}

/// How often Redis was asked to do this.
async fn calls(redis: &mut MultiplexedConnection, command: &str) -> Result<u64> {
    let text: String = redis::cmd("INFO").arg("commandstats").query_async(redis).await?;
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:calls=")));
    Ok(line.and_then(|line| line.split(',').next()).map_or(Ok(0), str::parse)?)
}

#[tokio::test]
async fn a_failed_delivery_gives_back_its_own_lease_and_no_other() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&[]).await?;
    until_redis_in_use(&gateway, true).await?;
    let mut redis = scene.redis().await?;
    for (id, foreign) in [("own", None), ("taken over", Some("L foreign"))] {
        let key = scene.redis_key("stripe", id);
        let mut holder = scene.database().await?;
        let held = holder.transaction().await?;
        held.execute("select pg_advisory_xact_lock(7)", &[]).await?;
        let to = gateway.listen()?;
        let body = event(id, "\"do\":\"wait_raise\"");
        let delivery = tokio::spawn(async move { deliver(to, "stripe", &body).await });
        let leased = async || value(&mut redis.clone(), &key).await.ok()?.filter(|it| it.starts_with("L "));
        eventually(LIMIT, leased).await?;
        if let Some(foreign) = foreign {
            redis::cmd("SET").arg(&key).arg(foreign).exec_async(&mut redis).await?;
        }
        held.rollback().await?;
        let answer = delivery.await??;
        assert_eq!((answer.status, answer.outcome.as_str()), (503, "unavailable"));
        assert_eq!(value(&mut redis, &key).await?.as_deref(), foreign, "{id}");
    }
    assert!(scene.found().await?.rows.is_empty());
    Ok(())
}

#[tokio::test]
async fn without_the_right_to_scripts_only_the_release_is_missing() -> Result<()> {
    let redis = private_redis(RedisOptions::default()).await?;
    let mut admin = connect_redis(&redis.url()).await?;
    let mut user = redis::cmd("ACL");
    user.arg("SETUSER").arg(&["limited", "on", ">secret", "~*", "+@all", "-@scripting"]);
    user.exec_async(&mut admin).await?;
    let mut scene = Scene::new().await?;
    scene.stores.redis_url = format!("redis://limited:secret@{}/", redis.address());
    let gateway = scene.gateway(&["in_flight.wait = \"20ms\""]).await?;
    until_redis_in_use(&gateway, true).await?;

    let failed = deliver(gateway.listen()?, "stripe", &event("evt_1", "\"do\":\"raise\"")).await?;
    assert_eq!(failed.status, 503);
    let lease = value(&mut admin, &scene.redis_key("stripe", "evt_1")).await?;
    assert!(lease.is_some_and(|lease| lease.starts_with("L ")));
    // The lease that stayed behind makes the next delivery wait, and refuses nothing.
    let accepted = deliver(gateway.listen()?, "stripe", &event("evt_1", "")).await?;
    assert_eq!(accepted.outcome, "accepted");
    until_done(&scene, "evt_1").await?;
    assert!(metric(&gateway, "hapax_redis_failures_total", "").await? == 0);
    Ok(())
}

/// Two deployments that share a prefix by mistake have different databases, and so different histories.
#[tokio::test]
async fn the_same_prefix_for_two_databases_swallows_nothing() -> Result<()> {
    let (one, mut other) = (Scene::new().await?, Scene::new().await?);
    other.stores.redis_prefix.clone_from(&one.stores.redis_prefix);
    for scene in [&one, &other] {
        let gateway = scene.gateway(&[]).await?;
        until_redis_in_use(&gateway, true).await?;
        until_metric(&gateway, "hapax_heartbeat_age_seconds", "", |age| age >= 0).await?;
        let answer = deliver(gateway.listen()?, "stripe", &event("evt_1", "")).await?;
        assert_eq!(answer.outcome, "accepted");
        until_done(scene, "evt_1").await?;
    }
    Ok(())
}
