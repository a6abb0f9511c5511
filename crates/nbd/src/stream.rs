// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Bytes in both directions, encrypted once TLS was started.
//!
//! At most one receives and one sends at a time; the two may be different tasks, of a client also on different threads.

use crate::tls::{ClientTls, Plain, ServerTls, TlsSession, failed};
use cowshed_storage::{Dispatch, IoBuf, Socket, Want};
use cowshed_types::{Error, Result};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// Bytes that are encrypted at once.
const PLAIN_BYTES: usize = 64 << 10;
/// Bytes that hold those after encryption, with room for the heads of their records.
const CIPHER_BYTES: usize = PLAIN_BYTES + (PLAIN_BYTES >> 3) + 4096;

/// A connection's bytes.
#[derive(Debug)]
pub struct Stream {
    socket: Socket,
    /// The state of the encryption. Locked for short computations only.
    tls: OnceLock<Mutex<TlsSession>>,
}

impl Stream {
    /// A stream that isn't encrypted yet.
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
            Some(mut tls) => tls.encrypt(piece),
            None => Err(Error::internal("encryption without TLS")),
        };
        written?;
        self.send_raw(dispatch).await
    }

    /// Sends the messages of the encryption.
    async fn send_raw(&self, dispatch: Dispatch) -> Result<()> {
        loop {
            let mut out = IoBuf::scratch(CIPHER_BYTES);
            let len = match self.lock() {
                Some(mut tls) => tls.outgoing(&mut out)?,
                None => 0,
            };
            if len == 0 {
                return Ok(());
            }
            out.truncate(len);
            self.socket.send(vec![out], dispatch).await.0?;
        }
    }

    fn lock(&self) -> Option<MutexGuard<'_, TlsSession>> {
        self.tls.get().map(|tls| tls.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn read_decrypted(&self, into: &mut [u8]) -> Result<Plain> {
        match self.lock() {
            Some(mut tls) => tls.decrypt(into),
            None => Err(Error::internal("decryption without TLS")),
        }
    }

    /// Receives more encrypted bytes; 0 at the end.
    async fn receive_raw(&self) -> Result<usize> {
        let raw = match self.lock() {
            Some(mut tls) => tls.take_buffer(),
            None => return Err(Error::internal("receiving without TLS")),
        };
        let (result, raw) = self.socket.receive(raw, Want::Some).await;
        if let Some(mut tls) = self.lock() {
            tls.give_buffer(raw, *result.as_ref().unwrap_or(&0));
        }
        result
    }

    /// Starts TLS as the server. The client must not have sent anything that wasn't read.
    pub async fn start_server_tls(&self, credentials: &ServerTls) -> Result<()> {
        self.handshake(TlsSession::of_server(credentials)?).await
    }

    /// Starts TLS as the client of a server with that name in its certificate.
    pub async fn start_client_tls(&self, credentials: &ClientTls, name: &str) -> Result<()> {
        self.handshake(TlsSession::of_client(credentials, name)?).await
    }

    /// The subject of the peer's certificate: its distinguished name as [RFC
    /// 4514](https://www.rfc-editor.org/rfc/rfc4514) writes it, but in the certificate's order, as QEMU compares it.
    /// `None` without TLS, without a certificate, or where it can't be parsed.
    pub fn peer_identity(&self) -> Option<String> {
        self.lock()?.peer_identity()
    }

    async fn handshake(&self, session: TlsSession) -> Result<()> {
        if self.tls.set(Mutex::new(session)).is_err() {
            return Err(Error::internal("TLS was started twice"));
        }
        loop {
            self.send_raw(Dispatch::Together).await?;
            let is_handshaking = self.lock().is_some_and(|tls| tls.is_handshaking());
            if !is_handshaking {
                return Ok(());
            }
            if self.receive_raw().await? == 0 {
                return Err(failed(&"the peer closed the connection during the handshake"));
            }
            let taken = match self.lock() {
                Some(mut tls) => tls.continue_handshake(),
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
        self.end_encryption().await;
        self.socket.shutdown();
    }

    /// Tells the peer that nothing more comes. The other direction goes on.
    pub async fn end(&self) {
        self.end_encryption().await;
        self.socket.shutdown_send();
    }

    async fn end_encryption(&self) {
        if let Some(mut tls) = self.lock() {
            tls.send_close_notify();
        }
        if self.is_encrypted() {
            let _ = self.send_raw(Dispatch::Together).await;
        }
    }
}
