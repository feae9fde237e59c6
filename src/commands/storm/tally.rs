//! What is counted: histograms and sums, whose size does not depend on how long the load goes on.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use serde::Serialize;

use super::Exit;

/// What begins so long after it was due is late.
pub(super) const LATE_AFTER: Duration = Duration::from_millis(5);
/// The longest time that is told apart from longer ones.
const LONGEST_US: u64 = 600_000_000;
/// Different outcomes that are counted apart: the answer of something that is no gateway cannot fill the memory.
const OUTCOMES_MAX: usize = 32;

/// How a delivery ended.
#[derive(Debug)]
pub(super) enum End {
    /// The status, and `Hapax-Outcome`.
    Answered(u16, Option<String>),
    /// It was answered, and the answer is taken for lost.
    Lost(u16, Option<String>),
    Failed(Failure),
    /// We went away, before the body was complete or after.
    Gone {
        whole: bool,
    },
}

/// Why there is no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Failure {
    Connect,
    Closed,
    Timeout,
}

impl End {
    pub(super) fn status(&self) -> Option<u16> {
        match self {
            Self::Answered(status, _) | Self::Lost(status, _) => Some(*status),
            Self::Failed(_) | Self::Gone { .. } => None,
        }
    }

    /// Whether the gateway promised that it has the event. That the answer is taken for lost breaks no promise.
    pub(super) fn is_safe(&self) -> bool {
        self.status().is_some_and(|status| (200..300).contains(&status))
    }

    /// Whether a provider would leave it at that.
    pub(super) fn is_final(&self) -> bool {
        self.is_safe() && matches!(self, Self::Answered(..))
    }

    /// Whether the whole request went out.
    pub(super) fn is_sent(&self) -> bool {
        !matches!(self, Self::Failed(Failure::Connect) | Self::Gone { whole: false })
    }
}

/// Sums over all requests.
#[derive(Debug, Default, Clone, Serialize)]
pub(super) struct Counts {
    pub(super) sent: u64,
    pub(super) answered: u64,
    pub(super) failed: u64,
    pub(super) disconnected: u64,
    pub(super) status: BTreeMap<u16, u64>,
    pub(super) outcomes: BTreeMap<String, u64>,
    pub(super) failures: BTreeMap<Failure, u64>,
    pub(super) answers_dropped: u64,
    pub(super) retries: u64,
    pub(super) given_up: u64,
}

impl Counts {
    fn note(&mut self, end: &End) {
        match end {
            End::Answered(status, outcome) | End::Lost(status, outcome) => {
                self.answered += 1;
                *self.status.entry(*status).or_default() += 1;
                let outcome = outcome.as_deref().unwrap_or("none");
                let has_room = self.outcomes.len() < OUTCOMES_MAX || self.outcomes.contains_key(outcome);
                let outcome = if has_room { outcome } else { "other" };
                *self.outcomes.entry(outcome.to_owned()).or_default() += 1;
                self.answers_dropped += u64::from(matches!(end, End::Lost(..)));
            }
            End::Failed(failure) => {
                self.failed += 1;
                *self.failures.entry(*failure).or_default() += 1;
            }
            End::Gone { .. } => self.disconnected += 1,
        }
    }

    pub(super) fn add(&mut self, other: &Self) {
        self.sent += other.sent;
        self.answered += other.answered;
        self.failed += other.failed;
        self.disconnected += other.disconnected;
        self.answers_dropped += other.answers_dropped;
        self.retries += other.retries;
        self.given_up += other.given_up;
        for (status, count) in &other.status {
            *self.status.entry(*status).or_default() += count;
        }
        for (outcome, count) in &other.outcomes {
            *self.outcomes.entry(outcome.clone()).or_default() += count;
        }
        for (failure, count) in &other.failures {
            *self.failures.entry(*failure).or_default() += count;
        }
    }

    /// Answers other than 2xx.
    pub(super) fn refused(&self) -> u64 {
        self.status.iter().filter(|(status, _)| !(200..300).contains(*status)).map(|(_, count)| count).sum()
    }
}

/// Counts and times of one stage.
#[derive(Debug)]
pub(super) struct Tally {
    pub(super) counts: Counts,
    /// From when a request was due to the end of its answer; of those after the warm-up.
    pub(super) latency: Histogram<u64>,
    /// From when it was due to when it was begun; of all.
    pub(super) lateness: Histogram<u64>,
    pub(super) late: u64,
    pub(super) timeline: Timeline,
}

impl Tally {
    pub(super) fn new(interval: Duration) -> Result<Self, Exit> {
        Ok(Self {
            counts: Counts::default(),
            latency: histogram()?,
            lateness: histogram()?,
            late: 0,
            timeline: Timeline::new(interval)?,
        })
    }

    /// A request goes out.
    pub(super) fn begin(&mut self, lateness: Duration, is_retry: bool) {
        self.counts.sent += 1;
        self.counts.retries += u64::from(is_retry);
        self.late += u64::from(lateness > LATE_AFTER);
        self.lateness.saturating_record(micros(lateness));
    }

    /// It ended, so long after it was due.
    pub(super) fn end(&mut self, end: &End, latency: Duration, measured: bool) {
        self.counts.note(end);
        if end.status().is_some() {
            self.timeline.note(latency);
            if measured {
                self.latency.saturating_record(micros(latency));
            }
        }
    }
}

fn histogram() -> Result<Histogram<u64>, Exit> {
    Histogram::new_with_bounds(1, LONGEST_US, 3).map_err(Exit::software)
}

pub(super) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// Latency by when the answer came, in intervals of which there are not many.
#[derive(Debug)]
pub(super) struct Timeline {
    interval: Duration,
    origin: Instant,
    /// The interval that is going on.
    number: u32,
    now: Histogram<u64>,
    points: Vec<Point>,
}

/// An interval in which there were answers.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Point {
    /// Its beginning.
    pub(super) at_ms: u64,
    pub(super) answers: u64,
    pub(super) p50_us: u64,
    pub(super) p99_us: u64,
    pub(super) max_us: u64,
}

impl Timeline {
    fn new(interval: Duration) -> Result<Self, Exit> {
        let now = Histogram::new_with_bounds(1, LONGEST_US, 2).map_err(Exit::software)?;
        Ok(Self { interval, origin: Instant::now(), number: 0, now, points: Vec::new() })
    }

    fn note(&mut self, latency: Duration) {
        let number = self.origin.elapsed().as_nanos() / self.interval.as_nanos().max(1);
        let number = u32::try_from(number).unwrap_or(u32::MAX);
        if number != self.number {
            self.close();
            self.number = number;
        }
        self.now.saturating_record(micros(latency));
    }

    fn close(&mut self) {
        if self.now.is_empty() {
            return;
        }
        let at = self.interval.saturating_mul(self.number);
        self.points.push(Point {
            at_ms: u64::try_from(at.as_millis()).unwrap_or(u64::MAX),
            answers: self.now.len(),
            p50_us: self.now.value_at_quantile(0.5),
            p99_us: self.now.value_at_quantile(0.99),
            max_us: self.now.max(),
        });
        self.now.reset();
    }

    /// The intervals, the last one too.
    pub(super) fn finish(mut self) -> Vec<Point> {
        self.close();
        self.points
    }
}
