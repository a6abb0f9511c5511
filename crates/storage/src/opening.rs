// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The process's openings under way, for its end: a process that only opens leaves nothing behind.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

static UNDER_WAY: AtomicUsize = AtomicUsize::new(0);
static HAS_WRITABLE: AtomicBool = AtomicBool::new(false);

/// An opening of an image or a file, until it is dropped. It may hang: the server of a file system or of a disk may never answer.
#[derive(Debug)]
pub struct Opening(());

impl Opening {
    /// It begins.
    pub fn begin() -> Opening {
        UNDER_WAY.fetch_add(1, Ordering::AcqRel);
        Opening(())
    }
}

impl Drop for Opening {
    fn drop(&mut self) {
        UNDER_WAY.fetch_sub(1, Ordering::AcqRel);
    }
}

/// From now on the process may have made or changed something.
pub fn note_writable() {
    HAS_WRITABLE.store(true, Ordering::Release);
}

/// True while the process opens something, and has neither made nor changed anything so far.
pub fn only_opens() -> bool {
    UNDER_WAY.load(Ordering::Acquire) > 0 && !HAS_WRITABLE.load(Ordering::Acquire)
}
