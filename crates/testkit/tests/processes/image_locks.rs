// SPDX-License-Identifier: Apache-2.0 OR MIT
//! File locks against a running qemu-io: each of us refuses a use that the other's writing would spoil.

use cowshed_image::{OpenRequest, open};
use cowshed_storage::rt;
use cowshed_types::ErrorKind;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};

use cowshed_testkit::held::locked_bytes;

/// A qemu-io that holds an image open until it is dropped.
struct Holder(Child);

impl Holder {
    fn new(format: &str, flags: &[&str], path: &str) -> Holder {
        let mut child = Command::new("qemu-io")
            .args(flags)
            .args(["-f", format, path])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("qemu-io must be installed");
        // It answers a command only when the image is open.
        child.stdin.as_mut().unwrap().write_all(b"length\n").unwrap();
        let mut line = String::new();
        let mut out = BufReader::new(child.stdout.as_mut().unwrap());
        while !line.contains("MiB") {
            line.clear();
            assert_ne!(out.read_line(&mut line).unwrap(), 0, "qemu-io did not open {path}");
        }
        Holder(child)
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

fn qemu_io(flags: &[&str], path: &str) -> bool {
    let output =
        Command::new("qemu-io").args(flags).args(["-c", "length", path]).output().expect("qemu-io must be installed");
    output.status.success() && String::from_utf8_lossy(&output.stdout).contains("MiB")
}

fn disk() -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("disk.raw").to_str().unwrap().to_owned();
    std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    (folder, path)
}

fn request(path: &str) -> OpenRequest {
    OpenRequest::file(path).format("raw")
}

#[test]
fn a_writing_qemu_refuses_us() {
    let (_folder, path) = disk();
    let holder = Holder::new("raw", &[], &path);
    for writable in [false, true] {
        let error = rt::block_on(open(request(&path).writable(writable))).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
        assert!(error.to_string().contains(&path) && error.to_string().contains("write"), "{error}");
    }
    rt::block_on(open(request(&path).force_share(true))).expect("-U reads anyway");
    rt::block_on(open(request(&path).no_io())).expect("info needs no quiet raw image");
    let opts = format!("driver=raw,file.filename={path},file.locking=off");
    rt::block_on(open(OpenRequest::image_opts(&opts).unwrap())).expect("locking=off takes no lock");
    drop(holder);
    rt::block_on(open(request(&path).writable(true))).expect("the lock is gone with its holder");
}

#[test]
fn qcow2_metadata_is_not_read_under_a_writer() {
    let (folder, _) = disk();
    let path = folder.path().join("disk.qcow2").to_str().unwrap().to_owned();
    let args = ["create", "-q", "-f", "qcow2", &path, "1M"];
    assert!(Command::new("qemu-img").args(args).status().expect("qemu-img must be installed").success());
    let _holder = Holder::new("qcow2", &[], &path);
    for format in [None, Some("qcow2")] {
        let error = rt::block_on(open(OpenRequest::file(&path).format(format).no_io())).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    }
    rt::block_on(open(OpenRequest::file(&path).force_share(true))).expect("-U reads anyway");
}

#[test]
fn readers_share() {
    let (_folder, path) = disk();
    let _holder = Holder::new("raw", &["-r"], &path);
    let node = rt::block_on(open(request(&path))).unwrap();
    assert!(qemu_io(&["-r", "-f", "raw"], &path));
    rt::block_on(node.close()).unwrap();
}

#[test]
fn we_refuse_a_writing_qemu() {
    let (_folder, path) = disk();
    for writable in [false, true] {
        let node = rt::block_on(open(request(&path).writable(writable))).unwrap();
        assert!(!qemu_io(&["-f", "raw"], &path), "qemu wrote beside us (writable: {writable})");
        rt::block_on(node.close()).unwrap();
        assert!(qemu_io(&["-f", "raw"], &path), "the lock outlived its node");
    }
    let node = rt::block_on(open(request(&path).writable(true))).unwrap();
    drop(node);
    assert!(qemu_io(&["-f", "raw"], &path), "the lock outlived a dropped node");
}

#[test]
fn we_refuse_ourselves() {
    let (_folder, path) = disk();
    let node = rt::block_on(open(request(&path).writable(true))).unwrap();
    for second in [request(&path), request(&path).writable(true)] {
        assert_eq!(rt::block_on(open(second)).unwrap_err().kind(), ErrorKind::Busy);
    }
    rt::block_on(open(request(&path).force_share(true))).unwrap();
    rt::block_on(node.close()).unwrap();
    rt::block_on(open(request(&path))).unwrap();
}

#[test]
fn force_share_and_writing_exclude_each_other() {
    let (_folder, path) = disk();
    let error = rt::block_on(open(request(&path).writable(true).force_share(true))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
}

/// Byte for byte: a raw image is locked by its user's operations, qcow2 also against those of others.
#[test]
fn our_locks_are_those_of_qemu() {
    let (folder, raw) = disk();
    let qcow2 = folder.path().join("disk.qcow2").to_str().unwrap().to_owned();
    let made = Command::new("qemu-img").args(["create", "-q", "-f", "qcow2", &qcow2, "1M"]).status();
    assert!(made.expect("qemu-img must be installed").success());
    for (format, path) in [("raw", &raw), ("qcow2", &qcow2)] {
        for (writable, flags) in [(false, &["-r"][..]), (true, &[])] {
            let theirs = {
                let holder = Holder::new(format, flags, path);
                locked_bytes(holder.0.id(), path)
            };
            assert!(!theirs.is_empty(), "qemu-io holds no lock");
            // Also where the probe opens the file before the format is known.
            for request in [OpenRequest::file(path).format(format), OpenRequest::file(path)] {
                let node = rt::block_on(open(request.sharing_raw().writable(writable))).unwrap();
                assert_eq!(locked_bytes(std::process::id(), path), theirs, "{format}, writable: {writable}");
                rt::block_on(node.close()).unwrap();
            }
        }
    }
    let mine = |request: OpenRequest| {
        let node = rt::block_on(open(request)).unwrap();
        let bytes = locked_bytes(std::process::id(), &raw);
        rt::block_on(node.close()).unwrap();
        bytes
    };
    assert_eq!(mine(request(&raw).sharing_raw().for_resize().writable(true)), [100, 101, 103], "qemu-img resize");
    assert!(mine(request(&raw).no_io()).is_empty(), "qemu-img info");
    assert_eq!(mine(request(&raw)), [100, 201, 203], "the source of qemu-img convert");
}
