//! What the arguments and the settings come to, checked before anything is sent.

use std::time::Duration;

use super::mix::Mix;
use super::pace::Pace;
use super::recipe::Recipe;
use super::{Exit, Options};
use crate::commands::client::Target;
use crate::commands::no_provider;
use crate::commands::send::{address, source_and_key};
use crate::config::{Config, OnMismatch};
use crate::provider::Scheme;

/// How long a search for the knee may take: the time in a body must be good for so long.
const KNEE_TIME: Duration = Duration::from_secs(600);

/// One run.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) recipe: Recipe,
    pub(super) mix: Mix,
    pub(super) connections: u64,
    pub(super) timeout: Duration,
    /// The pauses before the attempts after the first, made shorter.
    pub(super) retries: Vec<Duration>,
    /// Another body under the same id is another event.
    pub(super) is_other_event: bool,
    /// Events stay open after their effect, until their targets have them.
    pub(super) has_targets: bool,
    /// The schedule's end is told.
    pub(super) tells_end: bool,
}

impl Plan {
    pub(super) fn of(options: &Options, config: &Config) -> Result<Self, Exit> {
        let mix = mix(options)?;
        let retries = retries(options)?;
        let (source, key) = source_and_key(config, &options.source)?;
        let url = match &options.to {
            Some(url) => url.clone(),
            None if config.server.listen.port() == 0 => {
                return Err(Exit::settings("server.listen has port 0: say where the gateway is, --to URL"));
            }
            None => address(config, &options.source),
        };
        if url.starts_with("https://") {
            return Err(Exit::settings(
                "--to: https is not offered: give the gateway's own address, http://host:port/path",
            ));
        }
        let target = Target::parse(&url).map_err(Exit::settings)?;
        let batch = batch(options, source.scheme.is_batch(), source.batch_items_max)?;
        let recipe = Recipe::new(source, key, target, (batch, options.body));
        let lasts = options.warm_up + if options.find_knee { KNEE_TIME } else { options.duration };
        recipe.try_out(lasts, options.mismatch > 0, !options.no_proof)?;
        Ok(Self {
            recipe,
            mix,
            connections: u64::from(options.connections),
            timeout: options.timeout,
            retries,
            is_other_event: source.on_mismatch == OnMismatch::Accept,
            has_targets: !source.targets.is_empty(),
            tells_end: !options.find_knee,
        })
    }
}

/// How the rate goes, unless a knee is looked for.
pub(super) fn pace(options: &Options) -> Pace {
    let (warm_up, duration) = (options.warm_up, options.duration);
    match options.ramp {
        Some((from, to)) => Pace { from: from.into(), to: to.into(), warm_up, duration },
        None => Pace::constant(options.rate.into(), warm_up, duration),
    }
}

fn mix(options: &Options) -> Result<Mix, Exit> {
    let Options { duplicates, parallel, hot, mismatch, disconnect, drop_answers, .. } = *options;
    let comes_again = duplicates > 1 || parallel > 1 || hot;
    if mismatch > 0 && !comes_again {
        return Err(Exit::settings(
            "--mismatch needs events that come again: add --duplicates, --parallel or --hot",
        ));
    }
    if options.duration.is_zero() {
        return Err(Exit::settings("--duration is zero: nothing would be sent"));
    }
    Ok(Mix {
        seed: rand::random(),
        copies: duplicates.into(),
        parallel: parallel.into(),
        hot,
        mismatch,
        disconnect,
        drop_answers,
    })
}

fn batch(options: &Options, is_batch: bool, most: usize) -> Result<u64, Exit> {
    let Some(batch) = options.batch else { return Ok(1) };
    if !is_batch {
        let message = format!("--batch: a request of source {:?} brings one event", options.source);
        return Err(Exit::settings(message));
    }
    if usize::try_from(batch).is_ok_and(|batch| batch > most) {
        let message = format!("--batch {batch}: source {:?} takes {most} (batch_items_max)", options.source);
        return Err(Exit::settings(message));
    }
    Ok(batch.into())
}

fn retries(options: &Options) -> Result<Vec<Duration>, Exit> {
    let Some(name) = &options.retries_of else { return Ok(Vec::new()) };
    let scheme = Scheme::preset(name).ok_or_else(|| no_provider(name))?;
    let schedule = &scheme.facts.retry_schedule;
    if schedule.is_empty() {
        let has =
            |name: &&&str| Scheme::preset(name).is_some_and(|scheme| !scheme.facts.retry_schedule.is_empty());
        let known: Vec<&str> = Scheme::preset_names().iter().filter(has).copied().collect();
        return Err(Exit::settings(format!(
            "--retries-of {name}: when this provider sends again is not known; it is of: {}",
            known.join(", ")
        )));
    }
    Ok(schedule.iter().map(|pause| *pause / options.compress).collect())
}

/// `FROM..TO`
pub(super) fn ramp(text: &str) -> Result<(u32, u32), String> {
    let wrong = || "give FROM..TO in requests per second, e.g. 100..5000".to_owned();
    let (from, to) = text.split_once("..").ok_or_else(wrong)?;
    let rate = |text: &str| text.parse::<u32>().ok().filter(|rate| *rate <= 1_000_000).ok_or_else(wrong);
    match (rate(from)?, rate(to)?) {
        (0, 0) => Err(wrong()),
        rates => Ok(rates),
    }
}

/// In hundredths of a percent.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is between 0 and 10000")]
pub(super) fn percent(text: &str) -> Result<u32, String> {
    let share = text.strip_suffix('%').unwrap_or(text).parse::<f64>();
    let share = share.ok().filter(|share| (0.0..=100.0).contains(share));
    share.map(|share| (share * 100.0).round() as u32).ok_or_else(|| "give a number from 0 to 100".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ramps_and_percentages_are_read_or_refused() {
        assert_eq!(ramp("0..500"), Ok((0, 500)));
        assert_eq!(ramp("500..10"), Ok((500, 10)));
        for text in ["", "5", "5..", "-1..5", "0..0", "1..9999999"] {
            assert!(ramp(text).is_err(), "{text}");
        }
        assert_eq!(percent("2.5"), Ok(250));
        assert_eq!(percent("100%"), Ok(10_000));
        for text in ["", "-1", "101", "NaN", "x"] {
            assert!(percent(text).is_err(), "{text}");
        }
    }
}
