// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Takes layers out of the middle of a chain in use. Their data goes into the image below them, which then becomes the
//! backing file of the image above them.
//!
//! On disk the base has everything, durably, before the overlay's header names it. A power cut leaves the old chain or
//! the new one, and both read the same.

use super::opened::{OpenedBase, reader_of, reading_one_size};
use crate::JobHandle;
use crate::faults::{Failure, Judge, settle};
use crate::zeroes::is_zero;
use cowshed_image::DRIVERS;
use cowshed_image::graph::{AttachRequest, Attachment, Chain, Graph, Queue, below_filters};
use cowshed_image::node::ChildRole;
use cowshed_image::open::{HeaderName, check_header_name};
use cowshed_image::options::DriverKind;
use cowshed_image::{Node, ZeroFlags};
use cowshed_storage::{IoBuf, Permissions};
use cowshed_types::{Error, Result};
use futures_util::future::join_all;
use std::sync::Arc;

/// Copied in one piece at most, in bytes.
const CHUNK_BYTES: u64 = 1 << 20;
/// Chunks under way at once.
const AT_ONCE: u64 = 4;
/// Moved at once under a speed limit: with small steps it is kept, and seen to be kept, from the start.
pub(crate) const LIMITED_BYTES: u64 = 512 << 10;
/// Zeroes may be holes.
const ZEROES: ZeroFlags = ZeroFlags { may_unmap: true, no_fallback: false };

/// The layers to take out of a chain.
pub struct MergeRequest {
    /// The image whose backing file is `top`.
    pub overlay: Arc<Node>,
    /// The highest layer that goes.
    pub top: Arc<Node>,
    /// The image that gets the layers' data.
    pub base: Arc<Node>,
    /// The name of the base for the overlay's header; `None`: by a name that opens it as it is.
    pub backing_file: Option<String>,
    /// It names the format `raw` where the base is a protocol's node.
    pub mask_protocol: bool,
}

/// The work under way. Requests that a dropped future of it has begun are carried out; the steps behind them are not. A dropped
/// [`Merge::copy`] leaves pieces out: only [`Merge::end`] may follow.
pub struct Merge {
    graph: Arc<Graph>,
    request: MergeRequest,
    reader: Arc<Attachment>,
    /// Keeps the overlay's size: the range behind the end of the layers is written as zeroes into a longer base.
    sized: Arc<Attachment>,
    opened: OpenedBase,
}

impl Merge {
    /// Starts it. The layers from `top` to `base` must have no users but each other.
    pub async fn start(graph: &Arc<Graph>, id: &str, request: MergeRequest) -> Result<Merge> {
        let overlay = &request.overlay;
        // Its header has to name another backing file at the end: nothing is copied before.
        if overlay.backing_name().is_none() {
            let (name, format) = (overlay.name(), overlay.driver_name());
            let message =
                format!("the header of node '{name}' can't be changed to name another backing file ({format})");
            return Err(Error::unsupported(message));
        }
        let chain = Chain::between(&request.top, Some(&request.base))?;
        check_name(&request.overlay, &request.base, request.backing_file.as_deref())?;
        let held = Chain::between(&request.overlay, Some(&request.base))?.leaving_out(&readers_of(&request));
        held.check_private(id)?;
        let reader = AttachRequest::job(reader_of(id), Permissions::READ);
        let reader = graph.attach(&request.top, reader).await?;
        let sized = AttachRequest::job(format!("{id}-overlay"), reading_one_size()).without_statistics();
        let sized = match graph.attach(&request.overlay, sized).await {
            Ok(sized) => sized,
            Err(error) => return reader.detach().await.and(Err(error)),
        };
        match OpenedBase::open(graph, id, chain, &held, request.top.size()).await {
            Ok(opened) => Ok(Merge { graph: Arc::clone(graph), request, reader, sized, opened }),
            Err(error) => reader.detach().await.and(sized.detach().await).and(Err(error)),
        }
    }

    /// The nodes that it works on: others must leave them as they are.
    pub fn nodes(&self) -> Vec<Arc<Node>> {
        let mut nodes = self.opened.chain().nodes();
        nodes.push(Arc::clone(&self.request.overlay));
        nodes
    }

    /// Copies all that the layers hold. Progress counts the bytes of the disk.
    pub async fn copy(&self, job: &JobHandle, judge: &dyn Judge) -> Result<()> {
        let (source, target) = (self.reader.queue(), self.opened.writer().queue());
        let size = self.request.top.size();
        // Behind the end of the top the overlay reads zeroes, whatever a longer base has there.
        let end = self.request.overlay.size().min(self.request.base.size()).max(size);
        job.set_progress(0, end);
        let mut at = 0;
        while at < end {
            // Copied bytes are paid for before the next step, also if that copies nothing.
            job.throttle(0).await?;
            match self.copy_next(at, size, end, (&source, &target), job).await {
                Ok(len) => {
                    at += len;
                    job.advance(len);
                }
                Err(Stopped::Ended(error)) => return Err(error),
                Err(Stopped::Failed(failure)) => settle(failure, judge, job).await?,
            }
        }
        Ok(())
    }

