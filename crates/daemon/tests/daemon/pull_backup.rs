// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Backups that a client pulls: an overlay of the disk gets the parts that the disk's clients overwrite, and is
//! exported. The commands are those that libvirt sends for `virsh backup-begin`, beside the newest QEMU.

use super::beside_qemu::Theirs;
use super::commits::{SIZE, chain};
use super::exports::{node, uri};
use super::load::Load;
use super::running::{Client, Running, temp_folder};
use cowshed_testkit::programs::tool;
use cowshed_testkit::qemu::Qemu;
use serde_json::{Value, json};
use std::path::Path;

const BYTES: u64 = 4 << 20;

/// A daemon with the disk as libvirt opens it, exported for writing.
fn open_disk(client: &mut Client, folder: &Path) {
    let qemu = Qemu::newest();
    let disk = folder.join("disk.qcow2");
    qemu.create(&disk, "qcow2", "", BYTES);
    qemu.io_commands(&disk, "qcow2", &["write -q -P 1 0 4M".to_owned()]).expect_ok();
    for (command, arguments) in [
        (
            "blockdev-add",
            json!({"driver": "file", "filename": "disk.qcow2", "node-name": "libvirt-1-storage",
                               "auto-read-only": true, "discard": "unmap"}),
        ),
        (
            "blockdev-add",
            json!({"node-name": "libvirt-1-format", "read-only": false, "discard": "unmap",
                               "driver": "qcow2", "file": "libvirt-1-storage"}),
        ),
        ("nbd-server-start", json!({"addr": {"type": "unix", "data": {"path": "n.sock"}}})),
        (
            "block-export-add",
            json!({"type": "nbd", "id": "guest", "node-name": "libvirt-1-format", "name": "guest",
                                   "writable": true}),
        ),
        ("block-dirty-bitmap-add", json!({"node": "libvirt-1-format", "name": "first", "persistent": true})),
    ] {
        client.command(command, arguments);
    }
}

/// The commands up to the export of the past.
fn begin(client: &mut Client) {
    client.command(
        "blockdev-create",
        json!({"job-id": "create-scratch", "options": {"driver": "file", "filename": "scratch.qcow2", "size": 0}}),
    );
    await_created(client, "create-scratch");
    let storage = json!({"driver": "file", "filename": "scratch.qcow2", "node-name": "libvirt-2-storage",
                         "auto-read-only": true, "discard": "unmap"});
    client.command("blockdev-add", storage);
    let format = json!({"driver": "qcow2", "file": "libvirt-2-storage", "size": BYTES, "cluster-size": 65536,
                        "backing-file": "disk.qcow2", "backing-fmt": "qcow2"});
    client.command("blockdev-create", json!({"job-id": "create-scratch", "options": format}));
    await_created(client, "create-scratch");
    let scratch = json!({"node-name": "libvirt-2-format", "read-only": false, "discard": "unmap", "driver": "qcow2",
                         "file": "libvirt-2-storage", "backing": "libvirt-1-format"});
    client.command("blockdev-add", scratch);
    let bitmap = |kind: &str, data: Value| json!({"type": kind, "data": data});
    let disk = "libvirt-1-format";
    client.command(
        "transaction",
        json!({"actions": [
            bitmap("block-dirty-bitmap-add", json!({"node": disk, "name": "backup-vda", "persistent": false, "disabled": true, "granularity": 65536})),
            bitmap("block-dirty-bitmap-merge", json!({"node": disk, "target": "backup-vda", "bitmaps": [{"node": disk, "name": "first"}]})),
            bitmap("block-dirty-bitmap-add", json!({"node": disk, "name": "second", "persistent": true, "disabled": false})),
            {"type": "blockdev-backup", "data": {"device": disk, "job-id": "backup-vda", "target": "libvirt-2-format",
                                                 "sync": "none", "auto-finalize": true, "auto-dismiss": true}},
        ]}),
    );
    let export = json!({"type": "nbd", "id": "libvirt-nbd-libvirt-2-format", "node-name": "libvirt-2-format", "writable": false,
                        "name": "vda", "bitmaps": [{"node": disk, "name": "backup-vda"}]});
    client.command("block-export-add", export);
}

