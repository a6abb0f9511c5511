// SPDX-License-Identifier: Apache-2.0 OR MIT
//! VMDK, as VMware's technical note "Virtual Disk Format 5.0" describes it: the text descriptor, the headers of sparse
//! extents, and the markers of stream-optimised ones. Numbers are little-endian, offsets count sectors.

mod descriptor;
mod sparse;

pub use descriptor::{Access, Descriptor, ExtentKind, ExtentLine, NO_PARENT, limits};
pub use sparse::{
    COMPRESSED_GRAIN_HEADER_BYTES, CompressedGrain, FOOTER_FROM_END_BYTES, Grain, HEADER_BYTES, SparseHeader,
    SparseKind,
};

/// Unit of every offset and length.
pub const SECTOR_BYTES: u64 = 512;

/// Sectors as bytes; `None` past 2^63 (no file is that long).
pub fn sectors_to_bytes(sectors: u64) -> Option<u64> {
    sectors.checked_mul(SECTOR_BYTES).filter(|bytes| i64::try_from(*bytes).is_ok())
}
