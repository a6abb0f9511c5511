// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Loop devices on a mounted image, in a guest whose kernel reads partition tables: `losetup -P` and `mount -o loop`.

use super::process::{COWSHED, text};
use cowshed_testkit::guest::{Guest, guest_files, initial_file_system};
use cowshed_testkit::programs::tool;
use cowshed_testkit::qemu::temp_dir;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

const MIB: u64 = 1 << 20;

/// Mounts the image as a file, and the second of its partitions by a loop device of the whole; then that partition's file alone.
const INIT: &str = r#"#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin
mkdir -p /sys /tmp /run /var/lock
mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev
mount -t tmpfs none /tmp
for pass in 1 2 3 4; do for module in /modules/*.ko; do insmod $module 2>/dev/null; done; done
say() { echo "GUEST: $*"; }
try() { "$@" >/tmp/said 2>&1; say "$*: $? $(head -n 1 /tmp/said)"; }
gone() { n=0; while pidof cowshed >/dev/null && [ $n -lt 600 ]; do n=$((n+1)); sleep 0.1; done; }
cp /bin/d.qcow2 /tmp/d.qcow2
touch /tmp/whole /tmp/part
try cowshed mount -w /tmp/d.qcow2 /tmp/whole
try losetup -P /dev/loop0 /tmp/whole
say "partitions: $(cd /sys/block/loop0; echo loop0p*) of $(cat /sys/block/loop0/loop0p2/size) sectors"
try mount -t ext4 /dev/loop0p2 /disk
say "it has $(cat /disk/here)"
seq 1 1000 > /disk/written
try umount /disk
try losetup -d /dev/loop0
try cowshed umount /tmp/whole
gone
try cowshed mount -w -P 2 /tmp/d.qcow2 /tmp/part
try mount -t ext4 -o loop /tmp/part /disk
say "it has $(tail -n 1 /disk/written)"
try umount /disk
try cowshed umount /tmp/part
gone
try cowshed check -q /tmp/d.qcow2
say finished
echo o >/proc/sysrq-trigger
sleep 600
"#;

const SAID: &[&str] = &[
    "cowshed mount -w /tmp/d.qcow2 /tmp/whole: 0",
    "losetup -P /dev/loop0 /tmp/whole: 0",
    "partitions: loop0p1 loop0p2 of 16384 sectors",
    "mount -t ext4 /dev/loop0p2 /disk: 0",
    "it has a file",
    "umount /disk: 0",
    "losetup -d /dev/loop0: 0",
    "cowshed umount /tmp/whole: 0",
    "cowshed mount -w -P 2 /tmp/d.qcow2 /tmp/part: 0",
    "mount -t ext4 -o loop /tmp/part /disk: 0",
    "it has 1000",
    "umount /disk: 0",
    "cowshed umount /tmp/part: 0",
    "cowshed check -q /tmp/d.qcow2: 0",
    "finished",
];

/// A disk of 12 MiB with partitions from 1 and 3 MiB on; the second one has an ext4 file system with the file `here`.
fn make_disk(folder: &Path) -> Vec<u8> {
    let at = |name: &str| folder.join(name);
    fs::create_dir(at("tree")).and_then(|()| fs::write(at("tree/here"), "a file\n")).expect("a tree");
    File::create(at("part.raw")).and_then(|file| file.set_len(8 * MIB)).expect("a file");
    tool("mkfs.ext4", &["-q", "-F", "-d", text(&at("tree")), text(&at("part.raw"))]);
    let disk = File::create(at("d.raw")).expect("a disk");
    disk.set_len(12 * MIB).expect("a disk");
    let mut table = [0_u8; 512];
    for (number, (start, len)) in [(MIB, MIB), (3 * MIB, 8 * MIB)].into_iter().enumerate() {
        let entry = &mut table[446 + 16 * number..][..16];
        entry[4] = 0x83;
        entry[8..12].copy_from_slice(&((start / 512) as u32).to_le_bytes());
        entry[12..].copy_from_slice(&((len / 512) as u32).to_le_bytes());
    }
    table[510..].copy_from_slice(&[0x55, 0xaa]);
    disk.write_all_at(&table, 0).expect("a table");
    disk.write_all_at(&fs::read(at("part.raw")).expect("a file system"), 3 * MIB).expect("a partition");
    tool(COWSHED, &["convert", "-f", "raw", "-O", "qcow2", text(&at("d.raw")), text(&at("d.qcow2"))]);
    fs::read(at("d.qcow2")).expect("an image")
}

#[test]
#[cfg(target_arch = "x86_64")]
fn loop_devices_show_the_partitions_of_a_mounted_image() {
    let (files, folder) = (guest_files(), temp_dir());
    let (initrd, program) = (folder.path().join("initrd"), folder.path().join("cowshed"));
    tool("strip", &["-o", text(&program), COWSHED]);
    let programs =
        [("bin/cowshed", fs::read(&program).expect("our own program")), ("bin/d.qcow2", make_disk(folder.path()))];
    fs::write(&initrd, initial_file_system(&files, INIT, &programs)).expect("a file");
    let mut guest = Guest::boot(&files, &initrd, &["-m", "512"]);
    assert!(guest.wait().success(), "{}", guest.said);
    let said = guest.said.lines().filter_map(|line| Some(line.split_once("GUEST: ")?.1.trim_end()));
    assert_eq!(said.collect::<Vec<_>>(), SAID, "{}", guest.said);
    assert!(!guest.said_while_up().contains("I/O error"), "{}", guest.said);
}
