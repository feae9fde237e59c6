//! How fast a gateway drains a queue while another session holds the xmin horizon, so that no dead row and no index entry of
//! one can be removed: the rate under that, divided by the rate without it. The target answers at once. Ends with exit code 1
//! if the median of the rounds is below 0.8.
//!
//! Each round drains once without the other session, then again and again with it for as long as the round's hold lasts (two
//! minutes in the last ones); the last of those counts. Before the next round the tables are vacuumed.

#[expect(dead_code, reason = "what the tests stand on; not all of it is needed here")]
#[path = "../tests/it/harness/mod.rs"]
mod harness;
#[expect(dead_code, reason = "not all of it is needed here")]
mod senders;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, Result, ensure};
use hapax::dev::PostgresOptions;
use rustix::process::Signal;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_postgres::Client as Database;

use crate::harness::gateway::{Gateway, Start};
use crate::harness::scene::Scene;
use crate::harness::stores::{private_postgres, redis};
use crate::senders::{median, say};

const LEAST: f64 = 0.8;
const CONCURRENCY: usize = 64;
const QUEUE: &str = "target:drain";
const LIMIT: Duration = Duration::from_secs(300);
/// Takes that are timed at each length of the queue.
const TAKES: usize = 30;

/// Makes events with a job each, by the gateways' own statement, in batches of 64 as a busy gateway's.
const FILL: &str = "
    create procedure fx.fill(first integer, n integer) language plpgsql as $$
    declare
        at integer := first;
        c integer;
        keys bytea[];
        ids text[];
        nothing text[];
    begin
        while at < first + n loop
            c := least(64, first + n - at);
            select array_agg(s.k order by s.k), array_agg(s.i::text order by s.k) into keys, ids
            from (select substring(sha256(convert_to('drain ' || i, 'UTF8')) for 16) as k, i
                  from generate_series(at, at + c - 1) as i) s;
            nothing := array_fill(null::text, array[c]);
            perform hapax.record(keys, array_fill(1::bigint, array[c]), array_fill(sha256('x'), array[c]),
                array_fill('plain'::text, array[c]), array_fill('-'::text, array[c]), ids, nothing,
                nothing::timestamptz[], array_fill('{}'::text, array[c]),
                array_fill(convert_to(repeat('0123456789abcdef', 32), 'UTF8'), array[c]), nothing::integer[],
                array_fill(false, array[c]), nothing, array_fill(false, array[c]),
                null, null, false, '1s', 'off', interval '1 second', false,
                array(select generate_series(1, c)), array_fill('target:drain'::text, array[c]),
                array_fill(20, array[c]), nothing::integer[], nothing);
            commit;
            at := at + c;
        end loop;
    end $$;
";

/// Takes everything at once, and counts it; on a thread of its own.
struct Sink {
    address: SocketAddr,
    taken: Arc<AtomicUsize>,
}

impl Sink {
    fn start() -> Result<Self> {
        let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let taken = Arc::<AtomicUsize>::default();
        let count = Arc::clone(&taken);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        std::thread::Builder::new().name("sink".into()).spawn(move || {
            runtime.block_on(async move {
                let Ok(listener) = tokio::net::TcpListener::from_std(listener) else { return };
                while let Ok((stream, _)) = listener.accept().await {
                    tokio::spawn(sink(stream, Arc::clone(&count)));
                }
            });
        })?;
        Ok(Self { address, taken })
    }
}

/// A body is all of the bytes after a head; no request follows before its answer.
async fn sink(mut stream: tokio::net::TcpStream, taken: Arc<AtomicUsize>) {
    stream.set_nodelay(true).ok();
    let mut buffer = Vec::with_capacity(8192);
    loop {
        let complete = {
            let mut headers = [httparse::EMPTY_HEADER; 64];
            let mut head = httparse::Request::new(&mut headers);
            match head.parse(&buffer) {
                Ok(httparse::Status::Complete(length)) => {
                    let header =
                        head.headers.iter().find(|header| header.name.eq_ignore_ascii_case("content-length"));
                    let body = header
                        .and_then(|header| std::str::from_utf8(header.value).ok()?.parse::<usize>().ok());
                    buffer.len() >= length + body.unwrap_or(0)
                }
                _ => false,
            }
        };
        if complete {
            buffer.clear();
            taken.fetch_add(1, Ordering::Relaxed);
            if stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.is_err() {
                return;
            }
        } else if !matches!(stream.read_buf(&mut buffer).await, Ok(1..)) {
            return;
        }
    }
}

