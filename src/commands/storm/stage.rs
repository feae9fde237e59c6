//! Stages of load, one after the other: an ordinary run has one, a search for the knee has many.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use indicatif::{ProgressBar, ProgressStyle};
use tokio::task::JoinSet;

use super::clock::{Clock, Slip};
use super::fates::Fates;
use super::lane::{Load, drive, lock};
use super::pace::Pace;
use super::plan::Plan;
use super::recipe::EVENTS_MAX;
use super::tally::{Counts, Point, Tally};
use super::{Exit, Signals, complain};

/// Intervals of the latency over time, about.
const INTERVALS: u32 = 120;
const INTERVAL_MIN: Duration = Duration::from_millis(100);

/// What a stage came to.
#[derive(Debug)]
pub(super) struct Measured {
    pub(super) pace: Pace,
    pub(super) counts: Counts,
    pub(super) latency: Histogram<u64>,
    pub(super) lateness: Histogram<u64>,
    pub(super) late: u64,
    pub(super) slip: Slip,
    pub(super) points: Vec<Point>,
    /// From the first request to the last answer.
    pub(super) took: Duration,
}

/// What all stages share.
#[derive(Debug)]
pub(super) struct Stages {
    plan: Arc<Plan>,
    signals: Signals,
    fates: Arc<Mutex<Fates>>,
    counts: Counts,
    last: Option<Measured>,
    stopped: bool,
}

impl Stages {
    pub(super) fn new(plan: &Arc<Plan>, signals: Signals) -> Self {
        let (fates, counts) = (Arc::default(), Counts::default());
        Self { plan: Arc::clone(plan), signals, fates, counts, last: None, stopped: false }
    }

    pub(super) fn fates(&self) -> &Mutex<Fates> {
        &self.fates
    }

    /// Over all stages.
    pub(super) fn counts(&self) -> &Counts {
        &self.counts
    }

    /// The last stage.
    pub(super) fn last(&self) -> Option<&Measured> {
        self.last.as_ref()
    }

    /// Whether a signal ended the load.
    pub(super) fn stopped(&self) -> bool {
        self.stopped
    }

    /// Sends at that pace, and waits for the last answer.
    ///
    /// # Errors
    /// A request cannot be made.
    pub(super) async fn run(&mut self, pace: Pace) -> Result<&Measured, Exit> {
        let load = Arc::new(self.load(pace)?);
        let began = Instant::now();
        let keeper = std::thread::Builder::new().name("storm-clock".to_owned());
        let clock = Arc::clone(&load);
        let keeper = keeper.spawn(move || {
            let tells = clock.plan.tells_end;
            clock.clock.keep_time(|open| {
                if tells {
                    complain(&format!("the schedule is over; {open} requests are not answered yet"));
                }
            });
        })?;
        let mut lanes = JoinSet::new();
        for _ in 0..self.plan.connections {
            lanes.spawn(drive(Arc::clone(&load)));
        }
        let done = self.wait(&mut lanes, &load).await;
        let took = began.elapsed();
        load.clock.abandon();
        lanes.shutdown().await;
        keeper.join().map_err(|_panic| Exit::software("the clock's thread panicked"))?;
        load.bar.finish_and_clear();
        done?;
        let measured = measured(load, pace, took)?;
        self.counts.add(&measured.counts);
        Ok(self.last.insert(measured))
    }

    fn load(&self, pace: Pace) -> Result<Load, Exit> {
        let Plan { mix, recipe, .. } = self.plan.as_ref();
        let requests = mix.whole(pace.requests());
        let events = mix.units(requests).saturating_mul(recipe.batch());
        let mut fates = lock(&self.fates);
        if fates.len().saturating_add(events) > EVENTS_MAX {
            return Err(Exit::settings(format!("one run can have {EVENTS_MAX} events: run for less long")));
        }
        let first_unit = fates.grow(events) / recipe.batch();
        let interval = ((pace.warm_up + pace.duration) / INTERVALS).max(INTERVAL_MIN);
        Ok(Load {
            plan: Arc::clone(&self.plan),
            tally: Mutex::new(Tally::new(interval)?),
            fates: Arc::clone(&self.fates),
            bar: bar("storm", requests),
            clock: Clock::new(pace, *mix, requests),
            requests,
            first_unit,
        })
    }

    /// A signal ends the schedule; a second one does not wait for answers.
    async fn wait(&mut self, lanes: &mut JoinSet<Result<(), Exit>>, load: &Load) -> Result<(), Exit> {
        let mut done = Ok(());
        loop {
            tokio::select! {
                lane = lanes.join_next() => match lane {
                    Some(ended) => done = done.and(ended.map_err(Exit::software).and_then(|ended| ended)),
                    None => return done,
                },
                () = self.signals.next() => {
                    if self.stopped {
                        return Err(Exit::failed("interrupted: nothing is proved"));
                    }
                    self.stopped = true;
                    load.clock.stop();
                }
            }
        }
    }
}

fn measured(load: Arc<Load>, pace: Pace, took: Duration) -> Result<Measured, Exit> {
    let slip = load.clock.slip();
    let load = Arc::into_inner(load).ok_or_else(|| Exit::software("a lane is still there"))?;
    let tally = load.tally.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    let Tally { counts, latency, lateness, late, timeline } = tally;
    Ok(Measured { pace, counts, latency, lateness, late, slip, points: timeline.finish(), took })
}

/// On standard error, if that is a terminal.
pub(super) fn bar(name: &'static str, length: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg} {bar:40} {pos}/{len} {per_sec} {eta}");
    let bar = ProgressBar::new(length).with_message(name);
    match style {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
