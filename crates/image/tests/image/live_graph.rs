// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The graph changes while requests run: none is lost, none fails, and every byte is where it belongs.

use cowshed_image::formats::DriverOf;
use cowshed_image::graph::{AttachRequest, Attachment, Graph, Queue};
use cowshed_image::node::ChildRole;
use cowshed_image::open::HeaderName;
use cowshed_image::options::BlockdevOptions;
use cowshed_image::{Node, ZeroFlags};
use cowshed_storage::{IoBuf, rt};
use cowshed_types::{ErrorKind, Result};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use cowshed_testkit::held;
use cowshed_testkit::programs::tool;

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn image(folder: &Path, name: &str, size: &str, options: &str) -> String {
    let path = folder.join(name).to_str().unwrap().to_owned();
    tool("qemu-img", &["create", "-q", "-f", "qcow2", "-o", options, &path, size]);
    path
}

fn add(graph: &Arc<Graph>, options: &str) -> Result<Arc<Node>> {
    rt::block_on(graph.add(BlockdevOptions::from_keyval(options).unwrap()))
}

fn export(graph: &Arc<Graph>, node: &Arc<Node>, name: &str, writable: bool) -> Result<Arc<Attachment>> {
    rt::block_on(graph.attach(node, AttachRequest::export(name, writable)))
}

fn write(queue: &Queue, offset: u64, bytes: &[u8]) -> Result<()> {
    rt::block_on(queue.write(offset, IoBuf::copy_from(bytes))).0
}

fn read(queue: &Queue, offset: u64, len: usize) -> Result<Vec<u8>> {
    let (result, buf) = rt::block_on(queue.read(offset, IoBuf::zeroed(len)));
    result.map(|()| buf.to_vec())
}

/// The block size of [`Hammer`] in bytes.
const BLOCK: u64 = 4096;

/// Threads that write numbered blocks and read them back, each in its own part of the disk.
struct Hammer {
    stop: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
    threads: Vec<std::thread::JoinHandle<Vec<u64>>>,
    blocks_each: u64,
}

/// A block that has its place and the number of its writes.
fn content(block: u64, version: u64) -> Vec<u8> {
    let words = [block.wrapping_mul(0x9e37_79b9_7f4a_7c15), version];
    (0..BLOCK / 16).flat_map(|_| words.iter().flat_map(|word| word.to_le_bytes())).collect()
}

