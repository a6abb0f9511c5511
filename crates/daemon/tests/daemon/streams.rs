// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `block-stream` by command, while clients write.

use super::beside_qemu::Theirs;
use super::commits::{OPTIONS, backing_of, chain, expect_content};
use super::exports::uri;
use super::load::Load;
use super::running::{Client, Running, temp_folder};
use cowshed_testkit::qemu::Qemu;
use serde_json::{Value, json};

#[test]
fn an_image_takes_over_its_chain_under_writing_clients() {
    for (number, options) in OPTIONS.iter().enumerate() {
        // Down to nothing, onto the base, and an image in the middle onto the base.
        for (device, base) in [("e", None), ("t", Some("b")), ("m", Some("b")), ("m", None)] {
            let (daemon, mut client, mut model) = chain(options);
            let load = Load::start(&uri(&daemon, "t"), &mut model, number as u64);
            let mut arguments = json!({"job-id": "s", "device": device, "filter-node-name": "f"});
            if let Some(base) = base {
                arguments["base-node"] = json!(base);
            }
            client.command("block-stream", arguments);
            let completed = client.event("BLOCK_JOB_COMPLETED");
            assert!(completed.get("error").is_none(), "{completed}");
            assert_eq!(completed["type"], "stream");
            load.join();
            let image = if device == "e" { "t" } else { device };
            let nodes = client.command("query-named-block-nodes", json!({"flat": true}));
            let find = |name: &str| nodes.as_array().expect("a list").iter().find(|node| node["node-name"] == name);
            let backing = base.map_or(Value::Null, |base| json!(daemon.path(base)));
            assert_eq!(find(image).expect("the image")["backing_file"], backing);
            assert_eq!(find(image).expect("the image")["ro"], json!(image == "m"));
            assert!(find("f").is_none(), "the filter goes with the job");
            client.command("blockdev-del", json!({"node-name": if device == "m" { "l" } else { "m" }}));
            let second = Load::start(&uri(&daemon, "t"), &mut model, 79);
            second.join();
            let folder = expect_content(daemon, "t", &model);
            assert_eq!(backing_of(&folder.path().join(image)), backing);
        }
    }
}

#[test]
fn a_stream_that_is_cancelled_leaves_the_chain() {
    let (daemon, mut client, mut model) = chain("cluster_size=64k");
    client.command("block-stream", json!({"job-id": "s", "device": "t", "speed": 1 << 20, "filter-node-name": "f"}));
    let load = Load::start(&uri(&daemon, "t"), &mut model, 5);
    for (command, arguments) in [
        ("blockdev-del", json!({"node-name": "f"})),
        ("block_resize", json!({"node-name": "t", "size": 9 << 20})),
        ("blockdev-reopen", json!({"options": [{"driver": "qcow2", "node-name": "m", "file": "m"}]})),
        ("block-commit", json!({"job-id": "c", "device": "e"})),
        ("change-backing-file", json!({"device": "e", "image-node-name": "m", "backing-file": "x"})),
        ("block-export-add", json!({"type": "nbd", "id": "past", "node-name": "t", "name": "past", "writable": true})),
    ] {
        let refusal = client.refusal(command, arguments);
        assert!(refusal.contains("in use") || refusal.contains("Permission conflict"), "{command}: {refusal}");
    }
    assert!(client.refusal("block-stream", json!({"device": "t", "base-node": "t", "job-id": "s"})).contains("'t'"));
    let wrong = json!({"device": "t", "backing-file": "x", "job-id": "w"});
    assert_eq!(client.refusal("block-stream", wrong), "backing file specified, but streaming the entire chain");
    client.command("block-job-cancel", json!({"device": "s"}));
    client.event("BLOCK_JOB_CANCELLED");
    load.join();
    let below = daemon.path("m");
    let folder = expect_content(daemon, "t", &model);
    assert_eq!(backing_of(&folder.path().join("t")), json!(below));
}

