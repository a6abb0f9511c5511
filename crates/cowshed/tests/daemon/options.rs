// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Options of the daemon's programs, and the messages about impossible ones.

use super::process::{COWSHED, Killed, Monitor, Serving, page, text};
use cowshed_testkit::programs::tool;
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_testkit::waiting::{await_connection, await_some};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};

/// The message of a program that can't start, on standard error; no socket is left.
#[track_caller]
fn refusal(folder: &Path, arguments: &[&str], environment: &[(&str, &str)]) -> String {
    let mut command = Command::new(COWSHED);
    command.env_remove("RUST_LOG").envs(environment.iter().copied()).args(arguments).current_dir(folder);
    let output = command.output().expect("our own binary runs");
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {output:?}");
    assert!(!folder.join("n.sock").exists() && !folder.join("m.sock").exists(), "{arguments:?}");
    message
}

#[test]
fn the_metadata_of_all_images_has_a_budget_that_changes() {
    let folder = temp_dir();
    // One refcount block takes 2 MiB of memory.
    Qemu::system().create(&folder.path().join("disk.qcow2"), "qcow2", "cluster_size=2M", 8 << 20);
    let arguments = [
        "serve",
        "--metadata-budget",
        "3M",
        "-k",
        "n.sock",
        "--monitor",
        "m.sock",
        "--metrics",
        "127.0.0.1:0",
        "disk.qcow2",
    ];
    let mut serving = Serving::start(folder.path(), &arguments);
    let metrics = [serving.line(), serving.line(), serving.line()][2].clone();
    let mut monitor = Monitor::connect(&folder.path().join("m.sock"));
    let uri = format!("nbd+unix:///?socket={}", text(&folder.path().join("n.sock")));
    let use_it = || drop(Qemu::system().io(["-f", "raw", "-c", "write 0 4M", "-c", "flush", &uri]).expect_ok());
    use_it();
    let budget = monitor.command("x-query-metadata-budget", json!({}));
    assert_eq!((&budget["limit-bytes"], &budget["images"]), (&json!(3 << 20), &json!(1)), "{budget}");
    assert!(budget["used-bytes"].as_u64() >= Some(2 << 20), "{budget}");
    let said = page(&metrics);
    for (name, key) in [("limit_bytes", "limit-bytes"), ("used_bytes", "used-bytes"), ("images", "images")] {
        let line = format!("cowshed_metadata_budget_{name}{{}} {}", budget[key]);
        assert!(said.lines().any(|found| found == line), "{line}: {said}");
    }
    // Metadata over the budget go at once; requests load again the part that they need.
    monitor.command("x-metadata-budget-set", json!({"limit-bytes": 1 << 20}));
    let budget = monitor.command("x-query-metadata-budget", json!({}));
    assert_eq!(budget["limit-bytes"], 1 << 20);
    assert!(budget["used-bytes"].as_u64() <= Some(1 << 20), "{budget}");
    use_it();
    for (wrong, words) in [(json!(1000), "at least 1048576"), (json!(-5), "at least 0"), (json!("1M"), "integer")] {
        let refused = monitor.refusal("x-metadata-budget-set", &json!({"limit-bytes": wrong}));
        assert!(refused.contains("limit-bytes") && refused.contains(words), "{refused}");
    }
    assert_eq!(monitor.command("x-query-metadata-budget", json!({}))["limit-bytes"], 1 << 20);
    let top = Command::new(COWSHED).args(["top", "-n", "1", "m.sock"]).current_dir(folder.path()).output();
    let top = String::from_utf8_lossy(&top.expect("our own binary runs").stdout).into_owned();
    assert!(top.contains("of 1 MiB for the metadata of 1 image"), "{top}");
    serving.stop();
    Qemu::system().expect_clean(&folder.path().join("disk.qcow2"));
}

