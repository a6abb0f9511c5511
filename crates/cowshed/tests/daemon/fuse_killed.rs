// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Exports of the type `fuse` whose disk never answers, and programs there that are killed.

use super::faults::{arm, disarm, start};
use super::fuse::{QCOW2, export, is_mounted, qcow2};
use super::process::{COWSHED, Killed, Monitor, Serving, text};
use cowshed_testkit::programs::{run_to_code, tool};
use cowshed_testkit::qemu::temp_dir;
use cowshed_testkit::waiting::await_that;
use serde_json::json;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};

fn spawn(command: &mut Command) -> Killed {
    Killed(command.stdin(Stdio::null()).spawn().expect("the program runs"))
}

/// `dd` of this much of the file `m`, from its start.
fn reader(folder: &Path, bytes: &str) -> Killed {
    let input = format!("if={}", text(&folder.join("m")));
    let bytes = format!("bs={bytes}");
    spawn(Command::new("dd").args([&input, "of=/dev/null", &bytes, "count=1", "status=none"]))
}

/// A program that heeds the signals of a terminal, also where the tests run behind a shell and ignore them.
fn heeding(program: &str) -> Command {
    let mut command = Command::new("env");
    command.args(["--default-signal=INT,QUIT", program]);
    command
}

/// A reader that catches no signal.
fn cat(folder: &Path) -> Killed {
    spawn(heeding("cat").arg("m").current_dir(folder).stdout(Stdio::null()))
}

/// A line of Python that has the file `m` as `m`, and its standard output.
fn python(folder: &Path, line: &str) -> (Killed, impl FnMut() -> String) {
    let script = format!("import ctypes, os, signal, time\nm = os.open('m', os.O_RDWR)\n{line}\n");
    let mut child =
        spawn(Command::new("python3").args(["-u", "-c", &script]).current_dir(folder).stdout(Stdio::piped()));
    let mut output = BufReader::new(child.0.stdout.take().expect("a pipe"));
    let next = move || {
        let mut line = String::new();
        output.read_line(&mut line).expect("text");
        line
    };
    (child, next)
}

fn signal(child: &Killed, signal: &str) {
    tool("kill", &[&format!("-{signal}"), &child.0.id().to_string()]);
}

fn has_ended(child: &mut Killed) -> bool {
    child.0.try_wait().expect("a child").is_some()
}

/// Ends a program by a signal, which nothing else ends.
#[track_caller]
fn ends_by(mut child: Killed, name: &str, number: i32) {
    assert!(!has_ended(&mut child), "it waits for an answer");
    signal(&child, name);
    await_that("the end of a program", || has_ended(&mut child));
    assert_eq!(child.0.wait().expect("a status").signal(), Some(number));
}

fn hits(monitor: &mut Monitor) -> u64 {
    monitor.command("x-query-faults", json!({"node-name": "f"}))["hits"].as_u64().expect("a number")
}

#[test]
fn killed_reader_of_a_hung_disk_ends() {
    let folder = temp_dir();
    let folder = folder.path();
    let (daemon, mut monitor) = start(folder, "");
    arm(&mut monitor, json!({"op": "any", "action": "hang"}));
    for (name, number) in [("TERM", 15), ("INT", 2), ("QUIT", 3), ("KILL", 9)] {
        let before = hits(&mut monitor);
        let child = cat(folder);
        await_that("the request", || hits(&mut monitor) > before);
        ends_by(child, name, number);
    }
    let before = hits(&mut monitor);
    let mut other = cat(folder);
    await_that("the request", || hits(&mut monitor) > before);
    // The system's own program: it is refused while a program has the file open, and works afterwards.
    let said = run_to_code("umount", &[text(&folder.join("m"))], &[32]);
    assert!(said.contains("busy"), "{said}");
    assert!(!has_ended(&mut other), "it waits for an answer");
    disarm(&mut monitor);
    assert!(other.0.wait().expect("it ends").success());
    tool("umount", &[text(&folder.join("m"))]);
    daemon.stop();
}

/// A mount with one thread, whose reads hang.
fn hung_mount(folder: &Path) -> (Serving, Monitor) {
    let at = |name: &str| text(&folder.join(name)).to_owned();
    std::fs::write(at("d.raw"), vec![3; 1 << 20]).expect("an image");
    File::create(at("m")).expect("a mount point");
    let mount = Serving::start(
        folder,
        &[
            "mount",
            "--foreground",
            "-w",
            "--queues",
            "1",
            "--monitor",
            "m.sock",
            "--fault",
            "op=read,action=hang",
            "-f",
            "raw",
            "d.raw",
            "m",
        ],
    );
    await_that("the monitor", || std::os::unix::net::UnixStream::connect(at("m.sock")).is_ok());
    let monitor = Monitor::connect(&folder.join("m.sock"));
    (mount, monitor)
}

