// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Throttle filters in a graph: rates on a virtual clock, groups over threads, drains, moves; and copy-on-read.

use cowshed_image::filters::throttle::Limits;
use cowshed_image::filters::{FaultOp, FaultRule};
use cowshed_image::graph::{AttachRequest, Attachment, Graph};
use cowshed_image::options::BlockdevOptions;
use cowshed_image::stats::IoKind;
use cowshed_image::{Node, ZeroFlags};
use cowshed_simulator::{Config, World};
use cowshed_storage::{IoBuf, rt};
use cowshed_testkit::programs::tool;
use cowshed_types::{Errno, ErrorKind, Result};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

fn limits(values: &[(&str, u64)]) -> Limits {
    let mut limits = Limits::new();
    values.iter().for_each(|(name, value)| limits.set(name, *value).unwrap());
    limits
}

async fn add(graph: &Arc<Graph>, options: &str) -> Result<Arc<Node>> {
    graph.add(BlockdevOptions::from_keyval(options).unwrap()).await
}

async fn throttled(graph: &Arc<Graph>, name: &str, group: &str) -> Arc<Attachment> {
    let disk = add(graph, &format!("driver=null-co,node-name=d{name},size=1G,read-zeroes=on")).await.unwrap();
    let attachment = graph.attach(&disk, AttachRequest::export(name, true)).await.unwrap();
    let filter = format!("driver=throttle,node-name=t{name},throttle-group={group}");
    graph.insert_filter(&disk, BlockdevOptions::from_keyval(&filter).unwrap()).await.unwrap();
    attachment
}

/// Sends reads (even numbers) and zero writes, `depth` at a time, until the virtual time is over.
fn load(attachment: &Arc<Attachment>, depth: usize, until: Duration) -> Rc<Cell<u64>> {
    let done = Rc::new(Cell::new(0));
    for number in 0..depth {
        let (queue, done) = (attachment.queue(), Rc::clone(&done));
        drop(rt::spawn(async move {
            while rt::now() < until {
                if number % 2 == 0 {
                    queue.read(0, IoBuf::zeroed(4096)).await.0.unwrap();
                } else {
                    queue.write_zeroes(0, 4096, ZeroFlags::default()).await.unwrap();
                }
                if rt::now() < until {
                    done.set(done.get() + 1);
                }
                // Virtual time goes on only while all tasks wait.
                rt::sleep(Duration::from_micros(500)).await;
            }
        }));
    }
    done
}

#[test]
fn rates_hold_and_members_share_on_a_virtual_clock() {
    let world = World::new(Config::new(1));
    world.run(async {
        let graph = Graph::new(&cowshed_image::DRIVERS);
        graph.throttle_groups().create("g", limits(&[("iops-total", 1000)])).unwrap();
        graph.throttle_groups().create("h", limits(&[("bps-total", 40_960_000)])).unwrap();
        let (one, two) = (throttled(&graph, "a", "g").await, throttled(&graph, "b", "g").await);
        let (idle, other) = (throttled(&graph, "c", "g").await, throttled(&graph, "e", "h").await);
        // The first second has the bucket's content on top.
        for attachment in [&one, &two, &other] {
            load(attachment, 32, rt::now() + Duration::from_secs(1));
        }
        // Simulated time: the bucket is empty then.
        rt::sleep(Duration::from_secs(3)).await;
        let until = rt::now() + Duration::from_secs(10);
        let counts = [load(&one, 32, until), load(&two, 4, until), load(&other, 16, until)];
        // Simulated time, until the loads have ended.
        rt::sleep(Duration::from_secs(12)).await;
        let [one_count, two_count, other_count] = counts.map(|count| count.get());
        // Ten seconds and the tenth of a second in the bucket, within 1 %.
        assert!((one_count + two_count).abs_diff(10_100) <= 100, "{one_count} + {two_count}");
        assert!(one_count.abs_diff(two_count) <= 110, "{one_count} against {two_count}");
        assert!(other_count.abs_diff(101_000) <= 1000, "{other_count}");
        let waits = one.node().throttle().unwrap().waits();
        assert!(waits.count > 4000 && waits.total_ns > 0 && waits.waiting == 0);
        assert_eq!(idle.node().throttle().unwrap().waits().count, 0);
        let kinds = one.statistics().kinds;
        let (reads, zeroes) = (kinds[IoKind::Read as usize], kinds[IoKind::WriteZeroes as usize]);
        assert!(reads.operations.abs_diff(zeroes.operations) < 100, "a hole counts like data: {kinds:?}");
        assert!(reads.total_ns > 0);
    });
}

