// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Entries of the L1, L2 and refcount tables ("Cluster mapping", "Host cluster management").

use super::features::{INCOMPAT_DATA_FILE, INCOMPAT_EXTL2};
use super::{Geometry, Header};
use cowshed_types::{Errno, Error, HostOffset, Result};

/// The unit in which the length of compressed data is counted, in bytes.
pub const SECTOR_SIZE: u64 = 512;

/// Bits 9–55: the host offset of an L1 or standard L2 entry.
const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
/// Bit 63: the refcount of the entry's target is exactly one.
const COPIED: u64 = 1 << 63;
/// Bit 62 of an L2 entry.
const COMPRESSED: u64 = 1 << 62;
/// Bit 0 of a standard L2 entry, version 3 without extended L2 entries.
const ZERO: u64 = 1;

/// An entry of an L1 table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct L1Entry(pub u64);

impl L1Entry {
    /// No L2 table.
    pub const UNALLOCATED: Self = Self(0);

    /// Points to the L2 table at `offset` (bits outside of 9–55 are a bug of the caller).
    #[inline]
    pub const fn new(offset: HostOffset, copied: bool) -> Self {
        debug_assert!(offset.0 & !OFFSET_MASK == 0);
        Self((offset.0 & OFFSET_MASK) | if copied { COPIED } else { 0 })
    }

    /// Host offset of the L2 table; 0: there is none. Alignment to a cluster isn't checked here.
    #[inline]
    pub const fn offset(self) -> HostOffset {
        HostOffset(self.0 & OFFSET_MASK)
    }

    /// True when there is an L2 table.
    #[inline]
    pub const fn is_allocated(self) -> bool {
        self.0 & OFFSET_MASK != 0
    }

    /// Bit 63: the L2 table's refcount is exactly one (accurate in the active L1 table only).
    #[inline]
    pub const fn is_copied(self) -> bool {
        self.0 & COPIED != 0
    }

    /// With bit 63 as given.
    #[inline]
    #[must_use]
    pub const fn with_copied(self, copied: bool) -> Self {
        Self((self.0 & !COPIED) | if copied { COPIED } else { 0 })
    }

    /// The reserved bits 0–8 and 56–62 that are set.
    #[inline]
    pub const fn reserved_bits(self) -> u64 {
        self.0 & !(OFFSET_MASK | COPIED)
    }

    /// Where the L2 table starts, or `None` without one; an offset that isn't cluster-aligned is an error.
    pub fn table(self, geometry: Geometry) -> Result<Option<HostOffset>> {
        let offset = self.offset();
        if !offset.is_aligned(geometry.cluster_bits()) {
            return Err(Error::invalid_image(
                "l1_entry",
                Hex(self.0),
                "the offset of an L2 table is not cluster-aligned",
            ));
        }
        Ok((offset.0 != 0).then_some(offset))
    }
}

/// The first 64 bits of an entry of an L2 table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct L2Entry(pub u64);

impl L2Entry {
    /// Nothing mapped.
    pub const UNALLOCATED: Self = Self(0);
    /// Reads as zeroes, no host cluster (version 3 without extended L2 entries).
    pub const ZERO_PLAIN: Self = Self(ZERO);

    /// A standard cluster at `offset` (bits outside of 9–55 are a bug of the caller).
    #[inline]
    pub const fn data(offset: HostOffset, copied: bool) -> Self {
        debug_assert!(offset.0 & !OFFSET_MASK == 0);
        Self((offset.0 & OFFSET_MASK) | if copied { COPIED } else { 0 })
    }

    /// Reads as zeroes with a host cluster kept underneath (version 3 without extended L2 entries).
    #[inline]
    pub const fn zero_allocated(offset: HostOffset, copied: bool) -> Self {
        Self(Self::data(offset, copied).0 | ZERO)
    }

    /// A compressed cluster, or `None` where the descriptor doesn't fit the entry's fields.
    pub const fn compressed(descriptor: CompressedDescriptor, cluster_bits: u32) -> Option<Self> {
        let shift = CompressedDescriptor::offset_bits(cluster_bits);
        let CompressedDescriptor { host_offset, sectors } = descriptor;
        if sectors == 0 || sectors > CompressedDescriptor::max_sectors(cluster_bits) {
            return None;
        }
        if host_offset.0 > CompressedDescriptor::max_offset(cluster_bits) {
            return None;
        }
        Some(Self(COMPRESSED | (sectors as u64 - 1) << shift | host_offset.0))
    }

    /// Bits 9–55, meaningful in standard entries only.
    #[inline]
    pub const fn offset(self) -> HostOffset {
        HostOffset(self.0 & OFFSET_MASK)
    }

