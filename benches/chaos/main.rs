//! Workers under chaos: gateways are killed and started again all the time, the target fails three times in ten, is down
//! in the middle, and refuses some events until it is fixed; effects of parked events fail and end their own connections.
//! Ends with exit code 1, and says which event broke which rule, unless everything was delivered and took effect as promised.

#[expect(dead_code, reason = "what the tests stand on; not all of it is needed here")]
#[path = "../../tests/it/harness/mod.rs"]
mod harness;
#[expect(dead_code, reason = "not all of it is needed here")]
#[path = "../senders/mod.rs"]
mod senders;

mod checks;
mod gateways;
mod sending;
mod target;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use hapax::dev::PostgresOptions;
use tokio_postgres::Client as Database;
use tokio_util::sync::CancellationToken;

use crate::checks::Breaches;
use crate::gateways::{Gateways, look};
use crate::harness::scene::{SECRET, Scene};
use crate::harness::stores::{private_postgres, redis};
use crate::senders::say;
use crate::sending::{Sending, Sent, send, trickle};
use crate::target::{Target, is_poison};

/// Deliveries at once, over all gateways.
const CONCURRENCY: usize = 64;
/// One event in so many is poison.
const POISON: usize = 1_000;
/// Of parked events, each ends its connection at every try.
const KILLERS: usize = 3;
const LOOK: Duration = Duration::from_millis(200);

/// Fails three times in ten, and ends its own connection now and then; `poison` always fails, and `kill` ends it always
/// but for the first time. All until it is fixed.
const FRAGILE: &str = "
    create table fx.fixed (at timestamptz not null default clock_timestamp());
    create function fx.fragile(e hapax.event) returns void language plpgsql as $$
    declare
        what constant text := hapax.json(e)->>'do';
        luck constant float8 := random();
    begin
        if not exists (select from fx.fixed) then
            if (what = 'kill' and e.attempt > 1) or luck < 0.002 then
                perform pg_terminate_backend(pg_backend_pid());
                perform pg_sleep(10);
            end if;
            if what in ('poison', 'kill') or luck < 0.3 then
                raise exception 'it fails';
            end if;
        end if;
        insert into fx.effect (source, event_id) values (e.source, e.event_id);
    end $$;
";

struct Options {
    events: usize,
    parked: usize,
    gateways: usize,
    kill_every: Duration,
    outage: Duration,
    seed: u64,
    limit: Duration,
}

impl Options {
    fn read() -> Result<Self> {
        let arguments: Vec<String> = std::env::args().collect();
        let number = |name: &str| {
            let at = arguments.iter().position(|argument| argument == name)?;
            Some(arguments.get(at + 1)?.parse::<u64>().with_context(|| format!("{name} needs a number")))
        };
        let or = |name, usual| number(name).unwrap_or(Ok(usual));
        // Under `cargo test` it shows only that everything works.
        let measured = arguments.iter().any(|argument| argument == "--bench");
        let events = or("--events", if measured { 100_000 } else { 300 })?;
        Ok(Self {
            events: usize::try_from(events)?,
            parked: usize::try_from(or("--parked", events / 10)?)?,
            gateways: usize::try_from(or("--gateways", if measured { 3 } else { 2 })?)?,
            kill_every: Duration::from_millis(or("--kill-every", 2_000)?),
            outage: Duration::from_secs(or("--outage", if measured { 60 } else { 1 })?),
            seed: or("--seed", 1)?,
            limit: Duration::from_secs(or("--limit", 3_600)?),
        })
    }

    fn sendings(&self) -> Vec<Sending> {
        let (mut events, mut parked) = (Vec::new(), Vec::new());
        for n in 0..self.events {
            let id = if n % POISON == POISON / 2 || n == 7 {
                format!("evt_poison_{n}")
            } else {
                format!("evt_{n}")
            };
            events.push(Sending { source: "plain", id, more: "" });
        }
        for n in 0..self.parked {
            let (id, more) = match n % POISON {
                _ if n < KILLERS => (format!("parked_poison_{n}"), "\"do\":\"kill\""),
                11 => (format!("parked_poison_{n}"), "\"do\":\"poison\""),
                _ => (format!("parked_{n}"), ""),
            };
            parked.push(Sending { source: "parked", id, more });
        }
        // All along the others.
        let each = (events.len() / parked.len().max(1)).max(1);
        let mut sendings = Vec::with_capacity(events.len() + parked.len());
        let mut parked = parked.into_iter();
        for (n, event) in events.into_iter().enumerate() {
            sendings.push(event);
            if n % each == 0 {
                sendings.extend(parked.next());
            }
        }
        sendings.extend(parked);
        sendings
    }
}

