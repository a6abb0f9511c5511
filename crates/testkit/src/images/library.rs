// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Our own library as executor of sessions, and as reader.

use super::chain::Executor;
use super::ops::Op;
use crate::qemu::{MapEntry, coalesce};
use cowshed_image::node::{Node, ZeroFlags};
use cowshed_image::{OpenRequest, open};
use cowshed_storage::{IoBuf, rt};
use cowshed_types::Result;
use futures_util::future::join_all;
use std::path::Path;
use std::sync::Arc;

/// The number of bytes that [`Reader::read_all`] asks for at a time: not a multiple of any cluster size.
const READ_BYTES: u64 = 300_000;

/// The sessions are done by our library.
pub struct Library {
    /// Operations that follow one another and don't overlap run at the same time.
    pub concurrent: bool,
}

impl Executor for Library {
    fn session(&mut self, image: &Path, ops: &[Op]) {
        let result = rt::block_on(async {
            let node = open(request(image, "qcow2").writable(true)).await?;
            for batch in batches(ops, self.concurrent) {
                for (op, result) in batch.iter().zip(join_all(batch.iter().map(|op| carry_out(&node, op))).await) {
                    result.map_err(|error| error.context(format!("{op:?}")))?;
                }
            }
            node.close().await
        });
        result.unwrap_or_else(|error| panic!("{}: {error}", image.display()));
    }
}

fn request(image: &Path, format: &str) -> OpenRequest {
    OpenRequest::file(image.to_string_lossy()).format(format)
}

async fn carry_out(node: &Node, op: &Op) -> Result<()> {
    match *op {
        Op::Write { offset, len, texture } => {
            let mut buffer = IoBuf::zeroed(len as usize);
            texture.fill(&mut buffer);
            node.write(offset, buffer).await.0
        }
        Op::WriteCompressed { offset, len, texture } => {
            let mut buffer = IoBuf::zeroed(len as usize);
            texture.fill(&mut buffer);
            node.write_compressed(vec![(offset, buffer)]).await
        }
        Op::WriteZeroes { offset, len, unmap } => {
            node.write_zeroes(offset, len, ZeroFlags { may_unmap: unmap, no_fallback: false }).await
        }
        Op::Discard { offset, len } => node.discard(offset, len).await,
        Op::Resize { size, preallocation } => node.resize(size, preallocation).await,
        Op::Flush => node.flush().await,
    }
}

/// Cuts `ops` where one overlaps an earlier one of its batch, or where it needs to be alone.
fn batches(ops: &[Op], concurrent: bool) -> Vec<&[Op]> {
    let (mut batches, mut start) = (Vec::new(), 0);
    for index in 0..ops.len() {
        let Some(range) = touched(&ops[index]) else {
            batches.extend([&ops[start..index], &ops[index..=index]]);
            start = index + 1;
            continue;
        };
        let overlaps = |other: &Op| touched(other).is_some_and(|o| o.start < range.end && range.start < o.end);
        if !concurrent || ops[start..index].iter().any(overlaps) {
            batches.push(&ops[start..index]);
            start = index;
        }
    }
    batches.push(&ops[start..]);
    batches.retain(|batch| !batch.is_empty());
    batches
}

/// The bytes that an operation touches; `None` when it has to run alone.
fn touched(op: &Op) -> Option<std::ops::Range<u64>> {
    match *op {
        Op::Write { offset, len, .. } | Op::WriteZeroes { offset, len, .. } | Op::Discard { offset, len } => {
            Some(offset..offset + len)
        }
        // A resize changes the range that the others may touch, and a flush in between is worth more than one beside.
        Op::WriteCompressed { .. } | Op::Resize { .. } | Op::Flush => None,
    }
}

/// An image opened for reading by our library.
pub struct Reader {
    node: Arc<Node>,
}

impl Reader {
    /// Opens it with its backing chain. Panics when that fails.
    #[track_caller]
    pub fn open(image: &Path, format: &str) -> Self {
        match rt::block_on(open(request(image, format))) {
            Ok(node) => Reader { node },
            Err(error) => panic!("could not open {}: {error}", image.display()),
        }
    }

    /// All of the disk, in pieces that respect no boundary.
    #[track_caller]
    pub fn read_all(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.node.size() as usize);
        while (bytes.len() as u64) < self.node.size() {
            let offset = bytes.len() as u64;
            bytes.extend_from_slice(&self.read(offset, READ_BYTES.min(self.node.size() - offset)));
        }
        bytes
    }

    /// A part of the disk.
    #[track_caller]
    pub fn read(&self, offset: u64, len: u64) -> IoBuf {
        let (result, buffer) = rt::block_on(self.node.read(offset, IoBuf::zeroed(len as usize)));
        result.unwrap_or_else(|error| panic!("could not read {len} bytes at {offset}: {error}"));
        buffer
    }

    /// The runs as `qemu-img map` prints them, by [`Node::block_status_chain`].
    #[track_caller]
    pub fn map(&self) -> Vec<MapEntry> {
        let (mut entries, mut offset) = (Vec::new(), 0);
        while offset < self.node.size() {
            let status = rt::block_on(self.node.block_status_chain(offset, self.node.size() - offset, 16));
            let runs = status.unwrap_or_else(|error| panic!("could not map at {offset}: {error}"));
            assert!(!runs.is_empty(), "no run at {offset}");
            for run in runs {
                assert_eq!(run.start, offset, "runs must follow one another");
                assert!(run.len > 0, "an empty run at {offset}");
                offset += run.len;
                entries.push(MapEntry {
                    start: run.start,
                    length: run.len,
                    depth: run.depth.into(),
                    present: run.present,
                    zero: run.zero,
                    data: run.data,
                    compressed: Some(run.compressed),
                    offset: run.offset,
                });
            }
        }
        coalesce(entries)
    }

    /// Closes the image. Panics when that fails.
    #[track_caller]
    pub fn close(self) {
        rt::block_on(self.node.close()).unwrap_or_else(|error| panic!("could not close: {error}"));
    }
}
