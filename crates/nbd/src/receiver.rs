// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Received bytes that haven't been looked at yet: one system call brings many small messages.

use crate::Stream;
use cowshed_storage::{IoBuf, Want};
use cowshed_types::{Error, ErrorKind, Result};

/// Room for received bytes.
const BUFFER_BYTES: usize = 64 << 10;

/// The receiving end of a [`Stream`].
#[derive(Debug)]
pub struct Receiver {
    buffer: IoBuf,
    start: usize,
    end: usize,
    /// The last message was followed by much data, so the next one probably is: data in the buffer of it must be copied
    /// once more.
    expects_data: bool,
    /// The number of receives to look at messages.
    #[cfg(test)]
    receives: u64,
}

/// Data that is worth a system call of its own rather than a copy, in bytes.
const MUCH_DATA_BYTES: u64 = 16 << 10;

impl Default for Receiver {
    fn default() -> Self {
        Receiver {
            buffer: IoBuf::scratch(BUFFER_BYTES),
            start: 0,
            end: 0,
            expects_data: false,
            #[cfg(test)]
            receives: 0,
        }
    }
}

/// The peer closed the connection where more had to come.
fn ended() -> Error {
    Error::new(ErrorKind::Io, "the peer closed the connection in the middle of a message")
}

impl Receiver {
    /// True when all received bytes are used up.
    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// The message that was just looked at is followed by this many bytes of data.
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
            // Before much data, receive the message alone.
            let most = if self.expects_data { len - (self.end - self.start) } else { tail.len() };
            let unused = tail.split_off(most);
            #[cfg(test)]
            {
                self.receives += 1;
                assert!(self.receives <= tests::MOST_RECEIVES, "{} receives", self.receives);
            }
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

    /// Receives exactly as many bytes as an array has.
    pub async fn array<const N: usize>(&mut self, stream: &Stream) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        match self.peek(stream, N).await? {
            Some(found) => bytes.copy_from_slice(found),
            None => return Err(ended()),
        }
        self.consume(N);
        Ok(bytes)
    }

    /// Fills `buf`: from received bytes, then straight from the stream.
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

#[cfg(test)]
mod tests {
    use super::*;
    use cowshed_storage::{Dispatch, Socket, rt};

    /// The largest payload of a request.
    const PAYLOAD_BYTES: usize = 32 << 20;
    /// A receive brings at least one buffer of the kernel, and mostly the whole room: for a whole payload they are no
    /// more than these.
    pub(super) const MOST_RECEIVES: u64 = (PAYLOAD_BYTES / 4096) as u64;

    fn streams() -> (Stream, Stream) {
        let (ours, theirs) = Socket::pair().expect("a pair");
        (Stream::new(ours), Stream::new(theirs))
    }

    /// Sends a message of 28 bytes, a payload and a message of 16, all on its way as fast as it is taken.
    fn send(to: Stream, payload_bytes: usize) -> std::thread::JoinHandle<Stream> {
        std::thread::spawn(move || {
            let mut bytes = IoBuf::zeroed(28 + payload_bytes + 16);
            bytes[28 + payload_bytes..].fill(7);
            rt::block_on(async { to.send(vec![bytes], Dispatch::Alone).await.0 }).expect("the other end takes it");
            to
        })
    }

    /// A message may have announced much data, and the server refuses the request.
    #[test]
    fn a_refused_payload_is_skipped_in_large_pieces() {
        for said in [true, false] {
            let (ours, theirs) = streams();
            let sender = send(theirs, PAYLOAD_BYTES);
            let next = rt::block_on(async {
                let mut receiver = Receiver::default();
                if said {
                    receiver.note_data(PAYLOAD_BYTES as u64);
                }
                receiver.array::<28>(&ours).await.expect("the first message");
                receiver.skip(&ours, PAYLOAD_BYTES as u64).await.expect("the payload");
                receiver.array::<16>(&ours).await.expect("the next message")
            });
            drop(sender.join().expect("the sender ends"));
            assert_eq!(next, [7; 16], "the skip ends where the payload ends");
        }
    }

    /// The end of the stream within a payload is an error, not an endless wait.
    #[test]
    fn a_payload_that_ends_early_is_an_error() {
        let (ours, theirs) = streams();
        let sender = send(theirs, 1000);
        rt::block_on(async {
            let mut receiver = Receiver::default();
            drop(sender.join().expect("the sender ends"));
            receiver.array::<28>(&ours).await.expect("the first message");
            let error = receiver.skip(&ours, 2000).await.expect_err("1,016 bytes are there");
            assert!(error.to_string().contains("in the middle of a message"), "{error}");
        });
    }
}
