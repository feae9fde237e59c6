//! Key sets: what is known of each, and when it is fetched again.
//!
//! A set's URL is the scheme's or the source's; what a stranger chooses is the name of a key that is not in it. Invariant: a
//! set is fetched again no sooner than `failure_ttl` after it was fetched last, whatever was asked for and whatever came of it;
//! keys that were good go on while their provider is away, and no longer than `stale_ttl`.

use std::collections::HashMap;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tracing::warn;

use super::cache::Landing;
use super::fetch::{Page, Purpose};
use super::{Keyring, Shared, Trouble, landed};
use crate::config::Keys;
use crate::provider::pin::Pinned;
use crate::provider::{FetchedKeys, Key};
use crate::verify::WantedKey;

/// A set that was fetched.
#[derive(Debug, Clone)]
pub(super) struct Published {
    keys: Key,
    /// How long it may be kept, as its provider says.
    max_age: Option<Duration>,
}

#[derive(Debug)]
pub(super) struct Sets {
    most: usize,
    good_for: Duration,
    stale_for: Duration,
    rest: Duration,
    known: HashMap<Pinned, Entry>,
}

/// What is known of one set.
#[derive(Debug, Default)]
struct Entry {
    good: Option<Good>,
    /// Nothing is fetched again before.
    rests_until: Option<Instant>,
    /// Why the last fetch brought nothing.
    failed: Option<Trouble>,
    under_way: Option<Landing<Published>>,
}

impl Entry {
    /// The fetch that is under way. One whose task was lost has no sender any more.
    fn fetching(&self) -> Option<&Landing<Published>> {
        self.under_way.as_ref().filter(|landing| landing.has_changed().is_ok())
    }
}

#[derive(Debug)]
struct Good {
    keys: Key,
    /// From here on it has to be fetched anew.
    until: Instant,
    /// From here on it is not used, even if it cannot be.
    ends: Instant,
}

/// What a set means for one request.
#[derive(Debug)]
enum Look {
    /// This is all that can be said now.
    Known(Result<Key, Trouble>),
    /// A fetch is due; if it fails, these keys may be used, and they need not wait where it failed before.
    Old { keys: Key, waits: bool },
    /// A fetch is due, and there is no key without it.
    Lacking,
}

impl Sets {
    pub(super) fn new(settings: &Keys) -> Self {
        Self {
            most: settings.cached_max,
            good_for: settings.cache_ttl,
            stale_for: settings.stale_ttl,
            rest: settings.failure_ttl,
            known: HashMap::new(),
        }
    }

    fn look(&self, url: &Pinned, wanted: &WantedKey, now: Instant) -> Look {
        let Some(entry) = self.known.get(url) else { return Look::Lacking };
        let good = entry.good.as_ref().filter(|good| good.ends > now);
        let having = good.filter(|good| wanted.is_in(&good.keys));
        if let Some(good) = having.filter(|good| good.until > now) {
            return Look::Known(Ok(good.keys.clone()));
        }
        let rests = entry.rests_until.is_some_and(|until| until > now);
        match (having, good, &entry.failed) {
            (Some(good), ..) if rests => Look::Known(Ok(good.keys.clone())),
            (Some(good), ..) => Look::Old { keys: good.keys.clone(), waits: entry.failed.is_none() },
            (None, _, Some(trouble)) if rests => Look::Known(Err(trouble.clone())),
            // Just fetched, and without this key: nobody but a stranger has it.
            (None, Some(good), None) if rests => Look::Known(Ok(good.keys.clone())),
            (None, ..) => Look::Lacking,
        }
    }

    fn under_way(&self, url: &Pinned) -> Option<Landing<Published>> {
        self.known.get(url)?.fetching().cloned()
    }

