//! Public keys: how they are written, and what they verify.
//!
//! Invariant: a key is of the kind that its scheme names, whatever the text of the key says of itself.

use std::sync::Arc;

use base64::Engine as _;
use p256::ecdsa::signature::hazmat::PrehashVerifier as _;
use ring::signature::UnparsedPublicKey;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use spki::{ObjectIdentifier, SubjectPublicKeyInfoRef};
use x509_cert::Certificate;
use x509_cert::der::{Decode as _, Encode as _};

use super::key::{Encoding, LENIENT};
use super::signature::{Algorithm, Hash};

/// Bytes of a raw Ed25519 key.
const ED25519: usize = 32;
/// Bytes of an RSA key with a modulus of 2048 bits and the smallest exponent; ring verifies with no shorter one.
const RSA_MIN: usize = 2048 / 8;

const ID_ED25519: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.3.101.112");
const ID_RSA: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.113549.1.1.1");
const ID_EC: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.10045.2.1");
const ID_P256: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.10045.3.1.7");

/// Most certificates in one text: each is a key to try, or a step to an authority.
const CERTIFICATES_MAX: usize = 16;

/// A key that verifies signatures of one kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublicKey {
    /// In the form that the algorithm takes.
    bytes: Arc<[u8]>,
    /// Its name; a request that names another key is not tried with it.
    id: Option<Arc<str>>,
}

impl PublicKey {
    /// The same key under a name.
    pub(super) fn named(self, id: &str) -> Self {
        Self { id: Some(id.into()), ..self }
    }

    /// Whether a signature may be by it: where both name a key, it is the same.
    pub(crate) fn may_be(&self, id: Option<&str>) -> bool {
        id.is_none() || self.id.is_none() || self.id.as_deref() == id
    }

    /// Reads PEM, base64 of DER (both a `SubjectPublicKeyInfo`, RFC 5280), or the bytes of an Ed25519 key in the
    /// encoding that the scheme names.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(super) fn parse(algorithm: Algorithm, encoding: Encoding, text: &str) -> Result<Self, String> {
        let pem = Pem::find(text)?;
        let id = pem.as_ref().and_then(Pem::name).map(Arc::from);
        let der = match pem {
            Some(pem) => pem.public_key()?,
            None => match encoding {
                Encoding::Hex => hex::decode(text.trim()).or(Err("the public key is not hex"))?,
                Encoding::Utf8 | Encoding::Base64 => base64(text)?,
            },
        };
        if algorithm == Algorithm::Ed25519 && der.len() == ED25519 {
            return Ok(Self { bytes: der.into(), id });
        }
        Ok(Self { id, ..Self::from_info(algorithm, &der)? })
    }

    /// The key in a certificate, whatever else stands in it.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn of_certificate(algorithm: Algorithm, certificate: &Certificate) -> Result<Self, String> {
        let info = certificate.tbs_certificate.subject_public_key_info.to_der();
        Self::from_info(algorithm, &info.or(Err("the certificate's key cannot be read"))?)
    }

    fn from_info(algorithm: Algorithm, der: &[u8]) -> Result<Self, String> {
        let info = SubjectPublicKeyInfoRef::try_from(der);
        let info = info.or(Err("the public key is neither PEM nor base64 of DER"))?;
        let key = info.subject_public_key.as_bytes().ok_or("the public key is not whole bytes")?;
        let curve = || info.algorithm.parameters_oid().ok();
        let (fits, wanted) = match algorithm {
            Algorithm::Ed25519 => (info.algorithm.oid == ID_ED25519 && key.len() == ED25519, "Ed25519"),
            Algorithm::EcdsaP256(_) => (info.algorithm.oid == ID_EC && curve() == Some(ID_P256), "P-256"),
            Algorithm::RsaPkcs1(_) => {
                (info.algorithm.oid == ID_RSA && key.len() > RSA_MIN, "RSA with 2048 bits or more")
            }
            Algorithm::Hmac(_) | Algorithm::Hash(_) => (false, "secret, not public"),
        };
        if fits {
            Ok(Self { bytes: key.into(), id: None })
        } else {
            Err(format!("the public key is not {wanted}"))
        }
    }

    /// Whether the signature is one of the content by the key's owner.
    pub(crate) fn verifies(&self, algorithm: Algorithm, content: &[u8], signature: &[u8]) -> bool {
        if algorithm == Algorithm::EcdsaP256(Hash::Sha1) {
            return self.verifies_p256_sha1(content, signature);
        }
        let Some(verification) = algorithm.verification() else { return false };
        UnparsedPublicKey::new(verification, &self.bytes).verify(content, signature).is_ok()
    }

    /// ring has no such thing: SHA-1 is not for new signatures, and some providers still make them.
    fn verifies_p256_sha1(&self, content: &[u8], signature: &[u8]) -> bool {
        let digest = Hash::Sha1.digest([content]);
        let key = p256::ecdsa::VerifyingKey::from_sec1_bytes(&self.bytes);
        let signature = p256::ecdsa::Signature::from_der(signature);
        matches!((key, signature), (Ok(key), Ok(signature)) if key.verify_prehash(digest.as_ref(), &signature).is_ok())
    }
}

