//! Keys of tokens: how they are written (a text, PEM, JWK and JWKS of RFC 7517), and what they verify.
//!
//! Invariant: a key is used only with algorithms of its own kind, and what everybody can read never becomes a shared
//! secret, be it the text of a public key or a secret in a set that is published: anybody could sign with it.

mod jwk;

use std::sync::Arc;

use p521::ecdsa::signature::Verifier as _;
use ring::hmac;
use ring::signature::{self, RsaPublicKeyComponents, UnparsedPublicKey, VerificationAlgorithm};
use spki::{ObjectIdentifier, SubjectPublicKeyInfoRef};
use subtle::{Choice, ConstantTimeEq as _};

use super::jwt::{Alg, JwtRule};
use super::key::KeyRule;
use super::public_key::{self, Pem};
use jwk::Jwks;

/// Bits of the smallest RSA modulus that ring verifies with.
const RSA_BITS_MIN: usize = 2048;
/// Most keys in one set: each may cost a computation per request.
const KEYS_MAX: usize = 16;
/// Most keys in a set that is published, where keys for other uses stand too. A token that names its key is tried with no
/// other.
const PUBLISHED_MAX: usize = 64;

const ID_ED25519: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.3.101.112");
const ID_RSA: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.113549.1.1.1");
const ID_EC: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.10045.2.1");
const ID_P256: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.10045.3.1.7");
const ID_P384: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.3.132.0.34");
const ID_P521: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.3.132.0.35");

/// One key.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct TokenKey {
    /// Its name; a token that names another key is not tried with it.
    id: Option<Arc<str>>,
    /// The one algorithm that it is for, if it says so.
    alg: Option<Alg>,
    material: Material,
}

#[derive(Clone, PartialEq, Eq)]
enum Material {
    Secret(Arc<[u8]>),
    /// Modulus and exponent, without leading zeros.
    Rsa(Arc<[u8]>, Arc<[u8]>),
    Public(Form, Arc<[u8]>),
    /// The certificate of an authority, in DER.
    Root(Arc<[u8]>),
}

/// What the bytes of a public key are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// `RSAPublicKey` of PKCS#1.
    Rsa,
    Ed25519,
    /// Uncompressed points.
    P256,
    P384,
    P521,
}

impl TokenKey {
    /// Reads the text of a secret: a text that both sides know, PEM, a JWK or a set of them.
    ///
    /// # Errors
    /// What is wrong with it, without the secret.
    pub(super) fn read(rule: &JwtRule, key: &KeyRule, text: &str) -> Result<Vec<Self>, String> {
        let found = if rule.chain.is_some() {
            vec![root(text)?]
        } else if let Some(set) = Jwks::parse(text)? {
            set.keys()?
        } else if let Some(pem) = Pem::find(text)? {
            let material = public(&pem.public_key()?)?;
            vec![Self { id: pem.name().map(Into::into), alg: None, material }]
        } else if let Ok(material) = public_key::base64(text).and_then(|der| public(&der)) {
            vec![Self::plain(material)]
        } else if rule.has_hmac() {
            vec![Self::plain(Material::Secret(key.decode(text)?.into()))]
        } else {
            return Err(format!(
                "this is no public key for {}: give PEM, a JWK or a set of them",
                names(&rule.algs)
            ));
        };
        let fits = |key: &Self| rule.algs.iter().any(|alg| key.fits(*alg));
        let usable: Vec<Self> = found.into_iter().filter(fits).collect();
        match usable.len() {
            0 => Err(format!("this is no key for {}", names(&rule.algs))),
            count if count > KEYS_MAX => {
                Err(format!("{count} keys in one set, and {KEYS_MAX} are the limit"))
            }
            _ => Ok(usable),
        }
    }

