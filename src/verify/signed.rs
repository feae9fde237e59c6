//! Which key made a signature, found without telling by the time that it takes.
//!
//! Invariant: every key is tried on every signature that the request offers, decoded signatures are compared in constant
//! time, and a form of which a part is missing is never made up.

use std::borrow::Cow;

use ring::hmac;
use subtle::{Choice, ConditionallySelectable, ConstantTimeEq};

use super::content::Inputs;
use crate::error::Code;
use crate::guard::SignedBytes;
use crate::parts::{Fault, Parts};
use crate::provider::public_key::PublicKey;
use crate::provider::signature::{Algorithm, Hash, SaidHash, SigRule, Tag, TagEncoding};
use crate::provider::template::Template;
use crate::provider::{Key, Scheme};

/// Most signatures made with a private key that one request may offer: each costs a hundred times as much as a hash.
const PUBLIC_CANDIDATES_MAX: usize = 8;

/// What the body hashes to, as far as the request says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Hashed {
    /// The scheme has no such thing.
    NotSaid,
    /// The request does not say it.
    Absent,
    /// It says it, and it is so.
    Right,
}

/// Whether the request says what the pieces hash to; an error if it says something else.
pub(super) fn said_hash(rule: Option<&SaidHash>, parts: &Parts<'_>, pieces: &[&[u8]]) -> Result<Hashed, ()> {
    let Some(rule) = rule else { return Ok(Hashed::NotSaid) };
    let Some(text) = parts.read(&rule.from).or(Err(()))? else { return Ok(Hashed::Absent) };
    let said = rule.encoding.decode(&text, rule.hash);
    let is = rule.hash.digest(pieces.iter().copied());
    let right = said.is_some_and(|said| said.as_bytes().ct_eq(is.as_ref()).into());
    if right { Ok(Hashed::Right) } else { Err(()) }
}

/// The name that the request has for the key.
pub(super) fn key_id<'a>(scheme: &Scheme, parts: &Parts<'a>) -> Result<Option<Cow<'a, str>>, Code> {
    let Some(place) = &scheme.key_id else { return Ok(None) };
    parts.read(place).map_err(|fault| match fault {
        Fault::Twice => Code::HeaderRepeated,
        Fault::Invalid | Fault::NotJson => Code::SignatureMalformed,
    })
}

/// What was signed, in one of the forms that there are of it, and how.
pub(super) struct Signed<'t, 'p> {
    pub(super) algorithm: Algorithm,
    pub(super) sign: &'t [Template],
    pub(super) inputs: Inputs<'t, 'p>,
    pub(super) body_hash: Hashed,
    pub(super) key_id: Option<Cow<'t, str>>,
}

impl Signed<'_, '_> {
    /// The bytes of that form, without the secret: a new secret makes no other bytes.
    pub(super) fn bytes(&self, form: usize) -> Result<SignedBytes, Code> {
        let sign = self.sign.get(form).ok_or(Code::Internal)?;
        let content = (Inputs { secret: Some(&[]), ..self.inputs }).content(sign)?;
        Ok(SignedBytes::of(content.iter().map(AsRef::as_ref)))
    }

    /// Which key made one of the signatures, and over which form. Every key is tried on every one, so that the time
    /// taken does not tell which one matched.
    pub(super) fn check(
        &self,
        keys: &[Key],
        rule: &SigRule,
        candidates: &[&str],
    ) -> Result<(usize, usize), Code> {
        match self.algorithm {
            Algorithm::Hmac(hash) => {
                let tags = decode(rule, hash, candidates)?;
                self.matching(keys, |key, content, matched| {
                    let Some(expected) = key.as_hmac().map(|key| tag(key, content)) else { return };
                    matched.add_tags(expected.as_ref(), &tags);
                })
            }
            Algorithm::Hash(hash) => {
                let tags = decode(rule, hash, candidates)?;
                self.matching(keys, |_, content, matched| {
                    matched.add_tags(hash.digest(content.iter().map(AsRef::as_ref)).as_ref(), &tags);
                })
            }
            Algorithm::Ed25519 | Algorithm::EcdsaP256(_) | Algorithm::RsaPkcs1(_) => {
                let signatures = decode_any(rule, candidates)?;
                self.matching(keys, |key, content, matched| {
                    let id = self.key_id.as_deref();
                    let Some(key) = key.as_public().filter(|key| key.may_be(id)) else { return };
                    let content = content.concat();
                    let verifies = |text: &Vec<u8>| key.verifies(self.algorithm, &content, text);
                    matched.add(u8::from(signatures.iter().any(verifies)).into());
                })
            }
        }
    }

