// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Statistics of exports and nodes.

use super::exports::{serving, uri};
use super::running::{Client, Running};
use cowshed_daemon::Step;
use cowshed_testkit::qemu::Qemu;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpStream;

#[test]
fn exports_count_what_clients_do() {
    let (daemon, mut client) = serving();
    client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "q", "writable": true}));
    client.command("block-latency-histogram-set", json!({"id": "e", "boundaries": [1000, 1_000_000_000_000_u64]}));
    client.command("x-block-stats-intervals-set", json!({"id": "e", "intervals": [60]}));
    let commands =
        ["-c", "write 0 64k", "-c", "write 64k 64k", "-c", "read 0 4k", "-c", "flush", "-c", "discard 1M 1M"];
    let mut arguments = vec!["-f", "raw"];
    arguments.extend(commands);
    let uri = uri(&daemon, "q");
    arguments.push(&uri);
    Qemu::system().io(arguments).expect_ok();
    let stats = client.command("query-blockstats", json!({}));
    let export = &stats[0];
    assert_eq!((&export["device"], &export["node-name"]), (&json!("e"), &json!("q")));
    let stats = &export["stats"];
    assert_eq!(
        (&stats["wr_operations"], &stats["wr_bytes"], &stats["wr_highest_offset"]),
        (&json!(2), &json!(131072), &json!(131072))
    );
    assert_eq!(
        (&stats["rd_operations"], &stats["rd_bytes"], &stats["failed_rd_operations"]),
        (&json!(1), &json!(4096), &json!(0))
    );
    assert_eq!((&stats["unmap_operations"], &stats["unmap_bytes"]), (&json!(1), &json!(1 << 20)));
    assert!(stats["flush_operations"].as_u64() >= Some(1) && stats["wr_total_time_ns"].as_u64() > Some(0), "{stats}");
    let bins = stats["wr_latency_histogram"]["bins"].as_array().expect("a histogram");
    assert_eq!(bins.iter().filter_map(|bin| bin.as_u64()).sum::<u64>(), 2);
    let timed = &stats["timed_stats"][0];
    assert_eq!(timed["interval_length"], 60);
    assert!(timed["max_wr_latency_ns"].as_u64() >= timed["min_wr_latency_ns"].as_u64(), "{timed}");

    let nodes = client.command("query-blockstats", json!({"query-nodes": true}));
    let node = nodes.as_array().expect("a list").iter().find(|node| node["node-name"] == "q").expect("is listed");
    assert_eq!(node["stats"]["wr_bytes"], 131072);
    // The format's reads and writes in its file are counted there.
    let file = &node["parent"];
    assert!(file["node-name"].is_string(), "{node}");
    assert!(file["stats"]["wr_bytes"].as_u64() > Some(131_072), "data and metadata: {file}");
    assert!(file["stats"]["wr_highest_offset"].as_u64() >= Some(131_072 + 65536 * 4), "{file}");
    assert!(file["stats"]["rd_operations"].as_u64() > Some(0), "{file}");
    assert!(file["stats"]["flush_operations"].as_u64() > Some(0), "{file}");
    assert_eq!(node["stats"]["wr_highest_offset"], 131_072);
    assert!(node["x-cache"]["l2-hits"].as_u64() >= Some(1), "{node}");
    let block = client.command("query-block", json!({}));
    assert_eq!((&block[0]["device"], &block[0]["inserted"]["node-name"]), (&json!("e"), &json!("q")));

    client.command("block-latency-histogram-set", json!({"id": "e"}));
    let stats = client.command("query-blockstats", json!({}));
    assert!(stats[0]["stats"].get("wr_latency_histogram").is_none());
    daemon.stop().expect("stopped in order");
}

fn requests_in(histogram: &Value) -> u64 {
    let bins = histogram["bins"].as_array().unwrap_or_else(|| panic!("no histogram: {histogram}"));
    bins.iter().filter_map(Value::as_u64).sum()
}

