// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sectors of 512 bytes, each encrypted on its own with an initial vector made from its number.

use crate::blocks::{BLOCK_BYTES, BlockCipher, block_cipher, mix};
use crate::{Hash, SECTOR_BYTES};
use cowshed_types::{Error, Result};

/// Sectors whose initial vectors go through a cipher in one go. One call prepares its round keys for many blocks. It
/// takes the most blocks at once only if so many are there.
const VECTORS_AT_ONCE: usize = 64;
/// Sectors whose data do, for the same reason. So few, with the state beside them, stay in the processor's first
/// cache.
pub(crate) const SECTORS_AT_ONCE: usize = 8;
pub(crate) const BYTES_AT_ONCE: usize = SECTORS_AT_ONCE * SECTOR_BYTES;

/// An initial vector or tweak; of ciphers with shorter blocks its front counts.
pub(crate) type Vector = [u8; BLOCK_BYTES];

/// A block cipher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// AES.
    Aes,
    /// Serpent.
    Serpent,
    /// Twofish.
    Twofish,
    /// CAST-128 (RFC 2144), whose blocks have 8 bytes.
    Cast5,
    /// SM4 (GB/T 32907-2016).
    Sm4,
}

impl Algorithm {
    /// All of them.
    pub const ALL: [Algorithm; 5] =
        [Algorithm::Aes, Algorithm::Serpent, Algorithm::Twofish, Algorithm::Cast5, Algorithm::Sm4];

    /// Its name in headers.
    pub fn name(self) -> &'static str {
        match self {
            Algorithm::Aes => "aes",
            Algorithm::Serpent => "serpent",
            Algorithm::Twofish => "twofish",
            Algorithm::Cast5 => "cast5",
            Algorithm::Sm4 => "sm4",
        }
    }

    /// The lengths of its keys in bytes.
    pub fn key_bytes(self) -> &'static [usize] {
        match self {
            Algorithm::Aes | Algorithm::Serpent | Algorithm::Twofish => &[16, 24, 32],
            Algorithm::Cast5 | Algorithm::Sm4 => &[16],
        }
    }
}

/// The dependence of blocks on each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chaining {
    /// XEX with tweaks (IEEE 1619); half of the key makes the tweaks.
    Xts,
    /// Cipher block chaining.
    Cbc,
    /// Counter mode: the initial vector counts up as one big-endian number, block by block.
    Ctr,
    /// Every block on its own: equal blocks show. Read for completeness' sake.
    Ecb,
}

/// The way from the number of a sector to the initial vector (in XTS: the tweak).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InitialVector {
    /// The number's low 32 bits.
    Plain,
    /// The number, 64 bits.
    Plain64,
    /// The number encrypted with the hash of the key.
    Essiv(Hash),
}

/// A cipher as headers and options name it: "aes" with "xts-plain64".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CipherSpec {
    /// The block cipher.
    pub algorithm: Algorithm,
    /// The mode.
    pub chaining: Chaining,
    /// The initial vectors.
    pub initial_vector: InitialVector,
}

impl CipherSpec {
    /// From the two names of a LUKS header. An unknown name is refused by field and value.
    pub fn parse(cipher_name: &str, cipher_mode: &str) -> Result<CipherSpec> {
        let known = Algorithm::ALL.into_iter().find(|algorithm| algorithm.name() == cipher_name);
        let Some(algorithm) = known else {
            return Err(Error::unsupported("this cipher is not known").field("cipher_name").value(cipher_name));
        };
        let unknown = |what: &str| {
            Error::unsupported(format!("this {what} is not known")).field("cipher_mode").value(cipher_mode)
        };
        let (chaining, generator) = cipher_mode.split_once('-').unwrap_or((cipher_mode, ""));
        let chaining = match chaining {
            "xts" => Chaining::Xts,
            "cbc" => Chaining::Cbc,
            "ctr" => Chaining::Ctr,
            "ecb" => Chaining::Ecb,
            _ => return Err(unknown("mode")),
        };
        let initial_vector = match generator.split_once(':').unwrap_or((generator, "")) {
            // A hash that isn't needed is named by QEMU all the same when it was asked for.
            ("plain", hash) if is_hash(hash) => InitialVector::Plain,
            ("plain64", hash) if is_hash(hash) => InitialVector::Plain64,
            ("essiv", hash) => InitialVector::Essiv(Hash::named("cipher_mode", hash)?),
            ("", "") if chaining == Chaining::Ecb => InitialVector::Plain64,
            _ => return Err(unknown("initial vector")),
        };
        Ok(CipherSpec { algorithm, chaining, initial_vector })
    }

