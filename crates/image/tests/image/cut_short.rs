// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Images that end too early: a lost range is an error that names the place, never zeroes.

use cowshed_image::{Node, OpenRequest, open};
use cowshed_offline::check::{CheckOptions, check};
use cowshed_storage::{IoBuf, rt};
use cowshed_testkit::programs::run;
use cowshed_types::{ErrorKind, Repair};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// An image of 64 MiB, written to.
fn image(options: &str, command: &str) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    run("qemu-img", folder.path(), &["create", "-q", "-f", "qcow2", "-o", options, "a.qcow2", "64M"]);
    run("qemu-io", folder.path(), &["-c", command, "a.qcow2"]);
    let path = folder.path().join("a.qcow2");
    (folder, path)
}

/// An image of 64 MiB, its first 8 MiB written with 3, of which only the first `keep` bytes are left.
fn cut(options: &str, keep: u64) -> (tempfile::TempDir, PathBuf) {
    let (folder, path) = image(options, "write -P 3 0 8M");
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    assert!(file.metadata().unwrap().len() > keep);
    file.set_len(keep).unwrap();
    (folder, path)
}

fn open_now(path: &Path, writable: bool) -> Arc<Node> {
    let request = OpenRequest::file(path.to_str().unwrap());
    rt::block_on(open(request.writable(writable))).unwrap()
}

fn read(node: &Node, at: u64, len: usize) -> Result<IoBuf, cowshed_types::Error> {
    let (result, buf) = rt::block_on(node.read(at, IoBuf::zeroed(len)));
    result.map(|()| buf)
}

/// With 64 KiB clusters QEMU puts five clusters of metadata first. A cut at 9 clusters and 1000 bytes leaves four
/// clusters of data and the beginning of a fifth.
const KEPT: u64 = 9 * 65536 + 1000;

#[test]
fn data_past_the_end_of_the_file_is_an_error() {
    let (_folder, path) = cut("cluster_size=64k", KEPT);
    let node = open_now(&path, false);
    assert!(read(&node, 0, 4 * 65536 + 1000).unwrap().iter().all(|byte| *byte == 3));
    // The file may end within a cluster: its rest need not be written.
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
    // Ranges that were never written are still zeroes.
    assert!(read(&node, 8 << 20, 1 << 20).unwrap().iter().all(|byte| *byte == 0));
    // Status: data, and not zero, so that every reader meets the error.
    let runs = rt::block_on(node.block_status(0, 64 << 20, 100)).unwrap();
    let lost: Vec<_> = runs.iter().filter(|run| run.start < 8 << 20 && run.start + run.len > 5 * 65536).collect();
    assert!(!lost.is_empty() && lost.iter().all(|run| run.data && !run.zero), "{runs:?}");
    rt::block_on(node.close()).unwrap();
}

/// The error for which the image can't be opened for writing; it must be as before afterwards.
fn refusal(path: &Path) -> String {
    let before = std::fs::read(path).unwrap();
    let outcome = rt::block_on(open(OpenRequest::file(path.to_str().unwrap()).writable(true)));
    let Err(error) = outcome else { panic!("opened for writing: the next allocation makes zeroes of what is lost") };
    assert!(before == std::fs::read(path).unwrap(), "the image has changed");
    assert_eq!(error.kind(), ErrorKind::InvalidImage, "{error}");
    let text = error.to_string();
    assert!(text.contains("can't be opened for writing") && text.contains("past the end of the file"), "{text}");
    text
}

#[test]
fn an_image_that_lost_data_is_not_written_to() {
    for options in ["cluster_size=64k", "cluster_size=64k,extended_l2=on", "cluster_size=64k,lazy_refcounts=on"] {
        let (_folder, path) = cut(options, KEPT);
        let text = refusal(&path);
        for word in ["a.qcow2", "the data of guest offset 0x50000", "590824 bytes", "0xa0000", "check -r all --lossy"] {
            assert!(text.contains(word), "{options}: no {word:?} in {text}");
        }
        // Given up as the message advises, it is writable again.
        let file = cowshed_storage::File::open(&path, &writable_file()).unwrap();
        let all = CheckOptions { repair: Repair::All, lossy: true, ..CheckOptions::default() };
        let report = rt::block_on(check(&file, &all, &|_, _| true)).unwrap();
        assert!(report.is_clean(), "{options}: {report:?}");
        drop(file);
        let node = open_now(&path, true);
        assert!(read(&node, 0, 4 * 65536).unwrap().iter().all(|byte| *byte == 3));
        let (result, _) = rt::block_on(node.write(7 << 20, IoBuf::copy_from(&[5; 4096])));
        result.unwrap();
        rt::block_on(node.close()).unwrap();
        run("qemu-img", path.parent().unwrap(), &["check", "-q", "a.qcow2"]);
    }
}

