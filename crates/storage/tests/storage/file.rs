// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Files on a real disk, with each engine, with and without the page cache.

use cowshed_storage::rt::{block_on, spawn, yield_now};
use cowshed_storage::{
    CacheMode, DataRange, EndedOp, File, FileIdentity, FileObserver, FileOp, IoBuf, IoEngine, OpenOptions,
};
use cowshed_types::{Errno, ErrorKind};
use futures_util::FutureExt;
use futures_util::future::join_all;
use std::path::PathBuf;
use tempfile::TempDir;

/// A folder on the disk that the build is on: `/tmp` may be in memory and without O_DIRECT.
fn disk_dir() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder")
}

fn modes() -> Vec<OpenOptions> {
    let mut modes = Vec::new();
    for engine in [IoEngine::IoUring, IoEngine::Threads] {
        for direct in [false, true] {
            let cache = CacheMode { direct, no_flush: false };
            modes.push(OpenOptions { write: true, create: true, engine, cache, ..OpenOptions::default() });
        }
    }
    modes
}

/// Runs `test` with a new file for each engine and cache mode.
fn each_mode(test: impl AsyncFn(File, PathBuf)) {
    for options in modes() {
        let dir = disk_dir();
        let path = dir.path().join("image");
        block_on(async {
            let file = File::open(&path, &options).unwrap_or_else(|error| panic!("{options:?}: {error}"));
            test(file, path).await;
        });
    }
}

/// Bytes that have their source in them.
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as u8
        })
        .collect()
}

async fn write(file: &File, bytes: &[u8], offset: u64) {
    let (result, back) = file.write_at(IoBuf::copy_from(bytes), offset).await;
    result.unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(&back[..], bytes);
}

async fn read(file: &File, len: usize, offset: u64) -> Vec<u8> {
    let mut buf = IoBuf::zeroed(len);
    buf.fill(0xaa);
    let (result, buf) = file.read_at(buf, offset).await;
    result.unwrap_or_else(|error| panic!("{error}"));
    buf.to_vec()
}

#[test]
fn what_is_written_reads_back() {
    each_mode(async |file, path| {
        let bytes = pattern(1, 3 << 20);
        write(&file, &bytes, 0).await;
        assert_eq!(file.len(), 3 << 20);
        assert!(read(&file, 3 << 20, 0).await == bytes);
        assert!(std::fs::read(&path).expect("file") == bytes);
    });
}

#[test]
fn any_offset_and_length_works_against_a_model() {
    each_mode(async |file, path| {
        let mut model: Vec<u8> = Vec::new();
        let mut random = pattern(7, 1 << 16).into_iter().cycle();
        let mut number = |bound: usize| {
            let value = (0..4).fold(0usize, |sum, _| sum << 8 | usize::from(random.next().expect("cycle")));
            value % bound
        };
        for step in 0..150 {
            let (offset, len) = (number(40_000), 1 + number(if step % 10 == 0 { 1_500_000 } else { 9_000 }));
            match number(4) {
                0 => {
                    let bytes = read(&file, len, offset as u64).await;
                    for (index, byte) in bytes.iter().enumerate() {
                        assert_eq!(*byte, model.get(offset + index).copied().unwrap_or(0), "step {step}");
                    }
                }
                1 if step % 3 == 0 => {
                    file.set_len(offset as u64).await.expect("set_len");
                    model.resize(offset, 0);
                }
                _ => {
                    let bytes = pattern(step, len);
                    model.resize(model.len().max(offset + len), 0);
                    model[offset..offset + len].copy_from_slice(&bytes);
                    write(&file, &bytes, offset as u64).await;
                }
            }
            assert_eq!(file.len(), model.len() as u64, "step {step}");
        }
        assert!(std::fs::read(&path).expect("file") == model);
    });
}

