// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The counters of attachments and nodes, on a virtual clock; dirty maps.

use cowshed_image::filters::{FaultOp, FaultRule};
use cowshed_image::graph::{AttachRequest, Attachment, Graph};
use cowshed_image::options::BlockdevOptions;
use cowshed_image::stats::{Accounting, IoKind, KINDS, KindStats};
use cowshed_image::{Node, ZeroFlags};
use cowshed_simulator::{Config, World};
use cowshed_storage::{IoBuf, rt};
use cowshed_testkit::programs::tool;
use cowshed_types::Errno;
use std::sync::Arc;
use std::time::Duration;

const MS: u64 = 1_000_000;

async fn add(graph: &Arc<Graph>, options: &str) -> Arc<Node> {
    graph.add(BlockdevOptions::from_keyval(options).unwrap()).await.unwrap()
}

/// A disk whose requests take ten milliseconds, behind a fault filter.
async fn slow_disk(graph: &Arc<Graph>) -> Arc<Attachment> {
    let options = "driver=fault,node-name=n,discard=unmap,file.driver=null-co,file.size=1M,file.read-zeroes=on,\
                   file.latency-ns=10000000";
    let node = add(graph, options).await;
    graph.attach(&node, AttachRequest::export("e", true)).await.unwrap()
}

fn in_simulation<F: Future<Output = ()>>(work: F) {
    World::new(Config::new(1)).run(work);
}

#[test]
fn outcomes_bytes_and_times_are_counted_apart() {
    in_simulation(async {
        let graph = Graph::new(&cowshed_image::DRIVERS);
        let attachment = slow_disk(&graph).await;
        assert_eq!(attachment.statistics().idle_ns, None);
        let queue = attachment.queue();
        for _ in 0..3 {
            queue.read(4096, IoBuf::zeroed(512)).await.0.unwrap();
        }
        queue.write(8192, IoBuf::zeroed(4096)).await.0.unwrap();
        queue.write_zeroes(65536, 4096, ZeroFlags::default()).await.unwrap();
        queue.flush().await.unwrap();
        assert!(queue.read(1 << 20, IoBuf::zeroed(512)).await.0.is_err());
        attachment.node().fault().unwrap().arm(FaultRule::always(FaultOp::Write, Errno::EIO));
        assert!(queue.write(0, IoBuf::zeroed(512)).await.0.is_err());
        queue.count_merged(IoKind::Write);
        queue.count_invalid(IoKind::Discard);
        // The idle time that is asked for below.
        rt::sleep(Duration::from_secs(2)).await;
        let stats = attachment.statistics();
        let read = stats.kind(IoKind::Read);
        assert_eq!((read.operations, read.bytes, read.failed, read.invalid), (3, 1536, 0, 1));
        assert_eq!(read.total_ns, 3 * 10 * MS);
        let write = stats.kind(IoKind::Write);
        assert_eq!((write.operations, write.bytes, write.failed, write.merged), (1, 4096, 1, 1));
        assert_eq!((stats.kind(IoKind::WriteZeroes).bytes, stats.kind(IoKind::Flush).operations), (4096, 1));
        assert_eq!((stats.kind(IoKind::Discard).invalid, stats.highest_written_byte), (1, 65536 + 4096));
        assert_eq!((stats.in_flight, stats.idle_ns), (0, Some(2000 * MS)));
        // Counts of a queue stay when it goes, and the nodes count the requests that reach them.
        drop(queue);
        assert_eq!(attachment.statistics().kinds, stats.kinds);
        let node = attachment.node();
        let below = node.children()[0].node.statistics();
        assert_eq!((node.statistics().kind(IoKind::Read).operations, below.kind(IoKind::Read).operations), (3, 3));
        assert_eq!((node.statistics().kind(IoKind::Write).failed, below.kind(IoKind::Write).operations), (1, 1));
        assert_eq!(node.statistics().kind(IoKind::Read).invalid, 1);
    });
}

