// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Writes that need clusters: at most one read and one write for the data, copy-on-write included.

use super::Qcow2Driver;
use cowshed_qcow2::{Allocation, Fill};
use cowshed_storage::IoBuf;
use cowshed_storage::fault::Event;
use cowshed_types::{Error, ErrorKind, Extent, GuestOffset, HostOffset, Mapping, Result, slip, without};
use std::sync::atomic::Ordering;

/// Up to this much is read in one piece around the caller's data, rather than before and behind it.
const ONE_READ_BYTES: u64 = 256 << 10;
/// Zero filling from this size on is asked of the file system first.
const ZERO_RANGE_BYTES: u64 = 128 << 10;

/// An allocation that is aborted where its request goes away without a commit, as with its thread's executor.
pub(super) struct PendingAllocation<'a> {
    driver: &'a Qcow2Driver,
    allocation: Option<Allocation>,
}

impl<'a> PendingAllocation<'a> {
    pub(super) fn new(driver: &'a Qcow2Driver, allocation: Allocation) -> Self {
        PendingAllocation { driver, allocation: Some(allocation) }
    }

    pub(super) fn allocation(&self) -> Option<&Allocation> {
        self.allocation.as_ref()
    }

    /// The allocation, to be committed or aborted by the caller.
    pub(super) fn take(&mut self) -> Option<Allocation> {
        self.allocation.take()
    }
}

impl Drop for PendingAllocation<'_> {
    fn drop(&mut self) {
        // After a panic the engine must not be touched: a second panic here would end the process.
        if let Some(allocation) = self.allocation.take().filter(|_| !std::thread::panicking()) {
            self.driver.engine.abort(allocation, false);
            self.driver.events.notify();
        }
    }
}

impl Qcow2Driver {
    /// Writes the front of `buf` into new or not yet valid (sub)clusters. Returns the bytes written (0: plan again),
    /// that part of the buffer, and the rest.
    pub(super) async fn write_allocating(&self, at: u64, mut buf: IoBuf) -> (Result<u64>, IoBuf, IoBuf) {
        let len = buf.len() as u64;
        self.meet(Event::ClusterAlloc).await;
        let mut bounded = true;
        let plan = self.try_plan(|engine| {
            let bounded = std::mem::take(&mut bounded);
            engine.begin_allocate(GuestOffset(at), len, bounded)
        });
        let allocation = match plan.await {
            Ok(Some(allocation)) => allocation,
            other => {
                let none = buf.split_to(0);
                return (other.map(|_| 0), none, buf);
            }
        };
        let bytes = allocation.data_end - allocation.data_start;
        let data = buf.split_to(bytes as usize);
        let lacking = self.lacks_ahead(&allocation);
        let mut pending = PendingAllocation::new(self, allocation);
        if let Some(ahead) = lacking {
            Box::pin(self.reserve_ahead(ahead)).await;
        }
        let (result, data) = match &pending.allocation {
            Some(allocation) => self.write_filled(allocation, data).await,
            None => (Err(Error::internal("an allocation went away")), data),
        };
        let result = match (result, pending.allocation.take()) {
            (Ok(()), Some(allocation)) => {
                self.stored_in(allocation.file).note_new_data(written_bytes(&allocation));
                self.engine.commit(allocation).map(|()| bytes)
            }
            (Err(error), Some(allocation)) => {
                if slip!("mapping_after_a_failed_copy") {
                    let _ = self.engine.commit(allocation);
                } else {
                    self.engine.abort(allocation, true);
                }
                Err(error)
            }
            (result, None) => result.map(|()| bytes),
        };
        self.wrote_metadata.store(true, Ordering::Relaxed);
        self.events.notify();
        (result, data, buf)
    }

    /// Lets a write-back cycle run first when too much metadata is dirty.
    pub(super) async fn throttle_dirty(&self) -> Result<()> {
        if self.engine.wants_writeback(true) { self.write_back(false).await } else { Ok(()) }
    }

    /// As [`Self::throttle_dirty`], for edits that allocate no clusters but those of tables.
    pub(super) async fn make_room_for_edits(&self) -> Result<()> {
        if self.engine.wants_writeback(false) { self.write_back(false).await } else { Ok(()) }
    }

    /// Writes data and filling of an allocation.
    async fn write_filled(&self, allocation: &Allocation, data: IoBuf) -> (Result<()>, IoBuf) {
        if allocation.encrypted {
            return self.write_filled_encrypted(allocation, data).await;
        }
        let head_len = allocation.data_start - allocation.start;
        let tail_len = allocation.end - allocation.data_end;
        let is_there = |fill, len| len == 0 || fill == Fill::None || (fill == Fill::Zero && allocation.host_is_zero);
        if is_there(allocation.head, head_len) && is_there(allocation.tail, tail_len) {
            return self.stored_in(allocation.file).write_at(data, allocation.host.0 + head_len).await;
        }
        // In a box: the common case doesn't move the state that only this needs.
        Box::pin(self.write_around(allocation, data)).await
    }