    fn begin(&mut self, url: &Pinned, landing: Landing<Published>) {
        // More than this many have settings that were changed in the meantime: those go first.
        if self.known.len() >= self.most && !self.known.contains_key(url) {
            let idle = self.known.iter().filter(|(_, entry)| entry.fetching().is_none());
            if let Some(oldest) = idle.min_by_key(|(_, entry)| entry.rests_until).map(|(url, _)| url.clone())
            {
                self.known.remove(&oldest);
            }
        }
        self.known.entry(url.clone()).or_default().under_way = Some(landing);
    }

    /// Keeps what became of a fetch.
    fn land(&mut self, url: &Pinned, outcome: &Result<Published, Trouble>, now: Instant) {
        let entry = self.known.entry(url.clone()).or_default();
        entry.under_way = None;
        entry.rests_until = Some(now + self.rest);
        entry.failed = outcome.as_ref().err().cloned();
        if let Ok(Published { keys, max_age }) = outcome {
            // A provider that lets nobody keep anything would be asked at every request.
            let said = max_age.unwrap_or(self.good_for).max(self.rest);
            let until = now + said.min(self.good_for);
            entry.good = Some(Good { keys: keys.clone(), until, ends: until + self.stale_for });
        }
    }
}

impl Keyring {
    /// The set at the URL, with the key in it if there is such a one.
    ///
    /// # Errors
    /// It cannot be had now.
    pub(super) async fn find_set(
        &self,
        url: &Pinned,
        wanted: &WantedKey,
        deadline: Instant,
    ) -> Result<Key, Trouble> {
        let (old, landing) = {
            let mut sets = self.shared.sets();
            let old = match sets.look(url, wanted, Instant::now()) {
                Look::Known(outcome) => return outcome,
                Look::Old { keys, waits } => Some((keys, waits)),
                Look::Lacking => None,
            };
            (old, self.begin_set(&mut sets, url))
        };
        match (old, landing) {
            (Some((keys, false)), _) | (Some((keys, _)), Err(_)) => Ok(keys),
            (Some((keys, true)), Ok(landing)) => {
                Ok(landed(landing, deadline).await.map_or(keys, |published| published.keys))
            }
            (None, landing) => landed(landing?, deadline).await.map(|published| published.keys),
        }
    }

    /// How many keys stand at the URL now.
    ///
    /// # Errors
    /// It cannot be fetched, or is no set that can be used.
    pub(crate) async fn count_set(&self, url: &Pinned) -> Result<usize, Trouble> {
        self.shared.fetch_set(url).await.map(|published| published.keys.as_tokens().len())
    }

    /// The fetch of the set, begun if there is none.
    fn begin_set(&self, sets: &mut Sets, url: &Pinned) -> Result<Landing<Published>, Trouble> {
        if let Some(landing) = sets.under_way(url) {
            return Ok(landing);
        }
        // Not counted for a source: strangers who use up what it may fetch would keep it from its provider's new keys.
        let permit = self.shared.admit(None, Purpose::Keys)?;
        let (sender, landing) = watch::channel(None);
        sets.begin(url, landing.clone());
        let (shared, url) = (Arc::clone(&self.shared), url.clone());
        drop(self.tasks.spawn(async move {
            let outcome = shared.fetch_set(&url).await;
            shared.sets().land(&url, &outcome, Instant::now());
            drop(permit);
            // Nobody waits any more: the next request finds it among the sets.
            drop(sender.send(Some(outcome)));
        }));
        Ok(landing)
    }
}

