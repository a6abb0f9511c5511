// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The work of the jobs, with the steps that end it.

use super::{Job, JobFinish, LOOK, Status, Wish};
use cowshed_image::Node;
use cowshed_image::graph::Graph;
use cowshed_image::node::LocalFuture;
use cowshed_jobs::JobHandle;
use cowshed_jobs::backup::Backup;
use cowshed_jobs::commit::merge::Merge;
use cowshed_jobs::mirror::Mirror;
use cowshed_jobs::stream::StreamJob;
use cowshed_storage::rt;
use cowshed_types::Result;
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// Copies until both are the same, then goes on doing so until the user's decision.
pub(crate) async fn run_mirror(job: Rc<Job>, mirror: Rc<Mirror>) -> (Result<()>, JobFinish) {
    let handle = job.handle.clone();
    let mut result = Ok(());
    let mut is_ready = false;
    while result.is_ok() && (job.wish.get() == Wish::None || job.status() == Status::Standby) {
        if is_ready {
            rt::sleep(LOOK).await;
        }
        result = mirror.catch_up(&handle, &*job).await;
        if result.is_ok() && !is_ready {
            // As in QEMU the limit counts for the last piece, too.
            result = handle.throttle(0).await;
        }
        if result.is_ok() && !is_ready && mirror.remaining_bytes() == 0 {
            match mirror.flush(&handle, &*job).await {
                Ok(flushed) => is_ready = flushed,
                Err(error) => result = Err(error),
            }
            if is_ready {
                job.enter(Status::Ready);
                job.block_event("BLOCK_JOB_READY");
            }
        }
    }
    let pivot = job.wish.get() == Wish::Complete;
    let finish = JobFinish::new(move |complete| {
        Box::pin(async move {
            let finished = match complete {
                true => mirror.finish(pivot, &job.handle).await,
                false => {
                    job.handle.end_measure();
                    mirror.end().await
                }
            };
            job.set_mirror(None);
            finished
        })
    });
    (result, finish)
}

/// The work of a job that copies once and then finishes.
macro_rules! copy_once {
    ($job:ident, $work:ident) => {{
        let result = $work.copy(&$job.handle, &*$job).await;
        let work = Rc::new($work);
        let copied = Rc::clone(&work);
        let finish = JobFinish::new(move |complete| {
            Box::pin(async move {
                match complete {
                    true => work.finish().await,
                    false => work.end().await,
                }
            })
        });
        (result, finish.behind(move || Box::pin(async move { copied.flush(&$job.handle).await })))
    }};
}

/// Takes layers out of the middle of a chain.
pub(crate) async fn run_merge(job: Rc<Job>, merge: Merge) -> (Result<()>, JobFinish) {
    copy_once!(job, merge)
}

/// Takes over the data of the layers below an image.
pub(crate) async fn run_stream(job: Rc<Job>, stream: StreamJob) -> (Result<()>, JobFinish) {
    copy_once!(job, stream)
}

/// Copies a disk as it was at the start.
pub(crate) async fn run_backup(job: Rc<Job>, backup: Backup) -> (Result<()>, JobFinish) {
    let result = backup.copy(&job.handle, &*job).await;
    let backup = Rc::new(backup);
    let target = Rc::clone(&backup);
    let finish = JobFinish::new(move |complete| {
        Box::pin(async move {
            match complete {
                true => backup.complete().await,
                false => backup.end().await,
            }
        })
    });
    (result, finish.behind(move || Box::pin(async move { target.flush(&job.handle).await })))
}

/// A target that takes longer to close is left to close when it can, where the job is cancelled.
const LEFT_ALONE: Duration = Duration::from_millis(500);
/// The time for a job that was complete: other users may need the target as it is on disk.
const LEFT_COMPLETE: Duration = Duration::from_secs(5);

/// The target of a job that was opened for it.
pub(crate) struct Closing {
    pub node: Arc<Node>,
    /// Removes the file that was made for it, unless it is used by then.
    pub remove: Option<Box<dyn FnOnce()>>,
    /// The use of the target when the job fails.
    pub needed: Needed,
}

/// The data that was given up in favour of the target of a job that fails.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Needed {
    /// The source, or a bitmap, lacks the copied parts.
    pub parts: bool,
    /// A bitmap lacks the copied parts once the copy is whole.
    pub whole: bool,
}

impl Closing {
    /// Closes the node at the end of the job's work, unless another one uses it by then. A file that was made for a copy goes
    /// where that is not whole.
    pub async fn after(
        self,
        work: impl Future<Output = (Result<()>, JobFinish)>,
        job: Rc<Job>,
        graph: Arc<Graph>,
    ) -> (Result<()>, JobFinish) {
        let (result, finish) = work.await;
        let is_part = job.leaves_a_part(&result) && !self.needed.parts;
        let JobFinish { flush, end } = finish;
        let has_failed = Rc::new(Cell::new(false));
        let (of_flush, flushing_job) = (Rc::clone(&has_failed), Rc::clone(&job));
        let finish = JobFinish::new(move |complete| {
            Box::pin(async move {
                let finished = end(complete).await;
                let has_failed = has_failed.get() || (complete && job.leaves_a_part(&finished));
                let is_part = is_part || (has_failed && !self.needed.parts && !self.needed.whole);
                let handle = job.handle.clone();
                let closing = async move {
                    // Its users keep it, or else it is closed.
                    let closed = graph.disown(&self.node).await;
                    if let Some(remove) = self.remove.filter(|_| is_part) {
                        remove_once_left(remove, self.node, graph).await;
                    }
                    closed
                };
                let limit = if complete { LEFT_COMPLETE } else { LEFT_ALONE };
                finished.and(unless_given_up(handle, limit, closing).await)
            })
        });
        let flush = move || -> LocalFuture<'static, Result<()>> {
            Box::pin(async move {
                let flushed = flush().await;
                of_flush.set(flushing_job.leaves_a_part(&flushed));
                flushed
            })
        };
        (result, finish.behind(flush))
    }
}

/// The result of closing a target that may never answer. Once the job is cancelled, and `limit` has passed, the target
/// is closed without the job, and an error goes to the log.
async fn unless_given_up(
    job: JobHandle,
    limit: Duration,
    closing: impl Future<Output = Result<()>> + 'static,
) -> Result<()> {
    let is_left = Rc::new(Cell::new(false));
    let is_left_now = Rc::clone(&is_left);
    let mut closing = rt::spawn(async move {
        let closed = closing.await;
        if let (true, Err(error)) = (is_left_now.get(), &closed) {
            tracing::warn!(%error, "could not close the target of a job");
        }
        closed
    });
    if let Some(closed) = rt::within(limit, &mut closing).await {
        return closed;
    }
    job.unless_cancelled(closing).await.unwrap_or_else(|_| {
        is_left.set(true);
        Ok(())
    })
}

/// Removes a file that was made for a copy. Where the copy's target hangs the file goes once the target has answered, and this
/// returns at once.
async fn remove_once_left(remove: Box<dyn FnOnce()>, node: Arc<Node>, graph: Arc<Graph>) {
    if !graph.is_being_left(&node) {
        return remove();
    }
    let _removed = rt::spawn(async move {
        while graph.is_being_left(&node) {
            rt::sleep(LOOK).await;
        }
        drop(node);
        remove();
    });
}
