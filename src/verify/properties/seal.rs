//! What providers sign with: one pair of keys for each kind, and another that the source does not have.

use std::sync::LazyLock;

use base64::Engine as _;
use p256::ecdsa::signature::hazmat::PrehashSigner as _;
use ring::rand::SystemRandom;
use ring::signature::{self as by, EcdsaKeyPair, Ed25519KeyPair, KeyPair as _, RsaKeyPair};
use rustls_pki_types::PrivateKeyDer;
use rustls_pki_types::pem::PemObject as _;

use crate::provider::jwt::Alg;
use crate::provider::signature::Hash;

/// How the requests of a provider are signed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Seal {
    Hmac(Hash),
    Hash(Hash),
    Ed25519,
    Ecdsa(Hash),
    Rsa(Hash),
    /// The key is in a certificate.
    CertEcdsa,
    CertRsa,
    /// A token over parts of the request.
    Jwt(Alg),
}

type Sign = dyn Fn(&[u8]) -> Vec<u8>;

/// One key: what the source is given, and what the provider does with it.
pub(super) struct Pair {
    pub(super) text: String,
    sign: Box<Sign>,
}

impl Pair {
    pub(super) fn sign(&self, content: &[u8]) -> Vec<u8> {
        (self.sign)(content)
    }
}

impl Seal {
    /// The lines of the scheme that name it.
    pub(super) fn toml(self) -> String {
        let hash = |hash| Hash::CHOICES.iter().find(|(_, known)| *known == hash).unwrap().0;
        let cert =
            "cert = { from = \"header:x-cert\", host = \"keys.example.com\", path = \"/*\", chain = false }";
        match self {
            Self::Hmac(of) => format!("kind = \"hmac\"\nhash = {:?}", hash(of)),
            Self::Hash(of) => format!("kind = \"hash\"\nhash = {:?}", hash(of)),
            Self::Ed25519 => "kind = \"ed25519\"".to_owned(),
            Self::Ecdsa(of) => format!("kind = \"ecdsa-p256\"\nhash = {:?}", hash(of)),
            Self::Rsa(of) => format!("kind = \"rsa-pkcs1\"\nhash = {:?}", hash(of)),
            Self::CertEcdsa => format!("kind = \"ecdsa-p256\"\n{cert}"),
            Self::CertRsa => format!("kind = \"rsa-pkcs1\"\n{cert}"),
            Self::Jwt(alg) => format!("kind = \"jwt\"\njwt = {{ algs = [{:?}] }}", alg.name()),
        }
    }

    pub(super) fn is_certified(self) -> bool {
        matches!(self, Self::CertEcdsa | Self::CertRsa)
    }

    /// The provider's key, and somebody else's.
    pub(super) fn pairs(self) -> [Pair; 2] {
        [0, 1].map(|at| match self {
            Self::Hmac(hash) => mac(at, hash.algorithm()),
            Self::Hash(hash) => hashed(at, hash),
            Self::Ed25519 | Self::Jwt(Alg::EdDsa) => edwards(),
            Self::Ecdsa(Hash::Sha1) => p256_sha1(at),
            Self::Ecdsa(_) => ecdsa(&by::ECDSA_P256_SHA256_ASN1_SIGNING, "BggqhkjOPQMBBw=="),
            Self::CertEcdsa => certified_ecdsa(),
            Self::Rsa(Hash::Sha512) => rsa(at, &by::RSA_PKCS1_SHA512, false),
            Self::Rsa(_) => rsa(at, &by::RSA_PKCS1_SHA256, false),
            Self::CertRsa => rsa(at, &by::RSA_PKCS1_SHA256, true),
            Self::Jwt(alg) => token(at, alg),
        })
    }
}

fn token(at: usize, alg: Alg) -> Pair {
    match (alg, alg.hmac()) {
        (_, Some(hash)) => mac(at, hash),
        (Alg::Es384, _) => ecdsa(&by::ECDSA_P384_SHA384_FIXED_SIGNING, "BgUrgQQAIg=="),
        (Alg::Rs256, _) => rsa(at, &by::RSA_PKCS1_SHA256, false),
        (Alg::Rs384, _) => rsa(at, &by::RSA_PKCS1_SHA384, false),
        (Alg::Rs512, _) => rsa(at, &by::RSA_PKCS1_SHA512, false),
        _ => ecdsa(&by::ECDSA_P256_SHA256_FIXED_SIGNING, "BggqhkjOPQMBBw=="),
    }
}

fn secret(at: usize) -> String {
    format!("a shared secret, the one of number {at}")
}

fn mac(at: usize, algorithm: ring::hmac::Algorithm) -> Pair {
    let key = ring::hmac::Key::new(algorithm, secret(at).as_bytes());
    let sign = move |content: &[u8]| ring::hmac::sign(&key, content).as_ref().to_vec();
    Pair { text: secret(at), sign: Box::new(sign) }
}

