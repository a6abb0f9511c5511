// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Preallocation: mapping clusters before the first write to them.

use super::Qcow2Driver;
use cowshed_graph::node::Preallocation;
use cowshed_qcow2::Allocation;
use cowshed_storage::IoBuf;
use cowshed_types::{ErrorKind, GuestOffset, HostOffset, Result};
use std::sync::atomic::Ordering;

/// Zeroes are written in pieces of this size.
const ZERO_CHUNK_BYTES: u64 = 1 << 20;

impl Qcow2Driver {
    /// Maps every unallocated cluster of a range of the disk. `progress` gets the bytes done so far.
    pub async fn preallocate(
        &self,
        offset: u64,
        len: u64,
        mode: Preallocation,
        mut progress: impl FnMut(u64),
    ) -> Result<()> {
        self.check_writable()?;
        let mut at = offset;
        let end = offset + len;
        let mut host_end = 0;
        while at < end && mode != Preallocation::Off {
            self.throttle_dirty().await?;
            let planned = self.try_plan(|engine| engine.begin_preallocate(GuestOffset(at), end - at)).await?;
            let Some(planned) = planned else { continue };
            let Some(allocation) = planned else {
                at = (at / self.cluster_size() + 1) * self.cluster_size();
                continue;
            };
            let (next, host) = (allocation.end.0, allocation.host.0 + (allocation.end - allocation.start));
            let result = match self.prepare_space(&allocation, mode).await {
                Ok(()) => self.engine.commit_preallocation(allocation),
                Err(error) => {
                    self.engine.abort(allocation, true);
                    Err(error)
                }
            };
            self.wrote_metadata.store(true, Ordering::Relaxed);
            self.events.notify();
            result?;
            host_end = host_end.max(host);
            at = next;
            progress(at.min(end) - offset);
        }
        // Everything that is mapped lies inside the file.
        let file = self.stored_in(self.data_place());
        if host_end > file.len() {
            file.set_len(host_end).await?;
        }
        Ok(())
    }

    async fn prepare_space(&self, allocation: &Allocation, mode: Preallocation) -> Result<()> {
        let file = self.stored_in(allocation.file);
        let HostOffset(host) = allocation.host;
        let len = allocation.end - allocation.start;
        // Encrypted clusters are mapped as zeroes, whatever their bytes; version 2 can't do that.
        let is_hidden = allocation.encrypted && self.engine.config().format.version >= 3;
        match mode {
            Preallocation::Full => self.fill_with_zeroes(allocation).await,
            Preallocation::Metadata if is_hidden => Ok(()),
            Preallocation::Metadata if allocation.encrypted => self.fill_with_zeroes(allocation).await,
            Preallocation::Falloc => {
                if (allocation.encrypted || !allocation.host_is_zero) && !is_hidden {
                    self.fill_with_zeroes(allocation).await?;
                }
                match file.allocate(host, len).await {
                    // In a file system that reserves no space, only the written bytes have it.
                    Err(error) if error.kind() == ErrorKind::Unsupported && !file.is_device() => {
                        self.fill_with_zeroes(allocation).await
                    }
                    Err(error) if error.kind() == ErrorKind::Unsupported => {
                        Err(error.context("preallocation mode 'falloc'"))
                    }
                    allocated => allocated,
                }
            }
            _ if allocation.host_is_zero => Ok(()),
            _ => match file.punch_hole(host, len).await {
                Err(error) if error.kind() == ErrorKind::Unsupported => self.fill_with_zeroes(allocation).await,
                other => other,
            },
        }
    }

    async fn fill_with_zeroes(&self, allocation: &Allocation) -> Result<()> {
        let file = self.stored_in(allocation.file);
        let mut at = allocation.host.0;
        let end = at + (allocation.end - allocation.start);
        while at < end {
            let bytes = ZERO_CHUNK_BYTES.min(end - at);
            let zeroes = IoBuf::zeroed(bytes as usize);
            let guest = allocation.start + (at - allocation.host.0);
            let zeroes = match allocation.encrypted {
                true => self.encrypted(guest, HostOffset(at), zeroes).await?,
                false => zeroes,
            };
            file.write_at(zeroes, at).await.0?;
            at += bytes;
        }
        Ok(())
    }
}