/// The certificates in a PEM text; anything else in it is passed over.
///
/// # Errors
/// There is none, or one that cannot be read.
pub(crate) fn certificates(pem: &[u8]) -> Result<Vec<(CertificateDer<'static>, Certificate)>, String> {
    let mut found = Vec::new();
    for der in CertificateDer::pem_slice_iter(pem) {
        let der = der.map_err(|error| format!("the PEM cannot be read: {error}"))?;
        let parsed = Certificate::from_der(&der).map_err(|error| format!("no certificate: {error}"))?;
        found.push((der, parsed));
        if found.len() > CERTIFICATES_MAX {
            return Err(format!("more than {CERTIFICATES_MAX} certificates"));
        }
    }
    if found.is_empty() { Err("there is no certificate in it".to_owned()) } else { Ok(found) }
}

/// The keys of all certificates in a PEM text.
///
/// # Errors
/// What is wrong with it.
pub(super) fn of_certificates(algorithm: Algorithm, pem: &str) -> Result<Vec<PublicKey>, String> {
    let found = certificates(pem.as_bytes())?;
    found.iter().map(|(_, certificate)| PublicKey::of_certificate(algorithm, certificate)).collect()
}

/// One block of PEM (RFC 7468); line breaks may be missing.
pub(super) struct Pem<'t> {
    before: &'t str,
    label: &'t str,
    inner: &'t str,
}

impl<'t> Pem<'t> {
    /// The first block in the text; `None` if there is none.
    ///
    /// # Errors
    /// It has no end.
    pub(super) fn find(text: &'t str) -> Result<Option<Self>, String> {
        let Some((before, rest)) = text.split_once("-----BEGIN ") else { return Ok(None) };
        let whole = "the PEM of the public key has no end";
        let (label, rest) = rest.split_once("-----").ok_or(whole)?;
        let (inner, _) = rest.split_once("-----END ").ok_or(whole)?;
        Ok(Some(Self { before, label, inner }))
    }

    /// The key's name, in a line `kid: NAME` before the block.
    pub(super) fn name(&self) -> Option<&'t str> {
        self.before.lines().find_map(|line| line.strip_prefix("kid:")).map(str::trim)
    }

    /// The bytes of a public key.
    ///
    /// # Errors
    /// It is something else.
    pub(super) fn public_key(&self) -> Result<Vec<u8>, String> {
        match self.label {
            "PUBLIC KEY" => base64(self.inner),
            "CERTIFICATE" => {
                Err("this is a certificate: give the key in it (openssl x509 -pubkey -noout)".to_owned())
            }
            label if label.ends_with("PRIVATE KEY") => {
                Err("this is a private key, which only the provider should have: give the public one"
                    .to_owned())
            }
            label => Err(format!("PEM of {label:?}: give \"PUBLIC KEY\"")),
        }
    }

    /// The bytes of a certificate.
    ///
    /// # Errors
    /// It is something else.
    pub(super) fn certificate(&self) -> Result<Vec<u8>, String> {
        match self.label {
            "CERTIFICATE" => base64(self.inner),
            label => Err(format!("PEM of {label:?}: give \"CERTIFICATE\"")),
        }
    }
}

