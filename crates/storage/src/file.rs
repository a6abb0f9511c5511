// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A file that holds an image.

mod changes;
mod shared;
mod space;

use crate::attempts::Attempts;
use crate::blocklock::{Access, BlockGuard, BlockLocks};
use crate::cache::LiveAlignment;
use crate::counters::{FileCounters, FileObserver, FileOp, FileStats};
use crate::fault::{Faults, FaultyFile};
use crate::flush::{FlushGate, FlushStep};
use crate::host::HostFile;
use crate::identity::FileIdentity;
use crate::lock::{LockState, Locking, Permissions};
use crate::medium::{Medium, Space};
use crate::names::text_of_path;
use crate::null::NullFile;
use crate::payload::{Bufs, Payload};
use crate::remote::{Remote, RemoteFile};
use crate::simulated::SimulatedFile;
use crate::write_behind::WriteBehind;
use crate::{Alignment, DataRange, DeviceQueue, IoBuf, LayoutHints, NullOptions, OpenOptions, TransferSizes, rt};
use cowshed_types::{Errno, Error, Result, slip, without};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The largest alignment that a file with faults can ask for, in bytes.
const MAX_FAULTY_ALIGNMENT_BYTES: u64 = 1 << 20;

/// A file, device or simulated file. Cheap to clone; any thread that runs [`crate::rt::block_on`] may use it.
///
/// Operations on one range that run at the same time have no order, as in POSIX. A future that is dropped leaves its
/// operation running: memory and block locks stay with it until it ends.
#[derive(Clone, Debug)]
pub struct File(Arc<Inner>);

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) name: String,
    pub(crate) is_writable: AtomicBool,
    pub(crate) no_flush: AtomicBool,
    pub(crate) keeps_space: AtomicBool,
    pub(crate) alignment: LiveAlignment,
    pub(crate) len: AtomicU64,
    pub(crate) medium: Medium,
    pub(crate) flush: FlushGate,
    pub(crate) behind: WriteBehind,
    pub(crate) block_locks: Arc<BlockLocks>,
    pub(crate) image_locks: Mutex<LockState>,
    pub(crate) counters: FileCounters,
}

impl File {
    /// Opens a regular file or block device. A folder, socket or pipe is refused by name. In a simulation it opens that
    /// world's files.
    pub fn open(path: &Path, options: &OpenOptions) -> Result<File> {
        let name = text_of_path(path);
        if let Some(simulation) = rt::current_simulation()
            && let Some(opened) = simulation.open(&name, options)
        {
            let mut file = Self::from_simulated(opened?);
            if let Some(inner) = Arc::get_mut(&mut file.0) {
                inner.no_flush = AtomicBool::new(options.cache.no_flush);
            }
            return Ok(file);
        }
        Self::open_host(path, options).map_err(|error| error.file(name))
    }

    fn open_host(path: &Path, options: &OpenOptions) -> Result<File> {
        let is_writable = options.write || options.create;
        let host = HostFile::open(path, options)?;
        let mut locks = LockState::new(options.locking);
        if options.create {
            locks.change(&host, options.permissions.unwrap_or(Permissions::CREATE))?;
            host.truncate_now()?;
        }
        locks.change(&host, options.permissions.unwrap_or(Permissions::NONE))?;
        let len = host.measure().map_err(|errno| Error::os(errno, "could not get the size"))?;
        let file = Inner {
            name: text_of_path(path),
            is_writable: AtomicBool::new(is_writable),
            no_flush: AtomicBool::new(options.cache.no_flush),
            keeps_space: AtomicBool::new(false),
            alignment: LiveAlignment::new(host.alignment()),
            len: AtomicU64::new(len),
            medium: Medium::Host(host),
            flush: FlushGate::default(),
            behind: WriteBehind::default(),
            block_locks: Arc::default(),
            image_locks: Mutex::new(locks),
            counters: FileCounters::default(),
        };
        Ok(File(Arc::new(file)))
    }

    /// A file of a simulated machine.
    pub fn from_simulated(sim: Arc<dyn SimulatedFile>) -> File {
        let (name, is_writable, len) = (sim.name().to_owned(), sim.is_writable(), sim.file_len());
        Self::without_locks(name, is_writable, len, Medium::Sim(sim))
    }

