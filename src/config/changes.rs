//! How settings differ from those of before: names only, never a value.

use std::collections::BTreeSet;

use super::{Config, Http, Secret, Source, Target, TargetKind};
use crate::provider::Key;

/// What is different.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Sources that were not there.
    pub added: Vec<String>,
    /// Sources that are not there any more.
    pub removed: Vec<String>,
    /// Sources of which anything is different, a secret or the scheme included.
    pub changed: Vec<String>,
    /// Targets that are new or gone, or of which anything is different, a secret included.
    pub targets: Vec<String>,
    /// Tables other than sources and targets.
    pub tables: Vec<&'static str>,
}

impl Changes {
    /// From `before` to `now`.
    #[must_use]
    pub fn between(before: &Config, now: &Config) -> Self {
        let mut changes =
            Self { targets: targets(before, now), tables: tables(before, now), ..Self::default() };
        for (name, source) in &now.sources {
            match before.sources.get(name) {
                None => changes.added.push(name.clone()),
                Some(before) if is_same(before, source) => {}
                Some(_) => changes.changed.push(name.clone()),
            }
        }
        let gone = before.sources.keys().filter(|name| !now.sources.contains_key(*name));
        changes.removed = gone.cloned().collect();
        changes
    }
}

fn targets(before: &Config, now: &Config) -> Vec<String> {
    let names: BTreeSet<&String> = before.targets.keys().chain(now.targets.keys()).collect();
    let differs = |name: &&String| match (before.targets.get(*name), now.targets.get(*name)) {
        (Some(before), Some(now)) => !is_same_target(before, now),
        _ => true,
    };
    names.into_iter().filter(differs).cloned().collect()
}

/// As of sources.
fn is_same_target(one: &Target, two: &Target) -> bool {
    let (TargetKind::Http(ours), TargetKind::Http(theirs)) = (&one.kind, &two.kind);
    let Http { url: Secret(url), secrets, headers, payload: _, allow_private: _ } = ours;
    *url == theirs.url.0
        && is_same_keys(secrets, &theirs.secrets)
        && *headers == theirs.headers
        && format!("{one:?}") == format!("{two:?}")
}

fn is_same_keys(ours: &[Key], theirs: &[Key]) -> bool {
    ours.len() == theirs.len() && ours.iter().zip(theirs).all(|(one, two)| one.is_same(two))
}

/// `Debug` shows all that can be typed, but for secrets.
fn is_same(one: &Source, two: &Source) -> bool {
    let keys = |source: &'_ Source| -> Vec<Key> {
        source.keys.iter().chain(source.handshake_secrets.values()).cloned().collect()
    };
    is_same_keys(&keys(one), &keys(two)) && format!("{one:?}") == format!("{two:?}")
}

