// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `serve`, and the command lines of qemu-nbd and qemu-storage-daemon, used by real clients.

use crate::oracle::Oracle;
use cowshed_testkit::programs::tool;
use cowshed_testkit::qemu::Qemu;
use cowshed_testkit::waiting::await_that;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};

const COWSHED: &str = env!("CARGO_BIN_EXE_cowshed");

/// A running daemon and its standard error; killed if the test ends early.
pub struct Serving(Child, File);

impl Serving {
    pub fn start(folder: std::path::PathBuf, arguments: &[&str]) -> Serving {
        // Files that a kill leaves behind go with the test's folder.
        Serving::of(Command::new(COWSHED).args(arguments).env("XDG_RUNTIME_DIR", &folder).current_dir(&folder))
    }

    fn of(command: &mut Command) -> Serving {
        let errors = tempfile::tempfile().expect("a file");
        let child = command
            .env_remove("RUST_LOG")
            .stdout(Stdio::piped())
            .stderr(errors.try_clone().expect("a descriptor"))
            .spawn();
        Serving(child.expect("our own binary runs"), errors)
    }

    /// The next line of its output, which has not ended.
    #[track_caller]
    pub fn line(&mut self) -> String {
        let mut line = String::new();
        let mut output = BufReader::with_capacity(1, self.0.stdout.as_mut().expect("a pipe"));
        if output.read_line(&mut line).expect("text") == 0 {
            let mut errors = String::new();
            self.1.rewind().and_then(|()| self.1.read_to_string(&mut errors)).expect("text");
            panic!("the daemon's output has ended ({:?}): {errors}", self.0.try_wait());
        }
        line.trim_end().to_owned()
    }

    pub fn signal(&self, signal: &str) {
        let status = Command::new("kill").args([format!("-{signal}"), self.0.id().to_string()]).status();
        assert!(status.expect("kill runs").success());
    }