fn await_created(client: &mut Client, id: &str) {
    loop {
        let jobs = client.command("query-jobs", json!({}));
        let job = jobs.as_array().expect("a list").iter().find(|job| job["id"] == id).expect("is listed").clone();
        if job["status"] == "concluded" {
            assert!(job.get("error").is_none(), "{job}");
            break;
        }
        std::thread::yield_now();
    }
    client.command("job-dismiss", json!({"id": id}));
}

/// The commands that end the backup.
fn end(client: &mut Client) {
    client.command("block-export-del", json!({"id": "libvirt-nbd-libvirt-2-format"}));
    client.event("BLOCK_EXPORT_DELETED");
    client.command("job-cancel", json!({"id": "backup-vda"}));
    client.event("BLOCK_JOB_CANCELLED");
    client.command("block-dirty-bitmap-remove", json!({"node": "libvirt-1-format", "name": "backup-vda"}));
    for name in ["libvirt-2-format", "libvirt-2-storage"] {
        client.command("blockdev-del", json!({"node-name": name}));
    }
}

fn io(folder: &Path, export: &str, commands: &[&str]) {
    let uri = format!("nbd+unix:///{export}?socket={}", folder.join("n.sock").display());
    let arguments = commands.iter().flat_map(|command| ["-c", command]);
    let said = Qemu::newest().io(["-f", "raw"].into_iter().chain(arguments).chain([uri.as_str()])).expect_ok();
    assert!(!said.stdout.contains("failed"), "{commands:?}: {}", said.stdout);
}

/// The past as virtnbdbackup's own modules read it, with the content's sums. A full backup reads all data by its
/// allocation, an incremental one the dirty parts by the bitmap.
const VIRTNBDBACKUP: &str = r#"
import hashlib, sys
from libvirtnbdbackup import nbdcli
from libvirtnbdbackup.extenthandler import ExtentHandler
for context in ("", "qemu:dirty-bitmap:backup-vda"):
    kind = nbdcli.Unix("vda", context, sys.argv[1])
    connection = nbdcli.client(kind).connect()
    found, content = [], hashlib.sha256()
    for extent in ExtentHandler(connection, kind).queryBlockStatus():
        found.append((extent.data, extent.offset, extent.length))
        if extent.data:
            at, end = extent.offset, extent.offset + extent.length
            while at < end:
                length = min(end - at, connection.maxRequestSize)
                content.update(connection.nbd.pread(length, at))
                at += length
    print(found, content.hexdigest())
    connection.disconnect()
"#;

fn virtnbdbackup(folder: &Path) -> String {
    let socket = folder.join("n.sock");
    tool("/usr/bin/python3", &["-W", "ignore", "-c", VIRTNBDBACKUP, socket.to_str().expect("text")])
}

/// The runs of the bitmap of the past, as a backup program reads them.
fn runs(folder: &Path) -> Value {
    let options = format!(
        "driver=nbd,server.type=unix,server.path={},export=vda,x-dirty-bitmap=qemu:dirty-bitmap:backup-vda",
        folder.join("n.sock").display()
    );
    Qemu::newest().img(["map", "--output=json", "--image-opts", &options]).expect_ok().json()
}

