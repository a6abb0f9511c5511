// SPDX-License-Identifier: Apache-2.0 OR MIT
//! New FAT volumes after Microsoft's "FAT: General Overview of On-Disk Format" 1.03, in the sizes that QEMU gives its
//! own. The memory holds nothing of a volume but the parts that a caller asks for.

mod directory;
mod names;

pub use directory::{DirectoryEntry, Times};
pub use names::{DirectoryNames, Name};

/// Unit of the volume.
pub const SECTOR_BYTES: u64 = 512;
/// A folder has entries for this many bytes at most.
pub const MAX_DIRECTORY_BYTES: u64 = 2 << 20;
/// The number of the first cluster.
pub const FIRST_CLUSTER: u32 = 2;
/// Length of a label in bytes.
pub const LABEL_BYTES: usize = 11;
/// The longest file: its length has 32 bits.
pub const MAX_FILE_BYTES: u64 = u32::MAX as u64;

const HEADS: u16 = 16;
const SECTORS_PER_TRACK: u16 = 63;
/// Entries of the root folder of FAT12 and FAT16.
const ROOT_ENTRIES: u64 = 512;
const ENTRY_BYTES: u64 = 32;
const SERIAL: u32 = 0xfabe_1afd;
const TABLES: u64 = 2;
/// FAT32: where the second copy of the boot sector is, and the sector that counts free clusters.
const BACKUP_SECTOR: u64 = 6;
const COUNTS_SECTOR: u64 = 1;

/// Bits of an entry of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FatKind {
    /// 12 bits.
    Fat12,
    /// 16 bits.
    Fat16,
    /// 28 of 32 bits.
    Fat32,
}

impl FatKind {
    /// The kind with this number of bits: 12, 16 or 32.
    pub fn of(number: u64) -> Option<FatKind> {
        match number {
            12 => Some(FatKind::Fat12),
            16 => Some(FatKind::Fat16),
            32 => Some(FatKind::Fat32),
            _ => None,
        }
    }

    /// Its number.
    pub fn number(self) -> u64 {
        match self {
            FatKind::Fat12 => 12,
            FatKind::Fat16 => 16,
            FatKind::Fat32 => 32,
        }
    }

    /// The mark of the last cluster of a chain.
    fn last(self) -> u32 {
        match self {
            FatKind::Fat12 => 0xfff,
            FatKind::Fat16 => 0xffff,
            FatKind::Fat32 => 0x0fff_ffff,
        }
    }
}

/// A disk with one volume. Lengths in sectors.
#[derive(Clone, Copy, Debug)]
pub struct FatDisk {
    kind: FatKind,
    /// Sectors before the volume: the partition table and the gap behind it; none of a floppy disk.
    hidden: u64,
    sectors: u64,
    cluster: u64,
    reserved: u64,
    table: u64,
    root: u64,
    heads: u16,
    per_track: u16,
    media: u8,
    label: [u8; LABEL_BYTES],
}

/// The kinds of content that a place of the disk has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FatRegion {
    /// Before the tables: see [`FatDisk::heads`].
    Head,
    /// In a table, at this byte of it.
    Table(u64),
    /// In the root folder of FAT12 or FAT16, at this byte of it.
    Root(u64),
    /// In a cluster, at this byte of all clusters.
    Clusters(u64),
    /// Behind the last cluster.
    Behind,
}

/// Clusters that follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClusterChain {
    /// The first cluster's number.
    pub first: u32,
    /// Number of clusters.
    pub count: u32,
}