#[test]
fn clients_share_the_memory_of_an_option() {
    let folder = temp_dir();
    Qemu::system().create(&folder.path().join("disk.qcow2"), "qcow2", "", 64 << 20);
    let arguments = ["serve", "--request-memory", "48M", "-k", "n.sock", "--metrics", "127.0.0.1:0", "disk.qcow2"];
    let mut serving = Serving::start(folder.path(), &arguments);
    let metrics = [serving.line(), serving.line()][1].clone();
    let uri = format!("nbd+unix:///?socket={}", text(&folder.path().join("n.sock")));
    Qemu::system().io(["-f", "raw", "-c", "write -P 7 0 32M", "-c", "read -P 7 0 32M", &uri]).expect_ok();
    let said = page(&metrics);
    for (name, value) in [("limit_bytes", 48 << 20), ("used_bytes", 0), ("waiting", 0), ("cut_total", 0)] {
        let line = format!("cowshed_request_memory_{name}{{}} {value}");
        assert!(said.lines().any(|found| found == line), "{line}: {said}");
    }
    serving.stop();
    Qemu::system().expect_clean(&folder.path().join("disk.qcow2"));
}

#[test]
fn a_memory_that_holds_no_request_is_refused() {
    let folder = temp_dir();
    Qemu::system().create(&folder.path().join("disk.qcow2"), "qcow2", "", 8 << 20);
    for (size, words) in [("31M", "don't hold the longest request"), ("lots", "invalid size 'lots'")] {
        for arguments in [
            ["serve", "-k", "n.sock", "disk.qcow2", "--request-memory", size],
            ["qemu-nbd", "-k", "n.sock", "disk.qcow2", "--request-memory", size],
            ["qemu-storage-daemon", "--nbd-server", "unix,addr.path=n.sock", "--daemonize", "--request-memory", size],
        ] {
            let output = Command::new(COWSHED).args(arguments).current_dir(folder.path()).output();
            let output = output.expect("our own binary runs");
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(1), "{arguments:?}: {said}");
            assert!(said.contains("--request-memory") && said.contains(words), "{arguments:?}: {said}");
        }
    }
}

/// A daemon whose memory may hardly grow: a client's request is refused, and the daemon goes on.
#[test]
fn a_request_without_memory_fails_and_ends_nothing() {
    let folder = temp_dir();
    std::fs::write(folder.path().join("disk.raw"), vec![5; 64 << 20]).expect("an image");
    let arguments = ["serve", "-f", "raw", "-k", "n.sock", "--queues", "1", "disk.raw"];
    let mut serving = Serving::start(folder.path(), &arguments);
    serving.line();
    let uri = format!("nbd+unix:///?socket={}", text(&folder.path().join("n.sock")));
    let io = |command: &str| Qemu::system().io(["-f", "raw", "-c", command, &uri]);
    io("read -P 5 0 1M").expect_ok();
    let pid = serving.child().id();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("a status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmData:")).expect("a size").to_owned();
    let kib: u64 = line.split_whitespace().next().and_then(|kib| kib.parse().ok()).expect("a number");
    let bytes = (kib << 10) + (12 << 20);
    let limit = rustix::process::Rlimit { current: Some(bytes), maximum: Some(bytes) };
    let process = rustix::process::Pid::from_raw(pid as i32).expect("a process");
    rustix::process::prlimit(Some(process), rustix::process::Resource::Data, limit).expect("a limit");
    for command in ["read 0 32M", "write 0 32M"] {
        let refused = format!("{:?}", io(command));
        assert!(refused.contains("Cannot allocate memory"), "{command}: {refused}");
    }
    io("read -P 5 0 1M").expect_ok();
    io("write -P 6 4k 1M").expect_ok();
    serving.stop();
}

#[test]
fn a_wrong_metadata_budget_is_refused() {
    let folder = temp_dir();
    Qemu::system().create(&folder.path().join("disk.qcow2"), "qcow2", "", 8 << 20);
    for (size, words) in [("1000", "at least 1048576 bytes, not 1000"), ("lots", "invalid size 'lots'")] {
        for arguments in [
            ["serve", "-k", "n.sock", "disk.qcow2", "--metadata-budget", size],
            ["qemu-storage-daemon", "--nbd-server", "unix,addr.path=n.sock", "--daemonize", "--metadata-budget", size],
        ] {
            let refused = refusal(folder.path(), &arguments, &[]);
            assert!(refused.contains("--metadata-budget") && refused.contains(words), "{refused}");
        }
    }
}

