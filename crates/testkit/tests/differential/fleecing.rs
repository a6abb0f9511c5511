// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reading a disk as it was (`snapshot-access` above `copy-before-write`) while guests write to it: on the simulated disk, in
//! many orders. `COWSHED_SEED=N` runs one case, `COWSHED_SEEDS=A..B` a range.

use cowshed_image::formats::qcow2::BitmapChange;
use cowshed_image::graph::{AttachRequest, Attachment, Graph};
use cowshed_image::options::BlockdevOptions;
use cowshed_image::{Node, ZeroFlags};
use cowshed_simulator::{Config, Effect, Fault, OpKind, PageMap, Snapshot, World};
use cowshed_storage::{IoBuf, rt};
use cowshed_testkit::images::{Chain, Format, Layer, Op, Qcow2Spec, Texture};
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_testkit::random::{Random, seeds};
use cowshed_testkit::scenario::Prepared;
use cowshed_types::{Errno, ErrorKind, Result};
use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

const SIZE: u64 = 1 << 20;
const PART: u64 = 64 << 10;
const WRITERS: u64 = 3;
const TARGET: &str = "target.qcow2";

/// A disk with data, zeroes and nothing in it, and an empty target.
fn scene(seed: u64) -> (Prepared, Snapshot) {
    let spec = |cluster_size, extended_l2| Qcow2Spec { cluster_size, extended_l2, ..Qcow2Spec::default() };
    let specs = [spec(4096, false), spec(65536, false), spec(16384, true), spec(512, false)];
    let written = [(0, 300 << 10), (400 << 10, 100 << 10), (700 << 10, 324 << 10)];
    let sessions = written.map(|(offset, len)| Op::Write { offset, len, texture: Texture::Random(seed + offset) });
    let layer =
        Layer { format: Format::Qcow2(specs[seed as usize % 4].clone()), size: SIZE, sessions: vec![sessions.into()] };
    let prepared = Prepared::new(&Chain { layers: vec![layer] });
    let folder = temp_dir();
    let path = folder.path().join(TARGET);
    let options = ["cluster_size=64k", "cluster_size=4k", "cluster_size=256k", "cluster_size=16k,extended_l2=on"];
    Qemu::system().create(&path, "qcow2", options[seed as usize / 4 % 4], SIZE);
    let mut files = prepared.files.clone();
    files.insert(TARGET.to_owned(), PageMap::from_bytes(&std::fs::read(&path).expect("the target")));
    (prepared, files)
}

async fn add(graph: &Arc<Graph>, options: &str) -> Result<Arc<Node>> {
    graph.add(BlockdevOptions::from_keyval(options)?).await
}

/// The readers' knowledge of the parts of the disk as it was.
#[derive(Default)]
struct Known {
    /// Never kept.
    absent: Vec<bool>,
    /// Given up, or about to be.
    given_up: Vec<bool>,
}

impl Known {
    fn any(list: &[bool], range: &Range<u64>) -> bool {
        let parts = range.start / PART..range.end.div_ceil(PART);
        parts.clone().any(|part| list[part as usize])
    }
}

async fn write_at_random(guest: Arc<Attachment>, model: Rc<RefCell<Vec<u8>>>, writer: u64, seed: u64) {
    let (queue, mut random) = (guest.queue(), Random::new(seed * 31 + writer));
    // Each has stripes of its own, so that the model knows the winner; parts are shared by all of them.
    let stripe = 16 << 10;
    for _ in 0..30 {
        let at = (random.below(SIZE / stripe / WRITERS) * WRITERS + writer) * stripe;
        let start = at + random.below(stripe / 512) * 512;
        let len = 512 * (1 + random.below((at + stripe - start) / 512));
        let range = start as usize..(start + len) as usize;
        match random.below(5) {
            0 => {
                let flags = ZeroFlags { may_unmap: random.chance(50), no_fallback: false };
                queue.write_zeroes(start, len, flags).await.expect("zeroes are written");
                model.borrow_mut()[range].fill(0);
            }
            1 if len == stripe => {
                queue.discard(start, len).await.expect("a discard");
                queue.write_zeroes(start, len, ZeroFlags::default()).await.expect("zeroes are written");
                model.borrow_mut()[range].fill(0);
            }
            2 => queue.flush().await.expect("a flush"),
            _ => {
                let byte = random.below(256) as u8;
                queue.write(start, IoBuf::copy_from(&vec![byte; len as usize])).await.0.expect("a write");
                model.borrow_mut()[range].fill(byte);
            }
        }
    }
}

