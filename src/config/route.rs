//! `targets` of a source: which of its events go where.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::settings::{Table, nearest};

const KEY: &str = "targets";
const NAME: &str = "name";

/// Most targets of one source: each is a job for every event.
const TARGETS_MAX: usize = 64;

/// Most patterns of one route: an event's type is held against each.
const TYPES_MAX: usize = 256;

/// Longest pattern of a type, in bytes.
const PATTERN_MAX: usize = 255;

/// Events of a source that go to a target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// The name of a [`super::Target`] that is there.
    pub target: Arc<str>,
    /// `types = ["invoice.*"]`: any of them. Empty: all events.
    pub types: Vec<TypePattern>,
    /// The target's `attempts_max`.
    pub attempts_max: u32,
}

impl Route {
    /// Whether an event of this type goes there. One without a type goes where no types are listed, or `*` is.
    #[must_use]
    pub fn takes(&self, event_type: Option<&str>) -> bool {
        self.types.is_empty() || self.types.iter().any(|pattern| pattern.fits(event_type))
    }
}

/// Which types of events are meant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TypePattern {
    /// This one.
    Exact(String),
    /// All that begin so; `*` alone begins like everything, and like nothing.
    Prefix(String),
}

impl TypePattern {
    /// Reads a type, or the beginning of types followed by `*`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.is_empty() || text.len() > PATTERN_MAX || text.contains(char::is_control) {
            return Err(format!("has {} bytes or control characters: give 1 to {PATTERN_MAX}", text.len()));
        }
        match text.strip_suffix('*') {
            Some(start) if !start.contains('*') => Ok(Self::Prefix(start.to_owned())),
            None if !text.contains('*') => Ok(Self::Exact(text.to_owned())),
            _ => Err("has a * that is not its only one at the end".to_owned()),
        }
    }

    fn fits(&self, event_type: Option<&str>) -> bool {
        match (self, event_type) {
            (Self::Exact(text), Some(event_type)) => text == event_type,
            (Self::Prefix(start), Some(event_type)) => event_type.starts_with(start.as_str()),
            (Self::Prefix(start), None) => start.is_empty(),
            (Self::Exact(_), None) => false,
        }
    }
}

/// The names of all targets, with their `attempts_max`.
pub(super) type Known = BTreeMap<String, u32>;

/// `targets` of a source.
pub(super) fn routes(table: &mut Table, known: &Known) -> Vec<Route> {
    let items = table.named_table_list(KEY, NAME);
    if items.len() > TARGETS_MAX {
        table.error(KEY, format!("{} targets, and {TARGETS_MAX} are the limit", items.len()));
    }
    let mut seen = BTreeSet::new();
    let mut routes = Vec::with_capacity(items.len());
    for mut item in items {
        let name = name(table, &mut item, known);
        let attempts_max = known.get(&name).copied().unwrap_or_default();
        let route = Route { target: name.into(), types: types(&mut item), attempts_max };
        if seen.insert(Arc::clone(&route.target)) {
            routes.push(route);
        } else {
            let message =
                format!("{:?} stands there twice: give it once, with all of its types", route.target);
            table.error_at(KEY, &item.place(NAME), message);
        }
        item.finish();
    }
    routes
}

/// The name of a target; anything if an error was reported.
fn name(table: &Table, item: &mut Table, known: &Known) -> String {
    let name = item.text(NAME).unwrap_or_default();
    if known.contains_key(&name) || item.failed(NAME) || !item.is_whole() {
        return name;
    }
    let message = if name.is_empty() {
        "missing: give the NAME of a [target.NAME]".to_owned()
    } else {
        let hint = match nearest(&name, known.keys().map(String::as_str)) {
            Some(near) => format!("did you mean {near:?}?"),
            None => format!("add [target.{name}]"),
        };
        format!("there is no target {name:?}; {hint}")
    };
    table.error_at(KEY, &item.place(NAME), message);
    name
}

fn types(table: &mut Table) -> Vec<TypePattern> {
    const KEY: &str = "types";
    let Some(texts) = table.located_texts(KEY) else { return Vec::new() };
    if texts.is_empty() && !table.failed(KEY) {
        table.error(KEY, "is empty, and no event would match: leave it out for all events");
    }
    if texts.len() > TYPES_MAX {
        table.error(KEY, format!("{} types, and {TYPES_MAX} are the limit", texts.len()));
    }
    let mut types = Vec::with_capacity(texts.len());
    for text in texts {
        match TypePattern::parse(&text.value) {
            Ok(pattern) => types.push(pattern),
            Err(problem) => {
                let wanted = "give a type, or its beginning and a *: \"invoice.paid\", \"invoice.*\"";
                table.error_at(KEY, &text.place, format!("{:?} {problem}; {wanted}", text.value));
            }
        }
    }
    types
}

#[cfg(test)]
mod tests {
    use super::*;

    fn takes(types: &[&str], event_type: Option<&str>) -> bool {
        let types = types.iter().map(|text| TypePattern::parse(text).unwrap()).collect();
        Route { target: "t".into(), types, attempts_max: 20 }.takes(event_type)
    }

    #[test]
    fn a_route_takes_what_its_types_name() {
        for (types, event_type, wanted) in [
            (&[][..], Some("a"), true),
            (&[], None, true),
            (&["invoice.paid"], Some("invoice.paid"), true),
            (&["invoice.paid"], Some("invoice.paid.late"), false),
            (&["invoice.paid"], Some("Invoice.paid"), false),
            (&["invoice.paid"], None, false),
            (&["invoice.*"], Some("invoice.paid"), true),
            (&["invoice.*"], Some("invoice."), true),
            (&["invoice.*"], Some("invoice"), false),
            (&["invoice.*"], None, false),
            (&["x", "invoice.*"], Some("invoice.paid"), true),
            (&["*"], Some("a"), true),
            (&["*"], None, true),
        ] {
            assert_eq!(takes(types, event_type), wanted, "{types:?} {event_type:?}");
        }
    }

    #[test]
    fn what_is_no_pattern_is_refused() {
        for text in ["", "a*b", "*a", "**", "a\n", &"x".repeat(256)] {
            assert!(TypePattern::parse(text).is_err(), "{text:?}");
        }
    }
}
