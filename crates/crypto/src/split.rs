// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The anti-forensic splitter (LUKS On-Disk Format Specification 1.2.3, section 2.4): a key spread over stripes, all of
//! which are needed to get it back.

use crate::Hash;
use zeroize::Zeroizing;

/// The key that `stripes` pieces of `key_bytes` hold.
pub(crate) fn merge(hash: Hash, material: &[u8], key_bytes: usize) -> Zeroizing<Vec<u8>> {
    let mut key = Zeroizing::new(vec![0; key_bytes]);
    let mut pieces = material.chunks_exact(key_bytes);
    let last = pieces.next_back();
    for piece in pieces {
        xor(&mut key, piece);
        diffuse(hash, &mut key);
    }
    if let Some(last) = last {
        xor(&mut key, last);
    }
    key
}

/// `key` spread over as many stripes as `random` has room for, and one more; `random` is replaced by nothing it can be
/// told from.
pub(crate) fn split(hash: Hash, key: &[u8], random: &mut Vec<u8>) {
    let mut sum = Zeroizing::new(vec![0; key.len()]);
    for piece in random.chunks_exact(key.len()) {
        xor(&mut sum, piece);
        diffuse(hash, &mut sum);
    }
    xor(&mut sum, key);
    random.extend_from_slice(&sum);
}

fn xor(bytes: &mut [u8], other: &[u8]) {
    bytes.iter_mut().zip(other).for_each(|(byte, other)| *byte ^= other);
}

/// Every piece of the length of a digest is replaced by the digest of its number and itself, the last one cut.
fn diffuse(hash: Hash, bytes: &mut [u8]) {
    for (number, piece) in bytes.chunks_mut(hash.digest_bytes()).enumerate() {
        let digest = Zeroizing::new(hash.digest(&[&(number as u32).to_be_bytes(), piece]));
        let len = piece.len();
        piece.copy_from_slice(&digest[..len]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_split_is_merged() {
        for (_, hash) in Hash::ALL {
            for key_bytes in [16, 20, 32, 64] {
                let key: Vec<u8> = (0..key_bytes).map(|at| (at * 11) as u8).collect();
                let mut material: Vec<u8> = (0..key_bytes * 9).map(|at| (at * 31 + at / 256) as u8).collect();
                split(hash, &key, &mut material);
                assert_eq!(material.len(), key_bytes * 10);
                assert_eq!(merge(hash, &material, key_bytes)[..], key[..]);
                material[3] ^= 1;
                assert_ne!(merge(hash, &material, key_bytes)[..], key[..]);
            }
        }
    }
}
