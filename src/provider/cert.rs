//! Keys that a request points to: `cert`, `hash = { by = … }`, `sender` and `confirm` in a scheme.
//!
//! Invariant: a request may say *which* of the keys that the provider publishes signed it, and which of the listed hashes
//! was used. It never says where keys may come from: that is pinned here.

use http::HeaderName;

use crate::json::Pointers;
use crate::settings::Table;

use super::Kind;
use super::pin::{Pattern, Pins, patterns};
use super::place::Place;
use super::signature::{Algorithm, Hash};
use super::template::{Piece, Template};
use super::{all_have, covers};

/// `cert = { from, host, path, names, chain }`: the certificate whose key made the signature.
#[derive(Debug)]
pub(crate) struct CertRule {
    /// Where its URL stands.
    pub(crate) from: Place,
    /// What that URL may be.
    pub(crate) pins: Pins,
    /// A DNS name of the certificate has to fit one of these; none: they are not looked at.
    pub(crate) names: Vec<Pattern>,
    /// Whether it has to lead to an authority. If not, that the pinned host serves it is all that speaks for it.
    pub(crate) chain: bool,
}

impl CertRule {
    /// Reads the table `cert`.
    pub(super) fn read(mut table: Table, pointers: &mut Pointers) -> Option<Self> {
        let from = one_place(&mut table, "from", pointers);
        let pins = Pins::read(&mut table, false);
        let names = patterns(&mut table, "names", Pattern::host);
        let chain = table.flag("chain").unwrap_or(true);
        if chain && !table.has("names") {
            let why = "is missing: without a name, anybody's certificate leads to an authority; \
                       give what stands in it, e.g. \"signing.example.com\"";
            table.error("names", why);
        }
        table.finish();
        Some(Self { from: from?, pins, names, chain })
    }
}

/// `hash = { by = "json:/SignatureVersion", "1" = "sha1", "2" = "sha256" }`: the request names one of these.
#[derive(Debug)]
pub(crate) struct HashBy {
    /// Where it does.
    pub(crate) place: Place,
    /// What may stand there, and what it means.
    pub(crate) choices: Vec<(String, Algorithm)>,
}

impl HashBy {
    /// Reads the table `hash`.
    pub(super) fn read(table: &mut Table, pointers: &mut Pointers) -> Option<Self> {
        const KEY: &str = "hash";
        let mut place = None;
        let mut choices = Vec::new();
        for (name, text) in table.named_texts(KEY) {
            let hash = || Hash::CHOICES.iter().find(|(name, _)| *name == text.value).map(|(_, hash)| *hash);
            if name == "by" {
                match Place::parse(&text.value, pointers) {
                    Ok(found) => place = Some(found),
                    Err(message) => table.error_at(KEY, &text.place, message),
                }
            } else if let Some(hash) = hash() {
                choices.push((name, Algorithm::RsaPkcs1(hash)));
            } else {
                let known: Vec<String> = Hash::CHOICES.iter().map(|(name, _)| format!("{name:?}")).collect();
                table.error_at(KEY, &text.place, format!("is not known: give one of {}", known.join(", ")));
            }
        }
        if !table.failed(KEY) && (place.is_none() || choices.is_empty()) {
            table.error(KEY, "give a text, or { by = \"PLACE\", \"what may stand there\" = \"sha256\" }");
        }
        Some(Self { place: place?, choices })
    }
}

/// `confirm = { when, from, host, path }`: a signed request that asks for a visit to a URL before events come.
#[derive(Debug)]
pub(crate) struct ConfirmRule {
    /// Pointers of all places below.
    pub(crate) pointers: Pointers,
    /// Texts that stand in such a request.
    pub(crate) when: Vec<(Place, String)>,
    /// Where the URL stands.
    pub(crate) from: Place,
    /// What it may be.
    pub(crate) pins: Pins,
}

impl ConfirmRule {
    /// Reads the table `confirm`.
    pub(super) fn read(mut table: Table) -> Option<Self> {
        let mut pointers = Pointers::default();
        let when = places(&mut table, "when", &mut pointers);
        if when.is_empty() && !table.failed("when") {
            table.error(
                "when",
                "is missing: what tells such a request, e.g. { \"json:/Type\" = \"Confirmation\" }",
            );
        }
        let from = one_place(&mut table, "from", &mut pointers);
        let pins = Pins::read(&mut table, true);
        table.finish();
        Some(Self { pointers, when, from: from?, pins })
    }
}

/// Texts by the place at which they have to stand.
pub(super) fn places(table: &mut Table, key: &'static str, pointers: &mut Pointers) -> Vec<(Place, String)> {
    let mut found = Vec::new();
    for (name, text) in table.named_texts(key) {
        match Place::parse(&name, pointers) {
            Ok(place) => found.push((place, text.value)),
            Err(message) => table.error_at(key, &text.place, message),
        }
    }
    found
}

/// Reads the one place at a key; without it, `None` and no complaint.
pub(super) fn place(table: &mut Table, key: &'static str, pointers: &mut Pointers) -> Option<Place> {
    match Place::parse(&table.text(key)?, pointers) {
        Ok(Place::BodySha256) => {
            table.error(key, "\"body:sha256\" cannot stand here");
            None
        }
        Ok(place) => Some(place),
        Err(message) => {
            table.error(key, message);
            None
        }
    }
}

fn one_place(table: &mut Table, key: &'static str, pointers: &mut Pointers) -> Option<Place> {
    if !table.has(key) {
        table.error(key, "is missing: the place where the URL stands, e.g. \"header:X-Cert-URL\"");
    }
    place(table, key, pointers)
}

