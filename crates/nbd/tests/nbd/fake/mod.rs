// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A server whose connections have different offers and die of a request.
#![allow(dead_code, reason = "each test file uses a part")]

use cowshed_nbd::ClientOptions;
use cowshed_storage::SocketAddress;
use std::io::{Read, Result, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
pub const CHUNK_MAGIC: u32 = 0x668e_33ef;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
const OPT_GO: u32 = 7;
const OPT_STRUCTURED_REPLY: u32 = 8;
const OPT_SET_META_CONTEXT: u32 = 10;
const OPT_EXTENDED_HEADERS: u32 = 11;
const REP_ACK: u32 = 1;
const REP_INFO: u32 = 3;
const REP_META_CONTEXT: u32 = 4;
const REP_ERR_UNSUP: u32 = 0x8000_0001;
pub const READ: u16 = 0;
pub const WRITE: u16 = 1;
pub const DISCONNECT: u16 = 2;
pub const TRIM: u16 = 4;
pub const WRITE_ZEROES: u16 = 6;
pub const BLOCK_STATUS: u16 = 7;

/// The answers of a connection's server, and its end.
#[derive(Clone, Copy, Debug)]
pub struct Offer {
    pub size: u64,
    pub flags: u16,
    /// Minimum, preferred, maximum.
    pub block_sizes: Option<[u32; 3]>,
    pub structured: bool,
    pub extended: bool,
    pub has_status: bool,
    /// The time after its first request at which the connection ends.
    pub dies_after: Option<Duration>,
}

impl Offer {
    /// HAS_FLAGS, SEND_FLUSH, SEND_TRIM and SEND_WRITE_ZEROES.
    pub const FLAGS: u16 = 1 | 1 << 2 | 1 << 5 | 1 << 6;

    pub fn new(size: u64) -> Offer {
        Offer {
            size,
            flags: Self::FLAGS,
            block_sizes: None,
            structured: false,
            extended: false,
            has_status: false,
            dies_after: None,
        }
    }

    pub fn dying(self) -> Offer {
        Offer { dies_after: Some(Duration::ZERO), ..self }
    }
}

/// A request as it came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The number of the connection, from 0.
    pub connection: usize,
    pub command: u16,
    pub offset: u64,
    pub len: u64,
}

/// A running server. It ends with the test's process.
pub struct Fake {
    path: std::path::PathBuf,
    seen: Arc<Mutex<Vec<Seen>>>,
    _folder: tempfile::TempDir,
}

impl Fake {
    /// Connections are served one after the other by the offers, those after the last one by the last one.
    pub fn start(offers: &[Offer]) -> Fake {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("s");
        let listener = UnixListener::bind(&path).expect("a socket");
        let seen: Arc<Mutex<Vec<Seen>>> = Arc::default();
        let (offers, log) = (offers.to_vec(), Arc::clone(&seen));
        std::thread::spawn(move || {
            for (connection, stream) in listener.incoming().map_while(Result::ok).enumerate() {
                let offer = offers[connection.min(offers.len() - 1)];
                // The end of a client is no fault here.
                let _ = serve(stream, offer, |command, offset, len| {
                    log.lock().unwrap().push(Seen { connection, command, offset, len });
                });
            }
        });
        Fake { path, seen, _folder: folder }
    }

    pub fn options(&self, reconnect_delay: Duration) -> ClientOptions {
        let address = SocketAddress::Unix(self.path.to_str().expect("UTF-8").to_owned());
        ClientOptions { reconnect_delay, ..ClientOptions::new(address, "") }
    }

    /// The requests of this kind.
    pub fn seen(&self, command: u16) -> Vec<Seen> {
        self.seen.lock().unwrap().iter().filter(|seen| seen.command == command).copied().collect()
    }
}

pub fn numbers<const N: usize>(stream: &mut UnixStream) -> Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes).map(|()| bytes)
}

fn option_reply(stream: &mut UnixStream, option: u32, kind: u32, data: &[u8]) -> Result<()> {
    let mut reply = OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
    for number in [option, kind, data.len() as u32] {
        reply.extend(number.to_be_bytes());
    }
    reply.extend(data);
    stream.write_all(&reply)
}

/// A handshake up to the transmission phase.
pub fn negotiate(stream: &mut UnixStream, offer: &Offer) -> Result<()> {
    stream.write_all(b"NBDMAGICIHAVEOPT\0\x03")?;
    numbers::<4>(stream)?;
    loop {
        assert_eq!(u64::from_be_bytes(numbers(stream)?), OPTION_MAGIC);
        let option = u32::from_be_bytes(numbers(stream)?);
        let length = u32::from_be_bytes(numbers(stream)?);
        stream.read_exact(&mut vec![0; length as usize])?;
        match option {
            OPT_EXTENDED_HEADERS if offer.extended => option_reply(stream, option, REP_ACK, &[])?,
            OPT_STRUCTURED_REPLY if offer.structured => option_reply(stream, option, REP_ACK, &[])?,
            OPT_SET_META_CONTEXT if offer.has_status => {
                option_reply(stream, option, REP_META_CONTEXT, b"\0\0\0\x01base:allocation")?;
                option_reply(stream, option, REP_ACK, &[])?;
            }
            OPT_GO => {
                let info = [&[0, 0][..], &offer.size.to_be_bytes()[..], &offer.flags.to_be_bytes()[..]].concat();
                option_reply(stream, option, REP_INFO, &info)?;
                if let Some(sizes) = offer.block_sizes {
                    let info = [&[0, 3][..], &sizes.map(u32::to_be_bytes).concat()[..]].concat();
                    option_reply(stream, option, REP_INFO, &info)?;
                }
                return option_reply(stream, option, REP_ACK, &[]);
            }
            other => option_reply(stream, other, REP_ERR_UNSUP, &[])?,
        }
    }
}

/// Answers reads with zeroes and all else with success, in simple replies.
fn serve(mut stream: UnixStream, offer: Offer, mut note: impl FnMut(u16, u64, u64)) -> Result<()> {
    negotiate(&mut stream, &offer)?;
    loop {
        let _magic_and_flags: [u8; 6] = numbers(&mut stream)?;
        let command = u16::from_be_bytes(numbers(&mut stream)?);
        let cookie: [u8; 8] = numbers(&mut stream)?;
        let offset = u64::from_be_bytes(numbers(&mut stream)?);
        let len = match offer.extended {
            true => u64::from_be_bytes(numbers(&mut stream)?),
            false => u32::from_be_bytes(numbers(&mut stream)?).into(),
        };
        if command == WRITE {
            stream.read_exact(&mut vec![0; len as usize])?;
        }
        note(command, offset, len);
        if command == DISCONNECT {
            return Ok(());
        }
        if let Some(delay) = offer.dies_after {
            // The server dies so long after the request.
            std::thread::sleep(delay);
            return Ok(());
        }
        let mut reply = SIMPLE_REPLY_MAGIC.to_be_bytes().to_vec();
        reply.extend([0; 4]);
        reply.extend(cookie);
        if command == READ {
            reply.resize(reply.len() + len as usize, 0);
        }
        stream.write_all(&reply)?;
    }
}
