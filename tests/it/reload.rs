//! Changed settings are taken up whole or refused whole while the gateway serves on.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rustix::process::Signal;
use serde_json::Value;

use crate::harness::client::{Client, Raw};
use crate::harness::gateway::{Gateway, Start};
use crate::harness::load::{Load, metric, until_metric};
use crate::harness::play::{
    Hold, LIMIT, answer, code, hapax, is_ready, outcome, patient, post, ready, request, settled,
    stripe_signature,
};
use crate::harness::proxy::{Mode, Proxy};
use crate::harness::scene::{SECRET, Scene, deliver, event};
use crate::harness::stores::{postgres, redis as redis_server};
use crate::harness::wait::eventually;

/// Nothing but a signal makes the gateway look.
const BY_SIGNAL: &str = "server.reload_check = \"off\"";
/// The gateway looks all the time.
const BY_ITSELF: &str = "server.reload_check = \"20ms\"";

const TAKEN_UP: &str = "the settings are taken up";
const REFUSED: &str = "the changed settings are refused; those of before stay in use";

async fn reloads(gateway: &Gateway, result: &str) -> Result<i64> {
    metric(gateway, "hapax_config_reloads_total", &format!("result=\"{result}\"")).await
}

/// Waits for one more reload with this result than `before`.
async fn until_reloads(gateway: &Gateway, result: &str, before: i64) -> Result<()> {
    let label = format!("result=\"{result}\"");
    until_metric(gateway, "hapax_config_reloads_total", &label, |count| count > before).await
}

/// Writes the settings, sends the signal, and waits for what becomes of them.
async fn reload(gateway: &mut Gateway, settings: &str, result: &str) -> Result<()> {
    let before = reloads(gateway, result).await?;
    fs::write(gateway.config(), settings)?;
    gateway.signal(Signal::HUP)?;
    until_reloads(gateway, result, before).await
}

/// The log lines with this message, once there are so many; they are written a moment after what they tell.
async fn lines(gateway: &Gateway, message: &str, wanted: usize) -> Result<Vec<Value>> {
    let all = || {
        let lines = gateway.lines();
        let lines = lines.iter().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let lines: Vec<Value> = lines.filter(|line| line["message"] == message).collect();
        std::future::ready((lines.len() >= wanted).then_some(lines))
    };
    let lines = eventually(LIMIT, all).await;
    lines.with_context(|| format!("not {wanted} times {message:?}: {:#?}", gateway.lines()))
}

/// The status of a delivery that is signed with this secret.
async fn status_with(gateway: &Gateway, source: &str, secret: &str, id: &str) -> Result<u16> {
    let body = event(id, "");
    let signature = stripe_signature(secret, &body, 0);
    let path = format!("/in/{source}");
    let answer = gateway.client()?.post(&path, &[("stripe-signature", &signature)], body).await?;
    Ok(answer.status.as_u16())
}

/// The status of a delivery.
async fn status(gateway: &Gateway, source: &str, id: &str) -> Result<u16> {
    Ok(deliver(gateway.listen()?, source, &event(id, "")).await?.status)
}

fn secret_of(path: &Path) -> String {
    format!("source.stripe.secrets = [{{ file = \"{}\" }}, \"{SECRET}\"]", path.display())
}

/// A file that is replaced as editors and orchestrators do: by another one under its name.
fn replace(path: &Path, text: &str) -> Result<()> {
    let new = path.with_extension("new");
    fs::write(&new, text)?;
    Ok(fs::rename(new, path)?)
}

