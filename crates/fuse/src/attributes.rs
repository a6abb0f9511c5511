// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Owner, mode, times and lengths of the file.

use cowshed_fuse_proto::{Attributes, Changes, Time};
use cowshed_image::Node;
use cowshed_image::node::ChildRole;
use cowshed_storage::signal::lock;
use cowshed_types::Errno;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

/// The type of a regular file in a mode.
const REGULAR: u32 = 0o100_000;
const PERMISSIONS: u32 = 0o7777;
/// Bits by which a mode lets others than the owner do something.
const OF_OTHERS: u32 = 0o077;
const WRITE_BITS: u32 = 0o222;
/// Bits of a user or a group of another one.
const SET_IDS: u32 = 0o7000;
/// The block size that programs should use, in bytes.
const BLOCK_BYTES: u64 = 4096;

type Moment = (i64, u32);

fn now() -> Moment {
    match SystemTime::now().duration_since(SystemTime::UNIX_EPOCH) {
        Ok(since) => (i64::try_from(since.as_secs()).unwrap_or(i64::MAX), since.subsec_nanos()),
        Err(_) => (0, 0),
    }
}

fn moment(time: Time) -> Moment {
    match time {
        Time::Now => now(),
        Time::At(seconds, nanoseconds) => (seconds, nanoseconds),
    }
}

#[derive(Debug)]
struct FileStatus {
    mode: u32,
    uid: u32,
    gid: u32,
    atime: Moment,
    mtime: Moment,
    ctime: Moment,
}

/// The attributes of the file besides its bytes. It lives as long as the export.
#[derive(Debug)]
pub(crate) struct FileAttributes {
    state: Mutex<FileStatus>,
    writable: bool,
    allows_other: bool,
    /// A write since the last look: the time of the look is near enough.
    was_written: AtomicBool,
}

impl FileAttributes {
    pub fn new(writable: bool, allows_other: bool) -> FileAttributes {
        let now = now();
        let state = FileStatus {
            mode: if writable { 0o600 } else { 0o400 },
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            atime: now,
            mtime: now,
            ctime: now,
        };
        FileAttributes { state: Mutex::new(state), writable, allows_other, was_written: AtomicBool::new(false) }
    }

    pub fn note_write(&self) {
        if !self.was_written.load(Ordering::Relaxed) {
            self.was_written.store(true, Ordering::Relaxed);
        }
    }

    /// The attributes as the kernel gets them; `size` in bytes.
    pub fn look(&self, node: &Node, size: u64) -> Attributes {
        let mut state = lock(&self.state);
        if self.was_written.swap(false, Ordering::Relaxed) {
            state.mtime = now();
            state.ctime = state.mtime;
        }
        let allocated = allocated_bytes(node).unwrap_or(size);
        let block_bytes = node.request_bytes().unwrap_or(1).clamp(BLOCK_BYTES, 1 << 20);
        Attributes {
            size,
            blocks: allocated.div_ceil(512),
            atime: state.atime,
            mtime: state.mtime,
            ctime: state.ctime,
            mode: REGULAR | state.mode,
            uid: state.uid,
            gid: state.gid,
            block_bytes: u32::try_from(block_bytes).unwrap_or(u32::MAX),
        }
    }

    /// Changes all but the size, as far as the file system keeps to it.
    ///
    /// # Errors
    /// `EROFS` for the right to write a disk that is read-only. `EPERM` for rights of others, and other
    /// owners, where the kernel lets no other user in.
    pub fn change(&self, changes: &Changes) -> Result<(), Errno> {
        let errno = |errno: rustix::io::Errno| Errno(errno.raw_os_error());
        let mut state = lock(&self.state);
        let mode = changes.mode.map(|mode| mode & PERMISSIONS);
        if mode.is_some_and(|mode| !self.writable && mode & WRITE_BITS != 0) {
            return Err(errno(rustix::io::Errno::ROFS));
        }
        let is_other = |given: Option<u32>, known: u32| given.is_some_and(|given| given != known);
        let needs_others = mode.is_some_and(|mode| mode & OF_OTHERS != 0)
            || is_other(changes.uid, state.uid)
            || is_other(changes.gid, state.gid);
        if (needs_others && !self.allows_other) || mode.is_some_and(|mode| mode & SET_IDS != 0) {
            return Err(errno(rustix::io::Errno::PERM));
        }
        state.mode = mode.unwrap_or(state.mode);
        state.uid = changes.uid.unwrap_or(state.uid);
        state.gid = changes.gid.unwrap_or(state.gid);
        state.atime = changes.atime.map_or(state.atime, moment);
        if changes.size.is_some() {
            state.mtime = now();
        }
        if let Some(time) = changes.mtime {
            self.was_written.store(false, Ordering::Relaxed);
            state.mtime = moment(time);
        }
        state.ctime = now();
        Ok(())
    }
}

/// The space that the image's own files take in their file systems, in bytes; nothing if one of them can't tell.
pub(crate) fn allocated_bytes(node: &Node) -> Option<u64> {
    if let Some(file) = node.file() {
        return file.allocated_bytes().ok();
    }
    let own = node.children().into_iter().filter(|child| child.role != ChildRole::Backing);
    own.map(|child| allocated_bytes(&child.node)).try_fold(0u64, |sum, bytes| sum.checked_add(bytes?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(mode: u32) -> Changes {
        Changes { mode: Some(REGULAR | mode), ..Changes::default() }
    }

    #[test]
    fn modes_go_as_far_as_the_mount_lets() {
        const EPERM: Result<(), Errno> = Err(Errno(1));
        const EROFS: Result<(), Errno> = Err(Errno(30));
        let own = FileAttributes::new(true, false);
        assert_eq!(
            [own.change(&mode(0o400)), own.change(&mode(0o644)), own.change(&mode(0o4600))],
            [Ok(()), EPERM, EPERM]
        );
        let shared = FileAttributes::new(false, true);
        assert_eq!([shared.change(&mode(0o444)), shared.change(&mode(0o600))], [Ok(()), EROFS]);
        let mine = Changes { uid: Some(rustix::process::geteuid().as_raw()), ..Changes::default() };
        let other = Changes { uid: Some(rustix::process::geteuid().as_raw() + 1), ..Changes::default() };
        assert_eq!([own.change(&mine), own.change(&other), shared.change(&other)], [Ok(()), EPERM, Ok(())]);
    }
}
