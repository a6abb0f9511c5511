// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Copies a disk that is in use to another node, until both are the same; then the other can take its place.
//!
//! What is to be copied stands in a dirty map, which writers of the source fill too. A part is taken out of the map
//! before it is read, so a write that comes in between puts it back.

use crate::JobHandle;
use crate::zeroes::is_zero;
use cowshed_block::{Error, ErrorKind, Result};
use cowshed_image::dirty::DirtyMap;
use cowshed_image::graph::{AttachRequest, Attachment, Graph, Queue};
use cowshed_image::node::ChildRole;
use cowshed_image::{Node, StatusExtent, ZeroFlags};
use cowshed_storage::{IoBuf, PermissionSet, Permissions};
use std::ops::Range;
use std::sync::Arc;

/// Copied in one piece, in bytes.
const CHUNK_BYTES: u64 = 1 << 20;
/// Runs that one question about the mapping returns at most.
const STATUS_RUNS: usize = 64;
/// Zeroes on the target may be holes.
const ZEROES: ZeroFlags = ZeroFlags { may_unmap: true, no_fallback: false };

/// What is copied at first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sync {
    /// The whole disk.
    Full,
    /// What the top layer has; the target stands on the same backing file.
    Top,
    /// Nothing: only what is written from now on.
    None,
}

/// A copy under way. Its futures must run to their end.
pub struct Mirror {
    graph: Arc<Graph>,
    source: Arc<Node>,
    target: Arc<Node>,
    reader: Arc<Attachment>,
    writer: Arc<Attachment>,
    dirty: Arc<DirtyMap>,
}

/// Both ends of a copy: through the gates of the graph, or under a drain past them.
enum Ends<'a> {
    Queues(&'a Queue, &'a Queue),
    Nodes(&'a Node, &'a Node),
}

impl Ends<'_> {
    async fn status(&self, at: u64, len: u64) -> Result<Vec<StatusExtent>> {
        match self {
            Ends::Queues(source, _) => source.block_status_chain(at, len, STATUS_RUNS).await,
            Ends::Nodes(source, _) => source.block_status_chain(at, len, STATUS_RUNS).await,
        }
    }

    async fn copy(&self, at: u64, len: usize) -> Result<()> {
        let buf = IoBuf::zeroed(len);
        let (result, buf) = match self {
            Ends::Queues(source, _) => source.read(at, buf).await,
            Ends::Nodes(source, _) => source.read(at, buf).await,
        };
        result?;
        if is_zero(&buf) {
            return self.zero(at, len as u64).await;
        }
        match self {
            Ends::Queues(_, target) => target.write(at, buf).await.0,
            Ends::Nodes(_, target) => target.write(at, buf).await.0,
        }
    }

    async fn zero(&self, at: u64, len: u64) -> Result<()> {
        match self {
            Ends::Queues(_, target) => target.write_zeroes(at, len, ZEROES).await,
            Ends::Nodes(_, target) => target.write_zeroes(at, len, ZEROES).await,
        }
    }
}

impl Mirror {
    /// Starts it: from now on writes to `source` are noticed. `granularity_bytes` is the size of what is copied for one
    /// small write. The target must be writable, of the same size, and used by nobody.
    pub async fn start(
        graph: &Arc<Graph>,
        id: &str,
        (source, target): (&Arc<Node>, &Arc<Node>),
        sync: Sync,
        granularity_bytes: u64,
    ) -> Result<Mirror> {
        if source.size() != target.size() {
            let message = format!("the target '{}' must be as large as '{}'", target.name(), source.name());
            return Err(Error::invalid_argument(message).value(target.size()));
        }
        if Arc::ptr_eq(source, target) || !target.user_names().is_empty() {
            let message = format!("the target '{}' is in use", target.name());
            return Err(Error::new(ErrorKind::Busy, message));
        }
        let read = Permissions { used: PermissionSet::CONSISTENT_READ, shared: PermissionSet::ALL };
        let write = Permissions { used: PermissionSet::CONSISTENT_READ | PermissionSet::WRITE, ..Permissions::READ };
        let reader = graph.attach(source, AttachRequest::job(format!("{id}-source"), read)).await?;
        let writer = match graph.attach(target, AttachRequest::job(format!("{id}-target"), write)).await {
            Ok(writer) => writer,
            Err(error) => return reader.detach().await.and(Err(error)),
        };
        let tracked = {
            let _drained = graph.drain(&[source]).await;
            source.track_dirty(granularity_bytes)
        };
        let dirty = match tracked {
            Ok(dirty) => dirty,
            Err(error) => return writer.detach().await.and(reader.detach().await).and(Err(error)),
        };
        let (source, target) = (Arc::clone(source), Arc::clone(target));
        let mirror = Mirror { graph: Arc::clone(graph), source, target, reader, writer, dirty };
        match mirror.mark(sync).await {
            Ok(()) => Ok(mirror),
            Err(error) => mirror.end().await.and(Err(error)),
        }
    }

