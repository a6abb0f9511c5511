// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sizes of the metadata caches: their dependence on each other, refusals, and changes in use.

use cowshed_image::formats::DriverOf;
use cowshed_image::graph::{AttachRequest, Graph};
use cowshed_image::options::BlockdevOptions;
use cowshed_image::{Node, OpenRequest, open};
use cowshed_storage::{IoBuf, rt};
use cowshed_testkit::programs::tool;
use cowshed_testkit::waiting::await_that;
use cowshed_types::CacheStatistics;
use std::sync::Arc;

fn image(folder: &tempfile::TempDir, name: &str, size: &str, options: &str) -> String {
    let path = folder.path().join(name).to_str().unwrap().to_owned();
    let args = ["create", "-q", "-f", "qcow2", "-o", options, &path, size];
    tool("qemu-img", &args);
    path
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn limits_of(path: &str, options: &str) -> Result<(u64, u64), String> {
    let options = format!("driver=qcow2,file.filename={path}{options}");
    let request = OpenRequest::image_opts(&options).map_err(|error| error.to_string())?;
    let node = rt::block_on(open(request)).map_err(|error| error.to_string())?;
    let stats = node.qcow2().unwrap().statistics();
    rt::block_on(node.close()).unwrap();
    Ok((stats.l2_limit_bytes, stats.refcount_limit_bytes))
}

#[test]
fn sizes_follow_each_other_four_to_one() {
    let folder = folder();
    let path = image(&folder, "a.qcow2", "1T", "cluster_size=64k");
    for (options, sizes) in [
        // Two megabytes of L2 are half a megabyte of refcounts are two and a half of both.
        (",l2-cache-size=2097152", (2_097_152, 524_288)),
        (",refcount-cache-size=524288", (2_097_152, 524_288)),
        (",cache-size=2621440", (2_097_152, 524_288)),
        (",cache-size=4M,l2-cache-size=1M", (1 << 20, 3 << 20)),
        (",cache-size=4M,refcount-cache-size=1M", (3 << 20, 1 << 20)),
        (",l2-cache-size=1M,refcount-cache-size=8M", (1 << 20, 8 << 20)),
        // At least four clusters of refcounts; by default all of the disk is covered: 128 MiB for a TiB.
        ("", (128 << 20, 256 << 10)),
        (",l2-cache-size=64k", (64 << 10, 256 << 10)),
        (",l2-cache-coverage=8G", (1 << 20, 256 << 10)),
        (",l2-cache-coverage=512G,refcount-cache-size=1M", (64 << 20, 1 << 20)),
    ] {
        assert_eq!(limits_of(&path, options), Ok(sizes), "{options}");
    }
    let extended = image(&folder, "b.qcow2", "1G", "cluster_size=128k,extended_l2=on");
    assert_eq!(limits_of(&extended, "").unwrap().0, (1 << 30) / (128 << 10) * 16);
    assert_eq!(limits_of(&extended, ",l2-cache-coverage=128M").unwrap().0, 1024 * 16);
}

#[test]
fn contradictions_are_refused_with_qemus_words() {
    let folder = folder();
    let path = image(&folder, "a.qcow2", "1G", "cluster_size=64k");
    for (options, message) in [
        (",cache-size=1M,l2-cache-size=2M", "l2-cache-size may not exceed cache-size"),
        (",cache-size=1M,refcount-cache-size=2M", "refcount-cache-size may not exceed cache-size"),
        (
            ",cache-size=1M,refcount-cache-size=256k,l2-cache-size=512k",
            "cache-size, l2-cache-size and refcount-cache-size may not be set at the same time",
        ),
        (
            ",l2-cache-entry-size=300",
            "L2 cache entry size must be a power of two between 512 and the cluster size (65536)",
        ),
        (
            ",l2-cache-entry-size=128k",
            "L2 cache entry size must be a power of two between 512 and the cluster size (65536)",
        ),
        (",refcount-cache-size=1000000000000000", "Refcount cache size too big"),
        (",cache-clean-interval=10000000000", "Cache clean interval too big"),
        (",l2-cache-coverage=1G,l2-cache-size=1M", "may not be set at the same time"),
    ] {
        let error = limits_of(&path, options).unwrap_err();
        assert!(error.contains(message), "{options}: {error}");
    }
}

/// Reads once in each part of the disk that one slice covers.
fn touch(node: &Arc<Node>, graph: &Arc<Graph>) {
    let attachment = rt::block_on(graph.attach(node, AttachRequest::export("touch", true))).unwrap();
    let queue = attachment.queue();
    for at in (0..256 << 20).step_by(4 << 20) {
        rt::block_on(queue.read(at, IoBuf::zeroed(512))).0.unwrap();
    }
    drop(queue);
    rt::block_on(attachment.detach()).unwrap();
}

#[test]
fn sizes_and_cleaning_change_while_the_image_is_in_use() {
    let folder = folder();
    let path = image(&folder, "a.qcow2", "256M", "cluster_size=64k,preallocation=metadata");
    let graph = Graph::new(&cowshed_image::DRIVERS);
    let add = format!("driver=qcow2,node-name=n,file.filename={path},l2-cache-entry-size=512,cache-clean-interval=0");
    let node = rt::block_on(graph.add(BlockdevOptions::from_keyval(&add).unwrap())).unwrap();
    let reopen = |changes: &str| {
        let options = format!("node-name=n,l2-cache-entry-size=512,{changes}");
        rt::block_on(graph.reopen(vec![BlockdevOptions::from_keyval(&options).unwrap()])).unwrap();
    };
    touch(&node, &graph);
    let stats = || node.qcow2().unwrap().statistics();
    assert_eq!((stats().l2_slices, stats().l2_misses), (64, 64));
    touch(&node, &graph);
    let full = stats();
    assert_eq!(full.l2_misses, 64, "all of it fits");
    // Each slice is one run of clusters, which takes less than on disk.
    assert!(full.l2_hits >= 128 && full.l2_bytes >= 64 * 64 && full.l2_bytes < 64 * 512);
    let is_small = |stats: CacheStatistics| stats.l2_slices < 64 && stats.l2_bytes < 4096 + stats.l2_slices * 256;
    reopen("l2-cache-size=4096,cache-clean-interval=0");
    assert!(is_small(stats()) && stats().l2_limit_bytes == 4096);
    touch(&node, &graph);
    assert!(stats().l2_misses > 64 && is_small(stats()));
    // Everything leaves once it was idle for a second or two.
    reopen("cache-clean-interval=1");
    touch(&node, &graph);
    await_that("the caches are empty", || stats().l2_slices + stats().refcount_blocks == 0);
    assert_eq!((stats().l2_bytes, stats().refcount_bytes), (0, 0));
    touch(&node, &graph);
    rt::block_on(graph.close_all()).unwrap();
}

/// A write is looked up without the lock, and planned under it. The copy around it has its source from the plan.
#[test]
fn a_copy_on_write_looks_its_place_up_once() {
    let folder = folder();
    std::fs::write(folder.path().join("base.raw"), vec![7; 8 << 20]).unwrap();
    for (options, kept) in [
        ("backing_file=base.raw,backing_fmt=raw", None),
        ("backing_file=base.raw,backing_fmt=raw,extended_l2=on,cluster_size=128k", None),
        ("cluster_size=64k", Some("snapshot")),
        ("cluster_size=64k", Some("compressed")),
    ] {
        let path = image(&folder, "a.qcow2", "8M", options);
        let node = rt::block_on(open(OpenRequest::file(&path).format("qcow2").writable(true))).unwrap();
        if kept == Some("compressed") {
            rt::block_on(node.write_compressed(vec![(1 << 20, IoBuf::copy_from(&[7; 65536]))])).unwrap();
        } else {
            rt::block_on(node.write(4 << 20, IoBuf::copy_from(&[7; 65536]))).0.unwrap();
        }
        if kept == Some("snapshot") {
            rt::block_on(node.write(1 << 20, IoBuf::copy_from(&[7; 65536]))).0.unwrap();
        }
        rt::block_on(node.close()).unwrap();
        if kept == Some("snapshot") {
            tool("qemu-img", &["snapshot", "-c", "s", &path]);
        }
        let node = rt::block_on(open(OpenRequest::file(&path).format("qcow2").writable(true))).unwrap();
        let hits = || node.qcow2().unwrap().statistics().l2_hits;
        // The table is in memory now.
        rt::block_on(node.read(3 << 20, IoBuf::zeroed(512))).0.unwrap();
        let before = hits();
        rt::block_on(node.write((1 << 20) + 1024, IoBuf::copy_from(&[9; 512]))).0.unwrap();
        assert_eq!(hits() - before, 1, "{options} {kept:?}");
        let (result, buf) = rt::block_on(node.read(1 << 20, IoBuf::zeroed(4096)));
        result.unwrap();
        assert!(buf.to_vec() == [[7; 1024].as_slice(), &[9; 512], &[7; 2560]].concat(), "{options} {kept:?}");
        rt::block_on(node.close()).unwrap();
    }
}
