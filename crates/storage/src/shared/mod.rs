// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory that another process shares with this one, and changes at any time: a guest's.
//!
//! No reference to its bytes exists, because a reference promises that its bytes don't change. They are copied by
//! accesses that the compiler neither repeats nor invents. The other process may shorten the file behind a mapping;
//! `lost` turns missing bytes into zeroes.

mod bufs;
mod sigbus;

use crate::file_systems;
use crate::sys;
pub use bufs::SharedBufs;
use cowshed_types::{Error, ErrorKind, Result};
use rustix::fs::{FileType, MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use sigbus::WatchedMapping;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

/// Pages have at least this many bytes.
const PAGE_BYTES: u64 = 4096;
/// The largest huge page, in bytes.
const MAX_PAGE_BYTES: u64 = 1 << 30;
/// The mappings of one owner, with a bound on their number: the process has 4096 for all.
#[derive(Debug)]
pub struct MappingBudget {
    most: usize,
    /// Each mapping has a clone.
    used: Arc<()>,
}

impl MappingBudget {
    /// At most `most` mappings at a time.
    pub fn new(most: usize) -> MappingBudget {
        MappingBudget { most, used: Arc::default() }
    }

    /// As [`SharedMemory::map`], as one of these mappings. It counts until the last piece of it is gone.
    ///
    /// # Errors
    /// Besides those: the bound is reached.
    pub fn map(&self, file: impl AsFd, offset: u64, len: u64) -> Result<SharedMemory> {
        if Arc::strong_count(&self.used) > self.most {
            return Err(Error::new(ErrorKind::Limit, "too many mappings of shared memory are in use").value(self.most));
        }
        SharedMemory::map_as(file, offset, len, Some(Arc::clone(&self.used)))
    }
}

/// A part of a file, mapped for reading and writing.
#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    len: usize,
    /// Kept until the memory is unmapped.
    watch: WatchedMapping,
    /// No access waits for a file system.
    is_memory: bool,
    /// Its place in the owner's budget.
    _counted: Option<Arc<()>>,
}

// SAFETY: the memory is only reached by the copies of `SharedMemory`, which any thread may make at any time.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // From here on the addresses may be another mapping's.
        self.watch.end();
        // SAFETY: the range was mapped by `SharedMemory::map` and each access keeps its mapping alive.
        let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
        if let Err(error) = unmapped {
            tracing::error!(%error, "could not unmap shared memory");
        }
    }
}

/// A piece of shared memory. Clones are the same piece; it is unmapped with the last one.
#[derive(Clone, Debug)]
pub struct SharedMemory {
    mapping: Arc<Mapping>,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a piece is a mapping, which may be used by all threads, and two numbers.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Maps `len` bytes of a file from `offset` on. The file must be a regular one (of memory, as a rule), and as long as that.
    ///
    /// # Errors
    /// A file of a file system that another process or another machine may serve: an access would wait for that one.
    pub fn map(file: impl AsFd, offset: u64, len: u64) -> Result<SharedMemory> {
        Self::map_as(file, offset, len, None)
    }

