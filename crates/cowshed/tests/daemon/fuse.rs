// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Exports of the type `fuse`, and `mount`, with the programs that people have: cp, dd, mkfs, qemu-img, Python.

use super::process::{COWSHED, Monitor, Serving, text};
use cowshed_testkit::programs::{run_to_code, tool};
use cowshed_testkit::qemu::temp_dir;
use cowshed_testkit::waiting::await_that;
use serde_json::json;
use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

const DISK_BYTES: u64 = 8 << 20;

pub(super) fn is_mounted(path: &Path) -> bool {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").expect("a list");
    mounts.lines().any(|line| line.split(' ').nth(4) == Some(text(path)))
}

/// A storage daemon with `image` as the node `d`, and its monitor.
pub(super) fn start(folder: &Path, image: &str) -> (Serving, Monitor) {
    let mut command = Command::new(COWSHED);
    command.arg0("qemu-storage-daemon").args(["--chardev", "socket,path=m.sock,server=on,wait=off,id=m"]);
    command.args(["--monitor", "chardev=m", "--blockdev", image]);
    let mut daemon = Serving::start_command(folder, command);
    let path = folder.join("m.sock");
    await_that("the monitor", || {
        assert!(daemon.child().try_wait().expect("a child").is_none(), "the daemon has ended: {}", daemon.log());
        std::os::unix::net::UnixStream::connect(&path).is_ok()
    });
    let monitor = Monitor::connect(&path);
    (daemon, monitor)
}

/// A new mount point, and the options of an export there.
pub(super) fn export(folder: &Path, name: &str, more: serde_json::Value) -> serde_json::Value {
    File::create(folder.join(name)).expect("a mount point");
    let mut options = json!({"type": "fuse", "id": name, "node-name": "d", "mountpoint": folder.join(name)});
    let members = options.as_object_mut().expect("an object");
    members.extend(more.as_object().expect("an object").clone());
    options
}

pub(super) const QCOW2: &str = "qcow2,node-name=d,discard=unmap,file.driver=file,file.filename=d.qcow2";

pub(super) fn qcow2(folder: &Path) {
    tool("qemu-img", &["create", "-q", "-f", "qcow2", text(&folder.join("d.qcow2")), &DISK_BYTES.to_string()]);
}

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).expect("the file opens")
}

fn errno<T: std::fmt::Debug>(result: std::io::Result<T>) -> i32 {
    result.expect_err("an error").raw_os_error().expect("a number")
}

/// Waits until the process of a `mount` in the background has ended.
fn wait_for_end(pid_file: &Path) {
    let number = std::fs::read_to_string(pid_file);
    // It removes the file at its end.
    if let Ok(number) = number {
        await_that("the end of the process", || !Path::new("/proc").join(number.trim()).exists());
    }
}

#[test]
fn mounted_image_works_with_mkfs_cp_dd_and_qemu_img() {
    let folder = temp_dir();
    let at = |name: &str| folder.path().join(name);
    qcow2(folder.path());
    File::create(at("m")).expect("a mount point");
    let pid = at("pid");
    tool(COWSHED, &["mount", "--writable", "--pidfile", text(&pid), text(&at("d.qcow2")), text(&at("m"))]);
    assert!(is_mounted(&at("m").canonicalize().expect("a path")));
    tool("mkfs.ext4", &["-q", "-F", text(&at("m"))]);
    tool("e2fsck", &["-fn", text(&at("m"))]);
    tool(
        "dd",
        &["if=/dev/urandom", &format!("of={}", text(&at("m"))), "bs=64k", "count=5", "seek=100", "conv=notrunc,fsync"],
    );
    tool("dd", &[&format!("if={}", text(&at("m"))), &format!("of={}", text(&at("direct"))), "bs=1M", "iflag=direct"]);
    tool("cp", &["--sparse=always", text(&at("m")), text(&at("copy"))]);
    tool("cmp", &[text(&at("m")), text(&at("copy"))]);
    tool("cmp", &[text(&at("direct")), text(&at("copy"))]);
    assert!(at("copy").metadata().expect("a file").blocks() * 512 < DISK_BYTES, "holes are holes");
    tool("qemu-img", &["compare", "-f", "raw", "-F", "raw", text(&at("m")), text(&at("copy"))]);
    tool(COWSHED, &["umount", text(&at("m"))]);
    assert!(!is_mounted(&at("m")));
    tool("qemu-img", &["check", "-q", text(&at("d.qcow2"))]);
    tool("qemu-img", &["compare", "-f", "qcow2", "-F", "raw", text(&at("d.qcow2")), text(&at("copy"))]);
    let said = run_to_code(COWSHED, &["umount", text(&at("m"))], &[1]);
    assert!(said.contains("is not mounted"), "{said}");
}

