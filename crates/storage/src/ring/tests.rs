// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Files and sockets over a kernel that fails in the ways of its own. Transfers are short, operations are given back
//! undone, submissions are refused, and more completions come than fit.

use crate::kernel_faults::{Call, Effect, IoPath, KernelFaults, refuse_enter, refused_enters};
use crate::medium::Medium;
use crate::rng::Rng;
use crate::{CacheMode, Dispatch, File, HangUp, IoBuf, IoEngine, OpenOptions, Want, rt};
use crate::{Listener, Socket, SocketAddress};
use std::future::Future;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

const BLOCK: usize = 4096;
const FOREVER: u32 = u32::MAX;
/// Nothing here takes that long, and nothing may hang.
const LIMIT: Duration = Duration::from_secs(60);

/// The ways by which a file's operations reach the kernel.
const WAYS: [(IoEngine, IoPath); 2] = [(IoEngine::IoUring, IoPath::Ring), (IoEngine::Threads, IoPath::Thread)];

fn folder() -> tempfile::TempDir {
    // A real disk: memory has no direct I/O everywhere.
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/tmp");
    std::fs::create_dir_all(&folder).expect("a folder");
    tempfile::tempdir_in(folder).expect("a folder")
}

/// A file without the page cache where `direct`, so that the ring has all of its operations.
fn open(path: &Path, engine: IoEngine, direct: bool) -> File {
    let cache = CacheMode { direct, ..CacheMode::default() };
    File::open(path, &OpenOptions { write: true, engine, cache, ..OpenOptions::default() }).expect("it opens")
}

fn descriptor(file: &File) -> BorrowedFd<'_> {
    match file.medium() {
        Medium::Host(host) => host.as_fd(),
        _ => panic!("a file of this machine"),
    }
}

/// Runs on an executor of its own; a wait that has no end is a failure.
fn run<T>(work: impl Future<Output = T>) -> T {
    rt::Local::system().block_on(async {
        let mut limit = std::pin::pin!(rt::sleep(LIMIT));
        let mut work = std::pin::pin!(work);
        std::future::poll_fn(|context| match work.as_mut().poll(context) {
            Poll::Pending if limit.as_mut().poll(context).is_ready() => panic!("a request never ends"),
            polled => polled,
        })
        .await
    })
}

fn bytes(len: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    Rng::new(seed).fill(&mut bytes);
    bytes
}

/// Writes by one buffer and by several, flushes and reads, and looks at the file itself.
async fn write_flush_and_read(file: &File, path: &Path, seed: u64) {
    let expected = bytes(12 * BLOCK, seed);
    let (one, many) = expected.split_at(8 * BLOCK);
    file.write_at(IoBuf::copy_from(one), 0).await.0.expect("a write");
    let bufs = many.chunks(BLOCK).map(IoBuf::copy_from).collect();
    file.write_vectored_at(bufs, one.len() as u64).await.0.expect("a write of vectors");
    file.sync().await.expect("a flush");
    assert!(std::fs::read(path).expect("the file") == expected, "a write was lost");
    // Behind the end is nothing but zeroes.
    let (result, buf) = file.read_at(IoBuf::copy_from(&[9; 13 * BLOCK]), 0).await;
    result.expect("a read");
    assert!(buf[..expected.len()] == expected && buf[expected.len()..] == [0; BLOCK], "a read is wrong");
    let bufs = (0..3).map(|_| IoBuf::copy_from(&[9; 4 * BLOCK])).collect();
    let (result, bufs) = file.read_vectored_at(bufs, 0).await;
    result.expect("a read of vectors");
    assert!(bufs.iter().flat_map(|buf| buf.iter()).eq(&expected), "a read of vectors is wrong");
}

#[test]
fn transfers_that_the_kernel_cuts_short_are_completed() {
    let folder = folder();
    let path = folder.path().join("image");
    for (engine, way) in WAYS {
        for direct in [false, true] {
            for most in [BLOCK, 2 * BLOCK, 5 * BLOCK] {
                std::fs::write(&path, []).expect("a file");
                let file = open(&path, engine, direct);
                let script = [Call::Read, Call::Write].map(|call| (way, call, Effect::Short(most), FOREVER));
                let faults = KernelFaults::script(descriptor(&file), script.to_vec());
                run(write_flush_and_read(&file, &path, most as u64));
                // With the page cache a ring's thread does whole pages by itself.
                let (reads, writes) = (faults.calls(way, Call::Read), faults.calls(way, Call::Write));
                let least = (12 * BLOCK / most) as u32;
                assert!(!direct || (reads >= 2 * least && writes >= least), "{way:?}: {reads} reads, {writes} writes");
            }
        }
    }
}

