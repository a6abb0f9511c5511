// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The kernel's ublk driver: its control device, and the char device of each block device that a process serves.
//!
//! Commands are structs with addresses in them, so they are made here, where the memory is. The caller knows the structs in their buffers.

use crate::rt;
use crate::sys::{self, SysResult};
use cowshed_types::Errno;
use io_uring::{IoUring, opcode, squeue, types};
use rustix::fs::{Mode, OFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::cell::Cell;
use std::future::Future;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

/// The control device.
pub const UBLK_CONTROL: &str = "/dev/ublk-control";
/// Bytes of the descriptor of a request.
const DESCRIPTOR_BYTES: usize = 24;
/// The driver has room for this many descriptors of a queue.
const MAX_DEPTH: usize = 4096;
/// The longest buffer of a command: its length has two bytes.
const MAX_BUFFER_BYTES: usize = u16::MAX as usize;

/// A command on the control device, by its number in `linux/ublk_cmd.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum UblkCall {
    /// Makes a device. The server's wishes go in, the agreed parameters come out.
    AddDevice = 0x04,
    /// Removes a device; returns when its char device isn't open any more.
    DeleteDevice = 0x05,
    /// Makes the block device, once all requests are fetched. The value is the server's process.
    StartDevice = 0x06,
    /// Ends requests and takes the block device away.
    StopDevice = 0x07,
    /// Sets the device's parameters.
    SetParams = 0x08,
    /// Reads the device's parameters.
    GetParams = 0x09,
    /// Prepares a device whose server has gone for the next one.
    StartRecovery = 0x10,
    /// The next server has fetched all requests. The value is its process.
    EndRecovery = 0x11,
    /// Reads the agreed parameters.
    GetInfo = 0x12,
    /// Reads the driver's features.
    GetFeatures = 0x13,
    /// Changes the length. The value is in sectors.
    UpdateSize = 0x15,
}

/// The number of a command of the driver: that of an ioctl of type `u`.
const fn code(direction: u32, bytes: usize, number: u8) -> u32 {
    direction << 30 | (bytes as u32) << 16 | (b'u' as u32) << 8 | number as u32
}

impl UblkCall {
    fn code(self) -> u32 {
        match self {
            UblkCall::GetParams | UblkCall::GetInfo | UblkCall::GetFeatures => code(2, 32, self as u8),
            _ => code(3, 32, self as u8),
        }
    }
}

/// The object of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UblkTarget {
    /// Number of the device.
    pub device: u32,
    /// A number that some commands take.
    pub value: u64,
    /// The buffer begins with the path of the char device, which has this many bytes with the zero behind it.
    pub path_bytes: u16,
}

/// The driver. Tests have one of their own.
pub trait UblkDriver: Send + Sync + 'static {
    /// A char device.
    type Device: UblkDevice;
    /// Carries a command out; the driver may read and write the buffer. It waits, for some commands as long as requests run.
    fn call(&self, call: UblkCall, target: UblkTarget, buffer: &mut [u8]) -> Result<(), Errno>;
    /// Opens the char device of a device, which one process may do at a time.
    fn open(&self, device: u32) -> Result<Self::Device, Errno>;
}

/// The shape of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UblkShape {
    /// Its number on the device.
    pub queue: u16,
    /// Number of requests.
    pub depth: u16,
    /// The driver copies data from and to buffers of this length, one a request. Without, the data is in the char device.
    pub buffer_bytes: Option<u32>,
}

/// A char device.
pub trait UblkDevice: Send + Sync + 'static {
    /// A queue of it.
    type Queue: UblkQueue;
    /// A queue, for the calling thread.
    fn queue(&self, shape: UblkShape) -> Result<Self::Queue, Errno>;
}

/// A queue of a device, for one thread. Tags are below its depth.
pub trait UblkQueue: 'static {
    /// Waits for the first request of a tag. 0, or the negative number of an error.
    fn fetch(&self, tag: u16) -> impl Future<Output = i32>;
    /// Gives the result of a request, in bytes or as the negative number of an error, and waits for the tag's next request.
    fn commit(&self, tag: u16, result: i32) -> impl Future<Output = i32>;
    /// The descriptor of the request that has come.
    fn descriptor(&self, tag: u16) -> [u8; DESCRIPTOR_BYTES];
    /// Copies data of a write, from its start.
    fn take(&self, tag: u16, at: u32, data: &mut [u8]) -> Result<(), Errno>;
    /// Copies data to a read.
    fn give(&self, tag: u16, at: u32, data: &[u8]) -> Result<(), Errno>;
}