#[test]
fn neighbours_in_one_block_keep_their_bytes() {
    each_mode(async |file, path| {
        const PART: usize = 100;
        const PARTS: usize = 400;
        for round in 0..3u64 {
            let tasks = (0..PARTS).map(|part| {
                let file = file.clone();
                spawn(async move {
                    let bytes = pattern(round * 1000 + part as u64 + 1, PART);
                    write(&file, &bytes, (part * PART) as u64).await;
                })
            });
            join_all(tasks).await;
            assert_eq!(file.len(), (PART * PARTS) as u64);
            let all = std::fs::read(&path).expect("file");
            for part in 0..PARTS {
                let expected = pattern(round * 1000 + part as u64 + 1, PART);
                assert!(all[part * PART..][..PART] == expected, "round {round}, part {part}");
            }
        }
    });
}

#[test]
fn threads_share_a_file() {
    for options in modes() {
        let dir = disk_dir();
        let path = dir.path().join("image");
        let file = block_on(async { File::open(&path, &options).expect("open") });
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let file = file.clone();
                scope.spawn(move || {
                    block_on(async {
                        for index in 0..50u64 {
                            let part = index * 4 + thread;
                            write(&file, &pattern(part + 1, 300), part * 300).await;
                        }
                        file.sync().await.expect("sync");
                    });
                });
            }
        });
        let all = std::fs::read(&path).expect("file");
        for part in 0..200u64 {
            assert!(all[part as usize * 300..][..300] == pattern(part + 1, 300), "part {part} with {options:?}");
        }
    }
}

#[test]
fn vectors_of_any_shape() {
    each_mode(async |file, _| {
        for (seed, shape) in [(1, vec![4096, 8192, 4096]), (2, vec![1, 0, 4095, 513]), (3, vec![100; 1500])] {
            let bytes = pattern(seed, shape.iter().sum());
            let mut rest = &bytes[..];
            let bufs: Vec<IoBuf> = shape
                .iter()
                .map(|&len| {
                    let (head, tail) = rest.split_at(len);
                    rest = tail;
                    IoBuf::copy_from(head)
                })
                .collect();
            let (result, bufs) = file.write_vectored_at(bufs, 8192).await;
            result.expect("write");
            assert_eq!(bufs.iter().map(IoBuf::len).collect::<Vec<_>>(), shape);
            assert!(read(&file, bytes.len(), 8192).await == bytes);
            let zeroes: Vec<IoBuf> = shape.iter().map(|&len| IoBuf::zeroed(len)).collect();
            let (result, bufs) = file.read_vectored_at(zeroes, 8192).await;
            result.expect("read");
            assert!(bufs.iter().flat_map(|buf| buf.to_vec()).collect::<Vec<u8>>() == bytes);
        }
    });
}

#[test]
fn space_operations() {
    each_mode(async |file, _| {
        write(&file, &[7; 65536], 0).await;
        file.punch_hole(4096, 8192).await.expect("punch");
        file.zero_range(40_000, 100).await.expect("zero");
        let mut expected = vec![7; 65536];
        expected[4096..12288].fill(0);
        expected[40_000..40_100].fill(0);
        assert!(read(&file, 65536, 0).await == expected);
        file.allocate(1 << 20, 4096).await.expect("allocate");
        assert_eq!(file.len(), (1 << 20) + 4096);
        let data = file.next_data(4096).await.expect("seek").expect("data");
        assert_eq!((data.start, data.end >= 40_000), (12288, true));
        file.set_len(10).await.expect("set_len");
        assert!(file.next_data(10).await.expect("seek").is_none());
        assert!(file.allocated_bytes().expect("stat") <= 65536);
    });
}

