// SPDX-License-Identifier: Apache-2.0 OR MIT
//! On-disk structures of disk-image formats: bytes to structs and back. No I/O, no `unsafe`, nothing allocated on the
//! word of a file before that word is checked against a limit.

#![forbid(unsafe_code)]

pub mod bytes;
pub mod luks;
pub mod probe;
pub mod qcow2;
pub mod vmdk;
