//! Reading TOML so that every mistake is found in one pass.
//!
//! A [`Table`] hands out typed values by key. What is missing is `None`, what is wrong becomes a [`Problem`] with
//! file, line and key, and reading goes on; [`Table::finish`] reports the keys that nobody asked for. This module
//! knows TOML, units and secrets, and nothing of what the settings mean.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

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

/// A file that is being read, and the problems found in it so far.
#[derive(Debug, Clone)]
pub struct File {
    inner: Rc<FileInner>,
}

#[derive(Debug)]
struct FileInner {
    name: Arc<str>,
    line_starts: Vec<usize>,
    problems: RefCell<Vec<Problem>>,
}

impl File {
    /// Parses `text`; syntax errors become problems of the file, and what could be read is returned.
    #[must_use]
    pub fn parse(name: &str, text: &str) -> (Self, Table) {
        let line_starts = std::iter::once(0).chain(text.match_indices('\n').map(|(at, _)| at + 1)).collect();
        let inner = FileInner { name: name.into(), line_starts, problems: RefCell::default() };
        let file = Self { inner: Rc::new(inner) };
        let (mut root, errors) = DeTable::parse_recoverable(text);
        for error in errors {
            let at = error.span().map_or(0, |span| span.start);
            file.report(at, "(syntax)", error.message().to_owned(), Severity::Error);
        }
        root.get_mut().make_owned();
        let table = Table::new(&file, String::new(), 0, into_static(root.into_inner()));
        (file, table)
    }

    /// The problems found so far, in the order of their lines; none are left in the file.
    #[must_use]
    pub fn take_problems(&self) -> Vec<Problem> {
        let mut problems = self.inner.problems.take();
        problems.sort_by_key(|problem| problem.line);
        problems
    }

    fn report(&self, at: usize, key: &str, message: String, severity: Severity) {
        let line = self.inner.line_starts.partition_point(|start| *start <= at);
        let file = Arc::clone(&self.inner.name);
        let problem = Problem { file, line, key: key.to_owned(), message, severity };
        self.inner.problems.borrow_mut().push(problem);
    }
}

/// Owned entries of one table; the TOML types borrow from their input, so keys and values are rebuilt as owned.
type Entries = BTreeMap<String, Entry>;

#[derive(Debug, Clone)]
struct Entry {
    at: usize,
    value: Value,
}

#[derive(Debug, Clone)]
enum Value {
    Text(String),
    Integer(String),
    Flag(bool),
    List(Vec<Entry>),
    Table(Entries),
    Other(&'static str),
}

impl Value {
    fn kind(&self) -> &'static str {
        match self {
            Self::Text(_) => "a string",
            Self::Integer(_) => "a bare number",
            Self::Flag(_) => "true/false",
            Self::List(_) => "a list",
            Self::Table(_) => "a table",
            Self::Other(kind) => kind,
        }
    }
}

fn into_static(table: DeTable<'_>) -> Entries {
    let entry = |(key, value): (Spanned<std::borrow::Cow<'_, str>>, Spanned<DeValue<'_>>)| {
        let at = key.span().start;
        (key.into_inner().into_owned(), owned(at, value))
    };
    table.into_iter().map(entry).collect()
}

fn owned(at: usize, value: Spanned<DeValue<'_>>) -> Entry {
    let item = |value: Spanned<DeValue<'_>>| {
        let Range { start, .. } = value.span();
        owned(start, value)
    };
    let value = match value.into_inner() {
        DeValue::String(text) => Value::Text(text.into_owned()),
        DeValue::Integer(number) if number.radix() == 10 => Value::Integer(number.as_str().to_owned()),
        DeValue::Integer(_) => Value::Other("a number that is not decimal"),
        DeValue::Boolean(flag) => Value::Flag(flag),
        DeValue::Array(list) => Value::List(list.into_iter().map(item).collect()),
        DeValue::Table(table) => Value::Table(into_static(table)),
        DeValue::Float(_) => Value::Other("a number with a fraction"),
        DeValue::Datetime(_) => Value::Other("a date"),
    };
    Entry { at, value }
}

/// Where a secret comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SecretSource {
    /// An environment variable.
    Env(String),
    /// A file; one trailing newline is cut.
    File(String),
    /// Written in the settings themselves.
    Literal(String),
}

/// One table of a file; see the module.
#[derive(Debug)]
pub struct Table {
    file: File,
    path: String,
    at: usize,
    entries: Entries,
    known: BTreeSet<&'static str>,
}

