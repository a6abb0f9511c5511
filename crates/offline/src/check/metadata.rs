// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Counting the clusters of every structure but guest data.

use super::session::CheckSession;
use super::snapshots::SNAPSHOT_RULES_VERSION;
use cowshed_layout::qcow2::BitmapTableEntry;
use cowshed_qcow2::check::{CheckedStructure, Counts, Finding, FindingKind, Ledger};
use cowshed_types::Result;
use cowshed_types::memory::vec_for;
use std::ops::Range;

/// The structures that are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CheckScope {
    /// All.
    Whole,
    /// All but the refcount table and its blocks, which are to be replaced.
    WithoutRefcounts,
}

struct Marker<'s, 'a> {
    session: &'s CheckSession<'a>,
    counts: &'s Counts,
    first_pass: bool,
    ledger: &'s mut Ledger,
}

impl CheckSession<'_> {
    /// Counts all metadata in the window of `counts`. Must come before any guest data is counted.
    pub(super) async fn mark_metadata(
        &self,
        counts: &Counts,
        first_pass: bool,
        scope: CheckScope,
        ledger: &mut Ledger,
    ) -> Result<()> {
        let mut marker = Marker { session: self, counts, first_pass, ledger };
        let cluster_size = self.geometry.cluster_size();
        let header = &self.header;
        marker.region(CheckedStructure::Header, 0, cluster_size)?;
        marker.known(CheckedStructure::ActiveL1, header.l1_table_offset, self.l1.len() as u64 * 8)?;
        if self.snapshot_table_len != 0 {
            marker.region(CheckedStructure::SnapshotTable, header.snapshots_offset, self.snapshot_table_len)?;
        }
        for snapshot in &self.snapshots {
            if snapshot.validate(SNAPSHOT_RULES_VERSION, header.cluster_bits).is_ok() {
                marker.known(
                    CheckedStructure::SnapshotL1,
                    snapshot.l1_table_offset,
                    u64::from(snapshot.l1_size) * 8,
                )?;
            }
        }
        if let Some(encryption) = header.encryption_header() {
            marker.region(CheckedStructure::EncryptionHeader, encryption.offset, encryption.length)?;
        }
        marker.bitmaps().await?;
        if scope == CheckScope::Whole {
            let table_len = u64::from(header.refcount_table_clusters) << header.cluster_bits;
            marker.known(CheckedStructure::RefcountTable, header.refcount_table_offset, table_len)?;
            marker.refcount_blocks()?;
        }
        for table in self.tables.iter().filter(|table| table.weight != 0) {
            let cluster = table.offset >> header.cluster_bits;
            marker.clusters(CheckedStructure::L2Table, cluster..cluster + 1, table.weight)?;
        }
        Ok(())
    }
}

impl Marker<'_, '_> {
    /// Counts a region and reports one that is too far out.
    fn region(&mut self, structure: CheckedStructure, offset: u64, len: u64) -> Result<()> {
        if len != 0 && self.session.context.is_past_end(offset, len) {
            if self.first_pass {
                self.ledger.add(Finding::new(FindingKind::PastEnd { structure, offset, len }));
            }
            return Ok(());
        }
        self.known(structure, offset, len)
    }

    /// Counts a region; one that is too far out was reported before.
    fn known(&mut self, structure: CheckedStructure, offset: u64, len: u64) -> Result<()> {
        if len == 0 || self.session.context.is_past_end(offset, len) {
            return Ok(());
        }
        let bits = self.session.header.cluster_bits;
        self.clusters(structure, offset >> bits..((offset + len - 1) >> bits) + 1, 1)
    }

    fn clusters(&mut self, structure: CheckedStructure, clusters: Range<u64>, weight: u32) -> Result<()> {
        for cluster in clusters {
            let Some(old) = self.counts.mark_metadata(cluster, weight)? else { continue };
            if old.is_metadata() {
                self.ledger.add(Finding::new(FindingKind::Overlap { structure, cluster }));
            }
        }
        Ok(())
    }

    /// Each block once; table entries that share one are reported with the table, and count.
    fn refcount_blocks(&mut self) -> Result<()> {
        let session = self.session;
        let mut offsets: Vec<u64> = vec_for(session.refcount_table.len())?;
        offsets.extend((0..session.refcount_table.len() as u64).filter_map(|index| session.refcount_block(index)));
        offsets.sort_unstable();
        for same in offsets.chunk_by(|a, b| a == b) {
            let cluster = same[0] >> session.header.cluster_bits;
            let users = u32::try_from(same.len()).unwrap_or(u32::MAX);
            self.clusters(CheckedStructure::RefcountBlock, cluster..cluster + 1, users)?;
        }
        Ok(())
    }

    async fn bitmaps(&mut self) -> Result<()> {
        let session = self.session;
        let Some(extension) = session.header.bitmaps().filter(|_| !session.stale_bitmaps) else { return Ok(()) };
        self.region(CheckedStructure::BitmapDirectory, extension.directory_offset, extension.directory_size)?;
        for bitmap in &session.bitmaps {
            let (start, len) = (bitmap.table_offset, u64::from(bitmap.table_size) * 8);
            self.region(CheckedStructure::BitmapTable, start, len)?;
            if session.context.is_past_end(start, len) {
                continue;
            }
            let entries = u64::from(bitmap.table_size);
            session
                .read_numbers(start, entries, |first, piece| {
                    piece.iter().zip(first..).try_for_each(|(raw, index)| self.bitmap_entry(start + index * 8, *raw))
                })
                .await?;
        }
        Ok(())
    }

    fn bitmap_entry(&mut self, at: u64, raw: u64) -> Result<()> {
        let entry = BitmapTableEntry(raw);
        let offset = entry.offset().0;
        let cluster_bits = self.session.header.cluster_bits;
        if let Err(error) = entry.cluster(cluster_bits)
            && self.first_pass
        {
            let reason = error.message().to_owned();
            let kind = FindingKind::Unreadable { structure: CheckedStructure::BitmapTable, offset: at, reason };
            self.ledger.add(Finding::at(kind, at, None));
        }
        if offset == 0 {
            return Ok(());
        }
        self.region(CheckedStructure::BitmapData, offset, 1 << cluster_bits)
    }
}
