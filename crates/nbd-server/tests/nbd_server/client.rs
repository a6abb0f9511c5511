// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The driver `nbd`: against qemu-nbd, nbdkit and our own server.

use crate::served::foreign::Foreign;
use crate::served::{Served, text, write_pattern};
use cowshed_image::options::BlockdevOptions;
use cowshed_image::{Node, OpenRequest, StatusExtent, ZeroFlags, open};
use cowshed_nbd::{ClientOptions, list_exports};
use cowshed_nbd_server::ServerConfig;
use cowshed_storage::{IoBuf, SocketAddress, rt};
use cowshed_testkit::programs::tool;
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_types::ErrorKind;
use std::sync::Arc;

const SIZE: u64 = 8 << 20;

fn request(name: &str) -> OpenRequest {
    OpenRequest::file(name).format("raw").writable(true).discard(true)
}

async fn read(node: &Arc<Node>, offset: u64, len: usize) -> Vec<u8> {
    let (result, buf) = node.read(offset, IoBuf::scratch(len)).await;
    result.expect("read");
    buf.to_vec()
}

async fn write(node: &Arc<Node>, offset: u64, bytes: &[u8]) {
    node.write(offset, IoBuf::copy_from(bytes)).await.0.expect("write");
}

/// Everything that a driver does, on a disk with this content; changes the content along.
async fn exercise(node: &Arc<Node>, content: &mut Vec<u8>) {
    let size = content.len();
    assert_eq!(node.size(), size as u64);
    assert!(read(node, 0, size).await == *content, "the whole disk");
    assert!(read(node, 12_345, 70_001).await == content[12_345..12_345 + 70_001]);
    write(node, 777, &[7; 3001]).await;
    content[777..777 + 3001].fill(7);
    let large: Vec<u8> = (0..3 << 20).map(|i: u32| (i / 3) as u8).collect();
    write(node, 1 << 20, &large).await;
    content[1 << 20..4 << 20].copy_from_slice(&large);
    node.write_zeroes(2 << 20, 100_000, ZeroFlags::default()).await.expect("zeroes");
    content[2 << 20..(2 << 20) + 100_000].fill(0);
    node.write_zeroes(5 << 20, 1 << 20, ZeroFlags { may_unmap: true, no_fallback: false }).await.expect("unmap");
    content[5 << 20..6 << 20].fill(0);
    node.flush().await.expect("flush");
    // Many at a time.
    let tasks: Vec<_> = (0..64u64)
        .map(|i| {
            let node = Arc::clone(node);
            rt::spawn(async move {
                let offset = (6 << 20) + i * 5000;
                write(&node, offset, &[i as u8; 5000]).await;
                assert!(read(&node, offset, 5000).await == [i as u8; 5000]);
            })
        })
        .collect();
    for (i, task) in tasks.into_iter().enumerate() {
        task.await;
        content[(6 << 20) + i * 5000..][..5000].fill(i as u8);
    }
    assert!(read(node, 0, size).await == *content, "after writing");
    let past = node.read(size as u64 - 10, IoBuf::zeroed(11)).await.0.expect_err("past the end");
    assert_eq!(past.kind(), ErrorKind::InvalidArgument);
}

#[test]
fn a_disk_on_qemu_nbd_is_a_disk() {
    let dir = temp_dir();
    let (qemu, image) = (Qemu::system(), dir.path().join("disk.raw"));
    let mut content = write_pattern(&image, SIZE, 11);
    let server = Foreign::qemu_nbd(&qemu, &dir.path().join("socket"), &image, &["--shared=2"]);
    rt::block_on(async {
        let node = open(request(&server.uri())).await.expect("open");
        assert_eq!(node.driver_name(), "raw");
        exercise(&node, &mut content).await;
        let runs = node.block_status_chain(0, SIZE, 1000).await.expect("status");
        let zero =
            runs.iter().any(|run: &StatusExtent| run.zero && run.start <= 5 << 20 && run.start + run.len >= 6 << 20);
        assert!(zero, "the hole shows: {runs:?}");
        node.discard(6 << 20, 1 << 20).await.expect("discard");
        content.truncate(6 << 20);
        assert!(read(&node, 0, 6 << 20).await == content);
        node.close().await.expect("close");
    });
    drop(server);
    assert!(std::fs::read(&image).expect("read")[..6 << 20] == content, "it reached the file");
}