impl FatDisk {
    /// A disk of QEMU's size. One with FAT32 is as long as `needed` asks: the clusters for this many bytes each.
    pub fn new(kind: FatKind, is_floppy: bool, label: [u8; LABEL_BYTES], needed: impl Fn(u64) -> u64) -> FatDisk {
        let (heads, per_track, hidden) = if is_floppy { (2, 36, 0) } else { (HEADS, SECTORS_PER_TRACK, 63) };
        let cylinders = match (is_floppy, kind) {
            (true, _) => 80,
            (false, FatKind::Fat12) => 64,
            (false, _) => 1024,
        };
        let sectors = cylinders * u64::from(heads) * u64::from(per_track) - hidden;
        let cluster = match (is_floppy, kind) {
            (true, _) => 2,
            (false, FatKind::Fat32) => 8,
            (false, _) => 16,
        };
        let is_large = kind == FatKind::Fat32;
        let reserved = if is_large { 32 } else { 1 };
        let root = if is_large { 0 } else { ROOT_ENTRIES * ENTRY_BYTES / SECTOR_BYTES };
        let media = if is_floppy { 0xf0 } else { 0xf8 };
        let mut disk =
            FatDisk { kind, hidden, sectors, cluster, reserved, table: 0, root, heads, per_track, media, label };
        if is_large {
            // Larger clusters as the disk gets longer, as mkfs.fat takes them.
            for cluster in [8, 16, 32, 64] {
                let clusters = needed(cluster * SECTOR_BYTES);
                let sectors =
                    disk.reserved + TABLES * (clusters + 128).div_ceil(128) + clusters.saturating_mul(cluster);
                disk.cluster = cluster;
                // Some room is left.
                disk.sectors = disk.sectors.max(sectors.saturating_add(sectors / 16).min(u64::from(u32::MAX)));
                if disk.sectors <= cluster << 21 {
                    break;
                }
            }
        }
        // A table for all sectors is a little longer than one for its clusters.
        let clusters = (disk.sectors - disk.reserved - disk.root) / disk.cluster;
        let bytes = ((clusters + u64::from(FIRST_CLUSTER)) * kind.number()).div_ceil(8);
        disk.table = bytes.div_ceil(SECTOR_BYTES);
        disk
    }

    /// Bits of an entry of its tables.
    pub fn kind(&self) -> FatKind {
        self.kind
    }

    /// Length of the disk in bytes.
    pub fn size(&self) -> u64 {
        (self.hidden + self.sectors) * SECTOR_BYTES
    }

    /// Length of the volume in sectors.
    pub fn sectors(&self) -> u64 {
        self.sectors
    }

    /// Length of a cluster in bytes.
    pub fn cluster_bytes(&self) -> u64 {
        self.cluster * SECTOR_BYTES
    }

    /// The number of clusters.
    pub fn clusters(&self) -> u64 {
        (self.sectors - self.reserved - TABLES * self.table - self.root) / self.cluster
    }

    /// Length of the root folder in bytes, where it isn't kept in clusters.
    pub fn root_bytes(&self) -> Option<u64> {
        (self.root > 0).then_some(self.root * SECTOR_BYTES)
    }

    /// The kind of content at byte `at` of the disk, and its length in bytes from there.
    pub fn region(&self, at: u64) -> (FatRegion, u64) {
        let mut start = (self.hidden + self.reserved) * SECTOR_BYTES;
        if at < start {
            return (FatRegion::Head, start - at);
        }
        let table = self.table * SECTOR_BYTES;
        if at < start + TABLES * table {
            let skip = (at - start) % table;
            return (FatRegion::Table(skip), table - skip);
        }
        start += TABLES * table;
        let root = self.root * SECTOR_BYTES;
        if at < start + root {
            return (FatRegion::Root(at - start), start + root - at);
        }
        start += root;
        let clusters = self.clusters() * self.cluster_bytes();
        if at < start + clusters {
            return (FatRegion::Clusters(at - start), start + clusters - at);
        }
        (FatRegion::Behind, self.size().saturating_sub(at))
    }

    /// The areas before the tables that aren't zeroes: places and bytes, in order. The first `used` clusters count as
    /// taken.
    pub fn heads(&self, used: u64) -> Vec<(u64, Vec<u8>)> {
        let volume = self.hidden * SECTOR_BYTES;
        let mut heads = Vec::new();
        if self.hidden > 0 {
            heads.push((0, self.partition_table()));
        }
        heads.push((volume, self.boot_sector()));
        if self.kind == FatKind::Fat32 {
            let counts = self.counts(used);
            heads.push((volume + COUNTS_SECTOR * SECTOR_BYTES, counts.clone()));
            heads.push((volume + BACKUP_SECTOR * SECTOR_BYTES, self.boot_sector()));
            heads.push((volume + (BACKUP_SECTOR + COUNTS_SECTOR) * SECTOR_BYTES, counts));
        }
        heads
    }

