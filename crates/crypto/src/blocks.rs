// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Block ciphers with blocks of 16 or 8 bytes, chosen at run time.

use crate::sectors::Algorithm;
use aes::{Aes128, Aes192, Aes256};
use cast5::Cast5;
use cipher::{Block, BlockCipherDecrypt, BlockCipherEncrypt, BlockSizeUser, KeyInit};
use cowshed_block::{Error, Result};
use serpent::Serpent;
use sm4::Sm4;
use twofish::Twofish;

/// Length in bytes of the largest block.
pub(crate) const BLOCK_BYTES: usize = 16;

/// A block cipher with its key.
pub(crate) trait BlockCipher: Send + Sync {
    /// Length of a block in bytes: 8 or 16.
    fn block_bytes(&self) -> usize;
    /// Encrypts each block for itself. What is left at the end is not touched.
    fn encrypt(&self, bytes: &mut [u8]);
    /// The other way.
    fn decrypt(&self, bytes: &mut [u8]);
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

    /// FIPS 197 appendix C, RFC 2144 appendix B.1, and GB/T 32907-2016 appendix A: a key, a block, what becomes of it.
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
