// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Short texts encrypted with AES-256 in CBC over their whole length, padded by PKCS #7 (RFC 5652, section 6.3). So one
//! secret is wrapped in another.

use crate::Algorithm;
use crate::blocks::{BLOCK_BYTES, block_cipher};
use cowshed_types::{Error, Result};
use zeroize::Zeroizing;

/// Length of the key in bytes.
const KEY_BYTES: usize = 32;

/// Unwraps bytes that were wrapped with a key of 32 bytes and an initial vector of 16. A wrong key shows in the
/// padding, mostly.
pub fn unwrap_aes256(key: &[u8], vector: &[u8], wrapped: &[u8]) -> Result<Zeroizing<Vec<u8>>> {
    if key.len() != KEY_BYTES {
        let message = format!("Key should be {KEY_BYTES} bytes in length, not {}", key.len());
        return Err(Error::invalid_argument(message));
    }
    let Ok(mut last) = <[u8; BLOCK_BYTES]>::try_from(vector) else {
        let message = format!("IV should be {BLOCK_BYTES} bytes in length, not {}", vector.len());
        return Err(Error::invalid_argument(message));
    };
    if wrapped.is_empty() || !wrapped.len().is_multiple_of(BLOCK_BYTES) {
        let message = format!("the encrypted secret's length must be a multiple of {BLOCK_BYTES} bytes");
        return Err(Error::invalid_argument(message).value(wrapped.len()));
    }
    let cipher = block_cipher(Algorithm::Aes, key)?;
    let mut plain = Zeroizing::new(wrapped.to_vec());
    for block in plain.as_chunks_mut::<BLOCK_BYTES>().0 {
        let stored = *block;
        cipher.decrypt(block);
        block.iter_mut().zip(&last).for_each(|(byte, before)| *byte ^= before);
        last = stored;
    }
    let padding = plain.last().copied().map_or(0, usize::from);
    if !(1..=BLOCK_BYTES).contains(&padding) {
        return Err(Error::invalid_argument(format!(
            "Incorrect number of padding bytes ({padding}) found on decrypted data: the key or IV is another"
        )));
    }
    if plain[plain.len() - padding..].iter().any(|byte| usize::from(*byte) != padding) {
        return Err(Error::invalid_argument("Incorrect padding found on decrypted data: the key or IV is another"));
    }
    let len = plain.len() - padding;
    plain.truncate(len);
    Ok(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrap(key: &[u8], vector: &[u8], plain: &[u8]) -> Vec<u8> {
        let padding = BLOCK_BYTES - plain.len() % BLOCK_BYTES;
        let mut bytes = [plain, &vec![padding as u8; padding]].concat();
        let cipher = block_cipher(Algorithm::Aes, key).unwrap();
        let mut last = <[u8; BLOCK_BYTES]>::try_from(vector).unwrap();
        for block in bytes.as_chunks_mut::<BLOCK_BYTES>().0 {
            block.iter_mut().zip(&last).for_each(|(byte, before)| *byte ^= before);
            cipher.encrypt(block);
            last = *block;
        }
        bytes
    }

    #[test]
    fn what_is_wrapped_is_unwrapped() {
        let (key, vector) = ([7; 32], [9; 16]);
        for len in [0, 1, 15, 16, 17, 40] {
            let plain: Vec<u8> = (0..len).collect();
            assert_eq!(unwrap_aes256(&key, &vector, &wrap(&key, &vector, &plain)).unwrap()[..], plain[..]);
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let wrapped = wrap(&[7; 32], &[9; 16], b"geheim");
        for (key, vector, bytes) in [
            (&[7; 31][..], &[9; 16][..], &wrapped[..]),
            (&[7; 32], &[9; 15], &wrapped),
            (&[7; 32], &[9; 16], &wrapped[..15]),
            (&[7; 32], &[9; 16], &[]),
            (&[8; 32], &[9; 16], &wrapped),
        ] {
            assert!(unwrap_aes256(key, vector, bytes).is_err());
        }
    }
}
