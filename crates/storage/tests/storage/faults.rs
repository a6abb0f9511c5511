// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `File` on a simulated machine: failures, short transfers, and the order of operations under direct I/O.

use cowshed_simulator::{Config, Effect, Fault, OpKind, Rng, World};
use cowshed_storage::rt::{sleep, spawn, yield_now};
use cowshed_storage::{File, IoBuf, OpenOptions};
use cowshed_types::{Errno, ErrorKind};
use futures_util::future::{join, join_all};
use std::path::Path;
use std::time::Duration;

fn create() -> File {
    let options = OpenOptions { write: true, create: true, ..OpenOptions::default() };
    File::open(Path::new("image"), &options).expect("open")
}

async fn write(file: &File, bytes: &[u8], offset: u64) -> cowshed_types::Result<()> {
    file.write_at(IoBuf::copy_from(bytes), offset).await.0
}

async fn read(file: &File, len: usize, offset: u64) -> Vec<u8> {
    let (result, buf) = file.read_at(IoBuf::zeroed(len), offset).await;
    result.expect("read");
    buf.to_vec()
}

fn failing_sync() -> Fault {
    Fault::new(Effect::Fail(Errno::EIO)).kind(OpKind::Sync)
}

#[test]
fn the_first_failed_sync_poisons_the_file() {
    let world = World::new(Config::new(1));
    world.run(async {
        let file = create();
        write(&file, &[1; 8192], 0).await.expect("write");
        file.sync().await.expect("sync");
        world.add_fault(failing_sync());
        let first = file.sync().await.expect_err("fault");
        assert_eq!((first.errno(), first.kind()), (Errno::EIO, ErrorKind::Io));
        assert_eq!(first.to_string(), "image: could not flush: Input/output error");
        // The system would now report success.
        for _ in 0..3 {
            assert_eq!(file.sync().await.expect_err("poisoned").to_string(), first.to_string());
        }
        assert_eq!(file.poison().expect("poison").to_string(), first.to_string());
        write(&file, &[2; 4096], 4096).await.expect("in place");
        for error in [
            write(&file, &[2; 4096], 4097).await.expect_err("grows"),
            file.set_len(10_000).await.expect_err("grows"),
            file.allocate(8000, 1000).await.expect_err("grows"),
            file.zero_range(8000, 1000).await.expect_err("grows"),
        ] {
            assert_eq!(error.to_string(), first.to_string());
        }
        file.set_len(4096).await.expect("shrinks");
        let again =
            File::open(Path::new("image"), &OpenOptions { write: true, ..OpenOptions::default() }).expect("open");
        write(&again, &[2; 4096], 8192).await.expect("a new open file");
        again.sync().await.expect("a new open file");
    });
}

#[test]
fn no_flush_succeeds_after_a_failure() {
    for seed in 0..50 {
        let world = World::new(Config::new(seed));
        world.run(async {
            let file = create();
            world.add_fault(failing_sync().skip(seed % 4));
            let tasks = (0..12u64).map(|task| {
                let file = file.clone();
                spawn(async move {
                    let mut results = Vec::new();
                    for step in 0..3 {
                        write(&file, &[1; 512], task * 512).await.unwrap_or_else(|error| {
                            assert_eq!((error.errno(), file.poison().is_some()), (Errno::EIO, true));
                        });
                        // Simulated time, which spreads the syncs.
                        sleep(Duration::from_nanos(task * step * 1000)).await;
                        let poisoned = file.poison().is_some();
                        results.push((poisoned, file.sync().await.is_ok()));
                    }
                    results
                })
            });
            for results in join_all(tasks).await {
                for (poisoned, succeeded) in &results {
                    assert!(!(*poisoned && *succeeded), "seed {seed}: {results:?}");
                }
                assert!(results.is_sorted_by_key(|(_, succeeded)| !succeeded), "seed {seed}: {results:?}");
            }
            assert!(file.poison().is_some());
        });
    }
}

#[test]
fn a_failure_without_a_waiter_is_remembered() {
    let world = World::new(Config::new(3));
    world.run(async {
        let file = create();
        world.add_fault(failing_sync());
        {
            let mut sync = Box::pin(file.sync());
            assert!(futures_util::poll!(&mut sync).is_pending());
        }
        assert_eq!(file.sync().await.expect_err("poisoned").errno(), Errno::EIO);
    });
}

#[test]
fn flush_during_a_flush_is_another_one() {
    let world = World::new(Config::new(4));
    world.run(async {
        let file = create();
        let (first, _) = join(file.sync(), async {
            yield_now().await;
            write(&file, &[5; 512], 0).await.expect("write");
            file.sync().await.expect("sync");
        })
        .await;
        first.expect("sync");
        let many: Vec<_> = (0..100).map(|_| file.sync()).collect();
        join_all(many).await.into_iter().for_each(|result| result.expect("sync"));
    });
    let syncs = format!("{:?}", world.trace()).matches("Sync").count();
    assert!(syncs < 20, "{syncs} flushes for 102 requests");
}