#[tokio::test]
async fn a_secret_is_rotated_under_traffic() -> Result<()> {
    let (scene, folder) = (Scene::new().await?, tempfile::tempdir()?);
    let secret = folder.path().join("secret");
    fs::write(&secret, "secret number 0\n")?;
    let mut gateway = scene.gateway(&[BY_SIGNAL, &secret_of(&secret)]).await?;
    ready(&gateway).await?;
    // Signed with the secret that all settings accept.
    let load = Load::start(gateway.listen()?, "stripe", 2);
    for round in 0..5 {
        let (old, new) = (format!("secret number {round}"), format!("secret number {}", round + 1));
        assert_eq!(status_with(&gateway, "stripe", &new, "evt_new").await?, 401);
        assert_eq!(status_with(&gateway, "stripe", &old, "evt_old").await?, 200);
        replace(&secret, &format!("{new}\n"))?;
        let before = reloads(&gateway, "ok").await?;
        gateway.signal(Signal::HUP)?;
        until_reloads(&gateway, "ok", before).await?;
        assert_eq!(status_with(&gateway, "stripe", &old, "evt_old").await?, 401);
        assert_eq!(status_with(&gateway, "stripe", &new, "evt_new").await?, 200);
        load.go_on(20).await?;
    }
    let sent = load.finish().await?;
    assert!(sent.iter().all(|sent| sent.answer.status == 200), "either settings accept them: {sent:#?}");
    scene.assert_once(sent.iter().map(|sent| &sent.id)).await?;
    for line in lines(&gateway, TAKEN_UP, 5).await? {
        assert_eq!((&line["sources_changed"], &line["sources_added"]), (&"stripe".into(), &"".into()));
        assert_eq!(line["tables_changed"], "");
    }
    assert!(!gateway.lines().iter().any(|line| line.contains("secret number")));
    Ok(())
}

#[tokio::test]
async fn a_changed_file_needs_no_signal() -> Result<()> {
    let (scene, folder) = (Scene::new().await?, tempfile::tempdir()?);
    // As in a container: the folder is a link that is replaced.
    let (one, two) = (folder.path().join("one"), folder.path().join("two"));
    let link = folder.path().join("data");
    for (version, text) in [(&one, "the first secret"), (&two, "the second secret")] {
        fs::create_dir(version)?;
        fs::write(version.join("secret"), text)?;
    }
    std::os::unix::fs::symlink(&one, &link)?;
    let secret = secret_of(&link.join("secret"));
    let settings = scene.settings(&[BY_ITSELF, &secret], "");
    let gateway = Start::new(settings.clone()).start().await?;
    ready(&gateway).await?;
    assert_eq!(status_with(&gateway, "stripe", "the first secret", "evt_1").await?, 200);

    let fresh = folder.path().join("fresh");
    std::os::unix::fs::symlink(&two, &fresh)?;
    fs::rename(&fresh, &link)?;
    until_reloads(&gateway, "ok", 0).await?;
    assert_eq!(status_with(&gateway, "stripe", "the first secret", "evt_2").await?, 401);
    assert_eq!(status_with(&gateway, "stripe", "the second secret", "evt_2").await?, 200);

    // The same bytes in another file are no change; what comes next is.
    replace(&gateway.config(), &settings)?;
    replace(&gateway.config(), &scene.settings(&[BY_ITSELF, &secret, "log.requests = \"failed\""], ""))?;
    until_reloads(&gateway, "ok", 1).await?;
    assert_eq!(lines(&gateway, TAKEN_UP, 2).await?[1]["tables_changed"], "log");
    Ok(())
}

const THIRD: &str = "create function fx.third(e hapax.event) returns void language plpgsql as $$
    begin perform fx.apply(e); end $$";

fn third() -> String {
    format!("[source.third]\nprovider = \"stripe\"\nsecrets = [\"{SECRET}\"]\neffect = \"fx.third\"\n")
}

#[tokio::test]
async fn a_new_source_brings_its_effect_along() -> Result<()> {
    let scene = Scene::new().await?;
    let mut gateway = scene.gateway(&[BY_SIGNAL]).await?;
    ready(&gateway).await?;
    assert_eq!(status(&gateway, "third", "evt_1").await?, 404);
    let with_third = scene.settings(&[BY_SIGNAL], &third());
    reload(&mut gateway, &with_third, "refused").await?;
    let why = gateway.log(|line| line["message"] == REFUSED).await?;
    assert!(why["cause"].as_str().is_some_and(|why| why.contains("fx.third: no such function")), "{why}");
    assert_eq!(status(&gateway, "third", "evt_1").await?, 404);

    let database = scene.database().await?;
    database.batch_execute(THIRD).await?;
    reload(&mut gateway, &with_third, "ok").await?;
    assert_eq!(status(&gateway, "third", "evt_1").await?, 200);
    assert_eq!(lines(&gateway, TAKEN_UP, 1).await?[0]["sources_added"], "third");
    let stored = database.query("select from hapax.key_rule where source = 'third'", &[]).await?;
    assert_eq!(stored.len(), 1, "its key rule is stored");
    scene.assert_once([&"evt_1".to_owned()]).await?;
    Ok(())
}

