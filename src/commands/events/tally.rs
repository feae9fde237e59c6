//! What came of the events that were chosen, counted and in words.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::ledger::Event;
use super::text::{CELL_MAX, shown};
use crate::config::Retention;
use crate::settings::show_duration;

/// Events that are named for each outcome.
const NAMED_MAX: usize = 10;

/// What came of an event: the words of the functions in Postgres, and what is decided before them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Outcome {
    /// As asked.
    Done,
    /// Its turn is now or has come already.
    Due,
    /// No such event, any more.
    Gone,
    /// An id that no event has.
    NotFound,
    /// Somebody else is changing it.
    Busy,
    /// A worker has it.
    Held,
    /// Its body is not kept.
    Bodiless,
    /// It is open or failed.
    Unfinished,
    /// Nothing is left to do.
    Settled,
    /// The settings say of nothing that would be to do.
    Nothing,
    /// Its source is not in the settings.
    NoSource,
    /// It has no id of its own.
    Unidentified,
    /// Its effect refused it.
    Refused,
    /// A word of a function that is newer than this program.
    Strange,
}

impl Outcome {
    /// Reads the word of a function.
    pub(super) fn of(word: &str) -> Self {
        match word {
            "done" => Self::Done,
            "due" => Self::Due,
            "gone" => Self::Gone,
            "busy" => Self::Busy,
            "held" => Self::Held,
            "bodiless" => Self::Bodiless,
            "unfinished" => Self::Unfinished,
            "settled" => Self::Settled,
            "unidentified" => Self::Unidentified,
            "refused" => Self::Refused,
            _ => Self::Strange,
        }
    }

    const fn word(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Due => "due",
            Self::Gone => "gone",
            Self::NotFound => "not_found",
            Self::Busy => "busy",
            Self::Held => "held",
            Self::Bodiless => "bodiless",
            Self::Unfinished => "unfinished",
            Self::Settled => "settled",
            Self::Nothing => "nothing_to_do",
            Self::NoSource => "no_source",
            Self::Unidentified => "unidentified",
            Self::Refused => "refused",
            Self::Strange => "strange",
        }
    }

    /// Whether what was asked for holds.
    const fn is_fine(self) -> bool {
        matches!(self, Self::Done | Self::Due)
    }

    fn words(self, retention: &Retention) -> String {
        let words = match self {
            Self::Done => "done",
            Self::Due => "have their turn already, or a worker has them",
            Self::Gone => "are gone: retention.ledger removed them",
            Self::NotFound => "are ids of no event that is chosen",
            Self::Busy => "are being changed by somebody else right now: run this again",
            Self::Held => "are with a worker right now: wait for its lease to end (discard: or --force)",
            Self::Bodiless => {
                let kept = show_duration(retention.body);
                return format!("have no body any more: retention.body ({kept}) removed it");
            }
            Self::Unfinished => "are not settled: `hapax events retry` gives them their turn now, or wait",
            Self::Settled => "have nothing left to do: `hapax events replay` does them again",
            Self::Nothing => {
                "have nothing to be done: the settings give their source no effect, and no target that takes their type"
            }
            Self::NoSource => "are of a source that the settings do not have, so nothing says what to do",
            Self::Unidentified => "have no id of their own: no effect could tell them from each other",
            Self::Refused => {
                "were rejected by their effect, and go to no target before it takes them: replay without --target"
            }
            Self::Strange => "were answered in a way that this version does not know",
        };
        words.to_owned()
    }
}

/// All that came of a command.
#[derive(Debug, Default)]
pub(super) struct Tally {
    counts: BTreeMap<Outcome, u64>,
    named: BTreeMap<Outcome, Vec<Named>>,
}

#[derive(Debug)]
struct Named {
    source: Option<String>,
    scope: Option<String>,
    id: String,
}

impl Tally {
    pub(super) fn add(&mut self, outcome: Outcome, event: &Event) {
        let Event { source, scope, id, .. } = event;
        self.note(outcome, || Named {
            source: Some(source.clone()),
            scope: Some(scope.clone()),
            id: id.clone(),
        });
    }

    /// An id that no event has.
    pub(super) fn add_unknown(&mut self, id: &str) {
        self.note(Outcome::NotFound, || Named { source: None, scope: None, id: id.to_owned() });
    }

    fn note(&mut self, outcome: Outcome, name: impl FnOnce() -> Named) {
        *self.counts.entry(outcome).or_default() += 1;
        let named = self.named.entry(outcome).or_default();
        if named.len() < NAMED_MAX {
            named.push(name());
        }
    }

    fn sum(&self, counts: impl Fn(Outcome) -> bool) -> u64 {
        self.counts.iter().filter(|(outcome, _)| counts(**outcome)).map(|(_, count)| count).sum()
    }

    pub(super) fn all(&self) -> u64 {
        self.sum(|_| true)
    }

    pub(super) fn done(&self) -> u64 {
        self.sum(|outcome| outcome == Outcome::Done)
    }

    /// Those of which what was asked for does not hold.
    pub(super) fn not_done(&self) -> u64 {
        self.sum(|outcome| !outcome.is_fine())
    }

    /// The first events that were done, by their ids.
    pub(super) fn first_done(&self) -> Vec<String> {
        self.names(Outcome::Done)
    }

    fn names(&self, outcome: Outcome) -> Vec<String> {
        let named = self.named.get(&outcome).map(Vec::as_slice).unwrap_or_default();
        named.iter().map(|Named { id, .. }| shown(id, CELL_MAX)).collect()
    }

    /// One line for each outcome but the one that was asked for.
    pub(super) fn reasons(&self, retention: &Retention) -> Vec<String> {
        let others = self.counts.iter().filter(|(outcome, _)| **outcome != Outcome::Done);
        let line = |(outcome, count): (&Outcome, &u64)| {
            let names = self.names(*outcome);
            let more = if *count > NAMED_MAX as u64 { ", …" } else { "" };
            format!("  {count} {} ({}{more})", outcome.words(retention), names.join(", "))
        };
        others.map(line).collect()
    }

    /// Counts and the first events of each outcome.
    pub(super) fn json(&self) -> (Value, Value) {
        let counts =
            self.counts.iter().map(|(outcome, count)| (outcome.word().to_owned(), json!(count))).collect();
        let named =
            |named: &Named| json!({ "source": named.source, "scope": named.scope, "event_id": named.id });
        let first = self.named.iter().map(|(outcome, events)| {
            (outcome.word().to_owned(), Value::Array(events.iter().map(named).collect()))
        });
        (Value::Object(counts), Value::Object(first.collect()))
    }
}
