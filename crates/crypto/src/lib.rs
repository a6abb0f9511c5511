// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Ciphers of encrypted disk images, without any I/O. The crate has the modes of disks over sectors of 512 bytes, the
//! key slots of LUKS 1, and the legacy AES method of qcow2.
//!
//! None of this notices damage: a changed sector decrypts to garbage, in XTS to garbage of 16 bytes a changed block. Keys
//! are wiped from memory when they are dropped.

#[cfg(not(feature = "luks"))]
mod absent;
#[cfg(feature = "luks")]
mod blocks;
#[cfg(feature = "luks")]
mod hash;
#[cfg(feature = "luks")]
mod legacy;
#[cfg(feature = "luks")]
pub mod luks;
mod random;
#[cfg(feature = "luks")]
mod sectors;
#[cfg(feature = "luks")]
mod split;
#[cfg(feature = "luks")]
mod wrapped;

#[cfg(not(feature = "luks"))]
pub use absent::{Hash, SectorCipher, legacy_aes, luks, unwrap_aes256};
#[cfg(feature = "luks")]
pub use hash::Hash;
#[cfg(feature = "luks")]
pub use legacy::legacy_aes;
#[cfg(feature = "luks")]
pub use sectors::{Algorithm, Chaining, CipherSpec, InitialVector, SectorCipher};
#[cfg(feature = "luks")]
pub use wrapped::unwrap_aes256;
pub use zeroize::Zeroizing;

/// Length of a sector in bytes.
pub const SECTOR_BYTES: usize = 512;
