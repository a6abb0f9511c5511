// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Owned, aligned I/O memory.
//!
//! **No byte of an earlier use leaves a buffer.** Memory is used again: a buffer of [`IoBuf::scratch`] may hold bytes
//! of another request or client. Its bytes are unknown only until the end of the one operation that it was made for. A
//! read of a [`crate::File`] or of a node ends with all of them filled, or with an error and zeroes
//! ([`IoBuf::forget`]). Builds with debug assertions fill such buffers with [`SCRATCH_POISON`], and tests look for it
//! in the bytes of clients and files.

mod free;

use crate::SharedBufs;
use cowshed_types::Result;
use cowshed_types::memory::no_memory;
use std::alloc::{Layout, alloc, alloc_zeroed, handle_alloc_error};
use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;

/// Alignment of memory that [`IoBuf`] allocates, in bytes: a page, which satisfies O_DIRECT on every device we know.
pub const IO_ALIGN: usize = 4096;

/// The bytes of [`IoBuf::scratch`] in builds with debug assertions. So every test meets old bytes, and can recognise
/// them.
pub const SCRATCH_POISON: u8 = 0xdb;

static POISONS: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(true);

/// Leaves scratch buffers of builds with debug assertions as they are from now on. It serves counts of instructions:
/// the users' builds fill no buffers.
pub fn fill_no_scratch_buffers() {
    POISONS.store(false, std::sync::atomic::Ordering::Relaxed);
}

/// The source of a [`BufMemory`]'s bytes, which keeps them alive.
enum Owner {
    /// The global allocator, which gave `start`; the layout has a size above 0.
    Heap { start: NonNull<u8>, layout: Layout },
    /// No bytes at all.
    Empty,
    /// Foreign memory, valid as long as the value lives.
    Foreign(#[allow(dead_code, reason = "held for its drop")] Box<dyn Any + Send + Sync>),
}

/// One piece of memory, freed when its last [`IoBuf`] goes.
struct BufMemory {
    owner: Owner,
}

// SAFETY: a region is never accessed through itself, only through the IoBufs, each of which owns its bytes alone; it
// is freed once, by the last of them, and the global allocator and the foreign owner are `Send + Sync`.
unsafe impl Send for BufMemory {}
// SAFETY: as above; `&BufMemory` allows access to nothing.
unsafe impl Sync for BufMemory {}

impl Drop for BufMemory {
    fn drop(&mut self) {
        if let Owner::Heap { start, layout } = self.owner {
            // SAFETY: `start` came from the global allocator with this layout, every constructor initialised all that is ever
            // used of it, and no IoBuf is left.
            unsafe { free::give(start, layout) }
        }
    }
}

/// From here on, new zeroed memory is asked for without alignment and aligned here. The system gives it out as
/// fresh pages, which are zero. The allocator would write zeroes into aligned memory, at a fault and a write per page
/// before the first byte is read.
const FRESH_PAGES_BYTES: usize = 128 << 10;

/// The allocator's layout for a buffer of `len` bytes. `None`: more than `isize::MAX`, which no machine has.
fn block_layout(len: usize) -> Option<Layout> {
    let layout = match len < FRESH_PAGES_BYTES {
        true => Layout::from_size_align(len, IO_ALIGN),
        false => Layout::from_size_align(len.saturating_add(IO_ALIGN), align_of::<u128>()),
    };
    layout.ok()
}

/// Ends the process: there is no memory for `len` bytes.
#[cold]
fn out_of_memory(len: usize) -> ! {
    handle_alloc_error(block_layout(len).unwrap_or(Layout::new::<[u8; IO_ALIGN]>()))
}

/// The contents of new memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Contents {
    Zero,
    /// Initialised, with unspecified values.
    Any,
    Uninitialised,
}

/// A piece of I/O memory that its holder owns alone. The kernel reads and writes it, so an operation takes it by value
/// and gives it back on completion. Cheap to split into disjoint parts and to join again.
pub struct IoBuf {
    start: NonNull<u8>,
    len: usize,
    region: Arc<BufMemory>,
}

