// SPDX-License-Identifier: Apache-2.0 OR MIT
//! TLS credentials, in a folder with the file names that QEMU uses.

use super::sanity::{TlsEndpoint, check_own};
use cowshed_types::{Error, Result};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{VerifierBuilderError, WebPkiServerVerifier};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, ServerConfig, SignatureScheme};
use std::fmt;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub(super) const CA_CERT: &str = "ca-cert.pem";
const CA_CRL: &str = "ca-crl.pem";

/// Credentials of a server: `server-cert.pem`, `server-key.pem`, and `ca-cert.pem` (with `ca-crl.pem` where there is one)
/// to verify clients with.
#[derive(Clone)]
pub struct ServerTls {
    pub(crate) config: Arc<ServerConfig>,
}

/// Credentials of a client: `ca-cert.pem` to verify the server with, and `client-cert.pem` and `client-key.pem` where
/// the server verifies its clients.
#[derive(Clone)]
pub struct ClientTls {
    pub(crate) config: Arc<ClientConfig>,
}

impl ServerTls {
    /// Reads the files in `dir`. With `verify_peer` only clients with a certificate of the authority are let in.
    pub fn from_dir(dir: &Path, verify_peer: bool) -> Result<ServerTls> {
        ServerTls::read(dir, verify_peer, verify_peer)
    }

    /// As [`ServerTls::from_dir`], as QEMU reads its objects: the authority and its list of revoked certificates must be
    /// good whether clients are verified or not. With `sanity_check` the server's own certificate must be in its time,
    /// for a server, and issued by the authority.
    pub fn of_object(dir: &Path, verify_peer: bool, sanity_check: bool) -> Result<ServerTls> {
        let credentials = ServerTls::read(dir, verify_peer, true)?;
        if sanity_check {
            check_own(dir, TlsEndpoint::Server)?;
        }
        Ok(credentials)
    }

    fn read(dir: &Path, verify_peer: bool, needs_authority: bool) -> Result<ServerTls> {
        let provider = Arc::new(ring::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| wrong(dir, &error))?;
        let roots = needs_authority.then(|| roots(dir)).transpose()?;
        let own = identity(dir, TlsEndpoint::Server)?;
        let (chain, key) = own.ok_or_else(|| {
            let [certificate, key] = files(dir, TlsEndpoint::Server).map(|path| path.display().to_string());
            Error::invalid_argument(format!("Missing server cert '{certificate}' & key '{key}'"))
        })?;
        let verifier = match roots {
            Some(roots) => {
                let builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
                Some(builder.with_crls(revoked(dir)?).build().map_err(|error| unverifying(dir, &error))?)
            }
            None => None,
        };
        let builder = match verifier.filter(|_| verify_peer) {
            Some(verifier) => builder.with_client_cert_verifier(verifier),
            None => builder.with_no_client_auth(),
        };
        let config =
            builder.with_single_cert(chain, key).map_err(|error| unusable(dir, TlsEndpoint::Server, &error))?;
        Ok(ServerTls { config: Arc::new(config) })
    }
}

impl ClientTls {
    /// Reads the files in `dir`. Without `verify_peer` any server will do, which is only good for testing.
    pub fn from_dir(dir: &Path, verify_peer: bool) -> Result<ClientTls> {
        ClientTls::read(dir, verify_peer, verify_peer)
    }

    /// As [`ClientTls::from_dir`], as QEMU reads its objects: the authority must be good whether servers are verified or
    /// not. With `sanity_check` the client's own certificate, where it has one, must be in its time, for a client, and
    /// issued by the authority.
    pub fn of_object(dir: &Path, verify_peer: bool, sanity_check: bool) -> Result<ClientTls> {
        let credentials = ClientTls::read(dir, verify_peer, true)?;
        if sanity_check {
            check_own(dir, TlsEndpoint::Client)?;
        }
        Ok(credentials)
    }

    fn read(dir: &Path, verify_peer: bool, needs_authority: bool) -> Result<ClientTls> {
        let provider = Arc::new(ring::default_provider());
        let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| wrong(dir, &error))?;
        let roots = needs_authority.then(|| roots(dir)).transpose()?;
        let own = identity(dir, TlsEndpoint::Client)?;
        let verifier = match roots {
            Some(roots) => {
                let builder = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider));
                Some(builder.with_crls(revoked(dir)?).build().map_err(|error| unverifying(dir, &error))?)
            }
            None => None,
        };
        let builder = match verifier.filter(|_| verify_peer) {
            Some(verifier) => builder.with_webpki_verifier(verifier),
            None => builder.dangerous().with_custom_certificate_verifier(Arc::new(Anybody { provider })),
        };
        let config = match own {
            None => builder.with_no_client_auth(),
            Some((chain, key)) => {
                let built = builder.with_client_auth_cert(chain, key);
                built.map_err(|error| unusable(dir, TlsEndpoint::Client, &error))?
            }
        };
        Ok(ClientTls { config: Arc::new(config) })
    }

    /// As [`ClientTls::from_dir`] without files: any server will do. `tls-verify-peer=0` asks for it.
    pub fn unverified() -> Result<ClientTls> {
        let provider = Arc::new(ring::default_provider());
        let config = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| wrong(Path::new("tls"), &error))?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(Anybody { provider }))
            .with_no_client_auth();
        Ok(ClientTls { config: Arc::new(config) })
    }
}

impl fmt::Debug for ServerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ServerTls")
    }
}