    /// Fills `out` with the bytes of a table from byte `offset` on. `chains` are in order.
    pub fn fill_table(&self, chains: &[ClusterChain], offset: u64, out: &mut [u8]) {
        let bits = self.kind.number();
        // Whole entries: two of 12 bits are three bytes.
        let mut entry = offset * 8 / bits;
        if self.kind == FatKind::Fat12 {
            entry -= entry % 2;
        }
        let end = offset + out.len() as u64;
        while entry * bits / 8 < end {
            let (at, bytes) = match self.kind {
                FatKind::Fat12 => {
                    let both = self.entry(chains, entry) | self.entry(chains, entry + 1) << 12;
                    (entry / 2 * 3, &both.to_le_bytes()[..3])
                }
                FatKind::Fat16 => (entry * 2, &self.entry(chains, entry).to_le_bytes()[..2]),
                FatKind::Fat32 => (entry * 4, &self.entry(chains, entry).to_le_bytes()[..]),
            };
            for (index, byte) in (at..).zip(bytes) {
                if let Some(place) = index.checked_sub(offset).and_then(|index| out.get_mut(index as usize)) {
                    *place = *byte;
                }
            }
            entry += if self.kind == FatKind::Fat12 { 2 } else { 1 };
        }
    }

    /// An entry of the table.
    fn entry(&self, chains: &[ClusterChain], entry: u64) -> u32 {
        let last = self.kind.last();
        match entry {
            0 => return last & !0xff | u32::from(self.media),
            1 => return last,
            _ => {}
        }
        let next = chains.partition_point(|chain| u64::from(chain.first) <= entry);
        let Some(chain) = next.checked_sub(1).and_then(|index| chains.get(index)) else { return 0 };
        let end = u64::from(chain.first) + u64::from(chain.count);
        match entry + 1 {
            next if next < end => next as u32,
            next if next == end => last,
            _ => 0,
        }
    }

    /// As long as there are cylinders for it, the place of a sector in the geometry.
    fn place(&self, sector: u64) -> [u8; 3] {
        let (heads, per_track) = (u64::from(self.heads), u64::from(self.per_track));
        let (cylinder, rest) = (sector / (heads * per_track), sector % (heads * per_track));
        if cylinder > 1023 {
            return [0xfe, 0xff, 0xff];
        }
        let number = (rest % per_track + 1) as u8 | (cylinder >> 8 << 6) as u8;
        [(rest / per_track) as u8, number, cylinder as u8]
    }

    fn partition_table(&self) -> Vec<u8> {
        let mut bytes = vec![0; SECTOR_BYTES as usize];
        let mut put = |at: usize, part: &[u8]| bytes[at..at + part.len()].copy_from_slice(part);
        put(440, &0xbe1a_fdfa_u32.to_le_bytes());
        put(446, &[0x80]);
        put(447, &self.place(self.hidden));
        let kind = match self.kind {
            FatKind::Fat12 => 1,
            FatKind::Fat16 => 6,
            FatKind::Fat32 => 12,
        };
        put(450, &[kind]);
        put(451, &self.place(self.hidden + self.sectors - 1));
        put(454, &(self.hidden as u32).to_le_bytes());
        put(458, &(self.sectors as u32).to_le_bytes());
        put(510, &[0x55, 0xaa]);
        bytes
    }

    fn boot_sector(&self) -> Vec<u8> {
        let is_large = self.kind == FatKind::Fat32;
        let mut bytes = vec![0; SECTOR_BYTES as usize];
        let mut put = |at: usize, part: &[u8]| bytes[at..at + part.len()].copy_from_slice(part);
        put(0, if is_large { &[0xeb, 0x58, 0x90] } else { &[0xeb, 0x3e, 0x90] });
        put(3, b"MSWIN4.1");
        put(11, &(SECTOR_BYTES as u16).to_le_bytes());
        put(13, &[self.cluster as u8]);
        put(14, &(self.reserved as u16).to_le_bytes());
        put(16, &[TABLES as u8]);
        put(17, &((self.root * SECTOR_BYTES / ENTRY_BYTES) as u16).to_le_bytes());
        match u16::try_from(self.sectors) {
            Ok(sectors) if !is_large => put(19, &sectors.to_le_bytes()),
            _ => put(32, &(self.sectors as u32).to_le_bytes()),
        }
        put(21, &[self.media]);
        if !is_large {
            put(22, &(self.table as u16).to_le_bytes());
        }
        put(24, &self.per_track.to_le_bytes());
        put(26, &self.heads.to_le_bytes());
        put(28, &(self.hidden as u32).to_le_bytes());
        let extended = if is_large {
            put(36, &(self.table as u32).to_le_bytes());
            put(44, &FIRST_CLUSTER.to_le_bytes());
            put(48, &(COUNTS_SECTOR as u16).to_le_bytes());
            put(50, &(BACKUP_SECTOR as u16).to_le_bytes());
            64
        } else {
            36
        };
        put(extended, &[if self.hidden > 0 { 0x80 } else { 0 }]);
        put(extended + 2, &[0x29]);
        put(extended + 3, &SERIAL.to_le_bytes());
        put(extended + 7, &self.label);
        put(extended + 18, format!("FAT{}   ", self.kind.number()).as_bytes());
        put(510, &[0x55, 0xaa]);
        bytes
    }

