//! Whatever happens to Postgres or inside a transaction: a 2xx is given for committed events only, everything else can
//! be sent again and is then accepted, and an event that fails takes no other with it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result};
use hapax::dev::{Postgres, PostgresOptions};
use hapax::identify::EventKey;

use crate::harness::gateway::Gateway;
use crate::harness::load::{LIMIT, Load, acknowledged, burst, metric, until_redis_in_use};
use crate::harness::proxy::{BATCH, BATCH_DONE, Direction, Hook, Mode, Proxy, Verdict, count_of};
use crate::harness::scene::{Answer, PATIENT, Scene, deliver, event};
use crate::harness::stores::{self, private_postgres};
use crate::harness::wait::eventually;

const PAIRS: usize = 8;

/// A gateway under load, and a Postgres that only it uses.
struct Outage {
    scene: Scene,
    postgres: Postgres,
    gateway: Gateway,
    load: Load,
}

impl Outage {
    async fn start() -> Result<Self> {
        let postgres = private_postgres(PostgresOptions::default()).await?;
        let mut scene = Scene::on(&postgres, stores::redis().url()).await?;
        scene.stores.redis_prefix = format!("{}:", postgres.address());
        let short = [
            "fast_tier.memory_ttl = \"1ms\"",
            "in_flight.wait = \"200ms\"",
            "postgres.statement_timeout = \"600ms\"",
            "postgres.record_timeout = \"1s\"",
            // No answer may wait for this one.
            "postgres.commit_timeout = \"30s\"",
            "server.body_timeout = \"1s\"",
            "server.deadline = \"2s\"",
        ];
        let gateway = scene.gateway(&short).await?;
        let load = Load::start(gateway.listen()?, "stripe", PAIRS);
        load.go_on(100).await?;
        Ok(Self { scene, postgres, gateway, load })
    }

    /// Deliveries are accepted again, and what was promised is kept.
    async fn recover(self) -> Result<()> {
        let to = self.gateway.listen()?;
        let back = async || deliver(to, "stripe", &event("after", "")).await.ok().filter(Answer::is_success);
        eventually(LIMIT, back).await.context("no delivery is accepted any more")?;
        self.load.go_on(100).await?;
        let sent = self.load.finish().await?;
        for sent in &sent {
            // 409: the other delivery of the pair was not through when this one had waited.
            let refused = matches!(sent.answer.status, 409 | 503) && sent.answer.retry_after >= Some(1);
            assert!(sent.answer.is_success() || refused, "{sent:?}");
            assert!(sent.took < Duration::from_secs(12), "long after the deadline: {sent:?}");
        }
        let acknowledged = acknowledged(&sent);
        self.scene.assert_once(&acknowledged).await?;

        let all: BTreeSet<String> = sent.into_iter().map(|sent| sent.id).collect();
        for id in all.difference(&acknowledged) {
            let answer = deliver(to, "stripe", &event(id, "")).await?;
            assert!(answer.is_success(), "{id}: {answer:?}");
        }
        self.scene.assert_once(&all).await?;
        Ok(())
    }
}

#[tokio::test]
async fn killed() -> Result<()> {
    let mut outage = Outage::start().await?;
    outage.postgres.kill()?;
    outage.load.go_on(4 * PAIRS).await?;
    outage.postgres.restart()?;
    outage.recover().await
}

#[tokio::test]
async fn stopped() -> Result<()> {
    let mut outage = Outage::start().await?;
    outage.postgres.pause();
    outage.load.go_on(4 * PAIRS).await?;
    outage.postgres.resume();
    outage.recover().await
}

#[tokio::test]
async fn restarted() -> Result<()> {
    let mut outage = Outage::start().await?;
    for _ in 0..3 {
        outage.postgres.restart()?;
        outage.load.go_on(50).await?;
    }
    outage.recover().await
}

/// A proxy that cuts a connection once, when it sees the text go by.
pub(crate) fn cut_once(
    direction: Direction,
    text: impl AsRef<[u8]> + Send + Sync + 'static,
    armed: &Arc<AtomicBool>,
) -> Hook {
    let armed = Arc::clone(armed);
    Box::new(move |way, bytes| {
        let seen = way == direction && count_of(text.as_ref(), bytes) > 0;
        if seen && armed.swap(false, Ordering::SeqCst) { Verdict::Cut } else { Verdict::Forward }
    })
}

