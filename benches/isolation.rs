//! What a source loses to two others beside it, of which one's effect takes 200 ms and the other's always fails: its
//! throughput beside them, divided by that without them. Ends with exit code 1 if the median is below 0.8.

#[expect(dead_code, reason = "what the tests stand on; not all of it is needed here")]
#[path = "../tests/it/harness/mod.rs"]
mod harness;

use std::io::Write as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use hapax::dev::PostgresOptions;
use tokio::task::JoinSet;

use crate::harness::client::Client;
use crate::harness::gateway::Start;
use crate::harness::play::ready;
use crate::harness::scene::{SECRET, Scene, deliver_on, event};
use crate::harness::stores::{private_postgres, redis};

const SENDERS: usize = 32;
const SLOW: usize = 4;
const FAILING: usize = 8;
const LEAST: f64 = 0.8;

/// Senders that send new events to a source until they are dropped.
struct Senders {
    answered: Arc<AtomicU64>,
    tasks: JoinSet<Result<()>>,
}

impl Senders {
    fn start(
        to: SocketAddr,
        source: &'static str,
        run: usize,
        count: usize,
        more: &'static str,
        status: u16,
    ) -> Self {
        let (answered, mut tasks) = (Arc::<AtomicU64>::default(), JoinSet::new());
        for sender in 0..count {
            let answered = Arc::clone(&answered);
            tasks.spawn(async move {
                let mut client = Client::new(to);
                for number in 0_u64.. {
                    let body = event(&format!("{source}_{run}_{sender}_{number}"), more);
                    let answer = deliver_on(&mut client, source, &body).await?;
                    ensure!(answer.status == status, "{source}: {answer:?}");
                    answered.fetch_add(1, Ordering::Relaxed);
                }
                Ok(())
            });
        }
        Self { answered, tasks }
    }

    fn check(&mut self) -> Result<()> {
        self.tasks.try_join_next().map_or(Ok(()), |ended| ended?)
    }
}

/// New events per second of the good source.
async fn rate(to: SocketAddr, run: usize, time: Duration) -> Result<f64> {
    let mut senders = Senders::start(to, "other", run, SENDERS, "", 200);
    tokio::time::sleep(time / 4).await;
    let (before, started) = (senders.answered.load(Ordering::Relaxed), Instant::now());
    tokio::time::sleep(time).await;
    let events = u32::try_from(senders.answered.load(Ordering::Relaxed) - before)?;
    let rate = f64::from(events) / started.elapsed().as_secs_f64();
    senders.check()?;
    Ok(rate)
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    // Under `cargo test` it shows only that everything works.
    let measured = std::env::args().any(|argument| argument == "--bench");
    let (rounds, time) = if measured { (7, Duration::from_secs(2)) } else { (1, Duration::from_millis(200)) };

    let postgres = private_postgres(PostgresOptions::default()).await?;
    let scene = Scene::on(&postgres, redis().url()).await?;
    scene
        .database()
        .await?
        .batch_execute(
            "create function fx.apply_slow(e hapax.event) returns void language plpgsql as $$
             begin perform fx.apply(e); end $$",
        )
        .await?;
    let slow = format!(
        "[source.slow]\nprovider = \"stripe\"\nsecrets = [\"{SECRET}\"]\neffect = \"fx.apply_slow\"\n"
    );
    let gateway = Start::new(scene.settings(&["log.requests = \"failed\""], &slow)).start().await?;
    ready(&gateway).await?;
    let to = gateway.listen()?;

    let mut ratios = Vec::new();
    for round in 0..rounds {
        let alone = rate(to, 2 * round, time).await?;
        let mut sleeping = Senders::start(to, "slow", round, SLOW, "\"do\":\"sleep\",\"seconds\":0.2", 200);
        let mut failing = Senders::start(to, "stripe", round, FAILING, "\"do\":\"raise\"", 503);
        let beside = rate(to, 2 * round + 1, time).await?;
        sleeping.check()?;
        failing.check()?;
        let (slow, failed) =
            (sleeping.answered.load(Ordering::Relaxed), failing.answered.load(Ordering::Relaxed));
        say(&format!(
            "alone {alone:.0}/s, beside {beside:.0}/s: {:.2} (slow {slow}, failed {failed})",
            beside / alone
        ))?;
        ensure!(!measured || (slow > 0 && failed > 0), "the others did nothing");
        ratios.push(beside / alone);
    }
    ratios.sort_by(f64::total_cmp);
    let median = ratios.get(ratios.len() / 2).copied().context("rounds")?;
    say(&format!("isolation {median:.2} (by round: {ratios:.2?})"))?;
    ensure!(!measured || median >= LEAST, "isolation is below {LEAST}");
    Ok(())
}

fn say(text: &str) -> Result<()> {
    Ok(writeln!(std::io::stdout(), "{text}")?)
}