#[test]
fn latencies_cover_every_kind_of_request() {
    let (daemon, mut client) = serving();
    client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "q", "writable": true}));
    for id in ["e", "q"] {
        client.command("block-latency-histogram-set", json!({"id": id, "boundaries": [1_000_000_000_000_u64]}));
        client.command("x-block-stats-intervals-set", json!({"id": id, "intervals": [3600]}));
    }
    // Writes of zeroes are writes.
    let commands = ["write 0 64k", "write -z 64k 64k", "write -z 128k 64k", "read 0 4k", "discard 1M 1M", "flush"];
    let arguments: Vec<&str> = commands.iter().flat_map(|command| ["-c", *command]).collect();
    Qemu::system().io(["-f", "raw"].into_iter().chain(arguments).chain([uri(&daemon, "q").as_str()])).expect_ok();
    let exports = client.command("query-blockstats", json!({}));
    let nodes = client.command("query-blockstats", json!({"query-nodes": true}));
    for stats in [&exports[0]["stats"], &find(&nodes, "q")["stats"]] {
        assert_eq!((&stats["wr_operations"], requests_in(&stats["wr_latency_histogram"])), (&json!(3), 3));
        assert_eq!((&stats["rd_operations"], requests_in(&stats["rd_latency_histogram"])), (&json!(1), 1));
        assert_eq!((&stats["unmap_operations"], requests_in(&stats["x-unmap_latency_histogram"])), (&json!(1), 1));
        assert!(requests_in(&stats["flush_latency_histogram"]) >= 1, "{stats}");
        let timed = &stats["timed_stats"][0];
        for (ours, name) in [("", "rd"), ("", "wr"), ("", "flush"), ("x-", "unmap")] {
            let [min, max, avg] = ["min", "max", "avg"].map(|which| {
                timed[format!("{ours}{which}_{name}_latency_ns")].as_u64().unwrap_or_else(|| panic!("{name}: {timed}"))
            });
            assert!(0 < min && min <= avg && avg <= max, "{name}: {timed}");
            let ours = if name == "flush" { "x-" } else { ours };
            assert!(timed[format!("{ours}avg_{name}_queue_depth")].as_f64() >= Some(0.0), "{name}: {timed}");
        }
        assert!(timed["max_wr_latency_ns"].as_u64() <= stats["wr_total_time_ns"].as_u64(), "{stats}");
        // Members that QEMU's schema has in any case.
        assert_eq!((&stats["zone_append_operations"], &timed["avg_zone_append_queue_depth"]), (&json!(0), &json!(0)));
    }
    // The reply has the members of the schema, one by one.
    let schema = client.command("query-qmp-schema", json!({}));
    let entry = |name: &Value| {
        let found = schema.as_array().expect("a list").iter().find(|entry| entry["name"] == *name);
        found.unwrap_or_else(|| panic!("{name} is in the schema")).clone()
    };
    let of_list = |value: &Value| value.as_array().expect("a list").clone();
    let member = |object: &Value, name: &str| {
        let found = of_list(&object["members"]).into_iter().find(|member| member["name"] == name);
        entry(&found.unwrap_or_else(|| panic!("no member {name}: {object}"))["type"])
    };
    let check = |value: &Value, object: &Value| {
        for described in of_list(&object["members"]) {
            let name = described["name"].as_str().expect("a name");
            assert!(described.get("default").is_some() || value.get(name).is_some(), "{name} is missing: {value}");
        }
        for (name, value) in value.as_object().expect("an object") {
            let json_type = member(object, name)["json-type"].clone();
            let is_right = match json_type.as_str().unwrap_or("object or list") {
                "int" => value.is_u64(),
                "number" => value.is_number(),
                "boolean" => value.is_boolean(),
                _ => value.is_object() || value.is_array(),
            };
            assert!(is_right, "{name} is {value}, not {json_type}");
        }
    };
    let returned = entry(&entry(&json!("query-blockstats"))["ret-type"]);
    let of_stats = member(&entry(&returned["element-type"]), "stats");
    let of_timed = entry(&member(&of_stats, "timed_stats")["element-type"]);
    let stats = &exports[0]["stats"];
    check(stats, &of_stats);
    check(&stats["timed_stats"][0], &of_timed);
    check(&stats["x-unmap_latency_histogram"], &member(&of_stats, "x-unmap_latency_histogram"));
    // One kind alone, and an end to all of them.
    client.command("block-latency-histogram-set", json!({"id": "e", "x-boundaries-unmap": [5, 6]}));
    let refused = client.refusal("block-latency-histogram-set", json!({"id": "e", "boundaries-zap": [6, 5]}));
    assert!(refused.contains("rise"), "{refused}");
    client.command("block-latency-histogram-set", json!({"id": "e", "boundaries-zap": [5, 6]}));
    let stats = client.command("query-blockstats", json!({}))[0]["stats"].take();
    assert_eq!(stats["x-unmap_latency_histogram"], json!({"boundaries": [5, 6], "bins": [0, 0, 0]}));
    assert_eq!(requests_in(&stats["wr_latency_histogram"]), 3);
    client.command("block-latency-histogram-set", json!({"id": "e"}));
    let stats = client.command("query-blockstats", json!({}))[0]["stats"].take();
    assert!(!stats.to_string().contains("histogram"), "{stats}");
    daemon.stop().expect("stopped in order");
}

