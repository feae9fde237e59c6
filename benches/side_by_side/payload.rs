//! Events in Stripe's form, made so that one differs from the next in few bytes.

use std::fmt::Write as _;

/// The secret of every source of the bench.
pub(crate) const SECRET: &str = "whsec_of_the_bench_only";
/// The source, which is also the last part of the path.
pub(crate) const SOURCE: &str = "stripe";
/// Length of an event's id.
pub(crate) const ID_LENGTH: usize = 20;

/// A body, and where the parts are that change.
#[derive(Debug, Clone)]
pub(crate) struct Body {
    pub(crate) text: String,
    /// Where the id stands, `ID_LENGTH` bytes.
    pub(crate) id_at: usize,
    /// Where a digit stands that may be another one without a change of meaning.
    pub(crate) digit_at: usize,
}

impl Body {
    /// A body of this many bytes, or the shortest if that is longer.
    pub(crate) fn of_bytes(bytes: usize) -> Self {
        let mut text = String::from(r#"{"id":""#);
        let id_at = text.len();
        text.push_str(&id(0, 0));
        text.push_str(r#"","object":"event","api_version":"2024-06-20","created":1700000000,"#);
        text.push_str(r#""type":"payment_intent.succeeded","livemode":true,"data":{"object":{"amount":"#);
        let digit_at = text.len();
        text.push_str(r#"1000,"currency":"eur","metadata":{"#);
        let mut entry = 0;
        while text.len() + END.len() + ENTRY_LENGTH <= bytes {
            // Writing to a string cannot fail.
            write!(text, r#""k{entry:05}":"{:016x}","#, scramble(entry)).unwrap_or_default();
            entry += 1;
        }
        let padding = bytes.saturating_sub(text.len() + END.len());
        text.push_str(&END.replace('*', &"x".repeat(padding + 1)));
        Self { text, id_at, digit_at }
    }
}

const END: &str = r#""last":"*"}}}}"#;
/// `"k00000":"0123456789abcdef",`
const ENTRY_LENGTH: usize = 28;

/// The id of the event `index` of a run, in no order, as providers' ids are; no two are the same within a run.
pub(crate) fn id(run: u64, index: u64) -> String {
    format!("evt_{:016x}", scramble((run << 32) | index))
}

/// A bijection that leaves no pattern (the finaliser of `SplitMix64`).
fn scramble(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
