// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The way of a daemon to its sockets and streams, and its messages about errors.

use super::process::{COWSHED, Killed, Monitor, Serving, text};
use cowshed_testkit::credentials::make_credentials;
use cowshed_testkit::programs::{run_to_code, tool};
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_testkit::waiting::{await_connection, await_that};
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, Stdio};

/// A folder with `disk.qcow2`, 8 MiB, in whose first MiB there are sevens.
fn folder_with_disk() -> tempfile::TempDir {
    let (folder, qemu) = (temp_dir(), Qemu::system());
    let disk = folder.path().join("disk.qcow2");
    qemu.create(&disk, "qcow2", "", 8 << 20);
    qemu.io_commands(&disk, "qcow2", &["write -P 7 0 1M".into()]);
    folder
}

/// A command that finds `listeners` as the sockets that a service manager passes.
fn activated(arguments: &str, listeners: Vec<OwnedFd>) -> Command {
    assert!(listeners.len() <= 2);
    let mut command = Command::new("bash");
    let count = listeners.len();
    // They come in as standard input and output, and become 3 and 4, where systemd puts them.
    let script = format!(
        "exec 3<&0 </dev/null; [[ {count} == 1 ]] || exec 4>&1 >/dev/null
         export LISTEN_FDS={count} LISTEN_PID=$$; exec \"$0\" {arguments}"
    );
    command.args(["-c", &script, COWSHED]);
    let mut listeners = listeners.into_iter();
    command.stdin(Stdio::from(listeners.next().expect("a socket")));
    command.stdout(listeners.next().map_or(Stdio::null(), Stdio::from));
    command.env_remove("RUST_LOG");
    command
}

fn reads_sevens(uri: &str) {
    let output = Qemu::system().io(["-f", "raw", "-r", "-c", "read -P 7 0 1M", uri]).expect_ok();
    assert!(!output.stdout.contains("failed"), "{uri}: {}", output.stdout);
}

#[test]
fn sockets_that_a_service_manager_passes_are_used() {
    for arguments in ["serve disk.qcow2", "qemu-nbd -t -f qcow2 disk.qcow2"] {
        let folder = folder_with_disk();
        let path = folder.path().join("passed.sock");
        let on_path = UnixListener::bind(&path).expect("a socket");
        let on_port = TcpListener::bind("127.0.0.1:0").expect("a socket");
        let port = on_port.local_addr().expect("an address").port();
        let mut command = activated(arguments, vec![on_path.into(), on_port.into()]);
        let log = fs::File::create(folder.path().join("log")).expect("a log");
        let mut daemon = Killed(command.current_dir(folder.path()).stderr(log).spawn().expect("bash runs"));
        // A client that connects before the daemon is there waits: that is the purpose of activation.
        reads_sevens(&format!("nbd+unix:///?socket={}", text(&path)));
        reads_sevens(&format!("nbd://127.0.0.1:{port}"));
        tool("kill", &["-TERM", &daemon.0.id().to_string()]);
        assert!(daemon.0.wait().expect("it ends").success(), "{arguments}");
        assert!(path.exists(), "the socket belongs to the service manager");
    }
}

/// The client's standard output is also its server's, and a program may read it.
#[test]
fn a_server_that_a_client_starts_says_nothing_on_the_output() {
    let folder = folder_with_disk();
    let listener = UnixListener::bind(folder.path().join("passed.sock")).expect("a socket");
    let mut command = activated("serve disk.qcow2 --monitor unix:m.sock --once", vec![listener.into()]);
    command.current_dir(folder.path()).stdout(Stdio::piped()).stderr(Stdio::null());
    let daemon = command.spawn().expect("bash runs");
    reads_sevens(&format!("nbd+unix:///?socket={}", text(&folder.path().join("passed.sock"))));
    let output = daemon.wait_with_output().expect("it ends");
    assert_eq!((output.status.code(), String::from_utf8_lossy(&output.stdout).as_ref()), (Some(0), ""));

    // libnbd's programs start a server so; nbdinfo's output is JSON.
    let mut nbdinfo = Command::new("nbdinfo");
    nbdinfo.args(["--json", "--", "[", COWSHED, "serve", "--once", "disk.qcow2", "]"]).current_dir(folder.path());
    let output = nbdinfo.output().expect("nbdinfo runs: scripts/setup test installs it");
    let said: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"));
    assert_eq!(said["exports"][0]["export-size"], 8 << 20, "{said}");
}

