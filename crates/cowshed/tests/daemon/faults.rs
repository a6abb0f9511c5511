// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Faults of a `fault` node, as QEMU's client meets them over NBD, vhost-user-blk and FUSE, and over QMP while it runs.

use super::process::{COWSHED, Killed, Monitor, Serving, text};
use cowshed_testkit::programs::run_to_code;
use cowshed_testkit::qemu::{peers_dir, temp_dir};
use cowshed_testkit::waiting::await_that;
use serde_json::{Value, json};
use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

/// A storage daemon with a disk of 16 MiB, full of 3, behind the `fault` node `f`, and exports of it.
pub(super) fn start(folder: &Path, more: &str) -> (Serving, Monitor) {
    std::fs::write(folder.join("d.raw"), vec![3; 16 << 20]).expect("an image");
    File::create(folder.join("m")).expect("a mount point");
    let mut command = Command::new(COWSHED);
    command.arg0("qemu-storage-daemon").args(["--chardev", "socket,path=m.sock,server=on,wait=off,id=m"]);
    command.args(["--monitor", "chardev=m", "--nbd-server", "addr.type=unix,addr.path=n.sock"]);
    command.args(["--chardev", "socket,path=o.sock,server=on,wait=off,id=o", "--monitor", "chardev=o"]);
    command.args(["--blockdev", "raw,node-name=d,discard=unmap,file.driver=file,file.filename=d.raw"]);
    command.args(["--blockdev", &format!("fault,node-name=f,discard=unmap,file=d{more}")]);
    command.args(["--export", "nbd,id=n,node-name=f,name=f,writable=on"]);
    command.args(["--export", "vhost-user-blk,id=v,node-name=f,addr.type=unix,addr.path=v.sock,writable=on"]);
    command.args(["--export", "fuse,id=m,node-name=f,mountpoint=m,writable=on", "--stop-timeout", "3"]);
    let mut daemon = Serving::start_command(folder, command);
    let path = folder.join("m.sock");
    await_that("the monitor", || {
        assert!(daemon.child().try_wait().expect("a child").is_none(), "the daemon has ended: {}", daemon.log());
        std::os::unix::net::UnixStream::connect(&path).is_ok()
    });
    let mut monitor = Monitor::connect(&path);
    let exports = monitor.command("query-block-exports", json!({}));
    assert_eq!(exports.as_array().map(Vec::len), Some(3), "{}", daemon.log());
    (daemon, monitor)
}

/// A program of QEMU's, and the arguments by which it finds the disk.
pub(super) struct Client {
    program: String,
    arguments: Vec<String>,
}

impl Client {
    /// Over each of the exports.
    pub(super) fn all(folder: &Path) -> [Client; 3] {
        let at = |name: &str| text(&folder.join(name)).to_owned();
        let nbd = format!("nbd+unix:///f?socket={}", at("n.sock"));
        let vhost = format!("driver=virtio-blk-vhost-user,path={},cache.direct=on", at("v.sock"));
        let client = |program: &str, arguments: &[&str]| Client {
            program: program.to_owned(),
            arguments: arguments.iter().map(|argument| (*argument).to_owned()).collect(),
        };
        [
            client("qemu-io", &["-f", "raw", &nbd]),
            client(text(&peers_dir().join("qemu-io-vhost")), &["--image-opts", &vhost]),
            client("qemu-io", &["-f", "raw", &at("m")]),
        ]
    }

