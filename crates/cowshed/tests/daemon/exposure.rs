// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The warning about writable exports that the network reaches without TLS.

use super::process::{COWSHED, Monitor, Serving};
use cowshed_testkit::credentials::make_credentials;
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_testkit::waiting::await_that;
use serde_json::json;
use std::path::Path;
use std::process::Command;

const WORDS: &str = "writable without TLS for every host that reaches this address";

/// Ends a daemon; how many warnings its log has.
fn warnings(folder: &Path, daemon: Serving) -> usize {
    daemon.signal("TERM");
    let path = folder.join("log");
    assert!(daemon.wait().success());
    let log = std::fs::read_to_string(&path).expect("a log");
    std::fs::remove_file(path).expect("a log");
    let _ = std::fs::remove_file(folder.join("pid"));
    let warned = log.lines().filter(|line| line.contains(WORDS));
    warned.inspect(|line| assert!(line.contains("WARN") && line.contains("0.0.0.0:"), "{line}")).count()
}

/// A daemon that writes the file `pid` once it serves.
fn until_up(folder: &Path, mut command: Command, arguments: &[&str]) -> Serving {
    command.args(arguments);
    let mut daemon = Serving::start_command(folder, command);
    await_that("the daemon serves", || {
        assert!(daemon.child().try_wait().expect("a child").is_none(), "it ended: {}", daemon.log());
        folder.join("pid").exists()
    });
    daemon
}

fn folder_with_disk() -> tempfile::TempDir {
    let folder = temp_dir();
    Qemu::system().create(&folder.path().join("disk.qcow2"), "qcow2", "", 8 << 20);
    folder
}

#[test]
fn serve_warns_of_a_writable_export_that_the_network_reaches() {
    let folder = folder_with_disk();
    make_credentials(folder.path());
    let tls = ["--bind", "0.0.0.0", "--object", "tls-creds-x509,id=t,dir=.,endpoint=server", "--tls-creds", "t"];
    for (arguments, count) in [
        (&["--bind", "0.0.0.0"][..], 1),
        (&["--bind", "0.0.0.0", "--read-only"], 0),
        (&["--bind", "127.0.0.1"], 0),
        (&[], 0),
        (&tls, 0),
    ] {
        let all = [&["serve", "--port", "0", "disk.qcow2"], arguments].concat();
        let mut daemon = Serving::start(folder.path(), &all);
        let line = daemon.line();
        assert!(line.starts_with("nbd"), "{line}: {}", daemon.log());
        assert_eq!(warnings(folder.path(), daemon), count, "{arguments:?}");
    }
}

#[test]
fn qemu_nbd_warns_only_under_our_own_name() {
    let folder = folder_with_disk();
    let link = folder.path().join("qemu-nbd");
    std::os::unix::fs::symlink(COWSHED, &link).expect("a link named qemu-nbd");
    let arguments = ["-t", "-b", "0.0.0.0", "-p", "0", "--pid-file", "pid", "-f", "qcow2", "disk.qcow2"];
    let mut ours = Command::new(COWSHED);
    ours.arg("qemu-nbd");
    let daemon = until_up(folder.path(), ours, &arguments);
    assert_eq!(warnings(folder.path(), daemon), 1);
    // QEMU's program is silent here.
    let daemon = until_up(folder.path(), Command::new(&link), &arguments);
    assert_eq!(daemon.log(), "");
    assert_eq!(warnings(folder.path(), daemon), 0);
}

#[test]
fn a_server_that_a_monitor_starts_warns_once() {
    let folder = folder_with_disk();
    let mut command = Command::new(COWSHED);
    command.arg("qemu-storage-daemon");
    let chardev = ["--chardev", "socket,id=m,path=m.sock,server=on,wait=off", "--monitor", "m", "--pidfile", "pid"];
    let disk = ["--blockdev", "qcow2,node-name=disk,file.driver=file,file.filename=disk.qcow2"];
    let daemon = until_up(folder.path(), command, &[&chardev[..], &disk].concat());
    let mut monitor = Monitor::connect(&folder.path().join("m.sock"));
    let address = json!({"type": "inet", "data": {"host": "0.0.0.0", "port": "0"}});
    monitor.command("nbd-server-start", json!({"addr": address}));
    let export = |id: &str, writable: bool| json!({"type": "nbd", "id": id, "name": id, "node-name": "disk", "writable": writable});
    monitor.command("block-export-add", export("a", false));
    assert!(!daemon.log().contains(WORDS), "{}", daemon.log());
    monitor.command("block-export-add", export("b", true));
    assert_eq!(daemon.log().matches(WORDS).count(), 1, "{}", daemon.log());
    monitor.command("block-export-add", export("c", true));
    drop(monitor);
    assert_eq!(warnings(folder.path(), daemon), 1);
}
