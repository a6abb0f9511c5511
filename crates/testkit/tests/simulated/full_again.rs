// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A disk that is full for one request has the space of that request again: a smaller one finds it at once, without a flush.
//! So does one that follows a discard.

use crate::fresh_images::{IMAGE, Kind, kinds, large_blocks, opened};
use cowshed_image::formats::DriverOf;
use cowshed_image::formats::qcow2::BitmapChange;
use cowshed_image::{Node, Preallocation, ZeroFlags};
use cowshed_simulator::{Config, PageMap, World};
use cowshed_storage::IoBuf;
use cowshed_testkit::audit::audit;
use cowshed_testkit::images::{Chain, Format, Layer, Op, Qcow2Spec, Texture};
use cowshed_testkit::scenario::{ImageDisk, Prepared};
use cowshed_types::{ErrorKind, Result};
use futures_util::future::join_all;
use std::sync::Arc;

const PAGE_BYTES: u64 = 4096;
/// Pages that the disk has left, and those of a request that is too large.
const FREE_PAGES: u64 = 6;
const TOO_MANY_PAGES: u64 = 10;
const SMALL: u64 = 4096;

async fn write(node: &Node, offset: u64, len: u64, byte: u8) -> Result<()> {
    node.write(offset, IoBuf::copy_from(&vec![byte; len as usize])).await.0
}

/// Leaves this many pages.
fn leave(world: &World, pages: u64) {
    let used: u64 = world.snapshot().values().map(PageMap::allocated_bytes).sum();
    world.set_capacity(Some(used + pages * PAGE_BYTES));
}

async fn expect_full(node: &Node, offset: u64, len: u64) {
    let error = write(node, offset, len, 1).await.expect_err("no room for so much");
    assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
}

async fn expect(node: &Node, offset: u64, len: u64, byte: u8) {
    let (result, buf) = node.read(offset, IoBuf::zeroed(len as usize)).await;
    result.unwrap_or_else(|error| panic!("{error}"));
    assert!(buf.iter().all(|found| *found == byte), "{offset:#x} is not {byte}");
}

#[test]
fn a_write_that_found_no_room_leaves_it_to_smaller_ones() {
    for (kind, image) in kinds().into_iter().chain(large_blocks()) {
        let Kind { format, block_bytes } = kind;
        let world = World::new(Config::new(block_bytes));
        world.add_file(IMAGE, PageMap::from_bytes(&image));
        let node = world.run(opened(format, true));
        let last = node.size() - SMALL;
        let places: Vec<u64> = match block_bytes < TOO_MANY_PAGES * PAGE_BYTES {
            // Behind the large request.
            true => (0..4).map(|number| (TOO_MANY_PAGES + 1 + 2 * number) * block_bytes).collect(),
            false => (1..5).map(|number| number * block_bytes).collect(),
        };
        // The tables have space from here on.
        world.run(async {
            write(&node, last, SMALL, 9).await.expect("there is room");
            node.flush().await.expect("flushed");
        });
        leave(&world, FREE_PAGES);
        world.run(async {
            for round in 1..4 {
                expect_full(&node, 0, TOO_MANY_PAGES * PAGE_BYTES).await;
                let at = places[round as usize];
                let small = write(&node, at, 512, round).await;
                small.unwrap_or_else(|error| panic!("{format}, blocks of {block_bytes}, {at:#x}: {error}"));
                expect(&node, at, 512, round).await;
            }
            node.flush().await.unwrap_or_else(|error| panic!("{format}: {error}"));
            for round in 1..4u8 {
                expect(&node, places[round as usize], 512, round).await;
            }
            expect(&node, last, SMALL, 9).await;
            node.close().await.unwrap_or_else(|error| panic!("{format}: {error}"));
        });
    }
}

const CLUSTER: u64 = 4096;

