//! What is signed, as a second key of an event whose id is not signed: the same signed bytes under another id are a
//! captured request that somebody sends again.
//!
//! Invariant: a guard is made of the bytes that verification found signed and of nothing else of the request, so that
//! who knows no secret cannot make another one for them. No store and no clock is seen here.

use ring::digest::{Context, SHA256};

use crate::identify::{Digest, Event};
use crate::parts;

/// What a source does with signed bytes that come again under another id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Guard {
    /// It does not look.
    #[default]
    Off,
    /// The event is accepted; it is counted and logged.
    Report,
    /// The event is refused like one that is not signed.
    Refuse,
}

impl Guard {
    /// As the settings name it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Report => "report",
            Self::Refuse => "refuse",
        }
    }
}

/// SHA-256 of the bytes that were signed, without the secret where that is among them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SignedBytes(pub(crate) [u8; 32]);

impl SignedBytes {
    pub(crate) fn of<'p>(pieces: impl IntoIterator<Item = &'p [u8]>) -> Self {
        let mut context = Context::new(&SHA256);
        pieces.into_iter().for_each(|piece| context.update(piece));
        Self(parts::array(&context.finish()))
    }
}

/// The guard of one event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Watch {
    /// Names the signed bytes within their source.
    pub key: [u8; 16],
    /// Names the event that they belong to if nobody had them before.
    pub owner: [u8; 16],
    /// Refuse the event if they belong to another one.
    pub refuse: bool,
}

impl Watch {
    fn of(source: &str, signed: SignedBytes, owner: [u8; 16], guard: Guard) -> Self {
        let key = hash(&[source.as_bytes(), &signed.0]);
        Self { key: short(&key), owner, refuse: guard == Guard::Refuse }
    }

    /// What a marker or a flight of this event compares: another delivery is the same only if its signed bytes are the
    /// same too, since new ones have to be claimed.
    pub(crate) fn stamp(&self, digest: Digest) -> Digest {
        Digest(hash(&[&digest.0, &self.key]))
    }
}

/// Sets the guard of a request's events. The items of a batch are signed together and belong together: with other items,
/// the same signature is another request.
pub(crate) fn watch(source: &str, guard: Guard, signed: SignedBytes, events: &mut [Event]) {
    let owner = match &*events {
        [event] if event.item.is_none() => event.key.0,
        items => short(&hash(&items.iter().map(name).collect::<Vec<_>>())),
    };
    for event in events {
        event.guard = Some(Box::new(Watch::of(source, signed, owner, guard)));
    }
}

/// An item without an id has a random key, which is another one on every attempt.
fn name(event: &Event) -> &[u8] {
    if event.identified { &event.key.0 } else { &event.digest.0 }
}

/// With lengths before the parts, so that no two lists hash the same bytes.
fn hash(parts: &[&[u8]]) -> [u8; 32] {
    let mut context = Context::new(&SHA256);
    for part in parts {
        context.update(&u64::try_from(part.len()).unwrap_or(u64::MAX).to_le_bytes());
        context.update(part);
    }
    parts::array(&context.finish())
}

fn short(hash: &[u8; 32]) -> [u8; 16] {
    let mut short = [0; 16];
    short.iter_mut().zip(hash).for_each(|(short, byte)| *short = *byte);
    short
}
