// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Takes the data of the layers below into an image in use. Then the image gets the layer below those, or none, as its
//! backing file.
//!
//! A copy-on-read filter above the image keeps the job's copies and clients' writes apart. On disk the image has
//! everything, durably, before its header names another backing file. A power cut leaves the old chain or the new one,
//! and both read the same.

use crate::JobHandle;
use crate::commit::merge::{BackingName, LIMITED_BYTES, check_name, relink};
use crate::commit::opened::reading_one_size;
use crate::faults::{ErrorAction, Failure, Judge};
use cowshed_image::Node;
use cowshed_image::graph::{AttachRequest, Attachment, Chain, Grants, Graph, Queue};
use cowshed_image::options::BlockdevOptions;
use cowshed_storage::{PermissionSet, Permissions};
use cowshed_types::{Error, Result};
use std::sync::Arc;

/// Copied in one piece at most, in bytes.
const CHUNK_BYTES: u64 = 1 << 20;

/// The image that takes data over, and its new base.
pub struct StreamRequest {
    /// The image that takes over.
    pub node: Arc<Node>,
    /// Its new backing node; `None`: none.
    pub base: Option<Arc<Node>>,
    /// The name of that layer for the image's header; `None`: by a name that opens it as it is.
    pub backing_file: Option<String>,
    /// It names the format `raw` where that layer is a protocol's node.
    pub mask_protocol: bool,
    /// The node-name of the filter.
    pub filter_name: String,
}

/// The work under way. Requests that a dropped future of it has begun are carried out, and so is the copy of a piece.
/// The steps behind them are not. A dropped [`StreamJob::copy`] can be called again. A dropped [`StreamJob::finish`] or
/// [`StreamJob::end`] may leave the filter in the graph.
pub struct StreamJob {
    graph: Arc<Graph>,
    request: StreamRequest,
    chain: Chain,
    filter: Arc<Node>,
    user: Arc<Attachment>,
    /// No layer comes out of the chain: its images stay as they are, headers too.
    stays: bool,
    /// The layers that it takes over, held; the filter and its user; the right to change the image.
    grants: Grants,
}

impl StreamJob {
    /// Starts it: puts the filter between the image and its users.
    pub async fn start(graph: &Arc<Graph>, id: &str, request: StreamRequest) -> Result<StreamJob> {
        let node = &request.node;
        let chain = Chain::between(node, request.base.as_ref())?;
        let stays = chain.layers().len() == 1 && request.backing_file.is_none();
        if node.backing_name().is_none() && !stays {
            let message = format!(
                "the header of node '{}' can't be changed to name another backing file ({})",
                node.name(),
                node.driver_name()
            );
            return Err(Error::invalid_argument(message));
        }
        if let Some(base) = request.base.as_ref().filter(|_| !stays) {
            check_name(node, base, request.backing_file.as_deref())?;
        }
        let grants = Grants::new(graph);
        let granted = Self::grant(&grants, id, &request, &chain, stays).await;
        let (filter, user) = grants.end(granted).await?;
        Ok(StreamJob { graph: Arc::clone(graph), request, chain, filter, user, stays, grants })
    }

    async fn grant(
        grants: &Grants,
        id: &str,
        request: &StreamRequest,
        chain: &Chain,
        stays: bool,
    ) -> Result<(Arc<Node>, Arc<Attachment>)> {
        let node = &request.node;
        if !stays {
            grants.make_writable(node).await?;
        }
        if let Some(base) = &request.base {
            // Ranges that read as zeroes behind a short layer are to be zeroes on a longer base too.
            let present = node.backing().map_or(0, |backing| backing.size());
            grants.plan_for(node, base.size().max(present)).await;
        }
        grants.hold_unchanged(id, chain).await?;
        let mut options = BlockdevOptions::new()
            .with("driver", "copy-on-read")
            .with("discard", "unmap")
            .with("node-name", request.filter_name.as_str());
        if let Some(bottom) = chain.lowest() {
            options = options.with("bottom", bottom.name());
        }
        let filter = grants.insert_filter(node, options).await?;
        let used = PermissionSet::CONSISTENT_READ | PermissionSet::WRITE_UNCHANGED;
        let job = AttachRequest::job(format!("{id}-stream"), Permissions { used, ..reading_one_size() });
        let user = grants.attach(&filter, job).await?;
        Ok((filter, user))
    }

