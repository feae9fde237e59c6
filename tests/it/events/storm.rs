//! Many events, a command that is killed half-way, and one that runs among workers.

use std::process::Stdio;

use anyhow::{Result, ensure};
use tokio_postgres::Client;

use super::made::{command, hapax, settings};
use crate::harness::scene::Scene;

/// Events of `plain`, each with a job for `orders`, a second apart; their keys are not those of their ids.
async fn fill(database: &Client, events: i32, status: &str, job: &str) -> Result<()> {
    let ledger = "
        insert into hapax.ledger (received_at, settled_at, token, status, key, digest, source, scope, event_id)
        select date_trunc('hour', now()) - interval '3 hours' + i * interval '1 second', case when $2 <> 'open' then now() end, 0,
            $2::text::hapax.status, substr(sha256(int4send(i)), 1, 16), sha256(''), 'plain', '-', 'evt_' || i
        from generate_series(1, $1::integer) i";
    database.execute(ledger, &[&events, &status]).await?;
    let jobs = "
        insert into hapax.job (due_at, received_at, settled_at, attempts, attempts_max, state, key, queue)
        select now(), received_at, case when $1 <> 'pending' then now() end, 1, 5, $1::text::hapax.job_state, key, 'target:orders'
        from hapax.ledger";
    database.execute(jobs, &[&job]).await?;
    database
        .batch_execute("insert into hapax.body (received_at, key, body, headers) select received_at, key, '{}', '{}' from hapax.ledger")
        .await?;
    Ok(())
}

/// How many events have each replay number, smallest first; the jobs have to say the same.
async fn replays(database: &Client) -> Result<Vec<(i32, i64)>> {
    let odd = "select count(*) from hapax.ledger l join hapax.job j using (key) where j.replay <> l.replay";
    ensure!(database.query_one(odd, &[]).await?.get::<_, i64>(0) == 0, "jobs of another replay");
    let rows = database.query("select replay, count(*) from hapax.ledger group by 1 order by 1", &[]).await?;
    Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
}

#[tokio::test]
async fn a_command_that_is_killed_leaves_whole_batches_and_goes_on() -> Result<()> {
    let scene = Scene::new().await?;
    let settings = settings(&scene);
    let database = scene.database().await?;
    fill(&database, 5_000, "done", "done").await?;
    // In the middle of the sixth batch.
    database
        .batch_execute(
            "create function fx.wait() returns trigger language plpgsql as
             $$ begin perform pg_advisory_xact_lock_shared(7); return new; end $$;
             create trigger wait before update on hapax.ledger for each row when (new.event_id = 'evt_2750' and new.replay > 0)
             execute function fx.wait()",
        )
        .await?;
    let holder = scene.hold().await?;
    let (_file, mut first) = command(&settings)?;
    let mut first =
        first.args(["replay", "--source", "plain"]).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    let pids = scene.waiting(1).await?;
    first.kill().await?;
    assert_eq!(replays(&database).await?, [(0, 2_500), (1, 2_500)]);
    // The server may notice or not that nobody waits for this batch: then it is whole, too.
    database
        .execute("select pg_terminate_backend(pid) from unnest($1::integer[]) as t(pid)", &[&pids])
        .await?;
    drop(holder);
    database.batch_execute("drop trigger wait on hapax.ledger").await?;
    assert_eq!(replays(&database).await?, [(0, 2_500), (1, 2_500)]);

    // What it did is worked off meanwhile, so that without a limit it would be done once more.
    database
        .batch_execute(
            "update hapax.job set state = 'done', settled_at = now() where state = 'pending';
             update hapax.ledger set status = 'done', settled_at = now() where status = 'open'",
        )
        .await?;
    let again = ["replay", "--source", "plain", "--replays-max", "0", "--json"];
    let said = hapax(&settings, &again).await?;
    assert_eq!((said.code, &said.json()?["done"]), (Some(0), &2_500.into()), "{}", said.err);
    assert_eq!(replays(&database).await?, [(1, 5_000)]);
    let said = hapax(&settings, &again).await?;
    assert_eq!((said.code, &said.json()?["chosen"]), (Some(0), &0.into()), "{}", said.err);
    Ok(())
}

