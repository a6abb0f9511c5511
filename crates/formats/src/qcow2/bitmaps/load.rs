// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reading bitmaps: the directory, tables, data.

use super::super::Qcow2Driver;
use super::{BitmapState, StoredBitmap};
use cowshed_graph::node::BitmapStatus;
use cowshed_layout::qcow2::bitmap::{BitmapTableEntry, FLAG_IN_USE, parse_directory};
use cowshed_layout::qcow2::features::AUTOCLEAR_BITMAPS;
use cowshed_layout::qcow2::{BitmapEntry, BitmapsExtension, Header, limits};
use cowshed_storage::fault::as_metadata;
use cowshed_storage::{File, IoBuf};
use cowshed_types::{DirtyBits, Error, ErrorKind, Result};
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Bytes of a table that are read at once.
const TABLE_PIECE_BYTES: u64 = 1 << 20;
/// Tables of all recording bitmaps together: they are read before the first write.
const TABLES_BYTES: u64 = 256 << 20;
/// Bits, and table entries, that one image may have in memory, in bytes.
const MEMORY_BYTES: u64 = 1 << 30;
/// Memory that an entry of a table takes, about.
const ENTRY_BYTES: u64 = 48;

/// Reads the directory of the bitmaps; nothing where they don't count.
pub(super) async fn read_directory(file: &File, header: &Header) -> Result<Vec<BitmapEntry>> {
    let Some(extension) = extension(header) else { return Ok(Vec::new()) };
    let (start, len) = (extension.directory_offset, extension.directory_size);
    let past_end = start.checked_add(len).is_none_or(|end| end > file.len());
    if len > limits::BITMAP_DIRECTORY_BYTES || past_end {
        let message = format!("the bitmap directory at {start:#x} is too large or ends past the end of the file");
        return Err(Error::invalid_image("bitmap_directory_size", len, message));
    }
    let (result, bytes) = as_metadata(file.read_at(IoBuf::try_zeroed(len as usize)?, start)).await;
    result?;
    parse_directory(&bytes, extension)
}

fn extension(header: &Header) -> Option<&BitmapsExtension> {
    header.bitmaps().filter(|_| header.autoclear_features & AUTOCLEAR_BITMAPS != 0)
}

/// True when the table has as many entries as the disk needs.
fn fits(entry: &BitmapEntry, disk_bytes: u64, cluster_bits: u32) -> bool {
    let wanted = DirtyBits::new(disk_bytes, u32::from(entry.granularity_bits), cluster_bits).piece_count();
    u64::from(entry.table_size) == wanted
}

impl Qcow2Driver {
    /// Reads the directory, unless it is known. Entries that break a rule are errors.
    pub(in super::super) async fn know_bitmaps(&self) -> Result<()> {
        if self.bitmaps.known().is_read {
            return Ok(());
        }
        let header = self.header();
        let entries = read_directory(&self.file, &header).await.map_err(|error| self.error(error))?;
        let journal: Option<HashSet<u32>> =
            header.bitmap_journal().map(|found| found.entries.iter().copied().collect());
        let mut known = BitmapState { is_read: true, in_use: journal.is_some(), ..BitmapState::default() };
        for (index, mut entry) in entries.into_iter().enumerate() {
            entry.validate(header.size, header.cluster_bits).map_err(|error| self.error(error))?;
            let journaled = journal.as_ref().is_some_and(|journal| journal.contains(&(index as u32)));
            let is_marked = entry.flags & FLAG_IN_USE != 0;
            if journaled && fits(&entry, header.size, header.cluster_bits) {
                entry.flags &= !FLAG_IN_USE;
            }
            let map = StoredBitmap { entry, table: None, bits: None, is_new: false };
            // A cut between the journal and the marks: they are made again.
            known.in_use &= is_marked || !map.is_recording();
            known.in_use &= journaled || !map.is_recording();
            known.maps.push(map);
        }
        known.directory = extension(&header).map(|found| (found.directory_offset, found.directory_size));
        let recording = known.maps.iter().any(StoredBitmap::is_recording);
        *self.bitmaps.known() = known;
        self.bitmaps.recording.store(recording, Ordering::Release);
        Ok(())
    }

