// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Character devices: where monitors can be, and ring buffers of bytes.

use crate::monitor::{Bound, Listening, MonitorAddress, MonitorContext};
use cowshed_block::{Error, ErrorKind, Result};
use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};

/// What a character device is.
pub(crate) enum Backend {
    /// A socket that listens, or the standard streams.
    Place(Bound),
    /// Takes everything and has nothing.
    Null,
    /// The last so many bytes that were written.
    Ring { bytes: VecDeque<u8>, size: usize },
}

struct Chardev {
    backend: Backend,
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
    pub fn add(&self, id: &str, backend: Backend) -> Result<()> {
        self.check_new(id)?;
        let mut devices = self.0.borrow_mut();
        let number = devices.values().map(|device| device.number + 1).max().unwrap_or(0);
        devices.insert(id.to_owned(), Chardev { backend, monitor: None, number });
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

    /// Starts a monitor on a device, which must be a place for one.
    pub fn start_monitor(&self, id: &str, context: MonitorContext) -> Result<()> {
        self.check_free(id)?;
        let mut devices = self.0.borrow_mut();
        let device = devices.get_mut(id).ok_or_else(|| not_found(id))?;
        let Backend::Place(bound) = &device.backend else {
            let message =
                format!("Chardev '{id}' is no place for a monitor: it must be a socket or the standard streams");
            return Err(refused(ErrorKind::InvalidArgument, message));
        };
        device.monitor = Some(bound.start(context)?);
        Ok(())
    }

    /// Ends the monitor on a device; clients that are there stay until they go. The device listens on, for the next one.
    pub fn stop_monitor(&self, id: &str) -> Result<()> {
        let mut devices = self.0.borrow_mut();
        let Some(device) = devices.get_mut(id) else { return Err(not_found(id)) };
        if matches!(&device.backend, Backend::Place(bound) if *bound.address() == MonitorAddress::Stdio) {
            return Err(refused(ErrorKind::Busy, "the monitor on the standard streams stays".to_owned()));
        }
        let (Some(monitor), Backend::Place(bound)) = (device.monitor.take(), &mut device.backend) else {
            return Ok(());
        };
        drop(monitor);
        bound.listen_again()
    }

    /// Where monitors are.
    pub fn monitors(&self) -> Vec<MonitorAddress> {
        let devices = self.0.borrow();
        let places =
            devices.values().filter(|device| device.monitor.is_some()).filter_map(|device| match &device.backend {
                Backend::Place(bound) => Some(bound.address().clone()),
                Backend::Null | Backend::Ring { .. } => None,
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
                    address => format!("disconnected:{address},server=on"),
                },
                Backend::Null => "null".to_owned(),
                Backend::Ring { .. } => "ringbuf".to_owned(),
            },
            in_use: device.monitor.is_some(),
        };
        let devices = self.0.borrow();
        let mut devices: Vec<_> = devices.iter().collect();
        // As in QEMU the newest comes first.
        devices.sort_by_key(|(_, device)| Reverse(device.number));
        devices.into_iter().map(describe).collect()
    }

    /// Works on a ring buffer.
    pub fn with_ring<T>(&self, id: &str, work: impl FnOnce(&mut VecDeque<u8>, usize) -> T) -> Result<T> {
        match self.0.borrow_mut().get_mut(id).map(|device| &mut device.backend) {
            Some(Backend::Ring { bytes, size }) => Ok(work(bytes, *size)),
            Some(_) => Err(refused(ErrorKind::InvalidArgument, format!("{id} is not a ringbuf device"))),
            None => Err(refused(ErrorKind::NotFound, format!("Device '{id}' not found"))),
        }
    }

    /// Ends everything, sockets' names included.
    pub fn clear(&self) {
        self.0.borrow_mut().clear();
    }
}
