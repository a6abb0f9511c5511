// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The qcow2 driver as a node sees it.

use super::Qcow2Driver;
use super::options::runtime_options;
use crate::DriverOf;
use cowshed_codec::Codec;
use cowshed_graph::encryption::LuksArea;
use cowshed_graph::node::{
    Apply, Backing, BackingLink, BackingName, BitmapChange, BitmapStatus, Bitmaps, Compressing, Driver, Intent,
    LiveOptions, LocalFuture, Mapped, Metadata, NamedBacking, Node, OnCorruption, Place, Preallocation, Snapshots,
    StatusExtent, Transfer, VmState, Work, ZeroFlags, whole_sectors,
};
use cowshed_graph::options::BlockdevOptions;
use cowshed_layout::qcow2::{Header, Snapshot, SnapshotName};
use cowshed_storage::{File, IoBuf};
use cowshed_types::{CacheStatistics, Compression, DirtyBits, Error, Result};
use std::sync::Arc;

/// Options that change while the image is in use.
const LIVE_KEYS: &[&str] = &[
    "lazy-refcounts",
    "l2-cache-size",
    "l2-cache-coverage",
    "l2-cache-entry-size",
    "refcount-cache-size",
    "cache-size",
    "cache-clean-interval",
    "overlap-check",
    "discard-no-unref",
    "pass-discard-request",
    "pass-discard-snapshot",
    "pass-discard-other",
];

