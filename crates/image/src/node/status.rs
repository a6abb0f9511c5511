// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where data is: one layer, or the whole chain.

use super::ChildRole;
use super::driver::{Driver, FileDriver, ForeignContext};
use super::{LocalFuture, Node, StatusExtent, boxed};
use crate::formats::raw;
use cowshed_block::{Errno, Error, Result};
use cowshed_nbd_proto::flags::{STATE_HOLE, STATE_ZERO};
use cowshed_storage::File;
use std::sync::Arc;

impl Node {
    /// What this layer alone says of a range: runs in order without gaps, `present == false` where the backing file
    /// decides. At least one run, at most `max_runs`; they may end before `offset + len`.
    pub async fn block_status(&self, offset: u64, len: u64, max_runs: usize) -> Result<Vec<StatusExtent>> {
        self.check_range(offset, len)?;
        if len == 0 {
            return Ok(Vec::new());
        }
        let max_runs = max_runs.max(1);
        match &self.driver {
            Driver::Qcow2(qcow2) => qcow2.block_status(offset, len, max_runs).await,
            Driver::Luks(luks) => Ok(luks.block_status(offset, len)),
            Driver::Mapped(mapped) => mapped.block_status(offset, len, max_runs).await,
            Driver::Raw(raw) => raw.block_status(offset, len, max_runs).await,
            Driver::File(file) => match self.format_below() {
                Some(image) => image.block_status_boxed(offset, len, max_runs).await,
                None => file.block_status(offset, len, max_runs).await,
            },
            Driver::Filter(filter) => filter.below().node()?.block_status_boxed(offset, len, max_runs).await,
            Driver::Snapshot(snapshot) => snapshot.block_status(offset, len, max_runs).await,
            Driver::Replicas(replicas) => replicas.block_status(offset, len, max_runs).await,
        }
    }

    /// As [`Node::block_status`], in a box: for drivers that ask another node.
    pub fn block_status_boxed(
        &self,
        offset: u64,
        len: u64,
        max_runs: usize,
    ) -> LocalFuture<'_, Result<Vec<StatusExtent>>> {
        boxed!(self, |node| node.block_status(offset, len, max_runs))
    }

    /// As [`Node::block_status`], through the whole backing chain. Runs past the end of a backing file read as zeroes
    /// and count as not present in the layer above it.
    pub async fn block_status_chain(&self, offset: u64, len: u64, max_runs: usize) -> Result<Vec<StatusExtent>> {
        self.check_range(offset, len)?;
        let max_runs = max_runs.max(1);
        let _reading = self.reading(offset, len);
        let mut runs: Vec<StatusExtent> = Vec::new();
        for run in self.block_status(offset, len, max_runs).await? {
            if runs.len() >= max_runs {
                break;
            }
            let below = if run.present { None } else { self.chain_child() };
            match below {
                None => runs.push(run),
                Some((child, depth)) => {
                    if !self.resolve_below(&child, depth, &run, max_runs, &mut runs).await? {
                        break;
                    }
                }
            }
        }
        Ok(runs)
    }

    /// As [`Node::block_status_chain`], in a box.
    pub(crate) fn block_status_chain_boxed(
        &self,
        offset: u64,
        len: u64,
        max_runs: usize,
    ) -> LocalFuture<'_, Result<Vec<StatusExtent>>> {
        boxed!(self, |node| node.block_status_chain(offset, len, max_runs))
    }

    /// Answers `run`, which this layer doesn't have, from `child`. False when the answer stops before the run's end.
    async fn resolve_below(
        &self,
        child: &Node,
        depth: u32,
        run: &StatusExtent,
        max_runs: usize,
        runs: &mut Vec<StatusExtent>,
    ) -> Result<bool> {
        let end = run.start + run.len;
        let mut at = run.start;
        while at < end {
            if runs.len() >= max_runs {
                return Ok(false);
            }
            let inside = child.size().saturating_sub(at).min(end - at);
            if inside == 0 {
                runs.push(StatusExtent { start: at, len: end - at, zero: true, data: false, ..run.clone() });
                return Ok(true);
            }
            let found = child.block_status_chain_boxed(at, inside, max_runs - runs.len()).await?;
            for mut below in found {
                at = below.start + below.len;
                below.depth += depth;
                runs.push(below);
            }
        }
        Ok(true)
    }

    /// The node that decides what this one doesn't, and how many layers down it counts.
    fn chain_child(&self) -> Option<(Arc<Node>, u32)> {
        match &self.driver {
            Driver::Filter(filter) => filter.below().node().ok().map(|node| (node, 0)),
            Driver::File(_) => self.format_below().map(|node| (node, 0)),
            _ => self.backing().map(|node| (node, 1)),
        }
    }

    /// What a `blkdebug` node stands on where that is no plain file: it knows what is allocated.
    fn format_below(&self) -> Option<Arc<Node>> {
        self.child(ChildRole::Image).filter(|image| image.file().is_none())
    }
}

