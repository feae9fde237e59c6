//! Secrets that providers hand over are taken while somebody holds a window open, one for each window, and no event is
//! verified with anything else.

use anyhow::{Context as _, Result};
use bytes::Bytes;
use hapax::dev::PostgresOptions;
use http::StatusCode;
use ring::hmac;

use crate::harness::client::{Answer, Client};
use crate::harness::gateway::{Gateway, Start};
use crate::harness::play::LIMIT;
use crate::harness::scene::Scene;
use crate::harness::stores;
use crate::harness::wait::eventually;

const ONE: &str = "b537207f20cbfa02357cf448134da559e8bd39d61597dcd5631b8012eae53e81";
const OTHER: &str = "0000007f20cbfa02357cf448134da559e8bd39d61597dcd5631b8012eae53e81";
const TOKEN: &str = "secret_tMrlL1qK5vuQAh1b6cZGhFChZTSYJlce98V0pYn7yBl";
const UNAUTHORIZED: &str =
    r#"{"type":"about:blank","title":"Unauthorized","status":401,"code":"unauthorized"}"#;

/// Sources without secrets.
const SOURCES: [&str; 4] = [
    "source.asana.provider = \"asana\"",
    "source.notion.provider = \"notion\"",
    "postgres.heartbeat = \"100ms\"",
    "source.spare.provider = \"asana\"",
];

/// A gateway that has read what the database has.
async fn start(scene: &Scene) -> Result<Gateway> {
    let gateway = Start::new(scene.settings(&SOURCES, "")).start().await?;
    until(&gateway, 401, OTHER, "{\"events\":[0]}").await?;
    Ok(gateway)
}

struct Said {
    code: Option<i32>,
    out: String,
    all: String,
}

/// Runs `hapax handshake` on the scene's settings, beside the test.
async fn hapax(scene: &Scene, arguments: &[&str]) -> Result<Said> {
    let file = tempfile::Builder::new().suffix(".toml").tempfile_in(stores::folder().path())?;
    std::fs::write(file.path(), scene.settings(&SOURCES, ""))?;
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_hapax"));
    let output = command.arg("handshake").args(arguments).arg("--config").arg(file.path()).output().await?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    Ok(Said { code: output.status.code(), all: out.clone() + &err, out })
}

async fn done(scene: &Scene, arguments: &[&str]) -> Result<String> {
    let said = hapax(scene, arguments).await?;
    assert_eq!(said.code, Some(0), "{arguments:?}: {}", said.all);
    Ok(said.out)
}

async fn hand_over(client: &mut Client, secret: &str) -> Result<Answer> {
    client.post("/in/asana", &[("X-Hook-Secret", secret)], Bytes::new()).await
}

/// As the provider signs it, whatever the body is.
async fn event(client: &mut Client, source: &str, secret: &str, body: &str) -> Result<Answer> {
    let key = hmac::Key::new(hmac::HMAC_SHA256, secret.as_bytes());
    let signature = hex::encode(hmac::sign(&key, body.as_bytes()));
    let header = match source {
        "notion" => ("X-Notion-Signature", format!("sha256={signature}")),
        _ => ("X-Hook-Signature", signature),
    };
    client.post(&format!("/in/{source}"), &[(header.0, &header.1)], body.to_owned()).await
}

/// Waits until the gateway knows that so many windows were opened since its start.
async fn noticed(gateway: &Gateway, windows: usize) -> Result<()> {
    let is = |line: &String| line.contains("a window is open for a secret that is handed over");
    let all = || (gateway.lines().iter().filter(|line| is(line)).count() >= windows).then_some(());
    eventually(LIMIT, || std::future::ready(all())).await.context("it does not notice")
}

/// One secret that the gateway has not got, whatever it says otherwise.
fn assert_refused(answer: &Answer) {
    assert_eq!(
        (answer.status, &*answer.body),
        (StatusCode::UNAUTHORIZED, UNAUTHORIZED.as_bytes()),
        "{answer:?}"
    );
    assert!(!answer.headers.contains_key("x-hook-secret"));
}

fn assert_kept(answer: &Answer, secret: &str) {
    assert_eq!((answer.status.as_u16(), answer.header("x-hook-secret")), (200, Some(secret)), "{answer:?}");
    assert_eq!(answer.header("hapax-outcome"), Some("handshake"));
    assert!(answer.body.is_empty());
}

/// Until the gateway knows what the database says.
async fn until(gateway: &Gateway, wanted: u16, secret: &str, body: &str) -> Result<()> {
    let as_wanted = async || {
        let answer = event(&mut gateway.client().ok()?, "asana", secret, body).await.ok()?;
        (answer.status.as_u16() == wanted).then_some(())
    };
    eventually(LIMIT, as_wanted).await.with_context(|| format!("never {wanted}"))
}

async fn cause(gateway: &Gateway, cause: &str) -> Result<()> {
    let is = |line: &serde_json::Value| {
        line["error.cause"] == cause
            && line["error.code"] == "handshake_unexpected"
            && line["source"] == "asana"
    };
    gateway.log(is).await.map(drop)
}

