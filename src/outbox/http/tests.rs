//! Against a listener that answers what a case tells it to, byte by byte.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::{RootCertStore, ServerConfig};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;

use super::super::{WORDS, connect};
use super::*;
use crate::config::TargetKind;
use crate::fixture::{message, now, received, source};
use crate::provider::{Key, Scheme};

const SECRET: &str = "whsec_c2VjcmV0LXNlY3JldC1zZWNyZXQ=";
const CANARY: &str = "canary-7f3a";
const OK: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

/// Longer than any case takes.
const LONG: Duration = Duration::from_secs(60);

/// What a request is answered with.
enum Answer {
    /// These bytes, and the connection stays open.
    Bytes(Vec<u8>),
    /// No byte, and the end of the connection.
    Close,
    /// No byte, and the connection stays open.
    Silence,
    /// These bytes, and then one more again and again.
    Drip(&'static str),
}

fn answer(text: impl Into<String>) -> Answer {
    Answer::Bytes(text.into().into_bytes())
}

/// A request as it came, and over which connection.
#[derive(Debug)]
struct Seen {
    connection: usize,
    head: String,
    body: Vec<u8>,
}

impl Seen {
    fn header(&self, name: &str) -> Option<&str> {
        let lines = self.head.lines().filter_map(|line| line.split_once(": "));
        let mut values = lines.filter(|(is, _)| is.eq_ignore_ascii_case(name)).map(|(_, value)| value);
        values.next().filter(|_| values.next().is_none())
    }
}

/// A listener on this machine.
struct Peer {
    port: u16,
    seen: UnboundedReceiver<Seen>,
    task: JoinHandle<()>,
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

type Script = dyn Fn(usize) -> Answer + Send + Sync;

impl Peer {
    /// `script` says what the request of that number, from 0, is answered with.
    async fn start(script: impl Fn(usize) -> Answer + Send + Sync + 'static) -> Self {
        Self::with(script, None).await
    }

    async fn with(
        script: impl Fn(usize) -> Answer + Send + Sync + 'static,
        tls: Option<TlsAcceptor>,
    ) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (tell, seen) = unbounded_channel();
        let (script, requests): (Arc<Script>, _) = (Arc::new(script), Arc::new(AtomicUsize::new(0)));
        let task = tokio::spawn(async move {
            for connection in 0.. {
                let (stream, _) = listener.accept().await.unwrap();
                let told = (connection, Arc::clone(&script), Arc::clone(&requests), tell.clone());
                let tls = tls.clone();
                drop(tokio::spawn(async move {
                    match tls {
                        None => talk(stream, told).await,
                        Some(tls) => match tls.accept(stream).await {
                            Ok(stream) => talk(stream, told).await,
                            Err(_) => None,
                        },
                    }
                }));
            }
        });
        Self { port, seen, task }
    }

    fn url(&self) -> String {
        format!("http://127.0.0.1:{}/{CANARY}?{CANARY}", self.port)
    }

    fn target(&self) -> Arc<dyn Target> {
        target(&self.url(), |_, _| {})
    }

    fn next(&mut self) -> Option<Seen> {
        self.seen.try_recv().ok()
    }
}

/// `None` at the end of the connection.
async fn talk(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    (connection, script, requests, tell): (usize, Arc<Script>, Arc<AtomicUsize>, UnboundedSender<Seen>),
) -> Option<()> {
    loop {
        let (head, body) = request(&mut stream).await?;
        tell.send(Seen { connection, head, body }).ok()?;
        match script(requests.fetch_add(1, Ordering::Relaxed)) {
            Answer::Bytes(bytes) => stream.write_all(&bytes).await.ok()?,
            Answer::Close => return None,
            Answer::Silence => std::future::pending().await,
            Answer::Drip(start) => {
                stream.write_all(start.as_bytes()).await.ok()?;
                loop {
                    stream.write_all(b"x").await.ok()?;
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        }
    }
}

async fn request(stream: &mut (impl AsyncRead + Unpin)) -> Option<(String, Vec<u8>)> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.ok()?);
    }
    let head = String::from_utf8(head).ok()?;
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "))?;
    let mut body = vec![0; length.parse().ok()?];
    stream.read_exact(&mut body).await.ok()?;
    Some((head, body))
}

fn settings(url: &str, change: impl FnOnce(&mut config::Target, &mut Http)) -> config::Target {
    let mut target = config::Target::http("orders", url);
    target.timeout = LONG;
    let TargetKind::Http(mut http) = target.kind.clone();
    http.allow_private = true;
    change(&mut target, &mut http);
    target.kind = TargetKind::Http(http);
    target
}

fn target(url: &str, change: impl FnOnce(&mut config::Target, &mut Http)) -> Arc<dyn Target> {
    connect(&settings(url, change)).unwrap()
}

