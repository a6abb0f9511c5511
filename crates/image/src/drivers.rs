// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The one table of drivers. A new driver is a line here and a folder (or a file) that has its keys, its opening and its
//! [`Driver`](crate::node::Driver).

use crate::formats::{luks, parallels, qcow, qcow2, qed, raw, vdi, vhdx, vmdk, vpc};
use crate::open::{DriverLine, filters, protocols};
use crate::options::{DriverKind, DriverSchema};
use cowshed_layout::probe::FormatName;

/// The drivers, in the order of the help.
const DRIVERS: &[DriverLine] = &[
    protocols::FILE,
    protocols::HOST_DEVICE,
    protocols::HOST_CDROM,
    protocols::NBD,
    protocols::NULL_CO,
    protocols::NULL_AIO,
    raw::DRIVER,
    qcow2::DRIVER,
    luks::DRIVER,
    vmdk::DRIVER,
    vdi::DRIVER,
    vpc::DRIVER,
    vhdx::DRIVER,
    qcow::DRIVER,
    qed::DRIVER,
    parallels::DRIVER,
    filters::BLKDEBUG,
    filters::THROTTLE,
    filters::COPY_ON_READ,
    filters::COPY_BEFORE_WRITE,
    filters::SNAPSHOT_ACCESS,
    filters::COMPRESS,
    filters::PREALLOCATE,
    filters::LOG_WRITES,
    filters::VERIFY,
    filters::QUORUM,
    filters::FAULT,
];

/// Formats that are recognised for a clear refusal, and what they are.
const REFUSED: &[(FormatName, &str)] =
    &[(FormatName::Bochs, "Bochs"), (FormatName::Cloop, "Linux cloop"), (FormatName::Dmg, "Apple disk image (UDIF)")];

/// The driver with this name.
pub(crate) fn find(name: &str) -> Option<&'static DriverLine> {
    DRIVERS.iter().find(|line| line.schema.name == name)
}

/// What a format is that is recognised and can't be opened.
pub(crate) fn refused(name: &str) -> Option<&'static str> {
    REFUSED.iter().find(|(format, _)| format.as_str() == name).map(|(_, about)| *about)
}

impl DriverSchema {
    /// All drivers, in the order of the help.
    pub fn all() -> impl Iterator<Item = &'static DriverSchema> {
        DRIVERS.iter().map(|line| line.schema)
    }

    /// The driver with this name.
    pub fn find(name: &str) -> Option<&'static DriverSchema> {
        find(name).map(|line| line.schema)
    }

    /// True for the formats here, and for those that are known by name alone.
    pub fn is_format(name: &str) -> bool {
        Self::find(name).is_some_and(|schema| schema.kind == DriverKind::Format) || refused(name).is_some()
    }

    /// True for the drivers here, for formats that are known by name alone, and for drivers of QEMU that a backing file may be
    /// said to have.
    pub fn is_known(name: &str) -> bool {
        const ELSEWHERE: [&str; 4] = ["nvme", "nvme-io_uring", "replication", "vvfat"];
        Self::find(name).is_some() || refused(name).is_some() || ELSEWHERE.contains(&name)
    }
}