#[test]
fn nodes_count_impossible_requests_of_every_kind() {
    in_simulation(async {
        let graph = Graph::new(&cowshed_image::DRIVERS);
        let node = add(&graph, "driver=null-co,node-name=n,discard=unmap,size=1M").await;
        let (past, buf) = (1 << 20, || IoBuf::zeroed(512));
        assert!(node.read(past, buf()).await.0.is_err() && node.write(past, buf()).await.0.is_err());
        assert!(node.write_zeroes(past, 512, ZeroFlags::default()).await.is_err());
        assert!(node.discard(past - 512, 1024).await.is_err());
        assert!(node.write_compressed(vec![(past, buf())]).await.is_err());
        let stats = node.statistics();
        let counts = |kind| (stats.kind(kind).invalid, stats.kind(kind).operations, stats.kind(kind).failed);
        assert_eq!(counts(IoKind::Read), (1, 0, 0));
        assert_eq!(counts(IoKind::Write), (2, 0, 0));
        assert_eq!(counts(IoKind::WriteZeroes), (1, 0, 0));
        assert_eq!(counts(IoKind::Discard), (1, 0, 0));
    });
}

#[test]
fn failed_requests_count_for_latencies_unless_told_otherwise() {
    in_simulation(async {
        let graph = Graph::new(&cowshed_image::DRIVERS);
        let attachment = slow_disk(&graph).await;
        attachment.set_intervals(&[60]).unwrap();
        attachment.node().fault().unwrap().arm(FaultRule::always(FaultOp::Flush, Errno::EIO));
        let queue = attachment.queue();
        for (failed, invalid) in [(true, true), (false, false)] {
            attachment.set_accounting(Accounting { failed, invalid });
            // Simulated idle time, which the last counted request ends.
            rt::sleep(Duration::from_secs(1)).await;
            queue.read(0, IoBuf::zeroed(512)).await.0.unwrap();
            rt::sleep(Duration::from_secs(1)).await;
            assert!(queue.flush().await.is_err());
            assert!(queue.read(1 << 20, IoBuf::zeroed(512)).await.0.is_err());
            let stats = attachment.statistics();
            let idle_ms = stats.idle_ns.unwrap() / MS;
            assert_eq!(idle_ms, if failed { 0 } else { 1000 });
            assert_eq!(stats.intervals[0].kind(IoKind::Flush).operations, 1, "only the first one");
            assert_eq!(stats.accounting, Accounting { failed, invalid });
        }
        let stats = attachment.statistics();
        assert_eq!((stats.kind(IoKind::Flush).failed, stats.kind(IoKind::Read).invalid), (2, 2));
    });
}

#[test]
fn what_formats_do_with_their_files_is_counted_there() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("a.qcow2");
    tool("qemu-img", &["create", "-q", "-f", "qcow2", path.to_str().unwrap(), "64M"]);
    rt::block_on(async {
        let graph = Graph::new(&cowshed_image::DRIVERS);
        let name = path.to_str().unwrap();
        let node = add(&graph, &format!("driver=qcow2,node-name=n,file.filename={name},file.node-name=p")).await;
        let file = graph.node("p").unwrap();
        let before = file.statistics();
        assert!(before.kind(IoKind::Read).operations > 0, "the header was read");
        node.write(1 << 20, IoBuf::zeroed(65536)).await.0.unwrap();
        node.write(0, IoBuf::copy_from(&[7; 65536])).await.0.unwrap();
        node.flush().await.unwrap();
        let stats = file.statistics();
        let written = stats.kind(IoKind::Write).bytes - before.kind(IoKind::Write).bytes;
        assert!(written > 2 * 65536 && written < 4 * 65536, "two clusters and metadata, not {written}");
        let end = std::fs::metadata(&path).unwrap().len();
        assert_eq!(stats.highest_written_byte, end, "the file ends where it was written last");
        assert!(stats.kind(IoKind::Flush).operations > before.kind(IoKind::Flush).operations);
        assert_eq!(node.statistics().highest_written_byte, (1 << 20) + 65536);
        let reads = stats.kind(IoKind::Read).operations;
        node.read(0, IoBuf::zeroed(4096)).await.0.unwrap();
        assert_eq!(file.statistics().kind(IoKind::Read).operations, reads + 1);
        // A request through the node has the same counter, and counts once.
        file.read(0, IoBuf::zeroed(512)).await.0.unwrap();
        assert!(file.read(1 << 40, IoBuf::zeroed(512)).await.0.is_err());
        let read = *file.statistics().kind(IoKind::Read);
        assert_eq!((read.operations, read.invalid), (reads + 2, 1));
        graph.close_all().await.unwrap();
    });
}

