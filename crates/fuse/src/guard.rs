// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A process that unmounts a file system when the process that serves it has gone.
//!
//! It also syncs and unmounts where the server ends in order. A server that touched its own file system would wait for
//! itself. A kill in such a wait would leave a process that can't end.

use crate::mount::{os_text, unmount, unmount_unused};
use cowshed_storage::{answer_within, mounted_device, spawn_apart};
use cowshed_types::{Errno, Error, Result};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno as Number;
use std::ffi::OsString;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The order to sync and unmount. Its answer is an error number, little-endian in four bytes, or zero.
const UNMOUNT: u8 = b'u';
/// The order to end: there is nothing to unmount any more.
const END: u8 = b'e';

/// The longest look at one process, and the longest search for one.
const MAX_LOOK: Duration = Duration::from_secs(1);
const MAX_SEARCH: Duration = Duration::from_secs(5);

/// A program that runs [`run_guard`]: it gets the number of the file system and the path behind `arguments`.
#[derive(Clone, Debug)]
pub struct GuardProgram {
    /// The program.
    pub program: PathBuf,
    /// Its name, as the first argument.
    pub name: OsString,
    /// Arguments before the two of the guard.
    pub arguments: Vec<OsString>,
}

/// A guard that runs.
#[derive(Debug)]
pub(crate) struct MountGuard {
    orders: UnixStream,
    child: Child,
}

impl MountGuard {
    pub fn start(program: &GuardProgram, path: &Path, device: u64) -> Result<MountGuard> {
        let pair = UnixStream::pair();
        let (orders, theirs) = pair.map_err(|error| Error::io(&error, "could not make a pair of sockets"))?;
        let mut command = Command::new(&program.program);
        command
            .arg0(&program.name)
            .args(&program.arguments)
            .arg(device.to_string())
            .arg(os_text(path))
            .current_dir("/")
            // Away from the terminal's signals.
            .process_group(0)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let child = spawn_apart(&mut command);
        let child = child.map_err(|error| Error::io(&error, "could not start the guard of a mount"))?;
        Ok(MountGuard { orders, child })
    }

    /// Syncs and unmounts, and waits for the end of both.
    pub fn unmount(mut self) -> std::result::Result<(), Errno> {
        let mut answer = [0; 4];
        let asked = self.orders.write_all(&[UNMOUNT]).and_then(|()| self.orders.read_exact(&mut answer));
        // It has ended by itself by now.
        let _ = self.child.wait();
        match (asked, i32::from_le_bytes(answer)) {
            (Err(error), _) => Err(Errno(error.raw_os_error().unwrap_or(rustix::io::Errno::PIPE.raw_os_error()))),
            (Ok(()), 0) => Ok(()),
            (Ok(()), errno) => Err(Errno(errno)),
        }
    }

    /// Ends it: the file system is not mounted any more.
    pub fn end(mut self) {
        // A guard that has gone needs no order.
        let _ = self.orders.write_all(&[END]);
        let _ = self.child.wait();
    }
}

/// Guards the file system with that device number at `path`. It ends when the process at the other end of the standard
/// input sends an order or ends.
///
/// # Errors
/// Errors of unmounting.
pub fn run_guard(device: u64, path: &Path) -> std::result::Result<(), Errno> {
    cowshed_storage::block_signals();
    let mut orders = std::io::stdin().lock();
    let mut order = [0];
    let is_order = loop {
        match orders.read(&mut order) {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Ok(1) => break true,
            _ => break false,
        }
    };
    if is_order && order[0] == END {
        return Ok(());
    }
    // Another file system may be there by now.
    let result = match mounted_device(path) {
        Ok(found) if found == device => {
            if is_order {
                sync(path);
            }
            unmount(path)
        }
        _ => Ok(()),
    };
    if is_order {
        let number = result.err().map_or(0, |errno| errno.0);
        // The server may be gone by now.
        let _ = rustix::io::write(rustix::stdio::stdin(), &number.to_le_bytes());
    }
    result
}

