//! Signed bytes that come again under another id: a captured request takes no second effect where its source refuses
//! that, and is seen where it reports it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use futures_util::future::try_join_all;

use crate::harness::client::{Answer, Client};
use crate::harness::gateway::Start;
use crate::harness::library::{Book, Library};
use crate::harness::play::{Hold, Numbers, outcome, patient, ready};
use crate::harness::proxy::{Direction, Proxy};
use crate::harness::scene::{SECRET, Scene};
use crate::harness::stores::postgres;
use crate::postgres_away::cut_once;

/// Sources of Gitea's, whose id is a header that is not signed.
const SOURCES: [&str; 13] = [
    "source.off.provider = \"gitea\"",
    "source.off.secrets = [\"whsec_a secret for tests only\"]",
    "source.off.effect = \"fx.apply\"",
    "source.report.provider = \"gitea\"",
    "source.report.secrets = [\"whsec_a secret for tests only\"]",
    "source.report.effect = \"fx.apply\"",
    "source.report.guard = \"report\"",
    "source.report.on_error = \"retry\"",
    "source.refuse.provider = \"gitea\"",
    "source.refuse.secrets = [\"whsec_a secret for tests only\"]",
    "source.refuse.effect = \"fx.apply\"",
    "source.refuse.guard = \"refuse\"",
    "source.refuse.on_error = \"retry\"",
];

const MAILGUN: [&str; 3] = [
    "source.mailgun.provider = \"mailgun\"",
    "source.mailgun.secrets = [\"whsec_a secret for tests only\"]",
    "source.mailgun.effect = \"fx.apply\"",
];

fn hmac(bytes: &[u8]) -> String {
    let key = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, SECRET.as_bytes());
    hex::encode(ring::hmac::sign(&key, bytes))
}

/// A body of Gitea's with what the effect shall do, under an id.
async fn send(client: &mut Client, source: &str, body: &str, id: &str) -> Result<Answer> {
    let signature = hmac(body.as_bytes());
    let headers = [("x-gitea-signature", &*signature), ("x-gitea-delivery", id)];
    client.post(&format!("/in/{source}"), &headers, Bytes::from(body.to_owned())).await
}

fn told(answer: &Answer) -> (u16, &str) {
    (answer.status.as_u16(), outcome(answer))
}

