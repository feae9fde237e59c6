//! Which statements an effect may send, judged by their first words.
//!
//! Invariant: nothing that begins, ends or divides a transaction passes, however it is written. What is not known to
//! be harmless is refused, so that a word of a later Postgres passes only once somebody has thought about it.

/// What a statement of an effect may begin with.
const OFFERED: [&str; 25] = [
    "alter", "analyze", "call", "comment", "create", "delete", "do", "drop", "explain", "grant", "insert",
    "lock", "merge", "notify", "refresh", "reset", "revoke", "select", "set", "show", "table", "truncate",
    "update", "values", "with",
];

/// What begins, ends or divides a transaction.
const CONTROL: [&str; 10] = [
    "abort",
    "begin",
    "commit",
    "end",
    "prepare",
    "release",
    "rollback",
    "savepoint",
    "start",
    "transaction",
];

/// Why the statement is refused; `None` if it may be sent.
pub(super) fn problem(sql: &str) -> Option<String> {
    let mut words = Words(sql);
    let Some(first) = words.next() else {
        return Some("a statement that begins with no word is refused".to_owned());
    };
    if first == "set" {
        return sets_transaction(&mut words).then(|| refuse_control("set transaction"));
    }
    if OFFERED.contains(&first.as_str()) {
        return None;
    }
    if CONTROL.contains(&first.as_str()) {
        return Some(refuse_control(&first));
    }
    Some(match first.as_str() {
        "copy" => {
            "\"copy\" is not offered to effects: insert ... select from unnest($1) does as well".to_owned()
        }
        _ => format!(
            "{first:?} is not offered to effects: begin a statement with one of {}",
            OFFERED.join(", ")
        ),
    })
}

fn refuse_control(what: &str) -> String {
    format!(
        "{what:?} is refused: the gateway begins and ends the transaction of an effect; return Ok to have it \
         committed, an error to have it rolled back"
    )
}

/// SET TRANSACTION and SET SESSION CHARACTERISTICS, both also after LOCAL or SESSION.
fn sets_transaction(words: &mut Words<'_>) -> bool {
    match words.next().as_deref() {
        Some("transaction") => true,
        Some("local" | "session") => {
            let next = words.next();
            next.is_some_and(|next| matches!(next.as_str(), "transaction" | "characteristics" | "session"))
        }
        _ => false,
    }
}

/// The words that a statement begins with, in lower case; ends at the first thing that is none.
struct Words<'a>(&'a str);

impl Iterator for Words<'_> {
    type Item = String;

    fn next(&mut self) -> Option<String> {
        self.0 = skip_blank(self.0);
        let end = self.0.find(|char: char| !is_of_word(char)).unwrap_or(self.0.len());
        let (word, rest) = self.0.split_at_checked(end)?;
        self.0 = rest;
        (!word.is_empty()).then(|| word.to_ascii_lowercase())
    }
}

/// Letters of any language are parts of names in Postgres.
fn is_of_word(char: char) -> bool {
    char.is_ascii_alphanumeric() || char == '_' || char == '$' || !char.is_ascii()
}

/// Skips what Postgres skips in front of a word, and parentheses and semicolons: `;commit` is one statement.
fn skip_blank(mut text: &str) -> &str {
    loop {
        let trimmed = text.trim_start_matches(|char: char| {
            char.is_whitespace() || char.is_control() || matches!(char, ';' | '(' | ')' | '\u{feff}')
        });
        let rest = if let Some(comment) = trimmed.strip_prefix("--") {
            comment.split_once(['\n', '\r']).map_or("", |(_, rest)| rest)
        } else if let Some(comment) = trimmed.strip_prefix("/*") {
            after_comment(comment)
        } else {
            return trimmed;
        };
        text = rest;
    }
}

/// Comments nest in Postgres: what ends the first `*/` may still be within one.
fn after_comment(mut text: &str) -> &str {
    let mut depth = 1_u32;
    while depth > 0 {
        let Some(at) = text.find(['*', '/']) else { return "" };
        let (_, here) = text.split_at_checked(at).unwrap_or_default();
        text = if let Some(rest) = here.strip_prefix("*/") {
            depth -= 1;
            rest
        } else if let Some(rest) = here.strip_prefix("/*") {
            depth += 1;
            rest
        } else {
            here.get(1..).unwrap_or_default()
        };
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transaction_control_is_refused_however_it_is_written() {
        for control in [
            "begin",
            "BEGIN WORK",
            "start transaction",
            "commit",
            "Commit And Chain",
            "end",
            "END;",
            "rollback",
            "rollback to savepoint hapax_effect",
            "abort",
            "savepoint a",
            "release a",
            "prepare transaction 'a'",
            "commit prepared 'a'",
            "set transaction read only",
            "SET  TRANSACTION isolation level serializable",
            "set local transaction read only",
            "set session transaction read only",
            "set session characteristics as transaction read only",
            "set session session characteristics as transaction read only",
        ] {
            let (start, rest) = control.split_once(' ').unwrap_or((control, ""));
            for before in [
                "",
                " ",
                "\n\t\r\u{b}\u{c}",
                ";",
                " ; ;",
                "(",
                "-- select\n",
                "--\r",
                "/* select */",
                "/**/",
                "/* /* */ select */",
                "/*/**/*/",
                "/***/ ",
                "/* -- */",
                "-- /*\n",
                "/*\n--\n*/--*/\n;(/**/",
            ] {
                for between in [" ", "\n", "/**/", " -- a\n"] {
                    let sql = format!("{before}{start}{between}{rest}");
                    let said = problem(&sql).unwrap_or_default();
                    assert!(said.contains("the gateway begins and ends"), "{sql:?}: {said:?}");
                }
            }
        }
    }

    #[test]
    fn what_an_effect_needs_passes() {
        for sql in [
            "select 1",
            "  INSERT into a values ($1)",
            "(select 1) union (select 2)",
            "/* commit */ update a set b = 1",
            "-- commit\nselect 1",
            "with a as (select 1) select * from a",
            "set local work_mem = '1MB'",
            "set constraints all deferred",
            "set transaction_timeout = 0",
            "do $$ begin null; end $$",
            "call a()",
            "values (1)",
            "table a",
            "lock table a",
            "create temp table a (b int)",
            "select/**/1",
            "select'commit'",
        ] {
            assert_eq!(problem(sql), None, "{sql}");
        }
    }

    #[test]
    fn what_nobody_has_thought_about_is_refused_with_what_is_offered() {
        for sql in
            ["", " ", ";", "--", "-- commit", "/*", "/* /* */ commit", "'commit'", "\"commit\"", "$1", "1"]
        {
            let said = problem(sql).unwrap_or_default();
            assert!(!said.is_empty(), "{sql:?}");
        }
        assert!(problem("copy a from stdin").is_some_and(|said| said.contains("unnest")));
        for sql in [
            "declare a cursor with hold for select 1",
            "listen a",
            "deallocate all",
            "discard temp",
            "execute a",
            "prepare a as select 1",
            "selectx",
            "\u{e9}select 1",
            "select\u{e9} 1",
            "load 'x'",
        ] {
            assert!(problem(sql).is_some(), "{sql:?}");
        }
    }
}
