// SPDX-License-Identifier: Apache-2.0 OR MIT
//! VMDK, as VMware's technical note "Virtual Disk Format 5.0" describes it: the text descriptor, the headers of sparse
//! extents, and the markers of stream-optimised ones. Numbers are little-endian, offsets count sectors.

use cowshed_types::{Error, Result};

mod create;
mod descriptor;
mod se_sparse;
mod sparse;
mod stream;

pub use create::{NEW_KINDS, NewVmdk, VmdkFiles, VmdkKind, VmwareIds, parent_cid_bits, with_cid, with_parent_cid};
pub use descriptor::{Access, Descriptor, ExtentKind, ExtentLine, NO_PARENT, limits};
pub use se_sparse::SeSparseHeader;
pub use sparse::{
    COMPRESSED_GRAIN_HEADER_BYTES, CompressedGrain, FOOTER_FROM_END_BYTES, Grain, HEADER_BYTES, SparseHeader,
    SparseKind,
};
pub use stream::{stream_end, stream_grain};

/// The first bytes of a space-efficient sparse extent: 0xcafebabe in 64 bits, little-endian.
const SE_SPARSE_MAGIC: [u8; 8] = 0xcafe_babe_u64.to_le_bytes();

/// Refuses a file that is a part of a disk alone, by its first bytes.
pub fn check_kind(first: &[u8]) -> Result<()> {
    if first.starts_with(&SE_SPARSE_MAGIC) {
        let message = "this is one extent of a disk of the kind seSparse, open the disk by its descriptor";
        let error = Error::invalid_image("magic", "seSparse", message);
        return Err(error.qemu("invalid VMDK image descriptor"));
    }
    Ok(())
}

/// The descriptor inside of a sparse extent; `start` is its first sector. One extent of several has none.
pub fn embedded_descriptor(text: &[u8], start: u64) -> Result<Descriptor> {
    if text.first().is_none_or(|byte| *byte == 0) {
        let message = "this is one extent of a disk, open the disk by its descriptor (there is no createType here)";
        return Err(Error::invalid_image("descriptorOffset", start, message));
    }
    Descriptor::parse(text)
}

/// Unit of every offset and length.
pub const SECTOR_BYTES: u64 = 512;

/// Sectors as bytes; `None` past 2^63 (no file is that long).
pub fn sectors_to_bytes(sectors: u64) -> Option<u64> {
    sectors.checked_mul(SECTOR_BYTES).filter(|bytes| i64::try_from(*bytes).is_ok())
}
