// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The settings of serving a disk.

use cowshed_storage::rt::PollLimit;
use cowshed_types::{Error, Result};
use cowshed_ublk_proto::params::MAX_BLOCK_BYTES;
use cowshed_ublk_proto::{MAX_DEPTH, MAX_QUEUES};
use std::path::PathBuf;

/// Whether a device that waits for a server is taken over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recover {
    /// A new device is made.
    Off,
    /// It is taken over, and must be there.
    On,
    /// It is taken over where it is there, else made.
    Auto,
}

/// The settings of serving a disk.
#[derive(Clone, Debug)]
pub struct Config {
    /// The export's name. A device is taken over by an export of the same name only.
    pub id: String,
    /// Requests may change the disk.
    pub writable: bool,
    /// Each change is durable before it is answered.
    pub writethrough: bool,
    /// Logical block size in bytes: a power of two from 512 to 4096.
    pub block_bytes: u32,
    /// Queues, each with a thread: 1 to 64. The driver makes no more than there are processors.
    pub queues: u64,
    /// Requests of a queue: 1 to 4096.
    pub depth: u64,
    /// The number of the device. Without it the driver takes the first free one.
    pub device: Option<u32>,
    /// Whether a device that waits for a server is taken over.
    pub recover: Recover,
    /// The device belongs to the user of this process, without other rights.
    pub unprivileged: bool,
    /// The longest time that the threads look for requests before they sleep.
    pub poll_limit: PollLimit,
    /// A folder that lives as long as the kernel does, for a note that survives this process.
    pub notes: PathBuf,
}

impl Config {
    /// Checks the settings that a user may get wrong.
    ///
    /// # Errors
    /// The option and its range.
    pub fn check(&self) -> Result<()> {
        let wrong = |message: String| Err(Error::invalid_argument(message));
        if !self.block_bytes.is_power_of_two() || !(512..=MAX_BLOCK_BYTES).contains(&self.block_bytes) {
            return wrong(format!(
                "parameter logical-block-size must be a power of 2 between 512 and {MAX_BLOCK_BYTES}"
            ));
        }
        if !(1..=u64::from(MAX_QUEUES)).contains(&self.queues) {
            return wrong(format!(
                "num-queues is {}, and a device has 1 to {MAX_QUEUES}: one thread each",
                self.queues
            ));
        }
        if !(1..=u64::from(MAX_DEPTH)).contains(&self.depth) {
            return wrong(format!("queue-size is {}, and a queue has 1 to {MAX_DEPTH} requests", self.depth));
        }
        match (self.recover, self.device) {
            (Recover::On | Recover::Auto, None) => {
                wrong("'recover' needs the number of the device, 'device-id'".to_owned())
            }
            (_, Some(u32::MAX)) => wrong("device-id is no number of a device".to_owned()),
            _ => Ok(()),
        }
    }
}