    /// Bit 63: a standard cluster whose refcount is exactly one (accurate below the active L1 table only).
    #[inline]
    pub const fn is_copied(self) -> bool {
        self.0 & COPIED != 0
    }

    /// With bit 63 as given.
    #[inline]
    #[must_use]
    pub const fn with_copied(self, copied: bool) -> Self {
        Self((self.0 & !COPIED) | if copied { COPIED } else { 0 })
    }

    /// Bit 62: a compressed cluster.
    #[inline]
    pub const fn is_compressed(self) -> bool {
        self.0 & COMPRESSED != 0
    }

    /// Bit 0 of a standard entry: reads as zeroes. Meaningless in version 2, with extended L2 entries, and in
    /// compressed entries (where this is a bit of the offset, so the answer is false).
    #[inline]
    pub const fn is_zero(self) -> bool {
        self.0 & (ZERO | COMPRESSED) == ZERO
    }

    /// The reserved bits of a standard entry that are set: 1–8 and 56–61. 0 for compressed entries.
    #[inline]
    pub const fn reserved_bits(self) -> u64 {
        if self.is_compressed() { 0 } else { self.0 & !(OFFSET_MASK | COPIED | COMPRESSED | ZERO) }
    }

    /// The descriptor of a compressed entry, `None` for standard ones. Offset bits above 55 are kept, so that a caller
    /// sees an offset far past the end of any file instead of a wrong one.
    #[inline]
    pub const fn compressed_descriptor(self, cluster_bits: u32) -> Option<CompressedDescriptor> {
        if !self.is_compressed() {
            return None;
        }
        let shift = CompressedDescriptor::offset_bits(cluster_bits);
        let sectors_mask = (1u64 << (62 - shift)) - 1;
        Some(CompressedDescriptor {
            host_offset: HostOffset(self.0 & ((1 << shift) - 1)),
            sectors: (self.0 >> shift & sectors_mask) as u32 + 1,
        })
    }

    /// The cluster that the entry describes. Checked are the alignment, the zero flag where the format has none, and
    /// compression where the format forbids it. Reserved bits are ignored (as by other readers; `check` reports them by
    /// [`L2Entry::reserved_bits`]).
    #[inline]
    pub fn cluster(self, format: L2Format) -> Result<Cluster> {
        if self.is_compressed() {
            return self.compressed_cluster(format);
        }
        let host = self.offset();
        if !host.is_aligned(format.geometry.cluster_bits()) {
            return Err(self.error("the offset of a data cluster is not cluster-aligned"));
        }
        // "The offset may only be 0 with bit 63 set when an external data file is used."
        let allocated = host.0 != 0 || (format.data_file && self.is_copied());
        if self.is_zero() && !format.geometry.extended_l2() {
            if format.version < 3 {
                return Err(self.error("zero cluster in a version 2 image"));
            }
            return Ok(Cluster::Zero { host: allocated.then_some(host) });
        }
        Ok(if allocated { Cluster::Data { host } } else { Cluster::Unallocated })
    }

    #[cold]
    fn compressed_cluster(self, format: L2Format) -> Result<Cluster> {
        if format.data_file {
            return Err(self.error("compressed cluster in an image with an external data file"));
        }
        let cluster_bits = format.geometry.cluster_bits();
        match self.compressed_descriptor(cluster_bits) {
            Some(descriptor) if descriptor.host_offset.0 <= CompressedDescriptor::max_offset(cluster_bits) => {
                Ok(Cluster::Compressed(descriptor))
            }
            // Past the end of any file: the request fails as it does there.
            _ => Err(self.error("compressed cluster with reserved offset bits set").with_errno(Errno::EIO)),
        }
    }

    #[cold]
    fn error(self, message: &'static str) -> Error {
        Error::invalid_image("l2_entry", Hex(self.0), message)
    }
}

/// The properties of an image that decide how its L2 entries are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct L2Format {
    /// Sizes, and whether entries are extended.
    pub geometry: Geometry,
    /// 2 or 3.
    pub version: u32,
    /// Guest clusters are in an external data file.
    pub data_file: bool,
}

impl L2Format {
    /// The format that a header describes.
    pub fn of(header: &Header) -> Result<Self> {
        debug_assert!(header.version >= 3 || header.incompatible_features & INCOMPAT_EXTL2 == 0);
        Ok(L2Format {
            geometry: Geometry::of(header)?,
            version: header.version,
            data_file: header.incompatible_features & INCOMPAT_DATA_FILE != 0,
        })
    }
}

/// The state of a guest cluster, as its L2 entry gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cluster {
    /// No host cluster. With extended L2 entries the bitmap may still mark single subclusters as zero.
    Unallocated,
    /// Reads as zeroes; never with extended L2 entries.
    Zero {
        /// The cluster that stays allocated underneath.
        host: Option<HostOffset>,
    },
    /// A host cluster. With extended L2 entries the bitmap marks the subclusters that are in it.
    Data {
        /// Where it starts, in the image or in the external data file.
        host: HostOffset,
    },
    /// Compressed data.
    Compressed(CompressedDescriptor),
}

