// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Copies of clusters that the repair makes before anything points to them. Guest data that shares a cluster with metadata: the guest's entry gets a copy of the cluster, so that neither
//! writes into the other.

use super::session::Session;
use super::sweep::OverlapEntry;
use cowshed_block::{HostOffset, Result};
use cowshed_layout::qcow2::L2Entry;

/// A copy of a cluster, and the entry that is to point to it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Copy {
    /// The copy's cluster.
    pub cluster: u64,
    /// References that it will have.
    pub weight: u32,
    /// Where the pointer to it is in the file, and its value then; `None` where one to another cluster is enough.
    pub pointer: Option<(u64, u64)>,
}

impl Session<'_> {
    /// Copies each entry's cluster behind the end of the file, with a barrier. Nothing refers to the copies yet.
    pub(super) async fn copy_overlaps(
        &mut self,
        overlaps: &[OverlapEntry],
        notes: &mut Vec<String>,
    ) -> Result<Vec<Copy>> {
        if overlaps.is_empty() {
            return Ok(Vec::new());
        }
        if self.header.crypt_method != 0 {
            // Where a cluster is decides how it decrypts.
            notes.push("encrypted clusters that overlap with metadata can't be copied".to_owned());
            return Ok(Vec::new());
        }
        let cluster_size = self.geometry.cluster_size() as usize;
        let mut copies = Vec::new();
        let movable = overlaps.iter().filter(|overlap| !self.is_claimed_twice(overlap.at));
        for (cluster, overlap) in (self.file_clusters + 1..).zip(movable) {
            let bytes = self.read(L2Entry(overlap.entry).offset().0, cluster_size).await?;
            self.write(cluster << self.geometry.cluster_bits(), &bytes).await?;
            let host = HostOffset(cluster << self.geometry.cluster_bits());
            let zero = L2Entry(overlap.entry).is_zero();
            let new = if zero { L2Entry::zero_allocated(host, false) } else { L2Entry::data(host, false) };
            copies.push(Copy { cluster, weight: overlap.weight, pointer: Some((overlap.at, new.0)) });
        }
        if !copies.is_empty() {
            self.barrier().await?;
            self.file_grew();
            // Only a structure made anew is sure to have counts for what lies so far out.
            self.needs_rebuild = true;
        }
        Ok(copies)
    }

    /// Lets the entries point to the copies, which are counted by now, with a barrier. Bit 63 comes later.
    pub(super) async fn switch_to_copies(&self, copies: &[Copy]) -> Result<()> {
        for (at, new) in copies.iter().filter_map(|copy| copy.pointer) {
            self.write(at, &new.to_be_bytes()).await?;
        }
        if !copies.is_empty() {
            self.barrier().await?;
        }
        Ok(())
    }

    /// Takes note of clusters that were written behind the end.
    pub(super) fn file_grew(&mut self) {
        self.context.file_len = self.file.len();
        self.file_clusters = self.geometry.clusters(self.context.file_len);
    }
}
