//! The path of a request: `receive` up to the cancel boundary (`‖`), `Gateway::once` behind it;
//! [`Gateway::serve`] answers, and a `Visit` counts and logs.
//!
//! Left of the boundary a client that goes away drops everything: nothing has happened. Right of it the work runs in
//! a tracked task, which neither a disconnect nor a deadline can cancel, and which keeps what the request takes out
//! of the limits until it is done.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use bytes::Bytes;
use futures_util::future::join_all;
use http::header::EXPECT;
use http::request::Parts;
use http::{Method, Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout_at;
use tracing::warn;

use crate::body;
use crate::challenge::{self, Handover, Reply, Unsigned};
use crate::claim::{Claim, FastTier, Lifetime, ShortDigest, Tier};
use crate::config::{Config, InFlight, RequestLog, Source};
use crate::error::{Code, Dependency, Stage};
use crate::flight::{Flights, Seat};
use crate::handover::Handovers;
use crate::identify::{Content, Event, Identified, identify};
use crate::keyring::{Keyring, Trouble};
use crate::log::{Line, Log};
use crate::metrics::Metrics;
use crate::record::{How, RecordError, Recorder, Standing, Verdict};
use crate::respond::{self, Failure, Outcome, Tally};
use crate::server::Service;
use crate::tasks::Tasks;
use crate::verify::verify_with;
use crate::work::Workers;

type Delivered = Result<Outcome, Failure>;

/// Everything that requests share, whatever the settings.
#[derive(Debug)]
pub struct Gateway {
    view: ArcSwap<View>,
    requests: Arc<Semaphore>,
    body_budget: Arc<Semaphore>,
    flights: Arc<Flights<Delivered>>,
    handovers: Arc<Handovers>,
    metrics: Arc<Metrics>,
    nowhere: Arc<str>,
    log: Log,
    tasks: Tasks,
}

/// What the settings come to. A request takes one at its head and keeps it to its end: it never sees parts of two.
#[derive(Debug)]
struct View {
    sources: HashMap<String, Arc<Source>>,
    body_timeout: Duration,
    retry_after: Duration,
    in_flight: InFlight,
    request_log: RequestLog,
    keyring: Keyring,
    tier: FastTier,
    recorder: Recorder,
    workers: Workers,
}

/// What a request turned out to be, in front of the boundary.
enum Arrived {
    /// An event, to be delivered.
    Event(Arc<Source>, Arc<Event>),
    /// Several of them.
    Batch(Arc<Source>, Vec<Arc<Event>>),
    /// A provider's question.
    Handshake(Arc<Reply>),
}

/// What the log line tells beside the result; filled as far as the request came.
#[derive(Debug, Default)]
struct Trace {
    source: Option<Arc<Source>>,
    event: Option<Arc<Event>>,
    /// Of a batch.
    items: Option<usize>,
    body_bytes: usize,
    /// Only where a key had to be found.
    keys: Option<Duration>,
    verify: Duration,
    times: Times,
}

/// How long the stages behind the boundary took.
#[derive(Debug, Default)]
struct Times {
    claim: Duration,
    record: Duration,
}

/// A request from its head to its one log line and count, and what it takes out of the limits meanwhile.
#[derive(Debug)]
struct Visit {
    gateway: Arc<Gateway>,
    view: Arc<View>,
    id: u64,
    started: Instant,
    trace: Trace,
    reported: bool,
    /// One of `requests_max`.
    permit: Option<OwnedSemaphorePermit>,
    /// The body's part of `buffered_max`.
    memory: Option<OwnedSemaphorePermit>,
}

impl Gateway {
    /// Puts the parts together.
    #[must_use]
    pub fn new(
        config: &Config,
        (keyring, tier, recorder, workers): (Keyring, FastTier, Recorder, Workers),
        metrics: Arc<Metrics>,
        log: Log,
        tasks: Tasks,
    ) -> Self {
        let handovers = Handovers::new(&config.postgres);
        handovers.follow(config, &tasks);
        Self {
            view: ArcSwap::from_pointee(View::new(config, (keyring, tier, recorder, workers))),
            requests: Arc::new(Semaphore::new(config.server.requests_max)),
            body_budget: body::byte_budget(config.server.buffered_max),
            flights: Arc::default(),
            handovers,
            metrics,
            nowhere: "none".into(),
            log,
            tasks,
        }
    }

    /// From now on requests begin under these settings; those under way end under the ones with which they began. What
    /// cannot change without a restart must be the same in both.
    ///
    /// # Errors
    /// A source names a Rust effect that this program does not have, or needs authorities that cannot be read; nothing
    /// changes then.
    pub fn take_up(&self, config: &Config) -> anyhow::Result<()> {
        let before = self.view.load_full();
        let tier = before.tier.tuned(&config.fast_tier);
        let sources = config.sources.values().map(AsRef::as_ref);
        let recorder = before.recorder.tuned(&config.postgres, sources)?;
        let keyring = before.keyring.tuned(config)?;
        let workers = before.workers.clone();
        let prepared = workers.prepare(config, before.tier.tuned(&config.fast_tier))?;
        self.handovers.follow(config, &self.tasks);
        workers.take_up(prepared);
        self.view.store(Arc::new(View::new(config, (keyring, tier, recorder, workers))));
        Ok(())
    }

    /// Answers a request; every request gets one log line and one count, even if its client goes away.
    pub async fn serve(self: Arc<Self>, request: Request<Incoming>) -> Response<Full<Bytes>> {
        let mut visit = Visit::begin(&self);
        let retry_after = visit.view.retry_after;
        let received = receive(&self, request, &mut visit).await;
        let source = visit.trace.source.clone();
        let result = match received {
            Err(failure) => visit.end(Err(failure)),
            Ok(Arrived::Handshake(reply)) => visit.end(Ok(Outcome::Handshake(reply))),
            Ok(Arrived::Batch(source, events)) => {
                // ‖ From here on a client that goes away changes nothing.
                let gateway = Arc::clone(&self);
                let work = self.tasks.spawn(async move {
                    let deadline = visit.started + source.deadline;
                    let times = &mut visit.trace.times;
                    let delivered =
                        visit.view.deliver_batch(&gateway.metrics, &source, events, deadline, times).await;
                    visit.end(delivered)
                });
                work.await.unwrap_or_else(|lost| Err(internal(&lost.to_string())))
            }
            Ok(Arrived::Event(source, event)) => {
                let recalled = visit.view.tier.recall(&event.tier_key(), Instant::now());
                if let Some(outcome) = recalled.and_then(|is| recognised(&event, is, Tier::Memory)) {
                    visit.end(Ok(outcome))
                } else {
                    // ‖ From here on a client that goes away changes nothing.
                    let gateway = Arc::clone(&self);
                    let work = self.tasks.spawn(async move {
                        let deadline = visit.started + source.deadline;
                        let times = &mut visit.trace.times;
                        let delivered = visit.view.once(&gateway, &source, &event, deadline, times).await;
                        visit.end(delivered)
                    });
                    work.await.unwrap_or_else(|lost| Err(internal(&lost.to_string())))
                }
            }
        };
        respond::respond(source.as_deref(), &result, retry_after)
    }
}

impl View {
    fn new(
        config: &Config,
        (keyring, tier, recorder, workers): (Keyring, FastTier, Recorder, Workers),
    ) -> Self {
        let sources = config.sources.iter().map(|(name, source)| (name.clone(), Arc::clone(source)));
        Self {
            sources: sources.collect(),
            body_timeout: config.server.body_timeout,
            retry_after: config.server.retry_after,
            in_flight: config.in_flight.clone(),
            request_log: config.log.requests,
            keyring,
            tier,
            recorder,
            workers,
        }
    }

    /// The source that the path names.
    fn source_of(&self, head: &Parts) -> Option<&Arc<Source>> {
        head.uri.path().strip_prefix("/in/").and_then(|name| self.sources.get(name))
    }

    /// Whether the source that the path names takes such a request at all.
    fn admit(&self, head: &Parts) -> Result<Arc<Source>, Failure> {
        let refuse = |code| Err(Failure::new(Stage::Accept, code));
        let Some(source) = self.source_of(head) else { return refuse(Code::UnknownSource) };
        if head.method != Method::POST && !source.scheme.answers(&head.method) {
            return refuse(Code::MethodNotAllowed);
        }
        let expect = head.headers.get(EXPECT);
        if expect.is_some_and(|expect| !expect.as_bytes().eq_ignore_ascii_case(b"100-continue")) {
            return refuse(Code::ExpectationFailed);
        }
        Ok(Arc::clone(source))
    }

    /// Delivers an event once: joins a delivery of it that is under way, or leads one.
    async fn once(
        &self,
        gateway: &Gateway,
        source: &Arc<Source>,
        event: &Arc<Event>,
        deadline: Instant,
        times: &mut Times,
    ) -> Delivered {
        match gateway.flights.join(event.tier_key(), event.stamp(), self.in_flight.waiters_max) {
            Seat::Leader(leader) => {
                let delivered = self.deliver(&gateway.metrics, source, event, deadline, times).await;
                leader.land(&delivered);
                delivered
            }
            Seat::Follower(landed) => {
                let waiting = Instant::now();
                let landed = timeout_at(deadline.into(), landed).await;
                times.claim = waiting.elapsed();
                match landed {
                    Ok(Ok(Ok(
                        Outcome::Accepted | Outcome::Rejected | Outcome::Parked | Outcome::Rearmed,
                    ))) => Ok(Outcome::Duplicate(Tier::Flight)),
                    Ok(Ok(delivered)) => delivered,
                    Ok(Err(lost)) => Err(internal(&lost.to_string())),
                    Err(_elapsed) => Err(Failure::new(Stage::Claim, Code::InFlight)),
                }
            }
            Seat::Full => Err(Failure::new(Stage::Claim, Code::Overloaded)),
        }
    }

    /// claim → record → settle. Runs to its end in any case.
    async fn deliver(
        &self,
        metrics: &Metrics,
        source: &Arc<Source>,
        event: &Arc<Event>,
        deadline: Instant,
        times: &mut Times,
    ) -> Delivered {
        let started = Instant::now();
        let wait = self.in_flight.wait.min(deadline.saturating_duration_since(started));
        let claim = self.tier.claim(&event.tier_key(), wait).await;
        times.claim = started.elapsed();
        metrics.claimed(times.claim);
        let (lease, how) = match claim.map_err(tier_refused)? {
            Claim::Done(committed) => match recognised(event, committed, Tier::Redis) {
                Some(outcome) => return Ok(outcome),
                None => (None, How::Batched),
            },
            Claim::Held(lease) => (Some(lease), How::Batched),
            Claim::Unclaimed => (None, How::Batched),
            Claim::Foreign => (None, How::Alone),
        };
        let started = Instant::now();
        let recorded = self.record(metrics, source, event, deadline, how).await;
        times.record = started.elapsed();
        metrics.recorded(times.record);
        // A marker takes the lease's place. Without one (nothing is committed, or a redelivery is to reach Postgres), nobody
        // waits for a lease of a delivery that has ended.
        let marked = matches!(recorded, Ok((_, true)));
        if let (false, Some(lease)) = (marked, lease) {
            self.tier.release(&event.tier_key(), lease).await;
        }
        recorded.map(|(outcome, _)| outcome)
    }

    /// The items of a batch, each an event of its own: what is not known to be done is recorded together. Items take no
    /// leases; Postgres decides. Runs to its end in any case.
    async fn deliver_batch(
        &self,
        metrics: &Metrics,
        source: &Arc<Source>,
        events: Vec<Arc<Event>>,
        deadline: Instant,
        times: &mut Times,
    ) -> Delivered {
        if events.is_empty() {
            return Ok(Outcome::Empty);
        }
        let started = Instant::now();
        let keys: Vec<_> = events.iter().map(|event| event.tier_key()).collect();
        let done = self.tier.recognise(&keys).await.map_err(tier_refused)?;
        times.claim = started.elapsed();
        metrics.claimed(times.claim);
        let started = Instant::now();
        let results = join_all(events.iter().zip(done).map(async |(event, done)| {
            let known = done.and_then(|(committed, tier)| recognised(event, committed, tier));
            let result = if let Some(outcome) = known {
                Ok(outcome)
            } else {
                let recorded = self.record(metrics, source, event, deadline, How::Batched).await;
                recorded.map(|(outcome, _)| outcome)
            };
            (event.identified, result)
        }));
        let results = results.await;
        times.record = started.elapsed();
        metrics.recorded(times.record);
        Ok(Outcome::Batch(Arc::new(Tally::of(source, results))))
    }

    /// record → settle. Also whether a marker takes the place of the delivery's lease.
    async fn record(
        &self,
        metrics: &Metrics,
        source: &Arc<Source>,
        event: &Arc<Event>,
        deadline: Instant,
        how: How,
    ) -> Result<(Outcome, bool), Failure> {
        let recorded = self.recorder.record(source, event, deadline, how).await;
        if recorded.as_ref().is_err_and(|error| error.code == Code::SignatureReused) {
            metrics.signature_reused("refuse");
        }
        let recorded = recorded.map_err(not_recorded)?;
        let (outcome, stamp) = match recorded.verdict() {
            Verdict::Accepted => (Outcome::Accepted, event.stamp()),
            Verdict::Rejected => (Outcome::Rejected, event.stamp()),
            Verdict::Parked => (Outcome::Parked, event.stamp()),
            Verdict::Known(digest) if digest == event.digest && recorded.standing() == Standing::Rearmed => {
                (Outcome::Rearmed, event.stamp())
            }
            Verdict::Known(digest) if digest == event.digest => {
                (Outcome::Duplicate(Tier::Postgres), event.stamp())
            }
            Verdict::Known(digest) => (Outcome::Mismatch(Tier::Postgres), digest),
        };
        if recorded.is_repeated() {
            let (source, id) = (&*source.name, event.id.escape_debug());
            warn!(source, event.id = %id, "what is signed came before under another id; the event is accepted");
            metrics.signature_reused("report");
        }
        let (key, generation) = (event.tier_key(), recorded.generation());
        match recorded.standing() {
            Standing::Settled => self.tier.settle(&key, stamp, generation, Lifetime::Settled),
            Standing::Open => self.tier.settle(&key, stamp, generation, Lifetime::Open),
            Standing::Failed | Standing::Rearmed => self.tier.forget(&key),
        }
        self.announce(source, event, &outcome, recorded.standing());
        let marked = matches!(recorded.standing(), Standing::Settled | Standing::Open);
        Ok((outcome, marked))
    }
}

impl View {
    /// Wakes whoever has something to do now.
    fn announce(&self, source: &Source, event: &Event, outcome: &Outcome, standing: Standing) {
        let event_type = event.event_type.as_deref();
        match (outcome, standing) {
            (Outcome::Accepted, Standing::Open) => self.workers.announce(source, event_type),
            (Outcome::Rearmed, _) => {
                self.workers.announce(source, event_type);
                self.workers.announce_parked(source);
            }
            _ => {}
        }
    }
}

impl Visit {
    fn begin(gateway: &Arc<Gateway>) -> Self {
        gateway.metrics.requests_in_flight.inc();
        Self {
            gateway: Arc::clone(gateway),
            view: gateway.view.load_full(),
            id: rand::random(),
            started: Instant::now(),
            trace: Trace::default(),
            reported: false,
            permit: None,
            memory: None,
        }
    }

    fn end(mut self, result: Delivered) -> Delivered {
        self.report(&result);
        result
    }

    fn report(&mut self, result: &Delivered) {
        self.reported = true;
        let Self { gateway, trace, .. } = &*self;
        let took = self.started.elapsed();
        let verdict = respond::verdict(trace.source.as_deref(), result);
        let source = trace.source.as_ref().map_or(&gateway.nowhere, |source| &source.name);
        gateway.metrics.answered(source, verdict.outcome, verdict.code);
        gateway.metrics.finished(took);
        if let Ok(Outcome::Duplicate(tier) | Outcome::Mismatch(tier)) = result {
            gateway.metrics.duplicate(*tier);
        }
        if matches!(result, Ok(Outcome::Rearmed)) {
            gateway.metrics.duplicate(Tier::Postgres);
            gateway.metrics.work.rearmed(source);
        }
        if self.view.request_log == RequestLog::Failed && verdict.status.is_success() {
            return;
        }
        let mut line = Line::new(jiff::Timestamp::now(), respond::level(result), "request");
        line.text("request.id", &format!("{:016x}", self.id));
        line.text("source", source);
        line.text("outcome", verdict.outcome);
        line.number("http.status", verdict.status.as_u16().into());
        if let Some(event) = &trace.event {
            line.text("event.id", &event.id);
            line.text("event.digest", &hex::encode(event.digest.0.get(..6).unwrap_or_default()));
        }
        if let Some(items) = trace.items {
            line.number("items", items as u64);
        }
        match result {
            Ok(Outcome::Duplicate(tier) | Outcome::Mismatch(tier)) => line.text("tier", tier.as_str()),
            Ok(Outcome::Rearmed) => line.text("rearmed", "true"),
            Ok(Outcome::Batch(tally)) => {
                line.text("items.outcomes", &tally.text());
                if let Some(failure) = &tally.failure {
                    failure_fields(&mut line, failure);
                }
            }
            Ok(_) => {}
            Err(failure) => failure_fields(&mut line, failure),
        }
        line.number("body_bytes", trace.body_bytes as u64);
        if let Some(took) = trace.keys {
            line.millis("keys_ms", took);
        }
        line.millis("verify_ms", trace.verify);
        line.millis("claim_ms", trace.times.claim);
        line.millis("record_ms", trace.times.record);
        line.millis("duration_ms", took);
        gateway.log.line(line.finish().as_bytes());
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        if !self.reported {
            // Left of the boundary the body is waited for, and then a key; a client that leaves ends the wait.
            let failure = match self.trace.event {
                None if self.trace.body_bytes > 0 => no_key(Trouble {
                    code: Code::KeysUnavailable,
                    cause: "the client left before the key was there".to_owned(),
                }),
                None => Failure::new(Stage::Body, Code::BodyIncomplete),
                Some(_) => internal("the work on it was lost"),
            };
            self.report(&Err(failure));
        }
        self.gateway.metrics.requests_in_flight.dec();
    }
}

impl Service for Arc<Gateway> {
    async fn answer(&self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        Arc::clone(self).serve(request).await
    }
}

/// The path of a request up to the boundary. Dropping it is safe: nothing has happened.
async fn receive(
    gateway: &Arc<Gateway>,
    request: Request<Incoming>,
    visit: &mut Visit,
) -> Result<Arrived, Failure> {
    let overloaded = |_| Failure::new(Stage::Accept, Code::Overloaded);
    let trace = &mut visit.trace;
    let (head, body) = request.into_parts();
    // Known before the limit is looked at: a provider may need another status than 503.
    trace.source = visit.view.source_of(&head).cloned();
    visit.permit = Some(Arc::clone(&gateway.requests).try_acquire_owned().map_err(overloaded)?);
    let body_timeout = visit.view.body_timeout;
    let source = match visit.view.admit(&head) {
        Ok(source) => source,
        Err(refused) => {
            body::discard(&head, body, visit.started + body_timeout).await;
            return Err(refused);
        }
    };
    let source = gateway.handovers.equip(source);
    let body_deadline = visit.started + body_timeout.min(source.deadline);
    let read = body::read(source, head, body, body_deadline, &gateway.body_budget).await;
    let (received, memory) = read.map_err(|code| Failure::new(Stage::Body, code))?;
    visit.memory = Some(memory);
    trace.body_bytes = received.body.len();

    let (began, now) = (Instant::now(), jiff::Timestamp::now());
    match challenge::unsigned(&received, now).map_err(refused_handshake)? {
        Some(Unsigned::Answer(reply)) => return Ok(Arrived::Handshake(Arc::new(reply))),
        Some(Unsigned::Handover(Handover { secret, reply })) => {
            gateway.handovers.take(&received.source, &secret).await?;
            return Ok(Arrived::Handshake(Arc::new(reply)));
        }
        None => {}
    }
    let source = Arc::clone(&received.source);
    let deadline = visit.started + source.deadline;
    let keys = visit.view.keyring.find(&received, now, deadline).await.map_err(no_key)?;
    let verifying = Instant::now();
    trace.keys = source.fetches_keys().then(|| verifying - began);
    let verified = verify_with(received, &keys, jiff::Timestamp::now())
        .map_err(|code| gateway.handovers.refusal(&source, code))?;
    if let Some(reply) = visit.view.keyring.confirm(&verified, deadline).await.map_err(not_confirmed)? {
        return Ok(Arrived::Handshake(Arc::new(reply)));
    }
    if let Some(reply) = challenge::signed(&verified).map_err(refused_handshake)? {
        return Ok(Arrived::Handshake(Arc::new(reply)));
    }
    let identified = identify(verified).map_err(|code| Failure::new(Stage::Identify, code))?;
    trace.verify = verifying.elapsed();
    gateway.metrics.verified(trace.verify);
    Ok(match Identified::into_parts(identified) {
        (source, Content::Event(event)) => {
            let event = Arc::new(event);
            trace.event = Some(Arc::clone(&event));
            Arrived::Event(source, event)
        }
        (source, Content::Batch(events)) => {
            trace.items = Some(events.len());
            Arrived::Batch(source, events.into_iter().map(Arc::new).collect())
        }
    })
}

fn tier_refused(code: Code) -> Failure {
    Failure { dependency: Dependency::Redis, ..Failure::new(Stage::Claim, code) }
}

fn no_key(trouble: Trouble) -> Failure {
    let of_key = matches!(trouble.code, Code::KeyUnfit | Code::KeysUnavailable);
    troubled(if of_key { Stage::Keys } else { Stage::Verify }, trouble)
}

fn not_confirmed(trouble: Trouble) -> Failure {
    troubled(Stage::Challenge, trouble)
}

fn troubled(stage: Stage, Trouble { code, cause }: Trouble) -> Failure {
    let dependency = if code == Code::KeysUnavailable { Dependency::Provider } else { Dependency::None };
    Failure { dependency, cause: Some(cause).filter(|cause| !cause.is_empty()), ..Failure::new(stage, code) }
}

fn refused_handshake(code: Code) -> Failure {
    Failure::new(Stage::Challenge, code)
}

/// The event is committed with this body. `None` if with another one: Postgres notes that, and where what is signed is
/// watched, only Postgres can say whose it is.
fn recognised(event: &Event, committed: ShortDigest, tier: Tier) -> Option<Outcome> {
    (committed == ShortDigest::of(event.stamp())).then_some(Outcome::Duplicate(tier))
}

fn not_recorded(error: RecordError) -> Failure {
    Failure { code: error.code, stage: Stage::Record, dependency: error.dependency, cause: Some(error.cause) }
}

fn internal(cause: &str) -> Failure {
    Failure { cause: Some(cause.to_owned()), ..Failure::new(Stage::Claim, Code::Internal) }
}

fn failure_fields(line: &mut Line, failure: &Failure) {
    line.text("error.code", failure.code.as_str());
    line.text("error.stage", failure.stage.as_str());
    line.text("error.dependency", failure.dependency.as_str());
    if let Some(cause) = &failure.cause {
        line.text("error.cause", cause);
    }
}
