//! Secrets: how a provider writes them, and the keys made of them.
//!
//! Invariant: no key is empty, and no message holds a secret. An empty key would let anybody sign.

use std::fmt;
use std::ops::RangeInclusive;
use std::sync::Arc;

use base64::Engine;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use ring::hmac;
use subtle::ConstantTimeEq as _;
use unicode_normalization::UnicodeNormalization as _;

use super::public_key::PublicKey;
use super::signature::{Algorithm, Hash};
use super::token_key::TokenKey;
use crate::settings::Table;

/// Providers print secrets without padding and with stray low bits; their own libraries take both.
pub(super) const LENIENT: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new()
        .with_decode_allow_trailing_bits(true)
        .with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Bytes of a secret that we sign with; shorter ones can be guessed.
const WEBHOOKS_BYTES: RangeInclusive<usize> = 16..=512;

/// A secret, decoded and ready for use; never printed.
#[derive(Clone)]
pub struct Key {
    inner: Inner,
    note: Option<&'static str>,
}

#[derive(Clone)]
enum Inner {
    Hmac(hmac::Key),
    Token(Arc<[u8]>),
    Public(PublicKey),
    Tokens(Arc<[TokenKey]>),
}

impl Key {
    pub(crate) fn hmac(algorithm: hmac::Algorithm, bytes: &[u8]) -> Self {
        Self { inner: Inner::Hmac(hmac::Key::new(algorithm, bytes)), note: None }
    }

    /// Of a Standard Webhooks secret, read as that preset reads it; here to sign with, so it must not be a weak one.
    ///
    /// # Errors
    /// What is wrong with the secret, without the secret.
    pub(crate) fn webhooks(secret: &str) -> Result<Self, String> {
        let rule = KeyRule {
            encoding: Encoding::Base64,
            strip_prefix: Some("whsec_".to_owned()),
            ..KeyRule::default()
        };
        let bytes = rule.decode(secret)?;
        if !WEBHOOKS_BYTES.contains(&bytes.len()) {
            let (least, most) = (WEBHOOKS_BYTES.start(), WEBHOOKS_BYTES.end());
            return Err(format!(
                "the secret has {} bytes, decoded: {least} to {most} are wanted",
                bytes.len()
            ));
        }
        Ok(Self::hmac(hmac::HMAC_SHA256, &bytes))
    }

    pub(crate) fn token(bytes: &[u8]) -> Self {
        Self { inner: Inner::Token(bytes.into()), note: None }
    }

    pub(crate) fn public(key: PublicKey) -> Self {
        Self { inner: Inner::Public(key), note: None }
    }

