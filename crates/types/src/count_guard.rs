// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A count that ends with its holder.

use std::sync::atomic::{AtomicU64, Ordering};

/// One count of a counter, until it is dropped: something is still in use.
#[derive(Debug)]
#[must_use = "the count ends at once"]
pub struct CountGuard<'a>(&'a AtomicU64);

impl<'a> CountGuard<'a> {
    /// Takes over a count that the caller has added to `counter`.
    #[inline]
    pub fn of(counter: &'a AtomicU64) -> CountGuard<'a> {
        CountGuard(counter)
    }
}

impl Drop for CountGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}
