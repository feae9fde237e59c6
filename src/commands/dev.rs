//! `hapax dev`: private Postgres and Redis, a demo source with a demo effect, and the gateway, in one command.

use std::collections::BTreeMap;
use std::fs::File;
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::json;

use super::client::Target;
use super::send::{Report, Sender, send_all};
use super::{Exit, Signals, runtime, say};
use crate::config::{self, Config};
use crate::dev::{FolderOptions, Stores, StoresOptions};
use crate::effect::Effects;
use crate::identify::EventKey;
use crate::log::Log;
use crate::metrics::Metrics;
use crate::serve::{self, Running};
use crate::sign::fresh_id;
use crate::{claim, db};

/// Deliveries of the one event that `--once` sends, all at the same time.
const DELIVERIES: u32 = 10;
const DATABASE: &str = "hapax";
const SOURCE: &str = "stripe";
const ANY_PORT: ([u8; 4], u16) = ([127, 0, 0, 1], 0);
const PREFIX: &str = "hapax:dev:";

/// How to run the private set-up.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Send one signed event ten times in parallel, show what happened, and end.
    #[arg(long)]
    once: bool,
    /// Where to make the folder with all files of this run; default: the system's place for temporary files.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Leave the folder behind at the end.
    #[arg(long)]
    keep: bool,
    /// Address of the gateway; port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:0", value_name = "ADDRESS")]
    listen: SocketAddr,
}

/// The private stores and the sources of one run.
#[derive(Debug)]
struct Demo {
    stores: Stores,
    sources: [DemoSource; 3],
}

#[derive(Debug)]
struct DemoSource {
    name: &'static str,
    provider: &'static str,
    secret: String,
    effect: &'static str,
    only_inserts: bool,
}

impl DemoSource {
    fn settings(&self) -> String {
        let Self { name, provider, secret, effect, only_inserts } = self;
        let parallel = if *only_inserts { "effect_parallel = true\n" } else { "" };
        format!(
            "[source.{name}]\nprovider = \"{provider}\"\nsecrets = [\"{secret}\"]\neffect = \"{effect}\"\n{parallel}"
        )
    }
}

/// Starts everything, serves until a signal comes (or shows one event and ends), stops everything.
///
/// # Errors
/// 69 if something cannot be started, 1 if `--once` did not see one effect.
pub fn run(options: &Options) -> Result<(), Exit> {
    if let Some(dir) = &options.dir {
        std::fs::create_dir_all(dir)?;
    }
    let folder = FolderOptions { parent: options.dir.clone(), keep: options.keep };
    let stores = Stores::start(&StoresOptions { folder, ..StoresOptions::default() });
    let demo = Demo { stores: stores.map_err(Exit::unavailable)?, sources: demo_sources() };
    demo.stores.postgres.create_database(DATABASE).map_err(Exit::unavailable)?;
    let config = Arc::new(demo.write_settings(options)?);

    let metrics = Arc::new(Metrics::new());
    let dropped = metrics.log_lines_dropped.clone();
    let log = if options.once {
        Log::start_in(File::create(demo.folder().join("gateway.log"))?, dropped)?
    } else {
        Log::start(dropped)?
    };
    log.install(&config.log.level);
    let gateway = run_gateway(options, &demo, &config, metrics, log.clone());
    let done = runtime(config.server.threads)?.block_on(gateway);
    log.flush(Duration::from_secs(1));
    if options.keep {
        say(format!("kept: {}", demo.folder().display()))?;
    }
    done
}

async fn run_gateway(
    options: &Options,
    demo: &Demo,
    config: &Arc<Config>,
    metrics: Arc<Metrics>,
    log: Log,
) -> Result<(), Exit> {
    let mut client = db::connect(&config.postgres).await?;
    db::migrate(&mut client).await?;
    client
        .batch_execute(include_str!("../../sql/demo.sql"))
        .await
        .map_err(|error| Exit::unavailable(db::describe(&error)))?;
    let running = serve::start(Arc::clone(config), &Effects::default(), metrics, log).await?;
    demo.write_facts(options, &running)?;
    demo.introduce(options, &running)?;
    if options.once {
        let shown = demo.show_once(config, &running, &client).await;
        running.stop(Duration::ZERO).await;
        return shown;
    }
    let mut signals = Signals::listen()?;
    say("serving until Ctrl-C")?;
    tokio::select! {
        () = signals.next() => {}
        () = running.broken() => return Err(Exit::software("a background loop fails again and again; see the log")),
    }
    running.stop(Duration::ZERO).await;
    Ok(())
}

