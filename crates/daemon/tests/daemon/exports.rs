// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Exports, used by the real clients: nbdinfo, nbdcopy, qemu-img, qemu-io.

use super::running::{Client, Running};
use cowshed_daemon::Step;
use cowshed_testkit::programs::tool;
use cowshed_testkit::qemu::Qemu;
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

/// A daemon with the image `a.qcow2` as node `q`, and its NBD server at `n.sock`.
pub fn serving() -> (Running, Client) {
    let daemon = Running::start(Vec::new());
    Qemu::system().create(&daemon.path("a.qcow2"), "qcow2", "", 16 << 20);
    let mut client = daemon.client();
    client.command("blockdev-add", node(&daemon.path("a.qcow2"), "q"));
    let address = json!({"type": "unix", "data": {"path": daemon.path("n.sock")}});
    client.command("nbd-server-start", json!({"addr": address}));
    (daemon, client)
}

pub fn node(path: &Path, name: &str) -> Value {
    json!({"driver": "qcow2", "node-name": name, "discard": "unmap", "file": {"driver": "file", "filename": path}})
}

pub fn uri(daemon: &Running, export: &str) -> String {
    format!("nbd+unix:///{export}?socket={}", daemon.path("n.sock").display())
}

#[test]
fn real_clients_read_and_write_an_export() {
    let (daemon, mut client) = serving();
    let export = json!({"type": "nbd", "id": "e", "node-name": "q", "name": "disk", "writable": true});
    client.command("block-export-add", export);
    let uri = uri(&daemon, "disk");
    let qemu = Qemu::system();
    qemu.io(["-f", "raw", "-c", "write -P 7 1M 1M", "-c", "write -z 1M 64k", "-c", "discard 4M 1M", &uri]).expect_ok();
    qemu.io(["-f", "raw", "-c", "read -P 0 1M 64k", "-c", "read -P 7 1088k 960k", &uri]).expect_ok();
    let info: Value = serde_json::from_str(&tool("nbdinfo", &["--json", &uri])).expect("JSON");
    assert_eq!(info["exports"][0]["export-size"], 16 << 20);
    assert_eq!(info["exports"][0]["is_read_only"], false);
    assert_eq!(info["exports"][0]["can_multi_conn"], true);
    let map: Value = serde_json::from_str(&tool("nbdinfo", &["--map", "--json", &uri])).expect("JSON");
    assert!(map.as_array().expect("a list").len() >= 3, "{map}");
    let copy = daemon.path("copy.raw");
    tool("nbdcopy", &[&uri, copy.to_str().expect("text")]);
    client.command("block-export-del", json!({"id": "e"}));
    assert_eq!(client.event("BLOCK_EXPORT_DELETED"), json!({"id": "e"}));
    client.command("blockdev-del", json!({"node-name": "q"}));
    assert!(qemu.is_equal((&daemon.path("a.qcow2"), "qcow2"), (&copy, "raw")));
    qemu.expect_clean(&daemon.path("a.qcow2"));
    daemon.stop().expect("stopped in order");
}

#[test]
fn exports_are_listed_and_refused_as_qemu_does() {
    let (daemon, mut client) = serving();
    let export = |id: &str, name: &str| json!({"type": "nbd", "id": id, "node-name": "q", "name": name});
    client.command("block-export-add", export("e", "first"));
    assert_eq!(client.refusal("block-export-add", export("e", "x")), "Block export id 'e' is already in use");
    assert_eq!(client.refusal("block-export-add", export("f", "first")), "NBD server already has export named 'first'");
    assert_eq!(
        client.refusal("block-export-add", json!({"type": "nbd", "id": "g", "node-name": "z"})),
        "Cannot find device='' nor node-name='z'"
    );
    client.command("nbd-server-add", json!({"device": "q", "name": "w", "writable": true}));
    let exports = client.command("query-block-exports", json!({}));
    let expected = |id: &str| json!({"id": id, "type": "nbd", "node-name": "q", "shutting-down": false});
    assert_eq!(exports, json!([expected("w"), expected("e")]));
    assert!(client.refusal("blockdev-del", json!({"node-name": "q"})).contains("in use"));
    assert_eq!(client.refusal("block-export-del", json!({"id": "z"})), "Export 'z' is not found");
    let address = json!({"type": "unix", "data": {"path": daemon.path("other.sock")}});
    assert_eq!(client.refusal("nbd-server-start", json!({"addr": address})), "NBD server already running");
    assert!(!daemon.path("other.sock").exists());

    client.command("nbd-server-stop", json!({}));
    assert_eq!(client.event("BLOCK_EXPORT_DELETED"), json!({"id": "w"}));
    assert_eq!(client.event("BLOCK_EXPORT_DELETED"), json!({"id": "e"}));
    assert!(!daemon.path("n.sock").exists());
    assert_eq!(client.refusal("nbd-server-stop", json!({})), "NBD server not running");
    assert_eq!(client.refusal("block-export-add", export("e", "x")), "NBD server not running");
    client.command("blockdev-del", json!({"node-name": "q"}));
    daemon.stop().expect("stopped in order");
}

