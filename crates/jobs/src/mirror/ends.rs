// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Both ends of a copy, and the range that it copies.

use super::{STATUS_RUNS, ZEROES};
use crate::faults::Failure;
use crate::zeroes::is_zero;
use cowshed_image::dirty::DirtyMap;
use cowshed_image::graph::Queue;
use cowshed_image::{Node, StatusExtent};
use cowshed_storage::IoBuf;
use cowshed_types::Result;
use std::ops::Range;

/// A range that is clean in the map while it is copied. It becomes dirty again where the copy fails or its future is dropped.
pub(super) struct Missing<'a> {
    pub(super) map: &'a DirtyMap,
    pub(super) range: &'a Range<u64>,
}

impl Missing<'_> {
    /// The target has it.
    pub(super) fn came(self) {
        std::mem::forget(self);
    }
}

impl Drop for Missing<'_> {
    fn drop(&mut self) {
        self.map.mark(self.range.start, self.range.end - self.range.start);
    }
}

/// A base that read as zeroes when its commit began. As in QEMU 11, zeroes are passed over where nothing was written since.
pub(super) struct Blank(DirtyMap);

impl Blank {
    /// In the parts of `map`.
    pub(super) fn new(map: &DirtyMap) -> Option<Blank> {
        DirtyMap::new(map.granularity_bytes()).ok().map(Blank)
    }

    /// The copy writes to this range from now on.
    pub(super) fn note(&self, at: u64, len: u64) {
        self.0.mark(at, len);
    }

    pub(super) fn is_written(&self, at: u64, len: u64) -> bool {
        self.0.is_dirty(at, len)
    }
}

/// Both ends of a copy: through the gates of the graph, or under a drain past them.
pub(super) enum Ends<'a> {
    Queues(&'a Queue, &'a Queue),
    Nodes(&'a Node, &'a Node),
}

impl Ends<'_> {
    pub(super) async fn status(&self, at: u64, len: u64) -> Result<Vec<StatusExtent>> {
        match self {
            Ends::Queues(source, _) => source.block_status_chain(at, len, STATUS_RUNS).await,
            Ends::Nodes(source, _) => source.block_status_chain(at, len, STATUS_RUNS).await,
        }
    }

    pub(super) async fn copy(&self, at: u64, len: u64) -> Result<(), Failure> {
        let buf = IoBuf::scratch(usize::try_from(len).unwrap_or(usize::MAX));
        let (result, buf) = match self {
            Ends::Queues(source, _) => source.read(at, buf).await,
            Ends::Nodes(source, _) => source.read(at, buf).await,
        };
        result.map_err(Failure::read)?;
        if is_zero(&buf) {
            return self.zero(at, len).await;
        }
        let written = match self {
            Ends::Queues(_, target) => target.write(at, buf).await.0,
            Ends::Nodes(_, target) => target.write(at, buf).await.0,
        };
        written.map_err(Failure::write)
    }

    pub(super) async fn zero(&self, at: u64, len: u64) -> Result<(), Failure> {
        let written = match self {
            Ends::Queues(_, target) => target.write_zeroes(at, len, ZEROES).await,
            Ends::Nodes(_, target) => target.write_zeroes(at, len, ZEROES).await,
        };
        written.map_err(Failure::write)
    }
}
