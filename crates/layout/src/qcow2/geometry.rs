// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The arithmetic of an image's tables. All of it follows from cluster size, L2 entry width and refcount width.

use super::features::INCOMPAT_EXTL2;
use super::validate::{self, limits};
use super::{Header, SUBCLUSTERS_PER_CLUSTER};
use cowshed_types::{GuestOffset, HostOffset, Result};

/// Sizes and index arithmetic of one image. Cheap to copy; every method is a few shifts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Geometry {
    cluster_bits: u8,
    refcount_order: u8,
    /// log2 of the bytes of an L2 entry: 3, or 4 with extended L2 entries.
    l2_entry_bits: u8,
}

impl Geometry {
    /// Checks the ranges: `cluster_bits` 9–21 (14–21 with extended L2 entries), `refcount_order` 0–6.
    pub fn new(cluster_bits: u32, refcount_order: u32, extended_l2: bool) -> Result<Self> {
        validate::cluster_bits(cluster_bits)?;
        validate::refcount_order(refcount_order)?;
        if extended_l2 {
            validate::extended_l2(cluster_bits)?;
        }
        // In range of u8: checked above.
        Ok(Geometry {
            cluster_bits: cluster_bits as u8,
            refcount_order: refcount_order as u8,
            l2_entry_bits: if extended_l2 { 4 } else { 3 },
        })
    }

    /// The geometry that a header describes.
    pub fn of(header: &Header) -> Result<Self> {
        let extended_l2 = header.incompatible_features & INCOMPAT_EXTL2 != 0;
        Self::new(header.cluster_bits, header.refcount_order, extended_l2)
    }

    /// log2 of the cluster size, 9–21.
    #[inline]
    pub const fn cluster_bits(self) -> u32 {
        self.cluster_bits as u32
    }

    /// Cluster size in bytes.
    #[inline]
    pub const fn cluster_size(self) -> u64 {
        1 << self.cluster_bits
    }

    /// log2 of the refcount width in bits, 0–6.
    #[inline]
    pub const fn refcount_order(self) -> u32 {
        self.refcount_order as u32
    }

    /// Refcount width in bits, 1–64.
    #[inline]
    pub const fn refcount_bits(self) -> u32 {
        1 << self.refcount_order
    }

    /// Largest refcount that the width can hold.
    #[inline]
    pub const fn max_refcount(self) -> u64 {
        super::refcount::max_value(self.refcount_order as u32)
    }

    /// True with 16-byte L2 entries, that is with subclusters.
    #[inline]
    pub const fn extended_l2(self) -> bool {
        self.l2_entry_bits == 4
    }

    /// Bytes of an L2 entry: 8 or 16.
    #[inline]
    pub const fn l2_entry_size(self) -> u64 {
        1 << self.l2_entry_bits
    }

    /// log2 of [`Geometry::l2_entries`].
    #[inline]
    pub const fn l2_bits(self) -> u32 {
        (self.cluster_bits - self.l2_entry_bits) as u32
    }

    /// Entries of an L2 table.
    #[inline]
    pub const fn l2_entries(self) -> u64 {
        1 << self.l2_bits()
    }

    /// log2 of the bytes of virtual disk that one L2 table maps.
    #[inline]
    pub const fn l2_coverage_bits(self) -> u32 {
        self.cluster_bits as u32 + self.l2_bits()
    }

    /// Bytes of virtual disk that one L2 table maps.
    #[inline]
    pub const fn l2_coverage(self) -> u64 {
        1 << self.l2_coverage_bits()
    }

    /// Subclusters of a cluster: 32, or 1 without extended L2 entries.
    #[inline]
    pub const fn subclusters(self) -> u32 {
        if self.extended_l2() { SUBCLUSTERS_PER_CLUSTER } else { 1 }
    }

    /// log2 of the subcluster size; the cluster's without extended L2 entries.
    #[inline]
    pub const fn subcluster_bits(self) -> u32 {
        if self.extended_l2() { self.cluster_bits as u32 - 5 } else { self.cluster_bits as u32 }
    }

