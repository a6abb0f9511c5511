// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Options: one tree for every way to spell them, and one table of each driver's keys.

mod blkdebug;
mod keyval;
mod nbd;
mod schema;
pub(crate) mod schemas;
mod size;
mod tree;
mod typed;

pub(crate) use blkdebug::{BlkdebugOptions, read_config};
pub use keyval::{BareKey, parse_list, short_forms, switch};
pub(crate) use nbd::{nbd_client, nbd_of_uri, no_credentials};
pub use schema::size_refused;
pub use schema::{DriverKind, DriverSchema, Key, KeyType, REQUIRED, Schemas};
pub(crate) use schema::{check_common, check_list, first_leaf};
pub use schemas::{COMMON, key};
pub use size::parse_size;
pub use tree::BlockdevOptions;
pub(crate) use typed::{FileOptions, NullOptions, check_aio};

/// `on` or `off`, also `yes`, `no`, `true`, `false`, `y`, `n`, as QEMU takes them.
pub fn parse_on_off(text: &str) -> Option<bool> {
    tree::parse_bool(text)
}
