// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Writes that need clusters: the host range to write, the filling around the data, and the edit afterwards.
//!
//! [`Engine::begin_allocate`] reserves host clusters and locks the guest clusters; the caller writes data and filling in
//! one go; [`Engine::commit`] points the mapping there. Nothing refers to the new clusters before that.

use crate::engine::{Edit, Engine, Purpose, State};
use crate::map::subcluster_mapping;
use crate::slice::Slice;
use crate::stall::{Planned, Stall};
use cowshed_layout::qcow2::{Cluster, CompressedDescriptor, L2Entry, Subcluster, SubclusterBitmap};
use cowshed_types::{Error, GuestOffset, HostOffset, Mapping, StoredIn, slip, without};
use std::ops::Range;
use std::sync::Arc;

/// Most bytes that one allocation covers (at least one cluster).
const MAX_BYTES: u64 = 4 << 20;

/// The bytes between the edge of the allocation and the caller's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// Nothing: the data starts (ends) at the edge.
    None,
    /// Zeroes.
    Zero,
    /// The guest's present data (copy-on-write).
    Copy,
}

/// A write in the making: guest clusters locked, host clusters reserved. Must go to [`Engine::commit`] or
/// [`Engine::abort`].
#[derive(Debug)]
#[must_use = "the guest clusters stay locked until it is committed or aborted"]
pub struct Allocation {
    /// First guest byte to write, `head` included.
    pub start: GuestOffset,
    /// First guest byte of the caller's data.
    pub data_start: GuestOffset,
    /// First guest byte behind the data of this plan; may be less than the end of the caller's data.
    pub data_end: GuestOffset,
    /// First guest byte behind everything to write; may lie past the end of the disk.
    pub end: GuestOffset,
    /// The host offset of guest byte `start`.
    pub host: HostOffset,
    /// The file that `host` is in.
    pub file: StoredIn,
    /// Pass everything through the image's cipher.
    pub encrypted: bool,
    /// Filling of `start..data_start`.
    pub head: Fill,
    /// Filling of `data_end..end`.
    pub tail: Fill,
    /// The host range reads as zeroes already: zero filling need not be written.
    pub host_is_zero: bool,
    clusters: Range<u64>,
    /// Host offset of the first cluster.
    base: HostOffset,
    is_new: bool,
    /// In a box: most allocations copy nothing, and a plan is moved several times.
    sources: Option<Box<Sources>>,
}

/// The places of the bytes that the head and the tail copy, each where they are in one place.
#[derive(Debug)]
struct Sources {
    head: Option<Mapping>,
    tail: Option<Mapping>,
}

impl Allocation {
    /// The place of the bytes that `head` copies, where they are in one place. It holds as long as the guest clusters are locked.
    pub fn head_source(&self) -> Option<Mapping> {
        self.sources.as_ref()?.head
    }

    /// As [`Allocation::head_source`], for `tail`.
    pub fn tail_source(&self) -> Option<Mapping> {
        self.sources.as_ref()?.tail
    }

    /// The place of all bytes from `start` to `end`, where `head` and `tail` are parts of one place. Between the two
    /// there may be anything: the data comes to lie over it.
    pub fn source(&self) -> Option<Mapping> {
        let (head, tail) = (self.head_source()?, self.tail_source()?);
        let distance = self.data_end - self.start;
        let is_one = match (head, tail) {
            (Mapping::Unallocated, Mapping::Unallocated) => true,
            (Mapping::Data { host, file, encrypted }, _) => {
                tail == Mapping::Data { host: host + distance, file, encrypted }
            }
            (Mapping::Compressed { host, len, skip }, _) => {
                tail == Mapping::Compressed { host, len, skip: skip + distance }
            }
            _ => false,
        };
        is_one.then_some(head)
    }
}

/// The work that a write to one guest cluster needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    /// Nothing but the write.
    InPlace,
    /// The host cluster is there and exclusive, but its (sub)clusters are not all marked as data.
    Reuse(HostOffset),
    /// A new host cluster; with `carries` the data of the old one must be carried over.
    New { carries: bool },
}

/// The slice that was looked up last, with its number: neighbouring clusters share it.
type LastSlice = Option<(u64, Arc<Slice>)>;

/// One entry as found.
struct Found {
    entry: L2Entry,
    cluster: Cluster,
    bitmap: SubclusterBitmap,
    class: Class,
}

