//! Provider presets and the scheme grammar as data.
//!
//! A scheme says how a provider signs and where an event's id stands. It is compiled once, when it is loaded: a
//! template that does not parse, a pointer that is none, a timestamp that is used but never read are refused there,
//! with the line. Invariant: what decides about trust (algorithm, labels, places) comes from here, never from a
//! request; no request is seen here.

mod ack;
pub(crate) mod cert;
mod facts;
mod fetched;
pub(crate) mod handshake;
pub(crate) mod jwt;
mod key;
pub(crate) mod pin;
pub(crate) mod place;
pub(crate) mod public_key;
mod reading;
#[cfg(test)]
mod reference;
pub(crate) mod signature;
mod sound;
pub(crate) mod template;
pub(crate) mod token_key;

use std::sync::Arc;

use http::{HeaderName, Method};
use jiff::Timestamp;

use crate::config::Tolerance;
use crate::guard::Guard;
use crate::json::{Pointers, Slot};
use crate::settings::{File, Severity};

pub use ack::Ack;
pub use facts::{Binds, Facts};
pub use fetched::FetchedKeys;
pub use key::Key;
pub use public_key::PublicKey;
pub(crate) use public_key::certificates;

use cert::Pointing;
use handshake::Handshakes;
use jwt::{JwtRule, KeySet, TokenPlace};
use key::KeyRule;
use place::{Place, Rule};
use signature::{Algorithm, SaidHash, SigRule, TsFrom, TsRule};
use template::{Piece, Template};
use token_key::TokenKey;

/// Embeds `config/providers/NAME.toml` for each name; a preset is parsed when somebody uses it.
macro_rules! presets {
    ($($name:literal,)*) => {
        const PRESET_NAMES: &[&str] = &[$($name,)*];
        const PRESET_TEXTS: &[&str] = &[$(include_str!(concat!("../config/providers/", $name, ".toml")),)*];
    };
}

presets! {
    "adyen",
    "adyen-header",
    "airwallex",
    "apple-app-store",
    "asana",
    "azure-cloudevents",
    "azure-event-grid",
    "bigcommerce",
    "bitbucket",
    "box",
    "box-escaped",
    "braintree",
    "brevo",
    "calendly",
    "chargebee",
    "circleci",
    "coinbase-commerce",
    "contentful",
    "contentful-token",
    "discord-events",
    "discord-interactions",
    "docusign",
    "dropbox",
    "dropbox-sign",
    "easypost",
    "ebay",
    "elevenlabs",
    "fusionauth",
    "generic-sha512-base64",
    "generic-sha512-hex",
    "gitea",
    "github",
    "gitlab",
    "gitlab-token",
    "gocardless",
    "google-pubsub",
    "hub-sha1",
    "hub-sha512",
    "hubspot-v1",
    "hubspot-v2",
    "hubspot-v3",
    "intercom",
    "jira",
    "lemonsqueezy",
    "line",
    "linear",
    "mailgun",
    "mailgun-form",
    "mandrill",
    "mercadopago",
    "messagebird",
    "meta",
    "microsoft-graph",
    "modern-treasury",
    "mollie",
    "monday",
    "mux",
    "netlify",
    "notion",
    "okta",
    "onfido",
    "openai",
    "paddle",
    "pagerduty",
    "paypal",
    "paystack",
    "plaid",
    "plivo-v2",
    "postmark",
    "razorpay",
    "revenuecat",
    "sanity",
    "sendgrid",
    "sentry",
    "shopify",
    "slack",
    "smartsheet",
    "sns",
    "square",
    "standard-webhooks",
    "standard-webhooks-ed25519",
    "stripe",
    "svix",
    "telegram",
    "tiktok",
    "trello",
    "truelayer",
    "twilio",
    "twilio-form",
    "twilio-shared-key",
    "twitch",
    "twitter",
    "typeform",
    "vercel",
    "vonage",
    "webflow",
    "wise",
    "wix",
    "woocommerce",
    "workos",
    "xero",
    "zendesk",
    "zoom",
}

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
    /// Where the request says what its body hashes to.
    pub(crate) body_hash: Option<SaidHash>,
    /// Where it says what the public URL hashes to.
    pub(crate) url_hash: Option<SaidHash>,
    /// Where it names the key.
    pub(crate) key_id: Option<Place>,
    /// Texts that have to stand at places of the request.
    pub(crate) require: Vec<(Place, String)>,
    /// What a request points to: the certificate of its key, its hash, its sender.
    pub(crate) pointing: Pointing,
    /// The body is a list of parts that are signed one by one, and all of them have to be.
    pub(crate) every: Option<Every>,
    /// Pointers of everything that verification reads.
    pub(crate) signed: Pointers,
    /// Headers that may stand in a request only once, or it is refused.
    pub(crate) once: Vec<HeaderName>,
    pub(crate) event: EventRules,
    pub(crate) batch: Option<BatchRules>,
    pub(crate) handshakes: Handshakes,
    /// What the provider is answered.
    pub(crate) ack: Ack,
    /// What a source does with signed bytes that come again under another id, unless it says otherwise.
    pub(crate) guard: Guard,
    sample: Option<String>,
}

