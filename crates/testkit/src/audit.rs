// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A second opinion on a qcow2 image: is every cluster that is used counted often enough, and are the COPIED flags
//! right? It is written against the specification alone and shares no code with the engine or its `check`. It is small
//! and fast enough for every state of the crash enumerator. The contents of dirty bitmaps are not looked into.

use cowshed_simulator::PageMap;
use std::collections::BTreeMap;
use std::ops::Range;

/// The findings besides errors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Audit {
    /// Clusters counted more often than they are used.
    pub leaks: u64,
    /// Where the first of them are, in clusters.
    pub leaked: Vec<u64>,
    /// The dirty bit is set: refcounts were not looked at.
    pub dirty: bool,
    /// Guest clusters that are mapped.
    pub mapped: u64,
    /// The most uses that one host cluster has.
    pub most_uses: u64,
    /// Clusters of the tables that move when they grow: L1 table and refcount table.
    pub moving_table_clusters: u64,
    /// Entries with data behind the end of the disk.
    pub behind_end: u64,
    /// Dirty bitmaps that count, and how many of them are in use.
    pub bitmaps: (u64, u64),
}

/// The places of a snapshot's L1 table.
struct SnapshotTables {
    l1: u64,
    l1_len: u64,
}

/// The most leaked clusters that are reported.
const LEAKS_TOLD: usize = 64;
const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

struct Image<'a> {
    file: &'a PageMap,
    version: u64,
    cluster_bits: u32,
    refcount_bits: u32,
    extended_l2: bool,
    data_file: bool,
    refcount_table: u64,
    refcount_table_len: u64,
    /// Uses of each host cluster.
    used: BTreeMap<u64, u64>,
    /// Ranges that hold tables or the header.
    metadata: Vec<Range<u64>>,
    audit: Audit,
}

/// Looks at the image in `file`.
///
/// # Errors
/// The first error that `qemu-img check` would count as a corruption.
pub fn audit(file: &PageMap) -> Result<Audit, String> {
    look(file).map(|image| image.audit)
}

/// The places of the header and the tables of the image in `file`.
///
/// # Errors
/// As [`audit`].
pub fn metadata_ranges(file: &PageMap) -> Result<Vec<Range<u64>>, String> {
    look(file).map(|image| image.metadata)
}

fn look(file: &PageMap) -> Result<Image<'_>, String> {
    let byte32 = |at: u64| read(file, at, 4);
    let word = |at: u64| read(file, at, 8);
    if byte32(0) != 0x5146_49fb {
        return Err("no qcow2 header".to_owned());
    }
    let version = byte32(4);
    let incompatible = if version >= 3 { word(72) } else { 0 };
    let mut image = Image {
        file,
        version,
        cluster_bits: byte32(20) as u32,
        refcount_bits: if version >= 3 { 1 << byte32(96) } else { 16 },
        extended_l2: incompatible & 16 != 0,
        data_file: incompatible & 4 != 0,
        refcount_table: word(48),
        refcount_table_len: byte32(56) << byte32(20),
        used: BTreeMap::new(),
        metadata: Vec::new(),
        audit: Audit { dirty: incompatible & 1 != 0, ..Audit::default() },
    };
    if incompatible & 2 != 0 {
        return Err("the corrupt bit is set".to_owned());
    }
    // QEMU's repair drops the snapshots of an image with an autoclear bit that it doesn't know.
    if version >= 3 && byte32(60) > 0 && word(88) & !3 != 0 {
        return Err(format!("{} snapshots beside the autoclear bits {:#x}", byte32(60), word(88)));
    }
    let (l1, l1_len) = (word(40), byte32(36));
    let l1_clusters = (l1_len * 8).div_ceil(1 << image.cluster_bits);
    image.audit.moving_table_clusters = l1_clusters + (image.refcount_table_len >> image.cluster_bits);
    image.use_metadata(0, 1, "header")?;
    if let Some((offset, len)) = encryption_header(file) {
        image.use_metadata(offset, len, "encryption header")?;
    }
    image.use_metadata(l1, l1_len * 8, "L1 table")?;
    image.walk_l1(l1, l1_len)?;
    for snapshot in image.snapshots()? {
        image.use_metadata(snapshot.l1, snapshot.l1_len * 8, "L1 table of a snapshot")?;
        image.walk_l1(snapshot.l1, snapshot.l1_len)?;
    }
    image.audit.behind_end = image.data_behind(l1, l1_len, word(24));
    image.walk_bitmaps()?;
    image.walk_refcounts()?;
    if !image.audit.dirty {
        image.compare()?;
        image.check_copied(l1, l1_len)?;
    }
    Ok(image)
}

