// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Block ciphers with blocks of 16 bytes, chosen at run time.

use crate::sectors::Algorithm;
use aes::{Aes128, Aes192, Aes256};
use cipher::{Array, BlockCipherDecrypt, BlockCipherEncrypt, BlockSizeUser, KeyInit, consts::U16};
use cowshed_block::{Error, Result};
use serpent::Serpent;
use twofish::Twofish;

/// 16 bytes.
pub(crate) type Block = Array<u8, U16>;

/// Length of a block in bytes.
pub(crate) const BLOCK_BYTES: usize = 16;

/// A block cipher with its key.
pub(crate) trait BlockCipher: Send + Sync {
    fn encrypt(&self, blocks: &mut [Block]);
    fn decrypt(&self, blocks: &mut [Block]);
}

impl<C> BlockCipher for C
where
    C: BlockCipherEncrypt + BlockCipherDecrypt + BlockSizeUser<BlockSize = U16> + Send + Sync,
{
    fn encrypt(&self, blocks: &mut [Block]) {
        self.encrypt_blocks(blocks);
    }

    fn decrypt(&self, blocks: &mut [Block]) {
        self.decrypt_blocks(blocks);
    }
}

/// The cipher with a key of 16, 24 or 32 bytes.
pub(crate) fn block_cipher(algorithm: Algorithm, key: &[u8]) -> Result<Box<dyn BlockCipher>> {
    fn keyed<C: BlockCipher + KeyInit + 'static>(key: &[u8]) -> Option<Box<dyn BlockCipher>> {
        C::new_from_slice(key).ok().map(|cipher| Box::new(cipher) as Box<dyn BlockCipher>)
    }
    let cipher = match (algorithm, key.len()) {
        (Algorithm::Aes, 16) => keyed::<Aes128>(key),
        (Algorithm::Aes, 24) => keyed::<Aes192>(key),
        (Algorithm::Aes, 32) => keyed::<Aes256>(key),
        (Algorithm::Serpent, 16 | 24 | 32) => keyed::<Serpent>(key),
        (Algorithm::Twofish, 16 | 24 | 32) => keyed::<Twofish>(key),
        _ => None,
    };
    cipher.ok_or_else(|| {
        let message = format!("{} takes keys of 16, 24 or 32 bytes", algorithm.name());
        Error::unsupported(message).field("key_bytes").value(key.len())
    })
}

/// `bytes` as blocks; what is left at the end is not touched.
pub(crate) fn as_blocks(bytes: &mut [u8]) -> &mut [Block] {
    Block::slice_as_chunks_mut(bytes).0
}