/// How a request is authenticated.
#[derive(Debug)]
pub(crate) enum Kind {
    /// By a signature over what one of the templates gives.
    Signed {
        /// How it is made.
        algorithm: Algorithm,
        /// What is signed, in the forms that there are of it; at least one.
        sign: Vec<Template>,
    },
    /// By a token that is signed and says what else has to be right.
    Jwt(Box<JwtRule>),
    /// The secret itself is in the request.
    Token,
    /// The secret is name and password of HTTP's basic authentication (RFC 7617).
    Basic,
}

/// The list whose items are signed one by one.
#[derive(Debug)]
pub(crate) struct Every {
    /// One pointer, to the list.
    pub(crate) pointers: Pointers,
    /// Its slot.
    pub(crate) items: Slot,
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
    /// What the digest covers.
    pub(crate) digest: DigestRule,
    /// The same, as written.
    pub(crate) digest_text: String,
}

/// A request that brings several events.
#[derive(Debug)]
pub(crate) struct BatchRules {
    /// One pointer, to the list.
    pub(crate) pointers: Pointers,
    /// Its slot.
    pub(crate) items: Slot,
    /// As written.
    pub(crate) text: String,
    /// What names and describes an item; its places are in the item.
    pub(crate) item: EventRules,
}

/// What of a body tells it from another body under the same id.
#[derive(Debug)]
pub(crate) enum DigestRule {
    /// All of it but these values, which change between attempts.
    Without(Vec<Slot>),
    /// These values and nothing else.
    Parts(Vec<Slot>),
}

impl Default for DigestRule {
    fn default() -> Self {
        Self::Without(Vec::new())
    }
}

impl Scheme {
    /// The embedded preset of that name.
    #[must_use]
    pub fn preset(name: &str) -> Option<Arc<Self>> {
        let (file, table) = File::parse(name, Self::preset_text(name)?);
        let scheme = Self::read(name, table);
        let sound = file.take_problems().iter().all(|problem| problem.severity == Severity::Warning);
        scheme.filter(|_| sound).map(Arc::new)
    }