/// Takes and ends jobs of a queue, some well and some not, until it is told to stop; returns how many.
async fn work(database: &Client, worker: usize, stop: &tokio::sync::watch::Receiver<bool>) -> Result<usize> {
    let take = "select array_agg((t.task).key), array_agg((t.task).token::text)
                from hapax.take_from('target:orders', 50, '1 minute', '-infinity') t where (t.task).token is not null";
    let finish = "select hapax.finish($1, array_fill('target:orders'::text, array[cardinality($1::bytea[])]), $2::text[]::uuid[],
                      array(select case when i % 7 = $3 then 'f' when i % 11 = $3 then 'x' else 'd' end
                            from generate_series(1, cardinality($1::bytea[])) i),
                      array_fill('no'::text, array[cardinality($1::bytea[])]), array_fill(0::bigint, array[cardinality($1::bytea[])]))";
    let hold = "select hapax.hold($1, array_fill('target:orders'::text, array[cardinality($1::bytea[])]), $2::text[]::uuid[], '1 minute')";
    let (mut ended, kind) = (0, i32::try_from(worker)?);
    while !*stop.borrow() {
        let row = database.query_one(take, &[]).await?;
        let (Some(keys), Some(tokens)) =
            (row.get::<_, Option<Vec<Vec<u8>>>>(0), row.get::<_, Option<Vec<String>>>(1))
        else {
            tokio::task::yield_now().await;
            continue;
        };
        database.execute(hold, &[&keys, &tokens]).await?;
        database.execute(finish, &[&keys, &tokens, &kind]).await?;
        ended += keys.len();
    }
    Ok(ended)
}

#[tokio::test]
async fn commands_and_workers_never_wait_for_each_other_in_a_circle() -> Result<()> {
    let scene = Scene::new().await?;
    let settings = settings(&scene);
    let database = scene.database().await?;
    fill(&database, 2_000, "open", "pending").await?;
    let (end, stop) = tokio::sync::watch::channel(false);
    let mut workers = Vec::new();
    for worker in 0..3 {
        let (database, stop) = (scene.database().await?, stop.clone());
        workers.push(tokio::spawn(async move { work(&database, worker, &stop).await }));
    }
    for round in 0..6 {
        let all = |verb| [verb, "--all", "--json"];
        let (retry, discard) = (all("retry"), ["discard", "--all", "--json", "--limit", "20"]);
        let (replay, retry, discard) = tokio::try_join!(
            hapax(&settings, &["replay", "--all", "--json"]),
            hapax(&settings, &retry),
            hapax(&settings, &discard)
        )?;
        for said in [replay, retry, discard] {
            let told = said.json()?;
            // Some are not to be had; but no statement failed.
            assert!(matches!(said.code, Some(0 | 1)), "round {round}: {told:#}");
            for outcome in told["outcomes"].as_object().into_iter().flatten().map(|(outcome, _)| outcome) {
                assert!(
                    ["done", "due", "busy", "held", "unfinished", "settled"].contains(&outcome.as_str()),
                    "round {round}: {told:#}"
                );
            }
        }
    }
    end.send(true)?;
    let mut ended = 0;
    for worker in workers {
        ended += worker.await??;
    }
    assert!(ended > 0);
    // Statuses follow from the jobs, whatever came between.
    let odd = "select l.event_id, l.status::text, hapax.status_of(l.key)::text from hapax.ledger l
               where l.status <> hapax.status_of(l.key) and l.status <> 'rejected' limit 5";
    let odd = database.query(odd, &[]).await?;
    assert!(odd.is_empty(), "{odd:?}");
    let deadlocks = "select deadlocks from pg_stat_database where datname = current_database()";
    assert_eq!(database.query_one(deadlocks, &[]).await?.get::<_, i64>(0), 0);
    Ok(())
}
