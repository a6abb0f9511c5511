// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The library face, as a program uses it.

use cowshed::{Disk, ErrorKind, IoBuf, OpenRequest, Queue, ZeroFlags};
use cowshed_testkit::programs::tool;
use futures_util::future::{Either, select};
use std::pin::pin;
use std::task::Poll;

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn image(folder: &tempfile::TempDir, size: &str) -> String {
    let path = folder.path().join("disk.qcow2").to_str().unwrap().to_owned();
    tool("qemu-img", &["create", "-q", "-f", "qcow2", &path, size]);
    path
}

fn writable(path: &str) -> OpenRequest {
    OpenRequest::file(path).format("qcow2").writable(true)
}

#[test]
fn a_disk_goes_to_any_thread() {
    fn any_thread<T: Send + Sync>() {}
    any_thread::<Disk>();
}

#[test]
fn blocking_calls_read_write_and_map() {
    let folder = folder();
    let path = image(&folder, "4M");
    let disk = Disk::open(writable(&path)).unwrap();
    assert_eq!((disk.driver(), disk.size(), disk.is_read_only()), ("qcow2", 4 << 20, false));
    let blocking = disk.blocking();
    blocking.write(1_000_000, &[7; 100_000]).unwrap();
    blocking.write_zeroes(1_050_000, 1000, ZeroFlags::default()).unwrap();
    blocking.flush().unwrap();
    let mut bytes = vec![0; 100_002];
    blocking.read(999_999, &mut bytes).unwrap();
    assert_eq!((bytes[0], bytes[1], bytes[100_000], bytes[100_001]), (0, 7, 7, 0));
    assert_eq!((bytes[50_000], bytes[50_001], bytes[51_000], bytes[51_001]), (7, 0, 0, 7));
    let runs = blocking.map(0, disk.size()).unwrap();
    assert_eq!(runs.iter().map(|run| run.len).sum::<u64>(), disk.size());
    assert!(runs.iter().any(|run| run.data && run.start <= 1_000_000 && run.start + run.len > 1_000_000));
    blocking.discard(0, 4 << 20).unwrap();
    assert!(blocking.map(0, 4 << 20).unwrap().iter().all(|run| run.zero && !run.data));
    assert_eq!(blocking.read(4 << 20, &mut [0]).unwrap_err().kind(), ErrorKind::InvalidArgument);
    disk.close().unwrap();
    tool("qemu-img", &["check", "-q", &path]);
}

#[test]
fn many_threads_share_a_disk() {
    const THREADS: u64 = 4;
    const PIECES: u64 = 64;
    const PIECE: u64 = 24 << 10;
    let folder = folder();
    let path = image(&folder, "16M");
    let disk = Disk::open(writable(&path)).unwrap();
    let threads: Vec<_> = (0..THREADS)
        .map(|thread| {
            let disk = disk.clone();
            std::thread::spawn(move || {
                let queue = disk.queue();
                cowshed::block_on(async {
                    let tasks: Vec<_> = (0..PIECES)
                        .map(|piece| {
                            let queue = queue.clone();
                            let at = (piece * THREADS + thread) * PIECE;
                            let byte = (piece * THREADS + thread) as u8;
                            cowshed::spawn(async move {
                                queue.write(at, IoBuf::copy_from(&vec![byte; PIECE as usize])).await.0
                            })
                        })
                        .collect();
                    for task in tasks {
                        task.await.unwrap();
                    }
                    queue.flush().await.unwrap();
                });
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    let mut bytes = vec![0; (THREADS * PIECES * PIECE) as usize];
    disk.blocking().read(0, &mut bytes).unwrap();
    for (number, piece) in bytes.chunks(PIECE as usize).enumerate() {
        assert!(piece.iter().all(|&byte| byte == number as u8), "piece {number}");
    }
    disk.close().unwrap();
    tool("qemu-img", &["check", "-q", &path]);
}

#[test]
fn a_closed_disk_answers_with_errors() {
    let folder = folder();
    let path = image(&folder, "1M");
    let disk = Disk::open(writable(&path)).unwrap();
    let other = disk.clone();
    disk.close().unwrap();
    assert_eq!(other.blocking().write(0, b"x").unwrap_err().kind(), ErrorKind::InvalidArgument);
    assert!(other.blocking().flush().is_err());
    // Its locks are gone, though `other` is still there.
    Disk::open(writable(&path)).unwrap().close().unwrap();
}

/// Ready at its poll number `polls`.
async fn turns(polls: u32) {
    let mut left = polls;
    std::future::poll_fn(|context| {
        if left == 0 {
            return Poll::Ready(());
        }
        left -= 1;
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

const DROPPED: u64 = 512 << 10;

/// One round: a write is dropped after some turns, its place is given back, and others get new clusters. True when it was dropped.
async fn drop_a_write(queue: &Queue, round: u64) -> bool {
    let at = round % 8 * DROPPED;
    // More than a thread writes to the page cache by itself.
    let write = Box::pin(queue.write(at, IoBuf::copy_from(&vec![0xdd; DROPPED as usize])));
    let dropped = matches!(select(pin!(turns((round % 5) as u32)), write).await, Either::Left(_));
    queue.discard(at, DROPPED).await.unwrap();
    queue.flush().await.unwrap();
    let kept = (8 + round) * DROPPED;
    queue.write(kept, IoBuf::copy_from(&vec![round as u8; DROPPED as usize])).await.0.unwrap();
    dropped
}

#[test]
fn requests_that_a_select_drops_harm_nothing() {
    const ROUNDS: u64 = 40;
    for cache in ["writeback", "none"] {
        let folder = folder();
        let path = image(&folder, "32M");
        let disk = Disk::open(writable(&path).cache(cache).unwrap()).unwrap();
        let queue = disk.queue();
        let mut dropped = 0;
        for round in 0..ROUNDS {
            dropped += u64::from(cowshed::block_on(drop_a_write(&queue, round)));
        }
        assert!(dropped >= ROUNDS / 5, "no write was dropped");
        let mut bytes = vec![0; DROPPED as usize];
        for round in 0..ROUNDS {
            disk.blocking().read((8 + round) * DROPPED, &mut bytes).unwrap();
            assert!(bytes.iter().all(|&byte| byte == round as u8), "cache={cache}: round {round}");
        }
        for place in 0..8 {
            disk.blocking().read(place * DROPPED, &mut bytes).unwrap();
            let known = |sector: &[u8]| [0, 0xdd].iter().any(|byte| sector.iter().all(|found| found == byte));
            assert!(bytes.chunks(512).all(known), "cache={cache}: place {place}");
        }
        disk.close().unwrap();
        tool("qemu-img", &["check", "-q", &path]);
    }
}

#[test]
fn a_close_waits_for_what_was_dropped() {
    let folder = folder();
    let path = image(&folder, "32M");
    for round in 0..20 {
        let disk = Disk::open(writable(&path)).unwrap();
        cowshed::block_on(async {
            let queue = disk.queue();
            let write = Box::pin(queue.write(round * DROPPED, IoBuf::copy_from(&vec![0xdd; DROPPED as usize])));
            drop(select(pin!(turns((round % 5) as u32)), write).await);
            disk.clone().close_async().await.unwrap();
        });
        tool("qemu-img", &["check", "-q", &path]);
    }
}
