// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Waiting for a state of another thread or process, with a bound.

use std::time::{Duration, Instant};

/// The longest wait: long on the slowest machine, and short beside a run of all tests.
pub const PATIENCE: Duration = Duration::from_secs(60);

const PAUSE: Duration = Duration::from_millis(5);

/// Waits until `is_so`; fails with `what` when that takes too long.
#[track_caller]
pub fn await_that(what: &str, is_so: impl FnMut() -> bool) {
    await_with(is_so, || what.to_owned());
}

/// Waits until `found` returns something, and returns it; fails with `what` when that takes too long.
#[track_caller]
pub fn await_some<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let mut result = None;
    await_that(what, || {
        result = found();
        result.is_some()
    });
    result.expect("the wait has ended")
}

/// As [`await_that`], with the text of the failure made at its end.
#[track_caller]
pub fn await_with(mut is_so: impl FnMut() -> bool, what: impl FnOnce() -> String) {
    let until = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < until, "in vain: {}", what());
        // Between two looks.
        std::thread::sleep(PAUSE);
    }
}
