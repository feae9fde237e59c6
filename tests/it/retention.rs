//! Retention: what is older than its horizon goes, nothing else does, and the path does not notice.

use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use hapax::config::{self, Config};
use hapax::db::Session;
use hapax::identify::EventKey;
use hapax::retention::{Clock, Counts, Ended, HOLD, Limits, Mode, Stop, run_once};
use serde_json::Value;
use tokio_postgres::Client as Database;

use crate::harness::client::Client;
use crate::harness::load::{LIMIT, Load, acknowledged, until_metric};
use crate::harness::play::hapax;
use crate::harness::scene::{Scene, deliver, deliver_on, event};
use crate::harness::stores;
use crate::harness::wait::eventually;

/// Postgres without any fast tier, since markers may outlive rows; and no rests.
const ALONE: [&str; 6] = [
    "fast_tier.kind = \"off\"",
    "fast_tier.url =",
    "fast_tier.prefix =",
    "fast_tier.timeout =",
    "retention.every = \"off\"",
    "retention.duty = 1",
];

const ORDERED: Mode = Mode::Ordered { force: false };

/// Adds an event `id` of source `plain` with its body (that says its id), of `age` before now.
const ADD: &str = "
    create function fx.add(id text, event_key bytea, status text, age interval, settled_age interval) returns void
        language plpgsql as $$
    declare
        at constant timestamptz := now() - age;
    begin
        insert into hapax.ledger (received_at, settled_at, token, status, key, digest, source, scope, event_id)
        values (at, case when status not in ('open', 'failed') then now() - settled_age end, 1, status::hapax.status, event_key,
                sha256('x'), 'plain', '-', id);
        insert into hapax.body (received_at, key, body, headers) values (at, event_key, convert_to(id, 'UTF8'), '{}');
    end
    $$;
    create function fx.add_day(age integer) returns text language plpgsql as $$
    declare
        day constant date := (now() at time zone 'UTC')::date - age;
        name constant text := 'body_' || to_char(day, 'YYYYMMDD');
    begin
        execute format('create table hapax.%I partition of hapax.body for values from (%L) to (%L)', name,
                       day::timestamp at time zone 'UTC', (day + 1)::timestamp at time zone 'UTC');
        return name;
    end
    $$;";

struct Attic {
    scene: Scene,
    database: Database,
}

impl Attic {
    async fn new() -> Result<Self> {
        let scene = Scene::new().await?;
        let database = scene.database().await?;
        database.batch_execute(ADD).await?;
        Ok(Self { scene, database })
    }

    fn config(&self, overrides: &[&str]) -> Result<Config> {
        let settings = self.scene.settings(&[&ALONE, overrides].concat(), "");
        let parsed = Config::parse("hapax.toml", &settings, &|_| None);
        Ok(parsed.map_err(|problems| anyhow::anyhow!(config::report(&problems)))?.config)
    }

    async fn session(&self) -> Result<Session> {
        hapax::db::connect(&self.config(&[])?.postgres).await
    }

    async fn pass_with(
        &self,
        overrides: &[&str],
        mode: Mode,
        clock: &mut Clock,
    ) -> Result<(Counts, Result<(), Ended>)> {
        let limits = Limits { retention: self.config(overrides)?.retention, mode };
        let (mut session, mut counts) = (self.session().await?, Counts::default());
        let ended = run_once(&mut session, &limits, clock, &mut counts, &mut |_, _| {}).await;
        Ok((counts, ended))
    }

    /// A whole pass.
    async fn pass(&self, overrides: &[&str]) -> Result<Counts> {
        let (counts, ended) = self.pass_with(overrides, ORDERED, &mut Clock::default()).await?;
        ended?;
        Ok(counts)
    }

    /// `age` and `settled_age` in Postgres' words.
    async fn add(&self, id: &str, status: &str, age: &str, settled_age: &str) -> Result<Vec<u8>> {
        let key = key(id);
        let add = "select fx.add($1, $2, $3, $4::text::interval, $5::text::interval)";
        self.database.execute(add, &[&id, &key, &status, &age, &settled_age]).await?;
        Ok(key)
    }

    async fn add_job(&self, id: &str, queue: &str, state: &str, settled_age: &str) -> Result<()> {
        let add = "insert into hapax.job (due_at, received_at, settled_at, attempts_max, state, key, queue)
                   values (now() - interval '1 hour', now(), case when $3 <> 'pending' then now() - $4::text::interval end, 5,
                           $3::text::hapax.job_state, $1, $2)";
        self.database.execute(add, &[&key(id), &queue, &state, &settled_age]).await?;
        Ok(())
    }

    async fn count(&self, of: &str) -> Result<i64> {
        Ok(self.database.query_one(&format!("select count(*) from {of}"), &[]).await?.get(0))
    }

    /// The first column, sorted.
    async fn list(&self, query: &str) -> Result<Vec<String>> {
        let mut list: Vec<String> =
            self.database.query(query, &[]).await?.iter().map(|row| row.get(0)).collect();
        list.sort();
        Ok(list)
    }

    async fn ids(&self) -> Result<Vec<String>> {
        self.list("select event_id from hapax.ledger").await
    }

    /// Makes it a matter of course that the last cleaner is gone.
    async fn let_hold_pass(&self) -> Result<()> {
        Ok(self.database.batch_execute("update hapax.retention set held_until = now()").await?)
    }

