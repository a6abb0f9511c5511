// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The drivers compress, preallocate, blklogwrites, blkverify and quorum: content, power cuts and requests at the same time.

use cowshed_image::graph::{AttachRequest, Graph};
use cowshed_image::options::BlockdevOptions;
use cowshed_image::{Node, OpenRequest, Preallocation, ZeroFlags, open};
use cowshed_storage::{IoBuf, rt};
use cowshed_testkit::programs::tool;
use cowshed_types::{ErrorKind, Result};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

struct Files(TempDir);

impl Files {
    fn new() -> Files {
        Files(tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    fn raw(&self, name: &str, bytes: &[u8]) -> String {
        std::fs::write(self.path(name), bytes).unwrap();
        self.text(name)
    }

    fn qcow2(&self, name: &str, size: &str) -> String {
        tool("qemu-img", &["create", "-q", "-f", "qcow2", &self.text(name), size]);
        self.text(name)
    }
}

fn opened(options: &str, writable: bool) -> Result<Arc<Node>> {
    rt::block_on(open(OpenRequest::image_opts(options).unwrap().writable(writable).discard(true)))
}

fn close(node: &Node) {
    rt::block_on(node.close()).unwrap();
}

fn write(node: &Node, offset: u64, bytes: &[u8]) -> Result<()> {
    rt::block_on(node.write(offset, IoBuf::copy_from(bytes))).0
}

fn read(node: &Node, offset: u64, len: usize) -> Result<Vec<u8>> {
    let (result, buf) = rt::block_on(node.read(offset, IoBuf::zeroed(len)));
    result.map(|()| buf.to_vec())
}

fn len(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().len()
}

#[test]
fn compressed_writes_of_any_place_read_back() {
    let files = Files::new();
    // The last cluster is a short one.
    let path = files.qcow2("a", "1000k");
    let node = opened(&format!("driver=compress,file.driver=qcow2,file.file.filename={path}"), true).unwrap();
    let mut model = vec![0u8; 1000 << 10];
    let mut put = |offset: usize, len: usize, byte: u8| {
        write(&node, offset as u64, &vec![byte; len]).unwrap();
        model[offset..offset + len].fill(byte);
    };
    put(0, 65536, 1);
    put(70_000, 10, 2);
    put(130_000, 200_000, 3);
    put(140_001, 1, 4);
    put((1000 << 10) - 700, 700, 5);
    rt::block_on(node.write_zeroes(66_000, 200_000, ZeroFlags::default())).unwrap();
    model[66_000..266_000].fill(0);
    assert_eq!(read(&node, 0, model.len()).unwrap(), model);
    close(&node);
    tool("qemu-img", &["check", "-q", "-f", "qcow2", &path]);
    let image = opened(&format!("driver=qcow2,file.filename={path}"), false).unwrap();
    assert_eq!(read(&image, 0, model.len()).unwrap(), model);
    let runs = rt::block_on(image.block_status(0, image.size(), 64)).unwrap();
    assert!(runs.iter().filter(|run| run.data).all(|run| run.compressed), "{runs:?}");
    close(&image);
}

#[test]
fn a_compress_filter_follows_the_clusters_of_an_overlay() {
    for (below, above) in [(262_144, 65_536), (65_536, 262_144), (4096, 65_536)] {
        let files = Files::new();
        for (name, cluster) in [("base", below), ("overlay", above)] {
            let cluster = format!("cluster_size={cluster}");
            tool("qemu-img", &["create", "-q", "-f", "qcow2", "-o", &cluster, &files.text(name), "8M"]);
        }
        let graph = Graph::new(&cowshed_image::DRIVERS);
        let add = |options: String| rt::block_on(graph.add(BlockdevOptions::from_keyval(&options).unwrap())).unwrap();
        let base = add(format!("driver=qcow2,node-name=base,file.driver=file,file.filename={}", files.text("base")));
        let filter = add("driver=compress,node-name=filter,discard=unmap,file=base".to_owned());
        write(&filter, 0, &[1; 300_000]).unwrap();
        let name = files.text("overlay");
        let overlay = add(format!("driver=qcow2,node-name=overlay,backing=base,file.driver=file,file.filename={name}"));
        rt::block_on(graph.replace(&base, &overlay)).unwrap();
        write(&filter, 1000, &[2; 30_000]).unwrap();
        write(&filter, 1 << 20, &[3; 131_072]).unwrap();
        rt::block_on(filter.write_zeroes(100_000, 100_000, ZeroFlags::default())).unwrap();
        let mut model = vec![0u8; 2 << 20];
        model[..300_000].fill(1);
        model[1000..31_000].fill(2);
        model[1 << 20..(1 << 20) + 131_072].fill(3);
        model[100_000..200_000].fill(0);
        assert!(read(&filter, 0, model.len()).unwrap() == model, "{below} below, {above} above");
        rt::block_on(graph.close_all()).unwrap();
        tool("qemu-img", &["check", "-q", "-f", "qcow2", &name]);
    }
}

#[test]
fn parts_of_one_cluster_written_at_once_are_all_kept() {
    let files = Files::new();
    let path = files.qcow2("a", "1M");
    let node = opened(&format!("driver=compress,file.driver=qcow2,file.file.filename={path}"), true).unwrap();
    rt::block_on(async {
        let writes = (0..16u64).map(|at| node.write(at * 4096, IoBuf::copy_from(&[at as u8 + 1; 4096])));
        for (result, _) in futures_util::future::join_all(writes).await {
            result.unwrap();
        }
    });
    for at in 0..16u64 {
        assert_eq!(read(&node, at * 4096, 4096).unwrap(), vec![at as u8 + 1; 4096], "{at}");
    }
    close(&node);
}

#[test]
fn what_can_not_be_compressed_is_refused() {
    let files = Files::new();
    let path = files.raw("r", &[0; 65536]);
    let error = opened(&format!("driver=compress,file.driver=raw,file.file.filename={path}"), true).unwrap_err();
    assert_eq!(error.sentence(), "Compression is not supported for underlying format: raw");
}

#[test]
fn space_ahead_is_there_while_the_file_grows_and_gone_afterwards() {
    let files = Files::new();
    let path = files.qcow2("a", "1G");
    let options = format!(
        "driver=qcow2,file.driver=preallocate,file.prealloc-size=8M,file.prealloc-align=1M,file.file.filename={path}"
    );
    let node = opened(&options, true).unwrap();
    write(&node, 0, &[1; 65536]).unwrap();
    let ahead = len(&files.path("a"));
    assert!(ahead >= 8 * MIB && ahead.is_multiple_of(MIB), "{ahead}");
    // The next clusters find their place there.
    for at in 1..32 {
        write(&node, at * 65536, &vec![at as u8; 65536]).unwrap();
    }
    assert_eq!(len(&files.path("a")), ahead);
    rt::block_on(node.flush()).unwrap();
    // A power cut now leaves a longer file, which is a sound image.
    std::fs::copy(files.path("a"), files.path("cut")).unwrap();
    close(&node);
    assert!(len(&files.path("a")) < 4 * MIB, "{}", len(&files.path("a")));
    for name in ["a", "cut"] {
        let path = files.text(name);
        tool("qemu-img", &["check", "-q", "-f", "qcow2", &path]);
        let node = opened(&format!("driver=qcow2,file.filename={path}"), true).unwrap();
        for at in 1..32 {
            assert_eq!(read(&node, at * 65536, 65536).unwrap(), vec![at as u8; 65536], "{name} {at}");
        }
        write(&node, 100 << 16, &[9; 65536]).unwrap();
        close(&node);
        tool("qemu-img", &["check", "-q", "-f", "qcow2", &path]);
    }
}

/// A disk that only reads has no use for the space.
#[test]
fn space_ahead_goes_when_the_disk_stops_writing() {
    let files = Files::new();
    let path = files.qcow2("a", "1G");
    let options = format!(
        "driver=qcow2,node-name=n,file.driver=preallocate,file.prealloc-size=8M,file.prealloc-align=1M,file.file.driver=file,\
         file.file.filename={path}"
    );
    let graph = Graph::new(&cowshed_image::DRIVERS);
    let node = rt::block_on(graph.add(BlockdevOptions::from_keyval(&options).unwrap())).unwrap();
    for (at, byte) in [(0, 1), (16 * MIB, 2)] {
        let attachment = rt::block_on(graph.attach(&node, AttachRequest::export("w", true))).unwrap();
        rt::block_on(attachment.queue().write(at, IoBuf::copy_from(&[byte; MIB as usize]))).0.unwrap();
        assert!(len(&files.path("a")) >= 8 * MIB, "{}", len(&files.path("a")));
        rt::block_on(attachment.detach()).unwrap();
        rt::block_on(graph.set_read_only(&node, true)).unwrap();
        assert!(len(&files.path("a")) < 4 * MIB, "{}", len(&files.path("a")));
        rt::block_on(graph.set_read_only(&node, false)).unwrap();
    }
    assert_eq!(read(&node, 16 * MIB, 2).unwrap(), [2, 2]);
}

#[test]
fn a_preallocated_disk_shows_the_length_that_was_asked_for() {
    let files = Files::new();
    let path = files.raw("r", &[1; 65536]);
    let node = opened(&format!("driver=preallocate,prealloc-size=4M,file.filename={path}"), true).unwrap();
    rt::block_on(node.resize(2 * MIB, Preallocation::Off)).unwrap();
    assert_eq!(node.size(), 2 * MIB);
    assert!(len(&files.path("r")) >= 6 * MIB);
    assert!(write(&node, 2 * MIB, &[1; 512]).is_err(), "the space ahead is no part of the disk");
    rt::block_on(node.resize(MIB, Preallocation::Off)).unwrap();
    assert_eq!((node.size(), len(&files.path("r"))), (MIB, MIB));
    rt::block_on(node.resize(3 * MIB, Preallocation::Full)).unwrap();
    assert_eq!(read(&node, MIB, MIB as usize).unwrap(), vec![0; MIB as usize]);
    close(&node);
    assert_eq!(len(&files.path("r")), 3 * MIB);
}

/// The entries of a log: sector, number of sectors, flags, and the data behind them.
fn entries(log: &[u8]) -> Vec<(u64, u64, u64, Vec<u8>)> {
    let number = |at: usize| u64::from_le_bytes(log[at..at + 8].try_into().unwrap());
    assert_eq!((number(0), number(8)), (0x006a_7366_7773_6872, 1));
    let sector = u32::from_le_bytes(log[24..28].try_into().unwrap()) as usize;
    let mut at = sector;
    (0..number(16))
        .map(|_| {
            let (start, sectors, flags) = (number(at), number(at + 8), number(at + 16));
            let data = if flags & 4 == 0 { sectors as usize * sector } else { 0 };
            let entry = (start, sectors, flags, log[at + sector..at + sector + data].to_vec());
            at += sector + data;
            entry
        })
        .collect()
}

#[test]
fn a_log_of_writes_replays_to_the_disk() {
    let files = Files::new();
    let (disk, log) = (files.raw("disk", &[0; 1 << 20]), files.raw("log", &[]));
    let options = |append: &str| format!("driver=blklogwrites,{append}file.filename={disk},log.filename={log}");
    let node = opened(&options(""), true).unwrap();
    write(&node, 0, &[1; 65536]).unwrap();
    write(&node, 100, &[2; 100]).unwrap();
    rt::block_on(node.flush()).unwrap();
    let flushed = std::fs::read(&disk).unwrap();
    write(&node, 70_000, &[3; 5000]).unwrap();
    rt::block_on(node.write_zeroes(0, 2048, ZeroFlags::default())).unwrap();
    rt::block_on(node.discard(512_000, 4096)).unwrap();
    close(&node);
    let node = opened(&options("log-append=on,"), true).unwrap();
    write(&node, 900_000, &[4; 4096]).unwrap();
    close(&node);

    let replayed = |until_flush: bool| {
        let mut bytes = vec![0u8; 1 << 20];
        for (start, _, flags, data) in entries(&std::fs::read(&log).unwrap()) {
            if until_flush && flags & 1 != 0 {
                break;
            }
            let start = start as usize * 512;
            bytes[start..start + data.len()].copy_from_slice(&data);
        }
        bytes
    };
    assert!(replayed(true) == flushed, "the state at the flush");
    assert!(replayed(false) == std::fs::read(&disk).unwrap(), "the last state");
    let discards = entries(&std::fs::read(&log).unwrap()).into_iter().filter(|entry| entry.2 == 4);
    assert_eq!(discards.map(|entry| (entry.0, entry.1)).collect::<Vec<_>>(), [(1000, 8)]);
}

#[test]
fn damaged_logs_are_refused_and_reading_makes_none() {
    let files = Files::new();
    let disk = files.raw("disk", &[0; 1 << 20]);
    let log = files.raw("log", &[]);
    let node = opened(&format!("driver=blklogwrites,file.filename={disk},log.filename={log}"), false).unwrap();
    assert_eq!(read(&node, 0, 512).unwrap(), [0; 512]);
    close(&node);
    assert_eq!(len(&files.path("log")), 0);
    let super_block = |entries: u64, sector: u32| {
        let mut bytes = vec![0u8; 4096];
        for (at, number) in [0x006a_7366_7773_6872_u64, 1, entries].into_iter().enumerate() {
            bytes[at * 8..at * 8 + 8].copy_from_slice(&number.to_le_bytes());
        }
        bytes[24..28].copy_from_slice(&sector.to_le_bytes());
        bytes
    };
    for (bytes, words) in [
        (vec![7; 4096], "Invalid log superblock magic"),
        (super_block(0, 1000), "Invalid log sector size 1000"),
        (super_block(u64::MAX, 512), "the log ends before its last entry"),
    ] {
        let log = files.raw("bad", &bytes);
        let options = format!("driver=blklogwrites,log-append=on,file.filename={disk},log.filename={log}");
        let error = opened(&options, true).unwrap_err();
        assert_eq!((error.kind(), error.sentence().as_str()), (ErrorKind::InvalidImage, words));
    }
    let options = format!("driver=blklogwrites,file.filename={disk},log.driver=raw,log.file.filename={disk}");
    assert!(opened(&options, true).is_err(), "a log in the disk that it logs");
}

#[test]
fn a_verified_image_reports_the_first_byte_that_differs() {
    let files = Files::new();
    let (raw, test) = (files.raw("raw", &[0; 1 << 20]), files.qcow2("test", "1M"));
    let options = format!("driver=blkverify,raw.filename={raw},test.driver=qcow2,test.file.filename={test}");
    let node = opened(&options, true).unwrap();
    write(&node, 1000, &[5; 100_000]).unwrap();
    assert_eq!(read(&node, 1000, 100_000).unwrap(), vec![5; 100_000]);
    rt::block_on(node.write_zeroes(2048, 4096, ZeroFlags::default())).unwrap();
    assert_eq!(read(&node, 0, 1 << 20).unwrap(), std::fs::read(&raw).unwrap());
    assert_eq!(rt::block_on(node.resize(2 << 20, Preallocation::Off)).unwrap_err().kind(), ErrorKind::Unsupported);
    close(&node);
    let mut bytes = std::fs::read(&raw).unwrap();
    bytes[70_001] ^= 1;
    std::fs::write(&raw, &bytes).unwrap();
    let node = opened(&options, false).unwrap();
    assert_eq!(read(&node, 0, 65536).unwrap(), bytes[..65536]);
    let error = read(&node, 65536, 65536).unwrap_err();
    assert_eq!(error.report(), Some("blkverify: read offset=65536 bytes=65536 contents mismatch at offset 70001"));
    close(&node);
}

#[test]
fn a_majority_decides_and_repairs() {
    let files = Files::new();
    let disks = ["a", "b", "c"].map(|name| files.raw(name, &[1; 1 << 20]));
    let options = |rest: &str| {
        let children: Vec<String> =
            (0..3).map(|at| format!("children.{at}.driver=file,children.{at}.filename={}", disks[at])).collect();
        format!("driver=quorum,{},{rest}", children.join(","))
    };
    let node = opened(&options("vote-threshold=2"), true).unwrap();
    write(&node, 4096, &[2; 4096]).unwrap();
    close(&node);
    for disk in &disks {
        assert_eq!(std::fs::read(disk).unwrap()[4095..4098], [1, 2, 2]);
    }
    let mut wrong = std::fs::read(&disks[1]).unwrap();
    wrong[5000] = 9;
    std::fs::write(&disks[1], &wrong).unwrap();
    let node = opened(&options("vote-threshold=2"), true).unwrap();
    assert_eq!(read(&node, 4096, 4096).unwrap(), vec![2; 4096]);
    close(&node);
    assert_eq!(std::fs::read(&disks[1]).unwrap()[5000], 9, "nothing is rewritten unasked");
    assert!(read(&opened(&options("vote-threshold=3"), false).unwrap(), 4096, 4096).is_err());
    let node = opened(&options("vote-threshold=2,rewrite-corrupted=on"), true).unwrap();
    assert_eq!(read(&node, 4096, 4096).unwrap(), vec![2; 4096]);
    close(&node);
    assert_eq!(std::fs::read(&disks[1]).unwrap()[5000], 2);
    let other = files.raw("other", &[1; 4096]);
    let mixed = format!(
        "driver=quorum,vote-threshold=1,children.0.driver=file,children.0.filename={other},children.1.driver=file,children.1.filename={}",
        disks[0]
    );
    assert!(opened(&mixed, false).unwrap_err().to_string().contains("one size"));
}

/// Two overlays of one base in one opening are no loop; a chain that comes back to itself below one of them is.
#[test]
fn branches_of_one_opening_share_a_base() {
    let files = Files::new();
    let base = files.raw("base", &[7; MIB as usize]);
    let (one, two) = (files.text("one"), files.text("two"));
    for overlay in [&one, &two] {
        tool("qemu-img", &["create", "-q", "-f", "qcow2", "-b", &base, "-F", "raw", overlay]);
    }
    let child = |key: &str, name: &str| format!("{key}.driver=qcow2,{key}.file.driver=file,{key}.file.filename={name}");
    let trees = [
        format!("driver=quorum,vote-threshold=2,{},{}", child("children.0", &one), child("children.1", &two)),
        format!("driver=blkverify,{},{}", child("raw", &one), child("test", &two)),
        format!("driver=copy-before-write,{},{}", child("file", &one), child("target", &two)),
    ];
    for tree in &trees {
        let node = opened(tree, true).unwrap_or_else(|error| panic!("{tree}: {error}"));
        assert_eq!(read(&node, 4096, 512).unwrap(), vec![7; 512], "{tree}");
        close(&node);
    }
    tool("qemu-img", &["rebase", "-u", "-b", &two, "-F", "qcow2", &two]);
    for tree in &trees {
        let error = opened(tree, true).expect_err("a loop");
        assert!(error.to_string().contains("the chain loops"), "{tree}: {error}");
    }
}

#[test]
fn readers_and_writers_of_a_quorum_see_no_half_written_range() {
    let files = Files::new();
    let disks = ["a", "b"].map(|name| files.raw(name, &[0; 65536]));
    let options = format!(
        "driver=quorum,vote-threshold=2,children.0.driver=file,children.0.filename={},children.1.driver=file,children.1.filename={}",
        disks[0], disks[1]
    );
    let node = opened(&options, true).unwrap();
    rt::block_on(async {
        for round in 1..40u8 {
            let buf = IoBuf::copy_from(&[round; 16384]);
            let writing = node.write(0, buf);
            let reading = node.read(0, IoBuf::zeroed(16384));
            let ((written, _), (read, buf)) = futures_util::future::join(writing, reading).await;
            written.unwrap();
            read.unwrap();
            assert!(buf.iter().all(|byte| *byte == buf[0]), "round {round}");
        }
    });
    close(&node);
}
