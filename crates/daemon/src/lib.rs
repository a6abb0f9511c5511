// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The storage daemon: images served to many clients, under the control of monitors.
//!
//! [`run`] is all of it: it carries the [`Step`]s of a command line out, then serves until it is told to stop.

mod authorization;
mod chardevs;
mod commands;
mod control;
mod events;
mod faults;
mod inbox;
mod jobs;
mod metrics;
mod monitor;
mod nbd;
mod objects;
mod options;
mod schema;
mod shutdown;
mod socket;
mod state;
mod statistics;
mod untrusted;
mod vhost;
mod waiting;

pub use control::{
    MIN_REQUEST_MEMORY_BYTES, Message, REQUEST_MEMORY_BYTES, Ready, STOP_LIMIT, Served, Setup, StopReason, TURN_LIMIT,
    run, run_with, version,
};
pub use inbox::Sender;
pub use monitor::MonitorAddress;
pub use nbd::EXPOSURE;
pub use options::{
    Chardevs, Drive, Step, chardev_help, client_credentials, object_help, refused_object, tls_credentials,
};

/// What a client needs to ask a server for its exports.
pub mod client {
    pub use cowshed_nbd::{ClientOptions, ListedExport, device, list_exports};
    pub use cowshed_nbd_proto::flags::TransmissionFlags;
}
