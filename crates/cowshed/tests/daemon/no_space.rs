// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A daemon that runs out of space. While it makes an image no part of one stays, and under clients nothing is lost.

use super::process::{COWSHED, Monitor, Serving, text};
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_testkit::vhost::FrontEnd;
use cowshed_testkit::waiting::await_some;
use serde_json::{Value, json};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A daemon none of whose files may grow over `limit` bytes; its disk holds 4 MiB.
fn start(folder: &Path, limit: u64) -> (Serving, Monitor) {
    let disk = folder.join("disk.qcow2");
    Qemu::system().create(&disk, "qcow2", "", 4 << 20);
    Qemu::system().io_commands(&disk, "qcow2", &["write -P 9 0 4M".to_owned()]).expect_ok();
    let mut command = Command::new("prlimit");
    command.arg(format!("--fsize={limit}")).arg(COWSHED);
    command.args(["serve", "-x", "disk", "-k", "n.sock", "--monitor", "m.sock"]);
    command.args(["--drive", "file=disk.qcow2,id=disk"]);
    let mut daemon = Serving::start_command(folder, command);
    while !daemon.line().starts_with("QMP") {}
    (daemon, Monitor::connect(&folder.join("m.sock")))
}

/// Waits for the end of the job `k`; its error.
fn error_of_job(monitor: &mut Monitor) -> String {
    let jobs = await_some("the end of the job", || {
        let jobs = monitor.command("query-jobs", json!({}));
        (jobs[0]["status"] == "concluded").then_some(jobs)
    });
    monitor.command("job-dismiss", json!({"id": "k"}));
    jobs[0]["error"].as_str().unwrap_or_else(|| panic!("it must fail: {jobs}")).to_owned()
}

fn files(folder: &Path) -> Vec<String> {
    let list = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("a file").file_name());
    let mut names: Vec<String> = list.map(|name| name.into_string().expect("text")).collect();
    names.sort();
    names
}

#[test]
fn a_job_without_space_leaves_no_file() {
    let folder = temp_dir();
    let (daemon, mut monitor) = start(folder.path(), 1 << 20);
    let before = files(folder.path());
    let new = folder.path().join("new");
    let drive = |format: &str| {
        json!({"job-id": "k", "device": "disk", "target": new, "format": format,
                                      "sync": "full", "auto-dismiss": false})
    };
    let file = json!({"driver": "file", "filename": new, "size": 4 << 20, "preallocation": "full"});
    let jobs: [(&str, Value); 3] = [
        ("drive-backup", drive("qcow2")),
        ("drive-mirror", drive("qcow2")),
        ("blockdev-create", json!({"job-id": "k", "options": file})),
    ];
    for (command, arguments) in jobs {
        monitor.command(command, arguments);
        let error = error_of_job(&mut monitor);
        assert!(error.contains("File too large"), "{command}: {error}");
        assert_eq!(files(folder.path()), before, "{command}");
    }
    // An older file is another owner's; bytes that a job has written into it stay, as with QEMU.
    for (command, before) in [("drive-backup", "qcow2"), ("drive-mirror", "qcow2")] {
        Qemu::system().create(&new, before, "", 4 << 20);
        let mut arguments = drive("qcow2");
        arguments["mode"] = json!("existing");
        monitor.command(command, arguments);
        error_of_job(&mut monitor);
        assert!(new.exists(), "{command}");
    }
    daemon.stop();
}

