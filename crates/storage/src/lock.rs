// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Image locks that QEMU understands.
//!
//! An open image holds shared locks (OFD read locks) on single bytes of the file. Byte `100 + n` means "I use
//! permission n". Byte `200 + n` means "I don't share permission n with others". A process that needs permission n
//! looks for holders of `200 + n`; one that doesn't share it looks for holders of `100 + n`. Each takes its own bytes
//! first and looks afterwards, so two that come at once see each other.

use crate::holder::{self, Holder};
use crate::sys::{self, ByteLock, SysResult};
use cowshed_types::{Errno, Error, ErrorKind, Result};
use std::ops::{BitAnd, BitOr, Not};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// First byte of the "used" range.
const USED_AT: u64 = 100;
/// First byte of the "not shared" range.
const UNSHARED_AT: u64 = 200;

/// A process that was killed leaves its locks to the kernel until its last I/O has ended: some ms, more on a busy disk.
/// A lock without a known process gets this time to go.
pub(crate) const REMNANT_LIMIT: Duration = Duration::from_secs(1);
/// Between two attempts to get a lock that may be such a remnant.
const REMNANT_PAUSE: Duration = Duration::from_millis(5);

/// A set of permissions on an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PermissionSet(u8);

impl PermissionSet {
    /// No permission.
    pub const NONE: Self = Self(0);
    /// Reading consistent data.
    pub const CONSISTENT_READ: Self = Self(1);
    /// Writing.
    pub const WRITE: Self = Self(2);
    /// Writing data that reads the same afterwards.
    pub const WRITE_UNCHANGED: Self = Self(4);
    /// Changing the size.
    pub const RESIZE: Self = Self(8);
    /// All of them.
    pub const ALL: Self = Self(15);

    const NAMED: [(Self, &'static str); 4] = [
        (Self::CONSISTENT_READ, "consistent read"),
        (Self::WRITE, "write"),
        (Self::WRITE_UNCHANGED, "write unchanged"),
        (Self::RESIZE, "resize"),
    ];

    /// True when all of `other` are in `self`.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// These but `other`.
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// True for the empty set.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The permissions one by one, with their number on the lock bytes and QEMU's name for them.
    fn each(self) -> impl Iterator<Item = (u64, &'static str)> {
        Self::NAMED
            .iter()
            .enumerate()
            .filter(move |(_, (permission, _))| self.contains(*permission))
            .map(|(number, (_, name))| (number as u64, *name))
    }
}

impl BitOr for PermissionSet {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl BitAnd for PermissionSet {
    type Output = Self;
    fn bitand(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

impl Not for PermissionSet {
    type Output = Self;
    fn not(self) -> Self {
        Self(!self.0 & Self::ALL.0)
    }
}

/// The operations of one user of an image, and those that it allows others meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permissions {
    /// Our operations.
    pub used: PermissionSet,
    /// The operations that others may do.
    pub shared: PermissionSet,
}

impl Permissions {
    /// Nothing used, everything shared: no lock at all.
    pub const NONE: Self = Self { used: PermissionSet::NONE, shared: PermissionSet::ALL };

    /// An image opened for reading, or a backing file: others may read, but not write or resize.
    pub const READ: Self = Self { used: PermissionSet::CONSISTENT_READ, shared: PermissionSet(1 | 4) };

    /// An image opened for writing: others may read its file, nothing else.
    pub const WRITE: Self = Self { used: PermissionSet(1 | 2 | 8), shared: PermissionSet(1 | 4) };

    /// Writing without changing the size, whatever others do: a raw image, as qemu-io writes it.
    pub const WRITE_IN_PLACE: Self = Self { used: PermissionSet(1 | 2), shared: PermissionSet::ALL };

    /// Making an image: written and resized, while others may do anything but resize.
    pub const CREATE: Self = Self { used: PermissionSet(2 | 8), shared: PermissionSet(1 | 2 | 4) };

    /// `-U`, `--force-share`: as `self`, with everything shared.
    #[must_use]
    pub const fn sharing_all(self) -> Self {
        Self { used: self.used, shared: PermissionSet::ALL }
    }