    /// As [`Self::write_filled`], where something has to be written before or behind the data.
    async fn write_around(&self, allocation: &Allocation, data: IoBuf) -> (Result<()>, IoBuf) {
        let head_len = allocation.data_start - allocation.start;
        let tail_len = allocation.end - allocation.data_end;
        let total = allocation.end - allocation.start;
        if !without!("merged_copy")
            && allocation.head == Fill::Copy
            && allocation.tail == Fill::Copy
            && total <= ONE_READ_BYTES
        {
            return self.write_merged(allocation, data).await;
        }
        let mut host = allocation.host;
        let mut bufs = Vec::with_capacity(3);
        let head = (allocation.head, allocation.head_source());
        match self.filling(allocation, head, allocation.start, head_len, host).await {
            Ok(Some(head)) => bufs.push(head),
            Ok(None) => host = host + head_len,
            Err(error) => return (Err(error), data),
        }
        let tail_host = allocation.host + (allocation.data_end - allocation.start);
        let tail = (allocation.tail, allocation.tail_source());
        let tail = match self.filling(allocation, tail, allocation.data_end, tail_len, tail_host).await {
            Ok(tail) => tail,
            Err(error) => return (Err(error), data),
        };
        let file = self.stored_in(allocation.file);
        if allocation.head == Fill::Copy || allocation.tail == Fill::Copy {
            self.meet(Event::CowWrite).await;
        }
        if bufs.is_empty() && tail.is_none() {
            return file.write_at(data, host.0).await;
        }
        let data_index = bufs.len();
        bufs.push(data);
        bufs.extend(tail);
        #[cfg(ablation)]
        if without!("vectored_writes") {
            return one_by_one(file, bufs, host, data_index).await;
        }
        let (result, mut bufs) = file.write_vectored_at(bufs, host.0).await;
        (result, bufs.swap_remove(data_index))
    }

    /// The bytes before or behind the data: `None` when nothing has to be written there.
    async fn filling(
        &self,
        allocation: &Allocation,
        (fill, source): (Fill, Option<Mapping>),
        start: GuestOffset,
        len: u64,
        host: HostOffset,
    ) -> Result<Option<IoBuf>> {
        match fill {
            _ if len == 0 => Ok(None),
            Fill::None => Ok(None),
            Fill::Zero if allocation.host_is_zero => Ok(None),
            Fill::Zero => {
                if len >= ZERO_RANGE_BYTES {
                    match self.stored_in(allocation.file).zero_range(host.0, len).await {
                        Ok(()) => return Ok(None),
                        Err(error) if error.kind() == ErrorKind::Unsupported => {}
                        Err(error) => return Err(error),
                    }
                }
                Ok(Some(IoBuf::zeroed(len as usize)))
            }
            Fill::Copy => {
                self.meet(Event::CowRead).await;
                self.old_data(source, start, len).await.map(Some)
            }
        }
    }

    /// The present data of a range whose guest clusters an allocation has locked. `source`: its place as the plan found it,
    /// where it is one. No other request changes the mapping of a locked cluster, and its entry holds the reference to its host cluster.
    async fn old_data(&self, source: Option<Mapping>, start: GuestOffset, len: u64) -> Result<IoBuf> {
        let buf = IoBuf::scratch(len as usize);
        // In a box: reading may end in a deeper layer.
        let (result, buf) = match source {
            Some(mapping) if start.0 + len <= self.size() => {
                let _pin = self.engine.pin();
                let extent = Extent { guest: start, len, mapping };
                Box::pin(self.read_extent(extent, buf, len <= self.cluster_size())).await
            }
            _ => Box::pin(self.read_range(start.0, buf)).await,
        };
        result.map(|()| buf)
    }

    /// Copy-on-write on both sides of the data: one read of it all, the data laid over, one write.
    async fn write_merged(&self, allocation: &Allocation, data: IoBuf) -> (Result<()>, IoBuf) {
        let buf = match self.merged(allocation, &data).await {
            Ok(buf) => buf,
            Err(error) => return (Err(error), data),
        };
        self.meet(Event::CowWrite).await;
        let (result, _) = self.stored_in(allocation.file).write_at(buf, allocation.host.0).await;
        (result, data)
    }

    async fn merged(&self, allocation: &Allocation, data: &[u8]) -> Result<IoBuf> {
        let total = (allocation.end - allocation.start) as usize;
        let mut buf = match allocation.head == Fill::Copy || allocation.tail == Fill::Copy {
            true => {
                self.meet(Event::CowRead).await;
                self.old_data(allocation.source(), allocation.start, total as u64).await?
            }
            false => IoBuf::zeroed(total),
        };
        let head = (allocation.data_start - allocation.start) as usize;
        buf[head..head + data.len()].copy_from_slice(data);
        Ok(buf)
    }

    /// As [`Self::write_filled`], through the cipher. Copied data was decrypted on reading and is encrypted for its new
    /// place. Zeroes are encrypted too.
    async fn write_filled_encrypted(&self, allocation: &Allocation, data: IoBuf) -> (Result<()>, IoBuf) {
        let bytes = match self.merged(allocation, &data).await {
            Ok(merged) => self.encrypted(allocation.start, allocation.host, merged).await,
            Err(error) => Err(error),
        };
        match bytes {
            Ok(bytes) => {
                let (result, _) = self.stored_in(allocation.file).write_at(bytes, allocation.host.0).await;
                (result, data)
            }
            Err(error) => (Err(error), data),
        }
    }
}

/// The bytes that an allocation writes to the disk: its data and the copies around them.
pub(super) fn written_bytes(allocation: &Allocation) -> u64 {
    let copied = |fill, len| if fill == Fill::Copy { len } else { 0 };
    allocation.data_end - allocation.data_start
        + copied(allocation.head, allocation.data_start - allocation.start)
        + copied(allocation.tail, allocation.end - allocation.data_end)
}

/// Writes `bufs` one behind the other from `host` on, and returns the one of `index`.
#[cfg(ablation)]
async fn one_by_one(file: &File, bufs: Vec<IoBuf>, host: HostOffset, index: usize) -> (Result<()>, IoBuf) {
    let (mut result, mut written, mut at) = (Ok(()), Vec::new(), host.0);
    for buf in bufs {
        let len = buf.len() as u64;
        let (outcome, buf) = file.write_at(buf, at).await;
        result = result.and(outcome);
        written.push(buf);
        at += len;
    }
    (result, written.swap_remove(index))
}