fn demo_sources() -> [DemoSource; 3] {
    let stripe = format!("whsec_{}", hex::encode(rand::random::<[u8; 16]>()));
    let github = hex::encode(rand::random::<[u8; 16]>());
    let webhooks = format!("whsec_{}", STANDARD.encode(rand::random::<[u8; 32]>()));
    let source = |name, provider, secret, effect| {
        let only_inserts = effect != "none";
        DemoSource { name, provider, secret, effect, only_inserts }
    };
    [
        source(SOURCE, "stripe", stripe, "demo.apply_payment"),
        source("github", "github", github, "none"),
        source("webhooks", "standard-webhooks", webhooks, "none"),
    ]
}

impl Demo {
    fn folder(&self) -> &Path {
        self.stores.folder().path()
    }

    /// The settings of this run, as a file, so that every other command can be tried on it.
    fn write_settings(&self, options: &Options) -> Result<Config, Exit> {
        let path = self.folder().join("hapax.toml");
        write_private(&path, &self.settings(options, options.listen, ANY_PORT.into()))?;
        match Config::load(&path) {
            Ok(loaded) => Ok(loaded.config),
            Err(problems) => Err(Exit::software(config::report(&problems))),
        }
    }

    fn settings(&self, options: &Options, listen: SocketAddr, admin: SocketAddr) -> String {
        let (postgres, redis) = (self.stores.postgres.url(DATABASE), self.stores.redis.url());
        let requests = if options.once { "failed" } else { "all" };
        let stores = format!(
            r#"# Made by `hapax dev`; the stores, the secrets and this file live as long as it runs.
[server]
listen = "{listen}"
[admin]
listen = "{admin}"
[log]
requests = "{requests}"
[postgres]
url = "{postgres}"
[fast_tier]
kind = "redis"
url = "{redis}"
prefix = "{PREFIX}"
"#
        );
        let sources: String = self.sources.iter().map(DemoSource::settings).collect();
        stores + &sources
    }

    /// `dev.json`: what another program needs to work with this run.
    fn write_facts(&self, options: &Options, running: &Running) -> Result<(), Exit> {
        // Now with the ports that were free.
        let settings = self.settings(options, running.listen, running.admin);
        write_private(&self.folder().join("hapax.toml"), &settings)?;
        let sources = self.sources.iter().map(|source| {
            let url = format!("http://{}/in/{}", running.listen, source.name);
            let facts = json!({ "url": url, "provider": source.provider, "secret": source.secret });
            (source.name.to_owned(), facts)
        });
        let facts = json!({
            "config": self.folder().join("hapax.toml"),
            "gateway": format!("http://{}", running.listen),
            "admin": format!("http://{}", running.admin),
            "sources": sources.collect::<serde_json::Map<_, _>>(),
            "postgres": self.stores.postgres.url(DATABASE),
            "redis": self.stores.redis.url(),
            "redis_prefix": PREFIX,
            "pids": {
                "hapax": std::process::id(),
                "postgres": self.stores.postgres.pid(),
                "redis": self.stores.redis.pid(),
            },
            "logs": self.stores.logs(),
        });
        write_private(&self.folder().join("dev.json"), &format!("{facts:#}\n"))
    }

