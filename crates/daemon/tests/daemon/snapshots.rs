// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Live snapshots by command, under a client that goes on writing.

use super::exports::{node, serving, uri};
use super::running::Running;
use cowshed_testkit::qemu::Qemu;
use serde_json::json;
use std::path::Path;
use std::process::{Command, Stdio};

#[test]
fn a_snapshot_under_a_writing_client_loses_nothing() {
    let (daemon, mut client) = serving();
    client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "q", "writable": true}));
    let qemu = Qemu::system();
    let uri = uri(&daemon, "q");
    // 512 requests, each with its own pattern, while snapshots are taken.
    let commands: Vec<String> =
        (0..512).flat_map(|n| ["-c".to_owned(), format!("write -P {} {}k 32k", n % 255 + 1, n * 32)]).collect();
    let mut writer = Command::new(qemu.io_path())
        .args(["-f", "raw"])
        .args(&commands)
        .arg(&uri)
        .stdout(Stdio::null())
        .spawn()
        .expect("qemu-io runs");
    let mut top = "q".to_owned();
    for n in 0..4 {
        let overlay = format!("s{n}");
        let arguments = json!({"device": "e", "snapshot-file": daemon.path(&format!("{overlay}.qcow2")),
                               "snapshot-node-name": overlay});
        client.command("blockdev-snapshot-sync", arguments);
        let exports = client.command("query-block-exports", json!({}));
        assert_eq!(exports[0]["node-name"], overlay.as_str(), "{exports}");
        top = overlay;
    }
    assert!(writer.wait().expect("qemu-io ends").success(), "no request may fail");
    let reads: Vec<String> =
        (0..512).flat_map(|n| ["-c".to_owned(), format!("read -P {} {}k 32k", n % 255 + 1, n * 32)]).collect();
    let mut arguments = vec!["-f".to_owned(), "raw".to_owned()];
    arguments.extend(reads.clone());
    arguments.push(uri);
    let output = qemu.io(&arguments).expect_ok();
    assert!(!output.stdout.contains("failed"), "{}", output.stdout);
    check_chain(daemon, &top, &reads);
}

/// The image as QEMU sees it once the daemon has ended.
fn check_chain(daemon: super::running::Running, top: &str, reads: &[String]) {
    let qemu = Qemu::system();
    let path = daemon.path(&format!("{top}.qcow2"));
    let (folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    let chain = qemu.img(["info", "--backing-chain", "--output=json", path.to_str().expect("text")]).expect_ok();
    assert_eq!(chain.json().as_array().expect("a list").len(), 5);
    for entry in std::fs::read_dir(folder.path()).expect("a folder") {
        let file = entry.expect("an entry").path();
        if file.extension().is_some_and(|end| end == "qcow2") {
            qemu.expect_clean(&file);
        }
    }
    let commands: Vec<String> = reads.iter().filter(|word| *word != "-c").cloned().collect();
    qemu.io_commands(&path, "qcow2", &commands);
}

#[test]
fn an_overlay_that_was_added_takes_over() {
    let (daemon, mut client) = serving();
    client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "q", "writable": true}));
    let base = daemon.path("a.qcow2");
    let over = daemon.path("over.qcow2");
    let qemu = Qemu::system();
    qemu.io(["-f", "raw", "-c", "write -P 1 0 1M", &uri(&daemon, "q")]).expect_ok();
    let options = format!("backing_file={},backing_fmt=qcow2", base.display());
    let created = qemu.img(["create", "-q", "-u", "-f", "qcow2", "-o", &options, over.to_str().expect("text"), "16M"]);
    created.expect_ok();
    let mut overlay = node(&over, "over");
    overlay["backing"] = json!(null);
    client.command("blockdev-add", overlay);
    client.command("blockdev-snapshot", json!({"node": "q", "overlay": "over"}));
    qemu.io(["-f", "raw", "-c", "write -P 2 64k 64k", &uri(&daemon, "q")]).expect_ok();
    assert!(client.refusal("blockdev-snapshot", json!({"node": "over", "overlay": "q"})).contains("already in use"));
    assert!(client.refusal("blockdev-snapshot", json!({"node": "over", "overlay": "none"})).contains("Cannot find"));
    let (_folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    qemu.io_commands(&over, "qcow2", &["read -P 2 64k 64k".into(), "read -P 1 0 64k".into()]);
    qemu.io_commands(&base, "qcow2", &["read -P 1 0 1M".into()]);
}