fn settings(scene: &Scene, target: &Target) -> String {
    let url = format!("target.chaos.url = \"http://{}/hook\"", target.address);
    let concurrency = format!("target.chaos.concurrency = {CONCURRENCY}");
    let keys = [
        "log.requests = \"failed\"",
        "log.level = \"info\"",
        "source.plain.targets = [\"chaos\"]",
        "target.chaos.kind = \"http\"",
        &url,
        &concurrency,
        "target.chaos.allow_private = true",
        "target.chaos.timeout = \"1s\"",
        "target.chaos.retry_base = \"100ms\"",
        "target.chaos.retry_max = \"3s\"",
        "work.lease = \"4s\"",
        "work.poll = \"200ms\"",
    ];
    let parked = format!(
        "[source.parked]\nprovider = \"stripe\"\nsecrets = [\"{SECRET}\"]\neffect = \"fx.fragile\"\n\
         on_error = \"park\"\nretry_base = \"100ms\"\nretry_max = \"3s\"\n"
    );
    scene.settings(&keys, &parked)
}

/// Waits until the query's number is none.
async fn until_none(database: &Database, query: &str, limit: Instant) -> Result<()> {
    loop {
        let left: i64 = database.query_one(query, &[]).await?.get(0);
        if left == 0 {
            return Ok(());
        }
        ensure!(Instant::now() < limit, "{left} are left: {query}");
        tokio::time::sleep(LOOK).await;
    }
}

async fn pending(database: &Database) -> Result<usize> {
    let query = "select count(*) from hapax.job where state = 'pending' and queue = 'target:chaos'";
    Ok(usize::try_from(database.query_one(query, &[]).await?.get::<_, i64>(0))?)
}

