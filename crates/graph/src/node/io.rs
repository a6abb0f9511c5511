// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Requests: the checks that every driver needs, then the driver.

use super::driver::{Intent, Mapped, Place, Transfer, whole_sectors};
use super::{ByNode, CountedBy, DetectZeroes, LocalFuture, Node, Preallocation, Reading, ZeroFlags, boxed};
use crate::stats::IoKind;
use cowshed_storage::IoBuf;
#[cfg(mutants)]
use cowshed_types::slip;
use cowshed_types::{Error, ErrorKind, Result};
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Node {
    /// True for a throttle filter that does nothing else to a request. While no change of the graph runs, a request may
    /// go past it if the filter's group lets it go. It is counted here all the same.
    pub(crate) fn is_plain_throttle(&self) -> bool {
        let plain = !self.settings.is_writethrough()
            && !self.settings.is_probed_raw()
            && !self.settings.has_no_data()
            && self.settings.detect_zeroes() == DetectZeroes::Off;
        self.throttle().is_some() && plain && self.deadline.is_none() && self.check_open().is_ok()
    }

    /// True when an observer follows writes.
    #[inline]
    pub(crate) fn is_tracked(&self) -> bool {
        self.tracking.is_active()
    }

    /// Fills `buf` from byte `offset`; reading past the end is `InvalidArgument`. After an error all of `buf` is
    /// zeroes.
    #[inline]
    pub fn read(&self, offset: u64, buf: IoBuf) -> impl Future<Output = (Result<()>, IoBuf)> {
        self.read_counted(offset, buf, ByNode)
    }

    /// As [`Node::read`].
    pub(crate) async fn read_counted<C: CountedBy>(
        &self,
        offset: u64,
        mut buf: IoBuf,
        counting: C,
    ) -> (Result<()>, IoBuf) {
        let (len, start_ns) = (buf.len() as u64, self.start_ns(counting));
        if let Err(error) = self.check_range(offset, len) {
            self.count_invalid(IoKind::Read);
            buf.forget();
            return (Err(error), buf);
        }
        let (result, mut buf) = match self.map_read(offset, len) {
            Mapped::File { file, host, guard } => {
                #[cfg(mutants)]
                let guard = guard.filter(|_| !slip!("reads_unpinned"));
                let done = file.read_at(buf, host).await;
                drop(guard);
                done
            }
            Mapped::Layer(layer, place) => self.read_layers(layer, place, offset, buf).await,
            Mapped::Zeroes => {
                buf.fill(0);
                (Ok(()), buf)
            }
            Mapped::Below(below, at) => below.read(at, buf).await,
            Mapped::Load(load) => match load.await {
                Ok(()) => self.driver.read(offset, buf).await,
                Err(error) => (Err(error), buf),
            },
            Mapped::Nothing | Mapped::Special => self.read_noted(offset, buf).await,
        };
        self.end(counting, IoKind::Read, offset, len, start_ns, &result);
        if result.is_err() {
            buf.forget();
        }
        (result, buf)
    }

    /// As the driver maps it. A reader that must be noted goes the driver's own way, noted before the look at the mapping.
    #[inline]
    pub(super) fn map_read(&self, offset: u64, len: u64) -> Mapped<'_> {
        match self.readers.get() {
            None => self.driver.map(offset, len, Intent::Read),
            Some(_) => Mapped::Special,
        }
    }

    /// As [`Node::map_read`]; `place`: where it is known to be.
    #[inline]
    fn map_placed(&self, place: Option<Place>, offset: u64, len: u64) -> Mapped<'_> {
        match place {
            Some(place) if self.readers.get().is_none() => self.driver.placed(place, len),
            _ => self.map_read(offset, len),
        }
    }

    /// A read that the driver carries out, noted where readers are.
    pub(super) fn read_noted(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        if self.readers.get().is_none() {
            return self.driver.read(offset, buf);
        }
        Box::pin(async move {
            let _reading = self.reading(offset, buf.len() as u64);
            self.driver.read(offset, buf).await
        })
    }

    /// Notes a reader of a range, where a write below is to wait for it.
    pub(super) fn reading(&self, offset: u64, len: u64) -> Option<Reading> {
        self.readers.get().map(|readers| readers.enter(offset, offset.saturating_add(len)))
    }

    /// As [`Node::read`], in a box: for drivers that read from another node.
    pub fn read_boxed(&self, offset: u64, buf: IoBuf) -> LocalFuture<'_, (Result<()>, IoBuf)> {
        boxed!(self, |node| node.read(offset, buf))
    }

    /// As [`Node::read`] of a range that `layer` below has, or one below that. Layers that have nothing of it name the next one, and
    /// are counted. `place`: where `layer` is known to have it.
    pub(super) async fn read_layers(
        &self,
        mut layer: Arc<Node>,
        mut place: Option<Place>,
        offset: u64,
        mut buf: IoBuf,
    ) -> (Result<()>, IoBuf) {
        let (len, start_ns) = (buf.len() as u64, self.clock_ns());
        let mut passed: Vec<Arc<Node>> = Vec::new();
        let (result, mut buf) = loop {
            // A range with a place is within the disk.
            let checked = if place.is_some() { layer.check_usable() } else { layer.check_range(offset, len) };
            if checked.is_err() {
                // The layer above decides about a range behind the end, and reports other errors.
                let (result, buf) = match passed.pop() {
                    None => return self.driver.read(offset, buf).await,
                    Some(above) => {
                        layer = above;
                        layer.read_noted(offset, buf).await
                    }
                };
                break (result, buf);
            }
            let next = match layer.map_placed(place.take(), offset, len) {
                // As above, and not by a future of both: it would be moved once more.
                Mapped::File { file, host, guard } => {
                    #[cfg(mutants)]
                    let guard = guard.filter(|_| !slip!("reads_unpinned"));
                    let read = file.read_at(buf, host).await;
                    drop(guard);
                    break read;
                }
                Mapped::Layer(next, known) => {
                    place = known;
                    next
                }
                Mapped::Zeroes => {
                    buf.fill(0);
                    break (Ok(()), buf);
                }
                // The task that is told to load a table does it, or all others wait for ever.
                #[cfg(mutants)]
                Mapped::Load(_) if slip!("layer_not_loaded") => break layer.read_noted(offset, buf).await,
                Mapped::Load(load) => match load.await {
                    Ok(()) => break layer.read_noted(offset, buf).await,
                    Err(error) => break (Err(error), buf),
                },
                Mapped::Below(..) | Mapped::Nothing | Mapped::Special => {
                    break layer.read_noted(offset, buf).await;
                }
            };
            passed.push(std::mem::replace(&mut layer, next));
        };
        for node in passed.iter().chain([&layer]) {
            node.count(IoKind::Read, offset, len, start_ns, &result);
        }
        if result.is_err() {
            buf.forget();
        }
        (result, buf)
    }

    /// As [`Node::read_boxed`], but bytes past the end of the node read as zeroes: an overlay reads a shorter backing
    /// file so.
    pub fn read_padded(&self, offset: u64, mut buf: IoBuf) -> LocalFuture<'_, (Result<()>, IoBuf)> {
        let inside = usize::try_from(self.size().saturating_sub(offset)).unwrap_or(usize::MAX);
        if inside >= buf.len() {
            return self.read_boxed(offset, buf);
        }
        Box::pin(async move {
            buf[inside..].fill(0);
            if inside == 0 {
                return (Ok(()), buf);
            }
            let head = buf.split_to(inside);
            let (result, mut head) = self.read_boxed(offset, head).await;
            match head.unsplit(buf) {
                Ok(()) => (result, head),
                Err(_) => (Err(Error::internal("the parts of a split buffer did not join")), head),
            }
        })
    }

    /// See [`Node::write`]. `node/requests.rs` carries it on to its end when its caller drops the future.
    #[inline]
    pub(crate) fn run_write(&self, offset: u64, buf: IoBuf) -> impl Future<Output = (Result<()>, IoBuf)> {
        self.write_counted(offset, buf, ByNode)
    }

    /// As [`Node::run_write`]. A lane may count it only while [`Node::is_counted_in_lanes`].
    pub(crate) async fn write_counted<C: CountedBy>(
        &self,
        offset: u64,
        buf: IoBuf,
        counting: C,
    ) -> (Result<()>, IoBuf) {
        let (len, start_ns) = (buf.len() as u64, self.start_ns(counting));
        if let Err(error) = self.check_counted(IoKind::Write, offset, len) {
            return (Err(error), buf);
        }
        let detect = self.settings.detect_zeroes();
        if detect != DetectZeroes::Off && is_zero(&buf) {
            let may_unmap = detect == DetectZeroes::Unmap;
            let flags = ZeroFlags { may_unmap, no_fallback: false };
            return (self.write_zeroes_boxed(offset, buf.len() as u64, flags).await, buf);
        }
        let _turn = match self.settings.is_probed_raw() {
            true => match Box::pin(self.turn_at_ends(offset, len, Some(&buf))).await {
                Ok(turn) => turn,
                Err(error) => return (Err(error), buf),
            },
            false => None,
        };
        let (result, buf) = match self.driver.map(offset, len, Intent::Overwrite) {
            Mapped::File { file, host, guard } => {
                #[cfg(mutants)]
                let guard = guard.filter(|_| !slip!("writes_in_place_unpinned"));
                let done = file.write_at(buf, host).await;
                drop(guard);
                match done {
                    (Err(error), buf) => self.write_again(error, offset, buf).await,
                    done => done,
                }
            }
            Mapped::Nothing => self.driver.write_unmapped(offset, buf).await,
            Mapped::Below(below, at) => below.write(at, buf).await,
            Mapped::Load(load) => match load.await {
                Ok(()) => self.driver.write(offset, buf).await,
                Err(error) => (Err(error), buf),
            },
            Mapped::Zeroes | Mapped::Layer(..) | Mapped::Special => self.driver.write(offset, buf).await,
        };
        self.end_write(counting, IoKind::Write, offset, len, start_ns, &result);
        if result.is_ok() && self.settings.is_writethrough() {
            return (self.flush_boxed().await, buf);
        }
        (result, buf)
    }

    /// Writes once more what failed in place, where the driver has gained space for it.
    #[cold]
    pub(super) fn write_again(&self, error: Error, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Box::pin(async move {
            match error.kind() == ErrorKind::NoSpace && self.driver.gains_space(&error).await {
                true => self.driver.write(offset, buf).await,
                false => (Err(error), buf),
            }
        })
    }

    /// Notes `len` bytes written by a job that goes through the disk once. The kernel may begin to write them before
    /// the job's flush asks for it. Larger ones of the next writes are done beside the job's thread. A hint; it counts
    /// for images in files of this machine.
    pub fn note_bulk_write(&self, len: u64) {
        if let Some(file) = self.driver.content_file() {
            file.note_bulk_write(len);
        }
    }

    /// As [`Node::run_write`], in a box: for drivers that write to another node.
    pub(crate) fn write_boxed(&self, offset: u64, buf: IoBuf) -> LocalFuture<'_, (Result<()>, IoBuf)> {
        self.write_boxed_counted(offset, buf, ByNode)
    }

    /// As [`Node::write_counted`], in a box.
    pub(super) fn write_boxed_counted<C: CountedBy>(
        &self,
        offset: u64,
        buf: IoBuf,
        counting: C,
    ) -> LocalFuture<'_, (Result<()>, IoBuf)> {
        boxed!(self, |node| node.write_counted(offset, buf, counting))
    }

    /// As [`Node::write_boxed`], of data that the range already has: it only moves into this image, and dirty bitmaps
    /// don't count it.
    pub(crate) fn write_unchanged_boxed(&self, offset: u64, buf: IoBuf) -> LocalFuture<'_, (Result<()>, IoBuf)> {
        boxed!(self, |node| node.run_write_unchanged(offset, buf))
    }

    async fn run_write_unchanged(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        let (len, start_ns) = (buf.len() as u64, self.clock_ns());
        if let Err(error) = self.check_counted(IoKind::Write, offset, len) {
            return (Err(error), buf);
        }
        let detect = self.settings.detect_zeroes();
        if detect != DetectZeroes::Off && is_zero(&buf) {
            let flags = ZeroFlags { may_unmap: detect == DetectZeroes::Unmap, no_fallback: false };
            return (self.write_zeroes_unchanged_boxed(offset, len, flags).await, buf);
        }
        let (result, buf) = self.driver.write_unchanged(offset, buf).await;
        self.count(IoKind::Write, offset, len, start_ns, &result);
        if let Err(error) = result {
            return (Err(error), buf);
        }
        self.counters.note_written(offset + len);
        (self.flush_if_writethrough().await, buf)
    }

    /// As [`Node::write_zeroes_boxed`], of a range that reads as zeroes already: see [`Node::write_unchanged_boxed`].
    pub(crate) fn write_zeroes_unchanged_boxed(
        &self,
        offset: u64,
        len: u64,
        flags: ZeroFlags,
    ) -> LocalFuture<'_, Result<()>> {
        boxed!(self, |node| node.run_write_zeroes_unchanged(offset, len, flags))
    }

    async fn run_write_zeroes_unchanged(&self, offset: u64, len: u64, flags: ZeroFlags) -> Result<()> {
        self.check_counted(IoKind::WriteZeroes, offset, len)?;
        let start_ns = self.clock_ns();
        let flags = ZeroFlags { may_unmap: flags.may_unmap && self.settings.discards(), ..flags };
        let result = self.driver.write_zeroes_unchanged(offset, len, flags).await;
        self.count(IoKind::WriteZeroes, offset, len, start_ns, &result);
        result?;
        self.counters.note_written(offset + len);
        self.flush_if_writethrough().await
    }

    /// See [`Node::write_zeroes`].
    pub(crate) async fn run_write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Result<()> {
        self.check_counted(IoKind::WriteZeroes, offset, len)?;
        if len == 0 {
            return Ok(());
        }
        let start_ns = self.clock_ns();
        let flags = ZeroFlags { may_unmap: flags.may_unmap && self.settings.discards(), ..flags };
        let _turn = match self.settings.is_probed_raw() {
            true => Box::pin(self.turn_at_ends(offset, len, None)).await?,
            false => None,
        };
        let result = self.driver.write_zeroes(offset, len, flags).await;
        self.end_write(ByNode, IoKind::WriteZeroes, offset, len, start_ns, &result);
        result?;
        self.flush_if_writethrough().await
    }

    /// As [`Node::run_write_zeroes`], in a box.
    pub(crate) fn write_zeroes_boxed(&self, offset: u64, len: u64, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        boxed!(self, |node| node.run_write_zeroes(offset, len, flags))
    }

    /// See [`Node::discard`].
    pub(crate) async fn run_discard(&self, offset: u64, len: u64) -> Result<()> {
        self.check_counted(IoKind::Discard, offset, len)?;
        if len == 0 || !self.settings.discards() {
            return Ok(());
        }
        let start_ns = self.clock_ns();
        let _turn = match self.settings.is_probed_raw() {
            true => Box::pin(self.turn_at_ends(offset, len, None)).await?,
            false => None,
        };
        let result = self.driver.discard(offset, len).await;
        self.count(IoKind::Discard, offset, len, start_ns, &result);
        self.tracking.written(offset, len);
        result?;
        self.flush_if_writethrough().await
    }

    /// As [`Node::run_discard`], in a box.
    pub(crate) fn discard_boxed(&self, offset: u64, len: u64) -> LocalFuture<'_, Result<()>> {
        boxed!(self, |node| node.run_discard(offset, len))
    }

    /// See [`Node::flush`].
    pub(crate) async fn run_flush(&self) -> Result<()> {
        self.check_open()?;
        if self.settings.is_read_only() {
            return Ok(());
        }
        let start_ns = self.clock_ns();
        let result = self.driver.flush().await;
        self.count(IoKind::Flush, 0, 0, start_ns, &result);
        result
    }

    /// As [`Node::run_flush`], in a box.
    pub(crate) fn flush_boxed(&self) -> LocalFuture<'_, Result<()>> {
        boxed!(self, |node| node.run_flush())
    }

    async fn flush_if_writethrough(&self) -> Result<()> {
        if self.settings.is_writethrough() { self.run_flush().await } else { Ok(()) }
    }

    /// See [`Node::write_compressed`].
    pub(crate) async fn run_write_compressed(&self, clusters: Vec<(u64, IoBuf)>) -> Result<()> {
        for (offset, buf) in &clusters {
            self.check_counted(IoKind::Write, *offset, buf.len() as u64)?;
        }
        if !self.driver.compresses() {
            let message = format!("driver '{}' can't write compressed data", self.driver_name());
            return Err(Error::unsupported(message).file(self.filename()));
        }
        let start_ns = self.clock_ns();
        let spans: Vec<(u64, u64)> = clusters.iter().map(|(offset, buf)| (*offset, buf.len() as u64)).collect();
        let result = self.driver.write_compressed(clusters).await;
        for (offset, len) in spans {
            self.end_write(ByNode, IoKind::Write, offset, len, start_ns, &result);
        }
        result?;
        self.flush_if_writethrough().await
    }

    /// As [`Node::run_write_compressed`], in a box.
    pub(crate) fn write_compressed_boxed(&self, clusters: Vec<(u64, IoBuf)>) -> LocalFuture<'_, Result<()>> {
        boxed!(self, |node| node.run_write_compressed(clusters))
    }

    /// See [`Node::resize`].
    pub(crate) async fn run_resize(&self, size: u64, preallocation: Preallocation) -> Result<()> {
        self.check_open()?;
        self.check_writable()?;
        let sectors = whole_sectors(size);
        if i64::try_from(sectors).is_err() {
            return Err(Error::invalid_argument("the new size is too large").value(size).file(self.filename()));
        }
        let _turn = match self.settings.is_probed_raw() {
            true => Some(Box::pin(self.turn_to_resize(size)).await?),
            false => None,
        };
        let resized = match self.driver.protocol_file().map(|file| self.resizing(file)).transpose() {
            Ok(_locked) => self.driver.resize(size, preallocation).await,
            Err(error) => Err(error),
        };
        if resized.is_ok() {
            self.tracking.resized(sectors);
        }
        resized
    }

    /// As [`Node::run_resize`], in a box.
    pub(crate) fn resize_boxed(&self, size: u64, preallocation: Preallocation) -> LocalFuture<'_, Result<()>> {
        boxed!(self, |node| node.run_resize(size, preallocation))
    }

    /// It may be asked for data at all.
    #[inline(always)]
    fn check_usable(&self) -> Result<()> {
        let is_plain = !self.closed.load(Ordering::Acquire) && self.deadline.is_none() && !self.settings.has_no_data();
        if is_plain { Ok(()) } else { self.check_unusual() }
    }

    /// As [`Self::check_usable`], where it may be unusable.
    #[cold]
    fn check_unusual(&self) -> Result<()> {
        self.check_open()?;
        if let Some(deadline) = &self.deadline {
            deadline.check().map_err(|error| error.file(self.filename()))?;
        }
        if self.settings.has_no_data() {
            let message = "the image was opened for what it says of itself, without its data file";
            return Err(Error::invalid_argument(message).file(self.filename()));
        }
        Ok(())
    }

    pub(super) fn check_range(&self, offset: u64, len: u64) -> Result<()> {
        self.check_usable()?;
        match offset.checked_add(len) {
            Some(end) if end <= self.size() => Ok(()),
            _ => Err(self.past_the_end(offset, len)),
        }
    }

    #[cold]
    fn past_the_end(&self, offset: u64, len: u64) -> Error {
        Error::invalid_argument(format!(
            "request of {len} bytes at offset {offset} is past the end of the disk ({} bytes)",
            self.size()
        ))
        .file(self.filename())
    }

    fn check_writable(&self) -> Result<()> {
        if self.settings.is_read_only() {
            return Err(self.read_only_error());
        }
        Ok(())
    }

    pub(super) fn read_only_error(&self) -> Error {
        Error::new(ErrorKind::ReadOnly, "the image is read-only").file(self.filename())
    }

    /// As [`Node::check_write`]; a request that is refused counts as invalid.
    pub(super) fn check_counted(&self, kind: IoKind, offset: u64, len: u64) -> Result<()> {
        self.check_write(offset, len).inspect_err(|_| self.count_invalid(kind))
    }

    pub(super) fn check_write(&self, offset: u64, len: u64) -> Result<()> {
        self.check_writable()?;
        self.check_range(offset, len)
    }
}

/// True when all bytes are zero.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    // Wide chunks without an early exit inside let the compiler use vector instructions.
    let mut chunks = bytes.chunks_exact(128);
    chunks.all(|chunk| chunk.iter().fold(0, |acc, byte| acc | byte) == 0)
        && bytes.chunks_exact(128).remainder().iter().all(|&byte| byte == 0)
}
