// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The places of an image's bytes: runs as `qemu-img map` lists them.

use crate::{ImageSpec, JobHandle, in_work};
use cowshed_image::node::ChildRole;
use cowshed_image::{Node, StatusExtent};
use cowshed_types::{Error, Result};
use std::collections::HashMap;
use std::sync::Arc;

/// The image and the range to map.
#[derive(Clone, Debug)]
pub struct MapOptions {
    /// The image.
    pub image: ImageSpec,
    /// First guest byte.
    pub start: u64,
    /// Length in bytes; to the end if `None`.
    pub len: Option<u64>,
}

/// One run; `Serialize` writes qemu-img's JSON keys.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct MapEntry {
    /// First guest byte.
    pub start: u64,
    /// Length in bytes.
    pub length: u64,
    /// Number of layers down from the image.
    pub depth: u32,
    /// Allocated in some layer of the chain.
    pub present: bool,
    /// Reads as zeroes.
    pub zero: bool,
    /// Holds data.
    pub data: bool,
    /// Stored compressed.
    pub compressed: bool,
    /// Offset in the file, when its bytes are the data.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offset: Option<u64>,
    /// File of the layer. Not part of the JSON (the human table prints it).
    #[serde(skip)]
    pub file: Option<Arc<str>>,
}

/// Maps: all runs at once, which takes memory in proportion to the fragmentation; see [`each`].
pub async fn run(options: &MapOptions, job: &JobHandle) -> Result<Vec<MapEntry>> {
    let mut entries = Vec::new();
    each(options, job, |entry| {
        entries.push(entry);
        Ok(())
    })
    .await?;
    Ok(entries)
}

/// Maps: hands the runs to `take` one by one, in order.
pub async fn each(options: &MapOptions, job: &JobHandle, mut take: impl FnMut(MapEntry) -> Result<()>) -> Result<()> {
    let node = options.image.open(options.image.request()?.without_content()).await?;
    let result = walk(&node, options, job, &mut take).await;
    let closed = node.close().await;
    result.and(closed)
}

async fn walk(
    node: &Node,
    options: &MapOptions,
    job: &JobHandle,
    take: &mut impl FnMut(MapEntry) -> Result<()>,
) -> Result<()> {
    const MAX_RUNS: usize = 4096;
    const WINDOW_BYTES: u64 = 16 << 30;
    let size = node.size();
    let end = options.len.map_or(size, |len| options.start.saturating_add(len).min(size));
    let mut at = options.start;
    job.set_len(end.saturating_sub(at));
    let mut pending: Option<MapEntry> = None;
    let mut names = HashMap::new();
    names_of_filters(node, &mut names);
    while at < end {
        job.pause_point().await?;
        let from = at;
        let runs = node.block_status_chain(at, (end - at).min(WINDOW_BYTES), MAX_RUNS).await;
        for run in runs.map_err(|error| in_work(error, "Could not read file metadata"))? {
            at = run.start + run.len;
            let mut entry = MapEntry::from(run);
            if let Some(filter) = entry.file.as_ref().and_then(|file| names.get(file)) {
                entry.file = Some(Arc::clone(filter));
            }
            pending = match pending.take() {
                None => Some(entry),
                Some(mut last) if last.continues_in(&entry) => {
                    last.length += entry.length;
                    Some(last)
                }
                Some(last) => {
                    take(last)?;
                    Some(entry)
                }
            };
        }
        if at == from {
            return Err(Error::internal("an image says nothing of a range").offset(at).file(node.filename()));
        }
        job.advance(at - from);
    }
    pending.map_or(Ok(()), take)
}

/// Filters that stand between a format and a file: the name of the file, and of the filter, which QEMU shows in its place.
fn names_of_filters(node: &Node, names: &mut HashMap<Arc<str>, Arc<str>>) {
    // Fault injection stands above an image.
    let is_between = |node: &Node| node.is_filter() || node.child(ChildRole::Image).is_some();
    let is_format = !is_between(node) && !node.is_raw();
    for child in node.children() {
        let is_stored = matches!(child.role, ChildRole::File | ChildRole::DataFile);
        if is_format && is_stored && is_between(&child.node) {
            let below = |node: &Node| node.child(ChildRole::File).or_else(|| node.child(ChildRole::Image));
            let mut file = Arc::clone(&child.node);
            while let Some(next) = below(&file) {
                file = next;
            }
            names.insert(file.filename().into(), child.node.reference().into());
        }
        names_of_filters(&child.node, names);
    }
}

impl From<StatusExtent> for MapEntry {
    fn from(run: StatusExtent) -> Self {
        MapEntry {
            start: run.start,
            length: run.len,
            depth: run.depth,
            present: run.present,
            zero: run.zero,
            data: run.data,
            compressed: run.compressed,
            offset: run.offset,
            file: run.file,
        }
    }
}

impl MapEntry {
    /// True when `next` only goes on with this run.
    fn continues_in(&self, next: &MapEntry) -> bool {
        let offsets_follow = match (self.offset, next.offset) {
            (None, None) => true,
            (Some(offset), Some(next)) => offset.checked_add(self.length) == Some(next),
            _ => false,
        };
        offsets_follow
            && self.depth == next.depth
            && (self.present, self.zero, self.data) == (next.present, next.zero, next.data)
            && self.compressed == next.compressed
            && self.file == next.file
    }
}

#[cfg(test)]
mod tests {
    use super::MapEntry;

    fn entry(start: u64, offset: Option<u64>) -> MapEntry {
        MapEntry {
            start,
            length: 512,
            depth: 0,
            present: true,
            zero: false,
            data: true,
            compressed: false,
            offset,
            file: None,
        }
    }

    #[test]
    fn runs_join_when_their_offsets_follow() {
        assert!(entry(0, Some(4096)).continues_in(&entry(512, Some(4608))));
        assert!(!entry(0, Some(4096)).continues_in(&entry(512, Some(8192))));
        assert!(!entry(0, None).continues_in(&entry(512, Some(0))));
        assert!(!entry(0, None).continues_in(&MapEntry { depth: 1, ..entry(512, None) }));
    }

    #[test]
    fn json_keys_are_those_of_qemu_img() {
        let json = serde_json::to_string(&entry(0, Some(4096))).expect("json");
        assert_eq!(
            json,
            r#"{"start":0,"length":512,"depth":0,"present":true,"zero":false,"data":true,"compressed":false,"offset":4096}"#
        );
    }
}