/// How often the effect ran for an id of a source.
async fn effects(scene: &Scene, source: &str) -> Result<Vec<String>> {
    let query = "select event_id from fx.effect where source = $1 order by event_id";
    let rows = scene.database().await?.query(query, &[&source]).await?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

/// Rows of the ledger and guards.
async fn rows(scene: &Scene) -> Result<(i64, i64)> {
    let query = "select (select count(*) from hapax.ledger), (select count(*) from hapax.guard)";
    let row = scene.database().await?.query_one(query, &[]).await?;
    Ok((row.get(0), row.get(1)))
}

/// Deletes what Redis knows.
async fn forget(scene: &Scene) -> Result<()> {
    let mut redis = scene.redis().await?;
    for key in scene.markers().await?.into_keys() {
        redis::cmd("DEL").arg(key).query_async::<i64>(&mut redis).await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_captured_body_under_a_fresh_id_is_refused_reported_or_not_looked_at() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&SOURCES).await?;
    ready(&gateway).await?;
    let mut client = gateway.client()?;
    for source in ["off", "report", "refuse"] {
        assert_eq!(
            told(&send(&mut client, source, "{\"a\":1}", "one").await?),
            (200, "accepted"),
            "{source}"
        );
        // The same event again, however often, is a duplicate.
        assert_eq!(
            told(&send(&mut client, source, "{\"a\":1}", "one").await?),
            (200, "duplicate"),
            "{source}"
        );
        // Another body is another event.
        assert_eq!(
            told(&send(&mut client, source, "{\"a\":2}", "two").await?),
            (200, "accepted"),
            "{source}"
        );
    }
    assert_eq!(told(&send(&mut client, "off", "{\"a\":1}", "fresh").await?), (200, "accepted"));
    assert_eq!(told(&send(&mut client, "report", "{\"a\":1}", "fresh").await?), (200, "accepted"));
    let refused = send(&mut client, "refuse", "{\"a\":1}", "fresh").await?;
    assert_eq!(told(&refused), (401, "refused"));
    assert!(
        String::from_utf8_lossy(&refused.body).contains("\"unauthorized\""),
        "the sender is not told why"
    );
    assert_eq!(effects(&scene, "off").await?, ["fresh", "one", "two"]);
    assert_eq!(effects(&scene, "report").await?, ["fresh", "one", "two"]);
    assert_eq!(effects(&scene, "refuse").await?, ["one", "two"]);
    // Nothing of the refused one is kept, and none of the source that does not look.
    assert_eq!(rows(&scene).await?, (8, 4));
    let numbers = Numbers::of(&gateway).await?;
    let seen = |guard: &str| numbers.sum("hapax_signatures_reused_total", &[&format!("guard=\"{guard}\"")]);
    assert_eq!((seen("report"), seen("refuse")), (1, 1));
    gateway.log(|line| line["error.code"] == "signature_reused" && line["level"] == "WARN").await?;
    gateway
        .log(|line| line["event.id"] == "fresh" && line["level"] == "WARN" && line["source"] == "report")
        .await?;
    // What was accepted and reported is a duplicate from then on.
    assert_eq!(told(&send(&mut client, "report", "{\"a\":1}", "fresh").await?), (200, "duplicate"));
    Ok(())
}

/// Of its requests only time and token are signed: any body can stand beside them.
#[tokio::test]
async fn mailguns_token_counts_once_without_any_setting() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&MAILGUN).await?;
    ready(&gateway).await?;
    let mut client = gateway.client()?;
    let body = |token: &str, id: &str, more: &str| {
        let signature = hmac(format!("1700000000{token}").as_bytes());
        let signed = format!(r#"{{"timestamp":"1700000000","token":"{token}","signature":"{signature}"}}"#);
        Bytes::from(format!(
            r#"{{"signature":{signed},"event-data":{{"id":"{id}","event":"opened"{more}}}}}"#
        ))
    };
    let mut post = async |body: Bytes| -> Result<(u16, String)> {
        let answer = client.post("/in/mailgun", &[], body).await?;
        Ok((answer.status.as_u16(), outcome(&answer).to_owned()))
    };
    assert_eq!(post(body("token-1", "A", "")).await?, (200, "accepted".to_owned()));
    assert_eq!(post(body("token-1", "A", "")).await?, (200, "duplicate".to_owned()));
    // Under a captured token: another event, and the same one with other contents.
    assert_eq!(post(body("token-1", "B", "")).await?, (401, "refused".to_owned()));
    assert_eq!(post(body("token-1", "A", r#","x":1"#)).await?, (200, "mismatch".to_owned()));
    // A retry with a token of its own uses that token up as well.
    assert_eq!(post(body("token-2", "A", "")).await?, (200, "mismatch".to_owned()));
    assert_eq!(post(body("token-2", "C", "")).await?, (401, "refused".to_owned()));
    assert_eq!(post(body("token-3", "C", "")).await?, (200, "accepted".to_owned()));
    assert_eq!(effects(&scene, "mailgun").await?, ["A", "C"]);
    Ok(())
}

#[tokio::test]
async fn of_twenty_at_once_with_one_body_one_is_accepted() -> Result<()> {
    let scene = Scene::new().await?;
    let (one, two) = (scene.gateway(&SOURCES).await?, scene.gateway(&SOURCES).await?);
    ready(&one).await?;
    ready(&two).await?;
    let mut clients: Vec<Client> = Vec::new();
    for at in 0..20 {
        clients.push(if at % 2 == 0 { one.client()? } else { two.client()? });
    }
    for round in 0..20 {
        let body = format!("{{\"round\":{round}}}");
        let ids: Vec<String> = (0..20).map(|at| format!("round-{round}-{}", at / 10)).collect();
        let sent = clients.iter_mut().zip(&ids).map(|(client, id)| send(client, "refuse", &body, id));
        let answers = try_join_all(sent).await?;
        let accepted = answers.iter().filter(|answer| outcome(answer) == "accepted").count();
        assert_eq!(accepted, 1, "round {round}: {answers:?}");
        let known =
            |answer: &Answer| matches!(told(answer), (200, _) | (401, "refused") | (409, "in_flight"));
        assert!(answers.iter().all(known), "round {round}: {answers:?}");
    }
    let effects = effects(&scene, "refuse").await?;
    assert_eq!(effects.len(), 20, "{effects:?}");
    Ok(())
}

/// What failed has used nothing up: neither for itself nor for another event.
#[tokio::test]
async fn a_failed_effect_gives_the_signed_bytes_back() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&SOURCES).await?;
    ready(&gateway).await?;
    let mut client = gateway.client()?;
    let raise = "{\"do\":\"raise\"}";
    assert_eq!(told(&send(&mut client, "refuse", raise, "one").await?), (503, "unavailable"));
    assert_eq!(rows(&scene).await?, (0, 0));
    assert_eq!(told(&send(&mut client, "refuse", raise, "two").await?), (503, "unavailable"), "not refused");
    // Parked, it is recorded and keeps them.
    let parks = scene.gateway(&[&SOURCES[..], &["source.refuse.on_error = \"park\""]].concat()).await?;
    ready(&parks).await?;
    let (mut parking, fails) = (parks.client()?, "{\"do\":\"raise\",\"n\":2}");
    assert_eq!(told(&send(&mut parking, "refuse", fails, "parked").await?), (200, "parked"));
    assert_eq!(told(&send(&mut client, "refuse", fails, "other").await?), (401, "refused"));
    drop(parks);
    // An effect that refuses for good keeps them: its event is recorded.
    let reject = "{\"do\":\"reject\"}";
    assert_eq!(told(&send(&mut client, "refuse", reject, "one").await?), (200, "rejected"));
    assert_eq!(told(&send(&mut client, "refuse", reject, "two").await?), (401, "refused"));
    assert_eq!(rows(&scene).await?, (2, 2));
    Ok(())
}

/// In one batch with the event that owns the bytes, and then fails: the other one is tried again, not refused.
#[tokio::test]
async fn who_waited_for_an_owner_that_fails_is_not_refused() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&patient(&SOURCES)).await?;
    ready(&gateway).await?;
    let hold = Hold::new(&scene).await?;
    let body = "{\"do\":\"wait_raise\"}";
    let sent = (0..4).map(|at| {
        let client = gateway.client();
        async move { send(&mut client?, "refuse", body, &format!("id-{at}")).await }
    });
    let (answers, ()) = tokio::try_join!(try_join_all(sent), async {
        hold.waiting(1).await?;
        hold.release().await
    })?;
    for answer in &answers {
        assert!(matches!(told(answer), (503 | 409, _)), "{answers:?}");
    }
    assert_eq!(rows(&scene).await?, (0, 0));
    Ok(())
}

