// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The header of compressed loop images of Linux, version 2: docs/formats/block-formats.md.

use crate::bytes::be32_at;
use cowshed_types::{Error, Result};

/// Bytes up to the table: a script, and two numbers.
pub const HEADER_BYTES: usize = 136;
/// The largest block, in bytes: it is unpacked whole.
const MOST_BLOCK_BYTES: u32 = 64 << 20;

/// The header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CloopHeader {
    /// Bytes of the disk in a block.
    pub block_bytes: u64,
    /// Blocks; the table has an entry more, of 8 bytes.
    pub blocks: u32,
}

impl CloopHeader {
    /// Reads the header.
    ///
    /// # Errors
    /// For blocks of lengths that the format doesn't have.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let short = || Error::invalid_image("block_size", "", "the image is cut off in its header");
        let (block, blocks) = (be32_at(bytes, 128).ok_or_else(short)?, be32_at(bytes, 132).ok_or_else(short)?);
        if block == 0 || !block.is_multiple_of(512) || block > MOST_BLOCK_BYTES {
            let error = Error::invalid_image("block_size", block, "blocks are whole sectors, of up to 64 MiB");
            return Err(if block == 0 { error.qemu("block_size cannot be zero") } else { error });
        }
        Ok(CloopHeader { block_bytes: block.into(), blocks })
    }

    /// Size of the disk in bytes.
    pub fn size(&self) -> u64 {
        self.block_bytes * u64::from(self.blocks)
    }

    /// Bytes of the table.
    pub fn table_bytes(&self) -> u64 {
        (u64::from(self.blocks) + 1) * 8
    }
}