impl fmt::Debug for ClientTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClientTls")
    }
}

/// The name that the server's certificate must have.
pub(crate) fn server_name(name: &str) -> Result<ServerName<'static>> {
    ServerName::try_from(name.to_owned())
        .map_err(|_| Error::invalid_argument(format!("'{name}' can't be the name in a certificate")))
}

pub(super) fn wrong(path: &Path, error: &dyn fmt::Display) -> Error {
    let (shown, message) = (path.display(), format!("can't be used as TLS credentials: {error}"));
    let reason = match std::fs::metadata(path).map_err(|error| error.kind()) {
        Err(ErrorKind::NotFound) => "No such file or directory",
        Err(ErrorKind::PermissionDenied) => "Permission denied",
        _ => return Error::invalid_argument(format!("{shown}: {message}")),
    };
    Error::invalid_argument(format!("{shown}: {message}"))
        .qemu(format!("Unable to access credentials {shown}: {reason}"))
}

fn roots(dir: &Path) -> Result<RootCertStore> {
    let path = dir.join(CA_CERT);
    let mut roots = RootCertStore::empty();
    for certificate in certificates(&path)? {
        roots.add(certificate).map_err(|_| not_parsed(&path))?;
    }
    Ok(roots)
}

/// The lists of revoked certificates. An unreadable list would let every certificate in that is on it.
fn revoked(dir: &Path) -> Result<Vec<CertificateRevocationListDer<'static>>> {
    let path = dir.join(CA_CRL);
    if !path.exists() {
        return Ok(Vec::new());
    }
    let lists: Vec<_> =
        CertificateRevocationListDer::pem_file_iter(&path).and_then(Iterator::collect).map_err(|error| {
            no_list(&path, if matches!(error, pem::Error::Io(_)) { "Error while reading file." } else { NO_BASE64 })
        })?;
    if lists.is_empty() { Err(no_list(&path, NO_BASE64)) } else { Ok(lists) }
}

/// QEMU's sentence for a text that is no PEM.
const NO_BASE64: &str = "Base64 decoding error.";

fn no_list(path: &Path, reason: &str) -> Error {
    Error::invalid_argument(format!("Cannot load CRL '{}': {reason}", path.display()))
}

/// An error of building the verifier of the peer.
fn unverifying(dir: &Path, error: &VerifierBuilderError) -> Error {
    match error {
        VerifierBuilderError::InvalidCrl(_) => no_list(&dir.join(CA_CRL), "it can't be parsed"),
        error => wrong(&dir.join(CA_CERT), error),
    }
}

pub(super) fn not_parsed(path: &Path) -> Error {
    Error::invalid_argument(format!("Unable to import certificate {}: it can't be parsed", path.display()))
}

/// An error of a file in PEM. `kind` is QEMU's name for its contents.
fn unread(path: &Path, kind: &str, error: &pem::Error) -> Error {
    let whole = wrong(path, error);
    let shown = path.display();
    match error {
        pem::Error::Io(_) if path.is_dir() => {
            whole.qemu(format!("Cannot load {kind} {shown}: Error reading file “{shown}”: Is a directory"))
        }
        _ => whole,
    }
}

pub(super) fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let found: Vec<_> = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect)
        .map_err(|error| unread(path, "CA cert list", &error))?;
    if found.is_empty() {
        let sentence = format!("Unable to import certificate {}: No certificate was found.", path.display());
        return Err(wrong(path, &"there is no certificate in it").qemu(sentence));
    }
    Ok(found)
}

/// The files of a certificate and its key.
fn files(dir: &Path, end: TlsEndpoint) -> [PathBuf; 2] {
    ["cert", "key"].map(|kind| dir.join(format!("{}-{kind}.pem", end.name())))
}

/// An error of a certificate together with its key.
fn unusable(dir: &Path, end: TlsEndpoint, error: &rustls::Error) -> Error {
    let [certificate, key] = files(dir, end);
    let reason = match error {
        rustls::Error::InconsistentKeys(_) => "The certificate and the given key do not match.",
        _ => return wrong(&certificate, error),
    };
    let (certificate, key) = (certificate.display(), key.display());
    Error::invalid_argument(format!("Cannot set certificate '{certificate}' & key '{key}': {reason}"))
}

/// A chain of certificates and the key to its first one.
type Identity = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

/// The certificate and the key of this end; `None` where there is neither.
fn identity(dir: &Path, end: TlsEndpoint) -> Result<Option<Identity>> {
    let [certificate, path] = files(dir, end);
    let lonely = |one: &str, path: &Path, other: &str, missing: &Path| {
        let (path, missing) = (path.display(), missing.display());
        Err(Error::invalid_argument(format!("{one} '{path}' without corresponding {other} '{missing}'")))
    };
    match (certificate.exists(), path.exists()) {
        (true, true) => {}
        (false, false) => return Ok(None),
        (true, false) => return lonely("Cert", &certificate, "key", &path),
        (false, true) => return lonely("Key", &path, "cert", &certificate),
    }
    let chain = certificates(&certificate)?;
    let key = PrivateKeyDer::from_pem_file(&path).map_err(|error| match path.is_dir() {
        true => unread(&path, "private key", &error),
        false => wrong(&path, &error).qemu(format!("Unable to import private key {}", path.display())),
    })?;
    Ok(Some((chain, key)))
}

/// Takes every server for the right one. That it has the key to the certificate it shows is still checked.
#[derive(Debug)]
struct Anybody {
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> std::result::Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signed, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
