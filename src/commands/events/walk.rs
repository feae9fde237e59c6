//! Going through events page by page.
//!
//! No index is sorted by the time of receipt, since that would cost each event that is recorded; a BRIN index finds
//! stretches of time. So each page is asked of a stretch that holds about as many events as a page, as far as the last one
//! told; stretches grow where there is little. Nothing is held between pages: a list that somebody reads slowly keeps no
//! snapshot.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};

use super::Exit;
use super::ledger::{Event, Filter, Ledger, Stretch};

/// The first stretch.
const FIRST: Duration = Duration::from_secs(3600);
/// A longer one is asked for as all that is left.
const LONGEST: Duration = Duration::from_secs(400 * 86_400);
/// A stretch that gave no full page is followed by one so many times as long.
const GROWTH: u32 = 4;

/// A way through events.
pub(super) struct Walk<'a> {
    ledger: &'a Ledger<'a>,
    filter: &'a Filter,
    newest_first: bool,
    /// Where the stretch begins, in the walk's direction.
    edge: Timestamp,
    /// The edge is no bound by itself: nothing was asked for yet, or `after` is the bound.
    unbounded: bool,
    after: Option<(Timestamp, crate::identify::EventKey)>,
    length: Duration,
    ended: bool,
}

impl<'a> Walk<'a> {
    /// From the newest to the oldest.
    pub(super) fn newest_first(ledger: &'a Ledger<'a>, filter: &'a Filter) -> Self {
        Self::from(ledger, filter, filter.until.unwrap_or(filter.now), true)
    }

    /// From the oldest, which was received at `oldest`.
    pub(super) fn oldest_first(ledger: &'a Ledger<'a>, filter: &'a Filter, oldest: Timestamp) -> Self {
        Self::from(ledger, filter, oldest, false)
    }

    fn from(ledger: &'a Ledger<'a>, filter: &'a Filter, edge: Timestamp, newest_first: bool) -> Self {
        let (after, length) = (None, FIRST);
        Self { ledger, filter, newest_first, edge, unbounded: true, after, length, ended: false }
    }

    /// The next events, `limit` at most; none at the end.
    pub(super) async fn next(&mut self, limit: i64) -> Result<Vec<Event>, Exit> {
        while !self.ended {
            let far = self.far();
            let (since, before) = if self.newest_first {
                (far.or(self.filter.since), self.near().or(self.filter.until))
            } else {
                (self.near().or(self.filter.since), far.or(self.filter.until))
            };
            let Self { after, newest_first, .. } = *self;
            let page =
                self.ledger.page(self.filter, Stretch { since, before, after, newest_first }, limit).await?;
            self.go_on(&page, far, limit);
            if !page.is_empty() {
                return Ok(page);
            }
        }
        Ok(Vec::new())
    }

    /// Where the stretch begins; `None`: where what was chosen does. An event may have come in just before the clock was
    /// read and be committed after.
    fn near(&self) -> Option<Timestamp> {
        (!self.unbounded).then_some(self.edge)
    }

    /// Where the stretch ends; `None`: where what was chosen does.
    fn far(&self) -> Option<Timestamp> {
        let length = SignedDuration::try_from(self.length).ok().filter(|_| self.length < LONGEST)?;
        if self.newest_first {
            let far = self.edge.checked_sub(length).ok()?;
            self.filter.since.is_none_or(|since| far > since).then_some(far)
        } else {
            let far = self.edge.checked_add(length).ok()?;
            // There is nothing later than now.
            (far < self.filter.until.unwrap_or(self.filter.now)).then_some(far)
        }
    }

    fn go_on(&mut self, page: &[Event], far: Option<Timestamp>, limit: i64) {
        let is_full = i64::try_from(page.len()).is_ok_and(|found| found >= limit);
        if let Some(last) = page.last().filter(|_| is_full) {
            // A page took so long a stretch; the next one, twice that, from where it ended.
            let took = self.edge.duration_since(last.received_at).unsigned_abs();
            self.length = (took * 2).max(Duration::from_secs(1));
            self.after = Some((last.received_at, last.key));
            self.edge = last.received_at;
            self.unbounded = true;
            return;
        }
        match far {
            Some(far) => {
                (self.edge, self.unbounded, self.after) = (far, false, None);
                self.length = self.length.saturating_mul(GROWTH);
            }
            None => self.ended = true,
        }
    }
}
