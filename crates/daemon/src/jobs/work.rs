// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The work of the jobs, with what ends it.

use super::{Finish, Job, LOOK, Status, Wish};
use cowshed_block::Result;
use cowshed_jobs::backup::Backup;
use cowshed_jobs::commit::merge::Merge;
use cowshed_jobs::mirror::Mirror;
use cowshed_jobs::stream::Stream;
use cowshed_storage::rt;
use std::rc::Rc;

/// Copies until both are the same, then goes on doing so until the user says what to do.
pub(crate) async fn run_mirror(job: Rc<Job>, mirror: Mirror) -> (Result<()>, Finish) {
    let handle = job.handle.clone();
    let mut result = mirror.catch_up(&handle, &*job).await;
    if result.is_ok() {
        job.enter(Status::Ready);
        job.block_event("BLOCK_JOB_READY");
    }
    while result.is_ok() && job.wish.get() == Wish::None {
        rt::sleep(LOOK).await;
        result = mirror.catch_up(&handle, &*job).await;
    }
    let pivot = job.wish.get() == Wish::Complete;
    let finish: Finish = Box::new(move |complete| {
        Box::pin(async move {
            match complete {
                true => mirror.finish(pivot).await,
                false => mirror.end().await,
            }
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
