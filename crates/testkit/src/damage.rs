// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Breaks images on purpose, one field at a time.

use crate::random::Random;
use cowshed_layout::qcow2::{Geometry, Header, Parsed, refcount, snapshot};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Bit 63 of L1 and L2 entries.
pub const COPIED: u64 = 1 << 63;

/// A qcow2 image whose bytes are changed without the engine. The image must be whole when it is opened.
pub struct Victim {
    /// The file.
    pub file: File,
    /// The header before the damage.
    pub header: Header,
    /// Its sizes.
    pub geometry: Geometry,
}

impl Victim {
    /// Opens an image to damage it.
    pub fn open(path: &Path) -> Victim {
        let file = OpenOptions::new().read(true).write(true).open(path).expect("image");
        let mut bytes = vec![0; 1 << 16];
        let len = file.read_at(&mut bytes, 0).expect("header");
        bytes.truncate(len);
        let header = Header::parse(&bytes).expect("valid header");
        let geometry = header.geometry().expect("valid geometry");
        Victim { file, header, geometry }
    }

    /// The 8-byte number at `offset`.
    pub fn word(&self, offset: u64) -> u64 {
        let mut bytes = [0; 8];
        self.file.read_exact_at(&mut bytes, offset).expect("word within the file");
        u64::from_be_bytes(bytes)
    }

    /// Sets the 8-byte number at `offset`.
    pub fn set_word(&self, offset: u64, value: u64) {
        self.file.write_all_at(&value.to_be_bytes(), offset).expect("write");
    }

    /// Flips bits of the 8-byte number at `offset`.
    pub fn flip(&self, offset: u64, bits: u64) {
        self.set_word(offset, self.word(offset) ^ bits);
    }

    /// The offset of the active L1 entry `index`.
    pub fn l1_entry(&self, index: u64) -> u64 {
        self.header.l1_table_offset + index * 8
    }

    /// The offset of the entry `index` of the first snapshot's L1 table.
    pub fn snapshot_l1_entry(&self, index: u64) -> u64 {
        self.word(self.header.snapshots_offset) + index * 8
    }

    /// The offset of the L2 entry for the guest's cluster `cluster`.
    pub fn l2_entry(&self, cluster: u64) -> u64 {
        let entries = self.geometry.l2_entries();
        let table = self.word(self.l1_entry(cluster / entries)) & 0x00ff_ffff_ffff_fe00;
        assert_ne!(table, 0, "guest cluster {cluster} has no L2 table");
        table + cluster % entries * self.geometry.l2_entry_size()
    }

    /// The host cluster of the guest's cluster `cluster`.
    pub fn host_cluster(&self, cluster: u64) -> u64 {
        (self.word(self.l2_entry(cluster)) & 0x00ff_ffff_ffff_fe00) >> self.geometry.cluster_bits()
    }

    /// The offset of the refcount table entry `index`.
    pub fn refcount_table_entry(&self, index: u64) -> u64 {
        self.header.refcount_table_offset + index * 8
    }

    /// Sets the stored refcount of a host cluster.
    pub fn set_refcount(&self, cluster: u64, value: u64) {
        let entries = self.geometry.refcount_block_entries();
        let block = self.word(self.refcount_table_entry(cluster / entries));
        assert_ne!(block, 0, "host cluster {cluster} has no refcount block");
        let mut bytes = vec![0; self.geometry.cluster_size() as usize];
        self.file.read_exact_at(&mut bytes, block).expect("refcount block");
        refcount::set(&mut bytes, self.geometry.refcount_order(), (cluster % entries) as usize, value);
        self.file.write_all_at(&bytes, block).expect("write");
    }

    /// Where the entry of the snapshot with this index is, in the snapshot table.
    pub fn snapshot(&self, index: u64) -> u64 {
        (0..index).fold(self.header.snapshots_offset, |at, _| {
            let field = |offset: u64, bits: u64, width: u64| (self.word(at + offset) >> bits) & ((1 << width) - 1);
            let (id, name, extra) = (field(8, 16, 16), field(8, 0, 16), field(32, 0, 32));
            (at + 40 + extra + id + name).next_multiple_of(8)
        })
    }

    /// Leaves the first snapshot `keep` bytes of extra data.
    pub fn shorten_snapshot(&self, keep: usize) {
        let start = self.header.snapshots_offset;
        let mut bytes = vec![0; 4096];
        let len = self.file.read_at(&mut bytes, start).expect("snapshot table");
        let parsed = snapshot::parse_table(&bytes[..len], self.header.nb_snapshots).expect("a valid table");
        let Parsed::Complete { value: mut snapshots, len } = parsed else { panic!("the table does not end") };
        snapshots[0].extra_data.truncate(keep);
        let mut table: Vec<u8> = snapshots.iter().flat_map(|snapshot| snapshot.encode().expect("an entry")).collect();
        assert!(table.len() <= len, "a table can only become shorter");
        table.resize(len, 0);
        self.file.write_all_at(&table, start).expect("write");
    }

