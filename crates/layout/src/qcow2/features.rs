// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The three feature bit masks of a version 3 header ("Header", bytes 72–95).

/// Incompatible, bit 0: refcounts may be inconsistent, scan before use.
pub const INCOMPAT_DIRTY: u64 = 1 << 0;
/// Incompatible, bit 1: any structure may be corrupt, don't write (but for repair).
pub const INCOMPAT_CORRUPT: u64 = 1 << 1;
/// Incompatible, bit 2: guest clusters are in an external data file.
pub const INCOMPAT_DATA_FILE: u64 = 1 << 2;
/// Incompatible, bit 3: the compression type is not deflate.
pub const INCOMPAT_COMPRESSION: u64 = 1 << 3;
/// Incompatible, bit 4: L2 entries are 16 bytes with a subcluster bitmap.
pub const INCOMPAT_EXTL2: u64 = 1 << 4;
/// All incompatible bits that this crate knows.
pub const INCOMPAT_KNOWN: u64 =
    INCOMPAT_DIRTY | INCOMPAT_CORRUPT | INCOMPAT_DATA_FILE | INCOMPAT_COMPRESSION | INCOMPAT_EXTL2;

/// Compatible, bit 0: refcount updates may be postponed under the dirty bit.
pub const COMPAT_LAZY_REFCOUNTS: u64 = 1 << 0;
/// All compatible bits that this crate knows.
pub const COMPAT_KNOWN: u64 = COMPAT_LAZY_REFCOUNTS;

/// Autoclear, bit 0: the bitmaps extension is consistent.
pub const AUTOCLEAR_BITMAPS: u64 = 1 << 0;
/// Autoclear, bit 1: the external data file is a standalone raw image.
pub const AUTOCLEAR_RAW_DATA: u64 = 1 << 1;
/// Autoclear, bit 62, ours: the bitmap journal counts: no other program has written to the image since. The
/// specification reserves bits 2 to 63; a program that doesn't know one clears it before writing, which is the purpose.
/// Never beside internal snapshots, which QEMU's repair drops then.
pub const AUTOCLEAR_BITMAP_JOURNAL: u64 = 1 << 62;
/// All autoclear bits that this crate knows.
pub const AUTOCLEAR_KNOWN: u64 = AUTOCLEAR_BITMAPS | AUTOCLEAR_RAW_DATA | AUTOCLEAR_BITMAP_JOURNAL;

/// The three masks of bits; the discriminant is the number used by the feature name table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum FeatureKind {
    /// An implementation that doesn't know the bit must refuse the image.
    Incompatible = 0,
    /// An implementation that doesn't know the bit may ignore it.
    Compatible = 1,
    /// An implementation that doesn't know the bit clears it before it writes.
    Autoclear = 2,
}

/// The bits with a name: the contents of a fresh header's feature name table, in this order.
pub const NAMES: [(FeatureKind, u8, &str); 8] = [
    (FeatureKind::Incompatible, 0, "dirty bit"),
    (FeatureKind::Incompatible, 1, "corrupt bit"),
    (FeatureKind::Incompatible, 2, "external data file"),
    (FeatureKind::Incompatible, 3, "compression type"),
    (FeatureKind::Incompatible, 4, "extended L2 entries"),
    (FeatureKind::Compatible, 0, "lazy refcounts"),
    (FeatureKind::Autoclear, 0, "bitmaps"),
    (FeatureKind::Autoclear, 1, "raw external data"),
];
