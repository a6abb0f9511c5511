// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Writes to stream-optimised disks: compressed grains one behind the other, each once. The tables, the footer and the
//! mark of the end follow at a flush, or when the disk is closed. Without them another opening can't read the disk.
//!
//! A stream that grows behind a flush stays readable: until its next end is durable, its header leads to the directory
//! of the last one.

use crate::mapped::RunSource;
use cowshed_codec::Codec;
use cowshed_layout::vmdk::{SECTOR_BYTES, SparseHeader, stream_end, stream_grain};
use cowshed_storage::{File, IoBuf, rt};
use cowshed_types::memory::try_push;
use cowshed_types::{Compression, Error, ErrorKind, Result, slip};
use futures_util::future::join_all;
use futures_util::lock::Mutex as AsyncMutex;
use std::collections::BTreeMap;

/// The header of a stream.
pub(super) struct StreamHeader {
    pub bytes: Vec<u8>,
    /// False: the file has one with another place of the directory.
    pub is_in_file: bool,
}

fn twice(at: u64) -> Error {
    let message = "Could not write to allocated cluster for streamOptimized";
    Error::new(ErrorKind::Io, message).hint(": a grain is written once").offset(at)
}

/// The part that writes to a disk without grains.
pub(super) struct StreamWriter {
    file: File,
    header: SparseHeader,
    header_bytes: Vec<u8>,
    len: u64,
    state: AsyncMutex<StreamState>,
}

struct StreamState {
    /// Of a table.
    entries: u64,
    codec: Codec,
    /// The sector that the next grain goes to.
    next: u64,
    /// By their numbers.
    tables: BTreeMap<u64, GrainTable>,
    /// The end is not behind the last grain.
    is_open: bool,
    /// The header in the file is that of a stream.
    has_header: bool,
    /// The last footer that this opening has made durable. As the header it leads to the same directory.
    footer: Option<Vec<u8>>,
}

struct GrainTable {
    /// Where grains are, in sectors.
    grains: Box<[u32]>,
    /// The sector of this table in the file; `None`: the file has an older one, or none.
    written: Option<u32>,
}

impl StreamState {
    /// The sector of grain `number`.
    fn grain(&self, number: u64) -> Option<u64> {
        let table = self.tables.get(&(number / self.entries))?;
        let sector = table.grains.get((number % self.entries) as usize)?;
        (*sector != 0).then_some(u64::from(*sector))
    }

    /// The first grain from `number` on that was written, or `end`.
    fn next_grain(&self, number: u64, end: u64) -> u64 {
        let tables = self.tables.range(number / self.entries..end.div_ceil(self.entries));
        let numbers = tables.flat_map(|(table, _)| table * self.entries..(table + 1) * self.entries);
        numbers.filter(|at| *at >= number && *at < end).find(|at| self.grain(*at).is_some()).unwrap_or(end)
    }
}

impl StreamWriter {
    /// `first`: the sector where grains begin.
    pub(super) fn new(file: File, header: SparseHeader, new: StreamHeader, len: u64, first: u64) -> StreamWriter {
        let (codec, has_header) = (Codec::new(Compression::Zlib), new.is_in_file);
        let tables = BTreeMap::new();
        let entries = u64::from(header.table_entries);
        let state = StreamState { entries, codec, next: first, tables, is_open: false, has_header, footer: None };
        let state = AsyncMutex::new(state);
        StreamWriter { file, header, header_bytes: new.bytes, len, state }
    }

    /// True once a grain was written: the tables of the file know nothing of it.
    pub(super) async fn is_changed(&self) -> bool {
        !self.state.lock().await.tables.is_empty()
    }

    /// The sector of the grain that begins at byte `at` of the disk, if it was written.
    pub(super) async fn grain(&self, at: u64) -> Option<u64> {
        self.state.lock().await.grain(at / self.header.grain_bytes())
    }

    /// The place of byte `at` of the disk, and for how many of the `len` bytes from there it holds.
    pub(super) async fn place(&self, at: u64, len: u64) -> (RunSource, u64) {
        let (grain_bytes, state) = (self.header.grain_bytes(), self.state.lock().await);
        let first = at / grain_bytes;
        let (place, next) = match state.grain(first) {
            Some(_) => (RunSource::Packed { block: first * grain_bytes }, first + 1),
            None => (RunSource::Unallocated, state.next_grain(first, (at + len).div_ceil(grain_bytes))),
        };
        (place, (next * grain_bytes - at).min(len))
    }

    /// True where the file has no tables of grains that were written. A request that runs may change that.
    pub(super) fn holds_changes(&self) -> bool {
        self.state.try_lock().is_none_or(|state| state.is_open)
    }

