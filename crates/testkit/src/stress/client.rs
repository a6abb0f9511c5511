// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A small blocking NBD client of its own: nothing of the product's protocol code is in it, so a mistake there can't hide
//! behind the same mistake here.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// The longest wait for any answer, in seconds. A daemon that takes longer counts as hung.
pub const ANSWER_LIMIT_S: u64 = 90;

const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;
const OPT_GO: u32 = 7;
const REP_ACK: u32 = 1;
const REP_ERROR: u32 = 1 << 31;

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

/// How a request ended that has no data to give.
#[derive(Debug)]
pub enum Ended {
    /// With success; the data of a read.
    Well(Vec<u8>),
    /// With an error number of the protocol.
    Refused(u32),
    /// The connection is gone, and nobody can say what became of the request.
    Gone,
    /// No answer within [`ANSWER_LIMIT_S`].
    Hung,
}

/// A connection in its transmission phase.
pub struct Client {
    socket: UnixStream,
    cookie: u64,
    /// Size of the export in bytes.
    pub size: u64,
}

fn invalid(text: &str) -> std::io::Error {
    std::io::Error::new(std::io::ErrorKind::InvalidData, text.to_owned())
}

impl Client {
    /// Connects to the export `name` on the socket `path`.
    ///
    /// # Errors
    /// What the system or the server says.
    pub fn connect(path: &Path, name: &str) -> std::io::Result<Client> {
        let mut socket = UnixStream::connect(path)?;
        socket.set_read_timeout(Some(Duration::from_secs(ANSWER_LIMIT_S)))?;
        socket.set_write_timeout(Some(Duration::from_secs(ANSWER_LIMIT_S)))?;
        let mut greeting = [0; 18];
        socket.read_exact(&mut greeting)?;
        if &greeting[..16] != b"NBDMAGICIHAVEOPT" {
            return Err(invalid("the greeting isn't fixed newstyle"));
        }
        let mut hello = 3u32.to_be_bytes().to_vec();
        hello.extend(OPTION_MAGIC.to_be_bytes());
        hello.extend(OPT_GO.to_be_bytes());
        hello.extend((name.len() as u32 + 6).to_be_bytes());
        hello.extend((name.len() as u32).to_be_bytes());
        hello.extend(name.as_bytes());
        hello.extend([0, 0]);
        socket.write_all(&hello)?;
        let mut size = 0;
        loop {
            let mut head = [0; 20];
            socket.read_exact(&mut head)?;
            let word = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().expect("four bytes"));
            if u64::from_be_bytes(head[..8].try_into().expect("eight bytes")) != OPTION_REPLY_MAGIC {
                return Err(invalid("an answer to an option has a wrong magic number"));
            }
            let mut data = vec![0; word(16) as usize];
            socket.read_exact(&mut data)?;
            match word(12) {
                REP_ACK => break,
                kind if kind & REP_ERROR != 0 => return Err(invalid(&String::from_utf8_lossy(&data))),
                _ if data.len() == 12 && data[..2] == [0, 0] => {
                    size = u64::from_be_bytes(data[2..10].try_into().expect("eight bytes"));
                }
                _ => {}
            }
        }
        Ok(Client { socket, cookie: 0, size })
    }

    /// Sends a request and waits for its answer.
    pub fn request(&mut self, verb: Verb, flags: u16, offset: u64, len: u32, payload: &[u8]) -> Ended {
        match self.exchange(verb, flags, offset, len, payload) {
            Ok(ended) => ended,
            Err(error) => match error.kind() {
                std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut => Ended::Hung,
                _ => Ended::Gone,
            },
        }
    }

    fn exchange(&mut self, verb: Verb, flags: u16, offset: u64, len: u32, payload: &[u8]) -> std::io::Result<Ended> {
        self.cookie += 1;
        let mut request = REQUEST_MAGIC.to_be_bytes().to_vec();
        request.extend(flags.to_be_bytes());
        request.extend((verb as u16).to_be_bytes());
        request.extend(self.cookie.to_be_bytes());
        request.extend(offset.to_be_bytes());
        request.extend(len.to_be_bytes());
        request.extend(payload);
        self.socket.write_all(&request)?;
        if verb == Verb::Disconnect {
            return Ok(Ended::Gone);
        }
        let mut head = [0; 16];
        self.socket.read_exact(&mut head)?;
        let word = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().expect("four bytes"));
        if word(0) != REPLY_MAGIC || head[8..] != self.cookie.to_be_bytes() {
            return Err(invalid("a reply has a wrong magic number or cookie"));
        }
        if word(4) != 0 {
            return Ok(Ended::Refused(word(4)));
        }
        let mut data = vec![0; if verb == Verb::Read { len as usize } else { 0 }];
        self.socket.read_exact(&mut data)?;
        Ok(Ended::Well(data))
    }
}
