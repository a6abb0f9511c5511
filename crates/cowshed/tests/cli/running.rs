// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Long work: it shows progress, stops when asked to, and doesn't depend on a reader of its output.

use crate::oracle::Oracle;
use cowshed_testkit::waiting::await_that;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longer than any of these tests should wait for anything.
const PATIENCE: Duration = Duration::from_secs(30);

#[test]
fn a_signal_stops_a_conversion_in_order() {
    for (signal, code, is_new) in [("INT", 130, true), ("TERM", 143, false), ("HUP", 129, true), ("INT", 130, false)] {
        let oracle = Oracle::new();
        oracle.make("create -q -f raw source.raw 64M");
        oracle.io(&["write -P 7 0 64M"], "source.raw");
        if !is_new {
            oracle.make("create -q -f qcow2 target.qcow2 64M");
        }
        // At this rate it would take a minute.
        let mut child = Command::new(env!("CARGO_BIN_EXE_cowshed"))
            .args(["convert", "--force", "-p", "-r", "1M", "-O", "qcow2", "source.raw", "target.qcow2"])
            .current_dir(oracle.work())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("our own binary runs");
        // The first progress shows that the work has begun and signals are watched for.
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
        let left = if is_new { "nothing was made" } else { "what was written so far is incomplete" };
        assert!(message.contains(&format!("interrupted; {left}")), "{message}");
        // The file is no image, or a sound one.
        let target = oracle.work().join("target.qcow2");
        assert_eq!(target.exists(), !is_new);
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
    assert!(!oracle.work().join("target.qcow2").exists(), "a new target that was never whole must go");
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

/// A server that stops answering on demand: its process is stopped, its connections stay.
struct Server {
    child: Child,
    uri: String,
}

impl Server {
    /// Serves an image of this folder.
    fn start(oracle: &Oracle, image: &str) -> Server {
        let socket = oracle.work().join(format!("{image}.sock"));
        let child = Command::new(env!("CARGO_BIN_EXE_cowshed"))
            .args(["serve", "-f", "raw", image, "-k"])
            .arg(&socket)
            .current_dir(oracle.work())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("our own binary runs");
        let mut server = Server { child, uri: format!("nbd+unix:///?socket={}", socket.display()) };
        let mut line = String::new();
        let output = server.child.stdout.as_mut().expect("a pipe");
        BufReader::with_capacity(1, output).read_line(&mut line).expect("text");
        assert!(line.starts_with("nbd+unix:"), "{line}");
        server
    }

    fn fall_silent(&self) {
        signal("STOP", self.child.id());
        let state = || std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).expect("a process");
        await_that("the server is stopped", || state().contains(") T "));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn signal(signal: &str, id: u32) {
    let killed = Command::new("kill").args([format!("-{signal}"), id.to_string()]).status();
    assert!(killed.expect("kill runs").success());
}

/// Waits for the end of the process; returns its standard error, its exit code, and its time.
fn end_of(mut child: Child) -> (String, Option<i32>, Duration) {
    let started = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().expect("a child") {
            break status;
        }
        if started.elapsed() > PATIENCE {
            let _ = child.kill();
            let _ = child.wait();
            panic!("the process does not end");
        }
        // Between two looks; a process in vain is killed, so this is no `await_that`.
        std::thread::sleep(Duration::from_millis(5));
    };
    let mut said = String::new();
    child.stderr.take().expect("a pipe").read_to_string(&mut said).expect("text");
    (said, status.code(), started.elapsed())
}

/// Waits until the process sleeps in the kernel, twice in a row. The pause between is longer than a job may take before
/// its signals are watched for.
fn await_sleep(child: &Child) {
    let sleeps = || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).expect("a process");
        stat.contains(") S ")
    };
    await_that("the process waits", || {
        sleeps() && {
            // A job that sleeps now may still run on before it watches for signals.
            std::thread::sleep(Duration::from_millis(300));
            sleeps()
        }
    });
}

fn start_work(oracle: &Oracle, arguments: &[&str]) -> Child {
    Command::new(env!("CARGO_BIN_EXE_cowshed"))
        .args(arguments)
        .current_dir(oracle.work())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("our own binary runs")
}

#[test]
fn a_signal_ends_work_whose_io_never_returns() {
    const NOTHING: &str = "nothing was made";
    let oracle = Oracle::new();
    oracle.make("create -q -f raw source.raw 64M");
    oracle.io(&["write -P 7 0 64M"], "source.raw");
    oracle.make("create -q -f raw other.raw 64M");
    oracle.make("create -q -f qcow2 -F raw -b source.raw top.qcow2 64M");
    oracle.io(&["write -P 9 0 8M"], "top.qcow2");
    let server = Server::start(&oracle, "other.raw");
    server.fall_silent();
    // At an open, as a source and as a target. A process that has opened nothing for writing ends at once.
    let uri = server.uri.as_str();
    let verbs: [(&[&str], &str); 5] = [
        (&["convert", "-O", "qcow2", uri, "target.qcow2"], NOTHING),
        (&["convert", "-n", "-O", "raw", "source.raw", uri], NOTHING),
        (&["dd", "-O", "raw", &format!("if={uri}"), "of=target.raw"], NOTHING),
        (&["compare", "source.raw", uri], NOTHING),
        (&["rebase", "-F", "raw", "-b", uri, "top.qcow2"], "is incomplete"),
    ];
    let children = verbs.map(|(verb, _)| start_work(&oracle, verb));
    for child in &children {
        await_sleep(child);
        signal("TERM", child.id());
    }
    for ((verb, leaves), child) in verbs.into_iter().zip(children) {
        let (said, code, elapsed) = end_of(child);
        assert_eq!(code, Some(143), "{verb:?}: {said}");
        assert!(said.contains("interrupted") && said.contains(leaves), "{verb:?}: {said}");
        assert!(elapsed < Duration::from_secs(20), "{verb:?}: {elapsed:?}");
    }
}

