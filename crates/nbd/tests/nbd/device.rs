// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A server's export on a device that notes the calls for the kernel's driver.

use cowshed_nbd::device::{Connection, await_up, detach, open, serve};
use cowshed_storage::{NbdCall, NbdControl};
use cowshed_types::{Errno, ErrorKind};
use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// The calls that a device got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    Call(NbdCall),
    Sync,
}

/// A device of no kernel.
#[derive(Default)]
struct Fake {
    state: Mutex<FakeState>,
    changed: Condvar,
    /// The call that fails, and how.
    fails: Option<(NbdCall, Errno)>,
    /// `sync` never ends.
    hangs: bool,
}

#[derive(Default)]
struct FakeState {
    seen: Vec<Seen>,
    values: Vec<(NbdCall, u64)>,
    blocks: (u64, u64),
    serves: bool,
    is_disconnected: bool,
}

impl Fake {
    fn seen(&self) -> Vec<Seen> {
        self.state.lock().expect("no panic").seen.clone()
    }
}

impl NbdControl for Fake {
    fn call(&self, call: NbdCall, value: u64) -> Result<(), Errno> {
        let mut state = self.state.lock().expect("no panic");
        state.seen.push(Seen::Call(call));
        if let Some((fails, errno)) = self.fails
            && fails == call
        {
            return Err(errno);
        }
        match call {
            NbdCall::SetBlockSize => state.blocks.0 = value,
            NbdCall::SetBlocks => state.blocks.1 = value,
            NbdCall::Disconnect => {
                state.is_disconnected = true;
                self.changed.notify_all();
            }
            NbdCall::Serve => {
                state.serves = true;
                let state = self.changed.wait_while(state, |state| !state.is_disconnected).expect("no panic");
                drop(state);
                return Ok(());
            }
            _ => {}
        }
        if call != NbdCall::SetSocket {
            state.values.push((call, value));
        }
        Ok(())
    }

    fn sync(&self) -> Result<(), Errno> {
        let mut state = self.state.lock().expect("no panic");
        state.seen.push(Seen::Sync);
        if self.hangs {
            drop(self.changed.wait_while(state, |_| true));
        }
        Ok(())
    }

    fn size_bytes(&self) -> Result<u64, Errno> {
        let state = self.state.lock().expect("no panic");
        Ok(if state.serves { state.blocks.0 * state.blocks.1 } else { 0 })
    }
}

/// A server that answers one handshake: an export "disk" of 10 MiB and a few bytes. Returns the client's flags.
fn server(path: &Path) -> JoinHandle<u32> {
    let listener = UnixListener::bind(path).expect("a socket");
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a client");
        stream.write_all(b"NBDMAGICIHAVEOPT\0\x03").expect("it reads");
        let mut answer = [0; 20];
        stream.read_exact(&mut answer).expect("its choice");
        assert_eq!(&answer[4..16], b"IHAVEOPT\0\0\0\x01");
        let mut name = vec![0; answer[19].into()];
        stream.read_exact(&mut name).expect("a name");
        if name == b"disk" {
            stream.write_all(&((10u64 << 20) + 7).to_be_bytes()).expect("it reads");
            stream.write_all(&0x006du16.to_be_bytes()).expect("it reads");
        }
        u32::from_be_bytes(answer[..4].try_into().expect("four bytes"))
    })
}

