// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A daemon that is killed while a command makes an image leaves no half image under the name in the command. A file
//! without magic would read as a raw disk.

use super::process::{Monitor, Serving, text};
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_testkit::random::{Random, seeds};
use cowshed_testkit::waiting::await_some;
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};

/// Commands that make the image `new.qcow2`, with the name of the argument for its place.
const COMMANDS: [(&str, &str); 3] =
    [("blockdev-snapshot-sync", "snapshot-file"), ("drive-backup", "target"), ("drive-mirror", "target")];

fn start(folder: &Path) -> Serving {
    let arguments =
        ["serve", "-x", "disk", "-k", "n.sock", "--monitor", "m.sock", "--drive", "file=disk.qcow2,id=disk"];
    let mut daemon = Serving::start(folder, &arguments);
    while !daemon.line().starts_with("QMP") {}
    daemon
}

fn arguments(folder: &Path, command: &str, key: &str) -> Value {
    let mut arguments = json!({"device": "disk", "format": "qcow2"});
    arguments[key] = json!(folder.join("new.qcow2"));
    if command != "blockdev-snapshot-sync" {
        arguments["sync"] = json!("full");
    }
    arguments
}

fn clear(folder: &Path) {
    for entry in std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry")) {
        if entry.file_name() != "disk.qcow2" {
            std::fs::remove_file(entry.path()).expect("a file");
        }
    }
}

/// True if a whole image has the name of the command; false without a file.
fn is_whole(folder: &Path, qemu: &Qemu, case: &str) -> bool {
    let new = folder.join("new.qcow2");
    let Ok(bytes) = std::fs::read(&new) else { return false };
    assert!(bytes.starts_with(b"QFI\xfb"), "{case}: {} bytes that read as a raw disk", bytes.len());
    // The kernel closes the files of a killed process's ring a moment after its end.
    let info = await_some(case, || {
        let said = qemu.img(["info", "--output=json", text(&new)]);
        assert!(said.code == 0 || said.stderr.contains("lock"), "{case}: {}", said.stderr);
        (said.code == 0).then(|| said.expect_ok().json())
    });
    assert_eq!((&info["format"], &info["virtual-size"]), (&json!("qcow2"), &json!(4 << 20)), "{case}");
    qemu.expect_no_corruption(&new);
    true
}

#[test]
fn a_killed_daemon_leaves_no_half_image_that_reads_as_raw() {
    let (qemu, folder) = (Qemu::system(), temp_dir());
    let folder = folder.path();
    qemu.create(&folder.join("disk.qcow2"), "qcow2", "", 4 << 20);
    qemu.io_commands(&folder.join("disk.qcow2"), "qcow2", &["write -P 7 0 1M".into()]);
    for (command, key) in COMMANDS {
        // The time until the image has its name.
        let daemon = start(folder);
        let mut monitor = Monitor::connect(&folder.join("m.sock"));
        let begun = Instant::now();
        monitor.send(command, &arguments(folder, command, key));
        while !folder.join("new.qcow2").exists() {
            assert!(begun.elapsed() < Duration::from_secs(60), "{command} makes no image");
            // A short one: the time until then is measured.
            std::thread::sleep(Duration::from_micros(100));
        }
        let taken = begun.elapsed();
        daemon.stop();
        clear(folder);
        let (mut absent, mut whole) = (0, 0);
        for seed in seeds(14) {
            let mut random = Random::new(seed ^ 0x6b69_6c6c);
            let delay = Duration::from_nanos(random.below(2 * taken.as_nanos() as u64));
            let mut daemon = start(folder);
            let mut monitor = Monitor::connect(&folder.join("m.sock"));
            monitor.send(command, &arguments(folder, command, key));
            // The moment of the kill is the case.
            std::thread::sleep(delay);
            daemon.child().kill().expect("it runs");
            assert!(!daemon.wait().success());
            let case = format!("{command}, seed {seed}, killed after {delay:?} of {taken:?}");
            if is_whole(folder, &qemu, &case) {
                whole += 1
            } else {
                absent += 1
            }
            qemu.expect_no_corruption(&folder.join("disk.qcow2"));
            clear(folder);
        }
        eprintln!("{command}: {absent} times no image, {whole} times a whole one");
    }
}
