//! A source whose events would get other keys than they had is not served before somebody accepts that: under new keys,
//! old events would take effect again.

use std::process::Command;

use anyhow::{Context as _, Result};
use http::StatusCode;

use crate::harness::client::Client;
use crate::harness::gateway::Start;
use crate::harness::play::{LIMIT, ready};
use crate::harness::proxy::{Mode, Proxy};
use crate::harness::scene::{Scene, deliver, event};
use crate::harness::stores;
use crate::harness::wait::eventually;

/// Stripe's scheme with ids of one's own; what is not about the key is written with a value that can be changed.
fn own(source: &str, ids: &str, tolerance: &str, secret: &str) -> String {
    format!(
        "
        [scheme.own]
        kind = \"hmac\"
        hash = \"sha256\"
        sign = \"{{ts}}.{{body}}\"
        sig = {{ from = \"header:Stripe-Signature\", split = \",\", assign = \"=\", label = \"v1\", encoding = \"hex\" }}
        ts = {{ from = \"sig:t\", unit = \"s\", tolerance = \"5m\" }}
        id = {ids}
        [source.{source}]
        provider = \"own\"
        secrets = [\"{secret}\"]
        tolerance = \"{tolerance}\"
        effect = \"none\"
        "
    )
}

const SECRET: &str = "a secret of this source alone";

fn usual() -> String {
    own("own", "[\"json:/id\", \"header:X-Id\"]", "5m", SECRET)
}

fn changed() -> String {
    own("own", "[\"header:X-Id\", \"json:/id\"]", "5m", SECRET)
}

struct Said {
    code: Option<i32>,
    all: String,
}

/// Runs a command of the program on these settings.
fn hapax(settings: &str, arguments: &[&str]) -> Result<Said> {
    let file = tempfile::Builder::new().suffix(".toml").tempfile_in(stores::folder().path())?;
    std::fs::write(file.path(), settings)?;
    let mut command = Command::new(env!("CARGO_BIN_EXE_hapax"));
    let output = command.args(arguments).arg("--config").arg(file.path()).output()?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok(Said { code: output.status.code(), all: text(&output.stdout) + &text(&output.stderr) })
}

/// What is stored, by source.
async fn stored(scene: &Scene) -> Result<Vec<(String, String)>> {
    let database = scene.database().await?;
    let rows = database.query("select source, rule from hapax.key_rule order by source", &[]).await?;
    Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
}

/// Whether a gateway starts on these settings; if not, what it says.
async fn serve(settings: &str) -> Result<Option<String>> {
    match Start::new(settings).start().await {
        Ok(gateway) => {
            ready(&gateway).await?;
            Ok(None)
        }
        Err(error) => Ok(Some(format!("{error:#}"))),
    }
}

#[track_caller]
fn assert_refused(said: &str, old: &str, new: &str, source: &str) {
    for part in [
        &format!("source {source}: the key rule is `{new}`"),
        &format!("it was `{old}`"),
        "apply old events again",
        &format!("`hapax migrate --config FILE --accept-key-change {source}`"),
    ] {
        assert!(said.contains(part), "{part}\nis not in\n{said}");
    }
}

const USUAL: &str = r#"id = ["json:/id", "header:x-id"], scope = "-""#;
const CHANGED: &str = r#"id = ["header:x-id", "json:/id"], scope = "-""#;

#[tokio::test]
async fn a_changed_id_rule_is_refused_until_it_is_accepted() -> Result<()> {
    let scene = Scene::new().await?;
    let (usual, changed) = (scene.settings(&[], &usual()), scene.settings(&[], &changed()));
    assert_eq!(serve(&usual).await?, None);
    let before = stored(&scene).await?;
    assert!(before.contains(&("own".to_owned(), USUAL.to_owned())), "{before:?}");
    assert!(before.contains(&("stripe".to_owned(), r#"id = ["json:/id"], scope = "-""#.to_owned())));

    let refused = serve(&changed).await?.context("it started")?;
    assert!(refused.contains("exit status: 69"), "{refused}");
    assert_refused(&refused, USUAL, CHANGED, "own");
    assert!(!refused.contains(SECRET));
    for command in [&["check", "--online"][..], &["migrate"], &["migrate", "--accept-key-change", "stripe"]] {
        let said = hapax(&changed, command)?;
        assert_eq!(said.code, Some(69), "{command:?}: {}", said.all);
        assert_refused(&said.all, USUAL, CHANGED, "own");
    }
    assert_eq!(stored(&scene).await?, before, "nothing of a refused start is kept");
    assert_eq!(serve(&usual).await?, None);

    let unknown = hapax(&changed, &["migrate", "--accept-key-change", "owm"])?;
    assert_eq!(unknown.code, Some(64), "{}", unknown.all);
    assert!(unknown.all.contains("no source \"owm\"") && unknown.all.contains("own"), "{}", unknown.all);
    let accept = ["migrate", "--accept-key-change", "own", "--accept-key-change", "stripe"];
    let accepted = hapax(&changed, &accept)?;
    assert_eq!(accepted.code, Some(0), "{}", accepted.all);
    assert!(
        accepted.all.contains(&format!("source own: accepted the key rule: {CHANGED}")),
        "{}",
        accepted.all
    );
    assert!(accepted.all.contains("source stripe: the key rule is the stored one"), "{}", accepted.all);
    assert_eq!(hapax(&changed, &["check", "--online"])?.code, Some(0));
    assert_eq!(serve(&changed).await?, None);
    let back = serve(&usual).await?.context("it started on the rule of before")?;
    assert_refused(&back, CHANGED, USUAL, "own");
    Ok(())
}

/// Each of several is named, and one command accepts all.
#[tokio::test]
async fn a_changed_scope_is_a_changed_rule() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&[]).await?;
    assert_eq!(deliver(gateway.listen()?, "plain", &event("evt_1", "")).await?.outcome, "accepted");
    drop(gateway);
    let tenant = ["source.plain.scope = \"tenant\"", "source.other.scope = \"t\\\"\""];
    let changed = scene.settings(&tenant, "");
    let refused = serve(&changed).await?.context("it started")?;
    let plain = r#"source plain: the key rule is `id = ["json:/id"], scope = "tenant"`; since "#;
    let before = r#" it was `id = ["json:/id"], scope = "-"`"#;
    assert!(refused.contains(plain) && refused.contains(before), "{refused}");
    assert!(refused.contains("--accept-key-change other --accept-key-change plain`"), "{refused}");
    assert!(!refused.contains("source stripe:"), "{refused}");
    // One of the two is not enough.
    let half = hapax(&changed, &["migrate", "--accept-key-change", "plain"])?;
    assert_eq!(half.code, Some(69), "{}", half.all);
    assert!(half.all.contains("source other:") && !half.all.contains("--accept-key-change plain"));
    assert_eq!(hapax(&changed, &["migrate", "--accept-key-change", "other"])?.code, Some(0));
    // What the message warned of.
    let gateway = Start::new(&changed).start().await?;
    assert_eq!(deliver(gateway.listen()?, "plain", &event("evt_1", "")).await?.outcome, "accepted");
    Ok(())
}

#[tokio::test]
async fn what_fixes_no_key_may_change() -> Result<()> {
    let scene = Scene::new().await?;
    let ids = "[\"json:/id\", \"header:X-Id\"]";
    assert_eq!(serve(&scene.settings(&[], &usual())).await?, None);
    let before = stored(&scene).await?;
    for (what, more) in [
        ("nothing", usual()),
        ("the secret", own("own", ids, "5m", "another secret, just as long")),
        ("the tolerance", own("own", ids, "2m", SECRET)),
        ("how a header's name is written", own("own", "[\"json:/id\", \"header:x-ID\"]", "5m", SECRET)),
    ] {
        let settings = scene.settings(&["source.stripe.effect = \"none\""], &more);
        assert_eq!(hapax(&settings, &["check", "--online"])?.code, Some(0), "{what}");
        assert_eq!(serve(&settings).await?, None, "{what}");
        assert_eq!(stored(&scene).await?, before, "{what}");
    }
    Ok(())
}

/// Where the list of a batch's events stands, what of an item names it, and whether (and which part of) the body counts.
#[tokio::test]
async fn whatever_makes_other_keys_is_part_of_the_rule() -> Result<()> {
    let scene = Scene::new().await?;
    let single = |more: &str| {
        let source = own("own", "[\"json:/id\"]", "5m", SECRET);
        source.replace("[source.own]", &format!("{more}\n[source.own]"))
    };
    let batch = |items: &str, id: &str| {
        let list = format!("batch = {{ items = \"{items}\", id = [\"{id}\"] }}");
        own("own", "[]", "5m", SECRET).replace("id = []", &list)
    };
    let accept = |settings: String| settings + "on_mismatch = \"accept\"\n";
    let rules = [
        ("usual", single("")),
        ("the body counts", accept(single(""))),
        ("not all of it", accept(single("volatile = [\"/attempt\"]"))),
        ("only this of it", accept(single("digest = [\"json:/attempt\"]"))),
        ("a batch", batch("/events", "/id")),
        ("another list", batch("/more", "/id")),
        ("another id", batch("/more", "/event/id")),
    ];
    for (at, (what, rule)) in rules.iter().enumerate() {
        let settings = scene.settings(&[], rule);
        let code = hapax(&settings, &["migrate", "--accept-key-change", "own"])?;
        assert_eq!(code.code, Some(0), "{what}: {}", code.all);
        for (other_at, (other, rule)) in rules.iter().enumerate() {
            let said = hapax(&scene.settings(&[], rule), &["check", "--online"])?;
            let right = if at == other_at { 0 } else { 69 };
            assert_eq!(said.code, Some(right), "{what}, then {other}: {}", said.all);
        }
    }
    // Without "accept" the digest makes no key.
    hapax(&scene.settings(&[], &single("")), &["migrate", "--accept-key-change", "own"])?;
    let said = hapax(&scene.settings(&[], &single("volatile = [\"/attempt\"]")), &["check", "--online"])?;
    assert_eq!(said.code, Some(0), "{}", said.all);
    Ok(())
}

/// The same events at another endpoint are other events anyway; the old name's rule stays as it is.
#[tokio::test]
async fn a_renamed_source_is_a_new_one() -> Result<()> {
    let scene = Scene::new().await?;
    assert_eq!(serve(&scene.settings(&[], &usual())).await?, None);
    let renamed = scene.settings(&[], &own("renamed", "[\"header:X-Id\", \"json:/id\"]", "5m", SECRET));
    let online = hapax(&renamed, &["check", "--online"])?;
    assert_eq!(online.code, Some(0), "{}", online.all);
    assert!(online.all.contains("source renamed is new"), "{}", online.all);
    assert_eq!(stored(&scene).await?.len(), 4, "check writes nothing");
    let migrated = hapax(&renamed, &["migrate"])?;
    assert_eq!(migrated.code, Some(0), "{}", migrated.all);
    assert!(migrated.all.contains(&format!("source renamed: stored the key rule: {CHANGED}")));
    assert_eq!(serve(&renamed).await?, None);
    let rules = stored(&scene).await?;
    assert!(rules.contains(&("own".to_owned(), USUAL.to_owned())), "{rules:?}");
    assert!(rules.contains(&("renamed".to_owned(), CHANGED.to_owned())), "{rules:?}");
    Ok(())
}

/// The rule is looked at when the database can be, not only at start.
#[tokio::test]
async fn a_database_that_comes_later_is_asked_later() -> Result<()> {
    let mut scene = Scene::new().await?;
    assert_eq!(serve(&scene.settings(&[], &usual())).await?, None);
    let proxy = Proxy::start(stores::postgres().address())?;
    proxy.set(Mode::Refuse);
    let direct = scene.stores.postgres_url.clone();
    scene.stores.postgres_url = stores::postgres().url_at(proxy.address(), &scene.stores.database);
    let gateway = Start::new(scene.settings(&[], &changed())).start().await?;
    scene.stores.postgres_url = direct;
    proxy.set(Mode::Pass);
    let said = gateway.log(|line| {
        let error = line["error"].as_str().unwrap_or_default();
        line["message"] == "the database is not ready" && error.contains("key rule")
    });
    let said = said.await?;
    assert_refused(said["error"].as_str().unwrap_or_default(), USUAL, CHANGED, "own");
    let answer = Client::new(gateway.admin()?).get("/ready").await?;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    let answer = deliver(gateway.listen()?, "plain", &event("evt_1", "")).await?;
    assert_eq!((answer.status, answer.outcome.as_str()), (503, "unavailable"), "no event gets another key");

    // And it goes on by itself once that is accepted.
    let accept = ["migrate", "--accept-key-change", "own"];
    assert_eq!(hapax(&scene.settings(&[], &changed()), &accept)?.code, Some(0));
    ready(&gateway).await?;
    assert_eq!(deliver(gateway.listen()?, "plain", &event("evt_1", "")).await?.outcome, "accepted");
    Ok(())
}

#[tokio::test]
async fn gateways_that_start_together_with_one_rule_all_serve() -> Result<()> {
    let scene = Scene::new().await?;
    let usual = scene.settings(&[], &usual());
    let started = tokio::join!(serve(&usual), serve(&usual), serve(&usual));
    assert_eq!((started.0?, started.1?, started.2?), (None, None, None));
    Ok(())
}

/// Neither saw the other's rule when it looked: the one that stores its own later is refused.
#[tokio::test]
async fn of_two_that_start_together_with_two_rules_one_is_refused() -> Result<()> {
    let scene = Scene::new().await?;
    let (mut first, watcher) = (scene.database().await?, scene.database().await?);
    let storing = first.transaction().await?;
    storing
        .execute(
            "insert into hapax.key_rule (source, fingerprint, rule) values ('own', sha256(convert_to($1, 'UTF8')), $1)",
            &[&USUAL],
        )
        .await?;
    let second = scene.settings(&["postgres.connect_timeout = \"30s\""], &changed());
    let second = tokio::spawn(async move { serve(&second).await });
    let waits =
        "select from pg_stat_activity where datname = current_database() and wait_event = 'transactionid'";
    let waiting = async || watcher.query_opt(waits, &[]).await.ok()?.map(drop);
    eventually(LIMIT, waiting).await.context("it does not wait")?;
    storing.commit().await?;
    let refused = second.await??.context("it started")?;
    assert_refused(&refused, USUAL, CHANGED, "own");
    Ok(())
}