#[test]
fn limits_change_for_requests_that_wait() {
    let world = World::new(Config::new(1));
    world.run(async {
        let graph = Graph::new(&cowshed_image::DRIVERS);
        let group = graph.throttle_groups().create("g", limits(&[("iops-total", 1)])).unwrap();
        let slow = graph.throttle_groups().create("slow", limits(&[("iops-total", 1)])).unwrap();
        let attachment = throttled(&graph, "a", "g").await;
        let start = rt::now();
        let done = load(&attachment, 16, start + Duration::from_secs(5));
        // Simulated time, in which one request is allowed.
        rt::sleep(Duration::from_millis(100)).await;
        assert_eq!(done.get(), 1);
        group.set_limits(limits(&[("iops-total", 100)])).unwrap();
        // Simulated time, in which the new limit allows 90.
        rt::sleep(Duration::from_millis(900)).await;
        assert!((80..=110).contains(&done.get()), "{}", done.get());
        // Another group: those that wait in the old one go at once, then the new limits count.
        attachment.node().throttle().unwrap().set_group(Arc::clone(&slow));
        // The requests that wait go on.
        rt::sleep(Duration::from_millis(10)).await;
        let moved = done.get();
        // Simulated time, in which the slow group allows one.
        rt::sleep(Duration::from_millis(900)).await;
        assert!(done.get() - moved <= 2, "{moved} {}", done.get());
        assert_eq!((group.members(), slow.members()), (0, 1));
        slow.set_limits(Limits::new()).unwrap();
        // The requests that wait go on.
        rt::sleep(Duration::from_millis(10)).await;
        assert!(done.get() > moved + 10);
        assert!(slow.set_limits(limits(&[("iops-size", 1)])).is_err());
        assert_eq!(graph.throttle_groups().delete("slow").unwrap_err().kind(), ErrorKind::Busy);
        graph.throttle_groups().delete("g").unwrap();
        assert_eq!(graph.throttle_groups().delete("g").unwrap_err().kind(), ErrorKind::NotFound);
    });
}

#[test]
fn a_drain_does_not_wait_for_limits() {
    rt::block_on(async {
        let graph = Graph::new(&cowshed_image::DRIVERS);
        // A request each quarter of an hour.
        let hold = limits(&[("bps-total", 10)]);
        graph.throttle_groups().create("g", hold).unwrap();
        let attachment = throttled(&graph, "a", "g").await;
        let queue = attachment.queue();
        let write = |_| {
            let queue = queue.clone();
            rt::spawn(async move { queue.read(0, IoBuf::zeroed(8192)).await.0 })
        };
        let writes: Vec<_> = (0..10).map(write).collect();
        while attachment.node().throttle().unwrap().waits().waiting < 9 {
            rt::yield_now().await;
        }
        let filter = attachment.node();
        graph.remove_filter(&filter).await.unwrap();
        for write in writes {
            write.await.unwrap();
        }
        assert_eq!(attachment.statistics().kind(IoKind::Read).operations, 10);
        assert_eq!(graph.throttle_groups().find("g").unwrap().members(), 0);
    });
}