#[tokio::test]
async fn a_removed_source_is_unknown_and_comes_back_with_its_memory() -> Result<()> {
    let scene = Scene::new().await?;
    scene.database().await?.batch_execute(THIRD).await?;
    let (with, without) = (scene.settings(&[BY_SIGNAL], &third()), scene.settings(&[BY_SIGNAL], ""));
    let mut gateway = Start::new(with.clone()).start().await?;
    ready(&gateway).await?;
    for _ in 0..3 {
        assert_eq!(status(&gateway, "third", "evt_1").await?, 200);
        reload(&mut gateway, &without, "ok").await?;
        assert_eq!(status(&gateway, "third", "evt_1").await?, 404);
        assert_eq!(status(&gateway, "stripe", "evt_2").await?, 200, "the others go on");
        reload(&mut gateway, &with, "ok").await?;
    }
    assert_eq!(lines(&gateway, TAKEN_UP, 1).await?[0]["sources_removed"], "third");
    assert_eq!(deliver(gateway.listen()?, "third", &event("evt_1", "")).await?.outcome, "duplicate");
    // The lanes that are gone hold no connection back: those of the effects that are left all work.
    for (source, id) in [("stripe", "a"), ("other", "b"), ("plain", "c"), ("third", "d")] {
        assert_eq!(status(&gateway, source, id).await?, 200);
    }
    Ok(())
}

#[tokio::test]
async fn wrong_settings_are_refused_whole_with_all_their_mistakes() -> Result<()> {
    let scene = Scene::new().await?;
    let mut gateway = scene.gateway(&[BY_SIGNAL]).await?;
    ready(&gateway).await?;
    let since = metric(&gateway, "hapax_config_last_success_timestamp_seconds", "").await?;
    assert!(since > 1, "the start counts");
    let mistakes = [
        "server.deadline = 5",
        "server.drain = \"1 fortnight\"",
        "server.body_maxx = \"1MiB\"",
        "source.stripe.provider = \"strype\"",
        "source.other.secrets = [{ file = \"nowhere\" }]",
        // Of two values with each other.
        "postgres.lock_timeout = \"2s\"",
        // And what would be right by itself.
        "source.plain.ack = { status = 299 }",
    ];
    let wrong = scene.settings(&[&mistakes[..], &[BY_SIGNAL]].concat(), "");
    reload(&mut gateway, &wrong, "refused").await?;
    assert_eq!(metric(&gateway, "hapax_config_reload_failed", "").await?, 1);
    let why = gateway.log(|line| line["message"] == REFUSED).await?;
    assert_eq!(why["mistakes"], 6, "{:#?}", gateway.lines());
    let told = lines(&gateway, "a mistake in the changed settings", 1).await?;
    for mistake in &mistakes[..6] {
        let key = mistake.split_once(" =").context("a key")?.0;
        let line = told.iter().find(|line| line["key"].as_str().is_some_and(|told| told.starts_with(key)));
        let line = line.with_context(|| format!("{key}: {told:#?}"))?;
        let at = wrong.lines().position(|line| line == *mistake).context("the mistake's line")? + 1;
        assert_eq!((line["line"].as_u64(), line["level"].as_str()), (Some(at as u64), Some("ERROR")));
        assert_eq!(line["file"], gateway.config().to_string_lossy().as_ref());
    }
    for source in ["stripe", "other", "plain"] {
        assert_eq!(status(&gateway, source, "evt_1").await?, 200, "all is as before");
    }

    fs::remove_file(gateway.config())?;
    gateway.signal(Signal::HUP)?;
    until_reloads(&gateway, "refused", 1).await?;
    assert_eq!(status(&gateway, "plain", "evt_2").await?, 200);
    reload(&mut gateway, &scene.settings(&[mistakes[6], BY_SIGNAL], ""), "ok").await?;
    assert_eq!(metric(&gateway, "hapax_config_reload_failed", "").await?, 0);
    assert_eq!(status(&gateway, "plain", "evt_3").await?, 299);
    Ok(())
}

