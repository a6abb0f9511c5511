// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The ways in which qcow2 engines have lost data, each brought about on purpose. The test first makes sure that the
//! dangerous moment has come. Then it cuts the power everywhere around it and holds reads against the model.

use cowshed_image::Preallocation;
use cowshed_simulator::{Change, Config, Effect, Event, Fault, Features, OpKind, PageMap, Trace, World};
use cowshed_storage::{IoBuf, SharedBufs, SharedMemory, rt};
use cowshed_testkit::audit::{audit, host_offset, l2_entry};
use cowshed_testkit::crash::{CrashPlan, explore};
use cowshed_testkit::images::{Chain, Format, Layer, Op, Qcow2Spec, Texture};
use cowshed_testkit::model::COMPRESSIBLE;
use cowshed_testkit::operations::{Op as Request, parse_steps};
use cowshed_testkit::runner::Outcome;
use cowshed_testkit::scenario::{ImageDisk, Prepared, Trial};
use cowshed_types::Errno;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

const COPIED: u64 = 1 << 63;

fn image(cluster_size: u64, size: u64, written: Range<u64>) -> Layer {
    shaped(Qcow2Spec { cluster_size, ..Qcow2Spec::default() }, size, written)
}

fn shaped(spec: Qcow2Spec, size: u64, written: Range<u64>) -> Layer {
    let len = written.end - written.start;
    let write = Op::Write { offset: written.start, len, texture: Texture::Random(size) };
    let sessions = if len > 0 { vec![vec![write]] } else { Vec::new() };
    Layer { format: Format::Qcow2(spec), size, sessions }
}

fn trial(seed: u64, requests: &str) -> Trial {
    Trial {
        config: Config::new(seed),
        faults: Vec::new(),
        options: "",
        steps: parse_steps(requests).expect("the requests are well written"),
        queues: 1,
        plan: CrashPlan { max_distinct: 400, ..CrashPlan::new(seed) },
        sample_qemu: 150,
        amend: "",
        shared: None,
    }
}

struct Run {
    world: World,
    outcome: Outcome,
}

/// Runs the trial and cuts the power everywhere; panics with the fault.
#[track_caller]
fn survives(prepared: &Prepared, trial: &Trial) -> Run {
    let world = prepared.world(trial);
    let outcome = prepared.run(&world, trial).unwrap_or_else(|complaint| panic!("{complaint}"));
    let report = prepared.judge(&world, &outcome, trial).unwrap_or_else(|complaint| panic!("{complaint}"));
    assert!(report.distinct() > 2, "{report}");
    Run { world, outcome }
}

impl Run {
    fn end(&self, prepared: &Prepared) -> PageMap {
        self.world.contents(&prepared.top).expect("the image is there")
    }
}

fn start(prepared: &Prepared) -> &PageMap {
    &prepared.files[&prepared.top]
}

/// Where the host has the guest's cluster `cluster` of the image as it was made, and the range of `count` clusters there.
fn host_range(prepared: &Prepared, cluster: u64, bytes: u64) -> Range<u64> {
    let host = host_offset(l2_entry(start(prepared), cluster));
    assert_ne!(host, 0, "guest cluster {cluster} is not allocated");
    host..host + bytes
}

fn slow(kind: OpKind, range: Range<u64>) -> Fault {
    Fault::new(Effect::Delay(Duration::from_secs(1))).kind(kind).range(range)
}

fn touches(change: &Change, range: &Range<u64>) -> bool {
    let (start, end) = change.range();
    start < range.end && range.start < end
}

/// The changes submitted between submission and end of the first change that touches `range` and suits `kind`; and
/// whether a barrier ended meanwhile.
fn meanwhile(trace: &Trace, range: &Range<u64>, is_kind: fn(&Change) -> bool) -> (Vec<Change>, bool) {
    let first = trace.log.iter().position(
        |event| matches!(event, Event::Submitted { change, .. } if touches(change, range) && is_kind(change)),
    );
    let first = first.expect("the slow operation was submitted");
    let Event::Submitted { op: slow_op, .. } = trace.log[first] else { unreachable!("just found") };
    let mut changes = Vec::new();
    let mut has_barrier = false;
    for event in &trace.log[first + 1..] {
        match event {
            Event::Submitted { change, .. } => changes.push(change.clone()),
            Event::SyncDone { .. } => has_barrier = true,
            Event::Completed { op, .. } if *op == slow_op => return (changes, has_barrier),
            _ => {}
        }
    }
    panic!("the slow operation never ended");
}

