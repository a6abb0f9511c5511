// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Signals that end programs while an opening hangs, programs in the background, and what helpers keep of a killed one.

use super::fuse::{QCOW2, export, is_mounted, qcow2};
use super::process::{COWSHED, Killed, Monitor, Serving, text};
use cowshed_testkit::programs::tool;
use cowshed_testkit::qemu::temp_dir;
use cowshed_testkit::waiting::await_that;
use serde_json::json;
use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

/// The signals of a process that a line of its status has.
fn signals(process: &str, line: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let set = status.lines().find_map(|text| text.strip_prefix(line)).map_or("0", str::trim);
    u64::from_str_radix(set, 16).expect("a set")
}

/// The open waits in the kernel, where a handler of this thread does nothing.
#[test]
fn conversion_of_a_file_of_a_stopped_server_is_interrupted() {
    let folder = temp_dir();
    let folder = folder.path();
    qcow2(folder);
    let (daemon, mut monitor) = super::fuse::start(folder, QCOW2);
    monitor.command("block-export-add", export(folder, "m", json!({})));
    daemon.signal("STOP");
    for (name, program, signal, code) in
        [("TERM", "cowshed", 15, 143), ("INT", "cowshed", 2, 130), ("HUP", "qemu-img", 1, 129)]
    {
        let mut command = Command::new("env");
        command.args(["--default-signal=INT,TERM,HUP", "bash", "-c", "exec -a \"$0\" \"$@\"", program, COWSHED]);
        command.args(["convert", "-f", "raw", "-O", "qcow2", "m", "copy"]).current_dir(folder);
        let mut child = Killed(command.stderr(Stdio::piped()).spawn().expect("our own binary runs"));
        let process = child.0.id().to_string();
        await_that("it takes signals", || signals(&process, "SigCgt:") & (1 << (signal - 1)) != 0);
        await_that("it waits for the server", || {
            std::fs::read_to_string(format!("/proc/{process}/wchan")).is_ok_and(|place| place.contains("request_wait"))
        });
        tool("kill", &[&format!("-{name}"), &process]);
        await_that("its end", || child.0.try_wait().expect("a child").is_some());
        let said = std::io::read_to_string(child.0.stderr.take().expect("a pipe")).expect("text");
        assert_eq!(child.0.wait().expect("a status").code(), Some(code), "{said}");
        assert_eq!(said, format!("{program}: interrupted; nothing was made\n"));
        assert!(!folder.join("copy").exists());
    }
    daemon.signal("CONT");
    daemon.stop();
}

/// The control thread waits for the file, and all monitors for that thread.
#[test]
fn daemon_whose_opening_hangs_ends_within_its_limit() {
    let folders = [temp_dir(), temp_dir()];
    let [folder, other] = [0, 1].map(|number: usize| folders[number].path());
    qcow2(folder);
    let (server, mut monitor) = super::fuse::start(folder, QCOW2);
    monitor.command("block-export-add", export(folder, "m", json!({})));
    let arguments =
        ["--chardev", "socket,path=m.sock,server=on,wait=off,id=m", "--monitor", "chardev=m", "--stop-timeout", "1"];
    let mut daemon = Serving::start(other, &[&["qemu-storage-daemon"], &arguments[..]].concat());
    let socket = other.join("m.sock");
    await_that("the monitor", || std::os::unix::net::UnixStream::connect(&socket).is_ok());
    let mut monitor = Monitor::connect(&socket);
    server.signal("STOP");
    monitor.send("blockdev-add", &json!({"driver": "file", "node-name": "f", "filename": folder.join("m")}));
    let process = daemon.child().id().to_string();
    await_that("it waits for the server", || {
        std::fs::read_to_string(format!("/proc/{process}/wchan")).is_ok_and(|place| place.contains("request_wait"))
    });
    daemon.signal("TERM");
    daemon.await_log("could not stop in order");
    assert_eq!(daemon.wait().code(), Some(1));
    server.signal("CONT");
    server.stop();
}

