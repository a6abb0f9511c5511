// SPDX-License-Identifier: Apache-2.0 OR MIT
//! oslo.utils, by which OpenStack's services read the output of `qemu-img info`.

use super::tools::{make_tools, text};
use cowshed_testkit::programs::finish_well;
use cowshed_testkit::qemu::{Qemu, temp_dir};
use std::path::Path;
use std::process::Command;

/// The library's reading of both kinds of output, one line each.
const READ: &str = r#"
import subprocess, sys
from oslo_utils import imageutils
tool, images = sys.argv[1], sys.argv[2:]
for image in images:
    for output in ("json", "human"):
        text = subprocess.run([tool, "info", "--force-share", "--output=" + output, image], check=True, capture_output=True, text=True).stdout
        info = imageutils.QemuImgInfo(text, format="json") if output == "json" else imageutils.QemuImgInfo(text)
        facts = vars(info)
        facts.pop("disk_size", None)
        facts.pop("_details", None)
        for snapshot in facts.get("snapshots") or []:
            for key in list(snapshot):
                if "date" in key or "time" in key or "clock" in key:
                    snapshot.pop(key)
        if isinstance(facts.get("format_specific"), dict):
            facts["format_specific"] = sorted(facts["format_specific"].get("data", {}).items(), key=str)
        print(image, output, sorted(facts.items()))
"#;

fn read(tool: &Path, folder: &Path, images: &[&str]) -> String {
    // The system's Python has the library.
    let mut command = Command::new("/usr/bin/python3");
    finish_well(command.args(["-W", "ignore", "-c", READ, text(tool)]).args(images).current_dir(folder))
}

#[test]
fn openstack_reads_of_our_output_what_it_reads_of_qemus() {
    let (folder, qemu) = (temp_dir(), Qemu::newest());
    let ours = make_tools(folder.path()).join("qemu-img");
    let create: &[&[&str]] = &[
        &["create", "-q", "-f", "raw", "plain.raw", "5M"],
        &["create", "-q", "-f", "qcow2", "base.qcow2", "16M"],
        &["create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", "top.qcow2"],
        &["create", "-q", "-f", "qcow2", "-o", "compat=0.10,cluster_size=4k", "old.qcow2", "16M"],
        &["create", "-q", "-f", "qcow2", "-o", "data_file=data,data_file_raw=on", "outside.qcow2", "16M"],
        &["snapshot", "-c", "one two", "base.qcow2"],
        &["create", "-q", "-f", "vmdk", "disk.vmdk", "16M"],
        &["create", "-q", "-f", "vdi", "disk.vdi", "16M"],
        &["create", "-q", "-f", "vpc", "disk.vhd", "16M"],
        &["create", "-q", "-f", "vhdx", "disk.vhdx", "16M"],
    ];
    for arguments in create {
        finish_well(Command::new(qemu.img_path()).args(*arguments).current_dir(folder.path()));
    }
    let mut encrypted = Command::new(qemu.img_path());
    encrypted.args(["create", "-q", "-f", "qcow2", "--object", "secret,id=s,data=x", "-o"]);
    encrypted.args(["encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10", "locked.qcow2", "1M"]);
    finish_well(encrypted.current_dir(folder.path()));
    let images = [
        "plain.raw",
        "base.qcow2",
        "top.qcow2",
        "old.qcow2",
        "outside.qcow2",
        "locked.qcow2",
        "disk.vmdk",
        "disk.vdi",
        "disk.vhd",
        "disk.vhdx",
    ];
    let (found, expected) = (read(&ours, folder.path(), &images), read(qemu.img_path(), folder.path(), &images));
    assert_eq!(found, expected);
    assert_eq!(expected.lines().count(), 2 * images.len(), "{expected}");
    assert!(expected.contains("'file_format', 'qcow2'") && expected.contains("16777216"), "{expected}");
}