#[test]
fn a_file_has_holes_a_length_a_mode_and_times() {
    let folder = temp_dir();
    let folder = folder.path();
    qcow2(folder);
    tool("qemu-io", &["-c", "write -P 5 1M 64k", text(&folder.join("d.qcow2"))]);
    let (daemon, mut monitor) = start(folder, QCOW2);
    monitor.command("block-export-add", export(folder, "m", json!({"writable": true, "allow-other": "off"})));
    let path = folder.join("m");
    let file = open(&path);
    let seek = |from| rustix::fs::seek(&file, from).map_err(|error| error.raw_os_error());
    use rustix::fs::SeekFrom::{Data, Hole};
    assert_eq!([seek(Data(0)), seek(Hole(1 << 20)), seek(Hole(0))], [Ok(1 << 20), Ok((1 << 20) + 65536), Ok(0)]);
    assert_eq!([seek(Data(2 << 20)), seek(Hole(2 << 20)), seek(Data(DISK_BYTES))], [Err(6), Ok(2 << 20), Err(6)]);
    let status = path.metadata().expect("attributes");
    assert_eq!((status.mode(), status.len()), (0o100_600, DISK_BYTES));
    assert!((1..DISK_BYTES / 512).contains(&status.blocks()), "{}", status.blocks());
    // The end of the disk stays where it is.
    assert_eq!(file.write_at(&[1; 100], DISK_BYTES - 40).expect("a part"), 40);
    assert_eq!(errno(file.write_at(&[1], DISK_BYTES)), 28);
    assert_eq!(file.read_at(&mut [0; 100], DISK_BYTES - 40).expect("a part"), 40);
    file.set_len(DISK_BYTES + 4096).expect("a longer disk");
    assert_eq!(path.metadata().expect("attributes").len(), DISK_BYTES + 4096);
    let mut bytes = [9; 4096];
    file.read_exact_at(&mut bytes, DISK_BYTES).expect("the new part");
    assert_eq!(bytes, [0; 4096]);
    file.set_len(DISK_BYTES).expect("a shorter disk");
    assert_eq!(errno(file.set_len(DISK_BYTES + 1)), 22);
    assert_eq!(errno(file.set_len(1 << 62)), 27, "no image is as long");
    use rustix::fs::FallocateFlags as Flags;
    let allocate =
        |flags, offset, len| rustix::fs::fallocate(&file, flags, offset, len).map_err(|error| error.raw_os_error());
    file.write_all_at(&[7; 8192], 3 << 20).expect("a write");
    assert_eq!(allocate(Flags::PUNCH_HOLE | Flags::KEEP_SIZE, (3 << 20) + 512, 1024), Ok(()));
    assert_eq!(allocate(Flags::ZERO_RANGE, (3 << 20) + 4096, 4096), Ok(()));
    let mut bytes = [0; 8192];
    file.read_exact_at(&mut bytes, 3 << 20).expect("a read");
    assert_eq!((bytes[511], &bytes[512..1536], bytes[1536], &bytes[4096..]), (7, &[0; 1024][..], 7, &[0; 4096][..]));
    assert_eq!(allocate(Flags::empty(), 0, 4096), Err(95), "space is not set aside");
    assert_eq!(allocate(Flags::empty(), DISK_BYTES, 4096), Ok(()));
    assert_eq!(path.metadata().expect("attributes").len(), DISK_BYTES + 4096);
    let mode = |mode| std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode));
    assert!(mode(0o400).is_ok() && path.metadata().expect("attributes").mode() == 0o100_400);
    assert_eq!(errno(mode(0o640)), 1);
    mode(0o600).expect("its own mode");
    tool("touch", &["-d", "2001-02-03 04:05:06 UTC", text(&path)]);
    assert_eq!(path.metadata().expect("attributes").mtime(), 981_173_106);
    file.write_all_at(&[7; 10], 0).expect("a write");
    assert!(path.metadata().expect("attributes").mtime() > 1_700_000_000, "a write changes the time");
    // As a block device, and as QEMU's export of a fixed length.
    drop(OpenOptions::new().write(true).truncate(true).open(&path).expect("it opens"));
    assert_eq!(path.metadata().expect("attributes").len(), DISK_BYTES + 4096);
    monitor.command("block_resize", json!({"node-name": "d", "size": 2 * DISK_BYTES}));
    assert_eq!(file.metadata().expect("attributes").len(), 2 * DISK_BYTES);
    drop(file);
    daemon.stop();
    assert!(!is_mounted(&path), "the mount is left behind");
    tool("qemu-img", &["check", "-q", text(&folder.join("d.qcow2"))]);
}

