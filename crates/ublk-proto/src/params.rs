// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The parameters of a device (`ublk_params`): its size, its blocks, its abilities.

use crate::bytes::{put_u16, put_u32, put_u64, u16_at, u32_at, u64_at};
use crate::{Malformed, SECTOR_BYTES};

/// Bytes of the struct: the parts that we set, which all versions of the driver have in these places.
pub const PARAMS_BYTES: usize = 64;
/// The offset of the second part.
const DISCARD_AT: usize = 40;
/// The most sectors of one discard or one write of zeroes: the kernel splits longer ones.
const MAX_DISCARD_SECTORS: u32 = 1 << 21;
/// The largest block that the kernel takes everywhere, in bytes: a page.
pub const MAX_BLOCK_BYTES: u32 = 4096;

/// Bits of the first part.
mod attributes {
    pub const READ_ONLY: u32 = 1 << 0;
    pub const VOLATILE_CACHE: u32 = 1 << 2;
    pub const FUA: u32 = 1 << 3;
}

/// Bits of the parts that are there.
mod parts {
    pub const BASIC: u32 = 1 << 0;
    pub const DISCARD: u32 = 1 << 1;
}

/// The properties of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Params {
    /// Sectors.
    pub sectors: u64,
    /// No request changes it.
    pub read_only: bool,
    /// Changes are durable only after a flush.
    pub has_cache: bool,
    /// Logical block in bytes: a power of two from 512 to [`MAX_BLOCK_BYTES`].
    pub block_bytes: u32,
    /// The allocation unit of the image in bytes, which the kernel gets as the grain of discards.
    pub grain_bytes: u32,
    /// The longest data of a request, in bytes.
    pub max_request_bytes: u32,
    /// Discards and writes of zeroes are taken.
    pub discards: bool,
}

fn shift(bytes: u32) -> u8 {
    // Below 32.
    bytes.trailing_zeros() as u8
}

impl Params {
    /// As the driver takes them. A device of no sector is refused by the driver.
    pub fn bytes(&self) -> [u8; PARAMS_BYTES] {
        let mut bytes = [0; PARAMS_BYTES];
        put_u32(&mut bytes, 0, PARAMS_BYTES as u32);
        put_u32(&mut bytes, 4, if self.discards { parts::BASIC | parts::DISCARD } else { parts::BASIC });
        let mut attributes = if self.read_only { attributes::READ_ONLY } else { 0 };
        if self.has_cache {
            attributes |= attributes::VOLATILE_CACHE | attributes::FUA;
        }
        put_u32(&mut bytes, 8, attributes);
        bytes[12] = shift(self.block_bytes);
        bytes[13] = shift(self.block_bytes);
        let grain_bytes = self.grain_bytes.max(self.block_bytes);
        bytes[14] = shift(grain_bytes);
        bytes[15] = shift(self.block_bytes);
        put_u32(&mut bytes, 16, self.max_request_bytes / SECTOR_BYTES as u32);
        put_u64(&mut bytes, 24, self.sectors);
        if self.discards {
            put_u32(&mut bytes, DISCARD_AT + 4, self.block_bytes);
            put_u32(&mut bytes, DISCARD_AT + 8, MAX_DISCARD_SECTORS);
            put_u32(&mut bytes, DISCARD_AT + 12, MAX_DISCARD_SECTORS);
            put_u16(&mut bytes, DISCARD_AT + 16, 1);
        }
        bytes
    }

    /// Asks for them: the contents of the buffer before the driver writes to it.
    pub fn question() -> [u8; PARAMS_BYTES] {
        let mut bytes = [0; PARAMS_BYTES];
        put_u32(&mut bytes, 0, PARAMS_BYTES as u32);
        bytes
    }

    /// Reads the driver's bytes.
    ///
    /// # Errors
    /// Where the first part is missing, or blocks have an impossible length.
    pub fn parse(bytes: &[u8; PARAMS_BYTES]) -> Result<Params, Malformed> {
        let given = u32_at(bytes, 4);
        if given & parts::BASIC == 0 {
            return Err(Malformed::new("a device has no parameters", given));
        }
        let attributes = u32_at(bytes, 8);
        let block = |at: usize, what| match bytes[at] {
            shift @ 9..=31 => Ok(1 << shift),
            shift => Err(Malformed::new(what, shift)),
        };
        let block_bytes = block(12, "the logical block has an impossible length")?;
        if block_bytes > MAX_BLOCK_BYTES {
            return Err(Malformed::new("the logical block has an impossible length", block_bytes));
        }
        let max_sectors = u32_at(bytes, 16);
        let max_request_bytes = max_sectors.checked_mul(SECTOR_BYTES as u32);
        Ok(Params {
            sectors: u64_at(bytes, 24),
            read_only: attributes & attributes::READ_ONLY != 0,
            has_cache: attributes & attributes::VOLATILE_CACHE != 0,
            block_bytes,
            grain_bytes: block(14, "the optimal length of requests is impossible")?,
            max_request_bytes: max_request_bytes
                .ok_or(Malformed::new("the longest request has an impossible length", max_sectors))?,
            discards: given & parts::DISCARD != 0 && u16_at(bytes, DISCARD_AT + 16) > 0,
        })
    }
}