    /// Runs `hapax retain` on these settings; its exit code and outputs.
    async fn retain(&self, overrides: &[&str], arguments: &[&str]) -> Result<(i32, String, String)> {
        let file = self.file(overrides)?;
        let path = file.path().to_str().context("a path")?;
        let output = hapax(&[&["retain", "--config", path], arguments].concat()).await?;
        let text = |bytes: Vec<u8>| String::from_utf8(bytes);
        Ok((output.status.code().context("a signal")?, text(output.stdout)?, text(output.stderr)?))
    }

    fn file(&self, overrides: &[&str]) -> Result<tempfile::NamedTempFile> {
        let file = tempfile::Builder::new().suffix(".toml").tempfile_in(stores::folder().path())?;
        std::fs::write(file.path(), self.scene.settings(&[&ALONE, overrides].concat(), ""))?;
        Ok(file)
    }
}

fn key(id: &str) -> Vec<u8> {
    EventKey::of("plain", "-", id).0.to_vec()
}

fn ids(ids: &[&str]) -> Vec<String> {
    ids.iter().map(ToString::to_string).collect()
}

#[tokio::test]
async fn horizons_hold_to_the_microsecond() -> Result<()> {
    let mut attic = Attic::new().await?;
    // One transaction, so that now() stands.
    let transaction = attic.database.transaction().await?;
    for (id, status, age, settled) in [
        ("done at the horizon", "done", "840 hours", "840 hours"),
        ("done past it", "done", "840 hours 1 microsecond", "840 hours 1 microsecond"),
        ("done past it, settled just now", "done", "900 hours", "0"),
        ("rejected past it", "rejected", "840 hours 1 microsecond", "900 hours"),
        ("unidentified past it", "unidentified", "840 hours 1 microsecond", "900 hours"),
        ("dead past the ledger's", "dead", "840 hours 1 microsecond", "900 hours"),
        ("dead at its own", "dead", "2160 hours", "2160 hours"),
        ("dead past its own", "dead", "2160 hours 1 microsecond", "2160 hours 1 microsecond"),
        ("dead long after it came", "dead", "9000 hours", "2160 hours"),
        ("open for a year", "open", "9000 hours", "0"),
        ("failed for a year", "failed", "9000 hours", "0"),
    ] {
        let add = "select fx.add($1, $2, $3, $4::text::interval, $5::text::interval)";
        transaction.execute(add, &[&id, &key(id), &status, &age, &settled]).await?;
    }
    let forget = "select events from hapax.retain_events(0, 256, 100, interval '840 hours', interval '2160 hours', $1)";
    for (dry, gone) in [(true, 5), (false, 5), (false, 0)] {
        assert_eq!(transaction.query_one(forget, &[&dry]).await?.get::<_, i64>(0), gone);
    }
    let left = transaction.query("select event_id from hapax.ledger order by 1", &[]).await?;
    let left: Vec<String> = left.iter().map(|row| row.get(0)).collect();
    let wanted = [
        "dead at its own",
        "dead long after it came",
        "dead past the ledger's",
        "done at the horizon",
        "failed for a year",
        "open for a year",
    ];
    assert_eq!(left, ids(&wanted));
    Ok(())
}

/// Everything of an event goes with it, and nothing of another one.
#[tokio::test]
async fn an_event_goes_with_all_that_belongs_to_it() -> Result<()> {
    let attic = Attic::new().await?;
    for (id, status, age) in [
        ("old", "done", "36 days"),
        ("young", "done", "34 days"),
        ("open", "open", "99 days"),
        ("dead", "dead", "89 days"),
    ] {
        attic.add(id, status, age, age).await?;
        let state = match status {
            "open" => "pending",
            "dead" => "dead",
            _ => "done",
        };
        attic.add_job(id, "target:a", state, age).await?;
        attic
            .database
            .execute("insert into hapax.mismatch (key, digest) values ($1, '')", &[&key(id)])
            .await?;
        let keep =
            "insert into hapax.body_kept (received_at, key, body, headers) values (now(), $1, '', '{}')";
        attic.database.execute(keep, &[&key(id)]).await?;
        let guard =
            "insert into hapax.guard (received_at, guard, owner) values (now() - $2::text::interval, $1, $1)";
        attic.database.execute(guard, &[&key(id), &age]).await?;
    }
    let orphan =
        "insert into hapax.mismatch (seen_at, key, digest) values (now() - interval '36 days', '', '')";
    attic.database.execute(orphan, &[]).await?;
    let shares =
        "insert into hapax.share values ('target:a', gen_random_uuid(), 1, now() - interval '2 days'),
                  ('target:a', gen_random_uuid(), 1, now() - interval '1 hour')";
    attic.database.batch_execute(shares).await?;
    let counts = attic.pass(&["retention.jobs = \"35d\""]).await?;
    assert_eq!((counts.events, counts.jobs, counts.guards, counts.mismatches), (1, 1, 3, 2), "{counts:?}");
    assert_eq!((counts.kept_bodies, counts.shares), (1, 1), "{counts:?}");
    assert_eq!(attic.ids().await?, ids(&["dead", "open", "young"]));
    for table in ["hapax.job", "hapax.mismatch", "hapax.body_kept"] {
        let of = format!("{table} t left join hapax.ledger l using (key) where l.key is null");
        assert_eq!(attic.count(&of).await?, 0, "{table}");
        assert_eq!(attic.count(table).await?, 3, "{table}");
    }
    assert_eq!((attic.count("hapax.guard").await?, attic.count("hapax.share").await?), (1, 1));
    // Nothing is left for a second one.
    let again = attic.pass(&["retention.jobs = \"35d\""]).await?;
    assert_eq!(again.rows().map(|(_, rows)| rows), [0; 7]);
    Ok(())
}

