// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Formats: drivers that say where data is.

pub(crate) mod blocks;
mod context;
pub mod luks;
pub(crate) mod mapped;
pub(crate) mod parallels;
pub(crate) mod qcow;
pub mod qcow2;
pub(crate) mod qed;
pub mod raw;
pub(crate) mod vdi;
pub(crate) mod vhdx;
pub(crate) mod vmdk;
pub(crate) mod vpc;

pub use context::{EncryptionOptions, OpenContext, OverlapChecks, Qcow2RuntimeOptions};

use cowshed_block::{Error, Result};
pub use cowshed_layout::probe::{PROBE_BYTES, PROBE_TAIL_BYTES};
use cowshed_layout::qcow2::Header;
use cowshed_storage::{File, IoBuf};

pub use mapped::{Description, MappedCheck};

/// The format that a file's first bytes (up to [`PROBE_BYTES`]) and its last ones (up to [`PROBE_TAIL_BYTES`]) look like;
/// "raw" when they look like none.
pub fn probe(first_bytes: &[u8], last_bytes: &[u8]) -> &'static str {
    cowshed_layout::probe::probe_with_tail(first_bytes, last_bytes).as_str()
}

/// Reads and checks the header of a qcow2 image: one read unless the header needs more than 64 KiB.
pub async fn read_header(file: &File) -> Result<Header> {
    read_header_as(file, false).await
}

/// As [`read_header`]; `check`: what a check can judge is no error.
pub(crate) async fn read_header_as(file: &File, check: bool) -> Result<Header> {
    const FIRST_READ_BYTES: u64 = 64 << 10;
    let read = async |len: u64| {
        let (result, buf) = file.read_at(IoBuf::try_zeroed(len as usize)?, 0).await;
        // Damage has sentences of its own.
        result.map(|()| buf).map_err(|error| error.qemu("Could not read qcow2 header"))
    };
    let mut bytes = read(file.len().min(FIRST_READ_BYTES)).await?;
    let needed = Header::bytes_needed(&bytes).map_err(|error| error.file(file.name()))? as u64;
    if needed > bytes.len() as u64 && file.len() > bytes.len() as u64 {
        bytes = read(file.len().min(needed)).await?;
    }
    let parsed = if check { Header::parse_to_check(&bytes) } else { Header::parse(&bytes) };
    parsed.map_err(|error: Error| error.file(file.name()))
}
