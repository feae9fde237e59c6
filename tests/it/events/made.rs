//! Events made by SQL, in states that take a gateway and its workers long to come to; and the command.

use std::process::Stdio;

use anyhow::{Context as _, Result};
use hapax::identify::EventKey;
use serde_json::Value;
use tokio::process::Command;
use tokio_postgres::Client;

use crate::harness::scene::Scene;
use crate::harness::stores;

/// The scene's settings with targets `orders` (all of the events of `plain` and `stripe`) and `crm` (invoices of `plain`), and
/// sources `pulled` and `idle`, which has nothing to do.
pub(super) fn settings(scene: &Scene) -> String {
    let target = |name: &str| {
        format!(
            "target.{name} = {{ kind = \"http\", url = \"http://127.0.0.1:1/{name}\", allow_private = true }}"
        )
    };
    let source = |name: &str, effect: &str| {
        format!(
            "source.{name} = {{ provider = \"stripe\", secrets = [\"whsec_a secret for tests only\"], effect = \"{effect}\" }}"
        )
    };
    scene.settings(
        &[
            &target("orders"),
            &target("crm"),
            &source("pulled", "pull"),
            &source("idle", "none"),
            "source.plain.targets = [\"orders\", { name = \"crm\", types = [\"invoice.*\"] }]",
            "source.stripe.targets = [\"orders\"]",
        ],
        "",
    )
}

/// An event as it is to stand in the database.
#[derive(Debug, Clone, Copy)]
pub(super) struct Made<'a> {
    pub(super) source: &'a str,
    pub(super) scope: &'a str,
    pub(super) id: &'a str,
    pub(super) status: &'a str,
    pub(super) kind: Option<&'a str>,
    pub(super) hours_ago: i32,
    pub(super) replay: i32,
    /// A queue and one of: due | waits (for an hour) | failed (and waits) | held (for an hour) | late (its lease is over) | done |
    /// dead | discarded
    pub(super) jobs: &'a [&'a str],
    pub(super) body: &'a str,
    pub(super) has_body: bool,
}

/// An event that was received so many hours ago, with nothing to do.
pub(super) fn ago<'a>(hours_ago: i32, source: &'a str, id: &'a str, status: &'a str) -> Made<'a> {
    Made {
        source,
        scope: "-",
        id,
        status,
        kind: None,
        hours_ago,
        replay: 0,
        jobs: &[],
        body: "{}",
        has_body: true,
    }
}

pub(super) async fn make(database: &Client, events: &[Made<'_>]) -> Result<()> {
    for made in events {
        let key: Vec<u8> = EventKey::of(made.source, made.scope, made.id).0.to_vec();
        database
            .execute(
                "insert into hapax.ledger (received_at, settled_at, token, status, key, digest, source, scope, event_id,
                     event_type, replay)
                 select now() - $7 * interval '1 hour',
                     case when $4 not in ('open', 'failed') then now() end, 0,
                     $4::text::hapax.status, $1, sha256($8::text::bytea), $2, $3, $5, $6, $9",
                &[
                    &key, &made.source, &made.scope, &made.status, &made.id, &made.kind, &f64::from(made.hours_ago),
                    &made.body, &made.replay,
                ],
            )
            .await?;
        if made.has_body {
            let body = "insert into hapax.body (received_at, key, body, headers)
                        select received_at, key, $2::text::bytea, '{\"x-kept\": \"yes\"}' from hapax.ledger where key = $1";
            database.execute(body, &[&key, &made.body]).await?;
        }
        for job in made.jobs {
            let (queue, state) = job.split_once(' ').context("a queue and a state")?;
            database.execute(JOB, &[&key, &queue, &state, &made.replay]).await?;
        }
    }
    Ok(())
}

const JOB: &str = "
    insert into hapax.job (due_at, received_at, settled_at, attempts, attempts_max, replay, state, token, key, queue, error)
    select now() + case when $3 in ('waits', 'failed', 'held') then interval '1 hour' when $3 = 'late' then interval '-1 minute'
                        else interval '0' end,
        received_at, case when $3 in ('done', 'dead', 'discarded') then now() end,
        case when $3 in ('due', 'waits') then 0 when $3 = 'dead' then 9 else 3 end, 9, $4,
        (case when $3 in ('done', 'dead', 'discarded') then $3 else 'pending' end)::hapax.job_state,
        case when $3 in ('held', 'late') then gen_random_uuid() end, key, $2,
        case when $3 in ('failed', 'dead') then 'P0001 no' end
    from hapax.ledger where key = $1";

/// What stands in the database: status and replay of an event, and its jobs as `queue state attempts replay`.
pub(super) async fn stands(database: &Client, id: &str) -> Result<String> {
    let query = "
        select concat_ws(', ', l.status || ' ' || l.replay, (
            select string_agg(concat_ws(' ', j.queue, case
                when j.state <> 'pending' then j.state::text when j.token is not null then 'held'
                when j.due_at <= clock_timestamp() then 'due' else 'waits' end, j.attempts, j.replay), ', ' order by j.queue)
            from hapax.job j where j.key = l.key))
        from hapax.ledger l where l.event_id = $1";
    Ok(database.query_one(query, &[&id]).await.with_context(|| id.to_owned())?.get(0))
}

/// All rows of events, to see whether anything changed.
pub(super) async fn everything(database: &Client) -> Result<Vec<String>> {
    let query = "select l::text || l.xmin::text || l.xmax::text from hapax.ledger l
                 union all select j::text || j.xmin::text || j.xmax::text from hapax.job j
                 union all select k.key::text from hapax.body_kept k order by 1";
    Ok(database.query(query, &[]).await?.iter().map(|row| row.get(0)).collect())
}

/// What a command came to.
pub(super) struct Said {
    pub(super) code: Option<i32>,
    pub(super) out: String,
    pub(super) err: String,
}

impl Said {
    /// The one object that it told.
    pub(super) fn json(&self) -> Result<Value> {
        serde_json::from_str(&self.out).with_context(|| format!("{}\n{}", self.out, self.err))
    }
}

/// Runs `hapax events` on these settings.
pub(super) async fn hapax(settings: &str, arguments: &[&str]) -> Result<Said> {
    let (_file, mut command) = command(settings)?;
    let output = command.args(arguments).output().await?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok(Said { code: output.status.code(), out: text(&output.stdout), err: text(&output.stderr) })
}

/// `hapax events --config FILE`, and the file, which goes when it is dropped.
pub(super) fn command(settings: &str) -> Result<(tempfile::TempPath, Command)> {
    let file = tempfile::Builder::new().suffix(".toml").tempfile_in(stores::folder().path())?;
    std::fs::write(file.path(), settings)?;
    let path = file.into_temp_path();
    let mut command = Command::new(env!("CARGO_BIN_EXE_hapax"));
    command.args(["events", "--config"]).arg(&path).stdin(Stdio::null()).kill_on_drop(true);
    Ok((path, command))
}
