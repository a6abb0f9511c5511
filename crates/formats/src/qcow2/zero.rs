// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Zero writes and discards: whole (sub)clusters by an edit, the edges as data.

use super::Qcow2Driver;
use cowshed_graph::node::ZeroFlags;
use cowshed_qcow2::{ExtentList, ZeroMode};
use cowshed_storage::IoBuf;
use cowshed_types::{Error, ErrorKind, GuestOffset, Mapping, Result};
use std::sync::atomic::Ordering;

/// Zeroes that must be written are written in pieces of this size.
const ZERO_CHUNK_BYTES: u64 = 1 << 20;

/// The refusal of a zero write that would have to write data.
const WHOLE_CLUSTERS: &str = "only whole clusters can be zeroed without writing data";

impl Qcow2Driver {
    /// Makes a range in bytes read as zeroes. The node has checked the range.
    pub async fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Result<()> {
        self.be_writable().await?;
        if flags.no_fallback && self.header().version < 3 {
            return Err(self.error(Error::unsupported("images of version 2 have no flag for clusters of zeroes")));
        }
        if len == 0 {
            return Ok(());
        }
        if self.is_recording() {
            self.record(offset, len).await?;
        }
        self.zero_range(offset, len, flags).await
    }

    /// As [`Self::write_zeroes`], and no bitmap records it. The range isn't empty.
    pub(super) async fn zero_range(&self, offset: u64, len: u64, flags: ZeroFlags) -> Result<()> {
        self.be_writable().await?;
        let _writing = self.enter(offset, len).await;
        if self.is_data_file_raw() {
            return match self.is_encrypted() {
                // Zeroes of the file's are none of the disk's.
                true => self.write_zero_data(offset, len).await,
                false => self.zero_raw_data(offset, len, flags).await,
            };
        }
        let unit = self.engine.zero_unit();
        let end = offset + len;
        let start = offset.next_multiple_of(unit);
        // The last unit of the disk may be shorter: nothing lies behind it.
        let stop = if end == self.size() { end } else { end / unit * unit };
        if start >= stop {
            if flags.no_fallback {
                self.check_blank(offset, end).await?;
            }
            return self.zero_edge(offset, end, flags).await;
        }
        if flags.no_fallback {
            // A caller that asks for all or nothing must not find a part of it done.
            self.check_blank(offset, start).await?;
            self.check_blank(stop, end).await?;
        }
        self.zero_edge(offset, start, flags).await?;
        let mode = if flags.may_unmap { ZeroMode::Unmap } else { ZeroMode::Keep };
        self.zero_units(start, stop, mode, flags).await?;
        self.zero_edge(stop, end, flags).await
    }

    async fn zero_units(&self, start: u64, stop: u64, mode: ZeroMode, flags: ZeroFlags) -> Result<()> {
        let mut at = start;
        while at < stop {
            self.make_room_for_edits().await?;
            match self.plan(|engine| engine.zero(GuestOffset(at), stop - at, mode)).await {
                Ok(done) => at += done,
                Err(error) if error.kind() == ErrorKind::Unsupported && !flags.no_fallback => {
                    let end = (at / self.cluster_size() + 1) * self.cluster_size();
                    let end = end.min(stop);
                    self.write_zero_data(at, end - at).await?;
                    at = end;
                }
                Err(error) => return Err(error),
            }
            self.wrote_metadata.store(true, Ordering::Relaxed);
            self.events.notify();
            self.tell_tolerated();
        }
        Ok(())
    }

    /// Refuses a range in whose units there is something else than zeroes.
    async fn check_blank(&self, start: u64, end: u64) -> Result<()> {
        if start >= end {
            return Ok(());
        }
        let unit = self.engine.zero_unit();
        let (from, to) = (start / unit * unit, end.next_multiple_of(unit).min(self.size()));
        match self.reads_zero_with_backing(from, to - from).await? {
            true => Ok(()),
            false => Err(self.error(Error::unsupported(WHOLE_CLUSTERS))),
        }
    }

    /// Zeroes parts of units. Each unit becomes a zero unit where the rest of it reads as zeroes, too, else the part is
    /// written as data.
    async fn zero_edge(&self, start: u64, end: u64, flags: ZeroFlags) -> Result<()> {
        let unit = self.engine.zero_unit();
        let mut at = start;
        while at < end {
            let from = at / unit * unit;
            let stop = (from + unit).min(self.size());
            let len = end.min(stop) - at;
            if !self.zero_blank_unit(from, stop - from).await? {
                if flags.no_fallback {
                    return Err(self.error(Error::unsupported(WHOLE_CLUSTERS)));
                }
                self.write_zero_data(at, len).await?;
            }
            at += len;
        }
        Ok(())
    }

    /// Makes a unit that reads as zeroes a zero unit, so that it reads so on any backing file. False where it may hold
    /// something else, or the format has no zero units.
    async fn zero_blank_unit(&self, start: u64, len: u64) -> Result<bool> {
        if !self.reads_zero_with_backing(start, len).await? {
            return Ok(false);
        }
        self.make_room_for_edits().await?;
        // Another write may have come meanwhile: the planner looks at the unit's own data once more.
        match self.plan(|engine| engine.zero(GuestOffset(start), len, ZeroMode::Blank)).await {
            Ok(_) => {
                self.wrote_metadata.store(true, Ordering::Relaxed);
                self.events.notify();
                Ok(true)
            }
            Err(error) if error.kind() == ErrorKind::Unsupported => Ok(false),
            Err(error) => Err(error),
        }
    }