/// Reads, and compares with the disk as it was.
async fn read_at_random(past: Arc<Attachment>, before: Rc<Vec<u8>>, known: Rc<RefCell<Known>>, seed: u64) {
    let (queue, mut random) = (past.queue(), Random::new(seed));
    for _ in 0..60 {
        let start = random.below(SIZE / 512) * 512;
        let len = (512 * (1 + random.below(400))).min(SIZE - start);
        let range = start..start + len;
        let (result, buf) = queue.read(start, IoBuf::zeroed(len as usize)).await;
        let absent = Known::any(&known.borrow().absent, &range);
        match result {
            Ok(()) => {
                assert!(!absent, "what was never kept can't be read: {range:?}");
                // Ranges that are given up during the read don't count.
                if !Known::any(&known.borrow().given_up, &range) {
                    assert!(*buf == before[start as usize..range.end as usize], "not as it was: {range:?}");
                }
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
                assert!(absent || Known::any(&known.borrow().given_up, &range), "{range:?}: {error}");
            }
        }
        if random.chance(20)
            && let Ok(runs) = queue.block_status(start, len, 8).await
        {
            assert_eq!(runs[0].start, start);
            let zeroes = runs.iter().filter(|run| run.zero);
            let is_zero = |run: &cowshed_image::StatusExtent| {
                before[run.start as usize..(run.start + run.len) as usize].iter().all(|byte| *byte == 0)
            };
            let given_up = &known.borrow().given_up;
            assert!(
                zeroes.clone().all(|run| is_zero(run) || Known::any(given_up, &(run.start..run.start + run.len))),
                "zeroes that weren't: {runs:?}"
            );
        }
    }
}

async fn give_up_at_random(past: Arc<Attachment>, known: Rc<RefCell<Known>>, seed: u64) {
    let (queue, mut random) = (past.queue(), Random::new(seed));
    for _ in 0..4 {
        let part = random.below(SIZE / PART);
        known.borrow_mut().given_up[part as usize] = true;
        // A part that is only touched stays.
        let more = random.below(PART / 512) * 512;
        let start = part * PART;
        let len = (PART + more).min(SIZE - start);
        queue.discard(start, len).await.expect("a part is given up");
        // Simulated time, which spreads the discards.
        rt::sleep(Duration::from_millis(random.below(3))).await;
    }
}

