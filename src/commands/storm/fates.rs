//! What is known of each event: a few bits, by its number.
//!
//! Invariant: bits are only ever added, so it does not matter in which order lanes add them.

/// What happened to an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Fate(u16);

/// One of the bits. Those of a body come in pairs, since an event has two.
#[derive(Debug, Clone, Copy)]
pub(super) enum Mark {
    /// A request with this body went out whole.
    Sent(usize),
    /// One was answered 2xx.
    Safe(usize),
    /// The ledger has a row with this body's digest.
    Row(usize),
    /// That row is `done`.
    Done(usize),
    /// A row whose digest is of neither body.
    Strange,
    /// A row that is neither done nor free of work.
    Busy,
    /// It took effect; and once more.
    Effect,
    Effects,
}

impl Mark {
    const fn bit(self) -> u16 {
        match self {
            Self::Sent(variant) => 1 << (variant & 1),
            Self::Safe(variant) => 4 << (variant & 1),
            Self::Row(variant) => 16 << (variant & 1),
            Self::Done(variant) => 64 << (variant & 1),
            Self::Strange => 256,
            Self::Busy => 512,
            Self::Effect => 1024,
            Self::Effects => 2048,
        }
    }
}

impl Fate {
    pub(super) const fn has(self, mark: Mark) -> bool {
        self.0 & mark.bit() != 0
    }

    pub(super) const fn add(&mut self, mark: Mark) {
        self.0 |= mark.bit();
    }

    /// How many of an event's two bodies have the mark.
    pub(super) fn count(self, mark: fn(usize) -> Mark) -> u32 {
        u32::from(self.has(mark(0))) + u32::from(self.has(mark(1)))
    }
}

/// All events of a run.
#[derive(Debug, Default)]
pub(super) struct Fates(Vec<Fate>);

impl Fates {
    /// Makes room for so many more; tells the number of the first.
    pub(super) fn grow(&mut self, events: u64) -> u64 {
        let first = self.len();
        self.0.resize(self.0.len().saturating_add(usize::try_from(events).unwrap_or(usize::MAX)), Fate(0));
        first
    }

    pub(super) fn len(&self) -> u64 {
        u64::try_from(self.0.len()).unwrap_or(u64::MAX)
    }

    /// `None`: there is no such event.
    pub(super) fn get_mut(&mut self, event: u64) -> Option<&mut Fate> {
        self.0.get_mut(usize::try_from(event).ok()?)
    }

    /// Marks `count` events from `first` on.
    pub(super) fn add(&mut self, first: u64, count: u64, mark: Mark) {
        for event in first..first.saturating_add(count) {
            if let Some(fate) = self.get_mut(event) {
                fate.add(mark);
            }
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, Fate)> {
        (0..).zip(self.0.iter().copied())
    }
}
