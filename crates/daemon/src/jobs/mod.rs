// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Background jobs with QEMU's states. They are tasks on the control thread.

mod access;
mod filter;
mod finish;
mod group;
mod work;

pub(crate) use filter::JobFilter;
pub(crate) use finish::JobFinish;
use group::JobGroup;
pub(crate) use work::{Closing, Needed, run_backup, run_merge, run_mirror, run_stream};

use crate::events::EventBus;
use crate::failure::failed;
use cowshed_image::Node;
use cowshed_image::dirty::DirtyMap;
use cowshed_image::node::LocalFuture;
use cowshed_jobs::faults::{ErrorAction, Failure, Judge, OnError, Side};
use cowshed_jobs::mirror::Mirror;
use cowshed_jobs::{DIFFERENT_SIZES, JobHandle};
use cowshed_qmp::{ErrorClass, QmpError, QmpResult};
use cowshed_storage::rt::{self, JoinHandle, within};
use cowshed_types::{Errno, Error, ErrorKind, Result};
use serde_json::{Value, json};
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

/// So long the answer to a command waits for the end of the job that it ends.
const END_PATIENCE: Duration = Duration::from_secs(1);

/// The pause between looks of a job that waits for its user.
const LOOK: Duration = Duration::from_millis(20);

/// The stage of a job in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    Created,
    Running,
    Paused,
    Ready,
    Standby,
    Waiting,
    Pending,
    Aborting,
    Concluded,
    Null,
}

impl Status {
    pub fn as_str(self) -> &'static str {
        match self {
            Status::Created => "created",
            Status::Running => "running",
            Status::Paused => "paused",
            Status::Ready => "ready",
            Status::Standby => "standby",
            Status::Waiting => "waiting",
            Status::Pending => "pending",
            Status::Aborting => "aborting",
            Status::Concluded => "concluded",
            Status::Null => "null",
        }
    }
}

/// The user's wish for a job that is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wish {
    /// Go on.
    None,
    /// End with the target in the place of the source.
    Complete,
    /// End with a target that is a copy.
    Stop,
}

/// A job.
pub(crate) struct Job {
    pub id: String,
    /// A `JobType`.
    pub kind: &'static str,
    pub handle: JobHandle,
    pub auto_finalize: bool,
    pub auto_dismiss: bool,
    /// Bytes a second; 0 is no limit.
    pub speed: Cell<u64>,
    /// Nodes that others must leave as they are.
    nodes: RefCell<Vec<Arc<Node>>>,
    /// The nodes among them that a backup may read all the same.
    readable: Vec<Arc<Node>>,
    /// The treatment of errors of the source, and of the target.
    on_error: (OnError, OnError),
    /// A `BlockDeviceIoStatus`.
    io_status: Cell<&'static str>,
    status: Cell<Status>,
    /// An error has paused it.
    is_stopped: Cell<bool>,
    wish: Cell<Wish>,
    finalize: Cell<bool>,
    /// It has nothing to do by itself.
    is_idle: Cell<bool>,
    /// It has nothing to copy: as in QEMU its work ends before the command that starts it.
    is_empty: Cell<bool>,
    /// It takes the copied parts away from its source.
    empties_source: Cell<bool>,
    /// Its target has had all of the disk once.
    was_ready: Cell<bool>,
    error: RefCell<Option<String>>,
    /// The parts that the target lacks, of a mirror whose writes go to both ends.
    lacking: RefCell<Option<Arc<DirtyMap>>>,
    /// Its mirror, while its way of working can be changed.
    mirror: RefCell<Option<Rc<Mirror>>>,
    /// The node that it has in QEMU's list of nodes.
    filter: RefCell<Option<JobFilter>>,
    /// The jobs that it ends together with.
    group: RefCell<Option<Rc<JobGroup>>>,
    /// Tasks that wait for another status.
    waiting: RefCell<Vec<Waker>>,
    events: EventBus,
}

impl Job {
    /// From now on the job reports whether the target has everything.
    pub fn follow_target(&self, lacking: Option<Arc<DirtyMap>>) {
        *self.lacking.borrow_mut() = lacking;
    }

