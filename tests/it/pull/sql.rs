//! The four functions, called one by one.

use anyhow::Result;
use bytes::Bytes;
use tokio_postgres::AsyncMessage;
use tokio_postgres::Client as Database;

use super::{LONG, gateway, raised, role, status, take, take_one, until_status};
use crate::harness::client::Client;
use crate::harness::load::burst;
use crate::harness::receiver::Receiver;
use crate::harness::scene::{SECRET, Scene, deliver, event, signed, signed_as};
use crate::harness::wait::eventually;

#[tokio::test]
async fn what_is_pulled_is_open_until_done_is_committed() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = gateway(&scene, &[]).await?;
    let to = gateway.listen()?;
    assert_eq!(deliver(to, "plain", &event("evt_1", "")).await?.outcome, "accepted");
    assert_eq!(status(&scene, "evt_1").await?, ("open".to_owned(), 1));
    assert_eq!(deliver(to, "plain", &event("evt_1", "")).await?.outcome, "duplicate");

    let mut database = scene.database().await?;
    let held = take_one(&database).await?;
    assert_eq!((held.attempt, held.id.as_str()), (1, "evt_1"));
    assert!(take(&database, 10).await?.is_empty(), "it is held, and the duplicate is no event");
    assert_eq!(deliver(to, "plain", &event("evt_1", "")).await?.outcome, "duplicate");

    let business = database.transaction().await?;
    business.execute("insert into fx.effect values ('plain', 'evt_1')", &[]).await?;
    let done = "select hapax.done($1, $2::text::uuid)";
    business.execute(done, &[&held.key, &held.token]).await?;
    business.rollback().await?;
    assert_eq!(status(&scene, "evt_1").await?.0, "open", "what is rolled back is not done");

    let business = database.transaction().await?;
    business.execute("insert into fx.effect values ('plain', 'evt_1')", &[]).await?;
    business.execute(done, &[&held.key, &held.token]).await?;
    assert_eq!(status(&scene, "evt_1").await?.0, "open", "nor what is not committed");
    business.commit().await?;
    assert_eq!(status(&scene, "evt_1").await?, ("done".to_owned(), 1));

    let (code, message) = raised(held.done(&database).await);
    assert_eq!((code.as_str(), message.ends_with("the event is done")), ("HX002", true), "{message}");
    assert_eq!(deliver(to, "plain", &event("evt_1", "")).await?.outcome, "duplicate");
    assert!(take(&database, 10).await?.is_empty());
    scene.assert_once([&"evt_1".to_owned()]).await?;
    Ok(())
}

