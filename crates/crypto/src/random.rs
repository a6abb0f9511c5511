// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Random bytes of the system.

use cowshed_types::{Error, Result};

/// Fills a buffer with the system's random bytes.
pub fn fill_random(bytes: &mut [u8]) -> Result<()> {
    getrandom::fill(bytes).map_err(|error| Error::internal(format!("the system gives no random bytes: {error}")))
}