/// Deleted rows' places are taken by new ones: old rows are found wherever they stand, in batches of any size.
#[tokio::test]
async fn old_rows_are_found_all_over_the_heap() -> Result<()> {
    let attic = Attic::new().await?;
    let insert = "insert into hapax.ledger (received_at, settled_at, token, status, key, digest, source, scope, event_id)
        select at, at, 1, 'done', substr(sha256(convert_to(n::text, 'UTF8')), 1, 16), sha256('x'), 'plain', '-', n::text
        from generate_series(1, 20000) n, lateral (
            select now() - case when n % 3 = 0 then interval '36 days' else interval '1 day' end as at) a";
    attic.database.batch_execute(insert).await?;
    let seen = attic.pass_with(&[], Mode::Look, &mut Clock::default()).await?.0;
    assert_eq!(seen.events, 6666);
    assert_eq!(attic.count("hapax.ledger").await?, 20000, "a look deletes nothing");
    let counts = attic.pass(&["retention.batch_rows = 100"]).await?;
    assert_eq!(counts.events, 6666);
    assert_eq!(attic.count("hapax.ledger where received_at < now() - interval '35 days'").await?, 0);
    assert_eq!(attic.count("hapax.ledger").await?, 13334);
    let place = attic.database.query_one("select walk_block from hapax.retention", &[]).await?;
    assert_eq!(place.get::<_, i64>(0), 0);
    Ok(())
}

/// A walk that was broken off is gone on with; one that ended begins anew only after a part of the horizon.
#[tokio::test]
async fn a_walk_goes_on_where_it_stood() -> Result<()> {
    let attic = Attic::new().await?;
    let insert = "insert into hapax.ledger (received_at, settled_at, token, status, key, digest, source, scope, event_id)
        select at, at, 1, 'done', substr(sha256(convert_to(n::text, 'UTF8')), 1, 16), sha256('x'), 'plain', '-', n::text
        from generate_series(1, 1000) n, lateral (select now() - interval '36 days' as at) a";
    attic.database.batch_execute(insert).await?;
    attic.database.batch_execute("update hapax.retention set walk_block = 10, walk_begun_at = now()").await?;
    let before = attic.count("hapax.ledger where ctid < '(10,0)'").await?;
    let (counts, ended) = attic.pass_with(&[], Mode::Routine, &mut Clock::default()).await?;
    ended?;
    assert_eq!(i64::try_from(counts.events)?, 1000 - before);
    // The beginning is young: it is not its turn.
    let (counts, ended) = attic.pass_with(&[], Mode::Routine, &mut Clock::default()).await?;
    ended?;
    assert_eq!(counts.events, 0);
    attic
        .database
        .batch_execute("update hapax.retention set walk_begun_at = now() - interval '35 days' / 100")
        .await?;
    let (counts, ended) = attic.pass_with(&[], Mode::Routine, &mut Clock::default()).await?;
    ended?;
    assert_eq!(i64::try_from(counts.events)?, before);
    Ok(())
}

#[tokio::test]
async fn jobs_go_by_their_state_and_dead_ones_with_their_event() -> Result<()> {
    let attic = Attic::new().await?;
    for (id, status) in [("settled", "done"), ("waits", "open"), ("parked", "failed"), ("dead", "dead")] {
        attic.add(id, status, "5 days", "4 days").await?;
        for (queue, state, age) in [
            ("target:done", "done", "25 hours"),
            ("target:young", "done", "23 hours"),
            ("target:discarded", "discarded", "25 hours"),
            ("target:dead", "dead", "25 hours"),
            ("target:pending", "pending", "0"),
        ] {
            attic.add_job(id, queue, state, age).await?;
        }
    }
    attic.add_job("gone by hand", "target:done", "done", "25 hours").await?;
    assert_eq!(attic.pass_with(&[], Mode::Look, &mut Clock::default()).await?.0.jobs, 5);
    // Batches of two, of which some hold nothing that may go.
    let mut session_rows = 0;
    for state in ["done", "discarded"] {
        let (mut since, mut more) = (jiff::Timestamp::UNIX_EPOCH, true);
        while more {
            let forget =
                "select next_since, more, gone from hapax.retain_jobs($1, $2, 2, interval '1 day', false)";
            let row = attic.database.query_one(forget, &[&state, &since]).await?;
            session_rows += row.get::<_, i64>("gone");
            more = row.get("more");
            since = row.get::<_, Option<jiff::Timestamp>>("next_since").unwrap_or(since);
        }
    }
    assert_eq!(session_rows, 5);
    let left =
        attic.list("select event_id || ' ' || queue from hapax.job join hapax.ledger using (key)").await?;
    let mut wanted = Vec::new();
    for id in ["settled", "waits", "parked", "dead"] {
        wanted.extend(["young", "dead", "pending"].map(|queue| format!("{id} target:{queue}")));
        if matches!(id, "waits" | "parked") {
            wanted.extend(["done", "discarded"].map(|queue| format!("{id} target:{queue}")));
        }
    }
    wanted.sort();
    assert_eq!(left, wanted);
    Ok(())
}

