// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Opening a file of the host: its descriptor, its I/O engine, and the alignment that direct I/O needs.

use crate::payload::Payload;
use crate::ring::{Direction, Ring};
use crate::rt;
use crate::sys;
use crate::{Alignment, IoBuf, IoEngine, OpenOptions};
use cowshed_types::{Errno, Error, ErrorKind, Result};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, StatxFlags};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::LazyLock;

pub(super) fn os_error(error: rustix::io::Errno, doing: &str) -> Error {
    Error::os(sys::errno(error), doing)
}

pub(super) fn no_direct_io(error: rustix::io::Errno) -> Error {
    Error::unsupported("the file system does not support O_DIRECT").with_errno(sys::errno(error))
}

pub(super) fn open_descriptor(path: &Path, options: &OpenOptions) -> Result<OwnedFd> {
    crate::fuse_device::refuse_own(path)?;
    let mut flags = OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    flags |= if options.write || options.create { OFlags::RDWR } else { OFlags::RDONLY };
    if options.create {
        flags |= OFlags::CREATE;
    }
    if options.cache.direct {
        flags |= OFlags::DIRECT;
    }
    let opened = loop {
        let mode = Mode::from_raw_mode(0o644);
        let opened = match &options.beneath {
            None => rustix::fs::open(path, flags, mode),
            Some(folder) => open_beneath(folder, path, flags, mode),
        };
        match opened {
            Err(rustix::io::Errno::INTR) => {}
            opened => break opened,
        }
    };
    opened.map_err(|error| {
        // Folders can't be opened for writing, sockets not at all: the error names their kind, in place of the system's
        // words.
        if let Ok(stat) = rustix::fs::stat(path) {
            let kind = FileType::from_raw_mode(stat.st_mode);
            if !matches!(kind, FileType::RegularFile | FileType::BlockDevice) {
                let doing = if options.create { "could not create" } else { "could not open" };
                // The system's error for sockets is that there is no such device.
                return match kind {
                    FileType::Directory | FileType::Socket => {
                        wrong_kind(kind).with_errno(sys::errno(error)).qemu(doing)
                    }
                    _ => wrong_kind(kind),
                };
            }
        }
        if options.beneath.is_some() && error == rustix::io::Errno::XDEV {
            let message = "leads out of its folder by a symbolic link, which the policy doesn't allow";
            return Error::new(ErrorKind::PermissionDenied, message);
        }
        if error == rustix::io::Errno::INVAL && options.cache.direct {
            return no_direct_io(error);
        }
        os_error(error, if options.create { "could not create" } else { "could not open" })
    })
}

/// Opens a path that must not leave `folder`; the kernel watches over it, so nothing can change between look and leap.
fn open_beneath(folder: &Path, path: &Path, flags: OFlags, mode: Mode) -> rustix::io::Result<OwnedFd> {
    let inside = path.strip_prefix(folder).or_else(|_| path.strip_prefix("."));
    let inside = inside.unwrap_or(path);
    let folder = rustix::fs::open(folder, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    let mode = if flags.contains(OFlags::CREATE) { mode } else { Mode::empty() };
    rustix::fs::openat2(folder, inside, flags, mode, resolve)
}

pub(super) fn wrong_kind(kind: FileType) -> Error {
    let (name, errno) = match kind {
        FileType::Directory => ("a folder", Errno::EISDIR),
        FileType::Fifo => ("a pipe", Errno::EINVAL),
        FileType::Socket => ("a socket", Errno::EINVAL),
        FileType::CharacterDevice => ("a character device", Errno::EINVAL),
        _ => ("neither a file nor a device", Errno::EINVAL),
    };
    Error::new(ErrorKind::InvalidArgument, format!("is {name}, not a regular file or block device")).with_errno(errno)
}

/// `COWSHED_IO_ENGINE` overrides the choice of every file: for tests, and for kernels where one of them misbehaves.
pub(super) fn forced_engine() -> Option<IoEngine> {
    static FORCED: LazyLock<Option<IoEngine>> =
        LazyLock::new(|| match std::env::var("COWSHED_IO_ENGINE").ok()?.as_str() {
            "io_uring" => Some(IoEngine::IoUring),
            "threads" => Some(IoEngine::Threads),
            "auto" => Some(IoEngine::Auto),
            other => {
                tracing::warn!(value = other, "COWSHED_IO_ENGINE is none of auto, io_uring, threads");
                None
            }
        });
    *FORCED
}

pub(super) fn check_ring() -> Result<()> {
    if rt::current_ring().is_some() {
        return Ok(());
    }
    match Ring::new() {
        Ok(_) => Ok(()),
        Err(error) => Err(Error::io(&error, "io_uring is not available")),
    }
}

/// The alignment that O_DIRECT needs for this file.
pub(super) fn direct_alignment(fd: &OwnedFd, is_device: bool) -> Result<Alignment> {
    if is_device {
        let size = sys::device_block_size(fd).map_err(|errno| Error::os(errno, "could not read the block size"))?;
        let size = size.clamp(512, 4096);
        return Ok(Alignment { memory: size as usize, offset: size });
    }
    let statx = rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
    if let Ok(statx) = statx
        && statx.stx_mask & StatxFlags::DIOALIGN.bits() != 0
        && statx.stx_dio_mem_align > 0
        && statx.stx_dio_offset_align > 0
    {
        let alignment =
            Alignment { memory: statx.stx_dio_mem_align as usize, offset: statx.stx_dio_offset_align.into() };
        if alignment.memory.is_power_of_two()
            && alignment.offset.is_power_of_two()
            && alignment.memory <= crate::buf::IO_ALIGN
        {
            return Ok(alignment);
        }
    }
    Ok(probe_alignment(fd))
}

/// Tries reads of growing size. An empty or very short file may take anything, so 4096 is the least that is assumed for
/// it.
fn probe_alignment(fd: &OwnedFd) -> Alignment {
    const SAFE: u64 = 4096;
    let long_enough = rustix::fs::fstat(fd).is_ok_and(|stat| stat.st_size >= 2 * SAFE as i64);
    let offset = [512, 1024, 2048]
        .into_iter()
        .find(|&size| {
            long_enough
                && sys::transfer(fd, Direction::Read, &Payload::one(IoBuf::zeroed(size)), 0, size, size as u64).is_ok()
        })
        .map_or(SAFE, |size| size as u64);
    Alignment { memory: crate::buf::IO_ALIGN, offset }
}
