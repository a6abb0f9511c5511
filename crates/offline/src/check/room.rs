// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Room for the new structures of a repair. It is behind the end of the file, or in clusters without references where
//! the container or the file system can't hold more.

use super::session::CheckSession;
use cowshed_layout::qcow2::refcount;
use cowshed_qcow2::check::{Counts, Ledger};
use cowshed_types::{Errno, Error, ErrorKind, Result};

impl CheckSession<'_> {
    /// Returns `count` clusters without a use; neighbours with `neighbours`.
    pub(super) async fn take_room(&mut self, count: u64, neighbours: bool) -> Result<Vec<u64>> {
        if !self.stays_inside {
            // Behind the cluster that compressed data may reach into.
            let first = self.file_clusters + 1;
            return Ok((first..first + count).collect());
        }
        let mut found = Vec::new();
        for window in self.windows() {
            let mut silent = Ledger::new(0);
            let (counts, _) = self.count_window(window, super::metadata::CheckScope::Whole, &mut silent).await?;
            if self.find_free(&counts, count, neighbours, &mut found).await? {
                self.taken.extend(found.iter().copied());
                return Ok(found);
            }
        }
        let message = match self.file.is_device() {
            true => "the repair needs room, and the image's container has none left and can't grow",
            false => "the repair needs room, and neither the file system nor the file has any left",
        };
        Err(Error::os(Errno::ENOSPC, message).value(format_args!("{count} clusters")))
    }

    /// Reserves the space of a cluster within the file. False where the file system is full.
    async fn has_space(&self, cluster: u64) -> Result<bool> {
        let cluster_size = self.geometry.cluster_size();
        if (cluster + 1) * cluster_size > self.file.len() {
            return Ok(false);
        }
        match self.file.allocate(cluster * cluster_size, cluster_size).await {
            Ok(()) => Ok(true),
            // The write will show it.
            Err(error) if error.kind() == ErrorKind::Unsupported => Ok(true),
            Err(error) if error.kind() == ErrorKind::NoSpace => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Looks for free clusters in a window; true when there are enough.
    async fn find_free(&self, counts: &Counts, count: u64, neighbours: bool, found: &mut Vec<u64>) -> Result<bool> {
        let (entries, order) = (self.geometry.refcount_block_entries(), self.geometry.refcount_order());
        // The last cluster of a device may be incomplete.
        let end = counts.end().min(self.context.file_len >> self.geometry.cluster_bits());
        for index in self.blocks_of(counts) {
            let stored = match self.refcount_block(index) {
                Some(place) => Some(self.read(place, self.geometry.cluster_size() as usize).await?),
                None => None,
            };
            // Where the count is lost, a structure that can't be read may have the cluster.
            let hides = self.hides_references || !self.unread_snapshots.is_empty();
            for cluster in (index * entries).max(counts.first()).max(1)..((index + 1) * entries).min(end) {
                let is_counted = match &stored {
                    Some(block) => refcount::get(block, order, (cluster - index * entries) as usize) != 0,
                    None => hides,
                };
                // A free cluster of a file may be a hole, for which a full file system has no space.
                let is_free = !is_counted && counts.references(cluster) == 0 && !self.taken.contains(&cluster);
                if !is_free || (!self.file.is_device() && !self.has_space(cluster).await?) {
                    if neighbours {
                        found.clear();
                    }
                    continue;
                }
                found.push(cluster);
                if found.len() as u64 == count {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }
}
