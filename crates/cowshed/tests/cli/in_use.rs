// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Images that somebody else has open for writing: who may look, and who is refused.

use crate::oracle::Oracle;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// `info` reads no data, so a raw image may be in use; the metadata of qcow2 changes under a writer.
#[test]
fn info_of_an_image_in_use_as_qemu_img() {
    for (name, format) in [("a.raw", "raw"), ("a.qcow2", "qcow2")] {
        let oracle = Oracle::new();
        oracle.make(&format!("create -q -f {format} {name} 4M"));
        let mut writer = Command::new(oracle.qemu.io_path())
            .args(["-f", format, name])
            .current_dir(oracle.work())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("qemu-io runs");
        let (mut input, output) = (writer.stdin.take().expect("a pipe"), writer.stdout.take().expect("a pipe"));
        writeln!(input, "write 0 4k").expect("qemu-io listens");
        // It answers once the image is open and locked.
        assert!(BufReader::new(output).lines().any(|line| line.expect("text").contains("wrote 4096/4096")));
        for line in [format!("info {name}"), format!("info -f {format} {name}"), format!("info -U {name}")] {
            oracle.compare(&line);
        }
        // The next overlay of a running machine's disk.
        let image = oracle.work().join(name);
        oracle.compare_writing(&format!("create -q -f qcow2 -b {} -F {format} next.qcow2", image.display()), |_, _| {});
        drop(input);
        assert!(writer.wait().expect("it ends").success());
        oracle.verdict();
    }
}

#[path = "../../../storage/tests/held/mod.rs"]
mod held;

/// A server of an image, killed when dropped.
pub struct Server(Child);

impl Server {
    /// Starts it and waits until it serves.
    pub fn start(mut command: Command, socket: &Path) -> Server {
        let server = Server(command.stdout(Stdio::null()).spawn().expect("a server"));
        let deadline = Instant::now() + Duration::from_secs(60);
        // Its greeting says that the image is open.
        let is_serving = || {
            let Ok(mut stream) = UnixStream::connect(socket) else { return false };
            stream.set_read_timeout(Some(Duration::from_secs(1))).expect("a timeout");
            stream.read_exact(&mut [0; 8]).is_ok()
        };
        while !is_serving() {
            assert!(Instant::now() < deadline, "nothing is served");
            std::thread::sleep(Duration::from_millis(5));
        }
        server
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A raw image is locked as far as its clients need it, and qcow2 against all others.
#[test]
fn a_served_image_is_locked_as_by_qemu_nbd() {
    for (name, format) in [("a.raw", "raw"), ("a.qcow2", "qcow2")] {
        for flags in [&[][..], &["-r"], &["-e", "3"]] {
            let oracle = Oracle::new();
            oracle.make(&format!("create -q -f {format} {name} 4M"));
            let (image, socket) = (oracle.work().join(name), oracle.work().join("socket"));
            let arguments = |command: &mut Command| {
                command.args(["-t", "-f", format, "-k"]).arg(&socket).args(flags).arg(&image);
            };
            let locked = |mut command: Command| {
                arguments(&mut command);
                let server = Server::start(command, &socket);
                let locked = held::locked_bytes(server.0.id(), &image);
                drop(server);
                let _ = std::fs::remove_file(&socket);
                locked
            };
            let theirs = locked(Command::new("qemu-nbd"));
            let mut ours = Command::new(env!("CARGO_BIN_EXE_cowshed"));
            ours.arg("qemu-nbd");
            assert_eq!(locked(ours), theirs, "{format} {flags:?}");
        }
    }
}

/// Who reads and who serves the same raw image beside us gets in, as beside qemu-nbd.
#[test]
fn a_served_raw_image_has_readers_and_servers_beside_it() {
    let oracle = Oracle::new();
    oracle.make("create -q -f raw a.raw 4M");
    let (image, sockets) = (oracle.work().join("a.raw"), ["one", "two"].map(|name| oracle.work().join(name)));
    let serve = |socket: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cowshed"));
        command.args(["qemu-nbd", "-t", "-f", "raw", "-k"]).arg(socket).arg(&image);
        Server::start(command, socket)
    };
    let _servers = sockets.each_ref().map(|socket| serve(socket));
    let path = image.to_str().expect("text");
    oracle.qemu.io(["-f", "raw", "-c", "read 0 512", path]).expect_ok();
    oracle.qemu.io(["-r", "-f", "raw", "-c", "read 0 512", path]).expect_ok();
    let resized = oracle.qemu.img(["resize", "-q", "-f", "raw", path, "8M"]);
    assert_eq!(resized.code, 1, "its size is what clients were told");
}

/// A process that is killed under load has I/O in the kernel's hands, and with it the locks, for a moment longer than it
/// lives. The next one waits for that.
#[test]
fn the_image_of_a_killed_process_is_opened_at_once() {
    let oracle = Oracle::new();
    oracle.make("create -q -f raw source.raw 96M");
    oracle.io(&["write -q -P 7 0 96M"], "source.raw");
    let (image, socket) = (oracle.work().join("a.qcow2"), oracle.work().join("socket"));
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    for round in 0..12 {
        oracle.make("create -q -f qcow2 a.qcow2 96M");
        let mut command = Command::new(env!("CARGO_BIN_EXE_cowshed"));
        command.args(["serve", "--cache", "none", "-k"]).arg(&socket).arg(&image).stderr(Stdio::null());
        let mut server = Server::start(command, &socket);
        let mut client = Command::new("qemu-img")
            .args(["convert", "-n", "-W", "-f", "raw", "-O", "raw", "source.raw", &uri])
            .current_dir(oracle.work())
            .stderr(Stdio::null())
            .spawn()
            .expect("qemu-img runs");
        let deadline = Instant::now() + Duration::from_secs(60);
        while std::fs::metadata(&image).expect("the image").len() < (4 + round) << 20 {
            assert!(Instant::now() < deadline, "nothing is written");
            std::thread::yield_now();
        }
        server.0.kill().expect("it is killed");
        // Its end isn't waited for.
        let output = Command::new(env!("CARGO_BIN_EXE_cowshed"))
            .args(["io", "-c", "write -P 8 0 512"])
            .arg(&image)
            .output()
            .expect("our own binary runs");
        assert!(output.status.success(), "round {round}: {}", String::from_utf8_lossy(&output.stderr));
        client.wait().expect("it ends");
        drop(server);
        std::fs::remove_file(&socket).expect("its socket");
    }
}
