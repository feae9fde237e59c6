//! Which event a request brings, and what is odd about it: a function of the request's number and the run's seed.

/// Events whose copies are mixed with each other.
const BLOCK: u64 = 256;
/// Percentages are kept in hundredths.
const WHOLE: u64 = 10_000;

/// How requests and events belong together.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mix {
    pub(super) seed: u64,
    /// How often an event comes, each time `parallel` at once.
    pub(super) copies: u64,
    pub(super) parallel: u64,
    pub(super) hot: bool,
    /// In hundredths of a percent.
    pub(super) mismatch: u32,
    pub(super) disconnect: u32,
    pub(super) drop_answers: u32,
}

/// When the client goes away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cut {
    /// Before the body is complete: the gateway cannot have the event.
    InBody,
    /// Before the answer: it may have it.
    BeforeAnswer,
}

/// What chance decides, each apart from the others.
#[derive(Debug, Clone, Copy)]
enum Chance {
    Mismatch = 1,
    Disconnect,
    Half,
    Drop,
}

impl Mix {
    /// The requests, made fewer so that each event has all of its copies.
    pub(super) fn whole(&self, requests: u64) -> u64 {
        let of_event = if self.hot { self.parallel } else { self.copies * self.parallel };
        (requests / of_event).max(1) * of_event
    }

    /// How many events so many requests bring (a batch counts as one).
    pub(super) fn units(&self, requests: u64) -> u64 {
        if self.hot { 1 } else { requests / (self.copies * self.parallel) }
    }

    /// The first request of those that are due at the same instant.
    pub(super) fn instant(&self, request: u64) -> u64 {
        request - request % self.parallel
    }

    /// The event that a request of so many brings.
    pub(super) fn unit(&self, request: u64, requests: u64) -> u64 {
        if self.hot {
            return 0;
        }
        let turn = request / self.parallel;
        let block = turn / (BLOCK * self.copies);
        let first = block * BLOCK;
        let events = BLOCK.min(self.units(requests).saturating_sub(first)).max(1);
        let turns = events * self.copies;
        // A step that shares no divisor with the number of turns comes to each of them once.
        let step = (turns * 5 / 8 + 1..=turns * 2 + 1).find(|step| gcd(*step, turns) == 1).unwrap_or(1);
        let place = turn - block * BLOCK * self.copies;
        first + (place * step + self.seed % turns) % turns % events
    }

    /// Which of its event's two bodies it has.
    pub(super) fn variant(&self, request: u64) -> usize {
        usize::from(self.chance(Chance::Mismatch, request, 0) < u64::from(self.mismatch))
    }

    /// Whether and when the client goes away.
    pub(super) fn cut(&self, request: u64, attempt: usize) -> Option<Cut> {
        if self.chance(Chance::Disconnect, request, attempt) >= u64::from(self.disconnect) {
            return None;
        }
        let half = self.chance(Chance::Half, request, attempt) < WHOLE / 2;
        Some(if half { Cut::InBody } else { Cut::BeforeAnswer })
    }

    /// Whether the answer is taken for lost.
    pub(super) fn drops(&self, request: u64, attempt: usize) -> bool {
        self.chance(Chance::Drop, request, attempt) < u64::from(self.drop_answers)
    }

    fn chance(&self, what: Chance, request: u64, attempt: usize) -> u64 {
        let attempt = u64::try_from(attempt).unwrap_or(u64::MAX);
        scatter(scatter(scatter(self.seed ^ what as u64) ^ request) ^ attempt) % WHOLE
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The finaliser of `SplitMix64`: each bit of what goes in changes half of what comes out.
fn scatter(number: u64) -> u64 {
    let number = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn mix(copies: u64, parallel: u64) -> Mix {
        let (mismatch, disconnect, drop_answers) = (0, 0, 0);
        Mix { seed: 7, copies, parallel, hot: false, mismatch, disconnect, drop_answers }
    }

    #[test]
    fn each_event_comes_as_often_as_asked() {
        for (copies, parallel, asked) in [(1, 1, 1000), (3, 1, 1000), (2, 4, 5000), (7, 3, 22), (1, 2, 1)] {
            let mix = mix(copies, parallel);
            let requests = mix.whole(asked);
            let mut seen = BTreeMap::new();
            for request in 0..requests {
                assert!(mix.instant(request) <= request && mix.instant(request).is_multiple_of(parallel));
                *seen.entry(mix.unit(request, requests)).or_insert(0) += 1;
            }
            assert!(seen.values().all(|times| *times == copies * parallel), "{copies} {parallel} {seen:?}");
            assert_eq!(seen.len() as u64, mix.units(requests));
            assert_eq!(seen.keys().max(), Some(&(mix.units(requests) - 1)));
        }
    }

    #[test]
    fn copies_are_mixed_and_those_of_one_instant_are_not() {
        let mix = mix(2, 2);
        let order: Vec<u64> = (0..400).map(|request| mix.unit(request, 400)).collect();
        assert!(order.chunks(2).all(|pair| pair[0] == pair[1]));
        let pairs: Vec<u64> = order.iter().step_by(2).copied().collect();
        assert!(pairs.windows(2).all(|pair| pair[0] != pair[1]));
    }

    #[test]
    fn shares_are_about_as_large_as_asked() {
        let mix = Mix { mismatch: 1000, disconnect: 2000, drop_answers: 5000, ..mix(1, 1) };
        let of = |holds: &dyn Fn(u64) -> bool| (0..10_000).filter(|request| holds(*request)).count();
        assert!((800..1200).contains(&of(&|request| mix.variant(request) == 1)));
        assert!((800..1200).contains(&of(&|request| mix.cut(request, 0) == Some(Cut::InBody))));
        assert!((800..1200).contains(&of(&|request| mix.cut(request, 0) == Some(Cut::BeforeAnswer))));
        assert!((4800..5200).contains(&of(&|request| mix.drops(request, 0))));
        assert!((2300..2700).contains(&of(&|request| mix.drops(request, 0) && mix.drops(request, 1))));
    }
}