#[tokio::test]
async fn a_task_is_what_was_received() -> Result<()> {
    let scene = Scene::new().await?;
    let line = [
        "source.plain.headers = [\"x-more\"]",
        "source.line.provider = \"line\"",
        "source.line.secrets = [\"whsec_a secret for tests only\"]",
        "source.line.effect = \"pull\"",
    ];
    let gateway = gateway(&scene, &line).await?;
    let mut client = gateway.client()?;
    let post = async |client: &mut Client, source: &str, headers: &http::HeaderMap, body: &Bytes| {
        let mut headers: Vec<_> =
            headers.iter().filter_map(|(name, value)| Some((name.as_str(), value.to_str().ok()?))).collect();
        headers.push(("x-more", "7 and more"));
        client.post(&format!("/in/{source}"), &headers, body.clone()).await
    };
    // What jsonb would refuse, reorder, merge or round.
    let odd = "{ \"type\":\"a.b\", \"created\": 1700000000,\r\n\"id\" : \"evt_1\", \"x\":\"\\u0000\", \"n\":1.00, \"n\":2 }\n";
    let odd = Bytes::from(odd);
    assert!(post(&mut client, "plain", &signed(&odd)?, &odd).await?.status.is_success());
    let items = [
        r#"{"webhookEventId":"a","type":"message","timestamp":1700000000000, "z":1}"#,
        r#"{"webhookEventId":"b","type":"follow"}"#,
    ];
    let batch = Bytes::from(format!("{{\"destination\":\"x\",\"events\":[{}, {}]}}", items[0], items[1]));
    let headers = signed_as("line", SECRET, &batch, None)?;
    assert!(post(&mut client, "line", &headers, &batch).await?.status.is_success());

    let database = scene.database().await?;
    let query = "select event_id, event_type, item, body, headers::text, extract(epoch from provider_time)::int8,
                    attempt, replay, source, scope, received_at = (select received_at from hapax.events e
                        where e.event_id = t.event_id), key = (select key from hapax.ledger l where l.event_id = t.event_id),
                    digest = (select digest from hapax.ledger l where l.event_id = t.event_id)
                 from hapax.take($1, 10, '1 minute') t order by event_id";
    let row = database.query_one(query, &[&"plain"]).await?;
    assert_eq!(row.get::<_, &[u8]>("body"), &odd[..]);
    assert_eq!(row.get::<_, &str>(4), r#"{"x-more": "7 and more"}"#);
    assert_eq!((row.get::<_, Option<&str>>(1), row.get::<_, Option<i32>>(2)), (Some("a.b"), None));
    assert_eq!(row.get::<_, Option<i64>>(5), Some(1_700_000_000));
    assert_eq!((row.get::<_, i32>(6), row.get::<_, i32>(7)), (1, 0));
    assert_eq!((row.get::<_, &str>(8), row.get::<_, &str>(9)), ("plain", "-"));
    assert!((10..13).all(|column| row.get::<_, bool>(column)), "{row:?}");

    let rows = database.query(query, &[&"line"]).await?;
    for (at, (row, item)) in rows.iter().zip(items).enumerate() {
        assert_eq!(row.get::<_, &[u8]>("body"), item.as_bytes());
        assert_eq!(row.get::<_, Option<i32>>("item"), Some(i32::try_from(at)?));
    }
    let types: Vec<Option<&str>> = rows.iter().map(|row| row.get(1)).collect();
    assert_eq!(types, [Some("message"), Some("follow")]);
    let times: Vec<Option<i64>> = rows.iter().map(|row| row.get(5)).collect();
    assert_eq!(times, [Some(1_700_000_000), None]);
    Ok(())
}

#[tokio::test]
async fn what_cannot_be_meant_is_refused_by_name() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = gateway(&scene, &[]).await?;
    let database = scene.database().await?;
    deliver(gateway.listen()?, "plain", &event("evt_1", "")).await?;
    let held = take_one(&database).await?;
    let (key, token) = (format!("'\\x{}'::bytea", hex::encode(&held.key)), format!("'{}'", held.token));
    let both = format!("{key}, {token}");
    for (call, code, message) in [
        ("take(null, 1, '1 minute')".to_owned(), "22023", "source is null"),
        ("take('plain', null, '1 minute')".to_owned(), "22023", "1 to 10000"),
        ("take('plain', 0, '1 minute')".to_owned(), "22023", "1 to 10000"),
        ("take('plain', -1, '1 minute')".to_owned(), "22023", "1 to 10000"),
        ("take('plain', 10001, '1 minute')".to_owned(), "22023", "1 to 10000"),
        ("take('plain', 1, null)".to_owned(), "22023", "1 second to 1 day"),
        ("take('plain', 1, '0')".to_owned(), "22023", "1 second to 1 day"),
        ("take('plain', 1, '-1 minute')".to_owned(), "22023", "1 second to 1 day"),
        ("take('plain', 1, '25 hours')".to_owned(), "22023", "1 second to 1 day"),
        ("take('plian', 1, '1 minute')".to_owned(), "42704", "\"plian\""),
        (format!("done(null, {token})"), "22023", "null"),
        (format!("done({key}, null)"), "22023", "null"),
        (format!("done('\\x00', {token})"), "HX002", "no event with this key"),
        (format!("done({key}, gen_random_uuid())"), "HX002", "another worker has taken the event"),
        (format!("fail(null, {token}, 'x')"), "22023", "null"),
        (format!("fail({both}, 'x', '-1 second')"), "22023", "0 to 365 days"),
        (format!("fail({both}, 'x', '366 days')"), "22023", "0 to 365 days"),
        (format!("fail({key}, gen_random_uuid(), 'x')"), "HX002", "another worker"),
        (format!("extend({both}, null)"), "22023", "1 second to 1 day"),
        (format!("extend({both}, '2 days')"), "22023", "1 second to 1 day"),
        (format!("extend({key}, null, '1 minute')"), "22023", "null"),
    ] {
        let (found, said) = raised(database.query(&format!("select hapax.{call}"), &[]).await);
        assert_eq!(found, code, "{call}: {said}");
        assert!(said.contains(message), "{call}: {said}");
    }
    // Nothing of that touched it. A source that is known and has nothing is no mistake.
    assert!(database.query("select hapax.take('stripe', 1, '1 minute')", &[]).await?.is_empty());
    let (code, said) = {
        database.batch_execute("set default_transaction_read_only = on").await?;
        raised(database.query("select hapax.take('plain', 1, '1 minute')", &[]).await)
    };
    assert_eq!(code, "25006", "{said}");
    database.batch_execute("set default_transaction_read_only = off").await?;
    // No reason is one, too.
    database.query(&format!("select hapax.fail({both}, null, '0')"), &[]).await?;
    let error: String = database.query_one("select error from hapax.job", &[]).await?.get(0);
    assert_eq!(error, "failed");
    assert_eq!(take_one(&database).await?.attempt, 2);
    Ok(())
}

