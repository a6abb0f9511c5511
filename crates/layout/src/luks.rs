// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The header of LUKS version 1 (the LUKS On-Disk Format Specification 1.2.3, section 6), as far as it describes the
//! encryption. Key material is not touched here.

use crate::bytes::{array_at, be16_at, be32_at};
use cowshed_types::{Error, Result};
use std::ops::Range;

/// Bytes of the header, key slots included.
pub const HEADER_BYTES: usize = 592;
/// Unit of the header's offsets.
const SECTOR_BYTES: u64 = 512;
const MAGIC: &[u8; 6] = b"LUKS\xba\xbe";
/// Number of key slots.
pub const SLOTS: usize = 8;
/// Length of the master key's digest in bytes.
pub const DIGEST_BYTES: usize = 20;
/// Length of a salt in bytes.
pub const SALT_BYTES: usize = 32;
const SLOT_BYTES: usize = 48;
const FIRST_SLOT: usize = 208;
/// Length of a slot's first word, which marks it as active or not.
pub const SLOT_STATE_BYTES: usize = 4;
const SLOT_ENABLED: u32 = 0x00ac_71f3;
const SLOT_DISABLED: u32 = 0x0000_dead;

/// The place of a key slot in the header. `slot` is 0 to 7.
pub fn slot_place(slot: usize) -> Range<usize> {
    let start = FIRST_SLOT + slot * SLOT_BYTES;
    start..start + SLOT_BYTES
}

/// A version 1 header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LuksHeader {
    /// Name of the cipher: "aes".
    pub cipher_name: String,
    /// Mode of the cipher, as written: "xts-plain64", "cbc-essiv:sha256".
    pub cipher_mode: String,
    /// Hash of the key derivation.
    pub hash: String,
    /// First byte of the encrypted data, from the header on.
    pub payload_offset: u64,
    /// Length of the master key in bytes.
    pub key_bytes: u32,
    /// Digest of the master key: the first 20 bytes of PBKDF2 over it.
    pub master_key_digest: [u8; DIGEST_BYTES],
    /// Salt of that digest.
    pub master_key_salt: [u8; SALT_BYTES],
    /// Number of iterations of the master key's digest.
    pub master_key_iterations: u32,
    /// UUID as text.
    pub uuid: String,
    /// The key slots.
    pub slots: [KeySlot; SLOTS],
}

/// A key slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeySlot {
    /// Holds a key.
    pub active: bool,
    /// Number of iterations of the key derivation.
    pub iterations: u32,
    /// Salt of the key derivation.
    pub salt: [u8; SALT_BYTES],
    /// First byte of the key material, from the header on.
    pub key_offset: u64,
    /// Number of stripes that the key is split into.
    pub stripes: u32,
}

impl LuksHeader {
    /// Parses the first [`HEADER_BYTES`] bytes of an encryption header.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let short = || Error::invalid_image("luks_header", bytes.len(), "the LUKS header is cut short");
        if !bytes.starts_with(MAGIC) {
            return Err(Error::invalid_image("luks_magic", "another", "there is no LUKS header")
                .qemu("Volume is not in LUKS format"));
        }
        let version = be16_at(bytes, 6).ok_or_else(short)?;
        if version != 1 {
            return Err(Error::unsupported("this version of LUKS is unknown").field("luks_version").value(version));
        }
        let mut slots = [KeySlot::default(); SLOTS];
        for (index, slot) in slots.iter_mut().enumerate() {
            *slot = KeySlot::parse(bytes, FIRST_SLOT + index * SLOT_BYTES).ok_or_else(short)??;
        }
        Ok(Self {
            cipher_name: text_at::<32>(bytes, 8).ok_or_else(short)?,
            cipher_mode: text_at::<32>(bytes, 40).ok_or_else(short)?,
            hash: text_at::<32>(bytes, 72).ok_or_else(short)?,
            payload_offset: u64::from(be32_at(bytes, 104).ok_or_else(short)?) * SECTOR_BYTES,
            key_bytes: be32_at(bytes, 108).ok_or_else(short)?,
            master_key_digest: array_at(bytes, 112).ok_or_else(short)?,
            master_key_salt: array_at(bytes, 132).ok_or_else(short)?,
            master_key_iterations: be32_at(bytes, 164).ok_or_else(short)?,
            uuid: text_at::<40>(bytes, 168).ok_or_else(short)?,
            slots,
        })
    }

    /// The bytes of the header on disk. Names that are too long for their fields are cut.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let mut put = |at: usize, data: &[u8]| bytes[at..at + data.len()].copy_from_slice(data);
        // Every text ends with a NUL.
        let text = |text: &str, field: usize| text.as_bytes()[..text.len().min(field - 1)].to_vec();
        put(0, MAGIC);
        put(6, &1u16.to_be_bytes());
        put(8, &text(&self.cipher_name, 32));
        put(40, &text(&self.cipher_mode, 32));
        put(72, &text(&self.hash, 32));
        put(104, &sectors(self.payload_offset).to_be_bytes());
        put(108, &self.key_bytes.to_be_bytes());
        put(112, &self.master_key_digest);
        put(132, &self.master_key_salt);
        put(164, &self.master_key_iterations.to_be_bytes());
        put(168, &text(&self.uuid, 40));
        for (index, slot) in self.slots.iter().enumerate() {
            let at = FIRST_SLOT + index * SLOT_BYTES;
            put(at, &(if slot.active { SLOT_ENABLED } else { SLOT_DISABLED }).to_be_bytes());
            put(at + 4, &slot.iterations.to_be_bytes());
            put(at + 8, &slot.salt);
            put(at + 40, &sectors(slot.key_offset).to_be_bytes());
            put(at + 44, &slot.stripes.to_be_bytes());
        }
        bytes
    }

    /// The mode in its parts: chaining mode, generator of initial vectors, and that one's hash.
    pub fn mode_parts(&self) -> (&str, Option<&str>, Option<&str>) {
        let (chaining, generator) = match self.cipher_mode.split_once('-') {
            Some((chaining, generator)) => (chaining, Some(generator)),
            None => (self.cipher_mode.as_str(), None),
        };
        match generator.and_then(|generator| generator.split_once(':')) {
            Some((generator, hash)) => (chaining, Some(generator), Some(hash)),
            None => (chaining, generator, None),
        }
    }

    /// Cipher with the width of its key, as QEMU names it: "aes-256". XTS uses two keys, half the master key each.
    pub fn cipher_with_width(&self) -> String {
        // It has one width only.
        if self.cipher_name == "sm4" {
            return self.cipher_name.clone();
        }
        let keys = if self.mode_parts().0 == "xts" { 2 } else { 1 };
        format!("{}-{}", self.cipher_name, u64::from(self.key_bytes) * 8 / keys)
    }
}