impl Engine {
    /// Plans a write of `len` bytes at `guest`, as far as it comes in one piece: see [`Allocation::data_end`]. `Retry`
    /// when the first byte can be written in place after all; with `bounded`, `WriteBack` when too much metadata is dirty.
    pub fn begin_allocate(&self, guest: GuestOffset, len: u64, bounded: bool) -> Planned<Allocation> {
        let mut state = self.lock_state();
        if bounded && self.is_beyond_bound(&state, true) {
            return Err(Stall::WriteBack);
        }
        self.plan_allocation(&mut state, guest, len, false)
    }

    fn plan_allocation(
        &self,
        state: &mut State,
        guest: GuestOffset,
        len: u64,
        only_unallocated: bool,
    ) -> Planned<Allocation> {
        let clusters = self.clusters_at_once(state, guest, len)?;
        let end = (guest.0 + len).min(clusters.end << self.geometry.cluster_bits());
        let mut slice = None;
        let first = self.find(state, &mut slice, clusters.start, guest.0..end)?;
        if only_unallocated && first.cluster != Cluster::Unallocated {
            return Err(Stall::Retry);
        }
        let mut count = 1;
        while count < clusters.end - clusters.start {
            let cluster = clusters.start + count;
            match self.peek(state, &mut slice, cluster, guest.0..end)? {
                Some(next) if self.refuse_overlap(state, next.entry).is_err() => break,
                Some(next) if only_unallocated && next.cluster != Cluster::Unallocated => break,
                Some(next) if self.continues_class(&first, &next, count) => count += 1,
                _ => break,
            }
        }
        let hit = |stall| narrowed(stall, guest.within(self.geometry.cluster_bits()), end - guest.0);
        self.refuse_overlap(state, first.entry).map_err(hit)?;
        let (base, count, is_zero, is_new) = match first.class {
            Class::InPlace => return Err(Stall::Retry),
            Class::Reuse(host) => (host, count, self.data_file_is_zero(state, host, count), false),
            Class::New { .. } => {
                let run = self.allocate(state, count, None)?;
                (HostOffset(run.cluster << self.geometry.cluster_bits()), run.count, run.is_zero, true)
            }
        };
        let clusters = clusters.start..clusters.start + count;
        let end = end.min(clusters.end << self.geometry.cluster_bits());
        let last = match count {
            1 => None,
            _ => self.peek(state, &mut slice, clusters.end - 1, guest.0..end)?,
        };
        let mut allocation = Allocation {
            start: guest,
            data_start: guest,
            data_end: GuestOffset(end),
            end: GuestOffset(end),
            host: base,
            file: self.stored_in(),
            encrypted: self.config.encrypted,
            head: Fill::None,
            tail: Fill::None,
            host_is_zero: is_zero,
            base,
            is_new,
            clusters,
            sources: None,
        };
        self.set_edges(&mut allocation, &first, last.as_ref().unwrap_or(&first))?;
        allocation.host =
            base + (allocation.start - GuestOffset(allocation.clusters.start << self.geometry.cluster_bits()));
        self.lock(state, &allocation.clusters);
        Ok(allocation)
    }

    /// Refuses to write to, or to free, a range that the mapping gives the guest but that holds metadata.
    pub(crate) fn refuse_overlap(&self, state: &State, entry: L2Entry) -> Planned<()> {
        let mut clusters = Vec::new();
        self.references_of(entry, &mut clusters);
        match clusters.into_iter().find(|cluster| self.metadata.contains(*cluster)) {
            Some(cluster) => Err(self.overlap(state, cluster)),
            None => Ok(()),
        }
    }

    /// Plans mapping without data: [`Engine::commit_preallocation`] maps the clusters, which must read as zeroes then
    /// (see [`Allocation::host_is_zero`]). `None` when the cluster at `guest` isn't unallocated: nothing to do there.
    pub fn begin_preallocate(&self, guest: GuestOffset, len: u64) -> Planned<Option<Allocation>> {
        let bits = self.geometry.cluster_bits();
        let start = guest.align_down(bits);
        let end = (guest.0 + len).div_ceil(1 << bits) << bits;
        let mut state = self.lock_state();
        let clusters = self.clusters_at_once(&mut state, start, end - start.0)?;
        let found =
            self.find(&mut state, &mut None, clusters.start, start.0..start.0 + self.geometry.cluster_size())?;
        if found.cluster != Cluster::Unallocated {
            return Ok(None);
        }
        self.plan_allocation(&mut state, start, end - start.0, true).map(Some)
    }

