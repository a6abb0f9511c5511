// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Serves a disk as a block device of Linux, through the kernel's ublk driver.
//!
//! ```text
//! Server::start(driver, config, attachment) ─ look_at_size() … ─ stop()
//! ```
//! - `server`: the owner's view, and the thread that sends commands to the driver
//! - `device`: the device's coming, its takeover from a server that has died, its going
//! - `queue`: the thread of a queue; `requests` carries one request out
//! - `ledger`: changes that die with this process

mod config;
mod device;
mod ledger;
mod queue;
mod requests;
mod server;
#[cfg(test)]
mod tests;

pub use config::{Config, Recover};
pub use cowshed_ublk_proto as proto;
pub use device::open_driver;
pub use server::Server;