fn is_write(change: &Change) -> bool {
    matches!(change, Change::Write { .. })
}

fn is_hole(change: &Change) -> bool {
    matches!(change, Change::Zero { keep_space: false, .. })
}

#[test]
fn metadata_is_never_published_before_its_refcount() {
    // One block counts 256 clusters of 512 bytes: new blocks, new L2 tables, entries of both tables in one flush.
    let prepared = Prepared::new(&Chain { layers: vec![image(512, 512 << 10, 0..0)] });
    let before = audit(start(&prepared)).expect("a good image");
    for seed in 0..3 {
        let trial = trial(seed, "0 write 0x0 0x20000 1; 1 write 0x30000 0x20000 2; 0 flush; 1 write 0x60000 0x10000 3");
        let run = survives(&prepared, &trial);
        let after = audit(&run.end(&prepared)).expect("a good image");
        assert!(after.mapped > before.mapped + 500, "more than one refcount block is needed: {after:?}");
    }
}

#[test]
fn freed_cluster_waits_for_older_writes() {
    let prepared = Prepared::new(&Chain { layers: vec![image(4096, 256 << 10, 0..64 << 10)] });
    let range = host_range(&prepared, 0, 4096);
    let requests = "0 write 0x0 0x1000 1; 1 read 0x8000 0x200; 1 read 0x9000 0x200; 1 discard 0x0 0x1000; 1 flush; \
                    1 flush; 1 write 0x20000 0x3000 2; 1 flush; 1 write 0x24000 0x1000 3; 1 read 0x20000 0x5000";
    for seed in 0..4 {
        let trial = Trial { faults: vec![slow(OpKind::Write, range.clone())], ..trial(seed, requests) };
        let run = survives(&prepared, &trial);
        let (changes, has_barrier) = meanwhile(&run.world.trace(), &range, is_write);
        assert!(has_barrier && changes.iter().any(|change| change.range().1 - change.range().0 == 0x3000));
        assert!(!changes.iter().any(|change| touches(change, &range)), "{changes:?}");
    }
}

#[test]
fn a_cluster_is_not_allocated_again_before_its_hole_is_punched() {
    let prepared = Prepared::new(&Chain { layers: vec![image(4096, 256 << 10, 0..64 << 10)] });
    let range = host_range(&prepared, 0, 4096);
    let reads = "1 read 0x8000 0x200; ".repeat(40);
    let requests = format!(
        "0 discard 0x0 0x4000; 0 flush; {reads} 1 write 0x20000 0x4000 2; 1 write 0x28000 0x1000 3; 1 read 0x20000 0x9000"
    );
    for seed in 0..4 {
        let trial = Trial { faults: vec![slow(OpKind::PunchHole, range.clone())], ..trial(seed, &requests) };
        let run = survives(&prepared, &trial);
        let (changes, _) = meanwhile(&run.world.trace(), &range, is_hole);
        assert!(changes.iter().any(|change| change.range().1 - change.range().0 == 0x4000), "{changes:?}");
        assert!(!changes.iter().any(|change| is_write(change) && touches(change, &range)), "{changes:?}");
    }
}

#[test]
fn cluster_freed_in_two_parts_is_punched_before_reuse() {
    let prepared = Prepared::new(&Chain { layers: vec![image(4096, 256 << 10, 0..64 << 10)] });
    let (one, two) = (COMPRESSIBLE + 1, COMPRESSIBLE + 2);
    // Two compressed clusters in one of the host.
    let first = format!("0 compressed 0x10000 0x1000 {one}; 0 compressed 0x11000 0x1000 {two}; 0 flush; 0 flush");
    let packed = survives(&prepared, &trial(1, &first)).end(&prepared);
    let host = |cluster: u64| l2_entry(&packed, cluster) & ((1 << 58) - 1) & !0xfff;
    assert_eq!(host(16), host(17), "not in one host cluster");
    let shared = host(16)..host(16) + 4096;
    // One part is given back together with a whole cluster whose hole takes long, and the other part meanwhile.
    let other = host_range(&prepared, 0, 4096);
    let reads = "1 read 0x8000 0x200; ".repeat(100);
    let requests = format!(
        "{first}; 0 write 0x10000 0x1000 3; 0 discard 0x0 0x1000; 0 flush; 0 read 0x10000 0x2000; {reads} \
         1 write 0x11000 0x1000 4; 1 flush; 1 write 0x20200 0x200 5; 1 read 0x20000 0x1000; 1 write 0x22200 0x200 6; \
         1 flush; 1 read 0x20000 0x3000"
    );
    for seed in 0..4 {
        let trial = Trial { faults: vec![slow(OpKind::PunchHole, other.clone())], ..trial(seed, &requests) };
        let run = survives(&prepared, &trial);
        let (changes, has_barrier) = meanwhile(&run.world.trace(), &other, is_hole);
        assert!(has_barrier, "the second part was given back later: {changes:?}");
        let holes = changes.iter().filter(|change| is_hole(change) && touches(change, &shared)).count();
        assert_eq!(holes, 1, "{changes:?}");
    }
}