    /// A file of `len` bytes that reads as zeroes and forgets writes.
    pub fn null(len: u64) -> File {
        Self::null_with(NullOptions { len, ..NullOptions::default() })
    }

    /// As [`File::null`], with options.
    pub fn null_with(options: NullOptions) -> File {
        Self::without_locks("null-co://".to_owned(), true, options.len, Medium::Null(NullFile(options)))
    }

    /// `len` bytes behind a protocol, or behind whatever else is a [`Remote`]. `name` is for messages.
    pub fn remote(name: String, is_writable: bool, len: u64, remote: Arc<dyn Remote>) -> File {
        Self::without_locks(name, is_writable, len, Medium::Remote(RemoteFile::new(remote, len)))
    }

    fn without_locks(name: String, is_writable: bool, len: u64, medium: Medium) -> File {
        File(Arc::new(Inner {
            name,
            is_writable: AtomicBool::new(is_writable),
            no_flush: AtomicBool::new(false),
            keeps_space: AtomicBool::new(false),
            alignment: LiveAlignment::new(medium.alignment()),
            len: AtomicU64::new(len),
            medium,
            flush: FlushGate::default(),
            behind: WriteBehind::default(),
            block_locks: Arc::default(),
            image_locks: Mutex::new(LockState::new(Locking::Off)),
            counters: FileCounters::default(),
        }))
    }

    /// The same file with faults in front: its operations meet the rules of `faults`. `alignment` is the multiple that
    /// its offsets and lengths need (a power of two; the file's own where that is larger). `max_transfer_bytes` is the
    /// most that one operation on the file moves. Image locks are those of `self`.
    pub fn with_faults(
        &self,
        faults: Arc<Faults>,
        alignment: Option<u64>,
        max_transfer_bytes: Option<u64>,
    ) -> Result<File> {
        let wanted = alignment.unwrap_or(1).max(self.alignment().offset);
        if !wanted.is_power_of_two() || wanted > MAX_FAULTY_ALIGNMENT_BYTES {
            let message = format!("the alignment must be a power of two up to {MAX_FAULTY_ALIGNMENT_BYTES}");
            return Err(Error::invalid_argument(message).value(wanted).file(self.name()));
        }
        let transfer = max_transfer_bytes.unwrap_or(u64::MAX / wanted * wanted);
        if transfer == 0 || !transfer.is_multiple_of(wanted) {
            let message = format!("the largest transfer must be a multiple of the alignment, {wanted} bytes");
            return Err(Error::invalid_argument(message).value(transfer).file(self.name()));
        }
        let alignment = Alignment { offset: wanted, ..self.alignment() };
        let medium = Medium::Faulty(Box::new(FaultyFile::new(self.clone(), faults, alignment, transfer)));
        Ok(File(Arc::new(Inner {
            name: self.0.name.clone(),
            is_writable: AtomicBool::new(self.is_writable()),
            no_flush: AtomicBool::new(self.cache_mode().no_flush),
            keeps_space: AtomicBool::new(false),
            alignment: LiveAlignment::new(alignment),
            len: AtomicU64::new(self.len()),
            medium,
            flush: FlushGate::default(),
            behind: WriteBehind::default(),
            block_locks: Arc::clone(&self.0.block_locks),
            image_locks: Mutex::new(LockState::new(Locking::Off)),
            counters: FileCounters::default(),
        })))
    }

    /// The rules of a file with faults.
    pub fn faults(&self) -> Option<&Arc<Faults>> {
        match &self.0.medium {
            Medium::Faulty(faulty) => Some(faulty.faults()),
            _ => None,
        }
    }

    pub(crate) fn inner(&self) -> &Inner {
        &self.0
    }

    pub(crate) fn medium(&self) -> &Medium {
        &self.0.medium
    }

    /// Something else has written up to `end`.
    pub(crate) fn note_end(&self, end: u64) {
        self.0.note_end(end);
    }

