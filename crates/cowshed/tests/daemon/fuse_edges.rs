// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Exports of the type `fuse`: figures of the file system, other users, the foreground, and a file that covers its own image.

use super::fuse::{QCOW2, export, is_mounted, qcow2, start};
use super::process::{COWSHED, Serving, text};
use cowshed_testkit::programs::{run_to_code, tool};
use cowshed_testkit::qemu::temp_dir;
use cowshed_testkit::waiting::await_that;
use serde_json::json;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

#[test]
fn df_shows_the_space_that_the_image_takes() {
    let folder = temp_dir();
    let folder = folder.path();
    qcow2(folder);
    let (daemon, mut monitor) = start(folder, QCOW2);
    monitor.command("block-export-add", export(folder, "m", json!({"writable": true})));
    let file = File::options().read(true).write(true).open(folder.join("m")).expect("it opens");
    let figures = || {
        let figures = rustix::fs::statvfs(folder.join("m")).expect("figures");
        let (blocks, size) = (file.metadata().expect("attributes").blocks(), figures.f_blocks * figures.f_frsize);
        assert_eq!((size, figures.f_bfree), (8 << 20, figures.f_bavail));
        let used = (figures.f_blocks - figures.f_bfree) * figures.f_frsize;
        assert_eq!(used, (blocks * 512).next_multiple_of(figures.f_frsize), "as `du` has it");
        used
    };
    let before = figures();
    file.write_all_at(&vec![7; 2 << 20], 1 << 20).and_then(|()| file.sync_all()).expect("a write");
    let after = figures();
    assert!((2 << 20..=3 << 20).contains(&(after - before)), "{before}, then {after}");
    drop(file);
    daemon.stop();
}

/// The file has whole sectors, and new images of these formats are no multiple of one.
#[test]
fn images_are_made_in_a_growable_file() {
    let folder = temp_dir();
    let folder = folder.path();
    qcow2(folder);
    let (daemon, mut monitor) = start(folder, QCOW2);
    monitor.command("block-export-add", export(folder, "m", json!({"writable": true, "growable": true})));
    let file = folder.join("m");
    for format in ["qcow2", "qcow", "vmdk"] {
        run_to_code(COWSHED, &["create", "--force", "-q", "-f", format, text(&file), "20M"], &[0]);
        tool("qemu-io", &["-f", format, "-c", "write -P 7 5M 64k", "-c", "read -P 7 5M 64k", text(&file)]);
        File::options().write(true).truncate(true).open(&file).expect("it is emptied");
    }
    daemon.stop();
}

/// A second disk on one path would hide the first.
#[test]
fn mount_point_of_another_daemon_is_refused() {
    let folders = [temp_dir(), temp_dir()];
    folders.iter().for_each(|folder| qcow2(folder.path()));
    let [(one, mut monitor), (two, mut other)] = [0, 1].map(|number: usize| start(folders[number].path(), QCOW2));
    monitor.command("block-export-add", export(folders[0].path(), "m", json!({"writable": true})));
    let point = folders[0].path().join("m").canonicalize().expect("a path");
    let add = json!({"type": "fuse", "id": "m", "node-name": "d", "mountpoint": point});
    assert_eq!(other.refusal("block-export-add", &add), format!("'{}' shows another disk already", point.display()));
    two.stop();
    assert_eq!(std::fs::metadata(&point).expect("it is served").len(), 8 << 20);
    one.stop();
    assert!(!is_mounted(&point));
}

/// The path shows the disk while the export runs, and the image itself before and afterwards.
#[test]
fn a_file_covers_the_image_that_it_shows() {
    let folder = temp_dir();
    let folder = folder.path();
    qcow2(folder);
    let image = folder.join("d.qcow2");
    let (daemon, mut monitor) = start(folder, QCOW2);
    monitor.command(
        "block-export-add",
        json!({"type": "fuse", "id": "m", "node-name": "d", "mountpoint": image, "writable": true}),
    );
    let file = File::options().read(true).write(true).open(&image).expect("it opens");
    assert_eq!(file.metadata().expect("attributes").len(), 8 << 20);
    file.write_all_at(&[7; 65536], 1 << 20).and_then(|()| file.sync_all()).expect("a write");
    let mut bytes = [0; 4];
    file.read_exact_at(&mut bytes, 0).expect("a read");
    assert_eq!(bytes, [0; 4], "no header of qcow2");
    drop(file);
    daemon.stop();
    assert!(!is_mounted(&image));
    tool("qemu-img", &["check", "-q", text(&image)]);
    tool("qemu-io", &["-c", "read -P 7 1M 64k", text(&image)]);
}