#[test]
fn two_queues_never_allocate_the_same_cluster() {
    let prepared = Prepared::new(&Chain { layers: vec![image(4096, 256 << 10, 0..0)] });
    // Parts of the same new clusters and of different ones, from four queues at once.
    let requests = "0 write 0x0 0x200 1; 1 write 0x200 0x200 2; 2 write 0x1000 0x1000 3; 3 write 0x400 0x1000 4; \
                    0 write 0x3000 0x2000 5; 1 write 0x4000 0x2000 6; 2 write 0x8000 0x1000 7; 3 write 0x9000 0x1000 8; \
                    0 flush; 1 write 0xc000 0x1000 9; 2 flush; 3 write 0xd000 0x1000 10; 0 read 0x0 0x10000";
    for seed in 0..16 {
        let plan = CrashPlan { max_distinct: 60, ..CrashPlan::new(seed) };
        survives(&prepared, &Trial { queues: 4, plan, ..trial(seed, requests) });
    }
}

#[test]
fn failed_copy_leaves_no_mapping_to_garbage() {
    let base = image(4096, 64 << 10, 0..64 << 10);
    let prepared = Prepared::new(&Chain { layers: vec![base, image(4096, 64 << 10, 0..0)] });
    let backing = prepared.files.keys().find(|name| **name != prepared.top).expect("a backing file").clone();
    // Far enough behind for the look at the header not to meet the fault.
    let old = host_offset(l2_entry(&prepared.files[&backing], 15));
    let requests = "0 write 0xf200 0x200 1; 0 read 0xf000 0x1000; 0 flush; 0 read 0xf000 0x1000; 0 write 0x1200 0x200 2; \
                    0 flush; 0 read 0x0 0x2000";
    let data = |effect| Fault::new(effect).kind(OpKind::Write).range(5 * 4096..64 << 20);
    let faults = [
        Fault::new(Effect::Fail(Errno::EIO)).kind(OpKind::Read).file(&backing).range(old..old + 4096),
        data(Effect::Fail(Errno::EIO)),
        data(Effect::Torn(Errno::EIO)),
        data(Effect::Fail(Errno::ENOSPC)),
    ];
    for fault in faults {
        let run = survives(&prepared, &Trial { faults: vec![fault.clone()], ..trial(1, requests) });
        assert_eq!(run.world.fault_hits(), 1, "{fault:?}");
        assert!(!run.outcome.errors.is_empty(), "{fault:?} was not told");
    }
}

#[test]
fn a_dirty_table_is_never_dropped_from_memory() {
    // 32 tables with room for two in the cache; nothing is flushed until the end.
    let prepared = Prepared::new(&Chain { layers: vec![image(512, 1 << 20, 0..1 << 20)] });
    let mut requests = String::new();
    for round in 0..2u64 {
        for table in 0..32u64 {
            let at = table * 0x8000 + round * 0x400;
            requests += &format!("0 unmap {at:#x} 0x400; 1 write {:#x} 0x200 {};", at + 0x1000, table + 1);
        }
    }
    requests += "0 read 0x0 0x100000; 0 flush; 0 read 0x0 0x100000";
    let options = "l2-cache-size=1k,l2-cache-entry-size=512,refcount-cache-size=2k";
    for queues in [1, 2] {
        survives(&prepared, &Trial { options, queues, ..trial(queues as u64, &requests) });
    }
}

#[test]
fn after_a_failed_flush_no_later_one_claims_success() {
    let prepared = Prepared::new(&Chain { layers: vec![image(4096, 256 << 10, 0..64 << 10)] });
    let requests =
        "0 write 0x0 0x1000 1; 0 flush; 0 write 0x1000 0x200 2; 0 flush; 0 flush; 0 write 0x30000 0x1000 3; 0 flush";
    let fault = Fault::new(Effect::Fail(Errno::EIO)).kind(OpKind::Sync);
    let run = survives(&prepared, &Trial { faults: vec![fault], ..trial(1, requests) });
    assert_eq!(run.world.fault_hits(), 1, "only one barrier has failed on the disk");
    let flushes = run.outcome.errors.iter().filter(|(step, _)| step.op == Request::Flush).count();
    assert_eq!(flushes, 4, "{:?}", run.outcome.errors);
    let allocating = run.outcome.errors.iter().any(|(step, _)| step.op.range() == (0x30000, 0x1000));
    assert!(allocating, "an allocating write went on: {:?}", run.outcome.errors);
}

