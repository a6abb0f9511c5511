// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Limits by command. Their exactness is tested where they are made. These tests show which node has which limits.

use super::exports::{serving, uri};
use super::running::{Client, Running};
use cowshed_daemon::{Drive, Step};
use cowshed_testkit::qemu::Qemu;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Instant;

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
fn filter_of_limits_goes_with_them() {
    let (daemon, mut client) = serving();
    client.command("block_set_io_throttle", limits("q", json!({"iops": 5000})));
    let filter = throttles(&mut client)[0]["node-name"].clone();
    for active in [false, true] {
        client.command("blockdev-set-active", json!({"node-name": filter, "active": active}));
        assert_eq!(throttles(&mut client)[0]["active"], active);
    }
    assert_eq!(throttles(&mut client)[0]["iops"], 5000);
    client.command("block_set_io_throttle", limits("q", json!({})));
    assert_eq!(throttles(&mut client), Vec::<Value>::new());
    // A group of the user's stays, whatever it was meanwhile.
    client.command("object-add", json!({"qom-type": "throttle-group", "id": "g", "limits": {"iops-total": 7}}));
    let own = json!({"driver": "throttle", "node-name": "own", "throttle-group": "g", "file": "q"});
    client.command("blockdev-add", own);
    for active in [false, true] {
        client.command("blockdev-set-active", json!({"node-name": "own", "active": active}));
    }
    client.command("block_set_io_throttle", limits("own", json!({})));
    assert_eq!(throttles(&mut client)[0]["node-name"], "own");
    daemon.stop().expect("stopped in order");
}

#[test]
fn limits_of_one_export_leave_another_of_the_same_node_alone() {
    let (daemon, mut client) = serving();
    for id in ["e", "f"] {
        let export = json!({"type": "nbd", "id": id, "name": id, "node-name": "q", "writable": true});
        client.command("block-export-add", export);
    }
    let set = "block_set_io_throttle";
    client.command(set, limits("e", json!({"iops": 10, "iops_max": 20})));
    let nodes_of = |client: &mut Client| {
        let exports = client.command("query-block-exports", json!({}));
        let names = exports.as_array().expect("a list").iter().map(|export| export["node-name"].clone());
        names.collect::<Vec<Value>>()
    };
    // As in QEMU the newest export comes first.
    assert_eq!(nodes_of(&mut client), ["q", "throttle-e"]);
    // Both read and write through the one node, each at its own pace.
    Qemu::system().io(["-f", "raw", "-c", "write -P 3 0 64k", &uri(&daemon, "e")]).expect_ok();
    Qemu::system().io(["-f", "raw", "-c", "read -P 3 0 64k", &uri(&daemon, "f")]).expect_ok();
    let stats = client.command("query-blockstats", json!({}));
    assert_eq!((&stats[0]["x-throttle"]["group"], stats[1].get("x-throttle")), (&json!("e"), None));
    assert!(stats[0]["stats"]["wr_operations"].as_u64() >= Some(1), "{stats}");
    assert_eq!(stats[1]["stats"]["wr_operations"], 0);

    // The other one joins the group: the last setter's limits count for both.
    client.command(set, limits("f", json!({"iops": 30, "group": "e"})));
    assert_eq!(nodes_of(&mut client), ["throttle-f", "throttle-e"]);
    let found = throttles(&mut client);
    assert!(found.iter().all(|node| node["group"] == "e" && node["iops"] == 30), "{found:?}");
    assert_eq!(found.len(), 2);
    // The node's own limits are a third filter, below both.
    client.command(set, limits("q", json!({"bps": 1 << 30})));
    let found = throttles(&mut client);
    assert_eq!(found.len(), 3, "{found:?}");
    assert_eq!(nodes_of(&mut client), ["throttle-f", "throttle-e"]);
    for id in ["e", "q"] {
        client.command(set, limits(id, json!({})));
    }
    let found = throttles(&mut client);
    assert_eq!((found.len(), &found[0]["node-name"]), (1, &json!("throttle-f")), "{found:?}");
    assert_eq!(nodes_of(&mut client), ["throttle-f", "q"]);
    Qemu::system().io(["-f", "raw", "-c", "read -P 3 0 64k", &uri(&daemon, "e")]).expect_ok();
    daemon.stop().expect("stopped in order");
}