    /// The nodes that it works on.
    pub fn nodes(&self) -> Vec<Arc<Node>> {
        self.nodes.borrow().clone()
    }

    /// It works on these nodes now.
    fn work_on(&self, nodes: Vec<Arc<Node>>) {
        *self.nodes.borrow_mut() = nodes;
    }

    /// True for a mirror whose writes go to both ends.
    pub fn holds_writes(&self) -> bool {
        self.lacking.borrow().is_some()
    }

    /// The mirror of this job that may be changed, or none any more.
    pub fn set_mirror(&self, mirror: Option<Rc<Mirror>>) {
        *self.mirror.borrow_mut() = mirror;
    }

    /// Has writes go to both ends, by a filter of this name. Once this has returned they do.
    pub async fn hold_writes(&self, filter_name: &str) -> Result<()> {
        let Some(mirror) = self.mirror.borrow().clone() else {
            return Err(Error::new(ErrorKind::Busy, format!("job '{}' has ended", self.id)));
        };
        let given = self.release_filter();
        mirror.hold_writes(given.as_deref().unwrap_or(filter_name), &self.handle).await?;
        self.follow_target(mirror.active_map());
        self.work_on(mirror.nodes());
        Ok(())
    }

    pub fn status(&self) -> Status {
        self.status.get()
    }

    fn enter(&self, status: Status) {
        self.was_ready.set(self.was_ready.get() || status == Status::Ready);
        self.status.set(status);
        self.wake();
        self.events.emit("JOB_STATUS_CHANGE", json!({"id": self.id, "status": status.as_str()}));
    }

    /// True for those that `query-block-jobs` lists.
    pub fn is_block_job(&self) -> bool {
        !matches!(self.kind, "create" | "amend")
    }

    fn block_event(&self, name: &'static str) {
        if !self.is_block_job() {
            return;
        }
        let progress = self.handle.progress();
        let mut data = json!({"type": self.kind, "device": self.id, "len": progress.len, "offset": progress.offset,
                              "speed": self.speed.get()});
        if let Some(error) = self.error.borrow().as_ref().filter(|_| name == "BLOCK_JOB_COMPLETED") {
            data["error"] = json!(error);
        }
        self.events.emit(name, data);
    }

    /// A `JobInfo`.
    pub fn info(&self) -> Value {
        let progress = self.handle.progress();
        let mut info = json!({"id": self.id, "type": self.kind, "status": self.status().as_str(),
                              "current-progress": progress.offset, "total-progress": progress.len});
        if let Some(error) = self.error.borrow().as_ref() {
            info["error"] = json!(error);
        }
        info
    }

    /// A `BlockJobInfo`.
    pub fn block_info(&self) -> Value {
        let (progress, status) = (self.handle.progress(), self.status());
        // A mirror that is pending is held where it was.
        let is_held = status == Status::Pending && self.is_mirror();
        let paused = matches!(status, Status::Paused | Status::Standby) || is_held;
        let mut info = json!({"type": self.kind, "device": self.id, "len": progress.len, "offset": progress.offset,
               "busy": status == Status::Running && self.speed.get() == 0 && !self.is_idle.get(), "paused": paused, "speed": self.speed.get(), "io-status": self.io_status.get(),
               "ready": matches!(status, Status::Ready | Status::Standby), "status": status.as_str(),
               "auto-finalize": self.auto_finalize, "auto-dismiss": self.auto_dismiss});
        if let Some(error) = self.error.borrow().as_ref() {
            info["error"] = json!(error);
        }
        if self.kind == "mirror" {
            // As in QEMU not before it was ready.
            let in_step = self.was_ready.get()
                && self.lacking.borrow().as_ref().is_some_and(|lacking| lacking.dirty_bytes() == 0);
            info["actively-synced"] = json!(in_step);
        }
        info
    }

    pub fn pause(&self) -> QmpResult<()> {
        match self.status() {
            Status::Running => self.enter(Status::Paused),
            Status::Ready => self.enter(Status::Standby),
            Status::Paused | Status::Standby => return Err(QmpError::generic("Job is already paused")),
            _ => return Err(self.cannot("pause")),
        }
        self.handle.pause();
        Ok(())
    }