#[tokio::test]
async fn what_needs_a_restart_is_named_and_nothing_is_taken_up() -> Result<()> {
    let scene = Scene::new().await?;
    let mut gateway = scene.gateway(&[BY_SIGNAL]).await?;
    ready(&gateway).await?;
    let fixed = [
        ("server.listen", "\"127.0.0.1:1\"", "127.0.0.1:1 is not the 127.0.0.1:0"),
        ("admin.listen", "\"127.0.0.1:2\"", "127.0.0.1:2 is not the 127.0.0.1:0"),
        ("server.threads", "2", "2 is not the 1"),
        ("server.requests_max", "17", "17 is not the 4096"),
        ("server.idle_timeout", "\"70s\"", "70s is not the 75s"),
        ("postgres.url", "\"postgres://u:canary@h/d\"", "is not the URL"),
        ("postgres.connections", "8", "8 is below the 9"),
        ("fast_tier.prefix", "\"other:\"", "\"other:\" is not the"),
    ];
    let keys: Vec<String> = fixed.iter().map(|(key, value, _)| format!("{key} = {value}")).collect();
    let mut overrides: Vec<&str> = keys.iter().map(String::as_str).collect();
    overrides.extend([BY_SIGNAL, "source.plain.ack = { status = 299 }"]);
    // More than what is left if nothing is written.
    reload(&mut gateway, &scene.settings(&[BY_SIGNAL, "postgres.connections = 9"], ""), "ok").await?;
    reload(&mut gateway, &scene.settings(&overrides, ""), "refused").await?;
    gateway.log(|line| line["message"] == REFUSED).await?;
    let told = lines(&gateway, "a mistake in the changed settings", 1).await?;
    for (key, _, why) in fixed {
        let line =
            told.iter().find(|line| line["key"] == key).with_context(|| format!("{key}: {told:#?}"))?;
        let cause = line["cause"].as_str().unwrap_or_default();
        assert!(cause.contains(why) && cause.contains("restart"), "{key}: {cause}");
    }
    assert_eq!(told.len(), fixed.len(), "{told:#?}");
    assert!(!gateway.lines().iter().any(|line| line.contains("canary")));
    assert_eq!(status(&gateway, "plain", "evt_1").await?, 200, "nothing of it is taken up");
    Ok(())
}

#[tokio::test]
async fn a_changed_key_rule_is_refused_until_it_is_accepted() -> Result<()> {
    let scene = Scene::new().await?;
    let mut gateway = scene.gateway(&[BY_SIGNAL]).await?;
    ready(&gateway).await?;
    assert_eq!(status(&gateway, "plain", "evt_1").await?, 200);
    let changed = scene.settings(&[BY_SIGNAL, "source.plain.scope = \"tenant\""], "");
    reload(&mut gateway, &changed, "refused").await?;
    let why = gateway.log(|line| line["message"] == REFUSED).await?;
    let why = why["cause"].as_str().unwrap_or_default();
    for part in ["source plain: the key rule is", "apply old events again", "--accept-key-change plain`"] {
        assert!(why.contains(part), "{part}\nis not in\n{why}");
    }
    assert_eq!(deliver(gateway.listen()?, "plain", &event("evt_1", "")).await?.outcome, "duplicate");

    let config = gateway.config();
    let config = config.to_str().context("a path that is text")?;
    let accepted = hapax(&["migrate", "--accept-key-change", "plain", "--config", config]).await?;
    assert!(accepted.status.success(), "{accepted:?}");
    reload(&mut gateway, &changed, "ok").await?;
    assert_eq!(deliver(gateway.listen()?, "plain", &event("evt_1", "")).await?.outcome, "accepted");
    Ok(())
}

#[tokio::test]
async fn what_waits_for_the_database_is_taken_up_when_that_agrees() -> Result<()> {
    let mut scene = Scene::new().await?;
    let database = scene.database().await?;
    let proxy = Proxy::start(postgres().address())?;
    scene.stores.postgres_url = postgres().url_at(proxy.address(), &scene.stores.database);
    let gateway = scene.gateway(&[BY_ITSELF]).await?;
    ready(&gateway).await?;
    replace(&gateway.config(), &scene.settings(&[BY_ITSELF], &third()))?;
    until_reloads(&gateway, "refused", 0).await?;
    assert_eq!(status(&gateway, "third", "evt_1").await?, 404);
    // Asked again and again, each time on a connection of its own.
    let asked = proxy.accepted();
    let again = || std::future::ready((proxy.accepted() > asked + 20).then_some(()));
    eventually(LIMIT, again).await.context("it does not ask again")?;

    database.batch_execute(THIRD).await?;
    until_reloads(&gateway, "ok", 0).await?;
    assert_eq!(status(&gateway, "third", "evt_1").await?, 200);
    lines(&gateway, TAKEN_UP, 1).await?;
    assert_eq!(lines(&gateway, REFUSED, 1).await?.len(), 1, "one reason is told once");
    assert_eq!(reloads(&gateway, "refused").await?, 1);
    Ok(())
}