    fn wait(mut self) -> ExitStatus {
        self.0.wait().expect("it ends")
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits for a socket to be there.
pub fn await_socket(path: &Path) {
    await_that("the socket is there", || UnixStream::connect(path).is_ok());
}

#[test]
fn serve_prints_a_uri_that_clients_use() {
    let oracle = Oracle::new();
    oracle.make("create -q -f qcow2 disk.qcow2 8M");
    let mut serving = Serving::start(oracle.work(), &["serve", "disk.qcow2"]);
    let uri = serving.line();
    assert!(uri.starts_with("nbd+unix:///?socket="), "{uri}");
    let socket = uri.split("socket=").nth(1).expect("a socket").to_owned();
    oracle.qemu.io(["-f", "raw", "-c", "write -P 9 1M 2M", &uri]).expect_ok();
    oracle.qemu.io(["-f", "raw", "-c", "read -P 9 1M 2M", "-c", "read -P 0 3M 5M", &uri]).expect_ok();
    serving.signal("TERM");
    assert!(serving.wait().success());
    assert!(!Path::new(&socket).exists() && !Path::new(&socket).parent().expect("a folder").exists());
    oracle.qemu.expect_clean(&oracle.work().join("disk.qcow2"));
    oracle.qemu.io_commands(&oracle.work().join("disk.qcow2"), "qcow2", &["read -P 9 1M 2M".into()]);
}

/// Numbers of processes come again: remains of a killed daemon under its number are in no other one's way.
#[test]
fn folders_of_killed_daemons_block_no_later_one() {
    let oracle = Oracle::new();
    oracle.make("create -q -f qcow2 disk.qcow2 1M");
    for number in 0..4000 {
        let left = oracle.work().join(format!("cowshed-{}", std::process::id() + number));
        std::fs::create_dir(left).expect("a folder");
    }
    let mut command = Command::new(COWSHED);
    command.args(["serve", "disk.qcow2"]).current_dir(oracle.work()).env("XDG_RUNTIME_DIR", oracle.work());
    let mut serving = Serving::of(&mut command);
    let uri = serving.line();
    oracle.qemu.io(["-f", "raw", "-c", "read 0 1M", &uri]).expect_ok();
    let folder = Path::new(uri.split("socket=").nth(1).expect("a socket")).parent().expect("a folder").to_owned();
    let mode = std::os::unix::fs::PermissionsExt::mode(&folder.metadata().expect("it is there").permissions());
    assert_eq!(mode & 0o777, 0o700);
    serving.signal("TERM");
    assert!(serving.wait().success() && !folder.exists());
}

/// A client's view of an export under this name; `None`: the server doesn't know it.
fn seen(oracle: &Oracle, name: &str) -> Option<String> {
    let uri = format!("nbd+unix:///{name}?socket={}", oracle.work().join("n.sock").display());
    let said = oracle.qemu.img(["info", &uri]);
    assert!(said.code == 0 || said.stderr.contains(&format!("export '{name}'")), "{}", said.stderr);
    (said.code == 0).then_some(said.stdout)
}

#[test]
fn a_single_drive_answers_to_its_name_and_without_one() {
    let oracle = Oracle::new();
    for name in ["a.qcow2", "b.qcow2"] {
        oracle.make(&format!("create -q -f qcow2 {name} 8M"));
    }
    let (one, two) = (["--drive", "file=a.qcow2,id=disk"], ["--drive", "file=b.qcow2,id=other"]);
    for (arguments, known, unknown) in [
        (&["serve", "a.qcow2"][..], &["", "a"][..], "b"),
        (&[&["serve"], &one[..]].concat(), &["", "disk"], "a"),
        (&[&["serve", "-x", "x"], &one[..]].concat(), &["x", "disk"], "y"),
        (&[&["serve"], &one[..], &two[..]].concat(), &["disk", "other"], "a"),
        // As QEMU's.
        (&["qemu-nbd", "-v", "-t", "-x", "disk", "a.qcow2"], &["disk"], ""),
        (&["qemu-nbd", "-v", "-t", "a.qcow2"], &[""], "export"),
    ] {
        let mut command = Command::new(COWSHED);
        command.args(arguments).args(["-k".into(), oracle.work().join("n.sock")]).current_dir(oracle.work());
        let serving = Serving::of(&mut command);
        let mut log = serving.1.try_clone().expect("a descriptor");
        await_socket(&oracle.work().join("n.sock"));
        for name in known {
            assert!(seen(&oracle, name).is_some(), "{arguments:?}: '{name}'");
        }
        assert_eq!(seen(&oracle, unknown), None, "{arguments:?}: '{unknown}'");
        serving.signal("TERM");
        assert!(serving.wait().success(), "{arguments:?}");
        // The log has the unknown name and the known ones.
        let mut text = String::new();
        log.rewind().and_then(|()| log.read_to_string(&mut text)).expect("text");
        let names = known.iter().map(|name| format!("{name:?}")).collect::<BTreeSet<_>>();
        let names = names.into_iter().collect::<Vec<_>>().join(", ");
        let expected = format!("name={unknown:?} names={{{names}}}");
        assert!(text.contains(&expected), "{arguments:?}: {expected}: {text}");
    }
}

#[test]
fn several_images_have_names_and_a_monitor() {
    let oracle = Oracle::new();
    oracle.make("create -q -f qcow2 a.qcow2 1M");
    oracle.make("create -q -f raw b.raw 2M");
    let arguments = [
        "serve",
        "-k",
        "n.sock",
        "--monitor",
        "m.sock",
        "a.qcow2",
        "--drive",
        "file=b.raw,format=raw,id=b,readonly=on",
    ];
    let mut serving = Serving::start(oracle.work(), &arguments);
    assert_eq!([serving.line(), serving.line()], ["nbd+unix:///a?socket=n.sock", "nbd+unix:///b?socket=n.sock"]);
    assert_eq!(serving.line(), "QMP: unix:m.sock");
    let list =
        Command::new("nbdinfo").args(["--list", "nbd+unix:///?socket=n.sock"]).current_dir(oracle.work()).output();
    let list = list.expect("nbdinfo runs: scripts/setup test installs it");
    let list = String::from_utf8_lossy(&list.stdout).into_owned();
    assert!(list.contains("export=\"a\"") && list.contains("export=\"b\""), "{list}");

    let mut monitor = UnixStream::connect(oracle.work().join("m.sock")).expect("it listens");
    monitor.write_all(b"{'execute': 'qmp_capabilities'} {'execute': 'quit'}").expect("it reads");
    let last = BufReader::new(monitor).lines().map(|line| line.expect("text")).last();
    assert_eq!(last.as_deref(), Some("{\"return\": {}}"));
    assert!(serving.wait().success());
    assert!(!oracle.work().join("n.sock").exists() && !oracle.work().join("m.sock").exists());
}

#[test]
fn qemu_nbd_ends_with_its_last_client() {
    let oracle = Oracle::new();
    oracle.make("create -q -f qcow2 disk.qcow2 8M");
    let serving = Serving::start(oracle.work(), &["qemu-nbd", "-k", "n.sock", "-f", "qcow2", "-x", "x", "disk.qcow2"]);
    let socket = oracle.work().join("n.sock");
    await_socket(&socket);
    let uri = format!("nbd+unix:///x?socket={}", socket.display());
    oracle.qemu.io(["-f", "raw", "-c", "write -P 5 0 1M", &uri]).expect_ok();
    assert!(serving.wait().success());
    assert!(!socket.exists());
    oracle.qemu.io_commands(&oracle.work().join("disk.qcow2"), "qcow2", &["read -P 5 0 1M".into()]);
}

/// The image's holes after a client's discard, with the standard error of a server that refuses the image.
fn after_a_discard(oracle: &Oracle, program: &mut Command, options: &[&str]) -> String {
    oracle.make("create -q -f qcow2 disk.qcow2 1M");
    oracle.io(&["write -q -P 1 0 1M"], "disk.qcow2");
    let socket = oracle.work().join("s");
    let _ = std::fs::remove_file(&socket);
    program.args(["-t", "-e", "9", "-k"]).arg(&socket).args(options).current_dir(oracle.work());
    let mut server = program.stderr(Stdio::piped()).spawn().expect("a server");
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    // A server that refuses the image has listened before.
    await_that("the server takes the request or ends", || {
        server.try_wait().expect("a child").is_some()
            || oracle.qemu.io(["-f", "raw", "-d", "unmap", "-c", "discard 0 128k", &uri]).code == 0
    });
    if server.try_wait().expect("a child").is_some() {
        let said = server.wait_with_output().expect("a child").stderr;
        return String::from_utf8_lossy(&said).replace(env!("CARGO_BIN_EXE_cowshed"), "qemu-nbd");
    }
    tool("kill", &[&server.id().to_string()]);
    server.wait().expect("a child");
    format!("{:?}", oracle.qemu.map(&oracle.work().join("disk.qcow2"), "qcow2"))
}

#[test]
fn qemu_nbd_takes_discards_and_writes_as_the_real_one() {
    let oracle = Oracle::new();
    let link = oracle.work().join("qemu-nbd");
    std::os::unix::fs::symlink(COWSHED, &link).expect("a link");
    let image = "driver=qcow2,file.filename=disk.qcow2";
    let named = |option: &str| format!("{image},{option}");
    let json = r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"disk.qcow2"},"read-only":true}"#;
    let (unmap, ignore, read_only) = (named("discard=unmap"), named("discard=ignore"), named("read-only=on"));
    for options in [
        &["-f", "qcow2", "disk.qcow2"][..],
        &["-f", "qcow2", "--discard=unmap", "disk.qcow2"],
        &["-f", "qcow2", "--discard=off", "disk.qcow2"],
        &["--image-opts", &unmap],
        &["--discard=ignore", "--image-opts", &unmap],
        &["--discard=unmap", "--image-opts", &ignore],
        &["--image-opts", &read_only],
        &["-s", "--image-opts", &read_only],
        &[json],
    ] {
        let theirs = after_a_discard(&oracle, &mut Command::new(Qemu::newest().program("qemu-nbd")), options);
        assert_eq!(after_a_discard(&oracle, &mut Command::new(&link), options), theirs, "{options:?}");
    }
}

