//! Texts from outside, fit for a terminal; and standard output that may be gone.

use std::io::{ErrorKind, Write as _};

use jiff::{Timestamp, Unit};

use super::Exit;

/// Longest text from outside in a table, in characters.
pub(super) const CELL_MAX: usize = 48;

/// The text with everything escaped that a terminal would act on or not show, and at most `limit` characters of it.
pub(super) fn shown(text: &str, limit: usize) -> String {
    let mut shown = String::new();
    for (at, character) in text.chars().enumerate() {
        if at == limit {
            shown.push('…');
            break;
        }
        match character {
            // What an escape begins with has to be told from it.
            '\\' => shown.push_str("\\\\"),
            '"' | '\'' => shown.push(character),
            _ => shown.extend(character.escape_debug()),
        }
    }
    shown
}

/// All of the text.
pub(super) fn whole(text: &str) -> String {
    shown(text, usize::MAX)
}

/// A time to the second.
pub(super) fn second(time: Timestamp) -> String {
    // Only of a time at the end of the calendar: never rounded up.
    let options = jiff::TimestampRound::new().smallest(Unit::Second).mode(jiff::RoundMode::Trunc);
    time.round(options).unwrap_or(time).to_string()
}

/// Writes bytes to standard output; whether anybody still reads.
///
/// # Errors
/// Those of writing.
pub(super) fn write(bytes: &[u8]) -> Result<bool, Exit> {
    let mut out = std::io::stdout();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        // Whoever read it has seen enough.
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Exit::software(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_reaches_the_terminal_that_it_would_act_on() {
        assert_eq!(shown("evt_1 \"a\" 'b' é 漢", 99), "evt_1 \"a\" 'b' é 漢");
        assert_eq!(
            shown("a\u{1b}[2J\r\n\t\0\u{202e}\u{7f}\u{9b}\\n", 99),
            "a\\u{1b}[2J\\r\\n\\t\\0\\u{202e}\\u{7f}\\u{9b}\\\\n"
        );
        assert_eq!(shown("abcdef", 3), "abc…");
        assert_eq!(shown("abc", 3), "abc");
        assert_eq!(whole(&"x".repeat(512)).len(), 512);
    }

    #[test]
    fn times_are_cut_to_the_second() {
        assert_eq!(second("2026-01-31T23:59:59.999999Z".parse().unwrap()), "2026-01-31T23:59:59Z");
    }
}
