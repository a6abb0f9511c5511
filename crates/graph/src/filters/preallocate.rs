// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Preallocate: a file that grows gets space ahead of its data, so that it grows seldom and in large pieces.

use super::Filter;
use crate::node::{Apply, Below, Intent, LiveOptions, Mapped, Node, Preallocation, Work, done};
use crate::options::{BlockdevOptions, schemas};
use cowshed_storage::{PermissionSet, Permissions};
use cowshed_types::{Error, Result};
use std::sync::atomic::{AtomicU64, Ordering};

/// QEMU's defaults of the options.
const AHEAD_BYTES: u64 = 128 << 20;
const ALIGN_BYTES: u64 = 1 << 20;

/// No end of its own: the node is as long as the file below.
const AS_THE_FILE: u64 = u64::MAX;

/// The filter. It shows the length that its user knows; the file below is longer until the filter is closed. After a crash the file
/// keeps zeroes behind its end, which no format minds.
pub struct Preallocate {
    below: Below,
    /// Space beyond the new end, in bytes.
    size_bytes: AtomicU64,
    /// The file's length is a multiple of this, in bytes.
    align_bytes: AtomicU64,
    /// The length that the user knows.
    data_end: AtomicU64,
}

impl Preallocate {
    /// With the sizes that [`preallocated_sizes`] gives.
    pub(crate) fn new(below: Below, (size_bytes, align_bytes): (u64, u64)) -> Preallocate {
        let (size_bytes, align_bytes) = (AtomicU64::new(size_bytes), AtomicU64::new(align_bytes));
        Preallocate { below, size_bytes, align_bytes, data_end: AtomicU64::new(AS_THE_FILE) }
    }

    /// The length of the file once it holds `size` bytes.
    fn ahead_of(&self, size: u64) -> Option<u64> {
        let align_bytes = self.align_bytes.load(Ordering::Relaxed).max(1);
        size.checked_add(self.size_bytes.load(Ordering::Relaxed))?.checked_next_multiple_of(align_bytes)
    }

    /// Cuts reserved and unused space off the file.
    pub(crate) async fn trim(&self) -> Result<()> {
        let end = self.data_end.swap(AS_THE_FILE, Ordering::AcqRel);
        if end < self.below.size() {
            let cut = self.below.resize(end, Preallocation::Off).await;
            if cut.is_err() {
                self.data_end.store(end, Ordering::Release);
            }
            return cut;
        }
        Ok(())
    }
}

/// The space beyond the end, and the unit of the length, in bytes.
pub(crate) fn preallocated_sizes(options: &BlockdevOptions) -> Result<(u64, u64)> {
    const SECTOR_BYTES: u64 = 512;
    let align_bytes = options.number("prealloc-align").unwrap_or(ALIGN_BYTES);
    if !align_bytes.is_multiple_of(SECTOR_BYTES) {
        let message = "prealloc-align parameter of preallocate filter is not aligned to 512";
        return Err(Error::invalid_argument(message));
    }
    Ok((options.number("prealloc-size").unwrap_or(AHEAD_BYTES), align_bytes))
}

impl LiveOptions for Preallocate {
    fn keys(&self) -> &'static [&'static str] {
        &["prealloc-align", "prealloc-size"]
    }

    fn can_go(&self) -> bool {
        false
    }

    fn check(&self, _node: &Node, options: &BlockdevOptions, _discards: bool) -> Result<Apply> {
        let (size_bytes, align_bytes) = preallocated_sizes(options)?;
        Ok(Box::new(move |node| {
            if let Some(filter) = node.driver().downcast::<Preallocate>() {
                filter.size_bytes.store(size_bytes, Ordering::Relaxed);
                filter.align_bytes.store(align_bytes, Ordering::Relaxed);
            }
        }))
    }
}

impl Filter for Preallocate {
    fn name(&self) -> &'static str {
        schemas::PREALLOCATE.name
    }

    fn below(&self) -> &Below {
        &self.below
    }

    fn live_options(&self) -> Option<&dyn LiveOptions> {
        Some(self)
    }

    /// Space ahead is cut off before a reopening.
    fn moves_freely(&self) -> bool {
        true
    }

    fn size(&self) -> u64 {
        self.data_end.load(Ordering::Acquire).min(self.below.size())
    }

    fn map(&self, offset: u64, _len: u64, _intent: Intent) -> Mapped<'_> {
        Mapped::Below(&self.below, offset)
    }

    /// The caller makes one change of the length at a time.
    fn resize(&self, size: u64, preallocation: Preallocation) -> Work<'_> {
        Box::pin(async move {
            let before = Filter::size(self);
            let grows = size > before && preallocation == Preallocation::Off;
            if !grows {
                // The file ends where its data does before it is shortened or preallocated by the user's options.
                self.trim().await?;
                return self.below.resize(size, preallocation).await;
            }
            if size > self.below.size() {
                let ahead = self.ahead_of(size).filter(|ahead| i64::try_from(*ahead).is_ok());
                let reserved = match ahead {
                    Some(ahead) => self.below.resize(ahead, Preallocation::Falloc).await.is_ok(),
                    None => false,
                };
                // No space for more than the request, or a file that can't reserve any.
                if !reserved {
                    self.below.resize(size, Preallocation::Off).await?;
                }
            }
            self.data_end.store(size, Ordering::Release);
            Ok(())
        })
    }

    fn permissions(&self, wanted: Permissions, _read_only: bool) -> Permissions {
        match wanted.used.contains(PermissionSet::WRITE) {
            true => Permissions {
                used: wanted.used | PermissionSet::RESIZE,
                shared: wanted.shared & !(PermissionSet::WRITE | PermissionSet::RESIZE),
            },
            false => wanted,
        }
    }

    fn complete<'a>(&'a self, flush: Work<'a>) -> Work<'a> {
        Box::pin(async move { self.trim().await.and(flush.await) })
    }

    fn close(&self, read_only: bool) -> Work<'_> {
        if read_only { done(Ok(())) } else { Box::pin(self.trim()) }
    }
}
