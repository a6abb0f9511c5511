// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The reference counts of a window of host clusters, two bytes a cluster.

use cowshed_layout::qcow2::refcount;
use cowshed_types::memory::{grow_map, vec_for};
use cowshed_types::{Error, ErrorKind, Result};
use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};

/// Bit 15 of a cell: the stored refcount is exactly one.
const STORED_ONE: u16 = 1 << 15;
/// Bit 14 of a cell: the cluster belongs to metadata.
const METADATA: u16 = 1 << 14;
/// The rest counts references; the largest value refers to the overflow map.
const COUNT: u16 = METADATA - 1;
/// Entries of the overflow map before a check gives up. Each stands for a cluster with over 16,000 references.
const OVERFLOW_MAX: usize = 1 << 20;

/// The value of a cell before a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark(u16);

impl Mark {
    /// The stored refcount is exactly one.
    #[inline]
    pub const fn is_stored_one(self) -> bool {
        self.0 & STORED_ONE != 0
    }
    /// The cluster belongs to metadata.
    #[inline]
    pub const fn is_metadata(self) -> bool {
        self.0 & METADATA != 0
    }
    /// Something refers to the cluster.
    #[inline]
    pub const fn is_referenced(self) -> bool {
        self.0 & COUNT != 0
    }
}

/// References to the host clusters `first()..end()`. All threads of a check share it. The cells are atomic and
/// independent of each other, so relaxed order is enough: the threads are joined before a sum is read.
#[derive(Debug)]
pub struct Counts {
    first: u64,
    cells: Vec<AtomicU16>,
    overflow: Mutex<HashMap<u64, u64>>,
}

impl Counts {
    /// Bytes that a window of `clusters` takes.
    pub const fn bytes(clusters: u64) -> u64 {
        clusters.saturating_mul(2)
    }

    /// All zero. `clusters` must fit the memory that the caller granted; `ENOMEM` where the system has less.
    pub fn new(first: u64, clusters: usize) -> Result<Self> {
        let mut cells = vec_for(clusters)?;
        cells.resize_with(clusters, AtomicU16::default);
        Ok(Counts { first, cells, overflow: Mutex::default() })
    }

    /// First cluster of the window.
    pub fn first(&self) -> u64 {
        self.first
    }

    /// First cluster behind the window.
    pub fn end(&self) -> u64 {
        self.first + self.cells.len() as u64
    }

    /// Index of a cluster's cell, if it is in the window.
    #[inline]
    pub(super) fn index(&self, cluster: u64) -> Option<usize> {
        let index = cluster.wrapping_sub(self.first);
        (index < self.cells.len() as u64).then_some(index as usize)
    }

    #[inline]
    pub(super) fn peek(&self, index: usize) -> Mark {
        Mark(self.cells[index].load(Relaxed))
    }

    /// Notes which stored refcounts are exactly one. `first` is the first cluster that the block counts. Must come
    /// before any reference is counted.
    pub fn note_stored(&self, block: &[u8], order: u32, first: u64) {
        let entries = refcount::entries(block.len(), order) as u64;
        let from = first.max(self.first);
        let to = first.saturating_add(entries).min(self.end());
        if from >= to {
            return;
        }
        let cells = &self.cells[(from - self.first) as usize..(to - self.first) as usize];
        let skip = (from - first) as usize;
        if order == 4 {
            for (cell, stored) in cells.iter().zip(block[skip * 2..].as_chunks::<2>().0) {
                cell.store(if *stored == [0, 1] { STORED_ONE } else { 0 }, Relaxed);
            }
            return;
        }
        for (index, cell) in cells.iter().enumerate() {
            let one = refcount::get(block, order, skip + index) == 1;
            cell.store(if one { STORED_ONE } else { 0 }, Relaxed);
        }
    }

    /// Counts `weight` references to a cluster; a cluster outside of the window is left to another pass.
    pub fn add(&self, cluster: u64, weight: u32) -> Result<Option<Mark>> {
        match self.index(cluster) {
            Some(index) => self.add_at(index, weight).map(Some),
            None => Ok(None),
        }
    }

