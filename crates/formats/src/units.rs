// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Units: blocks in a file, with the bytes in front of them. An image that is opened for writing is looked through.

use super::blocks::{BlockFormat, ImageFile};
use super::mapped::RunSource;
use cowshed_types::memory::try_push;
use cowshed_types::{Error, ErrorKind, Result};

/// Ranges of the file with blocks, of an image that is opened for writing. Twice as many are kept: 128 MiB of memory.
const MAX_RANGES: usize = 4 << 20;
/// Fewer ranges are not joined.
const JOINED_RANGES: usize = 1 << 20;
/// Places between units that are remembered.
const MAX_GAPS: usize = 64 << 10;

/// The layout of allocations in the file.
#[derive(Clone, Debug)]
pub(crate) struct Units {
    /// The file, as [`RunSource`] counts files.
    pub file: usize,
    /// Length of a block in bytes.
    pub block_bytes: u64,
    /// The bytes in front of each block.
    pub head: Vec<u8>,
    /// The first possible offset of a unit.
    pub first: u64,
    /// Units begin at multiples of this many bytes from `first` on.
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

/// Ranges of the file, from and to in bytes.
#[derive(Default)]
struct Ranges {
    found: Vec<(u64, u64)>,
    /// Joined again when there are this many.
    most: usize,
}

impl Ranges {
    /// Adds one behind the others. The order of the file is not that of the disk.
    fn push(&mut self, from: u64, to: u64) -> Result<()> {
        match self.found.last_mut() {
            Some(last) if last.1 == from => last.1 = to,
            _ => {
                if self.found.len() >= self.most.max(JOINED_RANGES) {
                    self.join()?;
                    if self.found.len() > MAX_RANGES {
                        let message =
                            format!("an image in more than {MAX_RANGES} ranges of its file can't be written to");
                        return Err(Error::new(ErrorKind::Limit, message));
                    }
                    // At least half of them are new before the next time.
                    self.most = 2 * self.found.len();
                }
                try_push(&mut self.found, (from, to))?;
            }
        }
        Ok(())
    }

    /// Puts them in the order of the file, neighbours as one. An error where two lie on each other.
    fn join(&mut self) -> Result<()> {
        self.found.sort_unstable();
        let two = "two blocks of the disk lie on each other in the file: the image can't be written to";
        check_apart(&self.found, "block", two)?;
        self.found.dedup_by(|next, last| {
            let is_next = last.1 == next.0;
            if is_next {
                last.1 = next.1;
            }
            is_next
        });
        Ok(())
    }
}

/// Refuses ranges of which two lie on each other; they are in order.
pub(crate) fn check_apart(ranges: &[(u64, u64)], field: &'static str, message: &str) -> Result<()> {
    match ranges.windows(2).find(|pair| pair[1].0 < pair[0].1) {
        Some(pair) => Err(Error::invalid_image(field, format!("{:#x}", pair[1].0), message)),
        None => Ok(()),
    }
}

/// Puts the parts of the metadata in order. An error where two lie on each other: a change of one would change the other. So
/// the blocks that tables lead to are no more than the file has room for their entries.
pub(crate) fn check_metadata(parts: &mut [(u64, u64)], field: &'static str) -> Result<()> {
    parts.sort_unstable();
    let two = "two parts of the metadata lie on each other in the file: the image can't be written to";
    check_apart(parts, field, two)
}

/// The ranges of the file with units, in order and apart.
pub(super) async fn survey<F: BlockFormat>(format: &F, image: &ImageFile, units: &Units) -> Result<Vec<(u64, u64)>> {
    let occupied = format.occupied(image).await?;
    let mut ranges = Ranges::default();
    let mut at = 0;
    let end = format.described_bytes();
    while at < end {
        let (place, len) = format.run(image, at, end - at).await?;
        if let RunSource::Data { host, .. } = place {
            let start = host.checked_sub(units.head.len() as u64).ok_or_else(|| {
                let message = format!("the block at byte {at} of the disk lies on the metadata");
                Error::invalid_image("block", format!("{host:#x}"), message)
            })?;
            // Blocks with a head come one by one, and the last one of the disk may be cut off by its end.
            ranges.push(start, start + len.div_ceil(units.block_bytes) * units.unit_bytes())?;
        }
        at += len;
    }
    ranges.join()?;
    for (from, to) in occupied {
        let behind = ranges.found.partition_point(|range| range.1 <= from);
        if let Some((start, _)) = ranges.found.get(behind).filter(|range| range.0 < to) {
            let message = "a block of the disk lies on the metadata: the image can't be written to";
            let at = (*start).max(from);
            return Err(Error::invalid_image("block", format!("{at:#x}"), message));
        }
    }
    Ok(ranges.found)
}

/// Places for units between others, where units lie on a grid of their length. The first one is the last.
pub(super) fn gaps(ranges: &[(u64, u64)], units: &Units) -> Result<Vec<u64>> {
    let mut free = Vec::new();
    if units.grid != units.unit_bytes() || units.is_at_end {
        return Ok(free);
    }
    let mut expected = units.first;
    for (from, to) in ranges {
        while expected < *from && free.len() < MAX_GAPS {
            try_push(&mut free, expected)?;
            expected += units.grid;
        }
        expected = *to;
    }
    free.reverse();
    Ok(free)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_in_any_order_become_few() {
        let mut ranges = Ranges { most: 0, ..Ranges::default() };
        // Backwards: no neighbour follows its own.
        for unit in (0..JOINED_RANGES as u64 * 3).rev() {
            ranges.push(unit * 512, unit * 512 + 512).unwrap();
        }
        ranges.join().unwrap();
        assert_eq!(ranges.found, [(0, JOINED_RANGES as u64 * 3 * 512)]);
        ranges.push(511, 512).unwrap();
        assert!(ranges.join().unwrap_err().to_string().contains("lie on each other"));
    }

    #[test]
    fn ranges_that_stay_apart_are_bounded() {
        let mut ranges = Ranges::default();
        let error = (0..3 * MAX_RANGES as u64).find_map(|unit| ranges.push(unit * 1024, unit * 1024 + 512).err());
        assert_eq!(error.unwrap().kind(), ErrorKind::Limit);
        assert!(ranges.found.len() <= 2 * MAX_RANGES);
    }
}