/// Why a delivery fails; that nothing is told that may not be.
async fn failure(target: &Arc<dyn Target>) -> Undelivered {
    let failed = target.deliver(&message(format!("{{\"a\":{CANARY:?}}}"))).await.unwrap_err();
    assert!(WORDS.contains(&failed.word), "{}", failed.word);
    for secret in [CANARY, "127.0.0.1", "localhost", "http"] {
        assert!(!failed.cause.contains(secret), "{}", failed.cause);
    }
    failed
}

fn found(failed: &Undelivered) -> (Fault, &'static str) {
    (failed.fault, failed.word)
}

#[tokio::test]
async fn a_message_arrives_whole_and_signed() {
    let mut peer = Peer::start(|_| answer(OK)).await;
    let target = target(&peer.url(), |_, http| http.secrets = vec![Key::webhooks(SECRET).unwrap()]);
    let message = message(&b"{\"a\": 1}\n"[..]);
    target.deliver(&message).await.unwrap();
    let seen = peer.next().unwrap();
    assert!(seen.head.starts_with(&format!("POST /{CANARY}?{CANARY} HTTP/1.1\r\n")), "{}", seen.head);
    assert_eq!(seen.header("host"), Some(format!("127.0.0.1:{}", peer.port).as_str()));
    assert_eq!(seen.header("webhook-id"), Some(message.id.as_str()));
    assert_eq!(seen.header("content-type"), Some("application/json"));
    assert_eq!(seen.body, &message.body[..]);
    let headers: Vec<_> = seen.head.lines().filter_map(|line| line.split_once(": ")).collect();
    let headers: Vec<_> = headers.iter().map(|(name, value)| (*name, value.as_bytes())).collect();
    let scheme = Scheme::preset("standard-webhooks").unwrap();
    let request = received(source(&scheme, &[SECRET]), "/hooks", &headers, seen.body.clone());
    crate::verify::verify(request, Timestamp::now()).unwrap();
}

#[tokio::test]
async fn a_status_says_whose_fault_it_is() {
    let statuses = [
        (200, None),
        (201, None),
        (204, None),
        (299, None),
        (301, Some((Fault::Target, "status_3xx"))),
        (304, Some((Fault::Target, "status_3xx"))),
        (307, Some((Fault::Target, "status_3xx"))),
        (400, Some((Fault::Message, "status_4xx"))),
        (401, Some((Fault::Target, "status_4xx"))),
        (403, Some((Fault::Target, "status_4xx"))),
        (404, Some((Fault::Target, "status_4xx"))),
        (408, Some((Fault::Target, "status_4xx"))),
        (409, Some((Fault::Message, "status_4xx"))),
        (410, Some((Fault::Target, "status_4xx"))),
        (422, Some((Fault::Message, "status_4xx"))),
        (429, Some((Fault::Target, "status_4xx"))),
        (500, Some((Fault::Target, "status_5xx"))),
        (503, Some((Fault::Target, "status_5xx"))),
        (600, Some((Fault::Target, "protocol"))),
    ];
    let script = move |number: usize| {
        let (status, _) = statuses[number];
        let body = if matches!(status, 204 | 304) {
            String::new()
        } else {
            format!("content-length: 11\r\n\r\n{CANARY}")
        };
        let end = if body.is_empty() { "\r\n" } else { "" };
        answer(format!("HTTP/1.1 {status} {CANARY}\r\nlocation: http://127.0.0.1:1/{CANARY}\r\n{body}{end}"))
    };
    let mut peer = Peer::start(script).await;
    let target = peer.target();
    for (status, wanted) in statuses {
        let found = if wanted.is_none() {
            target.deliver(&message("{}")).await.err().as_ref().map(found)
        } else {
            let failed = failure(&target).await;
            assert!(failed.cause.contains(&status.to_string()), "{}", failed.cause);
            Some(found(&failed))
        };
        assert_eq!(found, wanted, "{status}");
        assert_eq!(peer.next().unwrap().connection, 0, "{status}: one connection for all");
        assert!(peer.next().is_none(), "{status}: nothing is followed");
    }
}