/// A day goes when its last moment is past the horizon. What is not done is moved aside, and can still be worked on.
#[tokio::test]
async fn days_of_bodies_go_whole_and_what_is_not_done_stays() -> Result<()> {
    let attic = Attic::new().await?;
    let mut days = Vec::new();
    for age in [9, 8, 7] {
        days.push(attic.database.query_one("select fx.add_day($1)", &[&age]).await?.get::<_, String>(0));
    }
    for (status, id) in [
        ("done", "d"),
        ("open", "o"),
        ("failed", "f"),
        ("dead", "x"),
        ("rejected", "r"),
        ("unidentified", "u"),
    ] {
        attic.add(id, status, "9 days", "9 days").await?;
    }
    attic.add("stays", "open", "7 days", "0").await?;
    attic.add("young", "open", "1 hour", "0").await?;
    // Seven days ago, that day was not over.
    let look = attic.pass_with(&[], Mode::Look, &mut Clock::default()).await?.0;
    assert_eq!((look.bodies_moved, look.days_dropped.len()), (5, 2), "{look:?}");
    assert_eq!(attic.count("hapax.body_kept").await?, 0);
    let counts = attic.pass(&["retention.batch_rows = 100"]).await?;
    assert_eq!(counts.days_dropped, days[..2]);
    assert_eq!((counts.bodies_moved, counts.days_busy.len()), (5, 0));
    assert_eq!(
        attic.list("select convert_from(body, 'UTF8') from hapax.body_kept").await?,
        ids(&["f", "o", "r", "u", "x"])
    );
    assert_eq!(
        attic.list("select convert_from(body, 'UTF8') from hapax.body").await?,
        ids(&["stays", "young"])
    );

    // Kept ones are given to workers like any other.
    for id in ["o", "f", "young"] {
        attic.add_job(id, "pull:plain", "pending", "0").await?;
    }
    let take = "select convert_from((task).body, 'UTF8') from hapax.take_from('pull:plain', 10, interval '1 minute', '-infinity')";
    assert_eq!(attic.list(take).await?, ids(&["f", "o", "young"]));

    // Once they are done, they go too.
    attic
        .database
        .batch_execute(
            "update hapax.ledger set status = 'done', settled_at = now() where event_id in ('o', 'f')",
        )
        .await?;
    assert_eq!(attic.pass(&[]).await?.kept_bodies, 2);
    assert_eq!(
        attic.list("select convert_from(body, 'UTF8') from hapax.body_kept").await?,
        ids(&["r", "u", "x"])
    );
    Ok(())
}

/// In the transaction of the drop nobody trusts what was moved before.
#[tokio::test]
async fn a_day_with_a_body_that_is_needed_is_not_dropped() -> Result<()> {
    let attic = Attic::new().await?;
    let day: String = attic.database.query_one("select fx.add_day(9)", &[]).await?.get(0);
    attic.add("late", "done", "9 days", "9 days").await?;
    // Set to work again after the bodies were moved.
    attic.database.batch_execute("update hapax.ledger set status = 'open', settled_at = null").await?;
    let drop = "select hapax.retain_drop($1, interval '7 days')";
    assert!(!attic.database.query_one(drop, &[&day]).await?.get::<_, bool>(0));
    assert_eq!(attic.count("hapax.body").await?, 1);
    // Nor one that is not past the horizon, whoever asks.
    let young = attic
        .database
        .query_one("select 'body_' || to_char(now() at time zone 'UTC', 'YYYYMMDD')", &[])
        .await?;
    let young: String = young.get(0);
    assert!(!attic.database.query_one(drop, &[&young]).await?.get::<_, bool>(0));
    assert_eq!(attic.pass(&[]).await?.days_dropped, [day]);
    Ok(())
}

#[tokio::test]
async fn bodies_without_a_day_of_their_own_go_row_by_row() -> Result<()> {
    let attic = Attic::new().await?;
    for number in 0..250 {
        attic.add(&format!("done_{number}"), "done", "9 days", "9 days").await?;
    }
    attic.add("dead", "dead", "9 days", "9 days").await?;
    attic.add("young", "done", "3 days", "3 days").await?;
    assert_eq!(attic.count("hapax.body_default").await?, 252);
    let look = attic.pass_with(&[], Mode::Look, &mut Clock::default()).await?.0;
    assert_eq!((look.stray_bodies, look.bodies_moved), (251, 1));
    let counts = attic.pass(&["retention.batch_rows = 100"]).await?;
    assert_eq!((counts.stray_bodies, counts.bodies_moved), (251, 1));
    assert_eq!(attic.list("select convert_from(body, 'UTF8') from hapax.body").await?, ids(&["young"]));
    assert_eq!(attic.list("select convert_from(body, 'UTF8') from hapax.body_kept").await?, ids(&["dead"]));
    Ok(())
}