// SAFETY: an IoBuf is the only one that refers to its bytes (splitting makes disjoint ones), as a `Box<[u8]>` would be.
unsafe impl Send for IoBuf {}
// SAFETY: `&IoBuf` only reads the bytes.
unsafe impl Sync for IoBuf {}

impl IoBuf {
    /// `len` zero bytes, aligned to [`IO_ALIGN`].
    pub fn zeroed(len: usize) -> Self {
        Self::allocate(len, Contents::Zero).unwrap_or_else(|| out_of_memory(len))
    }

    /// As [`IoBuf::zeroed`]. `ENOMEM` when there is no memory: for lengths from a peer or an image.
    pub fn try_zeroed(len: usize) -> Result<Self> {
        Self::allocate(len, Contents::Zero).ok_or_else(|| no_memory(len))
    }

    /// `len` bytes of any content, aligned to [`IO_ALIGN`]: for a buffer that is about to be filled. Cheaper than
    /// zeroes where the thread has freed a buffer of that length before. Either the caller overwrites all bytes at
    /// once, or a read does.
    pub fn scratch(len: usize) -> Self {
        Self::allocate_scratch(len).unwrap_or_else(|| out_of_memory(len))
    }

    /// As [`IoBuf::scratch`]. `ENOMEM` when there is no memory: for lengths from a peer or an image.
    pub fn try_scratch(len: usize) -> Result<Self> {
        Self::allocate_scratch(len).ok_or_else(|| no_memory(len))
    }

    #[inline]
    fn allocate_scratch(len: usize) -> Option<Self> {
        let mut buf = Self::allocate(len, Contents::Any)?;
        if cfg!(debug_assertions) && POISONS.load(std::sync::atomic::Ordering::Relaxed) {
            buf.fill(SCRATCH_POISON);
        }
        Some(buf)
    }

    /// Overwrites all bytes with zeroes: for a buffer that a failed read may have filled in part.
    #[cold]
    pub fn forget(&mut self) {
        self.fill(0);
    }

    /// A copy of `bytes`, aligned to [`IO_ALIGN`].
    pub fn copy_from(bytes: &[u8]) -> Self {
        let buf = Self::allocate(bytes.len(), Contents::Uninitialised).unwrap_or_else(|| out_of_memory(bytes.len()));
        // SAFETY: the region is new and `bytes.len()` long, so it can't overlap `bytes`; this initialises all of it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), buf.start.as_ptr(), bytes.len()) };
        buf
    }

    /// A copy of shared memory, each byte of which is read once. `ENOMEM` when there is no memory. An error also when the shared memory
    /// is lost.
    pub fn try_copy_of(shared: &SharedBufs) -> Result<Self> {
        let mut buf = Self::try_scratch(shared.len())?;
        shared.read(0, &mut buf);
        shared.check()?;
        Ok(buf)
    }

    /// Foreign memory: guest memory, a mapping, a registered buffer. `owner` is dropped when no part of the buffer is
    /// left.
    ///
    /// # Safety
    /// The `len` bytes at `start` must be initialised, readable and writable, and have no other user, until
    /// `owner` is dropped.
    pub unsafe fn from_foreign(start: NonNull<u8>, len: usize, owner: Box<dyn Any + Send + Sync>) -> Self {
        let region = BufMemory { owner: Owner::Foreign(owner) };
        IoBuf { start, len, region: Arc::new(region) }
    }

