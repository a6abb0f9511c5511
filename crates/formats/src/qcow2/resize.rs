// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Changing the virtual size.

use super::Qcow2Driver;
use cowshed_graph::node::{Preallocation, ZeroFlags};
use cowshed_graph::protocols::check_can_preallocate;
use cowshed_qcow2::{L1Growth, Tail, TailCut, ZeroMode};
use cowshed_storage::fault::Event;
use cowshed_storage::rt;
use cowshed_types::{Error, ErrorKind, GuestOffset, Result, slip};
use std::sync::atomic::Ordering;
use std::time::Duration;

impl Qcow2Driver {
    /// Changes the virtual size, in bytes. The node has checked that it may.
    pub async fn resize(&self, size: u64, preallocation: Preallocation) -> Result<()> {
        self.be_writable().await?;
        if !size.is_multiple_of(512) {
            return Err(self.error(Error::invalid_argument("the size must be a multiple of 512").value(size)));
        }
        let header = self.header();
        if header.version < 3 && header.nb_snapshots > 0 && size != self.size() {
            // Its snapshots have no size of their own.
            let message = "a version 2 image which has snapshots can't be resized";
            return Err(self.error(Error::unsupported(message)));
        }
        match size.cmp(&self.size()) {
            std::cmp::Ordering::Equal => Ok(()),
            std::cmp::Ordering::Greater => self.grow(size, preallocation).await,
            std::cmp::Ordering::Less if preallocation != Preallocation::Off => {
                let error = Error::invalid_argument("preallocation can't be used for shrinking an image");
                Err(self.error(error.qemu("Preallocation can't be used for shrinking an image")))
            }
            std::cmp::Ordering::Less => self.shrink(size).await,
        }
    }

    async fn grow(&self, size: u64, preallocation: Preallocation) -> Result<()> {
        if size > i64::MAX as u64 {
            return Err(self.error(Error::invalid_argument("the size is too large").value(size)));
        }
        if matches!(preallocation, Preallocation::Falloc | Preallocation::Full) {
            let checked = check_can_preallocate(self.stored_in(self.data_place()), preallocation);
            checked.map_err(|error| error.context("Failed to resize underlying file"))?;
        }
        // The data file is the disk as it is, in the new part as well.
        let preallocation = match preallocation {
            Preallocation::Off if self.is_data_file_raw() => Preallocation::Metadata,
            chosen => chosen,
        };
        self.check_bitmaps_for_resize(size).await?;
        self.grow_l1(size).await?;
        let old = self.size();
        // Clusters that an interrupted shrink has left there go.
        self.unmap_behind(old).await?;
        // Clusters that are preallocated hold zeroes by that.
        let zeroed = match preallocation {
            Preallocation::Off => size,
            _ => old.next_multiple_of(self.cluster_size()).min(size),
        };
        let mut made = self.zero_new_range(old, zeroed).await;
        if preallocation != Preallocation::Off && made.is_ok() {
            made = self.preallocate_new_range(old, size, preallocation).await;
        }
        // Also where it isn't raw: other programs expect the disk's length of the file.
        if let Some(data_file) = self.data_file.as_ref().filter(|file| made.is_ok() && file.len() < size) {
            made = data_file.set_len(size).await;
        }
        if made.is_ok() {
            made = self.write_back(false).await;
        }
        if let Err(error) = made {
            // The mappings made so far would take space that no file shows.
            if let Err(more) = self.unmap_behind(old).await {
                tracing::warn!("space behind the end of the disk stays allocated: {more}");
            }
            return Err(error);
        }
        self.set_header_size(size).await?;
        self.engine.publish_size(size);
        Ok(())
    }

    /// An L1 table that maps `size` bytes, durably.
    pub(super) async fn grow_l1(&self, size: u64) -> Result<()> {
        while let Err(error) = self.grow_l1_now(size).await {
            self.unless_space_is_gained(error).await?;
        }
        Ok(())
    }