/// Who reads for long keeps a day, and nobody who inserts waits because of that.
#[tokio::test]
async fn a_long_reader_keeps_a_day_and_nobody_waits_behind_it() -> Result<()> {
    let attic = Attic::new().await?;
    let day: String = attic.database.query_one("select fx.add_day(9)", &[]).await?.get(0);
    attic.add("old", "done", "40 days", "40 days").await?;
    let reader = attic.scene.database().await?;
    reader.batch_execute("begin; select count(*) from hapax.body").await?;
    let (busy, inserted) = {
        let writer = attic.scene.database().await?;
        // Whoever queues behind a lock fails at once.
        writer.batch_execute("set lock_timeout = '1ms'").await?;
        let insert = "insert into hapax.body (received_at, key, body, headers) values (now(), '', '', '{}')";
        let passes = async {
            let mut busy = Vec::new();
            for _ in 0..3 {
                busy.push(attic.pass(&[]).await?);
            }
            anyhow::Ok(busy)
        };
        tokio::pin!(passes);
        let mut inserted = 0;
        loop {
            tokio::select! {
                biased;
                busy = &mut passes => break (busy?, inserted),
                done = writer.execute(insert, &[]) => { done?; inserted += 1 }
            }
        }
    };
    assert!(inserted > 3);
    for counts in &busy {
        assert_eq!((&counts.days_busy, counts.days_dropped.len()), (&vec![day.clone()], 0));
    }
    // It goes on with the rest.
    assert_eq!(busy.first().map(|counts| counts.events), Some(1));
    reader.batch_execute("commit").await?;
    let dropped =
        async || attic.pass(&[]).await.ok().filter(|counts| counts.days_dropped == [day.clone()]).map(drop);
    eventually(LIMIT, dropped).await?;
    Ok(())
}

#[tokio::test]
async fn one_cleans_at_a_time() -> Result<()> {
    let attic = Attic::new().await?;
    attic.add("old", "done", "40 days", "40 days").await?;
    let take_place =
        format!("select held from hapax.retain_hold(gen_random_uuid(), interval '{} s')", HOLD.as_secs());
    assert!(attic.database.query_one(&take_place, &[]).await?.get::<_, bool>(0));
    let held = attic.pass_with(&[], ORDERED, &mut Clock::default()).await?.1;
    assert!(matches!(held, Err(Ended::Held)), "{held:?}");
    assert!(!attic.database.query_one(&take_place, &[]).await?.get::<_, bool>(0), "another one");
    attic.let_hold_pass().await?;
    // In the middle of another one's batch, even though its time is up.
    let other = attic.scene.database().await?;
    other.batch_execute("begin").await?;
    other.query_one("select pg_advisory_xact_lock(hashtextextended('hapax retention', 0))", &[]).await?;
    let held = attic.pass_with(&[], Mode::Routine, &mut Clock::default()).await?.1;
    assert!(matches!(held, Err(Ended::Held)), "{held:?}");
    assert_eq!(attic.ids().await?, ids(&["old"]));
    // A look disturbs nobody.
    attic.pass_with(&[], Mode::Look, &mut Clock::default()).await?.1?;
    other.batch_execute("rollback").await?;
    // A clock that was set back leaves the place to nobody for no longer than an hour.
    attic
        .database
        .batch_execute("update hapax.retention set held_until = now() + interval '2 hours'")
        .await?;
    assert_eq!(attic.pass(&[]).await?.events, 1);
    // And a pass that ended leaves it to the next at once.
    assert_eq!(attic.pass(&[]).await?.events, 0);
    Ok(())
}

/// One that asks and does not get the place has its lock for a moment.
#[tokio::test]
async fn who_cleans_keeps_the_place_whoever_asks_for_it() -> Result<()> {
    let attic = Attic::new().await?;
    let mine =
        "select held from hapax.retain_hold('00000000-0000-4000-8000-000000000001', interval '1 minute')";
    assert!(attic.database.query_one(mine, &[]).await?.get::<_, bool>(0));
    let other = attic.scene.database().await?;
    other.batch_execute("begin").await?;
    other.query_one("select pg_advisory_xact_lock(hashtextextended('hapax retention', 0))", &[]).await?;
    let owner = attic.scene.database().await?;
    let asked = tokio::spawn(async move { owner.query_one(mine, &[]).await });
    let waits = "select count(*) from pg_locks where locktype = 'advisory' and not granted";
    let does = async || (attic.database.query_one(waits, &[]).await.ok()?.get::<_, i64>(0) > 0).then_some(());
    eventually(LIMIT, does).await.context("it does not wait")?;
    other.batch_execute("rollback").await?;
    assert!(asked.await??.get::<_, bool>(0));
    Ok(())
}

/// What somebody is working on is neither waited for nor deleted.
#[tokio::test]
async fn a_locked_row_is_left_to_the_next_pass() -> Result<()> {
    let attic = Attic::new().await?;
    for id in ["free", "locked"] {
        attic.add(id, "done", "40 days", "40 days").await?;
    }
    let other = attic.scene.database().await?;
    other.batch_execute("begin; select from hapax.ledger where event_id = 'locked' for update").await?;
    assert_eq!(attic.pass(&[]).await?.events, 1);
    assert_eq!(attic.ids().await?, ids(&["locked"]));
    other.batch_execute("rollback").await?;
    assert_eq!(attic.pass(&[]).await?.events, 1);
    Ok(())
}

#[tokio::test]
async fn a_purged_event_is_new_and_one_within_the_horizon_never_is() -> Result<()> {
    let attic = Attic::new().await?;
    let gateway = attic.scene.gateway(&ALONE).await?;
    let to = gateway.listen()?;
    for id in ["purged", "kept"] {
        assert_eq!(deliver(to, "stripe", &event(id, "")).await?.outcome, "accepted");
        assert_eq!(deliver(to, "stripe", &event(id, "")).await?.outcome, "duplicate");
    }
    for (id, age) in [("purged", "35 days 1 second"), ("kept", "34 days 23 hours")] {
        let age_it = "update hapax.ledger set received_at = now() - $2::text::interval, settled_at = now() - $2::text::interval
                      where event_id = $1";
        attic.database.execute(age_it, &[&id, &age]).await?;
    }
    assert_eq!(attic.pass(&[]).await?.events, 1);
    assert_eq!(deliver(to, "stripe", &event("kept", "")).await?.outcome, "duplicate");
    assert_eq!(deliver(to, "stripe", &event("purged", "")).await?.outcome, "accepted");
    assert_eq!(
        attic.scene.found().await?.effects,
        BTreeMap::from([("kept".into(), 1), ("purged".into(), 2)])
    );
    Ok(())
}

