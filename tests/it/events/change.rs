//! Retry, replay and discard.

use anyhow::Result;
use tokio_postgres::Client;

use super::made::{Made, Said, ago, everything, hapax, make, settings, stands};
use crate::harness::scene::Scene;

/// Runs a verb on one event of `plain` by its id.
async fn on(settings: &str, verb: &str, id: &str, more: &[&str]) -> Result<Said> {
    hapax(settings, &[&[verb, "--json", "--id", id], more].concat()).await
}

/// What came of it: the one outcome.
async fn outcome(settings: &str, verb: &str, id: &str, more: &[&str]) -> Result<String> {
    let said = on(settings, verb, id, more).await?;
    let told = said.json()?;
    let Some(outcomes) = told.get("outcomes").and_then(|outcomes| outcomes.as_object()) else {
        anyhow::bail!("{told}")
    };
    assert_eq!(outcomes.len(), 1, "{told}");
    let fine = outcomes.keys().all(|outcome| outcome == "done" || outcome == "due");
    assert_eq!(
        (said.code == Some(0), told.get("error").is_some_and(serde_json::Value::is_null)),
        (fine, fine),
        "{told}"
    );
    Ok(outcomes.keys().cloned().collect())
}

/// Does as a gateway's worker does with an effect that is due; returns how many events it had.
async fn run_effects(database: &Client) -> Result<usize> {
    let query = "
        with taken as materialized (
            select (t.task).* from hapax.take_from('effect:stripe', 100, '1 minute', '-infinity') t
        ), held as (
            select array_agg(key order by key) as keys, array_agg(token order by key) as tokens from taken
        )
        select r.outcomes from held, hapax.run_parked(held.keys, array_fill('effect:stripe'::text, array[cardinality(held.keys)]),
            held.tokens, array_fill(0::bigint, array[cardinality(held.keys)]), 'fx.apply', null, '1 minute', 'on',
            array[1], array['target:orders'], array[20]) r
        where held.keys is not null";
    // Taken in a transaction of its own in a gateway; here nobody else takes.
    let row = database.query_opt(query, &[]).await?;
    Ok(row.map_or(0, |row| row.get::<_, String>(0).len()))
}

/// Delivers all that is due, as a gateway's worker does.
async fn deliver_all(database: &Client, queue: &str) -> Result<()> {
    let take =
        "select (t.task).key, (t.task).token::text from hapax.take_from($1, 100, '1 minute', '-infinity') t";
    for row in database.query(take, &[&queue]).await? {
        let (key, token): (Vec<u8>, String) = (row.get(0), row.get(1));
        let finish = "select hapax.finish(array[$1::bytea], array[$2::text], array[$3::text::uuid], '{d}', '{null}', '{null}')";
        database.execute(finish, &[&key, &queue, &token]).await?;
    }
    Ok(())
}

async fn effects(database: &Client, id: &str) -> Result<i64> {
    Ok(database.query_one("select count(*) from fx.effect where event_id = $1", &[&id]).await?.get(0))
}

#[tokio::test]
async fn a_replay_runs_what_the_settings_say_under_a_fresh_number_each_time() -> Result<()> {
    let scene = Scene::new().await?;
    let settings = settings(&scene);
    let database = scene.database().await?;
    make(
        &database,
        &[Made { jobs: &["target:orders done", "target:old dead"], ..ago(1, "stripe", "a", "dead") }],
    )
    .await?;
    for replay in 1..=3 {
        assert_eq!(outcome(&settings, "replay", "a", &[]).await?, "done");
        let stood = stands(&database, "a").await?;
        assert!(stood.starts_with(&format!("open {replay}, effect:stripe due 0 {replay}, ")), "{stood}");
        assert!(stood.contains("target:old discarded 9 0"), "{stood}");
        // Until it is settled again there is nothing to replay.
        assert_eq!(outcome(&settings, "replay", "a", &[]).await?, "unfinished");
        assert_eq!(run_effects(&database).await?, 1);
        let (stood, r) = (stands(&database, "a").await?, replay);
        assert!(stood.contains(&format!("effect:stripe done 1 {r}")), "{stood}");
        assert!(stood.contains(&format!("target:orders due 0 {r}")), "{stood}");
        deliver_all(&database, "target:orders").await?;
        assert!(stands(&database, "a").await?.starts_with(&format!("done {replay}")));
        assert_eq!(effects(&database, "a").await?, replay);
    }
    Ok(())
}

