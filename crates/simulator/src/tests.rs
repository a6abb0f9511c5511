// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The promises of the simulated disk, and its freedoms.

use super::*;
use cowshed_storage::{IoBuf, OpenOptions};
use cowshed_types::Errno;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};
use std::time::Duration;

fn world(seed: u64, bytes: &[u8]) -> World {
    let world = World::new(Config::new(seed));
    world.add_file("a", PageMap::from_bytes(bytes));
    world
}

fn open(world: &World) -> SimFile {
    world.open("a", &OpenOptions { write: true, ..OpenOptions::default() }).unwrap()
}

async fn write(file: &SimFile, offset: u64, bytes: &[u8]) -> Result<usize, Errno> {
    file.write(vec![IoBuf::copy_from(bytes)], offset).await.0
}

/// Everything that a power cut at the end of the log can leave of file `a`, as bytes; `None` without its name.
fn possible(world: &World) -> BTreeSet<Option<Vec<u8>>> {
    let trace = world.trace();
    let mut replay = Replay::new(&trace);
    while replay.advance().is_some() {}
    let cut = replay.cut();
    let counts: Vec<usize> = cut.changes().iter().map(|change| change.atoms(cut.sector_bytes()).len()).collect();
    let total: usize = counts.iter().sum();
    assert!(total < 16, "{total} parts are too many to try");
    let mut states = BTreeSet::new();
    for bits in 0u32..1 << total {
        let mut bit = 0;
        let mut part = || {
            bit += 1;
            bits >> (bit - 1) & 1 == 1
        };
        let choices: Vec<Choice> =
            counts.iter().map(|count| Choice::Parts((0..*count).map(|_| part()).collect())).collect();
        states.insert(cut.state(&choices).files.get("a").map(PageMap::to_vec));
    }
    states
}

fn sectors(values: &[u8]) -> Option<Vec<u8>> {
    Some(values.iter().flat_map(|value| [*value; 512]).collect())
}

#[test]
fn a_barrier_covers_what_ended_before_it_began() {
    let world = world(1, &[0; 1024]);
    let file = open(&world);
    world.run(async {
        write(&file, 0, &[1; 1024]).await.unwrap();
        file.sync().await.unwrap();
        assert_eq!(possible(&world), [sectors(&[1, 1])].into());
        write(&file, 0, &[2; 1024]).await.unwrap();
        let torn = [sectors(&[1, 1]), sectors(&[1, 2]), sectors(&[2, 1]), sectors(&[2, 2])];
        assert_eq!(possible(&world), torn.clone().into());
        // Two barriers, one of which was issued before the write had ended.
        let mut early = Box::pin(file.sync());
        let mut late_write = Box::pin(write(&file, 0, &[3; 512]));
        let _ = futures_util::join!(&mut early, &mut late_write);
        assert_eq!(possible(&world), [sectors(&[2, 2]), sectors(&[3, 2])].into());
    });
}

#[test]
fn a_sector_never_goes_back_behind_a_part_of_itself() {
    let world = world(2, &[0; 512]);
    let file = open(&world);
    world.run(async {
        write(&file, 0, &[1; 100]).await.unwrap();
        write(&file, 200, &[2; 100]).await.unwrap();
    });
    let first = [[1; 100].as_slice(), &[0; 412]].concat();
    let both = [[1; 100].as_slice(), &[0; 100], &[2; 100], &[0; 212]].concat();
    // The page cache writes whole sectors: the second write never arrives without the first.
    assert_eq!(possible(&world), [Some(vec![0; 512]), Some(first), Some(both)].into());
}

#[test]
fn growth_and_truncation_are_changes_of_their_own() {
    let world = world(3, &[7; 512]);
    let file = open(&world);
    world.run(async {
        write(&file, 512, &[8; 512]).await.unwrap();
        assert_eq!(possible(&world), [sectors(&[7]), sectors(&[7, 0]), sectors(&[7, 8])].into());
        file.sync().await.unwrap();
        file.set_len(512).await.unwrap();
        assert_eq!(possible(&world), [sectors(&[7, 8]), sectors(&[7])].into());
        file.sync().await.unwrap();
        file.allocate(0, 1024).await.unwrap();
        file.sync().await.unwrap();
        file.punch_hole(0, 512).await.unwrap();
        assert_eq!(possible(&world), [sectors(&[7, 0]), sectors(&[0, 0])].into());
    });
}