/// The dirty ranges of a context, by qemu-img and by nbdinfo.
pub fn dirty(oracle: &Oracle, bitmap: &str) -> Vec<(u64, u64)> {
    let (name, socket) = (format!("qemu:dirty-bitmap:{bitmap}"), oracle.work().join("n.sock"));
    let options =
        format!("driver=nbd,server.type=unix,server.path={},export=x,x-dirty-bitmap={name}", socket.display());
    let map = oracle.qemu.img(["map", "--output=json", "--image-opts", &options]).expect_ok().json();
    let runs = |map: &serde_json::Value, start: &str, is_dirty: fn(&serde_json::Value) -> bool| -> Vec<(u64, u64)> {
        let runs = map.as_array().expect("runs").iter().filter(|run| is_dirty(run));
        runs.map(|run| (run[start].as_u64().expect("start"), run["length"].as_u64().expect("length"))).collect()
    };
    let found = runs(&map, "start", |run| run["data"] == false);
    let ours = Command::new(COWSHED).args(["map", "--output=json", "--image-opts", &options]).output();
    let ours = serde_json::from_slice(&ours.expect("our own binary runs").stdout).expect("JSON");
    assert_eq!(runs(&ours, "start", |run| run["data"] == false && run["present"] == false), found);
    let uri = format!("nbd+unix:///x?socket={}", socket.display());
    let output = Command::new("nbdinfo").args([format!("--map={name}"), "--json".to_owned(), uri]).output();
    let output = output.expect("nbdinfo runs: scripts/setup test installs it");
    let map = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(runs(&map, "offset", |run| run["type"] == 1), found);
    found
}