/// A read that waits for a truncation gets the bytes up to the new end, as of any file.
#[test]
fn reads_beside_truncations_end_with_the_file() {
    let folder = temp_dir();
    let folder = folder.path();
    std::fs::write(folder.join("d.raw"), vec![7; 8 << 20]).expect("an image");
    let (daemon, mut monitor) = start(folder, "raw,node-name=d,file.driver=file,file.filename=d.raw");
    monitor.command("block-export-add", export(folder, "m", json!({"writable": true, "growable": true})));
    let file = File::options().read(true).write(true).open(folder.join("m")).expect("it opens");
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for reader in 0..4_u64 {
            let (is_over, folder) = (&is_over, &folder);
            scope.spawn(move || {
                // Past the page cache: each read reaches the server.
                let direct = rustix::fs::OFlags::DIRECT.bits().cast_signed();
                let open = File::options().read(true).custom_flags(direct).open(folder.join("m"));
                let (file, mut bytes) = (open.expect("it opens"), vec![0; 64 << 10]);
                while !is_over.load(Ordering::Relaxed) {
                    let count = file.read_at(&mut bytes, (8 << 20) - (reader + 1) * 65536 - 512).expect("no error");
                    assert!(count.is_multiple_of(512), "{count}");
                }
            });
        }
        for _ in 0..200 {
            file.set_len(4 << 20).and_then(|()| file.set_len(8 << 20)).expect("truncations");
        }
        is_over.store(true, Ordering::Relaxed);
    });
    drop(file);
    daemon.stop();
}

#[test]
fn partitions_of_a_gpt_and_logical_ones_are_mounted() {
    let folder = temp_dir();
    let at = |name: &str| text(&folder.path().join(name)).to_owned();
    File::create(at("m")).expect("a mount point");
    // Sectors: where each begins, and how many it has.
    let tables = [
        ("gpt", "label: gpt\n2048,2048\n8192,4096\n", ("2", 8192_u64, 4096_u64)),
        ("dos", "label: dos\n2048,2048\n4096,28672,5\n6144,2048\n10240,4096\n", ("6", 10240, 4096)),
    ];
    for (label, layout, (number, first, count)) in tables {
        let image = at(label);
        std::fs::write(&image, vec![0; 16 << 20]).expect("an image");
        std::fs::write(at("layout"), layout).expect("a layout");
        tool("sh", &["-c", "sfdisk -q --no-reread \"$0\" < \"$1\"", &image, &at("layout")]);
        tool("qemu-io", &["-f", "raw", "-c", &format!("write -P 5 {} {}", first * 512, count * 512), &image]);
        tool(COWSHED, &["mount", "-w", "-f", "raw", "--partition", number, &image, &at("m")]);
        assert!(std::fs::read(at("m")).expect("a file") == vec![5; count as usize * 512], "{label}");
        let file = File::options().write(true).open(at("m")).expect("it opens");
        file.write_all_at(&[6; 512], (count - 1) * 512).expect("a write");
        assert!(file.write_at(&[6; 512], count * 512).is_err(), "{label}: behind its end");
        drop(file);
        tool(COWSHED, &["umount", &at("m")]);
        let disk = std::fs::read(&image).expect("the disk");
        let end = (first + count) as usize * 512;
        assert!(disk[end - 512..end] == [6; 512] && disk[end] == 0, "{label}");
        run_to_code(COWSHED, &["mount", "-f", "raw", "--partition", "9", &image, &at("m")], &[1]);
    }
}