/// The place of a compressed cluster's data ("Compressed Clusters Descriptor").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CompressedDescriptor {
    /// First byte of the compressed data; usually not aligned to anything.
    pub host_offset: HostOffset,
    /// 512-byte sectors that the data touches, the one with its first byte included: 1 more than the entry stores.
    pub sectors: u32,
}

impl CompressedDescriptor {
    /// The descriptor for `len` bytes (not 0) of compressed data at `host_offset`, or `None` past 2^64 or with more
    /// than 2^32 sectors.
    pub const fn new(host_offset: HostOffset, len: u64) -> Option<Self> {
        if len == 0 {
            return None;
        }
        let Some(end) = host_offset.0.checked_add(len) else { return None };
        let sectors = (end - 1) / SECTOR_SIZE - host_offset.0 / SECTOR_SIZE + 1;
        if sectors > u32::MAX as u64 {
            return None;
        }
        Some(Self { host_offset, sectors: sectors as u32 })
    }

    /// Upper bound of the data's length in bytes: up to the end of the last sector. Never 0.
    #[inline]
    pub const fn len_max(self) -> u64 {
        self.sectors as u64 * SECTOR_SIZE - (self.host_offset.0 & (SECTOR_SIZE - 1))
    }

    /// First byte after the last sector, or `None` past 2^64.
    #[inline]
    pub const fn end(self) -> Option<HostOffset> {
        self.host_offset.checked_add(self.len_max())
    }

    /// The specification's x: the width of the offset field. The rest up to bit 61 counts sectors.
    #[inline]
    pub const fn offset_bits(cluster_bits: u32) -> u32 {
        62 - (cluster_bits - 8)
    }

    /// Largest host offset that an entry can hold: the field's width, and never above bit 55.
    #[inline]
    pub const fn max_offset(cluster_bits: u32) -> u64 {
        let bits = Self::offset_bits(cluster_bits);
        (1 << if bits > 56 { 56 } else { bits }) - 1
    }

    /// Largest number of sectors that an entry can hold.
    #[inline]
    pub const fn max_sectors(cluster_bits: u32) -> u32 {
        1 << (62 - Self::offset_bits(cluster_bits))
    }
}

/// An entry of the refcount table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RefcountTableEntry(pub u64);

impl RefcountTableEntry {
    /// Points to the refcount block at `offset` (a multiple of 512).
    #[inline]
    pub const fn new(offset: HostOffset) -> Self {
        debug_assert!(offset.0 & 0x1ff == 0);
        Self(offset.0 & !0x1ff)
    }

    /// Host offset of the refcount block; 0: there is none. Bits 9–63; alignment to a cluster isn't checked here.
    #[inline]
    pub const fn offset(self) -> HostOffset {
        HostOffset(self.0 & !0x1ff)
    }

    /// The reserved bits 0–8 that are set.
    #[inline]
    pub const fn reserved_bits(self) -> u64 {
        self.0 & 0x1ff
    }

    /// Where the refcount block starts, or `None` without one; an offset that isn't cluster-aligned is an error.
    pub fn block(self, geometry: Geometry) -> Result<Option<HostOffset>> {
        let offset = self.offset();
        if !offset.is_aligned(geometry.cluster_bits()) {
            let message = "the offset of a refcount block is not cluster-aligned";
            return Err(Error::invalid_image("refcount_table_entry", Hex(self.0), message));
        }
        Ok((offset.0 != 0).then_some(offset))
    }
}

/// Shows an entry as people read it.
struct Hex(u64);