#[test]
fn what_the_kernel_gives_back_undone_is_asked_for_again() {
    let folder = folder();
    let path = folder.path().join("image");
    for (engine, way) in WAYS {
        let numbers: &[i32] = match way {
            IoPath::Ring => &[libc::EINTR, libc::EAGAIN, libc::ECANCELED],
            IoPath::Thread => &[libc::EINTR, libc::EAGAIN],
        };
        for &errno in numbers {
            for direct in [false, true] {
                std::fs::write(&path, []).expect("a file");
                let file = open(&path, engine, direct);
                let mut calls = vec![Call::Read, Call::Write, Call::Allocate];
                // The word of a thread's flush counts, unless a signal came.
                if way == IoPath::Ring || errno == libc::EINTR {
                    calls.push(Call::Sync);
                }
                let script = calls.iter().map(|&call| (way, call, Effect::Fail(errno), 6)).collect();
                let faults = KernelFaults::script(descriptor(&file), script);
                run(async {
                    write_flush_and_read(&file, &path, 1).await;
                    file.allocate(0, 64 * BLOCK as u64).await.expect("space");
                    file.punch_hole(0, BLOCK as u64).await.expect("a hole");
                });
                assert!(faults.hits() > 0, "{way:?} {errno}");
            }
        }
    }
}

#[test]
fn endlessly_returned_operation_ends_with_its_error() {
    let folder = folder();
    let path = folder.path().join("image");
    for (engine, way) in WAYS {
        for errno in [libc::EINTR, libc::EAGAIN] {
            std::fs::write(&path, bytes(BLOCK, 5)).expect("a file");
            let file = open(&path, engine, true);
            let calls = [Call::Read, Call::Write, Call::Sync, Call::Allocate];
            let script = [IoPath::Ring, IoPath::Thread]
                .iter()
                .flat_map(|&way| calls.map(|call| (way, call, Effect::Fail(errno), FOREVER)))
                .collect();
            let faults = KernelFaults::script(descriptor(&file), script);
            run(async {
                let error = file.write_at(IoBuf::zeroed(BLOCK), 0).await.0.expect_err("a write");
                assert_eq!(error.errno().0, errno, "{error}");
                let error = file.read_at(IoBuf::zeroed(BLOCK), 0).await.0.expect_err("a read");
                assert_eq!(error.errno().0, errno, "{error}");
                let error = file.allocate(0, BLOCK as u64).await.expect_err("space");
                assert_eq!(error.errno().0, errno, "{error}");
                for _ in 0..2 {
                    assert_eq!(file.sync().await.expect_err("a flush").errno().0, errno);
                }
            });
            assert!(file.poison().is_some(), "a flush that never was counts as failed");
            for (way, call) in [IoPath::Ring, IoPath::Thread].iter().flat_map(|&way| calls.map(|call| (way, call))) {
                let calls = faults.calls(way, call);
                // Pauses of up to 100 ms within 300 ms, after a few attempts at once.
                assert!(calls < 40, "{engine:?} {way:?} {call:?} {errno}: {calls} calls");
            }
            drop(faults);
            assert!(std::fs::read(&path).expect("the file") == bytes(BLOCK, 5), "{way:?}: nothing was written");
        }
    }
}

