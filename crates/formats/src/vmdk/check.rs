// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The check of a disk: grains and tables that are not in their file or lie on each other, and the copies of tables.

use super::Vmdk;
use super::extent::{Extent, Sparse, Storage, le32_entries};
use crate::holes::Holes;
use cowshed_graph::node::{MappedCheck, Node};
use cowshed_layout::vmdk::{Grain, HEADER_BYTES, SECTOR_BYTES};
use cowshed_storage::{FileIdentity, IoBuf};
use cowshed_types::memory::try_push;
use cowshed_types::{Error, ErrorKind, Result};
use std::fmt;
use std::sync::Arc;

/// Parts of one file that are compared: 96 MiB of memory.
const MAX_PARTS: usize = 4 << 20;

/// A part of a file that something owns, in bytes.
#[derive(Clone, Copy)]
struct Part {
    from: u64,
    to: u64,
    owner: Owner,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Owner {
    Header,
    Descriptor,
    Directory,
    /// Grain tables from this one on.
    Table(u32),
    /// Grains from this one on.
    Grain(u32),
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Owner::Header => f.write_str("the header"),
            Owner::Descriptor => f.write_str("the descriptor"),
            Owner::Directory => f.write_str("a grain directory"),
            Owner::Table(index) => write!(f, "grain table {index}"),
            Owner::Grain(index) => write!(f, "grain {index}"),
        }
    }
}

/// The findings so far.
struct Findings {
    check: MappedCheck,
    max: usize,
}

impl Findings {
    fn is_full(&self) -> bool {
        self.check.findings.len() >= self.max
    }

    fn note(&mut self, text: String) {
        if !self.is_full() {
            self.check.findings.push(text);
        }
    }

    /// QEMU's kind: it counts nothing here, and fails where something is wrong.
    fn wrong(&mut self, text: String) {
        self.check.counters.check_errors += 1;
        self.note(format!("ERROR: {text}"));
    }

    fn corruption(&mut self, text: String) {
        self.check.counters.corruptions += 1;
        self.note(format!("ERROR: {text}"));
    }
}

impl Vmdk {
    /// Looks for damage; at most `max` findings are reported.
    pub(super) async fn find_damage(&self, max: usize) -> Result<MappedCheck> {
        let mut findings = Findings { check: MappedCheck::default(), max };
        for (number, piece) in self.pieces.iter().enumerate() {
            let Storage::Sparse(sparse) = &piece.extent.storage else { continue };
            check_places(&piece.extent, sparse, &self.files, piece.start, &mut findings).await?;
            let mut inside = Inside { sparse, files: &self.files, number, findings: &mut findings };
            inside.check_copies().await?;
            inside.check_apart(piece.extent.len).await?;
        }
        self.check_extents_apart(&mut findings)?;
        Ok(findings.check)
    }

    /// Extents that share bytes of a file.
    fn check_extents_apart(&self, findings: &mut Findings) -> Result<()> {
        let mut known: Vec<(FileIdentity, u64, u64, usize)> = Vec::new();
        for (number, piece) in self.pieces.iter().enumerate() {
            let (file, from, to) = match &piece.extent.storage {
                Storage::Zero => continue,
                Storage::Flat { file, host, .. } => (*file, *host, host.saturating_add(piece.extent.len)),
                Storage::Sparse(sparse) => (sparse.file, 0, u64::MAX),
            };
            let Some(identity) = self.files.get(file).and_then(|node| node.storage().identity()) else { continue };
            let shared = known.iter().find(|(other, start, end, _)| *other == identity && from < *end && *start < to);
            if let Some((.., other)) = shared {
                findings.corruption(format!("extent {number} lies on extent {other}"));
            }
            try_push(&mut known, (identity, from, to, number))?;
        }
        Ok(())
    }
}

/// Finds grains and tables that are not in the file. `start`: first byte of the extent on the disk.
async fn check_places(
    extent: &Extent,
    sparse: &Sparse,
    files: &[Arc<Node>],
    start: u64,
    findings: &mut Findings,
) -> Result<()> {
    let (span, grain_bytes) = (sparse.header.table_span_bytes(), sparse.header.grain_bytes());
    let mut at = 0;
    while at < extent.len && !findings.is_full() {
        match sparse.map(files, at, extent.len - at).await {
            Ok((_, len)) => at += len,
            Err(error) if error.kind() != ErrorKind::InvalidImage => return Err(error),
            Err(error) => {
                let sector = (start + at) / SECTOR_BYTES;
                let error = error.to_string();
                // A grain behind the end of the file has QEMU's words.
                let is = if error.starts_with("points after EOF") { "" } else { "is wrong: " };
                findings.wrong(format!("cluster offset for sector {sector} {is}{error}"));
                // A table that is lost is one finding.
                let unit = if sparse.table(files, at / span).await.is_err() { span } else { grain_bytes };
                at = at.saturating_add(unit - at % unit);
            }
        }
    }
    Ok(())
}

