//! Keys that providers publish: a stage between reading the body and `verify`, which stays without I/O.
//!
//! The request says where its certificate stands, or which key of a set it means, so a stranger does. Invariant: nobody is
//! asked at a URL that scheme or source do not pin, nor for a request that can be refused without a key; what is fetched
//! bounds memory, time and number by settings; a certificate's key counts only for the scheme that checked it. A fetch that
//! fails is our trouble and never the sender's: it is 503.
//!
//! Never here: whether a signature is right, and a store.

mod cache;
mod certificate;
mod fetch;
mod sets;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::timeout_at;
use tracing::{info, warn};

use crate::body::Received;
use crate::challenge::Reply;
use crate::config::{Config, Keys, Source};
use crate::error::Code;
use crate::metrics::Metrics;
use crate::parts::Parts;
use crate::provider::pin::Pinned;
use crate::provider::{FetchedKeys, Scheme};
use crate::tasks::Tasks;
use crate::verify::{Verified, Wanted, wanted};

use cache::{Cache, Landing, Look, Name, Outcome};
use certificate::{certified, demands};
use fetch::{FetchError, Fetcher, Page, Purpose};
use sets::Sets;

/// The time over which fetches of a source are counted.
const MINUTE: Duration = Duration::from_secs(60);

/// Why there is no key, or no confirmation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trouble {
    /// `KeysUnavailable`, or why the request is refused.
    pub code: Code,
    /// For the log only; empty if the code says it all.
    pub cause: String,
}

impl Trouble {
    fn unavailable(cause: impl Into<String>) -> Self {
        Self { code: Code::KeysUnavailable, cause: cause.into() }
    }

    fn refused(code: Code) -> Self {
        Self { code, cause: String::new() }
    }
}

/// The keys of a process. Clones share them.
#[derive(Debug, Clone)]
pub struct Keyring {
    shared: Arc<Shared>,
    tasks: Tasks,
}

#[derive(Debug)]
struct Shared {
    settings: Keys,
    /// None if no source fetches anything.
    fetcher: Option<Fetcher>,
    cache: Mutex<Cache>,
    sets: Mutex<Sets>,
    /// `fetches_max`
    places: Arc<Semaphore>,
    /// Fetches of each source since the beginning of its minute.
    counts: Mutex<HashMap<Arc<str>, (Instant, usize)>>,
    metrics: Arc<Metrics>,
}

impl Keyring {
    /// Reads whom this machine trusts, if a source will fetch something.
    ///
    /// # Errors
    /// Nobody is trusted.
    pub fn start(config: &Config, metrics: Arc<Metrics>, tasks: Tasks) -> anyhow::Result<Self> {
        let settings = config.keys.clone();
        let needed = config.sources.values().any(|source| fetches(source));
        let fetcher = if needed { Some(Fetcher::new(&settings)?) } else { None };
        let shared = Shared {
            fetcher,
            cache: Mutex::new(Cache::new(&settings)),
            sets: Mutex::new(Sets::new(&settings)),
            places: Arc::new(Semaphore::new(settings.fetches_max)),
            counts: Mutex::default(),
            settings,
            metrics,
        };
        Ok(Self { shared: Arc::new(shared), tasks })
    }

    /// The same keys under other settings; anew where these are about keys, or if nothing was fetched before.
    ///
    /// # Errors
    /// Nobody is trusted.
    pub fn tuned(&self, config: &Config) -> anyhow::Result<Self> {
        let needed = config.sources.values().any(|source| fetches(source));
        if self.shared.settings == config.keys && (self.shared.fetcher.is_some() || !needed) {
            return Ok(self.clone());
        }
        Self::start(config, Arc::clone(&self.shared.metrics), self.tasks.clone())
    }

    /// How many authorities are trusted; `None` if nothing will be fetched.
    #[must_use]
    pub fn authorities(&self) -> Option<usize> {
        self.shared.fetcher.as_ref().map(|fetcher| fetcher.anchors().len())
    }

    /// The keys that the request needs; none where the source has its own, or needs none.
    ///
    /// Dropping it drops nothing but the wait: a fetch that is under way ends by itself, for those who come next.
    ///
    /// # Errors
    /// The request is refused, or its key cannot be had now.
    pub async fn find(
        &self,
        received: &Received,
        now: Timestamp,
        deadline: Instant,
    ) -> Result<FetchedKeys, Trouble> {
        let source = &received.source;
        match wanted(received, now).map_err(Trouble::refused)? {
            Wanted::Nothing => Ok(FetchedKeys::None),
            Wanted::KeySet(url, key) => self.find_set(&url, &key, deadline).await.map(FetchedKeys::Set),
            Wanted::Certificate(url) => {
                let name = Name { demands: demands(&source.scheme), url };
                let found = match self.look(source, &name)? {
                    Look::Known(outcome) => outcome,
                    Look::UnderWay(landing) => landed(landing, deadline).await,
                };
                found.map(|good| FetchedKeys::Certified(good.keys))
            }
        }
    }

    /// What is known of the URL, or the fetch that is under way; begins one if there is none.
    fn look(&self, source: &Arc<Source>, name: &Name) -> Result<Look, Trouble> {
        let now = (Instant::now(), Timestamp::now());
        let mut cache = self.shared.cache();
        if let Some(look) = cache.look(name, now) {
            return Ok(look);
        }
        // Or else a stranger who uses up the source's fetches would keep it from a key that has to be fetched anew.
        let counted = Some(source.as_ref()).filter(|_| !cache.was_good(name));
        let permit = self.shared.admit(counted, Purpose::Keys)?;
        let (sender, landing) = watch::channel(None);
        cache.begin(name, landing.clone());
        drop(cache);
        let (shared, name, scheme) = (Arc::clone(&self.shared), name.clone(), Arc::clone(&source.scheme));
        drop(self.tasks.spawn(async move {
            let outcome = shared.fetch_certificate(&scheme, &name.url).await;
            shared.cache().land(&name, &outcome, Instant::now());
            drop(permit);
            // Nobody waits any more: the next request finds it in the cache.
            drop(sender.send(Some(outcome)));
        }));
        Ok(Look::UnderWay(landing))
    }