#[test]
fn read_only_overlay_takes_over_an_unwritten_disk() {
    let (daemon, mut client) = serving();
    let over = daemon.path("over.qcow2");
    Qemu::system().create(&over, "qcow2", "", 16 << 20);
    let mut overlay = node(&over, "over");
    overlay["read-only"] = json!(true);
    client.command("blockdev-add", overlay);
    client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "q", "writable": true}));
    let take = json!({"node": "q", "overlay": "over"});
    assert_eq!(client.refusal("blockdev-snapshot", take.clone()), "Block node is read-only");
    client.command("block-export-del", json!({"id": "e"}));
    client.event("BLOCK_EXPORT_DELETED");
    client.command("blockdev-snapshot", take);
    let refused =
        client.refusal("block-export-add", json!({"type": "nbd", "id": "f", "node-name": "over", "writable": true}));
    assert!(refused.contains("read-only"), "{refused}");
}

#[test]
fn a_transaction_takes_all_or_none() {
    let (daemon, mut client) = serving();
    Qemu::system().create(&daemon.path("b.qcow2"), "qcow2", "", 1 << 20);
    client.command("blockdev-add", node(&daemon.path("b.qcow2"), "b"));
    client.command("block-export-add", json!({"type": "nbd", "id": "f", "node-name": "b"}));
    let snapshot = |name: &str, file: &str| {
        json!({"type": "blockdev-snapshot-sync", "data": {"node-name": name, "snapshot-file": daemon.path(file),
               "snapshot-node-name": format!("over-{name}")}})
    };
    let abort = json!({"type": "abort", "data": {}});
    let before = client.command("query-named-block-nodes", json!({}));
    let all =
        |last: serde_json::Value| json!({"actions": [snapshot("q", "q1.qcow2"), snapshot("b", "b1.qcow2"), last]});
    assert_eq!(client.refusal("transaction", all(abort)), "Transaction aborted using Abort action");
    // The last one can't be taken when the first ones have been.
    let again = json!({"type": "blockdev-snapshot", "data": {"node": "b", "overlay": "q"}});
    client.refusal("transaction", all(again));
    assert_eq!(client.command("query-named-block-nodes", json!({})), before);
    assert!(!daemon.path("q1.qcow2").exists() && !daemon.path("b1.qcow2").exists());
    let both = json!({"actions": [snapshot("q", "q1.qcow2"), snapshot("b", "b1.qcow2")]});
    client.command("transaction", both);
    let nodes = client.command("query-named-block-nodes", json!({"flat": true}));
    let over = nodes.as_array().expect("a list").iter().find(|node| node["node-name"] == "over-b").expect("is there");
    assert_eq!(over["backing_file"], json!(daemon.path("b.qcow2")));
    daemon.stop().expect("stopped in order");
}

