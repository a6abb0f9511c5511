// SPDX-License-Identifier: Apache-2.0 OR MIT
//! An extent of the kind seSparse, which is only read: docs/formats/vmdk.md.

use super::extent::{expect_grain, is_hole, read};
use super::open::Directories;
use super::tables::{GrainTables, TableBytes, TablePlace};
use crate::holes::Holes;
use crate::mapped::RunSource;
use cowshed_graph::node::Node;
use cowshed_graph::open::Opener;
use cowshed_layout::vmdk::{Grain, HEADER_BYTES, SECTOR_BYTES, SeSparseHeader};
use cowshed_types::memory::try_collect;
use cowshed_types::{Error, ErrorKind, Result};
use std::sync::Arc;

/// The header of an extent and its directory.
pub(super) struct SeSparse {
    pub file: usize,
    pub header: SeSparseHeader,
    /// The entries as they are in the file. One that is wrong is an error where it counts.
    directory: Vec<u64>,
    /// The tables of the disk in memory.
    tables: Arc<GrainTables>,
    /// Where tables were never written. The extent is only read, so they stay.
    holes: Holes,
}

/// The refusal of a writer.
pub(super) fn no_writing() -> Error {
    const REASON: &str = ": they are read, convert the disk to write to it";
    Error::new(ErrorKind::ReadOnly, "No write support for seSparse images available").hint(REASON)
}

impl SeSparse {
    /// Reads the headers and the directory. `file`: the index of `node` among the files of the disk.
    pub(super) async fn open(
        opener: &Opener,
        node: &Node,
        file: usize,
        directories: &mut Directories,
    ) -> Result<SeSparse> {
        let header = SeSparseHeader::parse(&read(node, 0, HEADER_BYTES as u64).await?)?;
        let place = header.volatile_sector.checked_mul(SECTOR_BYTES).filter(|place| *place < node.size());
        let volatile = match place {
            Some(place) => read(node, place, HEADER_BYTES as u64).await?.to_vec(),
            // As of a hole.
            None => vec![0; HEADER_BYTES],
        };
        SeSparseHeader::check_volatile(&volatile)?;
        header.check_places()?;
        let len = header.directory_bytes();
        directories.add(opener, len)?;
        let place = header.directory_sector * SECTOR_BYTES;
        if place.checked_add(len).is_none_or(|end| end > node.size()) {
            let message = "the grain directory is not in the file";
            return Err(Error::invalid_image("grainDirectoryOffset", header.directory_sector, message));
        }
        let bytes = read(node, place, len).await?;
        let directory = try_collect(bytes.as_chunks::<8>().0.iter().map(|entry| u64::from_le_bytes(*entry)))?;
        Ok(SeSparse { file, header, directory, tables: Arc::clone(&directories.tables), holes: Holes::default() })
    }

    /// Entries of the directory.
    pub(super) fn directory(&self) -> &[u64] {
        &self.directory
    }

    fn file_bytes(&self, files: &[Arc<Node>]) -> u64 {
        files.get(self.file).map_or(0, |file| file.size())
    }

    /// The place of a grain table; `None` where the directory has none.
    pub(super) fn table_offset(&self, files: &[Arc<Node>], index: u64) -> Result<Option<u64>> {
        let entry = usize::try_from(index).ok().and_then(|index| self.directory.get(index));
        let entry = *entry.ok_or_else(|| Error::internal("the grain directory is too short").value(index))?;
        let Some(offset) = self.header.table(entry)? else { return Ok(None) };
        // An offset is below 2^63.
        if offset + self.header.table_bytes() as u64 > self.file_bytes(files) {
            let message = "a grain table is not in the file: it points after EOF";
            return Err(Error::invalid_image("grain directory entry", format!("{entry:#x}"), message));
        }
        Ok(Some(offset))
    }

    /// A grain table; `None` where the directory has none.
    pub(super) async fn table(&self, files: &[Arc<Node>], index: u64) -> Result<Option<TableBytes>> {
        match self.table_offset(files, index)? {
            Some(offset) => self.table_at(files, offset).await.map(Some),
            None => Ok(None),
        }
    }