    pub fn resume(&self) -> QmpResult<()> {
        match self.status() {
            Status::Paused => self.enter(Status::Running),
            Status::Standby => self.enter(Status::Ready),
            _ => return Err(QmpError::generic("Can't resume a job that was not paused")),
        }
        self.io_status.set("ok");
        self.is_stopped.set(false);
        self.handle.resume();
        Ok(())
    }

    /// Refuses another speed of a job that doesn't work any more.
    pub fn check_limitable(&self) -> QmpResult<()> {
        match self.status() {
            Status::Created | Status::Running | Status::Paused | Status::Ready | Status::Standby => Ok(()),
            _ => Err(self.cannot("set-speed")),
        }
    }

    /// `speed` in bytes a second; 0: no limit.
    pub fn set_speed(&self, speed: u64) {
        self.speed.set(speed);
        self.handle.set_speed(Some(speed));
    }

    /// True once nothing is left of its work.
    fn has_ended(&self) -> bool {
        matches!(self.status(), Status::Concluded | Status::Null)
    }

    /// True once it has ended, or waits for its user or for the others of its group.
    fn has_settled(&self) -> bool {
        let waits = match self.status() {
            Status::Waiting => self.group.borrow().is_some(),
            Status::Pending => match self.group.borrow().as_ref() {
                Some(group) => group.waits_for_its_user(),
                None => !self.auto_finalize,
            },
            _ => false,
        };
        waits || self.has_ended()
    }

    /// Waits for the end of the job, for at most `limit`; whether it came.
    async fn ended(&self, limit: Duration) -> bool {
        self.comes_to(limit, Job::has_ended).await
    }

    async fn comes_to(&self, limit: Duration, is_there: impl Fn(&Job) -> bool) -> bool {
        let end = poll_fn(|context| match is_there(self) {
            true => Poll::Ready(()),
            false => {
                self.waiting.borrow_mut().push(context.waker().clone());
                Poll::Pending
            }
        });
        within(limit, end).await.is_some()
    }

    /// Waits a moment for the end of a job that is about to end.
    pub async fn await_end(&self) {
        self.ended(END_PATIENCE).await;
    }

    /// `wish` must be one that ends the job.
    pub fn end(&self, wish: Wish) -> QmpResult<()> {
        match self.status() {
            // A paused job ends once it goes on.
            Status::Ready | Status::Standby => {
                self.wish.set(wish);
                Ok(())
            }
            _ => Err(self.cannot("complete")),
        }
    }

    /// Cancels it. As in QEMU the answer comes behind the end of all but mirrors and jobs that an error has paused, unless
    /// that takes long.
    pub async fn cancel(&self) -> QmpResult<()> {
        match self.status() {
            Status::Concluded | Status::Null | Status::Aborting => return Err(self.cannot("cancel")),
            status => {
                let is_stopped = self.is_stopped.get() && matches!(status, Status::Paused | Status::Standby);
                self.end_pause();
                self.handle.cancel();
                let group = self.group.borrow().clone();
                if let Some(group) = group.filter(|_| status == Status::Waiting) {
                    group.fail(&self.id);
                }
                if status == Status::Pending || !(self.is_mirror() || is_stopped) {
                    self.ended(END_PATIENCE).await;
                }
            }
        }
        Ok(())
    }

    pub async fn finalize(&self) -> QmpResult<()> {
        match self.status() {
            Status::Pending => {
                self.finalize.set(true);
                self.wake();
                self.ended(END_PATIENCE).await;
                Ok(())
            }
            _ => Err(self.cannot("finalize")),
        }
    }

    /// True for a copy that goes on until the user decides about its end.
    fn is_mirror(&self) -> bool {
        self.mirror.borrow().is_some()
    }

    /// It only waits for others, and is never busy.
    pub fn set_idle(&self, is_idle: bool) {
        self.is_idle.set(is_idle);
    }

