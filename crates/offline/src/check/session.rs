// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The parts of an image that a check reads before it counts: header, L1 tables, refcount table, snapshots, bitmaps.

use super::CheckOptions;
use super::journal::RepairLog;
use crate::ProgressFn;
use crate::header::read_header_bytes;
use cowshed_layout::qcow2::{
    BitmapEntry, Extension, Geometry, Header, L1Entry, RefcountTableEntry, Snapshot, bitmap, extension_type, features,
    limits, offset,
};
use cowshed_qcow2::check::{
    CheckedStructure, Finding, FindingKind, INACTIVE, Ledger, ScanContext, TableRef, TableRefs,
};
use cowshed_storage::{File, IoBuf};
use cowshed_types::memory::vec_for;
use cowshed_types::{Error, ErrorKind, Repair, Result};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// L1 entries and refcount table entries read at a time, in bytes.
const PIECE_BYTES: usize = 1 << 20;

/// An image under check.
pub(super) struct CheckSession<'a> {
    pub file: &'a File,
    pub options: &'a CheckOptions,
    pub header: Header,
    pub geometry: Geometry,
    pub context: ScanContext,
    /// Clusters of the file, the last one perhaps incomplete.
    pub file_clusters: u64,
    /// The active L1 table as on disk, as far as it lies in the file.
    pub l1: Vec<u64>,
    /// The refcount table as on disk, as far as it lies in the file.
    pub refcount_table: Vec<u64>,
    pub snapshots: Vec<Snapshot>,
    /// Snapshots lack fields that version 3 asks for.
    pub incomplete_snapshots: bool,
    /// The number by the header, more than there may be included.
    pub declared_snapshots: u32,
    /// Snapshots that can't be read are to be given up. These are the ones behind the readable part of their table, and
    /// those that aren't in `snapshots` any more.
    pub lost_snapshots: bool,
    /// Those in `snapshots` aren't the first ones of the table.
    pub scattered_snapshots: bool,
    /// Entries of snapshots to be given up whose L1 tables would be in the file if it grew.
    pub lost_near_end: Vec<u64>,
    /// Snapshots whose L1 table can't be read, of those in `snapshots`.
    pub unread_snapshots: Vec<UnreadSnapshot>,
    /// Bitmaps can't be read, and all of them are to be given up.
    pub lost_bitmaps: bool,
    /// Bytes of the snapshot table.
    pub snapshot_table_len: u64,
    pub bitmaps: Vec<BitmapEntry>,
    /// The bitmaps extension is there, but a program that doesn't know bitmaps wrote to the image since.
    pub stale_bitmaps: bool,
    /// The L2 tables to read.
    pub tables: Vec<TableRef>,
    /// The refcount structure itself can't be used as it is.
    pub needs_rebuild: bool,
    /// The reasons for which nothing may be repaired.
    pub obstacles: Vec<String>,
    pub watch: ProgressFn<'a>,
    /// The undo log, if one is kept.
    pub journal: Option<&'a RepairLog>,
    /// Clusters that two structures of metadata claim, sorted.
    pub clashes: Vec<u64>,
    /// Something can't be read that may refer to clusters.
    pub hides_references: bool,
    /// Nothing is written behind the end: the container can't grow, or the file system is full.
    pub stays_inside: bool,
    /// Clusters within the file that this repair has taken.
    pub taken: BTreeSet<u64>,
    done: AtomicU64,
    total: AtomicU64,
}

impl<'a> CheckSession<'a> {
    /// Reads everything but L2 tables and refcount blocks, and notes the faults.
    pub async fn load(
        file: &'a File,
        options: &'a CheckOptions,
        watch: ProgressFn<'a>,
        journal: Option<&'a RepairLog>,
        ledger: &mut Ledger,
    ) -> Result<Self> {
        let (header, declared_snapshots) = read_header(file).await?;
        let geometry = header.geometry()?;
        let file_len = file.len();
        let context = ScanContext {
            geometry,
            version: header.version,
            data_file: header.has_data_file(),
            data_file_raw: header.is_data_file_raw(),
            file_len,
            first_pass: true,
        };
        let mut session = CheckSession {
            file,
            options,
            geometry,
            context,
            file_clusters: geometry.clusters(file_len),
            l1: Vec::new(),
            refcount_table: Vec::new(),
            snapshots: Vec::new(),
            incomplete_snapshots: false,
            declared_snapshots,
            lost_snapshots: false,
            scattered_snapshots: false,
            lost_near_end: Vec::new(),
            unread_snapshots: Vec::new(),
            lost_bitmaps: false,
            snapshot_table_len: 0,
            bitmaps: Vec::new(),
            stale_bitmaps: false,
            tables: Vec::new(),
            needs_rebuild: header.refcount_table_clusters == 0,
            obstacles: Vec::new(),
            watch,
            journal,
            clashes: Vec::new(),
            hides_references: false,
            stays_inside: file.is_device(),
            taken: BTreeSet::new(),
            done: AtomicU64::new(0),
            total: AtomicU64::new(0),
            header,
        };
        session.note_unknown_features();
        ledger.counters.total_clusters = geometry.clusters(session.header.size);
        session.load_refcount_table(ledger).await?;
        let mut refs = TableRefs::default();
        session.load_active_l1(&mut refs, ledger).await?;
        session.load_snapshots(&mut refs, ledger).await?;
        session.tables = refs.finish();
        session.load_bitmaps(ledger).await?;
        Ok(session)
    }

