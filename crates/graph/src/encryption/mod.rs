// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The parts that encrypted images of every format share: ciphers over sectors, the LUKS header with its key slots,
//! writes of part of a sector.

mod area;
mod cipher;
mod slots;
mod transform;
mod writers;

pub use area::LuksArea;
pub use cipher::{Cipher, SectorsOf};
pub use slots::{SlotChange, change_slots, check_slot_change};
pub use transform::encrypt;
pub use transform::{decrypt, part_sectors};
pub use writers::{Writers, Writing};

/// Unit of encryption in bytes.
pub const SECTOR_BYTES: u64 = cowshed_crypto::SECTOR_BYTES as u64;
