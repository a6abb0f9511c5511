// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory whose size an image says and that the system doesn't have is an error of the verb, not the end of the process.

use cowshed_testkit::qemu::{Qemu, temp_dir};
use std::path::Path;
use std::process::{Command, Output};

const MIB: u64 = 1 << 20;

/// Runs the tool with so many bytes of memory of its own.
fn limited(folder: &Path, bytes: u64, line: &str) -> Output {
    let mut command = Command::new("prlimit");
    command.arg(format!("--data={bytes}")).arg(env!("CARGO_BIN_EXE_cowshed")).args(line.split(' '));
    command.current_dir(folder).output().expect("prlimit must be installed (util-linux)")
}

/// Memory in which the line works on a small image, and little more.
fn little(folder: &Path, line: &str) -> u64 {
    let works = |mib: &u64| limited(folder, mib * MIB, line).status.success();
    let least = (8..=2048).step_by(8).find(works);
    (least.unwrap_or_else(|| panic!("`{line}` needs more than 2 GiB")) + 8) * MIB
}

/// The line with the small image works with memory with which the same with the hostile one fails in good order.
#[track_caller]
fn expect_refusal(folder: &Path, line: &str) {
    let bytes = little(folder, &line.replace("IMAGE", "small.qcow2"));
    let hostile = line.replace("IMAGE", "hostile.qcow2");
    let output = limited(folder, bytes, &hostile);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "`{hostile}` with {bytes} bytes: {:?}: {said}", output.status);
    assert!(said.contains("could not get memory"), "`{hostile}`: {said}");
}

#[test]
fn tables_of_an_image_that_memory_does_not_hold_are_refused() {
    let folder = temp_dir();
    let folder = folder.path();
    let qemu = Qemu::system();
    qemu.create(&folder.join("small.qcow2"), "qcow2", "cluster_size=512", MIB);
    let hostile = folder.join("hostile.qcow2");
    // An L1 table of 32 MiB.
    qemu.create(&hostile, "qcow2", "cluster_size=512", 128 << 30);
    for line in ["map IMAGE", "convert -O raw IMAGE out.raw", "check IMAGE", "qemu-io -r -c length IMAGE"] {
        expect_refusal(folder, line);
    }
    // Two bytes for each of 16 million clusters.
    std::fs::copy(folder.join("small.qcow2"), &hostile).expect("copy");
    std::fs::OpenOptions::new().write(true).open(&hostile).expect("open").set_len(8 << 30).expect("a hole");
    expect_refusal(folder, "check IMAGE");
}
