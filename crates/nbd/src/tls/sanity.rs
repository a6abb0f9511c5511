// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks of a program's own certificate before a peer sees it, with QEMU's words: its dates, its allowed uses, and its
//! issue by `ca-cert.pem`.

use super::certificate::{Certificate, KeyUsage, Oid};
use super::credentials::{CA_CERT, certificates, not_parsed};
use cowshed_types::{Error, Result};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::ring;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{CertificateError, RootCertStore};
use std::path::{Path, PathBuf};

/// The end of a connection that credentials are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TlsEndpoint {
    Server,
    Client,
}

impl TlsEndpoint {
    pub(super) fn name(self) -> &'static str {
        match self {
            TlsEndpoint::Server => "server",
            TlsEndpoint::Client => "client",
        }
    }
}

/// The role of a certificate in the chain.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Authority,
    Own(TlsEndpoint),
}

/// Checks the certificate in `dir` of the program that is this end, and those that have issued it. A client without one has
/// nothing to check.
pub(super) fn check_own(dir: &Path, end: TlsEndpoint) -> Result<()> {
    let path = dir.join(format!("{}-cert.pem", end.name()));
    let authority_path = dir.join(CA_CERT);
    let authorities = certificates(&authority_path)?;
    if end == TlsEndpoint::Client && !path.exists() {
        return Ok(());
    }
    let own = certificates(&path)?;
    let check = Check { now: UnixTime::now(), own_path: path, authority_path };
    check.chain(&own, &authorities, end)?;
    check.signatures(&own, authorities)
}

struct Check {
    now: UnixTime,
    own_path: PathBuf,
    authority_path: PathBuf,
}

impl Check {
    /// Follows the issuers up to one that has issued itself.
    fn chain(&self, own: &[CertificateDer<'_>], authorities: &[CertificateDer<'_>], end: TlsEndpoint) -> Result<()> {
        let parsed = |path: &Path, all: &[CertificateDer<'_>]| -> Result<Vec<Certificate>> {
            let parse = |der: &CertificateDer<'_>| Certificate::parse(der).ok_or_else(|| not_parsed(path));
            all.iter().map(parse).collect()
        };
        let mut own = parsed(&self.own_path, own)?;
        let authorities = parsed(&self.authority_path, authorities)?;
        let mut place = own.remove(0);
        self.certificate(&place, &self.own_path, Role::Own(end))?;
        // Each step takes another certificate: a circle of issuers ends here, too.
        for _ in 0..=own.len() + authorities.len() {
            if place.is_issuer_of(&place) {
                return self.certificate(&place, &self.authority_path, Role::Authority);
            }
            if let Some(issuer) = own.iter().find(|issuer| issuer.is_issuer_of(&place)) {
                self.certificate(issuer, &self.own_path, Role::Authority)?;
                place = issuer.clone();
            } else if let Some(issuer) = authorities.iter().find(|issuer| issuer.is_issuer_of(&place)) {
                self.certificate(issuer, &self.authority_path, Role::Authority)?;
                place = issuer.clone();
            } else {
                break;
            }
        }
        let subject = place.subject().unwrap_or_default();
        Err(refused(format!("Cert '{subject}' has no issuer in CA chain")))
    }

    fn certificate(&self, certificate: &Certificate, path: &Path, role: Role) -> Result<()> {
        let shown = path.display();
        let (name, is_authority) = match role {
            Role::Authority => ("CA", true),
            Role::Own(end) => (end.name(), false),
        };
        let (not_before, not_after) = certificate.validity();
        let now = i64::try_from(self.now.as_secs()).unwrap_or(i64::MAX);
        if now > not_after {
            return Err(refused(format!("The {name} certificate {shown} has expired")));
        }
        if now < not_before {
            return Err(refused(format!("The {name} certificate {shown} is not yet active")));
        }
        match (certificate.is_authority(), is_authority) {
            (Some(true), false) => {
                let reason = format!("basic constraints show a CA, but we need one for a {name}");
                return Err(refused(format!("The certificate {shown} {reason}")));
            }
            (Some(false), true) => {
                return Err(refused(format!("The certificate {shown} basic constraints do not show a CA")));
            }
            (None, true) => {
                return Err(refused(format!("The certificate {shown} is missing basic constraints for a CA")));
            }
            _ => {}
        }
        let (usage, wanted) = match role {
            Role::Authority => (KeyUsage::CertificateSigning, "certificate signing"),
            Role::Own(_) => (KeyUsage::DigitalSignature, "digital signature"),
        };
        // An extension that isn't critical is advice.
        if certificate.permits(usage).is_some_and(|(permitted, critical)| critical && !permitted) {
            return Err(refused(format!("Certificate {shown} usage does not permit {wanted}")));
        }
        let Role::Own(end) = role else { return Ok(()) };
        let purpose = match end {
            TlsEndpoint::Server => Oid::ServerAuthentication,
            TlsEndpoint::Client => Oid::ClientAuthentication,
        };
        if certificate.has_purpose(purpose).is_some_and(|(allowed, critical)| critical && !allowed) {
            return Err(refused(format!("Certificate {shown} purpose does not allow use with a TLS {name}")));
        }
        Ok(())
    }

    /// That the issuers have signed it. The library checks the rest again where the certificate is shown.
    fn signatures(&self, own: &[CertificateDer<'_>], authorities: Vec<CertificateDer<'static>>) -> Result<()> {
        let untrusted = || {
            let (own, authority) = (self.own_path.display(), self.authority_path.display());
            let reason = "The certificate is not trusted";
            refused(format!("Our own certificate {own} failed validation against {authority}: {reason}"))
        };
        let signs = |der: &CertificateDer<'_>| {
            Certificate::parse(der).and_then(|issuer| issuer.permits(KeyUsage::CertificateSigning))
        };
        let mut roots = RootCertStore::empty();
        for authority in authorities {
            if signs(&authority).is_none_or(|(permitted, _)| permitted) {
                roots.add(authority).map_err(|_| not_parsed(&self.authority_path))?;
            }
        }
        let (first, rest) = own.split_first().ok_or_else(untrusted)?;
        let parsed = ParsedCertificate::try_from(first).map_err(|_| not_parsed(&self.own_path))?;
        let algorithms = ring::default_provider().signature_verification_algorithms.all;
        match verify_server_cert_signed_by_trust_anchor(&parsed, &roots, rest, self.now, algorithms) {
            Err(rustls::Error::InvalidCertificate(
                CertificateError::UnknownIssuer | CertificateError::BadSignature,
            )) => Err(untrusted()),
            _ => Ok(()),
        }
    }
}

fn refused(sentence: String) -> Error {
    Error::invalid_argument(sentence)
}
