// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Transfers between files and memory that another process shares.

use cowshed_storage::rt::block_on;
use cowshed_storage::{CacheMode, File, IoBuf, IoEngine, OpenOptions, SharedBufs, SharedMemory};
use cowshed_types::Errno;
use std::os::fd::OwnedFd;

const MEMORY_BYTES: u64 = 4 << 20;

fn files(test: impl AsyncFn(&File, &str)) {
    for engine in [IoEngine::IoUring, IoEngine::Threads] {
        for direct in [false, true] {
            let cache = CacheMode { direct, no_flush: false };
            let options = OpenOptions { write: true, create: true, engine, cache, ..OpenOptions::default() };
            let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
            block_on(async {
                let file = File::open(&folder.path().join("image"), &options).expect("a file");
                test(&file, &format!("{options:?}")).await;
            });
        }
    }
    block_on(test(&File::null(1 << 30), "no file of the host"));
}

fn bufs(memory: &SharedMemory, pieces: &[(usize, usize)]) -> SharedBufs {
    let mut bufs = SharedBufs::default();
    pieces.iter().for_each(|&(at, len)| bufs.push(memory.part(at, len)));
    bufs
}

fn bytes_of(bufs: &SharedBufs) -> Vec<u8> {
    let mut bytes = vec![0; bufs.len()];
    bufs.read(0, &mut bytes);
    bytes
}

#[test]
fn pieces_of_any_length_go_to_a_file_and_back() {
    let (memory, _file) = SharedMemory::create("guest", MEMORY_BYTES).unwrap();
    let many: Vec<(usize, usize)> = (0..1500).map(|number| (number * 1000 + 1, 512 + number % 3)).collect();
    // Pages; one piece; odd pieces; more than one system call takes; longer than a thread reads at once.
    let shapes: [&[(usize, usize)]; 5] = [
        &[(0, 4096), (16384, 8192), (8192, 4096)],
        &[(4096, 65536)],
        &[(1, 511), (5000, 3585), (9000, 0), (9001, 4096)],
        &many,
        &[(0, 1 << 20), (2 << 20, 1 << 20)],
    ];
    files(async |file, what| {
        for (number, shape) in shapes.iter().enumerate() {
            for offset in [0u64, 4096, 777] {
                let sent = bufs(&memory, shape);
                let bytes: Vec<u8> = (0..sent.len()).map(|at| (at * 7 + at / 256 + number) as u8 | 1).collect();
                sent.write(0, &bytes);
                let (result, sent) = file.write_shared_at(sent, offset).await;
                result.unwrap_or_else(|error| panic!("{what}: {error}"));
                assert!(bytes_of(&sent) == bytes, "{what}: a write changes nothing");
                if what.contains("no file") {
                    continue;
                }
                let (result, read) = file.read_at(IoBuf::zeroed(bytes.len()), offset).await;
                assert!(result.is_ok() && read[..] == bytes[..], "{what}, shape {number} at {offset}");
                sent.zero_from(0);
                let (result, back) = file.read_shared_at(sent, offset).await;
                assert!(result.is_ok() && bytes_of(&back) == bytes, "{what}, shape {number} at {offset}");
            }
        }
    });
}

#[test]
fn shared_memory_gets_zeroes_behind_the_end_of_a_file() {
    let (memory, _file) = SharedMemory::create("guest", MEMORY_BYTES).unwrap();
    files(async |file, what| {
        if what.contains("no file") {
            return;
        }
        let (result, _) = file.write_at(IoBuf::copy_from(&[5; 1000]), 8192).await;
        result.unwrap();
        let read = bufs(&memory, &[(0, 4096), (8192, 4096), (100_001, 3)]);
        read.write(0, &[0xee; 8195]);
        let (result, read) = file.read_shared_at(read, 8192).await;
        assert!(result.is_ok());
        let bytes = bytes_of(&read);
        assert!(bytes[..1000] == [5; 1000] && bytes[1000..].iter().all(|&byte| byte == 0), "{what}");
    });
}

#[test]
fn memory_that_is_cut_off_is_an_error_of_its_transfer() {
    let file: OwnedFd = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, MEMORY_BYTES).unwrap();
    let memory = SharedMemory::map(&file, 0, MEMORY_BYTES).unwrap();
    assert!(memory.is_memory());
    rustix::fs::ftruncate(&file, 4096).unwrap();
    files(async |file, what| {
        if what.contains("no file") {
            return;
        }
        let (result, _) = file.write_at(IoBuf::copy_from(&[5; 8192]), 0).await;
        result.unwrap();
        // A page that is there, and a page that is not.
        for pieces in [&[(1 << 20, 4096)][..], &[(0, 4096), (1 << 20, 4096)]] {
            let (result, _) = file.read_shared_at(bufs(&memory, pieces), 0).await;
            assert_eq!(result.expect_err("no memory").errno(), Errno(14), "{what}: EFAULT");
        }
        let (result, _) = file.write_shared_at(bufs(&memory, &[(1 << 20, 4096)]), 4096).await;
        assert_eq!(result.expect_err("no memory").errno(), Errno(14), "{what}: EFAULT");
        let (result, read) = file.read_at(IoBuf::zeroed(8192), 0).await;
        assert!(result.is_ok() && read[..] == [5; 8192], "{what}");
    });
}

#[test]
fn only_files_of_memory_count_as_memory() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    let path = folder.path().join("memory");
    let file = std::fs::File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    file.set_len(4096).unwrap();
    assert!(!SharedMemory::map(&file, 0, 4096).unwrap().is_memory(), "another process may serve its pages");
    assert!(SharedMemory::create("guest", 4096).unwrap().0.is_memory());
}