/// Insert, conflict, and the row is gone: the event is inserted again. No delivery fails because of that, each acceptance is one
/// effect, and what is within the horizon is a duplicate all the while.
#[tokio::test]
async fn redeliveries_race_with_the_purge() -> Result<()> {
    const ROUNDS: usize = 1000;
    let attic = Attic::new().await?;
    let gateway = attic.scene.gateway(&ALONE).await?;
    let to = gateway.listen()?;
    assert_eq!(deliver(to, "stripe", &event("young", "")).await?.outcome, "accepted");
    let (deleter, ager) = (attic.scene.database().await?, attic.scene.database().await?);
    for client in [&deleter, &ager] {
        client.batch_execute("set synchronous_commit = off").await?;
    }
    let purge = deleter
        .prepare("select events from hapax.retain_events(0, 256, 100, interval '35 days', interval '90 days', false)")
        .await?;
    let age = "update hapax.ledger set received_at = now() - interval '36 days', settled_at = now() - interval '36 days'
               where event_id = 'raced'";
    let age = ager.prepare(age).await?;
    let (mut one, mut two, mut three) = (Client::new(to), Client::new(to), Client::new(to));
    let (raced, young) = (event("raced", ""), event("young", ""));
    let (mut accepted, mut purged, mut duplicates) = (0, 0, 0);
    for _ in 0..ROUNDS {
        ager.execute(&age, &[]).await?;
        let (first, second, control, gone) = tokio::join!(
            deliver_on(&mut one, "stripe", &raced),
            deliver_on(&mut two, "stripe", &raced),
            deliver_on(&mut three, "stripe", &young),
            deleter.query_one(&purge, &[]),
        );
        for answer in [first?, second?] {
            match (answer.status, answer.outcome.as_str()) {
                (200, "accepted") => accepted += 1,
                (200, "duplicate") => duplicates += 1,
                _ => anyhow::bail!("{answer:?}"),
            }
        }
        assert_eq!(control?.outcome, "duplicate");
        purged += gone?.get::<_, i64>(0);
    }
    let found = attic.scene.found().await?;
    assert_eq!(found.effects.get("raced"), Some(&accepted));
    assert_eq!(found.effects.get("young"), Some(&1));
    // What was accepted is there, or was purged.
    assert_eq!(purged + found.rows.get("raced").copied().unwrap_or(0), accepted);
    assert!(accepted > 1 && duplicates > 1, "{accepted} accepted, {duplicates} duplicates: no race");
    Ok(())
}

/// Under traffic whose duplicates come late, nothing that was acknowledged is lost.
#[tokio::test]
async fn a_pass_under_load_takes_nothing_that_is_young() -> Result<()> {
    let attic = Attic::new().await?;
    for number in 0..300 {
        attic.add(&format!("old_{number}"), "done", "40 days", "40 days").await?;
    }
    let gateway = attic.scene.gateway(&ALONE).await?;
    let load = Load::start(gateway.listen()?, "stripe", 2);
    load.go_on(20).await?;
    let mut events = 0;
    for _ in 0..5 {
        events += attic.pass(&["retention.batch_rows = 100"]).await?.events;
        load.go_on(20).await?;
    }
    let sent = load.finish().await?;
    assert_eq!(events, 300);
    assert!(sent.iter().all(|sent| sent.answer.is_success()), "{sent:?}");
    attic.scene.assert_once(&acknowledged(&sent)).await?;
    Ok(())
}

/// Rows from the future: the clock is behind. An order is no confirmation of that.
#[tokio::test]
async fn a_clock_behind_its_rows_stops_a_pass() -> Result<()> {
    let attic = Attic::new().await?;
    attic.add("old", "done", "40 days", "40 days").await?;
    attic.add("future", "done", "-4 minutes", "0").await?;
    attic.pass_with(&[], Mode::Routine, &mut Clock::default()).await?.1?;
    attic.add("old", "done", "40 days", "40 days").await?;
    attic.add("farther", "done", "-6 minutes", "0").await?;
    for mode in [Mode::Routine, ORDERED, Mode::Look] {
        let ended = attic.pass_with(&[], mode, &mut Clock::default()).await?.1;
        assert!(matches!(ended, Err(Ended::Stopped(Stop::Behind { .. }))), "{ended:?}");
    }
    let (code, _, error) = attic.retain(&[], &["--once"]).await?;
    assert!(code == 1 && error.contains("behind its newest") && error.contains("--force"), "{error}");
    // The row alone says it too.
    attic.database.batch_execute("truncate hapax.body").await?;
    let ended = attic.pass_with(&[], ORDERED, &mut Clock::default()).await?.1;
    assert!(matches!(ended, Err(Ended::Stopped(Stop::Behind { .. }))), "{ended:?}");
    assert_eq!(attic.ids().await?, ids(&["farther", "future", "old"]));
    let (code, said, _) = attic.retain(&[], &["--once", "--force"]).await?;
    assert!(code == 0 && said.contains("deleted 1 events"), "{said}");
    assert_eq!(attic.ids().await?, ids(&["farther", "future"]));
    Ok(())
}

