//! What a source loses to two others beside it, of which one's effect takes 200 ms and the other's always fails: its
//! throughput beside them, divided by that without them. Ends with exit code 1 if the median is below 0.8.

#[expect(dead_code, reason = "what the tests stand on; not all of it is needed here")]
#[path = "../tests/it/harness/mod.rs"]
mod harness;
mod senders;

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Result, ensure};
use hapax::dev::PostgresOptions;

use crate::harness::gateway::Start;
use crate::harness::play::ready;
use crate::harness::scene::{SECRET, Scene, event};
use crate::harness::stores::{private_postgres, redis};
use crate::senders::{Senders, median, rate, say};

const SENDERS: usize = 32;
const SLOW: usize = 4;
const FAILING: usize = 8;
const LEAST: f64 = 0.8;

/// New events of a source, with `more` in their bodies.
fn start(
    to: SocketAddr,
    source: &'static str,
    run: usize,
    count: usize,
    more: &'static str,
    status: &'static [u16],
) -> Senders {
    let body = move |sender, number| event(&format!("{source}_{run}_{sender}_{number}"), more);
    Senders::start(to, source, count, status, body)
}

/// New events per second of the good source.
async fn good(to: SocketAddr, run: usize, time: Duration) -> Result<f64> {
    let mut senders = [start(to, "other", run, SENDERS, "", &[200])];
    let rate = rate(&mut senders, time).await?;
    let [senders] = senders;
    senders.finish().await?;
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
        let alone = good(to, 2 * round, time).await?;
        let mut sleeping = start(to, "slow", round, SLOW, "\"do\":\"sleep\",\"seconds\":0.2", &[200]);
        let mut failing = start(to, "stripe", round, FAILING, "\"do\":\"raise\"", &[503]);
        let beside = good(to, 2 * round + 1, time).await?;
        sleeping.check()?;
        failing.check()?;
        let (slow, failed) = (sleeping.counts().answered, failing.counts().answered);
        say(&format!(
            "alone {alone:.0}/s, beside {beside:.0}/s: {:.2} (slow {slow}, failed {failed})",
            beside / alone
        ))?;
        ensure!(!measured || (slow > 0 && failed > 0), "the others did nothing");
        ratios.push(beside / alone);
    }
    let median = median(&mut ratios)?;
    say(&format!("isolation {median:.2} (by round: {ratios:.2?})"))?;
    ensure!(!measured || median >= LEAST, "isolation is below {LEAST}");
    Ok(())
}