#[test]
fn runs_of_data_are_those_that_are_found_one_by_one() {
    each_mode(async |file, _| {
        const BLOCK: u64 = 64 << 10;
        file.set_len(20 * BLOCK).await.expect("set_len");
        for block in [0, 2, 3, 7, 12] {
            write(&file, &[7; BLOCK as usize], block * BLOCK).await;
        }
        let (mut singly, mut at) = (Vec::new(), 0);
        while let Some(range) = file.next_data(at).await.expect("seek") {
            at = range.end;
            singly.push(range);
        }
        let starts = |ranges: &[DataRange]| ranges.iter().map(|range| (range.start, range.end)).collect::<Vec<_>>();
        let ask = async |offset, end, max| file.data_ranges(offset, end, max).await.expect("seek");
        assert_eq!(starts(&ask(0, 20 * BLOCK, 100).await), starts(&singly));
        assert_eq!(starts(&ask(0, 20 * BLOCK, 2).await), starts(&singly[..2]));
        // A run that begins before the end counts whole; a run that reaches over the start counts from there on.
        assert_eq!(starts(&ask(512, 3 * BLOCK, 100).await), [(512, BLOCK), (2 * BLOCK, 4 * BLOCK)]);
        assert_eq!(starts(&ask(8 * BLOCK, 12 * BLOCK, 100).await), []);
    });
}

#[test]
fn dropped_futures_leave_the_operation_its_memory() {
    each_mode(async |file, _| {
        write(&file, &[1; 1 << 16], 0).await;
        for round in 0..64u8 {
            let mut write = Box::pin(file.write_at(IoBuf::copy_from(&[2; 4000]), 100).fuse());
            let mut read = Box::pin(file.read_at(IoBuf::zeroed(1 << 16), 0).fuse());
            let mut sync = Box::pin(file.sync().fuse());
            for _ in 0..round % 3 {
                let _ = futures_util::poll!(&mut write);
                let _ = futures_util::poll!(&mut read);
                let _ = futures_util::poll!(&mut sync);
                yield_now().await;
            }
            drop((write, read, sync));
        }
        // Whole blocks that the dropped writes also touch: locks that they left behind would make it wait for ever.
        write(&file, &[3; 8192], 8192).await;
        write(&file, &[3; 5000], 4096).await;
        file.sync().await.expect("sync");
        let bytes = read(&file, 1 << 16, 0).await;
        assert!(bytes[..100] == [1; 100] && bytes[4100..9096] == [3; 4996] && bytes[16384..] == [1; (1 << 16) - 16384]);
        // With O_DIRECT a write of part of a block is a read and a write, and may have been dropped between the two.
        let dropped = &bytes[100..4096];
        let ran = dropped == [2; 3996];
        assert!(ran || (dropped == [1; 3996] && file.alignment().offset > 1), "64 dropped writes and none ran");
    });
}

#[test]
fn more_operations_than_the_ring_has_places() {
    each_mode(async |file, _| {
        let count = if file.alignment().offset > 1 { 1500 } else { 6000u64 };
        write(&file, &pattern(5, count as usize * 512), 0).await;
        let expected = pattern(5, count as usize * 512);
        let tasks = (0..count).map(|part| {
            let file = file.clone();
            spawn(async move { (part, read(&file, 512, part * 512).await) })
        });
        for (part, bytes) in join_all(tasks).await {
            assert!(bytes == expected[part as usize * 512..][..512], "part {part}");
        }
    });
}

#[test]
fn a_thread_ends_with_operations_in_flight() {
    for options in modes() {
        let dir = disk_dir();
        let path = dir.path().join("image");
        let file = File::open(&path, &options).expect("open");
        let theirs = file.clone();
        std::thread::spawn(move || {
            block_on(async {
                for part in 0..100u64 {
                    let file = theirs.clone();
                    drop(spawn(async move { write(&file, &[7; 8192], part * 8192).await }));
                }
                yield_now().await;
            });
        })
        .join()
        .expect("thread");
        // Operations that had begun have ended with the thread: none of them lands on later writes, or holds a lock on
        // a block.
        let bytes = std::fs::read(&path).expect("file");
        assert!(bytes == [7; 100 * 8192], "{options:?}: a write goes on");
        block_on(async {
            write(&file, &[8; 100], 8192 * 50 + 100).await;
            file.sync().await.expect("sync");
        });
        let bytes = std::fs::read(&path).expect("file");
        assert!(bytes[8192 * 50 + 100..][..100] == [8; 100], "{options:?}");
    }
}

