//! Reading TOML so that every mistake is found in one pass.
//!
//! A [`Table`] hands out typed values by key. What is missing is `None`, what is wrong becomes a [`Problem`] with
//! file, line and key, and reading goes on; [`Table::finish`] reports the keys that nobody asked for. This module
//! knows TOML, units and secrets, and nothing of what the settings mean.
//!
//! Invariant: no string of the file that could be a secret reaches a message or a `Debug` output; only values of
//! the kinds that never hold one (durations, sizes, numbers, choices) are quoted back.

#[cfg(test)]
mod tests;
mod units;
mod value;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt;
use std::ops::RangeInclusive;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use toml::de::DeTable;

pub use self::units::{parse_duration, parse_size, show_duration, show_size};
use self::value::{Entries, Entry, Value, into_static};

/// Whether a [`Problem`] stops the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    /// The settings cannot be used.
    Error,
    /// The settings can be used, with the stated consequence.
    Warning,
}

/// One mistake: where it is, and what to do about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Path of the file as it was given, or the name of an embedded one.
    pub file: Arc<str>,
    /// Line, counted from 1.
    pub line: usize,
    /// Dotted path of the key, e.g. `source.stripe.secrets`.
    pub key: String,
    /// What is wrong and what would be right.
    pub message: String,
    /// Error or warning.
    pub severity: Severity,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.severity {
            Severity::Error => "error",
            Severity::Warning => "warning",
        };
        write!(f, "{}:{}: {kind}: {}: {}", self.file, self.line, self.key, self.message)
    }
}

/// A place in a file, to report something about later.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    at: usize,
    key: String,
}

/// A value and where it stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Located<T> {
    /// The value.
    pub value: T,
    /// Where it stands.
    pub place: Place,
}

/// How durations are typed.
const DURATION_WANTED: &str = "a string with a unit: \"50ms\", \"10s\", \"5m\", \"24h\" or \"35d\"";

/// Stands for the key in problems about the form of the file.
const SYNTAX: &str = "(syntax)";

/// A file that is being read, and the problems found in it so far.
#[derive(Debug, Clone)]
pub struct File {
    inner: Rc<FileInner>,
}

#[derive(Debug)]
struct FileInner {
    name: Arc<str>,
    line_starts: Vec<usize>,
    whole: bool,
    problems: RefCell<Vec<Problem>>,
    #[cfg(test)]
    asked: RefCell<BTreeSet<String>>,
}

impl File {
    /// Parses `text`; syntax errors become problems of the file, and what could be read is returned.
    #[must_use]
    pub fn parse(name: &str, text: &str) -> (Self, Table) {
        let line_starts = std::iter::once(0).chain(text.match_indices('\n').map(|(at, _)| at + 1)).collect();
        let (mut root, errors) = DeTable::parse_recoverable(text);
        let inner = FileInner {
            name: name.into(),
            line_starts,
            whole: errors.is_empty(),
            problems: RefCell::default(),
            #[cfg(test)]
            asked: RefCell::default(),
        };
        let file = Self { inner: Rc::new(inner) };
        for error in errors {
            let at = error.span().map_or(0, |span| span.start);
            file.report(at, SYNTAX, error.message().to_owned(), Severity::Error);
        }
        root.get_mut().make_owned();
        let table = Table::new(&file, String::new(), 0, into_static(root.into_inner()));
        (file, table)
    }

    /// The problems found so far, in the order of their lines; none are left in the file. Of a line with a syntax
    /// error only the first is told: what is said of values that could not be read would mislead.
    #[must_use]
    pub fn take_problems(&self) -> Vec<Problem> {
        let mut problems = self.inner.problems.take();
        problems.sort_by_key(|problem| (problem.line, problem.key != SYNTAX));
        let mut broken = None;
        problems.retain(|problem| {
            let told = broken != Some(problem.line);
            if problem.key == SYNTAX {
                broken = Some(problem.line);
            }
            told
        });
        problems
    }

    /// Dotted paths of all keys that were asked for, written or not.
    #[cfg(test)]
    pub(crate) fn asked(&self) -> BTreeSet<String> {
        self.inner.asked.borrow().clone()
    }