struct Bench {
    scene: Scene,
    database: Database,
    gateway: Gateway,
    sink: Sink,
    made: usize,
}

impl Bench {
    async fn start() -> Result<(Self, hapax::dev::Postgres)> {
        let postgres = private_postgres(PostgresOptions::default()).await?;
        let scene = Scene::on(&postgres, redis().url()).await?;
        let database = scene.database().await?;
        database.batch_execute(FILL).await?;
        let sink = Sink::start()?;
        let url = format!("target.drain.url = \"http://{}/hook\"", sink.address);
        let concurrency = format!("target.drain.concurrency = {CONCURRENCY}");
        let keys = [
            "log.level = \"info\"",
            "source.plain.targets = [\"drain\"]",
            "target.drain.kind = \"http\"",
            &url,
            &concurrency,
            "target.drain.allow_private = true",
            "work.poll = \"100ms\"",
        ];
        let gateway = Start::new(scene.settings(&keys, "")).start().await?;
        Ok((Self { scene, database, gateway, sink, made: 0 }, postgres))
    }

    /// Makes so many ready jobs while the gateway stands still.
    async fn fill(&mut self, jobs: usize) -> Result<()> {
        let (first, count) = (i32::try_from(self.made)?, i32::try_from(jobs)?);
        self.database.batch_execute(&format!("call fx.fill({first}, {count})")).await?;
        self.made += jobs;
        Ok(())
    }

    /// Jobs per second, from when the gateway goes on until the last job is done in the database.
    async fn drain(&mut self, jobs: usize) -> Result<f64> {
        let since = SystemTime::now();
        self.gateway.signal(Signal::STOP)?;
        self.fill(jobs).await?;
        self.gateway.signal(Signal::CONT)?;
        let started = Instant::now();
        self.until_drained(since).await?;
        #[expect(clippy::cast_precision_loss, reason = "a small number")]
        Ok(jobs as f64 / started.elapsed().as_secs_f64())
    }