impl Driver for Qcow2Driver {
    fn name(&self) -> &'static str {
        "qcow2"
    }

    fn size(&self) -> u64 {
        Qcow2Driver::size(self)
    }

    #[inline]
    fn map(&self, offset: u64, len: u64, intent: Intent) -> Mapped<'_> {
        match intent {
            Intent::Read => self.map_read(offset, len),
            Intent::Overwrite => self.map_write(offset, len),
        }
    }

    fn placed(&self, place: Place, len: u64) -> Mapped<'_> {
        self.placed_at(place, len)
    }

    fn read(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Box::pin(self.read_range(offset, buf))
    }

    fn write(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Box::pin(Qcow2Driver::write(self, offset, buf))
    }

    fn write_unchanged(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Box::pin(self.write_alone(offset, buf))
    }

    fn write_unmapped(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Box::pin(self.write_newly(offset, buf))
    }

    fn gains_space(&self, error: &Error) -> LocalFuture<'_, bool> {
        Qcow2Driver::gains_space(self, error)
    }

    fn write_compressed(&self, clusters: Vec<(u64, IoBuf)>) -> Work<'_> {
        Box::pin(Qcow2Driver::write_compressed(self, clusters))
    }

    fn compresses(&self) -> bool {
        true
    }

    fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Work<'_> {
        Box::pin(Qcow2Driver::write_zeroes(self, offset, len, flags))
    }

    fn write_zeroes_unchanged(&self, offset: u64, len: u64, flags: ZeroFlags) -> Work<'_> {
        Box::pin(self.zero_range(offset, len, flags))
    }

    fn discard(&self, offset: u64, len: u64) -> Work<'_> {
        Box::pin(Qcow2Driver::discard(self, offset, len))
    }

    fn flush(&self) -> Work<'_> {
        Box::pin(Qcow2Driver::flush(self))
    }

    fn resize(&self, size: u64, preallocation: Preallocation) -> Work<'_> {
        Box::pin(Qcow2Driver::resize(self, whole_sectors(size), preallocation))
    }

    fn block_status(&self, offset: u64, len: u64, max_runs: usize) -> LocalFuture<'_, Result<Vec<StatusExtent>>> {
        Box::pin(Qcow2Driver::block_status(self, offset, len, max_runs))
    }

    fn share_from<'a>(
        &'a self,
        offset: u64,
        len: u64,
        source: &'a File,
        source_offset: u64,
    ) -> LocalFuture<'a, Result<u64>> {
        Box::pin(Qcow2Driver::share_from(self, offset, len, source, source_offset))
    }

    fn content_file(&self) -> Option<&File> {
        Some(Qcow2Driver::content_file(self))
    }

    fn can_grow(&self) -> bool {
        true
    }

    fn named_backing(&self) -> Option<NamedBacking> {
        if self.lacks_backing() {
            return None;
        }
        let header = self.header();
        let name = header.backing_file_name().map(|name| name.into_owned());
        Some((name, header.backing_format().map(|format| format.into_owned())))
    }

    fn bitmaps(&self) -> Option<&dyn Bitmaps> {
        Some(self)
    }

    fn backing(&self) -> Option<&dyn Backing> {
        Some(self)
    }

    fn backing_link(&self) -> Option<&dyn BackingLink> {
        Some(self)
    }

    fn metadata(&self) -> Option<&dyn Metadata> {
        Some(self)
    }

    fn compressing(&self) -> Option<&dyn Compressing> {
        Some(self)
    }

    fn key_slots(&self) -> Option<Result<(LuksArea, &'static str)>> {
        Some(self.luks_area().map(|area| (area, "encrypt.")))
    }

    fn is_encrypted(&self) -> bool {
        Qcow2Driver::is_encrypted(self)
    }

    fn snapshots(&self) -> Option<&dyn Snapshots> {
        Some(self)
    }

    fn vm_state(&self) -> Option<&dyn VmState> {
        Some(self)
    }

    fn live_options(&self) -> Option<&dyn LiveOptions> {
        Some(self)
    }

    fn allocation(&self) -> Option<(u64, u64)> {
        let geometry = self.engine.geometry();
        Some((geometry.cluster_size(), geometry.subcluster_size()))
    }

    fn holds_changes(&self) -> bool {
        // With the dirty bit lazy refcounts are counted anew by the next opening: nothing is lost with them.
        let counts_later = self.engine.lazy_refcounts() && self.header().is_dirty();
        self.engine.holds_changes(!counts_later)
    }

    fn mapped_bytes(&self) -> Option<u64> {
        let coverage_bits = self.engine.geometry().l2_coverage_bits();
        Some(u64::from(self.header().l1_size).saturating_mul(1 << coverage_bits))
    }

    fn cache_statistics(&self) -> Option<CacheStatistics> {
        Some(self.statistics())
    }

    fn is_corrupt(&self) -> bool {
        Qcow2Driver::is_corrupt(self)
    }

    fn records_zeroes(&self) -> bool {
        self.header().version >= 3
    }

    fn data_file_name(&self) -> Option<String> {
        self.header().data_file_name().map(|name| name.into_owned())
    }

    fn tells_damage(&self) -> bool {
        !Qcow2Driver::is_corrupt(self)
    }

    fn observe_corruption(&self, tell: OnCorruption) {
        let _ = self.on_corruption.set(tell);
    }

    fn settle<'a>(&'a self, _drained: &'a [Arc<Node>]) -> LocalFuture<'a, ()> {
        Box::pin(self.read_ahead_ended())
    }

    fn complete<'a>(&'a self, _flush: Work<'a>) -> Work<'a> {
        Box::pin(Qcow2Driver::complete(self))
    }

    fn stop_writing(&self) -> Result<()> {
        self.lost_bitmaps()?;
        Qcow2Driver::stop_writing(self);
        Ok(())
    }

    fn start_writing<'a>(&'a self, options: &'a BlockdevOptions, discards: bool) -> Work<'a> {
        Box::pin(async move {
            let options = runtime_options(options, discards)?;
            Qcow2Driver::start_writing(self, &options).await
        })
    }

    fn begin_writing(&self) -> Work<'_> {
        Box::pin(self.mark_beside_snapshots())
    }

    fn close(&self, _read_only: bool) -> Work<'_> {
        Box::pin(Qcow2Driver::close(self))
    }
}

impl Bitmaps for Qcow2Driver {
    fn may_have_bitmaps(&self) -> bool {
        self.header().version >= 3
    }