#[tokio::test]
async fn cut_at_the_commit() -> Result<()> {
    // The batch does not arrive; or it is committed, and the answer is lost.
    for (direction, text) in [(Direction::ToServer, BATCH), (Direction::ToClient, BATCH_DONE)] {
        let mut scene = Scene::new().await?;
        let armed = Arc::new(AtomicBool::new(false));
        let proxy = Proxy::start_with(stores::postgres().address(), cut_once(direction, text, &armed))?;
        scene.stores.postgres_url = stores::postgres().url_at(proxy.address(), &scene.stores.database);
        let gateway = scene.gateway(&["in_flight.wait = \"20ms\""]).await?;
        until_redis_in_use(&gateway, true).await?;
        let first = deliver(gateway.listen()?, "stripe", &event("first", "")).await?;
        assert_eq!(first.outcome, "accepted");
        // In a batch; and alone, which is how an event is written that somebody else has claimed.
        for id in ["batched", "alone"] {
            if id == "alone" {
                let mut lease = redis::cmd("SET");
                lease.arg(scene.redis_key("stripe", id)).arg("L foreign");
                lease.exec_async(&mut scene.redis().await?).await?;
            }
            armed.store(true, Ordering::SeqCst);
            let answer = deliver(gateway.listen()?, "stripe", &event(id, "")).await?;
            assert!(!armed.load(Ordering::SeqCst), "nothing was cut");
            assert_eq!((answer.status, answer.outcome.as_str()), (200, "accepted"), "{direction:?} {id}");
            let again = deliver(gateway.listen()?, "stripe", &event(id, "")).await?;
            assert_eq!(again.outcome, "duplicate");
            scene.assert_once([&id.to_owned()]).await?;
        }
        assert!(metric(&gateway, "hapax_batch_failures_total", "trouble=\"lost\"").await? >= 1);
    }
    Ok(())
}

#[tokio::test]
async fn a_session_ended_in_the_middle() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&PATIENT).await?;
    let holder = scene.hold().await?;
    let (to, body) = (gateway.listen()?, event("evt_1", "\"do\":\"wait\""));
    let delivery = tokio::spawn(async move { deliver(to, "stripe", &body).await });
    for _ in 0..3 {
        let ended = scene.waiting(1).await?;
        holder
            .execute("select pg_terminate_backend(pid, 60000) from unnest($1::int[]) as pid", &[&ended])
            .await?;
    }
    scene.waiting(1).await?;
    drop(holder);
    let answer = delivery.await??;
    assert_eq!((answer.status, answer.outcome.as_str()), (200, "accepted"));
    scene.assert_once([&"evt_1".to_owned()]).await?;
    Ok(())
}

/// The old session may still commit, and may as well not: the row that it wrote is waited for.
#[tokio::test]
async fn cut_while_the_effect_is_at_work() -> Result<()> {
    let mut scene = Scene::new().await?;
    let proxy = Proxy::start(stores::postgres().address())?;
    let direct = scene.stores.postgres_url.clone();
    scene.stores.postgres_url = stores::postgres().url_at(proxy.address(), &scene.stores.database);
    let gateway = scene.gateway(&PATIENT).await?;
    scene.stores.postgres_url = direct;
    let holder = scene.hold().await?;
    let (to, body) = (gateway.listen()?, event("evt_1", "\"do\":\"wait\""));
    let delivery = tokio::spawn(async move { deliver(to, "stripe", &body).await });
    let first = scene.waiting(1).await?;
    proxy.cut();
    // The next attempt meets the first one's row, or, once the first one's session has found itself alone, the lock.
    let next = "select 1 from pg_stat_activity where datname = current_database() and pid <> all ($1) \
                and wait_event in ('transactionid', 'advisory')";
    let met = async || holder.query_opt(next, &[&first]).await.ok()?.map(drop);
    eventually(LIMIT, met).await.context("no second attempt")?;
    assert!(!delivery.is_finished());
    drop(holder);
    let answer = delivery.await??;
    assert_eq!((answer.status, answer.outcome.as_str()), (200, "accepted"));
    scene.assert_once([&"evt_1".to_owned()]).await?;
    Ok(())
}

