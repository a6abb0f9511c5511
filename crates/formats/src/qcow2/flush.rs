// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Flush, write-back cycles, growth of the refcount table, reclaiming freed clusters, closing.

use super::Qcow2Driver;
use cowshed_graph::node::LocalFuture;
use cowshed_layout::qcow2::features::INCOMPAT_DIRTY;
use cowshed_offline::check::end_of_use;
use cowshed_qcow2::{Cycle, CycleEnd, MetaWrite, Reclaim, RefcountGrowth, Stall};
use cowshed_storage::IoBuf;
use cowshed_storage::fault::{Event, as_metadata};
use cowshed_types::{Errno, Error, ErrorKind, HostOffset, Result, slip};
use futures_util::stream::{self, StreamExt};
use std::sync::atomic::Ordering;

/// Metadata writes in flight at once.
const WRITES_AT_ONCE: usize = 32;
/// Flushes by which a full container gets the chance to use freed clusters.
const FLUSHES_FOR_ROOM: u32 = 2;

/// A cycle that counts as failed when its task is dropped half-way.
struct Running<'a> {
    driver: &'a Qcow2Driver,
    cycle: Option<Cycle>,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if let Some(cycle) = self.cycle.take().filter(|_| !std::thread::panicking()) {
            // Its writes may still be on their way: nothing may be written to the same places any more.
            self.driver.abandoned.store(true, Ordering::Relaxed);
            self.driver.engine.end_cycle(cycle, CycleEnd::Failed { stages: 3 });
            self.driver.events.notify();
        }
    }
}

impl Qcow2Driver {
    /// Makes everything written so far durable, metadata included.
    pub async fn flush(&self) -> Result<()> {
        self.be_current().await?;
        if self.is_only_read() {
            return Ok(());
        }
        match self.write_back(false).await {
            // The bare file is being changed since, and everything was made durable for that.
            Err(_) if self.renewal.is_due() => self.be_current().await,
            done => done,
        }
    }

    /// Runs a cycle, or rides on one that starts after this call.
    pub(super) async fn write_back(&self, with_refcounts: bool) -> Result<()> {
        let ticket = self.flushes_asked.fetch_add(1, Ordering::SeqCst) + 1;
        let was_clean = slip!("dirty_bit_decided_before_the_cycle") && !self.engine.is_dirty();
        {
            let _guard = self.cycle_lock.lock().await;
            let begun = if slip!("flush_rides_on_a_running_cycle") { 1 } else { 0 };
            if !with_refcounts && self.flushes_covered.load(Ordering::SeqCst) + begun >= ticket {
                return Ok(());
            }
            self.run(with_refcounts, was_clean).await?;
        }
        self.reclaim().await
    }

    /// One write-back cycle. The caller holds the cycle lock.
    pub(super) async fn cycle(&self, with_refcounts: bool) -> Result<()> {
        self.run(with_refcounts, false).await
    }

    async fn run(&self, with_refcounts: bool, keeps_dirty_bit: bool) -> Result<()> {
        self.check_writable()?;
        let covers = self.flushes_asked.load(Ordering::SeqCst);
        if self.engine.lazy_refcounts() && !keeps_dirty_bit && !self.header().is_dirty() {
            // The cycle decides whether there is anything to write: another queue may be about to change something.
            self.engine.want_dirty_bit();
        }
        let mut running = Running { driver: self, cycle: Some(self.engine.begin_cycle(with_refcounts)) };
        let mut stages = 0;
        let result = match &running.cycle {
            Some(cycle) => self.run_cycle(cycle, &mut stages).await,
            None => Ok(()),
        };
        if let Some(cycle) = running.cycle.take() {
            if !cycle.is_empty() {
                self.wrote_metadata.store(true, Ordering::Relaxed);
            }
            let outcome = match result {
                Ok(()) => CycleEnd::Durable,
                Err(_) => CycleEnd::Failed { stages },
            };
            self.engine.end_cycle(cycle, outcome);
        }
        self.events.notify();
        result?;
        self.flushes_covered.fetch_max(covers, Ordering::SeqCst);
        Ok(())
    }