    fn list(&self) -> LocalFuture<'_, Result<Vec<BitmapStatus>>> {
        Box::pin(self.bitmaps())
    }

    fn bits<'a>(&'a self, name: &'a str) -> LocalFuture<'a, Result<Arc<DirtyBits>>> {
        Box::pin(self.bitmap_bits(name))
    }

    fn change<'a>(&'a self, changes: &'a [BitmapChange]) -> LocalFuture<'a, Result<()>> {
        Box::pin(self.change_bitmaps(changes))
    }
}

impl Metadata for Qcow2Driver {
    fn header(&self) -> Header {
        Qcow2Driver::header(self)
    }

    fn file(&self) -> &File {
        self.image_file()
    }
}

impl Compressing for Qcow2Driver {
    fn method(&self) -> Compression {
        Qcow2Driver::header(self).compression()
    }

    fn set_codec(&self, codec: Codec) -> Result<()> {
        Qcow2Driver::set_codec(self, codec)
    }
}

impl BackingName for Qcow2Driver {
    fn name(&self) -> Option<String> {
        self.header().backing_file_name().map(|name| name.into_owned())
    }

    fn format(&self) -> Option<String> {
        self.header().backing_format().map(|format| format.into_owned())
    }

    fn plan_for(&self, bytes: Option<u64>) {
        match bytes {
            Some(bytes) => self.plan_for_backing_bytes(bytes),
            None => self.plan_for_backing(),
        }
    }
}

impl BackingLink for Qcow2Driver {
    fn is_left_out(&self) -> bool {
        self.lacks_backing()
    }

    fn link(&self, backing: Option<Arc<Node>>) {
        self.set_backing(backing);
    }
}

impl Backing for Qcow2Driver {
    fn rename<'a>(&'a self, name: Option<&'a str>, format: Option<&'a str>) -> Work<'a> {
        Box::pin(self.change_backing_file(name, format))
    }

    fn make_empty(&self) -> Work<'_> {
        Box::pin(Qcow2Driver::make_empty(self))
    }
}

impl Snapshots for Qcow2Driver {
    fn list(&self) -> LocalFuture<'_, Result<Vec<Snapshot>>> {
        Box::pin(self.internal_snapshots())
    }

    fn take<'a>(
        &'a self,
        name: &'a str,
        options: &'a BlockdevOptions,
        discards: bool,
    ) -> LocalFuture<'a, Result<String>> {
        Box::pin(async move {
            let options = runtime_options(options, discards)?;
            self.take_internal_snapshot(name, &options).await
        })
    }

    fn delete<'a>(
        &'a self,
        wanted: &'a SnapshotName,
        options: &'a BlockdevOptions,
        discards: bool,
    ) -> LocalFuture<'a, Result<Snapshot>> {
        Box::pin(async move {
            let options = runtime_options(options, discards)?;
            self.delete_internal_snapshot(wanted, &options).await
        })
    }
}

impl VmState for Qcow2Driver {
    fn start(&self) -> u64 {
        self.vm_state_start()
    }

    fn read(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Box::pin(self.read_vm_state(offset, buf))
    }

    fn write(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Box::pin(self.write_vm_state(offset, buf))
    }
}

impl LiveOptions for Qcow2Driver {
    fn keys(&self) -> &'static [&'static str] {
        LIVE_KEYS
    }

    fn check(&self, _node: &Node, options: &BlockdevOptions, discards: bool) -> Result<Apply> {
        let options = runtime_options(options, discards)?;
        self.check_options(&options)?;
        Ok(Box::new(move |node| {
            if let Some(driver) = node.qcow2() {
                driver.apply(&options);
            }
        }))
    }

    fn prepare<'a>(&'a self, options: &'a BlockdevOptions, discards: bool) -> Work<'a> {
        Box::pin(async move { self.apply_slice_bytes(&runtime_options(options, discards)?).await })
    }
}