#[test]
fn an_overlay_replaces_an_unused_file_and_no_other() {
    let (daemon, mut client) = serving();
    let other = Running::start(Vec::new());
    let mut theirs = other.client();
    let (old, used, link) = (daemon.path("old"), daemon.path("used"), daemon.path("link"));
    std::fs::write(&old, "data").expect("a file");
    Qemu::system().create(&used, "qcow2", "", 1 << 20);
    std::os::unix::fs::symlink(&old, &link).expect("a link");
    theirs.command("blockdev-add", node(&used, "n"));
    let snapshot =
        |file: &Path, name: &str| json!({"node-name": "q", "snapshot-file": file, "snapshot-node-name": name});
    // An image of another process, the disk itself, and a file that a link leads to.
    for (file, words) in
        [(&used, "lock"), (&daemon.path("a.qcow2"), "same filename as the backing file"), (&link, "mode 'existing'")]
    {
        let before = std::fs::read(file).expect("a file");
        let refusal = client.refusal("blockdev-snapshot-sync", snapshot(file, "o"));
        assert!(refusal.contains(words), "{refusal}");
        assert!(std::fs::read(file).expect("a file") == before, "{}", file.display());
    }
    client.command("blockdev-snapshot-sync", snapshot(&old, "o"));
    other.stop().expect("stopped in order");
    let (_folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    Qemu::system().expect_clean(&old);
    let info = Qemu::system().info(&old, "qcow2");
    assert!(info["backing-filename"].as_str().is_some_and(|name| name.ends_with("a.qcow2")), "{info}");
}

#[test]
fn a_header_names_another_backing_file() {
    let (daemon, mut client) = serving();
    let over = daemon.path("over.qcow2");
    client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "q", "writable": true}));
    let snapshot = json!({"node-name": "q", "snapshot-file": over, "snapshot-node-name": "over"});
    client.command("blockdev-snapshot-sync", snapshot);
    let change = |node: &str| json!({"device": "over", "image-node-name": node, "backing-file": "a.qcow2"});
    assert!(client.refusal("change-backing-file", change("z")).contains("Cannot find device='' nor node-name='z'"));
    assert!(client.refusal("change-backing-file", change("q")).contains("an image without a backing file"));
    client.command("change-backing-file", change("over"));
    let (_folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    let info = Qemu::system().info(&over, "qcow2");
    assert_eq!((&info["backing-filename"], &info["backing-filename-format"]), (&json!("a.qcow2"), &json!("qcow2")));
}

/// The nodes and the files that this process has open, without those of other tests.
fn open_now(client: &mut super::running::Client, folder: &std::path::Path) -> (Vec<String>, Vec<String>) {
    let nodes = client.command("query-named-block-nodes", json!({"flat": true}));
    let names = nodes.as_array().expect("a list").iter().filter_map(|node| node["node-name"].as_str());
    let names = names.filter(|name| !name.starts_with('#')).map(str::to_owned).collect();
    let links =
        std::fs::read_dir("/proc/self/fd").expect("a folder").filter_map(|entry| entry.ok()?.path().read_link().ok());
    let mut files: Vec<String> = links
        .filter(|file| file.starts_with(folder) && file.extension().is_some_and(|end| end == "qcow2"))
        .map(|file| file.display().to_string())
        .collect();
    files.sort();
    (names, files)
}

#[test]
fn nightly_snapshot_and_commit_leave_nothing_behind() {
    let (daemon, mut client) = serving();
    client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "q", "writable": true}));
    let (qemu, uri) = (Qemu::system(), uri(&daemon, "q"));
    let before = open_now(&mut client, daemon.folder.path());
    for night in 0..3 {
        let overlay = daemon.path("night.qcow2");
        let arguments = json!({"device": "e", "snapshot-file": overlay, "snapshot-node-name": "night"});
        client.command("blockdev-snapshot-sync", arguments);
        let write = format!("write -P {} {night}M 1M", night + 1);
        qemu.io(["-f", "raw", "-c", &write, &uri]).expect_ok();
        client.command("block-commit", json!({"device": "e", "job-id": "c"}));
        client.event("BLOCK_JOB_READY");
        client.command("job-complete", json!({"id": "c"}));
        let completed = client.event("BLOCK_JOB_COMPLETED");
        assert!(completed.get("error").is_none(), "{completed}");
        assert_eq!(open_now(&mut client, daemon.folder.path()), before, "night {night}");
        std::fs::remove_file(overlay).expect("it is closed");
    }
    let path = daemon.path("a.qcow2");
    let (_folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    qemu.expect_clean(&path);
    let reads = (0..3).map(|night| format!("read -P {} {night}M 1M", night + 1)).collect::<Vec<_>>();
    let said = qemu.io_commands(&path, "qcow2", &reads).expect_ok();
    assert!(!said.stdout.contains("failed"), "{}", said.stdout);
}

