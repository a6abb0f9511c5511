// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The state that a job shares with its watcher: progress, cancelling, pausing and a speed limit.

use crate::rate::RateLimit;
use cowshed_storage::rt;
use cowshed_types::{Error, ErrorKind, Result};
use futures_util::future::{Either, select};
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

/// The progress of a job, in units of its own (bytes, for all jobs of this crate). `len` may grow while it runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Work done.
    pub offset: u64,
    /// The whole work, as far as known.
    pub len: u64,
}

impl Progress {
    /// Done so far, in percent from 0 to 100; nothing to do counts as done.
    pub fn percent(&self) -> f64 {
        if self.len == 0 { 100.0 } else { self.offset.min(self.len) as f64 * 100.0 / self.len as f64 }
    }
}

type ProgressListener = Box<dyn Fn(Progress) + Send + Sync>;
type Measure = Box<dyn Fn(Progress) -> Option<Progress> + Send + Sync>;

/// The speed limit.
#[derive(Default)]
struct Speed {
    limit: Option<RateLimit>,
    /// Grows with each change: a wait by an older limit is computed anew.
    changes: u64,
}

impl Speed {
    /// The time to wait before `bytes` are copied, and the change that it holds for.
    fn take(&mut self, bytes: u64) -> (Duration, u64) {
        let wait = self.limit.as_mut().map_or(Duration::ZERO, |rate| rate.take(bytes, Instant::now()));
        (wait, self.changes)
    }
}

#[derive(Default)]
struct Shared {
    offset: AtomicU64,
    len: AtomicU64,
    cancelled: Arc<AtomicBool>,
    paused: AtomicBool,
    sleepers: Mutex<Vec<Waker>>,
    speed: Mutex<Speed>,
    watcher: Option<ProgressListener>,
    measure: Mutex<Option<Measure>>,
}

/// The handle of a job; clones are the same job. Any thread may watch, pause, cancel or slow it.
#[derive(Clone, Default)]
pub struct JobHandle(Arc<Shared>);

/// The longest sleep between two looks at the cancel flag and the speed while the speed limit holds a job back.
const NAP: Duration = Duration::from_millis(100);

impl JobHandle {
    /// A handle without a watcher.
    pub fn new() -> Self {
        Self::default()
    }

    /// A handle that calls `watcher` at each progress, on the thread of the job: it must be quick.
    pub fn watched(watcher: impl Fn(Progress) + Send + Sync + 'static) -> Self {
        JobHandle(Arc::new(Shared { watcher: Some(Box::new(watcher)), ..Shared::default() }))
    }

    /// The progress of the job.
    pub fn progress(&self) -> Progress {
        let known = Progress { offset: self.0.offset.load(Ordering::Relaxed), len: self.0.len.load(Ordering::Relaxed) };
        let measured = self.measure().as_ref().and_then(|measure| measure(known));
        if let Some(Progress { offset, len }) = measured {
            self.0.offset.store(offset, Ordering::Relaxed);
            self.0.len.store(len, Ordering::Relaxed);
        }
        measured.unwrap_or(known)
    }

    fn measure(&self) -> MutexGuard<'_, Option<Measure>> {
        self.0.measure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on each look at the progress asks `measure` too, which gets the progress known so far. So work that
    /// others do for the job counts. `None` leaves the progress as it is.
    pub fn measure_by(&self, measure: impl Fn(Progress) -> Option<Progress> + Send + Sync + 'static) {
        *self.measure() = Some(Box::new(measure));
    }

    /// Looks once more, for the last time.
    pub fn end_measure(&self) {
        self.progress();
        *self.measure() = None;
    }

    /// Asks the job to stop: it fails with [`ErrorKind::Cancelled`] at its next pause point.
    pub fn cancel(&self) {
        self.0.cancelled.store(true, Ordering::Release);
        self.wake();
    }