#[test]
fn a_disk_on_nbdkit_is_a_disk() {
    let dir = temp_dir();
    let socket = dir.path().join("socket");
    // Also without the commands that are no must, and in the old way.
    for arguments in [
        &["memory", "8M"][..],
        &["--filter=nozero", "--filter=noextents", "memory", "8M"],
        &["--mask-handshake=0", "memory", "8M"],
        &["--no-sr", "memory", "8M"],
        &[
            "--filter=blocksize-policy",
            "memory",
            "8M",
            "blocksize-minimum=4096",
            "blocksize-maximum=1M",
            "blocksize-error-policy=error",
        ],
    ] {
        let server = Foreign::nbdkit(&socket, arguments);
        let mut content = vec![0; SIZE as usize];
        rt::block_on(async {
            let node = open(request(&server.uri())).await.expect("open");
            exercise(&node, &mut content).await;
            node.close().await.expect("close");
        });
    }
}

/// nbdkit refuses flushes in the oldstyle protocol, so the disk is only read.
#[test]
fn a_disk_on_an_oldstyle_server_is_read() {
    let dir = temp_dir();
    let image = dir.path().join("disk.raw");
    let content = write_pattern(&image, SIZE, 12);
    let server = Foreign::nbdkit(&dir.path().join("socket"), &["--oldstyle", "-r", "file", text(&image)]);
    rt::block_on(async {
        let node = open(request(&server.uri()).writable(false)).await.expect("open");
        assert_eq!(node.size(), SIZE);
        assert!(read(&node, 0, SIZE as usize).await == content, "the whole disk");
        node.close().await.expect("close");
        let named = server.uri().replace("///", "///name");
        let error = open(request(&named).writable(false)).await.expect_err("it has one export without a name");
        assert_eq!(error.sentence(), "Server does not support non-empty export names");
        let address = SocketAddress::Unix(text(&server.socket).to_owned());
        let listed = list_exports(&ClientOptions::new(address, "")).await.expect("a list");
        let facts = listed[0].facts.as_ref().expect("its facts");
        assert_eq!((listed.len(), listed[0].name.as_str(), facts.size), (1, "", SIZE));
    });
}

#[test]
fn a_disk_on_our_own_server_is_a_disk() {
    let served = Served::start(ServerConfig { queues: 2, ..ServerConfig::default() });
    let image = served.path("disk.qcow2");
    Qemu::system().create(&image, "qcow2", "", SIZE);
    served.export(OpenRequest::file(text(&image)).writable(true).discard(true), |_| ());
    let mut content = vec![0; SIZE as usize];
    rt::block_on(async {
        let node = open(request(&served.uri(""))).await.expect("open");
        exercise(&node, &mut content).await;
        node.close().await.expect("close");
    });
    let dir = served.stop();
    Qemu::system().expect_clean(&image);
    assert!(Qemu::system().content(&image, "qcow2") == content);
    drop(dir);
}

#[test]
fn requests_come_from_several_threads_at_once() {
    let dir = temp_dir();
    let server = Foreign::nbdkit(&dir.path().join("socket"), &["memory", "8M"]);
    let node = rt::block_on(open(request(&server.uri()))).expect("open");
    std::thread::scope(|scope| {
        for thread in 0..4u8 {
            let node = &node;
            scope.spawn(move || {
                rt::block_on(async {
                    let tasks: Vec<_> = (0..50u64)
                        .map(|i| {
                            let node = Arc::clone(node);
                            rt::spawn(async move {
                                let offset = u64::from(thread) * (2 << 20) + i * 9000;
                                write(&node, offset, &[thread + 1; 9000]).await;
                                assert!(read(&node, offset, 9000).await == [thread + 1; 9000]);
                            })
                        })
                        .collect();
                    for task in tasks {
                        task.await;
                    }
                });
            });
        }
    });
    rt::block_on(node.close()).expect("close");
}

