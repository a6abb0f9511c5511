// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Snapshot access: a node that reads the disk as it was when the copy-before-write filter below it came.

use crate::node::{Link, Node, StatusExtent};
use cowshed_block::{Error, Result};
use cowshed_storage::IoBuf;
use std::sync::Arc;

/// The driver. Nothing is written through it; a discard says that a part is no longer needed.
pub(crate) struct SnapshotAccess {
    file: Arc<Link>,
}

impl SnapshotAccess {
    /// `file` leads to a copy-before-write filter.
    pub(crate) fn new(file: Arc<Link>) -> SnapshotAccess {
        SnapshotAccess { file }
    }

    pub(crate) fn size(&self) -> u64 {
        self.file.load().as_ref().map_or(0, |filter| filter.size())
    }

    fn filter(&self) -> Result<Arc<Node>> {
        self.file.get().ok_or_else(|| Error::internal("snapshot-access without a file"))
    }

    pub(crate) async fn read(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        match self.filter() {
            Ok(filter) => match filter.copy_before_write() {
                Some(copy) => copy.read_kept(offset, buf).await,
                None => (Err(no_filter()), buf),
            },
            Err(error) => (Err(error), buf),
        }
    }

    pub(crate) async fn block_status(&self, offset: u64, len: u64, max_runs: usize) -> Result<Vec<StatusExtent>> {
        let filter = self.filter()?;
        filter.copy_before_write().ok_or_else(no_filter)?.kept_status(offset, len, max_runs).await
    }

    pub(crate) async fn discard(&self, offset: u64, len: u64) -> Result<()> {
        let filter = self.filter()?;
        filter.copy_before_write().ok_or_else(no_filter)?.give_up(offset, len).await
    }

    pub(crate) fn write_error() -> Error {
        Error::unsupported("the disk as it was can't be written")
    }
}

fn no_filter() -> Error {
    Error::internal("snapshot-access on something else than copy-before-write")
}
