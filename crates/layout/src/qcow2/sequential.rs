// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A qcow2 file that is known before it is written: its clusters have the order of the disk, behind their tables. The
//! places of the disk's data decide all of its metadata. So any part of the file can be made alone.
//!
//! ```text
//! header | refcount table | refcount blocks | L1 table | L2 tables | data clusters
//! ```

use super::{Header, L1Entry, L2Entry, RefcountTableEntry};
use cowshed_types::{Error, HostOffset, Result};
use std::ops::Range;

/// log2 of the cluster size: the default of `qemu-img create`.
const CLUSTER_BITS: u32 = 16;
/// Bytes of a cluster.
const CLUSTER: u64 = 1 << CLUSTER_BITS;
/// Entries of a table of 8 bytes each that fills a cluster.
const ENTRIES: u64 = CLUSTER / 8;
/// Counts of 16 bits in a refcount block.
const COUNTS: u64 = CLUSTER / 2;

/// Data of the disk in the file.
#[derive(Clone, Copy, Debug)]
struct DataRun {
    /// First cluster of the disk.
    guest: u64,
    /// Number of tables.
    count: u64,
    /// Data clusters of the file before the first one.
    before: u64,
}

/// The content of a place of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stretch {
    /// This many bytes of metadata: see [`Sequential::fill`].
    Metadata(u64),
    /// Bytes of the disk.
    Data {
        /// First byte of the disk. Bytes behind its end are zeroes.
        guest: u64,
        /// Length in bytes.
        len: u64,
    },
}

/// The layout of such a file: version 3, clusters of 64 KiB, counts of 16 bits, no backing file.
#[derive(Clone, Debug)]
pub struct Sequential {
    header: Vec<u8>,
    runs: Vec<DataRun>,
    /// Entries of the L1 table that have an L2 table, in order.
    l2_of: Vec<u64>,
    /// First clusters of the parts, in file order.
    table_at: u64,
    blocks_at: u64,
    l1_at: u64,
    l2_at: u64,
    data_at: u64,
    clusters: u64,
}

impl Sequential {
    /// The layout for a disk of `size` bytes with data in these ranges, in bytes, in order and apart. All else is zeroes.
    ///
    /// # Errors
    /// When the size is more than a qcow2 image of such clusters can have, or a range ends behind it.
    pub fn new(size: u64, data: &[Range<u64>]) -> Result<Sequential> {
        let mut runs: Vec<DataRun> = Vec::new();
        let mut before = 0;
        for range in data.iter().filter(|range| range.start < range.end) {
            if range.end > size {
                return Err(Error::invalid_argument("data behind the end of the disk").value(range.end));
            }
            let next = runs.last().map_or(0, |run| run.guest + run.count);
            let (first, end) = ((range.start / CLUSTER).max(next), range.end.div_ceil(CLUSTER));
            if first >= end {
                continue;
            }
            match runs.last_mut() {
                Some(last) if first == next => last.count += end - first,
                _ => runs.push(DataRun { guest: first, count: end - first, before }),
            }
            before += end - first;
        }
        let mut l2_of: Vec<u64> = Vec::new();
        for run in &runs {
            let first = run.guest / ENTRIES;
            let last = (run.guest + run.count - 1) / ENTRIES;
            l2_of.extend(first.max(l2_of.last().map_or(0, |last| last + 1))..=last);
        }
        // A table without entries takes no place, and its cluster would belong to nothing.
        let l1_entries = size.div_ceil(CLUSTER * ENTRIES).max(1);
        let l1_clusters = l1_entries.div_ceil(ENTRIES);
        let others = 1 + l1_clusters + l2_of.len() as u64 + before;
        let (mut table, mut blocks) = (1, 1);
        loop {
            let wanted = (others + table + blocks).div_ceil(COUNTS);
            if wanted == blocks {
                break;
            }
            blocks = wanted;
            table = blocks.div_ceil(ENTRIES);
        }
        let table_at = 1;
        let blocks_at = table_at + table;
        let l1_at = blocks_at + blocks;
        let l2_at = l1_at + l1_clusters;
        let data_at = l2_at + l2_of.len() as u64;
        let mut header = Header::new(3, CLUSTER_BITS);
        header.size = size;
        header.l1_size = u32::try_from(l1_entries).map_err(|_| too_large(size))?;
        header.l1_table_offset = l1_at * CLUSTER;
        header.refcount_table_offset = table_at * CLUSTER;
        header.refcount_table_clusters = u32::try_from(table).map_err(|_| too_large(size))?;
        let clusters = data_at + before;
        let header = header.encode()?;
        Ok(Sequential { header, runs, l2_of, table_at, blocks_at, l1_at, l2_at, data_at, clusters })
    }