#[test]
fn what_is_answered_from_memory_takes_time_too() {
    let (daemon, mut client) = serving();
    client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "q", "writable": true}));
    let uri = uri(&daemon, "q");
    Qemu::system().io(["-f", "raw", "-c", "write 0 2M", &uri]).expect_ok();
    let nodes = client.command("query-blockstats", json!({"query-nodes": true}));
    let file = find(&nodes, "q")["parent"]["node-name"].as_str().expect("its file has a name").to_owned();
    // Nothing takes less than a nanosecond.
    for id in ["e", "q", &file] {
        client.command("block-latency-histogram-set", json!({"id": id, "boundaries": [1]}));
        client.command("x-block-stats-intervals-set", json!({"id": id, "intervals": [3600]}));
    }
    let reads = ["-c", "read 0 4k"].repeat(20);
    Qemu::system().io(["-f", "raw"].into_iter().chain(reads).chain([uri.as_str()])).expect_ok();
    let of_all = |client: &mut Client| {
        let export = client.command("query-blockstats", json!({}))[0].take();
        let nodes = client.command("query-blockstats", json!({"query-nodes": true}));
        [export, find(&nodes, "q").clone(), find(&nodes, &file).clone()].map(|mut one| one["stats"].take())
    };
    for stats in of_all(&mut client) {
        let bins = &stats["rd_latency_histogram"]["bins"];
        assert_eq!((&bins[0], bins[1].as_u64() >= Some(20)), (&json!(0), true), "{stats}");
        assert!(stats["timed_stats"][0]["min_rd_latency_ns"].as_u64() > Some(0), "{stats}");
    }
    // No memory copies a gibibyte in a millisecond: a mebibyte takes more than a microsecond.
    for id in ["e", "q", &file] {
        client.command("block-latency-histogram-set", json!({"id": id, "boundaries": [1000]}));
    }
    let reads = ["-c", "read 0 1M"].repeat(5);
    Qemu::system().io(["-f", "raw"].into_iter().chain(reads).chain([uri.as_str()])).expect_ok();
    for stats in of_all(&mut client) {
        let bins = &stats["rd_latency_histogram"]["bins"];
        assert_eq!((&bins[0], bins[1].as_u64() >= Some(5)), (&json!(0), true), "{stats}");
    }
    daemon.stop().expect("stopped in order");
}