    /// Something else has set the length.
    pub(crate) fn note_len(&self, len: u64) {
        self.0.len.store(len, Ordering::Release);
    }

    /// The operations that reached the file since it was opened, from all its users.
    pub fn statistics(&self) -> FileStats {
        self.0.counters.snapshot()
    }

    /// Has each operation of the file shown to `observer` from now on, in place of the one before with this key; `None`:
    /// to none.
    pub fn observe(&self, key: u64, observer: Option<Arc<dyn FileObserver>>) {
        self.0.counters.observe(key, observer);
    }

    /// The name for messages.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// True when it was opened for writing.
    pub fn is_writable(&self) -> bool {
        self.0.is_writable.load(Ordering::Relaxed)
    }

    /// True for a block device or bytes behind a protocol: the length can't change.
    pub fn is_device(&self) -> bool {
        self.0.medium.is_device()
    }

    /// True when no write takes space that may be missing: a block device, a file that forgets writes.
    pub fn has_its_space(&self) -> bool {
        match &self.0.medium {
            Medium::Host(host) => host.is_device(),
            Medium::Faulty(faulty) => faulty.base().has_its_space(),
            Medium::Sim(sim) => sim.is_fixed(),
            Medium::Null(_) => true,
            Medium::Remote(_) => false,
        }
    }

    /// True when bytes past the end read as zeroes once the file has grown over them (an encrypted volume has noise
    /// there).
    pub fn grows_by_zeroes(&self) -> bool {
        !matches!(&self.0.medium, Medium::Remote(file) if !file.remote.grows_by_zeroes())
    }

    /// True for a file of this machine, or of a simulated one, with nothing in between.
    pub fn is_plain(&self) -> bool {
        matches!(self.0.medium, Medium::Host(_) | Medium::Sim(_))
    }

    /// The same for two names of one file. `None` without a file of this machine.
    pub fn identity(&self) -> Option<FileIdentity> {
        match &self.0.medium {
            Medium::Host(host) => Some(host.identity()),
            Medium::Faulty(faulty) => faulty.base().identity(),
            Medium::Null(_) | Medium::Sim(_) | Medium::Remote(_) => None,
        }
    }

    /// Refuses a file that this process uses by another descriptor, too, even without locks: for a caller that is about
    /// to replace the content.
    pub fn check_single_use(&self) -> Result<()> {
        match &self.0.medium {
            Medium::Host(host) => host.check_single_use().map_err(|error| error.file(self.name())),
            Medium::Faulty(faulty) => faulty.base().check_single_use(),
            Medium::Null(_) | Medium::Sim(_) | Medium::Remote(_) => Ok(()),
        }
    }

    /// The limits of a block device's queue, as the kernel reports them.
    pub fn device_queue(&self) -> Option<DeviceQueue> {
        match &self.0.medium {
            Medium::Host(host) => host.device_queue(),
            Medium::Faulty(faulty) => faulty.base().device_queue(),
            Medium::Null(_) | Medium::Sim(_) | Medium::Remote(_) => None,
        }
    }

    /// Hints at the place of a new, still empty file on its disk. See [`LayoutHints`].
    pub fn hint_layout(&self, hints: LayoutHints) {
        if let Medium::Host(host) = &self.0.medium {
            host.hint_layout(hints);
        }
    }

    /// The most that one operation moves, in bytes, where that is limited (a file with faults).
    pub fn max_transfer(&self) -> Option<u64> {
        match &self.0.medium {
            Medium::Faulty(faulty) => faulty.max_transfer(),
            Medium::Host(_) | Medium::Null(_) | Medium::Sim(_) | Medium::Remote(_) => None,
        }
    }

    /// The transfers that the other side of a remote file prefers, where known.
    pub fn transfer_sizes(&self) -> Option<TransferSizes> {
        match &self.0.medium {
            Medium::Remote(file) => file.remote.transfer_sizes(),
            Medium::Host(_) | Medium::Null(_) | Medium::Sim(_) | Medium::Faulty(_) => None,
        }
    }

    /// The alignment that the *medium* needs; `File` itself accepts any offset and length and bounces where needed.
    pub fn alignment(&self) -> Alignment {
        self.0.alignment.get()
    }