    /// FAT32: how many clusters are free, and the first of them.
    fn counts(&self, used: u64) -> Vec<u8> {
        let mut bytes = vec![0; SECTOR_BYTES as usize];
        let mut put = |at: usize, part: &[u8]| bytes[at..at + part.len()].copy_from_slice(part);
        let free = self.clusters().saturating_sub(used) as u32;
        put(0, b"RRaA");
        put(484, b"rrAa");
        put(488, &free.to_le_bytes());
        put(492, &(if free == 0 { u32::MAX } else { FIRST_CLUSTER + used as u32 }).to_le_bytes());
        put(510, &[0x55, 0xaa]);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(kind: FatKind, is_floppy: bool) -> FatDisk {
        FatDisk::new(kind, is_floppy, *b"A LABEL    ", |_| 0)
    }

    #[test]
    fn the_number_of_clusters_fits_the_kind() {
        for (kind, is_floppy, size, range) in [
            (FatKind::Fat12, true, 2_949_120, 1..4085),
            (FatKind::Fat12, false, 33_030_144, 1..4085),
            (FatKind::Fat16, false, 528_482_304, 4085..65_525),
            (FatKind::Fat32, false, 528_482_304, 65_525..1 << 28),
        ] {
            let disk = disk(kind, is_floppy);
            assert_eq!(disk.size(), size);
            assert!(range.contains(&disk.clusters()), "{kind:?}: {}", disk.clusters());
            assert!(disk.table * SECTOR_BYTES * 8 >= (disk.clusters() + 2) * kind.number());
        }
        for bytes in [1 << 30, 20 << 30, 100 << 30, 1 << 40] {
            let disk = FatDisk::new(FatKind::Fat32, false, *b"A LABEL    ", |cluster| bytes / cluster);
            assert!(disk.clusters() * disk.cluster_bytes() > bytes, "{bytes}");
            assert!((65_525..1 << 28).contains(&disk.clusters()));
        }
    }

    #[test]
    fn a_table_is_the_same_in_pieces() {
        let chains = [
            ClusterChain { first: 2, count: 1 },
            ClusterChain { first: 3, count: 700 },
            ClusterChain { first: 800, count: 3 },
        ];
        for kind in [FatKind::Fat12, FatKind::Fat16, FatKind::Fat32] {
            let disk = disk(kind, false);
            let mut whole = vec![0xaa; 4096];
            disk.fill_table(&chains, 0, &mut whole);
            for len in [1, 2, 5, 7, 512, 1000] {
                for (index, expected) in whole.chunks(len).enumerate() {
                    let mut part = vec![0xaa; expected.len()];
                    disk.fill_table(&chains, (index * len) as u64, &mut part);
                    assert_eq!(part, expected, "{kind:?} {len} {index}");
                }
            }
            assert_eq!(disk.entry(&chains, 2), kind.last());
            assert_eq!((disk.entry(&chains, 3), disk.entry(&chains, 702)), (4, kind.last()));
            assert_eq!(
                (disk.entry(&chains, 703), disk.entry(&chains, 799), disk.entry(&chains, 802)),
                (0, 0, kind.last())
            );
        }
    }

    #[test]
    fn each_byte_has_a_region() {
        for kind in [FatKind::Fat12, FatKind::Fat16, FatKind::Fat32] {
            let disk = disk(kind, false);
            let (mut at, mut regions) = (0, Vec::new());
            while at < disk.size() {
                let (region, len) = disk.region(at);
                assert!(len > 0 && disk.region(at + len - 1).0 != FatRegion::Head || region == FatRegion::Head);
                regions.push(region);
                at += len;
            }
            assert_eq!(at, disk.size());
            assert_eq!(regions.contains(&FatRegion::Root(0)), kind != FatKind::Fat32);
            assert!(regions.contains(&FatRegion::Clusters(0)));
        }
    }
}