#[test]
fn short_transfers_are_continued() {
    for direct in [false, true] {
        let world = World::new(Config { direct, ..Config::new(5) });
        world.add_fault(Fault::new(Effect::Short(1)).kind(OpKind::Read).times(u64::MAX).per_mille(700));
        world.add_fault(Fault::new(Effect::Short(1)).kind(OpKind::Write).times(u64::MAX).per_mille(700));
        world.run(async {
            let file = create();
            let bytes: Vec<u8> = (0..3000u32).map(|value| (value * 7) as u8).collect();
            write(&file, &bytes, 100).await.expect("write");
            let parts = bytes.chunks(512).map(IoBuf::copy_from).collect();
            file.write_vectored_at(parts, 4096).await.0.expect("write");
            assert_eq!(file.len(), 7096);
            assert_eq!(read(&file, 3200, 0).await, [&[0; 100][..], &bytes, &[0; 100]].concat());
            let parts = (0..6).map(|_| IoBuf::zeroed(600)).collect();
            let (result, parts) = file.read_vectored_at(parts, 4096).await;
            result.expect("read");
            let joined: Vec<u8> = parts.iter().flat_map(|part| part.to_vec()).collect();
            assert!(joined[..3000] == bytes && joined[3000..] == [0; 600]);
        });
    }
}

#[test]
fn errors_name_the_file_and_the_offset() {
    let world = World::new(Config::new(6));
    world.run(async {
        let file = create();
        for (kind, doing) in [(OpKind::Write, "could not write"), (OpKind::Read, "could not read")] {
            world.add_fault(Fault::new(Effect::Fail(Errno::EIO)).kind(kind));
            let error = match kind {
                OpKind::Write => write(&file, &[1; 10], 4096).await.expect_err("fault"),
                _ => file.read_at(IoBuf::zeroed(10), 4096).await.0.expect_err("fault"),
            };
            assert_eq!(error.to_string(), format!("image: {doing}: Input/output error (at offset 0x1000)"));
        }
    });
    let options = OpenOptions::default();
    let error = world.run(async { File::open(Path::new("nowhere"), &options).expect_err("missing") });
    assert_eq!(error.to_string(), "nowhere: could not open: No such file or directory");
}

/// Writers that never overlap, of ranges that never fit the blocks, beside a task that shrinks and grows the end.
async fn crowd(seed: u64) {
    const SLOTS: usize = 24;
    let file = create();
    let mut random = Rng::new(seed);
    let mut model: Vec<u8> = Vec::new();
    for round in 0..6u8 {
        let size = [37, 300, 512, 1000, 4096, 5000][random.below(6) as usize];
        let mut tasks = Vec::new();
        for slot in 0..SLOTS {
            // Left out by chance, so that the end of the file moves in steps.
            if random.below(3) == 0 {
                continue;
            }
            let len = if random.below(3) == 0 { size } else { 1 + random.below(size as u64) as usize };
            let start = slot * size;
            let zero = random.below(5) == 0;
            let byte = if zero { 0 } else { round * 40 + slot as u8 + 1 };
            model.resize(model.len().max(start + len), 0);
            model[start..start + len].fill(byte);
            let (file, delay) = (file.clone(), random.below(2000));
            tasks.push(spawn(async move {
                // Simulated time, which mixes the order.
                sleep(Duration::from_nanos(delay)).await;
                match zero {
                    true => file.zero_range(start as u64, len as u64).await.expect("zero"),
                    false => write(&file, &vec![byte; len], start as u64).await.expect("write"),
                }
            }));
        }
        join_all(tasks).await;
        assert_eq!(file.len(), model.len() as u64, "seed {seed}, round {round}");
        assert!(read(&file, model.len(), 0).await == model, "seed {seed}, round {round}");
        let keep = random.below(model.len() as u64 + 1) as usize;
        file.set_len(keep as u64).await.expect("set_len");
        model.truncate(keep);
    }
}

#[test]
fn odd_writes_side_by_side_lose_nothing() {
    for sector_bytes in [512, 4096] {
        for direct in [false, true] {
            for seed in 0..60 {
                let config = Config { sector_bytes, direct, ..Config::new(seed) };
                World::new(config).run(crowd(seed));
            }
        }
    }
}

#[test]
fn a_full_disk_is_an_error_and_not_a_loss() {
    for direct in [false, true] {
        let world = World::new(Config { direct, capacity_bytes: Some(1 << 16), ..Config::new(8) });
        world.run(async {
            let file = create();
            write(&file, &[1; 60_000], 0).await.expect("fits");
            let error = write(&file, &[2; 10_000], 60_000).await.expect_err("full");
            assert_eq!((error.kind(), error.errno()), (ErrorKind::NoSpace, Errno::ENOSPC));
            assert!(read(&file, 60_000, 0).await == [1; 60_000]);
            file.sync().await.expect("sync");
        });
    }
}