async fn fleece(prepared: &Prepared, seed: u64) -> Result<()> {
    let mut random = Random::new(seed);
    let graph = Graph::new(&cowshed_image::DRIVERS);
    let source =
        add(&graph, &format!("driver=qcow2,node-name=source,discard=unmap,file.filename={}", prepared.top)).await?;
    add(&graph, &format!("driver=qcow2,node-name=target,discard=unmap,file.filename={TARGET}")).await?;
    // Parts of 64 KiB, whatever the target's clusters: a larger one makes them larger, which a test of its own looks at.
    let mut options = "driver=copy-before-write,node-name=filter,file=source,target=target".to_owned();
    let mut known = Known { absent: vec![false; 16], given_up: vec![false; 16] };
    let large_clusters = seed / 4 % 4 == 2;
    if seed % 3 == 1 && !large_clusters {
        let change = BitmapChange::Add { name: "dirty".into(), granularity_bytes: Some(4096), enabled: true };
        source.change_bitmap(&change, false).await?;
        known.absent.fill(true);
        for _ in 0..6 {
            let at = random.below(SIZE / 4096) * 4096;
            known.absent[(at / PART) as usize] = false;
            let (result, buf) = source.read(at, IoBuf::zeroed(512)).await;
            result?;
            // The same again: the disk stays as it was, and the bitmap knows of the write.
            source.write(at, buf).await.0?;
        }
        options += ",bitmap.node=source,bitmap.name=dirty";
    }
    if random.chance(30) {
        options += ",cbw-timeout=100";
    }
    let filter = add(&graph, &options).await?;
    let guest = graph.attach(&filter, AttachRequest::export("guest", true)).await?;
    let fleece = add(&graph, "driver=snapshot-access,node-name=fleece,file=filter,discard=unmap").await?;
    let past = graph.attach(&fleece, AttachRequest::export("past", true)).await?;
    let before = Rc::new(prepared.content.clone());
    let model = Rc::new(RefCell::new(prepared.content.clone()));
    let known = Rc::new(RefCell::new(known));
    let mut tasks = Vec::new();
    for writer in 0..WRITERS {
        tasks.push(rt::spawn(write_at_random(Arc::clone(&guest), Rc::clone(&model), writer, seed)));
        let reader = read_at_random(Arc::clone(&past), Rc::clone(&before), Rc::clone(&known), seed * 77 + writer);
        tasks.push(rt::spawn(reader));
    }
    if seed % 2 == 1 && !large_clusters {
        tasks.push(rt::spawn(give_up_at_random(Arc::clone(&past), Rc::clone(&known), seed)));
    }
    for task in tasks {
        task.await;
    }
    // In the end, part by part.
    for part in 0..SIZE / PART {
        let (result, buf) = past.queue().read(part * PART, IoBuf::zeroed(PART as usize)).await;
        let gone = known.borrow().absent[part as usize] || known.borrow().given_up[part as usize];
        assert_eq!(result.is_err(), gone, "part {part}: {result:?}");
        let place = (part * PART) as usize..((part + 1) * PART) as usize;
        assert!(gone || *buf == before[place], "part {part} is not as it was");
    }
    let (result, buf) = guest.queue().read(0, IoBuf::zeroed(SIZE as usize)).await;
    result?;
    assert!(*buf == **model.borrow(), "the disk itself is wrong");
    let refused = past.queue().write(0, IoBuf::zeroed(512)).await.0.expect_err("nothing is written through it");
    assert_eq!(refused.kind(), ErrorKind::Unsupported);
    let refused = graph.delete("filter").await.expect_err("it is in use");
    assert_eq!(refused.kind(), ErrorKind::Busy);
    past.detach().await?;
    guest.detach().await?;
    drop((source, filter, fleece));
    graph.close_all().await
}

#[test]
fn readers_of_the_past_see_it_whatever_guests_write() {
    for seed in seeds(48) {
        let (prepared, files) = scene(seed);
        let world = World::with_files(Config::new(seed), &files);
        world.run(fleece(&prepared, seed)).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    }
}

fn world_with_a_disk(seed: u64) -> World {
    let files: Snapshot = [("disk.raw".to_owned(), PageMap::from_bytes(&[1; SIZE as usize]))].into_iter().collect();
    World::with_files(Config::new(seed), &files)
}

/// A filter whose target takes five seconds for each request.
async fn with_slow_target(policy: &str) -> Result<(Arc<Graph>, Arc<Attachment>, Arc<Attachment>)> {
    let graph = Graph::new(&cowshed_image::DRIVERS);
    add(&graph, "driver=raw,node-name=source,file.filename=disk.raw").await?;
    add(&graph, &format!("driver=null-co,node-name=target,size={SIZE},latency-ns=5000000000")).await?;
    let options = format!("driver=copy-before-write,node-name=filter,file=source,target=target,cbw-timeout=2,{policy}");
    let filter = add(&graph, &options).await?;
    let guest = graph.attach(&filter, AttachRequest::export("guest", true)).await?;
    let fleece = add(&graph, "driver=snapshot-access,node-name=fleece,file=filter").await?;
    let past = graph.attach(&fleece, AttachRequest::export("past", false)).await?;
    Ok((graph, guest, past))
}

