// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The one table of drivers. A new driver is a line here and a folder (or a file) that has its keys, its opening and its
//! [`Driver`](crate::node::Driver).

use crate::formats::{luks, parallels, qcow, qcow2, qed, raw, vdi, vhdx, vmdk, vpc};
use crate::open::{DriverLine, Drivers, filters, protocols};
use cowshed_layout::probe::FormatName;

/// The drivers that this program has.
pub static DRIVERS: Drivers = Drivers::new(LINES, REFUSED);

/// The drivers, in the order of the help.
const LINES: &[DriverLine] = &[
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
