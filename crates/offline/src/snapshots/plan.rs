// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The changes of an operation: the trees that gain or lose a reference, and the effect on counts and COPIED flags.

use super::Image;
use super::free::read_block;
use super::tree;
use crate::ProgressFn;
use cowshed_layout::qcow2::{Geometry, refcount};
use cowshed_types::memory::{expect_memory, no_memory, vec_for};
use cowshed_types::{Errno, Error, ErrorKind, Result};
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

/// The trees of an operation, as L1 tables.
#[derive(Clone)]
pub(super) struct Change {
    /// Everything behind this one gets one more reference.
    pub raised: Option<Vec<u64>>,
    /// Everything behind this one loses one.
    pub lowered: Option<Vec<u64>>,
    /// The active table afterwards; its flags are still to be set.
    pub active: Vec<u64>,
    /// The table of the new snapshot, the last one in the list.
    pub taken: Option<Vec<u64>>,
    /// Clusters that had no other reference than those of `lowered` have lost their count already, and others have theirs.
    pub is_begun: bool,
}

/// By how much the counts of a window of host clusters change.
pub(super) struct Deltas {
    pub clusters: Range<u64>,
    cells: Vec<i32>,
}

impl Deltas {
    pub fn get(&self, cluster: u64) -> i64 {
        match self.clusters.contains(&cluster) {
            true => i64::from(self.cells[(cluster - self.clusters.start) as usize]),
            false => 0,
        }
    }

    fn add(&mut self, clusters: Range<u64>, by: i32) {
        for cluster in clusters.start.max(self.clusters.start)..clusters.end.min(self.clusters.end) {
            let cell = &mut self.cells[(cluster - self.clusters.start) as usize];
            *cell = cell.saturating_add(by);
        }
    }

    /// Leaves out entries without a count in a block, of which `first` is the first cluster.
    fn clear_uncounted(&mut self, first: u64, stored: Option<&[u8]>, geometry: Geometry) {
        for entry in 0..geometry.refcount_block_entries() {
            let count = stored.map_or(0, |block| refcount::get(block, geometry.refcount_order(), entry as usize));
            let cluster = first + entry;
            if count == 0 && self.clusters.contains(&cluster) {
                self.cells[(cluster - self.clusters.start) as usize] = 0;
            }
        }
    }
}

/// A set of numbers, with memory for the neighbourhoods of its members alone: a header may promise a disk of any size.
#[derive(Default)]
pub(super) struct SparseBitmap(HashMap<u64, Vec<u64>>);

impl SparseBitmap {
    const WORDS: usize = 128;
    const PIECE: u64 = 64 * SparseBitmap::WORDS as u64;

    pub fn get(&self, index: u64) -> bool {
        let piece = self.0.get(&(index / Self::PIECE));
        piece.is_some_and(|words| words[(index % Self::PIECE / 64) as usize] >> (index % 64) & 1 == 1)
    }

    /// `ENOMEM` where there is no memory.
    pub fn set(&mut self, index: u64) -> Result<()> {
        let piece = index / Self::PIECE;
        if !self.0.contains_key(&piece) {
            self.0.try_reserve(1).map_err(|_| no_memory(self.0.capacity() * 64))?;
            let mut words = vec_for(Self::WORDS)?;
            words.resize(Self::WORDS, 0);
            self.0.insert(piece, words);
        }
        if let Some(words) = self.0.get_mut(&piece) {
            words[(index % Self::PIECE / 64) as usize] |= 1 << (index % 64);
        }
        Ok(())
    }
}

/// The result of the first look at an operation.
pub(super) struct CountSurvey {
    /// Refcount blocks, by index, in which a count changes.
    pub blocks: BTreeSet<u64>,
    /// Entries of the active L2 tables, numbered over the whole disk, whose host cluster has no other reference.
    pub single_entries: SparseBitmap,
    /// Entries of the active L1 table, the same.
    pub single_tables: SparseBitmap,
}

/// The host clusters in pieces whose deltas fit the memory; each holds whole refcount blocks.
pub(super) struct Windows {
    per_window: u64,
    end: u64,
}

impl Windows {
    /// For a file of `clusters` host clusters.
    pub fn new(geometry: Geometry, clusters: u64, memory_bytes: u64) -> Windows {
        let per_block = geometry.refcount_block_entries();
        let cells = memory_bytes / size_of::<i32>() as u64;
        // The last compressed cluster may end, by its count of sectors, behind the end of the file.
        Windows { per_window: (cells / per_block).max(1) * per_block, end: (clusters + 4).next_multiple_of(per_block) }
    }

    pub fn ranges(&self) -> impl Iterator<Item = Range<u64>> + use<> {
        let (per_window, end) = (self.per_window, self.end);
        (0..end.div_ceil(per_window)).map(move |number| number * per_window..((number + 1) * per_window).min(end))
    }
}

