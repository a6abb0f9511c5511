// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The qcow2 driver as a node sees it.

use super::Qcow2Driver;
use super::span::Direct;
use crate::node::{
    Driver, Intent, LocalFuture, Mapped, NamedBacking, Node, OnCorruption, Place, Preallocation, StatusExtent,
    Transfer, Work, ZeroFlags,
};
use crate::options::{self, BlockdevOptions};
use cowshed_block::Result;
use cowshed_storage::{File, IoBuf};

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
        match self.placed_at(place, len) {
            Direct::Plain(pin, file, host) => Mapped::File { file, host: host.0, guard: Some(pin) },
            _ => Mapped::Special,
        }
    }

    fn read(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Box::pin(self.read_range(offset, buf))
    }

    fn write(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Box::pin(Qcow2Driver::write(self, offset, buf))
    }

    fn write_unmapped(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Box::pin(self.write_newly(offset, buf))
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

    fn discard(&self, offset: u64, len: u64) -> Work<'_> {
        Box::pin(Qcow2Driver::discard(self, offset, len))
    }

    fn flush(&self) -> Work<'_> {
        Box::pin(Qcow2Driver::flush(self))
    }

    fn resize(&self, size: u64, preallocation: Preallocation) -> Work<'_> {
        Box::pin(Qcow2Driver::resize(self, size, preallocation))
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

    fn tells_damage(&self) -> bool {
        !self.is_corrupt()
    }

    fn observe_corruption(&self, tell: OnCorruption) {
        let _ = self.on_corruption.set(tell);
    }

    fn settle(&self) -> LocalFuture<'_, ()> {
        Box::pin(self.read_ahead_ended())
    }

    fn complete<'a>(&'a self, _flush: Work<'a>) -> Work<'a> {
        Box::pin(Qcow2Driver::complete(self))
    }

    fn stop_writing(&self) {
        Qcow2Driver::stop_writing(self);
    }

    fn start_writing<'a>(&'a self, options: &'a BlockdevOptions, discards: bool) -> Work<'a> {
        Box::pin(async move {
            let options = options::qcow2_options(options, discards)?;
            Qcow2Driver::start_writing(self, &options).await
        })
    }

    fn close(&self, _read_only: bool) -> Work<'_> {
        Box::pin(Qcow2Driver::close(self))
    }
}

impl Node {
    /// The qcow2 driver, for what only that format has.
    pub fn qcow2(&self) -> Option<&Qcow2Driver> {
        self.driver().downcast()
    }
}
