// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Requests of a sound front end.

use super::served::{DISK_BYTES, Served};
use crate::proto::features;
use crate::proto::message::{config_reply, request};
use cowshed_testkit::programs::tool;
use cowshed_testkit::vhost::FrontEnd;

/// Segments of a discard or a write of zeroes.
fn segments(list: &[(u64, u32, u32)]) -> Vec<u8> {
    let one = |(sector, sectors, flags): &(u64, u32, u32)| {
        [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
    };
    list.iter().flat_map(one).collect()
}

#[test]
fn data_goes_both_ways() {
    let served = Served::new(|_| ());
    let mut driver = served.driver();
    let bytes: Vec<u8> = (0..8192u32).map(|number| (number % 251) as u8).collect();
    assert_eq!(driver.request(1, 9, &bytes, 0).0, 0);
    assert_eq!(served.disk(9 * 512, 8192), bytes);
    assert_eq!(driver.request(0, 9, &[], 8192), (0, bytes));
    assert_eq!(driver.request(0, 0, &[], 512), (0, vec![0; 512]));
    assert_eq!(driver.request(4, 0, &[], 0).0, 0);
    let (status, id) = driver.request(8, 0, &[], 20);
    assert_eq!((status, &id[..8]), (0, &b"the-disk"[..]));
    assert_eq!(driver.request(77, 0, &[], 0).0, 2);
    assert_eq!(driver.request(0, DISK_BYTES / 512, &[], 512).0, 1);
}

#[test]
fn discards_and_zeroes_take_several_segments() {
    let served = Served::new(|_| ());
    let mut driver = served.driver();
    assert_eq!(driver.request(1, 0, &[7; 0x8000], 0).0, 0);
    assert_eq!(driver.request(13, 0, &segments(&[(1, 2, 0), (8, 1, 1)]), 0).0, 0);
    let zero = |sector: usize| served.disk(0, 0x8000)[sector * 512..][..512].iter().all(|byte| *byte == 0);
    let zeroed: Vec<usize> = (0..64).filter(|sector| zero(*sector)).collect();
    assert_eq!(zeroed, [1, 2, 8]);
    assert_eq!(driver.request(11, 0, &segments(&[(16, 8, 0), (32, 8, 0)]), 0).0, 0);
    assert_eq!(driver.request(13, 0, &segments(&[(0, 1, 0), (1 << 40, 1, 0)]), 0).0, 1, "past the end");
    assert!(!zero(0), "nothing of a refused request is carried out");
}

#[test]
fn a_read_only_disk_takes_no_change() {
    let served = Served::new(|config| config.writable = false);
    let mut driver = served.driver();
    assert_eq!(driver.features & (features::BLK_RO | features::BLK_DISCARD), features::BLK_RO);
    assert_eq!(driver.request(1, 0, &[1; 512], 0).0, 1);
    assert_eq!(driver.request(13, 0, &segments(&[(0, 1, 0)]), 0).0, 1);
    assert_eq!(driver.request(0, 0, &[], 512), (0, vec![0; 512]));
}

#[test]
fn many_requests_of_two_rings_run_at_once() {
    two_rings_run(2);
}

#[test]
fn two_rings_on_one_thread_run_at_once() {
    two_rings_run(1);
}

fn two_rings_run(threads: usize) {
    let served = Served::new(|config| config.threads = threads);
    let mut driver = served.driver();
    driver.start_ring(1, 0);
    for round in 0..20u64 {
        for ring in 0..2 {
            let heads: Vec<u16> = (0..10).map(|number| number * 3 + 30 * ring as u16).collect();
            for &head in &heads {
                let sector = (u64::from(head) + round * 64) * 8;
                driver.prepare(ring, head, 1, sector, &[head as u8 + 1; 4096], 0);
                driver.offer(ring, head);
            }
            driver.kick(ring);
        }
        for ring in 0..2 {
            let mut ended: Vec<u16> = (0..10).map(|_| driver.wait_used(ring).0).collect();
            ended.sort_unstable();
            assert_eq!(ended, (0..10).map(|number| number * 3 + 30 * ring as u16).collect::<Vec<_>>());
            assert!(ended.iter().all(|&head| driver.status(head) == 0));
        }
        assert_eq!(served.disk((33 + round * 64) * 4096, 4096), [34; 4096]);
    }
}

#[test]
fn config_space_is_read_and_written_in_parts() {
    let served = Served::new(|config| {
        config.block_bytes = 4096;
        config.queues = 7;
    });
    let mut front_end = served.connect();
    front_end.negotiate(u64::MAX);
    assert_eq!(front_end.ask_number(request::GET_QUEUE_NUM, &[]), 7);
    assert_eq!(front_end.config(0, 8), (DISK_BYTES / 512).to_le_bytes());
    let whole = front_end.config(0, 60);
    assert_eq!((&whole[20..24], &whole[34..36]), (&[0, 16, 0, 0][..], &[7, 0][..]));
    assert_eq!((front_end.config(33, 0).len(), front_end.config(32, 1)), (0, vec![1]));
    assert_eq!(front_end.config(60, 100), [0; 100]);
    let set =
        |offset: u32, bytes: &[u8]| front_end.send_acked(request::SET_CONFIG, &config_reply(offset, 0, bytes), None);
    assert!(set(32, &[0]));
    assert_eq!(front_end.config(32, 1), [0]);
    assert!(!set(0, &[0; 8]) && !set(32, &[1, 0]) && !set(31, &[1]));
    assert!(!set(32, &[]) && !set(0, &[]) && !set(256, &[]), "nothing is no value of the switch");
    assert_eq!(front_end.config(32, 1), [0], "and changes nothing");
    assert_eq!(front_end.config(0, 8), (DISK_BYTES / 512).to_le_bytes());
}

/// QEMU's device takes such lengths, too.
#[test]
fn requests_begin_at_blocks_and_have_whole_sectors() {
    let served = Served::new(|config| config.block_bytes = 4096);
    let mut driver = served.driver();
    assert_eq!(driver.request(1, 8, &[7; 1536], 0).0, 0);
    assert_eq!(driver.request(0, 8, &[], 1536), (0, vec![7; 1536]));
    assert_eq!(served.disk(0, 12288)[4096..][..2048], [[7; 1536].as_slice(), &[0; 512]].concat());
    assert_eq!(driver.request(13, 0, &segments(&[(8, 1, 0)]), 0).0, 0);
    assert_eq!(driver.request(11, 0, &segments(&[(8, 2, 0)]), 0).0, 0);
    assert_eq!(driver.request(0, 9, &[], 512).0, 1, "not from the start of a block on");
    assert_eq!(driver.request(13, 0, &segments(&[(1, 8, 0)]), 0).0, 1);
    assert_eq!(driver.request(0, 8, &[], 513).0, 1);
    assert_eq!(driver.request(0, DISK_BYTES / 512 - 8, &[], 4608).0, 1);
    let half = [&segments(&[(0, 8, 0)])[..], &[0; 8]].concat();
    assert_eq!((driver.request(11, 0, &half, 0).0, driver.request(13, 0, &half, 0).0), (2, 2));
    assert_eq!(driver.request(11, 0, &half[16..], 0).0, 1);
}

/// File systems of the guest align to it.
#[test]
fn the_topology_tells_the_grain_of_allocation() {
    for (options, block_bytes, grain) in [
        ("cluster_size=64k", 512, 64 << 10),
        ("cluster_size=64k", 4096, 64 << 10),
        ("cluster_size=2M", 512, 2 << 20),
        ("cluster_size=16k,extended_l2=on", 512, 512),
        ("cluster_size=64k,extended_l2=on", 512, 2048),
        // The block is the larger one.
        ("cluster_size=64k,extended_l2=on", 4096, 4096),
    ] {
        let make = |image: &std::path::Path| {
            let arguments = ["create", "-q", "-f", "qcow2", "-o", options, image.to_str().unwrap(), "16M"];
            drop(tool("qemu-img", &arguments));
        };
        let node = "driver=qcow2,node-name=d,discard=unmap,file.driver=file,file.filename=";
        let served = Served::made(node, make, |config| config.block_bytes = block_bytes);
        let front_end = served.connect();
        let what = format!("{options}, blocks of {block_bytes}");
        let number = |at: u32| u32::from_le_bytes(front_end.config(at, 4).try_into().unwrap());
        assert_eq!(number(20), block_bytes, "{what}");
        let physical = block_bytes << front_end.config(24, 1)[0];
        assert_eq!((physical, number(28) * block_bytes, number(44) * 512), (grain, grain, grain), "{what}");
        assert_eq!((front_end.config(25, 1), front_end.config(26, 2)), (vec![0], vec![1, 0]), "{what}");
    }
}

#[test]
fn a_write_is_durable_at_once_without_the_write_cache() {
    let served = Served::new(|_| ());
    let mut driver = served.driver();
    let flushes = || served.node.statistics().kind(cowshed_image::stats::IoKind::Flush).operations;
    assert_eq!(driver.request(1, 0, &[1; 512], 0).0, 0);
    let before = flushes();
    assert!(driver.send_acked(request::SET_CONFIG, &config_reply(32, 0, &[0]), None));
    assert_eq!(driver.request(1, 0, &[2; 512], 0).0, 0);
    assert!(flushes() > before, "the switch is off: each write is flushed");
    drop(driver);
    let mut old = served.connect();
    old.negotiate(!features::BLK_FLUSH);
    old.share_memory();
    old.start_ring(0, 0);
    let before = flushes();
    assert_eq!(old.request(1, 0, &[3; 512], 0).0, 0);
    assert!(flushes() > before, "a driver that knows no flush");
}

#[test]
fn long_requests_go_in_pieces() {
    let served = Served::new(|_| ());
    let mut driver = served.driver();
    let len = 3 << 20;
    let bytes: Vec<u8> = (0..len as u32).map(|number| (number / 4096) as u8).collect();
    driver.prepare(0, 0, 1, 64, &[], 0);
    driver.guest.memory.write(0x30_0000, &bytes);
    let table = FrontEnd::place(0);
    driver.describe(table, 0, (FrontEnd::data(0) - 0x100, 16, 1, 1));
    driver.describe(table, 1, (0x30_0000, len as u32, 1, 2));
    driver.offer(0, 0);
    driver.kick(0);
    driver.wait_used(0);
    assert_eq!((driver.status(0), served.disk(64 * 512, len) == bytes), (0, true));
    driver.guest.memory.write(0x30_0000, &vec![0; len]);
    driver.guest.memory.write(FrontEnd::data(0) as usize - 0x100, &[0; 4]);
    driver.describe(table, 1, (0x30_0000, len as u32, 1 | 2, 2));
    driver.offer(0, 0);
    driver.kick(0);
    assert_eq!(driver.wait_used(0), (0, len as u32 + 1));
    assert!(driver.bytes(0x30_0000, len) == bytes);
}