#[test]
fn narrow_refcounts_never_overflow() {
    for (refcount_bits, most) in [(1, 1..=1), (2, 3..=3), (4, 3..=15)] {
        let spec = Qcow2Spec { cluster_size: 4096, refcount_bits, ..Qcow2Spec::default() };
        let prepared = Prepared::new(&Chain { layers: vec![shaped(spec, 256 << 10, 0..0)] });
        let compressed = |n: u64| format!("{} compressed {:#x} 0x1000 {};", n % 3, n * 4096, COMPRESSIBLE + n);
        let requests: String = (0..24).map(|n| compressed(n) + if n % 7 == 6 { "0 flush;" } else { "" }).collect();
        let run = survives(&prepared, &trial(refcount_bits, &requests));
        let uses = audit(&run.end(&prepared)).expect("a good image").most_uses;
        assert!(most.contains(&uses), "{refcount_bits} bits: a cluster with {uses} uses");
    }
}

/// The guest cluster that is used: its place is behind the parts that opening looks at.
const SLOW: u64 = 28;

/// A request with the right to use guest cluster `SLOW` is slow. Meanwhile the cluster is discarded, that is flushed,
/// and new clusters are written. None of them may get the old one's place before the slow request has ended, and one
/// gets it afterwards. Returns the slow request's result.
fn no_request_gets_the_place_of_a_slow_one<T: 'static>(
    kind: OpKind,
    request: impl AsyncFn(&ImageDisk) -> T + 'static,
) -> (Prepared, T) {
    let prepared = Prepared::new(&Chain { layers: vec![image(4096, 1 << 20, 0..128 << 10)] });
    let range = host_range(&prepared, SLOW, 4096);
    let trial = Trial { faults: vec![slow(kind, range.clone())], ..trial(1, "") };
    let world = prepared.world(&trial);
    let found = world.run(async {
        let disk = Arc::new(ImageDisk::open(&prepared.top, true, false).await.expect("it opens"));
        // Its table is cached then, so the slow request goes the short way and begins at its first turn.
        disk.0.read(0, IoBuf::zeroed(512)).await.0.expect("a read");
        let slow = rt::spawn({
            let disk = Arc::clone(&disk);
            async move { request(&disk).await }
        });
        // The slow request has begun by then.
        rt::sleep(Duration::from_millis(1)).await;
        disk.0.discard(SLOW * 4096, 4096).await.expect("a discard");
        let write = async |clusters: Range<u64>| {
            for cluster in clusters {
                disk.0.write(cluster * 4096, IoBuf::copy_from(&[7; 4096])).await.0.expect("a write");
                disk.0.flush().await.expect("a flush");
            }
        };
        write(64..72).await;
        assert!(!slow.is_finished(), "the slow request was not slow");
        let found = slow.await;
        disk.0.flush().await.expect("a flush");
        write(72..80).await;
        disk.0.close().await.expect("a good close");
        found
    });
    assert_eq!(world.fault_hits(), 1);
    let end = world.contents(&prepared.top).expect("the image");
    assert_eq!(audit(&end).expect("a good image").leaks, 0);
    let owners = |clusters: Range<u64>| clusters.filter(|at| host_offset(l2_entry(&end, *at)) == range.start).count();
    assert_eq!(owners(64..72), 0, "the cluster had a new owner while the slow request was under way");
    assert_eq!(owners(72..80), 1, "nobody wanted the cluster: the test shows nothing");
    (prepared, found)
}

#[test]
fn a_read_beside_a_discard_never_sees_the_next_owner() {
    let (prepared, bytes) = no_request_gets_the_place_of_a_slow_one(OpKind::Read, async |disk| {
        let (result, bytes) = disk.0.read(SLOW * 4096, IoBuf::zeroed(4096)).await;
        result.expect("a read");
        bytes
    });
    let at = SLOW as usize * 4096;
    assert!(bytes[..] == prepared.content[at..at + 4096], "the read saw the next owner's bytes");
}

