// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Timers of one executor.

use super::executor::with_current;
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// The wakers of sleeping tasks by their deadline; the number distinguishes equal deadlines.
#[derive(Default)]
pub(super) struct Timers {
    waiting: BTreeMap<(Instant, u64), Waker>,
    next_number: u64,
}

impl Timers {
    /// Takes the waker of a timer whose time has come, or returns the time of the next one.
    pub(super) fn next(&mut self) -> NextTimer {
        // Without timers the clock isn't even read.
        let Some(entry) = self.waiting.first_entry() else { return NextTimer::Never };
        match entry.key().0 {
            deadline if deadline > Instant::now() => NextTimer::At(deadline),
            _ => NextTimer::Due(entry.remove()),
        }
    }
}

/// The result of [`Timers::next`].
pub(super) enum NextTimer {
    Due(Waker),
    At(Instant),
    Never,
}

/// Waits until an instant.
pub(super) struct Sleep {
    deadline: Instant,
    number: Option<u64>,
}

impl Sleep {
    /// A sleep that starts now; one too long to express never ends.
    pub(super) fn new(duration: Duration) -> Self {
        const FOREVER: Duration = Duration::from_secs(u32::MAX as u64);
        let now = Instant::now();
        let deadline = now.checked_add(duration.min(FOREVER)).unwrap_or(now);
        Sleep { deadline, number: None }
    }
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if Instant::now() >= self.deadline {
            return Poll::Ready(());
        }
        let replaced = with_current(|local| {
            let local = local.expect("sleep outside of block_on");
            let mut timers = local.timers.borrow_mut();
            let number = *self.number.get_or_insert_with(|| {
                timers.next_number += 1;
                timers.next_number
            });
            timers.waiting.insert((self.deadline, number), context.waker().clone())
        });
        drop(replaced);
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        let Some(number) = self.number else { return };
        // Without an executor (it is being dropped) the timers go with it.
        let waker = with_current(|local| {
            local.and_then(|local| local.timers.borrow_mut().waiting.remove(&(self.deadline, number)))
        });
        drop(waker);
    }
}
