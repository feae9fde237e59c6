//! What must hold at the end, from the target's own log and the database; each breach names an id.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use anyhow::Result;
use tokio_postgres::Client as Database;

use crate::target::{End, Log, Request, SERVICE};

/// Breaches of one rule that are told.
const TOLD: usize = 5;
/// A machine that is busy sees that the other side has left this much later.
const SEEN_LATER: i64 = 200_000;
/// Longer than a share is held without being asked for again.
const SHARES_END: Duration = Duration::from_secs(15);
/// Seconds after the outage that are shown.
const SHOWN: usize = 90;

/// What broke which rule.
#[derive(Debug, Default)]
pub(crate) struct Breaches(BTreeMap<&'static str, Vec<String>>);

impl Breaches {
    pub(crate) fn add(&mut self, rule: &'static str, what: impl Into<String>) {
        self.0.entry(rule).or_default().push(what.into());
    }

    pub(crate) fn unless(&mut self, holds: bool, rule: &'static str, what: impl Into<String>) {
        if !holds {
            self.add(rule, what);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn show(&self) -> String {
        let mut text = String::new();
        for (rule, found) in &self.0 {
            writeln!(text, "BROKEN, {} times: {rule}", found.len()).unwrap_or_default();
            for what in found.iter().take(TOLD) {
                writeln!(text, "    {what}").unwrap_or_default();
            }
        }
        text
    }
}

/// The most requests that the target had at once. One whose sender left, killed or out of patience, counts until the
/// target could see that.
pub(crate) fn peak(requests: &[Request]) -> i64 {
    let mut changes = Vec::with_capacity(requests.len() * 2);
    for request in requests {
        let ended = match request.end {
            End::Left => (request.ended - SEEN_LATER).max(request.begun),
            End::Taken | End::Refused | End::Reset => request.ended,
        };
        changes.extend([(request.begun, 1), (ended, -1)]);
    }
    // At the same microsecond, ends first.
    changes.sort_unstable();
    let mut at_once = 0;
    let counts = changes.into_iter().map(|(_, change)| {
        at_once += change;
        at_once
    });
    counts.max().unwrap_or(0)
}

/// Each delivered event was taken, and not sent again after it was done.
pub(crate) async fn deliveries(log: &Log, database: &Database, breaches: &mut Breaches) -> Result<usize> {
    let query = "select l.event_id, (extract(epoch from j.settled_at) * 1e6)::bigint, j.state::text, j.attempts \
                 from hapax.job j join hapax.ledger l using (key) where j.queue = 'target:chaos'";
    let mut settled: HashMap<String, i64> = HashMap::new();
    let mut attempts = 0;
    for row in database.query(query, &[]).await? {
        let (id, at, state): (String, Option<i64>, &str) = (row.get(0), row.get(1), row.get(2));
        attempts += usize::try_from(row.get::<_, i32>(3))?;
        breaches.unless(log.taken.contains_key(&id), "an accepted event is taken by the target", &*id);
        match (at, state) {
            (Some(at), "done") => drop(settled.insert(id, at)),
            _ => breaches.add("a job ends as done", format!("{id} is {state}")),
        }
    }
    for request in &log.requests {
        let Some(at) = settled.get(&request.id) else {
            breaches.add("what is sent has a job", &*request.id);
            continue;
        };
        let late = request.begun - at;
        breaches.unless(
            late <= 0,
            "nothing is sent again after it is done",
            format!("{}: {late} us later", request.id),
        );
    }
    Ok(attempts)
}

/// Ledger rows are as many as ids, nothing is left to do, no lease is left, and every parked effect is there once.
pub(crate) async fn database(
    database: &Database,
    ids: (usize, usize),
    gateways: usize,
    breaches: &mut Breaches,
) -> Result<()> {
    let one = async |query: &str| {
        anyhow::Ok(usize::try_from(database.query_one(query, &[]).await?.get::<_, i64>(0))?)
    };
    let rows = one("select count(*) from hapax.ledger").await?;
    breaches.unless(rows == ids.0 + ids.1, "ledger rows are as many as ids", format!("{rows} of {ids:?}"));
    let undone = "select event_id, status from hapax.events where status <> 'done'";
    for row in database.query(undone, &[]).await? {
        breaches
            .add("every event is done", format!("{} is {}", row.get::<_, &str>(0), row.get::<_, &str>(1)));
    }
    let left = one("select count(*) from hapax.job where state = 'pending' or token is not null").await?;
    breaches.unless(left == 0, "no job and no lease is left", format!("{left} jobs"));
    // Those of killed gateways end by themselves.
    let shares = "select count(*) from hapax.share where queue = 'target:chaos' and until > clock_timestamp() and slots > 0";
    let (limit, mut left) = (Instant::now() + SHARES_END, one(shares).await?);
    while left > gateways && Instant::now() < limit {
        tokio::time::sleep(Duration::from_millis(100)).await;
        left = one(shares).await?;
    }
    breaches.unless(left <= gateways, "no share of a dead gateway is left", format!("{left} shares"));
    let effects = one("select count(distinct event_id) from fx.effect").await?;
    breaches.unless(effects == ids.1, "an accepted event has an effect", format!("{effects} of {}", ids.1));
    let doubled = "select event_id, count(*) from fx.effect group by event_id having count(*) <> 1";
    for row in database.query(doubled, &[]).await? {
        breaches
            .add("an event has one effect", format!("{}: {}", row.get::<_, &str>(0), row.get::<_, i64>(1)));
    }
    Ok(())
}

/// How what waited came after the outage, by the second.
pub(crate) fn after_outage(
    log: &Log,
    came_up: i64,
    waiting: usize,
    concurrency: usize,
    breaches: &mut Breaches,
) -> String {
    let mut seconds = vec![0_usize; SHOWN];
    for request in log.requests.iter().filter(|request| request.begun >= came_up) {
        let second = usize::try_from((request.begun - came_up) / 1_000_000).unwrap_or(usize::MAX);
        if let Some(count) = seconds.get_mut(second) {
            *count += 1;
        }
    }
    let first = seconds.first().copied().unwrap_or(0);
    let part = (waiting / 10).max(2 * concurrency);
    // With few that wait, one second is enough for all of them, however slowly it begins.
    breaches.unless(
        first <= part || waiting < 40 * concurrency,
        "the first second after the outage brings a tenth of what waits at most",
        format!("{first} of {waiting}"),
    );
    let per_second = usize::try_from(Duration::from_secs(1).as_millis() / SERVICE.as_millis()).unwrap_or(1);
    let most = seconds.iter().copied().max().unwrap_or(0);
    breaches.unless(
        most <= concurrency * per_second,
        "no second brings more than the bound of concurrency allows",
        format!("{most}"),
    );
    let used = seconds.iter().rposition(|count| *count > 0).map_or(0, |last| last + 1);
    seconds.truncate(used);
    let shown: Vec<String> = seconds.iter().map(ToString::to_string).collect();
    format!("arrivals after the outage, by the second ({waiting} waited): {}", shown.join(" "))
}

/// The most that any gateway used in the second half of the kills is not much more than in the first.
pub(crate) fn memory(kib: &[u64], breaches: &mut Breaches) -> String {
    let (early, late) = kib.split_at(kib.len() / 2);
    let most = |of: &[u64]| of.iter().copied().max().unwrap_or(0) / 1024;
    let (early, late) = (most(early), most(late));
    let text =
        format!("memory of a gateway: {early} MiB at most in the first half, {late} MiB in the second");
    breaches.unless(early == 0 || late <= early * 3 / 2 + 32, "the memory of gateways is flat", &*text);
    text
}
