// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The fault filter, and the generic settings of a node.

use cowshed_block::{Errno, ErrorKind};
use cowshed_image::filters::{FaultOp, FaultRule};
use cowshed_image::{Node, OpenRequest, Preallocation, ZeroFlags, open};
use cowshed_storage::{IoBuf, rt};
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

fn write(node: &Node, offset: u64, bytes: &[u8]) -> cowshed_block::Result<()> {
    rt::block_on(node.write(offset, IoBuf::copy_from(bytes))).0
}

fn read(node: &Node, offset: u64, len: usize) -> cowshed_block::Result<Vec<u8>> {
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