/// Each of them has bytes in flight, together more than a thread takes. A file that answers nothing could not be looked at.
#[test]
fn many_hung_reads_leave_the_file_usable() {
    const READERS: usize = 40;
    let folder = temp_dir();
    let folder = folder.path();
    let at = |name: &str| text(&folder.join(name)).to_owned();
    let (mut mount, mut monitor) = hung_mount(folder);
    let readers: Vec<Killed> = (0..READERS).map(|_| reader(folder, "1M")).collect();
    let hits = |monitor: &mut Monitor| {
        monitor.command("x-query-faults", json!({"node-name": "disk"}))["hits"].as_u64().expect("a number")
    };
    await_that("as many requests as have room", || hits(&mut monitor) == 24);
    assert_eq!(std::fs::metadata(at("m")).expect("attributes").len(), 1 << 20);
    tool("dd", &["if=/dev/zero", &format!("of={}", at("m")), "bs=64k", "count=1", "conv=notrunc,fsync", "status=none"]);
    for child in &readers {
        signal(child, "TERM");
    }
    for mut child in readers {
        await_that("the end of a reader", || has_ended(&mut child));
    }
    assert_eq!(hits(&mut monitor), 24, "the others never began");
    // The same once more: what hangs still has its room, and keeps no caller.
    let child = reader(folder, "1M");
    ends_by(child, "KILL", 9);
    monitor.command("x-fault-disarm", json!({"node-name": "disk"}));
    let read = std::fs::read(at("m")).expect("the disk answers again");
    assert_eq!(read, [vec![0; 64 << 10], vec![3; (1 << 20) - (64 << 10)]].concat());
    tool("umount", &[&at("m")]);
    await_that("the end of the mount", || mount.child().try_wait().expect("a child").is_some());
    assert!(mount.wait().success());
}

/// More than a thread takes, so that the kernel can't report their signals.
#[test]
fn killed_readers_beyond_the_bound_end() {
    let folder = temp_dir();
    let folder = folder.path();
    let (mut mount, mut monitor) = hung_mount(folder);
    // The program sleeps until the signal.
    let line = "import threading\nthreading.stack_size(65536)\nfor _ in range(1100):\n    \
                threading.Thread(target=lambda: os.pread(m, 1 << 20, 0)).start()\nprint('all')\ntime.sleep(600)";
    let (mut child, mut next) = python(folder, line);
    assert_eq!(next(), "all\n");
    let hits = |monitor: &mut Monitor| {
        monitor.command("x-query-faults", json!({"node-name": "disk"}))["hits"].as_u64().expect("a number")
    };
    // One read of a thread may be two requests.
    await_that("as many requests as have room", || hits(&mut monitor) >= 24);
    signal(&child, "KILL");
    await_that("the end of the readers", || has_ended(&mut child));
    assert_eq!(std::fs::metadata(folder.join("m")).expect("attributes").len(), 1 << 20);
    monitor.command("x-fault-disarm", json!({"node-name": "disk"}));
    tool("umount", &[text(&folder.join("m"))]);
    await_that("the end of the mount", || mount.child().try_wait().expect("a child").is_some());
}

/// A signal that a program catches is none of its reads' affair, as on a local disk. A later one may end it.
#[test]
fn caught_signal_interrupts_no_read() {
    let folder = temp_dir();
    let folder = folder.path();
    let (daemon, mut monitor) = start(folder, "");
    let line = "signal.signal(signal.SIGUSR1, lambda *_: print('caught'))\nsignal.siginterrupt(signal.SIGUSR1, True)\n\
                bytes = ctypes.create_string_buffer(4096)\nc = ctypes.CDLL(None, use_errno=True)\n\
                for _ in range(2): print(c.pread(m, bytes, 4096, 0), ctypes.get_errno(), bytes[0])";
    arm(&mut monitor, json!({"op": "read", "action": "hang"}));
    let (mut child, mut next) = python(folder, line);
    await_that("the request", || hits(&mut monitor) == 1);
    signal(&child, "USR1");
    // Long enough for several looks at the program: it must not end.
    std::thread::sleep(std::time::Duration::from_millis(2500));
    assert!(!has_ended(&mut child));
    disarm(&mut monitor);
    // Both lines come; the handler runs when the program gets its turn.
    let lines = [next(), next(), next()];
    assert_eq!(lines.iter().filter(|line| *line == "4096 0 b'\\x03'\n").count(), 2, "{lines:?}");
    assert!(lines.contains(&"caught\n".to_owned()), "{lines:?}");
    child.0.wait().expect("it ends");

    arm(&mut monitor, json!({"op": "read", "action": "hang"}));
    let (child, _next) = python(folder, line);
    await_that("the request", || hits(&mut monitor) == 2);
    signal(&child, "USR1");
    ends_by(child, "KILL", 9);
    disarm(&mut monitor);
    daemon.stop();
}

