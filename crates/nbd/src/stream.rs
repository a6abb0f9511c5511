// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Bytes in both directions, encrypted once TLS was started.
//!
//! At most one receives and one sends at a time; the two may be different tasks, of a client also on different threads.

use crate::identity::distinguished_name;
use crate::tls::{ClientTls, ServerTls, server_name};
use cowshed_block::{Error, ErrorKind, Result};
use cowshed_storage::{Dispatch, IoBuf, Socket, Want};
use rustls::{ClientConnection, Connection, ServerConnection};
use std::io::{Read, Write};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// Encrypted bytes that are received at once.
const RAW_BYTES: usize = 64 << 10;
/// Bytes that are encrypted at once.
const PLAIN_BYTES: usize = 64 << 10;
/// So many bytes that many encrypted ones fit, with room for the heads of their records.
const CIPHER_BYTES: usize = PLAIN_BYTES + (PLAIN_BYTES >> 3) + 4096;

/// A connection's bytes.
#[derive(Debug)]
pub struct Stream {
    socket: Socket,
    tls: OnceLock<Mutex<Tls>>,
}

/// The state of the encryption. Locked for short computations only.
struct Tls {
    connection: Connection,
    /// Received and not yet looked at: this range of `raw`. Taken out while receiving.
    raw: IoBuf,
    start: usize,
    end: usize,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls")
    }
}

/// What [`Stream::read_decrypted`] found.
enum Plain {
    Bytes(usize),
    End,
    /// Nothing: more must be received.
    Nothing,
}

fn failed(error: &dyn std::fmt::Display) -> Error {
    Error::new(ErrorKind::Io, format!("TLS failed: {error}"))
}

impl Stream {
    /// Not encrypted yet.
    pub fn new(socket: Socket) -> Stream {
        Stream { socket, tls: OnceLock::new() }
    }

    /// The socket below.
    pub fn socket(&self) -> &Socket {
        &self.socket
    }

    /// True once TLS was started.
    pub fn is_encrypted(&self) -> bool {
        self.tls.get().is_some()
    }

    /// As [`Socket::receive`].
    pub async fn receive(&self, mut buf: IoBuf, want: Want) -> (Result<usize>, IoBuf) {
        if self.tls.get().is_none() {
            return self.socket.receive(buf, want).await;
        }
        let mut done = 0;
        while done < buf.len() {
            match self.read_decrypted(&mut buf[done..]) {
                Ok(Plain::Bytes(count)) => done += count,
                Ok(Plain::End) => break,
                Ok(Plain::Nothing) if want == Want::Some && done > 0 => break,
                Ok(Plain::Nothing) => match self.receive_raw().await {
                    Ok(0) => break,
                    Ok(_) => {}
                    Err(error) => return (Err(error), buf),
                },
                Err(error) => return (Err(error), buf),
            }
        }
        (Ok(done), buf)
    }

    /// Sends all bytes of all buffers, at most 1,024 of them.
    pub async fn send(&self, bufs: Vec<IoBuf>, dispatch: Dispatch) -> (Result<()>, Vec<IoBuf>) {
        if self.tls.get().is_none() {
            return self.socket.send(bufs, dispatch).await;
        }
        for buf in &bufs {
            for piece in buf.chunks(PLAIN_BYTES) {
                if let Err(error) = self.send_encrypted(piece, dispatch).await {
                    return (Err(error), bufs);
                }
            }
        }
        (Ok(()), bufs)
    }

    async fn send_encrypted(&self, piece: &[u8], dispatch: Dispatch) -> Result<()> {
        let written = match self.lock() {
            Some(mut tls) => tls.connection.writer().write_all(piece).map_err(|error| failed(&error)),
            None => Err(Error::internal("encryption without TLS")),
        };
        written?;
        self.send_raw(dispatch).await
    }

    /// Sends what the encryption has to say.
    async fn send_raw(&self, dispatch: Dispatch) -> Result<()> {
        loop {
            let mut out = IoBuf::scratch(CIPHER_BYTES);
            let mut len = 0;
            if let Some(mut tls) = self.lock() {
                while tls.connection.wants_write() && len < CIPHER_BYTES {
                    let mut room = &mut out[len..];
                    len += tls.connection.write_tls(&mut room).map_err(|error| failed(&error))?;
                }
            }
            if len == 0 {
                return Ok(());
            }
            out.truncate(len);
            self.socket.send(vec![out], dispatch).await.0?;
        }
    }