/// White space does not count.
pub(super) fn base64(text: &str) -> Result<Vec<u8>, String> {
    let text: String = text.split_whitespace().collect();
    Ok(LENIENT.decode(text).or(Err("the public key is not base64"))?)
}

#[cfg(test)]
mod tests {
    use p256::ecdsa::signature::hazmat::PrehashSigner as _;
    use p256::ecdsa::{DerSignature, SigningKey};

    use super::*;
    use crate::error::Code;
    use crate::fixture::{now, received, scheme, source};
    use crate::verify::verify;

    const TOML: &str = r#"
        kind = "ecdsa-p256"
        hash = "sha1"
        sign = "{body}"
        sig = { from = "headerjson:X-Sig#/signature", encoding = "base64" }
        key_id = "headerjson:X-Sig#/kid"
        id = []
    "#;

    fn key() -> SigningKey {
        SigningKey::from_slice(&[1; 32]).unwrap()
    }

    fn pem(before: &str) -> String {
        let point = key().verifying_key().to_encoded_point(false);
        let start = hex::decode("3059301306072a8648ce3d020106082a8648ce3d030107034200").unwrap();
        let der =
            base64::engine::general_purpose::STANDARD.encode([start.as_slice(), point.as_bytes()].concat());
        format!("{before}-----BEGIN PUBLIC KEY-----{der}-----END PUBLIC KEY-----")
    }

    /// The verdict on a header with this JSON, in which `SIG` stands for the right signature.
    fn verdict(key_text: &str, json: &str, body: &str) -> Result<(), Code> {
        let signature: DerSignature =
            key().sign_prehash(Hash::Sha1.digest([body.as_bytes()]).as_ref()).unwrap();
        let base64 = |bytes: &[u8]| base64::engine::general_purpose::STANDARD.encode(bytes);
        let header = base64(json.replace("SIG", &base64(signature.as_bytes())).as_bytes());
        let request =
            received(source(&scheme(TOML), &[key_text]), "/", &[("x-sig", header.as_bytes())], "body");
        verify(request, now()).map(drop)
    }

    #[test]
    fn a_signature_in_a_header_s_json_is_by_the_key_that_it_names() {
        let (named, plain) = (pem("kid: a\n"), pem(""));
        let mismatch = Err(Code::SignatureMismatch);
        for (key, json, body, wanted) in [
            (&plain, r#"{"kid":"a","signature":"SIG"}"#, "body", Ok(())),
            (&named, r#"{"kid":"a","signature":"SIG"}"#, "body", Ok(())),
            (&named, r#"{"signature":"SIG"}"#, "body", Ok(())),
            (&named, r#"{"kid":"b","signature":"SIG"}"#, "body", mismatch),
            (&named, r#"{"kid":"a","signature":"SIG"}"#, "other", mismatch),
            (&named, r#"{"kid":"a","signature":"AAAA"}"#, "body", mismatch),
            (&named, r#"{"kid":"a","signature":"*"}"#, "body", Err(Code::SignatureMalformed)),
            (&named, r#"{"kid":"a","kid":"a","signature":"SIG"}"#, "body", Err(Code::HeaderRepeated)),
            (&named, r#"{"kid":"a","signature":"SIG","signature":"SIG"}"#, "body", Err(Code::HeaderRepeated)),
            (&named, r#"{"kid":"a"}"#, "body", Err(Code::SignatureMissing)),
            (&named, "no JSON", "body", Err(Code::SignatureMissing)),
        ] {
            assert_eq!(verdict(key, json, body), wanted, "{json} {body}");
        }
    }
}