    async fn grow_l1_now(&self, size: u64) -> Result<()> {
        let Some(growth) = self.plan(|engine| engine.begin_l1_growth(size)).await? else { return Ok(()) };
        let guard = self.cycle_lock.lock().await;
        let result = match self.write_l1(&growth).await {
            Ok(()) => {
                let switched = self.switch_l1(&growth).await;
                self.engine.end_l1_growth(growth, switched.is_ok());
                switched
            }
            Err(error) => {
                self.engine.abort_l1_growth(growth);
                Err(error)
            }
        };
        drop(guard);
        self.events.notify();
        result
    }

    async fn write_l1(&self, growth: &L1Growth) -> Result<()> {
        self.meet(Event::L1GrowAllocTable).await;
        self.cycle(true).await?;
        self.meet(Event::L1GrowWriteTable).await;
        self.write_all(&[self.engine.l1_image(growth)?]).await?;
        if !slip!("header_before_the_new_l1_table") {
            self.barrier().await?;
        }
        Ok(())
    }

    async fn switch_l1(&self, growth: &L1Growth) -> Result<()> {
        self.meet(Event::L1GrowActivateTable).await;
        let (offset, entries) = (growth.offset.0, growth.entries);
        self.edit_header(|header| {
            header.l1_size = entries;
            header.l1_table_offset = offset;
        })
        .await?;
        self.barrier().await
    }

