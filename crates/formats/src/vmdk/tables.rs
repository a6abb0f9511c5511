// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The grain tables of a disk in memory. All its extents share one bound: a descriptor may have thousands of lines.

use cowshed_graph::node::Node;
use cowshed_storage::IoBuf;
use cowshed_types::memory::try_collect;
use cowshed_types::{Error, Result};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Tables of a disk in memory, in bytes: those of 64 GiB with the usual sizes.
const KEPT_BYTES: usize = 4 << 20;

/// The bytes of a table.
pub(super) type TableBytes = Arc<Vec<u8>>;

/// Where a table is: the file, as an index into those of the disk, and the byte that it begins at. Entries that name one
/// table share it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct TablePlace {
    pub file: usize,
    pub offset: u64,
}

/// Grain tables by their places. Where there is no more room, the half that was used longest ago leaves.
#[derive(Default)]
pub(super) struct GrainTables(Mutex<TablesInside>);

#[derive(Default)]
struct TablesInside {
    clock: u64,
    /// Counts the changes of tables on disk.
    changes: u64,
    bytes: usize,
    kept: HashMap<TablePlace, KeptTable>,
}

struct KeptTable {
    used: u64,
    table: TableBytes,
}

impl GrainTables {
    /// The table at a place, from memory or from its file. All of it must be in the file.
    pub(super) async fn read(&self, files: &[Arc<Node>], place: TablePlace, len: usize) -> Result<TableBytes> {
        if let Some(table) = self.find(place) {
            return Ok(table);
        }
        let changes = self.lock().changes;
        let file = files.get(place.file).ok_or_else(|| Error::internal("an extent has no file"))?;
        let (result, bytes) = file.read_boxed(place.offset, IoBuf::try_zeroed(len)?).await;
        result?;
        let table = Arc::new(try_collect(bytes.iter().copied())?);
        self.keep(place, &table, changes);
        Ok(table)
    }

    pub(super) fn find(&self, place: TablePlace) -> Option<TableBytes> {
        let inside = &mut *self.lock();
        inside.clock += 1;
        let kept = inside.kept.get_mut(&place)?;
        kept.used = inside.clock;
        Some(Arc::clone(&kept.table))
    }

    fn lock(&self) -> MutexGuard<'_, TablesInside> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets those of a file: they have changed on disk.
    pub(super) fn forget(&self, file: usize) {
        let inside = &mut *self.lock();
        inside.changes += 1;
        inside.retain(|place, _| place.file != file);
    }

    /// Keeps a table that was read, unless tables have changed since they were counted as `changes`.
    fn keep(&self, place: TablePlace, table: &TableBytes, changes: u64) {
        let inside = &mut *self.lock();
        if inside.changes != changes || table.len() > KEPT_BYTES {
            return;
        }
        if inside.bytes + table.len() > KEPT_BYTES {
            let mut used: Vec<u64> = inside.kept.values().map(|kept| kept.used).collect();
            let middle = used.len() / 2;
            if middle < used.len() {
                let median = *used.select_nth_unstable(middle).1;
                inside.retain(|_, kept| kept.used > median);
            }
        }
        let kept = KeptTable { used: inside.clock, table: Arc::clone(table) };
        inside.bytes += table.len();
        if let Some(before) = inside.kept.insert(place, kept) {
            inside.bytes -= before.table.len();
        }
    }
}

impl TablesInside {
    fn retain(&mut self, keep: impl Fn(&TablePlace, &KeptTable) -> bool) {
        self.kept.retain(|place, kept| keep(place, kept));
        self.bytes = self.kept.values().map(|kept| kept.table.len()).sum();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_of_all_extents_share_one_bound() {
        let tables = GrainTables::default();
        let table = Arc::new(vec![0; 32 << 10]);
        for offset in 0..1000 {
            for file in 0..4 {
                tables.keep(TablePlace { file, offset }, &table, 0);
                assert!(tables.find(TablePlace { file, offset }).is_some());
                assert!(tables.lock().bytes <= KEPT_BYTES);
            }
        }
        let inside = tables.lock();
        assert_eq!(inside.bytes, inside.kept.len() * table.len());
        assert!(inside.kept.len() > 32);
    }

    #[test]
    fn the_tables_of_a_changed_file_are_forgotten() {
        let tables = GrainTables::default();
        let table = Arc::new(vec![0; 2048]);
        let places = [0, 1].map(|file| TablePlace { file, offset: 512 });
        for place in places {
            tables.keep(place, &table, 0);
        }
        tables.forget(0);
        assert!(tables.find(places[0]).is_none() && tables.find(places[1]).is_some());
        // A read that began before the change may have old entries.
        tables.keep(places[0], &table, 0);
        assert!(tables.find(places[0]).is_none());
    }
}
