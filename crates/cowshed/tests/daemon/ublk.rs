// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The export `ublk` where the kernel's driver is missing, as on machines for tests: `crates/ublk` has a driver of its own.

use super::process::{Monitor, Serving, text};
use cowshed_testkit::programs::{run_to_code, tool};
use cowshed_testkit::qemu::temp_dir;
use cowshed_testkit::waiting::await_that;
use serde_json::json;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

const MISSING: &str =
    "the kernel's ublk driver is not there (/dev/ublk-control): load it by 'modprobe ublk_drv', as root";

/// A machine with the driver makes devices instead.
fn has_driver() -> bool {
    Path::new("/dev/ublk-control").exists()
}

#[test]
fn a_machine_without_the_driver_is_told_how_to_get_it() {
    if has_driver() {
        return;
    }
    let folder = temp_dir();
    let image = folder.path().join("d.raw");
    std::fs::write(&image, vec![0; 1 << 20]).expect("written");
    let disk = format!("driver=raw,node-name=d,file.driver=file,file.filename={}", text(&image));
    let start = |export: &str, code| {
        let arguments = ["qemu-storage-daemon", "--blockdev", &disk, "--export", export];
        run_to_code(super::process::COWSHED, &arguments, &[code])
    };
    for more in ["", ",writable=on,device-id=7,recover=on", ",num-queues=64,queue-size=4096,recover=auto,device-id=0"] {
        let said = start(&format!("type=ublk,id=u,node-name=d{more}"), 1);
        assert!(said.contains(MISSING), "{said}");
    }
    for (more, words) in [
        (",num-queues=0", "num-queues is 0, and a device has 1 to 64"),
        (",num-queues=100000", "num-queues is 100000, and a device has 1 to 64"),
        (",queue-size=100000", "queue-size is 100000, and a queue has 1 to 4096 requests"),
        (",queue-size=5000", "queue-size is 5000, and a queue has 1 to 4096 requests"),
        (",logical-block-size=8192", "logical-block-size must be a power of 2 between 512 and 4096"),
        (",recover=on", "'recover' needs the number of the device, 'device-id'"),
        (",recover=maybe", "maybe"),
        (",device-id=4294967295", "device-id is no number of a device"),
    ] {
        let said = start(&format!("type=ublk,id=u,node-name=d{more}"), 1);
        assert!(said.contains(words), "{more}: {said}");
    }
    // The image is free again.
    tool("qemu-io", &["-f", "raw", "-c", "write 0 512", text(&image)]);
}

#[test]
fn a_refused_export_leaves_its_node_and_its_name_free() {
    if has_driver() {
        return;
    }
    let folder = temp_dir();
    std::fs::write(folder.path().join("d.raw"), vec![0; 1 << 20]).expect("written");
    let mut command = Command::new(super::process::COWSHED);
    command.arg0("qemu-storage-daemon").args(["--chardev", "socket,path=m.sock,server=on,wait=off,id=m"]);
    command.args(["--monitor", "chardev=m", "--blockdev", "raw,node-name=d,file.driver=file,file.filename=d.raw"]);
    command.args(["--nbd-server", "addr.type=unix,addr.path=n.sock"]);
    let daemon = Serving::start_command(folder.path(), command);
    let path = folder.path().join("m.sock");
    await_that("the monitor listens", || std::os::unix::net::UnixStream::connect(&path).is_ok());
    let mut monitor = Monitor::connect(&path);
    let export = json!({"type": "ublk", "id": "u", "node-name": "d", "writable": true, "num-queues": 2});
    for _ in 0..3 {
        assert_eq!(monitor.refusal("block-export-add", &export), MISSING);
    }
    assert_eq!(monitor.command("query-block-exports", json!({})), json!([]));
    let other = json!({"type": "nbd", "id": "u", "node-name": "d", "writable": true});
    monitor.command("block-export-add", other);
    monitor.command("block-export-del", json!({"id": "u"}));
    monitor.command("blockdev-del", json!({"node-name": "d"}));
    daemon.stop();
}