    fn report(&self, at: usize, key: &str, message: String, severity: Severity) {
        let line = self.inner.line_starts.partition_point(|start| *start <= at);
        let file = Arc::clone(&self.inner.name);
        let problem = Problem { file, line, key: key.to_owned(), message, severity };
        self.inner.problems.borrow_mut().push(problem);
    }
}

/// Where a secret comes from. `Debug` does not show a literal one.
#[derive(Clone, PartialEq, Eq)]
pub enum SecretSource {
    /// An environment variable.
    Env(String),
    /// A file; one trailing newline is cut.
    File(String),
    /// Written in the settings themselves.
    Literal(String),
}

impl fmt::Debug for SecretSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Env(name) => write!(f, "Env({name:?})"),
            Self::File(path) => write!(f, "File({path:?})"),
            Self::Literal(_) => f.write_str("Literal(…)"),
        }
    }
}

/// One table of a file; see the module.
#[derive(Debug)]
pub struct Table {
    file: File,
    path: String,
    at: usize,
    entries: Entries,
    known: BTreeSet<&'static str>,
    failed: RefCell<BTreeSet<String>>,
}

impl Table {
    fn new(file: &File, path: String, at: usize, entries: Entries) -> Self {
        Self { file: file.clone(), path, at, entries, known: BTreeSet::new(), failed: RefCell::default() }
    }

    /// Dotted path of this table; empty for the root.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Whether the key was written.
    #[must_use]
    pub fn has(&self, key: &str) -> bool {
        self.entries.contains_key(key)
    }

    /// Whether a table was written there.
    #[must_use]
    pub fn holds_table(&self, key: &str) -> bool {
        matches!(self.entries.get(key), Some(Entry { value: Value::Table(_), .. }))
    }

    /// Reports that `key` is missing, unless it was written wrongly, or may be in a part of the file that could not
    /// be read.
    pub fn missing(&self, key: &str, message: impl Into<String>) {
        if self.is_whole() && !self.failed(key) {
            self.error(key, message);
        }
    }

