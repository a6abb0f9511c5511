// SPDX-License-Identifier: Apache-2.0 OR MIT
//! System calls that `rustix` lacks, and the blocking forms of the operations that the ring also has.

#[cfg(test)]
use crate::kernel_faults::{self, Call};
#[cfg(not(test))]
use crate::payload::MAX_TRANSFER;
use crate::payload::Payload;
use crate::ring::{Direction, SocketMessage};
use cowshed_types::Errno;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Result of a system call.
pub(crate) type SysResult<T> = std::result::Result<T, Errno>;

/// `_IO(0x12, 127)`: write zeroes to a range of a block device.
const BLKZEROOUT: libc::Ioctl = 0x127f;
/// `_IO(0x12, 104)`: the logical block size of a block device.
const BLKSSZGET: libc::Ioctl = 0x1268;

fn last_errno() -> Errno {
    Errno(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
}

/// Repeats a call that a signal interrupted.
pub(crate) fn retry<T>(mut call: impl FnMut() -> SysResult<T>) -> SysResult<T> {
    loop {
        match call() {
            Err(Errno(libc::EINTR)) => {}
            result => return result,
        }
    }
}

/// Makes the number of `fd` stand for the open file description of `fresh`.
pub(crate) fn replace_description(fd: &OwnedFd, fresh: &OwnedFd) -> SysResult<()> {
    retry(|| {
        // SAFETY: both descriptors are open for the time of the call. The number of `fd` goes on to be open and owned
        // by `fd`; operations in flight keep a reference of their own to the description that they began with.
        match unsafe { libc::dup3(fresh.as_raw_fd(), fd.as_raw_fd(), libc::O_CLOEXEC) } {
            -1 => Err(last_errno()),
            _ => Ok(()),
        }
    })
}

/// Leaves the process's signals to its other threads.
pub(crate) fn block_signals() -> SysResult<()> {
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `sigfillset` makes a whole set of `all`, which the next call only reads; the set before is not asked for.
    let code = unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), std::ptr::null_mut())
    };
    if code == 0 { Ok(()) } else { Err(Errno(code)) }
}

extern "C" fn ignore(_: libc::c_int) {}

/// Interrupts the call that a thread of this process waits in. That takes a handler, since signals without one interrupt
/// nothing. One that the program has already does as well. `SIGURG` is ignored by default: one too many does no harm.
pub(crate) fn interrupt(thread: i32) {
    static HANDLER: std::sync::Once = std::sync::Once::new();
    HANDLER.call_once(|| {
        let mut old = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
        let mut new = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: zeroes are a valid `sigaction`: the default handler, no flags, an empty mask. Both live for the calls, and
        // the handler touches nothing.
        unsafe {
            let asked = libc::sigaction(libc::SIGURG, std::ptr::null(), old.as_mut_ptr());
            if asked == 0 && matches!(old.assume_init_ref().sa_sigaction, libc::SIG_DFL | libc::SIG_IGN) {
                (*new.as_mut_ptr()).sa_sigaction = ignore as extern "C" fn(libc::c_int) as usize;
                libc::sigaction(libc::SIGURG, new.as_ptr(), std::ptr::null_mut());
            }
        }
    });
    // SAFETY: numbers alone. A thread that has ended gives an error, and another one with its number ignores the signal.
    unsafe {
        libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, libc::SIGURG);
    }
}

/// The number of a `rustix` error.
pub(crate) fn errno(error: rustix::io::Errno) -> Errno {
    Errno(error.raw_os_error())
}

fn signed_offset(offset: u64) -> SysResult<i64> {
    i64::try_from(offset).map_err(|_| Errno::EFBIG)
}

/// The most bytes for one system call.
#[cfg(not(test))]
#[inline]
fn most_bytes(_: impl AsFd, _: Direction) -> SysResult<usize> {
    Ok(MAX_TRANSFER)
}

/// As a fault has it.
#[cfg(test)]
fn most_bytes(file: impl AsFd, direction: Direction) -> SysResult<usize> {
    let call = if direction == Direction::Read { Call::Read } else { Call::Write };
    kernel_faults::of_system_call(file, call).map_err(Errno)
}

