// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Received bytes that haven't been looked at yet: one system call brings many small messages.

use crate::Stream;
use cowshed_block::{Error, ErrorKind, Result};
use cowshed_storage::{IoBuf, Want};

/// Room for received bytes.
const BUFFER_BYTES: usize = 64 << 10;

/// The receiving end of a [`Stream`].
#[derive(Debug)]
pub struct Receiver {
    buffer: IoBuf,
    start: usize,
    end: usize,
    /// The last message was followed by much data, so the next one probably is: what goes into the buffer of it must be
    /// copied once more.
    expects_data: bool,
}

/// Data that is worth a system call of its own rather than a copy, in bytes.
const MUCH_DATA_BYTES: u64 = 16 << 10;

impl Default for Receiver {
    fn default() -> Self {
        Receiver { buffer: IoBuf::scratch(BUFFER_BYTES), start: 0, end: 0, expects_data: false }
    }
}

/// The peer closed the connection where more had to come.
fn ended() -> Error {
    Error::new(ErrorKind::Io, "the peer closed the connection in the middle of a message")
}

impl Receiver {
    /// Received bytes that nobody has looked at.
    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// The message that was just looked at is followed by so many bytes of data.
    pub fn note_data(&mut self, data_bytes: u64) {
        self.expects_data = data_bytes >= MUCH_DATA_BYTES;
    }

    /// Receives until `len` bytes (at most 64 KiB) are there, and shows them; they stay. `None` when the peer has closed
    /// before the first of them.
    pub async fn peek(&mut self, stream: &Stream, len: usize) -> Result<Option<&[u8]>> {
        while self.end - self.start < len {
            if self.start == self.end {
                (self.start, self.end) = (0, 0);
            } else if self.start + len > self.buffer.len() {
                self.buffer.copy_within(self.start..self.end, 0);
                (self.start, self.end) = (0, self.end - self.start);
            }
            let mut tail = self.buffer.split_off(self.end);
            // Of a message before much data, nothing but the message.
            let most = if self.expects_data { len - (self.end - self.start) } else { tail.len() };
            let unused = tail.split_off(most);
            let (result, mut tail) = stream.receive(tail, Want::Some).await;
            if tail.unsplit(unused).is_err() || self.buffer.unsplit(tail).is_err() {
                return Err(Error::internal("the parts of a split buffer did not join"));
            }
            match result? {
                0 if self.start == self.end => return Ok(None),
                0 => return Err(ended()),
                count => self.end += count,
            }
        }
        Ok(Some(&self.buffer[self.start..self.start + len]))
    }

    /// Forgets the first `len` bytes, which were shown before.
    pub fn consume(&mut self, len: usize) {
        self.start = (self.start + len).min(self.end);
    }

    /// Receives exactly so many bytes as an array has.
    pub async fn array<const N: usize>(&mut self, stream: &Stream) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        match self.peek(stream, N).await? {
            Some(found) => bytes.copy_from_slice(found),
            None => return Err(ended()),
        }
        self.consume(N);
        Ok(bytes)
    }

    /// Fills `buf`: from what is there, then straight from the stream.
    pub async fn fill(&mut self, stream: &Stream, mut buf: IoBuf) -> (Result<()>, IoBuf) {
        let here = (self.end - self.start).min(buf.len());
        buf[..here].copy_from_slice(&self.buffer[self.start..self.start + here]);
        self.start += here;
        if here == buf.len() {
            return (Ok(()), buf);
        }
        let tail = buf.split_off(here);
        let wanted = tail.len();
        let (result, tail) = stream.receive(tail, Want::All).await;
        let result = match result {
            Ok(count) if count == wanted => Ok(()),
            Ok(_) => Err(ended()),
            Err(error) => Err(error),
        };
        match buf.unsplit(tail) {
            Ok(()) => (result, buf),
            Err(_) => (Err(Error::internal("the parts of a split buffer did not join")), buf),
        }
    }

    /// Throws `len` bytes away.
    pub async fn skip(&mut self, stream: &Stream, mut len: u64) -> Result<()> {
        // No copy is spared here; with the wish to spare one, each system call would bring one byte.
        self.expects_data = false;
        while len > 0 {
            if self.is_empty() && self.peek(stream, 1).await?.is_none() {
                return Err(ended());
            }
            let here = u64::try_from(self.end - self.start).unwrap_or(u64::MAX).min(len);
            self.start += here as usize;
            len -= here;
        }
        Ok(())
    }
}
