// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A small blocking NBD client of its own. Nothing of the product's protocol code is in it, so a mistake there can't
//! hide behind the same mistake here.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// The longest wait for any answer, in seconds. A daemon that takes longer counts as hung.
pub const ANSWER_LIMIT_S: u64 = 90;

const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
const REPLY_MAGIC: u32 = 0x6744_6698;
const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;
const OPT_GO: u32 = 7;
const OPT_STRUCTURED_REPLY: u32 = 8;
const OPT_EXTENDED_HEADERS: u32 = 11;
const REP_ACK: u32 = 1;
const REP_ERROR: u32 = 1 << 31;

/// The request's length is that of its payload (extended headers).
const FLAG_PAYLOAD_LEN: u16 = 1 << 5;
/// The last chunk of a reply.
const CHUNK_DONE: u16 = 1;
const CHUNK_NONE: u16 = 0;
const CHUNK_DATA: u16 = 1;
const CHUNK_HOLE: u16 = 2;
const CHUNK_ERROR: u16 = 1 << 15;
/// The longest payload of a chunk that is taken, in bytes.
const MOST_CHUNK_BYTES: u64 = 64 << 20;

/// The form of requests and replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// Simple replies.
    Simple,
    /// Structured replies.
    Structured,
    /// Extended headers.
    Extended,
}

/// A request's command, as the protocol numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Verb {
    /// `NBD_CMD_READ`.
    Read = 0,
    /// `NBD_CMD_WRITE`.
    Write = 1,
    /// `NBD_CMD_DISC`: the server sends no answer.
    Disconnect = 2,
    /// `NBD_CMD_FLUSH`.
    Flush = 3,
    /// `NBD_CMD_TRIM`.
    Trim = 4,
    /// `NBD_CMD_WRITE_ZEROES`.
    WriteZeroes = 6,
}

/// The end of a request.
#[derive(Debug)]
pub enum Ended {
    /// With success; the data of a read.
    Well(Vec<u8>),
    /// With an error number of the protocol.
    Refused(u32),
    /// The connection is gone, and the outcome is unknown.
    Gone,
    /// No answer within [`ANSWER_LIMIT_S`].
    Hung,
}

/// A request of a batch.
#[derive(Clone, Debug)]
pub struct Request {
    /// Its command.
    pub verb: Verb,
    /// Its flags.
    pub flags: u16,
    /// Where it begins, in bytes.
    pub offset: u64,
    /// Its length in bytes.
    pub len: u32,
    /// The data of a write.
    pub payload: Vec<u8>,
}

/// The end of a connection while a batch is in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// It doesn't.
    Never,
    /// After this many bytes of the requests, in both directions.
    After(usize),
    /// Behind the last request, in the direction of the server.
    HalfClosed,
}

/// A connection in its transmission phase.
pub struct Client {
    socket: UnixStream,
    dialect: Dialect,
    cookie: u64,
    /// Size of the export in bytes.
    pub size: u64,
}

/// A reply of which chunks are missing.
struct Pending {
    index: usize,
    offset: u64,
    data: Vec<u8>,
    error: u32,
}

