// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The storage daemon: images served to many clients, under the control of monitors.
//!
//! [`run`] is all of it: it carries the [`Step`]s of a command line out, then serves until the order to stop.

mod authorization;
mod chardevs;
mod commands;
mod control;
mod events;
mod failure;
mod faults;
mod inactive;
mod inbox;
mod inserted_filters;
mod jobs;
mod message;
mod metrics;
mod monitor;
mod monitor_properties;
mod nbd;
mod objects;
mod options;
mod schema;
mod servers;
mod shutdown;
mod socket;
mod state;
mod statistics;
mod untrusted;
mod version;
mod waiting;
mod warnings;

pub use control::{
    MIN_REQUEST_MEMORY_BYTES, REQUEST_MEMORY_BYTES, Ready, STOP_LIMIT, Setup, TURN_LIMIT, run, run_with,
};
pub use cowshed_fuse::GuardProgram;
pub use cowshed_nbd_server::{LOG_LOST, LOG_REFUSED};
pub use inbox::Sender;
pub use message::{Message, StopReason};
pub use monitor::MonitorAddress;
pub use nbd::EXPOSURE;
pub use options::{
    Chardevs, Drive, OFFSET, Step, chardev_help, check_object, check_server_credentials, client_credentials,
    is_object_of_machines, object_help, tls_credentials,
};
pub use warnings::{OPENING, print_warnings};

pub use state::Served;
pub use version::version;

/// The parts by which a client asks a server for its exports.
pub mod client {
    pub use cowshed_nbd::{ClientOptions, ListedExport, device, list_exports};
    pub use cowshed_nbd_proto::flags::TransmissionFlags;
}