#[test]
fn images_and_backing_files_may_be_on_a_server() {
    let dir = temp_dir();
    let (raw, base, top) = (dir.path().join("base.raw"), dir.path().join("base.qcow2"), dir.path().join("top.qcow2"));
    let content = write_pattern(&raw, SIZE, 5);
    let qemu = Qemu::system();
    qemu.convert((&raw, "raw"), (&base, "qcow2"), &[]);
    // The file of a qcow2 image, as raw bytes.
    let server = Foreign::qemu_nbd(&qemu, &dir.path().join("socket"), &base, &["--shared=4"]);
    rt::block_on(async {
        let image =
            format!("driver=qcow2,file.driver=nbd,file.server.type=unix,file.server.path={}", server.socket.display());
        let node = open(OpenRequest::image_opts(&image).expect("options").writable(true)).await.expect("open");
        assert!(read(&node, 0, SIZE as usize).await == content);
        write(&node, 4096, b"changed in place").await;
        node.close().await.expect("close");
    });
    tool("qemu-img", &["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", &server.uri(), text(&top)]);
    rt::block_on(async {
        let node = open(OpenRequest::file(text(&top)).format("qcow2").writable(true)).await.expect("open the overlay");
        assert!(read(&node, 4096, 16).await == b"changed in place");
        assert!(read(&node, 1 << 20, 1 << 20).await == content[1 << 20..2 << 20]);
        write(&node, 100, b"overlay").await;
        node.close().await.expect("close");
    });
    drop(server);
    qemu.expect_clean(&base);
}

/// A line of qemu-img's for the same: start, length, data, zero, present.
type Shown = (u64, u64, bool, bool, bool);

fn shown_by_qemu(options: &str) -> Vec<Shown> {
    let map = Qemu::system().img(["map", "--output=json", "--image-opts", options]).expect_ok().json();
    let number = |run: &serde_json::Value, key: &str| run[key].as_u64().expect("a number");
    let flag = |run: &serde_json::Value, key: &str| run[key].as_bool().expect("a flag");
    let shown = |run: &serde_json::Value| {
        let (data, zero, present) = (flag(run, "data"), flag(run, "zero"), flag(run, "present"));
        (number(run, "start"), number(run, "length"), data, zero, present)
    };
    map.as_array().expect("runs").iter().map(shown).collect()
}

#[test]
fn a_map_shows_the_metadata_context_that_is_asked_for() {
    let dir = temp_dir();
    let qemu = Qemu::system();
    let (base, top) = (dir.path().join("base.qcow2"), dir.path().join("top.qcow2"));
    qemu.create(&base, "qcow2", "", SIZE);
    qemu.io_commands(&base, "qcow2", &["write -P 1 0 1M".to_owned()]).expect_ok();
    tool("qemu-img", &["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", text(&base), text(&top)]);
    tool("qemu-img", &["bitmap", "--add", "-g", "64k", text(&top), "b"]);
    tool("qemu-img", &["bitmap", "--add", "-g", "64k", text(&top), "clean"]);
    let writes = ["write -P 2 512k 64k", "write -P 3 3M 1M", "write -z 7M 128k", "write -P 0 7M 64k"];
    qemu.io_commands(&top, "qcow2", &writes.map(str::to_owned)).expect_ok();
    tool("qemu-img", &["bitmap", "--clear", text(&top), "clean"]);
    let socket = dir.path().join("socket");
    let all = ["-k", "SOCKET", "-t", "-r", "--shared=8", "-A", "-B", "b", "-B", "clean", "-f", "qcow2", text(&top)];
    let _server = Foreign::start("qemu-nbd", &socket, &all);
    let place = format!("server.type=unix,server.path={}", socket.display());
    let file_place = format!("file.{}", place.replace(",server", ",file.server"));
    for context in ["qemu:dirty-bitmap:b", "qemu:dirty-bitmap:clean", "qemu:allocation-depth", "base:allocation"] {
        for options in [
            format!("driver=nbd,{place},x-dirty-bitmap={context}"),
            format!("driver=raw,file.driver=nbd,{file_place},file.x-dirty-bitmap={context}"),
        ] {
            let expected = shown_by_qemu(&options);
            rt::block_on(async {
                let request = || OpenRequest::image_opts(&options).expect("options");
                let node = open(request().without_content()).await.expect("open");
                let runs = node.block_status_chain(0, SIZE, 100).await.expect("status");
                let found = runs.iter().map(|run| (run.start, run.len, run.data, run.zero, run.present));
                assert_eq!(found.collect::<Vec<Shown>>(), expected, "{options}");
                let first = node.block_status(100, 700, 1).await.expect("status");
                assert_eq!((first[0].start, first[0].len, first.len()), (100, 700, 1), "{options}");
                node.close().await.expect("close");
                // A reader of the content must not take the changed parts for absent.
                let node = open(request()).await.expect("open");
                let runs = node.block_status_chain(0, SIZE, 100).await.expect("status");
                let is_said = context == "base:allocation";
                assert_eq!(runs.iter().all(|run| run.data && !run.zero), !is_said, "{options}: {runs:?}");
                assert!(read(&node, 3 << 20, 1 << 20).await == vec![3; 1 << 20], "{options}");
                node.close().await.expect("close");
            });
        }
    }
    for wrong in ["qemu:dirty-bitmap:nope", "qemu:", "", "other:b"] {
        let request = OpenRequest::image_opts(&format!("driver=nbd,{place},x-dirty-bitmap={wrong}")).expect("options");
        let error = rt::block_on(open(request)).expect_err("no such context").to_string();
        assert!(error.contains(&format!("no metadata context '{wrong}'")), "{error}");
    }
}

