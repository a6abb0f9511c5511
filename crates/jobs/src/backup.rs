// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Copies a disk in use to another node as it is at the moment of the start.
//!
//! A copy-before-write filter above the disk saves what clients overwrite; the job copies the rest.

use crate::JobHandle;
use crate::faults::{Failure, Judge, settle};
use crate::mirror::Sync;
use cowshed_block::{Error, ErrorKind, Result};
use cowshed_image::Node;
use cowshed_image::filters::CopyBeforeWrite;
use cowshed_image::graph::{AttachRequest, Attachment, Graph};
use cowshed_image::options::BlockdevOptions;
use cowshed_storage::{PermissionSet, Permissions, rt};
use std::sync::Arc;
use std::time::Duration;

/// How often a job that only saves what is overwritten looks whether it is to end.
const LOOK: Duration = Duration::from_millis(50);
/// Runs that one question about the mapping answers at most.
const STATUS_RUNS: usize = 64;

/// What to copy.
pub struct BackupRequest {
    /// The disk.
    pub source: Arc<Node>,
    /// Where it goes: writable, of the same size, used by nobody.
    pub target: Arc<Node>,
    /// What is copied; with `None` only what is overwritten, until the job is cancelled.
    pub sync: Sync,
    /// Compress what is written to the target.
    pub compress: bool,
    /// A write whose old data can't be saved fails; else it passes and the job fails.
    pub breaks_writes: bool,
    /// The node-name of the filter.
    pub filter_name: String,
}

/// The work under way. Its futures must run to their end.
pub struct Backup {
    graph: Arc<Graph>,
    request: BackupRequest,
    filter: Arc<Node>,
    user: Arc<Attachment>,
}

impl Backup {
    /// Starts it: the target will hold the disk as it is now.
    pub async fn start(graph: &Arc<Graph>, id: &str, request: BackupRequest) -> Result<Backup> {
        let BackupRequest { source, target, .. } = &request;
        if source.size() != target.size() {
            return Err(Error::invalid_argument("Source and target image have different sizes").value(target.size()));
        }
        if Arc::ptr_eq(source, target) {
            return Err(Error::invalid_argument("Source and target cannot be the same"));
        }
        if !target.user_names().is_empty() {
            return Err(Error::new(ErrorKind::Busy, format!("the target '{}' is in use", target.name())));
        }
        if request.compress && target.qcow2().is_none() {
            let message = format!("Compression is not supported for this drive {}", target.name());
            return Err(Error::unsupported(message));
        }
        let options = BlockdevOptions::new()
            .with("driver", "copy-before-write")
            .with("node-name", request.filter_name.as_str())
            .with("target", target.name())
            .with("on-cbw-error", if request.breaks_writes { "break-guest-write" } else { "break-snapshot" });
        let filter = graph.insert_filter(source, options).await?;
        let permissions = Permissions { used: PermissionSet::CONSISTENT_READ, shared: PermissionSet::ALL };
        match graph.attach(&filter, AttachRequest::job(format!("{id}-backup"), permissions)).await {
            Ok(user) => {
                let backup = Backup { graph: Arc::clone(graph), request, filter, user };
                backup.saver()?.set_compress(backup.request.compress);
                Ok(backup)
            }
            Err(error) => graph.remove_filter(&filter).await.and(Err(error)),
        }
    }

    fn saver(&self) -> Result<&CopyBeforeWrite> {
        self.filter.copy_before_write().ok_or_else(|| Error::internal("not the filter of a backup"))
    }

    /// The nodes that it works on: others must leave them as they are.
    pub fn nodes(&self) -> Vec<Arc<Node>> {
        [&self.request.source, &self.request.target, &self.filter].map(Arc::clone).into()
    }

    /// Copies everything that is wanted. Progress counts bytes that the target no longer lacks.
    pub async fn copy(&self, job: &JobHandle, judge: &dyn Judge) -> Result<()> {
        let saver = self.saver()?;
        let size = self.request.source.size();
        if self.request.sync == Sync::None {
            job.set_progress(0, size);
            loop {
                job.pause_point().await?;
                saver.broken().map_or(Ok(()), Err)?;
                rt::sleep(LOOK).await;
            }
        }
        if self.request.sync == Sync::Top {
            self.skip_below(saver, job).await?;
        }
        let total = saver.pending_bytes();
        job.set_progress(0, total);
        while let Some((at, len)) = saver.next_pending(0) {
            job.throttle(len).await?;
            let copied = saver.copy(at, len).await.map_err(Failure::from);
            saver.broken().map_or(Ok(()), Err)?;
            if let Err(failure) = copied {
                settle(failure, judge, job).await?;
            }
            job.set_progress(total.saturating_sub(saver.pending_bytes()), total);
        }
        saver.broken().map_or(Ok(()), Err)
    }

    /// Leaves out what the top layer doesn't hold. A part that is only partly held is copied whole.
    async fn skip_below(&self, saver: &CopyBeforeWrite, job: &JobHandle) -> Result<()> {
        let (size, part) = (self.request.source.size(), saver.part_bytes());
        let mut at = 0;
        while at < size {
            job.pause_point().await?;
            let end = (at + part).min(size);
            let mut held = false;
            let mut look = at;
            while look < end && !held {
                let runs = self.request.source.block_status(look, end - look, STATUS_RUNS).await?;
                held = runs.iter().any(|run| run.present);
                look = runs.last().map_or(end, |run| run.start + run.len);
            }
            if !held {
                saver.skip(at, end - at).await;
            }
            at = end;
        }
        Ok(())
    }

    /// Makes the target durable and ends.
    pub async fn finish(self) -> Result<()> {
        let flushed = self.request.target.flush().await;
        flushed.and(self.end().await)
    }

    /// Ends; without [`Backup::finish`] the target is incomplete.
    pub async fn end(self) -> Result<()> {
        let detached = self.user.detach().await;
        detached.and(self.graph.remove_filter(&self.filter).await)
    }
}