    /// The clusters of a request that may be planned at once: below one L2 table, not locked by others.
    fn clusters_at_once(&self, state: &mut State, guest: GuestOffset, len: u64) -> Planned<Range<u64>> {
        let bits = self.geometry.cluster_bits();
        let first = self.guest_cluster(guest);
        let end = self.guest_cluster(guest + (len - 1)) + 1;
        let table_end = ((first >> self.geometry.l2_bits()) + 1) << self.geometry.l2_bits();
        let mut end =
            end.min(table_end).min(first + if without!("extents_at_once") { 1 } else { (MAX_BYTES >> bits).max(1) });
        match state.inflight.first_in(first..end) {
            Some(locked) if locked == first => return Err(Stall::Wait),
            Some(locked) => end = locked,
            None => {}
        }
        self.own_table(state, self.geometry.l1_index(guest) as usize, Edit::Fill)?;
        Ok(first..end)
    }

    /// The place of a guest cluster's entry: L1 index, index of the slice in its table, number of the slice, word in
    /// the slice.
    fn entry_position(&self, cluster: u64) -> (usize, usize, u64, usize) {
        let guest = GuestOffset(cluster << self.geometry.cluster_bits());
        let l1_index = self.geometry.l1_index(guest) as usize;
        let (index, word) = self.slice_position(self.geometry.l2_index(guest));
        (l1_index, index, self.slice_number(l1_index, index), word)
    }

    /// The slice of a guest cluster below an allocated table: slice, number, word.
    pub(crate) fn entry_slice(&self, state: &mut State, cluster: u64) -> Planned<(Arc<Slice>, u64, usize)> {
        let (l1_index, index, number, word) = self.entry_position(cluster);
        Ok((self.slice(state, l1_index, index)?, number, word))
    }