    /// Names of all embedded presets.
    #[must_use]
    pub fn preset_names() -> &'static [&'static str] {
        PRESET_NAMES
    }

    /// The text of an embedded preset, comments and all.
    #[must_use]
    pub fn preset_text(name: &str) -> Option<&'static str> {
        let mut presets = PRESET_NAMES.iter().zip(PRESET_TEXTS);
        presets.find(|(preset, _)| **preset == name).map(|(_, text)| *text)
    }

    /// Turns the text of a secret into a key, as this scheme encodes it.
    ///
    /// # Errors
    /// What is wrong with it, without the secret.
    pub fn key(&self, secret: &str) -> Result<Key, String> {
        let key = match &self.kind {
            Kind::Signed { algorithm: Algorithm::Hmac(hash), .. } => {
                Key::hmac(hash.algorithm(), &self.key.decode(secret)?)
            }
            Kind::Signed { algorithm, .. } if algorithm.has_public_keys() && self.pointing.cert.is_none() => {
                Key::public(self.key.decode_public(*algorithm, secret)?)
            }
            Kind::Jwt(rule) => Key::tokens(TokenKey::read(rule, &self.key, secret)?),
            Kind::Signed { .. } | Kind::Token => Key::token(&self.key.decode(secret)?),
            Kind::Basic if secret.contains(':') => Key::token(&self.key.decode(secret)?),
            Kind::Basic => return Err("the secret is not of the form \"name:password\"".to_owned()),
        };
        Ok(key.noting(self.key.note(secret)))
    }

    /// Whether a source has secrets at all.
    #[must_use]
    pub fn takes_secrets(&self) -> bool {
        self.pointing.takes_secrets(self.templates())
    }

    /// Whether a request points to the certificate of its key.
    #[must_use]
    pub fn has_certificates(&self) -> bool {
        self.pointing.cert.is_some()
    }

    /// Where whoever made the provider sign stands, as written, if the provider signs for anybody.
    #[must_use]
    pub fn sender(&self) -> Option<String> {
        self.pointing.sender.as_ref().map(Place::to_string)
    }

    /// The keys of the certificates in a PEM text, which are trusted as they are: neither their dates nor their names nor
    /// who issued them is looked at.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn local_keys(&self, pem: &str) -> Result<Vec<PublicKey>, String> {
        match &self.kind {
            Kind::Signed { algorithm, .. } => public_key::of_certificates(*algorithm, pem),
            Kind::Token | Kind::Basic | Kind::Jwt(_) => Err("this provider has no certificates".to_owned()),
        }
    }

    /// Whether the URL is part of what is signed: the source then needs a public URL.
    #[must_use]
    pub fn signs_url(&self) -> bool {
        let in_sign = self.templates().iter().any(|sign| sign.has(|piece| matches!(piece, Piece::Url(_))));
        in_sign || self.url_hash.is_some()
    }

    /// Whether there is a time of the request to hold against the clock.
    #[must_use]
    pub fn has_time(&self) -> bool {
        self.ts.is_some()
            || matches!(&self.kind, Kind::Jwt(rule) if rule.need.iter().any(|name| name == "exp"))
    }

    /// Claims of which a source has to say what they must be.
    pub fn asked_claims(&self) -> impl Iterator<Item = &str> {
        let rule = self.jwt();
        rule.into_iter().flat_map(|rule| &rule.ask).map(|ask| ask.name.as_str())
    }

    /// Where the keys of its tokens are published.
    pub(crate) fn key_set(&self) -> Option<&KeySet> {
        self.jwt()?.jwks.as_ref()
    }

    /// Whether requests are signed tokens.
    #[must_use]
    pub fn has_token(&self) -> bool {
        self.jwt().is_some()
    }

    /// Whether a timestamp is part of what is signed: without one, a captured request is good for ever.
    #[must_use]
    pub fn signs_time(&self) -> bool {
        self.ts.as_ref().is_some_and(|ts| signs_time(self.templates(), ts))
    }

    /// How far a timestamp may be from the clock, unless the source says otherwise.
    #[must_use]
    pub fn tolerance(&self) -> Tolerance {
        self.ts.as_ref().map_or(Tolerance::Off, |ts| ts.tolerance)
    }

    /// Whether requests of this scheme have no identity, so that none is ever a duplicate.
    #[must_use]
    pub fn never_dedupes(&self) -> bool {
        self.batch.is_none() && self.event.ids.is_empty()
    }

    /// Whether signed bytes can be watched: those of a whole request, whose events can be told apart.
    #[must_use]
    pub fn can_guard(&self) -> bool {
        matches!(self.kind, Kind::Signed { .. }) && self.every.is_none() && !self.never_dedupes()
    }

    /// Whether a request brings a list of events.
    #[must_use]
    pub fn is_batch(&self) -> bool {
        self.batch.is_some()
    }

    /// How a request is authenticated, as the settings name it.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match &self.kind {
            Kind::Signed { algorithm: Algorithm::Hmac(_), .. } => "hmac",
            Kind::Signed { algorithm: Algorithm::Hash(_), .. } => "hash",
            Kind::Signed { algorithm: Algorithm::Ed25519, .. } => "ed25519",
            Kind::Signed { algorithm: Algorithm::EcdsaP256(_), .. } => "ecdsa-p256",
            Kind::Signed { algorithm: Algorithm::RsaPkcs1(_), .. } => "rsa-pkcs1",
            Kind::Token => "token",
            Kind::Basic => "basic",
            Kind::Jwt(_) => "jwt",
        }
    }

    /// The rules for the id, as they were written.
    pub fn id_rules(&self) -> impl Iterator<Item = &str> {
        self.event_rules().ids.iter().map(|rule| rule.text.as_str())
    }

    /// A body that such a provider could send, with the given id and time in it: `{id}`, and `{now}`, `{now_ms}` or
    /// `{time}`.
    #[must_use]
    pub fn sample(&self, id: &str, now: Timestamp) -> Option<String> {
        Some(with_times(self.sample.as_ref()?.replace("{id}", id), now))
    }

    /// As [`Scheme::sample`], but `id` is the whole id: no prefix is put before it.
    #[must_use]
    pub fn sample_of(&self, id: &str, now: Timestamp) -> Option<String> {
        let quoted = serde_json::to_string(id).ok()?;
        let escaped = quoted.get(1..quoted.len() - 1)?;
        let mut text = String::new();
        let mut rest = self.sample.as_deref()?;
        while let Some((before, after)) = rest.split_once("{id}") {
            text.push_str(before.trim_end_matches(|char: char| char.is_ascii_alphanumeric() || char == '_'));
            text.push_str(escaped);
            rest = after;
        }
        text.push_str(rest);
        Some(with_times(text, now))
    }

    /// The rules for the id, for people.
    #[must_use]
    pub fn key_rule(&self) -> String {
        let rules = self.id_rules().collect::<Vec<_>>().join(" | ");
        match &self.batch {
            Some(batch) => format!("each of {:?}: {rules}", batch.text),
            None => rules,
        }
    }

    /// Where events and their ids stand, each place in the one form that all ways of writing it have in common: other
    /// places mean that old events get new keys.
    #[must_use]
    pub fn id_places(&self) -> String {
        let joined = |rule: &Rule| rule.places.iter().map(Place::to_string).collect::<Vec<_>>().join(" + ");
        let ids: Vec<String> = self.event_rules().ids.iter().map(joined).collect();
        match &self.batch {
            Some(batch) => format!("each of {:?}: id = {ids:?}", batch.text),
            None => format!("id = {ids:?}"),
        }
    }

    /// What tells bodies apart.
    #[must_use]
    pub fn digest_rule(&self) -> &str {
        &self.event_rules().digest_text
    }

    /// What an event is read by.
    fn event_rules(&self) -> &EventRules {
        self.batch.as_ref().map_or(&self.event, |batch| &batch.item)
    }

    /// Whether there is a handshake of that method.
    #[must_use]
    pub fn answers(&self, method: &Method) -> bool {
        self.handshakes.answers(method)
    }

    /// Names of the secrets that handshakes ask for.
    pub fn handshake_secrets(&self) -> impl Iterator<Item = &str> {
        self.handshakes.secrets()
    }

    /// Whether the provider hands over the secret in a handshake, so that a source can do without one of its own.
    #[must_use]
    pub fn hands_over(&self) -> bool {
        self.handshakes.hands_over()
    }

    /// Headers that hold a signature or the token itself.
    pub(crate) fn signature_headers(&self) -> Vec<&HeaderName> {
        self.sig.from.iter().filter_map(Place::header_around).collect()
    }

    /// All headers that the scheme reads; one may stand there twice.
    pub(crate) fn headers(&self) -> Vec<&HeaderName> {
        let rules = [&self.event.ids, &self.event.types, &self.event.times].into_iter().flatten();
        let places = rules.flat_map(|rule| &rule.places).filter_map(Place::header);
        self.signature_headers().into_iter().chain(&self.once).chain(places).collect()
    }

    pub(crate) fn signs_id(&self) -> bool {
        signs_id(self.templates())
    }

    /// What is special to signed tokens.
    pub(crate) fn jwt(&self) -> Option<&JwtRule> {
        match &self.kind {
            Kind::Jwt(rule) => Some(rule),
            Kind::Signed { .. } | Kind::Token | Kind::Basic => None,
        }
    }

    /// Where the signed token stands.
    pub(crate) fn token_place(&self) -> Option<&TokenPlace> {
        self.jwt().map(|rule| &rule.token)
    }

    /// Where the timestamp stands, if that is one header.
    pub(crate) fn time_header(&self) -> Option<&HeaderName> {
        match &self.ts.as_ref()?.from {
            TsFrom::Places(places) => places.first().and_then(Place::header),
            TsFrom::Label(_) => None,
        }
    }

    /// What is signed, in the forms that there are of it; none if nothing is.
    pub(crate) fn templates(&self) -> &[Template] {
        self.kind.templates()
    }
}

