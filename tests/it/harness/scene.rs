//! A migrated database with a business table, a gateway's settings, signed events, and the central assertion.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bytes::Bytes;
use hapax::identify::EventKey;
use hapax::provider::{Key, Scheme};
use hapax::sign::{Draft, sign};
use http::{HeaderMap, Method};
use tokio_postgres::Client as Database;

use super::gateway::{Gateway, Start};
use super::stores::{self, Fresh, Template};
use super::wait::eventually;

/// The secret of every source of a scene.
pub(crate) const SECRET: &str = "whsec_a secret for tests only";

/// The business side: one row in `fx.effect` for each time that an effect ran. Nothing there is unique, so that a
/// doubled effect is seen. The body's `do` member says what the effect does:
/// nothing special | `raise` | `reject` (HX001) | `sleep` (the body's `seconds`) | `wait` (for advisory lock 7) |
/// `wait_raise`.
pub(crate) const BUSINESS: &str = "
    create schema fx;
    create table fx.effect (source text not null, event_id text not null, at timestamptz not null default clock_timestamp());
    create function fx.apply(e hapax.event) returns void language plpgsql as $$
    declare
        event constant jsonb := hapax.json(e);
    begin
        case event->>'do'
            when 'raise' then raise exception 'the effect fails';
            when 'reject' then raise exception 'never' using errcode = 'HX001';
            when 'sleep' then perform pg_sleep((event->>'seconds')::float8);
            when 'wait' then perform pg_advisory_xact_lock_shared(7);
            when 'wait_raise' then perform pg_advisory_xact_lock_shared(7); raise exception 'the effect fails late';
            else null;
        end case;
        insert into fx.effect (source, event_id) values (e.source, e.event_id);
    end
    $$;
    create function fx.apply_other(e hapax.event) returns void language plpgsql as $$
    begin perform fx.apply(e); end $$;
";

/// Time-outs so long that only what the test does can end a wait.
pub(crate) const PATIENT: [&str; 6] = [
    "postgres.statement_timeout = \"14s\"",
    "postgres.record_timeout = \"15s\"",
    "postgres.commit_timeout = \"60s\"",
    "server.deadline = \"19s\"",
    "server.drain = \"20s\"",
    "fast_tier.lease = \"60s\"",
];

static TEMPLATE: Template = Template::new("scene");

/// Stores that are ready for a gateway.
#[derive(Debug)]
pub(crate) struct Scene {
    /// URLs, database, Redis prefix.
    pub(crate) stores: Fresh,
}

/// What is in the stores about events.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Found {
    /// Ledger rows by event id.
    pub(crate) rows: BTreeMap<String, i64>,
    /// Effects by event id.
    pub(crate) effects: BTreeMap<String, i64>,
}

impl Scene {
    /// A database of its own in the shared Postgres, a prefix of its own in the shared Redis.
    pub(crate) async fn new() -> Result<Self> {
        Ok(Self { stores: TEMPLATE.fresh(prepare).await? })
    }

    /// On stores of the test's own; the database is made here.
    pub(crate) async fn on(postgres: &hapax::dev::Postgres, redis_url: String) -> Result<Self> {
        let database = "scene".to_owned();
        postgres.create_database(&database)?;
        let postgres_url = postgres.url(&database);
        prepare(postgres_url.clone()).await?;
        Ok(Self { stores: Fresh { database, postgres_url, redis_url, redis_prefix: "scene:".to_owned() } })
    }

