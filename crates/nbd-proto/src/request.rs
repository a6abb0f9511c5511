// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Requests of the transmission phase.

use crate::cursor::{Cursor, Malformed};
use crate::flags::CommandFlags;

/// Magic of a compact request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Magic of an extended request.
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;

/// The negotiated form of request headers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HeaderStyle {
    /// 28 bytes, lengths of 32 bits.
    #[default]
    Compact,
    /// 32 bytes, lengths of 64 bits.
    Extended,
}

impl HeaderStyle {
    /// Bytes of a request's header.
    pub const fn request_bytes(self) -> usize {
        match self {
            HeaderStyle::Compact => 28,
            HeaderStyle::Extended => 32,
        }
    }
}

/// The longer of both headers, in bytes.
pub const MAX_REQUEST_BYTES: usize = 32;

/// `NBD_CMD_…`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Command {
    Read,
    Write,
    Disconnect,
    Flush,
    Trim,
    Cache,
    WriteZeroes,
    BlockStatus,
    /// A command that this version doesn't know.
    Unknown(u16),
}

impl Command {
    /// From the number on the wire.
    pub const fn new(number: u16) -> Command {
        match number {
            0 => Command::Read,
            1 => Command::Write,
            2 => Command::Disconnect,
            3 => Command::Flush,
            4 => Command::Trim,
            5 => Command::Cache,
            6 => Command::WriteZeroes,
            7 => Command::BlockStatus,
            other => Command::Unknown(other),
        }
    }

    /// The number on the wire.
    pub const fn number(self) -> u16 {
        match self {
            Command::Read => 0,
            Command::Write => 1,
            Command::Disconnect => 2,
            Command::Flush => 3,
            Command::Trim => 4,
            Command::Cache => 5,
            Command::WriteZeroes => 6,
            Command::BlockStatus => 7,
            Command::Unknown(other) => other,
        }
    }

    /// True for commands that change the export.
    pub const fn writes(self) -> bool {
        matches!(self, Command::Write | Command::Trim | Command::WriteZeroes)
    }
}

/// A request's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The command.
    pub command: Command,
    /// Its flags.
    pub flags: CommandFlags,
    /// The client's mark, which every reply repeats.
    pub cookie: u64,
    /// First byte on the export.
    pub offset: u64,
    /// Bytes of the export, or of the payload: see [`Request::payload_bytes`].
    pub length: u64,
}

impl Request {
    /// From the first [`HeaderStyle::request_bytes`] bytes.
    pub fn parse(style: HeaderStyle, bytes: &[u8]) -> Result<Request, Malformed> {
        let mut cursor = Cursor::new(bytes);
        let magic = match style {
            HeaderStyle::Compact => REQUEST_MAGIC,
            HeaderStyle::Extended => EXTENDED_REQUEST_MAGIC,
        };
        if cursor.u32()? != magic {
            return Err(Malformed("a request doesn't start with its magic number"));
        }
        let flags = CommandFlags(cursor.u16()?);
        let command = Command::new(cursor.u16()?);
        let (cookie, offset) = (cursor.u64()?, cursor.u64()?);
        let length = match style {
            HeaderStyle::Compact => cursor.u32()?.into(),
            HeaderStyle::Extended => cursor.u64()?,
        };
        Ok(Request { command, flags, cookie, offset, length })
    }

    /// Bytes that follow the header. A write has a payload in both styles, with the flag or without: QEMU's client
    /// never sets the flag. In the extended style the flag adds a payload to any other command.
    pub fn payload_bytes(&self, style: HeaderStyle) -> u64 {
        let is_flagged = style == HeaderStyle::Extended && self.flags.contains(CommandFlags::PAYLOAD_LEN);
        let has_payload = self.command == Command::Write || is_flagged;
        if has_payload { self.length } else { 0 }
    }