/// A jump is seen once; it stops everybody until an operator's pass has come to its end.
#[tokio::test]
async fn a_clock_that_jumped_stops_all_until_it_is_confirmed() -> Result<()> {
    let attic = Attic::new().await?;
    attic.add("old", "done", "40 days", "40 days").await?;
    let mut clock = Clock::default();
    let now = jiff::Timestamp::now().as_duration().as_secs_f64();
    clock.read(now - 3600.0, Instant::now())?;
    let ended = attic.pass_with(&[], Mode::Routine, &mut clock).await?.1;
    assert!(matches!(ended, Err(Ended::Stopped(Stop::Jumped { .. }))), "{ended:?}");
    for clock in [&mut clock, &mut Clock::default()] {
        let ended = attic.pass_with(&[], Mode::Routine, clock).await?.1;
        assert!(matches!(ended, Err(Ended::Stopped(Stop::Before(_)))), "{ended:?}");
    }
    assert_eq!(attic.ids().await?, ids(&["old"]));
    let (code, said, error) = attic.retain(&[], &["--once"]).await?;
    assert!(code == 0 && said.contains("deleted 1 events"), "{said}{error}");
    attic.pass_with(&[], Mode::Routine, &mut clock).await?.1?;
    Ok(())
}

#[tokio::test]
async fn too_large_a_share_of_a_large_table_is_not_deleted_without_an_order() -> Result<()> {
    let attic = Attic::new().await?;
    let insert = "insert into hapax.ledger (received_at, settled_at, token, status, key, digest, source, scope, event_id)
        select at, at, 1, 'done', substr(sha256(convert_to(n::text, 'UTF8')), 1, 16), sha256('x'), 'plain', '-', n::text
        from generate_series(1, 130000) n, lateral (
            select now() - case when n % 10 < 6 then interval '36 days' else interval '1 day' end as at) a";
    attic.database.batch_execute(insert).await?;
    let ended = attic.pass_with(&[], Mode::Routine, &mut Clock::default()).await?.1;
    let error = ended.err().context("it did not stop")?.to_string();
    assert!(
        error.contains("events are past their horizon") && error.contains("hapax retain --once"),
        "{error}"
    );
    assert_eq!(attic.count("hapax.ledger").await?, 130_000);
    // With a limit that allows it, nothing is said.
    let allowed = ["retention.share_max = 0.7", "retention.batch_rows = 20000"];
    let look = attic.pass_with(&allowed, Mode::Look, &mut Clock::default()).await?.0;
    assert_eq!((look.events, look.warnings.len()), (78_000, 0));
    let (code, said, error) = attic.retain(&["retention.batch_rows = 20000"], &["--once", "--json"]).await?;
    assert!(code == 0 && error.contains("warning: about"), "{error}");
    let said: Value = serde_json::from_str(&said)?;
    assert_eq!(said.pointer("/counts/events"), Some(&78_000.into()), "{said}");
    attic.pass_with(&[], Mode::Routine, &mut Clock::default()).await?.1?;
    Ok(())
}

#[tokio::test]
async fn the_command_says_what_it_did_and_a_dry_run_does_nothing() -> Result<()> {
    let attic = Attic::new().await?;
    let day: String = attic.database.query_one("select fx.add_day(9)", &[]).await?.get(0);
    attic.add("old", "done", "40 days", "40 days").await?;
    attic.add("waits", "open", "9 days", "0").await?;
    attic.add_job("waits", "pull:plain", "done", "2 days").await?;
    let before =
        attic.list("select l::text from hapax.ledger l union all select b::text from hapax.body b").await?;
    let (code, said, error) = attic.retain(&[], &["--dry-run"]).await?;
    assert_eq!(code, 0, "{error}");
    for line in ["would delete 1 events", "would move aside 1 bodies", &format!("would drop hapax.{day}")] {
        assert!(said.contains(line), "{line}: {said}");
    }
    assert_eq!(
        attic.list("select l::text from hapax.ledger l union all select b::text from hapax.body b").await?,
        before
    );
    assert_eq!(attic.count("hapax.retention where worker is null").await?, 1);
    let (code, said, error) = attic.retain(&[], &["--once", "--duty", "1"]).await?;
    assert_eq!(code, 0, "{error}");
    for line in ["deleted 1 events", "moved aside 1 bodies", &format!("dropped hapax.{day}")] {
        assert!(said.contains(line), "{line}: {said}");
    }
    assert!(error.contains("going over: events"), "{error}");
    let (code, said, _) = attic.retain(&[], &["--once"]).await?;
    assert!(code == 0 && said.contains("nothing to delete"), "{said}");
    for wrong in [&[][..], &["--once", "--duty", "0"], &["--dry-run", "--force"]] {
        assert_eq!(attic.retain(&[], wrong).await?.0, 2, "{wrong:?}");
    }
    Ok(())
}