#[test]
fn retry_after_is_seconds_or_a_date() {
    let at = |status, text: &str| {
        let headers = HeaderMap::from_iter([(RETRY_AFTER, text.parse().unwrap())]);
        let failed = judge(StatusCode::from_u16(status).unwrap(), &headers, now()).unwrap_err();
        failed.retry_after.map(|wait| wait.as_secs())
    };
    for (text, wanted) in [
        ("120", Some(120)),
        ("0", Some(0)),
        ("99999999999999999999999", Some(RETRY_AFTER_MAX.as_secs())),
        ("Tue, 14 Nov 2023 22:14:20 GMT", Some(60)),
        ("Tue, 14 Nov 2023 22:12:20 GMT", Some(0)),
        ("Thu, 31 Dec 9998 23:59:59 GMT", Some(RETRY_AFTER_MAX.as_secs())),
        ("-1", None),
        ("1.5", None),
        ("soon", None),
        ("", None),
    ] {
        for status in [408, 429, 500, 503] {
            assert_eq!(at(status, text), wanted, "{status} {text}");
        }
        assert_eq!(at(400, text), None);
    }
    assert_eq!(judge(StatusCode::TOO_MANY_REQUESTS, &HeaderMap::new(), now()).unwrap_err().retry_after, None);
}

#[tokio::test]
async fn a_silent_target_is_a_time_out() {
    let peer = Peer::start(|_| Answer::Silence).await;
    let target = target(&peer.url(), |target, _| target.timeout = Duration::from_millis(100));
    let failed = failure(&target).await;
    assert_eq!(found(&failed), (Fault::Target, "timeout"));
    assert!(failed.cause.contains("100ms"), "{}", failed.cause);
}

#[tokio::test]
async fn a_head_that_drips_is_a_time_out() {
    let peer = Peer::start(|_| Answer::Drip("HTTP/1.1 200 OK\r\nx-a: ")).await;
    let target = target(&peer.url(), |target, _| target.timeout = Duration::from_millis(200));
    assert_eq!(found(&failure(&target).await), (Fault::Target, "timeout"));
}

/// It has said that it has the event; a second delivery would be one too many.
#[tokio::test]
async fn a_body_that_drips_or_breaks_changes_nothing_of_a_2xx() {
    let script = |number| match number {
        0 => Answer::Drip("HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n"),
        1 => answer("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nno chunk\r\n"),
        _ => answer(OK),
    };
    let mut peer = Peer::start(script).await;
    let target = target(&peer.url(), |target, _| target.timeout = Duration::from_millis(200));
    for connection in 0..3 {
        target.deliver(&message("{}")).await.unwrap();
        assert_eq!(
            peer.next().unwrap().connection,
            connection,
            "a connection that is not clean is used no more"
        );
    }
}

#[tokio::test]
async fn a_huge_answer_costs_its_connection_and_no_more() {
    let body = |length: usize| {
        let head = format!("HTTP/1.1 500 x\r\ncontent-length: {length}\r\n\r\n");
        Answer::Bytes([head.into_bytes(), vec![b'x'; length]].concat())
    };
    let script = move |number| match number {
        0 => body(BODY_MAX),
        1 => body(64 << 20),
        _ => answer(OK),
    };
    let mut peer = Peer::start(script).await;
    let target = peer.target();
    for (wanted, connection) in [(false, 0), (false, 0), (true, 1)] {
        assert_eq!(target.deliver(&message("{}")).await.is_ok(), wanted);
        assert_eq!(peer.next().unwrap().connection, connection);
    }
}

#[tokio::test]
async fn a_connection_that_was_closed_meanwhile_is_tried_once_more() {
    let script = |number| match number {
        1 | 3 | 4 | 5 => Answer::Close,
        _ => answer(OK),
    };
    let mut peer = Peer::start(script).await;
    let target = peer.target();
    for connections in [&[0][..], &[0, 1]] {
        target.deliver(&message("{}")).await.unwrap();
        for connection in connections {
            assert_eq!(peer.next().unwrap().connection, *connection);
        }
        assert!(peer.next().is_none());
    }
    // The second try was on a connection that is not kept, so this one is new, and a new one is not tried again.
    assert_eq!(found(&failure(&target).await), (Fault::Target, "lost"));
    assert!(peer.next().is_some() && peer.next().is_none());
}

#[tokio::test]
async fn a_second_try_is_the_last() {
    let script = |number| if number == 0 { answer(OK) } else { Answer::Close };
    let mut peer = Peer::start(script).await;
    let target = peer.target();
    target.deliver(&message("{}")).await.unwrap();
    assert_eq!(found(&failure(&target).await), (Fault::Target, "lost"));
    let connections: Vec<_> = std::iter::from_fn(|| peer.next()).map(|seen| seen.connection).collect();
    assert_eq!(connections, [0, 0, 1]);
}

#[tokio::test]
async fn what_is_no_http_is_told_apart() {
    let script = |number| match number {
        0 => answer("SSH-2.0-canary-7f3a\r\n\r\n"),
        1 => answer(format!("HTTP/1.1 200 OK\r\nx-a: {}\r\n\r\n", "x".repeat(2 * HEAD_MAX))),
        _ => answer("HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n"),
    };
    let peer = Peer::start(script).await;
    let target = peer.target();
    assert_eq!(found(&failure(&target).await), (Fault::Target, "protocol"));
    let failed = failure(&target).await;
    assert!(failed.cause.contains("head"), "{}", failed.cause);
    assert_eq!(found(&failed), (Fault::Target, "protocol"));
    assert_eq!(found(&failure(&target).await), (Fault::Target, "status_1xx"));
}

