// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Formats: drivers that say where data is.

pub(crate) mod blocks;
mod context;
pub(crate) mod holes;
pub mod luks;
pub(crate) mod mapped;
pub(crate) mod parallels;
pub(crate) mod patches;
pub(crate) mod qcow;
pub mod qcow2;
pub(crate) mod qed;
pub mod raw;
pub(crate) mod sector_map;
mod survey;
pub(crate) mod units;
pub(crate) mod vdi;
pub(crate) mod vhdx;
pub(crate) mod vmdk;
pub(crate) mod vpc;
pub(crate) mod writer;

pub use context::{EncryptionOptions, OpenContext, OverlapChecks, Qcow2RuntimeOptions};

pub use cowshed_layout::probe::{PROBE_BYTES, PROBE_TAIL_BYTES};

pub use mapped::{Description, MappedCheck};

/// The format that a file's first bytes (up to [`PROBE_BYTES`]) and its last ones (up to [`PROBE_TAIL_BYTES`]) look like;
/// "raw" when they look like none.
pub fn probe(first_bytes: &[u8], last_bytes: &[u8]) -> &'static str {
    cowshed_layout::probe::probe_with_tail(first_bytes, last_bytes).as_str()
}