#[test]
fn the_log_says_what_its_filter_lets_through() {
    let folder = temp_dir();
    Qemu::system().create(&folder.path().join("disk.qcow2"), "qcow2", "", 8 << 20);
    let uri = format!("nbd+unix:///?socket={}", text(&folder.path().join("n.sock")));
    // By default the log has the clients and no commands; a filter decides both.
    for (filter, clients, commands) in
        [(None, true, false), (Some("error"), false, false), (Some("cowshed_daemon=debug"), false, true)]
    {
        let mut command = Command::new("env");
        let set = filter.map_or("COWSHED_NOTHING=".to_owned(), |filter| format!("RUST_LOG={filter}"));
        command.args([set.as_str(), COWSHED, "serve", "-k", "n.sock", "--monitor", "m.sock", "disk.qcow2"]);
        let mut serving = Serving::start_command(folder.path(), command);
        assert_eq!(
            (serving.line().as_str(), serving.line().as_str()),
            ("nbd+unix:///?socket=n.sock", "QMP: unix:m.sock")
        );
        Qemu::system().io(["-f", "raw", "-c", "read 0 4k", &uri]).expect_ok();
        Monitor::connect(&folder.path().join("m.sock")).command("query-version", json!({}));
        serving.signal("TERM");
        assert!(serving.child().wait().expect("a child").success());
        let log = serving.log();
        assert_eq!(log.contains("client uses export"), clients, "{filter:?}: {log}");
        assert_eq!(log.contains("query-version"), commands, "{filter:?}: {log}");
        std::fs::remove_file(folder.path().join("log")).expect("a log");
    }
    for wrong in ["cowshed=foo=bar", "cowshed_daemon=loud"] {
        for arguments in [
            &["serve", "-k", "n.sock", "--monitor", "m.sock", "disk.qcow2"][..],
            &["serve", "-k", "n.sock", "--daemonize", "disk.qcow2"],
            &["qemu-nbd", "-k", "n.sock", "disk.qcow2"],
            &["qemu-storage-daemon", "--nbd-server", "unix,addr.path=n.sock"],
        ] {
            let refused = refusal(folder.path(), arguments, &[("RUST_LOG", wrong)]);
            assert!(refused.contains(&format!("RUST_LOG: '{wrong}' can't be understood")), "{refused}");
        }
    }
}

#[test]
fn in_the_background_there_are_no_standard_streams() {
    let folder = temp_dir();
    Qemu::system().create(&folder.path().join("disk.qcow2"), "qcow2", "", 8 << 20);
    for (arguments, option) in [
        (
            &["qemu-storage-daemon", "--daemonize", "--chardev", "stdio,id=m", "--monitor", "m"][..],
            "--chardev stdio,id=m",
        ),
        (&["qemu-storage-daemon", "--chardev", "stdio,id=m", "--daemonize"], "--chardev stdio,id=m"),
        (&["serve", "--daemonize", "-k", "n.sock", "--monitor", "stdio", "disk.qcow2"], "--monitor"),
    ] {
        let refused = refusal(folder.path(), arguments, &[]);
        assert!(refused.contains(&format!("{option}: cannot use stdio with -daemonize")), "{refused}");
    }
}

#[test]
fn native_io_needs_direct_io() {
    let folder = temp_dir();
    Qemu::system().create(&folder.path().join("disk.raw"), "raw", "", 8 << 20);
    let words = "aio=native was specified, but it requires cache.direct=on, which was not specified.";
    let file = "driver=file,filename=disk.raw,aio=native";
    for arguments in [
        &["qemu-storage-daemon", "--blockdev", "file,node-name=f,filename=disk.raw,aio=native"][..],
        &[
            "qemu-storage-daemon",
            "--blockdev",
            "raw,node-name=f,file.driver=file,file.filename=disk.raw,file.aio=native",
        ],
        &["qemu-nbd", "-k", "n.sock", "--aio", "native", "-f", "raw", "disk.raw"],
        &["qemu-nbd", "-k", "n.sock", "--aio", "native", "--cache", "unsafe", "-f", "raw", "disk.raw"],
        &["serve", "-k", "n.sock", "--drive", "file=disk.raw,format=raw,aio=native"],
        &["serve", "-k", "n.sock", "--image-opts", file],
        &["info", "--image-opts", file],
        &["map", "--image-opts", file],
        &["convert", "--image-opts", file, "-O", "raw", "copy.raw"],
        &["bench", "--image-opts", file],
    ] {
        let refused = refusal(folder.path(), arguments, &[]);
        assert!(refused.contains(words), "{arguments:?}: {refused}");
    }
    assert!(!folder.path().join("copy.raw").exists());
    let direct = "driver=file,filename=disk.raw,aio=native,cache.direct=on";
    tool(COWSHED, &["map", "--image-opts", &direct.replace("disk.raw", text(&folder.path().join("disk.raw")))]);
    let arguments = ["qemu-nbd", "-t", "-k", "n.sock", "--aio", "native", "-n", "-f", "raw", "disk.raw"];
    let daemon = Serving::start(folder.path(), &arguments);
    await_connection(&folder.path().join("n.sock"));
    let uri = format!("nbd+unix:///?socket={}", text(&folder.path().join("n.sock")));
    Qemu::system().io(["-f", "raw", "-c", "write -P 5 0 64k", "-c", "read -P 5 0 64k", &uri]).expect_ok();
    daemon.stop();
}