fn writable_file() -> cowshed_storage::OpenOptions {
    cowshed_storage::OpenOptions { write: true, ..Default::default() }
}

#[test]
fn leaked_clusters_past_the_end_do_not_stop_a_writer() {
    // The state that a crash leaves between counting a cluster and writing to it.
    let (_folder, path) = image("cluster_size=64k", "write -P 3 0 256k");
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    let end = file.metadata().unwrap().len().div_ceil(65536);
    // The first refcount block is the third cluster; a count has two bytes.
    (end..end + 3).for_each(|cluster| file.write_all_at(&[0, 1], 0x20000 + 2 * cluster).unwrap());
    drop(file);
    let node = open_now(&path, true);
    let (result, _) = rt::block_on(node.write(32 << 20, IoBuf::copy_from(&[4; 65536])));
    result.unwrap();
    rt::block_on(node.close()).unwrap();
    let node = open_now(&path, false);
    assert!(read(&node, 0, 256 << 10).unwrap().iter().all(|byte| *byte == 3));
    assert!(read(&node, 32 << 20, 65536).unwrap().iter().all(|byte| *byte == 4));
    rt::block_on(node.close()).unwrap();
}

#[test]
fn snapshot_with_lost_data_keeps_writers_out() {
    // The snapshot's tables take the place of the discarded clusters, in front of the data that it shares with the
    // disk.
    let (folder, path) = image("cluster_size=64k", "write -P 1 16M 1M");
    let discard = ["-d", "unmap", "-c", "write -P 3 0 8M", "-c", "discard 16M 1M", "a.qcow2"];
    run("qemu-io", folder.path(), &discard);
    run("qemu-img", folder.path(), &["snapshot", "-c", "before", "a.qcow2"]);
    // Then the disk discards it.
    run("qemu-io", folder.path(), &["-d", "unmap", "-c", "discard 0 8M", "a.qcow2"]);
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(file.metadata().unwrap().len() - (4 << 20)).unwrap();
    let node = open_now(&path, false);
    assert!(read(&node, 0, 8 << 20).unwrap().iter().all(|byte| *byte == 0));
    rt::block_on(node.close()).unwrap();
    assert!(refusal(&path).contains("a.qcow2"));
}

#[test]
fn short_data_files_are_errors_and_take_no_writes() {
    for raw in ["off", "on"] {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let options = format!("data_file={}/a.data,data_file_raw={raw}", folder.path().display());
        run("qemu-img", folder.path(), &["create", "-q", "-f", "qcow2", "-o", &options, "a.qcow2", "64M"]);
        run("qemu-io", folder.path(), &["-c", "write -P 3 0 8M", "a.qcow2"]);
        let path = folder.path().join("a.qcow2");
        // As it is, it is fine: a writer makes the file longer where nothing was.
        let node = open_now(&path, true);
        rt::block_on(node.write(9 << 20, IoBuf::zeroed(4096))).0.unwrap();
        rt::block_on(node.close()).unwrap();
        let data = folder.path().join("a.data");
        std::fs::OpenOptions::new().write(true).open(&data).unwrap().set_len((4 << 20) + 1000).unwrap();
        let node = open_now(&path, false);
        assert!(read(&node, 0, (4 << 20) + 1000).unwrap().iter().all(|byte| *byte == 3), "raw={raw}");
        let text = read(&node, 6 << 20, 4096).expect_err("data that isn't there").to_string();
        for word in ["a.data", "past the end of the file", "4195304", "0x600000"] {
            assert!(text.contains(word), "raw={raw}: no {word:?} in {text}");
        }
        rt::block_on(node.close()).unwrap();
        assert!(refusal(&path).contains("0x410000"), "raw={raw}");
        assert_eq!(std::fs::metadata(&data).unwrap().len(), (4 << 20) + 1000);
    }
}

