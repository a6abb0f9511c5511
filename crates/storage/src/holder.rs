// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The processes that hold locks, as far as the kernel lists them (proc(5): the lines `lock:` of
//! `/proc/PID/fdinfo/FD`).

use crate::question::answer_within;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// SIGKILL in the sets of signals of `/proc/PID/status`.
const KILLED: u64 = 1 << (libc::SIGKILL - 1);
/// The kernel's `PF_EXITING` in the flags of `/proc/PID/stat`.
const EXITING: u64 = 4;
/// Threads that look at the same time. Each waits for as long as a process stands still in the kernel.
const MAX_LOOKS: usize = 8;

/// Those of this process.
static LOOKS: AtomicUsize = AtomicUsize::new(0);

/// The owner of a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holder {
    /// Another open file of this process.
    Here,
    /// Another process that lives.
    Another,
    /// No process that can be looked at: one of another user or another container, or a dead one whose last I/O still runs.
    Unknown,
}

/// The holder of a lock on `byte`, where `file` has locks of its own on other bytes. Some files of `/proc` have no content while their
/// process waits in execve(2), or for the server of a file system. So the look ends after `limit`.
pub(crate) fn of(file: BorrowedFd<'_>, byte: u64, limit: Duration) -> Holder {
    Processes { list: "/proc".into(), looks: &LOOKS }.holder_within(file, byte, limit)
}

/// The list of all processes.
struct Processes {
    list: PathBuf,
    /// The looks that have no end yet.
    looks: &'static AtomicUsize,
}

impl Processes {
    fn holder_within(self, file: BorrowedFd<'_>, byte: u64, limit: Duration) -> Holder {
        let looks = self.looks;
        if looks.fetch_add(1, Ordering::Relaxed) >= MAX_LOOKS {
            looks.fetch_sub(1, Ordering::Relaxed);
            return Holder::Unknown;
        }
        let own_fd = file.as_raw_fd().to_string();
        let look = move || {
            let holder = self.holder(&own_fd, byte);
            looks.fetch_sub(1, Ordering::Relaxed);
            holder
        };
        match answer_within(limit, "lock-holder", look) {
            Ok(holder) => holder,
            Err(errno) => {
                if errno.0 != libc::ETIMEDOUT {
                    looks.fetch_sub(1, Ordering::Relaxed);
                }
                Holder::Unknown
            }
        }
    }

    fn holder(&self, own_fd: &str, byte: u64) -> Holder {
        let Some(inode) = self.locks_of("self", own_fd).find_map(|line| inode_of(&line).map(str::to_owned)) else {
            return Holder::Unknown;
        };
        let holds = |process: &str, fd: &str| {
            self.locks_of(process, fd).any(|line| inode_of(&line) == Some(inode.as_str()) && covers(&line, byte))
        };
        if numbers(&self.list.join("self/fd")).any(|fd| fd != own_fd && holds("self", &fd)) {
            return Holder::Here;
        }
        let own = std::process::id().to_string();
        for process in numbers(&self.list).filter(|process| *process != own) {
            let files = self.list.join(&process).join("fd");
            let is_holder = numbers(&files).any(|fd| is_file(&files.join(&fd)) && holds(&process, &fd));
            if is_holder && !self.is_ending(&process) {
                return Holder::Another;
            }
        }
        Holder::Unknown
    }

    /// The lines about locks of an open file.
    fn locks_of(&self, process: &str, fd: &str) -> impl Iterator<Item = String> + use<> {
        let info = std::fs::read_to_string(self.list.join(process).join("fdinfo").join(fd)).unwrap_or_default();
        let lines: Vec<String> = info.lines().filter(|line| line.starts_with("lock:")).map(str::to_owned).collect();
        lines.into_iter()
    }

    /// True for a process that has been killed or ends, and still has its files.
    fn is_ending(&self, process: &str) -> bool {
        let read = |name: &str| std::fs::read_to_string(self.list.join(process).join(name)).unwrap_or_default();
        let status = read("status");
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        let has_kill = |name| {
            field(name).and_then(|set| u64::from_str_radix(set, 16).ok()).is_some_and(|signals| signals & KILLED != 0)
        };
        if has_kill("SigPnd:") || has_kill("ShdPnd:") {
            return true;
        }
        // Behind the name: the state, five numbers, the flags.
        let stat = read("stat");
        let flags =
            stat.rsplit_once(')').and_then(|(_, rest)| rest.split_ascii_whitespace().nth(6)?.parse::<u64>().ok());
        flags.is_none_or(|flags| flags & EXITING != 0)
    }
}

/// The entries of a folder that are numbers; none where it can't be read.
fn numbers(folder: &Path) -> impl Iterator<Item = String> + use<> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names.filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()))
}

/// False for objects without a name in the file system, which can't be images: sockets, pipes, event counters.
fn is_file(fd: &Path) -> bool {
    std::fs::read_link(fd).is_ok_and(|target| target.is_absolute())
}

/// A line like `lock: 1: OFDLCK  ADVISORY  READ -1 fd:00:1234 203 203`: device and inode are the last word but two.
fn inode_of(line: &str) -> Option<&str> {
    line.split_ascii_whitespace().rev().nth(2)
}

/// The bytes of such a line: from the last word but one to the last.
fn covers(line: &str, byte: u64) -> bool {
    let mut words = line.split_ascii_whitespace().rev();
    let last = words.next().map(|word| if word == "EOF" { Ok(u64::MAX) } else { word.parse() });
    let first = words.next().map(str::parse::<u64>);
    matches!((first, last), (Some(Ok(first)), Some(Ok(last))) if (first..=last).contains(&byte))
}

#[cfg(test)]
mod tests;