    /// Until no job is left that was made since then.
    async fn until_drained(&self, since: SystemTime) -> Result<()> {
        let started = Instant::now();
        while self.sink.taken.load(Ordering::Relaxed) < self.made || self.pending(since).await? > 0 {
            ensure!(
                started.elapsed() < LIMIT,
                "{} of {}",
                self.sink.taken.load(Ordering::Relaxed),
                self.made
            );
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }

    /// Of the jobs that were made since then.
    async fn pending(&self, since: SystemTime) -> Result<i64> {
        // From the front it would go over the entries of all that ever was, and its time would count.
        let pending =
            "select count(*) from hapax.job where queue = $1 and state = 'pending' and due_at >= $2";
        Ok(self.database.query_one(pending, &[&QUEUE, &since]).await?.get(0))
    }

    /// Dead rows, and the sizes of what holds them.
    async fn sizes(&self) -> Result<String> {
        let query = "select pg_stat_force_next_flush(), s.n_live_tup, s.n_dead_tup, pg_relation_size('hapax.job'), \
                     pg_relation_size('hapax.job_due'), pg_relation_size('hapax.job_pkey'), \
                     (select n_dead_tup from pg_stat_user_tables where relid = 'hapax.ledger'::regclass) \
                     from pg_stat_user_tables s where s.relid = 'hapax.job'::regclass";
        let row = self.database.query_one(query, &[]).await?;
        let number = |at: usize| row.get::<_, i64>(at);
        let mib = |at: usize| number(at) / (1 << 20);
        Ok(format!(
            "job: {} live, {} dead, {} MiB, job_due {} MiB, job_pkey {} MiB; ledger: {} dead",
            number(1),
            number(2),
            mib(3),
            mib(4),
            mib(5),
            number(6)
        ))
    }

    /// What it costs to take 16 jobs and give them back, in milliseconds.
    async fn take_ms(&self, since: &str) -> Result<f64> {
        let take =
            format!("select count(*) from hapax.take_from('{QUEUE}', 16, interval '1 minute', {since})");
        let mut times = Vec::new();
        for _ in 0..TAKES {
            let started = Instant::now();
            self.database.batch_execute(&format!("begin; {take}; rollback")).await?;
            times.push(started.elapsed().as_secs_f64() * 1e3);
        }
        median(&mut times)
    }
}

/// Holds the xmin horizon until it is dropped.
async fn pin(scene: &Scene) -> Result<Database> {
    let session = scene.database().await?;
    session.batch_execute("begin isolation level repeatable read; select count(*) from hapax.job").await?;
    Ok(session)
}

async fn takes_of_growing_queues(bench: &mut Bench, lengths: &[usize]) -> Result<()> {
    bench.gateway.signal(Signal::STOP)?;
    let mut have = 0;
    for length in lengths {
        bench.fill(length - have).await?;
        have = *length;
        say(&format!("one take of 16 out of {length} jobs: {:.2} ms", bench.take_ms("'-infinity'").await?))?;
    }
    bench.gateway.signal(Signal::CONT)?;
    bench.until_drained(SystemTime::UNIX_EPOCH).await
}

/// One round; the rate with the other session, divided by that without it.
async fn round(bench: &mut Bench, jobs: usize, hold: Duration) -> Result<f64> {
    let plain = bench.drain(jobs).await?;
    say(&format!("without: {plain:.0}/s; {}", bench.sizes().await?))?;
    let session = pin(&bench.scene).await?;
    let begun = Instant::now();
    let mut pinned;
    loop {
        pinned = bench.drain(jobs).await?;
        let seconds = begun.elapsed().as_secs();
        say(&format!("    held for {seconds} s: {pinned:.0}/s; {}", bench.sizes().await?))?;
        if begun.elapsed() >= hold {
            break;
        }
    }
    bench.gateway.signal(Signal::STOP)?;
    bench.fill(64).await?;
    let (front, place) =
        (bench.take_ms("'-infinity'").await?, bench.take_ms("now() - interval '3 s'").await?);
    bench.gateway.signal(Signal::CONT)?;
    bench.until_drained(SystemTime::UNIX_EPOCH).await?;
    drop(session);
    // The server sees the end of a session a little later.
    let horizon = "select count(*) from pg_stat_activity where backend_xmin is not null and pid <> pg_backend_pid() \
                   and state = 'idle in transaction'";
    while bench.database.query_one(horizon, &[]).await?.get::<_, i64>(0) > 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    for table in ["job", "ledger", "share"] {
        bench.database.batch_execute(&format!("vacuum analyze hapax.{table}")).await?;
    }
    let ratio = pinned / plain;
    say(&format!(
        "with, at the end: {pinned:.0}/s: {ratio:.2}; one take {front:.2} ms from the front, {place:.2} ms from its place"
    ))?;
    Ok(ratio)
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    // Under `cargo test` it shows only that everything works.
    let measured = std::env::args().any(|argument| argument == "--bench");
    let seconds: &[u64] = if measured { &[20, 120, 120] } else { &[0] };
    let (jobs, lengths): (usize, &[usize]) =
        if measured { (20_000, &[1_000, 10_000, 50_000]) } else { (200, &[100]) };
    let (mut bench, _postgres) = Bench::start().await?;
    takes_of_growing_queues(&mut bench, lengths).await?;
    let mut ratios = Vec::new();
    for hold in seconds {
        ratios.push(round(&mut bench, jobs, Duration::from_secs(*hold)).await?);
    }
    let shown = format!("{ratios:.2?}");
    let median = median(&mut ratios).context("rounds")?;
    say(&format!("drained under a held horizon: {median:.2} of the rate without (by round: {shown})"))?;
    ensure!(!measured || median >= LEAST, "below {LEAST}");
    Ok(())
}
