//! The chain of certificates that comes with a token: leaf, issuer, root.
//!
//! Invariant: a chain counts only if it ends at the root that the source was given; the root in the token is not read.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use rustls_pki_types::UnixTime;
use spki::{ObjectIdentifier, SubjectPublicKeyInfoRef};
use webpki::{EndEntityCert, KeyUsage, anchor_from_trusted_cert, ring};
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
    let algorithms = [ring::ECDSA_P256_SHA256, ring::ECDSA_P256_SHA384, ring::ECDSA_P384_SHA256, ring::ECDSA_P384_SHA384];
    let since = Duration::from_secs(u64::try_from(time.as_second()).ok()?);
    let time = UnixTime::since_unix_epoch(since);
    end.verify_for_usage(&algorithms, &anchors, &issuers, time, NO_SERVER, None, None).ok()?;
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