/// One `preadv` or `pwritev` of at most `most` bytes, behind the first `skip` bytes of the payload.
pub(crate) fn transfer(
    file: impl AsFd,
    direction: Direction,
    payload: &Payload,
    skip: usize,
    most: usize,
    offset: u64,
) -> SysResult<usize> {
    let offset = signed_offset(offset)?;
    let fd = file.as_fd().as_raw_fd();
    let most = most.min(most_bytes(&file, direction)?);
    if let Some((start, len)) = payload.bufs.single(skip, most) {
        return retry(|| {
            // SAFETY: within the piece of memory; the rest as below.
            let done = unsafe {
                match direction {
                    Direction::Read => libc::pread(fd, start.cast(), len, offset),
                    Direction::Write => libc::pwrite(fd, start.cast_const().cast(), len, offset),
                }
            };
            usize::try_from(done).map_err(|_| last_errno())
        });
    }
    let vectors = payload.bufs.vectors(skip, most);
    let count = i32::try_from(vectors.len()).map_err(|_| Errno::EINVAL)?;
    retry(|| {
        // SAFETY: the vectors name memory that `payload` owns alone, or shared memory that it keeps mapped and to whose
        // bytes no reference exists. It is borrowed until the call is over. Reading into it through a shared borrow is
        // sound: the caller owns the payload, and no code looks at the bytes meanwhile.
        let done = unsafe {
            match direction {
                Direction::Read => libc::preadv(fd, vectors.as_ptr(), count, offset),
                Direction::Write => libc::pwritev(fd, vectors.as_ptr(), count, offset),
            }
        };
        usize::try_from(done).map_err(|_| last_errno())
    })
}

/// As [`transfer`], but only as far as that goes without waiting: `EAGAIN` when nothing does, `EOPNOTSUPP` where the
/// file system can't decide.
pub(crate) fn transfer_now(
    file: impl AsFd,
    direction: Direction,
    payload: &Payload,
    skip: usize,
    most: usize,
    offset: u64,
) -> SysResult<usize> {
    let offset = signed_offset(offset)?;
    let fd = file.as_fd().as_raw_fd();
    let most = most.min(most_bytes(&file, direction)?);
    let (one, many);
    let vectors: &[libc::iovec] = match payload.bufs.single(skip, most) {
        Some((start, len)) => {
            one = [libc::iovec { iov_base: start.cast(), iov_len: len }];
            &one
        }
        None => {
            many = payload.bufs.vectors(skip, most);
            &many
        }
    };
    let count = i32::try_from(vectors.len()).map_err(|_| Errno::EINVAL)?;
    retry(|| {
        // SAFETY: as in `transfer`.
        let done = unsafe {
            match direction {
                Direction::Read => libc::preadv2(fd, vectors.as_ptr(), count, offset, libc::RWF_NOWAIT),
                Direction::Write => libc::pwritev2(fd, vectors.as_ptr(), count, offset, libc::RWF_NOWAIT),
            }
        };
        usize::try_from(done).map_err(|_| last_errno())
    })
}

/// The kernel's result of an operation on the ring.
pub(crate) fn ring_result(result: i32) -> SysResult<usize> {
    usize::try_from(result).map_err(|_| Errno(-result))
}

/// One `recv` into the payload's one buffer behind its first `skip` bytes, without waiting: `EAGAIN` when nothing is there.
pub(crate) fn receive(socket: impl AsFd, payload: &Payload, skip: usize) -> SysResult<usize> {
    let fd = socket.as_fd().as_raw_fd();
    let Some(buf) = payload.bufs.slice().first() else { return Ok(0) };
    let (start, len) = (buf.as_raw().wrapping_add(skip), buf.len() - skip);
    retry(|| {
        // SAFETY: `skip` is within the buffer, which the payload owns alone and which is borrowed until the call is
        // over; no code looks at the bytes meanwhile.
        let done = unsafe { libc::recv(fd, start.cast(), len, libc::MSG_DONTWAIT) };
        usize::try_from(done).map_err(|_| last_errno())
    })
}