    /// The nodes that it works on: others must leave them as they are.
    pub fn nodes(&self) -> Vec<Arc<Node>> {
        let mut nodes = self.chain.nodes();
        nodes.push(Arc::clone(&self.filter));
        nodes
    }

    /// Takes over everything. Progress counts the bytes of the disk. An error that the judge ignores leaves its piece
    /// out, and is the result in the end.
    pub async fn copy(&self, job: &JobHandle, judge: &dyn Judge) -> Result<()> {
        // Without layers to take over there is nothing to look at.
        let size = if self.chain.layers().len() > 1 { self.request.node.size() } else { 0 };
        job.set_progress(0, size);
        let queue = self.user.queue();
        let (mut at, mut result) = (0, Ok(()));
        while at < size {
            // Copied bytes are paid for before the next step, also if that copies nothing.
            job.throttle(0).await?;
            let (len, copied) = self.copy_next(&queue, at, size, job).await?;
            if let Err(failure) = copied {
                match judge.judge(&failure) {
                    ErrorAction::Report => return Err(failure.error),
                    ErrorAction::Ignore => result = result.and(Err(failure.error)),
                    ErrorAction::Stop => {
                        job.pause();
                        continue;
                    }
                }
            }
            at += len;
            job.advance(len);
        }
        result
    }

    /// Returns the length of the looked-up part, and the result.
    async fn copy_next(
        &self,
        queue: &Queue,
        at: u64,
        size: u64,
        job: &JobHandle,
    ) -> Result<(u64, Result<(), Failure>)> {
        let piece = (CHUNK_BYTES - at % CHUNK_BYTES).min(size - at);
        let holder = {
            // A drain waits for this look at the layers: it may change them.
            let _inside = queue.enter().await;
            self.chain.holder(at, size - at).await
        };
        let holder = match holder {
            Ok(holder) => holder,
            Err(error) => return Ok((piece, Err(Failure::read(error)))),
        };
        let nothing_to_do = match holder.layer {
            None | Some(0) => true,
            Some(_) => holder.zero && !self.chain.records_zeroes(),
        };
        if nothing_to_do {
            return Ok((holder.len, Ok(())));
        }
        let len = holder.len.min(if job.has_limit() { piece.min(LIMITED_BYTES) } else { piece });
        job.throttle(len).await?;
        // A drain waits for this piece, and the next one for the drain.
        let _inside = queue.enter().await;
        let filter = self.filter.copy_on_read().ok_or_else(|| Error::internal("not the filter of a stream"))?;
        Ok((len, filter.take_over(&self.chain, at, len).await.map_err(|failure| Failure::read(failure.error))))
    }

    /// Makes the image durable, so that [`StreamJob::finish`] finds little to do while it holds the disk's users. A cancelled `job` does
    /// not wait for it.
    pub async fn flush(&self, job: &JobHandle) -> Result<()> {
        job.unless_cancelled(self.request.node.flush()).await?
    }

    /// Puts the image on its new backing node, on disk and in the graph.
    pub async fn finish(&self) -> Result<()> {
        let drained = self.graph.drain(&[&self.request.node]).await;
        let flushed = self.request.node.flush().await;
        let linked = match flushed {
            Ok(()) if self.stays => Ok(()),
            Ok(()) => {
                let mask_protocol = self.request.mask_protocol;
                let name = BackingName { file: self.request.backing_file.as_deref(), mask_protocol };
                relink(&self.graph, &self.request.node, self.request.base.as_ref(), name).await
            }
            error => error,
        };
        let ended = self.end().await;
        drop(drained);
        linked.and(ended)
    }

    /// Ends half-way: the image stays on its chain, with its present data.
    pub async fn end(&self) -> Result<()> {
        self.grants.take_back().await
    }
}
