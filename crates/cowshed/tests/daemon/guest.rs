// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A Debian kernel boots from an image that `cowshed serve` serves, writes, and has its disk snapshotted meanwhile.
//!
//! `scripts/guest` fetches kernel and file system from Debian's packages, `scripts/setup test` runs it.

use super::process::{Monitor, Serving, text};
use cowshed_testkit::guest::{Guest, guest_files, initial_file_system};
use cowshed_testkit::programs::{run_to_code, tool};
use cowshed_testkit::qemu::{Qemu, temp_dir};
use serde_json::json;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// The first program of the guest. It loads the modules (which need one another, hence several passes), finds the disk
/// and hands over to the system on it.
const INIT: &str = "#!/bin/busybox sh
/bin/busybox mount -t proc none /proc
/bin/busybox mount -t devtmpfs none /dev
for pass in 1 2 3; do
  for module in /modules/*.ko; do /bin/busybox insmod $module 2>/dev/null; done
done
while [ ! -b /dev/vda ]; do /bin/busybox sleep 0.1; done
/bin/busybox mount -t ext4 /dev/vda /disk
/bin/busybox mount -o move /dev /disk/dev
/bin/busybox mount -o move /proc /disk/proc
exec /bin/busybox switch_root /disk /sbin/work
";

/// The guest's work. It reports its place on its console and reads from there when to go on. Between the two it writes
/// all the time, each file durable before the next.
const WORK: &str = "#!/bin/bash
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
cd /work
seq 1 200000 > before
sync
echo GUEST: wrote the first file
(n=0; while [[ ! -e stop ]]; do n=$((n + 1)); seq $n $((n + 20000)) > loop.$((n % 40)); sync loop.$((n % 40)); echo $n > count; done) &
read -r word
echo GUEST: goes on at the word $word
touch stop
wait
seq 1 300000 > after
sha256sum before after loop.* count > sums
sync
cd /
/sbin/busybox mount -o remount,ro /
echo GUEST: finished
echo o > /proc/sysrq-trigger
sleep 600
";

/// An ext4 file system with the Debian tree and our program, in a qcow2 image.
fn make_disk(files: &Path, folder: &Path, qemu: &Qemu) -> PathBuf {
    let (tree, raw, image) = (folder.join("tree"), folder.join("disk.raw"), folder.join("disk.qcow2"));
    tool("cp", &["-a", text(&files.join("tree")), text(&tree)]);
    fs::create_dir(tree.join("work")).expect("a folder");
    fs::copy(files.join("busybox"), tree.join("sbin/busybox")).expect("busybox");
    fs::write(tree.join("sbin/work"), WORK).expect("a program");
    fs::set_permissions(tree.join("sbin/work"), fs::Permissions::from_mode(0o755)).expect("a program");
    File::create(&raw).and_then(|file| file.set_len(256 << 20)).expect("a disk");
    tool("mkfs.ext4", &["-q", "-F", "-d", text(&tree), text(&raw)]);
    qemu.img(["convert", "-f", "raw", "-O", "qcow2", text(&raw), text(&image)]).expect_ok();
    fs::remove_file(raw).expect("a file");
    image
}

/// Numbers as `seq` writes them.
fn sequence(last: u32) -> Vec<u8> {
    (1..=last).flat_map(|number| format!("{number}\n").into_bytes()).collect()
}

/// The file system of an image, as a raw file.
fn file_system_of(image: &Path, qemu: &Qemu) -> PathBuf {
    let raw = image.with_extension("fs");
    qemu.img(["convert", "-f", "qcow2", "-O", "raw", text(image), text(&raw)]).expect_ok();
    raw
}

/// The guest's folder, copied out of a file system.
fn work_folder_of(raw: &Path) -> PathBuf {
    let folder = raw.with_extension("files");
    fs::create_dir(&folder).expect("a folder");
    tool("debugfs", &["-R", &format!("rdump /work {}", text(&folder)), text(raw)]);
    folder.join("work")
}

#[test]
#[cfg(target_arch = "x86_64")]
fn a_guest_runs_from_a_served_image_through_live_snapshots() {
    let (files, folder, qemu) = (guest_files(), temp_dir(), Qemu::system());
    let image = make_disk(&files, folder.path(), &qemu);
    let initrd = folder.path().join("initrd");
    fs::write(&initrd, initial_file_system(&files, INIT, &[])).expect("a file");
    let arguments = [
        "serve",
        "-x",
        "disk",
        "-k",
        "n.sock",
        "--monitor",
        "m.sock",
        "--drive",
        "file=disk.qcow2,id=disk,discard=unmap",
    ];
    let mut serving = Serving::start(folder.path(), &arguments);
    let line = serving.line();
    assert!(line.starts_with("nbd+unix://"), "{line}");
    let mut monitor = Monitor::connect(&folder.path().join("m.sock"));

    let uri = format!("nbd+unix:///disk?socket={}", text(&folder.path().join("n.sock")));
    let drive = format!("file={uri},format=raw,if=virtio,discard=unmap");
    let mut guest = Guest::boot(&files, &initrd, &["-drive", &drive]);
    guest.await_words("GUEST: wrote the first file");
    let overlays = ["one.qcow2", "two.qcow2"];
    for overlay in overlays {
        let before = monitor.bytes_written();
        monitor.snapshot(&folder.path().join(overlay));
        // The guest goes on writing, now into the overlay.
        while monitor.bytes_written() < before + (1 << 20) {
            assert!(guest.is_running(), "the machine has ended:\n{}", guest.said);
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    guest.keyboard.write_all(b"go\n").expect("the machine reads");
    guest.await_words("GUEST: finished");
    assert!(guest.wait().success(), "{}", guest.said);
    let up = guest.said_while_up();
    assert!(!up.contains("I/O error") && !up.contains("EXT4-fs error"), "{}", guest.said);
    monitor.command("quit", json!({}));
    let log = serving.log();
    assert!(serving.wait().success(), "{log}");

    let tops = [image, folder.path().join(overlays[0]), folder.path().join(overlays[1])];
    for top in &tops {
        qemu.expect_clean(top);
    }
    // The guest's last state, unmounted.
    let raw = file_system_of(&tops[2], &qemu);
    run_to_code("e2fsck", &["-fn", text(&raw)], &[0]);
    let work = work_folder_of(&raw);
    assert!(fs::read(work.join("before")).expect("a file") == sequence(200_000));
    assert!(fs::read(work.join("after")).expect("a file") == sequence(300_000));
    let sums = fs::read_to_string(work.join("sums")).expect("sums");
    assert!(sums.lines().count() > 3, "{sums}");
    let checked = Command::new("sha256sum").args(["--check", "--quiet", "sums"]).current_dir(&work).output();
    let checked = checked.expect("sha256sum runs");
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stdout));
    // A snapshot has the state that a power cut at that moment would have left. The journal brings it in order, and the
    // guest's synced files are there.
    for older in &tops[..2] {
        let raw = file_system_of(older, &qemu);
        run_to_code("e2fsck", &["-fp", text(&raw)], &[0, 1]);
        run_to_code("e2fsck", &["-fn", text(&raw)], &[0]);
        assert!(fs::read(work_folder_of(&raw).join("before")).expect("a file") == sequence(200_000));
    }
}
