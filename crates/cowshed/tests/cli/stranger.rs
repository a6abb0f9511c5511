// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Mistakes on the command line end with one clear line and the right exit code, never with a panic.

use crate::oracle::{self, Oracle};
use cowshed_testkit::programs::{Said, finish};
use std::process::Command;

fn cowshed(oracle: &Oracle, line: &str) -> Said {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cowshed"));
    finish(command.args(oracle::words(line)).current_dir(oracle.work()).env("RUST_BACKTRACE", "1"))
}

/// One line, two where the second points to the help.
#[track_caller]
fn expect_refusal(oracle: &Oracle, line: &str, code: i32, words: &[&str]) {
    let said = cowshed(oracle, line);
    assert_eq!(said.code, Some(code), "{line}: {said:?}");
    assert!(said.err.starts_with("cowshed: "), "{line}: {said:?}");
    let lines: Vec<&str> = said.err.lines().filter(|line| !line.starts_with("Try 'cowshed")).collect();
    assert_eq!(lines.len(), 1, "{line}: {said:?}");
    for word in words {
        assert!(lines.iter().any(|line| line.contains(word)), "{line}: no {word:?} in {said:?}");
    }
    assert!(!said.err.contains("panicked") && !said.err.contains("stack backtrace"), "{said:?}");
}

#[test]
fn wrong_command_lines() {
    let oracle = Oracle::new();
    for (line, words) in [
        ("'' ", &["Command not found"][..]),
        ("infoo x", &["infoo", "did you mean 'info'"]),
        ("convrt x y", &["convrt", "did you mean 'convert'"]),
        ("snapshto x", &["did you mean 'snapshot'"]),
        ("info", &["one image file name"]),
        ("info --outptu=json x", &["--outptu", "did you mean '--output'"]),
        ("info --output=xml x", &["'human' or 'json'", "xml"]),
        ("info -f", &["-f", "requires an argument"]),
        ("info --backing-chain=yes x", &["--backing-chain"]),
        ("check --repair=some x", &["'leaks' or 'all'", "some"]),
        ("create x 10Q", &["image size", "10Q"]),
        ("create x 99999999999999999999", &["image size"]),
        ("resize x +-5", &["size"]),
        ("convert -m 0 x y", &["1 and 16"]),
        ("convert --skip-broken-bitmaps x y", &["requires --bitmaps"]),
        ("bitmap x y", &["--add", "--merge"]),
        ("bitmap --add x", &["bitmap name"]),
        ("create --object secret,id=a x 1M", &["'file' or 'data'"]),
        ("info --object secret,id=a x", &["'file' or 'data'"]),
        ("info --object secret,data=b x", &["'id'"]),
        ("info --object secret,id=a,data=b,file=c x", &["mutually exclusive"]),
        ("info --object secret,id=a,data=b,format=hex x", &["hex"]),
        ("info --object secret,id=a,data=b,keyid=c x", &["keyid"]),
        ("info --object secret,id=a,file=nofile x", &["nofile", "No such file"]),
        ("info --object secret,id=a,data=b --object secret,id=a,data=c x", &["'a'", "duplicate"]),
        ("info --object rng-random,id=a x", &["rng-random"]),
        ("amend x", &["Must specify options"]),
        ("rebase x", &["backing file (-b)"]),
        ("commit --untrusted x", &["named by -b"]),
        ("completions tcsh", &["tcsh"]),
        ("help nothing", &["nothing"]),
    ] {
        expect_refusal(&oracle, line, 1, words);
    }
}