    /// Subcluster size in bytes; the cluster's without extended L2 entries.
    #[inline]
    pub const fn subcluster_size(self) -> u64 {
        1 << self.subcluster_bits()
    }

    /// Index into the L1 table. May lie past its end: the table's size is the header's word.
    #[inline]
    pub const fn l1_index(self, guest: GuestOffset) -> u64 {
        guest.0 >> self.l2_coverage_bits()
    }

    /// Index into the L2 table.
    #[inline]
    pub const fn l2_index(self, guest: GuestOffset) -> u64 {
        (guest.0 >> self.cluster_bits) & (self.l2_entries() - 1)
    }

    /// Index of the subcluster within its cluster; 0 without extended L2 entries.
    #[inline]
    pub const fn subcluster_index(self, guest: GuestOffset) -> u32 {
        (guest.within(self.cluster_bits as u32) >> self.subcluster_bits()) as u32
    }

    /// First guest byte that entry `l2_index` of the table behind `l1_index` maps, or `None` past 2^64.
    #[inline]
    pub const fn guest_at(self, l1_index: u64, l2_index: u64) -> Option<GuestOffset> {
        if l1_index > u64::MAX >> self.l2_coverage_bits() || l2_index >= self.l2_entries() {
            return None;
        }
        Some(GuestOffset(l1_index << self.l2_coverage_bits() | l2_index << self.cluster_bits))
    }

    /// Offset within the cluster, in bytes.
    #[inline]
    pub const fn in_cluster(self, offset: u64) -> u64 {
        offset & (self.cluster_size() - 1)
    }

    /// `offset` rounded down to a cluster boundary.
    #[inline]
    pub const fn cluster_start(self, offset: u64) -> u64 {
        offset >> self.cluster_bits << self.cluster_bits
    }

    /// `bytes` rounded up to whole clusters, in bytes, or `None` past 2^64.
    #[inline]
    pub const fn round_up(self, bytes: u64) -> Option<u64> {
        match bytes.checked_add(self.cluster_size() - 1) {
            Some(sum) => Some(self.cluster_start(sum)),
            None => None,
        }
    }

    /// Clusters that `bytes` take.
    #[inline]
    pub const fn clusters(self, bytes: u64) -> u64 {
        bytes.div_ceil(self.cluster_size())
    }

    /// log2 of [`Geometry::refcount_block_entries`].
    #[inline]
    pub const fn refcount_block_bits(self) -> u32 {
        self.cluster_bits as u32 + 3 - self.refcount_order as u32
    }

    /// Host clusters that one refcount block counts.
    #[inline]
    pub const fn refcount_block_entries(self) -> u64 {
        1 << self.refcount_block_bits()
    }

    /// Index into the refcount table of the block that counts host cluster number `cluster`.
    #[inline]
    pub const fn refcount_table_index(self, cluster: u64) -> u64 {
        cluster >> self.refcount_block_bits()
    }

    /// Index within the refcount block of host cluster number `cluster`.
    #[inline]
    pub const fn refcount_block_index(self, cluster: u64) -> u64 {
        cluster & (self.refcount_block_entries() - 1)
    }

    /// Number of the host cluster at `host`.
    #[inline]
    pub const fn host_cluster(self, host: HostOffset) -> u64 {
        host.0 >> self.cluster_bits
    }

    /// Entries of the L1 table that a virtual disk of `size` bytes needs.
    #[inline]
    pub const fn l1_entries_needed(self, size: u64) -> u64 {
        size.div_ceil(self.l2_coverage())
    }

    /// Largest virtual size in bytes that an L1 table of [`limits::L1_BYTES`] maps.
    pub const fn max_virtual_size(self) -> u64 {
        let entries = limits::L1_BYTES / 8;
        if entries.leading_zeros() <= self.l2_coverage_bits() {
            return i64::MAX as u64;
        }
        entries << self.l2_coverage_bits()
    }
}
