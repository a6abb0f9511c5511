// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `qemu-nbd --connect` and `--disconnect`: the image as a block device of the kernel.

use super::background::Background;
use crate::output::{Console, Failure};
use cowshed_daemon::client::device::{self, Connection};
use cowshed_daemon::{Message, Sender, StopReason};
use cowshed_storage::{NbdControl, NbdDevice};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The time limit for writing the page cache of a device to the server.
const SYNC_LIMIT: Duration = Duration::from_secs(60);
/// The same for a daemon that stops.
const STOP_SYNC_LIMIT: Duration = Duration::from_secs(10);

/// The device and the socket that `--connect` names.
#[derive(Clone, Debug)]
pub(super) struct DeviceLink {
    /// The device, wherever the process is.
    pub device: String,
    /// The device as the user named it.
    pub named: String,
    /// The Unix socket that the server listens on.
    pub socket: String,
    /// The export.
    pub name: String,
    /// The image, for the message.
    pub file: String,
    /// Print a line when the device is there.
    pub verbose: bool,
}

/// The socket of a device's server, where the user names none: the place where QEMU has it.
pub(super) fn default_socket(device: &str) -> String {
    format!("/var/lock/qemu-nbd-{}", device.rsplit('/').next().unwrap_or_default())
}

/// The state that the threads of a daemon with a device share.
#[derive(Clone, Default)]
pub(super) struct DeviceState {
    attached: Arc<Mutex<Option<Arc<NbdDevice>>>>,
    failure: Arc<Mutex<Option<Failure>>>,
}

impl DeviceState {
    /// Takes the device away in order, if there is one, and calls `then`. Returns how long that takes at most.
    pub fn detach_before(&self, then: impl FnOnce() + Send + 'static) -> Duration {
        let Some(device) = self.attached.lock().unwrap_or_else(PoisonError::into_inner).take() else {
            then();
            return Duration::ZERO;
        };
        let detach = move || {
            let device: Arc<dyn NbdControl> = device;
            if let Err(error) = device::detach(&device, STOP_SYNC_LIMIT) {
                tracing::error!(%error, "the device is gone");
            }
            then();
        };
        std::thread::spawn(detach);
        STOP_SYNC_LIMIT
    }

    /// The reason for which there is no device.
    pub fn failure(&self) -> Option<Failure> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn fail(&self, failure: Failure) {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(failure);
    }
}

impl DeviceLink {
    /// Connects the device to the server, which runs on other threads, and serves it from a thread of its own. The server stops with
    /// the device, and a background process is up when the device is.
    pub fn start(
        self,
        control: Sender<Message>,
        state: DeviceState,
        background: Option<Background>,
    ) -> std::io::Result<()> {
        let work = move || {
            if let Err(failure) = self.run(&state, background) {
                state.fail(failure);
            }
            state.attached.lock().unwrap_or_else(PoisonError::into_inner).take();
            // The server may have stopped already.
            let _ = control.send(Message::Stop(StopReason::Idle));
        };
        std::thread::Builder::new().name("nbd-device".to_owned()).spawn(work).map(drop)
    }

    fn run(&self, state: &DeviceState, background: Option<Background>) -> Result<(), Failure> {
        let connection = Connection::new(&self.socket, &self.name)?;
        let device = Arc::new(device::open(&self.device, &format!("Failed to open {}", self.named))?);
        let bytes = connection.device_bytes();
        connection.attach(&*device)?;
        *state.attached.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&device));
        let is_over = Arc::new(AtomicBool::new(false));
        let watcher = {
            let (link, state, device, is_over) =
                (self.clone(), state.clone(), Arc::clone(&device), Arc::clone(&is_over));
            let watch = move || link.say_when_up(&state, &device, bytes, &is_over, background);
            std::thread::Builder::new().name("device-start".to_owned()).spawn(watch)
        };
        let served = device::serve(&*device);
        is_over.store(true, Ordering::SeqCst);
        match watcher {
            // The thread ends within its limits.
            Ok(watcher) => drop(watcher.join()),
            Err(error) => return Err(Failure::new(format!("could not start a thread: {error}"))),
        }
        Ok(served?)
    }

    fn say_when_up(
        &self,
        state: &DeviceState,
        device: &NbdDevice,
        bytes: u64,
        is_over: &AtomicBool,
        background: Option<Background>,
    ) {
        if !device::await_up(&self.device, device, bytes, || is_over.load(Ordering::SeqCst)) {
            return;
        }
        if self.verbose {
            eprintln!("NBD device {} is now connected to {}", self.named, self.file);
        }
        if let Some(Err(failure)) = background.map(Background::detach) {
            state.fail(failure);
        }
    }
}

/// `--disconnect`.
pub(super) fn disconnect(path: &str, console: &mut Console) -> Result<u8, Failure> {
    let device: Arc<dyn NbdControl> = Arc::new(device::open(path, &format!("Cannot open {path}"))?);
    if let Err(error) = device::detach(&device, SYNC_LIMIT) {
        console.complain(format_args!("{path}: {error}"));
    }
    console.line(format_args!("{path} disconnected"));
    Ok(0)
}
