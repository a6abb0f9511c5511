// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The work of the jobs, with what ends it.

use super::{Finish, Job, LOOK, Status, Wish};
use cowshed_block::Result;
use cowshed_image::Node;
use cowshed_image::graph::Graph;
use cowshed_jobs::backup::Backup;
use cowshed_jobs::commit::merge::Merge;
use cowshed_jobs::mirror::Mirror;
use cowshed_jobs::stream::Stream;
use cowshed_storage::rt;
use std::rc::Rc;
use std::sync::Arc;

/// Copies until both are the same, then goes on doing so until the user says what to do.
pub(crate) async fn run_mirror(job: Rc<Job>, mirror: Rc<Mirror>) -> (Result<()>, Finish) {
    let handle = job.handle.clone();
    let mut result = Ok(());
    let mut is_ready = false;
    while result.is_ok() && (job.wish.get() == Wish::None || job.status() == Status::Standby) {
        if is_ready {
            rt::sleep(LOOK).await;
        }
        result = mirror.catch_up(&handle, &*job).await;
        if result.is_ok() && !is_ready {
            is_ready = true;
            job.enter(Status::Ready);
            job.block_event("BLOCK_JOB_READY");
        }
    }
    let pivot = job.wish.get() == Wish::Complete;
    let finish: Finish = Box::new(move |complete| {
        Box::pin(async move {
            let finished = match complete {
                true => mirror.finish(pivot).await,
                false => mirror.end().await,
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
        let finish: Finish = Box::new(move |complete| {
            Box::pin(async move {
                match complete {
                    true => $work.finish().await,
                    false => $work.end().await,
                }
            })
        });
        (result, finish)
    }};
}

/// Takes layers out of the middle of a chain.
pub(crate) async fn run_merge(job: Rc<Job>, merge: Merge) -> (Result<()>, Finish) {
    copy_once!(job, merge)
}

/// Takes over what the layers below an image hold.
pub(crate) async fn run_stream(job: Rc<Job>, stream: Stream) -> (Result<()>, Finish) {
    copy_once!(job, stream)
}

/// Copies a disk as it was at the start.
pub(crate) async fn run_backup(job: Rc<Job>, backup: Backup) -> (Result<()>, Finish) {
    copy_once!(job, backup)
}

/// Closes a node at the end of a job, which was opened for it, unless somebody uses it by then.
pub(crate) async fn then_close(
    work: impl Future<Output = (Result<()>, Finish)>,
    graph: Arc<Graph>,
    node: Arc<Node>,
) -> (Result<()>, Finish) {
    let (result, finish) = work.await;
    let finish: Finish = Box::new(move |complete| {
        Box::pin(async move {
            let finished = finish(complete).await;
            // Its users keep it, or else it is closed.
            finished.and(graph.disown(&node).await)
        })
    });
    (result, finish)
}
