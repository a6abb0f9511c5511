// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The snapshot table, and its repair where entries lack fields or have too much.

use super::relocate::Copy;
use super::session::{CheckSession, UnreadSnapshot, add_l1_entries};
use cowshed_layout::qcow2::snapshot::{self, Salvaged};
use cowshed_layout::qcow2::{L1Entry, Snapshot, limits, offset};
use cowshed_qcow2::check::{CheckedStructure, Finding, FindingKind, Ledger, TableRefs, normal_l1_entry};
use cowshed_types::memory::expect_memory;
use cowshed_types::{Error, ErrorKind, Result};

/// The rules of version 2 hold for the structures of a snapshot. The further fields of version 3 are missing, not
/// wrong, and the snapshot's clusters are known without them.
pub(super) const SNAPSHOT_RULES_VERSION: u32 = 2;
/// "Version 3 images must include extra data at least up to byte 55": size of the VM state and of the disk.
const EXTRA_BYTES_MIN: usize = 16;
/// The most bytes that a repair may write behind the end of the file: a refcount structure, and copies of a few
/// clusters.
const GROWTH_BYTES_MAX: u64 = 4 << 30;
/// L1 entries of a snapshot are edited this many bytes at a time.
const L1_PIECE_BYTES: usize = 1 << 20;

