// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One extent: from an offset inside it to the place of its bytes.

use super::se_sparse::SeSparse;
use super::tables::{GrainTables, TableBytes, TablePlace};
use crate::holes::Holes;
use crate::mapped::RunSource;
use cowshed_graph::node::Node;
use cowshed_layout::vmdk::{
    COMPRESSED_GRAIN_HEADER_BYTES, CompressedGrain, ExtentKind, Grain, SECTOR_BYTES, SparseHeader,
};
use cowshed_storage::{IoBuf, rt};
use cowshed_types::memory::try_collect;
use cowshed_types::{Error, Result};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Deflate makes nothing more than a little longer; a longer stream is no grain.
const MAX_PACKED_EXCESS_BYTES: u64 = 64 << 10;

/// An extent of the disk.
pub(super) struct Extent {
    /// Length in bytes.
    pub len: u64,
    pub storage: Storage,
}

/// The storage of the bytes of an extent. `file` is an index into the files of the image.
pub(super) enum Storage {
    /// As they are, from byte `host` on.
    Flat { file: usize, host: u64, kind: ExtentKind },
    /// Its bytes are in grains.
    Sparse(Box<Sparse>),
    /// In grains of 4 KiB, by ESX since version 6.
    SeSparse(Box<SeSparse>),
    /// Not at all: zeroes.
    Zero,
}

/// A sparse extent: its header and its directory.
pub(super) struct Sparse {
    pub file: usize,
    pub header: SparseHeader,
    /// The place of the directory is in a footer.
    pub is_stream: bool,
    /// The word of the extent line; empty for an image in one file.
    pub kind: &'static str,
    /// The sector of each grain table; 0 for none.
    pub directory: Vec<u32>,
    /// The same from the redundant directory, for tables that the first one doesn't lead to.
    pub redundant: Vec<u32>,
    /// The first directory is not in the file.
    pub uses_copy: bool,
    /// The tables of the disk in memory.
    pub tables: Arc<GrainTables>,
    /// Where tables were never written.
    pub holes: Holes,
}

impl Extent {
    /// The place of byte `at` of the extent, and for how many of the `len` bytes from there it holds.
    pub(super) async fn map(&self, files: &[Arc<Node>], at: u64, len: u64) -> Result<(RunSource, u64)> {
        match &self.storage {
            Storage::Flat { file, host, .. } => Ok((RunSource::Data { file: *file, host: host + at }, len)),
            Storage::Zero => Ok((RunSource::Zero, len)),
            Storage::Sparse(sparse) => sparse.map(files, at, len).await,
            Storage::SeSparse(sparse) => sparse.map(files, at, len).await,
        }
    }

    /// The packed grain that begins at byte `block` of the extent.
    pub(super) async fn unpack(&self, files: &[Arc<Node>], block: u64) -> Result<Vec<u8>> {
        match &self.storage {
            Storage::Sparse(sparse) => sparse.unpack(files, block, self.len).await,
            _ => Err(Error::internal("only sparse extents have packed grains").offset(block)),
        }
    }

    /// Length of a grain in bytes, for sparse extents.
    pub(super) fn grain_bytes(&self) -> Option<u64> {
        self.units().map(|(_, grain_bytes)| grain_bytes)
    }

    /// Bytes of the disk that a grain table describes, and length of a grain, for sparse extents.
    pub(super) fn units(&self) -> Option<(u64, u64)> {
        match &self.storage {
            Storage::Sparse(sparse) => Some((sparse.header.table_span_bytes(), sparse.header.grain_bytes())),
            Storage::SeSparse(sparse) => Some((sparse.header.table_span_bytes(), sparse.header.grain_bytes())),
            Storage::Flat { .. } | Storage::Zero => None,
        }
    }

    /// True where a grain table can't be read.
    pub(super) async fn has_lost_table(&self, files: &[Arc<Node>], index: u64) -> bool {
        match &self.storage {
            Storage::Sparse(sparse) => sparse.table(files, index).await.is_err(),
            Storage::SeSparse(sparse) => sparse.table(files, index).await.is_err(),
            Storage::Flat { .. } | Storage::Zero => false,
        }
    }

