// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Looking for free host clusters, from the start of the file on.

use crate::check::end_of_use;
use cowshed_layout::qcow2::{Geometry, RefcountTableEntry, refcount};
use cowshed_storage::{File, IoBuf};
use cowshed_types::{Errno, Error, ErrorKind, Result};
use std::cmp::Reverse;
use std::collections::HashSet;
use std::ops::Range;

/// The counts on disk, read block by block.
pub(crate) struct StoredCounts {
    file: File,
    geometry: Geometry,
    table: Vec<u64>,
    /// The block looked at last; `None` inside: there is no block, all is free.
    block: Option<(u64, Option<IoBuf>)>,
}

impl StoredCounts {
    pub fn new(file: File, geometry: Geometry, table: Vec<u64>) -> Self {
        StoredCounts { file, geometry, table, block: None }
    }

    /// Clusters before the end of the range that the blocks of the table can count: behind it all are free.
    pub fn counted_clusters(&self) -> u64 {
        let blocks = self.table.iter().rposition(|raw| *raw != 0).map_or(0, |last| last as u64 + 1);
        blocks.saturating_mul(self.geometry.refcount_block_entries())
    }

    /// The refcount table's entries.
    pub fn table(&self) -> &[u64] {
        &self.table
    }

    /// A block of the table; `None` where there is none.
    pub async fn block(&mut self, index: u64) -> Result<Option<&IoBuf>> {
        if self.block.as_ref().is_none_or(|(loaded, _)| *loaded != index) {
            self.block = Some((index, read_block(&self.file, self.geometry, &self.table, index).await?));
        }
        Ok(self.block.as_ref().and_then(|(_, block)| block.as_ref()))
    }

    /// The count of a host cluster.
    pub async fn get(&mut self, cluster: u64) -> Result<u64> {
        let geometry = self.geometry;
        let entry = geometry.refcount_block_index(cluster) as usize;
        let block = self.block(geometry.refcount_table_index(cluster)).await?;
        Ok(block.map_or(0, |block| refcount::get(block, geometry.refcount_order(), entry)))
    }
}

/// Hands out clusters whose count is zero, each once.
pub(crate) struct FreeClusters {
    stored: StoredCounts,
    /// The next cluster to look at.
    at: u64,
    /// Clusters that a container which can't grow has.
    limit: u64,
    /// Clusters that hold metadata, whatever their count.
    metadata: HashSet<u64>,
    /// Clusters that are free, and not to be used yet.
    kept: HashSet<u64>,
}

impl FreeClusters {
    pub fn new(file: File, geometry: Geometry, table: Vec<u64>, metadata: HashSet<u64>) -> Self {
        let limit = if file.is_device() { file.measure_len() / geometry.cluster_size() } else { u64::MAX };
        FreeClusters { stored: StoredCounts::new(file, geometry, table), at: 1, limit, metadata, kept: HashSet::new() }
    }

    /// As [`StoredCounts::counted_clusters`].
    pub fn counted_clusters(&self) -> u64 {
        self.stored.counted_clusters()
    }

    /// Leaves the clusters at these host offsets as they are, though they may be free.
    pub fn keep(&mut self, hosts: impl Iterator<Item = u64>) {
        self.kept.extend(hosts.map(|host| host >> self.stored.geometry.cluster_bits()));
    }

    /// The first of `count` neighbouring free clusters.
    pub async fn take(&mut self, count: u64) -> Result<u64> {
        let mut found = 0;
        loop {
            if self.at >= 1 << (56 - self.stored.geometry.cluster_bits()) {
                return Err(Error::new(ErrorKind::Limit, "the image file can't grow past 2^56 bytes"));
            }
            if self.at >= self.limit {
                let message = "the image doesn't fit into its container, which can't grow";
                return Err(Error::os(Errno::ENOSPC, message).value(format_args!("{} bytes", self.stored.file.len())));
            }
            let is_free = self.is_free(self.at).await?;
            self.at += 1;
            found = if is_free { found + 1 } else { 0 };
            if found == count {
                return Ok(self.at - count);
            }
        }
    }