    /// Whether both are made of the same secret.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        match (&self.inner, &other.inner) {
            // A key of this kind can only be compared by what it does.
            (Inner::Hmac(one), Inner::Hmac(two)) => {
                let tag = |key| hmac::sign(key, b"which key is this").as_ref().to_vec();
                one.algorithm() == two.algorithm() && tag(one) == tag(two)
            }
            (Inner::Token(one), Inner::Token(two)) => one == two,
            (Inner::Public(one), Inner::Public(two)) => one == two,
            (Inner::Tokens(one), Inner::Tokens(two)) => one == two,
            (Inner::Hmac(_) | Inner::Token(_) | Inner::Public(_) | Inner::Tokens(_), _) => false,
        }
    }

    pub(crate) fn tokens(keys: Vec<TokenKey>) -> Self {
        Self { inner: Inner::Tokens(keys.into()), note: None }
    }

    /// The same key under the name that a provider's requests have for it.
    #[must_use]
    pub fn named(self, id: &str) -> Self {
        let inner = match self.inner {
            Inner::Public(key) => Inner::Public(key.named(id)),
            Inner::Tokens(keys) => Inner::Tokens(keys.iter().cloned().map(|key| key.named(id)).collect()),
            inner => inner,
        };
        Self { inner, ..self }
    }

    /// The key, with what is odd about the secret that it was made of.
    pub(crate) fn noting(self, note: Option<&'static str>) -> Self {
        Self { note, ..self }
    }

    /// What is odd about the form of the secret, for whom it does not match; nothing of the secret itself.
    pub(crate) fn note(&self) -> Option<&'static str> {
        self.note
    }

    /// Whether both verify the same. Told in constant time, by what they sign: the key of an HMAC cannot be read back.
    pub(crate) fn is(&self, other: &Self) -> bool {
        const PROBE: &[u8] = b"one key or two";
        match (&self.inner, &other.inner) {
            (Inner::Hmac(a), Inner::Hmac(b)) => {
                a.algorithm() == b.algorithm()
                    && hmac::sign(a, PROBE).as_ref().ct_eq(hmac::sign(b, PROBE).as_ref()).into()
            }
            (Inner::Token(a), Inner::Token(b)) => a.ct_eq(b).into(),
            _ => false,
        }
    }

    pub(crate) fn as_hmac(&self) -> Option<&hmac::Key> {
        match &self.inner {
            Inner::Hmac(key) => Some(key),
            Inner::Token(_) | Inner::Public(_) | Inner::Tokens(_) => None,
        }
    }

    pub(crate) fn as_token(&self) -> Option<&[u8]> {
        match &self.inner {
            Inner::Token(bytes) => Some(bytes),
            Inner::Hmac(_) | Inner::Public(_) | Inner::Tokens(_) => None,
        }
    }

    pub(crate) fn as_public(&self) -> Option<&PublicKey> {
        match &self.inner {
            Inner::Public(key) => Some(key),
            Inner::Hmac(_) | Inner::Token(_) | Inner::Tokens(_) => None,
        }
    }

    /// The keys for tokens that stand in one secret.
    pub(crate) fn as_tokens(&self) -> &[TokenKey] {
        match &self.inner {
            Inner::Tokens(keys) => keys,
            Inner::Hmac(_) | Inner::Token(_) | Inner::Public(_) => &[],
        }
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(…)")
    }
}

/// How the text of a secret becomes the bytes of a key: `key = { strip_prefix = "whsec_", encoding = "base64" }`.
#[derive(Debug, Default)]
pub(crate) struct KeyRule {
    encoding: Encoding,
    strip_prefix: Option<String>,
    raw_without_prefix: bool,
    nfkd: bool,
    hash: Option<Hash>,
}

/// How the bytes of a key are written.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) enum Encoding {
    #[default]
    Utf8,
    Base64,
    Hex,
}

impl KeyRule {
    /// Reads the table `key`.
    pub(crate) fn read(mut table: Table) -> Self {
        let encodings = [("utf8", Encoding::Utf8), ("base64", Encoding::Base64), ("hex", Encoding::Hex)];
        let encoding = table.choice("encoding", &encodings).unwrap_or_default();
        let strip_prefix = table.text("strip_prefix");
        let raw_without_prefix = table.flag("raw_without_prefix").unwrap_or(false);
        if strip_prefix.as_deref() == Some("") {
            table.error("strip_prefix", "is empty: leave it out, or name what to cut");
        }
        if raw_without_prefix && strip_prefix.is_none() {
            table.error(
                "raw_without_prefix",
                "needs strip_prefix: it says what to do with secrets that lack it",
            );
        }
        let nfkd = table.choice("normalize", &[("nfkd", true)]).unwrap_or(false);
        if nfkd && encoding != Encoding::Utf8 {
            table.error("normalize", "is for secrets that are text: drop it, or encoding");
        }
        let hash = table.choice("hash", Hash::CHOICES);
        table.finish();
        Self { encoding, strip_prefix, raw_without_prefix, nfkd, hash }
    }

    /// The key's bytes; the length is checked after decoding, since a prefix alone decodes to nothing.
    ///
    /// # Errors
    /// What is wrong with the secret, without the secret.
    pub(crate) fn decode(&self, secret: &str) -> Result<Vec<u8>, String> {
        if secret.trim().is_empty() {
            return Err("the secret is empty".to_owned());
        }
        if secret.trim() != secret {
            return Err("the secret starts or ends with white space: cut it, it was hardly meant".to_owned());
        }
        let normal: String;
        let secret = if self.nfkd {
            normal = secret.nfkd().collect();
            normal.as_str()
        } else {
            secret
        };
        let stripped = self.strip_prefix.as_ref().and_then(|prefix| secret.strip_prefix(prefix.as_str()));
        let encoding = match stripped {
            None if self.raw_without_prefix => Encoding::Utf8,
            _ => self.encoding,
        };
        let text = stripped.unwrap_or(secret);
        let bytes = match encoding {
            Encoding::Utf8 => text.as_bytes().to_vec(),
            Encoding::Base64 => LENIENT.decode(text).or(Err("the secret is not base64"))?,
            Encoding::Hex => hex::decode(text).or(Err("the secret is not an even number of hex digits"))?,
        };
        if bytes.is_empty() {
            return Err(self.nothing_left());
        }
        Ok(match self.hash {
            Some(hash) => hash.digest([bytes.as_slice()]).as_ref().to_vec(),
            None => bytes,
        })
    }

