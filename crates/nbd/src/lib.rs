// SPDX-License-Identifier: Apache-2.0 OR MIT
//! NBD connections: the stream that both sides share, plain or encrypted, and the client.
//!
//! - `stream`: bytes in both directions, with TLS where it was started
//! - `receiver`: received bytes that haven't been looked at yet
//! - `tls`: encryption (feature `tls`)
//! - `client`: an export as a file
//! - `device`: an export as a block device of the kernel's NBD driver

pub mod client;
pub mod device;
mod receiver;
mod stream;
mod tls;

pub use client::{Client, ClientOptions, ExportFacts, ListedExport, list_exports};
pub use receiver::Receiver;
pub use stream::Stream;
pub use tls::{ClientTls, ServerTls};
