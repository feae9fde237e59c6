//! What is measured of the work after the commit. Labels are names of the settings and closed sets of words.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use super::Word;

type Seconds = Gauge<f64, AtomicU64>;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SourceLabels {
    source: Arc<str>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct QueueLabels {
    queue: Arc<str>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AttemptLabels {
    queue: Arc<str>,
    result: Word,
}

/// Metrics of queues and their workers. A queue is `target:NAME`, `effect:SOURCE` or `pull:SOURCE`.
#[derive(Debug)]
pub struct WorkMetrics {
    rearmed: Family<SourceLabels, Counter>,
    attempts: Family<AttemptLabels, Counter>,
    dead: Family<QueueLabels, Counter>,
    lost: Family<QueueLabels, Counter>,
    breaker_open: Family<QueueLabels, Gauge>,
    under_way: Family<QueueLabels, Gauge>,
    waiting: Family<QueueLabels, Gauge>,
    lag: Family<QueueLabels, Seconds>,
    delivery: Histogram,
}

impl WorkMetrics {
    pub(super) fn registered(registry: &mut Registry) -> Self {
        let work = Self {
            rearmed: Family::default(),
            attempts: Family::default(),
            dead: Family::default(),
            lost: Family::default(),
            breaker_open: Family::default(),
            under_way: Family::default(),
            waiting: Family::default(),
            lag: Family::default(),
            delivery: super::histogram(0.001),
        };
        let r = registry;
        r.register("rearmed", "Redeliveries that armed a failed or dead event again", work.rearmed.clone());
        r.register(
            "attempts",
            "Attempts at deliveries and parked effects that ended, by queue and result",
            work.attempts.clone(),
        );
        r.register(
            "dead",
            "Events that this gateway saw die, by the queue of their last attempt",
            work.dead.clone(),
        );
        let help = "Results that did not count, since another worker had taken the event meanwhile";
        r.register("leases_lost", help, work.lost.clone());
        r.register("target_breaker_open", "1 while a target is left alone", work.breaker_open.clone());
        r.register("attempts_under_way", "Attempts under way in this gateway", work.under_way.clone());
        r.register("jobs_waiting", "Jobs that are due and not taken, at most 10000", work.waiting.clone());
        let help = "How long the job that is due the longest has waited; 0 if none has";
        r.register_with_unit("queue_lag", help, Unit::Seconds, work.lag.clone());
        let help = "Time of one delivery to a target";
        r.register_with_unit("delivery", help, Unit::Seconds, work.delivery.clone());
        work
    }

    fn queue(queue: &Arc<str>) -> QueueLabels {
        QueueLabels { queue: Arc::clone(queue) }
    }

    /// A redelivery armed an event again.
    pub fn rearmed(&self, source: &Arc<str>) {
        self.rearmed.get_or_create(&SourceLabels { source: Arc::clone(source) }).inc();
    }

    /// An attempt ended; `result` is `done`, `failed`, or a word of why.
    pub fn attempted(&self, queue: &Arc<str>, result: &'static str) {
        self.attempts.get_or_create(&AttemptLabels { queue: Arc::clone(queue), result: Word(result) }).inc();
    }

    /// An event died.
    pub fn died(&self, queue: &Arc<str>, events: usize) {
        self.dead.get_or_create(&Self::queue(queue)).inc_by(events as u64);
    }

    /// A result came too late to count.
    pub fn lease_lost(&self, queue: &Arc<str>) {
        self.lost.get_or_create(&Self::queue(queue)).inc();
    }

    /// Whether a target is left alone.
    pub fn breaker(&self, queue: &Arc<str>, open: bool) {
        self.breaker_open.get_or_create(&Self::queue(queue)).set(i64::from(open));
    }

    /// How many attempts are under way.
    pub fn under_way(&self, queue: &Arc<str>, attempts: usize) {
        self.under_way.get_or_create(&Self::queue(queue)).set(i64::try_from(attempts).unwrap_or(i64::MAX));
    }

    /// What a look at a queue found.
    pub fn looked(&self, queue: &Arc<str>, waiting: Option<i64>, lag: Duration) {
        if let Some(waiting) = waiting {
            self.waiting.get_or_create(&Self::queue(queue)).set(waiting);
        }
        self.lag.get_or_create(&Self::queue(queue)).set(lag.as_secs_f64());
    }

    /// A queue that is not of the settings any more.
    pub fn gone(&self, queue: &Arc<str>) {
        let labels = Self::queue(queue);
        let _was: [bool; 4] = [
            self.breaker_open.remove(&labels),
            self.under_way.remove(&labels),
            self.waiting.remove(&labels),
            self.lag.remove(&labels),
        ];
    }

    /// A delivery took so long, whatever came of it.
    pub fn delivered(&self, took: Duration) {
        self.delivery.observe(took.as_secs_f64());
    }
}