/// In every case a request ends once, with its data or with an error, and acknowledged data is in the file.
#[test]
fn requests_in_bad_weather_end_with_their_data_or_one_error() {
    let folder = folder();
    let path = folder.path().join("image");
    let mut seen = [0u32; 3];
    for (engine, way) in WAYS {
        for seed in 0..12 {
            const BLOCKS: usize = 24;
            std::fs::write(&path, vec![0; BLOCKS * BLOCK]).expect("a file");
            let file = open(&path, engine, seed % 2 == 0);
            let effects = vec![
                (way, Effect::Short(BLOCK)),
                (way, Effect::Fail(libc::EINTR)),
                (way, Effect::Fail(libc::EAGAIN)),
                (way, Effect::Fail(if way == IoPath::Ring { libc::ECANCELED } else { libc::EINTR })),
                (way, Effect::Fail(libc::EIO)),
                (way, Effect::Fail(libc::ENOMEM)),
            ];
            let faults = KernelFaults::random_faults(descriptor(&file), seed, 40, effects);
            let [done, failed] = run(async {
                let writes = (0..BLOCKS / 2).map(|pair| {
                    let file = file.clone();
                    rt::spawn(async move {
                        let expected = bytes(2 * BLOCK, pair as u64 + 1);
                        let offset = (pair * 2 * BLOCK) as u64;
                        let written = file.write_at(IoBuf::copy_from(&expected), offset).await.0;
                        let (read, buf) = file.read_at(IoBuf::zeroed(2 * BLOCK), offset).await;
                        if let (Ok(()), Ok(())) = (&written, &read) {
                            assert!(buf[..] == expected, "seed {seed}: a read is wrong");
                        }
                        for error in [&written, &read].iter().filter_map(|result| result.as_ref().err()) {
                            assert!([libc::EIO, libc::ENOMEM].contains(&error.errno().0), "seed {seed}: {error}");
                        }
                        (pair, written.is_ok())
                    })
                });
                let mut ends = [0, 0];
                for write in writes.collect::<Vec<_>>() {
                    let (pair, is_written) = write.await;
                    ends[usize::from(!is_written)] += 1;
                    let found = std::fs::read(&path).expect("the file");
                    let found = &found[pair * 2 * BLOCK..][..2 * BLOCK];
                    assert!(!is_written || found == bytes(2 * BLOCK, pair as u64 + 1), "seed {seed}: a write was lost");
                }
                ends
            });
            seen = [seen[0] + done, seen[1] + failed, seen[2] + faults.hits()];
        }
    }
    assert!(seen.iter().all(|&count| count > 20), "done, failed, faults: {seen:?}");
}

#[test]
fn flush_without_a_ring_worker_uses_a_thread() {
    let folder = folder();
    let path = folder.path().join("image");
    std::fs::write(&path, [1; BLOCK]).expect("a file");
    let file = open(&path, IoEngine::IoUring, false);
    let script = vec![
        (IoPath::Ring, Call::Sync, Effect::Fail(libc::ECANCELED), FOREVER),
        (IoPath::Thread, Call::Sync, Effect::Fail(libc::EIO), 1),
    ];
    let faults = KernelFaults::script(descriptor(&file), script);
    run(async {
        // The error of the disk is the one that counts, and it stays.
        for _ in 0..2 {
            assert_eq!(file.sync().await.expect_err("a flush").errno().0, libc::EIO);
        }
    });
    assert_eq!((faults.calls(IoPath::Ring, Call::Sync), faults.calls(IoPath::Thread, Call::Sync)), (1, 1));
}

#[test]
fn refused_submissions_wait_without_a_busy_core_and_lose_nothing() {
    let folder = folder();
    let path = folder.path().join("image");
    for errno in [libc::EAGAIN, libc::EBUSY, libc::ENOMEM, libc::EINTR] {
        std::fs::write(&path, []).expect("a file");
        let file = open(&path, IoEngine::IoUring, true);
        let before = refused_enters();
        // More than the queue has room for, and fewer.
        for range in [0..600u64, 600..610] {
            run(async {
                assert!(rt::current_ring().is_some(), "this test needs io_uring");
                let begin = rt::now();
                refuse_enter(errno, 40);
                let writes = range.map(|block| {
                    let file = file.clone();
                    rt::spawn(async move {
                        let bytes = bytes(BLOCK, block);
                        file.write_at(IoBuf::copy_from(&bytes), block * BLOCK as u64).await.0
                    })
                });
                for write in writes.collect::<Vec<_>>() {
                    write.await.expect("a write");
                }
                // 16 attempts at once, then pauses that double from 50 µs to 10 ms.
                assert!(rt::now() - begin >= Duration::from_millis(150), "{:?}", rt::now() - begin);
            });
        }
        assert_eq!(refused_enters() - before, 80);
        let expected: Vec<u8> = (0..610).flat_map(|block| bytes(BLOCK, block)).collect();
        assert!(std::fs::read(&path).expect("the file") == expected, "{errno}: a write was lost");
    }
}

