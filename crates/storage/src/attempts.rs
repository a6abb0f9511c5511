// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The repetition of operations that the kernel gives back undone.

use crate::rt;
use cowshed_types::Errno;
use std::time::Duration;

/// An operation that the kernel gives back undone for that long fails with the kernel's last error.
const PATIENCE: Duration = if cfg!(test) { Duration::from_millis(300) } else { Duration::from_secs(10) };
/// The first attempts follow at once: most interruptions are over by then.
const AT_ONCE: u32 = 4;
/// The pauses before the others, the first and the longest.
const PAUSES: std::ops::RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_millis(100);

/// The attempts at one operation.
#[derive(Debug, Default)]
pub(crate) struct Attempts {
    failed: u32,
    since: Duration,
    past_ring: bool,
}

impl Attempts {
    /// The ring has given the operation up: a thread does it, whose word counts.
    pub(crate) fn is_past_ring(&self) -> bool {
        self.past_ring
    }

    /// An attempt has ended with `errno`. True when another one is to follow, after a pause that is over then.
    pub(crate) async fn retries(&mut self, errno: Errno, by_ring: bool) -> bool {
        let again = match errno.0 {
            libc::EINTR => true,
            _ if by_ring && ring_gave_up(errno) => {
                self.past_ring = true;
                true
            }
            libc::EAGAIN => true,
            _ => false,
        };
        again && self.pause().await
    }

    /// False when the operation has been tried for long enough.
    async fn pause(&mut self) -> bool {
        let now = rt::now();
        if self.failed == 0 {
            self.since = now;
        }
        if now.saturating_sub(self.since) >= PATIENCE {
            return false;
        }
        self.failed += 1;
        match self.failed.checked_sub(AT_ONCE) {
            Some(pauses) if rt::has_executor() => {
                let pause = PAUSES.start().saturating_mul(1 << pauses.min(16));
                rt::sleep(pause.min(*PAUSES.end())).await;
            }
            _ => rt::yield_now().await,
        }
        true
    }
}

/// True for results of a ring that mean: the operation was not carried out, for reasons of the ring. It would have to wait, or
/// the kernel has no worker for it (`ECANCELED`).
pub(crate) fn ring_gave_up(errno: Errno) -> bool {
    matches!(errno.0, libc::EAGAIN | libc::ECANCELED)
}