    fn arguments<'a>(&'a self, commands: &[&'a str]) -> Vec<&'a str> {
        let commands = commands.iter().flat_map(|command| ["-c", *command]);
        commands.chain(self.arguments.iter().map(String::as_str)).collect()
    }

    #[track_caller]
    pub(super) fn works(&self, commands: &[&str]) {
        let said = run_to_code(&self.program, &self.arguments(commands), &[0]);
        assert!(!said.contains("fail"), "{:?}: {commands:?}: {said}", self.arguments);
    }

    #[track_caller]
    pub(super) fn fails(&self, command: &str, words: &str) {
        let said = run_to_code(&self.program, &self.arguments(&[command]), &[1]);
        assert!(said.contains(words), "{:?}: {command}: {said}", self.arguments);
    }
}

pub(super) fn arm(monitor: &mut Monitor, rule: Value) -> u64 {
    let armed = monitor.command("x-fault-arm", json!({"node-name": "f", "rule": rule}));
    armed["id"].as_u64().expect("a number")
}

pub(super) fn disarm(monitor: &mut Monitor) {
    monitor.command("x-fault-disarm", json!({"node-name": "f"}));
}

#[test]
fn faults_of_a_node_reach_the_clients_of_each_export() {
    let folder = temp_dir();
    let folder = folder.path();
    let (daemon, mut monitor) = start(folder, "");
    for client in Client::all(folder) {
        let monitor = &mut monitor;
        client.works(&["write -P 3 0 16M"]);
        // Errors: of some bytes, of some kind, some times.
        arm(monitor, json!({"op": "read", "errno": 5, "offset": 65536, "len": 4096}));
        client.fails("read 64k 4k", "Input/output error");
        client.works(&["read -P 3 0 64k", "read -P 3 68k 64k", "write -P 3 64k 4k"]);
        disarm(monitor);
        client.works(&["read -P 3 64k 4k"]);
        arm(monitor, json!({"op": "write", "errno": 28}));
        // The protocol of a virtio disk has one error for all.
        let is_virtio = client.arguments[0] == "--image-opts";
        client.fails("write 0 4k", if is_virtio { "write failed" } else { "No space left on device" });
        disarm(monitor);
        // Lost, stuck, astray, torn.
        arm(monitor, json!({"op": "write", "action": "lose"}));
        client.works(&["write -P 5 0 4k", "read -P 3 0 4k"]);
        disarm(monitor);
        arm(monitor, json!({"op": "write", "action": "stuck", "offset": 1 << 20, "len": 512}));
        let around = ["read -P 6 1048064 512", "read -P 3 1M 512", "read -P 6 1049088 512"];
        client.works(&["write -P 6 1048064 1536", around[0], around[1], around[2]]);
        disarm(monitor);
        arm(monitor, json!({"op": "write", "action": "misdirect", "distance": 1 << 20}));
        client.works(&["write -P 7 2M 4k", "read -P 3 2M 4k", "read -P 7 3M 4k"]);
        disarm(monitor);
        arm(monitor, json!({"op": "write", "action": "torn", "bytes": 512, "offset": 4 << 20, "len": 4096}));
        client.fails("write -P 8 4M 4k", "Input/output error");
        client.works(&["read -P 8 4M 512", "read -P 3 4194816 3584"]);
        disarm(monitor);
        // A part moves, and the whole is reported.
        arm(monitor, json!({"op": "write", "action": "short", "bytes": 1024, "offset": 4 << 20, "len": 4096}));
        client.works(&["write -P 9 4M 4k", "read -P 9 4M 1k", "read -P 3 4195328 3k"]);
        disarm(monitor);
        arm(monitor, json!({"op": "read", "action": "short", "offset": 7 << 20, "len": 4096}));
        client.works(&["read -P 3 -s 0 -l 2k 7M 4k", "read -P 0 -s 2k -l 2k 7M 4k"]);
        disarm(monitor);
        // The noise is in the read bytes, not on the disk.
        arm(monitor, json!({"op": "read", "action": "corrupt", "offset": 5 << 20}));
        client.fails("read -P 3 5M 512", "Pattern verification failed");
        disarm(monitor);
        client.works(&["read -P 3 5M 512"]);
        // A device that goes, and comes back.
        arm(monitor, json!({"op": "any", "errno": 19}));
        client.fails("read 0 4k", "read failed");
        client.fails("write 0 4k", "write failed");
        disarm(monitor);
        client.works(&["write -P 3 0 4k", "read -P 3 0 4k"]);
        hangs(&client, monitor);
    }
    daemon.stop();
}

/// A device that stops answering answers again when the rule goes.
fn hangs(client: &Client, monitor: &mut Monitor) {
    let rule = json!({"op": "read", "action": "hang", "offset": 6 << 20, "len": 4096, "times": 1});
    let id = arm(monitor, rule);
    let commands = client.arguments(&["read -P 3 6M 4k"]);
    let mut child = Command::new(&client.program).args(commands).stdout(Stdio::null()).spawn().expect("it runs");
    let mut hits = || {
        let faults = monitor.command("x-query-faults", json!({"node-name": "f"}));
        assert_eq!((&faults["rules"][0]["id"], &faults["rules"][0]["rule"]["action"]), (&json!(id), &json!("hang")));
        faults["rules"][0]["hits"] == 1
    };
    await_that("the request", &mut hits);
    assert!(child.try_wait().expect("a child").is_none(), "it waits for an answer");
    assert!(hits(), "one is enough");
    monitor.command("x-fault-disarm", json!({"node-name": "f", "id": id}));
    assert!(child.wait().expect("it ends").success());
}

/// Its request goes on, and keeps the clients of other exports no time. Memory of a guest that has gone is still in use by it, so
/// a new front end waits for its end.
#[test]
fn client_that_leaves_a_hung_request_holds_no_other() {
    let folder = temp_dir();
    let folder = folder.path();
    let (mut daemon, mut monitor) = start(folder, ",seed=1");
    let clients = Client::all(folder);
    let [nbd, vhost, _] = &clients;
    for client in [nbd, vhost] {
        let rule = json!({"op": "read", "action": "hang", "offset": 6 << 20, "len": 4096, "times": 1});
        let id = arm(&mut monitor, rule);
        let commands = client.arguments(&["read -P 3 6M 4k"]);
        let child = Command::new(&client.program).args(commands).stdout(Stdio::null()).spawn().expect("it runs");
        let child = Killed(child);
        await_that("the request", || {
            monitor.command("x-query-faults", json!({"node-name": "f"}))["rules"][0]["hits"] == 1
        });
        drop(child);
        nbd.works(&["write -P 5 0 4k", "read -P 5 0 4k"]);
        let exports = monitor.command("query-block-exports", json!({}));
        assert_eq!(exports.as_array().map(Vec::len), Some(3));
        monitor.command("x-fault-disarm", json!({"node-name": "f", "id": id}));
        vhost.works(&["read -P 5 0 4k", "read -P 3 6M 4k"]);
    }
    // The daemon ends, too, while each export has a request.
    arm(&mut monitor, json!({"op": "read", "action": "hang"}));
    let children: Vec<Killed> = clients
        .iter()
        .map(|client| {
            let commands = client.arguments(&["read 6M 4k"]);
            let child =
                Command::new(&client.program).args(commands).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
            Killed(child.expect("it runs"))
        })
        .collect();
    await_that("the requests", || {
        monitor.command("x-query-faults", json!({"node-name": "f"}))["rules"][0]["hits"] == 3
    });
    monitor.send("quit", &json!({}));
    await_that("the end of the daemon", || daemon.child().try_wait().expect("a child").is_some());
    // QEMU's client of vhost-user-blk waits for another back end.
    for (mut child, _) in children.into_iter().zip(&clients).filter(|(_, client)| client.arguments[0] != "--image-opts")
    {
        await_that("the end of a client", || child.0.try_wait().expect("a child").is_some());
    }
    assert_eq!(std::fs::read(folder.join("m")).expect("the mount point"), b"");
    assert!(daemon.log().contains("could not stop in order"), "{}", daemon.log());
}

/// A change of the size waits for the requests of the disk, and its monitor with it. Another monitor lets them go.
#[test]
fn requests_that_wait_go_on_while_a_command_waits_for_them() {
    let folder = temp_dir();
    let folder = folder.path();
    let (daemon, mut monitor) = start(folder, "");
    let mut other = Monitor::connect(&folder.join("o.sock"));
    let [nbd, ..] = Client::all(folder);
    let day = 86_400_000;
    let rules = [
        json!({"op": "read", "action": "hang"}),
        json!({"op": "read", "action": "delay", "delay-ms": day}),
        json!({"op": "read", "errno": 5, "delay-ms": day, "times": 1}),
    ];
    for (rule, count) in rules.into_iter().zip(1u64..) {
        let fails = rule.get("errno").is_some();
        arm(&mut monitor, rule);
        let commands = nbd.arguments(&["read 6M 4k"]);
        let mut child = Command::new(&nbd.program).args(commands).stdout(Stdio::null()).spawn().expect("it runs");
        let mut faults = || other.command("x-query-faults", json!({"node-name": "f"}));
        await_that("the request", || faults()["hits"].as_u64() == Some(count));
        monitor.send("block_resize", &json!({"node-name": "f", "size": (16 + count) << 20}));
        assert!(child.try_wait().expect("a child").is_none(), "it waits for an answer");
        disarm(&mut other);
        assert_eq!(child.wait().expect("it ends").success(), !fails);
        assert_eq!(monitor.answer()["return"], json!({}));
    }
    daemon.stop();
}

/// A sync would wait for the disk.
#[test]
fn a_file_whose_disk_hangs_is_unmounted_lazily() {
    let folder = temp_dir();
    let folder = folder.path();
    let (daemon, mut monitor) = start(folder, "");
    arm(&mut monitor, json!({"op": "any", "action": "hang"}));
    let file = format!("of={}", text(&folder.join("m")));
    let mut writer = Command::new("dd")
        .args(["if=/dev/zero", &file, "bs=4k", "count=1", "conv=notrunc", "status=none"])
        .spawn()
        .expect("dd runs");
    await_that("the request", || monitor.command("x-query-faults", json!({"node-name": "f"}))["hits"] == 1);
    let mut unmount =
        Command::new(COWSHED).args(["umount", "--lazy", text(&folder.join("m"))]).spawn().expect("it runs");
    await_that("the end of umount", || unmount.try_wait().expect("a child").is_some());
    assert!(unmount.wait().expect("it has ended").success());
    assert!(writer.try_wait().expect("a child").is_none(), "it waits for an answer");
    assert_eq!(std::fs::read(folder.join("m")).expect("the mount point"), b"");
    disarm(&mut monitor);
    assert!(writer.wait().expect("it ends").success());
    daemon.stop();
    assert_eq!(std::fs::read(folder.join("d.raw")).expect("the disk")[..4097], [vec![0; 4096], vec![3]].concat());
}

#[test]
fn mount_and_serve_make_disks_that_fail() {
    let folder = temp_dir();
    let folder = folder.path();
    let at = |name: &str| text(&folder.join(name)).to_owned();
    std::fs::write(folder.join("d.raw"), vec![3; 1 << 20]).expect("an image");
    std::fs::write(folder.join("s.json"), r#"[{"op": "read", "errno": 5, "offset": 65536, "len": 4096}]"#)
        .expect("rules");
    File::create(folder.join("m")).expect("a mount point");
    let faults = ["-f", "raw", "--fault", "op=write,errno=28,offset=128k,len=4k", "--fault", &at("s.json")];
    let check = |client: &Client| {
        client.works(&["read -P 3 0 64k", "write -P 3 0 4k"]);
        client.fails("read 64k 4k", "Input/output error");
        client.fails("write 128k 4k", "No space left on device");
    };
    let client = |name: String| Client {
        program: "qemu-io".to_owned(),
        arguments: ["-f", "raw", &name].map(str::to_owned).to_vec(),
    };
    run_to_code(COWSHED, &[&["mount", "-w"][..], &faults, &[&at("d.raw"), &at("m")]].concat(), &[0]);
    check(&client(at("m")));
    run_to_code(COWSHED, &["umount", &at("m")], &[0]);
    let mut command = Command::new(COWSHED);
    command.arg("serve").args(faults).args(["-k", "n.sock", "--monitor", "m.sock", "d.raw"]);
    let daemon = Serving::start_command(folder, command);
    await_that("the server", || std::os::unix::net::UnixStream::connect(folder.join("n.sock")).is_ok());
    check(&client(format!("nbd+unix:///?socket={}", at("n.sock"))));
    let mut monitor = Monitor::connect(&folder.join("m.sock"));
    assert_eq!(monitor.command("x-query-faults", json!({"node-name": "d"}))["hits"], 2);
    monitor.command("x-fault-disarm", json!({"node-name": "d"}));
    client(format!("nbd+unix:///?socket={}", at("n.sock"))).works(&["read -P 3 64k 4k", "write -P 3 128k 4k"]);
    daemon.stop();
    let said = run_to_code(COWSHED, &["serve", "--fault", "op=read", "--monitor", &at("m.sock")], &[1]);
    assert!(said.contains("--fault needs an image"), "{said}");
}

#[test]
fn umount_names_the_way_out_of_a_failing_disk() {
    let folder = temp_dir();
    let at = |name: &str| text(&folder.path().join(name)).to_owned();
    std::fs::write(at("d.raw"), vec![3; 1 << 20]).expect("an image");
    File::create(at("m")).expect("a mount point");
    run_to_code(COWSHED, &["mount", "-w", "-f", "raw", "--fault", "op=flush", &at("d.raw"), &at("m")], &[0]);
    let said = run_to_code(COWSHED, &["umount", &at("m")], &[1]);
    assert!(said.contains("could not sync it: Input/output error; --lazy unmounts it all the same"), "{said}");
    run_to_code(COWSHED, &["umount", "--lazy", &at("m")], &[0]);
    let said = run_to_code(COWSHED, &["umount", &at("m")], &[1]);
    assert!(said.contains("is not mounted"), "{said}");
    let said = run_to_code(COWSHED, &["mount", "--growable", &at("d.raw"), &at("m")], &[1]);
    assert!(said.contains("required arguments were not provided: --writable"), "{said}");
}

#[test]
fn rules_are_armed_changed_and_read_back() {
    let folder = temp_dir();
    let folder = folder.path();
    let (daemon, mut monitor) = start(folder, ",rules.0.op=flush,rules.0.once=on,rules.0.errno=28");
    let query = |monitor: &mut Monitor| monitor.command("x-query-faults", json!({"node-name": "f"}));
    let first = json!({"id": 1, "hits": 0, "rule": {"op": "flush", "action": "fail", "errno": 28, "times": 1}});
    assert_eq!(query(&mut monitor), json!({"hits": 0, "rules": [first]}));
    let id = arm(&mut monitor, json!({"op": "read", "action": "delay", "delay-ms": 1, "jitter-ms": 3}));
    let change = json!({"node-name": "f", "id": id, "rule": {"op": "read", "errno": 6, "offset": 1 << 20, "len": 512, "after": 1}});
    assert_eq!(monitor.command("x-fault-arm", change), json!({"id": id}));
    let [nbd, ..] = Client::all(folder);
    nbd.works(&["read 1M 512"]);
    nbd.fails("read 1M 512", "read failed");
    let faults = query(&mut monitor);
    let changed = json!({"op": "read", "action": "fail", "errno": 6, "offset": 1 << 20, "len": 512});
    let expected = json!({"id": id, "hits": 1, "rule": changed});
    // The client has flushed at its end: that rule is spent.
    assert_eq!(faults, json!({"hits": 2, "rules": [expected]}));
    let refused = |monitor: &mut Monitor, name: &str, arguments: Value| monitor.refusal(name, &arguments);
    for (arguments, words) in [
        (json!({"node-name": "d", "rule": {"op": "read"}}), "Node 'd' is no fault node"),
        (json!({"node-name": "x", "rule": {"op": "read"}}), "Failed to find node with node-name='x'"),
        (json!({"node-name": "f", "rule": {"op": "seek"}}), "seek"),
        (json!({"node-name": "f", "rule": {"op": "read", "errno": 0}}), "'errno' is a number from 1 to 4095"),
        (json!({"node-name": "f", "rule": {"op": "read", "probability-percent": 101}}), "from 1 to 100"),
        (json!({"node-name": "f", "rule": {"op": "read"}, "id": 99}), "There is no rule 99"),
        (json!({"node-name": "f", "rule": {"op": "write", "offset": 4096, "len": 0}}), "a range without bytes"),
        (
            json!({"node-name": "f", "rule": {"op": "read", "action": "delay", "delay-ms": u32::MAX}}),
            "a day (86400000)",
        ),
        (json!({"node-name": "f", "rule": {"op": "read", "action": "stuck"}}), "'stuck' is not for reads"),
        (
            json!({"node-name": "f", "rule": {"op": "flush", "action": "short"}}),
            "flushes and changes of the size have no place",
        ),
    ] {
        let said = refused(&mut monitor, "x-fault-arm", arguments);
        assert!(said.contains(words), "{words}: {said}");
    }
    // A monitor doesn't wait for the writer of a FIFO.
    run_to_code("mkfifo", &[text(&folder.join("fifo"))], &[0]);
    for (name, words) in [("missing", "No such file or directory"), ("fifo", "a scenario is a regular file")] {
        let path = folder.join(name);
        let node = json!({"driver": "fault", "node-name": "g", "file": "d", "scenario": path});
        let said = refused(&mut monitor, "blockdev-add", node);
        assert!(said.contains(text(&path)) && said.contains(words), "{said}");
    }
    let said = refused(&mut monitor, "x-fault-disarm", json!({"node-name": "f", "id": 99}));
    assert_eq!(said, "There is no rule 99");
    disarm(&mut monitor);
    assert_eq!(query(&mut monitor)["rules"], json!([]));
    daemon.stop();
}

/// The reads of 64 that fail by a scenario.
fn failures(folder: &Path, seed: u64) -> Vec<bool> {
    let commands: Vec<String> = (0..64).map(|index| format!("read {} 4k", index << 16)).collect();
    let options =
        format!("driver=fault,scenario={},seed={seed},file.driver=null-co,file.size=16M", text(&folder.join("s.json")));
    let mut arguments: Vec<&str> = vec!["--image-opts", &options];
    commands.iter().for_each(|command| arguments.extend(["-c", command]));
    let mut command = Command::new(COWSHED);
    let output = command.arg0("qemu-io").args(&arguments).output().expect("our own binary runs");
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    let failed = said.lines().filter(|line| line.starts_with("read")).map(|line| line.contains("failed"));
    failed.collect()
}

#[test]
fn a_scenario_with_one_seed_is_one_run() {
    let folder = temp_dir();
    let folder = folder.path();
    let scenario = r#"[{"op": "read", "probability-percent": 30}, {"op": "read", "action": "delay", "delay-ms": 1, "jitter-ms": 1},
        {"op": "any", "errno": 19, "start-ms": 3600000}]"#;
    std::fs::write(folder.join("s.json"), scenario).expect("a scenario");
    let run_with = |seed| failures(folder, seed);
    let first = run_with(7);
    assert_eq!(first.len(), 64);
    assert!(first.contains(&true) && first.contains(&false), "{first:?}");
    assert_eq!(first, run_with(7));
    assert_ne!(first, run_with(8));
    // No image names a file that is read as rules.
    let named = json!({"driver": "fault", "scenario": folder.join("s.json"), "file": {"driver": "null-co"}});
    let (image, backing) = (folder.join("i.qcow2"), format!("json:{named}"));
    run_to_code(
        "qemu-img",
        &["create", "-q", "-u", "-f", "qcow2", "-b", &backing, "-F", "raw", text(&image), "1M"],
        &[0],
    );
    let said = run_to_code(COWSHED, &["compare", text(&image), text(&image)], &[1, 2]);
    assert!(said.contains("the image names rules by"), "{said}");
    for (text_of_it, words) in [
        ("{", "a scenario is a list of rules in JSON"),
        (r#"[{"op": "seek"}]"#, "rules.0.op"),
        (r#"[{"op": "read", "colour": 1}]"#, "s.json: unknown option 'rules.0.colour'"),
        (
            r#"[{"op": "read"}, {"op": "write", "action": "corrupt"}]"#,
            "rule 1 has no effect: 'action': 'corrupt' is for reads",
        ),
        // Each rule has the number of its own list.
        (r#"[{"op": "read"}, {"op": "write"}]"#, "unknown option 'rules.0.bogus'"),
    ] {
        std::fs::write(folder.join("s.json"), text_of_it).expect("a scenario");
        let path = text(&folder.join("s.json")).to_owned();
        let options =
            format!("driver=fault,scenario={path},file.driver=null-co,file.size=1M,rules.0.op=read,rules.0.bogus=1");
        let said = run_to_code(COWSHED, &["info", "--image-opts", &options], &[1]);
        assert!(said.contains(words) && said.lines().count() == 1, "{words}: {said}");
    }
}
