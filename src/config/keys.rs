//! `[keys]`, and what a source says of keys that its provider publishes: `certificates`, `jwks`, `senders`.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use rustls::pki_types::CertificateDer;

use super::read::{TIMEOUT, count};
use super::secret::Secrets;
use crate::provider::jwt::KeySet;
use crate::provider::pin::Pinned;
use crate::provider::{PublicKey, Scheme, certificates};
use crate::settings::Table;

/// Most senders of one source: each costs a comparison, also for strangers.
const SENDERS_MAX: usize = 256;

/// Most bytes of a fetched certificate with its chain, or of a key set.
const BODY_MAX: usize = 1 << 20;

/// Longest time for which keys are kept.
const KEPT_MAX: Duration = Duration::from_secs(30 * 86_400);

/// `[keys]`: fetching what providers publish.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Keys {
    /// `ca = []`: authorities that are trusted beside those of this machine.
    pub ca: Vec<CertificateDer<'static>>,
    /// `resolve = {}`: where a host is reached, in place of what its name resolves to.
    pub resolve: BTreeMap<String, SocketAddr>,
    /// `fetch_timeout = "2s"`: for one fetch, from connecting to the last byte.
    pub fetch_timeout: Duration,
    /// `body_max = "64KiB"`: most bytes of what is fetched.
    pub body_max: usize,
    /// `cache_ttl = "24h"`: how long it is used again.
    pub cache_ttl: Duration,
    /// `stale_ttl = "7d"`: how much longer the keys of a set are used while it cannot be fetched anew.
    pub stale_ttl: Duration,
    /// `cached_max = 256`: most URLs that are remembered, of those that gave a key, and again of those that did not.
    pub cached_max: usize,
    /// `failure_ttl = "5s"`: how long a URL that gave no key is not asked again.
    pub failure_ttl: Duration,
    /// `fetches_max = 8`: fetches at once, over all sources.
    pub fetches_max: usize,
    /// `fetches_per_minute = 60`: fetches that one source can cause.
    pub fetches_per_minute: usize,
}

impl Keys {
    pub(super) fn read(table: &mut Table, secrets: &Secrets<'_>) -> Self {
        Self {
            ca: authorities(table, secrets),
            resolve: resolve(table),
            fetch_timeout: table.duration_within("fetch_timeout", TIMEOUT).unwrap_or(Duration::from_secs(2)),
            body_max: table.size_within("body_max", 1..=BODY_MAX).unwrap_or(64 << 10),
            cache_ttl: table
                .duration_within("cache_ttl", Duration::from_secs(1)..=KEPT_MAX)
                .unwrap_or(Duration::from_secs(86_400)),
            stale_ttl: table
                .duration_within("stale_ttl", Duration::from_millis(1)..=KEPT_MAX)
                .unwrap_or(Duration::from_secs(7 * 86_400)),
            cached_max: count(table, "cached_max", 1..=100_000, 256),
            failure_ttl: table.duration_within("failure_ttl", TIMEOUT).unwrap_or(Duration::from_secs(5)),
            fetches_max: count(table, "fetches_max", 1..=1_000, 8),
            fetches_per_minute: count(table, "fetches_per_minute", 1..=100_000, 60),
        }
    }
}

