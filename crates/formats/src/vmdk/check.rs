// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The check of a disk: grains and tables that are not in their file or lie on each other, and the copies of tables.

use super::Vmdk;
use super::extent::{Extent, Sparse, Storage, is_hole};
use super::overlaps::GrainWalk;
use super::se_sparse::SeSparse;
use super::tables::{TableBytes, TablePlace};
use crate::holes::Holes;
use cowshed_graph::node::{MappedCheck, Node};
use cowshed_layout::vmdk::{HEADER_BYTES, SECTOR_BYTES};
use cowshed_storage::FileIdentity;
use cowshed_types::memory::{try_collect, try_push};
use cowshed_types::{Error, ErrorKind, Result};
use std::fmt;
use std::sync::Arc;

/// Parts of one file with metadata: 96 MiB of memory. Tables that follow each other are one part.
const MAX_PARTS: usize = 4 << 20;

/// A part of a file that something owns, in bytes.
#[derive(Clone, Copy)]
pub(super) struct Part {
    pub from: u64,
    pub to: u64,
    pub owner: Owner,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
    Header,
    Descriptor,
    Directory,
    /// Grain tables from this one on.
    Table(u32),
    /// Grains from this one on.
    Grain(u32),
    /// Grains of this table; their numbers may be wider than 32 bits.
    GrainOf(u32),
}

impl Part {
    /// The owner of a byte of this part. `bytes`: length of a table or a grain.
    pub(super) fn owner_at(&self, offset: u64, bytes: u64) -> Owner {
        let number = ((offset - self.from) / bytes) as u32;
        match self.owner {
            Owner::Table(first) => Owner::Table(first.saturating_add(number)),
            Owner::Grain(first) => Owner::Grain(first.saturating_add(number)),
            owner => owner,
        }
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Owner::Header => f.write_str("the header"),
            Owner::Descriptor => f.write_str("the descriptor"),
            Owner::Directory => f.write_str("a grain directory"),
            Owner::Table(index) => write!(f, "grain table {index}"),
            Owner::Grain(index) => write!(f, "grain {index}"),
            Owner::GrainOf(table) => write!(f, "a grain of table {table}"),
        }
    }
}

/// The findings so far.
pub(super) struct Findings {
    pub check: MappedCheck,
    pub max: usize,
}

impl Findings {
    fn is_full(&self) -> bool {
        self.check.findings.len() >= self.max
    }

    pub(super) fn note(&mut self, text: String) {
        if !self.is_full() {
            self.check.findings.push(text);
        }
    }

    /// QEMU's kind: it counts nothing here, and fails where something is wrong.
    fn wrong(&mut self, text: String) {
        self.check.counters.check_errors += 1;
        self.note(format!("ERROR: {text}"));
    }

    pub(super) fn corruption(&mut self, text: String) {
        self.check.counters.corruptions += 1;
        self.note(format!("ERROR: {text}"));
    }
}

