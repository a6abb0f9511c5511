// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Writes to stream-optimised disks: compressed grains one behind the other, each once. The tables, the footer and the
//! mark of the end follow when the disk is closed; without them the disk can't be read.

use cowshed_codec::Codec;
use cowshed_layout::vmdk::{SECTOR_BYTES, SparseHeader, stream_end, stream_grain};
use cowshed_storage::{File, IoBuf, rt};
use cowshed_types::memory::try_push;
use cowshed_types::{Compression, Error, Result, slip};
use futures_util::future::join_all;
use futures_util::lock::Mutex as Turn;
use std::collections::BTreeMap;

/// The header of a stream.
pub(super) struct StreamHeader {
    pub bytes: Vec<u8>,
    /// False: the file has one with another place of the directory.
    pub is_in_file: bool,
}

/// The part that writes to a disk without grains.
pub(super) struct StreamWriter {
    file: File,
    header: SparseHeader,
    header_bytes: Vec<u8>,
    len: u64,
    state: Turn<State>,
}

struct State {
    codec: Codec,
    /// The sector that the next grain goes to.
    next: u64,
    /// Where grains are, by their tables.
    tables: BTreeMap<u64, Box<[u32]>>,
    /// The end is not behind the last grain.
    is_open: bool,
    /// The header in the file is that of a stream.
    has_header: bool,
}

impl StreamWriter {
    /// `first`: the sector where grains begin.
    pub(super) fn new(file: File, header: SparseHeader, new: StreamHeader, len: u64, first: u64) -> StreamWriter {
        let (codec, has_header) = (Codec::new(Compression::Zlib), new.is_in_file);
        let state = Turn::new(State { codec, next: first, tables: BTreeMap::new(), is_open: false, has_header });
        StreamWriter { file, header, header_bytes: new.bytes, len, state }
    }

    /// True once a grain was written: the tables of the file know nothing of it.
    pub(super) async fn is_changed(&self) -> bool {
        !self.state.lock().await.tables.is_empty()
    }

    /// Writes whole grains, each for the first time. None at all make the disk one with a footer.
    pub(super) async fn write(&self, grains: Vec<(u64, IoBuf)>) -> Result<()> {
        let grain_bytes = self.header.grain_bytes();
        for (at, grain) in &grains {
            let end = at + grain.len() as u64;
            let is_whole = at.is_multiple_of(grain_bytes) && (grain.len() as u64 == grain_bytes || end == self.len);
            if !is_whole || grain.len() as u64 > grain_bytes {
                let message = "a stream-optimised VMDK disk takes whole grains, each once: convert writes them";
                return Err(Error::unsupported(message).offset(*at));
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
        if !state.is_open {
            // Without its end no part of the disk is taken for the whole.
            self.file.set_len(state.next * SECTOR_BYTES).await?;
            self.file.sync().await?;
            state.is_open = true;
        }
        if !state.has_header {
            self.file.write_at(IoBuf::copy_from(&self.header_bytes), 0).await.0?;
            self.file.sync().await?;
            state.has_header = true;
        }
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
            if state.tables.get(&table).is_some_and(|table| table[index] != 0) {
                let message = "a grain of a stream-optimised VMDK disk can't be written twice";
                return Err(Error::unsupported(message).offset(at));
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
            let entries = self.header.table_entries as usize;
            let table = state.tables.entry(table).or_insert_with(|| vec![0; entries].into_boxed_slice());
            table[index] = sector;
        }
        Ok(())
    }

    /// Refuses zeroes where data were written.
    pub(super) async fn check_zeroes(&self, at: u64, len: u64) -> Result<()> {
        let state = self.state.lock().await;
        let grain_bytes = self.header.grain_bytes();
        let entries = u64::from(self.header.table_entries);
        let (first, end) = (at / grain_bytes, (at + len).div_ceil(grain_bytes));
        for (table, grains) in state.tables.range(first / entries..end.div_ceil(entries)) {
            let written = |index: &usize| {
                let number = table * entries + *index as u64;
                number >= first && number < end && grains[*index] != 0
            };
            if (0..grains.len()).any(|index| written(&index)) {
                let message = "a grain of a stream-optimised VMDK disk can't be written twice";
                return Err(Error::unsupported(message).offset(at));
            }
        }
        Ok(())
    }

    /// Writes tables, footer and end behind the grains.
    pub(super) async fn complete(&self) -> Result<()> {
        let mut state = self.state.lock().await;
        if !state.is_open {
            return Ok(());
        }
        let mut at = state.next;
        let directory_entries = self.header.directory_bytes() / 4;
        let mut directory = vec![0; directory_entries as usize];
        for (table, grains) in &state.tables {
            let bytes = stream_end::table(grains);
            self.file.write_at(IoBuf::copy_from(&bytes), at * SECTOR_BYTES).await.0?;
            let sector = u32::try_from(at + 1).map_err(|_| Error::unsupported("a VMDK extent can be no longer"))?;
            if let Some(entry) = directory.get_mut(*table as usize) {
                *entry = sector;
            }
            at += bytes.len() as u64 / SECTOR_BYTES;
        }
        // With a footer the file is a disk.
        if !slip!("vmdk_stream_ends_before_its_grains_are_durable") {
            self.file.sync().await?;
        }
        let bytes = stream_end::directory(&directory, at, &self.header_bytes);
        self.file.write_at(IoBuf::copy_from(&bytes), at * SECTOR_BYTES).await.0?;
        self.file.set_len(at * SECTOR_BYTES + bytes.len() as u64).await?;
        self.file.sync().await?;
        state.is_open = false;
        Ok(())
    }
}
