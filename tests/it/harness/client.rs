//! The sender of webhooks in the tests: an HTTP/1.1 client on one kept connection, and a raw one for what no client
//! would send.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, Result};
use bytes::Bytes;
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// Longer than any answer of a gateway may take.
const LIMIT: Duration = Duration::from_secs(60);

/// What came back.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Answer {
    /// The header's value, or nothing.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }
}

/// A client that keeps one connection and makes a new one when it was closed.
#[derive(Debug)]
pub(crate) struct Client {
    address: SocketAddr,
    connection: Option<SendRequest<Full<Bytes>>>,
}

impl Client {
    pub(crate) fn new(address: SocketAddr) -> Self {
        Self { address, connection: None }
    }

    pub(crate) async fn get(&mut self, path: &str) -> Result<Answer> {
        self.send(Method::GET, path, &[], Bytes::new()).await
    }

    pub(crate) async fn post(
        &mut self,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Result<Answer> {
        self.send(Method::POST, path, headers, body).await
    }

    pub(crate) async fn send(
        &mut self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Result<Answer> {
        let mut request =
            Request::builder().method(method).uri(path).header(http::header::HOST, self.address.to_string());
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(body.into()))?;
        tokio::time::timeout(LIMIT, self.exchange(request)).await.context("no answer")?
    }

    async fn exchange(&mut self, request: Request<Full<Bytes>>) -> Result<Answer> {
        let connection = self.connection().await?;
        let (parts, body) = connection.send_request(request).await?.into_parts();
        let body = body.collect().await?.to_bytes();
        Ok(Answer { status: parts.status, headers: parts.headers, body })
    }

    async fn connection(&mut self) -> Result<&mut SendRequest<Full<Bytes>>> {
        let kept = match self.connection.take() {
            // Ready is known only once the last answer is read to its end and the other side has not closed.
            Some(mut kept) => kept.ready().await.is_ok().then_some(kept),
            None => None,
        };
        let open = match kept {
            Some(kept) => kept,
            None => connect(self.address).await?,
        };
        Ok(self.connection.insert(open))
    }
}

async fn connect(address: SocketAddr) -> Result<SendRequest<Full<Bytes>>> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let (sender, connection) = handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    Ok(sender)
}

/// A connection on which the test writes its own bytes.
#[derive(Debug)]
pub(crate) struct Raw(TcpStream);

impl Raw {
    pub(crate) async fn connect(address: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Self(stream))
    }

    pub(crate) async fn write(&mut self, bytes: &[u8]) -> Result<()> {
        Ok(self.0.write_all(bytes).await?)
    }

    /// Says that nothing more will be written.
    pub(crate) async fn finish(&mut self) -> Result<()> {
        Ok(self.0.shutdown().await?)
    }

    /// Goes away as a client that crashed does: whatever is on its way is lost.
    pub(crate) fn reset(self) -> Result<()> {
        Ok(socket2::SockRef::from(&self.0).set_linger(Some(Duration::ZERO))?)
    }

    /// Whether something has come that was not read yet.
    pub(crate) fn has_come(&self) -> bool {
        socket2::SockRef::from(&self.0).peek(&mut [std::mem::MaybeUninit::uninit()]).is_ok()
    }

    /// What comes next, at most 64 KiB of it; empty if the other side closed.
    pub(crate) async fn read(&mut self) -> Result<Vec<u8>> {
        let mut buffer = vec![0; 1 << 16];
        let length =
            tokio::time::timeout(LIMIT, self.0.read(&mut buffer)).await.context("nothing came")??;
        buffer.truncate(length);
        Ok(buffer)
    }

    /// All that comes until the other side closes.
    pub(crate) async fn read_to_end(&mut self) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        tokio::time::timeout(LIMIT, self.0.read_to_end(&mut bytes)).await.context("still open")??;
        Ok(bytes)
    }
}

/// Writes the bytes on a new connection and returns all that comes back until the other side closes.
pub(crate) async fn raw(address: SocketAddr, bytes: &[u8]) -> Result<Vec<u8>> {
    let mut connection = Raw::connect(address).await?;
    connection.write(bytes).await?;
    connection.read_to_end().await
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::net::TcpListener;

    use super::*;

    /// Answers each request on each connection with its count and the request's head.
    async fn echo() -> Result<(SocketAddr, Arc<AtomicUsize>)> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let connections = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&connections);
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                count.fetch_add(1, Ordering::Relaxed);
                let mut buffer = [0; 4096];
                while let Ok(length @ 1..) = stream.read(&mut buffer).await {
                    let head =
                        format!("HTTP/1.1 202 Accepted\r\nx-kind: echo\r\ncontent-length: {length}\r\n\r\n");
                    let sent = stream.write_all(&[head.as_bytes(), &buffer[..length]].concat()).await;
                    if sent.is_err() || buffer.starts_with(b"GET /close") {
                        break;
                    }
                }
            }
        });
        Ok((address, connections))
    }

    #[tokio::test]
    async fn the_connection_is_kept_and_replaced_when_it_was_closed() -> Result<()> {
        let (address, connections) = echo().await?;
        let mut client = Client::new(address);
        let answer = client.post("/in/a", &[("x-id", "7")], "body").await?;
        assert_eq!((answer.status, answer.header("x-kind")), (StatusCode::ACCEPTED, Some("echo")));
        let echoed = String::from_utf8_lossy(&answer.body).into_owned();
        assert!(echoed.starts_with("POST /in/a HTTP/1.1\r\n") && echoed.contains("x-id: 7"), "{echoed}");
        client.get("/close").await?;
        assert_eq!(connections.load(Ordering::Relaxed), 1);
        // The other side may close before or after the client looks; in the second case the request fails.
        if client.get("/again").await.is_err() {
            client.get("/again").await?;
        }
        assert_eq!(connections.load(Ordering::Relaxed), 2);
        Ok(())
    }

    #[tokio::test]
    async fn raw_bytes_go_out_as_they_are() -> Result<()> {
        let (address, _) = echo().await?;
        let answer = raw(address, b"GET /close nonsense").await?;
        assert!(answer.ends_with(b"\r\n\r\nGET /close nonsense"));
        let mut connection = Raw::connect(address).await?;
        connection.write(b"half").await?;
        connection.finish().await?;
        assert!(connection.read().await?.starts_with(b"HTTP/1.1 202"));
        Ok(())
    }
}
