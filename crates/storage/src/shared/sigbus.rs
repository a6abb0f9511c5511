// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Mappings whose file another process has shortened: an access to a page that is gone raises SIGBUS. The handler here puts zero
//! pages of this process in the place of the mapping from there on, and the access goes on. Such a mapping is lost: what this process
//! reads there is nothing that the other one wrote.

use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

/// The most mappings at a time.
const MAX_MAPPINGS: usize = 4096;

/// A mapping as the handler sees it: nothing but atomics, for it may run at any moment.
struct MappingEntry {
    /// 0: free; 1: being filled or emptied.
    start: AtomicUsize,
    len: AtomicUsize,
    page_bytes: AtomicUsize,
    is_lost: AtomicBool,
}

static MAPPINGS: [MappingEntry; MAX_MAPPINGS] = [const {
    MappingEntry {
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        page_bytes: AtomicUsize::new(1),
        is_lost: AtomicBool::new(false),
    }
}; MAX_MAPPINGS];

/// The handlers that were in force before, leaked: for faults that aren't ours.
static BEFORE: AtomicPtr<libc::sigaction> = AtomicPtr::new(std::ptr::null_mut());

static INSTALL: Once = Once::new();

/// Watches a mapping until [`WatchedMapping::end`].
#[derive(Debug, Default)]
pub(super) struct WatchedMapping(Option<usize>);

impl WatchedMapping {
    /// `None`: there are too many mappings.
    pub(super) fn new(start: usize, len: usize, page_bytes: usize) -> Option<WatchedMapping> {
        INSTALL.call_once(install);
        let claim =
            |entry: &MappingEntry| entry.start.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        let number = MAPPINGS.iter().position(claim)?;
        let entry = &MAPPINGS[number];
        entry.len.store(len, Ordering::Relaxed);
        entry.page_bytes.store(page_bytes, Ordering::Relaxed);
        entry.is_lost.store(false, Ordering::Relaxed);
        entry.start.store(start, Ordering::Release);
        Some(WatchedMapping(Some(number)))
    }

    pub(super) fn is_some(&self) -> bool {
        self.0.is_some()
    }

    pub(super) fn is_lost(&self) -> bool {
        self.0.is_some_and(|number| MAPPINGS[number].is_lost.load(Ordering::Acquire))
    }

    pub(super) fn end(&mut self) {
        if let Some(number) = self.0.take() {
            MAPPINGS[number].start.store(0, Ordering::Release);
        }
    }
}

fn install() {
    // SAFETY: all bytes zero are a valid value of the plain C struct.
    let (mut action, mut before): (libc::sigaction, libc::sigaction) =
        unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
    action.sa_sigaction = handle as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: reads the action in force to a struct of this frame.
    unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), &raw mut before) };
    BEFORE.store(Box::leak(Box::new(before)), Ordering::Release);
    // SAFETY: the handler uses only atomics and two system calls, and `BEFORE` is set.
    unsafe { libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) };
}

/// Runs on the thread whose access has failed.
extern "C" fn handle(_signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid struct to a handler with SA_SIGINFO, and SIGBUS has an address.
    let address = unsafe { (*info).si_addr() }.addr();
    for entry in &MAPPINGS {
        let (start, len) = (entry.start.load(Ordering::Acquire), entry.len.load(Ordering::Relaxed));
        if start <= 1 || !(start..start.saturating_add(len)).contains(&address) {
            continue;
        }
        // Before the zeroes: a copy that has one of them is made before a look at this.
        entry.is_lost.store(true, Ordering::SeqCst);
        // From the page on: the pages before it may be there, and requests that began use them. To the end: two parts at most, so no
        // row of faults uses up the mappings that a process may have.
        let skip =
            (address - start) / entry.page_bytes.load(Ordering::Relaxed) * entry.page_bytes.load(Ordering::Relaxed);
        // SAFETY: the range is in a mapping of `SharedMemory`, whose bytes are only reached by raw copies, and which stays mapped while
        // an access runs. So zero pages may take its place.
        let replaced = unsafe {
            libc::mmap(
                std::ptr::without_provenance_mut(start + skip),
                len - skip,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if replaced != libc::MAP_FAILED {
            return;
        }
    }
    // Not ours: the access is repeated under the action that was in force before.
    // SAFETY: the struct was leaked by `install` and never changes.
    unsafe { libc::sigaction(libc::SIGBUS, BEFORE.load(Ordering::Acquire), std::ptr::null_mut()) };
}
