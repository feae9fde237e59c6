//! Reading a scheme table: every mistake is found, with its line, and relations between keys are checked.
//!
//! Invariant: a scheme that was read without an error can be used on any request; nothing is found out later.

use http::HeaderName;

use crate::config::Tolerance;
use crate::json::{Pointer, Pointers, Slot};
use crate::settings::Table;

use super::handshake::Handshakes;
use super::key::KeyRule;
use super::place::{Place, Rule};
use super::signature::{Hash, SigRule, TsFrom, TsRule};
use super::template::{Piece, Template};
use super::{BatchRules, DigestRule, EventRules, Facts, Kind, Scheme, covers, signs_id, signs_time};

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
        let batch = table.table("batch").map(BatchRules::read);
        let event = EventRules::read(&mut table, batch.is_some());
        let handshakes = Handshakes::read(&mut table, kind.as_ref());
        let mut facts = Facts::read(&mut table);
        let id_signed = table.flag("id_signed");
        let sample = table.text("sample");
        let (Some(kind), Some(sig)) = (kind, sig) else {
            table.finish();
            return None;
        };
        check_relations(&table, &kind, &sig, ts.as_ref(), &event);
        facts.id_signed = id_signed.unwrap_or_else(|| covers_ids(&kind, &event, batch.is_some()));
        table.finish();
        let once = once(&kind, &sig, ts.as_ref(), &event);
        let name = name.to_owned();
        Some(Self { name, facts, kind, key, sig, ts, signed, once, event, batch, handshakes, sample })
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

impl BatchRules {
    fn read(mut table: Table) -> Self {
        let mut pointers = Pointers::default();
        let text = table.text("items").unwrap_or_default();
        if !table.has("items") {
            table.error(
                "items",
                "is missing: a JSON pointer to the list of events, \"\" if the body is that list",
            );
        }
        let items = Pointer::parse(&text).and_then(|pointer| pointers.add(&pointer));
        let items = items.unwrap_or_else(|message| {
            table.error("items", message);
            Slot::default()
        });
        let item = EventRules::of_item(&mut table);
        table.finish();
        Self { pointers, items, text, item }
    }
}

impl EventRules {
    /// The rules of a request that is one event; of one that is a batch, its items have them.
    fn read(table: &mut Table, batch: bool) -> Self {
        let mut pointers = Pointers::default();
        if batch {
            for key in ["id", "type", "event_time", "digest", "volatile"] {
                if table.has(key) {
                    table.error(key, "belongs into the table batch: it is about the items");
                }
                table.texts(key);
            }
            return Self::default();
        }
        if !table.has("id") {
            table.error("id", "is missing: name where an event's id stands, or [] if requests have none");
        }
        let ids = rules(table, "id", &mut pointers);
        let types = rules(table, "type", &mut pointers);
        let times = rules(table, "event_time", &mut pointers);
        let (digest, key) = if table.has("digest") {
            (DigestRule::Parts(digest_parts(table, &mut pointers)), "digest")
        } else {
            (DigestRule::Without(volatile_parts(table, &mut pointers)), "volatile")
        };
        let digest_text = as_written(table, key);
        Self { pointers, ids, types, times, digest, digest_text }
    }

    /// The rules of a batch's item: bare pointers are into the item, and nothing else of the request names it.
    fn of_item(table: &mut Table) -> Self {
        let mut pointers = Pointers::default();
        if table.texts("id").is_none_or(|rules| rules.is_empty()) {
            table.error("id", "is missing: name where an item's id stands, e.g. [\"/id\"]");
        }
        let ids = item_rules(table, "id", &mut pointers);
        let types = item_rules(table, "type", &mut pointers);
        let times = item_rules(table, "event_time", &mut pointers);
        let digest = DigestRule::Without(volatile_parts(table, &mut pointers));
        let digest_text = as_written(table, "volatile");
        Self { pointers, ids, types, times, digest, digest_text }
    }
}

fn as_written(table: &mut Table, key: &'static str) -> String {
    format!("{key} = {:?}", table.texts(key).unwrap_or_default())
}

fn item_rules(table: &mut Table, key: &'static str, pointers: &mut Pointers) -> Vec<Rule> {
    let mut rules = Vec::new();
    for text in table.texts(key).unwrap_or_default() {
        let full = |part: &str| if part.starts_with('/') { format!("json:{part}") } else { part.to_owned() };
        let whole = text.split(" + ").map(full).collect::<Vec<_>>().join(" + ");
        match Rule::parse(&whole, pointers) {
            Ok(rule) if rule.places.iter().all(Place::in_item) => rules.push(rule),
            Ok(_) => {
                table.error(key, format!("{text:?} is not in an item: give \"/POINTER\" or \"body:sha256\""));
            }
            Err(message) => table.error(key, message),
        }
    }
    rules
}

fn digest_parts(table: &mut Table, pointers: &mut Pointers) -> Vec<Slot> {
    let mut slots = Vec::new();
    for text in table.texts("digest").unwrap_or_default() {
        match Place::parse(&text, pointers) {
            Ok(Place::Json { slot, .. }) => slots.push(slot),
            Ok(_) => {
                table.error("digest", format!("{text:?} is no part of a JSON body: give \"json:/POINTER\""));
            }
            Err(message) => table.error("digest", message),
        }
    }
    slots
}

fn volatile_parts(table: &mut Table, pointers: &mut Pointers) -> Vec<Slot> {
    let mut slots = Vec::new();
    for text in table.texts("volatile").unwrap_or_default() {
        match Pointer::parse(&text).and_then(|pointer| pointers.add(&pointer)) {
            Ok(slot) => slots.push(slot),
            Err(message) => table.error("volatile", message),
        }
    }
    slots
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
    if ts.is_some_and(|ts| ts.tolerance != Tolerance::Off && !signs_time(sign, ts)) {
        table.warning("ts", "the timestamp is not part of what is signed, so its check proves nothing");
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

fn covers_ids(kind: &Kind, event: &EventRules, batch: bool) -> bool {
    let Kind::Hmac { sign, .. } = kind else { return false };
    if batch {
        return sign.has(|piece| matches!(piece, Piece::Body));
    }
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
    use std::time::Duration;

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
            ("id = \"json:/id\"", "id = []\nvolatile = [\"attempt\"]", "must start with"),
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

    #[test]
    fn a_checked_timestamp_that_nobody_signs_is_warned_about() {
        for (ts, sign, warned) in [
            ("header:x-ts", "{body}", true),
            ("header:x-ts", "{body}{ts}", false),
            ("header:x-ts", "{body}{header:X-Ts}", false),
            ("json:/ts", "{body}", false),
            ("json:/ts", "{json:/ts}{json:/id}", false),
            ("json:/ts", "{json:/t}", true),
        ] {
            let toml = format!(
                "kind = \"hmac\"\nsign = \"{sign}\"\nsig = {{ from = \"header:x-sig\" }}\nid = []\n\
                 ts = {{ from = \"{ts}\", tolerance = 5 }}"
            );
            assert_eq!(messages(&toml).contains("proves nothing"), warned, "{ts} {sign}");
        }
    }
}
