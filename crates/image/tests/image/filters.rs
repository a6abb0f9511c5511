// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The fault filter, filters between an image and its file, and the generic settings of a node.

use cowshed_image::filters::throttle::Limits;
use cowshed_image::filters::{FaultOp, FaultRule};
use cowshed_image::graph::Graph;
use cowshed_image::node::ChildRole;
use cowshed_image::options::BlockdevOptions;
use cowshed_image::stats::IoKind;
use cowshed_image::{Node, OpenRequest, Preallocation, ZeroFlags, open};
use cowshed_storage::{IoBuf, rt};
use cowshed_testkit::programs::tool;
use cowshed_types::{Errno, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

fn disk(bytes: &[u8]) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("disk.raw").to_str().unwrap().to_owned();
    std::fs::write(&path, bytes).unwrap();
    (folder, path)
}

fn open_opts(opts: &str) -> Arc<Node> {
    rt::block_on(open(OpenRequest::image_opts(opts).unwrap().writable(true))).unwrap()
}

fn write(node: &Node, offset: u64, bytes: &[u8]) -> cowshed_types::Result<()> {
    rt::block_on(node.write(offset, IoBuf::copy_from(bytes))).0
}

fn read(node: &Node, offset: u64, len: usize) -> cowshed_types::Result<Vec<u8>> {
    let (result, buf) = rt::block_on(node.read(offset, IoBuf::zeroed(len)));
    result.map(|()| buf.to_vec())
}

#[test]
fn armed_rules_fail_what_they_match() {
    let (_folder, path) = disk(&[1; 65536]);
    let node = open_opts(&format!(
        "driver=fault,file.driver=raw,file.file.filename={path},rules.0.op=write,rules.0.errno=28,rules.0.offset=4k,\
         rules.0.len=4k,rules.0.after=1,rules.0.once=on"
    ));
    assert_eq!((node.driver_name(), node.size()), ("fault", 65536));
    write(&node, 0, &[2; 4096]).unwrap();
    write(&node, 4096, &[2; 4096]).unwrap();
    let error = write(&node, 8191, &[2; 4096]).unwrap_err();
    assert_eq!((error.kind(), error.errno()), (ErrorKind::NoSpace, Errno::ENOSPC));
    assert_eq!(read(&node, 8191, 2).unwrap(), [2, 1], "a failed write must not reach the disk");
    write(&node, 8191, &[3; 4096]).unwrap();

    let fault = node.fault().unwrap();
    fault.arm(FaultRule::always(FaultOp::Flush, Errno::EIO));
    fault.arm(FaultRule::always(FaultOp::Read, Errno::EIO));
    fault.arm(FaultRule::always(FaultOp::Discard, Errno::EIO));
    fault.arm(FaultRule::always(FaultOp::WriteZeroes, Errno::EIO));
    fault.arm(FaultRule::always(FaultOp::Resize, Errno::EIO));
    assert!(rt::block_on(node.flush()).is_err());
    assert!(read(&node, 0, 1).is_err());
    assert!(rt::block_on(node.discard(0, 512)).is_err());
    assert!(rt::block_on(node.write_zeroes(0, 512, ZeroFlags::default())).is_err());
    assert!(rt::block_on(node.resize(1024, Preallocation::Off)).is_err());
    fault.disarm();
    rt::block_on(node.flush()).unwrap();
    assert_eq!(read(&node, 8191, 2).unwrap(), [3, 3]);
    let runs = rt::block_on(node.block_status_chain(0, 65536, 16)).unwrap();
    assert_eq!((runs[0].depth, runs[0].present), (0, true));
    rt::block_on(node.close()).unwrap();
}

