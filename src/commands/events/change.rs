//! `hapax events retry`, `replay` and `discard`: the events that were chosen, the oldest first, in batches that are
//! committed each by itself.
//!
//! A command that ends half-way leaves whole batches behind. No event is taken up twice by one command, since it goes
//! forward in the time of receipt. What is settled again by the time that a second command is given would be replayed by
//! it once more; `--replays-max` keeps it from that.

mod report;
mod work;

use std::collections::BTreeSet;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use self::report::Report;
use super::choice::Choice;
use super::ledger::{Event, Ledger, Writing};
use super::tally::{Outcome, Tally};
use super::walk::Walk;
use super::{Exit, Told};
use crate::claim::Desk;
use crate::config::Config;
use crate::db::{self, Trouble};
use crate::identify::EventKey;

/// Events in one transaction.
const BATCH: u64 = 500;
/// How often what somebody else is changing is asked for again.
const BUSY_ROUNDS: u32 = 5;
/// Pause before it is, times the round.
const BUSY_PAUSE: Duration = Duration::from_millis(50);
/// How often a batch is written again that lost a deadlock or the like.
const TRIES: u32 = 3;

/// Which events, and how.
#[derive(Debug, clap::Args)]
pub(super) struct How {
    #[command(flatten)]
    choice: Choice,
    /// So many at most, the oldest of those that are chosen.
    #[arg(long, value_name = "COUNT")]
    limit: Option<u64>,
    /// Every one, where nothing else says which.
    #[arg(long)]
    all: bool,
    /// Change nothing, and say what would be done.
    #[arg(long)]
    dry_run: bool,
    /// The result as one JSON object.
    #[arg(long)]
    pub(super) json: bool,
}

/// `hapax events retry`
#[derive(Debug, clap::Args)]
pub(super) struct Retry {
    #[command(flatten)]
    pub(super) how: How,
}

/// `hapax events replay`
#[derive(Debug, clap::Args)]
pub(super) struct Replay {
    #[command(flatten)]
    pub(super) how: How,
}

/// `hapax events discard`
#[derive(Debug, clap::Args)]
pub(super) struct Discard {
    #[command(flatten)]
    pub(super) how: How,
    /// Also what a worker has right now: what that brings does not count any more.
    #[arg(long)]
    pub(super) force: bool,
}

/// What is to be done with the events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verb {
    Retry,
    Replay,
    Discard { force: bool },
}

impl Verb {
    const fn name(self) -> &'static str {
        match self {
            Self::Retry => "retry",
            Self::Replay => "replay",
            Self::Discard { .. } => "discard",
        }
    }

    const fn past(self) -> &'static str {
        match self {
            Self::Retry => "given their turn",
            Self::Replay => "replayed",
            Self::Discard { .. } => "discarded",
        }
    }

    /// Statuses that are meant unless something else is said: those that it makes sense for. What is open is given up only
    /// if that is asked for.
    const fn usual(self) -> &'static [&'static str] {
        match self {
            Self::Retry => &["open", "failed", "dead"],
            Self::Replay => &["done", "rejected", "dead"],
            Self::Discard { .. } => &["failed", "dead"],
        }
    }
}

pub(super) async fn run(config: &Config, ledger: &Ledger<'_>, verb: Verb, how: &How) -> Result<Told, Exit> {
    if how.choice.is_empty() && !how.all {
        return Err(Exit::settings(format!(
            "nothing says which events to {}: give --source, --id, --status, --since or the like, or --all",
            verb.name()
        )));
    }
    let mut filter = how.choice.filter(config, ledger, verb.usual()).await?;
    // What comes in from now on is not meant.
    filter.until = Some(filter.until.map_or(filter.now, |until| until.min(filter.now)));
    let (chosen, oldest) = ledger.count(&filter).await?;
    let chosen = chosen.min(how.limit.unwrap_or(u64::MAX));
    let queue = how.choice.queue();
    let (tiers, tally, found) = (Tiers::Unasked, Tally::default(), BTreeSet::new());
    let mut change = Change { config, ledger, verb, how, queue, tiers, tally, found };
    let mut stopped = None;
    if let Some(oldest) = oldest {
        let bar = bar(chosen, verb);
        stopped = change.all(Walk::oldest_first(ledger, &filter, oldest), chosen, &bar).await.err();
        bar.finish_and_clear();
    }
    if stopped.is_none() && how.limit.is_none() {
        change.note_unknown();
    }
    let Change { tiers, tally, .. } = change;
    Report { config, verb, how, chosen, tally, stopped, redis: tiers.trouble() }.tell()
}

