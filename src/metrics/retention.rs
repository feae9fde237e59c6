//! What deletes, in numbers.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use super::Word;
use crate::retention::Counts;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindLabels {
    kind: Word,
}

/// Of the passes that this process runs by itself.
#[derive(Debug)]
pub struct Retention {
    rows_deleted: Family<KindLabels, Counter>,
    days_dropped: Counter,
    busy_partitions: Gauge,
    stopped: Gauge,
    last_success: Gauge<f64, AtomicU64>,
    last_pass: Gauge<f64, AtomicU64>,
}

impl Retention {
    pub(super) fn registered(registry: &mut Registry) -> Self {
        let retention = Self {
            rows_deleted: Family::default(),
            days_dropped: Counter::default(),
            busy_partitions: Gauge::default(),
            stopped: Gauge::default(),
            last_success: Gauge::default(),
            last_pass: Gauge::default(),
        };
        // All from the beginning, so that a rate sees the first row.
        for (kind, _) in Counts::default().rows() {
            drop(retention.rows_deleted.get_or_create(&KindLabels { kind: Word(kind) }));
        }
        let r = registry;
        r.register("retention_rows_deleted", "Rows deleted by age, by kind", retention.rows_deleted.clone());
        r.register(
            "retention_partitions_dropped",
            "Days of bodies that were dropped",
            retention.days_dropped.clone(),
        );
        r.register(
            "retention_busy_partitions",
            "Days of bodies that the last pass left, since somebody was using them",
            retention.busy_partitions.clone(),
        );
        r.register(
            "retention_stopped",
            "1 while nothing is deleted, since a clock or what would go looks wrong",
            retention.stopped.clone(),
        );
        r.register_with_unit(
            "retention_last_success_timestamp",
            "When a pass last came to its end, in seconds since 1970",
            Unit::Seconds,
            retention.last_success.clone(),
        );
        r.register_with_unit(
            "retention_last_pass_duration",
            "How long the last whole pass took",
            Unit::Seconds,
            retention.last_pass.clone(),
        );
        retention
    }

    /// What was deleted between two moments of a pass.
    pub fn deleted(&self, before: &Counts, now: &Counts) {
        for ((kind, before), (_, now)) in before.rows().into_iter().zip(now.rows()) {
            self.rows_deleted
                .get_or_create(&KindLabels { kind: Word(kind) })
                .inc_by(now.saturating_sub(before));
        }
        let dropped = now.days_dropped.len().saturating_sub(before.days_dropped.len());
        self.days_dropped.inc_by(dropped as u64);
    }

    /// A pass came to its end.
    pub fn passed(&self, counts: &Counts, took: Duration, now: jiff::Timestamp) {
        self.stopped.set(0);
        self.busy_partitions.set(i64::try_from(counts.days_busy.len()).unwrap_or(i64::MAX));
        self.last_pass.set(took.as_secs_f64());
        self.last_success.set(now.as_duration().as_secs_f64());
    }

    /// A pass was stopped.
    pub fn stopped(&self) {
        self.stopped.set(1);
    }
}
