// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The same conversation with QEMU's storage daemon and with ours. Both take the same commands, and refuse the same
//! ones with the same class. Answers have the same members of the same types.

use super::running::{Client, Running};
use cowshed_testkit::qemu::{Qemu, temp_dir};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const IMAGES: [&str; 4] = ["a.qcow2", "b.qcow2", "o.qcow2", "t.qcow2"];

/// Members that only one side has, by the end of their path. Ours came with later versions of QEMU than Debian's, or
/// are our own (`x-`).
const OURS_ONLY: &[&str] =
    &["active", "children[].child", "children[].node-name", "actively-synced", "format-specific.data", "idle_time_ns"];

/// QEMU's daemon with a monitor, ended when dropped.
pub(super) struct Theirs {
    pub(super) folder: tempfile::TempDir,
    child: Child,
}

/// Bounds the start of QEMU's daemon on a busy machine.
const START_LIMIT: Duration = Duration::from_secs(60);

impl Theirs {
    /// The daemon and its first client. That client stays: QEMU 7.2 sometimes ends with an assertion when a client
    /// leaves before its greeting, so the wait doesn't probe the socket with others. It comes when the daemon has
    /// started, which the file with its process's number shows: the socket listens before the monitor is ready.
    pub(super) fn start() -> (Theirs, Client) {
        Self::start_of(&Qemu::system())
    }

    /// As [`Theirs::start`], of the newest QEMU.
    pub(super) fn start_newest() -> (Theirs, Client) {
        Self::start_of(&Qemu::newest())
    }

    fn start_of(qemu: &Qemu) -> (Theirs, Client) {
        let folder = temp_dir();
        let child = Command::new(qemu.program("qemu-storage-daemon"))
            .args(["--chardev", "socket,id=m,path=m.sock,server=on,wait=off", "--monitor", "m"])
            .args(["--pidfile", "pid"])
            .current_dir(folder.path())
            .stdout(Stdio::null())
            .spawn();
        let child = child.unwrap_or_else(|error| {
            panic!("qemu-storage-daemon can't be run ({error}): scripts/setup test installs it")
        });
        let theirs = Theirs { folder, child };
        let path = theirs.folder.path().join("m.sock");
        let until = Instant::now() + START_LIMIT;
        let number = theirs.folder.path().join("pid");
        while !std::fs::read_to_string(&number).is_ok_and(|text| text.ends_with('\n')) {
            assert!(Instant::now() < until, "QEMU's daemon doesn't start");
            std::thread::yield_now();
        }
        let stream = UnixStream::connect(&path).expect("QEMU's daemon listens");
        (theirs, Client::on(stream))
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Theirs {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Every member of an answer with its type, members of lists together.
fn shape(value: &Value, path: &str, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(map) if !map.is_empty() => {
            map.iter().for_each(|(key, value)| shape(value, &format!("{path}.{key}"), found));
        }
        Value::Array(items) => items.iter().for_each(|item| shape(item, &format!("{path}[]"), found)),
        other => {
            let kind = match other {
                Value::Null => "null",
                Value::Bool(_) => "bool",
                Value::Number(_) => "number",
                Value::String(_) => "text",
                Value::Array(_) | Value::Object(_) => "object",
            };
            found.insert(format!("{path}: {kind}"));
        }
    }
}

fn shape_of(value: &Value) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    shape(value, "", &mut found);
    found
}

#[track_caller]
fn compare(about: &str, ours: &Value, theirs: &Value) {
    let (ours, theirs) = (shape_of(ours), shape_of(theirs));
    let missing: Vec<&String> = theirs.difference(&ours).collect();
    // Our own names, and members that QEMU has from version 8.1 on (limits of images from 10.1 on).
    let is_known = |path: &str| {
        let path = path.split(": ").next().unwrap_or_default();
        [".x-", "zone_append_", "image.limits."].iter().any(|part| path.contains(part))
            || OURS_ONLY.iter().any(|known| path.ends_with(known))
    };
    let more: Vec<&String> = ours.difference(&theirs).filter(|path| !is_known(path)).collect();
    assert!(missing.is_empty() && more.is_empty(), "{about}: QEMU has {missing:?}, we have {more:?}");
}

struct Both {
    ours: Client,
    theirs: Client,
}

impl Both {
    /// Runs a command on both.
    #[track_caller]
    fn run(&mut self, command: &str, arguments: Value) {
        let (ours, theirs) =
            (self.ours.execute(command, arguments.clone()), self.theirs.execute(command, arguments.clone()));
        let about = format!("{command} {arguments}");
        match (&ours, &theirs) {
            (Ok(ours), Ok(theirs)) => compare(&about, ours, theirs),
            (Err(ours), Err(theirs)) => assert_eq!(ours["class"], theirs["class"], "{about}: {ours} {theirs}"),
            _ => panic!("{about}: we say {ours:?}, QEMU says {theirs:?}"),
        }
    }

