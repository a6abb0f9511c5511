// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The clients that people use: nbdinfo, nbdcopy, qemu-img, qemu-io.

use crate::served::{Served, write_pattern};
use cowshed_image::OpenRequest;
use cowshed_nbd_server::{Event, Server, ServerConfig};
use cowshed_testkit::programs::{failing_tool, tool};
use cowshed_testkit::qemu::Qemu;

const SIZE: u64 = 8 << 20;

fn text(path: &std::path::Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// Serves a qcow2 image with a backing file, with two queues.
fn serve_overlay() -> (Served, Vec<u8>) {
    let served = Served::start(ServerConfig { queues: 2, ..ServerConfig::default() });
    let (raw, base, top) = (served.path("base.raw"), served.path("base.qcow2"), served.path("top.qcow2"));
    let content = write_pattern(&raw, SIZE, 7);
    let qemu = Qemu::system();
    qemu.convert((&raw, "raw"), (&base, "qcow2"), &[]);
    tool("qemu-img", &["create", "-q", "-f", "qcow2", "-b", text(&base), "-F", "qcow2", text(&top)]);
    served.export(OpenRequest::file(text(&top)).writable(true).discard(true), |export| {
        export.description = "the top of a chain".to_owned();
        export.allocation_depth = true;
    });
    (served, content)
}

#[test]
fn nbdinfo_sees_the_export_as_it_is() {
    let (served, _) = serve_overlay();
    let info = tool("nbdinfo", &["--json", &served.uri("")]);
    let info: serde_json::Value = serde_json::from_str(&info).expect("JSON");
    let export = &info["exports"][0];
    assert_eq!(info["protocol"], "newstyle-fixed");
    assert_eq!(info["TLS"], false);
    assert_eq!(export["export-size"], SIZE);
    assert_eq!(export["description"], "the top of a chain");
    for flag in
        ["can_cache", "can_df", "can_fast_zero", "can_flush", "can_fua", "can_multi_conn", "can_trim", "can_zero"]
    {
        assert_eq!(export[flag], true, "{flag}");
    }
    assert_eq!(export["is_read_only"], false);
    assert_eq!(export["block_size_minimum"], 1);
    assert_eq!(export["block_size_maximum"], 32 << 20);
    let contexts: Vec<&str> =
        export["contexts"].as_array().expect("a list").iter().filter_map(|c| c.as_str()).collect();
    assert_eq!(contexts, ["base:allocation", "qemu:allocation-depth"]);
    assert_eq!(tool("nbdinfo", &["--size", &served.uri("")]).trim(), SIZE.to_string());
    let listed = tool("nbdinfo", &["--list", &served.uri("")]);
    assert!(listed.contains("the top of a chain"), "{listed}");
    let error = failing_tool("nbdinfo", &[&served.uri("other")]);
    assert!(error.contains("other"), "{error}");
    served.stop();
}

#[test]
fn every_client_reads_the_content() {
    let (served, content) = serve_overlay();
    let copy = served.path("copy.raw");
    for arguments in
        [&["--connections=1"][..], &["--connections=4", "--requests=32"], &["--no-extents"], &["--synchronous"]]
    {
        let uri = served.uri("");
        let arguments: Vec<&str> = arguments.iter().copied().chain([uri.as_str(), text(&copy)]).collect();
        tool("nbdcopy", &arguments);
        assert!(std::fs::read(&copy).expect("read") == content, "nbdcopy {arguments:?}");
    }
    tool("qemu-img", &["convert", "-O", "raw", &served.uri(""), text(&copy)]);
    assert!(std::fs::read(&copy).expect("read") == content, "qemu-img convert");
    tool("qemu-img", &["compare", "-f", "raw", "-F", "raw", &served.uri(""), text(&served.path("base.raw"))]);
    served.stop();
}

#[test]
fn the_map_of_the_chain_is_that_of_qemu_nbd() {
    let (served, _) = serve_overlay();
    // In the overlay: data, zeroes, and a hole that hides the base.
    tool(
        "qemu-io",
        &["-f", "raw", "-c", "write -P 5 1M 128k", "-c", "write -z 2M 128k", "-c", "discard 3M 128k", &served.uri("")],
    );
    let ours = |context: &str| tool("nbdinfo", &["--json", &format!("--map={context}"), &served.uri("")]);
    let maps = ["base:allocation", "qemu:allocation-depth"].map(ours);
    let totals = tool("nbdinfo", &["--map", "--totals", &served.uri("")]);
    assert!(totals.contains("hole,zero"), "{totals}");
    let top = served.path("top.qcow2");
    let dir = served.stop();
    Qemu::system().expect_clean(&top);
    for (context, ours) in ["base:allocation", "qemu:allocation-depth"].into_iter().zip(maps) {
        let script = format!(
            "exec nbdinfo --json --map={context} -- [ qemu-nbd --read-only --allocation-depth -f qcow2 {} ]",
            top.display()
        );
        let theirs = tool("sh", &["-c", &script]);
        let parse = |text: &str| -> serde_json::Value { serde_json::from_str(text).expect("JSON") };
        assert_eq!(parse(&ours), parse(&theirs), "{context}");
    }
    drop(dir);
}

#[test]
fn clients_write_and_the_image_holds_it() {
    let served = Served::start(ServerConfig { queues: 2, ..ServerConfig::default() });
    let (source, target) = (served.path("source.raw"), served.path("target.qcow2"));
    let content = write_pattern(&source, SIZE, 3);
    Qemu::system().create(&target, "qcow2", "cluster_size=64k", SIZE);
    served.export(OpenRequest::file(text(&target)).writable(true).discard(true), |export| {
        export.name = "target".to_owned();
        export.is_default = true;
    });
    tool("nbdcopy", &["--connections=4", "--flush", text(&source), &served.uri("target")]);
    tool("qemu-img", &["compare", "-f", "raw", "-F", "raw", text(&source), &served.uri("")]);
    tool("qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", text(&source), &served.uri("")]);
    tool(
        "qemu-io",
        &[
            "-f",
            "raw",
            "-c",
            "write -f -P 9 12345 777",
            "-c",
            "discard 1M 64k",
            "-c",
            "write -z -u 4M 1M",
            "-c",
            "flush",
            &served.uri(""),
        ],
    );
    tool("qemu-io", &["-f", "raw", "-c", "read -P 9 12345 777", "-c", "read -P 0 4M 1M", &served.uri("")]);
    let mut expected = content;
    expected[12345..12345 + 777].fill(9);
    expected[1 << 20..(1 << 20) + (64 << 10)].fill(0);
    expected[4 << 20..5 << 20].fill(0);
    let dir = served.stop();
    let qemu = Qemu::system();
    qemu.expect_clean(&target);
    assert!(qemu.content(&target, "qcow2") == expected);
    drop(dir);
}

