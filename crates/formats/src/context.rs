// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The arguments of a format driver that opens an image.

use cowshed_graph::node::Node;
use cowshed_graph::secret::Secret;
use cowshed_layout::qcow2::SnapshotName;
use cowshed_storage::File;
use std::sync::Arc;

/// Everything the qcow2 driver needs: its children are open, its options are checked.
#[derive(Debug)]
pub struct OpenContext {
    /// The image file.
    pub file: File,
    /// The image's name for messages and for `map`.
    pub file_name: String,
    /// The external data file, where the header asks for one.
    pub data_file: Option<File>,
    /// The backing file; none without one, or when `no_backing` is set.
    pub backing: Option<Arc<Node>>,
    /// The options of encryption.
    pub encryption: EncryptionOptions,
    /// The run-time options.
    pub options: Qcow2RuntimeOptions,
    /// Opened for writing: autoclear bits are cleared, a dirty image is recovered.
    pub writable: bool,
    /// Opened to be checked: dirty and corrupt images are taken as they are, nothing is changed at open.
    pub check: bool,
    /// Open this internal snapshot in place of the active disk.
    pub snapshot: Option<SnapshotName>,
    /// The caller asked to leave the backing file out (`-u`): unallocated ranges can't be read.
    pub no_backing: bool,
    /// The data file was left out: the data can't be read.
    pub no_data: bool,
    /// This much may come out of compressed clusters until the image is closed, in bytes; `u64::MAX` is no limit.
    pub max_decompressed_bytes: u64,
}

/// The `encrypt.*` options of an image that is opened.
#[derive(Clone, Debug, Default)]
pub struct EncryptionOptions {
    /// The format that the user expects: "luks" or "aes". An image that has another one is refused.
    pub format: Option<String>,
    /// The passphrase. Without it an encrypted image opens, and its data can't be read.
    pub secret: Option<Secret>,
}

impl EncryptionOptions {
    /// True without any option.
    pub fn is_empty(&self) -> bool {
        self.format.is_none() && self.secret.is_none()
    }
}

/// Run-time options of the qcow2 driver; none of them is stored in the image. Sizes in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Qcow2RuntimeOptions {
    /// `lazy-refcounts`: overrides the image's compatible feature bit.
    pub lazy_refcounts: Option<bool>,
    /// `l2-cache-size`.
    pub l2_cache_bytes: Option<u64>,
    /// `l2-cache-coverage`: bytes of the virtual disk whose mapping fits into the L2 cache.
    pub l2_cache_coverage_bytes: Option<u64>,
    /// `l2-cache-entry-size`: a power of two from 512 to the cluster size.
    pub l2_cache_entry_bytes: Option<u64>,
    /// `refcount-cache-size`.
    pub refcount_cache_bytes: Option<u64>,
    /// `cache-size`: both caches together.
    pub cache_bytes: Option<u64>,
    /// `cache-clean-interval`: drop tables that weren't used for this many seconds; 0 is never.
    pub cache_clean_interval_s: u64,
    /// `overlap-check`: which writes onto metadata are caught.
    pub overlap_check: OverlapChecks,
    /// `discard-no-unref`: discarded clusters stay allocated and mapped as zero.
    pub discard_no_unref: bool,
    /// `pass-discard-request`: discards of the guest go on to the file.
    pub pass_discard_request: bool,
    /// `pass-discard-snapshot`: clusters freed with a snapshot are discarded in the file.
    pub pass_discard_snapshot: bool,
    /// `pass-discard-other`: so are clusters freed for other reasons.
    pub pass_discard_other: bool,
}

impl Default for Qcow2RuntimeOptions {
    fn default() -> Self {
        Qcow2RuntimeOptions {
            lazy_refcounts: None,
            l2_cache_bytes: None,
            l2_cache_coverage_bytes: None,
            l2_cache_entry_bytes: None,
            refcount_cache_bytes: None,
            cache_bytes: None,
            cache_clean_interval_s: 600,
            overlap_check: OverlapChecks::CACHED,
            discard_no_unref: false,
            pass_discard_request: true,
            pass_discard_snapshot: true,
            pass_discard_other: false,
        }
    }
}

/// The metadata that a write is checked against before it is issued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct OverlapChecks {
    pub main_header: bool,
    pub active_l1: bool,
    pub active_l2: bool,
    pub refcount_table: bool,
    pub refcount_block: bool,
    pub snapshot_table: bool,
    pub inactive_l1: bool,
    pub inactive_l2: bool,
    pub bitmap_directory: bool,
}

impl OverlapChecks {
    /// `overlap-check=none`.
    pub const NONE: OverlapChecks = OverlapChecks {
        main_header: false,
        active_l1: false,
        active_l2: false,
        refcount_table: false,
        refcount_block: false,
        snapshot_table: false,
        inactive_l1: false,
        inactive_l2: false,
        bitmap_directory: false,
    };
    /// `overlap-check=constant`: the checks with the same cost for every image size.
    pub const CONSTANT: OverlapChecks = OverlapChecks {
        main_header: true,
        active_l1: true,
        refcount_table: true,
        snapshot_table: true,
        bitmap_directory: true,
        ..Self::NONE
    };
    /// `overlap-check=cached`, the default: the checks that need no read of the disk.
    pub const CACHED: OverlapChecks =
        OverlapChecks { active_l2: true, refcount_block: true, inactive_l1: true, ..Self::CONSTANT };
    /// `overlap-check=all`.
    pub const ALL: OverlapChecks = OverlapChecks { inactive_l2: true, ..Self::CACHED };
}
