// SPDX-License-Identifier: Apache-2.0 OR MIT
//! LUKS version 1 (LUKS On-Disk Format Specification 1.2.3): the master key in its slots. The caller reads and writes;
//! the key material of a slot must be on disk before the header that makes the slot active.

pub use crate::random::fill_random;
use crate::{Chaining, CipherSpec, Hash, SECTOR_BYTES, SectorCipher, split};
use cowshed_layout::luks::{
    DIGEST_BYTES, HEADER_BYTES, KeySlot, LuksHeader, SALT_BYTES, SLOT_STATE_BYTES, SLOTS, slot_place,
};
use cowshed_types::{Error, Result};
use std::ops::Range;
use std::time::{Duration, Instant};
use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

/// Stripes of new key slots, as in every implementation.
const STRIPES: u32 = 4000;
/// Alignment in bytes of new key material, and of the data behind it.
const ALIGNMENT: u64 = 4096;
/// The system's words for a number that doesn't fit.
const OUT_OF_RANGE: &str = "Numerical result out of range";
/// The specification's least number of iterations.
const LEAST_ITERATIONS: u32 = 1000;
/// More key material than any slot has: 64 bytes in 4,000 stripes are 256 KB.
const MOST_MATERIAL_BYTES: u64 = 1 << 20;

/// Bytes, and where they go, from the header's first byte on.
pub type Write = (u64, Vec<u8>);

/// Writes in any order; behind them comes a barrier.
pub type Stage = Vec<Write>;

/// Length in bytes of the header of a new volume with its key slots: where the payload begins behind it.
pub fn new_header_bytes(key_bytes: u32) -> u64 {
    ALIGNMENT + SLOTS as u64 * area_bytes(key_bytes)
}

fn area_bytes(key_bytes: u32) -> u64 {
    (u64::from(key_bytes) * u64::from(STRIPES)).next_multiple_of(ALIGNMENT)
}

/// The mode as new headers have it: QEMU needs the initial vector named, also where the mode has none.
fn header_mode(spec: CipherSpec) -> String {
    match spec.chaining {
        Chaining::Ecb => "ecb-plain64".to_owned(),
        _ => spec.mode_name(),
    }
}

/// The key that the data is encrypted with; wiped when dropped.
#[derive(Clone)]
pub struct MasterKey(Zeroizing<Vec<u8>>);

impl std::fmt::Debug for MasterKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "MasterKey({} bytes)", self.0.len())
    }
}

/// A header that makes sense, with the methods that it names.
#[derive(Clone, Debug)]
pub struct Volume {
    header: LuksHeader,
    spec: CipherSpec,
    hash: Hash,
}

impl Volume {
    /// Checks a header: known cipher and hash, slots inside the first `payload_offset` bytes and apart from each other.
    /// Errors name the field. `area_bytes` is where the header's area ends.
    pub fn new(header: LuksHeader, area_bytes: u64) -> Result<Volume> {
        let spec = CipherSpec::parse(&header.cipher_name, &header.cipher_mode)?;
        let hash = Hash::named("luks_hash", &header.hash)?;
        // The cipher decides whether the key fits it.
        SectorCipher::new(spec, &vec![0; (header.key_bytes as usize).min(4096)])?;
        let wrong = |field: &'static str, value: u64, message: &str| Err(Error::invalid_image(field, value, message));
        if header.master_key_iterations == 0 {
            return wrong("luks_mk_digest_iterations", 0, "the digest of the master key needs iterations");
        }
        // The payload of a detached header is in another file.
        let end = if header.payload_offset == 0 { area_bytes } else { area_bytes.min(header.payload_offset) };
        if header.payload_offset > area_bytes {
            return wrong(
                "luks_payload_offset",
                header.payload_offset,
                "the payload begins behind the area of the header",
            );
        }
        let volume = Volume { header, spec, hash };
        let mut areas: Vec<Range<u64>> = Vec::from([Range { start: 0, end: HEADER_BYTES as u64 }]);
        for slot in (0..SLOTS).filter(|slot| volume.header.slots[*slot].active) {
            let KeySlot { iterations, stripes, key_offset, .. } = volume.header.slots[slot];
            if iterations == 0 {
                return wrong("luks_key_slot_iterations", 0, "an active key slot needs iterations");
            }
            if stripes == 0 || u64::from(stripes) * u64::from(volume.header.key_bytes) > MOST_MATERIAL_BYTES {
                return wrong("luks_key_slot_stripes", stripes.into(), "a key slot has no stripes, or too many");
            }
            let area = volume.key_material(slot);
            if area.end > end {
                return wrong("luks_key_slot_offset", key_offset, "key material reaches past the header's area");
            }
            if areas.iter().any(|other| other.start < area.end && area.start < other.end) {
                return wrong("luks_key_slot_offset", key_offset, "key material overlaps the header or another slot's");
            }
            areas.push(area);
        }
        Ok(volume)
    }

