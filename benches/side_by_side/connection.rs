//! One keep-alive connection of the load generator: a request out, its answer in, no allocation on the way.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::SocketAddr;
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use mio::net::TcpStream;
use mio::{Interest, Registry, Token};

/// Longest answer, head and body.
const ANSWER_MAX: usize = 16 << 10;

pub(crate) struct Connection {
    stream: TcpStream,
    /// The request that is being sent, or the last one.
    pub(crate) request: Vec<u8>,
    sent: usize,
    answer: Vec<u8>,
    filled: usize,
    /// What the request is about.
    pub(crate) event: usize,
    pub(crate) started: Instant,
}

impl Connection {
    pub(crate) fn open(to: SocketAddr, registry: &Registry, token: Token, template: Vec<u8>) -> Result<Self> {
        let stream = std::net::TcpStream::connect(to).with_context(|| format!("connecting to {to}"))?;
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        let mut stream = TcpStream::from_std(stream);
        registry.register(&mut stream, token, Interest::READABLE | Interest::WRITABLE)?;
        let (answer, started) = (vec![0; ANSWER_MAX], Instant::now());
        Ok(Self { stream, sent: template.len(), request: template, answer, filled: 0, event: 0, started })
    }

    /// Begins to send what is in `request`.
    pub(crate) fn send(&mut self, event: usize, now: Instant) -> Result<()> {
        (self.sent, self.filled, self.event, self.started) = (0, 0, event, now);
        self.write()
    }

    /// Goes on where the socket stopped last time; the status once the answer is complete.
    pub(crate) fn advance(&mut self) -> Result<Option<u16>> {
        if self.sent < self.request.len() {
            self.write()?;
        }
        self.read()
    }

    fn write(&mut self) -> Result<()> {
        while let Some(rest) = self.request.get(self.sent..).filter(|rest| !rest.is_empty()) {
            match self.stream.write(rest) {
                Ok(written) => self.sent += written,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error).context("sending"),
            }
        }
        Ok(())
    }

    fn read(&mut self) -> Result<Option<u16>> {
        loop {
            let room = self.answer.get_mut(self.filled..).filter(|room| !room.is_empty());
            match self.stream.read(room.context("an answer that is too long")?) {
                Ok(0) => bail!("the server closed a connection"),
                Ok(read) => self.filled += read,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(error).context("receiving"),
            }
            let answer = self.answer.get(..self.filled).unwrap_or_default();
            if let Some(status) = complete(answer)? {
                return Ok(Some(status));
            }
        }
    }
}

/// The status of an answer that is there to its last byte.
fn complete(answer: &[u8]) -> Result<Option<u16>> {
    let Some(end) = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n") else { return Ok(None) };
    let head = answer.get(..end).unwrap_or_default();
    let head = std::str::from_utf8(head).context("an answer that is no text")?;
    let mut lines = head.split("\r\n");
    let status = lines.next().and_then(|line| line.get(9..12)).and_then(|status| status.parse().ok());
    let length = lines.find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().ok()).flatten()
    });
    let status = status.context("an answer without a status")?;
    let length = length.context("an answer without a content-length")?;
    Ok((answer.len() >= end + 4 + length).then_some(status))
}
