//! The chain of certificates that comes with a token: leaf, issuer, root.
//!
//! Invariant: a chain counts only if it ends at the root that the source was given; the root in the token is not read.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use rustls_pki_types::UnixTime;
use spki::{ObjectIdentifier, SubjectPublicKeyInfoRef};
use webpki::ring as algorithms;
use webpki::{EndEntityCert, KeyUsage, anchor_from_trusted_cert};
use x509_cert::Certificate;
use x509_cert::der::{Decode as _, Encode as _};

use crate::provider::jwt::ChainRule;
use crate::provider::token_key::TokenKey;

/// Largest certificate, in base64.
const CERTIFICATE_MAX: usize = 16 << 10;
/// Certificates for servers are none for this, and others say nothing of their use.
const NO_SERVER: KeyUsage = KeyUsage::required_if_present(&[1, 3, 6, 1, 5, 5, 7, 3, 3]);

/// The key of the leaf, if the chain is good at that time.
pub(super) fn leaf_key(rule: ChainRule, root: &[u8], chain: &[&str], time: Timestamp) -> Option<TokenKey> {
    let [leaf, issuer, _root] = chain else { return None };
    let (leaf, issuer) = (der(leaf)?, der(issuer)?);
    let root = root.into();
    let anchors = [anchor_from_trusted_cert(&root).ok()?];
    let (leaf_der, issuers) = (leaf.as_slice().into(), [issuer.as_slice().into()]);
    let end = EndEntityCert::try_from(&leaf_der).ok()?;
    let known = [
        algorithms::ECDSA_P256_SHA256,
        algorithms::ECDSA_P256_SHA384,
        algorithms::ECDSA_P384_SHA256,
        algorithms::ECDSA_P384_SHA384,
    ];
    let since = Duration::from_secs(u64::try_from(time.as_second()).ok()?);
    let time = UnixTime::since_unix_epoch(since);
    end.verify_for_usage(&known, &anchors, &issuers, time, NO_SERVER, None, None).ok()?;
    let (leaf, issuer) = (Certificate::from_der(&leaf).ok()?, Certificate::from_der(&issuer).ok()?);
    if !has(&leaf, rule.leaf) || !has(&issuer, rule.issuer) {
        return None;
    }
    let info = leaf.tbs_certificate.subject_public_key_info.to_der().ok()?;
    TokenKey::of_certificate(&SubjectPublicKeyInfoRef::try_from(info.as_slice()).ok()?)
}

fn der(text: &str) -> Option<Vec<u8>> {
    if text.len() > CERTIFICATE_MAX { None } else { STANDARD.decode(text).ok() }
}

