//! What a DSN says about TLS in libpq's words, which the driver does not know.
//!
//! The rest stays as it was typed: only the driver reads it. What cannot be read here is left to it as well, so that
//! there is one complaint.

use std::collections::BTreeMap;
use std::ops::Range;

use percent_encoding::percent_decode_str;

/// The words, as libpq has them.
const WORDS: [&str; 4] = ["sslmode", "sslrootcert", "sslcert", "sslkey"];

/// The values by their words; of a word that is there twice, the last.
pub(super) type Words = BTreeMap<&'static str, String>;

/// The DSN without these words, and the words.
pub(super) fn take_words(dsn: &str) -> (String, Words) {
    let taken = if is_url(dsn) { of_url(dsn) } else { of_pairs(dsn) };
    taken.unwrap_or_else(|| (dsn.to_owned(), Words::new()))
}

/// A word in front of the first `@`, where it is read as a part of user or password: it would count for nothing, and what
/// follows would be the host.
pub(super) fn lost_word(dsn: &str) -> Option<&'static str> {
    let (before, _) = dsn.split_once('@').filter(|_| is_url(dsn))?;
    WORDS.into_iter().find(|word| before.contains(&format!("{word}=")))
}

fn is_url(dsn: &str) -> bool {
    dsn.starts_with("postgres://") || dsn.starts_with("postgresql://")
}

fn word(key: &str) -> Option<&'static str> {
    WORDS.into_iter().find(|word| *word == key)
}

/// `postgres://user:password@host/database?sslmode=…&…`
fn of_url(dsn: &str) -> Option<(String, Words)> {
    // As the driver reads it, all before the first @ is user and password.
    let after_credentials = dsn.find('@').map_or(0, |at| at + 1);
    let question = after_credentials + dsn.get(after_credentials..)?.find('?')?;
    let (before, query) = dsn.split_at_checked(question)?;
    let (mut words, mut rest) = (Words::new(), Vec::new());
    for pair in query.strip_prefix('?')?.split('&') {
        match pair.split_once('=').and_then(|(key, value)| Some((word(key)?, value))) {
            Some((word, value)) => {
                words.insert(word, percent_decode_str(value).decode_utf8().ok()?.into_owned());
            }
            None => rest.push(pair),
        }
    }
    let rest = rest.join("&");
    let mark = if rest.is_empty() { "" } else { "?" };
    Some((format!("{before}{mark}{rest}"), words))
}

/// `host=… sslmode=… password='it''s'`
fn of_pairs(dsn: &str) -> Option<(String, Words)> {
    let (mut words, mut rest) = (Words::new(), String::new());
    let mut at = 0;
    while let Some(pair) = next_pair(dsn, at) {
        let (range, key, value) = pair?;
        if let Some(word) = word(key) {
            words.insert(word, value);
        } else {
            rest.push_str(dsn.get(range.clone())?);
            rest.push(' ');
        }
        at = range.end;
    }
    Some((rest.trim_end().to_owned(), words))
}

/// The next pair: where it stands, its key and its value without quotes. Nothing at the end; nothing within if it
/// cannot be read.
#[expect(clippy::option_option, reason = "no more pairs, or one that cannot be read")]
fn next_pair(dsn: &str, from: usize) -> Option<Option<(Range<usize>, &str, String)>> {
    let rest = dsn.get(from..)?;
    let start = from + rest.find(|char: char| !char.is_whitespace())?;
    Some(read_pair(dsn, start))
}

fn read_pair(dsn: &str, start: usize) -> Option<(Range<usize>, &str, String)> {
    let (key, after) = dsn.get(start..)?.split_once('=')?;
    let value = after.trim_start();
    let begins = dsn.len() - value.len();
    let (value, length) = read_value(value)?;
    Some((start..begins + length, key.trim_end(), value))
}

/// A value, in quotes or to the next blank, and its length as it stands there; `\` keeps the next character as it is.
fn read_value(text: &str) -> Option<(String, usize)> {
    let quoted = text.starts_with('\'');
    let mut value = String::new();
    let mut chars = text.char_indices().skip(usize::from(quoted));
    while let Some((at, char)) = chars.next() {
        match char {
            '\\' => value.extend(chars.next().map(|(_, char)| char)),
            '\'' if quoted => return Some((value, at + 1)),
            blank if blank.is_whitespace() && !quoted => return Some((value, at)),
            other => value.push(other),
        }
    }
    (!quoted).then_some((value, text.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(dsn: &str) -> (String, Vec<(&'static str, String)>) {
        let (rest, words) = take_words(dsn);
        (rest, words.into_iter().collect())
    }

    #[test]
    fn words_are_taken_and_the_rest_stays_as_it_was() {
        for (dsn, rest, words) in [
            ("postgres://u:p@h/d", "postgres://u:p@h/d", &[][..]),
            ("postgres://u:p@h/d?sslmode=require", "postgres://u:p@h/d", &[("sslmode", "require")]),
            (
                "postgresql://h/d?options=-c%20a%3Db&sslmode=verify-full&sslrootcert=%2Fa%20b%2Bc+d&connect_timeout=3",
                "postgresql://h/d?options=-c%20a%3Db&connect_timeout=3",
                &[("sslmode", "verify-full"), ("sslrootcert", "/a b+c+d")],
            ),
            ("postgres://u:p?sslmode=disable@h/d", "postgres://u:p?sslmode=disable@h/d", &[]),
            ("postgres://u:p?@h/d?sslcert=c", "postgres://u:p?@h/d", &[("sslcert", "c")]),
            ("host=h sslmode=require dbname=d", "host=h dbname=d", &[("sslmode", "require")]),
            (
                "host=h password='a sslmode=disable \\' b' sslkey = '/k e\\'y' sslmode=prefer",
                "host=h password='a sslmode=disable \\' b'",
                &[("sslkey", "/k e'y"), ("sslmode", "prefer")],
            ),
            ("host=h sslmode=prefer sslmode=require", "host=h", &[("sslmode", "require")]),
        ] {
            let words: Vec<_> = words.iter().map(|(word, value)| (*word, (*value).to_owned())).collect();
            assert_eq!(taken(dsn), (rest.to_owned(), words), "{dsn}");
        }
    }

    #[test]
    fn what_cannot_be_read_is_left_to_the_driver() {
        for dsn in ["host=h sslmode", "host='h sslmode=require", "postgres://h/d?sslmode=%ff", "", "sslmode"]
        {
            assert_eq!(taken(dsn), (dsn.to_owned(), Vec::new()), "{dsn}");
        }
    }
}
