//! `[source.NAME]` and `[scheme.NAME]`.
//!
//! Invariant: a source without a key that can verify something is refused; a missing signature never means that
//! there is nothing to check.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use http::HeaderName;

use super::effect::{Failing, RUST, effect, effect_batch, effect_group, effect_parallel, is_pulled, lock};
use super::keys::{key_set, local_keys, senders};
use super::read::{BODY, TIMEOUT, public_url};
use super::relations::ANSWER_MARGIN;
use super::route::{Known, routes};
use super::secret::{Secrets, origin};
use super::{Ack, Effect, Guard, LockRule, OnMismatch, Route, Server, Source, Tolerance};
use crate::provider::pin::Pinned;
use crate::provider::{Facts, Key, PublicKey, Scheme};
use crate::settings::{Table, nearest};

/// Most secrets of one source: each may cost a computation per request, also for senders that know none of them.
const SECRETS_MAX: usize = 16;

/// Most headers that are kept with an event.
const HEADERS_MAX: usize = 64;

/// Longest scope, in bytes.
const SCOPE_MAX: usize = 255;

/// Headers that carry secrets at any provider.
const SECRET_HEADERS: [&str; 6] = [
    "authorization",
    "cookie",
    "proxy-authorization",
    "set-cookie",
    "x-gitlab-token",
    "x-telegram-bot-api-secret-token",
];

/// Parts of header names that make a secret likely.
const SECRET_WORDS: [&str; 6] = ["token", "secret", "password", "api-key", "apikey", "session"];

/// What settings must know of a scheme.
#[derive(Debug, Clone, Default)]
pub(super) struct Traits {
    pub(super) name: String,
    pub(super) facts: Facts,
    /// Headers that the scheme reads: signature, token, timestamp, id.
    pub(super) headers: Vec<String>,
    /// Those of them that hold a signature or token.
    pub(super) secret_headers: Vec<String>,
    /// How far a timestamp may be from the clock, if the scheme checks it.
    pub(super) tolerance: Option<Duration>,
    /// What the preset does with signed bytes that come again under another id.
    pub(super) guard: Guard,
    pub(super) quirks: Vec<Quirk>,
}

/// What sets a scheme apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Quirk {
    /// The signature covers the URL, so that the public one must be known.
    SignsUrl,
    /// Requests have no id, so that none is ever a duplicate.
    NeverDedupes,
    /// There is no timestamp to hold against the clock.
    Timeless,
    /// An answer to a handshake depends on the public URL.
    AnswersUrl,
    /// Signed bytes can be watched.
    Guardable,
    /// The key is fetched from where the request says.
    PointsToKeys,
}

impl Traits {
    pub(super) fn has(&self, quirk: Quirk) -> bool {
        self.quirks.contains(&quirk)
    }
}

/// Where the schemes that come with the program are found.
pub(super) struct Providers<'a> {
    pub(super) preset: &'a dyn Fn(&str) -> Option<Arc<Scheme>>,
    pub(super) names: &'a [&'static str],
    pub(super) traits: &'a dyn Fn(&Scheme) -> Traits,
}

impl Providers<'static> {
    pub(super) fn embedded() -> Self {
        Self { preset: &Scheme::preset, names: Scheme::preset_names(), traits: &traits }
    }
}

/// The one place that asks a scheme for what settings must know of it.
fn traits(scheme: &Scheme) -> Traits {
    let names =
        |headers: Vec<&HeaderName>| headers.into_iter().map(|name| name.as_str().to_owned()).collect();
    let quirks = [
        (Quirk::SignsUrl, scheme.signs_url()),
        (Quirk::NeverDedupes, scheme.never_dedupes()),
        (Quirk::Timeless, !scheme.has_time()),
        (Quirk::AnswersUrl, scheme.handshakes.need_url()),
        (Quirk::Guardable, scheme.can_guard()),
        (Quirk::PointsToKeys, scheme.has_certificates()),
    ];
    Traits {
        name: scheme.name.clone(),
        facts: scheme.facts.clone(),
        headers: names(scheme.headers()),
        secret_headers: names(scheme.signature_headers()),
        guard: scheme.guard,
        tolerance: match scheme.tolerance() {
            Tolerance::Within(within) => Some(within),
            Tolerance::Off => None,
        },
        quirks: quirks.into_iter().filter_map(|(quirk, holds)| holds.then_some(quirk)).collect(),
    }
}