#[test]
fn write_beside_a_discard_never_lands_elsewhere() {
    no_request_gets_the_place_of_a_slow_one(OpKind::Write, async |disk| {
        disk.0.write(SLOW * 4096, IoBuf::copy_from(&[9; 4096])).await.0.expect("a write");
    });
}

/// A cluster of memory that a guest shares.
fn guest_memory() -> SharedBufs {
    let mut bufs = SharedBufs::default();
    bufs.push(SharedMemory::create("guest", 4096).expect("memory").0);
    bufs
}

#[test]
fn a_shared_read_beside_a_discard_never_sees_the_next_owner() {
    let (prepared, bytes) = no_request_gets_the_place_of_a_slow_one(OpKind::Read, async |disk| {
        let (result, bufs) = disk.0.read_shared(SLOW * 4096, guest_memory()).await;
        result.expect("a read");
        IoBuf::try_copy_of(&bufs).expect("memory")
    });
    let at = SLOW as usize * 4096;
    assert!(bytes[..] == prepared.content[at..at + 4096], "the read saw the next owner's bytes");
}

#[test]
fn a_shared_write_beside_a_discard_never_lands_elsewhere() {
    no_request_gets_the_place_of_a_slow_one(OpKind::Write, async |disk| {
        disk.0.write_shared(SLOW * 4096, guest_memory()).await.0.expect("a write");
    });
}

#[test]
fn a_shrink_loses_nothing_before_its_new_end() {
    let prepared = Prepared::new(&Chain { layers: vec![image(4096, 128 << 10, 0..128 << 10)] });
    let requests = "0 write 0x10000 0x1000 1; 1 write 0x1e000 0x1000 2; 0 resize 0x10600; 0 read 0x0 0x10600; 1 flush; \
                    0 write 0x10400 0x200 3; 0 resize 0x20000; 0 read 0x0 0x20000; 0 flush";
    for seed in 0..4 {
        let queues = 1 + seed as usize % 3;
        survives(&prepared, &Trial { queues, ..trial(seed, requests) });
    }
}

#[test]
fn shrink_waits_for_writers_past_the_new_end() {
    let prepared = Prepared::new(&Chain { layers: vec![image(4096, 128 << 10, 0..128 << 10)] });
    let range = host_range(&prepared, 31, 4096);
    let trial = Trial { faults: vec![slow(OpKind::Write, range.clone())], ..trial(1, "") };
    let world = prepared.world(&trial);
    world.run(async {
        let disk = ImageDisk::open(&prepared.top, true, false).await.expect("it opens");
        // Its table is cached then: the slow write begins at its first turn.
        disk.0.read(0x1f000, IoBuf::zeroed(512)).await.0.expect("a read");
        let node = disk.0.clone();
        let writer = rt::spawn(async move { node.write(0x1f000, IoBuf::copy_from(&[9; 4096])).await.0 });
        // The slow write has begun by then.
        rt::sleep(Duration::from_millis(1)).await;
        assert!(!writer.is_finished());
        disk.0.resize(0x10000, Preallocation::Off).await.expect("a shrink");
        assert!(writer.is_finished(), "the shrink has overtaken a writer");
        assert!(writer.await.is_ok());
        disk.0.close().await.expect("a good close");
    });
    let (changes, _) = meanwhile(&world.trace(), &range, is_write);
    assert!(!changes.iter().any(|change| touches(change, &range) || matches!(change, Change::SetLen(_))));
    let end = audit(&world.contents(&prepared.top).expect("the image")).expect("a good image");
    assert_eq!(end.leaks, 0);
}

/// QEMU shows data behind the end again when it makes the disk longer.
#[test]
fn no_cut_of_a_shrink_leaves_data_behind_the_end() {
    let whole = || image(4096, 128 << 10, 0..128 << 10);
    for layers in [vec![whole()], vec![whole(), whole()]] {
        let prepared = Prepared::new(&Chain { layers });
        for seed in 0..4 {
            let trial = trial(seed, "0 write 0x10000 0x1000 1; 0 resize 0x8000; 0 flush");
            let run = survives(&prepared, &trial);
            let report = explore(&run.world.trace(), &trial.plan, |case| {
                match audit(&case.state.files[&prepared.top])?.behind_end {
                    0 => Ok(()),
                    count => Err(format!("{count} entries with data behind the end")),
                }
            });
            report.unwrap_or_else(|failure| panic!("{failure}"));
        }
    }
}