/// The control device of the kernel's driver.
pub struct UblkControl {
    /// The driver takes commands in entries of 128 bytes only.
    ring: Mutex<IoUring<squeue::Entry128>>,
    fd: OwnedFd,
}

impl std::fmt::Debug for UblkControl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UblkControl").finish_non_exhaustive()
    }
}

fn errno_of(error: &std::io::Error) -> Errno {
    Errno(error.raw_os_error().unwrap_or(libc::EIO))
}

impl UblkControl {
    /// Opens the control device.
    ///
    /// # Errors
    /// `ENOENT`: the driver is not there. `ENOSYS`, `EPERM`: a sandbox forbids io_uring.
    pub fn open() -> Result<UblkControl, Errno> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let fd = sys::retry(|| rustix::fs::open(UBLK_CONTROL, flags, Mode::empty()).map_err(sys::errno))?;
        let ring = IoUring::<squeue::Entry128>::builder().dontfork().build(2).map_err(|error| errno_of(&error))?;
        Ok(UblkControl { ring: Mutex::new(ring), fd })
    }
}

/// The struct of a command on the control device.
fn command(target: UblkTarget, buffer: &mut [u8]) -> [u8; 80] {
    let address = if buffer.is_empty() { 0 } else { buffer.as_mut_ptr().addr() as u64 };
    let mut bytes = [0; 80];
    bytes[..4].copy_from_slice(&target.device.to_ne_bytes());
    // About no queue.
    bytes[4..6].copy_from_slice(&u16::MAX.to_ne_bytes());
    bytes[6..8].copy_from_slice(&(buffer.len() as u16).to_ne_bytes());
    bytes[8..16].copy_from_slice(&address.to_ne_bytes());
    bytes[16..24].copy_from_slice(&target.value.to_ne_bytes());
    bytes[24..26].copy_from_slice(&target.path_bytes.to_ne_bytes());
    bytes
}

impl UblkDriver for UblkControl {
    type Device = UblkChar;

    fn call(&self, call: UblkCall, target: UblkTarget, buffer: &mut [u8]) -> Result<(), Errno> {
        if buffer.len() > MAX_BUFFER_BYTES {
            return Err(Errno::EINVAL);
        }
        let entry = opcode::UringCmd80::new(types::Fd(self.fd.as_raw_fd()), call.code()).cmd(command(target, buffer));
        let mut ring = crate::signal::lock(&self.ring);
        // SAFETY: the driver reads and writes no memory but the buffer, of the length in the command. It is borrowed
        // until the completion, for which the code below waits in every case.
        if unsafe { ring.submission().push(&entry.build()) }.is_err() {
            return Err(Errno(libc::EBUSY));
        }
        loop {
            // Not taken yet, or interrupted: asked again. Nothing but the completion frees the buffer.
            let _ = ring.submit_and_wait(1);
            if let Some(completion) = ring.completion().next() {
                return match completion.result() {
                    result if result < 0 => Err(Errno(result.saturating_neg())),
                    _ => Ok(()),
                };
            }
            std::thread::yield_now();
        }
    }

    fn open(&self, device: u32) -> Result<UblkChar, Errno> {
        let path = format!("/dev/ublkc{device}");
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let fd = sys::retry(|| rustix::fs::open(&*path, flags, Mode::empty()).map_err(sys::errno))?;
        Ok(UblkChar(Arc::new(fd)))
    }
}

/// A char device of the kernel's driver.
#[derive(Debug)]
pub struct UblkChar(Arc<OwnedFd>);

/// Memory that the driver reads or writes.
#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

impl Mapping {
    /// Maps descriptors, which only the driver writes.
    fn of_descriptors(fd: impl AsFd, len: usize, offset: u64) -> SysResult<Mapping> {
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: no address is asked for, so no memory of this process is replaced.
        Self::new(len, unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, ProtFlags::READ, flags, fd, offset) })
    }

    /// New memory of zeroes.
    fn anonymous(len: usize) -> SysResult<Mapping> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: as above.
        Self::new(len, unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, access, flags) })
    }

    fn new(len: usize, start: rustix::io::Result<*mut std::ffi::c_void>) -> SysResult<Mapping> {
        let start = NonNull::new(start.map_err(sys::errno)?.cast::<u8>()).ok_or(Errno::EINVAL)?;
        Ok(Mapping { start, len })
    }

    /// The address of `len` bytes at `at`.
    fn place(&self, at: usize, len: usize) -> *mut u8 {
        let fits = at.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(fits, "{len} bytes at {at} of {} bytes of a queue", self.len);
        self.start.as_ptr().wrapping_add(at)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `Mapping::new`'s callers, and each access keeps its mapping alive.
        if let Err(error) = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) } {
            tracing::error!(%error, "could not unmap memory of a ublk device");
        }
    }
}

