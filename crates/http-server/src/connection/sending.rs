// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A content on its way to the client.

use super::{Connection, host_of};
use crate::content::{Packing, Reading, Version};
use crate::server::Event;
use cowshed_storage::{IoBuf, rt};
use cowshed_types::{Error, ErrorKind, Result};
use futures_util::future::join;
use std::ops::Range;
use std::sync::Arc;

/// The end of a response in chunks (RFC 9112, 7.1).
pub(super) const LAST_CHUNK: &[u8] = b"0\r\n\r\n";

/// A chunk with the bytes to send of a piece.
async fn chunk(packing: &Packing, piece: IoBuf) -> Result<IoBuf> {
    let packing = Arc::clone(packing);
    let packed = rt::run_on_cpu_pool(move || packing(&piece)).await?;
    if packed.is_empty() {
        // A chunk without bytes would be the last one.
        return Ok(IoBuf::default());
    }
    let head = format!("{:x}\r\n", packed.len());
    Ok(IoBuf::copy_from(&[head.as_bytes(), &packed, b"\r\n"].concat()))
}

/// The content of a response.
pub(super) struct AnsweredContent<'a> {
    pub path: &'a str,
    /// The same where a file of the client's may be made of it.
    pub noted_path: Option<&'a str>,
    pub reading: &'a dyn Reading,
    /// The version that the source had when the head was made.
    pub version: Version,
    /// That of the version which the head names.
    pub number: u64,
    pub packing: Option<Packing>,
}

/// A content on its way to the client.
pub(super) struct Sending<'a> {
    pub connection: &'a Connection<'a>,
    pub source: &'a AnsweredContent<'a>,
}

impl Sending<'_> {
    /// Sends a range, behind some text. The next piece is read while the one before it is sent.
    pub async fn part(&self, part: Range<u64>, text: Vec<u8>) -> Result<()> {
        let piece_bytes = self.connection.config().limits.piece_bytes as u64;
        let mut bufs = if text.is_empty() { Vec::new() } else { vec![IoBuf::copy_from(&text)] };
        let piece_at = |at: u64| at..part.end.min(at.saturating_add(piece_bytes));
        let mut sending = piece_at(part.start);
        // Nothing is promised before the first bytes are there, nor that there are none.
        let first = self.read(sending.clone()).await?;
        if !first.is_empty() {
            bufs.push(first);
        }
        loop {
            let next = piece_at(sending.end);
            self.note_version(sending.end);
            self.connection.note_early_end();
            let send = async {
                self.connection.send(std::mem::take(&mut bufs)).await?;
                self.notify_sent(sending.clone());
                Ok(())
            };
            if next.is_empty() {
                return send.await;
            }
            let (sent, read) = join(send, self.read(next.clone())).await;
            sent?;
            bufs = vec![read?];
            sending = next;
        }
    }

    async fn read(&self, range: Range<u64>) -> Result<IoBuf> {
        let len = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        let (result, buf) = match len {
            0 => (self.source.reading.check(), IoBuf::default()),
            len => self.source.reading.read(range.start, IoBuf::try_scratch(len)?).await,
        };
        // The bytes sent so far must not be taken for a disk that never was. A disk that has become shorter refuses the range.
        let is_other = || self.source.reading.version() != self.source.version;
        let result = match result {
            Ok(()) if is_other() => Err(written_meanwhile()),
            Err(error) if error.kind() == ErrorKind::InvalidArgument && is_other() => Err(written_meanwhile()),
            result => result,
        };
        if let Err(error) = &result {
            let (peer, path) = (self.connection.peer, self.source.path);
            self.connection.config().notify(&Event::Failed { peer, path, error });
        }
        result?;
        match &self.source.packing {
            Some(packing) => chunk(packing, buf).await,
            None => Ok(buf),
        }
    }

    /// Notes that the client gets bytes up to `end`.
    fn note_version(&self, end: u64) {
        if let Some(path) = self.source.noted_path {
            let mut sent = self.connection.permit.clients.sent.borrow_mut();
            sent.note(host_of(self.connection.peer), path, self.source.number, end);
        }
    }

    fn notify_sent(&self, range: Range<u64>) {
        if !range.is_empty() {
            let (peer, path, len) = (self.connection.peer, self.source.path, self.source.reading.size());
            let version = self.source.number;
            self.connection.config().notify(&Event::Sent { peer, path, range, len, version });
        }
    }
}

fn written_meanwhile() -> Error {
    Error::new(ErrorKind::Busy, "the disk was written to while it was sent")
}