/// `device` means the disk of the export, wherever that is now; `node-name` means the node.
#[test]
fn a_device_is_where_its_export_is_in_every_command() {
    let (daemon, mut client) = serving();
    client.command("block-export-add", json!({"type": "nbd", "id": "q", "node-name": "q", "writable": true}));
    let target = daemon.path("t.qcow2");
    Qemu::system().create(&target, "qcow2", "", 16 << 20);
    client.command("blockdev-add", node(&target, "t"));
    client.command("blockdev-mirror", json!({"device": "q", "target": "t", "sync": "full", "job-id": "m"}));
    client.event("BLOCK_JOB_READY");
    client.command("job-complete", json!({"id": "m"}));
    client.event("BLOCK_JOB_COMPLETED");
    let size = |client: &mut super::running::Client, name: &str| {
        let nodes = client.command("query-named-block-nodes", json!({"flat": true}));
        let found = nodes.as_array().expect("a list").iter().find(|node| node["node-name"] == name).expect("is there");
        found["image"]["virtual-size"].as_u64().expect("a size")
    };
    client.command("block_resize", json!({"device": "q", "size": 20 << 20}));
    assert_eq!((size(&mut client, "q"), size(&mut client, "t")), (16 << 20, 20 << 20));
    client.command("block_resize", json!({"node-name": "q", "size": 18 << 20}));
    assert_eq!((size(&mut client, "q"), size(&mut client, "t")), (18 << 20, 20 << 20));
    // Each of these works on the export's disk, `t`.
    let on_disk = |client: &mut super::running::Client| {
        let blocks = client.command("query-named-block-nodes", json!({"flat": true}));
        let found = blocks.as_array().expect("a list").iter().find(|node| node["node-name"] == "t").expect("is there");
        found.clone()
    };
    client.command("blockdev-snapshot-internal-sync", json!({"device": "q", "name": "s"}));
    assert_eq!(on_disk(&mut client)["image"]["snapshots"][0]["name"], "s");
    client.command("blockdev-snapshot-delete-internal-sync", json!({"device": "q", "name": "s"}));
    assert_eq!(on_disk(&mut client)["image"].get("snapshots"), None);
    client.command("block-latency-histogram-set", json!({"id": "q", "boundaries": [10, 20]}));
    let limits = json!({"device": "q", "bps": 0, "bps_rd": 0, "bps_wr": 0, "iops": 1000, "iops_rd": 0, "iops_wr": 0});
    client.command("block_set_io_throttle", limits);
    client.command("blockdev-snapshot-sync", json!({"device": "q", "snapshot-file": daemon.path("s.qcow2")}));
    assert_eq!(on_disk(&mut client)["ro"], true);
    client.command("block-stream", json!({"device": "q", "job-id": "s"}));
    client.event("BLOCK_JOB_COMPLETED");
    daemon.stop().expect("stopped in order");
}

#[test]
fn a_read_only_overlay_takes_over_without_writers() {
    let (daemon, mut client) = serving();
    let over = daemon.path("over.qcow2");
    Qemu::system().create(&over, "qcow2", "", 16 << 20);
    let mut overlay = node(&over, "over");
    overlay["read-only"] = json!(true);
    overlay["backing"] = serde_json::Value::Null;
    client.command("blockdev-add", overlay);
    client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "q", "writable": true}));
    let snapshot = json!({"node": "q", "overlay": "over"});
    assert_eq!(client.refusal("blockdev-snapshot", snapshot.clone()), "Block node is read-only");
    client.command("block-export-del", json!({"id": "e"}));
    client.event("BLOCK_EXPORT_DELETED");
    client.command("blockdev-snapshot", snapshot);
    daemon.stop().expect("stopped in order");
}
