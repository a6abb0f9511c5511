// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Placing compressed clusters: packed one behind the other, in sectors that are written once.
//!
//! A batch is packed without gaps and starts in a sector of its own. So no two writes ever share a sector, and none
//! rewrites a sector that may have been flushed. A host cluster may be shared by as many compressed clusters as its
//! refcount can count.

use crate::engine::{Edit, Engine, State};
use crate::stall::{Planned, Stall};
use cowshed_layout::qcow2::{CompressedDescriptor, L2Entry};
use cowshed_types::{Error, ErrorKind, GuestOffset, HostOffset, slip};
use std::collections::BTreeMap;

/// The place of one compressed cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompressedPlace {
    /// The guest cluster.
    pub guest: GuestOffset,
    /// First byte of the compressed data in the image file.
    pub host: HostOffset,
    /// Its length in bytes.
    pub len: u64,
}

/// A batch of compressed clusters in the making. Must go to [`Engine::commit_compressed`] or
/// [`Engine::abort_compressed`].
#[derive(Debug)]
#[must_use = "the guest clusters stay locked until it is committed or aborted"]
pub struct CompressedAllocation {
    /// A place for each of the first clusters of the batch, at least one, in order.
    pub places: Vec<CompressedPlace>,
    /// References taken, by host cluster.
    references: BTreeMap<u64, u64>,
}

/// A host range that a batch is packed into.
struct PackedRange {
    next: u64,
    end: u64,
    /// The first cluster held compressed data before; its count has to be raised also for its first new user.
    shared_first: Option<u64>,
    /// References taken so far in this batch; a new cluster's first is the one it was allocated with.
    references: BTreeMap<u64, u64>,
}

impl Engine {
    /// Plans writing compressed clusters: `(guest cluster, compressed length in bytes)`, guest offsets aligned to clusters,
    /// each once, lengths from 1 to the cluster size. Takes as many from the front as fit into one host range.
    pub fn begin_compressed(&self, batch: &[(GuestOffset, u64)]) -> Planned<CompressedAllocation> {
        let mut state = self.lock_state();
        let state = &mut *state;
        let count = self.compressed_at_once(state, batch)?;
        let packed = self.pack(state, &batch[..count]);
        self.set_batch_busy(state, &batch[..count], false);
        packed
    }

    /// Keeps the slices of a batch in the cache while it is planned.
    fn set_batch_busy(&self, state: &mut State, batch: &[(GuestOffset, u64)], busy: bool) {
        for (guest, _) in batch {
            let (index, _) = self.slice_position(self.geometry.l2_index(*guest));
            let number = self.slice_number(self.geometry.l1_index(*guest) as usize, index);
            state.tables.set_busy(number, busy);
        }
    }

    fn pack(&self, state: &mut State, batch: &[(GuestOffset, u64)]) -> Planned<CompressedAllocation> {
        let total: u64 = batch.iter().map(|(_, len)| len).sum();
        let mut range = match self.packed_range(state, total)? {
            Some(range) => range,
            None => self.new_range(state, batch, total)?,
        };
        let mut places = Vec::with_capacity(batch.len());
        for (guest, len) in batch {
            match self.place(state, &mut range, *len)? {
                Some(host) => places.push(CompressedPlace { guest: *guest, host, len: *len }),
                None => break,
            }
        }
        self.close_range(state, &mut range);
        if places.is_empty() {
            state.pack_next = None;
            return Err(Stall::Retry);
        }
        for place in &places {
            let cluster = self.guest_cluster(place.guest);
            self.lock(state, &(cluster..cluster + 1));
        }
        Ok(CompressedAllocation { places, references: range.references })
    }

    /// The number of clusters of the batch that can go together: not locked by others, their tables exclusive and at hand
    /// (and busy now).
    fn compressed_at_once(&self, state: &mut State, batch: &[(GuestOffset, u64)]) -> Planned<usize> {
        for (index, (guest, len)) in batch.iter().enumerate() {
            debug_assert!(
                guest.is_aligned(self.geometry.cluster_bits()) && (1..=self.geometry.cluster_size()).contains(len)
            );
            let cluster = self.guest_cluster(*guest);
            if state.inflight.first_in(cluster..cluster + 1).is_some() {
                return if index > 0 { Ok(index) } else { Err(Stall::Wait) };
            }
            let ready = match self.own_table(state, self.geometry.l1_index(*guest) as usize, Edit::Fill) {
                Ok(()) => self.may_replace(state, cluster),
                Err(stall) => Err(stall),
            };
            match ready {
                Ok(()) => self.set_batch_busy(state, &batch[index..=index], true),
                Err(stall) if index == 0 => return Err(stall),
                Err(stall) => {
                    self.withdraw(state, &stall);
                    return Ok(index);
                }
            }
        }
        Ok(batch.len())
    }

    fn may_replace(&self, state: &mut State, cluster: u64) -> Planned<()> {
        let (slice, _, word) = self.entry_slice(state, cluster)?;
        self.refuse_overlap(state, L2Entry(self.entry_of(&slice, word).0))
    }

    /// The rest of the cluster that the last batch ended in, with the space that can be allocated directly behind it.
    fn packed_range(&self, state: &mut State, total: u64) -> Planned<Option<PackedRange>> {
        let Some(next) = state.pack_next else { return Ok(None) };
        let size = self.geometry.cluster_size();
        let cluster = self.geometry.host_cluster(next);
        if self.refcount(state, cluster)? >= self.geometry.max_refcount() && !slip!("refcount_overflow") {
            state.pack_next = None;
            return Ok(None);
        }
        self.require_count_room(state, cluster)?;
        let mut end = (cluster + 1) * size;
        if next.0 + total > end {
            let want = (next.0 + total - end).div_ceil(size);
            match self.allocate(state, want, Some(cluster + 1)) {
                Ok(run) => end += run.count * size,
                Err(Stall::Retry | Stall::GrowRefcounts) => {
                    state.pack_next = None;
                    return Ok(None);
                }
                Err(stall) => return Err(stall),
            }
        }
        state.pack_next = None;
        Ok(Some(PackedRange { next: next.0, end, shared_first: Some(cluster), references: BTreeMap::new() }))
    }

