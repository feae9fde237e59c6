//! The business effect of a source.
//!
//! Invariant: the name of a function is two identifiers and nothing else, so that it can stand in a statement. No name of
//! a function looks like that of a Rust effect.

use std::time::Duration;

use super::target::attempts_max;
use super::{LockRule, OnError, Retry};
use crate::settings::Table;

/// Longest name of a group, in bytes.
const GROUP_MAX: usize = 255;

/// Longest identifier in Postgres; it cuts longer ones without an error.
const IDENTIFIER_MAX: usize = 63;

/// The group of sources without an effect.
const NO_EFFECT: &str = "none";

/// What stands in the place of an effect where somebody else asks the database for the events.
const PULL: &str = "pull";

/// What the name of an effect that is written in Rust begins with.
pub(super) const RUST: &str = "rust:";

/// Longest name of such an effect, in bytes.
const RUST_NAME_MAX: usize = 63;

/// `effect`, if something is called.
pub(super) fn effect(table: &mut Table) -> Option<String> {
    const KEY: &str = "effect";
    const WANTED: &str = "give \"none\", \"pull\", \"schema.function\" or \"rust:NAME\"";
    let text = table.text(KEY)?;
    if let Some(name) = text.strip_prefix(RUST) {
        if is_rust_name(name) {
            return Some(text);
        }
        let wanted = format!("give \"rust:\" and 1 to {RUST_NAME_MAX} of a-z, 0-9, _ and -");
        table.error(KEY, format!("{text:?} names no Rust effect: {wanted}"));
        return None;
    }
    match text.as_str() {
        NO_EFFECT | PULL => {}
        _ => match function_problem(&text) {
            None => return Some(text),
            Some(problem) => table.error(KEY, format!("{text:?} {problem}: {WANTED}")),
        },
    }
    None
}

/// Whether events are asked for, in place of an effect.
pub(super) fn is_pulled(table: &mut Table) -> bool {
    !table.failed("effect") && table.text("effect").is_some_and(|text| text == PULL)
}

fn is_rust_name(name: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_' || byte == b'-';
    (1..=RUST_NAME_MAX).contains(&name.len()) && name.bytes().all(fits)
}

/// The text becomes part of a statement, so it must be two identifiers and nothing else.
fn function_problem(text: &str) -> Option<&'static str> {
    const FORM: &str =
        "is not two names of a-z, 0-9 and _ joined by a dot (others in double quotes: '\"My\".\"Fn\"')";
    let Some((schema, rest)) = identifier(text) else { return Some(FORM) };
    let Some(rest) = rest.strip_prefix('.') else {
        return Some(if rest.is_empty() { "names no schema" } else { FORM });
    };
    let Some((function, "")) = identifier(rest) else { return Some(FORM) };
    let too_long = schema > IDENTIFIER_MAX || function > IDENTIFIER_MAX;
    too_long.then_some("has a name of more than 63 bytes, which Postgres would cut")
}

/// The length of the identifier at the start of the text, and what follows it.
fn identifier(text: &str) -> Option<(usize, &str)> {
    let Some(mut rest) = text.strip_prefix('"') else {
        let plain = |char: char| char.is_ascii_lowercase() || char.is_ascii_digit() || char == '_';
        let end = text.find(|char| !plain(char)).unwrap_or(text.len());
        let starts = text.starts_with(|char: char| char.is_ascii_lowercase() || char == '_');
        return if starts { text.get(end..).map(|rest| (end, rest)) } else { None };
    };
    let mut length = 0;
    loop {
        let end = rest.find('"')?;
        length += end;
        let inside = rest.get(..end)?;
        if inside.contains(char::is_control) {
            return None;
        }
        rest = rest.get(end + 1..)?;
        match rest.strip_prefix('"') {
            Some(after) => (rest, length) = (after, length + 1),
            None => return (length > 0).then_some((length, rest)),
        }
    }
}

/// `effect_parallel`
pub(super) fn effect_parallel(table: &mut Table, effect: Option<&str>) -> bool {
    const KEY: &str = "effect_parallel";
    let parallel = table.flag(KEY);
    if parallel == Some(true) && effect.is_none() && !table.failed("effect") {
        table.warning(KEY, "has no effect without an effect");
    }
    parallel.unwrap_or(false)
}