#[test]
fn a_backup_is_pulled_as_libvirt_does_it() {
    let (theirs, theirs_client) = Theirs::start_newest();
    let daemon = Running::start(Vec::new());
    let mut ours_client = daemon.client();
    ours_client.files_in(daemon.folder.path());
    let (mut maps, mut backups) = (Vec::new(), Vec::new());
    for (mut client, folder) in [(ours_client, daemon.folder.path()), (theirs_client, theirs.folder.path())] {
        open_disk(&mut client, folder);
        io(folder, "guest", &["write -P 2 1M 64k"]);
        begin(&mut client);
        io(folder, "guest", &["write -P 3 0 192k", "write -z 2M 64k", "discard 3M 64k", "write -P 3 1M 4k", "flush"]);
        let past = ["read -P 1 0 1M", "read -P 2 1M 64k", "read -P 1 1088k 2944k"];
        let uri = format!("nbd+unix:///vda?socket={}", folder.join("n.sock").display());
        let reads = past.iter().flat_map(|command| ["-c", command]);
        let said = Qemu::newest().io(["-r", "-f", "raw"].into_iter().chain(reads).chain([uri.as_str()])).expect_ok();
        assert!(!said.stdout.contains("failed"), "{}", said.stdout);
        maps.push(runs(folder));
        backups.push(virtnbdbackup(folder));
        end(&mut client);
        io(folder, "guest", &["read -P 3 0 192k", "read -P 0 2M 64k", "read -P 3 1M 4k", "read -P 2 1028k 60k"]);
        // The next night.
        std::fs::remove_file(folder.join("scratch.qcow2")).expect("it is closed");
        begin_again(&mut client);
    }
    assert_eq!(maps[0], maps[1]);
    assert_eq!(backups[0], backups[1]);
    assert_eq!(backups[0].lines().count(), 2, "{}", backups[0]);
    daemon.stop().expect("stopped in order");
}

/// Remains of the first backup would be in the way of a second one.
fn begin_again(client: &mut Client) {
    client.command("block-dirty-bitmap-remove", json!({"node": "libvirt-1-format", "name": "second"}));
    begin(client);
    end(client);
}

/// A reader of the past never sees the bytes of a write that comes between its two looks.
#[test]
fn the_past_is_read_whole_while_clients_write() {
    for seed in 0..3 {
        let (daemon, mut client, mut model) = chain("cluster_size=64k");
        let scratch = daemon.path("scratch");
        Qemu::system().create(&scratch, "qcow2", "cluster_size=64k", SIZE);
        let mut options = node(&scratch, "scratch");
        options["backing"] = json!("t");
        client.command("blockdev-add", options);
        client.command("blockdev-backup", json!({"device": "t", "target": "scratch", "sync": "none", "job-id": "b"}));
        let past = json!({"type": "nbd", "id": "past", "node-name": "scratch", "name": "past"});
        client.command("block-export-add", past);
        let before = model.clone();
        let load = Load::start(&uri(&daemon, "t"), &mut model, seed);
        let out = temp_folder();
        for round in 0..6 {
            let file = out.path().join("past");
            let arguments = ["convert", "-f", "raw", "-O", "raw", &uri(&daemon, "past"), file.to_str().expect("text")];
            Qemu::system().img(arguments).expect_ok();
            let found = std::fs::read(&file).expect("the past");
            let wrong = found.iter().zip(&before).position(|(one, other)| one != other);
            assert_eq!(wrong, None, "seed {seed}, round {round}");
        }
        load.join();
        client.command("block-export-del", json!({"id": "past"}));
        client.event("BLOCK_EXPORT_DELETED");
        client.command("job-cancel", json!({"id": "b"}));
        client.event("BLOCK_JOB_CANCELLED");
        client.command("blockdev-del", json!({"node-name": "scratch"}));
        super::commits::expect_content(daemon, "t", &model);
    }
}

/// A reader that found nothing on the target, and is slow on its way to the disk, keeps a write to its bytes waiting.
#[test]
fn a_write_waits_for_a_slow_reader_of_the_past() {
    write_beside_a_slow_reader(false);
}

/// The same where the job writes to the target by way of a filter.
#[test]
fn a_write_waits_for_a_slow_reader_below_a_filter() {
    write_beside_a_slow_reader(true);
}

