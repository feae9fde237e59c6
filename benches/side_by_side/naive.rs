//! The receiver that one would write: a transaction for each request. Statements are prepared once per connection, the
//! body is stored as raw bytes. At its best (`pipelined`) BEGIN travels with the first statement and COMMIT with the
//! last.

use anyhow::{Context as _, Result};
use deadpool_postgres::{Manager, ManagerConfig, Object, Pool, RecyclingMethod, Runtime};
use futures_util::join;
use hapax::identify::Event;
use redis::aio::MultiplexedConnection;
use serde::{Deserialize, Serialize};
use tokio_postgres::NoTls;
use tokio_postgres::types::ToSql;

const INSERT: &str = "insert into naive.event (event_id, body) values ($1, $2) on conflict do nothing";
const EFFECT: &str = "insert into fx.payment (event_id, event_type) values ($1, $2)";

/// Where ids are claimed.
enum Claims {
    /// A connection of a pool for each request, which the pool asks for a sign of life first.
    Pooled(deadpool_redis::Pool),
    /// One connection that all requests share.
    Shared(deadpool_redis::Connection),
}

/// As long as the gateway remembers.
const CLAIM_SECONDS: u64 = 24 * 3600;

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Spec {
    pub(crate) postgres: String,
    /// Asked first, if given.
    pub(crate) redis: Option<String>,
    pub(crate) connections: usize,
    /// At its best: two round trips instead of four, one connection to Redis for all.
    pub(crate) pipelined: bool,
}

pub(crate) struct Naive {
    pool: Pool,
    claims: Option<Claims>,
    pipelined: bool,
}

impl Naive {
    pub(crate) async fn start(spec: &Spec) -> Result<Self> {
        let mut config: tokio_postgres::Config = spec.postgres.parse()?;
        config.application_name("naive");
        let recycling = ManagerConfig { recycling_method: RecyclingMethod::Fast };
        let manager = Manager::from_config(config, NoTls, recycling);
        let pool = Pool::builder(manager).max_size(spec.connections).runtime(Runtime::Tokio1).build()?;
        let claims = match &spec.redis {
            None => None,
            Some(url) => {
                let manager = deadpool_redis::Manager::new(url.as_str())?;
                let claims = deadpool_redis::Pool::builder(manager).max_size(spec.connections).build()?;
                let shared = spec.pipelined;
                Some(if shared { Claims::Shared(claims.get().await?) } else { Claims::Pooled(claims) })
            }
        };
        Ok(Self { pool, claims, pipelined: spec.pipelined })
    }

    /// Records the event if it is new.
    pub(crate) async fn record(&self, event: &Event) -> Result<()> {
        if let Some(claims) = &self.claims
            && !claim(claims, &event.id).await?
        {
            return Ok(());
        }
        let mut client = self.pool.get().await?;
        let recorded = if self.pipelined {
            transact_pipelined(&client, event).await
        } else {
            transact(&mut client, event).await
        };
        if recorded.is_err() {
            // Whatever state it is in, nobody else gets it.
            drop(Object::take(client));
        }
        recorded
    }
}

async fn claim(claims: &Claims, id: &str) -> Result<bool> {
    let mut command = redis::cmd("SET");
    command.arg(format!("naive:{id}")).arg("1").arg("NX").arg("EX").arg(CLAIM_SECONDS);
    let set: Option<String> = match claims {
        Claims::Pooled(pool) => command.query_async(&mut pool.get().await?).await?,
        Claims::Shared(connection) => {
            let mut connection: MultiplexedConnection = connection.as_ref().clone();
            command.query_async(&mut connection).await?
        }
    };
    Ok(set.is_some())
}

async fn transact(client: &mut Object, event: &Event) -> Result<()> {
    let insert = client.prepare_cached(INSERT).await?;
    let effect = client.prepare_cached(EFFECT).await?;
    let body: &[u8] = &event.body;
    let transaction = client.transaction().await?;
    if transaction.execute(&insert, &[&event.id, &body]).await? == 1 {
        transaction.execute(&effect, &[&event.id, &event.event_type]).await?;
    }
    transaction.commit().await.context("commit")
}

async fn transact_pipelined(client: &Object, event: &Event) -> Result<()> {
    let insert = client.prepare_cached(INSERT).await?;
    let effect = client.prepare_cached(EFFECT).await?;
    let body: &[u8] = &event.body;
    let row: [&(dyn ToSql + Sync); 2] = [&event.id, &body];
    let (begun, inserted) = join!(client.batch_execute("begin"), client.execute(&insert, &row));
    begun?;
    if inserted? == 0 {
        return client.batch_execute("commit").await.context("commit");
    }
    let row: [&(dyn ToSql + Sync); 2] = [&event.id, &event.event_type];
    let (applied, committed) = join!(client.execute(&effect, &row), client.batch_execute("commit"));
    applied?;
    committed.context("commit")
}
