// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Nodes by command.

use super::exports::uri;
use super::running::{Client, Running};
use cowshed_testkit::programs::tool;
use cowshed_testkit::qemu::Qemu;
use cowshed_testkit::waiting::await_that;
use serde_json::{Value, json};

fn with_image() -> Running {
    let daemon = Running::start(Vec::new());
    Qemu::system().create(&daemon.path("a.qcow2"), "qcow2", "", 64 << 20);
    daemon
}

/// QEMU's daemon refuses it in these words, where another node is above the node. Ours lets a disk grow under its
/// clients.
#[test]
fn nodes_below_others_and_disks_of_clients_keep_their_sizes() {
    let daemon = Running::start(Vec::new());
    let folder = daemon.path("");
    let qemu = Qemu::system();
    qemu.create(&folder.join("base"), "qcow2", "", 1 << 20);
    qemu.io_commands(&folder.join("base"), "qcow2", &["write -P 1 0 1M".to_owned()]);
    let base = folder.join("base").display().to_string();
    qemu.create(&folder.join("top"), "qcow2", &format!("backing_file={base},backing_fmt=qcow2"), 1 << 20);
    qemu.create(&folder.join("raw"), "raw", "", 1 << 20);
    let mut client = daemon.client();
    client.files_in(&folder);
    for node in [
        json!({"driver": "file", "node-name": "fb", "filename": "base"}),
        json!({"driver": "qcow2", "node-name": "b", "file": "fb"}),
        json!({"driver": "file", "node-name": "ft", "filename": "top"}),
        json!({"driver": "qcow2", "node-name": "t", "file": "ft", "backing": "b"}),
        json!({"driver": "file", "node-name": "fr", "filename": "raw"}),
        json!({"driver": "raw", "node-name": "r", "file": "fr"}),
        json!({"driver": "copy-on-read", "node-name": "c", "file": "r"}),
    ] {
        client.command("blockdev-add", node);
    }
    let busy = "Node 'b' is busy: node is used as backing hd of 't'";
    let conflict = |node: &str, user: &str| {
        format!(
            "Permission conflict on node '{node}': permissions 'resize' are both required by an unnamed block device (uses \
             node '{node}' as 'root' child) and unshared by {user}."
        )
    };
    let file_of =
        |node: &str, user: &str| conflict(node, &format!("node '{user}' (uses node '{node}' as 'file' child)"));
    for size in [0, 512 << 10, 2 << 20] {
        let mut refusal = |node: &str| client.refusal("block_resize", json!({"node-name": node, "size": size}));
        assert_eq!(refusal("b"), busy);
        assert_eq!(refusal("fb"), file_of("fb", "b"));
        assert_eq!(refusal("ft"), file_of("ft", "t"));
        assert_eq!(refusal("fr"), file_of("fr", "r"));
    }
    // A filter passes the size on.
    client.command("block_resize", json!({"node-name": "r", "size": 2 << 20}));
    let server = json!({"addr": {"type": "unix", "data": {"path": folder.join("n.sock")}}});
    client.command("nbd-server-start", server);
    for (id, node) in [("e", "t"), ("f", "c")] {
        client.command("block-export-add", json!({"type": "nbd", "id": id, "node-name": node, "writable": true}));
    }
    let told = |node: &str| conflict(node, &format!("an unnamed block device (uses node '{node}' as 'root' child)"));
    for node in ["t", "c", "r"] {
        let smaller = client.refusal("block_resize", json!({"node-name": node, "size": 512 << 10}));
        assert_eq!(smaller, told(node));
        client.command("block_resize", json!({"node-name": node, "size": 3 << 20}));
    }
    let (_kept, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    assert!(qemu.content(&folder.join("base"), "qcow2") == vec![1; 1 << 20]);
    for image in ["base", "top"] {
        qemu.expect_clean(&folder.join(image));
    }
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
fn the_sizes_of_caches_change_by_command() {
    let daemon = with_image();
    let mut client = daemon.client();
    let path = daemon.path("a.qcow2");
    let with = |changes: Value| {
        let mut options = json!({"driver": "qcow2", "node-name": "q", "file": {"driver": "file", "filename": path}});
        options.as_object_mut().expect("an object").extend(changes.as_object().expect("an object").clone());
        options
    };
    client.command("blockdev-add", with(json!({})));
    let limits = |client: &mut Client| {
        let nodes = client.command("query-blockstats", json!({"query-nodes": true}));
        let cache =
            &nodes.as_array().expect("a list").iter().find(|node| node["node-name"] == "q").expect("q")["x-cache"];
        ["l2-limit-bytes", "refcount-limit-bytes"].map(|key| cache[key].as_u64().expect("a number"))
    };
    // 64 MiB in clusters of 64 KiB have 1,024 entries, 8 KiB; refcounts have four clusters at least.
    const LEAST: u64 = 256 << 10;
    let before = limits(&mut client);
    assert_eq!(before, [8 << 10, LEAST]);
    for (changes, expected) in [
        (json!({"refcount-cache-size": 1 << 20}), [4 << 20, 1 << 20]),
        (json!({"cache-size": 10 << 20}), [8 << 20, 2 << 20]),
        (json!({"cache-size": 4 << 20, "refcount-cache-size": 1 << 20}), [3 << 20, 1 << 20]),
        (json!({"cache-size": 4 << 20, "l2-cache-size": 1 << 20}), [1 << 20, 3 << 20]),
        (json!({"l2-cache-coverage": 8_u64 << 30}), [1 << 20, LEAST]),
        (json!({"l2-cache-coverage": 32 << 20, "refcount-cache-size": 512 << 10}), [4 << 10, 512 << 10]),
        (json!({"l2-cache-size": 2 << 20, "l2-cache-entry-size": 512}), [2 << 20, 512 << 10]),
        (json!({}), before),
    ] {
        client.command("blockdev-reopen", json!({"options": [with(changes.clone())]}));
        assert_eq!(limits(&mut client), expected, "{changes}");
    }
    client.command("blockdev-reopen", json!({"options": [with(json!({"cache-size": 10 << 20}))]}));
    for (changes, words) in [
        (json!({"cache-size": 1 << 20, "l2-cache-size": 2 << 20}), "l2-cache-size may not exceed cache-size"),
        (
            json!({"cache-size": 1 << 20, "refcount-cache-size": 2 << 20}),
            "refcount-cache-size may not exceed cache-size",
        ),
        (
            json!({"cache-size": 1 << 20, "refcount-cache-size": 256 << 10, "l2-cache-size": 512 << 10}),
            "cache-size, l2-cache-size and refcount-cache-size may not be set at the same time",
        ),
        (json!({"refcount-cache-size": 1_000_000_000_000_000_u64}), "Refcount cache size too big"),
        (json!({"l2-cache-coverage": 1 << 30, "l2-cache-size": 1 << 20}), "may not be set at the same time"),
        (json!({"l2-cache-coverage": 1 << 30, "cache-size": 1 << 20}), "may not be set at the same time"),
        (json!({"l2-cache-entry-size": 300}), "L2 cache entry size must be a power of two between 512 and"),
        (json!({"cache-clean-interval": 10_000_000_000_u64}), "Cache clean interval too big"),
    ] {
        let refused = client.refusal("blockdev-reopen", json!({"options": [with(changes.clone())]}));
        assert!(refused.contains(words), "{changes}: {refused}");
        assert_eq!(limits(&mut client), [8 << 20, 2 << 20], "{changes}");
    }
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
    assert_eq!(of("t").expect("the filter")["drv"], "throttle");
    // The image's requests to its file went through the filter.
    let stats = client.command("query-blockstats", json!({"query-nodes": true}));
    let stats = stats.as_array().expect("a list").iter().find(|node| node["node-name"] == "t").expect("the filter");
    assert!(stats["stats"]["wr_bytes"].as_u64().expect("a number") >= 3 << 20, "{stats}");
    // It stays where it is when the image gets an overlay.
    client.command("blockdev-snapshot-sync", json!({"device": "e", "snapshot-file": daemon.path("o.qcow2")}));
    qemu.io(["-f", "raw", "-c", "write -P 8 2M 64k", "-c", "read -P 7 1M 1M", &uri]).expect_ok();
    assert!(client.refusal("blockdev-del", json!({"node-name": "t"})).contains("in use"));
    let (_folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    qemu.expect_clean(&path);
}

#[test]
fn every_driver_is_added_by_name_and_serves() {
    let daemon = with_image();
    let mut client = daemon.client();
    let qemu = Qemu::system();
    let path = |name: &str| daemon.path(name).to_str().expect("text").to_owned();
    qemu.io_commands(&daemon.path("a.qcow2"), "qcow2", &["write -P 7 0 1M".to_owned()]).expect_ok();
    qemu.convert((&daemon.path("a.qcow2"), "qcow2"), (&daemon.path("a.raw"), "raw"), &[]);
    let converted = ["vmdk", "vdi", "vpc", "vhdx", "qcow", "qed", "parallels"];
    for format in converted {
        let target = daemon.path(&format!("a.{format}"));
        // The disk as long as the others, not as long as a geometry.
        let options: &[&str] = if format == "vpc" { &["-o", "force_size=on"] } else { &[] };
        qemu.convert((&daemon.path("a.qcow2"), "qcow2"), (&target, format), options);
    }
    let packed = std::process::Command::new("python3")
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/daemon/packed_images.py"))
        .current_dir(std::path::Path::new(&path("a.raw")).parent().expect("a folder"))
        .status();
    assert!(packed.expect("python3 runs").success());
    for copy in ["s", "d", "c", "p", "l", "v", "w", "q", "r"] {
        std::fs::copy(daemon.path("a.raw"), daemon.path(&format!("{copy}.raw"))).expect("a copy");
    }
    std::fs::copy(daemon.path("a.qcow2"), daemon.path("z.qcow2")).expect("a copy");
    std::fs::write(daemon.path("log"), "").expect("a file");
    std::fs::create_dir(daemon.path("folder")).expect("a folder");
    std::fs::write(daemon.path("folder/file"), [7; 4096]).expect("a file");
    let socket = path("n.sock");
    client.command("nbd-server-start", json!({"addr": {"type": "unix", "data": {"path": socket}}}));
    client.command("object-add", json!({"qom-type": "throttle-group", "id": "g"}));
    client.command("object-add", json!({"qom-type": "secret", "id": "s", "data": "geheim"}));
    let volume = json!({"driver": "file", "filename": path("a.luks")});
    std::fs::write(path("a.luks"), "").expect("a file");
    let options = json!({"driver": "luks", "size": 64 << 20, "key-secret": "s", "iter-time": 10, "file": volume});
    client.command("blockdev-create", json!({"job-id": "j", "options": options}));
    await_that("the image is made", || client.command("query-jobs", json!({}))[0]["status"] == "concluded");
    let target = format!("driver=luks,key-secret=s,file.filename={}", path("a.luks"));
    let object = ["--object", "secret,id=s,data=geheim"];
    let fill = ["convert", "-n", object[0], object[1], &path("a.raw"), "--target-image-opts", &target];
    qemu.img(fill).expect_ok();
    let file = |name: &str| json!({"driver": "file", "filename": path(name)});
    let raw = |name: &str| json!({"driver": "raw", "file": file(name)});
    // In this order: later ones have earlier ones below them.
    let drivers = [
        ("qcow2", json!({"file": file("a.qcow2")}), Some(7)),
        ("file", json!({"filename": path("a.raw")}), Some(7)),
        ("raw", json!({"file": "file"}), Some(7)),
        ("vmdk", json!({"file": file("a.vmdk")}), Some(7)),
        ("vdi", json!({"file": file("a.vdi")}), Some(7)),
        ("vpc", json!({"file": file("a.vpc")}), Some(7)),
        ("vhdx", json!({"file": file("a.vhdx"), "read-only": true}), Some(7)),
        ("qcow", json!({"file": file("a.qcow"), "read-only": true}), Some(7)),
        ("qed", json!({"file": file("a.qed"), "read-only": true}), Some(7)),
        ("parallels", json!({"file": file("a.parallels"), "read-only": true}), Some(7)),
        ("dmg", json!({"file": file("a.dmg"), "read-only": true}), Some(7)),
        ("bochs", json!({"file": file("a.bochs"), "read-only": true}), Some(7)),
        ("cloop", json!({"file": file("a.cloop"), "read-only": true}), Some(7)),
        ("luks", json!({"file": file("a.luks"), "key-secret": "s"}), Some(7)),
        ("null-co", json!({"size": 64 << 20}), Some(0)),
        ("null-aio", json!({"size": 64 << 20, "read-zeroes": false, "latency-ns": 1000}), Some(0)),
        ("nbd", json!({"server": {"type": "unix", "path": socket}, "export": "qcow2", "read-only": true}), Some(7)),
        ("throttle", json!({"file": "raw", "throttle-group": "g"}), Some(7)),
        ("copy-on-read", json!({"file": raw("c.raw")}), Some(7)),
        ("copy-before-write", json!({"file": raw("s.raw"), "target": raw("d.raw")}), Some(7)),
        ("snapshot-access", json!({"file": "copy-before-write"}), Some(7)),
        ("blkdebug", json!({"image": file("c.raw"), "read-only": true, "force-share": true}), None),
        ("fault", json!({"file": "null-co"}), Some(0)),
        ("host_device", json!({"filename": path("a.raw")}), None),
        ("host_cdrom", json!({"filename": path("a.raw")}), None),
        ("compress", json!({"file": {"driver": "qcow2", "file": file("z.qcow2")}}), Some(7)),
        ("preallocate", json!({"file": file("p.raw")}), Some(7)),
        ("blklogwrites", json!({"file": raw("l.raw"), "log": file("log")}), Some(7)),
        ("blkverify", json!({"raw": raw("v.raw"), "test": raw("w.raw")}), Some(7)),
        ("vvfat", json!({"dir": path("folder"), "read-only": true}), None),
        ("quorum", json!({"vote-threshold": 2, "children": [raw("q.raw"), raw("r.raw")]}), Some(7)),
    ];
    let mut named: Vec<&str> = drivers.iter().map(|(driver, ..)| *driver).collect();
    let mut known: Vec<&str> = cowshed_image::DRIVERS.schemas().map(|driver| driver.name).collect();
    named.sort_unstable();
    known.sort_unstable();
    assert_eq!(named, known, "each driver has its line here");
    for (driver, mut options, pattern) in drivers {
        options["driver"] = json!(driver);
        options["node-name"] = json!(driver);
        match (driver, pattern) {
            ("host_device" | "host_cdrom", _) => {
                // There are block devices in tests/devices of the binary.
                let said = client.refusal("blockdev-add", options);
                assert!(said.contains("block device"), "{said}");
                continue;
            }
            ("blkdebug", _) => {
                let mut without = options.clone();
                without.as_object_mut().expect("an object").remove("force-share");
                without["image"] = file("a.raw");
                without["read-only"] = json!(false);
                without["inject-error"] = json!([{"event": "none", "iotype": "read", "errno": 5, "times": 1}]);
                // The file is in use by a writer.
                assert!(client.refusal("blockdev-add", without).contains("lock"));
                options["image"] = json!({"driver": "null-co", "size": 64 << 20, "read-zeroes": true});
                options.as_object_mut().expect("an object").remove("force-share");
            }
            _ => {}
        }
        client.command("blockdev-add", options);
        let nodes = client.command("query-named-block-nodes", json!({"flat": true}));
        let node = nodes.as_array().expect("a list").iter().find(|node| node["node-name"] == driver);
        let node = node.unwrap_or_else(|| panic!("{driver} is listed"));
        // A folder is a disk of 1024 cylinders, 16 heads and 63 sectors.
        let bytes = if driver == "vvfat" { 1024 * 16 * 63 * 512 } else { 64 << 20 };
        assert_eq!((&node["drv"], &node["image"]["virtual-size"]), (&json!(driver), &json!(bytes)));
        let export = json!({"type": "nbd", "id": driver, "node-name": driver, "name": driver});
        client.command("block-export-add", export);
        let uri = format!("nbd+unix:///{driver}?socket={socket}");
        let reads = match driver {
            // The partition table is in front, and the file's only cluster far in front of the end.
            "vvfat" => ["read 0 1M".to_owned(), "read -P 0 500M 1M".to_owned()],
            _ => [format!("read -P {} 0 1M", pattern.unwrap_or(0)), "read -P 0 32M 1M".to_owned()],
        };
        qemu.io(["-f", "raw", "-r", "-c", &reads[0], "-c", &reads[1], &uri]).expect_ok();
    }
    daemon.stop().expect("stopped in order");
}

#[test]
fn encrypted_images_are_created_and_opened_with_their_secret() {
    let daemon = Running::start(Vec::new());
    let mut client = daemon.client();
    let secret = |id: &str, data: &str| json!({"qom-type": "secret", "id": id, "data": data});
    client.command("object-add", secret("s", "geheim"));
    for (driver, name) in [("qcow2", "e.qcow2"), ("luks", "e.luks")] {
        let path = daemon.path(name);
        std::fs::write(&path, "").expect("a file");
        let key = json!({"key-secret": "s", "cipher-alg": "aes-128", "iter-time": 10});
        let mut options = json!({"driver": driver, "size": 4 << 20, "file": {"driver": "file", "filename": path}});
        let place = options.as_object_mut().expect("an object");
        let mut all = key.as_object().expect("an object").clone();
        if driver == "qcow2" {
            all.insert("format".to_owned(), json!("luks"));
            place.insert("encrypt".to_owned(), all.into());
        } else {
            place.extend(all);
        }
        client.command("blockdev-create", json!({"job-id": "j", "options": options}));
        await_that("the image is made", || client.command("query-jobs", json!({}))[0]["status"] == "concluded");
        assert_eq!(client.command("query-jobs", json!({}))[0]["error"], json!(null), "{driver}");
        client.command("job-dismiss", json!({"id": "j"}));
    }
    client.command("object-del", json!({"id": "s"}));
    let node = |driver: &str, name: &str| {
        let file = json!({"driver": "file", "filename": daemon.path(name)});
        match driver {
            "luks" => json!({"driver": driver, "node-name": driver, "key-secret": "s", "file": file}),
            _ => {
                let encrypt = json!({"format": "luks", "key-secret": "s"});
                json!({"driver": driver, "node-name": driver, "encrypt": encrypt, "file": file})
            }
        }
    };
    let (qcow2, luks) = (node("qcow2", "e.qcow2"), node("luks", "e.luks"));
    for options in [&qcow2, &luks] {
        assert!(client.refusal("blockdev-add", options.clone()).contains("No secret with id 's'"));
    }
    // Without a key there is no node, and nothing that could be served.
    for (options, key, name) in [(&qcow2, "encrypt", "encrypt.key-secret"), (&luks, "key-secret", "key-secret")] {
        let mut options = options.clone();
        options.as_object_mut().expect("an object").remove(key);
        let expected = format!("Parameter '{name}' is required for cipher");
        assert!(client.refusal("blockdev-add", options).contains(&expected));
    }
    assert_eq!(client.command("query-named-block-nodes", json!({})), json!([]));
    client.command("object-add", secret("s", "falsch"));
    for options in [&qcow2, &luks] {
        let refusal = client.refusal("blockdev-add", options.clone());
        assert!(refusal.contains("Invalid password") && !refusal.contains("falsch"), "{refusal}");
    }
    client.command("object-del", json!({"id": "s"}));
    client.command("object-add", secret("s", "geheim"));
    for options in [&qcow2, &luks] {
        client.command("blockdev-add", options.clone());
    }
    let address = json!({"type": "unix", "data": {"path": daemon.path("n.sock")}});
    client.command("nbd-server-start", json!({"addr": address}));
    // The secret may go while the images are in use: they keep their keys.
    client.command("object-del", json!({"id": "s"}));
    let nodes = client.command("query-named-block-nodes", json!({}));
    for name in ["qcow2", "luks"] {
        let node = nodes.as_array().expect("a list").iter().find(|node| node["node-name"] == name).expect("is listed");
        assert_eq!(node["encrypted"], json!(true), "{name}");
        client.command("block-export-add", json!({"type": "nbd", "id": name, "node-name": name, "writable": true}));
        let uri = uri(&daemon, name);
        let write = ["-f", "raw", "-c", "write -P 7 700 90k", "-c", "flush", "-c", "read -P 7 700 90k", &uri];
        let said = tool("qemu-io", &write);
        assert!(!said.contains("failed"), "{said}");
    }
    let (folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    for (driver, name, key) in [("qcow2", "e.qcow2", "encrypt.key-secret"), ("luks", "e.luks", "key-secret")] {
        let path = folder.path().join(name).display().to_string();
        let image = format!("driver={driver},{key}=s,file.filename={path}");
        let object = "secret,id=s,data=geheim";
        let said = tool("qemu-io", &["--object", object, "--image-opts", &image, "-c", "read -P 7 700 90k"]);
        assert!(said.contains("read 92160/92160") && !said.contains("verification failed"), "{said}");
    }
}

/// Its tables in memory are those of the old file. QEMU goes on with them in the new one.
#[test]
fn an_image_keeps_the_filter_below_it_on_its_file() {
    let daemon = with_image();
    Qemu::system().create(&daemon.path("b.qcow2"), "qcow2", "", 64 << 20);
    let mut client = daemon.client();
    for (node, name) in [("fa", "a.qcow2"), ("fb", "b.qcow2")] {
        client.command("blockdev-add", json!({"driver": "file", "node-name": node, "filename": daemon.path(name)}));
    }
    client.command("object-add", json!({"qom-type": "throttle-group", "id": "g"}));
    let filters = [json!({"driver": "throttle", "throttle-group": "g"}), json!({"driver": "preallocate"})];
    for mut filter in filters {
        filter["node-name"] = json!("p");
        filter["file"] = json!("fa");
        client.command("blockdev-add", filter.clone());
        client.command("blockdev-add", json!({"driver": "raw", "node-name": "r", "file": "p"}));
        client.command("blockdev-add", json!({"driver": "qcow2", "node-name": "q", "file": "r"}));
        filter["file"] = json!("fb");
        let refusal = client.refusal("blockdev-reopen", json!({"options": [filter]}));
        assert_eq!(refusal, "node 'q' stores its data in 'p' and can't move to another file");
        client.command("blockdev-del", json!({"node-name": "q"}));
        client.command("blockdev-reopen", json!({"options": [filter]}));
        client.command("blockdev-del", json!({"node-name": "r"}));
        client.command("blockdev-del", json!({"node-name": "p"}));
    }
    daemon.stop().expect("stopped in order");
}