/// With Postgres away, what needs nothing of it is taken up; what does waits.
#[tokio::test]
async fn a_secret_is_rotated_while_postgres_is_away() -> Result<()> {
    let mut scene = Scene::new().await?;
    scene.database().await?.batch_execute(THIRD).await?;
    let proxy = Proxy::start(postgres().address())?;
    let direct = std::mem::replace(
        &mut scene.stores.postgres_url,
        postgres().url_at(proxy.address(), &scene.stores.database),
    );
    let mut gateway = scene.gateway(&[BY_SIGNAL]).await?;
    ready(&gateway).await?;
    proxy.set(Mode::Refuse);
    proxy.cut();
    let rotated = [BY_SIGNAL, "source.stripe.secrets = [\"the next secret\"]"];
    reload(&mut gateway, &scene.settings(&rotated, ""), "ok").await?;
    assert_eq!(status(&gateway, "stripe", "evt_1").await?, 401);
    assert_eq!(
        status_with(&gateway, "stripe", "the next secret", "evt_1").await?,
        503,
        "verified, not recorded"
    );

    let more = scene.settings(&[BY_ITSELF, rotated[1]], &third());
    reload(&mut gateway, &more, "refused").await?;
    let why = gateway.log(|line| line["message"] == REFUSED).await?;
    let why = why["cause"].as_str().unwrap_or_default();
    assert!(why.contains("Postgres cannot be reached"), "{why}");
    assert!(why.contains("asked about effect fx.third, the key rule of source third"), "{why}");
    assert_eq!(status(&gateway, "third", "evt_1").await?, 404);

    proxy.set(Mode::Pass);
    let more = scene.settings(&[BY_SIGNAL, rotated[1]], &third());
    reload(&mut gateway, &more, "ok").await?;
    assert_eq!(status(&gateway, "third", "evt_2").await?, 200);
    scene.stores.postgres_url = direct;
    scene.assert_once([&"evt_2".to_owned()]).await?;
    Ok(())
}

/// Started without Postgres: what is to be checked then are the settings in use then.
#[tokio::test]
async fn a_gateway_that_is_not_ready_becomes_so_on_the_settings_of_then() -> Result<()> {
    let mut scene = Scene::new().await?;
    let proxy = Proxy::start(postgres().address())?;
    proxy.set(Mode::Refuse);
    scene.stores.postgres_url = postgres().url_at(proxy.address(), &scene.stores.database);
    let mut gateway = Start::new(scene.settings(&[BY_SIGNAL], &third())).start().await?;
    let without = scene.settings(&[BY_SIGNAL], "");
    reload(&mut gateway, &without, "ok").await?;
    proxy.set(Mode::Pass);
    // The effect of the source that is gone does not exist.
    ready(&gateway).await?;
    assert_eq!(status(&gateway, "stripe", "evt_1").await?, 200);
    Ok(())
}

#[tokio::test]
async fn the_last_of_several_signals_counts() -> Result<()> {
    let scene = Scene::new().await?;
    let mut gateway = scene.gateway(&[BY_SIGNAL]).await?;
    ready(&gateway).await?;
    for round in 0..10 {
        for status in [210 + round, 230 + round] {
            let ack = format!("source.plain.ack = {{ status = {status} }}");
            replace(&gateway.config(), &scene.settings(&[BY_SIGNAL, &ack], ""))?;
            gateway.signal(Signal::HUP)?;
        }
        let last = async || {
            let status = status(&gateway, "plain", "evt_1").await.ok()?;
            (status == 230 + round).then_some(())
        };
        eventually(LIMIT, last).await.context("the last settings are not in use")?;
    }
    assert_eq!(reloads(&gateway, "refused").await?, 0);
    Ok(())
}

