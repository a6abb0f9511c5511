// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reading one L2 table: counting its references and finding faults in its entries.

use super::{CheckedStructure, Counts, Finding, FindingKind, INACTIVE, TableRef};
use cowshed_layout::qcow2::{CompressedDescriptor, Geometry, L2Entry, SubclusterBitmap};
use cowshed_types::Result;
use cowshed_types::memory::{no_memory, try_push};

const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
const COPIED: u64 = 1 << 63;
/// Entries handled at a time. Their cells are all loaded before the first is changed, so the processor waits for many
/// cache lines at once. An atomic change waits for its own line alone.
const GROUP: usize = 64;

/// The properties of the image that a scan needs.
#[derive(Clone, Copy, Debug)]
pub struct ScanContext {
    /// Sizes.
    pub geometry: Geometry,
    /// 2 or 3.
    pub version: u32,
    /// Guest clusters are in an external data file, which isn't refcounted.
    pub data_file: bool,
    /// …at the guest's offsets.
    pub data_file_raw: bool,
    /// Length of the image file in bytes.
    pub file_len: u64,
    /// Reports findings that don't depend on the window of [`Counts`], and gathers [`ScanStats`].
    pub first_pass: bool,
}

impl ScanContext {
    /// True when a region begins behind the end of the file, or ends a whole cluster or more behind it. The last
    /// cluster of a file may be incomplete; bytes further out can't have been written.
    pub fn is_past_end(&self, offset: u64, len: u64) -> bool {
        let Some(end) = offset.checked_add(len) else { return true };
        offset >= self.file_len || end >= self.file_len.saturating_add(self.geometry.cluster_size())
    }
}

/// Sums over the active L2 tables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScanStats {
    /// Allocated clusters.
    pub allocated: u64,
    /// Compressed clusters.
    pub compressed: u64,
    /// Clusters that don't follow their predecessor in the same table (as qemu-img counts them).
    pub fragmented: u64,
    next: Option<u64>,
}

impl ScanStats {
    #[inline]
    fn data(&mut self, offset: u64, cluster_size: u64) {
        self.allocated += 1;
        self.fragmented += u64::from(self.next.is_some_and(|next| next != offset));
        self.next = Some(offset.wrapping_add(cluster_size));
    }

    fn compressed(&mut self) {
        self.allocated += 1;
        self.compressed += 1;
        self.fragmented += 1;
    }

    /// Adds the sums of other tables.
    pub fn append(&mut self, other: &ScanStats) {
        self.allocated += other.allocated;
        self.compressed += other.compressed;
        self.fragmented += other.fragmented;
    }
}

/// The findings of a scan of one table. Reused from table to table.
#[derive(Debug, Default)]
pub struct ScanOutput {
    /// Sums.
    pub stats: ScanStats,
    /// Findings with the number of references that share them.
    pub findings: Vec<(Finding, u64)>,
    /// Entries of active tables whose bit 63 may contradict the stored refcount: the caller looks the stored refcount
    /// of `cluster` up and decides.
    pub copied: Vec<CopiedSuspect>,
    /// Entries that use a cluster of metadata for guest data: (word index, entry, guest offset).
    pub overlaps: Vec<(usize, u64, Option<u64>)>,
    /// There was no memory for one of the lists.
    lacks_memory: bool,
}

impl ScanOutput {
    fn find(&mut self, finding: Finding, times: u64) {
        self.keep(|out| &mut out.findings, (finding, times));
    }

    fn keep<T>(&mut self, list: impl FnOnce(&mut Self) -> &mut Vec<T>, item: T) {
        // A list that can't grow isn't tried again for each entry of the table.
        self.lacks_memory = self.lacks_memory || try_push(list(self), item).is_err();
    }
}

/// See [`ScanOutput::copied`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopiedSuspect {
    /// Index of the 8-byte word in the table.
    pub word: usize,
    /// The entry.
    pub entry: u64,
    /// Guest offset in bytes.
    pub guest: u64,
    /// The host cluster it points to.
    pub cluster: u64,
}

/// Counts the references of one L2 table and notes the faults in it. `bytes` is the whole table. `ENOMEM` where there
/// is no memory for the findings.
pub fn scan_l2(
    context: &ScanContext,
    counts: &Counts,
    table: TableRef,
    bytes: &[u8],
    out: &mut ScanOutput,
) -> Result<()> {
    let scan = Scan { context, counts, table, active: table.l1_index != INACTIVE };
    let words = bytes.as_chunks::<8>().0;
    let step = if context.geometry.extended_l2() { 2 } else { 1 };
    for (group, chunk) in words.chunks(GROUP * step).enumerate() {
        let base = group * GROUP * step;
        if step == 1 && !context.data_file {
            scan.group(base, chunk, out)?;
        } else {
            for (index, pair) in chunk.chunks_exact(step).enumerate() {
                let bitmap = pair.get(1).map(|word| u64::from_be_bytes(*word));
                scan.entry(base + index * step, u64::from_be_bytes(pair[0]), bitmap, out)?;
            }
        }
        if out.lacks_memory {
            return Err(no_memory(size_of_val(out.findings.as_slice())));
        }
    }
    Ok(())
}