fn too_many_parts() -> Error {
    Error::new(ErrorKind::Limit, format!("an extent in more than {MAX_PARTS} parts of its file is not checked"))
}

/// One sparse extent.
struct Inside<'a> {
    sparse: &'a Sparse,
    files: &'a [Arc<Node>],
    /// Of the extent in the disk.
    number: usize,
    findings: &'a mut Findings,
}

impl Inside<'_> {
    fn file_bytes(&self) -> u64 {
        self.files.get(self.sparse.file).map_or(0, |file| file.size())
    }

    fn has_copies(&self) -> bool {
        !self.sparse.redundant.is_empty() && self.sparse.redundant != self.sparse.directory
    }

    /// The tables of a directory that are in the file: number, and offset in bytes.
    fn tables<'b>(&self, directory: &'b [u32]) -> impl Iterator<Item = (u32, u64)> + use<'b> {
        let (file_bytes, len) = (self.file_bytes(), self.sparse.header.table_bytes() as u64);
        let places = directory.iter().zip(0u32..).filter(|(sector, _)| **sector != 0);
        let places = places.map(|(sector, index)| (index, u64::from(*sector) * SECTOR_BYTES));
        places.filter(move |(_, offset)| offset + len <= file_bytes)
    }

    /// True for a table in a hole of the file.
    async fn is_unwritten(&self, holes: &Holes, offset: u64) -> bool {
        match self.files.get(self.sparse.file) {
            Some(file) => holes.end_of(file, offset, self.sparse.header.table_bytes() as u64).await.is_some(),
            None => false,
        }
    }

    async fn table_at(&self, offset: u64) -> Result<Vec<u32>> {
        let file = self.files.get(self.sparse.file).ok_or_else(|| Error::internal("an extent has no file"))?;
        let (result, bytes) = file.read_boxed(offset, IoBuf::try_zeroed(self.sparse.header.table_bytes())?).await;
        result?;
        le32_entries(&bytes)
    }

    /// The first tables count. A power cut may leave a copy behind them, so a difference is no damage. A part that is not in
    /// the file is: a disk with one can't be written to.
    async fn check_copies(&mut self) -> Result<()> {
        let number = self.number;
        let described = self.sparse.header.descriptor.map(|(start, sectors)| start.saturating_add(sectors));
        if described.is_some_and(|end| end.saturating_mul(SECTOR_BYTES) > self.file_bytes()) {
            let text = format!("extent {number}: the space of the descriptor is not all in the file");
            self.findings.corruption(text);
        }
        if self.sparse.uses_copy {
            let text = format!("extent {number}: the grain directory is not in the file, and its copy is used");
            self.findings.corruption(text);
            return Ok(());
        }
        if self.sparse.header.redundant_directory_sector.is_some() && self.sparse.redundant.is_empty() {
            self.findings.corruption(format!("extent {number}: the copy of the grain directory is not in the file"));
        }
        if !self.has_copies() {
            return Ok(());
        }
        let sparse = self.sparse;
        let mut first = self.tables(&sparse.directory).peekable();
        let mut copies = self.tables(&sparse.redundant).peekable();
        let holes = [Holes::default(), Holes::default()];
        for (index, (sector, copy)) in sparse.directory.iter().zip(&sparse.redundant).enumerate() {
            if self.findings.is_full() {
                break;
            }
            let index = index as u32;
            let table = first.next_if(|(number, _)| *number == index);
            let second = copies.next_if(|(number, _)| *number == index);
            match (table, second) {
                (Some((_, table)), Some((_, second))) if table != second => {
                    if self.is_unwritten(&holes[0], table).await && self.is_unwritten(&holes[1], second).await {
                        continue;
                    }
                    let (table, second) = (self.table_at(table).await?, self.table_at(second).await?);
                    let differ = table.iter().zip(&second).filter(|(one, other)| one != other).count();
                    if differ > 0 {
                        let text = format!("the copy of grain table {index} has {differ} other entries");
                        self.findings.note(format!("WARNING: extent {number}: {text}"));
                    }
                }
                (None, Some(_)) if *sector != 0 => {
                    let text = format!("grain table {index} is not in the file, and its copy is used");
                    self.findings.corruption(format!("extent {number}: {text}"));
                }
                (Some(_), None) if *copy != 0 => {
                    let text = format!("the copy of grain table {index} is not in the file");
                    self.findings.corruption(format!("extent {number}: {text}"));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Parts of the file with two owners.
    async fn check_apart(&mut self, extent_bytes: u64) -> Result<()> {
        let mut parts = self.metadata()?;
        self.add_grains(&mut parts, extent_bytes).await?;
        parts.sort_unstable_by_key(|part| (part.from, part.to));
        let mut last: Option<Part> = None;
        for part in parts {
            match last {
                Some(before) if part.from < before.to => {
                    let (number, at) = (self.number, part.from);
                    let (one, other) = (part.owner, self.owner_at(&before, at));
                    self.findings.corruption(format!("extent {number}: {one} lies on {other} (offset {at:#x})"));
                    if part.to > before.to {
                        last = Some(part);
                    }
                }
                _ => last = Some(part),
            }
        }
        Ok(())
    }

    /// The owner of the byte at `at`: tables that follow each other are one part.
    fn owner_at(&self, part: &Part, at: u64) -> Owner {
        match part.owner {
            Owner::Table(first) => {
                Owner::Table(first + ((at - part.from) / self.sparse.header.table_bytes() as u64) as u32)
            }
            owner => owner,
        }
    }

    fn metadata(&self) -> Result<Vec<Part>> {
        let header = &self.sparse.header;
        let mut parts = vec![Part { from: 0, to: HEADER_BYTES as u64, owner: Owner::Header }];
        let mut add = |offset: u64, bytes: u64, owner: Owner| {
            try_push(&mut parts, Part { from: offset, to: offset.saturating_add(bytes), owner })
        };
        if let Some((sector, sectors)) = header.descriptor.filter(|(sector, _)| *sector != 0) {
            let bytes = |sectors: u64| sectors.saturating_mul(SECTOR_BYTES);
            add(bytes(sector), bytes(sectors), Owner::Descriptor)?;
        }
        let directories = [header.directory_sector, header.redundant_directory_sector];
        for (index, sector) in directories.iter().enumerate() {
            let is_same = index == 1 && directories[0] == directories[1];
            if let Some(sector) = sector.filter(|sector| *sector != 0 && !is_same) {
                add(sector.saturating_mul(SECTOR_BYTES), header.directory_bytes(), Owner::Directory)?;
            }
        }
        let copies = if self.has_copies() { &self.sparse.redundant[..] } else { &[] };
        let bytes = header.table_bytes() as u64;
        let first = self.tables(&self.sparse.directory);
        // Both directories may lead to one table.
        let other = |(index, offset): &(u32, u64)| {
            let sector = self.sparse.directory.get(*index as usize).copied().unwrap_or(0);
            u64::from(sector) * SECTOR_BYTES != *offset
        };
        for (index, offset) in first.chain(self.tables(copies).filter(other)) {
            let is_full = parts.len() >= MAX_PARTS;
            match parts.last_mut() {
                Some(Part { from, to, owner: Owner::Table(first) })
                    if *to == offset && u64::from(index.saturating_sub(*first)) * bytes == offset - *from =>
                {
                    *to += bytes;
                }
                _ if is_full => return Err(too_many_parts()),
                _ => try_push(&mut parts, Part { from: offset, to: offset + bytes, owner: Owner::Table(index) })?,
            }
        }
        Ok(parts)
    }

    /// A compressed grain counts with its first sector.
    async fn add_grains(&self, parts: &mut Vec<Part>, extent_bytes: u64) -> Result<()> {
        let header = &self.sparse.header;
        let (grain_bytes, entries) = (header.grain_bytes(), u64::from(header.table_entries));
        let bytes = if header.compressed { SECTOR_BYTES } else { grain_bytes };
        let grains = extent_bytes.div_ceil(grain_bytes);
        let holes = Holes::default();
        for (index, sector) in (0u64..).zip(&self.sparse.directory) {
            if self.is_unwritten(&holes, u64::from(*sector) * SECTOR_BYTES).await {
                continue;
            }
            let Ok(Some(table)) = self.sparse.table(self.files, index).await else { continue };
            for (grain, entry) in (index * entries..grains).zip(table.iter()) {
                let Grain::At(sector) = header.grain(*entry) else { continue };
                let from = sector * SECTOR_BYTES;
                let is_full = parts.len() >= MAX_PARTS;
                match parts.last_mut() {
                    Some(last) if last.to == from && matches!(last.owner, Owner::Grain(_)) => last.to += bytes,
                    _ if is_full => return Err(too_many_parts()),
                    // A grain has a sector of the file for itself, so 32 bits count them.
                    _ => try_push(parts, Part { from, to: from + bytes, owner: Owner::Grain(grain as u32) })?,
                }
            }
        }
        Ok(())
    }
}