#[test]
fn a_growable_export_grows_with_its_writes() {
    let folder = temp_dir();
    let folder = folder.path();
    qcow2(folder);
    let (daemon, mut monitor) = start(folder, QCOW2);
    monitor.command("block-export-add", export(folder, "m", json!({"writable": true, "growable": true})));
    let path = folder.join("m");
    let file = open(&path);
    file.write_all_at(&[3; 1000], DISK_BYTES - 10).expect("it grows");
    // Images of this format count in sectors.
    assert_eq!(path.metadata().expect("attributes").len(), DISK_BYTES + 1024);
    let threads: Vec<_> = (0..4u64)
        .map(|number| {
            let file = file.try_clone().expect("a descriptor");
            std::thread::spawn(move || {
                for turn in 0..20 {
                    let offset = 2 * DISK_BYTES + (turn * 4 + number) * 4096;
                    file.write_all_at(&[number as u8 + 1; 4096], offset).expect("it grows");
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
    assert_eq!(path.metadata().expect("attributes").len(), 2 * DISK_BYTES + 80 * 4096);
    let mut bytes = vec![0; 80 * 4096];
    file.read_exact_at(&mut bytes, 2 * DISK_BYTES).expect("a read");
    assert!(bytes.chunks(4096).enumerate().all(|(place, page)| page == [place as u8 % 4 + 1; 4096]));
    drop(file);
    daemon.stop();
    tool("qemu-img", &["check", "-q", text(&folder.join("d.qcow2"))]);
}

/// As QEMU's export: `> disk.raw` and `cp image.raw disk.raw` begin the disk anew.
#[test]
fn truncating_a_growable_export_empties_it() {
    let folder = temp_dir();
    let folder = folder.path();
    qcow2(folder);
    let (daemon, mut monitor) = start(folder, QCOW2);
    monitor.command("block-export-add", export(folder, "m", json!({"writable": true, "growable": true})));
    let path = folder.join("m");
    open(&path).write_all_at(&[3; 100_000], DISK_BYTES - 100_000).expect("a write");
    drop(OpenOptions::new().write(true).truncate(true).open(&path).expect("it opens"));
    assert_eq!(path.metadata().expect("attributes").len(), 0);
    drop(OpenOptions::new().write(true).truncate(true).open(&path).expect("it opens"));
    let image = vec![9; 3 << 20];
    std::fs::write(folder.join("image.raw"), &image).expect("a file");
    tool("cp", &[text(&folder.join("image.raw")), text(&path)]);
    assert!(std::fs::read(&path).expect("a file") == image);
    open(&path).set_len(DISK_BYTES).expect("it grows");
    let mut end = vec![1; 100_000];
    open(&path).read_exact_at(&mut end, DISK_BYTES - 100_000).expect("a read");
    assert!(end.iter().all(|byte| *byte == 0), "what was there before is gone");
    daemon.stop();
    tool("qemu-img", &["check", "-q", text(&folder.join("d.qcow2"))]);
}

/// `> disk.raw` by another process leaves descriptors and mappings of a disk of a fixed length as they are.
#[test]
fn truncating_a_fixed_length_file_keeps_its_data() {
    let folder = temp_dir();
    let folder = folder.path();
    qcow2(folder);
    tool("qemu-io", &["-c", "write -P 5 0 64k", text(&folder.join("d.qcow2"))]);
    let (daemon, mut monitor) = start(folder, QCOW2);
    monitor.command("block-export-add", export(folder, "m", json!({"writable": true})));
    let path = folder.join("m");
    let script = "import errno, mmap, os, sys
path = sys.argv[1]
fd = os.open(path, os.O_RDWR)
appends = os.open(path, os.O_WRONLY | os.O_APPEND)
shared = mmap.mmap(fd, 1 << 20)
assert shared[0:4] == b'\\x05' * 4
shared[65536:65540] = b'dirt'
for _ in range(3):
    os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))
    try:
        sys.exit('appended: %d' % os.write(appends, b'more'))
    except OSError as error:
        assert error.errno == errno.ENOSPC, error
    os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))
    assert os.lseek(fd, 0, os.SEEK_END) == 8 << 20
    os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))
    assert shared[524288:524292] == bytes(4)
    assert shared[65536:65540] == b'dirt'
