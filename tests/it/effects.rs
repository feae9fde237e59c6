//! How effects are kept apart: in the order of what they lock, or each in a transaction of its own.

use anyhow::{Context as _, Result};
use tokio_postgres::Client as Database;

use crate::harness::load::{LIMIT, burst};
use crate::harness::scene::{PATIENT, Scene, event};
use crate::harness::wait::eventually;

/// Transfers between accounts, and an effect that cannot share a transaction.
const ACCOUNTS: &str = "
    create table fx.account (id integer primary key, balance integer not null);
    insert into fx.account select id, 0 from generate_series(0, 9) id;
    create function fx.pay(e hapax.event) returns void language sql volatile as $$
        update fx.account set balance = balance + 1 where id = (hapax.json(e)->>'account')::integer $$;
    create function fx.own(e hapax.event) returns void language plpgsql as $$
    begin
        create temp table scratch on commit drop as select e.event_id;
        insert into fx.effect (source, event_id) select e.source, event_id from scratch;
    end $$;
";

#[tokio::test]
async fn effects_in_the_order_of_their_locks_do_not_deadlock() -> Result<()> {
    let scene = Scene::new().await?;
    let database = scene.database().await?;
    database.batch_execute(ACCOUNTS).await?;
    let mut settings = PATIENT.to_vec();
    settings.extend(["source.stripe.effect = \"fx.pay\"", "source.stripe.lock = \"/account\""]);
    let (one, two) = (scene.gateway(&settings).await?, scene.gateway(&settings).await?);
    for round in 0..8 {
        // Against each other's order.
        let of = |gateway: usize| {
            let accounts = (0..48).map(move |at| if gateway == 0 { at % 10 } else { 9 - at % 10 });
            let pay = move |(at, account)| {
                event(&format!("evt_{round}_{gateway}_{at}"), &format!("\"account\":{account}"))
            };
            accounts.enumerate().map(pay).collect::<Vec<_>>()
        };
        let (here, there) =
            tokio::try_join!(burst(one.listen()?, "stripe", of(0)), burst(two.listen()?, "stripe", of(1)))?;
        for answer in here.iter().chain(&there) {
            assert_eq!((answer.status, answer.outcome.as_str()), (200, "accepted"));
        }
    }
    let sum = "select sum(balance)::bigint from fx.account";
    assert_eq!(database.query_one(sum, &[]).await?.get::<_, i64>(0), 8 * 2 * 48);
    drop((one, two));
    assert_eq!(deadlocks(&database).await?, 0);
    Ok(())
}

/// Deadlocks that Postgres counted in this database. The gateways must be gone: sessions report what they counted when
/// they end.
async fn deadlocks(database: &Database) -> Result<i64> {
    let sessions = "select count(*) from pg_stat_activity \
                    where datname = current_database() and application_name = 'hapax'";
    let gone = async || (database.query_one(sessions, &[]).await.ok()?.get::<_, i64>(0) == 0).then_some(());
    eventually(LIMIT, gone).await.context("sessions stay")?;
    let counted = "select deadlocks from pg_stat_database where datname = current_database()";
    Ok(database.query_one(counted, &[]).await?.get(0))
}

#[tokio::test]
async fn an_effect_can_have_each_transaction_for_itself() -> Result<()> {
    let scene = Scene::new().await?;
    scene.database().await?.batch_execute(ACCOUNTS).await?;
    let mut settings = PATIENT.to_vec();
    settings.extend(["source.stripe.effect = \"fx.own\"", "source.stripe.effect_batch = false"]);
    let gateway = scene.gateway(&settings).await?;
    let bodies = (0..48).map(|at| event(&format!("evt_{at}"), "")).collect();
    for answer in burst(gateway.listen()?, "stripe", bodies).await? {
        assert_eq!((answer.status, answer.outcome.as_str()), (200, "accepted"));
    }
    assert_eq!(scene.found().await?.effects.len(), 48);
    Ok(())
}

/// Two accounts, the one that comes first by the body; long enough between them for another transaction to come between.
const CROSSING: &str = "
    create function fx.cross(e hapax.event) returns void language plpgsql as $$
    declare
        first constant integer := (hapax.json(e)->>'first')::integer;
    begin
        update fx.account set balance = balance + 1 where id = first;
        perform pg_sleep(0.002);
        update fx.account set balance = balance + 1 where id = 1 - first;
        insert into fx.effect (source, event_id) values (e.source, e.event_id);
    end $$;
";

#[tokio::test]
async fn effects_of_one_group_lock_rows_in_any_order_and_do_not_deadlock() -> Result<()> {
    let scene = Scene::new().await?;
    let database = scene.database().await?;
    database.batch_execute(ACCOUNTS).await?;
    database.batch_execute(CROSSING).await?;
    let mut settings = PATIENT.to_vec();
    settings.push("source.stripe.effect = \"fx.cross\"");
    let (one, two) = (scene.gateway(&settings).await?, scene.gateway(&settings).await?);
    let mut ids = Vec::new();
    for round in 0..4 {
        let id = |gateway: usize, at: usize| format!("evt_{round}_{gateway}_{at}");
        let bodies = |gateway| {
            let one = |at| event(&id(gateway, at), &format!("\"first\":{gateway}"));
            (0..32).map(one).collect()
        };
        let (here, there) = tokio::try_join!(
            burst(one.listen()?, "stripe", bodies(0)),
            burst(two.listen()?, "stripe", bodies(1))
        )?;
        for answer in here.iter().chain(&there) {
            assert_eq!((answer.status, answer.outcome.as_str()), (200, "accepted"));
        }
        ids.extend(
            (0..2)
                .flat_map(|gateway| (0..32).map(move |at| (gateway, at)))
                .map(|(gateway, at)| id(gateway, at)),
        );
    }
    assert_eq!(scene.assert_once(&ids).await?.effects.len(), 4 * 2 * 32);
    drop((one, two));
    assert_eq!(deadlocks(&database).await?, 0);
    Ok(())
}