/// A queue of the kernel's driver.
#[derive(Debug)]
pub struct UblkCharQueue {
    fd: Arc<OwnedFd>,
    shape: UblkShape,
    descriptors: Mapping,
    /// Leaked where the driver may still use it.
    buffers: Option<std::mem::ManuallyDrop<Mapping>>,
    /// Commands that the driver has.
    waiting: Cell<u32>,
}

impl UblkDevice for UblkChar {
    type Queue = UblkCharQueue;

    fn queue(&self, shape: UblkShape) -> Result<UblkCharQueue, Errno> {
        if shape.depth == 0 || usize::from(shape.depth) > MAX_DEPTH {
            return Err(Errno::EINVAL);
        }
        let page_bytes = rustix::param::page_size();
        let bytes = |depth: usize| (depth * DESCRIPTOR_BYTES).next_multiple_of(page_bytes);
        let offset = u64::from(shape.queue) * bytes(MAX_DEPTH) as u64;
        let descriptors = Mapping::of_descriptors(&self.0, bytes(shape.depth.into()), offset)?;
        let buffers = match shape.buffer_bytes {
            None => None,
            Some(bytes) => {
                let len = (bytes as usize).checked_mul(shape.depth.into()).ok_or(Errno::EINVAL)?;
                Some(std::mem::ManuallyDrop::new(Mapping::anonymous(len)?))
            }
        };
        Ok(UblkCharQueue { fd: Arc::clone(&self.0), shape, descriptors, buffers, waiting: Cell::new(0) })
    }
}

impl UblkCharQueue {
    /// The offset of a request's data in the char device.
    fn data_offset(&self, tag: u16) -> u64 {
        const START: u64 = 0x8000_0000;
        const DATA_BITS: u32 = 25;
        const TAG_BITS: u32 = 16;
        START + (u64::from(self.shape.queue) << (DATA_BITS + TAG_BITS)) + (u64::from(tag) << DATA_BITS)
    }

    /// The bytes of a request's buffer.
    fn buffer(&self, buffers: &Mapping, tag: u16, at: u32, len: usize) -> *mut u8 {
        let bytes = self.shape.buffer_bytes.unwrap_or(0) as usize;
        assert!(at as usize + len <= bytes, "{len} bytes at {at} of the {bytes} of a request");
        buffers.place(usize::from(tag) * bytes + at as usize, len)
    }

    async fn run(&self, number: u8, tag: u16, result: i32) -> i32 {
        let Some(ring) = rt::current_ring() else { return -libc::ENOSYS };
        assert!(tag < self.shape.depth, "tag {tag} of a queue of {}", self.shape.depth);
        let address = self.buffers.as_ref().map_or(0, |buffers| self.buffer(buffers, tag, 0, 0).addr() as u64);
        let mut bytes = [0; 16];
        bytes[..2].copy_from_slice(&self.shape.queue.to_ne_bytes());
        bytes[2..4].copy_from_slice(&tag.to_ne_bytes());
        bytes[4..8].copy_from_slice(&result.to_ne_bytes());
        bytes[8..].copy_from_slice(&address.to_ne_bytes());
        // Dropped before its end, it stays counted, and the buffers stay where they are.
        self.waiting.set(self.waiting.get() + 1);
        let (result, _) = ring.command(&self.fd, code(3, 16, number), bytes).await;
        self.waiting.set(self.waiting.get() - 1);
        result
    }
}

impl Drop for UblkCharQueue {
    fn drop(&mut self) {
        if self.waiting.get() == 0
            && let Some(buffers) = &mut self.buffers
        {
            // SAFETY: this is the only drop, and nothing uses the buffers afterwards.
            unsafe { std::mem::ManuallyDrop::drop(buffers) };
        }
    }
}

impl UblkQueue for UblkCharQueue {
    fn fetch(&self, tag: u16) -> impl Future<Output = i32> {
        self.run(0x20, tag, 0)
    }

    fn commit(&self, tag: u16, result: i32) -> impl Future<Output = i32> {
        self.run(0x21, tag, result)
    }

