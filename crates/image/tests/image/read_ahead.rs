// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reading compressed clusters one after the other: read-ahead changes no byte that a reader gets.

use cowshed_image::formats::DriverOf;
use cowshed_image::{Node, OpenRequest, open};
use cowshed_storage::{FileOp, IoBuf, rt};
use cowshed_testkit::programs::tool;
use std::rc::Rc;
use std::sync::Arc;

const SIZE: usize = 6 << 20;

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Compressible, and different everywhere.
fn content(seed: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = Vec::with_capacity(SIZE + 64);
    for line in 0.. {
        if bytes.len() >= SIZE {
            break;
        }
        let noise = (line + seed).wrapping_mul(0x9e37_79b9) >> 7;
        bytes.extend(format!("{seed} line {line} says {noise:x}\n").bytes());
    }
    bytes.truncate(SIZE);
    bytes
}

/// Made by qemu-img, so that no side reads its own writes.
fn compressed(folder: &tempfile::TempDir, options: &str) -> (String, Vec<u8>) {
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (raw, image, bytes) = (path("source.raw"), path(&format!("{options}.qcow2")), content(1));
    std::fs::write(&raw, &bytes).unwrap();
    let args = ["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", options, &raw, &image];
    tool("qemu-img", &args);
    (image, bytes)
}

async fn opened(path: &str, writable: bool) -> Arc<Node> {
    open(OpenRequest::file(path).format("qcow2").writable(writable)).await.unwrap()
}

async fn expect(node: &Node, at: usize, expected: &[u8]) {
    let (result, buf) = node.read(at as u64, IoBuf::zeroed(expected.len())).await;
    result.unwrap();
    assert!(*buf == *expected, "{} bytes at {at} differ", expected.len());
}

/// Reads of the image file so far.
fn reads(node: &Node) -> u64 {
    node.qcow2().unwrap().image_file().statistics().of(FileOp::Read).operations
}

#[test]
fn readers_in_order_get_what_qemu_wrote() {
    let folder = folder();
    for options in [
        "cluster_size=64k,compression_type=zlib",
        "cluster_size=64k,compression_type=zstd",
        "cluster_size=4k,compression_type=zlib",
        "cluster_size=2M,compression_type=zstd",
    ] {
        let (path, bytes) = compressed(&folder, options);
        let bytes = Rc::new(bytes);
        for step in [4096, 65536, 10_000, 300_000] {
            // One reader, and several: each at its own place, and all at the same.
            for readers in [1, 3] {
                rt::block_on(async {
                    let node = opened(&path, false).await;
                    let tasks: Vec<_> = (0..readers)
                        .map(|reader| {
                            let (node, bytes) = (Arc::clone(&node), Rc::clone(&bytes));
                            rt::spawn(async move {
                                let mut at = if step == 4096 { 0 } else { reader * SIZE / readers };
                                while at < SIZE {
                                    expect(&node, at, &bytes[at..(at + step).min(SIZE)]).await;
                                    at += step;
                                }
                            })
                        })
                        .collect();
                    for task in tasks {
                        task.await;
                    }
                    node.close().await.unwrap();
                });
            }
        }
    }
}

#[test]
fn clusters_are_read_and_decompressed_before_they_are_asked_for() {
    let folder = folder();
    for step in [4096, 65536] {
        let (path, bytes) = compressed(&folder, "cluster_size=64k");
        let clusters = SIZE as u64 / 65536;
        let counted = rt::block_on(async {
            let node = opened(&path, false).await;
            expect(&node, 0, &bytes[..512]).await;
            let before = reads(&node);
            for at in (65536..SIZE).step_by(step) {
                expect(&node, at, &bytes[at..at + step]).await;
            }
            let counted = reads(&node) - before;
            node.close().await.unwrap();
            counted
        });
        // Several clusters come by one read.
        assert!(counted <= clusters * 3 / 4, "{counted} reads for {clusters} clusters in steps of {step}");
    }
}

#[test]
fn readers_here_and_there_read_nothing_ahead() {
    let folder = folder();
    let (path, bytes) = compressed(&folder, "cluster_size=64k");
    rt::block_on(async {
        let node = opened(&path, false).await;
        expect(&node, 0, &bytes[..512]).await;
        let before = reads(&node);
        for number in 0..64 {
            let at = ((number * 37 + 5) % 95 + 1) * 65536;
            expect(&node, at, &bytes[at..at + 512]).await;
        }
        assert_eq!(reads(&node) - before, 64);
        node.close().await.unwrap();
    });
}

#[test]
fn readahead_sees_later_writes() {
    const CLUSTER: usize = 65536;
    let folder = folder();
    let (path, mut bytes) = compressed(&folder, "cluster_size=64k");
    let fresh = content(2);
    rt::block_on(async {
        let node = opened(&path, true).await;
        for at in (0..SIZE).step_by(4096) {
            expect(&node, at, &bytes[at..at + 4096]).await;
            // Within the present read-ahead, at another distance each time.
            let number = at / 4096;
            let target = (at / CLUSTER + 1 + number % 9) * CLUSTER;
            if target + CLUSTER > SIZE {
                continue;
            }
            let data = &fresh[target..target + CLUSTER];
            match number % 5 {
                0 => {
                    let (result, _) = node.write(target as u64, IoBuf::copy_from(&data[..4096])).await;
                    result.unwrap();
                    bytes[target..target + 4096].copy_from_slice(&data[..4096]);
                }
                // Its place in the file becomes free, and the next compressed write may get it.
                1 => {
                    node.discard(target as u64, CLUSTER as u64).await.unwrap();
                    node.flush().await.unwrap();
                    bytes[target..target + CLUSTER].fill(0);
                }
                2 => {
                    let clusters = vec![(target as u64, IoBuf::copy_from(data))];
                    node.write_compressed(clusters).await.unwrap();
                    bytes[target..target + CLUSTER].copy_from_slice(data);
                }
                3 => node.flush().await.unwrap(),
                _ => {}
            }
        }
        for at in (0..SIZE).step_by(CLUSTER) {
            expect(&node, at, &bytes[at..at + CLUSTER]).await;
        }
        node.close().await.unwrap();
    });
    tool("qemu-img", &["check", "-q", &path]);
}

#[test]
fn a_closed_image_is_not_read_any_more() {
    let folder = folder();
    let (path, bytes) = compressed(&folder, "cluster_size=64k");
    rt::block_on(async {
        for clusters in 3..12 {
            let node = opened(&path, false).await;
            for at in (0..clusters * 65536).step_by(65536) {
                expect(&node, at, &bytes[at..at + 65536]).await;
            }
            node.close().await.unwrap();
            drop(node);
            // QEMU locks the image for itself.
            tool("qemu-io", &["-f", "qcow2", "-c", "read 0 512", &path]);
        }
    });
}