struct Detach(PathBuf);

impl Drop for Detach {
    fn drop(&mut self) {
        let gone = std::process::Command::new("losetup").arg("--detach").arg(&self.0).status();
        assert!(gone.expect("losetup").success());
    }
}

#[test]
#[ignore = "needs root, for a loop device"]
fn block_devices() {
    let dir = disk_dir();
    let backing = dir.path().join("backing");
    std::fs::write(&backing, vec![7; 1 << 20]).expect("write");
    let made =
        std::process::Command::new("losetup").args(["--find", "--show"]).arg(&backing).output().expect("losetup");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let device = PathBuf::from(String::from_utf8_lossy(&made.stdout).trim());
    let _detach = Detach(device.clone());
    for mut options in modes() {
        options.create = options.engine == IoEngine::Threads;
        let file = File::open(&device, &options).expect("open");
        assert!(file.is_device());
        assert_eq!(file.len(), 1 << 20);
        block_on(async {
            let (result, _) = file.write_at(IoBuf::copy_from(&[1; 10]), (1 << 20) - 5).await;
            assert_eq!(result.expect_err("past the end").errno(), Errno::ENOSPC);
            write(&file, &[3; 10_000], 5).await;
            file.punch_hole(4096, 4096).await.expect("punch");
            file.zero_range(512 * 1024, 4096).await.expect("zero");
            assert!(read(&file, 8192, 0).await[..] == [&[7; 5][..], &[3; 4091], &[0; 4096]].concat()[..]);
            assert!(read(&file, 4096, 512 * 1024).await == [0; 4096]);
            write(&file, &[7; 10_005], 0).await;
            file.set_len(512).await.expect("does nothing");
            assert_eq!(file.len(), 1 << 20);
            assert_eq!(file.set_len(2 << 20).await.expect_err("can't grow").kind(), ErrorKind::Unsupported);
            assert_eq!(file.allocate(0, 512).await.expect_err("can't").kind(), ErrorKind::Unsupported);
            assert_eq!(file.next_data(5).await.expect("all").map(|range| range.end), Some(1 << 20));
            file.sync().await.expect("sync");
        });
    }
}

#[test]
fn wrong_kinds_of_files_are_named() {
    let dir = disk_dir();
    let fifo = dir.path().join("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RWXU).expect("mkfifo");
    let socket = dir.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).expect("bind");
    let cases = [
        (dir.path().to_owned(), "a folder"),
        (fifo, "a pipe"),
        (socket, "a socket"),
        (PathBuf::from("/dev/null"), "a character device"),
    ];
    for (path, kind) in cases {
        for write in [false, true] {
            let error = File::open(&path, &OpenOptions { write, ..OpenOptions::default() }).expect_err(kind);
            let name = path.display();
            assert_eq!(error.message(), format!("is {kind}, not a regular file or block device"), "{name}");
            assert_eq!(error.file_name(), Some(name.to_string().as_str()));
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        }
    }
    let missing = dir.path().join("missing");
    let error = File::open(&missing, &OpenOptions::default()).expect_err("missing");
    assert_eq!((error.kind(), error.errno()), (ErrorKind::NotFound, Errno::ENOENT));
    assert_eq!(error.to_string(), format!("{}: could not open: No such file or directory", missing.display()));
}

#[test]
fn a_file_for_reading_is_not_written() {
    let dir = disk_dir();
    let path = dir.path().join("image");
    std::fs::write(&path, [5; 100]).expect("write");
    let file = File::open(&path, &OpenOptions::default()).expect("open");
    block_on(async {
        let (result, _) = file.write_at(IoBuf::zeroed(10), 0).await;
        assert_eq!(result.expect_err("read-only").kind(), ErrorKind::ReadOnly);
        assert_eq!(file.set_len(0).await.expect_err("read-only").kind(), ErrorKind::ReadOnly);
        assert_eq!(file.punch_hole(0, 10).await.expect_err("read-only").kind(), ErrorKind::ReadOnly);
        let bytes = read(&file, 200, 0).await;
        assert!(bytes[..100] == [5; 100] && bytes[100..] == [0; 100]);
        let (result, _) = file.read_at(IoBuf::zeroed(10), u64::MAX - 5).await;
        assert_eq!(result.expect_err("too far").errno(), Errno::EFBIG);
    });
}

