// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Exports of the type `http`, with curl.

use super::process::{Monitor, Serving, text};
use cowshed_testkit::credentials::make_credentials;
use cowshed_testkit::programs::{run_to_code, tool};
use cowshed_testkit::qemu::temp_dir;
use cowshed_testkit::waiting::await_that;
use serde_json::json;
use std::os::unix::net::UnixStream;

#[test]
fn a_node_is_read_by_ranges_until_its_export_goes() {
    let folder = temp_dir();
    let folder = folder.path();
    let (image, copy) = (folder.join("d.qcow2"), folder.join("copy.raw"));
    tool("qemu-img", &["create", "-q", "-f", "qcow2", text(&image), "4M"]);
    tool("qemu-io", &["-c", "write -P 65 1M 64k", text(&image)]);
    let options = "http,id=h,node-name=d,addr.type=inet,addr.host=127.0.0.1,addr.port=0,path=/disk";
    let mut daemon = Serving::start(folder, &["serve", "d.qcow2", "--monitor", "m.sock", "--export", options]);
    let uri = loop {
        let line = daemon.line();
        if line.starts_with("http://127.0.0.1:") {
            break line;
        }
    };
    assert!(uri.ends_with("/disk"), "{uri}");
    let mut monitor = Monitor::connect(&folder.join("m.sock"));
    let exports = monitor.command("query-block-exports", json!({}));
    assert_eq!(exports[0], json!({"id": "h", "type": "http", "node-name": "d", "shutting-down": false}));
    assert_eq!(tool("curl", &["-sS", "-r", "1048576-1048580", &uri]), "AAAAA");
    tool("curl", &["-sS", "-o", text(&copy), &uri]);
    tool("qemu-img", &["compare", "-U", "-f", "qcow2", "-F", "raw", text(&image), text(&copy)]);
    tool("curl", &["-sSf", "-I", &uri]);
    run_to_code("curl", &["-sSf", &uri.replace("/disk", "/other")], &[22]);
    // A unix socket, beside it and on the same node.
    let socket = folder.join("h.sock");
    let add = json!({"type": "http", "id": "u", "node-name": "d", "addr": {"type": "unix", "path": socket}});
    monitor.command("block-export-add", add.clone());
    assert_eq!(
        tool("curl", &["-sS", "--unix-socket", text(&socket), "-r", "1048576-1048577", "http://localhost/d"]),
        "AA"
    );
    let mut again = add.clone();
    again["id"] = json!("v");
    let words = monitor.refusal("block-export-add", &again);
    assert!(words.contains("could not listen"), "{words}");
    again["writable"] = json!(true);
    let words = monitor.refusal("block-export-add", &again);
    assert_eq!(words, "an export of the type 'http' is for reading only");
    monitor.command("block-export-del", json!({"id": "h"}));
    run_to_code("curl", &["-sS", &uri], &[7]);
    daemon.stop();
    assert!(!socket.exists(), "the socket is left behind");
}

#[test]
fn credentials_encrypt_an_export() {
    let folder = temp_dir();
    let folder = folder.path();
    make_credentials(folder);
    std::fs::write(folder.join("d.raw"), vec![b'A'; 1 << 20]).expect("an image");
    let options = "http,id=h,node-name=d,addr.type=inet,addr.host=localhost,addr.port=0,path=/disk,tls-creds=t";
    let drive = ["--drive", "file=d.raw,id=d,format=raw", "--object", "tls-creds-x509,id=t,dir=.,endpoint=server"];
    let mut daemon = Serving::start(folder, &[&["serve", "-k", "n.sock"], &drive[..], &["--export", options]].concat());
    let uri = loop {
        let line = daemon.line();
        if line.starts_with("http") {
            break line;
        }
    };
    assert!(uri.starts_with("https://"), "{uri}");
    let at = |name: &str| text(&folder.join(name)).to_owned();
    let (authority, certificate, key) = (at("ca-cert.pem"), at("client-cert.pem"), at("client-key.pem"));
    let known = ["-sSf", "--cacert", &authority, "-r", "4096-4099", &uri];
    assert_eq!(tool("curl", &[&known[..], &["--cert", &certificate, "--key", &key]].concat()), "AAAA");
    // As in QEMU a client shows a certificate, unless the credentials have `verify-peer=off`.
    run_to_code("curl", &known, &[56]);
    run_to_code("curl", &["-sSf", &uri], &[60]);
    let plain = std::process::Command::new("curl").args(["-sSf", &uri.replace("https:", "http:")]).output();
    assert!(!plain.expect("curl runs").status.success(), "there is no way around TLS");
    daemon.stop();
}