    fn new_range(&self, state: &mut State, batch: &[(GuestOffset, u64)], total: u64) -> Planned<PackedRange> {
        let size = self.geometry.cluster_size();
        // A width of one bit can't count two users of a cluster: each gets a cluster alone.
        let want = if self.geometry.max_refcount() == 1 { batch.len() as u64 } else { total.div_ceil(size) };
        let run = self.allocate(state, want, None)?;
        let next = run.cluster * size;
        Ok(PackedRange { next, end: next + run.count * size, shared_first: None, references: BTreeMap::new() })
    }

    /// Takes the place for one compressed cluster out of the range; `None` when it doesn't fit any more.
    fn place(&self, state: &mut State, range: &mut PackedRange, len: u64) -> Planned<Option<HostOffset>> {
        let size = self.geometry.cluster_size();
        let max = self.geometry.max_refcount();
        let bits = self.geometry.cluster_bits();
        if max == 1 {
            range.next = range.next.next_multiple_of(size);
        }
        loop {
            if range.next + len > range.end {
                return Ok(None);
            }
            let touched = range.next >> bits..(range.next + len).div_ceil(1 << bits);
            let full = touched.clone().find(|cluster| {
                let taken = range.references.get(cluster).copied().unwrap_or(0);
                // A shared cluster's stored count has our references in it already; a new one's first is in its 1.
                match range.shared_first == Some(*cluster) {
                    true => self.cached_refcount(state, *cluster) >= max && !slip!("refcount_overflow"),
                    false => taken >= max,
                }
            });
            if let Some(full) = full {
                range.next = (full + 1) << bits;
                continue;
            }
            let descriptor = CompressedDescriptor::new(HostOffset(range.next), len);
            if descriptor.and_then(|descriptor| L2Entry::compressed(descriptor, bits)).is_none() {
                let error = Error::new(ErrorKind::Limit, "compressed clusters can't be stored at this offset");
                return Err(error.offset(range.next).into());
            }
            for cluster in touched {
                let taken = range.references.entry(cluster).or_default();
                *taken += 1;
                let is_first_of_new = *taken == 1 && range.shared_first != Some(cluster);
                if !is_first_of_new && !slip!("packed_clusters_not_counted") {
                    self.raise(state, cluster);
                }
            }
            let host = HostOffset(range.next);
            range.next += len;
            return Ok(Some(host));
        }
    }

    /// Gives clusters back that nothing was placed in, and remembers where the next batch may go on.
    fn close_range(&self, state: &mut State, range: &mut PackedRange) {
        let bits = self.geometry.cluster_bits();
        let first_new = match range.shared_first {
            Some(shared) => shared + 1,
            None => range.references.keys().next().copied().unwrap_or(range.end >> bits),
        };
        let first_new = first_new.min(range.end >> bits);
        let unused: Vec<u64> =
            (first_new..range.end >> bits).filter(|cluster| !range.references.contains_key(cluster)).collect();
        self.give_back(state, unused);
        let next = range.next.next_multiple_of(self.config.sector_bytes);
        let holds_data = range.references.contains_key(&(next >> bits));
        let may_share = self.geometry.max_refcount() > 1;
        state.pack_next = (next < range.end && holds_data && may_share).then_some(HostOffset(next));
    }

    /// Points the mapping to the compressed clusters. Their data I/O has completed.
    pub fn commit_compressed(&self, allocation: CompressedAllocation) -> Result<(), Error> {
        let mut state = self.lock_state();
        let state = &mut *state;
        let bits = self.geometry.cluster_bits();
        let mut lost = Vec::new();
        for place in &allocation.places {
            let cluster = self.guest_cluster(place.guest);
            let Ok((mut slice, number, word)) = self.entry_slice(state, cluster) else {
                return Err(Error::internal("a busy L2 slice left the cache"));
            };
            let descriptor = CompressedDescriptor::new(place.host, place.len);
            let Some(entry) = descriptor.and_then(|descriptor| L2Entry::compressed(descriptor, bits)) else {
                return Err(Error::internal("a compressed cluster was placed where it can't be stored"));
            };
            let old = self.entry_of(&slice, word);
            self.references_of(L2Entry(old.0), &mut lost);
            self.edit_entry(state, number, &mut slice, word, (entry.0, 0));
            self.unlock(state, &(cluster..cluster + 1));
        }
        self.retire(state, lost);
        Ok(())
    }

    /// Gives up a batch; `io_ended` as for [`Engine::abort`].
    pub fn abort_compressed(&self, allocation: CompressedAllocation, io_ended: bool) {
        let mut state = self.lock_state();
        let state = &mut *state;
        state.pack_next = None;
        if io_ended {
            let references = allocation.references.iter();
            let lost = references.flat_map(|(cluster, count)| std::iter::repeat_n(*cluster, *count as usize));
            self.give_back(state, lost.collect::<Vec<_>>());
        }
        for place in &allocation.places {
            let cluster = self.guest_cluster(place.guest);
            self.unlock(state, &(cluster..cluster + 1));
        }
    }

    /// Ends packing in the cluster of the last batch: the next batch starts in a fresh cluster. Returns where it would have
    /// gone on.
    pub fn stop_packing(&self) -> Option<HostOffset> {
        self.lock_state().pack_next.take()
    }
}
