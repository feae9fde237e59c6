//! How the background loops are. A loop's name is from the program or the settings.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use crate::tasks::{Age, LoopState};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LoopLabels {
    r#loop: Arc<str>,
}

/// Made anew each time, so that a loop that has ended leaves no age behind.
pub(super) fn registry(states: &[LoopState]) -> Registry {
    let mut registry = Registry::with_prefix("hapax");
    let failures = Family::<LoopLabels, Counter>::default();
    let ages = Family::<LoopLabels, Gauge<f64, AtomicU64>>::default();
    for state in states {
        let labels = LoopLabels { r#loop: Arc::clone(&state.name) };
        failures.get_or_create(&labels).inc_by(state.failures);
        let age = match state.age {
            None => continue,
            Some(Age::Never) => -1.0,
            Some(Age::Since(age)) => age.as_secs_f64(),
        };
        ages.get_or_create(&labels).set(age);
    }
    let help = "Times that a background loop failed and was started again";
    registry.register("loop_failures", help, failures);
    let help =
        "Time since a background loop said that it is alive, or waits for work; -1 before the first time";
    registry.register_with_unit("loop_age", help, Unit::Seconds, ages);
    registry
}