/// What is read sector by sector has data up to the end of the sector in which a file ends.
fn in_whole_sectors(mut runs: Vec<StatusExtent>) -> Vec<StatusExtent> {
    const SECTOR_BYTES: u64 = 512;
    if let [.., data, tail] = &mut runs[..]
        && data.data
        && !tail.data
        && !tail.start.is_multiple_of(SECTOR_BYTES)
        && tail.len < SECTOR_BYTES
    {
        data.len += tail.len;
        runs.pop();
    }
    runs
}

impl FileDriver {
    async fn block_status(&self, offset: u64, len: u64, max_runs: usize) -> Result<Vec<StatusExtent>> {
        if let Some(context) = &self.context {
            return context.block_status(&self.file, offset, len, max_runs).await;
        }
        match self.null_reads_zeroes {
            None if self.file.alignment().offset > 1 => {
                raw::file_status(&self.file, offset, len, max_runs).await.map(in_whole_sectors)
            }
            None => raw::file_status(&self.file, offset, len, max_runs).await,
            Some(zero) => Ok(vec![StatusExtent {
                start: offset,
                len,
                data: false,
                zero,
                present: zero,
                compressed: false,
                offset: zero.then_some(offset),
                file: zero.then(|| self.file.name().into()),
                depth: 0,
            }]),
        }
    }
}

impl ForeignContext {
    /// What QEMU makes of any context: bit 0 says that there is no data, bit 1 that there are zeroes. Of depths, 2 stands for
    /// all below the image.
    async fn block_status(&self, file: &File, offset: u64, len: u64, max_runs: usize) -> Result<Vec<StatusExtent>> {
        let failed =
            |errno| Error::os(errno, "could not ask for the metadata context").file(file.name()).offset(offset);
        let name: Arc<str> = file.name().into();
        let end = offset + len;
        let (mut at, mut found) = (offset, Vec::new());
        while at < end && found.len() < max_runs {
            let runs = self.client.context_status(at, end - at).await.map_err(failed)?;
            if runs.is_empty() || runs.iter().any(|run| run.len == 0) {
                return Err(failed(Errno::EIO));
            }
            for run in runs {
                if at == end || found.len() == max_runs {
                    break;
                }
                let len = run.len.min(end - at);
                let flags = if self.has_depths { run.flags.min(STATE_ZERO) } else { run.flags };
                let (data, zero) = (flags & STATE_HOLE == 0, flags & STATE_ZERO != 0);
                let present = data || zero;
                found.push(StatusExtent {
                    start: at,
                    len,
                    data,
                    zero,
                    present,
                    compressed: false,
                    offset: present.then_some(at),
                    file: present.then(|| Arc::clone(&name)),
                    depth: 0,
                });
                at += len;
            }
        }
        Ok(found)
    }
}