    fn unshared(self) -> PermissionSet {
        !self.shared
    }
}

impl Default for Permissions {
    fn default() -> Self {
        Self::NONE
    }
}

/// QEMU's `locking`: whether to lock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Locking {
    /// Lock where the file system can.
    #[default]
    Auto,
    /// Lock, or fail.
    On,
    /// Don't lock.
    Off,
}

/// The byte locks of an open file.
pub(crate) trait LockBytes {
    /// Takes the byte's lock for reading, or releases it.
    fn set(&self, lock: ByteLock, byte: u64) -> SysResult<()>;
    /// True when another open file description has the byte.
    fn is_held(&self, byte: u64) -> SysResult<bool>;
    /// The owner of that one. Asked when a lock is refused, while the own bytes are locked.
    fn holder(&self, byte: u64) -> Holder;
}

impl<F: AsFd> LockBytes for F {
    fn set(&self, lock: ByteLock, byte: u64) -> SysResult<()> {
        sys::set_lock(self, lock, byte, 1)
    }

    fn is_held(&self, byte: u64) -> SysResult<bool> {
        sys::is_locked_by_others(self, byte, 1)
    }

    fn holder(&self, byte: u64) -> Holder {
        holder::of(self.as_fd(), byte, REMNANT_LIMIT)
    }
}

/// The reason why locks are not to be had.
#[derive(Debug)]
enum Refusal {
    /// Another open file description has a byte.
    Conflict {
        error: Error,
        holder: Holder,
    },
    Failed(Error),
}

/// The locks that one open file holds.
#[derive(Debug)]
pub(crate) struct LockState {
    mode: Locking,
    /// The file system was asked whether it has locks, and has.
    is_able: bool,
    held: Permissions,
}

impl LockState {
    pub(crate) fn new(mode: Locking) -> Self {
        LockState { mode, is_able: false, held: Permissions::NONE }
    }

    pub(crate) fn held(&self) -> Permissions {
        self.held
    }

    /// Takes the locks that are held on another open file description of the same file: shared locks don't conflict.
    pub(crate) fn copy_to(&self, file: &impl LockBytes) -> Result<()> {
        if self.mode == Locking::Off {
            return Ok(());
        }
        let all = Bytes { used: self.held.used, unshared: self.held.unshared() };
        all.lock(file).map_err(|(byte, errno)| lock_error(byte, errno))
    }

    /// Asks once whether the file system has locks. Where it hasn't, `locking=auto` goes without; afterwards an error of a
    /// lock is an error.
    fn ask(&mut self, file: &impl LockBytes) -> Result<()> {
        match file.is_held(USED_AT) {
            Ok(_) => self.is_able = true,
            Err(errno) if !is_unsupported(errno) => return Err(lock_error(USED_AT, errno)),
            Err(errno) if self.mode == Locking::On => {
                return Err(Error::unsupported("the file system of the image has no locks").with_errno(errno));
            }
            Err(errno) => {
                self.mode = Locking::Off;
                warn_of_no_locks(errno);
            }
        }
        Ok(())
    }

    /// Goes from the held permissions to `wanted`. On an error everything is as before. The error doesn't name the
    /// file. A lock that a dead process may have left has a second to go; this blocks meanwhile.
    pub(crate) fn change(&mut self, file: &impl LockBytes, wanted: Permissions) -> Result<()> {
        let refused = match self.change_now(file, wanted, true) {
            Ok(()) => return Ok(()),
            Err(Refusal::Conflict { error, holder: Holder::Unknown }) => error,
            Err(Refusal::Conflict { error, .. } | Refusal::Failed(error)) => return Err(error),
        };
        let started = Instant::now();
        while started.elapsed() < REMNANT_LIMIT {
            std::thread::sleep(REMNANT_PAUSE);
            match self.change_now(file, wanted, false) {
                Ok(()) => return Ok(()),
                Err(Refusal::Conflict { .. }) => {}
                Err(Refusal::Failed(error)) => return Err(error),
            }
        }
        Err(refused)
    }