/// A service hands its own variables on to its children.
#[test]
fn variables_for_another_process_count_for_nothing() {
    for process in [None, Some("1")] {
        let folder = folder_with_disk();
        let socket = folder.path().join("n.sock");
        let mut command = Command::new(COWSHED);
        command.args(["qemu-nbd", "-t", "-f", "qcow2", "-k", text(&socket), "disk.qcow2"]).current_dir(folder.path());
        command.env("LISTEN_FDS", "1").envs(process.map(|process| ("LISTEN_PID", process)));
        let _daemon = Killed(command.spawn().expect("our own binary runs"));
        let what = format!("it serves with LISTEN_PID {process:?}");
        await_that(&what, || UnixStream::connect(&socket).is_ok());
        reads_sevens(&format!("nbd+unix:///?socket={}", text(&socket)));
    }
}

/// The image that the program opens gets the number of the descriptor that is missing.
#[test]
fn a_descriptor_that_was_not_passed_is_an_error() {
    for (arguments, count) in
        [("serve disk.qcow2", 1), ("qemu-nbd -t -f qcow2 disk.qcow2", 1), ("qemu-nbd -t disk.qcow2", 4)]
    {
        let folder = folder_with_disk();
        let script = format!("export LISTEN_FDS={count} LISTEN_PID=$$; exec \"$0\" {arguments}");
        let mut command = Command::new("bash");
        let output = command.args(["-c", &script, COWSHED]).current_dir(folder.path()).output().expect("bash runs");
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{arguments}: {message}");
        let expected = ["LISTEN_FDS names descriptor 3", "invalid file descriptor fd = 3: Bad file descriptor"];
        assert!(expected.iter().any(|words| message.contains(words)), "{message}");
        assert!(!message.contains("unlock") && !message.contains("fatal"), "{message}");
    }
}

/// The first bytes that a server sends on a socket; nothing where it is not served.
fn greeting(path: &std::path::Path) -> String {
    let mut stream = UnixStream::connect(path).expect("the socket listens");
    stream.set_read_timeout(Some(std::time::Duration::from_millis(500))).expect("a limit");
    let mut bytes = [0; 8];
    let read = stream.read(&mut bytes).unwrap_or(0);
    String::from_utf8_lossy(&bytes[..read]).into_owned()
}

/// A daemon that inherits two listening sockets as descriptors 3 and 4.
fn with_inherited(variables: &str, arguments: &str) -> (tempfile::TempDir, [std::path::PathBuf; 2], Killed) {
    let folder = folder_with_disk();
    let paths = ["first.sock", "second.sock"].map(|name| folder.path().join(name));
    let [first, second] = [0, 1].map(|at| OwnedFd::from(UnixListener::bind(&paths[at]).expect("a socket")));
    let blockdev = "driver=qcow2,node-name=q,file.driver=file,file.filename=disk.qcow2";
    let script = format!(
        "exec 3<&0 </dev/null 4>&1 >/dev/null; {variables}
         exec \"$0\" qemu-storage-daemon --blockdev {blockdev} {arguments}"
    );
    let mut command = Command::new("bash");
    command.args(["-c", &script, COWSHED]).current_dir(folder.path()).stdin(first).stdout(second);
    let log = fs::File::create(folder.path().join("log")).expect("a log");
    let daemon = Killed(command.stderr(log).spawn().expect("bash runs"));
    (folder, paths, daemon)
}

#[test]
fn inherited_sockets_carry_an_nbd_server_and_a_monitor() {
    let arguments = "--nbd-server addr.type=fd,addr.str=3 --export type=nbd,id=e,node-name=q \
                     --chardev socket,id=m,fd=4,server=on,wait=off --monitor chardev=m";
    let (_folder, [disk, monitor], _daemon) = with_inherited("", arguments);
    reads_sevens(&format!("nbd+unix:///q?socket={}", text(&disk)));
    assert_eq!(greeting(&monitor), "{\"QMP\": ");
}

/// Another program may have put a socket of its own at the path before the server stops.
#[test]
fn a_stopped_server_closes_its_inherited_socket_alone() {
    let arguments = "--nbd-server addr.type=fd,addr.str=3 --export type=nbd,id=e,node-name=q \
                     --chardev socket,id=m,fd=4,server=on,wait=off --monitor chardev=m";
    for is_replaced in [false, true] {
        let (folder, [disk, monitor], daemon) = with_inherited("", arguments);
        assert_eq!(greeting(&disk), "NBDMAGIC");
        let kept = folder.path().join("kept.sock");
        let other = is_replaced.then(|| {
            fs::rename(&disk, &kept).expect("another name");
            UnixListener::bind(&disk).expect("a socket of another program")
        });
        let mut stream = UnixStream::connect(&monitor).expect("the monitor listens");
        let commands = b"{'execute': 'qmp_capabilities'}{'execute': 'nbd-server-stop'}";
        stream.write_all(commands).expect("it reads");
        let answers = BufReader::new(stream.try_clone().expect("a copy")).lines().map_while(Result::ok);
        assert_eq!(answers.filter(|line| line.contains("\"return\"")).take(2).count(), 2);
        assert_eq!(disk.exists(), is_replaced);
        assert_eq!(UnixStream::connect(&disk).is_ok(), is_replaced);
        let descriptor = fs::read_link(format!("/proc/{}/fd/3", daemon.0.id())).unwrap_or_default();
        assert!(!descriptor.to_string_lossy().starts_with("socket:"), "{descriptor:?}");
        if is_replaced {
            let refused = UnixStream::connect(&kept).expect_err("its socket is closed");
            assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
        }
        drop(other);
    }
}