#[test]
fn a_drive_says_what_its_export_may_and_counts() {
    let folder = super::running::temp_folder();
    for name in ["a", "b", "c"] {
        Qemu::system().create(&folder.path().join(name), "qcow2", "", 1 << 20);
    }
    let drive = |name: &str, more: &str| {
        let text = format!("file={},format=qcow2,id={name},{more}", folder.path().join(name).display());
        Drive::parse(&text, name, true).expect("right")
    };
    let drives = [
        drive("a", "throttling.iops-total=100,throttling.iops-total-max=2000,throttling.iops-total-max-length=60"),
        drive("b", "throttling.group=g,stats-intervals.0=5,stats-intervals.1=60,stats-account-failed=off"),
        drive("c", "bps_rd=1M,group=g"),
    ];
    let mut steps = vec![
        Step::object("throttle-group,id=g,x-iops-read=77").expect("right"),
        Step::nbd_server(&format!("addr.type=unix,addr.path={}", folder.path().join("n.sock").display()))
            .expect("right"),
    ];
    let controls: Vec<Step> = drives.iter().map(|drive| Step::controls("drive", drive)).collect();
    for drive in drives {
        let export = format!("nbd,id={0},node-name={0},writable=on", drive.id);
        steps.extend([Step::drive("drive", drive), Step::export(&export).expect("right")]);
    }
    // The first two as they come; the third sets the limits of the group that it joins.
    let mut controls = controls.into_iter();
    steps.extend(controls.by_ref().take(2));
    let third = controls.next().expect("three");
    let daemon = Running::start_in(folder, steps);
    let mut client = daemon.client();
    let found = throttles(&mut client);
    let of = |name: &str| found.iter().find(|node| node["node-name"] == name).unwrap_or_else(|| panic!("{found:?}"));
    let first = of("throttle-a");
    assert_eq!((&first["group"], &first["iops"], &first["iops_max"]), (&json!("a"), &json!(100), &json!(2000)));
    assert_eq!(first["iops_max_length"], 60);
    assert_eq!((&of("throttle-b")["group"], &of("throttle-b")["iops_rd"]), (&json!("g"), &json!(77)));
    let stats = client.command("query-blockstats", json!({}));
    let timed = stats[1]["stats"]["timed_stats"].as_array().expect("a list");
    assert_eq!(timed.iter().map(|interval| &interval["interval_length"]).collect::<Vec<_>>(), [5, 60]);
    assert_eq!(
        (&stats[1]["stats"]["account_failed"], &stats[1]["stats"]["account_invalid"]),
        (&json!(false), &json!(true))
    );
    daemon.stop().expect("stopped in order");

    let folder = super::running::temp_folder();
    Qemu::system().create(&folder.path().join("c"), "qcow2", "", 1 << 20);
    let error = cowshed_daemon::run(super::running::setup(vec![third]), |_| Ok(())).expect_err("there is no export");
    assert!(error.to_string().contains("there is no export 'c'"), "{error}");
}

#[test]
fn a_filter_of_the_users_stays_when_its_limits_go() {
    let (daemon, mut client) = serving();
    client.command("object-add", json!({"qom-type": "throttle-group", "id": "g", "limits": {"iops-total": 1000}}));
    // Also under a name that looks like one of ours.
    let filter = json!({"driver": "throttle", "node-name": "throttle-q", "throttle-group": "g", "file": "q"});
    client.command("blockdev-add", filter);
    let export = json!({"type": "nbd", "id": "e", "name": "q", "node-name": "throttle-q", "writable": true});
    client.command("block-export-add", export);
    let set = "block_set_io_throttle";
    client.command(set, limits("e", json!({"iops": 2000})));
    // A filter of the user shows no limits among the nodes.
    let shown = |client: &mut Client| client.command("query-block", json!({}))[0]["inserted"].take();
    assert_eq!((&shown(&mut client)["iops"], &throttles(&mut client)[0]["iops"]), (&json!(2000), &json!(0)));
    client.command(set, limits("e", json!({})));
    // The filter is there, in no group: the group keeps its limits for others.
    let (found, limits_left) = (throttles(&mut client), shown(&mut client));
    assert_eq!((found.len(), &found[0]["node-name"], &limits_left["iops"]), (1, &json!("throttle-q"), &json!(0)));
    assert_eq!(client.command("qom-get", json!({"path": "g", "property": "x-iops-total"})), 2000);
    Qemu::system().io(["-f", "raw", "-c", "write -P 4 0 1M", "-c", "read -P 4 0 1M", &uri(&daemon, "q")]).expect_ok();
    client.command("object-del", json!({"id": "g"}));
    // Limits again make a group of its own.
    client.command(set, limits("e", json!({"bps": 1 << 30})));
    let found = shown(&mut client);
    assert_eq!((&found["group"], &found["bps"]), (&json!("e"), &json!(1 << 30)), "{found:?}");
    daemon.stop().expect("stopped in order");
}