    /// Settings with free ports and the sources `stripe` (effect `fx.apply`), `other` (stripe's scheme, effect
    /// `fx.apply_other`) and `plain` (stripe's scheme, no effect). `more` is inserted as it is, after a table
    /// header of yours; keys that you give in `overrides` (`"postgres.lock_timeout = \"1s\""`) replace ours.
    pub(crate) fn settings(&self, overrides: &[&str], more: &str) -> String {
        let Fresh { postgres_url, redis_url, redis_prefix, .. } = &self.stores;
        let mut keys: BTreeMap<String, String> = BTreeMap::new();
        let ours = [
            "server.listen = \"127.0.0.1:0\"".to_owned(),
            "admin.listen = \"127.0.0.1:0\"".to_owned(),
            format!("postgres.url = \"{postgres_url}\""),
            "fast_tier.kind = \"redis\"".to_owned(),
            format!("fast_tier.url = \"{redis_url}\""),
            format!("fast_tier.prefix = \"{redis_prefix}\""),
            // The tests share one machine with each other: slow is not wrong.
            "fast_tier.timeout = \"500ms\"".to_owned(),
        ];
        for line in ours.iter().map(String::as_str).chain(overrides.iter().copied()) {
            let (key, value) = line.split_once('=').unwrap_or((line, ""));
            keys.insert(key.trim().to_owned(), value.trim().to_owned());
        }
        for (source, effect) in [("stripe", "fx.apply"), ("other", "fx.apply_other"), ("plain", "none")] {
            let of = |key: &str| format!("source.{source}.{key}");
            keys.entry(of("provider")).or_insert_with(|| "\"stripe\"".to_owned());
            keys.entry(of("secrets")).or_insert_with(|| format!("[\"{SECRET}\"]"));
            keys.entry(of("effect")).or_insert_with(|| format!("\"{effect}\""));
        }
        // An empty value leaves the key out.
        keys.retain(|_, value| !value.is_empty());
        let mut text = String::new();
        for (key, value) in keys {
            writeln!(text, "{key} = {value}").unwrap_or_default();
        }
        text + more
    }

    /// A gateway with these settings.
    pub(crate) async fn gateway(&self, overrides: &[&str]) -> Result<Gateway> {
        Start::new(self.settings(overrides, "")).start().await
    }

    /// A connection to the database.
    pub(crate) async fn database(&self) -> Result<Database> {
        stores::connect(&self.stores.postgres_url).await
    }

    /// A connection to Redis.
    pub(crate) async fn redis(&self) -> Result<redis::aio::MultiplexedConnection> {
        stores::connect_redis(&self.stores.redis_url).await
    }

    /// Holds advisory lock 7, for which the effect of a body with `wait` waits, until it is dropped or let go.
    pub(crate) async fn hold(&self) -> Result<Database> {
        let holder = self.database().await?;
        holder.execute("select pg_advisory_lock(7)", &[]).await?;
        Ok(holder)
    }

    /// Waits until so many effects wait for advisory lock 7; returns the process ids of their sessions.
    pub(crate) async fn waiting(&self, effects: usize) -> Result<Vec<i32>> {
        let database = self.database().await?;
        let query = "select pid from pg_locks where locktype = 'advisory' and not granted and objid = 7 \
                     and classid = 0 and database = (select oid from pg_database where datname = current_database())";
        let waiting = async || {
            let rows = database.query(query, &[]).await.ok()?;
            (rows.len() >= effects).then(|| rows.iter().map(|row| row.get(0)).collect())
        };
        eventually(Duration::from_secs(60), waiting).await.context("no effect waits")
    }

    /// Where the event stands in Redis.
    pub(crate) fn redis_key(&self, source: &str, id: &str) -> String {
        let key = EventKey::of(source, "-", id);
        format!("{}{}", self.stores.redis_prefix, URL_SAFE_NO_PAD.encode(key.0))
    }

    /// All Redis keys of this scene's events, with their values (of strings).
    pub(crate) async fn markers(&self) -> Result<BTreeMap<String, Option<String>>> {
        let mut redis = self.redis().await?;
        let pattern = format!("{}*", self.stores.redis_prefix);
        let keys: Vec<String> = redis::cmd("KEYS").arg(pattern).query_async(&mut redis).await?;
        let mut markers = BTreeMap::new();
        for key in keys.into_iter().filter(|key| !key.ends_with(":probe")) {
            let value = redis::cmd("GET").arg(&key).query_async(&mut redis).await.unwrap_or_default();
            markers.insert(key, value);
        }
        Ok(markers)
    }