    /// Features that may own clusters which the check can't count.
    fn note_unknown_features(&mut self) {
        let unknown = self.header.autoclear_features & !features::AUTOCLEAR_KNOWN;
        if unknown != 0 {
            self.obstacles.push(format!("unknown autoclear features {unknown:#x} may own clusters"));
        }
        for extension in &self.header.extensions {
            let kind = extension.kind();
            if matches!(extension, Extension::Unknown { .. }) && kind != extension_type::PADDING {
                self.obstacles.push(format!("the unknown header extension {kind:#010x} may own clusters"));
            }
        }
    }

    /// Starts to count work anew.
    pub fn start_work(&self, total: u64) {
        self.done.store(0, Relaxed);
        self.total.store(total.max(1), Relaxed);
    }

    /// Counts work as done; an error at the user's wish to stop.
    pub fn advance(&self, work: u64) -> Result<()> {
        let done = self.done.fetch_add(work, Relaxed).saturating_add(work);
        let total = self.total.load(Relaxed);
        if (self.watch)(done.min(total), total) { Ok(()) } else { Err(Error::new(ErrorKind::Cancelled, "cancelled")) }
    }

    /// Reads `len` bytes; zeroes behind the end of the file.
    pub async fn read(&self, offset: u64, len: usize) -> Result<IoBuf> {
        if self.journal.is_some_and(|journal| journal.overlaps(offset, len)) {
            self.carry_out_pending().await?;
        }
        let (result, buf) = self.file.read_at(IoBuf::try_zeroed(len)?, offset).await;
        result.map_err(|error| error.offset(offset))?;
        Ok(buf)
    }

