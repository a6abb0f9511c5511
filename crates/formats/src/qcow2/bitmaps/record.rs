// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Recording of writes: first the bit, then the write.

use super::super::Qcow2Driver;
use super::{Bitmaps, StoredBitmap};
use cowshed_graph::node::LocalFuture;
use cowshed_layout::qcow2::bitmap::{BitmapTableEntry, FLAG_IN_USE};
use cowshed_layout::qcow2::features::AUTOCLEAR_BITMAP_JOURNAL;
use cowshed_layout::qcow2::{BitmapJournal, Extension, extension_type};
use cowshed_storage::IoBuf;
use cowshed_types::{Errno, Error, ErrorKind, HostOffset, Result, slip};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Bytes of a write that may be torn at most once: bits are written in such units.
const SECTOR_BYTES: usize = 512;
/// The offset of the flags in an entry of the directory.
const FLAGS_AT: u64 = 12;

/// A piece of a bitmap on its way to the file.
struct Step {
    map: usize,
    piece: u64,
    bytes: Box<[u8]>,
    /// The changed range in it.
    changed: Range<usize>,
    /// Its entry in the table, where that changes.
    entry: Option<u64>,
}

/// A write that waits for its bits, which the request in front of it may write as well. Once over it counts no more: its
/// bits may be cleared by the time of the next write.
struct WaitingWrite<'a> {
    bitmaps: &'a Bitmaps,
    range: Range<u64>,
}

impl WaitingWrite<'_> {
    fn new(bitmaps: &Bitmaps, range: Range<u64>) -> WaitingWrite<'_> {
        bitmaps.known().waiting.push(range.clone());
        WaitingWrite { bitmaps, range }
    }
}

impl Drop for WaitingWrite<'_> {
    fn drop(&mut self) {
        let mut known = self.bitmaps.known();
        if let Some(at) = known.waiting.iter().position(|range| *range == self.range) {
            known.waiting.swap_remove(at);
        }
    }
}

impl Qcow2Driver {
    /// True when a bitmap records writes: [`Qcow2Driver::record`] comes first then.
    #[inline]
    pub(in super::super) fn is_recording(&self) -> bool {
        self.bitmaps.recording.load(Ordering::Acquire)
    }

