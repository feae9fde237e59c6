//! What there is to do for an event that is replayed, by the settings of today.

use super::super::ledger::{Event, Work};
use super::super::tally::Outcome;
use crate::config::{Config, Effect, JobRule, Source};

/// What the settings say of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Known {
    /// There is something to do.
    Work,
    /// There is nothing.
    Nothing,
    /// Nobody knows.
    NoSource,
}

impl Known {
    /// What came of it, by the word of the database: it calls an event settled for which it was given nothing.
    pub(super) fn over(self, word: &str) -> Outcome {
        match (self, Outcome::of(word)) {
            (Self::Nothing, Outcome::Settled) => Outcome::Nothing,
            (Self::NoSource, Outcome::Settled) => Outcome::NoSource,
            (_, outcome) => outcome,
        }
    }
}

/// Whether each of the events has an effect.
pub(super) fn acts(config: &Config, events: &[Event]) -> Vec<bool> {
    let acts =
        |event: &Event| config.sources.get(&event.source).is_some_and(|source| source.effect != Effect::None);
    events.iter().map(acts).collect()
}

/// What there is to do for each of the events, in all or for one target.
pub(super) fn of(config: &Config, events: &[Event], target: Option<&str>) -> (Work, Vec<Known>) {
    let mut work = Work { acts: acts(config, events), ..Work::default() };
    let mut known = Vec::with_capacity(events.len());
    // Places in SQL begin at 1.
    for (at, event) in (1..).zip(events) {
        let source = config.sources.get(&event.source);
        let jobs = source.map(|source| jobs(source, event.kind.as_deref(), target));
        known.push(match &jobs {
            None => Known::NoSource,
            Some(jobs) if jobs.is_empty() => Known::Nothing,
            Some(_) => Known::Work,
        });
        for JobRule { queue, attempts_max } in jobs.unwrap_or_default() {
            work.at.push(at);
            work.queues.push(queue);
            work.attempts.push(i32::try_from(attempts_max).unwrap_or(i32::MAX));
        }
    }
    (work, known)
}

/// The targets of an event whose effect runs here follow once that is done.
fn jobs(source: &Source, event_type: Option<&str>, target: Option<&str>) -> Vec<JobRule> {
    let usual = source.jobs(event_type);
    match (&source.effect, target) {
        (_, Some(target)) => {
            let queue = format!("target:{target}");
            usual.filter(|job| job.queue == queue).collect()
        }
        (Effect::Function { .. } | Effect::Rust { .. }, None) => {
            let queue = format!("effect:{}", source.name);
            vec![JobRule { queue, attempts_max: source.attempts_max }]
        }
        (Effect::None | Effect::Pull, None) => usual.collect(),
    }
}