impl Kind {
    pub(crate) fn templates(&self) -> &[Template] {
        match self {
            Self::Signed { sign, .. } => sign,
            Self::Jwt(rule) => &rule.sign,
            Self::Token | Self::Basic => &[],
        }
    }

    /// The secret stands in the request as it is, so that what holds it must not be shown.
    pub(crate) fn sends_secret(&self) -> bool {
        matches!(self, Self::Token | Self::Basic)
    }

    /// What stands at the place of the signature lets whoever has it in until it expires, or for ever: it is not shown.
    pub(crate) fn sends_pass(&self) -> bool {
        matches!(self, Self::Jwt(_) | Self::Token | Self::Basic)
    }
}

/// Of several forms any may be the signed one, so what all of them hold is what is signed.
fn all_have(sign: &[Template], holds: impl Fn(&Template) -> bool) -> bool {
    !sign.is_empty() && sign.iter().all(holds)
}

fn signs_id(sign: &[Template]) -> bool {
    sign.iter().any(says_id)
}

/// Whether the template has the id in it. Of several forms any may be the signed one, so one that has says little.
fn says_id(sign: &Template) -> bool {
    sign.has(|piece| matches!(piece, Piece::Id))
}

fn signs_time(sign: &[Template], ts: &TsRule) -> bool {
    // A list of signed headers has to have the time in it.
    let named = |sign: &Template| {
        sign.has(|piece| matches!(piece, Piece::Timestamp | Piece::Listed(_) | Piece::Lines(_)))
    };
    let covered = |place: &Place| place.in_token() || all_have(sign, |sign| covers(sign, place));
    all_have(sign, named) || matches!(&ts.from, TsFrom::Places(places) if places.iter().all(covered))
}

