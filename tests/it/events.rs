//! `hapax events`: what is told of events, and the way back.

mod change;
mod gateway;
mod made;
mod show;
mod storm;

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::harness::scene::Scene;
use made::{Made, ago, hapax, make, settings};

/// The ids of a list, in its order.
async fn listed(settings: &str, arguments: &[&str]) -> Result<Vec<String>> {
    let said = hapax(settings, &[&["list", "--json"], arguments].concat()).await?;
    assert_eq!(said.code, Some(0), "{arguments:?}: {}", said.err);
    let id = |line: &str| -> Result<String> {
        let event: Value = serde_json::from_str(line)?;
        Ok(event.get("event_id").and_then(Value::as_str).context("an id")?.to_owned())
    };
    said.out.lines().map(id).collect()
}

#[tokio::test]
async fn what_is_chosen_is_listed_newest_first() -> Result<()> {
    let scene = Scene::new().await?;
    let settings = settings(&scene);
    let database = scene.database().await?;
    make(
        &database,
        &[
            Made { scope: "eu", ..ago(1, "plain", "a", "done") },
            Made { kind: Some("invoice.paid"), jobs: &["target:crm dead"], ..ago(2, "plain", "b", "dead") },
            Made { jobs: &["target:orders done"], replay: 1, ..ago(3, "plain", "c", "done") },
            Made { jobs: &["effect:stripe failed"], ..ago(4, "stripe", "d", "failed") },
            Made { jobs: &["pull:pulled due"], ..ago(100, "pulled", "e", "open") },
            ago(50 * 24, "stripe", "a", "rejected"),
            ago(900 * 24, "gone", "f", "unidentified"),
        ],
    )
    .await?;
    let other = "insert into hapax.mismatch (key, digest) select key, sha256('x') from hapax.ledger where event_id = 'c'";
    database.execute(other, &[]).await?;

    for (arguments, wanted) in [
        ("", "a b c d e a f"),
        ("--limit 3", "a b c"),
        ("--all", "a b c d e a f"),
        ("--source stripe", "d a"),
        ("--source gone", "f"),
        ("--id a", "a a"),
        ("--id a --id f", "a a f"),
        ("--id a --source stripe", "a"),
        ("--id a --source plain", ""),
        ("--id a --source plain --scope eu", "a"),
        ("--scope eu", "a"),
        ("--status done", "a c"),
        ("--status dead --status failed", "b d"),
        ("--status dead --source stripe", ""),
        ("--type invoice.paid", "b"),
        ("--since 210m", "a b c"),
        ("--until 210m", "d e a f"),
        ("--since 99d --until 3d", "e a"),
        ("--since 2000-01-01 --until 2001-01-01T00:00:00Z", ""),
        ("--mismatched", "c"),
        ("--target crm", "b"),
        ("--target orders", "c"),
        ("--replays-max 0 --source plain", "a b"),
    ] {
        let arguments: Vec<&str> = arguments.split_whitespace().collect();
        assert_eq!(listed(&settings, &arguments).await?.join(" "), wanted, "{arguments:?}");
    }
    let said = hapax(&settings, &["list", "--mismatched"]).await?;
    assert_eq!(said.code, Some(0));
    let [head, line] = said.out.lines().collect::<Vec<_>>()[..] else { panic!("{}", said.out) };
    assert!(head.starts_with("RECEIVED ") && head.ends_with(" ID"), "{head}");
    assert!(line.contains(" done ") && line.contains(" 2  2") && line.ends_with(" c"), "{line}");
    Ok(())
}

#[tokio::test]
async fn pages_of_a_long_list_leave_out_nothing() -> Result<()> {
    let scene = Scene::new().await?;
    let settings = settings(&scene);
    let database = scene.database().await?;
    // More than two pages of one moment, a page spread over minutes, and one that is old.
    database
        .batch_execute(
            "insert into hapax.ledger (received_at, settled_at, token, status, key, digest, source, scope, event_id)
             select now() - case when i <= 2500 then interval '1 minute' when i <= 3700 then i * interval '1 second'
                                 else interval '600 days' end,
                    now(), 0, 'done', substr(sha256(int4send(i)), 1, 16), sha256(''), 'plain', '-', 'evt_' || i
             from generate_series(1, 3701) i",
        )
        .await?;
    let wanted =
        database.query("select event_id from hapax.ledger order by received_at desc, key desc", &[]).await?;
    let wanted: Vec<String> = wanted.iter().map(|row| row.get(0)).collect();
    assert!(listed(&settings, &["--all"]).await? == wanted);
    assert!(listed(&settings, &["--limit", "2600"]).await? == wanted[..2600]);
    Ok(())
}