    /// Length of the file in bytes.
    #[allow(clippy::len_without_is_empty, reason = "it has a header")]
    pub fn len(&self) -> u64 {
        self.clusters * CLUSTER
    }

    /// The content at `offset` bytes, which is in the file, for at most `len` bytes.
    pub fn at(&self, offset: u64, len: u64) -> Stretch {
        let data_start = self.data_at * CLUSTER;
        if offset < data_start {
            return Stretch::Metadata(len.min(data_start - offset));
        }
        let inside = offset - data_start;
        let ordinal = inside / CLUSTER;
        let index = self.runs.partition_point(|run| run.before + run.count <= ordinal);
        let Some(run) = self.runs.get(index) else { return Stretch::Metadata(len) };
        let into = inside - run.before * CLUSTER;
        Stretch::Data { guest: run.guest * CLUSTER + into, len: len.min(run.count * CLUSTER - into) }
    }

    /// Fills `buf` with the metadata from `offset` bytes on.
    pub fn fill(&self, offset: u64, buf: &mut [u8]) {
        buf.fill(0);
        let mut at = offset;
        let mut rest = buf;
        while !rest.is_empty() {
            let (cluster, skip) = (at / CLUSTER, at % CLUSTER);
            let len = usize::try_from(CLUSTER - skip).unwrap_or(usize::MAX).min(rest.len());
            let (part, behind) = std::mem::take(&mut rest).split_at_mut(len);
            self.fill_cluster(cluster, skip, part);
            rest = behind;
            at += part.len() as u64;
        }
    }

    /// Fills a part of one cluster, which is all zeroes, from `skip` bytes on.
    fn fill_cluster(&self, cluster: u64, skip: u64, part: &mut [u8]) {
        if cluster == 0 {
            let from = usize::try_from(skip).unwrap_or(usize::MAX).min(self.header.len());
            let len = part.len().min(self.header.len() - from);
            part[..len].copy_from_slice(&self.header[from..from + len]);
            return;
        }
        if (self.blocks_at..self.l1_at).contains(&cluster) {
            let first = (cluster - self.blocks_at) * COUNTS;
            return words::<2>(skip, part, |index| u64::from(first + index < self.clusters));
        }
        if cluster < self.blocks_at {
            let first = (cluster - self.table_at) * ENTRIES;
            let block = |index| Some(self.blocks_at + index).filter(|block| *block < self.l1_at);
            let entry = |block: u64| RefcountTableEntry::new(HostOffset(block * CLUSTER)).0;
            return words::<8>(skip, part, |index| block(first + index).map_or(0, entry));
        }
        if cluster < self.l2_at {
            let first = (cluster - self.l1_at) * ENTRIES;
            return words::<8>(skip, part, |index| match self.l2_of.binary_search(&(first + index)) {
                Ok(table) => L1Entry::new(HostOffset((self.l2_at + table as u64) * CLUSTER), true).0,
                Err(_) => 0,
            });
        }
        if let Some(table) = usize::try_from(cluster - self.l2_at).ok().and_then(|table| self.l2_of.get(table)) {
            let first = table * ENTRIES;
            words::<8>(skip, part, |index| self.l2_entry(first + index));
        }
    }

    fn l2_entry(&self, guest: u64) -> u64 {
        let index = self.runs.partition_point(|run| run.guest + run.count <= guest);
        match self.runs.get(index) {
            Some(run) if run.guest <= guest => {
                let cluster = self.data_at + run.before + (guest - run.guest);
                L2Entry::data(HostOffset(cluster * CLUSTER), true).0
            }
            _ => 0,
        }
    }
}

fn too_large(size: u64) -> Error {
    Error::invalid_argument("the disk is too large for a qcow2 image with clusters of 64 KiB").value(size)
}