/// A source that was read, with what is compared later.
pub(super) struct Reading {
    pub(super) table: Table,
    pub(super) draft: Draft,
    scheme: Option<Arc<Scheme>>,
    pub(super) traits: Option<Traits>,
    ack: Option<Ack>,
}

/// The parts of a source that need no scheme.
pub(super) struct Draft {
    pub(super) name: Arc<str>,
    keys: Vec<Key>,
    pub(super) certificates: Vec<PublicKey>,
    jwks: Option<Pinned>,
    senders: Option<Vec<String>>,
    handshake_secrets: BTreeMap<String, Key>,
    claims: BTreeMap<String, String>,
    pub(super) public_url: Option<String>,
    scope: Arc<str>,
    pub(super) effect: Option<String>,
    pub(super) effect_parallel: bool,
    pub(super) effect_group: String,
    effect_batch: bool,
    lock: Option<LockRule>,
    pulled: bool,
    pub(super) failing: Failing,
    pub(super) routes: Vec<Route>,
    pub(super) on_mismatch: OnMismatch,
    pub(super) guard: Guard,
    batch_items_max: usize,
    pub(super) tolerance: Option<Tolerance>,
    id_max: usize,
    pub(super) body_max: usize,
    pub(super) deadline: Duration,
    headers: Vec<HeaderName>,
}

impl Draft {
    /// Whether keys of its requests are fetched.
    pub(super) fn fetches(&self, traits: &Traits) -> bool {
        let certificates = traits.has(Quirk::PointsToKeys) && self.certificates.is_empty();
        certificates || (self.jwks.is_some() && self.keys.is_empty())
    }

    /// What the keys about the effect come to.
    pub(super) fn effect(&self) -> Effect {
        let Some(name) = &self.effect else {
            return if self.pulled { Effect::Pull } else { Effect::None };
        };
        let group = (!self.effect_parallel && self.lock.is_none()).then(|| self.effect_group.clone());
        match name.strip_prefix(RUST) {
            Some(name) => Effect::Rust { name: name.to_owned(), group },
            None => Effect::Function { name: name.clone(), group, batched: self.effect_batch },
        }
    }
}

impl Reading {
    /// Reports the keys that nobody asked for. `None` only after an error was reported.
    pub(super) fn finish(self) -> Option<Source> {
        self.table.finish();
        let draft = self.draft;
        let effect = draft.effect();
        Some(Source {
            name: draft.name,
            scheme: self.scheme?,
            jwks: draft.jwks.filter(|_| draft.keys.is_empty()),
            keys: draft.keys,
            certificates: draft.certificates,
            senders: draft.senders,
            handshake_secrets: draft.handshake_secrets,
            claims: draft.claims,
            public_url: draft.public_url,
            scope: draft.scope,
            effect,
            on_error: draft.failing.on_error,
            attempts_max: draft.failing.attempts_max,
            retry: draft.failing.retry,
            targets: draft.routes,
            lock: draft.lock,
            on_mismatch: draft.on_mismatch,
            guard: draft.guard,
            batch_items_max: draft.batch_items_max,
            tolerance: draft.tolerance,
            id_max: draft.id_max,
            body_max: draft.body_max,
            deadline: draft.deadline,
            headers: draft.headers,
            ack: self.ack?,
        })
    }
}

/// Reads all schemes and sources of the file.
pub(super) fn read_all(
    root: &mut Table,
    secrets: &Secrets<'_>,
    defaults: Defaults<'_>,
    providers: &Providers<'_>,
    targets: &Known,
) -> Vec<Reading> {
    let schemes = Schemes { own: own_schemes(root), providers };
    let read = |(name, table): (String, Table)| read(&name, table, secrets, defaults, &schemes, targets);
    root.tables("source").into_iter().map(read).collect()
}

/// Beyond the margin that is asked of a written deadline.
const DERIVED_MARGIN: Duration = Duration::from_millis(100);

/// What a source takes from `[server]` if it has no own.
#[derive(Clone, Copy)]
pub(super) struct Defaults<'a> {
    pub(super) server: &'a Server,
    /// Whether the deadline was written; one that was not gives way to the provider's.
    pub(super) deadline_written: bool,
}

