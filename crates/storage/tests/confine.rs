// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A confined thread does its work and nothing else. Confinement is for a thread and those that it starts, so each test
//! locks in one of its own.

use cowshed_block::{Errno, ErrorKind};
use cowshed_storage::confine::{Confined, Confinement, Enforcement};
use cowshed_storage::rt::block_on;
use cowshed_storage::{Engine, File, IoBuf, OpenOptions};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

fn confined<T: Send + 'static>(confinement: Confinement, work: impl FnOnce(Confined) -> T + Send + 'static) -> T {
    let thread = std::thread::spawn(move || {
        let confined = confinement.apply().expect("this kernel confines, or says that it can't");
        work(confined)
    });
    thread.join().expect("the confined thread")
}

fn open(path: &Path, write: bool, create: bool) -> cowshed_block::Result<File> {
    File::open(path, &OpenOptions { write, create, ..OpenOptions::default() })
}

#[test]
fn only_what_was_named_can_be_opened() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    let path = |name: &str| folder.path().join(name);
    for name in ["source", "other", "target"] {
        std::fs::write(path(name), [7; 1000]).expect("a file");
    }
    std::fs::create_dir(path("new")).expect("a folder");
    let mut confinement = Confinement::new();
    confinement.read(path("source")).read(path("absent")).write(path("target")).write(path("new").join("image"));
    let root = folder.path().to_owned();
    confined(confinement, move |confined| {
        assert_ne!(confined.files, Enforcement::None, "no Landlock here: this test needs Linux 5.13 with it enabled");
        let path = move |name: &str| root.join(name);
        block_on(async {
            let source = open(&path("source"), false, false).expect("it was named");
            let (result, bytes) = source.read_at(IoBuf::zeroed(1000), 0).await;
            result.expect("it can be read");
            assert!(bytes.iter().all(|byte| *byte == 7));
            for (name, create) in [("target", false), ("target", true), ("new/image", true)] {
                let file = open(&path(name), true, create).expect(name);
                file.write_at(IoBuf::copy_from(b"new"), 0).await.0.expect(name);
                file.sync().await.expect(name);
            }
        });
        for (name, write) in [("other", false), ("other", true), ("source", true)] {
            let error = open(&path(name), write, false).expect_err(name);
            assert_eq!((error.kind(), error.errno()), (ErrorKind::PermissionDenied, Errno::EACCES), "{name}");
        }
        assert_eq!(open(&path("created"), true, true).expect_err("not there").errno(), Errno::EACCES);
        assert_eq!(open(&path("absent"), false, false).expect_err("not there").errno(), Errno::ENOENT);
        assert!(std::fs::read("/etc/passwd").is_err() && std::fs::read_dir("/").is_err());
        assert!(std::fs::remove_file(path("other")).is_err(), "nothing can be removed");
        // Also by threads that it starts.
        let inherited = std::thread::spawn(move || std::fs::read(path("other")).is_err());
        assert!(inherited.join().expect("a thread"));
    });
    assert_eq!(std::fs::read(path("other")).expect("it is still there"), [7; 1000]);
}

#[test]
fn everything_can_be_read_where_that_was_asked_for() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    let path = folder.path().join("file");
    std::fs::write(&path, b"text").expect("a file");
    let mut confinement = Confinement::new();
    confinement.read_everything();
    confined(confinement, move |_| {
        assert_eq!(std::fs::read(&path).expect("it can be read"), b"text");
        assert!(std::fs::write(&path, b"other").is_err());
    });
}

#[test]
fn no_program_no_socket_no_ring() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    let path = folder.path().join("file");
    std::fs::write(&path, b"text").expect("a file");
    let mut confinement = Confinement::new();
    confinement.read(&path);
    let error = confined(confinement, move |confined| {
        assert_eq!(confined.system_calls, Enforcement::Full);
        let forbidden = Some(libc::EPERM);
        assert_eq!(Command::new("/bin/true").spawn().expect_err("no process").raw_os_error(), forbidden);
        // Were it not forbidden, this process would be another one from here on, and fail.
        assert_eq!(Command::new("/bin/false").exec().raw_os_error(), forbidden);
        assert_eq!(std::net::UdpSocket::bind("127.0.0.1:0").expect_err("no socket").raw_os_error(), forbidden);
        let denied = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::TERM);
        assert_eq!(denied.expect_err("no signals"), rustix::io::Errno::PERM);
        let options = OpenOptions { engine: Engine::IoUring, ..OpenOptions::default() };
        File::open(&path, &options).expect_err("no io_uring")
    });
    assert_eq!((error.message(), error.errno()), ("io_uring is not available", Errno::ENOSYS));
}