    /// As [`LockState::change`], without a wait. `asks`: for the holder of a lock that is in the way.
    fn change_now(
        &mut self,
        file: &impl LockBytes,
        wanted: Permissions,
        asks: bool,
    ) -> std::result::Result<(), Refusal> {
        // Locks held before are checked as well: another process may have come while a lock was gone.
        let all = Bytes { used: wanted.used, unshared: wanted.unshared() };
        if self.mode != Locking::Off && !self.is_able && !all.is_empty() {
            self.ask(file).map_err(Refusal::Failed)?;
        }
        if self.mode == Locking::Off {
            self.held = wanted;
            return Ok(());
        }
        let new = Bytes { used: wanted.used & !self.held.used, unshared: wanted.unshared() & !self.held.unshared() };
        if let Err((byte, errno)) = new.lock(file) {
            new.unlock(file);
            return Err(Refusal::Failed(lock_error(byte, errno)));
        }
        let old = Bytes { used: self.held.used & !wanted.used, unshared: self.held.unshared() & !wanted.unshared() };
        // Giving back conflicts with no lock. A process that is being refused holds its bytes for a moment, which must not count.
        let only_gives_back = new.is_empty() && !old.is_empty();
        if !only_gives_back && let Err(refusal) = all.check_others(file, asks) {
            new.unlock(file);
            return Err(refusal);
        }
        old.unlock(file);
        self.held = wanted;
        Ok(())
    }
}

/// Warns once in the life of the process that images are not protected from each other.
fn warn_of_no_locks(errno: Errno) {
    static SAID: AtomicBool = AtomicBool::new(false);
    if !SAID.swap(true, Ordering::Relaxed) {
        let why = std::io::Error::from_raw_os_error(errno.0);
        tracing::warn!("the file system has no locks ({why}): nothing keeps other programs from writing to the image");
    }
}

fn is_unsupported(errno: Errno) -> bool {
    [libc::EINVAL, libc::ENOSYS, libc::EOPNOTSUPP, libc::ENOLCK].contains(&errno.0)
}

fn lock_error(byte: u64, errno: Errno) -> Error {
    let message = format!("could not lock byte {byte}");
    match errno.0 {
        // Another program has locked it for writing, which QEMU never does.
        libc::EAGAIN | libc::EACCES => Error::new(ErrorKind::Busy, message).with_errno(errno),
        _ => Error::os(errno, message),
    }
}

/// Lock bytes to take, look at or give back.
struct Bytes {
    used: PermissionSet,
    unshared: PermissionSet,
}

impl Bytes {
    fn is_empty(&self) -> bool {
        self.used.is_empty() && self.unshared.is_empty()
    }

    fn offsets(&self) -> impl Iterator<Item = u64> {
        let used = self.used.each().map(|(number, _)| USED_AT + number);
        used.chain(self.unshared.each().map(|(number, _)| UNSHARED_AT + number))
    }

    fn lock(&self, file: &impl LockBytes) -> std::result::Result<(), (u64, Errno)> {
        self.offsets().try_for_each(|byte| file.set(ByteLock::Read, byte).map_err(|errno| (byte, errno)))
    }

    fn unlock(&self, file: &impl LockBytes) {
        for byte in self.offsets() {
            if let Err(errno) = file.set(ByteLock::Unlocked, byte) {
                tracing::warn!(byte, ?errno, "could not unlock");
            }
        }
    }

