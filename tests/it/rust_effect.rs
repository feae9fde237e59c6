//! Effects in Rust: in the transaction of the event's row, once, whatever they do.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, Result};
use hapax::config::Config;
use hapax::dev::PostgresOptions;
use hapax::effect::{Effect, EffectError, Effects, Event, Handle, async_trait};
use serde::Deserialize;

use crate::commit_truth::{HASTY, Primary};
use crate::harness::library::{Book, Library};
use crate::harness::load::{LIMIT, burst};
use crate::harness::play;
use crate::harness::proxy::{Direction, Proxy};
use crate::harness::scene::{Answer, PATIENT, SECRET, Scene, deliver, event, signed_as};
use crate::harness::stores::{self, private_postgres};
use crate::harness::wait::eventually;
use crate::pooler::Bouncer;
use crate::postgres_away::cut_once;

fn settings<'a>(base: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    [base, &["source.stripe.effect = \"rust:book\""], more].concat()
}

async fn gateway(scene: &Scene, book: &Book, base: &[&str]) -> Result<Library> {
    Library::start(&scene.settings(&settings(base, &[]), ""), &book.registered()).await
}

fn told(answer: &Answer) -> (u16, &str) {
    (answer.status, answer.outcome.as_str())
}

fn asks(id: &str, what: &str, sql: &str) -> bytes::Bytes {
    event(id, &format!("\"do\":\"{what}\",\"sql\":{}", serde_json::json!(sql)))
}

/// Delivers an event whose effect must fail; nothing stays of it, and the log has the cause.
async fn fails(scene: &Scene, gateway: &Library, id: &str, what: &str, sql: &str) -> Result<String> {
    let answer = deliver(gateway.listen(), "stripe", &asks(id, what, sql)).await?;
    assert_eq!(told(&answer), (503, "unavailable"), "{what} {sql}");
    let found = scene.found().await?;
    assert_eq!((found.rows.get(id), found.effects.get(id)), (None, None), "{what} {sql}");
    gateway.cause(id).await
}

async fn succeeds(gateway: &Library, id: &str) -> Result<()> {
    let again = deliver(gateway.listen(), "stripe", &event(id, "")).await?;
    assert_eq!(told(&again), (200, "accepted"), "{id}");
    Ok(())
}

#[tokio::test]
async fn one_effect_for_many_deliveries() -> Result<()> {
    let scene = Scene::new().await?;
    let book = Book::default();
    let gateways = [gateway(&scene, &book, &PATIENT).await?, gateway(&scene, &book, &PATIENT).await?];
    let mut ids = Vec::new();
    for round in 0..30 {
        let id = format!("evt_{round}");
        let bodies = |count| vec![event(&id, ""); count];
        let [one, two] = gateways.each_ref().map(|gateway| burst(gateway.listen(), "stripe", bodies(5)));
        let (one, two) = tokio::try_join!(one, two)?;
        let answers = || one.iter().chain(&two);
        assert!(answers().all(Answer::is_success), "{one:?} {two:?}");
        assert_eq!(answers().filter(|answer| answer.outcome == "accepted").count(), 1);
        ids.push(id);
    }
    scene.assert_once(&ids).await?;
    assert_eq!(book.calls(), 30, "duplicates run no effect");
    Ok(())
}