    /// `stages` counts the stages that were begun.
    async fn run_cycle(&self, cycle: &Cycle, stages: &mut usize) -> Result<()> {
        if cycle.set_dirty_bit && !slip!("dirty_bit_never_set") {
            self.edit_header(|header| header.incompatible_features |= INCOMPAT_DIRTY).await?;
        }
        // The first barrier covers the data as well: it comes before any entry that points to it.
        let mut unsettled = true;
        for (index, stage) in cycle.stages.iter().enumerate() {
            if stage.is_empty() {
                continue;
            }
            if index > 0 && unsettled && !slip!("no_barrier_between_stages") {
                self.barrier().await?;
            }
            match index {
                0 => self.meet(Event::RefblockUpdate).await,
                1 => {
                    self.meet(Event::RefblockAllocHookup).await;
                    self.meet(Event::ReftableUpdate).await;
                }
                _ => {
                    self.meet(Event::L2Update).await;
                    self.meet(Event::L1Update).await;
                }
            }
            *stages = index + 1;
            if let Err(error) = self.write_all(stage).await {
                // Data that needs nothing of this cycle gets its barrier all the same. A failed barrier is remembered.
                // It waits for every write of the file, too.
                let mut skips = slip!("data_without_barrier_after_a_failed_write");
                skips |= slip!("a_failed_cycle_does_not_wait");
                let _ = if skips { Ok(()) } else { self.barrier().await };
                return Err(error);
            }
            unsettled = true;
        }
        if slip!("no_last_barrier") {
            return Ok(());
        }
        self.barrier().await
    }

    /// The data file's barrier before the image's.
    pub(super) async fn barrier(&self) -> Result<()> {
        if let Some(data_file) = &self.data_file
            && !slip!("data_file_not_synced")
        {
            data_file.sync().await?;
        }
        self.file.sync().await
    }

    /// Writes metadata side by side and waits for all of it, also after an error. A write that is still on its way must
    /// not meet the next one to its place.
    pub(super) async fn write_all(&self, writes: &[MetaWrite]) -> Result<()> {
        match self.file.faults() {
            Some(_) => as_metadata(self.write_side_by_side(writes)).await,
            None => self.write_side_by_side(writes).await,
        }
    }

    async fn write_side_by_side(&self, writes: &[MetaWrite]) -> Result<()> {
        let mut running = stream::iter(writes)
            .map(|write| self.file.write_at(IoBuf::copy_from(&write.bytes), write.host.0))
            .buffer_unordered(WRITES_AT_ONCE);
        let mut result = Ok(());
        while let Some((outcome, _)) = running.next().await {
            if result.is_ok() {
                result = outcome;
            }
            if slip!("a_failed_cycle_does_not_wait") && result.is_err() {
                return result;
            }
        }
        result
    }

    /// Returns freed clusters to the allocator, as far as their time has come.
    pub(super) async fn reclaim(&self) -> Result<()> {
        loop {
            let mut reclaim = match self.plan_plainly(|engine| engine.take_reclaimable()).await {
                Err(error) if is_leaked(&error) => {
                    tell_leak(&error, self.engine.leak_reclaimable());
                    continue;
                }
                taken => taken?,
            };
            if reclaim.is_empty() {
                return Ok(());
            }
            self.meet(Event::ClusterFree).await;
            // Their readers have given their pins back, so none puts one in again.
            if !slip!("decompressed_clusters_not_forgotten") {
                self.cluster_cache.forget(&reclaim.holes);
            }
            if slip!("hole_punched_after_reuse") {
                self.plan_plainly(|engine| engine.reclaimed(&mut reclaim)).await?;
            }
            let punches = self.punch.load(Ordering::Relaxed) && !self.file.keeps_space();
            if punches || self.shrinks.load(Ordering::Relaxed) {
                for (host, len) in &reclaim.holes {
                    // Only space is lost where a hole can't be punched.
                    if let Err(error) = self.file.punch_hole(host.0, *len).await
                        && error.kind() != ErrorKind::Unsupported
                    {
                        tracing::warn!("{error}");
                    }
                }
            }
            self.lower_counts(&mut reclaim).await?;
            self.events.notify();
        }
    }