#[tokio::test]
async fn a_killed_gateway_leaves_no_hole() -> Result<()> {
    let scene = Scene::new().await?;
    let mut gateway = scene.gateway(&patient(&SOURCES)).await?;
    ready(&gateway).await?;
    let mut client = gateway.client()?;
    assert_eq!(told(&send(&mut client, "refuse", "{\"a\":1}", "one").await?), (200, "accepted"));
    // Another one dies in the middle of its effect.
    let hold = Hold::new(&scene).await?;
    let wait = "{\"do\":\"wait\"}";
    let killed = async {
        hold.waiting(1).await?;
        gateway.sigkill()
    };
    let (lost, ()) =
        tokio::join!(send(&mut client, "refuse", wait, "two"), async { killed.await.unwrap_or_default() });
    ensure!(lost.is_err(), "it was answered");
    hold.release().await?;
    gateway.restart().await?;
    ready(&gateway).await?;
    let mut client = gateway.client()?;
    // Remembered over the restart, with Redis and without.
    assert_eq!(told(&send(&mut client, "refuse", "{\"a\":1}", "fresh").await?), (401, "refused"));
    forget(&scene).await?;
    assert_eq!(told(&send(&mut client, "refuse", "{\"a\":1}", "fresh").await?), (401, "refused"));
    assert_eq!(told(&send(&mut client, "refuse", "{\"a\":1}", "one").await?), (200, "duplicate"));
    // What was lost may be sent again, under its own id; then nobody else may.
    let again = send(&mut client, "refuse", wait, "two").await?;
    assert!(matches!(told(&again), (200, "accepted" | "duplicate")), "{again:?}");
    assert_eq!(told(&send(&mut client, "refuse", wait, "three").await?), (401, "refused"));
    assert_eq!(effects(&scene, "refuse").await?, ["one", "two"]);
    Ok(())
}