impl std::fmt::Display for Hex {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#018x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn format(cluster_bits: u32, extended: bool, version: u32, data_file: bool) -> L2Format {
        L2Format { geometry: Geometry::new(cluster_bits, 4, extended).unwrap(), version, data_file }
    }

    #[test]
    fn standard_entries() {
        let v3 = format(16, false, 3, false);
        let host = HostOffset(0x5_0000);
        assert_eq!(L2Entry(0).cluster(v3).unwrap(), Cluster::Unallocated);
        assert_eq!(L2Entry(1).cluster(v3).unwrap(), Cluster::Zero { host: None });
        assert_eq!(L2Entry::data(host, true).0, 0x8000_0000_0005_0000);
        assert_eq!(L2Entry::data(host, true).cluster(v3).unwrap(), Cluster::Data { host });
        assert_eq!(L2Entry::zero_allocated(host, true).cluster(v3).unwrap(), Cluster::Zero { host: Some(host) });
        let error = L2Entry(0x200).cluster(v3).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the offset of a data cluster is not cluster-aligned (l2_entry is 0x0000000000000200)"
        );
    }

    #[test]
    fn version_2_has_no_zero_flag() {
        assert!(L2Entry(1).cluster(format(16, false, 2, false)).is_err());
    }

    #[test]
    fn extended_entries_ignore_bit_0() {
        assert_eq!(L2Entry(1).cluster(format(16, true, 3, false)).unwrap(), Cluster::Unallocated);
    }

    #[test]
    fn data_file_maps_offset_0() {
        let external = format(16, false, 3, true);
        let zero = HostOffset(0);
        assert_eq!(L2Entry::data(zero, true).cluster(external).unwrap(), Cluster::Data { host: zero });
        assert_eq!(L2Entry::data(zero, true).cluster(format(16, false, 3, false)).unwrap(), Cluster::Unallocated);
        assert!(L2Entry(COMPRESSED | 0x5_0000).cluster(external).is_err());
    }

    #[test]
    fn compressed_fields_of_64k_clusters() {
        // x = 62 - (16 - 8) = 54: eight bits of sectors.
        let entry = L2Entry(COMPRESSED | 3 << 54 | 0x5_0123);
        let descriptor = CompressedDescriptor { host_offset: HostOffset(0x5_0123), sectors: 4 };
        assert_eq!(entry.compressed_descriptor(16), Some(descriptor));
        assert_eq!(descriptor.len_max(), 4 * 512 - 0x123);
        assert_eq!(L2Entry::compressed(descriptor, 16), Some(entry));
        assert_eq!(entry.cluster(format(16, false, 3, false)).unwrap(), Cluster::Compressed(descriptor));
    }

    #[test]
    fn compressed_offsets_above_bit_55_are_refused() {
        // 512-byte clusters: x = 61, so bits 56-60 belong to the field but are reserved.
        assert_eq!(CompressedDescriptor::offset_bits(9), 61);
        assert!(L2Entry(COMPRESSED | 1 << 56 | 512).cluster(format(9, false, 3, false)).is_err());
        let descriptor = CompressedDescriptor { host_offset: HostOffset(1 << 56), sectors: 1 };
        assert_eq!(L2Entry::compressed(descriptor, 9), None);
        // 2 MiB clusters: x = 49.
        let descriptor = CompressedDescriptor { host_offset: HostOffset(1 << 49), sectors: 1 };
        assert_eq!(L2Entry::compressed(descriptor, 21), None);
    }

    #[test]
    fn refcount_table_entries() {
        let geometry = Geometry::new(16, 4, false).unwrap();
        assert_eq!(RefcountTableEntry(0).block(geometry).unwrap(), None);
        assert_eq!(RefcountTableEntry(0x2_0001).block(geometry).unwrap(), Some(HostOffset(0x2_0000)));
        assert_eq!(RefcountTableEntry(0x2_0001).reserved_bits(), 1);
        assert!(RefcountTableEntry(0x200).block(geometry).is_err());
    }

    proptest! {
        #[test]
        fn compressed_round_trip(cluster_bits in 9u32..=21, offset: u64, len: u64) {
            let offset = HostOffset(offset & CompressedDescriptor::max_offset(cluster_bits));
            let len = len % (1 << cluster_bits) + 1;
            let descriptor = CompressedDescriptor::new(offset, len).unwrap();
            prop_assert!(descriptor.len_max() >= len && descriptor.len_max() < len + 512);
            // A compressed cluster is shorter than a cluster, so at worst it touches one sector more than a cluster has.
            match L2Entry::compressed(descriptor, cluster_bits) {
                Some(entry) => {
                    prop_assert!(entry.is_compressed() && !entry.is_copied() && !entry.is_zero());
                    prop_assert_eq!(entry.compressed_descriptor(cluster_bits), Some(descriptor));
                }
                None => prop_assert!(descriptor.sectors > CompressedDescriptor::max_sectors(cluster_bits)),
            }
        }

        #[test]
        fn any_entry_decodes_without_panic(entry: u64, cluster_bits in 9u32..=21, version in 2u32..=3, data_file: bool) {
            for extended in [false, cluster_bits >= 14] {
                let _ = L2Entry(entry).cluster(format(cluster_bits, extended, version, data_file));
            }
            let geometry = Geometry::new(cluster_bits, 4, false).unwrap();
            let rebuilt = L1Entry::new(L1Entry(entry).offset(), L1Entry(entry).is_copied());
            prop_assert_eq!(rebuilt.0 | L1Entry(entry).reserved_bits(), entry);
            let _ = L1Entry(entry).table(geometry);
            let _ = RefcountTableEntry(entry).block(geometry);
        }
    }
}
