// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The operations that an encrypted image needs of a cipher.

use cowshed_crypto::{SECTOR_BYTES, SectorCipher};
use cowshed_types::{GuestOffset, HostOffset};

/// Encrypts and decrypts whole 512-byte sectors in place. The tweak derives from the place of the bytes: LUKS in qcow2
/// takes the host sector, the legacy AES method and the format `luks` the guest sector. Moving bytes means decrypting
/// and encrypting again.
pub trait Cipher: Send + Sync {
    /// Encrypts `bytes`, which will be stored at `host` for the guest's `guest`.
    fn encrypt(&self, guest: GuestOffset, host: HostOffset, bytes: &mut [u8]);
    /// Decrypts `bytes`, which were stored at `host` for the guest's `guest`.
    fn decrypt(&self, guest: GuestOffset, host: HostOffset, bytes: &mut [u8]);
}

/// A cipher whose sectors are numbered by their place in the file, or on the virtual disk.
pub struct SectorsOf {
    /// Encrypts the sectors.
    pub cipher: SectorCipher,
    /// The place in the file numbers the sectors; else the place on the virtual disk.
    pub by_host: bool,
}

impl SectorsOf {
    fn first(&self, guest: GuestOffset, host: HostOffset) -> u64 {
        (if self.by_host { host.0 } else { guest.0 }) / SECTOR_BYTES as u64
    }
}

impl Cipher for SectorsOf {
    fn encrypt(&self, guest: GuestOffset, host: HostOffset, bytes: &mut [u8]) {
        self.cipher.encrypt(self.first(guest, host), bytes);
    }

    fn decrypt(&self, guest: GuestOffset, host: HostOffset, bytes: &mut [u8]) {
        self.cipher.decrypt(self.first(guest, host), bytes);
    }
}