#[tokio::test]
async fn a_swallowed_error_fails_the_event() -> Result<()> {
    let scene = Scene::new().await?;
    let book = Book::default();
    let gateway = gateway(&scene, &book, &PATIENT).await?;
    for (id, what, sql, cause) in [
        (
            "e1",
            "swallow",
            "insert into nowhere values (1)",
            "the effect went on after an error: relation \"nowhere\"",
        ),
        ("e2", "run", "insert into nowhere values (1)", "relation \"nowhere\""),
        ("e3", "fail", "", "the effect fails"),
        ("e4", "swallow", "select 'body text'::int", "a data exception"),
        (
            "e5",
            "swallow",
            "do $$ begin raise 'no' using errcode = 'HX001'; end $$",
            "went on after an error: no",
        ),
        ("e6", "drop", "", "dropped a statement before its answer"),
        ("e7", "panic", "", "panicked"),
        ("e8", "none", "", "went on after an error"),
        (
            "e9",
            "run",
            "do $$ begin raise 'speaks of the server' using errcode = '57P01'; end $$",
            "speaks of",
        ),
    ] {
        let said = fails(&scene, &gateway, id, what, sql).await?;
        assert!(said.contains(cause) && !said.contains("body text"), "{what}: {said}");
        succeeds(&gateway, id).await?;
    }
    let ids: Vec<String> = (1..=9).map(|at| format!("e{at}")).collect();
    scene.assert_once(&ids).await?;
    Ok(())
}

#[tokio::test]
async fn no_effect_ends_its_transaction() -> Result<()> {
    let scene = Scene::new().await?;
    let commits = "create procedure fx.commits() language plpgsql as $$ begin commit; end $$";
    scene.database().await?.batch_execute(commits).await?;
    let book = Book::default();
    let gateway = gateway(&scene, &book, &PATIENT).await?;
    let by_the_gateway = "the gateway begins and ends";
    for (at, (sql, cause)) in [
        ("commit", by_the_gateway),
        ("/* /* */ select */ ;-- x\n COMMIT and chain", by_the_gateway),
        ("(rollback)", by_the_gateway),
        ("rollback to savepoint hapax_effect", by_the_gateway),
        ("release savepoint hapax_effect", by_the_gateway),
        ("set session characteristics as transaction read only", by_the_gateway),
        ("prepare transaction 'x'", by_the_gateway),
        ("copy fx.effect from stdin", "not offered"),
        ("select 1; commit", "multiple commands"),
        ("do $$ begin commit; end $$", "invalid transaction termination"),
        ("call fx.commits()", "invalid transaction termination"),
    ]
    .into_iter()
    .enumerate()
    {
        let id = format!("evt_{at}");
        let said = fails(&scene, &gateway, &id, "swallow", sql).await?;
        assert!(said.contains(cause), "{sql}: {said}");
        succeeds(&gateway, &id).await?;
    }
    Ok(())
}

/// What would end the transaction all the same is found by the last words before COMMIT.
#[tokio::test]
async fn the_last_words_are_refused_in_another_transaction() -> Result<()> {
    let scene = Scene::new().await?;
    let database = scene.database().await?;
    database.batch_execute("begin; insert into fx.effect values ('s', 'e')").await?;
    let own: String = database.query_one("select pg_current_xact_id()::text", &[]).await?.get(0);
    let close = "select hapax.close($1, 'on', null)";
    database.execute(close, &[&own]).await?;
    database.batch_execute("commit").await?;
    assert!(database.execute(close, &[&own]).await.is_err(), "after the end");
    database.batch_execute("begin; insert into fx.effect values ('s', 'e')").await?;
    assert!(database.execute(close, &[&own]).await.is_err(), "in the next");
    Ok(())
}

#[tokio::test]
async fn an_effect_that_does_not_wait_for_the_log_changes_nothing() -> Result<()> {
    let primary = Primary::start().await?;
    let book = Book::default();
    // One that waits for the standby holds its group's lock.
    let more = [&HASTY[..], &["source.stripe.effect_parallel = true"]].concat();
    let gateway = gateway(&primary.scene, &book, &more).await?;
    primary.wait_for_standbys("nosuch").await?;
    let ways = ["set synchronous_commit = off", "set local synchronous_commit = off"];
    for (at, way) in ways.into_iter().enumerate() {
        let answer = deliver(gateway.listen(), "stripe", &asks(&format!("evt_{at}"), "run", way)).await?;
        assert_eq!(answer.status, 503, "{way}: {answer:?}");
        primary.until_waiting(at + 1).await?;
        assert_eq!(primary.visible().await?, 0, "{way}");
    }
    primary.wait_for_standbys("").await?;
    for id in ["evt_0", "evt_1"] {
        let again = async || {
            deliver(gateway.listen(), "stripe", &event(id, "")).await.ok().filter(Answer::is_success)
        };
        assert_eq!(
            eventually(LIMIT, again).await?.outcome,
            "mismatch",
            "it was committed with its first body"
        );
    }
    primary.scene.assert_once(&["evt_0".to_owned(), "evt_1".to_owned()]).await?;
    Ok(())
}

