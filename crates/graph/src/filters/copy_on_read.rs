// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Copy-on-read: data read from below the image is written into it, for the next read.

use super::{CopyFailure, Filter};
use crate::node::Ranges;
use crate::node::{
    Below, Chain, ChildRole, Intent, LocalFuture, Mapped, Node, Preallocation, StatusExtent, Transfer, Work, ZeroFlags,
    below_filters,
};
use crate::options::schemas;
use cowshed_storage::{IoBuf, PermissionSet, Permissions, rt};
use cowshed_types::{Error, ErrorKind, Result};
use std::sync::Arc;

/// Runs that one question about the mapping returns at most.
const STATUS_RUNS: usize = 64;
/// The longest piece of a copy, in bytes.
const MOST_COPIED_BYTES: u64 = 1 << 20;

/// The filter.
///
/// A copy reads and writes back the same bytes; a write that comes between would be undone by it. So a range that is
/// being copied and writes to it exclude each other.
pub struct CopyOnRead {
    below: Below,
    /// The last node that is copied from; data of the nodes below it stays there. `None`: copy from any depth.
    bottom: Option<String>,
    ranges: Arc<Ranges>,
}

impl CopyOnRead {
    pub(crate) fn new(below: Below, bottom: Option<String>) -> CopyOnRead {
        CopyOnRead { below, bottom, ranges: Arc::default() }
    }

    /// Copies the data of a range in lower layers.
    async fn fill(&self, offset: u64, len: u64) -> Result<()> {
        let child = self.below.node()?;
        if child.is_read_only() || below_filters(&child).backing().is_none() {
            return Ok(());
        }
        let end = offset.saturating_add(len);
        let unit = child.subcluster_bytes().unwrap_or(1);
        let mut at = offset;
        while at < end {
            let runs = child.block_status_boxed(at, end - at, STATUS_RUNS).await?;
            let Some(last) = runs.last() else { break };
            let next = last.start + last.len;
            for run in runs.into_iter().filter(|run| !run.present) {
                self.copy_run(&child, &run, unit).await?;
            }
            at = next;
        }
        Ok(())
    }

    /// Copies a run that the top layer lacks, in whole clusters.
    async fn copy_run(&self, child: &Arc<Node>, run: &StatusExtent, unit: u64) -> Result<()> {
        let start = run.start / unit * unit;
        let end = (run.start + run.len).next_multiple_of(unit).min(child.size());
        let mut at = start;
        while at < end {
            let len = MOST_COPIED_BYTES.max(unit).min(end - at);
            let claim = self.ranges.claim(at, len).await;
            let (child, deepest) = (Arc::clone(child), self.deepest(child));
            // A read may be dropped, but not the write of its copy.
            let copying = async move {
                let copied = copy_claimed(&child, deepest, at, len).await;
                drop(claim);
                copied
            };
            rt::to_completion(copying).await?;
            at += len;
        }
        Ok(())
    }

    /// Waits for the copies that dropped reads have left.
    pub(crate) async fn idle(&self) {
        drop(self.ranges.claim(0, u64::MAX).await);
    }

    /// Writes the data of the layers below, in a range in bytes, into the image behind this filter, the top of `chain`.
    /// Afterwards the image reads the same on the base of the chain. Once the range is claimed, the copy runs to its
    /// end even when the future is dropped.
    pub async fn take_over(&self, chain: &Chain, offset: u64, len: u64) -> Result<(), CopyFailure> {
        let claim = self.ranges.claim(offset, len).await;
        let chain = chain.clone();
        let copying = async move {
            let copied = take_over_claimed(&chain, offset, len).await;
            drop(claim);
            copied
        };
        rt::to_completion(copying).await
    }

    /// The number of layers down to the last one with data to copy.
    fn deepest(&self, child: &Arc<Node>) -> u32 {
        let Some(bottom) = &self.bottom else { return u32::MAX };
        let (mut depth, mut layer) = (0, Some(Arc::clone(child)));
        while let Some(node) = layer {
            if node.name() == bottom {
                return depth;
            }
            layer = match node.backing() {
                Some(backing) => {
                    depth += 1;
                    Some(backing)
                }
                None => node.child(ChildRole::File).filter(|_| node.is_filter()),
            };
        }
        u32::MAX
    }
}

