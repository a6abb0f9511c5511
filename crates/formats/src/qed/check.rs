// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The check of a QED image, with the counts of QEMU's: each was compared with those of its program on damaged images.

use super::Qed;
use crate::blocks::{FileTable, ImageFile};
use crate::survey::BlockSurvey;
use cowshed_graph::node::MappedCheck;
use cowshed_layout::qed::{ENTRY_BYTES, QedCluster};
use cowshed_storage::{File, IoBuf};
use cowshed_types::{Error, Result};

const FIELD: &str = "L1 table entry";

impl Qed {
    /// Looks at all tables and their clusters; at most `max` findings are noted, and all are counted.
    pub(super) async fn survey(&self, image: &ImageFile, max: usize) -> Result<MappedCheck> {
        let cluster_bytes = self.header.cluster_bytes;
        let mut walk = QedWalk { survey: BlockSurvey::before(self, cluster_bytes, max), repaired: None, cleared: 0 };
        walk.tables(self, image).await?;
        let mut survey = walk.survey;
        let in_use = self.header.header_clusters + survey.used();
        let counters = &mut survey.check.counters;
        counters.total_clusters = self.size_now().div_ceil(cluster_bytes);
        counters.leaks = (image.len() / cluster_bytes).saturating_sub(in_use);
        Ok(survey.check)
    }

    /// Clears entries that lead to no cluster of the file, and returns their number. Their clusters are lost already.
    pub(super) async fn clear_entries(&self, image: &ImageFile) -> Result<u64> {
        let survey = BlockSurvey::before(self, self.header.cluster_bytes, 0);
        let file = image.storage();
        let mut walk = QedWalk { survey, repaired: Some(&file), cleared: 0 };
        walk.tables(self, image).await?;
        let cleared = walk.cleared;
        file.sync().await?;
        image.forget();
        Ok(cleared)
    }

    /// A cluster that isn't one of the header's.
    fn behind_header(&self, field: &'static str, offset: u64) -> Result<u64> {
        if offset < self.header.header_clusters * self.header.cluster_bytes {
            let message = "an offset leads into the header";
            return Err(Error::invalid_image(field, format!("{offset:#x}"), message));
        }
        self.aligned(field, offset)
    }
}

/// A walk over all tables, in the order of the disk.
struct QedWalk<'a> {
    survey: BlockSurvey,
    /// Where wrong entries are cleared. `None`: they are findings.
    repaired: Option<&'a File>,
    cleared: u64,
}

impl QedWalk<'_> {
    async fn tables(&mut self, qed: &Qed, image: &ImageFile) -> Result<()> {
        self.claim_table(qed, qed.l1.offset)?;
        let mut from = 0;
        while let Some((index, entry)) = qed.next_table(image, from).await? {
            from = index + 1;
            let table = qed.behind_header(FIELD, entry);
            let table = table.map(|offset| FileTable { field: FIELD, offset, bytes: qed.header.table_bytes });
            match table.and_then(|table| image.check_table(&table).map(|()| table)) {
                // A table that lies on another one is a finding. Its entries may be those of the other, and are left alone.
                Ok(table) => {
                    if self.claim_table(qed, table.offset)? {
                        self.clusters(qed, image, index.saturating_mul(qed.header.l2_span_bytes()), table).await?;
                    }
                }
                Err(error) => {
                    self.wrong(qed.l1.offset + index * ENTRY_BYTES, || format!("L1 table entry {index}: {error}"))
                        .await?;
                }
            }
        }
        Ok(())
    }

    /// Notes the clusters of a table as used; false where one of them is already.
    fn claim_table(&mut self, qed: &Qed, start: u64) -> Result<bool> {
        let (cluster_bytes, mut is_free) = (qed.header.cluster_bytes, true);
        for cluster in 0..qed.header.table_bytes / cluster_bytes {
            let offset = start + cluster * cluster_bytes;
            is_free &= self.survey.claim(offset, cluster_bytes, || format!("table at offset {start:#x}"))?;
        }
        Ok(is_free)
    }

    /// Looks at the clusters of an L2 table. `disk`: the first byte of the disk that it describes.
    async fn clusters(&mut self, qed: &Qed, image: &ImageFile, disk: u64, l2: FileTable) -> Result<()> {
        if image.is_unwritten(&l2).await {
            return Ok(());
        }
        let (cluster_bytes, clusters) = (qed.header.cluster_bytes, qed.header.table_entries());
        let (mut index, mut last_end) = (0, None);
        while index < clusters {
            let entry = u64::from_le_bytes(image.entry(l2, index).await?);
            let QedCluster::At(offset) = QedCluster::of(entry) else {
                let rest = (0, (clusters - index).saturating_mul(cluster_bytes), cluster_bytes);
                index += image.same::<8>(l2, index, rest).await?.div_ceil(cluster_bytes).max(1);
                continue;
            };
            // Wrong ones count, too.
            let counters = &mut self.survey.check.counters;
            counters.allocated_clusters += 1;
            counters.fragmented_clusters += u64::from(last_end.is_some_and(|end| end != offset));
            last_end = Some(offset.wrapping_add(cluster_bytes));
            // A table may be longer than any disk.
            let at = disk.saturating_add(index * cluster_bytes);
            let place = qed.behind_header("L2 table entry", offset);
            match place.and_then(|start| image.check_data("L2 table entry", start, cluster_bytes, at)) {
                Ok(()) => {
                    self.survey.claim(offset, cluster_bytes, || format!("block at byte {at} of the disk"))?;
                }
                Err(error) => {
                    self.wrong(l2.offset + index * ENTRY_BYTES, || format!("block at byte {at} of the disk: {error}"))
                        .await?;
                }
            }
            index += 1;
        }
        Ok(())
    }

    /// An entry that leads nowhere, at byte `at` of the file.
    async fn wrong(&mut self, at: u64, text: impl FnOnce() -> String) -> Result<()> {
        match self.repaired {
            Some(file) => {
                self.cleared += 1;
                file.write_at(IoBuf::zeroed(ENTRY_BYTES as usize), at).await.0
            }
            None => {
                self.survey.corruption(text());
                Ok(())
            }
        }
    }
}
