//! `hapax events list`.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::Exit;
use super::choice::Choice;
use super::ledger::{Event, Ledger};
use super::text::{CELL_MAX, second, shown, write};
use super::walk::Walk;
use crate::config::Config;

/// Events that are asked for at once.
const PAGE: u64 = 1_000;
/// Characters of a source, a scope and a type in a table.
const SHORT: usize = 24;

/// What to list.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    choice: Choice,
    /// So many at most.
    #[arg(long, value_name = "COUNT", default_value_t = 100, conflicts_with = "all")]
    limit: u64,
    /// However many there are.
    #[arg(long)]
    all: bool,
    /// One JSON object on each line.
    #[arg(long)]
    pub(super) json: bool,
}

pub(super) async fn run(config: &Config, ledger: &Ledger<'_>, arguments: &Arguments) -> Result<(), Exit> {
    let Arguments { choice, limit, all, json } = arguments;
    let filter = choice.filter(config, ledger, &[]).await?;
    let mut left = if *all { u64::MAX } else { *limit };
    let mut walk = Walk::newest_first(ledger, &filter);
    if !json && !write(head(filter.mismatched).as_bytes())? {
        return Ok(());
    }
    while left > 0 {
        let page = walk.next(i64::try_from(left.min(PAGE)).unwrap_or(i64::MAX)).await?;
        let lines = page.iter().map(|event| {
            if *json { object(event).to_string() + "\n" } else { line(event, filter.mismatched) }
        });
        if page.is_empty() || !write(lines.collect::<String>().as_bytes())? {
            break;
        }
        left = left.saturating_sub(u64::try_from(page.len()).unwrap_or(left));
    }
    Ok(())
}

fn head(mismatched: bool) -> String {
    let more = if mismatched { "  BODIES  LAST OTHER BODY    " } else { "" };
    format!(
        "{:<20}  {:<12}  {:>8}  {:>6}{more}  {:<16}  {:<8}  {:<24}  ID\n",
        "RECEIVED", "STATUS", "ATTEMPTS", "REPLAY", "SOURCE", "SCOPE", "TYPE"
    )
}

fn line(event: &Event, mismatched: bool) -> String {
    let Event { status, attempts, replay, .. } = event;
    let mut line = format!("{:<20}  {status:<12}  {attempts:>8}  {replay:>6}", second(event.received_at));
    if mismatched {
        let at = event.mismatch_at.map(second).unwrap_or_default();
        // Writing to a String cannot fail.
        write!(line, "  {:>6}  {at:<20}", event.mismatches + 1).unwrap_or_default();
    }
    let (source, scope) = (shown(&event.source, SHORT), shown(&event.scope, SHORT));
    let event_type = shown(event.kind.as_deref().unwrap_or("-"), SHORT);
    let id = shown(&event.id, CELL_MAX);
    writeln!(line, "  {source:<16}  {scope:<8}  {event_type:<24}  {id}").unwrap_or_default();
    line
}

/// All columns of an event.
pub(super) fn object(event: &Event) -> Value {
    json!({
        "source": event.source,
        "scope": event.scope,
        "event_id": event.id,
        "event_type": event.kind,
        "status": event.status,
        "received_at": event.received_at.to_string(),
        "settled_at": event.settled_at.map(|time| time.to_string()),
        "attempts": event.attempts,
        "replay": event.replay,
        "key": hex::encode(event.key.0),
        "digest": hex::encode(&event.digest),
        "mismatches": event.mismatches,
        "mismatch_at": event.mismatch_at.map(|time| time.to_string()),
    })
}
