//! `targets` of a source: which of its events go where.

use std::sync::Arc;

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
