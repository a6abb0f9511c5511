// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Images from strangers in the daemon: their files and options are refused, by the command line and at run time.

use super::process::{COWSHED, Monitor, Serving, text};
use cowshed_testkit::programs::{run_to_code, tool};
use cowshed_testkit::qemu::temp_dir;
use serde_json::{Value, json};
use std::path::Path;

/// `evil.qcow2` names a file of the host, `huge.qcow2` is larger than a stranger's image may be, `good.qcow2` is harmless.
fn folder() -> tempfile::TempDir {
    let folder = temp_dir();
    let at = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(at("secret"), vec![7; 1 << 20]).expect("a file");
    tool("qemu-img", &["create", "-q", "-f", "qcow2", "-F", "raw", "-b", &at("secret"), &at("evil.qcow2")]);
    tool("qemu-img", &["create", "-q", "-f", "qcow2", &at("huge.qcow2"), "17T"]);
    tool("qemu-img", &["create", "-q", "-f", "qcow2", &at("good.qcow2"), "1M"]);
    folder
}

/// The options that open an image as the node `n`.
fn options(folder: &Path, image: &str) -> Value {
    let file = json!({"driver": "file", "filename": folder.join(image)});
    json!({"driver": "qcow2", "node-name": "n", "file": file})
}

#[test]
fn serving_a_strangers_image_opens_nothing_on_its_word() {
    let folder = folder();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let socket = at("n.sock");
    let serve = |more: &[&str]| run_to_code(COWSHED, &[&["serve", "-k", &socket, "--untrusted"], more].concat(), &[1]);
    let refused = serve(&[&at("evil.qcow2")]);
    assert!(refused.contains("backing") && refused.contains("evil.qcow2"), "{refused}");
    let refused = serve(&["--drive", &format!("file={},format=qcow2", at("evil.qcow2"))]);
    assert!(refused.contains("backing"), "{refused}");
    let refused = serve(&[&at("huge.qcow2")]);
    assert!(refused.contains("suspicious"), "{refused}");
    let refused = run_to_code(COWSHED, &["serve", "-k", &socket, "--allow", "backing", &at("evil.qcow2")], &[1, 2]);
    assert!(refused.contains("--allow needs --untrusted"), "{refused}");
    let allowed: [&[&str]; 3] =
        [&["good.qcow2"], &["--allow", "backing", "evil.qcow2"], &["--limit", "virtual-size=20T", "huge.qcow2"]];
    for more in allowed {
        let mut daemon = Serving::start(folder.path(), &[&["serve", "-k", "n.sock", "--untrusted"], more].concat());
        assert!(daemon.line().starts_with("nbd+unix:"), "{}", daemon.log());
        daemon.stop();
    }
}

#[test]
fn a_node_can_be_held_to_the_policy_and_stays_so() {
    let folder = folder();
    let mut daemon = Serving::start(folder.path(), &["serve", "-k", "n.sock", "--monitor", "m.sock"]);
    assert_eq!(daemon.line(), "QMP: unix:m.sock");
    let mut monitor = Monitor::connect(&folder.path().join("m.sock"));
    let with = |image: &str, untrusted: bool| {
        let mut options = options(folder.path(), image);
        options["x-untrusted"] = json!(untrusted);
        options
    };
    assert!(monitor.refusal("blockdev-add", &with("evil.qcow2", true)).contains("backing"));
    assert!(monitor.refusal("blockdev-add", &with("huge.qcow2", true)).contains("suspicious"));
    // The word of the user counts for this node alone, and a name that is free again is free of it.
    monitor.command("blockdev-add", with("evil.qcow2", false));
    monitor.command("blockdev-del", json!({"node-name": "n"}));
    monitor.command("blockdev-add", options(folder.path(), "evil.qcow2"));
    monitor.command("blockdev-del", json!({"node-name": "n"}));

    // Another process may change an image that is inactive.
    monitor.command("blockdev-add", with("good.qcow2", true));
    monitor.command("blockdev-set-active", json!({"node-name": "n", "active": false}));
    std::fs::copy(folder.path().join("evil.qcow2"), folder.path().join("good.qcow2")).expect("a file");
    let activate = json!({"node-name": "n", "active": true});
    assert!(monitor.refusal("blockdev-set-active", &activate).contains("backing"));
    assert!(text(folder.path()).starts_with('/'));
    daemon.stop();
}