    /// Puts the snapshot table behind the end of the file, the first entry's extra data made longer by `more` bytes. The
    /// header and the refcounts follow.
    pub fn lengthen_snapshot(&self, more: usize) {
        let mut bytes = vec![0; 1 << 16];
        let len = self.file.read_at(&mut bytes, self.header.snapshots_offset).expect("snapshot table");
        let extra = 36..40;
        let had = u32::from_be_bytes(bytes[extra.clone()].try_into().expect("four bytes")) as usize;
        bytes[extra].copy_from_slice(&((had + more) as u32).to_be_bytes());
        // Whole words, so that the entries behind stay aligned.
        assert!(more.is_multiple_of(8) && len > 40 + had);
        bytes.splice(40 + had..40 + had, vec![0xee; more]);
        let cluster_size = self.geometry.cluster_size();
        let first = self.file.metadata().expect("a length").len().div_ceil(cluster_size);
        let clusters = (len + more).min(8192 + more).div_ceil(cluster_size as usize) as u64;
        bytes.resize((clusters * cluster_size) as usize, 0);
        self.file.write_all_at(&bytes, first * cluster_size).expect("write");
        (first..first + clusters).for_each(|cluster| self.set_refcount(cluster, 1));
        self.set_word(64, first * cluster_size);
    }

    /// Counts one snapshot more, whose entry ends nowhere.
    pub fn add_endless_snapshot(&self) {
        let start = self.header.snapshots_offset;
        let mut bytes = vec![0; 1 << 16];
        let len = self.file.read_at(&mut bytes, start).expect("snapshot table");
        let parsed = snapshot::parse_table(&bytes[..len], self.header.nb_snapshots).expect("a valid table");
        let Parsed::Complete { len, .. } = parsed else { panic!("the table does not end") };
        let mut entry = [0; 40];
        entry[36..].copy_from_slice(&0xffff_ff00u32.to_be_bytes());
        self.file.write_all_at(&entry, start + len as u64).expect("write");
        let count = self.header.nb_snapshots + 1;
        self.file.write_all_at(&count.to_be_bytes(), 60).expect("write");
    }
}

/// A piece of metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Site {
    /// The structure that it is part of.
    pub what: &'static str,
    /// Host offset in bytes.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
}

const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;

impl Victim {
    /// All metadata of an image that is whole, piece by piece.
    pub fn sites(&self) -> Vec<Site> {
        let header = &self.header;
        let cluster_size = self.geometry.cluster_size();
        let mut sites = vec![Site { what: "header", start: 0, len: header.header_length.into() }];
        if !header.extensions.is_empty() {
            sites.push(Site { what: "header extensions", start: header.header_length.into(), len: 64 });
        }
        sites.push(Site { what: "L1", start: header.l1_table_offset, len: u64::from(header.l1_size) * 8 });
        self.l2_sites(header.l1_table_offset, header.l1_size, "L2", &mut sites);
        let table = Site { what: "refcount table", start: header.refcount_table_offset, len: 64 };
        let blocks: Vec<Site> = (0..8)
            .map(|index| self.word(table.start + index * 8))
            .filter(|block| *block != 0)
            .map(|start| Site { what: "refcount block", start, len: cluster_size })
            .collect();
        sites.push(table);
        sites.extend(blocks);
        if header.nb_snapshots != 0 {
            let start = header.snapshots_offset;
            sites.push(Site { what: "snapshot table", start, len: 64 * u64::from(header.nb_snapshots) });
            let l1_size = self.word(start + 8) >> 32;
            let l1 = Site { what: "snapshot L1", start: self.word(start), len: l1_size * 8 };
            sites.push(l1);
            self.l2_sites(l1.start, l1_size as u32, "snapshot L2", &mut sites);
        }
        if let Some(bitmaps) = header.bitmaps() {
            let start = bitmaps.directory_offset;
            sites.push(Site { what: "bitmap directory", start, len: bitmaps.directory_size });
            let len = (self.word(start + 8) >> 32) * 8;
            sites.push(Site { what: "bitmap table", start: self.word(start), len });
        }
        sites
    }

    fn l2_sites(&self, l1: u64, entries: u32, what: &'static str, sites: &mut Vec<Site>) {
        let len = self.geometry.cluster_size();
        let tables = (0..u64::from(entries)).map(|index| self.word(l1 + index * 8) & OFFSET_MASK);
        sites.extend(tables.filter(|table| *table != 0).map(|start| Site { what, start, len }));
    }

    /// One random change of metadata at one of `sites`; returns its description, for messages.
    pub fn harm(&self, sites: &[Site], random: &mut Random) -> String {
        let mut kinds: Vec<&str> = sites.iter().map(|site| site.what).collect();
        kinds.dedup();
        let kind = random.pick(&kinds);
        let of_kind: Vec<Site> = sites.iter().filter(|site| site.what == kind).copied().collect();
        let site = random.pick(&of_kind);
        let at = self.random_word(site, random);
        let old = self.word(at);
        let cluster_size = self.geometry.cluster_size();
        let new = match random.below(12) {
            0..=4 => old ^ 1 << random.below(64),
            5 => old ^ random.below(256) << (8 * random.below(8)),
            6 => 0,
            7 => {
                let other = random.pick(sites);
                self.word(self.random_word(other, random))
            }
            8 => old.wrapping_add(random.pick(&[1, 512, cluster_size, cluster_size.wrapping_neg(), 1 << 40])),
            9 => random.pick(sites).start & !(cluster_size - 1) | random.pick(&[0, COPIED]),
            10 => random.next_u64(),
            _ => old ^ random.pick(&[COPIED, 1 << 62, 1, 0x1fe, 1 << 56, 1 << 32]),
        };
        self.set_word(at, new);
        format!("{kind} at {:#x}+{:#x}: {old:#018x} -> {new:#018x}", site.start, at - site.start)
    }

    /// An aligned word of a site, mostly one that isn't 0.
    fn random_word(&self, site: Site, random: &mut Random) -> u64 {
        let words = (site.len / 8).max(1);
        let mut at = site.start;
        for _ in 0..if random.chance(80) { 200 } else { 1 } {
            at = site.start + random.below(words) * 8;
            if self.word(at) != 0 {
                break;
            }
        }
        at
    }
}
