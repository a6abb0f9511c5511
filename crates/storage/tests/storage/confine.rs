// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A confined thread does its work and nothing else. Confinement is for a thread and those that it starts, so each test
//! locks in one of its own.

use cowshed_storage::confine::{Confined, Confinement, Enforcement};
use cowshed_storage::rt::block_on;
use cowshed_storage::{File, IoBuf, IoEngine, OpenOptions};
use cowshed_types::{Errno, ErrorKind};
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

fn open(path: &Path, write: bool, create: bool) -> cowshed_types::Result<File> {
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
        let options = OpenOptions { engine: IoEngine::IoUring, ..OpenOptions::default() };
        File::open(&path, &options).expect_err("no io_uring")
    });
    assert_eq!((error.message(), error.errno()), ("io_uring is not available", Errno::ENOSYS));
}

/// The result of a system call by its number, for calls that no library has.
fn raw(call: i64, arguments: [u64; 6]) -> Result<i64, i32> {
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: the calls of these tests are refused, or write to nothing but memory that they are given and that is there.
    let result = unsafe { libc::syscall(call, a, b, c, d, e, f) };
    if result < 0 { Err(std::io::Error::last_os_error().raw_os_error().expect("a number")) } else { Ok(result) }
}

/// Ways out of confinement that a list of forbidden calls left open, and others of their kinds. Each call is made from
/// inside; where the kernel would refuse it anyway, its error would be another one.
#[test]
fn ways_out_are_closed() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    let path = folder.path().join("file");
    std::fs::write(&path, b"text").expect("a file");
    let name = std::ffi::CString::new(path.to_str().expect("a name")).expect("no NUL");
    let mut confinement = Confinement::new();
    confinement.write(&path);
    confined(confinement, move |confined| {
        assert_eq!(confined.system_calls, Enforcement::Full);
        let at = libc::AT_FDCWD as i64 as u64;
        let text = name.as_ptr() as u64;
        let parent = u64::from(std::os::unix::process::parent_id());
        let own = u64::from(std::process::id());
        let byte = b'x';
        let byte = (&raw const byte) as u64;
        let limits = [1u64, 1];
        let limits = limits.as_ptr() as u64;
        const FCHMODAT2: i64 = 452;
        const X32: i64 = 0x4000_0000;
        const TIOCSTI: u64 = 0x5412;
        let forbidden: &[(&str, i64, [u64; 6])] = &[
            // Into the terminal, also with bits set that the kernel doesn't look at.
            ("TIOCSTI", libc::SYS_ioctl, [2, TIOCSTI, byte, 0, 0, 0]),
            ("TIOCSTI with high bits", libc::SYS_ioctl, [2, TIOCSTI | 1 << 32, byte, 0, 0, 0]),
            ("TIOCLINUX", libc::SYS_ioctl, [2, 0x541c, byte, 0, 0, 0]),
            ("TIOCSCTTY", libc::SYS_ioctl, [2, 0x540e, 0, 0, 0, 0]),
            ("TCSETS", libc::SYS_ioctl, [2, 0x5402, byte, 0, 0, 0]),
            ("FIOSETOWN", libc::SYS_ioctl, [2, 0x8901, byte, 0, 0, 0]),
            // Names and attributes of files.
            ("fchmodat2", FCHMODAT2, [at, text, 0o777, 0, 0, 0]),
            ("fchmodat", libc::SYS_fchmodat, [at, text, 0o777, 0, 0, 0]),
            ("fchownat", libc::SYS_fchownat, [at, text, 0, 0, 0, 0]),
            ("utimensat", libc::SYS_utimensat, [at, text, 0, 0, 0, 0]),
            ("unlinkat", libc::SYS_unlinkat, [at, text, 0, 0, 0, 0]),
            ("renameat2", libc::SYS_renameat2, [at, text, at, text, 0, 0]),
            ("linkat", libc::SYS_linkat, [at, text, at, text, 0, 0]),
            ("mkdirat", libc::SYS_mkdirat, [at, text, 0o777, 0, 0, 0]),
            ("setxattr", libc::SYS_setxattr, [text, text, text, 1, 0, 0]),
            // Other processes, and state shared with them.
            ("prlimit64 of another", libc::SYS_prlimit64, [parent, 7, 0, limits, 0, 0]),
            ("prlimit64 with new limits", libc::SYS_prlimit64, [0, 7, limits, 0, 0, 0]),
            ("setpriority", libc::SYS_setpriority, [0, parent, 19, 0, 0, 0]),
            ("ioprio_set", libc::SYS_ioprio_set, [1, parent, 0, 0, 0, 0]),
            ("sched_setaffinity", libc::SYS_sched_setaffinity, [parent, 8, limits, 0, 0, 0]),
            ("sched_setscheduler", libc::SYS_sched_setscheduler, [parent, 0, limits, 0, 0, 0]),
            ("tgkill of another", libc::SYS_tgkill, [parent, parent, 0, 0, 0, 0]),
            ("kill", libc::SYS_kill, [parent, 0, 0, 0, 0, 0]),
            ("F_SETOWN", libc::SYS_fcntl, [2, libc::F_SETOWN as u64, parent, 0, 0, 0]),
            ("F_SETSIG", libc::SYS_fcntl, [2, 10, 9, 0, 0, 0]),
            ("process_vm_readv", libc::SYS_process_vm_readv, [parent, 0, 0, 0, 0, 0]),
            ("pidfd_open", libc::SYS_pidfd_open, [parent, 0, 0, 0, 0, 0]),
            ("shmget", libc::SYS_shmget, [0, 4096, 0o1600, 0, 0, 0]),
            ("msgget", libc::SYS_msgget, [0, 0o1600, 0, 0, 0, 0]),
            ("semget", libc::SYS_semget, [0, 1, 0o1600, 0, 0, 0]),
            ("mq_open", libc::SYS_mq_open, [text, 0, 0, 0, 0, 0]),
            ("setsid", libc::SYS_setsid, [0; 6]),
            ("setpgid", libc::SYS_setpgid, [0; 6]),
            // Programs, processes, privileges.
            ("clone of a process", libc::SYS_clone, [libc::SIGCHLD as u64, 0, 0, 0, 0, 0]),
            (
                "thread with a namespace",
                libc::SYS_clone,
                [(libc::CLONE_THREAD | libc::CLONE_NEWUSER) as u64, 0, 0, 0, 0, 0],
            ),
            ("PR_SET_DUMPABLE", libc::SYS_prctl, [libc::PR_SET_DUMPABLE as u64, 0, 0, 0, 0, 0]),
            ("PR_SET_PTRACER", libc::SYS_prctl, [libc::PR_SET_PTRACER as u64, own, 0, 0, 0, 0]),
            ("memfd_create", libc::SYS_memfd_create, [text, 0, 0, 0, 0, 0]),
            ("mmap of code", libc::SYS_mmap, [0, 4096, 7, 0x22, u64::MAX, 0]),
            ("mprotect to code", libc::SYS_mprotect, [0, 4096, 5, 0, 0, 0]),
            ("personality", libc::SYS_personality, [0xffff_ffff, 0, 0, 0, 0, 0]),
            ("umask", libc::SYS_umask, [0; 6]),
            ("chdir", libc::SYS_chdir, [text, 0, 0, 0, 0, 0]),
            ("inotify_init1", libc::SYS_inotify_init1, [0; 6]),
            ("vmsplice", libc::SYS_vmsplice, [1, 0, 0, 0, 0, 0]),
            // Attributes of files, which a descriptor for reading suffices for.
            ("FS_IOC_SETFLAGS", libc::SYS_ioctl, [0, 0x4008_6602, limits, 0, 0, 0]),
            ("FS_IOC_FSSETXATTR", libc::SYS_ioctl, [0, 0x401c_5820, limits, 0, 0, 0]),
            // Sockets: none with an address.
            ("socket", libc::SYS_socket, [1, 1, 0, 0, 0, 0]),
            ("socketpair of datagrams", libc::SYS_socketpair, [1, 2, 0, limits, 0, 0]),
            ("sendto an address", libc::SYS_sendto, [1, byte, 1, 0, byte, 2]),
            ("sendmsg", libc::SYS_sendmsg, [1, byte, 0, 0, 0, 0]),
            // Numbers of another interface of the same machine, and one that no interface has.
            ("x32 getpid", X32 | libc::SYS_getpid, [0; 6]),
            ("x32 read", X32 | libc::SYS_read, [0; 6]),
            ("x32 execve", X32 | 520, [text, 0, 0, 0, 0, 0]),
            ("no call at all", 100_000, [0; 6]),
        ];
        for (what, call, arguments) in forbidden {
            assert_eq!(raw(*call, *arguments), Err(libc::EPERM), "{what}");
        }
        let missing =
            [libc::SYS_clone3, libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register];
        for call in missing {
            assert_eq!(raw(call, [0; 6]), Err(libc::ENOSYS), "{call}");
        }
        // Calls that work needs still work: threads, waking them, waiting, its own limits.
        assert_eq!(raw(libc::SYS_tgkill, [own, own, 0, 0, 0, 0]), Ok(0));
        let mut old = [0u64; 2];
        assert_eq!(raw(libc::SYS_prlimit64, [0, 7, 0, old.as_mut_ptr() as u64, 0, 0]), Ok(0));
        assert_eq!(std::thread::spawn(|| 7).join().expect("a thread"), 7);
        // The call itself is allowed.
        std::thread::sleep(std::time::Duration::from_millis(1));
        let (mut one, mut other) = std::os::unix::net::UnixStream::pair().expect("a pair");
        std::io::Write::write_all(&mut one, b"x").expect("it can be written");
        std::io::Read::read_exact(&mut other, &mut [0]).expect("and read");
        block_on(async {
            let file = open(&path, true, false).expect("it was named");
            file.write_at(IoBuf::copy_from(b"new"), 0).await.0.expect("it can be written");
            file.set_len(1 << 20).await.expect("and grow");
            file.punch_hole(0, 4096)
                .await
                .or_else(|error| if error.kind() == ErrorKind::Unsupported { Ok(()) } else { Err(error) })
                .expect("and get holes");
            file.sync().await.expect("and be durable");
        });
    });
}
