//! The target: on a thread of its own, with a log of its own. It hangs, resets, refuses, is down, and comes back.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, Result};
use jiff::Timestamp;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// What it needs for an answer, other than luck.
pub(crate) const SERVICE: Duration = Duration::from_millis(3);
/// Longer than the gateways wait.
const HANG: Duration = Duration::from_secs(30);
const HEAD_MAX: usize = 64 << 10;

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// Answered 2xx.
    Taken,
    /// Answered otherwise.
    Refused,
    Reset,
    /// The other side went away before an answer.
    Left,
}

/// One request, in microseconds of this machine's clock.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) id: String,
    pub(crate) begun: i64,
    /// Just before the answer; of one whose sender left, when that was seen.
    pub(crate) ended: i64,
    pub(crate) end: End,
}

#[derive(Debug, Default)]
pub(crate) struct Log {
    pub(crate) requests: Vec<Request>,
    /// How often each was taken.
    pub(crate) taken: HashMap<String, u32>,
}

/// What it is at the moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Up,
    Down,
    Ended,
}

struct Behaviour {
    log: Mutex<Log>,
    luck: Mutex<StdRng>,
    fixed: watch::Sender<bool>,
}

pub(crate) struct Target {
    pub(crate) address: SocketAddr,
    behaviour: Arc<Behaviour>,
    mode: watch::Sender<Mode>,
    thread: Option<JoinHandle<()>>,
}

pub(crate) fn now() -> i64 {
    Timestamp::now().as_microsecond()
}

/// An event that is refused until the fix.
pub(crate) fn is_poison(id: &str) -> bool {
    id.contains("poison")
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Target {
    pub(crate) fn start(seed: u64) -> Result<Self> {
        let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        drop(listener);
        let behaviour = Arc::new(Behaviour {
            log: Mutex::default(),
            luck: Mutex::new(StdRng::seed_from_u64(seed)),
            fixed: watch::Sender::new(false),
        });
        let (mode, told) = watch::channel(Mode::Up);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let its = Arc::clone(&behaviour);
        let thread = std::thread::Builder::new().name("target".into()).spawn(move || {
            runtime.block_on(live(address, &its, told));
        })?;
        Ok(Self { address, behaviour, mode, thread: Some(thread) })
    }

    /// Nobody listens, and connections are cut.
    pub(crate) fn go_down(&self) {
        self.mode.send_replace(Mode::Down);
    }

    pub(crate) fn come_up(&self) {
        self.mode.send_replace(Mode::Up);
    }

    /// From now on poison is taken like anything else, and luck is always good.
    pub(crate) fn fix(&self) {
        self.behaviour.fixed.send_replace(true);
    }

    /// Events that it has taken, and requests that came.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let log = lock(&self.behaviour.log);
        (log.taken.len(), log.requests.len())
    }

    /// Once no more requests come.
    pub(crate) fn take_log(&self) -> Log {
        std::mem::take(&mut *lock(&self.behaviour.log))
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        self.mode.send_replace(Mode::Ended);
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}

async fn live(address: SocketAddr, behaviour: &Arc<Behaviour>, mut mode: watch::Receiver<Mode>) {
    while let Ok(now) = mode.wait_for(|mode| *mode != Mode::Down).await.map(|mode| *mode) {
        if now == Mode::Ended {
            return;
        }
        let Ok(listener) = TcpListener::bind(address).await else {
            tokio::time::sleep(SERVICE).await;
            continue;
        };
        // Dropped with all its connections when it goes down.
        let mut connections = tokio::task::JoinSet::new();
        loop {
            tokio::select! {
                accepted = listener.accept() => if let Ok((stream, _)) = accepted {
                    connections.spawn(serve(stream, Arc::clone(behaviour)));
                },
                Some(_) = connections.join_next() => {}
                _ = mode.changed() => break,
            }
        }
    }
}

/// What it does with a request; after how long.
enum Verdict {
    Answer(&'static str),
    Reset,
    Hang,
}

const TAKEN: &str = "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";
const FAILED: &str = "HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\n\r\n";
const BUSY: &str = "HTTP/1.1 429 Too Many Requests\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n";

impl Behaviour {
    /// Three in ten fail.
    fn verdict(&self, id: &str) -> Verdict {
        if *self.fixed.borrow() {
            return Verdict::Answer(TAKEN);
        }
        if is_poison(id) {
            return Verdict::Answer(FAILED);
        }
        match lock(&self.luck).random_range(0..100) {
            0..12 => Verdict::Answer(FAILED),
            12..20 => Verdict::Answer(BUSY),
            20..28 => Verdict::Reset,
            28..30 => Verdict::Hang,
            _ => Verdict::Answer(TAKEN),
        }
    }

    fn note(&self, request: Request) {
        let mut log = lock(&self.log);
        if request.end == End::Taken {
            *log.taken.entry(request.id.clone()).or_default() += 1;
        }
        log.requests.push(request);
    }
}

/// Notes a request also if the target goes down in its middle.
struct Noted<'a> {
    behaviour: &'a Behaviour,
    request: Request,
}

impl Drop for Noted<'_> {
    fn drop(&mut self) {
        if self.request.ended == 0 {
            self.request.ended = now();
        }
        self.behaviour.note(self.request.clone());
    }
}

async fn serve(mut stream: TcpStream, behaviour: Arc<Behaviour>) {
    stream.set_nodelay(true).ok();
    let mut buffer = Vec::new();
    while let Ok(Some(id)) = request(&mut stream, &mut buffer).await {
        let verdict = behaviour.verdict(&id);
        let request = Request { id, begun: now(), ended: 0, end: End::Reset };
        let mut noted = Noted { behaviour: &behaviour, request };
        let pause = if matches!(verdict, Verdict::Hang) { HANG } else { SERVICE };
        let mut more = [0; 1];
        tokio::select! {
            // Nobody sends more before the answer: the other side has left.
            _ = stream.read(&mut more) => {
                noted.request.end = End::Left;
                return;
            }
            () = tokio::time::sleep(pause) => {}
        }
        let Verdict::Answer(answer) = verdict else {
            socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO)).ok();
            return;
        };
        noted.request.end = if answer == TAKEN { End::Taken } else { End::Refused };
        noted.request.ended = now();
        drop(noted);
        if stream.write_all(answer.as_bytes()).await.is_err() {
            return;
        }
    }
}

/// Reads a request; the event's id. `None` at the end of the connection.
async fn request(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Result<Option<String>> {
    loop {
        let mut headers = [httparse::EMPTY_HEADER; 64];
        let mut head = httparse::Request::new(&mut headers);
        if let httparse::Status::Complete(length) = head.parse(buffer)? {
            let header = |name: &str| {
                let header = head.headers.iter().find(|header| header.name.eq_ignore_ascii_case(name))?;
                std::str::from_utf8(header.value).ok()
            };
            let body: usize = header("content-length").context("no length")?.parse()?;
            let id = header("hapax-event-id").context("no id")?.to_owned();
            while buffer.len() < length + body {
                if stream.read_buf(buffer).await? == 0 {
                    return Ok(None);
                }
            }
            buffer.drain(..length + body);
            return Ok(Some(id));
        }
        anyhow::ensure!(buffer.len() < HEAD_MAX, "a head without end");
        if stream.read_buf(buffer).await? == 0 {
            return Ok(None);
        }
    }
}
