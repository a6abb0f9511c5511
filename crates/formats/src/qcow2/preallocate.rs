// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Preallocation: mapping clusters before the first write to them.

use super::Qcow2Driver;
use cowshed_graph::node::Preallocation;
use cowshed_qcow2::Allocation;
use cowshed_storage::IoBuf;
use cowshed_types::{ErrorKind, GuestOffset, HostOffset, Result, slip};
use std::sync::atomic::Ordering;

/// Zeroes are written in pieces of this size.
const ZERO_CHUNK_BYTES: u64 = 1 << 20;
/// The file gets length for this much at once, by space for the last bytes of it.
const LENGTH_AHEAD_BYTES: u64 = 64 << 20;
const LENGTH_BYTES: u64 = 4096;

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
        let mut length_block = None;
        while at < end && mode != Preallocation::Off {
            self.throttle_dirty().await?;
            let planned = self.try_plan(|engine| engine.begin_preallocate(GuestOffset(at), end - at)).await?;
            let Some(planned) = planned else { continue };
            let Some(allocation) = planned else {
                at = (at / self.cluster_size() + 1) * self.cluster_size();
                continue;
            };
            let next = allocation.end.0;
            let rest = end.next_multiple_of(self.cluster_size()).saturating_sub(next);
            self.give_back_length_block(&allocation, mode, &mut length_block).await;
            let result = match self.prepare_space(&allocation, mode, rest, &mut length_block).await {
                Ok(()) => self.engine.commit_preallocation(allocation),
                Err(error) => {
                    self.engine.abort(allocation, true);
                    Err(error)
                }
            };
            self.wrote_metadata.store(true, Ordering::Relaxed);
            self.events.notify();
            if let Err(error) = result {
                self.unless_space_is_gained(error).await?;
                continue;
            }
            at = next;
            progress(at.min(end) - offset);
        }
        Ok(())
    }

    /// Space for the clusters of an allocation, which lie inside of the file afterwards. A cycle may write their mapping at any
    /// time from then on. An image that names clusters behind the end of its file takes no writes. `rest`: the bytes
    /// that are still to be preallocated. `length_block`: the reserved bytes that give the file length for more clusters.
    async fn prepare_space(
        &self,
        allocation: &Allocation,
        mode: Preallocation,
        rest: u64,
        length_block: &mut Option<u64>,
    ) -> Result<()> {
        self.fill_space(allocation, mode).await?;
        let file = self.stored_in(allocation.file);
        let end = allocation.host.0 + (allocation.end - allocation.start);
        if end <= file.len() || slip!("length_after_preallocated_mappings") {
            return Ok(());
        }
        // A reservation never shortens a file, which other requests make longer: setting the length might.
        let last = LENGTH_BYTES.min(self.cluster_size());
        let ahead = end.saturating_add(rest.min(LENGTH_AHEAD_BYTES));
        // A change of the length takes time. All that is asked for will be used, and where so much can't be had less may do.
        if ahead > end && file.allocate(ahead - last, last).await.is_ok() {
            *length_block = Some(ahead - last);
            return Ok(());
        }
        match file.allocate(end - last, last).await {
            Ok(()) if mode == Preallocation::Metadata => {
                // The length stays.
                let _ = file.punch_hole(end - last, last).await;
                Ok(())
            }
            // Nothing refers to the clusters yet, and they hold zeroes, or anything where they count as zeroes.
            Err(error) if error.kind() == ErrorKind::Unsupported => {
                file.write_at(IoBuf::zeroed(last as usize), end - last).await.0
            }
            // A full file system gives length still. No other request makes a raw data file longer: it ends with the disk.
            Err(error)
                if error.kind() == ErrorKind::NoSpace && mode == Preallocation::Metadata && self.is_data_file_raw() =>
            {
                file.set_len(end.max(file.len())).await
            }
            done => done,
        }
    }

    /// Makes reserved bytes a hole again, once their cluster is this allocation's: before, another request may write there.
    async fn give_back_length_block(&self, allocation: &Allocation, mode: Preallocation, block: &mut Option<u64>) {
        let clusters = allocation.host.0..allocation.host.0 + (allocation.end - allocation.start);
        if mode == Preallocation::Metadata
            && let Some(block) = block.take_if(|block| clusters.contains(block))
        {
            let len = LENGTH_BYTES.min(self.cluster_size());
            // Only space is lost where a hole can't be punched.
            let _ = self.stored_in(allocation.file).punch_hole(block, len).await;
        }
    }

    async fn fill_space(&self, allocation: &Allocation, mode: Preallocation) -> Result<()> {
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
