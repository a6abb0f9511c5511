// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Signals of a terminal and of `timeout`: while an image opens, and twice in a row.

use crate::oracle::Oracle;
use cowshed_testkit::programs::tool;
use cowshed_testkit::waiting::await_that;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// A program that heeds the signals, also where the tests run behind a shell and ignore them.
fn spawn(folder: &Path, program: &str, arguments: &[&str]) -> Child {
    let mut command = Command::new("env");
    command.args(["--default-signal=INT,TERM,HUP", "bash", "-c", "exec -a \"$0\" \"$@\"", program]);
    command.arg(env!("CARGO_BIN_EXE_cowshed")).args(arguments).current_dir(folder);
    // Away from the group of the tests.
    command.process_group(0).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("our own binary runs")
}

fn end(mut child: Child) -> (Option<i32>, String) {
    await_that("its end", || child.try_wait().expect("a child").is_some());
    let said = std::io::read_to_string(child.stderr.take().expect("a pipe")).expect("text");
    (child.wait().expect("a status").code(), said)
}

/// The server takes the connection, and says nothing.
#[test]
fn work_whose_opening_hangs_ends_at_a_signal() {
    const DISK: &str = "nbd+unix:///?socket=silent";
    let oracle = Oracle::new();
    let folder = oracle.work();
    oracle.make("create -q -f raw other.raw 1M");
    let server = UnixListener::bind(folder.join("silent")).expect("a socket");
    let cases: [(&str, &[&str]); 8] = [
        ("cowshed", &["convert", "-O", "qcow2", DISK, "copy"]),
        ("qemu-img", &["convert", "-O", "raw", DISK, "copy"]),
        ("qemu-img", &["check", "-f", "qcow2", DISK]),
        ("cowshed", &["compare", "-f", "raw", "other.raw", DISK]),
        ("qemu-img", &["dd", "if=nbd+unix:///?socket=silent", "of=copy"]),
        ("qemu-img", &["commit", "-f", "qcow2", DISK]),
        ("cowshed", &["share", DISK]),
        ("cowshed", &["rescue", DISK, "copy"]),
    ];
    for (number, (program, arguments)) in cases.into_iter().enumerate() {
        let (name, code) = [("INT", 130), ("TERM", 143), ("HUP", 129)][number % 3];
        let child = spawn(&folder, program, arguments);
        let _connection = server.accept().expect("a client");
        tool("kill", &[&format!("-{name}"), &child.id().to_string()]);
        let (ended, said) = end(child);
        let words = format!("{program}: interrupted; nothing was made\n");
        assert_eq!((ended, said), (Some(code), words), "{arguments:?}");
        assert!(!folder.join("copy").exists(), "{arguments:?}");
    }
}

/// `timeout` signals its command, and then the group of both. That is one wish to end.
#[test]
fn two_signals_at_once_leave_no_target() {
    let oracle = Oracle::new();
    let folder = oracle.work();
    std::fs::write(folder.join("disk.raw"), vec![7; 16 << 20]).expect("a disk");
    for gap_ms in [0, 0, 0, 1, 1, 3, 10] {
        let child = spawn(&folder, "cowshed", &["convert", "-r", "1M", "-O", "qcow2", "disk.raw", "copy.qcow2"]);
        await_that("a target", || folder.join("copy.qcow2").exists());
        let process = child.id().to_string();
        tool("kill", &["-INT", &process]);
        // The time between the two signals is the case.
        std::thread::sleep(Duration::from_millis(gap_ms));
        // It may have ended by then.
        let _ = Command::new("kill").args(["-INT", &process]).stderr(Stdio::null()).status();
        assert_eq!(end(child), (Some(130), "cowshed: interrupted; nothing was made\n".to_owned()), "{gap_ms} ms");
        let left = std::fs::read_dir(&folder).expect("a folder").count();
        assert_eq!(left, 1, "{gap_ms} ms: {left} files");
    }
}
