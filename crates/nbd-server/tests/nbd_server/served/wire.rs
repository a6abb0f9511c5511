// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A client that sends exactly the bytes of a test, right or wrong.

use cowshed_nbd_proto::flags::{ClientFlags, CommandFlags, TransmissionFlags};
use cowshed_nbd_proto::option::{self, InfoRequest, MetaContextRequest, OptionReply, OptionReplyHeader, code, rep};
use cowshed_nbd_proto::reply::{StatusRun, kind};
use cowshed_nbd_proto::{Chunk, Command, HeaderStyle, ReplyHeader, ReplyStyle, Request, greeting};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// One connection. Whatever isn't as the protocol has it is a panic.
pub struct Wire {
    pub stream: UnixStream,
    pub replies: ReplyStyle,
    pub headers: HeaderStyle,
    next_cookie: u64,
}

/// The whole reply to a request.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// 0: success.
    pub errno: u32,
    pub message: String,
    /// The data of a read, holes filled in.
    pub data: Vec<u8>,
    /// Content chunks: (offset, length, is a hole).
    pub pieces: Vec<(u64, u64, bool)>,
    /// The runs of a block status, by the number of the context.
    pub status: Vec<(u32, Vec<StatusRun>)>,
}

impl Wire {
    /// Connects and exchanges greetings.
    pub fn connect(socket: &Path) -> Wire {
        Self::connect_with(socket, ClientFlags::FIXED_NEWSTYLE | ClientFlags::NO_ZEROES)
    }

    pub fn connect_with(socket: &Path, flags: ClientFlags) -> Wire {
        Self::greet(UnixStream::connect(socket).expect("connect"), flags)
    }

    /// Exchanges greetings over a stream that is connected.
    pub fn greet(stream: UnixStream, flags: ClientFlags) -> Wire {
        let mut wire = Wire { stream, replies: ReplyStyle::Simple, headers: HeaderStyle::Compact, next_cookie: 1 };
        let offered = greeting::parse(&wire.array()).expect("greeting");
        assert_eq!(offered.0, 3);
        wire.send(&flags.0.to_be_bytes());
        wire
    }

    /// In the transmission phase of the export, in this style, with these contexts.
    pub fn enter(socket: &Path, style: ReplyStyle, name: &str, contexts: &[&str]) -> (Wire, TransmissionFlags) {
        Self::enter_on(UnixStream::connect(socket).expect("connect"), style, name, contexts)
    }

    /// As [`Wire::enter`], over a stream that is connected.
    pub fn enter_on(stream: UnixStream, style: ReplyStyle, name: &str, contexts: &[&str]) -> (Wire, TransmissionFlags) {
        let mut wire = Wire::greet(stream, ClientFlags::FIXED_NEWSTYLE | ClientFlags::NO_ZEROES);
        match style {
            ReplyStyle::Simple => {}
            ReplyStyle::Structured => wire.expect_ack(code::STRUCTURED_REPLY),
            ReplyStyle::Extended => wire.expect_ack(code::EXTENDED_HEADERS),
        }
        wire.replies = style;
        if style == ReplyStyle::Extended {
            wire.headers = HeaderStyle::Extended;
        }
        if !contexts.is_empty() {
            let request = MetaContextRequest { name, queries: contexts.to_vec(), too_many: false };
            let replies = wire.option(code::SET_META_CONTEXT, &request.encode());
            assert_eq!(replies.len(), contexts.len() + 1, "{replies:?}");
        }
        let flags = wire.go(name);
        (wire, flags)
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("send");
    }