struct Scan<'a> {
    context: &'a ScanContext,
    counts: &'a Counts,
    table: TableRef,
    active: bool,
}

impl Scan<'_> {
    /// The fast path: plain data clusters inside of the window. All else goes to [`Scan::entry`].
    fn group(&self, base: usize, words: &[[u8; 8]], out: &mut ScanOutput) -> Result<()> {
        let cluster_bits = self.context.geometry.cluster_bits();
        let cluster_size = 1u64 << cluster_bits;
        // Anything but an aligned offset and bit 63.
        let odd = !(OFFSET_MASK | COPIED) | (cluster_size - 1);
        let file_clusters = self.context.file_len.div_ceil(cluster_size);
        let mut cells = [0u32; GROUP];
        let mut plain = 0;
        let mut metadata = false;
        for (index, word) in words.iter().enumerate() {
            let entry = u64::from_be_bytes(*word);
            let cluster = (entry & OFFSET_MASK) >> cluster_bits;
            let cell = self.counts.index(cluster).filter(|_| entry & odd == 0 && cluster < file_clusters);
            match cell {
                Some(cell) if cluster != 0 => {
                    let mark = self.counts.peek(cell);
                    metadata |= mark.is_metadata();
                    if self.active && mark.is_stored_one() != (entry & COPIED != 0) {
                        self.suspect(base + index, entry, cluster, out);
                    }
                    if self.active && self.context.first_pass {
                        out.stats.data(entry & OFFSET_MASK, cluster_size);
                    }
                    cells[plain] = cell as u32;
                    plain += 1;
                }
                _ if entry == 0 => {}
                _ => self.entry(base + index, entry, None, out)?,
            }
        }
        if metadata {
            self.overlaps(base, words, out);
        }
        if self.table.weight != 0 {
            for cell in &cells[..plain] {
                self.counts.add_at(*cell as usize, self.table.weight)?;
            }
        }
        Ok(())
    }

    /// Looks for the entries of a group that point to metadata.
    #[cold]
    fn overlaps(&self, base: usize, words: &[[u8; 8]], out: &mut ScanOutput) {
        let odd = !(OFFSET_MASK | COPIED) | (self.context.geometry.cluster_size() - 1);
        for (index, word) in words.iter().enumerate() {
            let entry = u64::from_be_bytes(*word);
            let cluster = (entry & OFFSET_MASK) >> self.context.geometry.cluster_bits();
            let Some(cell) = self.counts.index(cluster) else { continue };
            if entry & odd == 0 && cluster != 0 && self.counts.peek(cell).is_metadata() {
                self.overlap(base + index, entry, cluster, out);
            }
        }
    }

    fn overlap(&self, word: usize, entry: u64, cluster: u64, out: &mut ScanOutput) {
        if self.table.weight == 0 {
            return;
        }
        let kind = FindingKind::Overlap { structure: CheckedStructure::Data, cluster };
        let guest = self.guest(word);
        out.find(self.at(word, kind), 1);
        out.keep(|out| &mut out.overlaps, (word, entry, guest));
    }

    fn suspect(&self, word: usize, entry: u64, cluster: u64, out: &mut ScanOutput) {
        let guest = self.guest(word).unwrap_or_default();
        out.keep(|out| &mut out.copied, CopiedSuspect { word, entry, guest, cluster });
    }

    /// The guest offset of an entry of an active table.
    fn guest(&self, word: usize) -> Option<u64> {
        let index = if self.context.geometry.extended_l2() { word / 2 } else { word };
        let offset = self.context.geometry.guest_at(u64::from(self.table.l1_index), index as u64);
        offset.filter(|_| self.active).map(|guest| guest.0)
    }

    fn at(&self, word: usize, kind: FindingKind) -> Finding {
        Finding::at(kind, self.table.offset + word as u64 * 8, self.guest(word))
    }

    /// Reports a fault that each of the table's users would meet, once.
    fn found(&self, word: usize, kind: FindingKind, out: &mut ScanOutput) {
        if self.context.first_pass && self.table.weight != 0 {
            out.find(self.at(word, kind), u64::from(self.table.weight));
        }
    }

    /// Any entry, slowly.
    fn entry(&self, word: usize, raw: u64, bitmap: Option<u64>, out: &mut ScanOutput) -> Result<()> {
        let entry = L2Entry(raw);
        if entry.is_compressed() {
            return self.compressed(word, entry, out);
        }
        let geometry = self.context.geometry;
        let offset = entry.offset().0;
        let reserved = entry.reserved_bits() | u64::from(self.context.version < 3 && entry.is_zero());
        if reserved != 0 {
            self.found(word, FindingKind::ReservedL2 { entry: raw }, out);
        }
        let allocated = offset != 0 || (self.context.data_file && entry.is_copied());
        if let Some(bitmap) = bitmap {
            self.subclusters(word, offset, allocated, bitmap, out);
        }
        if !allocated {
            return Ok(());
        }
        if self.active && self.context.first_pass {
            out.stats.data(offset, geometry.cluster_size());
        }
        let aligned = geometry.in_cluster(offset) == 0;
        if !aligned {
            let zero = bitmap.is_none() && entry.is_zero();
            self.found(word, FindingKind::UnalignedData { offset, zero }, out);
        }
        if self.context.data_file {
            self.in_data_file(word, entry, out);
            return Ok(());
        }
        self.count(word, offset, geometry.cluster_size(), false, out)?;
        let cluster = offset >> geometry.cluster_bits();
        if self.counts.index(cluster).is_some_and(|cell| self.counts.peek(cell).is_metadata()) {
            self.overlap(word, raw, cluster, out);
        }
        self.copied(word, raw, cluster, aligned, out);
        Ok(())
    }

    /// Compares bit 63 with the stored refcount, as far as it is known. For clusters behind the window the caller
    /// looks.
    fn copied(&self, word: usize, raw: u64, cluster: u64, aligned: bool, out: &mut ScanOutput) {
        if !self.active || !aligned {
            return;
        }
        let differs = match self.counts.index(cluster) {
            Some(cell) => self.counts.peek(cell).is_stored_one() != (raw & COPIED != 0),
            None => self.context.first_pass && cluster >= self.context.geometry.clusters(self.context.file_len),
        };
        if differs {
            self.suspect(word, raw, cluster, out);
        }
    }

    fn in_data_file(&self, word: usize, entry: L2Entry, out: &mut ScanOutput) {
        if self.active && !entry.is_copied() {
            // "All guest clusters have an implicit refcount of 1."
            self.found(word, FindingKind::CopiedL2 { entry: entry.0, refcount: 1 }, out);
        }
        if let Some(guest) = self.guest(word)
            && self.context.data_file_raw
            && guest != entry.offset().0
        {
            self.found(word, FindingKind::DataFileOffset { entry: entry.0, guest }, out);
        }
    }

    fn subclusters(&self, word: usize, offset: u64, allocated: bool, bitmap: u64, out: &mut ScanOutput) {
        let (alloc, zero) = (bitmap & u64::from(u32::MAX), bitmap >> 32);
        if !allocated && alloc != 0 {
            self.found(word, FindingKind::SubclusterUnallocated { bitmap }, out);
        } else if alloc & zero != 0 {
            debug_assert!(!SubclusterBitmap(bitmap).is_valid());
            self.found(word, FindingKind::SubclusterBitmap { offset, bitmap }, out);
        }
    }

    fn compressed(&self, word: usize, entry: L2Entry, out: &mut ScanOutput) -> Result<()> {
        let cluster_bits = self.context.geometry.cluster_bits();
        let Some(descriptor) = entry.compressed_descriptor(cluster_bits) else { return Ok(()) };
        if self.context.data_file {
            let guest = self.guest(word).unwrap_or_default() >> cluster_bits;
            let kind = FindingKind::CompressedInDataFile { guest_cluster: guest, entry: entry.0 };
            self.found(word, kind, out);
            return Ok(());
        }
        let CompressedDescriptor { host_offset, .. } = descriptor;
        if entry.is_copied() {
            self.found(word, FindingKind::CompressedCopied { offset: host_offset.0 }, out);
        }
        if self.active && self.context.first_pass {
            out.stats.compressed();
        }
        self.count(word, host_offset.0, descriptor.len_max(), true, out)
    }

    /// Counts every cluster that a region touches.
    fn count(&self, word: usize, offset: u64, len: u64, compressed: bool, out: &mut ScanOutput) -> Result<()> {
        if self.context.is_past_end(offset, len) {
            self.found(word, FindingKind::PastEnd { structure: CheckedStructure::Data, offset, len }, out);
            return Ok(());
        }
        if self.table.weight == 0 {
            return Ok(());
        }
        let cluster_bits = self.context.geometry.cluster_bits();
        for cluster in offset >> cluster_bits..=(offset + len - 1) >> cluster_bits {
            let mark = self.counts.add(cluster, self.table.weight)?;
            if compressed && mark.is_some_and(|mark| mark.is_metadata()) {
                let kind = FindingKind::Overlap { structure: CheckedStructure::Data, cluster };
                out.find(self.at(word, kind), 1);
            }
        }
        Ok(())
    }
}