    /// To bytes, and how many of them count. A length that the compact style can't hold is a bug of the caller; it is
    /// cut off here.
    pub fn encode(&self, style: HeaderStyle) -> ([u8; MAX_REQUEST_BYTES], usize) {
        let mut bytes = [0; MAX_REQUEST_BYTES];
        let magic = match style {
            HeaderStyle::Compact => REQUEST_MAGIC,
            HeaderStyle::Extended => EXTENDED_REQUEST_MAGIC,
        };
        bytes[..4].copy_from_slice(&magic.to_be_bytes());
        bytes[4..6].copy_from_slice(&self.flags.0.to_be_bytes());
        bytes[6..8].copy_from_slice(&self.command.number().to_be_bytes());
        bytes[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.offset.to_be_bytes());
        match style {
            HeaderStyle::Compact => bytes[24..28].copy_from_slice(&(self.length as u32).to_be_bytes()),
            HeaderStyle::Extended => bytes[24..].copy_from_slice(&self.length.to_be_bytes()),
        }
        (bytes, style.request_bytes())
    }
}

/// The payload of a `BLOCK_STATUS` that names its contexts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatusFilter {
    /// Bytes of the export that it is about.
    pub effect_bytes: u64,
    /// The numbers of the contexts, each once.
    pub contexts: Vec<u32>,
}

impl StatusFilter {
    /// Payloads longer than that can only repeat themselves.
    pub const MAX_BYTES: u64 = 8 + 4 * crate::option::MAX_QUERIES as u64;

    /// Parses the payload.
    pub fn parse(payload: &[u8]) -> Result<StatusFilter, Malformed> {
        let mut cursor = Cursor::new(payload);
        let effect_bytes = cursor.u64()?;
        let mut contexts = Vec::new();
        let ids = cursor.rest();
        if ids.is_empty() || !ids.len().is_multiple_of(4) || payload.len() as u64 > Self::MAX_BYTES {
            return Err(Malformed("the payload of a block status has an impossible length"));
        }
        let mut cursor = Cursor::new(ids);
        for _ in 0..ids.len() / 4 {
            let id = cursor.u32()?;
            if contexts.contains(&id) {
                return Err(Malformed("a block status names a context twice"));
            }
            contexts.push(id);
        }
        Ok(StatusFilter { effect_bytes, contexts })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn payload_follows_writes_and_flagged_extended_headers() {
        let request = |command, flags| Request { command, flags, cookie: 0, offset: 0, length: 9 };
        for flags in [CommandFlags::default(), CommandFlags::PAYLOAD_LEN] {
            let write = request(Command::Write, flags);
            assert_eq!(write.payload_bytes(HeaderStyle::Compact), 9);
            assert_eq!(write.payload_bytes(HeaderStyle::Extended), 9);
        }
        let read = request(Command::Read, CommandFlags::PAYLOAD_LEN);
        assert_eq!(read.payload_bytes(HeaderStyle::Compact), 0);
        assert_eq!(read.payload_bytes(HeaderStyle::Extended), 9);
    }

    #[test]
    fn status_filters_name_each_context_once() {
        let payload = |ids: &[u32]| {
            let mut bytes = 77u64.to_be_bytes().to_vec();
            bytes.extend(ids.iter().flat_map(|id| id.to_be_bytes()));
            bytes
        };
        let filter = StatusFilter::parse(&payload(&[1, 0])).unwrap();
        assert_eq!((filter.effect_bytes, filter.contexts), (77, vec![1, 0]));
        assert!(StatusFilter::parse(&payload(&[1, 1])).is_err());
        assert!(StatusFilter::parse(&payload(&[])).is_err());
        assert!(StatusFilter::parse(&payload(&[1])[..11]).is_err());
        assert!(StatusFilter::parse(&payload(&(0..1000).collect::<Vec<_>>())).is_err());
    }

    proptest! {
        #[test]
        fn requests_survive_the_wire(flags: u16, command: u16, cookie: u64, offset: u64, length: u32, extended: bool) {
            let style = if extended { HeaderStyle::Extended } else { HeaderStyle::Compact };
            let length = if extended { u64::from(length) << 9 } else { length.into() };
            let request =
                Request { command: Command::new(command), flags: CommandFlags(flags), cookie, offset, length };
            let (bytes, len) = request.encode(style);
            prop_assert_eq!(Request::parse(style, &bytes[..len]).unwrap(), request);
            prop_assert!(Request::parse(style, &bytes[..len - 1]).is_err());
        }

        #[test]
        fn no_bytes_make_the_parser_fall(bytes in proptest::collection::vec(any::<u8>(), 0..64), extended: bool) {
            let style = if extended { HeaderStyle::Extended } else { HeaderStyle::Compact };
            let _ = Request::parse(style, &bytes);
            let _ = StatusFilter::parse(&bytes);
        }
    }
}