const DEFERRED: &str = "
    create table fx.parent (id text primary key);
    create table fx.child (id text references fx.parent deferrable initially deferred);
    create table fx.late (id text);
    create function fx.refuse() returns trigger language plpgsql as $$
    begin raise 'too late' using errcode = 'HX001'; end $$;
    create constraint trigger refuse after insert on fx.late
    deferrable initially deferred for each row execute function fx.refuse();
    create function fx.adopt(id text) returns void language sql as $$
        insert into fx.child values ($1); insert into fx.parent values ($1) $$;
";

#[tokio::test]
async fn an_effect_can_refuse_an_event_for_good() -> Result<()> {
    let scene = Scene::new().await?;
    let database = scene.database().await?;
    database.batch_execute(DEFERRED).await?;
    let book = Book::default();
    let gateway = gateway(&scene, &book, &PATIENT).await?;
    let raises = "do $$ begin raise 'never' using errcode = 'HX001'; end $$";
    let cases = [
        ("reject", ""),
        ("run", raises),
        ("reject_after", "insert into fx.child select 1 / 0"),
        ("reject_after", raises),
        ("run", "insert into fx.late values ('x')"),
    ];
    for (at, (what, sql)) in cases.into_iter().enumerate() {
        let body = asks(&format!("evt_{at}"), what, sql);
        assert_eq!(
            told(&deliver(gateway.listen(), "stripe", &body).await?),
            (200, "rejected"),
            "{what} {sql}"
        );
        assert_eq!(
            told(&deliver(gateway.listen(), "stripe", &body).await?),
            (200, "duplicate"),
            "{what} {sql}"
        );
    }
    assert_eq!(book.calls(), cases.len());
    let found = scene.found().await?;
    assert_eq!((found.rows.len(), found.effects.len()), (cases.len(), 0), "what they wrote is undone");
    let kept = "select count(*) from hapax.ledger join hapax.body using (received_at, key) where status = 'rejected'";
    assert_eq!(database.query_one(kept, &[]).await?.get::<_, i64>(0), 5);
    Ok(())
}

#[tokio::test]
async fn deferred_constraints_are_deferred_and_are_the_effects_own() -> Result<()> {
    let scene = Scene::new().await?;
    scene.database().await?.batch_execute(DEFERRED).await?;
    let book = Book::default();
    let gateway = gateway(&scene, &book, &PATIENT).await?;
    // By two statements in one function, since only the second makes the first right.
    let kept = asks("kept", "run", "select fx.adopt('a')");
    assert_eq!(told(&deliver(gateway.listen(), "stripe", &kept).await?), (200, "accepted"));
    let said = fails(&scene, &gateway, "broken", "run", "insert into fx.child values ('b')").await?;
    assert!(said.contains("child_id_fkey"), "{said}");
    succeeds(&gateway, "broken").await?;
    Ok(())
}