#[tokio::test]
async fn a_stopping_gateway_takes_up_nothing_and_stops() -> Result<()> {
    let scene = Scene::new().await?;
    let mut gateway = scene.gateway(&[BY_SIGNAL]).await?;
    ready(&gateway).await?;
    // The drain time of the settings in use, not of those at the start.
    let brisk = [BY_SIGNAL, "server.drain = \"5s\""];
    reload(&mut gateway, &scene.settings(&brisk, ""), "ok").await?;
    gateway.sigterm()?;
    is_ready(&gateway, http::StatusCode::SERVICE_UNAVAILABLE).await?;
    let more = [&brisk[..], &["source.plain.ack = { status = 299 }"]].concat();
    fs::write(gateway.config(), scene.settings(&more, ""))?;
    gateway.signal(Signal::HUP)?;
    let told = "stopping: changed settings are not taken up any more";
    gateway.log(|line| line["message"] == told).await?;
    assert_eq!(status(&gateway, "plain", "evt_1").await?, 200, "it serves on as it did");
    assert_eq!(gateway.wait(LIMIT).await?.code(), Some(0), "{:#?}", gateway.lines());
    let told = "stopping: not ready, serving on for the drain time; a second signal ends at once";
    assert_eq!(lines(&gateway, told, 1).await?[0]["drain_ms"], 5000);
    Ok(())
}