shared.flush()
";
    tool("python3", &["-c", script, text(&path)]);
    let file = open(&path);
    let mut bytes = [0; 4];
    file.read_exact_at(&mut bytes, 65536).expect("a read");
    assert_eq!(&bytes, b"dirt");
    // A descriptor changes the length still.
    file.set_len(0).expect("a shorter disk");
    assert_eq!(path.metadata().expect("attributes").len(), 0);
    drop(file);
    daemon.stop();
    tool("qemu-img", &["check", "-q", text(&folder.join("d.qcow2"))]);
}

/// A write that meets a truncation comes before it or after it.
#[test]
fn writes_to_a_growable_export_go_on_beside_truncations() {
    let folder = temp_dir();
    let folder = folder.path();
    qcow2(folder);
    let (daemon, mut monitor) = start(folder, QCOW2);
    monitor.command("block-export-add", export(folder, "m", json!({"writable": true, "growable": true})));
    let path = folder.join("m");
    let writers: Vec<_> = (0..3u64)
        .map(|number| {
            let file = open(&path);
            std::thread::spawn(move || {
                for turn in 0..300 {
                    file.write_all_at(&[7; 8192], (turn % 50 * 3 + number) * 8192).expect("it grows");
                }
            })
        })
        .collect();
    while !writers.iter().all(std::thread::JoinHandle::is_finished) {
        drop(OpenOptions::new().write(true).truncate(true).open(&path).expect("it opens"));
    }
    writers.into_iter().for_each(|writer| writer.join().expect("no panic"));
    daemon.stop();
    tool("qemu-img", &["check", "-q", text(&folder.join("d.qcow2"))]);
}

#[test]
fn an_encrypted_image_is_mounted_with_its_secret() {
    let folder = temp_dir();
    let at = |name: &str| folder.path().join(name);
    std::fs::write(at("pw"), "abc").expect("a secret");
    File::create(at("m")).expect("a mount point");
    let (secret, image, point) = (format!("secret,id=s,file={}", text(&at("pw"))), at("e.qcow2"), at("m"));
    let encryption = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10";
    tool("qemu-img", &["create", "-q", "-f", "qcow2", "--object", &secret, "-o", encryption, text(&image), "1M"]);
    let options = format!("driver=qcow2,encrypt.key-secret=s,file.filename={}", text(&image));
    tool("qemu-io", &["--object", &secret, "-c", "write -P 5 0 64k", "--image-opts", &options]);
    tool(COWSHED, &["mount", "--object", &secret, "--image-opts", &options, text(&point)]);
    let mut bytes = [0; 512];
    File::open(&point).and_then(|file| file.read_exact_at(&mut bytes, 4096)).expect("a read");
    assert_eq!(bytes, [5; 512]);
    tool(COWSHED, &["umount", text(&point)]);
}

