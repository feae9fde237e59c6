//! Where in a queue there is nothing more to find.
//!
//! While another session holds the xmin horizon for minutes, the index of what is due keeps an entry for everything that
//! ever was: a reader that begins at the front each time goes over all of them. So it begins where it last found something.
//! What appears before that place (committed late) is found by the next look at the whole, which comes the less often the
//! more it costs.

use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};

/// How often the whole is looked at.
const WHOLE_EVERY: Duration = Duration::from_secs(15);
/// It may take this part of the time.
const WHOLE_PART: u32 = 50;
/// Transactions are seldom older than this when they commit, and what they wrote is due when they began.
const COMMITTED_WITHIN: SignedDuration = SignedDuration::from_secs(3);

#[derive(Debug, Default)]
pub(super) struct Place {
    since: Option<Timestamp>,
    whole_at: Option<Instant>,
    /// A look at the whole that is under way.
    looking_since: Option<Instant>,
}

impl Place {
    /// From where to look; `None`: from the front.
    pub(super) fn begin(&mut self, now: Instant) -> Option<Timestamp> {
        if self.whole_at.is_none_or(|at| at <= now) {
            self.whole_at = Some(now + WHOLE_EVERY);
            self.looking_since = Some(now);
            self.since = None;
        }
        self.since
    }

    /// What a look that ended at `ended` found first, at the database's `now`; nothing before that is due.
    pub(super) fn found(&mut self, first_due: Option<Timestamp>, now: Timestamp, ended: Instant) {
        let recent = now.saturating_sub(COMMITTED_WITHIN).unwrap_or(now);
        self.since = Some(first_due.map_or(recent, |due| due.min(recent)));
        if let Some(began) = self.looking_since.take() {
            let rest = ended.saturating_duration_since(began) * WHOLE_PART;
            self.whole_at = self.whole_at.max(Some(ended + rest));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now() -> Timestamp {
        "2026-01-02T03:04:05Z".parse().unwrap()
    }

    #[test]
    fn it_begins_where_it_found_something_and_now_and_then_at_the_front() {
        let (mut place, start) = (Place::default(), Instant::now());
        assert_eq!(place.begin(start), None);
        let due = now() - SignedDuration::from_secs(60);
        place.found(Some(due), now(), start);
        assert_eq!(place.begin(start), Some(due));
        // What was due just now may have been overtaken by what commits later.
        place.found(Some(now()), now(), start);
        assert_eq!(place.begin(start), Some(now() - COMMITTED_WITHIN));
        place.found(None, now(), start);
        assert_eq!(place.begin(start), Some(now() - COMMITTED_WITHIN));
        assert_eq!(place.begin(start + WHOLE_EVERY), None);
        assert_eq!(place.begin(start + WHOLE_EVERY), None, "until something was found");
    }

    #[test]
    fn the_whole_is_looked_at_less_often_the_more_it_costs() {
        let (mut place, start) = (Place::default(), Instant::now());
        assert_eq!(place.begin(start), None);
        let ended = start + Duration::from_secs(1);
        place.found(None, now(), ended);
        assert!(place.begin(start + WHOLE_EVERY).is_some());
        assert!(place.begin(ended + Duration::from_secs(49)).is_some());
        assert_eq!(place.begin(ended + Duration::from_secs(50)), None);
    }
}