#[test]
fn dirty_bitmaps_are_offered_by_every_command_line() {
    let oracle = Oracle::new();
    oracle.make("create -q -f qcow2 base.qcow2 8M");
    oracle.make("bitmap --add -g 64k base.qcow2 below");
    oracle.io(&["write -q 1M 64k"], "base.qcow2");
    oracle.make("create -q -f qcow2 -b base.qcow2 -F qcow2 disk.qcow2");
    oracle.make("bitmap --add -g 512 disk.qcow2 b");
    oracle.io(&["write -q 4k 1k", "write -q 5M 128k"], "disk.qcow2");
    let expected = [(4096, 1024), (5 << 20, 128 << 10)];
    let blockdev = "driver=qcow2,node-name=d,read-only=on,file.driver=file,file.filename=disk.qcow2";
    let export = "nbd,id=e,node-name=d,name=x,bitmaps.0=b,bitmaps.1=below";
    for arguments in [
        &["qemu-nbd", "-r", "-t", "-k", "n.sock", "-x", "x", "-B", "b", "-B", "below", "-f", "qcow2", "disk.qcow2"][..],
        &["serve", "-r", "-k", "n.sock", "-x", "x", "--bitmap", "b", "--bitmap=below", "disk.qcow2"],
        &[
            "qemu-storage-daemon",
            "--nbd-server",
            "addr.type=unix,addr.path=n.sock",
            "--blockdev",
            blockdev,
            "--export",
            export,
        ],
    ] {
        let serving = Serving::start(oracle.work(), arguments);
        await_socket(&oracle.work().join("n.sock"));
        assert_eq!(dirty(&oracle, "b"), expected, "{arguments:?}");
        assert_eq!(dirty(&oracle, "below"), [(1 << 20, 65536)], "{arguments:?}");
        serving.signal("TERM");
        assert!(serving.wait().success(), "{arguments:?}");
    }
    let refused = Command::new(COWSHED)
        .args(["qemu-nbd", "-k", "n.sock", "-B", "nothing", "disk.qcow2"])
        .current_dir(oracle.work())
        .output()
        .expect("our own binary runs");
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && message.contains("Bitmap 'nothing' is not found"), "{message}");
}

#[test]
fn qemu_nbd_serves_an_internal_snapshot_for_reading() {
    let oracle = Oracle::new();
    oracle.make("create -q -f qcow2 disk.qcow2 8M");
    let image = oracle.work().join("disk.qcow2");
    oracle.qemu.io_commands(&image, "qcow2", &["write -P 5 0 1M".into()]);
    oracle.make("snapshot -c before disk.qcow2");
    oracle.qemu.io_commands(&image, "qcow2", &["write -P 6 0 1M".into()]);
    let arguments = ["qemu-nbd", "-k", "n.sock", "-l", "snapshot.name=before", "-f", "qcow2", "disk.qcow2"];
    let serving = Serving::start(oracle.work(), &arguments);
    let socket = oracle.work().join("n.sock");
    await_socket(&socket);
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    oracle.qemu.io(["-r", "-f", "raw", "-c", "read -P 5 0 1M", "-c", "read -P 0 1M 7M", &uri]).expect_ok();
    assert!(serving.wait().success());
}