/// Another one may be open to other people.
#[test]
fn a_server_listens_on_the_named_one_of_the_passed_sockets() {
    let arguments = "--nbd-server addr.type=fd,addr.str=4 --export type=nbd,id=e,node-name=q";
    let (_folder, [other, named], _daemon) = with_inherited("export LISTEN_FDS=2 LISTEN_PID=$$;", arguments);
    reads_sevens(&format!("nbd+unix:///q?socket={}", text(&named)));
    assert_eq!((greeting(&named).as_str(), greeting(&other).as_str()), ("NBDMAGIC", ""));
}

#[test]
fn addresses_can_not_be_given_beside_passed_sockets() {
    for (argument, words) in
        [("-k $PWD/s", "Unix socket"), ("-p 1", "TCP port number"), ("-b localhost", "The interface")]
    {
        let folder = folder_with_disk();
        let listener = UnixListener::bind(folder.path().join("passed.sock")).expect("a socket");
        let mut command = activated(&format!("qemu-nbd {argument} -f qcow2 disk.qcow2"), vec![listener.into()]);
        let output = command.current_dir(folder.path()).stderr(Stdio::piped()).output().expect("bash runs");
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{message}");
        assert!(message.contains(&format!("{words} can't be set when using socket activation")), "{message}");
    }
}

