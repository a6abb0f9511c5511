// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The ranges of a file that are known to have data.
//!
//! The kernel finds the end of a run of data by going through all of it. It goes extent by extent, and page by page
//! where the data isn't on the disk yet. A walk through a disk asks for the next piece again and again, mostly in the
//! same run.

use crate::DataRange;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The run of data that was found last. That something is data may be out of date when others make holes: it reads the
/// same. That something is a hole is never remembered, for a write ends that.
#[derive(Debug, Default)]
pub(crate) struct KnownData(Mutex<DataCacheState>);

#[derive(Debug, Default)]
struct DataCacheState {
    /// The number of operations that can have made holes.
    changes: u64,
    data: Option<DataRange>,
    /// The length of the file when that was asked. Where it has grown since, data may go on behind the run's end.
    len: u64,
}

/// Holes are being made: runs found meanwhile are not remembered.
pub(crate) struct Changing<'a>(&'a KnownData);

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        self.0.forget();
    }
}

impl KnownData {
    fn state(&self) -> MutexGuard<'_, DataCacheState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn forget(&self) {
        let mut state = self.state();
        state.changes += 1;
        state.data = None;
    }

    /// Before holes are made, or the file is cut, until the result is dropped.
    pub(crate) fn changing(&self) -> Changing<'_> {
        self.forget();
        Changing(self)
    }

    /// The data from `offset` on, if it lies in the run that was found last. `len` is the file's length.
    pub(crate) fn find(&self, offset: u64, len: u64) -> Option<DataRange> {
        let state = self.state();
        let data = state.data.filter(|_| state.len == len)?;
        (data.start <= offset && offset < data.end).then_some(DataRange { start: offset, end: data.end })
    }

    /// Before the kernel is asked: for [`KnownData::keep`].
    pub(crate) fn changes(&self) -> u64 {
        self.state().changes
    }

    /// Remembers the kernel's answer for a file of `len` bytes, unless holes were made since `changes`.
    pub(crate) fn keep(&self, changes: u64, data: DataRange, len: u64) {
        let mut state = self.state();
        if state.changes == changes {
            (state.data, state.len) = (Some(data), len);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUN: DataRange = DataRange { start: 100, end: 200 };
    const LEN: u64 = 200;

    #[test]
    fn only_what_lies_in_the_last_run_is_known() {
        let known = KnownData::default();
        assert_eq!(known.find(0, LEN), None);
        known.keep(known.changes(), RUN, LEN);
        assert_eq!(known.find(99, LEN), None);
        assert_eq!(known.find(100, LEN), Some(RUN));
        assert_eq!(known.find(150, LEN), Some(DataRange { start: 150, end: 200 }));
        assert_eq!(known.find(200, LEN), None);
        assert_eq!(known.find(150, LEN + 1), None, "it may go on now");
    }

    #[test]
    fn what_was_found_while_holes_were_made_is_not_remembered() {
        let known = KnownData::default();
        known.keep(known.changes(), RUN, LEN);
        let before = known.changes();
        let changing = known.changing();
        assert_eq!(known.find(150, LEN), None);
        known.keep(before, RUN, LEN);
        assert_eq!(known.find(150, LEN), None, "asked before they were made");
        let meanwhile = known.changes();
        known.keep(meanwhile, RUN, LEN);
        drop(changing);
        assert_eq!(known.find(150, LEN), None, "found while they were made");
        known.keep(meanwhile, RUN, LEN);
        assert_eq!(known.find(150, LEN), None, "asked while they were made");
        known.keep(known.changes(), RUN, LEN);
        assert_eq!(known.find(150, LEN), Some(DataRange { start: 150, end: 200 }));
    }
}
