//! Where signatures and timestamps stand in a request, and how they are written.

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE, URL_SAFE_NO_PAD};
use jiff::Timestamp;
use ring::signature::{self, VerificationAlgorithm};
use ring::{digest, hmac};

use crate::config::Tolerance;
use crate::json::Pointers;
use crate::provider::place::Place;
use crate::settings::Table;

/// Longest decoded signature: SHA-512.
const TAG_MAX: usize = 64;
/// Longest signature text: SHA-512 in hex. What is longer is not decoded.
const TAG_TEXT_MAX: usize = 2 * TAG_MAX;
/// Longest text of a signature that is made with a private key: RSA with 8192 bits, in hex.
const SIGNATURE_TEXT_MAX: usize = 2 * 1024;
/// Above this many, an `s_or_ms` timestamp counts milliseconds: as seconds it would be the year 5138.
const SECONDS_MAX: i64 = 100_000_000_000;
/// Longest RFC 3339 text that is looked at.
const RFC3339_MAX: usize = 40;

/// A digest. Only the settings choose it, never the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hash {
    Sha1,
    Sha256,
    Sha512,
}

impl Hash {
    pub(crate) const CHOICES: &[(&str, Self)] =
        &[("sha256", Self::Sha256), ("sha1", Self::Sha1), ("sha512", Self::Sha512)];

    pub(crate) fn algorithm(self) -> hmac::Algorithm {
        match self {
            Self::Sha1 => hmac::HMAC_SHA1_FOR_LEGACY_USE_ONLY,
            Self::Sha256 => hmac::HMAC_SHA256,
            Self::Sha512 => hmac::HMAC_SHA512,
        }
    }

    /// The plain hash of the pieces.
    pub(crate) fn digest<'a>(self, pieces: impl IntoIterator<Item = &'a [u8]>) -> digest::Digest {
        let mut context = digest::Context::new(match self {
            Self::Sha1 => &digest::SHA1_FOR_LEGACY_USE_ONLY,
            Self::Sha256 => &digest::SHA256,
            Self::Sha512 => &digest::SHA512,
        });
        pieces.into_iter().for_each(|piece| context.update(piece));
        context.finish()
    }

    fn length(self) -> usize {
        match self {
            Self::Sha1 => 20,
            Self::Sha256 => 32,
            Self::Sha512 => 64,
        }
    }
}

/// How a signature is made. Only the settings choose it, never the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Algorithm {
    /// A keyed hash.
    Hmac(Hash),
    /// A plain hash; the secret is part of what is hashed.
    Hash(Hash),
    /// Ed25519 (RFC 8032).
    Ed25519,
    /// ECDSA on P-256, signatures in ASN.1 (RFC 3279).
    EcdsaP256(Hash),
    /// RSASSA-PKCS1-v1_5 (RFC 8017), keys of 2048 bits and more.
    RsaPkcs1(Hash),
}

impl Algorithm {
    /// Whether what is configured is a public key, and nothing secret.
    pub(crate) fn has_public_keys(self) -> bool {
        matches!(self, Self::Ed25519 | Self::EcdsaP256(_) | Self::RsaPkcs1(_))
    }

    /// What verifies such signatures; none where there is no such thing.
    pub(crate) fn verification(self) -> Option<&'static dyn VerificationAlgorithm> {
        match self {
            Self::Ed25519 => Some(&signature::ED25519),
            Self::EcdsaP256(Hash::Sha256) => Some(&signature::ECDSA_P256_SHA256_ASN1),
            Self::RsaPkcs1(Hash::Sha1) => Some(&signature::RSA_PKCS1_2048_8192_SHA1_FOR_LEGACY_USE_ONLY),
            Self::RsaPkcs1(Hash::Sha256) => Some(&signature::RSA_PKCS1_2048_8192_SHA256),
            Self::RsaPkcs1(Hash::Sha512) => Some(&signature::RSA_PKCS1_2048_8192_SHA512),
            Self::EcdsaP256(_) | Self::Hmac(_) | Self::Hash(_) => None,
        }
    }

    /// Whether there is a way to verify such signatures.
    pub(crate) fn is_known(self) -> bool {
        !self.has_public_keys() || self.verification().is_some() || self == Self::EcdsaP256(Hash::Sha1)
    }
}

