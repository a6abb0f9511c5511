// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Changing the set of bitmaps: all that is new goes to free clusters, and one change of the header switches to it.

use super::super::Qcow2Driver;
use super::{BitmapState, StoredBitmap};
use cowshed_layout::qcow2::bitmap::{BitmapTableEntry, FLAG_IN_USE};
use cowshed_layout::qcow2::features::{AUTOCLEAR_BITMAP_JOURNAL, AUTOCLEAR_BITMAPS};
use cowshed_layout::qcow2::{BitmapJournal, BitmapsExtension, Extension, Header, extension_type, limits};
use cowshed_storage::IoBuf;
use cowshed_types::memory::expect_memory;
use cowshed_types::{BitsPiece, Error, HostOffset, Result, slip};
use futures_util::stream::{self, StreamExt};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

/// Clusters of bitmap data written at once.
const WRITES_AT_ONCE: usize = 16;

/// Clusters that are taken for a change of the bitmaps.
struct Space<'a> {
    driver: &'a Qcow2Driver,
    taken: Vec<HostOffset>,
}

impl Space<'_> {
    /// Neighbouring clusters for this many bytes.
    async fn take(&mut self, bytes: u64) -> Result<u64> {
        let cluster_size = self.driver.engine.geometry().cluster_size();
        let clusters = bytes.div_ceil(cluster_size);
        let start = self.driver.plan(|engine| engine.allocate_metadata(clusters)).await?;
        self.taken.extend(run(start, clusters, cluster_size));
        Ok(start.0)
    }
}

impl Qcow2Driver {
    /// Makes `maps` the image's bitmaps, durably, and `size` the size of its disk if given: a power cut leaves the old ones or
    /// the new. The caller holds the lock for changes; no request may miss the bits of the new ones.
    pub(super) async fn publish(&self, mut maps: Vec<StoredBitmap>, size: Option<u64>) -> Result<()> {
        let old_table_of = |map: &StoredBitmap| map.entry.table_offset;
        let beside_snapshots = self.header().nb_snapshots > 0;
        let (old, in_use) = {
            let known = self.bitmaps.known();
            // Without anything to record nothing is in use. Beside snapshots all are from the opening on.
            let in_use = (known.in_use || beside_snapshots) && maps.iter().any(|map| map.is_marked(beside_snapshots));
            (known.maps.clone(), in_use)
        };
        let directory_bytes = self.directory_bytes(&maps)?;
        // The format has no bitmaps of 0 bits. They are in memory until the disk grows.
        let stores = size.unwrap_or(self.header().size) > 0;
        for map in maps.iter_mut().filter(|_| !stores) {
            (map.entry.table_offset, map.entry.table_size) = (0, 0);
            (map.table, map.is_new) = (None, true);
        }
        let geometry = self.engine.geometry();
        let clusters = |bytes: u64| bytes.div_ceil(geometry.cluster_size());
        let mut directory = None;
        let mut space = Space { driver: self, taken: Vec::new() };
        if directory_bytes > 0 && stores {
            let written = match self.write_new(&mut maps, &mut space, in_use).await {
                // The counts are durable before anything refers to the clusters; so are the written bits.
                Ok(place) if slip!("bitmaps_named_before_they_are_durable") => Ok(place),
                Ok(place) => self.write_back(true).await.map(|()| place),
                Err(error) => Err(error),
            };
            match written {
                Ok(place) => directory = place,
                Err(error) => {
                    self.engine.free_metadata(space.taken);
                    return Err(error);
                }
            }
        }
        let before = self.header();
        if let Err(error) = self.switch_bitmaps(&maps, directory, in_use, size).await {
            match self.header() == before {
                // It refers to none of them.
                true => self.engine.free_metadata(space.taken),
                // Bitmaps of the new one would miss what is written.
                false => self.abandon(),
            }
            return Err(error);
        }
        self.engine.set_bitmap_directory(directory.map(|(offset, bytes)| (HostOffset(offset), bytes)));
        let kept: Vec<u64> = maps.iter().map(old_table_of).collect();
        let is_gone = |map: &StoredBitmap| map.entry.table_offset > 0 && !kept.contains(&map.entry.table_offset);
        let gone: Vec<StoredBitmap> = old.into_iter().filter(is_gone).collect();
        let old_directory = {
            let mut known = self.bitmaps.known();
            let old_directory = known.directory;
            self.bitmaps.recording.store(maps.iter().any(StoredBitmap::is_recording), Ordering::Release);
            let waiting = std::mem::take(&mut known.waiting);
            *known = BitmapState { is_read: true, maps, directory, in_use, waiting };
            old_directory
        };
        if let Some((offset, bytes)) = old_directory {
            self.engine.free_metadata(run(HostOffset(offset), clusters(bytes), geometry.cluster_size()));
        }
        for map in gone {
            self.free_bitmap(&map).await;
        }
        self.wrote_metadata.store(true, Ordering::Relaxed);
        self.reclaim().await
    }

    fn directory_bytes(&self, maps: &[StoredBitmap]) -> Result<u64> {
        let bytes: u64 = maps.iter().map(|map| map.entry.encoded_len() as u64).sum();
        if maps.len() > limits::BITMAPS as usize || bytes > limits::BITMAP_DIRECTORY_BYTES {
            let message = format!("an image has at most {} bitmaps", limits::BITMAPS);
            return Err(self.error(Error::new(cowshed_types::ErrorKind::Limit, message)));
        }
        Ok(bytes)
    }

