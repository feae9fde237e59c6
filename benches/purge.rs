//! What new events lose to the deletion of old ones: a ledger full of rows that are past their horizon, new events through a
//! gateway, and by turns no deletion and the deletion with its defaults, which goes on where it stood. Throughput with it,
//! divided by that without it. Ends with exit code 1 if the median is below 0.9, or if a row went that is within the horizon.
//!
//! `--rows N` (10000000) says how many, `--rounds N` (5) and `--seconds N` (20, for each half of a round) for how long.

#[expect(dead_code, reason = "what the tests stand on; not all of it is needed here")]
#[path = "../tests/it/harness/mod.rs"]
mod harness;
mod senders;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use hapax::config::{self, Config};
use hapax::dev::PostgresOptions;
use hapax::retention::{Clock, Counts, Limits, Mode, Progress, run_once};
use tokio::task::JoinHandle;
use tokio_postgres::Client as Database;

use crate::harness::gateway::Start;
use crate::harness::play::ready;
use crate::harness::scene::{Scene, event};
use crate::harness::stores::{private_postgres, redis};
use crate::senders::{Senders, median, rate, say};

const SENDERS: usize = 64;
const LEAST: f64 = 0.9;
/// One row in so many is within the horizon, in among the others.
const YOUNG: i64 = 100;

/// The deletion, for as long as it is not stopped.
struct Purge {
    deleted: Arc<AtomicU64>,
    task: JoinHandle<Result<()>>,
}

impl Purge {
    fn start(config: &Config) -> Self {
        let deleted = Arc::<AtomicU64>::default();
        let (count, postgres) = (Arc::clone(&deleted), config.postgres.clone());
        // All that is there is old; that is not what is to be found out here.
        let retention = config::Retention { share_max: 1.0, ..config.retention.clone() };
        let limits = Limits { retention, mode: Mode::Routine };
        let task = tokio::spawn(async move {
            let mut session = hapax::db::connect(&postgres).await?;
            // The last one was dropped and did not leave its place.
            session.batch_execute("update hapax.retention set held_until = now()").await?;
            let (mut clock, mut counts) = (Clock::default(), Counts::default());
            let mut tell = |counts: &Counts, _: Progress| count.store(counts.events, Ordering::Relaxed);
            Ok(run_once(&mut session, &limits, &mut clock, &mut counts, &mut tell).await?)
        });
        Self { deleted, task }
    }

    /// Stops it where it is; rows that it deleted.
    async fn stop(self) -> Result<u64> {
        self.task.abort();
        match self.task.await {
            Ok(ended) => {
                ended?;
                anyhow::bail!("it came to its end within a round: give it more --rows, or less --seconds")
            }
            Err(stopped) => ensure!(stopped.is_cancelled(), "{stopped}"),
        }
        Ok(self.deleted.load(Ordering::Relaxed))
    }
}

async fn fill(database: &Database, rows: i64) -> Result<()> {
    let started = Instant::now();
    database.batch_execute("set synchronous_commit = off").await?;
    let fill = "insert into hapax.ledger (received_at, settled_at, token, status, key, digest, source, scope, event_id)
        select at, at, n, 'done', uuid_send(gen_random_uuid()), sha256(int8send(n)), 'stripe', '-', 'evt_old_' || n
        from generate_series(1, $1::bigint) n, lateral (
            select now() - case when n % $2::bigint = 0 then interval '1 day' else interval '40 days' end as at) a";
    database.execute(fill, &[&rows, &YOUNG]).await?;
    database.batch_execute("vacuum (analyze) hapax.ledger").await?;
    database.batch_execute("checkpoint").await?;
    say(&format!("{rows} rows in {:.0} s", started.elapsed().as_secs_f64()))
}

async fn tell_sizes(database: &Database, when: &str) -> Result<()> {
    let sizes =
        "select pg_relation_size(relid) / 1048576, pg_indexes_size(relid) / 1048576, n_live_tup, n_dead_tup,
                        autovacuum_count
                 from pg_stat_user_tables where relid = 'hapax.ledger'::regclass";
    let row = database.query_one(sizes, &[]).await?;
    let number = |at: usize| row.get::<_, i64>(at);
    say(&format!(
        "{when}: ledger {} MiB, its indexes {} MiB, {} rows, {} dead, autovacuum ran {} times",
        number(0),
        number(1),
        number(2),
        number(3),
        number(4)
    ))
}

