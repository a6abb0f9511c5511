// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Copies of clusters that the repair makes before anything points to them. Guest data that shares a cluster with
//! metadata is copied so that neither writes into the other. Guest data with more users than its refcount can hold is
//! copied, too.

use super::session::CheckSession;
use super::sweep::OverlapEntry;
use cowshed_layout::qcow2::L2Entry;
use cowshed_qcow2::check::{FindingKind, Ledger};
use cowshed_types::memory::{grow_map, try_push, vec_for};
use cowshed_types::{HostOffset, Result};
use std::collections::HashMap;

/// A copy of a cluster, and the entry that is to point to it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Copy {
    /// The copy's cluster.
    pub cluster: u64,
    /// Number of references that it will have.
    pub weight: u32,
    /// Where the pointer to it is in the file, and its value then; `None` where one to another cluster is enough.
    pub pointer: Option<(u64, u64)>,
}

/// A cluster with more references than its refcount can hold.
struct Overfull {
    references: u64,
    /// References of plain entries seen so far.
    seen: u64,
    /// The entries beyond the largest refcount.
    surplus: Vec<OverlapEntry>,
}

impl CheckSession<'_> {
    /// Per overfull cluster that nothing but plain entries refer to: the entries that need copies of their own.
    pub(super) async fn overfull(&self, ledger: &Ledger) -> Result<HashMap<u64, Vec<OverlapEntry>>> {
        let max = self.geometry.max_refcount();
        let mut clusters: HashMap<u64, Overfull> = HashMap::new();
        for finding in &ledger.findings {
            if let FindingKind::RefcountLow { cluster, references, .. } = finding.kind
                && references > max
            {
                grow_map(&mut clusters)?;
                clusters.insert(cluster, Overfull { references, seen: 0, surplus: Vec::new() });
            }
        }
        if clusters.is_empty() || self.context.data_file || self.header.crypt_method != 0 {
            return Ok(HashMap::new());
        }
        // A few: an image with more of them needs wider refcounts.
        let mut room = self.options.findings_max;
        let stride = if self.geometry.extended_l2() { 16 } else { 8 };
        for table in self.tables.iter().filter(|table| table.weight != 0 && !self.is_claimed_twice(table.offset)) {
            let bytes = self.read(table.offset, self.geometry.cluster_size() as usize).await?;
            for (word, at) in bytes.chunks_exact(stride).zip((table.offset..).step_by(stride)) {
                let entry = L2Entry(word.first_chunk().map_or(0, |word| u64::from_be_bytes(*word)));
                let offset = entry.offset().0;
                if entry.is_compressed() || offset == 0 || self.geometry.in_cluster(offset) != 0 {
                    continue;
                }
                let Some(cluster) = clusters.get_mut(&(offset >> self.geometry.cluster_bits())) else { continue };
                let weight = u64::from(table.weight);
                if cluster.seen + weight <= max {
                    cluster.seen += weight;
                } else if weight <= max && room > 0 {
                    room -= 1;
                    cluster.references = cluster.references.saturating_sub(weight);
                    let entry = OverlapEntry { at, entry: entry.0, weight: table.weight };
                    try_push(&mut cluster.surplus, entry)?;
                }
            }
        }
        let mut movable = HashMap::new();
        for (number, cluster) in clusters.into_iter().filter(|(_, cluster)| cluster.references == cluster.seen) {
            grow_map(&mut movable)?;
            movable.insert(number, cluster.surplus);
        }
        Ok(movable)
    }

    /// Copies each entry's cluster to a free one, with a barrier. Nothing refers to the copies yet.
    pub(super) async fn copy_overlaps(
        &mut self,
        overlaps: &[OverlapEntry],
        notes: &mut Vec<String>,
    ) -> Result<Vec<Copy>> {
        if overlaps.is_empty() {
            return Ok(Vec::new());
        }
        if let Some(why) = self.growth_obstacle() {
            notes.push(why.to_owned());
            return Ok(Vec::new());
        }
        if self.header.crypt_method != 0 {
            // The place of a cluster decides its decryption.
            notes.push("encrypted clusters that overlap with metadata can't be copied".to_owned());
            return Ok(Vec::new());
        }
        let cluster_size = self.geometry.cluster_size() as usize;
        let mut movable: Vec<&OverlapEntry> = vec_for(overlaps.len())?;
        movable.extend(overlaps.iter().filter(|overlap| !self.is_claimed_twice(overlap.at)));
        let mut copies = vec_for(movable.len())?;
        let room = self.take_room(movable.len() as u64, false).await?;
        for (cluster, overlap) in room.into_iter().zip(movable) {
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
            // Only a new structure is sure to have counts for clusters so far out.
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