    /// Reads a set that everybody can read: its public keys for signatures.
    ///
    /// # Errors
    /// There is none that can be used.
    pub(super) fn published(text: &str) -> Result<Vec<Self>, String> {
        let set = Jwks::parse(text)?.ok_or("this is no key set: JSON with \"keys\" (RFC 7517)")?;
        let public = |key: &Self| !matches!(key.material, Material::Secret(_));
        let found: Vec<Self> = set.keys()?.into_iter().filter(public).collect();
        match found.len() {
            0 => Err("there is no public key for signatures in this set".to_owned()),
            count if count > PUBLISHED_MAX => {
                Err(format!("{count} keys in one set, and {PUBLISHED_MAX} are the limit"))
            }
            _ => Ok(found),
        }
    }

    /// The key of a certificate.
    pub(crate) fn of_certificate(info: &SubjectPublicKeyInfoRef<'_>) -> Option<Self> {
        of_info(info).ok().map(Self::plain)
    }

    /// A key that nothing is signed with.
    pub(crate) fn none() -> Self {
        Self::plain(Material::Root(Arc::new([])))
    }

    fn plain(material: Material) -> Self {
        Self { id: None, alg: None, material }
    }

    /// The same key under a name.
    pub(crate) fn named(self, id: &str) -> Self {
        Self { id: Some(id.into()), ..self }
    }

    /// The key's name.
    pub(crate) fn id(&self) -> Option<&str> {
        self.id.as_deref()
    }

    /// Whether a token may be tried with it: where both name a key, it is the same.
    pub(crate) fn may_be(&self, id: Option<&str>) -> bool {
        id.is_none() || self.id().is_none() || self.id() == id
    }

    /// The certificate that chains have to end at.
    pub(crate) fn root(&self) -> Option<&[u8]> {
        match &self.material {
            Material::Root(der) => Some(der),
            _ => None,
        }
    }

    /// Whether the key is of the algorithm's kind.
    pub(crate) fn fits(&self, alg: Alg) -> bool {
        let kind = match (&self.material, alg) {
            (Material::Secret(_), alg) => alg.hmac().is_some(),
            (Material::Rsa(..) | Material::Public(Form::Rsa, _), Alg::Rs256 | Alg::Rs384 | Alg::Rs512)
            | (Material::Public(Form::P256, _), Alg::Es256)
            | (Material::Public(Form::P384, _), Alg::Es384)
            | (Material::Public(Form::P521, _), Alg::Es512)
            | (Material::Public(Form::Ed25519, _), Alg::EdDsa) => true,
            // What chains from it has the key.
            (Material::Root(_), alg) => alg.hmac().is_none(),
            _ => false,
        };
        kind && self.alg.is_none_or(|own| own == alg)
    }

    /// Whether the signature is one of the content by the key's owner.
    pub(crate) fn verifies(&self, alg: Alg, content: &[u8], signature: &[u8]) -> Choice {
        match &self.material {
            _ if !self.fits(alg) => 0.into(),
            Material::Secret(secret) => match alg.hmac() {
                Some(hash) => mac(hash, secret, content).as_ref().ct_eq(signature),
                None => 0.into(),
            },
            Material::Rsa(n, e) => {
                let key = RsaPublicKeyComponents { n, e };
                let right = rsa(alg).is_some_and(|rsa| key.verify(rsa, content, signature).is_ok());
                u8::from(right).into()
            }
            Material::Public(Form::P521, point) => u8::from(p521_verifies(point, content, signature)).into(),
            Material::Public(_, bytes) => {
                let right = verification(alg)
                    .is_some_and(|by| UnparsedPublicKey::new(by, bytes).verify(content, signature).is_ok());
                u8::from(right).into()
            }
            Material::Root(_) => 0.into(),
        }
    }

    /// The keyed hash of the content, by whoever knows the secret.
    pub(crate) fn sign(&self, alg: Alg, content: &[u8]) -> Option<hmac::Tag> {
        match &self.material {
            Material::Secret(secret) if self.fits(alg) => Some(mac(alg.hmac()?, secret, content)),
            _ => None,
        }
    }
}