#[test]
fn waits_are_counted_while_they_last_and_after() {
    let daemon = Running::start_measured(16 << 20);
    let mut client = daemon.client();
    let set = "block_set_io_throttle";
    // A tenth of a second's worth goes at once: one request. Each of the next four waits a tenth of a second, less the
    // time passed by then; the whole takes three tenths at least.
    client.command(set, limits("e", json!({"iops": 10})));
    let writes = ["-c", "write 0 4k"].repeat(5);
    let started = Instant::now();
    Qemu::system().io(["-f", "raw"].into_iter().chain(writes).chain([uri(&daemon, "q").as_str()])).expect_ok();
    let took_ns = u64::try_from(started.elapsed().as_nanos()).expect("no ages");
    let throttle = |client: &mut Client| client.command("query-blockstats", json!({}))[0]["x-throttle"].take();
    let seen = throttle(&mut client);
    let number = |seen: &Value, key: &str| seen[key].as_u64().unwrap_or_else(|| panic!("{key}: {seen}"));
    assert_eq!((&seen["group"], number(&seen, "waiting")), (&json!("e"), 0), "{seen}");
    assert!((1..=5).contains(&number(&seen, "waits")), "{seen}");
    assert!((100_000_000..took_ns).contains(&number(&seen, "wait-ns")), "{seen} in {took_ns}");
    let labels = "{node=\"throttle-e\",group=\"e\"}";
    let page = super::statistics::page(&daemon);
    for (family, value) in [
        ("waits_total", number(&seen, "waits").to_string()),
        ("wait_seconds_total", (number(&seen, "wait-ns") as f64 / 1e9).to_string()),
        ("waiting", "0".to_owned()),
    ] {
        let line = format!("cowshed_throttle_{family}{labels} {value}");
        assert!(page.lines().any(|found| found == line), "{line}: {page}");
    }
    // A request that waits for a minute, until the limits go.
    client.command(set, limits("e", json!({"bps": 1 << 20})));
    let uri = uri(&daemon, "q");
    let waiting = std::thread::spawn(move || {
        Qemu::system().io(["-f", "raw", "-c", "write 0 8M", "-c", "write 8M 8M", &uri]).expect_ok();
    });
    while number(&throttle(&mut client), "waiting") == 0 {
        std::thread::yield_now();
    }
    let page = super::statistics::page(&daemon);
    let line = format!("cowshed_throttle_waiting{labels} 1");
    assert!(page.lines().any(|found| found == line), "{line}: {page}");
    client.command(set, limits("e", json!({})));
    waiting.join().expect("it goes on");
    assert_eq!(client.command("query-blockstats", json!({}))[0].get("x-throttle"), None);
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
    let negative = client.refusal(set, limits("e", json!({"iops": -5})));
    assert_eq!(negative, "bps/iops/max values must be within [0, 1000000000000000]");
    assert_eq!(client.refusal(set, json!({"id": "e", "bps": 0})), "Parameter 'bps_rd' is missing");
    let nameless = client.refusal(set, limits("e", json!({"iops": 5, "group": ""})));
    assert_eq!(nameless, "Parameter 'group' expects the name of a throttle group");
    assert_eq!(client.refusal(set, limits("z", json!({"iops": 5}))), "Device 'z' not found");
    assert_eq!(throttles(&mut client), Vec::<Value>::new());
    daemon.stop().expect("stopped in order");
}