    /// Has the bits of a range set, in memory and in the file, before it is written. In a box: the futures of images
    /// without bitmaps stay small.
    #[cold]
    pub(in super::super) fn record(&self, offset: u64, len: u64) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            if len == 0 || self.is_recorded(offset, len) {
                return Ok(());
            }
            self.record_new(offset, len).await
        })
    }

    /// True when the file has the bits already.
    pub(in super::super) fn is_recorded(&self, offset: u64, len: u64) -> bool {
        let known = self.bitmaps.known();
        let covers = |map: &StoredBitmap| map.bits.as_ref().is_some_and(|bits| bits.covers(offset, len));
        known.in_use && known.maps.iter().filter(|map| map.is_recording()).all(covers)
    }

    /// The first request writes the bits of all that wait meanwhile.
    async fn record_new(&self, offset: u64, len: u64) -> Result<()> {
        self.check_writable()?;
        let own = offset..offset + len;
        let _waiting = WaitingWrite::new(&self.bitmaps, own.clone());
        let _change = self.bitmaps.change.lock().await;
        if self.is_recorded(offset, len) {
            return Ok(());
        }
        let mut ranges = std::mem::take(&mut self.bitmaps.known().waiting);
        // A request that took it before may have failed.
        ranges.push(own);
        let recording: Vec<usize> = {
            let known = self.bitmaps.known();
            known.maps.iter().enumerate().filter(|(_, map)| map.is_recording()).map(|(index, _)| index).collect()
        };
        for index in recording {
            self.load_bits(index).await?;
        }
        self.mark_in_use().await?;
        while let Err(error) = self.record_ranges(&ranges).await {
            self.unless_space_is_gained(error).await?;
        }
        Ok(())
    }

    /// Has the file name the bits of these ranges, and then the memory.
    async fn record_ranges(&self, ranges: &[Range<u64>]) -> Result<()> {
        let mut steps = self.steps(ranges);
        self.place(&mut steps).await?;
        if !slip!("bits_only_in_memory")
            && let Err(error) = self.write_steps(&steps).await
        {
            self.take_back(&steps).await;
            return Err(error);
        }
        let mut known = self.bitmaps.known();
        for step in steps {
            let Some(map) = known.maps.get_mut(step.map) else { continue };
            if let Some(bits) = &mut map.bits {
                Arc::make_mut(bits).put_piece(step.piece, step.bytes);
            }
            if let (Some(raw), Some(table)) = (step.entry, &mut map.table) {
                table.insert(step.piece, raw);
            }
        }
        Ok(())
    }

    /// The changes to the bitmaps.
    fn steps(&self, ranges: &[Range<u64>]) -> Vec<Step> {
        let known = self.bitmaps.known();
        let mut steps = Vec::new();
        for (index, map) in known.maps.iter().enumerate().filter(|(_, map)| map.is_recording()) {
            let Some(bits) = &map.bits else { continue };
            // Ranges may touch one piece.
            let mut pieces: BTreeMap<u64, Box<[u8]>> = BTreeMap::new();
            for range in ranges {
                for (piece, bytes) in bits.with_range(range.start, range.end - range.start) {
                    match pieces.entry(piece) {
                        std::collections::btree_map::Entry::Vacant(place) => drop(place.insert(bytes)),
                        std::collections::btree_map::Entry::Occupied(mut place) => {
                            place.get_mut().iter_mut().zip(bytes).for_each(|(all, more)| *all |= more);
                        }
                    }
                }
            }
            for (piece, bytes) in pieces {
                let changed = changed_sectors(&bits.piece_bytes(piece), &bytes);
                steps.push(Step { map: index, piece, bytes, changed, entry: None });
            }
        }
        steps
    }

    /// Gives a cluster to each piece that has none. Their counts and their contents are durable afterwards.
    async fn place(&self, steps: &mut [Step]) -> Result<()> {
        let geometry = self.engine.geometry();
        let mut taken = Vec::new();
        let mut result = Ok(());
        for step in steps.iter_mut().filter(|step| self.host_of(step).is_none()) {
            match self.plan(|engine| engine.allocate_metadata(1)).await {
                Ok(host) => {
                    taken.push(host);
                    step.entry = Some(host.0);
                    step.changed = 0..geometry.cluster_size() as usize;
                }
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
        }
        if taken.is_empty() {
            return result;
        }
        for step in steps.iter().filter(|step| step.entry.is_some()) {
            if result.is_ok() {
                result = self.write_piece(step).await;
            }
        }
        if result.is_ok() {
            result = if slip!("bitmap_data_named_before_their_count") { Ok(()) } else { self.write_back(true).await };
        }
        if result.is_err() {
            // Nothing refers to them.
            self.engine.free_metadata(taken);
        }
        result
    }

    /// The offset of a piece in the file.
    fn host_of(&self, step: &Step) -> Option<u64> {
        let known = self.bitmaps.known();
        let raw = step.entry.or_else(|| known.maps.get(step.map)?.table.as_ref()?.get(&step.piece).copied());
        raw.map(|raw| BitmapTableEntry(raw).offset().0).filter(|host| *host != 0)
    }

    /// Writes bits in place, and the entries of tables that have become other ones.
    async fn write_steps(&self, steps: &[Step]) -> Result<()> {
        for step in steps.iter().filter(|step| step.entry.is_none()) {
            self.write_piece(step).await?;
        }
        for step in steps {
            let Some(raw) = step.entry else { continue };
            let table = self.bitmaps.known().maps.get(step.map).map(|map| map.entry.table_offset);
            let Some(table) = table else { continue };
            let at = table + step.piece * 8;
            self.write_metadata(IoBuf::copy_from(&raw.to_be_bytes()), at).await?;
        }
        Ok(())
    }

    /// Has the tables of bitmaps name none of the new places, whose clusters are free then. Where that fails they leak.
    async fn take_back(&self, steps: &[Step]) {
        let mut places = Vec::new();
        for step in steps {
            let Some(raw) = step.entry else { continue };
            let (table, before) = {
                let known = self.bitmaps.known();
                let Some(map) = known.maps.get(step.map) else { continue };
                let before = map.table.as_ref().and_then(|table| table.get(&step.piece)).copied();
                (map.entry.table_offset, before.unwrap_or(0))
            };
            let at = table + step.piece * 8;
            if self.write_metadata(IoBuf::copy_from(&before.to_be_bytes()), at).await.is_err() {
                return;
            }
            places.push(HostOffset(raw));
        }
        if !places.is_empty() && self.barrier().await.is_ok() {
            self.engine.free_metadata(places);
        }
    }

    async fn write_piece(&self, step: &Step) -> Result<()> {
        let Some(host) = self.host_of(step) else { return Err(Error::internal("a piece of a bitmap has no place")) };
        if self.engine.is_other_metadata(HostOffset(host)) {
            let message = "preventing invalid write on metadata (bitmap data overlap with it)";
            let error =
                Error::invalid_image("bitmap_table_entry", format!("{host:#x}"), message).with_errno(Errno::EIO);
            return self.mark_corrupt(error, Some(host..host + self.cluster_size())).await;
        }
        let bytes = IoBuf::copy_from(&step.bytes[step.changed.clone()]);
        self.write_metadata(bytes, host + step.changed.start as u64).await
    }

    /// Marks on disk that the recording bitmaps change from now on. First comes the journal, after which only this
    /// process trusts them, then the marks for other programs. An image with internal snapshots has no journal, since
    /// QEMU's repair drops all snapshots beside a bit that it doesn't know. The caller holds the lock for changes.
    pub(super) async fn mark_in_use(&self) -> Result<()> {
        let (directory, entries) = {
            let known = self.bitmaps.known();
            if known.in_use {
                return Ok(());
            }
            let recording = known.maps.iter().enumerate().filter(|(_, map)| map.is_recording());
            (known.directory, recording.map(|(index, _)| index as u32).collect::<Vec<u32>>())
        };
        let Some((directory_offset, _)) = directory else { return Ok(()) };
        let beside_snapshots = self.header().nb_snapshots > 0;
        if !beside_snapshots || slip!("journal_beside_snapshots") {
            self.begin_journal(BitmapJournal { directory_offset, entries }).await?;
        }
        let marked = match self.write_flags(true).await {
            Ok(()) => self.barrier().await,
            failed => failed,
        };
        if marked.is_err() && beside_snapshots {
            // Nothing was written by their marks: they are complete.
            self.write_flags(false).await.unwrap_or_else(|error| tracing::warn!("bitmaps stay in use: {error}"));
        }
        marked?;
        self.bitmaps.known().in_use = true;
        Ok(())
    }

    /// As QEMU, marks all bitmaps of an image with internal snapshots while it is open for writing. After a kill its repair
    /// gives the bitmaps up and keeps the snapshots.
    pub(in super::super) async fn mark_beside_snapshots(&self) -> Result<()> {
        let may_be_marked = self.bitmaps.known().maps.iter().any(|map| map.is_marked(true));
        if self.header().nb_snapshots == 0 || !may_be_marked {
            return Ok(());
        }
        let _change = self.bitmaps.change.lock().await;
        self.mark_in_use().await
    }

    async fn begin_journal(&self, journal: BitmapJournal) -> Result<()> {
        let switched = self
            .switch_header(|header| {
                header.set_extension(Extension::BitmapJournal(journal));
                header.autoclear_features |= AUTOCLEAR_BITMAP_JOURNAL;
            })
            .await;
        match switched {
            // Without room for the journal a kill costs the bitmaps, as it does with other programs.
            Err(error) if has_no_room(&error) => {
                tracing::warn!("no journal of the bitmaps: {error}");
                Ok(())
            }
            switched => switched,
        }
    }

    /// Ends the journal that a crash has left, before the first write: bitmaps that it vouches for are complete.
    pub(super) async fn end_journal(&self) -> Result<()> {
        if self.header().bitmap_journal().is_some() {
            self.settle_bitmaps().await?;
        }
        if self.header().autoclear_features & AUTOCLEAR_BITMAP_JOURNAL == 0 {
            return Ok(());
        }
        self.edit_header(|header| header.autoclear_features &= !AUTOCLEAR_BITMAP_JOURNAL).await?;
        self.file.sync().await
    }

    /// Marks on disk that the bitmaps are complete. No request runs.
    pub(in super::super) async fn settle_bitmaps(&self) -> Result<()> {
        let _change = self.bitmaps.change.lock().await;
        let has_journal = self.header().bitmap_journal().is_some();
        if !self.bitmaps.known().in_use && !has_journal {
            return Ok(());
        }
        self.check_writable()?;
        self.barrier().await?;
        self.bitmaps.known().in_use = false;
        self.write_flags(false).await?;
        if has_journal {
            // Its first barrier is that of the flags.
            self.switch_header(|header| {
                header.remove_extension(extension_type::BITMAP_JOURNAL);
                header.autoclear_features &= !AUTOCLEAR_BITMAP_JOURNAL;
            })
            .await
        } else {
            self.barrier().await
        }
    }

    /// The error of a close, or of the end of writing, that would lose bitmaps: a disk of 0 bytes stores none.
    pub(in super::super) fn lost_bitmaps(&self) -> Result<()> {
        let known = self.bitmaps.known();
        if self.header().size > 0 || known.maps.is_empty() {
            return Ok(());
        }
        let names: Vec<_> = known.maps.iter().map(|map| format!("'{}'", map.name())).collect();
        let message = format!("Lost persistent bitmaps: a disk of 0 bytes can't store them ({})", names.join(", "));
        Err(self.error(Error::unsupported(message)))
    }

    /// Writes the flags of the recording bitmaps in the directory, beside snapshots of all, each within its sector.
    async fn write_flags(&self, in_use: bool) -> Result<()> {
        let beside_snapshots = self.header().nb_snapshots > 0;
        let (mut at, flags) = {
            let known = self.bitmaps.known();
            let Some((directory, _)) = known.directory else { return Ok(()) };
            let flags = known.maps.iter().map(|map| {
                let flags = if in_use { map.entry.flags | FLAG_IN_USE } else { map.entry.flags };
                (map.entry.encoded_len() as u64, map.is_marked(beside_snapshots).then_some(flags))
            });
            (directory, flags.collect::<Vec<_>>())
        };
        for (len, flags) in flags {
            if let Some(flags) = flags {
                self.write_metadata(IoBuf::copy_from(&flags.to_be_bytes()), at + FLAGS_AT).await?;
            }
            at += len;
        }
        Ok(())
    }
}

/// The header has no room for what was to be in it: nothing was written.
pub(super) fn has_no_room(error: &Error) -> bool {
    error.kind() == ErrorKind::NoSpace && error.field_name() == Some("header")
}

/// The range of differing bytes, in whole sectors.
fn changed_sectors(old: &[u8], new: &[u8]) -> Range<usize> {
    let differs = |at: &usize| old[*at..*at + SECTOR_BYTES] != new[*at..*at + SECTOR_BYTES];
    let mut sectors = (0..new.len()).step_by(SECTOR_BYTES).filter(differs);
    let Some(first) = sectors.next() else { return 0..0 };
    first..sectors.next_back().unwrap_or(first) + SECTOR_BYTES
}
