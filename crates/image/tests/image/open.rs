// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Opening: names, option trees, probing, chains, and refusals.

use cowshed_image::graph::Graph;
use cowshed_image::open::{FileKind, Files, HostFiles, Policy};
use cowshed_image::options::BlockdevOptions;
use cowshed_image::{Node, OpenRequest, ZeroFlags, open};
use cowshed_storage::{File, IoBuf, OpenOptions, rt};
use cowshed_testkit::programs::run;
use cowshed_types::{Errno, Error, ErrorKind, Result};
use serde_json::json;
use std::path::Path;
use std::sync::Arc;

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn path(folder: &tempfile::TempDir, name: &str) -> String {
    folder.path().join(name).to_str().unwrap().to_owned()
}

fn raw_file(folder: &tempfile::TempDir, name: &str, bytes: &[u8]) -> String {
    let path = path(folder, name);
    std::fs::write(&path, bytes).unwrap();
    path
}

fn open_now(request: OpenRequest) -> Result<Arc<Node>> {
    rt::block_on(open(request))
}

fn refused(request: OpenRequest) -> String {
    match open_now(request) {
        Ok(node) => panic!("{node:?} was opened"),
        Err(error) => error.to_string(),
    }
}

fn read(node: &Node, offset: u64, len: usize) -> Vec<u8> {
    let (result, buf) = rt::block_on(node.read(offset, IoBuf::zeroed(len)));
    result.unwrap();
    buf.to_vec()
}

fn write(node: &Node, offset: u64, bytes: &[u8]) -> Result<()> {
    rt::block_on(node.write(offset, IoBuf::copy_from(bytes))).0
}

#[test]
fn a_raw_file_is_read_and_written() {
    let folder = folder();
    let name = raw_file(&folder, "disk.raw", &[1; 8192]);
    let node = open_now(OpenRequest::file(&name).format("raw").writable(true)).unwrap();
    assert_eq!((node.driver_name(), node.size(), node.is_read_only()), ("raw", 8192, false));
    assert_eq!(node.filename(), name);
    write(&node, 100, b"hello").unwrap();
    assert_eq!(read(&node, 99, 7), b"\x01hello\x01");
    rt::block_on(node.write_zeroes(4096, 4096, ZeroFlags { may_unmap: true, no_fallback: false })).unwrap();
    assert_eq!(read(&node, 4095, 3), [1, 0, 0]);
    rt::block_on(node.close()).unwrap();
    assert_eq!(std::fs::read(&name).unwrap()[98..106], *b"\x01\x01hello\x01");
    assert_eq!(write(&node, 0, b"x").unwrap_err().kind(), ErrorKind::InvalidArgument);
}

#[test]
fn requests_past_the_end_and_read_only_writes_fail() {
    let folder = folder();
    let name = raw_file(&folder, "disk.raw", &[1; 8192]);
    let node = open_now(OpenRequest::file(&name).format("raw")).unwrap();
    for (offset, len) in [(8192, 1), (0, 8193), (u64::MAX, 2), (u64::MAX - 100, 200)] {
        let (result, buf) = rt::block_on(node.read(offset, IoBuf::zeroed(len)));
        assert_eq!(result.unwrap_err().kind(), ErrorKind::InvalidArgument);
        assert_eq!(buf.len(), len);
    }
    assert!(rt::block_on(node.read(8192, IoBuf::zeroed(0))).0.is_ok());
    let error = write(&node, 0, b"x").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ReadOnly);
    assert!(error.to_string().contains(&name), "{error}");
    assert_eq!(rt::block_on(node.discard(0, 512)).unwrap_err().kind(), ErrorKind::ReadOnly);
}

#[test]
fn an_odd_tail_is_rounded_up_as_qemu_does() {
    let folder = folder();
    let name = raw_file(&folder, "odd.raw", &[7; 1000]);
    let node = open_now(OpenRequest::file(&name).format("raw").writable(true)).unwrap();
    assert_eq!(node.size(), 1024);
    assert_eq!(read(&node, 990, 34), [[7; 10].as_slice(), &[0; 24]].concat());
    write(&node, 1020, b"tail").unwrap();
    rt::block_on(node.close()).unwrap();
    assert_eq!(std::fs::metadata(&name).unwrap().len(), 1024);
}

