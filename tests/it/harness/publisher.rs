//! A provider that publishes the certificate or the keys which it signs with: a local HTTPS server, and its signatures.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, Result};
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use ring::rand::SystemRandom;
use ring::rsa::PublicKeyComponents;
use ring::signature::{RSA_PKCS1_SHA256, RsaKeyPair};
use rustls::ServerConfig;
use rustls::crypto::ring as provider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

use super::stores;

/// Made for the tests; nobody else uses it.
const KEY: &str = include_str!("../../data/signing-key.pem");

/// The key that the tests' providers sign with, which rcgen's backend cannot make.
pub(crate) fn signing_key() -> Result<KeyPair> {
    Ok(KeyPair::from_pem(KEY)?)
}

fn rsa() -> Result<RsaKeyPair> {
    let der = PrivateKeyDer::from_pem_slice(KEY.as_bytes()).ok().context("PEM")?;
    RsaKeyPair::from_pkcs8(der.secret_der()).ok().context("key")
}

/// RSA with SHA-256, in base64.
pub(crate) fn rsa_sha256(content: &[u8]) -> Result<String> {
    let key = rsa()?;
    let mut signature = vec![0; key.public().modulus_len()];
    let signed = key.sign(&RSA_PKCS1_SHA256, &SystemRandom::new(), content, &mut signature);
    signed.ok().context("signing")?;
    Ok(STANDARD.encode(signature))
}

/// The public half of that key, as a key set has it.
pub(crate) fn rsa_jwk(id: &str) -> Result<Value> {
    let key = rsa()?;
    let parts = PublicKeyComponents::<Vec<u8>>::from(key.public());
    let (n, e) = (URL_SAFE_NO_PAD.encode(parts.n), URL_SAFE_NO_PAD.encode(parts.e));
    Ok(json!({ "kty": "RSA", "kid": id, "alg": "RS256", "use": "sig", "n": n, "e": e }))
}

/// An authority of the tests, and its certificate in a file.
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pub(crate) pem: String,
    folder: TempDir,
}

impl Authority {
    pub(crate) fn new() -> Result<Self> {
        let key = KeyPair::generate()?;
        let params = authority("an authority of the tests")?;
        let pem = params.self_signed(&key)?.pem();
        let folder = tempfile::Builder::new().prefix(stores::folder().tag()).tempdir()?;
        std::fs::write(folder.path().join("ca.pem"), &pem)?;
        Ok(Self { issuer: Issuer::new(params, key), pem, folder })
    }

    /// One that this one speaks for, with no file of its own.
    pub(crate) fn lesser(&self) -> Result<Self> {
        let key = KeyPair::generate()?;
        let params = authority("a lesser authority of the tests")?;
        let pem = params.signed_by(&key, &self.issuer)?.pem();
        Ok(Self { issuer: Issuer::new(params, key), pem, folder: tempfile::tempdir()? })
    }

    /// A certificate for the key, as PEM.
    pub(crate) fn issue(
        &self,
        key: &KeyPair,
        names: &[&str],
        change: impl FnOnce(&mut CertificateParams),
    ) -> Result<String> {
        let mut params = CertificateParams::new(names.iter().map(ToString::to_string).collect::<Vec<_>>())?;
        change(&mut params);
        Ok(params.signed_by(key, &self.issuer)?.pem())
    }

    /// Writes a file beside the authority's own.
    pub(crate) fn write(&self, name: &str, text: &str) -> Result<PathBuf> {
        let path = self.folder.path().join(name);
        std::fs::write(&path, text)?;
        Ok(path)
    }

    pub(crate) fn file(&self) -> PathBuf {
        self.folder.path().join("ca.pem")
    }
}

fn authority(name: &str) -> Result<CertificateParams> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.distinguished_name.push(DnType::CommonName, name);
    Ok(params)
}

/// What is answered to a GET.
#[derive(Debug, Clone)]
pub(crate) enum Page {
    /// 200 with this.
    Text(String),
    /// This status and these header lines, no body.
    Status(u16, &'static str),
    /// Nothing, until the server is told otherwise.
    Silence,
}

/// The server. Dropping it leaves the port.
pub(crate) struct Publisher {
    pub(crate) address: SocketAddr,
    connections: Arc<AtomicUsize>,
    asked: Arc<Mutex<Vec<String>>>,
    pages: Arc<Mutex<HashMap<String, Page>>>,
    accepting: tokio::task::JoinHandle<()>,
}

impl Drop for Publisher {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl Publisher {
    /// Serves under these names, with a certificate of the authority.
    pub(crate) async fn start(authority: &Authority, names: &[&str]) -> Result<Self> {
        Self::start_on(authority, names, (Ipv4Addr::LOCALHOST, 0).into()).await
    }

    pub(crate) async fn start_on(authority: &Authority, names: &[&str], on: SocketAddr) -> Result<Self> {
        let key = KeyPair::generate()?;
        let certificate = authority.issue(&key, names, |_| {})?;
        let chain = vec![CertificateDer::from_pem_slice(certificate.as_bytes())?];
        let key = PrivateKeyDer::from_pem_slice(key.serialize_pem().as_bytes())?;
        let config = ServerConfig::builder_with_provider(Arc::new(provider::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(chain, key)?;
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind(on).await?;
        let address = listener.local_addr()?;
        let (connections, asked, pages): (Arc<AtomicUsize>, Arc<Mutex<_>>, Arc<Mutex<_>>) =
            Default::default();
        let (count, asked_here, pages_here) =
            (Arc::clone(&connections), Arc::clone(&asked), Arc::clone(&pages));
        let accepting = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                count.fetch_add(1, Ordering::SeqCst);
                let (acceptor, asked, pages) =
                    (acceptor.clone(), Arc::clone(&asked_here), Arc::clone(&pages_here));
                tokio::spawn(async move { drop(serve(acceptor, stream, &asked, &pages).await) });
            }
        });
        Ok(Self { address, connections, asked, pages, accepting })
    }

    /// From now on this stands at the path (without a query).
    pub(crate) fn page(&self, path: &str, page: Page) {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner).insert(path.to_owned(), page);
    }

    /// Connections so far.
    pub(crate) fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    /// Paths with queries that were asked for, in order.
    pub(crate) fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

async fn serve(
    acceptor: TlsAcceptor,
    stream: TcpStream,
    asked: &Mutex<Vec<String>>,
    pages: &Mutex<HashMap<String, Page>>,
) -> Result<()> {
    let mut stream = acceptor.accept(stream).await?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await?);
    }
    let head = String::from_utf8(head)?;
    let target = head.split(' ').nth(1).context("target")?.to_owned();
    let path = target.split('?').next().unwrap_or_default();
    let page = pages.lock().unwrap_or_else(PoisonError::into_inner).get(path).cloned();
    asked.lock().unwrap_or_else(PoisonError::into_inner).push(target);
    let (status, headers, body) = match page.unwrap_or(Page::Status(404, "")) {
        Page::Text(body) => (200, "", body),
        Page::Status(status, headers) => (status, headers, String::new()),
        Page::Silence => return std::future::pending().await,
    };
    let length = body.len();
    let answer = format!("HTTP/1.1 {status} X\r\ncontent-length: {length}\r\n{headers}\r\n{body}");
    stream.write_all(answer.as_bytes()).await?;
    Ok(stream.shutdown().await?)
}
