// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Images that end too early: what has gone is an error that names the place, never zeroes.

use cowshed_block::ErrorKind;
use cowshed_image::{Node, OpenRequest, open};
use cowshed_storage::{IoBuf, rt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

fn run(program: &str, folder: &Path, args: &[&str]) {
    let output = Command::new(program).current_dir(folder).args(args).output();
    let output = output.unwrap_or_else(|error| panic!("{program} must be installed: {error}"));
    assert!(output.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// An image of 64 MiB, its first 8 MiB written with 3, of which only the first `keep` bytes are left.
fn cut(options: &str, keep: u64) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    run("qemu-img", folder.path(), &["create", "-q", "-f", "qcow2", "-o", options, "a.qcow2", "64M"]);
    run("qemu-io", folder.path(), &["-c", "write -P 3 0 8M", "a.qcow2"]);
    let path = folder.path().join("a.qcow2");
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    assert!(file.metadata().unwrap().len() > keep);
    file.set_len(keep).unwrap();
    (folder, path)
}

fn open_now(path: &Path, writable: bool) -> Arc<Node> {
    let request = OpenRequest::file(path.to_str().unwrap());
    rt::block_on(open(request.writable(writable))).unwrap()
}

fn read(node: &Node, at: u64, len: usize) -> Result<IoBuf, cowshed_block::Error> {
    let (result, buf) = rt::block_on(node.read(at, IoBuf::zeroed(len)));
    result.map(|()| buf)
}

/// With 64 KiB clusters QEMU puts five clusters of metadata first, so a cut at 9 clusters and 1000 bytes leaves four
/// clusters of data and the beginning of a fifth.
const KEPT: u64 = 9 * 65536 + 1000;

#[test]
fn data_past_the_end_of_the_file_is_an_error() {
    let (_folder, path) = cut("cluster_size=64k", KEPT);
    let node = open_now(&path, false);
    assert!(read(&node, 0, 4 * 65536 + 1000).unwrap().iter().all(|byte| *byte == 3));
    // The file may end within a cluster: nobody has to write its rest.
    assert!(read(&node, 4 * 65536 + 1000, 64536).unwrap().iter().all(|byte| *byte == 0));
    for (at, len) in [(5 * 65536, 65536), (5 * 65536 + 8192, 512), (65536, 5 * 65536), (7 << 20, 4096), (0, 64 << 20)] {
        let error = read(&node, at, len).expect_err("data that isn't there");
        assert_eq!(error.kind(), ErrorKind::InvalidImage, "{error}");
        let text = error.to_string();
        for word in ["a.qcow2", "past the end of the file", "590824"] {
            assert!(text.contains(word), "{at}+{len}: no {word:?} in {text}");
        }
    }
    let text = read(&node, 5 * 65536, 65536).expect_err("data that isn't there").to_string();
    assert!(text.contains("0x50000") && text.contains("0xa0000"), "guest and host offset: {text}");
    // What has never been written is still zeroes.
    assert!(read(&node, 8 << 20, 1 << 20).unwrap().iter().all(|byte| *byte == 0));
    // Status: data, and not zero, so that every reader meets the error.
    let runs = rt::block_on(node.block_status(0, 64 << 20, 100)).unwrap();
    let lost: Vec<_> = runs.iter().filter(|run| run.start < 8 << 20 && run.start + run.len > 5 * 65536).collect();
    assert!(!lost.is_empty() && lost.iter().all(|run| run.data && !run.zero), "{runs:?}");
    rt::block_on(node.close()).unwrap();
}

#[test]
fn a_write_in_place_does_not_bring_lost_neighbours_back_as_zeroes() {
    let (_folder, path) = cut("cluster_size=64k", KEPT);
    let before = std::fs::read(&path).unwrap();
    let node = open_now(&path, true);
    let (result, _) = rt::block_on(node.write(7 << 20, IoBuf::zeroed(4096)));
    assert!(result.expect_err("a cluster that isn't there").to_string().contains("past the end of the file"));
    rt::block_on(node.close()).unwrap();
    assert!(before == std::fs::read(&path).unwrap(), "the image has changed");
}

#[test]
fn tables_past_the_end_of_the_file_are_errors() {
    // The L2 table follows four clusters of metadata; it needs its first 1 KiB.
    for keep in [4 * 65536, 4 * 65536 + 512] {
        let (_folder, path) = cut("cluster_size=64k", keep);
        let node = open_now(&path, false);
        let text = read(&node, 0, 4096).expect_err("a table that isn't there").to_string();
        assert!(text.contains("a.qcow2") && text.contains("past the end of the file"), "{text}");
        assert!(rt::block_on(node.block_status(0, 4096, 10)).is_err());
        rt::block_on(node.close()).unwrap();
    }
}

#[test]
fn refcounts_past_the_end_of_the_file_are_not_taken_for_free_clusters() {
    // A block counts 512 clusters of 4 KiB, 2 MiB, and lies at the beginning of what it counts: the later ones are cut off.
    let (_folder, path) = cut("cluster_size=4k,refcount_bits=64", 3 << 20);
    let before = std::fs::read(&path).unwrap();
    let outcome = rt::block_on(open(OpenRequest::file(path.to_str().unwrap()).writable(true)));
    let text = outcome.expect_err("refcounts that aren't there").to_string();
    assert!(text.contains("refcount block 2 lies past the end of the file"), "{text}");
    assert!(before == std::fs::read(&path).unwrap(), "the image has changed");
}

#[test]
fn preallocated_clusters_are_in_the_file() {
    for options in ["preallocation=metadata", "preallocation=metadata,extended_l2=on", "preallocation=falloc"] {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        run("qemu-img", folder.path(), &["create", "-q", "-f", "qcow2", "-o", options, "a.qcow2", "64M"]);
        let node = open_now(&folder.path().join("a.qcow2"), false);
        assert!(read(&node, 0, 64 << 20).unwrap().iter().all(|byte| *byte == 0), "{options}");
        let runs = rt::block_on(node.block_status(0, 64 << 20, 1000)).unwrap();
        // Whether space that is only reserved is a hole is the file system's to say.
        assert!(options.contains("falloc") || runs.iter().all(|run| run.zero), "{options}: {runs:?}");
        rt::block_on(node.close()).unwrap();
    }
}
