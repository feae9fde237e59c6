//! The receiver that one would write: a transaction for each request. Statements are prepared once per connection, the
//! body is stored as raw bytes. At its best (`pipelined`) BEGIN travels with the first statement and COMMIT with the
//! last.

use anyhow::{Context as _, Result};
use deadpool_postgres::{Manager, ManagerConfig, Object, Pool, RecyclingMethod, Runtime};
use futures_util::join;
use hapax::identify::Event;
use serde::{Deserialize, Serialize};
use tokio_postgres::NoTls;
use tokio_postgres::types::ToSql;

const INSERT: &str = "insert into naive.event (event_id, body) values ($1, $2) on conflict do nothing";
const EFFECT: &str = "insert into fx.payment (event_id, event_type) values ($1, $2)";
/// As long as the gateway remembers.
const CLAIM_SECONDS: u64 = 24 * 3600;

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Spec {
    pub(crate) postgres: String,
    /// Asked first, if given.
    pub(crate) redis: Option<String>,
    pub(crate) connections: usize,
    /// Two round trips instead of four.
    pub(crate) pipelined: bool,
}

pub(crate) struct Naive {
    pool: Pool,
    claims: Option<deadpool_redis::Pool>,
    pipelined: bool,
}

impl Naive {
    pub(crate) fn start(spec: &Spec) -> Result<Self> {
        let mut config: tokio_postgres::Config = spec.postgres.parse()?;
        config.application_name("naive");
        let recycling = ManagerConfig { recycling_method: RecyclingMethod::Fast };
        let manager = Manager::from_config(config, NoTls, recycling);
        let pool = Pool::builder(manager).max_size(spec.connections).runtime(Runtime::Tokio1).build()?;
        let claims = spec.redis.as_ref().map(|url| {
            let manager = deadpool_redis::Manager::new(url.as_str())?;
            let builder = deadpool_redis::Pool::builder(manager).max_size(spec.connections);
            anyhow::Ok(builder.runtime(Runtime::Tokio1).build()?)
        });
        Ok(Self { pool, claims: claims.transpose()?, pipelined: spec.pipelined })
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

async fn claim(claims: &deadpool_redis::Pool, id: &str) -> Result<bool> {
    let mut connection = claims.get().await?;
    let mut command = redis::cmd("SET");
    command.arg(format!("naive:{id}")).arg("1").arg("NX").arg("EX").arg(CLAIM_SECONDS);
    let set: Option<String> = command.query_async(&mut connection).await?;
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
