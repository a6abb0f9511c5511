// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A file of a simulated machine, which behaves as system calls do: short counts, alignment rules, error numbers.

use super::fault::OpKind;
use super::log::{Change, FileId};
use super::pending::{Completion, Outcome, Request, Value};
use super::world::World;
use cowshed_storage::simulated::{Simulated, SimulatedFile};
use cowshed_storage::{Alignment, DataRange, File, IoBuf};
use cowshed_types::Errno;
use futures_util::future::LocalBoxFuture;
use std::any::Any;
use std::result::Result;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// An open file of a [`World`]. Everything that a kernel leaves to its caller (short counts, alignment, the behaviour
/// after a failed sync) is left to the caller here too.
#[derive(Clone)]
pub struct SimFile {
    world: World,
    id: FileId,
    name: Arc<str>,
    writable: Arc<AtomicBool>,
    /// Changes while no operation runs.
    alignment: Arc<AtomicU64>,
}

impl SimFile {
    pub(super) fn new(world: World, id: FileId, name: &str, writable: bool, alignment: u64) -> Self {
        let alignment = Arc::new(AtomicU64::new(alignment));
        SimFile { world, id, name: name.into(), writable: Arc::new(AtomicBool::new(writable)), alignment }
    }

    /// The machine that it is on.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Opened for writing.
    pub fn is_writable(&self) -> bool {
        self.writable.load(Ordering::Relaxed)
    }

    /// As after opening it anew for writing.
    pub fn make_writable(&self) {
        self.writable.store(true, Ordering::Relaxed);
    }

    /// The multiple that offsets, lengths and memory need, in bytes; 1 without direct I/O.
    pub fn alignment(&self) -> Alignment {
        let alignment = self.alignment.load(Ordering::Relaxed);
        Alignment { memory: alignment as usize, offset: alignment }
    }

    /// Opened with direct I/O.
    pub fn is_direct(&self) -> bool {
        self.alignment().offset != 1
    }

    /// With direct I/O from now on, or without.
    pub fn set_direct(&self, direct: bool) -> Alignment {
        let alignment = if direct { self.world.lock().config.sector_bytes } else { 1 };
        self.alignment.store(alignment, Ordering::Relaxed);
        self.alignment()
    }

    /// Length in bytes, now.
    pub fn len(&self) -> u64 {
        self.world.lock().files[self.id].volatile.len()
    }

    /// True for length 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its length can't change.
    pub fn is_fixed(&self) -> bool {
        self.world.lock().is_fixed(self.id)
    }

    /// Space taken, in bytes.
    pub fn allocated_bytes(&self) -> u64 {
        self.world.lock().files[self.id].volatile.allocated_bytes()
    }

    /// Reads into `buf`; returns the count, which is short at the end of the file.
    pub async fn read(&self, buf: IoBuf, offset: u64) -> (Result<usize, Errno>, IoBuf) {
        if let Err(errno) = self.check_aligned(offset, std::slice::from_ref(&buf)) {
            return (Err(errno), buf);
        }
        let Outcome { result, mut bufs } = self.submit(Request::Read { offset, buf }).await;
        let buf = bufs.pop().unwrap_or_else(|| unreachable!("a read gives its buffer back"));
        (result.map(|value| count(value) as usize), buf)
    }

    /// Writes `bufs` one after the other; returns the count, which may be short.
    pub async fn write(&self, bufs: Vec<IoBuf>, offset: u64) -> (Result<usize, Errno>, Vec<IoBuf>) {
        let total: usize = bufs.iter().map(|buf| buf.len()).sum();
        let checked = self.check_writable().and_then(|()| self.check_aligned(offset, &bufs));
        if let Err(errno) = checked.and_then(|()| check_end(offset, total as u64)) {
            return (Err(errno), bufs);
        }
        let mut bytes = Vec::with_capacity(total);
        bufs.iter().for_each(|buf| bytes.extend_from_slice(buf));
        let change = Change::Write { offset, bytes: bytes.into() };
        let Outcome { result, bufs } = self.submit(Request::Write { change, bufs }).await;
        (result.map(|value| count(value) as usize), bufs)
    }

