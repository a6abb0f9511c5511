// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Verbs whose standard output or standard error has lost its reader do the same work and give the same exit code.

use cowshed_testkit::qemu::temp_dir;
use std::path::Path;
use std::process::{Command, Stdio};

/// One line or more for each verb. Each works on its own copy of the folder.
const LINES: &[&str] = &[
    "create -f qcow2 new.qcow2 1M",
    "info a.qcow2",
    "info --output=json a.qcow2",
    "inspect a.qcow2",
    "map a.qcow2",
    "check a.qcow2",
    "check nosuch.qcow2",
    "rescue a.qcow2 out.raw",
    "compare a.qcow2 a.qcow2",
    "compare a.qcow2 b.qcow2",
    "convert -p -O raw a.qcow2 out.raw",
    "convert -O raw nosuch.qcow2 out.raw",
    "measure -O qcow2 a.qcow2",
    "resize a.qcow2 2M",
    "resize --shrink a.qcow2 512k",
    "snapshot -c one a.qcow2",
    "snapshot -l a.qcow2",
    "amend -p -o compat=0.10 a.qcow2",
    "bitmap --add a.qcow2 bits",
    "commit over.qcow2",
    "rebase -u -b b.qcow2 -F qcow2 over.qcow2",
    "dd if=a.qcow2 of=out.raw bs=64k",
    "bench -c 10 a.qcow2",
    "io -c 'read 0 64k' a.qcow2",
    "io -c 'read 9M 64k' a.qcow2",
    "qemu-io -c 'read -v 0 512' a.qcow2",
    "qemu-io -c 'write 0 64k' -c help a.qcow2",
    "serve nosuch.qcow2",
    "qemu-nbd -t -k n.sock nosuch.qcow2",
    "qemu-nbd -L -k nosuch.sock",
    "qemu-storage-daemon --blockdev nosuch,node-name=a",
    "top nosuch.sock",
    "completions bash",
    "man",
    "help",
    "--help",
    "--version",
    "nosuch",
    "img info a.qcow2",
    "img convert -p -O raw a.qcow2 out.raw",
    "img check -r all a.qcow2",
    "img nosuch",
    "img --help",
    "img create -f qcow2 -o help",
];

/// The shell's ways of taking the streams away. The reader of a pipe is gone before the program starts.
const LOSSES: &[&str] = &[">&-", "2>&-", ">&- 2>&-", ">PIPE", "2>PIPE", ">PIPE 2>&1"];

fn run(original: &Path, work: &Path, line: &str, loss: &str) -> std::process::Output {
    let _ = std::fs::remove_dir_all(work);
    assert!(Command::new("cp").arg("-a").arg(original).arg(work).status().expect("cp runs").success());
    // Descriptor 9 is a pipe without a reader.
    let script = format!("\"$0\" {line} {}", loss.replace("PIPE", "&9"));
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    Command::new("bash")
        .args(["-c", &format!("exec 9>&0 </dev/null; {script}"), env!("CARGO_BIN_EXE_cowshed")])
        .current_dir(work)
        .stdin(Stdio::from(writer))
        .output()
        .expect("bash runs")
}

#[test]
fn lost_readers_change_no_exit_code() {
    let folder = temp_dir();
    let (original, work) = (folder.path().join("original"), folder.path().join("work"));
    std::fs::create_dir(&original).expect("a folder");
    for line in [
        "create -q -f qcow2 a.qcow2 1M",
        "io -c 'write -P 5 0 64k' a.qcow2",
        "create -q -f qcow2 b.qcow2 1M",
        "create -q -f qcow2 -b b.qcow2 -F qcow2 over.qcow2",
    ] {
        let script = format!("\"$0\" {line}");
        let output =
            Command::new("bash").args(["-c", &script, env!("CARGO_BIN_EXE_cowshed")]).current_dir(&original).output();
        let output = output.expect("bash runs");
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    }
    let mut wrong = Vec::new();
    for line in LINES {
        let healthy = run(&original, &work, line, "");
        assert!(healthy.status.code().is_some_and(|code| code < 10), "{line}: {healthy:?}");
        for loss in LOSSES {
            let lost = run(&original, &work, line, loss);
            if lost.status.code() != healthy.status.code() {
                wrong.push(format!("{line} {loss}: {:?}, with readers {:?}", lost.status, healthy.status));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
