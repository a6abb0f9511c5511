// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The snapshot table, and its repair where entries lack fields or have too much.

use super::relocate::Copy;
use super::session::{Session, add_l1_entries};
use cowshed_block::{Error, ErrorKind, Result};
use cowshed_layout::qcow2::snapshot::{self, Salvaged};
use cowshed_layout::qcow2::{L1Entry, Snapshot, limits, offset};
use cowshed_qcow2::check::{Finding, FindingKind, Ledger, Structure, TableRefs, normal_l1_entry};

/// What a snapshot points to is judged by the rules of version 2: the fields that version 3 asks for besides are
/// missing, not wrong, and what the snapshot owns is known without them.
pub(super) const SNAPSHOT_RULES_VERSION: u32 = 2;
/// "Version 3 images must include extra data at least up to byte 55": size of the VM state and of the disk.
const EXTRA_BYTES_MIN: usize = 16;
/// L1 entries of a snapshot are edited so many bytes at a time.
const L1_PIECE_BYTES: usize = 1 << 20;

impl Session<'_> {
    pub(super) async fn load_snapshots(&mut self, refs: &mut TableRefs, ledger: &mut Ledger) -> Result<()> {
        let count = self.header.nb_snapshots;
        if count == 0 {
            return Ok(());
        }
        let start = self.header.snapshots_offset;
        let (table, error) = self.read_snapshot_table(start, count).await?;
        if let Some(error) = error {
            self.unreadable(Structure::SnapshotTable, start, &error, ledger);
            if !self.gives_up_owners() {
                return Ok(());
            }
            self.lost_snapshots = true;
        }
        self.snapshot_table_len = table.len as u64;
        let context = self.context;
        for ((snapshot, entry), index) in table.snapshots.iter().zip(&table.starts).zip(0..) {
            let (offset, entry_offset) = (snapshot.l1_table_offset, start.saturating_add(*entry as u64));
            if table.trimmed.contains(&index) {
                self.incomplete_snapshots = true;
                ledger.add(Finding::at(FindingKind::SnapshotOversized { index }, entry_offset, None));
            }
            if self.header.version >= 3 && snapshot.extra_data.len() < EXTRA_BYTES_MIN {
                self.incomplete_snapshots = true;
                ledger.add(Finding::at(FindingKind::SnapshotIncomplete { index }, entry_offset, None));
            }
            if let Err(error) = snapshot.validate(SNAPSHOT_RULES_VERSION, self.header.cluster_bits) {
                self.unreadable(Structure::SnapshotL1, offset, &error, ledger);
                continue;
            }
            let len = self.within(Structure::SnapshotL1, offset, u64::from(snapshot.l1_size) * 8, ledger);
            self.read_numbers(offset, len / 8, |first, entries| {
                add_l1_entries(&context, entries, first, (offset, false), refs, ledger)
            })
            .await?;
        }
        self.snapshots = table.snapshots;
        Ok(())
    }

    /// Gives entries of the snapshots' L1 tables a valid form, with a barrier.
    pub(super) async fn normalise_snapshot_l1s(&self) -> Result<bool> {
        self.edit_snapshot_l1s(normal_l1_entry).await
    }

    /// Replaces entries of the snapshots' L1 tables, with a barrier when it wrote anything.
    pub(super) async fn edit_snapshot_l1s(&self, edit: impl Fn(L1Entry) -> L1Entry) -> Result<bool> {
        let mut changed = false;
        for snapshot in &self.snapshots {
            let (start, len) = (snapshot.l1_table_offset, u64::from(snapshot.l1_size) * 8);
            let valid = snapshot.validate(SNAPSHOT_RULES_VERSION, self.header.cluster_bits).is_ok();
            if !valid || self.context.is_past_end(start, len) {
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
            // The file's last cluster may be incomplete: what isn't there reads as zeroes.
            let end = self.file_clusters << self.geometry.cluster_bits();
            let available = end.saturating_sub(start).min(limits::SNAPSHOT_TABLE_BYTES);
            let have = (len as u64).min(available) as usize;
            let bytes = self.read(start, have).await?;
            let table = snapshot::salvage_table(&bytes, count);
            match table.need {
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

    /// Writes the table with all its fields behind the end of the file, with a barrier. Nothing refers to it yet.
    pub(super) async fn copy_snapshot_table(&mut self) -> Result<Vec<Copy>> {
        if !self.incomplete_snapshots {
            return Ok(Vec::new());
        }
        let mut table = Vec::new();
        for snapshot in &self.snapshots {
            table.extend(completed(snapshot, self.header.size).encode()?);
        }
        if table.len() as u64 > limits::SNAPSHOT_TABLE_BYTES {
            return Err(Error::new(ErrorKind::Limit, "the snapshot table would become too large").value(table.len()));
        }
        let first = self.file_clusters + 1;
        let clusters = self.geometry.clusters(table.len() as u64);
        let start = first << self.geometry.cluster_bits();
        // Whole clusters, so that the file ends with one.
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

/// The snapshot with the size of its VM state and of the disk, taken to be that of today.
fn completed(snapshot: &Snapshot, disk_size: u64) -> Snapshot {
    let mut snapshot = snapshot.clone();
    let have = snapshot.extra_data.len();
    if have < EXTRA_BYTES_MIN {
        let fields = [u64::from(snapshot.vm_state_size_32).to_be_bytes(), disk_size.to_be_bytes()].concat();
        // A field that is there only in part has no value.
        let whole = have / 8 * 8;
        snapshot.extra_data.truncate(whole);
        snapshot.extra_data.extend_from_slice(&fields[whole..]);
    }
    snapshot
}