    fn descriptor(&self, tag: u16) -> [u8; DESCRIPTOR_BYTES] {
        let place = self.descriptors.place(usize::from(tag) * DESCRIPTOR_BYTES, DESCRIPTOR_BYTES);
        // SAFETY: mapped, and aligned for words, because pages are and descriptors are three words long. The driver has written them
        // before it completed the command, and writes the next ones after the commit.
        let words = unsafe { place.cast::<[u64; 3]>().read_volatile() };
        let mut bytes = [0; DESCRIPTOR_BYTES];
        for (word, bytes) in words.iter().zip(bytes.chunks_exact_mut(8)) {
            bytes.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    fn take(&self, tag: u16, at: u32, data: &mut [u8]) -> Result<(), Errno> {
        if let Some(buffers) = &self.buffers {
            let from = self.buffer(buffers, tag, at, data.len());
            // SAFETY: both ranges have that length. They can't overlap: the mapping is no memory of Rust's. The driver has filled it
            // and leaves it alone until the commit.
            unsafe { std::ptr::copy_nonoverlapping(from, data.as_mut_ptr(), data.len()) };
            return Ok(());
        }
        let mut done = 0;
        while done < data.len() {
            let offset = self.data_offset(tag) + u64::from(at) + done as u64;
            match rustix::io::pread(&self.fd, &mut data[done..], offset) {
                Ok(0) => return Err(Errno(libc::EIO)),
                Ok(count) => done += count,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(sys::errno(error)),
            }
        }
        Ok(())
    }

    fn give(&self, tag: u16, at: u32, data: &[u8]) -> Result<(), Errno> {
        if let Some(buffers) = &self.buffers {
            let to = self.buffer(buffers, tag, at, data.len());
            // SAFETY: as in `take`.
            unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len()) };
            return Ok(());
        }
        let mut done = 0;
        while done < data.len() {
            let offset = self.data_offset(tag) + u64::from(at) + done as u64;
            match rustix::io::pwrite(&self.fd, &data[done..], offset) {
                Ok(0) => return Err(Errno(libc::EIO)),
                Ok(count) => done += count,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(sys::errno(error)),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_have_the_numbers_and_the_layout_of_the_driver() {
        assert_eq!(UblkCall::AddDevice.code(), 0xc020_7504);
        assert_eq!(UblkCall::GetFeatures.code(), 0x8020_7513);
        assert_eq!(code(3, 16, 0x21), 0xc010_7521);
        let mut buffer = [7; 300];
        let bytes = command(UblkTarget { device: 3, value: 9, path_bytes: 12 }, &mut buffer);
        let address = buffer.as_ptr().addr() as u64;
        let expected = [&3u32.to_ne_bytes()[..], &[255; 2], &300u16.to_ne_bytes(), &address.to_ne_bytes()].concat();
        assert_eq!(bytes[..16], expected);
        assert_eq!(bytes[16..32], [&9u64.to_ne_bytes()[..], &12u16.to_ne_bytes(), &[0; 6]].concat());
        assert_eq!((command(UblkTarget { device: 0, value: 0, path_bytes: 0 }, &mut [])[6..16]), [0; 10]);
    }

    #[test]
    fn a_command_to_what_is_no_ublk_device_says_so() {
        let file = Arc::new(OwnedFd::from(tempfile::tempfile().unwrap()));
        // A file has no descriptors of requests, and knows no commands.
        rustix::fs::ftruncate(&file, 1 << 20).unwrap();
        let queue = UblkChar(file).queue(UblkShape { queue: 0, depth: 4, buffer_bytes: None }).unwrap();
        let result = crate::rt::block_on(queue.fetch(3));
        assert!([-libc::EOPNOTSUPP, -libc::ENOSYS, -libc::EINVAL].contains(&result), "{result}");
        assert_eq!(queue.descriptor(3), [0; 24]);
    }

    #[test]
    fn data_goes_through_the_char_device_or_through_a_buffer() {
        let file = Arc::new(OwnedFd::from(tempfile::tempfile().unwrap()));
        rustix::fs::ftruncate(&file, 1 << 20).unwrap();
        for buffer_bytes in [None, Some(8192)] {
            let queue = UblkChar(Arc::clone(&file)).queue(UblkShape { queue: 1, depth: 2, buffer_bytes }).unwrap();
            queue.give(1, 512, &[5; 1024]).unwrap();
            let mut back = [0; 1024];
            queue.take(1, 1024, &mut back[..512]).unwrap();
            assert_eq!(back[..512], [5; 512]);
            queue.take(1, 0, &mut back[512..]).unwrap();
            assert_eq!(back[512..], [0; 512]);
        }
    }
}
