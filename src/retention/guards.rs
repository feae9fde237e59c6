//! What keeps a pass from deleting what it should not: a clock that cannot be trusted, a table that would go for the most part.
//!
//! Invariant: horizons are worked out by the database alone; the clock of this machine only measures how much time went by.

use std::time::{Duration, Instant};

/// A clock that gains or loses more than this between two readings, and more than [`JUMP_SHARE`] of the time between them, has
/// jumped.
pub const JUMP_MIN: Duration = Duration::from_secs(60);
/// See [`JUMP_MIN`]: a drift over a long pause is none.
pub const JUMP_SHARE: f64 = 0.1;
/// The newest row may be this far ahead of the clock: gateways that failed over see two servers' clocks.
pub const BEHIND_MAX: Duration = Duration::from_secs(300);
/// Of a smaller table any share may go: it is deleted in no time, and a test's or a new installation's share means nothing.
pub const SHARE_ROWS_MIN: f64 = 100_000.0;

/// Why a pass was stopped.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Stop {
    /// The database's clock and this machine's disagree about how much time went by.
    #[error(
        "the database's clock moved by {database_s:.0} s while {measured_s:.0} s went by: check its clock, then run `hapax retain \
         --once` to confirm it"
    )]
    Jumped {
        /// By the database's clock.
        database_s: f64,
        /// By this machine's monotonic one.
        measured_s: f64,
    },
    /// The database's clock is behind its own rows.
    #[error(
        "the database's clock is {behind_s:.0} s behind its newest {kind}: set its clock right; if it is, and the rows are \
         wrong, run `hapax retain --once --force`"
    )]
    Behind {
        /// Of which rows.
        kind: String,
        /// How far.
        behind_s: f64,
    },
    /// Too much would go at once.
    #[error(
        "about {past:.0} of {all:.0} {kind} are past their horizon, more than retention.share_max ({share_max}): check [retention] \
         and the database's clock, then run `hapax retain --once` to confirm it"
    )]
    Share {
        /// Of which rows.
        kind: String,
        /// Those that would go, estimated.
        past: f64,
        /// All, estimated.
        all: f64,
        /// The limit.
        share_max: f64,
    },
    /// A pass of before was stopped, here or in another gateway, and nobody has confirmed it.
    #[error("stopped before: {0}")]
    Before(String),
}

/// The last reading of the database's clock, in seconds since 1970, and when it was taken.
#[derive(Debug, Default)]
pub struct Clock {
    last: Option<(f64, Instant)>,
}

impl Clock {
    /// Takes a reading.
    ///
    /// # Errors
    /// If the clock jumped since the last one. The reading counts for the next one all the same.
    pub fn read(&mut self, database: f64, now: Instant) -> Result<(), Stop> {
        let Some((before, then)) = self.last.replace((database, now)) else { return Ok(()) };
        let (database_s, measured_s) = (database - before, now.duration_since(then).as_secs_f64());
        let off = (database_s - measured_s).abs();
        if off > JUMP_MIN.as_secs_f64() && off > JUMP_SHARE * measured_s {
            return Err(Stop::Jumped { database_s, measured_s });
        }
        Ok(())
    }
}

/// Whether rows are newer than the clock can explain.
///
/// # Errors
/// If they are.
pub(super) fn behind(kind: &str, clock: f64, newest: Option<f64>) -> Result<(), Stop> {
    let behind_s = newest.map_or(0.0, |newest| newest - clock);
    if behind_s > BEHIND_MAX.as_secs_f64() {
        return Err(Stop::Behind { kind: kind.to_owned(), behind_s });
    }
    Ok(())
}

/// Whether more than `share_max` of a table that is not small would go.
///
/// # Errors
/// If it would.
pub(super) fn share(kind: &str, all: f64, past: f64, share_max: f64) -> Result<(), Stop> {
    if all > SHARE_ROWS_MIN && past > share_max * all {
        return Err(Stop::Share { kind: kind.to_owned(), past, all, share_max });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_jumps_is_seen_and_one_that_drifts_is_not() {
        let start = Instant::now();
        // The database's seconds after those of this machine.
        for (went_by, moved, jumped) in [
            (10, 10.0, false),
            (10, 69.0, false),
            (10, 71.0, true),
            (10, -49.0, false),
            (10, -51.0, true),
            (600, 661.0, true),
            (3600, 3900.0, false),
            (3600, 3961.0, true),
            (86_400, 0.0, true),
        ] {
            let mut clock = Clock::default();
            assert_eq!(clock.read(1e9, start), Ok(()));
            let read = clock.read(1e9 + moved, start + Duration::from_secs(went_by));
            assert_eq!(read.is_err(), jumped, "{moved} s in {went_by} s");
            // Judged once, and from there on.
            assert_eq!(clock.read(1e9 + moved, start + Duration::from_secs(went_by)), Ok(()));
        }
    }

    #[test]
    fn limits_are_kept_to_the_row_and_the_second() {
        assert_eq!(behind("events", 1e9, None), Ok(()));
        assert_eq!(behind("events", 1e9, Some(1e9 + 300.0)), Ok(()));
        assert!(behind("events", 1e9, Some(1e9 + 301.0)).is_err());
        assert_eq!(share("events", 100_000.0, 100_000.0, 0.5), Ok(()));
        assert_eq!(share("events", 100_002.0, 50_001.0, 0.5), Ok(()));
        assert!(share("events", 100_002.0, 50_002.0, 0.5).is_err());
    }
}