    /// What the database says of all events.
    pub(crate) async fn found(&self) -> Result<Found> {
        let database = self.database().await?;
        let count = async |table: &str| -> Result<BTreeMap<String, i64>> {
            let query = format!("select event_id, count(*) from {table} group by event_id");
            let rows = database.query(&query, &[]).await?;
            Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
        };
        Ok(Found { rows: count("hapax.events").await?, effects: count("fx.effect").await? })
    }

    /// The central assertion: for every event at most one effect, and exactly one row and one effect if any of its
    /// deliveries was answered 2xx. `answered` are the ids that were.
    pub(crate) async fn assert_once(&self, answered: impl IntoIterator<Item = &String>) -> Result<Found> {
        let found = self.found().await?;
        for (id, effects) in &found.effects {
            ensure!(*effects == 1, "event {id} took effect {effects} times");
            ensure!(found.rows.contains_key(id), "event {id} took effect and is not in the ledger");
        }
        for id in answered {
            ensure!(found.rows.get(id) == Some(&1), "event {id} was answered 2xx and is not in the ledger");
            ensure!(found.effects.get(id) == Some(&1), "event {id} was answered 2xx and took no effect");
        }
        Ok(found)
    }
}

async fn prepare(url: String) -> Result<()> {
    let mut database = stores::connect(&url).await?;
    hapax::db::migrate(&mut database).await?;
    Ok(database.batch_execute(BUSINESS).await?)
}

/// A body in Stripe's form with this id, and with `more` members (`"\"do\":\"raise\""`), each after a comma.
pub(crate) fn event(id: &str, more: &str) -> Bytes {
    let comma = if more.is_empty() { "" } else { "," };
    format!(r#"{{"id":"{id}","object":"event","type":"test.happened","data":{{}}{comma}{more}}}"#).into()
}

/// Signs a body as Stripe does, now, for a source of a scene.
pub(crate) fn signed(body: &Bytes) -> Result<HeaderMap> {
    signed_as("stripe", SECRET, body, None)
}

/// Signs a body by a preset, now.
pub(crate) fn signed_as(preset: &str, secret: &str, body: &Bytes, id: Option<&str>) -> Result<HeaderMap> {
    let scheme = Scheme::preset(preset).context("no such preset")?;
    let key: Key = scheme.key(secret).map_err(anyhow::Error::msg)?;
    let now = jiff::Timestamp::now();
    let draft = Draft { method: &Method::POST, public_url: None, path: "/in/x", body, id, now };
    let signed = sign(&scheme, &key, &draft).map_err(anyhow::Error::msg)?;
    Ok(signed.headers.into_iter().collect())
}

/// An answer, reduced to what the contract is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Answer {
    /// The status code.
    pub(crate) status: u16,
    /// `Hapax-Outcome`.
    pub(crate) outcome: String,
    /// `Retry-After` in seconds.
    pub(crate) retry_after: Option<u64>,
    /// `Hapax-Rearmed`
    pub(crate) rearmed: bool,
}

impl Answer {
    /// Whether it says that the event is safe.
    pub(crate) fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }
}

/// Signs and delivers a body once, on a connection of its own.
pub(crate) async fn deliver(to: SocketAddr, source: &str, body: &Bytes) -> Result<Answer> {
    deliver_on(&mut super::client::Client::new(to), source, body).await
}

/// Signs and delivers a body once, on a kept connection.
pub(crate) async fn deliver_on(
    client: &mut super::client::Client,
    source: &str,
    body: &Bytes,
) -> Result<Answer> {
    let headers = signed(body)?;
    let headers: Vec<(&str, &str)> =
        headers.iter().filter_map(|(name, value)| Some((name.as_str(), value.to_str().ok()?))).collect();
    let response = client.post(&format!("/in/{source}"), &headers, body.clone()).await?;
    let header = |name: &str| response.headers.get(name).and_then(|value| value.to_str().ok());
    Ok(Answer {
        status: response.status.as_u16(),
        outcome: header("hapax-outcome").unwrap_or_default().to_owned(),
        retry_after: header("retry-after").and_then(|seconds| seconds.parse().ok()),
        rearmed: header("hapax-rearmed") == Some("true"),
    })
}