#[test]
fn a_stream_waits_at_an_error_and_goes_on() {
    let (daemon, mut client, _) = chain("cluster_size=64k");
    let qemu = Qemu::system();
    let (low, top) = (daemon.path("e1"), daemon.path("e2"));
    qemu.create(&low, "raw", "", 4 << 20);
    qemu.io_commands(&low, "raw", &["write -P 9 0 4M".to_owned()]).expect_ok();
    qemu.create(&top, "qcow2", &format!("backing_file={},backing_fmt=raw", low.display()), 4 << 20);
    // Reading fails once in the middle.
    let rule = json!({"event": "none", "iotype": "read", "sector": 4096, "errno": 5, "times": 1});
    let file = json!({"driver": "blkdebug", "image": {"driver": "file", "filename": low}, "inject-error": [rule]});
    client.command("blockdev-add", json!({"driver": "raw", "node-name": "low", "read-only": true, "file": file}));
    let file = json!({"driver": "file", "filename": top});
    client.command("blockdev-add", json!({"driver": "qcow2", "node-name": "top", "backing": "low", "file": file}));
    client.command("block-stream", json!({"job-id": "s", "device": "top", "on-error": "stop"}));
    let error = client.event("BLOCK_JOB_ERROR");
    assert_eq!(error, json!({"device": "s", "operation": "read", "action": "stop"}));
    let jobs = client.command("query-block-jobs", json!({}));
    assert_eq!((&jobs[0]["io-status"], &jobs[0]["status"]), (&json!("failed"), &json!("paused")));
    client.command("block-job-resume", json!({"device": "s"}));
    let completed = client.event("BLOCK_JOB_COMPLETED");
    assert!(completed.get("error").is_none(), "{completed}");
    let (folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    assert_eq!(backing_of(&folder.path().join("e2")), Value::Null);
    assert!(qemu.content(&folder.path().join("e2"), "qcow2").iter().all(|&byte| byte == 9));
}

#[test]
fn a_protocol_is_named_as_raw_in_a_header_on_demand() {
    let (daemon, mut client, _) = chain("cluster_size=64k");
    let qemu = Qemu::system();
    let (base, middle, top) = (daemon.path("p1"), daemon.path("p2"), daemon.path("p3"));
    for (command, mask, format) in [
        ("block-stream", None, "file"),
        ("block-stream", Some(true), "raw"),
        ("block-commit", Some(false), "file"),
        ("block-commit", Some(true), "raw"),
    ] {
        qemu.create(&base, "raw", "", 1 << 20);
        qemu.create(&middle, "qcow2", &format!("backing_file={},backing_fmt=raw", base.display()), 1 << 20);
        qemu.io_commands(&middle, "qcow2", &["write -P 7 64k 64k".to_owned()]).expect_ok();
        qemu.create(&top, "qcow2", &format!("backing_file={},backing_fmt=qcow2", middle.display()), 1 << 20);
        client
            .command("blockdev-add", json!({"driver": "file", "node-name": "p1", "filename": base, "read-only": true}));
        let file = json!({"driver": "file", "filename": middle});
        let options = json!({"driver": "qcow2", "node-name": "p2", "file": file, "backing": "p1", "read-only": true});
        client.command("blockdev-add", options);
        let file = json!({"driver": "file", "filename": top});
        client.command("blockdev-add", json!({"driver": "qcow2", "node-name": "p3", "file": file, "backing": "p2"}));
        let mut arguments = json!({"job-id": "j", "device": "p3", "base-node": "p1"});
        if let Some(mask) = mask {
            arguments["backing-mask-protocol"] = json!(mask);
        }
        if command == "block-commit" {
            arguments["top-node"] = json!("p2");
        }
        client.command(command, arguments);
        let completed = client.event("BLOCK_JOB_COMPLETED");
        assert!(completed.get("error").is_none(), "{command}: {completed}");
        for node in ["p3", "p2", "p1"] {
            client.command("blockdev-del", json!({"node-name": node}));
        }
        let info = qemu.info(&top, "qcow2");
        assert_eq!(info["backing-filename-format"], format, "{command} with {mask:?}");
        assert_eq!(info["backing-filename"], json!(base));
    }
    daemon.stop().expect("stopped in order");
}

/// Streams all that is below `t` in the folder of a daemon.
fn stream_in(client: &mut Client, folder: &std::path::Path) {
    let file = json!({"driver": "file", "filename": folder.join("t")});
    client.command("blockdev-add", json!({"driver": "qcow2", "node-name": "t", "file": file}));
    client.command("block-stream", json!({"job-id": "s", "device": "t"}));
    let completed = client.event("BLOCK_JOB_COMPLETED");
    assert!(completed.get("error").is_none(), "{completed}");
    client.command("blockdev-del", json!({"node-name": "t"}));
}

/// The guest wrote zeroes while an image in the middle of the chain was the top. They hide whatever backing file comes later.
#[test]
fn zeroes_of_a_lower_layer_survive_another_backing_file() {
    let qemu = Qemu::system();
    for options in ["cluster_size=64k", "extended_l2=on", "compat=0.10"] {
        let (theirs, mut their_client) = Theirs::start();
        let daemon = Running::start_in(temp_folder(), Vec::new());
        let mut our_client = daemon.client();
        let folders = [theirs.folder.path().to_owned(), daemon.folder.path().to_owned()];
        for folder in &folders {
            let path = |name: &str| folder.join(name);
            let text = |name: &str| path(name).display().to_string();
            qemu.create(&path("b"), "qcow2", "", 2 << 20);
            qemu.io_commands(&path("b"), "qcow2", &["write -P 9 0 1M".to_owned()]);
            qemu.create(&path("full"), "qcow2", "", 4 << 20);
            qemu.io_commands(&path("full"), "qcow2", &["write -P 66 0 4M".to_owned()]);
            for (name, below, requests) in [
                ("m", "b", ["write -z 0 128k", "write -P 3 1M 64k", "write -z 1600k 64k"]),
                ("t", "m", ["write -P 4 512k 64k", "write -z 640k 64k", "write -P 5 2M 64k"]),
            ] {
                let backed = format!("{options},backing_file={},backing_fmt=qcow2", text(below));
                qemu.create(&path(name), "qcow2", &backed, 3 << 20);
                qemu.io_commands(&path(name), "qcow2", &requests.map(str::to_owned));
            }
        }
        stream_in(&mut their_client, &folders[0]);
        stream_in(&mut our_client, &folders[1]);
        let content = |folder: &std::path::Path| {
            qemu.expect_clean(&folder.join("t"));
            qemu.content(&folder.join("t"), "qcow2")
        };
        assert!(content(&folders[0]) == content(&folders[1]), "{options}");
        for folder in &folders {
            let (full, top) = (folder.join("full").display().to_string(), folder.join("t").display().to_string());
            qemu.img(["rebase", "-u", "-b", &full, "-F", "qcow2", &top]).expect_ok();
        }
        let (theirs_now, ours_now) = (content(&folders[0]), content(&folders[1]));
        // Version 2 can't record it without writing zeroes, which QEMU does for a backing file's sake and ours doesn't.
        if options != "compat=0.10" {
            for (start, len) in [(0, 128 << 10), (640 << 10, 64 << 10), (1600 << 10, 64 << 10)] {
                let zeroes = |bytes: &[u8]| bytes[start..start + len].iter().all(|byte| *byte == 0);
                assert!(zeroes(&theirs_now) && zeroes(&ours_now), "{options}: zeroes at {start} are gone");
            }
        }
        daemon.stop().expect("stopped in order");
    }
}
