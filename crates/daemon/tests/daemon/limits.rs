// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Limits by command. How exactly they are kept is tested where they are made; here: who has which.

use super::exports::{serving, uri};
use super::running::Client;
use cowshed_testkit::qemu::Qemu;
use serde_json::{Value, json};

/// The six mandatory limits, with `more` over them.
fn limits(id: &str, more: Value) -> Value {
    let mut all = json!({"id": id, "bps": 0, "bps_rd": 0, "bps_wr": 0, "iops": 0, "iops_rd": 0, "iops_wr": 0});
    for (key, value) in more.as_object().expect("an object") {
        all[key] = value.clone();
    }
    all
}

fn throttles(client: &mut Client) -> Vec<Value> {
    let nodes = client.command("query-named-block-nodes", json!({"flat": true}));
    nodes.as_array().expect("a list").iter().filter(|node| node["drv"] == "throttle").cloned().collect()
}

#[test]
fn limits_come_change_and_go() {
    let (daemon, mut client) = serving();
    client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "q", "writable": true}));
    let set = "block_set_io_throttle";
    client.command(set, limits("e", json!({"iops": 5000, "iops_max": 9000, "iops_max_length": 10})));
    let found = throttles(&mut client);
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(
        (&found[0]["group"], &found[0]["iops"], &found[0]["iops_max"]),
        (&json!("e"), &json!(5000), &json!(9000))
    );
    Qemu::system().io(["-f", "raw", "-c", "write -P 1 0 1M", "-c", "read -P 1 0 1M", &uri(&daemon, "q")]).expect_ok();

    // By the node's name it is the same filter; another group is another name for it.
    client.command(set, limits("q", json!({"bps_rd": 1 << 30, "group": "g"})));
    let found = throttles(&mut client);
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!((&found[0]["group"], &found[0]["bps_rd"], &found[0]["iops"]), (&json!("g"), &json!(1 << 30), &json!(0)));

    client.command(set, limits("e", json!({})));
    assert_eq!(throttles(&mut client), Vec::<Value>::new());
    Qemu::system().io(["-f", "raw", "-c", "read -P 1 0 1M", &uri(&daemon, "q")]).expect_ok();
    daemon.stop().expect("stopped in order");
}

#[test]
fn wrong_limits_are_refused_with_the_reason_and_change_nothing() {
    let (daemon, mut client) = serving();
    client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "q", "writable": true}));
    let set = "block_set_io_throttle";
    let conflict = "bps/iops/max total values and read/write values cannot be used at the same time";
    assert!(client.refusal(set, limits("e", json!({"iops": 5, "iops_rd": 1}))).contains(conflict));
    let burst = client.refusal(set, limits("e", json!({"iops": 5, "iops_max_length": 9})));
    assert!(burst.contains("burst length set without burst rate"), "{burst}");
    assert!(client.refusal(set, limits("e", json!({"iops": -5}))).contains("negative"));
    assert_eq!(client.refusal(set, json!({"id": "e", "bps": 0})), "Parameter 'bps_rd' is missing");
    assert_eq!(client.refusal(set, limits("z", json!({"iops": 5}))), "Device 'z' not found");
    assert_eq!(throttles(&mut client), Vec::<Value>::new());
    daemon.stop().expect("stopped in order");
}

#[test]
fn groups_are_objects() {
    let (daemon, mut client) = serving();
    let add = |id: &str, limits: Value| json!({"qom-type": "throttle-group", "id": id, "limits": limits});
    client.command("object-add", add("g0", json!({"iops-total": 100})));
    assert!(client.refusal("object-add", add("g0", json!({}))).starts_with("attempt to add duplicate property 'g0'"));
    assert!(client.refusal("object-add", add("g1", json!({"iops-total": 1, "iops-read": 1}))).contains("same time"));
    let listed = client.command("qom-list", json!({"path": "/objects"}));
    assert!(listed.as_array().expect("a list").contains(&json!({"name": "g0", "type": "child<throttle-group>"})));
    assert_eq!(client.command("qom-get", json!({"path": "/objects/g0", "property": "x-iops-total"})), 100);
    client.command("qom-set", json!({"path": "g0", "property": "limits", "value": {"iops-total": 200}}));
    let limits = client.command("qom-get", json!({"path": "g0", "property": "limits"}));
    assert_eq!((&limits["iops-total"], &limits["bps-total-max-length"]), (&json!(200), &json!(1)));
    let wrong = json!({"path": "g0", "property": "limits", "value": {"iops-total": 9, "iops-read": 1}});
    assert!(client.refusal("qom-set", wrong).contains("same time"));
    assert_eq!(client.command("qom-get", json!({"path": "g0", "property": "x-iops-total"})), 200);

    let filter = json!({"driver": "throttle", "node-name": "t", "throttle-group": "g0", "file": "q"});
    client.command("blockdev-add", filter);
    assert!(client.refusal("object-del", json!({"id": "g0"})).contains("in use"));
    client.command("blockdev-del", json!({"node-name": "t"}));
    client.command("object-del", json!({"id": "g0"}));
    assert_eq!(client.refusal("object-del", json!({"id": "g0"})), "object 'g0' not found");
    let gone = client.execute("qom-get", json!({"path": "g0", "property": "limits"})).expect_err("is gone");
    assert_eq!(gone["class"], "DeviceNotFound");
    daemon.stop().expect("stopped in order");
}