    /// Current length in bytes (cached; kept up to date by our own writes and `set_len`).
    pub fn len(&self) -> u64 {
        self.0.len.load(Ordering::Acquire)
    }

    /// Length in bytes, asked for again when it is a file of this machine: another process may have made it longer.
    pub fn measure_len(&self) -> u64 {
        let host = match &self.0.medium {
            Medium::Host(host) => Some(host),
            Medium::Faulty(faulty) => match &faulty.base().0.medium {
                Medium::Host(host) => Some(host),
                _ => None,
            },
            Medium::Null(_) | Medium::Sim(_) | Medium::Remote(_) => None,
        };
        if let Some(len) = host.and_then(|host| host.measure().ok()) {
            self.0.note_end(len);
        }
        self.len()
    }

    /// Free space of the file system in bytes, for a file of this machine. `None` where nothing tells it.
    pub fn free_bytes(&self) -> Option<u64> {
        match &self.0.medium {
            Medium::Host(host) => host.free_bytes().ok(),
            _ => None,
        }
    }

    /// True for length 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Fills `buf` from `offset`. Bytes past the end of the file read as zeroes. After an error all of it is zeroes.
    pub async fn read_at(&self, buf: IoBuf, offset: u64) -> (Result<()>, IoBuf) {
        let (len, start_ns) = (buf.len() as u64, self.0.counters.start_ns());
        let (result, payload) = self.0.read(Payload::one(buf), offset).await;
        self.0.counters.count(FileOp::Read, offset, len, start_ns, result.is_ok());
        let mut buf = payload.into_one();
        match result {
            Ok(()) => (Ok(()), buf),
            Err(errno) => {
                buf.forget();
                (Err(self.error(errno, "could not read", offset)), buf)
            }
        }
    }

    /// Fills the buffers one after the other from `offset` on, in one operation where the alignment allows. Bytes past
    /// the end of the file read as zeroes.
    pub async fn read_vectored_at(&self, bufs: Vec<IoBuf>, offset: u64) -> (Result<()>, Vec<IoBuf>) {
        let payload = Payload { bufs: Bufs::Many(bufs), guard: None };
        let (len, start_ns) = (payload.len() as u64, self.0.counters.start_ns());
        let (result, payload) = self.0.read(payload, offset).await;
        self.0.counters.count(FileOp::Read, offset, len, start_ns, result.is_ok());
        let mut bufs = payload.into_many();
        if result.is_err() {
            bufs.iter_mut().for_each(IoBuf::forget);
        }
        (result.map_err(|errno| self.error(errno, "could not read", offset)), bufs)
    }

    /// Writes all of `buf` at byte `offset`, growing the file as needed.
    pub async fn write_at(&self, buf: IoBuf, offset: u64) -> (Result<()>, IoBuf) {
        let (result, payload) = self.write(Payload::one(buf), offset).await;
        (result, payload.into_one())
    }

    /// Writes the buffers one after the other from `offset` on, in one operation where the alignment allows.
    pub async fn write_vectored_at(&self, bufs: Vec<IoBuf>, offset: u64) -> (Result<()>, Vec<IoBuf>) {
        let (result, payload) = self.write(Payload { bufs: Bufs::Many(bufs), guard: None }, offset).await;
        (result, payload.into_many())
    }

    async fn write(&self, payload: Payload, offset: u64) -> (Result<()>, Payload) {
        let (len, start_ns) = (payload.len() as u64, self.0.counters.start_ns());
        if let Err(error) = self.check_change(offset, len, true) {
            return (Err(error), payload);
        }
        let (result, payload) = self.0.write(payload, offset).await;
        self.0.counters.count(FileOp::Write, offset, len, start_ns, result.is_ok());
        (result.map_err(|errno| self.error(errno, "could not write", offset)), payload)
    }