#[test]
fn secrets_are_objects_that_are_never_shown() {
    let (daemon, mut client) = serving();
    let add = |more: Value| {
        let mut all = json!({"qom-type": "secret", "id": "s"});
        all.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        all
    };
    client.command("object-add", json!({"qom-type": "secret", "id": "key", "data": "abc"}));
    for (wrong, reason) in [
        (json!({"data": "a", "keyid": "k"}), "No secret with id 'k'"),
        (json!({"data": "a", "keyid": "key"}), "IV is required to decrypt secret"),
        (json!({"data": "a", "keyid": "k", "iv": "AAAA"}), "No secret with id 'k'"),
        (json!({"data": "%", "format": "base64"}), "Base64 data contains invalid characters"),
        (json!({"file": "/nonexistent"}), "/nonexistent"),
        (json!({"data": ""}), "empty"),
        (json!({}), "'file' or 'data' must be provided"),
    ] {
        let refusal = client.refusal("object-add", add(wrong));
        assert!(refusal.contains(reason), "{refusal}");
    }
    client.command("object-add", add(json!({"data": "Z2VoZWlt", "format": "base64"})));
    let listed = client.command("qom-list", json!({"path": "/objects/s"}));
    assert!(!listed.to_string().contains("data"), "{listed}");
    assert_eq!(client.command("qom-get", json!({"path": "s", "property": "format"})), "base64");
    assert!(client.refusal("qom-get", json!({"path": "s", "property": "data"})).contains("not found"));
    assert!(client.refusal("qom-set", json!({"path": "s", "property": "format", "value": "raw"})).contains("changed"));
    client.command("object-del", json!({"id": "s"}));
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
    let refused = client.refusal("object-del", json!({"id": "g0"}));
    assert_eq!(refused, "Cannot delete throttle group 'g0' with active references");
    client.command("blockdev-del", json!({"node-name": "t"}));
    client.command("object-del", json!({"id": "g0"}));
    assert_eq!(client.refusal("object-del", json!({"id": "g0"})), "object 'g0' not found");
    let gone = client.execute("qom-get", json!({"path": "g0", "property": "limits"})).expect_err("is gone");
    assert_eq!(gone["class"], "DeviceNotFound");
    daemon.stop().expect("stopped in order");
}

#[test]
fn all_properties_of_several_objects_are_listed_at_once() {
    let daemon = Running::start(Vec::new());
    let mut client = daemon.client();
    let group = json!({"qom-type": "throttle-group", "id": "g", "limits": {"iops-total": 100, "bps-read": 5}});
    client.command("object-add", group);
    client.command("object-add", json!({"qom-type": "secret", "id": "s", "data": "geheim"}));
    let listed = client.command("qom-list-get", json!({"paths": ["/objects/g", "/objects", "g"]}));
    assert_eq!(listed.as_array().expect("a list").len(), 3);
    assert_eq!(listed[0], listed[2], "a name is a path's end");
    let named = |listed: &Value| -> BTreeMap<String, (String, Value)> {
        let properties = listed["properties"].as_array().expect("a list").iter();
        let text = |property: &Value, key: &str| property[key].as_str().expect("a text").to_owned();
        properties.map(|one| (text(one, "name"), (text(one, "type"), one["value"].clone()))).collect()
    };
    // As QEMU 11 answers to the same.
    let mut expected: BTreeMap<String, (String, Value)> = BTreeMap::new();
    let mut limits = serde_json::Map::new();
    for name in ["bps-read", "bps-total", "bps-write", "iops-read", "iops-total", "iops-write"] {
        let value = if name == "iops-total" { 100 } else { 5 * u64::from(name == "bps-read") };
        for (name, value) in [(name.to_owned(), value), (format!("{name}-max"), 0), (format!("{name}-max-length"), 1)] {
            limits.insert(name.clone(), json!(value));
            expected.insert(format!("x-{name}"), ("int".to_owned(), json!(value)));
        }
    }
    limits.insert("iops-size".to_owned(), json!(0));
    expected.insert("x-iops-size".to_owned(), ("int".to_owned(), json!(0)));
    expected.insert("limits".to_owned(), ("ThrottleLimits".to_owned(), limits.into()));
    expected.insert("type".to_owned(), ("string".to_owned(), json!("throttle-group")));
    assert_eq!(named(&listed[0]), expected);
    let container = named(&listed[1]);
    assert_eq!(container["type"], ("string".to_owned(), json!("container")));
    assert_eq!(container["g"], ("child<throttle-group>".to_owned(), json!("/objects/g")));
    assert_eq!(container["s"], ("child<secret>".to_owned(), json!("/objects/s")));
    assert!(!client.command("qom-list-get", json!({"paths": ["/objects/s"]})).to_string().contains("geheim"));
    assert_eq!(client.command("qom-list-get", json!({"paths": []})), json!([]));
    for (arguments, words) in [
        (json!({"paths": ["/objects/g", "/nosuch"]}), "Device '/nosuch' not found"),
        (json!({}), "Parameter 'paths' is missing"),
    ] {
        assert_eq!(client.refusal("qom-list-get", arguments), words);
    }
    daemon.stop().expect("stopped in order");
}