/// Whether the template signs what stands at the place.
fn covers(sign: &Template, place: &Place) -> bool {
    let whole = place.in_body() && sign.has_body();
    let url = matches!(place, Place::Query(_)) && sign.has_url();
    let named = sign.places().any(|signed| signed.is(place));
    whole || url || named
}

fn with_times(text: String, now: Timestamp) -> String {
    let times = [
        ("{now}", now.as_second().to_string()),
        ("{now_ms}", now.as_millisecond().to_string()),
        ("{time}", format!("{now:.0}")),
    ];
    times.iter().fold(text, |text, (name, time)| text.replace(name, time))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::fixture::read_scheme;

    use super::*;

    #[test]
    fn every_preset_loads_and_names_its_facts() {
        for name in Scheme::preset_names() {
            let (file, table) = File::parse(name, Scheme::preset_text(name).unwrap());
            let scheme = Scheme::read(name, table).unwrap();
            assert_eq!(file.take_problems(), []);
            assert!(scheme.facts.source.is_some(), "{name}");
            assert!(Scheme::preset(name).is_some());
        }
        assert!(Scheme::preset("nobody").is_none());
        assert!(Scheme::preset_names().is_sorted());
        let files = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/config/providers")).unwrap();
        let files = files.map(|file| file.unwrap().file_name().into_string().unwrap());
        let mut files: Vec<String> = files.map(|file| file.replace(".toml", "")).collect();
        files.sort();
        assert_eq!(files, Scheme::preset_names(), "the folder and the list");
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
}
