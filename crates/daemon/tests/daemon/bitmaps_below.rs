// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Settings of nodes that store other nodes' data, to whose files formats and raw images go directly: dirty bitmaps, `discard`.

use super::exports::uri;
use super::running::{Client, Running};
use cowshed_testkit::qemu::Qemu;
use serde_json::{Value, json};

const SIZE: u64 = 8 << 20;

/// The options of the disk `n`, stored in the node `f` (file `a`) in some way, and the format of the file.
fn disks() -> Vec<(&'static str, &'static str, Value)> {
    let over_raw =
        json!({"driver": "qcow2", "node-name": "n", "file": {"driver": "raw", "node-name": "r", "file": "f"}});
    let throttle = json!({"driver": "throttle", "throttle-group": "g", "file": "f"});
    vec![
        ("raw", "", json!({"driver": "raw", "node-name": "n", "file": "f"})),
        ("raw", "", json!({"driver": "raw", "node-name": "n", "file": "f", "offset": 1 << 20, "size": 4 << 20})),
        ("raw", "", json!({"driver": "blkdebug", "node-name": "n", "image": "f"})),
        ("raw", "", json!({"driver": "raw", "node-name": "n", "file": throttle})),
        ("qcow2", "", json!({"driver": "qcow2", "node-name": "n", "file": "f"})),
        ("qcow2", "", over_raw),
        ("vmdk", "", json!({"driver": "vmdk", "node-name": "n", "file": "f"})),
        (
            "luks",
            "key-secret=s,iter-time=10",
            json!({"driver": "luks", "node-name": "n", "key-secret": "s", "file": "f"}),
        ),
    ]
}

fn count(client: &mut Client, node: &str) -> u64 {
    let nodes = client.command("query-named-block-nodes", json!({"flat": true}));
    let node =
        nodes.as_array().expect("nodes").iter().find(|found| found["node-name"] == node).expect("the node").clone();
    node["dirty-bitmaps"][0]["count"].as_u64().expect("a count")
}

/// A full copy of the file, writes through the disk, then an incremental backup of the file by its bitmap.
fn copied_by_a_bitmap(format: &str, create: &str, disk: &Value, bitmap_of: &str) {
    let (daemon, qemu) = (Running::start(Vec::new()), Qemu::newest());
    let mut client = daemon.client();
    let (file, copy) = (daemon.path("a"), daemon.path("t"));
    let name = file.to_str().expect("text");
    let size = SIZE.to_string();
    let mut arguments = vec!["create", "-q", "-f", format, "--object", "secret,id=s,data=x"];
    if !create.is_empty() {
        arguments.extend(["-o", create]);
    }
    arguments.extend([name, &size]);
    qemu.img(arguments).expect_ok();
    client.command("object-add", json!({"qom-type": "secret", "id": "s", "data": "x"}));
    client.command("object-add", json!({"qom-type": "throttle-group", "id": "g"}));
    client.command("blockdev-add", json!({"driver": "file", "node-name": "f", "filename": file}));
    client.command("blockdev-add", disk.clone());
    let socket = daemon.path("n.sock");
    client.command("nbd-server-start", json!({"addr": {"type": "unix", "data": {"path": socket}}}));
    client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "n", "writable": true}));
    let write = |commands: &[&str]| {
        let uri = uri(&daemon, "n");
        let mut arguments = vec!["-f", "raw"];
        commands.iter().for_each(|command| arguments.extend(["-c", command]));
        arguments.push(&uri);
        assert!(!qemu.io(arguments).expect_ok().stdout.contains("failed"));
    };
    write(&["write -P 1 512k 64k", "write -P 2 3M 64k", "flush"]);
    std::fs::copy(&file, &copy).expect("a copy");
    client.command("block-dirty-bitmap-add", json!({"node": bitmap_of, "name": "b", "granularity": 65536}));
    write(&["write -P 3 1M 64k", "write -P 4 1600k 100", "write -z 3M 64k", "discard 512k 64k", "flush"]);
    client.command("block-export-del", json!({"id": "e", "mode": "hard"}));
    client.event("BLOCK_EXPORT_DELETED");
    if disk["driver"] == "raw" && disk.get("size").is_none() {
        assert_eq!(count(&mut client, bitmap_of), 3 * 65536, "{disk}");
    }
    if bitmap_of == "f" {
        client.command("blockdev-del", json!({"node-name": "n"}));
        // The copy has the length that the file has now.
        let length = std::fs::metadata(&file).expect("the file").len();
        std::fs::File::options().write(true).open(&copy).and_then(|copy| copy.set_len(length)).expect("a length");
        client.command("blockdev-add", json!({"driver": "file", "node-name": "t", "filename": copy}));
        let backup = json!({"job-id": "j", "device": "f", "target": "t", "sync": "incremental", "bitmap": "b"});
        client.command("blockdev-backup", backup);
        let completed = client.event("BLOCK_JOB_COMPLETED");
        assert!(completed.get("error").is_none(), "{disk}: {completed}");
        assert!(completed["len"].as_u64() < Some(SIZE / 2), "{disk}: only dirty parts are copied: {completed}");
        // The copy ends with a whole sector.
        let (mut data, copied) = (std::fs::read(&file).unwrap(), std::fs::read(&copy).unwrap());
        data.resize(data.len().next_multiple_of(512), 0);
        assert!(data == copied, "{disk}: the copy lacks a write");
    } else {
        assert!(count(&mut client, bitmap_of) >= 3 * 65536, "{disk}");
    }
    daemon.stop().expect("stopped in order");
}