    /// As [`Self::entry_slice`], from `last` where the slice is the same; kept there otherwise.
    fn next_slice<'a>(
        &self,
        state: &mut State,
        last: &'a mut LastSlice,
        cluster: u64,
    ) -> Planned<(&'a mut Arc<Slice>, u64, usize)> {
        let (l1_index, index, number, word) = self.entry_position(cluster);
        let slice = match last.take_if(|(known, _)| *known == number) {
            Some((_, slice)) => slice,
            None => self.slice(state, l1_index, index)?,
        };
        Ok((&mut last.insert((number, slice)).1, number, word))
    }

    fn find(&self, state: &mut State, last: &mut LastSlice, cluster: u64, touched: Range<u64>) -> Planned<Found> {
        let (slice, _, word) = self.next_slice(state, last, cluster)?;
        let at = GuestOffset(touched.start.max(cluster << self.geometry.cluster_bits()));
        let found = self.classify(slice, word, cluster, touched);
        Ok(found.map_err(|error| self.entry_damage(error, at, L2Entry(slice.word(word)), Purpose::Write))?)
    }

    /// As [`Self::find`]; `None` where the slice isn't at hand without I/O.
    fn peek(
        &self,
        state: &mut State,
        last: &mut LastSlice,
        cluster: u64,
        touched: Range<u64>,
    ) -> Planned<Option<Found>> {
        let (l1_index, index, number, _) = self.entry_position(cluster);
        let is_at_hand = last.as_ref().is_some_and(|(known, _)| *known == number)
            || self.directory.slice(l1_index, index).is_some()
            || state.tables.fresh().contains_key(&l1_index);
        if !is_at_hand {
            return Ok(None);
        }
        let (slice, _, word) = self.next_slice(state, last, cluster)?;
        // A bad entry further on is met again, as the first one of a later plan.
        Ok(self.classify(slice, word, cluster, touched).ok())
    }

    fn classify(&self, slice: &Slice, word: usize, cluster: u64, touched: Range<u64>) -> Result<Found, Error> {
        let (entry, bitmap) = self.entry_of(slice, word);
        let (entry, bitmap) = (L2Entry(entry), SubclusterBitmap(bitmap));
        let guest = cluster << self.geometry.cluster_bits();
        let same_place = Class::Reuse(HostOffset(guest));
        let found = entry.cluster(self.config.format)?;
        let class = match found {
            Cluster::Unallocated | Cluster::Zero { host: None } if self.config.format.data_file => same_place,
            Cluster::Unallocated | Cluster::Zero { host: None } => Class::New { carries: false },
            Cluster::Zero { host: Some(host) } if self.is_exclusive(entry) => Class::Reuse(host),
            Cluster::Zero { .. } => Class::New { carries: false },
            Cluster::Data { host } if self.is_exclusive(entry) => {
                let subclusters = self.subclusters_of(guest, touched);
                let mask = SubclusterBitmap::mask(subclusters);
                match !self.geometry.extended_l2() || bitmap.data_mask() & mask == mask {
                    true => Class::InPlace,
                    false => Class::Reuse(host),
                }
            }
            Cluster::Data { .. } | Cluster::Compressed(_) => Class::New { carries: true },
        };
        if self.geometry.extended_l2() && !matches!(found, Cluster::Compressed(_)) {
            check_bitmap(found, bitmap)?;
        }
        Ok(Found { entry, cluster: found, bitmap, class })
    }

    /// Subclusters of the cluster at `guest` that `bytes` (on the virtual disk) touch.
    fn subclusters_of(&self, guest: u64, bytes: Range<u64>) -> Range<u32> {
        let size = self.geometry.subcluster_size();
        let from = bytes.start.max(guest) - guest;
        let to = bytes.end.min(guest + self.geometry.cluster_size()).saturating_sub(guest);
        (from / size) as u32..to.div_ceil(size) as u32
    }

    fn continues_class(&self, first: &Found, next: &Found, count: u64) -> bool {
        match (first.class, next.class) {
            (Class::Reuse(host), Class::Reuse(next)) => host + (count << self.geometry.cluster_bits()) == next,
            (Class::New { .. }, Class::New { .. }) => true,
            _ => false,
        }
    }

    /// In a data file: whether clusters were never written, and notes that they will be.
    fn data_file_is_zero(&self, state: &mut State, host: HostOffset, count: u64) -> bool {
        if !self.config.format.data_file {
            return false;
        }
        let is_zero = self.config.new_space_is_zero && host.0 >= state.data_high_water;
        state.data_high_water = state.data_high_water.max(host.0 + (count << self.geometry.cluster_bits()));
        is_zero
    }

    fn set_edges(&self, allocation: &mut Allocation, first: &Found, last: &Found) -> Result<(), Error> {
        // An edge inside of a subcluster that has its data already needs no filling.
        let has_data = |found: &Found, at: GuestOffset| {
            matches!(found.class, Class::Reuse(_))
                && self.geometry.extended_l2()
                && found.bitmap.get(self.geometry.subcluster_index(at)) == Subcluster::Data
        };
        let bits = self.geometry.subcluster_bits();
        let mut sources = Sources { head: None, tail: None };
        if !has_data(first, allocation.data_start) {
            let carried = self.carried(first, allocation.clusters.start).start;
            allocation.start = GuestOffset(allocation.data_start.align_down(bits).0.min(carried));
            let bytes = allocation.start.0..allocation.data_start.0;
            allocation.head = self.fill_of(first, bytes.clone());
            sources.head = self.source_of(first, allocation.head, bytes);
        }
        if !has_data(last, GuestOffset(allocation.data_end.0 - 1)) {
            let carried = self.carried(last, allocation.clusters.end - 1).end;
            allocation.end = GuestOffset((allocation.data_end.0.div_ceil(1 << bits) << bits).max(carried));
            let bytes = allocation.data_end.0..allocation.end.0;
            allocation.tail = self.fill_of(last, bytes.clone());
            sources.tail = self.source_of(last, allocation.tail, bytes);
        }
        if sources.head.is_some() || sources.tail.is_some() {
            allocation.sources = Some(Box::new(sources));
        }
        Ok(())
    }

    /// The guest bytes that a new host cluster takes over from the old one. With extended L2 entries these are those
    /// from the first to the last subcluster that has data. `u64::MAX..0` for none.
    fn carried(&self, found: &Found, cluster: u64) -> Range<u64> {
        let nothing = Range { start: u64::MAX, end: 0 };
        let Class::New { carries: true } = found.class else { return nothing };
        let guest = cluster << self.geometry.cluster_bits();
        if !self.geometry.extended_l2() || matches!(found.cluster, Cluster::Compressed(_)) {
            return guest..guest + self.geometry.cluster_size();
        }
        let data = found.bitmap.data_mask();
        if data == 0 || slip!("shared_subclusters_not_carried") {
            return nothing;
        }
        let size = self.geometry.subcluster_size();
        guest + u64::from(data.trailing_zeros()) * size..guest + u64::from(32 - data.leading_zeros()) * size
    }

    /// The filling that `bytes` of one cluster need.
    fn fill_of(&self, found: &Found, bytes: Range<u64>) -> Fill {
        if bytes.is_empty() {
            return Fill::None;
        }
        let backed = self.backing_size().is_some_and(|size| bytes.start < size);
        let unallocated = if backed && !slip!("copy_without_the_backing_file") { Fill::Copy } else { Fill::Zero };
        match found.cluster {
            Cluster::Compressed(_) => Fill::Copy,
            Cluster::Zero { .. } => Fill::Zero,
            Cluster::Data { .. } | Cluster::Unallocated if self.geometry.extended_l2() => {
                let guest = bytes.start >> self.geometry.cluster_bits() << self.geometry.cluster_bits();
                let mask = SubclusterBitmap::mask(self.subclusters_of(guest, bytes));
                if found.bitmap.data_mask() & mask != 0 {
                    Fill::Copy
                } else if found.bitmap.zero_mask() & mask == mask {
                    Fill::Zero
                } else {
                    unallocated
                }
            }
            Cluster::Data { .. } => Fill::Copy,
            Cluster::Unallocated => unallocated,
        }
    }

    /// The place of `bytes` of one cluster, which are copied. `None` where nothing is copied, or from several places.
    fn source_of(&self, found: &Found, fill: Fill, bytes: Range<u64>) -> Option<Mapping> {
        if fill != Fill::Copy {
            return None;
        }
        let guest = GuestOffset(bytes.start);
        let within = guest.within(self.geometry.cluster_bits());
        if !self.geometry.extended_l2() || matches!(found.cluster, Cluster::Compressed(_)) {
            return Some(self.mapping_of(found.cluster, within));
        }
        let index = self.geometry.subcluster_index(guest);
        let (kind, count) = found.bitmap.run(index);
        let run_end = (guest.0 - within) + u64::from(index + count) * self.geometry.subcluster_size();
        let host = match found.cluster {
            Cluster::Data { host } => Some(host + within),
            _ => None,
        };
        let mapping = subcluster_mapping(kind, host, self.stored_in(), self.config.encrypted, found.bitmap);
        mapping.ok().filter(|_| bytes.end <= run_end)
    }

    /// Locks guest clusters and keeps their slices in the cache.
    pub(crate) fn lock(&self, state: &mut State, clusters: &Range<u64>) {
        state.inflight.lock(clusters.clone());
        self.set_slices_busy(state, clusters, true);
    }

    pub(crate) fn unlock(&self, state: &mut State, clusters: &Range<u64>) {
        state.inflight.unlock(clusters);
        self.set_slices_busy(state, clusters, false);
    }

    fn set_slices_busy(&self, state: &mut State, clusters: &Range<u64>, busy: bool) {
        let per_slice = self.slice_bytes() / self.geometry.l2_entry_size();
        for number in clusters.start / per_slice..=(clusters.end - 1) / per_slice {
            state.tables.set_busy(number, busy);
        }
    }

    /// Points the mapping to the written clusters. The caller's data I/O has completed.
    pub fn commit(&self, allocation: Allocation) -> Result<(), Error> {
        self.publish(allocation, false)
    }

    /// Maps the clusters of [`Engine::begin_preallocate`]: they hold zeroes, or count as zeroes where the image is
    /// encrypted (from version 3 of the format on). With extended L2 entries and a backing file the subclusters stay
    /// unallocated. Those behind the end of a disk that grows don't: no backing file shows there.
    pub fn commit_preallocation(&self, allocation: Allocation) -> Result<(), Error> {
        self.publish(allocation, true)
    }

    fn publish(&self, allocation: Allocation, preallocation: bool) -> Result<(), Error> {
        let mut state = self.lock_state();
        let bits = self.geometry.cluster_bits();
        let (mut lost, mut last) = (Vec::new(), None);
        let clusters = allocation.clusters.clone();
        for cluster in clusters.clone() {
            let Ok((slice, number, word)) = self.next_slice(&mut state, &mut last, cluster) else {
                return Err(Error::internal("a busy L2 slice left the cache"));
            };
            let old = self.entry_of(slice, word);
            let host = allocation.base + ((cluster - clusters.start) << bits);
            let written = self.subclusters_of(cluster << bits, allocation.start.0..allocation.end.0);
            let bitmap = match L2Entry(old.0).is_compressed() {
                true => SubclusterBitmap::UNALLOCATED,
                false => SubclusterBitmap(old.1),
            };
            // Bytes that preallocation leaves in an encrypted cluster aren't zero for the guest.
            let hides = preallocation && allocation.encrypted && self.config.format.version >= 3;
            let shows_backing = self.backing_size().is_some() && cluster << bits < self.size();
            let bitmap = match preallocation && shows_backing {
                true => bitmap,
                false if hides => bitmap.with_zero(written),
                false => bitmap.with_data(written),
            };
            let entry = match hides && !self.geometry.extended_l2() {
                true => L2Entry::zero_allocated(host, true),
                false => L2Entry::data(host, true),
            };
            if allocation.is_new {
                self.references_of(L2Entry(old.0), &mut lost);
            }
            self.edit_entry(&mut state, number, slice, word, (entry.0, bitmap.0));
        }
        self.retire(&mut state, lost);
        self.unlock(&mut state, &clusters);
        Ok(())
    }

    /// Host clusters of the image file that an entry refers to, each once. An offset inside of a cluster refers to none: the
    /// cluster there may be another entry's.
    pub(crate) fn references_of(&self, entry: L2Entry, out: &mut Vec<u64>) {
        let bits = self.geometry.cluster_bits();
        if let Some(descriptor) = entry.compressed_descriptor(bits) {
            out.extend(self.clusters_of_compressed(descriptor));
        } else if !self.config.format.data_file && entry.offset().0 != 0 && self.unaligned_host(entry).is_none() {
            out.push(entry.offset().0 >> bits);
        }
    }

    /// Host clusters that a compressed cluster touches.
    pub(crate) fn clusters_of_compressed(&self, descriptor: CompressedDescriptor) -> Range<u64> {
        let bits = self.geometry.cluster_bits();
        let end = descriptor.host_offset.0.saturating_add(descriptor.len_max());
        descriptor.host_offset.0 >> bits..end.div_ceil(1 << bits)
    }

    /// Gives up a planned write. With `io_ended` all its I/O is over (it failed, or was never started), and the host
    /// clusters go back. Else they are lost until the next `check -r leaks`, because a write may still be on its way to
    /// them.
    pub fn abort(&self, allocation: Allocation, io_ended: bool) {
        let mut state = self.lock_state();
        if allocation.is_new && io_ended {
            let first = self.geometry.host_cluster(allocation.base);
            let count = allocation.clusters.end - allocation.clusters.start;
            self.give_back(&mut state, first..first + count);
        }
        self.unlock(&mut state, &allocation.clusters);
    }

    /// Puts references that never reached the disk's tables on their way back to the allocator.
    pub(crate) fn give_back(&self, state: &mut State, clusters: impl IntoIterator<Item = u64>) {
        let tag = self.pins.advance();
        for cluster in clusters {
            state.epochs.give_back(cluster, tag);
        }
    }
}

/// The bytes of a cluster that a write of `len` bytes from `skip` on would have hit.
fn narrowed(stall: Stall, skip: u64, len: u64) -> Stall {
    let Stall::Corrupt(error, cluster) = stall else { return stall };
    let start = (cluster.start + skip).min(cluster.end);
    Stall::Corrupt(error, start..(start + len).min(cluster.end))
}

/// Refuses subclusters that contradict themselves or their cluster.
fn check_bitmap(cluster: Cluster, bitmap: SubclusterBitmap) -> Result<(), Error> {
    let message = match cluster {
        _ if !bitmap.is_valid() => "a subcluster is both allocated and zero",
        Cluster::Unallocated if bitmap.data_mask() != 0 => "subclusters are allocated in a cluster that is not",
        _ => return Ok(()),
    };
    Err(Error::invalid_image("subcluster_bitmap", format!("{:#018x}", bitmap.0), message))
}