#[test]
fn kernel_copies() {
    each_mode(async |file, path| {
        let bytes = pattern(3, 1 << 18);
        let source_path = path.with_file_name("source");
        std::fs::write(&source_path, &bytes).expect("write");
        let source = File::open(&source_path, &OpenOptions::default()).expect("open");
        let mut done = 0;
        while done < bytes.len() as u64 {
            done += file.copy_from(&source, done, 4096 + done, bytes.len() as u64 - done).await.expect("copy");
        }
        assert_eq!(file.len(), 4096 + (1 << 18));
        assert!(read(&file, 1 << 18, 4096).await == bytes);
        let error = file.copy_from(&File::null(100), 0, 0, 10).await.expect_err("no kernel copy");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
    });
}

#[test]
fn null_files_read_as_zeroes() {
    let file = File::null(1000);
    block_on(async {
        write(&file, &[1; 100], 0).await;
        assert!(read(&file, 2000, 0).await == [0; 2000]);
        file.sync().await.expect("sync");
    });
}
#[test]
fn futures_of_transfers_are_small() {
    // Every task that waits for one holds it, so rare parts are boxed.
    let file = File::null(1);
    let sizes = [
        std::mem::size_of_val(&file.read_at(IoBuf::zeroed(1), 0)),
        std::mem::size_of_val(&file.write_at(IoBuf::zeroed(1), 0)),
    ];
    assert!(sizes.iter().all(|&bytes| bytes <= 512), "{sizes:?} bytes");
}

#[test]
fn page_cache_use_changes_on_an_open_file() {
    for engine in [IoEngine::IoUring, IoEngine::Threads] {
        let dir = disk_dir();
        let path = dir.path().join("image");
        block_on(async {
            let options = OpenOptions { write: true, create: true, engine, ..OpenOptions::default() };
            let file = File::open(&path, &options).unwrap();
            let mut model = pattern(1, 100_000);
            write(&file, &model, 0).await;
            for round in 0..6_u64 {
                let mode = CacheMode { direct: round % 2 == 0, no_flush: round % 3 == 0 };
                file.set_cache_mode(mode).unwrap();
                assert_eq!(file.cache_mode(), mode);
                assert_eq!(file.alignment().offset > 1, mode.direct);
                // The bytes that one wrote the other reads, also parts of blocks and the odd tail.
                assert_eq!(read(&file, model.len(), 0).await, model);
                let (at, bytes) = (round as usize * 5_000 + 123, pattern(round + 7, 9_001));
                write(&file, &bytes, at as u64).await;
                model[at..at + bytes.len()].copy_from_slice(&bytes);
                let tail = pattern(round + 70, 777);
                write(&file, &tail, model.len() as u64).await;
                model.extend(tail);
                assert_eq!(read(&file, 20_000, 100).await, model[100..20_100]);
                file.sync().await.unwrap();
            }
            assert_eq!(file.len(), model.len() as u64);
            assert_eq!(std::fs::read(&path).unwrap(), model);
        });
    }
}

#[test]
fn pages_and_their_parts_reach_the_page_cache() {
    each_mode(async |file, path| {
        let mut model = vec![0; 1 << 20];
        write(&file, &model, 0).await;
        let writes = (0..200_u64).map(|n| {
            let (page, len) = (n * 37 % 200, if n % 3 == 0 { 4096 } else { 512 + n as usize });
            (page * 5000 / 4096 * 4096 + if n % 3 == 0 { 0 } else { n % 7 * 512 }, pattern(n, len))
        });
        for (offset, bytes) in writes {
            write(&file, &bytes, offset).await;
            model[offset as usize..offset as usize + bytes.len()].copy_from_slice(&bytes);
        }
        assert!(read(&file, model.len(), 0).await == model);
        file.sync().await.unwrap();
        assert!(std::fs::read(path).unwrap() == model);
    });
}