impl Defaults<'_> {
    /// As long as the server's, and short enough for a provider that waits less.
    fn deadline(self, traits: Option<&Traits>) -> Duration {
        let deadline = self.server.deadline;
        let patience = traits.and_then(|traits| traits.facts.answer_deadline);
        match patience.and_then(|patience| patience.checked_sub(ANSWER_MARGIN + DERIVED_MARGIN)) {
            Some(derived) if !self.deadline_written && !derived.is_zero() => deadline.min(derived),
            _ => deadline,
        }
    }
}

/// Schemes by name; one of the file comes before a preset. `None`: it was read, with errors.
struct Schemes<'a> {
    own: BTreeMap<String, Option<Arc<Scheme>>>,
    providers: &'a Providers<'a>,
}

pub(super) fn own_schemes(root: &mut Table) -> BTreeMap<String, Option<Arc<Scheme>>> {
    let read = |(name, table): (String, Table)| {
        check_name(&table, &name, "scheme");
        let scheme = Scheme::read(&name, table).map(Arc::new);
        (name, scheme)
    };
    root.tables("scheme").into_iter().map(read).collect()
}

/// Names stand in paths, metrics and the ledger.
pub(super) fn check_name(table: &Table, name: &str, what: &str) {
    let fits = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_' || byte == b'-';
    let starts = name.starts_with(|char: char| char.is_ascii_lowercase() || char.is_ascii_digit());
    if !starts || name.len() > 63 || !name.bytes().all(fits) {
        let wanted = "give 1 to 63 of a-z, 0-9, _ and -, starting with a letter or digit";
        table.error("", format!("{name:?} cannot be the name of a {what}: {wanted}"));
    }
}

fn read(
    name: &str,
    mut table: Table,
    secrets: &Secrets<'_>,
    defaults: Defaults<'_>,
    schemes: &Schemes<'_>,
    targets: &Known,
) -> Reading {
    let server = defaults.server;
    check_name(&table, name, "source");
    let scheme = provider(&mut table, schemes);
    let traits = scheme.as_deref().map(schemes.providers.traits);
    let effect = effect(&mut table);
    let retries = traits.as_ref().is_none_or(|traits| traits.facts.retries);
    let jwks = key_set(&mut table, scheme.as_deref());
    let published = jwks.is_some() || table.failed("jwks");
    let preset_body_max = traits.as_ref().and_then(|traits| traits.facts.body_max);
    let draft = Draft {
        name: name.into(),
        keys: keys(&mut table, secrets, scheme.as_deref(), published),
        certificates: local_keys(&mut table, secrets, scheme.as_deref()),
        jwks,
        senders: senders(&mut table, scheme.as_deref()),
        handshake_secrets: handshake_secrets(&mut table, secrets, scheme.as_deref()),
        claims: claims(&mut table, scheme.as_deref()),
        public_url: public_url(&mut table).or_else(|| server.public_url.clone()),
        scope: scope(&mut table),
        effect_parallel: effect_parallel(&mut table, effect.as_deref()),
        effect_group: effect_group(&mut table, effect.as_deref()),
        effect_batch: effect_batch(&mut table, effect.as_deref()),
        lock: lock(&mut table, effect.as_deref()),
        pulled: is_pulled(&mut table),
        failing: Failing::read(&mut table, effect.as_deref(), retries),
        routes: routes(&mut table, targets),
        effect,
        on_mismatch: on_mismatch(&mut table),
        guard: guard(&mut table, traits.as_ref()),
        batch_items_max: super::read::count(&mut table, "batch_items_max", 1..=100_000, 1_000),
        tolerance: tolerance(&mut table),
        id_max: super::read::count(&mut table, "id_max", 1..=2_048, 512),
        body_max: table.size_within("body_max", BODY).or(preset_body_max).unwrap_or(server.body_max),
        deadline: table
            .duration_within("deadline", TIMEOUT)
            .unwrap_or_else(|| defaults.deadline(traits.as_ref())),
        headers: headers(&mut table, traits.as_ref()),
    };
    let preset = scheme.as_ref().map(|scheme| scheme.ack.clone()).unwrap_or_default();
    let ack = Ack::read(&mut table, &preset);
    Reading { table, draft, scheme, traits, ack }
}

