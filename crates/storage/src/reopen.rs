// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A file that was opened for reading becomes writable, under the same handle and without a moment without its locks.

use crate::file::File;
use crate::lock::Permissions;
use crate::medium::Medium;
use cowshed_types::{Error, ErrorKind, Result, slip};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

impl File {
    /// Opens the file for writing too and takes the image locks for `permissions`. No operation may run on it. On an
    /// error (the file may not be written, or other locks contradict) everything is as before.
    pub fn make_writable(&self, permissions: Permissions) -> Result<()> {
        let inner = self.inner();
        match &inner.medium {
            Medium::Host(host) => {
                let mut locks = inner.image_locks.lock().unwrap_or_else(PoisonError::into_inner);
                let before = locks.held();
                // Read locks can be taken on a descriptor for reading, so the old one can claim those that the new one
                // needs.
                locks.change(host, permissions).map_err(|error| error.file(self.name()))?;
                if !self.is_writable()
                    && let Err(error) = host.make_writable(|fresh| {
                        if slip!("locks_lost_when_reopened") { Ok(()) } else { locks.copy_to(&fresh) }
                    })
                {
                    // Going back to less never conflicts with others more than it did before.
                    if let Err(error) = locks.change(host, before) {
                        tracing::warn!("{}: {error}", self.name());
                    }
                    return Err(error.file(self.name()));
                }
            }
            Medium::Faulty(faulty) => faulty.base().make_writable(permissions)?,
            Medium::Null(_) => {}
            Medium::Remote(file) if !file.remote.is_read_only() => {}
            Medium::Remote(_) => {
                return Err(Error::new(ErrorKind::ReadOnly, "the server offers it for reading only").file(self.name()));
            }
            Medium::Sim(sim) => sim.make_writable(),
        }
        inner.is_writable.store(true, Ordering::Release);
        Ok(())
    }
}