async fn write(guest: &Arc<Attachment>, offset: u64) -> Result<()> {
    guest.queue().write(offset, IoBuf::copy_from(&[7; 512])).await.0
}

async fn read(past: &Arc<Attachment>, offset: u64) -> Result<()> {
    past.queue().read(offset, IoBuf::zeroed(512)).await.0
}

#[test]
fn saving_that_takes_too_long_fails_the_write() {
    world_with_a_disk(1).run(async {
        let (graph, guest, past) = with_slow_target("on-cbw-error=break-guest-write").await.expect("a graph");
        let error = write(&guest, 0).await.expect_err("too slow");
        assert_eq!(error.errno(), Errno::ETIMEDOUT, "{error}");
        read(&past, 0).await.expect("the past is all there");
        let pending = |graph: &Arc<Graph>| {
            graph.find("filter").and_then(|filter| Some(filter.copy_before_write()?.pending_bytes())).expect("a filter")
        };
        assert_eq!(pending(&graph), SIZE, "it is still being saved");
        // A change of the graph waits for operations that go on.
        drop(graph.drain(&[&graph.find("target").expect("the target")]).await);
        assert_eq!(pending(&graph), SIZE - PART);
        write(&guest, 0).await.expect("saved by now");
        // So does the filter's end.
        write(&guest, PART).await.expect_err("too slow");
        guest.detach().await.expect("detached");
        past.detach().await.expect("detached");
        graph.delete("fleece").await.expect("deleted");
        let filter = graph.find("filter").expect("a filter");
        graph.delete("filter").await.expect("deleted");
        assert_eq!(filter.copy_before_write().expect("a filter").pending_bytes(), SIZE - 2 * PART);
        graph.close_all().await.expect("closed");
    });
}

#[test]
fn slow_saving_breaks_the_snapshot_where_allowed() {
    world_with_a_disk(2).run(async {
        let (graph, guest, past) = with_slow_target("on-cbw-error=break-snapshot").await.expect("a graph");
        read(&past, SIZE / 2).await.expect("the past is all there");
        write(&guest, 0).await.expect("the guest goes on");
        for offset in [0, SIZE / 2] {
            let error = read(&past, offset).await.expect_err("the past is lost");
            assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
        }
        let started = rt::now();
        write(&guest, PART).await.expect("nothing is saved any more");
        // In virtual time.
        assert!(rt::now() - started < Duration::from_secs(1), "nobody waits for the target");
        guest.detach().await.expect("detached");
        past.detach().await.expect("detached");
        graph.close_all().await.expect("closed");
    });
}