    /// True where a request failed on a full disk, which has room by now. The clusters of the request go back at once. So do
    /// those that only waited for the end of other requests, and a cycle frees those that wait for a flush. The caller has no
    /// pin and no lock of cycles.
    #[cold]
    pub(super) fn gains_space(&self, error: &Error) -> LocalFuture<'_, bool> {
        let is_full = error.kind() == ErrorKind::NoSpace && !slip!("full_until_a_flush");
        Box::pin(async move {
            let waiting = self.engine.waiting_unmapped();
            is_full
                && self.reclaim().await.is_ok()
                && match self.engine.has_freed_since_the_last_cycle() {
                    true => self.write_back(false).await.is_ok(),
                    false => self.engine.waiting_unmapped() < waiting,
                }
        })
    }

    /// The error of a plan, where no space is gained for another attempt.
    #[cold]
    pub(super) fn unless_space_is_gained(&self, error: Error) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            match self.gains_space(&error).await && !slip!("plans_find_no_space") {
                true => Ok(()),
                false => Err(error),
            }
        })
    }

    async fn lower_counts(&self, reclaim: &mut Reclaim) -> Result<()> {
        loop {
            match self.plan_plainly(|engine| engine.reclaimed(reclaim)).await {
                Err(error) if is_leaked(&error) => {
                    tell_leak(&error, 1);
                    self.engine.leak_taken(reclaim);
                }
                done => return done,
            }
        }
    }

    /// Looks for room in a container that can't grow by itself, for the `tries`th time. It may have become longer (a
    /// logical volume), and freed clusters may be used again once that is durable.
    #[cold]
    pub(super) async fn find_room(&self, tries: u32) -> Result<()> {
        if self.engine.container_grew(self.file.measure_len()) {
            return Ok(());
        }
        if tries <= FLUSHES_FOR_ROOM && self.engine.has_quarantined() {
            // In a box: a flush plans, too.
            return Box::pin(self.write_back(false)).await;
        }
        Err(self.no_room())
    }

    pub(super) fn no_room(&self) -> Error {
        let message = "the image doesn't fit into its container, which can't grow";
        self.error(Error::os(Errno::ENOSPC, message).value(format_args!("{} bytes", self.file.len())))
    }

    /// Moves the refcount table to a larger place.
    pub(super) async fn grow_refcounts(&self) -> Result<()> {
        let before = self.engine.refcount_table_clusters();
        let guard = self.cycle_lock.lock().await;
        if self.engine.refcount_table_clusters() != before {
            return Ok(());
        }
        self.engine.prepare_refcount_growth();
        let mut growth = None;
        let result = self.move_refcount_table(&mut growth).await;
        self.engine.end_refcount_growth(growth, result.is_ok());
        drop(guard);
        self.events.notify();
        result
    }

    fn plan_refcount_growth(&self) -> Result<RefcountGrowth> {
        loop {
            match self.engine.begin_refcount_growth() {
                Ok(growth) => return Ok(growth),
                Err(Stall::Full) if self.engine.container_grew(self.file.measure_len()) => {}
                Err(Stall::Full) => return Err(self.no_room()),
                Err(Stall::Error(error)) => return Err(self.error(error)),
                Err(stall) => return Err(Error::internal(format!("a larger refcount table waits for {stall:?}"))),
            }
        }
    }

    async fn move_refcount_table(&self, growth: &mut Option<RefcountGrowth>) -> Result<()> {
        self.meet(Event::ReftableGrow).await;
        self.cycle(true).await?;
        let growth = growth.insert(self.plan_refcount_growth()?);
        self.meet(Event::RefblockAllocWriteTable).await;
        self.write_all(&growth.writes).await?;
        if !slip!("header_before_the_new_refcount_table") {
            self.barrier().await?;
        }
        self.meet(Event::RefblockAllocSwitchTable).await;
        let (offset, clusters) = (growth.table_offset.0, growth.table_clusters);
        self.edit_header(|header| {
            header.refcount_table_offset = offset;
            header.refcount_table_clusters = clusters;
        })
        .await?;
        self.barrier().await
    }

    /// Flushes, clears the dirty bit, returns the space of the tail of the file.
    pub async fn close(&self) -> Result<()> {
        // An image that can't be read anew is complete on disk.
        let _ = self.be_current().await;
        // From here on no task uses the file.
        self.ahead.end().await;
        self.membership.leave();
        if self.is_only_read() || self.closed.swap(true, Ordering::SeqCst) {
            return Ok(());
        }
        self.settle_all().await?;
        self.lost_bitmaps()
    }

    /// Lengthens the file to the end of its last cluster, which some readers want whole: as QEMU not where compressed data end
    /// there. `packed`: where more of these would have gone. A file system that refuses the length harms nothing.
    async fn complete_last_cluster(&self, end: u64, packed: Option<HostOffset>) {
        let last = end - self.cluster_size();
        let is_compressed = packed.is_some_and(|next| next.0 >= last);
        if self.file.len() > last
            && self.file.is_plain()
            && !is_compressed
            && let Err(error) = self.file.set_len(end).await
        {
            tracing::debug!("the last cluster of the image stays cut off: {error}");
        }
    }

    /// Makes the image on disk complete, as a close leaves it. No request may run.
    pub(super) async fn settle_all(&self) -> Result<()> {
        let packed = self.engine.stop_packing();
        self.engine.release_places();
        // Bitmaps that can't be completed keep nothing else from the disk.
        let bitmaps = self.settle_bitmaps().await;
        // Each round may free clusters whose lowered counts the next one writes; no requests run any more.
        for _ in 0..8 {
            self.write_back(!slip!("dirty_bit_cleared_too_early")).await?;
            if !self.engine.is_dirty() && !self.engine.has_quarantined() {
                break;
            }
        }
        if self.wrote_metadata.load(Ordering::Relaxed) && !self.file.is_device() {
            let mut passed = u64::MAX;
            let mut needed = self.plan(|engine| engine.needed_file_len(&mut passed)).await?;
            if needed < self.file.len()
                && !slip!("space_cut_without_a_look")
                && let Some(end) = self.engine.unknown_end(needed)
            {
                // Rare: a crash has left space, or counts are wrong.
                needed = needed.max(end_of_use(&self.file).await.min(end));
            }
            if needed < self.file.len() {
                self.file.set_len(needed).await?;
                self.engine.truncated(needed);
            } else if needed > self.file.len() {
                self.complete_last_cluster(needed, packed).await;
            }
        }
        if self.engine.lazy_refcounts() && self.header().is_dirty() {
            if self.engine.is_dirty() && !slip!("dirty_bit_cleared_too_early") {
                return Err(self.error(Error::internal("refcounts are still dirty at close")));
            }
            self.edit_header(|header| header.incompatible_features &= !INCOMPAT_DIRTY).await?;
            self.file.sync().await?;
        }
        bitmaps
    }
}

/// Freed clusters whose counts can't be read stay counted. The data are durable all the same. A flush that failed for
/// them would end a guest's writes.
fn is_leaked(error: &Error) -> bool {
    error.kind() == ErrorKind::Io
}

fn tell_leak(error: &Error, clusters: usize) {
    tracing::warn!("{clusters} freed clusters stay allocated until 'check -r leaks': {error}");
}