#[test]
fn a_drive_has_limits_and_intervals_from_its_options() {
    let oracle = Oracle::new();
    oracle.make("create -q -f qcow2 a.qcow2 8M");
    let drive = "file=a.qcow2,id=a,throttling.iops-total=100,throttling.iops-total-max=2000,\
                 throttling.iops-total-max-length=60,throttling.group=foo,l2-cache-size=4194304,stats-intervals.0=30";
    let mut serving =
        Serving::start(oracle.work(), &["serve", "-k", "n.sock", "--monitor", "m.sock", "--drive", drive]);
    let uri = serving.line();
    assert_eq!(serving.line(), "QMP: unix:m.sock");
    let socket = oracle.work().join("n.sock");
    let uri = uri.replace("n.sock", &socket.display().to_string());
    oracle.qemu.io(["-f", "raw", "-c", "write -P 9 1M 2M", "-c", "read -P 9 1M 2M", &uri]).expect_ok();
    let mut monitor = UnixStream::connect(oracle.work().join("m.sock")).expect("it listens");
    monitor
        .write_all(b"{'execute': 'qmp_capabilities'} {'execute': 'query-blockstats'} {'execute': 'quit'}")
        .expect("it reads");
    let said: String = BufReader::new(monitor).lines().map(|line| line.expect("text") + "\n").collect();
    for expected in ["\"group\": \"foo\"", "\"interval_length\": 30", "\"wr_bytes\": 2097152"] {
        assert!(said.contains(expected), "{expected}: {said}");
    }
    assert!(serving.wait().success());
}

#[test]
fn qemu_storage_daemon_goes_into_the_background() {
    let oracle = Oracle::new();
    oracle.make("create -q -f qcow2 disk.qcow2 8M");
    let arguments = [
        "qemu-storage-daemon",
        "--daemonize",
        "--pidfile",
        "pid",
        "--blockdev",
        "file,node-name=f,filename=disk.qcow2",
        "--blockdev",
        "qcow2,node-name=q,file=f",
        "--nbd-server",
        "addr.type=unix,addr.path=n.sock",
        "--export",
        "nbd,id=e,node-name=q,writable=on",
        "--chardev",
        "socket,id=m,path=m.sock,server=on,wait=off",
        "--monitor",
        "m",
    ];
    let output =
        Command::new(COWSHED).args(arguments).current_dir(oracle.work()).output().expect("our own binary runs");
    assert!(output.status.success(), "{output:?}");
    // Once the first process has ended everything is there.
    let pid = std::fs::read_to_string(oracle.work().join("pid")).expect("a number");
    let uri = format!("nbd+unix:///q?socket={}", oracle.work().join("n.sock").display());
    oracle.qemu.io(["-f", "raw", "-c", "write -P 6 0 1M", &uri]).expect_ok();
    let status = Command::new("kill").arg(pid.trim()).status().expect("kill runs");
    assert!(status.success(), "{pid}");
    while oracle.work().join("pid").exists() {
        std::thread::yield_now();
    }
    assert!(!oracle.work().join("n.sock").exists() && !oracle.work().join("m.sock").exists());
    oracle.qemu.io_commands(&oracle.work().join("disk.qcow2"), "qcow2", &["read -P 6 0 1M".into()]);
}