/// An image with two megabytes in it, stored behind the options `between`; `{}` there is its file's name.
fn used_behind(between: &str) {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("disk.qcow2").to_str().unwrap().to_owned();
    tool("qemu-img", &["create", "-q", "-f", "qcow2", &path, "16M"]);
    let graph = Graph::new(&cowshed_image::DRIVERS);
    graph.throttle_groups().create("g", Limits::new()).unwrap();
    let options = format!("driver=qcow2,node-name=q,discard=unmap,{}", between.replace("{}", &path));
    let options = BlockdevOptions::from_keyval(&options).unwrap();
    rt::block_on(async {
        let node = graph.add(options).await.unwrap();
        // Allocating writes make the file longer.
        for at in 0..32u64 {
            node.write(at * 65536 + 100, IoBuf::copy_from(&[at as u8 + 1; 65000])).await.0.unwrap();
        }
        node.flush().await.unwrap();
        node.write_zeroes(1 << 20, 65536, ZeroFlags { may_unmap: true, no_fallback: false }).await.unwrap();
        node.discard(65536, 65536).await.unwrap();
        node.resize(24 << 20, Preallocation::Off).await.unwrap();
        node.write((24 << 20) - 512, IoBuf::copy_from(&[99; 512])).await.0.unwrap();
        let filter = node.child(ChildRole::File).unwrap();
        let counted = filter.statistics();
        assert!(counted.kind(IoKind::Write).operations > 32, "{between}: {counted:?}");
        // Read-only and back, as a snapshot and a commit do it.
        graph.set_read_only(&node, true).await.unwrap();
        assert!(node.write(0, IoBuf::copy_from(&[1; 512])).await.0.is_err());
        graph.set_read_only(&node, false).await.unwrap();
        node.write(0, IoBuf::copy_from(&[77; 100])).await.0.unwrap();
        drop((filter, node));
        graph.delete("q").await.unwrap();
    });
    tool("qemu-img", &["check", "-q", "-f", "qcow2", &path]);
    let node = open_opts(&format!("driver=qcow2,file.filename={path}"));
    assert_eq!(node.size(), 24 << 20);
    for at in [0, 2, 3, 15, 17, 31u64] {
        assert_eq!(read(&node, at * 65536 + 100, 65000).unwrap(), vec![at as u8 + 1; 65000], "{between}: {at}");
    }
    assert_eq!(read(&node, 0, 101).unwrap(), [vec![77; 100], vec![1]].concat());
    assert_eq!(read(&node, 1 << 20, 65536).unwrap(), vec![0; 65536], "{between}");
    assert_eq!(read(&node, 65536, 65536).unwrap(), vec![0; 65536], "{between}");
    assert_eq!(read(&node, (24 << 20) - 512, 512).unwrap(), [99; 512]);
    rt::block_on(node.close()).unwrap();
}

#[test]
fn an_image_may_be_stored_behind_any_filter() {
    for between in [
        "file.driver=throttle,file.throttle-group=g,file.file.filename={}",
        "file.driver=copy-on-read,file.file.driver=file,file.file.filename={}",
        "file.driver=fault,file.file.filename={}",
        "file.driver=blkdebug,file.image.driver=file,file.image.filename={}",
        "file.driver=throttle,file.throttle-group=g,file.file.driver=blkdebug,file.file.image.filename={}",
        "file.driver=blkdebug,file.image.driver=throttle,file.image.throttle-group=g,file.image.file.filename={}",
        "file.driver=throttle,file.throttle-group=g,file.file.driver=file,file.file.filename={},cache.direct=on",
        "file.driver=preallocate,file.prealloc-size=1M,file.file.filename={}",
    ] {
        used_behind(between);
    }
}