#[test]
fn a_lost_server_is_waited_for() {
    let dir = temp_dir();
    let (qemu, image, socket) = (Qemu::system(), dir.path().join("disk.raw"), dir.path().join("socket"));
    let content = write_pattern(&image, SIZE, 2);
    let server = Foreign::qemu_nbd(&qemu, &socket, &image, &[]);
    let options = |delay: u32| {
        let text = format!("driver=nbd,server.type=unix,server.path={},reconnect-delay={delay}", socket.display());
        OpenRequest::image_opts(&text).expect("options").writable(true)
    };
    rt::block_on(async {
        let node = open(options(600)).await.expect("open");
        assert!(read(&node, 0, 4096).await == content[..4096]);
        drop(server);
        let reading = {
            let node = Arc::clone(&node);
            rt::spawn(async move { read(&node, 1 << 20, 1 << 20).await })
        };
        for _ in 0..10 {
            rt::yield_now().await;
        }
        let server = Foreign::qemu_nbd(&qemu, &socket, &image, &["--shared=2"]);
        assert!(reading.await == content[1 << 20..2 << 20], "the request outlived the server");
        write(&node, 0, b"on the second server").await;
        assert!(read(&node, 0, 20).await == b"on the second server");
        // A client that doesn't wait gets the error at once.
        let impatient = open(options(0)).await.expect("open");
        drop(server);
        let error = impatient.read(0, IoBuf::zeroed(512)).await.0.expect_err("no server");
        assert_eq!(error.errno().0, 5, "{error}");
        drop(impatient);
        let server = Foreign::qemu_nbd(&qemu, &socket, &image, &[]);
        node.close().await.expect("close");
        drop(server);
    });
}

#[test]
fn what_is_wrong_with_an_address_is_said() {
    let dir = temp_dir();
    let (qemu, image) = (Qemu::system(), dir.path().join("disk.raw"));
    write_pattern(&image, 1 << 20, 1);
    let server = Foreign::qemu_nbd(&qemu, &dir.path().join("socket"), &image, &["--read-only", "--shared=8"]);
    let failing = |request: OpenRequest| rt::block_on(open(request)).expect_err("must fail");
    let error = failing(request(&server.uri()));
    assert_eq!(error.kind(), ErrorKind::ReadOnly, "{error}");
    let error = failing(OpenRequest::file(server.uri().replace("///", "///other")).format("raw"));
    assert!(error.to_string().contains("no export 'other'"), "{error}");
    let missing = dir.path().join("missing");
    let error = failing(OpenRequest::file(format!("nbd+unix:///?socket={}", missing.display())));
    assert!(error.to_string().contains("missing") && error.kind() == ErrorKind::NotFound, "{error}");
    for (options, part) in [
        ("driver=nbd", "server.path"),
        ("driver=nbd,server.type=unix", "server.path"),
        ("driver=nbd,server.type=inet,server.path=/x", "'path'"),
        ("driver=nbd,server.type=inet,server.host=h,server.port=0", "'0'"),
        ("driver=nbd,server.host=h", "server.type"),
        ("driver=nbd,host=h,path=/x", "path and host may not be used at the same time"),
        ("driver=nbd,host=h,tls-creds=tls0", "'tls0'"),
        ("driver=nbd,host=h,colour=red", "'colour'"),
    ] {
        let error = match OpenRequest::image_opts(options) {
            Ok(request) => failing(request),
            Err(error) => error,
        };
        assert!(error.to_string().contains(part), "{options}: {error}");
    }
    let error = failing(OpenRequest::file("nbds://localhost/x"));
    assert!(error.to_string().contains("tls-certificates"), "{error}");
    assert!(BlockdevOptions::from_json_name("json:{}").is_some());
}
