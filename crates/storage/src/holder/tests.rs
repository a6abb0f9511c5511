// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Locks that belong to no process. Their open file is on its way through a socket, as that of a killed process is in
//! the hands of the kernel.

use super::{Holder, MAX_LOOKS, Processes, of};
use crate::sys::{ByteLock, set_lock};
use crate::{File, OpenOptions, Permissions};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(60);

fn image() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("image");
    std::fs::write(&path, [0; 4096]).expect("a file");
    (folder, path)
}

/// Locks all bytes of a writer; the locks go with the sockets.
fn leave_locks(path: &Path) -> (UnixStream, UnixStream) {
    let file = std::fs::File::open(path).expect("the file");
    for byte in [100, 101, 103, 201, 203] {
        set_lock(&file, ByteLock::Read, byte, 1).expect("a lock");
    }
    let pair = UnixStream::pair().expect("sockets");
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut message = SendAncillaryBuffer::new(&mut space);
    let fds = [file.as_fd()];
    assert!(message.push(SendAncillaryMessage::ScmRights(&fds)));
    rustix::net::sendmsg(&pair.0, &[IoSlice::new(b"x")], &mut message, SendFlags::empty()).expect("sent");
    pair
}

fn open(path: &Path, permissions: Permissions) -> cowshed_types::Result<File> {
    File::open(path, &OpenOptions { write: true, permissions: Some(permissions), ..OpenOptions::default() })
}

#[test]
fn a_lock_that_a_dead_process_left_is_waited_for() {
    let (_folder, path) = image();
    for permissions in [Permissions::WRITE, Permissions::READ] {
        let sockets = leave_locks(&path);
        let dying = std::thread::spawn(move || {
            // The locks go while the open waits.
            std::thread::sleep(Duration::from_millis(100));
            drop(sockets);
        });
        open(&path, permissions).expect("the remnant goes");
        dying.join().expect("it ends");
    }
}

#[test]
fn a_lock_that_stays_is_refused_after_a_bounded_wait() {
    let (_folder, path) = image();
    let sockets = leave_locks(&path);
    let started = Instant::now();
    let error = open(&path, Permissions::WRITE).expect_err("the image is locked");
    assert!(started.elapsed() >= crate::lock::REMNANT_LIMIT, "it had a second to go");
    let expected = "failed to get \"write\" lock: another process uses the image and does not share it";
    assert_eq!(error.message(), expected);
    // Nothing of the refused attempts stays.
    drop(sockets);
    open(&path, Permissions::WRITE).expect("free");
}

#[test]
fn holders_that_live_are_known() {
    let (_folder, path) = image();
    let own = std::fs::File::open(&path).expect("the file");
    assert_eq!(of(own.as_fd(), 101, LONG), Holder::Unknown, "without a lock of its own nothing is known");
    set_lock(&own, ByteLock::Read, 100, 1).expect("a lock");
    assert_eq!(of(own.as_fd(), 101, LONG), Holder::Unknown);
    let other = std::fs::File::open(&path).expect("the file");
    set_lock(&other, ByteLock::Read, 101, 3).expect("a lock");
    assert_eq!(of(own.as_fd(), 103, LONG), Holder::Here);
    assert_eq!(of(own.as_fd(), 104, LONG), Holder::Unknown);
    drop(other);
    let mut child = std::process::Command::new("qemu-io")
        .args(["-f", "raw"])
        .arg(&path)
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("qemu-io runs");
    let deadline = Instant::now() + LONG;
    while of(own.as_fd(), 101, LONG) != Holder::Another {
        assert!(Instant::now() < deadline, "qemu-io holds no lock");
        // Between two looks, with the bound above.
        std::thread::sleep(Duration::from_millis(2));
    }
    child.kill().expect("it is killed");
    child.wait().expect("it ends");
    assert_eq!(of(own.as_fd(), 101, LONG), Holder::Unknown);
}

#[test]
fn a_process_that_stands_still_holds_no_look() {
    static LOOKS: AtomicUsize = AtomicUsize::new(0);
    let (folder, path) = image();
    let list = folder.path().join("proc");
    let process = list.join("77");
    std::fs::create_dir_all(process.join("fd")).expect("a folder");
    std::fs::create_dir(process.join("fdinfo")).expect("a folder");
    std::os::unix::fs::symlink("/proc/self", list.join("self")).expect("a link");
    std::os::unix::fs::symlink("/image", process.join("fd/3")).expect("a link");
    // Its readers wait for a writer.
    let info = process.join("fdinfo/3");
    rustix::fs::mknodat(rustix::fs::CWD, &info, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).expect("a FIFO");
    let own = std::fs::File::open(&path).expect("the file");
    set_lock(&own, ByteLock::Read, 100, 1).expect("a lock");
    let look = |limit| Processes { list: list.clone(), looks: &LOOKS }.holder_within(own.as_fd(), 101, limit);
    let started = Instant::now();
    for _ in 0..2 * MAX_LOOKS {
        assert_eq!(look(Duration::from_millis(50)), Holder::Unknown);
    }
    assert_eq!(LOOKS.load(Ordering::Relaxed), MAX_LOOKS);
    assert!(started.elapsed() < LONG, "{:?}", started.elapsed());
    let freed = Instant::now() + LONG;
    while LOOKS.load(Ordering::Relaxed) > 0 {
        assert!(Instant::now() < freed, "a look stays");
        drop(std::fs::OpenOptions::new().read(true).write(true).open(&info));
        // Between two looks, with the bound above.
        std::thread::sleep(Duration::from_millis(2));
    }
}
