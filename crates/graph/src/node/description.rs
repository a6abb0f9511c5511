// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The description of an image by a driver without reference counts, and its check.

use super::{LocalFuture, Node};
use cowshed_types::{CheckCounters, Repair, Result};
use serde_json::Value;

/// The properties that a format reports of an image, for `info` and for the nodes above it.
#[derive(Clone, Debug, Default)]
pub struct Description {
    /// Allocation unit in bytes, where there is one.
    pub cluster_bytes: Option<u64>,
    /// QEMU reports sizes of such an image, and nothing of its state.
    pub only_sizes: bool,
    /// The backing file as the image names it.
    pub backing_name: Option<String>,
    /// The backing file's format as the image names it.
    pub backing_format: Option<&'static str>,
    /// The id of the image's content, which differences to it store: lower case hexadecimal.
    pub identity: Option<String>,
    /// The image takes whole clusters, compressed, and each once.
    pub takes_stream: bool,
    /// Clusters may be compressed, also where no write packs one.
    pub has_packed_clusters: bool,
    /// Requests are for whole sectors.
    pub in_sectors: bool,
    /// Only zeroes in whole clusters cost no data.
    pub zeroes_in_clusters: bool,
    /// One request writes no more zeroes than a number of 31 bits counts.
    pub bounds_zeroes: bool,
    /// The properties that only this format has, with QEMU's keys; null for nothing.
    pub specific: Value,
}

/// The result of a check of a format without reference counts.
#[derive(Clone, Debug, Default)]
pub struct MappedCheck {
    /// qemu-img's counters; totals of 0 where it has none for the format.
    pub counters: CheckCounters,
    /// The findings, a line each.
    pub findings: Vec<String>,
}

/// An image of a format without reference counts: its description of itself, and its check.
pub trait Described: Send + Sync {
    /// The image's description of itself.
    fn describe(&self) -> Description;

    /// See [`Node::check_mapped`].
    fn check(&self, max: usize) -> LocalFuture<'_, Result<Option<MappedCheck>>>;

    /// See [`Node::repair_mapped`].
    fn repair(&self, what: Repair, max: usize) -> LocalFuture<'_, Result<Option<MappedCheck>>>;
}

impl Node {
    /// The description of an image of a format without reference counts.
    pub fn description(&self) -> Option<Description> {
        self.driver().described().map(|image| image.describe())
    }

    /// Looks for damage in an image of a format without reference counts, and returns `max` findings at most. `None`
    /// for other drivers; the inner one for formats that have no check.
    pub async fn check_mapped(&self, max: usize) -> Option<Result<Option<MappedCheck>>> {
        Some(self.driver().described()?.check(max).await)
    }

    /// As [`Node::check_mapped`], with a repair as far as possible.
    pub async fn repair_mapped(&self, what: Repair, max: usize) -> Option<Result<Option<MappedCheck>>> {
        Some(self.driver().described()?.repair(what, max).await)
    }
}