#[test]
fn a_filter_below_an_image_fails_its_requests() {
    let (folder, _) = disk(&[]);
    let path = folder.path().join("disk.qcow2").to_str().unwrap().to_owned();
    tool("qemu-img", &["create", "-q", "-f", "qcow2", &path, "16M"]);
    let node = open_opts(&format!("driver=qcow2,file.driver=fault,file.file.filename={path}"));
    write(&node, 0, &[1; 65536]).unwrap();
    let filter = node.child(ChildRole::File).unwrap();
    let fault = filter.fault().unwrap();
    fault.arm(FaultRule::once(FaultOp::Write, Errno::ENOSPC));
    let error = write(&node, 4096, &[2; 4096]).unwrap_err();
    assert_eq!((error.kind(), error.file_name()), (ErrorKind::NoSpace, Some(path.as_str())));
    assert_eq!(read(&node, 4096, 1).unwrap(), [1]);
    fault.arm(FaultRule::once(FaultOp::Resize, Errno::ENOSPC));
    assert_eq!(write(&node, 1 << 20, &[2; 65536]).unwrap_err().kind(), ErrorKind::NoSpace);
    write(&node, 1 << 20, &[2; 65536]).unwrap();
    fault.arm(FaultRule::once(FaultOp::Read, Errno::EIO));
    assert!(read(&node, 0, 4096).is_err());
    rt::block_on(node.close()).unwrap();
    tool("qemu-img", &["check", "-q", "-f", "qcow2", &path]);
}

#[test]
fn images_stand_in_windows_and_in_other_images_too() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (inner, outer, window) = (path("inner"), path("outer"), path("window"));
    tool("qemu-img", &["create", "-q", "-f", "qcow2", &inner, "8M"]);
    // The image as the content of a larger one, and behind a megabyte of something else.
    tool("qemu-img", &["convert", "-q", "-f", "raw", "-O", "qcow2", &inner, &outer]);
    tool("qemu-img", &["resize", "-q", "-f", "qcow2", &outer, "32M"]);
    std::fs::write(&window, [vec![0x55; 1 << 20], std::fs::read(&inner).unwrap()].concat()).unwrap();
    for options in [
        format!("driver=qcow2,file.driver=qcow2,file.file.filename={outer}"),
        format!("driver=qcow2,file.driver=raw,file.offset=1M,file.file.filename={window}"),
    ] {
        let node = open_opts(&options);
        assert_eq!(node.size(), 8 << 20, "{options}");
        write(&node, 1 << 20, &[7; 1 << 20]).unwrap();
        rt::block_on(node.close()).unwrap();
        let node = open_opts(&options);
        assert_eq!(read(&node, 1 << 20, 1 << 20).unwrap(), vec![7; 1 << 20], "{options}");
        rt::block_on(node.close()).unwrap();
    }
    assert_eq!(std::fs::read(&window).unwrap()[..1 << 20], vec![0x55; 1 << 20]);
    tool("qemu-img", &["check", "-q", "-f", "qcow2", &outer]);
    let nested = format!("driver=qcow2,file.driver=qcow2,file.file.driver=file,file.file.filename={outer}");
    tool("qemu-img", &["check", "-q", "--image-opts", &nested]);
    // A window of a fixed length gets full.
    std::fs::File::options().write(true).open(&window).unwrap().set_len(4 << 20).unwrap();
    let fixed =
        open_opts(&format!("driver=qcow2,file.driver=raw,file.offset=1M,file.size=3M,file.file.filename={window}"));
    assert_eq!(write(&fixed, 4 << 20, &[8; 2 << 20]).unwrap_err().kind(), ErrorKind::NoSpace);
    let _ = rt::block_on(fixed.close());
}

#[test]
fn detect_zeroes_turns_writes_into_holes() {
    for (settings, holes) in [
        ("detect-zeroes=unmap,discard=unmap", true),
        ("detect-zeroes=on,discard=unmap", false),
        ("detect-zeroes=off,discard=unmap", false),
    ] {
        let (_folder, path) = disk(&[1; 1 << 20]);
        let before = std::fs::metadata(&path).unwrap().blocks();
        let node = open_opts(&format!("driver=raw,file.filename={path},{settings}"));
        write(&node, 0, &[0; 1 << 20]).unwrap();
        rt::block_on(node.close()).unwrap();
        assert!(std::fs::read(&path).unwrap().iter().all(|&byte| byte == 0), "{settings}");
        assert_eq!(std::fs::metadata(&path).unwrap().blocks() < before, holes, "{settings}");
    }
}

