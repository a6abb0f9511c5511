// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Daemons whose standard output and standard error have lost their readers: they start, serve and stop as others do.

use super::process::{COWSHED, Killed, Monitor, text};
use cowshed_testkit::programs::tool;
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_testkit::waiting::{await_some, await_that};
use serde_json::json;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// The daemons, with `n.sock` for NBD clients.
const DAEMONS: [&str; 4] = [
    "serve -x disk -k n.sock --monitor m.sock disk.qcow2",
    "serve -x disk -k n.sock --log-format json disk.qcow2",
    "qemu-nbd -t -x disk -k n.sock -f qcow2 disk.qcow2",
    "qemu-storage-daemon --blockdev qcow2,node-name=disk,file.driver=file,file.filename=disk.qcow2 --nbd-server \
     addr.type=unix,addr.path=n.sock --export nbd,id=e,node-name=disk --chardev \
     socket,id=m,path=m.sock,server=on,wait=off --monitor m",
];

/// When the readers go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Loss {
    /// They never were there: both streams are closed (`>&- 2>&-`).
    Closed,
    /// Before the daemon's first word.
    AtStart,
    /// After a client of the daemon.
    Later,
}

fn start(folder: &Path, line: &str, loss: Loss) -> Child {
    let script = match loss {
        Loss::Closed => format!("exec \"$0\" {line} >&- 2>&-"),
        // The word tells that both readers are gone.
        _ => format!("read -r go; exec \"$0\" {line}"),
    };
    let mut child = Command::new("bash")
        .args(["-c", &script, COWSHED])
        .current_dir(folder)
        // So much is logged that each step meets the lost stream.
        .env("RUST_LOG", "trace")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("bash runs");
    if loss == Loss::AtStart {
        drop((child.stdout.take(), child.stderr.take()));
    }
    // The end of its input lets the shell go on.
    drop(child.stdin.take());
    child
}

/// Waits until a client can read, and reads.
fn use_it(folder: &Path, daemon: &mut Killed, what: &str) {
    let socket = folder.join("n.sock");
    await_that(&format!("{what}: the daemon listens"), || {
        if let Some(status) = daemon.0.try_wait().expect("a child") {
            panic!("{what}: the daemon has ended at once: {status}");
        }
        UnixStream::connect(&socket).is_ok()
    });
    let uri = format!("nbd+unix:///disk?socket={}", text(&socket));
    Qemu::system().io(["-f", "raw", "-r", "-c", "read -P 0 0 64k", &uri]).expect_ok();
}

/// Sends SIGTERM and waits; the exit code.
fn stop(daemon: &mut Killed, what: &str) -> Option<i32> {
    tool("kill", &["-TERM", &daemon.0.id().to_string()]);
    await_some(&format!("{what}: SIGTERM ends the daemon"), || daemon.0.try_wait().expect("a child")).code()
}

#[test]
fn a_daemon_goes_on_without_readers_of_its_words() {
    let folder = temp_dir();
    Qemu::system().create(&folder.path().join("disk.qcow2"), "qcow2", "", 1 << 20);
    for line in DAEMONS {
        for loss in [Loss::Closed, Loss::AtStart, Loss::Later] {
            let what = format!("{line}, {loss:?}");
            let mut daemon = Killed(start(folder.path(), line, loss));
            if loss == Loss::Later {
                let mut errors = daemon.0.stderr.take().expect("a pipe");
                // The log would fill the pipe.
                let mut said = [0; 1];
                errors.read_exact(&mut said).expect("the log has a line");
                drop((errors, daemon.0.stdout.take()));
            }
            use_it(folder.path(), &mut daemon, &what);
            // A second client: the first may have ended the thread that served it.
            use_it(folder.path(), &mut daemon, &what);
            if line.contains("m.sock") {
                let mut monitor = Monitor::connect(&folder.path().join("m.sock"));
                monitor.command("query-version", json!({}));
                monitor.refusal("blockdev-add", &json!({"driver": "file", "node-name": "none", "filename": "none"}));
            }
            assert_eq!(stop(&mut daemon, &what), Some(0), "{what}");
            assert!(!folder.path().join("n.sock").exists(), "{what}: the socket stays");
        }
    }
}

/// Messages of the first process of `--daemonize` may be lost, too.
#[test]
fn a_daemon_goes_into_the_background_without_readers_of_its_words() {
    let folder = temp_dir();
    Qemu::system().create(&folder.path().join("disk.qcow2"), "qcow2", "", 1 << 20);
    for line in [
        "serve -x disk -k n.sock --daemonize --pidfile pid disk.qcow2",
        "qemu-nbd -t -x disk -k n.sock -f qcow2 --fork --pid-file pid disk.qcow2",
    ] {
        for loss in [Loss::Closed, Loss::AtStart] {
            let what = format!("{line}, {loss:?}");
            let mut first = Killed(start(folder.path(), line, loss));
            assert_eq!(first.0.wait().expect("it ends").code(), Some(0), "{what}");
            let id = std::fs::read_to_string(folder.path().join("pid")).expect("a pid file").trim().to_owned();
            let uri = format!("nbd+unix:///disk?socket={}", text(&folder.path().join("n.sock")));
            let used = Qemu::system().io(["-f", "raw", "-r", "-c", "read -P 0 0 64k", &uri]);
            tool("kill", &["-TERM", &id]);
            used.expect_ok();
            await_that(&format!("{what}: the daemon ends"), || !folder.path().join("pid").exists());
        }
    }
}