#[test]
fn intervals_and_histograms_show_latencies() {
    in_simulation(async {
        let graph = Graph::new(&cowshed_image::DRIVERS);
        let attachment = slow_disk(&graph).await;
        assert!(attachment.set_intervals(&[0]).is_err() && attachment.set_intervals(&[1; 17]).is_err());
        assert!(attachment.set_histogram(IoKind::Read, &[5, 5]).is_err());
        attachment.set_intervals(&[8, 60]).unwrap();
        attachment.set_histogram(IoKind::Read, &[5 * MS, 10 * MS, 50 * MS]).unwrap();
        let reads: Vec<_> = (0..4)
            .map(|_| {
                let queue = attachment.queue();
                rt::spawn(async move {
                    for _ in 0..100 {
                        queue.read(0, IoBuf::zeroed(512)).await.0.unwrap();
                    }
                })
            })
            .collect();
        for read in reads {
            read.await;
        }
        let stats = attachment.statistics();
        let short = stats.intervals[0].kind(IoKind::Read);
        assert_eq!((short.min_ns, short.max_ns, short.average_ns, short.operations), (10 * MS, 10 * MS, 10 * MS, 400));
        assert!((3900..=4000).contains(&short.average_queue_depth_milli), "{short:?}");
        assert_eq!(stats.intervals[1].kind(IoKind::Read), short);
        assert_eq!(stats.intervals[0].kind(IoKind::Write).operations, 0);
        let histogram = stats.histograms[IoKind::Read as usize].as_ref().unwrap();
        assert_eq!(histogram.bins, [0, 0, 400, 0]);
        assert!(stats.histograms[IoKind::Write as usize].is_none());
        // The short interval ends, the long one goes on.
        rt::sleep(Duration::from_secs(9)).await;
        let later = attachment.statistics();
        assert_eq!(
            (later.intervals[0].kind(IoKind::Read).operations, later.intervals[1].kind(IoKind::Read).operations),
            (0, 400)
        );
        attachment.set_histogram(IoKind::Read, &[]).unwrap();
        attachment.set_intervals(&[]).unwrap();
        attachment.queue().read(0, IoBuf::zeroed(512)).await.0.unwrap();
        let ended = attachment.statistics();
        assert!(ended.intervals.is_empty() && ended.histograms[0].is_none());
    });
}

#[test]
fn dirty_maps_follow_every_kind_of_change() {
    in_simulation(async {
        let graph = Graph::new(&cowshed_image::DRIVERS);
        let attachment = slow_disk(&graph).await;
        let (node, queue) = (attachment.node(), attachment.queue());
        queue.write(0, IoBuf::zeroed(512)).await.0.unwrap();
        let map = node.track_dirty(4096).unwrap();
        let coarse = node.track_dirty(65536).unwrap();
        queue.read(0, IoBuf::zeroed(512)).await.0.unwrap();
        assert_eq!(map.dirty_bytes(), 0);
        queue.write(5000, IoBuf::zeroed(512)).await.0.unwrap();
        queue.write_zeroes(65536, 8192, ZeroFlags::default()).await.unwrap();
        queue.discard(1 << 19, 1).await.unwrap();
        node.fault().unwrap().arm(FaultRule::always(FaultOp::Write, Errno::EIO));
        assert!(queue.write(1 << 18, IoBuf::zeroed(512)).await.0.is_err());
        let mut runs = Vec::new();
        while let Some(run) = map.take_next(0, 1 << 20) {
            runs.push(run);
        }
        assert_eq!(runs, [4096..8192, 65536..73728, 1 << 18..(1 << 18) + 4096, 1 << 19..(1 << 19) + 4096]);
        assert_eq!(coarse.dirty_bytes(), 4 * 65536);
        drop(coarse);
        node.fault().unwrap().disarm();
        queue.write(0, IoBuf::zeroed(512)).await.0.unwrap();
        assert!(map.is_dirty(0, 1));
        assert!(node.track_dirty(1000).is_err());
    });
}

