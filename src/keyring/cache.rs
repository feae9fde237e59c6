//! What is known of the URLs of certificates: keys, failures, and fetches that are under way.
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

/// A URL as one scheme uses it: another may ask less of a certificate, and so may the same one before a reload.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Name {
    pub(super) demands: String,
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
pub(super) type Landing<T = Certified> = watch::Receiver<Option<Result<T, Trouble>>>;

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

    /// Whether the URL gave a key before, which is too old now: no stranger can make up such a one.
    pub(super) fn was_good(&self, name: &Name) -> bool {
        self.good.contains_key(name)
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

#[cfg(test)]
mod tests {
    use crate::config::Config;
    use crate::error::Code;
    use crate::provider::Scheme;

    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn cache(most: usize) -> Cache {
        let minimal =
            "postgres.url = \"postgres://h/d\"\nfast_tier = { url = \"redis://h\", prefix = \"t:\" }";
        let mut settings = Config::parse("t.toml", minimal, &|_| None).unwrap().config.keys;
        (settings.cached_max, settings.cache_ttl, settings.failure_ttl) = (most, 10 * MINUTE, MINUTE);
        Cache::new(&settings)
    }

    fn name(demands: &str, path: &str) -> Name {
        let paypal = Scheme::preset("paypal").unwrap();
        let pins = &paypal.pointing.cert.as_ref().unwrap().pins;
        let url = pins.check(&format!("https://api.paypal.com/v1/notifications/certs/{path}")).unwrap();
        Name { demands: demands.to_owned(), url }
    }

    fn good(ends: i64) -> Certified {
        Certified { keys: Arc::default(), ends: Timestamp::from_second(ends).unwrap() }
    }

    fn bad() -> Trouble {
        Trouble { code: Code::KeysUnavailable, cause: "away".to_owned() }
    }

    /// Whether a key is known, or a failure, or nothing.
    fn known(cache: &Cache, name: &Name, now: Instant, clock: i64) -> Option<bool> {
        match cache.look(name, (now, Timestamp::from_second(clock).unwrap())) {
            Some(Look::Known(outcome)) => Some(outcome.is_ok()),
            Some(Look::UnderWay(_)) => panic!("nothing is fetched here"),
            None => None,
        }
    }

    #[test]
    fn a_key_is_used_until_its_time_or_its_certificates_is_over_and_by_its_scheme_only() {
        let (mut cache, now, one) = (cache(4), Instant::now(), name("a", "1"));
        assert_eq!(known(&cache, &one, now, 0), None);
        cache.land(&one, &Ok(good(100)), now);
        assert_eq!(known(&cache, &one, now + 9 * MINUTE, 100), Some(true));
        assert_eq!(known(&cache, &one, now + 10 * MINUTE, 100), None);
        assert_eq!(known(&cache, &one, now, 101), None);
        assert_eq!(known(&cache, &name("b", "1"), now, 0), None, "another scheme may ask for more");
        cache.land(&one, &Err(bad()), now);
        assert_eq!(
            known(&cache, &one, now, 0),
            Some(true),
            "a key that is good is not forgotten for a failure"
        );
    }

    #[test]
    fn failures_are_forgotten_soon_and_push_out_no_key() {
        let (mut cache, now) = (cache(2), Instant::now());
        cache.land(&name("a", "good"), &Ok(good(100)), now);
        for number in 0..10_u32 {
            cache.land(&name("a", &number.to_string()), &Err(bad()), now + number * Duration::from_secs(1));
        }
        let later = now + Duration::from_secs(9);
        assert_eq!(known(&cache, &name("a", "9"), later, 0), Some(false));
        assert_eq!(known(&cache, &name("a", "7"), later, 0), None, "two are kept");
        assert_eq!(known(&cache, &name("a", "9"), later + MINUTE, 0), None);
        assert_eq!(known(&cache, &name("a", "good"), later, 0), Some(true));
        for number in 0..3_u32 {
            cache.land(&name("a", &format!("g{number}")), &Ok(good(100)), now + number * MINUTE);
        }
        assert_eq!((known(&cache, &name("a", "good"), now, 0), cache.good.len()), (None, 2));
    }

    #[test]
    fn a_fetch_whose_task_was_lost_is_begun_anew() {
        let (mut cache, now, one) = (cache(2), (Instant::now(), Timestamp::UNIX_EPOCH), name("a", "1"));
        let (sender, landing) = watch::channel(None);
        cache.begin(&one, landing);
        assert!(matches!(cache.look(&one, now), Some(Look::UnderWay(_))));
        drop(sender);
        assert!(cache.look(&one, now).is_none());
    }
}