#[test]
fn a_signal_ends_a_conversion_whose_server_falls_silent() {
    let oracle = Oracle::new();
    oracle.make("create -q -f raw source.raw 64M");
    oracle.io(&["write -P 7 0 64M"], "source.raw");
    // The first signal is answered after its grace, a second one at once.
    for signals in [1, 2] {
        let server = Server::start(&oracle, "source.raw");
        let target = oracle.work().join("target.qcow2");
        let _ = std::fs::remove_file(&target);
        let child =
            start_work(&oracle, &["convert", "-r", "8M", "-f", "raw", "-O", "qcow2", &server.uri, "target.qcow2"]);
        // The progress begins before the images are open.
        await_that("data in the target", || std::fs::metadata(&target).is_ok_and(|about| about.len() > 1 << 20));
        server.fall_silent();
        await_sleep(&child);
        for _ in 0..signals {
            signal("INT", child.id());
            // Two signals within 0.2 s are one.
            std::thread::sleep(Duration::from_millis(400));
        }
        let (said, code, elapsed) = end_of(child);
        assert_eq!(code, Some(130), "{said}");
        if signals == 1 {
            assert!(said.contains("did not end within 5 s") && said.contains("is incomplete"), "{said}");
            assert!(elapsed < Duration::from_secs(20), "{elapsed:?}");
        } else {
            assert!(elapsed < Duration::from_secs(4), "{elapsed:?}");
        }
    }
}

/// `timeout` signals its command, and then the group of both.
#[test]
fn a_signal_that_comes_twice_removes_the_new_target() {
    let oracle = Oracle::new();
    oracle.make("create -q -f raw source.raw 64M");
    oracle.io(&["write -P 7 0 64M"], "source.raw");
    for pause_ms in [0, 1, 5] {
        let arguments = ["convert", "-p", "-r", "4M", "-f", "raw", "-O", "qcow2", "source.raw", "target.qcow2"];
        let mut child = start_work(&oracle, &arguments);
        child.stdout.as_mut().expect("a pipe").read_exact(&mut [0]).expect("progress");
        for _ in 0..2 {
            signal("TERM", child.id());
            // Two signals at once are one.
            std::thread::sleep(Duration::from_millis(pause_ms));
        }
        let (said, code, _) = end_of(child);
        assert_eq!(code, Some(143), "{said}");
        assert!(said.contains("interrupted"), "{said}");
        assert!(!oracle.work().join("target.qcow2").exists(), "{said}");
    }
}

#[test]
fn a_signal_ends_an_io_shell_at_once() {
    let oracle = Oracle::new();
    oracle.make("create -q -f raw disk.raw 1M");
    let server = Server::start(&oracle, "disk.raw");
    server.fall_silent();
    let child = start_work(&oracle, &["io", "-f", "raw", "-c", "read 0 512", &server.uri]);
    await_sleep(&child);
    signal("TERM", child.id());
    let (said, _, elapsed) = end_of(child);
    assert!(elapsed < Duration::from_secs(4), "{elapsed:?} {said}");
}

#[test]
fn a_signal_ends_an_open_that_blocks() {
    let oracle = Oracle::new();
    oracle.make("create -q -f raw source.raw 1M");
    assert!(Command::new("mkfifo").arg(oracle.work().join("pipe")).status().expect("mkfifo runs").success());
    let child = start_work(&oracle, &["convert", "-f", "raw", "-O", "raw", "pipe", "target.raw"]);
    // The process has time to reach its open.
    std::thread::sleep(Duration::from_millis(300));
    // An open that doesn't block refuses the pipe, which ends it as well.
    let _ = Command::new("kill").args(["-TERM", &child.id().to_string()]).status();
    let (said, code, elapsed) = end_of(child);
    assert!(code == Some(143) || code == Some(1), "{code:?} {said}");
    assert!(elapsed < Duration::from_secs(20), "{elapsed:?}");
}

/// The kernel's signal for it would end the process, and with it all that isn't flushed.
#[test]
fn a_limit_of_file_sizes_is_an_error() {
    let oracle = Oracle::new();
    oracle.make("create -q -f qcow2 image.qcow2 64M");
    oracle.make("create -q -f raw source.raw 1M");
    oracle.io(&["write -P 7 0 1M"], "source.raw");
    let lines = [
        "convert -f raw -O raw source.raw target.raw",
        "convert -f raw -O qcow2 source.raw target.qcow2",
        "create -f raw new.raw 1M",
        "resize -f raw --preallocation=falloc source.raw 2M",
        "resize image.qcow2 --preallocation=falloc 128M",
    ];
    for line in lines {
        let output = Command::new("prlimit")
            .arg("--fsize=524288")
            .arg(env!("CARGO_BIN_EXE_cowshed"))
            .args(line.split(' '))
            .current_dir(oracle.work())
            .output()
            .expect("prlimit must be installed (util-linux)");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "`{line}`: {:?}: {said}", output.status);
        assert!(said.contains("File too large"), "`{line}`: {said}");
    }
    oracle.qemu.expect_clean(&oracle.work().join("image.qcow2"));
}
