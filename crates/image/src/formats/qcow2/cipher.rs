// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What an encrypted image needs of a cipher.

use cowshed_block::{GuestOffset, HostOffset};

/// Encrypts and decrypts whole 512-byte sectors in place. The tweak derives from where the bytes stand: LUKS in qcow2
/// takes the host sector, the legacy AES method the guest sector. Moving bytes means decrypting and encrypting again.
pub trait Cipher: Send + Sync {
    /// Encrypts `bytes`, which will be stored at `host` for the guest's `guest`.
    fn encrypt(&self, guest: GuestOffset, host: HostOffset, bytes: &mut [u8]);
    /// Decrypts `bytes`, which were stored at `host` for the guest's `guest`.
    fn decrypt(&self, guest: GuestOffset, host: HostOffset, bytes: &mut [u8]);
}