#[tokio::test]
async fn an_effect_that_does_not_end_is_ended() -> Result<()> {
    let scene = Scene::new().await?;
    let hold = scene.hold().await?;
    let book = Book::default();
    let short = ["postgres.statement_timeout = \"500ms\"", "postgres.lock_timeout = \"100ms\""];
    let gateway = gateway(&scene, &book, &[&PATIENT[..], &short].concat()).await?;
    for (id, what, sql) in [
        ("e1", "never", ""),
        ("e2", "wait", ""),
        ("e3", "unlimited", "select pg_sleep(1000)"),
        ("e4", "run", "select pg_sleep(1000)"),
    ] {
        let said = fails(&scene, &gateway, id, what, sql).await?;
        assert!(said.contains("statement_timeout") || said.contains("57014"), "{what}: {said}");
    }
    let left = "select count(*) from pg_stat_activity where datname = current_database() and xact_start is not null \
                and pid <> pg_backend_pid()";
    let ended = async || (hold.query_one(left, &[]).await.ok()?.get::<_, i64>(0) == 0).then_some(());
    eventually(LIMIT, ended).await.context("a transaction is left")?;
    drop(hold);
    // Not by the hasty one, which a slow machine would make fail.
    let patient = self::gateway(&scene, &book, &PATIENT).await?;
    for id in ["e1", "e2", "e3", "e4"] {
        succeeds(&patient, id).await?;
    }
    Ok(())
}

#[tokio::test]
async fn what_may_pass_is_tried_again() -> Result<()> {
    let scene = Scene::new().await?;
    let book = Book::default();
    let gateway = gateway(&scene, &book, &PATIENT).await?;
    let fails_once = asks("evt_1", "once", "do $$ begin raise 'once' using errcode = '40001'; end $$");
    assert_eq!(told(&deliver(gateway.listen(), "stripe", &fails_once).await?), (200, "accepted"));
    assert_eq!(book.calls(), 2);

    let hold = scene.hold().await?;
    let (to, body) = (gateway.listen(), asks("evt_2", "wait", ""));
    let delivery = tokio::spawn(async move { deliver(to, "stripe", &body).await });
    let sessions = scene.waiting(1).await?;
    hold.execute("select pg_terminate_backend(pid, 60000) from unnest($1::int[]) pid", &[&sessions]).await?;
    scene.waiting(1).await?;
    hold.execute("select pg_advisory_unlock(7)", &[]).await?;
    assert_eq!(told(&delivery.await??), (200, "accepted"));
    assert_eq!(book.calls(), 4);
    scene.assert_once(&["evt_1".to_owned(), "evt_2".to_owned()]).await?;
    Ok(())
}

/// The commit does not arrive; or it happens, and the answer is lost.
#[tokio::test]
async fn a_connection_that_breaks_at_the_commit_costs_no_second_effect() -> Result<()> {
    let ways = [(Direction::ToServer, "commit\0", 2), (Direction::ToClient, "COMMIT\0", 1)];
    for (direction, text, calls) in ways {
        let mut scene = Scene::new().await?;
        let armed = Arc::new(AtomicBool::new(false));
        let proxy = Proxy::start_with(stores::postgres().address(), cut_once(direction, text, &armed))?;
        let direct = scene.stores.postgres_url.clone();
        scene.stores.postgres_url = stores::postgres().url_at(proxy.address(), &scene.stores.database);
        let book = Book::default();
        let gateway = gateway(&scene, &book, &PATIENT).await?;
        scene.stores.postgres_url = direct;
        armed.store(true, Ordering::SeqCst);
        let answer = deliver(gateway.listen(), "stripe", &event("evt_1", "")).await?;
        assert!(!armed.load(Ordering::SeqCst), "nothing was cut");
        assert_eq!(told(&answer), (200, "accepted"), "{direction:?}");
        assert_eq!(book.calls(), calls, "{direction:?}");
        scene.assert_once(&["evt_1".to_owned()]).await?;
    }
    Ok(())
}

