//! Servers that do less than the gateway: up to a point the same, on the same crates and the same runtime.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use bytes::Bytes;
use hapax::body::Received;
use hapax::config::Source;
use hapax::error::Code;
use hapax::identify::{Event, Identified, identify};
use hapax::provider::Scheme;
use hapax::verify::verify;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;

use super::naive::{self, Naive};
use super::payload::{SECRET, SOURCE};

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Spec {
    pub(crate) listen: SocketAddr,
    pub(crate) work: Work,
}

/// What is done with a request once its body is read.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Work {
    Nothing,
    Verify,
    Identify,
    /// Identified, and recorded in a transaction of its own.
    Record(naive::Spec),
}

struct Receiver {
    source: Arc<Source>,
    work: Work,
    naive: Option<Naive>,
}

/// Serves until the process is killed.
pub(crate) async fn serve(spec: Spec) -> Result<()> {
    let naive = match &spec.work {
        Work::Record(stores) => Some(Naive::start(stores).await?),
        Work::Nothing | Work::Verify | Work::Identify => None,
    };
    let receiver = Arc::new(Receiver { source: source()?, work: spec.work, naive });
    let listener = TcpListener::bind(spec.listen).await?;
    loop {
        let (stream, _peer) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let receiver = Arc::clone(&receiver);
        let service = service_fn(move |request| {
            let receiver = Arc::clone(&receiver);
            async move { Ok::<_, Infallible>(receiver.answer(request).await) }
        });
        tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
    }
}

/// The source that the gateway has too.
pub(crate) fn source() -> Result<Arc<Source>> {
    let scheme = Scheme::preset("stripe").context("no such preset")?;
    let key = scheme.key(SECRET).map_err(anyhow::Error::msg)?;
    Ok(Arc::new(Source::new(SOURCE, scheme, vec![key])))
}

impl Receiver {
    async fn answer(&self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        let status = match self.work(request).await {
            Ok(()) => StatusCode::OK,
            Err(error) => {
                super::report::complain(&format!("{error:#}"));
                StatusCode::INTERNAL_SERVER_ERROR
            }
        };
        let mut response = Response::new(Full::default());
        *response.status_mut() = status;
        response
    }

    async fn work(&self, request: Request<Incoming>) -> Result<()> {
        let (head, body) = request.into_parts();
        let body = body.collect().await?.to_bytes();
        let received = Received { source: Arc::clone(&self.source), head, body };
        match &self.work {
            Work::Nothing => Ok(()),
            Work::Verify => verify(received, jiff::Timestamp::now()).map(drop).map_err(refused),
            Work::Identify => identified(received).map(drop),
            Work::Record(_) => {
                let naive = self.naive.as_ref().context("no stores")?;
                naive.record(&identified(received)?).await
            }
        }
    }
}

fn identified(received: Received) -> Result<Event> {
    let verified = verify(received, jiff::Timestamp::now()).map_err(refused)?;
    let (_source, content) = identify(verified).map(Identified::into_parts).map_err(refused)?;
    content.into_event().context("a batch")
}

fn refused(code: Code) -> anyhow::Error {
    anyhow::anyhow!("refused: {}", code.as_str())
}