    /// A new volume with random master key, salts and UUID, all slots empty. `iterations` are those of the master key's
    /// digest.
    pub fn create(spec: CipherSpec, hash: Hash, key_bytes: u32, iterations: u32) -> Result<(Volume, MasterKey)> {
        let mut key = Zeroizing::new(vec![0; key_bytes as usize]);
        fill_random(&mut key)?;
        SectorCipher::new(spec, &key)?;
        let area = area_bytes(key_bytes);
        let mut slots = [KeySlot::default(); SLOTS];
        for (index, slot) in slots.iter_mut().enumerate() {
            *slot = KeySlot { key_offset: ALIGNMENT + index as u64 * area, stripes: STRIPES, ..KeySlot::default() };
        }
        let mut salt = [0; SALT_BYTES];
        fill_random(&mut salt)?;
        let mut volume = Volume {
            header: LuksHeader {
                cipher_name: spec.algorithm.name().to_owned(),
                cipher_mode: header_mode(spec),
                hash: hash.name().to_owned(),
                payload_offset: new_header_bytes(key_bytes),
                key_bytes,
                master_key_digest: [0; DIGEST_BYTES],
                master_key_salt: salt,
                master_key_iterations: iterations.max(LEAST_ITERATIONS),
                uuid: random_uuid()?,
                slots,
            },
            spec,
            hash,
        };
        volume.header.master_key_digest = volume.digest(&key);
        Ok((volume, MasterKey(key)))
    }

    /// The header.
    pub fn header(&self) -> &LuksHeader {
        &self.header
    }

    /// The hash of key derivation and splitter.
    pub fn hash(&self) -> Hash {
        self.hash
    }

    /// The place of a slot's key material, in bytes from the header on. `slot` is 0 to 7.
    pub fn key_material(&self, slot: usize) -> Range<u64> {
        let KeySlot { key_offset, stripes, .. } = self.header.slots[slot];
        let len = u64::from(stripes) * u64::from(self.header.key_bytes);
        key_offset..key_offset + len.next_multiple_of(SECTOR_BYTES as u64)
    }

