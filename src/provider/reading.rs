//! Reading a scheme table: every mistake is found, with its line, and relations between keys are checked.
//!
//! Invariant: a scheme that was read without an error can be used on any request; nothing is found out later.

use http::HeaderName;

use crate::config::Tolerance;
use crate::guard::Guard;
use crate::json::{Pointer, Pointers, Slot};
use crate::settings::Table;

use super::ack::Ack;
use super::cert::{HashBy, Pointing, has_secret, places};
use super::facts::Covered;
use super::handshake::Handshakes;
use super::jwt::{JwtRule, KeySet};
use super::key::KeyRule;
use super::pin::Pinned;
use super::place::{Place, Rule};
use super::signature::{Algorithm, Hash, SaidHash, SigRule, TsFrom, TsRule};
use super::sound::Together;
use super::template::{Piece, Template};
use super::{BatchRules, DigestRule, EventRules, Every, Facts, Kind, Scheme, signs_id, signs_time};

/// Most forms of what is signed: each costs a computation.
const FORMS_MAX: usize = 8;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum KindName {
    Hmac,
    Hash,
    Ed25519,
    EcdsaP256,
    RsaPkcs1,
    Token,
    Basic,
    Jwt,
}

impl KindName {
    pub(super) const CHOICES: &[(&str, Self)] = &[
        ("hmac", Self::Hmac),
        ("hash", Self::Hash),
        ("token", Self::Token),
        ("basic", Self::Basic),
        ("ed25519", Self::Ed25519),
        ("ecdsa-p256", Self::EcdsaP256),
        ("rsa-pkcs1", Self::RsaPkcs1),
        ("jwt", Self::Jwt),
    ];

    fn algorithm(self, hash: Hash) -> Option<Algorithm> {
        match self {
            Self::Hmac => Some(Algorithm::Hmac(hash)),
            Self::Hash => Some(Algorithm::Hash(hash)),
            Self::Ed25519 => Some(Algorithm::Ed25519),
            Self::EcdsaP256 => Some(Algorithm::EcdsaP256(hash)),
            Self::RsaPkcs1 => Some(Algorithm::RsaPkcs1(hash)),
            Self::Token | Self::Basic | Self::Jwt => None,
        }
    }
}

/// Reading a scheme table.
impl Scheme {
    /// Reads a scheme table; mistakes are reported to the table's file. What is returned counts only if none was
    /// an error.
    pub fn read(name: &str, mut table: Table) -> Option<Self> {
        let mut signed = Pointers::default();
        let hash_by = if table.holds_table("hash") { HashBy::read(&mut table, &mut signed) } else { None };
        let kind = read_kind(&mut table, hash_by.as_ref(), &mut signed);
        let key = table.table("key").map(KeyRule::read).unwrap_or_default();
        let sig = read_sig(&mut table, kind.as_ref(), &mut signed);
        let ts = table.table("ts").and_then(|ts| TsRule::read(ts, &mut signed));
        let body_hash = table.table("body_hash").and_then(|rule| SaidHash::read(rule, &mut signed));
        let url_hash = table.table("url_hash").and_then(|rule| SaidHash::read(rule, &mut signed));
        let key_id = read_key_id(&mut table, &mut signed);
        let require = places(&mut table, "require", &mut signed);
        let pointing = Pointing::read(&mut table, hash_by, &mut signed);
        let every = Every::read(&mut table);
        let batch = table.table("batch").map(BatchRules::read);
        let event = EventRules::read(&mut table, batch.is_some());
        let handshakes = Handshakes::read(&mut table, kind.as_ref());
        let guard = table.choice("guard", &[("report", Guard::Report), ("refuse", Guard::Refuse)]);
        let ack = Ack::read(&mut table, &Ack::default()).unwrap_or_default();
        let mut facts = Facts::read(&mut table);
        let sample = table.text("sample");
        let (Some(kind), Some(sig)) = (kind, sig) else {
            return give_up(table);
        };
        check_relations(&table, &kind, &sig, ts.as_ref(), &event);
        let hashes = [body_hash.as_ref(), url_hash.as_ref()];
        let others =
            require.iter().map(|(place, _)| place).chain(hashes.into_iter().flatten().map(|hash| &hash.from));
        let others: Vec<&Place> = others.chain(&key_id).collect();
        check_tokens(&table, &kind, ts.as_ref(), &others, &event);
        check_key_set(&table, &kind, &require);
        let covered = Covered {
            kind: &kind,
            sig: &sig,
            body_hash: body_hash.as_ref(),
            ts: ts.as_ref(),
            every: every.as_ref(),
            event: &event,
            item: batch.as_ref().map(|batch| &batch.item),
        };
        facts.settle(&mut table, &covered);
        Together { kind: &kind, sig: &sig, ts: ts.as_ref(), hashes, others: &others }.check(&table);
        check_guard(&table, &covered, &facts);
        pointing.check(&table, &kind);
        table.finish();
        let mut once = once(&kind, &sig, ts.as_ref(), &others, &event);
        add_once(&mut once, pointing.headers());
        let name = name.to_owned();
        Some(Self {
            name,
            facts,
            kind,
            key,
            sig,
            ts,
            body_hash,
            url_hash,
            key_id,
            require,
            pointing,
            every,
            signed,
            once,
            event,
            batch,
            handshakes,
            ack,
            guard: guard.unwrap_or_default(),
            sample,
        })
    }
}

