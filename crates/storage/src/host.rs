// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Files and block devices of the host.

mod data;
mod open;
#[cfg(test)]
mod tests;

use crate::attempts::{Attempts, ring_gave_up};
use crate::blocklock::BlockGuard;
use crate::cache::LiveAlignment;
use crate::data_cache::KnownData;
use crate::file_systems;
use crate::identity::{FileIdentity, ListedFile};
use crate::medium::Space;
use crate::names::text_of_path;
use crate::opening::{Opening, note_writable};
use crate::payload::{MAX_TRANSFER, Payload};
use crate::ring::{Direction, Ring, RingOp};
use crate::rt::{self, ThreadPool};
use crate::stamp::is_young;
use crate::sys::{self, SysResult};
use crate::{Alignment, DeviceQueue, IoEngine, LayoutHints, OpenOptions};
use cowshed_types::{Errno, Error, ErrorKind, Result};
use open::{check_ring, direct_alignment, forced_engine, no_direct_io, open_descriptor, os_error, wrong_kind};
use rustix::fs::{FileType, Mode, OFlags, SeekFrom};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// In bytes. Changes of space that are whole sectors of this size suit every block device.
const LARGEST_SECTOR_BYTES: u64 = 4096;

/// An open file or block device.
#[derive(Debug)]
pub(crate) struct HostFile {
    fd: Arc<OwnedFd>,
    listed: ListedFile,
    engine: IoEngine,
    is_device: bool,
    /// See [`HostFile::space_block_bytes`].
    space_block_bytes: u64,
    is_direct: AtomicBool,
    alignment: LiveAlignment,
    /// For reads and writes: those in the page cache are done at once, where the kernel can recognise them.
    tries_now: [AtomicBool; 2],
    /// A write on a ring's thread had to wait: until then (by [`rt::now`], in nanoseconds) the kernel's workers do them.
    rests_until_ns: AtomicU64,
    /// A job writes in bulk: until then the kernel's workers do its larger writes, beside this thread.
    bulk_until_ns: AtomicU64,
    /// Reads that are not tried in the page cache, because the last one was not there.
    reads_past_cache: AtomicU32,
    known: KnownData,
    /// See [`crate::File::change_stamp`].
    opened: [u64; 7],
    /// A change soon after that could have left the same stamp.
    opened_young: bool,
    /// See [`crate::File::tells_changes`]; the server of a file system is asked once.
    tells_changes: OnceLock<bool>,
}

/// The most that a ring's thread moves to or from the page cache itself, in bytes: more keeps others waiting for too long.
const NOW_BYTES: usize = 256 << 10;
/// A longer transfer to or from the page cache goes in pieces, in bytes. The kernel copies on the ring's thread, which
/// serves no other request meanwhile.
const WHOLE_BYTES: usize = 2 << 20;
/// The length of such a piece, in bytes.
const PIECE_BYTES: usize = 1 << 20;
/// After a read that the page cache didn't have, so many are not tried there.
const READS_PAST_CACHE: u32 = 15;
/// Parts of pages that aren't in the cache must be read first.
const PAGE_BYTES: u64 = 4096;
/// A write to the page cache that takes longer than this has waited for something: the disk, the journal.
const WAITED_NS: u64 = 5_000_000;
/// So long are the kernel's workers to do the writes then.
const REST_NS: u64 = 100_000_000;

/// Writes in bulk from this many bytes on are worth a worker.
const BULK_BYTES: usize = 64 << 10;
/// So long after a write in bulk others are taken to follow.
const BULK_NS: u64 = 100_000_000;

/// Carries out the next operation.
enum Worker {
    Ring(Rc<Ring>),
    Pool,
    /// This thread, at once: under the simulator, so that runs stay deterministic.
    Inline,
}

