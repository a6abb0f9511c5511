// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Units: blocks in a file, with the bytes in front of them. An image that is opened for writing is looked through.

use super::blocks::{BlockFormat, ImageFile};
use super::mapped::Place;
use cowshed_types::memory::try_push;
use cowshed_types::{Error, ErrorKind, Result};

/// Blocks of an image that is opened for writing: each is looked at once.
const MAX_BLOCKS: usize = 16 << 20;
/// Places between units that are remembered.
const MAX_GAPS: usize = 64 << 10;

/// The layout of allocations in the file.
#[derive(Clone, Debug)]
pub(crate) struct Units {
    /// The file, as [`Place`] counts files.
    pub file: usize,
    /// Length of a block in bytes.
    pub block_bytes: u64,
    /// The bytes in front of each block.
    pub head: Vec<u8>,
    /// The first possible offset of a unit.
    pub first: u64,
    /// Units begin at multiples of so many bytes from `first` on.
    pub grid: u64,
    /// The bytes behind the last unit, where the file ends.
    pub tail: Vec<u8>,
    /// New units go behind all that the file has.
    pub is_at_end: bool,
}

impl Units {
    /// Length of a unit in bytes.
    pub(super) fn unit_bytes(&self) -> u64 {
        self.head.len() as u64 + self.block_bytes
    }

    /// The first place for a unit at or behind `end`.
    pub(super) fn behind(&self, end: u64) -> u64 {
        self.first + end.saturating_sub(self.first).div_ceil(self.grid) * self.grid
    }
}

/// Where the units of an image begin, in order.
pub(super) async fn survey<F: BlockFormat>(format: &F, image: &ImageFile, units: &Units) -> Result<Vec<u64>> {
    let mut starts: Vec<u64> = Vec::new();
    let mut at = 0;
    while at < format.size() {
        let (place, len) = format.place(image, at, format.size() - at).await?;
        if let Place::Data { host, .. } = place {
            let start = host.checked_sub(units.head.len() as u64).ok_or_else(|| {
                let message = format!("the block at byte {at} of the disk lies on the metadata");
                Error::invalid_image("block", format!("{host:#x}"), message)
            })?;
            if starts.len() >= MAX_BLOCKS {
                let message = format!("an image with more than {MAX_BLOCKS} allocated blocks can't be written to");
                return Err(Error::new(ErrorKind::Limit, message));
            }
            try_push(&mut starts, start)?;
        }
        at += len;
    }
    starts.sort_unstable();
    for pair in starts.windows(2) {
        if pair[1] - pair[0] < units.unit_bytes() {
            let message = "two blocks of the disk lie on each other in the file: the image can't be written to";
            return Err(Error::invalid_image("block", format!("{:#x}", pair[1]), message));
        }
    }
    for (from, to) in format.occupied(image).await? {
        let behind = starts.partition_point(|start| start + units.unit_bytes() <= from);
        if let Some(start) = starts.get(behind).filter(|start| **start < to) {
            let message = "a block of the disk lies on the metadata: the image can't be written to";
            return Err(Error::invalid_image("block", format!("{start:#x}"), message));
        }
    }
    Ok(starts)
}

/// Places for units between others, where units lie on a grid of their length. The first one is the last.
pub(super) fn gaps(starts: &[u64], units: &Units) -> Result<Vec<u64>> {
    let mut free = Vec::new();
    if units.grid != units.unit_bytes() || units.is_at_end {
        return Ok(free);
    }
    let mut expected = units.first;
    for start in starts {
        while expected < *start && free.len() < MAX_GAPS {
            try_push(&mut free, expected)?;
            expected += units.grid;
        }
        expected = start + units.grid;
    }
    free.reverse();
    Ok(free)
}
