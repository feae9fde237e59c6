//! A plain HTTP/1.1 client for the commands that send: one connection per sender, kept alive.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::HOST;
use http::{HeaderName, HeaderValue, Method, Request, Uri};
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

/// Where a gateway of this machine that listens there can be reached.
#[must_use]
pub fn reachable(mut listen: SocketAddr) -> SocketAddr {
    if listen.ip().is_unspecified() {
        let ip: IpAddr =
            if listen.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() };
        listen.set_ip(ip);
    }
    listen
}

/// Where to send.
#[derive(Debug, Clone)]
pub struct Target {
    authority: String,
    path: String,
}

impl Target {
    /// Reads `http://host:port/path`.
    ///
    /// # Errors
    /// What is wrong with the URL and what would be right.
    pub fn parse(url: &str) -> Result<Self, String> {
        let uri: Uri = url.parse().map_err(|error| format!("{url:?} is not a URL: {error}"))?;
        let authority =
            uri.authority().ok_or_else(|| format!("{url:?} has no host: give http://host:port/path"))?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => {
                return Err("https is not offered here: print the request with --dry-run and send it with another tool"
                    .to_owned());
            }
            _ => return Err(format!("{url:?}: give http://host:port/path")),
        }
        let path = uri.path_and_query().map_or("/", |path| path.as_str()).to_owned();
        let authority = match authority.port() {
            Some(_) => authority.to_string(),
            None => format!("{authority}:80"),
        };
        Ok(Self { authority, path })
    }

    /// Path and query.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Host and port.
    #[must_use]
    pub fn authority(&self) -> &str {
        &self.authority
    }
}

/// A request as it stands on the wire.
#[must_use]
pub fn raw_request(target: &Target, headers: &[(HeaderName, HeaderValue)], body: &[u8]) -> Vec<u8> {
    let mut request = Vec::new();
    let mut line = |bytes: &[u8]| {
        request.extend_from_slice(bytes);
        request.extend_from_slice(b"\r\n");
    };
    line(format!("POST {} HTTP/1.1", target.path()).as_bytes());
    line(format!("Host: {}", target.authority()).as_bytes());
    for (name, value) in headers {
        line(&[name.as_str().as_bytes(), b": ", value.as_bytes()].concat());
    }
    line(format!("Content-Length: {}", body.len()).as_bytes());
    line(b"");
    request.extend_from_slice(body);
    request
}

/// What came back.
#[derive(Debug)]
pub struct Answer {
    /// The status code.
    pub status: u16,
    /// The value of `Hapax-Outcome`, if there is one.
    pub outcome: Option<String>,
    /// From sending the head to the end of the body.
    pub took: Duration,
}

/// One open connection.
#[derive(Debug)]
pub struct Connection {
    sender: SendRequest<Full<Bytes>>,
    target: Target,
}

impl Connection {
    /// Connects.
    ///
    /// # Errors
    /// Those of connecting.
    pub async fn open(target: &Target) -> anyhow::Result<Self> {
        let stream = TcpStream::connect(&target.authority).await?;
        stream.set_nodelay(true)?;
        let (sender, connection) = handshake(TokioIo::new(stream)).await?;
        drop(tokio::spawn(async move {
            // The sender reports what is wrong.
            drop(connection.await);
        }));
        Ok(Self { sender, target: target.clone() })
    }

    /// Waits until it can take a request; `false` if it cannot any more.
    pub async fn is_ready(&mut self) -> bool {
        self.sender.ready().await.is_ok()
    }

    /// Posts once and reads the whole answer.
    ///
    /// # Errors
    /// Those of the connection.
    pub async fn post(
        &mut self,
        headers: &[(HeaderName, HeaderValue)],
        body: Bytes,
    ) -> anyhow::Result<Answer> {
        self.send(Method::POST, headers, body).await
    }

    /// Gets once and reads the whole answer.
    ///
    /// # Errors
    /// Those of the connection.
    pub async fn get(&mut self) -> anyhow::Result<Answer> {
        self.send(Method::GET, &[], Bytes::new()).await
    }

    async fn send(
        &mut self,
        method: Method,
        headers: &[(HeaderName, HeaderValue)],
        body: Bytes,
    ) -> anyhow::Result<Answer> {
        let request = Request::builder().method(method).uri(self.target.path());
        let mut request = request.header(HOST, self.target.authority());
        for (name, value) in headers {
            request = request.header(name, value);
        }
        let started = Instant::now();
        let response = self.sender.send_request(request.body(Full::new(body))?).await?;
        let outcome = response.headers().get("hapax-outcome");
        let outcome = outcome.and_then(|value| value.to_str().ok()).map(str::to_owned);
        let status = response.status().as_u16();
        response.into_body().collect().await?;
        Ok(Answer { status, outcome, took: started.elapsed() })
    }
}
