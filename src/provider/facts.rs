//! What is known of a provider's behaviour: for defaults, for `check`, and for people.
//!
//! Invariant: a fact is stated, or it is among those that nobody knows, or it is left out; never both. What can be
//! worked out from the scheme itself (what a signature covers) is, and a statement that differs is refused.

use std::fmt;
use std::time::Duration;

use crate::settings::{Table, nearest, parse_duration, show_duration};

use super::place::Place;
use super::signature::{SaidHash, SigRule, TsRule};
use super::template::Template;
use super::{EventRules, Every, Kind, all_have, covers, says_id};

/// What may stand in `unknown`.
const KEYS: [&str; 6] =
    ["retry_window", "resend_window", "answer_deadline", "body_max", "timestamp_per_attempt", "volatile"];

/// What is known of a provider's behaviour; used for defaults and by `check`.
#[derive(Debug, Clone)]
pub struct Facts {
    /// How long the provider retries by itself.
    pub retry_window: Option<Duration>,
    /// The pauses before its second attempt, its third, and so on; empty where nobody says them.
    pub retry_schedule: Vec<Duration>,
    /// How long an operator can resend by hand.
    pub resend_window: Option<Duration>,
    /// How long the provider waits for an answer.
    pub answer_deadline: Option<Duration>,
    /// The largest body it sends, in bytes.
    pub body_max: Option<usize>,
    /// Whether the provider retries by itself.
    pub retries: bool,
    /// Whether each attempt at an event has a timestamp of its own.
    pub timestamp_per_attempt: Option<bool>,
    /// Whether the signature covers the id.
    pub id_signed: bool,
    /// How much of a request the signature covers.
    pub binds: Binds,
    /// JSON pointers to parts of the body that change between two attempts of one event. The digest leaves them out.
    pub volatile: Vec<String>,
    /// Keys of facts that are from memory: nobody has checked them against a document.
    pub unchecked: Vec<String>,
    /// Keys of facts that nobody knows.
    pub unknown: Vec<String>,
    /// Where the facts are from.
    pub source: Option<String>,
}

/// How much of a request a signature covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Binds {
    /// The whole body.
    Body,
    /// Some fields, or a token in the body: the rest of the body can be anything.
    Fields,
    /// Nothing of the body: the secret itself is in the request, or a token that says nothing of it.
    Nothing,
}

impl Binds {
    const CHOICES: &[(&str, Self)] =
        &[("body", Self::Body), ("fields", Self::Fields), ("none", Self::Nothing)];

    /// What the templates say. One of several forms may be the signed one, so all of them count.
    fn of(kind: &Kind, sig: &SigRule, body_hash: Option<&SaidHash>) -> Self {
        let sign = kind.templates();
        // A token in the body brings what it signs.
        let brought = matches!(kind, Kind::Jwt(_)) && sig.from.iter().all(Place::in_body);
        if body_hash.is_some() || all_have(sign, Template::has_body) {
            Self::Body
        } else if sign.is_empty() && !brought {
            Self::Nothing
        } else {
            Self::Fields
        }
    }
}

impl fmt::Display for Binds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = Self::CHOICES.iter().find(|(_, binds)| binds == self);
        f.write_str(named.map_or("none", |(name, _)| name))
    }
}

impl Default for Facts {
    fn default() -> Self {
        Self {
            retry_window: None,
            retry_schedule: Vec::new(),
            resend_window: None,
            answer_deadline: None,
            body_max: None,
            retries: true,
            timestamp_per_attempt: None,
            id_signed: false,
            binds: Binds::Nothing,
            volatile: Vec::new(),
            unchecked: Vec::new(),
            unknown: Vec::new(),
            source: None,
        }
    }
}