impl Image {
    /// The deltas of a window: one walk over the trees of the change.
    pub(super) async fn deltas(&self, change: &Change, clusters: Range<u64>, watch: ProgressFn<'_>) -> Result<Deltas> {
        let cells = (clusters.end - clusters.start) as usize;
        expect_memory(cells * size_of::<i32>())?;
        let mut deltas = Deltas { cells: vec![0; cells], clusters };
        for (l1, by) in [(&change.raised, 1), (&change.lowered, -1)] {
            if let Some(l1) = l1 {
                self.add_tree(l1, by, &mut deltas, watch).await?;
            }
        }
        if change.is_begun {
            let (table, per_block) = (self.refcount_table().await?, self.geometry.refcount_block_entries());
            for index in deltas.clusters.start / per_block..deltas.clusters.end.div_ceil(per_block) {
                let stored = read_block(&self.file, self.geometry, &table, index).await?;
                deltas.clear_uncounted(index * per_block, stored.as_deref(), self.geometry);
            }
        }
        Ok(deltas)
    }

    async fn add_tree(&self, l1: &[u64], by: i32, deltas: &mut Deltas, watch: ProgressFn<'_>) -> Result<()> {
        let file_len = self.file.len();
        let tables = tree::tables(l1, self.geometry, file_len)?;
        for (_, host) in &tables {
            let cluster = host >> self.geometry.cluster_bits();
            deltas.add(cluster..cluster + 1, by);
        }
        let file_clusters = self.geometry.clusters(file_len);
        let (mut done, total) = (0, tables.len() as u64);
        tree::for_tables(&self.file, self.geometry, &tables, |_, host, bytes| {
            for (index, entry) in tree::entries(bytes, self.geometry) {
                let Some((first, count)) = tree::references(entry, self.geometry) else { continue };
                let message = match entry.is_compressed() || entry.offset().is_aligned(self.geometry.cluster_bits()) {
                    // The cluster that it points into may be another entry's alone.
                    false => "a cluster's offset is not cluster-aligned: check and repair the image first",
                    true if first >= file_clusters => {
                        "a cluster lies past the end of the file: check and repair the image first"
                    }
                    true => {
                        deltas.add(first..first + count, by);
                        continue;
                    }
                };
                let at = host + index as u64 * self.geometry.l2_entry_size();
                return Err(Error::invalid_image("l2_entry", format!("{:#x}", entry.0), message).offset(at));
            }
            done += 1;
            if watch(done, total) { Ok(()) } else { Err(Error::new(ErrorKind::Cancelled, "cancelled")) }
        })
        .await
    }

    /// New counts of one block, checked: `None` where nothing changes.
    pub(super) fn new_counts(
        &self,
        index: u64,
        stored: Option<&[u8]>,
        by: impl Fn(u64) -> i64,
    ) -> Result<Option<Vec<u8>>> {
        let geometry = self.geometry;
        let (order, entries) = (geometry.refcount_order(), geometry.refcount_block_entries());
        let first = index * entries;
        let mut block: Option<Vec<u8>> = None;
        for entry in 0..entries {
            let delta = by(first + entry);
            if delta == 0 {
                continue;
            }
            let old = stored.map_or(0, |block| refcount::get(block, order, entry as usize));
            let at = (first + entry) << geometry.cluster_bits();
            let Some(new) = old.checked_add_signed(delta) else {
                let message = "a refcount is lower than the references: check and repair the image first";
                return Err(Error::invalid_image("refcount", old, message).offset(at));
            };
            if new > geometry.max_refcount() {
                let message = format!(
                    "a cluster would have {new} references, of which refcounts of {} bits can't count more than {}",
                    geometry.refcount_bits(),
                    geometry.max_refcount()
                );
                return Err(Error::new(ErrorKind::Limit, message).with_errno(Errno::EINVAL).offset(at));
            }
            let block = block.get_or_insert_with(|| match stored {
                Some(stored) => stored.to_vec(),
                None => vec![0; geometry.cluster_size() as usize],
            });
            refcount::set(block, order, entry as usize, new);
        }
        Ok(block)
    }

    /// Notes the entries of the active tree that are the only reference to their targets, for one window; `is_single`
    /// has its clusters whose count is to be one.
    pub(super) async fn note_single(
        &self,
        active: &[u64],
        window: &Range<u64>,
        is_single: &SparseBitmap,
        survey: &mut CountSurvey,
    ) -> Result<()> {
        let bits = self.geometry.cluster_bits();
        let single = |cluster: u64| window.contains(&cluster) && is_single.get(cluster - window.start);
        let tables = tree::tables(active, self.geometry, self.file.len())?;
        for (index, host) in &tables {
            if single(host >> bits) {
                survey.single_tables.set(*index as u64)?;
            }
        }
        let per_table = self.geometry.l2_entries();
        tree::for_tables(&self.file, self.geometry, &tables, |l1_index, _, bytes| {
            for (index, entry) in tree::entries(bytes, self.geometry) {
                if !entry.is_compressed() && entry.offset().0 != 0 && single(entry.offset().0 >> bits) {
                    survey.single_entries.set(l1_index as u64 * per_table + index as u64)?;
                }
            }
            Ok(())
        })
        .await
    }
}