#[test]
fn discard_ignore_keeps_space_and_bytes() {
    for (settings, kept) in [("discard=ignore", true), ("discard=unmap", false), ("cache.direct=off", false)] {
        let (_folder, path) = disk(&[1; 1 << 20]);
        let node = open_opts(&format!("driver=raw,file.filename={path},{settings}"));
        rt::block_on(node.discard(0, 1 << 20)).unwrap();
        assert_eq!(read(&node, 5000, 1).unwrap()[0] == 1, kept, "{settings}");
        rt::block_on(node.write_zeroes(0, 4096, ZeroFlags { may_unmap: true, no_fallback: false })).unwrap();
        assert_eq!(read(&node, 4095, 1).unwrap(), [0]);
        rt::block_on(node.close()).unwrap();
    }
}

#[test]
fn a_raw_disk_grows_and_shrinks() {
    let (_folder, path) = disk(&[1; 8192]);
    let node = open_opts(&format!("driver=raw,file.filename={path}"));
    rt::block_on(node.resize(1 << 20, Preallocation::Off)).unwrap();
    assert_eq!((node.size(), std::fs::metadata(&path).unwrap().len()), (1 << 20, 1 << 20));
    assert_eq!(read(&node, 8191, 2).unwrap(), [1, 0]);
    rt::block_on(node.resize(2 << 20, Preallocation::Full)).unwrap();
    assert!(std::fs::metadata(&path).unwrap().blocks() * 512 >= 1 << 20);
    rt::block_on(node.resize(3 << 20, Preallocation::Falloc)).unwrap();
    assert!(std::fs::metadata(&path).unwrap().blocks() * 512 >= 2 << 20);
    assert!(rt::block_on(node.resize(4 << 20, Preallocation::Metadata)).is_err());
    assert!(rt::block_on(node.resize(4096, Preallocation::Full)).is_err());
    rt::block_on(node.resize(4096, Preallocation::Off)).unwrap();
    assert_eq!((node.size(), std::fs::metadata(&path).unwrap().len()), (4096, 4096));
    assert!(rt::block_on(node.resize(u64::MAX, Preallocation::Off)).is_err());
    rt::block_on(node.resize(4097, Preallocation::Off)).unwrap();
    assert_eq!(node.size(), 4608);
    rt::block_on(node.close()).unwrap();
}

#[test]
fn holes_show_in_the_status_of_a_raw_disk() {
    let (_folder, path) = disk(&[]);
    let node = open_opts(&format!("driver=raw,file.filename={path}"));
    rt::block_on(node.resize(3 << 20, Preallocation::Off)).unwrap();
    write(&node, 1 << 20, &[1; 1 << 20]).unwrap();
    let runs = rt::block_on(node.block_status(0, 3 << 20, 16)).unwrap();
    let short: Vec<_> =
        runs.iter().map(|run| (run.start >> 20, run.len >> 20, run.data, run.zero, run.present)).collect();
    assert_eq!(short, [(0, 1, false, true, true), (1, 1, true, false, true), (2, 1, false, true, true)]);
    assert_eq!(rt::block_on(node.block_status(0, 3 << 20, 1)).unwrap().len(), 1);
    rt::block_on(node.close()).unwrap();
}

#[test]
fn every_cache_mode_reads_and_writes() {
    for mode in cowshed_image::open::CACHE_MODES {
        let (_folder, path) = disk(&[1; 10000]);
        let request = OpenRequest::file(&path).format("raw").writable(true).cache(mode).unwrap();
        let node = rt::block_on(open(request)).unwrap();
        assert_eq!(node.is_writethrough(), matches!(*mode, "writethrough" | "directsync"));
        write(&node, 4095, b"abc").unwrap();
        assert_eq!(read(&node, 4094, 5).unwrap(), b"\x01abc\x01", "{mode}");
        rt::block_on(node.close()).unwrap();
    }
}
