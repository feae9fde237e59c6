//! The listener for providers: permits, limits, time-outs, drain. It does not know that a body is a webhook.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONNECTION, HeaderValue};
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use prometheus_client::metrics::gauge::Gauge;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Sleep, sleep};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::tasks::{Beat, Tasks};

/// Pause after the operating system refused a connection (out of file descriptors).
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// What answers requests.
pub trait Service: Clone + Send + Sync + 'static {
    /// Answers one request; dropped if the client goes away.
    fn answer(&self, request: Request<Incoming>) -> impl Future<Output = Response<Full<Bytes>>> + Send;
}

/// What one listener allows.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Open connections; beyond it, new ones wait in the listener's queue.
    pub connections_max: usize,
    /// Bytes of request line and headers.
    pub head_max: usize,
    /// From the first byte of a head to its last.
    pub head_timeout: Duration,
    /// Between two requests on one connection.
    pub idle_timeout: Duration,
}

/// How a listener ends.
#[derive(Debug, Clone, Default)]
pub struct Closing {
    /// No new connections; open ones end after the request that they are in.
    pub stop: CancellationToken,
    /// Answers ask the client to go elsewhere.
    pub draining: Arc<AtomicBool>,
}

/// Binds a listener with a long queue, so that a burst of new connections is not refused.
///
/// # Errors
/// Those of the operating system, with the address.
pub fn bind(listen: std::net::SocketAddr) -> io::Result<TcpListener> {
    let bound = || -> io::Result<TcpListener> {
        let domain = socket2::Domain::for_address(listen);
        let socket = socket2::Socket::new(domain, socket2::Type::STREAM, None)?;
        socket.set_reuse_address(true)?;
        socket.set_nonblocking(true)?;
        socket.bind(&listen.into())?;
        socket.listen(4096)?;
        TcpListener::from_std(socket.into())
    };
    bound().map_err(|error| io::Error::new(error.kind(), format!("cannot listen on {listen}: {error}")))
}

/// A listener and what it allows, over all lives of its loop; clones share it.
#[derive(Debug, Clone)]
pub struct Door {
    listener: Arc<TcpListener>,
    permits: Arc<Semaphore>,
    limits: Limits,
    closing: Closing,
    open: Gauge,
    tasks: Tasks,
}

impl Door {
    /// Open connections are counted in `open`, and go on in `tasks`.
    #[must_use]
    pub fn new(listener: TcpListener, limits: Limits, closing: Closing, open: Gauge, tasks: Tasks) -> Self {
        let permits = Arc::new(Semaphore::new(limits.connections_max));
        Self { listener: Arc::new(listener), permits, limits, closing, open, tasks }
    }
}

/// Accepts connections until told to stop, then returns; open connections go on. Dropping it loses none: those that are not
/// accepted stay in the listener's queue.
pub async fn accept<S: Service>(door: Door, service: S, beat: Beat) {
    let Door { listener, permits, limits, closing, open, tasks } = door;
    loop {
        beat.alive();
        let next = async {
            let permit = Arc::clone(&permits).acquire_owned().await;
            (listener.accept().await, permit)
        };
        let (accepted, permit) = tokio::select! {
            () = closing.stop.cancelled() => return,
            next = beat.waiting(next) => next,
        };
        match accepted {
            Ok((stream, _peer)) => {
                let place = Place { open: open.clone(), _permit: permit.ok() };
                place.open.inc();
                let connection = connection(stream, limits, service.clone(), closing.clone());
                drop(tasks.spawn(async move {
                    connection.await;
                    drop(place);
                }));
            }
            Err(error) => {
                warn!(error = %error, "a connection could not be accepted");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// What an open connection takes; given back even if its task panics.
struct Place {
    open: Gauge,
    _permit: Option<OwnedSemaphorePermit>,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.open.dec();
    }
}

async fn connection<S: Service>(stream: TcpStream, limits: Limits, service: S, closing: Closing) {
    // Answers are small and complete; waiting to fill a packet only delays them.
    drop(stream.set_nodelay(true));
    let phase = Arc::new(AtomicU8::new(IDLE));
    let io = TokioIo::new(TimedStream::new(stream, limits, Arc::clone(&phase)));
    let draining = Arc::clone(&closing.draining);
    let service = service_fn(move |request| {
        let (service, phase, draining) = (service.clone(), Arc::clone(&phase), Arc::clone(&draining));
        phase.store(ANSWERING, Ordering::Relaxed);
        async move {
            let mut response = service.answer(request).await;
            phase.store(IDLE, Ordering::Relaxed);
            if draining.load(Ordering::Relaxed) {
                response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            }
            Ok::<_, std::convert::Infallible>(response)
        }
    });
    let connection = http1::Builder::new()
        // Without a timer hyper's time-outs do nothing.
        .timer(TokioTimer::new())
        .header_read_timeout(limits.idle_timeout)
        .max_buf_size(limits.head_max)
        .serve_connection(io, service);
    tokio::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = closing.stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    // What is wrong with one connection is its client's affair.
    drop(ended);
}

/// Nothing of the next request has come.
const IDLE: u8 = 0;
/// Some of its head has come.
const HEAD: u8 = 1;
/// From a complete head to its answer; what is read belongs to the body.
const ANSWERING: u8 = 2;

/// A stream on which a request head, once begun, has to be complete within a time. hyper's own time-out runs from
/// the end of the last answer, so it can only bound how long a connection may be idle; for writing it has none.
struct TimedStream {
    stream: TcpStream,
    timeout: Duration,
    /// Shared with the service, which knows when a head is complete.
    phase: Arc<AtomicU8>,
    timer: Option<Pin<Box<Sleep>>>,
    /// How long a client may leave an answer unread.
    write_timeout: Duration,
    write_timer: Option<Pin<Box<Sleep>>>,
}

impl TimedStream {
    fn new(stream: TcpStream, limits: Limits, phase: Arc<AtomicU8>) -> Self {
        let Limits { head_timeout: timeout, idle_timeout: write_timeout, .. } = limits;
        Self { stream, timeout, phase, timer: None, write_timeout, write_timer: None }
    }

    /// Passes on what became of a write; while nothing can be written, a timer runs.
    fn timed_write<T>(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.write_timer = None;
            return written;
        }
        let timeout = self.write_timeout;
        let timer = self.write_timer.get_or_insert_with(|| Box::pin(sleep(timeout)));
        timer.as_mut().poll(cx).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }

    /// Called when the stream has nothing to read.
    fn poll_timer(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.phase.load(Ordering::Relaxed) != HEAD {
            self.timer = None;
            return Poll::Pending;
        }
        let timeout = self.timeout;
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(timeout)));
        timer.as_mut().poll(cx).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for TimedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        match Pin::new(&mut self.stream).poll_read(cx, buf) {
            Poll::Ready(Ok(())) => {
                // One task polls stream and service, so nothing happens between the two.
                if buf.filled().len() > before && self.phase.load(Ordering::Relaxed) == IDLE {
                    self.phase.store(HEAD, Ordering::Relaxed);
                    self.timer = None;
                }
                Poll::Ready(Ok(()))
            }
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Pending => self.poll_timer(cx),
        }
    }
}

impl AsyncWrite for TimedStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.timed_write(cx, written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.timed_write(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