/// How a signature is written. All of them are read strictly, padding and low bits too: of two texts of one signature
/// one passes. But for the case of hex digits.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TagEncoding {
    #[default]
    Hex,
    Base64,
    /// Without padding, as tokens have it (RFC 7515).
    Base64Url,
    /// With padding, as RFC 4648 has it.
    Base64UrlPadded,
}

/// A decoded signature.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tag {
    bytes: [u8; TAG_MAX],
    length: usize,
}

impl Tag {
    pub(crate) fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or_default()
    }
}

impl TagEncoding {
    pub(crate) const CHOICES: &[(&str, Self)] = &[
        ("hex", Self::Hex),
        ("base64", Self::Base64),
        ("base64url", Self::Base64Url),
        ("base64url-padded", Self::Base64UrlPadded),
    ];

    /// Decodes a signature of exactly the hash's length; anything else is `None`.
    pub(crate) fn decode(self, text: &str, hash: Hash) -> Option<Tag> {
        // The estimate for base64 is up to two bytes above what is written.
        let mut buffer = [0; TAG_MAX + 8];
        let length = hash.length();
        if text.len() > TAG_TEXT_MAX {
            return None;
        }
        let written = match self {
            Self::Hex => hex::decode_to_slice(text, buffer.get_mut(..length)?).ok().map(|()| length)?,
            Self::Base64 => STANDARD.decode_slice(text, &mut buffer).ok()?,
            Self::Base64Url => URL_SAFE_NO_PAD.decode_slice(text, &mut buffer).ok()?,
            Self::Base64UrlPadded => URL_SAFE.decode_slice(text, &mut buffer).ok()?,
        };
        let bytes = *buffer.first_chunk()?;
        (written == length).then_some(Tag { bytes, length })
    }

    /// Decodes a signature that is made with a private key, whose length its algorithm checks.
    pub(crate) fn decode_any(self, text: &str) -> Option<Vec<u8>> {
        if text.len() > SIGNATURE_TEXT_MAX {
            return None;
        }
        match self {
            Self::Hex => hex::decode(text).ok(),
            Self::Base64 => STANDARD.decode(text).ok(),
            Self::Base64Url => URL_SAFE_NO_PAD.decode(text).ok(),
            Self::Base64UrlPadded => URL_SAFE.decode(text).ok(),
        }
    }

    /// Whether a text could be a signature.
    pub(crate) fn fits(self, text: &str, algorithm: Algorithm) -> bool {
        match algorithm {
            Algorithm::Hmac(hash) | Algorithm::Hash(hash) => self.decode(text, hash).is_some(),
            Algorithm::Ed25519 | Algorithm::EcdsaP256(_) | Algorithm::RsaPkcs1(_) => {
                self.decode_any(text).is_some()
            }
        }
    }

    /// Writes a signature.
    pub(crate) fn encode(self, tag: &[u8]) -> String {
        match self {
            Self::Hex => hex::encode(tag),
            Self::Base64 => STANDARD.encode(tag),
            Self::Base64Url => URL_SAFE_NO_PAD.encode(tag),
            Self::Base64UrlPadded => URL_SAFE.encode(tag),
        }
    }
}

/// `sig = { from, split, assign, label, encoding, repeat }`
#[derive(Debug)]
pub(crate) struct SigRule {
    /// Where signatures stand; all are candidates.
    pub(crate) from: Vec<Place>,
    /// What stands between several.
    pub(crate) split: Option<String>,
    /// What stands between label and signature, and the labels that count.
    pub(crate) labels: Option<Labels>,
    /// How they are written.
    pub(crate) encoding: TagEncoding,
    /// Whether the header may stand in the request several times.
    pub(crate) repeat: bool,
}

/// `assign = "="`, `label = ["v1"]`
#[derive(Debug)]
pub(crate) struct Labels {
    pub(crate) assign: String,
    pub(crate) names: Vec<String>,
}