#[test]
fn threads_share_a_group_and_never_exceed_it() {
    const RATE: u64 = 20_000;
    const EACH: u64 = 1500;
    let graph = Graph::new(&cowshed_image::DRIVERS);
    graph.throttle_groups().create("g", limits(&[("iops-total", RATE)])).unwrap();
    let attachments: Vec<_> = ["a", "b", "c"].map(|name| rt::block_on(throttled(&graph, name, "g"))).into();
    let start = Instant::now();
    std::thread::scope(|scope| {
        for attachment in attachments.iter().chain(&attachments[..1]) {
            scope.spawn(|| {
                let queue = attachment.queue();
                rt::block_on(async {
                    let tasks: Vec<_> = (0..8)
                        .map(|_| {
                            let queue = queue.clone();
                            rt::spawn(async move {
                                for _ in 0..EACH / 8 {
                                    queue.read(0, IoBuf::zeroed(512)).await.0.unwrap();
                                }
                            })
                        })
                        .collect();
                    for task in tasks {
                        task.await;
                    }
                });
            });
        }
    });
    let total = EACH / 8 * 8 * 4;
    // A slow machine only makes it longer.
    let least = Duration::from_secs_f64((total - RATE / 10 - 8) as f64 / RATE as f64);
    assert!(start.elapsed() >= least, "{:?} for {total} requests", start.elapsed());
    let operations: u64 =
        attachments.iter().map(|attachment| attachment.statistics().kind(IoKind::Read).operations).sum();
    assert_eq!(operations, total);
    for attachment in &attachments {
        assert_eq!(attachment.node().throttle().unwrap().waits().waiting, 0);
        rt::block_on(attachment.detach()).unwrap();
    }
}

#[test]
fn requests_past_a_filter_are_counted_and_limited() {
    World::new(Config::new(1)).run(async {
        let graph = Graph::new(&cowshed_image::DRIVERS);
        let group = graph.throttle_groups().create("g", limits(&[("iops-total", 1000)])).unwrap();
        let attachment = throttled(&graph, "a", "g").await;
        let (filter, queue) = (attachment.node(), attachment.queue());
        let read = async |count: u64| {
            for _ in 0..count {
                queue.read(0, IoBuf::zeroed(4096)).await.0.unwrap();
            }
        };
        let start = rt::now();
        read(60).await;
        assert_eq!(rt::now(), start, "a tenth of a second's worth goes at once");
        // An impossible request isn't charged, or the bucket were full now.
        for _ in 0..200 {
            assert!(queue.read(1 << 30, IoBuf::zeroed(512)).await.0.is_err());
        }
        let map = filter.track_dirty(4096).unwrap();
        queue.write(8192, IoBuf::zeroed(512)).await.0.unwrap();
        assert!(map.is_dirty(8192, 1), "who follows the filter's writes sees them");
        read(30).await;
        assert_eq!(rt::now(), start);
        read(1010).await;
        let passed = (rt::now() - start).as_secs_f64();
        assert!((0.99..=1.02).contains(&passed), "1100 requests at 1000 a second, 100 in advance, took {passed}");
        let stats = filter.statistics();
        assert_eq!((stats.kind(IoKind::Read).operations, stats.kind(IoKind::Read).invalid), (1100, 200));
        let below = filter.children()[0].node.statistics();
        assert_eq!((below.kind(IoKind::Read).operations, below.kind(IoKind::Write).operations), (1100, 1));

        // Without limits nothing waits; with limits again at once.
        group.set_limits(Limits::new()).unwrap();
        let start = rt::now();
        read(5000).await;
        assert_eq!(rt::now(), start);
        group.set_limits(limits(&[("bps-read", 4096)])).unwrap();
        read(3).await;
        assert!(rt::now() - start >= Duration::from_millis(1900), "{:?}", rt::now() - start);
        // Another group's limits, then a filter between the filter and the disk.
        let free = graph.throttle_groups().create("free", Limits::new()).unwrap();
        filter.throttle().unwrap().set_group(free);
        let start = rt::now();
        read(100).await;
        assert_eq!(rt::now(), start);
        let disk = filter.children()[0].node.clone();
        let fault = BlockdevOptions::from_keyval("driver=fault,node-name=f,file.driver=null-co,file.size=1G").unwrap();
        let fault = graph.add(fault).await.unwrap();
        graph.replace(&disk, &fault).await.unwrap();
        fault.fault().unwrap().arm(FaultRule::always(FaultOp::Read, Errno::EIO));
        assert!(queue.read(0, IoBuf::zeroed(512)).await.0.is_err(), "the new node behind the filter is asked");
    });
}

