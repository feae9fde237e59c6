//! What Postgres gives to one client that writes the gateway's rows in batches, with nothing else running.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use futures_util::join;
use hapax::identify::EventKey;
use hapax::record::RECORD_TYPES;
use hdrhistogram::Histogram;
use ring::digest::{SHA256, digest};
use serde::{Deserialize, Serialize};
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, NoTls, Statement};

use super::load::Report;
use super::numbers::micros;
use super::payload::{Body, ID_LENGTH, SOURCE, id};
use super::processes;
use super::scene::EFFECT;

/// Events in one transaction.
const BATCH: usize = 64;
const RECORD: &str = include_str!("../../sql/queries/record.sql");
/// That of the gateway, with its default time-outs.
const BEGIN: &str = "begin isolation level read committed, read write; \
                     set local statement_timeout = '2000ms'; \
                     set local idle_in_transaction_session_timeout = '2000ms'";

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Spec {
    pub(crate) postgres: String,
    pub(crate) body_bytes: usize,
    pub(crate) run: u64,
    pub(crate) warm_up: Duration,
    pub(crate) time: Duration,
}

/// Writes batch after batch for the given time.
pub(crate) async fn run(spec: &Spec) -> Result<Report> {
    let mut config: tokio_postgres::Config = spec.postgres.parse()?;
    config.application_name("pg-batch");
    let (client, connection) = config.connect(NoTls).await?;
    tokio::spawn(connection);
    let statement = client.prepare_typed(RECORD, &RECORD_TYPES).await?;
    let body = Body::of_bytes(spec.body_bytes);
    let mut latencies = Histogram::<u32>::new(3)?;
    let cpu_before = processes::own_cpu()?;
    let measured_from = Instant::now() + spec.warm_up;
    let until = measured_from + spec.time;
    let (mut events, mut measured) = (0, 0);
    while Instant::now() < until {
        let batch = Batch::make(spec.run, events, &body);
        let started = Instant::now();
        batch.write(&client, &statement).await?;
        let now = Instant::now();
        events += BATCH as u64;
        if now >= measured_from && now < until {
            measured += BATCH as u64;
            latencies.record(micros(now - started))?;
        }
    }
    Ok(Report {
        time: spec.time,
        answered: measured,
        p50_us: latencies.value_at_quantile(0.5),
        p99_us: latencies.value_at_quantile(0.99),
        max_us: latencies.max(),
        statuses: BTreeMap::from([(200, events)]),
        events_sent: events,
        events_safe: events,
        cpu_us: micros(processes::own_cpu()?.saturating_sub(cpu_before)),
    })
}

struct Event {
    key: EventKey,
    id: String,
    body: Vec<u8>,
    digest: Vec<u8>,
}

struct Batch(Vec<Event>);

impl Batch {
    fn make(run: u64, first: u64, body: &Body) -> Self {
        let event = |index| {
            let id = id(run, index);
            let mut text = body.text.clone();
            text.replace_range(body.id_at..body.id_at + ID_LENGTH, &id);
            let digest = digest(&SHA256, text.as_bytes()).as_ref().to_vec();
            Event { key: EventKey::of(SOURCE, "-", &id), id, body: text.into_bytes(), digest }
        };
        let mut events: Vec<Event> = (first..first + BATCH as u64).map(event).collect();
        events.sort_unstable_by_key(|event| event.key);
        Self(events)
    }

    async fn write(&self, client: &Client, statement: &Statement) -> Result<()> {
        let Self(events) = self;
        let count = events.len();
        let keys: Vec<&[u8]> = events.iter().map(|event| event.key.0.as_slice()).collect();
        let tokens: Vec<i64> = (0..).take(count).collect();
        let digests: Vec<&[u8]> = events.iter().map(|event| event.digest.as_slice()).collect();
        let ids: Vec<&str> = events.iter().map(|event| event.id.as_str()).collect();
        let bodies: Vec<&[u8]> = events.iter().map(|event| event.body.as_slice()).collect();
        let (sources, scopes) = (vec![SOURCE; count], vec!["-"; count]);
        let types = vec![Some("payment_intent.succeeded"); count];
        let times = vec![Some(jiff::Timestamp::UNIX_EPOCH); count];
        let (headers, careful) = (vec!["{}"; count], vec![false; count]);
        let items = vec![None::<i32>; count];
        let locks = vec![None::<&str>; count];
        let (group, one_by_one, budget_ms, effect_follows) = (None::<&str>, false, 1000_i64, false);
        let (job_at, job_queues, job_attempts) = (Vec::<i32>::new(), Vec::<&str>::new(), Vec::<i32>::new());
        let parks = vec![None::<i32>; count];
        let parameters: [&(dyn ToSql + Sync); 26] = [
            &keys,
            &tokens,
            &digests,
            &sources,
            &scopes,
            &ids,
            &types,
            &times,
            &headers,
            &bodies,
            &items,
            &careful,
            &locks,
            &careful,
            &EFFECT,
            &group,
            &one_by_one,
            &"250ms",
            &"on",
            &budget_ms,
            &effect_follows,
            &job_at,
            &job_queues,
            &job_attempts,
            &parks,
            // Nothing has failed before.
            &locks,
        ];
        let (begun, row, committed) = join!(
            client.batch_execute(BEGIN),
            client.query_one(statement, &parameters),
            client.batch_execute("commit"),
        );
        begun?;
        let outcomes: String = row?.try_get("outcomes")?;
        committed.context("commit")?;
        ensure!(outcomes.len() == count && outcomes.bytes().all(|letter| letter == b'a'), "{outcomes}");
        Ok(())
    }
}
