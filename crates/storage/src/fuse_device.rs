// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The kernel's FUSE device, and the file systems that this process serves through it.

use crate::socket::readable_alone;
use crate::sys::{self, SysResult};
use cowshed_types::{Errno, Error, ErrorKind, Result};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, StatxFlags};
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// The path of the device.
pub const FUSE_DEVICE: &str = "/dev/fuse";

/// `_IOR(229, 0, uint32_t)`: makes a new descriptor one more of a session.
const CLONE: libc::Ioctl = 0x8004_e500u32 as libc::Ioctl;

/// A descriptor of a FUSE session: requests of the kernel come out of it, and replies go in. Clones are the same descriptor.
#[derive(Clone, Debug)]
pub struct FuseDevice(Arc<OwnedFd>);

impl FuseDevice {
    /// A new session, which a mount may take.
    pub fn open() -> std::result::Result<FuseDevice, Errno> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
        sys::retry(|| rustix::fs::open(FUSE_DEVICE, flags, Mode::empty()).map_err(sys::errno))
            .map(|fd| FuseDevice(Arc::new(fd)))
    }

    /// A session that another process has opened and mounted.
    pub fn from_descriptor(fd: OwnedFd) -> Result<FuseDevice> {
        let failed = |error| Error::os(sys::errno(error), "could not use a FUSE session");
        let status = rustix::fs::fstat(&fd).map_err(failed)?;
        if FileType::from_raw_mode(status.st_mode) != FileType::CharacterDevice {
            return Err(Error::invalid_argument("a descriptor that was passed is no FUSE session"));
        }
        let flags = rustix::fs::fcntl_getfl(&fd).map_err(failed)?;
        rustix::fs::fcntl_setfl(&fd, flags | OFlags::NONBLOCK).map_err(failed)?;
        rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC).map_err(failed)?;
        Ok(FuseDevice(Arc::new(fd)))
    }

    /// One more descriptor of the session, with a list of its own for requests that wait for their replies. Where the device can't
    /// be opened again, it is the same descriptor.
    pub fn of_same_session(&self) -> FuseDevice {
        let Ok(other) = FuseDevice::open() else { return self.clone() };
        let session = self.0.as_raw_fd().cast_unsigned();
        // SAFETY: the request reads one u32, the number of an open descriptor.
        match unsafe { libc::ioctl(other.0.as_raw_fd(), CLONE, &raw const session) } {
            0 => other,
            _ => self.clone(),
        }
    }

    /// Takes a request, where one is there; its length. The buffers must hold the longest request.
    ///
    /// # Errors
    /// `EAGAIN`: there is none. `ENODEV`: the file system is not mounted any more.
    pub fn receive_now(&self, bufs: &mut [IoSliceMut<'_>]) -> std::result::Result<usize, Errno> {
        loop {
            match rustix::io::readv(&self.0, bufs).map_err(sys::errno) {
                // A request that was given up while it was copied.
                Err(Errno(libc::EINTR | libc::ENOENT)) => {}
                Err(Errno(libc::ECONNABORTED)) => return Err(Errno(libc::ENODEV)),
                received => return received,
            }
        }
    }

    /// Waits until there may be a request. Of several threads that wait with descriptors of one session, one is woken.
    pub async fn wait(&self) -> std::result::Result<(), Errno> {
        readable_alone(&self.0).await
    }

    /// Sends a reply, or a notification.
    pub fn send(&self, bufs: &[IoSlice<'_>]) -> std::result::Result<(), Errno> {
        match rustix::io::writev(&self.0, bufs).map_err(sys::errno) {
            // The caller has given the request up.
            Ok(_) | Err(Errno(libc::ENOENT | libc::ENODEV | libc::ECONNABORTED)) => Ok(()),
            Err(errno) => Err(errno),
        }
    }
}

impl AsFd for FuseDevice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The device number of the file system at `path`. It asks no FUSE server, so it never waits for this process itself.
pub fn mounted_device(path: &Path) -> std::result::Result<u64, Errno> {
    rustix::fs::statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE)
        .map(|status| rustix::fs::makedev(status.stx_dev_major, status.stx_dev_minor))
        .map_err(sys::errno)
}

static SERVED: Mutex<Vec<u64>> = Mutex::new(Vec::new());

fn served() -> std::sync::MutexGuard<'static, Vec<u64>> {
    SERVED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The mark that this process serves the file system with that device number, as long as it lives. Its files are
/// refused as images.
#[derive(Debug)]
pub struct ServedMount(u64);

impl ServedMount {
    /// Puts the file system with that device number on the list.
    pub fn new(device: u64) -> ServedMount {
        served().push(device);
        ServedMount(device)
    }
}

impl Drop for ServedMount {
    fn drop(&mut self) {
        let mut list = served();
        if let Some(at) = list.iter().position(|device| *device == self.0) {
            list.swap_remove(at);
        }
    }
}

/// True where this process itself serves the file system at `path`.
pub fn is_served_here(path: &Path) -> bool {
    let list = served();
    !list.is_empty() && mounted_device(path).is_ok_and(|device| list.contains(&device))
}

/// Refuses a file of a file system that this process itself serves: a request of it would wait for itself.
pub(crate) fn refuse_own(path: &Path) -> Result<()> {
    match is_served_here(path) {
        true => {
            let message = "is a FUSE export of this process, which would wait for itself";
            let words = format!("Could not open '{}': it {message}", path.display());
            Err(Error::new(ErrorKind::InvalidArgument, message).with_errno(Errno(libc::EDEADLK)).qemu(words))
        }
        false => Ok(()),
    }
}

/// From now on this thread gets no signal: for a process that is to outlive another one.
pub fn block_signals() {
    // Refused by no Linux.
    let _: SysResult<()> = sys::block_signals();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_session_says_so() {
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        let refused = FuseDevice::from_descriptor(file.into()).unwrap_err();
        assert!(refused.to_string().contains("no FUSE session"), "{refused}");
    }

    #[test]
    fn served_file_system_is_listed_until_its_end() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let device = mounted_device(file.path()).unwrap();
        assert!(!is_served_here(file.path()));
        let first = ServedMount::new(device);
        let second = ServedMount::new(device);
        drop(first);
        assert!(is_served_here(file.path()));
        let refused = refuse_own(file.path()).unwrap_err();
        assert_eq!(refused.errno(), Errno(libc::EDEADLK));
        drop(second);
        assert!(refuse_own(file.path()).is_ok());
        assert_eq!(mounted_device(Path::new("/nowhere/at/all")), Err(Errno(libc::ENOENT)));
    }
}
