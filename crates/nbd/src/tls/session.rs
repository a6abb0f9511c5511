// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The state of an encrypted connection: bytes in, bytes out, no I/O.

use super::credentials::{ClientTls, ServerTls, server_name};
use super::identity::distinguished_name;
use super::{Plain, failed};
use cowshed_storage::IoBuf;
use cowshed_types::{Error, Result};
use rustls::{CertificateError, ClientConnection, Connection, ServerConnection};
use std::io::{Read, Write};

/// Encrypted bytes that are received at once.
const RAW_BYTES: usize = 64 << 10;

/// One connection's encryption.
pub(crate) struct TlsSession {
    connection: Connection,
    /// Received and not yet looked at: this range of `raw`. Taken out while receiving.
    raw: IoBuf,
    start: usize,
    end: usize,
}

impl std::fmt::Debug for TlsSession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TlsSession")
    }
}

/// An error of the handshake, or after it, with QEMU's words for certificates.
fn refused(error: &rustls::Error, is_handshaking: bool) -> Error {
    let words = match error {
        rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer) => {
            "The certificate hasn't got a known issuer".to_owned()
        }
        rustls::Error::InvalidCertificate(CertificateError::NotValidForNameContext { expected, .. }) => {
            format!("Certificate does not match the hostname {}", expected.to_str())
        }
        rustls::Error::InvalidCertificate(CertificateError::Revoked) => "The certificate has been revoked".to_owned(),
        rustls::Error::InvalidCertificate(error) => {
            let message = format!("the peer's certificate {}", certificate_words(error));
            return failed(&message).qemu("The certificate is not trusted");
        }
        rustls::Error::AlertReceived(alert) => {
            let words = in_words(&format!("{alert:?}"));
            let words = format!("the peer ended the encrypted connection: {words}");
            // In TLS 1.3 a client learns the server's judgement of its certificate behind its handshake.
            let place = match is_handshaking {
                true => "TLS handshake failed",
                false => "Failed to read option reply: Cannot read from TLS channel",
            };
            return failed(&words).qemu(format!("{place}: A TLS fatal alert has been received."));
        }
        _ => return failed(error),
    };
    failed(error).qemu(words)
}

/// A reason against a certificate, as words that follow it.
fn certificate_words(error: &CertificateError) -> &'static str {
    match error {
        CertificateError::BadEncoding => "can't be parsed",
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => "has expired",
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => "is not yet active",
        CertificateError::Revoked => "has been revoked",
        CertificateError::UnhandledCriticalExtension => "has a critical extension that is not known here",
        CertificateError::UnknownIssuer => "hasn't got a known issuer",
        CertificateError::UnknownRevocationStatus => "is of an issuer without a revocation list",
        CertificateError::ExpiredRevocationList | CertificateError::ExpiredRevocationListContext { .. } => {
            "is of an issuer whose revocation list has expired"
        }
        CertificateError::BadSignature => "has a wrong signature",
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => "is of another host",
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            "has an extended key usage that doesn't allow this end of a connection"
        }
        CertificateError::Other(error) if error.to_string().contains("CaUsedAsEndEntity") => "is an authority's own",
        _ => "is not trusted",
    }
}

/// The name of an alert as words: `CertificateRequired` is "certificate required".
fn in_words(name: &str) -> String {
    let mut words = String::with_capacity(name.len() + 4);
    let mut after_small = false;
    for letter in name.chars() {
        if letter.is_ascii_uppercase() && after_small {
            words.push(' ');
        }
        after_small = letter.is_ascii_lowercase();
        words.push(letter.to_ascii_lowercase());
    }
    words
}

impl TlsSession {
    pub fn of_server(credentials: &ServerTls) -> Result<TlsSession> {
        let connection = ServerConnection::new(credentials.config.clone()).map_err(|error| failed(&error))?;
        Ok(TlsSession::new(connection.into()))
    }

    /// `name` is the one in the server's certificate.
    pub fn of_client(credentials: &ClientTls, name: &str) -> Result<TlsSession> {
        let connection = ClientConnection::new(credentials.config.clone(), server_name(name)?);
        Ok(TlsSession::new(connection.map_err(|error| failed(&error))?.into()))
    }

