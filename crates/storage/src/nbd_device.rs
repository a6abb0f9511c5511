// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Devices of the kernel's NBD driver (`/dev/nbd*`) and the calls that the driver takes, as `linux/nbd.h` names them.

use crate::sys::{self, SysResult};
use cowshed_types::Errno;
use rustix::fs::{Mode, OFlags};
use std::os::fd::{AsRawFd, OwnedFd};

/// A call of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum NbdCall {
    /// Gives the device a connection, which has been negotiated. The value is a descriptor.
    SetSocket = 0xab00,
    /// Sets the length of a block in bytes.
    SetBlockSize = 0xab01,
    /// Serves the device until its connection ends; the calling thread waits for that.
    Serve = 0xab03,
    /// Takes the connection away.
    ClearSocket = 0xab04,
    /// Ends requests that no connection will answer.
    ClearQueue = 0xab05,
    /// Sets the length of the device in blocks.
    SetBlocks = 0xab07,
    /// Ends the session with the server, which ends the connection.
    Disconnect = 0xab08,
    /// Sets the transmission flags that the server sent.
    SetFlags = 0xab0a,
}

/// The calls that the driver takes for a device. Tests have devices of their own.
pub trait NbdControl: Send + Sync {
    /// Makes a call. Calls without a value ignore `value`.
    fn call(&self, call: NbdCall, value: u64) -> std::result::Result<(), Errno>;
    /// Writes the device's data in the page cache to the server.
    fn sync(&self) -> std::result::Result<(), Errno>;
    /// The length in bytes, 0 without a connection.
    fn size_bytes(&self) -> std::result::Result<u64, Errno>;
}

/// An open device.
#[derive(Debug)]
pub struct NbdDevice(OwnedFd);

/// `_IOR(0x12, 114, size_t)`: the length of a block device.
const BLKGETSIZE64: libc::Ioctl = 0x8008_1272u32 as libc::Ioctl;

impl NbdDevice {
    /// Opens the device at `path`. Whether it belongs to the driver, the first call shows.
    pub fn open(path: &str) -> std::result::Result<NbdDevice, Errno> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let fd = sys::retry(|| rustix::fs::open(crate::path_of_text(path), flags, Mode::empty()).map_err(sys::errno))?;
        Ok(NbdDevice(fd))
    }
}

fn result(code: libc::c_int) -> SysResult<()> {
    match code {
        -1 => Err(Errno(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))),
        _ => Ok(()),
    }
}

impl NbdControl for NbdDevice {
    fn call(&self, call: NbdCall, value: u64) -> SysResult<()> {
        if call == NbdCall::Serve {
            // A signal would end the connection in the middle of requests.
            sys::block_signals()?;
        }
        let value = libc::c_ulong::try_from(value).map_err(|_| Errno::EINVAL)?;
        // SAFETY: the driver's calls take their value as a number, never as an address. Another driver knows none of the
        // numbers, whose type 0xab is that of NBD.
        result(unsafe { libc::ioctl(self.0.as_raw_fd(), call as libc::Ioctl, value) })
    }

    fn sync(&self) -> SysResult<()> {
        rustix::fs::fsync(&self.0).map_err(sys::errno)
    }

    fn size_bytes(&self) -> SysResult<u64> {
        let mut size: u64 = 0;
        // SAFETY: the request writes one u64.
        result(unsafe { libc::ioctl(self.0.as_raw_fd(), BLKGETSIZE64, &raw mut size) })?;
        Ok(size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_nbd_device_says_so() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let device = NbdDevice::open(file.path().to_str().expect("text")).expect("it opens");
        assert_eq!(device.call(NbdCall::SetSocket, 0), Err(Errno(libc::ENOTTY)));
        assert_eq!(device.call(NbdCall::Disconnect, 0), Err(Errno(libc::ENOTTY)));
        assert_eq!(device.size_bytes(), Err(Errno(libc::ENOTTY)));
        assert_eq!(NbdDevice::open("/nowhere/nbd0").map(drop), Err(Errno(libc::ENOENT)));
    }
}