impl CheckSession<'_> {
    pub(super) async fn load_snapshots(&mut self, refs: &mut TableRefs, ledger: &mut Ledger) -> Result<()> {
        let count = self.header.nb_snapshots;
        if count == 0 {
            return Ok(());
        }
        let start = self.header.snapshots_offset;
        let (mut table, error) = self.read_snapshot_table(start, count).await?;
        if let Some(error) = error {
            self.unreadable(CheckedStructure::SnapshotTable, start, &error, ledger);
            if !self.gives_up_owners() {
                return Ok(());
            }
            self.lost_snapshots = true;
            // Where the table doesn't end, zeroes behind it aren't snapshots.
            let readable = table.snapshots.iter().position(is_blank).unwrap_or(table.snapshots.len());
            table.snapshots.truncate(readable);
            table.len = table.starts.get(readable).copied().unwrap_or(table.len);
        }
        self.snapshot_table_len = table.len as u64;
        for ((snapshot, entry), index) in table.snapshots.into_iter().zip(table.starts).zip(0..) {
            let entry_offset = start.saturating_add(entry as u64);
            if table.trimmed.contains(&index) {
                self.incomplete_snapshots = true;
                ledger.add(Finding::at(FindingKind::SnapshotOversized { index }, entry_offset, None));
            }
            if self.header.version >= 3 && snapshot.extra_data.len() < EXTRA_BYTES_MIN {
                self.incomplete_snapshots = true;
                ledger.add(Finding::at(FindingKind::SnapshotIncomplete { index }, entry_offset, None));
            }
            if self.gives_up_owners() && is_emptied(&snapshot) {
                self.lost_snapshots = true;
                continue;
            }
            let hidden = ledger.hidden_references;
            let Some(unread) = self.load_snapshot_l1(&snapshot, refs, ledger).await? else {
                self.scattered_snapshots |= self.snapshots.len() < index as usize;
                self.snapshots.push(snapshot);
                continue;
            };
            if self.gives_up_owners() {
                // Then the clusters that it alone named have no owner.
                ledger.hidden_references = hidden;
                self.lost_snapshots = true;
                if self.is_near_the_end(&unread) {
                    self.lost_near_end.push(entry_offset);
                }
            } else {
                self.unread_snapshots.push(UnreadSnapshot { index: self.snapshots.len(), ..unread });
                self.snapshots.push(snapshot);
            }
        }
        Ok(())
    }

    /// Adds the references of a snapshot's L1 table. Returns the reason if it can't be read.
    async fn load_snapshot_l1(
        &self,
        snapshot: &Snapshot,
        refs: &mut TableRefs,
        ledger: &mut Ledger,
    ) -> Result<Option<UnreadSnapshot>> {
        let (offset, len) = (snapshot.l1_table_offset, u64::from(snapshot.l1_size) * 8);
        let unread = |len: u64, reason: &str| UnreadSnapshot { index: 0, offset, len, reason: reason.to_owned() };
        let unreadable = |error: &Error| {
            let reason = error.message().to_owned();
            let kind = FindingKind::Unreadable { structure: CheckedStructure::SnapshotL1, offset, reason };
            Finding::at(kind, offset, None)
        };
        if let Err(error) = snapshot.validate(SNAPSHOT_RULES_VERSION, self.header.cluster_bits) {
            ledger.add(unreadable(&error));
            return Ok(Some(unread(0, error.message())));
        }
        if self.within(CheckedStructure::SnapshotL1, offset, len, ledger) < len {
            return Ok(Some(unread(len, "it reaches past the end of the file")));
        }
        let context = self.context;
        let read = self.read_numbers(offset, len / 8, |first, entries| {
            add_l1_entries(&context, entries, first, (offset, false), refs, ledger)
        });
        match read.await {
            Err(error) if error.kind() == ErrorKind::Io => {
                ledger.add(unreadable(&error));
                Ok(Some(unread(len, error.message())))
            }
            result => result.map(|()| None),
        }
    }

    /// The reason for which metadata can't be written behind the end of the file: a snapshot may have its L1 table
    /// there.
    pub(super) fn growth_obstacle(&self) -> Option<&'static str> {
        let why = "what needs space behind the end of the file wasn't repaired: a snapshot's L1 table should be there";
        let is_in_the_way = |unread: &UnreadSnapshot| !self.file.is_device() && self.is_near_the_end(unread);
        self.unread_snapshots.iter().any(is_in_the_way).then_some(why)
    }

    fn is_near_the_end(&self, unread: &UnreadSnapshot) -> bool {
        let first = self.file_clusters << self.geometry.cluster_bits();
        unread.len != 0 && unread.offset + unread.len > first && unread.offset < first.saturating_add(GROWTH_BYTES_MAX)
    }

    /// Notes the snapshots that couldn't be read, and stay.
    pub(super) fn note_unread_snapshots(&self, notes: &mut Vec<String>) {
        for unread in &self.unread_snapshots {
            let Some(snapshot) = self.snapshots.get(unread.index) else { continue };
            let (id, name) = (String::from_utf8_lossy(&snapshot.id), String::from_utf8_lossy(&snapshot.name));
            let (offset, reason) = (unread.offset, &unread.reason);
            notes.push(format!("internal snapshot {id} ({name}) can't be read: L1 table at {offset:#x}: {reason}"));
        }
    }

    /// Gives entries of the snapshots' L1 tables a valid form, with a barrier.
    pub(super) async fn normalise_snapshot_l1s(&self) -> Result<bool> {
        self.edit_snapshot_l1s(normal_l1_entry).await
    }

    /// Replaces entries of the snapshots' L1 tables, with a barrier when it wrote anything.
    pub(super) async fn edit_snapshot_l1s(&self, edit: impl Fn(L1Entry) -> L1Entry) -> Result<bool> {
        let mut changed = false;
        for (index, snapshot) in self.snapshots.iter().enumerate() {
            let (start, len) = (snapshot.l1_table_offset, u64::from(snapshot.l1_size) * 8);
            if self.unread_snapshots.iter().any(|unread| unread.index == index) {
                continue;
            }
            // Piece by piece: thousands of snapshots may have millions of entries each.
            for piece in (start..start + len).step_by(L1_PIECE_BYTES) {
                let entries = (start + len - piece).min(L1_PIECE_BYTES as u64) / 8;
                changed |= self.edit_l1_piece(piece, entries, &edit).await?;
            }
        }
        if changed {
            self.barrier().await?;
        }
        Ok(changed)
    }

    async fn edit_l1_piece(&self, start: u64, entries: u64, edit: &impl Fn(L1Entry) -> L1Entry) -> Result<bool> {
        let mut edits = Vec::new();
        self.read_numbers(start, entries, |first, entries| {
            let places = entries.iter().zip((first..).map(|index| start + index * 8));
            let changed = places.map(|(raw, at)| (at, *raw, edit(L1Entry(*raw)).0));
            edits.extend(changed.filter(|(at, old, new)| old != new && !self.is_claimed_twice(*at)));
            Ok(())
        })
        .await?;
        for (at, _, new) in &edits {
            self.write(*at, &new.to_be_bytes()).await?;
        }
        Ok(!edits.is_empty())
    }

    /// The table as far as it can be read, and why not further.
    async fn read_snapshot_table(&self, start: u64, count: u32) -> Result<(Salvaged, Option<Error>)> {
        let mut len = 64 << 10;
        loop {
            // The file's last cluster may be incomplete: missing bytes read as zeroes.
            let end = self.file_clusters << self.geometry.cluster_bits();
            let available = end.saturating_sub(start).min(limits::SNAPSHOT_TABLE_BYTES);
            let have = (len as u64).min(available) as usize;
            let bytes = self.read(start, have).await?;
            let table = snapshot::salvage_table(&bytes, count);
            match table.need {
                None if self.declared_snapshots > count => {
                    let message = format!("more than {} internal snapshots", limits::SNAPSHOTS);
                    let error = Error::invalid_image("nb_snapshots", self.declared_snapshots, message);
                    return Ok((table, Some(error)));
                }
                None => return Ok((table, None)),
                Some(need) if have as u64 == available => {
                    let message = format!("the table needs {need} bytes, the file has {available} from there on");
                    let error = Error::invalid_image("snapshots_offset", format!("{start:#x}"), message);
                    return Ok((table, Some(error)));
                }
                Some(need) => len = need.max(have.saturating_mul(2)),
            }
        }
    }

    /// As [`CheckSession::write_snapshot_table`], where entries lack fields or have too much.
    pub(super) async fn copy_snapshot_table(&mut self, notes: &mut Vec<String>) -> Result<Vec<Copy>> {
        match self.growth_obstacle() {
            _ if !self.incomplete_snapshots => Ok(Vec::new()),
            Some(why) => {
                notes.push(why.to_owned());
                Ok(Vec::new())
            }
            None => self.write_snapshot_table().await,
        }
    }

    /// Writes the table with all its fields to free clusters, with a barrier. Nothing refers to it yet.
    pub(super) async fn write_snapshot_table(&mut self) -> Result<Vec<Copy>> {
        let mut table = Vec::new();
        for snapshot in &self.snapshots {
            table.extend(completed(snapshot, self.header.size).encode()?);
        }
        if table.len() as u64 > limits::SNAPSHOT_TABLE_BYTES {
            return Err(Error::new(ErrorKind::Limit, "the snapshot table would become too large").value(table.len()));
        }
        let clusters = self.geometry.clusters(table.len() as u64);
        let first = self.take_room(clusters.max(1), true).await?.first().copied().unwrap_or_default();
        let start = first << self.geometry.cluster_bits();
        // Whole clusters, so that the file ends with one.
        expect_memory((clusters << self.geometry.cluster_bits()) as usize)?;
        table.resize((clusters << self.geometry.cluster_bits()) as usize, 0);
        self.write(start, &table).await?;
        self.barrier().await?;
        self.file_grew();
        self.needs_rebuild = true;
        let pointer = |nth: u64| (nth == 0).then_some((offset::SNAPSHOTS_OFFSET, start));
        Ok((0..clusters).map(|nth| Copy { cluster: first + nth, weight: 1, pointer: pointer(nth) }).collect())
    }

    /// The header points to the new table by now.
    pub(super) fn switched_snapshot_table(&mut self, start: u64) {
        self.header.snapshots_offset = start;
        self.snapshot_table_len =
            self.snapshots.iter().map(|snapshot| completed(snapshot, self.header.size).encoded_len() as u64).sum();
        self.incomplete_snapshots = false;
    }
}