/// A pass that was killed leaves nothing behind but its place.
#[tokio::test]
async fn a_pass_that_was_killed_is_gone_on_with() -> Result<()> {
    let attic = Attic::new().await?;
    let insert = "insert into hapax.ledger (received_at, settled_at, token, status, key, digest, source, scope, event_id)
        select at, at, 1, 'done', substr(sha256(convert_to(n::text, 'UTF8')), 1, 16), sha256('x'), 'plain', '-', n::text
        from generate_series(1, 5000) n, lateral (select now() - interval '36 days' as at) a";
    attic.database.batch_execute(insert).await?;
    let small = ["retention.batch_rows = 100"];
    let file = attic.file(&small)?;
    // It rests so long that it comes to no end.
    let mut killed = Command::new(env!("CARGO_BIN_EXE_hapax"))
        .args(["retain", "--once", "--duty", "0.001", "--config"])
        .arg(file.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    let begun = async || (attic.count("hapax.ledger").await.ok()? < 5000).then_some(());
    let begun = eventually(LIMIT, begun).await;
    killed.kill()?;
    killed.wait()?;
    begun?;
    let left = attic.count("hapax.ledger").await?;
    assert!(left > 0);
    let held = attic.pass_with(&small, Mode::Routine, &mut Clock::default()).await?.1;
    assert!(matches!(held, Ok(()) | Err(Ended::Held)), "{held:?}");
    attic.let_hold_pass().await?;
    attic.pass(&small).await?;
    assert_eq!(attic.count("hapax.ledger").await?, 0);
    Ok(())
}

#[tokio::test]
async fn a_gateway_deletes_by_itself_and_tells() -> Result<()> {
    let attic = Attic::new().await?;
    attic.add("old", "done", "40 days", "40 days").await?;
    attic.add("young", "done", "3 days", "3 days").await?;
    let every = [&ALONE[..4], &["retention.every = \"100ms\"", "retention.duty = 1"]].concat();
    let gateway = attic.scene.gateway(&every).await?;
    until_metric(&gateway, "hapax_retention_rows_deleted_total", "kind=\"events\"", |rows| rows == 1).await?;
    until_metric(&gateway, "hapax_retention_last_success_timestamp_seconds", "", |at| at > 0).await?;
    assert_eq!(attic.ids().await?, ids(&["young"]));
    attic.add("future", "done", "-1 hour", "0").await?;
    until_metric(&gateway, "hapax_retention_stopped", "", |stopped| stopped == 1).await?;
    gateway
        .log(|line| line["message"] == "retention: stopped, nothing is deleted" && line["level"] == "ERROR")
        .await?;
    attic
        .database
        .batch_execute("delete from hapax.ledger where event_id = 'future'; delete from hapax.body")
        .await?;
    until_metric(&gateway, "hapax_retention_stopped", "", |stopped| stopped == 0).await?;
    Ok(())
}

/// Partitions are there before their day, and each moment has one.
#[tokio::test]
async fn days_are_made_ahead_and_meet_at_midnight() -> Result<()> {
    let attic = Attic::new().await?;
    attic.database.batch_execute("set timezone = 'Asia/Kathmandu'").await?;
    attic.database.query_one("select hapax.make_body_partitions(7)", &[]).await?;
    let add = "insert into hapax.body (received_at, key, body, headers)
        select (date_trunc('day', now() at time zone 'UTC') + n * interval '1 day' + step) at time zone 'UTC', '', '', '{}'
        from generate_series(0, 7) n, unnest('{0, 23:59:59.999999}'::interval[]) step";
    attic.database.batch_execute(add).await?;
    let misplaced = "hapax.body b join pg_class c on c.oid = b.tableoid
        where c.relname <> 'body_' || to_char(b.received_at at time zone 'UTC', 'YYYYMMDD')";
    assert_eq!(attic.count(misplaced).await?, 0);
    assert_eq!(attic.list("select distinct tableoid::regclass::text from hapax.body").await?.len(), 8);
    // The ninth day has none yet.
    let beyond = "insert into hapax.body (received_at, key, body, headers) values (now() + interval '8 days', '', '', '{}')";
    attic.database.batch_execute(beyond).await?;
    assert_eq!(attic.count("hapax.body_default").await?, 1);
    Ok(())
}

/// It gives way to nobody for long: a batch that has to wait for a lock gives up.
#[tokio::test]
async fn a_locked_table_ends_a_pass_soon() -> Result<()> {
    let attic = Attic::new().await?;
    attic.add("old", "done", "40 days", "40 days").await?;
    let other = attic.scene.database().await?;
    other.batch_execute("begin; lock table hapax.guard in access exclusive mode").await?;
    let ended = tokio::time::timeout(LIMIT, attic.pass_with(&[], ORDERED, &mut Clock::default())).await??.1;
    assert!(matches!(ended, Err(Ended::Failed(_) | Ended::Silent(_))), "{ended:?}");
    other.batch_execute("rollback").await?;
    attic.let_hold_pass().await?;
    attic.pass(&[]).await?;
    assert_eq!(attic.ids().await?, ids(&[]));
    Ok(())
}

#[test]
fn the_place_is_held_for_longer_than_a_cleaner_is_silent() {
    assert!(HOLD >= Duration::from_secs(5));
}

/// A fifth of the rows dead, the default, is too late for a table of so many.
#[tokio::test]
async fn large_tables_are_vacuumed_early() -> Result<()> {
    let database = Scene::new().await?.database().await?;
    for (table, most) in [("ledger", 0.02), ("guard", 0.02), ("job", 0.01)] {
        let settings =
            "select array_to_string(reloptions, ' ') from pg_class where oid = ('hapax.' || $1)::regclass";
        let settings: String = database.query_one(settings, &[&table]).await?.get(0);
        for wanted in
            [&format!("autovacuum_vacuum_scale_factor={most}"), "autovacuum_vacuum_insert_scale_factor=0.05"]
        {
            assert!(settings.contains(wanted), "{table}: {settings}");
        }
    }
    Ok(())
}
