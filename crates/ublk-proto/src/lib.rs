// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The interface of the kernel's ublk driver as bytes and structs; no I/O.
//!
//! The kernel's `Documentation/block/ublk.rst` describes it. Numbers have the byte order of the machine, because both sides run on it.
//!
//! - `control`: features, and the driver's description of a device
//! - `params`: the properties of a new device
//! - `request`: the descriptor of a request
//! - `tags`: the holder of each tag of a queue

mod bytes;
pub mod control;
pub mod params;
pub mod request;
pub mod tags;
#[cfg(test)]
mod tests;

pub use control::{DeviceInfo, UblkState};
pub use params::Params;
pub use request::{Limits, Operation, Request};
pub use tags::{Arrival, Tags};

use std::fmt;

/// The unit of a block device's addresses, in bytes.
pub const SECTOR_BYTES: u64 = 512;
/// The most queues of a device that we make.
pub const MAX_QUEUES: u16 = 64;
/// The most requests of a queue.
pub const MAX_DEPTH: u16 = 4096;
/// The longest data of a request, in bytes.
pub const MAX_REQUEST_BYTES: u32 = 32 << 20;

/// A field that breaks the rules, and its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed {
    /// The field and the rule.
    pub what: &'static str,
    /// The value of the field.
    pub value: u64,
}

impl Malformed {
    pub(crate) fn new(what: &'static str, value: impl Into<u64>) -> Malformed {
        Malformed { what, value: value.into() }
    }
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({:#x})", self.what, self.value)
    }
}

impl std::error::Error for Malformed {}
