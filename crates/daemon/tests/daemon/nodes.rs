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