    /// The mode as headers name it.
    pub fn mode_name(&self) -> String {
        let chaining = match self.chaining {
            Chaining::Xts => "xts",
            Chaining::Cbc => "cbc",
            Chaining::Ctr => "ctr",
            Chaining::Ecb => return "ecb".to_owned(),
        };
        match self.initial_vector {
            InitialVector::Plain => format!("{chaining}-plain"),
            InitialVector::Plain64 => format!("{chaining}-plain64"),
            InitialVector::Essiv(hash) => format!("{chaining}-essiv:{}", hash.name()),
        }
    }
}

fn is_hash(name: &str) -> bool {
    name.is_empty() || Hash::named("cipher_mode", name).is_ok()
}

/// Encrypts and decrypts whole sectors in place.
pub struct SectorCipher {
    chaining: Chaining,
    data: Box<dyn BlockCipher>,
    /// The cipher of the tweak in XTS.
    tweak: Option<Box<dyn BlockCipher>>,
    initial_vector: InitialVector,
    /// The cipher of the vectors in ESSIV.
    vectors: Option<Box<dyn BlockCipher>>,
}

impl std::fmt::Debug for SectorCipher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SectorCipher").field("chaining", &self.chaining).finish_non_exhaustive()
    }
}

#[derive(Clone, Copy)]
enum Direction {
    Encrypt,
    Decrypt,
}

impl SectorCipher {
    /// With a key of [`Algorithm::key_bytes`], twice as many for XTS. Keys of other lengths are refused, and XTS with
    /// blocks of 8 bytes.
    pub fn new(spec: CipherSpec, key: &[u8]) -> Result<SectorCipher> {
        let (data, tweak) = match spec.chaining {
            Chaining::Xts if !key.len().is_multiple_of(2) => {
                return Err(Error::unsupported("XTS takes two keys of one length").field("key_bytes").value(key.len()));
            }
            Chaining::Xts => {
                let (data, tweak) = key.split_at(key.len() / 2);
                (data, Some(block_cipher(spec.algorithm, tweak)?))
            }
            Chaining::Cbc | Chaining::Ctr | Chaining::Ecb => (key, None),
        };
        let vectors = match spec.initial_vector {
            InitialVector::Essiv(hash) => {
                let salt = zeroize::Zeroizing::new(hash.digest(&[key]));
                Some(block_cipher(spec.algorithm, &salt)?)
            }
            InitialVector::Plain | InitialVector::Plain64 => None,
        };
        let data = block_cipher(spec.algorithm, data)?;
        if tweak.is_some() && data.block_bytes() != BLOCK_BYTES {
            let message = "XTS takes ciphers with blocks of 16 bytes";
            return Err(Error::unsupported(message).field("cipher_name").value(spec.algorithm.name()));
        }
        Ok(SectorCipher { chaining: spec.chaining, data, tweak, initial_vector: spec.initial_vector, vectors })
    }

    /// Encrypts sectors numbered from `first` on. `bytes` is a multiple of [`SECTOR_BYTES`] long.
    pub fn encrypt(&self, first: u64, bytes: &mut [u8]) {
        self.run(first, bytes, Direction::Encrypt);
    }

    /// Decrypts sectors numbered from `first` on. `bytes` is a multiple of [`SECTOR_BYTES`] long.
    pub fn decrypt(&self, first: u64, bytes: &mut [u8]) {
        self.run(first, bytes, Direction::Decrypt);
    }