    pub fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes).expect("receive");
        bytes
    }

    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.stream.read_exact(&mut bytes).expect("receive");
        bytes
    }

    /// The server has closed the connection, without a word before.
    pub fn expect_end(&mut self) {
        let mut rest = Vec::new();
        // A reset is an end too.
        let _ = self.stream.read_to_end(&mut rest);
        assert!(rest.is_empty(), "{} bytes before the end", rest.len());
    }

    /// Sends an option and collects the replies, the last one included.
    pub fn option(&mut self, option: u32, data: &[u8]) -> Vec<(u32, Vec<u8>)> {
        self.send(&option::encode(option, data));
        self.option_replies(option)
    }

    pub fn option_replies(&mut self, option: u32) -> Vec<(u32, Vec<u8>)> {
        let mut replies = Vec::new();
        loop {
            let header = OptionReplyHeader::parse(&self.array()).expect("header");
            assert_eq!(header.option, option);
            let data = self.bytes(header.len as usize);
            OptionReply::parse(header.kind, &data).expect("reply");
            replies.push((header.kind, data));
            if header.kind == rep::ACK || header.kind & rep::ERROR_BIT != 0 {
                return replies;
            }
        }
    }

    pub fn expect_ack(&mut self, option: u32) {
        assert_eq!(self.option(option, &[]), [(rep::ACK, vec![])], "option {option}");
    }

    /// The kind of the last reply to an option.
    pub fn outcome(&mut self, option: u32, data: &[u8]) -> u32 {
        self.option(option, data).last().expect("a reply").0
    }

    pub fn go(&mut self, name: &str) -> TransmissionFlags {
        let request = InfoRequest { name, block_size: true, canonical_name: true, description: true };
        let replies = self.option(code::GO, &request.encode());
        assert_eq!(replies.last().map(|reply| reply.0), Some(rep::ACK), "{replies:?}");
        let mut flags = None;
        for (kind, data) in &replies {
            if let Ok(OptionReply::Export(_, found)) = OptionReply::parse(*kind, data) {
                flags = Some(found);
            }
        }
        flags.expect("the export is described")
    }

    /// Sends a request; `payload` follows it. The length is as given, true or not.
    pub fn request(&mut self, command: Command, flags: CommandFlags, offset: u64, length: u64, payload: &[u8]) -> u64 {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        let request = Request { command, flags, cookie, offset, length };
        let (bytes, len) = request.encode(self.headers);
        self.send(&bytes[..len]);
        self.send(payload);
        cookie
    }

    /// Sends a request and collects its reply.
    pub fn ask(&mut self, command: Command, flags: CommandFlags, offset: u64, length: u64) -> Collected {
        let cookie = self.request(command, flags, offset, length, &[]);
        let reads = command == Command::Read;
        self.collect(cookie, offset, if reads { length } else { 0 })
    }

    pub fn write(&mut self, flags: CommandFlags, offset: u64, data: &[u8]) -> Collected {
        let flags = flags.with(CommandFlags::PAYLOAD_LEN, self.headers == HeaderStyle::Extended);
        let cookie = self.request(Command::Write, flags, offset, data.len() as u64, data);
        self.collect(cookie, offset, 0)
    }

    /// Collects the reply to a request of which only this one is in flight; `length`: of a read.
    pub fn collect(&mut self, cookie: u64, offset: u64, length: u64) -> Collected {
        let mut collected = Collected { data: vec![0xaa; length as usize], ..Collected::default() };
        loop {
            let magic = self.array::<4>();
            let needed = ReplyHeader::bytes_needed(self.replies, magic).expect("magic");
            let mut bytes = magic.to_vec();
            bytes.extend(self.bytes(needed - 4));
            match ReplyHeader::parse(&bytes).expect("header") {
                ReplyHeader::Simple { cookie: found, errno } => {
                    assert_eq!(found, cookie);
                    assert!(self.replies == ReplyStyle::Simple || length == 0, "a read needs a structured reply");
                    collected.errno = errno.0;
                    if errno.0 == 0 && length > 0 {
                        collected.data = self.bytes(length as usize);
                        collected.pieces.push((offset, length, false));
                    }
                    return collected;
                }
                ReplyHeader::Chunk { cookie: found, done, kind, payload_bytes } => {
                    assert_eq!(found, cookie);
                    let payload = self.bytes(payload_bytes as usize);
                    self.take_chunk(&mut collected, offset, kind, &payload);
                    if done {
                        let covered: u64 = collected.pieces.iter().map(|piece| piece.1).sum();
                        assert!(collected.errno != 0 || covered == length, "{:?}", collected.pieces);
                        return collected;
                    }
                    assert_ne!(kind, kind::NONE, "NONE is always the last");
                }
            }
        }
    }

    fn take_chunk(&self, collected: &mut Collected, start: u64, kind: u16, payload: &[u8]) {
        if kind == kind::OFFSET_DATA {
            let offset = u64::from_be_bytes(payload[..8].try_into().unwrap());
            let data = &payload[8..];
            assert!(!data.is_empty());
            let at = (offset - start) as usize;
            collected.data[at..at + data.len()].copy_from_slice(data);
            collected.pieces.push((offset, data.len() as u64, false));
            return;
        }
        match Chunk::parse(kind, payload).expect("chunk") {
            Chunk::None => {}
            Chunk::Hole { offset, len } => {
                let at = (offset - start) as usize;
                collected.data[at..at + len as usize].fill(0);
                collected.pieces.push((offset, len.into(), true));
            }
            Chunk::Status(status) => collected.status.push((status.context, status.runs().collect())),
            Chunk::Error { errno, message } => {
                collected.errno = errno.0;
                collected.message = message.to_owned();
            }
        }
    }
}
