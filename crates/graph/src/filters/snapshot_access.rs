// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Snapshot access: a node that reads the disk as it was when the copy-before-write filter below it came.

use crate::node::{Driver, Link, LocalFuture, Node, StatusExtent, Transfer, Work};
use crate::options::schemas;
use cowshed_storage::IoBuf;
use cowshed_types::{Error, Result};
use std::sync::Arc;

/// The driver. Nothing is written through it; a discard means that a part is no longer needed.
pub(crate) struct SnapshotAccess {
    file: Arc<Link>,
}

impl SnapshotAccess {
    /// `file` leads to a copy-before-write filter. Above any other node nothing can be read.
    pub(crate) fn new(file: Arc<Link>) -> SnapshotAccess {
        SnapshotAccess { file }
    }

    fn filter(&self) -> Result<Arc<Node>> {
        self.file.get().ok_or_else(|| Error::internal("snapshot-access without a file"))
    }
}

impl Driver for SnapshotAccess {
    fn name(&self) -> &'static str {
        schemas::SNAPSHOT_ACCESS.name
    }

    fn holds_changes(&self) -> bool {
        false
    }

    fn size(&self) -> u64 {
        self.file.load().as_ref().map_or(0, |filter| filter.size())
    }

    fn refusal(&self) -> Error {
        Error::unsupported("the disk as it was can't be written")
    }

    fn read(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Box::pin(async move {
            match self.filter() {
                Ok(filter) => match filter.copy_before_write() {
                    Some(copy) => copy.read_kept(offset, buf).await,
                    None => (Err(no_filter()), buf),
                },
                Err(error) => (Err(error), buf),
            }
        })
    }

    fn discard(&self, offset: u64, len: u64) -> Work<'_> {
        Box::pin(async move {
            let filter = self.filter()?;
            filter.copy_before_write().ok_or_else(no_filter)?.give_up(offset, len).await
        })
    }

    fn block_status(&self, offset: u64, len: u64, max_runs: usize) -> LocalFuture<'_, Result<Vec<StatusExtent>>> {
        Box::pin(async move {
            let filter = self.filter()?;
            filter.copy_before_write().ok_or_else(no_filter)?.kept_status(offset, len, max_runs).await
        })
    }

    fn shows_past(&self) -> bool {
        true
    }
}

fn no_filter() -> Error {
    Error::unsupported("the node below keeps no past of its disk")
}
