// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Persistent dirty bitmaps: reading, changing, and recording of writes (`docs/formats/bitmap-journal.md`).
//!
//! While something is recorded, the bitmaps concerned are in use on disk. The journal in the header still has them as
//! up to date. A bit reaches its place in the file before its write begins, so the flush that covers the write covers
//! the bit.

mod change;
mod load;
mod publish;
mod record;

use cowshed_layout::qcow2::BitmapEntry;
use cowshed_layout::qcow2::bitmap::{FLAG_AUTO, FLAG_EXTRA_DATA_COMPATIBLE, FLAG_IN_USE};
use cowshed_types::DirtyBits;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The bitmaps of an open image.
#[derive(Default)]
pub(super) struct Bitmaps {
    /// A bitmap records writes: without one a write looks no further.
    recording: AtomicBool,
    known: Mutex<BitmapState>,
    /// Held while bitmaps are written to the file.
    change: futures_util::lock::Mutex<()>,
}

/// The known state of the bitmaps, which holds on disk.
#[derive(Default)]
struct BitmapState {
    /// The directory was read.
    is_read: bool,
    maps: Vec<StoredBitmap>,
    /// The offset of the directory and its bytes.
    directory: Option<(u64, u64)>,
    /// The recording ones are in use on disk, by the journal up to date.
    in_use: bool,
    /// Ranges of writes that wait for their bits.
    waiting: Vec<Range<u64>>,
}

/// A bitmap as it is in the file.
#[derive(Clone)]
struct StoredBitmap {
    /// Its entry of the directory; in use only when it can't be trusted.
    entry: BitmapEntry,
    /// The entries of its table that aren't 0, once read.
    table: Option<BTreeMap<u64, u64>>,
    /// Its bits, once read.
    bits: Option<Arc<DirtyBits>>,
    /// `bits` are to be written to a table of its own.
    is_new: bool,
}

impl StoredBitmap {
    fn name(&self) -> String {
        String::from_utf8_lossy(&self.entry.name).into_owned()
    }

    fn is_inconsistent(&self) -> bool {
        self.entry.flags & FLAG_IN_USE != 0
    }

    /// "If it is not set, the bitmap must not be used, but both it and its extra data be left as is."
    fn is_usable(&self) -> bool {
        self.entry.extra_data.is_empty() || self.entry.flags & FLAG_EXTRA_DATA_COMPATIBLE != 0
    }

    fn is_enabled(&self) -> bool {
        self.entry.flags & FLAG_AUTO != 0
    }

    fn is_recording(&self) -> bool {
        self.is_enabled() && !self.is_inconsistent() && self.is_usable()
    }

    /// True when its mark on disk is "in use" while bitmaps record. Beside snapshots others are marked, too, as QEMU does
    /// it: its repair drops the snapshots of an image with a bitmap that it can load.
    fn is_marked(&self, beside_snapshots: bool) -> bool {
        self.is_recording() || beside_snapshots && !self.is_inconsistent() && self.is_usable()
    }
}

impl Bitmaps {
    fn known(&self) -> MutexGuard<'_, BitmapState> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BitmapState {
    fn find(&self, name: &str) -> Option<usize> {
        self.maps.iter().position(|map| map.entry.name == name.as_bytes())
    }
}