    #[inline]
    pub(super) fn add_at(&self, index: usize, weight: u32) -> Result<Mark> {
        let cell = &self.cells[index];
        let mut old = cell.load(Relaxed);
        loop {
            let sum = u64::from(old & COUNT) + u64::from(weight);
            if sum >= u64::from(COUNT) {
                return self.add_slowly(index, weight);
            }
            match cell.compare_exchange_weak(old, (old & !COUNT) | sum as u16, Relaxed, Relaxed) {
                Ok(_) => return Ok(Mark(old)),
                Err(now) => old = now,
            }
        }
    }

    /// Counts past the cell's width: the lock makes cell and map change together.
    #[cold]
    fn add_slowly(&self, index: usize, weight: u32) -> Result<Mark> {
        let mut overflow = self.overflow.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let old = self.cells[index].fetch_or(COUNT, Relaxed);
        if old & COUNT == COUNT {
            grow_map(&mut overflow)?;
            let count = overflow.entry(index as u64).or_insert(u64::from(COUNT));
            *count = count.saturating_add(u64::from(weight));
        } else {
            if overflow.len() >= OVERFLOW_MAX {
                return Err(Error::new(ErrorKind::Limit, "too many clusters with over 16382 references each"));
            }
            grow_map(&mut overflow)?;
            overflow.insert(index as u64, u64::from(old & COUNT) + u64::from(weight));
        }
        Ok(Mark(old))
    }

    /// As [`Counts::add`], for a cluster that belongs to metadata.
    pub fn mark_metadata(&self, cluster: u64, weight: u32) -> Result<Option<Mark>> {
        let Some(index) = self.index(cluster) else { return Ok(None) };
        let old = Mark(self.cells[index].fetch_or(METADATA, Relaxed));
        self.add_at(index, weight)?;
        Ok(Some(old))
    }

    /// True when the stored refcount of a cluster of the window is exactly one.
    pub fn stored_one(&self, cluster: u64) -> bool {
        self.index(cluster).is_some_and(|index| self.peek(index).is_stored_one())
    }

    /// References to a cluster of the window; 0 outside of it.
    pub fn references(&self, cluster: u64) -> u64 {
        self.index(cluster).map_or(0, |index| self.references_at(index))
    }

    #[inline]
    pub(super) fn references_at(&self, index: usize) -> u64 {
        let count = self.cells[index].load(Relaxed) & COUNT;
        if count == COUNT { self.overflowed(index) } else { u64::from(count) }
    }

    #[cold]
    fn overflowed(&self, index: usize) -> u64 {
        let overflow = self.overflow.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        overflow.get(&(index as u64)).copied().unwrap_or(u64::from(COUNT))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Miri takes a thousand times as long.
    const MANY: u64 = if cfg!(miri) { 200 } else { 20_000 };

    #[test]
    fn counts_stay_exact_past_the_cell() {
        let counts = Counts::new(10, 4).expect("memory");
        counts.note_stored(&[0, 1, 0, 2, 0, 1, 0, 0], 4, 10);
        assert!(counts.add(9, 1).unwrap().is_none() && counts.add(14, 1).unwrap().is_none());
        assert!(counts.add(10, 3).unwrap().unwrap().is_stored_one());
        assert!(!counts.mark_metadata(11, 1).unwrap().unwrap().is_referenced());
        for _ in 0..2 * MANY {
            counts.add(12, 1).unwrap();
        }
        counts.add(12, u32::MAX).unwrap();
        assert_eq!((counts.references(10), counts.references(11)), (3, 1));
        assert_eq!(counts.references(12), 2 * MANY + u64::from(u32::MAX));
        assert!(counts.add(12, 1).unwrap().unwrap().is_stored_one());
        assert!(counts.add(11, 1).unwrap().unwrap().is_metadata());
    }

    #[test]
    fn threads_lose_nothing() {
        let counts = Counts::new(0, 2).expect("memory");
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..MANY).for_each(|_| assert!(counts.add(1, 1).is_ok())));
            }
        });
        assert_eq!(counts.references(1), 4 * MANY);
    }
}