fn tables(before: &Config, now: &Config) -> Vec<&'static str> {
    fn shown(config: &Config) -> [(&'static str, String); 9] {
        #[rustfmt::skip]
        let Config {
            server, admin, log, postgres, fast_tier, in_flight, retention, keys, work, targets: _, sources: _,
        } = config;
        [
            ("server", format!("{server:?}")),
            ("admin", format!("{admin:?}")),
            ("log", format!("{log:?}")),
            ("postgres", format!("{postgres:?}")),
            ("fast_tier", format!("{fast_tier:?}")),
            ("in_flight", format!("{in_flight:?}")),
            ("retention", format!("{retention:?}")),
            ("keys", format!("{keys:?}")),
            ("work", format!("{work:?}")),
        ]
    }
    let pairs = shown(before).into_iter().zip(shown(now));
    pairs.filter(|((_, before), (_, now))| before != now).map(|((name, _), _)| name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: &str = "postgres.url = \"postgres://h/d\"\nfast_tier.kind = \"memory\"\n";

    fn read(more: &str) -> Config {
        let loaded = Config::parse("t.toml", &format!("{BASE}{more}"), &|_| None);
        loaded.map_err(|problems| super::super::report(&problems)).unwrap().config
    }

    fn source(name: &str, provider: &str, more: &str) -> String {
        format!("source.{name}.provider = \"{provider}\"\nsource.{name}.{more}\n")
    }

    fn changes(before: &str, now: &str) -> String {
        let Changes { added, removed, changed, targets, tables } =
            Changes::between(&read(before), &read(now));
        let targets = if targets.is_empty() { String::new() } else { format!(" {targets:?}") };
        format!("+{added:?} -{removed:?} ~{changed:?}{targets} {tables:?}")
    }

    #[test]
    fn whatever_is_different_is_named_by_its_source() {
        let one = source("a", "stripe", "secrets = [\"the secret\"]");
        assert_eq!(changes(&one, &one), "+[] -[] ~[] []");
        for other in [
            source("a", "stripe", "secrets = [\"the other\"]"),
            source("a", "stripe", "secrets = [\"the secret\", \"the other\"]"),
            source("a", "github", "secrets = [\"the secret\"]"),
            format!("{one}source.a.id_max = 7\n"),
            format!("{one}source.a.ack = {{ status = 202 }}\n"),
            format!("{one}server.body_max = \"2MiB\"\n").replace("server.body_max", "source.a.body_max"),
        ] {
            assert_eq!(changes(&one, &other), "+[] -[] ~[\"a\"] []", "{other}");
        }
        let two = source("b", "gitlab-token", "secrets = [\"the token\"]");
        assert_eq!(changes(&one, &two), "+[\"b\"] -[\"a\"] ~[] []");
        let third = source("b", "gitlab-token", "secrets = [\"the tokeN\"]");
        assert_eq!(changes(&two, &third), "+[] -[] ~[\"b\"] []");
        assert_eq!(changes(&two, &two), "+[] -[] ~[] []");
        let more = format!("{two}server.drain = \"11s\"\nretention.body = \"6d\"\n");
        assert_eq!(changes(&two, &more), "+[] -[] ~[] [\"server\", \"retention\"]");
    }

    #[test]
    fn a_scheme_of_the_file_counts_as_its_source() {
        let scheme = |sign: &str| {
            format!(
                "{}[scheme.own]\nkind = \"hmac\"\nsign = \"{sign}\"\nsig = {{ from = \"header:x-sig\" }}\nid = \"json:/id\"\n",
                source("a", "own", "secrets = [\"the secret\"]")
            )
        };
        assert_eq!(changes(&scheme("{body}"), &scheme("{body}")), "+[] -[] ~[] []");
        assert_eq!(changes(&scheme("{body}"), &scheme("v1.{body}")), "+[] -[] ~[\"a\"] []");
    }

    #[test]
    fn whatever_is_different_of_a_target_is_named() {
        let target = |name: &str, more: &str| {
            format!("[target.{name}]\nkind = \"http\"\nallow_private = true\n{more}\n")
        };
        let url = "url = \"http://10.0.0.1/\"";
        let one = target("t", url);
        assert_eq!(changes(&one, &one), "+[] -[] ~[] []");
        let secret = |text: &str| target("t", &format!("{url}\nsecrets = \"{text}\""));
        let (first, second) = (secret("MDEyMzQ1Njc4OWFiY2RlZg"), secret("MDEyMzQ1Njc4OWFiY2RlZw"));
        let header = |value: &str| target("t", &format!("{url}\nheaders = {{ a = \"{value}\" }}"));
        for (before, now) in [
            (&one, &target("t", "url = \"http://10.0.0.1/x\"")),
            (&one, &target("t", &format!("{url}\nrate = 7"))),
            (&one, &first),
            (&first, &second),
            (&header("x"), &header("y")),
            (&one, &String::new()),
            (&String::new(), &one),
        ] {
            assert_eq!(changes(before, now), "+[] -[] ~[] [\"t\"] []", "{before}{now}");
        }
        assert_eq!(changes(&one, &target("u", url)), "+[] -[] ~[] [\"t\", \"u\"] []");
    }
}
