// SPDX-License-Identifier: Apache-2.0 OR MIT
//! On-disk structures of disk-image formats: bytes to structs and back. No I/O, no `unsafe`, nothing allocated on the
//! word of a file before that word is checked against a limit.

#![forbid(unsafe_code)]

pub mod bochs;
pub mod bytes;
pub mod cloop;
mod complaint;
pub mod crc32c;
pub mod dmg;
pub mod fat;
pub mod fresh;
pub mod luks;
pub mod parallels;
pub mod parents;
pub mod partitions;
pub mod probe;
pub mod qcow;
pub mod qcow2;
pub mod qed;
pub mod vdi;
pub mod vhdx;
pub mod vmdk;
pub mod vpc;