#[test]
fn what_cannot_start_says_why_and_leaves_nothing() {
    let oracle = Oracle::new();
    oracle.make("create -q -f qcow2 disk.qcow2 8M");
    std::fs::write(oracle.work().join("m"), b"").expect("a mount point");
    // Clients of a file's export rely on its length, which the format above changes.
    let file = ["qemu-storage-daemon", "--blockdev", "file,node-name=f,filename=disk.qcow2"];
    let format = ["--blockdev", "qcow2,node-name=q,file=f"];
    let server = ["--nbd-server", "addr.type=unix,addr.path=n.sock", "--export", "nbd,id=e,node-name=f"];
    let mistakes: [(&[&str], &str); 18] = [
        (&[&file[..], &format, &server].concat(), "permissions 'resize' are both required by node 'q'"),
        (&["serve"], "Expecting an image file name"),
        (&["serve", "-k", "n.sock", "nothing.qcow2"], "nothing.qcow2"),
        (&["serve", "-k", "n.sock", "--queues", "0", "disk.qcow2"], "--queues is 0, and a daemon has 1 to 64 threads"),
        (
            &["serve", "-k", "n.sock", "--queues", "65", "disk.qcow2"],
            "--queues is 65, and a daemon has 1 to 64 threads",
        ),
        (&["mount", "--queues", "99999", "disk.qcow2", "m"], "--queues is 99999, and a daemon has 1 to 64"),
        (&["serve", "-k", "n.sock", "--cache", "fast", "disk.qcow2"], "'fast'"),
        (&["serve", "-k", "n.sock", "--monitor", "foo:bar", "disk.qcow2"], "foo:bar"),
        (&["serve", "-k", "n.sock", "--drive", "file=disk.qcow2,iops=5,iops_rd=1"], "at the same time"),
        (&["serve", "-k", "n.sock", "--drive", "file=disk.qcow2,throttling.group=none"], "'none' does not exist"),
        (&["qemu-nbd", "-k", "n.sock", "-c", "/dev/nosuch", "disk.qcow2"], "Failed to open /dev/nosuch"),
        (&["qemu-nbd", "-k", "n.sock", "--selinux-label", "x", "disk.qcow2"], "--selinux-label"),
        (
            &["qemu-nbd", "-k", "n.sock", "--tls-authz", "x", "disk.qcow2"],
            "--tls-authz is not permitted without --tls-creds",
        ),
        (&["qemu-nbd", "-k", "n.sock", "-l", "none", "disk.qcow2"], "Can't find snapshot"),
        (&["qemu-storage-daemon", "--object", "tls-creds-psk,id=t"], "no pre-shared keys"),
        (&["serve", "-k", "n.sock", "--object", "thing", "disk.qcow2"], "'thing': one of authz-list, authz-listfile, "),
        (&["qemu-storage-daemon", "--nbd-server", "unix,addr.path=n.sock", "--export", "nbd,id=e,node-name=z"], "'z'"),
        (&["qemu-storage-daemon", "--daemonize", "--blockdev", "qcow2,node-name=q,file=nothing"], "nothing"),
    ];
    for (arguments, reason) in mistakes {
        let output = Command::new(COWSHED).args(arguments).current_dir(oracle.work()).output();
        let output = output.expect("our own binary runs");
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {message}");
        assert!(message.contains(reason), "{arguments:?}: {message}");
        assert!(!oracle.work().join("n.sock").exists(), "{arguments:?}");
    }
}