/// Makes the database's time pass for what waits.
async fn due_in(database: &Database) -> Result<f64> {
    let query = "select extract(epoch from due_at - clock_timestamp())::float8 from hapax.job where state = 'pending'";
    Ok(database.query_one(query, &[]).await?.get(0))
}

#[tokio::test]
async fn what_fails_comes_again_and_is_dead_after_its_last_attempt() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = gateway(&scene, &["source.plain.attempts_max = 3"]).await?;
    let (to, database) = (gateway.listen()?, scene.database().await?);
    deliver(to, "plain", &event("evt_1", "")).await?;
    let first = take_one(&database).await?;
    first.fail(&database, Some("1 hour")).await?;
    assert!((3500.0..=3600.0).contains(&due_in(&database).await?));
    assert_eq!(status(&scene, "evt_1").await?.0, "open");
    let (code, message) = raised(first.done(&database).await);
    assert_eq!((code.as_str(), message.ends_with("waits to be taken again")), ("HX002", true), "{message}");
    super::worker::expire(&scene).await?;
    let second = take_one(&database).await?;
    let (_, message) = raised(first.extend(&database, "1 minute").await);
    assert!(message.ends_with("another worker has taken the event since"), "{message}");
    second.fail(&database, None).await?;
    assert!(due_in(&database).await? <= 2.0, "at most the second pause");
    super::worker::expire(&scene).await?;
    let held = eventually(LONG, async || take_one(&database).await.ok()).await?;
    assert_eq!(held.attempt, 3);
    held.fail(&database, Some("0")).await?;
    assert_eq!(status(&scene, "evt_1").await?, ("dead".to_owned(), 3));
    let (_, message) = raised(held.done(&database).await);
    assert!(message.ends_with("the event is dead"), "{message}");
    // It blocks nobody, and its provider can bring it again.
    deliver(to, "plain", &event("evt_2", "")).await?;
    take_one(&database).await?.done(&database).await?;
    assert_eq!(status(&scene, "evt_2").await?.0, "done");
    let answer = deliver(to, "plain", &event("evt_1", "")).await?;
    assert_eq!((answer.outcome.as_str(), answer.rearmed), ("duplicate", true));
    let held = take_one(&database).await?;
    assert_eq!((held.id.as_str(), held.attempt), ("evt_1", 1));
    held.done(&database).await?;
    assert_eq!(status(&scene, "evt_1").await?.0, "done");
    Ok(())
}