    /// The known state holds no longer: another process may have written to the image.
    pub(in super::super) fn forget_bitmaps(&self) {
        *self.bitmaps.known() = BitmapState::default();
    }

    /// Reads the directory, of an image that is going to be written to. A bitmap that must follow all writes and can't
    /// be understood forbids that.
    pub(in super::super) async fn prepare_bitmaps(&self) -> Result<()> {
        self.know_bitmaps().await?;
        self.refuse_strange_bitmaps()?;
        match self.header().nb_snapshots {
            0 => Ok(()),
            _ => self.end_journal().await,
        }
    }

    fn refuse_strange_bitmaps(&self) -> Result<()> {
        let known = self.bitmaps.known();
        let strange = known.maps.iter().find(|map| map.is_enabled() && !map.is_inconsistent() && !map.is_usable());
        let recording = known.maps.iter().filter(|map| map.is_recording());
        let tables: u64 = recording.map(|map| u64::from(map.entry.table_size) * 8).sum();
        if tables > TABLES_BYTES {
            let message =
                format!("the tables of the enabled bitmaps are larger than {} MiB together", TABLES_BYTES >> 20);
            return Err(self.error(Error::new(ErrorKind::Limit, message).field("bitmap_table_size").value(tables)));
        }
        match strange {
            Some(map) => {
                let message = format!("the enabled bitmap '{}' has extra data that is not understood", map.name());
                Err(self.error(Error::unsupported(message)))
            }
            None => Ok(()),
        }
    }

    /// The persistent bitmaps, in the order of the directory.
    pub async fn bitmaps(&self) -> Result<Vec<BitmapStatus>> {
        self.be_current().await?;
        self.know_bitmaps().await?;
        let status = |map: &StoredBitmap| BitmapStatus {
            name: map.name(),
            granularity_bytes: 1u64.checked_shl(u32::from(map.entry.granularity_bits)).unwrap_or(0),
            enabled: map.is_enabled(),
            inconsistent: map.is_inconsistent(),
        };
        Ok(self.bitmaps.known().maps.iter().map(status).collect())
    }

    /// The bits of a bitmap at this moment.
    pub async fn bitmap_bits(&self, name: &str) -> Result<Arc<DirtyBits>> {
        self.be_current().await?;
        self.know_bitmaps().await?;
        let found = self.bitmaps.known().find(name);
        let Some(index) = found else { return Err(self.no_such_bitmap(name)) };
        if let Some(bits) = self.bitmaps.known().maps.get(index).and_then(|map| map.bits.clone()) {
            return Ok(bits);
        }
        let _change = self.bitmaps.change.lock().await;
        // Others may have come first.
        let found = self.bitmaps.known().find(name);
        let Some(index) = found else { return Err(self.no_such_bitmap(name)) };
        self.load_bits(index).await?;
        let bits = self.bitmaps.known().maps.get(index).and_then(|map| map.bits.clone());
        bits.ok_or_else(|| Error::internal("a bitmap went away"))
    }

    pub(super) fn no_such_bitmap(&self, name: &str) -> Error {
        self.error(Error::new(ErrorKind::NotFound, format!("Dirty bitmap '{name}' not found")))
    }

    /// Refuses a bitmap that can't be trusted.
    pub(super) fn check_usable(&self, map: &StoredBitmap) -> Result<()> {
        let name = map.name();
        if map.is_inconsistent() {
            let message = format!("Bitmap '{name}' is inconsistent and cannot be used, only removed");
            return Err(self.error(Error::new(ErrorKind::InvalidImage, message)));
        }
        if !map.is_usable() {
            let message = format!("Bitmap '{name}' has extra data that is not understood");
            return Err(self.error(Error::unsupported(message)));
        }
        Ok(())
    }