#[test]
fn what_a_failed_barrier_dropped_stays_in_doubt() {
    let world = world(4, &[0; 1024]);
    world.add_fault(Fault::new(Effect::Fail(Errno::EIO)).kind(OpKind::Sync));
    let file = open(&world);
    world.run(async {
        write(&file, 0, &[1; 512]).await.unwrap();
        assert_eq!(file.sync().await, Err(Errno::EIO));
        assert_eq!(file.sync().await, Ok(()), "Linux reports it once");
        assert_eq!(possible(&world), [sectors(&[0, 0]), sectors(&[1, 0])].into());
        write(&file, 0, &[2; 512]).await.unwrap();
        file.sync().await.unwrap();
        assert_eq!(possible(&world), [sectors(&[2, 0])].into(), "written again, it is there");
    });
    assert_eq!(world.fault_hits(), 1);
}

#[test]
fn what_is_under_way_may_be_there_in_part() {
    let world = world(5, &[0; 1024]);
    world.add_fault(Fault::new(Effect::Delay(Duration::from_secs(1))).kind(OpKind::Write));
    let file = open(&world);
    world.run(async {
        let mut slow = Box::pin(write(&file, 0, &[1; 1024]));
        assert!(futures_util::poll!(&mut slow).is_pending());
        file.sync().await.unwrap();
        let torn = [sectors(&[0, 0]), sectors(&[0, 1]), sectors(&[1, 0]), sectors(&[1, 1])];
        assert_eq!(possible(&world), torn.into());
        assert_eq!(slow.await, Ok(1024));
    });
    assert!(world.now() >= Duration::from_secs(1));
}

#[test]
fn a_new_name_needs_a_barrier() {
    for covers in [true, false] {
        let world = World::new(Config { sync_covers_name: covers, ..Config::new(6) });
        world.run(async {
            let options = OpenOptions { write: true, create: true, ..OpenOptions::default() };
            assert_eq!(world.open("a", &OpenOptions::default()).unwrap_err().errno(), Errno::ENOENT);
            let file = world.open("a", &options).unwrap();
            write(&file, 0, &[1; 512]).await.unwrap();
            file.sync().await.unwrap();
            let doubt = if covers { None } else { Some(None) };
            assert_eq!(possible(&world), doubt.into_iter().chain([sectors(&[1])]).collect());
            world.sync_folder();
            assert_eq!(possible(&world), [sectors(&[1])].into());
        });
    }
}

#[test]
fn a_full_disk_writes_what_fits() {
    let world = world(7, &[]);
    world.set_capacity(Some(2 * PAGE_BYTES));
    let file = open(&world);
    world.run(async {
        assert_eq!(write(&file, 0, &[1; 3 * PAGE_BYTES as usize]).await, Ok(2 * PAGE_BYTES as usize));
        assert_eq!(write(&file, 2 * PAGE_BYTES, &[1]).await, Err(Errno::ENOSPC));
        assert_eq!(write(&file, 0, &[2; PAGE_BYTES as usize]).await, Ok(PAGE_BYTES as usize));
        file.punch_hole(0, PAGE_BYTES).await.unwrap();
        assert_eq!(write(&file, 2 * PAGE_BYTES, &[1]).await, Ok(1));
    });
}

#[test]
fn faults_hit_where_they_are_told_to() {
    let world = world(8, &[0; 4096]);
    world.add_fault(Fault::new(Effect::Fail(Errno::EIO)).kind(OpKind::Read).range(1024..1536).skip(1));
    world.add_fault(Fault::new(Effect::Torn(Errno::EIO)).kind(OpKind::Write));
    let file = open(&world);
    world.run(async {
        let read = async |offset| file.read(IoBuf::zeroed(512), offset).await.0;
        assert_eq!((read(1024).await, read(0).await, read(1400).await), (Ok(512), Ok(512), Err(Errno::EIO)));
        assert_eq!(write(&file, 0, &[1; 4096]).await, Err(Errno::EIO));
        let after = world.contents("a").unwrap().to_vec();
        let written = after.chunks(512).filter(|sector| sector.iter().all(|byte| *byte == 1)).count();
        assert!((1..8).contains(&written), "{written} of 8 sectors were written");
    });
}

