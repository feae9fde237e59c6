//! A target of deliveries: an HTTP server that keeps a log, and answers what the test says.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::wait::eventually;

/// One request that came.
#[derive(Debug, Clone)]
pub(crate) struct Delivery {
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    pub(crate) at: Instant,
    /// What it was answered.
    pub(crate) status: u16,
}

impl Delivery {
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or("")
    }

    pub(crate) fn event_id(&self) -> &str {
        self.header("hapax-event-id")
    }
}

/// What a delivery is answered; of one that is to hang, after that time.
pub(crate) type Answers = dyn Fn(&HeaderMap, usize) -> (u16, Duration) + Send + Sync;

/// What the test asks of it meanwhile.
#[derive(Debug, Clone, Copy, Default)]
struct Mood {
    /// No answer leaves.
    holds: bool,
    /// Everything is answered 503.
    refuses: bool,
}

#[derive(Debug)]
pub(crate) struct Receiver {
    pub(crate) address: SocketAddr,
    log: Arc<Mutex<Vec<Delivery>>>,
    at_once: Arc<(AtomicUsize, AtomicUsize)>,
    mood: watch::Sender<Mood>,
    _stop: DropGuard,
}

impl Receiver {
    /// One that takes everything.
    pub(crate) async fn start() -> Result<Self> {
        Self::answering(|_, _| (200, Duration::ZERO)).await
    }

    /// Answers by headers, and by how many requests came before.
    pub(crate) async fn answering(
        answers: impl Fn(&HeaderMap, usize) -> (u16, Duration) + Send + Sync + 'static,
    ) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let stop = CancellationToken::new();
        let (log, at_once) = (Arc::default(), Arc::default());
        let (mood, seen) = watch::channel(Mood::default());
        let served = serve(listener, Arc::new(answers), Arc::clone(&log), (Arc::clone(&at_once), seen));
        let stopped = stop.clone();
        drop(tokio::spawn(async move {
            tokio::select! { () = served => {}, () = stopped.cancelled() => {} }
        }));
        Ok(Self { address, log, at_once, mood, _stop: stop.drop_guard() })
    }

    /// Answers wait until [`Self::go_on`].
    pub(crate) fn hold(&self) {
        self.mood.send_modify(|mood| mood.holds = true);
    }

    pub(crate) fn go_on(&self) {
        self.mood.send_modify(|mood| mood.holds = false);
    }

    /// Whether everything is answered 503, from now on.
    pub(crate) fn refuse(&self, refuses: bool) {
        self.mood.send_modify(|mood| mood.refuses = refuses);
    }

    /// Keys of settings for a target that is this one.
    pub(crate) fn target(&self, name: &str) -> Vec<String> {
        vec![
            format!("target.{name}.kind = \"http\""),
            format!("target.{name}.url = \"http://{}/hook\"", self.address),
            format!("target.{name}.allow_private = true"),
            format!("target.{name}.retry_base = \"20ms\""),
        ]
    }

    pub(crate) fn log(&self) -> Vec<Delivery> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// How often each event was taken.
    pub(crate) fn taken(&self) -> BTreeMap<String, usize> {
        let mut taken = BTreeMap::new();
        for delivery in self.log().iter().filter(|delivery| (200..300).contains(&delivery.status)) {
            *taken.entry(delivery.event_id().to_owned()).or_default() += 1;
        }
        taken
    }

    /// The most requests that were there at once.
    pub(crate) fn peak(&self) -> usize {
        self.at_once.1.load(Ordering::SeqCst)
    }

    /// Waits until so many requests came, whatever they were answered.
    pub(crate) async fn until(&self, requests: usize) -> Result<Vec<Delivery>> {
        let come = || {
            let log = self.log();
            std::future::ready((log.len() >= requests).then_some(log))
        };
        eventually(Duration::from_secs(60), come).await
    }
}

async fn serve(
    listener: TcpListener,
    answers: Arc<Answers>,
    log: Arc<Mutex<Vec<Delivery>>>,
    (at_once, mood): (Arc<(AtomicUsize, AtomicUsize)>, watch::Receiver<Mood>),
) {
    let requests = Arc::new(AtomicUsize::new(0));
    let mut connections = tokio::task::JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let (answers, log) = (Arc::clone(&answers), Arc::clone(&log));
        let (at_once, requests, mood) = (Arc::clone(&at_once), Arc::clone(&requests), mood.clone());
        connections.spawn(async move {
            let service = service_fn(move |request: Request<Incoming>| {
                let (answers, log) = (Arc::clone(&answers), Arc::clone(&log));
                let (at_once, requests) = (Arc::clone(&at_once), Arc::clone(&requests));
                let mut mood = mood.clone();
                async move {
                    let now = at_once.0.fetch_add(1, Ordering::SeqCst) + 1;
                    at_once.1.fetch_max(now, Ordering::SeqCst);
                    let at = Instant::now();
                    let (head, body) = request.into_parts();
                    let body =
                        body.collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
                    let before = requests.fetch_add(1, Ordering::SeqCst);
                    let (status, pause) = answers(&head.headers, before);
                    let status = if mood.borrow().refuses { 503 } else { status };
                    let delivery = Delivery { headers: head.headers, body, at, status };
                    log.lock().unwrap_or_else(PoisonError::into_inner).push(delivery);
                    if !pause.is_zero() {
                        tokio::time::sleep(pause).await;
                    }
                    mood.wait_for(|mood| !mood.holds).await.ok();
                    at_once.0.fetch_sub(1, Ordering::SeqCst);
                    let mut response = Response::new(Full::new(Bytes::new()));
                    *response.status_mut() = http::StatusCode::from_u16(status).unwrap_or_default();
                    if status == 429 {
                        response.headers_mut().insert("retry-after", http::HeaderValue::from_static("1"));
                    }
                    Ok::<_, Infallible>(response)
                }
            });
            drop(http1::Builder::new().serve_connection(TokioIo::new(stream), service).await);
        });
    }
}
