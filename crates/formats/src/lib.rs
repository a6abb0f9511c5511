// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Formats: drivers that know the places of data.

mod blocks;
mod bochs;
mod cloop;
mod context;
mod dmg;
mod holes;
mod luks;
mod mapped;
mod parallels;
mod parents;
mod patches;
mod qcow;
pub mod qcow2;
mod qed;
pub mod raw;
mod sector_map;
mod survey;
mod units;
mod vdi;
mod vhdx;
mod vmdk;
mod vpc;
mod vvfat;
mod writer;

pub use context::{EncryptionOptions, OpenContext, OverlapChecks, Qcow2RuntimeOptions};

pub use cowshed_qcow2::Budget;

use cowshed_graph::node::Node;
use cowshed_graph::open::DriverLine;
use cowshed_layout::probe::FormatName;

/// A node's driver, for functions that only its format has.
pub trait DriverOf {
    /// The qcow2 driver.
    fn qcow2(&self) -> Option<&qcow2::Qcow2Driver>;
}

impl DriverOf for Node {
    fn qcow2(&self) -> Option<&qcow2::Qcow2Driver> {
        self.driver().downcast()
    }
}

/// The formats, in the order of the help. A new one is a line here and a folder (or a file) that has its keys, its opening and
/// its [`Driver`](cowshed_graph::node::Driver).
pub const FORMATS: &[DriverLine] = &[
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
    dmg::DRIVER,
    bochs::DRIVER,
    cloop::DRIVER,
    vvfat::DRIVER,
];

/// Formats that are recognised for a clear refusal, with the reasons.
pub const REFUSED: &[(FormatName, &str)] = &[];
