// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The look at every block of a disk that a check of the block formats begins with.

use super::blocks::{BlockFormat, ImageFile};
use super::mapped::RunSource;
use cowshed_graph::node::MappedCheck;
use cowshed_types::memory::grow_map;
use cowshed_types::{ErrorKind, Result};
use std::collections::HashMap;

/// The result of a look at every block of a disk.
#[derive(Default)]
pub(crate) struct BlockSurvey {
    pub check: MappedCheck,
    /// Allocated blocks that follow an allocated one on the disk, and not in the file: without those behind a gap, which
    /// count as fragmented, too.
    pub apart: u64,
    used: Used,
    max: usize,
}

/// Host blocks that are in use, by their offset in blocks, rounded down.
enum Used {
    /// A bit for each, 64 together. Blocks begin at one distance from each other, so each has a number of its own.
    OnGrid(HashMap<u64, u64>),
    /// Where it begins. Blocks begin anywhere, so those that share a number lie on each other.
    Anywhere(HashMap<u64, u64>),
}

impl Default for Used {
    fn default() -> Self {
        Used::OnGrid(HashMap::new())
    }
}

impl Used {
    /// Notes a block; false where it lies on another one, which stays noted alone.
    fn claim(&mut self, host: u64, block_bytes: u64) -> Result<bool> {
        let number = host / block_bytes;
        match self {
            Used::OnGrid(used) => {
                grow_map(used)?;
                let (word, bit) = (used.entry(number / 64).or_default(), 1 << (number % 64));
                let is_free = *word & bit == 0;
                *word |= bit;
                Ok(is_free)
            }
            Used::Anywhere(used) => {
                let touches = |number| used.get(&number).is_some_and(|other| host.abs_diff(*other) < block_bytes);
                if touches(number) || touches(number + 1) || number.checked_sub(1).is_some_and(touches) {
                    return Ok(false);
                }
                grow_map(used)?;
                used.insert(number, host);
                Ok(true)
            }
        }
    }
}

impl BlockSurvey {
    /// Looks every block up. A wrong entry, or a block in two places of the disk, is a corruption.
    pub(crate) async fn of<F: BlockFormat>(
        format: &F,
        file: &ImageFile,
        block_bytes: u64,
        max: usize,
    ) -> Result<BlockSurvey> {
        let mut survey = BlockSurvey::before(format, block_bytes, max);
        survey.add_blocks(format, file, block_bytes).await?;
        Ok(survey)
    }

    /// Before any block is looked up. At most `max` findings are noted.
    pub(crate) fn before<F: BlockFormat>(format: &F, block_bytes: u64, max: usize) -> BlockSurvey {
        let used = match format.units() {
            Some(units) if units.grid != block_bytes => Used::Anywhere(HashMap::new()),
            _ => Used::default(),
        };
        BlockSurvey { used, max, ..BlockSurvey::default() }
    }

    /// Looks every block up.
    pub(crate) async fn add_blocks<F: BlockFormat>(
        &mut self,
        format: &F,
        file: &ImageFile,
        block_bytes: u64,
    ) -> Result<()> {
        let (max, survey) = (self.max, self);
        let size = format.described_bytes();
        let (mut at, mut last_end, mut neighbour_end) = (0, None, None);
        // A block that is there in part comes in several runs.
        let mut last_block = None;
        while at < size && survey.check.findings.len() < max {
            match format.place(file, at, size - at).await {
                Ok((RunSource::Data { .. }, len)) if last_block == Some(at / block_bytes) => at += len,
                Ok((RunSource::Data { host, .. }, len)) => {
                    last_block = Some(at / block_bytes);
                    let host = host.saturating_sub(at % block_bytes);
                    let counters = &mut survey.check.counters;
                    counters.allocated_clusters += 1;
                    counters.fragmented_clusters += u64::from(last_end.is_some_and(|end| end != host));
                    counters.image_end_offset = counters.image_end_offset.max(host + block_bytes);
                    survey.apart += u64::from(neighbour_end.is_some_and(|end| end != host));
                    last_end = Some(host + block_bytes);
                    neighbour_end = last_end;
                    survey.claim(host, block_bytes, || format!("block at byte {at} of the disk"))?;
                    at += len;
                }
                Ok((_, len)) => {
                    neighbour_end = None;
                    at += len;
                }
                Err(error) if error.kind() == ErrorKind::InvalidImage => {
                    survey.corruption(format!("block at byte {at} of the disk: {error}"));
                    at = at.saturating_add(block_bytes - at % block_bytes);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Notes that a block of the file is in use; twice is a corruption, and false. `ENOMEM` where there is no memory to note it.
    pub(crate) fn claim(&mut self, host: u64, block_bytes: u64, whose: impl Fn() -> String) -> Result<bool> {
        let is_free = self.used.claim(host, block_bytes)?;
        if !is_free {
            self.corruption(format!("{}: offset {host:#x} is in use already", whose()));
        }
        Ok(is_free)
    }

    /// Blocks of the file that are in use.
    pub(crate) fn used(&self) -> u64 {
        match &self.used {
            Used::OnGrid(used) => used.values().map(|word| u64::from(word.count_ones())).sum(),
            Used::Anywhere(used) => used.len() as u64,
        }
    }

    /// A finding that counts.
    pub(crate) fn corruption(&mut self, text: String) {
        self.check.counters.corruptions += 1;
        if self.check.findings.len() < self.max {
            self.check.findings.push(format!("ERROR: {text}"));
        }
    }

    /// Without the totals, for formats where qemu-img counts nothing.
    pub(crate) fn without_totals(self) -> MappedCheck {
        let mut check = self.check;
        let counters = &mut check.counters;
        counters.image_end_offset = 0;
        counters.total_clusters = 0;
        counters.allocated_clusters = 0;
        counters.fragmented_clusters = 0;
        check
    }
}
