// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A server's export as a block device: the kernel's NBD driver is the client. Calls of the driver block, so each function here
//! belongs on a thread of its own.

use cowshed_nbd_proto::flags::{ClientFlags, HandshakeFlags, TransmissionFlags};
use cowshed_nbd_proto::{Malformed, greeting, option};
use cowshed_storage::{NbdCall, NbdControl, NbdDevice};
use cowshed_types::{Errno, Error, ErrorKind, Result};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// The length of a block as the driver gets it, in bytes: the kernel's sector.
const BLOCK_BYTES: u64 = 512;
/// A server answers a handshake within this time.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(60);
/// The pause between questions for a device's length while the driver starts.
const LOOK: Duration = Duration::from_millis(5);
/// The driver starts a device, and the kernel reads the partition table, within this time.
const START_LIMIT: Duration = Duration::from_secs(20);

/// Opens the device at `path`. `failing` begins the message of a failure and names the device, as "Failed to open /dev/nbd0" does.
pub fn open(path: &str, failing: &str) -> Result<NbdDevice> {
    NbdDevice::open(path).map_err(|errno| {
        let error = Error::os(errno, failing);
        match is_without_driver(path, errno) {
            true => error.value(
                "the kernel's nbd driver is not loaded: \"modprobe nbd\" loads it; without it nbdfuse shows an export as a file \
                 through FUSE, and nbd-client attaches an export on another machine",
            ),
            false => error,
        }
    })
}

/// Whether a device is missing because the driver is.
fn is_without_driver(path: &str, errno: Errno) -> bool {
    const ENXIO: Errno = Errno(6);
    let is_missing = [Errno::ENOENT, Errno::ENODEV, ENXIO].contains(&errno);
    let is_of_driver = path.strip_prefix("/dev/nbd").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    is_missing && is_of_driver && !Path::new("/sys/module/nbd").exists() && !Path::new("/sys/block/nbd0").exists()
}

/// A connection after its handshake, with simple replies, as the driver speaks.
#[derive(Debug)]
pub struct Connection {
    socket: UnixStream,
    size_bytes: u64,
    flags: TransmissionFlags,
}

impl Connection {
    /// Connects to the export `name` of the server at the Unix socket `path`.
    pub fn new(path: &str, name: &str) -> Result<Connection> {
        let failed = |error: std::io::Error| match error.kind() {
            std::io::ErrorKind::UnexpectedEof => Error::new(ErrorKind::NotFound, "Requested export not available"),
            _ => Error::io(&error, "could not connect the device to the server").file(path),
        };
        let broken =
            |why: Malformed| Error::new(ErrorKind::Io, format!("the server breaks the protocol: {why}")).file(path);
        let mut socket = UnixStream::connect(cowshed_storage::path_of_text(path)).map_err(failed)?;
        socket.set_read_timeout(Some(HANDSHAKE_LIMIT)).map_err(failed)?;
        let mut hello = [0; greeting::GREETING_BYTES];
        socket.read_exact(&mut hello).map_err(failed)?;
        let offered = greeting::parse(&hello).map_err(broken)?;
        let no_zeroes = offered.contains(HandshakeFlags::NO_ZEROES);
        let flags = ClientFlags::FIXED_NEWSTYLE.with(ClientFlags::NO_ZEROES, no_zeroes);
        let mut choice = flags.0.to_be_bytes().to_vec();
        choice.extend_from_slice(&option::encode(option::code::EXPORT_NAME, name.as_bytes()));
        socket.write_all(&choice).map_err(failed)?;
        let mut answer = [0; greeting::EXPORT_NAME_BYTES];
        socket.read_exact(&mut answer).map_err(failed)?;
        if !no_zeroes {
            socket.read_exact(&mut [0; greeting::EXPORT_NAME_ZEROES]).map_err(failed)?;
        }
        socket.set_read_timeout(None).map_err(failed)?;
        let (size_bytes, flags) = greeting::parse_export(&answer).map_err(broken)?;
        Ok(Connection { socket, size_bytes, flags })
    }