/// Asks for the other keys, so that none of them is called unknown because of a mistake elsewhere.
fn give_up(mut table: Table) -> Option<Scheme> {
    table.flag("id_signed");
    table.text("binds");
    table.finish();
    None
}

/// Signed bytes can be watched where they are those of a whole request, whose events can be told apart.
fn check_guard(table: &Table, covered: &Covered<'_>, facts: &Facts) {
    let told_apart = covered.item.is_some() || !covered.event.ids.is_empty();
    let settable = matches!(covered.kind, Kind::Signed { .. }) && covered.every.is_none() && told_apart;
    if table.has("guard") && (!settable || facts.id_signed) {
        table.error("guard", "is for signed requests whose events have ids that are not signed: drop it");
    }
}

fn read_kind(table: &mut Table, hash_by: Option<&HashBy>, signed: &mut Pointers) -> Option<Kind> {
    let name = table.choice("kind", KindName::CHOICES);
    if !table.has("kind") {
        let names: Vec<_> = KindName::CHOICES.iter().map(|(name, _)| format!("{name:?}")).collect();
        table.error("kind", format!("is missing: give {}", names.join(", ")));
    }
    match name {
        Some(KindName::Token) => Some(read_unsigned(table, "token", Kind::Token)),
        Some(KindName::Jwt) => {
            let sign = read_templates(table, signed);
            JwtRule::read(table, sign?).map(|rule| Kind::Jwt(Box::new(rule)))
        }
        Some(KindName::Basic) => Some(read_unsigned(table, "basic", Kind::Basic)),
        Some(name) => read_signed(table, name, hash_by, signed),
        None => skip_kind(table),
    }
}

fn read_signed(
    table: &mut Table,
    name: KindName,
    hash_by: Option<&HashBy>,
    signed: &mut Pointers,
) -> Option<Kind> {
    let hash = read_hash(table, hash_by);
    if name == KindName::Ed25519 && table.has("hash") {
        table.error("hash", "means nothing with kind = \"ed25519\": drop it");
    }
    let algorithm = name.algorithm(hash?)?;
    if !algorithm.is_known() {
        table.error("hash", "is not available with this kind: use \"sha256\"");
    }
    let sign = read_templates(table, signed);
    if !table.has("sign") || sign.as_ref().is_some_and(Vec::is_empty) {
        table.error("sign", "is missing: the template of the signed bytes, e.g. \"{ts}.{body}\"");
        return None;
    }
    let kind = Kind::Signed { algorithm, sign: sign? };
    check_secret(table, &kind, algorithm);
    Some(kind)
}

