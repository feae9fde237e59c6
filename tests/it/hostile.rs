//! Whatever one event or its effect does, the events that are recorded beside it are not affected, and the gateway works
//! on afterwards without a restart.

use anyhow::{Context as _, Result};
use bytes::Bytes;
use hapax::dev::PostgresOptions;

use crate::harness::load::burst;
use crate::harness::scene::{PATIENT, SECRET, Scene, deliver, event};
use crate::harness::stores::{self, private_postgres};

/// An effect for each kind of harm, chosen by the body's `do`.
const HOSTILE: &str = "
    create role stranger;
    create function fx.hostile(e hapax.event) returns void language plpgsql as $$
    begin
        insert into fx.effect (source, event_id) values (e.source, e.event_id);
        case hapax.json(e)->>'do'
            when 'forget' then deallocate all;
            when 'role' then set local role stranger;
            when 'session' then set session authorization stranger;
            when 'path' then set local search_path = '';
            when 'end' then perform pg_terminate_backend(pg_backend_pid());
            when 'lock' then perform pg_advisory_lock(42);
            when 'talk' then raise exception '%', repeat('x', 20000000);
            when 'epoch' then delete from hapax.installation;
            when 'listen' then listen somebody;
            when 'temp' then create temp table of_mine (x int);
            when 'off' then set synchronous_commit = off;
            when 'time' then set statement_timeout = '1ms';
            else null;
        end case;
    end
    $$;
";

const KINDS: [&str; 12] =
    ["forget", "role", "session", "path", "end", "lock", "talk", "epoch", "listen", "temp", "off", "time"];

#[tokio::test]
async fn one_hostile_effect_fails_alone() -> Result<()> {
    // Roles belong to the whole server.
    let postgres = private_postgres(PostgresOptions::default()).await?;
    let scene = Scene::on(&postgres, stores::redis().url()).await?;
    scene.database().await?.batch_execute(HOSTILE).await?;
    let mut settings = PATIENT.to_vec();
    settings.extend(["source.stripe.effect = \"fx.hostile\"", "fast_tier.prefix = \"hostile:\""]);
    let gateway = scene.gateway(&settings).await?;
    let to = gateway.listen()?;
    for kind in KINDS {
        let harm = event(&format!("{kind}_harm"), &format!("\"do\":\"{kind}\""));
        let good = (0..24).map(|at| event(&format!("{kind}_{at}"), ""));
        let mut bodies: Vec<Bytes> = good.collect();
        bodies.insert(12, harm);
        let answers = burst(to, "stripe", bodies).await?;
        for (at, answer) in answers.iter().enumerate() {
            let harmful = at == 12;
            assert!(answer.is_success() || (harmful && answer.status == 503), "{kind} {at}: {answer:?}");
            assert_eq!(answer.is_success(), answer.retry_after.is_none(), "{kind} {at}: {answer:?}");
        }
        for source in ["stripe", "plain"] {
            let after = event(&format!("{kind}_after_{source}"), "");
            assert_eq!(deliver(to, source, &after).await?.outcome, "accepted", "{kind} {source}");
        }
    }
    let found = scene.found().await?;
    for (id, effects) in &found.effects {
        assert_eq!((*effects, found.rows.get(id)), (1, Some(&1)), "{id}");
    }
    assert!(found.effects.len() >= KINDS.len() * 25, "{} effects", found.effects.len());
    Ok(())
}

/// What a provider says about time is no reason to refuse an event.
#[tokio::test]
async fn odd_times_are_none() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&[]).await?;
    let bodies = ["-009000-01-01T00:00:00Z", "-4713-01-01T00:00:00Z", "9999999999999999999", "x", ""];
    let odd = bodies.iter().enumerate();
    let odd = odd.map(|(at, time)| event(&format!("odd_{at}"), &format!("\"created\":\"{time}\"")));
    let good = (0..16).map(|at| event(&format!("good_{at}"), "\"created\":1700000000"));
    for answer in burst(gateway.listen()?, "stripe", odd.chain(good).collect()).await? {
        assert_eq!((answer.status, answer.outcome.as_str()), (200, "accepted"));
    }
    Ok(())
}