#[test]
fn the_dirty_bit_is_never_cleared_too_early() {
    let spec = Qcow2Spec { cluster_size: 4096, lazy_refcounts: true, ..Qcow2Spec::default() };
    let prepared = Prepared::new(&Chain { layers: vec![shaped(spec, 256 << 10, 0..32 << 10)] });
    let requests = "0 write 0x10000 0x4000 1; 1 discard 0x0 0x2000; 0 flush; 1 write 0x20000 0x2000 2; 0 flush";
    let trial = trial(1, requests);
    let run = survives(&prepared, &trial);
    let (mut dirty, mut clean) = (0, 0);
    let report = explore(&run.world.trace(), &trial.plan, |case| {
        // Without the bit every count is held against every reference.
        let found = audit(&case.state.files[&prepared.top])?;
        if found.dirty {
            dirty += 1
        } else {
            clean += 1
        }
        Ok(())
    });
    report.unwrap_or_else(|failure| panic!("{failure}"));
    assert!(dirty > 10 && clean > 1, "{dirty} dirty and {clean} clean states");
    assert!(!audit(&run.end(&prepared)).expect("a good image").dirty);
}

#[test]
fn dirty_slices_go_with_their_freed_table() {
    // A table of 512 bytes maps 32 KiB; the fourth one is dirty when the shrink frees it.
    let write = |offset, len| Op::Write { offset, len, texture: Texture::Random(offset) };
    let sessions = vec![vec![write(0, 512), write(0x8000, 512), write(96 << 10, 4096)]];
    let layer = Layer { sessions, ..image(512, 128 << 10, 0..0) };
    let prepared = Prepared::new(&Chain { layers: vec![layer] });
    let l1 = start(&prepared);
    let mut word = [0; 8];
    l1.read(40, &mut word);
    l1.read(u64::from_be_bytes(word) + 3 * 8, &mut word);
    let table = host_offset(u64::from_be_bytes(word));
    assert_ne!(table, 0);
    let requests = "0 write 0x18000 0x4000 1; 1 unmap 0x1c000 0x1000; 0 resize 0x18000; 0 flush; 0 flush; \
                    0 write 0x0 0x4000 2; 1 write 0x8000 0x2000 3; 0 flush; 0 read 0x0 0xa000; 0 flush";
    let mut reused = 0;
    for seed in 0..4 {
        let run = survives(&prepared, &trial(seed, requests));
        let end = run.end(&prepared);
        reused += (0..192).filter(|cluster| host_offset(l2_entry(&end, *cluster)) == table).count();
    }
    assert!(reused > 0, "nobody got the freed table's cluster");
}

#[test]
fn decompressed_cluster_goes_with_its_host_cluster() {
    let prepared = Prepared::new(&Chain { layers: vec![image(4096, 256 << 10, 0..0)] });
    let (one, two) = (COMPRESSIBLE + 1, COMPRESSIBLE + 2);
    // Small reads: the cluster decompressed for the first is kept for the next.
    let first = format!("0 compressed 0x0 0x1000 {one}; 0 read 0x0 0x200; 0 read 0x400 0x200; 0 flush");
    let placed = l2_entry(&survives(&prepared, &trial(1, &first)).end(&prepared), 0);
    let requests = format!(
        "{first}; 0 write 0x0 0x1000 5; 0 read 0x0 0x200; 0 flush; 0 flush; 0 compressed 0x8000 0x1000 {two}; \
         0 read 0x8000 0x200; 0 read 0x8200 0x200; 0 read 0x0 0x1000; 0 flush; 0 read 0x8000 0x1000"
    );
    let run = survives(&prepared, &trial(1, &requests));
    let host = |entry: u64| entry & ((1 << 58) - 1) & !0xfff;
    assert_eq!(host(l2_entry(&run.end(&prepared), 8)), host(placed), "the host cluster was not used again");
}