#[test]
fn a_monitor_can_be_the_standard_streams() {
    let daemons: [&[&str]; 2] = [
        &["serve", "-k", "n.sock", "--monitor", "stdio", "disk.qcow2"],
        &[
            "qemu-storage-daemon",
            "--blockdev",
            "qcow2,node-name=disk,file.driver=file,file.filename=disk.qcow2",
            "--chardev",
            "stdio,id=m",
            "--monitor",
            "m",
        ],
    ];
    for arguments in daemons {
        let folder = folder_with_disk();
        let spawned = Command::new(COWSHED)
            .args(arguments)
            .current_dir(folder.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn();
        let mut daemon = Killed(spawned.expect("our own binary runs"));
        let mut stdin = daemon.0.stdin.take().expect("a pipe");
        let mut lines = BufReader::new(daemon.0.stdout.take().expect("a pipe")).lines();
        let mut message = || -> Value {
            // Lines of `serve` that aren't JSON are passed over.
            let text = lines.by_ref().map(|line| line.expect("text")).find(|line| line.starts_with('{'));
            serde_json::from_str(&text.expect("a message")).expect("JSON")
        };
        assert!(message()["QMP"].is_object());
        stdin.write_all(b"{'execute': 'qmp_capabilities'}{'execute': 'query-named-block-nodes'}").expect("it reads");
        assert_eq!(message(), json!({"return": {}}));
        let nodes = message();
        let names: Vec<&str> =
            nodes["return"].as_array().expect("nodes").iter().filter_map(|node| node["node-name"].as_str()).collect();
        assert!(names.contains(&"disk"), "{nodes}");
        stdin.write_all(b"{'execute': 'quit'}").expect("it reads");
        // The end of the exports comes first.
        let mut last = message();
        while last["event"] == "BLOCK_EXPORT_DELETED" {
            last = message();
        }
        assert_eq!(last, json!({"return": {}}));
        assert!(daemon.0.wait().expect("it ends").success());
        assert!(!folder.path().join("n.sock").exists());
    }
}

#[test]
fn real_clients_use_a_daemon_over_tls() {
    let folder = folder_with_disk();
    make_credentials(folder.path());
    let creds = "tls-creds-x509,id=t,dir=.,endpoint=server,verify-peer=off";
    let arguments = [
        "serve",
        "--object",
        creds,
        "--tls-creds",
        "t",
        "--bind",
        "127.0.0.1",
        "--port",
        "0",
        "-x",
        "disk",
        "disk.qcow2",
    ];
    let mut serving = Serving::start(folder.path(), &arguments);
    let line = serving.line();
    let port = line.rsplit(':').next().and_then(|rest| rest.split('/').next()).expect("a port").to_owned();
    let client = folder.path().join("client");
    let uri = format!("nbds://localhost:{port}/disk?tls-certificates={}", text(&client));
    let info = tool("nbdinfo", &["--json", &uri]);
    assert!(info.contains("\"TLS\": true") && info.contains("\"export-size\": 8388608"), "{info}");
    let object = format!("tls-creds-x509,id=t,dir={},endpoint=client", text(&client));
    let options = format!("driver=nbd,host=localhost,port={port},export=disk,tls-creds=t");
    let copy = folder.path().join("copy.raw");
    tool("qemu-img", &["convert", "--object", &object, "--image-opts", &options, "-O", "raw", text(&copy)]);
    let content = fs::read(&copy).expect("a file");
    assert!(content[..1 << 20].iter().all(|byte| *byte == 7) && content.len() == 8 << 20);
    fs::remove_file(&copy).expect("a file");
    tool(COWSHED, &["convert", "-O", "raw", &uri, text(&copy)]);
    assert!(fs::read(&copy).expect("a file") == content);
    // Without encryption there is nothing to be had, and nothing to be learnt.
    let refused = run_to_code("nbdinfo", &[&format!("nbd://localhost:{port}/disk")], &[1]);
    assert!(refused.contains("TLS") && !refused.contains("8388608"), "{refused}");
    serving.stop();
}

#[test]
fn ports_of_both_families_are_served() {
    let folder = folder_with_disk();
    for (bind, host) in [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")] {
        let mut serving = Serving::start(folder.path(), &["serve", "--bind", bind, "--port", "0", "disk.qcow2"]);
        let uri = serving.line();
        assert!(uri.starts_with(&format!("nbd://{host}:")), "{uri}");
        reads_sevens(&uri);
        assert!(tool("nbdinfo", &["--size", &uri]).contains("8388608"));
        serving.stop();
    }
}

#[test]
fn serve_goes_into_the_background() {
    let folder = folder_with_disk();
    let arguments = ["serve", "--daemonize", "--pidfile", "pid", "-k", "n.sock", "--monitor", "m.sock", "disk.qcow2"];
    let output = Command::new(COWSHED).args(arguments).current_dir(folder.path()).output().expect("our binary runs");
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("nbd+unix:///?socket=n.sock"), "{output:?}");
    let pid: u32 = fs::read_to_string(folder.path().join("pid")).expect("a file").trim().parse().expect("a number");
    assert_ne!(pid, 0);
    // A second one doesn't take the file of the first.
    let again = ["serve", "--pidfile", "pid", "-k", "other.sock", "-r", "disk.qcow2"];
    let output = Command::new(COWSHED).args(again).current_dir(folder.path()).output().expect("our binary runs");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(!folder.path().join("other.sock").exists());
    reads_sevens(&format!("nbd+unix:///?socket={}", text(&folder.path().join("n.sock"))));
    Monitor::connect(&folder.path().join("m.sock")).command("quit", json!({}));
    while folder.path().join("pid").exists() {
        std::thread::yield_now();
    }
    assert!(!folder.path().join("n.sock").exists() && !folder.path().join("m.sock").exists());
}

#[test]
fn a_log_for_machines_is_json_line_by_line() {
    let folder = folder_with_disk();
    let mut serving = Serving::start(folder.path(), &["serve", "--log-format", "json", "-k", "n.sock", "disk.qcow2"]);
    serving.line();
    reads_sevens(&format!("nbd+unix:///?socket={}", text(&folder.path().join("n.sock"))));
    serving.await_log("client left");
    serving.signal("TERM");
    assert!(serving.child().wait().expect("a child").success());
    let log = serving.log();
    let lines: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect();
    for line in &lines {
        assert!(line["timestamp"].is_string() && line["level"].is_string() && line["message"].is_string(), "{line}");
    }
    let client = lines.iter().find(|line| line["message"] == "client uses export").expect("who connects is told");
    assert!(client["peer"].is_string() && client["export"].is_string(), "{client}");
}