    /// A barrier: everything written before and completed is durable when it returns (`fdatasync`; with growth also the
    /// length). The first failure poisons the file. Every later `sync` and every write that grows the file fails with
    /// that error until the file is closed and opened again.
    pub async fn sync(&self) -> Result<()> {
        if self.0.no_flush.load(Ordering::Relaxed) {
            return Ok(());
        }
        let (ticket, start_ns) = (self.0.flush.request(), self.0.counters.start_ns());
        loop {
            match std::future::poll_fn(|context| self.0.flush.poll(ticket, context)).await {
                FlushStep::Done(result) => {
                    self.0.counters.count(FileOp::Sync, 0, 0, start_ns, result.is_ok());
                    return result;
                }
                FlushStep::Lead => {
                    // Its own task: the result must be noted even without a waiter.
                    let flush = FlushInFlight { file: self.clone(), ended: false }.run();
                    if let Err(flush) = rt::spawn_critical(flush) {
                        flush.await;
                    }
                }
            }
        }
    }

    /// Notes `len` written bytes that are new to the disk and hardly change soon, such as a copied cluster. The kernel
    /// starts writing them, for a cached file of this machine, before the next [`File::sync`] asks for it. A hint,
    /// which waits for nothing.
    pub fn note_new_data(&self, len: u64) {
        let Medium::Host(host) = &self.0.medium else { return };
        if without!("write_behind")
            || host.is_direct()
            || self.0.no_flush.load(Ordering::Relaxed)
            || !self.0.behind.add(len)
        {
            return;
        }
        let start = StartInFlight(self.clone()).run();
        // Without an executor no task could wait for it, and dropping it is to end it.
        let _ = rt::spawn_critical(start);
    }

    /// As [`File::note_new_data`], for a job that goes through a disk once. While such notes come, another core makes
    /// larger writes to a cached file of this machine, and the job reads on.
    pub fn note_bulk_write(&self, len: u64) {
        if let Medium::Host(host) = &self.0.medium {
            host.note_bulk_write();
        }
        self.note_new_data(len);
    }

    /// The error of the first failed [`File::sync`], if there was one.
    pub fn poison(&self) -> Option<Error> {
        self.0.flush.poison().cloned()
    }

    /// Allocates space for a range in bytes (grows the file). `Unsupported` where the file system can't.
    pub async fn allocate(&self, offset: u64, len: u64) -> Result<()> {
        self.change_space(Space::Allocate, offset, len, "could not allocate space").await
    }

