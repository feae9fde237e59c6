//! A TOML document as owned values that know where they stand.
//!
//! Invariant: `Debug` shows no string.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// Owned entries of one table; the TOML types borrow from their input, so keys and values are rebuilt as owned.
pub(super) type Entries = BTreeMap<String, Entry>;

#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub(super) at: usize,
    pub(super) value: Value,
}

#[derive(Clone)]
pub(super) enum Value {
    Text(String),
    Integer(String),
    Fraction(String),
    Flag(bool),
    List(Vec<Entry>),
    Table(Entries),
    Other(&'static str),
}

/// Shows the kind only: any string of the file may be a secret.
impl fmt::Debug for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind())
    }
}

impl Value {
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Text(_) => "a string",
            Self::Integer(_) => "a bare number",
            Self::Fraction(_) => "a number with a fraction",
            Self::Flag(_) => "true/false",
            Self::List(_) => "a list",
            Self::Table(_) => "a table",
            Self::Other(kind) => kind,
        }
    }
}

pub(super) fn into_static(table: DeTable<'_>) -> Entries {
    let entry = |(key, value): (Spanned<Cow<'_, str>>, Spanned<DeValue<'_>>)| {
        let at = key.span().start;
        (key.into_inner().into_owned(), owned(at, value))
    };
    table.into_iter().map(entry).collect()
}

fn owned(at: usize, value: Spanned<DeValue<'_>>) -> Entry {
    let item = |value: Spanned<DeValue<'_>>| {
        let at = value.span().start;
        owned(at, value)
    };
    let value = match value.into_inner() {
        DeValue::String(text) => Value::Text(text.into_owned()),
        DeValue::Integer(number) if number.radix() == 10 => Value::Integer(number.as_str().to_owned()),
        DeValue::Integer(_) => Value::Other("a number that is not decimal"),
        DeValue::Boolean(flag) => Value::Flag(flag),
        DeValue::Array(list) => Value::List(list.into_iter().map(item).collect()),
        DeValue::Table(table) => Value::Table(into_static(table)),
        DeValue::Float(number) => Value::Fraction(number.as_str().to_owned()),
        DeValue::Datetime(_) => Value::Other("a date"),
    };
    Entry { at, value }
}