#[tokio::test]
async fn what_a_terminal_would_act_on_is_escaped_and_capped() -> Result<()> {
    let scene = Scene::new().await?;
    let settings = settings(&scene);
    let hostile = format!("\u{1b}[2J\r\n\u{202e}{}", "x".repeat(505));
    assert_eq!(hostile.len(), 514);
    let hostile = &hostile[..512];
    make(&scene.database().await?, &[ago(1, "plain", hostile, "done")]).await?;
    let said = hapax(&settings, &["list"]).await?;
    assert!(!said.out.replace('\n', "").contains(char::is_control), "{:?}", said.out);
    assert!(
        said.out.contains(r"  \u{1b}[2J\r\n\u{202e}xxxx") && said.out.trim_end().ends_with("x…"),
        "{}",
        said.out
    );
    assert!(said.out.lines().all(|line| line.chars().count() < 250));
    assert_eq!(listed(&settings, &["--id", hostile]).await?.len(), 1);

    let said = hapax(&settings, &["show", "--source", "plain", "--id", hostile]).await?;
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert!(!said.out.replace('\n', "").contains(char::is_control), "{:?}", said.out);
    let said = hapax(&settings, &["show", "--source", "plain", "--id", hostile, "--json"]).await?;
    assert_eq!(serde_json::from_str::<Value>(&said.out)?["event_id"], hostile);
    let said = hapax(&settings, &["replay", "--source", "plain", "--id", hostile, "--json"]).await?;
    assert_eq!(said.json()?["done"], 1, "{}", said.out);
    let said = hapax(&settings, &["replay", "--source", "plain", "--id", hostile]).await?;
    assert!(!said.err.replace('\n', "").contains(char::is_control), "{:?}", said.err);
    Ok(())
}

#[tokio::test]
async fn what_cannot_be_meant_is_refused() -> Result<()> {
    let scene = Scene::new().await?;
    let settings = settings(&scene);
    for (arguments, wanted) in [
        (
            "list --source strip",
            "no source \"strip\" in the settings, and no event has it; did you mean \"stripe\"?",
        ),
        (
            "list --target order",
            "no target \"order\" in the settings, and no event has it; did you mean \"orders\"?",
        ),
        ("list --status deed", "--status \"deed\" is none: did you mean dead?"),
        ("list --since yesterday", "--since \"yesterday\" is no time: give 2026-01-31T12:00:00Z"),
        ("list --until 2026-02-30", "--until \"2026-02-30\" is no time"),
        ("list --since 1h --until 2h", "is not before --until"),
        ("retry", "nothing says which events to retry: give --source"),
        ("replay --limit 5", "nothing says which events to replay"),
        ("discard --dry-run", "nothing says which events to discard"),
        ("replay --source nobody", "no source \"nobody\""),
    ] {
        let arguments: Vec<&str> = arguments.split_whitespace().collect();
        let said = hapax(&settings, &arguments).await?;
        assert_eq!((said.code, said.out.as_str()), (Some(64), ""), "{arguments:?}: {}", said.err);
        assert!(said.err.contains(wanted), "{arguments:?}: {}", said.err);
        let said = hapax(&settings, &[&arguments[..], &["--json"]].concat()).await?;
        assert_eq!(said.code, Some(64));
        assert_eq!(said.json()?["error"]["code"], 64);
        assert!(said.json()?["error"]["message"].as_str().is_some_and(|message| message.contains(wanted)));
    }
    let said = hapax(&settings, &["show", "--source", "plain", "--id", "nobody", "--json"]).await?;
    assert_eq!((said.code, &said.json()?["error"]["code"]), (Some(1), &1.into()));
    let away = settings.replace(&scene.stores.postgres_url, "postgres://hapax@127.0.0.1:1/none");
    let said = hapax(&away, &["retry", "--all", "--json"]).await?;
    assert_eq!((said.code, &said.json()?["error"]["code"]), (Some(69), &69.into()));
    Ok(())
}
