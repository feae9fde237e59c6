//! Whichever background loop fails, the gateway goes on: it is started again, nothing that waits is lost, and an operator sees it.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use hapax::effect::Effects;
use hapax::tasks::{Age, UNREADY_AFTER};
use http::StatusCode;

use crate::harness::library::Library;
use crate::harness::load::burst;
use crate::harness::play::{LIMIT, Numbers};
use crate::harness::proxy::{Mode, Proxy};
use crate::harness::scene::{PATIENT, SECRET, Scene, deliver, event};
use crate::harness::stores;
use crate::harness::wait::eventually;

/// Loops that a gateway has with Redis, the three sources of a scene, and one whose provider hands its secret over. They wait
/// for work most of the time.
const LOOPS: [&str; 11] = [
    "admin_listener",
    "handovers",
    "heartbeat",
    "lane:fx.apply",
    "lane:fx.apply_other",
    "lane:none",
    "listener",
    "redis_connection",
    "redis_markers",
    "reload",
    "schema",
];

/// Looks at files that need no signal; duplicates that ask Redis; a slow machine is no reason not to be ready.
const OURS: [&str; 3] = [
    "server.reload_check = \"20ms\"",
    "fast_tier.memory_ttl = \"1ms\"",
    "postgres.generation_age_max = \"60s\"",
];
/// As patient as this provider allows.
const ASANA: [&str; 5] = [
    "source.asana.provider = \"asana\"",
    "postgres.statement_timeout = \"6s\"",
    "postgres.record_timeout = \"7s\"",
    "server.deadline = \"9s\"",
    "server.drain = \"20s\"",
];

const HOUR: Duration = Duration::from_secs(3600);

struct Kept {
    scene: Scene,
    gateway: Library,
    folder: tempfile::TempDir,
    /// Before Redis.
    proxy: Proxy,
    settings: String,
}

impl Kept {
    /// Ready, with Redis, and all loops have said that they are alive.
    async fn start(more: &[&str]) -> Result<Self> {
        let (mut scene, folder) = (Scene::new().await?, tempfile::tempdir()?);
        let proxy = Proxy::start(stores::redis().address())?;
        let direct = scene.stores.redis_url.clone();
        scene.stores.redis_url = format!("redis://{}", proxy.address());
        let settings = scene.settings(&[&OURS[..], more].concat(), "");
        scene.stores.redis_url = direct;
        let file = folder.path().join("hapax.toml");
        std::fs::write(&file, &settings)?;
        let gateway = Library::follow(&file, &Effects::default()).await?;
        let kept = Self { scene, gateway, folder, proxy, settings };
        kept.until_redis(1).await?;
        let all = async || {
            let states = kept.gateway.tasks().loops(Instant::now());
            let alive = states.iter().all(|state| matches!(state.age, Some(Age::Since(_))));
            (alive && kept.gateway.ask("/ready").await.ok()?.0 == StatusCode::OK).then_some(())
        };
        eventually(LIMIT, all).await.context("not all loops are alive")?;
        Ok(kept)
    }

    async fn number(&self, name: &str, label: &str) -> Result<u64> {
        Ok(Numbers(self.gateway.ask("/metrics").await?.1).sum(name, &[label]))
    }

    async fn until_redis(&self, in_use: u64) -> Result<()> {
        let is = async || (self.number("hapax_redis_in_use", "").await.ok()? == in_use).then_some(());
        eventually(LIMIT, is).await.with_context(|| format!("hapax_redis_in_use is not {in_use}"))
    }

    /// The connections to Redis are reset, and the gateway notices.
    async fn cut_redis(&self) -> Result<()> {
        let openings = "hapax_breaker_openings_total";
        let before = self.number(openings, "").await?;
        self.proxy.cut();
        let noticed = async || {
            // Only a command can fail.
            deliver(self.gateway.listen(), "stripe", &event(&format!("cut_{before}"), "")).await.ok()?;
            (self.number(openings, "").await.ok()? > before).then_some(())
        };
        eventually(LIMIT, noticed).await.context("the cut is not noticed")
    }

