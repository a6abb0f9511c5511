// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Freed I/O memory that each thread keeps for its next buffers.
//!
//! Large blocks go back to the system when freed and come back as fresh pages, one fault for each. For a copy loop that
//! costs as much as the copying. Sizes repeat (clusters, tables, chunks), so blocks of the very size are looked for.

use std::alloc::{Layout, dealloc};
use std::cell::RefCell;
use std::ptr::NonNull;

/// Smaller blocks are the allocator's business, which is quick with them.
const MIN_BLOCK_BYTES: usize = 4096;
/// Larger blocks, of over 4 MiB and their alignment, are too rare to keep.
const MAX_BLOCK_BYTES: usize = (4 << 20) + super::IO_ALIGN;
/// The most that a thread keeps, in bytes: eight such blocks of 2 MiB.
const MAX_KEPT_BYTES: usize = (16 << 20) + 8 * super::IO_ALIGN;
const MAX_KEPT_BLOCKS: usize = 64;

/// A block from the global allocator; all its bytes are initialised, but for those before and behind aligned ones.
struct Block {
    start: NonNull<u8>,
    layout: Layout,
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: the block comes from the global allocator with this layout, and its maker gave it away.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}

#[derive(Default)]
struct Kept {
    blocks: Vec<Block>,
    bytes: usize,
}

thread_local! {
    static KEPT: RefCell<Kept> = const { RefCell::new(Kept { blocks: Vec::new(), bytes: 0 }) };
}

/// Takes a kept block of that layout. All bytes that its first user had are initialised, with unspecified values.
pub(super) fn take(layout: Layout) -> Option<NonNull<u8>> {
    let taken = KEPT.try_with(|kept| {
        let mut kept = kept.try_borrow_mut().ok()?;
        let index = kept.blocks.iter().rposition(|block| block.layout == layout)?;
        let block = kept.blocks.swap_remove(index);
        kept.bytes -= layout.size();
        let start = block.start;
        std::mem::forget(block);
        Some(start)
    });
    taken.ok().flatten()
}

/// Keeps a block or frees it.
///
/// # Safety
/// `start` must come from the global allocator with `layout`, be initialised, and not be used any more.
pub(super) unsafe fn give(start: NonNull<u8>, layout: Layout) {
    let block = Block { start, layout };
    if !(MIN_BLOCK_BYTES..=MAX_BLOCK_BYTES).contains(&layout.size()) {
        return;
    }
    // Where it can't be kept (the thread ends, no room) the block is dropped, which frees it.
    let _ = KEPT.try_with(move |kept| {
        let Ok(mut kept) = kept.try_borrow_mut() else { return };
        if kept.blocks.len() < MAX_KEPT_BLOCKS && kept.bytes + block.layout.size() <= MAX_KEPT_BYTES {
            kept.bytes += block.layout.size();
            kept.blocks.push(block);
        }
    });
}