/// A shell that ignores signals of a terminal, or leaves none, doesn't keep a program in the background from its end.
#[test]
fn programs_in_the_background_end_at_each_signal() {
    let folder = temp_dir();
    let folder = folder.path();
    File::create(folder.join("d.raw")).and_then(|file| file.set_len(1 << 20)).expect("an image");
    File::create(folder.join("m")).expect("a mount point");
    let at = |name: &str| text(&folder.join(name)).to_owned();
    let nbd = ["--fork", "--pid-file", &at("pid"), "-t", "-f", "raw", "-k", &at("n.sock"), "d.raw"];
    let node = ["--blockdev", "file,node-name=f,filename=d.raw", "--export", "nbd,id=e,node-name=f"];
    let storage = ["--daemonize", "--pidfile", &at("pid"), "--nbd-server", "addr.type=unix,addr.path=n.sock"];
    let serve = ["serve", "--daemonize", "--pidfile", "pid", "-f", "raw", "-k", "n.sock", "d.raw"];
    let mount = ["mount", "--pidfile", "pid", "-f", "raw", "d.raw", "m"];
    for (program, arguments) in [
        ("qemu-nbd", nbd.to_vec()),
        ("qemu-storage-daemon", [&storage[..], &node].concat()),
        ("cowshed", serve.to_vec()),
        ("cowshed", mount.to_vec()),
    ] {
        for name in ["TERM", "INT", "HUP"] {
            let mut command = Command::new(COWSHED);
            command.arg0(program).args(&arguments).current_dir(folder).stdout(Stdio::null());
            assert!(command.status().expect("our own binary runs").success(), "{program}");
            let pid = std::fs::read_to_string(folder.join("pid")).expect("a number").trim().to_owned();
            tool("kill", &[&format!("-{name}"), &pid]);
            // The process that adopts it may look after it late.
            await_that("its end", || {
                let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
                state.is_empty() || state.contains(") Z ")
            });
            assert!(["n.sock", "pid"].iter().all(|left| !folder.join(left).exists()), "{program} {name}");
        }
        assert!(!is_mounted(&folder.join("m")));
    }
}

/// The guard of a mount outlives its server, and must keep nothing of what that had.
#[test]
fn guard_of_a_killed_server_holds_no_descriptor() {
    let folder = temp_dir();
    let folder = folder.path();
    qcow2(folder);
    File::create(folder.join("m")).expect("a mount point");
    let free = std::net::TcpListener::bind("127.0.0.1:0").and_then(|port| port.local_addr()).expect("a port");
    let nodes = [
        "--nbd-server",
        &format!("addr.type=inet,addr.host=127.0.0.1,addr.port={}", free.port()),
        "--blockdev",
        "qcow2,node-name=d,file.driver=file,file.filename=d.qcow2",
        "--export",
        "nbd,id=e,node-name=d,writable=on",
        "--export",
        "fuse,id=m,node-name=d,mountpoint=m,writable=on",
    ];
    // A script that holds a lock as long as its program runs, by a descriptor that the program doesn't know.
    let script = "exec 9>held; flock -n 9 || exit 9; exec \"$0\" qemu-storage-daemon \"$@\"";
    let mut command = Command::new("bash");
    command.args(["-c", script, COWSHED]).args(nodes);
    let mut daemon = Serving::start_command(folder, command);
    await_that("the mount", || is_mounted(&folder.join("m")));
    let guard = tool("pgrep", &["-P", &daemon.child().id().to_string()]);
    let guard = guard.trim();
    tool("kill", &["-STOP", guard]);
    // The socket of its orders, and its own.
    let open = descriptors(guard);
    let is_own = |target: &String| target == "/dev/null" || target.starts_with("anon_inode:");
    assert!(open.iter().filter(|target| !is_own(target)).count() == 1, "{open:?}");
    daemon.signal("KILL");
    let _ = daemon.wait();
    // The kernel takes the rings of a killed process down after its end, and with them what their requests hold.
    await_that("a free port", || std::net::TcpListener::bind(free).is_ok());
    tool("flock", &["-n", text(&folder.join("held")), "true"]);
    let image = folder.join("d.qcow2");
    await_that("a write", || {
        let written = Command::new("qemu-io").args(["-c", "write 0 64k", text(&image)]).output();
        written.expect("qemu-io runs").status.success()
    });
    // It may be gone: the kernel lets a stopped process go on whose parent has died.
    let _ = Command::new("kill").args(["-CONT", guard]).output();
    await_that("the guard unmounts", || !is_mounted(&folder.join("m")));
}

/// The names of what a process has open.
fn descriptors(process: &str) -> Vec<String> {
    let list = std::fs::read_dir(Path::new("/proc").join(process).join("fd")).expect("its descriptors");
    let links = list.map(|entry| std::fs::read_link(entry.expect("a descriptor").path()).expect("a link"));
    links.map(|target| text(&target).to_owned()).collect()
}
