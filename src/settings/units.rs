//! Durations and sizes as they are typed: whole numbers with a unit.
//!
//! Invariant: what is shown can be typed again and means the same; nothing without a unit is read.

use std::time::Duration;

/// Units of durations in milliseconds, the largest first.
const DURATION_UNITS: [(&str, u64); 5] =
    [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)];

/// Units of sizes in bytes, the largest first.
const SIZE_UNITS: [(&str, u64); 4] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];

/// A hundred years: beyond it, adding to a clock reading can overflow here or in a store.
pub(super) const DURATION_MILLIS_MAX: u64 = 36_500 * 86_400_000;

/// Reads `"10s"` and the like; `None` if the text is no whole number with a known unit, or over a hundred years.
#[must_use]
pub fn parse_duration(text: &str) -> Option<Duration> {
    let millis = parse_with_unit(text, &DURATION_UNITS)?;
    (millis <= DURATION_MILLIS_MAX).then(|| Duration::from_millis(millis))
}

/// Reads `"1MiB"` and the like; `None` if the text is no whole number with a known unit.
#[must_use]
pub fn parse_size(text: &str) -> Option<usize> {
    usize::try_from(parse_with_unit(text, &SIZE_UNITS)?).ok()
}

fn parse_with_unit(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at_checked(digits)?;
    let (_, factor) = units.iter().find(|(name, _)| *name == unit)?;
    number.parse::<u64>().ok()?.checked_mul(*factor)
}

/// The duration as it would be typed, in the largest unit that leaves no fraction.
#[must_use]
pub fn show_duration(duration: Duration) -> String {
    show_with_unit(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX), &DURATION_UNITS)
}

/// The size as it would be typed, in the largest unit that leaves no fraction.
#[must_use]
pub fn show_size(size: usize) -> String {
    show_with_unit(u64::try_from(size).unwrap_or(u64::MAX), &SIZE_UNITS)
}

fn show_with_unit(total: u64, units: &[(&str, u64)]) -> String {
    let whole = units.iter().find(|(_, factor)| total >= *factor && total.is_multiple_of(*factor));
    match whole {
        Some((unit, factor)) => format!("{}{unit}", total / factor),
        None => units.last().map_or_else(|| total.to_string(), |(unit, _)| format!("{total}{unit}")),
    }
}
