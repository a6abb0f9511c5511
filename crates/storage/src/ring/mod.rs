// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One io_uring per thread.
//!
//! - `op`: an operation from submission to completion, and the future that waits for it.
//! - `catalogue`: the operations, as submission entries.
//! - here: the reactor. Entries gather in the submission queue and go to the kernel when the thread has nothing else to
//!   do or the queue is full.
//!
//! Memory safety rests on one invariant. The operation's slot owns all memory that the kernel may touch (buffers,
//! vectors, the descriptor). A slot is emptied only when its completion has been seen.

mod catalogue;
mod message;
mod op;
#[cfg(test)]
mod tests;

pub(crate) use catalogue::Direction;
pub(crate) use message::SocketMessage;
pub(crate) use op::RingOp;

use io_uring::types::{SubmitArgs, Timespec};
use io_uring::{IoUring, Probe, opcode, squeue};
use op::{OpMemory, Slot};
use slab::Slab;
use std::cell::{Cell, RefCell};
use std::io::Write;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::task::Waker;
use std::time::Duration;

/// Operations in one submission.
const SUBMISSION_ENTRIES: u32 = 256;
/// Completions that fit before the kernel has to put them aside.
const COMPLETION_ENTRIES: u32 = 1024;
/// A refused submission is repeated at once so often; then pauses come between.
const REFUSALS_AT_ONCE: u32 = 16;
const FIRST_PAUSE: Duration = Duration::from_micros(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(10);
/// Marks the read of the wake counter; slots have small numbers.
const WAKE: u64 = u64::MAX;
/// Marks a cancellation, whose own result has no meaning.
const CANCEL: u64 = u64::MAX - 1;

/// The ring of one thread.
pub(crate) struct Ring {
    uring: RefCell<IoUring>,
    slots: RefCell<Slab<Slot>>,
    /// Kept so that a round of completions needs no allocation.
    wakers: RefCell<Vec<Waker>>,
    /// Kept so that sending needs no allocation.
    #[allow(clippy::vec_box, reason = "a message must not move while the kernel has it")]
    messages: RefCell<Vec<Box<SocketMessage>>>,
    /// Operations in flight without a waiter.
    orphans: Cell<usize>,
    /// Operations in flight that a disk completes, not a peer.
    on_disk: Cell<usize>,
    /// See [`Ring::forget_completed`].
    has_completed: Cell<bool>,
    wake_armed: Cell<bool>,
    /// Submissions that the kernel has refused, one after the other.
    refusals: Cell<u32>,
    /// Memory into which the kernel puts the wake counter. A box, so that moving the ring doesn't move it.
    wake_count: Box<Cell<u64>>,
}

impl Ring {
    /// Makes a ring for this thread, with the best mode that the kernel has. An error (a container forbids it, no memory,
    /// an old kernel) means: use threads.
    pub(crate) fn new() -> std::io::Result<Self> {
        let uring = Self::build()?;
        let params = uring.params();
        if !params.is_feature_ext_arg() || !params.is_feature_nodrop() {
            return Err(std::io::Error::from_raw_os_error(libc::ENOSYS));
        }
        let mut probe = Probe::new();
        uring.submitter().register_probe(&mut probe)?;
        let needed = [
            opcode::Read::CODE,
            opcode::Write::CODE,
            opcode::Readv::CODE,
            opcode::Writev::CODE,
            opcode::Fsync::CODE,
            opcode::SyncFileRange::CODE,
            opcode::Fallocate::CODE,
            opcode::AsyncCancel::CODE,
            opcode::Recv::CODE,
            opcode::SendMsg::CODE,
            opcode::PollAdd::CODE,
        ];
        if !needed.iter().all(|&code| probe.is_supported(code)) {
            return Err(std::io::Error::from_raw_os_error(libc::ENOSYS));
        }
        // Saves a lookup for each system call; a kernel without it is only a little slower.
        let _ = uring.submitter().register_ring_fd();
        Ok(Ring {
            uring: RefCell::new(uring),
            slots: RefCell::new(Slab::with_capacity(SUBMISSION_ENTRIES as usize)),
            wakers: RefCell::default(),
            messages: RefCell::default(),
            orphans: Cell::new(0),
            on_disk: Cell::new(0),
            has_completed: Cell::new(false),
            wake_armed: Cell::new(false),
            refusals: Cell::new(0),
            wake_count: Box::new(Cell::new(0)),
        })
    }

    fn build() -> std::io::Result<IoUring> {
        let base = || {
            let mut builder = IoUring::builder();
            builder.dontfork().setup_clamp().setup_cqsize(COMPLETION_ENTRIES);
            builder
        };
        // From the newest mode (Linux 6.1) to the plainest; EINVAL means that the kernel doesn't know a flag.
        let deferred =
            base().setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag().build(SUBMISSION_ENTRIES);
        let refused = |result: &std::io::Result<IoUring>| {
            result.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::EINVAL))
        };
        if !refused(&deferred) {
            return deferred;
        }
        let cooperative = base().setup_coop_taskrun().setup_taskrun_flag().build(SUBMISSION_ENTRIES);
        if !refused(&cooperative) {
            return cooperative;
        }
        base().build(SUBMISSION_ENTRIES)
    }

    /// Queues an entry. The memory that its pointers name must be owned by the slot whose number is its user data.
    fn push(&self, entry: &squeue::Entry) {
        loop {
            {
                let mut uring = self.uring.borrow_mut();
                // SAFETY: the slot (or the ring, for the wake counter) owns all memory that the entry names until the
                // completion is seen, by this module's invariant.
                if unsafe { uring.submission().push(entry) }.is_ok() {
                    return;
                }
            }
            // Full: submit the queued entries. Taking completions makes room where the kernel refuses for lack of it.
            self.enter(0, None);
            self.reap();
        }
    }

    /// True when no operation is in flight or queued.
    pub(crate) fn is_idle(&self) -> bool {
        self.slots.borrow().is_empty()
    }

    /// One `io_uring_enter`; `want` completions are waited for, at most `timeout`.
    fn enter(&self, want: usize, timeout: Option<Duration>) {
        let Err(error) = self.ask_kernel(want, timeout) else {
            self.refusals.set(0);
            return;
        };
        match error.raw_os_error() {
            // The time is over.
            Some(libc::ETIME) => self.refusals.set(0),
            // A signal came; the caller looks for completions and comes back. Or the kernel lacks memory, or has completions put
            // aside: they make room when they are taken.
            Some(libc::EINTR | libc::EAGAIN | libc::EBUSY | libc::ENOMEM) => self.wait_out_refusal(),
            _ => end_process(&error),
        }
    }

    fn ask_kernel(&self, want: usize, timeout: Option<Duration>) -> std::io::Result<usize> {
        #[cfg(test)]
        if let Some(error) = crate::kernel_faults::of_enter() {
            return Err(error);
        }
        let uring = self.uring.borrow();
        let submitter = uring.submitter();
        match timeout {
            None => submitter.submit_and_wait(want),
            Some(timeout) => {
                let timespec = Timespec::new().sec(timeout.as_secs()).nsec(timeout.subsec_nanos());
                submitter.submit_with_args(want, &SubmitArgs::new().timespec(&timespec))
            }
        }
    }

    /// The kernel has refused to take operations. They stay queued, and it is asked again for as long as it takes. Pauses that
    /// grow keep the core free: other processes give memory back.
    #[cold]
    fn wait_out_refusal(&self) {
        let refusals = self.refusals.get();
        self.refusals.set(refusals.saturating_add(1));
        match refusals.checked_sub(REFUSALS_AT_ONCE) {
            None => std::thread::yield_now(),
            Some(pauses) => std::thread::sleep((FIRST_PAUSE * (1 << pauses.min(16))).min(LONGEST_PAUSE)),
        }
    }

    /// True when this many operations are in flight or queued.
    #[cfg(test)]
    fn has_slots(&self, count: usize) -> bool {
        self.slots.borrow().len() == count
    }

    /// Operations that were not handed to the kernel yet.
    pub(crate) fn queued(&self) -> usize {
        self.uring.borrow_mut().submission().len()
    }

    /// True while a disk has something to do for this thread.
    pub(crate) fn waits_for_disk(&self) -> bool {
        self.on_disk.get() > 0
    }

    /// From now on [`Ring::has_completed`] is true once an operation has completed.
    pub(crate) fn forget_completed(&self) {
        self.has_completed.set(false);
    }

    /// True when completions were taken since [`Ring::forget_completed`].
    pub(crate) fn has_completed(&self) -> bool {
        self.has_completed.get()
    }

    /// True when the kernel has something for us. No system call.
    pub(crate) fn has_news(&self) -> bool {
        let mut uring = self.uring.borrow_mut();
        let queue = uring.submission();
        if queue.taskrun() || queue.cq_overflow() {
            return true;
        }
        drop(queue);
        !uring.completion().is_empty()
    }

    /// Submits queued entries and takes completions, without waiting.
    pub(crate) fn poll(&self) {
        let submit = {
            let mut uring = self.uring.borrow_mut();
            let queue = uring.submission();
            !queue.is_empty() || queue.taskrun() || queue.cq_overflow()
        };
        if submit {
            self.enter(0, None);
        }
        self.reap();
    }

    /// Submits queued entries and waits for a completion, a count in `wake_fd` or the timeout.
    pub(crate) fn wait(&self, wake_fd: BorrowedFd<'_>, timeout: Option<Duration>) {
        if !self.uring.borrow_mut().completion().is_empty() {
            self.poll();
            return;
        }
        if !self.wake_armed.replace(true) {
            let entry = catalogue::read_counter(wake_fd.as_raw_fd(), self.wake_count.as_ptr().cast());
            self.push(&entry.user_data(WAKE));
        }
        match timeout {
            Some(Duration::ZERO) => self.enter(0, None),
            timeout => self.enter(1, timeout),
        }
        self.reap();
    }

    /// Hands results to their operations and wakes their tasks.
    fn reap(&self) {
        let mut wakers = self.wakers.take();
        let mut finished: Vec<OpMemory> = Vec::new();
        {
            let mut uring = self.uring.borrow_mut();
            let mut slots = self.slots.borrow_mut();
            for completion in uring.completion() {
                self.has_completed.set(true);
                match completion.user_data() {
                    WAKE => self.wake_armed.set(false),
                    CANCEL => {}
                    key => self.complete(&mut slots, key, completion.result(), &mut wakers, &mut finished),
                }
            }
        }
        // Outside of the borrows: dropping an operation's memory may run any code.
        drop(finished);
        wakers.drain(..).for_each(Waker::wake);
        self.wakers.replace(wakers);
    }

    fn complete(
        &self,
        slots: &mut Slab<Slot>,
        key: u64,
        result: i32,
        wakers: &mut Vec<Waker>,
        finished: &mut Vec<OpMemory>,
    ) {
        let key = key as usize;
        let Some(slot) = slots.get_mut(key) else { return };
        self.on_disk.set(self.on_disk.get() - usize::from(slot.is_on_disk()));
        match slot.finish(result) {
            op::OpFinish::Wake(waker) => wakers.extend(waker),
            op::OpFinish::Orphan => {
                self.orphans.set(self.orphans.get() - 1);
                finished.push(slots.remove(key).into_held());
            }
        }
    }

    /// Asks the kernel to give up an operation, whose completion comes all the same.
    fn cancel(&self, key: u64) {
        self.push(&catalogue::cancel(key).user_data(CANCEL));
    }

    /// Takes a message back for the next one.
    fn keep_message(&self, message: Box<SocketMessage>) {
        const KEPT: usize = 64;
        let mut messages = self.messages.borrow_mut();
        if messages.len() < KEPT {
            messages.push(message);
        }
    }

    /// True while operations run that have no waiter any more.
    pub(crate) fn has_orphans(&self) -> bool {
        self.orphans.get() > 0
    }
}

/// The kernel refuses the ring for good: only a bug, or a sandbox that forbids it now, gets here. Operations in flight
/// can't be given back, for the kernel may still use their memory. Neither success nor failure of them may be reported,
/// so the process ends as by a power cut.
#[cold]
fn end_process(error: &std::io::Error) -> ! {
    let mut stderr = std::io::stderr();
    // When this fails there is no other place for the message.
    let _ = writeln!(stderr, "io_uring_enter failed, and operations in flight can't be given back: {error}");
    std::process::abort()
}

impl Drop for Ring {
    fn drop(&mut self) {
        // Futures hold the ring, so operations left here have no future: orphans, and the read of the wake counter.
        // Their memory may be freed only after their completion; a read or write that has reached the disk can't be
        // recalled, the read of the counter can.
        if self.wake_armed.get() {
            self.push(&catalogue::cancel(WAKE).user_data(CANCEL));
        }
        while self.orphans.get() > 0 || self.wake_armed.get() {
            self.enter(1, None);
            self.reap();
        }
    }
}