    /// With [`Contents::Uninitialised`] the caller must initialise every byte before other code sees the buffer.
    /// `None`: the allocator has no such memory.
    fn allocate(len: usize, contents: Contents) -> Option<Self> {
        let layout = block_layout(len)?;
        if len == 0 {
            let base = NonNull::<AlignedPage>::dangling().cast();
            return Some(IoBuf { start: base, len, region: Arc::new(BufMemory { owner: Owner::Empty }) });
        }
        let (start, is_used) = match free::take(layout) {
            Some(start) => (start, true),
            None => {
                // SAFETY: the size is not 0.
                let memory = unsafe {
                    match contents {
                        Contents::Uninitialised => alloc(layout),
                        Contents::Zero | Contents::Any => alloc_zeroed(layout),
                    }
                };
                (NonNull::new(memory)?, false)
            }
        };
        // SAFETY: an aligned layout gives 0 here, the others have IO_ALIGN bytes to spare.
        let base = unsafe { start.add(start.align_offset(IO_ALIGN)) };
        if is_used && contents == Contents::Zero {
            // SAFETY: the block has `len` bytes from there on and is ours alone.
            unsafe { base.write_bytes(0, len) };
        }
        Some(IoBuf { start: base, len, region: Arc::new(BufMemory { owner: Owner::Heap { start, layout } }) })
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for length 0.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// True when the first byte's address is a multiple of `align` (a power of two, in bytes).
    #[inline]
    pub fn is_aligned(&self, align: usize) -> bool {
        self.start.as_ptr().addr() & (align - 1) == 0
    }

    /// Cuts the first `at` bytes off and returns them; `self` keeps the rest. No copy.
    ///
    /// # Panics
    /// When `at` is larger than the length: a bug of the caller.
    pub fn split_to(&mut self, at: usize) -> IoBuf {
        assert!(at <= self.len, "split at {at} of a buffer of {} bytes", self.len);
        let head = IoBuf { start: self.start, len: at, region: Arc::clone(&self.region) };
        self.advance(at);
        head
    }

    /// Cuts off the bytes behind the first `at` bytes and returns them; `self` keeps the head. No copy.
    ///
    /// # Panics
    /// When `at` is larger than the length: a bug of the caller.
    pub fn split_off(&mut self, at: usize) -> IoBuf {
        let head = self.split_to(at);
        std::mem::replace(self, head)
    }

    /// Drops the first `bytes` bytes.
    ///
    /// # Panics
    /// When there are fewer: a bug of the caller.
    pub fn advance(&mut self, bytes: usize) {
        assert!(bytes <= self.len, "advance by {bytes} in a buffer of {} bytes", self.len);
        // SAFETY: `bytes <= len`, so the result is inside the region or one past its end.
        self.start = unsafe { self.start.add(bytes) };
        self.len -= bytes;
    }

    /// Keeps the first `len` bytes; no effect when there are fewer.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Joins `next`, which must have been split from directly behind `self`. Gives `next` back otherwise.
    pub fn unsplit(&mut self, next: IoBuf) -> std::result::Result<(), IoBuf> {
        // Comparing addresses is enough only because both belong to one region, hence one allocation.
        let adjacent = Arc::ptr_eq(&self.region, &next.region)
            && self.start.as_ptr().addr() + self.len == next.start.as_ptr().addr();
        if !adjacent {
            return Err(next);
        }
        self.len += next.len;
        Ok(())
    }

    /// The first byte, for the kernel. Unlike a pointer from a slice it stays valid while the buffer is moved.
    pub(crate) fn as_raw(&self) -> *mut u8 {
        self.start.as_ptr()
    }
}

/// Gives the dangling pointer of empty buffers its alignment.
#[repr(align(4096))]
struct AlignedPage;

impl std::ops::Deref for IoBuf {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: the bytes are initialised, alive as long as `region`, and have no other reference.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl std::ops::DerefMut for IoBuf {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl AsRef<[u8]> for IoBuf {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Default for IoBuf {
    fn default() -> Self {
        Self::zeroed(0)
    }
}

impl std::fmt::Debug for IoBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "IoBuf({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeroed_and_copied_are_aligned() {
        for len in [0, 1, 511, 4096, 70_000, 131_071, 131_072, 1 << 20, (3 << 20) + 1] {
            let zeroed = IoBuf::zeroed(len);
            assert_eq!(zeroed.len(), len);
            assert!(zeroed.is_aligned(IO_ALIGN));
            assert!(zeroed.iter().all(|&byte| byte == 0));
            let bytes: Vec<u8> = (0..len).map(|i| i as u8).collect();
            let copy = IoBuf::copy_from(&bytes);
            assert!(copy.is_aligned(IO_ALIGN));
            assert_eq!(&copy[..], &bytes[..]);
        }
    }

