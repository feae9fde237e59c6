//! Where in a queue there is nothing more to find.
//!
//! While another session holds the xmin horizon for minutes, the index of what is due keeps an entry for everything that
//! ever was: a reader that begins at the front each time goes over all of them. So it begins where it last found something.
//! What appears before that place was committed late. Most of it is found by a look a few seconds back, which comes before the
//! reader rests; the rest by a look at the whole, which comes the less often the more it costs.

use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};

/// How often the whole is looked at.
const WHOLE_EVERY: Duration = Duration::from_secs(15);
/// It may take this part of the time.
const WHOLE_PART: u32 = 50;
/// Transactions are seldom older than this when they commit, and what they wrote is due when they began.
const COMMITTED_WITHIN: SignedDuration = SignedDuration::from_secs(3);
/// How often it is looked so far back while there is more than is taken at once.
const BACK_EVERY: Duration = Duration::from_millis(100);

#[derive(Debug, Default)]
pub(super) struct Place {
    /// Nothing before this is due, except what was committed late.
    since: Option<Timestamp>,
    /// Nothing at all.
    surely: Option<Timestamp>,
    whole_at: Option<Instant>,
    back_at: Option<Instant>,
    look: Look,
}

/// The look that is under way, or was the last one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Look {
    /// At the whole, since then.
    Whole(Instant),
    /// A few seconds back.
    Back,
    #[default]
    Near,
}

impl Place {
    /// From where to look; `None`: from the front.
    pub(super) fn begin(&mut self, now: Instant) -> Option<Timestamp> {
        if self.surely.is_none() || self.whole_at.is_none_or(|at| at <= now) {
            self.whole_at = Some(now + WHOLE_EVERY);
            self.look = Look::Whole(now);
            // Until something is found: a look may fail.
            self.surely = None;
            return None;
        }
        self.look = if self.back_at.is_none_or(|at| at <= now) { Look::Back } else { Look::Near };
        if self.look == Look::Near { self.since } else { self.surely }
    }

    /// What a look that ended at `ended` found first, at the database's `now`, and whether it found all that it was to take.
    /// Says whether there may be more now.
    pub(super) fn found(
        &mut self,
        first_due: Option<Timestamp>,
        full: bool,
        now: Timestamp,
        ended: Instant,
    ) -> bool {
        let recent = now.saturating_sub(COMMITTED_WITHIN).unwrap_or(now);
        self.since = first_due.or(Some(recent));
        self.surely = Some(first_due.map_or(recent, |due| due.min(recent)));
        // Whoever has found all that is there may rest, and looks back when it wakes.
        self.back_at = match self.look {
            Look::Near => self.back_at.filter(|_| full),
            Look::Whole(_) | Look::Back => full.then_some(ended + BACK_EVERY),
        };
        if let Look::Whole(began) = self.look {
            let rest = ended.saturating_duration_since(began) * WHOLE_PART;
            self.whole_at = self.whole_at.max(Some(ended + rest));
        }
        full || self.look == Look::Near
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
        place.found(Some(due), false, now(), start);
        assert_eq!(place.begin(start), Some(due));
        // What was due just now may have been overtaken by what commits later.
        place.found(Some(now()), false, now(), start);
        assert_eq!(place.begin(start), Some(now() - COMMITTED_WITHIN));
        place.found(None, false, now(), start);
        assert_eq!(place.begin(start), Some(now() - COMMITTED_WITHIN));
        assert_eq!(place.begin(start + WHOLE_EVERY), None);
        assert_eq!(place.begin(start + WHOLE_EVERY), None, "until something was found");
    }

    #[test]
    fn while_there_is_more_it_looks_back_now_and_then_and_before_it_rests() {
        let (mut place, start) = (Place::default(), Instant::now());
        place.begin(start);
        assert!(place.found(Some(now()), true, now(), start));
        assert_eq!(place.begin(start), Some(now()), "where it was");
        assert!(place.found(Some(now()), true, now(), start));
        assert_eq!(place.begin(start + BACK_EVERY), Some(now() - COMMITTED_WITHIN), "now and then");
        assert!(place.found(Some(now()), true, now(), start + BACK_EVERY));
        assert_eq!(place.begin(start + BACK_EVERY), Some(now()));
        assert!(
            place.found(None, false, now(), start + BACK_EVERY),
            "what was committed late was not looked for"
        );
        assert_eq!(place.begin(start + BACK_EVERY), Some(now() - COMMITTED_WITHIN));
        assert!(!place.found(None, false, now(), start + BACK_EVERY));
        assert_eq!(place.begin(start + BACK_EVERY), Some(now() - COMMITTED_WITHIN), "after a rest");
    }

    #[test]
    fn the_whole_is_looked_at_less_often_the_more_it_costs() {
        let (mut place, start) = (Place::default(), Instant::now());
        assert_eq!(place.begin(start), None);
        let ended = start + Duration::from_secs(1);
        place.found(None, false, now(), ended);
        assert!(place.begin(start + WHOLE_EVERY).is_some());
        assert!(place.begin(ended + Duration::from_secs(49)).is_some());
        assert_eq!(place.begin(ended + Duration::from_secs(50)), None);
    }
}