    /// Its file; none where it has none.
    pub(super) fn file<'a>(&self, files: &'a [Arc<Node>]) -> Option<&'a Arc<Node>> {
        let index = match &self.storage {
            Storage::Flat { file, .. } => *file,
            Storage::Sparse(sparse) => sparse.file,
            Storage::SeSparse(sparse) => sparse.file,
            Storage::Zero => return None,
        };
        files.get(index)
    }

    /// QEMU's `VmdkExtentInfo`; none for extents without a file.
    pub(super) fn info(&self, files: &[Arc<Node>]) -> Option<Value> {
        let (file, kind) = match &self.storage {
            Storage::Flat { file, kind, .. } => (*file, kind.as_str()),
            Storage::Sparse(sparse) => (sparse.file, sparse.kind),
            Storage::SeSparse(sparse) => (sparse.file, ExtentKind::SeSparse.as_str()),
            Storage::Zero => return None,
        };
        let mut info = Map::new();
        if let Storage::Sparse(sparse) = &self.storage
            && sparse.header.compressed
        {
            info.insert("compressed".to_owned(), json!(true));
        }
        info.insert("virtual-size".to_owned(), json!(self.len));
        info.insert("filename".to_owned(), json!(files.get(file)?.filename()));
        if let Some(bytes) = self.grain_bytes() {
            info.insert("cluster-size".to_owned(), json!(bytes));
        }
        info.insert("format".to_owned(), json!(kind));
        Some(Value::Object(info))
    }
}

impl Sparse {
    /// One run inside one grain table: as many grains as follow each other.
    pub(super) async fn map(&self, files: &[Arc<Node>], at: u64, len: u64) -> Result<(RunSource, u64)> {
        let (grain_bytes, span) = (self.header.grain_bytes(), self.header.table_span_bytes());
        let table_index = at / span;
        let until_table_end = span - at % span;
        let touched = len.saturating_sub(until_table_end).div_ceil(span).saturating_add(1);
        if let Some(tables) = self.unwritten(files, table_index, touched).await {
            return Ok((
                RunSource::Unallocated,
                until_table_end.saturating_add((tables - 1).saturating_mul(span)).min(len),
            ));
        }
        let Some(table) = self.table(files, table_index).await? else {
            // An empty disk has many tables that aren't there: they are one run.
            let next = usize::try_from(table_index + 1).unwrap_or(usize::MAX);
            let wanted = usize::try_from(len.div_ceil(span)).unwrap_or(usize::MAX);
            let more = self.directory.iter().skip(next).take(wanted).take_while(|sector| **sector == 0).count() as u64;
            return Ok((RunSource::Unallocated, until_table_end.saturating_add(more.saturating_mul(span)).min(len)));
        };
        let index = (at % span / grain_bytes) as usize;
        let skip = at % grain_bytes;
        let grain = |index: usize| self.header.grain_at(&table, index);
        let Some(first) = grain(index) else {
            return Err(Error::internal("a grain table is too short").offset(at));
        };
        let mut end = grain_bytes - skip;
        if let Grain::At(sector) = first {
            if self.header.compressed {
                self.host(files, sector, at, 0, COMPRESSED_GRAIN_HEADER_BYTES as u64)?;
                return Ok((RunSource::Packed { block: at - skip }, end.min(len)));
            }
            let host = self.host(files, sector, at, skip, end.min(len))?;
            let mut next = index + 1;
            while end < len
                && grain(next) == Some(Grain::At(sector + (next - index) as u64 * self.header.grain_sectors))
            {
                if self.host(files, sector, at, skip, (end + grain_bytes).min(len)).is_err() {
                    break;
                }
                end += grain_bytes;
                next += 1;
            }
            return Ok((RunSource::Data { file: self.file, host }, end.min(len)));
        }
        let mut next = index + 1;
        while end < len && grain(next) == Some(first) {
            end += grain_bytes;
            next += 1;
        }
        let place = if first == Grain::Zero { RunSource::Zero } else { RunSource::Unallocated };
        Ok((place, end.min(len)))
    }

