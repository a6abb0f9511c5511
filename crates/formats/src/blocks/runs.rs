// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs of entries: equal ones, blocks that follow each other, and all entries of a hole of the file.

use super::{FileTable, ImageFile};
use cowshed_types::Result;
use std::sync::Arc;

/// Length of an entry of a directory, which leads to a table, in bytes.
const DIRECTORY_ENTRY_BYTES: u64 = 8;

impl ImageFile {
    /// The count of the `len` bytes behind byte `at` of the disk for which a table's entries are equal. It ends with a page of the
    /// table, or with a hole of the file. So an empty disk is looked up in large steps. `index`: the entry for `at`, one
    /// for each `block_bytes`.
    pub(crate) async fn same<const N: usize>(
        &self,
        table: FileTable,
        index: u64,
        (at, len, block_bytes): (u64, u64, u64),
    ) -> Result<u64> {
        let position = index * N as u64;
        let (page, skip) = self.page_of(&table, position).await?;
        let most = (at % block_bytes).saturating_add(len).div_ceil(block_bytes);
        let is_hole = self.empty.get().is_some_and(|empty| Arc::ptr_eq(empty, &page));
        let same = match if is_hole { self.hole_end(table.offset + position, N as u64).await } else { None } {
            // A part of an entry isn't counted.
            Some(end) => (end.min(table.offset.saturating_add(table.bytes)) - table.offset - position) / N as u64,
            None => {
                let (entries, _) = page.get(skip..).unwrap_or_default().as_chunks::<N>();
                let most = usize::try_from(most).unwrap_or(usize::MAX);
                entries.iter().take(most).take_while(|entry| Some(*entry) == entries.first()).count() as u64
            }
        };
        Ok((same.clamp(1, most.max(1)).saturating_mul(block_bytes) - at % block_bytes).min(len))
    }

    /// As [`ImageFile::same`], of an entry of zeroes in a table that entry `slot` of `directory` leads to. It also counts the
    /// next tables, those that are missing, and those in the same hole of the file. `place`: where an entry of the directory
    /// leads to; 0 for nowhere, `None` for a wrong one.
    pub(crate) async fn unallocated(
        &self,
        (directory, slot): (FileTable, u64),
        (table, index): (FileTable, u64),
        (at, len, block_bytes): (u64, u64, u64),
        place: impl Fn([u8; 8]) -> Option<u64>,
    ) -> Result<u64> {
        let here = self.same::<8>(table, index, (at, len, block_bytes)).await?;
        let span = (table.bytes / DIRECTORY_ENTRY_BYTES).saturating_mul(block_bytes);
        let until_end = span - at % span;
        let next = (slot + 1) * DIRECTORY_ENTRY_BYTES;
        if here < until_end || here >= len || next >= directory.bytes {
            return Ok(here);
        }
        let start = table.offset + index * DIRECTORY_ENTRY_BYTES;
        let Some(end) = self.hole_end(start, table.offset + table.bytes - start).await else { return Ok(here) };
        let (page, skip) = self.page_of(&directory, next).await?;
        let (entries, _) = page.get(skip..).unwrap_or_default().as_chunks::<8>();
        let is_unwritten = |entry: &[u8; 8]| match place(*entry) {
            Some(0) => true,
            Some(host) => host >= start && host.checked_add(table.bytes).is_some_and(|host_end| host_end <= end),
            None => false,
        };
        let most = usize::try_from((len - here).div_ceil(span)).unwrap_or(usize::MAX);
        let more = entries.iter().take(most).take_while(|entry| is_unwritten(entry)).count() as u64;
        Ok(until_end.saturating_add(more.saturating_mul(span)).min(len))
    }

    /// The number of blocks from the one at `host` on whose data follow each other in the file too. It is at most `most`, and
    /// counts within one page of the table. `index`: the entry of the first block.
    pub(crate) async fn blocks_in_a_row(
        &self,
        table: FileTable,
        index: u64,
        (host, block_bytes, most): (u64, u64, u64),
        place: impl Fn([u8; 8]) -> Option<u64>,
    ) -> Result<u64> {
        let (page, skip) = self.page_of(&table, index * 8).await?;
        let (entries, _) = page.get(skip..).unwrap_or_default().as_chunks::<8>();
        // All of them are in the file.
        let there = self.len().saturating_sub(host) / block_bytes;
        let most = usize::try_from(most.min(there)).unwrap_or(usize::MAX);
        let places = (host..).step_by(block_bytes as usize).zip(entries).take(most);
        Ok((places.take_while(|(host, entry)| place(**entry) == Some(*host)).count() as u64).max(1))
    }

    /// True for a table in a hole of the file: it is as if it had been read, and has no entries.
    pub(crate) async fn is_unwritten(&self, table: &FileTable) -> bool {
        self.hole_end(table.offset, table.bytes).await.is_some()
    }

    /// The end of the hole of the file that all of the `len` bytes at `offset` are in.
    async fn hole_end(&self, offset: u64, len: u64) -> Option<u64> {
        match self.patches {
            None => self.holes.end_of(&self.node[0], offset, len).await,
            Some(_) => None,
        }
    }
}
