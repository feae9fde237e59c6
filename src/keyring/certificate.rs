//! Whether what stands at a URL is a certificate of the provider's that is good now.

use jiff::Timestamp;
use rustls::crypto::ring;
use rustls::pki_types::{CertificateDer, TrustAnchor, UnixTime};
use webpki::{EndEntityCert, KeyUsage};
use x509_cert::Certificate;
use x509_cert::time::Time;

use super::cache::Certified;
use crate::provider::cert::CertRule;
use crate::provider::{Kind, PublicKey, Scheme, certificates};

/// All that the scheme asks of a certificate, as text: what was found good by one rule is not good by another.
pub(super) fn demands(scheme: &Scheme) -> String {
    let algorithm = match &scheme.kind {
        Kind::Signed { algorithm, .. } => Some(algorithm),
        Kind::Token | Kind::Basic | Kind::Jwt(_) => None,
    };
    format!("{}: {algorithm:?} {:?}", scheme.name, scheme.pointing.cert)
}

/// The key of the first certificate in the text, if that is good; the others are steps to an authority.
///
/// # Errors
/// What is wrong with it.
pub(super) fn certified(
    scheme: &Scheme,
    pem: &[u8],
    anchors: &[TrustAnchor<'_>],
    now: Timestamp,
) -> Result<Certified, String> {
    let (Some(rule), Kind::Signed { algorithm, .. }) = (&scheme.pointing.cert, &scheme.kind) else {
        return Err("this provider has no certificates".to_owned());
    };
    let mut found = certificates(pem)?.into_iter();
    let (der, certificate) = found.next().ok_or("there is no certificate in it")?;
    let steps: Vec<CertificateDer<'_>> = found.map(|(der, _)| der).collect();
    let ends = dates(&certificate, now)?;
    let end = EndEntityCert::try_from(&der).map_err(|error| format!("the certificate is unfit: {error}"))?;
    if rule.chain {
        chain(&end, &steps, anchors, now)?;
    }
    names(rule, &end)?;
    let key = PublicKey::of_certificate(*algorithm, &certificate)?;
    Ok(Certified { keys: [key].into(), ends })
}

/// The end of the certificate's time, if that has begun and not ended.
fn dates(certificate: &Certificate, now: Timestamp) -> Result<Timestamp, String> {
    let validity = &certificate.tbs_certificate.validity;
    let (begins, ends) = (timestamp(validity.not_before)?, timestamp(validity.not_after)?);
    if now < begins {
        return Err(format!("the certificate is good from {begins} on only"));
    }
    if now > ends {
        return Err(format!("the certificate was good until {ends}"));
    }
    Ok(ends)
}

fn timestamp(time: Time) -> Result<Timestamp, String> {
    let seconds = i64::try_from(time.to_unix_duration().as_secs()).unwrap_or(i64::MAX);
    Timestamp::from_second(seconds)
        .map_err(|error| format!("the certificate's dates cannot be read: {error}"))
}

/// Whether it leads to an authority that is trusted. Whether it was taken back is not asked.
fn chain(
    end: &EndEntityCert<'_>,
    steps: &[CertificateDer<'_>],
    anchors: &[TrustAnchor<'_>],
    now: Timestamp,
) -> Result<(), String> {
    let seconds = u64::try_from(now.as_second()).unwrap_or_default();
    let time = UnixTime::since_unix_epoch(std::time::Duration::from_secs(seconds));
    let algorithms = ring::default_provider().signature_verification_algorithms.all;
    let usage = KeyUsage::server_auth();
    end.verify_for_usage(algorithms, anchors, steps, time, usage, None, None)
        .map(drop)
        .map_err(|error| format!("the certificate leads to no authority that is trusted: {error}"))
}

/// Whether one of its names is one of the provider's.
fn names(rule: &CertRule, end: &EndEntityCert<'_>) -> Result<(), String> {
    let fits = |name: &str| rule.names.iter().any(|pattern| pattern.fits(name));
    if rule.names.is_empty() || end.valid_dns_names().any(fits) {
        return Ok(());
    }
    let wanted: Vec<String> = rule.names.iter().map(ToString::to_string).collect();
    Err(format!("the certificate is for another name than {}", wanted.join(" or ")))
}
