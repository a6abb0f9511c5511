// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Block ciphers with blocks of 16 or 8 bytes, chosen at run time.

use crate::SECTOR_BYTES;
use crate::sectors::{Algorithm, BYTES_AT_ONCE, SECTORS_AT_ONCE, Vector};
use aes::{Aes128, Aes192, Aes256};
use cast5::Cast5;
use cipher::{
    Block, BlockCipherDecBackend, BlockCipherDecClosure, BlockCipherDecrypt, BlockCipherEncrypt, BlockSizeUser,
    KeyInit, ParBlocks,
};
use cowshed_types::{Error, Result};
use serpent::Serpent;
use sm4::Sm4;
use std::marker::PhantomData;
use twofish::Twofish;

/// Length in bytes of the largest block.
pub(crate) const BLOCK_BYTES: usize = 16;

/// A block cipher with its key.
pub(crate) trait BlockCipher: Send + Sync {
    /// Length of a block in bytes: 8 or 16.
    fn block_bytes(&self) -> usize;
    /// Encrypts each block for itself. The rest at the end is not touched.
    fn encrypt(&self, bytes: &mut [u8]);
    /// The other way.
    fn decrypt(&self, bytes: &mut [u8]);
    /// Decrypts sectors of cipher block chaining. To each block the stored block before it is added; to a sector's
    /// first block its vector, or the front of it.
    fn decrypt_chained(&self, vectors: &[Vector], sectors: &mut [u8]);
}

/// [`BlockCipher::decrypt_chained`] within a cipher's own loop. There its round keys are prepared once for many blocks,
/// and the processor's widest registers are in use, if it has them.
struct DecryptChained<'a, C> {
    vectors: &'a [Vector],
    sectors: &'a mut [u8],
    cipher: PhantomData<C>,
}

impl<C: BlockSizeUser> BlockSizeUser for DecryptChained<'_, C> {
    type BlockSize = C::BlockSize;
}

impl<C: BlockSizeUser> BlockCipherDecClosure for DecryptChained<'_, C> {
    #[inline(always)]
    fn call<B: BlockCipherDecBackend<BlockSize = C::BlockSize>>(self, backend: &B) {
        let len = C::block_size();
        let mut before = [0; BYTES_AT_ONCE];
        let groups = self.sectors.chunks_mut(BYTES_AT_ONCE).zip(self.vectors.chunks(SECTORS_AT_ONCE));
        for (group, vectors) in groups {
            let sectors = before.chunks_exact_mut(SECTOR_BYTES).zip(group.chunks_exact(SECTOR_BYTES));
            for ((before, sector), vector) in sectors.zip(vectors) {
                before[..len].copy_from_slice(&vector[..len]);
                before[len..].copy_from_slice(&sector[..SECTOR_BYTES - len]);
            }
            let (wide, rest) = ParBlocks::<B>::slice_as_chunks_mut(Block::<B>::slice_as_chunks_mut(group).0);
            wide.iter_mut().for_each(|blocks| backend.decrypt_par_blocks_inplace(blocks));
            backend.decrypt_tail_blocks_inplace(rest);
            mix(group, &before);
        }
    }
}

/// Adds `others` bit by bit, as far as both go.
#[inline(always)]
pub(crate) fn mix(bytes: &mut [u8], others: &[u8]) {
    bytes.iter_mut().zip(others).for_each(|(byte, other)| *byte ^= other);
}

impl<C> BlockCipher for C
where
    C: BlockCipherEncrypt + BlockCipherDecrypt + BlockSizeUser + Send + Sync,
{
    fn block_bytes(&self) -> usize {
        C::block_size()
    }

    fn encrypt(&self, bytes: &mut [u8]) {
        self.encrypt_blocks(Block::<C>::slice_as_chunks_mut(bytes).0);
    }

    fn decrypt(&self, bytes: &mut [u8]) {
        self.decrypt_blocks(Block::<C>::slice_as_chunks_mut(bytes).0);
    }

    fn decrypt_chained(&self, vectors: &[Vector], sectors: &mut [u8]) {
        self.decrypt_with_backend(DecryptChained { vectors, sectors, cipher: PhantomData::<C> });
    }
}

/// The cipher with a key of one of [`Algorithm::key_bytes`].
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
        (Algorithm::Cast5, 16) => keyed::<Cast5>(key),
        (Algorithm::Sm4, 16) => keyed::<Sm4>(key),
        _ => None,
    };
    cipher.ok_or_else(|| {
        let lengths: Vec<String> = algorithm.key_bytes().iter().map(usize::to_string).collect();
        let message = format!("{} takes keys of {} bytes", algorithm.name(), lengths.join(" or "));
        Error::unsupported(message).field("key_bytes").value(key.len())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(digits: &str) -> Vec<u8> {
        (0..digits.len() / 2).map(|at| u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).unwrap()).collect()
    }

    /// FIPS 197 appendix C, RFC 2144 appendix B.1, and GB/T 32907-2016 appendix A: a key, a block, the encrypted block.
    #[test]
    fn blocks_as_in_the_standards() {
        for (algorithm, key, plain, stored) in [
            (
                Algorithm::Aes,
                "000102030405060708090a0b0c0d0e0f",
                "00112233445566778899aabbccddeeff",
                "69c4e0d86a7b0430d8cdb78070b4c55a",
            ),
            (Algorithm::Cast5, "0123456712345678234567893456789a", "0123456789abcdef", "238b4fe5847e44b2"),
            (
                Algorithm::Sm4,
                "0123456789abcdeffedcba9876543210",
                "0123456789abcdeffedcba9876543210",
                "681edf34d206965e86b3e94f536e4246",
            ),
        ] {
            let cipher = block_cipher(algorithm, &bytes(key)).unwrap();
            let mut block = bytes(plain);
            assert_eq!(cipher.block_bytes(), block.len());
            cipher.encrypt(&mut block);
            assert_eq!(block, bytes(stored), "{}", algorithm.name());
            cipher.decrypt(&mut block);
            assert_eq!(block, bytes(plain), "{}", algorithm.name());
        }
    }

    #[test]
    fn keys_of_other_lengths_are_refused() {
        for algorithm in Algorithm::ALL {
            for len in 0..40 {
                let fits = algorithm.key_bytes().contains(&len);
                assert_eq!(block_cipher(algorithm, &vec![1; len]).is_ok(), fits, "{} {len}", algorithm.name());
            }
        }
    }
}