    #[track_caller]
    fn all(&mut self, steps: impl IntoIterator<Item = (&'static str, Value)>) {
        steps.into_iter().for_each(|(command, arguments)| self.run(command, arguments));
    }

    #[track_caller]
    fn await_event(&mut self, name: &str) {
        let (ours, theirs) = (self.ours.event(name), self.theirs.event(name));
        compare(name, &ours, &theirs);
    }

    /// Waits until a job that isn't dismissed by itself has ended.
    fn await_job(&mut self, id: &str) {
        for client in [&mut self.ours, &mut self.theirs] {
            while client.command("query-jobs", json!({}))[0]["status"] != "concluded" {
                std::thread::yield_now();
            }
        }
        self.run("query-jobs", json!({}));
        self.run("job-dismiss", json!({"id": id}));
    }
}

fn qcow2(name: &str, file: &str) -> Value {
    json!({"driver": "qcow2", "node-name": name, "file": {"driver": "file", "filename": file}})
}

fn with(mut value: Value, key: &str, more: Value) -> Value {
    value[key] = more;
    value
}

fn nodes(both: &mut Both) {
    both.all([
        ("qmp_capabilities", json!({})),
        ("nosuch", json!({})),
        ("query-version", json!({})),
        ("query-block", json!({})),
        ("query-blockstats", json!({})),
        ("query-named-block-nodes", json!({})),
        ("query-block-exports", json!({})),
        ("query-jobs", json!({})),
        ("query-block-jobs", json!({})),
        ("blockdev-add", json!({"driver": "nosuch", "node-name": "x"})),
        ("blockdev-add", json!({"driver": "file", "node-name": "x"})),
        ("blockdev-add", json!({"node-name": "x"})),
        ("blockdev-add", qcow2("q", "missing.qcow2")),
        ("blockdev-add", with(qcow2("q", "a.qcow2"), "nosuch", json!(1))),
        ("blockdev-add", qcow2("9q", "a.qcow2")),
        ("blockdev-add", qcow2("q", "a.qcow2")),
        ("blockdev-add", qcow2("q", "b.qcow2")),
        ("query-named-block-nodes", json!({})),
        ("query-named-block-nodes", json!({"flat": true})),
        ("query-blockstats", json!({"query-nodes": true})),
        ("blockdev-del", json!({"node-name": "zz"})),
        ("block_resize", json!({"node-name": "zz", "size": 1})),
        ("block_resize", json!({"node-name": "q", "size": -1})),
        ("block_resize", json!({"node-name": "q", "size": 32 << 20})),
        ("block_resize", json!({"node-name": "q", "size": 16 << 20})),
        ("blockdev-reopen", json!({"options": [with(qcow2("q", "a.qcow2"), "file", json!("zz"))]})),
        ("blockdev-reopen", json!({"options": [{"driver": "qcow2"}]})),
        ("blockdev-reopen", json!({"options": [{"driver": "qcow2", "node-name": "zz", "file": "q"}]})),
    ]);
}

fn objects(both: &mut Both) {
    let group = |limits: Value| json!({"qom-type": "throttle-group", "id": "g", "limits": limits});
    both.all([
        ("object-add", group(json!({"iops-total": 100}))),
        ("object-add", group(json!({}))),
        ("object-add", group(json!({"iops-total": 5, "iops-read": 5}))),
        ("object-add", json!({"qom-type": "nosuch", "id": "h"})),
        ("object-add", json!({"qom-type": "iothread", "id": "t0"})),
        ("object-add", json!({"qom-type": "secret", "id": "s", "data": "abc"})),
        ("object-add", json!({"qom-type": "secret", "id": "s2"})),
        ("qom-list", json!({"path": "/objects"})),
        ("qom-list", json!({"path": "/nosuch"})),
        ("qom-get", json!({"path": "/objects/g", "property": "limits"})),
        ("qom-set", json!({"path": "/objects/g", "property": "limits", "value": {"iops-total": 200}})),
        ("qom-get", json!({"path": "/objects/g", "property": "nosuch"})),
        ("qom-get", json!({"path": "/objects/zz", "property": "limits"})),
        ("object-del", json!({"id": "zz"})),
        ("object-del", json!({"id": "s"})),
        ("qom-list-types", json!({"implements": "throttle-group"})),
        ("qom-list-types", json!({"implements": "user-creatable"})),
        ("qom-list-types", json!({"implements": "nosuch"})),
        ("qom-list-properties", json!({"typename": "throttle-group"})),
        ("qom-list-properties", json!({"typename": "nosuch"})),
        ("blockdev-add", json!({"driver": "throttle", "node-name": "th", "throttle-group": "g", "file": "q"})),
        ("object-del", json!({"id": "g"})),
        ("blockdev-add", json!({"driver": "throttle", "node-name": "th2", "throttle-group": "zz", "file": "q"})),
        ("blockdev-del", json!({"node-name": "q"})),
        ("blockdev-del", json!({"node-name": "th"})),
    ]);
}

fn exports(both: &mut Both) {
    let server = |path: &str| json!({"addr": {"type": "unix", "data": {"path": path}}});
    let export = |node: &str| json!({"type": "nbd", "id": "e", "node-name": node, "writable": true});
    both.all([
        ("block-export-add", export("q")),
        ("nbd-server-stop", json!({})),
        ("nbd-server-start", server("n.sock")),
        ("nbd-server-start", server("n2.sock")),
        ("block-export-add", export("zz")),
        ("block-export-add", with(export("q"), "type", json!("nosuch"))),
        ("block-export-add", export("q")),
        ("block-export-add", with(export("q"), "name", json!("other"))),
        ("query-block-exports", json!({})),
        ("block-export-del", json!({"id": "zz"})),
        ("nbd-server-add", json!({"device": "q", "name": "second"})),
        ("nbd-server-add", json!({"device": "zz", "name": "third"})),
        ("nbd-server-remove", json!({"name": "second"})),
        ("nbd-server-remove", json!({"name": "second"})),
    ]);
}

fn mirror(both: &mut Both) {
    let mirror = |from: &str, to: &str| json!({"device": from, "target": to, "sync": "full", "job-id": "m"});
    both.all([
        ("blockdev-add", qcow2("t", "t.qcow2")),
        ("blockdev-mirror", mirror("zz", "t")),
        ("blockdev-mirror", mirror("q", "zz")),
        ("blockdev-mirror", with(mirror("q", "t"), "granularity", json!(1000))),
        ("blockdev-mirror", with(mirror("q", "t"), "sync", json!("bitmap"))),
        ("blockdev-mirror", with(mirror("q", "t"), "sync", json!("incremental"))),
        ("drive-mirror", json!({"device": "q", "target": "x.qcow2", "sync": "bitmap"})),
        ("blockdev-mirror", with(mirror("q", "t"), "copy-mode", json!("write-blocking"))),
    ]);
    both.await_event("BLOCK_JOB_READY");
    both.all([
        ("query-jobs", json!({})),
        ("query-block-jobs", json!({})),
        ("blockdev-del", json!({"node-name": "t"})),
        ("job-pause", json!({"id": "m"})),
        ("job-resume", json!({"id": "m"})),
        ("block-job-set-speed", json!({"device": "m", "speed": 1_000_000})),
        ("job-finalize", json!({"id": "m"})),
        ("job-dismiss", json!({"id": "m"})),
        ("block-job-cancel", json!({"device": "m"})),
    ]);
    both.await_event("BLOCK_JOB_COMPLETED");
    both.all([
        ("query-jobs", json!({})),
        ("block-job-cancel", json!({"device": "m"})),
        ("job-cancel", json!({"id": "m"})),
        ("job-pause", json!({"id": "m"})),
        ("job-complete", json!({"id": "m"})),
        ("block-job-pause", json!({"device": "m"})),
        ("block-job-complete", json!({"device": "m"})),
        ("block-job-set-speed", json!({"device": "m", "speed": 1})),
    ]);
}

fn chains(both: &mut Both) {
    let overlay = |node: &str| json!({"node-name": node, "snapshot-file": "s1.qcow2", "snapshot-node-name": "s1"});
    let abort = json!({"type": "abort", "data": {}});
    let snapshot = json!({"type": "blockdev-snapshot-sync", "data": {"node-name": "zz", "snapshot-file": "x.qcow2"}});
    both.all([
        ("blockdev-snapshot-sync", overlay("q")),
        ("query-named-block-nodes", json!({})),
        ("blockdev-snapshot-sync", with(overlay("zz"), "snapshot-file", json!("s2.qcow2"))),
        ("blockdev-add", with(qcow2("o", "o.qcow2"), "backing", Value::Null)),
        ("blockdev-snapshot", json!({"node": "s1", "overlay": "o"})),
        ("blockdev-snapshot", json!({"node": "s1", "overlay": "zz"})),
        ("change-backing-file", json!({"device": "o", "image-node-name": "o", "backing-file": "s1.qcow2"})),
        ("change-backing-file", json!({"device": "o", "image-node-name": "zz", "backing-file": "s1.qcow2"})),
        ("block-commit", json!({"device": "o", "job-id": "c", "top-node": "s1", "base-node": "q"})),
    ]);
    both.await_event("BLOCK_JOB_COMPLETED");
    both.all([
        ("block-commit", json!({"device": "zz", "job-id": "c"})),
        ("block-commit", json!({"device": "o", "job-id": "c", "base-node": "zz"})),
        ("block-stream", json!({"device": "o", "job-id": "st", "base-node": "zz"})),
        ("block-stream", json!({"device": "zz", "job-id": "st"})),
        ("block-stream", json!({"device": "o", "job-id": "st"})),
    ]);
    both.await_event("BLOCK_JOB_COMPLETED");
    both.all([
        ("transaction", json!({"actions": [snapshot]})),
        ("transaction", json!({"actions": []})),
        ("transaction", json!({"actions": [abort]})),
    ]);
}

fn internal(both: &mut Both) {
    let taken = |device: &str, name: &str| json!({"device": device, "name": name});
    both.all([
        ("blockdev-snapshot-internal-sync", taken("o", "s")),
        ("blockdev-snapshot-internal-sync", taken("o", "s")),
        ("blockdev-snapshot-internal-sync", taken("o", "")),
        ("blockdev-snapshot-internal-sync", taken("zz", "s")),
        ("blockdev-snapshot-delete-internal-sync", json!({"device": "o", "name": "zz"})),
        ("blockdev-snapshot-delete-internal-sync", json!({"device": "o"})),
        ("blockdev-snapshot-delete-internal-sync", json!({"device": "o", "name": "s"})),
        ("block-set-write-threshold", json!({"node-name": "o", "write-threshold": 1 << 20})),
        ("block-set-write-threshold", json!({"node-name": "zz", "write-threshold": 1 << 20})),
        ("block-set-write-threshold", json!({"node-name": "o", "write-threshold": 0})),
        ("drive-backup", json!({"device": "zz", "target": "x.qcow2", "sync": "full"})),
        ("drive-mirror", json!({"device": "zz", "target": "x.qcow2", "sync": "full"})),
    ]);
}

fn fleecing(both: &mut Both) {
    let filter = |more: Value| {
        let mut options = json!({"driver": "copy-before-write", "node-name": "cbw", "file": "o", "target": "t"});
        options.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        options
    };
    let past = |file: &str| json!({"driver": "snapshot-access", "node-name": "past", "file": file});
    let throttle = |file: &str| json!({"driver": "throttle", "node-name": "ft", "throttle-group": "g", "file": file});
    let export = |node: &str| json!({"type": "nbd", "id": node, "node-name": node, "name": node, "writable": true});
    both.run("block-export-del", json!({"id": "e"}));
    both.await_event("BLOCK_EXPORT_DELETED");
    both.all([
        ("block-dirty-bitmap-add", json!({"node": "o", "name": "dirty"})),
        ("blockdev-add", throttle("o")),
        ("block-export-add", export("ft")),
        ("blockdev-add", filter(json!({"on-cbw-error": "nosuch"}))),
        ("blockdev-add", filter(json!({"cbw-timeout": -1}))),
        ("blockdev-add", filter(json!({"cbw-timeout": 1_u64 << 32}))),
        ("blockdev-add", filter(json!({"bitmap": {"node": "o", "name": "zz"}}))),
        ("blockdev-add", filter(json!({"bitmap": {"node": "zz", "name": "dirty"}}))),
        ("blockdev-add", filter(json!({"bitmap": {"node": "o"}}))),
        ("blockdev-add", past("zz")),
        ("blockdev-add", filter(json!({"cbw-timeout": 10, "bitmap": {"node": "o", "name": "dirty"}}))),
        // A user writes past the filter.
        ("blockdev-add", past("cbw")),
        ("blockdev-reopen", json!({"options": [throttle("cbw")]})),
        ("blockdev-add", past("cbw")),
        ("block-export-add", export("past")),
        ("blockdev-reopen", json!({"options": [throttle("o")]})),
        ("blockdev-reopen", json!({"options": [throttle("ft")]})),
        ("blockdev-reopen", json!({"options": [throttle("zz")]})),
        ("blockdev-reopen", json!({"options": [filter(json!({"cbw-timeout": 3}))]})),
        ("blockdev-del", json!({"node-name": "cbw"})),
        ("block-dirty-bitmap-remove", json!({"node": "o", "name": "dirty"})),
        ("block-export-del", json!({"id": "past"})),
    ]);
    both.await_event("BLOCK_EXPORT_DELETED");
    both.all([
        ("blockdev-del", json!({"node-name": "past"})),
        ("blockdev-reopen", json!({"options": [throttle("o")]})),
        ("blockdev-del", json!({"node-name": "cbw"})),
        ("block-export-del", json!({"id": "ft"})),
    ]);
    both.await_event("BLOCK_EXPORT_DELETED");
    both.all([
        ("blockdev-del", json!({"node-name": "ft"})),
        ("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "o", "writable": true})),
    ]);
}

fn copies(both: &mut Both) {
    let backup = |from: &str, to: &str| json!({"device": from, "target": to, "sync": "full", "job-id": "b"});
    both.all([
        ("blockdev-backup", backup("o", "zz")),
        ("blockdev-backup", backup("zz", "t")),
        ("blockdev-backup", backup("o", "o")),
        ("blockdev-backup", json!({"device": "o", "target": "t", "sync": "full"})),
        ("blockdev-mirror", json!({"device": "o", "target": "t", "sync": "full"})),
        ("block-stream", json!({"device": "o"})),
        ("block-commit", json!({"device": "o"})),
        ("blockdev-backup", with(backup("o", "o"), "bitmap", json!("zz"))),
        ("blockdev-backup", with(backup("o", "zz"), "bitmap", json!("zz"))),
        ("blockdev-backup", backup("o", "t")),
    ]);
    both.await_event("BLOCK_JOB_COMPLETED");
    let file = json!({"driver": "file", "filename": "new.raw", "size": 1 << 20});
    both.all([
        ("blockdev-create", json!({"job-id": "c", "options": {"driver": "raw"}})),
        ("blockdev-create", json!({"job-id": "c", "options": {"driver": "qcow2", "size": 512}})),
        ("blockdev-create", json!({"job-id": "c", "options": file})),
    ]);
    both.await_job("c");
    let file = json!({"driver": "file", "filename": "new.raw"});
    both.run("blockdev-create", json!({"job-id": "c", "options": {"driver": "qcow2", "file": file, "size": 1 << 20}}));
    both.await_job("c");
    both.all([
        ("query-commands", json!({})),
        ("query-qmp-schema", json!({"nosuch": 1})),
        ("block-export-del", json!({"id": "e"})),
        ("nbd-server-stop", json!({})),
        ("blockdev-del", json!({"node-name": "o"})),
        ("blockdev-del", json!({"node-name": "t"})),
    ]);
}

#[test]
fn both_daemons_answer_alike() {
    let (theirs, client_of_theirs) = Theirs::start();
    let daemon = Running::start(Vec::new());
    let qemu = Qemu::system();
    for folder in [theirs.folder.path(), daemon.folder.path()] {
        IMAGES.iter().for_each(|image| qemu.create(&folder.join(image), "qcow2", "", 16 << 20));
    }
    let mut both = Both { ours: daemon.client(), theirs: client_of_theirs };
    // Names of files are relative to the daemon's folder; ours runs in the test's own.
    both.ours.files_in(daemon.folder.path());
    nodes(&mut both);
    objects(&mut both);
    exports(&mut both);
    mirror(&mut both);
    chains(&mut both);
    internal(&mut both);
    fleecing(&mut both);
    copies(&mut both);
    daemon.stop().expect("stopped in order");
}
