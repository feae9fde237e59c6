//! JWK and sets of them (RFC 7517): what they say of their key, and its bytes.
//!
//! Invariant: a key counts only for what it says that it is for, and only as long as it does not say that it has ended.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::{Form, Material, RSA_BITS_MIN, TokenKey, sound_point};
use crate::provider::jwt::Alg;

/// One JWK or a set of them.
pub(super) struct Jwks(Vec<Entry>);

#[derive(Deserialize)]
struct Set {
    keys: Vec<Entry>,
}

/// What nobody here understands hides no other key (RFC 7517, 5).
#[derive(Deserialize)]
#[serde(untagged)]
enum Entry {
    Key(Box<Jwk>),
    Other(IgnoredAny),
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
    pub(super) fn parse(text: &str) -> Result<Option<Self>, String> {
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
        Ok(Some(Self(vec![Entry::Key(one)])))
    }

    /// Those that can be used; of one that stands alone, why it cannot.
    pub(super) fn keys(self) -> Result<Vec<TokenKey>, String> {
        if let [one] = self.0.as_slice() {
            return one.key().map(|key| vec![key]);
        }
        Ok(self.0.iter().filter_map(|one| one.key().ok()).collect())
    }
}

impl Entry {
    fn key(&self) -> Result<TokenKey, String> {
        match self {
            Self::Key(key) => key.key(),
            Self::Other(_) => Err("this JWK cannot be read: a member is missing, or is no text".to_owned()),
        }
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