    fn map_as(file: impl AsFd, offset: u64, len: u64, counted: Option<Arc<()>>) -> Result<SharedMemory> {
        let failed = |error, what: &str| Error::os(sys::errno(error), what);
        let status = rustix::fs::fstat(&file).map_err(|error| failed(error, "could not look at shared memory"))?;
        if FileType::from_raw_mode(status.st_mode) != FileType::RegularFile {
            return Err(Error::invalid_argument("shared memory is no regular file"));
        }
        let (file_bytes, end) = (u64::try_from(status.st_size).unwrap_or(0), offset.checked_add(len));
        if len == 0 || end.is_none_or(|end| end > file_bytes) {
            let message = format!("shared memory of {len} bytes from {offset} passes the end of its file");
            return Err(Error::new(ErrorKind::InvalidArgument, message).value(file_bytes));
        }
        let found = rustix::fs::fstatfs(&file).map_err(|error| failed(error, "could not look at shared memory"))?;
        let is_memory = file_systems::IN_MEMORY.contains(&(found.f_type as u64));
        if !is_memory && !file_systems::LOCAL.contains(&(found.f_type as u64)) {
            let message =
                "shared memory lies in a file system that may never answer: memfd, tmpfs and hugetlbfs keep it";
            return Err(Error::unsupported(message).value(format!("{:#x}", found.f_type)));
        }
        // A file of huge pages is mapped in whole ones.
        let block_bytes = u64::try_from(status.st_blksize).unwrap_or(PAGE_BYTES);
        let page_bytes = match block_bytes.is_power_of_two() {
            true => block_bytes.clamp(PAGE_BYTES, MAX_PAGE_BYTES),
            false => PAGE_BYTES,
        };
        let before = offset % page_bytes;
        let too_long = || Error::new(ErrorKind::Limit, "shared memory is too long").value(len);
        let mapped = len.checked_add(before).and_then(|len| len.checked_next_multiple_of(page_bytes));
        let mapped = mapped.and_then(|len| usize::try_from(len).ok()).ok_or_else(too_long)?;
        // SAFETY: no address is asked for, so no memory of this process is replaced.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                mapped,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                &file,
                offset - before,
            )
        };
        let start = start.map_err(|error| failed(error, "could not map shared memory"))?;
        let start = NonNull::new(start.cast::<u8>()).ok_or_else(|| Error::internal("memory mapped at address 0"))?;
        let watch = WatchedMapping::new(start.as_ptr().addr(), mapped, page_bytes as usize);
        let watch = watch.unwrap_or_default();
        let mapping = Arc::new(Mapping { start, len: mapped, watch, is_memory, _counted: counted });
        if !mapping.watch.is_some() {
            return Err(Error::new(ErrorKind::Limit, "too many mappings of shared memory"));
        }
        // SAFETY: `before + len` is at most the length of the mapping.
        let start = unsafe { start.add(before as usize) };
        Ok(SharedMemory { mapping, start, len: len as usize })
    }

    /// New memory of zeroes, and the file that stands for it. The file can't be shortened.
    pub fn create(name: &str, len: u64) -> Result<(SharedMemory, OwnedFd)> {
        let failed = |error| Error::os(sys::errno(error), "could not make shared memory");
        let file = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(failed)?;
        rustix::fs::ftruncate(&file, len).map_err(failed)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals).map_err(failed)?;
        Ok((Self::map(&file, 0, len)?, file))
    }

    /// Bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// True once the file behind it turned out to be shorter than it was. The memory, or a part of it, is no longer
    /// shared then. Bytes that a copy took out of it may be zeroes that the other process never wrote.
    pub fn is_lost(&self) -> bool {
        self.mapping.watch.is_lost()
    }

    /// True when no access waits for a file system, which may be another process: the file behind it is of memory.
    pub fn is_memory(&self) -> bool {
        self.mapping.is_memory
    }

    /// The first byte, for the kernel.
    pub(crate) fn as_raw(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// The part of `len` bytes from `at` on.
    ///
    /// # Panics
    /// When it passes the end: a bug of the caller.
    pub fn part(&self, at: usize, len: usize) -> SharedMemory {
        SharedMemory { mapping: Arc::clone(&self.mapping), start: self.place(at, len), len }
    }

    #[inline]
    fn place(&self, at: usize, len: usize) -> NonNull<u8> {
        let fits = at.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(fits, "{len} bytes at {at} of {} bytes of shared memory", self.len);
        // SAFETY: within the piece, or one past its end.
        unsafe { self.start.add(at) }
    }

    /// Copies bytes out, each once.
    ///
    /// # Panics
    /// When they pass the end: a bug of the caller.
    #[inline]
    pub fn read(&self, at: usize, into: &mut [u8]) {
        let from = self.place(at, into.len());
        // SAFETY: both ranges have that length. They can't overlap: a mapping is no memory of Rust's.
        unsafe { copy_out(from.as_ptr(), into.as_mut_ptr(), into.len()) }
    }

    /// Copies bytes in.
    ///
    /// # Panics
    /// When they pass the end: a bug of the caller.
    #[inline]
    pub fn write(&self, at: usize, from: &[u8]) {
        let to = self.place(at, from.len());
        // SAFETY: as in `read`.
        unsafe { copy_in(from.as_ptr(), to.as_ptr(), from.len()) }
    }

    /// The little-endian number at `at`; bytes written before it was are seen afterwards. One access where the address
    /// is even.
    ///
    /// # Panics
    /// When it passes the end: a bug of the caller.
    #[inline]
    pub fn load(&self, at: usize) -> u16 {
        let place = self.place(at, 2);
        if place.as_ptr().addr().is_multiple_of(2) {
            // SAFETY: mapped, aligned, and only ever accessed as raw memory.
            let number = unsafe { AtomicU16::from_ptr(place.as_ptr().cast()) };
            return u16::from_le(number.load(Ordering::Acquire));
        }
        let mut bytes = [0; 2];
        self.read(at, &mut bytes);
        u16::from_le_bytes(bytes)
    }

    /// Stores a little-endian number; earlier writes are seen before it. One access where the address is even.
    ///
    /// # Panics
    /// When it passes the end: a bug of the caller.
    #[inline]
    pub fn store(&self, at: usize, value: u16) {
        let place = self.place(at, 2);
        if place.as_ptr().addr().is_multiple_of(2) {
            // SAFETY: as in `load`.
            let number = unsafe { AtomicU16::from_ptr(place.as_ptr().cast()) };
            number.store(value.to_le(), Ordering::Release);
        } else {
            self.write(at, &value.to_le_bytes());
        }
    }
}

/// Up to this many bytes are copied word by word: descriptors, headers and entries of rings.
#[cfg(target_arch = "x86_64")]
const SHORT_BYTES: usize = 64;
const WORD_BYTES: usize = size_of::<u32>();

