// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Ciphers of encrypted disk images, without any I/O. The crate has sectors of 512 bytes in the modes that disks use,
//! the key slots of LUKS version 1, and the legacy AES method of qcow2.
//!
//! None of this notices damage: a changed sector decrypts to garbage, in XTS to garbage of 16 bytes a changed block. Keys
//! are wiped from memory when they are dropped.

mod blocks;
mod hash;
mod legacy;
pub mod luks;
mod sectors;
mod split;
mod wrapped;

pub use hash::Hash;
pub use legacy::legacy_aes;
pub use sectors::{Algorithm, Chaining, CipherSpec, InitialVector, SECTOR_BYTES, SectorCipher};
pub use wrapped::unwrap_aes256;
pub use zeroize::Zeroizing;
