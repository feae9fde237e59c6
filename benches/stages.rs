//! What each stage of the path costs by itself: verification and identification of every preset that there is a request for, a
//! batch in Postgres, a claim in Redis. The stores are private ones.

use std::hint::black_box;
use std::io::Write as _;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use criterion::{BatchSize, BenchmarkId, Criterion, Throughput};
use futures_util::future::join_all;
use hapax::body::Received;
use hapax::claim::{Claim, FastTier};
use hapax::config::{self, Config, Source};
use hapax::db;
use hapax::dev::{Stores, StoresOptions};
use hapax::effect::Effects;
use hapax::generation::Heartbeat;
use hapax::identify::{Event, EventKey, Identified, identify};
use hapax::metrics::Metrics;
use hapax::provider::Scheme;
use hapax::record::{How, Recorder};
use hapax::sign::{Draft, fresh_id, sign};
use hapax::tasks::Tasks;
use hapax::verify::verify;
use http::{Method, Request};
use jiff::Timestamp;
use serde_json::Value;

/// Of the forms that presets take: with a prefix, as hexadecimal digits, in parts.
const SECRETS: [&str; 3] = [
    "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=",
    "00ff00ff00ff00ff00ff00ff00ff00ff",
    "name:pass:word",
];
/// Requests of those who sign with a private key that only they have.
const VECTORS: [&str; 2] =
    [include_str!("../tests/data/vectors.json"), include_str!("../tests/data/more_vectors.json")];
/// For each of the pure stages; there are hundreds.
const SHORT: (Duration, Duration, usize) = (Duration::from_millis(200), Duration::from_millis(600), 20);
const PATH: &str = "/in/bench";
const PUBLIC_URL: &str = "https://hooks.example.com";
const DATABASE: &str = "stages";
const WAIT: Duration = Duration::from_secs(5);
const EFFECT: &str = "
    create schema fx;
    create table fx.payment (event_id text not null, event_type text);
    create function fx.apply(e hapax.event) returns void language sql volatile as
    $$ insert into fx.payment (event_id, event_type) values (e.event_id, e.event_type) $$;";

fn main() -> ExitCode {
    let mut criterion = Criterion::default().configure_from_args();
    let done = pure_stages(&mut criterion).and_then(|()| store_stages(&mut criterion));
    criterion.final_summary();
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            writeln!(std::io::stderr(), "stages: {error:#}").ok();
            ExitCode::FAILURE
        }
    }
}

/// Verification and identification of each preset's own sample or of a published request, and of larger bodies.
fn pure_stages(criterion: &mut Criterion) -> Result<()> {
    let vectors: Vec<Value> =
        VECTORS.iter().map(|text| serde_json::from_str(text)).collect::<Result<_, _>>()?;
    let vectors: Vec<&Value> =
        vectors.iter().filter_map(|file| file["vectors"].as_array()).flatten().collect();
    let mut without = Vec::new();
    for preset in Scheme::preset_names() {
        let of_it = || vectors.iter().filter(|vector| vector["scheme"] == **preset);
        match Signed::sample(preset).or_else(|| of_it().find_map(|vector| Signed::published(vector))) {
            Some(request) => both(criterion, preset, &request),
            None => without.push(*preset),
        }
    }
    let source = Arc::new(source("stripe", SECRETS[0]).context("stripe")?);
    for kib in [1, 16, 256] {
        let body = format!(
            r#"{{"id":"{}","type":"t","data":[{}0]}}"#,
            fresh_id(),
            r#"{"k":"v","n":123},"#.repeat(kib * 57)
        );
        let request = Signed::new(&source, body.into()).context("a body that cannot be signed")?;
        both(criterion, &format!("stripe {kib} KiB"), &request);
    }
    let without = without.join(", ");
    Ok(writeln!(std::io::stdout(), "no request to verify: {without}")?)
}

