// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Image locks against each other and against a running QEMU.

use cowshed_storage::{File, Locking, OpenOptions, PermissionSet, Permissions};
use cowshed_types::ErrorKind;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use tempfile::TempDir;

use cowshed_testkit::held;
use cowshed_testkit::waiting::await_that;

fn image() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    let path = dir.path().join("image.qcow2");
    let made = Command::new("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(&path).arg("1M").status();
    assert!(made.expect("qemu-img").success());
    (dir, path)
}

fn open(path: &Path) -> File {
    File::open(path, &OpenOptions { write: true, ..OpenOptions::default() }).expect("open")
}

/// A `qemu-io` that holds an image.
struct QemuIo {
    child: Child,
    input: Option<ChildStdin>,
}

impl QemuIo {
    fn hold(path: &Path, options: &[&str]) -> Self {
        let mut command = Command::new("qemu-io");
        command.args(options).arg(path).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("qemu-io");
        let mut input = child.stdin.take().expect("stdin");
        // Its answer to a command shows that the image is open.
        input.write_all(b"length\n").expect("command");
        let mut output = BufReader::new(child.stdout.take().expect("stdout"));
        let mut line = String::new();
        output.read_line(&mut line).expect("answer");
        assert!(line.contains("1 MiB"), "{line}");
        std::thread::spawn(move || output.read_to_end(&mut Vec::new()));
        QemuIo { child, input: Some(input) }
    }
}

impl Drop for QemuIo {
    fn drop(&mut self) {
        drop(self.input.take());
        await_that("qemu-io ends", || self.child.try_wait().expect("wait").is_some());
    }
}

