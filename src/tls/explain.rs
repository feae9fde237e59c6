//! What to do about a handshake that failed.

use std::error::Error;
use std::io;
use std::sync::Arc;

use rustls::{AlertDescription, CertificateError};

/// The TLS library's own error, wherever in the chain of causes it is. (An I/O error's `source` leaves out the error
/// that it was made of.)
#[must_use]
pub fn cause<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a rustls::Error> {
    if let Some(found) = error.downcast_ref::<rustls::Error>() {
        return Some(found);
    }
    if let Some(inner) = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
        return cause(inner);
    }
    if let Some(shared) = error.downcast_ref::<Arc<dyn Error + Send + Sync>>() {
        return cause(&**shared);
    }
    cause(error.source()?)
}

/// What is wrong and what to do; nothing if the error is none of TLS. `authorities` is the setting that names trusted
/// authorities, `identity` those that name a client certificate.
#[must_use]
pub fn explain(error: &(dyn Error + 'static), authorities: &str, identity: &str) -> Option<String> {
    use rustls::Error as Tls;
    let cause = cause(error)?;
    let advice = match cause {
        Tls::InvalidCertificate(problem) => certificate(problem, authorities),
        Tls::AlertReceived(AlertDescription::CertificateRequired) => {
            format!("the server asks for a client certificate: give {identity}")
        }
        Tls::AlertReceived(
            AlertDescription::BadCertificate
            | AlertDescription::UnknownCA
            | AlertDescription::CertificateExpired
            | AlertDescription::CertificateUnknown
            | AlertDescription::UnsupportedCertificate,
        ) => format!("the server does not take our client certificate: give another one ({identity})"),
        Tls::AlertReceived(AlertDescription::HandshakeFailure | AlertDescription::ProtocolVersion)
        | Tls::PeerIncompatible(_) => {
            "the server must offer TLS 1.2 or 1.3 with a cipher of today".to_owned()
        }
        Tls::InvalidMessage(_) => {
            "what answers there speaks no TLS: give the port that does, or turn TLS on at the server"
                .to_owned()
        }
        _ => return Some(format!("TLS: {cause}")),
    };
    Some(format!("TLS: {cause}: {advice}"))
}

fn certificate(problem: &CertificateError, authorities: &str) -> String {
    use CertificateError as Is;
    match problem {
        // The second: of an authority with the same name and another key.
        Is::UnknownIssuer | Is::BadSignature => {
            format!("the server's certificate comes from nobody trusted: name its authority by {authorities}")
        }
        Is::NotValidForName | Is::NotValidForNameContext { .. } => {
            "connect by a name that the server's certificate is for, or give the server one with this name"
                .to_owned()
        }
        Is::Expired | Is::ExpiredContext { .. } => {
            "renew the server's certificate (or set the clock of this machine)".to_owned()
        }
        Is::NotValidYet | Is::NotValidYetContext { .. } => {
            "the server's certificate begins later: set the clock of this machine, or give the server another"
                .to_owned()
        }
        Is::Revoked => "the server's certificate was withdrawn: give the server another".to_owned(),
        _ => format!(
            "the server's certificate cannot be checked: give the server one that an authority issued for its name, \
             and name that authority by {authorities}"
        ),
    }
}
