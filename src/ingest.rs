//! The path of a request: [`run`] names every stage in order, [`Gateway::serve`] answers, counts and logs.
//!
//! Left of the cancel boundary (`‖`) a client that goes away drops everything: nothing has happened. Right of it
//! the work runs in a tracked task, which neither a disconnect nor a deadline can cancel.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::EXPECT;
use http::{HeaderMap, Method, Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::Semaphore;
use tokio::time::timeout_at;

use crate::body;
use crate::challenge;
use crate::claim::{Claim, FastTier, ShortDigest, Tier};
use crate::config::{self, Config, RequestLog, Source};
use crate::error::{Code, Dependency, Stage};
use crate::flight::{Flights, Seat};
use crate::identify::{Event, Identified, identify};
use crate::log::{Line, Log};
use crate::metrics::Metrics;
use crate::record::{How, RecordError, Recorder, Verdict};
use crate::respond::{self, Failure, Outcome};
use crate::server::Service;
use crate::tasks::Tasks;
use crate::verify::verify;

type Delivered = Result<Outcome, Failure>;

/// Everything that a request needs.
#[derive(Debug)]
pub struct Gateway {
    sources: HashMap<String, Arc<Source>>,
    server: config::Server,
    in_flight_wait: Duration,
    request_log: RequestLog,
    requests: Semaphore,
    body_budget: Arc<Semaphore>,
    tier: FastTier,
    recorder: Recorder,
    flights: Arc<Flights<Delivered>>,
    metrics: Arc<Metrics>,
    nowhere: Arc<str>,
    log: Log,
    tasks: Tasks,
}

/// What the log line tells beside the result; filled as far as the request came.
#[derive(Debug, Default)]
struct Trace {
    source: Option<Arc<Source>>,
    event: Option<Arc<Event>>,
    body_bytes: usize,
    verify: Duration,
    deliver: Duration,
}

impl Gateway {
    /// Puts the parts together.
    #[must_use]
    pub fn new(
        config: &Config,
        tier: FastTier,
        recorder: Recorder,
        metrics: Arc<Metrics>,
        log: Log,
        tasks: Tasks,
    ) -> Self {
        let sources = config.sources.iter().map(|(name, source)| (name.clone(), Arc::clone(source)));
        Self {
            sources: sources.collect(),
            in_flight_wait: config.in_flight.wait,
            request_log: config.log.requests,
            requests: Semaphore::new(config.server.requests_max),
            body_budget: Arc::new(Semaphore::new(config.server.buffered_max / body::PERMIT_BYTES)),
            server: config.server.clone(),
            tier,
            recorder,
            flights: Flights::new(config.in_flight.waiters_max),
            metrics,
            nowhere: "none".into(),
            log,
            tasks,
        }
    }

    /// Answers a request; every request gets one answer, one log line and one count.
    pub async fn serve(self: Arc<Self>, request: Request<Incoming>) -> Response<Full<Bytes>> {
        let started = Instant::now();
        let _counted = Counted::start(&self.metrics.requests_in_flight);
        let mut trace = Trace::default();
        let result = run(&self, request, started, &mut trace).await;
        self.report(&result, &trace, started.elapsed());
        respond::respond(trace.source.as_deref(), &result, self.server.retry_after)
    }

    fn source(&self, path: &str) -> Result<Arc<Source>, Failure> {
        let source = path.strip_prefix("/in/").and_then(|name| self.sources.get(name));
        source.map(Arc::clone).ok_or_else(|| Failure::new(Stage::Accept, Code::UnknownSource))
    }

    /// Delivers an event once: joins a delivery of it that is under way, or leads one in a task of its own.
    ///
    /// Dropping the future changes nothing but that nobody hears the result.
    async fn once(self: &Arc<Self>, source: Arc<Source>, event: Arc<Event>, deadline: Instant) -> Delivered {
        if let Some(committed) = self.tier.recall(&event.key, Instant::now()) {
            return Ok(known(&event, committed, Tier::Memory));
        }
        match self.flights.join(event.key, event.digest) {
            Seat::Leader(leader) => {
                let gateway = Arc::clone(self);
                let work = self.tasks.spawn(async move {
                    let delivered = gateway.deliver(&source, &event, deadline).await;
                    leader.land(&delivered);
                    delivered
                });
                work.await.unwrap_or_else(|lost| Err(internal(&lost.to_string())))
            }
            Seat::Follower(landed) => match timeout_at(deadline.into(), landed).await {
                Ok(Ok(Ok(Outcome::Accepted | Outcome::Rejected))) => Ok(Outcome::Duplicate(Tier::Flight)),
                Ok(Ok(delivered)) => delivered,
                Ok(Err(lost)) => Err(internal(&lost.to_string())),
                Err(_elapsed) => Err(Failure::new(Stage::Claim, Code::InFlight)),
            },
            Seat::Full => Err(Failure::new(Stage::Claim, Code::Overloaded)),
        }
    }

    /// claim → record → settle. Runs to its end in any case.
    async fn deliver(&self, source: &Arc<Source>, event: &Arc<Event>, deadline: Instant) -> Delivered {
        let started = Instant::now();
        let wait = self.in_flight_wait.min(deadline.saturating_duration_since(started));
        let claim = self
            .tier
            .claim(&event.key, wait)
            .await
            .map_err(|code| Failure { dependency: Dependency::Redis, ..Failure::new(Stage::Claim, code) })?;
        self.metrics.stage("claim", started.elapsed());
        let (lease, how) = match claim {
            Claim::Done(committed) => {
                if let Some(generation) = self.tier.generation() {
                    self.tier.remember(event.key, committed, generation);
                }
                return Ok(known(event, committed, Tier::Redis));
            }
            Claim::Held(lease) => (Some(lease), How::Batched),
            Claim::Unclaimed => (None, How::Batched),
            Claim::Foreign => (None, How::Alone),
        };
        let started = Instant::now();
        let recorded = self.recorder.record(source, event, deadline, how).await;
        self.metrics.stage("record", started.elapsed());
        match recorded {
            Ok(recorded) => {
                let (outcome, digest) = match recorded.verdict() {
                    Verdict::Accepted => (Outcome::Accepted, event.digest),
                    Verdict::Rejected => (Outcome::Rejected, event.digest),
                    Verdict::Known(digest) => (known(event, ShortDigest::of(digest), Tier::Postgres), digest),
                };
                self.tier.settle(event, digest, recorded.generation());
                Ok(outcome)
            }
            Err(error) => {
                if let Some(lease) = lease {
                    self.tier.release(&event.key, lease).await;
                }
                Err(not_recorded(error))
            }
        }
    }

    fn report(&self, result: &Delivered, trace: &Trace, took: Duration) {
        let verdict = respond::verdict(trace.source.as_deref(), result);
        let source = trace.source.as_ref().map_or(&self.nowhere, |source| &source.name);
        self.metrics.answered(source, verdict.outcome, verdict.code);
        self.metrics.stage("total", took);
        if let Ok(Outcome::Duplicate(tier) | Outcome::Mismatch(tier)) = result {
            self.metrics.duplicate(*tier);
        }
        if self.request_log == RequestLog::Failed && verdict.status.is_success() {
            return;
        }
        let mut line = Line::new(jiff::Timestamp::now(), respond::level(result), "request");
        line.text("source", source);
        line.text("outcome", verdict.outcome);
        line.number("http.status", verdict.status.as_u16().into());
        if let Some(event) = &trace.event {
            line.text("event.id", &event.id);
            line.text("event.digest", &hex::encode(event.digest.0.get(..6).unwrap_or_default()));
        }
        match result {
            Ok(Outcome::Duplicate(tier) | Outcome::Mismatch(tier)) => line.text("tier", tier.as_str()),
            Ok(_) => {}
            Err(failure) => failure_fields(&mut line, failure),
        }
        line.number("body_bytes", trace.body_bytes as u64);
        line.millis("verify_ms", trace.verify);
        line.millis("deliver_ms", trace.deliver);
        line.millis("duration_ms", took);
        self.log.line(line.finish().as_bytes());
    }
}

impl Service for Arc<Gateway> {
    async fn answer(&self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        Arc::clone(self).serve(request).await
    }
}

/// The path of a request.
async fn run(
    gateway: &Arc<Gateway>,
    request: Request<Incoming>,
    started: Instant,
    trace: &mut Trace,
) -> Delivered {
    let overloaded = |_| Failure::new(Stage::Accept, Code::Overloaded);
    let _permit = gateway.requests.try_acquire().map_err(overloaded)?;
    let (head, body) = request.into_parts();
    let source = gateway.source(head.uri.path())?;
    trace.source = Some(Arc::clone(&source));
    admit(&source, &head.method, &head.headers)?;
    let deadline = started + source.deadline;

    let body_deadline = started + gateway.server.body_timeout;
    let read = body::read(source, head, body, body_deadline, &gateway.body_budget).await;
    let (received, _memory) = read.map_err(|code| Failure::new(Stage::Body, code))?;
    trace.body_bytes = received.body.len();

    let verifying = Instant::now();
    if let Some(reply) = challenge::unsigned(&received).map_err(refused_handshake)? {
        return Ok(Outcome::Handshake(Arc::new(reply)));
    }
    let verified =
        verify(received, jiff::Timestamp::now()).map_err(|code| Failure::new(Stage::Verify, code))?;
    if let Some(reply) = challenge::signed(&verified).map_err(refused_handshake)? {
        return Ok(Outcome::Handshake(Arc::new(reply)));
    }
    let identified = identify(verified).map_err(|code| Failure::new(Stage::Identify, code))?;
    trace.verify = verifying.elapsed();
    let (source, event) = Identified::into_parts(identified);
    let event = Arc::new(event);
    trace.event = Some(Arc::clone(&event));

    // ‖ From here on a client that goes away changes nothing.
    let delivering = Instant::now();
    let delivered = gateway.once(source, event, deadline).await;
    trace.deliver = delivering.elapsed();
    delivered
}

/// Whether the source takes such a request at all.
fn admit(source: &Source, method: &Method, headers: &HeaderMap) -> Result<(), Failure> {
    let refuse = |code| Err(Failure::new(Stage::Accept, code));
    if method != Method::POST && !source.scheme.answers(method) {
        return refuse(Code::MethodNotAllowed);
    }
    if headers.get(EXPECT).is_some_and(|expect| !expect.as_bytes().eq_ignore_ascii_case(b"100-continue")) {
        return refuse(Code::ExpectationFailed);
    }
    Ok(())
}

fn refused_handshake(code: Code) -> Failure {
    Failure::new(Stage::Challenge, code)
}

/// The event is committed: with this body, or with another one.
fn known(event: &Event, committed: ShortDigest, tier: Tier) -> Outcome {
    if committed == ShortDigest::of(event.digest) {
        Outcome::Duplicate(tier)
    } else {
        Outcome::Mismatch(tier)
    }
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

/// Counts up until dropped, so that a request that its client left is not counted for ever.
struct Counted<'a>(&'a Gauge);

impl<'a> Counted<'a> {
    fn start(gauge: &'a Gauge) -> Self {
        gauge.inc();
        Self(gauge)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.dec();
    }
}
