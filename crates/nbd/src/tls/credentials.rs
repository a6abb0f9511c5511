// SPDX-License-Identifier: Apache-2.0 OR MIT
//! TLS credentials, in a folder with the file names that QEMU uses.

use super::sanity::{End, check_own};
use cowshed_block::{Error, Result};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
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

/// Credentials of a client: `ca-cert.pem` to verify the server with, and `client-cert.pem` and `client-key.pem` where the
/// server wants to know who comes.
#[derive(Clone)]
pub struct ClientTls {
    pub(crate) config: Arc<ClientConfig>,
}

impl ServerTls {
    /// Reads the files in `dir`. With `verify_peer` only clients with a certificate of the authority are let in.
    pub fn from_dir(dir: &Path, verify_peer: bool) -> Result<ServerTls> {
        let provider = Arc::new(ring::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| wrong(dir, &error))?;
        let builder = if verify_peer {
            let roots = Arc::new(roots(dir)?);
            let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider)
                .with_crls(revoked(dir)?)
                .build()
                .map_err(|error| wrong(&dir.join(CA_CERT), &error))?;
            builder.with_client_cert_verifier(verifier)
        } else {
            builder.with_no_client_auth()
        };
        let (chain, key) = identity(dir, End::Server)?;
        let config = builder.with_single_cert(chain, key).map_err(|error| unusable(dir, End::Server, &error))?;
        Ok(ServerTls { config: Arc::new(config) })
    }

    /// As [`ServerTls::from_dir`]. The server's own certificate must be in its time, for a server, and issued by the
    /// authority in `ca-cert.pem`.
    pub fn checked(dir: &Path, verify_peer: bool) -> Result<ServerTls> {
        let credentials = ServerTls::from_dir(dir, verify_peer)?;
        check_own(dir, End::Server)?;
        Ok(credentials)
    }
}

impl ClientTls {
    /// Reads the files in `dir`. Without `verify_peer` any server will do, which is only good for testing.
    pub fn from_dir(dir: &Path, verify_peer: bool) -> Result<ClientTls> {
        let provider = Arc::new(ring::default_provider());
        let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| wrong(dir, &error))?;
        let builder = if verify_peer {
            let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots(dir)?), provider)
                .with_crls(revoked(dir)?)
                .build()
                .map_err(|error| wrong(&dir.join(CA_CERT), &error))?;
            builder.with_webpki_verifier(verifier)
        } else {
            builder.dangerous().with_custom_certificate_verifier(Arc::new(Anybody { provider }))
        };
        let [certificate, key] = files(dir, End::Client);
        let config = match (certificate.exists(), key.exists()) {
            (false, false) => builder.with_no_client_auth(),
            (true, false) => {
                let (certificate, key) = (certificate.display(), key.display());
                let message = format!("Cert '{certificate}' without corresponding key '{key}'");
                return Err(Error::invalid_argument(message));
            }
            (false, true) => {
                let (certificate, key) = (certificate.display(), key.display());
                let message = format!("Key '{key}' without corresponding cert '{certificate}'");
                return Err(Error::invalid_argument(message));
            }
            (true, true) => {
                let (chain, key) = identity(dir, End::Client)?;
                let built = builder.with_client_auth_cert(chain, key);
                built.map_err(|error| unusable(dir, End::Client, &error))?
            }
        };
        Ok(ClientTls { config: Arc::new(config) })
    }

    /// As [`ClientTls::from_dir`]. The client's own certificate, where it has one, must be in its time, for a client, and
    /// issued by the authority in `ca-cert.pem`.
    pub fn checked(dir: &Path, verify_peer: bool) -> Result<ClientTls> {
        let credentials = ClientTls::from_dir(dir, verify_peer)?;
        check_own(dir, End::Client)?;
        Ok(credentials)
    }

    /// As [`ClientTls::from_dir`] without files: any server will do. What `tls-verify-peer=0` asks for.
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
        roots.add(certificate).map_err(|error| wrong(&path, &error))?;
    }
    Ok(roots)
}

fn revoked(dir: &Path) -> Result<Vec<CertificateRevocationListDer<'static>>> {
    let path = dir.join(CA_CRL);
    if !path.exists() {
        return Ok(Vec::new());
    }
    CertificateRevocationListDer::pem_file_iter(&path).and_then(Iterator::collect).map_err(|error| wrong(&path, &error))
}

pub(super) fn certificates(path: &PathBuf) -> Result<Vec<CertificateDer<'static>>> {
    let found: Vec<_> =
        CertificateDer::pem_file_iter(path).and_then(Iterator::collect).map_err(|error| wrong(path, &error))?;
    if found.is_empty() {
        let sentence = format!("Unable to import certificate {}: No certificate was found.", path.display());
        return Err(wrong(path, &"there is no certificate in it").qemu(sentence));
    }
    Ok(found)
}

/// The files of a certificate and its key.
fn files(dir: &Path, end: End) -> [PathBuf; 2] {
    ["cert", "key"].map(|kind| dir.join(format!("{}-{kind}.pem", end.name())))
}

/// An error of a certificate together with its key.
fn unusable(dir: &Path, end: End, error: &rustls::Error) -> Error {
    let [certificate, key] = files(dir, end);
    let reason = match error {
        rustls::Error::InconsistentKeys(_) => "The certificate and the given key do not match.",
        _ => return wrong(&certificate, error),
    };
    let (certificate, key) = (certificate.display(), key.display());
    Error::invalid_argument(format!("Cannot set certificate '{certificate}' & key '{key}': {reason}"))
}

fn identity(dir: &Path, end: End) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)> {
    let [certificate, path] = files(dir, end);
    let chain = certificates(&certificate)?;
    let key = PrivateKeyDer::from_pem_file(&path).map_err(|error| {
        let sentence = format!("Unable to import private key {}", path.display());
        if path.exists() { wrong(&path, &error).qemu(sentence) } else { wrong(&path, &error) }
    })?;
    Ok((chain, key))
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
