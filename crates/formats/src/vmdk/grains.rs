// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A sparse extent as `formats/writer.rs` sees it: where its metadata are, and the entries of its grains in both directories.

use super::extent::Sparse;
use crate::blocks::{BlockFormat, FileTable, ImageFile};
use crate::mapped::RunSource;
use crate::units::{Units, check_metadata};
use cowshed_graph::node::{Description, Node};
use cowshed_layout::vmdk::{Grain, HEADER_BYTES, SECTOR_BYTES, sectors_to_bytes};
use cowshed_types::memory::try_push;
use cowshed_types::{Error, ErrorKind, Result};
use std::sync::Arc;

/// Directories and tables of an extent that is written to, in parts of the file: 64 MiB of memory.
const MAX_PARTS: usize = 4 << 20;

/// A sparse extent as a format in blocks.
pub(super) struct Grains<'a> {
    pub sparse: &'a Sparse,
    pub files: &'a [Arc<Node>],
    pub len: u64,
    pub start: u64,
}

impl Grains<'_> {
    fn table(&self, sector: Option<&u32>, block: u64) -> Result<FileTable> {
        let bytes = self.sparse.header.table_bytes() as u64;
        match sector.copied().filter(|sector| *sector != 0) {
            Some(sector) => {
                Ok(FileTable { field: "grain directory entry", offset: u64::from(sector) * SECTOR_BYTES, bytes })
            }
            None => {
                let message = "the grain table for a new grain is missing: such a disk can't be written to there";
                Err(Error::unsupported(message).field("grain").value(block))
            }
        }
    }

    /// The place of a grain's entry, by one of the directories.
    pub(super) fn slot_in(&self, directory: &[u32], block: u64) -> Result<(FileTable, u64)> {
        let entries = u64::from(self.sparse.header.table_entries);
        let table = usize::try_from(block / entries).ok().and_then(|index| directory.get(index));
        Ok((self.table(table, block)?, block % entries))
    }

    /// Header, descriptor, directories and tables: offset and end in bytes, in order. All must be in the file of `file_bytes`:
    /// new grains go behind its end.
    fn metadata(&self, file_bytes: u64) -> Result<Vec<(u64, u64)>> {
        let header = &self.sparse.header;
        let mut parts = vec![(0, HEADER_BYTES as u64)];
        let places = [
            header.descriptor,
            header.directory_sector.map(|sector| (sector, header.directory_bytes().div_ceil(SECTOR_BYTES))),
            header.redundant_directory_sector.map(|sector| (sector, header.directory_bytes().div_ceil(SECTOR_BYTES))),
        ];
        for (sector, sectors) in places.into_iter().flatten() {
            let end = sector.checked_add(sectors).and_then(sectors_to_bytes);
            let end =
                end.ok_or_else(|| Error::invalid_image("VMDK header", sector, "a part of the file is too far"))?;
            expect_in_file("VMDK header", sector, end, file_bytes)?;
            try_push(&mut parts, (sector * SECTOR_BYTES, end))?;
        }
        let copies = if self.sparse.redundant == self.sparse.directory { &[][..] } else { &self.sparse.redundant };
        for sector in self.sparse.directory.iter().chain(copies).filter(|sector| **sector != 0) {
            let start = u64::from(*sector) * SECTOR_BYTES;
            let end = start + header.table_bytes() as u64;
            expect_in_file("grain directory entry", u64::from(*sector), end, file_bytes)?;
            let is_full = parts.len() >= MAX_PARTS;
            match parts.last_mut() {
                // Most tables follow each other.
                Some(last) if last.1 == start => last.1 = end,
                _ if is_full => {
                    let message = format!("an extent with tables in more than {MAX_PARTS} parts can't be written to");
                    return Err(Error::new(ErrorKind::Limit, message));
                }
                _ => try_push(&mut parts, (start, end))?,
            }
        }
        check_metadata(&mut parts, "VMDK metadata")?;
        Ok(parts)
    }
}

/// Refuses a part of the metadata that ends behind the file's end.
fn expect_in_file(field: &'static str, sector: u64, end: u64, file_bytes: u64) -> Result<()> {
    if end <= file_bytes {
        return Ok(());
    }
    let message = "a part of the metadata points after EOF, where new grains go: the disk can't be written to";
    Err(Error::invalid_image(field, sector, message))
}

impl BlockFormat for Grains<'_> {
    const NAME: &'static str = "vmdk";
    const LINKS_BACKING: bool = true;

    fn size(&self) -> u64 {
        self.len
    }

    fn describe(&self) -> Description {
        Description::default()
    }

    fn disk_start(&self) -> u64 {
        self.start
    }

    async fn place(&self, _file: &ImageFile, at: u64, len: u64) -> Result<(RunSource, u64)> {
        let grain_bytes = self.sparse.header.grain_bytes();
        // Grains that follow each other in the file are looked up one by one.
        let (place, len) = self.sparse.map(self.files, at, len.min(self.sparse.header.table_span_bytes())).await?;
        match place {
            RunSource::Data { .. } => Ok((place, len.min(grain_bytes - at % grain_bytes))),
            _ => Ok((place, len)),
        }
    }

    async fn run(&self, _file: &ImageFile, at: u64, len: u64) -> Result<(RunSource, u64)> {
        self.sparse.map(self.files, at, len).await
    }

    fn units(&self) -> Option<Units> {
        let block_bytes = self.sparse.header.grain_bytes();
        Some(Units {
            file: self.sparse.file,
            block_bytes,
            head: Vec::new(),
            first: 0,
            grid: block_bytes,
            tail: Vec::new(),
            is_at_end: true,
        })
    }

    async fn occupied(&self, file: &ImageFile) -> Result<Vec<(u64, u64)>> {
        self.metadata(file.len())
    }

    async fn slot(&self, _file: &ImageFile, block: u64) -> Result<(FileTable, u64)> {
        self.slot_in(&self.sparse.directory, block)
    }

    async fn second_slot(&self, _file: &ImageFile, block: u64) -> Result<Option<(FileTable, u64)>> {
        match self.sparse.redundant.is_empty() || self.sparse.redundant == self.sparse.directory {
            true => Ok(None),
            // A copy that is missing is not made.
            false => Ok(self.slot_in(&self.sparse.redundant, block).ok()),
        }
    }

    fn entry(&self, host: u64) -> Result<Vec<u8>> {
        let sector = u32::try_from(host / SECTOR_BYTES).ok();
        match sector.filter(|sector| matches!(self.sparse.header.grain(*sector), Grain::At(_))) {
            Some(sector) => Ok(sector.to_le_bytes().to_vec()),
            None => Err(Error::new(ErrorKind::NoSpace, "a VMDK extent can be no longer").value(host)),
        }
    }

    fn zero_entry(&self) -> Option<Vec<u8>> {
        self.sparse.header.zeroed_grains.then(|| 1u32.to_le_bytes().to_vec())
    }

    fn forget(&self) {
        self.sparse.tables.forget(self.sparse.file);
        self.sparse.holes.forget();
    }
}