#[tokio::test]
async fn it_works_behind_a_proxy_that_pools_transactions() -> Result<()> {
    let postgres = private_postgres(PostgresOptions::default()).await?;
    let mut scene = Scene::on(&postgres, stores::redis().url()).await?;
    let direct = scene.stores.postgres_url.clone();
    let bouncer = Bouncer::start(&direct).await?;
    scene.stores.postgres_url = postgres.url_at(bouncer.address, &scene.stores.database);
    let book = Book::default();
    let more = ["postgres.transaction_pooler = true", "fast_tier.prefix = \"rust-pooler:\""];
    let more = [&PATIENT[..], &more].concat();
    let gateways = [gateway(&scene, &book, &more).await?, gateway(&scene, &book, &more).await?];
    scene.stores.postgres_url = direct;
    for round in 0..10 {
        let bodies = |name| (0..8).map(|at| event(&format!("{name}_{round}_{at}"), "")).collect();
        let [one, two] = gateways.each_ref().map(Library::listen);
        let (one, two) =
            tokio::try_join!(burst(one, "stripe", bodies("one")), burst(two, "stripe", bodies("two")))?;
        assert!(one.iter().chain(&two).all(|answer| told(answer) == (200, "accepted")), "{one:?} {two:?}");
        fails(&scene, &gateways[0], &format!("failed_{round}"), "swallow", "select nothing").await?;
    }
    assert_eq!(scene.assert_once([]).await?.effects.len(), 160);
    Ok(())
}

/// A lane for each effect, one event of it at a time; two with `effect_parallel`.
#[tokio::test]
async fn a_slow_effect_delays_nobody_else() -> Result<()> {
    for (parallel, at_once) in [(false, 1), (true, 2)] {
        let scene = Scene::new().await?;
        let hold = scene.hold().await?;
        let book = Book::default();
        let parallel = format!("source.stripe.effect_parallel = {parallel}");
        let settings = scene.settings(&settings(&PATIENT, &[&parallel]), "");
        let gateway = Library::start(&settings, &book.registered()).await?;
        let to = gateway.listen();
        let bodies = (0..4).map(|at| asks(&format!("slow_{at}"), "wait", "")).collect();
        let slow = tokio::spawn(async move { burst(to, "stripe", bodies).await });
        scene.waiting(at_once).await?;
        for source in ["other", "plain"] {
            assert_eq!(told(&deliver(to, source, &event(source, "")).await?), (200, "accepted"));
        }
        assert_eq!(scene.waiting(at_once).await?.len(), at_once);
        hold.execute("select pg_advisory_unlock(7)", &[]).await?;
        for answer in slow.await?? {
            assert_eq!(told(&answer), (200, "accepted"));
        }
        assert_eq!(book.calls(), 4);
    }
    Ok(())
}

/// Locks two accounts, in the order that the body says.
struct Transfer;

#[async_trait]
impl Effect for Transfer {
    async fn apply(&self, event: &Event<'_>, handle: &mut Handle<'_>) -> Result<(), EffectError> {
        #[derive(Deserialize)]
        struct Accounts {
            accounts: Vec<i32>,
        }
        for account in event.json::<Accounts>()?.accounts {
            let add = "update fx.account set balance = balance + 1 where id = $1";
            handle.execute(add, &[&account]).await?;
        }
        Ok(())
    }
}

#[tokio::test]
async fn effects_of_one_group_do_not_deadlock() -> Result<()> {
    let scene = Scene::new().await?;
    let database = scene.database().await?;
    let accounts = "create table fx.account (id int primary key, balance int not null default 0); \
                    insert into fx.account select generate_series(0, 1)";
    database.batch_execute(accounts).await?;
    let settings = scene.settings(&settings(&PATIENT, &["source.stripe.effect = \"rust:transfer\""]), "");
    let effects = Effects::default().with("transfer", Transfer);
    let (one, two) = (Library::start(&settings, &effects).await?, Library::start(&settings, &effects).await?);
    let bodies = |name: &str, accounts: &str| {
        let body = |at| event(&format!("{name}_{at}"), &format!("\"accounts\":{accounts}"));
        (0..60).map(body).collect()
    };
    let here = burst(one.listen(), "stripe", bodies("one", "[0,1]"));
    let there = burst(two.listen(), "stripe", bodies("two", "[1,0]"));
    let (here, there) = tokio::try_join!(here, there)?;
    assert!(here.iter().chain(&there).all(|answer| told(answer) == (200, "accepted")), "{here:?} {there:?}");
    let sum = "select sum(balance)::bigint from fx.account";
    assert_eq!(database.query_one(sum, &[]).await?.get::<_, i64>(0), 240);
    let deadlocks = "select deadlocks from pg_stat_database where datname = current_database()";
    assert_eq!(database.query_one(deadlocks, &[]).await?.get::<_, i64>(0), 0);
    Ok(())
}