#[test]
fn values_ask_for_help() {
    for program in ["qemu-storage-daemon", "qemu-nbd", "serve"] {
        for (text, first, holds) in [
            ("help", "List of user creatable objects:\n", "  tls-creds-x509\n"),
            ("nosuch,help", "List of user creatable objects:\n", "  secret\n"),
            ("secret,help", "secret options:\n", "  data=<string>\n"),
            ("throttle-group,id=g,help", "throttle-group options:\n", "  x-iops-total=<int>\n"),
        ] {
            let said = tool(COWSHED, &[program, "--object", text]);
            assert!(said.starts_with(first) && said.contains(holds), "{program} {text}: {said}");
        }
    }
    let said = tool(COWSHED, &["qemu-storage-daemon", "--chardev", "help"]);
    assert_eq!(said, "Available chardev backend types: \n  memory\n  null\n  ringbuf\n  socket\n  stdio\n");
    // QEMU ends with 1 there.
    let said =
        Command::new(COWSHED).args(["qemu-storage-daemon", "--chardev", "socket,help"]).output().expect("a program");
    let options = String::from_utf8_lossy(&said.stdout);
    assert!(said.status.code() == Some(1) && options.contains("  path=<str>\n"), "{options}");
}

#[test]
fn options_of_qemu_nbd_are_refused_with_its_words() {
    let folder = temp_dir();
    Qemu::system().create(&folder.path().join("disk.qcow2"), "qcow2", "", 8 << 20);
    // With qemu-nbd 11's message for each.
    for (arguments, words) in [
        (&["--cache", "none", "--cache=writeback"][..], "--cache can only be specified once"),
        (&["--aio", "threads", "--aio", "threads"], "--aio can only be specified once"),
        (&["--discard", "unmap", "--discard", "ignore"], "--discard can only be specified once"),
        (&["-n", "--cache", "none"], "-n and --cache can only be specified once"),
        (&["--tls-hostname", "a"], "--tls-hostname is not permitted without --tls-creds"),
        (&["--tls-hostname", "a", "--tls-creds", "t"], "TLS hostname is only supported with export list"),
        (&["-l", "snapshot.foo=1"], "Invalid parameter 'snapshot.foo'"),
        (&["-l", "snapshot.id=1,foo=2"], "Invalid parameter 'foo'"),
    ] {
        let all = [&["qemu-nbd", "-k", "n.sock", "-f", "qcow2"], arguments, &["disk.qcow2"]].concat();
        let refused = refusal(folder.path(), &all, &[]);
        assert!(refused.contains(words), "{arguments:?}: {refused}");
    }
    for verb in ["convert", "measure"] {
        let refused =
            refusal(folder.path(), &[verb, "-O", "raw", "-l", "snapshot.foo=1", "disk.qcow2", "copy.raw"], &[]);
        let words = if verb == "convert" { "Invalid parameter 'snapshot.foo'" } else { "" };
        assert!(refused.contains(words) && !folder.path().join("copy.raw").exists(), "{verb}: {refused}");
    }
}

