// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The bytes of a fresh qcow2 image.
//!
//! The layout is qemu-img's, which scripts and tools rely on. Header, refcount table, refcount block and L1 table
//! follow each other from cluster 0 on. Further refcount blocks, which only a large L1 table or preallocation needs,
//! come next. At the end comes each preallocated L2 table with its data clusters.

use crate::encryption::ImageEncryption;
use crate::qcow2::{Qcow2CreateOptions, too_large};
use cowshed_layout::qcow2::{EncryptionHeader, Extension, Header, features, refcount};
use cowshed_types::{Compression, Result, name_of_text};
use std::collections::BTreeMap;

/// Up to this cluster size qemu-img leaves the feature name table out, so that the rest of a header fits.
const SMALL_HEADER_CLUSTER_BYTES: u64 = 4096;
/// "Refcount is exactly one", in L1 and L2 entries.
const COPIED: u64 = 1 << 63;
/// "Reads as zeroes", in L2 entries of version 3.
const READS_ZERO: u64 = 1;
/// `crypt_method` of the legacy AES method.
const CRYPT_AES: u32 = 1;
/// `crypt_method` of LUKS.
const CRYPT_LUKS: u32 = 2;

/// The places of a fresh image's parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FreshLayout {
    /// First byte of the refcount table.
    pub refcount_table_offset: u64,
    /// Its clusters.
    pub refcount_table_clusters: u32,
    /// First byte of the L1 table, 0 without one.
    pub l1_offset: u64,
    /// Its entries.
    pub l1_entries: u32,
    /// First byte of the encryption header, 0 without one.
    pub encryption_offset: u64,
    /// Refcount blocks: index in the table → host cluster.
    pub refcount_blocks: BTreeMap<u64, u64>,
    /// First cluster of the preallocated L2 tables and data, which take the rest of the file.
    pub mapped_start: u64,
    /// Guest clusters that are mapped: all with preallocation, else none.
    pub mapped_clusters: u64,
    /// Clusters of the file; each has a refcount of 1.
    pub clusters: u64,
    /// Length of the file in bytes: the last cluster of an L1 table isn't filled up.
    pub file_bytes: u64,
}

impl FreshLayout {
    /// The layout for `options`.
    pub fn of(options: &Qcow2CreateOptions) -> Result<FreshLayout> {
        let l1_entries = options.l1_entries()?;
        let table_entries = options.cluster_bytes() / 8;
        let mut table_clusters = 1;
        // A refcount table of more clusters moves the rest, which may need more blocks: until it fits.
        loop {
            let layout = Self::with_table(options, l1_entries, table_clusters)?;
            let last_block = layout.refcount_blocks.last_key_value().map_or(0, |(index, _)| *index);
            let needed = (last_block + 1).div_ceil(table_entries);
            if needed <= table_clusters {
                return Ok(layout);
            }
            table_clusters = needed;
        }
    }

    fn with_table(options: &Qcow2CreateOptions, l1_entries: u64, table_clusters: u64) -> Result<FreshLayout> {
        let cluster = options.cluster_bytes();
        let per_block = (cluster * 8) >> options.refcount_order;
        let first_block = 1 + table_clusters;
        let encryption_bytes = options.encryption.as_ref().map_or(0, ImageEncryption::header_bytes);
        let l1_start = first_block + 1;
        let l1_bytes = l1_entries * 8;
        let encryption_start = l1_start + l1_bytes.div_ceil(cluster);
        let l1_end = encryption_start + encryption_bytes.div_ceil(cluster);
        let mapped_clusters = if options.is_mapped() { options.size.div_ceil(cluster) } else { 0 };
        let mapped_total = match (mapped_clusters, &options.data_file) {
            (0, _) => 0,
            (_, Some(_)) => l1_entries,
            (data, None) => l1_entries + data,
        };
        let mut blocks = BTreeMap::from([(0, first_block)]);
        let mut next = l1_end;
        // Blocks for the range before the L1 table's end, and for the blocks themselves. A new block lies at the end
        // and may fall into a range that has no block yet: that one comes next, as qemu-img does it.
        let mut index = 0;
        while index * per_block < l1_end || (mapped_total > 0 && index * per_block < next + mapped_total) {
            let mut wanted = index;
            while !blocks.contains_key(&wanted) {
                blocks.insert(wanted, next);
                wanted = next / per_block;
                next += 1;
            }
            index += 1;
        }
        let mapped_start = next;
        next += mapped_total;
        let file_bytes = match (next > l1_end || encryption_bytes > 0, l1_entries) {
            (true, _) | (false, 0) => {
                next.checked_mul(cluster).ok_or_else(|| too_large("qcow2").value(options.size))?
            }
            (false, _) => l1_start * cluster + l1_bytes,
        };
        let narrow = |value: u64| u32::try_from(value).map_err(|_| too_large("qcow2").value(options.size));
        Ok(FreshLayout {
            refcount_table_offset: cluster,
            refcount_table_clusters: narrow(table_clusters)?,
            l1_offset: if l1_entries == 0 { 0 } else { l1_start * cluster },
            l1_entries: narrow(l1_entries)?,
            encryption_offset: if encryption_bytes == 0 { 0 } else { encryption_start * cluster },
            refcount_blocks: blocks,
            mapped_start,
            mapped_clusters,
            clusters: next,
            file_bytes,
        })
    }

