// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Planning of reads and of in-place writes: guest ranges to extents, without a lock.

use crate::engine::{Engine, Purpose};
use crate::slice::Slice;
use crate::stall::Planned;
use cowshed_layout::qcow2::{Cluster, L1Entry, L2Entry, Subcluster, SubclusterBitmap};
use cowshed_types::{Error, Extent, GuestOffset, HostOffset, Mapping, StoredIn, slip, without};

/// The most extents that an [`ExtentList`] holds.
pub const MAX_EXTENTS: usize = 16;

/// A short list of extents without heap memory. Neighbours that continue each other are joined.
#[derive(Clone, Debug)]
pub struct ExtentList {
    items: [Extent; MAX_EXTENTS],
    len: usize,
}

impl Default for ExtentList {
    fn default() -> Self {
        let none = Extent { guest: GuestOffset(0), len: 0, mapping: Mapping::Unallocated };
        ExtentList { items: [none; MAX_EXTENTS], len: 0 }
    }
}

impl std::ops::Deref for ExtentList {
    type Target = [Extent];
    #[inline]
    fn deref(&self) -> &[Extent] {
        &self.items[..self.len]
    }
}

impl ExtentList {
    /// Empties the list.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// Appends; false when the list is full.
    #[inline]
    fn push(&mut self, extent: Extent) -> bool {
        if self.len > 0 {
            let last = &mut self.items[self.len - 1];
            if !without!("joined_extents") && continues(last, &extent) {
                last.len += extent.len;
                return true;
            }
        }
        if self.len == MAX_EXTENTS {
            return false;
        }
        self.items[self.len] = extent;
        self.len += 1;
        true
    }
}

/// True when `next` is the continuation of `last` in guest and host.
#[inline]
fn continues(last: &Extent, next: &Extent) -> bool {
    match (last.mapping, next.mapping) {
        (
            Mapping::Data { host, file, encrypted },
            Mapping::Data { host: next_host, file: next_file, encrypted: next_encrypted },
        ) => host + last.len == next_host && file == next_file && encrypted == next_encrypted,
        (Mapping::Zero { host: None }, Mapping::Zero { host: None }) => true,
        (Mapping::Zero { host: Some(host) }, Mapping::Zero { host: Some(next) }) => host + last.len == next,
        (Mapping::Unallocated, Mapping::Unallocated) => true,
        _ => false,
    }
}

impl Engine {
    /// Maps the guest range from `guest` on and returns how many bytes the extents in `out` cover. The count is at
    /// least 1 and at most `len`, and less when the list is full or a further table isn't cached. The caller holds a
    /// [`crate::EpochGuard`] from before this call until the I/O on these extents has completed.
    pub fn map(&self, guest: GuestOffset, len: u64, out: &mut ExtentList) -> Planned<u64> {
        self.walk::<false>(guest, len, out)
    }

    /// As [`Engine::map`], as far as the range may be written in place without the engine's lock. These are clusters of
    /// refcount one (COPIED), with every touched subcluster allocated. 0 when already the first byte needs
    /// [`Engine::begin_allocate`].
    pub fn map_overwrite(&self, guest: GuestOffset, len: u64, out: &mut ExtentList) -> Planned<u64> {
        self.walk::<true>(guest, len, out)
    }

    fn walk<const OVERWRITE: bool>(&self, guest: GuestOffset, len: u64, out: &mut ExtentList) -> Planned<u64> {
        out.clear();
        let mut done = 0;
        while done < len {
            let at = guest + done;
            let l1_index = self.geometry.l1_index(at) as usize;
            if L1Entry(self.directory.l1(l1_index)).offset().0 == 0 {
                if OVERWRITE {
                    break;
                }
                let run = (self.geometry.l2_coverage() - at.within(self.geometry.l2_coverage_bits())).min(len - done);
                if !out.push(Extent { guest: at, len: run, mapping: Mapping::Unallocated }) {
                    break;
                }
                done += run;
                continue;
            }
            let (slice, word) = self.slice_position(self.geometry.l2_index(at));
            let before = (out.len, out.len.checked_sub(1).map(|last| out.items[last]));
            let walked = self.directory.with_slice(l1_index, slice, |slice| {
                slice.read(|slice| {
                    out.len = before.0;
                    if let Some(last) = before.1 {
                        out.items[before.0 - 1] = last;
                    }
                    self.walk_slice::<OVERWRITE>(slice, word, at, len - done, out)
                })
            });
            match walked {
                Some(Ok((bytes, more))) => {
                    self.pins.count_hit();
                    done += bytes;
                    if !more {
                        break;
                    }
                }
                Some(Err(error)) if done == 0 => return Err(error.into()),
                Some(Err(_)) => break,
                None if done > 0 => break,
                None => self.slice_for_reading(l1_index, slice)?,
            }
        }
        Ok(done)
    }