#[test]
fn a_bitmap_of_a_file_records_writes_of_formats_above() {
    for (format, create, disk) in disks() {
        copied_by_a_bitmap(format, create, &disk, "f");
    }
}

#[test]
fn a_bitmap_below_a_format_records_its_writes() {
    for (format, create, disk) in disks().into_iter().filter(|(_, _, disk)| disk["file"]["node-name"] == "r") {
        copied_by_a_bitmap(format, create, &disk, "r");
    }
}

/// The data file of a qcow2 image holds its guest's data.
#[test]
fn a_bitmap_of_a_data_file_records_writes() {
    let (daemon, qemu) = (Running::start(Vec::new()), Qemu::newest());
    let mut client = daemon.client();
    let (image, data) = (daemon.path("a"), daemon.path("d"));
    let options = format!("data_file={},data_file_raw=on", data.display());
    qemu.create(&image, "qcow2", &options, SIZE);
    client.command("blockdev-add", json!({"driver": "file", "node-name": "d", "filename": data}));
    let file = json!({"driver": "file", "filename": image});
    client.command("blockdev-add", json!({"driver": "qcow2", "node-name": "n", "file": file, "data-file": "d"}));
    let socket = daemon.path("n.sock");
    client.command("nbd-server-start", json!({"addr": {"type": "unix", "data": {"path": socket}}}));
    client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "n", "writable": true}));
    client.command("block-dirty-bitmap-add", json!({"node": "d", "name": "b", "granularity": 65536}));
    qemu.io(["-f", "raw", "-c", "write 1M 64k", "-c", "write -z 3M 64k", "-c", "flush", &uri(&daemon, "n")])
        .expect_ok();
    assert_eq!(count(&mut client, "d"), 2 * 65536);
    // Past its own writes too, until it is told not to.
    client.command("block-dirty-bitmap-disable", json!({"node": "d", "name": "b"}));
    qemu.io(["-f", "raw", "-c", "write 2M 64k", &uri(&daemon, "n")]).expect_ok();
    assert_eq!(count(&mut client, "d"), 2 * 65536);
    daemon.stop().expect("stopped in order");
}

/// Its own setting counts, which is "ignore" for a node that is named, whatever the nodes above pass on.
#[test]
fn a_named_file_ignores_discards_until_told_otherwise() {
    for format in ["raw", "qcow2", "vdi", "vmdk"] {
        let (daemon, qemu) = (Running::start(Vec::new()), Qemu::newest());
        let mut client = daemon.client();
        let file = daemon.path("a");
        qemu.create(&file, format, "", SIZE);
        qemu.io_commands(&file, format, &["write -P 1 0 8M".to_owned()]).expect_ok();
        let blocks = || std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&file).expect("the file"));
        let before = blocks();
        client.command("blockdev-add", json!({"driver": "file", "node-name": "f", "filename": file}));
        client.command("blockdev-add", json!({"driver": format, "node-name": "n", "file": "f", "discard": "unmap"}));
        let socket = daemon.path("n.sock");
        client.command("nbd-server-start", json!({"addr": {"type": "unix", "data": {"path": socket}}}));
        client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "n", "writable": true}));
        let discard = |commands: [&str; 3]| {
            let commands = commands.iter().flat_map(|command| ["-c", command]);
            qemu.io(["-f", "raw", "-d", "unmap"].into_iter().chain(commands).chain([uri(&daemon, "n").as_str()]))
                .expect_ok();
        };
        discard(["discard 0 1M", "write -z -u 2M 1M", "flush"]);
        assert!(blocks() >= before, "{format}: {before} {}", blocks());
        let options = json!({"driver": "file", "node-name": "f", "filename": file, "discard": "unmap"});
        client.command("blockdev-reopen", json!({"options": [options]}));
        discard(["discard 4M 1M", "write -z -u 6M 1M", "flush"]);
        assert!(blocks() <= before - (1 << 20) / 512, "{format}: {before} {}", blocks());
        daemon.stop().expect("stopped in order");
    }
}