impl HostFile {
    /// Opens and looks at the file; creates it if asked, but doesn't truncate it.
    pub(crate) fn open(path: &Path, options: &OpenOptions) -> Result<Self> {
        let opening = Opening::begin();
        let fd = open_descriptor(path, options)?;
        if options.write {
            note_writable();
        }
        drop(opening);
        let stat = rustix::fs::fstat(&fd).map_err(|error| os_error(error, "could not read the file's attributes"))?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        let is_device = match kind {
            FileType::RegularFile => false,
            FileType::BlockDevice => true,
            other => return Err(wrong_kind(other)),
        };
        // Only `open` itself must not block; for the operations the flag would mean EAGAIN.
        let flags = rustix::fs::fcntl_getfl(&fd).map_err(|error| os_error(error, "could not read the file's flags"))?;
        rustix::fs::fcntl_setfl(&fd, flags - OFlags::NONBLOCK)
            .map_err(|error| os_error(error, "could not set the file's flags"))?;
        let engine = forced_engine().unwrap_or(options.engine);
        if engine == IoEngine::IoUring {
            check_ring()?;
        }
        let alignment = match options.cache.direct {
            true => direct_alignment(&fd, is_device)?,
            false => Alignment { memory: 1, offset: 1 },
        };
        let space_block_bytes = match is_device {
            true => match sys::device_block_size(&fd) {
                // Confined processes may ask devices nothing that they only read.
                Err(_) if !options.write => LARGEST_SECTOR_BYTES,
                size => size.map_err(|errno| Error::os(errno, "could not read the block size"))?,
            },
            false => 1,
        };
        let cached = !options.cache.direct;
        let tries_now = [AtomicBool::new(cached), AtomicBool::new(cached)];
        let (is_direct, alignment) = (AtomicBool::new(options.cache.direct), LiveAlignment::new(alignment));
        Ok(HostFile {
            fd: Arc::new(fd),
            listed: ListedFile::new(FileIdentity::of(&stat), text_of_path(path)),
            engine,
            is_device,
            space_block_bytes: space_block_bytes.max(1),
            is_direct,
            alignment,
            tries_now,
            rests_until_ns: AtomicU64::new(0),
            bulk_until_ns: AtomicU64::new(0),
            reads_past_cache: AtomicU32::new(0),
            known: KnownData::default(),
            opened: crate::folder::stamp_of(&stat),
            opened_young: is_young(crate::folder::stamp_of(&stat), Duration::ZERO),
            tells_changes: OnceLock::new(),
        })
    }

    pub(crate) fn alignment(&self) -> Alignment {
        self.alignment.get()
    }

    /// True when it bypasses the page cache.
    pub(crate) fn is_direct(&self) -> bool {
        self.is_direct.load(Ordering::Relaxed)
    }

    /// Bypasses the page cache from now on, or no longer; returns the alignment of memory and offsets then. The kernel
    /// makes either way read the other one's writes.
    pub(crate) fn set_direct(&self, direct: bool) -> Result<Alignment> {
        let before =
            rustix::fs::fcntl_getfl(&self.fd).map_err(|error| os_error(error, "could not read the file's flags"))?;
        let flags = if direct { before | OFlags::DIRECT } else { before - OFlags::DIRECT };
        rustix::fs::fcntl_setfl(&self.fd, flags).map_err(|error| match error {
            rustix::io::Errno::INVAL if direct => no_direct_io(error),
            error => os_error(error, "could not set the file's flags"),
        })?;
        let alignment = match direct {
            true => direct_alignment(&self.fd, self.is_device),
            false => Ok(Alignment { memory: 1, offset: 1 }),
        };
        let alignment = alignment.inspect_err(|_| {
            // Setting flags that were set a moment ago does not fail.
            let _ = rustix::fs::fcntl_setfl(&self.fd, before);
        })?;
        self.alignment.set(alignment);
        self.is_direct.store(direct, Ordering::Release);
        self.tries_now.iter().for_each(|tries| tries.store(!direct, Ordering::Relaxed));
        Ok(alignment)
    }