    fn run(&self, first: u64, bytes: &mut [u8], direction: Direction) {
        debug_assert!(bytes.len().is_multiple_of(SECTOR_BYTES));
        let mut number = first;
        for group in bytes.chunks_mut(VECTORS_AT_ONCE * SECTOR_BYTES) {
            let mut vectors = [Vector::default(); VECTORS_AT_ONCE];
            let vectors = &mut vectors[..group.len() / SECTOR_BYTES];
            for vector in vectors.iter_mut() {
                let narrow = self.initial_vector == InitialVector::Plain;
                let shown = if narrow { number & u64::from(u32::MAX) } else { number };
                vector[..8].copy_from_slice(&shown.to_le_bytes());
                number = number.wrapping_add(1);
            }
            if let Some(cipher) = &self.vectors {
                cipher.encrypt(vectors.as_flattened_mut());
            }
            if let Some(cipher) = &self.tweak {
                cipher.encrypt(vectors.as_flattened_mut());
            }
            self.chain(vectors, group, direction);
        }
    }

    /// Up to [`VECTORS_AT_ONCE`] sectors.
    fn chain(&self, vectors: &[Vector], sectors: &mut [u8], direction: Direction) {
        let parts = vectors.chunks(SECTORS_AT_ONCE);
        match (self.chaining, direction) {
            (Chaining::Cbc, Direction::Encrypt) => match self.data.block_bytes() {
                BLOCK_BYTES => self.cbc_encrypt::<BLOCK_BYTES>(vectors, sectors),
                _ => self.cbc_encrypt::<8>(vectors, sectors),
            },
            (Chaining::Cbc, Direction::Decrypt) => self.data.decrypt_chained(vectors, sectors),
            (Chaining::Xts, _) => {
                parts.zip(sectors.chunks_mut(BYTES_AT_ONCE)).for_each(|(part, bytes)| self.xts(part, bytes, direction));
            }
            (Chaining::Ctr, _) => {
                parts.zip(sectors.chunks_mut(BYTES_AT_ONCE)).for_each(|(part, bytes)| self.ctr(part, bytes));
            }
            (Chaining::Ecb, _) => self.blocks(sectors, direction),
        }
    }

    fn blocks(&self, bytes: &mut [u8], direction: Direction) {
        match direction {
            Direction::Encrypt => self.data.encrypt(bytes),
            Direction::Decrypt => self.data.decrypt(bytes),
        }
    }

    /// All tweaks first, so that the blocks go through the cipher together.
    fn xts(&self, vectors: &[Vector], sectors: &mut [u8], direction: Direction) {
        const BLOCKS: usize = SECTOR_BYTES / BLOCK_BYTES;
        let mut tweaks = [[0u128; BLOCKS]; SECTORS_AT_ONCE];
        let tweaks = &mut tweaks[..vectors.len()];
        for (tweaks, first) in tweaks.iter_mut().zip(vectors) {
            let mut tweak = u128::from_le_bytes(*first);
            for place in tweaks {
                *place = tweak;
                // Times x in GF(2^128), by x^128 = x^7 + x^2 + x + 1.
                tweak = (tweak << 1) ^ ((tweak >> 127) * 0x87);
            }
        }
        let tweaks = tweaks.as_flattened();
        whiten(sectors, tweaks);
        self.blocks(sectors, direction);
        whiten(sectors, tweaks);
    }

    /// Within a sector each block waits for the one before it. So one block of each sector at a time goes through the
    /// cipher, which takes several at once. `LEN`: bytes of a block.
    fn cbc_encrypt<const LEN: usize>(&self, vectors: &[Vector], sectors: &mut [u8]) {
        let mut lanes = [0; VECTORS_AT_ONCE * BLOCK_BYTES];
        let lanes = &mut lanes.as_chunks_mut::<LEN>().0[..vectors.len()];
        for (lane, vector) in lanes.iter_mut().zip(vectors) {
            lane.copy_from_slice(&vector[..LEN]);
        }
        for at in (0..SECTOR_BYTES).step_by(LEN) {
            for (lane, sector) in lanes.iter_mut().zip(sectors.chunks_exact(SECTOR_BYTES)) {
                mix(lane, &sector[at..at + LEN]);
            }
            self.data.encrypt(lanes.as_flattened_mut());
            for (lane, sector) in lanes.iter().zip(sectors.chunks_exact_mut(SECTOR_BYTES)) {
                sector[at..at + LEN].copy_from_slice(lane);
            }
        }
    }