fn provider(table: &mut Table, schemes: &Schemes<'_>) -> Option<Arc<Scheme>> {
    const KEY: &str = "provider";
    let known = || schemes.own.keys().map(String::as_str).chain(schemes.providers.names.iter().copied());
    let Some(name) = table.text(KEY) else {
        table.missing(
            KEY,
            "missing: give the name of a preset (`hapax providers` lists them) or [scheme.NAME]",
        );
        return None;
    };
    if let Some(own) = schemes.own.get(&name) {
        return own.clone();
    }
    let preset = (schemes.providers.preset)(&name);
    if preset.is_none() {
        let hint = match nearest(&name, known()) {
            Some(near) => format!("did you mean {near:?}?"),
            None => "`hapax providers` lists the presets; others need a [scheme.NAME]".to_owned(),
        };
        table.error(KEY, format!("{name:?} is neither a preset nor a scheme of this file; {hint}"));
    }
    preset
}

/// All secrets are fetched and decoded, so that every mistake among them is reported.
fn keys(table: &mut Table, secrets: &Secrets<'_>, scheme: Option<&Scheme>, published: bool) -> Vec<Key> {
    const KEY: &str = "secrets";
    let found = table.secrets(KEY).unwrap_or_default();
    if scheme.is_some_and(|scheme| !scheme.takes_secrets()) {
        if !found.is_empty() {
            table.error(KEY, "mean nothing with this provider, which publishes its keys: remove them");
        }
        return Vec::new();
    }
    // A provider that hands its secret over may do so later.
    if found.is_empty() && !published && !scheme.is_some_and(Scheme::hands_over) {
        let asks = scheme.is_some_and(|scheme| scheme.key_set().is_some());
        let instead = if asks { "; or jwks, the URL of the provider's key set" } else { "" };
        let wanted =
            format!("give one or a list of {{ env = \"NAME\" }}, {{ file = \"path\" }} or \"text\"{instead}");
        table.missing(KEY, format!("no secret, and without one anybody could send events: {wanted}"));
    }
    if found.len() > SECRETS_MAX {
        table
            .error(KEY, format!("{} secrets, and {SECRETS_MAX} are the limit: remove old ones", found.len()));
    }
    let mut keys = Vec::with_capacity(found.len());
    for secret in found {
        let Some(text) = secrets.fetch(table, KEY, &secret.place, &secret.value) else { continue };
        match scheme.map(|scheme| scheme.key(&text)) {
            Some(Ok(key)) => keys.push(key),
            Some(Err(problem)) => {
                let origin = origin(&secret.value);
                table.error_at(KEY, &secret.place, format!("{origin} does not fit this provider: {problem}"));
            }
            None => {}
        }
    }
    keys
}

fn handshake_secrets(
    table: &mut Table,
    secrets: &Secrets<'_>,
    scheme: Option<&Scheme>,
) -> BTreeMap<String, Key> {
    const KEY: &str = "handshake_secrets";
    let asked: Vec<&str> = scheme.into_iter().flat_map(Scheme::handshake_secrets).collect();
    let mut found = BTreeMap::new();
    for (name, secret) in table.named_secrets(KEY) {
        if scheme.is_some() && !asked.contains(&name.as_str()) {
            let known = if asked.is_empty() { "none".to_owned() } else { asked.join(", ") };
            table.error_at(
                KEY,
                &secret.place,
                format!("no handshake asks for it; this provider's ask for {known}"),
            );
        }
        if let Some(text) = secrets.fetch(table, KEY, &secret.place, &secret.value) {
            found.insert(name, Key::token(text.as_bytes()));
        }
    }
    for name in asked.iter().filter(|name| !found.contains_key(**name) && !table.failed(KEY)) {
        let message = format!("{name} is missing: without it, this provider's handshake is refused");
        table.warning(KEY, message);
    }
    found
}

/// `claims = { aud = "https://…" }`: without those that the scheme asks for, anybody's token of this provider would do.
fn claims(table: &mut Table, scheme: Option<&Scheme>) -> BTreeMap<String, String> {
    const KEY: &str = "claims";
    let found: BTreeMap<_, _> =
        table.named_texts(KEY).into_iter().map(|(name, text)| (name, text.value)).collect();
    let Some(scheme) = scheme else { return found };
    if !found.is_empty() && !scheme.has_token() {
        table.error(KEY, "this provider's requests hold no signed token: drop it");
    }
    for name in scheme.asked_claims().filter(|name| !found.contains_key(*name)) {
        if !table.failed(KEY) {
            let why = "everybody who uses this provider has such tokens, and this tells yours from theirs";
            table.missing(KEY, format!("{name:?} is missing: say what the claim has to be; {why}"));
        }
    }
    found
}