#[test]
fn one_partition_is_mounted() {
    let folder = temp_dir();
    let at = |name: &str| folder.path().join(name);
    let raw = File::create(at("d.raw")).expect("a file");
    raw.set_len(DISK_BYTES).expect("a length");
    let mut table = [0; 512];
    for (index, (kind, first, count)) in
        [(0x83u8, 2048u32, 4096u32), (0x83, 6144, 8192), (0x83, 16_000, 4096)].into_iter().enumerate()
    {
        let entry = &mut table[446 + 16 * index..][..16];
        entry[4] = kind;
        entry[8..12].copy_from_slice(&first.to_le_bytes());
        entry[12..].copy_from_slice(&count.to_le_bytes());
    }
    table[510..].copy_from_slice(&[0x55, 0xaa]);
    raw.write_all_at(&table, 0).expect("a write");
    raw.write_all_at(&[1; 512], 2048 * 512).expect("a write");
    let image = text(&at("d.qcow2")).to_owned();
    tool("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", text(&at("d.raw")), &image]);
    tool("qemu-img", &["snapshot", "-c", "before", &image]);
    File::create(at("m")).expect("a mount point");
    let point = text(&at("m")).to_owned();
    tool(COWSHED, &["mount", "-w", "--partition", "2", &image, &point]);
    let file = open(&at("m"));
    assert_eq!(file.metadata().expect("attributes").len(), 8192 * 512);
    tool("mkfs.ext4", &["-q", "-F", &point]);
    file.write_all_at(&[7; 512], 8191 * 512).expect("a write");
    assert_eq!(errno(file.write_at(&[7; 512], 8192 * 512)), 28);
    assert!(file.set_len(DISK_BYTES).is_err(), "its place is fixed");
    drop(file);
    tool("e2fsck", &["-fn", &point]);
    tool(COWSHED, &["umount", &point]);
    tool("qemu-img", &["check", "-q", &image]);
    tool("qemu-io", &["-c", "read -P 1 1M 512", "-c", "read -P 7 7339520 512", "-c", "read -P 0 7340032 512", &image]);
    tool(COWSHED, &["mount", "-l", "before", "-P", "2", &image, &point]);
    assert!(std::fs::read(at("m")).expect("a file").iter().all(|byte| *byte == 0), "as the snapshot has it");
    tool(COWSHED, &["umount", &point]);
    tool(COWSHED, &["mount", "--untrusted", "-P", "1", &image, &point]);
    assert_eq!(std::fs::read(at("m")).expect("a file")[..512], [1; 512]);
    tool(COWSHED, &["umount", &point]);
    for (number, words) in [
        ("3", "partition 3 is not inside of the disk (8388608 bytes)"),
        ("4", "the disk has no partition 4"),
        ("5", "the disk has no partition 5"),
        ("0", "partitions are numbered from 1"),
    ] {
        let said = run_to_code(COWSHED, &["mount", "-P", number, &image, &point], &[1]);
        assert!(said.contains(words) && said.contains("d.qcow2") && said.lines().count() == 1, "{said}");
    }
    tool("qemu-img", &["create", "-q", "-f", "qcow2", text(&at("e.qcow2")), "1M"]);
    let said = run_to_code(COWSHED, &["mount", "-P", "1", text(&at("e.qcow2")), &point], &[1]);
    assert!(said.contains("the disk has no partition table"), "{said}");
    assert!(!is_mounted(&at("m")));
}

#[test]
fn killed_daemon_leaves_no_mount_and_keeps_synced_data() {
    let folder = temp_dir();
    let folder = folder.path();
    qcow2(folder);
    let (daemon, mut monitor) = start(folder, QCOW2);
    monitor.command("block-export-add", export(folder, "m", json!({"writable": true})));
    monitor.command("block-export-add", export(folder, "n", json!({})));
    let file = open(&folder.join("m"));
    file.write_all_at(&[8; 1 << 20], 1 << 20).expect("a write");
    file.sync_all().expect("a sync");
    assert!(is_mounted(&folder.join("m")) && is_mounted(&folder.join("n")));
    daemon.signal("KILL");
    let _ = daemon.wait();
    for name in ["m", "n"] {
        await_that("the unmounting", || !is_mounted(&folder.join(name)));
        assert_eq!(folder.join(name).metadata().expect("the mount point").len(), 0);
    }
    // The kernel lets go of the device a moment after the process: a request in between is aborted.
    let gone = errno(file.read_at(&mut [0; 10], 0));
    assert!([103, 107].contains(&gone), "the file is gone for those who have it open: {gone}");
    tool("qemu-io", &["-c", "read -P 8 1M 1M", text(&folder.join("d.qcow2"))]);
    tool("qemu-img", &["check", "-q", text(&folder.join("d.qcow2"))]);
}