    fn new(connection: Connection) -> TlsSession {
        TlsSession { connection, raw: IoBuf::zeroed(RAW_BYTES), start: 0, end: 0 }
    }

    pub fn is_handshaking(&self) -> bool {
        self.connection.is_handshaking()
    }

    pub fn encrypt(&mut self, piece: &[u8]) -> Result<()> {
        self.connection.writer().write_all(piece).map_err(|error| failed(&error))
    }

    /// Puts bytes that are to be sent at the beginning of `out`; how many.
    pub fn outgoing(&mut self, out: &mut [u8]) -> Result<usize> {
        let mut len = 0;
        while self.connection.wants_write() && len < out.len() {
            let mut room = &mut out[len..];
            len += self.connection.write_tls(&mut room).map_err(|error| failed(&error))?;
        }
        Ok(len)
    }

    pub fn decrypt(&mut self, into: &mut [u8]) -> Result<Plain> {
        loop {
            match self.connection.reader().read(into) {
                Ok(0) => return Ok(Plain::End),
                Ok(count) => return Ok(Plain::Bytes(count)),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                // The peer closed without the word that TLS has for it.
                Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(Plain::End),
                Err(error) => return Err(failed(&error)),
            }
            if !self.take_raw()? {
                return Ok(Plain::Nothing);
            }
        }
    }

    /// The buffer to receive encrypted bytes in; [`give_buffer`](TlsSession::give_buffer) takes it back.
    pub fn take_buffer(&mut self) -> IoBuf {
        std::mem::take(&mut self.raw)
    }

    /// Takes the buffer back, with `len` received bytes at its beginning.
    pub fn give_buffer(&mut self, raw: IoBuf, len: usize) {
        self.raw = raw;
        self.start = 0;
        self.end = len;
    }

    /// Hands all received bytes to the handshake, up to its end.
    pub fn continue_handshake(&mut self) -> Result<()> {
        while self.connection.is_handshaking() && self.take_raw()? {}
        Ok(())
    }

    pub fn send_close_notify(&mut self) {
        self.connection.send_close_notify();
    }

    pub fn peer_identity(&self) -> Option<String> {
        distinguished_name(self.connection.peer_certificates()?.first()?)
    }

    /// Hands some received bytes to the decryption; false when there are none.
    fn take_raw(&mut self) -> Result<bool> {
        if self.start == self.end {
            return Ok(false);
        }
        let mut bytes = &self.raw[self.start..self.end];
        let count = self.connection.read_tls(&mut bytes).map_err(|error| failed(&error))?;
        self.start += count;
        let is_handshaking = self.connection.is_handshaking();
        self.connection.process_new_packets().map_err(|error| refused(&error, is_handshaking))?;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustls::pki_types::UnixTime;
    use rustls::{AlertDescription, OtherError};
    use std::sync::Arc;
    use std::time::Duration;

    #[test]
    fn certificates_are_refused_in_words() {
        let time = UnixTime::since_unix_epoch(Duration::from_secs(5));
        let ca = OtherError(Arc::new(std::io::Error::other("CaUsedAsEndEntity")));
        for (error, words) in [
            (CertificateError::ExpiredContext { time, not_after: time }, "has expired"),
            (CertificateError::NotValidYetContext { time, not_before: time }, "is not yet active"),
            (CertificateError::Other(ca), "is an authority's own"),
            (CertificateError::ApplicationVerificationFailure, "is not trusted"),
        ] {
            let error = refused(&rustls::Error::InvalidCertificate(error), true);
            assert_eq!(error.to_string(), format!("TLS failed: the peer's certificate {words}"));
            assert_eq!(error.sentence(), "The certificate is not trusted");
        }
    }

    #[test]
    fn alerts_of_the_peer_are_words() {
        let error = refused(&rustls::Error::AlertReceived(AlertDescription::CertificateRequired), false);
        let expected = "TLS failed: the peer ended the encrypted connection: certificate required";
        assert_eq!(error.to_string(), expected);
        let sentence =
            "Failed to read option reply: Cannot read from TLS channel: A TLS fatal alert has been received.";
        assert_eq!(error.sentence(), sentence);
        assert_eq!(in_words("UnknownCA"), "unknown ca");
        assert_eq!(in_words("Unknown(7)"), "unknown(7)");
    }
}
