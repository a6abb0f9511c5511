// SPDX-License-Identifier: Apache-2.0 OR MIT
//! In place of the ciphers where the feature `luks` is off: types that have no values, and one error.

use cowshed_types::{Error, Result};
use sha2::{Digest, Sha256};
use std::convert::Infallible;
use zeroize::Zeroizing;

fn absent() -> Error {
    Error::unsupported("encryption is not built in (feature `luks`)")
}

/// A hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hash {
    /// SHA-256, 32 bytes.
    Sha256,
}

impl Hash {
    /// The digest of the parts, one after the other.
    pub fn digest(self, parts: &[&[u8]]) -> Vec<u8> {
        let mut digest = Sha256::new();
        parts.iter().for_each(|part| digest.update(part));
        digest.finalize().to_vec()
    }
}

/// The cipher of a disk. There is none without the feature `luks`.
#[derive(Clone)]
pub struct SectorCipher(Infallible);

impl SectorCipher {
    /// Encrypts sectors in place, from sector `first` on.
    pub fn encrypt(&self, _first: u64, _bytes: &mut [u8]) {
        match self.0 {}
    }

    /// Decrypts sectors in place, from sector `first` on.
    pub fn decrypt(&self, _first: u64, _bytes: &mut [u8]) {
        match self.0 {}
    }
}

/// Fails: encryption is not built in.
pub fn legacy_aes(_password: &[u8]) -> Result<SectorCipher> {
    Err(absent())
}

/// Fails: encryption is not built in.
pub fn unwrap_aes256(_key: &[u8], _vector: &[u8], _wrapped: &[u8]) -> Result<Zeroizing<Vec<u8>>> {
    Err(absent())
}

/// LUKS version 1, which is not built in.
pub mod luks {
    use super::{SectorCipher, absent};
    use crate::Hash;
    pub use crate::random::fill_random;
    use cowshed_layout::luks::LuksHeader;
    use cowshed_types::Result;
    use std::convert::Infallible;
    use std::ops::Range;

    /// Writes in any order; behind them comes a barrier.
    pub type Stage = Vec<(u64, Vec<u8>)>;

    /// The key that the data is encrypted with. There is none without the feature `luks`.
    #[derive(Clone, Debug)]
    pub struct MasterKey(Infallible);

    impl MasterKey {
        /// For results that can't be.
        fn never<T>(&self) -> T {
            match self.0 {}
        }
    }

    /// A header that makes sense. There is none without the feature `luks`.
    #[derive(Clone, Debug)]
    pub struct Volume(Infallible);

    impl Volume {
        /// Fails: encryption is not built in.
        pub fn new(_header: LuksHeader, _area_bytes: u64) -> Result<Volume> {
            Err(absent())
        }

        /// The header.
        pub fn header(&self) -> &LuksHeader {
            match self.0 {}
        }

        /// The hash of key derivation and splitter.
        pub fn hash(&self) -> Hash {
            match self.0 {}
        }

        /// The place of a slot's key material.
        pub fn key_material(&self, _slot: usize) -> Range<u64> {
            match self.0 {}
        }

        /// Slots that hold a key.
        pub fn active_slots(&self) -> std::iter::Empty<usize> {
            match self.0 {}
        }

        /// The master key, if the passphrase is that of this slot.
        pub fn try_slot(&self, _slot: usize, _material: &[u8], _passphrase: &[u8]) -> Result<Option<MasterKey>> {
            match self.0 {}
        }

        /// Makes an empty slot open with this passphrase.
        pub fn activation(
            &self,
            _slot: usize,
            key: &MasterKey,
            _passphrase: &[u8],
            _iterations: u32,
        ) -> Result<(Volume, Vec<Stage>)> {
            key.never()
        }

        /// Empties a slot.
        pub fn deactivation(&self, _slot: usize) -> Result<(Volume, Vec<Stage>)> {
            match self.0 {}
        }

        /// The cipher of the data.
        pub fn cipher(&self, key: &MasterKey) -> Result<SectorCipher> {
            key.never()
        }
    }

    /// The iterations of a key derivation that doesn't exist.
    pub fn iterations_for(_hash: Hash, _key_bytes: u32, _milliseconds: u64) -> Result<u32> {
        Err(absent())
    }
}