#[tokio::test]
async fn what_there_is_to_do_comes_from_the_settings() -> Result<()> {
    let scene = Scene::new().await?;
    let settings = settings(&scene);
    let database = scene.database().await?;
    let plain = ["target:crm done", "target:orders dead"];
    make(
        &database,
        &[
            Made { kind: Some("invoice.paid"), jobs: &plain, ..ago(1, "plain", "all", "dead") },
            Made { kind: Some("other"), ..ago(1, "plain", "some", "done") },
            Made { jobs: &["pull:pulled done"], ..ago(1, "pulled", "pull", "done") },
            Made { kind: Some("invoice.paid"), jobs: &plain, ..ago(1, "plain", "one", "dead") },
            Made { kind: Some("other"), jobs: &["target:crm done"], ..ago(1, "plain", "untaken", "done") },
            Made { jobs: &["target:orders done"], ..ago(1, "stripe", "of_effect", "done") },
            Made { jobs: &["target:orders done"], ..ago(1, "stripe", "refused", "rejected") },
            ago(1, "stripe", "again", "rejected"),
            ago(1, "idle", "idle", "done"),
            ago(1, "gone", "gone", "done"),
            ago(1, "plain", "unidentified", "unidentified"),
            Made { jobs: &["target:orders waits"], ..ago(1, "plain", "open", "open") },
            Made { jobs: &["effect:stripe failed"], ..ago(1, "stripe", "failed", "failed") },
            Made { jobs: &["target:crm held", "target:orders dead"], ..ago(1, "plain", "held", "dead") },
            Made { jobs: &["target:crm late", "target:orders dead"], ..ago(1, "plain", "late", "dead") },
            Made { has_body: false, ..ago(1, "plain", "bodiless", "done") },
        ],
    )
    .await?;
    let target = |name| ["--target", name];
    for (id, more, wanted, stood) in [
        ("all", &[][..], "done", "open 1, target:crm due 0 1, target:orders due 0 1"),
        ("some", &[], "done", "open 1, target:orders due 0 1"),
        ("pull", &[], "done", "open 1, pull:pulled due 0 1"),
        // The other target is left as it is: it may be dead still.
        ("one", &target("crm"), "done", "dead 1, target:crm due 0 1, target:orders dead 9 0"),
        ("untaken", &target("crm"), "nothing_to_do", "done 0, target:crm done 3 0"),
        ("of_effect", &target("orders"), "done", "open 1, target:orders due 0 1"),
        ("refused", &target("orders"), "refused", "rejected 0, target:orders done 3 0"),
        ("again", &[], "done", "open 1, effect:stripe due 0 1"),
        ("idle", &[], "nothing_to_do", "done 0"),
        ("gone", &[], "no_source", "done 0"),
        ("unidentified", &[], "unidentified", "unidentified 0"),
        ("open", &[], "unfinished", "open 0, target:orders waits 0 0"),
        ("failed", &[], "unfinished", "failed 0, effect:stripe waits 3 0"),
        ("held", &[], "held", "dead 0, target:crm held 3 0, target:orders dead 9 0"),
        ("late", &[], "done", "open 1, target:crm discarded 3 0, target:orders due 0 1"),
        ("bodiless", &[], "bodiless", "done 0"),
    ] {
        assert_eq!(outcome(&settings, "replay", id, more).await?, wanted, "{id}");
        assert_eq!(stands(&database, id).await?, stood, "{id}");
    }
    assert_eq!(outcome(&settings, "replay", "nobody", &[]).await?, "not_found");
    let said = hapax(&settings, &["replay", "--id", "bodiless", "--id", "open", "--id", "some"]).await?;
    assert_eq!(said.code, Some(1));
    for wanted in [
        "3 of 3 events not replayed:\n",
        "  1 have no body any more: retention.body (7d) removed it (bodiless)\n",
        "  2 are not settled: `hapax events retry` gives them their turn now, or wait (",
    ] {
        assert!(said.err.contains(wanted), "{wanted:?}: {}", said.err);
    }
    Ok(())
}