/// Copies `len` bytes from memory that another process may change meanwhile, each by one access.
///
/// # Safety
/// Both ranges must be mapped, and must not overlap.
#[inline]
unsafe fn copy_out(shared: *const u8, own: *mut u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if len > SHORT_BYTES {
        // SAFETY: as the caller promises.
        return unsafe { copy_long(shared, own, len) };
    }
    let words = if shared.cast::<u32>().is_aligned() { len / WORD_BYTES } else { 0 };
    for at in (0..words * WORD_BYTES).step_by(WORD_BYTES) {
        // SAFETY: within both ranges, and aligned on the shared side.
        unsafe { own.add(at).cast::<u32>().write_unaligned(shared.add(at).cast::<u32>().read_volatile()) };
    }
    for at in words * WORD_BYTES..len {
        // SAFETY: within both ranges; a byte is always aligned.
        unsafe { own.add(at).write(shared.add(at).read_volatile()) };
    }
}

/// As [`copy_out`], in the other direction.
///
/// # Safety
/// As there.
#[inline]
unsafe fn copy_in(own: *const u8, shared: *mut u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if len > SHORT_BYTES {
        // SAFETY: as the caller promises.
        return unsafe { copy_long(own, shared, len) };
    }
    let words = if shared.cast::<u32>().is_aligned() { len / WORD_BYTES } else { 0 };
    for at in (0..words * WORD_BYTES).step_by(WORD_BYTES) {
        // SAFETY: within both ranges, and aligned on the shared side.
        unsafe { shared.add(at).cast::<u32>().write_volatile(own.add(at).cast::<u32>().read_unaligned()) };
    }
    for at in words * WORD_BYTES..len {
        // SAFETY: within both ranges; a byte is always aligned.
        unsafe { shared.add(at).write_volatile(own.add(at).read()) };
    }
}

/// # Safety
/// As for [`copy_out`].
#[cfg(target_arch = "x86_64")]
unsafe fn copy_long(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller promises the ranges. The compiler can't look into the instruction, so it assumes nothing of the bytes.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") len => _,
            inout("rsi") from => _,
            inout("rdi") to => _,
            options(nostack, preserves_flags),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file_of(len: u64) -> OwnedFd {
        let file = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, len).unwrap();
        file
    }

    #[test]
    fn two_mappings_of_one_file_see_each_other() {
        let (mine, file) = SharedMemory::create("test", 8192).unwrap();
        let theirs = SharedMemory::map(&file, 100, 5000).unwrap();
        let bytes: Vec<u8> = (0..3000).map(|number| number as u8).collect();
        theirs.write(7, &bytes);
        let mut back = vec![0; 3000];
        mine.read(107, &mut back);
        assert_eq!(back, bytes);
        mine.part(4096, 100).store(3, 0x1234);
        assert_eq!((theirs.load(3999), mine.load(4099)), (0x1234, 0x1234));
        mine.store(10, 0xabcd);
        assert_eq!(mine.load(10), 0xabcd);
    }

    #[test]
    fn copies_at_any_place_and_length_are_whole() {
        let (memory, _file) = SharedMemory::create("test", 4096).unwrap();
        let bytes: Vec<u8> = (1..=100).collect();
        for at in 0..9 {
            for len in (0..24).chain([63, 64, 65, 100]) {
                memory.write(0, &[0xff; 120]);
                memory.write(at, &bytes[..len]);
                let mut back = [0; 110];
                memory.read(at, &mut back[..len]);
                assert_eq!(back[..len], bytes[..len], "{len} bytes at {at}");
                memory.read(0, &mut back);
                assert!(back[..at].iter().chain(&back[at + len..]).all(|&byte| byte == 0xff), "{len} bytes at {at}");
            }
        }
    }

    #[test]
    fn what_is_no_file_of_that_length_is_refused() {
        let file = file_of(4096);
        for (offset, len) in [(0, 4097), (4096, 1), (1, 4096), (0, 0), (u64::MAX, 2), (1 << 40, 4096)] {
            assert!(SharedMemory::map(&file, offset, len).is_err(), "{offset} {len}");
        }
        let socket = std::os::unix::net::UnixDatagram::unbound().unwrap();
        assert!(SharedMemory::map(&socket, 0, 4096).is_err());
    }

    #[test]
    fn memory_whose_file_was_shortened_reads_as_zeroes() {
        let file = file_of(1 << 20);
        let memory = SharedMemory::map(&file, 0, 1 << 20).unwrap();
        let other = SharedMemory::map(file_of(4096), 0, 4096).unwrap();
        memory.write(70_000, &[7; 100]);
        other.write(0, &[8; 100]);
        rustix::fs::ftruncate(&file, 4096).unwrap();
        let mut bytes = [1; 100];
        memory.read(70_000, &mut bytes);
        assert_eq!(bytes, [0; 100]);
        assert!(memory.is_lost() && !other.is_lost());
        memory.store(80_000, 5);
        assert_eq!((memory.load(80_000), other.load(0)), (5, 0x0808));
    }

    #[test]
    #[should_panic(expected = "of shared memory")]
    fn an_access_past_the_end_panics() {
        SharedMemory::create("test", 4096).unwrap().0.part(10, 100).load(99);
    }
}
