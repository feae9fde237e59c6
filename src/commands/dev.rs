//! `hapax dev`: private Postgres and Redis, a demo source with a demo effect, and the gateway, in one command.

use std::fs::File;
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
    listen: std::net::SocketAddr,
}

/// Starts everything, serves until a signal comes (or shows one event and ends), stops everything.
///
/// # Errors
/// 69 if something cannot be started, 1 if `--once` did not see one effect.
pub fn run(options: &Options) -> Result<(), Exit> {
    let folder = FolderOptions { parent: options.dir.clone(), keep: options.keep };
    let stores =
        Stores::start(&StoresOptions { folder, ..StoresOptions::default() }).map_err(Exit::unavailable)?;
    stores.postgres.create_database(DATABASE).map_err(Exit::unavailable)?;
    let config = write_settings(&stores, options)?;

    let metrics = Arc::new(Metrics::new());
    let log_path = stores.folder().path().join("gateway.log");
    let dropped = metrics.log_lines_dropped.clone();
    let log =
        if options.once { Log::start_in(File::create(&log_path)?, dropped)? } else { Log::start(dropped)? };
    log.install(&config.log.level);
    let done = runtime(config.server.threads)?.block_on(run_gateway(
        options,
        &stores,
        &config,
        metrics,
        log.clone(),
    ));
    log.flush(Duration::from_secs(1));
    if options.keep {
        say(format!("kept: {}", stores.folder().path().display()))?;
    }
    done
}

async fn run_gateway(
    options: &Options,
    stores: &Stores,
    config: &Config,
    metrics: Arc<Metrics>,
    log: Log,
) -> Result<(), Exit> {
    let mut client = db::connect(&config.postgres).await?;
    db::migrate(&mut client).await?;
    client.batch_execute(include_str!("../../sql/demo.sql")).await.map_err(Exit::unavailable)?;
    let running = serve::start(config, metrics, log).await?;
    let files = write_facts(stores, &running)?;
    introduce(stores, &running, &files)?;
    if options.once {
        let shown = show_once(config, stores, &running, &client).await;
        running.stop(Duration::ZERO).await;
        return shown;
    }
    let mut signals = Signals::listen()?;
    say("serving until Ctrl-C")?;
    tokio::select! {
        () = signals.next() => {}
        () = running.broken() => return Err(Exit::software("a background loop ended; see the log")),
    }
    running.stop(Duration::ZERO).await;
    Ok(())
}

/// The settings of this run, as a file, so that every other command can be tried on it.
fn write_settings(stores: &Stores, options: &Options) -> Result<Config, Exit> {
    let stripe = format!("whsec_{}", hex::encode(rand::random::<[u8; 16]>()));
    let github = hex::encode(rand::random::<[u8; 16]>());
    let webhooks = format!("whsec_{}", STANDARD.encode(rand::random::<[u8; 32]>()));
    let (postgres, redis) = (stores.postgres.url(DATABASE), stores.redis.url());
    let listen = options.listen;
    let requests = if options.once { "failed" } else { "all" };
    let text = format!(
        r#"# Made by `hapax dev`; the stores, the secrets and this file live as long as it runs.
[server]
listen = "{listen}"
[admin]
listen = "127.0.0.1:0"
[log]
requests = "{requests}"
[postgres]
url = "{postgres}"
[fast_tier]
kind = "redis"
url = "{redis}"
prefix = "hapax:dev:"
[source.{SOURCE}]
provider = "stripe"
secrets = ["{stripe}"]
effect = "demo.apply_payment"
effect_parallel = true      # it only inserts
[source.github]
provider = "github"
secrets = ["{github}"]
effect = "none"
[source.webhooks]
provider = "standard-webhooks"
secrets = ["{webhooks}"]
effect = "none"
"#
    );
    let path = stores.folder().path().join("hapax.toml");
    write_private(&path, &text)?;
    match Config::load(&path) {
        Ok(loaded) => Ok(loaded.config),
        Err(problems) => Err(Exit::software(config::report(&problems))),
    }
}