/// True for a snapshot that an interrupted repair was giving up: it has a disk without an L1 table.
fn is_emptied(snapshot: &Snapshot) -> bool {
    snapshot.l1_size == 0 && snapshot.disk_size_bytes().is_some_and(|bytes| bytes != 0)
}

/// An entry of zeroes.
fn is_blank(snapshot: &Snapshot) -> bool {
    snapshot.l1_table_offset == 0 && snapshot.l1_size == 0 && snapshot.id.is_empty() && snapshot.name.is_empty()
}

/// Bytes of the fields that a new snapshot has.
const EXTRA_BYTES: usize = 24;

/// The snapshot with the size of its VM state and of the disk, taken to be that of today, and QEMU's third field.
fn completed(snapshot: &Snapshot, disk_size: u64) -> Snapshot {
    let mut snapshot = snapshot.clone();
    let have = snapshot.extra_data.len();
    if have < EXTRA_BYTES {
        // There was no count of instructions: all ones.
        let fields = [u64::from(snapshot.vm_state_size_32), disk_size, u64::MAX].map(u64::to_be_bytes).concat();
        // A field that is there only in part has no value.
        let whole = have / 8 * 8;
        snapshot.extra_data.truncate(whole);
        snapshot.extra_data.extend_from_slice(&fields[whole..]);
    }
    snapshot
}