impl Labels {
    /// Whether what stands under the label counts; the empty one stands for none.
    pub(crate) fn have(&self, label: &str) -> bool {
        self.names.iter().any(|name| name == label || (name == ANY_LABEL && !label.is_empty()))
    }
}

/// Stands for every label: which key is meant shows in which one fits.
const ANY_LABEL: &str = "*";

impl SigRule {
    /// The whole value of one header.
    pub(crate) fn of_header(name: http::HeaderName) -> Self {
        let encoding = TagEncoding::default();
        Self { from: vec![Place::Header(name)], split: None, labels: None, encoding, repeat: false }
    }

    /// Reads the table `sig`.
    pub(crate) fn read(mut table: Table, pointers: &mut Pointers) -> Option<Self> {
        let from = places(&mut table, "from", pointers);
        if !table.has("from") {
            table.error(
                "",
                "sig.from is missing: say where the signature stands, e.g. \"header:X-Signature\"",
            );
        }
        let split = table.text("split");
        if split.as_deref() == Some("") {
            table.error("split", "is empty: name what stands between two signatures, or leave it out");
        }
        let labels = labels(&mut table);
        let encoding = table.choice("encoding", TagEncoding::CHOICES).unwrap_or_default();
        let repeat = table.flag("repeat").unwrap_or(false);
        table.finish();
        Some(Self { from: from?, split, labels, encoding, repeat })
    }

    /// The items of one signature text.
    pub(crate) fn items<'t>(&'t self, text: &'t str) -> impl Iterator<Item = &'t str> {
        let (many, one) = match &self.split {
            Some(separator) => (Some(text.split(separator.as_str())), None),
            None => (None, Some(text)),
        };
        many.into_iter().flatten().chain(one).map(str::trim).filter(|item| !item.is_empty())
    }
}

fn labels(table: &mut Table) -> Option<Labels> {
    let assign = table.text("assign");
    let names = table.texts("label");
    match (assign, names) {
        (Some(assign), Some(names)) if !assign.is_empty() && !names.is_empty() => {
            Some(Labels { assign, names })
        }
        (Some(_), Some(_)) => {
            table.error("label", "assign and label must not be empty");
            None
        }
        (Some(_), None) => {
            table.error("assign", "needs label: the labels whose value is a signature, e.g. label = \"v1\"");
            None
        }
        (None, Some(_)) => {
            table
                .error("label", "needs assign: what stands between label and signature, e.g. assign = \"=\"");
            None
        }
        (None, None) => None,
    }
}

fn places(table: &mut Table, key: &'static str, pointers: &mut Pointers) -> Option<Vec<Place>> {
    let texts = table.texts(key)?;
    let mut places = Vec::with_capacity(texts.len());
    for text in &texts {
        match Place::parse(text, pointers) {
            Ok(Place::BodySha256) => table.error(key, "\"body:sha256\" cannot stand here"),
            Ok(place) => places.push(place),
            Err(message) => table.error(key, message),
        }
    }
    if texts.is_empty() {
        table.error(key, "is an empty list: name at least one place");
    }
    Some(places)
}

/// `body_hash = { from, hash, encoding }`: where a request says what its body hashes to. Where what is signed lacks the
/// body and holds this, the body is signed all the same. `url_hash` is the same of the public URL.
#[derive(Debug)]
pub(crate) struct SaidHash {
    pub(crate) from: Place,
    pub(crate) hash: Hash,
    pub(crate) encoding: TagEncoding,
}

impl SaidHash {
    /// Reads the table `body_hash` or `url_hash`.
    pub(crate) fn read(mut table: Table, pointers: &mut Pointers) -> Option<Self> {
        let from = places(&mut table, "from", pointers).unwrap_or_default();
        if from.len() != 1 {
            table.error("from", "name the one place of the hash, e.g. \"query:bodySHA256\"");
        }
        let hash = table.choice("hash", Hash::CHOICES).unwrap_or(Hash::Sha256);
        let encoding = table.choice("encoding", TagEncoding::CHOICES).unwrap_or_default();
        table.finish();
        Some(Self { from: from.into_iter().next()?, hash, encoding })
    }
}