#[test]
fn a_raw_window_moves_and_bounds_every_request() {
    let folder = folder();
    let bytes: Vec<u8> = (0..16384u32).map(|n| (n / 512) as u8).collect();
    let name = raw_file(&folder, "disk.raw", &bytes);
    let opts = format!("driver=raw,file.driver=file,file.filename={name},offset=1k,size=2k");
    let node = open_now(OpenRequest::image_opts(&opts).unwrap().writable(true)).unwrap();
    assert_eq!(node.size(), 2048);
    assert_eq!(read(&node, 0, 2048), bytes[1024..3072]);
    write(&node, 2047, b"x").unwrap();
    assert!(write(&node, 2047, b"xy").is_err());
    let runs = rt::block_on(node.block_status(512, 1536, 10)).unwrap();
    assert_eq!((runs[0].start, runs[0].len, runs[0].offset), (512, 1536, Some(1536)));
    assert!(node.filename().starts_with("json:{"), "{}", node.filename());
    let again = BlockdevOptions::from_json_name(&node.filename()).unwrap().unwrap();
    rt::block_on(node.close()).unwrap();
    let node = open_now(OpenRequest::options(again)).unwrap();
    assert_eq!(read(&node, 2047, 1), b"x");
    for window in ["offset=17k", "offset=16k,size=512", "size=16896", "offset=1,size=16384"] {
        let opts = format!("driver=raw,file.filename={name},{window}");
        assert!(refused(OpenRequest::image_opts(&opts).unwrap()).contains("past the end"));
    }
    let opts = format!("driver=raw,file.filename={name},size=513");
    assert!(refused(OpenRequest::image_opts(&opts).unwrap()).contains("not multiple of 512"));
}

#[test]
fn wrong_options_are_named_with_their_path() {
    let folder = folder();
    let name = raw_file(&folder, "disk.raw", &[0; 4096]);
    for (opts, parts) in [
        ("driver=raw,file.filename=F,file.foo=1", ["'file.foo'", "'file'"]),
        ("driver=raw,file.filename=F,bar=1", ["'bar'", "'raw'"]),
        ("driver=raw,file.filename=F,file.aio=fast", ["'file.aio'", "threads, native, io_uring"]),
        ("driver=raw,file.filename=F,offset=12Q", ["'offset'", "a non-negative number below 2^64"]),
        ("driver=raw,file.filename=F,read-only=maybe", ["'read-only'", "expects 'on' or 'off'"]),
        ("driver=raw,file.filename=F,cache.direct=2", ["'cache.direct'", "expects 'on' or 'off'"]),
        ("driver=raw,file.filename=F,cache.foo=on", ["'cache.foo'", "does not support"]),
        ("driver=raw", ["'file'", "'raw'"]),
        ("driver=file", ["'filename'", "'file'"]),
        ("driver=qcow2,file.filename=F,overlap-check.template=some", ["'overlap-check.template'", "none, constant"]),
        ("driver=floppy,file.filename=F", ["Unknown driver 'floppy'", "qcow2"]),
        ("driver=bochs,file.filename=F", ["no image of Bochs", "magic"]),
        ("read-only=on", ["'driver'", "'file'"]),
        ("driver=raw,file=nobody", ["'file'", "no node 'nobody'"]),
        ("driver=raw,file.filename=F,node-name=1x", ["node-name", "'1x'"]),
        ("driver=raw,file.filename=F,detect-zeroes=unmap,discard=ignore", ["detect-zeroes=unmap", "discard=unmap"]),
        ("driver=fault,file.driver=raw,file.file.filename=F,rules.0.op=seek", ["'rules.0.op'", "read, write"]),
        ("driver=fault,file.driver=raw,file.file.filename=F,rules.0.errno=5", ["'rules.0.op'", "missing"]),
    ] {
        let error = refused(OpenRequest::image_opts(&opts.replace('F', &name)).unwrap());
        for part in parts {
            assert!(error.contains(part), "{opts}: {error}");
        }
    }
}

#[test]
fn json_names_and_trees_open_the_same() {
    let folder = folder();
    let name = raw_file(&folder, "disk.raw", &[3; 4096]);
    let tree = json!({"driver": "raw", "file": {"driver": "file", "filename": name, "locking": "off"}});
    let dotted = json!({"driver": "raw", "file.filename": name});
    let protocol = json!({"driver": "file", "filename": name});
    for tree in [&tree, &dotted] {
        let node = open_now(OpenRequest::file(format!("json:{tree}"))).unwrap();
        assert_eq!((node.driver_name(), node.filename()), ("raw", name.clone()));
    }
    // As in QEMU the format counts more than the driver in the name.
    let error = refused(OpenRequest::file(format!("json:{protocol}")).format("raw"));
    assert!(error.contains("driver 'raw' needs the option 'file'"), "{error}");
    let node = open_now(OpenRequest::file(format!("json:{protocol}"))).unwrap();
    assert_eq!(node.driver_name(), "file");
    assert_eq!(read(&node, 0, 1), [3]);
    let node = open_now(OpenRequest::file(&name).format("file")).unwrap();
    assert_eq!(node.driver_name(), "file");
    assert!(refused(OpenRequest::file(format!("json:{tree}")).format("qcow2")).contains("not in qcow2 format"));
    assert_eq!(open_now(OpenRequest::file(format!("file:{name}"))).unwrap().filename(), name);
}

