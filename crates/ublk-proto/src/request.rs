// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The descriptor of a request.

use crate::bytes::{put_u32, put_u64, u32_at, u64_at};
use crate::{Malformed, SECTOR_BYTES};

/// Bytes of a descriptor.
pub const DESCRIPTOR_BYTES: usize = 24;
/// Bits of a descriptor besides the operation.
mod flags {
    pub const FUA: u32 = 1 << 13;
    pub const NO_UNMAP: u32 = 1 << 15;
}

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Data of the disk.
    Read,
    /// New data.
    Write {
        /// It is durable before the request ends.
        is_durable: bool,
    },
    /// All earlier changes are durable.
    Flush,
    /// The bytes are of no use any more.
    Discard,
    /// The bytes read as zeroes.
    WriteZeroes {
        /// They may lose their space.
        may_unmap: bool,
        /// They are durable before the request ends.
        is_durable: bool,
    },
}

impl Operation {
    /// True for requests that change bytes of the disk.
    pub fn changes(&self) -> bool {
        !matches!(self, Operation::Read | Operation::Flush)
    }
}

/// The limits that the driver keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The longest data, in bytes.
    pub max_request_bytes: u32,
    /// Logical block in bytes.
    pub block_bytes: u32,
    /// Requests may change the disk.
    pub writable: bool,
}

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The kind of request.
    pub operation: Operation,
    /// First byte on the disk.
    pub offset: u64,
    /// Length in bytes: 0 for a flush.
    pub len: u64,
}

impl Request {
    /// Reads a descriptor.
    ///
    /// # Errors
    /// A request that isn't one of a device with these limits: a mistake of the driver's or of ours.
    pub fn parse(bytes: &[u8; DESCRIPTOR_BYTES], limits: &Limits) -> Result<Request, Malformed> {
        let word = u32_at(bytes, 0);
        let is_durable = word & flags::FUA != 0;
        let operation = match word & 0xff {
            0 => Operation::Read,
            1 => Operation::Write { is_durable },
            2 => Operation::Flush,
            3 => Operation::Discard,
            5 => Operation::WriteZeroes { may_unmap: word & flags::NO_UNMAP == 0, is_durable },
            other => return Err(Malformed::new("an unknown operation", other)),
        };
        if operation == Operation::Flush {
            return Ok(Request { operation, offset: 0, len: 0 });
        }
        let (sectors, start) = (u32_at(bytes, 4), u64_at(bytes, 8));
        let len = u64::from(sectors) * SECTOR_BYTES;
        let offset = start.checked_mul(SECTOR_BYTES).filter(|offset| offset.checked_add(len).is_some());
        let offset = offset.ok_or(Malformed::new("a request passes the end of all disks", start))?;
        let has_data = matches!(operation, Operation::Read | Operation::Write { .. });
        if len == 0 || (has_data && len > u64::from(limits.max_request_bytes)) {
            return Err(Malformed::new("the length of a request in sectors is out of range", sectors));
        }
        let block_bytes = u64::from(limits.block_bytes);
        if !offset.is_multiple_of(block_bytes) || !len.is_multiple_of(block_bytes) {
            return Err(Malformed::new("a request is no number of logical blocks", start));
        }
        match operation.changes() && !limits.writable {
            true => Err(Malformed::new("a change of a disk that is read-only", start)),
            false => Ok(Request { operation, offset, len }),
        }
    }

    /// The descriptor of a request, as a driver writes it: for tests.
    pub fn bytes(&self) -> [u8; DESCRIPTOR_BYTES] {
        let mut bytes = [0; DESCRIPTOR_BYTES];
        let fua = |is_durable: bool| if is_durable { flags::FUA } else { 0 };
        let word = match self.operation {
            Operation::Read => 0,
            Operation::Write { is_durable } => 1 | fua(is_durable),
            Operation::Flush => 2,
            Operation::Discard => 3,
            Operation::WriteZeroes { may_unmap, is_durable } => {
                5 | fua(is_durable) | if may_unmap { 0 } else { flags::NO_UNMAP }
            }
        };
        put_u32(&mut bytes, 0, word);
        put_u32(&mut bytes, 4, u32::try_from(self.len / SECTOR_BYTES).unwrap_or(u32::MAX));
        put_u64(&mut bytes, 8, self.offset / SECTOR_BYTES);
        bytes
    }
}