/// The error of `qemu-io` when it can't have the image; `None` when it can.
fn refusal(path: &Path, options: &[&str]) -> Option<String> {
    let output = Command::new("qemu-io").args(options).args(["-c", "read 0 512"]).arg(path).output().expect("qemu-io");
    match output.status.success() {
        true => None,
        false => Some(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

fn message(file: &File, permissions: Permissions) -> String {
    let error = file.lock(permissions).expect_err("conflict");
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert_eq!(error.file_name(), Some(file.name()));
    error.message().to_owned()
}

const WRITE_REFUSED: &str = "failed to get \"write\" lock: another process uses the image and does not share it";
const READ_REFUSED: &str = "failed to get shared \"write\" lock: another process has the image open for that";
const OUR_WRITE_REFUSED: &str =
    "failed to get \"write\" lock: this process uses the image already and does not share it";
const OUR_READ_REFUSED: &str = "failed to get shared \"write\" lock: this process has the image open for that already";

#[test]
fn writers_refuse_each_other_and_readers_share() {
    let (_dir, path) = image();
    let (first, second) = (open(&path), open(&path));
    first.lock(Permissions::WRITE).expect("free");
    assert_eq!(message(&second, Permissions::WRITE), OUR_WRITE_REFUSED);
    assert_eq!(message(&second, Permissions::READ), OUR_READ_REFUSED);
    assert_eq!(second.permissions(), Permissions::NONE);
    second.lock(Permissions::READ.sharing_all()).expect("force-share");
    first.lock(Permissions::READ).expect("downgrade");
    second.lock(Permissions::READ).expect("readers share");
    assert_eq!(message(&first, Permissions::WRITE), OUR_WRITE_REFUSED);
    assert_eq!(first.permissions(), Permissions::READ);
    drop(second);
    first.lock(Permissions::WRITE).expect("upgrade");
    let third = open(&path);
    assert_eq!(message(&third, Permissions::READ), OUR_READ_REFUSED);
    first.unlock().expect("unlock");
    third.lock(Permissions::READ).expect("free");
}

#[test]
fn a_failed_change_leaves_the_locks_as_they_were() {
    let (_dir, path) = image();
    let (holder, file) = (open(&path), open(&path));
    holder.lock(Permissions::READ).expect("free");
    file.lock(Permissions::READ).expect("shared");
    message(&file, Permissions::WRITE);
    // Had the failed change left its "write" byte, a reader would now be refused.
    let reader = open(&path);
    reader.lock(Permissions::READ).expect("shared");
    drop((holder, reader));
    file.lock(Permissions::WRITE).expect("alone");
}

#[test]
fn qemu_and_we_refuse_each_other() {
    let (_dir, path) = image();
    let file = open(&path);
    {
        let _writer = QemuIo::hold(&path, &["-f", "qcow2"]);
        assert_eq!(message(&file, Permissions::WRITE), WRITE_REFUSED);
        assert_eq!(message(&file, Permissions::READ), READ_REFUSED);
        file.lock(Permissions::READ.sharing_all()).expect("force-share");
        file.unlock().expect("unlock");
    }
    {
        let _reader = QemuIo::hold(&path, &["-r", "-f", "qcow2"]);
        assert_eq!(message(&file, Permissions::WRITE), WRITE_REFUSED);
        file.lock(Permissions::READ).expect("readers share");
        file.unlock().expect("unlock");
    }
    file.lock(Permissions::WRITE).expect("qemu is gone");
    let said = refusal(&path, &["-f", "qcow2"]).expect("refused");
    assert!(
        said.contains("Failed to get \"write\" lock") || said.contains("Failed to get shared \"write\" lock"),
        "{said}"
    );
    let said = refusal(&path, &["-r", "-f", "qcow2"]).expect("refused");
    assert!(said.contains("Failed to get shared \"write\" lock"), "{said}");
    assert_eq!(refusal(&path, &["-r", "-U", "-f", "qcow2"]), None);
    file.lock(Permissions::READ).expect("downgrade");
    let said = refusal(&path, &["-f", "qcow2"]).expect("refused");
    assert!(said.contains("Failed to get \"write\" lock"), "{said}");
    assert_eq!(refusal(&path, &["-r", "-f", "qcow2"]), None);
    file.unlock().expect("unlock");
    assert_eq!(refusal(&path, &["-f", "qcow2"]), None);
}

#[test]
fn creating_takes_its_lock_before_it_truncates() {
    let (_dir, path) = image();
    let before = std::fs::read(&path).expect("image");
    let options = OpenOptions { create: true, ..OpenOptions::default() };
    {
        let _writer = QemuIo::hold(&path, &["-f", "qcow2"]);
        let error = File::open(&path, &options).expect_err("in use");
        assert_eq!((error.kind(), error.message()), (ErrorKind::Busy, WRITE_REFUSED));
        assert!(std::fs::read(&path).expect("image") == before, "truncated");
    }
    let file = File::open(&path, &options).expect("free");
    assert_eq!((file.len(), file.permissions()), (0, Permissions::NONE));
}

#[test]
fn the_bytes_are_those_of_qemu() {
    let (_dir, path) = image();
    let file = open(&path);
    let cases = [
        (Permissions::WRITE, vec![100, 101, 103, 201, 203]),
        (Permissions::READ, vec![100, 201, 203]),
        (Permissions::READ.sharing_all(), vec![100]),
        (Permissions { used: PermissionSet::WRITE, shared: PermissionSet::NONE }, vec![101, 200, 201, 202, 203]),
        (Permissions::NONE, vec![]),
    ];
    for (permissions, expected) in cases {
        file.lock(permissions).expect("free");
        assert_eq!(held::locked_bytes(std::process::id(), &path), expected, "{permissions:?}");
    }
}

#[test]
fn locking_off_takes_none() {
    let (_dir, path) = image();
    let options = OpenOptions { write: true, locking: Locking::Off, ..OpenOptions::default() };
    let permissions = Some(Permissions::WRITE);
    let first = File::open(&path, &OpenOptions { permissions, ..options.clone() }).expect("open");
    let second = File::open(&path, &OpenOptions { permissions, locking: Locking::On, ..options }).expect("not locked");
    assert_eq!((first.permissions(), second.permissions()), (Permissions::WRITE, Permissions::WRITE));
}