/// What a scheme says of keys that a request points to.
#[derive(Debug, Default)]
pub(crate) struct Pointing {
    /// Where the certificate is.
    pub(crate) cert: Option<CertRule>,
    /// Which hash was used, if the request says it.
    pub(crate) hash_by: Option<HashBy>,
    /// Where whoever made the provider sign stands. The provider signs for anybody, so the settings list whom to take.
    pub(crate) sender: Option<Place>,
    /// What has to be confirmed by a visit.
    pub(crate) confirm: Option<ConfirmRule>,
}

impl Pointing {
    /// Reads the keys of it but `hash`.
    pub(super) fn read(table: &mut Table, hash_by: Option<HashBy>, pointers: &mut Pointers) -> Self {
        let cert = table.table("cert").and_then(|cert| CertRule::read(cert, pointers));
        let sender = place(table, "sender", pointers);
        let confirm = table.table("confirm").and_then(ConfirmRule::read);
        Self { cert, hash_by, sender, confirm }
    }

    /// Headers that may stand in a request only once.
    pub(super) fn headers(&self) -> impl Iterator<Item = &HeaderName> {
        let cert = self.cert.as_ref().map(|cert| &cert.from);
        let hash = self.hash_by.as_ref().map(|by| &by.place);
        cert.into_iter().chain(hash).chain(&self.sender).filter_map(Place::header)
    }

    /// Whether the settings give secrets: no public key is configured, and what is signed may hold no secret either.
    pub(super) fn takes_secrets(&self, sign: &[Template]) -> bool {
        self.cert.is_none() || sign.iter().any(has_secret)
    }

    /// Reports keys that make no sense together.
    pub(super) fn check(&self, table: &Table, kind: &Kind) {
        let public = matches!(kind, Kind::Signed { algorithm, .. }
            if matches!(algorithm, Algorithm::RsaPkcs1(_) | Algorithm::EcdsaP256(_)));
        if self.cert.is_some() && !public {
            table.error(
                "cert",
                "is for kind = \"rsa-pkcs1\" and \"ecdsa-p256\": no other key stands in a certificate",
            );
        }
        if self.cert.is_some() && table.has("every") {
            table.error("cert", "cannot be beside every: one certificate signs the whole request");
        }
        if self.cert.is_some() && table.has("key") {
            table.error("key", "means nothing with cert, in which the key stands: drop it");
        }
        if self.hash_by.is_some() && !matches!(kind, Kind::Signed { algorithm: Algorithm::RsaPkcs1(_), .. }) {
            table.error("hash", "by is for kind = \"rsa-pkcs1\": give one hash");
        }
        for (key, place) in [("sender", self.sender.as_ref()), ("confirm", self.confirm_place())] {
            if place.is_some_and(|place| !all_have(kind.templates(), |sign| covers(sign, place))) {
                table.error(key, "is not part of what is signed, so that anybody could say anything there");
            }
        }
    }

    fn confirm_place(&self) -> Option<&Place> {
        self.confirm.as_ref().map(|confirm| &confirm.from)
    }
}

pub(super) fn has_secret(sign: &Template) -> bool {
    sign.has(|piece| matches!(piece, Piece::Secret))
}

#[cfg(test)]
mod tests {
    use crate::fixture::read_scheme;

    const GOOD: &str = r#"
        kind = "rsa-pkcs1"
        hash = { by = "json:/V", "1" = "sha1", "2" = "sha256" }
        sign = "[{json:/Visit}|]{json:/From}|{secret}|{body}"
        sig = { from = "header:X-Sig", encoding = "base64" }
        cert = { from = "header:X-Cert", host = "*.example.com", path = "/certs/*", names = "signing.example.com" }
        sender = "json:/From"
        id = "json:/id"
        [confirm]
        when = { "json:/Type" = "Confirm" }
        from = "json:/Visit"
        host = "visit.example.com"
        path = "/"
    "#;

    fn messages(toml: &str) -> String {
        let (_, problems) = read_scheme(toml);
        problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn mistakes_are_named_where_they_are() {
        assert_eq!(messages(GOOD), "");
        for (good, bad, wanted) in [
            ("rsa-pkcs1", "hmac", "cert: is for kind"),
            ("rsa-pkcs1", "ecdsa-p256", "hash: by is for"),
            ("\"1\" = \"sha1\"", "\"1\" = \"md5\"", "hash.1: is not known"),
            ("by = \"json:/V\", ", "", "hash: give a text, or"),
            ("json:/V", "json:V", "hash.by: JSON pointer"),
            ("from = \"header:X-Cert\", ", "", "cert.from: is missing"),
            ("host = \"*.example.com\", ", "", "cert.host: is missing"),
            ("*.example.com", "*.com", "leaves the domain open"),
            ("path = \"/certs/*\", ", "", "cert.path: is missing"),
            (", names = \"signing.example.com\"", "", "cert.names: is missing"),
            ("names = ", "nams = ", "did you mean \"names\"?"),
            (
                "sender = \"json:/From\"",
                "sender = \"header:X-From\"",
                "sender: is not part of what is signed",
            ),
            ("from = \"json:/Visit\"", "from = \"header:X-Visit\"", "confirm: is not part of what is signed"),
            ("when = { \"json:/Type\" = \"Confirm\" }", "", "confirm.when: is missing"),
            ("id = \"json:/id\"", "id = \"json:/id\"\nevery = \"/x\"", "cannot be beside every"),
            (
                "id = \"json:/id\"",
                "id = \"json:/id\"\nkey = { encoding = \"hex\" }",
                "key: means nothing with cert",
            ),
        ] {
            assert!(GOOD.contains(good), "{good}");
            let found = messages(&GOOD.replacen(good, bad, 1));
            assert!(found.contains(wanted), "{bad}\n{found}");
        }
    }
}