    /// Visits the URL of a request that has to be confirmed before events come; its answer. `None` if it is no such request.
    ///
    /// Dropping it does not stop a visit that has begun.
    ///
    /// # Errors
    /// The URL is not pinned, or its visit failed.
    pub async fn confirm(&self, verified: &Verified, deadline: Instant) -> Result<Option<Reply>, Trouble> {
        let received = verified.request();
        let Some(url) = confirm_url(received)? else { return Ok(None) };
        let permit = self.shared.admit(Some(&received.source), Purpose::Confirm)?;
        let shared = Arc::clone(&self.shared);
        let source = Arc::clone(&received.source.name);
        let visit = self.tasks.spawn(async move {
            let visited = shared.fetch(&url, Purpose::Confirm).await;
            drop(permit);
            if visited.is_ok() {
                info!(source = &*source, %url, "a subscription is confirmed");
            }
            visited
        });
        match timeout_at(deadline.into(), visit).await {
            Ok(Ok(Ok(_page))) => Ok(Some(Reply::ok())),
            Ok(Ok(Err(error))) => Err(Trouble::unavailable(error.to_string())),
            Ok(Err(lost)) => Err(Trouble::unavailable(lost.to_string())),
            Err(_elapsed) => Err(Trouble::unavailable("the visit outlasts the deadline")),
        }
    }
}

/// What becomes of a fetch that is under way.
async fn landed<T: Clone>(mut landing: Landing<T>, deadline: Instant) -> Result<T, Trouble> {
    let lost = || Err(Trouble::unavailable("the fetch was lost"));
    match timeout_at(deadline.into(), landing.wait_for(Option::is_some)).await {
        Ok(Ok(outcome)) => outcome.clone().unwrap_or_else(lost),
        Ok(Err(_lost)) => lost(),
        Err(_elapsed) => Err(Trouble::unavailable("the fetch outlasts the deadline")),
    }
}

/// Whether requests of the source make this process ask somebody.
fn fetches(source: &Source) -> bool {
    source.scheme.pointing.confirm.is_some() || source.fetches_keys()
}

/// The URL to visit, if the request is one that asks for it.
pub(crate) fn confirm_url(received: &Received) -> Result<Option<Pinned>, Trouble> {
    let Some(rule) = &received.source.scheme.pointing.confirm else { return Ok(None) };
    let parts = Parts::of(received, &rule.pointers);
    let asks = rule
        .when
        .iter()
        .all(|(place, wanted)| matches!(parts.read(place), Ok(Some(text)) if text == wanted.as_str()));
    if !asks {
        return Ok(None);
    }
    let Ok(Some(url)) = parts.read(&rule.from) else {
        return Err(Trouble::refused(Code::HandshakeMalformed));
    };
    let refused = |why: &str| Trouble { code: Code::KeyUrlRefused, cause: format!("the URL to visit {why}") };
    rule.pins.check(&url).map(Some).map_err(refused)
}

impl Shared {
    fn cache(&self) -> MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place among the fetches. It counts for the source, if one is given.
    fn admit(&self, source: Option<&Source>, purpose: Purpose) -> Result<OwnedSemaphorePermit, Trouble> {
        let limited = |cause: &str| {
            self.metrics.fetched(purpose.word(), "limited");
            Trouble::unavailable(cause)
        };
        let permit = Arc::clone(&self.places).try_acquire_owned();
        let permit = permit.map_err(|_full| limited("keys.fetches_max is reached"))?;
        match source {
            Some(source) if !self.count(&source.name, Instant::now()) => {
                Err(limited("keys.fetches_per_minute is reached for this source"))
            }
            _ => Ok(permit),
        }
    }

    /// Counts one more fetch of the source, if it may have one in this minute.
    fn count(&self, source: &Arc<str>, now: Instant) -> bool {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let (began, fetches) = counts.entry(Arc::clone(source)).or_insert((now, 0));
        if now.saturating_duration_since(*began) >= MINUTE {
            (*began, *fetches) = (now, 0);
        }
        let allowed = *fetches < self.settings.fetches_per_minute;
        *fetches += usize::from(allowed);
        allowed
    }

    /// Fetches and checks. What is wrong with the certificate is the request's fault, which pointed to it.
    async fn fetch_certificate(&self, scheme: &Scheme, url: &Pinned) -> Outcome {
        let page =
            self.fetch(url, Purpose::Keys).await.map_err(|error| Trouble::unavailable(error.to_string()))?;
        let anchors = self.fetcher.as_ref().map(Fetcher::anchors).unwrap_or_default();
        certified(scheme, &page.body, anchors, Timestamp::now()).map_err(|cause| {
            self.metrics.fetched("keys", "unfit");
            warn!(%url, cause, "what the provider's URL holds is no certificate that can be used");
            Trouble { code: Code::KeyUnfit, cause }
        })
    }

    async fn fetch(&self, url: &Pinned, purpose: Purpose) -> Result<Page, FetchError> {
        let Some(fetcher) = &self.fetcher else { return Err(FetchError::NotStarted) };
        let page = fetcher.get(url).await;
        let result = page.as_ref().map_or_else(FetchError::word, |_page| "fetched");
        self.metrics.fetched(purpose.word(), result);
        if let Err(error) = &page {
            warn!(%url, error = %error, "a provider's URL could not be fetched");
        }
        page
    }
}
