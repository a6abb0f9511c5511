// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The internal snapshots of a damaged image: its table is read entry by entry, as far as that goes.

use crate::Overrides;
use crate::damaged_image::{DamagedImage, salvage};
use cowshed_layout::qcow2::{Parsed, Snapshot, SnapshotName, limits};
use cowshed_types::{Error, ErrorKind, Result};

/// Bytes of the table that are read at first.
const FIRST_BYTES: u64 = 64 << 10;

/// The snapshot table, as far as it could be read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SnapshotList {
    /// The entries up to the first damaged one.
    pub snapshots: Vec<Snapshot>,
    /// The reason for which there are not more of them, where there should be.
    pub fault: Option<String>,
}

impl DamagedImage {
    /// Reads the snapshot table.
    pub async fn snapshots(&self) -> SnapshotList {
        let (count, start) = self.fields.snapshots;
        let mut list = SnapshotList::default();
        if count == 0 {
            return list;
        }
        let available = self.shape.file_len.saturating_sub(start).min(limits::SNAPSHOT_TABLE_BYTES);
        if start == 0 || self.shape.geometry.in_cluster(start) != 0 || available == 0 || count > limits::SNAPSHOTS {
            list.fault = Some(format!("there can't be a table of {count} snapshots at {start:#x}"));
            return list;
        }
        let (mut bytes, mut bad) = salvage(&self.image, start, available.min(FIRST_BYTES) as usize).await;
        let mut at = 0usize;
        while list.snapshots.len() < count as usize {
            let number = list.snapshots.len();
            let fault = match Snapshot::parse(bytes.get(at..).unwrap_or_default()) {
                Ok(Parsed::Complete { value, len }) => {
                    let end = (at + len) as u64;
                    match bad.iter().find(|(range, _)| range.start < end && (at as u64) < range.end) {
                        None => {
                            list.snapshots.push(value);
                            at += len;
                            continue;
                        }
                        Some((_, loss)) => loss.detail().unwrap_or(loss.name()).to_owned(),
                    }
                }
                Ok(Parsed::Incomplete { .. }) if (bytes.len() as u64) < available => {
                    let len = (bytes.len() as u64 * 2).min(available);
                    (bytes, bad) = salvage(&self.image, start, len as usize).await;
                    continue;
                }
                Ok(Parsed::Incomplete { .. }) => "the file ends there".to_owned(),
                Err(error) => error.message().to_owned(),
            };
            list.fault = Some(format!("entry {number} of {count} in the snapshot table can't be read: {fault}"));
            break;
        }
        list
    }

    /// From now on reads the disk as the snapshot has it. `overrides` go before the values of its entry.
    ///
    /// # Errors
    /// The readable part of the table has no such snapshot.
    pub async fn enter_snapshot(&mut self, wanted: &SnapshotName, overrides: &Overrides) -> Result<()> {
        let SnapshotList { snapshots, fault } = self.snapshots().await;
        let Some(index) = wanted.find(&snapshots) else {
            let message = match fault {
                Some(fault) => format!("no such snapshot; {fault}"),
                None => "no such snapshot".to_owned(),
            };
            return Err(Error::new(ErrorKind::NotFound, message).value(&wanted.name).file(self.image.filename()));
        };
        let snapshot = &snapshots[index];
        if let (None, Some(size)) = (overrides.size_bytes, snapshot.disk_size_bytes()) {
            let geometry = self.shape.geometry;
            match size <= i64::MAX as u64 && geometry.l1_entries_needed(size) * 8 <= limits::L1_BYTES {
                true => self.fields.size = size,
                false => self.fields.notes.push(format!(
                    "the snapshot's disk size {size} is damaged: that of the disk is taken, {}",
                    self.fields.size
                )),
            }
        }
        self.active_l1 = Some((self.fields.l1_offset, self.l1.len() as u64));
        let start = snapshot.l1_table_offset;
        let possible = start != 0 && self.shape.geometry.in_cluster(start) == 0 && start < self.shape.file_len;
        self.fields.l1_offset = possible.then_some(start);
        if !possible && snapshot.l1_size != 0 {
            self.fields
                .notes
                .push(format!("there can't be an L1 table of the snapshot at {start:#x}: all of it is lost"));
        }
        let entries = u64::from(snapshot.l1_size).min(self.slots());
        self.load_l1(entries).await?;
        if possible || snapshot.l1_size == 0 {
            // Clusters that a shorter table doesn't map were never written.
            self.l1.resize(self.slots() as usize, 0);
        }
        Ok(())
    }
}