    /// Opens the same file for writing under the same descriptor number. `prepare` sees the new description before the
    /// old one goes.
    pub(crate) fn make_writable(&self, prepare: impl FnOnce(BorrowedFd<'_>) -> Result<()>) -> Result<()> {
        let flags =
            rustix::fs::fcntl_getfl(&self.fd).map_err(|error| os_error(error, "could not read the file's flags"))?;
        // By its descriptor: the name may mean another file by now.
        let path = format!("/proc/self/fd/{}", self.fd.as_raw_fd());
        let flags = (flags & OFlags::DIRECT) | OFlags::RDWR | OFlags::CLOEXEC;
        let fresh = rustix::fs::open(path, flags, Mode::empty())
            .map_err(|error| os_error(error, "could not open for writing"))?;
        let old = self.fd.try_clone().map_err(|error| Error::io(&error, "could not keep the old descriptor"))?;
        prepare(fresh.as_fd())?;
        sys::replace_description(&self.fd, &fresh)
            .map_err(|errno| Error::os(errno, "could not switch to the writable descriptor"))?;
        // As in `drop`: a child of this process may still have the old description, whose locks would block ours.
        if let Err(errno) = sys::set_lock(&old, sys::ByteLock::Unlocked, 0, 0) {
            tracing::debug!(?errno, "could not unlock a descriptor that was replaced");
        }
        Ok(())
    }

    pub(crate) fn is_device(&self) -> bool {
        self.is_device
    }

    /// A change of space is about whole blocks of this many bytes: the sectors of a device, also behind the page cache.
    pub(crate) fn space_block_bytes(&self) -> u64 {
        self.space_block_bytes
    }

    /// Length in bytes, asked from the system.
    pub(crate) fn measure(&self) -> SysResult<u64> {
        rustix::fs::seek(&self.fd, SeekFrom::End(0)).map_err(sys::errno)
    }

    /// Free space of its file system for this process, in bytes.
    pub(crate) fn free_bytes(&self) -> SysResult<u64> {
        let system = rustix::fs::fstatvfs(&self.fd).map_err(sys::errno)?;
        Ok(system.f_bavail.saturating_mul(system.f_frsize))
    }

    pub(crate) fn identity(&self) -> FileIdentity {
        self.listed.identity()
    }

    /// Refuses a file that this process uses by another descriptor, too: it is about to lose its contents.
    pub(crate) fn check_single_use(&self) -> Result<()> {
        match self.listed.other_name() {
            Some(name) => {
                let message = format!("this is the file '{name}', which is in use here: a new image would destroy it");
                Err(Error::new(ErrorKind::Busy, message))
            }
            None => Ok(()),
        }
    }

    /// Empties a file that is to hold a new image.
    pub(crate) fn truncate_now(&self) -> Result<()> {
        self.check_single_use()?;
        if self.is_device {
            return Ok(());
        }
        sys::retry(|| rustix::fs::ftruncate(&self.fd, 0).map_err(sys::errno))
            .map_err(|errno| Error::os(errno, "could not truncate"))
    }

    /// The limits of a device's queue, as the kernel reports them. Partitions have no queue of their own.
    pub(crate) fn device_queue(&self) -> Option<DeviceQueue> {
        let device = rustix::fs::fstat(&self.fd).ok().filter(|_| self.is_device)?.st_rdev;
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        let folder = Path::new("/sys/dev/block").join(format!("{major}:{minor}"));
        let queue = [folder.join("queue"), folder.join("../queue")].into_iter().find(|queue| queue.is_dir())?;
        let number = |name: &str| std::fs::read_to_string(queue.join(name)).ok()?.trim().parse::<u64>().ok();
        let limit = |name: &str| number(name).filter(|value| *value > 0);
        Some(DeviceQueue {
            logical_block_bytes: limit("logical_block_size"),
            max_transfer_bytes: limit("max_sectors_kb").and_then(|kib| kib.checked_mul(1024)),
            max_segments: limit("max_segments"),
            discard_granularity_bytes: limit("discard_granularity"),
        })
    }

    /// Passes hints on to the file system. A refusal isn't reported.
    pub(crate) fn hint_layout(&self, hints: LayoutHints) {
        if hints.no_cow
            && let Ok(flags) = rustix::fs::ioctl_getflags(&self.fd)
        {
            let _ = rustix::fs::ioctl_setflags(&self.fd, flags | rustix::fs::IFlags::NOCOW);
        }
        if let Some(bytes) = hints.extent_bytes {
            let _ = sys::set_extent_size(&self.fd, bytes);
        }
    }

    fn worker(&self, attempts: &Attempts) -> Worker {
        if self.engine != IoEngine::Threads
            && !attempts.is_past_ring()
            && let Some(ring) = rt::current_ring()
        {
            return Worker::Ring(ring);
        }
        match rt::is_simulated() {
            true => Worker::Inline,
            false => Worker::Pool,
        }
    }

    /// True when a transfer of `len` bytes goes in pieces, between which other tasks of the thread run. A transfer past the
    /// page cache occupies no thread.
    #[inline]
    fn is_in_pieces(&self, len: usize) -> bool {
        len > WHOLE_BYTES && !self.is_direct()
    }

    /// The most that one system call moves of the payload, in bytes.
    fn most(&self, payload: &Payload) -> usize {
        if self.is_in_pieces(payload.len()) { PIECE_BYTES } else { MAX_TRANSFER }
    }

    /// Starts a transfer on this thread's ring; returns the payload where there is none. The result may be short, or an
    /// error that only asks for another try.
    pub(crate) fn start(
        &self,
        direction: Direction,
        payload: Payload,
        offset: u64,
    ) -> std::result::Result<RingOp<'_>, Payload> {
        match self.engine {
            IoEngine::Threads => Err(payload),
            _ if self.is_in_pieces(payload.len()) => Err(payload),
            IoEngine::Auto | IoEngine::IoUring => match rt::current_ring() {
                Some(ring) => Ok(ring.transfer(&self.fd, direction, payload, (0, MAX_TRANSFER), offset)),
                None => Err(payload),
            },
        }
    }

