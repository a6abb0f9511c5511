// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Space for metadata before a request needs it, so that no cycle fails for lack of space.

use super::Qcow2Driver;
use cowshed_qcow2::Reserve;
use cowshed_storage::IoBuf;
use cowshed_types::{ErrorKind, Result};
use std::sync::atomic::Ordering;

/// Other requests may try to reserve the place that this one gives up.
struct Asked<'a>(&'a Qcow2Driver, Option<Reserve>);

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        if let Some(reserve) = self.1.take().filter(|_| !std::thread::panicking()) {
            self.0.engine.reserve_failed(&reserve);
        }
        self.0.events.notify();
    }
}

impl Qcow2Driver {
    /// Reserves space for the engine.
    pub(super) async fn reserve(&self, reserve: Reserve) -> Result<()> {
        let mut asked = Asked(self, Some(reserve));
        match self.reserve_space(&reserve).await {
            Err(error) => {
                if reserve.is_new {
                    // A part of the space may be taken, and data could use it.
                    let _ = self.file.punch_hole(reserve.host.0, reserve.len).await;
                }
                Err(error)
            }
            Ok(()) => {
                asked.1 = None;
                self.engine.reserved(&reserve);
                Ok(())
            }
        }
    }

    async fn reserve_space(&self, reserve: &Reserve) -> Result<()> {
        if !self.no_reserve.load(Ordering::Relaxed) {
            match self.file.allocate(reserve.host.0, reserve.len).await {
                Err(error) if error.kind() == ErrorKind::Unsupported => self.no_reserve.store(true, Ordering::Relaxed),
                done => return done,
            }
        }
        // Old space can't be made certain then: it was written once.
        match reserve.is_new {
            true => self.write_metadata(IoBuf::try_zeroed(reserve.len as usize)?, reserve.host.0).await,
            false => Ok(()),
        }
    }
}