#[test]
fn stale_socket_is_taken_over_and_a_living_one_not() {
    let folder = folder_with_disk();
    let arguments = ["serve", "-k", "n.sock", "--monitor", "m.sock", "disk.qcow2"];
    let mut first = Serving::start(folder.path(), &arguments);
    assert_eq!(first.line(), "nbd+unix:///?socket=n.sock");
    first.signal("KILL");
    drop(first);
    // The kernel takes a killed process's ring down a moment later, and with it the operations that wait for clients.
    // The next daemon sees to that.
    assert!(["n.sock", "m.sock"].iter().all(|socket| folder.path().join(socket).exists()));
    let mut second = Serving::start(folder.path(), &arguments);
    assert_eq!(second.line(), "nbd+unix:///?socket=n.sock");
    // A third one is refused, by the name of the socket, or of the image whose lock the second has.
    for (file, reason) in [("other.qcow2", "n.sock"), ("disk.qcow2", "disk.qcow2")] {
        Qemu::system().create(&folder.path().join("other.qcow2"), "qcow2", "", 1 << 20);
        let output = Command::new(COWSHED).args(["serve", "-k", "n.sock", file]).current_dir(folder.path()).output();
        let message = String::from_utf8_lossy(&output.expect("our binary runs").stderr).into_owned();
        assert!(message.contains(reason), "{file}: {message}");
        reads_sevens(&format!("nbd+unix:///?socket={}", text(&folder.path().join("n.sock"))));
    }
    second.stop();
}

#[test]
fn exports_are_listed_as_qemu_nbd_lists_them() {
    let folder = folder_with_disk();
    let socket = folder.path().join("n.sock");
    let address = format!("addr.type=unix,addr.path={}", text(&socket));
    let arguments = [
        "qemu-storage-daemon",
        "--blockdev",
        "qcow2,node-name=disk,file.driver=file,file.filename=disk.qcow2",
        "--blockdev",
        "null-co,node-name=none,size=1048576",
        "--nbd-server",
        &address,
        "--export",
        "nbd,id=a,node-name=disk,name=one,writable=on,description=what it is,allocation-depth=on",
        "--export",
        "nbd,id=b,node-name=none,name=two",
    ];
    let daemon = Serving::start(folder.path(), &arguments);
    await_connection(&socket);
    let list = ["-L", "-k", text(&socket)];
    let theirs = tool("qemu-nbd", &list);
    let ours = tool(COWSHED, &[&["qemu-nbd"], &list[..]].concat());
    assert!(ours.contains("\n export: 'one'\n  description: what it is\n  size:  8388608\n"), "{ours}");
    assert!(ours.contains(" export: 'two'\n  size:  1048576\n") && ours.contains("readonly"), "{ours}");
    assert!(ours.contains("   base:allocation\n   qemu:allocation-depth\n"), "{ours}");
    // Version 7.2 has no extended headers, and no flag for the payload that comes with them.
    let common = |text: &str| {
        let known = text.lines().filter(|line| !line.contains("transaction size:") && !line.contains("flags:"));
        known.map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(common(&ours), common(&theirs));
    daemon.stop();
    // Other servers, other answers.
    let server = folder.path().join("k.sock");
    let script = format!("{COWSHED} qemu-nbd -L -k {0}; qemu-nbd -L -k {0}", text(&server));
    let said = tool("nbdkit", &["-U", text(&server), "null", "1M", "--run", &script]);
    assert_eq!(said.matches("exports available: 1\n export: ''\n  size:  1048576\n").count(), 2, "{said}");
    let server = folder.path().join("o.sock");
    let newest = Qemu::newest().program("qemu-nbd");
    let script = format!("{COWSHED} qemu-nbd -L -k {0}; {1} -L -k {0}", text(&server), newest.display());
    let said = tool("nbdkit", &["-U", text(&server), "--oldstyle", "null", "1M", "--run", &script]);
    let half = said.len() / 2;
    assert!(said.contains(" export: ''\n  size:  1048576\n") && said[..half] == said[half..], "{said}");
    for (wrong, reason) in [
        (&["-L", "disk.qcow2"][..], "List mode is incompatible with a file name"),
        (&["-L", "-f", "raw"], "List mode is incompatible with per-device settings"),
        (&["-L", "--fork"], "List mode is incompatible with forking"),
        (&["-L", "-k", "/nonexistent/n.sock"], "/nonexistent/n.sock"),
        (&["-L", "--tls-creds", "t"], "No TLS credentials with id 't'"),
        (&["--tls-hostname", "h", "disk.qcow2"], "--tls-hostname is not permitted without --tls-creds"),
    ] {
        let said = run_to_code(COWSHED, &[&["qemu-nbd"], wrong].concat(), &[1]);
        assert!(said.contains(reason), "{wrong:?}: {said}");
    }
}

#[test]
fn exports_are_listed_over_tls_under_the_name_in_the_certificate() {
    let folder = folder_with_disk();
    make_credentials(folder.path());
    let socket = folder.path().join("n.sock");
    let creds = "tls-creds-x509,id=t,dir=.,endpoint=server,verify-peer=off";
    let arguments =
        ["qemu-nbd", "-t", "--object", creds, "--tls-creds", "t", "-k", "n.sock", "-x", "disk", "disk.qcow2"];
    let daemon = Serving::start(folder.path(), &arguments);
    await_connection(&socket);
    let object = format!("tls-creds-x509,id=c,dir={},endpoint=client", text(&folder.path().join("client")));
    let list = |more: &[&str], codes: &[i32]| {
        let socket = text(&socket);
        let arguments = ["qemu-nbd", "-L", "-k", socket, "--object", &object, "--tls-creds", "c"];
        run_to_code(COWSHED, &[&arguments, more].concat(), codes)
    };
    // A Unix socket has no name of its own: the certificate's must be given, unless it is localhost.
    assert!(list(&["--tls-hostname", "localhost"], &[0]).contains("export: 'disk'"));
    assert!(list(&[], &[0]).contains("export: 'disk'"));
    assert!(list(&["--tls-hostname", "elsewhere"], &[1]).contains("Certificate does not match the hostname elsewhere"));
    let plain = run_to_code(COWSHED, &["qemu-nbd", "-L", "-k", text(&socket)], &[1]);
    assert!(plain.contains("TLS negotiation required before option 3 (list)") && !plain.contains("disk'"), "{plain}");
    daemon.stop();
}

#[test]
fn a_temporary_overlay_takes_the_writes() {
    let folder = folder_with_disk();
    let (disk, temporary) = (folder.path().join("disk.qcow2"), folder.path().join("tmp"));
    fs::create_dir(&temporary).expect("a folder");
    let before = fs::read(&disk).expect("the image");
    let socket = folder.path().join("n.sock");
    let uri = format!("nbd+unix:///?socket={}", text(&socket));
    for more in [&["-f", "qcow2", "disk.qcow2"][..], &["--image-opts", "driver=qcow2,file.filename=disk.qcow2"]] {
        let mut command = Command::new(COWSHED);
        command.args(["qemu-nbd", "-t", "-s", "-k", "n.sock"]).args(more).env("TMPDIR", &temporary);
        let daemon = Serving::start_command(folder.path(), command);
        await_connection(&socket);
        reads_sevens(&uri);
        // It has no name any more.
        assert_eq!(fs::read_dir(&temporary).expect("a folder").count(), 0);
        let commands = ["-f", "raw", "-c", "write -P 9 512k 3M", "-c", "flush", "-c", "read -P 7 0 512k"];
        let qemu = Qemu::system();
        qemu.io([&commands[..], &["-c", "read -P 9 512k 3M", &uri]].concat()).expect_ok();
        daemon.stop();
        assert!(fs::read(&disk).expect("the image") == before, "the image is as it was");
        assert_eq!(fs::read_dir(&temporary).expect("a folder").count(), 0);
    }
    let output = Command::new(COWSHED)
        .args(["qemu-nbd", "-s", "-k", "n.sock", "disk.qcow2"])
        .current_dir(folder.path())
        .env("TMPDIR", "/nonexistent")
        .output()
        .expect("our own binary runs");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && said.contains("TMPDIR") && said.contains("/nonexistent"), "{said}");
    assert!(!socket.exists());
}

