// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Power cuts on the real engine: images of every kind and several streams of requests. Each resulting disk is audited,
//! opened and read, some are given to the real `qemu-img`. `COWSHED_SEED=N` runs one case, `COWSHED_SEEDS=A..B` a
//! range. For long runs: `cargo run -p cowshed-testkit --example crash`.

use cowshed_simulator::{Effect, Fault, OpKind};
use cowshed_testkit::matrix::{CrashScene, Effort};
use cowshed_testkit::random::seeds;
use cowshed_testkit::tally::Tally;
use cowshed_types::Errno;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

fn run_all(seeds: std::ops::Range<u64>, effort: &Effort, faults: impl Fn(u64) -> Vec<Fault>) -> Tally {
    let (mut tally, mut failures) = (Tally::default(), Vec::new());
    for seed in seeds {
        let scene = CrashScene::new(seed);
        match scene.run(effort, faults(seed)) {
            Ok(report) => tally.add(&scene, &report),
            Err(complaint) => failures.push(complaint),
        }
        if failures.len() == 2 {
            // More of them show no more, and each is shrunk.
            break;
        }
    }
    println!("{tally}");
    assert!(failures.is_empty(), "{} cases failed:\n{}", failures.len(), failures.join("\n\n"));
    tally
}

#[test]
fn no_power_cut_harms_an_image() {
    let effort = Effort { requests: 30, states: 250, sample_qemu: 100, room_bytes: None };
    let cases = seeds(32);
    let count = cases.end - cases.start;
    let tally = run_all(cases, &effort, |_| Vec::new());
    assert!(tally.total.distinct() > 40 * count, "too few states to mean anything: {}", tally.total);
}

#[test]
fn no_power_cut_harms_an_image_behind_a_filter() {
    let effort = Effort { requests: 30, states: 150, sample_qemu: 75, room_bytes: None };
    let (mut tally, mut count) = (Tally::default(), 0);
    for seed in seeds(16) {
        let scene = CrashScene::new(seed).behind_a_filter();
        match scene.run(&effort, Vec::new()) {
            Ok(report) => tally.add(&scene, &report),
            Err(complaint) => panic!("{complaint}"),
        }
        count += 1;
    }
    println!("{tally}");
    assert!(tally.total.distinct() > 30 * count, "too few states to mean anything: {}", tally.total);
}

#[test]
fn power_cut_harms_no_image_with_adopted_blocks() {
    let effort = Effort { requests: 30, states: 150, sample_qemu: 75, room_bytes: None };
    let (mut tally, mut count, shared) = (Tally::default(), 0, Arc::new(AtomicU64::new(0)));
    for seed in seeds(16) {
        let scene = CrashScene::new(seed).sharing(Arc::clone(&shared));
        match scene.run(&effort, Vec::new()) {
            Ok(report) => tally.add(&scene, &report),
            Err(complaint) => panic!("{complaint}"),
        }
        count += 1;
    }
    println!("{tally}, {shared:?} bytes shared");
    assert!(tally.total.distinct() > 30 * count, "too few states to mean anything: {}", tally.total);
    assert!(shared.load(Relaxed) > count * (16 << 10), "too little was shared: {shared:?}");
}

#[test]
fn no_failed_sharing_harms_an_image() {
    let effort = Effort { requests: 30, states: 60, sample_qemu: 60, room_bytes: None };
    let shared = Arc::new(AtomicU64::new(0));
    for seed in seeds(8) {
        let effect = [Effect::Fail(Errno::EIO), Effect::Torn(Errno::EIO), Effect::Fail(Errno::ENOSPC)];
        let faults = vec![Fault::new(effect[seed as usize % 3]).kind(OpKind::CopyRange).skip(seed % 4)];
        if let Err(complaint) = CrashScene::new(seed).sharing(Arc::clone(&shared)).run(&effort, faults) {
            panic!("{complaint}");
        }
    }
    assert!(shared.load(Relaxed) > 0, "nothing was shared");
}

#[test]
fn no_power_cut_after_a_failed_barrier_harms_an_image() {
    let effort = Effort { requests: 30, states: 120, sample_qemu: 60, room_bytes: None };
    run_all(seeds(16), &effort, |seed| {
        vec![Fault::new(Effect::Fail(Errno::EIO)).kind(OpKind::Sync).skip(seed / 2 % 8)]
    });
}

#[test]
fn no_failed_write_harms_an_image() {
    let effort = Effort { requests: 30, states: 120, sample_qemu: 60, room_bytes: None };
    run_all(seeds(24), &effort, |seed| {
        let effect = [Effect::Fail(Errno::EIO), Effect::Torn(Errno::EIO), Effect::Fail(Errno::ENOSPC)];
        vec![Fault::new(effect[seed as usize % 3]).kind(OpKind::Write).skip(seed * 7 % 50)]
    });
}

#[test]
fn no_failed_read_harms_an_image() {
    let effort = Effort { requests: 30, states: 60, sample_qemu: 60, room_bytes: None };
    run_all(seeds(12), &effort, |seed| {
        vec![Fault::new(Effect::Fail(Errno::EIO)).kind(OpKind::Read).skip(seed * 5 % 40)]
    });
}

#[test]
fn no_power_cut_harms_an_image_on_a_device() {
    let effort = Effort { requests: 30, states: 150, sample_qemu: 75, room_bytes: None };
    let (mut tally, mut count) = (Tally::default(), 0);
    for scene in seeds(32).filter_map(|seed| CrashScene::new(seed).on_a_device()) {
        match scene.run(&effort, Vec::new()) {
            Ok(report) => tally.add(&scene, &report),
            Err(complaint) => panic!("{complaint}"),
        }
        count += 1;
    }
    println!("{tally}");
    assert!(tally.total.distinct() > 30 * count, "too few states to mean anything: {}", tally.total);
}

#[test]
fn no_full_device_harms_an_image() {
    for room_bytes in [0, 1536, 8192, 65536, 300_000] {
        let effort = Effort { requests: 30, states: 60, sample_qemu: 60, room_bytes: Some(room_bytes) };
        for scene in seeds(12).filter_map(|seed| CrashScene::new(seed).on_a_device()) {
            if let Err(complaint) = scene.run(&effort, Vec::new()) {
                panic!("{room_bytes} bytes of room: {complaint}");
            }
        }
    }
}

#[test]
fn no_full_disk_harms_an_image() {
    for room_bytes in [0, 8192, 65536] {
        let effort = Effort { requests: 30, states: 60, sample_qemu: 60, room_bytes: Some(room_bytes) };
        run_all(seeds(8), &effort, |_| Vec::new());
    }
}