    /// A barrier over operations completed before; each failure is reported once.
    pub async fn sync(&self) -> Result<(), Errno> {
        self.submit(Request::Sync).await.result.map(|_| ())
    }

    /// Gives the space of a range in bytes back.
    pub async fn punch_hole(&self, offset: u64, len: u64) -> Result<(), Errno> {
        self.check_feature(self.world.lock().config.features.punch_hole)?;
        let change = Change::Zero { offset, len, keep_space: false, grow: false };
        self.change(OpKind::PunchHole, change).await
    }

    /// Makes a range in bytes read as zeroes and keeps its space.
    pub async fn zero_range(&self, offset: u64, len: u64) -> Result<(), Errno> {
        self.check_feature(self.world.lock().config.features.zero_range)?;
        let change = Change::Zero { offset, len, keep_space: true, grow: true };
        self.change(OpKind::ZeroRange, change).await
    }

    /// Takes space for a range in bytes; grows the file to hold it.
    pub async fn allocate(&self, offset: u64, len: u64) -> Result<(), Errno> {
        self.check_feature(self.world.lock().config.features.allocate)?;
        self.change(OpKind::Allocate, Change::Allocate { offset, len }).await
    }

    /// Sets the length in bytes.
    pub async fn set_len(&self, len: u64) -> Result<(), Errno> {
        self.check_writable()?;
        check_end(len, 0)?;
        let change = Change::SetLen(len);
        self.submit(Request::Change { kind: OpKind::SetLen, change }).await.result.map(|_| ())
    }

    /// The first run of data at or behind `offset`.
    pub async fn next_data(&self, offset: u64) -> Result<Option<DataRange>, Errno> {
        match self.submit(Request::NextData { offset }).await.result? {
            Value::Data(range) => Ok(range),
            Value::Count(_) => unreachable!("a search for data gives a range"),
        }
    }

    /// The file system copies ranges itself.
    pub fn can_copy_range(&self) -> bool {
        self.world.lock().config.features.copy_range
    }

    /// Copies from `source`, a file of the same machine; returns the count, which is short at its end.
    pub async fn copy_range(&self, source: &SimFile, source_offset: u64, offset: u64, len: u64) -> Result<u64, Errno> {
        self.check_writable()?;
        self.check_feature(self.world.lock().config.features.copy_range)?;
        let len = len.min(source.len().saturating_sub(source_offset));
        check_end(offset, len)?;
        if len == 0 {
            return Ok(0);
        }
        let mut bytes = vec![0; len as usize];
        source.world.lock().files[source.id].volatile.read(source_offset, &mut bytes);
        let change = Change::Write { offset, bytes: bytes.into() };
        self.submit(Request::Change { kind: OpKind::CopyRange, change }).await.result.map(count)
    }

    async fn change(&self, kind: OpKind, change: Change) -> Result<(), Errno> {
        self.check_writable()?;
        let (start, end) = change.range();
        check_end(start, end - start)?;
        if start == end {
            return Err(Errno::EINVAL);
        }
        self.submit(Request::Change { kind, change }).await.result.map(|_| ())
    }

    fn submit(&self, request: Request) -> Completion {
        self.world.submit(self.id, request)
    }

    fn check_writable(&self) -> Result<(), Errno> {
        // The error of a write on a descriptor opened for reading.
        const EBADF: Errno = Errno(9);
        if self.is_writable() { Ok(()) } else { Err(EBADF) }
    }

    fn check_feature(&self, supported: bool) -> Result<(), Errno> {
        if supported { Ok(()) } else { Err(Errno::ENOTSUP) }
    }

