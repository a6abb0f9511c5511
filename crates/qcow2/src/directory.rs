// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The active L1 table in memory, and under each of its entries the cached slices of that L2 table.
//!
//! Readers walk it without a lock. It grows by sharing its chunks with a longer directory. So a reader that still holds
//! the shorter one sees every change in its part.

use crate::interleaving;
use crate::slice::Slice;
use arc_swap::{ArcSwap, ArcSwapOption};
use cowshed_types::Result;
use cowshed_types::memory::expect_memory;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// L1 entries per chunk.
const CHUNK: usize = 256;
/// Memory of a chunk in bytes, with its place in the directory and the allocator's own bytes.
const CHUNK_BYTES: usize = CHUNK * size_of::<Table>() + 160;

type Slices = Box<[ArcSwapOption<Slice>]>;

/// One L1 entry and the slices of its table.
#[derive(Default)]
struct Table {
    l1_entry: AtomicU64,
    slices: OnceLock<Slices>,
}

type Chunk = Box<[Table]>;

/// See the module's text.
pub(crate) struct Directory {
    chunks: ArcSwap<Vec<Arc<Chunk>>>,
    slices_per_table: AtomicUsize,
}

fn new_chunk() -> Arc<Chunk> {
    Arc::new((0..CHUNK).map(|_| Table::default()).collect())
}

/// These chunks, and new ones for `l1_entries` entries in all.
fn longer(before: &[Arc<Chunk>], l1_entries: usize) -> Result<Vec<Arc<Chunk>>> {
    let new = l1_entries.div_ceil(CHUNK).saturating_sub(before.len());
    expect_memory(new.saturating_mul(CHUNK_BYTES).saturating_add(size_of_val(before)))?;
    let mut chunks = before.to_vec();
    while chunks.len() * CHUNK < l1_entries {
        chunks.push(new_chunk());
    }
    Ok(chunks)
}

impl Directory {
    /// From the L1 table of the image.
    pub(crate) fn new(l1: &[u64], slices_per_table: usize) -> Result<Self> {
        let directory = Directory {
            chunks: ArcSwap::from_pointee(Vec::new()),
            slices_per_table: AtomicUsize::new(slices_per_table),
        };
        directory.restart(l1, slices_per_table)?;
        Ok(directory)
    }

    /// Begins anew with this L1 table and no slice. Only the holder of the lock calls this. Readers see the one table or the
    /// other, but none may run while the length of slices changes. An error has changed nothing.
    pub(crate) fn restart(&self, l1: &[u64], slices_per_table: usize) -> Result<()> {
        let chunks = longer(&[], l1.len())?;
        for (index, entry) in l1.iter().enumerate() {
            chunks[index / CHUNK][index % CHUNK].l1_entry.store(*entry, Ordering::Relaxed);
        }
        self.slices_per_table.store(slices_per_table, Ordering::Release);
        self.chunks.store(Arc::new(chunks));
        Ok(())
    }

    /// Makes room for `l1_entries` entries. Only the holder of the lock calls this. `ENOMEM` where there is no memory.
    pub(crate) fn grow(&self, l1_entries: usize) -> Result<()> {
        self.chunks.store(Arc::new(longer(&self.chunks.load_full(), l1_entries)?));
        Ok(())
    }

    fn with_table<T>(&self, index: usize, look: impl FnOnce(&Table) -> T) -> Option<T> {
        interleaving::point();
        self.chunks.load().get(index / CHUNK).map(|chunk| look(&chunk[index % CHUNK]))
    }

    /// The L1 entry; 0 past the end.
    #[inline]
    pub(crate) fn l1(&self, index: usize) -> u64 {
        self.with_table(index, |table| table.l1_entry.load(Ordering::Acquire)).unwrap_or(0)
    }

    /// Changes an L1 entry in memory. Only the holder of the lock calls this.
    pub(crate) fn set_l1(&self, index: usize, entry: u64) {
        let done = self.with_table(index, |table| table.l1_entry.store(entry, Ordering::Release));
        assert!(done.is_some(), "L1 index {index} is past the directory");
    }

    /// Runs `look` on a cached slice; `None` when it isn't cached.
    #[inline]
    pub(crate) fn with_slice<T>(&self, l1_index: usize, slice: usize, look: impl FnOnce(&Slice) -> T) -> Option<T> {
        self.with_table(l1_index, |table| {
            let slot = &table.slices.get()?[slice];
            let guard = slot.load();
            let slice = guard.as_deref()?;
            if !slice.referenced.load(Ordering::Relaxed) {
                slice.referenced.store(true, Ordering::Relaxed);
            }
            Some(look(slice))
        })
        .flatten()
    }

    /// The cached slice itself.
    pub(crate) fn slice(&self, l1_index: usize, slice: usize) -> Option<Arc<Slice>> {
        self.with_table(l1_index, |table| table.slices.get().and_then(|slices| slices[slice].load_full())).flatten()
    }

    /// Puts a slice in, or takes it out. Only the holder of the lock calls this.
    pub(crate) fn set_slice(&self, l1_index: usize, slice: usize, value: Option<Arc<Slice>>) {
        self.with_table(l1_index, |table| {
            let count = self.slices_per_table.load(Ordering::Relaxed);
            let slices = table.slices.get_or_init(|| (0..count).map(|_| ArcSwapOption::empty()).collect());
            slices[slice].store(value);
        });
    }
}
