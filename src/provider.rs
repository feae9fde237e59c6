//! Provider presets and the scheme grammar as data.
//!
//! A scheme says how a provider signs and where an event's id stands. It is compiled once, when it is loaded: a
//! template that does not parse, a pointer that is none, a timestamp that is used but never read are refused there,
//! with the line. Invariant: what decides about trust (algorithm, labels, places) comes from here, never from a
//! request; no request is seen here.

mod key;
pub(crate) mod place;
pub(crate) mod signature;
pub(crate) mod template;
#[cfg(test)]
mod vectors;

use std::sync::Arc;
use std::time::Duration;

use http::HeaderName;
use jiff::Timestamp;

use crate::config::Tolerance;
use crate::json::{Pointers, Slot};
use crate::settings::{File, Severity, Table};

pub use key::Key;

use key::KeyRule;
use place::{Place, Rule};
use signature::{Hash, SigRule, TsFrom, TsRule};
use template::{Piece, Template};

/// The embedded presets, by name.
const PRESETS: &[(&str, &str)] = &[
    ("github", include_str!("../config/providers/github.toml")),
    ("gitlab", include_str!("../config/providers/gitlab.toml")),
    ("gitlab-token", include_str!("../config/providers/gitlab-token.toml")),
    ("shopify", include_str!("../config/providers/shopify.toml")),
    ("slack", include_str!("../config/providers/slack.toml")),
    ("standard-webhooks", include_str!("../config/providers/standard-webhooks.toml")),
    ("stripe", include_str!("../config/providers/stripe.toml")),
    ("svix", include_str!("../config/providers/svix.toml")),
];
const PRESET_NAMES: [&str; PRESETS.len()] = {
    let mut names = [""; PRESETS.len()];
    let mut rest = PRESETS;
    let mut left: &mut [&str] = &mut names;
    while let ([(name, _), tail @ ..], [first, others @ ..]) = (rest, left) {
        *first = name;
        rest = tail;
        left = others;
    }
    names
};

/// How a provider signs, where ids stand, and what is known about it.
#[derive(Debug)]
pub struct Scheme {
    /// Name of the preset or of the user's own scheme.
    pub name: String,
    /// What is known of the provider's behaviour.
    pub facts: Facts,
    pub(crate) kind: Kind,
    key: KeyRule,
    pub(crate) sig: SigRule,
    pub(crate) ts: Option<TsRule>,
    /// Pointers of everything that verification reads.
    pub(crate) signed: Pointers,
    /// Headers that may stand in a request only once, or it is refused.
    pub(crate) once: Vec<HeaderName>,
    pub(crate) event: EventRules,
    sample: Option<String>,
}

/// How a request is authenticated.
#[derive(Debug)]
pub(crate) enum Kind {
    /// A keyed hash over the template.
    Hmac {
        /// The digest.
        hash: Hash,
        /// What is signed.
        sign: Template,
    },
    /// The secret itself is in the request.
    Token,
}

/// What of a request names and describes its event.
#[derive(Debug, Default)]
pub(crate) struct EventRules {
    /// Pointers of all the rules below.
    pub(crate) pointers: Pointers,
    /// The first that yields is the id; none at all: the source's requests have no identity.
    pub(crate) ids: Vec<Rule>,
    /// The provider's name for what happened.
    pub(crate) types: Vec<Rule>,
    /// The provider's time of the event.
    pub(crate) times: Vec<Rule>,
    /// The values that the digest covers; none: the raw body.
    pub(crate) digest: Vec<Slot>,
}

/// What is known of a provider's behaviour; used for defaults and by `check`.
#[derive(Debug, Clone)]
pub struct Facts {
    /// How long the provider retries by itself.
    pub retry_window: Option<Duration>,
    /// How long an operator can resend by hand.
    pub resend_window: Option<Duration>,
    /// How long the provider waits for an answer.
    pub answer_deadline: Option<Duration>,
    /// The largest body it sends, in bytes.
    pub body_max: Option<usize>,
    /// Whether the provider retries by itself.
    pub retries: bool,
    /// Whether the signature covers the id.
    pub id_signed: bool,
    /// Parts of the body that change between two attempts of one event.
    pub volatile: Vec<String>,
    /// Keys of facts that are from memory: nobody has checked them against a document.
    pub unchecked: Vec<String>,
    /// Where the facts are from.
    pub source: Option<String>,
}

