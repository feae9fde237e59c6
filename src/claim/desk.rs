//! What operators' commands ask the fast tier, and what they have it forget.
//!
//! Invariant: only a done marker is deleted, and whoever deletes it has changed or is about to change the event in Postgres.
//! Between reading it and deleting it, its time may run out and a lease take its place: then two deliveries ask Postgres,
//! which decides.

use std::time::Duration;

use deadpool_redis::Connection;
use redis::{FromRedisValue, Pipeline, Value};
use tokio::time::timeout;

use super::marker::{self, Marker};
use super::redis::{CONNECT_TIMEOUT, connect_once, redis_key};
use crate::config::{self, FastTierKind};
use crate::generation::Generation;
use crate::identify::EventKey;

/// A connection to the fast tier for a command.
pub struct Desk {
    connection: Connection,
    prefix: String,
}

impl std::fmt::Debug for Desk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Desk").field("prefix", &self.prefix).finish_non_exhaustive()
    }
}

/// What stands for an event.
#[derive(Debug, PartialEq, Eq)]
pub enum Stands {
    /// Nothing.
    Nothing,
    /// A delivery is being recorded, or its process died.
    Lease,
    /// The event was committed in that generation.
    Done(Generation),
    /// A value that says nothing.
    Unknown,
}

/// What stands for an event, and until when.
#[derive(Debug, PartialEq, Eq)]
pub struct Seen {
    /// The Redis key.
    pub key: String,
    /// What stands there.
    pub stands: Stands,
    /// The value, where it is text.
    pub value: Option<String>,
    /// How long it stands; `None`: for ever, or nothing stands there.
    pub left: Option<Duration>,
}

impl Desk {
    /// Connects; `None` where the settings have no Redis.
    ///
    /// # Errors
    /// Why Redis cannot be used.
    pub async fn open(settings: &config::FastTier) -> Result<Option<Self>, String> {
        let FastTierKind::Redis(redis) = &settings.kind else { return Ok(None) };
        let connection = connect_once(redis).await?;
        Ok(Some(Self { connection, prefix: redis.prefix.clone() }))
    }

    /// What stands at a key of an event. There may be two of them: see [`EventKey::guarded`].
    ///
    /// # Errors
    /// What Redis says.
    pub async fn look(&mut self, event: &EventKey) -> Result<Seen, String> {
        let key = redis_key(&self.prefix, event);
        let mut pipe = redis::pipe();
        // MGET says nil to a key of another type, where GET fails.
        pipe.cmd("MGET").arg(&key).cmd("PTTL").arg(&key).cmd("EXISTS").arg(&key);
        let (values, left_ms, exists): (Vec<Option<Vec<u8>>>, i64, bool) = self.ask(&pipe).await?;
        let value = values.into_iter().next().flatten();
        let stands = match value.as_deref().map(marker::read) {
            Some(Marker::Lease) => Stands::Lease,
            Some(Marker::Done { generation, .. }) => Stands::Done(generation),
            Some(Marker::Unknown) => Stands::Unknown,
            None if exists => Stands::Unknown,
            None => Stands::Nothing,
        };
        let value = value.and_then(|value| String::from_utf8(value).ok());
        Ok(Seen { key, stands, value, left: u64::try_from(left_ms).ok().map(Duration::from_millis) })
    }

    /// Deletes the done markers of events, so that the next delivery of each asks Postgres; returns how many there were.
    ///
    /// # Errors
    /// What Redis says; then some may stand still.
    pub async fn forget(&mut self, events: &[EventKey]) -> Result<usize, String> {
        let keys: Vec<String> = events
            .iter()
            .flat_map(|event| [*event, event.guarded()])
            .map(|key| redis_key(&self.prefix, &key))
            .collect();
        if keys.is_empty() {
            return Ok(0);
        }
        let mut read = redis::pipe();
        for key in &keys {
            read.cmd("MGET").arg(key);
        }
        let values: Vec<Vec<Option<Vec<u8>>>> = self.ask(&read).await?;
        let is_done = |value: &Vec<Option<Vec<u8>>>| {
            let value = value.first().and_then(Option::as_deref);
            matches!(value.map(marker::read), Some(Marker::Done { .. }))
        };
        let done: Vec<&String> =
            keys.iter().zip(&values).filter(|(_, value)| is_done(value)).map(|(key, _)| key).collect();
        let mut delete = redis::pipe();
        for key in &done {
            delete.cmd("DEL").arg(*key);
        }
        if !done.is_empty() {
            self.ask::<Vec<Value>>(&delete).await?;
        }
        Ok(done.len())
    }

    async fn ask<T: FromRedisValue>(&mut self, pipe: &Pipeline) -> Result<T, String> {
        match timeout(CONNECT_TIMEOUT, pipe.query_async(&mut self.connection)).await {
            Ok(answer) => answer.map_err(|error| error.to_string()),
            Err(_elapsed) => Err(format!("no answer within {CONNECT_TIMEOUT:?}")),
        }
    }
}