#[tokio::test]
async fn a_locked_row_holds_up_nobody_else() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&[]).await?;
    let mut other = scene.database().await?;
    let writing = other.transaction().await?;
    let key = EventKey::of("stripe", "-", "evt_0");
    let row = "insert into hapax.ledger (received_at, settled_at, token, status, key, digest, source, scope, event_id) \
               values (now(), now(), 1, 'done', $1, sha256(''), 'stripe', '-', 'evt_0')";
    writing.execute(row, &[&key.0.as_slice()]).await?;
    let bodies = (0..64).map(|number| event(&format!("evt_{number}"), "")).collect();
    let answers = burst(gateway.listen()?, "stripe", bodies).await?;
    let (locked, free) = answers.split_first().context("answers")?;
    assert_eq!((locked.status, locked.outcome.as_str()), (409, "in_flight"));
    assert!(locked.retry_after >= Some(1));
    for answer in free {
        assert_eq!((answer.status, answer.outcome.as_str()), (200, "accepted"), "{answer:?}");
    }
    writing.rollback().await?;
    let again = deliver(gateway.listen()?, "stripe", &event("evt_0", "")).await?;
    assert_eq!(again.outcome, "accepted");
    assert_eq!(scene.found().await?.effects.len(), 64);
    Ok(())
}

/// Delivers `culprit` and sixteen others so that they stand in one queue: while an effect before them waits.
async fn among_others(scene: &Scene, gateway: &Gateway, culprit: &str) -> Result<(Answer, Vec<Answer>)> {
    let holder = scene.hold().await?;
    let to = gateway.listen()?;
    let first = event("first", "\"do\":\"wait\"");
    let first = tokio::spawn(async move { deliver(to, "stripe", &first).await });
    scene.waiting(1).await?;
    let mut bodies: Vec<_> = (0..16).map(|number| event(&format!("evt_{number}"), "")).collect();
    bodies.push(event("culprit", culprit));
    let burst = tokio::spawn(async move { burst(to, "stripe", bodies).await });
    let queued = async || (metric(gateway, "hapax_requests_in_flight", "").await.ok()? >= 18).then_some(());
    eventually(LIMIT, queued).await.context("not all are queued")?;
    drop(holder);
    assert_eq!(first.await??.outcome, "accepted");
    let mut answers = burst.await??;
    let culprit = answers.pop().context("answers")?;
    Ok((culprit, answers))
}

fn assert_all_accepted(answers: &[Answer], why: &str) {
    for answer in answers {
        assert_eq!((answer.status, answer.outcome.as_str()), (200, "accepted"), "{why}");
    }
}

fn assert_unavailable(answer: &Answer, why: &str) {
    assert_eq!((answer.status, answer.outcome.as_str()), (503, "unavailable"), "{why}");
    assert!(answer.retry_after >= Some(1), "{why}");
}

/// An effect that raises what the body says, and one whose mistake is found at the commit only.
const RAISES: &str = "
    create sequence fx.tries;
    create table fx.parent (id text primary key);
    create table fx.child (id text references fx.parent deferrable initially deferred);
    create function fx.raises(e hapax.event) returns void language plpgsql as $$
    declare
        event constant jsonb := hapax.json(e);
    begin
        if event ? 'orphan' then
            insert into fx.child values (e.event_id);
        end if;
        if event ? 'twice' and nextval('fx.tries') <= 2 then
            raise exception 'try again' using errcode = event->>'twice';
        end if;
        if event ? 'sqlstate' then
            raise exception 'as told' using errcode = event->>'sqlstate';
        end if;
        perform fx.apply(e);
    end
    $$;
";

