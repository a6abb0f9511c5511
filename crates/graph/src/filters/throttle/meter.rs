// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The leaky bucket as a meter: pure arithmetic, time is passed in.
//!
//! Each request pours its cost into the buckets of its kind; they leak at the base rate. A request may go when none of
//! its buckets holds more than its size. The size is burst rate × burst length, or a tenth of a second of the base rate
//! without a burst. A burst length above one second has a second bucket, a tenth of a second of the burst rate in size.
//! It keeps the burst itself to that rate.

use super::limits::{Limit, Limited, Limits};

/// Nanoseconds of a second.
const SECOND_NS: f64 = 1e9;
/// A bucket without a burst holds the inflow of this part of a second.
const BASE_PART: f64 = 0.1;
/// Requests are lent while a bucket is filled to no more than this part.
const LENDING_PART: f64 = 0.5;
/// The credit that is lent at once, as a part of the remaining room: many queues can borrow before it is gone.
const LENT_PART: f64 = 1.0 / 16.0;
/// Most requests lent at once.
const MOST_LENT: u32 = 256;

/// Whether a request reads or changes the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// It reads.
    Read,
    /// It writes, zeroes or discards.
    Write,
}

impl Direction {
    pub(super) fn other(self) -> Direction {
        match self {
            Direction::Read => Direction::Write,
            Direction::Write => Direction::Read,
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Bucket {
    level: f64,
    burst_level: f64,
}

impl Bucket {
    fn leak(&mut self, limit: &Limit, passed_ns: u64) {
        let seconds = passed_ns as f64 / SECOND_NS;
        self.level = (self.level - limit.average as f64 * seconds).max(0.0);
        self.burst_level = (self.burst_level - limit.maximum as f64 * seconds).max(0.0);
    }

    /// Seconds until the bucket holds no more than its size.
    fn wait_seconds(&self, limit: &Limit) -> f64 {
        let average = limit.average as f64;
        let wait = (self.level - size_of(limit)) / average;
        if limit.length_seconds <= 1 {
            return wait;
        }
        let maximum = limit.maximum as f64;
        wait.max((self.burst_level - maximum * BASE_PART) / maximum)
    }
}

fn size_of(limit: &Limit) -> f64 {
    match limit.maximum {
        0 => limit.average as f64 * BASE_PART,
        maximum => maximum as f64 * limit.length_seconds as f64,
    }
}

/// The buckets of a throttle group.
#[derive(Clone, Debug, Default)]
pub struct Meter {
    limits: Limits,
    buckets: [Bucket; 6],
    /// When the buckets leaked last, in nanoseconds.
    leaked_ns: u64,
}

/// The buckets that a request goes through.
fn kinds_of(direction: Direction) -> [Limited; 4] {
    match direction {
        Direction::Read => [Limited::BpsTotal, Limited::BpsRead, Limited::IopsTotal, Limited::IopsRead],
        Direction::Write => [Limited::BpsTotal, Limited::BpsWrite, Limited::IopsTotal, Limited::IopsWrite],
    }
}

impl Meter {
    /// A meter with empty buckets at `now_ns`.
    pub fn new(limits: Limits, now_ns: u64) -> Meter {
        Meter { limits, buckets: Default::default(), leaked_ns: now_ns }
    }

    /// The limits.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Sets other limits. The level of a bucket stays, up to its new size: changing limits gives no new burst.
    pub fn set_limits(&mut self, limits: Limits, now_ns: u64) {
        self.leak(now_ns);
        for (bucket, limit) in self.buckets.iter_mut().zip(&limits.limits) {
            bucket.level = bucket.level.min(size_of(limit));
            bucket.burst_level = bucket.burst_level.min(limit.maximum as f64 * BASE_PART);
        }
        self.limits = limits;
    }

    fn leak(&mut self, now_ns: u64) {
        // Clocks of several threads: one that is a little behind changes nothing.
        let passed_ns = now_ns.saturating_sub(self.leaked_ns);
        if passed_ns == 0 {
            return;
        }
        self.leaked_ns = now_ns;
        for (bucket, limit) in self.buckets.iter_mut().zip(&self.limits.limits) {
            if limit.average > 0 {
                bucket.leak(limit, passed_ns);
            }
        }
    }

    /// Nanoseconds until a request may go; 0 when it may go now.
    pub fn wait_ns(&mut self, direction: Direction, now_ns: u64) -> u64 {
        self.leak(now_ns);
        let mut longest = 0f64;
        for kind in kinds_of(direction) {
            let limit = &self.limits.limits[kind as usize];
            if limit.average > 0 {
                longest = longest.max(self.buckets[kind as usize].wait_seconds(limit));
            }
        }
        let wait = longest * SECOND_NS;
        // Rounded up, so that a timer that fires then finds room; the rest from rounding by then is no wait.
        if wait < 0.5 { 0 } else { wait.ceil() as u64 }
    }

    /// Pours a request of `bytes` in. It need not have waited.
    pub fn pour(&mut self, direction: Direction, bytes: u64, now_ns: u64) {
        self.leak(now_ns);
        self.pour_many(direction, bytes, 1);
    }

    fn pour_many(&mut self, direction: Direction, bytes: u64, requests: u32) {
        for kind in kinds_of(direction) {
            let amount = self.amount(kind, bytes) * f64::from(requests);
            if self.limits.limits[kind as usize].average > 0 {
                let bucket = &mut self.buckets[kind as usize];
                bucket.level += amount;
                bucket.burst_level += amount;
            }
        }
    }

    /// The cost of a request in a bucket: bytes, or operations.
    fn amount(&self, kind: Limited, bytes: u64) -> f64 {
        match (kind, self.limits.iops_size) {
            (Limited::BpsTotal | Limited::BpsRead | Limited::BpsWrite, _) => bytes as f64,
            (Limited::IopsTotal | Limited::IopsRead | Limited::IopsWrite, 0) => 1.0,
            (Limited::IopsTotal | Limited::IopsRead | Limited::IopsWrite, size) => {
                (bytes as f64 / size as f64).max(1.0)
            }
        }
    }

    /// Pours in ahead for further requests of `bytes` each, as many as leave all their buckets far from full. Returns
    /// their number: they need not ask again. At the moment of the last [`Meter::pour`].
    pub fn lend(&mut self, direction: Direction, bytes: u64) -> u32 {
        let mut most = f64::from(MOST_LENT);
        for kind in kinds_of(direction) {
            let limit = &self.limits.limits[kind as usize];
            if limit.average == 0 {
                continue;
            }
            let bucket = &self.buckets[kind as usize];
            let mut room = size_of(limit) * LENDING_PART - bucket.level;
            if limit.length_seconds > 1 {
                room = room.min(limit.maximum as f64 * BASE_PART * LENDING_PART - bucket.burst_level);
            }
            let amount = self.amount(kind, bytes);
            if amount > 0.0 {
                most = most.min(room * LENT_PART / amount);
            }
        }
        let requests = most.max(0.0) as u32;
        self.pour_many(direction, bytes, requests);
        requests
    }
}
