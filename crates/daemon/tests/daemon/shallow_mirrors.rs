// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A mirror of the top layer alone, to an overlay that is opened without its backing file. The backing file's data must show there later.

use super::jobs::concluded;
use super::running::{Client, Running};
use cowshed_testkit::qemu::Qemu;
use serde_json::{Value, json};

const MIB: usize = 1 << 20;

/// A daemon with the node `s` over a base of sevens, with small clusters, and its export `e`.
fn with_source() -> (Running, Client) {
    let daemon = Running::start(Vec::new());
    let qemu = Qemu::newest();
    std::fs::write(daemon.path("base"), vec![7; 8 * MIB]).expect("a base");
    let options = format!("cluster_size=4k,backing_file={},backing_fmt=raw", daemon.path("base").display());
    qemu.create(&daemon.path("top"), "qcow2", &options, 8 << 20);
    let writes = ["write -P 8 6303744 4k", "write -z 4M 64k", "write -P 9 4160k 4k"].map(str::to_owned);
    qemu.io_commands(&daemon.path("top"), "qcow2", &writes).expect_ok();
    let mut client = daemon.client();
    client.files_in(daemon.folder.path());
    client.command(
        "blockdev-add",
        json!({"driver": "qcow2", "node-name": "s", "file": {"driver": "file", "filename": "top"}}),
    );
    let address = json!({"type": "unix", "data": {"path": daemon.path("n.sock")}});
    client.command("nbd-server-start", json!({"addr": address}));
    let export = json!({"type": "nbd", "id": "e", "name": "e", "node-name": "s", "writable": true});
    client.command("block-export-add", export);
    (daemon, client)
}

/// The disk of the source: what was written there, and what the guest writes while the job runs.
fn expected(guest: bool) -> Vec<u8> {
    let mut disk = vec![7u8; 8 * MIB];
    let mut write = |start: usize, len: usize, byte: u8| disk[start..start + len].fill(byte);
    write(6_303_744, 4096, 8);
    write(4 * MIB, 64 << 10, 0);
    write(4160 << 10, 4096, 9);
    if guest {
        write(2_100_224, 4096, 5);
        write(7 * MIB + 512, 1024, 0);
    }
    disk
}

const TARGETS: [(&str, &str); 4] =
    [("qcow2", "cluster_size=2M"), ("qcow2", ""), ("qed", "cluster_size=1M"), ("vmdk", "")];

/// Copies the top to an overlay of this format that is open without its base. `guest`: a client writes while the job is ready.
#[track_caller]
fn copy(command: &str, target: (&str, &str), mode: &Value, guest: bool) {
    copy_through(command, target, None, mode, guest);
}

/// As [`copy`], with a node of this driver between the job and the overlay.
#[track_caller]
fn copy_through(command: &str, (format, options): (&str, &str), above: Option<&str>, mode: &Value, guest: bool) {
    let qemu = Qemu::newest();
    let (daemon, mut client) = with_source();
    let (below, base) = if format == "vmdk" { ("vmdk", "base.vmdk") } else { ("raw", "base") };
    if format == "vmdk" {
        qemu.convert((&daemon.path("base"), "raw"), (&daemon.path(base), "vmdk"), &[]);
    }
    let backing = format!("backing_file={},backing_fmt={below}", daemon.path(base).display());
    let all = [options, &backing].into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join(",");
    qemu.create(&daemon.path("target"), format, &all, 8 << 20);
    let file = json!({"driver": "file", "filename": "target"});
    let name = if above.is_some() { "image" } else { "t" };
    client.command("blockdev-add", json!({"driver": format, "node-name": name, "backing": null, "file": file}));
    if let Some(driver) = above {
        let mut node = json!({"driver": driver, "node-name": "t"});
        match driver {
            "quorum" => {
                node["vote-threshold"] = 1.into();
                node["children"] = json!(["image"]);
            }
            "blkdebug" => node["image"] = "image".into(),
            _ => node["file"] = "image".into(),
        }
        client.command("blockdev-add", node);
    }
    let mut job = json!({"job-id": "j", "device": "s", "target": "t", "sync": "top", "auto-dismiss": false});
    for (key, value) in mode.as_object().expect("keys") {
        job[key] = value.clone();
    }
    client.command(command, job);
    if command == "blockdev-mirror" {
        client.event("BLOCK_JOB_READY");
    }
    if guest {
        let uri = format!("nbd+unix:///e?socket={}", daemon.path("n.sock").display());
        let writes = ["-c", "write -P 5 2100224 4k", "-c", "write -z 7340544 1k"];
        qemu.io(["-f", "raw"].into_iter().chain(writes).chain([uri.as_str()])).expect_ok();
    }
    if command == "blockdev-mirror" {
        client.command("job-complete", json!({"id": "j"}));
    }
    assert_eq!(concluded(&mut client, "j"), None, "{format} {options} {mode}");
    let (folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    let (image, out) = (folder.path().join("target"), folder.path().join("out"));
    qemu.convert((&image, format), (&out, "raw"), &[]);
    let disk = std::fs::read(out).expect("a disk");
    let wrong = disk.iter().zip(expected(guest)).position(|(is, wanted)| *is != wanted);
    assert_eq!((disk.len(), wrong), (8 * MIB, None), "{command} {format} {options} {above:?} {mode}");
}

#[test]
fn nodes_that_pass_bytes_on_hide_no_clusters() {
    for driver in ["raw", "blkdebug", "quorum"] {
        for target in [("qcow2", "cluster_size=2M"), ("qed", "cluster_size=1M")] {
            copy_through("blockdev-backup", target, Some(driver), &json!({}), false);
            copy_through("blockdev-mirror", target, Some(driver), &json!({"granularity": 4096}), true);
        }
    }
}

#[test]
fn target_without_its_backing_file_gets_whole_clusters() {
    for target in TARGETS {
        copy("blockdev-mirror", target, &json!({}), false);
        copy("blockdev-mirror", target, &json!({"granularity": 4096}), true);
        copy("blockdev-mirror", target, &json!({"copy-mode": "write-blocking", "granularity": 4096}), true);
        copy("blockdev-backup", target, &json!({}), false);
    }
}