    #[test]
    fn parts_are_disjoint_and_join_again() {
        let bytes: Vec<u8> = (0..=255).collect();
        let mut tail = IoBuf::copy_from(&bytes);
        let mut head = tail.split_to(100);
        let last = tail.split_off(56);
        assert_eq!((head.len(), tail.len(), last.len()), (100, 56, 100));
        head[99] = 1;
        tail[0] = 2;
        assert_eq!((head[99], tail[0], last[0]), (1, 2, 156));
        let last = head.unsplit(last).expect_err("not adjacent");
        head.unsplit(tail).expect("adjacent");
        head.unsplit(last).expect("adjacent");
        assert_eq!(head.len(), 256);
        assert_eq!(&head[102..], &bytes[102..]);
    }

    #[test]
    fn buffers_of_different_regions_do_not_join() {
        let mut a = IoBuf::zeroed(8);
        let b = a.unsplit(IoBuf::zeroed(8)).expect_err("another region");
        assert_eq!((a.len(), b.len()), (8, 8));
    }

    #[test]
    fn advance_and_truncate() {
        let mut buf = IoBuf::copy_from(b"abcdef");
        buf.advance(2);
        buf.truncate(3);
        buf.truncate(9);
        assert_eq!(&buf[..], b"cde");
        buf.advance(3);
        assert!(buf.is_empty());
    }

    #[test]
    fn freed_memory_is_used_again_and_is_zero_when_asked_for() {
        // A length that no other buffer of this thread has.
        const LEN: usize = 123 * 4096;
        let mut buf = IoBuf::zeroed(LEN);
        buf.fill(7);
        let address = buf.as_raw().addr();
        drop(buf);
        let scratch = IoBuf::scratch(LEN);
        assert_eq!(scratch.as_raw().addr(), address);
        let expected = if cfg!(debug_assertions) { SCRATCH_POISON } else { 7 };
        assert!(scratch.iter().all(|&byte| byte == expected));
        drop(scratch);
        let zeroed = IoBuf::zeroed(LEN);
        assert_eq!(zeroed.as_raw().addr(), address);
        assert!(zeroed.iter().all(|&byte| byte == 0));
        if !cfg!(debug_assertions) {
            assert!(IoBuf::scratch(LEN).iter().all(|&byte| byte == 0));
        }
    }

    #[test]
    fn a_thread_keeps_only_so_much() {
        let many: Vec<IoBuf> = (0..40).map(|_| IoBuf::scratch(1 << 20)).collect();
        drop(many);
        let huge = IoBuf::scratch(64 << 20);
        drop(huge);
        assert_eq!(IoBuf::scratch(1 << 20).len(), 1 << 20);
        let ended = std::thread::spawn(|| IoBuf::zeroed(1 << 20)).join().expect("thread");
        assert_eq!(ended.len(), 1 << 20);
    }

    #[test]
    fn foreign_memory_outlives_its_parts() {
        let alive = Arc::new(());
        let memory: &'static mut [u8] = Box::leak(vec![7u8; 64].into_boxed_slice());
        let start = NonNull::from(&mut *memory).cast::<u8>();
        // SAFETY: leaked, so valid for ever, and `memory` isn't used while the buffer lives.
        let mut buf = unsafe { IoBuf::from_foreign(start, 64, Box::new(Arc::clone(&alive))) };
        let head = buf.split_to(10);
        drop(buf);
        assert_eq!(Arc::strong_count(&alive), 2);
        assert_eq!(head[9], 7);
        drop(head);
        assert_eq!(Arc::strong_count(&alive), 1);
        // SAFETY: leaked above from a box of this type; no buffer refers to it any more.
        drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(start.as_ptr(), 64)) });
    }

    #[test]
    fn moves_between_threads() {
        let mut buf = IoBuf::zeroed(4096);
        let tail = buf.split_off(2048);
        let tail = std::thread::spawn(move || {
            let mut tail = tail;
            tail.fill(9);
            tail
        })
        .join()
        .expect("thread");
        buf.unsplit(tail).expect("adjacent");
        assert_eq!((buf[2047], buf[2048]), (0, 9));
    }
}