#[test]
fn what_is_no_image_is_refused_by_name() {
    let folder = folder();
    let directory = folder.path().to_str().unwrap();
    assert!(refused(OpenRequest::file(directory)).contains("regular file"));
    let error = open_now(OpenRequest::file(path(&folder, "none.qcow2"))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.to_string().contains("none.qcow2"), "{error}");
    assert!(refused(OpenRequest::file("ssh:host/disk")).contains("'ssh'"));
    let name = raw_file(&folder, "disk.raw", &[0; 4096]);
    assert!(refused(OpenRequest::file(&name).format("qcow2")).contains("not in qcow2 format"));
    for (format, bytes, word) in [
        ("bochs", &b"Bochs Virtual HD Image"[..], "images of Bochs"),
        ("cloop", b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop", "block_size"),
    ] {
        let mut content = bytes.to_vec();
        content.resize(65536, 0);
        let name = raw_file(&folder, format, &content);
        let error = refused(OpenRequest::file(&name));
        assert!(error.contains(word), "{error}");
    }
    // The mark of a disk image of Apple's is at its end, wherever that is.
    for len in [0, 512, 19544] {
        let mut content = vec![0; len];
        content.extend_from_slice(b"koly\0\0\0\x04\0\0\x02\0");
        content.resize(len + 512, 0);
        let name = raw_file(&folder, "disk.dmg", &content);
        let error = refused(OpenRequest::file(&name));
        assert!(error.contains("property list"), "{error}");
        assert_eq!(open_now(OpenRequest::file(&name).format("raw")).unwrap().driver_name(), "raw");
    }
    let sparse = raw_file(&folder, "sesparse", &[b"\xbe\xba\xfe\xca\0\0\0\0".as_slice(), &[0; 65536]].concat());
    assert!(refused(OpenRequest::file(&sparse)).contains("seSparse"));
    let empty = raw_file(&folder, "empty", b"");
    assert_eq!(open_now(OpenRequest::file(&empty)).unwrap().size(), 0);
}

#[test]
fn a_guessed_raw_disk_keeps_its_ends_raw() {
    let folder = folder();
    let name = raw_file(&folder, "disk.raw", &[0; 65536]);
    let node = open_now(OpenRequest::file(&name).writable(true)).unwrap();
    assert!(node.is_probed_raw());
    assert!(node.warnings()[0].contains("guessed to be raw"), "{:?}", node.warnings());
    let error = write(&node, 0, b"QFI\xfb\0\0\0\x03").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PermissionDenied);
    assert!(error.to_string().contains("qcow2"), "{error}");
    // In two steps, too.
    write(&node, 4, b"\0\0\0\x03").unwrap();
    assert!(write(&node, 0, b"QFI\xfb").is_err());
    write(&node, 0, b"boot").unwrap();
    write(&node, 65530, b"QFI\xfb").unwrap();
    // A write that ends with a mark is refused too, in one step or in two.
    write(&node, 65536 - 512 + 8, b"\0\0\x02\0").unwrap();
    let error = write(&node, 65536 - 512, b"koly").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PermissionDenied);
    assert!(error.to_string().contains("dmg"), "{error}");
    let mut footer = [0; 512];
    footer[..8].copy_from_slice(b"conectix");
    footer[12..16].copy_from_slice(&[0, 1, 0, 0]);
    footer[63] = 2;
    let error = write(&node, 65536 - 512, &footer).unwrap_err();
    assert!(error.to_string().contains("vpc"), "{error}");
    assert!(write(&node, 65536 - 4096, &[[0; 3584].as_slice(), &footer].concat()).is_err());
    rt::block_on(node.close()).unwrap();
    // With an explicit format raw, any content may be written.
    let node = open_now(OpenRequest::file(&name).format("raw").writable(true)).unwrap();
    assert!(node.warnings().is_empty());
    write(&node, 0, b"QFI\xfb\0\0\0\x03").unwrap();
}

