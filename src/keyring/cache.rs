//! What is known of URLs: keys, failures, and fetches that are under way.
//!
//! Invariant: bounded in number and in time; a key is never used after the end of its certificate; failures, which any
//! stranger can cause, push out failures only, never keys.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use tokio::sync::watch;

use super::Trouble;
use crate::config::Keys;
use crate::provider::PublicKey;
use crate::provider::pin::Pinned;

/// A URL as one scheme uses it: another may ask less of a certificate.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Name {
    pub(super) scheme: String,
    pub(super) url: Pinned,
}

/// Keys that were checked.
#[derive(Debug, Clone)]
pub(super) struct Certified {
    pub(super) keys: Arc<[PublicKey]>,
    /// The end of their certificate.
    pub(super) ends: Timestamp,
}

/// What became of a fetch.
pub(super) type Outcome = Result<Certified, Trouble>;

/// Where the outcome of a fetch will be.
pub(super) type Landing = watch::Receiver<Option<Outcome>>;

/// What there is of a URL.
pub(super) enum Look {
    Known(Outcome),
    UnderWay(Landing),
}

#[derive(Debug)]
struct Kept<T> {
    value: T,
    until: Instant,
}

#[derive(Debug)]
pub(super) struct Cache {
    most: usize,
    good_for: Duration,
    bad_for: Duration,
    good: HashMap<Name, Kept<Certified>>,
    bad: HashMap<Name, Kept<Trouble>>,
    /// Bounded by the number of fetches at once.
    under_way: HashMap<Name, Landing>,
}

impl Cache {
    pub(super) fn new(settings: &Keys) -> Self {
        Self {
            most: settings.cached_max,
            good_for: settings.cache_ttl,
            bad_for: settings.failure_ttl,
            good: HashMap::new(),
            bad: HashMap::new(),
            under_way: HashMap::new(),
        }
    }

    /// `None`: a fetch has to be begun.
    pub(super) fn look(&self, name: &Name, (now, clock): (Instant, Timestamp)) -> Option<Look> {
        if let Some(good) = self.good.get(name)
            && good.until > now
            && good.value.ends >= clock
        {
            return Some(Look::Known(Ok(good.value.clone())));
        }
        if let Some(bad) = self.bad.get(name)
            && bad.until > now
        {
            return Some(Look::Known(Err(bad.value.clone())));
        }
        // A fetch whose task was lost has no sender any more.
        let landing = self.under_way.get(name).filter(|landing| landing.has_changed().is_ok())?;
        Some(Look::UnderWay(landing.clone()))
    }

    pub(super) fn begin(&mut self, name: &Name, landing: Landing) {
        self.under_way.insert(name.clone(), landing);
    }

    /// Keeps what became of a fetch.
    pub(super) fn land(&mut self, name: &Name, outcome: &Outcome, now: Instant) {
        self.under_way.remove(name);
        match outcome {
            Ok(good) => {
                self.bad.remove(name);
                keep(&mut self.good, self.most, name, good, now, self.good_for);
            }
            Err(trouble) => keep(&mut self.bad, self.most, name, trouble, now, self.bad_for),
        }
    }
}

/// Keeps one more; if that is one too many, what has ended goes, or else what ends first.
fn keep<T: Clone>(
    kept: &mut HashMap<Name, Kept<T>>,
    most: usize,
    name: &Name,
    value: &T,
    now: Instant,
    ttl: Duration,
) {
    if kept.len() >= most && !kept.contains_key(name) {
        kept.retain(|_, one| one.until > now);
        let first = kept.iter().min_by_key(|(_, one)| one.until).map(|(name, _)| name.clone());
        if let Some(first) = first.filter(|_| kept.len() >= most) {
            kept.remove(&first);
        }
    }
    kept.insert(name.clone(), Kept { value: value.clone(), until: now + ttl });
}