/// What is signed, in the forms that there are of it; none if the scheme does not say.
fn read_templates(table: &mut Table, signed: &mut Pointers) -> Option<Vec<Template>> {
    let texts = table.texts("sign").unwrap_or_default();
    if texts.len() > FORMS_MAX {
        table.error("sign", format!("{} forms, and {FORMS_MAX} are the limit", texts.len()));
    }
    let mut sign = Vec::with_capacity(texts.len());
    for text in &texts {
        match Template::parse(text, signed) {
            Ok(template) => sign.push(template),
            Err(message) => table.error("sign", message),
        }
    }
    (sign.len() == texts.len()).then_some(sign)
}

/// `key_id = "headerjson:X-Signature#/kid"`
fn read_key_id(table: &mut Table, signed: &mut Pointers) -> Option<Place> {
    match table.text("key_id").map(|text| Place::parse(&text, signed))? {
        Ok(place) => Some(place),
        Err(message) => {
            table.error("key_id", message);
            None
        }
    }
}

/// The hash; where the request names it, any of them stands for its kind.
fn read_hash(table: &mut Table, hash_by: Option<&HashBy>) -> Option<Hash> {
    match hash_by {
        None if table.failed("hash") => None,
        // Asked for in any case: a key that nobody asks for is not known, and a mistyped one not told its right name.
        None => {
            let named = table.choice("hash", Hash::CHOICES);
            if table.has("hash") { named } else { Some(Hash::Sha256) }
        }
        Some(_) => Some(Hash::Sha256),
    }
}

/// A plain hash proves nothing unless the secret is in it, and no other signature needs the secret there.
fn check_secret(table: &Table, kind: &Kind, algorithm: Algorithm) {
    let hash = matches!(algorithm, Algorithm::Hash(_));
    if hash && !kind.templates().iter().all(has_secret) {
        table.error("sign", "lacks {secret}: without it anybody could make such a hash");
    }
    if !hash && !table.has("cert") && kind.templates().iter().any(has_secret) {
        let why = "{secret} is for kind = \"hash\", or beside cert: other kinds use the secret as the key";
        table.error("sign", why);
    }
}

/// Asks for the keys of every kind, so that beside a wrong kind they are not called unknown as well.
fn skip_kind(table: &mut Table) -> Option<Kind> {
    table.text("hash");
    table.texts("sign");
    table.table("jwt");
    None
}

fn read_unsigned(table: &mut Table, name: &str, kind: Kind) -> Kind {
    for key in ["hash", "sign", "body_hash", "url_hash", "key_id"] {
        if table.has(key) {
            let message = format!("means nothing with kind = {name:?}, which signs nothing: drop it");
            table.error(key, message);
        }
        table.texts(key);
    }
    kind
}

/// Basic authentication has its place.
fn read_sig(table: &mut Table, kind: Option<&Kind>, signed: &mut Pointers) -> Option<SigRule> {
    if let Some(Kind::Jwt(rule)) = kind {
        return SigRule::of_token(rule, signed);
    }
    if kind.is_none() && table.has("jwt") {
        // What is wrong with it was said.
        return None;
    }
    if matches!(kind, Some(Kind::Basic)) && !table.has("sig") {
        return Some(SigRule::of_header(http::header::AUTHORIZATION));
    }
    if !table.has("sig") {
        table.error(
            "sig",
            "is missing: say where the signature stands, e.g. { from = \"header:X-Signature\" }",
        );
    }
    table.table("sig").and_then(|sig| SigRule::read(sig, signed))
}