/// Keeps what it is given, as the SQL function beside it does.
struct Keep;

#[async_trait]
impl Effect for Keep {
    async fn apply(&self, event: &Event<'_>, handle: &mut Handle<'_>) -> Result<(), EffectError> {
        let Event { source, scope, event_id, event_type, item, headers, .. } = *event;
        let key = event.key.as_slice();
        let digest = event.digest.as_slice();
        let keep = "insert into fx.seen values ($1, $2, $3, $4, $5, $6, $7, $8, $9::text::jsonb, $10, $11, $12, $13)";
        let (received_at, provider_time) = (event.received_at, event.provider_time);
        handle
            .execute(
                keep,
                &[
                    &source,
                    &scope,
                    &event_id,
                    &event_type,
                    &key,
                    &item,
                    &digest,
                    &event.body,
                    &headers,
                    &received_at,
                    &provider_time,
                    &event.attempt,
                    &event.replay,
                ],
            )
            .await?;
        assert_eq!(event.header("Content-Type").as_deref(), Some("application/x-test"));
        // The close and the row are ours, whoever the effect has become.
        handle.execute("set role pg_monitor", &[]).await?;
        Ok(())
    }
}

#[tokio::test]
async fn it_sees_what_a_function_sees() -> Result<()> {
    let scene = Scene::new().await?;
    let database = scene.database().await?;
    let seen = "create table fx.seen (like hapax.event_shape); \
                create function fx.keep(e hapax.event) returns void language sql volatile as \
                $$ insert into fx.seen select (e).* $$";
    let shape = "create table hapax.event_shape of hapax.event";
    database.batch_execute(&format!("{shape}; {seen}")).await?;
    let lines = |source: &str, effect: &str| {
        [
            ("provider", "\"line\""),
            ("effect", effect),
            ("headers", "[\"content-type\"]"),
            ("secrets", "[\"x\"]"),
        ]
        .map(|(key, value)| {
            format!("source.{source}.{key} = {}", value.replace("\"x\"", &format!("\"{SECRET}\"")))
        })
    };
    let all = [lines("sql", "\"fx.keep\""), lines("rust", "\"rust:keep\"")].concat();
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    let gateway = Library::start(
        &scene.settings(&[&PATIENT[..], &all].concat(), ""),
        &Effects::default().with("keep", Keep),
    )
    .await?;
    let body = bytes::Bytes::from_static(
        br#"{"destination":"x","events":[{"webhookEventId":"a","type":"message","timestamp":1700000000000},{"type":"no id"}]}"#,
    );
    for source in ["sql", "rust"] {
        let headers = signed_as("line", SECRET, &body, None)?;
        let mut headers: Vec<_> =
            headers.iter().filter_map(|(name, value)| Some((name.as_str(), value.to_str().ok()?))).collect();
        headers.push(("content-type", "application/x-test"));
        let mut client = crate::harness::client::Client::new(gateway.listen());
        let answer = client.post(&format!("/in/{source}"), &headers, body.clone()).await?;
        assert_eq!(answer.header("hapax-items"), Some("1 accepted, 1 unidentified"), "{source}");
    }
    let columns = "scope, event_id, event_type, item, digest, body, headers, provider_time, attempt, replay";
    let kinds = format!("select count(*), count(distinct ({columns})) from fx.seen");
    let row = database.query_one(&kinds, &[]).await?;
    assert_eq!((row.get::<_, i64>(0), row.get::<_, i64>(1)), (2, 1));
    let joined = "select count(*) from fx.seen join hapax.ledger using (source, key, received_at)";
    assert_eq!(database.query_one(joined, &[]).await?.get::<_, i64>(0), 2);
    Ok(())
}