#[tokio::test]
async fn a_lease_counts_once_somebody_else_has_the_event() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = gateway(&scene, &[]).await?;
    let database = scene.database().await?;
    deliver(gateway.listen()?, "plain", &event("evt_1", "")).await?;
    deliver(gateway.listen()?, "plain", &event("evt_2", "")).await?;
    let held = take(&database, 1).await?.pop().expect("one of two");
    take_one(&database).await?.done(&database).await?;
    held.extend(&database, "2 hours").await?;
    assert!(due_in(&database).await? > 7000.0);
    held.extend(&database, "1 minute").await?;
    assert!(due_in(&database).await? > 7000.0, "it is never shortened");
    super::worker::expire(&scene).await?;
    // Nobody took it again.
    held.extend(&database, "1 minute").await?;
    super::worker::expire(&scene).await?;
    let other = take_one(&database).await?;
    assert_eq!(raised(held.extend(&database, "1 minute").await).0, "HX002");
    assert_eq!(raised(held.fail(&database, None).await).0, "HX002");
    assert_eq!(raised(held.done(&database).await).0, "HX002");
    super::worker::expire(&scene).await?;
    other.done(&database).await?;
    Ok(())
}

#[tokio::test]
async fn a_role_needs_these_rights_and_no_more() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = gateway(&scene, &[]).await?;
    let name = role(&scene).await?;
    let (owner, database) = (scene.database().await?, scene.database().await?);
    database.batch_execute(&format!("set role {name}")).await?;
    for id in ["evt_1", "evt_2"] {
        deliver(gateway.listen()?, "plain", &event(id, "")).await?;
    }
    let [one, two] = &take(&database, 10).await?[..] else { panic!("not two") };
    one.extend(&database, "2 minutes").await?;
    one.done(&database).await?;
    two.fail(&database, Some("0")).await?;
    let query = "select format('hapax.%I', c.relname) from pg_class c where relnamespace = 'hapax'::regnamespace and relkind in ('r', 'p', 'v')";
    let tables = owner.query(query, &[]).await?;
    assert!(tables.len() > 5);
    for table in tables {
        let table: &str = table.get(0);
        assert_eq!(raised(database.query(&format!("select from {table}"), &[]).await).0, "42501", "{table}");
    }
    for inner in [
        "take_from('pull:plain', 1, '1 minute', '-infinity')",
        "sweep('pull:plain', 1)",
        "status_of('\\x00')",
    ] {
        assert_eq!(raised(database.query(&format!("select hapax.{inner}"), &[]).await).0, "42501", "{inner}");
    }
    let signatures = [
        "take(text, int, interval)",
        "done(bytea, uuid)",
        "fail(bytea, uuid, text, interval)",
        "extend(bytea, uuid, interval)",
    ];
    for function in signatures {
        owner.batch_execute(&format!("revoke execute on function hapax.{function} from {name}")).await?;
    }
    let held = super::Held { key: two.key.clone(), token: two.token.clone(), attempt: 1, id: String::new() };
    assert_eq!(raised(database.query("select hapax.take('plain', 1, '1 minute')", &[]).await).0, "42501");
    assert_eq!(raised(held.done(&database).await).0, "42501");
    assert_eq!(raised(held.fail(&database, None).await).0, "42501");
    assert_eq!(raised(held.extend(&database, "1 minute").await).0, "42501");
    Ok(())
}

#[tokio::test]
async fn a_taking_that_is_rolled_back_gives_all_back() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = gateway(&scene, &[]).await?;
    for at in 0..5 {
        deliver(gateway.listen()?, "plain", &event(&format!("evt_{at}"), "")).await?;
    }
    let (mut one, other) = (scene.database().await?, scene.database().await?);
    let open = one.transaction().await?;
    let query = "select event_id from hapax.take('plain', $1, '1 minute')";
    assert_eq!(open.query(query, &[&3]).await?.len(), 3);
    // Nobody waits for it.
    let rest = take(&other, 10).await?;
    assert_eq!(rest.len(), 2, "more than there is are asked for");
    open.rollback().await?;
    let given_back = take(&other, 10).await?;
    assert_eq!(
        given_back.iter().map(|held| held.attempt).collect::<Vec<_>>(),
        [1, 1, 1],
        "no attempt is counted"
    );

    // Two in one transaction are done together, or none.
    let [a, b] = &rest[..] else { panic!("not two") };
    let done = "select hapax.done($1, $2::text::uuid)";
    let both = one.transaction().await?;
    both.execute(done, &[&a.key, &a.token]).await?;
    assert_eq!(raised(both.execute(done, &[&b.key, &given_back[0].token]).await).0, "HX002");
    both.rollback().await?;
    assert_eq!(status(&scene, &a.id).await?.0, "open");
    let both = one.transaction().await?;
    both.execute(done, &[&a.key, &a.token]).await?;
    both.execute(done, &[&b.key, &b.token]).await?;
    both.commit().await?;
    assert_eq!(
        (status(&scene, &a.id).await?.0, status(&scene, &b.id).await?.0),
        ("done".into(), "done".into())
    );
    Ok(())
}

