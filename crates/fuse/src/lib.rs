// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Serves a disk as a file, through the kernel's FUSE.
//!
//! ```text
//! Server::start(config, attachment) ─ look_at_size() … ─ stop()
//! ```
//! - `server`: the owner's view; `session`: the thread that takes requests; `operations` carries one out
//! - `running`: a request until its reply; `caller`: the thread of a program that waits for it
//! - `attributes`: owner, mode, times and lengths of the file
//! - `mount`: the file system's coming and going; `guard`: the process that unmounts it, however this one ends

mod attributes;
mod caller;
mod guard;
mod mount;
mod operations;
mod running;
mod server;
mod session;

pub use cowshed_fuse_proto as proto;
pub use guard::{GuardProgram, MountServer, run_guard, unmount_in_order};
pub use mount::{AllowOther, FILE_SYSTEM, MountPoint, check_free, find_mount, unmount};
pub use server::{Server, ServerConfig};
