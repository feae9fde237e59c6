use std::io;

use rcgen::{CertificateParams, KeyPair};

use super::*;

fn certificate() -> (String, String) {
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
    (params.self_signed(&key).unwrap().pem(), key.serialize_pem())
}

#[test]
fn a_file_of_authorities_is_usable_as_a_whole_or_not_at_all() {
    let (one, key) = certificate();
    let (other, _) = certificate();
    assert_eq!(Authorities::from_pem(&format!("note\n{one}{other}")).unwrap().certificates.len(), 2);
    let broken = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    for (text, expected) in [
        ("", "has no certificate"),
        (key.as_str(), "has no certificate"),
        (&format!("{one}{broken}"), "1 certificates that cannot be used"),
        ("-----BEGIN CERTIFICATE-----\nAAAA", "is no PEM text"),
    ] {
        let said = Authorities::from_pem(text).unwrap_err();
        assert!(said.contains(expected), "{said}");
    }
}

#[test]
fn authorities_are_the_same_as_pem() {
    let (one, _) = certificate();
    let authorities = Authorities::from_pem(&one).unwrap();
    let again = Authorities::from_pem(std::str::from_utf8(&authorities.to_pem()).unwrap()).unwrap();
    assert_eq!(again.certificates, authorities.certificates);
}

#[test]
fn an_identity_is_a_certificate_and_its_own_key() {
    let ((chain, key), (_, foreign)) = (certificate(), certificate());
    let encrypted = "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n";
    let with = |chain: &str, key: &str| {
        let identity = Identity { chain: chain.to_owned(), key: key.to_owned() };
        client(Check::Nothing, Some(&identity)).map(drop)
    };
    assert_eq!(with(&chain, &key), Ok(()));
    for (chain, key, expected) in [
        (chain.as_str(), foreign.as_str(), "do not go together"),
        (&chain, encrypted, "no private key that is PEM text without a passphrase"),
        (&chain, &chain, "no private key"),
        (&key, &key, "no certificate"),
    ] {
        let said = with(chain, key).unwrap_err();
        assert!(said.contains(expected), "{said}");
    }
}

#[test]
fn nothing_of_certificates_and_keys_is_printed() {
    let (chain, key) = certificate();
    let authorities = Authorities::from_pem(&chain).unwrap();
    let identity = Identity { chain, key };
    assert_eq!(format!("{authorities:?} {identity:?}"), "Authorities(1) Identity(…)");
}

#[test]
fn the_cause_is_found_where_libraries_hide_it() {
    let refused = || rustls::Error::InvalidCertificate(rustls::CertificateError::UnknownIssuer);
    let by_io = io::Error::new(io::ErrorKind::InvalidData, refused());
    let by_redis = redis::RedisError::from(io::Error::new(io::ErrorKind::InvalidData, refused()));
    let twice = io::Error::other(io::Error::other(refused()));
    for error in [&by_io as &(dyn std::error::Error + 'static), &by_redis, &twice] {
        let said = explain(error, "the-setting", "others").unwrap();
        assert!(said.contains("UnknownIssuer") && said.contains("by the-setting"), "{said}");
    }
    assert_eq!(explain(&io::Error::other("something else"), "", ""), None);
}
