// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Slips in the layer of files that would lose a guest's writes, one test each; `src/mutants/files.rs` has the slips.

use cowshed_simulator::{Config, Effect, Fault, OpKind, PageMap, Replay, World};
use cowshed_storage::{CacheMode, File, IoBuf, OpenOptions, Permissions, rt};
use cowshed_testkit::qemu::temp_dir;
use cowshed_types::{Errno, ErrorKind};
use std::path::Path;

const SECTOR: usize = 512;
const EINTR: Errno = Errno(4);

fn world(seed: u64, bytes: &[u8]) -> World {
    let world = World::new(Config::new(seed));
    world.add_file("a", PageMap::from_bytes(bytes));
    world
}

fn open(direct: bool) -> File {
    let cache = CacheMode { direct, ..CacheMode::default() };
    File::open(Path::new("a"), &OpenOptions { write: true, cache, ..OpenOptions::default() }).expect("a file")
}

async fn write(file: &File, offset: u64, bytes: &[u8]) {
    file.write_at(IoBuf::copy_from(bytes), offset).await.0.expect("a write");
}

#[test]
fn a_flush_that_a_signal_interrupts_is_made_again() {
    for seed in 0..16 {
        let world = world(seed, &[0; 4 * SECTOR]);
        world.add_fault(Fault::new(Effect::Fail(EINTR)).kind(OpKind::Sync).file("a").times(2));
        world.run(async {
            let file = open(false);
            write(&file, 0, &[1; 4 * SECTOR]).await;
            file.sync().await.expect("a signal is no error of the disk");
        });
        assert_eq!(world.fault_hits(), 2, "seed {seed}");
        let trace = world.trace();
        let mut replay = Replay::new(&trace);
        while replay.advance().is_some() {}
        assert!(replay.cut().changes().is_empty(), "seed {seed}: flushed, and not on the disk");
    }
}

#[test]
fn what_a_short_write_left_out_is_written() {
    for direct in [false, true] {
        for limit in [1, 3] {
            let world = world(7, &[0; 8 * SECTOR]);
            let limit = limit * SECTOR as u64;
            world.add_fault(Fault::new(Effect::Short(limit)).kind(OpKind::Write).file("a").times(3));
            world.run(async {
                let file = open(direct);
                write(&file, 0, &[5; 6 * SECTOR]).await;
                let bufs = Vec::from([1, 2].map(|byte| IoBuf::copy_from(&[byte; SECTOR])));
                file.write_vectored_at(bufs, 6 * SECTOR as u64).await.0.expect("a write");
            });
            assert!(world.fault_hits() > 1);
            let found = world.contents("a").expect("a file").to_vec();
            let expected = [vec![5; 6 * SECTOR], vec![1; SECTOR], vec![2; SECTOR]].concat();
            assert!(found == expected, "direct: {direct}, {limit} bytes at a time");
        }
    }
}

/// The cut that follows an odd tail must not take bytes that are written behind it meanwhile.
#[test]
fn a_tail_that_grows_keeps_writers_behind_it_waiting() {
    for seed in 0..200 {
        let world = world(seed, &[1; 100]);
        world.run(async {
            let file = open(true);
            let tail = write(&file, 100, &[2; 50]);
            let behind = write(&file, 4096 * 2, &[3; 4096]);
            futures_util::join!(tail, behind);
        });
        let found = world.contents("a").expect("a file").to_vec();
        let expected = [vec![1; 100], vec![2; 50], vec![0; 4096 * 2 - 150], vec![3; 4096]].concat();
        assert!(found == expected, "seed {seed}: {} bytes", found.len());
    }
}

#[test]
fn a_file_that_becomes_writable_keeps_its_locks() {
    let folder = temp_dir();
    let path = folder.path().join("image");
    std::fs::write(&path, [0; 4096]).expect("a file");
    let reader = File::open(&path, &OpenOptions::default()).expect("a file");
    reader.lock(Permissions::READ).expect("no other lock is there");
    rt::block_on(async { reader.make_writable(Permissions::WRITE) }).expect("it may be written");
    let second = File::open(&path, &OpenOptions { write: true, ..OpenOptions::default() }).expect("a file");
    for permissions in [Permissions::READ, Permissions::WRITE] {
        let error = second.lock(permissions).expect_err("the file has a writer");
        assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    }
}