struct Files {
    settings: PathBuf,
    facts: PathBuf,
}

/// `dev.json`: what another program needs to work with this run.
fn write_facts(stores: &Stores, running: &Running) -> Result<Files, Exit> {
    let folder = stores.folder().path();
    let files = Files { settings: folder.join("hapax.toml"), facts: folder.join("dev.json") };
    let base = format!("http://{}", running.listen);
    let facts = json!({
        "config": files.settings,
        "urls": {
            "gateway": base,
            "admin": format!("http://{}", running.admin),
            "stripe": format!("{base}/in/stripe"),
            "github": format!("{base}/in/github"),
            "webhooks": format!("{base}/in/webhooks"),
        },
        "postgres": stores.postgres.url(DATABASE),
        "redis": stores.redis.url(),
        "redis_prefix": "hapax:dev:",
        "pids": {
            "hapax": std::process::id(),
            "postgres": stores.postgres.pid(),
            "redis": stores.redis.pid(),
        },
        "logs": stores.logs(),
    });
    write_private(&files.facts, &format!("{facts:#}\n"))?;
    Ok(files)
}

/// For this user's eyes only: the files hold secrets.
fn write_private(path: &Path, text: &str) -> Result<(), Exit> {
    use std::io::Write as _;
    let mut file = File::options().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(text.as_bytes()).map_err(Exit::software)
}

fn introduce(stores: &Stores, running: &Running, files: &Files) -> Result<(), Exit> {
    let (settings, facts) = (files.settings.display(), files.facts.display());
    say(format!("postgres   {}  (fsync and synchronous_commit on)", stores.postgres.address()))?;
    say(format!("redis      {}", stores.redis.address()))?;
    say(format!("gateway    http://{}/in/stripe, /in/github, /in/webhooks", running.listen))?;
    say(format!("operators  http://{}/ready, /metrics", running.admin))?;
    say(format!("settings   {settings}"))?;
    say(format!("facts      {facts}"))?;
    say(format!(
        "try        hapax send --config {settings} --source stripe -n 10 --parallel 10 --url http://{}/in/stripe",
        running.listen
    ))
}

/// Sends one event ten times at once, then reads back from both stores what came of it.
async fn show_once(
    config: &Config,
    stores: &Stores,
    running: &Running,
    client: &tokio_postgres::Client,
) -> Result<(), Exit> {
    let source = config.sources.get(SOURCE).ok_or_else(|| Exit::software("the demo source is missing"))?;
    let key = source.keys.first().ok_or_else(|| Exit::software("the demo source has no secret"))?;
    let id = fresh_id();
    let body = source.scheme.sample(&id, jiff::Timestamp::now());
    let sender = Sender {
        scheme: Arc::clone(&source.scheme),
        key: key.clone(),
        public_url: None,
        target: Target::parse(&format!("http://{}/in/{SOURCE}", running.listen)).map_err(Exit::software)?,
        body: body.ok_or_else(|| Exit::software("the demo provider has no sample"))?.into(),
        id,
    };
    say(format!("\none signed event, sent {DELIVERIES} times at the same time:"))?;
    let report = send_all(&Arc::new(sender), DELIVERIES, DELIVERIES).await?;
    let id = report.id.clone().unwrap_or_default();
    let key = EventKey::of(SOURCE, &source.scope, &id);
    let (redis, ttl_ms) = settled_marker(config, &key).await?;
    let rows = |query: &'static str| count(client, query, &id);
    let ledger_rows =
        rows("select count(*) from hapax.events where source = 'stripe' and event_id = $1").await?;
    let effects = rows("select count(*) from demo.payment where event_id = $1").await?;
    say(format!(
        "\nevent {id}: read back from {} and {}:",
        stores.postgres.address(),
        stores.redis.address()
    ))?;
    let Report { sent, status, outcomes, .. } = &report;
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
        Ok(())
    } else {
        Err(Exit::failed("this is not what one event sent ten times should leave behind"))
    }
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
