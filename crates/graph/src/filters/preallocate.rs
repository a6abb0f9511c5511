// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Preallocate: a file that grows gets space ahead of its data, so that it grows seldom and in large pieces.

use super::Filter;
use crate::node::{Below, Intent, Mapped, Preallocation, Work, done};
use crate::options::schemas;
use cowshed_storage::{PermissionSet, Permissions};
use cowshed_types::Result;
use std::sync::atomic::{AtomicU64, Ordering};

/// No end of its own: the node is as long as the file below.
const AS_THE_FILE: u64 = u64::MAX;

/// The filter. It shows the length that its user knows; the file below is longer until the filter is closed. After a crash the file
/// keeps zeroes behind its end, which no format minds.
pub struct Preallocate {
    below: Below,
    /// Space beyond the new end, in bytes.
    size_bytes: u64,
    /// The file's length is a multiple of this, in bytes.
    align_bytes: u64,
    /// The length that the user knows.
    data_end: AtomicU64,
}

impl Preallocate {
    pub(crate) fn new(below: Below, size_bytes: u64, align_bytes: u64) -> Preallocate {
        Preallocate { below, size_bytes, align_bytes, data_end: AtomicU64::new(AS_THE_FILE) }
    }

    /// The length of the file once it holds `size` bytes.
    fn ahead_of(&self, size: u64) -> Option<u64> {
        size.checked_add(self.size_bytes)?.checked_next_multiple_of(self.align_bytes.max(1))
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

impl Filter for Preallocate {
    fn name(&self) -> &'static str {
        schemas::PREALLOCATE.name
    }

    fn below(&self) -> &Below {
        &self.below
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
