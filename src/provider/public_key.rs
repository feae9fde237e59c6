//! Public keys: how they are written, and what they verify.
//!
//! Invariant: a key is of the kind that its scheme names, whatever the text of the key says of itself.

use std::sync::Arc;

use base64::Engine as _;
use ring::signature::UnparsedPublicKey;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use spki::{ObjectIdentifier, SubjectPublicKeyInfoRef};
use x509_cert::Certificate;
use x509_cert::der::{Decode as _, Encode as _};

use super::key::{Encoding, LENIENT};
use super::signature::Algorithm;

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
#[derive(Debug, Clone)]
pub struct PublicKey {
    /// In the form that the algorithm takes.
    bytes: Arc<[u8]>,
}

impl PublicKey {
    /// Reads PEM, base64 of DER (both a `SubjectPublicKeyInfo`, RFC 5280), or the bytes of an Ed25519 key in the
    /// encoding that the scheme names.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(super) fn parse(algorithm: Algorithm, encoding: Encoding, text: &str) -> Result<Self, String> {
        let der = match pem(text)? {
            Some(der) => der,
            None => match encoding {
                Encoding::Hex => hex::decode(text.trim()).or(Err("the public key is not hex"))?,
                Encoding::Utf8 | Encoding::Base64 => base64(text)?,
            },
        };
        if algorithm == Algorithm::Ed25519 && der.len() == ED25519 {
            return Ok(Self { bytes: der.into() });
        }
        Self::from_info(algorithm, &der)
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
        if fits { Ok(Self { bytes: key.into() }) } else { Err(format!("the public key is not {wanted}")) }
    }

    /// Whether the signature is one of the content by the key's owner.
    pub(crate) fn verifies(&self, algorithm: Algorithm, content: &[u8], signature: &[u8]) -> bool {
        let Some(verification) = algorithm.verification() else { return false };
        UnparsedPublicKey::new(verification, &self.bytes).verify(content, signature).is_ok()
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

/// The bytes between the lines of PEM (RFC 7468); line breaks may be missing. `None` if it is no PEM.
fn pem(text: &str) -> Result<Option<Vec<u8>>, String> {
    let Some((_, rest)) = text.split_once("-----BEGIN ") else { return Ok(None) };
    let whole = "the PEM of the public key has no end";
    let (label, rest) = rest.split_once("-----").ok_or(whole)?;
    let (inner, _) = rest.split_once("-----END ").ok_or(whole)?;
    match label {
        "PUBLIC KEY" => base64(inner).map(Some),
        "CERTIFICATE" => {
            Err("this is a certificate: give the key in it (openssl x509 -pubkey -noout)".to_owned())
        }
        label if label.ends_with("PRIVATE KEY") => {
            Err("this is a private key, which only the provider should have: give the public one".to_owned())
        }
        label => Err(format!("PEM of {label:?}: give \"PUBLIC KEY\"")),
    }
}

fn base64(text: &str) -> Result<Vec<u8>, String> {
    let text: String = text.split_whitespace().collect();
    Ok(LENIENT.decode(text).or(Err("the public key is not base64"))?)
}
