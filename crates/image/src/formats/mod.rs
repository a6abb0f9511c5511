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

use crate::node::LocalFuture;
use crate::open::{Draft, Opened, Opener};
use cowshed_block::{Error, Result};
use cowshed_layout::probe::FormatName;
pub use cowshed_layout::probe::{PROBE_BYTES, PROBE_TAIL_BYTES};
use cowshed_layout::qcow2::Header;
use cowshed_storage::{File, IoBuf};
use std::rc::Rc;

pub use mapped::{Description, MappedCheck};

/// Opens an image of a format.
pub(crate) type OpenFormat = for<'a> fn(&'a Rc<Opener>, &'a mut Draft) -> LocalFuture<'a, Opened>;

/// A disk-image format: one line of [`FORMATS`].
#[derive(Clone, Copy, Debug)]
pub struct FormatInfo {
    /// The name, as option values and headers have it.
    pub name: &'static str,
    /// One line for people.
    pub about: &'static str,
    /// False: recognised, and refused by name.
    pub supported: bool,
    /// Opens an image, for formats that need nothing else of the opener.
    pub(crate) open: Option<OpenFormat>,
}

const fn format(name: FormatName, supported: bool, about: &'static str) -> FormatInfo {
    FormatInfo { name: name.as_str(), about, supported, open: None }
}

const fn opened(name: FormatName, open: OpenFormat, about: &'static str) -> FormatInfo {
    FormatInfo { name: name.as_str(), about, supported: true, open: Some(open) }
}

/// The formats there are, and those that are recognised for a clear refusal.
pub const FORMATS: &[FormatInfo] = &[
    format(FormatName::Raw, true, "the bytes of the disk as they are"),
    format(FormatName::Qcow2, true, "QEMU copy-on-write, versions 2 and 3"),
    opened(FormatName::Qcow, qcow::open, "QEMU copy-on-write, version 1, for reading"),
    opened(FormatName::Vmdk, vmdk::open, "VMware, for reading"),
    opened(FormatName::Vdi, vdi::open, "VirtualBox, for reading"),
    opened(FormatName::Vpc, vpc::open, "Virtual PC (VHD), for reading"),
    opened(FormatName::Vhdx, vhdx::open, "Hyper-V, for reading"),
    opened(FormatName::Qed, qed::open, "QEMU enhanced disk, for reading"),
    opened(FormatName::Luks, luks::open, "Linux unified key setup, version 1: an encrypted volume"),
    opened(FormatName::Parallels, parallels::open, "Parallels, for reading"),
    format(FormatName::Bochs, false, "Bochs"),
    format(FormatName::Cloop, false, "Linux cloop"),
    format(FormatName::Dmg, false, "Apple disk image (UDIF)"),
];

/// The format with this name.
pub fn find(name: &str) -> Option<&'static FormatInfo> {
    FORMATS.iter().find(|format| format.name == name)
}

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