    /// Writes data and tables of new bitmaps and the directory to free clusters. Returns the offset of the directory
    /// and its bytes; `None` without bitmaps.
    async fn write_new(
        &self,
        maps: &mut [StoredBitmap],
        space: &mut Space<'_>,
        in_use: bool,
    ) -> Result<Option<(u64, u64)>> {
        let cluster_size = self.engine.geometry().cluster_size();
        for map in maps.iter_mut().filter(|map| map.is_new) {
            let Some(bits) = map.bits.clone() else { continue };
            let mut table = BTreeMap::new();
            let mut data = Vec::new();
            for piece in bits.used_pieces() {
                if bits.piece(piece) == BitsPiece::Ones {
                    table.insert(piece, 1);
                } else {
                    let host = space.take(cluster_size).await?;
                    table.insert(piece, host);
                    data.push((piece, host));
                }
            }
            let mut writes = stream::iter(data)
                .map(|(piece, host)| self.write_metadata(IoBuf::copy_from(&bits.piece_bytes(piece)), host))
                .buffer_unordered(WRITES_AT_ONCE);
            let mut result = Ok(());
            while let Some(outcome) = writes.next().await {
                result = result.and(outcome);
            }
            drop(writes);
            result?;
            let entries = bits.piece_count();
            let table_bytes = (entries * 8).next_multiple_of(cluster_size) as usize;
            expect_memory(2 * table_bytes)?;
            let mut bytes = vec![0; table_bytes];
            for (piece, raw) in &table {
                bytes[*piece as usize * 8..][..8].copy_from_slice(&u64::to_be_bytes(*raw));
            }
            map.entry.table_offset = space.take(bytes.len() as u64).await?;
            map.entry.table_size = u32::try_from(entries).unwrap_or(u32::MAX);
            self.write_metadata(IoBuf::copy_from(&bytes), map.entry.table_offset).await?;
            map.table = Some(table);
            map.is_new = false;
        }
        if maps.is_empty() {
            return Ok(None);
        }
        let mut bytes = Vec::new();
        let beside_snapshots = self.header().nb_snapshots > 0;
        for map in maps.iter() {
            let mut entry = map.entry.clone();
            if in_use && map.is_marked(beside_snapshots) {
                entry.flags |= FLAG_IN_USE;
            }
            bytes.extend(entry.encode()?);
        }
        let len = bytes.len() as u64;
        bytes.resize(bytes.len().next_multiple_of(cluster_size as usize), 0);
        let directory = space.take(len).await?;
        self.write_metadata(IoBuf::copy_from(&bytes), directory).await?;
        Ok(Some((directory, len)))
    }

    async fn switch_bitmaps(
        &self,
        maps: &[StoredBitmap],
        directory: Option<(u64, u64)>,
        in_use: bool,
        size: Option<u64>,
    ) -> Result<()> {
        let recording = maps.iter().enumerate().filter(|(_, map)| map.is_recording());
        let entries: Vec<u32> = recording.map(|(index, _)| index as u32).collect();
        self.switch_header(|header| {
            header.size = size.unwrap_or(header.size);
            match directory {
                Some((directory_offset, directory_size)) => {
                    header.set_extension(Extension::Bitmaps(BitmapsExtension {
                        nb_bitmaps: maps.len() as u32,
                        reserved: 0,
                        directory_size,
                        directory_offset,
                    }));
                    header.autoclear_features |= AUTOCLEAR_BITMAPS;
                }
                None => {
                    header.remove_extension(extension_type::BITMAPS);
                    header.autoclear_features &= !AUTOCLEAR_BITMAPS;
                }
            }
            // A header without room for a journal before, or with snapshots, doesn't get one now.
            match directory.filter(|_| in_use && !entries.is_empty() && has_journal(header)) {
                Some((directory_offset, _)) => {
                    header.set_extension(Extension::BitmapJournal(BitmapJournal { directory_offset, entries }));
                }
                None => {
                    header.remove_extension(extension_type::BITMAP_JOURNAL);
                    header.autoclear_features &= !AUTOCLEAR_BITMAP_JOURNAL;
                }
            }
        })
        .await
    }

    /// Gives the clusters of a bitmap back that nothing on disk refers to any more. A table that can't be read is left.
    async fn free_bitmap(&self, map: &StoredBitmap) {
        let geometry = self.engine.geometry();
        let table = match map.table.clone() {
            Some(table) => table,
            None => match self.read_table(&map.entry).await {
                Ok(table) => table,
                Err(error) => {
                    tracing::warn!("the clusters of bitmap '{}' are left where they are: {error}", map.name());
                    return;
                }
            },
        };
        let data = table.values().map(|raw| BitmapTableEntry(*raw).offset()).filter(|host| host.0 != 0);
        let table_clusters = (u64::from(map.entry.table_size) * 8).div_ceil(geometry.cluster_size());
        let tables = run(HostOffset(map.entry.table_offset), table_clusters, geometry.cluster_size());
        let owned = data.chain(tables).filter(|host| !self.engine.is_other_metadata(*host));
        self.engine.free_metadata(owned.collect::<Vec<_>>());
    }
}

fn has_journal(header: &Header) -> bool {
    header.autoclear_features & AUTOCLEAR_BITMAP_JOURNAL != 0
        && header.extensions.iter().any(|extension| matches!(extension, Extension::BitmapJournal(_)))
}

fn run(start: HostOffset, clusters: u64, cluster_size: u64) -> impl Iterator<Item = HostOffset> {
    (0..clusters).map(move |number| start + number * cluster_size)
}