/// The close of its files flushes the disk, which no signal interrupts: the process exits already.
#[test]
fn killed_writer_with_a_hung_flush_ends() {
    let folder = temp_dir();
    let folder = folder.path();
    let (daemon, mut monitor) = start(folder, "");
    arm(&mut monitor, json!({"op": "flush", "action": "hang"}));
    // It sleeps until it is killed.
    let (child, mut next) = python(folder, "print(os.pwrite(m, b'x' * 4096, 0))\ntime.sleep(100)");
    assert_eq!(next(), "4096\n");
    ends_by(child, "KILL", 9);
    await_that("the flush", || hits(&mut monitor) == 1);
    // A sync, and a program that ends by itself, wait for the disk.
    let (child, _next) = python(folder, "os.fsync(m)");
    await_that("the sync", || hits(&mut monitor) == 2);
    ends_by(child, "TERM", 15);
    let (mut child, mut next) = python(folder, "print(os.pwrite(m, b'y' * 4096, 4096))\nos._exit(3)");
    assert_eq!(next(), "4096\n");
    await_that("the flush", || hits(&mut monitor) == 3);
    // Long enough for several looks at the program: it must not end.
    std::thread::sleep(std::time::Duration::from_millis(2500));
    assert!(!has_ended(&mut child), "it waits for the flush");
    disarm(&mut monitor);
    assert_eq!(child.0.wait().expect("it ends").code(), Some(3));
    daemon.stop();
    assert_eq!(std::fs::read(folder.join("d.raw")).expect("the disk")[..8192], [[b'x'; 4096], [b'y'; 4096]].concat());
}

/// An execve(2) closes the file, and holds locks of its process meanwhile. A server that waits for those waits for itself.
#[test]
fn execve_with_a_hung_flush_hangs_no_server() {
    let folder = temp_dir();
    let folder = folder.path();
    let (daemon, mut monitor) = start(folder, "");
    arm(&mut monitor, json!({"op": "flush", "action": "hang"}));
    let line = "print(os.pwrite(m, b'x' * 4096, 0))\nos.execv('/bin/true', ['true'])";
    let (mut child, mut next) = python(folder, line);
    assert_eq!(next(), "4096\n");
    await_that("the flush", || hits(&mut monitor) == 1);
    // Long enough for several looks at the program.
    std::thread::sleep(std::time::Duration::from_millis(2500));
    assert_eq!(std::fs::metadata(folder.join("m")).expect("attributes").len(), 16 << 20);
    assert_eq!(std::fs::read(folder.join("m")).expect("the server goes on")[..4], *b"xxxx");
    disarm(&mut monitor);
    assert!(child.0.wait().expect("it ends").success());
    daemon.stop();
}

/// A write that is given up could arrive after a later one.
#[test]
fn killed_writer_waits_for_its_write() {
    let folder = temp_dir();
    let folder = folder.path();
    let (daemon, mut monitor) = start(folder, "");
    arm(&mut monitor, json!({"op": "write", "action": "hang"}));
    let (mut child, _next) = python(folder, "os.pwrite(m, b'x' * 4096, 0)");
    await_that("the write", || hits(&mut monitor) == 1);
    signal(&child, "KILL");
    // Long enough for several looks at the program: it must not end.
    std::thread::sleep(std::time::Duration::from_millis(2500));
    assert!(!has_ended(&mut child));
    disarm(&mut monitor);
    assert_eq!(child.0.wait().expect("it ends").signal(), Some(9));
    let (mut child, _next) = python(folder, "os.pwrite(m, b'y' * 4096, 0)");
    assert!(child.0.wait().expect("it ends").success());
    daemon.stop();
    assert_eq!(std::fs::read(folder.join("d.raw")).expect("the disk")[..4097], [&[b'y'; 4096][..], &[3]].concat());
}

#[test]
fn umount_of_a_hung_disk_is_given_up() {
    let folder = temp_dir();
    let folder = folder.path();
    let (daemon, mut monitor) = start(folder, "");
    arm(&mut monitor, json!({"op": "flush", "action": "hang"}));
    // It sleeps until it is killed.
    let (child, mut next) = python(folder, "print(os.pwrite(m, b'x' * 4096, 0))\ntime.sleep(100)");
    assert_eq!(next(), "4096\n");
    ends_by(child, "KILL", 9);
    let file = folder.join("m");
    let mut umount = spawn(heeding(COWSHED).args(["umount", text(&file)]).stderr(Stdio::piped()));
    let mut said = String::new();
    BufReader::new(umount.0.stderr.take().expect("a pipe")).read_line(&mut said).expect("text");
    let words = "waits for the disk to sync; Ctrl-C gives up, and --lazy does not wait";
    assert_eq!(said, format!("cowshed: {}: {words}\n", text(&file)));
    ends_by(umount, "INT", 2);
    // No program has the file open, so the system's own umount doesn't wait.
    tool("umount", &[text(&file)]);
    disarm(&mut monitor);
    daemon.stop();
    assert_eq!(std::fs::read(folder.join("d.raw")).expect("the disk")[..4097], [&[b'x'; 4096][..], &[3]].concat());
}

