// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The facts that an engine needs of its image when it is opened.

use crate::structures::{OverlapSet, Structure};
use cowshed_layout::qcow2::{Geometry, L2Format};

/// Facts of the image and choices of the user; fixed while the image is open.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Geometry, version and whether an external data file holds the guest clusters.
    pub format: L2Format,
    /// Virtual size in bytes.
    pub size: u64,
    /// Guest clusters are stored encrypted.
    pub encrypted: bool,
    /// Lazy refcounts: refcounts reach the disk only on a clean close, under the dirty bit.
    pub lazy_refcounts: bool,
    /// Offset of the active L1 table.
    pub l1_offset: u64,
    /// Offset of the refcount table.
    pub refcount_table_offset: u64,
    /// Clusters that the refcount table takes.
    pub refcount_table_clusters: u64,
    /// Length of the image file in bytes.
    pub file_len: u64,
    /// The container can't grow: a block device, or an export of fixed size.
    pub fixed_length: bool,
    /// Space for metadata is reserved before a request needs it: [`crate::Stall::Reserve`]. Not so where the container has its
    /// space anyway (a block device).
    pub reserves: bool,
    /// Length of the external data file in bytes.
    pub data_file_len: u64,
    /// Bytes past the end of the file read as zeroes once the file grows (not so on block devices).
    pub new_space_is_zero: bool,
    /// Unit of metadata writes in bytes: the larger of 512 and the medium's alignment.
    pub sector_bytes: u64,
    /// Most bytes of L2 slices kept in memory; dirty and busy ones may exceed it for a while.
    pub l2_cache_bytes: u64,
    /// Bytes of an L2 slice: a power of two from 512 to the cluster size.
    pub l2_slice_bytes: u64,
    /// Most bytes of refcount blocks kept in memory.
    pub refcount_cache_bytes: u64,
    /// Discarded clusters keep their host cluster (`discard-no-unref`).
    pub discard_no_unref: bool,
    /// Structures that writes are checked against.
    pub overlap: OverlapSet,
    /// Further metadata in the image file: structure, offset and length in bytes.
    pub other_metadata: Vec<(Structure, u64, u64)>,
    /// Size of the backing file in bytes, `None` without one.
    pub backing_size: Option<u64>,
    /// The header names a backing file, whether it is there or was left out: zeroes must not be left to its absence.
    pub names_backing: bool,
}

impl EngineConfig {
    /// Shorthand for the geometry.
    pub(crate) fn geometry(&self) -> Geometry {
        self.format.geometry
    }
}
