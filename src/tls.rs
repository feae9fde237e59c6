//! TLS to the stores: whom a server's certificate must come from, what this side shows, and what a refusal means.
//!
//! Invariant: what is checked is what was asked for, never less; the only ways to check less have names ([`Check`]).
//! No text of a certificate or a key is in a message or in `Debug` output. Never here: files, the environment, sockets.

mod check;
mod explain;

use std::fmt;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};

pub use explain::{cause, explain};

/// Whose certificates are trusted.
#[derive(Clone)]
pub struct Authorities {
    certificates: Vec<CertificateDer<'static>>,
    store: Arc<RootCertStore>,
}

impl fmt::Debug for Authorities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Authorities({})", self.certificates.len())
    }
}

impl Authorities {
    /// Those of a file; each must be usable, since one that is left out shows only when it is needed.
    ///
    /// # Errors
    /// Why they cannot be used.
    pub fn from_pem(pem: &str) -> Result<Self, String> {
        let found = CertificateDer::pem_slice_iter(pem.as_bytes()).collect::<Result<Vec<_>, _>>();
        let found = found.map_err(|error| format!("is no PEM text: {error}"))?;
        let all = found.len();
        let usable = Self::usable(found);
        match usable.certificates.len() {
            0 => Err("has no certificate (a part that begins with -----BEGIN CERTIFICATE-----)".to_owned()),
            some if some < all => Err(format!("has {} certificates that cannot be used", all - some)),
            _ => Ok(usable),
        }
    }

    /// Those that this machine trusts. One that cannot be used is left out, as everywhere else on the machine.
    ///
    /// # Errors
    /// If there is none.
    pub fn of_system() -> Result<Self, String> {
        let found = rustls_native_certs::load_native_certs();
        let usable = Self::usable(found.certs);
        if !usable.certificates.is_empty() {
            return Ok(usable);
        }
        let why = found.errors.first().map(|error| format!(" ({error})")).unwrap_or_default();
        Err(format!("this machine trusts no authority{why}: install the package ca-certificates"))
    }

    fn usable(mut certificates: Vec<CertificateDer<'static>>) -> Self {
        let mut store = RootCertStore::empty();
        certificates.retain(|certificate| store.add(certificate.clone()).is_ok());
        Self { certificates, store: store.into() }
    }

    /// For who takes nothing else.
    #[must_use]
    pub fn to_pem(&self) -> Vec<u8> {
        let one = |certificate: &CertificateDer<'_>| {
            let text = STANDARD.encode(certificate);
            format!("-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----\n")
        };
        self.certificates.iter().map(one).collect::<String>().into_bytes()
    }
}

/// What this side shows to a server that asks who it is: a certificate with what leads to its authority, and its key,
/// both as PEM.
#[derive(Clone)]
pub struct Identity {
    /// The certificates.
    pub chain: String,
    /// The key, without a passphrase.
    pub key: String,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Identity(…)")
    }
}

impl Identity {
    fn read(&self) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), String> {
        let chain = CertificateDer::pem_slice_iter(self.chain.as_bytes()).collect::<Result<Vec<_>, _>>();
        let chain = chain.map_err(|error| format!("the certificate is no PEM text: {error}"))?;
        if chain.is_empty() {
            return Err("the certificate's file has no certificate".to_owned());
        }
        // The parser's error would name what it found, which may be part of a key.
        let key = PrivateKeyDer::from_pem_slice(self.key.as_bytes()).ok();
        Ok((chain, key.ok_or("the key's file has no private key that is PEM text without a passphrase")?))
    }
}

/// What of a server's certificate is checked.
#[derive(Debug, Clone)]
pub enum Check {
    /// That it comes from an authority that is trusted, and is for the host's name.
    Full(Authorities),
    /// That it comes from an authority that is trusted. Whoever has another certificate of it passes too.
    Authority(Authorities),
    /// Nothing: whoever answers passes.
    Nothing,
}

/// How this side connects, ready for use.
///
/// # Errors
/// What is wrong with the identity.
pub fn client(check: Check, identity: Option<&Identity>) -> Result<ClientConfig, String> {
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?;
    let builder = match check {
        Check::Full(authorities) => builder.with_root_certificates(authorities.store),
        Check::Authority(authorities) => {
            let verifier = check::AnyName::new(authorities.store, provider)?;
            builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier))
        }
        Check::Nothing => {
            let verifier = Arc::new(check::Anybody::new(provider));
            builder.dangerous().with_custom_certificate_verifier(verifier)
        }
    };
    let Some(identity) = identity else { return Ok(builder.with_no_client_auth()) };
    let (chain, key) = identity.read()?;
    builder
        .with_client_auth_cert(chain, key)
        .map_err(|error| format!("certificate and key do not go together: {error}"))
}

/// For libraries that take the process' cryptography. Without it they panic as soon as a second one is compiled in.
pub fn use_ring() {
    // An error says that it is set already.
    CryptoProvider::install_default(ring::default_provider()).ok();
}

#[cfg(test)]
mod tests;