impl Every {
    /// Reads `every`: the pointer to a list.
    fn read(table: &mut Table) -> Option<Self> {
        let text = table.text("every")?;
        let mut pointers = Pointers::default();
        match Pointer::parse(&text).and_then(|pointer| pointers.add(&pointer)) {
            Ok(items) => Some(Self { pointers, items }),
            Err(message) => {
                table.error("every", message);
                None
            }
        }
    }
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
        let parts = digest_parts(table, &mut pointers);
        let (digest, key) = if table.has("digest") {
            (DigestRule::Parts(parts), "digest")
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
    if kind.sends_secret() && ts.is_some() {
        table.error("ts", "a token signs no timestamp, so checking one proves nothing: drop it");
    }
    check_templates(table, kind.templates(), ts, event);
}

/// Places in a token are for schemes that have one, and no other kind has the table.
fn check_tokens(table: &Table, kind: &Kind, ts: Option<&TsRule>, others: &[&Place], event: &EventRules) {
    if matches!(kind, Kind::Jwt(_)) {
        if kind.templates().iter().any(|sign| sign.has(|piece| matches!(piece, Piece::Secret))) {
            table.error("sign", "{secret} is for kind = \"hash\": other kinds use the secret as the key");
        }
        return;
    }
    let times = ts.map_or(&[] as &[Place], TsRule::places);
    let rules = [&event.ids, &event.types, &event.times].into_iter().flatten().flat_map(|rule| &rule.places);
    let signed = kind.templates().iter().flat_map(Template::places);
    if others.iter().copied().chain(times).chain(rules).chain(signed).any(Place::in_token) {
        table.error("kind", "claim: and jose: are places in a token: they need kind = \"jwt\"");
    }
}

/// Whose keys a token says they are, and where they are fetched, has to be the same.
fn check_key_set(table: &Table, kind: &Kind, require: &[(Place, String)]) {
    let Kind::Jwt(rule) = kind else { return };
    if rule.jwks.is_some() && table.has("every") {
        table.error("jwks", "cannot be beside every: keys are fetched for one token in a request");
    }
    let Some(url) = rule.jwks.as_ref().and_then(KeySet::url) else { return };
    let said = require.iter().filter(|(place, _)| place.to_string() == "jose:/jku");
    for (place, text) in said.filter(|(_, text)| Pinned::exact(text).as_ref() != Ok(url)) {
        table.error("jwks", format!("is {url}, and {place} has to be {text}: give the same URL"));
    }
}

fn check_templates(table: &Table, sign: &[Template], ts: Option<&TsRule>, event: &EventRules) {
    if sign.is_empty() {
        return;
    }
    let with_time = sign.iter().any(|sign| sign.has(|piece| matches!(piece, Piece::Timestamp)));
    match ts {
        None if with_time => {
            table.error("sign", "{ts} needs the table ts, which says where the timestamp stands");
        }
        Some(ts) if with_time && ts.optional => {
            table.error("ts", "optional = true cannot be, since {ts} in sign needs the timestamp");
        }
        Some(TsRule { from: TsFrom::Label(_), .. }) if !with_time => {
            table.error(
                "sign",
                "lacks {ts}: a timestamp beside the signature proves nothing unless it is signed",
            );
        }
        _ => {}
    }
    if ts.is_some_and(|ts| ts.tolerance != Tolerance::Off && !signs_time(sign, ts)) {
        table.warning("ts", "the timestamp is not part of what is signed, so its check proves nothing");
    }
    let headers_only = event.ids.iter().all(|rule| rule.header().is_some());
    if signs_id(sign) && (event.ids.is_empty() || !headers_only) {
        table
            .error("sign", "{id} needs id rules that are each one header, e.g. id = [\"header:webhook-id\"]");
    }
    let hashed = |sign: &Template| sign.places().any(|place| matches!(place, Place::BodySha256));
    if sign.iter().any(hashed) {
        table.error("sign", "\"body:sha256\" cannot be signed: use {body}");
    }
}

fn once(
    kind: &Kind,
    sig: &SigRule,
    ts: Option<&TsRule>,
    others: &[&Place],
    event: &EventRules,
) -> Vec<HeaderName> {
    let signatures = sig.from.iter().filter(|_| !sig.repeat);
    let times = ts.map_or(&[] as &[Place], TsRule::places);
    let places = signatures.chain(times).chain(others.iter().copied()).filter_map(Place::header_around);
    let signed = kind.templates().iter().flat_map(Template::headers);
    let ids = event.ids.iter().filter(|_| signs_id(kind.templates())).filter_map(Rule::header);
    let mut unique: Vec<HeaderName> = Vec::new();
    add_once(&mut unique, places.chain(signed).chain(ids));
    unique
}

fn add_once<'a>(unique: &mut Vec<HeaderName>, names: impl Iterator<Item = &'a HeaderName>) {
    for name in names {
        if !unique.contains(name) {
            unique.push(name.clone());
        }
    }
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
            ("\"json:/id\"", "\"json:/id\"\nguard = \"refuse\"", "ids that are not signed"),
            ("\"json:/id\"", "\"header:x-id\"\nguard = \"off\"", "\"report\", \"refuse\""),
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
        assert_named(&replaced);
        assert!(messages("").contains("sig: is missing"));
    }

    /// In the good scheme, the first replaced by the second gives the message.
    fn assert_named(rows: &[(&str, &str, &str)]) {
        for (good, bad, wanted) in rows {
            assert!(GOOD.contains(good), "{good}");
            let found = messages(&GOOD.replace(good, bad));
            assert!(found.contains(wanted), "{bad}\n{found}");
        }
    }

    #[test]
    fn mistakes_in_what_is_signed_are_named_where_they_are() {
        assert_named(&[
            ("kind = \"hmac\"", "kind = \"hmac\"\nhsah = \"sha1\"", "did you mean \"hash\"?"),
            ("kind = \"hmac\"", "kind = \"hmac\"\ndigst = [\"json:/a\"]", "did you mean \"digest\"?"),
            ("kind = \"hmac\"", "kind = \"ed448\"", "\"hmac\", \"hash\", \"token\""),
            ("kind = \"hmac\"", "kind = \"ed25519\"\nhash = \"sha256\"", "means nothing"),
            ("kind = \"hmac\"", "kind = \"ecdsa-p256\"\nhash = \"sha512\"", "not available"),
            ("kind = \"hmac\"", "kind = \"hash\"", "lacks {secret}"),
            ("kind = \"hmac\"", "kind = \"basic\"", "signs nothing"),
            ("{ts}.{body}", "{ts}.{body}{secret}", "{secret} is for"),
            ("{ts}.{body}", "[{ts}.{body}", "no closing bracket"),
            ("{ts}.{body}", "{ts}.{body}]", "without an opening one"),
            ("{ts}.{body}", "{ts}[.{body}]", "would never be left out"),
            ("{ts}.{body}", "{ts}[.[{json:/a}]]", "cannot be nested"),
            ("{ts}.{body}", "{ts}{listed:json:/a}", "must be a header"),
            ("\"{ts}.{body}\"", "[\"{ts}.{body}\", \"{bodi}\"]", "{bodi} is not known"),
            ("\"{ts}.{body}\"", "[\"{ts}.{body}\", \"{body}\"]\nid_signed = 3", "id_signed"),
            ("\"{ts}.{body}\"", "\"{ts}.{body}\"\nevery = \"items\"", "must start with"),
            ("\"{ts}.{body}\"", "\"{ts}.{body}\"\nbody_hash = { from = [] }", "name the one place"),
            ("\"{ts}.{body}\"", "\"{ts}.{body}\"\nrequire = { \"x\" = \"1\" }", "names no place"),
            ("\"{ts}.{body}\"", "\"{ts}.{body}\"\nkey = { normalize = \"nfc\" }", "\"nfkd\""),
        ]);
    }

    #[test]
    fn an_unknown_kind_hides_no_other_mistake_and_makes_none() {
        let found = messages(&GOOD.replace("hmac", "hmca").replace("json:/id", "json:id"));
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