    /// The table at a byte of the file; `None` in a hole.
    pub(super) async fn written_table(
        &self,
        files: &[Arc<Node>],
        offset: u64,
        holes: &Holes,
    ) -> Result<Option<TableBytes>> {
        let place = TablePlace { file: self.file, offset };
        match is_hole(files, holes, place, self.header.table_bytes()).await {
            true => Ok(None),
            false => self.table_at(files, offset).await.map(Some),
        }
    }

    async fn table_at(&self, files: &[Arc<Node>], offset: u64) -> Result<TableBytes> {
        let place = TablePlace { file: self.file, offset };
        self.tables.read(files, place, self.header.table_bytes()).await
    }

    /// The number of tables from `index` on that lie in one hole of the file, or aren't there, if the first one does. It is
    /// `most` at most.
    async fn unwritten(&self, files: &[Arc<Node>], index: u64, most: u64) -> Option<u64> {
        let first = self.table_offset(files, index).ok()??;
        if self.tables.find(TablePlace { file: self.file, offset: first }).is_some() {
            return None;
        }
        let len = self.header.table_bytes() as u64;
        let end = self.holes.end_of(files.get(self.file)?, first, len).await?;
        let is_within = |index: &u64| match self.table_offset(files, *index) {
            Ok(Some(start)) => first <= start && start + len <= end,
            Ok(None) => true,
            Err(_) => false,
        };
        let last = index.saturating_add(most).min(self.directory.len() as u64);
        Some((index..last).take_while(is_within).count() as u64)
    }

    /// One run inside one grain table: as many grains as follow each other.
    pub(super) async fn map(&self, files: &[Arc<Node>], at: u64, len: u64) -> Result<(RunSource, u64)> {
        let (grain_bytes, span) = (self.header.grain_bytes(), self.header.table_span_bytes());
        let until_table_end = span - at % span;
        let touched = len.saturating_sub(until_table_end).div_ceil(span).saturating_add(1);
        if let Some(tables) = self.unwritten(files, at / span, touched).await {
            let rest = tables.saturating_sub(1).saturating_mul(span);
            return Ok((RunSource::Unallocated, until_table_end.saturating_add(rest).min(len)));
        }
        let Some(table) = self.table(files, at / span).await? else {
            let next = usize::try_from(at / span + 1).unwrap_or(usize::MAX);
            let wanted = usize::try_from(len.div_ceil(span)).unwrap_or(usize::MAX);
            let more = self.directory.iter().skip(next).take(wanted).take_while(|entry| **entry == 0).count() as u64;
            return Ok((RunSource::Unallocated, until_table_end.saturating_add(more.saturating_mul(span)).min(len)));
        };
        let (index, skip) = ((at % span / grain_bytes) as usize, at % grain_bytes);
        let grain = |index: usize| self.header.grain_at(&table, index);
        let first = grain(index).unwrap_or_else(|| Err(Error::internal("a grain table is too short").offset(at)))?;
        let (mut next, mut end) = (index + 1, grain_bytes - skip);
        let place = match first {
            Grain::At(sector) => {
                let file_bytes = self.file_bytes(files);
                let host = expect_grain(file_bytes, sector, at, skip, end.min(len))?;
                let follows =
                    |next: usize| Some(Grain::At(sector + (next - index) as u64 * grain_bytes / SECTOR_BYTES));
                while end < len
                    && grain(next).and_then(Result::ok) == follows(next)
                    && expect_grain(file_bytes, sector, at, skip, (end + grain_bytes).min(len)).is_ok()
                {
                    end += grain_bytes;
                    next += 1;
                }
                RunSource::Data { file: self.file, host }
            }
            first => {
                while end < len && grain(next).and_then(Result::ok) == Some(first) {
                    end += grain_bytes;
                    next += 1;
                }
                if first == Grain::Zero { RunSource::Zero } else { RunSource::Unallocated }
            }
        };
        Ok((place, end.min(len)))
    }
}
