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

use crate::node::Node;

/// A node's driver, for what only its format has.
pub trait DriverOf {
    /// The qcow2 driver.
    fn qcow2(&self) -> Option<&qcow2::Qcow2Driver>;

    /// The LUKS driver.
    fn luks(&self) -> Option<&luks::LuksDriver>;
}

impl DriverOf for Node {
    fn qcow2(&self) -> Option<&qcow2::Qcow2Driver> {
        self.driver().downcast()
    }

    fn luks(&self) -> Option<&luks::LuksDriver> {
        self.driver().downcast()
    }
}