/// An image with data in its first 16 clusters, on a disk that has little left.
fn full_qcow2(options: &str) -> (World, ImageDisk) {
    let session = vec![Op::Write { offset: 0, len: 16 * CLUSTER, texture: Texture::Random(1) }];
    let spec = Qcow2Spec { cluster_size: CLUSTER, ..Qcow2Spec::default() };
    let layer = Layer { format: Format::Qcow2(spec), size: 1 << 20, sessions: vec![session] };
    let prepared = Prepared::new(&Chain { layers: vec![layer] });
    let world = World::with_files(Config::new(1), &prepared.files);
    let disk = world.run(ImageDisk::open_with(&prepared.top, true, false, options)).expect("the image");
    // Its tables have space from here on.
    world.run(async {
        write(&disk.0, 255 * CLUSTER, CLUSTER, 9).await.expect("there is room");
        disk.0.flush().await.expect("flushed");
    });
    leave(&world, FREE_PAGES);
    (world, disk)
}

#[test]
fn clusters_of_a_failed_write_serve_the_next_at_once() {
    let (world, disk) = full_qcow2("discard=unmap");
    world.run(async {
        for round in 0..2 {
            expect_full(&disk.0, 32 * CLUSTER, TOO_MANY_PAGES * PAGE_BYTES).await;
            let at = (64 + 4 * round) * CLUSTER;
            write(&disk.0, at, 2 * CLUSTER, 2).await.unwrap_or_else(|error| panic!("round {round}: {error}"));
            expect(&disk.0, at, 2 * CLUSTER, 2).await;
        }
        let compressible = |clusters: u64| {
            (0..clusters).map(|number| ((128 + number) * CLUSTER, IoBuf::copy_from(&noise(number)))).collect()
        };
        disk.0.write_compressed(compressible(12)).await.expect_err("no room for so much");
        disk.0.write_compressed(compressible(1)).await.expect("there is room");
        disk.0.flush().await.expect("flushed");
        disk.0.close().await.expect("closed");
    });
}

/// A cluster that becomes a little shorter.
fn noise(seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; CLUSTER as usize];
    let mut word = seed + 1;
    for byte in &mut bytes[..3600] {
        word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        *byte = (word >> 56) as u8;
    }
    bytes
}

#[test]
fn a_discard_on_a_full_disk_makes_room_without_a_flush() {
    for options in ["discard=unmap", "lazy-refcounts=on,discard=unmap"] {
        let (world, disk) = full_qcow2(options);
        leave(&world, 0);
        world.run(async {
            expect_full(&disk.0, 32 * CLUSTER, CLUSTER).await;
            disk.0.discard(0, 8 * CLUSTER).await.expect("discarded");
            write(&disk.0, 64 * CLUSTER, 2 * CLUSTER, 2).await.unwrap_or_else(|error| panic!("{options}: {error}"));
            write(&disk.0, 72 * CLUSTER + 512, 512, 3).await.unwrap_or_else(|error| panic!("{options}: {error}"));
            expect(&disk.0, 64 * CLUSTER, 2 * CLUSTER, 2).await;
            disk.0.flush().await.expect("flushed");
        });
        world.run(disk.0.close()).expect("closed");
    }
}

/// Each request that takes space in a way of its own. The image has a second L2 table's range without a table behind 2 MiB,
/// and clusters without space in its last 16.
const WAYS: [&str; 7] = [
    "a hole",
    "a hole in parts",
    "zeroes",
    "compressed",
    "a table",
    "the state of a machine",
    "an old sector of a bitmap",
];
const WIDE: u64 = 20 << 20;
const TABLE: u64 = 2 << 20;

async fn request(node: &Arc<Node>, way: &str) -> Result<()> {
    match way {
        "a hole" => write(node, WIDE + CLUSTER, CLUSTER, 5).await,
        // The neighbour has its space already.
        "a hole in parts" => write(node, WIDE + 8 * CLUSTER + 512, 2 * CLUSTER, 5).await,
        "zeroes" => node.write_zeroes(TABLE, CLUSTER, ZeroFlags::default()).await,
        "compressed" => node.write_compressed(vec![(TABLE, IoBuf::copy_from(&noise(1)))]).await,
        "a table" => write(node, TABLE, CLUSTER, 5).await,
        "the state of a machine" => node.write_vm_state(0, IoBuf::copy_from(&[5; 512])).await.0,
        _ => write(node, WIDE - 512, 512, 5).await,
    }
}