    /// The number of tables from `index` on that lie in a hole of the file, or aren't there, if the first one does. It is
    /// `most` at most.
    async fn unwritten(&self, files: &[Arc<Node>], index: u64, most: u64) -> Option<u64> {
        let slot = usize::try_from(index).ok()?;
        let first = u64::from(*self.directory.get(slot).filter(|sector| **sector != 0)?) * SECTOR_BYTES;
        if self.tables.find(self.table_place(first)).is_some() {
            return None;
        }
        let len = self.header.table_bytes() as u64;
        let end = self.holes.end_of(files.get(self.file)?, first, len).await?;
        let is_within = |sector: &u32| {
            let start = u64::from(*sector) * SECTOR_BYTES;
            *sector == 0 || (first <= start && start + len <= end)
        };
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        Some(self.directory.get(slot..)?.iter().take(most).take_while(|sector| is_within(sector)).count() as u64)
    }

    /// Where `len` bytes are, from `skip` bytes into the grain at `sector` on; they must be in the file.
    fn host(&self, files: &[Arc<Node>], sector: u64, at: u64, skip: u64, len: u64) -> Result<u64> {
        expect_grain(files.get(self.file).map_or(0, |file| file.size()), sector, at, skip, len)
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
        match is_hole(files, holes, self.table_place(offset), self.header.table_bytes()).await {
            true => Ok(None),
            false => self.table_at(files, offset).await.map(Some),
        }
    }

    /// The place of a grain table; `None` where the directory has none.
    pub(super) fn table_offset(&self, files: &[Arc<Node>], index: u64) -> Result<Option<u64>> {
        let slot = usize::try_from(index).unwrap_or(usize::MAX);
        let Some(&sector) = self.directory.get(slot) else {
            return Err(Error::internal("the grain directory is too short").value(index));
        };
        if sector == 0 {
            return Ok(None);
        }
        let offset = u64::from(sector) * SECTOR_BYTES;
        let file_bytes = files.get(self.file).map_or(0, |file| file.size());
        let within = |offset: &u64| offset + self.header.table_bytes() as u64 <= file_bytes;
        let copy = self.redundant.get(slot).map(|copy| u64::from(*copy) * SECTOR_BYTES);
        match within(&offset) {
            true => Ok(Some(offset)),
            false => copy.filter(|copy| *copy != 0 && within(copy)).map(Some).ok_or_else(|| {
                let message = "a grain table is not in the file: it points after EOF";
                Error::invalid_image("grain directory entry", sector, message)
            }),
        }
    }

    fn table_place(&self, offset: u64) -> TablePlace {
        TablePlace { file: self.file, offset }
    }

    /// The table at a byte of the file.
    pub(super) async fn table_at(&self, files: &[Arc<Node>], offset: u64) -> Result<TableBytes> {
        self.tables.read(files, self.table_place(offset), self.header.table_bytes()).await
    }

    async fn unpack(&self, files: &[Arc<Node>], block: u64, extent_bytes: u64) -> Result<Vec<u8>> {
        let (grain_bytes, span) = (self.header.grain_bytes(), self.header.table_span_bytes());
        let table = self.table(files, block / span).await?;
        let grain = table.and_then(|table| self.header.grain_at(&table, (block % span / grain_bytes) as usize));
        let Some(Grain::At(sector)) = grain else {
            return Err(Error::internal("a packed grain went away").offset(block));
        };
        self.unpack_at(files, sector, block, extent_bytes).await
    }