#[test]
fn counts_of_an_export_stay_with_its_node() {
    in_simulation(async {
        let graph = Graph::new(&cowshed_image::DRIVERS);
        let attachment = slow_disk(&graph).await;
        let (node, queue, other) = (attachment.node(), attachment.queue(), attachment.queue());
        for offset in [0, 4096, 8192] {
            queue.read(offset, IoBuf::zeroed(512)).await.0.unwrap();
        }
        other.write(65536, IoBuf::zeroed(4096)).await.0.unwrap();
        // A request of another user.
        node.read(0, IoBuf::zeroed(1024)).await.0.unwrap();
        let exported = attachment.statistics();
        assert_eq!((exported.kind(IoKind::Read).operations, exported.kind(IoKind::Read).bytes), (3, 1536));
        assert_eq!((exported.kind(IoKind::Write).bytes, exported.highest_written_byte), (4096, 65536 + 4096));
        let expect = |when: &str| {
            let stats = node.statistics();
            let (read, write) = (stats.kind(IoKind::Read), stats.kind(IoKind::Write));
            assert_eq!((read.operations, read.bytes, read.total_ns), (4, 2560, 4 * 10 * MS), "{when}");
            assert_eq!((write.operations, write.bytes, write.total_ns), (1, 4096, 10 * MS), "{when}");
            assert_eq!((stats.highest_written_byte, stats.last_end_ns), (65536 + 4096, 50 * MS), "{when}");
        };
        expect("all are there");
        // Time of the simulation, in which nothing may change.
        rt::sleep(Duration::from_secs(1)).await;
        drop(queue);
        expect("a queue is gone");
        attachment.hand_over().await.unwrap();
        expect("the export is gone, a queue still there");
        drop(other);
        expect("all are gone");
        assert_eq!(attachment.statistics().kinds, exported.kinds);
    });
}

#[test]
fn a_wait_for_a_drain_is_the_time_of_the_export() {
    in_simulation(async {
        let graph = Graph::new(&cowshed_image::DRIVERS);
        let attachment = slow_disk(&graph).await;
        let (node, queue) = (attachment.node(), attachment.queue());
        let drained = graph.drain(&[&node]).await;
        let requests = rt::spawn(async move {
            queue.read(0, IoBuf::zeroed(512)).await.0.unwrap();
            queue
        });
        // Time of the simulation: the length of the drain.
        rt::sleep(Duration::from_secs(1)).await;
        drop(drained);
        let queue = requests.await;
        let times = |kind| (attachment.statistics().kind(kind).total_ns, node.statistics().kind(kind).total_ns);
        assert_eq!(times(IoKind::Read), (1010 * MS, 10 * MS));
        queue.write(0, IoBuf::zeroed(512)).await.0.unwrap();
        assert_eq!(times(IoKind::Write), (10 * MS, 10 * MS));
    });
}