/// Keeps the operations that it gets.
#[derive(Default)]
struct Notes(std::sync::Mutex<Vec<EndedOp>>);

impl FileObserver for Notes {
    fn ended(&self, ended: &EndedOp) {
        self.0.lock().unwrap().push(*ended);
    }
}

#[test]
fn an_observer_sees_each_operation_with_its_time() {
    each_mode(async |file, _| {
        let notes = std::sync::Arc::new(Notes::default());
        let others = std::sync::Arc::new(Notes::default());
        file.observe(1, Some(notes.clone()));
        file.observe(2, Some(others.clone()));
        write(&file, &pattern(1, 8192), 4096).await;
        read(&file, 4096, 0).await;
        file.sync().await.unwrap();
        file.observe(1, None);
        read(&file, 4096, 0).await;
        let seen: Vec<_> = notes.0.lock().unwrap().iter().map(|op| (op.op, op.offset, op.end, op.done)).collect();
        let expected = [(FileOp::Write, 4096, 12288, true), (FileOp::Read, 0, 4096, true), (FileOp::Sync, 0, 0, true)];
        assert_eq!(seen, expected);
        assert_eq!(others.0.lock().unwrap().len(), 4);
        let stats = file.statistics();
        assert_eq!((stats.of(FileOp::Read).operations, stats.of(FileOp::Write).bytes), (2, 8192));
        assert!(stats.last_end_ns > 0 && stats.of(FileOp::Sync).total_ns > 0, "{stats:?}");
    });
}

/// Programs that ignore locks can do that: the daemon goes on with the file that it opened.
#[test]
fn a_file_that_others_cut_or_replace_goes_on() {
    each_mode(async |file, path| {
        let bytes = pattern(3, 64 << 10);
        write(&file, &bytes, 0).await;
        let other = std::fs::OpenOptions::new().write(true).open(&path).expect("the file");
        other.set_len(16 << 10).expect("a cut");
        let mut expected = bytes;
        expected[16 << 10..].fill(0);
        assert!(read(&file, expected.len(), 0).await == expected, "what was cut off is zeroes");
        write(&file, &[5; 4096], 32 << 10).await;
        expected[32 << 10..][..4096].fill(5);
        // Another file takes the name.
        let newer = path.with_extension("new");
        std::fs::write(&newer, [7; 4096]).expect("another file");
        let kept = path.with_extension("kept");
        std::fs::hard_link(&path, &kept).expect("a second name");
        std::fs::rename(&newer, &path).expect("its name is taken");
        write(&file, &[6; 4096], 0).await;
        expected[..4096].fill(6);
        file.sync().await.expect("a flush");
        assert!(read(&file, expected.len(), 0).await == expected);
        expected.truncate(36 << 10);
        assert!(std::fs::read(kept).expect("the old file") == expected);
        assert_eq!(std::fs::read(&path).expect("the new file"), [7; 4096]);
    });
}

#[test]
fn another_file_of_the_name_is_not_emptied() {
    let dir = disk_dir();
    let [made, other] = ["made", "other"].map(|name| dir.path().join(name));
    for path in [&made, &other] {
        std::fs::write(path, b"data").unwrap();
    }
    let identity = FileIdentity::of_path(&made).unwrap();
    identity.empty(&made).unwrap();
    assert_eq!(std::fs::read(&made).unwrap(), b"");
    identity.empty(&other).unwrap();
    // A link to another file, or to the same one.
    let moved = dir.path().join("moved");
    std::fs::write(&made, b"data").unwrap();
    std::fs::rename(&made, &moved).unwrap();
    for target in [&other, &moved] {
        std::os::unix::fs::symlink(target, &made).unwrap();
        identity.empty(&made).unwrap_err();
        assert_eq!(std::fs::read(target).unwrap(), b"data");
        std::fs::remove_file(&made).unwrap();
    }
}