fn both(criterion: &mut Criterion, name: &str, request: &Signed) {
    let (warm_up, time, samples) = SHORT;
    let mut group = criterion.benchmark_group("verify");
    group.warm_up_time(warm_up).measurement_time(time).sample_size(samples);
    group.throughput(Throughput::Bytes(request.body.len() as u64));
    group.bench_function(name, |bencher| {
        let received = || request.received();
        bencher.iter_batched(
            received,
            |received| black_box(verify(received, request.now)),
            BatchSize::SmallInput,
        );
    });
    group.finish();
    let mut group = criterion.benchmark_group("identify");
    group.warm_up_time(warm_up).measurement_time(time).sample_size(samples);
    group.bench_function(name, |bencher| {
        let verified = || verify(request.received(), request.now);
        let identify = |verified| black_box(Result::map(verified, identify));
        bencher.iter_batched(verified, identify, BatchSize::SmallInput);
    });
    group.finish();
}

fn source(preset: &str, secret: &str) -> Option<Source> {
    let scheme = Scheme::preset(preset)?;
    let key = scheme.key(secret).ok()?;
    let mut source = Source::new("bench", scheme, vec![key]);
    source.public_url = Some(PUBLIC_URL.to_owned());
    Some(source)
}

/// A request that can be made again and again, and that its source's keys have signed.
struct Signed {
    source: Arc<Source>,
    head: http::request::Parts,
    body: Bytes,
    /// The time to verify it at.
    now: Timestamp,
}

impl Signed {
    /// The preset's own sample, if it can be signed here.
    fn sample(preset: &str) -> Option<Self> {
        let source = Arc::new(SECRETS.iter().find_map(|secret| source(preset, secret))?);
        let sample = source.scheme.sample(&fresh_id(), Timestamp::now())?;
        Self::new(&source, sample.into())
    }

    fn new(source: &Arc<Source>, body: Bytes) -> Option<Self> {
        let (now, public_url) = (Timestamp::now(), source.public_url.as_deref());
        let draft = Draft { method: &Method::POST, public_url, path: PATH, body: &body, id: None, now };
        let signed = sign(&source.scheme, source.keys.first()?, &draft).ok()?;
        let mut head = Request::post(PATH).body(()).ok()?.into_parts().0;
        head.headers.extend(signed.headers);
        Self { source: Arc::clone(source), head, body, now }.if_verified()
    }

    /// A request with the key that it was signed for.
    fn published(vector: &Value) -> Option<Self> {
        let key = vector["public_key"].as_str().or(vector["secret"].as_str())?;
        let source = Arc::new(source(vector["scheme"].as_str()?, key)?);
        let mut request = Request::post(PATH);
        for (name, value) in vector["headers"].as_object()? {
            request = request.header(name, value.as_str()?);
        }
        let (head, ()) = request.body(()).ok()?.into_parts();
        let body = Bytes::from(vector["body"].as_str()?.to_owned());
        let now = Timestamp::from_second(vector["now"].as_i64()?).ok()?;
        Self { source, head, body, now }.if_verified()
    }

    fn if_verified(self) -> Option<Self> {
        verify(self.received(), self.now).is_ok().then_some(self)
    }

    fn received(&self) -> Received {
        let (source, head) = (Arc::clone(&self.source), self.head.clone());
        Received { source, head, body: self.body.clone() }
    }
}

/// The parts of a gateway that talk to the stores.
struct Gateway {
    source: Arc<Source>,
    event: Event,
    recorder: Recorder,
    tier: FastTier,
}

fn store_stages(criterion: &mut Criterion) -> Result<()> {
    let stores = Stores::start(&StoresOptions::default())?;
    stores.postgres.create_database(DATABASE)?;
    let config = settings(&stores)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let gateway = runtime.block_on(Gateway::start(&config))?;
    let mut group = criterion.benchmark_group("record");
    for events in [1, 16, 64, 128] {
        group.throughput(Throughput::Elements(events));
        group.bench_function(BenchmarkId::from_parameter(events), |bencher| {
            bencher.iter_custom(|rounds| runtime.block_on(gateway.record(events, rounds)));
        });
    }
    group.finish();
    let mut group = criterion.benchmark_group("claim");
    for claims in [1, 64] {
        group.throughput(Throughput::Elements(claims));
        group.bench_function(BenchmarkId::from_parameter(claims), |bencher| {
            bencher.iter_custom(|rounds| runtime.block_on(gateway.claim(claims, rounds)));
        });
    }
    group.finish();
    Ok(())
}