#[test]
fn caches_say_what_they_hold_and_may_hold() {
    let folder = super::running::temp_folder();
    Qemu::system().create(&folder.path().join("a.qcow2"), "qcow2", "", 64 << 20);
    let path = |name: &str| folder.path().join(name).display().to_string();
    let sizes = "l2-cache-size=1048576,refcount-cache-size=524288";
    let node = format!("qcow2,node-name=q,{sizes},file.driver=file,file.filename={}", path("a.qcow2"));
    let steps = vec![
        Step::metrics("--metrics", "127.0.0.1:0"),
        Step::blockdev(&node).expect("right"),
        Step::nbd_server(&format!("addr.type=unix,addr.path={}", path("n.sock"))).expect("right"),
        Step::export("nbd,id=e,node-name=q,writable=on").expect("right"),
    ];
    let daemon = Running::start_in(folder, steps);
    let mut client = daemon.client();
    Qemu::system().io(["-f", "raw", "-c", "write 0 1M", "-c", "write 8M 1M", &uri(&daemon, "q")]).expect_ok();
    let nodes = client.command("query-blockstats", json!({"query-nodes": true}));
    let cache = find(&nodes, "q")["x-cache"].clone();
    assert_eq!((&cache["l2-limit-bytes"], &cache["refcount-limit-bytes"]), (&json!(1 << 20), &json!(512 << 10)));
    // One block of 64 KiB counts all of it.
    assert_eq!((&cache["refcount-entries"], &cache["refcount-bytes"]), (&json!(1), &json!(64 << 10)));
    assert_eq!(cache["refcount-misses"], 1);
    assert!(cache["refcount-hits"].as_u64() >= Some(2), "two writes allocate: {cache}");
    let page = page(&daemon);
    for (name, key) in [
        ("l2_hits_total", "l2-hits"),
        ("l2_misses_total", "l2-misses"),
        ("l2_bytes", "l2-bytes"),
        ("l2_entries", "l2-entries"),
        ("l2_limit_bytes", "l2-limit-bytes"),
        ("refcount_hits_total", "refcount-hits"),
        ("refcount_misses_total", "refcount-misses"),
        ("refcount_bytes", "refcount-bytes"),
        ("refcount_entries", "refcount-entries"),
        ("refcount_limit_bytes", "refcount-limit-bytes"),
    ] {
        let line = format!("cowshed_node_{name}{{node=\"q\"}} {}", cache[key]);
        assert!(page.lines().any(|found| found == line), "{line}: {page}");
    }
    daemon.stop().expect("stopped in order");
}

/// The page of metrics.
pub fn page(daemon: &Running) -> String {
    let mut stream = TcpStream::connect(&daemon.metrics[0]).expect("it listens");
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").expect("it reads");
    let mut page = String::new();
    stream.read_to_string(&mut page).expect("it answers");
    assert!(page.starts_with("HTTP/1.1 200 OK") && page.ends_with("# EOF\n"), "{page}");
    page
}

#[test]
fn a_slow_scraper_holds_up_no_other() {
    let daemon = Running::start(vec![Step::metrics("--metrics", "127.0.0.1:0")]);
    let mut slow = TcpStream::connect(&daemon.metrics[0]).expect("it listens");
    slow.write_all(b"GET /metr").expect("it reads");
    // Any number of pages while it makes up its mind.
    for _ in 0..20 {
        page(&daemon);
    }
    slow.write_all(b"ics HTTP/1.1\r\n\r\n").expect("it still reads");
    let mut said = String::new();
    slow.read_to_string(&mut said).expect("it answers");
    assert!(said.ends_with("# EOF\n"), "{said}");
    daemon.stop().expect("stopped in order");
}

#[test]
fn wrong_bounds_change_nothing() {
    let (daemon, mut client) = serving();
    client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "q"}));
    let wrong = json!({"id": "e", "boundaries-read": [5, 9], "boundaries-write": [9, 5]});
    assert!(client.refusal("block-latency-histogram-set", wrong).contains("rise"));
    assert!(client.refusal("x-block-stats-intervals-set", json!({"id": "e", "intervals": [0]})).contains("second"));
    let error = client.execute("block-latency-histogram-set", json!({"id": "z"})).expect_err("no such export");
    assert_eq!(error["class"], "DeviceNotFound");
    let stats = client.command("query-blockstats", json!({}));
    assert!(stats[0]["stats"].get("rd_latency_histogram").is_none());
    daemon.stop().expect("stopped in order");
}