    /// True when an end of its work with this result leaves no more than a part of a copy. A mirror that was ready has had all of
    /// the disk, whatever failed later. A copy that only holds the past ends by being cancelled.
    pub fn leaves_a_part(&self, result: &Result<()>) -> bool {
        let held_the_past = |error: &Error| self.is_idle.get() && error.kind() == ErrorKind::Cancelled;
        result.as_ref().is_err_and(|error| !self.was_ready.get() && !held_the_past(error))
    }

    /// Ends a pause, as cancelling does.
    fn end_pause(&self) {
        match self.status() {
            Status::Paused => self.enter(Status::Running),
            Status::Standby => self.enter(Status::Ready),
            _ => return,
        }
        self.handle.resume();
    }

    fn wake(&self) {
        self.waiting.take().into_iter().for_each(Waker::wake);
    }

    /// It has nothing to copy.
    pub fn set_empty(&self, is_empty: bool) {
        self.is_empty.set(is_empty);
    }

    /// Tells that it waits for its user.
    fn say_pending(&self) {
        if self.is_block_job() {
            self.events.emit("BLOCK_JOB_PENDING", json!({"type": self.kind, "id": self.id}));
        }
    }

    async fn wait_for_finalize(&self) -> Result<()> {
        self.say_pending();
        while !self.finalize.get() {
            if self.handle.is_cancelled() {
                return self.handle.pause_point().await;
            }
            let mut is_first = true;
            let woken = poll_fn(|context| match std::mem::take(&mut is_first) {
                true => {
                    self.waiting.borrow_mut().push(context.waker().clone());
                    Poll::Pending
                }
                false => Poll::Ready(()),
            });
            // The handle wakes no task.
            within(LOOK, woken).await;
        }
        Ok(())
    }

    /// Refuses `block-job-change` of a job that doesn't work any more, or not yet.
    pub fn check_changeable(&self) -> QmpResult<()> {
        match self.status() {
            Status::Running | Status::Paused | Status::Ready | Status::Standby => Ok(()),
            _ => Err(self.cannot("change")),
        }
    }

    fn cannot(&self, verb: &str) -> QmpError {
        let status = self.status().as_str();
        QmpError::generic(format!("Job '{}' in state '{status}' cannot accept command verb '{verb}'", self.id))
    }
}

/// The system's words for the error, and nothing else.
pub(crate) fn words_of(errno: Errno) -> String {
    Error::os(errno, "").sentence().trim_start_matches(": ").to_owned()
}

impl Judge for Job {
    fn judge(&self, failure: &Failure) -> ErrorAction {
        let (policy, operation) = match failure.side {
            Side::Read => (self.on_error.0, "read"),
            Side::Write => (self.on_error.1, "write"),
        };
        let action = policy.action(&failure.error);
        let word = match action {
            ErrorAction::Report => "report",
            ErrorAction::Ignore => "ignore",
            ErrorAction::Stop => "stop",
        };
        tracing::info!(job = self.id, operation, action = word, error = %failure.error, "job met an error");
        self.events.emit("BLOCK_JOB_ERROR", json!({"device": self.id, "operation": operation, "action": word}));
        if action == ErrorAction::Stop {
            self.io_status.set(if failure.error.kind() == ErrorKind::NoSpace { "nospace" } else { "failed" });
            self.is_stopped.set(true);
            match self.status() {
                Status::Running => self.enter(Status::Paused),
                Status::Ready => self.enter(Status::Standby),
                _ => {}
            }
        }
        action
    }
}