#[tokio::test]
async fn a_retry_gives_what_is_left_its_turn_now() -> Result<()> {
    let scene = Scene::new().await?;
    let settings = settings(&scene);
    let database = scene.database().await?;
    let two = ["target:crm dead", "target:orders dead"];
    make(
        &database,
        &[
            Made { jobs: &["effect:stripe dead"], replay: 3, ..ago(1, "stripe", "dead", "dead") },
            Made { jobs: &["effect:stripe failed"], ..ago(1, "stripe", "failed", "failed") },
            Made { jobs: &["target:crm done", "target:orders waits"], ..ago(1, "plain", "waits", "open") },
            Made { jobs: &["target:orders due"], ..ago(1, "plain", "due", "open") },
            Made { jobs: &["target:orders held"], ..ago(1, "plain", "held", "open") },
            Made { jobs: &["target:crm held", "target:orders dead"], ..ago(1, "plain", "part", "dead") },
            Made { jobs: &two, ..ago(1, "plain", "one", "dead") },
            Made { jobs: &two, has_body: false, ..ago(1, "plain", "bodiless", "dead") },
            ago(1, "plain", "done", "done"),
        ],
    )
    .await?;
    for (id, more, wanted, stood) in [
        ("dead", &[][..], "done", "failed 3, effect:stripe due 0 3"),
        ("failed", &[], "done", "failed 0, effect:stripe due 3 0"),
        ("waits", &[], "done", "open 0, target:crm done 3 0, target:orders due 0 0"),
        ("due", &[], "due", "open 0, target:orders due 0 0"),
        ("held", &[], "due", "open 0, target:orders held 3 0"),
        ("part", &[], "done", "open 0, target:crm held 3 0, target:orders due 0 0"),
        ("one", &["--target", "crm"], "done", "dead 0, target:crm due 0 0, target:orders dead 9 0"),
        ("bodiless", &[], "bodiless", "dead 0, target:crm dead 9 0, target:orders dead 9 0"),
        ("done", &[], "settled", "done 0"),
    ] {
        assert_eq!(outcome(&settings, "retry", id, more).await?, wanted, "{id}");
        assert_eq!(stands(&database, id).await?, stood, "{id}");
    }
    // Without a status, what is settled is not meant.
    let said = hapax(&settings, &["retry", "--all", "--json"]).await?;
    assert_eq!(
        said.json()?["outcomes"],
        serde_json::json!({ "done": 1, "due": 6, "bodiless": 1 }),
        "{}",
        said.out
    );
    Ok(())
}

#[tokio::test]
async fn what_is_discarded_is_given_up() -> Result<()> {
    let scene = Scene::new().await?;
    let settings = settings(&scene);
    let database = scene.database().await?;
    let two = ["target:crm done", "target:orders dead"];
    make(
        &database,
        &[
            Made { jobs: &two, ..ago(1, "plain", "dead", "dead") },
            Made { jobs: &["effect:stripe failed"], ..ago(1, "stripe", "failed", "failed") },
            Made { jobs: &["target:orders waits"], ..ago(1, "plain", "open", "open") },
            Made { jobs: &["target:orders held"], ..ago(1, "plain", "held", "open") },
            Made { jobs: &two, ..ago(1, "plain", "one", "dead") },
            Made { jobs: &["target:orders dead"], ..ago(1, "plain", "only", "dead") },
            Made { jobs: &["target:orders dead"], ..ago(1, "stripe", "acted", "dead") },
            ago(1, "plain", "done", "done"),
        ],
    )
    .await?;
    let token: String =
        database.query_one("select token::text from hapax.job where token is not null", &[]).await?.get(0);
    for (id, more, wanted, stood) in [
        ("dead", &[][..], "done", "rejected 0, target:crm done 3 0, target:orders discarded 9 0"),
        ("failed", &[], "done", "rejected 0, effect:stripe discarded 3 0"),
        ("open", &[], "done", "rejected 0, target:orders discarded 0 0"),
        ("held", &[], "held", "open 0, target:orders held 3 0"),
        ("held", &["--force"], "done", "rejected 0, target:orders discarded 3 0"),
        // All the rest of it was done.
        ("one", &["--target", "orders"], "done", "done 0, target:crm done 3 0, target:orders discarded 9 0"),
        ("only", &["--target", "orders"], "done", "rejected 0, target:orders discarded 9 0"),
        ("acted", &["--target", "orders"], "done", "done 0, target:orders discarded 9 0"),
        ("done", &[], "settled", "done 0"),
    ] {
        assert_eq!(outcome(&settings, "discard", id, more).await?, wanted, "{id}");
        assert_eq!(stands(&database, id).await?, stood, "{id}");
    }
    // What the worker brings that had it counts no more.
    let finish = "select (hapax.finish(array[key], array[queue], array[$1::text::uuid], '{d}', '{null}', '{null}')).mine[1]
                  from hapax.job where key = (select key from hapax.ledger where event_id = 'held')";
    assert!(!database.query_one(finish, &[&token]).await?.get::<_, bool>(0));
    assert_eq!(stands(&database, "held").await?, "rejected 0, target:orders discarded 3 0");
    Ok(())
}

