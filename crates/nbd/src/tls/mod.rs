// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Encryption of a connection.
//!
//! - `credentials`: in folders as QEMU has them
//! - `session`: the state of one connection
//! - `certificate`: the fields of a certificate; `identity`: its subject as a text; `der`: their elements
//! - `sanity`: checks of a program's own certificate
//! - `absent`: the same types where the feature `tls` is off

#[cfg(not(feature = "tls"))]
mod absent;
#[cfg(feature = "tls")]
mod certificate;
#[cfg(feature = "tls")]
mod credentials;
#[cfg(feature = "tls")]
mod der;
#[cfg(feature = "tls")]
mod identity;
#[cfg(feature = "tls")]
mod sanity;
#[cfg(feature = "tls")]
mod session;

#[cfg(not(feature = "tls"))]
pub(crate) use absent::TlsSession;
#[cfg(not(feature = "tls"))]
pub use absent::{ClientTls, ServerTls};
#[cfg(feature = "tls")]
pub use credentials::{ClientTls, ServerTls};
#[cfg(feature = "tls")]
pub(crate) use session::TlsSession;

use cowshed_types::{Error, ErrorKind};

/// The result of a decryption.
#[cfg_attr(not(feature = "tls"), allow(dead_code, reason = "made by TLS alone"))]
pub(crate) enum Plain {
    Bytes(usize),
    End,
    /// Nothing: more must be received.
    Nothing,
}

pub(crate) fn failed(error: &dyn std::fmt::Display) -> Error {
    Error::new(ErrorKind::Io, format!("TLS failed: {error}"))
}