    /// Whether the file had no syntax error. If it had one, any other part of it may have got lost, too.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.file.inner.whole
    }

    /// Whether an error about the key was reported through this table: its value is not what was meant.
    #[must_use]
    pub fn failed(&self, key: &str) -> bool {
        self.failed.borrow().contains(key)
    }

    /// Where `key` stands, or the table if it was not written.
    #[must_use]
    pub fn place(&self, key: &str) -> Place {
        Place { at: self.entries.get(key).map_or(self.at, |entry| entry.at), key: self.join(key) }
    }

    /// Reports an error about a value of `key` that stands at `place`.
    pub fn error_at(&self, key: &str, place: &Place, message: impl Into<String>) {
        self.failed.borrow_mut().insert(key.to_owned());
        self.file.report(place.at, &place.key, message.into(), Severity::Error);
    }

    /// Reports a warning about something that stands at `place`.
    pub fn warning_at(&self, place: &Place, message: impl Into<String>) {
        self.file.report(place.at, &place.key, message.into(), Severity::Warning);
    }

    /// Reports something about what stands at `place`; no key counts as failed by it.
    pub fn report_at(&self, place: &Place, severity: Severity, message: String) {
        self.file.report(place.at, &place.key, message, severity);
    }

    /// Reports an error about `key` of this table, or about the table itself if `key` is empty.
    pub fn error(&self, key: &str, message: impl Into<String>) {
        self.report(key, message.into(), Severity::Error);
    }

    /// Reports a warning about `key` of this table.
    pub fn warning(&self, key: &str, message: impl Into<String>) {
        self.report(key, message.into(), Severity::Warning);
    }

    fn report(&self, key: &str, message: String, severity: Severity) {
        if severity == Severity::Error {
            self.failed.borrow_mut().insert(key.to_owned());
        }
        let Place { at, key } = self.place(key);
        self.file.report(at, &key, message, severity);
    }

    /// Path of a key, or of the table itself if `key` is empty.
    fn join(&self, key: &str) -> String {
        match (self.path.is_empty(), key.is_empty()) {
            (true, true) => "(file)".to_owned(),
            (false, true) => self.path.clone(),
            (_, false) => self.child(key),
        }
    }

    /// Path of a key as it stands in the file, where it may be empty.
    fn child(&self, key: &str) -> String {
        if self.path.is_empty() {
            spelled(key).into_owned()
        } else {
            format!("{}.{}", self.path, spelled(key))
        }
    }

    fn get(&mut self, key: &'static str) -> Option<Entry> {
        self.known.insert(key);
        #[cfg(test)]
        self.file.inner.asked.borrow_mut().insert(self.join(key));
        self.entries.get(key).cloned()
    }

    /// A string.
    pub fn text(&mut self, key: &'static str) -> Option<String> {
        match self.get(key)?.value {
            Value::Text(text) => Some(text),
            other => self.wrong(key, &other, "a string in quotes"),
        }
    }

    /// `true` or `false`.
    pub fn flag(&mut self, key: &'static str) -> Option<bool> {
        match self.get(key)?.value {
            Value::Flag(flag) => Some(flag),
            other => self.wrong(key, &other, "true or false, without quotes"),
        }
    }

    /// A whole number inside `range`.
    pub fn count(&mut self, key: &'static str, range: RangeInclusive<u64>) -> Option<u64> {
        let wanted = format!("a whole number from {} to {}", range.start(), range.end());
        match self.get(key)?.value {
            Value::Integer(text) => match text.parse::<u64>() {
                Ok(number) if range.contains(&number) => Some(number),
                _ => self.refuse(key, format!("{text} is out of range: give {wanted}")),
            },
            other => self.wrong(key, &other, &wanted),
        }
    }

    /// A whole number inside `range`, or a word that stands for none (`Some(None)`).
    pub fn count_or(
        &mut self,
        key: &'static str,
        word: &str,
        range: RangeInclusive<u64>,
    ) -> Option<Option<u64>> {
        match self.get(key)?.value {
            Value::Text(text) if text == word => Some(None),
            Value::Text(_) => {
                let wanted = format!("a whole number from {} to {}; or {word:?}", range.start(), range.end());
                self.refuse(key, format!("found a string, expected {wanted}"))
            }
            _ => self.count(key, range).map(Some),
        }
    }

    /// A number inside `range`, with or without a fraction.
    pub fn fraction(&mut self, key: &'static str, range: RangeInclusive<f64>) -> Option<f64> {
        let wanted = format!("a number from {} to {}", range.start(), range.end());
        match self.get(key)?.value {
            Value::Fraction(text) | Value::Integer(text) => match text.parse::<f64>() {
                Ok(number) if range.contains(&number) => Some(number),
                _ => self.refuse(key, format!("{text} is out of range: give {wanted}")),
            },
            other => self.wrong(key, &other, &wanted),
        }
    }

    /// A duration above zero, written with its unit: `"50ms"`, `"10s"`, `"5m"`, `"24h"`, `"35d"`.
    pub fn duration(&mut self, key: &'static str) -> Option<Duration> {
        self.duration_wanted(key, DURATION_WANTED)
    }

    /// A duration inside `range`; see [`Table::duration`].
    pub fn duration_within(
        &mut self,
        key: &'static str,
        range: RangeInclusive<Duration>,
    ) -> Option<Duration> {
        let duration = self.duration(key)?;
        self.within(key, duration, &range)
    }

    /// A duration inside `range`, or a word that stands for none (`Some(None)`).
    pub fn duration_or(
        &mut self,
        key: &'static str,
        word: &str,
        range: RangeInclusive<Duration>,
    ) -> Option<Option<Duration>> {
        if matches!(self.get(key)?.value, Value::Text(text) if text == word) {
            return Some(None);
        }
        let duration = self.duration_wanted(key, &format!("{DURATION_WANTED}; or {word:?}"))?;
        self.within(key, duration, &range).map(Some)
    }

    fn duration_wanted(&mut self, key: &'static str, wanted: &str) -> Option<Duration> {
        match self.get(key)?.value {
            Value::Text(text) => match parse_duration(&text) {
                Some(duration) if !duration.is_zero() => Some(duration),
                _ => self.refuse(key, format!("{text:?} is not a duration above zero: give {wanted}")),
            },
            other => self.wrong(key, &other, wanted),
        }
    }

    /// A duration that may be zero: a string with its unit, or a bare number of seconds.
    pub fn duration_or_seconds(&mut self, key: &'static str) -> Option<Duration> {
        const WANTED: &str = "a whole number of seconds, or a string with a unit: \"10s\", \"5m\"";
        match self.get(key)?.value {
            Value::Text(text) => match parse_duration(&text) {
                Some(duration) => Some(duration),
                None => self.refuse(key, format!("{text:?} is not a duration: give {WANTED}")),
            },
            Value::Integer(text) => match text.parse::<u32>() {
                Ok(seconds) => Some(Duration::from_secs(seconds.into())),
                Err(_) => self.refuse(key, format!("{text} is out of range: give {WANTED}")),
            },
            other => self.wrong(key, &other, WANTED),
        }
    }

    /// A size in bytes above zero, written with its unit: `"512B"`, `"64KiB"`, `"1MiB"`, `"1GiB"`.
    pub fn size(&mut self, key: &'static str) -> Option<usize> {
        const WANTED: &str = "a string with a unit: \"512B\", \"64KiB\", \"1MiB\" or \"1GiB\"";
        match self.get(key)?.value {
            Value::Text(text) => match parse_size(&text) {
                Some(size) if size > 0 => Some(size),
                _ => self.refuse(key, format!("{text:?} is not a size above zero: give {WANTED}")),
            },
            other => self.wrong(key, &other, WANTED),
        }
    }

    /// A size inside `range`; see [`Table::size`].
    pub fn size_within(&mut self, key: &'static str, range: RangeInclusive<usize>) -> Option<usize> {
        let size = self.size(key)?;
        if range.contains(&size) {
            return Some(size);
        }
        let (found, least, most) = (show_size(size), show_size(*range.start()), show_size(*range.end()));
        self.refuse(key, format!("{found} is out of range: give a size from {least} to {most}"))
    }

    fn within(&self, key: &str, duration: Duration, range: &RangeInclusive<Duration>) -> Option<Duration> {
        if range.contains(&duration) {
            return Some(duration);
        }
        let (found, least, most) = (show_duration(duration), range.start(), range.end());
        let (least, most) = (show_duration(*least), show_duration(*most));
        self.refuse(key, format!("{found} is out of range: give a duration from {least} to {most}"))
    }

    /// One of the named choices.
    pub fn choice<T: Copy>(&mut self, key: &'static str, choices: &[(&str, T)]) -> Option<T> {
        let names: Vec<String> = choices.iter().map(|(name, _)| format!("{name:?}")).collect();
        let wanted = format!("one of {}", names.join(", "));
        match self.get(key)?.value {
            Value::Text(text) => match choices.iter().find(|(name, _)| *name == text) {
                Some((_, choice)) => Some(*choice),
                None => self.refuse(key, format!("{text:?} is not known: give {wanted}")),
            },
            other => self.wrong(key, &other, &wanted),
        }
    }

    /// A list of strings; a single string counts as a list of one. `None` if any of them is wrong.
    pub fn texts(&mut self, key: &'static str) -> Option<Vec<String>> {
        let texts = self.located_texts(key)?;
        if self.failed(key) { None } else { Some(texts.into_iter().map(|text| text.value).collect()) }
    }

    /// A list of strings, each with its place; a single string counts as a list of one. What is no string is
    /// reported and left out.
    pub fn located_texts(&mut self, key: &'static str) -> Option<Vec<Located<String>>> {
        const WANTED: &str = "a string or a list of strings";
        let entry = self.get(key)?;
        match entry.value {
            Value::Text(value) => Some(vec![Located { value, place: self.place(key) }]),
            Value::List(list) => {
                let text = |(place, entry): (Place, Entry)| match entry.value {
                    Value::Text(value) => Some(Located { value, place }),
                    other => {
                        self.error_at(key, &place, format!("found {}, expected a string", other.kind()));
                        None
                    }
                };
                Some(self.items(key, list).filter_map(text).collect())
            }
            other => self.wrong(key, &other, WANTED),
        }
    }

    fn items(&self, key: &str, list: Vec<Entry>) -> impl Iterator<Item = (Place, Entry)> {
        let path = self.join(key);
        list.into_iter().enumerate().map(move |(index, entry)| {
            let place = Place { at: entry.at, key: format!("{path}[{index}]") };
            (place, entry)
        })
    }

    /// The table at `key`.
    pub fn table(&mut self, key: &'static str) -> Option<Table> {
        let entry = self.get(key)?;
        match entry.value {
            Value::Table(entries) => Some(Table::new(&self.file, self.join(key), entry.at, entries)),
            other => self.wrong(key, &other, "a table"),
        }
    }

    /// The table at `key`, or an empty one if it was not written, so that what is missing in it is reported.
    #[must_use]
    pub fn table_or_empty(&mut self, key: &'static str) -> Table {
        match self.table(key) {
            Some(table) => table,
            None => Table::new(&self.file, self.join(key), self.at, Entries::new()),
        }
    }

    /// The named tables under `key`: `[source.a]` and `[source.b]` for `source`.
    pub fn tables(&mut self, key: &'static str) -> Vec<(String, Table)> {
        let Some(outer) = self.table(key) else { return Vec::new() };
        let mut tables = Vec::with_capacity(outer.entries.len());
        for (name, entry) in &outer.entries {
            match &entry.value {
                Value::Table(entries) => {
                    let table = Table::new(&self.file, outer.child(name), entry.at, entries.clone());
                    tables.push((name.clone(), table));
                }
                other => outer.error(name, format!("found {}, expected a table", other.kind())),
            }
        }
        tables
    }

    /// A list of tables: `[[scheme.x.handshake]]`.
    pub fn table_list(&mut self, key: &'static str) -> Vec<Table> {
        let Some(entry) = self.get(key) else { return Vec::new() };
        let Value::List(list) = entry.value else {
            self.wrong::<()>(key, &entry.value, "a list of tables");
            return Vec::new();
        };
        let mut tables = Vec::with_capacity(list.len());
        for (place, entry) in self.items(key, list) {
            match entry.value {
                Value::Table(entries) => tables.push(Table::new(&self.file, place.key, place.at, entries)),
                other => self.error_at(key, &place, format!("found {}, expected a table", other.kind())),
            }
        }
        tables
    }

    /// A list of tables, where a string stands for a table that has nothing but it, under `name`:
    /// `["a", { name = "b", … }]`. A single string counts as a list of one.
    pub fn named_table_list(&mut self, key: &'static str, name: &str) -> Vec<Table> {
        let Some(entry) = self.get(key) else { return Vec::new() };
        let list = match entry.value {
            Value::List(list) => list,
            Value::Text(_) => vec![entry],
            other => {
                self.wrong::<()>(key, &other, "a list of strings and tables");
                return Vec::new();
            }
        };
        let mut tables = Vec::with_capacity(list.len());
        for (place, Entry { at, value }) in self.items(key, list) {
            let entries = match value {
                Value::Table(entries) => entries,
                value @ Value::Text(_) => Entries::from([(name.to_owned(), Entry { at, value })]),
                other => {
                    let message = format!("found {}, expected a string or a table", other.kind());
                    self.error_at(key, &place, message);
                    continue;
                }
            };
            tables.push(Table::new(&self.file, place.key, place.at, entries));
        }
        tables
    }

    /// A secret: `"text"`, `{ env = "NAME" }` or `{ file = "path" }`.
    pub fn secret(&mut self, key: &'static str) -> Option<SecretSource> {
        let entry = self.get(key)?;
        self.secret_of(key, self.place(key), entry).map(|secret| secret.value)
    }

    /// A list of secrets, each with its place; a single one counts as a list of one. What cannot be read is
    /// reported and left out.
    pub fn secrets(&mut self, key: &'static str) -> Option<Vec<Located<SecretSource>>> {
        let entry = self.get(key)?;
        let found = match entry.value {
            Value::List(list) => {
                let items = self.items(key, list);
                items.filter_map(|(place, entry)| self.secret_of(key, place, entry)).collect()
            }
            _ => self.secret_of(key, self.place(key), entry).into_iter().collect(),
        };
        Some(found)
    }

    /// Strings under names that the file chooses: `headers = { X-A = "b" }`.
    pub fn named_texts(&mut self, key: &'static str) -> Vec<(String, Located<String>)> {
        let mut found = Vec::new();
        for (name, place, entry) in self.named(key) {
            match entry.value {
                Value::Text(value) => found.push((name, Located { value, place })),
                other => self.error_at(key, &place, format!("found {}, expected a string", other.kind())),
            }
        }
        found
    }

    /// Secrets under names that the file chooses.
    pub fn named_secrets(&mut self, key: &'static str) -> Vec<(String, Located<SecretSource>)> {
        let named = self.named(key).into_iter();
        named.filter_map(|(name, place, entry)| Some((name, self.secret_of(key, place, entry)?))).collect()
    }

    fn named(&mut self, key: &'static str) -> Vec<(String, Place, Entry)> {
        let Some(inner) = self.table(key) else { return Vec::new() };
        let place = |name: &str, at| Place { at, key: inner.child(name) };
        inner
            .entries
            .iter()
            .map(|(name, entry)| (name.clone(), place(name, entry.at), entry.clone()))
            .collect()
    }

    fn secret_of(&self, key: &str, place: Place, entry: Entry) -> Option<Located<SecretSource>> {
        const WANTED: &str = "\"text\", { env = \"NAME\" } or { file = \"path\" }";
        let kind = entry.value.kind();
        let value = match entry.value {
            Value::Text(text) => Some(SecretSource::Literal(text)),
            Value::Table(mut entries) if entries.len() == 1 => match entries.pop_first() {
                Some((name, Entry { value: Value::Text(text), .. })) => match name.as_str() {
                    "env" => Some(SecretSource::Env(text)),
                    "file" => Some(SecretSource::File(text)),
                    _ => None,
                },
                _ => None,
            },
            _ => None,
        };
        if value.is_none() {
            self.error_at(key, &place, format!("found {kind} that is no secret: give {WANTED}"));
        }
        value.map(|value| Located { value, place })
    }

    fn wrong<T>(&self, key: &str, found: &Value, wanted: &str) -> Option<T> {
        self.refuse(key, format!("found {}, expected {wanted}", found.kind()))
    }

    fn refuse<T>(&self, key: &str, message: String) -> Option<T> {
        self.error(key, message);
        None
    }

    /// Ends the reading of this table: keys that nobody asked for are errors.
    pub fn finish(self) {
        for (key, entry) in &self.entries {
            if self.known.contains(key.as_str()) {
                continue;
            }
            let message = match nearest(key, self.known.iter().copied()) {
                Some(near) => format!("unknown key; did you mean {near:?}?"),
                None => format!("unknown key; known here: {}", join(self.known.iter().copied())),
            };
            self.file.report(entry.at, &self.child(key), message, Severity::Error);
        }
    }
}

/// A key as it would be typed: quoted and escaped if it is not a bare one, so that it stays on one line.
fn spelled(key: &str) -> std::borrow::Cow<'_, str> {
    let bare = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    if !key.is_empty() && key.bytes().all(bare) { key.into() } else { format!("{key:?}").into() }
}

fn join<'a>(names: impl Iterator<Item = &'a str>) -> String {
    names.collect::<Vec<_>>().join(", ")
}

/// The known name that is most like `name`, if one is like it at all.
pub fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    known
        .map(|candidate| (strsim::jaro_winkler(name, candidate), candidate))
        .filter(|(likeness, _)| *likeness > 0.75)
        .max_by(|(a, _), (b, _)| a.total_cmp(b))
        .map(|(_, candidate)| candidate)
}
