// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Write-behind: the disk starts on new data while more of it comes, rather than at the next flush.
//!
//! The kernel leaves writes to a cached file in memory. It starts when a tenth of the memory is full of them or half a
//! minute is over. A flush then waits for gigabytes. Here the kernel is asked to start (`sync_file_range`, which waits
//! for nothing on the disk) each time that enough new data has been written. New data was not on the disk before, and
//! hardly changes soon. Data that a guest overwrites again and again stays where it is.
//!
//! It promises nothing: only a flush makes data durable, and the errors of the started writes show in the next one.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// The amount of new data that is left to the kernel before it gets a hint to start, in bytes. Less costs more calls
/// and scatters the writes; more leaves more to the flush.
const START_BYTES: u64 = 32 << 20;

#[derive(Debug, Default)]
struct WriteBehindState {
    running: bool,
    waiting: Vec<Waker>,
}

/// The new bytes of a file that the kernel has no hint about yet.
#[derive(Debug, Default)]
pub(crate) struct WriteBehind {
    new_bytes: AtomicU64,
    state: Mutex<WriteBehindState>,
}

impl WriteBehind {
    fn state(&self) -> MutexGuard<'_, WriteBehindState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `len` more bytes of new data are in the page cache. True: it is time, and the caller starts, and calls
    /// [`WriteBehind::end`] whatever happens.
    pub(crate) fn add(&self, len: u64) -> bool {
        if self.new_bytes.fetch_add(len, Ordering::Relaxed).saturating_add(len) < START_BYTES {
            return false;
        }
        let mut state = self.state();
        if state.running {
            return false;
        }
        state.running = true;
        self.new_bytes.store(0, Ordering::Relaxed);
        true
    }

    /// Ends the write that was started, and wakes the waiting tasks.
    pub(crate) fn end(&self) {
        let mut state = self.state();
        state.running = false;
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
    }

    /// A flush begins, which leaves nothing to be started. Ready when nothing runs any more.
    pub(crate) fn poll_flush(&self, context: &mut Context<'_>) -> Poll<()> {
        self.new_bytes.store(0, Ordering::Relaxed);
        let mut state = self.state();
        if !state.running {
            return Poll::Ready(());
        }
        if !state.waiting.iter().any(|waker| waker.will_wake(context.waker())) {
            state.waiting.push(context.waker().clone());
        }
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::File;
    use crate::rt::{block_on, yield_now};

    fn poll(behind: &WriteBehind) -> Poll<()> {
        behind.poll_flush(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn one_runs_at_a_time_and_what_comes_meanwhile_counts() {
        let behind = WriteBehind::default();
        assert!(!behind.add(START_BYTES - 1));
        assert!(behind.add(1));
        assert!(!behind.add(START_BYTES), "one runs");
        assert!(poll(&behind).is_pending());
        assert!(!behind.add(START_BYTES), "one still runs");
        behind.end();
        assert!(behind.add(0), "what came meanwhile is enough");
        behind.end();
        assert!(!behind.add(START_BYTES - 1));
        assert!(poll(&behind).is_ready());
        assert!(!behind.add(1), "a flush leaves nothing to be started");
    }

    #[test]
    fn a_flush_waits_for_what_was_started() {
        block_on(async {
            let file = File::null(4096);
            assert!(file.inner().behind.add(START_BYTES));
            let mut flush = std::pin::pin!(file.sync());
            for _ in 0..10 {
                assert!(futures_util::poll!(&mut flush).is_pending());
                yield_now().await;
            }
            file.inner().behind.end();
            flush.await.expect("a flush of nothing");
        });
    }
}