/// A download never joins pieces of two states of the disk.
#[test]
fn a_write_makes_another_etag_of_the_disk() {
    let folder = temp_dir();
    let folder = folder.path();
    let image = folder.join("d.qcow2");
    tool("qemu-img", &["create", "-q", "-f", "qcow2", text(&image), "4M"]);
    tool("qemu-io", &["-c", "write -P 65 0 64k", text(&image)]);
    let socket = folder.join("h.sock");
    let options = format!("http,id=h,node-name=d,addr.type=unix,addr.path={},path=/disk", text(&socket));
    let mut daemon = Serving::start(folder, &["serve", "-k", "n.sock", "d.qcow2", "--export", &options]);
    daemon.line();
    let curl = |arguments: &[&str]| {
        let begin = ["-sSf", "--unix-socket", text(&socket), "http://localhost/disk"];
        tool("curl", &[&begin[..], arguments].concat())
    };
    let etag = || {
        let head = curl(&["-I"]);
        let line = head.lines().find_map(|line| line.strip_prefix("ETag: ").map(str::to_owned));
        line.unwrap_or_else(|| panic!("{head}")).trim().to_owned()
    };
    let rest = |tag: &str| {
        let header = format!("If-Range: {tag}");
        curl(&["-r", "0-99", "-H", &header, "-o", "/dev/null", "-w", "%{http_code} %{size_download}"])
    };
    let whole = format!("200 {}", 4 << 20);
    let disk = format!("nbd+unix:///?socket={}", text(&folder.join("n.sock")));
    for write in ["write -P 66 0 4k", "write -z 64k 64k", "discard 0 64k"] {
        let before = etag();
        // A disk that may be written has weak tags: no range is joined to an earlier one.
        assert!(before.starts_with("W/") && before == etag() && rest(&before) == whole, "{write}: {before}");
        tool("qemu-io", &["-f", "raw", "-c", write, &disk]);
        assert_ne!(etag(), before, "{write}");
        assert_eq!(rest(&before), whole, "{write}");
    }
    daemon.stop();
    let mut daemon = Serving::start(folder, &["serve", "--read-only", "-k", "n.sock", "d.qcow2", "--export", &options]);
    daemon.line();
    // For some seconds after a change of the file the tag is weak.
    await_that("a strong tag", || etag().starts_with('"'));
    let tag = etag();
    assert_eq!(rest(&tag), "206 100", "{tag}");
    daemon.stop();
    tool("qemu-io", &["-c", "write -P 67 0 4k", text(&image)]);
    let mut daemon = Serving::start(folder, &["serve", "--read-only", "-k", "n.sock", "d.qcow2", "--export", &options]);
    daemon.line();
    assert_ne!(etag(), tag);
    assert_eq!(rest(&tag), whole, "another daemon, on changed data");
    daemon.stop();
}

/// The first line of a daemon that is the URI of its export.
fn uri_of(daemon: &mut Serving) -> String {
    loop {
        let line = daemon.line();
        if line.starts_with("http") {
            return line;
        }
    }
}

#[test]
fn writes_through_a_node_below_make_another_etag() {
    let folder = temp_dir();
    let folder = folder.path();
    std::fs::write(folder.join("d.raw"), vec![b'A'; 4 << 20]).expect("an image");
    let (socket, monitor) = (folder.join("h.sock"), folder.join("m.sock"));
    let below =
        ["--blockdev", "file,node-name=f,filename=d.raw,discard=unmap", "--blockdev", "raw,node-name=top,file=f"];
    let http = format!("http,id=h,node-name=top,addr.type=unix,addr.path={}", text(&socket));
    let start = ["qemu-storage-daemon", "--nbd-server", "addr.type=unix,addr.path=n.sock", "--chardev"];
    let more = ["socket,path=m.sock,server=on,wait=off,id=m", "--monitor", "chardev=m"];
    let exports = ["--export", "nbd,id=e,node-name=f,writable=on", "--export", &http];
    let daemon = Serving::start(folder, &[&start[..], &more, &below, &exports].concat());
    await_that("the export listens", || UnixStream::connect(&socket).is_ok());
    let etag = || {
        tool(
            "curl",
            &["-sSf", "-o", "/dev/null", "-w", "%header{etag}", "--unix-socket", text(&socket), "http://localhost/top"],
        )
    };
    let disk = format!("nbd+unix:///f?socket={}", text(&folder.join("n.sock")));
    let mut seen = vec![etag()];
    assert_eq!(etag(), seen[0], "nothing has changed");
    for write in ["write -P 66 0 4k", "write -z 64k 64k", "discard 1M 64k"] {
        tool("qemu-io", &["-f", "raw", "-c", write, &disk]);
        seen.push(etag());
    }
    // The writer goes, and takes no version back.
    Monitor::connect(&monitor).command("block-export-del", json!({"id": "e"}));
    seen.push(etag());
    let count = seen.len();
    seen[..count - 1].sort();
    seen[..count - 1].windows(2).for_each(|two| assert_ne!(two[0], two[1]));
    assert!(!seen[..1].contains(&seen[count - 1]), "{seen:?}");
    daemon.stop();
}