#[test]
fn each_request_on_a_full_disk_finds_what_was_discarded() {
    let mut failed = Vec::new();
    for way in WAYS {
        let session = vec![Op::Write { offset: 0, len: 16 * CLUSTER, texture: Texture::Random(1) }];
        let spec = Qcow2Spec { cluster_size: CLUSTER, ..Qcow2Spec::default() };
        let layer = Layer { format: Format::Qcow2(spec), size: WIDE, sessions: vec![session] };
        let prepared = Prepared::new(&Chain { layers: vec![layer] });
        let world = World::with_files(Config::new(1), &prepared.files);
        let disk = world.run(ImageDisk::open_with(&prepared.top, true, false, "discard=unmap")).expect("the image");
        let node = &disk.0;
        world.run(async {
            node.resize(WIDE + 16 * CLUSTER, Preallocation::Metadata).await.expect("it grows");
            write(node, 31 * CLUSTER, CLUSTER, 9).await.expect("there is room");
            write(node, WIDE - CLUSTER, CLUSTER, 9).await.expect("there is room");
            if way.contains("bitmap") {
                let add = BitmapChange::Add { name: "b".into(), granularity_bytes: Some(512), enabled: true };
                node.qcow2().expect("qcow2").change_bitmaps(&[add]).await.expect("a bitmap");
                // The bits of what is discarded have their cluster.
                write(node, 0, CLUSTER, 9).await.expect("there is room");
            }
            node.flush().await.expect("flushed");
        });
        leave(&world, 0);
        world.run(async {
            assert!(request(node, way).await.is_err(), "{way}: there is no room yet");
            node.discard(0, 8 * CLUSTER).await.unwrap_or_else(|error| panic!("{way}, a discard: {error}"));
            if let Err(error) = request(node, way).await {
                failed.push(format!("{way}: {error}"));
            }
            node.flush().await.unwrap_or_else(|error| panic!("{way}, a flush: {error}"));
            request(node, way).await.unwrap_or_else(|error| panic!("{way}, again: {error}"));
            node.flush().await.unwrap_or_else(|error| panic!("{way}, a flush: {error}"));
        });
        world.run(node.close()).expect("closed");
        let image = world.contents(&prepared.top).expect("the image");
        audit(&image).unwrap_or_else(|finding| panic!("{way}: {finding}"));
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

/// The image after its last block and its first one were written, and the findings of a check. `fails`: twelve writes fail
/// side by side in between.
fn after_failures(kind: Kind, image: &[u8], seed: u64, fails: bool) -> (usize, Vec<String>) {
    let world = World::new(Config::new(seed));
    world.add_file(IMAGE, PageMap::from_bytes(image));
    let node = world.run(opened(kind.format, true));
    // The entries have space from here on.
    world.run(async {
        let last = (node.size() - 1) / kind.block_bytes * kind.block_bytes;
        write(&node, last, 512, 9).await.expect("there is room");
        node.flush().await.expect("flushed");
    });
    if fails {
        leave(&world, 0);
        let writes = (0..12).map(|number| write(&node, number * kind.block_bytes, 4096, 1));
        assert!(world.run(join_all(writes)).iter().all(Result::is_err), "{}: there was room", kind.format);
        world.set_capacity(None);
    }
    let findings = world.run(async {
        write(&node, 0, 512, 2).await.expect("there is room again");
        node.close().await.unwrap_or_else(|error| panic!("{}: {error}", kind.format));
        let node = opened(kind.format, false).await;
        let check = node.check_mapped(4).await.expect("tables").unwrap_or_else(|error| panic!("{error}"));
        node.close().await.expect("closed");
        check.map(|check| check.findings).unwrap_or_default()
    });
    (world.contents(IMAGE).expect("the image").to_vec().len(), findings)
}

#[test]
fn writes_that_fail_side_by_side_leave_no_gap() {
    let mut failed = Vec::new();
    for (kind, image) in kinds() {
        let (expected, _) = after_failures(kind, &image, 1, false);
        for seed in 1..=12 {
            let (bytes, findings) = after_failures(kind, &image, seed, true);
            if bytes != expected || !findings.is_empty() {
                failed.push(format!("{}, seed {seed}: {bytes} bytes, not {expected}: {findings:?}", kind.format));
            }
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}
