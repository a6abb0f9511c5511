// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Words that only the name `cowshed` says: hints, notices, the log of a daemon, `top` on a terminal.

use crate::serving::Serving;
use cowshed_testkit::qemu::temp_dir;
use cowshed_testkit::waiting::await_that;
use std::fs;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const COWSHED: &str = env!("CARGO_BIN_EXE_cowshed");

/// Exit code and standard error.
fn run(folder: &Path, line: &str) -> (Option<i32>, String) {
    let output = Command::new(COWSHED).args(line.split(' ')).current_dir(folder).output().expect("our own binary");
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn a_name_with_a_colon_gets_a_hint_and_no_file() {
    let folder = temp_dir();
    fs::write(folder.path().join("disk"), [7; 512]).expect("a file");
    for line in ["create a:c.qcow2 1M", "convert disk a:c.qcow2", "dd if=disk of=a:c.qcow2", "info a:c.qcow2"] {
        let (code, said) = run(folder.path(), line);
        assert_eq!(code, Some(1), "{line}: {said}");
        assert!(said.contains("(a file of this name is './a:c.qcow2')"), "{line}: {said}");
    }
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1);
    assert_eq!(run(folder.path(), "create -q ./a:c.qcow2 1M").0, Some(0));
    assert!(folder.path().join("a:c.qcow2").exists());
}

#[test]
fn a_format_by_the_ending_is_said_in_one_line() {
    let folder = temp_dir();
    fs::write(folder.path().join("disk"), [7; 512]).expect("a file");
    for (line, format, option) in
        [("create NAME 1M", "qcow2", "-f"), ("convert disk NAME", "vhdx", "-O"), ("dd if=disk of=NAME", "vmdk", "-O")]
    {
        let name = format!("{}.{format}", line.len());
        let line = line.replace("NAME", &name);
        let (code, said) = run(folder.path(), &line);
        let notice = format!("cowshed: the format of '{name}' is {format}, by its ending ({option} names another)\n");
        assert_eq!((code, said), (Some(0), notice), "{line}");
        let info = run(folder.path(), &format!("info -f {format} {name}"));
        assert_eq!(info, (Some(0), String::new()), "{line}");
    }
    // An option counts more, and -q says nothing.
    assert_eq!(run(folder.path(), "create -f raw raw.qcow2 1M"), (Some(0), String::new()));
    assert_eq!(fs::read(folder.path().join("raw.qcow2")).expect("an image"), vec![0; 1 << 20]);
    assert_eq!(run(folder.path(), "create -q quiet.qcow2 1M"), (Some(0), String::new()));
}

#[test]
fn each_event_is_one_line_of_the_log() {
    let folder = temp_dir();
    let at = folder.path();
    assert_eq!(run(at, "create -q -f qcow2 disk 1M").0, Some(0));
    let log = fs::File::create(at.join("log")).expect("a file");
    let mut child = Command::new(COWSHED)
        .args(["serve", "-k", "n.sock", "disk"])
        .env_remove("RUST_LOG")
        .env("XDG_RUNTIME_DIR", at)
        .current_dir(at)
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .expect("our own binary");
    let lines = || fs::read_to_string(at.join("log")).expect("text");
    let await_words = |words: &str| await_that(words, || lines().contains(words));
    await_words("export added");
    let uri = format!("nbd+unix:///?socket={}", at.join("n.sock").display());
    let read = Command::new("qemu-io").args(["-f", "raw", "-c", "read 0 4k", &uri]).output().expect("qemu-io runs");
    assert!(read.status.success(), "{read:?}");
    await_words("client left");
    let killed = Command::new("kill").args(["-INT", &child.id().to_string()]).status();
    assert!(killed.expect("kill runs").success());
    assert!(child.wait().expect("it ends").success(), "{}", lines());
    let log = lines();
    for event in
        ["NBD server listens", "export added", "client uses export", "client left", "stopping", "export deleted"]
    {
        assert_eq!(log.matches(event).count(), 1, "{event}: {log}");
    }
    assert_eq!(log.lines().count(), 6, "{log}");
}

/// Keys are typed on a terminal that Python makes.
const TERMINAL: &str = r"
import os, pty, sys
pid, terminal = pty.fork()
if pid == 0:
    os.execv(sys.argv[1], [sys.argv[1], 'top', '--interval', '600', 'm.sock'])
text = b''
while b'q: end' not in text:
    text += os.read(terminal, 4096)
os.write(terminal, b'xq')
while True:
    try:
        more = os.read(terminal, 4096)
    except OSError:
        break
    if not more:
        break
    text += more
sys.stdout.buffer.write(text)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
";

#[test]
fn top_has_figures_at_once_and_ends_at_q() {
    let folder = temp_dir();
    let at = folder.path();
    assert_eq!(run(at, "create -q -f qcow2 a.qcow2 1M").0, Some(0));
    let mut serving = Serving::start(at.to_owned(), &["serve", "-k", "n.sock", "--monitor", "m.sock", "a.qcow2"]);
    serving.line();
    serving.line();
    let limits = r#"{"execute":"qmp_capabilities"}{"execute":"block_set_io_throttle","arguments":{"id":"a","iops":500,
        "iops_rd":0,"iops_wr":0,"bps":0,"bps_rd":0,"bps_wr":0}}"#;
    let mut monitor = UnixStream::connect(at.join("m.sock")).expect("a monitor");
    monitor.write_all(limits.as_bytes()).expect("it reads");
    let uri = format!("nbd+unix:///?socket={}", at.join("n.sock").display());
    let mut load = Command::new("qemu-io");
    load.args(["-f", "raw", "-c", "write 0 1M"]).args(["-c", "aio_read 0 4k"].repeat(10_000)).arg(&uri);
    let mut load = load.stdout(Stdio::null()).spawn().expect("qemu-io runs");
    // The load is under way once the daemon counts it.
    await_that("the load is counted", || {
        let top = ["top", "--interval", "0.2", "--count", "1", "m.sock"];
        let output = Command::new(COWSHED).args(top).current_dir(at).output().expect("our own binary");
        figures(&String::from_utf8_lossy(&output.stdout))
    });
    let started = Instant::now();
    let output = Command::new("python3").args(["-c", TERMINAL, COWSHED]).current_dir(at).output().expect("Python runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{output:?}");
    assert!(started.elapsed() < Duration::from_secs(300), "the interval is longer");
    assert_eq!(text.matches("q: end").count(), 1, "one frame: {text}");
    assert!(figures(&text), "{text}");
    load.kill().expect("qemu-io is stopped");
    load.wait().expect("it ends");
}

/// True where the row of the export has reads.
fn figures(text: &str) -> bool {
    let row = text.lines().find(|line| line.starts_with("a "));
    let reads = row.and_then(|row| row.split_whitespace().nth(2)?.parse::<f64>().ok());
    reads.is_some_and(|reads| reads > 0.0)
}
