// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Holes of the file under allocated clusters: they read as zeroes, though the image calls them data. Preallocated
//! images consist of them, and no read of the file is needed.

use super::Qcow2Driver;
use cowshed_graph::node::StatusExtent;
use cowshed_storage::{DataRange, File};
use cowshed_types::Result;

impl Qcow2Driver {
    /// Splits the data runs at the holes of their file and marks those as zero. Returns at least one run, at most
    /// `max_runs`, which may end earlier than the given ones.
    pub(super) async fn with_holes(&self, runs: Vec<StatusExtent>, max_runs: usize) -> Result<Vec<StatusExtent>> {
        let file = self.stored_in(self.data_place());
        let mut found = Vec::with_capacity(runs.len());
        // The last answer: runs that follow each other often lie in one range of the file.
        let mut known = KnownRun { hole_from: 0, data: DataRange { start: 0, end: 0 } };
        for run in runs {
            let Some(mut host) = run.offset.filter(|_| run.data && !run.zero) else {
                found.push(run);
                continue;
            };
            let end = run.start + run.len;
            let mut start = run.start;
            while start < end {
                if found.len() >= max_runs.max(1) {
                    return Ok(found);
                }
                let (until, zero) = known.at(file, host, self.cluster_size()).await?;
                let len = (until - host).min(end - start);
                found.push(StatusExtent { start, len, zero, offset: Some(host), ..run.clone() });
                start += len;
                host += len;
            }
        }
        found.truncate(max_runs.max(1));
        Ok(found)
    }
}

/// A run of data in a file, and the hole in front of it.
struct KnownRun {
    hole_from: u64,
    data: DataRange,
}

impl KnownRun {
    /// Where the hole or data at `host` ends, and whether it is a hole.
    async fn at(&mut self, file: &File, host: u64, cluster_size: u64) -> Result<(u64, bool)> {
        if host < self.hole_from || host >= self.data.end {
            self.hole_from = host;
            self.data = match file.next_data(host).await? {
                Some(data) if data.end > host => data,
                // The last hole goes on to the end of the file, or of the cluster in which it ends. Clusters past that
                // aren't zeroes: they are lost, and a read of them fails.
                _ => DataRange { start: file.len().next_multiple_of(cluster_size), end: u64::MAX },
            };
        }
        if host < self.data.start { Ok((self.data.start, true)) } else { Ok((self.data.end, false)) }
    }
}