#[test]
fn a_cluster_that_is_shared_is_copied_before_a_write() {
    let mut prepared = Prepared::new(&Chain { layers: vec![image(4096, 256 << 10, 0..64 << 10)] });
    let range = host_range(&prepared, 3, 4096);
    prepared.patch(|file| {
        // The marks of sharing on disk: a count of two, and no right to write in place.
        let word = |at: u64| {
            let mut bytes = [0; 8];
            file.read(at, &mut bytes);
            u64::from_be_bytes(bytes)
        };
        let block = word(word(48));
        let table = host_offset(word(word(40)));
        let entry = word(table + 3 * 8);
        file.write(block + (range.start / 4096) * 2, &2u16.to_be_bytes());
        file.write(table + 3 * 8, &(entry & !COPIED).to_be_bytes());
    });
    let mut before = vec![0; 4096];
    start(&prepared).read(range.start, &mut before);
    for requests in [
        "0 write 0x3000 0x1000 1; 1 write 0x3200 0x200 2; 0 flush; 0 read 0x0 0x8000",
        "0 write 0x3200 0x200 1; 1 write 0x3400 0x200 2; 2 write 0x2000 0x2000 3; 0 flush; 0 read 0x0 0x8000",
    ] {
        for seed in 0..4 {
            let run = survives(&prepared, &Trial { queues: 1 + seed as usize % 3, ..trial(seed, requests) });
            let end = run.end(&prepared);
            let mut after = vec![0; 4096];
            end.read(range.start, &mut after);
            assert!(after == before, "the other owner's cluster was written to");
            let entry = l2_entry(&end, 3);
            assert!(host_offset(entry) != range.start && entry & COPIED != 0, "{entry:#x}");
        }
    }
}

#[test]
fn what_a_snapshot_shares_is_never_written_in_place() {
    // The judge holds a digest of all that the snapshots hold against each state.
    let layer = image(4096, 256 << 10, 0..64 << 10);
    let prepared = Prepared::with(&Chain { layers: vec![layer] }, true, &[]);
    let requests = "0 write 0x0 0x1000 1; 1 write 0x3200 0x200 2; 2 write 0x3400 0x2000 3; 0 discard 0x8000 0x2000; 1 flush; \
                    1 write 0x3000 0x1000 4; 2 unmap 0x0 0x4000; 0 flush; 0 write 0x8000 0x4000 5; 0 read 0x0 0x10000; 1 flush";
    for seed in 0..4 {
        let run = survives(&prepared, &Trial { queues: 1 + seed as usize % 3, ..trial(seed, requests) });
        assert_eq!(audit(&run.end(&prepared)).expect("a good image").most_uses, 3, "two snapshots and the disk share");
    }
}

#[test]
fn a_discard_never_shows_the_backing_file() {
    let base = image(4096, 64 << 10, 0..64 << 10);
    let prepared = Prepared::new(&Chain { layers: vec![base, image(4096, 64 << 10, 0..0)] });
    let requests = "0 write 0x0 0x4000 1; 0 flush; 0 discard 0x0 0x2000; 0 read 0x0 0x4000; 0 flush; 0 read 0x0 0x4000";
    survives(&prepared, &trial(1, requests));
}

#[test]
fn zeroes_wait_for_a_copy_that_is_under_way() {
    let base = image(4096, 64 << 10, 0..64 << 10);
    let prepared = Prepared::new(&Chain { layers: vec![base, image(4096, 64 << 10, 0x8000..0x9000)] });
    let end = start(&prepared).len();
    // The slow write carries old data beside the new; a range zeroed meanwhile must not come back with it.
    let requests = "0 read 0x8000 0x200; 0 write 0x200 0x200 1; 1 read 0x8000 0x200; 1 read 0x8200 0x200; 1 read 0x8400 0x200; \
                    1 unmap 0x0 0x1000; 1 read 0x0 0x1000; 1 flush";
    for seed in 0..4 {
        let trial = Trial { faults: vec![slow(OpKind::Write, end..end + (1 << 20))], ..trial(seed, requests) };
        let run = survives(&prepared, &trial);
        assert_eq!(run.world.fault_hits(), 1);
    }
}

#[test]
fn space_that_was_used_before_is_not_taken_for_zeroes() {
    let prepared = Prepared::new(&Chain { layers: vec![image(4096, 256 << 10, 0..64 << 10)] });
    let features = Features { punch_hole: false, zero_range: false, allocate: false, ..Features::default() };
    let requests = "0 discard 0x0 0x8000; 0 flush; 0 flush; 0 write 0x20200 0x200 1; 0 read 0x20000 0x1000; \
                    0 write 0x21000 0x200 2; 0 flush; 0 read 0x20000 0x2000";
    let config = Config { features, ..Config::new(1) };
    survives(&prepared, &Trial { config, ..trial(1, requests) });
}