#[tokio::test]
async fn a_secret_is_taken_once_used_and_moved_to_the_settings() -> Result<()> {
    let scene = Scene::new().await?;
    let mut gateway = start(&scene).await?;
    let mut client = gateway.client()?;

    // Nothing is open, so nobody is asked: Postgres could not answer.
    let database = scene.database().await?;
    let renamed = async |from: &str, to: &str| {
        database.batch_execute(&format!("alter function hapax.{from} rename to {to}")).await
    };
    renamed("take_handshake", "away").await?;
    assert_refused(&hand_over(&mut client, ONE).await?);
    renamed("away", "take_handshake").await?;
    cause(&gateway, "no window is open").await?;
    assert_refused(&event(&mut client, "asana", ONE, "{\"events\":[0]}").await?);

    // The first secret is taken, and counts at once; a repeated handshake is answered as the first one.
    let said = done(&scene, &["open", "asana", "--for", "10m"]).await?;
    assert!(said.contains("open until"), "{said}");
    noticed(&gateway, 1).await?;
    assert_kept(&hand_over(&mut client, ONE).await?, ONE);
    assert_eq!(
        event(&mut client, "asana", ONE, "{\"events\":[1]}").await?.header("hapax-outcome"),
        Some("accepted")
    );
    assert_kept(&hand_over(&mut client, ONE).await?, ONE);
    // Another one is not, also not after the windows were read again.
    assert_refused(&hand_over(&mut client, OTHER).await?);
    cause(&gateway, "the open window has taken another secret").await?;
    assert_refused(&event(&mut client, "asana", OTHER, "{\"events\":[2]}").await?);
    gateway.restart().await?;
    until(&gateway, 200, ONE, "{\"events\":[3]}").await?;
    let mut client = gateway.client()?;
    assert_refused(&hand_over(&mut client, OTHER).await?);
    // Another source of the same provider has no part in it.
    assert_refused(&event(&mut client, "spare", ONE, "{\"events\":[4]}").await?);

    // It is shown once, and not forgotten before.
    let said = hapax(&scene, &["forget", "asana"]).await?;
    assert!(said.code == Some(1) && said.all.contains("never shown"), "{}", said.all);
    let said = done(&scene, &["list"]).await?;
    assert!(said.contains("asana") && said.contains("not shown yet") && !said.contains(ONE), "{said}");
    assert_eq!(done(&scene, &["show", "asana"]).await?.trim(), ONE);
    let said = hapax(&scene, &["show", "asana"]).await?;
    assert!(said.code == Some(1) && !said.all.contains(ONE), "{}", said.all);
    done(&scene, &["forget", "asana"]).await?;
    until(&gateway, 401, ONE, "{\"events\":[5]}").await?;
    assert!(gateway.lines().iter().all(|line| !line.contains(ONE) && !line.contains(OTHER)));
    Ok(())
}

