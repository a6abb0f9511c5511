// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Nodes by command.

use super::running::Running;
use cowshed_testkit::qemu::Qemu;
use serde_json::json;

fn with_image() -> Running {
    let daemon = Running::start(Vec::new());
    Qemu::system().create(&daemon.path("a.qcow2"), "qcow2", "", 64 << 20);
    daemon
}

#[test]
fn nodes_are_added_listed_resized_and_deleted() {
    let daemon = with_image();
    let mut client = daemon.client();
    let file = json!({"driver": "file", "filename": daemon.path("a.qcow2")});
    client.command("blockdev-add", json!({"driver": "qcow2", "node-name": "q", "file": file}));
    let nodes = client.command("query-named-block-nodes", json!({}));
    let node =
        nodes.as_array().expect("a list").iter().find(|node| node["node-name"] == "q").expect("is listed").clone();
    assert_eq!(node["image"]["virtual-size"], 64 << 20);
    assert_eq!((&node["drv"], &node["ro"], &node["encrypted"]), (&json!("qcow2"), &json!(false), &json!(false)));
    assert_eq!(node["children"].as_array().expect("a list").len(), 1);

    client.command("block_resize", json!({"node-name": "q", "size": 128 << 20}));
    let nodes = client.command("query-named-block-nodes", json!({"flat": true}));
    let sizes: Vec<u64> =
        nodes.as_array().expect("a list").iter().filter_map(|n| n["image"]["virtual-size"].as_u64()).collect();
    assert!(sizes.contains(&(128 << 20)), "{nodes}");

    client.command("blockdev-del", json!({"node-name": "q"}));
    assert_eq!(client.command("query-named-block-nodes", json!({})), json!([]));
    // The lock is given back.
    assert_eq!(Qemu::system().info(&daemon.path("a.qcow2"), "qcow2")["virtual-size"], 128 << 20);
    daemon.stop().expect("stopped in order");
}

#[test]
fn refusals_are_worded_as_qemu_does_and_change_nothing() {
    let daemon = with_image();
    let mut client = daemon.client();
    let path = daemon.path("a.qcow2");
    let qcow2 =
        |name: &str| json!({"driver": "qcow2", "node-name": name, "file": {"driver": "file", "filename": path}});
    client.command("blockdev-add", qcow2("q"));
    let before = client.command("query-named-block-nodes", json!({}));
    assert_eq!(client.refusal("blockdev-add", qcow2("q")), "Duplicate nodes with node-name='q'");
    assert!(client.refusal("blockdev-add", qcow2("r")).contains("lock"), "one process opens an image once");
    let mut unnamed = qcow2("x");
    unnamed.as_object_mut().expect("an object").remove("node-name");
    assert_eq!(client.refusal("blockdev-add", unnamed), "'node-name' must be specified for the root node");
    assert_eq!(client.refusal("blockdev-del", json!({"node-name": "z"})), "Failed to find node with node-name='z'");
    assert_eq!(
        client.refusal("block_resize", json!({"node-name": "z", "size": 1})),
        "Cannot find device='' nor node-name='z'"
    );
    assert_eq!(
        client.refusal("block_resize", json!({"node-name": "q", "size": -1})),
        "Parameter 'size' expects a >0 size"
    );
    assert_eq!(client.command("query-named-block-nodes", json!({})), before);
    daemon.stop().expect("stopped in order");
}

#[test]
fn a_filter_stands_between_an_image_and_its_file() {
    let daemon = with_image();
    let mut client = daemon.client();
    let path = daemon.path("a.qcow2");
    client.command("object-add", json!({"qom-type": "throttle-group", "id": "g", "limits": {"iops-total": 100_000}}));
    client.command("blockdev-add", json!({"driver": "file", "node-name": "f", "filename": path}));
    client.command("blockdev-add", json!({"driver": "throttle", "node-name": "t", "throttle-group": "g", "file": "f"}));
    client.command("blockdev-add", json!({"driver": "qcow2", "node-name": "q", "file": "t"}));
    let socket = daemon.path("n.sock");
    client.command("nbd-server-start", json!({"addr": {"type": "unix", "data": {"path": socket}}}));
    client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "q", "writable": true}));
    let uri = format!("nbd+unix:///q?socket={}", socket.display());
    let qemu = Qemu::system();
    qemu.io(["-f", "raw", "-c", "write -P 7 1M 3M", "-c", "flush", "-c", "read -P 7 1M 3M", &uri]).expect_ok();
    let nodes = client.command("query-named-block-nodes", json!({}));
    let of = |name: &str| nodes.as_array().expect("a list").iter().find(|node| node["node-name"] == name).cloned();
    assert_eq!(of("q").expect("the image")["children"][0], json!({"child": "file", "node-name": "t"}));
    assert_eq!(of("t").expect("the filter")["group"], "g");
    // What the image did to its file went through the filter.
    let stats = client.command("query-blockstats", json!({"query-nodes": true}));
    let stats = stats.as_array().expect("a list").iter().find(|node| node["node-name"] == "t").expect("the filter");
    assert!(stats["stats"]["wr_bytes"].as_u64().expect("a number") >= 3 << 20, "{stats}");
    // It stays where it is when the image gets an overlay.
    client.command("blockdev-snapshot-sync", json!({"node-name": "q", "snapshot-file": daemon.path("o.qcow2")}));
    qemu.io(["-f", "raw", "-c", "write -P 8 2M 64k", "-c", "read -P 7 1M 1M", &uri]).expect_ok();
    assert!(client.refusal("blockdev-del", json!({"node-name": "t"})).contains("in use"));
    let (_folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    qemu.expect_clean(&path);
}
