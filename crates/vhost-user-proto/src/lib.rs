// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The back end's half of vhost-user-blk as bytes and structs: no I/O, no runtime, no clock.
//!
//! - `message`, `features`: the messages on the Unix socket, after QEMU's `docs/interop/vhost-user.rst`
//! - `regions`: where guest memory is; `memory`: the rings' needs of it
//! - `ring`, `chain`: the split virtqueue, after the virtio 1.2 specification
//! - `inflight`: the region that survives the back end
//! - `config`, `request`: the block device
//!
//! Each number comes from a front end or a guest, and both are strangers.

pub mod chain;
pub mod config;
pub mod features;
pub mod inflight;
mod malformed;
pub mod memory;
pub mod message;
pub mod regions;
pub mod request;
pub mod ring;
#[cfg(test)]
mod tests;

pub use chain::{Cursor, DescriptorChain, Pieces};
pub use config::DeviceConfig;
pub use inflight::Inflight;
pub use malformed::Malformed;
pub use memory::{Memory, Shared};
pub use message::{Message, MessageHeader};
pub use regions::{Region, Regions};
pub use ring::Ring;

/// Bytes of a sector, the unit of a block device's addresses.
pub const SECTOR_BYTES: u64 = 512;