#[tokio::test]
async fn of_many_secrets_at_once_each_window_takes_one_and_replaces_none() -> Result<()> {
    let scene = Scene::new().await?;
    let gateways = [start(&scene).await?, start(&scene).await?];
    let mut kept = Vec::new();
    for window in 0..2 {
        done(&scene, &["open", "asana"]).await?;
        for gateway in &gateways {
            noticed(gateway, window + 1).await?;
        }
        let all = (0..20).map(|index| {
            let gateway = &gateways[index % 2];
            async move {
                let secret = format!("{window}{index:03}{}", &ONE[4..]);
                let answer = hand_over(&mut gateway.client()?, &secret).await?;
                anyhow::Ok((secret, answer))
            }
        });
        let mut winners = Vec::new();
        for answered in futures_util::future::join_all(all).await {
            let (secret, answer) = answered?;
            if answer.status == StatusCode::OK {
                assert_kept(&answer, &secret);
                winners.push(secret);
            } else {
                assert_refused(&answer);
            }
        }
        assert_eq!(winners.len(), 1, "{winners:?}");
        kept.extend(winners);
    }
    let stored = "select secret from hapax.handshake where secret is not null order by number";
    let stored = scene.database().await?.query(stored, &[]).await?;
    assert_eq!(stored.iter().map(|row| row.get(0)).collect::<Vec<String>>(), kept);
    for gateway in &gateways {
        for secret in &kept {
            until(gateway, 200, secret, "{\"events\":[1]}").await?;
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_window_ends_by_the_databases_clock_or_by_hand() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = start(&scene).await?;
    let mut client = gateway.client()?;
    let database = scene.database().await?;
    // The gateway believes it open: what the database says counts.
    done(&scene, &["open", "asana"]).await?;
    noticed(&gateway, 1).await?;
    let past = "update hapax.handshake set opened_at = opened_at - interval '1 hour', \
                open_until = open_until - interval '1 hour'";
    database.execute(past, &[]).await?;
    assert_refused(&hand_over(&mut client, ONE).await?);
    done(&scene, &["open", "asana", "--for", "24h"]).await?;
    done(&scene, &["close", "asana"]).await?;
    assert_refused(&hand_over(&mut client, ONE).await?);
    let said = hapax(&scene, &["close", "asana"]).await?;
    assert!(said.code == Some(1) && said.all.contains("no window is open"), "{}", said.all);
    let stored: i64 = database.query_one("select count(secret) from hapax.handshake", &[]).await?.get(0);
    assert_eq!(stored, 0);
    // Opened again while open: the newer one counts, and takes one.
    for _ in 0..2 {
        done(&scene, &["open", "asana", "--for", "1m"]).await?;
    }
    let kept = async || {
        let answer = hand_over(&mut gateway.client().ok()?, ONE).await.ok()?;
        (answer.status == StatusCode::OK).then_some(answer)
    };
    assert_kept(&eventually(LIMIT, kept).await?, ONE);
    assert_refused(&hand_over(&mut client, OTHER).await?);
    Ok(())
}

#[tokio::test]
async fn a_token_is_handed_over_signed_with_itself() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = start(&scene).await?;
    let mut client = gateway.client()?;
    let body = format!("{{\"verification_token\":\"{TOKEN}\"}}");
    done(&scene, &["open", "notion"]).await?;
    noticed(&gateway, 1).await?;
    // Not with another key, nor beside something else.
    assert_refused(&event(&mut client, "notion", OTHER, &body).await?);
    let more = format!("{{\"verification_token\":\"{TOKEN}\",\"id\":\"e\"}}");
    assert_refused(&event(&mut client, "notion", TOKEN, &more).await?);
    // Nor at a source whose window is closed.
    let asana = client.post("/in/asana", &[("X-Hook-Secret", TOKEN)], Bytes::new()).await?;
    assert_refused(&asana);
    let answer = event(&mut client, "notion", TOKEN, &body).await?;
    assert_eq!((answer.status.as_u16(), answer.header("hapax-outcome")), (200, Some("handshake")));
    let answer = event(&mut client, "notion", TOKEN, "{\"id\":\"e1\",\"type\":\"page.created\"}").await?;
    assert_eq!((answer.status.as_u16(), answer.header("hapax-outcome")), (200, Some("accepted")));
    assert_eq!(scene.found().await?.rows.keys().collect::<Vec<_>>(), ["e1"]);
    Ok(())
}

#[tokio::test]
async fn without_postgres_nothing_is_taken_and_nothing_is_called_wrong() -> Result<()> {
    let mut postgres = stores::private_postgres(PostgresOptions::default()).await?;
    let scene = Scene::on(&postgres, "redis://127.0.0.1:1".to_owned()).await?;
    let mut gateway = start(&scene).await?;
    done(&scene, &["open", "asana"]).await?;
    noticed(&gateway, 1).await?;
    postgres.stop()?;
    // Whether it noticed already or not.
    let answer = hand_over(&mut gateway.client()?, ONE).await?;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(answer.header("retry-after").is_some() && !answer.headers.contains_key("x-hook-secret"));
    postgres.restart()?;
    let kept = async || {
        let answer = hand_over(&mut gateway.client().ok()?, ONE).await.ok()?;
        (answer.status == StatusCode::OK).then_some(answer)
    };
    assert_kept(&eventually(LIMIT, kept).await?, ONE);

    // What it has read, it goes on using. One that has never read it cannot call a signature wrong.
    postgres.stop()?;
    assert_kept(&hand_over(&mut gateway.client()?, ONE).await?, ONE);
    gateway.restart().await?;
    let mut client = gateway.client()?;
    let answer = event(&mut client, "asana", ONE, "{\"events\":[1]}").await?;
    assert_eq!((answer.status.as_u16(), answer.header("hapax-outcome")), (503, Some("unavailable")));
    postgres.restart()?;
    until(&gateway, 200, ONE, "{\"events\":[1]}").await?;
    assert_refused(&event(&mut client, "asana", OTHER, "{\"events\":[2]}").await?);
    Ok(())
}

#[tokio::test]
async fn a_source_that_takes_no_secret_has_no_window() -> Result<()> {
    let scene = Scene::new().await?;
    let takers = "no source \"nobody\"; sources whose provider hands one over: asana, notion, spare";
    for (arguments, code, wanted) in [
        (&["open", "stripe"] as &[&str], 64, "stripe hands over no secret"),
        (&["open", "nobody"], 64, takers),
        (&["open", "asana", "--for", "25h"], 2, "give 1s to 24h"),
        (&["open", "asana", "--for", "10"], 2, "give 1s to 24h"),
        (&["show", "asana"], 1, "no secret that was not shown yet"),
    ] {
        let said = hapax(&scene, arguments).await?;
        assert!(said.code == Some(code) && said.all.contains(wanted), "{arguments:?}: {}", said.all);
    }
    Ok(())
}