/// A digest of all data of internal snapshots: the contents of their tables and of the clusters that these name. 0
/// without snapshots. Nothing that is done to the disk may change it.
///
/// # Errors
/// As [`audit`].
pub fn snapshot_digest(file: &PageMap) -> Result<u64, String> {
    let mut image = look(file)?;
    let mut digest = 0u64;
    let mut mix = |word: u64| digest = (digest.rotate_left(23) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for snapshot in image.snapshots()? {
        for index in 0..snapshot.l1_len {
            let entry = read(file, snapshot.l1 + index * 8, 8) & !COPIED;
            mix(entry);
            if entry == 0 {
                continue;
            }
            for (at, (entry, bitmap)) in image.table(entry & OFFSET) {
                [at, entry & !COPIED, bitmap].into_iter().for_each(&mut mix);
                let (start, len) = match entry & COMPRESSED {
                    0 => (entry & OFFSET, if entry & OFFSET == 0 { 0 } else { image.cluster_bytes() }),
                    _ => image.compressed_span(entry),
                };
                let mut bytes = vec![0; len as usize];
                file.read(start, &mut bytes);
                bytes
                    .chunks_exact(8)
                    .for_each(|word| mix(word.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte))));
            }
        }
    }
    Ok(digest)
}

/// The L2 entry of the guest's cluster `cluster` in the bytes of `file`; 0 without a table.
pub fn l2_entry(file: &PageMap, cluster: u64) -> u64 {
    let extended = read(file, 4, 4) >= 3 && read(file, 72, 8) & 16 != 0;
    let (cluster_bits, entry_bytes) = (read(file, 20, 4), if extended { 16 } else { 8 });
    let per_table = (1 << cluster_bits) / entry_bytes;
    let table = read(file, read(file, 40, 8) + cluster / per_table * 8, 8) & OFFSET;
    if table == 0 { 0 } else { read(file, table + cluster % per_table * entry_bytes, 8) }
}

/// The offset of the host cluster in an L2 entry of a cluster that is not compressed.
pub fn host_offset(entry: u64) -> u64 {
    entry & OFFSET
}

/// Offset and length of the LUKS header, by its header extension ("Full disk encryption header pointer").
fn encryption_header(file: &PageMap) -> Option<(u64, u64)> {
    let mut at = if read(file, 4, 4) >= 3 { read(file, 100, 4) } else { 72 };
    loop {
        match (read(file, at, 4), read(file, at + 4, 4)) {
            (0, _) => return None,
            (0x0537_be77, _) => return Some((read(file, at + 8, 8), read(file, at + 16, 8))),
            (_, len) => at += 8 + len.next_multiple_of(8),
        }
    }
}

fn read(file: &PageMap, at: u64, bytes: usize) -> u64 {
    let mut buffer = [0; 8];
    file.read(at, &mut buffer[8 - bytes..]);
    u64::from_be_bytes(buffer)
}