/// `ts = { from, unit, tolerance, optional }`
#[derive(Debug)]
pub(crate) struct TsRule {
    /// Where it stands.
    pub(crate) from: TsFrom,
    /// How it counts.
    pub(crate) unit: Unit,
    /// How far it may be from the clock.
    pub(crate) tolerance: Tolerance,
    /// Whether it may be missing.
    pub(crate) optional: bool,
}

/// Where the timestamp stands.
#[derive(Debug)]
pub(crate) enum TsFrom {
    /// At the first of these places that has one.
    Places(Vec<Place>),
    /// Beside the signature, under this label.
    Label(String),
}

impl TsRule {
    /// The places where it may stand.
    pub(crate) fn places(&self) -> &[Place] {
        match &self.from {
            TsFrom::Places(places) => places,
            TsFrom::Label(_) => &[],
        }
    }

    /// Reads the table `ts`.
    pub(crate) fn read(mut table: Table, pointers: &mut Pointers) -> Option<Self> {
        let texts = table.texts("from");
        let label = match texts.as_deref() {
            Some([text]) => text.strip_prefix("sig:").map(str::to_owned),
            Some(_) => None,
            None => {
                table.error(
                    "",
                    "ts.from is missing: say where the timestamp stands, e.g. \"header:X-Timestamp\"",
                );
                None
            }
        };
        let from = match label {
            Some(label) => Some(TsFrom::Label(label)),
            None => places(&mut table, "from", pointers).map(TsFrom::Places),
        };
        let units = [
            ("s", Unit::Seconds),
            ("ms", Unit::Millis),
            ("s_or_ms", Unit::SecondsOrMillis),
            ("rfc3339", Unit::Rfc3339),
            ("opaque", Unit::Opaque),
        ];
        let unit = table.choice("unit", &units).unwrap_or_default();
        let tolerance = match table.duration_or_seconds("tolerance") {
            Some(limit) if !limit.is_zero() => Tolerance::Within(limit),
            _ => Tolerance::Off,
        };
        if unit == Unit::Opaque && tolerance != Tolerance::Off {
            table.error(
                "tolerance",
                "an opaque timestamp cannot be checked: drop the tolerance or name the unit",
            );
        }
        let optional = table.flag("optional").unwrap_or(false);
        table.finish();
        Some(Self { from: from?, unit, tolerance, optional })
    }
}

/// How a timestamp counts.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unit {
    #[default]
    Seconds,
    Millis,
    SecondsOrMillis,
    Rfc3339,
    /// Not to be read.
    Opaque,
}

/// A timestamp that was read, in milliseconds, and how fine it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stamp {
    pub(crate) millis: i64,
    pub(crate) whole_seconds: bool,
}

impl Unit {
    /// Reads a timestamp: digits and nothing else, or RFC 3339. `None` if it is none.
    pub(crate) fn parse(self, text: &str) -> Option<Stamp> {
        match self {
            Self::Seconds => seconds(digits(text)?),
            Self::Millis => Some(Stamp { millis: digits(text)?, whole_seconds: false }),
            Self::SecondsOrMillis => match digits(text)? {
                count if count > SECONDS_MAX => Some(Stamp { millis: count, whole_seconds: false }),
                count => seconds(count),
            },
            Self::Rfc3339 if text.len() <= RFC3339_MAX => {
                let time: Timestamp = text.parse().ok()?;
                Some(Stamp { millis: time.as_millisecond(), whole_seconds: false })
            }
            Self::Rfc3339 | Self::Opaque => None,
        }
    }

    /// Writes a timestamp.
    pub(crate) fn print(self, now: Timestamp) -> String {
        match self {
            Self::Millis => now.as_millisecond().to_string(),
            Self::Rfc3339 => now.to_string(),
            Self::Seconds | Self::SecondsOrMillis | Self::Opaque => now.as_second().to_string(),
        }
    }
}

fn seconds(count: i64) -> Option<Stamp> {
    Some(Stamp { millis: count.checked_mul(1_000)?, whole_seconds: true })
}

/// `parse` alone would take a plus sign.
fn digits(text: &str) -> Option<i64> {
    let plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if plain { text.parse().ok() } else { None }
}
