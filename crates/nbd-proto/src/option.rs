// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Option haggling: a client's options, a server's replies.

use crate::cursor::{Cursor, Malformed, text};
use crate::flags::TransmissionFlags;
use crate::greeting::OPTION_MAGIC;

/// Magic of option replies.
pub const REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Bytes in front of an option's data.
pub const OPTION_HEADER_BYTES: usize = 16;
/// Bytes in front of an option reply's data.
pub const REPLY_HEADER_BYTES: usize = 20;
/// The most queries of one `NBD_OPT_SET_META_CONTEXT` or `NBD_OPT_LIST_META_CONTEXT` that are looked at.
pub const MAX_QUERIES: u32 = 256;

/// `NBD_OPT_…`.
#[allow(missing_docs)]
pub mod code {
    pub const EXPORT_NAME: u32 = 1;
    pub const ABORT: u32 = 2;
    pub const LIST: u32 = 3;
    pub const STARTTLS: u32 = 5;
    pub const INFO: u32 = 6;
    pub const GO: u32 = 7;
    pub const STRUCTURED_REPLY: u32 = 8;
    pub const LIST_META_CONTEXT: u32 = 9;
    pub const SET_META_CONTEXT: u32 = 10;
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// `NBD_REP_…`.
#[allow(missing_docs)]
pub mod rep {
    pub const ACK: u32 = 1;
    pub const SERVER: u32 = 2;
    pub const INFO: u32 = 3;
    pub const META_CONTEXT: u32 = 4;
    pub const ERROR_BIT: u32 = 1 << 31;
    pub const ERR_UNSUP: u32 = ERROR_BIT + 1;
    pub const ERR_POLICY: u32 = ERROR_BIT + 2;
    pub const ERR_INVALID: u32 = ERROR_BIT + 3;
    pub const ERR_PLATFORM: u32 = ERROR_BIT + 4;
    pub const ERR_TLS_REQD: u32 = ERROR_BIT + 5;
    pub const ERR_UNKNOWN: u32 = ERROR_BIT + 6;
    pub const ERR_SHUTDOWN: u32 = ERROR_BIT + 7;
    pub const ERR_BLOCK_SIZE_REQD: u32 = ERROR_BIT + 8;
    pub const ERR_TOO_BIG: u32 = ERROR_BIT + 9;
    pub const ERR_EXT_HEADER_REQD: u32 = ERROR_BIT + 10;
}

/// `NBD_INFO_…`.
#[allow(missing_docs)]
pub mod info {
    pub const EXPORT: u16 = 0;
    pub const NAME: u16 = 1;
    pub const DESCRIPTION: u16 = 2;
    pub const BLOCK_SIZE: u16 = 3;
}

/// The header in front of an option's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionHeader {
    /// `NBD_OPT_…`, also one that this version doesn't know.
    pub option: u32,
    /// Bytes of data that follow.
    pub len: u32,
}

impl OptionHeader {
    /// From the client's bytes.
    pub fn parse(bytes: &[u8; OPTION_HEADER_BYTES]) -> Result<OptionHeader, Malformed> {
        let mut cursor = Cursor::new(bytes);
        if cursor.u64()? != OPTION_MAGIC {
            return Err(Malformed("an option doesn't start with its magic number"));
        }
        Ok(OptionHeader { option: cursor.u32()?, len: cursor.u32()? })
    }

    /// The bytes of the header.
    pub fn encode(self) -> [u8; OPTION_HEADER_BYTES] {
        let mut bytes = [0; OPTION_HEADER_BYTES];
        bytes[..8].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.option.to_be_bytes());
        bytes[12..].copy_from_slice(&self.len.to_be_bytes());
        bytes
    }
}

/// An option with its data, ready to be sent.
pub fn encode(option: u32, data: &[u8]) -> Vec<u8> {
    let len = u32::try_from(data.len()).unwrap_or(u32::MAX);
    let mut bytes = OptionHeader { option, len }.encode().to_vec();
    bytes.extend_from_slice(data);
    bytes
}

/// The name in `NBD_OPT_EXPORT_NAME`.
pub fn parse_export_name(data: &[u8]) -> Result<&str, Malformed> {
    text(data)
}

/// `NBD_OPT_INFO` and `NBD_OPT_GO`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InfoRequest<'a> {
    /// The export's name, "" for the default one.
    pub name: &'a str,
    /// The client asked for, and will respect, `NBD_INFO_BLOCK_SIZE`.
    pub block_size: bool,
    /// The client asked for `NBD_INFO_NAME`.
    pub canonical_name: bool,
    /// The client asked for `NBD_INFO_DESCRIPTION`.
    pub description: bool,
}

