// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The CPU time of one 4 KiB read from the page cache, and of one overwrite in it, at depth 32.
//!
//! `cargo run --release -p cowshed-storage --example cached_reads [NAME]`: prints nanoseconds of CPU (user and system,
//! of the whole process) per operation. The cases are the bare ring, `File` in one task per slot, and `File` on
//! threads. With NAME only those whose name contains it run.

use cowshed_storage::rt::{block_on, spawn};
use cowshed_storage::{File, IoBuf, IoEngine, OpenOptions};
use futures_util::future::join_all;
use io_uring::{IoUring, opcode, types};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::Duration;

const FILE_BYTES: u64 = 256 << 20;
const BLOCK_BYTES: u64 = 4096;
const DEPTH: u64 = 32;
const ROUNDS: usize = 7;

/// User and system time of the process so far.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Block numbers by chance, the same in every run.
struct Blocks(u64);

impl Blocks {
    fn next_offset(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % (FILE_BYTES / BLOCK_BYTES) * BLOCK_BYTES
    }
}

/// The median of several rounds, in nanoseconds per operation.
fn measure(name: &str, reads: u64, mut round: impl FnMut()) {
    if std::env::args().nth(1).is_some_and(|wanted| !name.contains(&wanted)) {
        return;
    }
    round();
    let mut costs: Vec<u64> = (0..ROUNDS)
        .map(|_| {
            let start = cpu_time();
            round();
            (cpu_time() - start).as_nanos() as u64 / reads
        })
        .collect();
    costs.sort_unstable();
    println!("{name:<28} {:>6} ns CPU (best {}, worst {})", costs[ROUNDS / 2], costs[0], costs[ROUNDS - 1]);
}

/// The least that the kernel asks for: a ring without any runtime around it.
fn bare_ring(path: &Path, reads: u64) -> std::io::Result<()> {
    let file = std::fs::File::open(path)?;
    let mut ring: IoUring = IoUring::builder().setup_single_issuer().setup_defer_taskrun().build(64)?;
    let mut memory: Vec<IoBuf> = (0..DEPTH).map(|_| IoBuf::zeroed(BLOCK_BYTES as usize)).collect();
    let mut blocks = Blocks(1);
    let mut free: Vec<usize> = (0..memory.len()).collect();
    let (mut started, mut ended) = (0, 0);
    while ended < reads {
        while started < reads
            && let Some(slot) = free.pop()
        {
            let buf = &mut memory[slot];
            let entry = opcode::Read::new(types::Fd(file.as_raw_fd()), buf.as_mut_ptr(), buf.len() as u32)
                .offset(blocks.next_offset())
                .build()
                .user_data(slot as u64);
            // SAFETY: `memory` lives until all reads have ended, and a slot's buffer has one read at a time.
            unsafe { ring.submission().push(&entry) }.map_err(std::io::Error::other)?;
            started += 1;
        }
        ring.submit_and_wait(1)?;
        for completion in ring.completion() {
            assert_eq!(completion.result(), BLOCK_BYTES as i32);
            free.push(completion.user_data() as usize);
            ended += 1;
        }
    }
    Ok(())
}

async fn through_file(file: &File, operations: u64, write: bool) {
    let tasks = (0..DEPTH).map(|task| {
        let file = file.clone();
        spawn(async move {
            let mut blocks = Blocks(task + 1);
            let mut buf = IoBuf::zeroed(BLOCK_BYTES as usize);
            for _ in 0..operations / DEPTH {
                let offset = blocks.next_offset();
                let (result, back) = match write {
                    true => file.write_at(buf, offset).await,
                    false => file.read_at(buf, offset).await,
                };
                result.expect("transfer");
                buf = back;
            }
        })
    });
    join_all(tasks).await;
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // On the disk that the build is on: a folder in memory would measure another file system.
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target");
    let dir = tempfile::tempdir_in(target)?;
    let path = dir.path().join("data");
    std::fs::write(&path, vec![1u8; FILE_BYTES as usize])?;
    let reads = 320_000;
    measure("bare io_uring", reads, || bare_ring(&path, reads).expect("a ring"));
    for (engine, name) in [(IoEngine::IoUring, "io_uring"), (IoEngine::Threads, "thread pool")] {
        for write in [false, true] {
            let file = File::open(&path, &OpenOptions { engine, write, ..OpenOptions::default() })?;
            let operations = if engine == IoEngine::Threads || write { reads / 10 } else { reads };
            let what = if write { "write" } else { "read" };
            measure(&format!("File, {name}, {what}"), operations, || block_on(through_file(&file, operations, write)));
        }
    }
    Ok(())
}