impl Vmdk {
    /// Looks for damage; at most `max` findings are reported.
    pub(super) async fn find_damage(&self, max: usize) -> Result<MappedCheck> {
        let mut findings = Findings { check: MappedCheck::default(), max };
        for (number, piece) in self.pieces.iter().enumerate() {
            match &piece.extent.storage {
                Storage::Sparse(sparse) => {
                    let repeated = Repeated::of(&sparse.directory)?;
                    check_places(&piece.extent, &self.files, piece.start, &repeated, &mut findings).await?;
                    let mut inside =
                        Inside { sparse, files: &self.files, number, repeated: &repeated, findings: &mut findings };
                    inside.check_copies().await?;
                    let metadata = inside.metadata()?;
                    let walk = GrainWalk { extent: &piece.extent, files: &self.files, repeated: &repeated };
                    walk.check_apart(metadata, number, &mut findings).await?;
                }
                Storage::SeSparse(sparse) => {
                    let repeated = Repeated::of(sparse.directory())?;
                    check_places(&piece.extent, &self.files, piece.start, &repeated, &mut findings).await?;
                    let metadata = metadata_of(sparse, &self.files)?;
                    let walk = GrainWalk { extent: &piece.extent, files: &self.files, repeated: &repeated };
                    walk.check_apart(metadata, number, &mut findings).await?;
                }
                Storage::Flat { .. } | Storage::Zero => {}
            }
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
                Storage::SeSparse(sparse) => (sparse.file, 0, u64::MAX),
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

/// Entries of a directory that name a table which an entry in front of them names. These are damage, and one table behind
/// millions of entries is looked at once.
pub(super) struct Repeated(Vec<u64>);

impl Repeated {
    fn of<T: Copy + Ord + Default>(directory: &[T]) -> Result<Repeated> {
        let used = || directory.iter().copied().filter(|entry| *entry != T::default());
        if used().is_sorted_by(|one, next| one < next) {
            return Ok(Repeated(Vec::new()));
        }
        let mut order: Vec<u32> = try_collect(directory.iter().enumerate().map(|(index, _)| index as u32))?;
        order.sort_unstable_by_key(|index| (directory[*index as usize], *index));
        let mut bits = try_collect((0..directory.len().div_ceil(64)).map(|_| 0u64))?;
        for pair in order.windows(2) {
            let (before, index) = (directory[pair[0] as usize], pair[1] as usize);
            if before != T::default() && before == directory[index] {
                bits[index / 64] |= 1 << (index % 64);
            }
        }
        Ok(Repeated(bits))
    }

    pub(super) fn contains(&self, index: u64) -> bool {
        let word = usize::try_from(index / 64).ok().and_then(|word| self.0.get(word));
        word.is_some_and(|word| word >> (index % 64) & 1 != 0)
    }
}

/// Finds grains and tables that are not in the file. `start`: first byte of the extent on the disk.
async fn check_places(
    extent: &Extent,
    files: &[Arc<Node>],
    start: u64,
    repeated: &Repeated,
    findings: &mut Findings,
) -> Result<()> {
    let Some((span, grain_bytes)) = extent.units() else { return Ok(()) };
    let mut at = 0;
    while at < extent.len && !findings.is_full() {
        if repeated.contains(at / span) {
            at = at.saturating_add(span - at % span);
            continue;
        }
        match extent.map(files, at, extent.len - at).await {
            Ok((_, len)) => at += len,
            Err(error) if error.kind() != ErrorKind::InvalidImage => return Err(error),
            Err(error) => {
                let sector = (start + at) / SECTOR_BYTES;
                let error = error.to_string();
                // A grain behind the end of the file has QEMU's words.
                let is = if error.starts_with("points after EOF") { "" } else { "is wrong: " };
                findings.wrong(format!("cluster offset for sector {sector} {is}{error}"));
                // A table that is lost is one finding.
                let unit = if extent.has_lost_table(files, at / span).await { span } else { grain_bytes };
                at = at.saturating_add(unit - at % unit);
            }
        }
    }
    Ok(())
}

fn too_many_parts() -> Error {
    let message = format!("an extent with tables in more than {MAX_PARTS} parts of its file is not checked");
    Error::new(ErrorKind::Limit, message)
}

/// One sparse extent.
struct Inside<'a> {
    sparse: &'a Sparse,
    files: &'a [Arc<Node>],
    /// Of the extent in the disk.
    number: usize,
    repeated: &'a Repeated,
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
        is_hole(self.files, holes, TablePlace { file: self.sparse.file, offset }, self.sparse.header.table_bytes())
            .await
    }

    async fn table_at(&self, offset: u64) -> Result<TableBytes> {
        self.sparse.table_at(self.files, offset).await
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
            if self.repeated.contains(u64::from(index)) {
                continue;
            }
            match (table, second) {
                (Some((_, table)), Some((_, second))) if table != second => {
                    if self.is_unwritten(&holes[0], table).await && self.is_unwritten(&holes[1], second).await {
                        continue;
                    }
                    let (table, second) = (self.table_at(table).await?, self.table_at(second).await?);
                    let pairs = table.as_chunks::<4>().0.iter().zip(second.as_chunks::<4>().0);
                    let differ = pairs.filter(|(one, other)| one != other).count();
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

    /// The parts of the file without grains.
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
            add_table(&mut parts, index, offset, bytes)?;
        }
        Ok(parts)
    }
}

/// Adds a table to the parts; one that follows the last in the directory and in the file makes that part longer.
fn add_table(parts: &mut Vec<Part>, index: u32, offset: u64, bytes: u64) -> Result<()> {
    let is_full = parts.len() >= MAX_PARTS;
    match parts.last_mut() {
        Some(Part { from, to, owner: Owner::Table(first) })
            if *to == offset && u64::from(index.saturating_sub(*first)) * bytes == offset - *from =>
        {
            *to += bytes;
            Ok(())
        }
        _ if is_full => Err(too_many_parts()),
        _ => try_push(parts, Part { from: offset, to: offset + bytes, owner: Owner::Table(index) }),
    }
}

/// The parts of a seSparse extent without its grains. The spaces for the journal, the bitmap of free grains and the map back have
/// contents that are unknown, so they count as nothing.
fn metadata_of(sparse: &SeSparse, files: &[Arc<Node>]) -> Result<Vec<Part>> {
    let header = &sparse.header;
    let mut parts = Vec::new();
    for (sector, bytes, owner) in [
        (0, HEADER_BYTES as u64, Owner::Header),
        (header.volatile_sector, HEADER_BYTES as u64, Owner::Header),
        (header.directory_sector, header.directory_bytes(), Owner::Directory),
    ] {
        let from = sector * SECTOR_BYTES;
        try_push(&mut parts, Part { from, to: from + bytes, owner })?;
    }
    for index in 0..sparse.directory().len() as u64 {
        // A wrong entry is reported by the walk over the disk.
        if let Ok(Some(from)) = sparse.table_offset(files, index) {
            add_table(&mut parts, index as u32, from, header.table_bytes() as u64)?;
        }
    }
    Ok(parts)
}