    /// Finds a lock of others that contradicts ours, and its holder if `asks`.
    fn check_others(&self, file: &impl LockBytes, asks: bool) -> std::result::Result<(), Refusal> {
        let used = self.used.each().map(|(number, name)| (UNSHARED_AT + number, name, true));
        let unshared = self.unshared.each().map(|(number, name)| (USED_AT + number, name, false));
        for (byte, name, is_used) in used.chain(unshared) {
            let is_held = file.is_held(byte).map_err(|errno| Refusal::Failed(lock_error(byte, errno)))?;
            if !is_held {
                continue;
            }
            let holder = if asks { file.holder(byte) } else { Holder::Unknown };
            let message = match (is_used, holder == Holder::Here) {
                (true, true) => {
                    format!("failed to get \"{name}\" lock: this process uses the image already and does not share it")
                }
                (true, false) => {
                    format!("failed to get \"{name}\" lock: another process uses the image and does not share it")
                }
                (false, true) => {
                    format!("failed to get shared \"{name}\" lock: this process has the image open for that already")
                }
                (false, false) => {
                    format!("failed to get shared \"{name}\" lock: another process has the image open for that")
                }
            };
            return Err(Refusal::Conflict { error: Error::new(ErrorKind::Busy, message), holder });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::{Cell, RefCell};

    /// A file whose locks fail: all of them where the file system has none, else those on one byte.
    struct Failing {
        errno: Errno,
        all: bool,
        bad_byte: Cell<Option<u64>>,
        locked: RefCell<Vec<u64>>,
    }

    impl Failing {
        fn new(errno: i32, all: bool) -> Failing {
            Failing { errno: Errno(errno), all, bad_byte: Cell::new(None), locked: RefCell::default() }
        }
    }

    impl LockBytes for Failing {
        fn set(&self, lock: ByteLock, byte: u64) -> SysResult<()> {
            if self.all || (lock == ByteLock::Read && self.bad_byte.get() == Some(byte)) {
                return Err(self.errno);
            }
            let mut locked = self.locked.borrow_mut();
            locked.retain(|known| *known != byte);
            if lock == ByteLock::Read {
                locked.push(byte);
            }
            Ok(())
        }

        fn is_held(&self, byte: u64) -> SysResult<bool> {
            if self.all || self.bad_byte.get() == Some(byte) { Err(self.errno) } else { Ok(false) }
        }

        fn holder(&self, _: u64) -> Holder {
            Holder::Another
        }
    }

    const NO_LOCKS: [i32; 4] = [libc::ENOLCK, libc::EINVAL, libc::EOPNOTSUPP, libc::ENOSYS];

    #[test]
    fn a_lock_that_fails_where_others_work_is_an_error() {
        for errno in NO_LOCKS.into_iter().chain([libc::EIO]) {
            for mode in [Locking::Auto, Locking::On] {
                for bad_byte in [100, 101, 203, 201] {
                    let file = Failing::new(errno, false);
                    let mut state = LockState::new(mode);
                    if bad_byte != 100 {
                        state.change(&file, Permissions::READ.sharing_all()).expect("locks work");
                    }
                    let before = file.locked.borrow().clone();
                    file.bad_byte.set((bad_byte != 100).then_some(bad_byte));
                    if bad_byte == 100 {
                        // The question is answered, the lock itself fails.
                        state.is_able = true;
                        file.bad_byte.set(Some(100));
                    }
                    let error = state.change(&file, Permissions::WRITE).expect_err("no lock, no image");
                    assert_eq!(error.errno(), Errno(errno), "{mode:?}, byte {bad_byte}: {error}");
                    assert!(error.to_string().contains(&format!("could not lock byte {bad_byte}")), "{error}");
                    assert_eq!(*file.locked.borrow(), before, "{mode:?}, byte {bad_byte}");
                    file.bad_byte.set(None);
                    state.change(&file, Permissions::WRITE).expect("locking is still on");
                    assert_eq!(file.locked.borrow().len(), 5, "{mode:?}, byte {bad_byte}");
                }
            }
        }
    }

    /// A file that another process begins to lock, and is refused.
    struct Contested {
        file: Failing,
        by_another: Cell<bool>,
    }

    impl LockBytes for Contested {
        fn set(&self, lock: ByteLock, byte: u64) -> SysResult<()> {
            self.file.set(lock, byte)
        }

        fn is_held(&self, _: u64) -> SysResult<bool> {
            Ok(self.by_another.get())
        }

        fn holder(&self, _: u64) -> Holder {
            Holder::Another
        }
    }

    #[test]
    fn giving_locks_back_needs_no_leave() {
        let file = Contested { file: Failing::new(libc::EIO, false), by_another: Cell::new(false) };
        let mut state = LockState::new(Locking::Auto);
        state.change(&file, Permissions::WRITE).expect("no other lock is there");
        file.by_another.set(true);
        state.change(&file, Permissions::READ).expect("less than before");
        assert_eq!(file.file.locked.borrow().len(), 3);
        state.change(&file, Permissions::NONE).expect("nothing at all");
        assert!(file.file.locked.borrow().is_empty());
        state.change(&file, Permissions::READ).expect_err("another one is there");
        assert_eq!((file.file.locked.borrow().len(), state.held()), (0, Permissions::NONE));
    }

    #[test]
    fn a_file_system_without_locks_is_asked_once() {
        for errno in NO_LOCKS {
            let file = Failing::new(errno, true);
            let mut state = LockState::new(Locking::Auto);
            state.change(&file, Permissions::NONE).expect("nothing to lock");
            assert_eq!(state.mode, Locking::Auto);
            state.change(&file, Permissions::WRITE).expect("auto goes without");
            assert_eq!((state.mode, state.held()), (Locking::Off, Permissions::WRITE));
            let error = LockState::new(Locking::On).change(&file, Permissions::WRITE).expect_err("'on' insists");
            assert_eq!((error.kind(), error.errno()), (ErrorKind::Unsupported, Errno(errno)));
        }
        let file = Failing::new(libc::EIO, true);
        let error = LockState::new(Locking::Auto).change(&file, Permissions::READ).expect_err("that says nothing");
        assert_eq!(error.errno(), Errno(libc::EIO));
    }
}
