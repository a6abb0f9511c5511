// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The L2 tables, each once, with the number of L1 entries that point to it.

use cowshed_types::memory::no_memory;
use cowshed_types::{Error, ErrorKind, Result};

/// [`TableRef::l1_index`] of a table that only snapshots use.
pub const INACTIVE: u32 = u32::MAX;

/// Distinct L2 tables before a check gives up, 16 bytes each: those of the largest allowed L1 table, and as many again
/// for snapshots.
const TABLES_MAX: usize = 8 << 20;

/// An L2 table to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableRef {
    /// Host offset in bytes, aligned to a cluster.
    pub offset: u64,
    /// Its index in the active L1 table, or [`INACTIVE`].
    pub l1_index: u32,
    /// References that each entry of the table stands for: the number of L1 entries that lead here. 0 for the second
    /// and later entries of the active L1 table with the same offset.
    pub weight: u32,
}

/// Collects the entries of L1 tables. A table that many snapshots share is read once instead of once for each. That
/// keeps a check of an image with many snapshots short.
#[derive(Debug, Default)]
pub struct TableRefs {
    tables: Vec<TableRef>,
    merged: usize,
}

impl TableRefs {
    /// Adds an entry of the active L1 table, or of a snapshot's ([`INACTIVE`]).
    pub fn add(&mut self, offset: u64, l1_index: u32) -> Result<()> {
        if self.tables.len() >= TABLES_MAX.max(self.merged * 2) {
            self.merge();
        }
        if self.tables.len() >= TABLES_MAX {
            return Err(Error::new(ErrorKind::Limit, "too many L2 tables to check").value(self.tables.len()));
        }
        self.tables.try_reserve(1).map_err(|_| no_memory(2 * size_of_val(self.tables.as_slice())))?;
        self.tables.push(TableRef { offset, l1_index, weight: 1 });
        Ok(())
    }

    /// Joins the entries that point to the same table.
    fn merge(&mut self) {
        self.tables.sort_unstable_by_key(|table| (table.offset, table.l1_index));
        let mut kept: usize = 0;
        let mut head: usize = 0;
        for index in 0..self.tables.len() {
            let table = self.tables[index];
            if kept > 0 && self.tables[head].offset == table.offset {
                self.tables[head].weight = self.tables[head].weight.saturating_add(table.weight);
                if table.l1_index == INACTIVE {
                    continue;
                }
                self.tables[kept] = TableRef { weight: 0, ..table };
            } else {
                head = kept;
                self.tables[kept] = table;
            }
            kept += 1;
        }
        self.tables.truncate(kept);
        self.merged = kept;
    }

    /// All tables: those of the active L1 table in its order, then the rest by offset.
    pub fn finish(mut self) -> Vec<TableRef> {
        self.merge();
        self.tables.sort_unstable_by_key(|table| (table.l1_index, table.offset));
        self.tables.shrink_to_fit();
        self.tables
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_tables_are_listed_once() {
        let mut refs = TableRefs::default();
        for (offset, index) in [(0x5000, 0), (0x4000, 1), (0x5000, 3)] {
            refs.add(offset, index).unwrap();
        }
        refs.merge();
        for offset in [0x5000, 0x6000, 0x6000] {
            refs.add(offset, INACTIVE).unwrap();
        }
        let table = |offset, l1_index, weight| TableRef { offset, l1_index, weight };
        assert_eq!(
            refs.finish(),
            [table(0x5000, 0, 3), table(0x4000, 1, 1), table(0x5000, 3, 0), table(0x6000, INACTIVE, 2)]
        );
    }
}