#[tokio::test]
async fn whatever_an_effect_raises_fails_its_own_event_only() -> Result<()> {
    // Among them those that mean something about the server when the server says them.
    for sqlstate in
        ["P0001", "40001", "40P01", "40003", "55000", "55P03", "57014", "57P01", "25006", "53100", "08006"]
    {
        let scene = Scene::new().await?;
        scene.database().await?.batch_execute(RAISES).await?;
        let gateway = scene.gateway(&["source.stripe.effect = \"fx.raises\""]).await?;
        let culprit = format!("\"sqlstate\":\"{sqlstate}\"");
        let (culprit, others) = among_others(&scene, &gateway, &culprit).await?;
        assert_all_accepted(&others, sqlstate);
        assert_unavailable(&culprit, sqlstate);
        assert!(!scene.found().await?.rows.contains_key("culprit"));
        // Given back, so that it need not wait for the lease; and recorded once it can be.
        assert!(!scene.markers().await?.contains_key(&scene.redis_key("stripe", "culprit")));
        let again = deliver(gateway.listen()?, "stripe", &event("culprit", "")).await?;
        assert_eq!(again.outcome, "accepted", "{sqlstate}");
        assert_eq!(scene.assert_once([]).await?.effects.len(), 18);
    }
    Ok(())
}

#[tokio::test]
async fn a_constraint_that_fails_at_the_commit_names_its_event() -> Result<()> {
    let scene = Scene::new().await?;
    scene.database().await?.batch_execute(RAISES).await?;
    let gateway = scene.gateway(&["source.stripe.effect = \"fx.raises\""]).await?;
    let (culprit, others) = among_others(&scene, &gateway, "\"orphan\":true").await?;
    assert_all_accepted(&others, "deferred");
    assert_unavailable(&culprit, "deferred");
    assert_eq!(scene.assert_once([]).await?.effects.len(), 17);
    Ok(())
}

#[tokio::test]
async fn what_may_succeed_the_next_time_is_tried_again() -> Result<()> {
    for sqlstate in ["40001", "40P01"] {
        let scene = Scene::new().await?;
        scene.database().await?.batch_execute(RAISES).await?;
        let gateway = scene.gateway(&["source.stripe.effect = \"fx.raises\""]).await?;
        let body = event("evt_1", &format!("\"twice\":\"{sqlstate}\""));
        let answer = deliver(gateway.listen()?, "stripe", &body).await?;
        assert_eq!((answer.status, answer.outcome.as_str()), (200, "accepted"), "{sqlstate}");
        scene.assert_once([&"evt_1".to_owned()]).await?;
    }
    Ok(())
}

#[tokio::test]
async fn an_effect_that_takes_too_long_fails_its_own_event_only() -> Result<()> {
    let scene = Scene::new().await?;
    let short = [
        // Not time enough for the same again.
        "postgres.statement_timeout = \"4s\"",
        "postgres.record_timeout = \"7500ms\"",
        "server.deadline = \"15s\"",
        "server.drain = \"15s\"",
        "fast_tier.lease = \"60s\"",
    ];
    let gateway = scene.gateway(&short).await?;
    let (culprit, others) = among_others(&scene, &gateway, "\"do\":\"sleep\",\"seconds\":60").await?;
    assert_all_accepted(&others, "slow");
    assert_unavailable(&culprit, "slow");
    assert_eq!(scene.assert_once([]).await?.effects.len(), 17);
    Ok(())
}

#[tokio::test]
async fn an_effect_that_refuses_for_good_is_recorded_as_such() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&PATIENT).await?;
    let body = event("evt_1", "\"do\":\"reject\"");
    for outcome in ["rejected", "duplicate"] {
        let answer = deliver(gateway.listen()?, "stripe", &body).await?;
        assert_eq!((answer.status, answer.outcome.as_str()), (200, outcome));
    }
    let query = "select status, body = $1 from hapax.events join hapax.body b using (received_at)";
    let row = scene.database().await?.query_one(query, &[&&*body]).await?;
    assert_eq!((row.get(0), row.get(1)), ("rejected", true));
    assert!(scene.found().await?.effects.is_empty());
    Ok(())
}