/// Syncs a file that another process serves, and unmounts it. `lazily`: also while programs have it open, which go on
/// then. That takes no sync: the server flushes when the last program has closed the file. A disk that doesn't answer
/// would hold this process up so that nothing could end it.
///
/// # Errors
/// Errors of the sync and of unmounting. A file whose server has gone can't be synced, and is unmounted all the same.
pub fn unmount_in_order(path: &Path, lazily: bool) -> Result<()> {
    let failed = |errno| Error::os(errno, "could not unmount it");
    if lazily {
        return unmount(path).map_err(failed);
    }
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let synced = rustix::fs::open(path, flags, Mode::empty()).and_then(|file| rustix::fs::fsync(&file));
    match synced {
        Ok(()) | Err(Number::NOTCONN | Number::ACCESS | Number::CONNABORTED) => {}
        Err(error) => return Err(Error::os(Errno(error.raw_os_error()), "could not sync it")),
    }
    unmount_unused(path).map_err(failed)
}

/// The process that serves a mounted file.
#[derive(Debug)]
pub struct MountServer {
    process: OwnedFd,
    number: i32,
}

impl MountServer {
    /// The process that serves the file at `path` (absolute, without links), if it is a `mount`: the one whose guard it is.
    /// `None` also where this user may not see it.
    pub fn of_mount(path: &Path) -> Option<MountServer> {
        let device = mounted_device(path).ok()?.to_string();
        let is_guard = |arguments: &[Vec<u8>]| {
            arguments.len() > 3
                && arguments[arguments.len() - 3..]
                    == [b"--guard".to_vec(), device.as_bytes().to_vec(), os_text(path).as_encoded_bytes().to_vec()]
        };
        let list = Path::new("/proc");
        let guard = find_process(list, is_guard)?;
        let number = parent_of(guard)?;
        let pid = rustix::process::Pid::from_raw(number)?;
        let process = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).ok()?;
        // The number is still its own, as its guard lives.
        let is_mount = arguments_of(list, number)?.get(1).is_some_and(|verb| verb == b"mount");
        (parent_of(guard) == Some(number) && is_mount).then_some(MountServer { process, number })
    }

    /// Its number.
    pub fn number(&self) -> i32 {
        self.number
    }

    /// Waits until it has ended, for at most `limit`. True when it has.
    pub fn has_ended_within(&self, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let left = rustix::event::Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            let mut polled = [rustix::event::PollFd::new(&self.process, rustix::event::PollFlags::IN)];
            match rustix::event::poll(&mut polled, Some(&left)) {
                Err(Number::INTR) => {}
                Ok(1) => return true,
                _ => return false,
            }
        }
    }
}

/// The first process of the list with such arguments.
fn find_process(list: &Path, is_wanted: impl Fn(&[Vec<u8>]) -> bool) -> Option<i32> {
    let until = Instant::now() + MAX_SEARCH;
    let processes = std::fs::read_dir(list).ok()?.flatten();
    let mut numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    numbers.find(|number| {
        Instant::now() < until && arguments_of(list, *number).is_some_and(|arguments| is_wanted(&arguments))
    })
}

/// None also of a process that stands still in a page of a mapping: the kernel reads its arguments when that has come.
fn arguments_of(list: &Path, number: i32) -> Option<Vec<Vec<u8>>> {
    let path = list.join(number.to_string()).join("cmdline");
    let line = answer_within(MAX_LOOK, "arguments", move || std::fs::read(path)).ok()?.ok()?;
    let line = line.strip_suffix(b"\0").unwrap_or(&line);
    Some(line.split(|byte| *byte == 0).map(<[u8]>::to_vec).collect())
}

fn parent_of(number: i32) -> Option<i32> {
    let status = std::fs::read_to_string(format!("/proc/{number}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()
}

/// Writes the changes that processes have made in mappings of the file. The unmounting reports no error. Programs that
/// need one call `fsync`.
fn sync(path: &Path) {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    if let Ok(file) = rustix::fs::open(path, flags, Mode::empty()) {
        let _ = rustix::fs::fsync(&file);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, FileType, mknodat};

    #[test]
    fn a_process_that_stands_still_holds_no_search() {
        let folder = tempfile::tempdir().unwrap();
        for number in 1..=3 {
            let process = folder.path().join(number.to_string());
            std::fs::create_dir(&process).unwrap();
            let arguments = process.join("cmdline");
            match number {
                // Its readers wait for a writer.
                1 | 2 => mknodat(CWD, &arguments, FileType::Fifo, Mode::RWXU, 0).unwrap(),
                _ => std::fs::write(arguments, "cowshed\0--guard\0").unwrap(),
            }
        }
        let is_guard = |arguments: &[Vec<u8>]| arguments.last().is_some_and(|last| last == b"--guard");
        assert_eq!(find_process(folder.path(), is_guard), Some(3));
        assert_eq!(find_process(folder.path(), |_| false), None);
    }
}
