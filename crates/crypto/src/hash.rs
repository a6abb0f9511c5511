// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The hashes that LUKS headers name.

use cowshed_types::{Error, Result};
use md5::Md5;
use pbkdf2::pbkdf2_hmac;
use ripemd::Ripemd160;
use sha1::Sha1;
use sha2::{Digest, Sha224, Sha256, Sha384, Sha512};
use sm3::Sm3;

/// A hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hash {
    /// MD5, 16 bytes.
    Md5,
    /// SHA-1, 20 bytes.
    Sha1,
    /// SHA-224, 28 bytes.
    Sha224,
    /// SHA-256, 32 bytes.
    Sha256,
    /// SHA-384, 48 bytes.
    Sha384,
    /// SHA-512, 64 bytes.
    Sha512,
    /// RIPEMD-160, 20 bytes.
    Ripemd160,
    /// SM3, 32 bytes.
    Sm3,
}

impl Hash {
    /// All of them, under the names of headers and options.
    pub const ALL: [(&'static str, Hash); 8] = [
        ("md5", Hash::Md5),
        ("sha1", Hash::Sha1),
        ("sha224", Hash::Sha224),
        ("sha256", Hash::Sha256),
        ("sha384", Hash::Sha384),
        ("sha512", Hash::Sha512),
        ("ripemd160", Hash::Ripemd160),
        ("sm3", Hash::Sm3),
    ];

    /// The hash of this name. `field` is for the message.
    pub fn named(field: &'static str, name: &str) -> Result<Hash> {
        let found = Self::ALL.iter().find(|(known, _)| *known == name);
        found
            .map(|(_, hash)| *hash)
            .ok_or_else(|| Error::unsupported("this hash is not known").field(field).value(name))
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, hash)| *hash == self).map_or("", |(name, _)| name)
    }

    /// Length of a digest in bytes.
    pub fn digest_bytes(self) -> usize {
        match self {
            Hash::Sha1 | Hash::Ripemd160 => 20,
            Hash::Md5 => 16,
            Hash::Sha224 => 28,
            Hash::Sha256 | Hash::Sm3 => 32,
            Hash::Sha384 => 48,
            Hash::Sha512 => 64,
        }
    }

    /// The digest of the parts, one after the other.
    pub fn digest(self, parts: &[&[u8]]) -> Vec<u8> {
        fn all<D: Digest>(parts: &[&[u8]]) -> Vec<u8> {
            let mut digest = D::new();
            parts.iter().for_each(|part| digest.update(part));
            digest.finalize().to_vec()
        }
        match self {
            Hash::Md5 => all::<Md5>(parts),
            Hash::Sha1 => all::<Sha1>(parts),
            Hash::Sha224 => all::<Sha224>(parts),
            Hash::Sha256 => all::<Sha256>(parts),
            Hash::Sha384 => all::<Sha384>(parts),
            Hash::Sha512 => all::<Sha512>(parts),
            Hash::Ripemd160 => all::<Ripemd160>(parts),
            Hash::Sm3 => all::<Sm3>(parts),
        }
    }

    /// PBKDF2 with HMAC of this hash (RFC 8018), filling `out`. `iterations` is at least 1.
    pub fn pbkdf2(self, password: &[u8], salt: &[u8], iterations: u32, out: &mut [u8]) {
        match self {
            Hash::Md5 => pbkdf2_hmac::<Md5>(password, salt, iterations, out),
            Hash::Sha1 => pbkdf2_hmac::<Sha1>(password, salt, iterations, out),
            Hash::Sha224 => pbkdf2_hmac::<Sha224>(password, salt, iterations, out),
            Hash::Sha256 => pbkdf2_hmac::<Sha256>(password, salt, iterations, out),
            Hash::Sha384 => pbkdf2_hmac::<Sha384>(password, salt, iterations, out),
            Hash::Sha512 => pbkdf2_hmac::<Sha512>(password, salt, iterations, out),
            Hash::Ripemd160 => pbkdf2_hmac::<Ripemd160>(password, salt, iterations, out),
            Hash::Sm3 => pbkdf2_hmac::<Sm3>(password, salt, iterations, out),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_lengths() {
        for (name, hash) in Hash::ALL {
            assert_eq!(Hash::named("hash", name).unwrap(), hash);
            assert_eq!((hash.name(), hash.digest(&[b"abc"]).len()), (name, hash.digest_bytes()));
            assert_eq!(hash.digest(&[b"ab", b"", b"c"]), hash.digest(&[b"abc"]));
        }
        assert!(Hash::named("hash", "md4").is_err());
    }

    /// RFC 6070: PBKDF2 with HMAC-SHA-1.
    #[test]
    fn pbkdf2_as_in_the_rfc() {
        let mut out = [0; 20];
        Hash::Sha1.pbkdf2(b"password", b"salt", 4096, &mut out);
        assert_eq!(
            out,
            [
                0x4b, 0x00, 0x79, 0x01, 0xb7, 0x65, 0x48, 0x9a, 0xbe, 0xad, 0x49, 0xd9, 0x26, 0xf7, 0x21, 0xd0, 0x65,
                0xa4, 0x29, 0xc1
            ]
        );
    }
}