    /// Reads table and data of a bitmap, unless they are known. The caller holds the lock for changes.
    pub(super) async fn load_bits(&self, index: usize) -> Result<()> {
        let (map, taken) = {
            let known = self.bitmaps.known();
            let taken = |map: &StoredBitmap| {
                let table = map.table.as_ref().map_or(0, BTreeMap::len) as u64 * ENTRY_BYTES;
                table + map.bits.as_ref().map_or(0, |bits| bits.memory_bytes())
            };
            let taken: u64 = known.maps.iter().map(taken).sum();
            (known.maps.get(index).cloned(), taken)
        };
        let Some(map) = map.filter(|map| map.bits.is_none()) else { return Ok(()) };
        self.check_usable(&map)?;
        let table = match map.table.clone() {
            Some(table) => table,
            None => self.read_table(&map.entry).await?,
        };
        let data = table.values().filter(|raw| BitmapTableEntry(**raw).offset().0 != 0).count() as u64;
        let wanted = table.len() as u64 * ENTRY_BYTES + (data << self.engine.geometry().cluster_bits());
        if taken.saturating_add(wanted) > MEMORY_BYTES {
            let message = format!("the bitmaps need more than {} MiB of memory", MEMORY_BYTES >> 20);
            return Err(self.error(Error::new(ErrorKind::Limit, message)));
        }
        let bits = self.read_bits(&map, &table).await?;
        let mut known = self.bitmaps.known();
        if let Some(map) = known.maps.get_mut(index) {
            map.table = Some(table);
            map.bits = Some(Arc::new(bits));
        }
        Ok(())
    }

    /// The entries of a bitmap's table that aren't 0, checked.
    pub(super) async fn read_table(&self, entry: &BitmapEntry) -> Result<BTreeMap<u64, u64>> {
        let geometry = self.engine.geometry();
        let mut table = BTreeMap::new();
        let bytes = u64::from(entry.table_size) * 8;
        let end = entry.table_offset.checked_add(bytes);
        if bytes > limits::BITMAP_TABLE_BYTES || end.is_none_or(|end| end > self.file.len()) {
            let message = "a bitmap table is too large or ends past the end of the file";
            let value = format!("{:#x}", entry.table_offset);
            return Err(self.error(Error::invalid_image("bitmap_table_offset", value, message)));
        }
        let mut at = 0;
        while at < bytes {
            let piece = TABLE_PIECE_BYTES.min(bytes - at);
            let buf = IoBuf::try_zeroed(piece as usize)?;
            let (result, words) = self.read_metadata(buf, entry.table_offset + at).await;
            result?;
            for (index, word) in words.as_chunks::<8>().0.iter().enumerate() {
                let raw = u64::from_be_bytes(*word);
                if raw == 0 {
                    continue;
                }
                let place =
                    BitmapTableEntry(raw).cluster(geometry.cluster_bits()).map_err(|error| self.error(error))?;
                if place.is_some_and(|host| host.0 + geometry.cluster_size() > self.file.len()) {
                    let message = "bitmap data lie past the end of the file";
                    let error = Error::invalid_image("bitmap_table_entry", format!("{raw:#018x}"), message);
                    return Err(self.error(error.with_errno(cowshed_types::Errno::EIO)));
                }
                table.insert(at / 8 + index as u64, raw);
            }
            at += piece;
        }
        Ok(table)
    }

    async fn read_bits(&self, map: &StoredBitmap, table: &BTreeMap<u64, u64>) -> Result<DirtyBits> {
        let geometry = self.engine.geometry();
        let size = self.header().size;
        let mut bits = DirtyBits::new(size, u32::from(map.entry.granularity_bits), geometry.cluster_bits());
        for (piece, raw) in table {
            match BitmapTableEntry(*raw).offset().0 {
                0 => bits.fill_piece(*piece),
                host => {
                    let buf = IoBuf::zeroed(geometry.cluster_size() as usize);
                    let (result, data) = self.read_metadata(buf, host).await;
                    result?;
                    bits.put_piece(*piece, data[..].into());
                }
            }
        }
        Ok(bits)
    }
}
