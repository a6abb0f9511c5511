// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The limits of a node for its requests: `info --limits`, with QEMU's keys.

use crate::layer::{geometry, qcow2_layer};
use cowshed_image::Node;
use cowshed_image::node::ChildRole;
use cowshed_storage::DeviceQueue;

/// The alignment of memory where there is a choice, and the largest number of buffers of one request (`IOV_MAX`).
const OPT_MEM_ALIGNMENT_BYTES: u64 = 4096;
const MAX_IOV: u64 = 1024;
const SECTOR_BYTES: u64 = 512;
/// QEMU counts the bytes of a request in 31 bits.
const MOST_ZEROES: u64 = i32::MAX as u64;

/// Limits of one node; sizes in bytes. `None` is no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct BlockLimits {
    /// Zeroes in whole units of this size cost no data.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write_zeroes_alignment: Option<u64>,
    /// Alignment of offset and length, in bytes.
    pub request_alignment: u64,
    /// The size of a request that costs least, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub opt_transfer: Option<u64>,
    /// Alignment of memory, in bytes: less aligned memory is copied.
    pub min_mem_alignment: u64,
    /// The longest transfer of one request, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_transfer: Option<u64>,
    /// The longest transfer of one request of the device, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_hw_transfer: Option<u64>,
    /// The most zeroes that one request writes, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_write_zeroes: Option<u64>,
    /// The longest discard of one request, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_discard: Option<u64>,
    /// Only whole units of this size can be given back.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub discard_alignment: Option<u64>,
    /// Alignment of memory for speed, in bytes.
    pub opt_mem_alignment: u64,
    /// The most buffers of one request.
    pub max_iov: u64,
    /// The most buffers of one request of the device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_hw_iov: Option<u64>,
}

/// A size among the options of a node; 0 stands for none.
fn option(node: &Node, key: &str) -> Option<u64> {
    node.options().get(key).and_then(serde_json::Value::as_u64).filter(|bytes| *bytes != 0)
}

impl BlockLimits {
    /// The limits of a node, from its driver, its file and its backing file.
    pub fn of(node: &Node) -> BlockLimits {
        let limits = Self::of_stored(node);
        match node.backing() {
            Some(backing) => limits.above(&Self::of(&backing)),
            None => limits,
        }
    }

    /// The needs of a backing file's requests hold for those of its overlay.
    fn above(self, backing: &BlockLimits) -> BlockLimits {
        let least = |one: Option<u64>, other: Option<u64>| one.into_iter().chain(other).min();
        BlockLimits {
            opt_transfer: self.opt_transfer.max(backing.opt_transfer),
            max_transfer: least(self.max_transfer, backing.max_transfer),
            max_hw_transfer: least(self.max_hw_transfer, backing.max_hw_transfer),
            min_mem_alignment: self.min_mem_alignment.max(backing.min_mem_alignment),
            opt_mem_alignment: self.opt_mem_alignment.max(backing.opt_mem_alignment),
            max_iov: self.max_iov.min(backing.max_iov),
            max_hw_iov: least(self.max_hw_iov, backing.max_hw_iov),
            ..self
        }
    }

    fn of_stored(node: &Node) -> BlockLimits {
        // The data of the disk, where that isn't in the file with the metadata.
        let stored = [ChildRole::DataFile, ChildRole::File, ChildRole::Image, ChildRole::Test, ChildRole::Replica(0)];
        let below = stored.into_iter().find_map(|role| node.child(role)).map(|child| Self::of(&child));
        let Some(below) = below else { return Self::of_protocol(node) };
        let has = |role: ChildRole| node.child(role).is_some();
        if let (Some(geometry), Some(layer)) = (geometry(node), qcow2_layer(node)) {
            return BlockLimits {
                write_zeroes_alignment: Some(geometry.allocation_unit_bytes),
                request_alignment: if layer.header.crypt_method != 0 { SECTOR_BYTES } else { 1 },
                discard_alignment: Some(geometry.cluster_bytes),
                ..below
            };
        }
        if node.encrypted_volume().is_some() {
            return BlockLimits { write_zeroes_alignment: None, request_alignment: SECTOR_BYTES, ..below };
        }
        if has(ChildRole::Image) {
            return BlockLimits {
                request_alignment: option(node, "align").unwrap_or(1),
                max_transfer: node.file().and_then(|file| file.max_transfer()).or(below.max_transfer),
                write_zeroes_alignment: option(node, "opt-write-zero"),
                max_write_zeroes: option(node, "max-write-zero"),
                discard_alignment: option(node, "opt-discard").or(below.discard_alignment),
                max_discard: option(node, "max-discard"),
                ..below
            };
        }
        if node.is_raw() {
            // A guessed format is watched sector by sector.
            let request_alignment = if node.is_probed_raw() { SECTOR_BYTES } else { 1 };
            return BlockLimits { write_zeroes_alignment: None, request_alignment, ..below };
        }
        let unit = node.request_bytes();
        if unit.is_some() || has(ChildRole::Test) || has(ChildRole::Replica(0)) {
            let request_alignment = unit.unwrap_or(1);
            return BlockLimits { write_zeroes_alignment: None, request_alignment, ..below };
        }
        let known = node.description().unwrap_or_default();
        let zeroes = known.cluster_bytes.filter(|_| known.zeroes_in_clusters);
        BlockLimits {
            write_zeroes_alignment: zeroes.or(below.write_zeroes_alignment.filter(|_| !node.is_filter())),
            request_alignment: match (known.in_sectors, node.is_filter()) {
                (true, _) => SECTOR_BYTES,
                (false, true) => below.request_alignment,
                (false, false) => 1,
            },
            max_write_zeroes: zeroes.filter(|_| known.bounds_zeroes).map(|bytes| MOST_ZEROES / bytes * bytes),
            ..below
        }
    }

    fn of_protocol(node: &Node) -> BlockLimits {
        let alignment = node.file().map(|file| file.alignment());
        let offset = alignment.map_or(1, |alignment| alignment.offset);
        let memory = alignment.map_or(1, |alignment| alignment.memory as u64);
        // Requests past the page cache are never for less than a sector, nor are those of a node without a file.
        let is_direct = offset > 1 || !node.is_on_host();
        let sizes = node.file().and_then(|file| file.transfer_sizes());
        let queue = node.file().and_then(|file| file.device_queue());
        let logical = |queue: &DeviceQueue| queue.logical_block_bytes.filter(|_| !is_direct);
        BlockLimits {
            write_zeroes_alignment: queue.as_ref().and_then(logical),
            request_alignment: offset,
            min_mem_alignment: if is_direct { memory.max(SECTOR_BYTES) } else { memory },
            opt_transfer: sizes.map(|sizes| sizes.preferred),
            max_transfer: sizes.map(|sizes| sizes.maximum),
            max_write_zeroes: None,
            max_discard: None,
            max_hw_transfer: queue.as_ref().and_then(|queue| queue.max_transfer_bytes),
            discard_alignment: queue.as_ref().and_then(|queue| queue.discard_granularity_bytes),
            opt_mem_alignment: OPT_MEM_ALIGNMENT_BYTES,
            max_iov: MAX_IOV,
            max_hw_iov: queue.and_then(|queue| queue.max_segments),
        }
    }
}