    /// A new event is accepted, and known from then on; Redis gets to know it too.
    async fn works(&self, source: &str, id: &str) -> Result<()> {
        for wanted in ["accepted", "duplicate"] {
            let answer = deliver(self.gateway.listen(), source, &event(id, "")).await?;
            ensure!((answer.status, &*answer.outcome) == (200, wanted), "{id} is not {wanted}: {answer:?}");
        }
        let key = self.scene.redis_key(source, id);
        let done = async || {
            let markers = self.scene.markers().await.ok()?;
            markers.get(&key)?.as_ref()?.starts_with("D ").then_some(())
        };
        eventually(LIMIT, done).await.with_context(|| format!("no marker for {id}"))
    }

    /// Another source is taken up from the file.
    async fn reloads(&self, name: &str) -> Result<()> {
        let source = format!(
            "[source.{name}]\nprovider = \"stripe\"\nsecrets = [\"{SECRET}\"]\neffect = \"fx.apply\"\n"
        );
        replace(&self.folder.path().join("hapax.toml"), &(self.settings.clone() + &source))?;
        let body = event(&format!("to_{name}"), "");
        let taken = async || {
            let answer = deliver(self.gateway.listen(), name, &body).await.ok()?;
            (answer.status == 200).then_some(())
        };
        eventually(LIMIT, taken).await.with_context(|| format!("{name} is not taken up"))
    }

    /// Those of [`LOOPS`] that would be found to be silent in an hour if nothing moved from now on.
    fn stuck(&self) -> Vec<Arc<str>> {
        let states = self.gateway.tasks().loops(Instant::now() + HOUR);
        let idle = Some(Age::Since(Duration::ZERO));
        let known = states.into_iter().filter(|state| LOOPS.contains(&&*state.name));
        known.filter(|state| state.age != idle).map(|state| state.name).collect()
    }

    /// Ends the loop; it has failed `failures` times then.
    async fn fail(&self, name: &str, failures: u64) -> Result<()> {
        let tasks = self.gateway.tasks();
        let failed = async || (tasks.fail(name) == 1).then_some(());
        eventually(LIMIT, failed).await.with_context(|| format!("{name} does not run"))?;
        let counted = || {
            let states = tasks.loops(Instant::now());
            let state = states.iter().find(|state| &*state.name == name);
            std::future::ready(state.filter(|state| state.failures == failures).map(drop))
        };
        eventually(LIMIT, counted).await.with_context(|| format!("{name} has not failed {failures} times"))
    }
}

fn replace(path: &Path, text: &str) -> Result<()> {
    let new = path.with_extension("new");
    std::fs::write(&new, text)?;
    Ok(std::fs::rename(new, path)?)
}

#[tokio::test]
async fn each_loop_may_fail() -> Result<()> {
    let kept = Kept::start(&ASANA).await?;
    let states = kept.gateway.tasks().loops(Instant::now());
    let names: BTreeSet<Arc<str>> = states.into_iter().map(|state| state.name).collect();
    for name in LOOPS {
        assert!(names.contains(name), "{name} is not among {names:?}");
    }
    for (nth, name) in names.iter().enumerate() {
        kept.fail(name, 1).await?;
        // In the pause, and in the life after it.
        for source in ["stripe", "other", "plain"] {
            kept.works(source, &format!("{source}_{nth}")).await.with_context(|| format!("after {name}"))?;
        }
        kept.reloads(&format!("added_{nth}")).await.with_context(|| format!("after {name}"))?;
    }
    for name in &names {
        let label = format!("loop=\"{name}\"");
        assert_eq!(kept.number("hapax_loop_failures_total", &label).await?, 1, "{name}");
        assert!(
            kept.gateway.ask("/metrics").await?.1.contains(&format!("hapax_loop_age_seconds{{{label}}} "))
        );
    }
    assert_eq!(kept.gateway.ask("/ready").await?, (StatusCode::OK, "ready\n".to_owned()));
    let idle = || std::future::ready(kept.stuck().is_empty().then_some(()));
    eventually(LIMIT, idle).await.with_context(|| format!("they look stuck: {:?}", kept.stuck()))?;
    kept.scene.assert_once([]).await?;
    Ok(())
}

