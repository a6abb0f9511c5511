// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Whole clusters whose blocks come from another file, shared with it by the file system.

use super::Qcow2Driver;
use super::allocate::PendingAllocation;
use cowshed_storage::File;
use cowshed_types::{GuestOffset, Result};
use std::sync::atomic::Ordering;

impl Qcow2Driver {
    /// Takes over `len` bytes of `source`, as far as whole new clusters go. Returns the number of bytes from the front,
    /// perhaps 0. The node has checked the range.
    pub(crate) async fn share_from(&self, offset: u64, len: u64, source: &File, source_offset: u64) -> Result<u64> {
        self.be_writable().await?;
        let len = len / self.cluster_size() * self.cluster_size();
        if self.cipher.is_some() || len == 0 || !offset.is_multiple_of(self.cluster_size()) {
            return Ok(0);
        }
        if self.is_recording() {
            self.record(offset, len).await?;
        }
        let mut done = 0;
        while done < len {
            match self.share_some(offset + done, len - done, source, source_offset + done).await {
                Err(error) => self.unless_space_is_gained(error).await?,
                Ok(0) => break,
                Ok(shared) => done += shared,
            }
        }
        Ok(done)
    }

    /// As far as one allocation reaches.
    async fn share_some(&self, at: u64, len: u64, source: &File, source_offset: u64) -> Result<u64> {
        self.throttle_dirty().await?;
        let Some(allocation) = self.try_plan(|engine| engine.begin_allocate(GuestOffset(at), len, false)).await? else {
            return Ok(0);
        };
        let mut pending = PendingAllocation::new(self, allocation);
        let Some(allocation) = pending.allocation() else { return Ok(0) };
        let is_plain = !allocation.encrypted
            && allocation.start == allocation.data_start
            && allocation.end == allocation.data_end
            && allocation.start.0 == at;
        let bytes = allocation.data_end - allocation.data_start;
        let shared = match is_plain {
            true => {
                let file = self.stored_in(allocation.file);
                file.share_from(source, source_offset, allocation.host.0, bytes).await
            }
            false => Ok(()),
        };
        let result = match (shared, pending.take()) {
            (Ok(()), Some(allocation)) if is_plain => self.engine.commit(allocation).map(|()| bytes),
            (shared, Some(allocation)) => {
                self.engine.abort(allocation, true);
                shared.map(|()| 0)
            }
            (shared, None) => shared.map(|()| 0),
        };
        self.wrote_metadata.store(true, Ordering::Relaxed);
        self.events.notify();
        result
    }
}
