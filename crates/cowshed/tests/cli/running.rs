// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Long work: it shows progress, stops when asked to, and doesn't depend on anyone reading its output.

use crate::oracle::Oracle;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Longer than any of these tests should wait for anything.
const PATIENCE: Duration = Duration::from_secs(30);

#[test]
fn a_signal_stops_a_conversion_in_order() {
    for (signal, code) in [("INT", 130), ("TERM", 143), ("HUP", 129)] {
        let oracle = Oracle::new();
        oracle.make("create -q -f raw source.raw 64M");
        oracle.io(&["write -P 7 0 64M"], "source.raw");
        // At this rate it would take a minute.
        let mut child = Command::new(env!("CARGO_BIN_EXE_cowshed"))
            .args(["convert", "-p", "-r", "1M", "-O", "qcow2", "source.raw", "target.qcow2"])
            .current_dir(oracle.work())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("our own binary runs");
        // The first progress says that the work has begun and signals are watched for.
        let mut stdout = child.stdout.take().expect("a pipe");
        let mut first = [0];
        stdout.read_exact(&mut first).expect("progress");
        let killed = Command::new("kill").args([format!("-{signal}"), child.id().to_string()]).status();
        assert!(killed.expect("kill runs").success());
        let started = Instant::now();
        let output = child.wait_with_output().expect("it ends");
        assert!(started.elapsed() < PATIENCE, "{signal} was not heard");
        assert_eq!(output.status.signal(), None, "{signal}: {output:?}");
        assert_eq!(output.status.code(), Some(code), "{signal}: {output:?}");
        let message = String::from_utf8(output.stderr).expect("text");
        assert!(message.contains("interrupted") && message.contains("incomplete"), "{message}");
        // What is there is no image, or a sound one.
        let target = oracle.work().join("target.qcow2");
        if oracle.qemu.img(["info", "-f", "qcow2", target.to_str().expect("text")]).code == 0 {
            oracle.qemu.expect_clean(&target);
        }
    }
}

#[test]
fn a_closed_output_does_not_stop_a_conversion() {
    let oracle = Oracle::new();
    oracle.make("create -q -f raw source.raw 8M");
    oracle.io(&["write -P 7 0 8M"], "source.raw");
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let output = Command::new(env!("CARGO_BIN_EXE_cowshed"))
        .args(["convert", "-p", "-O", "qcow2", "source.raw", "target.qcow2"])
        .current_dir(oracle.work())
        .stdout(writer)
        .output()
        .expect("our own binary runs");
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), &b""[..]), "{output:?}");
    let (source, target) = (oracle.work().join("source.raw"), oracle.work().join("target.qcow2"));
    assert!(oracle.qemu.is_equal((&source, "raw"), (&target, "qcow2")));
}

#[test]
fn a_signal_asks_for_the_progress() {
    let oracle = Oracle::new();
    oracle.make("create -q -f raw source.raw 64M");
    oracle.io(&["write -P 7 0 64M"], "source.raw");
    let mut child = Command::new(env!("CARGO_BIN_EXE_cowshed"))
        .args(["convert", "-r", "1M", "-O", "qcow2", "source.raw", "target.qcow2"])
        .current_dir(oracle.work())
        .stderr(Stdio::piped())
        .spawn()
        .expect("our own binary runs");
    let id = child.id().to_string();
    let send = |signal: &str| {
        let killed = Command::new("kill").args([&format!("-{signal}"), &id]).status();
        assert!(killed.expect("kill runs").success());
    };
    // Signals are watched for before the target is made.
    while !oracle.work().join("target.qcow2").exists() {
        std::thread::sleep(Duration::from_millis(5));
    }
    send("USR1");
    let mut line = String::new();
    let mut stderr = BufReader::new(child.stderr.take().expect("a pipe"));
    stderr.read_line(&mut line).expect("text");
    assert!(line.starts_with("    (") && line.ends_with("/100%)\n"), "{line:?}");
    send("INT");
    assert_eq!(child.wait().expect("it ends").code(), Some(130));
    assert!(oracle.work().join("target.qcow2").exists(), "the partial target stays, as qemu-img leaves it");
}

#[test]
fn a_full_disk_is_one_clear_line() {
    let oracle = Oracle::new();
    oracle.make("create -q -f raw source.raw 1M");
    oracle.io(&["write -P 7 0 1M"], "source.raw");
    let output = Command::new(env!("CARGO_BIN_EXE_cowshed"))
        .args(["info", "source.raw"])
        .current_dir(oracle.work())
        .stdout(std::fs::OpenOptions::new().write(true).open("/dev/full").expect("/dev/full"))
        .output()
        .expect("our own binary runs");
    let message = String::from_utf8(output.stderr).expect("text");
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains("No space left on device"), "{message}");
}