impl Shared {
    fn sets(&self) -> MutexGuard<'_, Sets> {
        self.sets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fetches and reads. What is wrong with the set is the provider's fault, and passes: no request chose its URL.
    async fn fetch_set(&self, url: &Pinned) -> Result<Published, Trouble> {
        let Page { body, max_age } =
            self.fetch(url, Purpose::Keys).await.map_err(|error| Trouble::unavailable(error.to_string()))?;
        match FetchedKeys::read_set(&body) {
            Ok(keys) => Ok(Published { keys, max_age }),
            Err(cause) => {
                self.metrics.fetched(Purpose::Keys.word(), "unfit");
                warn!(%url, cause, "what the provider's URL holds is no key set that can be used");
                Err(Trouble::unavailable(cause))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::config::{Config, Source};
    use crate::error::Code;
    use crate::fixture::{now as clock, received, scheme};
    use crate::verify::{Wanted, wanted};

    const SECOND: Duration = Duration::from_secs(1);
    const HOUR: Duration = Duration::from_secs(3_600);
    const URL: &str = "https://auth.example.com/jwks";
    /// A point of P-256, as everybody can look it up: the generator.
    const X: &str = "axfR8uEsQkf4vOblY6RA8ncDfYEt6zOg9KE5RdiYwpY";
    const Y: &str = "T-NC4v4af5uO5-tKfA-eFivOM1drMV7Oy7ZAaDe_UfU";

    /// An hour, and then as long again while it cannot be fetched.
    fn sets() -> Sets {
        let minimal =
            "postgres.url = \"postgres://h/d\"\nfast_tier = { url = \"redis://h\", prefix = \"t:\" }";
        let mut settings = Config::parse("t.toml", minimal, &|_| None).unwrap().config.keys;
        (settings.cache_ttl, settings.stale_ttl, settings.failure_ttl) = (HOUR, HOUR, 5 * SECOND);
        settings.cached_max = 2;
        Sets::new(&settings)
    }

    fn at(url: &str) -> Pinned {
        Pinned::exact(url).unwrap()
    }

    /// A set with keys of these names.
    fn published(names: &[&str]) -> Published {
        let keys: Vec<_> = names
            .iter()
            .map(|name| json!({ "kty": "EC", "crv": "P-256", "x": X, "y": Y, "kid": name, "use": "sig" }))
            .collect();
        let text = json!({ "keys": keys }).to_string();
        Published { keys: FetchedKeys::read_set(text.as_bytes()).unwrap(), max_age: None }
    }

    fn away() -> Result<Published, Trouble> {
        Err(Trouble { code: Code::KeysUnavailable, cause: "away".to_owned() })
    }

    /// What a token wants that names the key.
    fn named(name: &str) -> WantedKey {
        let toml = format!(
            "kind = \"jwt\"\nsig = {{ from = \"header:x\" }}\nid = []\njwks = {{ url = \"{URL}\" }}\n[jwt]\nalgs = [\"ES256\"]"
        );
        let part = |value: &serde_json::Value| {
            base64::Engine::encode(&base64::engine::general_purpose::URL_SAFE_NO_PAD, value.to_string())
        };
        let token = format!("{}.{}.AAAA", part(&json!({ "alg": "ES256", "kid": name })), part(&json!({})));
        let source = Source::new("s", scheme(&toml), Vec::new());
        match wanted(&received(source, "/", &[("x", token.as_bytes())], ""), clock()) {
            Ok(Wanted::KeySet(url, key)) if url == at(URL) => key,
            other => panic!("{other:?}"),
        }
    }

    /// What is said of the key: known and there, known and not there, known to be away, old and waited for or not, lacking.
    fn look(sets: &Sets, name: &str, now: Instant) -> &'static str {
        match sets.look(&at(URL), &named(name), now) {
            Look::Known(Ok(keys)) if named(name).is_in(&keys) => "there",
            Look::Known(Ok(_)) => "not there",
            Look::Known(Err(_)) => "away",
            Look::Old { waits: true, .. } => "old, waits",
            Look::Old { waits: false, .. } => "old",
            Look::Lacking => "lacking",
        }
    }

    #[test]
    fn a_new_key_is_fetched_when_a_token_names_it_and_an_old_one_goes() {
        let (mut sets, now, url) = (sets(), Instant::now(), at(URL));
        assert_eq!(look(&sets, "a", now), "lacking");
        sets.land(&url, &Ok(published(&["a", "b"])), now);
        assert_eq!(look(&sets, "a", now + HOUR.saturating_sub(SECOND)), "there");
        assert_eq!(look(&sets, "c", now + 6 * SECOND), "lacking");
        sets.land(&url, &Ok(published(&["b", "c"])), now + 7 * SECOND);
        assert_eq!(look(&sets, "c", now + 8 * SECOND), "there");
        assert_eq!(look(&sets, "a", now + 8 * SECOND), "not there", "its provider took it back");
    }

    #[test]
    fn names_that_nobody_has_cause_one_fetch_in_a_while() {
        let (mut sets, now, url) = (sets(), Instant::now(), at(URL));
        sets.land(&url, &Ok(published(&["a"])), now);
        for name in ["x", "y", "z"] {
            assert_eq!(look(&sets, name, now + Duration::from_millis(4_999)), "not there");
        }
        assert_eq!(look(&sets, "x", now + 5 * SECOND), "lacking");
        sets.land(&url, &away(), now + 6 * SECOND);
        assert_eq!(look(&sets, "x", now + 7 * SECOND), "away", "nobody can say whether it is new");
        assert_eq!(look(&sets, "a", now + 7 * SECOND), "there");
        assert_eq!(look(&sets, "x", now + 11 * SECOND), "lacking");
    }

    #[test]
    fn old_keys_go_on_while_their_provider_is_away_and_not_for_ever() {
        let (mut sets, now, url) = (sets(), Instant::now(), at(URL));
        sets.land(&url, &Ok(published(&["a"])), now);
        assert_eq!(look(&sets, "a", now + HOUR), "old, waits", "it may have been taken back");
        sets.land(&url, &away(), now + HOUR);
        assert_eq!(look(&sets, "a", now + HOUR + SECOND), "there");
        assert_eq!(look(&sets, "a", now + HOUR + 5 * SECOND), "old", "fetched beside, and not waited for");
        sets.land(&url, &away(), now + HOUR + HOUR.saturating_sub(SECOND));
        assert_eq!(look(&sets, "a", now + 2 * HOUR), "away");
        assert_eq!(look(&sets, "a", now + 3 * HOUR), "lacking");
        sets.land(&url, &Ok(published(&["a"])), now + 3 * HOUR);
        assert_eq!(look(&sets, "a", now + 3 * HOUR + 10 * SECOND), "there");
        assert_eq!(look(&sets, "x", now + 3 * HOUR + 10 * SECOND), "lacking");
    }

    #[test]
    fn a_set_is_kept_as_long_as_its_provider_says_within_bounds() {
        for (max_age, kept) in [
            (None, HOUR),
            (Some(60 * SECOND), 60 * SECOND),
            (Some(24 * HOUR), HOUR),
            (Some(Duration::ZERO), 5 * SECOND),
        ] {
            let (mut sets, now) = (sets(), Instant::now());
            let said = Ok(Published { max_age, ..published(&["a"]) });
            sets.land(&at(URL), &said, now);
            assert_eq!(
                look(&sets, "a", now + kept.saturating_sub(Duration::from_millis(1))),
                "there",
                "{max_age:?}"
            );
            assert_eq!(look(&sets, "a", now + kept), "old, waits", "{max_age:?}");
        }
    }

    #[test]
    fn sets_of_settings_of_before_are_forgotten_first_and_a_lost_fetch_is_begun_anew() {
        let (mut sets, now, url) = (sets(), Instant::now(), at(URL));
        let (sender, landing) = watch::channel(None);
        sets.begin(&url, landing.clone());
        assert!(sets.under_way(&url).is_some());
        drop(sender);
        assert!(sets.under_way(&url).is_none());
        for (other, later) in [("https://a.example/", 2), ("https://b.example/", 1)] {
            sets.begin(&at(other), landing.clone());
            sets.land(&at(other), &Ok(published(&["a"])), now + later * SECOND);
        }
        sets.begin(&at("https://c.example/"), landing);
        let known: Vec<&str> = ["a", "b", "c"]
            .into_iter()
            .filter(|name| sets.known.contains_key(&at(&format!("https://{name}.example/"))))
            .collect();
        assert_eq!(known, ["a", "c"]);
    }
}