#[test]
fn top_and_metrics_show_a_daemon() {
    let oracle = Oracle::new();
    oracle.make("create -q -f qcow2 a.qcow2 1M");
    let arguments = ["serve", "-k", "n.sock", "--monitor", "m.sock", "--metrics", "127.0.0.1:0", "a.qcow2"];
    let mut serving = Serving::start(oracle.work(), &arguments);
    let lines = [serving.line(), serving.line(), serving.line()];
    assert!(lines[2].starts_with("metrics: http://127.0.0.1:"), "{lines:?}");
    let top = |socket: &str| {
        let arguments = ["top", "--interval", "0.01", "--count", "2", socket];
        Command::new(COWSHED).args(arguments).current_dir(oracle.work()).output().expect("our own binary runs")
    };
    let output = top("m.sock");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(text.lines().filter(|line| line.starts_with("a ")).count(), 2, "{text}");
    // Under a load that a limit holds back, the columns show it: operations, requests in flight, waits, hits of the
    // mapping.
    let uri = format!("nbd+unix:///?socket={}", oracle.work().join("n.sock").display());
    let mut reads = Command::new("qemu-io");
    reads.args(["-f", "raw", "-c", "write 0 1M"]).args(["-c", "aio_read 0 4k"].repeat(3000)).arg(&uri);
    let limits = r#"{"execute":"qmp_capabilities"}{"execute":"block_set_io_throttle","arguments":{"id":"a","iops":500,
        "iops_rd":0,"iops_wr":0,"bps":0,"bps_rd":0,"bps_wr":0}}"#;
    let mut monitor = UnixStream::connect(oracle.work().join("m.sock")).expect("a monitor");
    monitor.write_all(limits.as_bytes()).expect("it reads");
    let mut load = reads.stdout(Stdio::null()).spawn().expect("qemu-io runs");
    let mut seen = [0.0f64; 4];
    let arguments = ["top", "--interval", "0.2", "--count", "12", "m.sock"];
    let output =
        Command::new(COWSHED).args(arguments).current_dir(oracle.work()).output().expect("our own binary runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    for line in text.lines().filter(|line| line.starts_with("a ")) {
        let cells: Vec<&str> = line.split_whitespace().collect();
        let [_, _, reads, .., in_flight, waits, hits] = cells[..] else { panic!("{line}") };
        for (most, cell) in seen.iter_mut().zip([reads, in_flight, waits, hits]) {
            *most = most.max(cell.parse().unwrap_or(0.0));
        }
    }
    assert!(seen.iter().all(|most| *most > 0.0), "{seen:?}: {text}");
    load.kill().expect("qemu-io is stopped");
    load.wait().expect("it ends");
    drop(monitor);
    let output = top("nothing.sock");
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("nothing.sock: could not connect"), "{output:?}");
    serving.signal("INT");
    assert!(serving.wait().success());
}

/// The bytes of a mark on one connection, all under way at once, and zero writes and discards that complete one.
#[test]
fn a_disk_of_a_guessed_format_stays_raw_under_its_client() {
    const ROUNDS: usize = 50;
    let oracle = Oracle::new();
    let (disk, socket) = (oracle.work().join("disk"), oracle.work().join("n.sock"));
    std::fs::write(&disk, vec![1; 1 << 20]).expect("a disk");
    let socket = socket.to_str().expect("a text path");
    let serving = ["qemu-nbd", "-t", "--discard=unmap", "-k", socket, "disk"];
    let serving = Serving::start(oracle.work(), &serving);
    await_socket(Path::new(socket));
    let mut commands = Vec::new();
    for _ in 0..ROUNDS {
        commands.extend(["write -q -P 1 0 16", "aio_write -P 0x51 0 1", "aio_write -P 0x46 1 1"]);
        commands.extend(["aio_write -P 0x49 2 1", "aio_write -P 0xfb 3 1", "aio_flush"]);
    }
    commands.extend(["write -q -P 1 0 16", "write -q -P 0x51 0 1", "write -q -P 0x45 1 1", "write -q -P 0x44 2 1"]);
    commands.extend(["write -z 3 1", "discard 3 1", "write -z 3 512", "write -z -u 3 1"]);
    let uri = format!("nbd+unix:///?socket={socket}");
    let asked = |tool: &mut Command, name: &str, commands: &[&str]| {
        let commands = commands.iter().flat_map(|command| ["-c", command]);
        let said = tool.args(commands).arg(name).current_dir(oracle.work()).output().expect("qemu-io runs");
        [said.stdout, said.stderr].map(|text| String::from_utf8(text).expect("text")).concat()
    };
    let said = asked(Command::new("qemu-io").args(["-f", "raw", "-d", "unmap"]), &uri, &commands);
    let refused = |word: &str| said.matches(&format!("{word} failed: Operation not permitted")).count();
    // One byte of each round, the last one.
    assert_eq!(refused("aio_write"), ROUNDS, "{said}");
    assert_eq!((said.matches("failed").count(), refused("discard")), (ROUNDS + 4, 1), "{said}");
    drop(serving);
    assert_eq!(std::fs::read(&disk).expect("the disk")[..4], *b"QED\x01");
    let said = asked(Command::new(COWSHED).args(["qemu-io"]), "disk", &["write -z 3 1", "write -q -z 0 1"]);
    assert!(said.contains("write failed: Operation not permitted"), "{said}");
    assert_eq!(std::fs::read(&disk).expect("the disk")[..4], *b"\0ED\x01");
}
