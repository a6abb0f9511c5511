// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Zstandard frames of bytes that don't shrink (RFC 8878, 3.1.1).

use cowshed_types::{Error, Result};

const MAGIC: u32 = 0xfd2f_b528;
/// One segment, with the length of the content in 4 bytes.
const DESCRIPTOR: u8 = 0b1010_0000;
/// The largest block of all frames, in bytes.
const MAX_BLOCK_BYTES: usize = 128 << 10;

/// A frame of raw blocks.
pub(super) fn frame(bytes: &[u8]) -> Result<Vec<u8>> {
    let len = u32::try_from(bytes.len()).map_err(|_| Error::invalid_argument("too many bytes for one frame"))?;
    let mut frame = Vec::with_capacity(bytes.len() + 16 + 3 * bytes.len() / MAX_BLOCK_BYTES);
    frame.extend(MAGIC.to_le_bytes());
    frame.push(DESCRIPTOR);
    frame.extend(len.to_le_bytes());
    // A frame without bytes has one block without bytes.
    let blocks = bytes.len().div_ceil(MAX_BLOCK_BYTES).max(1);
    for index in 0..blocks {
        let from = index * MAX_BLOCK_BYTES;
        let block = &bytes[from..bytes.len().min(from + MAX_BLOCK_BYTES)];
        let is_last = u32::from(index + 1 == blocks);
        frame.extend_from_slice(&((block.len() as u32) << 3 | is_last).to_le_bytes()[..3]);
        frame.extend_from_slice(block);
    }
    Ok(frame)
}