/// A list of events under a signature that does not cover it.
const LIST: &str = "
    [scheme.list]
    kind = \"hmac\"
    sign = \"{header:x-token}\"
    sig = { from = \"header:x-signature\" }
    batch = { items = \"/events\", id = \"/id\" }
    [source.list]
    provider = \"list\"
    secrets = [\"whsec_a secret for tests only\"]
    effect = \"fx.apply\"
    guard = \"refuse\"
";

/// Status and counts.
async fn send_list(client: &mut Client, token: &str, items: &str) -> Result<(u16, String)> {
    let signature = hmac(token.as_bytes());
    let headers = [("x-token", token), ("x-signature", &*signature)];
    let answer = client.post("/in/list", &headers, Bytes::from(format!(r#"{{"events":[{items}]}}"#))).await?;
    let counts = answer.header("hapax-items").context("no counts")?.to_owned();
    Ok((answer.status.as_u16(), counts))
}

#[tokio::test]
async fn the_items_of_a_batch_stand_and_fall_with_their_signature() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = Start::new(scene.settings(&[], LIST)).start().await?;
    ready(&gateway).await?;
    let mut client = gateway.client()?;
    let mut post = async |token: &str, items: &[(&str, &str)]| -> Result<(u16, String)> {
        let item = |(id, todo): &(&str, &str)| format!(r#"{{"id":"{id}","do":"{todo}"}}"#);
        send_list(&mut client, token, &items.iter().map(item).collect::<Vec<_>>().join(",")).await
    };
    let told = |status, counts: &str| (status, counts.to_owned());
    // One fails: what stays owns the signature for the whole request, so that a retry brings what is missing.
    assert_eq!(post("t1", &[("a", ""), ("b", "raise")]).await?, told(503, "1 accepted, 1 unavailable"));
    assert_eq!(post("t1", &[("a", ""), ("b", "")]).await?, told(200, "1 accepted, 1 duplicate"));
    // Other items under the same signature, more of them, or fewer: another request.
    assert_eq!(post("t1", &[("a", ""), ("c", "")]).await?, told(401, "1 duplicate, 1 refused"));
    assert_eq!(post("t1", &[("a", ""), ("b", ""), ("d", "")]).await?, told(401, "2 duplicate, 1 refused"));
    assert_eq!(post("t1", &[("d", "")]).await?, told(401, "1 refused"));
    assert_eq!(post("t2", &[("d", "")]).await?, told(200, "1 accepted"));
    // If all of them fail, nobody owns it.
    assert_eq!(post("t3", &[("e", "raise"), ("f", "raise")]).await?, told(503, "2 unavailable"));
    assert_eq!(post("t3", &[("g", "")]).await?, told(200, "1 accepted"));
    assert_eq!(effects(&scene, "list").await?, ["a", "b", "d", "g"]);
    Ok(())
}

/// The guard is taken in the transaction that the effect runs in, whatever ends that.
#[tokio::test]
async fn a_guard_stands_and_falls_with_a_rust_effect() -> Result<()> {
    let before = [(Direction::ToServer, "savepoint"), (Direction::ToServer, "hapax.close")];
    let at_the_commit = [(Direction::ToServer, "commit\0"), (Direction::ToClient, "COMMIT\0")];
    for (direction, text) in before.into_iter().chain(at_the_commit) {
        let mut scene = Scene::new().await?;
        let armed = Arc::new(AtomicBool::new(false));
        let proxy = Proxy::start_with(postgres().address(), cut_once(direction, text, &armed))?;
        let own = scene.stores.postgres_url.clone();
        scene.stores.postgres_url = postgres().url_at(proxy.address(), &scene.stores.database);
        let rust = ["report", "refuse"].map(|source| format!("source.{source}.effect = \"rust:book\""));
        let [report, refuse] = &rust;
        let settings = scene.settings(&patient(&[&SOURCES[..], &[report, refuse]].concat()), "");
        let book = Book::default();
        let gateway = Library::start(&settings, &book.registered()).await?;
        scene.stores.postgres_url = own;
        let mut client = Client::new(gateway.listen());
        // What fails owns nothing, and what is refused for good does.
        for (body, id, wanted) in [
            ("{\"do\":\"fail\"}", "one", (503, "unavailable")),
            ("{\"do\":\"panic\"}", "one", (503, "unavailable")),
            ("{\"do\":\"fail\"}", "two", (503, "unavailable")),
            ("{\"do\":\"reject\"}", "one", (200, "rejected")),
            ("{\"do\":\"reject\"}", "two", (401, "refused")),
        ] {
            assert_eq!(told(&send(&mut client, "refuse", body, id).await?), wanted, "{body} {id}");
        }
        assert_eq!(rows(&scene).await?, (1, 1));
        armed.store(true, Ordering::SeqCst);
        let body = "{\"a\":1}";
        for (source, id, wanted) in [
            ("refuse", "cut", (200, "accepted")),
            ("refuse", "cut", (200, "duplicate")),
            ("refuse", "fresh", (401, "refused")),
            ("report", "cut", (200, "accepted")),
            ("report", "fresh", (200, "accepted")),
        ] {
            let answer = send(&mut client, source, body, id).await?;
            assert_eq!(told(&answer), wanted, "{direction:?} {text} {source} {id}");
        }
        assert!(!armed.load(Ordering::SeqCst), "nothing was cut");
        assert_eq!(effects(&scene, "refuse").await?, ["cut"]);
        assert_eq!(effects(&scene, "report").await?, ["cut", "fresh"]);
        assert_eq!(rows(&scene).await?, (4, 3));
    }
    Ok(())
}

/// A request that is longer than a batch is not in flight elsewhere because its own first items are being written.
#[tokio::test]
async fn the_items_of_a_batch_do_not_meet_each_other() -> Result<()> {
    let scene = Scene::new().await?;
    let alone = ["source.stripe.effect = \"none\"", "postgres.lock_timeout = \"10s\""];
    let settings = scene.settings(&patient(&alone), &format!("{LIST}effect_parallel = true\n"));
    let gateway = Start::new(settings).start().await?;
    ready(&gateway).await?;
    let hold = Hold::new(&scene).await?;
    let item = |at: i32| format!(r#"{{"id":"held-{at}","do":"wait"}}"#);
    let items = (0..24).map(item).collect::<Vec<_>>().join(",");
    let to = gateway.listen()?;
    let long = tokio::spawn(async move { send_list(&mut Client::new(to), "t1", &items).await });
    hold.waiting(1).await?;
    // The lane is free for others meanwhile.
    let other = send_list(&mut gateway.client()?, "t2", r#"{"id":"other"}"#).await?;
    assert_eq!(other, (200, "1 accepted".to_owned()));
    let waits = "select from pg_locks where not granted and locktype = 'transactionid'";
    assert_eq!(scene.database().await?.query(waits, &[]).await?.len(), 0, "one waits for another");
    hold.release().await?;
    assert_eq!(long.await??, (200, "24 accepted".to_owned()));
    assert_eq!(rows(&scene).await?, (25, 2));
    Ok(())
}

/// What was accepted once is a duplicate from then on, whatever the source does about signed bytes by then.
#[tokio::test]
async fn another_setting_changes_no_answer_to_what_is_known() -> Result<()> {
    let scene = Scene::new().await?;
    let start = async |guard: &str| {
        let guard = format!("source.refuse.guard = \"{guard}\"");
        let gateway = scene.gateway(&[&SOURCES[..], &[&*guard]].concat()).await?;
        ready(&gateway).await?;
        anyhow::Ok(gateway)
    };
    let body = "{\"a\":1}";
    let report = start("report").await?;
    for id in ["one", "two"] {
        assert_eq!(told(&send(&mut report.client()?, "refuse", body, id).await?), (200, "accepted"));
    }
    for (guard, forgotten) in [("refuse", true), ("off", false), ("report", false), ("refuse", false)] {
        if forgotten {
            forget(&scene).await?;
        }
        let gateway = start(guard).await?;
        let mut client = gateway.client()?;
        for id in ["one", "two"] {
            for _ in 0..2 {
                let answer = send(&mut client, "refuse", body, id).await?;
                assert_eq!(told(&answer), (200, "duplicate"), "{guard} {id}");
            }
        }
    }
    assert_eq!(effects(&scene, "refuse").await?, ["one", "two"]);
    assert_eq!(
        told(&send(&mut start("refuse").await?.client()?, "refuse", body, "three").await?),
        (401, "refused")
    );
    Ok(())
}