impl<'a> InfoRequest<'a> {
    /// From the option's data. Information that this version doesn't know is ignored, as a server must.
    pub fn parse(data: &'a [u8]) -> Result<InfoRequest<'a>, Malformed> {
        let mut cursor = Cursor::new(data);
        let name = cursor.counted_string()?;
        let count = cursor.u16()?;
        let mut request = InfoRequest { name, block_size: false, canonical_name: false, description: false };
        for _ in 0..count {
            match cursor.u16()? {
                info::NAME => request.canonical_name = true,
                info::DESCRIPTION => request.description = true,
                info::BLOCK_SIZE => request.block_size = true,
                _ => {}
            }
        }
        cursor.end()?;
        Ok(request)
    }

    /// The option's data.
    pub fn encode(&self) -> Vec<u8> {
        let wanted = [
            (self.block_size, info::BLOCK_SIZE),
            (self.canonical_name, info::NAME),
            (self.description, info::DESCRIPTION),
        ];
        let mut bytes = counted(self.name);
        let count = wanted.iter().filter(|(wanted, _)| *wanted).count() as u16;
        bytes.extend_from_slice(&count.to_be_bytes());
        for (_, info) in wanted.iter().filter(|(wanted, _)| *wanted) {
            bytes.extend_from_slice(&info.to_be_bytes());
        }
        bytes
    }
}

/// `NBD_OPT_LIST_META_CONTEXT` and `NBD_OPT_SET_META_CONTEXT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetaContextRequest<'a> {
    /// The export's name.
    pub name: &'a str,
    /// The queries, at most [`MAX_QUERIES`].
    pub queries: Vec<&'a str>,
    /// The client sent more queries than that.
    pub too_many: bool,
}

impl<'a> MetaContextRequest<'a> {
    /// From the option's data.
    pub fn parse(data: &'a [u8]) -> Result<MetaContextRequest<'a>, Malformed> {
        let mut cursor = Cursor::new(data);
        let name = cursor.counted_string()?;
        let count = cursor.u32()?;
        let mut queries = Vec::new();
        for _ in 0..count.min(MAX_QUERIES) {
            queries.push(cursor.counted_string()?);
        }
        let too_many = count > MAX_QUERIES;
        if !too_many {
            cursor.end()?;
        }
        Ok(MetaContextRequest { name, queries, too_many })
    }

    /// The option's data.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = counted(self.name);
        bytes.extend_from_slice(&(self.queries.len() as u32).to_be_bytes());
        for query in &self.queries {
            bytes.extend_from_slice(&counted(query));
        }
        bytes
    }
}

fn counted(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u32).to_be_bytes().to_vec();
    bytes.extend_from_slice(text.as_bytes());
    bytes
}

/// Block sizes of an export, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSizes {
    /// Offsets and lengths are multiples of it: a power of two up to 65,536.
    pub minimum: u32,
    /// Requests that are multiples of it are efficient: a power of two, in bytes.
    pub preferred: u32,
    /// Longest payload of a request, in bytes.
    pub maximum: u32,
}

impl BlockSizes {
    /// The sizes that hold without a word of the server.
    pub const UNSAID: BlockSizes = BlockSizes { minimum: 1, preferred: 4096, maximum: crate::PORTABLE_PAYLOAD_BYTES };

    /// Whether the three obey the rules of "Block size constraints".
    pub fn check(self) -> Result<(), Malformed> {
        let minimum_is_right = self.minimum.is_power_of_two() && self.minimum <= 1 << 16;
        let preferred_is_right = self.preferred.is_power_of_two() && self.preferred >= self.minimum.max(512);
        let maximum_is_right =
            self.maximum == u32::MAX || (self.maximum >= self.minimum && self.maximum.is_multiple_of(self.minimum));
        match minimum_is_right && preferred_is_right && maximum_is_right {
            true => Ok(()),
            false => Err(Malformed("the block sizes of the export are impossible")),
        }
    }
}