fn authorities(table: &mut Table, secrets: &Secrets<'_>) -> Vec<CertificateDer<'static>> {
    let read = |pem: &str| certificates(pem.as_bytes());
    let found = files(table, "ca", secrets, read).into_iter();
    found.map(|(der, _)| der).collect()
}

/// What is in the files that a key names; what is wrong with one is reported at its place.
fn files<T>(
    table: &mut Table,
    key: &'static str,
    secrets: &Secrets<'_>,
    read: impl Fn(&str) -> Result<Vec<T>, String>,
) -> Vec<T> {
    let mut found = Vec::new();
    for path in table.located_texts(key).unwrap_or_default() {
        let told = |problem: String| format!("file {:?}: {problem}", path.value);
        match secrets.pem(&path.value).and_then(|pem| read(&pem).map_err(told)) {
            Ok(some) => found.extend(some),
            Err(problem) => table.error_at(key, &path.place, problem),
        }
    }
    found
}

fn resolve(table: &mut Table) -> BTreeMap<String, SocketAddr> {
    const KEY: &str = "resolve";
    let mut found = BTreeMap::new();
    for (host, text) in table.named_texts(KEY) {
        if let Ok(address) = text.value.parse() {
            found.insert(host, address);
        } else {
            let wanted = "give an IP address and a port: \"127.0.0.1:8443\" or \"[::1]:8443\"";
            table.error_at(KEY, &text.place, format!("{:?} is no address: {wanted}", text.value));
        }
    }
    found
}

/// `certificates`: where there are any, none is fetched.
pub(super) fn local_keys(
    table: &mut Table,
    secrets: &Secrets<'_>,
    scheme: Option<&Scheme>,
) -> Vec<PublicKey> {
    const KEY: &str = "certificates";
    let takes = scheme.is_none_or(Scheme::has_certificates);
    let read = |pem: &str| scheme.map_or_else(|| Ok(Vec::new()), |scheme| scheme.local_keys(pem));
    if takes {
        return files(table, KEY, secrets, read);
    }
    if table.located_texts(KEY).is_some_and(|paths| !paths.is_empty()) {
        table.error(KEY, "means nothing with this provider, whose requests name no certificate: remove it");
    }
    Vec::new()
}

/// `jwks`: where the keys of the source's tokens are published. The scheme's URL, if that is for everybody.
pub(super) fn key_set(table: &mut Table, scheme: Option<&Scheme>) -> Option<Pinned> {
    const KEY: &str = "jwks";
    let written = table.text(KEY).filter(|url| !url.is_empty());
    let (Some(url), Some(scheme)) = (&written, scheme) else {
        return scheme.and_then(Scheme::key_set).and_then(KeySet::url).cloned();
    };
    match scheme.key_set() {
        None => {
            table.error(KEY, "means nothing with this provider, which publishes no key set: remove it");
            None
        }
        Some(KeySet::At(known)) => {
            let why = "the same for everybody; remove it, or make a [scheme.NAME] with another URL";
            table.error(KEY, format!("cannot be: this provider's key set is at {known}, {why}"));
            Some(known.clone())
        }
        Some(KeySet::Ask) => match Pinned::exact(url) {
            Ok(url) => {
                if table.has("secrets") {
                    table.warning(KEY, "has no effect: the source has secrets, and then nothing is fetched");
                }
                Some(url)
            }
            Err(why) => {
                let wanted = "give the URL of the key set in full, e.g. \"https://auth.example.com/.well-known/jwks.json\"";
                table.error(KEY, format!("{url:?} {why}: {wanted}"));
                None
            }
        },
    }
}

/// `senders`: whoever makes such a provider sign has an account there, and so has everybody who wants one.
pub(super) fn senders(table: &mut Table, scheme: Option<&Scheme>) -> Option<Vec<String>> {
    const KEY: &str = "senders";
    let found = table.texts(KEY).unwrap_or_default();
    let place = scheme.map(Scheme::sender)?;
    let wanted = place.is_some();
    match place {
        Some(place) if found.is_empty() => {
            let message = format!(
                "no sender, and this provider signs for everybody who has an account there: list what may stand at \
                 {place}, for instance the ARNs of your topics"
            );
            table.missing(KEY, message);
        }
        None if !found.is_empty() => {
            table.error(KEY, "means nothing with this provider, which signs for one account: remove it");
        }
        _ => {}
    }
    if found.len() > SENDERS_MAX {
        table.error(KEY, format!("{} senders, and {SENDERS_MAX} are the limit", found.len()));
    }
    wanted.then_some(found)
}

#[cfg(test)]
mod tests {
    use crate::config::{Config, report};

    const BASE: &str =
        "postgres.url = \"postgres://h/d\"\nfast_tier = { url = \"redis://h\", prefix = \"t:\" }\n";
    const TOPIC: &str = "source.a.senders = [\"arn:t\"]";

    /// All that is said of a source of the provider with these lines.
    fn said(provider: &str, more: &[&str]) -> String {
        let text = format!("{BASE}source.a.provider = \"{provider}\"\n{}", more.join("\n"));
        match Config::parse("t.toml", &text, &|_| None) {
            Ok(loaded) => report(&loaded.warnings),
            Err(problems) => report(&problems),
        }
    }

    #[test]
    fn a_provider_that_signs_for_everybody_needs_senders() {
        assert_eq!(said("sns", &[TOPIC]), "");
        for (provider, more, wanted) in [
            ("sns", vec![], "error: source.a.senders: no sender, and this provider signs for everybody"),
            ("sns", vec!["source.a.senders = []"], "list what may stand at json:/TopicArn"),
            (
                "sns",
                vec![TOPIC, "source.a.secrets = \"x\""],
                "source.a.secrets: mean nothing with this provider",
            ),
            ("stripe", vec!["source.a.secrets = \"x\"", TOPIC], "source.a.senders: means nothing"),
            ("paypal", vec![], "source.a.secrets: no secret"),
        ] {
            let said = said(provider, &more);
            assert!(said.contains(wanted), "{provider} {more:?}: {said}");
        }
    }

    #[test]
    fn a_key_set_stands_where_the_provider_or_the_source_says() {
        const CLAIMS: &str = "source.a.claims = { aud = \"x\", email = \"y\" }";
        const URL: &str = "source.a.jwks = \"https://auth.example.com/.well-known/jwks.json\"";
        const SECRET: &str = "source.a.secrets = \"x\"";
        let google = said("google-pubsub", &[CLAIMS]);
        assert!(!google.contains("error") && !google.contains("secret"), "{google}");
        assert_eq!(said("truelayer", &[]), "");
        assert_eq!(said("fusionauth", &[URL]), "");
        for (provider, more, wanted) in [
            (
                "google-pubsub",
                vec![CLAIMS, URL],
                "error: source.a.jwks: cannot be: this provider's key set is at https://",
            ),
            ("stripe", vec![SECRET, URL], "error: source.a.jwks: means nothing with this provider"),
            (
                "vonage",
                vec![],
                "source.a.secrets: no secret, and without one anybody could send events: give one or a list",
            ),
            ("fusionauth", vec![], "; or jwks, the URL of the provider's key set"),
            ("fusionauth", vec![SECRET, URL], "warning: source.a.jwks: has no effect"),
            (
                "fusionauth",
                vec!["source.a.jwks = \"http://a.example/\""],
                "does not start with https://: give the URL",
            ),
            (
                "fusionauth",
                vec!["source.a.jwks = \"https://a.example:9011/x\""],
                "another port than 443: give",
            ),
            (
                "fusionauth",
                vec![URL, "keys.fetch_timeout = \"5s\""],
                "error: keys.fetch_timeout: keys.fetch_timeout (5s) must",
            ),
            ("fusionauth", vec![URL, "keys.stale_ttl = \"31d\""], "keys.stale_ttl"),
        ] {
            let said = said(provider, &more);
            assert!(said.contains(wanted), "{provider} {more:?}: {said}");
        }
        assert_eq!(said("fusionauth", &[SECRET, "keys.fetch_timeout = \"5s\""]), "", "nothing is fetched");
    }

    #[test]
    fn what_is_wrong_with_files_addresses_and_times_is_said() {
        for (more, wanted) in [
            ("keys.ca = [\"/absent.pem\"]", "error: keys.ca[0]: file \"/absent.pem\" cannot be read"),
            ("keys.ca = [\"Cargo.toml\"]", "keys.ca[0]: file \"Cargo.toml\": there is no certificate in it"),
            (
                "source.a.certificates = [\"Cargo.toml\"]",
                "source.a.certificates[0]: file \"Cargo.toml\": there is no",
            ),
            (
                "keys.resolve = { \"h\" = \"localhost\" }",
                "keys.resolve.h: \"localhost\" is no address: give an IP",
            ),
            ("keys.fetch_timout = \"1s\"", "did you mean \"fetch_timeout\"?"),
            ("keys.fetches_max = 0", "keys.fetches_max: 0 is out of range"),
            (
                "keys.fetch_timeout = \"5s\"",
                "error: keys.fetch_timeout: keys.fetch_timeout (5s) must be below server.deadline",
            ),
        ] {
            let said = said("sns", &[TOPIC, more]);
            assert!(said.contains(wanted), "{more}: {said}");
        }
        let stripe = [
            "source.a.secrets = \"x\"",
            "keys.fetch_timeout = \"5s\"",
            "source.a.certificates = [\"x.pem\"]",
        ];
        assert_eq!(said("stripe", &stripe[..2]), "", "nothing is fetched for it");
        assert!(said("stripe", &stripe).contains("source.a.certificates: means nothing with this provider"));
    }
}