impl Image<'_> {
    fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }

    fn l2_entry_bytes(&self) -> u64 {
        if self.extended_l2 { 16 } else { 8 }
    }

    /// The entries of the L2 table at `l2`, with their places: descriptor and (with subclusters) bitmap. Empty ones are
    /// left out.
    fn table(&self, l2: u64) -> Vec<(u64, (u64, u64))> {
        let mut bytes = vec![0; self.cluster_bytes() as usize];
        self.file.read(l2, &mut bytes);
        let step = self.l2_entry_bytes();
        let word = |at: usize| u64::from_be_bytes(std::array::from_fn(|index| bytes[at + index]));
        let entries = (0..self.cluster_bytes()).step_by(step as usize).map(|at| {
            let at = at as usize;
            (l2 + at as u64, (word(at), if step == 16 { word(at + 8) } else { 0 }))
        });
        entries.filter(|(_, entry)| *entry != (0, 0)).collect()
    }

    /// The bitmap directory, the tables and the data, where they count by the autoclear bit.
    fn walk_bitmaps(&mut self) -> Result<(), String> {
        if self.version < 3 || read(self.file, 88, 8) & 1 == 0 {
            return Ok(());
        }
        let mut at = read(self.file, 100, 4);
        let (count, directory) = loop {
            match (read(self.file, at, 4), read(self.file, at + 4, 4)) {
                (0, _) => return Err("the bit for bitmaps is set, their extension isn't there".to_owned()),
                (0x2385_2875, 24) => break (read(self.file, at + 8, 4), read(self.file, at + 24, 8)),
                (_, len) => at += 8 + len.next_multiple_of(8),
            }
        };
        let len = read(self.file, at + 16, 8);
        self.use_metadata(directory, len, "bitmap directory")?;
        let disk = read(self.file, 24, 8);
        let mut entry = directory;
        for _ in 0..count {
            let (table, entries) = (read(self.file, entry, 8), read(self.file, entry + 8, 4));
            let in_use = read(self.file, entry + 12, 4) & 1;
            let granularity = 1u64 << read(self.file, entry + 17, 1);
            let needed = disk.div_ceil(granularity).div_ceil(8).div_ceil(self.cluster_bytes());
            if entries != needed {
                return Err(format!("a bitmap table has {entries} entries, not {needed}"));
            }
            self.use_metadata(table, entries * 8, "bitmap table")?;
            for index in 0..entries {
                let raw = read(self.file, table + index * 8, 8);
                if raw & !OFFSET & !1 != 0 || (raw & OFFSET != 0 && raw & 1 != 0) {
                    return Err(format!("bitmap table entry {raw:#x} has reserved bits"));
                }
                if raw & OFFSET != 0 {
                    self.use_range(raw & OFFSET, self.cluster_bytes(), "bitmap data")?;
                }
            }
            self.audit.bitmaps.0 += 1;
            self.audit.bitmaps.1 += in_use;
            let variable = read(self.file, entry + 18, 2) + read(self.file, entry + 20, 4);
            entry += (24 + variable).next_multiple_of(8);
        }
        match entry == directory + len {
            true => Ok(()),
            false => Err("the bitmap directory has another length than its entries".to_owned()),
        }
    }

    fn use_range(&mut self, offset: u64, len: u64, what: &str) -> Result<(), String> {
        if len == 0 {
            return Ok(());
        }
        if offset > self.file.len().next_multiple_of(self.cluster_bytes()) {
            return Err(format!("{what} at {offset:#x} lies behind the end of the file"));
        }
        for cluster in offset >> self.cluster_bits..=(offset + len - 1) >> self.cluster_bits {
            *self.used.entry(cluster).or_default() += 1;
        }
        Ok(())
    }

    fn use_metadata(&mut self, offset: u64, len: u64, what: &str) -> Result<(), String> {
        self.metadata.push(offset..offset + len);
        self.use_range(offset, len, what)
    }

    fn aligned(&self, offset: u64, what: &str) -> Result<(), String> {
        match offset.is_multiple_of(self.cluster_bytes()) {
            true => Ok(()),
            false => Err(format!("{what} at {offset:#x} is not aligned to a cluster")),
        }
    }

    fn walk_l1(&mut self, l1: u64, l1_len: u64) -> Result<(), String> {
        for index in 0..l1_len {
            let entry = read(self.file, l1 + index * 8, 8);
            let l2 = entry & OFFSET;
            if entry & !(COPIED | OFFSET) != 0 {
                return Err(format!("L1 entry {index} has reserved bits: {entry:#x}"));
            }
            if l2 == 0 && entry != 0 {
                return Err(format!("L1 entry {index} is {entry:#x}: a flag without a table"));
            }
            if l2 == 0 {
                continue;
            }
            self.aligned(l2, "L2 table")?;
            self.use_metadata(l2, self.cluster_bytes(), "L2 table")?;
            for (at, entry) in self.table(l2) {
                self.use_entry(entry.0, at)?;
            }
        }
        Ok(())
    }

    /// The entries of the table at `l1` with data of clusters that begin at `size` or behind.
    fn data_behind(&self, l1: u64, l1_len: u64, size: u64) -> u64 {
        let per_table = self.cluster_bytes() / self.l2_entry_bytes();
        let first = size.div_ceil(self.cluster_bytes());
        let tables = (0..l1_len).map(|index| (index, read(self.file, l1 + index * 8, 8) & OFFSET));
        let behind = tables.filter(|(_, l2)| *l2 != 0).map(|(index, l2)| {
            let entries = self.table(l2).into_iter().filter(|(at, entry)| {
                let cluster = index * per_table + (at - l2) / self.l2_entry_bytes();
                cluster >= first && entry.0 & (COMPRESSED | COPIED | OFFSET) != 0
            });
            entries.count() as u64
        });
        behind.sum()
    }

    /// Offset and length of a compressed entry's target.
    fn compressed_span(&self, entry: u64) -> (u64, u64) {
        let shift = 62 - (self.cluster_bits - 8);
        let offset = entry & ((1 << shift) - 1);
        let sectors = (entry & (COMPRESSED - 1)) >> shift;
        (offset, 512 - offset % 512 + sectors * 512)
    }

    /// The entries of the snapshot table, which counts as used.
    fn snapshots(&mut self) -> Result<Vec<SnapshotTables>, String> {
        let (count, start) = (read(self.file, 60, 4), read(self.file, 64, 8));
        let mut at = start;
        let mut snapshots = Vec::new();
        for _ in 0..count {
            let number = |place: u64, bytes: usize| read(self.file, at + place, bytes);
            snapshots.push(SnapshotTables { l1: number(0, 8), l1_len: number(8, 4) });
            at += (40 + number(36, 4) + number(12, 2) + number(14, 2)).next_multiple_of(8);
        }
        self.use_metadata(start, at - start, "snapshot table")?;
        Ok(snapshots)
    }

    fn use_entry(&mut self, entry: u64, at: u64) -> Result<(), String> {
        if entry & COMPRESSED != 0 {
            self.audit.mapped += 1;
            if entry & COPIED != 0 {
                return Err(format!("compressed entry {entry:#x} at {at:#x} has COPIED set"));
            }
            let (offset, len) = self.compressed_span(entry);
            return self.use_range(offset, len, "compressed cluster");
        }
        let offset = entry & OFFSET;
        let zero_flag = u64::from(!self.extended_l2 && self.version >= 3);
        if entry & !(COPIED | OFFSET | zero_flag) != 0 {
            return Err(format!("L2 entry at {at:#x} has reserved bits: {entry:#x}"));
        }
        // With a data file offset 0 is a place like any other, recognised by COPIED.
        if offset == 0 && !(self.data_file && entry & COPIED != 0) {
            return Ok(());
        }
        self.audit.mapped += 1;
        self.aligned(offset, "data cluster")?;
        if self.data_file { Ok(()) } else { self.use_range(offset, self.cluster_bytes(), "data cluster") }
    }

    fn walk_refcounts(&mut self) -> Result<(), String> {
        self.aligned(self.refcount_table, "refcount table")?;
        self.use_metadata(self.refcount_table, self.refcount_table_len, "refcount table")?;
        for at in (0..self.refcount_table_len).step_by(8) {
            let block = read(self.file, self.refcount_table + at, 8) & !511;
            if block != 0 {
                self.aligned(block, "refcount block")?;
                self.use_metadata(block, self.cluster_bytes(), "refcount block")?;
            }
        }
        Ok(())
    }

    fn refcount(&self, cluster: u64) -> u64 {
        let per_block = self.cluster_bytes() * 8 / u64::from(self.refcount_bits);
        let entry = cluster / per_block * 8;
        if entry >= self.refcount_table_len {
            return 0;
        }
        let block = read(self.file, self.refcount_table + entry, 8) & !511;
        if block == 0 {
            return 0;
        }
        let index = cluster % per_block;
        match self.refcount_bits {
            bits @ 8.. => read(self.file, block + index * u64::from(bits / 8), bits as usize / 8),
            bits => {
                let bit = index * u64::from(bits);
                // Narrow counts fill a byte from its least significant bits up.
                (read(self.file, block + bit / 8, 1) >> (bit % 8)) & ((1 << bits) - 1)
            }
        }
    }

    fn compare(&mut self) -> Result<(), String> {
        self.audit.most_uses = self.used.values().copied().max().unwrap_or(0);
        for (&cluster, &used) in &self.used {
            let count = self.refcount(cluster);
            if count < used {
                return Err(format!("cluster {cluster:#x} is used {used} times and counted {count} times"));
            }
        }
        let clusters = self.file.len().div_ceil(self.cluster_bytes());
        let is_leaked = |cluster: &u64| self.refcount(*cluster) > self.used.get(cluster).copied().unwrap_or(0);
        let leaked: Vec<u64> = (0..clusters).filter(is_leaked).collect();
        self.audit.leaks = leaked.len() as u64;
        self.audit.leaked = leaked.into_iter().take(LEAKS_TOLD).collect();
        Ok(())
    }

    fn check_copied(&self, l1: u64, l1_len: u64) -> Result<(), String> {
        for index in 0..l1_len {
            let entry = read(self.file, l1 + index * 8, 8);
            let l2 = entry & OFFSET;
            if l2 == 0 {
                continue;
            }
            self.check_flag(entry, "L1")?;
            for (at, (entry, bitmap)) in self.table(l2) {
                if entry & COMPRESSED == 0 && entry & OFFSET != 0 && !self.data_file {
                    self.check_flag(entry, "L2")?;
                }
                if self.extended_l2 {
                    self.check_bitmap(entry, bitmap, at)?;
                }
            }
        }
        Ok(())
    }

    fn check_flag(&self, entry: u64, what: &str) -> Result<(), String> {
        let count = self.refcount((entry & OFFSET) >> self.cluster_bits);
        if (count == 1) == (entry & COPIED != 0) {
            return Ok(());
        }
        Err(format!("{what} entry {entry:#x} for a cluster with refcount {count}: COPIED is wrong"))
    }

    fn check_bitmap(&self, entry: u64, bitmap: u64, at: u64) -> Result<(), String> {
        let (allocated, zero) = (bitmap as u32, (bitmap >> 32) as u32);
        if entry & COMPRESSED == 0 && allocated & zero != 0 {
            return Err(format!("entry at {at:#x}: subclusters are allocated and zero: {bitmap:#x}"));
        }
        if entry & COMPRESSED != 0 && bitmap != 0 {
            return Err(format!("entry at {at:#x}: a compressed cluster with bitmap {bitmap:#x}"));
        }
        let unmapped = entry & OFFSET == 0 && !(self.data_file && entry & COPIED != 0);
        if entry & COMPRESSED == 0 && unmapped && allocated != 0 {
            return Err(format!("entry at {at:#x}: subclusters allocated nowhere: {bitmap:#x}"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::images::{Chain, QemuIo};
    use crate::qemu::{Qemu, temp_dir};

    /// Its verdict is that of the real `qemu-img check`, on good images and on damaged ones.
    #[test]
    fn agrees_with_qemu() {
        let qemu = Qemu::system();
        let (mut good, mut bad) = (0, 0);
        for seed in 0..12 {
            let folder = temp_dir();
            let mut chain = Chain::random(seed);
            let top = chain.layers.pop().expect("a chain has a top");
            chain.layers = vec![top];
            let built = chain.build(&qemu, folder.path(), &mut QemuIo(&qemu));
            let bytes = std::fs::read(&built.path).expect("the image is there");
            let l1 = u64::from_be_bytes(bytes[40..48].try_into().unwrap()) as usize;
            for damage in [None, Some(l1), Some(l1 + 7), Some(l1 + 6)] {
                let mut bytes = bytes.clone();
                if let Some(at) = damage {
                    bytes[at] ^= if at == l1 { 0x80 } else { 2 };
                }
                std::fs::write(&built.path, &bytes).expect("the image can be written");
                let verdict = qemu.check(&built.path, "qcow2");
                let ours = audit(&PageMap::from_bytes(&bytes));
                let agrees = ours.is_err() == (verdict.corruptions > 0 || verdict.code == 2)
                    || ours.as_ref().is_ok_and(|audit| audit.dirty);
                assert!(agrees, "seed {seed}, damage {damage:?}: {ours:?}, qemu-img: {}", verdict.json);
                if ours.is_ok() { good += 1 } else { bad += 1 }
            }
        }
        assert!(good > 8 && bad > 8, "{good} good and {bad} bad images are no test");
    }
}
