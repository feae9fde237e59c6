//! Connections to a target: look its name up, check what comes back, connect to what was checked.
//!
//! Invariant: the address that is connected to is one that was checked; the name is not looked up a second time, since
//! whoever answers may answer otherwise then. No message names host, port or certificate.

use std::fmt;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use http::Uri;
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::TokioIo;
use rustix::io::Errno;
use rustls::{CertificateError, ClientConfig};
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, lookup_host};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tower_service::Service;

use super::{Endpoint, Fault, Undelivered, is_public};
use crate::tls;

/// Most addresses of one name that are tried.
const ADDRESSES_MAX: usize = 8;

/// What this machine runs out of; says nothing of the target.
const EXHAUSTED: [Errno; 5] = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM, Errno::ADDRNOTAVAIL];

/// Connects to one target, whatever URL it is asked for.
#[derive(Clone)]
pub(super) struct Connector {
    shared: Arc<Shared>,
}

struct Shared {
    endpoint: Endpoint,
    tls: Option<TlsConnector>,
    allow_private: bool,
    limit: Duration,
}

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Connector({:?})", self.shared.endpoint)
    }
}

/// Bytes both ways.
pub(super) trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

impl Connection for Box<dyn Duplex> {
    fn connected(&self) -> Connected {
        Connected::new().extra(Served::default())
    }
}

/// Whether a connection has brought an answer already, so that its end may just mean that it was idle for too long.
#[derive(Debug, Clone, Default)]
pub(super) struct Served(Arc<AtomicBool>);

impl Served {
    pub(super) fn note(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub(super) fn before(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Why there is no connection.
#[derive(Debug, Error)]
pub(super) enum Unconnected {
    #[error("its host's name cannot be looked up: {0}")]
    Resolve(io::Error),
    #[error(
        "its host's name leads only to this machine, private networks or nowhere, and allow_private is not true: \
         nothing was sent"
    )]
    Address,
    #[error("cannot connect: {0}")]
    Connect(io::Error),
    #[error("TLS: {0}")]
    Tls(String),
    #[error("no connection within {}", crate::settings::show_duration(*.0))]
    Timeout(Duration),
}

impl From<&Unconnected> for Undelivered {
    fn from(error: &Unconnected) -> Self {
        let (fault, word) = match error {
            Unconnected::Resolve(io) | Unconnected::Connect(io) if is_exhausted(io) => (Fault::Ours, "ours"),
            Unconnected::Resolve(_) => (Fault::Target, "resolve"),
            Unconnected::Address => (Fault::Target, "address"),
            Unconnected::Connect(_) => (Fault::Target, "connect"),
            Unconnected::Tls(_) => (Fault::Target, "tls"),
            Unconnected::Timeout(_) => (Fault::Target, "timeout"),
        };
        Self { fault, cause: error.to_string(), retry_after: None, word }
    }
}

fn is_exhausted(error: &io::Error) -> bool {
    Errno::from_io_error(error).is_some_and(|errno| EXHAUSTED.contains(&errno))
}

impl Connector {
    /// `limit` is for one connection, TLS included.
    pub(super) fn new(
        endpoint: Endpoint,
        tls: Option<ClientConfig>,
        allow_private: bool,
        limit: Duration,
    ) -> Self {
        let tls = tls.map(|mut config| {
            config.alpn_protocols = vec![b"http/1.1".to_vec()];
            TlsConnector::from(Arc::new(config))
        });
        Self { shared: Arc::new(Shared { endpoint, tls, allow_private, limit }) }
    }
}

impl Service<Uri> for Connector {
    type Response = TokioIo<Box<dyn Duplex>>;
    type Error = Unconnected;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Unconnected>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Unconnected>> {
        Poll::Ready(Ok(()))
    }

    // The pool may go on with a connection that nobody waits for any more, so it has a limit of its own.
    fn call(&mut self, _: Uri) -> Self::Future {
        let shared = Arc::clone(&self.shared);
        Box::pin(async move {
            let connected = timeout(shared.limit, shared.connect()).await;
            connected.unwrap_or(Err(Unconnected::Timeout(shared.limit))).map(TokioIo::new)
        })
    }
}

impl Shared {
    async fn connect(&self) -> Result<Box<dyn Duplex>, Unconnected> {
        let stream = self.connect_to_any(&self.addresses().await?).await?;
        stream.set_nodelay(true).map_err(Unconnected::Connect)?;
        let (Some(tls), Some(name)) = (&self.tls, self.endpoint.tls()) else { return Ok(Box::new(stream)) };
        match tls.connect(name.clone(), stream).await {
            Ok(stream) => Ok(Box::new(stream)),
            Err(error) => Err(Unconnected::Tls(handshake_cause(&error))),
        }
    }

    /// Those that may be connected to.
    async fn addresses(&self) -> Result<Vec<SocketAddr>, Unconnected> {
        let found = lookup_host((self.endpoint.host(), self.endpoint.port())).await;
        let found = found.map_err(Unconnected::Resolve)?;
        let allowed = |address: &SocketAddr| self.allow_private || is_public(address.ip());
        let addresses: Vec<_> = found.filter(allowed).take(ADDRESSES_MAX).collect();
        if addresses.is_empty() { Err(Unconnected::Address) } else { Ok(addresses) }
    }

    /// Each has the same share of the time: the first of two must not use up all of it by being silent.
    async fn connect_to_any(&self, addresses: &[SocketAddr]) -> Result<TcpStream, Unconnected> {
        let share = self.limit / u32::try_from(addresses.len()).unwrap_or(u32::MAX).max(1);
        let mut failure = Unconnected::Address;
        for address in addresses {
            match timeout(share, TcpStream::connect(address)).await {
                Ok(Ok(stream)) => return Ok(stream),
                Ok(Err(error)) => failure = Unconnected::Connect(error),
                Err(_elapsed) => failure = Unconnected::Timeout(self.limit),
            }
        }
        Err(failure)
    }
}

/// The library's own words may hold the host's name and those of the certificate.
fn handshake_cause(error: &io::Error) -> String {
    use CertificateError as Is;
    let Some(cause) = tls::cause(error) else { return format!("the connection ended: {}", error.kind()) };
    let certificate = match cause {
        rustls::Error::InvalidCertificate(problem) => problem,
        rustls::Error::AlertReceived(alert) => return format!("it ended the handshake: {alert:?}"),
        rustls::Error::InvalidMessage(_) => return "what answers there speaks no TLS".to_owned(),
        rustls::Error::PeerIncompatible(_) => {
            return "it offers no TLS 1.2 or 1.3 with a cipher of today".to_owned();
        }
        _ => return "the handshake failed".to_owned(),
    };
    let what = match certificate {
        Is::UnknownIssuer | Is::BadSignature => "comes from no authority that this machine trusts",
        Is::NotValidForName | Is::NotValidForNameContext { .. } => "is for another name",
        Is::Expired | Is::ExpiredContext { .. } => "has expired",
        Is::NotValidYet | Is::NotValidYetContext { .. } => "begins later",
        Is::Revoked => "was withdrawn",
        _ => "cannot be checked",
    };
    format!("its certificate {what}")
}