    /// All counters go through the cipher together; both directions are one.
    fn ctr(&self, vectors: &[Vector], sectors: &mut [u8]) {
        let mut stream = [0; BYTES_AT_ONCE];
        let stream = &mut stream[..sectors.len()];
        let len = self.data.block_bytes();
        for (stream, vector) in stream.chunks_exact_mut(SECTOR_BYTES).zip(vectors) {
            // A short block's counter is the front of the vector.
            let mut counter = u128::from_be_bytes(*vector);
            let one = 1u128 << (8 * (BLOCK_BYTES - len));
            for block in stream.chunks_exact_mut(len) {
                block.copy_from_slice(&counter.to_be_bytes()[..len]);
                counter = counter.wrapping_add(one);
            }
        }
        self.data.encrypt(stream);
        mix(sectors, stream);
    }
}

fn whiten(sector: &mut [u8], tweaks: &[u128]) {
    for (block, tweak) in sector.as_chunks_mut::<BLOCK_BYTES>().0.iter_mut().zip(tweaks) {
        *block = (u128::from_le_bytes(*block) ^ tweak).to_le_bytes();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODES: [&str; 10] = [
        "xts-plain64",
        "xts-plain",
        "xts-essiv:sha256",
        "cbc-plain64",
        "cbc-essiv:sha256",
        "cbc-essiv:md5",
        "ctr-plain64",
        "ctr-plain",
        "ctr-essiv:sha256",
        "ecb",
    ];

    /// True when the algorithm has the mode: XTS takes blocks of 16 bytes, and ESSIV a digest that is a key.
    fn has(algorithm: Algorithm, mode: &str) -> bool {
        match mode.split_once("essiv:") {
            _ if algorithm == Algorithm::Cast5 && mode.starts_with("xts") => false,
            Some((_, hash)) => algorithm.key_bytes().contains(&Hash::named("", hash).unwrap().digest_bytes()),
            None => true,
        }
    }

    /// IEEE 1619-2007, annex B, XTS-AES-128 vector 4 and XTS-AES-256 vector 10: first and last bytes of the sector.
    #[test]
    fn xts_as_in_the_standard() {
        let digits = |start: &str| -> Vec<u8> {
            (0..start.len() / 2).map(|at| u8::from_str_radix(&start[2 * at..2 * at + 2], 16).unwrap()).collect()
        };
        let plain: Vec<u8> = (0..SECTOR_BYTES).map(|at| at as u8).collect();
        let cases = [
            ("2718281828459045235360287471352631415926535897932384626433832795", 0, "27a7479befa1d476489f308cd4cfa6e2"),
            (
                "27182818284590452353602874713526624977572470936999595749669676273141592653589793238462643383279502884197169399375105820974944592",
                0xff,
                "1c3b3a102f770386e4836c99e370cf9b",
            ),
        ];
        for (key, sector, start) in cases {
            let spec = CipherSpec::parse("aes", "xts-plain64").unwrap();
            let cipher = SectorCipher::new(spec, &digits(key)).unwrap();
            let mut bytes = plain.clone();
            cipher.encrypt(sector, &mut bytes);
            assert_eq!(bytes[..16], digits(start)[..]);
            cipher.decrypt(sector, &mut bytes);
            assert!(bytes == plain);
        }
    }

    #[test]
    fn what_is_encrypted_is_decrypted() {
        let mut seen = 0;
        for algorithm in Algorithm::ALL {
            for mode in MODES.into_iter().filter(|mode| has(algorithm, mode)) {
                for width in algorithm.key_bytes() {
                    round_trip(algorithm.name(), mode, *width);
                    seen += 1;
                }
            }
        }
        assert_eq!(seen, 3 * 3 * 10 + 5 + 7);
    }

    fn round_trip(name: &str, mode: &str, width: usize) {
        let spec = CipherSpec::parse(name, mode).unwrap();
        assert_eq!(spec.mode_name(), mode);
        let len = if spec.chaining == Chaining::Xts { 2 * width } else { width };
        let key: Vec<u8> = (0..len).map(|at| (at * 7 + 3) as u8).collect();
        let cipher = SectorCipher::new(spec, &key).unwrap();
        let sectors = 2 * VECTORS_AT_ONCE + 3;
        let plain: Vec<u8> = (0..sectors * SECTOR_BYTES).map(|at| (at / 5) as u8).collect();
        let mut bytes = plain.clone();
        cipher.encrypt(u64::from(u32::MAX) - 3, &mut bytes);
        assert!(bytes != plain, "{name} {mode}");
        // Sector by sector is the same as all at once, both ways.
        let mut back = bytes.clone();
        for index in 0..sectors {
            let range = index * SECTOR_BYTES..(index + 1) * SECTOR_BYTES;
            let number = u64::from(u32::MAX) - 3 + index as u64;
            let mut single = plain[range.clone()].to_vec();
            cipher.encrypt(number, &mut single);
            assert!(single == bytes[range.clone()], "{name} {mode} {index}");
            cipher.decrypt(number, &mut back[range]);
        }
        assert!(back == plain, "{name} {mode}");
        cipher.decrypt(u64::from(u32::MAX) - 3, &mut bytes);
        assert!(bytes == plain, "{name} {mode}");
    }

    /// NIST SP 800-38A, F.5.1 has its own first counter. Here the counter is the sector's number, little end first, and
    /// counts up from its other end.
    #[test]
    fn counters_count_from_the_big_end() {
        for (name, len) in [("aes", 16), ("cast5", 8)] {
            let spec = CipherSpec::parse(name, "ctr-plain64").unwrap();
            let key = [0x2b; 16];
            let cipher = SectorCipher::new(spec, &key).unwrap();
            let mut bytes = vec![0; SECTOR_BYTES];
            cipher.encrypt(5, &mut bytes);
            let blocks = block_cipher(spec.algorithm, &key).unwrap();
            for (index, stored) in bytes.chunks(len).enumerate() {
                let mut counter = vec![0; len];
                counter[0] = 5;
                counter[len - 1] = index as u8;
                blocks.encrypt(&mut counter);
                assert_eq!(stored, counter, "{name} {index}");
            }
        }
    }

    #[test]
    fn what_is_not_known_is_refused() {
        for (name, mode) in [
            ("des", "cbc-plain64"),
            ("aes", "gcm-plain64"),
            ("aes", "cbc"),
            ("aes", "xts-null"),
            ("aes", "cbc-essiv"),
            ("aes", "cbc-essiv:md4"),
            ("", ""),
        ] {
            assert!(CipherSpec::parse(name, mode).is_err(), "{name} {mode}");
        }
        assert_eq!(CipherSpec::parse("aes", "xts-plain64:sha256").unwrap().mode_name(), "xts-plain64");
        assert!(CipherSpec::parse("aes", "xts-plain64:rot13").is_err());
        let spec = CipherSpec::parse("aes", "xts-plain64").unwrap();
        for len in [0, 15, 16, 33, 34, 63, 128] {
            assert!(SectorCipher::new(spec, &vec![1; len]).is_err(), "{len}");
        }
        let spec = CipherSpec::parse("cast5", "xts-plain64").unwrap();
        let error = SectorCipher::new(spec, &[1; 32]).expect_err("its blocks are too short");
        assert!(error.to_string().contains("blocks of 16 bytes"), "{error}");
        // A vector cipher takes the hash as its key, which must fit.
        let spec = CipherSpec::parse("aes", "cbc-essiv:sha1").unwrap();
        assert!(SectorCipher::new(spec, &[1; 16]).is_err());
    }
}
