//! What it costs that effects which lock the same rows in any order do not deadlock: two gateways on one database, new
//! events that each update two of 1 000 accounts. The rate with one batch at a time (the default), divided by that with
//! effects in a declared order (`lock`), where batches overlap. Ends with exit code 1 if the median is below 0.5, if
//! Postgres counted a deadlock, or if an account was not updated exactly once for each event.
//!
//! At the end the same without either (`effect_parallel`, wrongly declared), to show that this load does deadlock.

#[expect(dead_code, reason = "what the tests stand on; not all of it is needed here")]
#[path = "../tests/it/harness/mod.rs"]
mod harness;
mod senders;

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use hapax::dev::PostgresOptions;

use crate::harness::gateway::{Gateway, Start};
use crate::harness::load::LIMIT;
use crate::harness::play::ready;
use crate::harness::scene::{SECRET, Scene, event};
use crate::harness::stores::{private_postgres, redis};
use crate::harness::wait::eventually;
use crate::senders::{Counts, Senders, median, rate, say};

/// For each gateway.
const SENDERS: usize = 64;
const LEAST: f64 = 0.5;

/// The body names a pair of accounts and which of the two comes first. `fx.transfer` and its like lock them in that order;
/// `fx.transfer_ordered` the smaller one first, so that the order of pairs is one of all rows.
const ACCOUNTS: &str = "
    create table fx.account (id integer primary key, updates bigint not null);
    insert into fx.account select id, 0 from generate_series(0, 999) id;
    create function fx.update_two(first integer, second integer) returns void language plpgsql as $$
    begin
        update fx.account set updates = updates + 1 where id = first;
        update fx.account set updates = updates + 1 where id = second;
    end $$;
    create function fx.transfer(e hapax.event) returns void language plpgsql as $$
    declare
        event constant jsonb := hapax.json(e);
        pair constant integer := (event->>'pair')::integer;
        swap constant integer := (event->>'swap')::integer;
    begin
        perform fx.update_two(2 * pair + swap, 2 * pair + 1 - swap);
    end $$;
    create function fx.transfer_crossing(e hapax.event) returns void language plpgsql as $$
    begin perform fx.transfer(e); end $$;
    create function fx.transfer_ordered(e hapax.event) returns void language plpgsql as $$
    declare
        pair constant integer := (hapax.json(e)->>'pair')::integer;
    begin
        perform fx.update_two(2 * pair, 2 * pair + 1);
    end $$;
";

/// A source and how its effects are kept apart.
#[derive(Clone, Copy)]
struct Way {
    source: &'static str,
    settings: &'static str,
}

const GROUP: Way = Way { source: "group", settings: "effect = \"fx.transfer\"" };
const ORDER: Way = Way { source: "order", settings: "effect = \"fx.transfer_ordered\"\nlock = \"/pair\"" };
const CROSSING: Way =
    Way { source: "crossing", settings: "effect = \"fx.transfer_crossing\"\neffect_parallel = true" };

struct Bench {
    scene: Scene,
    time: Duration,
    /// Events that were answered 2xx.
    taken: u64,
    /// Events that were answered 503.
    refused: u64,
    runs: usize,
}

impl Bench {
    async fn gateways(&self) -> Result<[Gateway; 2]> {
        let source = |way: Way| {
            let Way { source, settings } = way;
            format!("[source.{source}]\nprovider = \"stripe\"\nsecrets = [\"{SECRET}\"]\n{settings}\n")
        };
        let settings = self
            .scene
            .settings(&["log.requests = \"failed\""], &[GROUP, ORDER, CROSSING].map(source).concat());
        let both = [Start::new(settings.clone()).start().await?, Start::new(settings).start().await?];
        for gateway in &both {
            ready(gateway).await?;
        }
        Ok(both)
    }