/// The time and the memory of opening don't depend on the length of the disk.
#[test]
fn the_longest_disk_is_mounted_at_once() {
    let folder = temp_dir();
    let at = |name: &str| text(&folder.path().join(name)).to_owned();
    tool("qemu-img", &["create", "-q", "-f", "qcow2", "-o", "cluster_size=2M", &at("d.qcow2"), "16T"]);
    File::create(at("m")).expect("a mount point");
    // On a machine that does nothing else it takes 33 ms.
    let begun = Instant::now();
    tool(COWSHED, &["mount", &at("d.qcow2"), &at("m")]);
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    assert_eq!(std::fs::metadata(at("m")).expect("attributes").len(), 16 << 40);
    tool(COWSHED, &["umount", &at("m")]);
}

#[test]
fn a_mounted_file_has_as_many_threads_as_wanted() {
    let folder = temp_dir();
    let folder = folder.path();
    qcow2(folder);
    File::create(folder.join("m")).expect("a mount point");
    for count in [1, 3] {
        let count_text = count.to_string();
        let arguments = ["mount", "--foreground", "--queues", &count_text, "d.qcow2", "m"];
        let mut mount = Serving::start(folder, &arguments);
        await_that("the mount", || is_mounted(&folder.join("m")));
        let tasks = format!("/proc/{}/task", mount.child().id());
        await_that("the threads", || {
            let tasks = std::fs::read_dir(&tasks).expect("threads");
            let names = tasks.map(|task| std::fs::read_to_string(task.expect("a thread").path().join("comm")));
            names.filter(|name| name.as_ref().is_ok_and(|name| name.starts_with("fuse-"))).count() == count
        });
        mount.stop();
    }
}

#[test]
fn a_mount_in_the_foreground_ends_by_its_keys() {
    let folder = temp_dir();
    let folder = folder.path();
    qcow2(folder);
    File::create(folder.join("m")).expect("a mount point");
    for signal in ["INT", "TERM"] {
        let mut mount = Serving::start(folder, &["mount", "--foreground", "--writable", "d.qcow2", "m"]);
        await_that("the mount", || is_mounted(&folder.join("m")));
        assert!(mount.child().try_wait().expect("a child").is_none(), "it stays: {}", mount.log());
        std::fs::OpenOptions::new()
            .write(true)
            .open(folder.join("m"))
            .and_then(|file| file.write_all_at(&[7; 512], 0))
            .expect("a write");
        mount.signal(signal);
        let log = mount.log();
        assert!(mount.wait().success(), "{log}");
        assert!(!is_mounted(&folder.join("m")));
        tool("qemu-io", &["-c", "read -P 7 0 512", text(&folder.join("d.qcow2"))]);
    }
}

#[test]
#[ignore = "needs root"]
fn other_users_read_where_they_are_let_in() {
    let folder = temp_dir();
    let folder = folder.path();
    qcow2(folder);
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755)).expect("a folder for all");
    let (daemon, mut monitor) = start(folder, QCOW2);
    // Another user's way to the files.
    let read = |name: &str, codes: &[i32]| {
        let input = format!("if={}", text(&folder.join(name)));
        let command =
            ["--reuid", "65534", "--regid", "65534", "--clear-groups", "dd", &input, "of=/dev/null", "count=1"];
        run_to_code("setpriv", &command, codes)
    };
    for (name, allow, lets_in) in [("on", "on", true), ("off", "off", false), ("auto", "auto", true)] {
        monitor.command("block-export-add", export(folder, name, json!({"writable": true, "allow-other": allow})));
        let path = folder.join(name);
        let said = read(name, &[1]);
        assert!(said.contains("Permission denied"), "{name}: a mode of the owner alone: {said}");
        let for_all = std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644));
        assert_eq!(for_all.is_ok(), lets_in, "{name}: {for_all:?}");
        if lets_in {
            assert!(read(name, &[0]).contains("512 bytes"), "{name}");
        }
        monitor.command("block-export-del", json!({"id": name}));
    }
    daemon.stop();
}
