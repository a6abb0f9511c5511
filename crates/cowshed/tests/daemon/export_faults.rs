// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Faults on demand and bad input, by the exports that a command line makes: also over HTTP, and with the figures of `top`.

use super::fuse::is_mounted;
use super::process::{COWSHED, Killed, Monitor, Serving, text};
use cowshed_testkit::programs::{run_to_code, tool};
use cowshed_testkit::qemu::{peers_dir, temp_dir};
use cowshed_testkit::waiting::await_that;
use serde_json::{Value, json};
use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A daemon with a disk of 16 MiB, full of 3, and these faults. It has each export that needs no driver of the kernel's but FUSE.
fn serve(folder: &Path, faults: &[&str]) -> (Serving, Monitor) {
    std::fs::write(folder.join("d.raw"), vec![3; 16 << 20]).expect("an image");
    File::create(folder.join("m")).expect("a mount point");
    let mut arguments = vec!["serve", "-k", "n.sock", "--monitor", "m.sock", "--drive", "file=d.raw,id=d,format=raw"];
    arguments.extend(faults.iter().flat_map(|fault| ["--fault", *fault]));
    for export in [
        "vhost-user-blk,id=v,node-name=d,addr.type=unix,addr.path=v.sock,writable=on",
        "fuse,id=f,node-name=d,mountpoint=m,writable=on",
        "http,id=h,node-name=d,addr.type=unix,addr.path=h.sock,path=/d",
    ] {
        arguments.extend(["--export", export]);
    }
    let daemon = Serving::start(folder, &arguments);
    for socket in ["h.sock", "m.sock"] {
        await_that(socket, || std::os::unix::net::UnixStream::connect(folder.join(socket)).is_ok());
    }
    let monitor = Monitor::connect(&folder.join("m.sock"));
    (daemon, monitor)
}

/// The answer to a range of the export over HTTP, its status behind it.
fn range(folder: &Path, range: &str) -> (Vec<u8>, String) {
    let socket = folder.join("h.sock");
    let answer = ["-sS", "-m", "60", "-w", "%{http_code}", "-r", range, "--unix-socket", text(&socket)];
    let got = Command::new("curl").args(answer).arg("http://localhost/d").output().expect("curl runs");
    let at = got.stdout.len().saturating_sub(3);
    (got.stdout[..at].to_vec(), String::from_utf8_lossy(&got.stdout[at..]).into_owned())
}

/// `qemu-io` on an export of another type.
fn qemu_io(folder: &Path, export: &str, command: &str) -> Output {
    let at = |name: &str| text(&folder.join(name)).to_owned();
    let nbd = format!("nbd+unix:///d?socket={}", at("n.sock"));
    let vhost = format!("driver=virtio-blk-vhost-user,path={},cache.direct=on", at("v.sock"));
    let vhost_program = peers_dir().join("qemu-io-vhost");
    let mut qemu_io = match export {
        "nbd" => Command::new("qemu-io"),
        _ => Command::new(vhost_program),
    };
    match export {
        "nbd" => qemu_io.args(["-f", "raw", &nbd]),
        _ => qemu_io.args(["--image-opts", &vhost]),
    };
    qemu_io.args(["-c", command]).output().expect("qemu-io runs")
}

