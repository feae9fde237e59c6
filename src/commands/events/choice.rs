//! Which events are meant: the arguments that all commands share, and what they come to.

use std::time::Duration;

use jiff::civil::Date;
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};

use super::Exit;
use super::ledger::{Filter, Ledger};
use crate::config::{Config, OnMismatch};
use crate::identify::EventKey;
use crate::settings::{nearest, parse_duration};

/// All that an event's status may be.
pub(super) const STATUSES: [&str; 6] = ["open", "done", "rejected", "failed", "dead", "unidentified"];

/// Which events are meant. What is given has to hold, all of it.
#[derive(Debug, Clone, clap::Args)]
pub(super) struct Choice {
    /// Of this source.
    #[arg(long)]
    source: Option<String>,
    /// With this id; may be given several times.
    #[arg(long, value_name = "ID")]
    id: Vec<String>,
    /// Of this scope.
    #[arg(long)]
    scope: Option<String>,
    /// open, done, rejected, failed, dead or unidentified; may be given several times.
    #[arg(long)]
    status: Vec<String>,
    /// Of this type, as the provider calls it.
    #[arg(long = "type", value_name = "TYPE")]
    event_type: Option<String>,
    /// Received at this time or later: 2026-01-31T12:00:00Z, 2026-01-31 (UTC), or so long ago: 2h.
    #[arg(long, value_name = "TIME")]
    since: Option<String>,
    /// Received before this time, likewise.
    #[arg(long, value_name = "TIME")]
    until: Option<String>,
    /// That came again with another body.
    #[arg(long)]
    mismatched: bool,
    /// With a job of this target.
    #[arg(long, value_name = "NAME")]
    pub(super) target: Option<String>,
    /// That were replayed so often at most: 0 for those that never were.
    #[arg(long, value_name = "TIMES")]
    replays_max: Option<i32>,
}

impl Choice {
    /// Whether anything is chosen.
    pub(super) fn is_empty(&self) -> bool {
        let Self { source, id, scope, status, event_type, since, until, mismatched, target, replays_max } =
            self;
        [source, scope, event_type, since, until, target].iter().all(|given| given.is_none())
            && id.is_empty()
            && status.is_empty()
            && !mismatched
            && replays_max.is_none()
    }

    /// The ids, where some were given.
    pub(super) fn ids(&self) -> &[String] {
        &self.id
    }

    /// The queue of the target.
    pub(super) fn queue(&self) -> Option<String> {
        self.target.as_ref().map(|target| format!("target:{target}"))
    }

    /// What the database is asked for. `usual` are the statuses that are meant if neither a status nor an id is given.
    pub(super) async fn filter(
        &self,
        config: &Config,
        ledger: &Ledger<'_>,
        usual: &[&'static str],
    ) -> Result<Filter, Exit> {
        self.check(config, ledger).await?;
        let now = ledger.now().await?;
        let statuses = self.statuses()?;
        let statuses = if statuses.is_empty() && self.id.is_empty() { usual.to_vec() } else { statuses };
        let keys = self.keys(config);
        let since = time("--since", self.since.as_deref(), now)?;
        let until = time("--until", self.until.as_deref(), now)?;
        if let (Some(since), Some(until)) = (since, until)
            && since >= until
        {
            return Err(Exit::settings(format!("--since ({since}) is not before --until ({until})")));
        }
        Ok(Filter {
            source: self.source.clone(),
            scope: self.scope.clone(),
            ids: (keys.is_none() && !self.id.is_empty()).then(|| self.id.clone()),
            keys,
            statuses: (!statuses.is_empty()).then_some(statuses),
            event_type: self.event_type.clone(),
            since,
            until,
            now,
            mismatched: self.mismatched,
            queue: self.queue(),
            replays_max: self.replays_max,
        })
    }

    fn statuses(&self) -> Result<Vec<&'static str>, Exit> {
        let known =
            |given: &String| STATUSES.into_iter().find(|known| known == given).ok_or_else(|| unknown(given));
        self.status.iter().map(known).collect()
    }

