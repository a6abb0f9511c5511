// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Write-behind on a real disk: new data reach it without a flush, and nothing of it outlives one.

use cowshed_storage::rt::{block_on, sleep};
use cowshed_storage::{CacheMode, File, IoBuf, IoEngine, Locking, OpenOptions, Permissions};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::Duration;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
/// More than the bytes that are left to the kernel.
const FILE_MIB: u64 = 80;
/// The kernel's own threads begin after half a minute.
const PATIENCE: Duration = Duration::from_secs(20);

fn disk_dir() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder")
}

fn options(engine: IoEngine) -> OpenOptions {
    let cache = CacheMode { direct: false, no_flush: false };
    let permissions = Some(Permissions::CREATE);
    OpenOptions {
        write: true,
        create: true,
        engine,
        cache,
        locking: Locking::On,
        permissions,
        ..OpenOptions::default()
    }
}

/// Bytes of a file that are only in memory, by `cachestat` (Linux 6.5); `None` where the kernel has no such call.
fn dirty_bytes(path: &Path) -> Option<u64> {
    const SYS_CACHESTAT: libc::c_long = 451;
    let file = std::fs::File::open(path).expect("the file");
    let range = [0u64, 0];
    let mut pages = [0u64; 5];
    // SAFETY: the call reads two numbers and writes five (cached, dirty, written back, evicted, recently evicted).
    let done = unsafe { libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), range.as_ptr(), pages.as_mut_ptr(), 0) };
    match done {
        0 => Some((pages[1] + pages[2]) * 4096),
        _ => {
            let error = std::io::Error::last_os_error();
            assert_eq!(error.raw_os_error(), Some(libc::ENOSYS), "{error}");
            None
        }
    }
}

async fn write_new(file: &File, note: bool) {
    for index in 0..FILE_MIB {
        let (result, _) = file.write_at(IoBuf::copy_from(&vec![index as u8 | 1; MIB as usize]), index * MIB).await;
        result.expect("a write");
        if note {
            file.note_new_data(MIB);
        }
    }
}

#[test]
fn new_data_reach_the_disk_without_a_flush() {
    for engine in [IoEngine::IoUring, IoEngine::Threads] {
        let dir = disk_dir();
        let path = dir.path().join("image");
        block_on(async {
            let file = File::open(&path, &options(engine)).expect("a file");
            write_new(&file, false).await;
            let Some(before) = dirty_bytes(&path) else {
                eprintln!("this kernel has no cachestat: what is dirty can't be seen");
                return;
            };
            assert!(before > FILE_MIB * MIB / 2, "nobody had asked for {before} bytes to stay: {engine:?}");
            file.note_new_data(FILE_MIB * MIB);
            let mut waited = Duration::ZERO;
            while dirty_bytes(&path).is_some_and(|dirty| dirty > FILE_MIB * MIB / 4) {
                assert!(waited < PATIENCE, "nothing was written: {engine:?}");
                // Between two looks, with the bound above.
                sleep(Duration::from_millis(20)).await;
                waited += Duration::from_millis(20);
            }
            file.sync().await.expect("a flush");
        });
    }
}

#[test]
fn after_a_flush_nothing_keeps_the_file_open() {
    for engine in [IoEngine::IoUring, IoEngine::Threads] {
        let dir = disk_dir();
        let path = dir.path().join("image");
        block_on(async {
            for round in 0..5 {
                // Creating takes exclusive locks: those of the last round would be in the way.
                let file = File::open(&path, &options(engine)).unwrap_or_else(|error| panic!("round {round}: {error}"));
                file.lock(Permissions::CREATE).expect("the locks");
                write_new(&file, true).await;
                file.sync().await.expect("a flush");
                drop(file);
            }
        });
        let bytes = std::fs::read(&path).expect("the file");
        assert_eq!(bytes.len() as u64, FILE_MIB * MIB);
        let right = |(index, block): (usize, &[u8])| block.iter().all(|byte| *byte == index as u8 | 1);
        assert!(bytes.chunks(MIB as usize).enumerate().all(right));
    }
}
