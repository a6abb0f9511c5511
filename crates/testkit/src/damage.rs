// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Breaks images on purpose, one field at a time.

use cowshed_layout::qcow2::{Geometry, Header, Parsed, refcount, snapshot};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Bit 63 of L1 and L2 entries.
pub const COPIED: u64 = 1 << 63;

/// A qcow2 image whose bytes are changed behind everybody's back. The image must be whole when it is opened.
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

    /// Where the active L1 entry `index` is.
    pub fn l1_entry(&self, index: u64) -> u64 {
        self.header.l1_table_offset + index * 8
    }

    /// Where the L2 entry for the guest's cluster `cluster` is.
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

    /// Where the refcount table entry `index` is.
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
}
