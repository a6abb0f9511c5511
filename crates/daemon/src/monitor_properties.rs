// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The properties of a monitor's object.

use std::sync::atomic::{AtomicBool, Ordering};

/// Properties of a monitor, which may change while it runs.
#[derive(Debug)]
pub struct MonitorProperties {
    chardev: String,
    pretty: AtomicBool,
    deletes: AtomicBool,
}

impl MonitorProperties {
    /// The properties of a monitor on this device. `deletes`: it goes when its last client goes.
    pub fn new(chardev: &str, pretty: bool, deletes: bool) -> Self {
        let (pretty, deletes) = (AtomicBool::new(pretty), AtomicBool::new(deletes));
        MonitorProperties { chardev: chardev.to_owned(), pretty, deletes }
    }

    /// The character device.
    pub fn chardev(&self) -> &str {
        &self.chardev
    }

    /// Messages are over several lines.
    pub fn is_pretty(&self) -> bool {
        self.pretty.load(Ordering::Relaxed)
    }

    /// Of all messages from now on.
    pub fn set_pretty(&self, pretty: bool) {
        self.pretty.store(pretty, Ordering::Relaxed);
    }

    /// The monitor goes, with its device, when its last client goes.
    pub fn is_deleted_on_close(&self) -> bool {
        self.deletes.load(Ordering::Relaxed)
    }

    /// See [`Self::is_deleted_on_close`].
    pub fn set_deleted_on_close(&self, deletes: bool) {
        self.deletes.store(deletes, Ordering::Relaxed);
    }
}
