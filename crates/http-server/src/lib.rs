// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Serves disks over HTTP/1.1, for reading: whole, or by byte ranges.
//!
//! ```text
//! Server::start(ServerConfig) ─ listen(address) ─ add(path, content) … remove(path) ─ stop(grace)
//! ```
//! - [`proto`]: bytes and structs, without I/O
//! - `content`: the served content; a node of the block graph is one
//! - `server`: the owner's side; `connection`: one client, from its first request to its last
//! - `sent_bytes`: ranges of bytes, for the owner
//! - `versions`: the versions of the contents that hosts have had

mod connection;
mod content;
pub mod proto;
mod sent_bytes;
mod server;
#[cfg(test)]
mod tests;
mod versions;

pub use content::{Content, Packing, Reading, Version};
pub use sent_bytes::SentBytes;
pub use server::{Event, EventHandler, Limits, Server, ServerConfig};