    async fn change_space(&self, space: Space, offset: u64, len: u64, doing: &str) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        let (grows, start_ns) = (space != Space::Punch, self.0.counters.start_ns());
        self.check_change(offset, len, grows)?;
        let guard = self.0.lock_blocks(offset, offset + len, Access::Exclusive).await;
        // The lock is kept until the new length is noted: see `direct`.
        let shared = guard.as_ref().map(BlockGuard::share);
        let result = self.0.medium.fallocate(space, offset, len, shared).await;
        if grows && result.is_ok() {
            self.0.note_end(offset + len);
        }
        match space {
            Space::Punch => self.0.counters.count(FileOp::Discard, offset, len, start_ns, result.is_ok()),
            Space::Zero => self.0.counters.count(FileOp::Zero, offset, len, start_ns, result.is_ok()),
            // Nothing is read or written.
            Space::Allocate => {}
        }
        result.map_err(|errno| self.error(errno, doing, offset))?;
        drop(guard);
        Ok(())
    }

    /// Sets the length in bytes. The new part reads as zeroes. On a block device only shrinking "succeeds" (does
    /// nothing).
    pub async fn set_len(&self, len: u64) -> Result<()> {
        if self.is_device() && self.is_writable() {
            return match len <= self.len() {
                true => Ok(()),
                false if matches!(self.0.medium, Medium::Remote(_)) => {
                    let words = self.fixed_length().unwrap_or("Cannot grow NBD nodes");
                    Err(Error::unsupported("an export can't grow").file(self.name()).qemu(words))
                }
                false => {
                    let error = Error::unsupported("a block device can't grow").file(self.name());
                    Err(error.qemu("Cannot grow device files"))
                }
            };
        }
        self.check_change(len, 0, true)?;
        let guard = self.0.lock_blocks(0, u64::MAX, Access::Exclusive).await;
        let shared = guard.as_ref().map(BlockGuard::share);
        let result = self.0.medium.set_len(len, shared).await;
        result.map_err(|errno| match errno {
            Errno::ENOTSUP => Error::unsupported("Image format driver does not support resize").file(self.name()),
            _ => self.error(errno, "could not change the size", len),
        })?;
        self.0.len.store(len, Ordering::Release);
        drop(guard);
        Ok(())
    }

    /// The first run of data at or behind `offset` (`SEEK_DATA`/`SEEK_HOLE`), `None` when only holes follow. Where the
    /// file system can't answer, all is data. Data that another process has made a hole since they were found may still
    /// count as data.
    pub async fn next_data(&self, offset: u64) -> Result<Option<DataRange>> {
        let result = self.0.medium.next_data(offset, self.len()).await;
        result.map_err(|errno| self.error(errno, "could not look for data", offset))
    }

    /// As [`File::next_data`] again and again: the runs of data that begin from `offset` on and before `end`, in order, at
    /// most `max`. Fewer than `max`: there is no more of it before `end`.
    pub async fn data_ranges(&self, offset: u64, end: u64, max: usize) -> Result<Vec<DataRange>> {
        let result = self.0.medium.data_ranges(offset, end, self.len(), max).await;
        result.map_err(|errno| self.error(errno, "could not look for data", offset))
    }

    /// Copies inside the kernel (`copy_file_range`, which reflinks where it can). Returns the bytes copied, 0 or
    /// more; `Unsupported` where the kernel can't, before anything was copied.
    pub async fn copy_from(&self, source: &File, source_offset: u64, offset: u64, len: u64) -> Result<u64> {
        source.check_range(source_offset, len)?;
        self.check_change(offset, len, true)?;
        if len == 0 {
            return Ok(0);
        }
        let start_ns = self.0.counters.start_ns();
        let guard = self.0.lock_blocks(offset, offset + len, Access::Exclusive).await;
        let shared = guard.as_ref().map(BlockGuard::share);
        let result = self.0.medium.copy_from(&source.0.medium, source_offset, offset, len, shared).await;
        match result {
            Ok(copied) => {
                self.0.note_end(offset + copied);
                source.0.counters.count(FileOp::Read, source_offset, copied, start_ns, true);
                self.0.counters.count(FileOp::Write, offset, copied, start_ns, true);
            }
            Err(_) => self.0.counters.tell_tried(offset, len, start_ns),
        }
        let copied = result.map_err(|errno| self.error(errno, "could not copy", offset))?;
        drop(guard);
        Ok(copied)
    }

    /// True where the file system can share blocks of `source` with this file. Nothing is changed.
    pub async fn can_share_from(&self, source: &File) -> bool {
        self.is_writable() && self.0.medium.can_share_from(&source.0.medium, source.len()).await
    }

    /// Takes over `len` bytes of `source` by sharing its blocks (a reflink, `FICLONERANGE`). The file system keeps them
    /// once until one side changes them, as with `cp --reflink`. `Unsupported` where the two can't: other file systems
    /// and kinds of files, ranges that aren't whole blocks. After an error part of the range may have been taken over.
    pub async fn share_from(&self, source: &File, source_offset: u64, offset: u64, len: u64) -> Result<()> {
        source.check_range(source_offset, len)?;
        self.check_change(offset, len, true)?;
        if len == 0 {
            return Ok(());
        }
        let start_ns = self.0.counters.start_ns();
        let guard = self.0.lock_blocks(offset, offset + len, Access::Exclusive).await;
        let shared = guard.as_ref().map(BlockGuard::share);
        let result = self.0.medium.share_from(&source.0.medium, source_offset, offset, len, shared).await;
        if result.is_err() {
            self.0.counters.tell_tried(offset, len, start_ns);
        }
        result.map_err(|errno| self.error(errno, "could not share blocks", offset))?;
        self.0.note_end(offset + len);
        self.0.counters.count(FileOp::Write, offset, len, start_ns, true);
        drop(guard);
        Ok(())
    }

    /// Space that the file takes on disk, in bytes (`st_blocks * 512`).
    pub fn allocated_bytes(&self) -> Result<u64> {
        self.0
            .medium
            .allocated_bytes()
            .map_err(|errno| Error::os(errno, "could not read the file's attributes").file(self.name()))
    }

    /// Takes the image locks for `permissions` and releases those that are not needed any more. On an error (`Busy`: it
    /// names the permission that other locks contradict) everything is as before.
    pub fn lock(&self, permissions: Permissions) -> Result<()> {
        let Medium::Host(host) = &self.0.medium else { return Ok(()) };
        let mut locks = self.0.image_locks.lock().unwrap_or_else(PoisonError::into_inner);
        locks.change(host, permissions).map_err(|error| error.file(self.name()))
    }

    /// Takes notice of the length that a file of the host has now. No operation that changes it may run.
    pub fn measure_again(&self) -> Result<()> {
        let Medium::Host(host) = &self.0.medium else { return Ok(()) };
        let len = host.measure().map_err(|errno| Error::os(errno, "could not get the size").file(self.name()))?;
        self.note_len(len);
        Ok(())
    }

    /// Gives all image locks back. Closing the file does so too.
    pub fn unlock(&self) -> Result<()> {
        self.lock(Permissions::NONE)
    }

    /// The permissions that the image locks stand for now.
    pub fn permissions(&self) -> Permissions {
        self.0.image_locks.lock().unwrap_or_else(PoisonError::into_inner).held()
    }

    fn check_range(&self, offset: u64, len: u64) -> Result<()> {
        match offset.checked_add(len) {
            Some(end) if i64::try_from(end).is_ok() => Ok(()),
            _ => Err(Error::os(Errno::EFBIG, "range past the largest possible file")
                .offset(offset)
                .value(format_args!("{len} bytes long"))
                .file(self.name())),
        }
    }

    /// Refuses changes that can't or mustn't be made.
    fn check_change(&self, offset: u64, len: u64, grows: bool) -> Result<()> {
        if !self.is_writable() {
            return Err(Error::new(cowshed_types::ErrorKind::ReadOnly, "opened for reading only").file(self.name()));
        }
        self.check_range(offset, len)?;
        if !grows || offset + len <= self.len() {
            return Ok(());
        }
        if let Some(error) = self.0.flush.poison() {
            return Err(error.clone());
        }
        match self.is_device() {
            true => Err(self.error(Errno::ENOSPC, "past the end of the device", offset)),
            false => Ok(()),
        }
    }

    #[cold]
    fn error(&self, errno: Errno, doing: &str, offset: u64) -> Error {
        Error::os(errno, doing).offset(offset).file(self.name())
    }
}