/// The next command of a script has the image for itself.
#[test]
fn unmounting_waits_for_the_image_and_its_users() {
    let folder = temp_dir();
    let at = |name: &str| folder.path().join(name);
    File::create(at("m")).expect("a mount point");
    for format in ["vmdk", "qed", "qcow2", "vhdx"] {
        tool("qemu-img", &["create", "-q", "-f", format, text(&at("d")), "64M"]);
        for round in 0..4u64 {
            tool(COWSHED, &["mount", "-w", "-f", format, text(&at("d")), text(&at("m"))]);
            let said = run_to_code(COWSHED, &["mount", "-f", format, text(&at("d")), text(&at("m"))], &[1]);
            assert!(said.contains("m: shows another disk already"), "{said}");
            let file = open(&at("m"));
            for index in 0..64u64 {
                file.write_all_at(&[7; 5000], (index << 20) + (round << 16)).expect("a write");
            }
            let said = run_to_code(COWSHED, &["umount", text(&at("m"))], &[1]);
            assert!(said.contains("Device or resource busy"), "{said}");
            assert!(is_mounted(&at("m").canonicalize().expect("a path")));
            drop(file);
            // A program that another test starts at this moment has the file until its execve(2).
            await_that("the end of the mount", || {
                let output = Command::new(COWSHED).args(["umount", text(&at("m"))]).output().expect("it runs");
                let said = String::from_utf8_lossy(&output.stderr).into_owned();
                assert!(output.status.success() || said.contains("Device or resource busy"), "{said}");
                output.status.success()
            });
            tool("qemu-img", &["check", "-q", "-f", format, text(&at("d"))]);
        }
        std::fs::remove_file(at("d")).expect("the image goes");
    }
    std::fs::create_dir(at("folder")).expect("a folder");
    let said = run_to_code(COWSHED, &["mount", text(&at("m")), text(&at("folder"))], &[1]);
    assert!(said.starts_with(&format!("cowshed: {}", text(&at("folder")))), "{said}");
    // A file in use is unmounted on explicit request.
    std::fs::write(at("d"), [5; 4096]).expect("an image");
    let pid = at("pid");
    tool(COWSHED, &["mount", "-w", "-f", "raw", "--pidfile", text(&pid), text(&at("d")), text(&at("m"))]);
    let file = open(&at("m"));
    tool(COWSHED, &["umount", "--lazy", text(&at("m"))]);
    file.write_all_at(&[6; 512], 0).expect("it is there for those who have it");
    drop(file);
    wait_for_end(&pid);
    assert_eq!(std::fs::read(at("d")).expect("an image")[..512], [6; 512]);
}

#[test]
fn exports_come_and_go_and_unmounting_ends_one() {
    let folder = temp_dir();
    let folder = folder.path();
    std::fs::write(folder.join("d.raw"), vec![3; 1 << 20]).expect("an image");
    let (daemon, mut monitor) = start(folder, "file,node-name=d,filename=d.raw");
    monitor.command("block-export-add", export(folder, "m", json!({})));
    let exports = monitor.command("query-block-exports", json!({}));
    assert_eq!(exports, json!([{"id": "m", "type": "fuse", "node-name": "d", "shutting-down": false}]));
    let refused = |monitor: &mut Monitor, point: &str| {
        let options = json!({"type": "fuse", "id": "x", "node-name": "d", "mountpoint": point});
        monitor.refusal("block-export-add", &options)
    };
    let path = folder.join("m");
    std::os::unix::fs::symlink("m", folder.join("link")).expect("a link");
    for name in [text(&path), &format!("{}/./m", text(folder)), text(&folder.join("link"))] {
        assert_eq!(refused(&mut monitor, name), format!("There already is a FUSE export on '{name}'"));
    }
    assert_eq!(refused(&mut monitor, text(folder)), format!("'{}' is not a regular file", text(folder)));
    assert_eq!(refused(&mut monitor, "/nowhere/m"), "Failed to stat '/nowhere/m': No such file or directory");
    let node = json!({"driver": "file", "node-name": "own", "filename": path});
    let words = monitor.refusal("blockdev-add", &node);
    assert!(words.contains("Resource deadlock"), "{words}");
    // It is read-only for root, too.
    let denied = OpenOptions::new().write(true).open(&path).expect_err("read-only");
    assert_eq!(denied.kind(), ErrorKind::ReadOnlyFilesystem);
    let file = File::open(&path).expect("it opens");
    let mut bytes = [0; 100];
    file.read_exact_at(&mut bytes, 5000).expect("a read");
    assert_eq!(bytes, [3; 100]);
    let stats = monitor.command("query-block-exports", json!({}));
    assert_eq!(stats.as_array().map(Vec::len), Some(1));
    // Programs that have it open keep no export.
    monitor.command("block-export-del", json!({"id": "m"}));
    assert_eq!(errno(file.read_at(&mut [0; 10], 0)), 107);
    assert!(!is_mounted(&path));
    monitor.command("block-export-add", export(folder, "n", json!({})));
    tool(COWSHED, &["umount", text(&folder.join("n"))]);
    await_that("the end of the export", || monitor.command("query-block-exports", json!({})) == json!([]));
    let (stats, size) = (monitor.command("query-named-block-nodes", json!({})), 1 << 20);
    assert_eq!(stats[0]["image"]["virtual-size"], size, "{stats}");
    daemon.stop();
}