#[test]
fn a_page_of_metrics_says_the_same() {
    let daemon = Running::start_measured(1 << 20);
    let mut client = daemon.client();
    client.command("block-latency-histogram-set", json!({"id": "e", "boundaries": [1_000_000_000_000_u64]}));
    client.command("x-block-stats-intervals-set", json!({"id": "e", "intervals": [3600]}));
    Qemu::system().io(["-f", "raw", "-c", "write 0 64k", "-c", "read 0 4k", &uri(&daemon, "q")]).expect_ok();
    let page = page(&daemon);
    for line in [
        "cowshed_export_bytes_total{export=\"e\",kind=\"write\"} 65536",
        "cowshed_export_operations_total{export=\"e\",kind=\"read\"} 1",
        "cowshed_export_size_bytes{export=\"e\"} 1048576",
        "cowshed_export_merged_total{export=\"e\",kind=\"write\"} 0",
        "cowshed_node_bytes_total{node=\"q\",kind=\"write\"} 65536",
        "cowshed_node_highest_written_bytes{node=\"q\"} 65536",
        "cowshed_export_latency_seconds_bucket{export=\"e\",kind=\"write\",le=\"1000\"} 1",
        "cowshed_export_latency_seconds_bucket{export=\"e\",kind=\"write\",le=\"+Inf\"} 1",
    ] {
        assert!(page.lines().any(|found| found == line), "{line}: {page}");
    }
    for family in [
        "cowshed_export_interval_latency_seconds{export=\"e\",kind=\"write\",interval=\"3600\",value=\"max\"}",
        "cowshed_export_interval_queue_depth{export=\"e\",kind=\"write\",interval=\"3600\"}",
    ] {
        let value = page.lines().find_map(|line| line.strip_prefix(family)).expect(family);
        assert!(value.trim().parse::<f64>().expect("a number") > 0.0, "{family}{value}");
    }
    let types: Vec<&str> = page.lines().filter(|line| line.starts_with("# TYPE")).collect();
    let mut unique = types.clone();
    unique.dedup();
    assert!(types.len() > 10 && unique.len() == types.len(), "{types:?}");
    let mut other = TcpStream::connect(&daemon.metrics[0]).expect("it listens");
    other.write_all(b"POST /metrics HTTP/1.1\r\n\r\n").expect("it reads");
    let mut refused = String::new();
    other.read_to_string(&mut refused).expect("it answers");
    assert!(refused.starts_with("HTTP/1.1 405"), "{refused}");
    daemon.stop().expect("stopped in order");
}

fn find<'a>(nodes: &'a Value, name: &str) -> &'a Value {
    nodes.as_array().expect("a list").iter().find(|node| node["node-name"] == name).expect("is listed")
}

#[test]
fn nodes_have_latencies_too() {
    let (daemon, mut client) = serving();
    let nodes = client.command("query-blockstats", json!({"query-nodes": true}));
    assert!(find(&nodes, "q")["stats"].get("rd_latency_histogram").is_none());
    let file = find(&nodes, "q")["parent"]["node-name"].as_str().expect("its file has a name").to_owned();
    client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "q", "writable": true}));
    // Both an image's requests and the resulting ones to its file.
    for name in ["q", &file] {
        client.command("block-latency-histogram-set", json!({"id": name, "boundaries": [1_000_000_000_000_u64]}));
        client.command("x-block-stats-intervals-set", json!({"id": name, "intervals": [3600]}));
    }
    Qemu::system()
        .io(["-f", "raw", "-c", "write 0 64k", "-c", "read 0 4k", "-c", "flush", &uri(&daemon, "q")])
        .expect_ok();
    let nodes = client.command("query-blockstats", json!({"query-nodes": true}));
    for name in ["q", &file] {
        let stats = &find(&nodes, name)["stats"];
        let bins = |key: &str| stats[key]["bins"][0].as_u64();
        assert!(bins("rd_latency_histogram") >= Some(1) && bins("wr_latency_histogram") >= Some(1), "{stats}");
        assert!(bins("flush_latency_histogram") >= Some(1), "{stats}");
        assert!(stats["wr_total_time_ns"].as_u64() > Some(0), "{stats}");
        assert!(stats["idle_time_ns"].as_u64() > Some(0), "{stats}");
        let timed = &stats["timed_stats"][0];
        assert_eq!(timed["interval_length"], 3600);
        assert!(timed["max_wr_latency_ns"].as_u64() >= timed["min_wr_latency_ns"].as_u64(), "{timed}");
        assert!(timed["max_wr_latency_ns"].as_u64() > Some(0), "{timed}");
    }
    client.command("block-latency-histogram-set", json!({"id": file}));
    let nodes = client.command("query-blockstats", json!({"query-nodes": true}));
    assert!(find(&nodes, &file)["stats"].get("rd_latency_histogram").is_none());
    daemon.stop().expect("stopped in order");
}

