// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The speed limit of a job, as plain arithmetic: time is passed in.

use std::time::{Duration, Instant};

/// A limit of bytes per second: each taker gets the time to wait so that the average holds.
///
/// Unused time is forgotten after [`RateLimit::CREDIT`], so that a stalled job doesn't burst afterwards.
#[derive(Clone, Debug)]
pub struct RateLimit {
    bytes_per_second: u64,
    /// When everything handed out so far is paid for.
    paid_until: Instant,
}

impl RateLimit {
    /// The idle time that may be made up for.
    pub const CREDIT: Duration = Duration::from_millis(100);

    /// A limit that starts now; 0 counts as 1 byte a second.
    pub fn new(bytes_per_second: u64, now: Instant) -> Self {
        RateLimit { bytes_per_second: bytes_per_second.max(1), paid_until: now }
    }

    /// Takes `bytes` and returns how long to wait before using them.
    pub fn take(&mut self, bytes: u64, now: Instant) -> Duration {
        let oldest = now.checked_sub(Self::CREDIT).unwrap_or(now);
        let start = self.paid_until.max(oldest);
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_second);
        // A wait of centuries is as good as one of a year, and doesn't overflow the clock.
        let cost = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)).min(Duration::from_secs(31_536_000));
        self.paid_until = start + cost;
        start.saturating_duration_since(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_average_holds() {
        let start = Instant::now();
        let mut rate = RateLimit::new(1000, start);
        assert_eq!(rate.take(500, start), Duration::ZERO);
        assert_eq!(rate.take(500, start), Duration::from_millis(500));
        assert_eq!(rate.take(1, start), Duration::from_millis(1000));
    }

    #[test]
    fn idle_time_is_forgotten() {
        let start = Instant::now();
        let mut rate = RateLimit::new(1000, start);
        let later = start + Duration::from_secs(60);
        assert_eq!(rate.take(200, later), Duration::ZERO);
        assert_eq!(rate.take(1000, later), Duration::from_millis(100));
    }
}