    /// As [`Self::check`], with keys out of certificates. The source's keys are then texts that are part of what is signed;
    /// which of them was is returned.
    pub(super) fn check_certified(
        &self,
        secrets: &[Key],
        public: &[PublicKey],
        rule: &SigRule,
        candidates: &[&str],
    ) -> Result<(usize, usize), Code> {
        let signatures = decode_any(rule, candidates)?;
        if public.is_empty() {
            return Err(Code::KeyUnfit);
        }
        // Where no secret is signed, one that nobody looks at stands for all.
        let nothing = [Key::token(&[])];
        let secrets = if secrets.is_empty() { &nothing } else { secrets };
        self.matching(secrets, |_, content, matched| {
            let content = content.concat();
            let verifies = |key: &PublicKey, text: &Vec<u8>| key.verifies(self.algorithm, &content, text);
            let right = public.iter().any(|key| signatures.iter().any(|text| verifies(key, text)));
            matched.add(u8::from(right).into());
        })
    }

    /// The key for which some form matches; a form of which a part is missing is passed over.
    fn matching(
        &self,
        keys: &[Key],
        compare: impl Fn(&Key, &[Cow<'_, [u8]>], &mut Matching<'_>),
    ) -> Result<(usize, usize), Code> {
        let mut matched = Match::default();
        let mut nothing = None;
        for (form, sign) in (0..).zip(self.sign) {
            if self.body_hash == Hashed::Absent && !sign.has_body() {
                nothing = Some(Code::BodyNotSigned);
                continue;
            }
            for (index, key) in (0..).zip(keys) {
                let secret = key.as_token();
                match (Inputs { secret, ..self.inputs }).content(sign) {
                    Ok(content) => {
                        compare(key, &content, &mut Matching { matched: &mut matched, index, form });
                    }
                    Err(code) => {
                        nothing = Some(code);
                        break;
                    }
                }
            }
        }
        match (matched.key(), nothing) {
            // No form could be put together at all.
            (Err(_), Some(code)) if matched.compared == 0 => Err(code),
            (key, _) => Ok((key?, usize::try_from(matched.form).or(Err(Code::Internal))?)),
        }
    }
}

/// The candidates that can be signatures of this hash. One that cannot is skipped: a provider that rolls its scheme
/// sends old and new ones side by side.
fn decode(rule: &SigRule, hash: Hash, candidates: &[&str]) -> Result<Vec<Tag>, Code> {
    let tags: Vec<Tag> = candidates.iter().filter_map(|text| rule.encoding.decode(text, hash)).collect();
    if tags.is_empty() { Err(Code::SignatureMalformed) } else { Ok(tags) }
}

/// The signatures that were made with a private key; what is no such thing is skipped.
pub(super) fn decode_any(rule: &SigRule, candidates: &[&str]) -> Result<Vec<Vec<u8>>, Code> {
    if candidates.len() > PUBLIC_CANDIDATES_MAX {
        return Err(Code::SignatureMalformed);
    }
    let found: Vec<_> = candidates.iter().filter_map(|text| rule.encoding.decode_any(text)).collect();
    if found.is_empty() { Err(Code::SignatureMalformed) } else { Ok(found) }
}

/// Which key matched, found without a branch on what matched.
#[derive(Default)]
pub(super) struct Match {
    right: u8,
    key: u64,
    /// Which form of what is signed.
    form: u64,
    compared: usize,
}

impl Match {
    pub(super) fn add(&mut self, key: u64, form: u64, equal: Choice) {
        self.key.conditional_assign(&key, equal);
        self.form.conditional_assign(&form, equal);
        self.right |= equal.unwrap_u8();
        self.compared += 1;
    }

    pub(super) fn key(&self) -> Result<usize, Code> {
        if self.right == 0 {
            return Err(Code::SignatureMismatch);
        }
        usize::try_from(self.key).or(Err(Code::Internal))
    }
}

/// The match of one key.
struct Matching<'m> {
    matched: &'m mut Match,
    index: u64,
    form: u64,
}

impl Matching<'_> {
    pub(super) fn add(&mut self, equal: Choice) {
        self.matched.add(self.index, self.form, equal);
    }

    fn add_tags(&mut self, expected: &[u8], tags: &[Tag]) {
        for tag in tags {
            self.add(expected.ct_eq(tag.as_bytes()));
        }
    }
}

/// The signature of the content.
pub(crate) fn tag(key: &hmac::Key, content: &[Cow<'_, [u8]>]) -> hmac::Tag {
    let mut signer = hmac::Context::with_key(key);
    for piece in content {
        signer.update(piece);
    }
    signer.sign()
}

pub(super) fn check_token<'c>(keys: &[Key], given: impl Iterator<Item = &'c [u8]>) -> Result<usize, Code> {
    let given: Vec<_> = given.collect();
    let mut matched = Match::default();
    for (index, key) in (0..).zip(keys).filter_map(|(index, key)| Some((index, key.as_token()?))) {
        for given in &given {
            matched.add(index, 0, key.ct_eq(given));
        }
    }
    matched.key()
}

/// `name:password` of `Basic …`; `None` if it is something else.
pub(super) fn credentials(text: &str) -> Option<Vec<u8>> {
    let (scheme, given) = text.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    TagEncoding::Base64.decode_any(given.trim_start())
}