impl Facts {
    /// Reads the facts; `settle` adds what follows from the rest of the scheme.
    pub(super) fn read(table: &mut Table) -> Self {
        let facts = Self {
            retry_window: table.duration("retry_window"),
            retry_schedule: read_schedule(table),
            resend_window: table.duration("resend_window"),
            answer_deadline: table.duration("answer_deadline"),
            body_max: table.size("body_max"),
            retries: table.flag("retries").unwrap_or(true),
            timestamp_per_attempt: table.flag("timestamp_per_attempt"),
            id_signed: false,
            binds: Binds::Nothing,
            volatile: table.texts("volatile").unwrap_or_default(),
            unchecked: table.texts("unchecked").unwrap_or_default(),
            unknown: table.texts("unknown").unwrap_or_default(),
            source: table.text("source"),
        };
        if !facts.retries && facts.retry_window.is_some() {
            table.error("retry_window", "contradicts retries = false: drop one of them");
        }
        check_schedule(table, &facts);
        for name in facts.unchecked.iter().filter(|name| !table.has(name)) {
            table.error("unchecked", format!("{name:?} is not stated in this table"));
        }
        check_unknown(table, &facts.unknown);
        facts
    }

    /// Adds what the scheme itself says of what is signed, and refuses statements that contradict it.
    pub(super) fn settle(&mut self, table: &mut Table, signed: &Covered<'_>) {
        let binds = Binds::of(signed.kind, signed.sig, signed.body_hash);
        if table.choice("binds", Binds::CHOICES).is_some_and(|stated| stated != binds) {
            table.error("binds", format!("is \"{binds}\" by what sign says: correct one of them"));
        }
        let covered = signed.ids();
        let stated = table.flag("id_signed");
        if stated == Some(true) && !covered {
            table.error("id_signed", "is false by what sign and id say: correct one of them");
        }
        if self.timestamp_per_attempt.is_some() && signed.ts.is_none() {
            table.error(
                "timestamp_per_attempt",
                "is about the table ts, which is not there: drop one of them",
            );
        }
        self.binds = binds;
        self.id_signed = stated.unwrap_or(covered);
    }
}

/// The first pause may be none.
fn read_schedule(table: &mut Table) -> Vec<Duration> {
    let mut pauses = Vec::new();
    for text in table.texts("retry_schedule").unwrap_or_default() {
        match parse_duration(&text) {
            Some(pause) => pauses.push(pause),
            None => table.error(
                "retry_schedule",
                format!("{text:?} is not a duration: give the pauses, as in [\"5s\", \"5m\", \"2h\"]"),
            ),
        }
    }
    pauses
}

/// The window is what retention is held against: a schedule that outlasts it would make duplicates look new.
fn check_schedule(table: &Table, facts: &Facts) {
    let lasts: Duration = facts.retry_schedule.iter().sum();
    if !facts.retries && table.has("retry_schedule") {
        table.error("retry_schedule", "contradicts retries = false: drop one of them");
    } else if let Some(window) = facts.retry_window.filter(|window| lasts > *window) {
        let (lasts, window) = (show_duration(lasts), show_duration(window));
        table.error(
            "retry_schedule",
            format!("lasts {lasts}, longer than retry_window = {window}: correct one of them"),
        );
    }
}

fn check_unknown(table: &Table, unknown: &[String]) {
    for name in unknown {
        if table.has(name) {
            table.error("unknown", format!("{name:?} is stated in this table: drop it here or there"));
        } else if !KEYS.contains(&name.as_str()) {
            let near = nearest(name, KEYS.into_iter());
            let hint = near.map_or_else(|| KEYS.join(", "), |near| format!("did you mean {near:?}?"));
            table.error("unknown", format!("{name:?} is no fact: {hint}"));
        }
    }
}

/// The parts of a scheme from which it follows what a signature covers.
pub(super) struct Covered<'s> {
    pub(super) kind: &'s Kind,
    pub(super) sig: &'s SigRule,
    pub(super) body_hash: Option<&'s SaidHash>,
    pub(super) ts: Option<&'s TsRule>,
    pub(super) every: Option<&'s Every>,
    /// Those of the request.
    pub(super) event: &'s EventRules,
    /// Those of an item, if the request is a batch.
    pub(super) item: Option<&'s EventRules>,
}