    /// The packed grain at a sector of the file, which begins at byte `block` of the extent.
    pub(super) async fn unpack_at(
        &self,
        files: &[Arc<Node>],
        sector: u64,
        block: u64,
        extent_bytes: u64,
    ) -> Result<Vec<u8>> {
        let grain_bytes = self.header.grain_bytes();
        let file = files.get(self.file).ok_or_else(|| Error::internal("an extent has no file"))?;
        let host = sector * SECTOR_BYTES;
        let bad = |field: &'static str, value: u64, message: &str| {
            Err(Error::invalid_image(field, value, format!("{message} (grain at byte {block})")).offset(host))
        };
        let available = file.size().saturating_sub(host);
        if available < COMPRESSED_GRAIN_HEADER_BYTES as u64 {
            return bad("grain table entry", sector, "a compressed grain points after EOF");
        }
        // Most grains are shorter than they were: with the header one read gets them whole.
        let first = (grain_bytes + COMPRESSED_GRAIN_HEADER_BYTES as u64).min(available);
        let (result, mut bytes) = file.read_boxed(host, IoBuf::try_scratch(first as usize)?).await;
        result?;
        let Some(header) = CompressedGrain::parse(&bytes) else {
            return bad("grain header", sector, "the header of a compressed grain is cut short");
        };
        if header.first_sector.checked_mul(SECTOR_BYTES) != Some(block) {
            return bad("grain header", header.first_sector, "a compressed grain belongs to another sector");
        }
        let data_bytes = u64::from(header.data_bytes);
        let needed = data_bytes + COMPRESSED_GRAIN_HEADER_BYTES as u64;
        if data_bytes == 0 || needed > available || data_bytes > grain_bytes + MAX_PACKED_EXCESS_BYTES {
            return bad("grain length", data_bytes, "a compressed grain has an impossible length");
        }
        if needed > first {
            let (result, longer) = file.read_boxed(host, IoBuf::try_scratch(needed as usize)?).await;
            result?;
            bytes = longer;
        }
        bytes.truncate(needed as usize);
        // The last grain may hold only the rest of the disk.
        let wanted = grain_bytes.min(extent_bytes.saturating_sub(block)) as usize;
        rt::run_on_cpu_pool(move || {
            let mut grain = vec![0; grain_bytes as usize];
            cowshed_codec::inflate_zlib(&bytes[COMPRESSED_GRAIN_HEADER_BYTES..], &mut grain, wanted)?;
            Ok(grain)
        })
        .await
        .map_err(|error: Error| error.offset(host))
    }
}

/// True for a table in a hole of its file.
pub(super) async fn is_hole(files: &[Arc<Node>], holes: &Holes, place: TablePlace, len: usize) -> bool {
    match files.get(place.file) {
        Some(file) => holes.end_of(file, place.offset, len as u64).await.is_some(),
        None => false,
    }
}

/// Where `len` bytes are, from `skip` bytes into the grain at `sector` on. The grain describes byte `at` of the extent.
pub(super) fn expect_grain(file_bytes: u64, sector: u64, at: u64, skip: u64, len: u64) -> Result<u64> {
    // A sector is below 2^54, and a grain has at most 32 MiB: the sums are below 2^64.
    let host = sector * SECTOR_BYTES + skip;
    if host + len > file_bytes {
        let message = format!("points after EOF: the grain at byte {} of the extent is not in the file", at - skip);
        return Err(Error::invalid_image("grain table entry", sector, message));
    }
    Ok(host)
}

/// Little-endian entries of a directory.
pub(super) fn le32_entries(bytes: &[u8]) -> Result<Vec<u32>> {
    try_collect(bytes.as_chunks::<4>().0.iter().map(|entry| u32::from_le_bytes(*entry)))
}

/// Reads a piece of the file, zeroes behind its end.
pub(super) async fn read(node: &Node, offset: u64, len: u64) -> Result<IoBuf> {
    let len = usize::try_from(len).map_err(|_| Error::internal("a piece of metadata is too large").value(len))?;
    let (result, bytes) = node.read_padded(offset, IoBuf::try_zeroed(len)?).await;
    result.map(|()| bytes)
}
