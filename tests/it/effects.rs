//! How effects are kept apart: in the order of what they lock, or each in a transaction of its own.

use anyhow::Result;

use crate::harness::load::burst;
use crate::harness::scene::{PATIENT, Scene, event};

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
    let deadlocks = "select deadlocks from pg_stat_database where datname = current_database()";
    assert_eq!(database.query_one(deadlocks, &[]).await?.get::<_, i64>(0), 0);
    Ok(())
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