fn invalid(text: &str) -> std::io::Error {
    std::io::Error::new(std::io::ErrorKind::InvalidData, text.to_owned())
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> std::io::Result<[u8; N]> {
    let part = bytes.get(at..at + N).and_then(|part| part.try_into().ok());
    part.ok_or_else(|| invalid("a reply is too short"))
}

fn option_bytes(option: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
    bytes.extend(option.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

impl Client {
    /// Connects to the export `name` on the socket `path`.
    ///
    /// # Errors
    /// The system's error, or the server's.
    pub fn connect(path: &Path, name: &str, dialect: Dialect) -> std::io::Result<Client> {
        let mut socket = UnixStream::connect(path)?;
        socket.set_read_timeout(Some(Duration::from_secs(ANSWER_LIMIT_S)))?;
        socket.set_write_timeout(Some(Duration::from_secs(ANSWER_LIMIT_S)))?;
        let mut greeting = [0; 18];
        socket.read_exact(&mut greeting)?;
        if &greeting[..16] != b"NBDMAGICIHAVEOPT" {
            return Err(invalid("the greeting isn't fixed newstyle"));
        }
        socket.write_all(&3u32.to_be_bytes())?;
        let asked = match dialect {
            Dialect::Simple => None,
            Dialect::Structured => Some(OPT_STRUCTURED_REPLY),
            Dialect::Extended => Some(OPT_EXTENDED_HEADERS),
        };
        let mut client = Client { socket, dialect, cookie: 0, size: 0 };
        if let Some(option) = asked {
            client.socket.write_all(&option_bytes(option, &[]))?;
            client.option_replies()?;
        }
        let mut go = (name.len() as u32).to_be_bytes().to_vec();
        go.extend(name.as_bytes());
        go.extend([0, 0]);
        client.socket.write_all(&option_bytes(OPT_GO, &go))?;
        client.option_replies()?;
        Ok(client)
    }

    /// Reads the replies to an option, up to its acknowledgement.
    fn option_replies(&mut self) -> std::io::Result<()> {
        loop {
            let mut head = [0; 20];
            self.socket.read_exact(&mut head)?;
            if u64::from_be_bytes(number(&head, 0)?) != OPTION_REPLY_MAGIC {
                return Err(invalid("an answer to an option has a wrong magic number"));
            }
            let mut data = vec![0; u32::from_be_bytes(number(&head, 16)?) as usize];
            self.socket.read_exact(&mut data)?;
            match u32::from_be_bytes(number(&head, 12)?) {
                REP_ACK => return Ok(()),
                kind if kind & REP_ERROR != 0 => return Err(invalid(&String::from_utf8_lossy(&data))),
                _ if data.len() == 12 && data[..2] == [0, 0] => self.size = u64::from_be_bytes(number(&data, 2)?),
                _ => {}
            }
        }
    }

    fn request_bytes(&self, request: &Request, cookie: u64) -> Vec<u8> {
        let is_extended = self.dialect == Dialect::Extended;
        let has_payload = is_extended && request.verb == Verb::Write;
        let flags = request.flags | if has_payload { FLAG_PAYLOAD_LEN } else { 0 };
        let magic = if is_extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
        let mut bytes = magic.to_be_bytes().to_vec();
        bytes.extend(flags.to_be_bytes());
        bytes.extend((request.verb as u16).to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        bytes.extend(request.offset.to_be_bytes());
        match is_extended {
            true => bytes.extend(u64::from(request.len).to_be_bytes()),
            false => bytes.extend(request.len.to_be_bytes()),
        }
        bytes.extend(&request.payload);
        bytes
    }

    /// Ends the session in order.
    pub fn disconnect(mut self) {
        let request = Request { verb: Verb::Disconnect, flags: 0, offset: 0, len: 0, payload: Vec::new() };
        let bytes = self.request_bytes(&request, self.cookie + 1);
        // The server may have gone before.
        let _ = self.socket.write_all(&bytes);
    }

    /// Reads a range.
    pub fn read(&mut self, offset: u64, len: u32) -> Ended {
        let mut ended = Ended::Gone;
        let request = Request { verb: Verb::Read, flags: 0, offset, len, payload: Vec::new() };
        match self.batch(&[request], Cut::Never, |_, end| ended = end) {
            None => ended,
            Some(broken) => broken,
        }
    }

    /// Sends all requests, and hands each reply to `each` with the request's index, in the server's order. When the
    /// connection is gone or silent, the result shows that, and replies are missing.
    pub fn batch(&mut self, requests: &[Request], cut: Cut, mut each: impl FnMut(usize, Ended)) -> Option<Ended> {
        let mut pending = HashMap::new();
        let mut bytes = Vec::new();
        for (index, request) in requests.iter().enumerate() {
            self.cookie += 1;
            let len = if request.verb == Verb::Read { request.len as usize } else { 0 };
            let entry = Pending { index, offset: request.offset, data: vec![0; len], error: 0 };
            pending.insert(self.cookie, entry);
            bytes.extend(self.request_bytes(request, self.cookie));
        }
        let outcome = std::thread::scope(|scope| {
            let writer = self.socket.try_clone();
            // Replies are taken meanwhile: neither end waits for the other's buffer.
            scope.spawn(move || {
                let Ok(mut socket) = writer else { return };
                let end = if let Cut::After(end) = cut { end.min(bytes.len()) } else { bytes.len() };
                // The reader sees that the connection has gone.
                let _ = socket.write_all(&bytes[..end]);
                let _ = match cut {
                    Cut::Never => Ok(()),
                    Cut::After(_) => socket.shutdown(Shutdown::Both),
                    Cut::HalfClosed => socket.shutdown(Shutdown::Write),
                };
            });
            while !pending.is_empty() {
                if let Some((index, ended)) = self.next_chunk(&mut pending)? {
                    each(index, ended);
                }
            }
            Ok::<(), std::io::Error>(())
        });
        match outcome {
            Ok(()) if cut == Cut::Never => None,
            Err(error) if matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut) => {
                Some(Ended::Hung)
            }
            _ => Some(Ended::Gone),
        }
    }

    /// Reads a chunk, or a simple reply; the request that it completes.
    fn next_chunk(&mut self, pending: &mut HashMap<u64, Pending>) -> std::io::Result<Option<(usize, Ended)>> {
        // All kinds begin with 16 bytes, the cookie at their end.
        let mut head = vec![0; 16];
        self.socket.read_exact(&mut head)?;
        let magic = u32::from_be_bytes(number(&head, 0)?);
        head.resize(if magic == EXTENDED_REPLY_MAGIC { 32 } else { 20 }, 0);
        if magic != REPLY_MAGIC {
            self.socket.read_exact(&mut head[16..])?;
        }
        let cookie = u64::from_be_bytes(number(&head, 8)?);
        let mut reply = pending.remove(&cookie).ok_or_else(|| invalid("a reply to no request"))?;
        let is_chunk = match (self.dialect, magic) {
            (Dialect::Simple | Dialect::Structured, REPLY_MAGIC) => false,
            (Dialect::Structured, STRUCTURED_REPLY_MAGIC) | (Dialect::Extended, EXTENDED_REPLY_MAGIC) => true,
            _ => return Err(invalid("a reply has a wrong magic number")),
        };
        if !is_chunk {
            let error = u32::from_be_bytes(number(&head, 4)?);
            if error != 0 {
                return Ok(Some((reply.index, Ended::Refused(error))));
            }
            self.socket.read_exact(&mut reply.data)?;
            return Ok(Some((reply.index, Ended::Well(reply.data))));
        }
        self.take_chunk(&head, &mut reply)?;
        let flags = u16::from_be_bytes(number(&head, 4)?);
        if flags & CHUNK_DONE == 0 {
            pending.insert(cookie, reply);
            return Ok(None);
        }
        let ended = if reply.error == 0 { Ended::Well(reply.data) } else { Ended::Refused(reply.error) };
        Ok(Some((reply.index, ended)))
    }

    fn take_chunk(&mut self, head: &[u8], reply: &mut Pending) -> std::io::Result<()> {
        let kind = u16::from_be_bytes(number(head, 6)?);
        let len = match self.dialect {
            Dialect::Extended => u64::from_be_bytes(number(head, 24)?),
            _ => u32::from_be_bytes(number(head, 16)?).into(),
        };
        if len > MOST_CHUNK_BYTES {
            return Err(invalid("a chunk is too long"));
        }
        let mut payload = vec![0; len as usize];
        self.socket.read_exact(&mut payload)?;
        match kind {
            CHUNK_NONE => {}
            CHUNK_DATA | CHUNK_HOLE => {
                let offset = u64::from_be_bytes(number(&payload, 0)?);
                let data = payload.get(8..).unwrap_or_default();
                let hole = vec![0; if kind == CHUNK_HOLE { u32::from_be_bytes(number(data, 0)?) as usize } else { 0 }];
                let data = if kind == CHUNK_HOLE { &hole } else { data };
                let at =
                    offset.checked_sub(reply.offset).ok_or_else(|| invalid("a chunk before its request"))? as usize;
                let place = reply.data.get_mut(at..at.saturating_add(data.len()));
                place.ok_or_else(|| invalid("a chunk behind its request"))?.copy_from_slice(data);
            }
            kind if kind & CHUNK_ERROR != 0 => reply.error = u32::from_be_bytes(number(&payload, 0)?),
            _ => return Err(invalid("a chunk of an unknown kind")),
        }
        Ok(())
    }
}
