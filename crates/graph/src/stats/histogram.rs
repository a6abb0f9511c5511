// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Latency histograms with bounds of the user's choice.

use cowshed_types::{Error, Result};
use std::sync::atomic::{AtomicU64, Ordering};

/// Most bounds of one histogram.
const MAX_BOUNDS: usize = 1024;

/// Counts latencies in bins: `[0, b0)`, `[b0, b1)`, …, `[b_last, ∞)`. Any thread may record.
#[derive(Debug)]
pub struct Histogram {
    bounds_ns: Box<[u64]>,
    bins: Box<[AtomicU64]>,
}

/// A histogram at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HistogramSnapshot {
    /// The bounds between the bins, rising, in nanoseconds.
    pub bounds_ns: Vec<u64>,
    /// Requests per bin: one more than bounds.
    pub bins: Vec<u64>,
}

impl Histogram {
    /// With these bounds in nanoseconds, which must rise and be larger than 0.
    pub fn new(bounds_ns: &[u64]) -> Result<Histogram> {
        let rising = bounds_ns.windows(2).all(|pair| pair[0] < pair[1]);
        if bounds_ns.is_empty() || !rising || bounds_ns[0] == 0 {
            let message = "the boundaries of a latency histogram must be positive and rise";
            return Err(Error::invalid_argument(message).field("boundaries"));
        }
        if bounds_ns.len() > MAX_BOUNDS {
            let message = format!("a latency histogram has at most {MAX_BOUNDS} boundaries");
            return Err(Error::invalid_argument(message).field("boundaries").value(bounds_ns.len()));
        }
        let bins = (0..=bounds_ns.len()).map(|_| AtomicU64::new(0)).collect();
        Ok(Histogram { bounds_ns: bounds_ns.into(), bins })
    }

    /// Counts one request.
    pub fn record(&self, latency_ns: u64) {
        let bin = self.bounds_ns.partition_point(|bound| *bound <= latency_ns);
        self.bins[bin].fetch_add(1, Ordering::Relaxed);
    }

    /// The counts so far.
    pub fn snapshot(&self) -> HistogramSnapshot {
        HistogramSnapshot {
            bounds_ns: self.bounds_ns.to_vec(),
            bins: self.bins.iter().map(|bin| bin.load(Ordering::Relaxed)).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_belongs_to_the_bin_above_it() {
        let histogram = Histogram::new(&[10, 50, 100]).unwrap();
        [0, 9, 10, 49, 50, 99, 100, u64::MAX].into_iter().for_each(|latency| histogram.record(latency));
        assert_eq!(histogram.snapshot().bins, [2, 2, 2, 2]);
        assert_eq!(histogram.snapshot().bounds_ns, [10, 50, 100]);
    }

    #[test]
    fn bounds_that_do_not_rise_are_refused() {
        for bounds in [&[][..], &[0, 1], &[5, 5], &[5, 4], &[1; 2000]] {
            assert!(Histogram::new(bounds).is_err(), "{bounds:?}");
        }
        assert!(Histogram::new(&(1..=1024).collect::<Vec<_>>()).is_ok());
        assert!(Histogram::new(&(1..=1025).collect::<Vec<_>>()).is_err());
    }
}