#[test]
fn files_that_are_no_images() {
    let oracle = Oracle::new();
    oracle.make("create -q -f qcow2 good.qcow2 1M");
    let work = oracle.work();
    std::fs::create_dir(work.join("folder")).expect("a folder");
    let good = std::fs::read(work.join("good.qcow2")).expect("the image");
    std::fs::write(work.join("cut.qcow2"), &good[..70]).expect("a cut image");
    std::fs::write(work.join("text.txt"), "hello").expect("a text");
    let mut unknown = good.clone();
    unknown[79] |= 0x80;
    std::fs::write(work.join("unknown.qcow2"), &unknown).expect("an image");
    for (line, words) in [
        ("info nofile", &["nofile", "No such file"][..]),
        ("info folder", &["folder"]),
        ("info cut.qcow2", &["cut.qcow2", "ends within its qcow2 header (file length is 70 bytes)"]),
        ("info -f qcow2 text.txt", &["text.txt"]),
        ("info unknown.qcow2", &["unknown.qcow2"]),
        ("map nofile", &["nofile", "No such file"]),
        ("check nofile", &["nofile", "No such file"]),
        ("convert nofile out", &["nofile", "No such file"]),
        ("convert -O qcow2 good.qcow2 folder", &["folder"]),
        ("convert -O qcow2 good.qcow2 no/such/out", &["no/such/out", "No such file"]),
        ("convert good.qcow2 good.qcow2", &["good.qcow2"]),
        ("create -f qcow2 folder 1M", &["folder"]),
        ("create -f qcow2 -b nofile -F raw new.qcow2", &["nofile", "No such file"]),
        ("create -f qcow2 -b good.qcow2 new.qcow2", &["format"]),
        ("resize nofile 1M", &["nofile", "No such file"]),
        ("resize good.qcow2 512k", &["--shrink"]),
        ("measure -O qcow2 nofile", &["nofile", "No such file"]),
        ("dd if=nofile of=out", &["nofile", "No such file"]),
        ("info --image-opts driver=qcow2,file.filename=good.qcow2,colour=blue", &["colour"]),
        ("info 'json:{\"driver\":'", &["json"]),
    ] {
        expect_refusal(&oracle, line, 1, words);
    }
    expect_refusal(&oracle, "compare good.qcow2 nofile", 2, &["nofile", "No such file"]);
    expect_refusal(&oracle, "check text.txt", 63, &["text.txt"]);
    assert_eq!(std::fs::read(work.join("good.qcow2")).expect("the image"), good, "nothing has touched the image");
}

/// A file that was cut off in the middle of its data, its tables still there: lost data is never handed out as zeroes.
#[test]
fn images_that_end_too_early() {
    let oracle = Oracle::new();
    oracle.make("create -q -f qcow2 cut.qcow2 64M");
    oracle.make("create -q -f qcow2 over.qcow2 -b cut.qcow2 -F qcow2");
    let path = oracle.work().join("cut.qcow2");
    let wrote = Command::new("qemu-io").args(["-c", "write -P 3 0 8M"]).arg(&path).output().expect("qemu-io runs");
    assert!(wrote.status.success(), "{wrote:?}");
    let file = std::fs::OpenOptions::new().write(true).open(&path).expect("the image");
    file.set_len(300_000).expect("cut");
    let image = std::fs::read(&path).expect("the image");
    let lost = &["cut.qcow2", "past the end of the file (300000 bytes)", "guest offset 0x0"];
    expect_refusal(&oracle, "convert -q -O raw cut.qcow2 out.raw", 1, lost);
    expect_refusal(&oracle, "convert -q -O qcow2 over.qcow2 out.qcow2", 1, lost);
    expect_refusal(&oracle, "dd if=cut.qcow2 of=out.raw bs=1M count=1", 1, lost);
    expect_refusal(&oracle, "compare -q cut.qcow2 over.qcow2", 4, lost);
    let said = cowshed(&oracle, "convert -q --salvage -O raw cut.qcow2 salvaged.raw");
    assert!(said.code == Some(0) && said.err.contains("unreadable parts became zeroes"), "{said:?}");
    assert_eq!(std::fs::read(&path).expect("the image"), image, "nothing has touched the image");
    // The texts of qemu-img 7.2 and 11.1 for errors that it notices.
    let said = cowshed(&oracle, "img compare over.qcow2 cut.qcow2");
    let text = "qemu-img: Error while reading offset 0 of over.qcow2: Input/output error\n";
    assert_eq!((said.code, said.err.as_str()), (Some(4), text));
    // Without the table the allocation is unknown.
    file.set_len(4 * 65536 + 512).expect("cut");
    let lost = &["cut.qcow2", "a table lies past the end of the file (262656 bytes)"];
    expect_refusal(&oracle, "compare -q cut.qcow2 over.qcow2", 3, lost);
    let said = cowshed(&oracle, "img compare over.qcow2 cut.qcow2");
    let text = "qemu-img: Sector allocation test failed for over.qcow2\n";
    assert_eq!((said.code, said.err.as_str()), (Some(3), text));
    expect_refusal(&oracle, "map cut.qcow2", 1, lost);
}

/// A reader that goes away, and a standard output that takes nothing.
#[test]
fn closed_and_full_outputs() {
    let oracle = Oracle::new();
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let output = Command::new(env!("CARGO_BIN_EXE_cowshed")).arg("--help").stdout(writer).output().expect("runs");
    assert_eq!((output.status.code(), output.stderr.len()), (Some(0), 0), "{output:?}");
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").expect("/dev/full");
    let output = Command::new(env!("CARGO_BIN_EXE_cowshed")).arg("--help").stdout(full).output().expect("runs");
    assert_eq!(output.status.code(), Some(1));
    let message = String::from_utf8(output.stderr).expect("text");
    assert!(message.contains("No space left on device"), "{message}");
    drop(oracle);
}