#[test]
fn read_only_means_read_only() {
    let served = Served::start(ServerConfig::default());
    let image = served.path("image.raw");
    let content = write_pattern(&image, SIZE, 1);
    served.export(OpenRequest::file(text(&image)).format("raw"), |_| ());
    let info = tool("nbdinfo", &[&served.uri("")]);
    assert!(info.contains("is_read_only: true"), "{info}");
    let failed = failing_tool("qemu-io", &["-f", "raw", "-c", "write 0 512", &served.uri("")]);
    assert!(!failed.is_empty());
    served.stop();
    assert!(!content.is_empty());
}

#[test]
fn events_tell_of_clients_that_come_and_go() {
    let served = Served::start(ServerConfig::default());
    let image = served.path("image.raw");
    write_pattern(&image, SIZE, 1);
    served.export(OpenRequest::file(text(&image)).format("raw"), |export| export.name = "disk".to_owned());
    tool("nbdinfo", &["--map", &served.uri("disk")]);
    let events = std::sync::Arc::clone(&served.events);
    served.stop();
    let events = events.lock().unwrap();
    let connected = events.iter().any(|e| matches!(e, Event::ClientConnected { export, .. } if export == "disk"));
    let left = events.iter().any(|e| matches!(e, Event::ClientDisconnected { error: None, .. }));
    assert!(connected && left, "{events:?}");
}

#[test]
fn who_comes_before_the_exports_waits_for_them() {
    use std::io::Read;
    let served = Served::start_prepared(ServerConfig::default(), Server::hold);
    let mut early = std::os::unix::net::UnixStream::connect(&served.socket).expect("it listens");
    early.set_read_timeout(Some(std::time::Duration::from_millis(200))).expect("a timeout");
    let mut greeting = [0; 8];
    let silence = early.read(&mut greeting).expect_err("an answer of a server that holds its clients");
    assert_eq!(silence.kind(), std::io::ErrorKind::WouldBlock);
    let path = served.path("disk.raw");
    write_pattern(&path, 1 << 20, 1);
    served.export(OpenRequest::file(path.to_str().unwrap()).format("raw"), |_| ());
    served.server.release();
    early.set_read_timeout(Some(std::time::Duration::from_secs(30))).expect("a timeout");
    early.read_exact(&mut greeting).expect("a greeting");
    assert_eq!(&greeting, b"NBDMAGIC");
    drop(early);
    tool("nbdinfo", &[&served.uri("")]);
    served.stop();
    // A server that never had a client stops as well.
    Served::start_prepared(ServerConfig::default(), Server::hold).stop();
}