#[test]
fn each_export_of_a_command_line_has_its_faults() {
    let folder = temp_dir();
    let folder = folder.path();
    let faults = [
        "op=read,errno=110,offset=1M,len=4k",
        "op=read,action=corrupt,offset=2M,len=512",
        "op=read,action=delay,delay-ms=300,jitter-ms=100,offset=3M,len=4k",
        "op=read,action=short,offset=4M,len=4k",
        "op=write,errno=28,offset=5M,len=4k",
    ];
    let (daemon, mut monitor) = serve(folder, &faults);
    // Past the page cache, each read is one of the disk.
    let direct = rustix::fs::OFlags::DIRECT.bits().cast_signed();
    let open = File::options().read(true).write(true).custom_flags(direct).open(folder.join("m"));
    let file = open.expect("it opens");
    let mut bytes = [0; 4096];
    // ETIMEDOUT.
    assert_eq!(file.read_at(&mut bytes, 1 << 20).expect_err("an error").raw_os_error(), Some(110));
    assert_eq!(range(folder, "1048576-1048579").1, "500");
    for export in ["nbd", "vhost"] {
        let said = qemu_io(folder, export, "read 1M 4k");
        assert_eq!(said.status.code(), Some(1), "{export}: {said:?}");
    }
    // Noise.
    file.read_exact_at(&mut bytes[..512], 2 << 20).expect("a read");
    let (noise, status) = range(folder, "2097152-2097663");
    assert!(bytes[..512] != [3; 512] && noise != [3; 512] && status == "206", "{status}");
    for export in ["nbd", "vhost"] {
        let said = qemu_io(folder, export, "read -P 3 2M 512");
        assert!(String::from_utf8_lossy(&said.stdout).contains("Pattern verification failed"), "{export}: {said:?}");
    }
    // A delay.
    let slow: [(&str, &mut dyn FnMut()); 4] = [
        ("fuse", &mut || file.read_exact_at(&mut bytes, 3 << 20).expect("a read")),
        ("http", &mut || assert_eq!(range(folder, "3145728-3149823"), (vec![3; 4096], "206".to_owned()))),
        ("nbd", &mut || assert!(qemu_io(folder, "nbd", "read -P 3 3M 4k").status.success())),
        ("vhost", &mut || assert!(qemu_io(folder, "vhost", "read -P 3 3M 4k").status.success())),
    ];
    for (export, read) in slow {
        let begin = Instant::now();
        read();
        assert!(begin.elapsed() >= Duration::from_millis(300), "{export}");
    }
    // Half of the bytes, and the whole is reported.
    assert_eq!(range(folder, "4194304-4198399").0, [[3; 2048], [0; 2048]].concat());
    // A full disk.
    assert_eq!(file.write_at(&[7; 4096], 5 << 20).expect_err("an error").raw_os_error(), Some(28));
    for export in ["nbd", "vhost"] {
        assert_eq!(qemu_io(folder, export, "write 5M 4k").status.code(), Some(1), "{export}");
    }
    // All is well without the rules.
    monitor.command("x-fault-disarm", json!({"node-name": "d"}));
    file.read_exact_at(&mut bytes, 1 << 20).expect("a read");
    assert_eq!((bytes, range(folder, "2097152-2097663").0), ([3; 4096], vec![3; 512]));
    file.write_all_at(&[3; 4096], 5 << 20).expect("a write");
    // Each export has its line in `top`.
    let shown = tool(COWSHED, &["top", "--interval", "0.01", "--count", "1", text(&folder.join("m.sock"))]);
    for export in ["d", "v", "f", "h"] {
        assert!(shown.lines().any(|line| line.split(' ').next() == Some(export)), "{export}: {shown}");
    }
    drop(file);
    daemon.stop();
}

#[test]
fn figures_of_top_count_the_reads_of_each_export() {
    let folder = temp_dir();
    let folder = folder.path();
    let (daemon, _monitor) = serve(folder, &[]);
    let direct = rustix::fs::OFlags::DIRECT.bits().cast_signed();
    let file = File::options().read(true).custom_flags(direct).open(folder.join("m")).expect("it opens");
    let mut command = Command::new(COWSHED);
    command.args(["top", "--interval", "4", "--count", "2"]).arg(folder.join("m.sock")).stdout(Stdio::piped());
    let mut top = Killed(command.spawn().expect("our own binary runs"));
    while top.0.try_wait().expect("a child").is_none() {
        file.read_exact_at(&mut [0; 4096], 1 << 20).expect("a read");
        assert_eq!(range(folder, "0-65535").1, "206");
        for export in ["nbd", "vhost"] {
            assert!(qemu_io(folder, export, "read 0 64k").status.success(), "{export}");
        }
    }
    let shown = std::io::read_to_string(top.0.stdout.take().expect("a pipe")).expect("text");
    for export in ["d", "v", "f", "h"] {
        let rows = shown.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let mut bytes = rows.filter(|row| row.first() == Some(&export)).map(|row| row[3]);
        assert!(bytes.any(|bytes| bytes != "0"), "{export}: {shown}");
    }
    drop(file);
    daemon.stop();
}

/// Counts and probability are of the requests of all clients together, and a rule that hangs lets its request go on at the end.
#[test]
fn requests_over_http_meet_counted_and_hung_reads() {
    let folder = temp_dir();
    let folder = folder.path();
    let (daemon, mut monitor) = serve(folder, &["op=read,offset=1M,len=512,after=2,times=2"]);
    let statuses: Vec<String> = (0..6).map(|_| range(folder, "1048576-1049087").1).collect();
    assert_eq!(statuses, ["206", "206", "500", "500", "206", "206"]);
    let arm = |monitor: &mut Monitor, rule: Value| {
        monitor.command("x-fault-arm", json!({"node-name": "d", "rule": rule}))["id"].as_u64().expect("a number")
    };
    let id = arm(&mut monitor, json!({"op": "read", "offset": 1 << 20, "len": 512, "probability-percent": 50}));
    let failed = (0..40).filter(|_| range(folder, "1048576-1049087").1 == "500").count();
    assert!((5..=35).contains(&failed), "{failed} of 40");
    // The rule changes while clients read, and the new one counts.
    let hang = json!({"op": "read", "action": "hang", "offset": 1 << 20, "len": 512});
    monitor.command("x-fault-arm", json!({"node-name": "d", "id": id, "rule": hang}));
    let hits = |monitor: &mut Monitor| monitor.command("x-query-faults", json!({"node-name": "d"}))["hits"].as_u64();
    let before = hits(&mut monitor);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| range(folder, "1048576-1049087"));
        await_that("the request", || hits(&mut monitor) > before);
        assert_eq!(range(folder, "0-3").1, "206", "another request goes on beside it");
        assert!(!waiting.is_finished());
        monitor.command("x-fault-disarm", json!({"node-name": "d", "id": id}));
        assert_eq!(waiting.join().expect("no panic"), (vec![3; 512], "206".to_owned()));
    });
    daemon.stop();
}

