// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Character devices: where monitors can be, and ring buffers of bytes.

use crate::monitor::{
    Bound, ClientAddress, Listening, Log, LogOptions, MonitorAddress, MonitorContext, Outgoing, silent_greeting,
};
use cowshed_types::{Error, ErrorKind, Result};
use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// The kind of a character device.
enum Backend {
    /// A socket that listens, or the standard streams.
    Place(Bound),
    /// A socket that connects to a client.
    Outgoing(Outgoing),
    /// Takes everything and has nothing.
    Null,
    /// The bytes that were written last.
    Ring(Ring),
}

/// The last bytes that were written, `size` at most.
struct Ring {
    bytes: VecDeque<u8>,
    size: usize,
}

impl Ring {
    /// The oldest bytes give way.
    fn write(&mut self, bytes: &[u8]) {
        self.bytes.extend(bytes);
        let surplus = self.bytes.len().saturating_sub(self.size);
        self.bytes.drain(..surplus);
    }
}

/// The description of a character device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ChardevOptions {
    pub backend: BackendOptions,
    pub log: Option<LogOptions>,
}

/// The kind of a character device, and where it leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum BackendOptions {
    /// A socket that listens, or the standard streams.
    Place(MonitorAddress),
    /// A socket that connects to a client, and does so again after a pause.
    Outgoing { address: ClientAddress, reconnect: Option<Duration> },
    /// Takes everything and has nothing.
    Null,
    /// Keeps the last bytes, `size` at most.
    Ring { size: usize },
}

impl BackendOptions {
    /// Size of a ring buffer in bytes, unless it is given.
    const RING_BYTES: u64 = 65536;
    /// The largest one.
    const MAX_RING_BYTES: u64 = 64 << 20;

    /// A ring buffer of this size in bytes.
    pub fn ring(size: Option<u64>) -> std::result::Result<BackendOptions, String> {
        match size.unwrap_or(Self::RING_BYTES) {
            size if !size.is_power_of_two() => Err("size of ringbuf chardev must be power of two".to_owned()),
            size if size > Self::MAX_RING_BYTES => {
                Err(format!("a ring buffer has {} bytes at most", Self::MAX_RING_BYTES))
            }
            size => Ok(BackendOptions::Ring { size: size as usize }),
        }
    }
}

impl ChardevOptions {
    /// True for the standard streams.
    pub fn is_stdio(&self) -> bool {
        self.backend == BackendOptions::Place(MonitorAddress::Stdio)
    }

    /// Makes it; a socket listens then.
    fn make(&self, id: &str, number: usize) -> Result<Chardev> {
        let log = self.log.as_ref().map(Log::open).transpose()?;
        let backend = match &self.backend {
            BackendOptions::Place(address) => Backend::Place(Bound::new(address)?),
            BackendOptions::Outgoing { address, reconnect } => {
                Backend::Outgoing(Outgoing::new(id, address, *reconnect)?)
            }
            BackendOptions::Null => Backend::Null,
            BackendOptions::Ring { size } => Backend::Ring(Ring { bytes: VecDeque::new(), size: *size }),
        };
        Ok(Chardev { backend, log, monitor: None, number })
    }
}

struct Chardev {
    backend: Backend,
    /// Takes a copy of the monitor's messages.
    log: Option<Arc<Log>>,
    /// The monitor that is there.
    monitor: Option<Listening>,
    /// Grows with each device.
    number: usize,
}

/// A character device for `query-chardev`.
pub(crate) struct Described {
    pub label: String,
    pub filename: String,
    /// A monitor is there.
    pub in_use: bool,
}

/// The character devices by id.
#[derive(Default)]
pub(crate) struct Devices(RefCell<BTreeMap<String, Chardev>>);

fn refused(kind: ErrorKind, message: String) -> Error {
    Error::new(kind, message)
}

fn not_found(id: &str) -> Error {
    refused(ErrorKind::NotFound, format!("Chardev '{id}' not found"))
}

impl Devices {
    /// There is none with this id yet.
    pub fn check_new(&self, id: &str) -> Result<()> {
        match self.0.borrow().contains_key(id) {
            true => Err(refused(ErrorKind::InvalidArgument, format!("Chardev with id '{id}' already exists"))),
            false => Ok(()),
        }
    }

    /// Adds one; its id is new.
    pub fn add(&self, id: &str, options: &ChardevOptions) -> Result<()> {
        self.check_new(id)?;
        let mut devices = self.0.borrow_mut();
        let number = devices.values().map(|device| device.number + 1).max().unwrap_or(0);
        devices.insert(id.to_owned(), options.make(id, number)?);
        Ok(())
    }

    /// Makes another device of one that has no monitor. Where that fails, the old one stays.
    pub fn change(&self, id: &str, options: &ChardevOptions) -> Result<()> {
        let mut devices = self.0.borrow_mut();
        let missing = || refused(ErrorKind::NotFound, format!("Chardev '{id}' does not exist"));
        let device = devices.get_mut(id).ok_or_else(missing)?;
        if device.monitor.is_some() {
            return Err(refused(ErrorKind::Busy, "Chardev user does not support chardev hotswap".to_owned()));
        }
        *device = options.make(id, device.number)?;
        Ok(())
    }

    /// A name that no device has.
    pub fn free_id(&self, stem: &str) -> String {
        let devices = self.0.borrow();
        let mut names = (0..).map(|n| format!("{stem}{n}"));
        names.find(|name| !devices.contains_key(name)).unwrap_or_else(|| stem.to_owned())
    }

