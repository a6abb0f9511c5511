// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Changes of the graph while compressed clusters are read ahead, by tasks that outlive the request that started them.
//! The disk is so slow that they are under way for certain. Nothing hangs, no read follows the change, and later reads
//! have the image's data.

use cowshed_image::formats::DriverOf;
use cowshed_image::graph::{AttachRequest, Attachment, Graph};
use cowshed_image::options::BlockdevOptions;
use cowshed_image::{Node, Preallocation};
use cowshed_simulator::{Config, Effect, Fault, OpKind, PageMap, Snapshot, World};
use cowshed_storage::{FileOp, IoBuf, rt};
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_types::Result;
use std::sync::Arc;
use std::time::Duration;

const CLUSTER: u64 = 65536;
const CLUSTERS: u64 = 24;
const SIZE: u64 = CLUSTER * CLUSTERS;
/// The time of a read once the disk is slow; in virtual time.
const SLOW: Duration = Duration::from_secs(5);

/// Compressible, and different everywhere.
fn content(seed: u64) -> Vec<u8> {
    let lines = (0_u64..).flat_map(|line| {
        let noise = (line + seed).wrapping_mul(0x9e37_79b9) >> 7;
        format!("{seed} line {line} says {noise:x}\n").into_bytes()
    });
    lines.take(SIZE as usize).collect()
}

fn compressed(seed: u64) -> PageMap {
    let folder = temp_dir();
    let (raw, image) = (folder.path().join("raw"), folder.path().join("image"));
    std::fs::write(&raw, content(seed)).expect("a file");
    Qemu::system().convert((&raw, "raw"), (&image, "qcow2"), &["-c"]);
    PageMap::from_bytes(&std::fs::read(&image).expect("the image"))
}

fn files() -> Snapshot {
    let folder = temp_dir();
    let overlay = folder.path().join("overlay");
    Qemu::system().create(&overlay, "qcow2", "", SIZE);
    let overlay = PageMap::from_bytes(&std::fs::read(&overlay).expect("the overlay"));
    [("disk".to_owned(), compressed(1)), ("other".to_owned(), compressed(2)), ("overlay".to_owned(), overlay)]
        .into_iter()
        .collect()
}

async fn add(graph: &Arc<Graph>, options: &str) -> Result<Arc<Node>> {
    graph.add(BlockdevOptions::from_keyval(options)?).await
}

async fn expect(disk: &Arc<Attachment>, cluster: u64, expected: &[u8]) {
    let (result, buf) = disk.queue().read(cluster * CLUSTER, IoBuf::zeroed(512)).await;
    result.unwrap_or_else(|error| panic!("cluster {cluster}: {error}"));
    let at = (cluster * CLUSTER) as usize;
    assert!(*buf == expected[at..at + 512], "cluster {cluster} is not what the image holds");
}

async fn expect_all(disk: &Arc<Attachment>, expected: &[u8]) {
    for cluster in 0..disk.size() / CLUSTER {
        expect(disk, cluster, expected).await;
    }
}

/// Reads of the image's file so far.
fn reads(node: &Node) -> u64 {
    node.qcow2().expect("an image").image_file().statistics().of(FileOp::Read).operations
}

/// A disk whose next clusters are being read.
struct Scene {
    graph: Arc<Graph>,
    node: Arc<Node>,
    disk: Arc<Attachment>,
    before: Vec<u8>,
}

impl Scene {
    async fn begin(world: &World) -> Scene {
        let graph = Graph::new(&cowshed_image::DRIVERS);
        let node = add(&graph, "driver=qcow2,node-name=disk,discard=unmap,file.filename=disk").await.expect("the disk");
        let disk = graph.attach(&node, AttachRequest::export("guest", true)).await.expect("attached");
        let before = content(1);
        expect(&disk, 0, &before).await;
        expect(&disk, 1, &before).await;
        // The third one in a row starts to read ahead; its own read still is a fast one.
        world.add_fault(Fault::new(Effect::Delay(SLOW)).kind(OpKind::Read).file("disk").skip(1).times(u64::MAX));
        let started = world.now();
        expect(&disk, 2, &before).await;
        assert!(world.now() - started < SLOW, "the reader doesn't wait for what is read ahead");
        while world.fault_hits() == 0 {
            rt::yield_now().await;
        }
        Scene { graph, node, disk, before }
    }

    /// Makes a change of the graph that has to wait for the read-ahead, and nothing is read once it is done.
    async fn wait_for(&self, world: &World, change: impl Future<Output = ()>) {
        let started = world.now();
        change.await;
        assert!(world.now() - started > SLOW / 2, "nothing was read ahead, or nobody waited for it");
        world.clear_faults();
        let counted = reads(&self.node);
        // Nothing happens, however long this takes.
        rt::sleep(4 * SLOW).await;
        assert_eq!(reads(&self.node), counted, "something is read behind the change");
    }

    async fn end(self) {
        self.disk.detach().await.expect("detached");
        drop(self.node);
        self.graph.close_all().await.expect("closed");
    }
}

fn on_a_slow_disk<F: Future<Output = ()>>(test: impl Fn(World) -> F) {
    let files = files();
    for seed in 0..4 {
        let world = World::with_files(Config::new(seed), &files);
        world.run(test(world.clone()));
    }
}