    /// Walks entries of one slice. Returns the bytes mapped, and whether the walk may go on behind the slice.
    fn walk_slice<const OVERWRITE: bool>(
        &self,
        slice: &Slice,
        mut word: usize,
        guest: GuestOffset,
        len: u64,
        out: &mut ExtentList,
    ) -> Result<(u64, bool), Error> {
        let cluster_bits = self.geometry.cluster_bits();
        let words = self.slice_bytes() as usize / 8;
        let step = self.geometry.l2_entry_size() as usize / 8;
        let purpose = if OVERWRITE { Purpose::Write } else { Purpose::Read };
        let mut done = 0;
        while done < len && word < words {
            let at = guest + done;
            let within = at.within(cluster_bits);
            let want = (self.geometry.cluster_size() - within).min(len - done);
            let (entry, bitmap) = self.entry_of(slice, word);
            let entry = L2Entry(entry);
            let cluster = match entry.cluster(self.config.format) {
                Ok(cluster) => cluster,
                Err(_) if done > 0 => return Ok((done, false)),
                Err(error) => return Err(self.entry_damage(error, at, entry, purpose)),
            };
            if OVERWRITE {
                match cluster {
                    Cluster::Data { host } if self.is_exclusive(entry) => {
                        if !self.config.format.data_file && self.metadata.contains(self.geometry.host_cluster(host)) {
                            // The holder of the lock names the damage: `begin_allocate` meets the same entry.
                            return Ok((done, false));
                        }
                    }
                    _ => return Ok((done, false)),
                }
            }
            if self.geometry.extended_l2() && !matches!(cluster, Cluster::Compressed(_)) {
                let walked = self.walk_subclusters::<OVERWRITE>(cluster, bitmap, at, want, out);
                let (bytes, more) = walked.map_err(|error| self.entry_damage(error, at, entry, purpose))?;
                done += bytes;
                if !more {
                    return Ok((done, false));
                }
            } else {
                let mapping = self.mapping_of(cluster, within);
                if !out.push(Extent { guest: at, len: want, mapping }) {
                    return Ok((done, false));
                }
                done += want;
            }
            word += step;
        }
        Ok((done, true))
    }

    /// True when a data cluster may be written in place: its refcount is one. In a data file nothing is shared.
    #[inline]
    pub(crate) fn is_exclusive(&self, entry: L2Entry) -> bool {
        entry.is_copied() || slip!("shared_clusters_written_in_place") || self.config.format.data_file
    }

    pub(crate) fn stored_in(&self) -> StoredIn {
        if self.config.format.data_file { StoredIn::DataFile } else { StoredIn::Image }
    }

    #[inline]
    pub(crate) fn mapping_of(&self, cluster: Cluster, within: u64) -> Mapping {
        match cluster {
            Cluster::Unallocated => Mapping::Unallocated,
            Cluster::Zero { host } => Mapping::Zero { host: host.map(|host| host + within) },
            Cluster::Data { host } => {
                Mapping::Data { host: host + within, file: self.stored_in(), encrypted: self.config.encrypted }
            }
            Cluster::Compressed(descriptor) => {
                Mapping::Compressed { host: descriptor.host_offset, len: descriptor.len_max(), skip: within }
            }
        }
    }

    fn walk_subclusters<const OVERWRITE: bool>(
        &self,
        cluster: Cluster,
        bitmap: u64,
        guest: GuestOffset,
        len: u64,
        out: &mut ExtentList,
    ) -> Result<(u64, bool), Error> {
        let bitmap = SubclusterBitmap(bitmap);
        if OVERWRITE && !bitmap.is_valid() {
            // `begin_allocate` meets the same entry and reports its fault.
            return Ok((0, false));
        }
        let host = match cluster {
            Cluster::Data { host } => Some(host),
            _ => None,
        };
        let mut done = 0;
        while done < len {
            let at = guest + done;
            let (kind, count) = bitmap.run(self.geometry.subcluster_index(at));
            let run_bytes = u64::from(count) * self.geometry.subcluster_size();
            let run = (run_bytes - at.within(self.geometry.subcluster_bits())).min(len - done);
            let is_slip = OVERWRITE && slip!("unallocated_subclusters_written_in_place") && host.is_some();
            let kind = if is_slip { Subcluster::Data } else { kind };
            if OVERWRITE && kind != Subcluster::Data {
                return Ok((done, false));
            }
            let here = host.map(|host| host + at.within(self.geometry.cluster_bits()));
            let mapping = subcluster_mapping(kind, here, self.stored_in(), self.config.encrypted, bitmap)?;
            if !out.push(Extent { guest: at, len: run, mapping }) {
                return Ok((done, false));
            }
            done += run;
        }
        Ok((done, true))
    }
}

pub(crate) fn subcluster_mapping(
    kind: Subcluster,
    host: Option<HostOffset>,
    file: StoredIn,
    encrypted: bool,
    bitmap: SubclusterBitmap,
) -> Result<Mapping, Error> {
    match (kind, host) {
        (Subcluster::Unallocated, _) => Ok(Mapping::Unallocated),
        (Subcluster::Zero, host) => Ok(Mapping::Zero { host }),
        (Subcluster::Data, Some(host)) => Ok(Mapping::Data { host, file, encrypted }),
        (Subcluster::Data, None) => {
            let value = format!("{:#018x}", bitmap.0);
            Err(Error::invalid_image("subcluster_bitmap", value, "subclusters are allocated in a cluster that is not"))
        }
        (Subcluster::Invalid, _) => {
            let value = format!("{:#018x}", bitmap.0);
            Err(Error::invalid_image("subcluster_bitmap", value, "a subcluster is both allocated and zero"))
        }
    }
}