    /// The flag that [`JobHandle::cancel`] sets. A signal handler can do no more than set it. The job then stops at its
    /// next pause point, unless it waits there already.
    pub fn cancel_flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.0.cancelled)
    }

    /// True after [`JobHandle::cancel`].
    pub fn is_cancelled(&self) -> bool {
        self.0.cancelled.load(Ordering::Acquire)
    }

    /// Holds the job at its next pause point; requests in flight still finish.
    pub fn pause(&self) {
        self.0.paused.store(true, Ordering::Release);
    }

    /// Lets a paused job go on.
    pub fn resume(&self) {
        self.0.paused.store(false, Ordering::Release);
        self.wake();
    }

    /// True when the speed has a limit.
    pub fn has_limit(&self) -> bool {
        self.speed().limit.is_some()
    }

    fn speed(&self) -> MutexGuard<'_, Speed> {
        self.0.speed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Limits the job to this many bytes a second; `None` or 0 takes the limit away. A job that waits by the old limit goes by
    /// the new one within a tenth of a second.
    pub fn set_speed(&self, bytes_per_second: Option<u64>) {
        let limit = bytes_per_second.filter(|rate| *rate > 0).map(|rate| RateLimit::new(rate, Instant::now()));
        let mut speed = self.speed();
        *speed = Speed { limit, changes: speed.changes.wrapping_add(1) };
    }

    /// Sets the whole work.
    pub fn set_len(&self, len: u64) {
        self.0.len.store(len, Ordering::Relaxed);
        self.tell();
    }

    /// Adds to the whole work.
    pub fn grow(&self, more: u64) {
        self.0.len.fetch_add(more, Ordering::Relaxed);
    }

    /// Sets how far the job is, for jobs that count anew in each of their phases.
    pub fn set_progress(&self, offset: u64, len: u64) {
        self.0.offset.store(offset, Ordering::Relaxed);
        self.0.len.store(len, Ordering::Relaxed);
        self.tell();
    }

    /// Counts work as done.
    pub fn advance(&self, done: u64) {
        self.0.offset.fetch_add(done, Ordering::Relaxed);
        self.tell();
    }

    /// A pause point: waits while the job is paused, and fails when it was cancelled.
    pub async fn pause_point(&self) -> Result<()> {
        std::future::poll_fn(|context| {
            if self.is_cancelled() || !self.0.paused.load(Ordering::Acquire) {
                return Poll::Ready(());
            }
            let mut sleepers = self.0.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
            // Looked at again under the lock: a resume in between would find no waker to call.
            if self.is_cancelled() || !self.0.paused.load(Ordering::Acquire) {
                return Poll::Ready(());
            }
            sleepers.push(context.waker().clone());
            Poll::Pending
        })
        .await;
        if self.is_cancelled() { Err(Error::new(ErrorKind::Cancelled, "the job was cancelled")) } else { Ok(()) }
    }

    /// Waits until the job is cancelled, for work that may wait without end: it is raced with this.
    pub async fn cancelled(&self) {
        std::future::poll_fn(|context| {
            let mut sleepers = self.0.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
            if self.is_cancelled() {
                return Poll::Ready(());
            }
            if !sleepers.iter().any(|sleeper| sleeper.will_wake(context.waker())) {
                sleepers.push(context.waker().clone());
            }
            Poll::Pending
        })
        .await;
    }

    /// The output of work that may wait without end; the error of a cancelled job once it is cancelled, and `work` is dropped.
    pub async fn unless_cancelled<T>(&self, work: impl Future<Output = T>) -> Result<T> {
        match select(pin!(work), pin!(self.cancelled())).await {
            Either::Left((output, _)) => Ok(output),
            Either::Right(_) => {
                self.pause_point().await?;
                Err(Error::internal("a cancelled job goes on"))
            }
        }
    }

    /// A pause point before `bytes` are copied: also waits as the speed limit asks.
    pub async fn throttle(&self, bytes: u64) -> Result<()> {
        self.pause_point().await?;
        let (mut wait, mut change) = self.speed().take(bytes);
        while !wait.is_zero() {
            let nap = wait.min(NAP);
            rt::sleep(nap).await;
            wait -= nap;
            self.pause_point().await?;
            let mut speed = self.speed();
            if speed.changes != change {
                (wait, change) = speed.take(bytes);
            }
        }
        Ok(())
    }

    fn tell(&self) {
        if let Some(watcher) = &self.0.watcher {
            watcher(self.progress());
        }
    }

    fn wake(&self) {
        let sleepers = std::mem::take(&mut *self.0.sleepers.lock().unwrap_or_else(PoisonError::into_inner));
        sleepers.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_told_and_counted() {
        let seen = Arc::new(AtomicU64::new(0));
        let watcher = Arc::clone(&seen);
        let job = JobHandle::watched(move |progress| watcher.store(progress.offset, Ordering::Relaxed));
        job.set_len(200);
        job.advance(50);
        assert_eq!(seen.load(Ordering::Relaxed), 50);
        assert_eq!(job.progress(), Progress { offset: 50, len: 200 });
        assert_eq!(job.progress().percent(), 25.0);
        assert_eq!(Progress::default().percent(), 100.0);
    }

    #[test]
    fn a_cancelled_job_stops_at_its_pause_point() {
        let job = JobHandle::new();
        job.pause();
        job.cancel();
        let error = futures_util::future::FutureExt::now_or_never(job.pause_point()).expect("must not wait");
        assert_eq!(error.expect_err("was cancelled").kind(), ErrorKind::Cancelled);
        let job = JobHandle::new();
        job.cancel_flag().store(true, Ordering::SeqCst);
        assert!(job.is_cancelled() && rt::block_on(job.pause_point()).is_err());
    }

    #[test]
    fn a_paused_job_waits_until_it_is_resumed() {
        use futures_util::future::FutureExt;
        let job = JobHandle::new();
        job.pause();
        assert!(job.pause_point().now_or_never().is_none());
        job.resume();
        assert!(job.pause_point().now_or_never().expect("must not wait").is_ok());
    }

    #[test]
    fn a_job_that_waits_goes_by_its_new_speed() {
        let job = JobHandle::new();
        job.set_speed(Some(1));
        let begin = Instant::now();
        rt::block_on(async {
            job.throttle(1 << 20).await.expect("the first bytes are free");
            let (waited, ()) = futures_util::join!(job.throttle(1 << 20), async {
                // The job waits by its old speed then.
                rt::sleep(Duration::from_millis(10)).await;
                job.set_speed(Some(1 << 40));
            });
            waited.expect("goes on");
        });
        assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", begin.elapsed());
    }
}