#[tokio::test]
async fn a_source_that_often_fails_takes_nothing_from_another_with_the_same_effect() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&[&PATIENT[..], &["source.other.effect = \"fx.apply\""]].concat()).await?;
    let to = gateway.listen()?;
    let sick = async |sender: usize| -> Result<()> {
        for number in 0..30 {
            let (behaves, outcome) = match number % 10 {
                0 | 3 => ("\"do\":\"reject\"", "rejected"),
                6 => ("\"do\":\"raise\"", "unavailable"),
                _ => ("", "accepted"),
            };
            let answer = deliver(to, "other", &event(&format!("sick_{sender}_{number}"), behaves)).await?;
            assert_eq!(answer.outcome, outcome);
        }
        Ok(())
    };
    let load = Load::start(to, "stripe", 4);
    tokio::try_join!(sick(0), sick(1), sick(2), sick(3))?;
    let sent = load.finish().await?;
    assert!(sent.iter().all(|sent| sent.answer.is_success()), "{sent:?}");
    scene.assert_once(&acknowledged(&sent)).await?;
    Ok(())
}

#[tokio::test]
async fn what_an_effect_sets_for_its_session_is_undone() -> Result<()> {
    let scene = Scene::new().await?;
    let database = scene.database().await?;
    let meddles = "
        create role fx_someone;
        create table fx.seen (setting text, value text);
        create function fx.meddles(e hapax.event) returns void language plpgsql as $$
        declare
            setting text;
        begin
            if hapax.json(e) ? 'meddle' then
                set synchronous_commit = off;
                set search_path = fx, pg_temp;
                set lock_timeout = '1ms';
                set statement_timeout = '1h';
                set timezone = 'Asia/Kathmandu';
                set role fx_someone;
                return;
            end if;
            foreach setting in array array['synchronous_commit', 'search_path', 'lock_timeout', 'statement_timeout', 'timezone', 'role'] loop
                insert into fx.seen values (setting, current_setting(setting));
            end loop;
        end $$;
        grant usage on schema hapax, fx to fx_someone;
        grant all on all tables in schema hapax, fx to fx_someone;";
    database.batch_execute(meddles).await?;
    let gateway = scene.gateway(&["source.stripe.effect = \"fx.meddles\""]).await?;
    let seen = async || -> Result<Vec<(String, String)>> {
        let rows = database.query("select distinct setting, value from fx.seen order by 1, 2", &[]).await?;
        Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
    };
    let look = async |name: &str| -> Result<()> {
        let bodies = (0..32).map(|number| event(&format!("{name}_{number}"), "")).collect();
        assert_all_accepted(&burst(gateway.listen()?, "stripe", bodies).await?, name);
        Ok(())
    };
    look("before").await?;
    let before = seen().await?;
    assert_eq!(before.len(), 6, "{before:?}");
    for number in 0..8 {
        let body = event(&format!("meddle_{number}"), "\"meddle\":true");
        assert_eq!(deliver(gateway.listen()?, "stripe", &body).await?.outcome, "accepted");
        look(&format!("after_{number}")).await?;
    }
    assert_eq!(seen().await?, before);
    Ok(())
}

/// A server that takes connections and says nothing must not keep the next one of the DSN from being tried.
#[tokio::test]
async fn the_second_host_is_used_while_the_first_says_nothing() -> Result<()> {
    let mut scene = Scene::new().await?;
    let postgres = stores::postgres();
    let dead = Proxy::start(postgres.address())?;
    dead.set(Mode::Blackhole);
    let alive = scene.stores.postgres_url.clone();
    let (before, after) =
        alive.split_once(&postgres.address().to_string()).context("the address in the URL")?;
    scene.stores.postgres_url = format!("{before}{},{}{after}", dead.address(), postgres.address());
    let gateway = scene.gateway(&[&PATIENT[..], &["postgres.connect_timeout = \"1s\""]].concat()).await?;
    let answer = deliver(gateway.listen()?, "stripe", &event("evt_1", "")).await?;
    assert_eq!((answer.status, answer.outcome.as_str()), (200, "accepted"));
    assert!(dead.accepted() > 0, "the first host was tried");
    scene.stores.postgres_url = alive;
    scene.assert_once([&"evt_1".to_owned()]).await?;
    Ok(())
}
