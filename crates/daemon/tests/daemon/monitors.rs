// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Monitors: several of them, several clients, rude clients, start and stop.

use super::running::{Client, Running, setup, temp_folder};
use cowshed_daemon::{MonitorAddress, Step, StopReason, run};
use serde_json::json;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::mpsc;

#[test]
fn quit_is_answered_and_told_to_everybody() {
    let daemon = Running::start(Vec::new());
    let (mut first, mut second) = (daemon.client(), daemon.client());
    assert_eq!(first.command("query-version", json!({}))["qemu"]["major"], 11);
    assert_eq!(second.command("quit", json!({})), json!({}));
    for client in [&mut first, &mut second] {
        assert_eq!(client.event("SHUTDOWN"), json!({"guest": false, "reason": "host-qmp-quit"}));
    }
    let socket = daemon.path("m.sock");
    assert_eq!(daemon.join().expect("stopped in order"), StopReason::Quit);
    assert!(!socket.exists());
}

#[test]
fn commands_and_schema_agree() {
    let daemon = Running::start(Vec::new());
    let mut client = daemon.client();
    let commands = client.command("query-commands", json!({}));
    let schema = client.command("query-qmp-schema", json!({}));
    let described = schema.as_array().expect("a list").iter().filter(|entry| entry["meta-type"] == "command");
    let described: Vec<_> = described.map(|entry| json!({"name": entry["name"]})).collect();
    assert_eq!(json!(described), commands);
    assert!(described.contains(&json!({"name": "blockdev-add"})));
    daemon.stop().expect("stopped in order");
}

#[test]
fn many_commands_in_one_write_are_answered_in_order() {
    let daemon = Running::start(Vec::new());
    let mut client = daemon.client();
    let text: String = (0..200).map(|n| json!({"execute": "query-version", "id": n}).to_string()).collect();
    client.send(&text);
    for n in 0..200 {
        assert_eq!(client.message().expect("a reply")["id"], n);
    }
    daemon.stop().expect("stopped in order");
}

#[test]
fn a_client_that_never_reads_holds_nobody() {
    let daemon = Running::start(Vec::new());
    let mut rude = UnixStream::connect(daemon.path("m.sock")).expect("the monitor listens");
    rude.set_nonblocking(true).expect("a socket");
    // As much as fits: replies of the schema pile up behind it.
    let _ = rude.write_all(b"{\"execute\": \"qmp_capabilities\"}");
    while rude.write(b"{\"execute\": \"query-qmp-schema\"}\n").is_ok() {}
    let mut polite = daemon.client();
    assert_eq!(polite.command("query-version", json!({}))["qemu"]["major"], 11);
    daemon.stop().expect("stopped in order");
    drop(rude);
}

#[test]
fn a_monitor_listens_on_tcp_too() {
    let address = MonitorAddress::Tcp { host: "127.0.0.1".into(), port: 0 };
    let (sender, receiver) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        run(setup(vec![Step::monitor_at("test", address, true)]), |ready| {
            sender.send(ready.clone()).expect("the test waits");
            Ok(())
        })
    });
    let ready = receiver.recv().expect("it starts");
    let Some(MonitorAddress::Tcp { port, .. }) = ready.monitors.first() else { panic!("{:?}", ready.monitors) };
    let mut stream = TcpStream::connect(("127.0.0.1", *port)).expect("it listens");
    stream.write_all(b"{'execute': 'qmp_capabilities'} {'execute': 'quit'}").expect("it reads");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("it answers and hangs up");
    assert!(text.contains("\"SHUTDOWN\"") && text.contains("{\r\n") | text.contains("{\n"), "{text}");
    assert_eq!(thread.join().expect("no panic").expect("stopped in order"), StopReason::Quit);
}

#[test]
fn a_daemon_that_cannot_start_says_why_and_leaves_no_socket() {
    let folder = temp_folder();
    let socket = folder.path().join("m.sock");
    let missing = folder.path().join("nothing.qcow2");
    let steps = vec![
        Step::monitor_at("test", MonitorAddress::Unix(socket.clone()), false),
        Step::blockdev(&format!("qcow2,node-name=q,file.driver=file,file.filename={}", missing.display()))
            .expect("right"),
    ];
    let error = run(setup(steps), |_| Ok(())).expect_err("there is no such file").to_string();
    assert!(error.contains("--blockdev") && error.contains("nothing.qcow2"), "{error}");
    assert!(!socket.exists());
}

#[test]
fn a_socket_in_use_is_refused_and_a_stale_one_taken_over() {
    let daemon = Running::start(Vec::new());
    let socket = daemon.path("m.sock");
    let steps = || vec![Step::monitor_at("test", MonitorAddress::Unix(socket.clone()), false)];
    let error = run(setup(steps()), |_| Ok(())).expect_err("in use").to_string();
    assert!(error.contains("another process listens"), "{error}");
    Client::connect(&socket);
    daemon.stop().expect("stopped in order");

    let folder = temp_folder();
    let stale = folder.path().join("m.sock");
    drop(std::os::unix::net::UnixListener::bind(&stale).expect("a socket"));
    assert!(stale.exists());
    let daemon = Running::start_in(folder, Vec::new());
    daemon.client();
    daemon.stop().expect("stopped in order");
}