#[test]
fn loops_and_missing_backing_files_are_named() {
    let folder = folder();
    let create =
        |args: &[&str]| run("qemu-img", folder.path(), &[&["create", "-q", "-u", "-f", "qcow2"], args].concat());
    create(&["-F", "qcow2", "-b", "self.qcow2", "moved.qcow2", "1M"]);
    std::fs::rename(path(&folder, "moved.qcow2"), path(&folder, "self.qcow2")).unwrap();
    create(&["-F", "qcow2", "-b", "two.qcow2", "one.qcow2", "1M"]);
    create(&["-F", "qcow2", "-b", "./one.qcow2", "two.qcow2", "1M"]);
    create(&["-F", "raw", "-b", "none.raw", "lost.qcow2", "1M"]);
    create(&["-F", "qcow2", "-b", "lost.qcow2", "top.qcow2", "1M"]);
    raw_file(&folder, "base.raw", &[0; 65536]);
    create(&["-F", "qcow2", "-b", "base.raw", "mismatch.qcow2", "1M"]);
    create(&["-F", "bochs", "-b", "base.raw", "later.qcow2", "1M"]);
    for (name, parts) in [
        ("self.qcow2", &["chain loops", "self.qcow2"][..]),
        ("one.qcow2", &["chain loops", "one.qcow2", "two.qcow2"]),
        ("lost.qcow2", &["none.raw", "backing file of", "lost.qcow2", "No such file"]),
        ("top.qcow2", &["none.raw", "lost.qcow2", "top.qcow2", "No such file"]),
        ("mismatch.qcow2", &["base.raw", "not in qcow2 format", "mismatch.qcow2"]),
        ("later.qcow2", &["no image of Bochs", "later.qcow2"]),
    ] {
        let error = refused(OpenRequest::file(path(&folder, name)));
        for part in parts {
            assert!(error.contains(part), "{name}: {error}");
        }
    }
}