    /// Slots that hold a key.
    pub fn active_slots(&self) -> impl Iterator<Item = usize> + '_ {
        (0..SLOTS).filter(|slot| self.header.slots[*slot].active)
    }

    /// The master key, if the passphrase is that of this slot. `material` has the bytes at [`Self::key_material`].
    pub fn try_slot(&self, slot: usize, material: &[u8], passphrase: &[u8]) -> Result<Option<MasterKey>> {
        let key_slot = self.header.slots[slot];
        if !key_slot.active {
            return Ok(None);
        }
        let mut material = Zeroizing::new(material.to_vec());
        self.slot_cipher(&key_slot, passphrase)?.decrypt(0, &mut material);
        let key_bytes = self.header.key_bytes as usize;
        material.truncate(key_bytes * key_slot.stripes as usize);
        let key = split::merge(self.hash, &material, key_bytes);
        let matches = bool::from(self.digest(&key).ct_eq(&self.header.master_key_digest));
        Ok(matches.then_some(MasterKey(key)))
    }

    /// The same volume as the header of data in another file, from its first byte on.
    #[must_use]
    pub fn detached(mut self) -> Volume {
        self.header.payload_offset = 0;
        self
    }

    /// Makes a slot open with this passphrase: returns the key material to write at [`Self::key_material`]; after that the
    /// header goes to disk. The slot must be empty.
    pub fn fill_slot(&mut self, slot: usize, key: &MasterKey, passphrase: &[u8], iterations: u32) -> Result<Vec<u8>> {
        let mut key_slot = self.header.slots[slot];
        if key_slot.active {
            return Err(Error::invalid_argument("the key slot is in use").value(slot));
        }
        key_slot.iterations = iterations.max(LEAST_ITERATIONS);
        key_slot.stripes = STRIPES;
        fill_random(&mut key_slot.salt)?;
        let mut material = vec![0; key.0.len() * (STRIPES as usize - 1)];
        fill_random(&mut material)?;
        split::split(self.hash, &key.0, &mut material);
        material.resize(material.len().next_multiple_of(SECTOR_BYTES), 0);
        self.slot_cipher(&key_slot, passphrase)?.encrypt(0, &mut material);
        key_slot.active = true;
        self.header.slots[slot] = key_slot;
        Ok(material)
    }

    /// Makes an empty slot open with this passphrase: the volume as it is then, and the writes. The slot counts as active
    /// only when all else of it is durable.
    pub fn activation(
        &self,
        slot: usize,
        key: &MasterKey,
        passphrase: &[u8],
        iterations: u32,
    ) -> Result<(Volume, Vec<Stage>)> {
        let mut next = self.clone();
        let material = next.fill_slot(slot, key, passphrase, iterations)?;
        let place = next.key_material(slot).start;
        let (state, rest) = next.slot_writes(slot);
        Ok((next, vec![vec![(place, material), rest], vec![state]]))
    }

    /// Empties a slot: the volume as it is then, and the writes. The key material is overwritten when nothing relies on it
    /// any more.
    pub fn deactivation(&self, slot: usize) -> Result<(Volume, Vec<Stage>)> {
        let mut next = self.clone();
        let place = self.key_material(slot);
        let mut material = vec![0; (place.end - place.start) as usize];
        fill_random(&mut material)?;
        let KeySlot { key_offset, stripes, .. } = self.header.slots[slot];
        next.header.slots[slot] = KeySlot { key_offset, stripes, ..KeySlot::default() };
        let (state, rest) = next.slot_writes(slot);
        Ok((next, vec![vec![state], vec![rest, (place.start, material)]]))
    }

    /// The slot in the header. The first write is the word that makes it active, which lies within one sector; the
    /// second has the fields behind it.
    fn slot_writes(&self, slot: usize) -> (Write, Write) {
        let place = slot_place(slot);
        let bytes = self.header.encode();
        let rest = place.start + SLOT_STATE_BYTES;
        let write = |range: Range<usize>| (range.start as u64, bytes[range].to_vec());
        (write(place.start..rest), write(rest..place.end))
    }

    /// The cipher of the data.
    pub fn cipher(&self, key: &MasterKey) -> Result<SectorCipher> {
        SectorCipher::new(self.spec, &key.0)
    }

    fn slot_cipher(&self, slot: &KeySlot, passphrase: &[u8]) -> Result<SectorCipher> {
        let mut key = Zeroizing::new(vec![0; self.header.key_bytes as usize]);
        self.hash.pbkdf2(passphrase, &slot.salt, slot.iterations, &mut key);
        SectorCipher::new(self.spec, &key)
    }

    fn digest(&self, key: &[u8]) -> [u8; DIGEST_BYTES] {
        let mut digest = [0; DIGEST_BYTES];
        self.hash.pbkdf2(key, &self.header.master_key_salt, self.header.master_key_iterations, &mut digest);
        digest
    }
}

/// The number of iterations of the key derivation that take about `milliseconds` on this machine, for a key of
/// `key_bytes` bytes. At least the specification's 1,000. An error where the header's 32 bits can't hold the number.
pub fn iterations_for(hash: Hash, key_bytes: u32, milliseconds: u64) -> Result<u32> {
    const ENOUGH: Duration = Duration::from_millis(50);
    let mut key = Zeroizing::new(vec![0; key_bytes as usize]);
    let mut iterations = LEAST_ITERATIONS;
    loop {
        let started = Instant::now();
        hash.pbkdf2(b"a passphrase", &[0x5a; SALT_BYTES], iterations, &mut key);
        let took = started.elapsed();
        if took >= ENOUGH || iterations >= u32::MAX / 4 {
            let each_second = f64::from(iterations) / took.as_secs_f64().max(1e-9);
            return scaled(each_second as u64, milliseconds);
        }
        iterations *= 4;
    }
}