#[tokio::test]
async fn private_addresses_are_refused_by_name_and_by_number() {
    let mut peer = Peer::start(|_| answer(OK)).await;
    for host in ["localhost", "127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "[64:ff9b::7f00:1]"] {
        let url = format!("http://{host}:{}/", peer.port);
        let failed = failure(&target(&url, |_, http| http.allow_private = false)).await;
        assert_eq!(found(&failed), (Fault::Target, "address"), "{host}");
        assert!(failed.cause.contains("allow_private"), "{}", failed.cause);
    }
    assert!(peer.next().is_none(), "nothing was sent");
    let url = format!("http://localhost:{}/", peer.port);
    target(&url, |_, _| {}).deliver(&message("{}")).await.unwrap();
    assert!(peer.next().is_some());
}

#[tokio::test]
async fn nobody_there_is_told_apart() {
    let free = TcpListener::bind(("127.0.0.1", 0)).await.unwrap().local_addr().unwrap().port();
    let url = format!("http://127.0.0.1:{free}/{CANARY}");
    assert_eq!(found(&failure(&target(&url, |_, _| {})).await), (Fault::Target, "connect"));
}

/// A certificate for `localhost` that vouches for itself, and who trusts it.
fn tls_for(name: &str) -> (TlsAcceptor, ClientConfig) {
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::new([name.to_owned()]).unwrap().self_signed(&key).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let der = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let server = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.der().clone()], der)
        .unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(certificate.der().clone()).unwrap();
    let client = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    (TlsAcceptor::from(Arc::new(server)), client)
}

fn secure(url: &str, tls: ClientConfig) -> Arc<dyn Target> {
    let settings = settings(url, |_, _| {});
    let TargetKind::Http(http) = &settings.kind;
    Arc::new(HttpTarget::with(&settings, http, Endpoint::parse(url).unwrap(), Some(tls)))
}

#[tokio::test]
async fn a_certificate_must_be_for_the_name_and_from_somebody_trusted() {
    let (acceptor, trusting) = tls_for("localhost");
    let (_, stranger) = tls_for("localhost");
    let mut peer = Peer::with(|_| answer(OK), Some(acceptor)).await;
    let url = format!("https://localhost:{}/", peer.port);
    let target = secure(&url, trusting.clone());
    for _ in 0..2 {
        target.deliver(&message("{}")).await.unwrap();
        assert_eq!(peer.next().unwrap().connection, 0, "kept");
    }
    let failed = failure(&secure(&url, stranger)).await;
    assert_eq!(found(&failed), (Fault::Target, "tls"));
    assert!(failed.cause.contains("no authority"), "{}", failed.cause);
    let failed = failure(&secure(&format!("https://127.0.0.1:{}/", peer.port), trusting.clone())).await;
    assert_eq!((found(&failed), failed.cause.contains("another name")), ((Fault::Target, "tls"), true));
    let plain = Peer::start(|_| answer(OK)).await;
    let (_, ends) = (plain.port, TcpListener::bind(("127.0.0.1", 0)).await.unwrap());
    let port = ends.local_addr().unwrap().port();
    let ended = tokio::spawn(async move {
        let (mut stream, _) = ends.accept().await.unwrap();
        stream.write_all(b"HTTP/1.1 400 no TLS here\r\n\r\n").await.unwrap();
        drop(stream);
    });
    let failed = failure(&secure(&format!("https://localhost:{port}/"), trusting)).await;
    assert_eq!(found(&failed), (Fault::Target, "tls"));
    assert!(failed.cause.contains("speaks no TLS"), "{}", failed.cause);
    ended.await.unwrap();
    assert!(peer.next().is_none());
}

#[test]
fn nothing_that_is_secret_is_shown() {
    let target = target(&format!("http://10.0.0.1/{CANARY}"), |_, http| {
        let value = http::HeaderValue::from_static(CANARY);
        http.headers = vec![(http::HeaderName::from_static("authorization"), value)];
    });
    assert_eq!(format!("{target:?}"), "HttpTarget(\"orders\")");
    let shown = format!("{:?}", message(CANARY));
    assert!(!shown.contains(CANARY), "{shown}");
    let wrong = connect(&config::Target::http("orders", CANARY)).unwrap_err();
    assert!(!format!("{wrong:#}").contains(CANARY), "{wrong:#}");
}
