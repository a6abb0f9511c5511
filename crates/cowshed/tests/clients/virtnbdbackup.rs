// SPDX-License-Identifier: Apache-2.0 OR MIT
//! virtnbdbackup on a machine whose disk our `qemu-img` has made. Libvirt and QEMU serve the backups of the paused machine, our
//! `qemu-nbd` serves that of the stopped one. Restores go into images that our tools make and serve.

use super::libvirt::Libvirt;
use super::tools::text;
use cowshed_testkit::programs::finish_well;
use cowshed_testkit::qemu::Qemu;
use std::fs;

/// A backup or a restore. It warns that the guest of a paused machine can't be frozen.
#[track_caller]
fn tool(libvirt: &Libvirt, program: &str, arguments: &[&str]) {
    finish_well(libvirt.command(program).args(["-U", "qemu:///session"]).args(arguments));
}

#[test]
fn machines_are_backed_up_and_restored() {
    let mut libvirt = Libvirt::start(true);
    let image = libvirt.path("images/disk.qcow2");
    finish_well(libvirt.command("qemu-img").args(["create", "-q", "-f", "qcow2", text(&image), "32M"]));
    finish_well(libvirt.command("qemu-io").args(["-f", "qcow2", "-c", "write -q -P 1 0 4M", text(&image)]));
    libvirt.start_paused("machine", &image);
    let (running, stopped) = (libvirt.path("images/running"), libvirt.path("images/stopped"));
    let socket = libvirt.path("images/socket");
    let scratch = libvirt.path("images");
    let common = ["-d", "machine", "-f", text(&socket), "--scratchdir", text(&scratch)];
    tool(&libvirt, "virtnbdbackup", &[&common[..], &["-l", "full", "-o", text(&running)]].concat());
    let device = "/machine/peripheral/virtio-disk0/virtio-backend";
    for command in ["write -P 2 1M 64k", "write -P 3 20M 128k", "write -z 2M 64k", "flush"] {
        let said =
            libvirt.virsh(&["qemu-monitor-command", "machine", "--hmp", &format!("qemu-io -d {device} \"{command}\"")]);
        assert!(!said.to_lowercase().contains("error") && !said.contains("conflict"), "{command}: {said}");
    }
    tool(&libvirt, "virtnbdbackup", &[&common[..], &["-l", "inc", "-o", text(&running)]].concat());
    libvirt.destroy("machine");
    tool(&libvirt, "virtnbdbackup", &[&common[..], &["-l", "copy", "-o", text(&stopped)]].concat());

    let qemu = Qemu::system();
    let expected = ["read -P 2 1M 64k", "read -P 3 20M 128k", "read -P 0 2M 64k", "read -P 1 0 1M", "read -P 0 4M 16M"];
    for backup in [&running, &stopped] {
        let restored = backup.with_extension("restored");
        fs::create_dir(&restored).expect("a folder");
        finish_well(std::process::Command::new("chmod").args(["777", text(&restored)]));
        tool(&libvirt, "virtnbdrestore", &["-f", text(&socket), "-i", text(backup), "-o", text(&restored)]);
        let disk = restored.join("disk.qcow2");
        assert!(qemu.is_equal((&image, "qcow2"), (&disk, "qcow2")), "{}", backup.display());
        qemu.expect_clean(&disk);
        let said = qemu.io_commands(&disk, "qcow2", &expected.map(str::to_owned)).expect_ok();
        assert!(!said.stdout.contains("failed"), "{}", said.stdout);
    }
}