    /// The keys of the ids, so that nobody has to look through the whole ledger for them. `None` where they do not follow
    /// from the ids alone.
    fn keys(&self, config: &Config) -> Option<Vec<Vec<u8>>> {
        let source = self.source.as_deref().filter(|_| !self.id.is_empty())?;
        let settings = config.sources.get(source)?;
        if settings.on_mismatch == OnMismatch::Accept {
            return None;
        }
        let scope = self.scope.as_deref().unwrap_or(&settings.scope);
        Some(self.id.iter().map(|id| EventKey::of(source, scope, id).0.to_vec()).collect())
    }

    /// Whether there is such a source, and such a target.
    async fn check(&self, config: &Config, ledger: &Ledger<'_>) -> Result<(), Exit> {
        if let Some(source) = &self.source {
            let known: Vec<&str> = config.sources.keys().map(String::as_str).collect();
            if !known.contains(&source.as_str()) && !ledger.knows_source(source).await? {
                return Err(nobody("source", source, &known));
            }
        }
        if let (Some(target), Some(queue)) = (&self.target, self.queue()) {
            let known: Vec<&str> = config.targets.keys().map(String::as_str).collect();
            if !known.contains(&target.as_str()) && !ledger.knows_queue(&queue).await? {
                return Err(nobody("target", target, &known));
            }
        }
        Ok(())
    }
}

fn unknown(status: &str) -> Exit {
    let hint = nearest(status, STATUSES.into_iter()).map(|near| format!("did you mean {near}? "));
    let all = STATUSES.join(", ");
    Exit::settings(format!("--status {status:?} is none: {}there are {all}", hint.unwrap_or_default()))
}

fn nobody(kind: &str, name: &str, known: &[&str]) -> Exit {
    let all = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
    let hint = nearest(name, known.iter().copied()).map(|near| format!("did you mean {near:?}? "));
    Exit::settings(format!(
        "no {kind} {name:?} in the settings, and no event has it; {}the settings have: {all}",
        hint.unwrap_or_default()
    ))
}

/// The earliest and the latest time that may be asked for: what both sides can tell.
const YEARS: std::ops::RangeInclusive<i16> = 1970..=9999;

/// Reads a time, or how long ago by the database's clock.
fn time(name: &str, text: Option<&str>, now: Timestamp) -> Result<Option<Timestamp>, Exit> {
    let Some(text) = text else { return Ok(None) };
    let read = read_time(text, now).filter(|time| YEARS.contains(&time.to_zoned(TimeZone::UTC).year()));
    let wrong = || {
        Exit::settings(format!(
            "{name} {text:?} is no time: give 2026-01-31T12:00:00Z, 2026-01-31 (midnight, UTC), or so long ago: 90s, 2h, 3d"
        ))
    };
    read.map(Some).ok_or_else(wrong)
}

fn read_time(text: &str, now: Timestamp) -> Option<Timestamp> {
    if let Some(ago) = parse_duration(text) {
        return before(now, ago);
    }
    if let Ok(time) = text.parse::<Timestamp>() {
        return Some(time);
    }
    // A date alone: what has more to it has to say its offset.
    let date: Date = (text.len() == 10).then(|| text.parse().ok()).flatten()?;
    Some(date.to_zoned(TimeZone::UTC).ok()?.timestamp())
}

fn before(now: Timestamp, ago: Duration) -> Option<Timestamp> {
    now.checked_sub(SignedDuration::try_from(ago).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_absolute_or_so_long_ago() {
        let now: Timestamp = "2026-03-01T12:00:00Z".parse().unwrap();
        let read = |text: &str| time("--since", Some(text), now).map(|time| time.unwrap().to_string());
        for (text, wanted) in [
            ("2h", "2026-03-01T10:00:00Z"),
            ("1d", "2026-02-28T12:00:00Z"),
            ("2026-02-28", "2026-02-28T00:00:00Z"),
            ("2026-02-28T10:00:00Z", "2026-02-28T10:00:00Z"),
            ("2026-02-28T10:00:00.5+02:00", "2026-02-28T08:00:00.5Z"),
        ] {
            assert_eq!(read(text).unwrap(), wanted, "{text}");
        }
        for text in [
            "",
            "2",
            "yesterday",
            "2026-02-30",
            "2026-02-28T10:00:00",
            "-1h",
            "99999d",
            "0001-01-01",
            "2h ago",
        ] {
            let Exit { code, message } = read(text).unwrap_err();
            assert_eq!(code, 64, "{text}");
            assert!(message.starts_with(&format!("--since {text:?} is no time")), "{message}");
        }
    }
}