    pub(super) async fn write_zero_data(&self, start: u64, len: u64) -> Result<()> {
        let mut at = start;
        while at < start + len {
            let bytes = ZERO_CHUNK_BYTES.min(start + len - at);
            self.write_range(at, IoBuf::zeroed(bytes as usize)).await.0?;
            at += bytes;
        }
        Ok(())
    }

    /// True when the mapping alone has a range as zeroes.
    pub(super) async fn reads_zero(&self, start: u64, len: u64) -> Result<bool> {
        let mut at = start;
        let backing_size = self.engine.backing_size().unwrap_or(0);
        while at < start + len {
            let mut extents = ExtentList::default();
            let mapped = self.plan(|engine| engine.map(GuestOffset(at), start + len - at, &mut extents)).await?;
            let is_zero = extents.iter().all(|extent| match extent.mapping {
                Mapping::Zero { .. } => true,
                Mapping::Unallocated => !self.no_backing && extent.guest.0 >= backing_size,
                _ => false,
            });
            if !is_zero {
                return Ok(false);
            }
            at += mapped;
        }
        Ok(true)
    }

    /// True when mappings alone, those of the backing chain included, have a range as zeroes.
    async fn reads_zero_with_backing(&self, start: u64, len: u64) -> Result<bool> {
        let end = start + len;
        let mut at = start;
        while at < end {
            let mut extents = ExtentList::default();
            let mapped = self.plan(|engine| engine.map(GuestOffset(at), end - at, &mut extents)).await?;
            for extent in extents.iter() {
                let is_zero = match extent.mapping {
                    Mapping::Zero { .. } => true,
                    Mapping::Unallocated => self.backing_is_zero(extent.guest.0, extent.len).await?,
                    _ => false,
                };
                if !is_zero {
                    return Ok(false);
                }
            }
            at += mapped;
        }
        Ok(true)
    }

    async fn backing_is_zero(&self, start: u64, len: u64) -> Result<bool> {
        let backing = self.backing.load();
        let Some(backing) = &*backing else { return Ok(!self.no_backing) };
        let end = (start + len).min(backing.size());
        let mut at = start;
        while at < end {
            let runs = backing.block_status_chain_boxed(at, end - at, 1).await?;
            let Some(run) = runs.first().filter(|run| run.zero) else { return Ok(false) };
            at = run.start + run.len;
        }
        Ok(true)
    }

    /// With a raw data file the zeroes must be in the file itself.
    async fn zero_raw_data(&self, offset: u64, len: u64, flags: ZeroFlags) -> Result<()> {
        let mut at = offset;
        let end = offset + len;
        while at < end {
            match self.zero_in_place(at, end - at, flags.may_unmap).await? {
                0 => {
                    let bytes = (self.cluster_size() - at % self.cluster_size()).min(end - at);
                    self.write_zero_data(at, bytes).await?;
                    at += bytes;
                }
                bytes => at += bytes,
            }
        }
        Ok(())
    }

    /// Zeroes data that is mapped in place in the data file, by the file system's means. Returns the bytes done; 0
    /// where the range must be written instead.
    async fn zero_in_place(&self, at: u64, len: u64, may_unmap: bool) -> Result<u64> {
        let mut extents = ExtentList::default();
        loop {
            let seen = self.events.now();
            let pin = self.engine.pin();
            match self.engine.map_overwrite(GuestOffset(at), len, &mut extents) {
                Ok(_) => {
                    let Some(extent) = extents.first() else { return Ok(0) };
                    let Mapping::Data { host, file, .. } = extent.mapping else { return Ok(0) };
                    let file = self.stored_in(file);
                    let result = match may_unmap && !file.keeps_space() {
                        true => file.punch_hole(host.0, extent.len).await,
                        false => file.zero_range(host.0, extent.len).await,
                    };
                    drop(pin);
                    return match result {
                        Ok(()) => Ok(extent.len),
                        Err(error) if error.kind() == ErrorKind::Unsupported => Ok(0),
                        Err(error) => Err(error),
                    };
                }
                Err(stall) => {
                    drop(pin);
                    self.settle(stall, seen).await?;
                }
            }
        }
    }

    /// The length from `at` on without data, a unit at least: data that can't be zeroed in place stays.
    async fn without_data(&self, at: u64, len: u64) -> Result<u64> {
        let mut extents = ExtentList::default();
        self.plan(|engine| engine.map(GuestOffset(at), len, &mut extents)).await?;
        let unit = self.engine.zero_unit();
        Ok(match extents.first() {
            Some(extent) if !matches!(extent.mapping, Mapping::Data { .. }) => extent.len,
            _ => (unit - at % unit).min(len),
        })
    }

    /// Gives a range back: whole (sub)clusters only, a hint. The node has checked the range.
    pub async fn discard(&self, offset: u64, len: u64) -> Result<()> {
        self.be_writable().await?;
        if self.is_recording() {
            self.record(offset, len).await?;
        }
        let unit = self.engine.zero_unit();
        let end = offset + len;
        let start = offset.next_multiple_of(unit);
        let stop = if end == self.size() { end } else { end / unit * unit };
        let mut at = start;
        let _writing = self.enter(offset, len).await;
        // A hole in encrypted data would read as garbage until the mapping changes.
        if self.data_file.is_some() && !self.is_encrypted() {
            // The data file's space is given back in place; that is a write of zeroes to allocated data.
            while at < stop {
                at += match self.zero_in_place(at, stop - at, true).await? {
                    0 => self.without_data(at, stop - at).await?,
                    done => done,
                };
            }
            if self.is_data_file_raw() {
                return Ok(());
            }
            at = start;
        }
        let flags = ZeroFlags { may_unmap: true, no_fallback: true };
        if at < stop {
            self.zero_units(at, stop, ZeroMode::Discard, flags).await?;
        }
        Ok(())
    }
}