#[test]
fn direct_io_wants_alignment() {
    let world = World::new(Config { direct: true, sector_bytes: 4096, ..Config::new(9) });
    world.add_file("a", PageMap::with_len(8192));
    let file = open(&world);
    assert_eq!(file.alignment().offset, 4096);
    world.run(async {
        assert_eq!(write(&file, 512, &[1; 4096]).await, Err(Errno::EINVAL));
        assert_eq!(write(&file, 4096, &[1; 512]).await, Err(Errno::EINVAL));
        assert_eq!(write(&file, 4096, &[1; 4096]).await, Ok(4096));
    });
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let run = |seed| {
        let world = world(seed, &[0; 65536]);
        world.run(async {
            let tasks: Vec<_> = (0..8u8)
                .map(|task| {
                    let (world, file) = (world.clone(), open(&world));
                    cowshed_storage::rt::spawn(async move {
                        for round in 0..10u64 {
                            write(&file, round * 512, &[task; 2048]).await.unwrap();
                            // Simulated time: timers are a part of the run.
                            cowshed_storage::rt::sleep(Duration::from_micros(u64::from(task) * 10)).await;
                            if round % 4 == 0 {
                                file.sync().await.unwrap();
                            }
                        }
                        world.now()
                    })
                })
                .collect();
            for task in tasks {
                task.await;
            }
        });
        (format!("{:?}", world.trace().log), world.contents("a").unwrap().hash(), world.now())
    };
    assert!(run(1) == run(1));
    assert!(run(1) != run(2));
}

#[test]
#[should_panic(expected = "nothing can wake")]
fn a_deadlock_is_told() {
    world(1, &[]).run(std::future::pending::<()>());
}

/// Three queues that write and note their order; returns the notes and the contents.
fn run_three_queues(seed: u64) -> (Vec<u64>, PageMap) {
    let world = world(seed, &[0; 4096]);
    let order = Arc::new(Mutex::new(Vec::new()));
    let queue = |number: u64| {
        let (file, order) = (open(&world), Arc::clone(&order));
        let start: QueueStart<'_> = Box::new(move || {
            Box::pin(async move {
                for round in 0..4 {
                    write(&file, number * 1024 + round * 16, &[number as u8 + 1; 16]).await.unwrap();
                    order.lock().unwrap().push(number);
                    interleave();
                }
                file.sync().await.unwrap();
            })
        });
        start
    };
    world.run_queues(seed, (0..3).map(queue).collect());
    let order = order.lock().unwrap().clone();
    (order, world.contents("a").unwrap())
}

#[test]
fn queues_run_in_an_order_that_follows_from_the_seed() {
    let mut orders = BTreeSet::new();
    for seed in 0..12 {
        let (order, contents) = run_three_queues(seed);
        let (again, same) = run_three_queues(seed);
        assert_eq!((&order, contents.hash()), (&again, same.hash()), "seed {seed}");
        assert_eq!(order.len(), 12);
        orders.insert(order);
    }
    assert!(orders.len() > 8, "{} orders of 12 seeds", orders.len());
}

#[test]
fn queues_wake_each_other_and_share_the_clock() {
    for seed in 0..8 {
        let world = world(seed, &[0; 512]);
        let letter: Arc<Mutex<(Option<Duration>, Option<Waker>)>> = Arc::default();
        let (sender, receiver) = (Arc::clone(&letter), letter);
        let (early, late) = (world.clone(), world.clone());
        let sends: QueueStart<'_> = Box::new(move || {
            Box::pin(async move {
                // Simulated time, which both queues see pass.
                cowshed_storage::rt::sleep(Duration::from_millis(5)).await;
                let mut letter = sender.lock().unwrap();
                letter.0 = Some(early.now());
                if let Some(waker) = letter.1.take() {
                    waker.wake();
                }
            })
        });
        let receives: QueueStart<'_> = Box::new(move || {
            Box::pin(async move {
                let sent = std::future::poll_fn(|context| {
                    let mut letter = receiver.lock().unwrap();
                    letter.1 = Some(context.waker().clone());
                    letter.0.map_or(Poll::Pending, Poll::Ready)
                })
                .await;
                assert!(sent >= Duration::from_millis(5) && sent <= late.now());
            })
        });
        world.run_queues(seed, vec![sends, receives]);
    }
}

#[test]
fn the_panic_of_a_queue_ends_all_of_them() {
    let world = world(9, &[0; 512]);
    let waits: QueueStart<'_> = Box::new(|| Box::pin(std::future::pending()));
    let panics: QueueStart<'_> = Box::new(|| {
        Box::pin(async {
            // The other queue waits by then.
            cowshed_storage::rt::sleep(Duration::from_millis(1)).await;
            panic!("this one");
        })
    });
    let run = std::panic::AssertUnwindSafe(|| world.run_queues(1, vec![waits, panics]));
    let payload = std::panic::catch_unwind(run).unwrap_err();
    assert_eq!(payload.downcast_ref::<&str>(), Some(&"this one"));
    let waits: QueueStart<'_> = Box::new(|| Box::pin(std::future::pending()));
    let run = std::panic::AssertUnwindSafe(|| world.run_queues(1, vec![waits]));
    let payload = std::panic::catch_unwind(run).unwrap_err();
    assert!(payload.downcast_ref::<String>().is_some_and(|text| text.contains("nothing can wake")));
}