/// Other clients of the server may write, and nothing tells.
#[test]
fn disks_of_servers_have_weak_tags_and_no_rest() {
    let folder = temp_dir();
    let folder = folder.path();
    std::fs::write(folder.join("d.raw"), vec![b'A'; 1 << 20]).expect("an image");
    let mut server = Serving::start(folder, &["serve", "-k", "n.sock", "--drive", "file=d.raw,id=d,format=raw"]);
    server.line();
    let other = temp_dir();
    let nbd =
        format!("nbd,node-name=d,read-only=on,server.type=unix,server.path={},export=d", text(&folder.join("n.sock")));
    let http = "http,id=h,node-name=d,addr.type=unix,addr.path=h.sock,path=/disk";
    let daemon = Serving::start(other.path(), &["qemu-storage-daemon", "--blockdev", &nbd, "--export", http]);
    let socket = other.path().join("h.sock");
    await_that("the export listens", || UnixStream::connect(&socket).is_ok());
    let get = |range: &str| {
        let format = "%{http_code} %header{etag} %{size_download}";
        let options = ["-sS", "-r", range, "-o", "/dev/null", "-w", format, "--unix-socket", text(&socket)];
        tool("curl", &[&options[..], &["http://localhost/disk"]].concat())
    };
    assert!(get("0-99").starts_with("206 W/\"") && get("0-99").ends_with(" 100"), "{}", get("0-99"));
    assert!(get("100-").starts_with("412 "), "{}", get("100-"));
    daemon.stop();
    server.stop();
}

#[test]
fn members_of_the_address_count() {
    let folder = temp_dir();
    let folder = folder.path();
    std::fs::write(folder.join("d.raw"), vec![b'A'; 1 << 20]).expect("an image");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("an address").port();
    let serve = |members: &str| {
        let export = format!("http,id=h,node-name=d,addr.type=inet,{members}");
        let drive = ["--drive", "file=d.raw,id=d,format=raw"];
        Serving::start(folder, &[&["serve", "-k", "n.sock"], &drive[..], &["--export", &export]].concat())
    };
    let last = port.saturating_add(20);
    let mut daemon = serve(&format!("addr.host=127.0.0.1,addr.port={port},addr.to={last}"));
    let uri = uri_of(&mut daemon);
    assert!(!uri.contains(&format!(":{port}/")), "{uri}");
    assert_eq!(tool("curl", &["-sSf", "-r", "0-3", &uri]), "AAAA");
    let status = |host: &str| {
        tool("curl", &["-sS", "-o", "/dev/null", "-w", "%{http_code}", "-H", &format!("Host: {host}"), &uri])
    };
    assert_eq!((status("rebound.example.org"), status("localhost")), ("421".to_owned(), "200".to_owned()));
    daemon.stop();
    // Another name of this machine, which only a resolver knows.
    let mut daemon = serve("addr.host=127.1,addr.port=0");
    let uri = uri_of(&mut daemon);
    let status = |host: &str| {
        tool("curl", &["-sS", "-o", "/dev/null", "-w", "%{http_code}", "-H", &format!("Host: {host}"), &uri])
    };
    let statuses = ["rebound.example.org", "127.1:80", "127.0.0.1"].map(status);
    assert_eq!(statuses, ["421", "200", "200"]);
    daemon.stop();
    let mut daemon = serve("addr.host=localhost,addr.port=0,addr.ipv6=off");
    let uri = uri_of(&mut daemon);
    assert!(uri.starts_with("http://127.0.0.1:") || uri.starts_with("http://localhost:"), "{uri}");
    daemon.stop();
}

#[test]
fn an_export_warns_of_readers_on_the_network() {
    const WORDS: &str = "any host that reaches this one can read the disk";
    let folder = temp_dir();
    let folder = folder.path();
    make_credentials(folder);
    std::fs::write(folder.join("d.raw"), vec![1; 1 << 20]).expect("an image");
    let drive = ["--drive", "file=d.raw,id=d,format=raw", "--object", "tls-creds-x509,id=t,dir=.,endpoint=server"];
    for (more, count) in [("0.0.0.0", 1), ("127.0.0.1", 0), ("127.1", 0), ("localhost", 0), ("0.0.0.0,tls-creds=t", 0)]
    {
        let options = format!("http,id=h,node-name=d,addr.type=inet,addr.port=0,addr.host={more}");
        let all = [&["serve", "-k", "n.sock"], &drive[..], &["--export", &options]].concat();
        let mut daemon = Serving::start(folder, &all);
        while !daemon.line().starts_with("http") {}
        daemon.signal("TERM");
        let path = folder.join("log");
        assert!(daemon.wait().success());
        let log = std::fs::read_to_string(&path).expect("a log");
        std::fs::remove_file(path).expect("a log");
        assert_eq!(log.matches(WORDS).count(), count, "{more}: {log}");
    }
}
