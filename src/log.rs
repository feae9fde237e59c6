//! Log lines as JSON on standard output, written by a thread of their own.
//!
//! A reader that is slow or gone never holds up a request: what does not fit into the buffer is left out and
//! counted. Never in a line: a body, a signature, a secret, a dump of headers.

use std::fmt::{Arguments, Write as _};
use std::io::{self, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use prometheus_client::metrics::counter::Counter;
use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::{Registry, reload};

/// Bytes that may wait to be written.
const BUFFER_MAX: usize = 4 * 1024 * 1024;
/// Lines are written together, at most this long after they were logged.
const GATHER: Duration = Duration::from_millis(20);
/// Longest value from outside in a line, in characters.
const VALUE_MAX: usize = 200;

#[derive(Debug, Default)]
struct Buffer {
    waiting: Vec<u8>,
    writing: bool,
}

#[derive(Debug)]
struct Shared {
    buffer: Mutex<Buffer>,
    changed: Condvar,
    dropped: Counter,
    /// Set once the log is installed.
    level: OnceLock<reload::Handle<Targets, Registry>>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Buffer> {
        self.buffer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where lines go; clones share it.
#[derive(Debug, Clone)]
pub struct Log {
    shared: Arc<Shared>,
}

impl Log {
    /// Starts the thread that writes to standard output. Lines that are left out are counted in `dropped`.
    ///
    /// # Errors
    /// Those of starting a thread.
    pub fn start(dropped: Counter) -> io::Result<Self> {
        Self::start_in(io::stdout(), dropped)
    }

    /// Starts the thread that writes to `out`.
    ///
    /// # Errors
    /// Those of starting a thread.
    pub fn start_in(out: impl Write + Send + 'static, dropped: Counter) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            buffer: Mutex::default(),
            changed: Condvar::new(),
            dropped,
            level: OnceLock::new(),
        });
        let log = Self { shared: Arc::clone(&shared) };
        std::thread::Builder::new().name("log".to_owned()).spawn(move || write_out(&shared, out))?;
        Ok(log)
    }

    /// Makes this the destination of `tracing` events of `level` and above.
    pub fn install(&self, level: &str) {
        let (filter, handle) = reload::Layer::new(targets(level));
        let lines = tracing_subscriber::fmt::layer()
            .json()
            .flatten_event(true)
            .with_current_span(false)
            .with_span_list(false)
            .with_writer(self.clone());
        let subscriber = tracing_subscriber::registry().with(lines.with_filter(filter));
        // Fails only if one is installed already, as in tests.
        drop(tracing::subscriber::set_global_default(subscriber));
        drop(self.shared.level.set(handle));
    }

    /// From now on `tracing` events of `level` and above are written, if this log is installed.
    pub fn set_level(&self, level: &str) {
        if let Some(handle) = self.shared.level.get() {
            // Fails only if the subscriber is gone, and then nobody logs.
            drop(handle.reload(targets(level)));
        }
    }

    /// Adds a line, which ends in a newline.
    pub fn line(&self, line: &[u8]) {
        let mut buffer = self.shared.lock();
        if buffer.waiting.len() + line.len() > BUFFER_MAX {
            self.shared.dropped.inc();
            return;
        }
        let was_empty = buffer.waiting.is_empty();
        buffer.waiting.extend_from_slice(line);
        drop(buffer);
        if was_empty {
            self.shared.changed.notify_all();
        }
    }

    /// Waits until everything is written, at most `limit`.
    pub fn flush(&self, limit: Duration) {
        let end = Instant::now() + limit;
        let mut buffer = self.shared.lock();
        while buffer.writing || !buffer.waiting.is_empty() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            buffer = self.shared.changed.wait_timeout(buffer, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Ours from `level` on, what libraries say only from warnings on.
fn targets(level: &str) -> Targets {
    let ours = level.parse().unwrap_or(LevelFilter::INFO);
    Targets::new().with_default(LevelFilter::WARN).with_target("hapax", ours)
}

fn write_out(shared: &Shared, mut out: impl Write) {
    let mut lines = Vec::new();
    loop {
        let mut buffer = shared.lock();
        buffer.writing = false;
        shared.changed.notify_all();
        while buffer.waiting.is_empty() {
            buffer = shared.changed.wait(buffer).unwrap_or_else(PoisonError::into_inner);
        }
        drop(buffer);
        std::thread::sleep(GATHER);
        let mut buffer = shared.lock();
        std::mem::swap(&mut buffer.waiting, &mut lines);
        buffer.writing = true;
        drop(buffer);
        // Nobody reads: there is nobody to tell.
        drop(out.write_all(&lines).and_then(|()| out.flush()));
        lines.clear();
    }
}

impl Write for Log {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.line(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

/// Builds one line; field names are ours, values may come from outside.
#[derive(Debug)]
pub struct Line {
    text: String,
}

impl Line {
    /// Starts a line with the time, a level and a message.
    #[must_use]
    pub fn new(now: jiff::Timestamp, level: &'static str, message: &'static str) -> Self {
        let mut text = String::with_capacity(512);
        put(&mut text, format_args!(r#"{{"timestamp":"{now:.6}","level":"{level}","message":"{message}""#));
        Self { text }
    }

    /// Adds a text: escaped to printable ASCII, and cut after 200 characters.
    pub fn text(&mut self, name: &'static str, value: &str) {
        self.name(name);
        self.text.push('"');
        for character in value.chars().take(VALUE_MAX) {
            match character {
                '"' => self.text.push_str("\\\""),
                '\\' => self.text.push_str("\\\\"),
                ' '..='~' => self.text.push(character),
                _ => {
                    for unit in character.encode_utf16(&mut [0; 2]) {
                        put(&mut self.text, format_args!("\\u{unit:04x}"));
                    }
                }
            }
        }
        if value.chars().nth(VALUE_MAX).is_some() {
            self.text.push_str("...");
        }
        self.text.push('"');
    }

    /// Adds a whole number.
    pub fn number(&mut self, name: &'static str, value: u64) {
        self.name(name);
        put(&mut self.text, format_args!("{value}"));
    }

    /// Adds a duration in milliseconds, to the microsecond.
    pub fn millis(&mut self, name: &'static str, value: Duration) {
        self.name(name);
        let micros = value.as_micros();
        put(&mut self.text, format_args!("{}.{:03}", micros / 1000, micros % 1000));
    }

    fn name(&mut self, name: &'static str) {
        put(&mut self.text, format_args!(",\"{name}\":"));
    }

    /// The finished line.
    #[must_use]
    pub fn finish(mut self) -> String {
        self.text.push_str("}\n");
        self.text
    }
}

fn put(text: &mut String, piece: Arguments<'_>) {
    // Writing into a String does not fail.
    text.write_fmt(piece).unwrap_or_default();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_from_outside_cannot_forge_a_line() {
        let mut line = Line::new(jiff::Timestamp::UNIX_EPOCH, "INFO", "request");
        line.text("event.id", "a\r\n\u{1b}[2J\u{202e}\"\\\u{1f680}é");
        line.text("long", &"x".repeat(100_000));
        line.millis("duration_ms", Duration::from_micros(1_234_005));
        let text = line.finish();
        assert!(text.is_ascii() && text.trim_end().chars().all(|c| (' '..='~').contains(&c)));
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["event.id"], "a\r\n\u{1b}[2J\u{202e}\"\\\u{1f680}é");
        assert_eq!(value["long"].as_str().unwrap().len(), VALUE_MAX + 3);
        assert_eq!(value["duration_ms"], 1234.005);
        assert_eq!(value["timestamp"], "1970-01-01T00:00:00.000000Z");
    }
}