#[test]
fn errors_of_the_disk_reach_the_caller() {
    let folder = temp_dir();
    let folder = folder.path();
    std::fs::write(folder.join("d.raw"), vec![3; 1 << 20]).expect("an image");
    let rule = |number: u32, event: &str, errno: u32| {
        format!(
            ",inject-error.{number}.event={event},inject-error.{number}.errno={errno},inject-error.{number}.once=on"
        )
    };
    let image = format!(
        "raw,node-name=d,file.driver=blkdebug,file.image.driver=file,file.image.filename=d.raw{}",
        [(0, "read_aio", 5), (1, "write_aio", 28), (2, "flush_to_disk", 5)]
            .map(|(number, event, errno)| rule(number, event, errno).replace(",inject", ",file.inject"))
            .concat()
    );
    let (daemon, mut monitor) = start(folder, &image);
    monitor.command("block-export-add", export(folder, "m", json!({"writable": true})));
    let file = open(&folder.join("m"));
    assert_eq!(errno(file.read_at(&mut [0; 512], 0)), 5);
    assert_eq!(file.read_at(&mut [0; 512], 0).expect("the next one"), 512);
    assert_eq!(errno(file.write_at(&[0; 512], 0)), 28);
    assert_eq!(file.write_at(&[4; 512], 0).expect("the next one"), 512);
    assert_eq!(errno(file.sync_all()), 5);
    drop(file);
    daemon.signal("TERM");
    // The sync that failed is no secret at the end.
    let _ = daemon.wait();
    assert!(!is_mounted(&folder.join("m")));
}

#[test]
fn mappings_show_and_change_the_disk() {
    let folder = temp_dir();
    let at = |name: &str| folder.path().join(name);
    qcow2(folder.path());
    File::create(at("m")).expect("a mount point");
    let pid = at("pid");
    tool(COWSHED, &["mount", "-w", "--pidfile", text(&pid), text(&at("d.qcow2")), text(&at("m"))]);
    // The second process still has its mapping when the file is unmounted.
    let script = "import mmap, os, subprocess, sys
path, cowshed = sys.argv[1:]
fd = os.open(path, os.O_RDWR)
os.pwrite(fd, b'a' * 4096, 8192)
shared = mmap.mmap(fd, 1 << 20)
assert shared[8192:8202] == b'a' * 10
private = mmap.mmap(fd, 1 << 20, mmap.MAP_PRIVATE)
assert private[8192:8202] == b'a' * 10
shared[65536:65546] = b'b' * 10
shared.flush()
assert os.pread(fd, 10, 65536) == b'b' * 10
shared[131072:131082] = b'c' * 10
subprocess.run([cowshed, 'umount', '--lazy', path], check=True)
";
    tool("python3", &["-c", script, text(&at("m")), COWSHED]);
    wait_for_end(&pid);
    let image = text(&at("d.qcow2")).to_owned();
    for (pattern, offset) in [("0x61", "8192"), ("0x62", "65536"), ("0x63", "131072")] {
        tool("qemu-io", &["-c", &format!("read -P {pattern} {offset} 10"), &image]);
    }
}

#[test]
fn snapshots_are_mounted_for_reading() {
    let folder = temp_dir();
    let at = |name: &str| folder.path().join(name);
    qcow2(folder.path());
    let image = text(&at("d.qcow2")).to_owned();
    tool("qemu-io", &["-c", "write -P 1 0 64k", &image]);
    tool("qemu-img", &["snapshot", "-c", "before", &image]);
    tool("qemu-io", &["-c", "write -P 2 0 64k", &image]);
    File::create(at("m")).expect("a mount point");
    tool(COWSHED, &["mount", "--snapshot", "before", &image, text(&at("m"))]);
    let mut bytes = [0; 100];
    File::open(at("m")).and_then(|file| file.read_exact_at(&mut bytes, 0)).expect("a read");
    assert_eq!(bytes, [1; 100]);
    tool(COWSHED, &["umount", text(&at("m"))]);
    let said = run_to_code(COWSHED, &["mount", &image, &image], &[1]);
    assert!(said.contains("is the image itself"), "{said}");
    let said = run_to_code(COWSHED, &["mount", &image, text(&at("missing"))], &[1]);
    assert!(said.contains("missing") && said.contains("No such file or directory"), "{said}");
    let said = run_to_code(COWSHED, &["mount", "--snapshot", "after", &image, text(&at("m"))], &[1]);
    assert!(said.contains("after"), "{said}");
    assert!(!is_mounted(&at("m")));
}