    /// New events per second through both gateways.
    async fn rate(&mut self, gateways: &[Gateway; 2], way: Way, statuses: &'static [u16]) -> Result<f64> {
        self.runs += 1;
        let run = self.runs;
        let mut senders = Vec::new();
        for (at, gateway) in gateways.iter().enumerate() {
            let body = move |sender, number| {
                let (pair, swap) = (rand::random_range(0..500), rand::random_range(0..2));
                event(
                    &format!("evt_{run}_{at}_{sender}_{number}"),
                    &format!("\"pair\":{pair},\"swap\":{swap}"),
                )
            };
            senders.push(Senders::start(gateway.listen()?, way.source, SENDERS, statuses, body));
        }
        let rate = rate(&mut senders, self.time).await?;
        for senders in senders {
            let Counts { answered, accepted } = senders.finish().await?;
            self.taken += accepted;
            self.refused += answered - accepted;
        }
        Ok(rate)
    }

    /// Deadlocks so far. The gateways must be gone: sessions report what they counted when they end.
    async fn deadlocks(&self) -> Result<i64> {
        let database = self.scene.database().await?;
        let sessions = "select count(*) from pg_stat_activity where application_name = 'hapax'";
        let gone =
            async || (database.query_one(sessions, &[]).await.ok()?.get::<_, i64>(0) == 0).then_some(());
        eventually(LIMIT, gone).await.context("sessions stay")?;
        let counted = "select deadlocks from pg_stat_database where datname = current_database()";
        Ok(database.query_one(counted, &[]).await?.get(0))
    }

    /// As many rows in the ledger as events were taken, and two updates for each row. What was answered 503 may be
    /// committed all the same where a deadline is missed, so `exactly` is for a load where nothing was.
    async fn count(&self, exactly: bool) -> Result<()> {
        let counted =
            "select (select count(*) from hapax.events), (select sum(updates)::bigint from fx.account)";
        let row = self.scene.database().await?.query_one(counted, &[]).await?;
        let (rows, updates): (i64, i64) = (row.get(0), row.get(1));
        let taken = i64::try_from(self.taken)?;
        say(&format!("{taken} events answered 2xx, {rows} in the ledger, {updates} updates of accounts"))?;
        ensure!(updates == 2 * rows, "effects are not those of the events");
        ensure!(
            if exactly { rows == taken } else { rows >= taken },
            "events are not those that were answered"
        );
        Ok(())
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    // Under `cargo test`, and with --quick, it shows only that everything works.
    let arguments: Vec<String> = std::env::args().collect();
    let has = |name: &str| arguments.iter().any(|argument| argument == name);
    let measured = has("--bench") && !has("--quick");
    let (rounds, time) = if measured { (7, Duration::from_secs(3)) } else { (1, Duration::from_millis(200)) };

    let postgres = private_postgres(PostgresOptions::default()).await?;
    let scene = Scene::on(&postgres, redis().url()).await?;
    scene.database().await?.batch_execute(ACCOUNTS).await?;
    let mut bench = Bench { scene, time, taken: 0, refused: 0, runs: 0 };

    let gateways = bench.gateways().await?;
    let mut ratios = Vec::new();
    for round in 0..rounds {
        let (group, order) = if round % 2 == 0 {
            let group = bench.rate(&gateways, GROUP, &[200]).await?;
            (group, bench.rate(&gateways, ORDER, &[200]).await?)
        } else {
            let order = bench.rate(&gateways, ORDER, &[200]).await?;
            (bench.rate(&gateways, GROUP, &[200]).await?, order)
        };
        say(&format!("one batch at a time {group:.0}/s, in order {order:.0}/s: {:.2}", group / order))?;
        ratios.push(group / order);
    }
    drop(gateways);
    let deadlocks = bench.deadlocks().await?;
    bench.count(true).await?;
    let median = median(&mut ratios)?;
    say(&format!("ratio {median:.2} (by round: {ratios:.2?}), {deadlocks} deadlocks"))?;

    let gateways = bench.gateways().await?;
    let crossing = bench.rate(&gateways, CROSSING, &[200, 503]).await?;
    drop(gateways);
    let provoked = bench.deadlocks().await? - deadlocks;
    bench.count(false).await?;
    say(&format!(
        "with neither {crossing:.0}/s, {provoked} deadlocks, {} events answered 503",
        bench.refused
    ))?;
    ensure!(deadlocks == 0, "there were deadlocks");
    ensure!(!measured || provoked > 0, "this load does not deadlock at all, so it shows nothing");
    ensure!(!measured || median >= LEAST, "the ratio is below {LEAST}");
    Ok(())
}
