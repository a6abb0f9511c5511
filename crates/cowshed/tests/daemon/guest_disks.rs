// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A Debian kernel boots from a qcow2 overlay on a raw base: over vhost-user-blk, from NBD as an NVMe disk, and from a FUSE file.
//! A system installs itself into the other half of its disk. docs/guest.md shows both by hand.

use super::process::{COWSHED, Monitor, Serving, text};
use cowshed_testkit::guest::{Guest, guest_files, initial_file_system};
use cowshed_testkit::programs::{run_to_code, tool};
use cowshed_testkit::qemu::{Qemu, temp_dir};
use serde_json::json;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};

const MIB: u64 = 1 << 20;

/// Loads the modules (which need one another, hence several passes), and hands over to the system on the disk. A disk that begins
/// with a slot (`A` or `B`) has its systems in its second and third partitions.
const INIT: &str = "#!/bin/busybox sh
export PATH=/bin
/bin/busybox mkdir /sys
/bin/busybox --install -s /bin
mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev
for pass in 1 2 3 4 5; do
  for module in /modules/*.ko; do insmod $module 2>/dev/null; done
done
disk=
while [ -z \"$disk\" ]; do
  for name in vda nvme0n1; do [ ! -b /dev/$name ] || disk=$name; done
  sleep 0.1
done
root=/dev/$disk
if [ -b /dev/${disk}1 ]; then
  case $(head -c 1 /dev/${disk}1) in A) root=/dev/${disk}2;; B) root=/dev/${disk}3;; esac
fi
mount -t ext4 $root /disk
for folder in dev proc sys; do mount -o move /$folder /disk/$folder; done
exec switch_root /disk /sbin/work $disk
";

/// The beginning and the end of every guest's script.
const BEGIN: &str = "#!/bin/busybox sh
export PATH=/bin
/bin/busybox --install -s /bin
disk=$1
";
const END: &str = "
cd /
sync
mount -o remount,ro /
echo GUEST: finished
echo o > /proc/sysrq-trigger
sleep 600
";

/// Checks the files of earlier boots, writes its own, and waits until its disk has the size that it reads from the
/// console.
const WRITE: &str = "
cd /work
boot=$(($(ls sums.* 2>/dev/null | wc -l) + 1))
for sums in sums.*; do [ ! -e $sums ] || sha256sum -c $sums > /dev/null || echo GUEST: $sums are wrong; done
seq $boot 100000 > written.$boot
sha256sum written.$boot > sums.$boot
sync
echo GUEST: boot $boot wrote on $disk of $(cat /sys/block/$disk/size) sectors
read -r size
while [ $(cat /sys/block/$disk/size) != $size ]; do sleep 0.1; done
echo GUEST: sees $size sectors
";

/// Installs the next version into the other half of the disk, durably, before the slot names it.
const INSTALL: &str = "
version=$(cat /version)
echo GUEST: version $version runs from $(grep ' / ' /proc/mounts | cut -d ' ' -f 1)
case $(head -c 1 /dev/${disk}1) in A) other=3; slot=B;; B) other=2; slot=A;; esac
read -r word
if [ \"$word\" = install ]; then
  mount -t ext4 /dev/${disk}$other /mnt
  rm -rf /mnt/sbin
  cp -a /sbin /mnt/sbin
  echo $((version + 1)) > /mnt/version
  umount /mnt
  sync
  printf $slot | dd of=/dev/${disk}1 conv=notrunc,fsync 2>/dev/null
fi
";

/// An ext4 file system of 16 MiB with busybox and the program `work`.
fn make_system(files: &Path, folder: &Path, work: &str) -> PathBuf {
    let (tree, raw) = (folder.join("tree"), folder.join("system.raw"));
    for name in ["bin", "sbin", "dev", "proc", "sys", "mnt", "work"] {
        fs::create_dir_all(tree.join(name)).expect("a folder");
    }
    fs::copy(files.join("busybox"), tree.join("bin/busybox")).expect("busybox");
    fs::write(tree.join("version"), "1\n").expect("a file");
    fs::write(tree.join("sbin/work"), format!("{BEGIN}{work}{END}")).expect("a program");
    for program in ["bin/busybox", "sbin/work"] {
        fs::set_permissions(tree.join(program), fs::Permissions::from_mode(0o755)).expect("a program");
    }
    File::create(&raw).and_then(|file| file.set_len(16 * MIB)).expect("a disk");
    tool("mkfs.ext4", &["-q", "-F", "-d", text(&tree), text(&raw)]);
    raw
}

fn make_initrd(files: &Path, folder: &Path) -> PathBuf {
    let initrd = folder.join("initrd");
    fs::write(&initrd, initial_file_system(files, INIT, &[])).expect("a file");
    initrd
}

fn overlay(folder: &Path, base: &Path, name: &str) -> PathBuf {
    let image = folder.join(name);
    tool(COWSHED, &["create", "-q", "-f", "qcow2", "-b", text(base), "-F", "raw", text(&image)]);
    image
}

/// Sends a word to the guest and waits until it has turned itself off without an error of its disk.
fn finish(mut guest: Guest, word: &str) {
    guest.keyboard.write_all(format!("{word}\n").as_bytes()).expect("the machine reads");
    guest.await_words("GUEST: finished");
    assert!(guest.wait().success(), "{}", guest.said);
    let up = guest.said_while_up();
    assert!(!up.contains("I/O error") && !up.contains("EXT4-fs error"), "{}", guest.said);
    assert!(!up.contains("are wrong"), "{}", guest.said);
}

/// The file system at `offset` in an image is whole; the content of its file `path`.
fn file_of(image: &Path, offset: u64, path: &str) -> String {
    let (raw, part) = (image.with_extension("all"), image.with_extension("part"));
    Qemu::system().img(["convert", "-f", "qcow2", "-O", "raw", text(image), text(&raw)]).expect_ok();
    let disk = fs::read(&raw).expect("a disk");
    fs::write(&part, &disk[offset as usize..(offset + 16 * MIB) as usize]).expect("a file");
    run_to_code("e2fsck", &["-fn", text(&part)], &[0]);
    run_to_code("debugfs", &["-R", &format!("cat {path}"), text(&part)], &[0])
}

#[test]
#[cfg(target_arch = "x86_64")]
fn a_guest_boots_from_an_overlay_through_each_export() {
    let (files, folder, qemu) = (guest_files(), temp_dir(), Qemu::system());
    let base = make_system(&files, folder.path(), WRITE);
    let before = fs::read(&base).expect("a base");
    let image = overlay(folder.path(), &base, "disk.qcow2");
    let initrd = make_initrd(&files, folder.path());
    File::create(folder.path().join("disk.img")).expect("a mount point");
    let drive = format!("file={},id=disk,discard=unmap", text(&image));
    let arguments = ["serve", "-x", "disk", "-k", "n.sock", "--monitor", "m.sock", "--drive", &drive];
    let exports = [
        "vhost-user-blk,id=v,node-name=disk,addr.type=unix,addr.path=v.sock,writable=on",
        "fuse,id=f,node-name=disk,mountpoint=disk.img,writable=on",
    ];
    let exports = exports.iter().flat_map(|export| ["--export", export]);
    let mut serving = Serving::start(folder.path(), &arguments.into_iter().chain(exports).collect::<Vec<_>>());
    let line = serving.line();
    assert!(line.starts_with("nbd+unix://"), "{line}");
    let mut monitor = Monitor::connect(&folder.path().join("m.sock"));

    let at = |name: &str| text(&folder.path().join(name)).to_owned();
    let vhost = [
        "-object".to_owned(),
        "memory-backend-memfd,id=mem,size=256M,share=on".to_owned(),
        "-machine".to_owned(),
        "memory-backend=mem".to_owned(),
        "-chardev".to_owned(),
        format!("socket,id=c,path={}", at("v.sock")),
        "-device".to_owned(),
        "vhost-user-blk-pci,chardev=c".to_owned(),
    ];
    let nvme = [
        "-drive".to_owned(),
        format!("file=nbd+unix:///disk?socket={},format=raw,if=none,id=d", at("n.sock")),
        "-device".to_owned(),
        "nvme,drive=d,serial=cowshed".to_owned(),
    ];
    let file = ["-drive".to_owned(), format!("file={},format=raw,if=virtio", at("disk.img"))];
    let doors: [(&[String], &str); 3] = [(&vhost, "vda"), (&nvme, "nvme0n1"), (&file, "vda")];
    let mut bytes = 16 * MIB;
    for (number, (devices, name)) in doors.into_iter().enumerate() {
        let devices: Vec<&str> = devices.iter().map(String::as_str).collect();
        let mut guest = Guest::boot(&files, &initrd, &devices);
        guest.await_words(&format!("GUEST: boot {} wrote on {name} of {} sectors", number + 1, bytes / 512));
        if number == 0 {
            // The guest runs on, and sees the new size.
            bytes *= 2;
            monitor.command("block_resize", json!({"node-name": "disk", "size": bytes}));
        }
        finish(guest, &(bytes / 512).to_string());
    }
    monitor.command("quit", json!({}));
    let log = serving.log();
    assert!(serving.wait().success(), "{log}");

    assert!(fs::read(&base).expect("a base") == before, "the base has changed");
    qemu.expect_clean(&image);
    for boot in 1..=3_u32 {
        let expected: String = (boot..=100_000).map(|number| format!("{number}\n")).collect();
        let said = file_of(&image, 0, &format!("/work/written.{boot}"));
        assert!(said.contains(&expected), "the file of boot {boot} is another one");
    }
}

/// A disk with a slot and two systems, as MBR partitions from 1, 2 and 18 MiB on.
fn make_halves(system: &Path, disk: &Path) {
    let system = fs::read(system).expect("a system");
    let file = File::create(disk).expect("a disk");
    file.set_len(40 * MIB).expect("a disk");
    let mut table = [0_u8; 512];
    for (number, (start, len)) in [(MIB, MIB), (2 * MIB, 16 * MIB), (18 * MIB, 16 * MIB)].into_iter().enumerate() {
        let entry = &mut table[446 + 16 * number..][..16];
        entry[4] = 0x83;
        entry[8..12].copy_from_slice(&((start / 512) as u32).to_le_bytes());
        entry[12..].copy_from_slice(&((len / 512) as u32).to_le_bytes());
    }
    table[510..].copy_from_slice(&[0x55, 0xaa]);
    file.write_all_at(&table, 0).expect("a table");
    file.write_all_at(b"A", MIB).expect("a slot");
    file.write_all_at(&system, 2 * MIB).expect("a system");
    file.write_all_at(&system, 18 * MIB).expect("a system");
}

/// Boots once; the guest must print the version that runs and its partition.
fn boot_half(files: &Path, initrd: &Path, folder: &Path, image: &Path, (says, word): (&str, &str)) {
    let drive = format!("file={},id=disk", text(image));
    let mut serving = Serving::start(folder, &["serve", "-x", "disk", "-k", "n.sock", "--drive", &drive]);
    serving.line();
    let uri = format!("nbd+unix:///disk?socket={}", text(&folder.join("n.sock")));
    let mut guest = Guest::boot(files, initrd, &["-drive", &format!("file={uri},format=raw,if=virtio")]);
    guest.await_words(says);
    finish(guest, word);
    serving.stop();
    Qemu::system().expect_clean(image);
}

#[test]
#[cfg(target_arch = "x86_64")]
fn a_guest_installs_its_other_half_and_boots_from_it() {
    let (files, folder) = (guest_files(), temp_dir());
    let system = make_system(&files, folder.path(), INSTALL);
    let base = folder.path().join("base.raw");
    make_halves(&system, &base);
    let before = fs::read(&base).expect("a base");
    let initrd = make_initrd(&files, folder.path());
    let boot = |image: &Path, says, word| boot_half(&files, &initrd, folder.path(), image, (says, word));
    let image = overlay(folder.path(), &base, "disk.qcow2");
    boot(&image, "GUEST: version 1 runs from /dev/vda2", "install");
    boot(&image, "GUEST: version 2 runs from /dev/vda3", "stay");
    assert!(file_of(&image, 2 * MIB, "/version").contains("1\n"), "the first half stays as it was");
    assert!(file_of(&image, 18 * MIB, "/version").contains("2\n"), "the second half is the new one");
    // The base is the recovery image: a new overlay on it begins anew.
    assert!(fs::read(&base).expect("a base") == before, "the base has changed");
    let recovery = overlay(folder.path(), &base, "recovery.qcow2");
    boot(&recovery, "GUEST: version 1 runs from /dev/vda2", "stay");
}