    /// It must be there, without a monitor.
    pub fn check_free(&self, id: &str) -> Result<()> {
        match self.0.borrow().get(id) {
            None => Err(not_found(id)),
            Some(device) if device.monitor.is_some() => {
                Err(refused(ErrorKind::Busy, format!("Chardev '{id}' is busy")))
            }
            Some(_) => Ok(()),
        }
    }

    /// Takes one away.
    pub fn remove(&self, id: &str) -> Result<()> {
        self.check_free(id)?;
        self.0.borrow_mut().remove(id);
        Ok(())
    }

    /// Starts a monitor on a device.
    pub fn start_monitor(&self, id: &str, mut context: MonitorContext) -> Result<()> {
        let mut devices = self.0.borrow_mut();
        let missing = || refused(ErrorKind::NotFound, format!("chardev \"{id}\" not found"));
        let device = devices.get_mut(id).ok_or_else(missing)?;
        if device.monitor.is_some() {
            return Err(refused(ErrorKind::Busy, format!("chardev '{id}' is already in use")));
        }
        context.log = device.log.clone();
        let monitor = match &mut device.backend {
            Backend::Place(bound) => bound.start(context)?,
            Backend::Outgoing(outgoing) => Listening::calling(outgoing.start(context)?),
            Backend::Null => Listening::nowhere(),
            // No client answers the greeting there.
            Backend::Ring(ring) => {
                ring.write(&silent_greeting(&context));
                Listening::nowhere()
            }
        };
        device.monitor = Some(monitor);
        Ok(())
    }

    /// Takes a device away with its monitor, and ends the connections of clients.
    pub fn remove_with_monitor(&self, id: &str) {
        if let Some(monitor) = self.0.borrow_mut().remove(id).and_then(|device| device.monitor) {
            monitor.end();
        }
    }

    /// Ends the monitor on a device with the connections of its clients. The device listens on, for the next one.
    pub fn stop_monitor(&self, id: &str) -> Result<()> {
        let mut devices = self.0.borrow_mut();
        let Some(device) = devices.get_mut(id) else { return Err(not_found(id)) };
        if matches!(&device.backend, Backend::Place(bound) if *bound.address() == MonitorAddress::Stdio) {
            return Err(refused(ErrorKind::Busy, "the monitor on the standard streams stays".to_owned()));
        }
        if let Some(monitor) = device.monitor.take() {
            monitor.end();
            if let Backend::Place(bound) = &mut device.backend {
                return bound.listen_again();
            }
        }
        Ok(())
    }

    /// The addresses of the monitors on devices.
    pub fn monitors(&self) -> Vec<MonitorAddress> {
        let devices = self.0.borrow();
        let places =
            devices.values().filter(|device| device.monitor.is_some()).filter_map(|device| match &device.backend {
                Backend::Place(bound) => Some(bound.address().clone()),
                Backend::Outgoing(_) | Backend::Null | Backend::Ring(_) => None,
            });
        places.collect()
    }

    /// All of them.
    pub fn list(&self) -> Vec<Described> {
        let describe = |(label, device): (&String, &Chardev)| Described {
            label: label.clone(),
            filename: match &device.backend {
                Backend::Place(bound) => match bound.address() {
                    MonitorAddress::Stdio => "stdio".to_owned(),
                    address => match device.monitor.as_ref().and_then(Listening::client) {
                        Some(end) => format!("{address},server=on{end}"),
                        None => format!("disconnected:{address},server=on"),
                    },
                },
                Backend::Outgoing(outgoing) => outgoing.name(),
                Backend::Null => "null".to_owned(),
                Backend::Ring(_) => "ringbuf".to_owned(),
            },
            in_use: match &device.backend {
                Backend::Outgoing(outgoing) => device.monitor.is_some() && outgoing.is_connected(),
                _ => device.monitor.is_some(),
            },
        };
        let devices = self.0.borrow();
        let mut devices: Vec<_> = devices.iter().collect();
        // As in QEMU the newest comes first.
        devices.sort_by_key(|(_, device)| Reverse(device.number));
        devices.into_iter().map(describe).collect()
    }

    /// Writes to a ring buffer.
    pub fn write_ring(&self, id: &str, bytes: &[u8]) -> Result<()> {
        self.with_ring(id, |ring| ring.write(bytes))
    }

    /// Takes the oldest bytes out of a ring buffer, `limit` at most.
    pub fn read_ring(&self, id: &str, limit: u64) -> Result<Vec<u8>> {
        self.with_ring(id, |ring| {
            let count = ring.bytes.len().min(usize::try_from(limit).unwrap_or(usize::MAX));
            ring.bytes.drain(..count).collect()
        })
    }

    fn with_ring<T>(&self, id: &str, work: impl FnOnce(&mut Ring) -> T) -> Result<T> {
        match self.0.borrow_mut().get_mut(id).map(|device| &mut device.backend) {
            Some(Backend::Ring(ring)) => Ok(work(ring)),
            Some(_) => Err(refused(ErrorKind::InvalidArgument, format!("{id} is not a ringbuf device"))),
            None => Err(refused(ErrorKind::NotFound, format!("Device '{id}' not found"))),
        }
    }

    /// Ends everything, sockets' names included.
    pub fn clear(&self) {
        self.0.borrow_mut().clear();
    }
}

/// Refuses options that only the other side of a connection can have, as QEMU does.
pub(crate) fn check_pauses(is_server: bool, reconnects: bool, waits: bool) -> std::result::Result<(), &'static str> {
    match (is_server, reconnects, waits) {
        (true, true, _) => Err("'reconnect-ms' option is incompatible with socket in server listen mode"),
        (false, _, true) => Err("'wait' option is incompatible with socket in client connect mode"),
        _ => Ok(()),
    }
}