/// Fills a part of a table of numbers with `N` bytes each, from `skip` bytes of the table on.
fn words<const N: usize>(skip: u64, part: &mut [u8], number: impl Fn(u64) -> u64) {
    let size = N as u64;
    let mut at = skip;
    let mut rest = part;
    while !rest.is_empty() {
        let bytes = number(at / size).to_be_bytes();
        let from = 8 - N + usize::try_from(at % size).unwrap_or(0);
        let len = (8 - from).min(rest.len());
        let (word, behind) = std::mem::take(&mut rest).split_at_mut(len);
        word.copy_from_slice(&bytes[from..from + len]);
        rest = behind;
        at += len as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn metadata(layout: &Sequential) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(layout.data_at * CLUSTER).expect("small")];
        layout.fill(0, &mut bytes);
        bytes
    }

    #[test]
    fn each_cluster_of_the_disk_is_found_through_its_tables() {
        let data = [0..1, 100 * MIB + 5..101 * MIB, 600 * MIB..601 * MIB, 2000 * MIB - 1..2000 * MIB];
        let layout = Sequential::new(2000 * MIB, &data).expect("a layout");
        let bytes = metadata(&layout);
        let header = Header::parse(&bytes).expect("a header");
        assert_eq!((header.size, header.l1_size), (2000 * MIB, 4));
        let word = |at: u64| {
            let at = usize::try_from(at).expect("small");
            u64::from_be_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
        };
        let mut next = layout.data_at * CLUSTER;
        for guest in (0..2000 * MIB).step_by(1 << CLUSTER_BITS) {
            let l1 = L1Entry(word(header.l1_table_offset + guest / (CLUSTER * ENTRIES) * 8));
            let l2 = l1.is_allocated().then(|| L2Entry(word(l1.offset().0 + guest / CLUSTER % ENTRIES * 8)));
            let is_data = data.iter().any(|range| range.start < guest + CLUSTER && guest < range.end);
            match l2 {
                Some(l2) if l2 != L2Entry::UNALLOCATED => {
                    assert!(is_data && l2.is_copied(), "{guest}");
                    assert_eq!(l2.offset().0, next, "{guest}");
                    assert_eq!(layout.at(next + 7, 100), Stretch::Data { guest: guest + 7, len: 100 });
                    next += CLUSTER;
                }
                _ => assert!(!is_data, "{guest}"),
            }
        }
        assert_eq!(next, layout.len());
    }

    #[test]
    fn all_clusters_of_the_file_are_counted_once() {
        // More than one refcount block: 2 GiB of data are 32,768 clusters.
        let layout = Sequential::new(4096 * MIB, std::slice::from_ref(&(MIB..3000 * MIB))).expect("a layout");
        let bytes = metadata(&layout);
        let counts = &bytes[usize::try_from(layout.blocks_at * CLUSTER).expect("small")..];
        let counts = &counts[..usize::try_from((layout.l1_at - layout.blocks_at) * CLUSTER).expect("small")];
        let count = |cluster: usize| u16::from_be_bytes([counts[cluster * 2], counts[cluster * 2 + 1]]);
        let clusters = usize::try_from(layout.len() / CLUSTER).expect("small");
        assert!(layout.l1_at - layout.blocks_at == 2, "{} blocks", layout.l1_at - layout.blocks_at);
        assert!((0..clusters).all(|cluster| count(cluster) == 1));
        assert!((clusters..counts.len() / 2).all(|cluster| count(cluster) == 0));
    }

    #[test]
    fn any_part_is_the_same_alone() {
        let layout =
            Sequential::new(700 * MIB + 512, &[3 * MIB..5 * MIB, 699 * MIB..700 * MIB + 512]).expect("a layout");
        let whole = metadata(&layout);
        for (at, len) in [(0, 1), (103, 9), (65_533, 7), (131_071, 3), (200_001, 65_537), (262_143, 131_073)] {
            let mut part = vec![0xff; len];
            layout.fill(at as u64, &mut part);
            assert_eq!(part, whole[at..at + len], "{at} {len}");
        }
    }

    #[test]
    fn ranges_that_share_a_cluster_have_it_once() {
        let layout = Sequential::new(MIB, &[0..10, 20..30, 65_536..65_537, 65_600..200_000]).expect("a layout");
        assert_eq!(layout.clusters - layout.data_at, 4);
        assert_eq!(layout.at(layout.data_at * CLUSTER, u64::MAX), Stretch::Data { guest: 0, len: 4 * CLUSTER });
        let empty = Sequential::new(0, &[]).expect("a layout");
        assert_eq!(empty.len(), empty.data_at * CLUSTER);
        assert!(Sequential::new(10, std::slice::from_ref(&(0..11))).is_err());
        assert!(Sequential::new(u64::MAX, &[]).is_err());
    }
}