/// `effect_group`
pub(super) fn effect_group(table: &mut Table, effect: Option<&str>) -> String {
    const KEY: &str = "effect_group";
    let default = effect.unwrap_or(NO_EFFECT).to_owned();
    let Some(group) = table.text(KEY) else { return default };
    if effect.is_none() {
        if !table.failed("effect") {
            table.error(KEY, "names a group of effects, but this source has none: remove it, or give effect");
        }
        return default;
    }
    if group.is_empty() || group.len() > GROUP_MAX || group.contains(char::is_control) || group == NO_EFFECT {
        let wanted = format!("1 to {GROUP_MAX} bytes without control characters, other than {NO_EFFECT:?}");
        table.error(KEY, format!("{group:?} cannot be the name of a group: give {wanted}"));
        return default;
    }
    group
}

/// `effect_batch`
pub(super) fn effect_batch(table: &mut Table, effect: Option<&str>) -> bool {
    const KEY: &str = "effect_batch";
    only_with_effect(table, KEY, effect);
    let batch = table.flag(KEY);
    if is_rust(effect) && batch == Some(true) {
        table.error(KEY, "a Rust effect has a transaction of its own for each event: remove it");
    }
    batch.unwrap_or(true)
}

/// `lock`
pub(super) fn lock(table: &mut Table, effect: Option<&str>) -> Option<LockRule> {
    const KEY: &str = "lock";
    only_with_effect(table, KEY, effect);
    let text = table.text(KEY)?;
    if is_rust(effect) {
        table.error(
            KEY,
            "orders the effects within a batch, and a Rust effect has no batches: remove it, and give \
             effect_parallel = true if effects of different events never lock the same rows, or in one order",
        );
        return None;
    }
    if table.flag("effect_parallel") == Some(true) {
        table.error(
            KEY,
            "orders effects that lock the same rows, and effect_parallel says that none do: give one of them",
        );
    }
    if table.has("effect_group") {
        table.warning(KEY, "takes the place of effect_group, which then means nothing");
    }
    match LockRule::parse(&text) {
        Ok(rule) => Some(rule),
        Err(message) => {
            table.error(KEY, message);
            None
        }
    }
}

fn is_rust(effect: Option<&str>) -> bool {
    effect.is_some_and(|name| name.starts_with(RUST))
}

fn only_with_effect(table: &mut Table, key: &str, effect: Option<&str>) {
    if table.has(key) && effect.is_none() && !table.failed("effect") {
        table.warning(key, "does nothing without an effect");
    }
}

/// What is done with an event that an effect fails on, or that nobody finishes.
pub(super) struct Failing {
    pub(super) on_error: OnError,
    pub(super) attempts_max: u32,
    pub(super) retry: Retry,
}

impl Failing {
    /// `on_error`, `attempts_max`, `retry_base`, `retry_max`; `retries` says whether the provider does.
    pub(super) fn read(table: &mut Table, effect: Option<&str>, retries: bool) -> Self {
        const CHOICES: [(&str, OnError); 2] = [("retry", OnError::Retry), ("park", OnError::Park)];
        let pulled = is_pulled(table);
        only_with_effect(table, "on_error", effect);
        let on_error = table.choice("on_error", &CHOICES).unwrap_or(OnError::of(retries));
        let sound = !table.failed("effect") && !table.failed("on_error");
        let parks = effect.is_some() && on_error == OnError::Park;
        if sound && !parks {
            let written =
                ["attempts_max", "retry_base", "retry_max"].into_iter().filter(|key| table.has(key));
            for key in written.filter(|key| !pulled || *key != "attempts_max") {
                let also = if key == "attempts_max" { ", or with effect = \"pull\"" } else { "" };
                table.warning(key, format!("does nothing without an effect and on_error = \"park\"{also}"));
            }
        }
        let retry = Retry { base: Duration::from_secs(1), max: Duration::from_secs(3600) };
        let attempts_max = attempts_max(table, if pulled { 5 } else { 20 });
        Self { on_error, attempts_max, retry: super::target::retry(table, retry) }
    }
}
