//! One GET by HTTPS: a time-out over all of it, a limit on bytes, no redirect, no proxy, no credentials.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use bytes::Bytes;
use http::header::{ACCEPT, CACHE_CONTROL, CONNECTION, HOST, USER_AGENT};
use http::{HeaderMap, Request, StatusCode};
use http_body_util::{BodyExt as _, Empty, LengthLimitError, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::crypto::ring;
use rustls::pki_types::{ServerName, TrustAnchor};
use rustls::{ClientConfig, RootCertStore};
use thiserror::Error;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::config::Keys;
use crate::provider::pin::Pinned;

/// Bytes of an answer's head that are read.
const HEAD_MAX: usize = 16 * 1024;

/// What a fetch is for, as a metric's label.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    Keys,
    Confirm,
}

impl Purpose {
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Keys => "keys",
            Self::Confirm => "confirm",
        }
    }
}

/// Why there is no answer that can be used.
#[derive(Debug, Error)]
pub(super) enum FetchError {
    #[error("no whole answer within {}", crate::settings::show_duration(*.0))]
    Timeout(Duration),
    #[error("{0}")]
    Connection(String),
    #[error("answered {0}")]
    Status(StatusCode),
    #[error("more than {0} bytes")]
    TooLarge(usize),
    #[error("no source of the settings fetches anything")]
    NotStarted,
}

impl FetchError {
    /// As a metric's label.
    pub(super) fn word(&self) -> &'static str {
        match self {
            Self::Timeout(_) => "timeout",
            Self::Connection(_) | Self::NotStarted => "connection",
            Self::Status(_) => "status",
            Self::TooLarge(_) => "too_large",
        }
    }
}

/// What stands at a URL.
#[derive(Debug)]
pub(super) struct Page {
    pub(super) body: Bytes,
    /// How long it may be kept, if the server says it (RFC 9111, 5.2.2.1).
    pub(super) max_age: Option<Duration>,
}

pub(super) struct Fetcher {
    tls: TlsConnector,
    /// Whom a server's certificate may come from, and a signing one too.
    authorities: Arc<RootCertStore>,
    resolve: BTreeMap<String, SocketAddr>,
    limit: Duration,
    body_max: usize,
}

impl std::fmt::Debug for Fetcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Fetcher({} authorities)", self.authorities.len())
    }
}

impl Fetcher {
    /// Trusts whom this machine trusts, and whom the settings name.
    pub(super) fn new(settings: &Keys) -> anyhow::Result<Self> {
        let system = rustls_native_certs::load_native_certs();
        let mut authorities = RootCertStore::empty();
        // The machine's list may hold old certificates that this library takes no more.
        authorities.add_parsable_certificates(system.certs);
        for certificate in &settings.ca {
            authorities.add(certificate.clone()).context("keys.ca: a certificate cannot be used")?;
        }
        let hint = "this machine trusts no certificate authority, so nothing can be fetched by HTTPS: install the \
                    package ca-certificates, or give keys.ca";
        ensure!(!authorities.is_empty(), "{hint}");
        let authorities = Arc::new(authorities);
        let mut tls = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_root_certificates(Arc::clone(&authorities))
            .with_no_client_auth();
        tls.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self {
            tls: TlsConnector::from(Arc::new(tls)),
            authorities,
            resolve: settings.resolve.clone(),
            limit: settings.fetch_timeout,
            body_max: settings.body_max,
        })
    }

    pub(super) fn anchors(&self) -> &[TrustAnchor<'static>] {
        &self.authorities.roots
    }

    /// What a 200 brings.
    pub(super) async fn get(&self, url: &Pinned) -> Result<Page, FetchError> {
        let got = timeout(self.limit, self.exchange(url)).await;
        got.unwrap_or(Err(FetchError::Timeout(self.limit)))
    }

    async fn exchange(&self, url: &Pinned) -> Result<Page, FetchError> {
        let stream = self.connect(url.host()).await?;
        let mut client = http1::Builder::new();
        let (mut sender, connection) =
            client.max_buf_size(HEAD_MAX).handshake(TokioIo::new(stream)).await.map_err(lost)?;
        let request = Request::get(url.target())
            .header(HOST, url.host())
            .header(USER_AGENT, concat!("hapax/", env!("CARGO_PKG_VERSION")))
            .header(ACCEPT, "*/*")
            .header(CONNECTION, "close")
            .body(Empty::<Bytes>::new())
            .map_err(lost)?;
        let answer = async {
            let response = sender.send_request(request).await.map_err(lost)?;
            if response.status() != StatusCode::OK {
                return Err(FetchError::Status(response.status()));
            }
            let max_age = max_age(response.headers());
            match Limited::new(response.into_body(), self.body_max).collect().await {
                Ok(body) => Ok(Page { body: body.to_bytes(), max_age }),
                Err(error) if error.is::<LengthLimitError>() => Err(FetchError::TooLarge(self.body_max)),
                Err(error) => Err(FetchError::Connection(error.to_string())),
            }
        };
        // The connection may end before its answer is read.
        let driven = async {
            drop(connection.await);
            std::future::pending::<Infallible>().await
        };
        tokio::select! {
            answer = answer => answer,
            never = driven => match never {},
        }
    }

    async fn connect(&self, host: &str) -> Result<TlsStream<TcpStream>, FetchError> {
        let name = ServerName::try_from(host.to_owned()).map_err(lost)?;
        let stream = match self.resolve.get(host) {
            Some(address) => TcpStream::connect(address).await,
            None => TcpStream::connect((host, 443)).await,
        };
        self.tls.connect(name, stream.map_err(lost)?).await.map_err(lost)
    }
}

fn max_age(headers: &HeaderMap) -> Option<Duration> {
    let said = headers.get_all(CACHE_CONTROL).iter().filter_map(|value| value.to_str().ok());
    let mut directives = said.flat_map(|text| text.split(',')).filter_map(|text| text.trim().split_once('='));
    let (_, seconds) = directives.find(|(name, _)| name.eq_ignore_ascii_case("max-age"))?;
    seconds.trim_matches('"').parse().ok().map(Duration::from_secs)
}

fn lost(error: impl Into<anyhow::Error>) -> FetchError {
    FetchError::Connection(format!("{:#}", error.into()))
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn how_long_a_page_may_be_kept_is_read_where_it_is_said() {
        for (said, wanted) in [
            ("public, max-age=20138, must-revalidate, no-transform", Some(20_138)),
            ("MAX-AGE=\"7\"", Some(7)),
            ("s-maxage=9", None),
            ("max-age=-1", None),
            ("max-age=soon", None),
            ("no-store", None),
        ] {
            let headers = HeaderMap::from_iter([(CACHE_CONTROL, HeaderValue::from_static(said))]);
            assert_eq!(max_age(&headers), wanted.map(Duration::from_secs), "{said}");
        }
        assert_eq!(max_age(&HeaderMap::new()), None);
    }
}