/// One `sendmsg` of the payload behind its first `skip` bytes, without waiting: `EAGAIN` when there is no room.
pub(crate) fn send(socket: impl AsFd, payload: &Payload, skip: usize) -> SysResult<usize> {
    let fd = socket.as_fd().as_raw_fd();
    let mut message = SocketMessage::default();
    message.point_to(&payload.bufs, skip);
    retry(|| {
        // SAFETY: the message points to memory that `payload` owns, and both are borrowed until the call is over.
        let done = unsafe { libc::sendmsg(fd, message.header(), libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
        usize::try_from(done).map_err(|_| last_errno())
    })
}

/// Sets the flag by which the programs that this one starts don't get the descriptor. An error: it isn't open.
pub(crate) fn close_on_exec(descriptor: i32) -> SysResult<()> {
    // SAFETY: a call on numbers.
    match unsafe { libc::fcntl(descriptor, libc::F_SETFD, libc::FD_CLOEXEC) } {
        0.. => Ok(()),
        _ => Err(last_errno()),
    }
}

/// A descriptor that came with the start of this process, with its only owner: all that it opens itself are not passed on by exec.
/// `None` for those, for one that was taken before, and for one that isn't open.
pub(crate) fn take_inherited(descriptor: i32) -> Option<OwnedFd> {
    // SAFETY: a call on numbers.
    let flags = unsafe { libc::fcntl(descriptor, libc::F_GETFD) };
    if flags < 0 || flags & libc::FD_CLOEXEC != 0 {
        return None;
    }
    close_on_exec(descriptor).ok()?;
    // SAFETY: it is open, and nothing in this process has made it, so it has no owner. The flag keeps it from getting a second one.
    Some(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// Another descriptor of the same open file description.
pub(crate) fn copy_descriptor(descriptor: i32) -> SysResult<OwnedFd> {
    // SAFETY: a call on numbers.
    match unsafe { libc::fcntl(descriptor, libc::F_DUPFD_CLOEXEC, 0) } {
        // SAFETY: the call above has just made it, and it has no other owner.
        copy @ 0.. => Ok(unsafe { OwnedFd::from_raw_fd(copy) }),
        _ => Err(last_errno()),
    }
}

/// `fdatasync`. Not repeated after a signal.
pub(crate) fn flush(file: impl AsFd) -> SysResult<()> {
    #[cfg(test)]
    kernel_faults::of_system_call(&file, Call::Sync).map_err(Errno)?;
    rustix::fs::fdatasync(file).map_err(errno)
}

/// `fallocate` with raw mode bits.
pub(crate) fn fallocate(file: impl AsFd, mode: i32, offset: u64, len: u64) -> SysResult<()> {
    #[cfg(test)]
    kernel_faults::of_system_call(&file, Call::Allocate).map_err(Errno)?;
    let (offset, len) = (signed_offset(offset)?, signed_offset(len)?);
    let fd = file.as_fd().as_raw_fd();
    retry(|| {
        // SAFETY: a call on numbers.
        match unsafe { libc::fallocate(fd, mode, offset, len) } {
            0 => Ok(()),
            _ => Err(last_errno()),
        }
    })
}

/// `sync_file_range` of the whole file, which starts on dirty pages and waits for nothing on the disk.
pub(crate) fn start_writeback(file: impl AsFd) -> SysResult<()> {
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: a call on numbers.
    match unsafe { libc::sync_file_range(fd, 0, 0, libc::SYNC_FILE_RANGE_WRITE) } {
        0 => Ok(()),
        _ => Err(last_errno()),
    }
}

/// Writes zeroes to a range of a block device, or lets the device do it.
pub(crate) fn zero_device(file: impl AsFd, offset: u64, len: u64) -> SysResult<()> {
    let range: [u64; 2] = [offset, len];
    let fd = file.as_fd().as_raw_fd();
    retry(|| {
        // SAFETY: the request reads two u64 from the pointer.
        match unsafe { libc::ioctl(fd, BLKZEROOUT, range.as_ptr()) } {
            0.. => Ok(()),
            _ => Err(last_errno()),
        }
    })
}

/// Lets `to` share the blocks of a range of `from` (`FICLONERANGE`).
pub(crate) fn share_range(from: impl AsFd, from_offset: u64, to: impl AsFd, offset: u64, len: u64) -> SysResult<()> {
    let range = libc::file_clone_range {
        src_fd: i64::from(from.as_fd().as_raw_fd()),
        src_offset: from_offset,
        src_length: len,
        dest_offset: offset,
    };
    let fd = to.as_fd().as_raw_fd();
    retry(|| {
        // SAFETY: the request reads one `struct file_clone_range`.
        match unsafe { libc::ioctl(fd, libc::FICLONERANGE, &raw const range) } {
            0.. => Ok(()),
            _ => Err(last_errno()),
        }
    })
}

/// The logical block size of a block device, in bytes.
pub(crate) fn device_block_size(file: impl AsFd) -> SysResult<u64> {
    let mut size: libc::c_int = 0;
    // SAFETY: the request writes one int.
    match unsafe { libc::ioctl(file.as_fd().as_raw_fd(), BLKSSZGET, &raw mut size) } {
        0.. => u64::try_from(size).map_err(|_| Errno::EINVAL),
        _ => Err(last_errno()),
    }
}

/// The bytes of a TCP connection that the peer has not acknowledged (`SIOCOUTQ`, which has the number of `TIOCOUTQ`).
pub(crate) fn unacknowledged_bytes(socket: BorrowedFd<'_>) -> SysResult<u64> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the request writes one int.
    match unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) } {
        0.. => u64::try_from(bytes).map_err(|_| Errno::EINVAL),
        _ => Err(last_errno()),
    }
}

/// `struct fsxattr` of the kernel.
#[repr(C)]
#[derive(Default)]
struct ExtendedAttributes {
    flags: u32,
    extent_size_bytes: u32,
    extents: u32,
    project: u32,
    cow_extent_size_bytes: u32,
    padding: [u8; 8],
}

/// `_IOR('X', 31, struct fsxattr)`.
const FS_IOC_FSGETXATTR: libc::Ioctl = 0x801c_581f_u32 as libc::Ioctl;
/// `_IOW('X', 32, struct fsxattr)`.
const FS_IOC_FSSETXATTR: libc::Ioctl = 0x401c_5820;
const FS_XFLAG_EXTSIZE: u32 = 0x800;

/// Asks the file system to allocate a file in pieces of this size.
pub(crate) fn set_extent_size(file: impl AsFd, bytes: u32) -> SysResult<()> {
    let fd = file.as_fd().as_raw_fd();
    let mut attributes = ExtendedAttributes::default();
    // SAFETY: the request writes one `struct fsxattr`.
    if unsafe { libc::ioctl(fd, FS_IOC_FSGETXATTR, &raw mut attributes) } < 0 {
        return Err(last_errno());
    }
    attributes.flags |= FS_XFLAG_EXTSIZE;
    attributes.extent_size_bytes = bytes;
    // SAFETY: the request reads one `struct fsxattr`.
    match unsafe { libc::ioctl(fd, FS_IOC_FSSETXATTR, &raw const attributes) } {
        0.. => Ok(()),
        _ => Err(last_errno()),
    }
}

/// A byte-range lock on an open file description, not on the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ByteLock {
    Read,
    Unlocked,
}

fn flock(kind: i32, start: u64, len: u64) -> SysResult<libc::flock> {
    // SAFETY: plain numbers, for which zero is a value; `l_pid` must be zero for these commands.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = signed_offset(start)?;
    lock.l_len = signed_offset(len)?;
    Ok(lock)
}

/// Takes or releases the lock on `len` bytes at `start`, without waiting.
pub(crate) fn set_lock(file: impl AsFd, lock: ByteLock, start: u64, len: u64) -> SysResult<()> {
    let kind = match lock {
        ByteLock::Read => libc::F_RDLCK,
        ByteLock::Unlocked => libc::F_UNLCK,
    };
    let lock = flock(kind, start, len)?;
    retry(|| {
        // SAFETY: the command reads one `struct flock`.
        match unsafe { libc::fcntl(file.as_fd().as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) } {
            0.. => Ok(()),
            _ => Err(last_errno()),
        }
    })
}

/// True when another lock keeps us from taking a write lock on `len` bytes at `start`.
pub(crate) fn is_locked_by_others(file: impl AsFd, start: u64, len: u64) -> SysResult<bool> {
    let mut lock = flock(libc::F_WRLCK, start, len)?;
    retry(|| {
        // SAFETY: the command reads and writes one `struct flock`.
        match unsafe { libc::fcntl(file.as_fd().as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) } {
            0.. => Ok(()),
            _ => Err(last_errno()),
        }
    })?;
    Ok(i32::from(lock.l_type) != libc::F_UNLCK)
}