    fn lock(&self) -> Option<MutexGuard<'_, Tls>> {
        self.tls.get().map(|tls| tls.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn read_decrypted(&self, into: &mut [u8]) -> Result<Plain> {
        let Some(mut tls) = self.lock() else { return Err(Error::internal("decryption without TLS")) };
        loop {
            match tls.connection.reader().read(into) {
                Ok(0) => return Ok(Plain::End),
                Ok(count) => return Ok(Plain::Bytes(count)),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                // The peer closed without the word that TLS has for it.
                Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(Plain::End),
                Err(error) => return Err(failed(&error)),
            }
            if !tls.take_raw()? {
                return Ok(Plain::Nothing);
            }
        }
    }

    /// Receives more encrypted bytes; 0 at the end.
    async fn receive_raw(&self) -> Result<usize> {
        let raw = match self.lock() {
            Some(mut tls) => std::mem::take(&mut tls.raw),
            None => return Err(Error::internal("receiving without TLS")),
        };
        let (result, raw) = self.socket.receive(raw, Want::Some).await;
        if let Some(mut tls) = self.lock() {
            tls.raw = raw;
            tls.start = 0;
            tls.end = *result.as_ref().unwrap_or(&0);
        }
        result
    }

    /// Starts TLS as the server. The client must not have sent anything that wasn't read.
    pub async fn start_server_tls(&self, credentials: &ServerTls) -> Result<()> {
        let connection = ServerConnection::new(credentials.config.clone()).map_err(|error| failed(&error))?;
        self.handshake(connection.into()).await
    }

    /// Starts TLS as the client of a server with that name in its certificate.
    pub async fn start_client_tls(&self, credentials: &ClientTls, name: &str) -> Result<()> {
        let connection =
            ClientConnection::new(credentials.config.clone(), server_name(name)?).map_err(|error| failed(&error))?;
        self.handshake(connection.into()).await
    }

    /// Who the peer's certificate is for: its distinguished name as [RFC 4514](https://www.rfc-editor.org/rfc/rfc4514) writes
    /// it, but in the certificate's order, as QEMU compares it. `None` without TLS, without a certificate, or where it can't be
    /// parsed.
    pub fn peer_identity(&self) -> Option<String> {
        let tls = self.lock()?;
        distinguished_name(tls.connection.peer_certificates()?.first()?)
    }

    async fn handshake(&self, connection: Connection) -> Result<()> {
        let tls = Tls { connection, raw: IoBuf::zeroed(RAW_BYTES), start: 0, end: 0 };
        if self.tls.set(Mutex::new(tls)).is_err() {
            return Err(Error::internal("TLS was started twice"));
        }
        loop {
            self.send_raw(Dispatch::Together).await?;
            let is_handshaking = self.lock().is_some_and(|tls| tls.connection.is_handshaking());
            if !is_handshaking {
                return Ok(());
            }
            if self.receive_raw().await? == 0 {
                return Err(failed(&"the peer closed the connection during the handshake"));
            }
            let taken = match self.lock() {
                Some(mut tls) => tls.take_all_raw(),
                None => Ok(()),
            };
            if let Err(error) = taken {
                // The peer should learn why.
                let _ = self.send_raw(Dispatch::Together).await;
                return Err(error);
            }
        }
    }

    /// Tells the peer that nothing more comes, then closes. The other direction is closed too.
    pub async fn close(&self) {
        if let Some(mut tls) = self.lock() {
            tls.connection.send_close_notify();
        }
        if self.is_encrypted() {
            let _ = self.send_raw(Dispatch::Together).await;
        }
        self.socket.shutdown();
    }
}

impl Tls {
    /// Hands some received bytes to the decryption; false when there are none.
    fn take_raw(&mut self) -> Result<bool> {
        if self.start == self.end {
            return Ok(false);
        }
        let mut bytes = &self.raw[self.start..self.end];
        let count = self.connection.read_tls(&mut bytes).map_err(|error| failed(&error))?;
        self.start += count;
        self.connection.process_new_packets().map_err(|error| failed(&error))?;
        Ok(true)
    }

    /// During the handshake: hands everything over, up to the handshake's end.
    fn take_all_raw(&mut self) -> Result<()> {
        while self.connection.is_handshaking() && self.take_raw()? {}
        Ok(())
    }
}