/// The time of a scenario begins with the daemon.
#[test]
fn scenario_with_times_begins_and_ends_its_faults() {
    let folder = temp_dir();
    let folder = folder.path();
    let scenario = folder.join("s.json");
    let rule = json!([{"op": "read", "errno": 5, "offset": 1 << 20, "len": 512, "start-ms": 3000, "end-ms": 6000}]);
    std::fs::write(&scenario, rule.to_string()).expect("a scenario");
    let begin = Instant::now();
    let (daemon, _monitor) = serve(folder, &[text(&scenario)]);
    let status = || range(folder, "1048576-1049087").1;
    let first = status();
    assert!(first == "206" || begin.elapsed() >= Duration::from_secs(3), "{first}");
    await_that("the disk fails", || status() == "500");
    assert!(begin.elapsed() >= Duration::from_secs(3));
    await_that("the disk is back", || status() == "206");
    assert!(begin.elapsed() >= Duration::from_secs(6));
    daemon.stop();
}

/// The daemon's only line for an export that can't be, without its name.
fn refused(folder: &Path, options: &str) -> String {
    let mut command = Command::new(COWSHED);
    command.arg0("qemu-storage-daemon").args(["--blockdev", "raw,node-name=d,file.driver=file,file.filename=d.raw"]);
    let ended = command.args(["--export", options]).current_dir(folder).output().expect("our own binary runs");
    let said = String::from_utf8(ended.stderr).expect("text");
    // QEMU's words for a long path have a second line.
    let lines = said.lines().filter(|line| *line != "Path must be less than 108 bytes").count();
    assert_eq!((ended.status.code(), lines), (Some(1), 1), "{options}: {said}");
    said.trim_end().to_owned()
}

fn names(folder: &Path) -> Vec<String> {
    let list = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("a file").file_name());
    let mut names: Vec<String> = list.map(|name| name.into_string().expect("text")).collect();
    names.sort();
    names
}

#[test]
fn http_exports_that_cannot_be_say_why_in_one_line() {
    let folder = temp_dir();
    let folder = folder.path();
    std::fs::write(folder.join("d.raw"), vec![3; 1 << 20]).expect("an image");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("an address").port();
    let listening = std::os::unix::net::UnixListener::bind(folder.join("taken.sock")).expect("a socket");
    let before = names(folder);
    let (taken_port, long) = (format!("addr.type=inet,addr.host=127.0.0.1,addr.port={port}"), "x".repeat(200));
    let long = format!("addr.type=unix,addr.path={long}");
    for (options, words) in [
        (taken_port.as_str(), "Address already in use"),
        ("addr.type=inet,addr.host=no.such.host.invalid,addr.port=0", "no.such.host.invalid"),
        ("addr.type=inet,addr.host=127.0.0.1,addr.port=99999", "99999"),
        (long.as_str(), "too long"),
        ("addr.type=unix,addr.path=none/h.sock", "No such file or directory"),
        ("addr.type=unix,addr.path=taken.sock", "another process listens on this socket"),
        ("addr.type=unix,addr.path=d.raw", "d.raw"),
        ("addr.type=fd,addr.str=7", "fd"),
        ("addr.type=unix,addr.path=h.sock,path=disk", "doesn't begin with '/'"),
        ("addr.type=unix,addr.path=h.sock,writable=on", "is for reading only"),
        ("addr.type=unix,addr.path=h.sock,tls-creds=none", "none"),
    ] {
        let said = refused(folder, &format!("http,id=h,node-name=d,{options}"));
        assert!(said.contains(words), "{options}: {said}");
        assert_eq!(names(folder), before, "{options}");
    }
    drop(listening);
    assert_eq!(std::fs::read(folder.join("d.raw")).expect("the disk"), vec![3; 1 << 20]);
}