#[test]
fn a_write_past_its_threshold_is_told_once() {
    let (daemon, mut client) = serving();
    client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "q", "writable": true}));
    let nodes = client.command("query-named-block-nodes", json!({"flat": true}));
    let file = nodes.as_array().expect("a list").iter().find(|node| node["drv"] == "file").expect("its file");
    let file = file["node-name"].as_str().expect("a name").to_owned();
    let threshold = |name: &str, bytes: u64| json!({"node-name": name, "write-threshold": bytes});
    let write = |command: &str| drop(Qemu::system().io(["-f", "raw", "-c", command, &uri(&daemon, "q")]).expect_ok());
    client.command("block-set-write-threshold", threshold("q", 1 << 20));
    client.command("block-set-write-threshold", threshold(&file, 8 << 20));
    let nodes = client.command("query-named-block-nodes", json!({"flat": true}));
    assert_eq!(find(&nodes, "q")["write_threshold"], 1 << 20);
    write("write 1020k 4k");
    write("read 1M 4k");
    assert!(client.events.iter().all(|event| event["event"] != "BLOCK_WRITE_THRESHOLD"));
    write("write 1020k 8k");
    let event = client.event("BLOCK_WRITE_THRESHOLD");
    assert_eq!(event, json!({"node-name": "q", "amount-exceeded": 4096, "write-threshold": 1 << 20}));
    // It is off then, until it is set anew; the file's is still on.
    write("write -z 2M 4k");
    write("write 4M 8M");
    let event = client.event("BLOCK_WRITE_THRESHOLD");
    assert_eq!((&event["node-name"], &event["write-threshold"]), (&json!(file), &json!(8 << 20)));
    let nodes = client.command("query-named-block-nodes", json!({"flat": true}));
    assert_eq!(
        (&find(&nodes, "q")["write_threshold"], &find(&nodes, &file)["write_threshold"]),
        (&json!(0), &json!(0))
    );
    client.command("block-set-write-threshold", threshold("q", 1 << 20));
    client.command("block-set-write-threshold", threshold("q", 0));
    write("write 12M 4k");
    // Also past a throttle filter, whose own threshold counts for requests past it.
    client.command(
        "block_set_io_throttle",
        json!({"id": "q", "bps": 0, "bps_rd": 0, "bps_wr": 0, "iops": 100_000,
                                                  "iops_rd": 0, "iops_wr": 0}),
    );
    client.command("block-set-write-threshold", threshold("throttle-q", 512));
    write("write 512 512");
    assert_eq!(client.event("BLOCK_WRITE_THRESHOLD")["amount-exceeded"], 512);
    assert!(client.refusal("block-set-write-threshold", threshold("zz", 1)).contains("zz"));
    assert!(
        client
            .refusal("block-set-write-threshold", json!({"node-name": "q", "write-threshold": 1.5}))
            .contains("expects uint64")
    );
    assert!(client.events.iter().all(|event| event["event"] != "BLOCK_WRITE_THRESHOLD"), "{:?}", client.events);
    daemon.stop().expect("stopped in order");
}