    async fn is_free(&mut self, cluster: u64) -> Result<bool> {
        let is_free = self.stored.get(cluster).await? == 0;
        if is_free && self.metadata.contains(&cluster) {
            let message = "a cluster of metadata has no refcount: check and repair the image first";
            let at = cluster << self.stored.geometry.cluster_bits();
            return Err(Error::invalid_image("refcount", 0, message).offset(at));
        }
        Ok(is_free && !self.kept.contains(&cluster))
    }
}

/// Gives the space of free clusters back: the tail of the file and, with `discard`, the clusters in `freed`. `table` is
/// the refcount table that counts now.
pub(crate) async fn give_back(
    file: &File,
    geometry: Geometry,
    table: &[u64],
    freed: &[Range<u64>],
    discard: bool,
) -> Result<()> {
    let bits = geometry.cluster_bits();
    let mut end = geometry.clusters(file.len());
    let per_block = geometry.refcount_block_entries();
    // A container that can't grow doesn't shrink either.
    'blocks: while end > 1 && !file.is_device() {
        let index = geometry.refcount_table_index(end - 1);
        let block = read_block(file, geometry, table, index).await?;
        while end > (index * per_block).max(1) {
            let entry = geometry.refcount_block_index(end - 1) as usize;
            if block.as_ref().is_some_and(|block| refcount::get(block, geometry.refcount_order(), entry) != 0) {
                break 'blocks;
            }
            end -= 1;
        }
    }
    let found = geometry.clusters(file.len());
    if end < found && !covers(freed, end..found) {
        // In an image that wants repair it may be in use without a count.
        end = end.max(geometry.clusters(end_of_use(file).await)).min(found);
    }
    if end << bits < file.len() {
        file.set_len(end << bits).await?;
    }
    if !discard {
        return Ok(());
    }
    for range in freed.iter().filter(|range| range.start < end) {
        let len = (range.end.min(end) - range.start) << bits;
        // Only space is lost where a hole can't be punched.
        if let Err(error) = file.punch_hole(range.start << bits, len).await
            && error.kind() != ErrorKind::Unsupported
        {
            tracing::warn!("{error}");
        }
    }
    Ok(())
}

/// True where each cluster of a range is in one of these.
fn covers(ranges: &[Range<u64>], all: Range<u64>) -> bool {
    let mut behind: Vec<&Range<u64>> = ranges.iter().filter(|range| range.end > all.start).collect();
    behind.sort_unstable_by_key(|range| Reverse(range.end));
    let mut rest = all.end;
    for range in behind {
        if range.end < rest {
            break;
        }
        rest = rest.min(range.start);
    }
    rest <= all.start
}

/// A refcount block; `None` when the table has none there.
pub(crate) async fn read_block(file: &File, geometry: Geometry, table: &[u64], index: u64) -> Result<Option<IoBuf>> {
    let raw = usize::try_from(index).ok().and_then(|index| table.get(index)).copied().unwrap_or(0);
    let Some(host) = RefcountTableEntry(raw).block(geometry)? else { return Ok(None) };
    if host.0 >= file.len() {
        let message = format!("refcount block {index} lies past the end of the file");
        return Err(Error::invalid_image("refcount_table_entry", host, message));
    }
    let (result, bytes) = file.read_at(IoBuf::zeroed(geometry.cluster_size() as usize), host.0).await;
    result.map_err(|error| error.offset(host.0))?;
    Ok(Some(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_cover_what_they_touch_together() {
        let ranges = [7..9, 2..3, 5..7, 6..8];
        assert!(covers(&ranges, 5..9) && covers(&ranges, 6..7) && covers(&ranges, 2..3) && covers(&[], 4..4));
        assert!(!covers(&ranges, 4..9) && !covers(&ranges, 5..10) && !covers(&ranges, 2..9) && !covers(&[], 0..1));
    }
}
