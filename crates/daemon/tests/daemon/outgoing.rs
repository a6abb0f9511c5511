// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Monitors that connect to a client, as programs start them that listen themselves.

use super::running::{Client, Running, temp_folder};
use cowshed_daemon::{Chardevs, Step};
use serde_json::{Value, json};
use std::net::TcpListener;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};

/// `--chardev CHARDEV,id=m --monitor m`.
fn steps(chardev: &str) -> Vec<Step> {
    let mut chardevs = Chardevs::default();
    let device = Step::chardev(&format!("{chardev},id=m"), &mut chardevs).expect("right");
    vec![device, Step::monitor("m", &chardevs).expect("right")]
}

/// The line of `query-chardev` about `m`.
fn shown(client: &mut Client) -> (String, bool) {
    let devices = client.command("query-chardev", json!({}));
    let device = devices.as_array().expect("a list").iter().find(|device| device["label"] == "m").expect("is there");
    (device["filename"].as_str().expect("a text").to_owned(), device["frontend-open"] == json!(true))
}

#[test]
fn monitor_connects_and_reconnects_to_a_listener() {
    for (more, again) in [("", false), (",server=off", false), (",reconnect-ms=10", true)] {
        let folder = temp_folder();
        let path = folder.path().join("client.sock");
        let listener = UnixListener::bind(&path).expect("a free name");
        let daemon = Running::start_in(folder, steps(&format!("socket,path={}{more}", path.display())));
        let mut other = daemon.client();
        let (stream, _) = listener.accept().expect("it connects");
        let mut client = Client::on(stream);
        let name = format!("unix:{}", path.display());
        assert_eq!(shown(&mut client), (name.clone(), true));
        drop(client);
        match again {
            true => {
                let (stream, _) = listener.accept().expect("it connects again");
                assert_eq!(shown(&mut Client::on(stream)), (name, true));
            }
            false => {
                while shown(&mut other).1 {
                    std::thread::yield_now();
                }
                assert_eq!(shown(&mut other).0, format!("disconnected:{name}"));
            }
        }
        daemon.stop().expect("stopped in order");
    }
}

#[test]
fn only_the_last_monitor_of_a_device_connects_again() {
    let folder = temp_folder();
    let path = folder.path().join("client.sock");
    let listener = UnixListener::bind(&path).expect("a free name");
    let mut device = steps(&format!("socket,path={},reconnect-ms=10", path.display()));
    device.truncate(1);
    let daemon = Running::start_in(folder, device);
    let mut other = daemon.client();
    let monitor = |id: &str| json!({"qom-type": "monitor-qmp", "id": id, "chardev": "m"});
    let (first, _) = listener.accept().expect("the device connects");
    other.command("object-add", monitor("one"));
    let mut client = Client::on(first);
    client.command("query-version", json!({}));
    other.command("object-del", json!({"id": "one"}));
    assert_eq!(client.message(), None, "it goes with its monitor");
    other.command("object-add", monitor("two"));
    drop(client);
    let (second, _) = listener.accept().expect("it connects again");
    Client::on(second.try_clone().expect("the same")).command("query-version", json!({}));
    // Long enough for an older monitor, if one still tried.
    listener.set_nonblocking(true).expect("a socket");
    let end = std::time::Instant::now() + std::time::Duration::from_millis(200);
    while std::time::Instant::now() < end {
        let more = listener.accept();
        assert!(more.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock), "a second connection");
        std::thread::yield_now();
    }
    drop(second);
    daemon.stop().expect("stopped in order");
}

#[test]
fn monitor_with_reconnect_waits_for_a_late_client() {
    let folder = temp_folder();
    let path = folder.path().join("client.sock");
    let daemon = Running::start_in(folder, steps(&format!("socket,path={},reconnect-ms=10", path.display())));
    assert_eq!(shown(&mut daemon.client()), (format!("disconnected:unix:{}", path.display()), false));
    let listener = UnixListener::bind(&path).expect("a free name");
    let (stream, _) = listener.accept().expect("it connects");
    Client::on(stream).command("query-version", json!({}));
    daemon.stop().expect("stopped in order");
}

#[test]
fn a_monitor_connects_over_tcp_and_takes_a_connected_socket() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = listener.local_addr().expect("an address").port();
    let daemon = Running::start(steps(&format!("socket,host=127.0.0.1,port={port}")));
    let (stream, peer) = listener.accept().expect("it connects");
    let mut client = Client::on(UnixStream::from(OwnedFd::from(stream)));
    assert_eq!(shown(&mut client), (format!("tcp:{peer} <-> 127.0.0.1:{port}"), true));
    daemon.stop().expect("stopped in order");

    let (mine, given) = UnixStream::pair().expect("two ends");
    let daemon = Running::start(steps(&format!("socket,fd={}", given.as_raw_fd())));
    let mut client = Client::on(mine);
    assert_eq!(shown(&mut client), ("unix:".to_owned(), true));
    // Its end is noticed, though the descriptor that was passed is open.
    client.command("quit", json!({}));
    assert_eq!(client.message(), None);
    daemon.join().expect("stopped in order");
}

#[test]
fn what_cannot_be_connected_is_refused_in_the_words_of_qemu() {
    let daemon = Running::start(Vec::new());
    let mut client = daemon.client();
    let unix = json!({"type": "unix", "data": {"path": daemon.path("none")}});
    let tcp = json!({"type": "inet", "data": {"host": "127.0.0.1", "port": "1"}});
    let path = daemon.path("none").display().to_string();
    for (addr, more, reason) in [
        (&unix, json!({"server": false}), format!("Failed to connect to '{path}': No such file or directory")),
        (&tcp, json!({"server": false}), "Failed to connect to '127.0.0.1:1': Connection refused".to_owned()),
        (
            &unix,
            json!({"server": false, "wait": true}),
            "'wait' option is incompatible with socket in client connect mode".to_owned(),
        ),
        (
            &unix,
            json!({"server": true, "wait": false, "reconnect-ms": 5}),
            "'reconnect-ms' option is incompatible with socket in server listen mode".to_owned(),
        ),
    ] {
        let mut data: Value = more;
        data["addr"] = addr.clone();
        let arguments = json!({"id": "m", "backend": {"type": "socket", "data": data}});
        assert_eq!(client.refusal("chardev-add", arguments), format!("Failed to add chardev 'm': {reason}"));
    }
    let data = json!({"addr": unix, "server": false, "reconnect-ms": 100});
    client.command("chardev-add", json!({"id": "m", "backend": {"type": "socket", "data": data}}));
    assert_eq!(shown(&mut client), (format!("disconnected:unix:{path}"), false));
    client.command("object-add", json!({"qom-type": "monitor-qmp", "id": "o", "chardev": "m"}));
    client.command("object-del", json!({"id": "o"}));
    client.command("chardev-remove", json!({"id": "m"}));
    daemon.stop().expect("stopped in order");
    // A daemon doesn't start without its client.
    for (wrong, reason) in [
        ("socket,fd=9999".to_owned(), "File descriptor '9999' is not a socket"),
        (format!("socket,path={path}"), "could not connect to"),
    ] {
        let error = cowshed_daemon::run(super::running::setup(steps(&wrong)), |_| Ok(())).expect_err(&wrong);
        assert!(error.to_string().contains(reason), "{error}");
    }
}