#[test]
fn mount_points_that_cannot_be_are_named_in_one_line() {
    let folder = temp_dir();
    let folder = folder.path();
    let at = |name: &str| text(&folder.join(name)).to_owned();
    std::fs::write(at("d.raw"), vec![3; 1 << 20]).expect("an image");
    std::fs::create_dir(at("folder")).expect("a folder");
    tool("mkfifo", &[&at("fifo")]);
    let socket = std::os::unix::net::UnixListener::bind(at("socket")).expect("a socket");
    std::os::unix::fs::symlink("nowhere", at("dangling")).expect("a link");
    std::os::unix::fs::symlink("loop", at("loop")).expect("a link");
    let before = names(folder);
    let long = "x".repeat(300);
    for (point, words) in [
        ("folder", "is not a regular file"),
        ("fifo", "is not a regular file"),
        ("socket", "is not a regular file"),
        ("missing", "No such file or directory"),
        ("none/m", "No such file or directory"),
        ("d.raw/m", "Not a directory"),
        ("dangling", "No such file or directory"),
        ("loop", "Too many levels of symbolic links"),
        (long.as_str(), "File name too long"),
    ] {
        let said = refused(folder, &format!("fuse,id=f,node-name=d,mountpoint={point}"));
        assert!(said.contains(words) && said.contains(point), "{point}: {said}");
        let said = run_to_code(COWSHED, &["mount", "-f", "raw", &at("d.raw"), &at(point)], &[1]);
        assert!(said.contains(words) && said.contains(point) && said.lines().count() == 1, "{point}: {said}");
        assert_eq!(names(folder), before, "{point}");
        assert!(!is_mounted(&folder.join(point)));
    }
    drop(socket);
    // No process has the image still.
    tool("qemu-io", &["-f", "raw", "-c", "write 0 512", &at("d.raw")]);
}

/// It could remove no socket, and its file was unmounted for it.
#[test]
fn sockets_of_a_killed_daemon_block_no_later_one() {
    let folder = temp_dir();
    let folder = folder.path();
    let (daemon, _monitor) = serve(folder, &[]);
    daemon.signal("KILL");
    let _ = daemon.wait();
    await_that("the file is unmounted", || !is_mounted(&folder.join("m")));
    let sockets = ["n.sock", "m.sock", "v.sock", "h.sock"];
    assert!(sockets.iter().all(|socket| folder.join(socket).exists()), "{:?}", names(folder));
    let (daemon, _monitor) = serve(folder, &[]);
    assert_eq!(range(folder, "0-3"), (vec![3; 4], "206".to_owned()));
    for export in ["nbd", "vhost"] {
        assert!(qemu_io(folder, export, "read -P 3 0 4k").status.success(), "{export}");
    }
    assert_eq!(std::fs::read(folder.join("m")).expect("a file").len(), 16 << 20);
    daemon.stop();
    assert!(!sockets.iter().any(|socket| folder.join(socket).exists()), "{:?}", names(folder));
    assert!(!is_mounted(&folder.join("m")));
}

/// A user without rights: folders of others for the sockets, and a file of root's as the mount point.
#[test]
#[ignore = "needs root"]
fn exports_without_permission_name_their_place() {
    let folder = temp_dir();
    let folder = folder.path();
    std::fs::write(folder.join("d.raw"), vec![3; 1 << 20]).expect("an image");
    std::fs::copy(COWSHED, folder.join("cowshed")).expect("a program");
    std::fs::create_dir(folder.join("closed")).expect("a folder");
    File::create(folder.join("m")).expect("a mount point");
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(folder, open).expect("a folder for all");
    let before = names(folder);
    let nobody = ["--reuid", "65534", "--regid", "65534", "--clear-groups", "./cowshed"];
    for (export, words) in [
        ("vhost-user-blk,addr.type=unix,addr.path=closed/v.sock", "closed/v.sock: could not listen: Permission denied"),
        ("http,addr.type=unix,addr.path=closed/h.sock", "Permission denied"),
        ("fuse,mountpoint=m", "could not mount on it: "),
        ("fuse,mountpoint=closed", "is not a regular file"),
    ] {
        let mut daemon = Command::new("setpriv");
        daemon.args(nobody).args(["serve", "--drive", "file=d.raw,id=d,format=raw,read-only=on", "--export"]);
        let ended = daemon.arg(format!("{export},id=e,node-name=d")).current_dir(folder).output().expect("it runs");
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        let lines: Vec<&str> = said.lines().filter(|line| line.starts_with("cowshed: ")).collect();
        assert_eq!((ended.status.code(), lines.len()), (Some(1), 1), "{export}: {said}");
        assert!(lines[0].contains(words), "{export}: {said}");
        assert_eq!(names(folder), before, "{export}");
    }
    assert!(!is_mounted(&folder.join("m")));
}