/// A server's answer to an option.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OptionReply<'a> {
    /// Done.
    Ack,
    /// An export of the list.
    Server {
        /// Its name.
        name: &'a str,
        /// Its description for a user.
        description: &'a str,
    },
    /// Size in bytes and flags.
    Export(u64, TransmissionFlags),
    /// The export's canonical name.
    Name(&'a str),
    /// The export's description for a user.
    Description(&'a str),
    /// The export's block sizes.
    BlockSize(BlockSizes),
    /// A metadata context and its number.
    MetaContext(u32, &'a str),
    /// Information that this version doesn't know.
    Unknown,
    /// A refusal: `NBD_REP_ERR_…` and a text for a user, perhaps empty.
    Refused(u32, &'a str),
}

impl<'a> OptionReply<'a> {
    /// From the reply's type and data.
    pub fn parse(kind: u32, data: &'a [u8]) -> Result<OptionReply<'a>, Malformed> {
        let mut cursor = Cursor::new(data);
        if kind & rep::ERROR_BIT != 0 {
            // The text is for a user: its faults are no reason to forget the error.
            return Ok(OptionReply::Refused(kind, text(data).unwrap_or_default()));
        }
        Ok(match kind {
            rep::ACK => {
                cursor.end()?;
                OptionReply::Ack
            }
            rep::SERVER => {
                let name = cursor.counted_string()?;
                OptionReply::Server { name, description: text(cursor.rest())? }
            }
            rep::META_CONTEXT => OptionReply::MetaContext(cursor.u32()?, text(cursor.rest())?),
            rep::INFO => match cursor.u16()? {
                info::EXPORT => {
                    let export = OptionReply::Export(cursor.u64()?, TransmissionFlags(cursor.u16()?));
                    cursor.end()?;
                    export
                }
                info::NAME => OptionReply::Name(text(cursor.rest())?),
                info::DESCRIPTION => OptionReply::Description(text(cursor.rest())?),
                info::BLOCK_SIZE => {
                    let (minimum, preferred, maximum) = (cursor.u32()?, cursor.u32()?, cursor.u32()?);
                    cursor.end()?;
                    let sizes = BlockSizes { minimum, preferred, maximum };
                    sizes.check()?;
                    OptionReply::BlockSize(sizes)
                }
                _ => OptionReply::Unknown,
            },
            _ => return Err(Malformed("the server answers an option with an unknown reply")),
        })
    }

    /// Appends the whole reply to `option`, header included.
    pub fn append(&self, option: u32, bytes: &mut Vec<u8>) {
        let start = bytes.len();
        bytes.extend_from_slice(&[0; REPLY_HEADER_BYTES]);
        let mut put = |part: &[u8]| bytes.extend_from_slice(part);
        let kind = match self {
            OptionReply::Ack => rep::ACK,
            OptionReply::Server { name, description } => {
                put(&counted(name));
                put(description.as_bytes());
                rep::SERVER
            }
            OptionReply::Export(size, flags) => {
                put(&info::EXPORT.to_be_bytes());
                put(&size.to_be_bytes());
                put(&flags.0.to_be_bytes());
                rep::INFO
            }
            OptionReply::Name(name) => {
                put(&info::NAME.to_be_bytes());
                put(name.as_bytes());
                rep::INFO
            }
            OptionReply::Description(description) => {
                put(&info::DESCRIPTION.to_be_bytes());
                put(description.as_bytes());
                rep::INFO
            }
            OptionReply::BlockSize(sizes) => {
                put(&info::BLOCK_SIZE.to_be_bytes());
                for size in [sizes.minimum, sizes.preferred, sizes.maximum] {
                    put(&size.to_be_bytes());
                }
                rep::INFO
            }
            OptionReply::MetaContext(id, name) => {
                put(&id.to_be_bytes());
                put(name.as_bytes());
                rep::META_CONTEXT
            }
            OptionReply::Unknown => {
                put(&u16::MAX.to_be_bytes());
                rep::INFO
            }
            OptionReply::Refused(kind, message) => {
                put(message.as_bytes());
                *kind
            }
        };
        let len = (bytes.len() - start - REPLY_HEADER_BYTES) as u32;
        let header = &mut bytes[start..start + REPLY_HEADER_BYTES];
        header[..8].copy_from_slice(&REPLY_MAGIC.to_be_bytes());
        header[8..12].copy_from_slice(&option.to_be_bytes());
        header[12..16].copy_from_slice(&kind.to_be_bytes());
        header[16..].copy_from_slice(&len.to_be_bytes());
    }
}

/// The header in front of an option reply's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionReplyHeader {
    /// The option that this answers.
    pub option: u32,
    /// `NBD_REP_…`.
    pub kind: u32,
    /// Bytes of data that follow.
    pub len: u32,
}

impl OptionReplyHeader {
    /// The longest data that an honest server sends: a name and a description.
    pub const MAX_DATA_BYTES: u32 = 2 * crate::MAX_STRING_BYTES as u32 + 64;

    /// From the server's bytes.
    pub fn parse(bytes: &[u8; REPLY_HEADER_BYTES]) -> Result<OptionReplyHeader, Malformed> {
        let mut cursor = Cursor::new(bytes);
        if cursor.u64()? != REPLY_MAGIC {
            return Err(Malformed("an option reply doesn't start with its magic number"));
        }
        let header = OptionReplyHeader { option: cursor.u32()?, kind: cursor.u32()?, len: cursor.u32()? };
        if header.len > Self::MAX_DATA_BYTES {
            return Err(Malformed("an option reply is too long"));
        }
        Ok(header)
    }
}