fn write_beside_a_slow_reader(by_filter: bool) {
    let (daemon, mut client, _) = chain("cluster_size=64k");
    let limits = json!({"bps-read": 65536});
    client.command("object-add", json!({"qom-type": "throttle-group", "id": "g", "limits": limits}));
    client.command(
        "blockdev-add",
        json!({"driver": "throttle", "node-name": "slow", "throttle-group": "g", "file": "t"}),
    );
    let scratch = daemon.path("scratch");
    Qemu::system().create(&scratch, "qcow2", "cluster_size=64k", SIZE);
    let mut options = node(&scratch, "scratch");
    options["backing"] = json!("slow");
    client.command("blockdev-add", options);
    if by_filter {
        client.command("object-add", json!({"qom-type": "throttle-group", "id": "free"}));
        let filter = json!({"driver": "throttle", "node-name": "above", "throttle-group": "free", "file": "scratch"});
        client.command("blockdev-add", filter);
    }
    let target = if by_filter { "above" } else { "scratch" };
    client.command("blockdev-backup", json!({"device": "t", "target": target, "sync": "none", "job-id": "b"}));
    client.command("block-export-add", json!({"type": "nbd", "id": "past", "node-name": "scratch", "name": "past"}));
    // The first reads use up the credit of the group.
    let mut reader = std::process::Command::new(Qemu::system().io_path());
    reader.args([
        "-r",
        "-f",
        "raw",
        "-c",
        "read -P 2 6912k 64k",
        "-c",
        "read -P 2 6M 64k",
        "-c",
        "read -P 2 6272k 64k",
    ]);
    let reader = reader.arg(uri(&daemon, "past")).stdout(std::process::Stdio::piped()).spawn().expect("qemu-io runs");
    let held_back = |client: &mut Client| {
        let stats = client.command("query-blockstats", json!({"query-nodes": true}));
        let slow = stats.as_array().expect("a list").iter().find(|one| one["node-name"] == "slow").expect("is listed");
        slow["x-throttle"]["waiting"].as_u64().unwrap_or_else(|| panic!("{slow}"))
    };
    while held_back(&mut client) == 0 {
        std::thread::yield_now();
    }
    let write = ["-f", "raw", "-c", "write -P 9 6M 512k", &uri(&daemon, "t")];
    Qemu::system().io(write).expect_ok();
    let output = reader.wait_with_output().expect("qemu-io ends");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && !said.contains("failed"), "{said}");
    daemon.stop().expect("stopped in order");
}

/// The recipe of docs/daemon.md, on a disk that was exported without a thought of it.
#[test]
fn a_filter_is_put_under_the_users_of_a_plain_disk() {
    let (daemon, mut client, mut model) = chain("cluster_size=64k");
    let scratch = daemon.path("scratch");
    Qemu::system().create(&scratch, "qcow2", "", SIZE);
    client.command("blockdev-add", node(&scratch, "scratch"));
    let filter = json!({"driver": "copy-before-write", "node-name": "filter", "file": "t", "target": "scratch"});
    client.command("blockdev-add", filter);
    client.command("x-blockdev-insert", json!({"node-name": "filter"}));
    client.command("blockdev-add", json!({"driver": "snapshot-access", "node-name": "past", "file": "filter"}));
    client.command("block-export-add", json!({"type": "nbd", "id": "past", "node-name": "past", "name": "past"}));
    let before = model.clone();
    let load = Load::start(&uri(&daemon, "t"), &mut model, 7);
    load.join();
    let out = temp_folder();
    let file = out.path().join("past");
    let arguments = ["convert", "-f", "raw", "-O", "raw", &uri(&daemon, "past"), file.to_str().expect("text")];
    Qemu::system().img(arguments).expect_ok();
    assert!(std::fs::read(&file).expect("the past") == before, "not as it was");
    client.command("block-export-del", json!({"id": "past"}));
    client.event("BLOCK_EXPORT_DELETED");
    client.command("blockdev-del", json!({"node-name": "past"}));
    client.command("x-blockdev-remove", json!({"node-name": "filter"}));
    client.command("blockdev-del", json!({"node-name": "scratch"}));
    assert_eq!(client.refusal("x-blockdev-insert", json!({"node-name": "t"})), "Node 't' is not a filter");
    super::commits::expect_content(daemon, "t", &model);
}