    /// The header's bytes; the rest of its cluster is zero.
    pub fn header(&self, options: &Qcow2CreateOptions) -> Result<Vec<u8>> {
        let mut header = Header::new(options.version, options.cluster_bits);
        header.size = options.size;
        header.l1_size = self.l1_entries;
        header.l1_table_offset = self.l1_offset;
        header.refcount_table_offset = self.refcount_table_offset;
        header.refcount_table_clusters = self.refcount_table_clusters;
        header.refcount_order = options.refcount_order;
        if options.lazy_refcounts {
            header.compatible_features |= features::COMPAT_LAZY_REFCOUNTS;
        }
        if options.extended_l2 {
            header.incompatible_features |= features::INCOMPAT_EXTL2;
        }
        if options.compression == Compression::Zstd {
            header.incompatible_features |= features::INCOMPAT_COMPRESSION;
            header.compression_type = 1;
        }
        if options.cluster_bytes() <= SMALL_HEADER_CLUSTER_BYTES {
            header.extensions.clear();
        }
        if let Some(name) = &options.data_file {
            header.incompatible_features |= features::INCOMPAT_DATA_FILE;
            header.extensions.insert(0, Extension::DataFile(name_of_text(name).into_owned()));
        }
        if options.data_file_raw {
            header.autoclear_features |= features::AUTOCLEAR_RAW_DATA;
        }
        if let Some(format) = &options.backing_format {
            header.extensions.insert(0, Extension::BackingFormat(format.as_bytes().to_vec()));
        }
        match &options.encryption {
            Some(encryption @ ImageEncryption::Luks(_)) => {
                header.crypt_method = CRYPT_LUKS;
                let pointer = EncryptionHeader { offset: self.encryption_offset, length: encryption.header_bytes() };
                header.set_extension(Extension::EncryptionHeader(pointer));
            }
            Some(ImageEncryption::LegacyAes { .. }) => header.crypt_method = CRYPT_AES,
            None => {}
        }
        header.backing_file = options.backing_file.as_ref().map(|name| name_of_text(name).into_owned());
        header.encode()
    }

    /// The refcount table's bytes.
    pub fn refcount_table(&self, options: &Qcow2CreateOptions) -> Vec<u8> {
        let mut table =
            vec![0; usize::try_from(u64::from(self.refcount_table_clusters) * options.cluster_bytes()).unwrap_or(0)];
        for (index, cluster) in &self.refcount_blocks {
            let at = usize::try_from(index * 8).unwrap_or(usize::MAX);
            if let Some(entry) = table.get_mut(at..at.saturating_add(8)) {
                entry.copy_from_slice(&(cluster << options.cluster_bits).to_be_bytes());
            }
        }
        table
    }

    /// The bytes of the refcount block with `index` in the table.
    pub fn refcount_block(&self, options: &Qcow2CreateOptions, index: u64) -> Vec<u8> {
        let mut block = vec![0; 1 << options.cluster_bits];
        let per_block = (options.cluster_bytes() * 8) >> options.refcount_order;
        let counted = self.clusters.saturating_sub(index * per_block).min(per_block);
        for position in 0..usize::try_from(counted).unwrap_or(0) {
            refcount::set(&mut block, options.refcount_order, position, 1);
        }
        block
    }

    /// Host cluster of preallocated L2 table `index`.
    fn l2_cluster(&self, options: &Qcow2CreateOptions, index: u64) -> u64 {
        let data_per_table = if options.data_file.is_some() { 0 } else { options.l2_entries() };
        self.mapped_start + index * (1 + data_per_table)
    }

    /// The L1 table's bytes, `None` when it is zero.
    pub fn l1_table(&self, options: &Qcow2CreateOptions) -> Option<Vec<u8>> {
        if self.mapped_clusters == 0 {
            return None;
        }
        let entry = |index| (self.l2_cluster(options, index) << options.cluster_bits) | COPIED;
        Some((0..u64::from(self.l1_entries)).flat_map(|index| entry(index).to_be_bytes()).collect())
    }

    /// Preallocated L2 table `index`: its offset in the file and its bytes. With subclusters all of them stay
    /// unallocated in their allocated cluster, so that a backing file shows through.
    pub fn l2_table(&self, options: &Qcow2CreateOptions, index: u64) -> (u64, Vec<u8>) {
        let entries = options.l2_entries();
        let table = self.l2_cluster(options, index);
        let first = index * entries;
        // The bytes in the cluster aren't zero for the guest. Subclusters are unallocated, so they are never read.
        let hides = options.encryption.is_some() && options.version >= 3 && !options.extended_l2;
        let zero = if hides { READS_ZERO } else { 0 };
        let mut bytes = Vec::with_capacity(1 << options.cluster_bits);
        for guest in first..self.mapped_clusters.min(first + entries) {
            let host = if options.data_file.is_some() { guest } else { table + 1 + guest - first };
            bytes.extend_from_slice(&((host << options.cluster_bits) | COPIED | zero).to_be_bytes());
            if options.extended_l2 {
                bytes.extend_from_slice(&[0; 8]);
            }
        }
        bytes.resize(1 << options.cluster_bits, 0);
        (table << options.cluster_bits, bytes)
    }

    /// Data clusters behind preallocated L2 table `index`, in the same file.
    pub fn l2_data_clusters(&self, options: &Qcow2CreateOptions, index: u64) -> u64 {
        match options.data_file {
            Some(_) => 0,
            None => self.mapped_clusters.saturating_sub(index * options.l2_entries()).min(options.l2_entries()),
        }
    }

    /// Preallocated L2 tables.
    pub fn l2_tables(&self) -> u64 {
        if self.mapped_clusters == 0 { 0 } else { u64::from(self.l1_entries) }
    }
}