impl Default for Facts {
    fn default() -> Self {
        Self {
            retry_window: None,
            resend_window: None,
            answer_deadline: None,
            body_max: None,
            retries: true,
            id_signed: false,
            volatile: Vec::new(),
            unchecked: Vec::new(),
            source: None,
        }
    }
}

impl Scheme {
    /// The embedded preset of that name.
    #[must_use]
    pub fn preset(name: &str) -> Option<Arc<Self>> {
        let (_, text) = PRESETS.iter().find(|(preset, _)| *preset == name)?;
        let (file, table) = File::parse(name, text);
        let scheme = Self::read(name, table);
        let sound = file.take_problems().iter().all(|problem| problem.severity == Severity::Warning);
        scheme.filter(|_| sound).map(Arc::new)
    }

    /// Names of all embedded presets.
    #[must_use]
    pub fn preset_names() -> &'static [&'static str] {
        &PRESET_NAMES
    }

    /// The text of an embedded preset, comments and all.
    #[must_use]
    pub fn preset_text(name: &str) -> Option<&'static str> {
        PRESETS.iter().find(|(preset, _)| *preset == name).map(|(_, text)| *text)
    }

    /// Turns the text of a secret into a key, as this scheme encodes it.
    ///
    /// # Errors
    /// What is wrong with it, without the secret.
    pub fn key(&self, secret: &str) -> Result<Key, String> {
        let bytes = self.key.decode(secret)?;
        Ok(match &self.kind {
            Kind::Hmac { hash, .. } => Key::hmac(hash.algorithm(), &bytes),
            Kind::Token => Key::token(&bytes),
        })
    }

    /// Whether the URL is part of what is signed: the source then needs a public URL.
    #[must_use]
    pub fn signs_url(&self) -> bool {
        self.template().is_some_and(|sign| sign.has(|piece| matches!(piece, Piece::Url)))
    }

    /// Whether a timestamp is part of what is signed: without one, a captured request is good for ever.
    #[must_use]
    pub fn signs_time(&self) -> bool {
        let (Some(sign), Some(ts)) = (self.template(), &self.ts) else { return false };
        let named = sign.has(|piece| matches!(piece, Piece::Timestamp));
        named || matches!(&ts.from, TsFrom::Places(places) if places.iter().all(|place| covers(sign, place)))
    }

    /// How far a timestamp may be from the clock, unless the source says otherwise.
    #[must_use]
    pub fn tolerance(&self) -> Tolerance {
        self.ts.as_ref().map_or(Tolerance::Off, |ts| ts.tolerance)
    }

    /// Whether requests of this scheme have no identity, so that none is ever a duplicate.
    #[must_use]
    pub fn never_dedupes(&self) -> bool {
        self.event.ids.is_empty()
    }

    /// The rules for the id, as they were written.
    pub fn id_rules(&self) -> impl Iterator<Item = &str> {
        self.event.ids.iter().map(|rule| rule.text.as_str())
    }

    /// A body that such a provider could send, with the given id and time in it.
    #[must_use]
    pub fn sample(&self, id: &str, now: Timestamp) -> Option<String> {
        let text = self.sample.as_ref()?;
        Some(text.replace("{id}", id).replace("{now}", &now.as_second().to_string()))
    }

    /// What fixes the keys of this scheme's events: a changed text means that old events get new keys.
    #[must_use]
    pub fn key_rule(&self) -> String {
        self.id_rules().collect::<Vec<_>>().join(" | ")
    }

    /// Headers that hold a signature or the token itself.
    pub(crate) fn signature_headers(&self) -> Vec<&HeaderName> {
        self.sig.from.iter().filter_map(Place::header).collect()
    }

    /// All headers that the scheme reads; one may stand there twice.
    pub(crate) fn headers(&self) -> Vec<&HeaderName> {
        let rules = [&self.event.ids, &self.event.types, &self.event.times].into_iter().flatten();
        let places = rules.flat_map(|rule| &rule.places).filter_map(Place::header);
        self.signature_headers().into_iter().chain(&self.once).chain(places).collect()
    }

    pub(crate) fn signs_id(&self) -> bool {
        self.template().is_some_and(signs_id)
    }

    fn template(&self) -> Option<&Template> {
        match &self.kind {
            Kind::Hmac { sign, .. } => Some(sign),
            Kind::Token => None,
        }
    }
}