fn has(certificate: &Certificate, id: ObjectIdentifier) -> bool {
    certificate.tbs_certificate.extensions.iter().flatten().any(|extension| extension.extn_id == id)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use base64::engine::general_purpose::URL_SAFE_NO_PAD;
    use rcgen::{
        BasicConstraints, CertificateParams, CustomExtension, IsCa, Issuer, KeyPair, PKCS_ECDSA_P256_SHA256,
    };
    use ring::rand::SystemRandom;
    use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair};
    use serde_json::json;

    use super::*;
    use crate::config::Source;
    use crate::error::Code;
    use crate::fixture::{NOW, now, received};
    use crate::provider::Scheme;
    use crate::verify::verify;

    const LEAF: &[u64] = &[1, 2, 840, 113_635, 100, 6, 11, 1];
    const ISSUER: &[u64] = &[1, 2, 840, 113_635, 100, 6, 2, 1];

    fn key() -> KeyPair {
        KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap()
    }

    /// A certificate of that name with that extension, good for a day from the tests' moment.
    fn params(name: &str, extension: Option<&[u64]>, ca: bool) -> CertificateParams {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        params.is_ca = if ca { IsCa::Ca(BasicConstraints::Unconstrained) } else { IsCa::ExplicitNoCa };
        let own = |oid: &[u64]| CustomExtension::from_oid_content(oid, vec![5, 0]);
        params.custom_extensions = extension.map(own).into_iter().collect();
        params.not_before = rcgen::date_time_ymd(2023, 11, 14);
        params.not_after = rcgen::date_time_ymd(2023, 11, 15);
        params
    }

    struct Chain {
        root: String,
        x5c: Vec<String>,
        leaf: KeyPair,
    }

    fn chain(leaf_extension: Option<&[u64]>, issuer_extension: Option<&[u64]>) -> Chain {
        let (root_key, issuer_key, leaf_key) = (key(), key(), key());
        let root_params = params("root", None, true);
        let root = root_params.self_signed(&root_key).unwrap();
        let root_issuer = Issuer::new(root_params, root_key);
        let issuer_params = params("issuer", issuer_extension, true);
        let issuer = issuer_params.signed_by(&issuer_key, &root_issuer).unwrap();
        let leaf = params("leaf", leaf_extension, false);
        let leaf = leaf.signed_by(&leaf_key, &Issuer::new(issuer_params, issuer_key)).unwrap();
        let x5c = [leaf.der(), issuer.der(), root.der()].map(|der| STANDARD.encode(der)).into();
        Chain { root: root.pem(), x5c, leaf: leaf_key }
    }

    fn body(chain: &Chain, x5c: &[String], claims: &serde_json::Value) -> String {
        let head = json!({ "alg": "ES256", "x5c": x5c }).to_string();
        let input =
            format!("{}.{}", URL_SAFE_NO_PAD.encode(head), URL_SAFE_NO_PAD.encode(claims.to_string()));
        let random = SystemRandom::new();
        let der = chain.leaf.serialize_der();
        let pair = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &der, &random).unwrap();
        let signature = URL_SAFE_NO_PAD.encode(pair.sign(&random, input.as_bytes()).unwrap());
        json!({ "signedPayload": format!("{input}.{signature}") }).to_string()
    }

    fn verdict(root: &str, body: String) -> Result<String, Code> {
        let scheme = Scheme::preset("apple-app-store").unwrap();
        let key = scheme.key(root).unwrap();
        let mut source = Source::new("test", Arc::clone(&scheme), vec![key]);
        source.claims = [("bundleId".to_owned(), "app".to_owned())].into();
        let verified = verify(received(source, "/", &[], body), now())?;
        let event = crate::identify::identify(verified)?.into_parts().1.into_event();
        Ok(event.unwrap().id)
    }

    fn claims(millis: i64) -> serde_json::Value {
        json!({ "notificationUUID": "n-1", "signedDate": millis, "data": { "bundleId": "app" } })
    }

    #[test]
    fn a_chain_ends_at_the_source_s_root_and_has_the_extensions() {
        let good = chain(Some(LEAF), Some(ISSUER));
        let at = claims(NOW * 1000);
        assert_eq!(verdict(&good.root, body(&good, &good.x5c, &at)).as_deref(), Ok("n-1"));
        let other = chain(Some(LEAF), Some(ISSUER));
        let mismatch = Err(Code::SignatureMismatch);
        assert_eq!(verdict(&other.root, body(&good, &good.x5c, &at)), mismatch, "another root");
        assert_eq!(verdict(&good.root, body(&other, &other.x5c, &at)), mismatch, "a root of its own");
        assert_eq!(verdict(&good.root, body(&other, &good.x5c, &at)), mismatch, "another leaf's key");
        assert_eq!(verdict(&good.root, body(&good, &good.x5c[..2], &at)), mismatch, "too short");
        assert_eq!(verdict(&good.root, body(&good, &[], &at)), mismatch, "none");
        let mixed = [good.x5c[0].clone(), other.x5c[1].clone(), good.x5c[2].clone()];
        assert_eq!(verdict(&good.root, body(&good, &mixed, &at)), mismatch, "another issuer");
        for (leaf, issuer) in [(None, Some(ISSUER)), (Some(LEAF), None), (Some(ISSUER), Some(LEAF))] {
            let bare = chain(leaf, issuer);
            assert_eq!(verdict(&bare.root, body(&bare, &bare.x5c, &at)), mismatch, "{leaf:?} {issuer:?}");
        }
    }

    #[test]
    fn the_chain_is_good_at_the_time_of_signing() {
        let good = chain(Some(LEAF), Some(ISSUER));
        for (seconds, wanted) in [(NOW, true), (NOW - 86_400, false), (NOW + 86_400, false)] {
            let verdict = verdict(&good.root, body(&good, &good.x5c, &claims(seconds * 1000)));
            assert_eq!(verdict.is_ok(), wanted, "{seconds}");
        }
        let mut other = claims(NOW * 1000);
        other["data"]["bundleId"] = "another".into();
        assert_eq!(verdict(&good.root, body(&good, &good.x5c, &other)), Err(Code::ClaimMismatch));
    }
}
