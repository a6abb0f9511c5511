// SPDX-License-Identifier: Apache-2.0 OR MIT
//! In place of TLS where the feature `tls` is off: types that have no values, and one error.

use super::Plain;
use cowshed_storage::IoBuf;
use cowshed_types::{Error, Result};
use std::convert::Infallible;
use std::path::Path;

/// Credentials of a server. There are none without the feature `tls`.
#[derive(Clone, Debug)]
pub struct ServerTls(Infallible);

/// Credentials of a client. There are none without the feature `tls`.
#[derive(Clone, Debug)]
pub struct ClientTls(Infallible);

fn absent() -> Error {
    Error::unsupported("TLS is not built in (feature `tls`)")
}

impl ServerTls {
    /// Fails: TLS is not built in.
    pub fn from_dir(_: &Path, _: bool) -> Result<ServerTls> {
        Err(absent())
    }

    /// Fails: TLS is not built in.
    pub fn of_object(_: &Path, _: bool, _: bool) -> Result<ServerTls> {
        Err(absent())
    }
}

impl ClientTls {
    /// Fails: TLS is not built in.
    pub fn from_dir(_: &Path, _: bool) -> Result<ClientTls> {
        Err(absent())
    }

    /// Fails: TLS is not built in.
    pub fn of_object(_: &Path, _: bool, _: bool) -> Result<ClientTls> {
        Err(absent())
    }

    /// Fails: TLS is not built in.
    pub fn unverified() -> Result<ClientTls> {
        Err(absent())
    }
}

#[derive(Debug)]
pub(crate) enum TlsSession {}

impl TlsSession {
    pub fn of_server(credentials: &ServerTls) -> Result<TlsSession> {
        match credentials.0 {}
    }

    pub fn of_client(credentials: &ClientTls, _: &str) -> Result<TlsSession> {
        match credentials.0 {}
    }

    pub fn is_handshaking(&self) -> bool {
        match *self {}
    }

    pub fn encrypt(&mut self, _: &[u8]) -> Result<()> {
        match *self {}
    }

    pub fn outgoing(&mut self, _: &mut [u8]) -> Result<usize> {
        match *self {}
    }

    pub fn decrypt(&mut self, _: &mut [u8]) -> Result<Plain> {
        match *self {}
    }

    pub fn take_buffer(&mut self) -> IoBuf {
        match *self {}
    }

    pub fn give_buffer(&mut self, _: IoBuf, _: usize) {
        match *self {}
    }

    pub fn continue_handshake(&mut self) -> Result<()> {
        match *self {}
    }

    pub fn send_close_notify(&mut self) {
        match *self {}
    }

    pub fn peer_identity(&self) -> Option<String> {
        match *self {}
    }
}
