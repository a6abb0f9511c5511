// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The bytes of a file that a process has locked, by the kernel's list.
//!
//! Read from `/proc/PID/fdinfo`, never from `/proc/locks`. The kernel writes that list a piece at a time, and finds its
//! place again by counting. So while other processes lock and unlock, entries come twice or not at all.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The bytes of the file `path` that the process `pid` has locked with read locks of open file descriptions, in order.
///
/// # Panics
/// If it holds a lock of another kind there.
pub fn locked_bytes(pid: u32, path: impl AsRef<Path>) -> Vec<u64> {
    let identity = |path: &Path| std::fs::metadata(path).map(|found| (found.dev(), found.ino()));
    let file = identity(path.as_ref()).expect("the locked file");
    let mut bytes = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).expect("the process's files") {
        let number = entry.expect("an open file").file_name().into_string().expect("a number");
        // Other threads of the process open and close theirs meanwhile.
        let Ok(found) = identity(Path::new(&format!("/proc/{pid}/fd/{number}"))) else { continue };
        let Ok(told) = std::fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")) else { continue };
        for line in told.lines().filter(|line| found == file && line.starts_with("lock:")) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let [_, _, "OFDLCK", "ADVISORY", "READ", _, _, first, last] = fields[..] else { panic!("{line}") };
            bytes.extend(first.parse::<u64>().expect("a byte")..=last.parse::<u64>().expect("a byte"));
        }
    }
    bytes.sort_unstable();
    // A description with two numbers is listed twice.
    bytes.dedup();
    bytes
}
