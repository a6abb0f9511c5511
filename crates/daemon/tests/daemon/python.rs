// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The public Python client of QMP (`qemu.qmp`), from the virtual environment that scripts/setup makes.

use super::running::Running;
use cowshed_testkit::qemu::Qemu;
use std::path::Path;
use std::process::Command;

#[test]
fn the_public_client_speaks_with_a_monitor() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let python = root.join("../../target/qmp-client/bin/python3");
    assert!(python.exists(), "qemu.qmp is not installed; run: scripts/setup test");
    let daemon = Running::start(Vec::new());
    Qemu::system().create(&daemon.path("b.qcow2"), "qcow2", "", 1 << 20);
    let output = Command::new(python)
        .arg(root.join("tests/daemon/client.py"))
        .args([daemon.path("m.sock"), daemon.path("b.qcow2")])
        .output()
        .expect("Python runs");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(said.trim(), "all is well", "{}", String::from_utf8_lossy(&output.stderr));
    daemon.join().expect("stopped in order");
}
