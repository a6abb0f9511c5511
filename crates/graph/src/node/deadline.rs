// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The moment from which on an image has taken too long.

use cowshed_storage::rt;
use cowshed_types::{Error, ErrorKind, Result};
use std::time::Duration;

/// The end of the time that the policy gives an image. Under the simulator time is virtual.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline {
    /// On the clock of [`rt::now`].
    at: Duration,
    limit: Duration,
}

impl Deadline {
    /// A limit that counts from now on.
    pub(crate) fn from_now(limit: Duration) -> Deadline {
        Deadline { at: rt::now().saturating_add(limit), limit }
    }

    /// An error once the time is over. A limit of nothing is over at once.
    pub(crate) fn check(&self) -> Result<()> {
        if rt::now() < self.at {
            return Ok(());
        }
        let message = format!("the time limit of {} s for this image is used up", self.limit.as_secs_f64());
        Err(Error::new(ErrorKind::Limit, message))
    }
}
