// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Monitors: several of them, several clients, rude clients, start and stop.

use super::running::{Client, Running, setup, temp_folder};
use cowshed_daemon::{MonitorAddress, Setup, Step, StopReason, run};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::mpsc;
use std::time::{Duration, Instant};

#[test]
fn quit_is_answered_last_and_ends_every_conversation() {
    let daemon = Running::start(Vec::new());
    let (mut first, mut second) = (daemon.client(), daemon.client());
    assert_eq!(first.command("query-version", json!({}))["qemu"]["major"], 11);
    assert_eq!(second.command("quit", json!({})), json!({}));
    for client in [&mut first, &mut second] {
        assert!(client.message().is_none(), "nothing comes behind the answer");
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
fn a_client_that_never_reads_holds_no_other() {
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

/// Silent clients keep no others out, and those that speak keep their places.
#[test]
fn silent_clients_make_room_for_others() {
    let daemon = Running::start(Vec::new());
    let mut first = daemon.client();
    let connect = || UnixStream::connect(daemon.path("m.sock")).expect("the monitor listens");
    let silent: Vec<UnixStream> = (0..150).map(|_| connect()).collect();
    let mut others: Vec<Client> = (0..3).map(|_| daemon.client()).collect();
    for client in others.iter_mut().chain([&mut first]) {
        assert_eq!(client.command("query-version", json!({}))["qemu"]["major"], 11);
    }
    daemon.stop().expect("stopped in order");
    drop(silent);
}

/// A server that accepts connections and never sends a byte: `blockdev-add` of its disk waits until it is dropped.
struct Silent {
    _listener: UnixListener,
    path: PathBuf,
}

impl Silent {
    fn new(daemon: &Running) -> Silent {
        let path = daemon.path("silent.sock");
        Silent { _listener: UnixListener::bind(&path).expect("a socket"), path }
    }

    fn disk(&self) -> Value {
        json!({"driver": "nbd", "node-name": "silent", "server": {"type": "unix", "path": self.path}})
    }
}

/// Waits until a command that changes the graph has its turn, and `waiting` others wait for theirs.
#[track_caller]
fn await_turns(client: &mut Client, waiting: usize) {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let running = client.command("x-query-running", json!({}));
        let adds: Vec<&Value> =
            running.as_array().expect("a list").iter().filter(|one| one["name"] == "blockdev-add").collect();
        if adds.len() == waiting + 1 && adds.iter().filter(|one| one["waits-for-turn"] == true).count() == waiting {
            return;
        }
        assert!(Instant::now() < until, "in vain: {running}");
    }
}

fn null(name: &str) -> Value {
    json!({"driver": "null-co", "node-name": name})
}

fn node_names(client: &mut Client) -> Vec<Value> {
    let nodes = client.command("query-named-block-nodes", json!({}));
    nodes.as_array().expect("a list").iter().map(|node| node["node-name"].clone()).collect()
}

/// Their replies reach no client, and another client may have gone on meanwhile. QEMU drops commands that it has not
/// begun, too.
#[test]
fn commands_of_a_client_that_has_gone_are_not_run() {
    let daemon = Running::start(Vec::new());
    let silent = Silent::new(&daemon);
    let mut other = daemon.client();
    let mut leaving = daemon.client();
    // The first one waits for its server while the client leaves, and the others have all been sent.
    let add = |arguments: Value| json!({"execute": "blockdev-add", "arguments": arguments}).to_string();
    let text: String = (0..100).map(|n| add(null(&format!("n{n}")))).collect();
    leaving.send(&(add(silent.disk()) + &text));
    await_turns(&mut other, 0);
    drop(leaving);
    drop(silent);
    // This one is about all nodes, so it comes after all that were begun before it.
    other.command("blockdev-set-active", json!({"active": true}));
    for n in 0..50 {
        other.command("blockdev-add", null(&format!("other{n}")));
    }
    let left: Vec<Value> = node_names(&mut other)
        .into_iter()
        .filter(|name| !name.as_str().expect("a name").starts_with("other"))
        .collect();
    assert!(left.is_empty(), "{} commands were run for a client that has gone", left.len());
    daemon.stop().expect("stopped in order");
}

/// A command that waits behind one whose I/O never ends is refused in time, and so leaves its place to the next one.
#[test]
fn a_command_that_waits_too_long_for_its_turn_is_refused() {
    let daemon = Running::start_with(Setup { turn_limit: Duration::from_secs(1), ..setup(Vec::new()) });
    let silent = Silent::new(&daemon);
    let (mut stuck, mut waiting, mut other) = (daemon.client(), daemon.client(), daemon.client());
    stuck.send(&json!({"execute": "blockdev-add", "arguments": silent.disk()}).to_string());
    await_turns(&mut other, 0);
    let started = Instant::now();
    let refused = waiting.refusal("blockdev-add", silent.disk());
    assert!(started.elapsed() >= Duration::from_secs(1), "{:?}", started.elapsed());
    let wanted = "'blockdev-add' has waited 1 s for 'blockdev-add' to end, which waits for I/O; nothing was changed";
    assert_eq!(refused, wanted);
    await_turns(&mut other, 0);
    assert_eq!(node_names(&mut other), Vec::<Value>::new(), "the refused command did its work");
    // Commands that change no node need no turn.
    other.command("query-version", json!({}));
    drop(silent);
    assert!(stuck.reply().get("error").is_some());
    waiting.command("blockdev-add", null("late"));
    assert_eq!(node_names(&mut other), [json!("late")]);
    daemon.stop().expect("stopped in order");
}

/// A client that only ends its own direction gets all of its replies.
#[test]
fn commands_of_a_client_that_still_reads_are_run() {
    let daemon = Running::start(Vec::new());
    let mut client = UnixStream::connect(daemon.path("m.sock")).expect("the monitor listens");
    let text: String = (0..100).map(|n| json!({"execute": "query-version", "id": n}).to_string()).collect();
    client.write_all(format!("{{'execute': 'qmp_capabilities'}}{text}").as_bytes()).expect("it reads");
    client.shutdown(std::net::Shutdown::Write).expect("shutdown");
    let mut said = String::new();
    client.read_to_string(&mut said).expect("it answers and hangs up");
    assert_eq!(said.matches("\"id\":").count(), 100, "{said}");
    daemon.stop().expect("stopped in order");
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
    assert!(text.ends_with("{\r\n    \"return\": {\r\n    }\r\n}\r\n"), "{text}");
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
fn monitor_socket_in_use_is_refused_and_stale_replaced() {
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

#[test]
fn monitors_come_and_go_on_character_devices() {
    let daemon = Running::start(Vec::new());
    let mut client = daemon.client();
    let socket = |path: &std::path::Path| {
        let address = json!({"type": "unix", "data": {"path": path}});
        json!({"type": "socket", "data": {"addr": address, "server": true, "wait": false}})
    };
    let path = daemon.path("second.sock");
    client.command("chardev-add", json!({"id": "c", "backend": socket(&path)}));
    assert!(path.exists());
    assert!(client.refusal("chardev-add", json!({"id": "c", "backend": socket(&path)})).contains("already exists"));
    for _ in 0..2 {
        client.command("object-add", json!({"qom-type": "monitor-qmp", "id": "m2", "chardev": "c"}));
        let mut second = Client::connect(&path);
        second.command("query-version", json!({}));
        let again = json!({"qom-type": "monitor-qmp", "id": "m3", "chardev": "c"});
        assert_eq!(client.refusal("object-add", again), "chardev 'c' is already in use");
        let change = json!({"id": "c", "backend": {"type": "null", "data": {}}});
        assert_eq!(client.refusal("chardev-change", change), "Chardev user does not support chardev hotswap");
        assert!(client.refusal("chardev-remove", json!({"id": "c"})).contains("Chardev 'c' is busy"));
        let listed = client.command("query-chardev", json!({}));
        let known: Vec<_> = listed.as_array().expect("a list").iter().map(|one| &one["frontend-open"]).collect();
        assert_eq!(known, [true, true], "{listed}");
        client.command("object-del", json!({"id": "m2"}));
        // As in QEMU no client has a say by a monitor that is gone.
        assert_eq!(second.message(), None);
    }
    client.command("chardev-remove", json!({"id": "c"}));
    assert!(!path.exists());
    assert!(client.refusal("chardev-remove", json!({"id": "c"})).contains("Chardev 'c' not found"));
    let missing = json!({"qom-type": "monitor-qmp", "id": "m2", "chardev": "c"});
    assert_eq!(client.refusal("object-add", missing), "chardev \"c\" not found");
    daemon.stop().expect("stopped in order");
}

#[test]
fn ring_buffers_keep_what_was_written_last() {
    let daemon = Running::start(Vec::new());
    let mut client = daemon.client();
    let ring = |size: u64| json!({"type": "ringbuf", "data": {"size": size}});
    client.command("chardev-add", json!({"id": "r", "backend": ring(8)}));
    client.command("ringbuf-write", json!({"device": "r", "data": "0123456789"}));
    assert_eq!(client.command("ringbuf-read", json!({"device": "r", "size": 3})), "234");
    client.command("ringbuf-write", json!({"device": "r", "data": "YQ==", "format": "base64"}));
    assert_eq!(client.command("ringbuf-read", json!({"device": "r", "size": 100, "format": "base64"})), "NTY3ODlh");
    assert_eq!(client.command("ringbuf-read", json!({"device": "r", "size": 100})), "");
    client.command("chardev-change", json!({"id": "r", "backend": {"type": "null", "data": {}}}));
    client.command("chardev-send-break", json!({"id": "r"}));
    for (command, arguments, reason) in [
        ("ringbuf-read", json!({"device": "r", "size": 1}), "not a ringbuf"),
        ("ringbuf-write", json!({"device": "zz", "data": ""}), "'zz' not found"),
        ("ringbuf-read", json!({"device": "r", "size": 0}), "greater than zero"),
        ("chardev-add", json!({"id": "s", "backend": ring(1000)}), "power of two"),
        ("chardev-add", json!({"id": "s", "backend": {"type": "pty", "data": {}}}), "a monitor is on a socket"),
        ("chardev-send-break", json!({"id": "zz"}), "'zz' not found"),
        ("chardev-change", json!({"id": "zz", "backend": ring(8)}), "'zz' does not exist"),
    ] {
        let refusal = client.refusal(command, arguments);
        assert!(refusal.contains(reason), "{refusal}");
    }
    let backends = client.command("query-chardev-backends", json!({}));
    assert!(backends.as_array().expect("a list").contains(&json!({"name": "socket"})));
    daemon.stop().expect("stopped in order");
}

#[test]
fn monitor_obeys_its_close_action() {
    let daemon = Running::start(Vec::new());
    let mut client = daemon.client();
    let path = daemon.path("second.sock");
    let backend = json!({"type": "socket", "data": {"addr": {"type": "unix", "data": {"path": path}},
                                                    "server": true, "wait": false}});
    let is_there = |client: &mut Client| {
        let mut objects = client.command("qom-list", json!({"path": "/objects"})).to_string();
        // The monitor may go between two commands.
        let chardevs = loop {
            let chardevs = client.command("query-chardev", json!({})).to_string();
            let again = client.command("qom-list", json!({"path": "/objects"})).to_string();
            match again == objects {
                true => break chardevs,
                false => objects = again,
            }
        };
        assert_eq!(objects.contains("m2"), chardevs.contains("second.sock"), "{objects} {chardevs}");
        objects.contains("m2")
    };
    for action in ["delete", "set"] {
        client.command("chardev-add", json!({"id": "c", "backend": backend}));
        let mut object = json!({"qom-type": "monitor-qmp", "id": "m2", "chardev": "c"});
        if action == "delete" {
            object["close-action"] = json!("delete");
        }
        client.command("object-add", object);
        let (mut first, mut second) = (Client::connect(&path), Client::connect(&path));
        first.command("query-version", json!({}));
        second.command("query-version", json!({}));
        drop(first);
        second.command("query-version", json!({}));
        assert!(is_there(&mut client), "a client is left");
        if action == "set" {
            let set = |value: &str| json!({"path": "/objects/m2", "property": "close-action", "value": value});
            let refusal = client.refusal("qom-set", set("x"));
            assert_eq!(refusal, "Parameter 'close-action' does not accept value 'x'");
            client.command("qom-set", set("delete"));
            let get = json!({"path": "/objects/m2", "property": "close-action"});
            assert_eq!(client.command("qom-get", get), "delete");
        }
        drop(second);
        let until = Instant::now() + Duration::from_secs(60);
        while is_there(&mut client) {
            assert!(Instant::now() < until, "the monitor stays");
            std::thread::yield_now();
        }
        assert!(!path.exists());
    }
    daemon.stop().expect("stopped in order");
}

#[test]
fn what_a_monitor_says_is_copied_to_its_log() {
    let daemon = Running::start(Vec::new());
    let mut client = daemon.client();
    let (path, log) = (daemon.path("second.sock"), daemon.path("log"));
    std::fs::write(&log, "older\n").expect("a file");
    let socket = |more: Value| {
        let mut data = json!({"addr": {"type": "unix", "data": {"path": path}}, "server": true, "wait": false,
                              "logfile": log});
        data.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        json!({"id": "c", "backend": {"type": "socket", "data": data}})
    };
    let object = json!({"qom-type": "monitor-qmp", "id": "m2", "chardev": "c"});
    let mut texts = Vec::new();
    for more in [json!({"logappend": true}), json!({"logtimestamp": true})] {
        client.command("chardev-add", socket(more));
        client.command("object-add", object.clone());
        let mut second = Client::connect(&path);
        second.command("query-jobs", json!({}));
        drop(second);
        client.command("object-del", json!({"id": "m2"}));
        client.command("chardev-remove", json!({"id": "c"}));
        texts.push(std::fs::read_to_string(&log).expect("a text"));
    }
    let lines: Vec<&str> = texts[0].split_inclusive('\n').collect();
    assert_eq!((lines[0], lines.len()), ("older\n", 4), "{lines:?}");
    assert!(
        lines[1].starts_with("{\"QMP\": ") && lines[3].starts_with("{\"return\": []") && lines[3].ends_with("}\r\n"),
        "{lines:?}"
    );
    let lines: Vec<&str> = texts[1].split_inclusive('\n').collect();
    assert_eq!(lines.len(), 3, "{lines:?}");
    for line in &lines {
        let (time, _) = line.split_once(" {").expect("a time");
        assert!(time.starts_with("20") && time.ends_with('Z') && time.len() == 27, "{line}");
    }
    let elsewhere = json!({"id": "d", "backend": {"type": "null", "data": {"logfile": "/nonexistent/log"}}});
    let refusal = client.refusal("chardev-add", elsewhere);
    let expected = "Failed to add chardev 'd': Could not create '/nonexistent/log': No such file or directory";
    assert_eq!(refusal, expected);
    daemon.stop().expect("stopped in order");
}

/// As in QEMU: a monitor that no client reaches is allowed, and greets a ring buffer.
#[test]
fn a_monitor_may_be_where_no_client_is() {
    let daemon = Running::start(Vec::new());
    let mut client = daemon.client();
    for (id, kind) in [("n", "null"), ("r", "ringbuf")] {
        client.command("chardev-add", json!({"id": id, "backend": {"type": kind, "data": {}}}));
        client.command("object-add", json!({"qom-type": "monitor-qmp", "id": format!("m{id}"), "chardev": id}));
        assert_eq!(client.refusal("chardev-remove", json!({"id": id})), format!("Chardev '{id}' is busy"));
    }
    let said = client.command("ringbuf-read", json!({"device": "r", "size": 4096}));
    assert!(said.as_str().is_some_and(|text| text.ends_with("\"capabilities\": []}}\r\n")), "{said}");
    for id in ["n", "r"] {
        client.command("object-del", json!({"id": format!("m{id}")}));
        client.command("chardev-remove", json!({"id": id}));
    }
    daemon.stop().expect("stopped in order");
}
