// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Serves a disk to a virtual machine over vhost-user-blk.
//!
//! ```text
//! Server::start(config, listener, attachment) ─ look_at_size() … ─ stop()
//! ```
//! - `server`: the owner's view, and the thread that takes front ends; `session`: one front end and its messages
//! - `queue`: the thread of one ring; `slots` has its requests in flight, `requests` carries one out
//! - `line` wakes a ring's front end; `memory` is the guest's
//! - `ledger`: changes that die with this process
//! - `simulated`: a ring on simulated memory, for tests

mod ledger;
mod line;
mod memory;
mod queue;
mod requests;
mod server;
mod session;
#[doc(hidden)]
pub mod simulated;
mod slots;
#[cfg(test)]
mod tests;

pub use cowshed_vhost_user_proto as proto;
pub use server::{Server, ServerConfig};