#[test]
fn compressed_clusters_past_the_end_of_the_file_are_errors() {
    for method in ["zlib", "zstd"] {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        // Text that shrinks, but not to nothing.
        let text: Vec<u8> =
            (0..400_000_u32).flat_map(|n| format!("{:x} ", n.wrapping_mul(2_654_435_761)).into_bytes()).collect();
        std::fs::write(folder.path().join("a.raw"), &text[..3 << 20]).unwrap();
        let options = format!("compression_type={method}");
        let convert = ["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", &options, "a.raw", "a.qcow2"];
        run("qemu-img", folder.path(), &convert);
        let path = folder.path().join("a.qcow2");
        let len = std::fs::metadata(&path).unwrap().len();
        let node = open_now(&path, false);
        assert!(*read(&node, 0, 3 << 20).unwrap() == text[..3 << 20], "{method}");
        rt::block_on(node.close()).unwrap();
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(len - (512 << 10)).unwrap();
        let node = open_now(&path, false);
        assert!(*read(&node, 0, 65536).unwrap() == text[..65536], "{method}");
        let error = read(&node, (3 << 20) - 65536, 65536).expect_err("data that isn't there").to_string();
        assert!(error.contains("a.qcow2") && error.contains("past the end of the file"), "{method}: {error}");
        rt::block_on(node.close()).unwrap();
        assert!(refusal(&path).contains("a.qcow2"), "{method}");
    }
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
fn refcounts_past_the_end_are_not_free_clusters() {
    // A block counts 512 clusters of 4 KiB, 2 MiB, and lies at the beginning of its range: the later ones are cut off.
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
        // Whether space that is only reserved is a hole is the file system's choice.
        assert!(options.contains("falloc") || runs.iter().all(|run| run.zero), "{options}: {runs:?}");
        rt::block_on(node.close()).unwrap();
    }
}

/// Damage to the snapshot table of an image with two snapshots, and the warning for a reader.
type LostTable = (&'static str, fn(&std::fs::File), &'static str);

fn lost_tables() -> [LostTable; 2] {
    [
        (
            "behind the end",
            |file| file.write_all_at(&(1u64 << 40).to_be_bytes(), 64).unwrap(),
            "table of 80 bytes reaches past the end of the file",
        ),
        (
            "partly behind the end",
            |file| {
                // The whole table, and then the file ends within its first entry.
                let mut table = [0; 4096];
                let mut place = [0; 8];
                file.read_exact_at(&mut place, 64).unwrap();
                file.read_at(&mut table, u64::from_be_bytes(place)).unwrap();
                let end = file.metadata().unwrap().len().next_multiple_of(65536);
                file.write_all_at(&table[..60], end).unwrap();
                file.write_all_at(&end.to_be_bytes(), 64).unwrap();
            },
            "table of 80 bytes reaches past the end of the file",
        ),
    ]
}

#[test]
fn a_lost_snapshot_table_hides_the_snapshots_and_not_the_disk() {
    for (name, damage, warning) in lost_tables() {
        let (folder, path) = image("cluster_size=64k", "write -P 3 0 1M");
        for (id, write) in [("one", "write -P 4 512k 64k"), ("two", "write -P 5 1M 64k")] {
            run("qemu-img", folder.path(), &["snapshot", "-c", id, "a.qcow2"]);
            run("qemu-io", folder.path(), &["-c", write, "a.qcow2"]);
        }
        damage(&std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap());
        // QEMU takes the table for zeroes.
        let reads = ["-r", "-c", "read -P 4 512k 64k", "-c", "read -P 5 1M 64k", "a.qcow2"];
        run("qemu-io", folder.path(), &reads);
        let node = open_now(&path, false);
        let warnings = node.warnings().join("\n");
        for word in ["a.qcow2", "snapshots_offset", warning, "internal snapshots can't be"] {
            assert!(warnings.contains(word), "{name}: no {word:?} in {warnings}");
        }
        for (at, fill) in [(0, 3), (512 << 10, 4), (1 << 20, 5), (2 << 20, 0)] {
            assert!(read(&node, at, 65536).unwrap().iter().all(|byte| *byte == fill), "{name}: {at}");
        }
        rt::block_on(node.close()).unwrap();
        let of_snapshot =
            OpenRequest::file(path.to_str().unwrap()).snapshot(cowshed_image::SnapshotName::of_name("one"));
        let text = rt::block_on(open(of_snapshot)).expect_err("a snapshot").to_string();
        assert!(text.contains("a.qcow2") && text.contains("snapshots_offset"), "{name}: {text}");
        let text = refusal(&path);
        assert!(text.contains("snapshots_offset") && text.contains("check -r all"), "{name}: {text}");
    }
}