#[test]
fn a_writethrough_export_flushes_each_change() {
    let (daemon, mut client) = serving();
    let flushes = |client: &mut Client| {
        let stats = client.command("query-blockstats", json!({"query-nodes": true}));
        let stats = stats.as_array().expect("a list").iter().find(|one| one["node-name"] == "q").cloned();
        stats.expect("is listed")["stats"]["flush_operations"].as_u64().expect("a number")
    };
    for (id, writethrough) in [("plain", false), ("through", true)] {
        let export = json!({"type": "nbd", "id": id, "node-name": "q", "name": id, "writable": true,
                            "writethrough": writethrough});
        client.command("block-export-add", export);
        let before = flushes(&mut client);
        let uri = uri(&daemon, id);
        let changes = ["write -P 1 0 64k", "write -P 2 1M 4k", "write -z 2M 64k", "discard 0 64k"];
        let commands = changes.iter().flat_map(|change| ["-c", *change]);
        Qemu::system().io(["-t", "unsafe", "-f", "raw"].into_iter().chain(commands).chain([uri.as_str()])).expect_ok();
        // A client of this kind asks for none itself; one comes when it leaves.
        let counted = flushes(&mut client) - before;
        assert!(if writethrough { counted >= 4 } else { counted <= 1 }, "{id}: {counted} flushes");
    }
    daemon.stop().expect("stopped in order");
}

#[test]
fn an_export_in_use_goes_only_by_force() {
    let (daemon, mut client) = serving();
    client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "q", "name": "disk"}));
    let (uri, marker) = (uri(&daemon, "disk"), daemon.path("holds"));
    // A client that holds the export until its standard input ends.
    let mut holder = Command::new("qemu-io")
        .args(["-f", "raw", "-r", &uri])
        .stdin(std::process::Stdio::piped())
        .stdout(std::fs::File::create(&marker).expect("a file"))
        .spawn()
        .expect("qemu-io runs");
    while std::fs::read_to_string(&marker).expect("a file").is_empty() {
        std::thread::yield_now();
    }
    assert_eq!(client.refusal("block-export-del", json!({"id": "e"})), "export 'e' still in use");
    client.command("block-export-del", json!({"id": "e", "mode": "hard"}));
    assert_eq!(client.command("query-block-exports", json!({})), json!([]));
    drop(holder.stdin.take());
    holder.wait().expect("qemu-io ends");
    daemon.stop().expect("stopped in order");
}

/// A client's process that has ended uses nothing, though the server is still busy with its last request.
#[test]
fn an_export_whose_client_has_ended_can_be_removed() {
    let (daemon, mut client) = serving();
    let limits = json!({"iops-read": 1, "iops-read-max": 1});
    client.command("object-add", json!({"qom-type": "throttle-group", "id": "g", "limits": limits}));
    let slow = json!({"driver": "throttle", "node-name": "slow", "throttle-group": "g", "file": {"driver": "file", "filename": daemon.path("a.qcow2")}});
    client.command("blockdev-del", json!({"node-name": "q"}));
    client.command("blockdev-add", slow);
    client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "slow", "name": "disk"}));
    // Several reads in flight, of which the server does one a second, and no goodbye.
    let script = "import nbd, os, sys; h = nbd.NBD(); h.connect_uri(sys.argv[1]); \
                  [h.aio_pread(nbd.Buffer(512), 512 * n) for n in range(2)]; os._exit(0)";
    tool("/usr/bin/python3", &["-c", script, &uri(&daemon, "disk")]);
    client.command("block-export-del", json!({"id": "e"}));
    assert_eq!(client.event("BLOCK_EXPORT_DELETED"), json!({"id": "e"}));
    client.command("blockdev-del", json!({"node-name": "slow"}));
    daemon.stop().expect("stopped in order");
}

#[test]
fn a_command_line_makes_the_same() {
    let folder = super::running::temp_folder();
    let path = |name: &str| folder.path().join(name).display().to_string();
    Qemu::system().create(&folder.path().join("a.qcow2"), "qcow2", "", 1 << 20);
    let steps = vec![
        Step::object("iothread,id=t0").expect("right"),
        Step::blockdev(&format!("driver=file,node-name=f,filename={}", path("a.qcow2"))).expect("right"),
        Step::blockdev("{\"driver\": \"qcow2\", \"node-name\": \"q\", \"file\": \"f\"}").expect("right"),
        Step::nbd_server(&format!("addr.type=unix,addr.path={}", path("n.sock"))).expect("right"),
        Step::export("nbd,id=e,node-name=q,writable=on,iothread=t0").expect("right"),
    ];
    let daemon = Running::start_in(folder, steps);
    let uri = uri(&daemon, "q");
    Qemu::system().io(["-f", "raw", "-c", "write -P 3 0 64k", &uri]).expect_ok();
    assert_eq!(tool("nbdinfo", &["--size", &uri]).trim(), "1048576");
    daemon.stop().expect("stopped in order");
}