#[test]
fn the_smallest_part_is_what_the_options_and_the_target_say() {
    World::new(Config::new(3)).run(async {
        for (least, part) in [("0", PART), ("4k", PART), ("256k", 256 << 10)] {
            let graph = Graph::new(&cowshed_image::DRIVERS);
            add(&graph, &format!("driver=null-co,node-name=a,size={SIZE}")).await.expect("a node");
            add(&graph, &format!("driver=null-co,node-name=b,size={SIZE}")).await.expect("a node");
            let options = format!("driver=copy-before-write,node-name=f,file=a,target=b,min-cluster-size={least}");
            let filter = add(&graph, &options).await.expect("a filter");
            assert_eq!(filter.copy_before_write().expect("a filter").part_bytes(), part);
            drop(filter);
            graph.close_all().await.expect("closed");
        }
        let graph = Graph::new(&cowshed_image::DRIVERS);
        add(&graph, &format!("driver=null-co,node-name=a,size={SIZE}")).await.expect("a node");
        add(&graph, &format!("driver=null-co,node-name=b,size={SIZE}")).await.expect("a node");
        add(&graph, "driver=null-co,node-name=other,size=4M").await.expect("a node");
        let filter = "driver=copy-before-write,node-name=f,file=a,target=b";
        for (options, words) in [
            (
                format!("{filter},min-cluster-size=100000"),
                "option 'min-cluster-size' expects a power of two up to 2 GiB (100000)",
            ),
            (
                format!("{filter},min-cluster-size=4G"),
                "option 'min-cluster-size' expects a power of two up to 2 GiB (4294967296)",
            ),
            (
                format!("{filter},cbw-timeout=4294967296"),
                "Parameter 'cbw-timeout' expects a number from 0 to 4294967295",
            ),
            (format!("{filter},bitmap.node=a"), "option 'bitmap.name' is missing"),
            (format!("{filter},bitmap.node=a,bitmap.name=x"), "Dirty bitmap 'x' not found"),
            (format!("{filter},bitmap.node=z,bitmap.name=x"), "Failed to find node with node-name='z'"),
            ("driver=copy-before-write,node-name=f,file=a,target=other".into(), "must be as large as 'a'"),
        ] {
            let refusal = add(&graph, &options).await.expect_err("is refused").to_string();
            assert!(refusal.contains(words), "{options}: {refusal}");
        }
        let names: Vec<String> = graph.snapshot().nodes().map(|node| node.name().to_owned()).collect();
        assert_eq!(names, ["a", "b", "other"], "a refusal leaves nothing behind");
        assert!(graph.find("a").expect("a node").user_names().is_empty());
        graph.close_all().await.expect("closed");
    });
}

/// A target above the disk reads missing ranges there: a write waits for readers that have begun.
#[test]
fn a_write_waits_for_a_slow_reader_through_an_overlay() {
    let (_, files) = scene(0);
    let world = {
        let disk = ("disk.raw".to_owned(), PageMap::from_bytes(&[1; SIZE as usize]));
        let target = (TARGET.to_owned(), files[TARGET].clone());
        World::with_files(Config::new(5), &Snapshot::from([disk, target]))
    };
    world.run(async {
        let graph = Graph::new(&cowshed_image::DRIVERS);
        add(&graph, "driver=raw,node-name=source,file.filename=disk.raw").await.expect("a disk");
        let overlay = format!("driver=qcow2,node-name=target,file.filename={TARGET},backing=source");
        add(&graph, &overlay).await.expect("an overlay");
        let options = "driver=copy-before-write,node-name=filter,file=source,target=target";
        let filter = add(&graph, options).await.expect("a filter");
        let guest = graph.attach(&filter, AttachRequest::export("guest", true)).await.expect("attached");
        let target = graph.find("target").expect("a node");
        let past = graph.attach(&target, AttachRequest::export("past", false)).await.expect("attached");
        let slow = Fault::new(Effect::Delay(Duration::from_secs(5))).kind(OpKind::Read).file("disk.raw").times(1);
        world.add_fault(slow);
        let started = rt::now();
        let reader = rt::spawn({
            let past = Arc::clone(&past);
            async move { past.queue().read(0, IoBuf::zeroed(512)).await }
        });
        // The reader has begun by then.
        rt::sleep(Duration::from_secs(1)).await;
        write(&guest, 0).await.expect("written");
        assert!(rt::now() - started >= Duration::from_secs(5), "the write overtakes the reader");
        let (result, bytes) = reader.await;
        result.expect("read");
        assert_eq!((world.fault_hits(), &bytes[..]), (1, &[1; 512][..]));
        guest.detach().await.expect("detached");
        past.detach().await.expect("detached");
        graph.close_all().await.expect("closed");
    });
}