impl Table {
    fn new(file: &File, path: String, at: usize, entries: Entries) -> Self {
        Self { file: file.clone(), path, at, entries, known: BTreeSet::new() }
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

    /// Reports an error about `key` of this table, or about the table itself if `key` is empty.
    pub fn error(&self, key: &str, message: impl Into<String>) {
        self.report(key, message.into(), Severity::Error);
    }

    /// Reports a warning about `key` of this table.
    pub fn warning(&self, key: &str, message: impl Into<String>) {
        self.report(key, message.into(), Severity::Warning);
    }

    fn report(&self, key: &str, message: String, severity: Severity) {
        let at = self.entries.get(key).map_or(self.at, |entry| entry.at);
        self.file.report(at, &self.join(key), message, severity);
    }

    fn join(&self, key: &str) -> String {
        match (self.path.is_empty(), key.is_empty()) {
            (true, _) => key.to_owned(),
            (false, true) => self.path.clone(),
            (false, false) => format!("{}.{key}", self.path),
        }
    }

    fn get(&mut self, key: &'static str) -> Option<Entry> {
        self.known.insert(key);
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
    pub fn count(&mut self, key: &'static str, range: std::ops::RangeInclusive<u64>) -> Option<u64> {
        let wanted = format!("a whole number from {} to {}", range.start(), range.end());
        match self.get(key)?.value {
            Value::Integer(text) => match text.parse::<u64>() {
                Ok(number) if range.contains(&number) => Some(number),
                _ => self.refuse(key, format!("{text} is out of range: give {wanted}")),
            },
            other => self.wrong(key, &other, &wanted),
        }
    }

    /// A duration above zero, written with its unit: `"50ms"`, `"10s"`, `"5m"`, `"24h"`, `"35d"`.
    pub fn duration(&mut self, key: &'static str) -> Option<Duration> {
        const WANTED: &str = "a string with a unit: \"50ms\", \"10s\", \"5m\", \"24h\" or \"35d\"";
        match self.get(key)?.value {
            Value::Text(text) => match parse_duration(&text) {
                Some(duration) if !duration.is_zero() => Some(duration),
                _ => self.refuse(key, format!("{text:?} is not a duration above zero: give {WANTED}")),
            },
            other => self.wrong(key, &other, WANTED),
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

    /// A list of strings; a single string counts as a list of one.
    pub fn texts(&mut self, key: &'static str) -> Option<Vec<String>> {
        const WANTED: &str = "a string or a list of strings";
        match self.get(key)?.value {
            Value::Text(text) => Some(vec![text]),
            Value::List(list) => {
                let mut texts = Vec::with_capacity(list.len());
                for entry in list {
                    match entry.value {
                        Value::Text(text) => texts.push(text),
                        other => return self.wrong(key, &other, WANTED),
                    }
                }
                Some(texts)
            }
            other => self.wrong(key, &other, WANTED),
        }
    }

    /// The table at `key`.
    pub fn table(&mut self, key: &'static str) -> Option<Table> {
        let entry = self.get(key)?;
        match entry.value {
            Value::Table(entries) => Some(Table::new(&self.file, self.join(key), entry.at, entries)),
            other => self.wrong(key, &other, "a table"),
        }
    }

    /// The named tables under `key`: `[source.a]` and `[source.b]` for `source`.
    pub fn tables(&mut self, key: &'static str) -> Vec<(String, Table)> {
        let Some(outer) = self.table(key) else { return Vec::new() };
        let mut tables = Vec::with_capacity(outer.entries.len());
        for (name, entry) in &outer.entries {
            match &entry.value {
                Value::Table(entries) => {
                    let table = Table::new(&self.file, outer.join(name), entry.at, entries.clone());
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
        for (index, entry) in list.into_iter().enumerate() {
            match entry.value {
                Value::Table(entries) => {
                    let path = format!("{}[{index}]", self.join(key));
                    tables.push(Table::new(&self.file, path, entry.at, entries));
                }
                other => {
                    self.wrong::<()>(key, &other, "a list of tables");
                }
            }
        }
        tables
    }

    /// A secret: `"text"`, `{ env = "NAME" }` or `{ file = "path" }`.
    pub fn secret(&mut self, key: &'static str) -> Option<SecretSource> {
        let entry = self.get(key)?;
        self.secret_of(key, entry)
    }

    /// A list of secrets; a single one counts as a list of one.
    pub fn secrets(&mut self, key: &'static str) -> Option<Vec<SecretSource>> {
        let entry = self.get(key)?;
        match entry.value {
            Value::List(list) => {
                let found: Vec<_> = list.into_iter().map(|entry| self.secret_of(key, entry)).collect();
                found.into_iter().collect()
            }
            _ => self.secret_of(key, entry).map(|secret| vec![secret]),
        }
    }

    fn secret_of(&self, key: &str, entry: Entry) -> Option<SecretSource> {
        const WANTED: &str = "\"text\", { env = \"NAME\" } or { file = \"path\" }";
        match entry.value {
            Value::Text(text) => Some(SecretSource::Literal(text)),
            Value::Table(mut entries) if entries.len() == 1 => match entries.pop_first() {
                Some((name, Entry { value: Value::Text(text), .. })) if name == "env" => {
                    Some(SecretSource::Env(text))
                }
                Some((name, Entry { value: Value::Text(text), .. })) if name == "file" => {
                    Some(SecretSource::File(text))
                }
                _ => self.refuse(key, format!("this secret cannot be read: give {WANTED}")),
            },
            other => self.wrong(key, &other, WANTED),
        }
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
            self.file.report(entry.at, &self.join(key), message, Severity::Error);
        }
    }
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

/// Reads `"10s"` and the like; `None` if the text is no whole number with a known unit.
#[must_use]
pub fn parse_duration(text: &str) -> Option<Duration> {
    let (number, unit) = split_unit(text)?;
    let millis = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return None,
    };
    number.checked_mul(millis).filter(|total| *total <= i64::MAX as u64).map(Duration::from_millis)
}

/// Reads `"1MiB"` and the like; `None` if the text is no whole number with a known unit.
#[must_use]
pub fn parse_size(text: &str) -> Option<usize> {
    let (number, unit) = split_unit(text)?;
    let bytes: u64 = match unit {
        "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => return None,
    };
    number.checked_mul(bytes).and_then(|total| usize::try_from(total).ok())
}

fn split_unit(text: &str) -> Option<(u64, &str)> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at_checked(digits)?;
    Some((number.parse().ok()?, unit))
}