    async fn copy_next(
        &self,
        at: u64,
        size: u64,
        end: u64,
        (source, target): (&Queue, &Queue),
        job: &JobHandle,
    ) -> Result<u64, Stopped> {
        let write = |result: Result<()>| result.map_err(|error| Stopped::Failed(Failure::write(error)));
        if at >= size {
            write(target.write_zeroes(at, end - at, ZEROES).await)?;
            return Ok(end - at);
        }
        let holder = self.opened.chain().holder(at, size - at).await;
        let holder = holder.map_err(|error| Stopped::Failed(Failure::read(error)))?;
        if holder.layer.is_none() {
            return Ok(holder.len);
        }
        if holder.zero {
            write(target.write_zeroes(at, holder.len, ZEROES).await)?;
            return Ok(holder.len);
        }
        let most = if job.has_limit() { LIMITED_BYTES } else { AT_ONCE * CHUNK_BYTES - at % CHUNK_BYTES };
        let len = holder.len.min(most);
        job.throttle(len).await.map_err(Stopped::Ended)?;
        // Side by side: while one is written the next one is read.
        let mut chunks = Vec::with_capacity(AT_ONCE as usize);
        let mut start = at;
        while start < at + len {
            let end = (start + CHUNK_BYTES - start % CHUNK_BYTES).min(at + len);
            chunks.push(copy_chunk(start, end - start, (source, target)));
            start = end;
        }
        // All end before an error is looked at: a write that is still on its way must not meet its repetition.
        join_all(chunks).await.into_iter().collect::<Result<(), Failure>>().map_err(Stopped::Failed)?;
        self.request.base.note_bulk_write(len);
        Ok(len)
    }

    /// Makes the base durable, so that [`Merge::finish`] finds little to do while it holds the disk's users. A cancelled `job` does
    /// not wait for it.
    pub async fn flush(&self, job: &JobHandle) -> Result<()> {
        job.unless_cancelled(self.request.base.flush()).await?
    }

    /// Puts the overlay on the base, on disk and in the graph, and lets the layers between go.
    pub async fn finish(&self) -> Result<()> {
        let Merge { graph, request, reader, sized, opened } = self;
        let drained = graph.drain(&[&request.overlay, &request.base]).await;
        let closed = opened.close().await;
        let result = match closed {
            Ok(()) => {
                let name = BackingName { file: request.backing_file.as_deref(), mask_protocol: request.mask_protocol };
                relink(graph, &request.overlay, Some(&request.base), name).await
            }
            error => error,
        };
        let detached = reader.detach().await.and(sized.detach().await);
        let freed = opened.let_go().await;
        drop(drained);
        result.and(detached).and(freed)
    }

    /// Ends half-way: the chain stays as it is.
    pub async fn end(&self) -> Result<()> {
        let closed = self.opened.close().await;
        let detached = self.reader.detach().await.and(self.sized.detach().await);
        closed.and(detached).and(self.opened.let_go().await)
    }
}

/// The filters by which backups read the top. Their data stays the same, so they and their users stay.
fn readers_of(request: &MergeRequest) -> Vec<Arc<Node>> {
    let above_top = std::iter::successors(request.overlay.backing(), |node| node.child(ChildRole::File));
    let filters = above_top.take_while(|node| !Arc::ptr_eq(node, &request.top));
    filters.filter(|node| node.copy_before_write().is_some()).collect()
}

/// Copies one piece of data.
async fn copy_chunk(at: u64, len: u64, (source, target): (&Queue, &Queue)) -> Result<(), Failure> {
    let (result, buf) = source.read(at, IoBuf::scratch(len as usize)).await;
    result.map_err(Failure::read)?;
    let written = match is_zero(&buf) {
        true => target.write_zeroes(at, len, ZEROES).await,
        false => target.write(at, buf).await.0,
    };
    written.map_err(Failure::write)
}

/// The name of a backing file for a header.
#[derive(Clone, Copy)]
pub(crate) struct BackingName<'a> {
    /// `None`: by a name that opens the node as it is.
    pub file: Option<&'a str>,
    /// The format is `raw` where the node is a protocol's.
    pub mask_protocol: bool,
}

/// Refuses, before anything is copied, a name that [`relink`] could not write.
pub(crate) fn check_name(overlay: &Node, base: &Node, given: Option<&str>) -> Result<()> {
    match given {
        Some(name) => check_header_name(name),
        None => base.header_name(overlay.image_path().as_deref()).map(drop),
    }
}

fn is_protocol(driver: &str) -> bool {
    DRIVERS.schema(driver).is_some_and(|schema| schema.kind == DriverKind::Protocol)
}

enum Stopped {
    Failed(Failure),
    /// Cancelled.
    Ended(cowshed_types::Error),
}

/// Puts an image on another backing node: first in its header, durably, then in the graph. It must read the same on both.
/// `name` is how the header names it.
pub(crate) async fn relink(
    graph: &Arc<Graph>,
    overlay: &Arc<Node>,
    base: Option<&Arc<Node>>,
    name: BackingName<'_>,
) -> Result<()> {
    // The chain below the base may have changed since the job began.
    let named = match (base, name.file) {
        (None, _) => None,
        (Some(base), Some(file)) => {
            Some(HeaderName { file: file.to_owned(), format: below_filters(base).driver_name() })
        }
        (Some(base), None) => Some(base.header_name(overlay.image_path().as_deref())?),
    };
    let named = named.map(|named| match named.format {
        driver if name.mask_protocol && is_protocol(driver) => HeaderName { format: "raw", ..named },
        _ => named,
    });
    graph.relink(overlay, base, named).await
}
