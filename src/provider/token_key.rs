//! Keys of tokens: how they are written (a text, PEM, JWK and JWKS of RFC 7517), and what they verify.
//!
//! Invariant: a key is used only with algorithms of its own kind, and a text that is a public key never becomes a shared
//! secret: everybody knows it, so that anybody could sign with it.

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use p521::ecdsa::signature::Verifier as _;
use ring::hmac;
use ring::signature::{self, RsaPublicKeyComponents, UnparsedPublicKey, VerificationAlgorithm};
use serde::Deserialize;
use spki::{ObjectIdentifier, SubjectPublicKeyInfoRef};
use subtle::{Choice, ConstantTimeEq as _};

use super::jwt::{Alg, JwtRule};
use super::key::KeyRule;
use super::public_key::{self, Pem};

/// Bits of the smallest RSA modulus that ring verifies with.
const RSA_BITS_MIN: usize = 2048;
/// Most keys in one set: each may cost a computation per request.
const KEYS_MAX: usize = 16;

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

/// One JWK or a set of them.
struct Jwks(Vec<Jwk>);

#[derive(Deserialize)]
struct Set {
    keys: Vec<Jwk>,
}

#[derive(Deserialize)]
struct Jwk {
    kty: String,
    kid: Option<String>,
    alg: Option<String>,
    #[serde(rename = "use")]
    usage: Option<String>,
    key_ops: Option<Vec<String>>,
    crv: Option<String>,
    x: Option<String>,
    y: Option<String>,
    n: Option<String>,
    e: Option<String>,
    k: Option<String>,
    d: Option<String>,
    /// Some providers say in the key itself that it is retired.
    expired_at: Option<serde_json::Value>,
}

impl Jwks {
    /// `None` if the text is something else.
    ///
    /// # Errors
    /// It was meant to be that: as a shared secret it would be one that others know.
    fn parse(text: &str) -> Result<Option<Self>, String> {
        let meant = text.contains("\"kty\"") || text.contains("\"keys\"");
        if !meant || !text.trim_start().starts_with('{') {
            return Ok(None);
        }
        if let Ok(set) = serde_json::from_str::<Set>(text) {
            return Ok(Some(Self(set.keys)));
        }
        // The whole message would show a part of the text.
        let place = |error: serde_json::Error| {
            format!("this JWK cannot be read: see its line {}, column {}", error.line(), error.column())
        };
        let one = serde_json::from_str(text).map_err(place)?;
        Ok(Some(Self(vec![one])))
    }

    /// Those that can be used; of one that stands alone, why it cannot.
    fn keys(self) -> Result<Vec<TokenKey>, String> {
        if let [one] = self.0.as_slice() {
            return one.key().map(|key| vec![key]);
        }
        Ok(self.0.iter().filter_map(|key| key.key().ok()).collect())
    }
}

impl Jwk {
    fn key(&self) -> Result<TokenKey, String> {
        let signs = self.usage.as_deref().is_none_or(|usage| usage == "sig");
        let verifies = |ops: &Vec<String>| ops.iter().any(|op| op == "verify");
        if !signs || !self.key_ops.as_ref().is_none_or(verifies) {
            return Err("this JWK is not for signatures (\"use\", \"key_ops\")".to_owned());
        }
        if self.expired_at.as_ref().is_some_and(|at| !at.is_null()) {
            return Err("this JWK says that it has expired".to_owned());
        }
        if self.d.is_some() {
            return Err(
                "this JWK is a private key, which only the provider should have: give the public one"
                    .to_owned(),
            );
        }
        let alg = match self.alg.as_deref() {
            None => None,
            Some(name) => {
                Some(Alg::named(name).ok_or(format!("this JWK is for {name:?}, which is not known"))?)
            }
        };
        Ok(TokenKey { id: self.kid.as_deref().map(Into::into), alg, material: self.material()? })
    }

    fn material(&self) -> Result<Material, String> {
        match (self.kty.as_str(), self.crv.as_deref()) {
            ("EC", Some("P-256")) => self.point(Form::P256, 32),
            ("EC", Some("P-384")) => self.point(Form::P384, 48),
            ("EC", Some("P-521")) => self.point(Form::P521, 66),
            ("OKP", Some("Ed25519")) => {
                let bytes = member("x", self.x.as_ref())?;
                sound_point(Form::Ed25519, &bytes)?;
                Ok(Material::Public(Form::Ed25519, bytes.into()))
            }
            ("RSA", _) => {
                let (n, e) = (member("n", self.n.as_ref())?, member("e", self.e.as_ref())?);
                let (n, e) = (without_zeros(&n), without_zeros(&e));
                if n.len() * 8 < RSA_BITS_MIN {
                    return Err(format!("the RSA key has less than {RSA_BITS_MIN} bits"));
                }
                Ok(Material::Rsa(n.into(), e.into()))
            }
            ("oct", _) => match member("k", self.k.as_ref())? {
                secret if secret.is_empty() => Err("the key is empty".to_owned()),
                secret => Ok(Material::Secret(secret.into())),
            },
            (kty, _) => Err(format!("this JWK is of kind {kty:?}: EC, OKP, RSA and oct are known")),
        }
    }

    /// Coordinates that are too short were written without their leading zeros.
    fn point(&self, form: Form, length: usize) -> Result<Material, String> {
        let mut point = vec![4];
        for (name, text) in [("x", &self.x), ("y", &self.y)] {
            let bytes = member(name, text.as_ref())?;
            point.extend(std::iter::repeat_n(0, length.saturating_sub(bytes.len())));
            point.extend(bytes);
        }
        sound_point(form, &point)?;
        Ok(Material::Public(form, point.into()))
    }
}

fn member(name: &str, text: Option<&String>) -> Result<Vec<u8>, String> {
    let text = text.ok_or_else(|| format!("this JWK lacks {name:?}"))?;
    let bytes = URL_SAFE_NO_PAD.decode(text.trim_end_matches('=')).ok();
    bytes.ok_or_else(|| format!("{name:?} of this JWK is not base64url"))
}

fn without_zeros(bytes: &[u8]) -> &[u8] {
    let start = bytes.iter().position(|byte| *byte != 0).unwrap_or(bytes.len());
    bytes.get(start..).unwrap_or_default()
}
