// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Space ahead of an image that grows past the page cache: there while the image is open, gone once it is closed.

use cowshed_image::{Node, OpenRequest, open};
use cowshed_storage::{IoBuf, rt};
use cowshed_testkit::qemu::Qemu;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const CLUSTER: u64 = 65536;
const DISK_BYTES: usize = 16 << 20;

/// An image of 16 MiB, over a base full of data with `has_base`.
fn image(has_base: bool) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    std::fs::write(folder.path().join("base.raw"), vec![7; DISK_BYTES]).unwrap();
    let path = folder.path().join("a.qcow2");
    let base = if has_base { "backing_file=base.raw,backing_fmt=raw" } else { "" };
    Qemu::newest().create(&path, "qcow2", base, DISK_BYTES as u64);
    (folder, path)
}

fn open_now(path: &Path, cache: &str) -> Arc<Node> {
    let options = format!("driver=qcow2,file.driver=file,file.filename={},{cache}", path.display());
    rt::block_on(open(OpenRequest::image_opts(&options).unwrap().writable(true))).unwrap()
}

/// Writes half a page into each of some clusters.
fn write(node: &Node, clusters: std::ops::Range<u64>) {
    for cluster in clusters {
        let buf = IoBuf::copy_from(&[9; 2048]);
        rt::block_on(node.write(cluster * CLUSTER + 512, buf)).0.unwrap();
    }
}

fn len(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().len()
}

/// The image is well, is as long as what it uses, and has the first `written` clusters written.
#[track_caller]
fn expect_exact(path: &Path, written: u64) {
    let qemu = Qemu::newest();
    qemu.expect_clean(path);
    let end = qemu.check(path, "qcow2").json["image-end-offset"].as_u64().unwrap();
    assert_eq!(len(path), end);
    let mut model = vec![7; DISK_BYTES];
    (0..written).for_each(|cluster| model[(cluster * CLUSTER) as usize + 512..][..2048].fill(9));
    assert!(qemu.content(path, "qcow2") == model);
}

#[test]
fn space_ahead_goes_at_the_close() {
    let (_folder, path) = image(true);
    let node = open_now(&path, "cache.direct=on");
    write(&node, 0..40);
    let open_len = len(&path);
    rt::block_on(node.close()).unwrap();
    assert!(open_len >= len(&path) + 8 * CLUSTER, "{open_len} bytes, then {}", len(&path));
    expect_exact(&path, 40);
}

/// The file of an image that is killed after 40 clusters were written and flushed.
fn left_by_a_crash() -> (tempfile::TempDir, PathBuf) {
    let (folder, path) = image(true);
    let node = open_now(&path, "cache.direct=on");
    write(&node, 0..40);
    rt::block_on(node.flush()).unwrap();
    let left = folder.path().join("left.qcow2");
    std::fs::copy(&path, &left).unwrap();
    rt::block_on(node.close()).unwrap();
    assert!(len(&left) > len(&path));
    Qemu::newest().expect_clean(&left);
    (folder, left)
}

#[test]
fn space_of_a_crash_goes_at_a_writers_close() {
    for cache in ["cache.direct=off", "cache.direct=on"] {
        let (_folder, left) = left_by_a_crash();
        let node = open_now(&left, cache);
        write(&node, 40..41);
        rt::block_on(node.close()).unwrap();
        expect_exact(&left, 41);
    }
}

/// Space that no count includes may be referenced all the same, in an image that wants repair.
#[test]
fn an_opening_without_changes_cuts_nothing() {
    let (_folder, left) = left_by_a_crash();
    let before = std::fs::read(&left).unwrap();
    for cache in ["cache.direct=off", "cache.direct=on"] {
        let node = open_now(&left, cache);
        rt::block_on(node.read(0, IoBuf::zeroed(4096))).0.unwrap();
        rt::block_on(node.close()).unwrap();
        assert!(std::fs::read(&left).unwrap() == before, "{cache}");
    }
}

fn allocated(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().blocks() * 512
}

#[test]
fn cached_images_get_no_space_ahead() {
    let (_folder, path) = image(true);
    let node = open_now(&path, "cache.direct=off");
    write(&node, 0..40);
    let open_len = len(&path);
    rt::block_on(node.close()).unwrap();
    assert!(open_len <= len(&path) + CLUSTER, "{open_len} bytes, then {}", len(&path));
}

/// Where clusters keep holes, the file gets length ahead and no blocks.
#[test]
fn images_with_holes_get_length_alone() {
    let (_folder, path) = image(false);
    let node = open_now(&path, "cache.direct=on");
    write(&node, 0..40);
    let (open_len, open_blocks) = (len(&path), allocated(&path));
    rt::block_on(node.close()).unwrap();
    assert!(open_len >= len(&path) + 8 * CLUSTER, "{open_len} bytes, then {}", len(&path));
    // Two pages of each cluster, and some metadata.
    assert!(open_blocks <= 40 * 8192 + 8 * CLUSTER, "{open_blocks} bytes of blocks");
    Qemu::newest().expect_clean(&path);
}

/// Once a request has left holes, those of later ones stay: a file of whole clusters gets length alone, too.
#[test]
fn holes_end_the_blocks_ahead_of_whole_clusters() {
    let (_folder, path) = image(false);
    let node = open_now(&path, "cache.direct=on");
    write(&node, 0..1);
    for cluster in 1..40 {
        let buf = IoBuf::copy_from(&[9; CLUSTER as usize]);
        rt::block_on(node.write(cluster * CLUSTER, buf)).0.unwrap();
    }
    let open_blocks = allocated(&path);
    rt::block_on(node.close()).unwrap();
    assert!(open_blocks <= len(&path) + CLUSTER, "{open_blocks} bytes of blocks, {} bytes after the close", len(&path));
    Qemu::newest().expect_clean(&path);
}
