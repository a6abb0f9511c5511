// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The locks of a node's file follow from the operations of its users, as in QEMU's storage daemon.

use super::beside_qemu::Theirs;
use super::running::{Client, Running};
use cowshed_testkit::held::locked_bytes;
use cowshed_testkit::qemu::Qemu;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A command, or the bytes that are locked then.
enum Step {
    Run(&'static str, Value),
    Locked(&'static [u64]),
}
use Step::{Locked, Run};

fn add(options: Value) -> Step {
    Run("blockdev-add", options)
}

fn file() -> Value {
    json!({"driver": "file", "filename": "a.raw"})
}

fn raw() -> Step {
    add(json!({"driver": "raw", "node-name": "r", "file": file()}))
}

fn export(id: &str, node: &str, writable: bool) -> Step {
    Run("block-export-add", json!({"type": "nbd", "id": id, "name": id, "node-name": node, "writable": writable}))
}

fn unexport(id: &str) -> Step {
    Run("block-export-del", json!({"id": id}))
}

const NONE: &[u64] = &[];
const READ: &[u64] = &[100, 203];
const WRITE: &[u64] = &[100, 101, 203];

/// The steps of QEMU 7.2 and QEMU 11.1.
fn cases() -> Vec<(&'static str, Vec<Step>)> {
    let filter = |driver: &str| add(json!({"driver": driver, "node-name": "f", "file": "r", "throttle-group": "g"}));
    let luks = json!({"driver": "file", "filename": "a.luks"});
    let group = Run("object-add", json!({"qom-type": "throttle-group", "id": "g"}));
    let with = |key: &str| {
        let mut options = json!({"driver": "raw", "node-name": "r", "read-only": true, "file": file()});
        options[key] = json!(true);
        add(options)
    };
    let named = |name: &str, image: &str| add(json!({"driver": "file", "node-name": name, "filename": image}));
    vec![
        (
            "raw",
            vec![
                raw(),
                Locked(NONE),
                export("e", "r", false),
                Locked(READ),
                export("w", "r", true),
                Locked(WRITE),
                unexport("w"),
                Locked(READ),
                unexport("e"),
                Locked(NONE),
            ],
        ),
        (
            "file",
            vec![named("r", "a.raw"), Locked(NONE), export("w", "r", true), Locked(WRITE), unexport("w"), Locked(NONE)],
        ),
        ("read-only", vec![with("read-only"), Locked(NONE), export("e", "r", false), Locked(READ)]),
        ("force-share", vec![with("force-share"), Locked(NONE), export("e", "r", false), Locked(&[100])]),
        ("throttle", vec![group, raw(), filter("throttle"), Locked(NONE), export("w", "f", true), Locked(WRITE)]),
        (
            "raw over a named file",
            vec![
                named("n", "a.raw"),
                add(json!({"driver": "raw", "node-name": "r", "file": "n"})),
                Locked(NONE),
                export("w", "r", true),
                Locked(WRITE),
            ],
        ),
        (
            "luks",
            vec![
                Run("object-add", json!({"qom-type": "secret", "id": "s", "data": "x"})),
                add(json!({"driver": "luks", "node-name": "r", "key-secret": "s", "file": luks})),
                export("e", "r", false),
                Locked(READ),
                export("w", "r", true),
                Locked(WRITE),
            ],
        ),
        (
            "qcow2",
            vec![
                named("n", "a.qcow2"),
                Locked(NONE),
                add(json!({"driver": "qcow2", "node-name": "r", "file": "n"})),
                Locked(&[100, 101, 103, 201, 203]),
                export("w", "r", true),
                Locked(&[100, 101, 103, 201, 203]),
                unexport("w"),
                Run("blockdev-del", json!({"node-name": "r"})),
                Locked(NONE),
            ],
        ),
    ]
}

fn make(folder: &Path) {
    let qemu = Qemu::system();
    qemu.create(&folder.join("a.raw"), "raw", "", 1 << 20);
    qemu.create(&folder.join("a.qcow2"), "qcow2", "", 1 << 20);
}

/// On a busy machine QEMU sometimes fails to measure the iterations of the key.
fn make_luks(folder: &Path) {
    let qemu = Qemu::system();
    let (luks, secret) = (folder.join("a.luks"), ["--object", "secret,id=s,data=x", "-o", "key-secret=s,iter-time=10"]);
    let path = luks.to_str().expect("text");
    let create = || qemu.img([&["create", "-q", "-f", "luks"], &secret[..], &[path, "1M"]].concat());
    assert!((0..20).any(|_| create().code == 0), "{path} can't be made");
}

fn serve(client: &mut Client, folder: &Path) {
    let address = json!({"addr": {"type": "unix", "data": {"path": folder.join("n.sock")}}});
    client.command("nbd-server-start", address);
}

/// Runs the steps of a case against one daemon.
fn follow(who: &str, client: &mut Client, pid: u32, folder: &Path, case: &str, steps: Vec<Step>) {
    client.files_in(folder);
    serve(client, folder);
    if case == "luks" {
        make_luks(folder);
    }
    let image: PathBuf = folder.join(match case {
        "qcow2" => "a.qcow2",
        "luks" => "a.luks",
        _ => "a.raw",
    });
    for (at, step) in steps.into_iter().enumerate() {
        match step {
            Run(name, mut arguments) => {
                if name == "blockdev-add" && arguments["driver"] != "throttle" {
                    arguments.as_object_mut().expect("an object").remove("throttle-group");
                }
                client.command(name, arguments.clone());
                if name == "block-export-del" {
                    client.event("BLOCK_EXPORT_DELETED");
                }
            }
            Locked(expected) => assert_eq!(locked_bytes(pid, &image), expected, "{who}, {case}, step {at}"),
        }
    }
}

#[test]
fn file_locks_follow_from_the_users_of_nodes() {
    for number in 0..cases().len() {
        let (case, steps) = cases().swap_remove(number);
        let (theirs, mut client) = Theirs::start();
        make(theirs.folder.path());
        follow("QEMU", &mut client, theirs.pid(), theirs.folder.path(), case, steps);
        let (case, steps) = cases().swap_remove(number);
        let daemon = Running::start(Vec::new());
        make(&daemon.path(""));
        follow("ours", &mut daemon.client(), std::process::id(), &daemon.path(""), case, steps);
        daemon.stop().expect("stopped in order");
    }
}

/// A second daemon that serves the image for writing, and a qemu-io that writes, get in beside a writable raw export.
#[test]
fn a_raw_export_bears_other_writers() {
    let daemon = Running::start(Vec::new());
    let folder = daemon.path("");
    make(&folder);
    let mut client = daemon.client();
    client.files_in(&folder);
    serve(&mut client, &folder);
    let (theirs, mut other) = Theirs::start();
    other.files_in(&folder);
    serve(&mut other, theirs.folder.path());
    for client in [&mut client, &mut other] {
        for step in [raw(), export("w", "r", true)] {
            let Run(name, arguments) = step else { unreachable!("commands only") };
            client.command(name, arguments);
        }
    }
    let qemu = Qemu::system();
    let image = folder.join("a.raw");
    let path = image.to_str().expect("text");
    qemu.io(["-f", "raw", "-c", "write -P 7 0 64k", path]).expect_ok();
    assert_eq!(std::fs::read(&image).expect("the image")[..65536], [7; 65536]);
    // The clients of both know the size.
    assert_eq!(qemu.img(["resize", "-q", "-f", "raw", path, "2M"]).code, 1);
    let refused = client.refusal("block_resize", json!({"node-name": "r", "size": 2 << 20}));
    assert!(refused.contains("\"resize\" lock"), "{refused}");
    other.command("block-export-del", json!({"id": "w"}));
    other.event("BLOCK_EXPORT_DELETED");
    client.command("block_resize", json!({"node-name": "r", "size": 2 << 20}));
    assert_eq!(locked_bytes(std::process::id(), &image), WRITE, "after the change of size");
    daemon.stop().expect("stopped in order");
}

/// A node without users holds no lock, so its file may have another length when an image is opened in it.
#[test]
fn a_format_sees_what_the_file_has_become() {
    let daemon = Running::start(Vec::new());
    let folder = daemon.path("");
    make(&folder);
    let mut client = daemon.client();
    client.files_in(&folder);
    client.command("blockdev-add", json!({"driver": "file", "node-name": "n", "filename": "a.qcow2"}));
    let qemu = Qemu::system();
    let image = folder.join("a.qcow2");
    qemu.io(["-f", "qcow2", "-c", "write -P 5 0 1M", image.to_str().expect("text")]).expect_ok();
    client.command("blockdev-add", json!({"driver": "qcow2", "node-name": "q", "file": "n"}));
    let nodes = client.command("query-named-block-nodes", json!({}));
    let file = nodes.as_array().expect("a list").iter().find(|node| node["node-name"] == "n").expect("the file");
    assert_eq!(file["image"]["virtual-size"], image.metadata().expect("the image").len(), "{file}");
    daemon.stop().expect("stopped in order");
}

/// Waits until these bytes are locked: the end of a job releases its locks after the job's last event.
#[track_caller]
fn await_locked(image: &Path, expected: &[u64]) {
    let until = Instant::now() + Duration::from_secs(60);
    while locked_bytes(std::process::id(), image) != expected {
        assert!(Instant::now() < until, "{}: {:?}", image.display(), locked_bytes(std::process::id(), image));
        std::thread::yield_now();
    }
}

/// The target of a mirror permits no other users, and becomes like any raw disk when the clients move there.
#[test]
fn locks_move_with_the_users() {
    let daemon = Running::start(Vec::new());
    let folder = daemon.path("");
    make(&folder);
    Qemu::system().create(&folder.join("b.raw"), "raw", "", 1 << 20);
    let mut client = daemon.client();
    client.files_in(&folder);
    serve(&mut client, &folder);
    let target = json!({"driver": "raw", "node-name": "t", "file": {"driver": "file", "filename": "b.raw"}});
    for step in [raw(), add(target), export("w", "r", true)] {
        let Run(name, arguments) = step else { unreachable!("commands only") };
        client.command(name, arguments);
    }
    let [disk, target] = ["a.raw", "b.raw"].map(|name| folder.join(name));
    let copy = json!({"job-id": "j", "device": "r", "target": "t", "sync": "full"});
    client.command("blockdev-mirror", copy);
    client.event("BLOCK_JOB_READY");
    await_locked(&disk, WRITE);
    await_locked(&target, &[100, 101, 200, 201, 203]);
    client.command("job-complete", json!({"id": "j"}));
    client.event("BLOCK_JOB_COMPLETED");
    await_locked(&disk, NONE);
    await_locked(&target, WRITE);
    daemon.stop().expect("stopped in order");
}

/// Users that rely on a file as it is keep writers out, and give the file free again.
#[test]
fn stricter_users_lock_more() {
    let daemon = Running::start(Vec::new());
    let folder = daemon.path("");
    make(&folder);
    let mut client = daemon.client();
    client.files_in(&folder);
    serve(&mut client, &folder);
    let image = folder.join("a.raw");
    let locked = || locked_bytes(std::process::id(), &image);
    let mut run = |step: Step| {
        let Run(name, arguments) = step else { unreachable!("commands only") };
        client.command(name, arguments);
    };
    run(raw());
    run(add(json!({"driver": "copy-on-read", "node-name": "c", "file": "r"})));
    assert_eq!(locked(), NONE, "copy-on-read without users");
    run(export("w", "c", true));
    assert_eq!(locked(), [100, 101, 102, 201, 203], "copy-on-read");
    run(unexport("w"));
    await_locked(&image, NONE);
    run(Run("blockdev-del", json!({"node-name": "c"})));
    let file = json!({"driver": "file", "filename": "a.qcow2"});
    run(add(json!({"driver": "qcow2", "node-name": "q", "file": file, "backing": "r"})));
    assert_eq!(locked(), [201, 203], "as a backing file");
    run(Run("blockdev-del", json!({"node-name": "q"})));
    assert_eq!(locked(), NONE);
    let again = |read_only: bool| {
        let file = json!({"driver": "file", "filename": image});
        let options = json!({"driver": "raw", "node-name": "r", "read-only": read_only, "file": file});
        Run("blockdev-reopen", json!({"options": [options]}))
    };
    run(export("e", "r", false));
    for read_only in [true, false] {
        run(again(read_only));
        assert_eq!(locked(), READ, "read-only: {read_only}");
    }
    run(export("v", "r", true));
    assert_eq!(locked(), WRITE, "writable again");
    daemon.stop().expect("stopped in order");
}
