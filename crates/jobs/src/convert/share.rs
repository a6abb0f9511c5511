// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Data that the target takes over from the sources' files without writing them: the file system keeps the blocks once
//! for both.

use super::source::{SourcePlace, Sources};
use cowshed_image::Node;
use cowshed_storage::File;
use cowshed_types::Result;
use std::cell::Cell;

/// Less than this is written: sharing many small pieces makes a file of many pieces.
const MIN_BYTES: u64 = 64 << 10;
/// Blocks of a file system: shared ranges begin and end with one.
const BLOCK_BYTES: u64 = 4096;
/// After this many failures in a row it isn't tried any more.
const FAILURES_MAX: u32 = 4;

/// The files whose blocks can be shared, and the count of failures.
pub struct Sharing<'a> {
    sources: &'a Sources,
    target: &'a Node,
    /// Files of the sources whose file system shares blocks with the target.
    files: Vec<File>,
    /// Shared ranges begin at a multiple of it on the disk: the target's clusters, or blocks.
    unit: u64,
    failures: Cell<u32>,
}

impl<'a> Sharing<'a> {
    /// Looks at the file system's abilities, where sharing is `wanted`.
    pub async fn new(sources: &'a Sources, target: &'a Node, wanted: bool) -> Self {
        let mut files: Vec<File> = Vec::new();
        if wanted {
            for file in sources.content_files() {
                if target.can_share_from(&file).await {
                    files.push(file);
                }
            }
        }
        let unit = crate::layer::geometry(target).map_or(BLOCK_BYTES, |geometry| geometry.cluster_bytes);
        Sharing { sources, target, files, unit, failures: Cell::new(0) }
    }

    /// Something may be shared.
    pub fn is_on(&self) -> bool {
        !self.files.is_empty() && self.failures.get() < FAILURES_MAX
    }

    /// The places of a range's bytes in files that can be shared; empty where none can.
    pub async fn places(&self, start: u64, end: u64) -> Result<Vec<SourcePlace>> {
        if self.is_on() { self.sources.places(start, end).await } else { Ok(Vec::new()) }
    }

    /// Takes over as much as possible of the front of a range, and returns the number of bytes. The rest is to be
    /// written.
    pub async fn take_over(&self, start: u64, end: u64, places: &[SourcePlace]) -> Result<u64> {
        let mut at = start;
        while at < end && self.is_on() {
            let Some(place) = places.iter().find(|place| at >= place.start && at < place.end) else { break };
            let Some(file) = self.files.iter().find(|file| *file.name() == *place.file) else { break };
            let from = place.offset + (at - place.start);
            let unit = self.unit.max(BLOCK_BYTES);
            let len = (place.end.min(end) - at) / unit * unit;
            if len < MIN_BYTES || !at.is_multiple_of(unit) || !from.is_multiple_of(BLOCK_BYTES) {
                break;
            }
            match self.target.share_from(at, len, file, from).await? {
                0 => {
                    self.failures.set(self.failures.get() + 1);
                    break;
                }
                shared => {
                    self.failures.set(0);
                    at += shared;
                }
            }
        }
        Ok(at - start)
    }
}
