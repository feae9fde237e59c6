//! What is told at the end.

use serde_json::{Value, json};

use super::super::{Exit, Told, tally::Tally};
use super::{How, Verb};
use crate::commands::{complain, say};
use crate::config::{Config, FastTierKind};
use crate::settings::show_duration;

/// What came of a command.
pub(super) struct Report<'a> {
    pub(super) config: &'a Config,
    pub(super) verb: Verb,
    pub(super) how: &'a How,
    pub(super) chosen: u64,
    pub(super) tally: Tally,
    /// Why it did not come to its end.
    pub(super) stopped: Option<Exit>,
    /// Why markers could not be deleted.
    pub(super) redis: Option<String>,
}

impl Report<'_> {
    pub(super) fn tell(self) -> Result<Told, Exit> {
        let exit = self.exit();
        if self.how.json {
            say(self.json(exit.as_ref()))?;
        } else {
            self.tell_people()?;
        }
        if let Some(warning) = self.warning() {
            complain(&format!("warning: {warning}"));
        }
        Ok(exit)
    }

    fn exit(&self) -> Told {
        let done = self.done();
        let Self { verb, tally, chosen, .. } = self;
        if let Some(Exit { code, message }) = &self.stopped {
            let message = format!(
                "{message}\nstopped with {} of {chosen} events {done}; of the last batch it may be unknown. Whole batches \
                 are kept: give the command again to go on",
                tally.done()
            );
            return Some(Exit { code: *code, message });
        }
        let not_done = tally.not_done();
        (not_done > 0).then(|| {
            let reasons = tally.reasons(&self.config.retention).join("\n");
            Exit::failed(format!("{not_done} of {} events not {}:\n{reasons}", tally.all(), verb.past()))
        })
    }

    fn done(&self) -> String {
        let would = if self.how.dry_run { "would be " } else { "" };
        format!("{would}{}", self.verb.past())
    }

    fn tell_people(&self) -> Result<(), Exit> {
        let Self { tally, config, .. } = self;
        say(format!("{} of {} events {}", tally.done(), tally.all(), self.done()))?;
        if self.how.dry_run && tally.done() > 0 {
            say(format!("  the first: {}", tally.first_done().join(", ")))?;
        }
        if tally.not_done() == 0 {
            tally.reasons(&config.retention).into_iter().try_for_each(say)?;
        }
        Ok(())
    }

    /// What may still answer for the events in the old way.
    fn warning(&self) -> Option<String> {
        let tier = &self.config.fast_tier;
        if self.how.dry_run || self.tally.done() == 0 {
            return None;
        }
        match (&tier.kind, &self.redis) {
            (FastTierKind::Redis(_), Some(cause)) => Some(format!(
                "Redis cannot be reached ({cause}): until their markers run out, at most fast_tier.ttl ({}), deliveries of \
                 these events may be answered as duplicates without asking Postgres. The command itself took effect",
                show_duration(tier.ttl)
            )),
            (FastTierKind::Memory, _) => Some(format!(
                "each gateway's memory may answer deliveries of these events as duplicates for fast_tier.ttl ({}) at most",
                show_duration(tier.memory_ttl)
            )),
            (FastTierKind::Redis(_), None) | (FastTierKind::Off, _) => None,
        }
    }

    fn json(&self, exit: Option<&Exit>) -> Value {
        let Self { tally, verb, how, chosen, redis, .. } = self;
        let (outcomes, first) = tally.json();
        json!({
            "verb": verb.name(),
            "dry_run": how.dry_run,
            "chosen": chosen,
            "done": tally.done(),
            "not_done": tally.not_done(),
            "outcomes": outcomes,
            "first": first,
            "redis_error": redis,
            "error": exit.map(|Exit { code, message }| json!({ "code": code, "message": message })),
        })
    }
}