/// A job and its work, whose result has the steps that end it.
pub(crate) type JobWork = (Rc<Job>, LocalFuture<'static, (Result<()>, JobFinish)>);

/// The description of a new job.
pub(crate) struct JobSpec {
    pub id: String,
    pub kind: &'static str,
    pub auto_finalize: bool,
    pub auto_dismiss: bool,
    pub speed: u64,
    pub nodes: Vec<Arc<Node>>,
    /// The nodes among them that a backup may read all the same.
    pub readable: Vec<Arc<Node>>,
    /// The treatment of errors of the source, and of the target.
    pub on_error: (OnError, OnError),
}

impl JobSpec {
    /// A backup may read these nodes of it.
    pub fn lending(self, readable: Vec<Arc<Node>>) -> JobSpec {
        JobSpec { readable, ..self }
    }
}

fn cancel(job: &Job) {
    let is_waiting = job.status() == Status::Waiting;
    job.end_pause();
    job.handle.cancel();
    // It can't end before the others of its group.
    let group = job.group.borrow().clone();
    if let Some(group) = group.filter(|_| is_waiting) {
        group.fail(&job.id);
    }
}

/// The jobs.
#[derive(Default)]
pub(crate) struct Jobs {
    list: RefCell<Vec<Rc<Job>>>,
    /// With the ids of their jobs.
    tasks: RefCell<Vec<(String, JoinHandle<()>)>>,
}

impl Jobs {
    /// All jobs, the newest first, as QEMU lists them.
    pub fn newest_first(&self) -> impl Iterator<Item = Rc<Job>> {
        self.list().into_iter().rev()
    }

    /// All jobs, in the order of their coming.
    pub fn list(&self) -> Vec<Rc<Job>> {
        self.list.borrow().clone()
    }

    /// For the `job-` commands.
    pub fn find(&self, id: &str) -> QmpResult<Rc<Job>> {
        let found = self.list.borrow().iter().find(|job| job.id == id).cloned();
        found.ok_or_else(|| QmpError::generic("Job not found"))
    }

    /// For the `block-job-` commands.
    pub fn find_block(&self, id: &str) -> QmpResult<Rc<Job>> {
        let found = self.find(id).ok().filter(|job| job.is_block_job());
        found.ok_or_else(|| QmpError::new(ErrorClass::DeviceNotActive, format!("Block job '{id}' not found")))
    }

    /// Adds a job; its id must be free.
    pub fn add(&self, spec: JobSpec, events: &EventBus) -> QmpResult<Rc<Job>> {
        if self.find(&spec.id).is_ok() {
            return Err(QmpError::generic(format!("Job ID '{}' already in use", spec.id)));
        }
        let handle = JobHandle::new();
        handle.set_speed(Some(spec.speed));
        let job = Rc::new(Job {
            id: spec.id,
            kind: spec.kind,
            handle,
            auto_finalize: spec.auto_finalize,
            auto_dismiss: spec.auto_dismiss,
            speed: Cell::new(spec.speed),
            nodes: RefCell::new(spec.nodes),
            readable: spec.readable,
            on_error: spec.on_error,
            io_status: Cell::new("ok"),
            status: Cell::new(Status::Created),
            is_stopped: Cell::new(false),
            wish: Cell::new(Wish::None),
            finalize: Cell::new(false),
            is_idle: Cell::new(false),
            is_empty: Cell::new(false),
            empties_source: Cell::new(false),
            was_ready: Cell::new(false),
            error: RefCell::default(),
            lacking: RefCell::default(),
            mirror: RefCell::default(),
            filter: RefCell::default(),
            group: RefCell::default(),
            waiting: RefCell::default(),
            events: events.clone(),
        });
        self.list.borrow_mut().push(Rc::clone(&job));
        job.enter(Status::Created);
        Ok(job)
    }

    /// As [`Jobs::start`] of backups that begin at one moment: QEMU shows that it stops them for a moment to put their filters
    /// in, the newest first. They end together where they are `grouped`.
    pub async fn start_backups(self: &Rc<Self>, backups: Vec<JobWork>, grouped: bool) {
        if grouped {
            JobGroup::join(backups.iter().map(|(job, _)| Rc::clone(job)).collect());
        }
        for (job, _) in backups.iter().rev() {
            job.enter(Status::Running);
            job.enter(Status::Paused);
        }
        let empty: Vec<_> = backups.iter().map(|(job, _)| Rc::clone(job)).filter(|job| job.is_empty.get()).collect();
        for (job, _) in backups.iter().rev() {
            job.enter(Status::Running);
        }
        for (job, work) in backups {
            self.spawn(job, work);
        }
        for job in empty.iter().rev() {
            job.comes_to(END_PATIENCE, Job::has_settled).await;
        }
    }

    /// Runs a job's work as a task, and its life around it. The work's result has the steps that end it, well or not.
    pub fn start(self: &Rc<Self>, job: Rc<Job>, work: impl Future<Output = (Result<()>, JobFinish)> + 'static) {
        job.enter(Status::Running);
        self.spawn(job, work);
    }

    /// As [`Jobs::start`] of a job that is running already.
    fn spawn(self: &Rc<Self>, job: Rc<Job>, work: impl Future<Output = (Result<()>, JobFinish)> + 'static) {
        let jobs = Rc::clone(self);
        let id = job.id.clone();
        let task = rt::spawn(async move {
            let (mut result, finish) = work.await;
            let group = job.group.borrow().clone();
            if let Some(group) = group {
                return group.arrive(&jobs, job, result, finish).await;
            }
            if result.is_ok() {
                job.enter(Status::Waiting);
                job.enter(Status::Pending);
                if !job.auto_finalize {
                    result = job.wait_for_finalize().await;
                }
            }
            if result.is_ok() {
                result = (finish.flush)().await;
            }
            let finished = (finish.end)(result.is_ok()).await;
            jobs.conclude(&job, result.and(finished));
        });
        let mut tasks = self.tasks.borrow_mut();
        tasks.retain(|(_, task)| !task.is_finished());
        tasks.push((id, task));
    }

    /// Cancels all jobs, the newest first, and waits for none.
    pub fn cancel_all(&self) {
        self.newest_first().for_each(|job| cancel(&job));
    }

    fn conclude(&self, job: &Rc<Job>, result: Result<()>) {
        job.set_filter(None);
        let cancelled = matches!(&result, Err(error) if error.kind() == ErrorKind::Cancelled);
        if let Err(error) = &result {
            tracing::info!(job = job.id, %error, "job failed");
            *job.error.borrow_mut() = Some(match job.is_block_job() {
                true if error.message() == DIFFERENT_SIZES => DIFFERENT_SIZES.to_owned(),
                // The log has the whole.
                true => words_of(error.errno()),
                false => failed(error.clone()).description,
            });
            if job.status() != Status::Aborting {
                job.enter(Status::Aborting);
            }
        }
        job.block_event(if cancelled { "BLOCK_JOB_CANCELLED" } else { "BLOCK_JOB_COMPLETED" });
        job.enter(Status::Concluded);
        if job.auto_dismiss {
            self.dismiss(job);
        }
    }

    /// Forgets a job that has concluded.
    pub fn dismiss(&self, job: &Rc<Job>) {
        self.list.borrow_mut().retain(|known| !Rc::ptr_eq(known, job));
        job.enter(Status::Null);
    }

    /// Takes a job back that has not been started.
    pub fn abandon(&self, job: &Rc<Job>) {
        job.enter(Status::Aborting);
        job.enter(Status::Concluded);
        self.dismiss(job);
    }

    /// For the command `job-dismiss`.
    pub fn dismiss_by_user(&self, id: &str) -> QmpResult<()> {
        let job = self.find(id)?;
        match job.status() {
            Status::Concluded => {
                self.dismiss(&job);
                Ok(())
            }
            _ => Err(job.cannot("dismiss")),
        }
    }

    /// Cancels all jobs and waits for their ends, for at most `limit`. The ids of those that don't end. As in QEMU all of them
    /// pause first, and the newest one goes first.
    pub async fn stop(&self, limit: Duration) -> Vec<String> {
        let jobs = self.list();
        for job in &jobs {
            if matches!(job.status(), Status::Running | Status::Ready) {
                // It may end just now.
                let _ = job.pause();
            }
        }
        let end = rt::now() + limit;
        let mut late = Vec::new();
        for (at, job) in jobs.iter().enumerate().rev() {
            cancel(job);
            let share = end.saturating_sub(rt::now()) / u32::try_from(at + 1).unwrap_or(u32::MAX);
            if !job.ended(share).await {
                late.push(job.id.clone());
            } else if job.status() == Status::Concluded {
                self.dismiss(job);
            }
        }
        let tasks = std::mem::take(&mut *self.tasks.borrow_mut());
        for (id, task) in tasks {
            if within(end.saturating_sub(rt::now()), task).await.is_none() && !late.contains(&id) {
                late.push(id);
            }
        }
        late
    }
}