/// A gateway whose pulled events go to a target too.
async fn with_target(scene: &Scene, receiver: &Receiver) -> Result<crate::harness::gateway::Gateway> {
    let mut keys = receiver.target("orders");
    keys.push("source.plain.targets = [\"orders\"]".to_owned());
    gateway(scene, &keys.iter().map(String::as_str).collect::<Vec<_>>()).await
}

async fn until_delivered(database: &Database, events: i64) -> Result<()> {
    let query = "select count(*) from hapax.job where queue = 'target:orders' and state = 'done'";
    let all = async || (database.query_one(query, &[]).await.ok()?.get::<_, i64>(0) == events).then_some(());
    eventually(LONG, all).await
}

#[tokio::test]
async fn with_a_target_too_an_event_is_done_when_both_are() -> Result<()> {
    let (scene, receiver) = (Scene::new().await?, Receiver::start().await?);
    let gateway = with_target(&scene, &receiver).await?;
    let mut database = scene.database().await?;
    deliver(gateway.listen()?, "plain", &event("evt_1", "")).await?;
    until_delivered(&database, 1).await?;
    assert_eq!(status(&scene, "evt_1").await?.0, "open");
    take_one(&database).await?.done(&database).await?;
    assert_eq!(status(&scene, "evt_1").await?.0, "done");

    // A caller whose snapshot is older than the delivery does not leave the event open for ever.
    let other = scene.database().await?;
    let stale = database.build_transaction().isolation_level(tokio_postgres::IsolationLevel::RepeatableRead);
    let held = {
        // As if the delivery were late: its job is put back until the snapshot is taken.
        deliver(gateway.listen()?, "plain", &event("evt_2", "")).await?;
        until_delivered(&other, 2).await?;
        let undo = "update hapax.job set state = 'pending', settled_at = null, due_at = 'infinity'
                    where queue = 'target:orders' and key = $1";
        let held = take_one(&other).await?;
        other.execute(undo, &[&held.key]).await?;
        held
    };
    let stale = stale.start().await?;
    stale.execute("select 1 from fx.effect", &[]).await?;
    let again = "update hapax.job set due_at = now() where queue = 'target:orders' and state = 'pending'";
    other.execute(again, &[]).await?;
    until_delivered(&other, 2).await?;
    let done = "select hapax.done($1, $2::text::uuid)";
    assert_eq!(raised(stale.execute(done, &[&held.key, &held.token]).await).0, "40001");
    stale.rollback().await?;
    held.done(&database).await?;
    assert_eq!(status(&scene, "evt_2").await?.0, "done");
    Ok(())
}

#[tokio::test]
async fn a_worker_that_hangs_delays_no_delivery_of_other_events() -> Result<()> {
    let (scene, receiver) = (Scene::new().await?, Receiver::start().await?);
    let gateway = with_target(&scene, &receiver).await?;
    let mut hanging = scene.database().await?;
    let database = scene.database().await?;
    // Its delivery waits until the worker has said that it is done.
    database
        .batch_execute(
            "create function fx.late() returns trigger language plpgsql as
                $$ begin new.due_at := 'infinity'; return new; end $$;
             create trigger late before insert on hapax.job for each row when (new.queue = 'target:orders')
                execute function fx.late()",
        )
        .await?;
    deliver(gateway.listen()?, "plain", &event("evt_1", "")).await?;
    database.batch_execute("drop trigger late on hapax.job").await?;
    let held = take_one(&database).await?;
    let open = hanging.transaction().await?;
    open.execute("select hapax.done($1, $2::text::uuid)", &[&held.key, &held.token]).await?;
    database.execute("update hapax.job set due_at = now() where due_at = 'infinity'", &[]).await?;
    receiver.until(1).await?;
    let bodies = (0..50).map(|at| event(&format!("evt_more_{at}"), "")).collect();
    burst(gateway.listen()?, "plain", bodies).await?;
    until_delivered(&database, 50).await?;
    assert_eq!(status(&scene, "evt_1").await?.0, "open");
    open.commit().await?;
    until_status(&scene, "evt_1", "done").await?;
    assert_eq!(receiver.taken().get("evt_1"), Some(&1), "it was not delivered again for that");
    Ok(())
}