/// The loop's life ends while it tries to connect; or just as the breaker opens.
#[tokio::test]
async fn redis_is_joined_again_after_its_loop_failed() -> Result<()> {
    let kept = Kept::start(&PATIENT).await?;
    kept.proxy.set(Mode::Refuse);
    kept.cut_redis().await?;
    kept.fail("redis_connection", 1).await?;
    kept.proxy.set(Mode::Pass);
    kept.until_redis(1).await?;
    kept.works("stripe", "between").await?;

    kept.fail("redis_connection", 2).await?;
    kept.cut_redis().await?;
    kept.until_redis(1).await?;
    kept.works("stripe", "after").await
}

/// What a lane has in its hands is answered at once, what waits in its queue is recorded by its next life.
#[tokio::test]
async fn a_lane_that_fails_loses_nothing() -> Result<()> {
    let one_by_one = ["postgres.batch_events = 1", "postgres.lock_timeout = \"13s\""];
    let kept = Kept::start(&[&PATIENT[..], &one_by_one].concat()).await?;
    let (to, hold) = (kept.gateway.listen(), kept.scene.hold().await?);
    let first = tokio::spawn(async move { deliver(to, "stripe", &event("held", "\"do\":\"wait\"")).await });
    kept.scene.waiting(1).await?;
    // It waits for Postgres, which is not to be idle.
    assert!(kept.stuck().contains(&"lane:fx.apply".into()));
    let names: Vec<String> = (0..20).map(|nth| format!("evt_{nth}")).collect();
    let bodies = names.iter().map(|id| event(id, "")).collect();
    let others = tokio::spawn(async move { burst(to, "stripe", bodies).await });
    kept.fail("lane:fx.apply", 1).await?;
    // Before its effect ends.
    let answer = first.await??;
    assert_eq!((answer.status, answer.retry_after.is_some()), (503, true), "{answer:?}");
    assert!(kept.gateway.cause("held").await?.contains("its lane failed or was stopped"));
    hold.execute("select pg_advisory_unlock(7)", &[]).await?;
    let others = others.await??;
    let refused = others.iter().filter(|answer| answer.status != 200).count();
    assert!(refused <= 1, "one was in its hands at most: {others:?}");
    for id in names.iter().chain([&"held".to_owned()]) {
        assert_eq!(deliver(to, "stripe", &event(id, "")).await?.status, 200);
    }
    assert_eq!(kept.scene.assert_once(&names).await?.effects.len(), names.len() + 1);
    Ok(())
}

#[tokio::test]
async fn a_loop_that_fails_again_and_again_makes_it_unready() -> Result<()> {
    let kept = Kept::start(&[]).await?;
    for failures in 1..=UNREADY_AFTER {
        assert_eq!(kept.gateway.ask("/ready").await?.0, StatusCode::OK);
        kept.fail("redis_markers", failures.into()).await?;
    }
    let said = (
        StatusCode::SERVICE_UNAVAILABLE,
        "background loops: redis_markers failed 3 times in a row; the log says why\n".to_owned(),
    );
    assert_eq!(kept.gateway.ask("/ready").await?, said);
    // It serves on: the balancer may know nobody better.
    kept.works("stripe", "evt_1").await?;
    assert_eq!(kept.gateway.ask("/live").await?.0, StatusCode::OK);
    assert!(kept.gateway.tasks().failing(Instant::now() + HOUR).is_empty());
    Ok(())
}
