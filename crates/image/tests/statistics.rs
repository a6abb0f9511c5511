// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What attachments and nodes count, on a virtual clock; dirty maps.

use cowshed_block::Errno;
use cowshed_image::filters::{FaultOp, FaultRule};
use cowshed_image::graph::{AttachRequest, Attachment, Graph};
use cowshed_image::options::BlockdevOptions;
use cowshed_image::stats::IoKind;
use cowshed_image::{Node, ZeroFlags};
use cowshed_storage::sim::{Config, World};
use cowshed_storage::{IoBuf, rt};
use std::sync::Arc;
use std::time::Duration;

const MS: u64 = 1_000_000;

async fn add(graph: &Arc<Graph>, options: &str) -> Arc<Node> {
    graph.add(BlockdevOptions::from_keyval(options).unwrap()).await.unwrap()
}

/// A disk whose requests take ten milliseconds, behind a fault filter.
async fn slow_disk(graph: &Arc<Graph>) -> Arc<Attachment> {
    let options =
        "driver=fault,node-name=n,file.driver=null-co,file.size=1M,file.read-zeroes=on,file.latency-ns=10000000";
    let node = add(graph, options).await;
    graph.attach(&node, AttachRequest::export("e", true)).await.unwrap()
}

fn in_simulation<F: Future<Output = ()>>(work: F) {
    World::new(Config::new(1)).run(work);
}

#[test]
fn outcomes_bytes_and_times_are_counted_apart() {
    in_simulation(async {
        let graph = Graph::new();
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
        // What a queue counted stays when it goes, and the nodes count what reaches them.
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
fn intervals_and_histograms_show_latencies() {
    in_simulation(async {
        let graph = Graph::new();
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
        let graph = Graph::new();
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