fn signs_id(sign: &Template) -> bool {
    sign.has(|piece| matches!(piece, Piece::Id))
}

/// Whether the template signs what stands at the place.
fn covers(sign: &Template, place: &Place) -> bool {
    let whole = place.in_body() && sign.has(|piece| matches!(piece, Piece::Body));
    let url = matches!(place, Place::Query(_)) && sign.has(|piece| matches!(piece, Piece::Url));
    let named = sign.places().any(|signed| match (signed, place) {
        (Place::Header(a), Place::Header(b)) => a == b,
        (Place::Query(a), Place::Query(b)) | (Place::Form(a), Place::Form(b)) => a == b,
        _ => false,
    });
    whole || url || named
}

#[derive(Clone, Copy)]
enum KindName {
    Hmac,
    Token,
}

/// Reading a scheme table.
impl Scheme {
    /// Reads a scheme table; mistakes are reported to the table's file. What is returned counts only if none was
    /// an error.
    pub fn read(name: &str, mut table: Table) -> Option<Self> {
        let mut signed = Pointers::default();
        let kind = table.choice("kind", &[("hmac", KindName::Hmac), ("token", KindName::Token)]);
        if !table.has("kind") {
            table.error("kind", "is missing: give \"hmac\" or \"token\"");
        }
        let kind = match kind {
            Some(KindName::Hmac) => read_hmac(&mut table, &mut signed),
            Some(KindName::Token) => Some(read_token(&mut table)),
            None => skip_kind(&mut table),
        };
        let key = table.table("key").map(KeyRule::read).unwrap_or_default();
        let sig = table.table("sig").and_then(|sig| SigRule::read(sig, &mut signed));
        if !table.has("sig") {
            table.error(
                "sig",
                "is missing: say where the signature stands, e.g. { from = \"header:X-Signature\" }",
            );
        }
        let ts = table.table("ts").and_then(|ts| TsRule::read(ts, &mut signed));
        let event = EventRules::read(&mut table);
        let mut facts = Facts::read(&mut table);
        let id_signed = table.flag("id_signed");
        let sample = table.text("sample");
        let (Some(kind), Some(sig)) = (kind, sig) else {
            table.finish();
            return None;
        };
        check_relations(&table, &kind, &sig, ts.as_ref(), &event);
        facts.id_signed = id_signed.unwrap_or_else(|| covers_ids(&kind, &event));
        table.finish();
        let once = once(&kind, &sig, ts.as_ref(), &event);
        let name = name.to_owned();
        Some(Self { name, facts, kind, key, sig, ts, signed, once, event, sample })
    }
}

fn read_hmac(table: &mut Table, signed: &mut Pointers) -> Option<Kind> {
    let hash = table.choice("hash", Hash::CHOICES);
    let hash = if table.has("hash") { hash } else { Some(Hash::Sha256) };
    let Some(text) = table.text("sign") else {
        if !table.has("sign") {
            table.error("sign", "is missing: the template of the signed bytes, e.g. \"{ts}.{body}\"");
        }
        return None;
    };
    match Template::parse(&text, signed) {
        Ok(sign) => Some(Kind::Hmac { hash: hash?, sign }),
        Err(message) => {
            table.error("sign", message);
            None
        }
    }
}

/// Asks for the keys of every kind, so that beside a wrong kind they are not called unknown as well.
fn skip_kind(table: &mut Table) -> Option<Kind> {
    for key in ["hash", "sign"] {
        table.text(key);
    }
    None
}

fn read_token(table: &mut Table) -> Kind {
    for key in ["hash", "sign"] {
        if table.text(key).is_some() {
            table.error(key, "means nothing with kind = \"token\", which signs nothing: drop it");
        }
    }
    Kind::Token
}