    /// Writes `bytes`.
    pub async fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.write_buf(offset, IoBuf::copy_from(bytes)).await
    }

    /// Writes a buffer. With an undo log it waits until [`CheckSession::settle`], and only [`CheckSession::read`] sees
    /// the change until then.
    pub async fn write_buf(&self, offset: u64, buf: IoBuf) -> Result<()> {
        let Some(journal) = self.journal else { return self.write_now(offset, buf).await };
        if journal.overlaps(offset, buf.len()) {
            self.carry_out_pending().await?;
        }
        if journal.add(offset, buf) { self.carry_out_pending().await } else { Ok(()) }
    }

    async fn write_now(&self, offset: u64, buf: IoBuf) -> Result<()> {
        let (result, _) = self.file.write_at(buf, offset).await;
        result.map_err(|error| error.offset(offset))
    }

    /// Carries out the writes that wait for the undo log, durably: later ones may touch the same places.
    pub async fn carry_out_pending(&self) -> Result<()> {
        let Some(journal) = self.journal else { return Ok(()) };
        let writes = journal.release(self.file).await?;
        if writes.is_empty() {
            return Ok(());
        }
        for (offset, buf) in writes {
            self.write_now(offset, buf).await?;
        }
        self.file.sync().await
    }

    /// Everything written so far is durable afterwards.
    pub async fn barrier(&self) -> Result<()> {
        self.carry_out_pending().await?;
        self.file.sync().await
    }

    /// Part of a region that lies in the file, in bytes; a finding when it ends too far out.
    pub(super) fn within(&self, structure: CheckedStructure, offset: u64, len: u64, ledger: &mut Ledger) -> u64 {
        if len == 0 {
            return 0;
        }
        if self.context.is_past_end(offset, len) {
            ledger.add(Finding::new(FindingKind::PastEnd { structure, offset, len }));
            return 0;
        }
        len
    }

    /// Reads a table of 8-byte numbers piece by piece.
    pub async fn read_numbers(
        &self,
        offset: u64,
        count: u64,
        mut each: impl FnMut(u64, &[u64]) -> Result<()>,
    ) -> Result<()> {
        let mut numbers = vec_for(count.min(PIECE_BYTES as u64 / 8) as usize)?;
        let mut at = 0;
        while at < count {
            let piece = (count - at).min(PIECE_BYTES as u64 / 8);
            let buf = self.read(offset + at * 8, piece as usize * 8).await?;
            numbers.clear();
            numbers.extend(buf.as_chunks::<8>().0.iter().map(|word| u64::from_be_bytes(*word)));
            each(at, &numbers)?;
            at += piece;
            // Thousands of snapshots and bitmaps may have large tables.
            self.advance(0)?;
        }
        Ok(())
    }

    async fn load_refcount_table(&mut self, ledger: &mut Ledger) -> Result<()> {
        let offset = self.header.refcount_table_offset;
        let len = u64::from(self.header.refcount_table_clusters) << self.geometry.cluster_bits();
        let len = self.within(CheckedStructure::RefcountTable, offset, len, ledger);
        self.needs_rebuild |= len == 0;
        let count = len / 8;
        let mut table = vec_for(usize::try_from(count).unwrap_or(usize::MAX))?;
        self.read_numbers(offset, count, |_, piece| {
            table.extend_from_slice(piece);
            Ok(())
        })
        .await?;
        for (index, raw) in table.iter().enumerate().filter(|(_, raw)| **raw != 0) {
            self.check_refcount_entry(index as u64, *raw, offset + index as u64 * 8, ledger);
        }
        while table.last() == Some(&0) {
            table.pop();
        }
        self.refcount_table = table;
        self.find_shared_blocks(ledger)
    }

    fn check_refcount_entry(&mut self, index: u64, raw: u64, at: u64, ledger: &mut Ledger) {
        let entry = RefcountTableEntry(raw);
        let cluster_size = self.geometry.cluster_size();
        let kind = if self.geometry.in_cluster(entry.offset().0) != 0 {
            FindingKind::RefcountBlockUnaligned { index, entry: raw }
        } else if entry.reserved_bits() != 0 {
            FindingKind::RefcountTableReserved { index, entry: raw }
        } else if self.context.is_past_end(entry.offset().0, cluster_size) {
            FindingKind::RefcountBlockPastEnd { index, entry: raw }
        } else {
            return;
        };
        self.needs_rebuild = true;
        ledger.add(Finding::at(kind, at, None));
    }

    fn find_shared_blocks(&mut self, ledger: &mut Ledger) -> Result<()> {
        let mut blocks: Vec<(u64, u64)> = vec_for(self.refcount_table.len())?;
        blocks.extend(
            (0..self.refcount_table.len() as u64)
                .filter_map(|index| self.refcount_block(index).map(|offset| (offset, index))),
        );
        blocks.sort_unstable();
        let mut users = 1;
        for pair in blocks.windows(2) {
            users = if pair[0].0 == pair[1].0 { users + 1 } else { 1 };
            if users > 1 {
                self.needs_rebuild = true;
                let kind = FindingKind::RefcountBlockShared { index: pair[1].1, references: users };
                ledger.add(Finding::at(kind, self.header.refcount_table_offset + pair[1].1 * 8, None));
            }
        }
        Ok(())
    }

    /// Host offset of a refcount block that can be read.
    pub fn refcount_block(&self, index: u64) -> Option<u64> {
        let raw = *self.refcount_table.get(usize::try_from(index).ok()?)?;
        let offset = RefcountTableEntry(raw).block(self.geometry).ok().flatten()?.0;
        (!self.context.is_past_end(offset, self.geometry.cluster_size())).then_some(offset)
    }

    async fn load_active_l1(&mut self, refs: &mut TableRefs, ledger: &mut Ledger) -> Result<()> {
        let offset = self.header.l1_table_offset;
        let len = self.within(CheckedStructure::ActiveL1, offset, u64::from(self.header.l1_size) * 8, ledger);
        let mut l1 = vec_for((len / 8) as usize)?;
        let context = self.context;
        self.read_numbers(offset, len / 8, |first, entries| {
            l1.extend_from_slice(entries);
            add_l1_entries(&context, entries, first, (offset, true), refs, ledger)
        })
        .await?;
        self.l1 = l1;
        Ok(())
    }

    async fn load_bitmaps(&mut self, ledger: &mut Ledger) -> Result<()> {
        let Some(extension) = self.header.bitmaps().cloned() else { return Ok(()) };
        // "If the bitmaps extension is present but this bit is unset, the bitmaps extension data must be considered
        // inconsistent": no program uses it, so its clusters are leaked.
        self.stale_bitmaps = self.header.autoclear_features & features::AUTOCLEAR_BITMAPS == 0;
        if self.stale_bitmaps {
            return Ok(());
        }
        let start = extension.directory_offset;
        let result = self.read_bitmap_directory(&extension).await;
        let entries = match result {
            Ok(entries) => entries,
            Err(error) if error.kind() == ErrorKind::InvalidImage => {
                self.unreadable(CheckedStructure::BitmapDirectory, start, &error, ledger);
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        for entry in entries {
            match entry.validate(self.header.size, self.header.cluster_bits) {
                Ok(()) => self.bitmaps.push(entry),
                Err(error) => self.unreadable(CheckedStructure::BitmapTable, entry.table_offset, &error, ledger),
            }
        }
        Ok(())
    }

    async fn read_bitmap_directory(
        &self,
        extension: &cowshed_layout::qcow2::BitmapsExtension,
    ) -> Result<Vec<BitmapEntry>> {
        let (start, len) = (extension.directory_offset, extension.directory_size);
        if len > limits::BITMAP_DIRECTORY_BYTES || self.context.is_past_end(start, len) {
            let message = format!("{len} bytes at {start:#x} are too many or behind the end of the file");
            return Err(Error::invalid_image("bitmap_directory_size", len, message));
        }
        let bytes = self.read(start, len as usize).await?;
        bitmap::parse_directory(&bytes, extension)
    }

    /// Snapshots and bitmaps that can't be read are given up, so that all the rest can be counted. This holds for a dry
    /// run too.
    pub(super) fn gives_up_owners(&self) -> bool {
        self.options.lossy && self.options.repair != Repair::Leaks
    }

    /// A structure that can't be counted: reported, and nothing is repaired unless it is one to give up.
    pub(super) fn unreadable(&mut self, structure: CheckedStructure, offset: u64, error: &Error, ledger: &mut Ledger) {
        let reason = error.message().to_owned();
        let is_bitmap = matches!(structure, CheckedStructure::BitmapDirectory | CheckedStructure::BitmapTable);
        let is_given_up = self.gives_up_owners() && (is_bitmap || structure == CheckedStructure::SnapshotTable);
        let hidden = ledger.hidden_references;
        if is_given_up {
            self.lost_bitmaps |= is_bitmap;
        } else {
            self.obstacles.push(format!("the {} at {offset:#x} can't be read: {reason}", structure.name()));
        }
        ledger.add(Finding::at(FindingKind::Unreadable { structure, offset, reason }, offset, None));
        if is_given_up {
            // Then the clusters that it named have no owner.
            ledger.hidden_references = hidden;
        }
    }
}

/// A snapshot whose L1 table can't be read.
pub(super) struct UnreadSnapshot {
    /// Its index in the session's list.
    pub index: usize,
    /// Where its L1 table is, and how long, in bytes; 0 where that can't be.
    pub offset: u64,
    pub len: u64,
    /// The reason for that.
    pub reason: String,
}

/// The header, and the number of snapshots that it declares.
async fn read_header(file: &File) -> Result<(Header, u32)> {
    let bytes = read_header_bytes(file).await?;
    let header = Header::parse_to_check(&bytes)?;
    let place = offset::NB_SNAPSHOTS as usize;
    let declared = bytes.get(place..place + 4).and_then(|field| field.try_into().ok());
    Ok((header, declared.map_or(0, u32::from_be_bytes)))
}

/// Adds the entries of an L1 table, from the one with index `first` on. `table`: where it starts, and whether it is the
/// active one.
pub(super) fn add_l1_entries(
    context: &ScanContext,
    entries: &[u64],
    first: u64,
    (start, active): (u64, bool),
    refs: &mut TableRefs,
    ledger: &mut Ledger,
) -> Result<()> {
    let cluster_size = context.geometry.cluster_size();
    for (index, raw) in entries.iter().enumerate().filter(|(_, raw)| **raw != 0) {
        let l1_index = first + index as u64;
        let at = |kind| Finding::at(kind, start + l1_index * 8, None);
        let entry = L1Entry(*raw);
        if entry.reserved_bits() != 0 {
            ledger.add(at(FindingKind::ReservedL1 { entry: *raw }));
        }
        let offset = entry.offset().0;
        if offset == 0 {
            if entry.is_copied() {
                ledger.add(at(FindingKind::FlagWithoutTable { entry: *raw }));
            }
            continue;
        }
        if context.geometry.in_cluster(offset) != 0 {
            ledger.add(at(FindingKind::UnalignedL2 { offset }));
        } else if context.is_past_end(offset, cluster_size) {
            let kind = FindingKind::PastEnd { structure: CheckedStructure::L2Table, offset, len: cluster_size };
            ledger.add(at(kind));
        } else {
            let l1_index = if active { l1_index as u32 } else { INACTIVE };
            refs.add(offset, l1_index)?;
        }
    }
    Ok(())
}
