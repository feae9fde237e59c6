//! The requests of one run, signed before it begins: what is left to do per request is to write id, digit and
//! signature into a request that is otherwise ready.

use hex::encode_to_slice;
use ring::hmac;

use super::payload::{Body, ID_LENGTH, SECRET, SOURCE, id};
use super::plan::Mix;

/// Copies of one event in the mixes that repeat.
const COPIES: usize = 10;
/// Between two copies of an event lie `COPIES * STRIDE` other requests: more than are under way at once.
const STRIDE: usize = 16;

type Signature = [u8; 64];

/// Where in a request that stands which changes from one to the next.
#[derive(Debug, Clone, Copy)]
struct Parts {
    id: usize,
    digit: usize,
    signature: usize,
}

/// A supply of signed requests.
pub(crate) struct Traffic {
    template: Vec<u8>,
    parts: Parts,
    run: u64,
    mix: Mix,
    signatures: Vec<Signature>,
    /// Of every `COPIES`th event with another digit.
    altered: Vec<Signature>,
    position: usize,
}

impl Traffic {
    /// Signs `events` events as of now.
    pub(crate) fn sign(mix: Mix, run: u64, events: usize, body_bytes: usize) -> Self {
        let now = jiff::Timestamp::now().as_second();
        let body = Body::of_bytes(body_bytes);
        let (template, parts) = template(now, &body);
        let mut signer = Signer::new(now, &body, run);
        let signatures = (0..events).map(|event| signer.sign(event, b'1')).collect();
        let altered = match mix {
            Mix::Mismatch => (0..events).step_by(COPIES).map(|event| signer.sign(event, b'2')).collect(),
            Mix::New | Mix::TenTimes | Mix::Hot => Vec::new(),
        };
        Self { template, parts, run, mix, signatures, altered, position: 0 }
    }

    /// A request to write into.
    pub(crate) fn template(&self) -> Vec<u8> {
        self.template.clone()
    }

    /// Makes the next request out of the last one; the number of its event, or nothing if there is no more.
    pub(crate) fn next(&mut self, request: &mut [u8]) -> Option<usize> {
        let (event, altered) = self.choose()?;
        let signature = if altered { self.altered.get(event / COPIES) } else { self.signatures.get(event) };
        write(request, self.parts.signature, signature?);
        write(request, self.parts.id, id(self.run, event as u64).as_bytes());
        write(request, self.parts.digit, if altered { b"2" } else { b"1" });
        Some(event)
    }

    /// The next event, and whether with the other body.
    fn choose(&mut self) -> Option<(usize, bool)> {
        match self.mix {
            Mix::Hot => Some((0, false)),
            Mix::New => {
                self.position += 1;
                Some((self.position - 1, false))
            }
            Mix::TenTimes | Mix::Mismatch => self.repeat(),
        }
    }

    /// One new event, then a second copy of an older one, a third of a still older one, and so on.
    fn repeat(&mut self) -> Option<(usize, bool)> {
        loop {
            let (step, copy) = (self.position / COPIES, self.position % COPIES);
            if step >= self.signatures.len() {
                return None;
            }
            self.position += 1;
            if let Some(event) = step.checked_sub(copy * STRIDE) {
                let altered = self.mix == Mix::Mismatch && copy == COPIES / 2 && event % COPIES == 0;
                return Some((event, altered));
            }
        }
    }
}

fn template(now: i64, body: &Body) -> (Vec<u8>, Parts) {
    let mut head = format!(
        "POST /in/{SOURCE} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
         user-agent: side-by-side\r\ncontent-length: {}\r\nstripe-signature: t={now},v1=",
        body.text.len()
    );
    let signature_at = head.len();
    head.push_str(&"0".repeat(size_of::<Signature>()));
    head.push_str("\r\n\r\n");
    let start = head.len();
    let parts = Parts { id: start + body.id_at, digit: start + body.digit_at, signature: signature_at };
    ((head + &body.text).into_bytes(), parts)
}

struct Signer {
    key: hmac::Key,
    /// Timestamp, dot, body.
    content: Vec<u8>,
    id_at: usize,
    digit_at: usize,
    run: u64,
}

impl Signer {
    fn new(now: i64, body: &Body, run: u64) -> Self {
        let prefix = format!("{now}.");
        let (id_at, digit_at) = (prefix.len() + body.id_at, prefix.len() + body.digit_at);
        let key = hmac::Key::new(hmac::HMAC_SHA256, SECRET.as_bytes());
        Self { key, content: (prefix + &body.text).into_bytes(), id_at, digit_at, run }
    }

    fn sign(&mut self, event: usize, digit: u8) -> Signature {
        write(&mut self.content, self.id_at, id(self.run, event as u64).as_bytes());
        write(&mut self.content, self.digit_at, &[digit]);
        let mut text = [0; size_of::<Signature>()];
        let tag = hmac::sign(&self.key, &self.content);
        encode_to_slice(tag, &mut text).unwrap_or_default();
        text
    }
}

fn write(into: &mut [u8], at: usize, bytes: &[u8]) {
    debug_assert!(bytes.len() <= size_of::<Signature>().max(ID_LENGTH));
    if let Some(place) = into.get_mut(at..at + bytes.len()) {
        place.copy_from_slice(bytes);
    }
}