    /// Writes whole grains, each for the first time. None at all make the disk one with a footer.
    pub(super) async fn write(&self, grains: Vec<(u64, IoBuf)>) -> Result<()> {
        let grain_bytes = self.header.grain_bytes();
        for (at, grain) in &grains {
            let end = at + grain.len() as u64;
            let is_whole = at.is_multiple_of(grain_bytes) && (grain.len() as u64 == grain_bytes || end == self.len);
            if !is_whole || grain.len() as u64 > grain_bytes {
                let message = "a stream-optimised VMDK disk takes whole grains, each once: convert writes them";
                return Err(Error::invalid_argument(message).offset(*at));
            }
        }
        let codec = self.state.lock().await.codec;
        let packed = grains.into_iter().map(|(at, grain)| async move {
            let packed = rt::run_on_cpu_pool(move || {
                // The last grain holds the rest of the disk, and zeroes.
                let mut bytes = grain.to_vec();
                bytes.resize(grain_bytes as usize, 0);
                let mut packed = Vec::new();
                let is_smaller = codec.compress(&bytes, &mut packed).is_some();
                stream_grain(at / SECTOR_BYTES, &bytes, is_smaller.then_some(&packed[..]))
            });
            (at, packed.await)
        });
        let packed = join_all(packed).await;
        let mut state = self.state.lock().await;
        self.begin(&mut state).await?;
        if packed.is_empty() {
            return Ok(());
        }
        let mut run = Vec::new();
        let start = state.next;
        let mut placed = Vec::new();
        for (at, packed) in packed {
            let number = at / grain_bytes;
            let entries = u64::from(self.header.table_entries);
            let (table, index) = (number / entries, (number % entries) as usize);
            if state.tables.get(&table).is_some_and(|table| table.grains[index] != 0) {
                return Err(twice(at));
            }
            let sector = start + run.len() as u64 / SECTOR_BYTES;
            let sector = u32::try_from(sector).map_err(|_| Error::unsupported("a VMDK extent can be no longer"))?;
            run.extend_from_slice(&packed);
            try_push(&mut placed, (table, index, sector))?;
        }
        let sectors = run.len() as u64 / SECTOR_BYTES;
        self.file.write_at(IoBuf::copy_from(&run), start * SECTOR_BYTES).await.0?;
        state.next = start + sectors;
        for (table, index, sector) in placed {
            let grains = || vec![0; self.header.table_entries as usize].into_boxed_slice();
            let table = state.tables.entry(table).or_insert_with(|| GrainTable { grains: grains(), written: None });
            table.grains[index] = sector;
            table.written = None;
        }
        Ok(())
    }

    /// Makes room for grains at the end.
    async fn begin(&self, state: &mut StreamState) -> Result<()> {
        if !state.is_open {
            match &state.footer {
                // The footer goes at the next write. Its directory and tables stay.
                Some(footer) if !slip!("vmdk_stream_gives_up_its_flushed_end") => {
                    state.has_header = false;
                    self.file.write_at(IoBuf::copy_from(footer), 0).await.0?;
                }
                // Without its end no part of the disk is taken for the whole.
                _ => self.file.set_len(state.next * SECTOR_BYTES).await?,
            }
            self.file.sync().await?;
            state.is_open = true;
        }
        if !state.has_header && state.footer.is_none() {
            self.write_header(state).await?;
        }
        Ok(())
    }

    /// Has readers look for a footer.
    async fn write_header(&self, state: &mut StreamState) -> Result<()> {
        self.file.write_at(IoBuf::copy_from(&self.header_bytes), 0).await.0?;
        self.file.sync().await?;
        state.has_header = true;
        Ok(())
    }

    /// Refuses zeroes where data were written.
    pub(super) async fn check_zeroes(&self, at: u64, len: u64) -> Result<()> {
        let state = self.state.lock().await;
        let grain_bytes = self.header.grain_bytes();
        let entries = u64::from(self.header.table_entries);
        let (first, end) = (at / grain_bytes, (at + len).div_ceil(grain_bytes));
        for (number, table) in state.tables.range(first / entries..end.div_ceil(entries)) {
            let written = |index: &usize| {
                let number = number * entries + *index as u64;
                number >= first && number < end && table.grains[*index] != 0
            };
            if (0..table.grains.len()).any(|index| written(&index)) {
                return Err(twice(at));
            }
        }
        Ok(())
    }

    /// Writes new tables, footer and end behind the grains, durably.
    pub(super) async fn complete(&self) -> Result<()> {
        let mut state = self.state.lock().await;
        let state = &mut *state;
        if !state.is_open {
            return Ok(());
        }
        let mut at = state.next;
        let directory_entries = self.header.directory_bytes() / 4;
        let mut directory = vec![0; directory_entries as usize];
        let mut new_tables = Vec::new();
        for (number, table) in &state.tables {
            let sector = match table.written {
                Some(sector) => sector,
                None => {
                    let bytes = stream_end::table(&table.grains);
                    self.file.write_at(IoBuf::copy_from(&bytes), at * SECTOR_BYTES).await.0?;
                    let sector =
                        u32::try_from(at + 1).map_err(|_| Error::unsupported("a VMDK extent can be no longer"))?;
                    at += bytes.len() as u64 / SECTOR_BYTES;
                    try_push(&mut new_tables, (*number, sector))?;
                    sector
                }
            };
            if let Some(entry) = directory.get_mut(*number as usize) {
                *entry = sector;
            }
        }
        // With a footer the file is a disk.
        if !slip!("vmdk_stream_ends_before_its_grains_are_durable") {
            self.file.sync().await?;
        }
        let bytes = stream_end::directory(&directory, at, &self.header_bytes);
        self.file.write_at(IoBuf::copy_from(&bytes), at * SECTOR_BYTES).await.0?;
        let sectors = bytes.len() as u64 / SECTOR_BYTES;
        self.file.set_len((at + sectors) * SECTOR_BYTES).await?;
        self.file.sync().await?;
        if !state.has_header {
            self.write_header(state).await?;
        }
        for (number, sector) in new_tables {
            if let Some(table) = state.tables.get_mut(&number) {
                table.written = Some(sector);
            }
        }
        state.is_open = false;
        state.next = at + sectors - stream_end::FOOTER_SECTORS;
        let footer = bytes.len() - 2 * SECTOR_BYTES as usize;
        state.footer = Some(bytes[footer..footer + SECTOR_BYTES as usize].to_vec());
        Ok(())
    }
}