#[test]
fn thresholds_and_counts_below_a_format_see_its_writes() {
    let (daemon, qemu) = (Running::start(Vec::new()), Qemu::newest());
    let mut client = daemon.client();
    let image = daemon.path("a");
    qemu.create(&image, "qcow2", "", SIZE);
    client.command("blockdev-add", json!({"driver": "file", "node-name": "f", "filename": image}));
    let faulty = json!({"driver": "blkdebug", "image": "f"});
    client.command("blockdev-add", json!({"driver": "raw", "node-name": "r", "file": faulty}));
    client.command("blockdev-add", json!({"driver": "qcow2", "node-name": "n", "file": "r"}));
    let socket = daemon.path("n.sock");
    client.command("nbd-server-start", json!({"addr": {"type": "unix", "data": {"path": socket}}}));
    client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "n", "writable": true}));
    client.command("block-set-write-threshold", json!({"node-name": "r", "write-threshold": 4096}));
    qemu.io(["-f", "raw", "-c", "write 1M 64k", "-c", "flush", &uri(&daemon, "n")]).expect_ok();
    assert_eq!(client.event("BLOCK_WRITE_THRESHOLD")["node-name"], "r");
    let stats = client.command("query-blockstats", json!({"query-nodes": true}));
    let file = stats.as_array().expect("nodes").iter().find(|node| node["node-name"] == "f").expect("the file");
    assert!(file["stats"]["wr_bytes"].as_u64() >= Some(65536), "{file}");
    daemon.stop().expect("stopped in order");
}

/// A bitmap and a threshold leave the file that the disk is moved away from.
#[test]
fn observers_of_a_raw_disk_follow_it_to_another_file() {
    let (daemon, qemu) = (Running::start(Vec::new()), Qemu::newest());
    let mut client = daemon.client();
    for (node, name) in [("fa", "a"), ("fb", "b")] {
        qemu.create(&daemon.path(name), "raw", "", SIZE);
        client.command("blockdev-add", json!({"driver": "file", "node-name": node, "filename": daemon.path(name)}));
    }
    client.command("blockdev-add", json!({"driver": "raw", "node-name": "r", "file": "fa"}));
    client.command("block-dirty-bitmap-add", json!({"node": "r", "name": "b"}));
    client.command("block-set-write-threshold", json!({"node-name": "r", "write-threshold": 4096}));
    let moved = json!({"options": [{"driver": "raw", "node-name": "r", "file": "fb"}]});
    client.command("blockdev-reopen", moved);
    let socket = daemon.path("n.sock");
    client.command("nbd-server-start", json!({"addr": {"type": "unix", "data": {"path": socket}}}));
    for node in ["fa", "r"] {
        client.command("block-export-add", json!({"type": "nbd", "id": node, "node-name": node, "writable": true}));
    }
    let mut state = || {
        let nodes = client.command("query-named-block-nodes", json!({"flat": true}));
        let raw =
            nodes.as_array().expect("nodes").iter().find(|node| node["node-name"] == "r").expect("the disk").clone();
        (raw["write_threshold"].clone(), raw["dirty-bitmaps"][0]["count"].clone())
    };
    qemu.io(["-f", "raw", "-c", "write 1M 64k", "-c", "flush", &uri(&daemon, "fa")]).expect_ok();
    assert_eq!(state(), (json!(4096), json!(0)), "after a write to the file that it left");
    qemu.io(["-f", "raw", "-c", "write 1M 64k", "-c", "flush", &uri(&daemon, "r")]).expect_ok();
    assert_eq!(state(), (json!(0), json!(65536)), "after a write to the disk");
    daemon.stop().expect("stopped in order");
}