    /// A read from the page cache, on a ring's thread: it costs less than asking the ring for it, and waiting for the
    /// answer. `None`: it isn't there, or is not looked for.
    #[inline]
    pub(crate) fn read_now(&self, payload: &Payload, offset: u64) -> Option<SysResult<usize>> {
        if self.engine == IoEngine::Threads || payload.len() > NOW_BYTES {
            return None;
        }
        let past = self.reads_past_cache.load(Ordering::Relaxed);
        if past > 0 {
            self.reads_past_cache.store(past - 1, Ordering::Relaxed);
            return None;
        }
        let done = self.transfer_now(Direction::Read, payload, 0, offset);
        if done.is_none() {
            self.reads_past_cache.store(READS_PAST_CACHE, Ordering::Relaxed);
        }
        done
    }

    /// A write to the page cache on a ring's thread. Where the file system can't promise not to wait (ext4), the ring
    /// has a worker of the kernel do it. That costs several times the write itself, and whole pages hardly ever wait.
    /// When one did, the workers have the next ones for a while. `None`: not this one.
    pub(crate) fn write_now(&self, payload: &Payload, offset: u64) -> Option<SysResult<usize>> {
        let len = payload.len();
        if self.is_direct() || self.is_device || self.engine == IoEngine::Threads || len > NOW_BYTES {
            return None;
        }
        if len >= BULK_BYTES && self.is_in_bulk() {
            return None;
        }
        let tries = &self.tries_now[usize::from(true)];
        if tries.load(Ordering::Relaxed) {
            let done = self.transfer_now(Direction::Write, payload, 0, offset);
            // It may have turned out just now that the file system can't promise that.
            if done.is_some() || tries.load(Ordering::Relaxed) {
                return done;
            }
        }
        if !offset.is_multiple_of(PAGE_BYTES) || !(len as u64).is_multiple_of(PAGE_BYTES) || !rt::may_have_ring() {
            return None;
        }
        let start_ns = now_ns();
        if start_ns < self.rests_until_ns.load(Ordering::Relaxed) {
            return None;
        }
        let result = sys::transfer(&self.fd, Direction::Write, payload, 0, len, offset);
        let end_ns = now_ns();
        if end_ns.saturating_sub(start_ns) > WAITED_NS {
            self.rests_until_ns.store(end_ns + REST_NS, Ordering::Relaxed);
        }
        Some(result)
    }