/// The reader of a hung request has gone, and the file with it. The process ends within its limit.
#[test]
fn mount_with_a_hung_read_ends_after_its_file() {
    let folder = temp_dir();
    let folder = folder.path();
    let at = |name: &str| text(&folder.join(name)).to_owned();
    std::fs::write(at("d.raw"), vec![3; 1 << 20]).expect("an image");
    File::create(at("m")).expect("a mount point");
    let rule = "op=read,action=hang";
    let limit = ["--foreground", "--stop-timeout", "3", "--monitor", "m.sock", "--fault", rule];
    let mut mount = Serving::start(folder, &[&["mount"][..], &limit, &["-f", "raw", &at("d.raw"), &at("m")]].concat());
    await_that("the monitor", || std::os::unix::net::UnixStream::connect(at("m.sock")).is_ok());
    let mut monitor = Monitor::connect(&folder.join("m.sock"));
    let child = reader(folder, "4k");
    await_that("the request", || {
        monitor.command("x-query-faults", json!({"node-name": "disk"}))["hits"].as_u64() > Some(0)
    });
    ends_by(child, "KILL", 9);
    drop(monitor);
    tool("umount", &[&at("m")]);
    mount.await_log("could not stop in order");
    assert_eq!(mount.wait().code(), Some(1));
}

/// The processes that serve and guard it were killed, so nothing has unmounted it.
#[test]
fn mount_of_killed_processes_is_refused_and_unmounted() {
    let folders = [temp_dir(), temp_dir()];
    let [folder, elsewhere] = [0, 1].map(|number: usize| folders[number].path());
    folders.iter().for_each(|folder| qcow2(folder.path()));
    let (mut daemon, mut monitor) = super::fuse::start(folder, QCOW2);
    monitor.command("block-export-add", export(folder, "m", json!({"writable": true})));
    let file = folder.join("m").canonicalize().expect("a path");
    let guards = tool("pgrep", &["-P", &daemon.child().id().to_string()]);
    let guard = guards.lines().next().expect("a guard");
    assert_eq!(guards.lines().count(), 1, "{guards}");
    tool("kill", &["-KILL", guard]);
    daemon.signal("KILL");
    let _ = daemon.wait();
    await_that("the file is dead", || std::fs::metadata(&file).is_err_and(|error| error.raw_os_error() == Some(107)));
    let image = folder.join("d.qcow2");
    for more in [&[][..], &["--writable"]] {
        let arguments = [&["10", COWSHED, "mount"], more, &[text(&image), text(&file)]].concat();
        let said = run_to_code("timeout", &arguments, &[1]);
        let words = format!("{}: shows another disk already (cowshed umount ends that)", text(&file));
        assert!(said.contains(&words) && said.lines().count() == 1, "{said}");
    }
    let (other, mut monitor) = super::fuse::start(elsewhere, QCOW2);
    let add = json!({"type": "fuse", "id": "m", "node-name": "d", "mountpoint": file});
    assert_eq!(monitor.refusal("block-export-add", &add), format!("'{}' shows another disk already", file.display()));
    other.stop();
    tool("timeout", &["10", COWSHED, "umount", text(&file)]);
    assert!(!is_mounted(&file));
    tool(COWSHED, &["mount", text(&image), text(&file)]);
    assert_eq!(std::fs::metadata(&file).expect("it is served").len(), 8 << 20);
    tool(COWSHED, &["umount", text(&file)]);
}

/// Its server lives and answers nothing, so a look at the file would wait for ever.
#[test]
fn mount_point_of_a_stopped_server_is_refused_at_once() {
    let folder = temp_dir();
    let folder = folder.path();
    qcow2(folder);
    let (daemon, mut monitor) = super::fuse::start(folder, QCOW2);
    monitor.command("block-export-add", export(folder, "m", json!({})));
    let (file, image) = (folder.join("m"), folder.join("d.qcow2"));
    daemon.signal("STOP");
    let said = run_to_code("timeout", &["10", COWSHED, "mount", text(&image), text(&file)], &[1]);
    daemon.signal("CONT");
    assert!(said.contains("m: shows another disk already"), "{said}");
    daemon.stop();
}