#[test]
fn wrong_options_are_named_with_what_they_may_be() {
    let folder = folder_with_disk();
    let blockdev = |options: &'static str| vec!["qemu-storage-daemon", "--blockdev", options];
    let mistakes: Vec<(Vec<&str>, &[&str])> = vec![
        (
            vec!["serve", "--cache", "fast", "disk.qcow2"],
            &["fast", "none", "writeback", "writethrough", "directsync", "unsafe"],
        ),
        (vec!["serve", "--log-format", "xml", "disk.qcow2"], &["xml", "--log-format", "text", "json"]),
        (vec!["serve", "--queues", "many", "disk.qcow2"], &["many", "--queues"]),
        (vec!["serve", "--port", "70000", "disk.qcow2"], &["70000", "--port", "65535"]),
        (vec!["serve", "--drive", "file=disk.qcow2,speed=1"], &["speed"]),
        (vec!["serve", "--drive", "file=disk.qcow2,aio=fast"], &["aio", "fast", "threads", "native", "io_uring"]),
        (vec!["qemu-nbd", "--aio", "fast", "disk.qcow2"], &["Invalid aio mode 'fast'"]),
        (vec!["qemu-nbd", "--discard", "some", "disk.qcow2"], &["Invalid discard mode `some'"]),
        (
            vec!["qemu-nbd", "--detect-zeroes", "1", "disk.qcow2"],
            &["Failed to parse detect_zeroes mode: invalid parameter value: 1"],
        ),
        (blockdev("driver=fast,node-name=d"), &["Parameter 'driver' does not accept value 'fast'"]),
        (
            blockdev("qcow2,node-name=d,file.driver=file,file.filename=disk.qcow2,overlap-check=some"),
            &["Parameter 'overlap-check' does not accept value 'some'"],
        ),
        (blockdev("qcow2,node-name=d,file.driver=file,file.filename=disk.qcow2,speed=1"), &["speed"]),
        (
            blockdev("qcow2,node-name=d,file.driver=file,file.filename=disk.qcow2,file.locking=maybe"),
            &["file.locking", "does not accept value 'maybe'"],
        ),
        (
            blockdev("qcow2,node-name=d,file.driver=file,file.filename=disk.qcow2,l2-cache-size=much"),
            &["l2-cache-size", "much"],
        ),
        (
            vec!["qemu-storage-daemon", "--object", "thing,id=x"],
            &["Parameter 'qom-type' does not accept value 'thing'"],
        ),
        (vec!["qemu-storage-daemon", "--chardev", "pipe,id=x,path=p"], &["pipe", "socket", "stdio"]),
        (
            vec!["qemu-storage-daemon", "--nbd-server", "addr.type=carrier,addr.path=x"],
            &["Parameter 'type' does not accept value 'carrier'"],
        ),
        (
            vec!["qemu-storage-daemon", "--export", "fax,id=e,node-name=d"],
            &["Parameter 'type' does not accept value 'fax'"],
        ),
        // Under our own name with the values that there are.
        (
            vec!["serve", "--drive", "file=disk.qcow2,overlap-check=some"],
            &["overlap-check", "some", "constant", "cached"],
        ),
        (vec!["serve", "--export", "fax,id=e,node-name=d", "disk.qcow2"], &["fax", "nbd", "vhost-user-blk", "http"]),
    ];
    let mut wrong = Vec::new();
    for (arguments, words) in mistakes {
        let output =
            Command::new(COWSHED).args(&arguments).current_dir(folder.path()).output().expect("our binary runs");
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        let missing: Vec<&str> = words.iter().copied().filter(|word| !message.contains(word)).collect();
        if output.status.success() || !missing.is_empty() {
            wrong.push(format!("{arguments:?} says {message:?} without {missing:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_refused_command_changes_nothing_and_says_why() {
    let folder = folder_with_disk();
    let qemu = Qemu::system();
    qemu.create(&folder.path().join("small.qcow2"), "qcow2", "", 1 << 20);
    fs::write(folder.path().join("there.qcow2"), b"something of the user's").expect("a file");
    let arguments = [
        "serve",
        "-x",
        "disk",
        "-k",
        "n.sock",
        "--monitor",
        "m.sock",
        "--monitor",
        "m2.sock",
        "--drive",
        "file=disk.qcow2,id=disk",
    ];
    let mut serving = Serving::start(folder.path(), &arguments);
    let lines = [serving.line(), serving.line(), serving.line()];
    assert!(lines[2].contains("m2.sock"), "{lines:?}");
    // Each client sees the effects of the other.
    let mut monitor = Monitor::connect(&folder.path().join("m.sock"));
    let mut watcher = Monitor::connect(&folder.path().join("m2.sock"));
    let small = json!({"driver": "qcow2", "node-name": "small", "file": {"driver": "file", "filename": "small.qcow2"}});
    monitor.command("blockdev-add", small.clone());
    monitor.command("object-add", json!({"qom-type": "throttle-group", "id": "g", "limits": {"iops-total": 100}}));
    let mut state = || {
        let queries = [
            ("query-named-block-nodes", json!({})),
            ("query-block-exports", json!({})),
            ("query-jobs", json!({})),
            ("qom-list", json!({"path": "/objects"})),
            ("qom-get", json!({"path": "/objects/g", "property": "limits"})),
        ];
        queries.map(|(name, arguments)| watcher.command(name, arguments).to_string())
    };
    let before = state();
    let limits = json!({"bps": 0, "bps_rd": 0, "bps_wr": 0, "iops": 0, "iops_rd": 0, "iops_wr": 0});
    let with = |mut arguments: Value, more: Value| {
        arguments.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        arguments
    };
    let refused: Vec<(&str, Value, &str)> = vec![
        ("no-such-command", json!({}), "no-such-command"),
        ("blockdev-add", small, "small"),
        ("blockdev-add", json!({"driver": "qcow2", "node-name": "x", "file": "nobody"}), "nobody"),
        ("blockdev-add", json!({"driver": "file", "node-name": "x", "filename": "nothing.raw"}), "nothing.raw"),
        ("blockdev-add", json!({"driver": "file", "node-name": "x", "filename": "small.qcow2", "colour": 1}), "colour"),
        ("blockdev-del", json!({"node-name": "nobody"}), "nobody"),
        ("blockdev-del", json!({"node-name": "disk"}), "disk"),
        ("block-export-add", json!({"type": "nbd", "id": "disk", "node-name": "small"}), "disk"),
        ("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "nobody"}), "nobody"),
        ("block-export-add", json!({"type": "fax", "id": "e", "node-name": "small"}), "fax"),
        ("block-export-del", json!({"id": "nobody"}), "nobody"),
        ("nbd-server-start", json!({"addr": {"type": "unix", "data": {"path": "again.sock"}}}), "already"),
        ("block_resize", json!({"node-name": "small", "size": -1}), "size"),
        ("block_resize", json!({"node-name": "nobody", "size": 1}), "nobody"),
        ("block_set_io_throttle", with(limits.clone(), json!({"id": "nobody"})), "nobody"),
        ("block_set_io_throttle", with(limits.clone(), json!({"id": "disk", "bps": 1, "bps_rd": 1})), "bps"),
        ("block_set_io_throttle", with(limits, json!({"id": "disk", "iops": "many"})), "iops"),
        ("object-add", json!({"qom-type": "throttle-group", "id": "g"}), "g"),
        ("object-add", json!({"qom-type": "thing", "id": "t"}), "thing"),
        ("object-del", json!({"id": "nobody"}), "nobody"),
        (
            "qom-set",
            json!({"path": "/objects/g", "property": "limits", "value": {"iops-total": -5}}),
            "within [0, 1000000000000000]",
        ),
        (
            "blockdev-snapshot-sync",
            json!({"node-name": "small", "snapshot-file": "there.qcow2", "snapshot-node-name": "disk"}),
            "already in use",
        ),
        (
            "blockdev-snapshot-sync",
            json!({"node-name": "nobody", "snapshot-file": "new.qcow2", "snapshot-node-name": "n"}),
            "nobody",
        ),
        ("blockdev-snapshot", json!({"node": "small", "overlay": "disk"}), "The overlay is already in use"),
        (
            "transaction",
            json!({"actions": [
            {"type": "blockdev-snapshot-sync", "data": {"node-name": "small", "snapshot-file": "new.qcow2", "snapshot-node-name": "n"}},
            {"type": "blockdev-snapshot-sync", "data": {"node-name": "nobody", "snapshot-file": "new2.qcow2", "snapshot-node-name": "m"}}]}),
            "nobody",
        ),
        ("blockdev-mirror", json!({"job-id": "j", "device": "disk", "target": "nobody", "sync": "full"}), "nobody"),
        ("job-cancel", json!({"id": "nobody"}), "Job not found"),
    ];
    for (name, arguments, reason) in refused {
        let said = monitor.refusal(name, &arguments);
        assert!(said.contains(reason), "{name} {arguments}: {said}");
        assert_eq!(state(), before, "{name} {arguments}");
    }
    assert_eq!(fs::read(folder.path().join("there.qcow2")).expect("a file"), b"something of the user's");
    for file in ["new.qcow2", "new2.qcow2", "again.sock", "nothing.raw"] {
        assert!(!folder.path().join(file).exists(), "{file}");
    }
    reads_sevens(&format!("nbd+unix:///disk?socket={}", text(&folder.path().join("n.sock"))));
    serving.stop();
}

#[test]
fn two_hundred_idle_images_fit_into_100_mib() {
    const IMAGES: usize = 200;
    let (folder, qemu) = (temp_dir(), Qemu::system());
    let first = folder.path().join("0.qcow2");
    qemu.create(&first, "qcow2", "", 20 << 30);
    qemu.io_commands(&first, "qcow2", &["write -P 7 0 1M".into(), "write -P 7 19G 1M".into()]);
    let mut arguments = vec!["serve".to_owned(), "-k".to_owned(), "n.sock".to_owned()];
    for n in 0..IMAGES {
        if n > 0 {
            fs::copy(&first, folder.path().join(format!("{n}.qcow2"))).expect("a copy");
        }
        arguments.extend(["--drive".to_owned(), format!("file={n}.qcow2,id=d{n}")]);
    }
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let mut serving = Serving::start(folder.path(), &arguments);
    for n in 0..IMAGES {
        assert_eq!(serving.line(), format!("nbd+unix:///d{n}?socket=n.sock"));
    }
    // Used once and left alone.
    for n in [0, IMAGES - 1] {
        reads_sevens(&format!("nbd+unix:///d{n}?socket={}", text(&folder.path().join("n.sock"))));
    }
    let status = fs::read_to_string(format!("/proc/{}/status", serving.child().id())).expect("a status");
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a size");
    let kib: u64 = resident.trim().trim_end_matches(" kB").parse().expect("a number");
    assert!(kib < 100 << 10, "{kib} KiB are resident");
    serving.stop();
}
