//! A running gateway: everything started in order, and stopped in order, each step bounded.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use prometheus_client::metrics::gauge::Gauge;
use tokio::net::TcpListener;
use tokio::signal::unix::Signal;
use tokio::sync::{Mutex, watch};
use tokio::time::sleep;
use tracing::{error, info, warn};

use crate::admin::Admin;
use crate::claim::FastTier;
use crate::config::{self, Config, Effect, Files};
use crate::db::key_rule::KeyRule;
use crate::db::{self, Needs, Unready};
use crate::effect::Effects;
use crate::generation::Heartbeat;
use crate::ingest::Gateway;
use crate::keyring::Keyring;
use crate::log::Log;
use crate::metrics::Metrics;
use crate::record::Recorder;
use crate::reload::{self, Live, Reload};
use crate::retention;
use crate::server::{self, Closing, Door, Limits};
use crate::tasks::{Beat, Tasks};
use crate::work::Workers;

/// Pause between looks at a database that is not ready.
const SCHEMA_PAUSE: Duration = Duration::from_secs(1);
/// How often partitions are looked after.
const PARTITIONS_EVERY: Duration = Duration::from_secs(3600);

/// A started gateway.
#[derive(Debug)]
pub struct Running {
    /// Where providers are served; the port is a real one even if the settings say 0.
    pub listen: SocketAddr,
    /// Where operators are served.
    pub admin: SocketAddr,
    closing: Closing,
    admin_closing: Closing,
    live: Live,
    tasks: Tasks,
}

/// Starts the gateway. If Postgres can be reached and is not as it must be, nothing starts; if it cannot be
/// reached, the gateway starts, is not ready, and becomes so by itself.
///
/// `effects` are those that this program has for `effect = "rust:NAME"`.
///
/// # Errors
/// An effect that is not registered, a wrong database, an address that cannot be listened on, a wrong URL.
pub async fn start(
    config: Arc<Config>,
    effects: &Effects,
    metrics: Arc<Metrics>,
    log: Log,
) -> anyhow::Result<Running> {
    for name in effects.check(&config)? {
        warn!(effect = format!("rust:{name}"), "an effect is registered, and no source names it");
    }
    let tasks = Tasks::default();
    let schema_ready = Arc::new(AtomicBool::new(first_look(&config).await?));
    let listener = server::bind(config.server.listen)?;
    let admin_listener = server::bind(config.admin.listen)?;

    let heartbeat = Arc::new(Heartbeat::new(config.postgres.generation_age_max));
    let (settings, beaten) = (config.postgres.clone(), Arc::clone(&heartbeat));
    tasks
        .spawn_loop("heartbeat", move |beat| db::heartbeat_loop(settings.clone(), Arc::clone(&beaten), beat));
    let (current, watched) = watch::channel(Arc::clone(&config));
    let (kept, ready, counted) = (current.subscribe(), Arc::clone(&schema_ready), Arc::clone(&metrics));
    tasks.spawn_loop("retention", move |beat| {
        retention::run(kept.clone(), Arc::clone(&ready), Arc::clone(&counted), beat)
    });
    let ready = Arc::clone(&schema_ready);
    tasks.spawn_loop("schema", move |beat| watch_schema(watched.clone(), Arc::clone(&ready), beat));

    let tier = FastTier::start(&config.fast_tier, Arc::clone(&heartbeat), &metrics, &tasks)?;
    let pool = db::pool_when(&config.postgres, Arc::clone(&schema_ready))?;
    let sources = config.sources.values().map(AsRef::as_ref);
    let recorder = Recorder::start(&pool, &config.postgres, sources, effects, &metrics, &tasks)?;
    let keyring = Keyring::start(&config, Arc::clone(&metrics), tasks.clone())?;
    let workers = start_workers(
        (&config, current.subscribe()),
        (&tier, effects, Arc::clone(&schema_ready)),
        &metrics,
        &tasks,
    )?;
    let parts = (keyring, tier, recorder, workers);
    let gateway = Arc::new(Gateway::new(&config, parts, Arc::clone(&metrics), log.clone(), tasks.clone()));
    metrics.settings_in_use(jiff::Timestamp::now());

    let closing = Closing::default();
    let admin_closing = Closing::default();
    let admin = Admin {
        heartbeat,
        schema_ready,
        draining: Arc::clone(&closing.draining),
        metrics: Arc::clone(&metrics),
        tasks: tasks.clone(),
    };
    let running = Running {
        listen: listener.local_addr()?,
        admin: admin_listener.local_addr()?,
        closing: closing.clone(),
        admin_closing: admin_closing.clone(),
        live: Live {
            current,
            gateway: Arc::clone(&gateway),
            effects: effects.clone(),
            metrics: Arc::clone(&metrics),
            log,
            draining: Arc::clone(&closing.draining),
        },
        tasks: tasks.clone(),
    };
    let open = metrics.connections.clone();
    serve_on(("listener", listener), limits(&config.server), gateway, closing, open, &tasks);
    serve_on(
        ("admin_listener", admin_listener),
        Limits { connections_max: ADMIN_CONNECTIONS_MAX, ..limits(&config.server) },
        admin,
        admin_closing,
        Gauge::default(),
        &tasks,
    );
    info!(listen = %running.listen, admin = %running.admin, sources = config.sources.len(), "listening");
    Ok(running)
}

/// Whether the database is as it must be; not yet, if it cannot be reached.
async fn first_look(config: &Config) -> Result<bool, Unready> {
    match take_up_schema(&config.postgres, &needs(config)).await {
        Ok(()) => Ok(true),
        Err(Unready::Unreachable(cause)) => {
            warn!(cause, "postgres cannot be reached yet; starting not ready");
            Ok(false)
        }
        Err(wrong) => Err(wrong),
    }
}

