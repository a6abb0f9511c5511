// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The legacy AES method of qcow2 (`crypt_method` 1): AES-128 in CBC with the password itself as the key. It is unsafe by
//! design (equal beginnings show, passwords are cut to 16 bytes): for old images and their readers.

use crate::{Algorithm, Chaining, CipherSpec, InitialVector, SectorCipher};
use cowshed_types::Result;
use zeroize::Zeroizing;

/// The cipher of a password: its first 16 bytes, filled up with zeroes. Sectors are those of the guest.
pub fn legacy_aes(password: &[u8]) -> Result<SectorCipher> {
    let mut key = Zeroizing::new([0; 16]);
    let len = password.len().min(16);
    key[..len].copy_from_slice(&password[..len]);
    let spec =
        CipherSpec { algorithm: Algorithm::Aes, chaining: Chaining::Cbc, initial_vector: InitialVector::Plain64 };
    SectorCipher::new(spec, &key[..])
}