async fn young(database: &Database) -> Result<i64> {
    let young = "select count(*) from hapax.ledger where received_at >= now() - interval '35 days'";
    Ok(database.query_one(young, &[]).await?.get(0))
}

/// What was asked for on the command line.
struct Size {
    rows: i64,
    rounds: i64,
    time: Duration,
    measured: bool,
}

impl Size {
    fn read() -> Result<Self> {
        let arguments: Vec<String> = std::env::args().collect();
        let has = |name: &str| arguments.iter().any(|argument| argument == name);
        // Under `cargo test`, and with --quick, it shows only that everything works.
        let measured = has("--bench") && !has("--quick");
        let number = |name: &str, default: i64| -> Result<i64> {
            let Some(at) = arguments.iter().position(|argument| argument == name) else { return Ok(default) };
            arguments.get(at + 1).and_then(|value| value.parse().ok()).with_context(|| format!("{name} N"))
        };
        let rows = number("--rows", if measured { 10_000_000 } else { 30_000 })?;
        let rounds = number("--rounds", if measured { 5 } else { 1 })?;
        let seconds = u64::try_from(number("--seconds", 20)?)?;
        let time = if measured { Duration::from_secs(seconds) } else { Duration::from_millis(200) };
        Ok(Self { rows, rounds, time, measured })
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let size = Size::read()?;
    let options =
        PostgresOptions { settings: vec![("max_wal_size".into(), "4GB".into())], ..Default::default() };
    let postgres = private_postgres(options).await?;
    let scene = Scene::on(&postgres, redis().url()).await?;
    let database = scene.database().await?;
    fill(&database, size.rows).await?;
    let settings = scene.settings(&["log.requests = \"failed\"", "retention.every = \"off\""], "");
    let parsed = Config::parse("hapax.toml", &settings, &|_| None);
    let config = parsed.map_err(|problems| anyhow::anyhow!(config::report(&problems)))?.config;
    let gateway = Start::new(settings).start().await?;
    ready(&gateway).await?;
    tell_sizes(&database, "before").await?;

    let (before, mut answered, mut deleted, mut ratios) = (young(&database).await?, 0, 0, Vec::new());
    for round in 0..size.rounds {
        let mut rates = [0.0; 2];
        // The other one first in every other round.
        let turns = if round % 2 == 0 { [false, true] } else { [true, false] };
        for with in turns {
            let purge = with.then(|| Purge::start(&config));
            let body = move |sender, number| event(&format!("evt_{round}_{with}_{sender}_{number}"), "");
            let mut senders = [Senders::start(gateway.listen()?, "stripe", SENDERS, &[200], body)];
            let started = Instant::now();
            let reached = rate(&mut senders, size.time).await?;
            if let Some(purge) = purge {
                let rows = purge.stop().await?;
                let took = started.elapsed().as_secs_f64();
                deleted += rows;
                say(&format!(
                    "deleted {rows} rows in {took:.1} s: {:.0}/s",
                    u32::try_from(rows).map(f64::from)? / took
                ))?;
            }
            let [senders] = senders;
            let counts = senders.finish().await?;
            ensure!(counts.accepted == counts.answered, "{counts:?}");
            answered += i64::try_from(counts.accepted)?;
            if let Some(rate) = rates.get_mut(usize::from(with)) {
                *rate = reached;
            }
        }
        let [without, with] = rates;
        say(&format!("without {without:.0}/s, with {with:.0}/s: {:.2}", with / without))?;
        ratios.push(with / without);
        tell_sizes(&database, "now").await?;
    }
    let left = young(&database).await?;
    say(&format!(
        "{deleted} rows deleted; within the horizon {before} before, {answered} added, {left} now"
    ))?;
    ensure!(left == before + answered, "rows within the horizon are not those that there were and that came");
    ensure!(!size.measured || deleted > 0, "nothing was deleted");
    let median = median(&mut ratios)?;
    say(&format!("purge {median:.2} (by round: {ratios:.2?})"))?;
    ensure!(!size.measured || median >= LEAST, "the ratio is below {LEAST}");
    Ok(())
}