#[test]
fn a_command_without_space_leaves_no_file() {
    let folder = temp_dir();
    let (daemon, mut monitor) = start(folder.path(), 100 << 10);
    let before = files(folder.path());
    let new = folder.path().join("new");
    let snapshot = json!({"device": "disk", "snapshot-file": new, "snapshot-node-name": "o"});
    let drive = json!({"job-id": "k", "device": "disk", "target": new, "format": "raw", "sync": "full"});
    let abort = json!({"type": "abort", "data": {}});
    let action = |kind: &str, data: &Value| json!({"type": kind, "data": data});
    let calls = [
        ("blockdev-snapshot-sync", snapshot.clone()),
        ("drive-backup", drive.clone()),
        ("drive-mirror", drive.clone()),
        ("transaction", json!({"actions": [action("blockdev-snapshot-sync", &snapshot), abort]})),
        ("transaction", json!({"actions": [action("drive-backup", &drive), abort]})),
    ];
    for (command, arguments) in calls {
        let refusal = monitor.refusal(command, &arguments);
        assert!(refusal.contains("File too large"), "{command}: {refusal}");
        assert_eq!(files(folder.path()), before, "{command}");
    }
    daemon.stop();
}

/// An image on a file system of 2 MiB, in mounts of its own, with a file whose removal makes room.
const SMALL: &str = "mkdir full && mount -t tmpfs -o size=2m none full && head -c 1M /dev/zero >full/filler && : >m
    \"$0\" create -q -f qcow2 full/d.qcow2 16M && \"$0\" serve -k n.sock --monitor m.sock --drive file=full/d.qcow2,id=d \\
        --export vhost-user-blk,id=v,node-name=d,addr.type=unix,addr.path=v.sock,writable=on \\
        --export fuse,id=f,node-name=d,mountpoint=m,writable=on,allow-other=off
    cp full/d.qcow2 after.qcow2";

#[test]
fn requests_without_space_fail_and_those_behind_go_on() {
    const WRITE: u32 = 1;
    const FLUSH: u32 = 4;
    const LEN: usize = 32 << 10;
    let folder = temp_dir();
    let folder = folder.path().canonicalize().expect("a path");
    let mut command = Command::new("unshare");
    command.args(["-rm", "sh", "-c", SMALL, COWSHED]);
    let mut daemon = Serving::start_command(&folder, command);
    while !daemon.line().starts_with("QMP") {}
    let mut monitor = Monitor::connect(&folder.join("m.sock"));
    let inside = PathBuf::from(format!("/proc/{}/root{}", daemon.child().id(), text(&folder)));
    let mut driver = FrontEnd::resume(&folder.join("v.sock"), None, &mut None);
    let value = |place: u64| place as u8 + 1;
    let mut write = |place: u64| driver.request(WRITE, place * 128, &[value(place); LEN], 0).0;
    let full = (0..200).find(|place| write(*place) != 0).expect("the file system is full");
    assert!(full > 10, "{full} writes have space");
    assert_ne!(write(full + 1), 0, "it stays full");
    assert_eq!(driver.request(FLUSH, 0, &[], 0).0, 0, "what was acknowledged has its space");
    let file = File::options().read(true).write(true).open(inside.join("m")).expect("it opens");
    let error = file.write_all_at(&[9; LEN], 15 << 20).expect_err("no space");
    assert_eq!(error.raw_os_error(), Some(28));
    std::fs::remove_file(inside.join("full/filler")).expect("room");
    assert_eq!(driver.request(WRITE, full * 128, &[value(full); LEN], 0).0, 0);
    file.write_all_at(&[9; LEN], 15 << 20).and_then(|()| file.sync_all()).expect("there is space");
    for place in 0..=full {
        assert!(driver.request(0, place * 128, &[], LEN as u32) == (0, vec![value(place); LEN]), "place {place}");
    }
    assert_eq!(driver.request(FLUSH, 0, &[], 0).0, 0);
    drop((file, driver));
    monitor.command("quit", json!({}));
    let log = daemon.log();
    assert!(daemon.wait().success(), "{log}");
    let after = folder.join("after.qcow2");
    Qemu::system().expect_no_corruption(&after);
    let disk = Qemu::system().content(&after, "qcow2");
    assert!((0..=full).all(|place| disk[(place as usize) << 16..][..LEN] == [value(place); LEN]));
    assert!(disk[15 << 20..][..LEN] == [9; LEN]);
}
