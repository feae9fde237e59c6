//! The rule by which a source makes its events' keys, as the database knows it.
//!
//! Invariant: no event is recorded under a rule that is not the stored one, unless the operator accepted the change:
//! under another key, an event that took effect already would take effect again. No key and no event is seen here.

use std::fmt;

use ring::digest::{SHA256, digest};
use tokio_postgres::types::Type;
use tokio_postgres::{Client, Error, Row};

use crate::config::{Config, OnMismatch, Source};

/// A source's key rule, as the settings have it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyRule {
    /// The source.
    pub source: String,
    /// All that fixes its keys, in a form that says one thing only: quoted, in one order.
    pub text: String,
}

impl KeyRule {
    /// That of a source. Secrets, clocks and limits are no part of it.
    #[must_use]
    pub fn of(source: &Source) -> Self {
        let mut text = format!("{}, scope = {:?}", source.scheme.id_places(), source.scope);
        if source.on_mismatch == OnMismatch::Accept {
            text = format!("{text}, and the body: {}", source.scheme.digest_rule());
        }
        Self { source: source.name.to_string(), text }
    }

    /// Those of all sources, by name.
    #[must_use]
    pub fn of_all(config: &Config) -> Vec<Self> {
        config.sources.values().map(|source| Self::of(source)).collect()
    }

    /// Equal for equal rules only.
    #[must_use]
    pub fn fingerprint(&self) -> Vec<u8> {
        digest(&SHA256, self.text.as_bytes()).as_ref().to_vec()
    }
}

/// A source whose rule is another than the stored one.
#[derive(Debug, PartialEq, Eq)]
pub struct Change {
    source: String,
    stored: String,
    since: String,
    now: String,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { source, stored, since, now } = self;
        write!(f, "source {source}: the key rule is `{now}`; since {since} it was `{stored}`")
    }
}

/// All sources whose rules are not the stored ones.
#[derive(Debug, PartialEq, Eq)]
pub struct Changes(Vec<Change>);

impl fmt::Display for Changes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|change| writeln!(f, "{change}"))?;
        f.write_str(
            "new keys would apply old events again. Restore the old rule, or give the source a new name; or accept \
             that: `hapax migrate --config FILE",
        )?;
        self.0.iter().try_for_each(|change| write!(f, " --accept-key-change {}", change.source))?;
        f.write_str("`")
    }
}

/// What comparing came to.
#[derive(Debug, Default)]
pub struct Compared {
    /// Sources without a stored rule.
    pub new: Vec<KeyRule>,
    changed: Vec<Change>,
}

impl Compared {
    /// The sources that are new, if no rule changed.
    ///
    /// # Errors
    /// The changes.
    pub fn unchanged(self) -> Result<Vec<KeyRule>, Changes> {
        if self.changed.is_empty() { Ok(self.new) } else { Err(Changes(self.changed)) }
    }
}

/// Compares rules with the stored ones. Writes nothing.
///
/// # Errors
/// What Postgres says.
pub async fn compare(client: &Client, rules: &[KeyRule]) -> Result<Compared, Error> {
    let stored = client.query(include_str!("../../sql/queries/key_rules.sql"), &[]).await?;
    let mut compared = Compared::default();
    for rule in rules {
        match stored.iter().find(|row| row.get::<_, &str>("source") == rule.source) {
            None => compared.new.push(rule.clone()),
            Some(row) if row.get::<_, &[u8]>("fingerprint") == rule.fingerprint() => {}
            Some(row) => compared.changed.push(change(rule, row)),
        }
    }
    Ok(compared)
}

fn change(rule: &KeyRule, row: &Row) -> Change {
    let KeyRule { source, text } = rule.clone();
    Change { source, stored: row.get("rule"), since: row.get("since"), now: text }
}

/// Stores the rules of sources that have none, if nobody else has by now: compare again to see whose are stored.
/// Dropping it leaves all of them stored, or none.
///
/// # Errors
/// What Postgres says.
pub async fn store_new(client: &Client, rules: &[KeyRule]) -> Result<(), Error> {
    write(client, include_str!("../../sql/queries/store_key_rules.sql"), rules).await.map(drop)
}

/// Stores the rules in place of what is stored; returns how many were others. Dropping it replaces all of them, or none.
///
/// # Errors
/// What Postgres says.
pub async fn replace(client: &Client, rules: &[KeyRule]) -> Result<u64, Error> {
    write(client, include_str!("../../sql/queries/replace_key_rules.sql"), rules).await
}

async fn write(client: &Client, statement: &str, rules: &[KeyRule]) -> Result<u64, Error> {
    let sources: Vec<&str> = rules.iter().map(|rule| rule.source.as_str()).collect();
    let fingerprints: Vec<Vec<u8>> = rules.iter().map(KeyRule::fingerprint).collect();
    let texts: Vec<&str> = rules.iter().map(|rule| rule.text.as_str()).collect();
    let types = [Type::TEXT_ARRAY, Type::BYTEA_ARRAY, Type::TEXT_ARRAY];
    let statement = client.prepare_typed(statement, &types).await?;
    client.execute(&statement, &[&sources, &fingerprints, &texts]).await
}