    /// Gives the connection to a device. From then on the driver owns it.
    pub fn attach(self, device: &dyn NbdControl) -> Result<()> {
        let descriptor =
            u64::try_from(self.socket.as_raw_fd()).map_err(|_| Error::internal("a socket without a number"))?;
        device.call(NbdCall::SetSocket, descriptor).map_err(|errno| {
            const ENOTTY: Errno = Errno(25);
            let error = |kind| Error::new(kind, "Failed to set NBD socket");
            match errno {
                Errno::EBUSY => error(ErrorKind::Busy).hint(" (the device has a connection already)"),
                ENOTTY => error(ErrorKind::InvalidArgument).hint(" (this is no device of the kernel's nbd driver)"),
                Errno(number) => error(ErrorKind::Io).hint(format!(" ({})", std::io::Error::from_raw_os_error(number))),
            }
        })?;
        let steps = [
            (NbdCall::SetBlockSize, BLOCK_BYTES, "block size"),
            (NbdCall::SetBlocks, self.size_bytes / BLOCK_BYTES, "length"),
            (NbdCall::SetFlags, self.flags.0.into(), "flags"),
        ];
        for (call, value, what) in steps {
            device.call(call, value).map_err(|errno| {
                // The first error is the one to report.
                let _ = device.call(NbdCall::ClearSocket, 0);
                Error::os(errno, format!("failed to set the {what} of the NBD device"))
            })?;
        }
        Ok(())
    }

    /// The length of the export in whole blocks of the device, in bytes.
    pub fn device_bytes(&self) -> u64 {
        self.size_bytes / BLOCK_BYTES * BLOCK_BYTES
    }
}

/// Serves a device until its connection ends, and leaves it without one.
pub fn serve(device: &dyn NbdControl) -> Result<()> {
    let result = device.call(NbdCall::Serve, 0);
    // The device may have lost its connection already.
    let _ = device.call(NbdCall::ClearQueue, 0);
    let _ = device.call(NbdCall::ClearSocket, 0);
    result.map_err(|errno| Error::os(errno, "the NBD device failed"))
}

/// Waits until a device has its length and the kernel has looked for partitions. `is_over` is true when the device has
/// failed. False where it did, or where the driver takes longer than 20 seconds.
pub fn await_up(path: &str, device: &dyn NbdControl, device_bytes: u64, is_over: impl Fn() -> bool) -> bool {
    let started = Instant::now();
    while device_bytes > 0 && device.size_bytes() != Ok(device_bytes) {
        if is_over() || started.elapsed() > START_LIMIT {
            return false;
        }
        std::thread::sleep(LOOK);
    }
    // The kernel reads the partition table of a new device when the device is opened next. A disk that hangs must not keep the
    // caller for ever.
    let (path, (sender, done)) = (path.to_owned(), channel());
    std::thread::spawn(move || {
        drop(std::fs::File::open(cowshed_storage::path_of_text(&path)));
        // The caller may be gone.
        let _ = sender.send(());
    });
    let _ = done.recv_timeout(START_LIMIT);
    true
}

/// Takes a device's connection away in order: the device's data in the page cache goes to the server first. The error
/// is of that part, which takes `limit` at most; the connection is gone after it in any case. The error is of that
/// part, which takes `limit` at most; the connection is gone after it in any case.
///
/// QEMU leaves the page cache out, and loses writes of programs that are not synced.
pub fn detach(device: &Arc<dyn NbdControl>, limit: Duration) -> Result<()> {
    // A device without a connection has no length, and no server to write to.
    let result = if device.size_bytes().is_ok_and(|bytes| bytes > 0) { sync_within(device, limit) } else { Ok(()) };
    for call in [NbdCall::ClearQueue, NbdCall::Disconnect, NbdCall::ClearSocket] {
        // A device without a connection refuses these.
        let _ = device.call(call, 0);
    }
    result.map_err(|errno| Error::os(errno, "data that was written to the device may be lost"))
}

fn sync_within(device: &Arc<dyn NbdControl>, limit: Duration) -> std::result::Result<(), Errno> {
    let (sender, done) = channel();
    let device = Arc::clone(device);
    std::thread::spawn(move || {
        // The caller may have given up.
        let _ = sender.send(device.sync());
    });
    done.recv_timeout(limit).unwrap_or(Err(Errno::ETIMEDOUT))
}