#[test]
fn the_policy_says_what_an_image_may_name() {
    let folder = folder();
    raw_file(&folder, "base.raw", &[0; 1 << 20]);
    let create = |args: &[&str]| run("qemu-img", folder.path(), &[&["create", "-q", "-f", "qcow2"], args].concat());
    create(&["-F", "raw", "-b", "base.raw", "top.qcow2"]);
    create(&["-o", "data_file=data.raw", "data.qcow2", "1M"]);
    create(&["-u", "-F", "raw", "-b", r#"json:{"driver":"file","filename":"/dev/null"}"#, "json.qcow2", "1M"]);
    create(&["-u", "-F", "raw", "-b", r#"json:{"driver":"raw","file":"store"}"#, "node.qcow2", "1M"]);
    let error = refused(OpenRequest::file(path(&folder, "node.qcow2")));
    assert!(error.contains("a node of the graph"), "{error}");
    for name in ["top.qcow2", "data.qcow2", "json.qcow2"] {
        let error = open_now(OpenRequest::file(path(&folder, name)).policy(Policy::untrusted())).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PermissionDenied);
        assert!(error.to_string().contains("policy"), "{error}");
    }
    let policy = Policy { allow_json: false, ..Policy::default() };
    assert!(refused(OpenRequest::file(path(&folder, "json.qcow2")).policy(policy)).contains("policy"));
    let policy = Policy { max_chain_depth: 1, ..Policy::default() };
    let error = open_now(OpenRequest::file(path(&folder, "top.qcow2")).policy(policy)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Limit);
}

#[test]
fn null_disks_read_zeroes_and_forget_writes() {
    let node =
        open_now(OpenRequest::image_opts("driver=null-co,size=1M,read-zeroes=on").unwrap().writable(true)).unwrap();
    assert_eq!((node.driver_name(), node.size()), ("null-co", 1 << 20));
    write(&node, 0, b"gone").unwrap();
    assert_eq!(read(&node, 0, 4), [0; 4]);
    let runs = rt::block_on(node.block_status(0, 1 << 20, 4)).unwrap();
    assert!(runs.len() == 1 && runs[0].zero && runs[0].present && !runs[0].data);
    let node = open_now(OpenRequest::image_opts("driver=null-co,size=1M,read-zeroes=off").unwrap()).unwrap();
    assert_eq!(read(&node, 4096, 4096), [0; 4096], "old memory");
    let runs = rt::block_on(node.block_status(0, 1 << 20, 4)).unwrap();
    assert!(runs.len() == 1 && !runs[0].zero && !runs[0].present);
    let node = open_now(OpenRequest::file("null-co://").format("raw")).unwrap();
    assert_eq!((node.driver_name(), node.size()), ("raw", 1 << 30));
}

#[test]
fn nodes_have_unique_names_and_are_found_by_them() {
    let folder = folder();
    let name = raw_file(&folder, "disk.raw", &[5; 4096]);
    let graph = Graph::new(&cowshed_image::DRIVERS);
    let open_in = |opts: &str| open_now(OpenRequest::image_opts(opts).unwrap().graph(Arc::clone(&graph)));
    let node = open_in(&format!("driver=raw,node-name=disk,file.node-name=store,file.filename={name}")).unwrap();
    assert!(Arc::ptr_eq(&graph.find("disk").unwrap(), &node));
    assert_eq!(graph.find("store").unwrap().driver_name(), "file");
    assert!(
        open_in(&format!("driver=raw,node-name=disk,file.filename={name}")).unwrap_err().to_string().contains("'disk'")
    );
    // A second user by name: readers share a node.
    let window = open_in("driver=raw,file=store,offset=1k").unwrap();
    assert_eq!((window.size(), window.name().starts_with("#block")), (3072, true));
    let snapshot = graph.snapshot();
    rt::block_on(window.close()).unwrap();
    assert_eq!(read(&node, 0, 1), [5]);
    rt::block_on(node.close()).unwrap();
    assert!(graph.find("disk").is_none() && graph.find("store").is_none());
    assert!(snapshot.find("disk").is_some(), "a snapshot doesn't change");
    assert!(open_in(&format!("driver=raw,node-name=disk,file.filename={name}")).is_ok());
}

#[test]
fn a_writer_and_another_user_of_one_node_conflict() {
    let folder = folder();
    let name = raw_file(&folder, "disk.raw", &[5; 4096]);
    let graph = Graph::new(&cowshed_image::DRIVERS);
    let opts = format!("driver=raw,file.node-name=store,file.filename={name}");
    let node = open_now(OpenRequest::image_opts(&opts).unwrap().writable(true).graph(Arc::clone(&graph))).unwrap();
    let second = || OpenRequest::image_opts("driver=raw,file=store").unwrap().graph(Arc::clone(&graph));
    let error = open_now(second()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(error.to_string().contains("'store'"), "{error}");
    let error = open_now(second().writable(true)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    rt::block_on(node.close()).unwrap();
}

/// Files of a read-only medium.
struct WriteProtected;

impl Files for WriteProtected {
    fn open(&self, path: &Path, options: &OpenOptions) -> Result<File> {
        if options.write {
            return Err(Error::os(Errno::EROFS, "could not open").file(path.to_string_lossy()));
        }
        File::open(path, options)
    }

    fn kind(&self, path: &Path) -> Option<FileKind> {
        HostFiles.kind(path)
    }
}

#[test]
fn unwritable_file_is_read_where_allowed() {
    let folder = folder();
    let name = raw_file(&folder, "disk.raw", &[5; 4096]);
    let request = |opts: &str| {
        let opts = format!("driver=raw,{opts}file.filename={name}");
        OpenRequest::image_opts(&opts).unwrap().writable(true).files(Arc::new(WriteProtected))
    };
    assert_eq!(open_now(request("")).unwrap_err().kind(), ErrorKind::ReadOnly);
    let node = open_now(request("auto-read-only=on,")).unwrap();
    assert!(node.is_read_only());
    assert_eq!(read(&node, 0, 1), [5]);
    assert_eq!(write(&node, 0, b"x").unwrap_err().kind(), ErrorKind::ReadOnly);
    let node = open_now(request("read-only=on,")).unwrap();
    assert!(node.is_read_only());
}

#[test]
fn lazy_refcounts_need_version_3() {
    const SENTENCE: &str = "Lazy refcounts require a qcow2 image with at least qemu 1.1 compatibility level";
    let folder = folder();
    run("qemu-img", folder.path(), &["create", "-q", "-f", "qcow2", "-o", "compat=0.10", "old.qcow2", "1M"]);
    run("qemu-img", folder.path(), &["create", "-q", "-f", "qcow2", "new.qcow2", "1M"]);
    let request = |name: &str, lazy: &str, writable: bool| {
        let options = format!("driver=qcow2,lazy-refcounts={lazy},file.filename={}", path(&folder, name));
        OpenRequest::image_opts(&options).unwrap().writable(writable)
    };
    for writable in [false, true] {
        let error = open_now(request("old.qcow2", "on", writable)).unwrap_err();
        assert_eq!(error.sentence(), SENTENCE);
        for (name, lazy) in [("old.qcow2", "off"), ("new.qcow2", "on")] {
            rt::block_on(open_now(request(name, lazy, writable)).unwrap().close()).unwrap();
        }
    }
}
