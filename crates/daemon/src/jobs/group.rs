// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Jobs that end together (`completion-mode` `grouped`): all of them complete, or none does.

use super::{Job, JobFinish, Jobs, LOOK, Status};
use cowshed_storage::rt;
use cowshed_types::{Error, ErrorKind, Result};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// The jobs, in the order of their coming. It goes with the last of them.
#[derive(Default)]
pub(super) struct JobGroup {
    members: RefCell<Vec<Rc<Job>>>,
    /// Those whose work has ended.
    arrived: RefCell<Vec<Arrival>>,
    has_failed: Cell<bool>,
}

struct Arrival {
    job: Rc<Job>,
    result: Result<()>,
    finish: JobFinish,
}

impl Arrival {
    /// Makes the job's copies durable.
    async fn flushed(self) -> Arrival {
        let Arrival { job, finish: JobFinish { flush, end }, .. } = self;
        let result = flush().await;
        Arrival { job, result, finish: JobFinish::new(end) }
    }
}

impl JobGroup {
    /// Has these jobs end together.
    pub fn join(jobs: Vec<Rc<Job>>) {
        let group = Rc::new(JobGroup::default());
        for job in &jobs {
            *job.group.borrow_mut() = Some(Rc::clone(&group));
        }
        *group.members.borrow_mut() = jobs;
    }

    /// One of the jobs asks its user for its end, and so all wait.
    pub fn waits_for_its_user(&self) -> bool {
        self.members.borrow().iter().any(|job| !job.auto_finalize)
    }

    fn newest_first(&self) -> Vec<Rc<Job>> {
        self.members.borrow().iter().rev().cloned().collect()
    }

    /// The work of the job `id` failed, or it was cancelled: so are the others.
    pub fn fail(&self, id: &str) {
        if self.has_failed.replace(true) {
            return;
        }
        let members = self.newest_first();
        // As in QEMU the newest one is ended first, and its end may have to wait for the work of others.
        if let Some(first) = members.first().filter(|job| matches!(job.status(), Status::Waiting | Status::Pending)) {
            first.enter(Status::Aborting);
        }
        for job in members.into_iter().filter(|job| job.id != id) {
            job.handle.cancel();
            // A job that pauses looks at this no more.
            job.handle.resume();
        }
    }

    /// The work of a job has ended. The last one ends them all.
    pub async fn arrive(&self, jobs: &Jobs, job: Rc<Job>, result: Result<()>, finish: JobFinish) {
        match result.is_ok() {
            true if self.has_failed.get() => {}
            true => job.enter(Status::Waiting),
            false => {
                job.enter(Status::Aborting);
                self.fail(&job.id);
            }
        }
        self.arrived.borrow_mut().push(Arrival { job, result, finish });
        if self.arrived.borrow().len() == self.members.borrow().len() {
            self.end(jobs).await;
        }
    }

    async fn end(&self, jobs: &Jobs) {
        let members = self.newest_first();
        if !self.has_failed.get() {
            for job in &members {
                job.enter(Status::Pending);
                if !job.auto_finalize {
                    job.say_pending();
                }
            }
            if let Some(cancelled) = wait_for_finalize(&members).await {
                self.fail(&cancelled.id);
            }
        }
        let mut arrived = self.arrived.take();
        let place = |one: &Arrival| members.iter().position(|job| Rc::ptr_eq(job, &one.job));
        arrived.sort_by_key(place);
        // No job completes before the targets of all are durable.
        let mut ready = Vec::new();
        for arrival in arrived {
            let arrival = if self.has_failed.get() { arrival } else { arrival.flushed().await };
            if arrival.result.is_err() {
                self.fail(&arrival.job.id);
            }
            ready.push(arrival);
        }
        let mut ready = ready.into_iter();
        while !self.has_failed.get()
            && let Some(Arrival { job, finish, .. }) = ready.next()
        {
            let finished = (finish.end)(true).await;
            self.has_failed.set(finished.is_err());
            conclude(jobs, &job, finished);
        }
        // Side by side: the users of one disk don't wait for the target of another. They are reported in their order.
        let ends: Vec<_> = ready
            .map(|Arrival { job, result, finish }| {
                rt::spawn(async move {
                    // That it was not whole counts.
                    let _ended = (finish.end)(false).await;
                    (job, result)
                })
            })
            .collect();
        for end in ends {
            let (job, result) = end.await;
            let cancelled = || Err(Error::new(ErrorKind::Cancelled, "a job that it ends together with has failed"));
            conclude(jobs, &job, result.and_then(|()| cancelled()));
        }
        self.members.borrow_mut().clear();
    }
}

fn conclude(jobs: &Jobs, job: &Rc<Job>, result: Result<()>) {
    *job.group.borrow_mut() = None;
    jobs.conclude(job, result);
}

/// Waits until the user lets them end, where one of them asks for it; one that is cancelled meanwhile.
async fn wait_for_finalize(members: &[Rc<Job>]) -> Option<Rc<Job>> {
    let asking: Vec<&Rc<Job>> = members.iter().filter(|job| !job.auto_finalize).collect();
    while !asking.is_empty() && !members.iter().any(|job| job.finalize.get()) {
        if let Some(cancelled) = members.iter().find(|job| job.handle.is_cancelled()) {
            return Some(Rc::clone(cancelled));
        }
        rt::sleep(LOOK).await;
    }
    None
}