#[tokio::test]
async fn many_workers_at_once_under_any_isolation_have_each_event_once() -> Result<()> {
    const EVENTS: i64 = 600;
    let scene = Scene::new().await?;
    let gateway = gateway(&scene, &[]).await?;
    let bodies = (0..EVENTS).map(|at| event(&format!("evt_{at}"), "")).collect();
    burst(gateway.listen()?, "plain", bodies).await?;
    let isolations = ["read committed", "repeatable read", "serializable"];
    let mut workers = Vec::new();
    for at in 0..30 {
        let database = scene.database().await?;
        let isolation = format!("set default_transaction_isolation = '{}'", isolations[at % 3]);
        database.batch_execute(&isolation).await?;
        workers.push(tokio::spawn(work_until_done(database, at % 7)));
    }
    for worker in workers {
        worker.await??;
    }
    let ids: Vec<String> = (0..EVENTS).map(|at| format!("evt_{at}")).collect();
    scene.assert_once(&ids).await?;
    let database = scene.database().await?;
    let query = "select count(*) from hapax.job where state = 'done' and attempts = 1";
    assert_eq!(database.query_one(query, &[]).await?.get::<_, i64>(0), EVENTS, "none was given out twice");
    Ok(())
}

/// Takes and does until nothing is open; what cannot be serialised is tried again, as the documentation says.
async fn work_until_done(mut database: Database, more: usize) -> Result<()> {
    let again = |error: &tokio_postgres::Error| error.code().is_some_and(|code| code.code() == "40001");
    let take = "select key, token::text, source, event_id from hapax.take('plain', $1, '1 minute')";
    loop {
        let tasks = match database.query(take, &[&i32::try_from(1 + more)?]).await {
            Ok(tasks) => tasks,
            Err(error) if again(&error) => continue,
            Err(error) => return Err(error.into()),
        };
        for task in &tasks {
            let (key, token): (&[u8], &str) = (task.get(0), task.get(1));
            let (source, id): (&str, &str) = (task.get(2), task.get(3));
            loop {
                let business = database.transaction().await?;
                business.execute("insert into fx.effect values ($1, $2)", &[&source, &id]).await?;
                let done = business.execute("select hapax.done($1, $2::text::uuid)", &[&key, &token]).await;
                let ended = match done {
                    Ok(_) => business.commit().await,
                    Err(error) => Err(error),
                };
                match ended {
                    Ok(()) => break,
                    Err(error) if again(&error) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        let open =
            database.query_one("select exists (select from hapax.events where status = 'open')", &[]).await;
        if open.is_ok_and(|row| !row.get::<_, bool>(0)) {
            return Ok(());
        }
    }
}

#[tokio::test]
async fn who_listens_is_told_of_the_source() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = gateway(&scene, &[]).await?;
    let (client, mut connection) =
        tokio_postgres::connect(&scene.stores.postgres_url, tokio_postgres::NoTls).await?;
    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Some(Ok(message)) = std::future::poll_fn(|cx| connection.poll_message(cx)).await {
            if let AsyncMessage::Notification(heard) = message {
                tell.send((heard.channel().to_owned(), heard.payload().to_owned())).ok();
            }
        }
    });
    client.batch_execute("listen hapax_work").await?;
    deliver(gateway.listen()?, "plain", &event("evt_1", "")).await?;
    let heard = tokio::time::timeout(LONG, told.recv()).await?;
    assert_eq!(heard, Some(("hapax_work".to_owned(), "pull:plain".to_owned())));
    Ok(())
}