    async fn set_header_size(&self, size: u64) -> Result<()> {
        if self.resize_bitmaps(size).await? {
            return Ok(());
        }
        let _guard = self.cycle_lock.lock().await;
        self.edit_header(|header| header.size = size).await?;
        self.barrier().await?;
        self.wrote_metadata.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Makes the new range behind the old end of a grown disk zero, whatever the last cluster or a longer backing file
    /// holds. Such a backing file may grow later, so none of the range is left to it.
    async fn zero_new_range(&self, old: u64, new: u64) -> Result<()> {
        let cluster_end = old.next_multiple_of(self.cluster_size()).min(new);
        let is_backed = self.engine.backing_size().is_some_and(|backing| backing > old);
        if old < cluster_end && (is_backed || !self.reads_zero(old, cluster_end - old).await?) {
            self.write_zero_data(old, cluster_end - old).await?;
        }
        if is_backed && cluster_end < new && !slip!("growth_shows_the_backing_file") {
            // Up to a whole cluster: behind `new` there is no disk. Zeroes of version 2 take space, and stop with the backing file.
            let has_zero_clusters = self.header().version >= 3;
            let end = if has_zero_clusters { new } else { self.engine.backing_size().unwrap_or(0).min(new) };
            let stop = end.next_multiple_of(self.cluster_size());
            let flags = ZeroFlags { may_unmap: true, no_fallback: false };
            let mut at = cluster_end;
            while at < stop {
                self.throttle_dirty().await?;
                let planned = self.plan(|engine| engine.zero(GuestOffset(at), stop - at, ZeroMode::Unmap)).await;
                match planned {
                    Ok(done) => at += done,
                    Err(error) if error.kind() == ErrorKind::Unsupported && !flags.no_fallback => {
                        self.write_zero_data(at, self.cluster_size()).await?;
                        at += self.cluster_size();
                    }
                    Err(error) => return Err(error),
                }
                self.events.notify();
            }
        }
        Ok(())
    }

    /// Space for the new part of a grown disk. The cluster across the old end is copied where the backing file shows in it: a
    /// cluster that is mapped as zeroes would hide that.
    async fn preallocate_new_range(&self, old: u64, size: u64, mode: Preallocation) -> Result<()> {
        let cluster_start = old / self.cluster_size() * self.cluster_size();
        let cluster_end = old.next_multiple_of(self.cluster_size()).min(size);
        let is_backed = self.engine.backing_size().is_some_and(|backing| cluster_start < backing);
        let start = match old < cluster_end && is_backed && !slip!("preallocated_over_the_backing_file") {
            true => {
                self.write_zero_data(old, cluster_end - old).await?;
                cluster_end
            }
            false => old,
        };
        self.preallocate(start, size - start, mode, |_| {}).await
    }

    async fn shrink(&self, size: u64) -> Result<()> {
        let old = self.size();
        self.check_bitmaps_for_resize(size).await?;
        self.own_tail(size).await.map_err(not_cut)?;
        self.engine.publish_size(size);
        // Also where guests' discards are ignored: a shrink is to give space back.
        self.shrinks.store(true, Ordering::Relaxed);
        let cut = self.cut_and_switch(size, old).await;
        self.shrinks.store(false, Ordering::Relaxed);
        cut?;
        match &self.data_file {
            Some(data_file) if data_file.len() > size => data_file.set_len(size).await,
            _ => Ok(()),
        }
    }

    /// Nothing is cut off where the rest would then fail for lack of space, or for a table that is damaged or can't be read.
    async fn own_tail(&self, size: u64) -> Result<()> {
        let mut tail = self.tail_of(size);
        loop {
            self.make_room_for_edits().await?;
            if slip!("shrink_cuts_before_it_may_fail") || self.plan(|engine| engine.own_tail(&mut tail)).await? {
                return Ok(());
            }
            self.events.notify();
        }
    }

    /// The data behind the new end goes before the header has it: QEMU shows data behind the end again when it makes the
    /// disk longer. Under the old size an unmapped range would show a backing file, so zero clusters hide that one until
    /// the switch. Version 2 has none: there the header goes first, and a power cut may leave data behind the end.
    async fn cut_and_switch(&self, size: u64, old: u64) -> Result<()> {
        let stands_alone = !self.engine.stands_on_another() || slip!("shrink_unmaps_before_the_header");
        let first = match stands_alone {
            true => Some(TailCut::Unmap),
            false => (self.header().version >= 3).then_some(TailCut::Zero),
        };
        let first = first.filter(|_| !slip!("shrink_switches_before_it_cuts"));
        let switched = async {
            if let Some(cut) = first {
                self.cut_behind(size, cut).await.map_err(not_cut)?;
                self.write_back(false).await?;
            }
            let lost = "the data behind the new end is gone, and the disk keeps its old size";
            self.set_header_size(size).await.map_err(|error| if first.is_some() { error.context(lost) } else { error })
        }
        .await;
        if let Err(error) = switched {
            self.engine.publish_size(old);
            return Err(error);
        }
        if first != Some(TailCut::Unmap) {
            self.unmap_behind(size).await?;
            self.write_back(false).await?;
        }
        self.reclaim().await
    }

    /// A walk over the clusters that start at `size` or behind.
    fn tail_of(&self, size: u64) -> Tail {
        let size = if slip!("shrink_loses_the_tail") { size / self.cluster_size() * self.cluster_size() } else { size };
        Tail::new(GuestOffset(size.next_multiple_of(self.cluster_size())))
    }

    /// Unmaps every cluster that starts at `size` or behind.
    pub(super) async fn unmap_behind(&self, size: u64) -> Result<()> {
        self.cut_behind(size, TailCut::Unmap).await
    }

    async fn cut_behind(&self, size: u64, cut: TailCut) -> Result<()> {
        let tag = self.engine.drain_tag();
        while !slip!("shrink_overtakes_writers") && !self.engine.is_drained(tag) {
            rt::sleep(Duration::from_millis(1)).await;
        }
        let mut tail = self.tail_of(size);
        loop {
            self.make_room_for_edits().await?;
            if self.plan(|engine| engine.cut_tail(&mut tail, cut)).await? {
                return Ok(());
            }
            self.tell_tolerated();
            self.wrote_metadata.store(true, Ordering::Relaxed);
            self.events.notify();
        }
    }
}

/// QEMU's words for a shrink that can't cut off what lies behind the new end.
fn not_cut(error: Error) -> Error {
    match error.kind() {
        ErrorKind::Io => {
            let errno = error.errno();
            error.qemu("Failed to discard cropped clusters").with_errno(errno)
        }
        _ => error,
    }
}
