//! A marker counts only in the history of the database that it was written in: an event that Postgres does not have is
//! accepted when it is sent again, whatever Redis or a gateway's memory remember of it, and one that Postgres has is a
//! duplicate.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};

use anyhow::{Context as _, Result, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hapax::dev::{Postgres, PostgresOptions};

use crate::harness::gateway::Gateway;
use crate::harness::load::{LIMIT, metric, until_metric, until_redis_in_use};
use crate::harness::play::{hapax, settled};
use crate::harness::proxy::{BATCH_DONE, Direction, Hook, Proxy, Verdict};
use crate::harness::scene::{PATIENT, Scene, deliver, event};
use crate::harness::stores::{self, connect, private_postgres};
use crate::harness::wait::eventually;

/// What a gateway learns it learns soon; what it remembers it asks Redis for.
const ATTENTIVE: [&str; 3] = [
    "postgres.heartbeat = \"100ms\"",
    "postgres.connect_timeout = \"500ms\"",
    "fast_tier.memory_ttl = \"1ms\"",
];

/// No Redis: what the process remembers counts for hours.
const MEMORY: [&str; 6] = [
    "fast_tier.kind = \"memory\"",
    "fast_tier.url =",
    "fast_tier.prefix =",
    "fast_tier.timeout =",
    "fast_tier.lease =",
    "fast_tier.memory_ttl =",
];

/// A primary and its standbys, and a gateway whose DSN names them all.
struct Cluster {
    /// Reads the database of the server that takes writes.
    scene: Scene,
    primary: Postgres,
    standbys: Vec<Postgres>,
    gateway: Gateway,
    _front: Option<Proxy>,
}

impl Cluster {
    async fn start(standbys: usize, more: &[&str]) -> Result<Self> {
        Self::start_behind(standbys, more, |_| Ok(None)).await
    }

    /// `front` may put a proxy before the primary, which is then what the gateway connects to.
    async fn start_behind(
        standbys: usize,
        more: &[&str],
        front: impl FnOnce(&Postgres) -> Result<Option<Proxy>>,
    ) -> Result<Self> {
        let primary = private_postgres(PostgresOptions::default()).await?;
        let mut scene = Scene::on(&primary, stores::redis().url()).await?;
        scene.stores.redis_prefix = format!("{}:", primary.address());
        let standbys = (0..standbys).map(|number| {
            let name = format!("standby-{number}-of-{}", primary.address().port());
            Ok(primary.start_standby(&name, &PostgresOptions::default())?)
        });
        let standbys: Vec<Postgres> = standbys.collect::<Result<_>>()?;
        let first = primary.address().to_string();
        let front = front(&primary)?;
        let others = standbys.iter().map(Postgres::address);
        let hosts = [front.as_ref().map_or(primary.address(), Proxy::address)].into_iter().chain(others);
        let hosts: Vec<String> = hosts.map(|address| address.to_string()).collect();
        let direct = scene.stores.postgres_url.clone();
        scene.stores.postgres_url = direct.replace(&first, &hosts.join(","));
        let gateway = scene.gateway(&[&PATIENT, &ATTENTIVE[..], more].concat()).await?;
        scene.stores.postgres_url = direct;
        until_metric(&gateway, "hapax_heartbeat_age_seconds", "", |age| age >= 0).await?;
        Ok(Self { scene, primary, standbys, gateway, _front: front })
    }

    /// What is committed from now on never reaches the standbys; what is committed already does.
    async fn cut_replication(&self) -> Result<()> {
        let row = connect(&self.primary.url("postgres")).await?;
        let row = row.query_one("select pg_current_wal_flush_lsn()::text", &[]).await?;
        for standby in &self.standbys {
            let client = connect(&standby.url("postgres")).await?;
            let has_all = format!("select 1 where pg_last_wal_replay_lsn() >= '{}'", row.get::<_, &str>(0));
            eventually(LIMIT, async || client.query_opt(&has_all, &[]).await.ok()?).await?;
            client.batch_execute("alter system set primary_conninfo = ''").await?;
            client.batch_execute("select pg_reload_conf()").await?;
            let cut = "select 1 where not exists (select from pg_stat_wal_receiver)";
            eventually(LIMIT, async || client.query_opt(cut, &[]).await.ok()?).await?;
        }
        Ok(())
    }

    /// Makes the next standby the primary; waits until the gateway has noticed. The old one is to be out of service.
    async fn promote(&mut self) -> Result<Postgres> {
        let promoted = self.standbys.remove(0);
        connect(&promoted.url("postgres")).await?.query_one("select pg_promote()", &[]).await?;
        let old = std::mem::replace(&mut self.primary, promoted);
        self.scene.stores.postgres_url = self.primary.url(&self.scene.stores.database);
        noticed(&self.scene, &self.gateway).await?;
        Ok(old)
    }

    /// The primary dies, the next standby takes its place.
    async fn fail_over(&mut self) -> Result<()> {
        self.primary.kill()?;
        self.promote().await?.kill()?;
        Ok(())
    }
}

/// The generation, as it stands in markers.
async fn generation(scene: &Scene) -> Result<String> {
    let row = scene.database().await?.query_one("select hapax.generation()", &[]).await?;
    Ok(URL_SAFE_NO_PAD.encode(row.get::<_, &[u8]>(0)))
}

/// Waits until the gateway knows the database's generation, which is another one than it knew before.
async fn noticed(scene: &Scene, gateway: &Gateway) -> Result<()> {
    let now = generation(scene).await?;
    gateway.log(|line| line["generation"] == now.as_str()).await?;
    Ok(())
}

/// Delivers an event, which must be answered 200 with this outcome.
async fn gives(gateway: &Gateway, id: &str, outcome: &str) -> Result<()> {
    let answer = deliver(gateway.listen()?, "stripe", &event(id, "")).await?;
    ensure!((answer.status, answer.outcome.as_str()) == (200, outcome), "{id}: {answer:?}, not {outcome}");
    Ok(())
}

/// The same, and which tier it was that knew the event.
async fn is_known_to(gateway: &Gateway, id: &str, tier: &str) -> Result<()> {
    let label = format!("tier=\"{tier}\"");
    let before = metric(gateway, "hapax_duplicates_total", &label).await?;
    gives(gateway, id, "duplicate").await?;
    let after = metric(gateway, "hapax_duplicates_total", &label).await?;
    ensure!(after == before + 1, "{id}: not {tier} knew it");
    Ok(())
}

async fn assert_once(scene: &Scene, ids: &[&str]) -> Result<()> {
    let ids: Vec<String> = ids.iter().map(ToString::to_string).collect();
    let found = scene.assert_once(&ids).await?;
    ensure!(found.effects.len() == ids.len(), "{found:?}");
    Ok(())
}

/// Waits until the event's marker is in Redis; returns its generation.
async fn marker(scene: &Scene, id: &str) -> Result<String> {
    let key = scene.redis_key("stripe", id);
    let find = async || {
        let value = scene.markers().await.ok()?.remove(&key)??;
        Some(value.strip_prefix("D ")?.split(' ').next()?.to_owned())
    };
    eventually(LIMIT, find).await.with_context(|| format!("no marker of {id}"))
}

#[tokio::test]
async fn a_standby_that_lacks_acknowledged_events_takes_them_anew() -> Result<()> {
    for (tier, more) in [("redis", &[][..]), ("memory", &MEMORY[..])] {
        let mut cluster = Cluster::start(1, more).await?;
        gives(&cluster.gateway, "kept", "accepted").await?;
        cluster.cut_replication().await?;
        gives(&cluster.gateway, "lost", "accepted").await?;
        if tier == "redis" {
            settled(&cluster.scene, 2).await?;
        }
        for id in ["kept", "lost"] {
            is_known_to(&cluster.gateway, id, tier).await?;
        }
        cluster.fail_over().await?;
        gives(&cluster.gateway, "lost", "accepted").await?;
        is_known_to(&cluster.gateway, "kept", "postgres").await?;
        if tier == "redis" {
            // Settled anew, so that the next ones need not be asked for.
            let now = generation(&cluster.scene).await?;
            let anew = async || (marker(&cluster.scene, "kept").await.ok()? == now).then_some(());
            eventually(LIMIT, anew).await?;
            assert_eq!(marker(&cluster.scene, "lost").await?, now);
        }
        for id in ["kept", "lost"] {
            is_known_to(&cluster.gateway, id, tier).await?;
        }
        assert_once(&cluster.scene, &["kept", "lost"]).await?;
    }
    Ok(())
}

/// Both have the same system identifier and, once promoted, the same timeline.
#[tokio::test]
async fn two_standbys_promoted_in_turn() -> Result<()> {
    let mut cluster = Cluster::start(2, &[]).await?;
    gives(&cluster.gateway, "kept", "accepted").await?;
    cluster.cut_replication().await?;
    gives(&cluster.gateway, "first", "accepted").await?;
    cluster.fail_over().await?;
    gives(&cluster.gateway, "second", "accepted").await?;
    settled(&cluster.scene, 3).await?;
    is_known_to(&cluster.gateway, "second", "redis").await?;
    cluster.fail_over().await?;
    for id in ["first", "second"] {
        gives(&cluster.gateway, id, "accepted").await?;
    }
    is_known_to(&cluster.gateway, "kept", "postgres").await?;
    assert_once(&cluster.scene, &["kept", "first", "second"]).await?;
    Ok(())
}

/// The copy has the same system identifier, timeline, epoch and file nodes.
#[tokio::test]
async fn a_restored_copy_of_the_data_with_redis_kept() -> Result<()> {
    let mut cluster = Cluster::start(0, &[]).await?;
    gives(&cluster.gateway, "kept", "accepted").await?;
    let copy = cluster.primary.data().with_extension("copy");
    cluster.primary.stop()?;
    move_or_copy("cp", cluster.primary.data(), &copy)?;
    cluster.primary.restart()?;
    noticed(&cluster.scene, &cluster.gateway).await?;
    gives(&cluster.gateway, "lost", "accepted").await?;
    is_known_to(&cluster.gateway, "kept", "postgres").await?;
    settled(&cluster.scene, 2).await?;
    cluster.primary.stop()?;
    std::fs::remove_dir_all(cluster.primary.data())?;
    move_or_copy("mv", &copy, cluster.primary.data())?;
    cluster.primary.restart()?;
    noticed(&cluster.scene, &cluster.gateway).await?;
    gives(&cluster.gateway, "lost", "accepted").await?;
    is_known_to(&cluster.gateway, "kept", "postgres").await?;
    assert_once(&cluster.scene, &["kept", "lost"]).await?;
    Ok(())
}

/// Owners and modes are kept, which Postgres insists on.
fn move_or_copy(program: &str, from: &Path, to: &Path) -> Result<()> {
    let mut command = Command::new(program);
    if program == "cp" {
        command.arg("-Rp");
    }
    ensure!(command.arg(from).arg(to).status()?.success(), "{program}");
    Ok(())
}

/// One is a copy of the other, epoch included, and both write markers under one prefix.
#[tokio::test]
async fn two_databases_of_one_cluster_on_one_redis() -> Result<()> {
    let one = Scene::new().await?;
    let mut other = Scene::new().await?;
    let copy = format!("{}-copy", one.stores.database);
    let create = format!("create database \"{copy}\" template \"{}\"", one.stores.database);
    connect(&stores::postgres().url("postgres")).await?.batch_execute(&create).await?;
    other.stores.postgres_url = stores::postgres().url(&copy);
    other.stores.redis_prefix.clone_from(&one.stores.redis_prefix);
    let (first, second) = (one.gateway(&ATTENTIVE).await?, other.gateway(&ATTENTIVE).await?);
    for gateway in [&first, &second] {
        until_redis_in_use(gateway, true).await?;
        until_metric(gateway, "hapax_heartbeat_age_seconds", "", |age| age >= 0).await?;
    }
    gives(&first, "evt_1", "accepted").await?;
    settled(&one, 1).await?;
    is_known_to(&first, "evt_1", "redis").await?;
    gives(&second, "evt_1", "accepted").await?;
    let anew = generation(&other).await?;
    eventually(LIMIT, async || (marker(&other, "evt_1").await.ok()? == anew).then_some(())).await?;
    is_known_to(&second, "evt_1", "redis").await?;
    is_known_to(&first, "evt_1", "postgres").await?;
    for scene in [&one, &other] {
        assert_once(scene, &["evt_1"]).await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_new_epoch_by_hand() -> Result<()> {
    for (tier, more) in [("redis", &[][..]), ("memory", &MEMORY[..])] {
        let scene = Scene::new().await?;
        let gateway = scene.gateway(&[&ATTENTIVE, more].concat()).await?;
        until_metric(&gateway, "hapax_heartbeat_age_seconds", "", |age| age >= 0).await?;
        if tier == "redis" {
            until_redis_in_use(&gateway, true).await?;
        }
        gives(&gateway, "evt_1", "accepted").await?;
        if tier == "redis" {
            settled(&scene, 1).await?;
        }
        is_known_to(&gateway, "evt_1", tier).await?;

        let before = generation(&scene).await?;
        let config = gateway.config().to_string_lossy().into_owned();
        let shown = hapax(&["epoch", "--config", &config]).await?;
        let text = String::from_utf8(shown.stdout)?;
        assert!(shown.status.success() && text.contains(&before), "{text}");
        assert_eq!(generation(&scene).await?, before, "only asked for");
        is_known_to(&gateway, "evt_1", tier).await?;

        let renewed = hapax(&["epoch", "--new", "--config", &config]).await?;
        let text = String::from_utf8(renewed.stdout)?;
        let now = generation(&scene).await?;
        assert!(renewed.status.success() && text.contains(&now) && now != before, "{text}");
        noticed(&scene, &gateway).await?;
        is_known_to(&gateway, "evt_1", "postgres").await?;
        if tier == "redis" {
            eventually(LIMIT, async || (marker(&scene, "evt_1").await.ok()? == now).then_some(())).await?;
        }
        is_known_to(&gateway, "evt_1", tier).await?;
        assert_once(&scene, &["evt_1"]).await?;
    }
    Ok(())
}

/// What an operator did to the ledger is noticed too: it has another file.
#[tokio::test]
async fn a_truncated_ledger() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&ATTENTIVE).await?;
    until_redis_in_use(&gateway, true).await?;
    until_metric(&gateway, "hapax_heartbeat_age_seconds", "", |age| age >= 0).await?;
    gives(&gateway, "evt_1", "accepted").await?;
    settled(&scene, 1).await?;
    is_known_to(&gateway, "evt_1", "redis").await?;
    scene.database().await?.batch_execute("truncate hapax.ledger, hapax.body, fx.effect").await?;
    noticed(&scene, &gateway).await?;
    gives(&gateway, "evt_1", "accepted").await?;
    assert_once(&scene, &["evt_1"]).await?;
    Ok(())
}

/// Holds up the first bytes that are as wanted, and with them everything else in the proxy, until it is opened.
struct Gate {
    held: Arc<AtomicBool>,
    /// Dropped to open it.
    closed: mpsc::Sender<()>,
}

impl Gate {
    fn new(direction: Direction, wanted: &'static [u8]) -> (Self, Hook) {
        let held = Arc::new(AtomicBool::new(false));
        let (closed, opened) = mpsc::channel();
        let (holds, opened) = (Arc::clone(&held), Mutex::new(opened));
        let hook = move |from: Direction, bytes: &[u8]| {
            let is_it = from == direction && bytes.windows(wanted.len()).any(|window| window == wanted);
            if is_it && !holds.swap(true, Ordering::SeqCst) {
                // Ends with an error once the sender is gone; a test that fails does not hang.
                opened.lock().map(|opened| opened.recv_timeout(LIMIT).ok()).ok();
            }
            Verdict::Forward
        };
        (Self { held, closed }, Box::new(hook))
    }

    async fn holds(&self) -> Result<()> {
        let held = || std::future::ready(self.held.load(Ordering::SeqCst).then_some(()));
        eventually(LIMIT, held).await.context("the bytes do not come")
    }

    fn open(self) {
        drop(self.closed);
    }
}

/// The marker of the old history arrives in Redis after the failover.
#[tokio::test]
async fn a_marker_that_is_late() -> Result<()> {
    let (gate, hook) = Gate::new(Direction::ToServer, b"\nD ");
    let redis = Proxy::start_with(stores::redis().address(), hook)?;
    let through = format!("fast_tier.url = \"{}\"", stores::redis().url_at(redis.address()));
    let mut cluster = Cluster::start(1, &[&through]).await?;
    until_redis_in_use(&cluster.gateway, true).await?;
    let old = generation(&cluster.scene).await?;
    cluster.cut_replication().await?;
    gives(&cluster.gateway, "lost", "accepted").await?;
    gate.holds().await?;
    cluster.fail_over().await?;
    gate.open();
    assert_eq!(marker(&cluster.scene, "lost").await?, old);
    until_redis_in_use(&cluster.gateway, true).await?;
    gives(&cluster.gateway, "lost", "accepted").await?;
    gives(&cluster.gateway, "lost", "duplicate").await?;
    assert_once(&cluster.scene, &["lost"]).await?;
    Ok(())
}

/// The old primary confirms a commit to a gateway that knows of the new one already: the marker speaks of the old.
#[tokio::test]
async fn a_confirmation_that_is_late() -> Result<()> {
    let (gate, hook) = Gate::new(Direction::ToClient, BATCH_DONE);
    let front = |primary: &Postgres| Proxy::start_with(primary.address(), hook).map(Some);
    let mut cluster = Cluster::start_behind(1, &[], front).await?;
    until_redis_in_use(&cluster.gateway, true).await?;
    let old = generation(&cluster.scene).await?;
    cluster.cut_replication().await?;
    let (to, body) = (cluster.gateway.listen()?, event("lost", ""));
    let delivery = tokio::spawn(async move { deliver(to, "stripe", &body).await });
    gate.holds().await?;
    // Not dead, which would break the connection: cut off.
    cluster.primary.pause();
    let mut cut_off = cluster.promote().await?;
    gate.open();
    assert_eq!(delivery.await??.outcome, "accepted");
    assert_eq!(marker(&cluster.scene, "lost").await?, old);
    // Its connections are still in the pool.
    cut_off.kill()?;
    gives(&cluster.gateway, "lost", "accepted").await?;
    assert_once(&cluster.scene, &["lost"]).await?;
    Ok(())
}

/// Nobody knows then which history it is, so that Postgres has to say.
#[tokio::test]
async fn without_a_heartbeat_markers_answer_nothing() -> Result<()> {
    for (tier, more) in [("redis", &[][..]), ("memory", &MEMORY[..])] {
        let silent = Arc::new(AtomicBool::new(false));
        let cuts = Arc::clone(&silent);
        // The question, as the heartbeat prepares it on each new connection.
        let question = b"select hapax.generation()";
        let hook: Hook = Box::new(move |direction, bytes| {
            let asked = direction == Direction::ToServer
                && bytes.windows(question.len()).any(|window| window == question);
            if asked && cuts.load(Ordering::SeqCst) { Verdict::Cut } else { Verdict::Forward }
        });
        let mut scene = Scene::new().await?;
        let direct = scene.stores.postgres_url.clone();
        let proxy = Proxy::start_with(stores::postgres().address(), hook)?;
        scene.stores.postgres_url = stores::postgres().url_at(proxy.address(), &scene.stores.database);
        let short = ["postgres.generation_age_max = \"2s\""];
        let gateway = scene.gateway(&[&ATTENTIVE, &short[..], more].concat()).await?;
        scene.stores.postgres_url = direct;
        until_metric(&gateway, "hapax_heartbeat_age_seconds", "", |age| age >= 0).await?;
        if tier == "redis" {
            until_redis_in_use(&gateway, true).await?;
        }
        gives(&gateway, "evt_1", "accepted").await?;
        if tier == "redis" {
            settled(&scene, 1).await?;
        }
        is_known_to(&gateway, "evt_1", tier).await?;
        silent.store(true, Ordering::SeqCst);
        proxy.cut();
        until_metric(&gateway, "hapax_heartbeat_age_seconds", "", |age| age >= 2).await?;
        for _ in 0..3 {
            is_known_to(&gateway, "evt_1", "postgres").await?;
        }
        silent.store(false, Ordering::SeqCst);
        until_metric(&gateway, "hapax_heartbeat_age_seconds", "", |age| age == 0).await?;
        is_known_to(&gateway, "evt_1", tier).await?;
        assert_once(&scene, &["evt_1"]).await?;
    }
    Ok(())
}