impl Covered<'_> {
    /// Whether the signature covers each id that the rules can give.
    fn ids(&self) -> bool {
        let sign = self.kind.templates();
        // A token covers itself, and the body by its hash.
        let bound = matches!(self.kind, Kind::Jwt(_)) && self.body_hash.is_some();
        let named = |rules: &EventRules| {
            let covered = |place: &Place| {
                let signed = |sign: &Template| says_id(sign) || covers(sign, place);
                place.in_token() || (bound && place.in_body()) || all_have(sign, signed)
            };
            !rules.ids.is_empty() && rules.ids.iter().all(|rule| rule.places.iter().all(covered))
        };
        match (self.item, self.every) {
            (None, _) => named(self.event),
            (Some(item), Some(_)) => named(item),
            // A pointer into an item is none into the body.
            (Some(_), None) => bound || all_have(sign, Template::has_body),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Tolerance;
    use crate::fixture::read_scheme;
    use crate::provider::Scheme;

    fn presets() -> impl Iterator<Item = (&'static str, std::sync::Arc<Scheme>)> {
        Scheme::preset_names().iter().map(|name| (*name, Scheme::preset(name).unwrap()))
    }

    #[test]
    fn every_preset_states_each_fact_or_that_nobody_knows_it() {
        for (name, scheme) in presets() {
            let facts = &scheme.facts;
            let stated = [
                ("retry_window", facts.retry_window.is_some() || !facts.retries),
                ("resend_window", facts.resend_window.is_some()),
                ("answer_deadline", facts.answer_deadline.is_some()),
                ("body_max", facts.body_max.is_some()),
                ("timestamp_per_attempt", facts.timestamp_per_attempt.is_some() || scheme.ts.is_none()),
            ];
            for (key, stated) in stated {
                let unknown = facts.unknown.iter().any(|unknown| unknown == key);
                assert!(stated != unknown, "{name}: {key} is stated or in `unknown`");
            }
            let text = Scheme::preset_text(name).unwrap();
            let line = |key: &str| text.lines().any(|line| line.starts_with(key));
            assert!(
                line("volatile") || facts.unknown.iter().any(|key| key == "volatile"),
                "{name}: volatile"
            );
            assert!(line("binds") && line("source"), "{name}: binds and source");
            assert!(text.contains("# Dedupe key:"), "{name}: a comment says what the key is and why");
        }
    }

    /// A timestamp that is not renewed is as old as the event when the last retry comes.
    #[test]
    fn no_preset_refuses_the_retries_of_its_provider() {
        for (name, scheme) in presets() {
            let Tolerance::Within(tolerance) = scheme.tolerance() else { continue };
            let fits = scheme.facts.retry_window.is_some_and(|window| window <= tolerance);
            let renewed = scheme.facts.timestamp_per_attempt == Some(true);
            assert!(renewed || fits || !scheme.facts.retries, "{name}: tolerance {tolerance:?}");
        }
        // Its library's minute would refuse the retries that come after a minute, an hour and six hours.
        let linear = Scheme::preset("linear").unwrap();
        assert_eq!((linear.tolerance(), linear.facts.timestamp_per_attempt), (Tolerance::Off, None));
    }

    #[test]
    fn what_contradicts_the_templates_is_refused() {
        let messages = |more: &str| {
            let scheme = format!(
                "kind = \"hmac\"\nsign = \"{{json:/t}}\"\nsig = {{ from = \"header:x\" }}\nid = \"json:/id\"\n{more}"
            );
            let (_, problems) = read_scheme(&scheme);
            problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
        };
        assert_eq!(messages("binds = \"fields\"\nid_signed = false\nunknown = [\"body_max\"]"), "");
        for (more, wanted) in [
            ("binds = \"body\"", "is \"fields\" by what sign says"),
            ("binds = \"all\"", "\"body\", \"fields\", \"none\""),
            ("id_signed = true", "is false by what sign and id say"),
            ("timestamp_per_attempt = true", "about the table ts"),
            ("unknown = [\"body_mx\"]", "did you mean \"body_max\"?"),
            ("retry_schedule = [\"5\"]", "give the pauses"),
            ("retry_window = \"1h\"\nretry_schedule = [\"0s\", \"2h\"]", "lasts 2h, longer than"),
            ("retries = false\nretry_schedule = [\"5s\"]", "contradicts retries = false"),
            ("unknown = [\"body_max\"]\nbody_max = \"1MiB\"", "is stated in this table"),
        ] {
            assert!(messages(more).contains(wanted), "{more}: {}", messages(more));
        }
    }
}