fn settings(stores: &Stores) -> Result<Config> {
    let (postgres, redis) = (stores.postgres.url(DATABASE), stores.redis.url());
    let [secret, ..] = SECRETS;
    let text = format!(
        r#"
[postgres]
url = "{postgres}"
[fast_tier]
url = "{redis}"
prefix = "stages:"
timeout = "1s"
[source.bench]
provider = "stripe"
secrets = ["{secret}"]
effect = "fx.apply"
effect_parallel = true
"#
    );
    let path = stores.folder().path().join("hapax.toml");
    std::fs::write(&path, text)?;
    let loaded = Config::load(&path).map_err(|problems| anyhow::Error::msg(config::report(&problems)))?;
    Ok(loaded.config)
}

impl Gateway {
    async fn start(config: &Config) -> Result<Self> {
        let mut database = db::connect(&config.postgres).await?;
        db::migrate(&mut database).await?;
        database.batch_execute(EFFECT).await?;
        let (tasks, metrics) = (Tasks::default(), Arc::new(Metrics::new()));
        let heartbeat = Arc::new(Heartbeat::new(config.postgres.generation_age_max));
        let tier = FastTier::start(&config.fast_tier, heartbeat, &metrics, &tasks)?;
        let source = Arc::clone(config.sources.get("bench").context("no source")?);
        let sources = config.sources.values().map(AsRef::as_ref);
        let pool = db::pool(&config.postgres)?;
        let recorder =
            Recorder::start(&pool, &config.postgres, sources, &Effects::default(), &metrics, &tasks)?;
        let event = event(&source)?;
        let gateway = Self { source, event, recorder, tier };
        gateway.wait_for_redis().await?;
        Ok(gateway)
    }

    async fn wait_for_redis(&self) -> Result<()> {
        let since = Instant::now();
        while !matches!(self.tier.claim(&self.fresh().key, WAIT).await, Ok(Claim::Held(_))) {
            ensure!(since.elapsed() < WAIT, "Redis does not answer");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Ok(())
    }

    /// The same event under another id.
    fn fresh(&self) -> Event {
        let id = fresh_id();
        let key = EventKey::of(&self.source.name, &self.source.scope, &id);
        Event { key, id, ..self.event.clone() }
    }

    /// The time that `rounds` batches take, one after the other.
    async fn record(&self, events: u64, rounds: u64) -> Duration {
        let mut took = Duration::ZERO;
        for _ in 0..rounds {
            let events: Vec<_> = (0..events).map(|_| Arc::new(self.fresh())).collect();
            let started = Instant::now();
            let deadline = started + WAIT;
            let record = |event| self.recorder.record(&self.source, event, deadline, How::Batched);
            let recorded = join_all(events.iter().map(record)).await;
            took += started.elapsed();
            assert!(recorded.iter().all(Result::is_ok), "an event is not recorded");
        }
        took
    }

    /// The time that `rounds` times `claims` claims at once take.
    async fn claim(&self, claims: u64, rounds: u64) -> Duration {
        let mut took = Duration::ZERO;
        for _ in 0..rounds {
            let keys: Vec<_> = (0..claims).map(|_| self.fresh().key).collect();
            let started = Instant::now();
            let claimed = join_all(keys.iter().map(|key| self.tier.claim(key, WAIT))).await;
            took += started.elapsed();
            assert!(claimed.iter().all(|claim| matches!(claim, Ok(Claim::Held(_)))), "a claim is not held");
        }
        took
    }
}

/// An event as the path makes it.
fn event(source: &Arc<Source>) -> Result<Event> {
    let sample = source.scheme.sample(&fresh_id(), Timestamp::now()).context("no sample")?;
    let request = Signed::new(source, sample.into()).context("the sample cannot be signed")?;
    let identified = verify(request.received(), Timestamp::now()).and_then(identify);
    let (_source, content) = identified
        .map(Identified::into_parts)
        .map_err(|code| anyhow::anyhow!("the sample is refused: {}", code.as_str()))?;
    content.into_event().context("the sample is a batch")
}