/// Runs a script of the shell in mounts of its own, where the user `nobody` may open /dev/fuse, as on other machines.
fn in_own_mounts(folder: &Path, script: &str) -> String {
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o777)).expect("a folder for all");
    let prepare = "set -e; cd \"$0\"
        # Copies of other tests' mounts would keep these alive.
        for other in $(awk '/ - fuse.cowshed /{print $5}' /proc/self/mountinfo); do umount -l $other; done
        mkdir dev; mount -t tmpfs none dev; mknod dev/fuse c 10 229; chmod 666 dev/fuse; mount --bind dev/fuse /dev/fuse";
    let script = format!("{prepare}\n{script}");
    let arguments = ["-m", "sh", "-c", &script, text(folder), COWSHED];
    run_to_code("unshare", &arguments, &[0])
}

#[test]
#[ignore = "needs root"]
fn users_mount_by_fusermount_and_are_left_alone() {
    let folder = temp_dir();
    let folder = folder.path();
    qcow2(folder);
    File::create(folder.join("m")).expect("a mount point");
    for name in ["m", "d.qcow2"] {
        std::os::unix::fs::chown(folder.join(name), Some(65534), Some(65534)).expect("an owner");
    }
    let program = "cp \"$1\" cowshed; chmod 755 cowshed";
    let script = format!(
        "{program}\nas() {{ setpriv --reuid 65534 --regid 65534 --clear-groups \"$@\"; }}
        as ./cowshed mount -w --pidfile pid d.qcow2 m
        grep ' - fuse.cowshed ' /proc/self/mountinfo
        as dd if=/dev/zero of=m bs=4k count=1 conv=notrunc 2>&1
        as cat m | wc -c
        ! cat m > /dev/null 2>&1
        kill -KILL $(cat pid)
        while grep -q ' - fuse.cowshed ' /proc/self/mountinfo; do sleep 0.05; done
        as ./cowshed mount d.qcow2 m
        as ./cowshed umount m
        ! grep ' - fuse.cowshed ' /proc/self/mountinfo"
    );
    let said = in_own_mounts(folder, &script);
    assert!(said.contains("user_id=65534") && said.contains(&DISK_BYTES.to_string()), "{said}");
    let script = format!(
        "{program}\nchmod 600 dev/fuse\n! setpriv --reuid 65534 --regid 65534 --clear-groups ./cowshed mount d.qcow2 m"
    );
    std::fs::remove_dir(folder.join("dev")).expect("an empty folder");
    let said = in_own_mounts(folder, &script);
    assert!(said.contains("/dev/fuse") && said.contains("Permission denied"), "{said}");
}

/// A folder of devices without that of FUSE, as on machines without the driver.
#[test]
fn a_machine_without_fuse_is_told_how_to_get_it() {
    let folder = temp_dir();
    qcow2(folder.path());
    File::create(folder.path().join("m")).expect("a mount point");
    let script = "cd \"$0\" && mkdir -p dev && mount -t tmpfs none dev
        for name in null zero full random urandom; do touch dev/$name; mount --bind /dev/$name dev/$name; done
        mount --rbind dev /dev && exec \"$1\" ";
    for (command, words) in [
        ("mount d.qcow2 m", "/dev/fuse: there is no FUSE on this machine (modprobe fuse): No such file or directory"),
        (
            "qemu-storage-daemon --blockdev qcow2,node-name=d,file.driver=file,file.filename=d.qcow2 \
             --export fuse,id=e,node-name=d,mountpoint=m",
            "Failed to mount FUSE session to export: /dev/fuse: No such file or directory",
        ),
    ] {
        let script = format!("{script}{command}");
        let said = run_to_code("unshare", &["-rm", "sh", "-c", &script, text(folder.path()), COWSHED], &[1]);
        assert!(said.contains(words) && said.lines().count() == 1, "{said}");
    }
    tool("qemu-io", &["-c", "write 0 512", text(&folder.path().join("d.qcow2"))]);
}

#[test]
fn a_user_namespace_mounts_by_itself() {
    let folder = temp_dir();
    let at = |name: &str| folder.path().join(name);
    qcow2(folder.path());
    File::create(at("m")).expect("a mount point");
    let script = "cd \"$0\" && \"$1\" mount -w --pidfile pid d.qcow2 m && head -c 100 /dev/zero | tr '\\0' x | dd of=m conv=notrunc status=none \
                  && \"$1\" umount m && while [ -e pid ]; do sleep 0.02; done";
    tool("unshare", &["-rm", "sh", "-c", script, text(folder.path()), COWSHED]);
    tool("qemu-io", &["-c", "read -P 0x78 0 100", text(&at("d.qcow2"))]);
}