#[tokio::test]
async fn an_effect_that_nobody_registered_is_refused_at_the_start() -> Result<()> {
    let scene = Scene::new().await?;
    let text = scene.settings(&settings(&[], &["source.other.effect = \"rust:other\""]), "");
    let effects = Effects::default().with("third", Book::default());
    let error = Library::start(&text, &effects).await.err().context("it starts")?.to_string();
    for part in ["source stripe", "\"rust:book\"", "source other", "registered are \"rust:third\""] {
        assert!(error.contains(part), "{error}");
    }
    let twice = effects.with("book", Transfer).with("other", Transfer).with("book", Transfer);
    let error = Library::start(&text, &twice).await.err().context("it starts")?.to_string();
    assert!(error.contains("\"book\" is registered twice"), "{error}");

    let config = Config::parse("hapax.toml", &text, &|_| None)
        .map_err(|problems| anyhow::anyhow!("{problems:?}"))?
        .config;
    let all =
        ["book", "other", "third"].into_iter().fold(Effects::default(), |all, name| all.with(name, Transfer));
    assert_eq!(all.check(&config)?, ["third"], "no source names it");

    // The program itself has none, and says where they would be.
    let file = tempfile::NamedTempFile::new_in(crate::harness::stores::folder().path())?;
    std::fs::write(file.path(), &text)?;
    let path = file.path().to_str().context("a path")?;
    let served = play::hapax(&["serve", "--config", path]).await?;
    let said = String::from_utf8_lossy(&served.stderr).into_owned();
    assert_eq!(served.status.code(), Some(64), "{said}");
    assert!(said.contains("this program has no Rust effects"), "{said}");
    let checked = play::hapax(&["check", "--online", "--config", path]).await?;
    let said = String::from_utf8_lossy(&checked.stdout).into_owned();
    assert_eq!(checked.status.code(), Some(0), "{said}");
    assert!(said.contains("not checked here") && said.contains("\"rust:book\""), "{said}");
    Ok(())
}

/// What Postgres does not take in a text is no reason to lose the event.
#[tokio::test]
async fn an_effect_may_say_anything_of_why_it_fails() -> Result<()> {
    let scene = Scene::new().await?;
    let database = scene.database().await?;
    let more = [
        "source.stripe.on_error = \"park\"",
        "source.stripe.attempts_max = 2",
        "source.stripe.retry_base = \"20ms\"",
        "work.poll = \"100ms\"",
    ];
    for (id, what, status) in [("evt_1", "say", "dead"), ("evt_2", "say_and_reject", "rejected")] {
        let book = Book::default();
        let gateway = Library::start(&scene.settings(&settings(&more, &[]), ""), &book.registered()).await?;
        let answer = deliver(gateway.listen(), "stripe", &asks(id, what, "upstream said \0!")).await?;
        assert_eq!(told(&answer), (200, "parked"), "{what}");
        let ended = async || {
            let ended = "select j.error from hapax.ledger e join hapax.job j using (key) where e.event_id = $1 and e.status::text = $2";
            let row = database.query_opt(ended, &[&id, &status]).await.ok()??;
            Some(row.get::<_, String>(0))
        };
        assert_eq!(eventually(LIMIT, ended).await.context(what)?, "upstream said  !", "{what}");
    }
    Ok(())
}