#[tokio::test]
async fn without_todays_partition_bodies_go_to_the_default_one() -> Result<()> {
    let scene = Scene::new().await?;
    let database = scene.database().await?;
    let today: String = database
        .query_one("select to_char(now() at time zone 'UTC', '\"hapax.body_\"YYYYMMDD')", &[])
        .await?
        .get(0);
    let gateway = scene.gateway(&[]).await?;
    // It looks after them itself when it starts; that is not to happen in between.
    gateway.log(|line| line["message"].as_str().is_some_and(|text| text.contains("made ahead"))).await?;
    let made = "select hapax.make_body_partitions(7)";
    database.batch_execute(&format!("alter table hapax.body detach partition {today}")).await?;
    assert_eq!(deliver(gateway.listen()?, "stripe", &event("detached", "")).await?.outcome, "accepted");
    database.batch_execute(&format!("drop table {today}")).await?;
    assert_eq!(deliver(gateway.listen()?, "stripe", &event("dropped", "")).await?.outcome, "accepted");
    let count = "select count(*) from hapax.body_default";
    assert_eq!(database.query_one(count, &[]).await?.get::<_, i64>(0), 2);
    // The day has rows there and stays there; once they are gone, it is made again, and a detached one is attached.
    assert_eq!(database.query_one(made, &[]).await?.get::<_, i32>(0), 0);
    database.batch_execute("truncate hapax.body_default").await?;
    assert_eq!(database.query_one(made, &[]).await?.get::<_, i32>(0), 1);
    database.batch_execute(&format!("alter table hapax.body detach partition {today}")).await?;
    assert_eq!(database.query_one(made, &[]).await?.get::<_, i32>(0), 1);
    Ok(())
}

/// 409 says that the event itself is being written; a table that is locked is trouble of the store.
#[tokio::test]
async fn a_locked_table_is_not_an_event_in_flight() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&["postgres.lock_timeout = \"50ms\""]).await?;
    let mut database = scene.database().await?;
    for table in ["ledger in share mode", "body in access exclusive mode"] {
        let holder = database.transaction().await?;
        holder.batch_execute(&format!("lock table hapax.{table}")).await?;
        for source in ["stripe", "plain"] {
            let answer = deliver(gateway.listen()?, source, &event("evt_1", "")).await?;
            assert_eq!((answer.status, answer.outcome.as_str()), (503, "unavailable"), "{table} {source}");
        }
        holder.rollback().await?;
    }
    for source in ["stripe", "plain"] {
        assert_eq!(deliver(gateway.listen()?, source, &event("evt_1", "")).await?.outcome, "accepted");
    }
    Ok(())
}

/// What it cannot do is said at start, with the right that is missing.
#[tokio::test]
async fn a_role_without_rights_is_refused_by_name() -> Result<()> {
    let postgres = private_postgres(PostgresOptions::default()).await?;
    let mut scene = Scene::on(&postgres, stores::redis().url()).await?;
    let admin = scene.database().await?;
    admin.batch_execute("create role weak login password 'weak'").await?;
    let strong = scene.stores.postgres_url.clone();
    let (_, after) = strong.split_once('@').context("a URL with a user")?;
    scene.stores.postgres_url = format!("postgres://weak:weak@{after}");
    let without = ["source.stripe.effect = \"none\"", "source.other.effect = \"none\""];
    for (grant, lacking) in [
        ("select 1", "usage on schema hapax"),
        (
            "grant usage on schema hapax to weak; grant select on hapax.migration to weak",
            "select on hapax.installation",
        ),
        ("grant select on hapax.installation, hapax.ledger to weak", "insert on hapax.ledger"),
        (
            "grant insert, update, delete on hapax.ledger to weak; grant insert on hapax.body to weak",
            "select on hapax.key_rule, insert on hapax.key_rule",
        ),
    ] {
        admin.batch_execute(grant).await?;
        let error = scene.gateway(&without).await.err().context("it started")?;
        let error = format!("{error:#}");
        assert!(error.contains("69") && error.contains(lacking), "{lacking}: {error}");
    }
    admin
        .batch_execute(
            "grant select, insert on hapax.key_rule to weak; grant select, insert, delete on hapax.guard to weak;
             grant select, insert, update, delete on hapax.job, hapax.share to weak; grant select on hapax.body to weak;
             grant select, insert on hapax.body_kept, hapax.mismatch to weak",
        )
        .await?;
    let error = scene.gateway(&without).await.err().context("it started")?;
    assert!(format!("{error:#}").contains("this role lacks execute on hapax.retain_state"), "{error:#}");
    admin.batch_execute("grant execute on all functions in schema hapax to weak").await?;
    let gateway = scene.gateway(&without).await?;
    assert_eq!(deliver(gateway.listen()?, "plain", &event("evt_1", "")).await?.outcome, "accepted");
    assert!(!gateway.lines().join("\n").contains(SECRET));
    Ok(())
}