    async fn mark(&self, sync: Sync) -> Result<()> {
        let size = self.source.size();
        match sync {
            Sync::Full => self.dirty.mark(0, size),
            Sync::None => {}
            Sync::Top => {
                let queue = self.reader.queue();
                let mut at = 0;
                while at < size {
                    for run in queue.block_status(at, size - at, STATUS_RUNS).await? {
                        if run.present {
                            self.dirty.mark(run.start, run.len);
                        }
                        at = run.start + run.len;
                    }
                }
            }
        }
        Ok(())
    }

    /// The nodes that it works on: others must leave them as they are.
    pub fn nodes(&self) -> [&Arc<Node>; 2] {
        [&self.source, &self.target]
    }

    /// What is still to be copied, in bytes.
    pub fn remaining_bytes(&self) -> u64 {
        self.dirty.dirty_bytes().min(self.source.size())
    }

    /// Copies until there was a moment without anything to copy. Progress counts what was copied.
    pub async fn catch_up(&self, job: &JobHandle) -> Result<()> {
        let (source, target) = (self.reader.queue(), self.writer.queue());
        let mut from = 0;
        loop {
            job.pause_point().await?;
            self.check_place()?;
            let found = self.dirty.take_next(from, CHUNK_BYTES).or_else(|| self.dirty.take_next(0, CHUNK_BYTES));
            let Some(range) = found else { return Ok(()) };
            from = range.end;
            let len = range.end - range.start;
            let copied = match job.throttle(len).await {
                Ok(()) => self.copy(&Ends::Queues(&source, &target), &range).await,
                Err(error) => Err(error),
            };
            if let Err(error) = copied {
                self.dirty.mark(range.start, len);
                return Err(error);
            }
            job.set_progress(job.progress().offset + len, job.progress().offset + len + self.remaining_bytes());
        }
    }

    /// The source must still be where its users write: else there are writes that nobody noticed.
    fn check_place(&self) -> Result<()> {
        let mut node = self.reader.node();
        while !Arc::ptr_eq(&node, &self.source) {
            match node.child(ChildRole::File).filter(|_| node.is_filter()) {
                Some(child) => node = child,
                None => {
                    let message = format!("another node took the place of '{}' under the job", self.source.name());
                    return Err(Error::new(ErrorKind::Busy, message));
                }
            }
        }
        Ok(())
    }

    async fn copy(&self, ends: &Ends<'_>, range: &Range<u64>) -> Result<()> {
        let end = range.end.min(self.source.size());
        let mut at = range.start;
        while at < end {
            for run in ends.status(at, end - at).await? {
                let len = run.len.min(end - at);
                match run.zero {
                    true => ends.zero(at, len).await?,
                    false => ends.copy(at, usize::try_from(len).unwrap_or(usize::MAX)).await?,
                }
                at += len;
            }
        }
        Ok(())
    }

    /// Makes both the same and ends. With `pivot` the target takes the source's place for everybody. On an error the
    /// source stays where it is.
    pub async fn finish(self, pivot: bool) -> Result<()> {
        let drained = self.graph.drain(&[&self.source, &self.target]).await;
        let mut result = self.check_place();
        while result.is_ok() {
            let Some(range) = self.dirty.take_next(0, CHUNK_BYTES) else { break };
            result = self.copy(&Ends::Nodes(&self.source, &self.target), &range).await;
        }
        let result = match result {
            Ok(()) => self.target.flush().await,
            error => error,
        };
        let released = self.writer.detach().await;
        let result = match result.and(released) {
            Ok(()) if pivot => self.graph.replace(&self.source, &self.target).await,
            result => result,
        };
        let ended = self.reader.detach().await;
        drop(drained);
        result.and(ended)
    }

    /// Ends without making the target complete.
    pub async fn end(self) -> Result<()> {
        let writer = self.writer.detach().await;
        writer.and(self.reader.detach().await)
    }
}