#[test]
fn exports_and_nodes_count_what_differs_apart() {
    in_simulation(async {
        let graph = Graph::new(&cowshed_image::DRIVERS);
        let options = "driver=fault,node-name=n,detect-zeroes=on,file.driver=null-co,file.size=1M,file.read-zeroes=on";
        let node = add(&graph, options).await;
        let attachment = graph.attach(&node, AttachRequest::export("e", true)).await.unwrap();
        let uncounted = graph.attach(&node, AttachRequest::export("u", false).without_statistics()).await.unwrap();
        let queue = attachment.queue();
        queue.write(0, IoBuf::zeroed(4096)).await.0.unwrap();
        queue.write_durable(4096, IoBuf::copy_from(&[7; 512])).await.0.unwrap();
        uncounted.queue().read(0, IoBuf::zeroed(512)).await.0.unwrap();
        attachment.set_histogram(IoKind::Read, &[MS]).unwrap();
        queue.read(0, IoBuf::zeroed(1024)).await.0.unwrap();
        let of_export = attachment.statistics().kinds.map(|kind| (kind.operations, kind.bytes));
        let of_node = node.statistics().kinds.map(|kind| (kind.operations, kind.bytes));
        assert_eq!(of_export, [(1, 1024), (2, 4608), (0, 0), (0, 0), (0, 0)]);
        assert_eq!(of_node, [(2, 1536), (1, 512), (1, 4096), (0, 0), (1, 0)]);
        assert_eq!(uncounted.statistics().kinds, [KindStats::default(); KINDS]);
    });
}

#[test]
fn counts_go_to_the_node_that_is_there() {
    in_simulation(async {
        let graph = Graph::new(&cowshed_image::DRIVERS);
        let attachment = slow_disk(&graph).await;
        let (node, queue) = (attachment.node(), attachment.queue());
        let read = async |count: u64| {
            for _ in 0..count {
                queue.read(0, IoBuf::zeroed(512)).await.0.unwrap();
            }
        };
        queue.write(1 << 16, IoBuf::zeroed(512)).await.0.unwrap();
        read(2).await;
        let options = BlockdevOptions::from_keyval("driver=fault,node-name=f").unwrap();
        let filter = graph.insert_filter(&node, options).await.unwrap();
        assert_eq!(filter.statistics().highest_written_byte, 0);
        read(3).await;
        queue.write(0, IoBuf::zeroed(512)).await.0.unwrap();
        let counts = |node: &Node| {
            let stats = node.statistics();
            (stats.kind(IoKind::Read).operations, stats.kind(IoKind::Write).operations, stats.highest_written_byte)
        };
        assert_eq!((counts(&filter), counts(&node)), ((3, 1, 512), (5, 2, (1 << 16) + 512)));
        graph.take_filter_out(&filter).await.unwrap();
        read(4).await;
        assert_eq!((counts(&filter), counts(&node)), ((3, 1, 512), (9, 2, (1 << 16) + 512)));
        let all = attachment.statistics();
        assert_eq!((all.kind(IoKind::Read).operations, all.highest_written_byte), (9, (1 << 16) + 512));
        assert_eq!(all.kind(IoKind::Read).total_ns, 9 * 10 * MS);
    });
}

#[test]
fn no_count_of_many_threads_is_lost() {
    let graph = Graph::new(&cowshed_image::DRIVERS);
    let options = "driver=fault,node-name=n,file.driver=null-co,file.size=1M,file.read-zeroes=on";
    let node = rt::block_on(add(&graph, options));
    let attachment = rt::block_on(graph.attach(&node, AttachRequest::export("e", true))).unwrap();
    std::thread::scope(|scope| {
        let threads = [0; 4].map(|_| {
            scope.spawn(|| {
                rt::block_on(async {
                    // Queues come and go meanwhile.
                    for _ in 0..50 {
                        let queue = attachment.queue();
                        for _ in 0..20 {
                            queue.read(0, IoBuf::zeroed(512)).await.0.unwrap();
                        }
                    }
                });
            })
        });
        let (mut at_node, mut at_export) = (0, 0);
        while threads.iter().any(|thread| !thread.is_finished()) {
            let seen = (
                node.statistics().kind(IoKind::Read).operations,
                attachment.statistics().kind(IoKind::Read).operations,
            );
            assert!(seen.0 >= at_node && seen.1 >= at_export, "{seen:?} after {at_node}, {at_export}");
            (at_node, at_export) = seen;
            std::thread::yield_now();
        }
    });
    let read =
        |kinds: [KindStats; KINDS]| (kinds[IoKind::Read as usize].operations, kinds[IoKind::Read as usize].bytes);
    assert_eq!(read(node.statistics().kinds), (4000, 4000 * 512));
    assert_eq!(read(attachment.statistics().kinds), (4000, 4000 * 512));
}