/// The ring has room for 1,024 completions. The kernel puts the others aside, and they come too.
#[test]
fn more_completions_than_fit_all_arrive() {
    const WAITS: usize = 5000;
    let (near, far) = Socket::pair().expect("sockets");
    let near = Arc::new(near.as_fd().try_clone_to_owned().expect("a descriptor"));
    run(async {
        let ring = rt::current_ring().expect("this test needs io_uring");
        let waits: Vec<_> = (0..WAITS)
            .map(|_| {
                let (ring, near) = (Rc::clone(&ring), Arc::clone(&near));
                rt::spawn(async move { ring.readable(&near).await.0 })
            })
            .collect();
        // Every wait is with the kernel before they all end at once.
        while ring.queued() > 0 || !ring.has_slots(WAITS) {
            rt::yield_now().await;
            ring.poll();
        }
        assert!(far.send_now(&[1]));
        let mut ended = 0;
        for wait in waits {
            assert!(wait.await > 0);
            ended += 1;
        }
        assert_eq!(ended, WAITS);
        assert!(ring.is_idle());
    });
}

#[test]
fn sockets_go_on_where_the_ring_gives_their_operations_up() {
    for errno in [libc::EINTR, libc::EAGAIN, libc::ECANCELED] {
        let (near, far) = Socket::pair().expect("sockets");
        let calls = [Call::Receive, Call::Send, Call::Poll];
        let script: Vec<_> = calls.map(|call| (IoPath::Ring, call, Effect::Fail(errno), 3)).to_vec();
        let faults = [KernelFaults::script(&near, script.clone()), KernelFaults::script(&far, script)];
        run(async {
            let expected = bytes(1 << 20, 3);
            let sent = expected.clone();
            let sender = rt::spawn(async move {
                for part in sent.chunks(1 << 18) {
                    let bufs = vec![IoBuf::copy_from(part)];
                    far.send(bufs, Dispatch::Together).await.0.expect("it is sent");
                }
                far
            });
            // It watches while the others come and go.
            let watched = near.clone();
            let watcher = rt::spawn(async move { watched.hung_up().await });
            for part in expected.chunks(1 << 18) {
                let (result, buf) = near.receive(IoBuf::zeroed(part.len()), Want::All).await;
                assert_eq!(result.expect("it is received"), part.len());
                assert!(buf[..] == *part, "{errno}: bytes are lost or come twice");
            }
            sender.await.shutdown_send();
            assert_eq!(watcher.await, HangUp::End);
            let (result, _) = near.receive(IoBuf::zeroed(1), Want::Some).await;
            assert_eq!(result.expect("the end"), 0);
        });
        assert!(faults.iter().all(|faults| faults.hits() > 2), "{errno}");
    }
}

#[test]
fn a_listener_goes_on_where_the_ring_gives_its_wait_up() {
    let address = SocketAddress::Tcp { host: "127.0.0.1".to_owned(), port: 0 };
    for errno in [libc::EINTR, libc::EAGAIN, libc::ECANCELED] {
        let listener = Listener::bind(&address).expect("it listens").remove(0);
        let faults = KernelFaults::script(&listener, vec![(IoPath::Ring, Call::Poll, Effect::Fail(errno), 3)]);
        run(async {
            let address = listener.address().clone();
            let connecting = rt::spawn(async move {
                // The listener waits by then.
                rt::sleep(Duration::from_millis(20)).await;
                Socket::connect(&address, LIMIT).await
            });
            listener.accept().await.expect("a client");
            connecting.await.expect("a connection");
        });
        assert!(faults.hits() > 0);
    }
}

/// The outcome of operations in flight is unknown, and their memory may not be used again: the process ends.
#[test]
fn a_ring_that_is_forbidden_in_use_ends_the_process() {
    const ROLE: &str = "COWSHED_TEST_FORBIDDEN_RING";
    if std::env::var_os(ROLE).is_some() {
        run(async {
            assert!(rt::current_ring().is_some(), "this test needs io_uring");
            refuse_enter(libc::EPERM, u64::MAX);
            // The process ends before.
            rt::sleep(LIMIT).await;
        });
        return;
    }
    let program = std::env::current_exe().expect("this program");
    let output = std::process::Command::new(program)
        .args(["--exact", "ring::tests::a_ring_that_is_forbidden_in_use_ends_the_process", "--nocapture"])
        .env(ROLE, "1")
        .output()
        .expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{said}");
    assert!(said.contains("io_uring_enter failed, and operations in flight can't be given back"), "{said}");
}