    /// A job writes in bulk, and reads and looks for zeroes meanwhile: another core writes then.
    pub(crate) fn note_bulk_write(&self) {
        self.bulk_until_ns.store(now_ns() + BULK_NS, Ordering::Relaxed);
    }

    fn is_in_bulk(&self) -> bool {
        let until_ns = self.bulk_until_ns.load(Ordering::Relaxed);
        until_ns != 0 && now_ns() < until_ns
    }

    /// Runs a system call that may block, away from this thread where there is somewhere else.
    async fn call<T: Send + 'static>(&self, work: impl FnOnce(BorrowedFd<'_>) -> T + Send + 'static) -> T {
        if rt::is_simulated() {
            return work(self.fd.as_fd());
        }
        let fd = Arc::clone(&self.fd);
        // As an operation of the ring: a dropped one ends before its executor does.
        rt::to_completion(async move { ThreadPool::io().run(move || work(fd.as_fd())).await }).await
    }

    /// As [`HostFile::call`], for calls that are nearly always done at once. The call is made on this thread if that
    /// has nothing else to wait for. Handing it over takes longer than the call, and needs a thread that has to be made
    /// first.
    async fn short_call<T: Send + 'static>(&self, work: impl FnOnce(BorrowedFd<'_>) -> T + Send + 'static) -> T {
        match self.engine != IoEngine::Threads && rt::is_alone() {
            true => work(self.fd.as_fd()),
            false => self.call(work).await,
        }
    }

    /// A transfer on this thread, as far as the page cache has it: another thread would cost many times that. `None` when
    /// it would have to wait.
    fn transfer_now(
        &self,
        direction: Direction,
        payload: &Payload,
        skip: usize,
        offset: u64,
    ) -> Option<SysResult<usize>> {
        let tries = &self.tries_now[usize::from(direction == Direction::Write)];
        if !tries.load(Ordering::Relaxed) {
            return None;
        }
        match sys::transfer_now(&self.fd, direction, payload, skip, self.most(payload), offset) {
            Err(Errno(libc::EOPNOTSUPP | libc::EINVAL | libc::ENOSYS)) => {
                tries.store(false, Ordering::Relaxed);
                None
            }
            // The other way reports the error.
            Err(_) => None,
            done => Some(done),
        }
    }

    async fn transfer(
        &self,
        direction: Direction,
        payload: Payload,
        skip: usize,
        offset: u64,
    ) -> (SysResult<usize>, Payload) {
        let (mut payload, mut attempts) = (payload, Attempts::default());
        let most = self.most(&payload);
        loop {
            let worker = self.worker(&attempts);
            let by_ring = matches!(worker, Worker::Ring(_));
            let (result, back) = match worker {
                Worker::Ring(ring) => {
                    let (result, back) = ring.transfer(&self.fd, direction, payload, (skip, most), offset).await;
                    (sys::ring_result(result), back)
                }
                Worker::Pool => {
                    if let Some(result) = self.transfer_now(direction, &payload, skip, offset) {
                        return (result, payload);
                    }
                    let work = move |fd: BorrowedFd<'_>| {
                        let result = sys::transfer(fd, direction, &payload, skip, most, offset);
                        (result, payload)
                    };
                    self.call(work).await
                }
                Worker::Inline => (sys::transfer(&self.fd, direction, &payload, skip, most, offset), payload),
            };
            match result {
                Err(errno) if attempts.retries(errno, by_ring).await => payload = back,
                result => {
                    if most < MAX_TRANSFER {
                        rt::yield_now().await;
                    }
                    return (result, back);
                }
            }
        }
    }

    pub(crate) async fn read(&self, payload: Payload, skip: usize, offset: u64) -> (SysResult<usize>, Payload) {
        self.transfer(Direction::Read, payload, skip, offset).await
    }

    pub(crate) async fn write(&self, payload: Payload, skip: usize, offset: u64) -> (SysResult<usize>, Payload) {
        self.transfer(Direction::Write, payload, skip, offset).await
    }

    pub(crate) async fn sync(&self) -> SysResult<()> {
        if let Worker::Ring(ring) = self.worker(&Attempts::default()) {
            match sys::ring_result(ring.sync(&self.fd).await.0) {
                // Nothing was flushed, and no error of the disk was reported: the ring had no worker for it.
                Err(errno) if ring_gave_up(errno) => {}
                result => return result.map(drop),
            }
        }
        self.call(|fd| sys::flush(fd)).await
    }

    /// Has the kernel start on dirty pages in the page cache. Errors of the disk show in the next [`HostFile::sync`].
    pub(crate) async fn start_writeback(&self) -> SysResult<()> {
        match self.worker(&Attempts::default()) {
            Worker::Ring(ring) => sys::ring_result(ring.start_writeback(&self.fd).await.0).map(drop),
            Worker::Pool | Worker::Inline => self.call(|fd| sys::start_writeback(fd)).await,
        }
    }

    /// As [`HostFile::start_writeback`], for a caller that waits for the call: mostly little is dirty, and the call is
    /// short.
    pub(crate) async fn start_writeback_first(&self) -> SysResult<()> {
        self.short_call(|fd| sys::start_writeback(fd)).await
    }

    /// `guard` is given back when the kernel is done.
    pub(crate) async fn fallocate(
        &self,
        space: Space,
        offset: u64,
        len: u64,
        guard: Option<BlockGuard>,
    ) -> SysResult<()> {
        let mode = match space {
            // On a device too both make zeroes (Linux 4.9), the first with the space given back where it can.
            Space::Punch => libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
            Space::Zero if self.is_device => libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE,
            Space::Zero => libc::FALLOC_FL_ZERO_RANGE,
            Space::Allocate if self.is_device => return Err(Errno::ENOTSUP),
            Space::Allocate => 0,
        };
        let _changing = self.known.changing();
        let (mut payload, mut attempts) = (Payload::empty(guard), Attempts::default());
        loop {
            let worker = self.worker(&attempts);
            let by_ring = matches!(worker, Worker::Ring(_));
            let (result, back) = match worker {
                Worker::Ring(ring) => {
                    let (result, back) = ring.fallocate(&self.fd, payload, mode, offset, len).await;
                    (sys::ring_result(result).map(drop), back)
                }
                Worker::Pool | Worker::Inline => {
                    self.call(move |fd| (sys::fallocate(fd, mode, offset, len), payload)).await
                }
            };
            payload = back;
            match result {
                Err(errno) if attempts.retries(errno, by_ring).await => {}
                // Not known to the kernel or the file system: all mean "can't".
                Err(Errno(libc::ENOSYS | libc::EOPNOTSUPP | libc::ENODEV)) => break,
                result => return result,
            }
        }
        if space == Space::Zero && self.is_device {
            return self.call(move |fd| (sys::zero_device(fd, offset, len), payload)).await.0;
        }
        Err(Errno::ENOTSUP)
    }

    pub(crate) async fn set_len(&self, len: u64, guard: Option<BlockGuard>) -> SysResult<()> {
        let _changing = self.known.changing();
        let grows =
            rustix::fs::fstat(&self.fd).is_ok_and(|stat| u64::try_from(stat.st_size).is_ok_and(|now| now <= len));
        let work = move |fd: BorrowedFd<'_>| {
            let _guard = guard;
            sys::retry(|| rustix::fs::ftruncate(fd, len).map_err(sys::errno))
        };
        // Freeing the blocks of a large file takes its time.
        if grows { self.short_call(work).await } else { self.call(work).await }
    }

    pub(crate) async fn copy_from(
        &self,
        source: &HostFile,
        source_offset: u64,
        offset: u64,
        len: u64,
        guard: Option<BlockGuard>,
    ) -> SysResult<u64> {
        if self.is_device || source.is_device {
            return Err(Errno::ENOTSUP);
        }
        let source = Arc::clone(&source.fd);
        let _changing = self.known.changing();
        self.call(move |fd| {
            let _guard = guard;
            let len = usize::try_from(len).unwrap_or(usize::MAX).min(1 << 30);
            let (mut from, mut to) = (source_offset, offset);
            sys::retry(|| {
                rustix::fs::copy_file_range(&source, Some(&mut from), fd, Some(&mut to), len)
                    .map(|count| count as u64)
                    .map_err(sys::errno)
            })
            .map_err(not_between_these)
        })
        .await
    }

    /// The result is the system call's: [`not_between_these`] is for the caller.
    pub(crate) async fn share_from(
        &self,
        source: &HostFile,
        source_offset: u64,
        offset: u64,
        len: u64,
        guard: Option<BlockGuard>,
    ) -> SysResult<()> {
        if self.is_device || source.is_device {
            return Err(Errno::ENOTSUP);
        }
        let source = Arc::clone(&source.fd);
        let _changing = self.known.changing();
        // Blocks that are on the disk are shared at once.
        self.short_call(move |fd| {
            let _guard = guard;
            sys::share_range(&source, source_offset, fd, offset, len)
        })
        .await
    }

    /// Asks to share the byte at `source_offset`, which no file system does: its error shows whether it shares blocks.
    pub(crate) async fn share_one_byte(&self, source: &HostFile, source_offset: u64) -> SysResult<()> {
        if self.is_device || source.is_device {
            return Err(Errno::ENOTSUP);
        }
        let source = Arc::clone(&source.fd);
        self.short_call(move |fd| sys::share_range(&source, source_offset, fd, 1, 1)).await
    }

    /// True where the length or one of the times of the last change is another one than at the opening. Copies keep the time of
    /// modification, but no program sets the time of the last change of the status.
    pub(crate) fn was_changed(&self) -> bool {
        !self.is_device && self.change_stamp().is_some_and(|now| now != self.opened)
    }

    /// See [`crate::File::was_opened_young`].
    pub(crate) fn was_opened_young(&self) -> bool {
        self.opened_young
    }

    /// See [`crate::File::change_stamp`].
    pub(crate) fn change_stamp(&self) -> Option<[u64; 7]> {
        rustix::fs::fstat(&self.fd).ok().map(|stat| crate::folder::stamp_of(&stat))
    }

    /// See [`crate::File::tells_changes`].
    pub(crate) fn tells_changes(&self) -> bool {
        let ask = || rustix::fs::fstatfs(&self.fd).is_ok_and(|found| file_systems::tell_changes(found.f_type as u64));
        !self.is_device && *self.tells_changes.get_or_init(ask)
    }

    pub(crate) fn allocated_bytes(&self) -> SysResult<u64> {
        let stat = rustix::fs::fstat(&self.fd).map_err(sys::errno)?;
        // `st_blocks` counts units of 512 bytes on Linux, whatever the block size.
        u64::try_from(stat.st_blocks).map(|blocks| blocks.saturating_mul(512)).map_err(|_| Errno::EIO)
    }
}

/// Maps errors of a copy inside the kernel that concern these two files only.
pub(crate) fn not_between_these(errno: Errno) -> Errno {
    match errno.0 {
        libc::EXDEV | libc::EINVAL | libc::ENOSYS | libc::EOPNOTSUPP | libc::EBADF | libc::EPERM | libc::ENOTTY => {
            Errno::ENOTSUP
        }
        _ => errno,
    }
}

impl Drop for HostFile {
    fn drop(&mut self) {
        // Locks belong to the open file, which a child of this process shares between its fork and its exec: closing
        // alone could leave them standing for a moment. While an operation still runs they must stay, and do.
        if Arc::strong_count(&self.fd) == 1
            && let Err(errno) = sys::set_lock(&self.fd, sys::ByteLock::Unlocked, 0, 0)
        {
            tracing::debug!(?errno, "could not unlock a file that is being closed");
        }
    }
}

impl AsFd for HostFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn now_ns() -> u64 {
    u64::try_from(rt::now().as_nanos()).unwrap_or(u64::MAX)
}