#[test]
fn a_filter_shows_the_furthest_write_past_it() {
    World::new(Config::new(1)).run(async {
        let graph = Graph::new(&cowshed_image::DRIVERS);
        graph.throttle_groups().create("g", Limits::new()).unwrap();
        let attachment = throttled(&graph, "a", "g").await;
        let (filter, queue) = (attachment.node(), attachment.queue());
        queue.write(8192, IoBuf::zeroed(512)).await.0.unwrap();
        queue.read(0, IoBuf::zeroed(4096)).await.0.unwrap();
        let below = filter.children()[0].node.statistics();
        for (at, stats) in [("behind", below), ("filter", filter.statistics())] {
            let operations = (stats.kind(IoKind::Read).operations, stats.kind(IoKind::Write).operations);
            assert_eq!((operations, stats.highest_written_byte), ((1, 1), 8704), "{at}");
        }
        assert_eq!(attachment.statistics().highest_written_byte, 8704);
    });
}

#[test]
fn wrong_options_of_filters_are_named() {
    rt::block_on(async {
        let graph = Graph::new(&cowshed_image::DRIVERS);
        let disk = "file.driver=null-co";
        let error = add(&graph, &format!("driver=throttle,node-name=t,throttle-group=zz,{disk}")).await.unwrap_err();
        assert!(error.to_string().contains("Throttle group 'zz' does not exist"), "{error}");
        let error = add(&graph, &format!("driver=throttle,node-name=t,{disk}")).await.unwrap_err();
        assert!(error.to_string().contains("throttle-group"), "{error}");
        let node = add(&graph, &format!("driver=raw,node-name=r,{disk}")).await.unwrap();
        let options = BlockdevOptions::from_keyval("driver=raw,node-name=x").unwrap();
        assert!(graph.insert_filter(&node, options).await.is_err());
        assert!(graph.find("x").is_none(), "a filter that can't be inserted leaves nothing behind");
        let unknown = BlockdevOptions::from_keyval("driver=throttle,node-name=x,throttle-group=g,foo=1").unwrap();
        assert!(graph.insert_filter(&node, unknown).await.is_err());
        assert!(node.user_names().is_empty());
    });
}

#[test]
fn copy_on_read_copies_down_to_its_bottom() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (base, mid, top) = (path("base.qcow2"), path("mid.qcow2"), path("top.qcow2"));
    tool("qemu-img", &["create", "-q", "-f", "qcow2", &base, "4M"]);
    tool("qemu-io", &["-c", "write -P 1 0 1M", &base]);
    tool("qemu-img", &["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", &base, &mid]);
    tool("qemu-io", &["-c", "write -P 2 1M 1M", "-c", "write -z 3M 64k", &mid]);
    for (bottom, copied_base) in [("", true), (",bottom=m", false)] {
        tool("qemu-img", &["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", &mid, &top]);
        rt::block_on(async {
            let graph = Graph::new(&cowshed_image::DRIVERS);
            add(&graph, &format!("driver=qcow2,node-name=m,file.filename={mid},read-only=on")).await.unwrap();
            let image = add(&graph, &format!("driver=qcow2,node-name=n,file.filename={top},backing=m")).await.unwrap();
            let attachment = graph.attach(&image, AttachRequest::export("e", true)).await.unwrap();
            let options = format!("driver=copy-on-read,node-name=c{bottom}");
            let options = BlockdevOptions::from_keyval(&options).unwrap();
            graph.insert_filter(&image, options).await.unwrap();
            let queue = attachment.queue();
            queue.write(1 << 20, IoBuf::copy_from(&[9; 512])).await.0.unwrap();
            for (offset, expected) in
                [(70_000u64, 1u8), (1 << 20, 9), ((1 << 20) + 512, 2), (3 << 20, 0), ((4 << 20) - 512, 0)]
            {
                let (result, buf) = queue.read(offset, IoBuf::zeroed(512)).await;
                result.unwrap();
                assert!(buf.iter().all(|byte| *byte == expected), "{offset}");
            }
            let runs = image.block_status(0, 4 << 20, 64).await.unwrap();
            let present = |offset: u64| runs.iter().find(|run| run.start + run.len > offset).unwrap().present;
            assert_eq!((present(0), present(65536), present(131_072)), (false, copied_base, false), "{bottom}");
            assert!(present(1 << 20) && present(3 << 20) && !present((4 << 20) - 512));
            attachment.detach().await.unwrap();
            graph.close_all().await.unwrap();
        });
        tool("qemu-img", &["check", "-q", &top]);
    }
}