/// On connections of their own, so that whatever they do leaves those of recording alone.
fn start_workers(
    (config, current): (&Config, watch::Receiver<Arc<Config>>),
    (tier, effects, schema_ready): (&FastTier, &Effects, Arc<AtomicBool>),
    metrics: &Arc<Metrics>,
    tasks: &Tasks,
) -> anyhow::Result<Workers> {
    let pool = db::work_pool(config, schema_ready)?;
    let tuned = || tier.tuned(&config.fast_tier);
    let workers = Workers::start(pool, current, Arc::new(tuned()), effects, Arc::clone(metrics), tasks);
    workers.take_up(workers.prepare(config, tuned())?);
    Ok(workers)
}

fn serve_on<S: server::Service>(
    (name, listener): (&'static str, TcpListener),
    limits: Limits,
    service: S,
    closing: Closing,
    open: Gauge,
    tasks: &Tasks,
) {
    let stop = closing.stop.clone();
    let door = Door::new(listener, limits, closing, open, tasks.clone());
    drop(tasks.spawn_until(name, &stop, move |beat| server::accept(door.clone(), service.clone(), beat)));
}

fn limits(server: &config::Server) -> Limits {
    let config::Server { connections_max, head_max, head_timeout, idle_timeout, .. } = *server;
    Limits { connections_max, head_max, head_timeout, idle_timeout }
}

/// Operators come in small numbers.
const ADMIN_CONNECTIONS_MAX: usize = 64;

impl Running {
    /// From now on takes up changed settings: at each signal, and when one of the `files` that the settings in use come from
    /// holds something else.
    pub fn follow(&self, path: PathBuf, files: Files, signal: Signal) {
        let reload = Arc::new(Mutex::new((Reload::new(self.live.clone(), path, files), signal)));
        self.tasks.spawn_loop("reload", move |beat| reload::run(Arc::clone(&reload), beat));
    }

    /// How long the settings in use want a stopping gateway to serve on.
    #[must_use]
    pub fn drain(&self) -> Duration {
        self.live.current.borrow().server.drain
    }

    /// The loops that keep it going.
    #[must_use]
    pub fn tasks(&self) -> &Tasks {
        &self.tasks
    }

    /// Completes when a background loop cannot be kept running, which should never happen.
    pub async fn broken(&self) {
        self.tasks.broken().await;
    }

    /// Not ready → serve on for `drain` → accept no more → finish what is in flight → stop the loops.
    pub async fn stop(self, drain: Duration) {
        info!(
            drain_ms = millis(drain),
            "stopping: not ready, serving on for the drain time; a second signal ends at once"
        );
        self.closing.draining.store(true, Ordering::Relaxed);
        sleep(drain).await;
        self.tasks.begin_stop();
        self.closing.stop.cancel();
        self.admin_closing.stop.cancel();
        // No source's deadline is longer than the drain time.
        if !self.tasks.finish(self.live.current.borrow().server.drain).await {
            warn!("stopping: some work did not end within the drain time");
        }
        info!("stopped");
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// What the sources need of the database.
#[must_use]
pub fn needs(config: &Config) -> Needs {
    Needs { effects: effects(config), key_rules: KeyRule::of_all(config) }
}

/// The effect functions that the sources name, each once.
fn effects(config: &Config) -> Vec<String> {
    let functions = config.sources.values().filter_map(|source| match &source.effect {
        Effect::None | Effect::Pull | Effect::Rust { .. } => None,
        Effect::Function { name, .. } => Some(name.clone()),
    });
    functions.collect::<BTreeSet<_>>().into_iter().collect()
}

/// Whether the database is as this version needs it; stores the key rules of new sources.
///
/// # Errors
/// What is not.
pub(crate) async fn take_up_schema(settings: &config::Postgres, needs: &Needs) -> Result<(), Unready> {
    let client = db::connect(settings).await.map_err(|error| Unready::Unreachable(error.to_string()))?;
    let limit = settings.connect_timeout;
    let taken_up = tokio::time::timeout(limit, db::take_up(&client, needs)).await;
    taken_up.unwrap_or_else(|_elapsed| Err(Unready::Unreachable(format!("no answer within {limit:?}"))))
}

/// Until the database is ready for the settings in use, looks again and again; then keeps its partitions made ahead.
async fn watch_schema(current: watch::Receiver<Arc<Config>>, ready: Arc<AtomicBool>, beat: Beat) {
    let mut failures: u32 = 0;
    while !ready.load(Ordering::Relaxed) {
        beat.alive();
        let config = Arc::clone(&current.borrow());
        match take_up_schema(&config.postgres, &needs(&config)).await {
            Ok(()) => {
                info!("the database is ready");
                ready.store(true, Ordering::Relaxed);
            }
            Err(wrong) => {
                failures += 1;
                if failures.is_power_of_two() {
                    error!(error = %wrong, failures, "the database is not ready");
                }
                beat.waiting(sleep(SCHEMA_PAUSE)).await;
            }
        }
    }
    // What connecting takes never changes.
    let settings = current.borrow().postgres.clone();
    loop {
        beat.alive();
        match db::make_body_partitions(&settings).await {
            Ok(made) => {
                info!(made, "day partitions for bodies are made ahead");
                beat.waiting(sleep(PARTITIONS_EVERY)).await;
            }
            Err(cause) => {
                warn!(cause = %cause, "day partitions could not be made; trying again");
                beat.waiting(sleep(SCHEMA_PAUSE * 10)).await;
            }
        }
    }
}