/// Neither a request whose effect runs nor one whose body is still to come sees anything of the new settings.
#[tokio::test]
async fn a_request_ends_under_the_settings_with_which_it_began() -> Result<()> {
    let scene = Scene::new().await?;
    let before = patient(&[BY_SIGNAL, "source.stripe.ack = { status = 201 }"]);
    let mut gateway = scene.gateway(&before).await?;
    ready(&gateway).await?;
    let effects = Hold::new(&scene).await?;
    let to = gateway.listen()?;
    let held =
        tokio::spawn(
            async move { post(&mut Client::new(to), "stripe", &event("held", r#""do":"wait""#)).await },
        );
    effects.waiting(1).await?;
    let (bytes, at) = request("stripe", &event("half", ""));
    let mut half = Raw::connect(to).await?;
    half.write(&bytes[..at + 5]).await?;
    until_metric(&gateway, "hapax_requests_in_flight", "", |count| count == 2).await?;

    // Without the source, and with other lanes for those that are left.
    let after = scene.settings(&patient(&[BY_SIGNAL, "postgres.batch_events = 7"]), "");
    let after: String = after
        .lines()
        .filter(|line| !line.starts_with("source.stripe"))
        .fold(String::new(), |text, line| text + line + "\n");
    reload(&mut gateway, &after, "ok").await?;
    let gone = post(&mut gateway.client()?, "stripe", &event("late", "")).await?;
    assert_eq!((gone.status.as_u16(), code(&gone).as_str()), (404, "unknown_source"));
    assert_eq!(status(&gateway, "other", "evt_1").await?, 200);

    half.write(&bytes[at + 5..]).await?;
    effects.release().await?;
    let held = held.await??;
    assert_eq!((held.status.as_u16(), outcome(&held)), (201, "accepted"));
    assert_eq!(answer(&mut half).await?.0, 201);
    scene.assert_once(["held", "half", "evt_1"].map(str::to_owned).iter()).await?;
    assert_eq!(scene.found().await?.rows.len(), 3);
    Ok(())
}

/// Another lane for each, and the queue of the one before is emptied.
#[tokio::test]
async fn lanes_are_replaced_under_traffic() -> Result<()> {
    let scene = Scene::new().await?;
    let mut gateway = scene.gateway(&[BY_SIGNAL]).await?;
    ready(&gateway).await?;
    let loads = ["stripe", "plain"].map(|source| (source, gateway.listen()));
    let loads: Vec<Load> =
        loads.into_iter().map(|(source, to)| Ok(Load::start(to?, source, 3))).collect::<Result<_>>()?;
    for round in 0..10 {
        let batch = format!("postgres.batch_events = {}", 1 + round % 3);
        reload(&mut gateway, &scene.settings(&[BY_SIGNAL, &batch], ""), "ok").await?;
        for load in &loads {
            load.go_on(10).await?;
        }
    }
    let mut sent = Vec::new();
    for load in loads {
        sent.extend(load.finish().await?);
    }
    let failed: Vec<_> = sent.iter().filter(|sent| sent.answer.status != 200).collect();
    assert!(failed.is_empty(), "{failed:#?}");
    // Both sources have the same ids; each is an event of its own there.
    let database = scene.database().await?;
    let twice = "select from fx.effect group by source, event_id having count(*) > 1";
    assert_eq!(database.query(twice, &[]).await?.len(), 0);
    Ok(())
}

#[tokio::test]
async fn times_to_live_and_the_log_follow_the_settings() -> Result<()> {
    let scene = Scene::new().await?;
    let mut gateway = scene.gateway(&[BY_SIGNAL]).await?;
    ready(&gateway).await?;
    let quiet = [BY_SIGNAL, "log.level = \"warn\"", "fast_tier.ttl = \"1h\""];
    reload(&mut gateway, &scene.settings(&quiet, ""), "ok").await?;
    assert_eq!(status(&gateway, "plain", "evt_1").await?, 200);
    settled(&scene, 1).await?;
    let mut redis = scene.redis().await?;
    let key = scene.redis_key("plain", "evt_1");
    let ttl_ms: i64 = redis::cmd("PTTL").arg(&key).query_async(&mut redis).await?;
    assert!((1..=3_600_000).contains(&ttl_ms), "{ttl_ms}");
    reload(&mut gateway, &scene.settings(&[BY_SIGNAL], ""), "ok").await?;
    let line = gateway.log(|line| line["message"] == TAKEN_UP).await?;
    assert_eq!(line["tables_changed"], "log, fast_tier");
    assert_eq!(lines(&gateway, TAKEN_UP, 1).await?.len(), 1, "the one before was below the level");
    Ok(())
}

/// Redis' own time-out of the day of connecting does not cut it short.
#[tokio::test]
async fn a_longer_time_out_for_redis_is_kept() -> Result<()> {
    let mut scene = Scene::new().await?;
    let proxy = Proxy::start(redis_server().address())?;
    scene.stores.redis_url = format!("redis://{}", proxy.address());
    let mut gateway = scene.gateway(&[BY_SIGNAL]).await?;
    ready(&gateway).await?;
    let longer = [BY_SIGNAL, "fast_tier.timeout = \"2s\"", "fast_tier.memory_ttl = \"1ms\""];
    reload(&mut gateway, &scene.settings(&longer, ""), "ok").await?;
    proxy.set(Mode::Stall);
    let started = Instant::now();
    assert_eq!(status(&gateway, "plain", "evt_1").await?, 200);
    let took = started.elapsed();
    assert!(took >= Duration::from_secs(2), "{took:?}");
    Ok(())
}

/// Unless their number is written, connections grow with the effects, also with those that come later.
#[tokio::test]
async fn effects_that_come_later_get_their_connections() -> Result<()> {
    const EFFECTS: usize = 12;
    let scene = Scene::new().await?;
    let mut gateway = scene.gateway(&patient(&[BY_SIGNAL])).await?;
    ready(&gateway).await?;
    let (mut functions, mut sources) = (String::new(), String::new());
    for number in 0..EFFECTS {
        functions += &THIRD.replace("fx.third", &format!("fx.late_{number}"));
        functions += ";";
        sources += &third().replace("third", &format!("late_{number}"));
    }
    scene.database().await?.batch_execute(&functions).await?;
    reload(&mut gateway, &scene.settings(&patient(&[BY_SIGNAL]), &sources), "ok").await?;
    let (effects, to) = (Hold::new(&scene).await?, gateway.listen()?);
    let deliveries = (0..EFFECTS).map(|number| {
        let body = event(&format!("evt_{number}"), r#""do":"wait""#);
        tokio::spawn(async move { deliver(to, &format!("late_{number}"), &body).await })
    });
    let deliveries: Vec<_> = deliveries.collect();
    // One connection each, and the gateway started with eight.
    effects.waiting(i64::try_from(EFFECTS)?).await?;
    effects.release().await?;
    for delivery in deliveries {
        assert_eq!(delivery.await??.outcome, "accepted");
    }
    Ok(())
}