    /// A public key for signatures of that kind.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn decode_public(&self, algorithm: Algorithm, text: &str) -> Result<PublicKey, String> {
        let stripped = self.strip_prefix.as_ref().and_then(|prefix| text.strip_prefix(prefix.as_str()));
        PublicKey::parse(algorithm, self.encoding, stripped.unwrap_or(text))
    }

    /// What is odd about a secret's form.
    pub(crate) fn note(&self, secret: &str) -> Option<&'static str> {
        let quoted = |quote| secret.len() > 1 && secret.starts_with(quote) && secret.ends_with(quote);
        let known = "whsec_";
        match &self.strip_prefix {
            _ if quoted('"') || quoted('\'') => Some("stands in quotes, and they are taken for a part of it"),
            Some(prefix) if !secret.starts_with(prefix.as_str()) => {
                Some("lacks the prefix of this provider's secrets")
            }
            None if secret.starts_with(known) => {
                Some("starts with whsec_, which is a part of the key in this scheme")
            }
            _ => None,
        }
    }

    fn nothing_left(&self) -> String {
        match &self.strip_prefix {
            Some(prefix) => format!("the secret is empty after {prefix:?}"),
            None => "the secret is empty after decoding".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::settings::File;

    use super::*;

    fn rule(toml: &str) -> KeyRule {
        let (file, table) = File::parse("test", toml);
        let rule = KeyRule::read(table);
        assert_eq!(file.take_problems(), []);
        rule
    }

    #[test]
    fn secrets_are_decoded_as_providers_print_them() {
        let webhooks = rule("strip_prefix = \"whsec_\"\nencoding = \"base64\"");
        for text in ["whsec_AAEC", "AAEC"] {
            assert_eq!(webhooks.decode(text).unwrap(), [0, 1, 2]);
        }
        assert_eq!(webhooks.decode("whsec_AAE").unwrap(), [0, 1], "no padding");
        assert_eq!(webhooks.decode("whsec_AAE=").unwrap(), [0, 1], "padding");
        assert_eq!(webhooks.decode("whsec_AAF=").unwrap(), [0, 1], "stray low bits");
        let either = rule("strip_prefix = \"whsec_\"\nencoding = \"base64\"\nraw_without_prefix = true");
        assert_eq!(either.decode("AAEC").unwrap(), b"AAEC");
        assert_eq!(either.decode("whsec_AAEC").unwrap(), [0, 1, 2]);
        assert_eq!(rule("").decode("whsec_AAEC").unwrap(), b"whsec_AAEC");
        assert_eq!(rule("encoding = \"hex\"").decode("00fF").unwrap(), [0, 255]);
    }

    #[test]
    fn a_secret_that_is_no_key_is_refused_without_being_shown() {
        let webhooks = "strip_prefix = \"whsec_\"\nencoding = \"base64\"";
        for (toml, secret) in [
            ("", ""),
            ("", " \t\n"),
            ("", "s3cret "),
            ("", "s3cret\n"),
            ("", " s3cret"),
            (webhooks, "whsec_"),
            (webhooks, "whsec_="),
            (webhooks, "whsec_s3cret!"),
            ("encoding = \"hex\"", "s3cret"),
            ("encoding = \"hex\"", "abc"),
        ] {
            let message = rule(toml).decode(secret).unwrap_err();
            assert!(!message.contains("s3cret"), "{message}");
        }
        assert_eq!(format!("{:?}", Key::token(b"s3cret")), "Key(…)");
    }
}