#[test]
fn a_locked_image_is_refused_in_qemus_words() {
    let (daemon, mut client) = serving();
    let other = Running::start(Vec::new());
    let refusal = other.client().refusal("blockdev-add", node(&daemon.path("a.qcow2"), "q"));
    assert_eq!(refusal, "Failed to get \"write\" lock");
    assert_eq!(other.client().command("query-named-block-nodes", json!({})), json!([]));
    client.command("quit", json!({}));
    daemon.join().expect("stopped in order");
    other.stop().expect("stopped in order");
}

#[test]
fn ids_of_exports_are_identifiers() {
    let (daemon, mut client) = serving();
    for id in ["1e", "_x", "a b", "é", "", "a:b", "-a", "a/b"] {
        let refused = client.refusal("block-export-add", json!({"type": "nbd", "id": id, "node-name": "q"}));
        assert_eq!(refused, "Invalid block export id", "{id}");
    }
    // The name of an export is its id there.
    let refused = client.refusal("nbd-server-add", json!({"device": "q", "name": "a b"}));
    assert_eq!(refused, "Invalid block export id");
    assert_eq!(client.command("query-block-exports", json!({})), json!([]));
    client.command("block-export-add", json!({"type": "nbd", "id": "E1-a.b_c", "node-name": "q", "name": "a b"}));
    // Wrong words are answered with those there are.
    let refused = client.refusal("block-export-del", json!({"id": "E1-a.b_c", "mode": "gentle"}));
    assert_eq!(refused, "Parameter 'mode' does not accept value 'gentle'");
    daemon.stop().expect("stopped in order");
}

#[test]
fn the_address_of_the_server_has_options_of_its_own() {
    let daemon = Running::start(Vec::new());
    let mut client = daemon.client();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("listens");
    let port = taken.local_addr().expect("an address").port();
    let start = |more: Value| {
        let mut data = json!({"host": "127.0.0.1", "port": port.to_string()});
        data.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        json!({"addr": {"type": "inet", "data": data}})
    };
    for (more, words) in [
        (json!({}), "in use"),
        (json!({"to": 70000}), "'to' expects uint16_t"),
        (json!({"ipv4": false, "ipv6": false}), "Cannot disable IPv4 and IPv6 at same time"),
        (json!({"to": 65535, "keep-alive": true, "keep-alive-count": 500_000}), "Unable to set TCP keep-alive count"),
        (json!({"keep-alive": true, "keep-alive-idle": -1}), "'keep-alive-idle' expects uint32_t"),
        (json!({"host": "localhost", "numeric": true}), "address resolution failed for localhost"),
    ] {
        let refusal = client.refusal("nbd-server-start", start(more.clone()));
        assert!(refusal.contains(words), "{more}: {refusal}");
    }
    client.command("nbd-server-start", start(json!({"to": 65535, "keep-alive": true, "keep-alive-idle": 100})));
    client.command("blockdev-add", json!({"driver": "null-co", "node-name": "n"}));
    client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "n"}));
    // The first free port behind the one that is taken, and a timer that asks whether the client is still there.
    let sockets = || std::fs::read_to_string("/proc/net/tcp").expect("a list of sockets");
    let inodes: Vec<String> = std::fs::read_dir("/proc/self/fd")
        .expect("descriptors")
        .filter_map(|entry| Some(std::fs::read_link(entry.ok()?.path()).ok()?.to_string_lossy().into_owned()))
        .collect();
    // Columns: number, local and remote address, state, queues, timer, …, and the inode as the tenth.
    let fields = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<String>>();
    let listening = sockets().lines().map(fields).find(|line| {
        let found = line[1].strip_prefix("0100007F:").and_then(|port| u16::from_str_radix(port, 16).ok());
        line[3] == "0A" && found.is_some_and(|found| found > port) && inodes.contains(&format!("socket:[{}]", line[9]))
    });
    let local = listening.expect("the server listens")[1].clone();
    let found = u16::from_str_radix(&local[9..], 16).expect("a port");
    let connected = std::net::TcpStream::connect(("127.0.0.1", found)).expect("a client may come");
    let mut greeting = [0; 18];
    std::io::Read::read_exact(&mut &connected, &mut greeting).expect("a greeting");
    let ours = sockets().lines().map(fields).find(|line| line[1] == local && line[3] == "01").expect("is connected");
    assert_eq!(&ours[5][..2], "02", "the timer of keep-alive runs: {ours:?}");
    drop(connected);
    daemon.stop().expect("stopped in order");
}