    fn introduce(&self, options: &Options, running: &Running) -> Result<(), Exit> {
        let listen = running.listen;
        say(format!("postgres   {}  (fsync and synchronous_commit on)", self.stores.postgres.address()))?;
        say(format!("redis      {}", self.stores.redis.address()))?;
        say(format!("gateway    http://{listen}/in/stripe, /in/github, /in/webhooks"))?;
        say(format!("operators  http://{}/ready, /metrics", running.admin))?;
        if options.once && !options.keep {
            return Ok(());
        }
        let settings = self.folder().join("hapax.toml");
        let program = std::env::current_exe()?;
        let (settings, program) = (settings.display(), program.display());
        say(format!("settings   {settings}"))?;
        say(format!("facts      {}", self.folder().join("dev.json").display()))?;
        say(format!("try        {program} send --config {settings} --source stripe -n 10 --parallel 10"))
    }

    /// Sends one event ten times at once, then reads back from both stores what came of it.
    async fn show_once(
        &self,
        config: &Config,
        running: &Running,
        client: &tokio_postgres::Client,
    ) -> Result<(), Exit> {
        let sender = demo_sender(config, running)?;
        say(format!("\none signed event, sent {DELIVERIES} times at the same time:"))?;
        let report = send_all(&Arc::new(sender), DELIVERIES, DELIVERIES).await?;
        let Report { sent, status, outcomes, id } = &report;
        let id = id.as_deref().unwrap_or_default();
        let key = EventKey::of(SOURCE, "-", id);
        let (redis, ttl_ms) = settled_marker(config, &key).await?;
        let rows = |query: &'static str| count(client, query, id);
        let ledger_rows =
            rows("select count(*) from hapax.events where source = 'stripe' and event_id = $1").await?;
        let effects = rows("select count(*) from demo.payment where event_id = $1").await?;
        let (postgres, redis_at) = (self.stores.postgres.address(), self.stores.redis.address());
        say(format!("\nevent {id}: read back from {postgres} and {redis_at}:"))?;
        say(json!({
            "sent": sent, "status": status, "outcomes": outcomes,
            "ledger_rows": ledger_rows, "effects": effects, "redis": redis, "ttl_ms": ttl_ms,
        }))?;
        let answered = |outcome: &str| outcomes.get(outcome).copied().unwrap_or_default();
        let holds = status.get(&200) == Some(&DELIVERIES)
            && (answered("accepted"), answered("duplicate")) == (1, DELIVERIES - 1)
            && (ledger_rows, effects) == (1, 1)
            && redis.starts_with("D ")
            && ttl_ms > 0;
        if holds {
            return Ok(());
        }
        Err(Exit::failed("this is not what one event sent ten times should leave behind"))
    }
}

/// Signs a sample event of the demo source.
fn demo_sender(config: &Config, running: &Running) -> Result<Sender, Exit> {
    let source = config.sources.get(SOURCE).ok_or_else(|| Exit::software("the demo source is missing"))?;
    let key = source.keys.first().ok_or_else(|| Exit::software("the demo source has no secret"))?;
    let id = fresh_id();
    let body = source.scheme.sample(&id, jiff::Timestamp::now());
    Ok(Sender {
        scheme: Arc::clone(&source.scheme),
        key: key.clone(),
        public_url: None,
        claims: BTreeMap::new(),
        target: Target::parse(&format!("http://{}/in/{SOURCE}", running.listen)).map_err(Exit::software)?,
        body: body.ok_or_else(|| Exit::software("the demo provider has no sample"))?.into(),
        id,
        headers: Vec::new(),
    })
}

/// For this user's eyes only: the files hold secrets.
fn write_private(path: &Path, text: &str) -> Result<(), Exit> {
    use std::io::Write as _;
    let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(text.as_bytes()).map_err(Exit::software)
}

/// The marker, once it is a done one: the answers did not wait for it.
async fn settled_marker(config: &Config, key: &EventKey) -> Result<(String, i64), Exit> {
    for _ in 0..100 {
        let found = claim::read_marker(&config.fast_tier, key).await.map_err(Exit::unavailable)?;
        if let Some((marker, ttl_ms)) = found.filter(|(marker, _)| marker.starts_with("D ")) {
            return Ok((marker, ttl_ms));
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(Default::default())
}

async fn count(client: &tokio_postgres::Client, query: &str, id: &str) -> Result<i64, Exit> {
    let row = client.query_one(query, &[&id]).await.map_err(Exit::unavailable)?;
    row.try_get(0).map_err(Exit::unavailable)
}