#[test]
fn a_drain_waits_for_what_is_read_ahead() {
    on_a_slow_disk(|world| async move {
        let scene = Scene::begin(&world).await;
        scene
            .wait_for(&world, async {
                let drained = scene.graph.drain(&[&scene.node]).await;
                let counted = reads(&scene.node);
                // Nothing happens, however long this takes.
                rt::sleep(2 * SLOW).await;
                assert_eq!(reads(&scene.node), counted, "something is read under the drain");
                drop(drained);
            })
            .await;
        expect_all(&scene.disk, &scene.before).await;
        scene.end().await;
    });
}

#[test]
fn deleted_image_leaves_no_readahead_behind() {
    on_a_slow_disk(|world| async move {
        let scene = Scene::begin(&world).await;
        scene
            .wait_for(&world, async {
                scene.disk.detach().await.expect("detached");
                scene.graph.delete("disk").await.expect("deleted");
            })
            .await;
        // Another image under the same name, and in the same place.
        world.add_file("disk", world.contents("other").expect("the other image"));
        let node = add(&scene.graph, "driver=qcow2,node-name=disk,file.filename=disk").await.expect("the other disk");
        let disk = scene.graph.attach(&node, AttachRequest::export("guest", true)).await.expect("attached");
        expect_all(&disk, &content(2)).await;
        disk.detach().await.expect("detached");
        drop(node);
        scene.graph.close_all().await.expect("closed");
    });
}

#[test]
fn a_reopened_image_begins_without_what_was_read_ahead() {
    for options in ["l2-cache-entry-size=512,discard=unmap", "read-only=on", "l2-cache-size=64k,discard=ignore"] {
        on_a_slow_disk(|world| async move {
            let scene = Scene::begin(&world).await;
            if options.contains("read-only") {
                scene.disk.detach().await.expect("detached");
            }
            scene
                .wait_for(&world, async {
                    let options = format!("driver=qcow2,node-name=disk,{options}");
                    let options = BlockdevOptions::from_keyval(&options).expect("options");
                    scene.graph.reopen(vec![options]).await.expect("reopened");
                })
                .await;
            let reader =
                scene.graph.attach(&scene.node, AttachRequest::export("reader", false)).await.expect("attached");
            expect_all(&reader, &scene.before).await;
            reader.detach().await.expect("detached");
            scene.end().await;
        });
    }
}

#[test]
fn a_disk_that_was_cut_off_forgets_what_was_read_ahead() {
    on_a_slow_disk(|world| async move {
        let mut scene = Scene::begin(&world).await;
        scene
            .wait_for(&world, async {
                let drained = scene.graph.drain(&[&scene.node]).await;
                scene.node.resize(4 * CLUSTER, Preallocation::Off).await.expect("shrunk");
                scene.node.resize(SIZE, Preallocation::Off).await.expect("grown");
                drop(drained);
            })
            .await;
        scene.before[4 * CLUSTER as usize..].fill(0);
        expect_all(&scene.disk, &scene.before).await;
        // Puts other data into the places of the range that was cut off.
        let fresh = content(3);
        let clusters = (6..12).map(|cluster| {
            let at = (cluster * CLUSTER) as usize;
            scene.before[at..at + CLUSTER as usize].copy_from_slice(&fresh[at..at + CLUSTER as usize]);
            (cluster * CLUSTER, IoBuf::copy_from(&fresh[at..at + CLUSTER as usize]))
        });
        let clusters = clusters.collect();
        scene.node.write_compressed(clusters).await.expect("written");
        expect_all(&scene.disk, &scene.before).await;
        scene.end().await;
    });
}

#[test]
fn snapshots_wait_for_what_is_read_ahead_and_keep_it() {
    on_a_slow_disk(|world| async move {
        let mut scene = Scene::begin(&world).await;
        let overlay =
            add(&scene.graph, "driver=qcow2,node-name=overlay,file.filename=overlay").await.expect("an overlay");
        scene
            .wait_for(&world, async {
                scene.graph.take_snapshot(&scene.node, &overlay).await.expect("a snapshot");
            })
            .await;
        let fresh = content(3);
        let at = 5 * CLUSTER;
        let place = at as usize..at as usize + 512;
        scene.disk.queue().write(at, IoBuf::copy_from(&fresh[place.clone()])).await.0.expect("written");
        scene.before[place.clone()].copy_from_slice(&fresh[place]);
        expect_all(&scene.disk, &scene.before).await;
        drop(overlay);
        scene.end().await;
    });
}

#[test]
fn internal_snapshots_wait_for_what_is_read_ahead_and_keep_it() {
    on_a_slow_disk(|world| async move {
        let mut scene = Scene::begin(&world).await;
        scene
            .wait_for(&world, async {
                scene.graph.take_internal_snapshot(&scene.node, "s").await.expect("a snapshot");
            })
            .await;
        let fresh = content(3);
        let at = 5 * CLUSTER;
        let place = at as usize..at as usize + CLUSTER as usize;
        scene.disk.queue().write(at, IoBuf::copy_from(&fresh[place.clone()])).await.0.expect("written");
        scene.before[place.clone()].copy_from_slice(&fresh[place]);
        expect_all(&scene.disk, &scene.before).await;
        scene.end().await;
    });
}