#[test]
fn a_new_refcount_table_is_durable_before_the_header_names_it() {
    // One cluster of the table counts 2 MiB here.
    let spec = Qcow2Spec { cluster_size: 512, refcount_bits: 64, ..Qcow2Spec::default() };
    let prepared = Prepared::new(&Chain { layers: vec![shaped(spec, 3 << 20, 0..1900 << 10)] });
    let before = audit(start(&prepared)).expect("a good image").moving_table_clusters;
    let requests = "0 write 0x1e0000 0xc000 1; 0 flush; 0 write 0x1f0000 0xc000 2; 0 write 0x200000 0xc000 3; 0 flush; \
                    0 write 0x210000 0x4000 4; 0 flush";
    let trial = trial(1, requests);
    let plan = CrashPlan { max_distinct: 250, per_barrier: 12, per_change: 1, ..trial.plan.clone() };
    let run = survives(&prepared, &Trial { plan, sample_qemu: 0, ..trial });
    let after = audit(&run.end(&prepared)).expect("a good image").moving_table_clusters;
    assert!(after > before, "the table has not grown");
}

/// True when a write to `range` was submitted while another one was still on its way.
fn writes_meet(trace: &Trace, range: &Range<u64>) -> bool {
    let mut running = Vec::new();
    for event in &trace.log {
        match event {
            Event::Submitted { op, change, .. } if is_write(change) && touches(change, range) => {
                if !running.is_empty() {
                    return true;
                }
                running.push(*op);
            }
            Event::Completed { op, .. } => running.retain(|other| other != op),
            _ => {}
        }
    }
    false
}

#[test]
fn a_cycle_that_fails_waits_for_its_other_writes() {
    // A block counts 64 clusters, 32 KiB. Discards change the counts of one block only. The write that takes the place
    // of the freed clusters and more changes another one as well.
    let spec = Qcow2Spec { cluster_size: 512, refcount_bits: 64, ..Qcow2Spec::default() };
    let prepared = Prepared::new(&Chain { layers: vec![shaped(spec, 512 << 10, 0..128 << 10)] });
    let requests = "0 discard 0x0 0x800; 0 flush; 0 flush; 0 flush; 0 write 0x20000 0x4000 1; 0 flush; \
                    0 write 0x30000 0x400 2; 0 discard 0x20000 0x400; 0 flush; 0 flush; 0 flush; 0 read 0x20000 0x14000";
    let blocks = refcount_blocks(start(&prepared));
    let writes_to = |trace: &Trace, block: u64, until: usize| {
        let touched = |event: &&Event| matches!(event, Event::Submitted { change, .. } if is_write(change) && touches(change, &(block..block + 512)));
        trace.log[..until].iter().filter(touched).count() as u64
    };
    let calm = survives(&prepared, &trial(1, requests)).world.trace();
    // The cycle in which both the block that the discards changed and another one are written.
    let first = blocks[host_offset(l2_entry(start(&prepared), 0)) as usize / (32 << 10)];
    let is_other = |event: &Event| {
        matches!(event, Event::Submitted { change, .. } if is_write(change)
        && blocks.iter().any(|block| *block != first && touches(change, &(*block..*block + 512))))
    };
    let second = calm.log.iter().position(is_other).expect("a second block is written to");
    let other =
        blocks.iter().find(|block| **block != first && writes_to(&calm, **block, second + 1) > 0).expect("just found");
    // Its writes are submitted one after the other.
    let is_submitted = |event: &Event| matches!(event, Event::Submitted { change, .. } if is_write(change));
    let cycle = calm.log[..second].iter().rposition(|event| !is_submitted(event)).map_or(0, |before| before + 1);
    assert!(writes_to(&calm, first, second + 1) > writes_to(&calm, first, cycle) || cycle < second, "one block alone");
    for (failing, slow_one) in [(*other, first), (first, *other)] {
        let fault = |block: u64, effect| Fault {
            skip: writes_to(&calm, block, cycle),
            ..Fault::new(effect).kind(OpKind::Write).range(block..block + 512)
        };
        let faults =
            vec![fault(failing, Effect::Fail(Errno::EIO)), fault(slow_one, Effect::Delay(Duration::from_secs(1)))];
        let run = survives(&prepared, &Trial { faults, ..trial(1, requests) });
        assert_eq!(run.world.fault_hits(), 2, "a block was not written in the cycle that fails");
        assert!(!run.outcome.errors.is_empty(), "the error was not told");
        assert!(
            !writes_meet(&run.world.trace(), &(slow_one..slow_one + 512)),
            "an old write is overtaken by a new one"
        );
    }
}

/// The offsets of the refcount blocks of the image.
fn refcount_blocks(file: &PageMap) -> Vec<u64> {
    let word = |at: u64| {
        let mut bytes = [0; 8];
        file.read(at, &mut bytes);
        u64::from_be_bytes(bytes)
    };
    (0..64).map(|index| word(word(48) + index * 8)).take_while(|block| *block != 0).collect()
}