impl EventRules {
    fn read(table: &mut Table) -> Self {
        let mut pointers = Pointers::default();
        if !table.has("id") {
            table.error("id", "is missing: name where an event's id stands, or [] if requests have none");
        }
        let ids = rules(table, "id", &mut pointers);
        let types = rules(table, "type", &mut pointers);
        let times = rules(table, "event_time", &mut pointers);
        let mut digest = Vec::new();
        for text in table.texts("digest").unwrap_or_default() {
            match Place::parse(&text, &mut pointers) {
                Ok(Place::Json(slot)) => digest.push(slot),
                Ok(_) => table
                    .error("digest", format!("{text:?} is no part of a JSON body: give \"json:/POINTER\"")),
                Err(message) => table.error("digest", message),
            }
        }
        Self { pointers, ids, types, times, digest }
    }
}

fn rules(table: &mut Table, key: &'static str, pointers: &mut Pointers) -> Vec<Rule> {
    let mut rules = Vec::new();
    for text in table.texts(key).unwrap_or_default() {
        match Rule::parse(&text, pointers) {
            Ok(rule) => rules.push(rule),
            Err(message) => table.error(key, message),
        }
    }
    rules
}

impl Facts {
    fn read(table: &mut Table) -> Self {
        let facts = Self {
            retry_window: table.duration("retry_window"),
            resend_window: table.duration("resend_window"),
            answer_deadline: table.duration("answer_deadline"),
            body_max: table.size("body_max"),
            retries: table.flag("retries").unwrap_or(true),
            id_signed: false,
            volatile: table.texts("volatile").unwrap_or_default(),
            unchecked: table.texts("unchecked").unwrap_or_default(),
            source: table.text("source"),
        };
        if !facts.retries && facts.retry_window.is_some() {
            table.error("retry_window", "contradicts retries = false: drop one of them");
        }
        for name in facts.unchecked.iter().filter(|name| !table.has(name)) {
            table.error("unchecked", format!("{name:?} is not stated in this table"));
        }
        facts
    }
}

/// Keys that make sense alone and not together.
fn check_relations(table: &Table, kind: &Kind, sig: &SigRule, ts: Option<&TsRule>, event: &EventRules) {
    if let Some(TsRule { from: TsFrom::Label(label), .. }) = ts {
        if label.is_empty() {
            table.error("ts", "from = \"sig:\" lacks the label after the colon");
        }
        if sig.labels.is_none() || sig.split.is_none() {
            table.error("ts", format!("from = \"sig:{label}\" needs sig.split, sig.assign and sig.label"));
        }
        if sig.labels.as_ref().is_some_and(|labels| labels.names.contains(label)) {
            table.error("ts", format!("from = \"sig:{label}\": the same label cannot be a signature's"));
        }
    }
    match kind {
        Kind::Token if ts.is_some() => {
            table.error("ts", "a token signs no timestamp, so checking one proves nothing: drop it");
        }
        Kind::Token => {}
        Kind::Hmac { sign, .. } => check_template(table, sign, ts, event),
    }
}

fn check_template(table: &Table, sign: &Template, ts: Option<&TsRule>, event: &EventRules) {
    if sign.has(|piece| matches!(piece, Piece::Timestamp)) {
        match ts {
            None => table.error("sign", "{ts} needs the table ts, which says where the timestamp stands"),
            Some(ts) if ts.optional => {
                table.error("ts", "optional = true cannot be, since {ts} in sign needs the timestamp");
            }
            Some(_) => {}
        }
    } else if let Some(TsRule { from: TsFrom::Label(_), .. }) = ts {
        table
            .error("sign", "lacks {ts}: a timestamp beside the signature proves nothing unless it is signed");
    }
    let headers_only = event.ids.iter().all(|rule| rule.header().is_some());
    if signs_id(sign) && (event.ids.is_empty() || !headers_only) {
        table
            .error("sign", "{id} needs id rules that are each one header, e.g. id = [\"header:webhook-id\"]");
    }
    if sign.places().any(|place| matches!(place, Place::BodySha256)) {
        table.error("sign", "\"body:sha256\" cannot be signed: use {body}");
    }
}

fn covers_ids(kind: &Kind, event: &EventRules) -> bool {
    let Kind::Hmac { sign, .. } = kind else { return false };
    let covered = |rule: &Rule| rule.places.iter().all(|place| covers(sign, place));
    signs_id(sign) || (!event.ids.is_empty() && event.ids.iter().all(covered))
}

