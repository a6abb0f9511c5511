// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where data is: one layer, or the whole chain.

use super::ChildRole;
use super::{LocalFuture, Node, StatusExtent, boxed};
use cowshed_types::Result;
use std::sync::Arc;

impl Node {
    /// The status of a range in this layer alone: runs in order without gaps, `present == false` where the backing file
    /// decides. At least one run, at most `max_runs`; they may end before `offset + len`.
    pub async fn block_status(&self, offset: u64, len: u64, max_runs: usize) -> Result<Vec<StatusExtent>> {
        self.check_range(offset, len)?;
        if len == 0 {
            return Ok(Vec::new());
        }
        let max_runs = max_runs.max(1);
        match self.format_below() {
            Some(image) => image.block_status_boxed(offset, len, max_runs).await,
            None => self.driver.block_status(offset, len, max_runs).await,
        }
    }

    /// True where [`Node::block_status`] tells of a metadata context of a server, which the user named for a map. Its zeroes are no
    /// zeroes of the contents.
    pub fn shows_foreign_context(&self) -> bool {
        let below = || self.children().into_iter().filter(|child| child.role != ChildRole::Backing);
        self.driver.shows_foreign_context() || below().any(|child| child.node.shows_foreign_context())
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
    pub fn block_status_chain_boxed(
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

    /// The node that decides where this one doesn't, and how many layers down it counts.
    fn chain_child(&self) -> Option<(Arc<Node>, u32)> {
        if let Some(below) = self.driver.filtered() {
            return below.node().ok().map(|node| (node, 0));
        }
        let image = self.format_below().map(|node| (node, 0));
        image.or_else(|| self.backing().map(|node| (node, 1)))
    }

    /// The node below a `blkdebug` node, where that is no plain file: it knows the allocated ranges.
    fn format_below(&self) -> Option<Arc<Node>> {
        self.driver.protocol_file()?;
        self.child(ChildRole::Image).filter(|image| image.file().is_none())
    }
}