impl Hammer {
    fn start(attachment: &Arc<Attachment>, threads: u64, blocks_each: u64) -> Hammer {
        let (stop, rounds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let spawn = |thread: u64| {
            let (attachment, stop, rounds) = (Arc::clone(attachment), Arc::clone(&stop), Arc::clone(&rounds));
            std::thread::spawn(move || hammer(&attachment, thread * blocks_each, blocks_each, &stop, &rounds))
        };
        let threads = (0..threads).map(spawn).collect();
        Hammer { stop, rounds, threads, blocks_each }
    }

    /// Waits until all threads together have gone on for some rounds.
    fn go_on(&self, rounds: u64) {
        let until = self.rounds.load(Ordering::Relaxed) + rounds;
        while self.rounds.load(Ordering::Relaxed) < until {
            assert!(!self.threads.iter().any(|thread| thread.is_finished()), "a thread gave up early");
            std::thread::yield_now();
        }
    }

    /// Stops, and returns the version of each block.
    fn stop(self) -> Vec<u64> {
        self.stop.store(true, Ordering::Relaxed);
        let versions: Vec<u64> = self.threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
        assert_eq!(versions.len() as u64 % self.blocks_each, 0);
        versions
    }
}

fn hammer(
    attachment: &Arc<Attachment>,
    first: u64,
    blocks: u64,
    stop: &Arc<AtomicBool>,
    rounds: &Arc<AtomicU64>,
) -> Vec<u64> {
    let queue = attachment.queue();
    rt::block_on(async {
        let tasks: Vec<_> = (0..4)
            .map(|part| {
                let (queue, stop, rounds) = (queue.clone(), Arc::clone(stop), Arc::clone(rounds));
                let range = first + blocks * part / 4..first + blocks * (part + 1) / 4;
                rt::spawn(async move {
                    let mut versions = vec![0u64; (range.end - range.start) as usize];
                    while !stop.load(Ordering::Relaxed) {
                        one_round(&queue, range.start, &mut versions).await;
                        rounds.fetch_add(1, Ordering::Relaxed);
                        rt::yield_now().await;
                    }
                    versions
                })
            })
            .collect();
        let mut all = Vec::new();
        for task in tasks {
            all.extend(task.await);
        }
        all
    })
}

/// Writes one block, reads another, and checks it.
async fn one_round(queue: &Queue, first: u64, versions: &mut [u64]) {
    let total: u64 = versions.iter().sum();
    let at = (total.wrapping_mul(7919) % versions.len() as u64) as usize;
    let block = first + at as u64;
    versions[at] += 1;
    let (result, _) = queue.write(block * BLOCK, IoBuf::copy_from(&content(block, versions[at]))).await;
    result.unwrap();
    let look = (at + versions.len() / 2) % versions.len();
    let block = first + look as u64;
    let (result, buf) = queue.read(block * BLOCK, IoBuf::zeroed(BLOCK as usize)).await;
    result.unwrap();
    let expected = if versions[look] == 0 { vec![0; BLOCK as usize] } else { content(block, versions[look]) };
    assert!(buf[..] == expected[..], "block {block} is not version {}", versions[look]);
}

/// Every block of the disk is the version that was written last.
fn check_all(attachment: &Arc<Attachment>, versions: &[u64]) {
    let queue = attachment.queue();
    for (block, version) in versions.iter().enumerate() {
        let found = read(&queue, block as u64 * BLOCK, BLOCK as usize).unwrap();
        let expected = if *version == 0 { vec![0; BLOCK as usize] } else { content(block as u64, *version) };
        assert!(found == expected, "block {block} is not version {version}");
    }
}

#[test]
fn snapshots_under_load_lose_nothing() {
    let folder = folder();
    let base = image(folder.path(), "base.qcow2", "8M", "cluster_size=4k");
    let graph = Graph::new(&cowshed_image::DRIVERS);
    let node = add(&graph, &format!("driver=qcow2,node-name=n0,file.filename={base}")).unwrap();
    let attachment = export(&graph, &node, "e", true).unwrap();
    let hammer = Hammer::start(&attachment, 3, 512);
    let mut paths = vec![base];
    for number in 1..=4 {
        hammer.go_on(300);
        let path = image(folder.path(), &format!("o{number}.qcow2"), "8M", "cluster_size=4k");
        let overlay = add(&graph, &format!("driver=qcow2,node-name=n{number},file.filename={path},backing=")).unwrap();
        let below = graph.node(&format!("n{}", number - 1)).unwrap();
        rt::block_on(graph.take_snapshot(&below, &overlay)).unwrap();
        assert!(below.is_read_only() && !overlay.is_read_only());
        assert_eq!(attachment.node().name(), overlay.name());
        assert_eq!(overlay.backing().unwrap().name(), below.name());
        if number == 2 {
            // Other options change nothing about the overlay's place.
            let error = reopen(&graph, &[changed(&overlay, "l2-cache-size=64k")]).unwrap_err();
            assert_eq!(error.to_string(), "backing is missing for 'n2'");
            reopen(&graph, &[changed(&overlay, "l2-cache-size=64k,backing=n1")]).unwrap();
            assert_eq!(overlay.backing().unwrap().name(), below.name());
        }
        paths.push(path);
    }
    hammer.go_on(300);
    let versions = hammer.stop();
    check_all(&attachment, &versions);
    let stats = attachment.statistics();
    let operations: u64 = stats.kinds.iter().map(|kind| kind.operations).sum();
    assert!(operations >= 2 * 1500 && stats.kinds.iter().all(|kind| kind.failed + kind.invalid == 0));
    // Frozen below: the last overlay's old base doesn't change any more, and every image is sound.
    rt::block_on(attachment.detach()).unwrap();
    for number in (0..=4).rev() {
        rt::block_on(graph.delete(&format!("n{number}"))).unwrap();
    }
    for (path, below) in paths[1..].iter().zip(&paths) {
        tool("qemu-img", &["rebase", "-q", "-u", "-F", "qcow2", "-b", below, path]);
        tool("qemu-img", &["check", "-q", path]);
    }
    let raw = folder.path().join("all.raw");
    tool("qemu-img", &["convert", "-O", "raw", &paths[4], raw.to_str().unwrap()]);
    let bytes = std::fs::read(raw).unwrap();
    for (block, version) in versions.iter().enumerate().filter(|(_, version)| **version > 0) {
        let at = block * BLOCK as usize;
        assert!(bytes[at..at + BLOCK as usize] == content(block as u64, *version)[..], "block {block}");
    }
}

#[test]
fn filters_come_and_go_under_load() {
    let folder = folder();
    let path = image(folder.path(), "a.qcow2", "4M", "cluster_size=64k");
    let graph = Graph::new(&cowshed_image::DRIVERS);
    let node = add(&graph, &format!("driver=qcow2,node-name=n,file.filename={path}")).unwrap();
    let attachment = export(&graph, &node, "e", true).unwrap();
    let hammer = Hammer::start(&attachment, 2, 256);
    for round in 0..10 {
        hammer.go_on(50);
        let options = BlockdevOptions::from_keyval(&format!("driver=fault,node-name=f{round}")).unwrap();
        let filter = rt::block_on(graph.insert_filter(&node, options)).unwrap();
        assert_eq!(attachment.node().name(), filter.name());
        hammer.go_on(50);
        rt::block_on(graph.remove_filter(&filter)).unwrap();
        assert_eq!(attachment.node().name(), "n");
        assert!(graph.find(&format!("f{round}")).is_none());
    }
    let versions = hammer.stop();
    check_all(&attachment, &versions);
    rt::block_on(attachment.detach()).unwrap();
    assert!(node.user_names().is_empty());
}

/// The options of a node for a reopening: its present ones with these changes.
fn changed(node: &Node, changes: &str) -> BlockdevOptions {
    let mut options = BlockdevOptions::new().with("node-name", node.name());
    for (key, value) in BlockdevOptions::from_keyval(changes).unwrap().iter() {
        options.insert(key.clone(), value.clone());
    }
    options
}

fn reopen(graph: &Arc<Graph>, list: &[BlockdevOptions]) -> Result<()> {
    rt::block_on(graph.reopen(list.to_vec()))
}

/// The bytes that this process has locked in a file.
fn locks(path: &str) -> Vec<u64> {
    held::locked_bytes(std::process::id(), path)
}

const READER: [u64; 3] = [100, 201, 203];
const WRITER: [u64; 5] = [100, 101, 103, 201, 203];

#[test]
fn reopening_changes_options_locks_and_the_right_to_write() {
    let folder = folder();
    let path = image(folder.path(), "a.qcow2", "4M", "cluster_size=64k");
    let graph = Graph::new(&cowshed_image::DRIVERS);
    let node = add(&graph, &format!("driver=qcow2,node-name=n,file.filename={path},read-only=on")).unwrap();
    assert_eq!(locks(&path), READER);
    let reader = export(&graph, &node, "r", false).unwrap();
    reopen(&graph, &[changed(&node, "read-only=off,l2-cache-size=1M,discard=unmap,overlap-check=all")]).unwrap();
    assert!(!node.is_read_only() && node.discards());
    assert_eq!(locks(&path), WRITER);
    let writer = export(&graph, &node, "w", true).unwrap();
    let queue = writer.queue();
    write(&queue, 0, &[7; 65536]).unwrap();
    let error = reopen(&graph, &[changed(&node, "read-only=on")]).unwrap_err();
    assert!(error.to_string().contains("cannot support read-write users"), "{error}");
    assert_eq!((locks(&path), node.discards()), (WRITER.to_vec(), true));
    drop(queue);
    rt::block_on(writer.detach()).unwrap();
    reopen(&graph, &[changed(&node, "read-only=on")]).unwrap();
    assert_eq!(locks(&path), READER);
    assert!(node.is_read_only() && node.discards(), "as in QEMU what is said of discards stays");
    // Complete on disk, though the node is still open and was never closed.
    tool("qemu-img", &["check", "-q", &path]);
    assert_eq!(read(&reader.queue(), 0, 2).unwrap(), [7, 7]);
    reopen(&graph, &[changed(&node, "read-only=off,lazy-refcounts=on")]).unwrap();
    let writer = export(&graph, &node, "w", true).unwrap();
    write(&writer.queue(), 65536, &[8; 65536]).unwrap();
    rt::block_on(writer.queue().flush()).unwrap();
    reopen(&graph, &[changed(&node, "lazy-refcounts=off")]).unwrap();
    assert!(!node.qcow2().unwrap().header().is_dirty());
    for (change, part) in [
        ("driver=raw", "'driver'"),
        ("file.filename=x", "'file"),
        ("l2-cache-entry-size=1000", "L2 cache entry size"),
        ("data-file=n", "'data-file'"),
        ("backing=zz", "'zz'"),
        ("foo=1", "'foo'"),
        ("cache-size=1M,l2-cache-size=2M", "cache-size"),
        ("detect-zeroes=unmap,discard=ignore", "discard=unmap"),
    ] {
        let error = reopen(&graph, &[changed(&node, change)]).unwrap_err().to_string();
        assert!(error.contains(part), "{change}: {error}");
    }
    rt::block_on(writer.detach()).unwrap();
    rt::block_on(reader.detach()).unwrap();
    rt::block_on(graph.close_all()).unwrap();
    assert_eq!(locks(&path), [0u64; 0]);
    tool("qemu-img", &["check", "-q", &path]);
}

/// With the dirty bit an opening counts anew: lazy reference counts are no changes that a killed process loses.
#[test]
fn lazy_counts_are_no_unsaved_changes() {
    let folder = folder();
    let path = image(folder.path(), "a.qcow2", "4M", "cluster_size=64k,lazy_refcounts=on");
    let graph = Graph::new(&cowshed_image::DRIVERS);
    let node = add(&graph, &format!("driver=qcow2,node-name=n,file.filename={path}")).unwrap();
    let writer = export(&graph, &node, "w", true).unwrap();
    write(&writer.queue(), 65536, &[8; 65536]).unwrap();
    assert!(node.holds_changes(), "the mapping isn't written");
    rt::block_on(writer.queue().flush()).unwrap();
    assert!(node.qcow2().unwrap().header().is_dirty() && !node.holds_changes());
    write(&writer.queue(), 65536, &[9; 65536]).unwrap();
    assert!(!node.holds_changes(), "a write in place");
    rt::block_on(writer.detach()).unwrap();
    rt::block_on(graph.close_all()).unwrap();
}

#[test]
fn caches_change_under_writers() {
    let folder = folder();
    let path = image(folder.path(), "a.qcow2", "16M", "cluster_size=4k");
    let graph = Graph::new(&cowshed_image::DRIVERS);
    let node = add(&graph, &format!("driver=qcow2,node-name=n,file.filename={path}")).unwrap();
    let attachment = export(&graph, &node, "e", true).unwrap();
    let hammer = Hammer::start(&attachment, 2, 64);
    let file = node.child(ChildRole::File).unwrap();
    let mode = || file.file().unwrap().cache_mode();
    for (round, slice) in [512, 4096, 1024, 2048, 512, 4096].into_iter().enumerate() {
        let direct = if round % 2 == 0 { "on" } else { "off" };
        let changes = format!("l2-cache-entry-size={slice},cache.direct={direct},cache.no-flush={direct}");
        reopen(&graph, &[changed(&node, &changes)]).unwrap();
        let statistics = node.qcow2().unwrap().statistics();
        assert_eq!((mode().direct, mode().no_flush), (round % 2 == 0, round % 2 == 0), "round {round}");
        assert!(statistics.l2_limit_bytes >= 2 * slice);
        hammer.go_on(20);
    }
    let versions = hammer.stop();
    check_all(&attachment, &versions);
    // By the file's node alone, too; the description beside the image is left alone then.
    let name = file.name().to_owned();
    let direct = format!("driver=file,node-name={name},filename={path},cache.direct=on");
    reopen(&graph, &[BlockdevOptions::from_keyval(&direct).unwrap()]).unwrap();
    assert!(mode().direct);
    check_all(&attachment, &versions);
    reopen(&graph, &[changed(&node, "")]).unwrap();
    assert!(mode().direct, "the image's own setting did not change");
    // A node that can't be reopened takes the others back.
    let all = [changed(&node, "l2-cache-entry-size=512,cache.direct=on"), changed(&node, "backing=zz")];
    assert!(reopen(&graph, &all).is_err());
    rt::block_on(attachment.detach()).unwrap();
    rt::block_on(graph.close_all()).unwrap();
    tool("qemu-img", &["check", "-q", &path]);
}

#[test]
fn a_file_with_native_operations_stays_past_the_page_cache() {
    let folder = folder();
    let path = image(folder.path(), "a.qcow2", "4M", "cluster_size=64k");
    let words = "aio=native was specified, but it requires cache.direct=on, which was not specified.";
    let graph = Graph::new(&cowshed_image::DRIVERS);
    // The file by itself, and as it was described with its image.
    let file = "driver=file,node-name=f,filename=F,aio=native,cache.direct=".replace('F', &path);
    let node = add(&graph, &format!("{file}on")).unwrap();
    let off = BlockdevOptions::from_keyval(&format!("{file}off")).unwrap();
    let error = reopen(&graph, &[off]).unwrap_err().to_string();
    assert!(error.contains(words) && error.contains(&path), "{error}");
    assert!(node.file().unwrap().cache_mode().direct);
    assert_eq!(node.options().get("cache").and_then(|cache| cache.get("direct")), Some(&true.into()));
    drop(node);
    rt::block_on(graph.delete("f")).unwrap();
    let image = "driver=qcow2,node-name=n,file.filename=F,file.aio=native,cache.direct=on".replace('F', &path);
    let node = add(&graph, &image).unwrap();
    for without in ["cache.direct=off", "", "cache.direct=off,cache.no-flush=on"] {
        let error = reopen(&graph, &[changed(&node, without)]).unwrap_err().to_string();
        assert!(error.contains(words), "{without}: {error}");
        let mode = node.child(ChildRole::File).unwrap().file().unwrap().cache_mode();
        assert_eq!((mode.direct, mode.no_flush), (true, false), "{without}");
    }
    reopen(&graph, &[changed(&node, "cache.direct=on,cache.no-flush=on")]).unwrap();
    drop(node);
    rt::block_on(graph.close_all()).unwrap();
}

#[test]
fn a_mapping_that_images_share_keeps_its_shape() {
    let folder = folder();
    let path = image(folder.path(), "a.qcow2", "4M", "cluster_size=4k");
    let graph = Graph::new(&cowshed_image::DRIVERS);
    let nodes = ["a", "b"]
        .map(|name| add(&graph, &format!("driver=qcow2,node-name={name},file.filename={path},read-only=on")).unwrap());
    let smaller = [changed(&nodes[0], "read-only=on,l2-cache-entry-size=512")];
    let error = reopen(&graph, &smaller).unwrap_err().to_string();
    assert!(error.contains("elsewhere in this process"), "{error}");
    drop(nodes);
    rt::block_on(graph.delete("b")).unwrap();
    reopen(&graph, &smaller).unwrap();
    rt::block_on(graph.close_all()).unwrap();
}

#[test]
fn a_reopen_of_several_nodes_changes_all_or_none() {
    let folder = folder();
    let (one, two) = (
        image(folder.path(), "a.qcow2", "1M", "preallocation=off"),
        image(folder.path(), "b.qcow2", "1M", "preallocation=off"),
    );
    let graph = Graph::new(&cowshed_image::DRIVERS);
    let a = add(&graph, &format!("driver=qcow2,node-name=a,file.filename={one},read-only=on")).unwrap();
    let b = add(&graph, &format!("driver=qcow2,node-name=b,file.filename={two},read-only=on")).unwrap();
    // Another node reads the second one and shares with readers only.
    let other = rt::block_on(cowshed_image::open(cowshed_image::OpenRequest::file(&two))).unwrap();
    let error =
        reopen(&graph, &[changed(&a, "read-only=off,l2-cache-size=2M"), changed(&b, "read-only=off")]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(a.is_read_only() && b.is_read_only());
    assert_eq!((locks(&one), locks(&two)), (READER.to_vec(), READER.to_vec()));
    assert!(a.options().get("l2-cache-size").is_none());
    rt::block_on(other.close()).unwrap();
    reopen(&graph, &[changed(&a, ""), changed(&b, "backing=b")]).unwrap_err();
    assert!(a.is_read_only() && b.is_read_only(), "a loop is refused, and what came before it is taken back");
    reopen(&graph, &[changed(&a, "read-only=on"), changed(&b, "read-only=off,backing=a")]).unwrap();
    assert_eq!(b.backing().unwrap().name(), "a");
    assert!(rt::block_on(graph.delete("a")).is_err());
    reopen(&graph, &[changed(&b, "read-only=on").with("backing", ())]).unwrap();
    rt::block_on(graph.delete("a")).unwrap();
    rt::block_on(graph.close_all()).unwrap();
}

#[test]
fn a_drain_holds_requests_back_and_lets_them_go_on() {
    let folder = folder();
    let path = image(folder.path(), "a.qcow2", "4M", "cluster_size=64k");
    let graph = Graph::new(&cowshed_image::DRIVERS);
    let node = add(&graph, &format!("driver=qcow2,node-name=n,file.filename={path}")).unwrap();
    let attachment = export(&graph, &node, "e", true).unwrap();
    rt::block_on(async {
        let drained = graph.drain(&[&node]).await;
        let queue = attachment.queue();
        let write = rt::spawn(async move { queue.write(0, IoBuf::copy_from(b"held")).await.0 });
        for _ in 0..100 {
            rt::yield_now().await;
        }
        assert!(!write.is_finished());
        assert_eq!(node.statistics().kinds.iter().map(|kind| kind.operations).sum::<u64>(), 0);
        drop(drained);
        write.await.unwrap();
    });
    assert_eq!(read(&attachment.queue(), 0, 4).unwrap(), b"held");
}

#[test]
fn nodes_in_use_stay_and_misfits_are_refused() {
    let folder = folder();
    let path = image(folder.path(), "a.qcow2", "4M", "cluster_size=64k");
    let other = image(folder.path(), "b.qcow2", "4M", "cluster_size=64k");
    let graph = Graph::new(&cowshed_image::DRIVERS);
    let node = add(&graph, &format!("driver=qcow2,node-name=n,file.filename={path},read-only=on")).unwrap();
    assert_eq!(
        add(&graph, &format!("driver=qcow2,file.filename={other}")).unwrap_err().kind(),
        ErrorKind::InvalidArgument
    );
    let error = export(&graph, &node, "w", true).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ReadOnly);
    let attachment = export(&graph, &node, "r", false).unwrap();
    assert_eq!(export(&graph, &node, "r", false).unwrap_err().kind(), ErrorKind::Busy);
    let error = rt::block_on(graph.delete("n")).unwrap_err();
    assert!(error.kind() == ErrorKind::Busy && error.to_string().contains("attachment:r"), "{error}");
    assert_eq!(rt::block_on(graph.delete("none")).unwrap_err().kind(), ErrorKind::NotFound);
    let queue = attachment.queue();
    assert_eq!(write(&queue, 0, b"x").unwrap_err().kind(), ErrorKind::ReadOnly);
    let zeroes = rt::block_on(queue.write_zeroes(0, 512, ZeroFlags::default()));
    assert_eq!(zeroes.unwrap_err().kind(), ErrorKind::ReadOnly);
    assert!(read(&queue, 4 << 20, 1).is_err());
    let stats = attachment.statistics();
    assert_eq!(
        stats.kinds.map(|kind| (kind.operations, kind.failed, kind.invalid)).iter().map(|kind| kind.2).sum::<u64>(),
        3
    );

    let overlay = add(&graph, &format!("driver=qcow2,node-name=o,file.filename={other},backing=n")).unwrap();
    let error = rt::block_on(graph.take_snapshot(&node, &overlay)).map(drop).unwrap_err();
    assert!(error.to_string().contains("already has a backing image"), "{error}");
    let error = rt::block_on(graph.set_backing(&node, Some(&overlay))).unwrap_err();
    assert!(error.to_string().contains("would create a cycle"), "{error}");
    rt::block_on(graph.set_backing(&overlay, None)).unwrap();
    rt::block_on(attachment.detach()).unwrap();
    assert!(read(&queue, 0, 1).unwrap_err().to_string().contains("detached"));
    rt::block_on(graph.delete("n")).unwrap();
    assert!(graph.find("n").is_none());
    rt::block_on(graph.close_all()).unwrap();
    assert!(graph.find("o").is_none());
}

#[test]
fn a_relink_that_fails_leaves_header_and_graph_as_they_were() {
    let folder = folder();
    let base = image(folder.path(), "base", "1M", "cluster_size=64k");
    let over =
        |name: &str, below: &str| image(folder.path(), name, "1M", &format!("backing_file={below},backing_fmt=qcow2"));
    let path = over("image", &base);
    let above = over("above", &path);
    let graph = Graph::new(&cowshed_image::DRIVERS);
    let base_node = add(&graph, &format!("driver=qcow2,node-name=base,file.filename={base},read-only=on")).unwrap();
    let options = format!("driver=qcow2,node-name=image,file.filename={path},backing=base,read-only=on");
    let node = add(&graph, &options).unwrap();
    let above = add(&graph, &format!("driver=qcow2,node-name=above,file.filename={above},backing=image")).unwrap();

    // The header is written before the graph finds out that this is a loop.
    let name = HeaderName { file: "elsewhere".to_owned(), format: "raw" };
    let error = rt::block_on(graph.relink(&node, Some(&above), Some(name))).unwrap_err();
    assert!(error.to_string().contains("would create a cycle"), "{error}");
    let backing = node.backing_name().unwrap();
    assert_eq!((backing.name(), backing.format()), (Some(base.clone()), Some("qcow2".to_owned())));
    assert!(node.is_read_only() && node.child(ChildRole::File).unwrap().is_read_only());
    assert!(Arc::ptr_eq(&node.backing().unwrap(), &base_node));
    rt::block_on(graph.close_all()).unwrap();
    let info = tool("qemu-img", &["info", &path]);
    assert!(info.contains(&format!("backing file: {base}\n")) && info.contains("backing file format: qcow2"), "{info}");
}

#[test]
fn a_raw_window_moves_while_clients_use_it() {
    let folder = folder();
    let path = folder.path().join("disk");
    let bytes: Vec<u8> = (0..4u8).flat_map(|part| vec![part + 1; 65536]).collect();
    std::fs::write(&path, &bytes).unwrap();
    let graph = Graph::new(&cowshed_image::DRIVERS);
    let options = |more: &str| {
        let text = format!("driver=raw,node-name=r,file.driver=file,file.filename={}{more}", path.display());
        BlockdevOptions::from_keyval(&text).unwrap()
    };
    let node = rt::block_on(graph.add(options(",offset=64k,size=64k"))).unwrap();
    let attachment = export(&graph, &node, "e", true).unwrap();
    let queue = attachment.queue();
    assert_eq!((attachment.size(), read(&queue, 0, 512).unwrap()), (65536, vec![2; 512]));
    rt::block_on(graph.reopen(vec![options(",offset=128k,size=128k")])).unwrap();
    assert_eq!((attachment.size(), read(&queue, 0, 512).unwrap()), (131_072, vec![3; 512]));
    assert_eq!(read(&queue, 65536, 512).unwrap(), [4; 512]);
    write(&queue, 130_560, &[9; 512]).unwrap();
    // Left out, they go back to their defaults: all of the file.
    rt::block_on(graph.reopen(vec![options("")])).unwrap();
    assert_eq!((attachment.size(), read(&queue, 0, 512).unwrap()), (262_144, vec![1; 512]));
    assert_eq!(read(&queue, 261_632, 512).unwrap(), [9; 512]);
    for (wrong, reason) in
        [(",offset=512k", "'offset' is past the end"), (",offset=128k,size=256k", "'offset' + 'size'")]
    {
        let error = rt::block_on(graph.reopen(vec![options(wrong)])).unwrap_err();
        assert!(error.to_string().contains(reason), "{error}");
        assert_eq!(attachment.size(), 262_144);
    }
    rt::block_on(attachment.detach()).unwrap();
    // An image that is stored in it would be torn.
    let inner = image(folder.path(), "inner.qcow2", "1M", "cluster_size=64k");
    let raw = format!("driver=qcow2,node-name=q,file.driver=raw,file.node-name=w,file.file.filename={inner}");
    add(&graph, &raw).unwrap();
    let window = BlockdevOptions::from_keyval("driver=raw,node-name=w,offset=64k").unwrap();
    let error = rt::block_on(graph.reopen(vec![window])).unwrap_err();
    assert!(error.to_string().contains("in use by 'q'"), "{error}");
    rt::block_on(graph.close_all()).unwrap();
}