fn once(kind: &Kind, sig: &SigRule, ts: Option<&TsRule>, event: &EventRules) -> Vec<HeaderName> {
    let mut once: Vec<HeaderName> = Vec::new();
    let signatures = sig.from.iter().filter(|_| !sig.repeat);
    let times = ts.map_or(&[] as &[Place], |ts| match &ts.from {
        TsFrom::Places(places) => places,
        TsFrom::Label(_) => &[],
    });
    once.extend(signatures.chain(times).filter_map(Place::header).cloned());
    if let Kind::Hmac { sign, .. } = kind {
        once.extend(sign.places().filter_map(Place::header).cloned());
        if signs_id(sign) {
            once.extend(event.ids.iter().filter_map(Rule::header).cloned());
        }
    }
    let mut unique = Vec::with_capacity(once.len());
    for name in once {
        if !unique.contains(&name) {
            unique.push(name);
        }
    }
    unique
}

#[cfg(test)]
mod tests {
    use crate::fixture::read_scheme;

    use super::*;

    const GOOD: &str = r#"
        kind = "hmac"
        sign = "{ts}.{body}"
        sig = { from = "header:X-Sig", split = ",", assign = "=", label = "v1" }
        ts = { from = "sig:t" }
        id = "json:/id"
    "#;

    /// The messages about a scheme, one to a line.
    fn messages(toml: &str) -> String {
        let (_, problems) = read_scheme(toml);
        problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn every_preset_loads_and_names_its_facts() {
        for name in Scheme::preset_names() {
            let (file, table) = File::parse(name, Scheme::preset_text(name).unwrap());
            let scheme = Scheme::read(name, table).unwrap();
            assert_eq!(file.take_problems(), []);
            assert!(scheme.facts.answer_deadline.is_some() && scheme.facts.source.is_some(), "{name}");
            assert!(Scheme::preset(name).is_some());
        }
        assert!(Scheme::preset("nobody").is_none());
        assert!(Scheme::preset_names().is_sorted());
    }

    #[test]
    fn facts_of_the_presets() {
        const DAY: Duration = Duration::from_secs(86_400);
        let facts = |name: &str| Scheme::preset(name).unwrap().facts.clone();
        let stripe = facts("stripe");
        assert_eq!((stripe.retry_window, stripe.resend_window), (Some(3 * DAY), Some(30 * DAY)));
        assert!(stripe.id_signed && stripe.retries && !stripe.volatile.is_empty());
        let github = facts("github");
        assert_eq!((github.retries, github.id_signed, github.retry_window), (false, false, None));
        assert_eq!(github.body_max, Some(25 << 20));
        let hours = |count: u64| count * 3600;
        let schedule = 5 + 300 + 1800 + hours(2) + hours(5) + hours(10) + hours(14) + hours(20) + hours(24);
        assert_eq!(facts("standard-webhooks").retry_window, Some(Duration::from_secs(schedule)));
    }

    #[test]
    fn what_a_signature_covers_is_worked_out() {
        for (name, id, time, url) in [
            ("stripe", true, true, false),
            ("github", false, false, false),
            ("standard-webhooks", true, true, false),
            ("slack", true, true, false),
            ("gitlab-token", false, false, false),
        ] {
            let text = Scheme::preset_text(name).unwrap().replace("id_signed", "# id_signed");
            let (scheme, problems) = read_scheme(&text);
            assert_eq!(problems, []);
            let scheme = scheme.unwrap();
            assert_eq!(
                (scheme.facts.id_signed, scheme.signs_time(), scheme.signs_url()),
                (id, time, url),
                "{name}"
            );
        }
    }

    #[test]
    fn tolerances_are_seconds_or_have_a_unit() {
        for (text, wanted) in [
            ("300", Tolerance::Within(Duration::from_secs(300))),
            ("\"5m\"", Tolerance::Within(Duration::from_secs(300))),
            ("0", Tolerance::Off),
            ("\"0s\"", Tolerance::Off),
        ] {
            let (scheme, problems) =
                read_scheme(&GOOD.replace("\"sig:t\"", &format!("\"sig:t\", tolerance = {text}")));
            assert_eq!(problems, []);
            assert_eq!(scheme.unwrap().tolerance(), wanted);
        }
    }

    #[test]
    fn mistakes_are_named_where_they_are() {
        assert_eq!(messages(GOOD), "");
        let replaced = [
            ("kind = \"hmac\"", "kind = \"ed25519\"", "\"hmac\", \"token\""),
            ("kind = \"hmac\"", "", "kind: is missing"),
            ("kind = \"hmac\"", "kind = \"hmac\"\nhash = \"md5\"", "\"sha256\", \"sha1\", \"sha512\""),
            ("kind = \"hmac\"", "kind = \"token\"", "signs nothing"),
            ("kind = \"hmac\"", "kind = \"hmac\"\ntolerence = 3", "unknown key"),
            ("label = \"v1\"", "lable = \"v1\"", "did you mean \"label\"?"),
            (", label = \"v1\"", "", "needs label"),
            ("assign = \"=\", ", "", "needs assign"),
            ("split = \",\", ", "", "needs sig.split"),
            ("label = \"v1\"", "label = []", "must not be empty"),
            ("label = \"v1\"", "label = \"t\"", "the same label"),
            ("split = \",\"", "split = \"\"", "is empty"),
            ("\"header:X-Sig\"", "[]", "name at least one place"),
            ("\"header:X-Sig\"", "\"header:X Sig\"", "no header name"),
            ("\"header:X-Sig\"", "\"X-Sig\"", "names no place"),
            ("\"header:X-Sig\"", "\"body:sha256\"", "cannot stand here"),
            ("\"sig:t\"", "\"sig:\"", "lacks the label"),
            ("\"sig:t\"", "\"sig:t\", unit = \"m\"", "unit: \"m\" is not known"),
            ("\"sig:t\"", "\"sig:t\", optional = true", "needs the timestamp"),
            ("\"sig:t\"", "\"sig:t\", tolerance = \"soon\"", "seconds"),
            ("\"sig:t\"", "\"sig:t\", unit = \"opaque\", tolerance = 5", "cannot be checked"),
            ("ts = { from = \"sig:t\" }", "", "{ts} needs the table ts"),
            ("{ts}.{body}", "{body}", "lacks {ts}"),
            ("{ts}.{body}", "{ts}.{bodi}", "{bodi} is not known"),
            ("{ts}.{body}", "{ts}.{body", "no closing brace"),
            ("{ts}.{body}", "ts}.{body}", "without an opening one"),
            ("{ts}.{body}", "v0", "signs nothing"),
            ("{ts}.{body}", "{ts}{lower:ts}", "{lower:ts} is not known"),
            ("{ts}.{body}", "{ts}{json:id}", "must start with"),
            ("{ts}.{body}", "{ts}.{id}", "{id} needs id rules"),
            ("sign = \"{ts}.{body}\"", "", "sign: is missing"),
            ("\"json:/id\"", "\"json:id\"", "must start with"),
            ("\"json:/id\"", "\"json:/~\"", "~0"),
            ("\"json:/id\"", "\"form:\"", "lacks a name"),
            ("\"json:/id\"", "\"formjson:payload\"", "lacks \"#\""),
            ("\"json:/id\"", "\"json:/a + xml:/b\"", "names no place"),
            ("id = \"json:/id\"", "", "id: is missing"),
            ("id = \"json:/id\"", "id = []\ndigest = \"header:x\"", "no part of a JSON body"),
            ("id = \"json:/id\"", "id = []\nretries = false\nretry_window = \"1d\"", "contradicts"),
            ("id = \"json:/id\"", "id = []\nunchecked = [\"body_max\"]", "not stated"),
            ("id = \"json:/id\"", "id = []\nkey = { raw_without_prefix = true }", "needs strip_prefix"),
            (
                "id = \"json:/id\"",
                "id = []\nkey = { encoding = \"base32\" }",
                "\"utf8\", \"base64\", \"hex\"",
            ),
        ];
        for (good, bad, wanted) in replaced {
            assert!(GOOD.contains(good), "{good}");
            let found = messages(&GOOD.replace(good, bad));
            assert!(found.contains(wanted), "{bad}\n{found}");
        }
        assert!(messages("").contains("sig: is missing"));
    }

    #[test]
    fn an_unknown_kind_hides_no_other_mistake_and_makes_none() {
        let found = messages(&GOOD.replace("hmac", "ed25519").replace("json:/id", "json:id"));
        assert_eq!(found.lines().count(), 2, "{found}");
    }
}