#[test]
fn a_device_gets_the_export_and_is_left_in_order() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("s");
    let server = server(&path);
    let connection = Connection::new(path.to_str().expect("text"), "disk").expect("the handshake");
    assert_eq!(server.join().expect("no panic"), 3, "fixed newstyle without zeroes");
    let bytes = connection.device_bytes();
    assert_eq!(bytes, 10 << 20, "whole blocks");
    let device = Arc::new(Fake::default());
    connection.attach(&*device).expect("attached");
    let expected = [(NbdCall::SetBlockSize, 512), (NbdCall::SetBlocks, 20480), (NbdCall::SetFlags, 0x6d)];
    assert_eq!(device.state.lock().expect("no panic").values, expected);
    let served = {
        let device = Arc::clone(&device);
        std::thread::spawn(move || serve(&*device))
    };
    assert!(await_up("/nowhere", &*device, bytes, || served.is_finished()));
    let before = device.seen().len();
    let control: Arc<dyn NbdControl> = device.clone();
    detach(&control, Duration::from_secs(60)).expect("detached");
    served.join().expect("no panic").expect("served to its end");
    let after = &device.seen()[before..];
    let at = |what| after.iter().position(|seen| *seen == what).expect("seen");
    assert_eq!(at(Seen::Sync), 0, "the page cache goes first: {after:?}");
    assert!(at(Seen::Call(NbdCall::Disconnect)) < at(Seen::Call(NbdCall::ClearSocket)), "{after:?}");
}

#[test]
fn missing_export_is_named_as_in_qemu() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("s");
    let server = server(&path);
    let error = Connection::new(path.to_str().expect("text"), "other").expect_err("no such export");
    assert_eq!(error.sentence(), "Requested export not available");
    server.join().expect("no panic");
}

#[test]
fn device_in_use_is_refused_and_a_half_set_cleared() {
    for (fails, errno, sentence) in [
        (NbdCall::SetSocket, Errno::EBUSY, "Failed to set NBD socket"),
        (NbdCall::SetFlags, Errno::EINVAL, "failed to set the flags of the NBD device"),
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("s");
        let server = server(&path);
        let connection = Connection::new(path.to_str().expect("text"), "disk").expect("the handshake");
        server.join().expect("no panic");
        let device = Fake { fails: Some((fails, errno)), ..Fake::default() };
        let error = connection.attach(&device).expect_err("refused");
        assert!(error.to_string().contains(&sentence[1..]), "{error}");
        assert_eq!(error.errno(), errno);
        let is_cleared = device.seen().last() == Some(&Seen::Call(NbdCall::ClearSocket));
        // The connection in use is another process's.
        assert_eq!(is_cleared, fails != NbdCall::SetSocket, "{:?}", device.seen());
    }
}

#[test]
fn a_disk_that_hangs_keeps_no_device() {
    let state = FakeState { blocks: (512, 1), serves: true, ..FakeState::default() };
    let device = Arc::new(Fake { hangs: true, state: Mutex::new(state), ..Fake::default() });
    let control: Arc<dyn NbdControl> = device;
    let error = detach(&control, Duration::from_millis(50)).expect_err("not written");
    assert_eq!(error.errno(), Errno::ETIMEDOUT);
}

/// The kernel would log an error for the flush.
#[test]
fn a_device_without_a_connection_is_not_synced() {
    let device = Arc::new(Fake::default());
    let control: Arc<dyn NbdControl> = device.clone();
    detach(&control, Duration::from_secs(60)).expect("nothing to do");
    assert!(!device.seen().contains(&Seen::Sync), "{:?}", device.seen());
}

#[test]
fn a_device_that_fails_at_its_start_is_not_waited_for() {
    let device = Fake::default();
    assert!(!await_up("/nowhere", &device, 512, || true));
}

#[test]
fn without_the_driver_the_error_says_what_there_is_instead() {
    let error = open("/dev/nbd4096", "Failed to open /dev/nbd4096").expect_err("no such device");
    assert_eq!(error.kind(), ErrorKind::NotFound);
    let text = error.sentence();
    assert!(text.starts_with("Failed to open /dev/nbd4096: No such file or directory"), "{text}");
    if !Path::new("/sys/module/nbd").exists() && !Path::new("/sys/block/nbd0").exists() {
        assert!(text.contains("FUSE") && text.contains("nbd-client") && text.contains("modprobe nbd"), "{text}");
    }
    let other = open("/nowhere/disk", "Cannot open /nowhere/disk").expect_err("no such file");
    assert_eq!(other.sentence(), "Cannot open /nowhere/disk: No such file or directory");
}
