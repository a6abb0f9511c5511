// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Jobs: starting, steering, listing.

use super::block_jobs::speed;
use super::{Arguments, Group, change, command, failed, nothing};
use crate::jobs::{Status, Wish};
use crate::state::Daemon;
use cowshed_qmp::{QmpError, QmpResult};
use serde_json::Value;
use std::rc::Rc;

pub(super) const GROUP: Group = Group {
    schema: "
enum JobType: commit stream mirror backup create amend
enum BlockDeviceIoStatus: ok failed nospace
enum IoOperationType: read write
enum BlockErrorAction: ignore report stop
enum JobStatus: created running paused ready standby waiting pending aborting concluded null
object JobInfo: id: str, type: JobType, status: JobStatus, current-progress: int, total-progress: int, error?: str
object BlockJobInfo: type: JobType, device: str, len: int, offset: int, busy: bool, paused: bool, speed: int
  , io-status: BlockDeviceIoStatus, ready: bool, status: JobStatus, auto-finalize: bool, auto-dismiss: bool
  , error?: str, actively-synced?: bool
command query-jobs -> [JobInfo]
command query-block-jobs -> [BlockJobInfo]
command job-pause: id: str
command job-resume: id: str
command job-cancel: id: str
command job-complete: id: str
command job-dismiss: id: str
command job-finalize: id: str
command block-job-pause: device: str
command block-job-resume: device: str
command block-job-cancel: device: str, force?: bool
command block-job-complete: device: str
command block-job-dismiss: id: str
command block-job-finalize: id: str
command block-job-set-speed: device: str, speed: int
object BlockJobChangeOptionsMirror: copy-mode: MirrorCopyMode
object BlockJobChangeOptions: id: str, type: JobType | type = mirror: BlockJobChangeOptionsMirror
command block-job-change(BlockJobChangeOptions)
event BLOCK_JOB_ERROR: device: str, operation: IoOperationType, action: BlockErrorAction
event JOB_STATUS_CHANGE: id: str, status: JobStatus
event BLOCK_JOB_COMPLETED: type: JobType, device: str, len: int, offset: int, speed: int, error?: str
event BLOCK_JOB_CANCELLED: type: JobType, device: str, len: int, offset: int, speed: int
event BLOCK_JOB_READY: type: JobType, device: str, len: int, offset: int, speed: int
event BLOCK_JOB_PENDING: type: JobType, id: str
",
    commands: &[
        command!("query-jobs", query_jobs),
        command!("query-block-jobs", query_block_jobs),
        command!("job-pause", job_pause),
        command!("job-resume", job_resume),
        command!("job-cancel", job_cancel),
        command!("job-complete", job_complete),
        command!("job-dismiss", job_dismiss),
        command!("job-finalize", job_finalize),
        command!("block-job-pause", block_job_pause),
        command!("block-job-resume", block_job_resume),
        command!("block-job-cancel", block_job_cancel),
        command!("block-job-complete", block_job_complete),
        command!("block-job-dismiss", block_job_dismiss),
        command!("block-job-finalize", block_job_finalize),
        command!("block-job-set-speed", block_job_set_speed),
        change!("block-job-change", block_job_change),
    ],
};

async fn query_jobs(daemon: Rc<Daemon>, _arguments: Arguments) -> QmpResult<Value> {
    Ok(daemon.jobs.newest_first().map(|job| job.info()).collect())
}

async fn query_block_jobs(daemon: Rc<Daemon>, _arguments: Arguments) -> QmpResult<Value> {
    Ok(daemon.jobs.newest_first().filter(|job| job.is_block_job()).map(|job| job.block_info()).collect())
}

async fn job_pause(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    daemon.jobs.find(arguments.text("id"))?.pause()?;
    nothing()
}

async fn job_resume(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    daemon.jobs.find(arguments.text("id"))?.resume()?;
    nothing()
}

async fn job_cancel(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    daemon.jobs.find(arguments.text("id"))?.cancel().await?;
    nothing()
}

async fn job_complete(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    daemon.jobs.find(arguments.text("id"))?.end(Wish::Complete)?;
    nothing()
}

async fn job_dismiss(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    daemon.jobs.dismiss_by_user(arguments.text("id"))?;
    nothing()
}

async fn job_finalize(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    daemon.jobs.find(arguments.text("id"))?.finalize().await?;
    nothing()
}

async fn block_job_pause(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    daemon.jobs.find_block(arguments.text("device"))?.pause()?;
    nothing()
}

async fn block_job_resume(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    daemon.jobs.find_block(arguments.text("device"))?.resume()?;
    nothing()
}

async fn block_job_complete(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    daemon.jobs.find_block(arguments.text("device"))?.end(Wish::Complete)?;
    nothing()
}

async fn block_job_dismiss(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    daemon.jobs.find_block(arguments.text("id"))?;
    job_dismiss(daemon, arguments).await
}

async fn block_job_finalize(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    daemon.jobs.find_block(arguments.text("id"))?;
    job_finalize(daemon, arguments).await
}

/// A copy that is ready ends as a copy, unless `force` leaves it as it is.
async fn block_job_cancel(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let job = daemon.jobs.find_block(arguments.text("device"))?;
    let is_forced = arguments.flag("force", false);
    if !is_forced && matches!(job.status(), Status::Paused | Status::Standby) {
        return Err(QmpError::generic(format!("The block job for device '{}' is currently paused", job.id)));
    }
    match is_forced {
        false if job.end(Wish::Stop).is_ok() => {}
        _ => job.cancel().await?,
    }
    nothing()
}

async fn block_job_set_speed(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let job = daemon.jobs.find_block(arguments.text("device"))?;
    job.check_limitable()?;
    job.set_speed(speed(&arguments)?);
    nothing()
}

/// A mirror that copies in the background may be told to hold writes until they are on both ends; not the other way.
async fn block_job_change(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let job = daemon.jobs.find_block(arguments.text("id"))?;
    job.check_changeable()?;
    if job.kind != "mirror" {
        return Err(QmpError::generic("Job type does not support change"));
    }
    let kind = arguments.text("type");
    if job.kind != kind {
        return Err(QmpError::generic(format!("Job '{}' is '{}' job, not '{kind}'", job.id, job.kind)));
    }
    match (arguments.text("copy-mode"), job.holds_writes()) {
        ("write-blocking", false) => job.hold_writes(daemon.graph.generate_name().name()).await.map_err(failed)?,
        ("write-blocking", true) | ("background", false) => {}
        _ => return Err(QmpError::generic("Change to copy mode 'background' is not implemented")),
    }
    nothing()
}