/// What happens while gateways are killed; returns when the target came up again, and how many waited for that.
async fn storm(
    options: &Options,
    target: &Target,
    gateways: &Gateways,
    database: &Database,
    sent: &Sent,
) -> Result<(i64, usize)> {
    let limit = Instant::now() + options.limit;
    let wanted = options.events;
    let until = async |what: &str, enough: &dyn Fn() -> bool| {
        let mut told = Instant::now();
        while !enough() {
            ensure!(gateways.check(), "a gateway did not start again");
            if Instant::now() > limit {
                bail!("{what} takes too long: {} taken", target.counts().0);
            }
            if told.elapsed() > Duration::from_secs(15) {
                told = Instant::now();
                let (taken, requests) = target.counts();
                let accepted = sent.accepted.load(Ordering::Relaxed);
                say(&format!("{what}: {accepted} accepted, {requests} requests, {taken} taken"))?;
            }
            tokio::time::sleep(LOOK).await;
        }
        Ok(())
    };
    until("before the outage", &|| target.counts().0 >= wanted / 3).await?;
    target.go_down();
    let up_at = Instant::now() + options.outage;
    until("the outage", &|| Instant::now() >= up_at).await?;
    let waiting = pending(database).await?;
    let came_up = target::now();
    target.come_up();
    let all =
        wanted - options.sendings().iter().filter(|it| it.source == "plain" && is_poison(&it.id)).count();
    until("after the outage", &|| target.counts().0 >= all).await?;
    Ok((came_up, waiting))
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let options = Options::read()?;
    let postgres = private_postgres(PostgresOptions::default()).await?;
    let scene = Scene::on(&postgres, redis().url()).await?;
    let database = scene.database().await?;
    database.batch_execute(FRAGILE).await?;
    let target = Target::start(options.seed)?;
    let settings = settings(&scene, &target);
    let gateways = Gateways::start(&settings, options.gateways, options.kill_every, options.seed).await?;

    let (started, sent) = (Instant::now(), Sent::default());
    let sendings = Arc::new(options.sendings());
    let sending = tokio::spawn(send(Arc::clone(&sendings), Arc::clone(&gateways.addresses), sent.clone()));
    let (came_up, waiting) = storm(&options, &target, &gateways, &database, &sent).await?;
    sending.await??;
    let took = started.elapsed();
    let limit = Instant::now() + options.limit;
    let stop = CancellationToken::new();
    let trickle = tokio::spawn(trickle(Arc::clone(&gateways.addresses), sent.clone(), stop.clone()));
    // The parked ones under the same killing.
    let parked = "select count(*) from hapax.events where source = 'parked' and status = 'failed'";
    until_none(&database, parked, limit).await?;
    let (gateways, mut seen) = gateways.leave_alone().await?;
    let poison = "select count(*) from hapax.job j join hapax.ledger l using (key) \
                  where j.state = 'pending' and l.event_id like '%poison%'";
    until_none(&database, poison, limit).await?;
    stop.cancel();
    let late = trickle.await??;
    until_none(&database, "select count(*) from hapax.job where state = 'pending'", limit).await?;

    let mut breaches = Breaches::default();
    the_dead_live_again(&database, &target, &sendings, &mut breaches, limit).await?;
    for gateway in &gateways {
        look(gateway, &mut seen).await?;
    }
    let log = target.take_log();
    let attempts = checks::deliveries(&log, &database, &mut breaches).await?;
    checks::database(&database, (options.events + late, options.parked), options.gateways, &mut breaches)
        .await?;
    let peak = checks::peak(&log.requests);
    let within = usize::try_from(peak).is_ok_and(|peak| peak <= CONCURRENCY);
    breaches.unless(within, "deliveries at once stay within the bound", format!("{peak} at once"));
    let histogram = checks::after_outage(&log, came_up, waiting, CONCURRENCY, &mut breaches);
    let memory = checks::memory(&seen.memory, &mut breaches);

    let again: u32 = log.taken.values().map(|times| times - 1).sum();
    say(&histogram)?;
    say(&memory)?;
    say(&format!(
        "{} events, {late} more and {} parked ones through {} gateways with {} kills in {:.0} s: {} deliveries to the gateways, {} requests at \
         the target (the jobs count {attempts} attempts), {again} of them for what it had taken before, {peak} at once of {CONCURRENCY}",
        options.events,
        options.parked,
        options.gateways,
        seen.kills,
        took.as_secs_f64(),
        sent.deliveries.load(Ordering::Relaxed),
        log.requests.len(),
    ))?;
    for (sample, value) in &seen.counters {
        say(&format!("    {sample} {value}"))?;
    }
    ensure!(breaches.is_empty(), "{}", breaches.show());
    say("all rules hold")
}

/// Dead is what is poison, and nothing else; armed again after the fix, it is done.
async fn the_dead_live_again(
    database: &Database,
    target: &Target,
    sendings: &[Sending],
    breaches: &mut Breaches,
    limit: Instant,
) -> Result<()> {
    let dead = database.query("select event_id, key from hapax.ledger where status = 'dead'", &[]).await?;
    let mut ids: Vec<&str> = dead.iter().map(|row| row.get(0)).collect();
    ids.sort_unstable();
    for id in ids.iter().filter(|id| !is_poison(id)) {
        breaches.add("only poison dies", *id);
    }
    for sending in sendings.iter().filter(|sending| is_poison(&sending.id)) {
        let died = ids.binary_search(&sending.id.as_str()).is_ok();
        breaches.unless(died, "poison dies", &*sending.id);
    }
    target.fix();
    database.execute("insert into fx.fixed default values", &[]).await?;
    let keys: Vec<&[u8]> = dead.iter().map(|row| row.get(1)).collect();
    let armed = database.query_one("select cardinality(hapax.rearm($1))", &[&keys]).await?;
    let armed = usize::try_from(armed.get::<_, i32>(0)).context("a count")?;
    breaches.unless(armed == keys.len(), "the dead are armed again", format!("{armed} of {}", keys.len()));
    say(&format!("{armed} dead events armed again"))?;
    until_none(database, "select count(*) from hapax.job where state = 'pending'", limit).await
}