fn names(algs: &[Alg]) -> String {
    algs.iter().map(|alg| alg.name()).collect::<Vec<_>>().join(", ")
}

fn mac(hash: hmac::Algorithm, secret: &[u8], content: &[u8]) -> hmac::Tag {
    hmac::sign(&hmac::Key::new(hash, secret), content)
}

fn rsa(alg: Alg) -> Option<&'static signature::RsaParameters> {
    match alg {
        Alg::Rs256 => Some(&signature::RSA_PKCS1_2048_8192_SHA256),
        Alg::Rs384 => Some(&signature::RSA_PKCS1_2048_8192_SHA384),
        Alg::Rs512 => Some(&signature::RSA_PKCS1_2048_8192_SHA512),
        _ => None,
    }
}

fn verification(alg: Alg) -> Option<&'static dyn VerificationAlgorithm> {
    match alg {
        Alg::Es256 => Some(&signature::ECDSA_P256_SHA256_FIXED),
        Alg::Es384 => Some(&signature::ECDSA_P384_SHA384_FIXED),
        Alg::EdDsa => Some(&signature::ED25519),
        alg => rsa(alg).map(|rsa| rsa as &dyn VerificationAlgorithm),
    }
}

/// ring has no P-521.
fn p521_verifies(point: &[u8], content: &[u8], signature: &[u8]) -> bool {
    let key = p521::ecdsa::VerifyingKey::from_sec1_bytes(point);
    let signature = p521::ecdsa::Signature::from_slice(signature);
    matches!((key, signature), (Ok(key), Ok(signature)) if key.verify(content, &signature).is_ok())
}

fn root(text: &str) -> Result<TokenKey, String> {
    let der = match Pem::find(text)? {
        Some(pem) => pem.certificate()?,
        None => public_key::base64(text)?,
    };
    let sound = webpki::anchor_from_trusted_cert(&der.as_slice().into()).is_ok();
    if !sound {
        return Err("this is no certificate of an authority: give it as PEM or base64 of DER".to_owned());
    }
    Ok(TokenKey::plain(Material::Root(der.into())))
}

/// A `SubjectPublicKeyInfo`.
fn public(der: &[u8]) -> Result<Material, String> {
    let info = SubjectPublicKeyInfoRef::try_from(der);
    of_info(&info.or(Err("the public key is neither PEM nor base64 of DER"))?)
}

fn of_info(info: &SubjectPublicKeyInfoRef<'_>) -> Result<Material, String> {
    let key = info.subject_public_key.as_bytes().ok_or("the public key is not whole bytes")?;
    let curve = info.algorithm.parameters_oid().ok();
    let form = match (info.algorithm.oid, curve) {
        (ID_ED25519, _) => Form::Ed25519,
        (ID_RSA, _) => Form::Rsa,
        (ID_EC, Some(ID_P256)) => Form::P256,
        (ID_EC, Some(ID_P384)) => Form::P384,
        (ID_EC, Some(ID_P521)) => Form::P521,
        _ => return Err("the public key is of a kind that no token is signed with".to_owned()),
    };
    // The modulus and the exponent have some bytes around them.
    if form == Form::Rsa && key.len() <= RSA_BITS_MIN / 8 {
        return Err(format!("the RSA key has less than {RSA_BITS_MIN} bits"));
    }
    sound_point(form, key)?;
    Ok(Material::Public(form, key.into()))
}

fn sound_point(form: Form, point: &[u8]) -> Result<(), String> {
    let sound = match form {
        Form::P256 => p256::ecdsa::VerifyingKey::from_sec1_bytes(point).is_ok() && point.len() == 65,
        Form::P384 => point.first() == Some(&4) && point.len() == 97,
        Form::P521 => p521::ecdsa::VerifyingKey::from_sec1_bytes(point).is_ok() && point.len() == 133,
        Form::Ed25519 => point.len() == 32,
        Form::Rsa => true,
    };
    if sound { Ok(()) } else { Err(format!("the public key is no point of {form:?}")) }
}