fn scaled(each_second: u64, milliseconds: u64) -> Result<u32> {
    let refused = |why: String| Err(Error::invalid_argument(format!("PBKDF iterations {why}: {OUT_OF_RANGE}")));
    let Some(wanted) = each_second.checked_mul(milliseconds) else {
        return refused(format!("{each_second} too large to scale"));
    };
    match u32::try_from(wanted / 1000) {
        Ok(iterations) => Ok(iterations.max(LEAST_ITERATIONS)),
        Err(_) => refused(format!("{} larger than {}", wanted / 1000, u32::MAX)),
    }
}

/// A random UUID (RFC 9562, version 4) as text.
fn random_uuid() -> Result<String> {
    let mut bytes = [0; 16];
    fill_random(&mut bytes)?;
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let digits = format!("{:032x}", u128::from_be_bytes(bytes));
    Ok(format!("{}-{}-{}-{}-{}", &digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume() -> (Volume, MasterKey) {
        let spec = CipherSpec::parse("aes", "xts-plain64").unwrap();
        Volume::create(spec, Hash::Sha256, 64, 1).unwrap()
    }

    #[test]
    fn a_new_volume_lies_as_qemu_lays_it() {
        let (volume, _) = volume();
        assert_eq!(volume.header().payload_offset, 4040 * 512);
        assert_eq!(volume.key_material(0), 4096..4096 + 256_000);
        assert_eq!(volume.header().uuid.len(), 36);
        assert_eq!(volume.header().cipher_with_width(), "aes-256");
    }

    #[test]
    fn slots_open_with_their_own_passphrase_only() {
        let (mut volume, key) = volume();
        let first = volume.fill_slot(0, &key, b"one", 1000).unwrap();
        let third = volume.fill_slot(2, &key, b"three", 1000).unwrap();
        assert!(volume.fill_slot(2, &key, b"again", 1000).is_err());
        let read = LuksHeader::parse(&volume.header().encode()).unwrap();
        let volume = Volume::new(read, 4040 * 512).unwrap();
        assert_eq!(volume.active_slots().collect::<Vec<_>>(), [0, 2]);
        for (slot, material, good) in [(0, &first, &b"one"[..]), (2, &third, b"three")] {
            for passphrase in [&b"one"[..], b"three", b"", b"two"] {
                let opened = volume.try_slot(slot, material, passphrase).unwrap();
                assert_eq!(opened.is_some(), passphrase == good, "slot {slot}");
                assert!(opened.is_none_or(|opened| opened.0 == key.0));
            }
        }
        assert!(volume.try_slot(1, &first, b"one").unwrap().is_none());
        let mut damaged = first.clone();
        damaged[70_000] ^= 4;
        assert!(volume.try_slot(0, &damaged, b"one").unwrap().is_none());
    }

    /// The possible contents of a disk after these stages, and after each subset of the writes of the next one.
    fn disks_after_cuts(disk: &[u8], stages: &[Stage]) -> Vec<Vec<u8>> {
        let mut disks = vec![disk.to_vec()];
        let mut now = disk.to_vec();
        for stage in stages {
            // Torn at sector size.
            let pieces: Vec<(usize, &[u8])> = stage
                .iter()
                .flat_map(|(at, bytes)| {
                    let at = *at as usize;
                    let first = SECTOR_BYTES - at % SECTOR_BYTES;
                    let (head, rest) = bytes.split_at(first.min(bytes.len()));
                    let rest = rest.chunks(SECTOR_BYTES).enumerate();
                    std::iter::once((at, head))
                        .chain(rest.map(move |(i, piece)| (at + first + i * SECTOR_BYTES, piece)))
                })
                .collect();
            for lost in 0..pieces.len().min(40) {
                let mut torn = now.clone();
                for (index, (at, piece)) in pieces.iter().enumerate() {
                    if index % (lost + 2) != 0 {
                        torn[*at..at + piece.len()].copy_from_slice(piece);
                    }
                }
                disks.push(torn);
            }
            for (at, piece) in &pieces {
                now[*at..at + piece.len()].copy_from_slice(piece);
            }
            disks.push(now.clone());
        }
        disks
    }

    fn opens(disk: &[u8], passphrase: &[u8]) -> bool {
        let volume = Volume::new(LuksHeader::parse(disk).unwrap(), disk.len() as u64).unwrap();
        let slots: Vec<usize> = volume.active_slots().collect();
        slots.into_iter().any(|slot| {
            let place = volume.key_material(slot);
            let material = &disk[place.start as usize..place.end as usize];
            volume.try_slot(slot, material, passphrase).unwrap().is_some()
        })
    }

    #[test]
    fn slots_change_by_stages_that_a_power_cut_may_tear() {
        let spec = CipherSpec::parse("aes", "cbc-plain64").unwrap();
        let (mut volume, key) = Volume::create(spec, Hash::Sha256, 16, 1).unwrap();
        let material = volume.fill_slot(1, &key, b"old", 1000).unwrap();
        let mut disk = vec![0; volume.header().payload_offset as usize];
        disk[..HEADER_BYTES].copy_from_slice(&volume.header().encode());
        disk[4096 + 65536..][..material.len()].copy_from_slice(&material);
        assert!(opens(&disk, b"old"));
        // Slot 6 lies on both sides of a sector's border, slot 7 behind it.
        for slot in [0, 6, 7] {
            let (filled, stages) = volume.activation(slot, &key, b"new", 1000).unwrap();
            let disks = disks_after_cuts(&disk, &stages);
            assert!(disks.iter().all(|disk| opens(disk, b"old")), "slot {slot}");
            let last = disks.last().unwrap();
            assert!(opens(last, b"new"), "slot {slot}");
            assert_eq!(&LuksHeader::parse(last).unwrap(), filled.header());
            let (_, stages) = filled.deactivation(1).unwrap();
            let disks = disks_after_cuts(last, &stages);
            assert!(disks.iter().all(|disk| opens(disk, b"new")), "slot {slot}");
            let last = disks.last().unwrap();
            assert!(!opens(last, b"old"));
            assert!(!last.windows(64).any(|bytes| bytes == &material[..64]), "the old key material is still there");
        }
        assert!(volume.activation(1, &key, b"new", 1000).is_err(), "it is in use");
    }

    #[test]
    fn headers_that_lie_are_refused_by_field() {
        let (mut good, key) = volume();
        good.fill_slot(0, &key, b"one", 1000).unwrap();
        good.fill_slot(1, &key, b"two", 1000).unwrap();
        let area = good.header().payload_offset;
        assert!(Volume::new(good.header().clone(), area).is_ok());
        type Change = fn(&mut LuksHeader);
        let lies: [(&str, Change); 12] = [
            ("cipher_name", |header| header.cipher_name = "rot13".into()),
            ("cipher_mode", |header| header.cipher_mode = "xts".into()),
            ("luks_hash", |header| header.hash = "md4".into()),
            ("key_bytes", |header| header.key_bytes = 0),
            ("key_bytes", |header| header.key_bytes = u32::MAX),
            ("luks_mk_digest_iterations", |header| header.master_key_iterations = 0),
            ("luks_payload_offset", |header| header.payload_offset += 512),
            ("luks_key_slot_iterations", |header| header.slots[1].iterations = 0),
            ("luks_key_slot_stripes", |header| header.slots[0].stripes = 0),
            ("luks_key_slot_stripes", |header| header.slots[0].stripes = u32::MAX),
            ("luks_key_slot_offset", |header| header.slots[1].key_offset = header.slots[0].key_offset + 512),
            ("luks_key_slot_offset", |header| header.slots[1].key_offset = header.payload_offset - 512),
        ];
        for (field, change) in lies {
            let mut header = good.header().clone();
            change(&mut header);
            let error = Volume::new(header, area).expect_err(field);
            assert!(error.to_string().contains(field), "{field}: {error}");
        }
    }

    #[test]
    fn time_becomes_iterations() {
        let short = iterations_for(Hash::Sha256, 32, 0).unwrap();
        let long = iterations_for(Hash::Sha256, 32, 100_000).unwrap();
        assert!(short == LEAST_ITERATIONS && long > 1_000_000 / 50, "{short}, {long}");
        let refused = |each_second, milliseconds| scaled(each_second, milliseconds).unwrap_err().to_string();
        let large = "PBKDF iterations 4294967296 larger than 4294967295: Numerical result out of range";
        assert_eq!(refused(1 << 32, 1000), large);
        let huge = "PBKDF iterations 1000000 too large to scale: Numerical result out of range";
        assert_eq!(refused(1_000_000, u64::MAX), huge);
    }
}