#[tokio::test]
async fn a_dry_run_changes_nothing_and_says_what_would_be_done() -> Result<()> {
    let scene = Scene::new().await?;
    let settings = settings(&scene);
    let database = scene.database().await?;
    make(
        &database,
        &[
            Made { jobs: &["target:orders dead"], ..ago(3, "plain", "a", "dead") },
            Made { jobs: &["target:orders dead"], ..ago(2, "plain", "b", "dead") },
            Made { has_body: false, ..ago(1, "plain", "c", "done") },
        ],
    )
    .await?;
    let mut redis = scene.redis().await?;
    let marker = scene.redis_key("plain", "a");
    redis::cmd("SET").arg(&marker).arg("D AAAAAAAA AAAAAAAA").exec_async(&mut redis).await?;
    let before = everything(&database).await?;
    for (verb, wanted, code) in [
        ("retry", "2 of 2 events would be given their turn\n  the first: a, b\n", 0),
        ("replay", "2 of 3 events would be replayed\n  the first: a, b\n", 1),
        ("discard", "2 of 2 events would be discarded\n  the first: a, b\n", 0),
    ] {
        let said = hapax(&settings, &[verb, "--all", "--dry-run"]).await?;
        assert_eq!((said.out.as_str(), said.code), (wanted, Some(code)), "{}", said.err);
        let said = hapax(&settings, &[verb, "--all", "--dry-run", "--json", "--limit", "1"]).await?.json()?;
        assert_eq!((&said["dry_run"], &said["done"], &said["chosen"]), (&true.into(), &1.into(), &1.into()));
        assert_eq!(said["first"]["done"][0]["event_id"], "a");
    }
    assert_eq!(everything(&database).await?, before);
    assert_eq!(redis::cmd("EXISTS").arg(&marker).query_async::<i64>(&mut redis).await?, 1);
    Ok(())
}

#[tokio::test]
async fn done_markers_go_and_leases_stay() -> Result<()> {
    let scene = Scene::new().await?;
    let settings = settings(&scene);
    let database = scene.database().await?;
    let dead = |id| Made { jobs: &["target:orders dead"], ..ago(1, "plain", id, "dead") };
    make(&database, &[dead("a"), dead("b"), dead("c"), dead("d"), ago(1, "plain", "e", "done")]).await?;
    let mut redis = scene.redis().await?;
    for (id, value) in
        [("a", "D AAAAAAAA AAAAAAAA"), ("b", "L AAAAAAAAAAAAAAAA"), ("c", "D BBBBBBBB AAAAAAAA")]
    {
        redis::cmd("SET").arg(scene.redis_key("plain", id)).arg(value).exec_async(&mut redis).await?;
    }
    redis::cmd("LPUSH").arg(scene.redis_key("plain", "d")).arg("x").exec_async(&mut redis).await?;
    redis::cmd("SET")
        .arg(scene.redis_key("plain", "e"))
        .arg("D AAAAAAAA AAAAAAAA")
        .exec_async(&mut redis)
        .await?;
    let said = hapax(&settings, &["replay", "--status", "dead"]).await?;
    assert_eq!((said.code, said.out.as_str(), said.err.as_str()), (Some(0), "4 of 4 events replayed\n", ""));
    let left: Vec<String> = scene.markers().await?.into_keys().collect();
    let mut wanted = ["b", "d", "e"].map(|id| scene.redis_key("plain", id));
    wanted.sort();
    assert_eq!(left, wanted);
    Ok(())
}

#[tokio::test]
async fn without_redis_it_is_done_all_the_same_and_said() -> Result<()> {
    let mut scene = Scene::new().await?;
    let database = scene.database().await?;
    make(&database, &[Made { jobs: &["target:orders dead"], ..ago(1, "plain", "a", "dead") }]).await?;
    scene.stores.redis_url = "redis://127.0.0.1:1".to_owned();
    let said = hapax(&settings(&scene), &["retry", "--all", "--json"]).await?;
    assert_eq!(said.code, Some(0));
    assert!(said.json()?["redis_error"].is_string());
    assert!(
        said.err.starts_with("warning: Redis cannot be reached (") && said.err.contains("fast_tier.ttl (1d)"),
        "{}",
        said.err
    );
    assert_eq!(stands(&database, "a").await?, "open 0, target:orders due 0 0");
    let said = hapax(&settings(&scene), &["retry", "--all", "--json"]).await?;
    assert_eq!(
        (&said.json()?["done"], said.err.as_str()),
        (&0.into(), ""),
        "nothing was changed: {}",
        said.out
    );
    Ok(())
}