fn scope(table: &mut Table) -> Arc<str> {
    const KEY: &str = "scope";
    let scope = table.text(KEY).unwrap_or_else(|| "-".to_owned());
    if scope.is_empty() || scope.len() > SCOPE_MAX || scope.contains(char::is_control) {
        table.error(KEY, format!("give 1 to {SCOPE_MAX} bytes without control characters"));
    }
    scope.into()
}

fn on_mismatch(table: &mut Table) -> OnMismatch {
    const KEY: &str = "on_mismatch";
    let choices =
        [("report", OnMismatch::Report), ("refuse", OnMismatch::Refuse), ("accept", OnMismatch::Accept)];
    table.choice(KEY, &choices).unwrap_or(OnMismatch::Report)
}

/// Signed bytes that come again under another id.
fn guard(table: &mut Table, traits: Option<&Traits>) -> Guard {
    const KEY: &str = "guard";
    let choices = [Guard::Off, Guard::Report, Guard::Refuse].map(|guard| (guard.as_str(), guard));
    let written = table.choice(KEY, &choices);
    let Some(traits) = traits else { return Guard::Off };
    match written {
        None => traits.guard,
        Some(Guard::Off) => {
            if traits.guard != Guard::Off {
                let message = "cannot be \"off\": this provider's signature covers no part of the event, and who captures one \
                               request could send any event under it. Give \"refuse\" or \"report\"";
                table.error(KEY, message);
            }
            Guard::Off
        }
        Some(_) if traits.has(Quirk::NeverDedupes) || !traits.has(Quirk::Guardable) => {
            table.error(
                KEY,
                "cannot be: this provider signs nothing, or no whole request, or its requests have no ids. Give \"off\"",
            );
            Guard::Off
        }
        Some(_) if traits.facts.id_signed => {
            table.warning(
                KEY,
                "has no effect: the id is signed, so that nobody can send the body again under another",
            );
            Guard::Off
        }
        Some(guard) => guard,
    }
}

fn tolerance(table: &mut Table) -> Option<Tolerance> {
    const KEY: &str = "tolerance";
    const MOST: Duration = Duration::from_secs(86_400);
    let range = Duration::from_secs(1)..=MOST;
    table.duration_or(KEY, "off", range).map(|within| within.map_or(Tolerance::Off, Tolerance::Within))
}

fn headers(table: &mut Table, traits: Option<&Traits>) -> Vec<HeaderName> {
    const KEY: &str = "headers";
    let texts = table.located_texts(KEY).unwrap_or_default();
    if texts.len() > HEADERS_MAX {
        table.error(KEY, format!("{} headers, and {HEADERS_MAX} are the limit", texts.len()));
    }
    let mut seen = BTreeSet::new();
    let mut names = Vec::with_capacity(texts.len());
    for text in texts {
        let Ok(name) = text.value.to_ascii_lowercase().parse::<HeaderName>() else {
            table.error_at(KEY, &text.place, format!("{:?} cannot be the name of a header", text.value));
            continue;
        };
        if let Some(why) = secret_header(name.as_str(), traits) {
            table.error_at(KEY, &text.place, format!("{name} {why}, which must not be stored: remove it"));
        } else if SECRET_WORDS.iter().any(|word| name.as_str().contains(word)) {
            table.warning_at(
                &text.place,
                format!("{name} may carry a secret, and would be stored with each event"),
            );
        }
        if seen.insert(name.as_str().to_owned()) {
            names.push(name);
        } else {
            table.warning_at(&text.place, format!("{name} stands there twice"));
        }
    }
    names
}

fn secret_header(name: &str, traits: Option<&Traits>) -> Option<&'static str> {
    if SECRET_HEADERS.contains(&name) {
        return Some("carries a secret");
    }
    let of_scheme = |traits: &Traits| traits.secret_headers.iter().any(|one| one.eq_ignore_ascii_case(name));
    traits.is_some_and(of_scheme).then_some("carries this provider's signature or token")
}
