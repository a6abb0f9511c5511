// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Compress: writes reach the image below as compressed clusters.

use super::Filter;
use crate::node::Ranges;
use crate::node::{Below, Node, Preallocation, Transfer, Work, ZeroFlags};
use crate::options::schemas;
use cowshed_storage::IoBuf;
use cowshed_types::{Error, Result};
use std::sync::Arc;

/// Clusters that one request of the image takes.
const CLUSTERS_AT_ONCE: usize = 16;

/// The filter. A write of a part of a cluster reads the rest of it, so each cluster belongs to one write at a time.
pub struct Compress {
    below: Below,
    ranges: Arc<Ranges>,
}

/// The cluster size of an image that takes compressed clusters, behind all filters above it.
fn compressed_cluster_bytes(node: &Arc<Node>) -> Option<u64> {
    let image = crate::node::below_filters(node);
    match image.cluster_bytes().filter(|_| image.compresses()) {
        Some(cluster) => Some(cluster),
        // Formats that are only read: no write gets as far as their clusters.
        None => image.description().filter(|known| known.has_packed_clusters)?.cluster_bytes,
    }
}

impl Compress {
    pub(crate) fn new(below: Below) -> Compress {
        Compress { below, ranges: Arc::default() }
    }

    /// The unit that the image below compresses, in bytes. A snapshot may put an image of another cluster size there.
    /// `Unsupported` where that one compresses nothing.
    pub fn cluster_bytes(&self) -> Result<u64> {
        let node = self.below.node()?;
        compressed_cluster_bytes(&node).ok_or_else(|| {
            let name = node.driver_name();
            Error::unsupported(format!("Compression is not supported for underlying format: {name}"))
        })
    }

    /// The range in whole clusters of `unit` bytes, up to the end of the disk.
    fn clusters_around(&self, unit: u64, offset: u64, len: u64) -> Result<(u64, u64)> {
        let end = offset.checked_add(len).and_then(|end| end.checked_next_multiple_of(unit));
        let end = end.ok_or_else(|| Error::invalid_argument("a request past all disks").value(offset))?;
        Ok((offset / unit * unit, end.min(self.below.size())))
    }

    async fn write_bytes(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let unit = self.cluster_bytes()?;
        let (start, end) = self.clusters_around(unit, offset, bytes.len() as u64)?;
        let _claim = self.ranges.claim(start, end - start).await;
        let piece = unit.saturating_mul(CLUSTERS_AT_ONCE as u64);
        let mut at = start;
        while at < end {
            let until = end.min(at.saturating_add(piece));
            let mut clusters = Vec::with_capacity(CLUSTERS_AT_ONCE);
            while at < until {
                let next = until.min(at + unit);
                clusters.push((at, self.cluster(at, next, offset, bytes).await?));
                at = next;
            }
            self.below.write_compressed(clusters).await?;
        }
        Ok(())
    }

    /// The new content of one cluster: `bytes` from `offset` on, and the image's bytes around them.
    async fn cluster(&self, start: u64, end: u64, offset: u64, bytes: &[u8]) -> Result<IoBuf> {
        let len = usize::try_from(end - start).map_err(|_| Error::internal("a cluster larger than memory"))?;
        let (from, to) = (offset.max(start), (offset + bytes.len() as u64).min(end));
        let mut buf = IoBuf::try_zeroed(len)?;
        if from > start || to < end {
            let (result, read) = self.below.read(start, buf).await;
            result?;
            buf = read;
        }
        buf[(from - start) as usize..(to - start) as usize]
            .copy_from_slice(&bytes[(from - offset) as usize..(to - offset) as usize]);
        Ok(buf)
    }
}

impl Filter for Compress {
    fn name(&self) -> &'static str {
        schemas::COMPRESS.name
    }

    fn below(&self) -> &Below {
        &self.below
    }

    fn write(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Box::pin(async move {
            if buf.is_empty() {
                return (Ok(()), buf);
            }
            (self.write_bytes(offset, &buf).await, buf)
        })
    }

    fn write_compressed(&self, clusters: Vec<(u64, IoBuf)>) -> Work<'_> {
        Box::pin(async move {
            let mut clusters = clusters;
            // In one order, so that two of these can't wait for each other.
            clusters.sort_by_key(|(offset, _)| *offset);
            let mut claims = Vec::with_capacity(clusters.len());
            for (offset, buf) in &clusters {
                claims.push(self.ranges.claim(*offset, buf.len() as u64).await);
            }
            self.below.write_compressed(clusters).await
        })
    }

    /// Whole clusters become zero clusters; a part of one is written with the rest of its cluster.
    fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Work<'_> {
        Box::pin(async move {
            let unit = self.cluster_bytes()?;
            let end = offset.saturating_add(len);
            let first = offset.next_multiple_of(unit).min(end);
            // The last cluster of a disk may be a short one.
            let last = if end == self.below.size() { end } else { (end / unit * unit).max(first) };
            for (from, to) in [(offset, first), (last, end)] {
                if from < to {
                    let zeroes = IoBuf::try_zeroed(usize::try_from(to - from).unwrap_or(usize::MAX))?;
                    self.write_bytes(from, &zeroes).await?;
                }
            }
            if first >= last {
                return Ok(());
            }
            let _claim = self.ranges.claim(first, last - first).await;
            self.below.write_zeroes(first, last - first, flags).await
        })
    }

    fn discard(&self, offset: u64, len: u64) -> Work<'_> {
        Box::pin(async move {
            let _claim = self.ranges.claim(offset, len).await;
            self.below.discard(offset, len).await
        })
    }

    fn resize(&self, size: u64, preallocation: Preallocation) -> Work<'_> {
        Box::pin(async move {
            let _claim = self.ranges.claim(0, u64::MAX).await;
            self.below.resize(size, preallocation).await
        })
    }

    fn request_bytes(&self) -> Option<u64> {
        self.cluster_bytes().ok()
    }
}