#[test]
fn credentials_have_no_options_without_a_meaning() {
    let folder = temp_dir();
    for (option, words) in [
        (
            "priority=NORMAL:-VERS-TLS1.2",
            "Parameter 'priority' does not accept value 'NORMAL:-VERS-TLS1.2': only NORMAL",
        ),
        ("passwordid=s", "Parameter 'passwordid' is not supported: keys are read unencrypted"),
    ] {
        let server = format!("tls-creds-x509,id=t,dir=.,endpoint=server,{option}");
        let client = format!("tls-creds-x509,id=t,dir=.,endpoint=client,{option}");
        for arguments in [
            &["qemu-storage-daemon", "--object", &server][..],
            &["serve", "--object", &server, "-k", "n.sock", "--monitor", "m.sock"],
            &["qemu-nbd", "-L", "--object", &client, "--tls-creds", "t"],
        ] {
            let refused = refusal(folder.path(), arguments, &[]);
            assert!(refused.contains(words), "{arguments:?}: {refused}");
        }
    }
    // The default's name, and checks that are made in any case, are taken: only the files are missing.
    let given = "tls-creds-x509,id=t,dir=.,endpoint=server,priority=NORMAL,sanity-check=off";
    assert!(refusal(folder.path(), &["qemu-storage-daemon", "--object", given], &[]).contains("ca-cert.pem"));
}

#[test]
fn a_drive_keeps_what_is_read_through_it() {
    let (folder, qemu) = (temp_dir(), Qemu::system());
    let [base, disk] = ["base.qcow2", "disk.qcow2"].map(|name| folder.path().join(name));
    qemu.create(&base, "qcow2", "", 8 << 20);
    qemu.io_commands(&base, "qcow2", &["write -P 7 0 1M".into()]);
    tool("qemu-img", &["create", "-q", "-f", "qcow2", "-b", text(&base), "-F", "qcow2", text(&disk)]);
    let allocated = || {
        let map: Value =
            serde_json::from_str(&tool("qemu-img", &["map", "--output", "json", text(&disk)])).expect("JSON");
        let own = map.as_array().expect("a list").iter().filter(|run| run["depth"] == 0 && run["data"] == true);
        own.filter_map(|run| run["length"].as_u64()).sum::<u64>()
    };
    let uri = format!("nbd+unix:///?socket={}", text(&folder.path().join("n.sock")));
    for (option, expected) in [("off", 0), ("on", 64 << 10)] {
        let drive = format!("file=disk.qcow2,id=disk,copy-on-read={option},cache.writeback=off");
        let mut serving = Serving::start(folder.path(), &["serve", "-k", "n.sock", "--drive", &drive]);
        serving.line();
        qemu.io(["-f", "raw", "-c", "read -P 7 0 64k", &uri]).expect_ok();
        serving.stop();
        assert_eq!(allocated(), expected, "copy-on-read={option}");
    }
    qemu.expect_clean(&disk);
}

/// A terminal of its own for the program: `script` makes one for it, and the test's bytes are its keys.
#[test]
fn q_ends_top_on_a_terminal() {
    let folder = temp_dir();
    Qemu::system().create(&folder.path().join("disk.qcow2"), "qcow2", "", 1 << 20);
    let mut serving = Serving::start(folder.path(), &["serve", "--monitor", "m.sock", "-k", "n.sock", "disk.qcow2"]);
    serving.line();
    let command = format!("stty cols 80; exec {COWSHED} top --interval 0.1 m.sock");
    let mut top = Command::new("script");
    top.args(["--quiet", "--return", "--flush", "--command", &command, "/dev/null"]).current_dir(folder.path());
    let spawned = top.env("TERM", "xterm").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let mut top = Killed(spawned.expect("script runs: scripts/setup test installs it"));
    let mut screen = top.0.stdout.take().expect("a pipe");
    let mut seen = Vec::new();
    let mut part = [0; 4096];
    // The end of the output would show as nothing read.
    while !String::from_utf8_lossy(&seen).contains("disk ") {
        let count = screen.read(&mut part).expect("the terminal's output");
        assert!(count > 0, "top has ended: {}", String::from_utf8_lossy(&seen));
        seen.extend_from_slice(&part[..count]);
    }
    let mut keys = top.0.stdin.take().expect("a pipe");
    keys.write_all(b"xq").expect("the terminal takes keys");
    let rest = std::thread::spawn(move || screen.read_to_end(&mut Vec::new()));
    let status = await_some("'q' ends top", || top.0.try_wait().expect("a child"));
    assert!(status.success(), "{status}");
    rest.join().expect("no panic").expect("the terminal's output");
    drop(keys);
    serving.stop();
}