impl KeySlot {
    fn parse(bytes: &[u8], at: usize) -> Option<Result<Self>> {
        let state = be32_at(bytes, at)?;
        let slot = Self {
            active: state == SLOT_ENABLED,
            iterations: be32_at(bytes, at + 4)?,
            salt: array_at(bytes, at + 8)?,
            key_offset: u64::from(be32_at(bytes, at + 40)?) * SECTOR_BYTES,
            stripes: be32_at(bytes, at + 44)?,
        };
        Some(match state {
            SLOT_ENABLED | SLOT_DISABLED => Ok(slot),
            other => Err(Error::invalid_image("luks_key_slot", other, "a key slot is neither enabled nor disabled")),
        })
    }
}

/// The header counts in sectors of 512 bytes.
fn sectors(bytes: u64) -> u32 {
    u32::try_from(bytes / SECTOR_BYTES).unwrap_or(u32::MAX)
}

/// The text in a field of `N` bytes, up to its NUL.
fn text_at<const N: usize>(bytes: &[u8], offset: usize) -> Option<String> {
    let field: [u8; N] = array_at(bytes, offset)?;
    let len = field.iter().position(|byte| *byte == 0).unwrap_or(N);
    Some(String::from_utf8_lossy(field.get(..len)?).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Vec<u8> {
        let mut bytes = vec![0; HEADER_BYTES];
        let mut put = |at: usize, data: &[u8]| bytes[at..at + data.len()].copy_from_slice(data);
        put(0, MAGIC);
        put(6, &1u16.to_be_bytes());
        put(8, b"aes");
        put(40, b"cbc-essiv:sha256");
        put(72, b"sha512");
        put(104, &4040u32.to_be_bytes());
        put(108, &32u32.to_be_bytes());
        put(164, &1000u32.to_be_bytes());
        put(168, b"51bae06c-bee9-47f3-867a-7f99a40d505a");
        for slot in 0..SLOTS {
            put(FIRST_SLOT + slot * SLOT_BYTES, &SLOT_DISABLED.to_be_bytes());
        }
        put(FIRST_SLOT, &SLOT_ENABLED.to_be_bytes());
        put(FIRST_SLOT + 40, &8u32.to_be_bytes());
        bytes
    }

    #[test]
    fn a_header_is_read() {
        let header = LuksHeader::parse(&header()).expect("a header");
        assert_eq!(header.mode_parts(), ("cbc", Some("essiv"), Some("sha256")));
        assert_eq!(header.cipher_with_width(), "aes-256");
        assert_eq!(header.payload_offset, 4040 * 512);
        assert_eq!((header.slots[0].active, header.slots[0].key_offset, header.slots[7].active), (true, 4096, false));
        assert_eq!(header.uuid.len(), 36);
        assert_eq!(LuksHeader::parse(&header.encode()).expect("a header"), header);
        assert_eq!(header.encode()[..], self::header()[..]);
    }

    #[test]
    fn what_is_no_header_is_refused() {
        let good = header();
        for len in 0..HEADER_BYTES {
            assert!(LuksHeader::parse(&good[..len]).is_err(), "{len} bytes");
        }
        for (at, value) in [(0, b'K'), (7, 2), (FIRST_SLOT + 3, 0)] {
            let mut bad = good.clone();
            bad[at] = value;
            assert!(LuksHeader::parse(&bad).is_err(), "byte {at}");
        }
    }
}