/// On standard error, if that is a terminal.
fn bar(chosen: u64, verb: Verb) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg} {bar:40} {pos}/{len} {per_sec} {eta}");
    let bar = ProgressBar::new(chosen).with_message(verb.name());
    match style {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

/// The fast tier, as far as there is anything to forget.
enum Tiers {
    Unasked,
    There(Desk),
    /// Not used by the settings.
    None,
    Away(String),
}

impl Tiers {
    fn trouble(self) -> Option<String> {
        match self {
            Self::Away(cause) => Some(cause),
            Self::Unasked | Self::There(_) | Self::None => None,
        }
    }

    /// Has the done markers of events forgotten; not again once that failed.
    async fn forget(&mut self, config: &Config, keys: &[EventKey]) {
        if matches!(self, Self::Unasked) {
            *self = match Desk::open(&config.fast_tier).await {
                Ok(Some(desk)) => Self::There(desk),
                Ok(None) => Self::None,
                Err(cause) => Self::Away(cause),
            };
        }
        if let Self::There(desk) = self
            && let Err(cause) = desk.forget(keys).await
        {
            *self = Self::Away(cause);
        }
    }
}

struct Change<'a> {
    config: &'a Config,
    ledger: &'a Ledger<'a>,
    verb: Verb,
    how: &'a How,
    /// That of the target, if one was given: its jobs alone are meant.
    queue: Option<String>,
    tiers: Tiers,
    tally: Tally,
    /// The ids that were met, if some were asked for.
    found: BTreeSet<String>,
}

impl Change<'_> {
    async fn all(&mut self, mut walk: Walk<'_>, chosen: u64, bar: &ProgressBar) -> Result<(), Exit> {
        while self.tally.all() < chosen {
            let wanted = BATCH.min(chosen - self.tally.all());
            let events = walk.next(i64::try_from(wanted).unwrap_or(i64::MAX)).await?;
            if events.is_empty() {
                break;
            }
            if !self.how.choice.ids().is_empty() {
                self.found.extend(events.iter().map(|event| event.id.clone()));
            }
            self.batch(events).await?;
            bar.set_position(self.tally.all());
        }
        Ok(())
    }

    /// Events that somebody else is changing are asked for again, and then left.
    async fn batch(&mut self, mut events: Vec<Event>) -> Result<(), Exit> {
        for round in 1..=BUSY_ROUNDS {
            let outcomes = self.write(&events).await?;
            let mut busy = Vec::new();
            for (event, outcome) in events.into_iter().zip(outcomes) {
                if outcome == Outcome::Busy && round < BUSY_ROUNDS {
                    busy.push(event);
                } else {
                    self.tally.add(outcome, &event);
                }
            }
            if busy.is_empty() {
                break;
            }
            events = busy;
            tokio::time::sleep(BUSY_PAUSE * round).await;
        }
        Ok(())
    }

    /// One transaction. The markers go before it, so that none outlives it if this process ends, and after it, since a
    /// duplicate may have written one meanwhile.
    async fn write(&mut self, events: &[Event]) -> Result<Vec<Outcome>, Exit> {
        let keys: Vec<EventKey> = events.iter().map(|event| event.key).collect();
        if !self.how.dry_run {
            self.tiers.forget(self.config, &keys).await;
        }
        let outcomes = self.call(events).await?;
        if !self.how.dry_run {
            let done = keys.into_iter().zip(&outcomes).filter(|(_, outcome)| **outcome == Outcome::Done);
            let done: Vec<EventKey> = done.map(|(key, _)| key).collect();
            self.tiers.forget(self.config, &done).await;
        }
        Ok(outcomes)
    }

    async fn call(&self, events: &[Event]) -> Result<Vec<Outcome>, Exit> {
        let mut tries = 1;
        loop {
            match self.call_once(events).await {
                Ok(outcomes) => return Ok(outcomes),
                Err(error) if Trouble::of(&error) == Trouble::Retry && tries < TRIES => tries += 1,
                Err(error) => return Err(Exit::unavailable(format!("Postgres: {}", db::describe(&error)))),
            }
        }
    }

    async fn call_once(&self, events: &[Event]) -> Result<Vec<Outcome>, tokio_postgres::Error> {
        let keys: Vec<Vec<u8>> = events.iter().map(|event| event.key.0.to_vec()).collect();
        let commit_mode = self.config.postgres.synchronous_commit.as_str();
        let writing = Writing { only_look: self.how.dry_run, commit_mode };
        let queue = self.queue.as_deref();
        let words = match self.verb {
            Verb::Retry => self.ledger.retry(&keys, queue, writing).await?,
            Verb::Discard { force } => {
                let acts = work::acts(self.config, events);
                self.ledger.discard(&keys, &acts, (queue, force), writing).await?
            }
            Verb::Replay => {
                let target = self.how.choice.target.as_deref();
                let (work, known) = work::of(self.config, events, target);
                let words = self.ledger.replay(&keys, &work, target.is_some(), writing).await?;
                return Ok(words.iter().zip(known).map(|(word, known)| known.over(word)).collect());
            }
        };
        Ok(words.iter().map(|word| Outcome::of(word)).collect())
    }

    /// Ids that were asked for and that no event has.
    fn note_unknown(&mut self) {
        let asked: BTreeSet<&String> = self.how.choice.ids().iter().collect();
        for id in asked.into_iter().filter(|id| !self.found.contains(*id)) {
            self.tally.add_unknown(id);
        }
    }
}