/// The secret is in the content.
fn hashed(at: usize, hash: Hash) -> Pair {
    let sign = move |content: &[u8]| hash.digest([content]).as_ref().to_vec();
    Pair { text: secret(at), sign: Box::new(sign) }
}

fn edwards() -> Pair {
    let document = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).unwrap();
    let pair = Ed25519KeyPair::from_pkcs8(document.as_ref()).unwrap();
    // The start of a SubjectPublicKeyInfo for this kind of key (RFC 8410).
    let info = [
        [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00].as_slice(),
        pair.public_key().as_ref(),
    ];
    Pair {
        text: pem("PUBLIC KEY", &info.concat()),
        sign: Box::new(move |content| pair.sign(content).as_ref().to_vec()),
    }
}

fn ecdsa(algorithm: &'static by::EcdsaSigningAlgorithm, curve: &str) -> Pair {
    let document = EcdsaKeyPair::generate_pkcs8(algorithm, &SystemRandom::new()).unwrap();
    let pair = EcdsaKeyPair::from_pkcs8(algorithm, document.as_ref(), &SystemRandom::new()).unwrap();
    let text = pem("PUBLIC KEY", &ec_info(curve, pair.public_key().as_ref()));
    let sign = move |content: &[u8]| pair.sign(&SystemRandom::new(), content).unwrap().as_ref().to_vec();
    Pair { text, sign: Box::new(sign) }
}

/// A `SubjectPublicKeyInfo` of a point.
fn ec_info(curve: &str, point: &[u8]) -> Vec<u8> {
    let curve = base64::engine::general_purpose::STANDARD.decode(curve).unwrap();
    let kind = [&[0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01], curve.as_slice()].concat();
    let bits = [&[0], point].concat();
    tlv(0x30, &[tlv(0x30, &kind), tlv(0x03, &bits)].concat())
}

/// Lengths below 128.
fn tlv(tag: u8, content: &[u8]) -> Vec<u8> {
    let length = u8::try_from(content.len()).unwrap();
    assert!(length < 128);
    [&[tag, length], content].concat()
}

fn pem(label: &str, der: &[u8]) -> String {
    let text = base64::engine::general_purpose::STANDARD.encode(der);
    format!("-----BEGIN {label}-----\n{text}\n-----END {label}-----\n")
}

/// ring makes no such signatures.
fn p256_sha1(at: usize) -> Pair {
    let key = p256::ecdsa::SigningKey::from_slice(&[u8::try_from(at).unwrap() + 1; 32]).unwrap();
    let point = key.verifying_key().to_encoded_point(false);
    let text = pem("PUBLIC KEY", &ec_info("BggqhkjOPQMBBw==", point.as_bytes()));
    let sign = move |content: &[u8]| {
        let signature: p256::ecdsa::Signature =
            key.sign_prehash(Hash::Sha1.digest([content]).as_ref()).unwrap();
        signature.to_der().as_bytes().to_vec()
    };
    Pair { text, sign: Box::new(sign) }
}

fn certified_ecdsa() -> Pair {
    let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).unwrap();
    let algorithm = &by::ECDSA_P256_SHA256_ASN1_SIGNING;
    let pair = EcdsaKeyPair::from_pkcs8(algorithm, &key.serialize_der(), &SystemRandom::new()).unwrap();
    let sign = move |content: &[u8]| pair.sign(&SystemRandom::new(), content).unwrap().as_ref().to_vec();
    Pair { text: certificate(&key), sign: Box::new(sign) }
}

fn certificate(key: &rcgen::KeyPair) -> String {
    rcgen::CertificateParams::new(["keys.example.com".to_owned()]).unwrap().self_signed(key).unwrap().pem()
}

/// Keys that rcgen and ring cannot make; they are read when tests run, so that the library builds without them.
static RSA: LazyLock<[String; 2]> = LazyLock::new(|| {
    ["signing-key.pem", "other-key.pem"].map(|name| {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data");
        std::fs::read_to_string(format!("{folder}/{name}")).unwrap()
    })
});

fn rsa(at: usize, padding: &'static dyn by::RsaEncoding, certified: bool) -> Pair {
    let der = PrivateKeyDer::from_pem_slice(RSA[at].as_bytes()).unwrap();
    let pair = RsaKeyPair::from_pkcs8(der.secret_der()).unwrap();
    let key = rcgen::KeyPair::from_pem(&RSA[at]).unwrap();
    let text = if certified { certificate(&key) } else { key.public_key_pem() };
    let sign = move |content: &[u8]| {
        let mut signature = vec![0; pair.public().modulus_len()];
        pair.sign(padding, &SystemRandom::new(), content, &mut signature).unwrap();
        signature
    };
    Pair { text, sign: Box::new(sign) }
}
