// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory that the machine really has before a run starts.
//!
//! A virtual machine may give free pages back to its host (free page reporting, balloons). The first use of such a page
//! pays for the host's page fault, which takes longer than copying the page. With it, the wall and system time of one
//! and the same conversion varies by a factor of five.

use std::process::Command;

/// The option by which this program starts itself to touch memory.
pub const TOUCH: &str = "--touch-mib";

const PAGE_BYTES: usize = 4096;

/// Has the host back `mib` MiB of free memory, or half of the available memory: the other half may hold the images. In
/// a process of its own, so that the peak of the measured ones stays theirs.
pub fn back(mib: u64) -> Result<(), String> {
    let mib = mib.min(available_mib()? / 2);
    let own = std::env::current_exe().map_err(|e| e.to_string())?;
    let status = Command::new(own).arg(TOUCH).arg(mib.to_string()).status().map_err(|e| e.to_string())?;
    if status.success() { Ok(()) } else { Err(format!("touching {mib} MiB of memory: {status}")) }
}

/// The memory that processes may use without swapping, in MiB.
fn available_mib() -> Result<u64, String> {
    let path = "/proc/meminfo";
    let text = std::fs::read_to_string(path).map_err(|e| format!("{path}: {e}"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.split_whitespace().next()).and_then(|kib| kib.parse::<u64>().ok());
    kib.map(|kib| kib >> 10).ok_or_else(|| format!("{path} has no MemAvailable"))
}

/// Writes to each page once, in a started process.
pub fn touch(mib: &str) -> Result<(), String> {
    let mib: usize = mib.parse().map_err(|_| format!("{mib} is no number"))?;
    let mut pages = vec![0u8; mib << 20];
    for page in pages.chunks_mut(PAGE_BYTES) {
        page[0] = 1;
    }
    std::hint::black_box(&pages);
    Ok(())
}