impl Filter for CopyOnRead {
    fn name(&self) -> &'static str {
        schemas::COPY_ON_READ.name
    }

    fn below(&self) -> &Below {
        &self.below
    }

    fn map(&self, _offset: u64, _len: u64, _intent: Intent) -> Mapped<'_> {
        Mapped::Special
    }

    fn read(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Box::pin(async move {
            match self.fill(offset, buf.len() as u64).await {
                Ok(()) => self.below.read(offset, buf).await,
                Err(error) => (Err(error), buf),
            }
        })
    }

    fn write(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Box::pin(async move {
            let _claim = self.ranges.claim(offset, buf.len() as u64).await;
            self.below.write(offset, buf).await
        })
    }

    fn write_unchanged(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Box::pin(async move {
            let _claim = self.ranges.claim(offset, buf.len() as u64).await;
            self.below.write_unchanged(offset, buf).await
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

    fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Work<'_> {
        Box::pin(async move {
            let _claim = self.ranges.claim(offset, len).await;
            self.below.write_zeroes(offset, len, flags).await
        })
    }

    fn write_zeroes_unchanged(&self, offset: u64, len: u64, flags: ZeroFlags) -> Work<'_> {
        Box::pin(async move {
            let _claim = self.ranges.claim(offset, len).await;
            self.below.write_zeroes_unchanged(offset, len, flags).await
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

    fn permissions(&self, wanted: Permissions, _read_only: bool) -> Permissions {
        if wanted.used.is_empty() {
            return wanted;
        }
        // A write past the filter would be undone by a copy under way.
        Permissions {
            used: wanted.used | PermissionSet::WRITE_UNCHANGED,
            shared: wanted.shared & !PermissionSet::WRITE,
        }
    }

    fn settle<'a>(&'a self, _drained: &'a [Arc<Node>]) -> LocalFuture<'a, ()> {
        Box::pin(self.idle())
    }

    fn close(&self, _read_only: bool) -> Work<'_> {
        Box::pin(async move {
            self.idle().await;
            Ok(())
        })
    }
}

impl Node {
    /// The copy-on-read filter, when this node is one.
    pub fn copy_on_read(&self) -> Option<&CopyOnRead> {
        self.driver().downcast()
    }
}

/// The range doesn't change meanwhile; writes from before the claim are seen here.
async fn copy_claimed(child: &Arc<Node>, deepest: u32, offset: u64, len: u64) -> Result<()> {
    let end = offset + len;
    let mut at = offset;
    while at < end {
        let runs = child.block_status_chain(at, end - at, STATUS_RUNS).await?;
        let Some(last) = runs.last() else { break };
        let next = last.start + last.len;
        // Ranges that no layer has read as zeroes without a copy.
        for run in runs.iter().filter(|run| run.present && (1..=deepest).contains(&run.depth)) {
            let bytes = usize::try_from(run.len).map_err(|_| Error::internal("a run longer than asked for"))?;
            let (result, buf) = child.read_boxed(run.start, IoBuf::zeroed(bytes)).await;
            result?;
            let written = match crate::node::is_zero(&buf) {
                true => child.write_zeroes_unchanged_boxed(run.start, run.len, ZeroFlags::default()).await,
                false => child.write_unchanged_boxed(run.start, buf).await.0,
            };
            // A full disk doesn't make reading fail.
            match written {
                Err(error) if error.kind() != ErrorKind::NoSpace => return Err(error),
                _ => {}
            }
        }
        at = next;
    }
    Ok(())
}

/// See [`CopyOnRead::take_over`].
async fn take_over_claimed(chain: &Chain, offset: u64, len: u64) -> Result<(), CopyFailure> {
    let Some(top) = chain.layers().first() else { return Ok(()) };
    let end = offset.saturating_add(len);
    let mut at = offset;
    while at < end {
        let holder = chain.holder(at, end - at).await.map_err(CopyFailure::reading)?;
        let written = match holder.layer {
            None | Some(0) => Ok(()),
            Some(_) if holder.zero && !chain.records_zeroes() => Ok(()),
            Some(_) if holder.zero => top.write_zeroes_unchanged_boxed(at, holder.len, ZeroFlags::default()).await,
            Some(_) => {
                let bytes = usize::try_from(holder.len).unwrap_or(usize::MAX);
                let (result, buf) = top.read_boxed(at, IoBuf::zeroed(bytes)).await;
                result.map_err(CopyFailure::reading)?;
                match crate::node::is_zero(&buf) {
                    true => top.write_zeroes_unchanged_boxed(at, holder.len, ZeroFlags::default()).await,
                    false => top.write_unchanged_boxed(at, buf).await.0,
                }
            }
        };
        written.map_err(CopyFailure::writing)?;
        at += holder.len;
    }
    Ok(())
}