/// A flush that runs. Dropped before its end (its executor was dropped), its result is unknown.
struct FlushInFlight {
    file: File,
    ended: bool,
}

impl FlushInFlight {
    async fn run(mut self) {
        // After the last flush the file is at rest: nothing of ours keeps it open, and locked, when it is closed.
        std::future::poll_fn(|context| self.file.0.behind.poll_flush(context)).await;
        let mut attempts = Attempts::default();
        let result = loop {
            match self.file.0.medium.sync().await {
                Err(Errno(libc::EINTR)) if slip!("interrupted_flush_succeeds") => break Ok(()),
                Err(Errno(libc::EINTR)) if attempts.retries(Errno(libc::EINTR), false).await => {}
                result => break result,
            }
        };
        self.ended = true;
        let result = result.map_err(|errno| Error::os(errno, "could not flush").file(self.file.name()));
        self.file.0.flush.finish(result);
    }
}

/// A write-behind that runs.
struct StartInFlight(File);

impl StartInFlight {
    async fn run(self) {
        if let Medium::Host(host) = &self.0.0.medium {
            // A hint that isn't taken: the flush does all of it.
            let _ = host.start_writeback().await;
        }
    }
}

impl Drop for StartInFlight {
    fn drop(&mut self) {
        self.0.0.behind.end();
    }
}

impl Drop for FlushInFlight {
    fn drop(&mut self) {
        if !self.ended {
            let error = Error::os(Errno::ECANCELED, "a flush was abandoned").file(self.file.name());
            self.file.0.flush.finish(Err(error));
        }
    }
}