    fn check_aligned(&self, offset: u64, bufs: &[IoBuf]) -> Result<(), Errno> {
        let alignment = self.alignment().offset;
        let aligned = |value: u64| value.is_multiple_of(alignment);
        let fits = bufs.iter().all(|buf| aligned(buf.len() as u64) && aligned(buf.as_ptr() as usize as u64));
        if aligned(offset) && fits { Ok(()) } else { Err(Errno::EINVAL) }
    }
}

impl std::fmt::Debug for SimFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SimFile({})", self.name)
    }
}

fn count(value: Value) -> u64 {
    match value {
        Value::Count(count) => count,
        Value::Data(_) => 0,
    }
}

/// The largest file that the simulated file system takes, in bytes, as ext4 with 4 KiB blocks.
const MAX_FILE_BYTES: u64 = 16 << 40;

fn check_end(offset: u64, len: u64) -> Result<(), Errno> {
    match offset.checked_add(len) {
        Some(end) if end <= MAX_FILE_BYTES => Ok(()),
        _ => Err(Errno::EFBIG),
    }
}

impl From<SimFile> for File {
    fn from(file: SimFile) -> File {
        File::from_simulated(Arc::new(file))
    }
}

impl SimulatedFile for SimFile {
    fn name(&self) -> &str {
        SimFile::name(self)
    }

    fn is_writable(&self) -> bool {
        SimFile::is_writable(self)
    }

    fn make_writable(&self) {
        SimFile::make_writable(self);
    }

    fn alignment(&self) -> Alignment {
        SimFile::alignment(self)
    }

    fn is_direct(&self) -> bool {
        SimFile::is_direct(self)
    }

    fn set_direct(&self, direct: bool) -> Alignment {
        SimFile::set_direct(self, direct)
    }

    fn file_len(&self) -> u64 {
        self.len()
    }

    fn is_fixed(&self) -> bool {
        SimFile::is_fixed(self)
    }

    fn allocated_bytes(&self) -> u64 {
        SimFile::allocated_bytes(self)
    }

    fn read(&self, buf: IoBuf, offset: u64) -> LocalBoxFuture<'_, (Result<usize, Errno>, IoBuf)> {
        Box::pin(SimFile::read(self, buf, offset))
    }

    fn write(&self, bufs: Vec<IoBuf>, offset: u64) -> LocalBoxFuture<'_, (Result<usize, Errno>, Vec<IoBuf>)> {
        Box::pin(SimFile::write(self, bufs, offset))
    }

    fn sync(&self) -> Simulated<'_, ()> {
        Box::pin(SimFile::sync(self))
    }

    fn punch_hole(&self, offset: u64, len: u64) -> Simulated<'_, ()> {
        Box::pin(SimFile::punch_hole(self, offset, len))
    }

    fn zero_range(&self, offset: u64, len: u64) -> Simulated<'_, ()> {
        Box::pin(SimFile::zero_range(self, offset, len))
    }

    fn allocate(&self, offset: u64, len: u64) -> Simulated<'_, ()> {
        Box::pin(SimFile::allocate(self, offset, len))
    }

    fn set_len(&self, len: u64) -> Simulated<'_, ()> {
        Box::pin(SimFile::set_len(self, len))
    }

    fn next_data(&self, offset: u64) -> Simulated<'_, Option<DataRange>> {
        Box::pin(SimFile::next_data(self, offset))
    }

    fn can_copy_range(&self) -> bool {
        SimFile::can_copy_range(self)
    }

    fn copy_range<'a>(
        &'a self,
        source: &'a dyn SimulatedFile,
        source_offset: u64,
        offset: u64,
        len: u64,
    ) -> Simulated<'a, u64> {
        match source.as_any().downcast_ref::<SimFile>() {
            Some(source) => Box::pin(SimFile::copy_range(self, source, source_offset, offset, len)),
            None => Box::pin(std::future::ready(Err(Errno::ENOTSUP))),
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
